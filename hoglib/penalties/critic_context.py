"""The context in which a penalty runs a critic: buffers restored, autocast off."""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from hoglib._core import mixed_precision, pytree
from hoglib._core.swap import ModulePatch
from hoglib._core.torch_internals import is_compiled


@contextmanager
def restore_buffers() -> Iterator[list[nn.Module]]:
    """Collects the modules that run inside, in order, each once, and restores their buffers at the end.

    Modules in training mode run with copies of their buffers: running statistics, and the vectors of
    spectral norm, are updated by a training step and not by a penalty.
    """
    seen: set[int] = set()
    patch, thread = ModulePatch(), threading.get_ident()
    copies: dict[int, Tensor] = {}  # by the buffer, which modules may share

    def before_forward(module: nn.Module, args: Any) -> None:
        if id(module) in seen:
            return
        if torch.compiler.is_compiling():  # torch.compile cannot trace what follows
            return
        if threading.get_ident() != thread:
            return
        seen.add(id(module))
        modules.append(module)
        if isinstance(module, torch.jit.ScriptModule):
            scripted.extend(_copy_scripted_buffers(module))
            return
        # hooks of the parts of a compiled module are not called
        for part in module.modules() if is_compiled(module) else (module,):
            for name, buffer in list(part._buffers.items()) if part.training else ():
                if buffer is not None:
                    patch.put(part, name, _copy(buffer, copies))

    modules: list[nn.Module] = []
    scripted: list[tuple[nn.Module, str, Tensor]] = []
    handle = register_module_forward_pre_hook(before_forward)
    try:
        yield modules
    finally:
        handle.remove()
        patch.restore()
        for module, name, buffer in scripted:
            setattr(module, name, buffer)


def _copy(buffer: Tensor, copies: dict[int, Tensor]) -> Tensor:
    if id(buffer) not in copies:
        copies[id(buffer)] = buffer.clone()
    return copies[id(buffer)]


def _copy_scripted_buffers(module: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Replaces the buffers of a scripted module and its parts, whose hooks are not called, by copies;
    yields the originals."""
    for part in module.modules():
        for name, buffer in list(part.named_buffers(recurse=False)) if part.training else ():
            yield part, name, buffer
            setattr(part, name, buffer.clone())


def autocast_devices(tensors: Sequence[Tensor]) -> list[str]:
    """The device types of the tensors for which autocast is on."""
    return [kind for kind in {x.device.type for x in tensors} if mixed_precision.autocast_on(kind)]


def cast_like_parameters(params: Iterable[Tensor], tree: Any) -> Any:
    """The tree with half-precision tensors, as an autocast region returns them, in float32; and with
    all of them in half precision if the parameters are."""
    dtypes = {p.dtype for p in params if p.is_floating_point()}
    wanted = (
        dtypes.pop()
        if len(dtypes) == 1 and dtypes < set(mixed_precision.HALF_DTYPES)
        else torch.float32
    )
    others = {torch.float32, *mixed_precision.HALF_DTYPES}
    return pytree.map_tensors(lambda x: x.to(wanted) if x.dtype in others else x, tree)


def parameters_of(func: Callable[..., Any]) -> Iterable[Tensor]:
    """The parameters of the module that a function is, or is a method of."""
    owner = owner_of(func)
    return owner.parameters() if isinstance(owner, nn.Module) else ()


def is_frozen(func: Callable[..., Any]) -> bool:
    """Whether a function belongs to a module none of whose parameters requires grad."""
    parameters = list(parameters_of(func))
    return bool(parameters) and not any(p.requires_grad for p in parameters)


def owner_of(func: Callable[..., Any]) -> Any:
    """The module, object or code of a function: the same object in each call, also for a function that
    is created anew for each call."""
    if isinstance(func, partial):
        return owner_of(func.func)
    if hasattr(func, "__wrapped__"):
        return owner_of(func.__wrapped__)
    if isinstance(func, nn.Module):
        return func
    owner = getattr(func, "__self__", None)
    if owner is not None and not isinstance(owner, ModuleType):
        return owner
    return getattr(func, "__code__", None) or getattr(type(func).__call__, "__code__", func)
