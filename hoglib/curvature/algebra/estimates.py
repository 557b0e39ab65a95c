"""Traces, diagonals, norms and spectral densities of operators, estimated from products with random
vectors; functions of operators by Lanczos' method.

`LinearOperator` describes them. generator=None is torch's global generator.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor

from hoglib import plotting
from hoglib._core.messages import results, validation
from hoglib._core.numerics.factorizations import symmetric_eigen
from hoglib._core.runtime.device_reads import DeviceRead
from hoglib.curvature.algebra.eigenvalues import ROUNDING, Apply, in_range
from hoglib.curvature.algebra.vector_space import Space, SymmetricMatrix, random_signs
from hoglib.errors import ArgumentValueError

AT_ONCE = 2**28  # bytes of random vectors in one product


@results.result
@validation.short_repr
class Estimate(NamedTuple):
    """A mean over random samples.

    Attributes:
        value: The mean.
        error: One standard error of the mean; infinite for a single sample.
    """

    value: Tensor
    error: Tensor

    def plot(self, ax: object = None) -> Any:
        """Draw the means with one standard error, by the number of the entry.

        Args:
            ax: Matplotlib axes. Default: the axes of a new pyplot figure.
        Returns:
            The axes.
        Raises:
            MissingDependencyError: if matplotlib is not installed.
        """
        return plotting.estimate(self, ax)

    def returned(self, with_error: bool) -> "Estimate | Tensor":
        """The estimate, or without with_error only its value."""
        return self if with_error else self.value


# (operator, products, generator)
Estimator = Callable[[SymmetricMatrix, int, Generator | None], Estimate]


def hutchinson_trace(A: SymmetricMatrix, num_samples: int, generator: Generator | None) -> Estimate:
    """tr A = E[v^T A v], v of independent signs; Var[v^T A v] = 2 sum over i != j of A_ij^2.

    The variance is estimated as twice the sum of the variances of `hutchinson_diagonal`, which need
    only second moments. The sample variance of the few v^T A v needs fourth moments, and comes out too
    small if one eigenvalue dominates.
    """
    diagonal, errors = (x.double()[None] for x in _diagonal(A, num_samples, generator))
    total, squares = A.space.dots((torch.ones_like(diagonal), diagonal), (errors, errors))
    return Estimate(total[0].to(A.dtype), (2 * squares[0]).sqrt().to(A.dtype))


def hutchinson_diagonal(A: SymmetricMatrix, samples: int, generator: Generator | None) -> Estimate:
    """diag A = E[v * A v]; Var[(v * A v)_i] = sum over j != i of A_ij^2."""
    return Estimate(*(x.to(A.dtype) for x in _diagonal(A, samples, generator)))


def _diagonal(A: SymmetricMatrix, samples: int, generator: Generator | None) -> Estimate:
    """`hutchinson_diagonal`, in float32 at least."""
    wide = torch.promote_types(A.dtype, torch.float32)
    total, squares = torch.zeros(2, A.space.length, dtype=wide, device=A.device)
    products = (p for v, Av in samples_of(A, samples, generator) for p in v * Av)
    for count, product in enumerate(products, start=1):
        change = product - total  # Welford's algorithm: no samples are kept
        total += change / count
        squares += change * (product - total)
    if count == 1:
        squares.fill_(torch.inf)
    return Estimate(total, (squares / max(count - 1, 1) / count).sqrt())


def samples_of(
    operator: SymmetricMatrix, num_samples: int, generator: Generator | None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows v of random signs and their products A v, in chunks."""
    validation.at_least("num_samples", num_samples, 1)
    size = operator.shape[0]
    at_once = max(1, AT_ONCE // (size * operator.dtype.itemsize))
    for start in range(0, num_samples, at_once):
        v = random_signs(operator.space, min(at_once, num_samples - start), generator)
        yield v, operator.apply(v)


def mean_of(values: Tensor) -> Estimate:
    """The mean over the leading dimension, and its standard error."""
    mean = values.mean(0)
    spread = values.std(0) if len(values) > 1 else torch.full_like(mean, torch.inf)
    return Estimate(mean, spread / len(values) ** 0.5)


def exact_estimate(value: Tensor) -> Estimate:
    return Estimate(value, torch.zeros_like(value))


def xtrace(operator: SymmetricMatrix, num_samples: int, generator: Generator | None) -> Estimate:
    """tr A = tr(Q_i^T A Q_i) + E[w_i^T (I - Q_i Q_i^T) A (I - Q_i Q_i^T) w_i], the mean over i.

    w_i are normal vectors, and Q_i is an orthonormal basis of the products A w_j for all j != i. The
    second term is scaled as if the projected w_i had its mean length.

    There are k estimates t_i, each unbiased given Q_i. With B_i = (I - Q_i Q_i^T) A (I - Q_i Q_i^T)
    the variance of t_i is 2 |B_i|_F^2, without the component of B_i along I. Let t_i^-j be t_i without
    the vector w_j. To leading order, t_i and t_j are correlated through t_i - t_i^-j and t_j - t_j^-i:

        k^2 Var = sum of E[2 |B_i w_i|^2] + sum over i != j of E[(t_i - t_i^-j) (t_j - t_j^-i)]

    The second sum is clamped to the first: it is too large for the few matrices with a large
    eigenvalue that only all vectors together find.
    """
    operator.space.refuse_sharded("xtrace")
    size = operator.shape[0]
    random = validation.generator(generator)
    if validation.at_least("num_samples", num_samples, 4) >= size:
        return exact_estimate(operator.to_dense().diagonal().sum())
    count = num_samples // 2
    wide = torch.promote_types(operator.dtype, torch.float32)  # dtype of the basis
    device = operator.device if random is None else random.device
    w = torch.randn(count, size, generator=random, dtype=torch.float32, device=device)
    w = w.to(operator.device, wide)
    w *= size**0.5 / w.norm(dim=1, keepdim=True)
    Q, R = _basis_of_products(operator, w)
    W = Q.T @ w.T
    del w  # products with Q then take the memory of w
    Z = _products(operator, Q)
    if R is None:
        return exact_estimate((Q * Z).double().sum().to(operator.dtype))
    # Small matrices from here on: in float64, and in a unit, so that squares of float32 stay in range.
    unit = R.abs().max()
    Z.div_(unit)
    W, R, H, ZZ = (x.double() for x in (W, R / unit, Q.T @ Z, Z.T @ Z))
    S = _left_out_directions(R)
    H = (H + H.T) / 2

    def dots(x: Tensor, y: Tensor) -> Tensor:
        return (x * y).sum(0)

    inside = H.diagonal().sum() - dots(S, H @ S)
    PW = W - S * dots(S, W)  # Q_i^T w_i, in coordinates of Q
    PR = R - S * dots(S, R)
    outside = dots(W, R) - 2 * dots(W, PR) + dots(PW, H @ PW)
    rest, left = size - count + 1, size - dots(PW, PW)
    found = inside + outside * rest / left
    # |B_i w_i|^2, with B_i w_i = (I - Q_i Q_i^T) (A w_i - A Q_i Q_i^T w_i)
    C = R - H @ PW
    PC = C - S * dots(S, C)
    squares = dots(R, R) - 2 * dots(R, H @ PW) + dots(PW, ZZ @ PW) - dots(PC, PC)
    variances = 2 * (squares * rest / left - (outside * rest / left).square() / rest).clamp(min=0)
    # t_i^-j, at [j, i]: the basis Q_i also without the direction (s_j - g s_i) / sqrt(1 - g^2).
    g = (S.T @ S).fill_diagonal_(0)
    root, SHS = (1 - g.square()).sqrt(), S.T @ H @ S
    a, r, h = ((M - g * M.diagonal()) / root for M in (S.T @ W, S.T @ R, S.T @ H @ PW))
    q = (SHS.diagonal()[:, None] - 2 * g * SHS + g.square() * SHS.diagonal()) / root.square()
    without = (outside + 2 * a * (r - h) + a.square() * q) * (rest + 1) / (left + a.square())
    change = (found - inside + q - without).fill_diagonal_(0)
    # A correlation is at most 1.
    most = variances.sqrt().outer(variances.sqrt())
    shared = (change * change.T).clamp(-most, most).sum().clamp(min=0)
    squared_error = (variances.sum() + shared) / count**2
    own = (unit * x for x in (found.mean(), squared_error.sqrt()))
    return Estimate(*(part.to(operator.dtype) for part in own))


def _basis_of_products(matrix: SymmetricMatrix, w: Tensor) -> tuple[Tensor, Tensor | None]:
    """Q and R, for the products A w^T = Q R, with orthonormal columns of Q.

    R is None if the rank of A is below the number of products: Q then spans the range of A, and the
    trace is exact.
    """
    Y = matrix.apply(w.to(matrix.dtype)).to(w.dtype)
    Q, R = torch.linalg.qr(Y.T)
    smallest, largest = torch.stack(R.diagonal().abs().aminmax()).tolist()
    if smallest <= w.shape[1] * torch.finfo(w.dtype).eps * largest:
        U, lengths, _ = torch.linalg.svd(Y.T, full_matrices=False)
        rank = int((lengths > Y.shape[1] * torch.finfo(Y.dtype).eps * lengths.max()).sum())
        Q, R = U[:, :rank], None
    return Q, R


def _products(matrix: SymmetricMatrix, Q: Tensor) -> Tensor:
    """A Q"""
    return matrix.apply(Q.T.contiguous().to(matrix.dtype)).to(Q.dtype).T


def _left_out_directions(R: Tensor) -> Tensor:
    """Unit vectors s_i as columns: Q s_i is orthogonal to Q_i, the basis without product i."""
    S = torch.linalg.solve_triangular(R.T, torch.eye(len(R), device="cpu").to(R), upper=False)
    return S / S.norm(dim=0)


def xdiag(operator: SymmetricMatrix, num_samples: int, generator: Generator | None) -> Estimate:
    """diag A = diag(Q_i Q_i^T A) + E[w_i * (A - Q_i Q_i^T A) w_i], the mean over i.

    w_i are signs, and Q_i is an orthonormal basis of the products A w_j for all j != i.
    """
    operator.space.refuse_sharded("xdiag")
    count = validation.at_least("num_samples", num_samples, 4) // 2
    if 2 * count >= operator.shape[0]:
        return exact_estimate(operator.to_dense().diagonal().clone())
    wide = torch.promote_types(operator.dtype, torch.float32)
    w = random_signs(operator.space, count, generator).to(wide)
    Q, R = _basis_of_products(operator, w)
    Z = _products(operator, Q)
    if R is None:
        return exact_estimate((Q * Z).sum(1).to(operator.dtype))
    S = _left_out_directions(R)
    left = (Q @ S).T  # Q s_i as rows
    inside = (Q * Z).sum(1) - left * (Z @ S).T
    # w_i * Q s_i s_i^T Q^T A w_i, and A w_i = Q R_i
    outside = w * left * (S * R).sum(0).unsqueeze(1)
    return Estimate(*(part.to(operator.dtype) for part in mean_of(inside + outside)))


def trace(operator: SymmetricMatrix, num_samples: int, generator: Generator | None) -> Estimate:
    """`xtrace` with at least four products, if its vectors take at most 1 GiB and are not sharded;
    else `hutchinson_trace`."""
    vectors = 2 * num_samples * operator.shape[0] * operator.dtype.itemsize
    many = num_samples >= 4 and vectors <= BASES_AT_ONCE
    sharded = operator.space.placement.is_sharded
    return (xtrace if many and not sharded else hutchinson_trace)(operator, num_samples, generator)


TRACES: dict[str, Estimator] = {"auto": trace, "hutchinson": hutchinson_trace, "xtrace": xtrace}
DIAGONALS: dict[str, Estimator] = {"hutchinson": hutchinson_diagonal, "xdiag": xdiag}


MOST_POINTS = 100_000
BASES_AT_ONCE = 2**30  # bytes of the bases of samples that run at once


@results.result
class SpectralDensity(NamedTuple):
    """Quadrature nodes and weights of each sample, and their density; float64, on the CPU.

    mean over the eigenvalues of f(eigenvalue) = E[sum over i of weights_i f(nodes_i)]

    Attributes:
        nodes: [samples, steps], ascending.
        weights: [samples, steps]; each row sums to 1.
        grid: [points], where the density is evaluated.
        density: [points]; its integral is 1.
        error: [points], one standard error over the samples; infinite for one sample.
        width: Standard deviation of the Gaussian around each node.
        products: Products of A with one vector.
    """

    nodes: Tensor
    weights: Tensor
    grid: Tensor
    density: Tensor
    error: Tensor
    width: float
    products: int

    def __repr__(self) -> str:
        samples, steps = self.nodes.shape
        low, high = self.nodes.aminmax()
        return (
            f"SpectralDensity(from {low:.4g} to {high:.4g}, {samples} samples of {steps} steps, "
            f"{self.products} products)"
        )

    def plot(self, ax: object = None) -> Any:
        """Draw the density with one standard error.

        Args:
            ax: Matplotlib axes. Default: the axes of a new pyplot figure.
        Returns:
            The axes.
        Raises:
            MissingDependencyError: if matplotlib is not installed.
        """
        return plotting.density(self, ax)

    def average(self, f: Callable[[Tensor], Tensor]) -> Estimate:
        """The mean of f over all eigenvalues, tr f(A) / P.

        For a polynomial of a degree below 2 steps each sample is v^T f(A) v exactly: the only error is
        from sampling.

        Args:
            f: A function of a tensor, elementwise.
        Returns:
            An `Estimate`: the mean over the samples, with one standard error.
        Raises:
            ArgumentValueError: unless the function returns one number for each eigenvalue.
            NonFiniteError: for NaN or infinity at a node.
        """
        values = validation.of_eigenvalues(f, self.nodes, self.weights > 0)
        return mean_of((self.weights * values).sum(1))


def spectral_density(
    operator: SymmetricMatrix,
    num_samples: int,
    steps: int,
    width: float | None,
    generator: Generator | None,
    kept: list[tuple[Tensor, Tensor]] | None = None,
) -> SpectralDensity:
    """density(t) = 1/P sum over eigenvalues of N(t; eigenvalue, width^2), from samples of signs.

    Each sample takes `steps` Lanczos steps, T = V^T A V: nodes are the eigenvalues of T, weights the
    squared first entries of its eigenvectors. The samples' vectors are multiplied as one block.
    kept: A list to append the pairs (T, V) to.
    """
    size = operator.shape[0]
    validation.at_least("num_samples", num_samples, 1)
    steps = min(validation.at_least("steps", steps, 1), size)
    if width is not None and not validation.number("width", width) > 0:
        raise ArgumentValueError(
            f"width: expected a number greater than 0, got {width}; 1% of the range is usual."
        )
    before = operator.count
    wide = torch.promote_types(operator.dtype, torch.float32)  # dtype of the bases
    at_once = max(1, BASES_AT_ONCE // (steps * size * wide.itemsize))

    def apply(rows: Tensor) -> Tensor:
        return operator.apply(rows.to(operator.dtype)).to(wide)

    def start(count: int) -> Tensor:
        return random_signs(operator.space, count, generator).to(wide).div_(size**0.5)

    counts = (min(at_once, num_samples - first) for first in range(0, num_samples, at_once))
    found = []
    for count in counts:
        T, V = tridiagonal(apply, start(count), steps, operator.space)
        found.append(T)
        if kept is not None:
            kept.append((T, V))
        del V  # free the memory before the next samples
    nodes, vectors = symmetric_eigen(torch.cat(found))
    return _smoothed(nodes, vectors[:, 0].square(), width, operator.count - before)


def tridiagonal(apply: Apply, start: Tensor, steps: int, space: Space) -> tuple[Tensor, Tensor]:
    """T = V^T A V, float64 on the CPU, and V [samples, steps, P], from each row v of start.

    If the Krylov space of v has fewer than `steps` dimensions, the rest of T is zero, and functions of
    T at v do not depend on the rest.
    """
    samples, size = start.shape
    apply, unit = in_range(apply, space)
    V = start.new_zeros(samples, steps, size)
    T = start.new_zeros(samples, steps, steps)
    largest = start.new_zeros(samples)
    active = torch.ones(samples, dtype=torch.bool, device=start.device)
    waits, last, left = start.device.type == "cpu", None, samples
    V[:, 0] = start
    del start  # frees the memory if the caller keeps no reference
    for j in range(steps):
        if left == samples:
            w = apply(V[:, j])
        else:
            w = V.new_zeros(samples, size)
            w[active] = apply(V[active, j])
        basis = V[:, : j + 1]
        # twice is enough to be orthogonal to rounding (Parlett, The Symmetric Eigenvalue Problem, 1980)
        for _ in range(2):
            coefficients = space.gram(basis, w)
            w = torch.baddbmm(w[:, None], coefficients[:, None], basis, alpha=-1)[:, 0]
            T[:, j, j] += coefficients[:, j]
        beta = space.norms(w)
        largest = torch.stack([largest, T[:, j, j].abs(), beta]).amax(0)
        active = active & (beta > ROUNDING * torch.finfo(w.dtype).eps * largest)
        # The number of active samples is read one step late on a device, without a synchronization;
        # an ended sample is then multiplied as zeros.
        before, last = last, DeviceRead(active.sum())
        known = last if waits else before
        left = samples if known is None else int(known.numbers())
        if j + 1 == steps or not left:
            break
        T[:, j, j + 1] = T[:, j + 1, j] = torch.where(active, beta, 0)
        torch.div(w, torch.where(active, beta, torch.inf)[:, None], out=V[:, j + 1])
        del w  # free the memory before the next product
    return (T * unit()).to("cpu", torch.float64), V


def _smoothed(nodes: Tensor, weights: Tensor, width: float | None, count: int) -> SpectralDensity:
    """The density on a grid, with a Gaussian around each node."""
    present = nodes[weights > torch.finfo(weights.dtype).eps]
    low, high = float(present.min()), float(present.max())
    if width is None:
        # 1% of the range; 1% of the eigenvalue for a multiple of the identity; 0.01 for zero
        width = 0.01 * ((high - low) or abs(high) or 1.0)
    points = int(min(4 * (high - low) / width + 41, MOST_POINTS))
    low, high = low - 5 * width, high + 5 * width
    grid = torch.linspace(low, high, points, dtype=torch.float64, device="cpu")
    densities = []
    for t, w in zip(nodes, weights, strict=True):
        z = (grid[:, None] - t) / width
        densities.append((torch.exp(-z.square() / 2) @ w) / (width * (2 * torch.pi) ** 0.5))
    density, error = mean_of(torch.stack(densities))
    return SpectralDensity(nodes, weights, grid, density, error, width, count)
