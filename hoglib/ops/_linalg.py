"""Determinants and their logarithms.

Torch's rules for their tangents take the factors of A for constants, and the second derivatives of
its det are NaN or wrong where it is small. What is right: slogdet in reverse mode, the factors
themselves in every mode.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hoglib._core.mixed_precision import full_precision, is_autocast, upcast_half
from hoglib._core.torch_modes import reverse_only

# By so much can the rank be less than n with every derivative to the third order right.
DEFICIENCY = 3


@full_precision(widen=False)
def det(A: Tensor, *, out: Tensor | None = None) -> Tensor:
    r"""Determinant, as torch.linalg.det.

        det A = det(A + W V^T) det(I - V^T (A + W V^T)^-1 W)        d det A = tr(adj(A) dA)

    Shapes: A (*, n, n); the result (*). W and V are constants: W = 0 where A has full rank, otherwise
    they have a column for each pivot that is almost 0, to 3, which makes A + W V^T regular. So the
    derivatives of singular matrices are right too, where torch's are 0, wrong or NaN: to any order for
    rank n - 3 and more, and 0, which is right to the third order, for less. For n <= 3, Sarrus' rule.
    Raises RuntimeError as torch does, for matrices that are not square and for dtypes.
    """
    if out is not None or not _has_factors(A):
        return torch.linalg.det(A, out=out)
    if A.shape[-1] <= 3:
        return _det_up_to_3(A)
    around = _regular_matrix_near(A.detach())
    B = torch.where(around.lost[..., None, None], around.identity, A + around.change)
    sign, logarithm, X = _decompose(B, around.columns)
    growth = (logarithm - logarithm.detach()).exp()
    if A.is_complex():
        growth = growth * sign * sign.detach().conj()
    rows = around.places[..., None].expand(*X.shape[:-2], around.places.shape[-1], X.shape[-1])
    rest = _det_up_to_3(around.small_identity - X.gather(-2, rows))
    product = torch.where(around.lost, 0, around.regular_value * growth * rest)
    return around.value + (product - product.detach())


@full_precision(widen=False)
def slogdet(A: Tensor, *, out: Any = None) -> Any:
    r"""Sign of the determinant and logarithm of its absolute value, as torch.linalg.slogdet.

        sign = det A / |det A|        d log|det A| = Re tr(A^-1 dA)

    Shapes: A (*, n, n); both results (*). A singular A has (0, -inf) and, as in torch, derivatives that
    are not finite. Errors as for `det`.
    """
    if out is not None or not _has_factors(A) or reverse_only():
        return torch.linalg.slogdet(A, out=out)
    make: Any = torch.return_types.linalg_slogdet  # type: ignore[attr-defined]
    return make(_by_factors(A))


@full_precision(widen=False)
def logdet(input: Tensor) -> Tensor:
    r"""Logarithm of the determinant, as torch.logdet.

        y = log det A        dy = tr(A^-1 dA)

    NaN for a negative determinant; -inf for that of a singular matrix, as `slogdet`. Of complex
    matrices, the principal branch. Shapes and errors as for `slogdet`.
    """
    if not _has_factors(input) or reverse_only():
        return torch.logdet(input)
    sign, logarithm = _by_factors(input)
    if input.is_complex():
        return sign.log() + logarithm
    return torch.where(sign == -1, float("nan"), logarithm)


def _has_factors(A: Tensor) -> bool:
    """Whether torch factorises A; the others are its errors, and the empty matrices."""
    wide = A.dtype in (torch.float32, torch.float64, torch.complex64, torch.complex128)
    return wide and A.dim() >= 2 and A.shape[-1] == A.shape[-2] and A.numel() > 0


class _Near(NamedTuple):
    """A regular matrix A + W V^T, all of it constant."""

    change: Tensor  # W V^T
    columns: Tensor  # W, a column for each place
    places: Tensor  # V has a 1 here, for each column
    lost: Tensor  # more pivots are 0 than there are places
    value: Tensor  # the determinant of A
    regular_value: Tensor  # that of the regular matrix
    identity: Tensor
    small_identity: Tensor


def _regular_matrix_near(A: Tensor) -> _Near:
    """Replaces the pivots that are 0: with A = P L U, P L (U + s e_i e_i^T) = A + (s P L e_i) e_i^T."""
    n = A.shape[-1]
    count = min(n, DEFICIENCY)
    LU, swaps, _ = torch.linalg.lu_factor_ex(A)
    P, L, U = torch.lu_unpack(LU, swaps)
    pivots = U.diagonal(dim1=-2, dim2=-1)
    # small against its column and its row, so that rows and columns of any scale are regular
    rows = (P.mT @ A.abs().amax(-1, True).to(A.dtype)).abs().squeeze(-1)
    sizes = torch.minimum(U.abs().amax(-2), rows)
    ratios = pivots.abs() / torch.where(sizes > 0, sizes, 1)
    eps = torch.finfo(A.dtype).eps
    smallest, places = ratios.topk(count, largest=False)
    size = torch.where(sizes > 0, sizes, sizes.amax(-1, True))
    size = torch.where(size > 0, size, 1).gather(-1, places)
    amounts = torch.where(smallest < eps ** (1 / 3), size, 0).to(A.dtype)
    wide = places[..., None, :].expand(*L.shape[:-1], count)
    columns = P @ (L.gather(-1, wide) * amounts[..., None, :])
    parity = _parity(swaps).to(A.dtype)
    regular = pivots.scatter_add(-1, places, amounts)
    identity = torch.eye(n, dtype=A.dtype, device=A.device)
    return _Near(
        change=torch.zeros_like(A).scatter_add(-1, wide, columns),
        columns=columns,
        places=places,
        lost=(ratios <= n * eps).sum(-1) > count,
        value=parity * pivots.prod(-1),
        regular_value=parity * regular.prod(-1),
        identity=identity,
        small_identity=identity[:count, :count],
    )


def _decompose(B: Tensor, W: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sign, logarithm of the absolute determinant, and B^-1 W, of a regular B."""
    if reverse_only():
        sign, logarithm = torch.linalg.slogdet(B)
        return sign, logarithm, torch.linalg.solve_ex(B, W)[0]
    return *_by_factors(B), torch.linalg.inv_ex(B)[0] @ W


def _by_factors(A: Tensor) -> tuple[Tensor, Tensor]:
    """Sign and logarithm by factors, which torch differentiates in every mode."""
    LU, swaps, _ = torch.linalg.lu_factor_ex(A)
    pivots = LU.diagonal(dim1=-2, dim2=-1)
    sign = _parity(swaps).to(A.dtype) * pivots.sgn().prod(-1)
    return sign, pivots.abs().log().sum(-1)


def _parity(swaps: Tensor) -> Tensor:
    """The sign of the permutation of rows: swaps[i] says which row, from 1, took the place of row i."""
    still = torch.arange(1, swaps.shape[-1] + 1, device=swaps.device)
    return 1 - 2 * ((swaps != still).sum(-1) % 2)


def _det_up_to_3(M: Tensor) -> Tensor:
    """By Sarrus' rule, a polynomial, which has all its derivatives at singular matrices too."""
    n = M.shape[-1]
    a = [[M[..., i, j] for j in range(n)] for i in range(n)]
    if n == 1:
        return a[0][0].clone()  # torch's result is no view of A
    if n == 2:
        return a[0][0] * a[1][1] - a[0][1] * a[1][0]
    return (
        a[0][0] * (a[1][1] * a[2][2] - a[1][2] * a[2][1])
        - a[0][1] * (a[1][0] * a[2][2] - a[1][2] * a[2][0])
        + a[0][2] * (a[1][0] * a[2][1] - a[1][1] * a[2][0])
    )


def _slogdet_method(input: Tensor, *, out: Any = None) -> Any:
    return slogdet(input, out=out)


def _det_method(input: Tensor) -> Tensor:
    return det(input)


DETERMINANT: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.linalg.det: det,
    torch.det: _det_method,  # the name of the argument is input, not A
    torch.Tensor.det: _det_method,
    torch.linalg.slogdet: slogdet,
    torch.slogdet: _slogdet_method,
    torch.Tensor.slogdet: _slogdet_method,
    torch.logdet: logdet,
    torch.Tensor.logdet: logdet,
}


# === Solutions of linear systems.
#
# Torch's rule for the tangent of a solution takes the factors of A for constants, so that nothing
# may be
# differentiated after forward mode; its reverse mode is right to any order.


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


SOLVE: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.linalg.solve: solve,
    torch.linalg.solve_ex: solve_ex,
    torch.linalg.tensorsolve: tensorsolve,
}


# === The inverse of a matrix from its Cholesky factor.


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


CHOLESKY_INVERSE: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.cholesky_inverse: _function,  # the name of the argument is input, not L
    torch.Tensor.cholesky_inverse: _function,
}


# === A sparse matrix times a dense one, in every mode: torch.sparse.mm has no forward mode.


def sparse_mm(mat1: Tensor, mat2: Tensor, *reduce: str) -> Tensor:
    r"""The product of a constant sparse matrix and a dense one.

        y_i = sum_(j: A_ij stored) A_ij x_j

    Shapes: mat1 (n, m) in the layout COO, mat2 (m, k) dense; y (n, k), dense. Half precision is
    summed in float32; under autocast the result has the dtype of autocast.
    What else torch.sparse.mm takes is left to it, with its derivatives: two sparse matrices, the
    layout CSR (which torch.func transforms cannot hold), a mat1 that requires grad.
    """
    ours = mat1.is_sparse and mat2.layout == torch.strided and mat1.dtype == mat2.dtype
    fits = mat1.dim() == mat2.dim() == 2 and mat1.shape[1] == mat2.shape[0]
    if reduce or mat1.requires_grad or not ours or not fits:
        return torch.sparse.mm(mat1, mat2, *reduce)
    rows, columns = mat1._indices().unbind()  # entries of one place add up, coalesced or not
    terms = upcast_half(mat1._values()).unsqueeze(-1) * mat2.index_select(0, columns)
    y = terms.new_zeros(mat1.shape[0], mat2.shape[1]).index_add(0, rows, terms)
    return y.to(torch.get_autocast_dtype(mat2.device.type) if is_autocast(mat2) else mat2.dtype)


SPARSE: dict[Callable[..., Any], Callable[..., Any]] = {torch.sparse.mm: sparse_mm}
