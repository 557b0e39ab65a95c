"""Prototypical networks: a class is the mean of what its images are embedded as."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]


class Prototypes(nn.Module):
    """A network whose outputs are near to each other for images of one class; no gradient steps.

        c_k = mean over the support images x of class k of f(x)        logit_k(x) = -|f(x) - c_k|^2

    Like a learner of hoglib it has `adapt`, `loss` and a call with what was adapted.
    Source: Snell, Swersky and Zemel, Prototypical Networks for Few-shot Learning, 2017, eq. 1 and 2.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def adapt(self, support: Batch, steps: int | None = None) -> dict[str, Tensor]:
        """The prototypes [ways, features] of a support set, x [n, ...] with labels 0 to ways - 1."""
        x, y = support
        return {"prototypes": means(self.model(x), y)}

    def forward(self, x: Tensor, params: dict[str, Tensor]) -> Tensor:
        """Logits [n, ways]."""
        return -torch.cdist(self.model(x), params["prototypes"]).square()

    def loss(self, tasks: tuple[Batch, Batch]) -> Tensor:
        """The mean cross-entropy of the query images, over tasks that lie in the first dimension."""
        (x, y), (query_x, query_y) = tasks
        together = torch.cat([x, query_x], 1)
        # all at once, so that batch norm sees every task
        features = self.model(together.flatten(0, 1)).unflatten(0, together.shape[:2])
        known, asked = features.split([x.shape[1], query_x.shape[1]], 1)
        prototypes = torch.stack([means(f, label) for f, label in zip(known, y, strict=True)])
        logits = -torch.cdist(asked, prototypes).square()
        return F.cross_entropy(logits.flatten(0, 1), query_y.flatten())


def means(features: Tensor, label: Tensor) -> Tensor:
    """The mean feature [ways, features] of each label."""
    of_class = F.one_hot(label).to(features)
    return of_class.T @ features / of_class.sum(0)[:, None]


def nearest_centroid(support: Batch, x: Tensor) -> Tensor:
    """The class whose mean image is nearest to each x."""
    known, label = support
    return torch.cdist(x.flatten(1), means(known.flatten(1), label)).argmin(1)
