"""Optimizers that take batches, not gradients: Newton steps with the Gauss-Newton matrix by conjugate
gradients, and steps by the inverse of a Kronecker-factored matrix."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import inf, nan, sqrt
from typing import Any, NamedTuple, final, get_args

import torch
from torch import Tensor

from hoglib import errors
from hoglib._core.messages import results, validation
from hoglib._core.messages.communication import tell_sharers
from hoglib._core.problem import check_option_names
from hoglib._core.substrate.placement import refuse_sharded
from hoglib._core.torch_api import pytree
from hoglib.curvature.algebra.linear_operator import LinearOperator
from hoglib.curvature.algebra.vector_space import Space, check_named
from hoglib.curvature.batches.data import as_one_batch
from hoglib.curvature.kronecker.kfac_operator import KFACOperator, layout_of, saved_layout
from hoglib.curvature.kronecker.kronecker import (
    BlockLayout,
    InverseMethod,
    KroneckerBlock,
    KroneckerMatrix,
)
from hoglib.curvature.kronecker.model_run import EXACT_DIAGONAL, RowOrder
from hoglib.curvature.maps.fisher_metric import FisherKind
from hoglib.curvature.maps.gauss_newton import GaussNewtonKind
from hoglib.curvature.operators.operators import DatasetOperator, GGNOperator
from hoglib.curvature.sums.dataset_sum import DATA_OPTIONS, OPERATOR_OPTIONS
from hoglib.functional import trainable_params
from hoglib.verification.entry_points import examined_functions


class BatchOptimizer(torch.optim.Optimizer, ABC):
    """A torch optimizer with steps that compute the loss at a batch; `.grad` is not used.

    Args:
        loss: From `hoglib.functional_loss`.
        params: A dict of tensors by name; by default all trainable parameters of the loss's model.
        defaults: The options that ``state_dict()`` contains.
        options: The options of the operators that a step makes.
    """

    info: Any = None  # the record of the last step

    def __init__(
        self,
        loss: Any,
        params: dict[str, Tensor] | None,
        defaults: dict[str, Any],
        options: dict[str, Any],
    ) -> None:
        self._options = options
        self._loss = GaussNewtonKind().check_loss(loss)
        self._params: dict[str, Any] = trainable_params(loss.model) if params is None else params
        check_named(self._params)
        by_tensor: dict[int, str] = {}
        twice = [n for n, p in self._params.items() if by_tensor.setdefault(id(p), n) != n]
        if twice:  # a step would write two changes into one tensor
            raise errors.ArgumentValueError(
                f"params: expected each tensor under one name, got {validation.listing(twice)} under a "
                "second; leave them out, and read the tensor under its first name."
            )
        # parameters that `_batch` refuses once they are frozen: a step would move them anyway
        self._trained = [name for name, p in self._params.items() if p.requires_grad]
        super().__init__(list(self._params.items()), defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise for a second group: a step moves all parameters together.

        Args:
            param_group: The group.
        """
        if self.param_groups:
            raise errors.ArgumentValueError(
                "param_groups: expected one group, got a second; the matrix is that of all parameters. "
                "Give all of them as params."
            )
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; raise for the state of another optimizer, or of other parameters.

        Args:
            state_dict: From ``state_dict()``.
        """
        given = state_dict if isinstance(state_dict, Mapping) else {}
        group, *_ = given.get("param_groups") or [{}]
        # torch adds "differentiable" to the defaults when it loads a state or copies an optimizer
        lacking = {"state", *self.defaults} - {"differentiable", *given, *group}
        if lacking:
            raise errors.ArgumentValueError(
                f"state_dict: expected that of a {type(self).__name__}, got one without "
                f"{', '.join(sorted(lacking))}, of another optimizer; start with a fresh state."
            )
        state = state_dict["state"].items()
        saved = {i: own["direction"].shape for i, own in state if "direction" in own}
        # params are indices; names in a state of `torch.distributed.checkpoint.state_dict`
        shapes = dict(zip(group["params"], (p.shape for p in self._params.values()), strict=False))
        as_many = len(group["params"]) == len(self._params)
        if not as_many or not saved.items() <= shapes.items():
            raise errors.ArgumentValueError(
                f"state_dict: expected that of parameters {validation.listing([*self._params])} of "
                f"these shapes, got one of {validation.listing(group.get('param_names', []))}, whose "
                "number or shapes differ; load it beside the model that it was saved with."
            )
        super().load_state_dict(state_dict)

    @contextmanager
    def _step_of_all(self, name: str) -> Iterator[None]:
        """The context of a step: reports an error to the processes that share parameters or data."""
        try:
            with examined_functions(name):
                yield
        except BaseException as error:
            tell_sharers(error, self._params, self._options.get("processes"))
            raise

    def _batch(self, closure: Any) -> Any:
        """The batch of a step: closure, or closure() for a function."""
        frozen = [name for name in self._trained if not self._params[name].requires_grad]
        if frozen:  # a step would move them anyway
            raise errors.ArgumentValueError(
                f"params: expected parameters that require gradients, as they did at first, got "
                f"{validation.listing(frozen)} without; make a new optimizer of those to be trained."
            )
        batch = as_one_batch(closure() if callable(closure) else closure)
        # Lightning's closures return the loss detached
        is_loss = callable(closure) and isinstance(batch, Tensor) and not batch.dim()
        if batch is None or is_loss:
            raise errors.ArgumentTypeError(
                "step: expected a batch, or a function without arguments that returns one, got "
                f"{'the loss' if is_loss else None}; the matrix is computed on the batch: "
                "`optimizer.step((x, y))`."
            )
        return batch

    def _data_options(self) -> dict[str, Any]:
        """The data options, for more operators over the batch."""
        return {name: value for name, value in self._options.items() if name in DATA_OPTIONS}

    def _seeded(self, seed: int) -> torch.Generator:
        """A generator with a new seed at each step; on the CPU, so no device synchronizes."""
        return torch.Generator().manual_seed(seed + self.param_groups[0]["steps"])

    @torch.no_grad()
    def _set_params(self, space: Space, vector: Tensor) -> None:
        """Write a flat vector into the parameters."""
        for name, part in space.tree(vector).items():
            self._params[name].copy_(part)

    def _keep_direction(self, direction: dict[str, Tensor]) -> None:
        """Keep the direction of a step in the state."""
        for name, part in direction.items():
            self.state[self._params[name]]["direction"] = part.clone()

    def _last_direction(self, operator: LinearOperator) -> Tensor | None:
        """The direction of the last step as a flat vector; None before the first step."""
        last = {name: self.state[p].get("direction") for name, p in self._params.items()}
        none = not self.param_groups[0]["steps"] or any(part is None for part in last.values())
        return None if none else operator.ravel(last)

    def __getstate__(self) -> dict[str, Any]:
        """For copies: torch's method drops the attributes of subclasses."""
        return {**vars(self), **super().__getstate__()}

    @abstractmethod
    def step(self, closure: object = None) -> Tensor:  # type: ignore[override]
        """Take one step; return the loss before it.

        Args:
            closure: A batch, or a re-iterable of batches, or a function that returns a batch.
        """


def positive_damping(damping: Any) -> float:
    """The damping as a number; raises unless it is positive and finite."""
    if not 0 < validation.number("damping", damping) < inf:
        text = f"damping: expected a number greater than 0, got {damping}; 1 is usual."
        raise errors.ArgumentValueError(text)
    return float(damping)


def finite_or_infinite(A: DatasetOperator) -> float:
    """The loss, or infinity if it overflows because the step is too long."""
    try:
        A.value()
        return A._sum.number()  # the CPU has the number: no synchronization
    except (errors.NonFiniteError, errors.DistributedError) as error:
        if "NonFiniteError" in f"{type(error).__name__} {error}":  # in this process, or in another
            return inf
        raise


RAISED, LOWERED = 1.5, 2 / 3  # factors of the damping (Martens, 2010, section 4.1)
FARTHEST = 1e8  # bound of damping / first damping, and of the inverse ratio
ENOUGH = 1e-2  # a step must reach this fraction of the decrease that the slope predicts
HALVINGS = 20
NEWTON_OPTIONS = ("mode", *OPERATOR_OPTIONS)


@results.result
class NewtonStep(NamedTuple):
    """The record of a step of `NewtonCG`.

    Attributes:
        loss: The loss before the step.
        loss_after: The loss after the step.
        ratio: The decrease of the loss over the decrease of the quadratic model; nan if rounding hides
            it.
        damping: The damping of the step.
        length: The factor of the direction; 0 if no length lowered the loss.
        iterations: Iterations of conjugate gradients.
        products: Products of the Gauss-Newton matrix with one vector.
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
        damping <- 2/3 damping  if ratio > 3/4,  3/2 damping  if ratio < 1/4

    with the loss f at a batch, its gradient g and G as in `hoglib.ggn_vp`. a is the first of lr, lr/2,
    ... with f(params + a d) <= f + 0.01 a g^T d, at most 20 halvings; without such an a, the parameters
    stay and the damping rises. The damping stays within a factor of 1e8 of its first value.

    Batches should be large, because each step goes far on the evidence of one batch. The loss must be
    deterministic: dropout raises. `.grad` is neither read nor written. ``info`` is the `NewtonStep` of
    the last step; ``state_dict()`` has the direction and the damping.

    Args:
        loss: From `hoglib.functional_loss`.
        params: The parameters to optimize, a dict of tensors by name; by default
            `hoglib.trainable_params` of the loss's model.
        lr: The largest length a of a step.
        damping: The first damping.
        max_iter: The most iterations of conjugate gradients.
        stagnation_tol: End the iterations once the quadratic model hardly falls, as in
            `LinearOperator.solve`.
        warm_start: Conjugate gradients start from warm_start times the last direction; 0: from zero.
        preconditioner: For conjugate gradients. "kfac": the damped inverse of a `hoglib.KFACOperator`
            (kind="mc") of the step's batch. Or a function (G, damping) that returns a preconditioner
            for `LinearOperator.solve`. Default: none.
        preconditioner_every: Make a new preconditioner after so many steps, and in the first step of a
            resumed run.
        **options: Options of `hoglib.GGNOperator`, such as micro_batch, compile, processes and
            progress.
    Raises:
        NotPositiveDefiniteError: if G + damping I is not positive definite with the largest damping.
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

    info: NewtonStep | None = None

    def __init__(
        self,
        loss: object,
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
        check_option_names("NewtonCG", options, NEWTON_OPTIONS)
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
            validation.choice("preconditioner", preconditioner, ["kfac"])
        elif preconditioner is not None:
            validation.function("preconditioner", preconditioner)
        self._preconditioner = preconditioner
        # steps from one preconditioner to the next
        self._every = validation.at_least("preconditioner_every", preconditioner_every, 1)
        self._last: tuple[int, Any] | None = None  # step and preconditioner, when last made
        self._row_order: RowOrder | None = None  # KFAC's, set in the first step
        super().__init__(loss, params, defaults, options)
        # torch.distributed.checkpoint loads only existing entries of a state
        self._keep_direction({name: torch.zeros_like(p) for name, p in self._params.items()})

    def step(self, closure: object = None, curvature: object = None) -> Tensor:  # type: ignore[override]
        """Take one step.

        Args:
            closure: A batch, or a re-iterable of batches (all of the data), or a function without
                arguments that returns the batch, as Lightning's manual optimization passes it.
            curvature: The batch to compute G on; by default the step's batch. A smaller batch makes
                steps cheaper.
        Returns:
            The loss before the step.
        """
        with self._step_of_all("NewtonCG"):
            return self._step(self._batch(closure), curvature)

    def _step(self, batch: object, curvature: object) -> Tensor:
        group = self.param_groups[0]
        G = self._matrix(batch)
        model = G if curvature is None else self._matrix(curvature)
        precondition = self._prepared(model, batch if curvature is None else curvature)
        with G._algorithm("step"):  # one algorithm for the whole step: fewer synchronizations
            value, gradient = G.gradient()
            before = G._sum.number()  # the CPU has the number: no synchronization
            g = G.ravel(gradient)
            start = self._last_direction(G)
            if start is not None:
                start = group["warm_start"] * start
                start = start * (_dot_product(G, g, start) < 0)  # zero unless a descent direction
            d, along, dGd, iterations = self._direction(model, g, start, precondition)
        if G.space.true_in_all(not along and not bool(d.any())):
            self.info = NewtonStep(before, before, nan, group["damping"], 0, 0, 0, 0)
            return value
        self.param_groups[0]["steps"] += 1
        damping, products = group["damping"], model.count
        after, ratio, length, values = self._search(G, before, d, along, dGd)
        if ratio > 0.75:
            self._damp(LOWERED)
        elif ratio < 0.25 or not length:
            self._damp(RAISED)
        self._keep_direction(G.unravel(d))
        self.info = NewtonStep(before, after, ratio, damping, length, iterations, products, values)
        return value

    def _matrix(self, batch: object) -> GGNOperator:
        """The Gauss-Newton matrix at a batch."""
        return GGNOperator(self._loss, self._params, batch, **self._options)

    def _prepared(self, G: GGNOperator, batch: object) -> Any:
        """The preconditioner of this step: a new one, or the last one."""
        make, steps = self._preconditioner, self.param_groups[0]["steps"]
        if make is None:
            return None
        if self._last is None or steps - self._last[0] >= self._every:
            damping = self.param_groups[0]["damping"]
            if isinstance(make, str):
                drawn = {"kind": "mc", "generator": self._seeded(0), **self._data_options()}
                K = KFACOperator(self._loss, self._params, batch, **drawn)
                K.row_order, K.leaves_out = self._row_order, True
                self._last = steps, K.inverse(damping)
                self._row_order = K.row_order
            else:
                self._last = steps, make(G, damping)
        return self._last[1]

    def _direction(
        self, G: GGNOperator, g: Tensor, start: Tensor | None, precondition: object
    ) -> tuple[Tensor, float, float, int]:
        """The direction d, g^T d, d^T G d, and the iterations of conjugate gradients."""
        group, iterations = self.param_groups[0], 0
        while True:
            try:
                d, info = G.solve(
                    -g,
                    damping=group["damping"],
                    max_iter=group["max_iter"],
                    x0=start,
                    stagnation_tol=group["stagnation_tol"],
                    preconditioner=precondition,
                    return_info=True,
                )
            except errors.NotPositiveDefiniteError:
                # Try again with ten times the damping, up to the bound.
                if not self._damp(10):
                    raise
                continue
            iterations += info.iterations
            slope, dGd = read_numbers(_dot_product(G, g, d), _dot_product(G, d, G @ d))
            # From a distant start, few iterations may end worse than zero: then start from zero.
            if start is None or slope + dGd / 2 < 0:
                return d, slope, dGd, iterations
            start = None

    def _search(
        self, G: GGNOperator, value: float, d: Tensor, slope: float, dGd: float
    ) -> tuple[float, float, float, int]:
        """Search along d; returns the loss found, the ratio at the first length, the length, and the
        number of evaluations."""
        before = G.ravel(self._params).clone()
        length: float = self.param_groups[0]["lr"]
        model = length * slope + length**2 * dGd / 2
        # A smaller difference of losses is rounding.
        rounding = 10 * torch.finfo(G.dtype).eps * abs(value)
        ratio = nan
        for tried in range(1, HALVINGS + 2):
            self._set_params(G.space, before + length * d)
            after = finite_or_infinite(G)
            if tried == 1 and -model > rounding:
                ratio = (after - value) / model
            if after <= value + ENOUGH * length * slope + rounding:
                return after, ratio, length, tried
            length /= 2
        self._set_params(G.space, before)
        return value, ratio, 0.0, tried

    def _damp(self, factor: float) -> bool:
        """Multiply the damping by a factor, within its bounds; returns whether it changed."""
        group = self.param_groups[0]
        first = group["first_damping"]
        damping = min(max(factor * group["damping"], first / FARTHEST), first * FARTHEST)
        before, group["damping"] = group["damping"], damping
        return bool(damping != before)


def read_numbers(*scalars: Tensor) -> list[float]:
    """The values of scalars, by one synchronization."""
    return torch.stack([x.double() for x in scalars]).tolist()


def _dot_product(G: GGNOperator, a: Tensor, b: Tensor) -> Tensor:
    return G.space.dots((a[None], b[None]))[0, 0]


OF_FACTORS = ("approximation", "joint_bias", "likelihood", "num_samples", "unsupported")
KFAC_OPTIONS = (*OF_FACTORS, *(name for name in DATA_OPTIONS if name != "check_deterministic"))
FACTORS = ("A", "G")  # the moving averages of a block, in the state
ADAPT_EVERY, ADAPTED = 5, 0.95**5  # Martens and Grosse, 2015, section 6.5
# the damped inverse of a block, in the state
INVERSE = ("inverse_A", "inverse_G", "inverse_values")


@results.result
class KFACStep(NamedTuple):
    """The record of a step of `KFAC`.

    Attributes:
        loss: The loss before the step.
        slope: g^T d, the change of the loss to first order along the direction d; negative.
        length: |v|, with the change v of the parameters.
        damping: The damping after the step.
        ratio: The decrease of the loss over the decrease of the quadratic model; nan if it was not
            computed.
        products: Products of the Gauss-Newton matrix with one vector.
        values: Evaluations of the loss without a gradient; the gradient was computed once.
        factor_batches: The number of batches with new factors, 1 or 0.
    """

    loss: float
    slope: float
    length: float
    damping: float
    ratio: float
    products: int
    values: int
    factor_batches: int


@final
class KFAC(BatchOptimizer):
    r"""Steps by the damped inverse of a Kronecker-factored Gauss-Newton or Fisher matrix.

        A <- decay A + (1 - decay) A_batch, also G                every factors_every steps
        d = -(G ⊗ A + damping I)^-1 (g + weight_decay params)     the inverse, every inverse_every steps
        v <- lr (a d + b v)               params <- params + v

    with the gradient g of the loss at a batch, and the factors A and G of `hoglib.KFACOperator`.

    - rescale=True: a and b minimize the quadratic model g^T v + v^T (M + damping I) v / 2 of the batch,
      by two products with its Gauss-Newton matrix M. Every five steps, the damping is multiplied by
      0.95^5 if the loss fell by more than 3/4 of the model's prediction, and divided by 0.95^5 if by
      less than 1/4.
    - rescale=False: v <- momentum v + lr nu d, nu = min(1, sqrt(kl_clip / (lr^2 |g^T d|))), with a
      fixed damping.

    The moving averages are divided by 1 - decay^t, and so start with the first batch. The loss must not
    mix examples: batch norm must be in eval mode. `.grad` is not used. ``info`` is the `KFACStep` of
    the last step. ``state_dict()`` has factors, inverses and v: a resumed run makes equal steps.

    Args:
        loss: From `hoglib.functional_loss`.
        params: The parameters to optimize, a dict of tensors by name; by default all trainable ones.
        lr: As above.
        damping: The first damping. It adapts by a factor of at most 0.77 in five steps: try powers of
            ten.
        rescale: Choose the step by the quadratic model, as above.
        momentum: As above, for rescale=False.
        decay: The decay of the moving averages of the factors.
        weight_decay: The factor of the parameters in the gradient.
        kl_clip: For rescale=False, the bound of lr^2 g^T K^-1 g, twice the change of the outputs'
            distribution to second order; None for no bound.
        method: "exact", "pi" or "factors", as in ``KFACOperator.inverse``.
        factors_every: Update the factors after so many steps.
        inverse_every: Compute the inverse after so many steps.
        kind: As for `hoglib.KFACOperator`; "mc" takes one backward pass for the factors.
        seed: Seeds the draws of kind="mc".
        **options: Options of `hoglib.KFACOperator`, such as approximation, joint_bias, unsupported,
            processes.
    Raises:
        ArgumentTypeError: for an unknown option.
        UnsupportedError: for parameters of layers that `hoglib.KFACOperator` refuses.
    References:
        Martens and Grosse, Optimizing Neural Networks with Kronecker-factored Approximate Curvature,
        2015, sections 6.4, 6.5 and 7. Ba, Grosse and Martens, Distributed Second-order Optimization
        using Kronecker-factored Approximations, 2017, section 5 (kl_clip).
    Example:
        >>> model = nn.Linear(1, 1, bias=False)
        >>> loss = hog.functional_loss(model, F.mse_loss)
        >>> optimizer = hog.curvature.KFAC(loss, damping=1e-6)
        >>> value = optimizer.step((torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [6.0]])))
        >>> model.weight  # one step is enough for a quadratic loss
        Parameter containing:
        tensor([[3.0000]], requires_grad=True)
    """

    info: KFACStep | None = None

    def __init__(
        self,
        loss: object,
        params: dict[str, Tensor] | None = None,
        *,
        lr: float = 1.0,
        damping: float = 1.0,
        rescale: bool = True,
        momentum: float = 0.9,
        decay: float = 0.95,
        weight_decay: float = 0.0,
        kl_clip: float | None = 1e-2,
        method: InverseMethod = "exact",
        factors_every: int = 1,
        inverse_every: int = 1,
        kind: FisherKind = "mc",
        seed: int = 0,
        **options: Any,
    ) -> None:
        check_option_names("KFAC", options, KFAC_OPTIONS)
        defaults: dict[str, Any] = {
            "lr": validation.positive("lr", lr),
            "damping": positive_damping(damping),
            "rescale": validation.boolean("rescale", rescale),
            "momentum": validation.fraction("momentum", momentum, below_one=True, usual=0.9),
            "decay": validation.fraction("decay", decay, below_one=True, usual=0.95),
            "weight_decay": validation.number("weight_decay", weight_decay, minimum=0),
            "kl_clip": None if kl_clip is None else validation.positive("kl_clip", kl_clip),
            "method": validation.choice("method", method, get_args(InverseMethod)),
            "factors_every": validation.at_least("factors_every", factors_every, 1),
            "inverse_every": validation.at_least("inverse_every", inverse_every, 1),
            "seed": validation.at_least("seed", seed, 0),
            "steps": 0,
            "averaged": 0,  # number of batches in the moving averages
            "layouts": [],
        }
        self._row_order: RowOrder | None = None  # how layers are read; set in the first step
        super().__init__(loss, params, defaults, {**options, "kind": kind})
        instead = "precondition the gradients of a torch optimizer by `KFACOperator.precondition_`"
        refuse_sharded("KFAC", self._params.values(), instead=instead)

    def step(self, closure: object = None) -> Tensor:  # type: ignore[override]
        """Take one step.

        Args:
            closure: A batch, or a re-iterable of batches, or a function without arguments that returns
                the batch, as Lightning's manual optimization passes it.
        Returns:
            The loss before the step.
        """
        with self._step_of_all("KFAC"):
            return self._step(self._batch(closure))

    def _step(self, batch: object) -> Tensor:
        group = self.param_groups[0]
        seeded = self._seeded(group["seed"])
        K = KFACOperator(self._loss, self._params, batch, generator=seeded, **self._options)
        K.row_order, K.leaves_out = self._row_order, True
        value, gradient = K.gradient()
        with torch.no_grad():
            g = K.ravel(gradient)
            new_factors, before = group["steps"] % group["factors_every"] == 0, group["layouts"]
            if new_factors:
                self._average(K)
            # The first step has set the layouts.
            layouts = [layout_of(one, list(self._params)) for one in group["layouts"]]
            if group["steps"] % group["inverse_every"] == 0 or group["layouts"] != before:
                self._invert(K, layouts)
            inverse = KroneckerMatrix(K.space, [self._inverse_of(layout) for layout in layouts])
            step, along, model, products = self._move(K, batch, inverse, g)
            change = K.unravel(step)
            self._keep_direction(change)
            for name, part in change.items():
                self._params[name].add_(part)
        before, slope, expected, length = read_numbers(value, along, model, step.norm())
        ratio, adapts = nan, group["rescale"] and group["steps"] % ADAPT_EVERY == 0 and expected < 0
        if adapts:
            # K reads the parameters, which the step has changed: the loss after the step.
            ratio = (finite_or_infinite(K) - before) / expected
            if ratio > 0.75:
                group["damping"] *= ADAPTED
            elif ratio < 0.25:
                group["damping"] /= ADAPTED
        self._row_order = K.row_order
        group["steps"] += 1
        counts = products, int(adapts), int(new_factors)
        self.info = KFACStep(before, slope, length, group["damping"], ratio, *counts)
        return value

    def _average(self, K: KFACOperator) -> None:
        """Add the factors of a batch to the moving averages.

        An uncalled layer has G = 0; its A would be a mean over no rows, so the average of A stays.
        """
        group = self.param_groups[0]
        decay, names, count = group["decay"], pytree.paths(K.space.params), group["averaged"]
        blocks = {block.layout: block for block in K.blocks()}
        known = {layout_of(one, names): None for one in group["layouts"]}
        for layout in [one for one in blocks if one not in known]:
            rows = [one for one in known if any(one.overlaps(region) for region in layout.regions)]
            if rows and layout not in K.called:
                del blocks[layout]  # a block of zeros for parameters of layers in earlier batches
            elif any(one.role.name != EXACT_DIAGONAL or self._has_average(one) for one in rows):
                raise errors.ArgumentValueError(
                    "step: expected the layers of the first step, got others: the model calls other "
                    "layers, or parts of their weights, from batch to batch. Give only those that it "
                    "always calls."
                )
            # The first batch that calls a layer replaces the block of zeros.
            for one in rows if layout in blocks else ():
                known.pop(one)
                store, prefix = self._place(one)
                for name in (*FACTORS, *INVERSE):
                    store.pop(prefix + name, None)
        layouts = sorted({**known, **blocks}, key=lambda layout: layout.first)
        group["layouts"] = [saved_layout(layout, names) for layout in layouts]
        for layout in layouts:
            store, prefix = self._place(layout)
            for name in FACTORS:
                before = store.get(prefix + name)
                mean = name == "A" and layout.role.matrix == "kronecker"
                old, new = decay, 1 - decay
                if mean and before is None:  # as if all batches before had this A
                    new = 1 - decay ** (count + 1)
                elif mean and layout not in K.called:
                    # Compensates the larger divisor in `_average_of`: the corrected average stays.
                    old = (1 - decay ** (count + 1)) / (1 - decay**count)
                total = 0.0 if before is None else old * before
                if layout in K.called or before is None:
                    total = total + new * getattr(blocks[layout], name)
                store[prefix + name] = total
        group["averaged"] += 1

    def _has_average(self, layout: BlockLayout) -> bool:
        """Whether the average of a diagonal has a nonzero entry."""
        store, prefix = self._place(layout)
        return bool(store[prefix + "A"].any())

    def _invert(self, K: KFACOperator, layouts: list[BlockLayout]) -> None:
        """Compute the damped inverse of the moving averages."""
        group = self.param_groups[0]
        averages = KroneckerMatrix(K.space, [self._average_of(layout) for layout in layouts])
        for block in averages.inverse(group["damping"], method=group["method"]).blocks():
            store, prefix = self._place(block.layout)
            for name, tensor in zip(INVERSE, (block.A, block.G, block.values), strict=True):
                if tensor is not None:
                    store[prefix + name] = tensor

    def _average_of(self, layout: BlockLayout) -> KroneckerBlock:
        """The block of moving averages, corrected for their start at zero."""
        group, (store, prefix) = self.param_groups[0], self._place(layout)
        correction = 1 - group["decay"] ** group["averaged"]
        A, G = (store[prefix + name] / correction for name in FACTORS)
        if layout.role.matrix != "kronecker":
            G = torch.ones_like(G)  # a constant, not an average
        return KroneckerBlock(layout, A, G)

    def _inverse_of(self, layout: BlockLayout) -> KroneckerBlock:
        """The block of the last damped inverse."""
        store, prefix = self._place(layout)
        A, G, values = (store.get(prefix + name) for name in INVERSE)
        return KroneckerBlock(layout, A, G, values)  # type: ignore[arg-type]  # from the first step on

    def _place(self, layout: BlockLayout) -> tuple[dict[str, Any], str]:
        """The state of the block's first parameter, and a prefix of the block's keys."""
        region = layout.first
        store = self.state[list(self._params.values())[region.leaf]]
        return store, f"{region.start}:{region.stop} "

    def _move(
        self, K: KFACOperator, batch: object, inverse: KroneckerMatrix, g: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, int]:
        """The change of the parameters, the slope along d, the change of the loss in the quadratic
        model, and the number of products."""
        group = self.param_groups[0]
        if group["weight_decay"]:
            g = g + group["weight_decay"] * K.ravel(self._params)
        d = -(inverse @ g)
        slope = g @ d
        before = self._last_direction(K)
        if group["rescale"]:
            V = d[:, None] if before is None else torch.stack([d, before], 1)
            step, expected = self._minimizer(batch, V, g)
            return group["lr"] * step, slope, expected, V.shape[1]
        if group["kl_clip"] is not None and (size := abs(float(slope))):
            d = d * min(1.0, sqrt(group["kl_clip"] / (group["lr"] ** 2 * size)))
        if before is not None:
            d = d + group["momentum"] * before / group["lr"]
        return group["lr"] * d, slope, slope * nan, 0

    def _minimizer(self, batch: object, V: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """The minimizer of g^T s + s^T (G + damping I) s / 2 over the columns of V, and the minimum."""
        group = self.param_groups[0]
        G = GGNOperator(self._loss, self._params, batch, **self._data_options())
        shift = group["damping"] + group["weight_decay"]
        M = (V.T @ (G @ V) + shift * V.T @ V).double()
        b = -(V.T @ g).double()
        # Columns may differ in length, and be parallel: scale them, and take the pseudoinverse.
        sizes = M.diagonal().clamp(min=torch.finfo(M.dtype).tiny).sqrt()
        scaled = M / sizes / sizes[:, None]
        c = torch.linalg.pinv(scaled, hermitian=True, rtol=1e-6) @ (b / sizes) / sizes
        return V @ c.to(V), -(b @ c) / 2
