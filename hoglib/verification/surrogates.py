"""Whether a wrong first derivative looks like a surrogate gradient, told from the values alone.

round(x), sign(x), x > 0        no derivative but zero; the gradient goes straight through
x, with a changed gradient      a reversal, a scaling, a clipping of the gradient
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from hoglib._core.element_differences import max_abs
from hoglib.verification.subject import Subject

NEAR = 1e-6  # a move that changes the output of no step function, but at a few elements

DECLARED = "declare it: pass surrogate=True, or set `surrogate = True` on the class."


def what_it_looks_like(subject: Subject, column: int) -> str:
    """What forward does to an input, where its derivative cannot be what the gradient is; or empty."""
    x = subject.x[column]
    moved = x + NEAR * torch.where(x == 0, 1.0, x)
    try:
        values = subject.map(*subject.x)
        near = subject.map(*subject.x[:column], moved, *subject.x[column + 1 :])
    except Exception:  # it refuses points that the user did not pass
        return ""
    for y, z in zip(values, near, strict=True):
        if found := _of(x, y.detach(), moved, z.detach()):
            return f"{found} If its gradient is another one on purpose, {DECLARED}"
    return ""


def _of(x: Tensor, y: Tensor, moved: Tensor, z: Tensor) -> str:
    if not y.numel():
        return ""
    if y.shape == x.shape and torch.equal(y, x) and torch.equal(z, moved):
        return "forward is the identity, and the gradient is a changed one (reversed, scaled, clipped)."
    still = y == z
    share = float(still.double().mean())
    if share > 0.9:
        return _step(x, y)
    through = (y == x) & (z == moved) if y.shape == x.shape else torch.zeros_like(still)
    if share > 0 and bool((still | through).all()):
        return "forward clips: its output is the input, or does not depend on it."
    if y.shape == x.shape and 0 < max_abs(y - x) < 0.01 * max_abs(x):
        return "forward rounds its input to fewer digits (quantisation)."
    return ""


def _step(x: Tensor, y: Tensor) -> str:
    """A function that is constant near the inputs."""
    values = set(y.unique().tolist())
    if y.shape == x.shape and -1.0 in values and bool(((y == x.sign()) | (x == 0)).all()):
        what = "takes the sign of its input"
    elif values <= {0.0, 1.0}:
        what = "is a step (a threshold, a comparison, an argmax)"
    elif _is_on_a_grid(sorted(values)):
        what = "rounds its input"
    else:
        what = "is a step function (rounding, quantisation, a choice)"
    return f"forward {what}, so that its derivative is zero almost everywhere."


def _is_on_a_grid(values: Sequence[float]) -> bool:
    """Whether all are multiples of their smallest distance, as rounded numbers are."""
    gaps = [b - a for a, b in pairwise(values)]
    least = min((g for g in gaps if g > 1e-9), default=0.0)
    return bool(least) and all(abs(v / least - round(v / least)) < 1e-3 for v in values)
