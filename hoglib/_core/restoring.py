"""Values that are put somewhere for the time of a block, and what was there before put back."""

from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

Items = Sequence[tuple[MutableMapping[str, Any], str, Any]]  # (dict, key, value)
_NONE = object()


@contextmanager
def replaced(items: Items) -> Iterator[None]:
    """Inside, each dict has this value for this key; afterwards what it had before, or nothing."""
    before = [(store, key, store.get(key, _NONE)) for store, key, _ in items]
    try:
        for store, key, value in items:
            store[key] = value
        yield
    finally:
        for store, key, value in before:
            if value is _NONE:
                store.pop(key, None)
            else:
                store[key] = value


@contextmanager
def preserve_settings(settings: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Inside, each (object, attribute, value) is set; the attributes are restored at exit."""
    wanted = list(settings)
    before = [(holder, name, getattr(holder, name)) for holder, name, _ in wanted]
    try:
        for holder, name, value in wanted:
            setattr(holder, name, value)
        yield
    finally:
        for holder, name, value in before:
            setattr(holder, name, value)
