"""Rules of products: of matrices and tensors, elementwise, and convolutions."""

from typing import Any

import torch
from torch import Tensor

from hoglib.taylor.algebras import Bilinear, Parts, align, multiply
from hoglib.taylor.call import Call, Rule, known, scaled, sums
from hoglib.taylor.derivatives import POINTWISE

aten = torch.ops.aten


def matmul(a: Tensor, b: Tensor, lead_a: bool, lead_b: bool) -> Tensor:
    """a @ b of matrices, or of batches of them.

    A coefficient that is the same at all rows, as a direction at all points, is multiplied once.
    """
    if lead_a and lead_b:
        return torch.matmul(a, b)
    if lead_b:
        return matmul(b.transpose(-1, -2), a.transpose(-1, -2), True, False).transpose(-1, -2)
    if not lead_a:
        return torch.matmul(a, b)
    if a.dim() == 3:
        rows = a.shape[1]
        if a.stride(1) == 0 and rows > 1:
            return torch.matmul(a[:, :1], b).expand(-1, rows, -1)
        return torch.matmul(a, b)
    found = torch.bmm(a.transpose(0, 1).flatten(1, 2), b)
    return found.unflatten(1, (a.shape[0], a.shape[2])).transpose(0, 1)


def _matvec(a: Tensor, b: Tensor, lead_a: bool, lead_b: bool) -> Tensor:
    return (a @ b.unsqueeze(-1)).squeeze(-1) if lead_a else b @ a.transpose(-1, -2)


def _bilinear(bilinear: Bilinear) -> Rule:
    return lambda call: call.product(bilinear, *call.args[:2])


def _trilinear(call: Call) -> Parts:
    """The sum over some dimensions of a product of three tensors, as F.bilinear has it."""
    *tensors, sum_dims = [*call.args[:3], call.args[6]]
    expanded = []
    rank = call.args[0].dim() + len(call.args[3])
    for x, dims in zip(tensors, call.args[3:6], strict=True):

        def shaped(part: Tensor, lead: int, dims: Any = dims) -> Tensor:
            for d in sorted(dims):
                part = part.unsqueeze(d % rank + lead)
            return part

        parts = call.parts(x)
        expanded.append((shaped(x, 0), None if parts is None else call.of_each(shaped, parts)))
    (a, a_n), (b, b_n), (c, c_n) = expanded
    ab_n = call.product(multiply, a, b, a_n=a_n, b_n=b_n)
    found = call.product(multiply, a * b, c, a_n=ab_n, b_n=c_n)
    dims = [d % rank for d in sum_dims]
    return call.of_each(lambda p, lead: p.sum([d + lead for d in dims]) if dims else p, found)


def _affine(bilinear: Bilinear) -> Rule:
    """beta b + alpha bilinear(x, y)"""

    def rule(call: Call) -> Parts:
        b, x, y = call.args[:3]
        found = scaled(call.kwargs.get("alpha", 1), call.product(bilinear, x, y))
        own = call.parts(b)
        beta = call.kwargs.get("beta", 1)
        if own is None:
            return found
        rank = call.out.dim()
        own = call.of_each(lambda part, lead: align(part, bool(lead), rank), own)
        return sums(found, scaled(beta, own))

    return rule


def _mul(call: Call) -> Parts:
    a, b = call.args[:2]
    if not isinstance(b, Tensor):
        return scaled(b, known(call, a))
    return call.product(multiply, a, b)


def _div(call: Call) -> Any:
    a, b = call.args[:2]
    if call.kwargs.get("rounding_mode"):
        return None
    if not isinstance(b, Tensor):
        return [None if part is None else part / b for part in known(call, a)]
    b_n = call.parts(b)
    if b_n is None:
        rank = call.out.dim()
        return call.of_each(lambda p, lead: align(p, bool(lead), rank) / b, known(call, a))
    inverse = b.reciprocal()
    n = call.algebra.compose(POINTWISE["reciprocal"](b, inverse, call.algebra.order), b_n)
    if not isinstance(a, Tensor):
        return scaled(a, n)
    return call.product(multiply, a, inverse, b_n=n)


def _convolution(call: Call) -> Parts:
    x, weight, bias, *geometry = call.args

    def conv(a: Tensor, w: Tensor, lead_a: bool, lead_w: bool) -> Tensor:
        if lead_w:
            rows = a if lead_a else [a] * len(w)
            return torch.stack([conv(p, q, False, False) for p, q in zip(rows, w, strict=True)])
        if not lead_a:
            return aten.convolution(a, w, None, *geometry)
        points = a.shape[1]
        if a.stride(1) == 0 and points > 1:  # the same at all points
            once = aten.convolution(a[:, 0], w, None, *geometry).unsqueeze(1)
            return once.expand(-1, points, *once.shape[2:])
        return aten.convolution(a.flatten(0, 1), w, None, *geometry).unflatten(0, a.shape[:2])

    found = call.product(conv, x, weight)
    own = call.parts(bias)
    if own is not None:
        spatial = (None,) * (x.dim() - 2)
        found = sums(found, [None if p is None else p[(..., *spatial)] for p in own])
    return found


PRODUCTS: dict[str, Rule] = {
    "mm": _bilinear(matmul),
    "bmm": _bilinear(matmul),
    "mv": _bilinear(_matvec),
    "dot": _bilinear(lambda a, b, *_: (a * b).sum(-1)),
    "vdot": _bilinear(lambda a, b, *_: (a.conj() * b).sum(-1)),
    "_trilinear": _trilinear,
    "addmm": _affine(matmul),
    "baddbmm": _affine(matmul),
    "addmv": _affine(_matvec),
    "mul.Tensor": _mul,
    "div": _div,
    "convolution": _convolution,
}
