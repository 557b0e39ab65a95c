"""The penalty that is checked, run so that its effects are seen and undone, and its critics.

The gradients of the critics by their inputs are known, and they record where they are called:

    linear     D(x) = <b, x>                          g = b
    quadratic  D(x) = <b, x> + <a, x^2> / 2           g = b + a x
    hinge      D(x) = <a, max(0, x)^2> / 2            g = a max(0, x), zero where no element is positive
    network    D(x) = <w, tanh(V x + u)>              g = V^T (w (1 - tanh^2))
"""

import copy
import inspect
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, final

import torch
from torch import Generator, Tensor, nn

from hoglib._core import validation
from hoglib._core.detachment import DetachedGradient, DetachmentWatch
from hoglib._core.state import preserve_random_state
from hoglib._core.torch_internals import unwrap
from hoglib.penalties.checking.formulas import Kind

FLAG = "requires_grad_"  # which DetachmentWatch takes for an operation without a derivative


class Outcome(NamedTuple):
    """The result of `every` calls in a row: the mean of their values, where the critic was called,
    and where the gradient was detached."""

    mean: Tensor
    calls: list[list[Tensor]]
    detached: list[DetachedGradient]

    @property
    def number(self) -> float:
        """The mean as a Python number."""
        return float(self.mean.detach())

    @property
    def active(self) -> list[list[Tensor]]:
        """The calls in which the critic was run: a lazy penalty does nothing in the others."""
        return [xs for xs in self.calls if xs]


class NotANumber(Exception):
    """The penalty did not return one number; the text describes what it returned."""


@final
class Subject:
    """A penalty as a function of (critic, real, fake)."""

    def __init__(self, penalty: Callable[..., Any], kind: Kind, every: int) -> None:
        self.penalty, self.kind, self.every = penalty, kind, every
        self.attached = False  # whether fake comes with a graph, as from a generator
        self._both = kind.at in ("between", "both") or _takes_fake(penalty)

    def __call__(self, critic: nn.Module, real: Tensor, fake: Tensor) -> Outcome:
        """As many calls as a lazy penalty needs, always with the same random numbers."""
        values, calls, detached = [], [], []
        seed(real.device)
        if isinstance(critic, Critic):
            critic.requires_grad_()  # an earlier call may have frozen it
        for _ in range(self.every):
            if isinstance(critic, Critic):
                critic.calls = []
            with DetachmentWatch() as watch:
                returned = self.once(critic, real, fake)
            detached += [d for d in watch.detached if d.place is not None and FLAG not in d.how]
            values.append(number(returned, real))
            calls.append(critic.calls if isinstance(critic, Critic) else [])
        mean = torch.stack([v.to(real.dtype) for v in values]).mean()
        return Outcome(mean, calls, list({str(d): d for d in detached}.values()))

    def once(self, critic: nn.Module, real: Tensor, fake: Tensor) -> Any:
        """What one call of the penalty returns."""
        if self.attached:
            fake = fake.detach().requires_grad_().clone()
        if self._both:
            return self.penalty(critic, real, fake)
        return self.penalty(critic, fake if self.kind.at == "fake" else real)


def number(returned: Any, like: Tensor) -> Tensor:
    """A scalar tensor: a Python number, as lazy penalties return where they do nothing, is one too."""
    if isinstance(returned, bool | int | float):
        return torch.tensor(float(returned), dtype=like.dtype, device=like.device)
    if isinstance(returned, Tensor) and returned.numel() == 1 and returned.is_floating_point():
        return returned.reshape(())
    raise NotANumber(validation.describe(returned))


def _takes_fake(penalty: Callable[..., Any]) -> bool:
    """Whether a penalty at one set of points is called with both, by its signature."""
    function = penalty.forward if isinstance(penalty, nn.Module) else penalty
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return False
    plain = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(plain) < 3:
        return False
    third = plain[2]
    return third.default is third.empty or "fake" in third.name.lower()


@contextmanager
def preserve_state(penalty: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Yields the penalty, or a copy of an object that may count its calls; restores its state and
    all random number generators."""
    owner: Any = getattr(penalty, "__self__", penalty)
    state = copy.deepcopy(owner.state_dict()) if isinstance(owner, nn.Module) else None
    if state is None and not inspect.isroutine(penalty):
        penalty = _copied(penalty)
    with preserve_random_state():
        try:
            yield penalty
        finally:
            if state is not None:
                owner.load_state_dict(state)


def _copied(penalty: Any) -> Any:
    try:
        return copy.deepcopy(penalty)
    except Exception:  # it cannot be copied, and our calls are counted
        return penalty


def seed(device: torch.device) -> None:
    """Seeds the random numbers of torch, Python and NumPy; to be used inside `preserve_state`."""
    torch.default_generator.manual_seed(0)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(0)
    random.seed(0)
    numpy = sys.modules.get("numpy")
    if numpy:
        numpy.random.seed(0)


Score = Callable[..., Tensor]


def _linear(x: Tensor, b: Tensor) -> Tensor:
    return x @ b


def _quadratic(x: Tensor, b: Tensor, a: Tensor) -> Tensor:
    return x @ b + x.square() @ a / 2


def _hinge(x: Tensor, a: Tensor) -> Tensor:
    # not relu, whose own derivative would stop a NaN on its way to a
    return ((x + x.abs()) / 2).square() @ a / 2


def _network(x: Tensor, w: Tensor, V: Tensor, u: Tensor) -> Tensor:
    return torch.tanh(x @ V.mT + u) @ w


GRADIENTS: dict[Score, Score] = {
    _linear: lambda x, b: b.expand_as(x),
    _quadratic: lambda x, b, a: b + a * x,
    _hinge: lambda x, a: a * x.relu(),
    _network: lambda x, w, V, u: (w * (1 - torch.tanh(x @ V.mT + u).square())) @ V,
}


@final
class Critic(nn.Module):
    """Scores [N, 1] (or [N]) of x [N, *shape]; `calls` holds each x that it was called with."""

    def __init__(
        self, score: Score, shape: Sequence[int], column: bool, tensors: dict[str, Tensor]
    ) -> None:
        super().__init__()
        self._score, self._shape, self._column = score, tuple(shape), column
        self._names = list(tensors)
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor))
        self.calls: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(unwrap(x).detach().clone())
        score = self._score(self._rows(x), *self._tensors())
        return score.unsqueeze(-1) if self._column else score

    def gradient(self, x: Tensor) -> Tensor:
        """The gradient of its scores by x, [N, *shape]."""
        with torch.no_grad():
            return GRADIENTS[self._score](self._rows(x), *self._tensors()).reshape(x.shape)

    def _rows(self, x: Tensor) -> Tensor:
        return x.flatten(-len(self._shape))

    def _tensors(self) -> list[Tensor]:
        return [self.get_parameter(name) for name in self._names]


@final
class CriticFactory:
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
    ) -> "CriticFactory":  # fmt: skip
        """The same factory with what is given replaced."""
        return CriticFactory(
            self.shape if shape is None else shape,
            self.column if column is None else column,
            self.dtype if dtype is None else dtype,
            self.device,
            self.size,
        )

    def _draw(self, *sizes: int) -> Tensor:
        return torch.rand(*sizes, generator=self._random, dtype=torch.float64)

    def _critic(self, score: Score, **tensors: Tensor) -> Critic:
        made = {name: t.to(self.device, self.dtype) for name, t in tensors.items()}
        return Critic(score, self.shape, self.column, made)

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


def _dense(inputs: int, outputs: int, factory: CriticFactory) -> nn.Linear:
    """A layer whose numbers are drawn from the seed, and not from torch's generator."""
    layer = nn.utils.skip_init(nn.Linear, inputs, outputs)
    with torch.no_grad():
        layer.weight.copy_((factory._draw(outputs, inputs) - 0.5) / inputs**0.5)
        layer.bias.zero_()
    return layer
