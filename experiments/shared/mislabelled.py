"""MNIST digits of 14 x 14 pixels, some of them mislabelled, all of which are in each batch."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.checks import at_least, fraction, one_of
from experiments.shared.mnist import HELD_OUT, TRAIN
from experiments.shared.mnist import split as mnist_split
from experiments.shared.noisy_digits import NOISES, Examples, noise_in_words
from experiments.shared.stream import StreamData, seeded
from hoglib.errors import ArgumentValueError

POOLED = 14  # pixels of a side


class Mislabelled(StreamData):
    """Digits with wrong labels, all of them in every batch; clean ones for validation and test.

    Args:
        kind: "background" (wrong labels say 0) or "uniform" (any other digit).
        noise: Fraction of wrong labels.
        train: Training images.
        val: Clean images whose loss is explained; at most 4000 with those of train.
        test: Held-out images.
        iterations: Steps in the run.
        seed: Seed of the wrong labels. Default: that of the run. The images are the same for all.
    """

    def __init__(
        self,
        kind: str = "background",
        noise: float = 0.3,
        train: int = 1000,
        val: int = 500,
        test: int = 1000,
        iterations: int = 1000,
        seed: int | None = None,
    ) -> None:
        super().__init__(iterations, seed)
        self.split = split(kind, noise, train, val, test, self.seed)
        self.options = {
            "kind": kind, "noise": noise, "train": train, "val": val, "test": test,
            "iterations": iterations, "seed": self.seed,
        }  # fmt: skip

    @property
    def noise(self) -> str:
        """The wrong labels in words."""
        return noise_in_words(self.split.train, self.options["kind"])

    def batch_of(self, seed: int) -> Examples:
        return self.split.train

    def validation_batch(self) -> Examples:
        return self.split.val

    def test_batch(self) -> Examples:
        return self.split.test


class Split(NamedTuple):
    """Three parts without a common image; only labels of `train` are wrong. x [n, 196] from 0 to 1."""

    train: Examples
    val: Examples
    test: Examples


def split(kind: str, noise: float, train: int, val: int, test: int, seed: int) -> Split:
    """The parts; `round(noise train)` labels are wrong, of a kind in NOISES."""
    one_of("kind", kind, NOISES)
    fraction("noise", noise, "0.3 makes three labels in ten wrong.")
    for name, value in (("train", train), ("val", val), ("test", test)):
        at_least(name, value, 2)
    if train + val > TRAIN or test > HELD_OUT:
        raise ArgumentValueError(
            f"train, val, test: expected at most {TRAIN} images of train and val and {HELD_OUT} of "
            f"test, got {train} + {val} and {test}; make them smaller."
        )
    (images, labels), (others, truths) = mnist_split()

    def part(x: Tensor, truth: Tensor, start: int, end: int) -> Examples:
        pooled = F.avg_pool2d((x[start:end] + 1) / 2, 2).flatten(1)
        return Examples(pooled, truth[start:end], truth[start:end], torch.arange(start, end))

    clean = part(images, labels, 0, train)
    given = NOISES[kind](clean.truth, round(noise * train), seeded(seed))
    return Split(
        clean._replace(label=given),
        part(images, labels, train, train + val),
        part(others, truths, 0, test),
    )
