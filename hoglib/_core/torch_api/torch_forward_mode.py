"""torch's forward mode: its level, one for all threads of the process, and dual tensors.

Private torch API, as `torch_internals`.
"""

import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd import forward_ad, grad_mode
from torch.overrides import TorchFunctionMode

from hoglib._core.runtime.ambient import AMBIENT
from hoglib._core.torch_api import torch_internals
from hoglib._core.torch_api.dispatch import Args, Kw, Op, Types
from hoglib._core.torch_api.torch_library import OPERATORS
from hoglib._core.torch_api.torch_private import holder, private, require
from hoglib.errors import UnsupportedError

tangents_enabled = private("torch.autograd.forward_ad._set_fwd_grad_enabled")
are_tangents_enabled = private("torch._C._is_fwd_grad_enabled")
_eager_transforms = holder("torch._functorch.eager_transforms.JVP_NESTING")
_interpreter = private("torch._functorch.pyfunctorch.retrieve_current_functorch_interpreter")
_interpreter_stack = private("torch._C._functorch.get_interpreter_stack")
_unwrap_if_dead = private("torch._C._functorch.unwrap_if_dead")
_wrap_for_grad = private("torch._C._functorch._wrap_for_grad")
_unwrap_for_grad = private("torch._C._functorch._unwrap_for_grad")
_FORWARD_THREADS: dict[int, int] = {}  # thread id -> number of entry points that it is inside
_FORWARD_LOCK = threading.Lock()


def forward_mode_elsewhere() -> bool:
    """Whether another thread is inside an entry point of hoglib that uses forward mode."""
    return any(thread != threading.get_ident() for thread in [*_FORWARD_THREADS])


@cache
def load_decompositions() -> None:
    """Make torch load the decompositions for forward mode, as its first dual tensor does. torch scripts
    them with `torch.jit.script`, which warns of its deprecation."""
    if torch_internals.forward_mode_active():
        return  # the first dual tensor has loaded them
    with torch_internals.without_transforms(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit")
        with forward_ad.dual_level():
            forward_ad.make_dual(torch.ones(()), torch.ones(()))


@contextmanager
def one_thread_in_forward_mode(caller: str) -> Iterator[None]:
    """Raise UnsupportedError if another thread is inside. torch has one level of forward mode for all
    threads: the first thread that exits ends the level of all, and the tangents are lost."""
    own = threading.get_ident()
    with _FORWARD_LOCK:
        load_decompositions()
        # a backward on a GPU runs on a worker thread, inside its caller's forward mode
        if forward_mode_elsewhere() and torch_internals.running_backward() == -1:
            raise UnsupportedError(
                f"{caller}: expected one thread at a time in forward mode, of which torch has one for "
                "the whole process, got two; use the reverse mode, or a lock around the call."
            )
        # entry points nest in one thread
        _FORWARD_THREADS[own] = _FORWARD_THREADS.get(own, 0) + 1
    try:
        yield
    finally:
        with _FORWARD_LOCK:
            _FORWARD_THREADS[own] -= 1
            if not _FORWARD_THREADS[own]:
                del _FORWARD_THREADS[own]


def in_dual_level() -> bool:
    """Whether the caller is inside a `forward_ad.dual_level` that is not `torch.func.jvp`'s. torch does
    not allow `torch.func.jvp` there."""
    return torch_internals.forward_mode_active() and not _eager_transforms.JVP_NESTING


def follow_grad_mode(enabled: bool) -> None:
    """Enable or disable tangents, after a mode has seen torch enable or disable gradients.

    The exit of a grad-mode context restores the tangents of its entry: a backward without a graph runs
    with gradients off and tangents on, and must continue with tangents. In a backward a plain call of
    set_grad_enabled has no visible end, so it does not change tangents.
    """
    frame: Any = sys._getframe(2)
    while frame.f_code.co_name == "__torch_function__":  # frames of other modes
        frame = frame.f_back
    while frame.f_back is not None and frame.f_back.f_globals is vars(grad_mode):
        frame = frame.f_back  # no_grad calls set_grad_enabled: find the outermost context manager
    name, manager = frame.f_code.co_name, frame.f_locals.get("self")
    managed = frame.f_globals is vars(grad_mode)
    if managed and name == "__exit__":
        enabled = vars(manager).pop("_tangents", enabled)
    elif managed:
        # kept on the context manager until its __exit__
        vars(manager).setdefault("_tangents", are_tangents_enabled())
    of_backward = torch_internals.running_backward() != -1 and AMBIENT.remat is None
    if (name == "__init__" or not managed) and of_backward:
        return
    tangents_enabled(enabled)


@final
class NoGradStopsForwardAD(TorchFunctionMode):
    """Inside, tensors computed under no_grad are constants of forward mode, too, not only of backward.

    `outside` raises. It is called at a torch call in a checkpoint that begins inside: a later backward
    would recompute without this mode, and lose tangents. `run_operator` runs operators of
    torch.library, to which torch gives no tangents.
    """

    def __init__(self, outside: Callable[[], None], run_operator: Callable[..., Any]) -> None:
        super().__init__()
        require(torch_internals.set_grad_enabled)
        self._outside, self._run_operator = outside, run_operator
        self._frame = torch_internals.checkpoint_frame()  # of a checkpoint around this mode

    def __torch_function__(self, func: Op, types: Types, args: Args = (), kwargs: Kw = None) -> Any:
        if type(func) in OPERATORS:
            result = self._run_operator(func, args, kwargs or {})
        else:
            result = func(*args, **(kwargs or {}))
        if func is torch_internals.set_grad_enabled:
            follow_grad_mode(args[0])
        elif torch_internals.checkpoint_frame() is not self._frame:
            self._outside()
        return result

    def __enter__(self) -> "NoGradStopsForwardAD":
        self._before = are_tangents_enabled()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        tangents_enabled(self._before)


def tangent_of(x: Tensor) -> Tensor | None:
    """The tangent of a dual tensor outside torch.func transforms; None if missing or zero."""
    if not are_tangents_enabled() or not torch_internals.has_tangent(x):
        return None
    tangent = forward_ad.unpack_dual(x).tangent
    return None if tangent is None or tangent._is_zerotensor() else tangent


def keep_tangents(variables: Sequence[Tensor]) -> None:
    """Make a backward inside `torch.func.jvp` return, for these variables, the tangents of the
    gradients instead of the gradients. Each gradient is freed as soon as it is computed."""

    def tangent(grad: Tensor | None) -> Tensor | None:
        if grad is None:  # from a norm of order 0, which is constant
            return None
        with tangents_enabled(True):
            found = forward_ad.unpack_dual(grad).tangent
        return torch.zeros_like(grad) if found is None else found

    for variable in variables:
        variable.register_hook(tangent)


def primal(x: Tensor | None) -> Tensor | None:
    """x without its tangent of `forward_ad.dual_level`, with its graph."""
    if (
        x is None
        or torch_internals.transforms_active()
        or not torch_internals.forward_mode_active()
    ):
        return x
    # torch disables tangents in the forward and the jvp of a Function
    with tangents_enabled(True):
        return forward_ad.unpack_dual(x).primal if torch_internals.has_tangent(x) else x


def gradient_with_tangents() -> bool:
    """Whether the active transforms are one `torch.func.jvp` and one gradient inside it."""
    return torch_internals.transform_kinds() == ["Jvp", "Grad"]


def tangents_without_graph(tensors: Sequence[Tensor | None]) -> list[Tensor | None] | None:
    """The tangents of tensors, unwrapped, if the active transforms are one `torch.func.jvp`, perhaps
    with one gradient inside it, and nothing else differentiates the tensors. None otherwise, and if no
    tensor has a tangent.
    """
    inside = gradient_with_tangents()
    if not inside and torch_internals.transform_kinds() != ["Jvp"]:
        return None
    stack = _interpreter_stack()
    found = []
    with ExitStack() as lowered:
        if inside:
            lowered.enter_context(_interpreter().lower())  # to jvp's level, which has the tangents
        # torch disables tangents in the forward and the jvp of a Function
        lowered.enter_context(tangents_enabled(True))
        for x in tensors:
            x = None if x is None else _unwrap_if_dead(x)
            if x is not None and inside:
                x = _unwrap_for_grad(x, stack[1].level())
            tangent = None
            if x is not None and torch_internals.has_tangent(x):
                tangent = forward_ad.unpack_dual(x).tangent
                tangent = _unwrap_for_grad(tangent, stack[0].level())
            if x is not None:
                x = _unwrap_for_grad(x, stack[0].level())
            # an outer autograd differentiates it
            if any(t is not None and t.requires_grad for t in (x, tangent)):
                return None
            found.append(tangent)
    return found if any(t is not None for t in found) else None


def at_this_level(tensors: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """The tensors as constants of the innermost transform of torch.func."""
    level = _interpreter_stack()[-1].level()
    return tuple(None if x is None else _wrap_for_grad(x, level) for x in tensors)


@contextmanager
def dual_tensors() -> Iterator[None]:
    """Inside, dual tensors can be made, and operations compute tangents: also inside an active level of
    forward mode, and in a Function's forward and jvp, where torch disables tangents."""
    level = forward_ad.dual_level() if not torch_internals.forward_mode_active() else nullcontext()
    with tangents_enabled(True), level:
        yield
