"""Rules of products (matrices, elementwise, convolutions) and of functions of matrices.

The coefficients of a product are sums of products of coefficients (with binomial factors),

    (a b)_n = sum over i + j = n of a_i b_j

`lead_a` is True if the factor a has a leading dimension of directions:

    a [m, k], or with lead_a [directions, m, k]
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hoglib.taylor.derivatives import POINTWISE
from hoglib.taylor.series import Bilinear, Call, NoRule, Parts, Rule, apply, multiply, plus, times

aten = torch.ops.aten
Map = Callable[[Tensor], Tensor]


def matmul(a: Tensor, b: Tensor, lead_a: bool, lead_b: bool) -> Tensor:
    """a @ b, of matrices or batches of matrices.

    If all rows of a share their memory (one direction, expanded to all points), one row is multiplied.
    """
    if lead_a and lead_b:
        return torch.matmul(a, b)
    # a b = (b^T a^T)^T: the cases below need the directions on the left only
    if lead_b:
        return matmul(b.transpose(-1, -2), a.transpose(-1, -2), True, False).transpose(-1, -2)
    if not lead_a:
        return torch.matmul(a, b)
    if a.dim() == 3:
        rows = a.shape[1]
        if a.stride(1) == 0 and rows > 1:
            return torch.matmul(a[:, :1], b).expand(-1, rows, -1)
        return torch.matmul(a, b)
    # directions join the rows, so that each matrix of the batch is read once for all directions
    found = torch.bmm(a.transpose(0, 1).flatten(1, 2), b)
    return found.unflatten(1, (a.shape[0], a.shape[2])).transpose(0, 1)


def _matvec(a: Tensor, b: Tensor, lead_a: bool, lead_b: bool) -> Tensor:
    return (a @ b.unsqueeze(-1)).squeeze(-1) if lead_a else b @ a.transpose(-1, -2)


def _bilinear(bilinear: Bilinear) -> Rule:
    return lambda call: call.product(bilinear, *call.args[:2])


def _affine(bilinear: Bilinear) -> Rule:
    """The rule of beta b + alpha bilinear(x, y)."""

    def rule(call: Call) -> Parts:
        b, x, y = call.args[:3]
        found = times(call.kwargs.get("alpha", 1), call.product(bilinear, x, y))
        own = call.parts(b)
        beta = call.kwargs.get("beta", 1)
        return found if own is None else plus(found, times(beta, call.aligned(own)))

    return rule


def _mul(call: Call) -> Parts:
    a, b = call.args[:2]
    return call.product(multiply, a, b) if isinstance(b, Tensor) else times(b, call.known(a))


def _div(call: Call) -> Any:
    a, b = call.args[:2]
    if call.kwargs.get("rounding_mode"):
        return None
    if not isinstance(b, Tensor):
        return apply(lambda part: part / b, call.known(a))
    b_n = call.parts(b)
    if b_n is None:
        return apply(lambda part: part / b, call.aligned(call.known(a)))
    # a / b = a (1 / b): compose the series of 1 / b, then multiply
    inverse = b.reciprocal()
    n = call.algebra.compose(POINTWISE["reciprocal"](b, inverse, call.algebra.order), b_n)
    return call.product(multiply, a, inverse, b_n=n) if isinstance(a, Tensor) else times(a, n)


def _convolution(call: Call) -> Parts:
    x, weight, bias, *geometry = call.args

    def conv(a: Tensor, w: Tensor, lead_a: bool, lead_w: bool) -> Tensor:
        # kernels of several directions need one convolution each
        if lead_w:
            rows = a if lead_a else [a] * len(w)
            return torch.stack([conv(p, q, False, False) for p, q in zip(rows, w, strict=True)])
        if not lead_a:
            return aten.convolution(a, w, None, *geometry)
        points = a.shape[1]
        if a.stride(1) == 0 and points > 1:  # all points share their memory: convolve one
            once = aten.convolution(a[:, 0], w, None, *geometry).unsqueeze(1)
            return once.expand(-1, points, *once.shape[2:])
        return aten.convolution(a.flatten(0, 1), w, None, *geometry).unflatten(0, a.shape[:2])

    found = call.product(conv, x, weight)
    own = call.parts(bias)
    if own is not None:
        spatial = (None,) * (x.dim() - 2)
        found = plus(found, call.aligned(apply(lambda part: part[(..., *spatial)], own)))
    return found


def _broadcast_matmul(a: Tensor, b: Tensor, *_: bool) -> Tensor:
    return torch.matmul(a, b)


def _inverse(call: Call) -> list[Parts | None]:
    X, A_n = call.out[0], call.known(call.args[0])
    return [_fixed_point(call, X, A_n, lambda part: X @ part, call.algebra.zeros()), None]


def _solve(call: Call) -> list[Parts | None]:
    """X = A^-1 B, also for a vector B; or X = B A^-1, solved as A^T X^T = B^T."""
    A, B = call.args[:2]
    left = call.kwargs.get("left", call.args[2] if len(call.args) > 2 else True)
    turn: Map = (lambda t: t) if left else (lambda t: t.mT)
    columns, back = turn, turn
    # torch.linalg.solve takes a B of this shape for a vector, or a batch of vectors
    if B.dim() == 1 or (A.dim() - 1 == B.dim() and B.shape == A.shape[:-1]):
        columns, back = (lambda t: t.unsqueeze(-1)), (lambda t: t.squeeze(-1))
    X = columns(call.out[0])
    A_n = call.aligned(apply(turn, call.known(A)), X.dim())
    B_n = call.aligned(apply(columns, call.known(B)), X.dim())
    solve = lambda part: torch.linalg.solve(turn(A), part)  # noqa: E731
    return [apply(back, _fixed_point(call, X, A_n, solve, B_n)), None, None, None]


def _fixed_point(call: Call, X: Tensor, A_n: Parts, solve: Map, start: Parts) -> Parts:
    """The coefficients n of X, the solution of (A + A_n) (X + n) = B + start.

        n = solve(start) - solve(A_n (X + n))

    solve: multiplies by A^-1. The iteration is exact after K steps, because A_n is nilpotent.
    """
    n = start = apply(solve, start)
    if all(p is None for p in A_n):
        return n
    for _ in range(call.algebra.order):
        rest = plus(apply(lambda p: p @ X, A_n), call.algebra.product(_broadcast_matmul, A_n, n))
        n = plus(start, times(-1, apply(solve, rest)))
    return n


def _log_determinant(call: Call, A: Tensor) -> Parts:
    """log |det(A + a)| - log |det A| = sum_k (-1)^(k + 1) / k tr (A^-1 a)^k"""
    M = apply(lambda p: torch.linalg.solve(A, p), call.known(A))
    power, found = M, call.algebra.zeros()
    for k in range(1, call.algebra.order + 1):
        if k > 1:
            power = call.algebra.product(_broadcast_matmul, power, M)
        traces = apply(lambda p: p.diagonal(dim1=-2, dim2=-1).sum(-1), power)
        found = plus(found, times((-1) ** (k + 1) / k, traces))
    return found


def _slogdet(call: Call) -> list[Parts | None]:
    if call.args[0].is_complex():
        raise NoRule("torch.linalg.slogdet of a complex matrix")
    return [None, _log_determinant(call, call.args[0]), None, None]


PRODUCTS: dict[str, Rule] = {
    "mm": _bilinear(matmul),
    "bmm": _bilinear(matmul),
    "mv": _bilinear(_matvec),
    "dot": _bilinear(lambda a, b, *_: (a * b).sum(-1)),
    "vdot": _bilinear(lambda a, b, *_: (a.conj() * b).sum(-1)),
    "addmm": _affine(matmul),
    "baddbmm": _affine(matmul),
    "addmv": _affine(_matvec),
    "mul.Tensor": _mul,
    "div": _div,
    "convolution": _convolution,
    "linalg_inv_ex": _inverse,
    "_linalg_solve_ex": _solve,
    "_linalg_slogdet": _slogdet,
}
