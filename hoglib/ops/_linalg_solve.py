"""Solutions of linear systems.

Torch's rule for the tangent of a solution takes the factors of A for constants, so that nothing may be
differentiated after forward mode; its reverse mode is right to any order.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from hoglib.ops._halves import full_precision
from hoglib.ops._modes import reverse_only


@full_precision(widen=True)
def solve(A: Tensor, B: Tensor, *, left: bool = True, out: Tensor | None = None) -> Tensor:
    r"""The solution of a linear system, as torch.linalg.solve.

        A X = B, or X A = B with left=False        dX = A^-1 (dB - dA X)

    Shapes: A (*, n, n), B (*, n, k), or (*, n) by torch's rule for vectors; batches broadcast.
    Reverse mode is torch's own. Under forward mode X = X0 + A^-1 (B - A X0), where X0 is torch's
    solution, without derivatives, and A^-1 torch's inverse, whose derivatives are right to any order.
    Raises what torch raises: LinAlgError for a singular A, RuntimeError for shapes and dtypes.
    """
    if out is not None:
        return torch.linalg.solve(A, B, left=left, out=out)
    A, B = _of_one_rank(A, B)
    if reverse_only():
        return torch.linalg.solve(A, B, left=left)
    return _refined(A, B, torch.linalg.solve(A.detach(), B.detach(), left=left), left)


@full_precision(widen=True)
def solve_ex(
    A: Tensor, B: Tensor, *, left: bool = True, check_errors: bool = False, out: Any = None
) -> Any:
    r"""`solve`, with the index of the first pivot that is 0 instead of an error; as torch's."""
    if out is not None:
        return torch.linalg.solve_ex(A, B, left=left, check_errors=check_errors, out=out)
    A, B = _of_one_rank(A, B)
    if reverse_only():
        return torch.linalg.solve_ex(A, B, left=left, check_errors=check_errors)
    X, info = torch.linalg.solve_ex(A.detach(), B.detach(), left=left, check_errors=check_errors)
    make: Any = torch.return_types.linalg_solve_ex  # type: ignore[attr-defined]
    return make((_refined(A, B, X, left), info))


@full_precision(widen=True)
def tensorsolve(
    A: Tensor, B: Tensor, dims: Sequence[int] | None = None, *, out: Tensor | None = None
) -> Tensor:
    r"""X with tensordot(A, X, X.dim()) = B, as torch.linalg.tensorsolve; see `solve`."""
    if out is not None:
        return torch.linalg.tensorsolve(A, B, dims, out=out)
    moved = [d % A.dim() for d in dims or ()]
    last = A.permute([d for d in range(A.dim()) if d not in moved] + moved)
    unknown = last.shape[B.dim() :]
    n = prod(unknown)
    if n != prod(last.shape[: B.dim()]) or n != B.numel():
        return torch.linalg.tensorsolve(A, B, dims)  # torch's error
    return solve(last.reshape(n, n), B.reshape(n)).reshape(unknown)


def _is_vector(A: Tensor, B: Tensor) -> bool:
    return B.dim() == 1 or (B.dim() == A.dim() - 1 and B.shape == A.shape[:-1])


def _of_one_rank(A: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
    """Matrices with as many batch dimensions as each other: else torch's vmap aligns them wrongly."""
    missing = B.dim() - A.dim()
    if A.dim() < 2 or _is_vector(A, B) or missing == 0:
        return A, B
    return A[(None,) * max(missing, 0)], B[(None,) * max(-missing, 0)]


def _refined(A: Tensor, B: Tensor, X: Tensor, left: bool) -> Tensor:
    """A step of iterative refinement: from a constant X, it has all the derivatives of A^-1 B."""
    inverse = torch.linalg.inv_ex(A)[0]
    if _is_vector(A, B):
        return X + (inverse @ (B.unsqueeze(-1) - A @ X.unsqueeze(-1))).squeeze(-1)
    return X + (inverse @ (B - A @ X) if left else (B - X @ A) @ inverse)


def triangular_solve(
    b: Tensor,
    A: Tensor,
    upper: bool = True,
    transpose: bool = False,
    unitriangular: bool = False,
) -> tuple[Tensor, Tensor]:
    """`torch.triangular_solve` by `torch.linalg.solve_triangular`, which is right in every mode."""
    matrix, above = (A.mT, not upper) if transpose else (A, upper)
    x = torch.linalg.solve_triangular(matrix, b, upper=above, unitriangular=unitriangular)
    result: tuple[Tensor, Tensor] = torch.return_types.triangular_solve((x, A.clone()))
    return result


REPLACES: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.linalg.solve: solve,
    torch.linalg.solve_ex: solve_ex,
    torch.linalg.tensorsolve: tensorsolve,
}
