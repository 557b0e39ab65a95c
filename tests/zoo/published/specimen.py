"""What a specimen is: a Function as published code writes it, and whether it can be trusted."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd import Function


class Specimen(NamedTuple):
    """A Function in the manner of published code."""

    name: str
    function: type[Function]
    inputs: Callable[[], tuple[Tensor, ...]]  # drawn from torch's generator, which the caller seeds
    verdict: str = "right"  # no row fails; "fail" and "warn": the status of the row that names it
    says: tuple[str, ...] = ()  # all occur, in lower case, in one such row
    options: Mapping[str, Any] = MappingProxyType({})  # keyword arguments for verify


SURROGATE = MappingProxyType({"surrogate": True})  # the gradient is not that of the forward
