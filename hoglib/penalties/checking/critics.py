"""Critics whose gradients by their inputs are known, and that remember where they were called.

linear     D(x) = <b, x>                          g = b
quadratic  D(x) = <b, x> + <a, x^2> / 2           g = b + a x
hinge      D(x) = <a, max(0, x)^2> / 2            g = a max(0, x), zero where no element is positive
network    D(x) = <w, tanh(V x + u)>              g = V^T (w (1 - tanh^2))
"""

from collections.abc import Callable, Sequence

import torch
from torch import Generator, Tensor, nn

from hoglib._core.torch_internals import unwrap

Rule = Callable[..., Tensor]


def _linear(x: Tensor, b: Tensor) -> Tensor:
    return x @ b


def _quadratic(x: Tensor, b: Tensor, a: Tensor) -> Tensor:
    return x @ b + x.square() @ a / 2


def _hinge(x: Tensor, a: Tensor) -> Tensor:
    # not relu, whose own derivative would stop a NaN on its way to a
    return ((x + x.abs()) / 2).square() @ a / 2


def _network(x: Tensor, w: Tensor, V: Tensor, u: Tensor) -> Tensor:
    return torch.tanh(x @ V.mT + u) @ w


SLOPES: dict[Rule, Rule] = {
    _linear: lambda x, b: b.expand_as(x),
    _quadratic: lambda x, b, a: b + a * x,
    _hinge: lambda x, a: a * x.relu(),
    _network: lambda x, w, V, u: (w * (1 - torch.tanh(x @ V.mT + u).square())) @ V,
}


class Critic(nn.Module):
    """Scores [N, 1] (or [N]) of x [N, *shape]; `calls` holds each x that came."""

    def __init__(
        self, rule: Rule, shape: Sequence[int], column: bool, tensors: dict[str, Tensor]
    ) -> None:
        super().__init__()
        self._rule, self._shape, self._column = rule, tuple(shape), column
        self._names = list(tensors)
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor))
        self.calls: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(unwrap(x).detach().clone())
        score = self._rule(self._rows(x), *self._tensors())
        return score.unsqueeze(-1) if self._column else score

    def slope(self, x: Tensor) -> Tensor:
        """Its gradient by x, [N, *shape]."""
        with torch.no_grad():
            return SLOPES[self._rule](self._rows(x), *self._tensors()).reshape(x.shape)

    def _rows(self, x: Tensor) -> Tensor:
        return x.flatten(-len(self._shape))

    def _tensors(self) -> list[Tensor]:
        return [self.get_parameter(name) for name in self._names]


class Makers:
    """Makes critics and data of one shape, dtype and device, from one seed."""

    def __init__(
        self, shape: Sequence[int], column: bool, dtype: torch.dtype, device: torch.device,
        size: float,
    ) -> None:  # fmt: skip
        self.shape, self.column, self.dtype, self.device = tuple(shape), column, dtype, device
        self.size = size  # of the gradients' norms
        self.d = torch.Size(self.shape).numel()
        self._random = Generator().manual_seed(0)

    def like(
        self, *, shape: Sequence[int] | None = None, column: bool | None = None,
        dtype: torch.dtype | None = None,
    ) -> "Makers":  # fmt: skip
        """The same, but for what is given."""
        return Makers(
            self.shape if shape is None else shape,
            self.column if column is None else column,
            self.dtype if dtype is None else dtype,
            self.device,
            self.size,
        )

    def _draw(self, *sizes: int) -> Tensor:
        return torch.rand(*sizes, generator=self._random, dtype=torch.float64)

    def _critic(self, rule: Rule, **tensors: Tensor) -> Critic:
        made = {name: t.to(self.device, self.dtype) for name, t in tensors.items()}
        return Critic(rule, self.shape, self.column, made)

    def data(self, n: int, *, low: float = -1.0, spread: bool = True) -> Tensor:
        """Samples [n, *shape] whose norms differ: 0.3 to 2."""
        x = low + (1 - low) * self._draw(n, self.d)
        x = x / x.norm(dim=1, keepdim=True)
        if spread and n > 1:
            x = x * torch.linspace(0.3, 2.0, n, dtype=x.dtype).unsqueeze(1)
        return x.reshape(n, *self.shape).to(self.device, self.dtype)

    def linear(self, norm: float) -> Critic:
        b = self._draw(self.d) - 0.5
        return self._critic(_linear, b=self.size * norm * b / b.norm())

    def quadratic(self) -> Critic:
        a, b = 0.6 + 0.8 * self._draw(self.d), self._draw(self.d) - 0.5
        return self._critic(_quadratic, b=0.1 * self.size * b / b.norm(), a=self.size * a)

    def hinge(self) -> Critic:
        return self._critic(_hinge, a=self.size * (0.6 + 0.8 * self._draw(self.d)))

    def network(self, scale: float = 1.0, width: int = 8) -> Critic:
        V = (self._draw(width, self.d) - 0.5) / self.d**0.5
        w, u = 4 * scale * self.size * (0.5 + self._draw(width)), self._draw(width) - 0.5
        return self._critic(_network, w=w / width**0.5, V=V * 2, u=u)

    def batch_normed(self) -> nn.Module:
        """A network with running statistics, in training mode."""
        layers = [nn.Flatten(), _dense(self.d, 8, self), nn.BatchNorm1d(8), nn.Tanh()]
        return nn.Sequential(*layers, _dense(8, 1, self)).to(self.device, self.dtype)


def _dense(inputs: int, outputs: int, makers: Makers) -> nn.Linear:
    """A layer whose numbers are drawn from the seed, and not from torch's generator."""
    layer = nn.utils.skip_init(nn.Linear, inputs, outputs)
    with torch.no_grad():
        layer.weight.copy_((makers._draw(outputs, inputs) - 0.5) / inputs**0.5)
        layer.bias.zero_()
    return layer
