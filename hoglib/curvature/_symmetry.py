"""Whether a matrix is symmetric, as far as the first two products tell: v . A w = w . A v.

A backward that is no derivative, or that loses a part when it is differentiated, mostly makes a Hessian
asymmetric; to look costs two inner products, once.
"""

import warnings
from typing import NamedTuple

import torch
from torch import Tensor


class Bound(NamedTuple):
    """How much of their size v.Aw and w.Av may differ by, for random vectors and for any."""

    random: float  # over sqrt(P), by which products with random vectors are smaller than their size
    rounding: float


BOUNDS = {torch.float64: Bound(1e-6, 1e-10), torch.float32: Bound(1e-2, 1e-5)}


class Symmetry:
    """Compares the first two vectors and products, of one call or of two that follow each other."""

    def __init__(self, what: str, enabled: bool) -> None:
        self._what, self._enabled = what, enabled
        self._first: list[tuple[Tensor, Tensor]] = []
        self._done = False

    def forget(self) -> None:
        """It is another matrix now."""
        self._first, self._done = [], False

    def saw(self, rows: Tensor, products: Tensor) -> None:
        bound = BOUNDS.get(rows.dtype)
        if self._done or not self._enabled or bound is None:
            return
        pairs = list(zip(rows, products, strict=True))[:2]
        if len(pairs) + len(self._first) < 2:
            # copies, because what was given and what is returned belongs to the caller
            self._first = [(v.clone(), Av.clone()) for v, Av in pairs]
            return
        (v, Av), (w, Aw) = (self._first + pairs)[:2]
        self._first, self._done = [], True
        size = float(v.norm() * Aw.norm() + w.norm() * Av.norm())
        one, other = ((a * b).sum(dtype=torch.float64) for a, b in ((v, Aw), (w, Av)))
        gap = abs(float(one - other))
        if gap > size * max(bound.random / len(v) ** 0.5, bound.rounding):
            warnings.warn(
                f"{self._what}: expected a symmetric matrix, got v.Aw and w.Av that differ by "
                f"{gap / size:.1g} of their size. Some backward in the loss is not the derivative that "
                "it should be, or cannot be differentiated: `hoglib.verify` of its custom Functions "
                "tells, and mode='finite-differences' gives the product to compare with.",
                stacklevel=5,
            )
