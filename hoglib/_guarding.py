"""When guards look at values: not while a graph is captured, whose tensors have none, and not where
what was looked at is run again to be compared with a graph."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from hoglib import _functorch

_OFF: ContextVar[bool] = ContextVar("hoglib_unguarded", default=False)


def guarded() -> bool:
    """Whether to look."""
    return not (_OFF.get() or _functorch.tracing())


@contextmanager
def unguarded() -> Iterator[None]:
    """Inside, nothing is looked at; it was before."""
    token = _OFF.set(True)
    try:
        yield
    finally:
        _OFF.reset(token)
