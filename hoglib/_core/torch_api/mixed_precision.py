"""Half precision and autocast in composites of torch operations."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

HALF_DTYPES = (torch.float16, torch.bfloat16)
P = ParamSpec("P")
R = TypeVar("R")


def is_half(x: Tensor) -> bool:
    return x.dtype in HALF_DTYPES


def upcast_half(x: Tensor) -> Tensor:
    """x in float32 if it is in half precision, to sum many small terms."""
    return x.float() if is_half(x) else x


def upcast_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 for half precision, else the dtype itself."""
    return torch.float32 if dtype in HALF_DTYPES else dtype


def autocast_on(device: str) -> bool:
    """Whether autocast is active for a device type; meta has none."""
    # torch.amp.is_autocast_available would say so too, but torch 2.11 cannot compile it
    return device != "meta" and torch.is_autocast_enabled(device)


def is_autocast(x: Tensor) -> bool:
    """Whether autocast is active for the device of x and would change its dtype."""
    return autocast_on(x.device.type) and x.dtype != torch.float64


def cast_for_product(*tensors: Tensor | None) -> tuple[Any, ...]:
    """The operands in the dtypes to which autocast casts them for torch's own matrix product.

    float64 and complex operands stay.
    """
    # a Function's operands are cast before it: backward must read the dtype that forward computed in
    device = next(tensor.device.type for tensor in tensors if tensor is not None)
    if not autocast_on(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(
        x.to(dtype) if x is not None and x.is_floating_point() and x.dtype != torch.float64 else x
        for x in tensors
    )


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Inside, matrix products have the dtype of x, without autocast."""
    return torch.autocast(x.device.type, enabled=False) if is_autocast(x) else nullcontext()


def full_precision(widen: bool) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator: the function runs without autocast, as torch runs some functions in float32; with
    `widen`, on float32 copies of half-precision tensors."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            given = (*args, *kwargs.values())
            kind = next((x.device.type for x in given if isinstance(x, Tensor)), "cpu")
            if not autocast_on(kind):
                return function(*args, **kwargs)
            with torch.autocast(kind, enabled=False):
                if not widen:
                    return function(*args, **kwargs)
                values: Any = [_to_float32(value) for value in args]
                named: Any = {name: _to_float32(value) for name, value in kwargs.items()}
                return function(*values, **named)

        return run

    return decorate


def _to_float32(value: object) -> Any:
    return upcast_half(value) if isinstance(value, Tensor) else value
