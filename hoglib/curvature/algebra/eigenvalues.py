"""Eigenpairs of symmetric operators by thick-restart Lanczos, and singular triplets of rectangular
operators by Golub-Kahan-Lanczos bidiagonalization, with the basis on the operator's device."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from math import hypot, inf, log10
from operator import add
from typing import Any, final

import torch
from torch import Tensor

from hoglib import errors, plotting
from hoglib._core.messages import results, validation
from hoglib._core.numerics.factorizations import symmetric_eigen
from hoglib.curvature.algebra.vector_space import Draw, Space, SymmetricMatrix, random_normals

CHEAP = 2**22  # a basis of so many bytes costs little time beside a product
MAX_BYTES = 2**24  # a basis is enlarged to at most so many bytes
RESTARTS_TO_ENLARGE = 16  # enlarge the basis after so many restarts: slower steps, fewer products
COLUMNS_AT_ONCE = 2**16  # columns of the basis in one matrix product of a restart
MIN_RATE = 0.1  # assume that a product gains at least so many decimal digits of a residual
REORTHOGONALIZE_BELOW = 0.7  # orthogonalise again if less than this fraction of the norm is left
ROUNDING = 10  # the error of a product, in units of eps |A|
IN_RANGE = 1e12  # scale products with the largest entry above this, or below its inverse
TINY = torch.finfo(torch.float64).tiny  # the allowed residual for a matrix of zeros
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5}
Chosen = Callable[[Tensor, int], Tensor]  # (ascending values, k) -> k indices
ENDS: dict[str, Chosen] = {
    "LM": lambda values, k: values.abs().argsort(descending=True)[:k],
    "LA": lambda values, k: torch.arange(len(values) - k, len(values), device="cpu"),
    "SA": lambda values, k: torch.arange(k, device="cpu"),
    "BE": lambda values, k: torch.arange(k // 2 - k, k // 2, device="cpu") % len(values),
    "SM": lambda values, k: values.abs().argsort()[:k],
}

Apply = Callable[[Tensor], Tensor]


@results.result
@final
@dataclass(frozen=True)
class Eigenpairs:
    """Eigenvalues in ascending order, with eigenvectors and residuals.

    Unpacks and indexes as the pair (values, vectors), like the result of `scipy.sparse.linalg.eigsh`.

    Attributes:
        values: [k].
        vectors: [P, k], of length one. With DTensor parameters: the part of this process;
            ``A.unravel`` makes DTensors.
        residuals: [k], |A v - value v|, computed from the vectors themselves.
        products: Products of A with one vector, not counting the k for the residuals.
        which: The requested end of the spectrum, an option of `LinearOperator.eigsh`.
    """

    values: Tensor
    vectors: Tensor
    residuals: Tensor
    products: int
    which: str

    def __repr__(self) -> str:
        values = validation.listing([f"{value:.5g}" for value in self.values.tolist()], 10)
        return (
            f"Eigenpairs({values}; which={self.which!r}, residuals up to "
            f"{float(self.residuals.max()):.1g}, {self.products} products)"
        )

    def plot(self, ax: object = None) -> Any:
        """Draw the eigenvalues in descending order, with their residuals.

        Args:
            ax: Matplotlib axes. Default: the axes of a new pyplot figure.
        Returns:
            The axes.
        Raises:
            MissingDependencyError: if matplotlib is not installed.
        """
        return plotting.eigenpairs(self, ax)

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.values, self.vectors))

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Tensor:
        return (self.values, self.vectors)[index]


def eigsh(
    operator: SymmetricMatrix,
    k: int,
    which: str,
    tol: float | None,
    max_iter: int | None,
    block: int,
    generator: torch.Generator | None,
    basis_device: torch.device | str | None,
) -> Eigenpairs:
    """Find A v = value v to |A v - value v| <= tol |value|; `LinearOperator.eigsh` describes the
    options."""
    size = operator.shape[0]
    if validation.at_least("k", k, 1) > size:
        raise errors.ArgumentValueError(
            f"k: expected at most {size} eigenvalues, the size of A, got {k}; ask for fewer."
        )
    validation.choice("which", which, ENDS)
    validation.at_least("block", block, 1)
    limit = 10 * size if max_iter is None else validation.at_least("max_iter", max_iter, 1)
    wide, device = torch.promote_types(operator.dtype, torch.float32), operator.device
    if basis_device is not None:
        device = _checked_device(basis_device)
    default = max(TOLERANCES.get(operator.space.precision, 1e-2), TOLERANCES[wide])
    tol = default if tol is None else validation.number("tol", tol, minimum=0)
    random = validation.generator(generator) or torch.Generator().manual_seed(0)
    before, space = operator.count, operator.space
    # A small matrix: its columns take no more products than `first_look`.
    if size <= first_look(k, block) and not space.placement.is_sharded:
        every, columns = symmetric_eigen(operator.to_dense().to(torch.float64))
        chosen = select_indices(every.cpu(), k, which).to(every.device)
        values, rows = every[chosen], columns[:, chosen].T
    else:

        def draw(count: int) -> Tensor:
            return random_normals(space, count, random, wide).to(device)

        def apply(rows: Tensor) -> Tensor:
            return operator.apply(rows.to(operator.device, operator.dtype)).to(device, wide)

        choose = partial(select_indices, which=which)
        scaled, unit = in_range(apply, space)
        values, rows = lanczos(scaled, draw, block, k, choose, tol, limit, space)
        values = values.to(rows) * unit()
    values, rows = (part.to(operator.device, operator.dtype) for part in (values, rows))
    products = operator.count - before
    scaled, unit = in_range(operator.apply, space)
    images = scaled(rows)
    residuals = space.norms(images - (values / unit())[:, None] * rows) * unit()
    return Eigenpairs(values, rows.T, residuals, products, which)


def in_range(apply: Apply, space: Space) -> tuple[Apply, Callable[[], Any]]:
    """Products with A / s, and a function that returns s, a power of two.

    s is known after the first product. It is 1 unless squares of entries leave the range of float32:
    above 1e19 or below 1e-22.
    """
    units: list[Tensor | float] = []

    def scaled(rows: Tensor) -> Tensor:
        found = apply(rows)
        if not units:
            largest = found.abs().max()
            far = (largest > IN_RANGE) | (largest < 1 / IN_RANGE)
            # Not for sharded vectors: processes would find different s from their parts.
            far = far & (largest > 0) & largest.isfinite() & (not space.placement.is_sharded)
            unit = torch.where(far, largest, 1).log2().floor().exp2()
            # On a device s stays a tensor: reading it would synchronize.
            units.append(float(unit) if found.device.type == "cpu" else unit)
        return found if type(units[0]) is float and units[0] == 1 else found / units[0]

    return scaled, lambda: units[0] if units else 1.0


def _checked_device(device: Any) -> torch.device:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise errors.ArgumentTypeError(
            f"basis_device: expected a torch.device or its name, such as 'cpu', got "
            f"{validation.describe(device)}."
        ) from error


def select_indices(values: Tensor, k: int, which: str) -> Tensor:
    """The indices of k among the ascending values, in ascending order."""
    return ENDS[which](values, k).sort().values


def first_look(k: int, block: int) -> int:
    """The number of products before the first check of convergence."""
    return max(2 * k + 2, 21, k + 2 * block)


def lanczos(
    apply: Apply,
    draw: Draw,
    block: int,
    k: int,
    choose: Chosen,
    tol: float,
    restarts: int,
    space: Space,
) -> tuple[Tensor, Tensor]:
    """k values, ascending, and unit vectors [k, P], from the Krylov space of `block` vectors.

    A pair has converged if |A v - value v| <= tol |value|, or <= 10 eps |A|, which is rounding.
    draw: count -> random vectors [count, P], for the start and whenever the Krylov space ends.
    """
    start = draw(min(block, space.size))
    size = space.size
    first = first_look(k, block)
    bytes_of_row = size * start.element_size()
    cached, largest = CHEAP // bytes_of_row, MAX_BYTES // bytes_of_row
    most = min(size, max(first, min(3 * first, cached)))
    largest = min(size, max(most, 2 * k + 20, min(3 * first, largest)))
    # The second look: rounding brings in copies of a repeated eigenvalue some products later.
    second = first + (first - k) // 2
    basis = Basis(start, most, draw, space)
    done = due = looked = 0
    missing_before = 0.0  # decimal digits missing in the residuals at the last look
    for restart in range(restarts):
        if restart % RESTARTS_TO_ENLARGE == RESTARTS_TO_ENLARGE - 1 and most < largest:
            most = min(largest, 2 * most)
            basis.enlarge(most)
        full = False
        while not full:
            before, done = done, done + len(basis.rest)
            basis.add_products(apply(basis.rest))
            full = basis.is_full(most)
            if full or before < first <= done or done >= max(second, due):
                basis.read()
                full = basis.is_full(most)
                if basis.m < k:
                    continue
                theta, S, residuals = basis.ritz()
                chosen = choose(theta, k)
                values = theta[chosen]
                allowed = (tol * values.abs()).clamp(min=max(basis.noise, TINY))
                ratios = residuals[chosen] / allowed
                if (largest_ratio := float(ratios.max())) <= 1:
                    return values, basis.combine(S[:, chosen])
                # A look takes a tenth of the time of a small network's product. Extrapolate the rate
                # since the last look, and look again after half of the missing products.
                missing = log10(largest_ratio) if 1 < largest_ratio < inf else 0.0
                gained = missing_before - missing
                rate = max(MIN_RATE, gained / (done - looked)) if looked else 0.5
                due = done + max(1, int(missing / (2 * rate)))
                missing_before, looked = missing, done
        kept = choose(theta, k + (basis.m - k) // 2)
        basis.restart(theta[kept], S[:, kept])
    raise errors.ConvergenceError(
        f"eigsh: expected {k} eigenvalues, got {int((ratios <= 1).sum())} after {done} products "
        f"({', '.join(f'{v:.6g}' for v in values[ratios <= 1].tolist())}); raise max_iter or tol, or "
        "ask for fewer."
    )


@final
class Basis:
    """Orthonormal rows V [n, P]. The first m are multiplied: A v_j = sum over i of T_ij v_i.

    T is small, in float64 on the CPU. Rows m to n of T are the components of products outside the first
    m vectors; they give the residuals of Ritz vectors. Every product is orthogonalised against all of
    V, so V is orthonormal to rounding.

    start: The first vectors.
    most: At most so many vectors are multiplied before a restart.
    draw: count -> random vectors.
    space: Computes inner products, also of sharded vectors.
    """

    def __init__(self, start: Tensor, most: int, draw: Draw, space: Space) -> None:
        self._block, self._space, self._size = len(start), space, space.size
        self.V = start.new_empty(min(most + self._block, self._size), start.shape[1])
        self.T = torch.zeros(len(self.V), len(self.V), dtype=torch.float64, device="cpu")
        self.n = self.m = 0
        self.noise = 0.0  # bound of the rounding error of a product
        self._draw = draw
        self._kept = 0  # number of Ritz vectors kept by the last restart
        # on a device, append vectors before their lengths are read: no synchronization
        self._ahead = self.V.device.type != "cpu"
        # products with unread components: (j, n at that time, first, product, components)
        self._unread: list[tuple[int, int, int, Tensor, Tensor]] = []
        for v in start:
            self._append_outside(v)

    @property
    def rest(self) -> Tensor:
        """The vectors to multiply next."""
        return self.V[self.m : self.n]

    def is_full(self, most: int) -> bool:
        """Whether the products of `rest` do not fit beside `most` vectors."""
        return self.m + len(self.rest) > most or self.m == self._size

    def add_products(self, products: Tensor) -> None:
        """Add the products of `rest`; the basis grows until it spans the whole space.

        In exact arithmetic a product has components in few vectors: it is orthogonalised against
        these few first, at little cost, and then against all.
        """
        start = self.m
        self.m = self.n
        for j, product in enumerate(products, start=start):
            n, v = self.n, self._copied_in(product)
            coupled = j < self._kept + self._block  # with components in all kept Ritz vectors
            first = 0 if coupled else max(0, j - self._block)
            parts = [self._subtract(v, first, n), self._subtract(v, 0, n)]
            parts.append(self._space.norms(v[None]))
            self._unread.append((j, n, first, v, torch.cat(parts)))
            if not self._ahead:
                self.read()
            elif n < self._size:
                self._append(v, parts[-1].clamp(min=torch.finfo(v.dtype).tiny))

    def read(self) -> None:
        """Read the components of the unread products in V.

        If a product lies in the span of V, a random direction replaces it; if too little of its norm is
        left, it is orthogonalised again. In both cases later products are dropped: they came from the
        replaced vector.
        """
        unread, self._unread = self._unread, []
        numbers = iter(torch.cat([parts for *_, parts in unread]).tolist() if unread else [])
        precision = torch.finfo(self.V.dtype)
        for j, n, first, v, _ in unread:
            few, every = [*islice(numbers, n - first)], [*islice(numbers, n)]
            length = next(numbers)
            appended, again = self.n > n, _in_span(length, every)
            every[first:] = map(add, every[first:], few)
            if again:
                if appended:
                    v.mul_(max(length, precision.tiny))
                more, length = self._orthogonalize(v, n)
                every = [*map(add, every, more)]
            self.m = j + 1
            self.noise = max(self.noise, ROUNDING * precision.eps * max(length, *map(abs, every)))
            self.T[:n, j] = torch.tensor(every, dtype=self.T.dtype, device="cpu")
            if n == self._size:
                continue
            inside = length <= self.noise
            if not inside:
                self.T[n, j] = length
                if appended and not again:
                    continue
            self.n = n
            if inside:
                self._append_outside(self._draw(1)[0])
                self._ahead = False  # A has low rank: every later product lies in the span
            else:
                self._append(v, length)
            return

    def ritz(self) -> tuple[Tensor, Tensor, Tensor]:
        """Ritz values theta, ascending; coefficients S of the Ritz vectors S^T V; the residuals
        |A v - theta v|."""
        theta, S = symmetric_eigen(self.T[: self.m, : self.m])
        return theta, S, (self.T[self.m : self.n, : self.m] @ S).norm(dim=0)

    def combine(self, S: Tensor) -> Tensor:
        """The vectors S^T V [k, P]."""
        return S.T.to(self.V) @ self.V[: self.m]

    def enlarge(self, most: int) -> None:
        """Make room for `most` multiplied vectors."""
        V, T = self.V, self.T
        self.V = V.new_empty(min(most + self._block, self._size), V.shape[1])
        self.T = T.new_zeros(len(self.V), len(self.V))
        self.V[: self.n], self.T[: self.n, : self.n] = V[: self.n], T[: self.n, : self.n]

    def restart(self, theta: Tensor, S: Tensor) -> None:
        """Keep the Ritz vectors S^T V with values theta, and `rest`."""
        kept, n = len(theta), len(theta) + len(self.rest)
        coupling = self.T[self.m : self.n, : self.m] @ S
        combine = S.T.to(self.V)
        for part in self.V.split(COLUMNS_AT_ONCE, dim=1):
            part[:kept] = combine @ part[: self.m]
        self.V[kept:n] = self.rest.clone()
        self.T.zero_()
        self.T[:kept, :kept] = torch.diag(theta)
        self.T[kept:n, :kept] = coupling
        self.m, self.n = kept, n

    def _append(self, v: Tensor, length: Tensor | float) -> None:
        torch.div(v, length, out=self.V[self.n])
        self.n += 1

    def _append_outside(self, v: Tensor) -> None:
        """Append the component of a vector orthogonal to V."""
        v = self._copied_in(v)
        self._append(v, self._orthogonalize(v, self.n)[1])

    def _copied_in(self, v: Tensor) -> Tensor:
        """A copy of v, in the next row of V if V has one."""
        return self.V[self.n].copy_(v) if self.n < len(self.V) else v.clone()

    def _subtract(self, v: Tensor, first: int, n: int) -> Tensor:
        """Subtract from v its components in V[first:n]; returns the components."""
        return _subtract(self._space, v, self.V[first:n])

    def _orthogonalize(self, v: Tensor, n: int) -> tuple[list[float], float]:
        """Subtract from v its components in V[:n]; returns the components, and the rest's length."""
        return _orthogonalize(self._space, v, self.V[:n])


def _subtract(space: Space, v: Tensor, V: Tensor) -> Tensor:
    """Subtract from v its components in the orthonormal rows of V; returns the components."""
    components = space.gram(V, v)
    v.addmv_(V.T, components, alpha=-1)  # takes a third of the time of components @ V
    return components


def _orthogonalize(space: Space, v: Tensor, V: Tensor) -> tuple[list[float], float]:
    """Subtract from v its components in the rows of V; returns the components, and the rest's length.

    Repeated while a subtraction removes more than rounding (Daniel, Gragg, Kaufman and Stewart, 1976).
    """
    total = [0.0] * len(V)
    for _ in range(3):
        parts = [_subtract(space, v, V), space.norms(v[None])]
        *components, length = torch.cat(parts).tolist()
        total = [*map(add, total, components)]
        if not _in_span(length, components):
            break
    return total, length


def _in_span(length: float, components: list[float]) -> bool:
    """Whether a vector with these components in V has too little left, so it must be orthogonalised
    again."""
    return not length > REORTHOGONALIZE_BELOW * hypot(length, *components)


@final
@results.result
@dataclass(frozen=True)
class SingularTriplets:
    """The largest singular values, descending, with their vectors: A ~ left diag(values) right^T.

    Unpacks and indexes as (left, values, right), like the result of `torch.svd_lowrank`.

    Attributes:
        left: [M, k], of length one.
        values: [k].
        right: [P, k], of length one.
        residuals: [k], (|A v - value u|^2 + |A^T u - value v|^2)^(1/2), from the vectors themselves.
        products: Products of A and A^T with one vector, not counting the 2 k for the residuals.
    """

    left: Tensor
    values: Tensor
    right: Tensor
    residuals: Tensor
    products: int

    def __repr__(self) -> str:
        values = validation.listing([f"{value:.5g}" for value in self.values.tolist()], 10)
        return (
            f"SingularTriplets({values}; residuals up to {float(self.residuals.max()):.1g}, "
            f"{self.products} products)"
        )

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.left, self.values, self.right))

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Tensor:
        return (self.left, self.values, self.right)[index]


def svd(
    operator: Any, k: int, tol: float | None, max_iter: int | None, generator: Any
) -> SingularTriplets:
    """The k largest singular values and their vectors; `RectangularOperator.svd` describes the
    options."""
    operator.space.refuse_sharded("svd")
    # The Krylov space starts on the shorter side: it can span this side.
    flips, size = operator.shape[0] < operator.shape[1], min(operator.shape)
    A, T = (operator.T, operator) if flips else (operator, operator.T)
    if validation.at_least("k", k, 1) > size:
        raise errors.ArgumentValueError(
            f"k: expected at most {size} singular values, the smaller side of A, got {k}; ask for "
            "fewer."
        )
    limit = 10 * size if max_iter is None else validation.at_least("max_iter", max_iter, 1)
    wide = torch.promote_types(A.dtype, torch.float32)
    default = max(TOLERANCES.get(operator.space.precision, 1e-2), TOLERANCES[wide])
    tol = default if tol is None else validation.number("tol", tol, minimum=0)
    random = validation.generator(generator) or torch.Generator().manual_seed(0)
    scaled, unit = in_range(lambda rows: A.apply(rows.to(A.dtype)).to(wide), A.space)

    def adjoint(rows: Tensor) -> Tensor:
        return T.apply(rows.to(A.dtype)).to(wide) / unit()

    def draw(space: Space) -> Tensor:
        return random_normals(space, 1, random, wide)[0]

    if size <= first_look(k, 1):
        whole, products = operator.to_dense().double(), size
        U, values, Vh = torch.linalg.svd(whole.T if flips else whole, full_matrices=False)
        u, values, v = U.T[:k], values[:k], Vh[:k]
    else:
        u, v, values, products = bidiagonalize(
            (scaled, adjoint), (A.space, A.target), draw, k, tol, limit, unit
        )
    u, v, values = (part.to(A.device, A.dtype) for part in (u, v, values))
    images, back = scaled(v.to(wide)), adjoint(u.to(wide))
    sigma = (values / unit())[:, None]
    residuals = torch.hypot(A.target.norms(images - sigma * u), A.space.norms(back - sigma * v))
    left, right = (v, u) if flips else (u, v)
    return SingularTriplets(left.T, values, right.T, residuals * unit(), products)


def bidiagonalize(
    products: tuple[Apply, Apply],
    spaces: tuple[Space, Space],
    draw: Callable[[Space], Tensor],
    k: int,
    tol: float,
    restarts: int,
    unit: Callable[[], Any],
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Rows u [k, M] and v [k, P], singular values of A times its unit, descending, and the number of
    products, by thick restarts; M >= P.

        A V_m^T = U_m^T B        A^T U_m^T = V_m^T B^T + beta v_{m+1} e_m^T        U, V orthonormal rows

    B is upper triangular: its columns are the components of A v in U. The residual of the triplet
    (U^T x, sigma, V^T y) is |beta x_m|; allowed are tol sigma, or 10 eps |A|, which is rounding.

    products: with A and A^T. spaces: of v and of u.
    """
    (apply, adjoint), (space, target) = products, spaces
    size, first = space.size, first_look(k, 1)
    most = min(size, 3 * first)
    start = draw(space)
    V, U = start.new_empty(min(most + 1, size), size), start.new_empty(most, target.size)
    B = torch.zeros(most, most, dtype=torch.float64, device="cpu")
    V[0] = start / space.norms(start[None])
    eps, noise, m, done = torch.finfo(V.dtype).eps, TINY, 0, 0

    def append(rows: Tensor, n: int, vector: Tensor, of: Space) -> tuple[list[float], float]:
        """Orthogonalize a product and append it, or a random vector if the product lies in the span;
        returns the components, and the length of the rest or 0."""
        nonlocal noise
        parts, length = _orthogonalize(of, vector, rows[:n])
        noise = max(noise, ROUNDING * eps * hypot(length, *parts))
        inside, added = length <= noise, length
        if n < len(rows):
            if inside:
                vector = draw(of)
                _, added = _orthogonalize(of, vector, rows[:n])
            torch.div(vector, added, out=rows[n])
        return parts, 0.0 if inside else length

    for _ in range(restarts):
        while m < most:
            parts, length = append(U, m, apply(V[m : m + 1])[0], target)
            B[: m + 1, m] = torch.tensor([*parts, length], dtype=B.dtype, device="cpu")
            _, beta = append(V, m + 1, adjoint(U[m : m + 1])[0], space)
            m, done = m + 1, done + 2
            # A look costs as much as a product of a small network.
            if m < most and (m < first or (m - first) % 4):
                continue
            x, sigma, y = torch.linalg.svd(B[:m, :m])
            residuals = beta * x[m - 1, :k].abs()
            found = residuals <= (tol * sigma[:k]).clamp(min=noise)
            if bool(found.all()):
                values = sigma[:k].to(U) * unit()
                return x[:, :k].T.to(U) @ U[:m], y[:k].to(V) @ V[:m], values, done
        kept = k + (most - k) // 2
        U[:kept], V[:kept] = x[:, :kept].T.to(U) @ U, y[:kept].to(V) @ V[:most]
        V[kept] = V[most].clone()
        B.zero_()[:kept, :kept] = torch.diag(sigma[:kept])
        m = kept
    raise errors.ConvergenceError(
        f"svd: expected {k} singular values, got {int(found.sum())} after {done} products "
        f"({', '.join(f'{v * float(unit()):.6g}' for v in sigma[:k][found].tolist())}); raise max_iter "
        "or tol, or ask for fewer."
    )


def to_scipy(operator: Any) -> Any:
    """`RectangularOperator.to_scipy`."""
    operator.space.refuse_sharded("to_scipy")
    linalg = validation.package("scipy.sparse.linalg", "to_scipy", "`pip install scipy`")
    np = validation.package("numpy", "to_scipy", "`pip install scipy`")
    own = operator.dtype if operator.dtype in (torch.float32, torch.float64) else torch.float32

    def times(A: Any, V: Any) -> Any:
        rows = torch.from_numpy(np.ascontiguousarray(np.asarray(V).reshape(len(V), -1).T))
        return A.apply(rows.to(A.device, A.dtype)).T.to("cpu", own).numpy()

    A, T = partial(times, operator), partial(times, operator.T)
    # matmat also serves as matvec: SciPy reshapes the product.
    products = {"matvec": A, "matmat": A, "rmatvec": T, "rmatmat": T}
    return linalg.LinearOperator(operator.shape, **products, dtype=str(own).removeprefix("torch."))
