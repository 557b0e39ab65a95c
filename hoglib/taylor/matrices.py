"""Rules of functions of matrices."""

from typing import Any

import torch
from torch import Tensor

from hoglib.taylor.algebras import Parts, align
from hoglib.taylor.call import Call, Refused, Rule, each, known, scaled, sums


def _inverse(call: Call) -> list[Parts | None]:
    X, A_n = call.out[0], known(call, call.args[0])
    return [_fixed_point(call, X, A_n, lambda part: X @ part, call.algebra.zeros()), None]


def _solved(call: Call) -> list[Parts | None]:
    """X = A^-1 B, X = B A^-1 or a vector of them."""
    A, B = call.args[:2]
    left = call.kwargs.get("left", call.args[2] if len(call.args) > 2 else True)
    vector = B.dim() == 1 or (A.dim() - 1 == B.dim() and B.shape == A.shape[:-1])
    matrix = (lambda t: t) if left else (lambda t: t.mT)
    as_columns = (lambda t: t.unsqueeze(-1)) if vector else matrix
    back = (lambda t: t.squeeze(-1)) if vector else matrix
    X = as_columns(call.out[0])
    own = each(as_columns, known(call, B))
    own = call.of_each(lambda p, lead: align(p, bool(lead), X.dim()), own)
    A = matrix(A)
    n = _fixed_point(
        call,
        X,
        each(matrix, known(call, call.args[0])),
        lambda part: torch.linalg.solve(A, part),
        own,
    )
    return [each(back, n), None, None, None]


def _triangular(call: Call) -> Parts:
    """X = A^-1 B or B A^-1, which reads one triangle of A."""
    A, B = call.args[:2]
    upper, left = call.kwargs["upper"], call.kwargs.get("left", True)
    unit = call.kwargs.get("unitriangular", False)
    part = (lambda t: t.triu(int(unit))) if upper else (lambda t: t.tril(-int(unit)))
    matrix = (lambda t: t) if left else (lambda t: t.mT)
    X = matrix(call.out)
    own = call.of_each(lambda p, lead: align(p, bool(lead), X.dim()), each(matrix, known(call, B)))
    A_n = each(lambda t: matrix(part(t)), known(call, A))
    options = {"upper": upper == left, "unitriangular": unit}
    solve = lambda t: torch.linalg.solve_triangular(matrix(A), t, **options)  # noqa: E731
    return each(matrix, _fixed_point(call, X, A_n, solve, own))


def _cholesky(call: Call, L: Tensor) -> Parts:
    """n = L Phi(L^-1 (A_n - n n^H) L^-H) with Phi the lower triangle, its diagonal halved.

    As in torch, A_n counts by its Hermitian part.
    """
    upper = call.kwargs.get("upper", call.args[1] if len(call.args) > 1 else False)
    L = L.mH if upper else L
    A_n = each(lambda p: (p + p.mH) / 2, known(call, call.args[0]))

    def times_adjoint(a: Tensor, b: Tensor, *_: bool) -> Tensor:
        return a @ b.mH

    def solve(part: Tensor) -> Tensor:
        inner = torch.linalg.solve_triangular(L, part, upper=False)
        inner = torch.linalg.solve_triangular(L.mH, inner, upper=True, left=False)
        half = inner.diagonal(dim1=-2, dim2=-1) / 2
        return L @ (inner.tril() - torch.diag_embed(half))

    n = call.algebra.zeros()
    for _ in range(call.algebra.order):
        squares = call.algebra.product(times_adjoint, n, n)
        n = each(solve, sums(A_n, scaled(-1, squares)))
    return each(lambda p: p.mH, n) if upper else n


def _fixed_point(call: Call, X: Tensor, A_n: Parts, solve: Any, start: Parts) -> Parts:
    """The coefficients n of X with A (X + n) + A_n (X + n) = B + B_n, from A^-1 B_n: n = A^-1 B_n -
    A^-1 A_n (X + n), exact after K iterations."""
    n = start = each(solve, start)
    if all(p is None for p in A_n):
        return n
    for _ in range(call.algebra.order):
        rest = sums(each(lambda p: p @ X, A_n), call.algebra.product(_matmul, A_n, n))
        n = sums(start, scaled(-1, each(solve, rest)))
    return n


def _matmul(a: Tensor, b: Tensor, lead_a: bool, lead_b: bool) -> Tensor:
    return torch.matmul(a, b)


def _log_determinant(call: Call, A: Tensor) -> Parts:
    """log |det(A + a)| - log |det A| = sum_k (-1)^(k + 1) / k tr (A^-1 a)^k"""
    M = each(lambda p: torch.linalg.solve(A, p), known(call, A))
    power, found = M, call.algebra.zeros()
    for k in range(1, call.algebra.order + 1):
        if k > 1:
            power = call.algebra.product(_matmul, power, M)
        traces = each(lambda p: p.diagonal(dim1=-2, dim2=-1).sum(-1), power)
        found = sums(found, scaled((-1) ** (k + 1) / k, traces))
    return found


def _slogdet(call: Call) -> list[Parts | None]:
    if call.args[0].is_complex():
        raise Refused("torch.linalg.slogdet of a complex matrix")
    return [None, _log_determinant(call, call.args[0]), None, None]


def _determinant(call: Call) -> list[Parts | None]:
    det = call.out[0]
    n = call.algebra.compose([1.0] * call.algebra.order, _log_determinant(call, call.args[0]))
    return [scaled(det, n), None, None]


MATRICES: dict[str, Rule] = {
    "linalg_inv_ex": _inverse,
    "_linalg_solve_ex": _solved,
    "linalg_solve_triangular": _triangular,
    "linalg_cholesky_ex": lambda call: [_cholesky(call, call.out[0]), None],
    "cholesky": lambda call: _cholesky(call, call.out),
    "_linalg_slogdet": _slogdet,
    "_linalg_det": _determinant,
}
