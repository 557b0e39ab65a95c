"""`hoglib.second_order`: torch calls without a right second derivative go to their stand-ins.

    with hoglib.second_order():
        loss = criterion(model(x), y)          # an unmodified module
        g = torch.autograd.grad(loss, model.parameters(), create_graph=True)

A `TorchFunctionMode` sees every torch call of this thread. One that is in the table below goes to a
function of hoglib with the same signature, a product of large matrices to the faster of torch's own
two; everything else goes straight through. What torch calls below Python (inside its own kernels,
scripted or compiled code) is not seen.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hoglib._core import pytree
from hoglib._core.matrix_products import faster_affine, faster_product
from hoglib._core.running_statistics import frozen_running_statistics, running_statistics_frozen
from hoglib._core.torch_internals import checkpoint_frame
from hoglib._core.torch_modes import StandInMode
from hoglib.errors import UnsupportedError
from hoglib.stand_ins.table import STAND_INS, StandIn

__all__ = ["active", "rows", "second_order"]

# What computes the same sooner, or gives None.
_FASTER: dict[Any, Callable[..., Tensor | None]] = {
    F.linear: faster_affine,
    **dict.fromkeys(
        (torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__), faster_product
    ),
}
_ACTIVE: ContextVar["_SecondOrder | None"] = ContextVar("hoglib_second_order", default=None)


def active() -> bool:
    """Whether the caller stands inside `second_order()`."""
    return _ACTIVE.get() is not None


@contextmanager
def second_order() -> Iterator[None]:
    """Inside, torch calls whose second derivative torch lacks, or has wrong, go to their stand-ins.

    `hoglib env` lists them. `hoglib.hvp`, `hoglib.hessian` and `hoglib.MAML` enter it themselves
    (`stand_ins=False` switches that off). It works inside and outside of torch.func transforms, under
    autocast and under make_fx; entering it twice is entering it once; another thread has to enter it
    itself. Also a decorator. Values and first derivatives stay those of torch, to rounding. What a
    checkpoint runs again in a later backward runs inside again (not one inside of another).
    Raises NotImplementedError, inside, where a call that needs a gradient has no second derivative and
    no stand-in.
    """
    if active():
        yield
        return
    mode = _SecondOrder()
    token = _ACTIVE.set(mode)
    try:
        with mode:
            yield
    finally:
        _ACTIVE.reset(token)


@contextmanager
def stand_ins_if(wanted: bool) -> Iterator[None]:
    """`second_order()` for a function that only computes a derivative; or nothing."""
    with second_order() if wanted else nullcontext(), frozen_running_statistics():
        yield


def rows() -> tuple[StandIn, ...]:
    """What is replaced, or refused, for the installed torch."""
    return tuple(need for need in STAND_INS if need.applies)


def stand_in_of(func: Any) -> StandIn | None:
    """What is known of a torch callable that lacks a second derivative, or has it wrong."""
    return next((need for need in rows() if func in need.replaces or func in need.refuses), None)


class _SecondOrder(StandInMode):
    def __init__(self) -> None:
        super().__init__()
        self._table = _table()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        instead = self._table.get(func)
        if instead is not None:
            _inside_when_run_again()
            return instead(*args, **kwargs)
        faster = _FASTER.get(func)
        if faster is not None and not kwargs:
            found = faster(*args)
            if found is not None:
                _inside_when_run_again()
                return found
        if isinstance(func, FunctionType):
            again = seen_through(func)
            if again is not None:
                with self:
                    return again(*args, **kwargs)
        return func(*args, **kwargs)


@functools.cache
def _table() -> dict[Any, Callable[..., Any]]:
    """By the torch callable, what runs in its place."""
    table: dict[Any, Callable[..., Any]] = {}
    for need in rows():
        for original, instead in need.replaces.items():
            table[original] = instead
        for original in need.refuses:
            table[original] = functools.partial(_refuse, original, need)
    return table


@functools.cache
def seen_through(
    func: FunctionType, calls: frozenset[str] | None = None
) -> Callable[..., Any] | None:
    """A copy of a Python function of torch that a mode sees into, if there is something to see.

    calls: the names of what it may call that is worth seeing; by default what has a stand-in.

    Such a function asks `has_torch_function` first, which is true under any mode, and the mode is not
    there while it handles the call. The copy's globals answer False, and so it runs on, with the mode
    on again. What backward runs is seen in the same way.
    """
    if func not in _RUNNING_BACKWARD:
        known = calls or {getattr(original, "__name__", "") for original in _table()}
        if func.__module__ != F.__name__ or not known & set(func.__code__.co_names):
            return None
    answers = {name: _no for name in func.__globals__ if name.startswith("has_torch_function")}
    copy = FunctionType(
        func.__code__, {**func.__globals__, **answers}, func.__name__, func.__defaults__,
        func.__closure__,
    )  # fmt: skip
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


_RUNNING_BACKWARD = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)


def _inside_when_run_again() -> None:
    """A checkpoint around the caller runs its function again in here too: else torch's own operation
    would save other tensors than the stand-in did."""
    frame = checkpoint_frame()
    if frame is not None and not isinstance(frame.recompute_fn, _Inside):
        frame.recompute_fn = _Inside(frame.recompute_fn)


class _Inside:
    """A function that runs as it would where this was made."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function, self._frozen = function, running_statistics_frozen()

    def __call__(self, *args: Any) -> None:
        with second_order(), frozen_running_statistics() if self._frozen else nullcontext():
            self._function(*args)


def _no(*args: Any) -> bool:
    return False


def _refuse(original: Callable[..., Any], need: StandIn, *args: Any, **kwargs: Any) -> Any:
    tensors = [x for x in pytree.leaves((args, kwargs)) if isinstance(x, Tensor)]
    if not (torch.is_grad_enabled() and any(x.requires_grad for x in tensors)):
        return original(*args, **kwargs)
    raise UnsupportedError(
        f"{need.name}{in_module()}: expected an operation with a second derivative, got one without: "
        f"{need.lacks}. {need.instead}"
    )


def in_module() -> str:
    """The innermost module that is running its forward, by its class."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and frame.f_code.co_name.startswith("forward"):
            return f" in {type(owner).__name__}"
        frame = frame.f_back
    return ""
