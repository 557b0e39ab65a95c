"""One operation that ran, as the rules see it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hoglib.taylor.algebras import Algebra, Bilinear, Parts, add, align


class Refused(Exception):
    """Taylor coefficients cannot be propagated through this; the text says through what."""


class Call(NamedTuple):
    """One operation that ran."""

    name: str
    algebra: Algebra
    parts: Callable[[Any], Parts | None]  # the coefficients of a tensor; None if it is constant
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any
    side: int = 0  # of a kink along the path: -1 before it, 1 after it; 0 for torch's derivative

    def of_each(self, function: Callable[[Tensor, int], Tensor], parts: Parts) -> Parts:
        """function(part, lead) of each coefficient."""
        leads = self.algebra.leads
        return [
            None if part is None else function(part, int(lead))
            for part, lead in zip(parts, leads, strict=True)
        ]

    def aligned(self, parts: Parts, rank: int | None = None) -> Parts:
        """The coefficients with as many dimensions as the output, or with so many."""
        rank = self.out.dim() if rank is None else rank
        return self.of_each(lambda part, lead: align(part, bool(lead), rank), parts)

    def product(self, bilinear: Bilinear, a: Any, b: Any, a_n: Any = ..., b_n: Any = ...) -> Parts:
        """The coefficients of bilinear(a, b); a_n, b_n: their own, if they are not those of tensors."""
        a_n = self.parts(a) if a_n is ... else a_n
        b_n = self.parts(b) if b_n is ... else b_n
        found = self.algebra.zeros()
        if a_n is not None:
            found = self.of_each(lambda p, lead: bilinear(p, b, bool(lead), False), a_n)
        if b_n is not None:
            terms = self.of_each(lambda p, lead: bilinear(a, p, False, bool(lead)), b_n)
            found = sums(found, terms)
        if a_n is not None and b_n is not None:
            found = sums(found, self.algebra.product(bilinear, a_n, b_n))
        return found


Rule = Callable[[Call], Any]


def sums(a: Parts, b: Parts) -> Parts:
    return [add(x, y) for x, y in zip(a, b, strict=True)]


def each(function: Callable[[Tensor], Tensor], parts: Parts) -> Parts:
    return [None if part is None else function(part) for part in parts]


def scaled(factor: Any, parts: Parts) -> Parts:
    if not isinstance(factor, Tensor) and factor == 1:
        return parts
    return each(lambda part: factor * part, parts)


def known(call: Call, x: Any) -> Parts:
    parts = call.parts(x)
    return call.algebra.zeros() if parts is None else parts


def norm_arguments(call: Call) -> tuple[Tensor, Any, list[int], bool]:
    """Of linalg_vector_norm: the tensor, the order, the dimensions and whether they are kept."""
    given: Any = (*call.args, *(2, None, False)[len(call.args) - 1 :])
    x, order, dims, keep = given
    dims = range(x.dim()) if dims is None else [dims] if isinstance(dims, int) else dims
    return x, order, sorted(d % x.dim() for d in dims) if x.dim() else [], bool(keep)


def direction(call: Call, parts: Parts) -> Tensor | None:
    """Where an element goes along the path on this side of the point: the sign of its first
    coefficient that is not zero; None if it stays."""
    sign: Tensor | None = None
    for k, part in enumerate(parts, start=1):
        if part is not None:
            own = part.detach().sgn() * call.side**k
            sign = own if sign is None else torch.where(sign == 0, own, sign)
    return sign


def to_dtype(part: Tensor, dtype: torch.dtype) -> Tensor:
    """Of a complex part that becomes real, the real part."""
    return (part.real if part.is_complex() and not dtype.is_complex else part).to(dtype)
