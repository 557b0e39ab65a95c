"""Models for the audit: right ones, and ones with a fault at a known place."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

import hoglib as hog


class Cached(Function):
    """exp, with the result as an attribute of ctx made by forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.slope = x.cos()
        return x.sin()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g * ctx.slope


class WrongScale(Function):
    """Its first derivative is half of what it should be."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return g * x


class Applies(nn.Module):
    """Applies a Function, or any function, between two right ones."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.function(x * 1.5)
        return y + 0.1 * x


class Block(nn.Module):
    """Residual."""

    def __init__(self, norm: nn.Module, width: int = 6) -> None:
        super().__init__()
        self.norm, self.up, self.down = norm, nn.Linear(width, 9), nn.Linear(9, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return y


class Net(nn.Module):
    """Residual blocks between two layers."""

    def __init__(self, *norms: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.blocks = nn.ModuleList([Block(norm) for norm in norms])
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for block in self.blocks:
            h = block(h)
        y: Tensor = self.last(h)
        return y


class Matrices(nn.Module):
    """A function of matrices between layers."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        a = torch.einsum("ni,nj->nij", x, x) * 0.1 + 2 * torch.eye(x.shape[1], dtype=x.dtype)
        y: Tensor = x * self.function(a, x).reshape(len(x), -1)
        return y


class Images(nn.Module):
    """A convolution, a norm, a mean."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(1, 4, 3), norm, nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.norm(self.conv(x.reshape(len(x), 1, 4, 4))))
        y: Tensor = self.head(h.flatten(2).mean(2))
        return y


def problem(
    model: nn.Module, width: int = 4, rows: int = 7, criterion: Any = F.cross_entropy
) -> Any:
    """A loss, its parameters and a batch."""
    random = torch.Generator().manual_seed(3)
    batch = (
        torch.randn(rows, width, generator=random),
        torch.randint(3, (rows,), generator=random),
    )
    return hog.functional_loss(model, criterion), hog.trainable_params(model), batch


def smooth(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), *layers, nn.Linear(6, 3))
