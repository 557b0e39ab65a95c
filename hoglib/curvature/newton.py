"""Optimizers that are given batches, not gradients, and Newton steps with the Gauss-Newton matrix."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from math import inf, nan
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from hoglib._core import validation
from hoglib.curvature.dataset_sum import DATA_OPTIONS, OPERATOR_OPTIONS
from hoglib.curvature.gauss_newton import GaussNewtonKind
from hoglib.curvature.kfac_operator import KFACOperator
from hoglib.curvature.operators import GGNOperator
from hoglib.curvature.vector_space import check_named
from hoglib.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    NonFiniteError,
    NotPositiveDefiniteError,
)
from hoglib.functional import trainable_params
from hoglib.verification.entry_points import examined_functions


def refuse_unknown(
    caller: str, options: dict[str, Any], known: Collection[str], operator: str
) -> None:
    """Raises for an option that an optimizer cannot pass on to the operator of its steps."""
    unknown = sorted(set(options).difference(known))
    if unknown:
        raise ArgumentTypeError(
            f"{caller}: expected options of {operator}, {', '.join(sorted(known))}, got "
            f"{', '.join(unknown)}."
        )


class BatchOptimizer(torch.optim.Optimizer, ABC):
    """An optimizer of torch whose steps compute the loss at a batch; `.grad` is not used.

    Args:
        loss: From `hoglib.functional_loss`.
        params: A dict of tensors by name; by default all trainable ones of the loss's model.
        defaults: The options, which ``state_dict()`` contains.
    """

    info: Any  # about the last step

    def __init__(
        self, loss: Any, params: dict[str, Tensor] | None, defaults: dict[str, Any]
    ) -> None:
        self._loss = GaussNewtonKind().check_loss(loss)
        self._params: dict[str, Any] = trainable_params(loss.model) if params is None else params
        check_named(self._params)
        self._trained = [name for name, p in self._params.items() if p.requires_grad]
        super().__init__(list(self._params.items()), defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise for a second group: a step is a step of all parameters.

        Args:
            param_group: The group.
        """
        if self.param_groups:
            raise ArgumentValueError(
                "param_groups: expected one group, got a second; the matrix is that of all parameters. "
                "Give all of them as params."
            )
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; raise for that of another optimizer.

        Args:
            state_dict: From ``state_dict()``.
        """
        lacking = self.defaults.keys() - state_dict["param_groups"][0].keys()
        if lacking:
            raise ArgumentValueError(
                f"state_dict: expected that of a {type(self).__name__}, got one without "
                f"{', '.join(sorted(lacking))}, of another optimizer; start with a fresh state."
            )
        super().load_state_dict(state_dict)

    def _batch(self, closure: Any) -> Any:
        """The batch that a step is given, as it is or by a function."""
        frozen = [name for name in self._trained if not self._params[name].requires_grad]
        if frozen:  # a step would move them all the same
            raise ArgumentValueError(
                f"params: expected parameters that require gradients, as they did at first, got "
                f"{validation.listing(frozen)} without; make a new optimizer of those to be trained."
            )
        batch = closure() if callable(closure) else closure
        if batch is None:
            raise ArgumentTypeError(
                "step: expected a batch, or a function without arguments that returns one, got None; "
                "the matrix is computed on the batch: `optimizer.step((x, y))`."
            )
        return batch

    def __getstate__(self) -> dict[str, Any]:
        """For copies: that of torch leaves out the attributes of subclasses."""
        return {**vars(self), **super().__getstate__()}

    @abstractmethod
    def step(self, closure: Any = None) -> Tensor:  # type: ignore[override]
        """Take one step; return the loss before it.

        Args:
            closure: A batch, or a re-iterable of batches, or a function that returns one.
        """


def positive_damping(damping: Any) -> float:
    if not 0 < validation.number("damping", damping) < inf:
        raise ArgumentValueError(
            f"damping: expected a number greater than 0, got {damping}; 1 is usual."
        )
    return float(damping)


def finite_or_infinite(loss: Callable[[], Tensor]) -> float:
    """The loss, or infinity where it overflows, because the step is too long."""
    try:
        return float(loss())
    except NonFiniteError:
        return inf


RAISED, LOWERED = 1.5, 2 / 3  # factors of the damping
FARTHEST = 1e8  # by which the damping may differ from the first, either way
ENOUGH = 1e-2  # of the decrease that the slope predicts
HALVINGS = 20
OPTIONS, KFAC_OPTIONS = {"mode", *OPERATOR_OPTIONS}, set(DATA_OPTIONS)
Tree = Any


class NewtonStep(NamedTuple):
    """What a step of `NewtonCG` did.

    Attributes:
        loss: Before the step.
        loss_after: After it.
        ratio: Of the decrease to that of the quadratic model; nan where rounding hides it.
        damping: With which the step was computed.
        length: The factor of the direction; 0 where no length lowered the loss.
        iterations: Of conjugate gradients.
        products: Of the Gauss-Newton matrix with a vector.
        values: Evaluations of the loss without a gradient; the gradient was computed once.
    """

    loss: float
    loss_after: float
    ratio: float
    damping: float
    length: float
    iterations: int
    products: int
    values: int


@final
class NewtonCG(BatchOptimizer):
    r"""Damped Newton steps with the Gauss-Newton matrix, by conjugate gradients.

        (G + damping I) d = -g        params <- params + a d
        m(d) = g^T d + d^T G d / 2        ratio = (f(params + d) - f(params)) / m(d)
        damping <- 2/3 damping  where ratio > 3/4,  3/2 damping  where ratio < 1/4

    with the loss f at a batch, its gradient g and G as in `hoglib.ggn_vp`. a is the first of lr, lr/2,
    ... with f(params + a d) <= f + 0.01 a g^T d, at most 20 halvings; where there is none, the
    parameters stay and the damping rises. The damping stays within a factor of 1e8 of its first value.

    Batches should be large, because a step goes far by what one batch says. The loss must be the same
    at each evaluation: dropout raises. `.grad` is neither read nor written. ``info`` is the
    `NewtonStep` of the last step; the state, direction and damping, is in ``state_dict()``.

    Args:
        loss: From `hoglib.functional_loss`.
        params: The parameters to optimize, a dict of tensors by name; by default all that
            `hoglib.trainable_params` of the loss's model returns.
        lr: The largest length a of a step.
        damping: The first damping.
        max_iter: Iterations of `LinearOperator.solve`, at most.
        stagnation_tol: End these where the quadratic model hardly falls any more; that of
            `LinearOperator.solve`.
        warm_start: The part of the last direction from which conjugate gradients start; 0 for none.
        preconditioner: Of conjugate gradients: "kfac", the damped inverse of a
            `hoglib.KFACOperator` of the step's batch, kind="mc"; or a function (G, damping) of the
            matrix that returns one, as `LinearOperator.solve` takes it. Default: none.
        preconditioner_every: Steps from one preconditioner to the next; a run that is resumed begins
            with a new one.
        **options: Of `hoglib.GGNOperator`, such as micro_batch, compile, processes and progress.
    Raises:
        NotPositiveDefiniteError: for a G that is not positive definite with the largest damping.
        ArgumentValueError: for a second parameter group.
    References:
        Martens, Deep Learning via Hessian-free Optimization, 2010, section 4.
        More, The Levenberg-Marquardt Algorithm: Implementation and Theory, 1978.
        Byrd, Chin, Neveitt and Nocedal, On the Use of Stochastic Hessian Information in Optimization
        Methods for Machine Learning, 2011 (curvature).
    Example:
        >>> model = nn.Linear(1, 1, bias=False)
        >>> optimizer = hog.curvature.NewtonCG(hog.functional_loss(model, F.mse_loss), damping=1e-6)
        >>> value = optimizer.step((torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [6.0]])))
        >>> model.weight  # one step is enough for a quadratic loss
        Parameter containing:
        tensor([[3.0000]], requires_grad=True)
    """

    def __init__(
        self,
        loss: Any,
        params: dict[str, Tensor] | None = None,
        *,
        lr: float = 1.0,
        damping: float = 1.0,
        max_iter: int = 250,
        stagnation_tol: float = 5e-4,
        warm_start: float = 0.95,
        preconditioner: str | Callable[[GGNOperator, float], Any] | None = None,
        preconditioner_every: int = 1,
        **options: Any,
    ) -> None:
        self._options = options
        refuse_unknown("NewtonCG", options, OPTIONS, "GGNOperator")
        defaults = {
            "lr": validation.positive("lr", lr),
            "damping": positive_damping(damping),
            "first_damping": float(damping),
            "max_iter": validation.at_least("max_iter", max_iter, 1),
            "stagnation_tol": validation.number("stagnation_tol", stagnation_tol, minimum=0),
            "warm_start": validation.fraction("warm_start", warm_start, usual=0.95),
            "steps": 0,
        }
        if isinstance(preconditioner, str):
            validation.one_of("preconditioner", preconditioner, ["kfac"])
        elif preconditioner is not None:
            validation.function("preconditioner", preconditioner)
        self._preconditioner = preconditioner
        self._every = validation.at_least("preconditioner_every", preconditioner_every, 1)
        self._last: tuple[int, Any] | None = None  # the step of the last one, and that
        self.info: NewtonStep | None = None
        super().__init__(loss, params, defaults)

    def step(self, closure: Any = None, curvature: Any = None) -> Tensor:  # type: ignore[override]
        """Take one step.

        Args:
            closure: A batch, or a re-iterable of batches (all of the data), or a function without
                arguments that returns one, as Lightning's manual optimization passes it.
            curvature: The batch that G is computed on; the same by default. A part of it makes steps
                cheaper.
        Returns:
            The loss before the step.
        """
        with examined_functions("NewtonCG"):
            return self._step(self._batch(closure), curvature)

    def _step(self, batch: Any, curvature: Any) -> Tensor:
        group = self.param_groups[0]
        G = self._matrix(batch)
        value, gradient = G.gradient()
        g = G.ravel(gradient)
        if G.space.everywhere(not bool(g.any())):
            unmoved = float(value)
            self.info = NewtonStep(unmoved, unmoved, nan, group["damping"], 0, 0, 0, 0)
            return value
        model = G if curvature is None else self._matrix(curvature)
        precondition = self._prepared(model, batch if curvature is None else curvature)
        d, dGd, iterations = self._direction(model, g, precondition)
        self.param_groups[0]["steps"] += 1
        slope = _dot(G, g, d)
        damping, products = group["damping"], model.count
        after, ratio, length, values = self._search(G, float(value), d, slope, dGd)
        if ratio > 0.75:
            self._damp(LOWERED)
        elif ratio < 0.25 or not length:
            self._damp(RAISED)
        for name, part in G.unravel(d).items():
            self.state[self._params[name]]["direction"] = part.clone()
        self.info = NewtonStep(
            float(value), after, ratio, damping, length, iterations, products, values
        )
        return value

    def _matrix(self, batch: Any) -> GGNOperator:
        """The Gauss-Newton matrix at a batch."""
        return GGNOperator(self._loss, self._params, batch, **self._options)

    def _prepared(self, G: GGNOperator, batch: Any) -> Any:
        """The preconditioner of this step: a new one, or one of the last steps."""
        make, steps = self._preconditioner, self.param_groups[0]["steps"]
        if make is None:
            return None
        if self._last is None or steps - self._last[0] >= self._every:
            damping = self.param_groups[0]["damping"]
            found = self._kfac(batch, damping) if isinstance(make, str) else make(G, damping)
            self._last = steps, found
        return self._last[1]

    def _kfac(self, batch: Any, damping: float) -> Any:
        options = {name: self._options[name] for name in KFAC_OPTIONS & self._options.keys()}
        seeded = torch.Generator(next(iter(self._params.values())).device).manual_seed(
            self.param_groups[0]["steps"]
        )
        K = KFACOperator(self._loss, self._params, batch, kind="mc", generator=seeded, **options)
        return K.inverse(damping)

    def _direction(self, G: GGNOperator, g: Tensor, precondition: Any) -> tuple[Tensor, float, int]:
        """The direction d, d^T G d, and the iterations of conjugate gradients."""
        group = self.param_groups[0]
        start, iterations = self._start(G, g), 0
        while True:
            try:
                d, info = G.solve(
                    -g, damping=group["damping"], max_iter=group["max_iter"], x0=start,
                    stagnation_tol=group["stagnation_tol"], preconditioner=precondition,
                    return_info=True,
                )  # fmt: skip
            except NotPositiveDefiniteError:
                if not self._damp(10):
                    raise
                continue
            iterations += info.iterations
            dGd = _dot(G, d, G @ d)
            # a distant start and few iterations may give worse than a start from zero
            if start is None or _dot(G, g, d) + dGd / 2 < 0:
                return d, dGd, iterations
            start = None

    def _start(self, G: GGNOperator, g: Tensor) -> Tensor | None:
        """A part of the last direction, where it descends."""
        last = {name: self.state[p].get("direction") for name, p in self._params.items()}
        part = self.param_groups[0]["warm_start"]
        if not part or any(d is None for d in last.values()):
            return None
        start = part * G.ravel(last)
        return start if _dot(G, g, start) < 0 else None

    def _search(
        self, G: GGNOperator, value: float, d: Tensor, slope: float, dGd: float
    ) -> tuple[float, float, float, int]:
        """Search along d; the loss found, the ratio at the first length, the length, evaluations."""
        before = G.ravel(self._params).clone()
        length: float = self.param_groups[0]["lr"]
        model = length * slope + length**2 * dGd / 2
        # smaller differences of losses are rounding
        rounding = 10 * torch.finfo(G.dtype).eps * abs(value)
        ratio = nan
        for tried in range(1, HALVINGS + 2):
            self._set_params(G, before + length * d)
            after = finite_or_infinite(G.value)
            if tried == 1 and -model > rounding:
                ratio = (after - value) / model
            if after <= value + ENOUGH * length * slope + rounding:
                return after, ratio, length, tried
            length /= 2
        self._set_params(G, before)
        return value, ratio, 0.0, tried

    @torch.no_grad()
    def _set_params(self, G: GGNOperator, vector: Tensor) -> None:
        """Write a flat vector into the parameters."""
        for name, part in G.unravel(vector).items():
            self._params[name].copy_(part)

    def _damp(self, factor: float) -> bool:
        """Multiply the damping by a factor; whether that changed it."""
        group = self.param_groups[0]
        first = group["first_damping"]
        damping = min(max(factor * group["damping"], first / FARTHEST), first * FARTHEST)
        changed = bool(damping != group["damping"])
        group["damping"] = damping
        return changed


def _dot(G: GGNOperator, a: Tensor, b: Tensor) -> float:
    return float(G.space.dots((a[None], b[None]))[0, 0])
