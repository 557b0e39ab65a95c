"""Linear systems, and the inverse of a matrix from its Cholesky factor.

torch's rule for the tangent of a solution takes the factors of A for constants, so that nothing may be
differentiated after forward mode; its reverse mode is right to any order.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from hoglib._core.mixed_precision import full_precision
from hoglib._core.torch_modes import reverse_only


@full_precision(widen=True)
def solve(A: Tensor, B: Tensor, *, left: bool = True, out: Tensor | None = None) -> Tensor:
    r"""The solution of a linear system, as `torch.linalg.solve`.

        A X = B, or X A = B with left=False        dX = A^-1 (dB - dA X)

    Reverse mode is torch's own. Under forward mode X = X0 + A^-1 (B - A X0), where X0 is torch's
    solution, without derivatives, and A^-1 torch's inverse, whose derivatives are right to any order.
    Differentiable to any order, in every mode, under vmap.

    Args:
        A: Square matrices, float32, float64 or complex.
        B: Right-hand sides, of the dtype of A.
        left: Whether A is on the left. Default: True.
        out: Where torch writes the result; then it is torch's own. Default: none.
    Returns:
        X, like B.
    Raises:
        torch.linalg.LinAlgError: for a singular A.
        RuntimeError: as torch, for shapes and dtypes.
    Shape:
        - A: [..., n, n]
        - B, X: [..., n, k], or [..., n] by torch's rule for vectors; batches broadcast
    Example:
        >>> A, B = torch.tensor([[2.0]]), torch.tensor([[1.0]])
        >>> hog.ops.solve(A, B)
        tensor([[0.5000]])
        >>> hog.hvp(lambda A: hog.ops.solve(A, B).sum(), A, torch.ones(1, 1))[1]
        tensor([[0.2500]])
    """
    if out is not None:
        return torch.linalg.solve(A, B, left=left, out=out)
    A, B = _align_batches(A, B)
    if reverse_only():
        return torch.linalg.solve(A, B, left=left)
    return _refine(A, B, torch.linalg.solve(A.detach(), B.detach(), left=left), left)


@full_precision(widen=True)
def solve_ex(
    A: Tensor, B: Tensor, *, left: bool = True, check_errors: bool = False, out: Any = None
) -> Any:
    r"""`solve` that reports a singular matrix instead of raising, as `torch.linalg.solve_ex`.

        A X = B, or X A = B with left=False        dX = A^-1 (dB - dA X)

    Differentiable to any order, in every mode, under vmap.

    Args:
        A: Square matrices, float32, float64 or complex.
        B: Right-hand sides, of the dtype of A.
        left: Whether A is on the left. Default: True.
        check_errors: Whether a singular A raises all the same. Default: False.
        out: Where torch writes the results; then they are torch's own. Default: none.
    Returns:
        torch's named tuple (result, info): X, and for each matrix the index of the first pivot that is
        0, counted from 1, or 0.
    Raises:
        torch.linalg.LinAlgError: for a singular A with check_errors.
        RuntimeError: as torch, for shapes and dtypes.
    Shape:
        - A: [..., n, n]
        - B, X: [..., n, k], or [..., n] by torch's rule for vectors; batches broadcast
        - info: [...]
    Example:
        >>> hog.ops.solve_ex(2 * torch.eye(1), torch.ones(1, 1)).result
        tensor([[0.5000]])
        >>> hog.ops.solve_ex(torch.zeros(1, 1), torch.ones(1, 1)).info
        tensor(1, dtype=torch.int32)
    """
    if out is not None:
        return torch.linalg.solve_ex(A, B, left=left, check_errors=check_errors, out=out)
    A, B = _align_batches(A, B)
    if reverse_only():
        return torch.linalg.solve_ex(A, B, left=left, check_errors=check_errors)
    X, info = torch.linalg.solve_ex(A.detach(), B.detach(), left=left, check_errors=check_errors)
    make: Any = torch.return_types.linalg_solve_ex  # type: ignore[attr-defined]
    return make((_refine(A, B, X, left), info))


@full_precision(widen=True)
def tensorsolve(
    A: Tensor, B: Tensor, dims: Sequence[int] | None = None, *, out: Tensor | None = None
) -> Tensor:
    r"""The solution of a tensor equation, as `torch.linalg.tensorsolve`.

        tensordot(A, X, X.dim()) = B        dX = A^-1 (dB - dA X)

    It reshapes A to a square matrix and solves by `solve`. Differentiable to any order, in every mode,
    under vmap.

    Args:
        A: A tensor that is a square matrix from the dimensions of X to those of B.
        B: The right-hand side, of the dtype of A.
        dims: The dimensions of A that X takes, moved to its end first. Default: the last ones.
        out: Where torch writes the result; then it is torch's own. Default: none.
    Returns:
        X.
    Raises:
        torch.linalg.LinAlgError: for a singular A.
        RuntimeError: as torch, for shapes and dtypes.
    Shape:
        - A: [*B.shape, *X.shape]
        - B: any
        - X: with as many elements as B
    Example:
        >>> A = 2 * torch.eye(4).reshape(4, 2, 2)
        >>> hog.ops.tensorsolve(A, torch.arange(4.0))
        tensor([[0.0000, 0.5000],
                [1.0000, 1.5000]])
    """
    if out is not None:
        return torch.linalg.tensorsolve(A, B, dims, out=out)
    solved = [d % A.dim() for d in dims or ()]
    last = A.permute([d for d in range(A.dim()) if d not in solved] + solved)
    unknown = last.shape[B.dim() :]
    n = prod(unknown)
    if n != prod(last.shape[: B.dim()]) or n != B.numel():
        return torch.linalg.tensorsolve(A, B, dims)  # torch's error
    return solve(last.reshape(n, n), B.reshape(n)).reshape(unknown)


@full_precision(widen=True)
def cholesky_inverse(L: Tensor, upper: bool = False, *, out: Tensor | None = None) -> Tensor:
    r"""Inverse of a positive definite matrix from its Cholesky factor, as `torch.cholesky_inverse`.

        Y = (L L^H)^-1, or (L^H L)^-1 if upper        dY = -Y d(L L^H) Y

    Only the triangle of L is read, so the gradient of the rest is 0; torch's is wrong for an L that is
    no triangle, its forward mode for any. Differentiable to any order, in every mode, under vmap.

    Args:
        L: Cholesky factors, whose diagonal is real.
        upper: Whether L is an upper triangle. Default: False.
        out: Where torch writes the result; then it is torch's own. Default: none.
    Returns:
        Y, like L.
    Raises:
        torch.linalg.LinAlgError: for a 0 on the diagonal.
        RuntimeError: as torch, for shapes and dtypes.
    Shape:
        - L, Y: [..., n, n]
    Example:
        >>> L = torch.tensor([[2.0]])
        >>> hog.ops.cholesky_inverse(L)
        tensor([[0.2500]])
        >>> hog.hvp(lambda L: hog.ops.cholesky_inverse(L).sum(), L, torch.ones(1, 1))[1]
        tensor([[0.3750]])
    """
    if out is not None:
        return torch.cholesky_inverse(L, upper, out=out)
    torch.cholesky_inverse(L.detach(), upper)  # torch's errors
    identity = torch.eye(L.shape[-1], dtype=L.dtype, device=L.device)
    inverse = torch.linalg.solve_triangular(L, identity, upper=upper)
    return inverse @ inverse.mH if upper else inverse.mH @ inverse


def torch_cholesky_inverse(
    input: Tensor, upper: bool = False, *, out: Tensor | None = None
) -> Tensor:
    """With the signature of `torch.cholesky_inverse`, where L is called input."""
    return cholesky_inverse(input, upper, out=out)


def torch_triangular_solve(
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


def _is_vector(A: Tensor, B: Tensor) -> bool:
    return B.dim() == 1 or (B.dim() == A.dim() - 1 and B.shape == A.shape[:-1])


def _align_batches(A: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
    """Matrices with equally many batch dimensions, which torch's vmap otherwise aligns wrongly."""
    missing = B.dim() - A.dim()
    if A.dim() < 2 or _is_vector(A, B) or missing == 0:
        return A, B
    return A[(None,) * max(missing, 0)], B[(None,) * max(-missing, 0)]


def _refine(A: Tensor, B: Tensor, X: Tensor, left: bool) -> Tensor:
    """A step of iterative refinement: from a constant X, it has all the derivatives of A^-1 B."""
    inverse = torch.linalg.inv_ex(A)[0]
    if _is_vector(A, B):
        return X + (inverse @ (B.unsqueeze(-1) - A @ X.unsqueeze(-1))).squeeze(-1)
    return X + (inverse @ (B - A @ X) if left else (B - X @ A) @ inverse)
