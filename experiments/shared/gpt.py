"""A small transformer that predicts the next character, and adapters of it."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

import hoglib as hog
from experiments.checks import at_least
from hoglib.errors import ArgumentValueError


class CharacterGPT(nn.Module):
    """A decoder-only transformer with layer norms before attention and before the hidden layer.

    Args:
        vocabulary: Characters.
        length: Positions, the most that it takes.
        width: Features.
        layers: Blocks.
        heads: Heads of attention.
    References:
        Radford et al., Language Models are Unsupervised Multitask Learners, 2019.
    """

    def __init__(self, vocabulary: int, length: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        check_blocks(width, layers, heads)
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for weight in (self.embedding.weight, self.head.weight):
            # as GPT-2; torch's embeddings start with a standard deviation of 1
            nn.init.normal_(weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits [..., T, vocabulary] of the characters after ids [..., T]."""
        h = self.embedding(ids) + self.position[: ids.shape[-1]]
        return self.head(self.norm(self.blocks(h)))


class Block(nn.Module):
    """Attention and a hidden layer, each added to what it is given."""

    def __init__(self, width: int, heads: int, causal: bool = True) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.hidden, self.output = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, h: Tensor) -> Tensor:
        q, k, v = (
            x.unflatten(-1, (self.heads, -1)).transpose(-2, -3)
            for x in self.attention(self.norm_1(h)).chunk(3, -1)
        )
        # torch's fused kernels have no second derivative
        attended = hog.ops.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        h = h + self.projection(attended.transpose(-2, -3).flatten(-2))
        return h + self.output(F.gelu(self.hidden(self.norm_2(h))))


def check_blocks(width: int, layers: int, heads: int) -> None:
    """Raise for sizes that no transformer has."""
    at_least("layers", layers, 1)
    if at_least("width", width, 1) % at_least("heads", heads, 1):
        raise ArgumentValueError(f"width: expected a multiple of the {heads} heads, got {width}.")


class LowRank(nn.Module):
    """W + B A, with B of zeros at the start.

    References:
        Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, 2021.
    """

    def __init__(self, W: Tensor, rank: int) -> None:
        super().__init__()
        self.A = nn.Parameter(torch.randn(rank, W.shape[1]) / W.shape[1] ** 0.5)
        self.B = nn.Parameter(torch.zeros(W.shape[0], rank))

    def forward(self, W: Tensor) -> Tensor:
        return W + self.B @ self.A


def add_adapters(model: CharacterGPT, rank: int) -> CharacterGPT:
    """Freeze a model, and give each linear layer of its blocks an adapter of this rank."""
    model.requires_grad_(False)
    # listed first, as each registration adds modules to those that are walked
    for layer in [m for m in model.blocks.modules() if isinstance(m, nn.Linear)]:
        parametrize.register_parametrization(layer, "weight", LowRank(layer.weight, rank))
    return model
