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
from hoglib._core import validation
from hoglib.errors import ArgumentValueError

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


def _images(picks: Tensor) -> Images:
    return Images(*(part[picks] for part in images()))


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

    train, test: how many images; val: how many others to choose by, 0 where nothing is chosen and
    validation sees those of test; iterations: batches in the run; batch: images in one, or null for all
    of them in each; seed: of the split and the stream, the run's by default.
    """

    def __init__(
        self,
        train: int = 1297,
        test: int = 500,
        iterations: int = 1000,
        batch: int | None = None,
        seed: int | None = None,
        val: int = 0,
    ) -> None:
        super().__init__()
        validation.at_least("train", train, 1)
        validation.at_least("test", test, 2)
        validation.at_least("val", val, 0)
        if train + test + val > IMAGES:
            named, parts, given = (
                ("train, test, val", "all", f"{train}, {test} and {val}")
                if val
                else ("train, test", "both", f"{train} and {test}")
            )
            raise ArgumentValueError(
                f"{named}: expected {IMAGES} images in {parts}, got {given}; make them smaller."
            )
        if batch is not None and validation.at_least("batch", batch, 1) > train:
            raise ArgumentValueError(
                f"batch: expected at most the {train} images of train, got {batch}; null takes all."
            )
        self.seed = torch.initial_seed() % 2**20 if seed is None else seed
        self.iterations = validation.at_least("iterations", iterations, 1)
        self.batch = batch
        order = torch.randperm(IMAGES, generator=seeded(self.seed))
        rest = IMAGES - test - train - val
        test_picks, train_picks, val_picks, _ = order.split([test, train, val, rest])
        self.held_out, self.train = _images(test_picks), _images(train_picks)
        self.validation = _images(val_picks) if val else self.held_out
        self.options = {"train": train, "test": test, "seed": self.seed}
        if val:  # not where there is none: checkpoints from before there was one stay good
            self.options["val"] = val

    def train_dataloader(self) -> Batches:
        return Batches(self.train, self.iterations, self.batch, self.seed)

    def val_dataloader(self) -> HeldOut:
        return HeldOut(self.validation)

    def test_dataloader(self) -> HeldOut:
        return HeldOut(self.held_out)
