"""A critic of fully_shard (FSDP2) keeps its gathered parameters until the penalty's backward is over.

The gradient inside a penalty is a first backward, after which FSDP2 frees the gathered parameters; the
penalty's own backward still needs them (``setStorage ... storage of size 0``). With
``set_reshard_after_backward(False)`` they are kept, but then also after an optimizer step, so that the
next forward silently uses the old ones. Here they are kept for one backward.
"""

from collections.abc import Iterable
from typing import Any, final
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from hoglib._core import torch_internals, torch_sharding

_HELD: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # by how many penalties, each module


@final
class GatheredParameters:
    """Keeps the parameters of FSDP2 modules gathered until the backward of some tensors, or until
    nothing refers to it any more.

    Args:
        modules: Those that ran in a forward; others than those of FSDP2 are left alone.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules: list[Any] = [
            module
            for module in torch_sharding.fsdp_modules(modules)
            if torch_sharding.reshards_after_backward(module) or module in _HELD
        ]
        for module in self._modules:
            _HELD[module] = _HELD.get(module, 0) + 1
            module.set_reshard_after_backward(False, recurse=False)

    def until_backward_of(self, tensors: Iterable[Tensor | None]) -> None:
        """Release the parameters at the end of the backward that reaches one of the tensors."""
        for tensor in tensors if self._modules else ():
            if tensor is not None and tensor.requires_grad:
                tensor.register_hook(self._release_after_backward)

    def _release_after_backward(self, _: Tensor) -> None:
        torch_internals.after_backward(self.release)

    def release(self) -> None:
        """Free the gathered parameters, as FSDP2 does after a backward."""
        modules, self._modules = self._modules, []
        for module in modules:
            _HELD[module] -= 1
            if not _HELD[module]:
                del _HELD[module]
                module.set_reshard_after_backward(True, recurse=False)
                module.reshard()

    def __del__(self) -> None:
        self.release()
