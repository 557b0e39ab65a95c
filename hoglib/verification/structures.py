"""Arguments with a structure: a Function may be right along directions that keep it, and no others.

    A = A^T,  A = tril(A),  A = triu(A),  sum_j p_j = 1,  logsumexp_j p_j = 0,  |x| = 1

The backward of a square root that is given symmetric matrices only may assume that. Along a direction
that leaves the structure its gradient G is not the derivative, and where the argument is always
computed as a structured one, x = h(z), nothing depends on that part of G. P is a map to the structure
with P(x) = x on it, so that h = P h and

    h'^T G = h'^T P'^T G,        h'^T n = 0  for each  n = w - P'(x)^T w

The derivatives that count are those of f P; and the second equation tells whether x was computed so.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from hoglib._core.element_differences import max_abs, random_like
from hoglib._core.gradient_graph import graph_summary
from hoglib._core.pytree import is_float
from hoglib._core.state import preserve_random_state
from hoglib.verification.call import Arrange, Call, Gauge

MOST_DIMS = 4  # of a tensor whose rows are looked at
MOST_CHOICES = 24  # combinations for several arguments


class Structure(NamedTuple):
    """What an argument has, as in "keep it symmetric", and the map P to such arguments."""

    name: str
    project: Arrange

    def fits(self, x: Tensor) -> bool:
        """Whether P(x) = x, to rounding."""
        rounding = 100 * torch.finfo(x.dtype).eps * max_abs(x)
        return bool(((x - self.project(x)).abs() <= rounding).all())  # False for NaN


def symmetrized(x: Tensor) -> Tensor:
    return (x + x.mH) / 2


def _sum_one(x: Tensor, dim: int) -> Tensor:
    return x / x.sum(dim, keepdim=True)


def _normalized(x: Tensor, dim: int) -> Tensor:
    return x - x.logsumexp(dim, keepdim=True)


def _unit(x: Tensor, dim: int) -> Tensor:
    return x / torch.linalg.vector_norm(x, dim=dim, keepdim=True)


MATRICES = (
    Structure("symmetric", symmetrized),
    Structure("lower triangular", torch.tril),
    Structure("upper triangular", torch.triu),
)


def structures_of(x: Tensor) -> list[Structure]:
    """The structures that a tensor has, those with more directions first."""
    if not x.numel() or not bool(x.isfinite().all()) or not bool(x.any()):
        return []
    found: list[Structure] = []
    if x.ndim > 1 and x.shape[-1] == x.shape[-2] > 1:
        found += MATRICES
    for dim in range(max(0, x.ndim - MOST_DIMS), x.ndim):
        if x.shape[dim] > 1:
            along = f"along dimension {dim}" if x.ndim > 1 else "altogether"
            if not x.is_complex() and bool((x >= 0).all()):
                found.append(Structure(f"summing to one {along}", partial(_sum_one, dim=dim)))
            if not x.is_complex() and bool((x <= 0).all()):
                name = f"log-probabilities {along}"
                found.append(Structure(name, partial(_normalized, dim=dim)))
            found.append(Structure(f"of length one {along}", partial(_unit, dim=dim)))
    return [one for one in found if one.fits(x)]


Chosen = dict[int, Structure]  # by variable


def choices(found: dict[int, list[Structure]]) -> Iterator[Chosen]:
    """The structures to keep, one variable alone before several together."""
    options = [[None, *found[j]] for j in found]
    picked = sorted(product(*options), key=lambda some: sum(one is not None for one in some))
    for some in picked[1 : 1 + MOST_CHOICES]:
        pairs = zip(found, some, strict=True)
        yield {j: one for j, one in pairs if one is not None}


def structures(call: Call) -> dict[int, list[Structure]]:
    """The structures of each variable of a call that has any."""
    found = {j: structures_of(_as_given(call.value(j))) for j in range(len(call.point))}
    return {j: some for j, some in found.items() if some}


def _as_given(x: Tensor) -> Tensor:
    """In single precision, if its numbers are of that: they sum to one with that rounding only."""
    narrow = x.to(torch.complex64 if x.is_complex() else torch.float32)
    return narrow if torch.equal(narrow.to(x.dtype), x) else x


def is_computed_so(x: Tensor, structure: Structure) -> bool:
    """Whether a tensor is computed so that it has the structure for whatever it is computed from: no
    gradient that vanishes along the directions which keep it reaches a leaf. Not so is a leaf, and what
    has the structure at these values only, such as an identity matrix at the start of a training.

    True where that cannot be tried, because it would run code of the user's.
    """
    if x.grad_fn is None:
        return False
    graph = graph_summary(x)
    if graph.has_user_code or not graph.leaves:
        return True
    with suppress(Exception), preserve_random_state():
        own = x.detach().requires_grad_()
        w = random_like(x, torch.Generator().manual_seed(6))
        with torch.enable_grad():
            (along,) = torch.autograd.grad(structure.project(own), own, w)
        reaching, whole = (
            torch.autograd.grad(
                x, list(graph.leaves.values()), part, retain_graph=True, materialize_grads=True
            )
            for part in (w - along, w)
        )
        limit = torch.finfo(x.dtype).eps ** 0.5
        return _size(reaching) <= limit * _size(whole)
    return True


def _size(tensors: Sequence[Tensor]) -> float:
    return max(map(max_abs, tensors), default=0.0)


def one_triangle(call: Call) -> dict[int, Structure]:
    """The variables that are symmetric (Hermitian) matrices of which the function reads one triangle
    only, or which it refuses if they are not symmetric.

    The gradient by such a matrix is a convention: some functions spread the gradient of one triangle
    over both, others leave it where it was read. Along symmetric matrices all conventions agree.
    """
    found: dict[int, Structure] = {}
    for j in range(len(call.point)):
        x = call.value(j)
        if x.ndim > 1 and x.shape[-1] == x.shape[-2] > 1 and torch.equal(x, x.mH):
            noise = torch.linspace(0.5, 1.5, x.numel(), dtype=torch.float64).reshape(x.shape).to(x)
            here = _values(call, j, x)
            sides = [_values(call, j, x + part) for part in (noise.tril(-1), noise.triu(1))]
            unread = any(_same_values(here, side) for side in sides)
            small = 1e-3 * noise
            near = [_values(call, j, x + part) for part in (small.tril(-1), small.triu(1))]
            symmetric_only = near == [None, None] and _values(call, j, x + small + small.mH)
            if unread or symmetric_only:
                found[j] = MATRICES[0]
    return found


def _values(call: Call, j: int, x: Tensor) -> list[Tensor] | None:
    """What fn returns for another value of the variable j; None if it refuses that."""
    x = torch.view_as_real(x) if x.is_complex() else x
    try:
        leaves = call.leaves(*call.point[:j], x, *call.point[j + 1 :])
        return [y for y in leaves if is_float(y)]
    except Exception:  # fn may refuse inputs that the user did not pass
        return None


def _same_values(a: list[Tensor] | None, b: list[Tensor] | None) -> bool:
    return bool(a and b) and all(map(torch.equal, a or [], b or []))


# Outputs that are determined up to a sign or a phase of each column: eigenvectors, singular vectors.
#
#     y_j -> y_j conj(s_j),    s_j = <r, y_j> / |<r, y_j>|
#
# An algorithm chooses one of them, and backward gives the gradient of a loss that depends on none: it
# is right for such a loss, and wrong for the phases that the algorithm happens to choose. So the
# derivatives are compared after a fixed combination <r, y_j> of each column is made positive. That
# takes one real number a column from what is compared. A backward that is wrong otherwise stays wrong.

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
