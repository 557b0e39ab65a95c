"""A progress bar that counts products, where one was asked for."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hoglib import _arguments as arguments


class Bar:
    """Counts the products of an operator; whoever opens it first says what for and of how many."""

    def __init__(self, name: str, enabled: bool) -> None:
        self._name, self._enabled = name, enabled
        self._open: Any = None
        self._done = 0.0

    @contextmanager
    def over(self, what: str, total: int | None = None) -> Iterator[None]:
        if not self._enabled or self._open is not None:
            yield
            return
        self._done = 0.0
        self._open = _tqdm()(total=total, desc=f"{self._name} {what}", unit="product", leave=False)
        try:
            yield
        finally:
            self._open.close()
            self._open = None

    def advance(self, products: float) -> None:
        """Some products more, or a part of one."""
        if self._open is not None:
            self._done += products
            self._open.update(round(self._done, 2) - self._open.n)


def _tqdm() -> Any:
    try:
        from tqdm.auto import tqdm
    except ImportError as error:
        raise arguments.Missing(
            "progress=True: expected the package tqdm to be installed, and it is not; `pip install "
            "tqdm`, or leave progress at False."
        ) from error
    return tqdm
