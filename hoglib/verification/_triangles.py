"""Matrices of which a function reads one triangle only, as a factorisation does.

The gradient by such a matrix is a convention: torch spreads what one triangle gets over both, others
leave it where it was read. Along symmetric matrices all of them agree, and differences too.
"""

import torch

from hoglib.verification._call import Call, is_float


def one_triangle(call: Call) -> frozenset[int]:
    """The variables that are symmetric (Hermitian) matrices, with one triangle that nothing reads."""
    found = set()
    for j in range(len(call.point)):
        x = call.value(j)
        square = x.ndim > 1 and x.shape[-1] == x.shape[-2] > 1
        if square and torch.equal(x, x.mH) and any(_unread(call, j, part) for part in (-1, 1)):
            found.add(j)
    return frozenset(found)


def _unread(call: Call, j: int, side: int) -> bool:
    """Whether the values do not depend on the triangle below (-1) or above (1) of the variable j."""
    x = call.value(j)
    noise = torch.linspace(0.5, 1.5, x.numel(), dtype=torch.float64).reshape(x.shape).to(x)
    noise = noise.tril(-1) if side < 0 else noise.triu(1)
    moved = torch.view_as_real(x + noise) if x.is_complex() else x + noise
    try:
        before, after = (
            [y for y in call.leaves(*call.point[:j], z, *call.point[j + 1 :]) if is_float(y)]
            for z in (call.point[j], moved)
        )
        return bool(before) and all(map(torch.equal, before, after))
    except Exception:  # whatever fn says of inputs it was not given
        return False
