"""Handwritten digits: 1797 images of 8 x 8 pixels, as they ship with scikit-learn.

References:
    Alpaydin and Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning Repository,
    1998.
"""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from experiments.checks import at_least
from experiments.shared.stream import StreamData, seeded, select, subset
from hoglib.errors import ArgumentValueError

IMAGES, PIXELS, CLASSES = 1797, 64, 10


class Digits(StreamData):
    """A stream of digits for training, and held-out ones.

    Args:
        train: Training images.
        test: Test images.
        iterations: Batches in the run.
        batch: Images in a batch; None for all of them in each.
        seed: Seed of the split and the stream. Default: that of the run.
        val: Further images, to choose hyperparameters by. 0 where nothing is chosen; validation then
            uses the test images.
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
        super().__init__(iterations, seed)
        at_least("train", train, 1)
        at_least("test", test, 2)
        at_least("val", val, 0)
        if train + test + val > IMAGES:
            names, together, counts = (
                ("train, test, val", "all", f"{train}, {test} and {val}")
                if val
                else ("train, test", "both", f"{train} and {test}")
            )
            raise ArgumentValueError(
                f"{names}: expected {IMAGES} images in {together}, got {counts}; make them smaller."
            )
        if batch is not None and at_least("batch", batch, 1) > train:
            raise ArgumentValueError(
                f"batch: expected at most the {train} images of train, got {batch}; null takes all."
            )
        self.batch = batch
        order = torch.randperm(IMAGES, generator=seeded(self.seed))
        rest = IMAGES - test - train - val
        # the test images first: they are the same for every number of others
        test_picks, train_picks, val_picks, _ = order.split([test, train, val, rest])
        self.held_out, self.train = select(images(), test_picks), select(images(), train_picks)
        self.validation = select(images(), val_picks) if val else self.held_out
        self.options = {"train": train, "test": test, "seed": self.seed, "val": val}

    def batch_of(self, seed: int) -> "Images":
        return subset(self.train, self.batch, seed)

    def test_batch(self) -> "Images":
        return self.held_out

    def validation_batch(self) -> "Images":
        return self.validation


class Images(NamedTuple):
    """x [n, 64] from -1 to 1, and the digit that each shows [n]."""

    x: Tensor
    label: Tensor


@cache
def images() -> Images:
    """All images."""
    from sklearn.datasets import load_digits  # half a second, for these experiments alone

    x, label = load_digits(return_X_y=True)
    return Images(torch.tensor(x / 8 - 1, dtype=torch.float32), torch.tensor(label).long())
