"""Small critics that record where they are called, made from one seed, and what is read of them.

linear     D(x) = <b, x>                    the same gradient everywhere
quadratic  D(x) = <b, x> + <a, x^2> / 2     the point follows from the gradient
network    D(x) = <w, tanh(V x + u)>
hinge      D(x) = <a, max(0, x)^2> / 2      no gradient where no element is positive
"""

import copy
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Generator, Tensor, nn

from hoglib._core import validation
from hoglib._core.autograd import materialize_grads
from hoglib._core.state import preserve_random_state, same
from hoglib._core.torch_internals import unwrap
from hoglib.penalties.mistakes import INTERPOLATE


@final
class Critic(nn.Module):
    """Scores [N, 1] (or [N]) of x [N, *shape]; `calls` holds each x that it was called with."""

    def __init__(
        self, factory: "CriticFactory", score: Callable[..., Tensor], **tensors: Tensor
    ) -> None:
        super().__init__()
        self._score, self._dims, self._column = score, len(factory.shape), factory.column
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor.to(factory.device, factory.dtype)))
        self.calls: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(unwrap(x).detach().clone())
        score = self._score(x.flatten(-self._dims), *self._parameters.values())
        return score.unsqueeze(-1) if self._column else score


@final
@dataclass(frozen=True)
class CriticFactory:
    """Makes critics and data of one shape, dtype and device, from one seed."""

    shape: tuple[int, ...]
    column: bool  # whether scores are [N, 1]
    dtype: torch.dtype
    device: torch.device
    size: float  # of the gradients' norms
    generator: Generator = field(init=False, default_factory=lambda: Generator().manual_seed(0))

    @property
    def d(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def tolerance(self) -> float:
        return 1e-5 if self.dtype == torch.float64 else 1e-3

    def _draw(self, *sizes: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        drawn = torch.rand(*sizes, generator=self.generator, dtype=torch.float64)
        return low + (high - low) * drawn

    def data(self, n: int, *, low: float = -1.0) -> Tensor:
        """Samples [n, *shape] whose norms differ: 0.3 to 2."""
        x = self._draw(n, self.d, low=low)
        norms = torch.linspace(0.3, 2.0, n, dtype=x.dtype) if n > 1 else x.new_ones(1)
        x = x * (norms / x.norm(dim=1)).unsqueeze(1)
        return x.reshape(n, *self.shape).to(self.device, self.dtype)

    def linear(self, norm: float) -> Critic:
        b = self._draw(self.d, low=-1.0)
        return Critic(self, lambda x, b: x @ b, b=self.size * norm * b / b.norm())

    def quadratic(self) -> Critic:
        a, b = self._draw(self.d, low=0.6, high=1.4), self._draw(self.d, low=-1.0)
        tensors = {"b": 0.1 * self.size * b / b.norm(), "a": self.size * a}
        return Critic(self, lambda x, b, a: x @ b + x.square() @ a / 2, **tensors)

    def hinge(self) -> Critic:
        a = self.size * self._draw(self.d, low=0.6, high=1.4)
        # not relu, whose own derivative would stop a NaN on its way to a
        return Critic(self, lambda x, a: ((x + x.abs()) / 2).square() @ a / 2, a=a)

    def network(self, slope: float = 1.0) -> Critic:
        w = slope * self.size * self._draw(8, low=0.7, high=2.1)
        V = self._draw(8, self.d, low=-1.0) / self.d**0.5
        u = self._draw(8, low=-0.5, high=0.5)
        return Critic(self, lambda x, w, V, u: torch.tanh(x @ V.mT + u) @ w, w=w, V=V, u=u)


def recorded(calls: Sequence[Tensor], real: Tensor, fake: Tensor) -> Tensor | str:
    """The points [N, ...] of one call of the penalty, or an error in their shape."""
    for x in calls:
        vmapped = x.dim() == real.dim() + 1 and x.shape[1] == 1  # over batches of one
        fits = x.dim() == real.dim() or vmapped
        if not fits or x.shape[1 - real.dim() :] != real.shape[1:]:
            return (
                f"the critic was called with shape {tuple(x.shape)}, real has {tuple(real.shape)}: a "
                f"coefficient was broadcast to a wrong shape. {INTERPOLATE}"
            )
    others = [x for x in calls if not (same(x, real) or same(x, fake))]
    rows = torch.cat([x.reshape(-1, *real.shape[1:]) for x in others or calls])
    if len(rows) < len(real):
        return f"the critic was called with {len(rows)} of {len(real)} samples. Penalise each."
    return rows[: len(real)]


def gradient_of(value: Tensor, critic: nn.Module) -> Tensor | None:
    """The gradient of a value by all parameters, as one vector; None without a graph."""
    if not value.requires_grad:
        return None
    critic.requires_grad_()  # a penalty may have frozen its parameters
    parameters: list[Tensor] = list(critic.parameters())
    parts = torch.autograd.grad(value, parameters, allow_unused=True)
    filled = materialize_grads(list(parts), parameters)
    return torch.cat([part.detach().reshape(-1) for part in filled])


class NotANumber(Exception):
    """The penalty did not return one number."""


def scalar(returned: Any, like: Tensor) -> Tensor:
    """A scalar tensor: a Python number, as lazy penalties return where they do nothing, is one too."""
    if isinstance(returned, bool | int | float):
        return torch.tensor(float(returned), dtype=like.dtype, device=like.device)
    if isinstance(returned, Tensor) and returned.numel() == 1 and returned.is_floating_point():
        return returned.reshape(()).to(like.dtype)
    raise NotANumber(
        f"expected the penalty, one number by itself, got {validation.describe(returned)}; reduce it "
        "by the mean over samples."
    )


@contextmanager
def isolated_penalty(
    penalty: Callable[..., Any], device: torch.device
) -> Iterator[Callable[..., Any]]:
    """Yields a copy of the penalty, an object of which may count its calls, with random numbers of one
    seed; restores all random generators."""
    with suppress(Exception):  # it cannot be copied, and our calls are counted
        penalty = copy.deepcopy(penalty)
    if device.type == "cuda":
        torch.cuda.init()  # else its state would not be saved
    with preserve_random_state():
        torch.default_generator.manual_seed(0)
        if device.type == "cuda":
            torch.cuda.manual_seed_all(0)
        random.seed(0)
        if numpy := sys.modules.get("numpy"):
            numpy.random.seed(0)
        yield penalty
