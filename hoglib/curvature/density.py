"""Spectral densities of operators, by stochastic Lanczos quadrature."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hoglib._core import validation
from hoglib.curvature.eigenvalues import ROUNDING
from hoglib.curvature.symmetric_matrix import SymmetricMatrix
from hoglib.curvature.traces import mean_of, signs
from hoglib.errors import ArgumentValueError

MOST_POINTS = 100_000
AT_ONCE = 2**30  # bytes of the bases of the samples that run at once


@dataclass(frozen=True)
class SpectralDensity:
    """Quadrature nodes and weights of each sample, and their density; float64, on the CPU.

    mean over the eigenvalues of f(eigenvalue) = E[sum over i of weights_i f(nodes_i)]
    """

    nodes: Tensor  # [samples, steps], ascending
    weights: Tensor  # [samples, steps]; each row sums to 1
    grid: Tensor  # [points]
    density: Tensor  # [points]; its integral is 1
    error: Tensor  # [points], one standard error over the samples; infinite for a single one
    width: float  # standard deviation of the Gaussian that stands for an eigenvalue
    products: int  # products of A with one vector

    def average(self, f: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """The mean of f over all eigenvalues, tr f(A) / P, and one standard error of it.

        f takes a tensor, elementwise. For a polynomial of a degree below 2 steps each sample is
        v^T f(A) v exactly, so that all of the error is that of the samples.
        """
        return mean_of((self.weights * f(self.nodes)).sum(1))


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
    multiplied as one block. width: of the Gaussian, 1% of the range of the nodes by default. grid: the
    points t, by default from end to end of the nodes and five widths more, a quarter of a width apart
    (10^5 points at most). generator: of the signs. Returns `SpectralDensity`. Memory: samples x steps
    vectors, or 1 GiB, or the steps of one sample.
    Source: Golub & Meurant, Matrices, Moments and Quadrature, 2010; Ubaru, Chen & Saad, 2017; Ghorbani,
    Krishnan & Xiao, An Investigation into Neural Net Optimization via Hessian Eigenvalue Density, 2019.
    """
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
    exact = torch.promote_types(operator.dtype, torch.float32)  # what bases are orthogonal in
    at_once = max(1, AT_ONCE // (steps * size * exact.itemsize))
    found = []
    for start in range(0, num_samples, at_once):
        v = signs(operator, min(at_once, num_samples - start), generator).to(exact)
        found.append(
            tridiagonal(
                lambda rows: operator.apply(rows.to(operator.dtype)).to(exact),
                v / size**0.5, steps,
            )
        )  # fmt: skip
    T = torch.cat(found)
    nodes, vectors = torch.linalg.eigh(T)
    weights = vectors[:, 0].square()
    return _smoothed(nodes, weights, grid, width, operator.count - before)


def tridiagonal(apply: Callable[[Tensor], Tensor], start: Tensor, steps: int) -> Tensor:
    """T = V^T A V [samples, steps, steps], float64 on the CPU, V from each row v of start [samples, P].

    Where v and its products span less, the rest of T is zero: it has no part in functions of T at v.
    """
    samples, size = start.shape
    V = start.new_zeros(samples, steps, size)
    T = start.new_zeros(samples, steps, steps)
    largest = start.new_zeros(samples)
    going = torch.ones(samples, dtype=torch.bool, device=start.device)
    V[:, 0] = start
    for j in range(steps):
        w = torch.zeros_like(start)
        w[going] = apply(V[going, j])
        so_far = V[:, : j + 1]
        for _ in range(2):  # which makes it orthogonal to rounding
            coefficients = torch.einsum("snp,sp->sn", so_far, w)
            w = w - torch.einsum("snp,sn->sp", so_far, coefficients)
            T[:, j, j] += coefficients[:, j]
        beta = w.norm(dim=1)
        largest = torch.stack([largest, T[:, j, j].abs(), beta]).amax(0)
        going = going & (beta > ROUNDING * torch.finfo(w.dtype).eps * largest)
        if j + 1 == steps or not bool(going.any()):
            break
        T[:, j, j + 1] = T[:, j + 1, j] = torch.where(going, beta, 0)
        V[going, j + 1] = w[going] / beta[going, None]
    return T.to("cpu", torch.float64)


def _smoothed(
    nodes: Tensor, weights: Tensor, grid: Tensor | None, width: float | None, products: int
) -> SpectralDensity:
    there = nodes[weights > torch.finfo(weights.dtype).eps]
    low, high = float(there.min()), float(there.max())
    if width is None:
        # of a multiple of the identity 1% of that; of zero, of one
        width = 0.01 * ((high - low) or abs(high) or 1.0)
    if grid is None:
        points = int(min(4 * (high - low) / width + 41, MOST_POINTS))
        grid = torch.linspace(low - 5 * width, high + 5 * width, points, dtype=torch.float64)
    grid = grid.to("cpu", torch.float64)
    of_samples = []
    for t, w in zip(nodes, weights, strict=True):
        z = (grid[:, None] - t) / width
        of_samples.append((torch.exp(-z.square() / 2) @ w) / (width * (2 * torch.pi) ** 0.5))
    density, error = mean_of(torch.stack(of_samples))
    return SpectralDensity(nodes, weights, grid, density, error, width, products)
