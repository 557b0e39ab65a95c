"""Critics of the tests: of every kind of input and output, small, in float64, and their inputs."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

import hoglib as hog
from tests.curvature.problems import draw
from tests.models import Fn, attending


def generator(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Conditional(nn.Module):
    """Scores of images given labels, by projection, with a class head beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(2, 3, 2), nn.SiLU(), nn.Flatten())
        self.label, self.score = nn.Embedding(4, 12), nn.Linear(12, 1)
        self.classes = nn.Linear(12, 4)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.body(x))
        return self.score(h).squeeze(1) + (h * self.label(y)).sum(1), self.classes(h)


def pair() -> nn.Module:
    """Scores of an image and an embedding together, in a dict."""

    def run(net: Any, x: dict[str, Tensor]) -> dict[str, Tensor]:
        h = torch.tanh(net.image(x["image"].flatten(1))) * torch.sigmoid(net.text(x["text"]))
        return {"features": h, "score": net.out(h)}

    return Fn(run, image=nn.Linear(4, 3), text=nn.Linear(5, 3), out=nn.Linear(3, 1))


def recurrent() -> nn.Module:
    """Scores of sequences."""

    def run(net: Any, x: Tensor) -> Any:
        return net.out(net.cell(x)[0].mean(1))

    return Fn(run, cell=nn.GRU(3, 4, batch_first=True), out=nn.Linear(4, 1))


def graphs() -> nn.Module:
    """Scores of graphs, from the rows of their nodes."""

    def run(net: Any, x: Tensor, index: Tensor) -> Any:
        h = torch.tanh(net.node(x))
        count = int(index.max()) + 1
        return net.out(h.new_zeros(count, 4).index_add(0, index, h))[:, 0].pow(2)

    return Fn(run, node=nn.Linear(3, 4), out=nn.Linear(4, 1))


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 1))


def fused() -> nn.Module:
    return nn.Sequential(hog.nn.LinearAct(3, 4, act="swish"), hog.nn.Linear(4, 1))


def images() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 3, 2), nn.InstanceNorm2d(3, affine=True), nn.SiLU(), nn.Conv2d(3, 1, 2)
    )


def normed() -> nn.Module:
    wrap = nn.utils.parametrizations.spectral_norm
    first = nn.utils.parametrizations.weight_norm(nn.Linear(3, 4))
    return nn.Sequential(first, nn.Softplus(), wrap(nn.Linear(4, 1))).eval()


INDEX = torch.tensor([0, 0, 1, 2, 2, 2, 4])
# name: (critic, real, fake, arguments, options)
CRITICS: dict[str, tuple[Any, Any, Any, tuple[Any, ...], dict[str, Any]]] = {
    "rows": (plain, draw(5, 3), draw(5, 3, seed=1), (), {}),
    "fused layers": (fused, draw(5, 3), draw(5, 3, seed=1), (), {}),
    "images": (images, draw(4, 2, 3, 3), draw(4, 2, 3, 3, seed=1), (), {}),
    "labels and a tuple": (
        Conditional, draw(4, 2, 3, 3), draw(4, 2, 3, 3, seed=1), (torch.tensor([0, 3, 1, 0]),), {},
    ),
    "two inputs and a dict": (
        pair, {"image": draw(4, 2, 2), "text": draw(4, 5)},
        {"image": draw(4, 2, 2, seed=1), "text": draw(4, 5, seed=2)}, (), {"output": "score"},
    ),
    "sequences": (recurrent, draw(3, 4, 3), draw(3, 4, 3, seed=1), (), {}),
    "graphs": (graphs, draw(7, 3), draw(7, 3, seed=1), (INDEX,), {"batch": INDEX}),
    "attention": (lambda: attending(3, 2, 1), draw(3, 2, 3), draw(3, 2, 3, seed=1), (), {}),
    "weight and spectral norm": (normed, draw(5, 3), draw(5, 3, seed=1), (), {}),
}  # fmt: skip


def build(make: Any, seed: int = 1) -> nn.Module:
    """In float64, the same at every call."""
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    model: nn.Module = make().double()
    torch.set_rng_state(state)
    return model


def with_params(model: nn.Module, params: dict[str, Tensor]) -> Any:
    """The model with other parameters."""
    return lambda *args: functional_call(model, params, args)


def params_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}
