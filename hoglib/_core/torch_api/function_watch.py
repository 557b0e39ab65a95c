"""Sees each application of a custom Function, also through a bound alias, `f = MyFunction.apply`.

On every release of torch, apply ends in C++, which looks up three names on the Function's class:

    _backward_cls      at the beginning of the application; an instance of it is the node of the graph
    setup_context      to compare it with torch.autograd.Function's own, which stands for none
    forward            to call it, with gradients disabled

Python calls a data descriptor of the metaclass `FunctionMeta` before it reads an attribute of a class.
While a watch is active, `FunctionMeta` has descriptors of the three names. They return functions that
call the watches before and after `forward` and `setup_context`. `FunctionMeta.__getattribute__` would
also be called for the other look-ups, some 35 in each application. From torch 2.14 on `Function.apply`
is the C++ method itself, so an alias runs no Python before these look-ups.
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

# Called at the end of an application, with its node and the result of forward.
Ended = Callable[[Any, Any], None]
# Called at the beginning of an application, with the Function and its arguments.
Seen = Callable[[type[Function], tuple[Any, ...]], Ended | None]

# The active watches of all threads: the first one patches FunctionMeta, the last one restores it.
_WATCHES: list["watching_functions"] = []
# Reentrant: garbage collection inside the lock may run a destructor that enters a watch.
_LOCK = threading.RLock()


class Applying:
    """Whether a custom Function runs its forward: also True in a pack hook of saved tensors, which C++
    calls after forward."""

    depth = 0  # the number of nested forwards and setup_contexts that run

    def __bool__(self) -> bool:
        return self.depth > 0 or torch_internals.packs_saved_tensor()


@final
class watching_functions:  # noqa: N801 a context manager
    """Calls seen(function, args) before each custom Function that this thread applies inside; not for a
    Function that another one's forward applies (unless the outer one `recomputes` the user's code). If
    seen returns a function, it is called at the end with the node and the result of forward. Both are
    called where forward runs, with gradients disabled unless `as_around` enables them.

    Watches can be nested, and be active in several threads. A class, because each derivative enters
    one: contextlib's generators take several times as long.
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
    """Whether the installed torch looks these names up, so that applications are seen."""
    # In a new thread: hoglib may be imported under no_grad or inside a transform.
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
    """The application that C++ runs in this thread, between two look-ups."""

    begun: type[Function] | None = None  # the Function with the next look-up of forward
    # Whether gradients, and tangents, were enabled at the call of apply; forward runs without both.
    enabled = False, False
    ran: "_Application | None" = None  # its forward has run, its setup_context is looked up next


_STATE = _State()


@final
class _Descriptor:
    """A data descriptor of FunctionMeta: a look-up of `name` returns answer(function, its value)."""

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
        """Inside, FunctionMeta lacks the descriptor, so that the class gets the attribute: torch sets
        `_backward_cls` of each new class."""
        with _LOCK:
            delattr(FunctionMeta, self._name)
            try:
                yield
            finally:
                setattr(FunctionMeta, self._name, self)


def _look_up(function: Any, name: str) -> Any:
    """function.name, past the descriptor."""
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
        return forward  # not C++, but Python code looks forward up
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
    """Whether gradients were enabled at the call of `apply`; for a watch, while it is called."""
    return _STATE.enabled[0]


@contextmanager
def as_around() -> Iterator[None]:
    """Inside, gradients and tangents are enabled as at the call of `apply`. For a watch, which runs
    with both disabled, as `forward` does."""
    before = _enabled()
    _switch(*_STATE.enabled)
    try:
        yield
    finally:
        _switch(*before)


def _enabled() -> tuple[bool, bool]:
    return torch.is_grad_enabled(), torch_forward_mode.are_tangents_enabled()


def _switch(gradients: bool, tangents: bool) -> None:
    """Enables or disables gradients and tangents. Modes do not see the call: they would take it for a
    user's `no_grad`."""
    with torch_internals.without_functions_seen():
        torch_internals.set_grad_enabled(gradients)
    if torch_internals.forward_mode_active():
        torch_forward_mode.tangents_enabled(tangents)


@final
class _Application:
    """One application of a Function, between C++'s look-up of forward and the end.

    Attributes:
        function: The applied Function.
    """

    def __init__(
        self,
        function: type[Function],
        forward: Callable[..., Any],
        watches: list[watching_functions],
    ) -> None:
        self.function, self._forward, self._watches = function, forward, watches

    def forward(self, *args: Any) -> Any:
        """The Function's forward; the application ends with it if forward takes ctx."""
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
        """The Function's setup_context, at whose end the application ends."""

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
        """Calls the watches that see no outer application; returns the functions to call at the end."""
        outermost = [watch for watch in self._watches if watch.applying.depth == 1]
        if not outermost:
            return []
        written = torch_library.as_written(self.function, args)
        # while tangents are disabled, torch hides the tangents of the arguments
        with as_around() if torch_internals.forward_mode_active() else nullcontext():
            return [ended for watch in outermost if (ended := watch.seen(*written)) is not None]

    def _end(self, node: object, result: object) -> None:
        for ended in self._ended:
            ended(node, result)
