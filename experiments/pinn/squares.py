"""Points of the unit square, and differential equations on it whose solutions are known."""

from collections.abc import Callable
from math import pi
from typing import NamedTuple

import torch
from torch import Tensor

import hoglib as hog
from experiments.checks import at_least, one_of
from experiments.pinn.allen_cahn import DIFFUSION, allen_cahn_reference
from experiments.shared.stream import StreamData, seeded

GRID = 101  # points of each side of the grid that errors are measured on
WAVES = 5  # of the period, that the network for the Allen-Cahn equation gets
DIFFUSIVITY = 0.1  # of the heat equation
MODES = ((1.0, 1, 1), (0.3, 4, 3))  # amplitude and half waves by x and y


class Equation(NamedTuple):
    """L u = f on the unit square.

    Attributes:
        title: In tables and pictures.
        operator: (u, p) -> (u, L u) at points p [n, 2].
        source: f.
        solution: u.
        ansatz: (network, p) -> u, which meets the boundary and initial conditions for any network.
        inputs: Of the network.
        causality: epsilon of causal weights, where the second coordinate is the time; 0 for none.
        axes: Names of the coordinates.
    """

    title: str
    operator: Callable[..., tuple[Tensor, ...]]
    source: Callable[[Tensor], Tensor]
    solution: Callable[[Tensor], Tensor]
    ansatz: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]
    inputs: int = 2
    causality: float = 0.0
    axes: str = "xy"


def poisson() -> Equation:
    """Lap u = f with u = 0 on the border: u a sum of two products of sines."""

    def modes(p: Tensor, power: int) -> Tensor:
        x, y = p.unbind(-1)
        terms = [
            c * (-(pi**2) * (a * a + b * b)) ** power * (a * pi * x).sin() * (b * pi * y).sin()
            for c, a, b in MODES
        ]
        return torch.stack(terms).sum(0)

    return Equation(
        "Poisson's equation", hog.laplacian, lambda p: modes(p, 1), lambda p: modes(p, 0),
        lambda network, p: _bubble(p) * network(2 * p - 1).squeeze(-1),
    )  # fmt: skip


def wave() -> Equation:
    """Lap u = f with u = 0 on the border: u = sin(pi x) sin(pi y)."""
    return Equation(
        "Poisson's equation", hog.laplacian, lambda p: -2 * pi**2 * (pi * p).sin().prod(-1),
        lambda p: (pi * p).sin().prod(-1), poisson().ansatz,
    )  # fmt: skip


def heat() -> Equation:
    """u_t = u_xx / 10 at points (x, t), with u = 0 at both ends and sin(pi x) at t = 0."""
    coefficients = torch.tensor([DIFFUSIVITY, 0.0], dtype=torch.float64)

    def operator(u: Callable[[Tensor], Tensor], p: Tensor) -> tuple[Tensor, ...]:
        a = coefficients.to(p)
        value, diffusion, gradient = hog.laplacian(u, p, coefficients=a, return_gradient=True)
        return value, gradient[:, 1] - diffusion

    def ansatz(network: Callable[[Tensor], Tensor], p: Tensor) -> Tensor:
        x, t = p.unbind(-1)
        return (pi * x).sin() + 4 * x * (1 - x) * t * network(2 * p - 1).squeeze(-1)

    def solution(p: Tensor) -> Tensor:
        x, t = p.unbind(-1)
        return (-DIFFUSIVITY * pi**2 * t).exp() * (pi * x).sin()

    return Equation(
        "the heat equation", operator, lambda p: torch.zeros_like(p[:, 0]), solution, ansatz,
        axes="xt",
    )  # fmt: skip


def plate() -> Equation:
    """Lap Lap u = f with u and its slope 0 on the border: u = sin^2(pi x) sin^2(pi y), scaled to 1."""
    k = 2 * pi

    def source(p: Tensor) -> Tensor:
        # u = A B / 4 with A = 1 - cos k x, A'' = k^2 cos k x, A'''' = -k^4 cos k x
        (A, B), (Axx, Byy) = (1 - (k * p).cos()).unbind(-1), (k**2 * (k * p).cos()).unbind(-1)
        return (-(k**2) * Axx * B + 2 * Axx * Byy - k**2 * A * Byy) / 4

    return Equation(
        "a clamped plate", hog.bilaplacian, source, lambda p: (pi * p).sin().square().prod(-1),
        lambda network, p: _bubble(p).square() * network(2 * p - 1).squeeze(-1),
    )  # fmt: skip


def _bubble(p: Tensor) -> Tensor:
    """Zero on the border, one in the middle."""
    return (4 * p * (1 - p)).prod(-1)


def allen_cahn() -> Equation:
    """u_t = 1e-4 u_zz + 5 u - 5 u^3, periodic in z from -1 to 1, with u = z^2 cos(pi z) at t = 0.

    Points are ((z + 1) / 2, t). The network gets the time and the waves of the period.
    """
    coefficients = torch.tensor([DIFFUSION / 4, 0.0], dtype=torch.float64)  # z = 2 x - 1
    waves = 2 * pi * torch.arange(1, WAVES + 1, dtype=torch.float64)

    def operator(u: Callable[[Tensor], Tensor], p: Tensor) -> tuple[Tensor, ...]:
        a = coefficients.to(p)
        value, diffusion, gradient = hog.laplacian(u, p, coefficients=a, return_gradient=True)
        return value, gradient[:, 1] - diffusion - 5 * value + 5 * value**3

    def ansatz(network: Callable[[Tensor], Tensor], p: Tensor) -> Tensor:
        x, t = p[:, :1], p[:, 1:]
        phases = x * waves.to(p)
        correction = network(torch.cat([2 * t - 1, phases.cos(), phases.sin()], 1))
        return initial(2 * x - 1).squeeze(-1) + (t * correction).squeeze(-1)

    def initial(z: Tensor) -> Tensor:
        return z.square() * (pi * z).cos()

    def solution(p: Tensor) -> Tensor:
        i, j = (p * (GRID - 1)).round().long().unbind(-1)
        if not torch.allclose(p * (GRID - 1), torch.stack([i, j], -1).to(p), atol=1e-3):
            raise ValueError("the spectral reference is known at the points of the grid only")
        return torch.as_tensor(allen_cahn_reference(GRID)).to(p)[i, j]

    return Equation(
        "the Allen-Cahn equation", operator, lambda p: torch.zeros_like(p[:, 0]), solution, ansatz,
        inputs=1 + 2 * WAVES, causality=2.0, axes="xt",
    )  # fmt: skip


EQUATIONS: dict[str, Callable[[], Equation]] = {
    "poisson": poisson, "plate": plate, "allen_cahn": allen_cahn, "wave": wave, "heat": heat,
}  # fmt: skip


class Square(StreamData):
    """An equation on the unit square: random points for training, a grid for errors.

    Args:
        equation: "poisson", "plate", "allen_cahn", "wave" or "heat".
        iterations: Batches in the run.
        batch: Points in a batch.
        seed: Seed of the points. Default: that of the run.
        fixed: All batches have the same points.
    """

    def __init__(
        self,
        equation: str = "poisson",
        iterations: int = 30,
        batch: int = 2048,
        seed: int | None = None,
        fixed: bool = False,
    ) -> None:
        super().__init__(iterations, seed)
        one_of("equation", equation, EQUATIONS)
        self.equation = EQUATIONS[equation]()
        self.batch = at_least("batch", batch, 1)
        self.fixed = fixed
        self.options = {"equation": equation, "fixed": fixed}

    def batch_of(self, seed: int) -> Tensor:
        return torch.rand(self.batch, 2, generator=seeded(self.seed if self.fixed else seed))

    def test_batch(self) -> Tensor:
        return grid()


def grid() -> Tensor:
    """The points of a grid, the border included, [GRID^2, 2]."""
    axis = torch.linspace(0, 1, GRID)
    return torch.cartesian_prod(axis, axis)
