"""Outputs that are determined up to a sign or a phase of each column: eigenvectors, singular vectors.

    y_j -> y_j conj(s_j),    s_j = <r, y_j> / |<r, y_j>|

An algorithm chooses one of them, and backward gives the gradient of a loss that depends on none: it is
right for such a loss, and wrong for the phases that the algorithm happens to choose. So the derivatives
are compared after a fixed combination <r, y_j> of each column is made positive. That takes one real
number a column from what is compared. A backward that is wrong otherwise stays wrong.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product

import torch
from torch import Tensor

from hoglib._core.pytree import is_float

Gauge = Callable[[Sequence[Tensor]], list[Tensor]]
COLUMNS, ROWS = "columns", "rows"


def gauges(outputs: Sequence[Tensor]) -> Iterator[Gauge]:
    """The maps that fix the phases of the columns, or of the rows, of the matrices among some outputs.

    The columns j of all matrices have one phase, as those of U and V in U diag(s) V^H have, whose rows
    have the opposite one in V^H.
    """
    dims = max((y.dim() for y in outputs), default=0)  # a batch of eigenvalues is no matrix
    matrices = [
        k for k, y in enumerate(outputs)
        if is_float(y) and y.layout is torch.strided and y.dim() == dims > 1
    ]  # fmt: skip
    if not 0 < len(matrices) < 3:
        return
    for sides in product((COLUMNS, ROWS), repeat=len(matrices)):
        side_of = dict(zip(matrices, sides, strict=True))
        vectors = [_as_columns(outputs[k], side) for k, side in side_of.items()]
        counts = {(*y.shape[:-2], y.shape[-1]) for y in vectors}
        if len(counts) == 1 and all(y.shape[-2] > 1 for y in vectors):
            yield partial(_fixed, side_of=side_of)


def _as_columns(y: Tensor, side: str) -> Tensor:
    return y if side == COLUMNS else y.mH


def _fixed(outputs: Sequence[Tensor], side_of: dict[int, str]) -> list[Tensor]:
    first, side = next(iter(side_of.items()))
    columns = _as_columns(outputs[first], side)
    random = torch.Generator().manual_seed(4)
    r = torch.randn(columns.shape[-2], 1, dtype=torch.complex128, generator=random)
    r = (r if columns.is_complex() else r.real).to(columns)
    s = (r.conj() * columns).sum(-2, keepdim=True).sgn()
    found = list(outputs)
    for k, side in side_of.items():
        found[k] = _as_columns(_as_columns(outputs[k], side) * s.conj(), side)
    return found
