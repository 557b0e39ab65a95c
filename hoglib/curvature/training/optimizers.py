"""Optimizers that take batches, not gradients: Newton steps with the Gauss-Newton matrix, by
conjugate gradients or of least-squares problems, and steps by the inverse of a Kronecker-factored
matrix."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import frexp, inf, isfinite, nan, sqrt
from typing import Any, Literal, NamedTuple, final, get_args

import torch
from torch import Tensor, nn

from hoglib import errors
from hoglib._core.messages import results, validation
from hoglib._core.messages.communication import tell_sharers
from hoglib._core.problem import check_option_names
from hoglib._core.runtime.logger import LOGGER
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
from hoglib.curvature.operators.jacobian_operator import OPTIONS as JACOBIAN_OPTIONS
from hoglib.curvature.operators.jacobian_operator import JacobianOperator
from hoglib.curvature.operators.operators import DatasetOperator, GGNOperator
from hoglib.curvature.sums.dataset_sum import DATA_OPTIONS, OPERATOR_OPTIONS
from hoglib.functional import functional_loss, trainable_params
from hoglib.verification.entry_points import examined_functions


class BatchOptimizer(torch.optim.Optimizer, ABC):
    """A torch optimizer with steps that compute the loss at a batch; `.grad` is not used.

    Args:
        loss: From `hoglib.functional_loss`.
        params: A dict of tensors by name; by default all trainable parameters of the loss's model.
        defaults: The options that ``state_dict()`` contains.
        options: The options of the operators that a step makes.
    """

    info: Any = None  # what the last step did

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
        # a step moves all parameters: they must require gradients from now on
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
        # torch adds "differentiable" to the defaults when it loads a state, or copies an optimizer
        lacking = {"state", *self.defaults} - {"differentiable", *given, *group}
        if lacking:
            raise errors.ArgumentValueError(
                f"state_dict: expected that of a {type(self).__name__}, got one without "
                f"{', '.join(sorted(lacking))}, of another optimizer; start with a fresh state."
            )
        state = state_dict["state"].items()
        saved = {i: own["direction"].shape for i, own in state if "direction" in own}
        # numbers, or names where `torch.distributed.checkpoint.state_dict` made the state
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
        """Inside, a step; processes that share parameters or data learn of its error."""
        try:
            with examined_functions(name):
                yield
        except BaseException as error:
            tell_sharers(error, self._params, self._options.get("processes"))
            raise

    def _batch(self, closure: Any) -> Any:
        """The batch of a step, which is given as it is or by a function."""
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
        """The options that further operators over the data take."""
        return {name: value for name, value in self._options.items() if name in DATA_OPTIONS}

    def _seeded(self, seed: int) -> torch.Generator:
        """A generator with other numbers at each step; on the CPU, so that nothing waits for a
        device."""
        return torch.Generator().manual_seed(seed + self.param_groups[0]["steps"])

    def _keep_direction(self, direction: dict[str, Tensor]) -> None:
        """Keep the direction of a step in the state."""
        for name, part in direction.items():
            self.state[self._params[name]]["direction"] = part.clone()

    def _last_direction(self, operator: LinearOperator) -> Tensor | None:
        """The kept direction as a flat vector; None before the first step."""
        last = {name: self.state[p].get("direction") for name, p in self._params.items()}
        none = not self.param_groups[0]["steps"] or any(part is None for part in last.values())
        return None if none else operator.ravel(last)

    def __getstate__(self) -> dict[str, Any]:
        """For copies: torch's method leaves out the attributes of subclasses."""
        return {**vars(self), **super().__getstate__()}

    @abstractmethod
    def step(self, closure: object = None) -> Tensor:  # type: ignore[override]
        """Take one step; return the loss before it.

        Args:
            closure: A batch, or a re-iterable of batches, or a function that returns one.
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
        return A._sum.number()  # on the CPU already: no wait for a device
    except (errors.NonFiniteError, errors.DistributedError) as error:
        if "NonFiniteError" in f"{type(error).__name__} {error}":  # in this process, or in another
            return inf
        raise


RAISED, LOWERED = 1.5, 2 / 3  # factors of the damping (Martens, 2010, section 4.1)
FARTHEST = 1e8  # bound of damping / first damping, and of its inverse
ENOUGH = 1e-2  # part of the decrease predicted by the slope that a length must reach
HALVINGS = 20
NEWTON_OPTIONS = ("mode", *OPERATOR_OPTIONS)


@results.result
class NewtonStep(NamedTuple):
    """What a step of `NewtonCG` did.

    Attributes:
        loss: The loss before the step.
        loss_after: The loss after the step.
        ratio: The decrease of the loss over the decrease of the quadratic model; nan if rounding hides
            it.
        damping: The damping with which the step was computed.
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
        warm_start: Conjugate gradients start from so much of the last direction; 0: from zero.
        preconditioner: For conjugate gradients. "kfac": the damped inverse of a `hoglib.KFACOperator`
            (kind="mc") of the step's batch. Or a function (G, damping) that returns a preconditioner
            for `LinearOperator.solve`. Default: none.
        preconditioner_every: Make a new preconditioner after so many steps. A resumed run begins with a
            new one.
        **options: Options of `hoglib.GGNOperator`, such as micro_batch, compile, processes and
            progress.
    Raises:
        NotPositiveDefiniteError: for a G that is not positive definite even with the largest damping.
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
        self._row_order: RowOrder | None = None  # how KFAC reads layers, from the first step
        super().__init__(loss, params, defaults, options)
        # torch.distributed.checkpoint loads only entries that a state has already
        self._keep_direction({name: torch.zeros_like(p) for name, p in self._params.items()})

    def step(self, closure: object = None, curvature: object = None) -> Tensor:  # type: ignore[override]
        """Take one step.

        Args:
            closure: A batch, or a re-iterable of batches (all of the data), or a function without
                arguments that returns one, as Lightning's manual optimization passes it.
            curvature: The batch to compute G on; by default the step's batch. A part of it makes steps
                cheaper.
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
        with G._algorithm("step"):  # one algorithm for all: fewer waits for a device
            value, gradient = G.gradient()
            before = G._sum.number()  # on the CPU already: no wait for a device
            g = G.ravel(gradient)
            start = self._last_direction(G)
            if start is not None:
                start = group["warm_start"] * start
                start = start * (_dot_product(G, g, start) < 0)  # only if it descends
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
                # Try again with more damping, up to the bound.
                if not self._damp(10):
                    raise
                continue
            iterations += info.iterations
            slope, dGd = _read_numbers(_dot_product(G, g, d), _dot_product(G, d, G @ d))
            # A distant start and few iterations may end worse than zero: then start from zero.
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
        # Smaller differences of losses are rounding.
        rounding = 10 * torch.finfo(G.dtype).eps * abs(value)
        ratio = nan
        for tried in range(1, HALVINGS + 2):
            self._set_params(G, before + length * d)
            after = finite_or_infinite(G)
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
        """Multiply the damping by a factor, within its bounds; returns whether it changed."""
        group = self.param_groups[0]
        first = group["first_damping"]
        damping = min(max(factor * group["damping"], first / FARTHEST), first * FARTHEST)
        before, group["damping"] = group["damping"], damping
        return bool(damping != before)


def _dot_product(G: GGNOperator, a: Tensor, b: Tensor) -> Tensor:
    return G.space.dots((a[None], b[None]))[0, 0]


def _read_numbers(*scalars: Tensor) -> list[float]:
    """The values of scalars, in one read from the device."""
    return torch.stack([x.double() for x in scalars]).tolist()


def _norm(x: Tensor) -> Tensor:
    """The norm in float64: squares of float32 may leave the range."""
    return torch.linalg.vector_norm(x, dtype=torch.float64)


def _gradient(J: JacobianOperator, r: Tensor) -> Tensor:
    """J^T r."""
    return J.T.apply(r[None])[0].to(r)


ONE = "params"  # the name of parameters that are one tensor
TRIES = 12  # dampings of one step: they rise by 2^78
HIDDEN = 100  # smaller differences of losses are rounding, in units of eps
ACCELERATED = 0.1  # the part of a step at which the second derivative is taken
MOST_ACCELERATION = 0.75  # of 2 |a| / |d| (Transtrum and Sethna, 2012, section 3.2)
LARGEST_JACOBIAN = 2**30  # bytes of a Jacobian in memory with method="auto"
LARGEST_FACTORED = 8192  # rows of a matrix that is factored with method="auto"
LeastSquaresMethod = Literal["auto", "normal", "samples", "lsmr"]
Directions = Callable[[Tensor, float], tuple[Tensor, int]]  # (r, mu) -> d, iterations


@results.result
class LevenbergMarquardtStep(NamedTuple):
    """What a step of `LevenbergMarquardt` did.

    Attributes:
        loss: Half the sum of squares before the step.
        loss_after: Half the sum of squares after the step.
        gradient: |J^T r| before the step.
        ratio: The decrease of the loss over the decrease of the model with the last damping; nan if
            rounding hides it.
        damping: mu after the step.
        accepted: Whether the parameters moved.
        method: How directions were computed.
        tries: Dampings that were tried.
        iterations: Iterations of LSMR.
        residuals: Evaluations of the residual without a derivative; the Jacobian was taken once.
    """

    loss: float
    loss_after: float
    gradient: float
    ratio: float
    damping: float
    accepted: bool
    method: str
    tries: int
    iterations: int
    residuals: int


class _NoBatch(NamedTuple):
    """The batch of a step without one."""

    unused: Tensor


OF_MODEL = (
    "of a model and targets write `lambda params, batch: loss.outputs(params, batch) - batch[1]`, "
    "with loss = hoglib.functional_loss(model, criterion) and `params=hoglib.trainable_params(model)`"
)


@final
class _Residual:
    """A residual as a loss of (params, batch), the outputs of which are the weighted residual."""

    def __init__(self, given: Any, weights: object, one_tensor: bool) -> None:
        if hasattr(given, "criterion"):
            raise errors.ArgumentTypeError(
                "residual: expected a module or a function that returns the residual, got a loss of "
                f"outputs and targets; {OF_MODEL}."
            )
        self.model = given if isinstance(given, nn.Module) else None
        of_model = functional_loss(given).outputs if self.model is not None else given
        self._given, self._one_tensor = validation.function("residual", of_model), one_tensor
        self._weights = weights

    def outputs(self, params: Any, batch: Any) -> Any:
        """The residual, each term times the root of its weight."""
        params = params[ONE] if self._one_tensor else params
        alone = isinstance(batch, _NoBatch)
        of_model = self.model is not None
        args = () if alone and not of_model else ((),) if alone else (batch,)
        try:
            found = self._given(params, *args)
        except errors.ArgumentTypeError as error:
            if of_model:
                error.add_note(
                    f"residual: a module takes the batch and returns the residual; {OF_MODEL}."
                )
            raise
        for name, part in zip(pytree.paths(found), pytree.leaves(found), strict=True):
            validation.real(validation.leaf_name("residual", name), part)
        if self._weights is None:
            return found
        terms, structure = pytree.flatten(found)
        names = pytree.paths(found)
        weights = dict(zip(pytree.paths(self._weights), pytree.leaves(self._weights), strict=True))
        if set(names) != set(weights):
            wanted, given = (validation.listing([n or "one" for n in x]) for x in (names, weights))
            raise errors.ArgumentValueError(
                f"weights: expected a number for each term of the residual, {wanted}, got {given}."
            )
        scaled = [
            sqrt(validation.number(validation.leaf_name("weights", n), weights[n], minimum=0)) * y
            for n, y in zip(names, terms, strict=True)
        ]
        return pytree.unflatten(scaled, structure)

    def __call__(self, params: Any, batch: Any) -> Tensor:
        return self.criterion(self.outputs(params, batch), batch)

    def criterion(self, outputs: Any, batch: object) -> Tensor:
        """Half the sum of squares."""
        return pytree.sum_scalars([y.square().sum() / 2 for y in pytree.leaves(outputs)])


@final
class LevenbergMarquardt(BatchOptimizer):
    r"""Least squares by Levenberg and Marquardt's method, for residuals of networks and of functions.

        loss = |r|^2 / 2        r(params, batch) [M], J = d r / d params [M, P]
        (J^T J + mu D^2) d = -J^T r        params <- params + d,  if it lowers the loss
        ratio = (loss - loss after) / (-r^T J d - |J d|^2 / 2)
        mu <- mu max(1/3, 1 - (2 ratio - 1)^3)  if accepted;  else mu times 2, 4, 8, ... until it is

    mu starts at damping |J g|^2 / |g|^2, g = J^T r, in the units of J^T J. If no damping lowers the
    loss by more than rounding, the parameters and mu stay. Where rounding hides the loss, a step is
    accepted if it lowers the gradient.

    - method="normal": J in memory, and a Cholesky factor of J^T J + mu D^2 [P, P].
    - "samples": J in memory, and a factor of J D^-2 J^T + mu I [M, M]; the same step by d = -D^-2 J^T
      (J D^-2 J^T + mu I)^-1 r.
    - "lsmr": products with J and J^T only, by `RectangularOperator.lstsq`.
    - "auto": "normal" if M >= P, else "samples"; "lsmr" if J is larger than 1 GiB or both sides are
      larger than 8192.

    J comes from the gradients of single examples at once, where the residual has a row for each
    example of the batch that depends on that example alone, as one compares; else from min(M, P)
    products. Give the points of an equation as the batch, not in a closure.

    `.grad` is neither read nor written. ``info`` is the `LevenbergMarquardtStep` of the last step; a
    run resumed from ``state_dict()`` makes equal steps.

    Args:
        residual: A module that takes a batch (a tuple is its arguments) and returns the residual, a
            function ``residual(params, batch)``, or ``residual(params)`` for steps without a batch.
            The residual is a real tensor of any shape, or a pytree of such terms.
        params: A dict of tensors by name, or one tensor; by default all trainable parameters of the
            module.
        weights: A number for each term of the residual, in its structure: loss = sum of w |r|^2 / 2.
        damping: The first mu, relative to J^T J along the gradient. If ``param_groups`` is given
            another, mu starts again from it.
        method: As above.
        scaling: D is the largest norm of each column of J so far, for parameters of different units;
            else D = I. Not for "lsmr".
        geodesic: Add half the geodesic acceleration a, (J^T J + mu D^2) a = -J^T r'', with the second
            derivative r'' of r along d by a difference; a step with 2 |D a| > 0.75 |D d| is rejected.
            It takes one more evaluation of r for each damping, and helps in narrow valleys.
        tol: The tolerance of "lsmr".
        max_iter: The most iterations of "lsmr".
        **options: Options of `hoglib.JacobianOperator`, such as memory_limit, remat and progress.
    Raises:
        ArgumentTypeError: for a residual that is no real floating-point tensor, or a loss.
        ArgumentValueError: for a second parameter group, and for weights of other terms.
        NonFiniteError: for a residual that is not finite at the parameters; after a step it rejects
            the step.
        UnsupportedError: for parameters that several processes share.
    References:
        Madsen, Nielsen and Tingleff, Methods for Non-linear Least Squares Problems, 2004, section 3.2
        (mu). Transtrum and Sethna, Improvements to the Levenberg-Marquardt Algorithm for Nonlinear
        Least-squares Minimization, 2012 (geodesic). More, The Levenberg-Marquardt Algorithm:
        Implementation and Theory, 1978 (scaling). Chen and Heyl, Empowering Deep Neural Quantum
        States through Efficient Optimization, 2024 (samples).
    Example:
        >>> t = torch.arange(4.0)
        >>> p = torch.tensor([1.0, 0.5], requires_grad=True)
        >>> fit = lambda p: p[0] * torch.exp(-p[1] * t) - 3 * torch.exp(-t)
        >>> optimizer = hog.curvature.LevenbergMarquardt(fit, p)
        >>> losses = [optimizer.step() for _ in range(10)]
        >>> p
        tensor([3.0000, 1.0000], requires_grad=True)
    """

    info: LevenbergMarquardtStep | None = None

    def __init__(
        self,
        residual: object,
        params: dict[str, Tensor] | Tensor | None = None,
        *,
        weights: object = None,
        damping: float = 1e-3,
        method: LeastSquaresMethod = "auto",
        scaling: bool = False,
        geodesic: bool = False,
        tol: float | None = None,
        max_iter: int | None = None,
        **options: Any,
    ) -> None:
        check_option_names("LevenbergMarquardt", options, JACOBIAN_OPTIONS)
        defaults = {
            "damping": positive_damping(damping),
            "method": validation.choice("method", method, get_args(LeastSquaresMethod)),
            "scaling": validation.boolean("scaling", scaling),
            "geodesic": validation.boolean("geodesic", geodesic),
            "tol": None if tol is None else validation.number("tol", tol, minimum=0),
            "max_iter": validation.none_or_at_least("max_iter", max_iter, 1),
            "steps": 0,
            "mu": 0.0,
            "started": 0.0,  # the damping that mu started from
            "raise": 2.0,  # the factor of mu at the next rejection
            "by_examples": True,  # whether J may be computed so
        }
        if scaling and method == "lsmr":
            raise errors.ArgumentValueError(
                "scaling: expected False with method='lsmr', which does not have the columns of J, got "
                "True; use method='normal' or 'samples', or scale the parameters in the residual."
            )
        one = isinstance(params, Tensor)
        own = _Residual(residual, weights, one)
        if params is None and own.model is None:
            raise errors.ArgumentTypeError(
                "params: expected a dict of tensors by name, or one tensor, for a residual that is no "
                "module, got None; pass the parameters that the function is given."
            )
        named: Any = {ONE: params} if one else params
        super().__init__(own, named, defaults, options)
        refuse_sharded("LevenbergMarquardt", self._params.values())
        Space(self._params)  # raises for integers, and for parameters on several devices
        self._keep_direction({name: torch.zeros_like(p) for name, p in self._params.items()})

    def step(self, closure: object = None) -> Tensor:  # type: ignore[override]
        """Take one step.

        Args:
            closure: A batch, or a re-iterable of batches (all of the data), or a function without
                arguments that returns one, as Lightning's manual optimization passes it. Default:
                none, for a residual of the parameters alone.
        Returns:
            The loss before the step.
        """
        none = _NoBatch(torch.zeros(1, device="cpu"))
        with self._step_of_all("LevenbergMarquardt"):
            return self._step(self._batch(none if closure is None else closure))

    @torch.no_grad()
    def _step(self, batch: object) -> Tensor:
        group = self.param_groups[0]
        J = JacobianOperator(self._loss, self._params, batch, **self._options)
        with J._algorithm("step"):
            r = J.outputs()
            r = r.to(torch.promote_types(torch.promote_types(r.dtype, J.dtype), torch.float32))
            (square,) = _read_numbers(r.double().square().sum())
            loss, length = square / 2, sqrt(square) or 1.0
            # of r / |r|: the squares below stay in the range of float32
            g = _gradient(J, r / length)
            size = length * float(_norm(g))
            if not size:
                stays = loss, loss, size, nan, group["mu"], False, group["method"], 0, 0, 1
                self.info = LevenbergMarquardtStep(*stays)
                return r.new_tensor(loss)
            method = self._method(J)
            dense = method != "lsmr"
            A = self._dense(J, r, g, length, isinstance(batch, _NoBatch)) if dense else None
            D, unit = self._scale(J, A, r), 1.0
            if A is not None:
                A = A / D
                unit = 2.0 ** frexp(float(torch.linalg.vector_norm(A, inf)))[1]
                A, D = A.div_(unit), D * unit
            image = (lambda v: J.apply(v[None])[0].to(r)) if A is None else (lambda v: A @ v)
            if group["started"] != group["damping"]:
                Jg = image((g / D / _norm(g / D)).to(r))
                group["mu"] = group["damping"] * (unit * float(_norm(Jg))) ** 2
                group["started"] = group["damping"]
            solve = self._directions(J, A, method, unit)
            self._search(J, r, g / D, D, loss, size, method, solve, image)
        group["steps"] += 1
        return r.new_tensor(loss)

    def _method(self, J: JacobianOperator) -> str:
        """The method of a step, by sizes."""
        (M, P), chosen = J.shape, self.param_groups[0]["method"]
        if chosen != "auto":
            return str(chosen)
        large = M * P * J.dtype.itemsize > LARGEST_JACOBIAN or min(M, P) > LARGEST_FACTORED
        if large and not self.param_groups[0]["scaling"]:
            return "lsmr"
        return "normal" if M >= P else "samples"

    def _dense(
        self, J: JacobianOperator, r: Tensor, g: Tensor, length: float, alone: bool
    ) -> Tensor:
        """J in memory: by examples if that gives the outputs r and g = J^T r / length, else by
        products."""
        group = self.param_groups[0]
        if group["by_examples"] and not alone:
            try:
                values, rows = J._by_examples()
            except (RuntimeError, NotImplementedError, errors.HoglibError):
                values, rows = r[:0], g[None, :0]
            if rows.shape == J.shape:
                near = sqrt(torch.finfo(J.space.precision).eps)
                rows = rows.to(r)
                off = torch.stack([_norm(values - r), _norm(rows.T @ (r / length) - g)])
                if bool((off <= near * torch.stack([_norm(r), _norm(rows)])).all()):
                    return rows
            group["by_examples"] = False
            LOGGER.debug("LevenbergMarquardt: J by %d products, not by examples", min(J.shape))
        return J.to_dense().to(r)

    def _scale(self, J: JacobianOperator, A: Tensor | None, r: Tensor) -> Tensor:
        """D, which is kept in the state."""
        if A is None or not self.param_groups[0]["scaling"]:
            return r.new_ones(())
        D = torch.linalg.vector_norm(A, dim=0, dtype=torch.float64).to(r)
        states = [self.state[p] for p in self._params.values()]
        if all("scale" in state for state in states):
            D = torch.maximum(D, torch.cat([state["scale"].reshape(-1) for state in states]))
        for state, part in zip(states, J.space.split(D), strict=True):
            state["scale"] = part.clone()
        return torch.where(D > 0, D, 1)

    def _directions(
        self, J: JacobianOperator, A: Tensor | None, method: str, unit: float
    ) -> Directions:
        """(r, mu) -> the minimizer d of |r + A d|^2 + mu / unit^2 |d|^2, and iterations. It raises for
        a matrix that rounding made singular."""
        group = self.param_groups[0]
        if A is None:

            def by_products(r: Tensor, mu: float) -> tuple[Tensor, int]:
                limits = {"tol": group["tol"], "max_iter": group["max_iter"]}
                b = -r.to(J.target.dtype)
                d, info = J.lstsq(b, damping=mu, return_info=True, **limits)
                return d.to(r), info.iterations

            return by_products
        gram = A.T @ A if method == "normal" else A @ A.T
        # A smaller mu is lost in the rounding of the diagonal.
        least = torch.finfo(A.dtype).eps * float(gram.diagonal().max())

        def by_factor(r: Tensor, mu: float) -> tuple[Tensor, int]:
            scaled = max(mu / unit / unit, least)
            group["mu"] = scaled * unit * unit
            damped = gram.clone()
            damped.diagonal().add_(scaled)
            factor, failed = torch.linalg.cholesky_ex(damped)
            if failed:
                raise errors.NotPositiveDefiniteError(f"damping: {group['mu']:.3g} is not enough.")
            right = A.T @ r if method == "normal" else r
            y = -torch.cholesky_solve(right[:, None], factor)[:, 0]
            return (y if method == "normal" else A.T @ y), 0

        return by_factor

    def _search(
        self,
        J: JacobianOperator,
        r: Tensor,
        g: Tensor,
        D: Tensor,
        loss: float,
        size: float,
        method: str,
        solve: Directions,
        image: Callable[[Tensor], Tensor],
    ) -> None:
        """Raise mu until a step lowers the loss; vectors on the parameters are in units of D, and g is
        of r / |r|."""
        group, norm = self.param_groups[0], sqrt(2 * loss)
        start = torch.cat([p.detach().reshape(-1).to(r) for p in self._params.values()])
        eps = max(torch.finfo(space.precision).eps for space in (J.space, J.target))
        rounding = HIDDEN * eps * loss
        first, iterations, residuals = group["mu"], 0, 1
        accepted, ratio, after = False, nan, loss
        try:
            for tried in range(1, TRIES + 1):
                try:
                    d, count = solve(r, group["mu"])
                except errors.NotPositiveDefiniteError:  # by rounding
                    self._reject()
                    continue
                iterations += count
                Jd = image(d)
                along, square, length = _read_numbers(g @ d, Jd.double().square().sum(), _norm(d))
                model = -norm * along - square / 2
                if tried > 1 and model <= rounding:
                    break  # a shorter step cannot lower the loss visibly
                step, bends, ratio = d, False, nan
                if group["geodesic"]:
                    h = ACCELERATED
                    near = self._residual_at(J, start + h * d / D)
                    self._write(J, start)  # "lsmr" multiplies with the Jacobian at the parameters
                    residuals += 1
                    bends = near is None
                    if near is not None:
                        a, count = solve(2 / h * ((near - r) / h - Jd), group["mu"])
                        iterations += count
                        bends = not 2 * float(_norm(a)) <= MOST_ACCELERATION * length
                        step = d + a / 2
                if not bends:
                    moved = self._residual_at(J, start + step / D)
                    residuals += 1
                    if moved is not None:
                        trial = float(moved.double().square().sum()) / 2
                        if model > rounding:
                            ratio = (loss - trial) / model
                            accepted = trial < loss
                        elif trial <= loss + rounding:  # the gradient is seen more sharply
                            accepted = self._is_flatter(J, moved / norm, D, g)
                        after = trial if accepted else loss
                if accepted:
                    if isfinite(ratio):
                        group["mu"] *= max(1 / 3, 1 - (2 * min(ratio, 1.0) - 1) ** 3)
                    group["raise"] = 2.0
                    self._keep_direction(
                        dict(zip(self._params, J.space.split(step / D), strict=True))
                    )
                    break
                self._write(J, start)
                self._reject()
        finally:  # also after an error of the residual
            if not accepted:
                self._write(J, start)
                group["mu"], group["raise"] = first, 2.0
        found = loss, after, size, ratio, group["mu"], accepted, method
        self.info = LevenbergMarquardtStep(*found, tried, iterations, residuals)

    def _reject(self) -> None:
        group = self.param_groups[0]
        group["mu"] *= group["raise"]
        group["raise"] *= 2

    def _residual_at(self, J: JacobianOperator, vector: Tensor) -> Tensor | None:
        """The residual at these parameters, which are written; None if it is not finite."""
        self._write(J, vector)
        try:
            r = J.outputs()
        except errors.NonFiniteError:
            return None
        return r.to(vector) if bool(r.isfinite().all()) else None

    def _is_flatter(self, J: JacobianOperator, r: Tensor, D: Tensor, g: Tensor) -> bool:
        """Whether the gradient at the parameters is smaller than g; not if it is not finite."""
        try:
            return float(_norm(_gradient(J, r) / D)) < float(_norm(g))
        except errors.NonFiniteError:
            return False

    def _write(self, J: JacobianOperator, vector: Tensor) -> None:
        """Write a flat vector into the parameters."""
        for p, part in zip(self._params.values(), J.space.split(vector), strict=True):
            p.copy_(part)


OF_FACTORS = ("approximation", "joint_bias", "likelihood", "num_samples", "unsupported")
KFAC_OPTIONS = (*OF_FACTORS, *(name for name in DATA_OPTIONS if name != "check_deterministic"))
FACTORS = ("A", "G")  # the moving averages of a block, in the state
ADAPT_EVERY, ADAPTED = 5, 0.95**5  # Martens and Grosse, 2015, section 6.5
# the damped inverse of a block, in the state
INVERSE = ("inverse_A", "inverse_G", "inverse_values")


@results.result
class KFACStep(NamedTuple):
    """What a step of `KFAC` did.

    Attributes:
        loss: The loss before the step.
        slope: g^T d, the change of the loss to first order along the direction d; negative.
        length: |v|, with the change v of the parameters.
        damping: The damping after the step.
        ratio: The decrease of the loss over the decrease of the quadratic model; nan if it was not
            computed.
        products: Products of the Gauss-Newton matrix with one vector.
        values: Evaluations of the loss without a gradient; the gradient was computed once.
        factor_batches: For how many batches factors were computed, 1 or 0.
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
      by two products with its Gauss-Newton matrix M. Every five steps the damping is multiplied by
      0.95^5 if the loss fell by more than 3/4 of what the model predicts, and divided by it if by less
      than 1/4.
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
        self._row_order: RowOrder | None = None  # how layers are read; found at the first step
        super().__init__(loss, params, defaults, {**options, "kind": kind})
        instead = "precondition the gradients of a torch optimizer by `KFACOperator.precondition_`"
        refuse_sharded("KFAC", self._params.values(), instead=instead)

    def step(self, closure: object = None) -> Tensor:  # type: ignore[override]
        """Take one step.

        Args:
            closure: A batch, or a re-iterable of batches, or a function without arguments that returns
                one, as Lightning's manual optimization passes it.
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
        before, slope, expected, length = _read_numbers(value, along, model, step.norm())
        ratio, adapts = nan, group["rescale"] and group["steps"] % ADAPT_EVERY == 0 and expected < 0
        if adapts:
            # K reads the parameters at each call: this is the loss after the step.
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

        A layer that the batch does not call has G = 0, and no A, which is a mean over no rows: its
        average A stays.
        """
        group = self.param_groups[0]
        decay, names, count = group["decay"], pytree.paths(K.space.params), group["averaged"]
        blocks = {block.layout: block for block in K.blocks()}
        known = {layout_of(one, names): None for one in group["layouts"]}
        for layout in [one for one in blocks if one not in known]:
            rows = [one for one in known if any(one.overlaps(region) for region in layout.regions)]
            if rows and layout not in K.called:
                del blocks[layout]  # zeros that stand for layers which earlier batches called
            elif any(one.role.name != EXACT_DIAGONAL or self._has_average(one) for one in rows):
                raise errors.ArgumentValueError(
                    "step: expected the layers of the first step, got others: the model calls other "
                    "layers, or parts of their weights, from batch to batch. Give only those that it "
                    "always calls."
                )
            # The first batch that calls a layer replaces the zeros that stood for it.
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
                if mean and before is None:  # as if all batches so far had had this A
                    new = 1 - decay ** (count + 1)
                elif mean and layout not in K.called:
                    # Cancels the larger divisor: the corrected average stays.
                    old = (1 - decay ** (count + 1)) / (1 - decay**count)
                total = 0.0 if before is None else old * before
                if layout in K.called or before is None:
                    total = total + new * getattr(blocks[layout], name)
                store[prefix + name] = total
        group["averaged"] += 1

    def _has_average(self, layout: BlockLayout) -> bool:
        """Whether a diagonal has a number other than zero."""
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
        """The state of the parameter that a block begins with, and a prefix for the rows of the
        block."""
        region = layout.first
        store = self.state[list(self._params.values())[region.leaf]]
        return store, f"{region.start}:{region.stop} "

    def _move(
        self, K: KFACOperator, batch: object, inverse: KroneckerMatrix, g: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, int]:
        """The change of the parameters, the slope along d, the change that the model expects, and the
        number of products."""
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
        # Columns may have any lengths, and be parallel: scale them, and take the pseudoinverse.
        sizes = M.diagonal().clamp(min=torch.finfo(M.dtype).tiny).sqrt()
        scaled = M / sizes / sizes[:, None]
        c = torch.linalg.pinv(scaled, hermitian=True, rtol=1e-6) @ (b / sizes) / sizes
        return V @ c.to(V), -(b @ c) / 2
