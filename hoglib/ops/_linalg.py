"""Determinants, linear systems, and the inverse of a matrix from its Cholesky factor.

torch's forward mode takes the factors of A for constants, so that its results cannot be differentiated
again; and second derivatives of torch.linalg.det are NaN or wrong for a small determinant. In torch,
solve and slogdet are right in reverse mode, to any order, and the factorisations in every mode.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from hoglib._core.torch_api.mixed_precision import full_precision
from hoglib._core.torch_api.torch_modes import reverse_only
from hoglib.ops._stand_in import IN_FORWARD, OVER, OVER_FORWARD, SILENT, stands_in_for

__all__ = ["cholesky_inverse", "det", "logdet", "slogdet", "solve", "solve_ex", "tensorsolve"]

# For ranks down to n - _DEFICIENCY all derivatives are right; below, derivatives to third order are 0.
_DEFICIENCY = 3
_LOGARITHMS, _SYSTEMS = "slogdet, logdet", "linalg.solve"
_ISSUE = "198017"
_LACKS = f"a wrong forward mode{SILENT}"
_WRONG_FORWARD: Any = {"lacks": _LACKS, "modes": ("fr", "ff"), "issue": _ISSUE}
# torch's backward without create_graph solves by the saved LU factors, which have no tangents.
_OVER_FORWARD: Any = {
    "lacks": f"forward mode over a backward without create_graph is wrong{SILENT}; before torch 2.15 "
    f"{OVER_FORWARD}",
    "modes": IN_FORWARD,
    "issue": _ISSUE,
    "until": dict.fromkeys(OVER, (2, 14)),
}


def _rename_input(op: Callable[..., Any]) -> Callable[..., Any]:
    """The op with a first argument named input, torch's name outside of torch.linalg."""

    def adapter(input: Tensor, *args: Any, **options: Any) -> Any:
        return op(input, *args, **options)

    return adapter


@stands_in_for(
    torch.linalg.det,
    lacks=f"wrong second derivatives of singular matrices{SILENT}; before torch 2.15 {OVER_FORWARD}",
    issue=_ISSUE,
)
@full_precision(widen=False)
def det(A: Tensor) -> Tensor:
    r"""Determinant, as `torch.linalg.det`.

        det A = det(A + W V^T) det(I - V^T (A + W V^T)^-1 W)        d det A = tr(adj(A) dA)

    W and V are constants: W = 0 if A has full rank; otherwise a column of W and V for each pivot near
    0, up to 3, makes A + W V^T regular. So derivatives of singular matrices are right too (torch's are
    0, wrong or NaN): to any order for rank n - 3 and more, and for a lower rank 0, right to third
    order. For n <= 3, Sarrus' rule. In every mode, under vmap.

    Args:
        A: Square matrices, float32, float64 or complex.
    Returns:
        The determinant of each matrix.
    Raises:
        RuntimeError: as torch, for rectangular matrices and for dtypes.
    Shape:
        - A: [..., n, n]
        - y: [...]
    Example:
        >>> A = torch.tensor([[1.0, 2.0], [2.0, 4.0]])  # singular
        >>> hog.ops.det(A), hog.hvp(hog.ops.det, A, torch.eye(2))[1]
        (tensor(0.), tensor([[1., 0.],
                [0., 1.]]))
    """
    if not _has_factors(A):
        return torch.linalg.det(A)
    if A.shape[-1] <= 3:
        return _det_up_to_3(A)
    W, places, deficient, value, regular_value = _regular_matrix_near(A.detach())
    identity = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    index = places[..., None, :].expand_as(W)
    change = torch.zeros_like(A.detach()).scatter_add(-1, index, W)  # W V^T
    B = torch.where(deficient[..., None, None], identity, A + change)
    sign, logarithm, X = _decompose(B, W)
    # 1, with the derivatives of det B / det B.detach(); the logarithm avoids overflow
    growth = (logarithm - logarithm.detach()).exp()
    if A.is_complex():
        growth = growth * sign * sign.detach().conj()
    rows = places[..., None].expand(*X.shape[:-2], places.shape[-1], X.shape[-1])
    rest = _det_up_to_3(identity[: W.shape[-1], : W.shape[-1]] - X.gather(-2, rows))
    product = torch.where(deficient, 0, regular_value * growth * rest)
    # the value from A's own pivots, the derivatives from the regular matrix near A
    return value + (product - product.detach())


@stands_in_for(torch.linalg.slogdet, name=_LOGARITHMS, **_OVER_FORWARD)
@full_precision(widen=False)
def slogdet(A: Tensor) -> Any:
    r"""Sign of the determinant and logarithm of its absolute value, as `torch.linalg.slogdet`.

        sign = det A / |det A|        d log|det A| = Re tr(A^-1 dA)

    A singular A has (0, -inf) and, as in torch, infinite or NaN derivatives. Differentiable to any
    order, in every mode, under vmap.

    Args:
        A: Square matrices, float32, float64 or complex.
    Returns:
        torch's named tuple (sign, logabsdet).
    Raises:
        RuntimeError: as torch, for rectangular matrices and for dtypes.
    Shape:
        - A: [..., n, n]
        - sign, logabsdet: [...]
    Example:
        >>> A = 2 * torch.eye(2)
        >>> tuple(hog.ops.slogdet(A))
        (tensor(1.), tensor(1.3863))
        >>> hog.hvp(lambda A: hog.ops.slogdet(A).logabsdet, A, torch.eye(2))[1].diagonal()
        tensor([-0.2500, -0.2500])
    """
    if not _has_factors(A) or reverse_only():
        return torch.linalg.slogdet(A)
    make: Any = torch.return_types.linalg_slogdet  # type: ignore[attr-defined]
    return make(_slogdet_by_lu(A))


stands_in_for(torch.det, Tensor.det, name="det")(_rename_input(det))
stands_in_for(torch.slogdet, Tensor.slogdet, name=_LOGARITHMS)(_rename_input(slogdet))


@stands_in_for(torch.logdet, Tensor.logdet, name=_LOGARITHMS)
@full_precision(widen=False)
def logdet(input: Tensor) -> Tensor:
    r"""Logarithm of the determinant, as `torch.logdet`.

        y = log det A        dy = tr(A^-1 dA)

    NaN for a negative determinant; -inf for a singular matrix, with infinite or NaN derivatives. For
    complex matrices, the principal branch. Differentiable to any order, in every mode, under vmap.

    Args:
        input: A, square matrices, float32, float64 or complex.
    Returns:
        y.
    Raises:
        RuntimeError: as torch, for rectangular matrices and for dtypes.
    Shape:
        - input: [..., n, n]
        - y: [...]
    Example:
        >>> A = 2 * torch.eye(2)
        >>> hog.ops.logdet(A), hog.hvp(hog.ops.logdet, A, torch.eye(2))[1].diagonal()
        (tensor(1.3863), tensor([-0.2500, -0.2500]))
    """
    if not _has_factors(input) or reverse_only():
        return torch.logdet(input)
    sign, logarithm = _slogdet_by_lu(input)
    if input.is_complex():
        return sign.log() + logarithm
    return torch.where(sign == -1, float("nan"), logarithm)


def _has_factors(A: Tensor) -> bool:
    """Whether torch factorises A: nonempty square matrices of its dtypes; others are left to torch."""
    dtypes = (torch.float32, torch.float64, torch.complex64, torch.complex128)
    return A.dtype in dtypes and A.dim() >= 2 and A.shape[-1] == A.shape[-2] and A.numel() > 0


def _regular_matrix_near(A: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """A regular matrix A + W V^T near A, without derivatives.

    It replaces pivots of 0: with A = P L U, P L (U + s e_i e_i^T) = A + (s P L e_i) e_i^T.

    Returns W; the row of the 1 in each column of V; whether more pivots are 0 than V has columns; det
    A; det(A + W V^T).
    """
    n = A.shape[-1]
    count = min(n, _DEFICIENCY)
    LU, swaps, _ = torch.linalg.lu_factor_ex(A)
    P, L, U = torch.lu_unpack(LU, swaps)
    pivots = U.diagonal(dim1=-2, dim2=-1)
    # a pivot counts as 0 relative to its column and row, so that scales of rows and columns cancel
    rows = (P.mT @ A.abs().amax(-1, True).to(A.dtype)).abs().squeeze(-1)
    sizes = torch.minimum(U.abs().amax(-2), rows)
    ratios = pivots.abs() / torch.where(sizes > 0, sizes, 1)
    eps = torch.finfo(A.dtype).eps
    smallest, places = ratios.topk(count, largest=False)
    size = torch.where(sizes > 0, sizes, sizes.amax(-1, True))
    size = torch.where(size > 0, size, 1).gather(-1, places)
    amounts = torch.where(smallest < eps ** (1 / 3), size, 0).to(A.dtype)
    index = places[..., None, :].expand(*L.shape[:-1], count)
    columns = P @ (L.gather(-1, index) * amounts[..., None, :])
    parity = _permutation_sign(swaps).to(A.dtype)
    regular = pivots.scatter_add(-1, places, amounts)
    deficient = (ratios <= n * eps).sum(-1) > count
    return columns, places, deficient, parity * pivots.prod(-1), parity * regular.prod(-1)


def _decompose(B: Tensor, W: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sign and logarithm of the absolute determinant of a regular B, and B^-1 W."""
    if reverse_only():
        sign, logarithm = torch.linalg.slogdet(B)
        return sign, logarithm, torch.linalg.solve_ex(B, W)[0]
    return *_slogdet_by_lu(B), torch.linalg.inv_ex(B)[0] @ W


def _slogdet_by_lu(A: Tensor) -> tuple[Tensor, Tensor]:
    """Sign and logarithm from the LU factors, which torch differentiates in every mode."""
    LU, swaps, _ = torch.linalg.lu_factor_ex(A)
    pivots = LU.diagonal(dim1=-2, dim2=-1)
    sign = _permutation_sign(swaps).to(A.dtype) * pivots.sgn().prod(-1)
    return sign, pivots.abs().log().sum(-1)


def _permutation_sign(swaps: Tensor) -> Tensor:
    """The sign of LAPACK's row permutation: row i was swapped with row swaps[i], counted from 1."""
    # each swap of different rows changes the sign
    unmoved = torch.arange(1, swaps.shape[-1] + 1, device=swaps.device)
    return 1 - 2 * ((swaps != unmoved).sum(-1) % 2)


def _det_up_to_3(M: Tensor) -> Tensor:
    """The determinant by Sarrus' rule, a polynomial: right derivatives at singular matrices, too."""
    n = M.shape[-1]
    a = [[M[..., i, j] for j in range(n)] for i in range(n)]
    if n == 1:
        return a[0][0].clone()  # torch.linalg.det returns no view of A
    if n == 2:
        return a[0][0] * a[1][1] - a[0][1] * a[1][0]
    return (
        a[0][0] * (a[1][1] * a[2][2] - a[1][2] * a[2][1])
        - a[0][1] * (a[1][0] * a[2][2] - a[1][2] * a[2][0])
        + a[0][2] * (a[1][0] * a[2][1] - a[1][1] * a[2][0])
    )


@stands_in_for(torch.linalg.solve, name=_SYSTEMS, **_OVER_FORWARD)
@full_precision(widen=True)
def solve(A: Tensor, B: Tensor, *, left: bool = True) -> Tensor:
    r"""The solution of a linear system, as `torch.linalg.solve`.

        A X = B, or X A = B with left=False        dX = A^-1 (dB - dA X)

    Reverse mode is torch's own. Under forward mode X = X0 + A^-1 (B - A X0), where X0 is torch's
    solution, without derivatives, and A^-1 torch's inverse, with derivatives that are right to any
    order. Differentiable to any order, in every mode, under vmap.

    Args:
        A: Square matrices, float32, float64 or complex.
        B: Right-hand sides, of the dtype of A.
        left: Whether A is on the left. Default: True.
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
    A, B = _align_batches(A, B)
    if reverse_only():
        return torch.linalg.solve(A, B, left=left)
    return _refine_solution(A, B, torch.linalg.solve(A.detach(), B.detach(), left=left), left)


@stands_in_for(torch.linalg.solve_ex, name=_SYSTEMS)
@full_precision(widen=True)
def solve_ex(A: Tensor, B: Tensor, *, left: bool = True, check_errors: bool = False) -> Any:
    r"""`solve` that reports a singular matrix instead of raising, as `torch.linalg.solve_ex`.

        A X = B, or X A = B with left=False        dX = A^-1 (dB - dA X)

    Differentiable to any order, in every mode, under vmap.

    Args:
        A: Square matrices, float32, float64 or complex.
        B: Right-hand sides, of the dtype of A.
        left: Whether A is on the left. Default: True.
        check_errors: Whether to raise for a singular A. Default: False.
    Returns:
        torch's named tuple (result, info): X, and for each matrix the index of the first zero pivot,
        counted from 1, or 0.
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
    A, B = _align_batches(A, B)
    if reverse_only():
        return torch.linalg.solve_ex(A, B, left=left, check_errors=check_errors)
    X, info = torch.linalg.solve_ex(A.detach(), B.detach(), left=left, check_errors=check_errors)
    make: Any = torch.return_types.linalg_solve_ex  # type: ignore[attr-defined]
    return make((_refine_solution(A, B, X, left), info))


@stands_in_for(torch.linalg.tensorsolve, name=_SYSTEMS)
@full_precision(widen=True)
def tensorsolve(A: Tensor, B: Tensor, dims: Sequence[int] | None = None) -> Tensor:
    r"""The solution of a tensor equation, as `torch.linalg.tensorsolve`.

        tensordot(A, X, X.dim()) = B        dX = A^-1 (dB - dA X)

    It reshapes A to a square matrix and solves by `solve`. Differentiable to any order, in every mode,
    under vmap.

    Args:
        A: A square matrix as a tensor, from the dimensions of X to the dimensions of B.
        B: The right-hand side, of the dtype of A.
        dims: The dimensions of A that X takes, moved to its end first. Default: the last ones.
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
    solved = [d % A.dim() for d in dims or ()]
    last = A.permute([d for d in range(A.dim()) if d not in solved] + solved)
    unknown = last.shape[B.dim() :]
    n = prod(unknown)
    if n != prod(last.shape[: B.dim()]) or n != B.numel():
        return torch.linalg.tensorsolve(A, B, dims)  # torch's error
    return solve(last.reshape(n, n), B.reshape(n)).reshape(unknown)


@full_precision(widen=True)
def cholesky_inverse(L: Tensor, upper: bool = False) -> Tensor:
    r"""Inverse of a positive definite matrix from its Cholesky factor, as `torch.cholesky_inverse`.

        Y = (L L^H)^-1, or (L^H L)^-1 if upper        dY = -Y d(L L^H) Y

    Only the triangle of L is read, so the gradient of the rest is 0. torch's gradient is wrong unless
    L is triangular, torch's forward mode always. Differentiable to any order, in every mode, under
    vmap.

    Args:
        L: Cholesky factors, with a real diagonal.
        upper: Whether L is an upper triangle. Default: False.
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
    torch.cholesky_inverse(L.detach(), upper)  # torch's errors
    identity = torch.eye(L.shape[-1], dtype=L.dtype, device=L.device)
    inverse = torch.linalg.solve_triangular(L, identity, upper=upper)
    return inverse @ inverse.mH if upper else inverse.mH @ inverse


stands_in_for(
    torch.cholesky_inverse, Tensor.cholesky_inverse, name="cholesky_inverse", **_WRONG_FORWARD
)(_rename_input(cholesky_inverse))


@stands_in_for(torch.triangular_solve, Tensor.triangular_solve, **_WRONG_FORWARD)
def triangular_solve(
    b: Tensor, A: Tensor, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> tuple[Tensor, Tensor]:
    """`torch.triangular_solve` by `torch.linalg.solve_triangular`, which is right in every mode."""
    matrix, above = (A.mT, not upper) if transpose else (A, upper)
    x = torch.linalg.solve_triangular(matrix, b, upper=above, unitriangular=unitriangular)
    return torch.return_types.triangular_solve((x, A.clone()))


def _is_vector(A: Tensor, B: Tensor) -> bool:
    return B.dim() == 1 or (B.dim() == A.dim() - 1 and B.shape == A.shape[:-1])


def _align_batches(A: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
    """A and B with equally many batch dimensions, because torch's vmap would align them wrongly."""
    missing = B.dim() - A.dim()
    if A.dim() < 2 or _is_vector(A, B) or missing == 0:
        return A, B
    return A[(None,) * max(missing, 0)], B[(None,) * max(-missing, 0)]


def _refine_solution(A: Tensor, B: Tensor, X: Tensor, left: bool) -> Tensor:
    """A step of iterative refinement from a constant X; it has all derivatives of A^-1 B."""
    inverse = torch.linalg.inv_ex(A)[0]
    if _is_vector(A, B):
        return X + (inverse @ (B.unsqueeze(-1) - A @ X.unsqueeze(-1))).squeeze(-1)
    return X + (inverse @ (B - A @ X) if left else (B - X @ A) @ inverse)
