"""Sees each application of a custom Function, also by an `apply` that was bound before.

All of them end in C++, on every release of torch, which looks three names up on the Function's class:

    _backward_cls      when the application begins; one instance of it is the node of the graph
    setup_context      to compare it with torch's own, which is none
    forward            to call it, without gradients

`FunctionMeta.__getattribute__` sees the look-ups, and answers those of `forward` and `setup_context`
by functions that call the watches around them. From torch 2.14 on `Function.apply` is the C++ method
itself: an alias `f = MyFunction.apply` runs no Python before these look-ups.
"""

import threading
from collections.abc import Callable
from typing import Any, final

import torch
from torch.autograd import Function
from torch.autograd.function import FunctionMeta

from hoglib._core import torch_internals, torch_library

# What a watch is called with when an application has ended: its node, and what forward returned.
Ended = Callable[[Any, Any], None]
Seen = Callable[[type[Function], tuple[Any, ...]], Ended | None]

# All watches, of all threads: the first one changes FunctionMeta, the last one changes it back.
_WATCHES: list["watching_functions"] = []
# Reentrant: the garbage collector may run code that watches, too, while the lock is held.
_LOCK = threading.RLock()
_look_up = FunctionMeta.__getattribute__  # that of `type`
_NO_CONTEXT = Function.setup_context  # of those whose forward takes ctx


class Applying:
    """How many custom Functions are running their forward; true also in a hook that packs what one of
    them has saved, which C++ calls after it."""

    depth = 0

    def __bool__(self) -> bool:
        return self.depth > 0 or torch_internals.packs_saved_tensor()


@final
class watching_functions:  # noqa: N801 a context manager
    """Calls seen(function, args) for each custom Function that is applied inside, before it runs; not
    for those that another one's forward applies (unless it `recomputes` what the user wrote), nor in
    other threads. If that returns a function, it is called with the node and what forward returned.

    May stand inside of another one, and in several threads at once. A class, as it stands around each
    derivative: generators of contextlib take several times as long to enter and to leave.
    """

    def __init__(self, seen: Seen) -> None:
        self.seen = seen

    def __enter__(self) -> Applying:
        self.applying, self.thread = Applying(), threading.get_ident()
        with _LOCK:
            if not _WATCHES:
                FunctionMeta.__getattribute__ = _watched_look_up  # type: ignore[method-assign]
            _WATCHES.append(self)
        return self.applying

    def __exit__(self, *raised: object) -> None:
        with _LOCK:
            _WATCHES.remove(self)
            if not _WATCHES:
                del FunctionMeta.__getattribute__


def sees_applications() -> bool:
    """Whether the installed torch looks the names up, so that an application is seen."""
    seen: list[Any] = []
    with watching_functions(lambda function, args: lambda node, result: seen.append(node)):
        y: Any = _Identity.apply(torch.ones((), requires_grad=True))
    return len(seen) == 1 and seen[0] is y.grad_fn


class _Identity(Function):
    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass


@final
class _State(threading.local):
    """What C++ is doing in this thread, between two look-ups."""

    begun: type[Function] | None = None  # it looks forward up next
    records = False  # whether gradients were enabled when it began: in forward they are not
    ran: "_Application | None" = None  # its forward has run: setup_context is looked up next


_STATE = _State()


def _watched_look_up(function: Any, name: str) -> Any:
    """FunctionMeta.__getattribute__, while anything watches."""
    found = _look_up(function, name)
    if name == "_backward_cls":
        _STATE.begun, _STATE.records = function, torch.is_grad_enabled()
    elif name == "forward" and (begun := _STATE.begun) is not None and begun is function:
        _STATE.begun = None
        here = threading.get_ident()
        watches = [watch for watch in reversed(_WATCHES) if watch.thread == here]
        if watches and not getattr(function, "recomputes", False):
            return _Application(begun, found, watches).forward
    elif name == "setup_context" and (ran := _STATE.ran) is not None and ran.function is function:
        _STATE.ran = None
        return ran.setup_context(found)
    return found


@final
class _Application:
    """An application of a Function, whose forward is looked up, with those that watch it."""

    def __init__(
        self,
        function: type[Function],
        forward: Callable[..., Any],
        watches: list[watching_functions],
    ) -> None:
        self.function, self._forward, self._watches = function, forward, watches
        self._records = _STATE.records
        self._takes_context = _look_up(function, "setup_context") is _NO_CONTEXT

    def forward(self, *args: Any) -> Any:
        """The Function's forward, which has all there is to do where it takes ctx."""
        node, given = (args[0], args[1:]) if self._takes_context else (None, args)
        self._count(1)
        try:
            with torch.set_grad_enabled(self._records):  # as around the application
                self._ended = self._begin(given)
            result = self._forward(*args)
        finally:
            self._count(-1)
        if node is None:
            _STATE.ran = self
        else:
            self._end(node, result)
        return result

    def setup_context(self, setup_context: Callable[..., Any]) -> Callable[..., None]:
        """The Function's setup_context, after which the application has ended."""

        def run(ctx: Any, inputs: Any, output: Any) -> None:
            self._count(1)
            try:
                setup_context(ctx, inputs, output)
            finally:
                self._count(-1)
            self._end(ctx, output)

        return run

    def _count(self, change: int) -> None:
        for watch in self._watches:
            watch.applying.depth += change

    def _begin(self, args: tuple[Any, ...]) -> list[Ended]:
        """Tells the watches for which it is the outermost; what they want to be told at its end."""
        outermost = [watch for watch in self._watches if watch.applying.depth == 1]
        if not outermost:
            return []
        written = torch_library.as_written(self.function, args)
        return [ended for watch in outermost if (ended := watch.seen(*written)) is not None]

    def _end(self, node: Any, result: Any) -> None:
        for ended in self._ended:
            ended(node, result)
