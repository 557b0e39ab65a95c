"""The classifier that scores generated digits.

    python -m experiments.shared.digit_classifier

trains it again, in one minute on one core, and writes digit_classifier.npz, the parameters, and
digit_classifier.json: how they were trained, and their accuracy on held-out digits.
"""

import json
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

import hoglib as hog
from experiments.shared.digits import CLASSES, Images
from experiments.shared.networks import Conv, activation

FILE = Path(__file__).with_suffix(".npz")
FEATURES = 32
SEED, STEPS, BATCH, LR = 0, 3000, 64, 2e-3
SHIFT = 2  # pixels at most, of training images, to each side


class Features(NamedTuple):
    """Features [n, 32] and class probabilities [n, 10] of images."""

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
    def features(self, x: Tensor) -> Features:
        features = self.body(x)
        return Features(features, self.head(features).softmax(1))


@cache
def load_classifier(file: Path = FILE) -> Classifier:
    """The saved classifier of images from -1 to 1, on the CPU, in eval mode and without gradients."""
    # its initial weights, which are replaced, must not use up random numbers of a run
    with torch.random.fork_rng([]):
        network = Classifier()
    with np.load(file, allow_pickle=False) as saved:
        network.load_state_dict({name: torch.from_numpy(saved[name]) for name in saved.files})
    return network.requires_grad_(False).eval()


def accuracy(network: nn.Module, images: Images) -> float:
    """The fraction of images that are classified correctly."""
    with torch.no_grad():
        return (network(images.x).argmax(1) == images.label).float().mean().item()


def train(images: Images, steps: int) -> Classifier:
    """Train a classifier by Adam, with a rate that falls to zero, on randomly shifted images.

    Args:
        images: Training images.
        steps: Number of steps.
    Returns:
        The classifier.
    """
    # weights by torch's own generator, batches by another: a change of the network leaves the
    # batches
    torch.manual_seed(SEED)
    generator = torch.Generator().manual_seed(SEED)
    network = Classifier()
    optimizer = torch.optim.Adam(network.parameters(), LR)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    for _ in tqdm(range(steps), desc="digit classifier", disable=None):
        picks = torch.randint(len(images.label), (BATCH,), generator=generator)
        scores = network(random_shift(images.x[picks], generator))
        optimizer.zero_grad()
        hog.ops.softmax_cross_entropy(scores, images.label[picks]).backward()
        optimizer.step()
        schedule.step()
    return network


def random_shift(x: Tensor, generator: torch.Generator) -> Tensor:
    """Images [n, 1, h, w], each moved by up to SHIFT pixels; the background is -1."""
    n, _, height, width = x.shape
    padded = nn.functional.pad(x, (SHIFT,) * 4, value=-1.0)[:, 0]
    down, right = torch.randint(2 * SHIFT + 1, (2, n, 1, 1), generator=generator)
    rows, columns = torch.arange(height)[:, None] + down, torch.arange(width) + right
    # indices [n, 1, 1], [n, h, 1] and [n, 1, w]: all images by one call
    return padded[torch.arange(n)[:, None, None], rows, columns].unsqueeze(1)


def main() -> None:
    """Train the classifier and save it with its accuracy."""
    from experiments.shared.mnist import SPLIT_SEED, split  # not needed to load the classifier

    torch.set_num_threads(1)
    training, held_out = split()
    network = train(training, STEPS)
    np.savez_compressed(FILE, **{k: v.numpy() for k, v in network.state_dict().items()})
    facts = {
        "held_out_accuracy": round(accuracy(network, held_out), 4),
        "training_accuracy": round(accuracy(network, training), 4),
        "held_out_digits": len(held_out.label),
        "training_digits": len(training.label),
        "split_seed": SPLIT_SEED,
        "seed": SEED,
        "steps": STEPS,
    }
    FILE.with_suffix(".json").write_text(json.dumps(facts, indent=1) + "\n")
    print(
        f"{facts['held_out_accuracy']:.1%} of {len(held_out.label)} held-out digits. Saved {FILE}"
    )


if __name__ == "__main__":
    main()
