"""Sees each application of a custom Function, also by an `apply` that was bound before.

All of them end in C++, on every release of torch, which looks three names up on the Function's class:

    _backward_cls      when the application begins; one instance of it is the node of the graph
    setup_context      to compare it with torch's own, which is none
    forward            to call it, without gradients

Python calls a data descriptor of the metaclass `FunctionMeta` before it reads an attribute of a class.
While anything watches, `FunctionMeta` has a descriptor of each of the three names. The descriptors
return functions that call the watches before and after `forward` and `setup_context`.
`FunctionMeta.__getattribute__` would also be called for the other look-ups, some 35 in an application.
From torch 2.14 on `Function.apply` is the C++ method itself: an alias `f = MyFunction.apply` runs no
Python before these look-ups.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any, final

import torch
from torch.autograd import Function
from torch.autograd.function import BackwardCFunction, FunctionMeta

from hoglib._core.torch_api import torch_forward_mode, torch_internals, torch_library

# What a watch is called with when an application has ended: its node, and what forward returned.
Ended = Callable[[Any, Any], None]
Seen = Callable[[type[Function], tuple[Any, ...]], Ended | None]

# All watches, of all threads: the first one changes FunctionMeta, the last one changes it back.
_WATCHES: list["watching_functions"] = []
# Reentrant: the garbage collector may run code that watches, too, while the lock is held.
_LOCK = threading.RLock()


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
    Both run where forward does, without gradients unless `as_around` enables them.

    May stand inside of another one, and in several threads at once. A class, as it stands around each
    derivative: generators of contextlib take several times as long to enter and to leave.
    """

    def __init__(self, seen: Seen) -> None:
        self.seen = seen

    def __enter__(self) -> Applying:
        self.applying, self.thread = Applying(), threading.get_ident()
        with _LOCK:
            if not _WATCHES:
                for name, descriptor in _DESCRIPTORS.items():
                    setattr(FunctionMeta, name, descriptor)
            _WATCHES.append(self)
        return self.applying

    def __exit__(self, *raised: object) -> None:
        with _LOCK:
            _WATCHES.remove(self)
            if not _WATCHES:
                for name in _DESCRIPTORS:
                    delattr(FunctionMeta, name)


def sees_applications() -> bool:
    """Whether the installed torch looks the names up, so that an application is seen."""
    # In a thread of its own: hoglib may be imported under no_grad or inside of a transform.
    with ThreadPoolExecutor(1) as thread:
        done = thread.submit(_sees_application)
    return done.exception() is None and done.result()


def _sees_application() -> bool:
    seen: list[Any] = []
    with watching_functions(lambda function, args: lambda node, result: seen.append(node)):
        y: Any = _Identity.apply(torch.ones((), requires_grad=True))
    return len(seen) == 1 and seen[0] is y.grad_fn


class _Identity(Function):
    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: object, inputs: object, output: object) -> None:
        pass


@final
class _State(threading.local):
    """What C++ is doing in this thread, between two look-ups."""

    begun: type[Function] | None = None  # it looks forward up next
    # Whether gradients and tangents were enabled where apply was called; forward runs without both.
    enabled = False, False
    ran: "_Application | None" = None  # its forward has run: setup_context is looked up next


_STATE = _State()


@final
class _Descriptor:
    """A data descriptor of FunctionMeta: `answer(function, value)` is what a look-up returns."""

    def __init__(self, name: str, answer: Callable[[Any, Any], Any]) -> None:
        self._name, self._answer = name, answer

    def __get__(self, function: object, kind: object = None) -> Any:
        return self if function is None else self._answer(function, _look_up(function, self._name))

    def __set__(self, function: object, value: object) -> None:
        with self._beside():
            setattr(function, self._name, value)

    def __delete__(self, function: object) -> None:
        with self._beside():
            delattr(function, self._name)

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """Without the descriptor, so that the class gets the attribute: torch sets `_backward_cls` of
        each new class."""
        with _LOCK:
            delattr(FunctionMeta, self._name)
            try:
                yield
            finally:
                setattr(FunctionMeta, self._name, self)


def _look_up(function: Any, name: str) -> Any:
    """function.name, without the descriptor."""
    for kind in function.__mro__:
        if name in kind.__dict__:
            found = kind.__dict__[name]
            return found.__get__(None, function) if hasattr(found, "__get__") else found
    raise AttributeError(f"type object {function.__name__!r} has no attribute {name!r}")


def _answer_backward_class(function: Any, backward_class: object) -> Any:
    _STATE.begun, _STATE.enabled = function, _enabled()
    return backward_class


def _answer_forward(function: object, forward: Any) -> Any:
    if (begun := _STATE.begun) is None or begun is not function:
        return forward  # looked up by Python code
    _STATE.begun = None
    here = threading.get_ident()
    watches = [watch for watch in reversed(_WATCHES) if watch.thread == here]
    if not watches or getattr(function, "recomputes", False):
        return forward
    return _Application(begun, forward, watches).forward


def _answer_setup_context(function: object, setup_context: Any) -> Any:
    ran = _STATE.ran
    if ran is None or ran.function is not function:
        return setup_context
    _STATE.ran = None
    return ran.setup_context(setup_context)


_ANSWERS = {
    "_backward_cls": _answer_backward_class,
    "forward": _answer_forward,
    "setup_context": _answer_setup_context,
}
_DESCRIPTORS = {name: _Descriptor(name, answer) for name, answer in _ANSWERS.items()}


def records_gradients() -> bool:
    """Whether gradients were enabled where `apply` was called; for a watch, while it is called."""
    return _STATE.enabled[0]


@contextmanager
def as_around() -> Iterator[None]:
    """Inside, gradients and tangents are enabled as where `apply` was called; for a watch, which runs
    where `forward` does, without them."""
    before = _enabled()
    _switch(*_STATE.enabled)
    try:
        yield
    finally:
        _switch(*before)


def _enabled() -> tuple[bool, bool]:
    return torch.is_grad_enabled(), torch_forward_mode.are_tangents_enabled()


def _switch(gradients: bool, tangents: bool) -> None:
    """Switches gradients and tangents. Modes do not see the call: they would take it for a `no_grad` of
    the user's."""
    with torch_internals.without_functions_seen():
        torch_internals.set_grad_enabled(gradients)
    if torch_internals.forward_mode_active():
        torch_forward_mode.tangents_enabled(tangents)


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

    def forward(self, *args: Any) -> Any:
        """The Function's forward, which has all there is to do where it takes ctx."""
        takes_context = bool(args) and isinstance(args[0], BackwardCFunction)
        self._count(1)
        try:
            self._ended = self._begin(args[1:] if takes_context else args)
            result = self._forward(*args)
        finally:
            self._count(-1)
        if takes_context:
            self._end(args[0], result)
        else:
            _STATE.ran = self
        return result

    def setup_context(self, setup_context: Callable[..., Any]) -> Callable[..., None]:
        """The Function's setup_context, after which the application has ended."""

        def run(ctx: object, inputs: object, output: object) -> None:
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
        # torch hides the tangents of arguments while they are not enabled
        with as_around() if torch_internals.forward_mode_active() else nullcontext():
            return [ended for watch in outermost if (ended := watch.seen(*written)) is not None]

    def _end(self, node: object, result: object) -> None:
        for ended in self._ended:
            ended(node, result)
