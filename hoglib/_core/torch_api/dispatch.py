"""Types of the arguments that torch gives to `__torch_function__` and `__torch_dispatch__`."""

from collections.abc import Sequence
from typing import Any

Op = Any  # a function of torch, or an OpOverload
Types = Sequence[type]  # classes of the arguments that override torch functions
Args = tuple[Any, ...]  # positional arguments
Kw = dict[str, Any] | None  # keyword arguments
