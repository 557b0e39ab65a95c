"""What of a call a graph depends on: two calls with the same signature run the same graph."""

from collections.abc import Hashable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hoglib._core import pytree, torch_internals, validation
from hoglib._core.closures import is_plain
from hoglib._core.torch_modes import StandInMode
from hoglib.errors import ArgumentTypeError, UnsupportedError

Autocasts = tuple[tuple[str, torch.dtype], ...]  # that are on


_COMPLEX = {torch.complex32, torch.complex64, torch.complex128}


class Slot:
    """Stands for the i-th tensor of a call."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


class CallSignature:
    """A call without its tensors: the structure of the arguments, and what was on around it."""

    __slots__ = ("_autocast", "_leaves", "_standing", "_structure", "key", "others")

    def __init__(
        self, leaves: list[Any], structure: Any, key: Hashable, autocast: Autocasts,
        standing: TorchFunctionMode | None,
    ) -> None:  # fmt: skip
        self.key = key
        self.others = [leaf for leaf in leaves if type(leaf) is not Slot]
        self._leaves, self._structure, self._autocast, self._standing = (
            leaves,
            structure,
            autocast,
            standing,
        )

    def filled(self, tensors: list[Tensor]) -> tuple[Any, Any]:
        """Arguments and keyword arguments with these tensors."""
        leaves = [tensors[x.index] if type(x) is Slot else x for x in self._leaves]
        args, kwargs = pytree.unflatten(leaves, self._structure)
        return args, kwargs

    def described(self, tensors: list[Tensor]) -> str:
        """The arguments in short."""
        parts = [_described(tensors[x.index]) if type(x) is Slot else repr(x) for x in self._leaves]
        return (
            ", ".join(parts)
            if len(parts) < 9
            else ", ".join([*parts[:7], f"... {len(parts)} in all"])
        )

    @contextmanager
    def again(self) -> Iterator[None]:
        """Inside, autocast and stand-ins are on as they were around the call."""
        on = dict(self._autocast)
        with ExitStack() as stack:
            for kind in {"cpu", *on, *dict(_autocast([]))}:
                if kind in on or torch.is_autocast_enabled(kind):
                    dtype = on.get(kind, torch.get_autocast_dtype(kind))
                    stack.enter_context(torch.autocast(kind, dtype, enabled=kind in on))
            if self._standing is not None and torch_internals.function_mode(StandInMode) is None:
                stack.enter_context(self._standing)
            yield


def of_call(what: str, args: Any, kwargs: Any, dynamic: bool) -> tuple[CallSignature, list[Tensor]]:
    """The form of a call, and its tensors, each once."""
    leaves, structure = pytree.flatten((args, kwargs))
    tensors: list[Tensor] = []
    places: dict[int, Slot] = {}
    slots, kinds = [], []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            slot = places.get(id(leaf))
            if slot is None:
                slot = places[id(leaf)] = Slot(len(tensors))
                tensors.append(leaf)
                kinds.append(_of_argument(what, leaf, dynamic))
            else:
                kinds.append(slot.index)  # the same tensor twice is one variable
            slots.append(slot)
        else:
            kinds.append(_of_constant(what, leaf))
            slots.append(leaf)
    autocast = _autocast(tensors)
    standing = device = None
    if torch._C._len_torch_function_stack():
        standing = torch_internals.function_mode(StandInMode)
        device = torch.get_default_device()
    key = (
        tuple(kinds), structure, torch.is_grad_enabled(), torch.get_default_dtype(), autocast,
        standing is not None, device,
    )  # fmt: skip
    return CallSignature(slots, structure, key, autocast, standing), tensors


def of_tensor(tensor: Tensor, dynamic: bool = False) -> Hashable:
    """Everything of a tensor but its values."""
    shape: Hashable = tensor.shape
    if dynamic:  # 0 and 1 are never symbols
        shape = tuple(size if size < 2 else None for size in tensor.shape)
    dtype, layout = tensor.dtype, None
    if dtype in _COMPLEX or not tensor.is_contiguous() or tensor.numel() == 1:
        layout = tensor.stride(), tensor.is_conj(), tensor.is_neg()
    return shape, dtype, tensor.device, tensor.requires_grad, layout


def _of_argument(what: str, tensor: Tensor, dynamic: bool) -> Hashable:
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        raise UnsupportedError(
            f"{what}: expected dense tensors of torch's own class, got "
            f"{validation.describe(tensor)} of class {type(tensor).__name__} and layout "
            f"{tensor.layout}; convert it before the call, or do not compile."
        )
    return of_tensor(tensor, dynamic)


def _of_constant(what: str, leaf: Any) -> Hashable:
    if is_plain(leaf):
        return (
            type(leaf),
            leaf,
            repr(leaf) if isinstance(leaf, float | complex) else None,
        )  # 0.0 and -0.0, nan
    if isinstance(leaf, torch.Generator):  # to which torch 2.11 has no weak references
        return type(leaf), id(leaf)
    try:
        hash(leaf)
        return type(leaf), ref(leaf)
    except TypeError:
        raise ArgumentTypeError(
            f"{what}: expected arguments of tensors, numbers, strings and containers of them, got "
            f"{validation.describe(leaf)}; a graph is captured anew for each other value, and this one "
            "cannot be compared. Pass tensors, or close over it."
        ) from None


def _autocast(tensors: list[Tensor]) -> Autocasts:
    if not torch._C._is_any_autocast_enabled():
        return ()
    kinds = {"cpu", "cuda", *(x.device.type for x in tensors)} - {"meta"}
    return tuple(
        (kind, torch.get_autocast_dtype(kind))
        for kind in sorted(kinds)
        if torch.is_autocast_enabled(kind)
    )


def _described(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"
