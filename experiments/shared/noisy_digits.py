"""Handwritten digits, many of which are mislabelled, and a few that are labelled correctly.

References:
    Of both kinds of noise: Ren et al., Learning to Reweight Examples for Robust Deep Learning, 2018,
    section 4.3.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from experiments.checks import at_least, fraction, one_of
from experiments.shared.digits import CLASSES, IMAGES, images
from experiments.shared.stream import StreamData, seeded, subset
from hoglib.errors import ArgumentValueError

BACKGROUND = 0  # the class that all wrong labels name in "background"


class NoisyDigits(StreamData):
    """Digits with wrong labels: a stream for training, and the same held-out ones for every evaluation.

    Args:
        kind: "background" or "uniform", see NOISES.
        noise: Fraction of wrong labels.
        clean: Images whose labels are known to be correct, as many of each digit.
        test: Held-out images.
        iterations: Batches in the run.
        batch: Noisy examples in a batch.
        seed: Seed of the split, the wrong labels and the stream. Default: that of the run.
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
        super().__init__(iterations, seed)
        self.split = split(kind, noise, clean, test, self.seed)
        self.batch = at_least("batch", batch, 1)
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
        return noise_in_words(self.split.noisy, self.options["kind"])

    def batch_of(self, seed: int) -> "tuple[Examples, Examples]":
        """Random noisy examples, without repetition, and all clean ones."""
        return subset(self.split.noisy, self.batch, seed), self.split.clean

    def test_batch(self) -> "Examples":
        return self.split.test


class Examples(NamedTuple):
    """x [n, 64] from -1 to 1; the given label and the true one [n]; the number of the image [n]."""

    x: Tensor
    label: Tensor
    truth: Tensor
    number: Tensor


def noise_in_words(examples: Examples, kind: str) -> str:
    """How many labels are wrong, and what they say."""
    wrong = int((examples.label != examples.truth).sum())
    how = f"all say {BACKGROUND}" if kind == "background" else "any other digit"
    return f"{wrong} of {len(examples.x)} training labels are wrong ({how})"


class Split(NamedTuple):
    """Three parts without a common image; only labels of `noisy` are wrong."""

    noisy: Examples
    clean: Examples
    test: Examples


def split(kind: str, noise: float, clean: int, test: int, seed: int) -> Split:
    """The split and the wrong labels that belong to a seed.

    `test` random images; of the rest the first clean / 10 of each class; all others are noisy:
    round(noise n) of these n get a wrong label, of a kind in NOISES.
    """
    one_of("kind", kind, NOISES)
    fraction("noise", noise, "0.4 makes four labels in ten wrong.")
    if at_least("clean", clean, CLASSES) % CLASSES:
        raise ArgumentValueError(
            f"clean: expected a multiple of {CLASSES}, as many of each digit, got {clean}; write "
            f"{clean // CLASSES * CLASSES}."
        )
    generator = seeded(seed)
    x, truth = images()
    order = torch.randperm(IMAGES, generator=generator)
    # test images come first, so that they are the same for any noise and number of clean ones
    rest = order[at_least("test", test, 2) :]
    by_digit = [rest[truth[rest] == digit][: clean // CLASSES] for digit in range(CLASSES)]
    correct = torch.cat(by_digit)
    noisy = rest[~torch.isin(rest, correct)]
    if min(len(picks) for picks in by_digit) < clean // CLASSES or not len(noisy):
        raise ArgumentValueError(
            f"clean, test: expected images to be left for training, got {clean} and {test} of "
            f"{IMAGES}; make them smaller."
        )
    given = NOISES[kind](truth[noisy], round(noise * len(noisy)), generator)

    def part(numbers: Tensor, label: Tensor) -> Examples:
        return Examples(x[numbers], label, truth[numbers], numbers)

    return Split(
        part(noisy, given),
        part(correct, truth[correct]),
        part(order[:test], truth[order[:test]]),
    )


def uniform(truth: Tensor, wrong: int, generator: torch.Generator) -> Tensor:
    """Labels [n] of which `wrong` ones name another class, each of these equally likely."""
    labels, chosen = truth.clone(), torch.randperm(len(truth), generator=generator)[:wrong]
    # 1 to 9 further, modulo 10: any class but its own
    labels[chosen] += torch.randint(1, CLASSES, (wrong,), generator=generator)
    return labels % CLASSES


def background(truth: Tensor, wrong: int, generator: torch.Generator) -> Tensor:
    """Labels [n] of which `wrong` ones name class 0, as if it were the background of all others."""
    others = (truth != BACKGROUND).nonzero().squeeze(1)
    if wrong > len(others):
        raise ArgumentValueError(
            f"noise: expected at most {len(others) / len(truth):.2f} where all wrong labels say "
            f"{BACKGROUND}, since those of true {BACKGROUND}s are right; got {wrong / len(truth):.2f}."
        )
    labels = truth.clone()
    labels[others[torch.randperm(len(others), generator=generator)[:wrong]]] = BACKGROUND
    return labels


NOISES = {"uniform": uniform, "background": background}
