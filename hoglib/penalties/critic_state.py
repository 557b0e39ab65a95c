"""What stands around a critic while a penalty runs it: modules seen, buffers kept, autocast off."""

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
def modules_kept() -> Iterator[list[nn.Module]]:
    """The modules that run inside, in the order in which they start, each once.

    Those in training mode run with copies of their buffers: running statistics, and the vectors of
    spectral norm, are moved by a step of training and not by a penalty.
    """
    ran: dict[int, nn.Module] = {}
    places, here = ModulePatch(), threading.get_ident()
    copies: dict[int, Tensor] = {}  # one of a buffer that modules share

    def start(module: nn.Module, args: Any) -> None:
        if id(module) in ran:
            return
        if torch.compiler.is_compiling():  # seen by torch.compile, which cannot trace what follows
            return
        if threading.get_ident() != here:
            return
        ran[id(module)] = module
        modules.append(module)
        if isinstance(module, torch.jit.ScriptModule):
            compiled.extend(_with_copies(module))
            return
        # parts of a compiled module do not say when they run
        for part in module.modules() if is_compiled(module) else (module,):
            for name, buffer in list(part._buffers.items()) if part.training else ():
                if buffer is not None:
                    places.put(part, name, _copy(buffer, copies))

    modules: list[nn.Module] = []
    compiled: list[tuple[nn.Module, str, Tensor]] = []
    handle = register_module_forward_pre_hook(start)
    try:
        yield modules
    finally:
        handle.remove()
        places.restore()
        for module, name, buffer in compiled:
            setattr(module, name, buffer)


def _copy(buffer: Tensor, copies: dict[int, Tensor]) -> Tensor:
    if id(buffer) not in copies:
        copies[id(buffer)] = buffer.clone()
    return copies[id(buffer)]


def _with_copies(module: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Puts copies in the place of the buffers of a scripted module and its parts, which do not say when
    they run; yields what stood there."""
    for part in module.modules():
        for name, buffer in list(part.named_buffers(recurse=False)) if part.training else ():
            yield part, name, buffer
            setattr(part, name, buffer.clone())


def autocast_on(tensors: Sequence[Tensor]) -> list[str]:
    """The device types of the tensors for which the caller stands under autocast."""
    return [kind for kind in {x.device.type for x in tensors} if mixed_precision.autocast_on(kind)]


def parameters_of(func: Callable[..., Any]) -> Iterable[Tensor]:
    """Those of the module that a function is, or is a method of."""
    owner = home(func)
    return owner.parameters() if isinstance(owner, nn.Module) else ()


def frozen(func: Callable[..., Any]) -> bool:
    """Whether it is of a module none of whose parameters learns."""
    parameters = list(parameters_of(func))
    return bool(parameters) and not any(p.requires_grad for p in parameters)


def as_parameters(params: Iterable[Tensor], tree: Any) -> Any:
    """What an autocast region made in half precision, in float32, as parameters are under autocast;
    and all of it in half precision where the parameters are."""
    dtypes = {p.dtype for p in params if p.is_floating_point()}
    wanted = (
        dtypes.pop()
        if len(dtypes) == 1 and dtypes < set(mixed_precision.HALF_DTYPES)
        else torch.float32
    )
    others = {torch.float32, *mixed_precision.HALF_DTYPES}
    return pytree.map_tensors(lambda x: x.to(wanted) if x.dtype in others else x, tree)


def home(func: Callable[..., Any]) -> Any:
    """What stays the same from call to call of a function that may be made anew for each."""
    if isinstance(func, partial):
        return home(func.func)
    if hasattr(func, "__wrapped__"):
        return home(func.__wrapped__)
    if isinstance(func, nn.Module):
        return func
    owner = getattr(func, "__self__", None)
    if owner is not None and not isinstance(owner, ModuleType):
        return owner
    return getattr(func, "__code__", None) or getattr(type(func).__call__, "__code__", func)
