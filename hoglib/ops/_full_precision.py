"""Stand-ins for what torch.autocast runs in float32: their parts must not fall to less."""

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def full_precision(widen: bool) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A function that autocast leaves alone; with `widen`, on float32 copies of narrow tensors."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            given = (*args, *kwargs.values())
            kind = next((x.device.type for x in given if isinstance(x, Tensor)), "cpu")
            if not torch.is_autocast_enabled(kind):
                return function(*args, **kwargs)
            with torch.autocast(kind, enabled=False):
                if not widen:
                    return function(*args, **kwargs)
                values: Any = [_wide(value) for value in args]
                named: Any = {name: _wide(value) for name, value in kwargs.items()}
                return function(*values, **named)

        return run

    return decorate


def _wide(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and is_narrow(value) else value


def is_narrow(x: Tensor) -> bool:
    return x.dtype in (torch.bfloat16, torch.float16)
