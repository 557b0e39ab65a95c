"""What a user calls the inputs of a function."""

import inspect
from typing import Any

import torch

from hoglib.verification._application import parameters
from hoglib.verification._subject import as_function


class Names:
    """What a user calls the inputs: `x` for inputs[0], `params.weight` for what is in it."""

    def __init__(self, fn: Any, count: int) -> None:
        function = as_function(fn)
        self._own: list[str] = []
        if function is not None:
            self._own = [name.strip("`") for name in parameters(function, count)]
            return
        fn = fn.forward if isinstance(fn, torch.nn.Module) else fn
        try:
            given = inspect.signature(fn).parameters.values()
        except (TypeError, ValueError):
            return
        plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        self._own = [p.name for p in given if p.kind in plain]

    def __call__(self, name: str) -> str:
        if not name.startswith("inputs["):
            return name.removeprefix("the parameter ")
        place, _, rest = name.removeprefix("inputs[").partition("]")
        i = int(place)
        return f"{self._own[i]}{rest}" if i < len(self._own) else name
