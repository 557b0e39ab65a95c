"""The modes around the caller: stand-ins, autocast, forward mode, tracing, and checks of values."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from hoglib._core.runtime.ambient import AMBIENT, PlainOperations, inside
from hoglib._core.torch_api import torch_internals
from hoglib._core.torch_api.dispatch import Args, Kw, Op, Types


class StandInMode(TorchFunctionMode):
    """Base of the mode in `hoglib.stand_ins`, which replaces torch calls by stand-ins.

    Packages below `hoglib.stand_ins` suspend and resume the mode by this class.
    """


class LayerMode(TorchFunctionMode):
    """Base of the mode that records layers for Kronecker factors.

    Taylor mode computes its coefficients inside it: the coefficients' products with a weight are calls
    of the weight's layer.

    propagates: Whether Taylor mode ran inside.
    """

    propagates = False


def layer_mode() -> LayerMode | None:
    """The active `LayerMode`, or None."""
    found: Any = torch_internals.function_mode(LayerMode)
    return found


class without_stand_ins(torch_internals.SuspendedMode):  # noqa: N801 a context manager
    """Inside, stand-ins are off: the torch calls of hoglib's ops need none."""

    __slots__ = ()
    kind = StandInMode


class ActiveStandIns:
    """The mode of `second_order()`, and the user's modes, that are active at the creation.

    For code that runs later, or inside torch.func, which disables modes while it applies a custom
    Function.
    """

    def __init__(self) -> None:
        self._modes = torch_internals.function_modes(StandInMode)

    @property
    def active(self) -> bool:
        """Whether the mode of `second_order()` was active."""
        return any(isinstance(mode, StandInMode) for mode in self._modes)

    def resume(self) -> AbstractContextManager[object]:
        """Inside, the modes are active again."""
        if not self._modes:
            return nullcontext()
        active = torch_internals.function_modes(StandInMode)
        on = any(isinstance(mode, StandInMode) for mode in active)
        # never two modes of stand-ins
        again = [
            m for m in self._modes if m not in active and not (on and isinstance(m, StandInMode))
        ]
        return torch_internals.entered(again)


class AutocastState:
    """The active autocasts at the creation, for code that runs later."""

    def __init__(self) -> None:
        # (device type, dtype) of each; equal for equal states
        self.key = torch_internals.autocasts()

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Inside, these autocasts are active, and no others."""
        on = dict(self.key)
        with ExitStack() as stack:
            for kind in {*on, *dict(torch_internals.autocasts())}:
                dtype = on.get(kind, torch.get_autocast_dtype(kind))
                stack.enter_context(torch.autocast(kind, dtype, enabled=kind in on))
            yield


def own_algebra() -> AbstractContextManager[None]:
    """Inside, autocast is off, except for the user's functions, which run inside `users_autocast`."""
    return _autocast_off() if torch_internals.autocasts() else nullcontext()


@contextmanager
def _autocast_off() -> Iterator[None]:
    with inside(autocast=AutocastState()), ExitStack() as stack:
        for kind, _ in torch_internals.autocasts():
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def users_autocast() -> AbstractContextManager[None]:
    """Inside, autocast is as around `own_algebra`."""
    return nullcontext() if AMBIENT.autocast is None else _restored_autocast(AMBIENT.autocast)


@contextmanager
def _restored_autocast(state: AutocastState) -> Iterator[None]:
    with inside(autocast=None), state.restored():
        yield


class ContiguousDropout(TorchFunctionMode):
    """Inside, dropout draws in the order of a contiguous input, as torch does inside torch.func.

    Elsewhere torch draws in the memory order of the input, so a run inside transforms would draw
    another mask than a run outside.
    """

    def __torch_function__(self, func: Op, types: Types, args: Args = (), kwargs: Kw = None) -> Any:
        kwargs = kwargs or {}
        if func in (F.dropout, torch.dropout) and not kwargs.get("inplace") and args:
            args = (args[0].contiguous(), *args[1:])
        return func(*args, **kwargs)


@cache
def copy_without_override_check(func: FunctionType) -> Callable[..., Any]:
    """A copy of a Python function of torch in which `has_torch_function` returns False. A mode that
    calls the copy while it is itself active sees the torch calls inside."""
    names = (name for name in func.__globals__ if name.startswith("has_torch_function"))
    checks = dict.fromkeys(names, lambda *tensors: False)
    own = {**func.__globals__, **checks}
    copy = FunctionType(func.__code__, own, func.__name__, func.__defaults__, func.__closure__)
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


def reverse_only() -> bool:
    """Whether no derivative in forward mode can be taken: none is active, and no graph is traced, which
    could run in forward mode later."""
    return not torch_internals.tracing() and not torch_internals.forward_mode_active()


def plain_reverse_mode() -> bool:
    """Whether only autograd's reverse mode is active: no forward mode, no torch.func transform, and no
    `plain_operations`."""
    return not (torch_internals.transforms_active() or only_plain_operations()) and reverse_only()


def value_checks_on() -> bool:
    """Whether checks may read the values of tensors: not while a graph is traced, because its tensors
    have none, nor inside `inside(value_checks_off=True)`."""
    return not (AMBIENT.value_checks_off or torch_internals.tracing())


def plain_operations(linear_for: str | None = None) -> inside:
    """Inside, hoglib's ops run as composites of torch operations, if they have such a reference: for
    code that handles each operation, and cannot look into a custom Function.

    linear_for: The caller, if it needs a backward that is linear in the incoming gradient.
    """
    return inside(plain_operations=PlainOperations(linear_for))


def only_plain_operations() -> bool:
    """Whether the caller runs inside `plain_operations`; False while Dynamo traces."""
    # Dynamo cannot read thread-local variables; ops run as their references there anyway
    return not torch.compiler.is_dynamo_compiling() and AMBIENT.plain_operations is not None


def needs_linear_backward() -> str | None:
    """The caller of `plain_operations(linear_for=...)`, or None."""
    if torch.compiler.is_dynamo_compiling() or AMBIENT.plain_operations is None:
        return None
    return AMBIENT.plain_operations.linear_for
