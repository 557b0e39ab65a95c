"""Newton steps with the Gauss-Newton matrix, as an optimizer of torch."""

import inspect
from collections.abc import Callable
from math import inf, nan
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hoglib._core import validation
from hoglib.curvature.operators import GGNOperator
from hoglib.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    NonFiniteError,
    NotPositiveDefiniteError,
)
from hoglib.functional import trainable_params

RAISED, LOWERED = 1.5, 2 / 3  # factors of the damping
FARTHEST = 1e8  # that it gets from where it started, either way
ENOUGH = 1e-2  # of the decrease that the slope promises
HALVINGS = 20
OPTIONS = set(inspect.signature(GGNOperator).parameters) - {"loss", "params", "data"}
Tree = Any


class NewtonStep(NamedTuple):
    """What a step did."""

    loss: float  # before it
    loss_after: float
    ratio: (
        float  # of the decrease to what the quadratic model promised; nan where rounding hides it
    )
    damping: float  # with which the step was found
    length: float  # the factor of the direction; 0 where no length lowered the loss
    iterations: int  # of conjugate gradients
    products: int  # of the Gauss-Newton matrix with a vector
    values: int  # of the loss without a gradient, which was computed once


class NewtonCG(torch.optim.Optimizer):
    r"""Damped Newton steps with the Gauss-Newton matrix, by conjugate gradients.

        (G + damping I) d = -g        params <- params + a d
        m(d) = g^T d + d^T G d / 2        ratio = (f(params + d) - f(params)) / m(d)
        damping <- 2/3 damping  where ratio > 3/4,  3/2 damping  where ratio < 1/4

    with the loss f at a batch, its gradient g and G as in `ggn_vp`. a is the first of lr, lr/2, ...
    with f(params + a d) <= f + 0.01 a g^T d, at most 20 halvings; where there is none, the parameters
    stay and the damping rises. The damping stays within 1e-8 and 1e8 of what it was given as.

    loss: from `functional_loss`. params: what it learns, as `trainable_params` gives them; all of the
    model's by default. damping: the first. max_iter, progress: of `cg`, which ends where the
    model m hardly falls any more. warm_start: what part of the last direction it starts from; 0 for
    none. options: of `GGNOperator`, as micro_batch, compile, processes.

        optimizer = hoglib.curvature.NewtonCG(hoglib.functional_loss(model, criterion))
        for batch in loader:
            value = optimizer.step(batch)

    `step(batch, curvature=None)` takes a batch or a re-iterable of batches (all of the data), or a
    function that returns one, as Lightning's manual optimization needs; and returns the loss before the
    step. curvature: the batch that G is of, by default the same; a part of it makes steps cheap.
    Batches should be large: a step goes a long way on what one batch tells. The loss must be the same
    each time: dropout raises. `.grad` is neither read nor written. `info` is a `NewtonStep`; the state,
    direction and damping, is in `state_dict()`.
    Raises, beside what `GGNOperator` raises, ArithmeticError for a G that is not positive definite with
    the largest damping, and ValueError for a second parameter group.
    Source: Martens, Deep Learning via Hessian-free Optimization, 2010, section 4; Moré, The
    Levenberg-Marquardt Algorithm, 1978; of curvature, Byrd, Chin, Neveitt & Nocedal, On the Use of
    Stochastic Hessian Information in Optimization Methods for Machine Learning, 2011.
    """

    def __init__(
        self,
        loss: Any,
        params: dict[str, Tensor] | None = None,
        *,
        lr: float = 1.0,
        damping: float = 1.0,
        max_iter: int = 250,
        progress: float = 5e-4,
        warm_start: float = 0.95,
        **options: Any,
    ) -> None:
        unknown = sorted(set(options) - OPTIONS)
        if unknown:
            raise ArgumentTypeError(
                f"NewtonCG: expected options of GGNOperator, {', '.join(sorted(OPTIONS))}, got "
                f"{', '.join(unknown)}."
            )
        if not hasattr(loss, "outputs") or not hasattr(loss, "criterion"):
            raise ArgumentTypeError(
                "loss: expected one from `hoglib.functional_loss(model, criterion)`, got "
                f"{validation.describe(loss)}; a closure that returns a value has no outputs to "
                "linearise."
            )
        self._loss, self._options = loss, options
        self._params: dict[str, Any] = trainable_params(loss.model) if params is None else params
        if not isinstance(self._params, dict):
            raise ArgumentTypeError(
                f"params: expected a dict of tensors by name, got {validation.describe(params)}; leave "
                "it out, or take a part of `hoglib.trainable_params(model)`."
            )
        if not 0 <= validation.number("warm_start", warm_start) <= 1:
            raise ArgumentValueError(
                f"warm_start: expected a number from 0 to 1, got {warm_start}; 0.95 is usual."
            )
        if not 0 < validation.number("damping", damping) < inf:
            raise ArgumentValueError(
                f"damping: expected a number greater than 0, got {damping}; 1 is usual."
            )
        defaults = {
            "lr": validation.positive("lr", lr),
            "damping": float(damping),
            "first_damping": float(damping),
            "max_iter": validation.at_least("max_iter", max_iter, 1),
            "progress": validation.number("progress", progress, minimum=0),
            "warm_start": warm_start,
        }
        self.info: NewtonStep | None = None
        super().__init__(list(self._params.items()), defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises for a second one: a step is a step of all parameters."""
        if self.param_groups:
            raise ArgumentValueError(
                "param_groups: expected one, got another; the matrix is that of all parameters. Give "
                "all of them as params."
            )
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raises for the state of another optimizer."""
        lacking = self.defaults.keys() - state_dict["param_groups"][0].keys()
        if lacking:
            raise ArgumentValueError(
                "state_dict: expected that of a NewtonCG, got one without "
                f"{', '.join(sorted(lacking))}, of another optimizer; start with a fresh state."
            )
        super().load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        """For copies: torch's own leaves out what it does not know."""
        own = ("_loss", "_options", "_params", "info")
        return {**super().__getstate__(), **{name: vars(self)[name] for name in own}}

    def step(self, closure: Any = None, curvature: Any = None) -> Tensor:  # type: ignore[override]
        """One step on a batch, or on what a function without arguments returns; the loss before it.

        curvature: the batch that the matrix is of, if it is another one.
        """
        batch = closure() if callable(closure) else closure
        if batch is None:
            raise ArgumentTypeError(
                "step: expected a batch, or a function without arguments that returns one, got None; "
                "the matrix is made of the batch: `optimizer.step((x, y))`."
            )
        group = self.param_groups[0]
        G = self._matrix(batch)
        value, gradient = G.gradient()
        g = G.ravel(gradient)
        if not bool(g.any()):
            unmoved = float(value)
            self.info = NewtonStep(unmoved, unmoved, nan, group["damping"], 0, 0, 0, 0)
            return value
        of = G if curvature is None else self._matrix(curvature)
        d, dGd, iterations = self._direction(of, g)
        slope = float(g @ d)
        damping, products = group["damping"], of.count
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
        return GGNOperator(self._loss, self._params, batch, **self._options)

    def _direction(self, G: GGNOperator, g: Tensor) -> tuple[Tensor, float, int]:
        """d, d^T G d, and the iterations that it took."""
        group = self.param_groups[0]
        start, iterations = self._start(G, g), 0
        while True:
            try:
                d, info = G.solve(
                    -g, damping=group["damping"], max_iter=group["max_iter"], x0=start,
                    progress=group["progress"], return_info=True,
                )  # fmt: skip
            except NotPositiveDefiniteError:
                if not self._damp(10):
                    raise
                continue
            iterations += info.iterations
            dGd = float(d @ (G @ d))
            # a start from far off that was cut short may be worse than none
            if start is None or float(g @ d) + dGd / 2 < 0:
                return d, dGd, iterations
            start = None

    def _start(self, G: GGNOperator, g: Tensor) -> Tensor | None:
        last = {name: self.state[p].get("direction") for name, p in self._params.items()}
        part = self.param_groups[0]["warm_start"]
        if not part or any(d is None for d in last.values()):
            return None
        start = part * G.ravel(last)
        return start if float(g @ start) < 0 else None

    def _search(
        self, G: GGNOperator, value: float, d: Tensor, slope: float, dGd: float
    ) -> tuple[float, float, float, int]:
        """Goes along d; the loss there, the ratio at the first length, the length, losses computed."""
        before = G.ravel(self._params).clone()
        length: float = self.param_groups[0]["lr"]
        model = length * slope + length**2 * dGd / 2
        # below it a difference of losses is rounding
        rounding = 10 * torch.finfo(G.dtype).eps * abs(value)
        ratio = nan
        for tried in range(1, HALVINGS + 2):
            self._go_to(G, before + length * d)
            after = _finite_or_infinite(G.value)
            if tried == 1 and -model > rounding:
                ratio = (after - value) / model
            if after <= value + ENOUGH * length * slope + rounding:
                return after, ratio, length, tried
            length /= 2
        self._go_to(G, before)
        return value, ratio, 0.0, tried

    @torch.no_grad()
    def _go_to(self, G: GGNOperator, vector: Tensor) -> None:
        for name, part in G.unravel(vector).items():
            self._params[name].copy_(part)

    def _damp(self, factor: float) -> bool:
        """Whether the damping could be multiplied by a factor."""
        group = self.param_groups[0]
        first = group["first_damping"]
        damping = min(max(factor * group["damping"], first / FARTHEST), first * FARTHEST)
        changed = bool(damping != group["damping"])
        group["damping"] = damping
        return changed


def _finite_or_infinite(loss: Callable[[], Tensor]) -> float:
    """A loss, or infinity for one that overflows: it is too long a way."""
    try:
        return float(loss())
    except NonFiniteError:
        return inf
