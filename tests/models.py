"""Small models of the tests: of hoglib's ops, of plain torch, with each kind of normalisation; and their parts."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hoglib as hog


@dataclass
class Sample:
    """A batch that only the model knows the inside of."""

    x: Tensor
    y: Tensor


class Tied(nn.Module):
    """Two layers that share one weight, and a parameter that does not learn."""

    def __init__(self, width: int = 2) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.second.weight = self.first.weight
        self.frozen = nn.Parameter(torch.ones(width), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x))) * self.frozen


class Through(nn.Module):
    """A function as a layer."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Fn(nn.Module):
    """A module from a function of itself and its inputs."""

    def __init__(self, run: Any, **parts: Any) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            if isinstance(part, torch.Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self, *args, **kwargs)


def attending(width: int, hidden: int, outputs: int) -> nn.Module:
    """A transformer layer, which torch alone cannot differentiate twice on a CPU."""
    return Fn(
        lambda net, x: net.head(net.layer(x).mean(1)),
        layer=nn.TransformerEncoderLayer(width, 1, hidden, dropout=0.0, batch_first=True),
        head=nn.Linear(width, outputs),
    )


class Checkpointed(nn.Module):
    """Runs its body again in backward, where its own parameters are back in their places; if `again`."""

    def __init__(self, body: nn.Module, head: nn.Module, again: bool = True) -> None:
        super().__init__()
        self.body, self.head, self.again = body, head, again

    def forward(self, x: Tensor) -> Tensor:
        return self.head(
            checkpoint(self.body, x, use_reentrant=False) if self.again else self.body(x)
        )


class Remembers(nn.Module):
    """Adds an average of its inputs, that of this call included, which it keeps by assignment."""

    def __init__(self) -> None:
        super().__init__()
        self.net = MODELS["plain"]()
        self.register_buffer("average", torch.zeros(2))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.average = self.average + x.mean(0).detach()
        self.calls += 1
        return self.net(x) * self.average * self.calls.clone()


def build(name: str) -> nn.Module:
    """Maps [N, 2] to [N, 2], in float64, the same at every call."""
    state = torch.get_rng_state()
    torch.manual_seed(1)
    model = MODELS[name]().double()
    torch.set_rng_state(state)
    return model


MODELS: dict[str, Any] = {
    "plain": lambda: nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)),
    "hoglib ops": lambda: nn.Sequential(hog.nn.Linear(2, 3), hog.nn.Swish(3), hog.nn.Linear(3, 3), hog.nn.Tanh(), hog.nn.Linear(3, 2)),
    "fused layers": lambda: nn.Sequential(hog.nn.LinearAct(2, 3, act="tanh"), hog.nn.LinearAct(3, 3, act="swish"), hog.nn.LinearAct(3, 3, act="softplus"), hog.nn.LinearAct(3, 2, act="sigmoid")),
    "LayerNorm": lambda: nn.Sequential(nn.Linear(2, 4), nn.LayerNorm(4), nn.SiLU(), nn.Linear(4, 2)),
    "GroupNorm": lambda: nn.Sequential(nn.Linear(2, 4), nn.GroupNorm(1, 4), nn.GELU(), nn.Linear(4, 2)),
    "BatchNorm": lambda: nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)),
    "BatchNorm in eval mode": lambda: nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)).eval(),
    "tied and frozen": Tied,
}  # fmt: skip
