"""The inverse of a matrix from its Cholesky factor."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hoglib.ops._halves import full_precision


@full_precision(widen=True)
def cholesky_inverse(L: Tensor, upper: bool = False, *, out: Tensor | None = None) -> Tensor:
    r"""Inverse of a positive definite matrix from its Cholesky factor, as torch.cholesky_inverse.

        Y = (L L^H)^-1, or (L^H L)^-1 if upper        dY = -Y d(L L^H) Y

    Shapes: L and Y (*, n, n); the diagonal of L is real. Only the triangle of L is read, so the
    gradient of the rest is 0; torch's is wrong for an L that is no triangle, its forward mode for any.
    Raises what torch raises: LinAlgError for a 0 on the diagonal, RuntimeError for shapes and dtypes.
    """
    if out is not None:
        return torch.cholesky_inverse(L, upper, out=out)
    torch.cholesky_inverse(L.detach(), upper)  # torch's errors
    identity = torch.eye(L.shape[-1], dtype=L.dtype, device=L.device)
    inverse = torch.linalg.solve_triangular(L, identity, upper=upper)
    return inverse @ inverse.mH if upper else inverse.mH @ inverse


def _function(input: Tensor, upper: bool = False, *, out: Tensor | None = None) -> Tensor:
    return cholesky_inverse(input, upper, out=out)


REPLACES: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.cholesky_inverse: _function,  # the name of the argument is input, not L
    torch.Tensor.cholesky_inverse: _function,
}
