"""A progress bar for long computations."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, final

from hoglib._core.messages import validation


@final
class ProgressBar:
    """A bar that counts the products of an operator, or the steps of a training. In nested calls of
    `over`, the outermost names the work and the total."""

    def __init__(self, name: str, enabled: bool, unit: str = "product") -> None:
        self._name, self._enabled, self._unit = name, enabled, unit
        self._open: Any = None  # tqdm's bar, while work lasts
        self._done = 0.0  # products so far

    def over(self, work: str, total: int | None = None) -> AbstractContextManager[None]:
        """Show the bar while the work lasts, unless an outer call shows it."""
        shown = self._enabled and self._open is None
        return self._shown(work, total) if shown else nullcontext()

    @contextmanager
    def _shown(self, work: str, total: int | None) -> Iterator[None]:
        self._done = 0.0
        install = "`pip install tqdm`, or leave progress at False"
        tqdm = validation.package("tqdm.auto", "progress=True", install).tqdm
        self._open = tqdm(total=total, desc=f"{self._name} {work}", unit=self._unit, leave=False)
        try:
            yield
        finally:
            self._open.close()
            self._open = None

    def advance(self, products: float) -> None:
        """Count more products, or a fraction of one."""
        if self._open is not None:
            self._done += products
            self._open.update(round(self._done, 2) - self._open.n)
