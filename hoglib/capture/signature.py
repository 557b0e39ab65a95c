"""The signature of a call: calls with the same signature run the same graph."""

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from hoglib._core import pytree, validation
from hoglib._core.closures import is_plain
from hoglib._core.torch_modes import ActiveStandIns, AutocastState
from hoglib.errors import ArgumentTypeError, UnsupportedError

_COMPLEX = {torch.complex32, torch.complex64, torch.complex128}


class TensorSlot:
    """Stands for the i-th tensor of a call, or of an output."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


class CallSignature:
    """A call without its tensors: the structure and the constants of its arguments, and its context.

    Two calls run the same graph if their ``key`` is equal and the guards of the graph hold.
    """

    __slots__ = ("_autocast", "_leaves", "_stand_ins", "_structure", "constants", "key")

    def __init__(
        self, leaves: list[Any], structure: Any, key: Hashable, autocast: AutocastState,
        stand_ins: ActiveStandIns,
    ) -> None:  # fmt: skip
        self.key = key
        self.constants = [leaf for leaf in leaves if type(leaf) is not TensorSlot]
        self._leaves, self._structure = leaves, structure
        self._autocast, self._stand_ins = autocast, stand_ins

    def fill(self, tensors: list[Tensor]) -> tuple[Any, Any]:
        """The arguments and keyword arguments with these tensors."""
        leaves = [tensors[x.index] if type(x) is TensorSlot else x for x in self._leaves]
        args, kwargs = pytree.unflatten(leaves, self._structure)
        return args, kwargs

    def describe(self, tensors: list[Tensor]) -> str:
        """dtypes and shapes of the arguments, in short."""
        parts = [
            _describe(tensors[x.index]) if type(x) is TensorSlot else repr(x) for x in self._leaves
        ]
        if len(parts) > 8:
            parts = [*parts[:7], f"... {len(parts)} in all"]
        return ", ".join(parts)

    @contextmanager
    def restored_context(self) -> Iterator[None]:
        """Inside, autocast and stand-ins are as they were around the call."""
        with self._autocast.restored(), self._stand_ins.resume():
            yield


def parse_call(
    what: str, args: Any, kwargs: Any, dynamic: bool
) -> tuple[CallSignature, list[Tensor]]:
    """The signature of a call, and its tensors, each once."""
    leaves, structure = pytree.flatten((args, kwargs))
    tensors: list[Tensor] = []
    places: dict[int, TensorSlot] = {}
    slots, kinds = [], []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            slot = places.get(id(leaf))
            if slot is None:
                slot = places[id(leaf)] = TensorSlot(len(tensors))
                tensors.append(leaf)
                check_dense(what, leaf, when=" before the call")
                kinds.append(tensor_key(leaf, dynamic))
            else:
                kinds.append(slot.index)  # a tensor that is passed twice is one variable
            slots.append(slot)
        else:
            kinds.append(_constant_key(what, leaf))
            slots.append(leaf)
    autocast, stand_ins = AutocastState(), ActiveStandIns()
    # a default device is a mode, and takes its time to ask for
    device = torch.get_default_device() if torch._C._len_torch_function_stack() else None
    key = (
        tuple(kinds), structure, torch.is_grad_enabled(), torch.get_default_dtype(), autocast.key,
        stand_ins.active, device,
    )  # fmt: skip
    return CallSignature(slots, structure, key, autocast, stand_ins), tensors


def tensor_key(tensor: Tensor, dynamic: bool = False) -> Hashable:
    """All properties of a tensor but its values."""
    shape: Hashable = tensor.shape
    if dynamic:  # sizes 0 and 1 are never symbolic
        shape = tuple(size if size < 2 else None for size in tensor.shape)
    dtype, layout = tensor.dtype, None
    if dtype in _COMPLEX or not tensor.is_contiguous() or tensor.numel() == 1:
        layout = tensor.stride(), tensor.is_conj(), tensor.is_neg()
    return shape, dtype, tensor.device, tensor.requires_grad, layout


def check_dense(what: str, tensor: Tensor, got: str = "", when: str = "") -> None:
    """Raises UnsupportedError for a tensor that a graph cannot take."""
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        raise UnsupportedError(
            f"{what}: expected dense tensors of torch's own class, got "
            f"{got}{validation.describe(tensor)} of class {type(tensor).__name__} and layout "
            f"{tensor.layout}. Convert it{when}, or do not compile."
        )


def _constant_key(what: str, leaf: Any) -> Hashable:
    if is_plain(leaf):
        # repr distinguishes 0.0 from -0.0, and equals itself for nan
        return type(leaf), leaf, repr(leaf) if isinstance(leaf, float | complex) else None
    if isinstance(leaf, torch.Generator):  # has no weak references in torch 2.11
        return type(leaf), id(leaf)
    try:
        hash(leaf)
        return type(leaf), ref(leaf)
    except TypeError:
        raise ArgumentTypeError(
            f"{what}: expected arguments of tensors, numbers, strings and containers of them, got "
            f"{validation.describe(leaf)}, which has no hash. Each other value of an argument needs "
            "another graph, so its values must be comparable. Pass tensors, or use it in a closure."
        ) from None


def _describe(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"
