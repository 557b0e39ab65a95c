"""Thick-restart Lanczos: eigenpairs of a symmetric operator, its basis on the operator's device."""

from collections.abc import Callable

import torch
from torch import Tensor

from hoglib import _arguments as arguments

CACHED = 2**24  # bytes of basis that cost little beside a product; a larger basis saves products
AT_ONCE = 2**16  # entries of each vector that are combined at once
ROUNDING = 10  # times eps |A|: what a product may be wrong by

Apply = Callable[[Tensor], Tensor]
Draw = Callable[[int], Tensor]
Choose = Callable[[Tensor, int], Tensor]  # the indices of that many of some ascending values


def first_look(k: int, block: int) -> int:
    """The products after which k eigenvalues are looked for."""
    return max(2 * k + 2, 21, k + 2 * block)


def lanczos(
    apply: Apply, draw: Draw, block: int, k: int, choose: Choose, tol: float, restarts: int
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """k values, ascending, and unit vectors [k, P], from the space of block vectors and products.

    They are near enough where |A v - value v| <= tol |value|, or 10 eps |A|, which is rounding.
    draw gives that many vectors [count, P]: to start with, and where that space ends.
    """
    start = draw(block)
    size = start.shape[1]
    first = first_look(k, block)
    cached = CACHED // (size * start.element_size())
    most = min(size, max(first, 2 * k + 20, min(3 * first, cached)))
    # copies of an eigenvalue come in by rounding, some products after the eigenvalue itself
    second = first + (first - k) // 2
    basis = Basis(start, most, draw)
    done = 0
    for _ in range(restarts):
        full = False
        while not full:
            before, done = done, done + len(basis.rest)
            basis.multiplied(apply(basis.rest))
            full = basis.m + len(basis.rest) > most or basis.m == size
            if full or before < first <= done or done >= second:
                theta, S, residuals = basis.ritz()
                chosen = choose(theta, k)
                values = theta[chosen]
                good = residuals[chosen] <= (tol * values.abs()).clamp(min=basis.noise)
                if bool(good.all()):
                    return values, basis.combined(S[:, chosen])
        kept = choose(theta, k + (basis.m - k) // 2)
        basis.restart(theta[kept], S[:, kept])
    raise arguments.NotConverged(
        f"eigsh: expected {k} eigenvalues, got {int(good.sum())} after {done} products "
        f"({', '.join(f'{v:.6g}' for v in values[good].tolist())}); raise max_iter or tol, or "
        "ask for fewer."
    )


class Basis:
    """Orthonormal rows V [n, P], of which the first m are multiplied: A v_j = sum of T_ij v_i.

    T is small and lives in float64 on the CPU; its rows from m on are what products have outside of
    the first m vectors, hence the residuals of Ritz vectors. Every product is made orthogonal to all
    of V, twice, which keeps V orthonormal to rounding.
    """

    def __init__(self, start: Tensor, most: int, draw: Draw) -> None:
        block, self._size = start.shape
        self.V = start.new_empty(min(most + block, self._size), self._size)
        self.T = torch.zeros(len(self.V), len(self.V), dtype=torch.float64)
        self.n = self.m = 0
        self.noise = 0.0  # what rounding may make of a product
        self._draw = draw
        for v in start:
            self._append(self._outside(v)[0])

    @property
    def rest(self) -> Tensor:
        """The vectors to be multiplied next."""
        return self.V[self.m : self.n]

    def multiplied(self, products: Tensor) -> None:
        """The products of `rest`, by which the basis grows until it is the whole space."""
        first = self.m
        self.m = self.n
        for j, product in enumerate(products, start=first):
            outside, coefficients = self._outside(product)
            found = torch.cat([coefficients, outside.norm()[None]]).to("cpu", torch.float64)
            eps = torch.finfo(self.V.dtype).eps
            self.noise = max(self.noise, ROUNDING * eps * float(found.abs().max()))
            self.T[: self.n, j] = found[:-1]
            if self.n == self._size:
                continue
            if float(found[-1]) > self.noise:
                self.T[self.n, j] = found[-1]
                self._append(outside)
            else:  # V has the product in itself, and goes on in any other direction
                self._append(self._outside(self._draw(1)[0])[0])

    def ritz(self) -> tuple[Tensor, Tensor, Tensor]:
        """Values theta, ascending, coefficients S of the vectors S^T V, and |A v - theta v| of each."""
        T = self.T[: self.m, : self.m]
        theta, S = torch.linalg.eigh((T + T.T) / 2)
        return theta, S, (self.T[self.m : self.n, : self.m] @ S).norm(dim=0)

    def combined(self, S: Tensor) -> Tensor:
        """S^T V [k, P]."""
        return S.T.to(self.V) @ self.V[: self.m]

    def restart(self, theta: Tensor, S: Tensor) -> None:
        """Keeps these Ritz vectors, and those to be multiplied next."""
        kept, n = len(theta), len(theta) + len(self.rest)
        coupling = self.T[self.m : self.n, : self.m] @ S
        combine = S.T.to(self.V)
        for part in self.V.split(AT_ONCE, dim=1):
            part[:kept] = combine @ part[: self.m]
        self.V[kept:n] = self.rest.clone()
        self.T.zero_()
        self.T[:kept, :kept] = torch.diag(theta)
        self.T[kept:n, :kept] = coupling
        self.m, self.n = kept, n

    def _append(self, v: Tensor) -> None:
        self.V[self.n] = v / v.norm()
        self.n += 1

    def _outside(self, v: Tensor) -> tuple[Tensor, Tensor]:
        """What of v is not in V, and its coefficients in V."""
        V = self.V[: self.n]
        total = v.new_zeros(self.n)
        for _ in range(2):
            coefficients = V @ v
            v = v - coefficients @ V
            total += coefficients
        return v, total
