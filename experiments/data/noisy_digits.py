"""Handwritten digits, many of whose labels are wrong, and a few whose labels are right."""

from typing import NamedTuple

import lightning.pytorch as pl
import torch
from torch import Tensor

from experiments.data.digits import CLASSES, IMAGES, images
from experiments.data.stream import HeldOut, Stream, seeded
from hoglib._core import validation
from hoglib.errors import ArgumentValueError

BACKGROUND = 0  # what all wrong labels say in "background"


class Examples(NamedTuple):
    """x [n, 64] from -1 to 1; the label that is given and the true one [n]; number [n] of the image."""

    x: Tensor
    label: Tensor
    truth: Tensor
    number: Tensor


class Split(NamedTuple):
    """Three parts without a common image; labels are wrong in `noisy` alone."""

    noisy: Examples
    clean: Examples
    test: Examples


def uniform(truth: Tensor, wrong: int, generator: torch.Generator) -> Tensor:
    """Labels [n] of which `wrong` ones say another class, each of these equally likely."""
    labels, chosen = truth.clone(), torch.randperm(len(truth), generator=generator)[:wrong]
    labels[chosen] += torch.randint(1, CLASSES, (wrong,), generator=generator)
    return labels % CLASSES


def background(truth: Tensor, wrong: int, generator: torch.Generator) -> Tensor:
    """Labels [n] of which `wrong` ones say 0, as if that class had swallowed images of the others."""
    others = (truth != BACKGROUND).nonzero().squeeze(1)
    if wrong > len(others):
        raise ArgumentValueError(
            f"noise: expected at most {len(others) / len(truth):.2f} where all wrong labels say "
            f"{BACKGROUND}, since those of true {BACKGROUND}s are right; got {wrong / len(truth):.2f}."
        )
    labels = truth.clone()
    labels[others[torch.randperm(len(others), generator=generator)[:wrong]]] = BACKGROUND
    return labels


# Source of both: Ren et al., Learning to Reweight Examples for Robust Deep Learning, 2018, section 4.3.
NOISES = {"uniform": uniform, "background": background}


def split(kind: str, noise: float, clean: int, test: int, seed: int) -> Split:
    """The split and the wrong labels that belong to a seed.

    `test` images by chance; of the rest the first clean / 10 of each class; all others are noisy:
    round(noise n) of these n have a wrong label, of a kind in NOISES.
    """
    validation.one_of("kind", kind, NOISES)
    if not 0 <= validation.number("noise", noise) < 1:
        raise ArgumentValueError(
            f"noise: expected the share of wrong labels, at least 0 and below 1, got {noise}; "
            "0.4 makes four in ten wrong."
        )
    if validation.at_least("clean", clean, CLASSES) % CLASSES:
        raise ArgumentValueError(
            f"clean: expected a multiple of {CLASSES}, as many of each digit, got {clean}; write "
            f"{clean // CLASSES * CLASSES}."
        )
    generator = seeded(seed)
    x, truth = images()
    order = torch.randperm(IMAGES, generator=generator)
    rest = order[validation.at_least("test", test, 2) :]
    picks = [rest[truth[rest] == digit][: clean // CLASSES] for digit in range(CLASSES)]
    surely = torch.cat(picks)
    noisy = rest[~torch.isin(rest, surely)]
    if min(len(pick) for pick in picks) < clean // CLASSES or not len(noisy):
        raise ArgumentValueError(
            f"clean, test: expected images to be left for training, got {clean} and {test} of "
            f"{IMAGES}; make them smaller."
        )
    given = NOISES[kind](truth[noisy], round(noise * len(noisy)), generator)

    def part(numbers: Tensor, label: Tensor) -> Examples:
        return Examples(x[numbers], label, truth[numbers], numbers)

    return Split(
        part(noisy, given),
        part(surely, truth[surely]),
        part(order[:test], truth[order[:test]]),
    )


class NoisyBatches(Stream):
    """Pairs of some noisy examples, none twice, and all clean ones."""

    def __init__(self, data: Split, batches: int, batch: int, seed: int) -> None:
        super().__init__(batches, seed)
        self.data, self.batch = data, batch

    def batch_of(self, seed: int) -> tuple[Examples, Examples]:
        generator = seeded(seed)
        picks = torch.randperm(len(self.data.noisy.x), generator=generator)[: self.batch]
        return Examples(*(part[picks] for part in self.data.noisy)), self.data.clean


class NoisyDigits(pl.LightningDataModule):
    """Digits with wrong labels: a stream for training, the same held-out ones at every visit.

    kind: "background" or "uniform"; noise: share of wrong labels; clean: images whose labels are known
    to be right, as many of each digit; test: held-out images; iterations: batches in the run; batch:
    noisy examples in one; seed: of split, wrong labels and stream, the run's by default.
    """

    def __init__(
        self,
        kind: str = "background",
        noise: float = 0.4,
        clean: int = 100,
        test: int = 500,
        iterations: int = 2000,
        batch: int = 100,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        self.seed = torch.initial_seed() % 2**20 if seed is None else seed
        self.split = split(kind, noise, clean, test, self.seed)
        self.iterations = validation.at_least("iterations", iterations, 1)
        self.batch = validation.at_least("batch", batch, 1)
        if batch > len(self.split.noisy.x):
            raise ArgumentValueError(
                f"batch: expected at most the {len(self.split.noisy.x)} noisy examples, got {batch}."
            )
        self.options = {
            "kind": kind, "noise": noise, "clean": clean, "test": test, "seed": self.seed,
        }  # fmt: skip

    @property
    def noise(self) -> str:
        """The wrong labels in words."""
        wrong = int((self.split.noisy.label != self.split.noisy.truth).sum())
        how = f"all say {BACKGROUND}" if self.options["kind"] == "background" else "any other digit"
        return f"{wrong} of {len(self.split.noisy.x)} training labels are wrong ({how})"

    def train_dataloader(self) -> NoisyBatches:
        return NoisyBatches(self.split, self.iterations, self.batch, self.seed)

    def val_dataloader(self) -> HeldOut:
        return HeldOut(self.split.test)

    def test_dataloader(self) -> HeldOut:
        return HeldOut(self.split.test)
