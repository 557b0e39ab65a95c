"""The classifier that judges generated digits: `python -m experiments.data.mnist_features` trains it.

One minute on one core. It writes mnist_features.npz, parameters alone, and beside it
mnist_features.json, which says how they came about and how many held-out digits it tells right.
"""

import json
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import hoglib as hog
from experiments.data.digits import CLASSES, Images
from experiments.networks import Conv, activation

FILE = Path(__file__).with_suffix(".npz")
FEATURES = 32
SEED, STEPS, BATCH, LR = 0, 3000, 64, 2e-3
SHIFT = 2  # pixels at most, of training images, to each side


class Seen(NamedTuple):
    """features [n, 32] and class probabilities [n, 10] of images."""

    features: Tensor
    probabilities: Tensor


class Classifier(nn.Module):
    """Three convolutions of stride 2 and a layer of 32 features, whose linear map gives the classes."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inner, outer in ((1, 16), (16, 32), (32, 64)):
            layers += [Conv(inner, outer, 3, 2, 1), activation("swish")]
        layers += [nn.Flatten(), hog.nn.LinearAct(64 * 4 * 4, FEATURES, act="swish")]
        self.body = nn.Sequential(*layers)
        self.head = hog.nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))

    @torch.no_grad()
    def seen(self, x: Tensor) -> Seen:
        features = self.body(x)
        return Seen(features, self.head(features).softmax(1))


@cache
def classifier(file: Path = FILE) -> Classifier:
    """The saved one, without a gradient, on the CPU; it is made for images of -1 to 1."""
    with torch.random.fork_rng([]):  # its own initial weights, which are replaced, are no run's
        network = Classifier()
    with np.load(file, allow_pickle=False) as saved:
        network.load_state_dict({name: torch.from_numpy(saved[name]) for name in saved.files})
    return network.requires_grad_(False).eval()


def shifted(x: Tensor, generator: torch.Generator) -> Tensor:
    """Images [n, 1, h, w], each moved by up to SHIFT pixels, with the ground's -1 behind."""
    n, _, height, width = x.shape
    padded = nn.functional.pad(x, (SHIFT,) * 4, value=-1.0)[:, 0]
    down, right = torch.randint(2 * SHIFT + 1, (2, n, 1, 1), generator=generator)
    rows, columns = torch.arange(height)[:, None] + down, torch.arange(width) + right
    return padded[torch.arange(n)[:, None, None], rows, columns].unsqueeze(1)


def accuracy(network: nn.Module, images: Images) -> float:
    with torch.no_grad():
        return (network(images.x).argmax(1) == images.label).float().mean().item()


def train(images: Images, steps: int) -> Classifier:
    """Adam with a rate that falls to zero, on images moved by chance."""
    torch.manual_seed(SEED)
    generator = torch.Generator().manual_seed(SEED)
    network = Classifier()
    optimizer = torch.optim.Adam(network.parameters(), LR)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    for _ in range(steps):
        picks = torch.randint(len(images.label), (BATCH,), generator=generator)
        scores = network(shifted(images.x[picks], generator))
        optimizer.zero_grad()
        hog.ops.softmax_cross_entropy(scores, images.label[picks]).backward()
        optimizer.step()
        schedule.step()
    return network


def main() -> None:
    from experiments.data.mnist import (
        SPLIT_SEED,
        split,
    )  # which those who load do not need

    torch.set_num_threads(1)
    first, held_out = split()
    network = train(first, STEPS)
    np.savez_compressed(FILE, **{k: v.numpy() for k, v in network.state_dict().items()})
    told = {
        "held_out_accuracy": round(accuracy(network, held_out), 4),
        "training_accuracy": round(accuracy(network, first), 4),
        "held_out_digits": len(held_out.label),
        "training_digits": len(first.label),
        "split_seed": SPLIT_SEED,
        "seed": SEED,
        "steps": STEPS,
    }
    FILE.with_suffix(".json").write_text(json.dumps(told, indent=1) + "\n")
    print(f"{told['held_out_accuracy']:.1%} of {len(held_out.label)} held-out digits. Saved {FILE}")


if __name__ == "__main__":
    main()
