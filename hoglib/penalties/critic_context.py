"""Parameters and dtypes of the critic that a penalty runs."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from hoglib._core import mixed_precision, pytree
from hoglib._core.closures import owner_of


def autocast_devices(tensors: Sequence[Tensor]) -> list[str]:
    """The device types of the tensors for which autocast is on."""
    return [kind for kind in {x.device.type for x in tensors} if mixed_precision.autocast_on(kind)]


def without_autocast(kinds: Sequence[str]) -> AbstractContextManager[object]:
    """Inside, autocast is off on devices of these types."""
    stack = ExitStack()
    for kind in kinds:
        stack.enter_context(torch.autocast(kind, enabled=False))
    return stack


def cast_like_parameters(params: Iterable[Tensor], tree: Any) -> Any:
    """The tree with half-precision tensors, as an autocast region returns them, in float32; and with
    all of them in half precision if the parameters are."""
    dtypes = {p.dtype for p in params if p.is_floating_point()}
    wanted = (
        dtypes.pop()
        if len(dtypes) == 1 and dtypes < set(mixed_precision.HALF_DTYPES)
        else torch.float32
    )
    others = {torch.float32, *mixed_precision.HALF_DTYPES}
    return pytree.map_tensors(lambda x: x.to(wanted) if x.dtype in others else x, tree)


def parameters_of(func: Callable[..., Any]) -> Iterable[Tensor]:
    """The parameters of the module that a function is, or is a method of."""
    owner = owner_of(func)
    return owner.parameters() if isinstance(owner, nn.Module) else ()


def is_frozen(func: Callable[..., Any]) -> bool:
    """Whether a function belongs to a module none of whose parameters requires grad."""
    parameters = list(parameters_of(func))
    return bool(parameters) and not any(p.requires_grad for p in parameters)
