"""Types of the arguments that torch gives to `__torch_function__` and `__torch_dispatch__`."""

from collections.abc import Sequence
from typing import Any

Op = Any  # a function of torch, or an OpOverload, whose attributes are read
Types = Sequence[type]
Args = tuple[Any, ...]
Kw = dict[str, Any] | None
