"""Few-shot classification: N-way K-shot tasks of support images and query images.

References:
    Vinyals et al., Matching Networks for One Shot Learning, 2016; its N-way K-shot tasks.
"""

import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor

from experiments.checks import at_least
from experiments.few_shot.image_classes import GLYPHS, SPLITS, ImageClasses, folders, glyphs
from experiments.shared.stream import Stream, run_seed, seeded
from hoglib.errors import ArgumentValueError

Batch = tuple[Tensor, Tensor]
TASKS = GLYPHS / "tasks.npz"
FIXED = 600  # test tasks of each kind in that file
KINDS = {(5, 1): 15, (5, 5): 15, (20, 1): 15, (20, 5): 15}  # (ways, shots): queries of a class

# Held-out tasks are the same for every run, whatever its seed.
VALIDATION_SEED, TEST_SEED = 2**40, 2**41


class Episodes(pl.LightningDataModule):
    """N-way K-shot tasks: a stream for training, fixed held-out ones for validation and test.

    Args:
        source: None for the glyphs of this repository, whose held-out characters and typefaces do not
            occur in training; or a folder of class folders of images, also in groups
            (alphabet/character): in train, val and test, or split by split_seed.
        ways: Classes in a task (N).
        shots: Support images of each class (K).
        queries: Query images of each class in training.
        test_queries: The same in held-out tasks. Default: queries.
        tasks: Tasks in a meta-batch.
        iterations: Meta-batches in the run.
        val_tasks: Validation tasks.
        test_tasks: Test tasks.
        size: Pixels of a side, 28 for glyphs.
        channels: 1 for grey or 3 for colour images, of a folder.
        split_seed: Seed by which the classes of a folder are split.
        seed: Seed of the training stream. Default: that of the run.

    The glyphs' test tasks are read from glyphs/tasks.npz, for 5 and 20 ways, 1 and 5 shots and at most
    15 queries. All other held-out tasks are drawn by a constant seed. So both are the same in all runs.
    """

    def __init__(
        self,
        source: str | None = None,
        ways: int = 5,
        shots: int = 1,
        queries: int = 15,
        test_queries: int | None = None,
        tasks: int = 16,
        iterations: int = 10_000,
        val_tasks: int = 100,
        test_tasks: int = FIXED,
        size: int = 28,
        channels: int = 1,
        split_seed: int = 0,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        self.ways = at_least("ways", ways, 2)
        self.shots = at_least("shots", shots, 1)
        self.queries = at_least("queries", queries, 1)
        test_queries = queries if test_queries is None else test_queries
        self.test_queries = at_least("test_queries", test_queries, 1)
        self.tasks = at_least("tasks", tasks, 1)
        self.iterations = at_least("iterations", iterations, 1)
        self.val_tasks = at_least("val_tasks", val_tasks, 1)
        self.test_tasks = at_least("test_tasks", test_tasks, 2)
        self.seed = run_seed(seed)
        self.source = source
        # what held-out classes depend on; ways and shots may differ from those in training
        self.options = {
            "source": source, "size": size, "channels": channels, "split_seed": split_seed,
        }  # fmt: skip
        if source is None:
            if (size, channels) != (28, 1):
                raise ArgumentValueError(
                    f"size, channels: expected 28 and 1, since glyphs are 28 x 28 in grey, got "
                    f"{size} and {channels}; leave them out, or name a folder as source."
                )
            parts = {split: glyphs(split) for split in SPLITS}
        else:
            parts = folders(Path(source), split_seed, size, channels)
        kept = {split: self._large_enough(split, data) for split, data in parts.items()}
        left_out = [
            f"{few} of {len(data.members)} of {split}"
            for split, data in parts.items()
            if (few := len(data.members) - len(kept[split].members))
        ]
        if left_out:
            sizes = dict.fromkeys((shots + queries, shots + test_queries))
            least = " or ".join(map(str, sizes))
            warnings.warn(
                f"classes of fewer than {least} images (shots and queries) are left out: "
                f"{', '.join(left_out)}.",
                stacklevel=2,
            )
        self.train, self.val, self.test = (
            Source(kept[split], ways, shots, self._queries(split)) for split in SPLITS
        )

    def _large_enough(self, split: str, data: ImageClasses) -> ImageClasses:
        """The classes that have enough images for a task."""
        needed = self.shots + self._queries(split)
        kept = [n for n, members in enumerate(data.members) if len(members) >= needed]
        few = len(data.members) - len(kept)
        if len(kept) < self.ways:
            raise ArgumentValueError(
                f"ways: expected at most the {len(kept)} classes of {split} that have {needed} images "
                f"(shots and queries) or more, got {self.ways}; {few} have fewer. Lower "
                "ways or queries."
            )
        return data.only(kept)

    def _queries(self, split: str) -> int:
        return self.queries if split == "train" else self.test_queries

    def train_dataloader(self) -> Stream:
        return Stream(self._batch_of, self.iterations, self.seed)

    def _batch_of(self, seed: int) -> tuple[Batch, Batch]:
        return episode(self.train.data, self.train.picks(self.tasks, seed), self.shots)

    def val_dataloader(self) -> "HeldOutTasks":
        return self._held_out(self.val, self.val.picks(self.val_tasks, VALIDATION_SEED))

    def test_dataloader(self) -> "HeldOutTasks":
        return self._held_out(self.test, self._test_picks())

    def _held_out(self, source: "Source", picks: "Picks") -> "HeldOutTasks":
        return HeldOutTasks(source.data, picks, self.shots, self.tasks)

    def _test_picks(self) -> "Picks":
        kind = self.ways, self.shots
        in_file = self.test_queries <= KINDS.get(kind, 0) and self.test_tasks <= FIXED
        if self.source is not None or not in_file:
            return self.test.picks(self.test_tasks, TEST_SEED)
        # from a file, so that they do not depend on a version of torch and its random numbers
        classes, images = fixed_tasks()[kind]
        # fewer queries are the first of those in the file
        images = images[..., : self.shots + self.test_queries]
        return Picks(classes[: self.test_tasks], images[: self.test_tasks])


class Picks(NamedTuple):
    """Tasks: classes [tasks, ways], and which images of each [tasks, ways, shots + queries]."""

    classes: Tensor
    images: Tensor


def draw_tasks(
    counts: Tensor, tasks: int, ways: int, images: int, generator: torch.Generator
) -> Picks:
    """Random tasks: classes without repetition, and images of these without repetition.

    Args:
        counts: Number of images of each class [classes].
        tasks: Number of tasks.
        ways: Classes in a task.
        images: Images of each class.
        generator: Generator of the random numbers.
    Returns:
        The tasks.
    """
    classes = torch.stack(
        [torch.randperm(len(counts), generator=generator)[:ways] for _ in range(tasks)]
    )
    # Sorting random keys draws without repetition; the keys beyond a class's images come last.
    keys = torch.rand(tasks, ways, int(counts.max()), generator=generator)
    keys.masked_fill_(torch.arange(keys.shape[2]) >= counts[classes, None], 2)
    return Picks(classes, keys.argsort(dim=2, stable=True)[..., :images])


def episode(data: ImageClasses, picks: Picks, shots: int) -> tuple[Batch, Batch]:
    """(support, query), each x [tasks, ways * n, channels, height, width] from 0 to 1, and y."""
    tasks, ways = picks.classes.shape
    pairs = zip(picks.classes.flatten().tolist(), picks.images.flatten(0, 1), strict=True)
    numbers = torch.stack([data.members[c][i] for c, i in pairs]).unflatten(0, (tasks, ways))
    x = data.images[numbers].float() / 255
    y = torch.arange(ways).expand(tasks, ways)

    def part(x: Tensor) -> Batch:
        return x.flatten(1, 2), y.repeat_interleave(x.shape[2], 1)

    return part(x[:, :, :shots]), part(x[:, :, shots:])


class Source(NamedTuple):
    """The classes of a split, and the size of its tasks."""

    data: ImageClasses
    ways: int
    shots: int
    queries: int

    def picks(self, tasks: int, seed: int) -> Picks:
        counts = torch.tensor([len(members) for members in self.data.members])
        generator = seeded(seed)
        return draw_tasks(counts, tasks, self.ways, self.shots + self.queries, generator)


class HeldOutTasks:
    """The same tasks at every iteration, a few at a time: all at once may not fit into memory."""

    def __init__(self, data: ImageClasses, picks: Picks, shots: int, tasks: int) -> None:
        self.data, self.picks, self.shots, self.tasks = data, picks, shots, tasks

    def __len__(self) -> int:
        return -(-len(self.picks.classes) // self.tasks)

    def __iter__(self) -> Iterator[tuple[Batch, Batch]]:
        for classes, images in zip(*(part.split(self.tasks) for part in self.picks), strict=True):
            yield episode(self.data, Picks(classes, images), self.shots)


@cache
def fixed_tasks() -> dict[tuple[int, int], Picks]:
    """The test tasks of the glyphs, by ways and shots."""
    with np.load(TASKS) as file:
        arrays = {name: torch.from_numpy(array.astype(int)) for name, array in file.items()}
    return {
        (ways, shots): Picks(arrays[f"classes_{ways}_{shots}"], arrays[f"images_{ways}_{shots}"])
        for ways, shots in KINDS
    }


def write_fixed_tasks(counts: Tensor, file: Path) -> None:
    """Draw the test tasks, for classes of these numbers of images. This outdates all results."""
    arrays = {}
    for (ways, shots), queries in KINDS.items():
        generator = seeded(TEST_SEED)
        picks = draw_tasks(counts, FIXED, ways, shots + queries, generator)
        # small integers: some hundred classes, of at most 28 images each
        arrays[f"classes_{ways}_{shots}"] = picks.classes.numpy().astype(np.uint16)
        arrays[f"images_{ways}_{shots}"] = picks.images.numpy().astype(np.uint8)
    np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
