"""English text by topic: what Python's `help()` says of the language, which every Python carries.

The text differs a little between Python releases, and so do results.
"""

import re
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from experiments.checks import at_least
from experiments.shared.stream import StreamData, seeded
from hoglib.errors import ArgumentValueError

CHARACTERS = "\n" + "".join(map(chr, range(32, 127))) + "\N{REPLACEMENT CHARACTER}"
SPLITS = {
    "val": ("typesmapping", "import", "strings"),
    "test": ("string-methods", "debugger", "calls", "operator-summary", "binary", "objects"),
}
VALIDATION_SEED, TEST_SEED = 2**40, 2**41  # held-out windows are the same for every run


class Windows(StreamData):
    """Windows of text [batch, length]: random ones for training, fixed ones of held-out topics.

    Args:
        length: Characters of a window.
        batch: Windows in a batch.
        iterations: Batches in the run.
        held_out: Windows of validation and of test.
        seed: Seed of the stream. Default: that of the run.
    """

    def __init__(
        self,
        length: int = 64,
        batch: int = 32,
        iterations: int = 1000,
        held_out: int = 200,
        seed: int | None = None,
    ) -> None:
        super().__init__(iterations, seed)
        self.length = at_least("length", length, 2)  # a character, and the next
        self.batch = at_least("batch", batch, 1)
        self.held_out = at_least("held_out", held_out, 2)
        self.options = {"length": length}

    def batch_of(self, seed: int) -> Tensor:
        return self._windows("train", self.batch, seed)

    def validation_batch(self) -> Tensor:
        return self._windows("val", self.held_out, VALIDATION_SEED)

    def test_batch(self) -> Tensor:
        return self._windows("test", self.held_out, TEST_SEED)

    def _windows(self, split: str, count: int, seed: int) -> Tensor:
        """Windows from random places in the text of a split."""
        ids, generator = text(split), seeded(seed)
        starts = torch.randint(len(ids) - self.length + 1, (count, 1), generator=generator)
        return ids[starts + torch.arange(self.length)]


class TopicTasks(StreamData):
    """Tasks, each a stretch of a topic: windows to adapt to, and other windows to evaluate on.

    Batches are (support [tasks, shots, length], query [tasks, queries, length]): consecutive windows
    from a random place in a topic, shuffled. Topics are split as by :class:`Windows`; those that are
    shorter than a task are left out.

    Args:
        length: Characters of a window.
        shots: Windows of a support set.
        queries: Windows of a query set.
        tasks: Tasks in a meta-batch.
        iterations: Meta-batches in the run.
        held_out: Tasks of validation and of test, as many of each topic.
        seed: Seed of the stream. Default: that of the run.
    """

    def __init__(
        self,
        length: int = 64,
        shots: int = 8,
        queries: int = 8,
        tasks: int = 4,
        iterations: int = 300,
        held_out: int = 36,
        seed: int | None = None,
    ) -> None:
        super().__init__(iterations, seed)
        self.length = at_least("length", length, 2)  # a character, and the next
        self.shots, self.queries = at_least("shots", shots, 1), at_least("queries", queries, 1)
        self.tasks = at_least("tasks", tasks, 1)
        self.held_out = at_least("held_out", held_out, 2)
        self.options = {"length": length}
        for split in ("train", *SPLITS):
            if not self._topics(split):
                longest = max(map(len, topics(split).values()))
                raise ArgumentValueError(
                    f"shots, queries, length: expected a task of at most {longest} characters, the "
                    f"longest topic of {split}, got ({shots} + {queries}) * {length}."
                )

    def batch_of(self, seed: int) -> "Tasks":
        return self.tasks_of("train", self.tasks, seed)

    def validation_batch(self) -> "Tasks":
        return self.tasks_of("val", self.held_out, VALIDATION_SEED)

    def test_batch(self) -> "Tasks":
        return self.tasks_of("test", self.held_out, TEST_SEED)

    def tasks_of(self, split: str, count: int, seed: int) -> "Tasks":
        """Tasks of the topics of a split: of each in turn, in training of random ones."""
        generator, pool, tasks = seeded(seed), self._topics(split), []
        for i in range(count):
            random = split == "train"
            number = int(torch.randint(len(pool), (), generator=generator)) if random else i
            ids = pool[number % len(pool)]
            size = self.shots + self.queries
            start = int(torch.randint(len(ids) - size * self.length + 1, (), generator=generator))
            windows = ids[start : start + size * self.length].reshape(size, -1)
            shuffled = windows[torch.randperm(size, generator=generator)]
            tasks.append(shuffled.split([self.shots, self.queries]))
        support, query = zip(*tasks, strict=True)
        return Tasks(torch.stack(support), torch.stack(query))

    def _topics(self, split: str) -> list[Tensor]:
        least = (self.shots + self.queries) * self.length
        return [ids for ids in encoded_topics(split) if len(ids) >= least]


class Tasks(NamedTuple):
    """Windows of characters [tasks, n, length] to adapt to, and to evaluate on."""

    support: Tensor
    query: Tensor


@cache
def topics(split: str) -> dict[str, str]:
    """The text of each topic of a split, by name, the longest first.

    A paragraph that occurs in several topics, as many do, stays in one: in a held-out topic if there is
    one, else in the longest.
    """
    from pydoc_data.topics import topics as known  # half a megabyte of source

    held_out = [name for names in SPLITS.values() for name in names]
    if missing := [name for name in held_out if name not in known]:
        raise ArgumentValueError(
            f"topics: expected {', '.join(missing)} in pydoc_data.topics, got a Python without."
        )
    rest = sorted(set(known) - set(held_out), key=lambda name: (-len(known[name]), name))
    seen: set[str] = set()
    parts = {}
    for name in (*held_out, *rest):
        paragraphs = re.split(r"\n\s*\n", known[name].strip())
        new = [p for p in paragraphs if (key := " ".join(p.split())) not in seen and key]
        seen.update(" ".join(p.split()) for p in new)
        parts[name] = "\n\n".join(new)
    names = SPLITS.get(split, tuple(rest))
    return {name: parts[name] for name in names if parts[name]}


@cache
def text(split: str) -> Tensor:
    """The topics of a split one after the other, as numbers of characters."""
    return encode("\n\n".join(topics(split).values()))


@cache
def encoded_topics(split: str) -> list[Tensor]:
    return [encode(part) for part in topics(split).values()]


def encode(text: str) -> Tensor:
    """The numbers of characters in CHARACTERS; the last stands for all others."""
    known = {character: number for number, character in enumerate(CHARACTERS)}
    return torch.tensor([known.get(character, len(CHARACTERS) - 1) for character in text])
