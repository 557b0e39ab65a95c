"""What a thread is inside of: the state that no argument can carry, because a user's code is between.

    with inside(value_checks_off=True):
        ...                                # AMBIENT.value_checks_off is True, in this thread

It is one value, as torch's own modes are one stack: of a thread, not of a context, and what a backward
needs that runs in another thread can be taken along as a whole. It is put in place as the values of
modules and settings are that hold for the time of a block, by :class:`replaced`.
"""

import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final


class _Ambient(threading.local):
    """The fields, with what they are outside of everything."""

    # The mode of `second_order()`, which sees the torch calls of an unmodified module.
    stand_ins: Any = None
    # What is done about a custom Function that is wrong, also by entry points that a user's function
    # calls: what the outermost `second_order(on_wrong=)` says.
    on_wrong: str | None = None
    # Whether an outer entry point examines custom Functions, because they call one another, also from
    # within the user's function; and which were applied in it.
    examining: bool = False
    functions: Any = None
    # Whether normalization layers of an unmodified module leave their running statistics.
    statistics_frozen: bool = False
    # Whether checks that read values are skipped beneath the user's function: an hvp inside a loss.
    value_checks_off: bool = False
    # For whom ops, which an unmodified module calls, run as their references; None for nobody.
    plain_operations: str | None = None
    # The patch that keeps swapped parameters, across a user's function that swaps them.
    kept_swapped: Any = None
    # Of a remat that runs, for a nested one, which is reached through the user's function: whether one
    # runs, whether nested ones only call their function, and whether memory counts before time.
    recomputing: bool = False
    recomputation_disabled: bool = False
    low_memory: bool = False
    # The thread in whose place this one runs: that of a device runs a backward for its caller.
    in_place_of: int | None = None
    # Whether compiled functions that the user's function calls run without their graphs.
    eager: bool = False
    # Parameters that processes share, by their ids, that a module is given whole without communication:
    # where each process evaluates it as often as its own examples need.
    gathered: Mapping[int, Any] = {}
    # What a compiled product has computed at its point: a graph is called with tensors only, and a
    # backend that belonged to one point would be compiled anew at each point.
    residuals: Any = None


# Ambient state: each field says why it is no argument.
AMBIENT = _Ambient()


Items = Sequence[tuple[Any, str, Any]]  # (dict or other object, key or attribute, value)
_NONE = object()


class replaced:  # noqa: N801 a context manager
    """Inside, each dict has this value for this key, and each other object for this attribute;
    afterwards what it had before, or nothing.

    A class, as it stands around each evaluation: generators of contextlib take several times as long.
    """

    def __init__(self, items: Items) -> None:
        self._items = items

    def __enter__(self) -> None:
        self._before = [
            (holder, name, holder.get(name, _NONE) if _is_dict(holder) else getattr(holder, name))
            for holder, name, _ in self._items
        ]
        try:
            _set_attributes(self._items)
        except BaseException:
            _set_attributes(self._before)
            raise

    def __exit__(self, *raised: object) -> None:
        _set_attributes(self._before)


def _is_dict(holder: Any) -> bool:
    return isinstance(holder, dict) or holder is os.environ


def _set_attributes(items: Items) -> None:
    for holder, name, value in items:
        if not _is_dict(holder):
            setattr(holder, name, value)
        elif value is _NONE:
            holder.pop(name, None)
        else:
            holder[name] = value


class inside(replaced):  # noqa: N801 a context manager
    """Inside, fields of :data:`AMBIENT` have other values, in this thread."""

    def __init__(self, **fields: Any) -> None:
        super().__init__([(AMBIENT, name, value) for name, value in fields.items()])


def logical_thread() -> int:
    """The thread that the caller runs in, or in whose place."""
    return AMBIENT.in_place_of or threading.get_ident()


@final
class CallerState:
    """The ambient state where this is made, for a node whose backward runs the user's function again:
    autograd runs that of a device in a thread of its own, while its caller waits."""

    def __init__(self) -> None:
        self._thread, self._fields = logical_thread(), dict(vars(AMBIENT))

    def restored(self) -> AbstractContextManager[None]:
        """Inside, the state is as it was; in a thread that the user started, which has one of its own,
        it stays."""
        started = threading.current_thread()
        if self._thread == logical_thread() or not isinstance(started, threading._DummyThread):
            return nullcontext()
        return inside(**{**self._fields, "in_place_of": self._thread})
