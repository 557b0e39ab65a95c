"""Thread-local state that cannot be passed as arguments, because the user's code runs in between.

    with inside(value_checks_off=True):
        ...                                # AMBIENT.value_checks_off is True, in this thread

AMBIENT belongs to a thread, as torch's stacks of modes do. :class:`CallerState` copies its fields to
autograd's worker threads. Protocols list the methods that lower packages call on objects of upper ones.
"""

import threading
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol, final


class StandIns(AbstractContextManager[Any], Protocol):
    """The interface of the mode of `second_order()`, which is in `hoglib.stand_ins`."""

    def run_script(self, script: Any, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs a scripted function, whose calls no TorchFunctionMode sees, with stand-ins."""


class Examiner(Protocol):
    """The interface of the record of applied Functions, which is in `hoglib.verification`."""

    # called after a derivative that the user's code takes in `second_order()`; None in an entry point
    by_hand: Callable[..., None] | None
    differentiated: dict[Any, int]  # how often, of each Function

    def note_once(self, before: Mapping[Any, int]) -> None:
        """Notes that Functions applied since `before` are differentiated once: no graph is left."""

    def note_gradient(self, gradient: Any) -> None:
        """Notes the `Gradient` that is differentiated again."""

    def watched_hook(self, hook: Callable[..., Any], line: object) -> Callable[..., Any]:
        """The hook of a tensor, which notes that it returns another gradient than it gets."""

    def note_cpp(self, names: Set[str]) -> None:
        """Notes C++ Functions in a graph: Python sees only the names of their nodes."""


class Examination(NamedTuple):
    """How the user's custom Functions are examined, and the object that records their applications."""

    on_wrong: str | None = None  # of the outermost second_order(on_wrong=) that sets it
    by_entry_point: bool = False  # nested entry points leave the examination to the outermost one
    examiner: Examiner | None = None
    first_order: bool = False  # Functions applied here are differentiated once


class PlainOperations(NamedTuple):
    """hoglib's ops run as their references, composites of torch operations."""

    linear_for: str | None = None  # the caller, if it needs backwards linear in grad_output


class RunningRemat(NamedTuple):
    """The settings of a remat, while its function runs."""

    nested: bool  # remats inside recompute too; otherwise they call their functions
    low_memory: bool  # attention takes less memory, and more time


class Graphs(NamedTuple):
    """How fx graphs of hoglib.compile run."""

    eager: bool = False  # their functions run instead: a graph is compared with this run
    residuals: Any = None  # the Residuals of a compiled product: an fx graph takes tensors only


class _Ambient(threading.local):
    """The fields, with their defaults."""

    # The TorchFunctionMode of second_order(), which is not on torch's stack while it is suspended.
    stand_ins: StandIns | None = None
    # How the torch.autograd.Functions that user code applies are examined.
    examination: Examination = Examination()
    # Normalization layers, which user code calls, do not update running_mean and running_var.
    statistics_frozen: bool = False
    # Checks that read values (.item(), .all()) are skipped: an outer call made them, or a graph runs.
    value_checks_off: bool = False
    # ops avoid custom Functions: Taylor rules and the layer recorder see each torch operation.
    plain_operations: PlainOperations | None = None
    # The ModulePatch of keep_swapped(): values in nn.Modules, while user code calls functional_loss.
    kept_swapped: Any = None
    # The innermost remat that runs; user code calls nested ones.
    remat: RunningRemat | None = None
    # On a worker thread of autograd, which runs a device's nodes: id of the thread in backward().
    in_place_of: int | None = None
    # The fx graphs of hoglib.compile, which user code calls.
    graphs: Graphs = Graphs()
    # The AutocastState of user code, while an algorithm around it runs without autocast.
    autocast: Any = None


# The ambient state of the current thread.
AMBIENT = _Ambient()


Items = Sequence[tuple[Any, str, Any]]  # (dict or other object, key or attribute, value)
_NONE = object()


class replaced:  # noqa: N801 a context manager
    """Set keys of dicts, or attributes of other objects; restore or delete them at exit.

    A class, because each evaluation enters one: contextlib's generators take several times as long.
    """

    def __init__(self, items: Items) -> None:
        self._items = items

    def __enter__(self) -> None:
        before: list[tuple[Any, str, Any]] = []
        for to, name, _ in self._items:  # without a function for each, as below
            if isinstance(to, dict) or hasattr(to, "__setitem__"):
                value = to[name] if name in to else _NONE  # noqa: SIM401 some have no `get`
            else:
                value = getattr(to, name)
            before.append((to, name, value))
        self._before = before
        try:
            _set_attributes(self._items)
        except BaseException:
            _set_attributes(self._before)
            raise

    def __exit__(self, *raised: object) -> None:
        _set_attributes(self._before)


def _set_attributes(items: Items) -> None:
    for holder, name, value in items:
        # a dict, os.environ, or the parameters of a scripted module
        if not (isinstance(holder, dict) or hasattr(holder, "__setitem__")):
            setattr(holder, name, value)
        elif value is _NONE:
            holder.pop(name, None)
        else:
            holder[name] = value


class inside:  # noqa: N801 a context manager
    """Set fields of :data:`AMBIENT` in this thread; restore them at exit."""

    def __init__(self, **fields: Any) -> None:
        self._fields = fields

    def __enter__(self) -> None:
        self._before = {name: getattr(AMBIENT, name) for name in self._fields}
        vars(AMBIENT).update(self._fields)

    def __exit__(self, *raised: object) -> None:
        vars(AMBIENT).update(self._before)


def logical_thread() -> int:
    """Id of the current thread; on a worker thread of autograd, of the caller of backward()."""
    return AMBIENT.in_place_of or threading.get_ident()


@final
class CallerState:
    """A copy of the ambient state, which a node saves if its backward runs the user's function again:
    autograd runs a device's nodes on a worker thread, while the caller of backward() waits."""

    def __init__(self) -> None:
        self._thread, self._fields = logical_thread(), dict(vars(AMBIENT))

    def restored(self) -> AbstractContextManager[None]:
        """Set the copied fields, on a worker thread of autograd only."""
        started = threading.current_thread()
        # autograd's workers are not started by Python, which shows them as _DummyThread
        if self._thread == logical_thread() or not isinstance(started, threading._DummyThread):
            return nullcontext()
        return inside(**{**self._fields, "in_place_of": self._thread})
