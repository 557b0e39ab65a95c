"""Truncated Taylor expansions and their product (`Algebra`), and an operation as rules see it (`Call`).

An expansion is u_0 + n, a value and a nilpotent part. The coefficients of n are derivatives, without
factorials. A product of two nilpotent parts is all that functions of expansions need:

    g(u_0 + n) = g(u_0) + sum_k g^(k)(u_0) / k! n^k        n^(K + 1) = 0

A coefficient has the shape of its tensor, behind a leading dimension if there are several directions.
None stands for zero.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import product as cartesian
from math import comb, factorial, prod
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

Parts = list[Tensor | None]  # the coefficients of n, in the order of the algebra
# bilinear(a, b, lead_a, lead_b): lead_a, lead_b: whether a, b have a leading dimension of directions
Bilinear = Callable[[Tensor, Tensor, bool, bool], Tensor]
Derivative = Tensor | float | None  # g^(k)(x) of a pointwise function g; None is zero


class Algebra(ABC):
    """The coefficients of expansions, and their product.

    order: K, the highest power of n that is not zero.
    orders: for each coefficient, the order of the derivative.
    leads: for each coefficient, whether it has a leading dimension of directions.
    """

    order: int
    orders: Sequence[int]
    leads: tuple[bool, ...]

    @abstractmethod
    def product(self, bilinear: Bilinear, a: Parts, b: Parts) -> Parts:
        """The product of two nilpotent parts."""

    def compose(self, derivatives: Sequence[Derivative], n: Parts) -> Parts:
        """The nilpotent part of g(u_0 + n), from the derivatives g', g'', ..., g^(K) at u_0."""
        power, sums = n, [_times(derivatives[0], part) for part in n]
        for k in range(2, self.order + 1):
            if all(derivative is None for derivative in derivatives[k - 1 :]):
                break
            power = self.product(multiply, power, n)
            # every further power is zero, too
            if all(part is None for part in power):
                break
            derivative = derivatives[k - 1]
            if derivative is not None:
                # float, because factorials above 20! overflow 64-bit integers
                terms = [_times(derivative / float(factorial(k)), part) for part in power]
                sums = [add(a, b) for a, b in zip(sums, terms, strict=True)]
        return sums

    def zeros(self) -> Parts:
        return [None] * len(self.leads)

    def of_each(self, function: Callable[[Tensor, int], Tensor], parts: Parts) -> Parts:
        """Apply function(part, lead) to each coefficient; lead: 1 with a leading dimension, else 0."""
        pairs = zip(parts, self.leads, strict=True)
        return [None if part is None else function(part, int(lead)) for part, lead in pairs]


@final
class Univariate(Algebra):
    """Derivatives of orders 1 to K along one path, or along R paths at once.

        (a b)_m = sum_i binom(m, i) a_i b_(m - i)

    directions: coefficients have a leading dimension [R].
    weights: [R] or a number; the highest order is kept only as its weighted sum over the directions
        (collapsed Taylor mode). The sum suffices: highest-order coefficients enter rules linearly.
    """

    def __init__(self, order: int, directions: bool = False, weights: Any = None) -> None:
        self.order = order
        self.orders = range(1, order + 1)
        self.weights = weights
        self.leads = (directions,) * (order - 1) + (directions and weights is None,)

    def product(self, bilinear: Bilinear, a: Parts, b: Parts) -> Parts:
        parts: Parts = [None]
        lead = self.leads[0]
        for m in range(2, self.order + 1):
            total: Tensor | None = None
            for i in range(1, m):
                x, y = a[i - 1], b[m - i - 1]
                if x is None or y is None:
                    continue
                term = bilinear(x, y, lead, lead)
                if lead and not self.leads[m - 1]:
                    # the highest order enters no further product, so only its sum is kept
                    term = self.collapsed(term)
                # float, because large binomials overflow, too
                total = add(total, term * float(comb(m, i)))
            parts.append(total)
        return parts

    def collapsed(self, term: Tensor) -> Tensor:
        """The weighted sum of a term [R, ...] over its directions."""
        if isinstance(self.weights, Tensor):
            term = term * self.weights.reshape(-1, *(1,) * (term.dim() - 1))
        # sum one copy of elements that share their memory, then expand
        own = drop_repeats(term, first=1)
        total: Any = _times(1 if isinstance(self.weights, Tensor) else self.weights, own.sum(0))
        return total if own is term else total.expand(term.shape[1:])


@final
class MultiIndex(Algebra):
    """Mixed partial derivatives of all orders beta <= alpha in several variables.

    (a b)_gamma = sum_(beta <= gamma) binom(gamma, beta) a_beta b_(gamma - beta)
    """

    def __init__(self, alpha: tuple[int, ...]) -> None:
        self.indices = [beta for beta in cartesian(*(range(i + 1) for i in alpha)) if any(beta)]
        self.order = sum(alpha)
        self.orders = [sum(beta) for beta in self.indices]
        self.leads = (False,) * len(self.indices)
        place = {beta: i for i, beta in enumerate(self.indices)}
        self._terms = [
            [
                (place[beta], place[rest], prod(map(comb, gamma, beta)))
                for beta in self.indices
                if (rest := tuple(g - b for g, b in zip(gamma, beta, strict=True))) in place
            ]
            for gamma in self.indices
        ]

    def product(self, bilinear: Bilinear, a: Parts, b: Parts) -> Parts:
        parts: Parts = []
        for terms in self._terms:
            total: Tensor | None = None
            for i, j, factor in terms:
                x, y = a[i], b[j]
                if x is not None and y is not None:
                    total = add(total, bilinear(x, y, False, False) * factor)
            parts.append(total)
        return parts


@final
class Biharmonic(Algebra):
    """The coefficients that the Laplacian of the Laplacian by D coordinates needs:

    u_i [D],  u_ij for i <= j [D (D + 1) / 2],  u_iL = d_i Lap u [D],  u_B = Lap Lap u

    (a b)_ij = a_i b_j + a_j b_i        with Lap a = sum_i a_ii
    (a b)_iL = a_i Lap b + Lap a b_i + 2 sum_k (a_k b_ki + a_ki b_k)
    (a b)_B = 2 Lap a Lap b + 4 sum_i (a_iL b_i + a_i b_iL) + 4 sum_ik a_ik b_ik
    """

    def __init__(self, coordinates: int, device: torch.device) -> None:
        self.order = 4
        self.orders = (1, 2, 3, 4)
        self.leads = (True, True, True, False)
        D = self.D = coordinates
        i, j = torch.triu_indices(D, D, device=device)
        self._i, self._j = i, j
        full = torch.zeros(D, D, dtype=torch.long, device=device)
        full[i, j] = full[j, i] = torch.arange(len(i), device=device)
        self._full, self._diagonal = full.flatten(), full.diagonal().clone()
        self._count = 2 - (i == j).long()  # how often a pair (i, j) occurs in the full matrix
        self._second = torch.arange(D, device=device).repeat(D)  # the k of each pair (i, k)

    def product(self, bilinear: Bilinear, a: Parts, b: Parts) -> Parts:
        a_i, a_ij, a_iL, _ = a
        b_i, b_ij, b_iL, _ = b
        a_L, b_L = self._trace(a_ij), self._trace(b_ij)
        # a square needs half of the terms; but a matrix product, even of a with a, needs both orders
        square = a is b and bilinear is multiply

        def term(x: Tensor | None, y: Tensor | None, lx: bool, ly: bool) -> Tensor | None:
            return None if x is None or y is None else bilinear(x, y, lx, ly)

        ij = iL = None
        if a_i is not None and b_i is not None:
            ij = bilinear(a_i[self._i], b_i[self._j], True, True)
            ij = 2 * ij if square else ij + bilinear(a_i[self._j], b_i[self._i], True, True)
        iL = add(term(a_i, b_L, True, False), term(a_L, b_i, False, True))
        mixed = self._contracted(term, a_i, b_ij)
        other = mixed
        if not square:
            other = self._contracted(lambda x, y, lx, ly: term(y, x, ly, lx), b_i, a_ij)
        iL = add(iL, _times(2, add(mixed, other)))

        B = _times(2, term(a_L, b_L, False, False))
        first = term(a_i, b_iL, True, True)
        both = add(first, first if square else term(a_iL, b_i, True, True))
        B = add(B, None if both is None else 4 * both.sum(0))
        squares = term(a_ij, b_ij, True, True)
        if squares is not None:
            count = self._count.to(squares.dtype).reshape(-1, *(1,) * (squares.dim() - 1))
            B = add(B, 4 * (count * squares).sum(0))
        return [None, ij, iL, B]

    def _trace(self, pairs: Tensor | None) -> Tensor | None:
        return None if pairs is None else pairs[self._diagonal].sum(0)

    def _contracted(self, term: Callable, x: Tensor | None, pairs: Tensor | None) -> Tensor | None:
        """sum_k of the product of x_k and pairs_ki."""
        if x is None or pairs is None:
            return None
        total = term(x[self._second], pairs[self._full], True, True)
        return total.unflatten(0, (self.D, self.D)).sum(1)


def multiply(a: Tensor, b: Tensor, lead_a: bool, lead_b: bool) -> Tensor:
    """The elementwise product; dimensions behind the leading ones broadcast from the right."""
    rank = max(a.dim() - lead_a, b.dim() - lead_b)
    a, b = align(a, lead_a, rank), align(b, lead_b, rank)
    return without_repeats(torch.square, a) if a is b else a * b


def without_repeats(function: Callable[[Tensor], Tensor], a: Tensor) -> Tensor:
    """An elementwise function, computed once along dimensions of stride 0 (expanded tensors)."""
    own = drop_repeats(a)
    return function(a) if own is a else function(own).expand(a.shape)


def drop_repeats(a: Tensor, first: int = 0) -> Tensor:
    """The tensor with size 1 in each expanded dimension (stride 0), from dimension `first` on."""
    sizes = zip(a.shape, a.stride(), strict=True)
    shared = [i >= first and n > 1 and s == 0 for i, (n, s) in enumerate(sizes)]
    return a[tuple(slice(0, 1) if s else slice(None) for s in shared)] if any(shared) else a


def align(part: Tensor, lead: int, rank: int) -> Tensor:
    """The part, with dimensions of size 1 inserted behind the leading one until `rank` follow it."""
    missing = rank + lead - part.dim()
    return part if missing <= 0 or not lead else part[(slice(None),) + (None,) * missing]


def add(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b


def _times(factor: Derivative, part: Tensor | None) -> Tensor | None:
    if part is None or factor is None:
        return None
    return part if isinstance(factor, int | float) and factor == 1 else factor * part


class NoRule(Exception):
    """No rule propagates Taylor coefficients through an operation; the text names the operation."""


class Call(NamedTuple):
    """An operation that ran, as rules see it."""

    name: str  # torch's name, without overload
    algebra: Algebra
    parts: Callable[[Any], Parts | None]  # the coefficients of a tensor; None if it is constant
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any  # the operation's result
    side: int = 0  # at a kink: the derivative before (-1) or after it (1), or torch's (0)

    def aligned(self, parts: Parts, rank: int | None = None) -> Parts:
        """The coefficients, aligned to `rank` dimensions; by default, to the output's."""
        rank = self.out.dim() if rank is None else rank
        return self.algebra.of_each(lambda part, lead: align(part, lead, rank), parts)

    def product(self, bilinear: Bilinear, a: Any, b: Any, a_n: Any = ..., b_n: Any = ...) -> Parts:
        """The coefficients of bilinear(a, b).

        a_n, b_n: the coefficients of a and b; by default self.parts(a) and self.parts(b).
        """
        a_n = self.parts(a) if a_n is ... else a_n
        b_n = self.parts(b) if b_n is ... else b_n
        parts = self.algebra.zeros()
        if a_n is not None:
            parts = self.algebra.of_each(lambda p, lead: bilinear(p, b, bool(lead), False), a_n)
        if b_n is not None:
            terms = self.algebra.of_each(lambda p, lead: bilinear(a, p, False, bool(lead)), b_n)
            parts = plus(parts, terms)
        if a_n is not None and b_n is not None:
            parts = plus(parts, self.algebra.product(bilinear, a_n, b_n))
        return parts

    def known(self, x: object) -> Parts:
        """The coefficients of a tensor, zeros if it is constant."""
        parts = self.parts(x)
        return self.algebra.zeros() if parts is None else parts

    def norm_arguments(self) -> tuple[Tensor, Any, list[int], bool]:
        """The arguments of linalg_vector_norm: x, ord, the sorted dimensions, keepdim."""
        given: Any = (*self.args, *(2, None, False)[len(self.args) - 1 :])
        x, order, dims, keep = given
        dims = range(x.dim()) if dims is None else [dims] if isinstance(dims, int) else dims
        return x, order, sorted(d % x.dim() for d in dims) if x.dim() else [], bool(keep)

    def direction(self, parts: Parts) -> Tensor | None:
        """The elementwise sign of x(t) - x(0) for small t on this side; None if x is constant.

        It is the sign of the first nonzero coefficient, reversed for odd orders before the point.
        """
        sign: Tensor | None = None
        for k, part in enumerate(parts, start=1):
            if part is not None:
                own = part.detach().sgn() * self.side**k
                sign = own if sign is None else torch.where(sign == 0, own, sign)
        return sign


Rule = Callable[[Call], Any]


def plus(a: Parts, b: Parts) -> Parts:
    return [add(x, y) for x, y in zip(a, b, strict=True)]


def apply(function: Callable[[Tensor], Tensor], parts: Parts) -> Parts:
    return [None if part is None else function(part) for part in parts]


def times(factor: Any, parts: Parts) -> Parts:
    return [_times(factor, part) for part in parts]


def to_dtype(part: Tensor, dtype: torch.dtype) -> Tensor:
    """The part in a dtype; a complex part is reduced to its real part if the dtype is real."""
    return (part.real if part.is_complex() and not dtype.is_complex else part).to(dtype)
