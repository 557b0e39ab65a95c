"""Finds a hard-coded device, on a machine that may have only one.

Tensors made from nothing, without a `device=` that came from a tensor, live on the default device. A
call that mixes one of them with a tensor that came from the inputs fails on every other device.
"""

from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from hoglib import _tree
from hoglib.verification import _where as where

MOVES = ("cpu", "cuda")
INDEXING = ("__getitem__", "__setitem__")  # takes indices from the CPU


class Watch(TorchFunctionMode):
    """`found` says, in words, where the first such call was made."""

    def __init__(self) -> None:
        super().__init__()
        self.found = ""
        self._made: dict[
            int, Tensor
        ] = {}  # on the default device; held, so that an id stays its own

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        given = [x for x in _tree.leaves((args, kwargs)) if isinstance(x, Tensor)]
        device = kwargs.get("device")
        spelled = device if isinstance(device, str) else None
        if name == "to" and len(args) > 1 and isinstance(args[1], str):
            spelled = args[1]
        if given and (name in MOVES or spelled):
            how = f'device="{spelled}"' if spelled else f".{name}()"
            self._note(f"{how} is spelled out")
        result = func(*args, **kwargs)
        strange = [x for x in given if id(x) in self._made]
        sized = [x for x in strange if x.dim()]  # tensors without dimensions mix with any device
        if sized and len(strange) < len(given) and name not in INDEXING:
            self._note("a tensor made on the default device is mixed with the inputs")
        made_here = not given and (device is None or spelled is not None)
        if made_here or (given and len(strange) == len(given)):
            for y in _tree.leaves(result):
                if isinstance(y, Tensor):
                    self._made[id(y)] = y
        return result

    def _note(self, what: str) -> None:
        if not self.found:
            place = where.here()
            self.found = what + (f", at {place}" if place else "")
