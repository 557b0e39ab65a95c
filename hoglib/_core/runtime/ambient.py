"""What a thread is inside of: the state that no argument can carry, because a user's code is between.

    with inside(value_checks_off=True):
        ...                                # AMBIENT.value_checks_off is True, in this thread

AMBIENT belongs to a thread, as torch's stacks of modes do. :class:`CallerState` copies its fields to
autograd's worker threads. Protocols list the methods that lower packages call on objects of upper ones.
"""

import os
import threading
from collections.abc import Callable, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol, final


class StandIns(AbstractContextManager[Any], Protocol):
    """What lower packages call on the mode of `second_order()`, which is in `hoglib.stand_ins`."""

    def run_script(self, script: Any, run: Callable[[], Any]) -> Any:
        """Runs scripted code, which no TorchFunctionMode sees."""


class Examiner(Protocol):
    """What others call on the record of applied Functions, which is in `hoglib.verification`."""

    # called after a derivative that the user's code takes in `second_order()`; None in an entry point
    by_hand: Callable[..., None] | None

    def note_gradient(self, gradient: Any) -> None:
        """Notes the `Gradient` that is differentiated again."""

    def note_cpp(self, names: Set[str]) -> None:
        """Notes Functions in C++ in a graph: Python sees the names of their nodes alone."""


class Examination(NamedTuple):
    """How custom Functions of the user's are examined, and where those that are applied are noted."""

    on_wrong: str | None = None  # as the outermost second_order(on_wrong=) says; None if none does
    by_entry_point: bool = False  # the entry points inside leave the examination to the one outside
    examiner: Examiner | None = None


class PlainOperations(NamedTuple):
    """hoglib's ops run as their references of torch operations."""

    linear_for: str | None = None  # the caller, if it needs backwards linear in grad_output


class RunningRemat(NamedTuple):
    """A remat whose function runs."""

    nested: bool  # remats inside recompute too; otherwise they call their functions
    low_memory: bool  # attention takes less memory, and more time


class _Ambient(threading.local):
    """The fields, with their values outside of everything."""

    # The TorchFunctionMode of second_order(), which is not on torch's stack while it is suspended.
    stand_ins: StandIns | None = None
    # How each torch.autograd.Function that user code applies is examined, and who notes it.
    examination: Examination = Examination()
    # Normalization layers do not update running_mean and running_var.
    statistics_frozen: bool = False
    # Checks that read values (.item(), .all()) are skipped: an outer call made them, or a graph runs.
    value_checks_off: bool = False
    # ops avoid custom Functions: Taylor rules and the layer recorder see each torch operation.
    plain_operations: PlainOperations | None = None
    # The ModulePatch of keep_swapped(): values in nn.Modules, while user code calls functional_loss.
    kept_swapped: Any = None
    # The innermost remat that runs, an autograd Function; user code calls nested ones.
    remat: RunningRemat | None = None
    # Id of the thread that called backward(); autograd runs a device's nodes on its worker thread.
    in_place_of: int | None = None
    # Functions of hoglib.compile run without their fx graphs, to be compared with a graph.
    eager: bool = False
    # The Residuals of a compiled product: an fx graph takes tensors only.
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
    """Id of the current thread; on a worker thread of autograd, of the caller of backward()."""
    return AMBIENT.in_place_of or threading.get_ident()


@final
class CallerState:
    """A copy of the ambient state, for a node with a backward that runs the user's function again:
    autograd runs a device's nodes on a worker thread, while the caller of backward() waits."""

    def __init__(self) -> None:
        self._thread, self._fields = logical_thread(), dict(vars(AMBIENT))

    def restored(self) -> AbstractContextManager[None]:
        """Inside, the fields have the copied values; a thread that the user started keeps its own."""
        started = threading.current_thread()
        if self._thread == logical_thread() or not isinstance(started, threading._DummyThread):
            return nullcontext()
        return inside(**{**self._fields, "in_place_of": self._thread})
