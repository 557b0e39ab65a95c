"""An attention network for the velocity of points in the plane."""

from math import pi

import torch
from torch import Tensor, nn

from experiments.checks import at_least
from experiments.shared.gpt import Block, check_blocks


class Velocity(nn.Module):
    """u(z, r, t): the mean velocity of a point that is z at time t, from time r to time t.

    Each of the four numbers z_1, z_2, r and t is a token, embedded by its Fourier features; the tokens
    of z give the two components.

        features(a) = (a, sin w_k a, cos w_k a),  w_k = 2^k pi / 4,  k = 0 ... frequencies - 1

    Args:
        width: Features of a token.
        layers: Blocks of attention and a hidden layer.
        heads: Heads of attention.
        frequencies: Frequencies of the features.
    References:
        Tancik et al., Fourier Features Let Networks Learn High Frequency Functions, 2020.
    """

    frequency: Tensor

    def __init__(self, width: int, layers: int, heads: int, frequencies: int) -> None:
        super().__init__()
        check_blocks(width, layers, heads)
        count = 2 * at_least("frequencies", frequencies, 1) + 1
        self.register_buffer("frequency", 2.0 ** torch.arange(frequencies) * pi / 4)
        self.embedding = nn.Parameter(torch.randn(4, count, width) / count**0.5)
        self.position = nn.Parameter(0.5 * torch.randn(4, width))
        self.blocks = nn.Sequential(*(Block(width, heads, causal=False) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 1)

    def forward(self, z: Tensor, r: Tensor, t: Tensor) -> Tensor:
        """Velocities [n, 2] of z [n, 2], r [n, 1] and t [n, 1]."""
        numbers = torch.cat([z, r, t], 1)[..., None]
        angles = numbers * self.frequency
        features = torch.cat([numbers, angles.sin(), angles.cos()], -1)
        tokens = torch.einsum("ntf,tfw->ntw", features, self.embedding) + self.position
        return self.head(self.norm(self.blocks(tokens))[:, :2]).squeeze(-1)
