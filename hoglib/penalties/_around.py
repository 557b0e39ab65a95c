"""What stands around a critic while a penalty runs it: modules seen, buffers kept, autocast off."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from hoglib import _tree
from hoglib._substitution import Places
from hoglib.penalties._samples import HALVES


@contextmanager
def modules_kept() -> Iterator[list[nn.Module]]:
    """The modules that run inside, in the order in which they start, each once.

    Those in training mode run with copies of their buffers: running statistics, and the vectors of
    spectral norm, are moved by a step of training and not by a penalty.
    """
    ran: dict[int, nn.Module] = {}
    places, here = Places(), threading.get_ident()

    def start(module: nn.Module, args: Any) -> None:
        if threading.get_ident() != here or id(module) in ran:
            return
        ran[id(module)] = module
        modules.append(module)
        if module.training and not isinstance(module, torch.jit.ScriptModule):
            for name, buffer in list(module._buffers.items()):
                if buffer is not None:
                    places.put(module, name, buffer.clone())

    modules: list[nn.Module] = []
    handle = register_module_forward_pre_hook(start)
    try:
        yield modules
    finally:
        handle.remove()
        places.restore()


def autocast_on(tensors: Sequence[Tensor]) -> list[str]:
    """The device types of the tensors for which the caller stands under autocast."""
    return [kind for kind in {x.device.type for x in tensors} if torch.is_autocast_enabled(kind)]


def widened(tree: Any) -> Any:
    """What an autocast region made in half precision, in float32, as the parameters are."""
    return _tree.map_tensors(lambda x: x.float() if x.dtype in HALVES else x, tree)
