"""Matrices of which a function reads one triangle only, or that it wants symmetric.

The gradient by such a matrix is a convention: torch spreads what one triangle gets over both, others
leave it where it was read. Along symmetric matrices all of them agree, and differences too.
"""

import torch
from torch import Tensor

from hoglib.verification._call import Call, is_float


def one_triangle(call: Call) -> frozenset[int]:
    """The variables that are symmetric (Hermitian) matrices, with one triangle that nothing reads, or
    that may not be anything else."""
    found = set()
    for j in range(len(call.point)):
        x = call.value(j)
        if x.ndim > 1 and x.shape[-1] == x.shape[-2] > 1 and torch.equal(x, x.mH):
            noise = torch.linspace(0.5, 1.5, x.numel(), dtype=torch.float64).reshape(x.shape).to(x)
            here = _values(call, j, x)
            sides = [_values(call, j, x + part) for part in (noise.tril(-1), noise.triu(1))]
            unread = any(_same(here, side) for side in sides)
            small = 1e-3 * noise
            near = [_values(call, j, x + part) for part in (small.tril(-1), small.triu(1))]
            symmetric_only = near == [None, None] and _values(call, j, x + small + small.mH)
            if unread or symmetric_only:
                found.add(j)
    return frozenset(found)


def _values(call: Call, j: int, x: Tensor) -> list[Tensor] | None:
    """What fn returns for another value of the variable j; None if it refuses that."""
    x = torch.view_as_real(x) if x.is_complex() else x
    try:
        leaves = call.leaves(*call.point[:j], x, *call.point[j + 1 :])
        return [y for y in leaves if is_float(y)]
    except Exception:  # whatever fn says of inputs it was not given
        return None


def _same(a: list[Tensor] | None, b: list[Tensor] | None) -> bool:
    return bool(a and b) and all(map(torch.equal, a or [], b or []))
