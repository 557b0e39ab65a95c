"""Types of the arguments that torch gives to `__torch_function__` and `__torch_dispatch__`."""

from collections.abc import Callable, Sequence
from typing import Any

Op = Callable[..., Any]
Types = Sequence[type]
Args = tuple[Any, ...]
Kw = dict[str, Any] | None
