"""Functions of operators, and densities of their eigenvalues, by Lanczos' method."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor

from hoglib._core import validation
from hoglib.curvature.eigenvalues import ROUNDING
from hoglib.curvature.traces import Estimate, mean_of
from hoglib.curvature.vector_space import Space, SymmetricMatrix, random_signs
from hoglib.errors import ArgumentValueError, NotPositiveDefiniteError

MOST_POINTS = 100_000
AT_ONCE = 2**30  # bytes of the bases of the samples that run at once


class SpectralDensity(NamedTuple):
    """Quadrature nodes and weights of each sample, and their density; float64, on the CPU.

    mean over the eigenvalues of f(eigenvalue) = E[sum over i of weights_i f(nodes_i)]

    Attributes:
        nodes: [samples, steps], ascending.
        weights: [samples, steps]; each row sums to 1.
        grid: [points], where the density is evaluated.
        density: [points]; its integral is 1.
        error: [points], one standard error over the samples; infinite for a single one.
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

    def average(self, f: Callable[[Tensor], Tensor]) -> Estimate:
        """The mean of f over all eigenvalues, tr f(A) / P.

        For a polynomial of a degree below 2 steps each sample is v^T f(A) v exactly, so that all of the
        error is that of the samples.

        Args:
            f: A function of a tensor, elementwise.
        Returns:
            An `Estimate`: the mean over the samples and one standard error of it.
        Raises:
            ArgumentValueError: for a function that is not taken element by element.
            NonFiniteError: for a function that is not finite at a node.
        """
        values = validation.of_eigenvalues(f, self.nodes, self.weights > 0)
        return mean_of((self.weights * values).sum(1))


def spectral_density(
    operator: SymmetricMatrix, num_samples: int, steps: int, width: float | None,
    generator: Generator | None,
) -> SpectralDensity:  # fmt: skip
    """density(t) = 1/P sum over eigenvalues of N(t; eigenvalue, width^2), from samples of signs.

    Each takes `steps` of Lanczos, T = V^T A V: nodes are the eigenvalues of T, weights the squared
    first entries of its eigenvectors. The samples' vectors are multiplied as one block.
    """
    size = operator.shape[0]
    validation.at_least("num_samples", num_samples, 1)
    steps = min(validation.at_least("steps", steps, 1), size)
    validation.generator(generator)
    if width is not None and not validation.number("width", width) > 0:
        raise ArgumentValueError(
            f"width: expected a number greater than 0, got {width}; 1% of the range is usual."
        )
    before = operator.count
    wide = torch.promote_types(operator.dtype, torch.float32)  # of the bases
    at_once = max(1, AT_ONCE // (steps * size * wide.itemsize))
    found = []
    for first in range(0, num_samples, at_once):
        count = min(at_once, num_samples - first)
        found.append(
            tridiagonal(
                lambda rows: operator.apply(rows.to(operator.dtype)).to(wide),
                random_signs(operator.space, count, generator).to(wide).div_(size**0.5), steps,
                operator.space,
            )[0]
        )  # fmt: skip
    nodes, vectors = torch.linalg.eigh(torch.cat(found))
    weights = vectors[:, 0].square()
    return _smoothed(nodes, weights, width, operator.count - before)


def tridiagonal(
    apply: Callable[[Tensor], Tensor], start: Tensor, steps: int, space: Space
) -> tuple[Tensor, Tensor]:
    """T = V^T A V, float64 on the CPU, and V [samples, steps, P], from each row v of start.

    Where v and its products span a smaller space, the rest of T is zero, and functions of T at v do not
    depend on it.
    """
    samples, size = start.shape
    V = start.new_zeros(samples, steps, size)
    T = start.new_zeros(samples, steps, steps)
    largest = start.new_zeros(samples)
    active = torch.ones(samples, dtype=torch.bool, device=start.device)
    V[:, 0] = start
    del start  # a caller that has handed it over holds V alone
    for j in range(steps):
        if bool(active.all()):
            w = apply(V[:, j])
        else:
            w = V.new_zeros(samples, size)
            w[active] = apply(V[active, j])
        basis = V[:, : j + 1]
        for _ in range(2):  # twice is enough: orthogonal to rounding
            coefficients = space.gram(basis, w)
            w = torch.baddbmm(w[:, None], coefficients[:, None], basis, alpha=-1)[:, 0]
            T[:, j, j] += coefficients[:, j]
        beta = space.norms(w)
        largest = torch.stack([largest, T[:, j, j].abs(), beta]).amax(0)
        active = active & (beta > ROUNDING * torch.finfo(w.dtype).eps * largest)
        if j + 1 == steps or not bool(active.any()):
            break
        T[:, j, j + 1] = T[:, j + 1, j] = torch.where(active, beta, 0)
        if bool(active.all()):
            torch.div(w, beta[:, None], out=V[:, j + 1])
        else:
            V[active, j + 1] = w[active] / beta[active, None]
        del w  # not held beside the next product
    return T.to("cpu", torch.float64), V


def _smoothed(
    nodes: Tensor, weights: Tensor, width: float | None, products: int
) -> SpectralDensity:
    """The density of the nodes, each of which is a Gaussian, on a grid."""
    present = nodes[weights > torch.finfo(weights.dtype).eps]
    low, high = float(present.min()), float(present.max())
    if width is None:
        # for a multiple of the identity 1% of the eigenvalue; for zero 1% of one
        width = 0.01 * ((high - low) or abs(high) or 1.0)
    points = int(min(4 * (high - low) / width + 41, MOST_POINTS))
    grid = torch.linspace(low - 5 * width, high + 5 * width, points, dtype=torch.float64)
    densities = []
    for t, w in zip(nodes, weights, strict=True):
        z = (grid[:, None] - t) / width
        densities.append((torch.exp(-z.square() / 2) @ w) / (width * (2 * torch.pi) ** 0.5))
    density, error = mean_of(torch.stack(densities))
    return SpectralDensity(nodes, weights, grid, density, error, width, products)


def matrix_function(
    operator: SymmetricMatrix, b: Any, function: Callable[[Tensor], Tensor], steps: int
) -> Any:
    """f(A) b = |b| V f(T) e_1, T = V^T A V, the columns of V orthonormal, V e_1 = b / |b|."""
    validation.function("function", function)
    rows, rebuild = operator.space.rows(b, "b")
    validation.finite("b", rows, "f(A) b does not exist there.")
    count = min(validation.at_least("steps", steps, 1), operator.shape[0])
    size = operator.space.norms(rows)[:, None]
    start = rows / torch.where(size > 0, size, torch.ones_like(size))
    T, V = tridiagonal(operator.apply, start, count, operator.space)
    theta, S = torch.linalg.eigh(T)
    present = S[:, 0].square() > torch.finfo(T.dtype).eps ** 2  # of others no part is in b
    values = validation.of_eigenvalues(function, theta, present & (size > 0))
    weights = torch.einsum("sij,sj,sj->si", S, values, S[:, 0]).to(V)
    found = size * torch.einsum("snp,sn->sp", V, weights)
    return rebuild(torch.where(size > 0, found, 0))


def logdet(
    operator: SymmetricMatrix, num_samples: int, steps: int, generator: Generator | None
) -> Estimate:
    """log det A = tr log A, from the density of the eigenvalues."""
    found = spectral_density(operator, num_samples, steps, None, generator)
    present = found.weights > torch.finfo(found.weights.dtype).eps
    lowest = float(found.nodes[present].min())
    if lowest <= 0:
        raise NotPositiveDefiniteError(
            f"logdet: expected a positive definite matrix, got one with the eigenvalue {lowest:.3g}; "
            "add damping, `A.damped(...)`."
        )
    tiny = torch.finfo(found.nodes.dtype).tiny
    average = found.average(lambda x: x.clamp(min=tiny).log())
    size = operator.shape[0]
    return Estimate(*((size * part).to(operator.device, operator.dtype) for part in average))
