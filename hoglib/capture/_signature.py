"""What of a call a graph depends on: two calls with the same signature run the same graph."""

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from hoglib import _arguments as arguments
from hoglib import _functorch
from hoglib.ops._modes import StandingIn

Signature = Hashable


def of_tensor(tensor: Tensor, dynamic: bool = False) -> Hashable:
    """Everything of a tensor but its values."""
    shape: Hashable = tensor.shape
    if dynamic:  # 0 and 1 are never symbols
        shape = tuple(size if size < 2 else None for size in tensor.shape)
    layout = None if tensor.is_contiguous() else tensor.stride()
    return shape, layout, tensor.dtype, tensor.device, tensor.requires_grad


def of_call(what: str, leaves: list[Any], structure: Any, dynamic: bool) -> Signature:
    """The signature of arguments, and of the modes around the call."""
    return (
        tuple(_of_leaf(what, leaf, dynamic) for leaf in leaves),
        structure,
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        _autocast(leaves),
        _functorch.function_mode(StandingIn) is not None,
    )


def _autocast(leaves: list[Any]) -> Hashable:
    kinds = {leaf.device.type for leaf in leaves if isinstance(leaf, Tensor)} | {"cpu"}
    return tuple(
        (kind, torch.get_autocast_dtype(kind))
        for kind in sorted(kinds)
        if torch.is_autocast_enabled(kind)
    )


def _of_leaf(what: str, leaf: Any, dynamic: bool) -> Hashable:
    if isinstance(leaf, Tensor):
        if type(leaf) not in (Tensor, torch.nn.Parameter) or leaf.layout is not torch.strided:
            raise arguments.NotSupported(
                f"{what}: expected dense tensors of torch's own class, got "
                f"{arguments.describe(leaf)} of class {type(leaf).__name__} and layout {leaf.layout}; "
                "convert it before the call, or do not compile."
            )
        return of_tensor(leaf, dynamic)
    try:
        hash(leaf)
    except TypeError:
        raise arguments.WrongType(
            f"{what}: expected arguments of tensors, numbers, strings and containers of them, got "
            f"{arguments.describe(leaf)}; a graph is captured anew for each other value, and this one "
            "cannot be compared. Pass tensors, or close over it."
        ) from None
    return type(leaf), leaf, repr(leaf) if isinstance(leaf, float) else None  # 0.0 and -0.0, nan


def described(leaves: list[Any]) -> str:
    """The arguments of a call, in short."""
    parts = [
        f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"
        if isinstance(x, Tensor)
        else repr(x)
        for x in leaves
    ]
    return (
        ", ".join(parts) if len(parts) < 9 else ", ".join([*parts[:7], f"... {len(parts)} in all"])
    )
