"""Spectral densities of operators, by stochastic Lanczos quadrature."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from hoglib._core import validation
from hoglib.curvature.eigenvalues import ROUNDING
from hoglib.curvature.traces import Estimate, mean_of, random_signs
from hoglib.curvature.vector_space import Space, SymmetricMatrix, check_operator
from hoglib.errors import ArgumentValueError

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
    operator: SymmetricMatrix,
    num_samples: int = 10,
    *,
    steps: int = 80,
    grid: Tensor | None = None,
    width: float | None = None,
    generator: torch.Generator | None = None,
) -> SpectralDensity:
    r"""The density of the eigenvalues of an operator, by stochastic Lanczos quadrature.

        density(t) = 1/P sum over eigenvalues of N(t; eigenvalue, width^2)
                   = E[v^T N(t; A, width^2) v]        v of signs, of length one
                   ~ mean over samples of sum over i of weights_i N(t; nodes_i, width^2)

    Each sample takes `steps` of Lanczos, T = V^T A V, with full reorthogonalisation: nodes are the
    eigenvalues of T, weights the squared first entries of its eigenvectors. The samples' vectors are
    multiplied as one block. It holds samples x steps vectors in memory, or 1 GiB of them, or the steps
    of one sample.

    Args:
        operator: The matrix A [P, P], a `LinearOperator`.
        num_samples: Random vectors.
        steps: Lanczos steps of each, one product a step.
        grid: The points t, [n]; by default from end to end of the nodes and five widths more, a quarter
            of a width apart (10^5 points at most).
        width: Standard deviation of the Gaussian. Default: 1% of the range of the nodes.
        generator: Of the signs; None is torch's global generator.
    Returns:
        `SpectralDensity`.
    References:
        Golub and Meurant, Matrices, Moments and Quadrature, 2010. Ubaru, Chen and Saad, Fast
        Estimation of tr(f(A)) via Stochastic Lanczos Quadrature, 2017. Ghorbani, Krishnan and Xiao, An
        Investigation into Neural Net Optimization via Hessian Eigenvalue Density, 2019.
    Example:
        >>> A = hog.HessianOperator(lambda p, x: (p * x).square().sum(), torch.ones(2), torch.ones(2))
        >>> hog.curvature.spectral_density(A, 3, width=0.1).average(lambda t: t**2).value
        tensor(4., dtype=torch.float64)
    """
    check_operator(operator)
    operator.space.check_same_call("spectral_density", num_samples, steps)
    size = operator.shape[0]
    validation.at_least("num_samples", num_samples, 1)
    steps = min(validation.at_least("steps", steps, 1), size)
    validation.generator(generator)
    if width is not None and not validation.number("width", width) > 0:
        raise ArgumentValueError(
            f"width: expected a number greater than 0, got {width}; 1% of the range is usual."
        )
    if grid is not None and validation.real("grid", grid).dim() != 1:
        raise ArgumentValueError(
            f"grid: expected a tensor of points [n], got shape {tuple(grid.shape)}; "
            "`torch.linspace` makes one."
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
                random_signs(operator, count, generator).to(wide).div_(size**0.5), steps,
                operator.space,
            )[0]
        )  # fmt: skip
    nodes, vectors = torch.linalg.eigh(torch.cat(found))
    weights = vectors[:, 0].square()
    return _smoothed(nodes, weights, grid, width, operator.count - before)


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
    nodes: Tensor, weights: Tensor, grid: Tensor | None, width: float | None, products: int
) -> SpectralDensity:
    """The density of the nodes, each of which is a Gaussian, on a grid."""
    present = nodes[weights > torch.finfo(weights.dtype).eps]
    low, high = float(present.min()), float(present.max())
    if width is None:
        # for a multiple of the identity 1% of the eigenvalue; for zero 1% of one
        width = 0.01 * ((high - low) or abs(high) or 1.0)
    if grid is None:
        points = int(min(4 * (high - low) / width + 41, MOST_POINTS))
        grid = torch.linspace(low - 5 * width, high + 5 * width, points, dtype=torch.float64)
    grid = grid.to("cpu", torch.float64)
    densities = []
    for t, w in zip(nodes, weights, strict=True):
        z = (grid[:, None] - t) / width
        densities.append((torch.exp(-z.square() / 2) @ w) / (width * (2 * torch.pi) ** 0.5))
    density, error = mean_of(torch.stack(densities))
    return SpectralDensity(nodes, weights, grid, density, error, width, products)
