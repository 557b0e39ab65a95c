"""Networks of the meta-learning tests: one for each kind of layer that breaks inner loops elsewhere."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hoglib as hog
from tests.models import Fn


def attends() -> nn.Module:
    """A transformer layer over the features of an image, read as a sequence."""
    options: dict[str, Any] = {"dropout": 0.0, "activation": "gelu", "batch_first": True}
    layer = nn.TransformerEncoderLayer(4, 2, 6, **options)
    return Fn(lambda net, x: net.layer(x.reshape(len(x), -1, 4)).mean(1), layer=layer)


class Scaled(nn.Module):
    """A loss with a parameter: its size."""

    def __init__(self) -> None:
        super().__init__()
        self.log_size = nn.Parameter(torch.tensor(0.4, dtype=torch.float64))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.log_size.exp() * F.mse_loss(outputs, targets)


def image_net(*middle: nn.Module) -> nn.Sequential:
    """[N, 1, 4, 4] to [N, 2], smooth, so that differences tell."""
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1), *middle, nn.Softplus(), nn.Flatten(), nn.Linear(48, 2)
    )


NETWORKS: dict[str, Any] = {
    "none": image_net,
    "BatchNorm": lambda: image_net(nn.BatchNorm2d(3)),
    "LayerNorm": lambda: image_net(nn.LayerNorm([3, 4, 4])),
    "GroupNorm": lambda: image_net(nn.GroupNorm(3, 3)),
    "attention": lambda: nn.Sequential(attends(), nn.Linear(4, 2)),
    "hoglib ops": lambda: nn.Sequential(
        nn.Flatten(), hog.nn.LinearAct(16, 5, act="swish"), hog.nn.Linear(5, 2)
    ),
}


def network(name: str) -> nn.Module:
    """In float64, the same at every call."""
    with torch.random.fork_rng([]):
        torch.manual_seed(3)
        return NETWORKS[name]().double()


def image_tasks(tasks: int = 2, shots: int = 3, queries: int = 4) -> Any:
    """Stacks of regression tasks on images [1, 4, 4]."""
    generator = torch.Generator().manual_seed(7)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    def batch(count: int) -> tuple[Tensor, Tensor]:
        return rand(tasks, count, 1, 4, 4), rand(tasks, count, 2)

    return batch(shots), batch(queries)


def as_list(tasks: Any) -> list[Any]:
    (sx, sy), (qx, qy) = tasks
    return [((sx[i], sy[i]), (qx[i], qy[i])) for i in range(len(sx))]


def meta_gradient(learner: Any, tasks: Any) -> dict[str, Tensor]:
    learner.zero_grad()
    learner.loss(tasks).backward()
    return {n: p.grad.clone() for n, p in learner.named_parameters() if p.grad is not None}
