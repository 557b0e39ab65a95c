"""Sharpness without second derivatives: the shortest step that raises the loss."""

from functools import partial
from math import inf, isfinite, nan, sqrt
from typing import Any, NamedTuple, Unpack

import torch

from hoglib import errors, plotting
from hoglib._core.messages import results, validation
from hoglib._core.torch_api import pytree
from hoglib.capture.within import run_uncompiled, when_compiled
from hoglib.curvature.operators.operators import HessianOperator, without_batch
from hoglib.curvature.sums.dataset_sum import OperatorOptions
from hoglib.curvature.training.optimizers import finite_or_infinite
from hoglib.verification.entry_points import examined_functions

Tree = Any


@results.result
class CriticalSharpness(NamedTuple):
    """The result of `critical_sharpness`.

    Attributes:
        value: 2 / step; nan if no step was found.
        step: The smallest step that raises the loss, up to the tolerance; if not found, the last step
            of the search.
        passes: Evaluations of the loss.
        found: Whether the loss falls at a shorter step and rises at a longer one, both within the
            tolerance, and by more than the rounding of the loss.
        tried: The pairs (step, loss) in the order of the search; the first is (0, the loss at params).
    """

    value: float
    step: float
    passes: int
    found: bool
    tried: tuple[tuple[float, float], ...] = ()

    def __repr__(self) -> str:
        shown = (f"{name}={x}" for name, x in zip(self._fields, self[:4], strict=False))
        return f"CriticalSharpness({', '.join(shown)})"

    def plot(self, ax: object = None) -> Any:
        """Draw the evaluated losses against the step, and the critical step.

        Args:
            ax: Matplotlib axes. Default: the axes of a new pyplot figure.
        Returns:
            The axes.
        Raises:
            MissingDependencyError: if matplotlib is not installed.
        """
        return plotting.critical_sharpness(self, ax)


@when_compiled(run_uncompiled)
def critical_sharpness(
    loss: object,
    params: Tree,
    batch: object,
    *,
    direction: Tree = None,
    step: float | None = None,
    tol: float = 0.05,
    max_passes: int = 20,
    **options: Unpack[OperatorOptions],
) -> CriticalSharpness:
    r"""The sharpness of a loss along a step, by evaluations of the loss alone.

        2 / eta_c        eta_c = min {eta > 0 : loss(params - eta d) > loss(params)}

    If the loss is quadratic along d, the sharpness is d^T H d / g^T d, with the gradient g and the
    Hessian H. For d = g this is at most the largest eigenvalue of H, and an eigenvalue if g is its
    eigenvector. Gradient descent with a learning rate above eta_c raises the loss in its next step.

    The search goes from the first step to the crossing of a fitted parabola, until the crossing is
    enclosed: mostly four to eight evaluations. If the loss crosses its value several times along d, the
    search may find a later crossing.

    Args:
        loss: Scalar function ``loss(params, batch)``.
        params: Where the sharpness is taken; any pytree of floating-point tensors.
        batch: One batch or batches, as for :class:`hoglib.HessianOperator`. None for a loss without
            data; it is called as ``loss(params, None)``.
        direction: d, in the structure of params: the step of an optimizer is ``-lr d``. Default: the
            gradient.
        step: The first step to try, such as the learning rate, or the last result. Default: four times
            the loss over g^T d, right for a quadratic loss with the minimum 0.
        tol: Relative width of the bracket of eta_c.
        max_passes: The most evaluations of the loss.
        **options: Options of :class:`hoglib.HessianOperator`, such as micro_batch and processes.
    Returns:
        :class:`CriticalSharpness`.
    Raises:
        ArgumentValueError: for a zero direction, and if the loss does not fall along it: g^T d <= 0.
        NonFiniteError: for NaN or infinity in the loss, the gradient or the direction.
        NondeterministicError: for a loss that draws random numbers, such as one with dropout.
    References:
        Kalra et al., A Scalable Measure of Loss Landscape Curvature for Analyzing the Training Dynamics
        of LLMs, 2026, arXiv 2601.16979. Cohen et al., Gradient Descent on Neural Networks Typically
        Occurs at the Edge of Stability, 2021.
    Example:
        >>> loss = lambda p, _: (torch.tensor([1.0, 4.0]) * p.square()).sum() / 2
        >>> found = hog.critical_sharpness(loss, torch.tensor([0.0, 1.0]), None)
        >>> round(found.value, 1), found.passes, found.found
        (4.0, 3, True)
    """
    start = None if step is None else validation.positive("step", step)
    validation.fraction("tol", tol, below_one=True, usual=0.05)
    validation.at_least("max_passes", max_passes, 4)
    if batch is None:
        loss, batch = partial(without_batch, loss), ()
    with examined_functions("critical_sharpness", first_order=True):
        return _search_critical(loss, params, batch, direction, start, tol, max_passes, options)


def _search_critical(
    loss: Any,
    params: Tree,
    batch: Any,
    direction: Tree,
    start: float | None,
    tol: float,
    max_passes: int,
    options: Any,
) -> CriticalSharpness:
    """`critical_sharpness` with checked options."""
    here = HessianOperator(loss, params, batch, **options)
    space, (value, gradient) = here.space, here.gradient()
    g, _ = space.rows(gradient)
    d, _ = (g, None) if direction is None else space.rows(direction, "direction")
    if len(d) != 1:
        raise errors.ArgumentValueError(f"direction: expected one vector, got a block of {len(d)}.")
    slope = float(space.dots((g, d), dtype=torch.float64))
    if not isfinite(slope):
        raise errors.NonFiniteError(f"direction: expected finite numbers, got g^T d = {slope}.")
    if slope <= 0:
        raise errors.ArgumentValueError(
            "direction: expected d whose step, params - eta d, lowers the loss, got g^T d = "
            f"{slope:.3g}. Of an optimizer pass the parameters before its step minus those after it; "
            "where the gradient is zero, take `HessianOperator.eigsh`."
        )
    before, along = float(here.value()), space.tree(d[0])  # compares two passes: dropout raises
    moved = pytree.map_tensors(lambda p: p.detach().clone(), params)
    there = HessianOperator(loss, moved, batch, **options)
    every = [pytree.leaves(tree) for tree in (moved, params, along)]
    # A bracket of the zero of the mean slope (f(eta) - f) / eta, which is linear for a quadratic
    # loss.
    low, at_low, high, at_high, side, tried = 0.0, -slope, inf, inf, 0, [(0.0, before)]
    eta, growth = start or 4 * (abs(before) or 1.0) / slope, 1 + tol / 2
    while len(tried) < max_passes and high > (1 + tol) * low:
        with torch.no_grad():
            for x, p, u in zip(*every, strict=True):
                x.copy_(p - eta * u)
        tried.append((eta, finite_or_infinite(there)))
        mean = (tried[-1][1] - before) / eta
        # The Illinois rule: halve the slope at an end that stays twice, else the bracket shrinks from
        # one side only.
        if mean > 0:
            side = max(side, 0) + 1  # steps in a row that were too long; -side: too short
            high, at_high, at_low = eta, mean, at_low / (1 + (side > 1))
        else:
            side = min(side, 0) - 1
            low, at_low, at_high = eta, mean, at_high / (1 + (side < -1))
        aim = 1 - (1 if side > 0 else -1) * tol / 4
        by_model = at_high <= 16 * slope and (abs(side) < 3 or high <= 16 * low)
        if high == inf:
            root = low * slope / (slope + at_low) if slope + at_low > 0 else inf
            eta = min(max(aim * root, growth * low), 16 * low)
            if aim * root < 16 * low:  # a flat loss: parabolas end just beyond low
                growth = min(growth**3, 16)
        elif low > 0 and not by_model:  # far from a parabola: bisect
            eta = sqrt(low * high)
        elif low == 0 and side > 3:  # the first step was far too long: go back faster
            eta = high / 16 ** (side - 3)
        else:
            root = low + (high - low) * at_low / (at_low - at_high)
            eta = min(max(aim * root, (1 + tol / 4) * low, high / 16), high / (1 + tol / 4))
    # the error of the crossing by rounding of the loss
    rounding = 8 * torch.finfo(value.dtype).eps * abs(before) / slope
    found = high <= (1 + tol) * low and rounding <= tol * low
    eta = sqrt(low * high) if found else eta
    return CriticalSharpness(2 / eta if found else nan, eta, len(tried), found, tuple(tried))
