"""The batches of a training by their step, forward and backward, from any kind of source."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from math import isqrt
from typing import Any, final

import torch

from hoglib._core import closures, validation
from hoglib._core.autograd import clone_inference_tensors
from hoglib._core.finite_differences import to_double
from hoglib._core.state import preserve_random_state, random_state, set_random_state
from hoglib.errors import ArgumentTypeError, ArgumentValueError
from hoglib.meta.checkpoints import Checkpoints

Convert = Callable[[Any], Any]


class Batches(ABC):
    """The batch of each step of a training (abstract)."""

    given = True  # whether the loss takes one

    @abstractmethod
    def at(self, i: int) -> Any:
        """The batch of step i, the same in each call."""

    def last(self, steps: int) -> Any:
        """That of the last step."""
        return self.at(max(steps, 1) - 1)

    def begin(self, kept: Checkpoints) -> None:  # noqa: B027 (most draw none)
        """Take random numbers from where the first process of a call did."""


@final
class NoBatches(Batches):
    """A training whose loss has none."""

    given = False

    def at(self, i: int) -> Any:
        return None


@final
class Indexed(Batches):
    """A sequence, or a function of the step."""

    def __init__(self, get: Callable[[int], Any], convert: Convert, end: int | None) -> None:
        self._get, self._convert, self._end = get, convert, end

    def at(self, i: int) -> Any:
        return self._convert(self._get(i))

    def last(self, steps: int) -> Any:
        return super().last(steps) if self._end is None else self.at(self._end - 1)


@final
class Passes(Batches):
    """A DataLoader, or another iterable, which is read again and again.

    Its random numbers (shuffling, augmentation) are those of a stream of its own, which starts at the
    state of the global generators and whose state is noted at the start of each pass. So a pass can be
    repeated, whatever the training draws in between. The last sqrt(n) batches are kept, since a replay
    asks for them in reverse.
    """

    def __init__(self, source: Iterable[Any], convert: Convert, steps: int) -> None:
        self._source, self._convert = source, convert
        held = (capture.value for capture in closures.held(source))
        self._generators = [value for value in held if isinstance(value, torch.Generator)]
        self._starts = [(0, self._random())]  # of the passes: the first step, and the random state
        self._kept: dict[int, Any] = {}
        self._window = isqrt(steps) + 2
        self._iterator: Iterator[Any] | None = None
        self._next = 0

    def begin(self, kept: Checkpoints) -> None:
        self._starts = [(0, kept.first("data", self._starts[0][1]))]
        self._kept, self._iterator, self._next = {}, None, 0

    def at(self, i: int) -> Any:
        if i not in self._kept:
            if i < self._next:
                self._starts = [start for start in self._starts if start[0] <= i]
                self._iterator = None
            while i not in self._kept:
                self._read()
        return self._kept[i]

    def _read(self) -> None:
        """The next batch, with random numbers of the stream."""
        with preserve_random_state(*self._generators):
            if self._iterator is None:
                self._next, self._stream = self._starts[-1]
            self._set_random(self._stream)
            if self._iterator is None:
                self._iterator = iter(self._source)
            batch = next(self._iterator, _END)
            if batch is _END:
                if self._starts[-1][0] == self._next:
                    raise ArgumentValueError(
                        "batches: expected an iterable that gives batches in each pass, got one that "
                        "gave none; make it iterable again, such as a list or a DataLoader."
                    )
                self._starts.append((self._next, self._random()))
                self._iterator = None
                return
            self._stream = self._random()
        self._kept[self._next] = self._convert(batch)
        self._next += 1
        while len(self._kept) > self._window:
            del self._kept[next(iter(self._kept))]

    def _random(self) -> dict[str, Any]:
        """The random state in plain values and tensors, which a file can hold."""
        state = random_state()
        if state["numpy"] is not None:
            name, keys, *rest = state["numpy"]
            state["numpy"] = (name, keys.tolist(), *rest)
        return {**state, "own": [generator.get_state() for generator in self._generators]}

    def _set_random(self, state: dict[str, Any]) -> None:
        set_random_state(state)
        for generator, own in zip(self._generators, state["own"], strict=True):
            generator.set_state(own)


_END = object()


def check_batches(batches: Any, steps: int | None) -> int | None:
    """The number of batches if it is known; raises for what is no source of batches."""
    if batches is None or _is_function(batches):
        return None
    if isinstance(batches, Iterator):
        raise ArgumentTypeError(
            f"batches: expected a source that can be read again, got {validation.describe(batches)}, "
            "which can be read once; pass list(...), a DataLoader, or a function of the step."
        )
    indexed = hasattr(batches, "__getitem__") and hasattr(batches, "__len__")
    if not indexed and not isinstance(batches, Iterable):
        raise ArgumentTypeError(
            "batches: expected a sequence, a DataLoader or another iterable, or a function of the "
            f"step, got {validation.describe(batches)}."
        )
    if not hasattr(batches, "__len__"):
        return None
    count = len(batches)
    if not count or (indexed and steps is not None and count < steps):
        raise ArgumentValueError(
            f"batches: expected one for each of {max(steps or 1, 1)} steps, got {count}."
        )
    return count


def make_batches(batches: Any, steps: int, double: bool) -> Batches:
    """The batches of a training of so many steps, which `check_batches` has checked."""
    if batches is None:
        return NoBatches()

    def convert(batch: Any) -> Any:
        batch = clone_inference_tensors(batch)
        return to_double(batch) if double else batch

    if _is_function(batches):
        return Indexed(batches, convert, None)
    if hasattr(batches, "__getitem__") and hasattr(batches, "__len__"):
        return Indexed(batches.__getitem__, convert, len(batches))
    return Passes(batches, convert, steps)


def _is_function(batches: Any) -> bool:
    return callable(batches) and not isinstance(batches, Iterable)
