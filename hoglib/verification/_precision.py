"""Finds numbers of lower precision that enter float64 maths."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hoglib import _arguments as arguments
from hoglib import _tree

WIDE = (torch.float64, torch.complex128)


class Watch(TorchDispatchMode):
    """`found` describes the first operation that rounded float64 numbers, or met rounded ones.

    It sees backward passes too, other than a GPU's, which run in threads of their own. A constant
    whose digits fit into half precision (1, 0.5, a mask) lost nothing and is not rounded; a Python
    number has no precision to judge.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.found:
            given = [x for x in _tree.leaves((args, kwargs)) if _is_float(x)]
            results = [y for y in _tree.leaves(result) if _is_float(y)]
            if any(y.dtype in WIDE for y in results):
                self._note(func, "met", [x for x in given if _rounded(x)])
            elif any(x.dtype in WIDE for x in given):
                self._note(func, "rounded float64 numbers to", [y for y in results if _rounded(y)])
        return result

    def _note(self, func: Any, did: str, culprits: list[Tensor]) -> None:
        if culprits:
            self.found = f"{func.overloadpacket} {did} {arguments.describe(culprits[0])}"


def _rounded(tensor: Tensor) -> bool:
    if tensor.dtype in WIDE:
        return False
    values = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    mantissa, _ = torch.frexp(values.detach().double())
    digits = (mantissa * 2**11).frac()  # those that half precision, which has 11, would lose
    return bool((values.isfinite() & (digits != 0)).any())


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
