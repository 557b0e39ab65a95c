"""Prototypical networks: a class is the mean of what its images are embedded as."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.few_shot.episodes import Batch


class Prototypes(nn.Module):
    """A prototypical network: classes are the means of their embedded support images.

        c_k = mean over the support images x of class k of f(x)        logit_k(x) = -|f(x) - c_k|^2

    It takes no gradient steps. Like a learner of hoglib it has ``adapt``, ``loss`` and ``__call__``.

    Args:
        model: The embedding f.
    References:
        Snell, Swersky and Zemel, Prototypical Networks for Few-shot Learning, 2017, eq. 1 and 2.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def adapt(self, support: Batch, steps: int | None = None) -> dict[str, Tensor]:
        """The prototypes [ways, features] of a support set, x [n, ...] with labels 0 to ways - 1."""
        x, y = support
        return {"prototypes": class_means(self.model(x), y)}

    def forward(self, x: Tensor, params: dict[str, Tensor]) -> Tensor:
        """Logits [n, ways]."""
        return -torch.cdist(self.model(x), params["prototypes"]).square()

    def loss(self, tasks: tuple[Batch, Batch]) -> Tensor:
        """The mean cross-entropy of the query images, over tasks along the first dimension."""
        (x, y), (query_x, query_y) = tasks
        images = torch.cat([x, query_x], 1)
        # in one batch, so that batch norm normalises over all tasks
        features = self.model(images.flatten(0, 1)).unflatten(0, images.shape[:2])
        support, query = features.split([x.shape[1], query_x.shape[1]], 1)
        prototypes = torch.stack([*map(class_means, support, y)])
        logits = -torch.cdist(query, prototypes).square()
        return F.cross_entropy(logits.flatten(0, 1), query_y.flatten())


def class_means(features: Tensor, label: Tensor) -> Tensor:
    """The mean [ways, features] of the features [n, features] of each label [n]."""
    # sums by class as one product
    one_hot = F.one_hot(label).to(features)
    return one_hot.T @ features / one_hot.sum(0)[:, None]


def nearest_centroid(support: Batch, x: Tensor) -> Tensor:
    """The class whose mean support image is nearest to each x, pixel by pixel."""
    images, label = support
    return torch.cdist(x.flatten(1), class_means(images.flatten(1), label)).argmin(1)
