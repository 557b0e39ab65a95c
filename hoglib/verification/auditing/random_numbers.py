"""The state of all that draws random numbers: what it is, and whether something was drawn."""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from hoglib._random_state import random_state


class RandomSource(NamedTuple):
    """A generator of Python's or NumPy's that a module keeps."""

    get: Callable[[], Any]
    set: Callable[[Any], None]


def sources(module: nn.Module) -> Iterator[RandomSource]:
    """The generators that are attributes of a module."""
    for value in vars(module).values():
        if isinstance(value, random.Random):
            yield RandomSource(value.getstate, value.setstate)
        bits = getattr(value, "bit_generator", None)
        if type(value).__module__.startswith("numpy.random") and bits is not None:
            yield RandomSource(partial(getattr, bits, "state"), partial(setattr, bits, "state"))


class OutsideState:
    """Random numbers that torch's own generator does not make, as they stood here."""

    def __init__(
        self, generators: Sequence[torch.Generator], modules: Iterable[nn.Module] = ()
    ) -> None:
        kept = [source for module in modules for source in sources(module)]
        self._kept = [(source, str(source.get())) for source in kept]
        self._generators = [(g, g.get_state()) for g in generators]
        self._before = random_state()

    def changed(self) -> list[str]:
        """By which ones something was drawn since."""
        now = random_state()
        found = []
        if any(not torch.equal(state, g.get_state()) for g, state in self._generators):
            found.append("a torch.Generator")
        if any(str(source.get()) != drawn for source, drawn in self._kept):
            found.append("a generator that it keeps")
        if now["python"] != self._before["python"]:
            found.append("Python's random")
        a, b = self._before["numpy"], now["numpy"]
        if a is not None and (a[2:] != b[2:] or not (a[1] == b[1]).all()):
            found.append("NumPy's random")
        return found
