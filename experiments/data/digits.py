"""Handwritten digits: 1797 images of 8 x 8 pixels, as they ship with scikit-learn.

Source: Alpaydin and Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning
Repository, 1998.
"""

from functools import cache
from typing import NamedTuple

import lightning.pytorch as pl
import torch
from torch import Tensor

from experiments.data.stream import HeldOut, Stream, seeded
from hoglib import _arguments as arguments

IMAGES, PIXELS, CLASSES = 1797, 64, 10


class Images(NamedTuple):
    """x [n, 64] from -1 to 1, and which digit each shows [n]."""

    x: Tensor
    label: Tensor


@cache
def images() -> Images:
    from sklearn.datasets import load_digits  # half a second, for these experiments alone

    x, label = load_digits(return_X_y=True)
    return Images(torch.tensor(x / 8 - 1, dtype=torch.float32), torch.tensor(label).long())


class Batches(Stream):
    """Some of the images, none twice in a batch; or all of them, each time."""

    def __init__(self, data: Images, batches: int, batch: int | None, seed: int) -> None:
        super().__init__(batches, seed)
        self.data, self.batch = data, batch

    def batch_of(self, seed: int) -> Images:
        if self.batch is None:
            return self.data
        generator = seeded(seed)
        picks = torch.randperm(len(self.data.x), generator=generator)[: self.batch]
        return Images(*(part[picks] for part in self.data))


class Digits(pl.LightningDataModule):
    """A stream of digits for training, and held-out ones.

    train, test: how many images; iterations: batches in the run; batch: images in one, or null for all
    of them in each; seed: of the split and the stream, the run's by default.
    """

    def __init__(
        self,
        train: int = 1297,
        test: int = 500,
        iterations: int = 1000,
        batch: int | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        arguments.at_least("train", train, 1)
        arguments.at_least("test", test, 2)
        if train + test > IMAGES:
            raise arguments.WrongValue(
                f"train, test: expected {IMAGES} images in both, got {train} and {test}; make them "
                "smaller."
            )
        if batch is not None and arguments.at_least("batch", batch, 1) > train:
            raise arguments.WrongValue(
                f"batch: expected at most the {train} images of train, got {batch}; null takes all."
            )
        self.seed = torch.initial_seed() % 2**20 if seed is None else seed
        self.iterations = arguments.at_least("iterations", iterations, 1)
        self.batch = batch
        order = torch.randperm(IMAGES, generator=seeded(self.seed))
        picks = order[:test], order[test : test + train]
        self.held_out, self.train = (Images(*(part[pick] for part in images())) for pick in picks)
        self.options = {"train": train, "test": test, "seed": self.seed}

    def train_dataloader(self) -> Batches:
        return Batches(self.train, self.iterations, self.batch, self.seed)

    def val_dataloader(self) -> HeldOut:
        return HeldOut(self.held_out)

    def test_dataloader(self) -> HeldOut:
        return HeldOut(self.held_out)
