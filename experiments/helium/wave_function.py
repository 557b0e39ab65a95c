"""The wave function of two electrons around a nucleus."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from experiments.shared.networks import mlp

CHARGE = 2.0  # of the nucleus


class WaveFunction(nn.Module):
    """log psi of the two electrons of helium in a singlet, symmetric in them and positive.

        log psi = -2 (r_1 + r_2) + r_12 / (2 + 2 b r_12) + f(s_1, s_2, s_12) + f(s_2, s_1, s_12)
        s = r^2 / (1 + r)

    The first two terms cancel the poles of the potential where two particles meet (Kato's cusp
    conditions); the features s of the network have no slope there.

    Args:
        hidden: Widths of the hidden layers of f.
    Shape:
        - positions: [n, 6], of the first electron and then of the second, in Bohr radii
        - log psi: [n]
    References:
        Kato, On the Eigenfunctions of Many-particle Systems in Quantum Mechanics, 1957.
    """

    def __init__(self, hidden: Sequence[int]) -> None:
        super().__init__()
        self.network = mlp([3, *hidden, 1], "tanh")
        self.b = nn.Parameter(torch.tensor(0.0))  # b = softplus of it, positive

    def forward(self, x: Tensor) -> Tensor:
        r = distances(x)
        r_1, r_2, r_12 = r.unbind(1)
        s = r.square() / (1 + r)
        f = self.network(s) + self.network(s[:, [1, 0, 2]])
        jastrow = r_12 / (2 + 2 * nn.functional.softplus(self.b) * r_12)
        return -CHARGE * (r_1 + r_2) + jastrow + f.squeeze(1)


def distances(x: Tensor) -> Tensor:
    """r_1, r_2 and r_12 [n, 3]."""
    first, second = x.unflatten(1, (2, 3)).unbind(1)
    return torch.stack([v.norm(dim=1) for v in (first, second, first - second)], 1)


def potential(x: Tensor) -> Tensor:
    """The potential energy, in hartree [n]."""
    r_1, r_2, r_12 = distances(x).unbind(1)
    return -CHARGE / r_1 - CHARGE / r_2 + 1 / r_12
