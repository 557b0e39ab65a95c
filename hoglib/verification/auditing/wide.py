"""A model in float64 whose code names other dtypes: `x.float()`, `softmax(x, dtype=torch.float32)`.

Such a line would round what is to be compared, or not go together with float64 weights. Inside
`in_float64()` a call that is given a float64 tensor, and asked for a narrower dtype, stays in float64;
autocast does nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hoglib import _tree
from hoglib._functorch import no_autocast

NARROW = (torch.float32, torch.float16, torch.bfloat16)
WIDE = {Tensor.float, Tensor.half, Tensor.bfloat16}
DOUBLE = (torch.float64, torch.complex128)


class _InFloat64(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in WIDE:
            return args[0] if args[0].dtype in DOUBLE else func(*args, **kwargs)
        if any(x in NARROW for x in (*args, *kwargs.values()) if isinstance(x, torch.dtype)):
            tensors = [x for x in _tree.leaves((args, kwargs)) if isinstance(x, Tensor)]
            if any(x.dtype in DOUBLE for x in tensors):
                args = tuple(_wider(x) for x in args)
                kwargs = {name: _wider(x) for name, x in kwargs.items()}
        return func(*args, **kwargs)


def _wider(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in NARROW else value


@contextmanager
def in_float64() -> Iterator[None]:
    with no_autocast(), _InFloat64():
        yield
