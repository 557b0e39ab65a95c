"""What the nodes of a graph keep for their backward, and whether that has a graph."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd import Function

from hoglib import _functorch, _tree
from hoglib.verification._call import is_float


class Slot(NamedTuple):
    """A tensor that a node keeps."""

    name: str
    tensor: Tensor
    lost: bool  # made in forward, neither input nor output: a constant to the second derivative


class Applications:
    """The floating-point tensors that custom Functions were applied to."""

    def __init__(self) -> None:
        self._args: dict[type[Function], list[Tensor]] = {}

    def seen(self, function: type[Function], args: tuple[Any, ...]) -> None:
        self._args.setdefault(function, []).extend(x for x in _tree.leaves(args) if is_float(x))

    def knows(self, function: type[Function]) -> bool:
        return function in self._args

    def was_given(self, function: type[Function], x: Tensor) -> bool:
        return any(same_memory(x, arg) for arg in self._args.get(function, ()))


def by_custom(node: Any, function: type[Function], applications: Applications) -> Iterator[Slot]:
    """What a custom Function keeps: in save_for_backward, and as attributes of ctx."""
    # what came in without a graph is no loss; where Functions were applied in other threads it is
    # certain only if nothing did
    certain = applications.knows(function) or all(parent for parent, _ in node.next_functions)
    named: list[tuple[str, Any]] = []
    if not _functorch.has_saved_by_hooks(node):
        with suppress(RuntimeError):  # its graph is gone, or a tensor was changed: using it raises
            named += [(f"ctx.saved_tensors[{i}]", x) for i, x in enumerate(node.saved_tensors)]
    named += [(f"ctx.{name}", x) for name, x in vars(node).items()]
    for name, x in named:
        if is_float(x):
            bare = not x.requires_grad and not applications.was_given(function, x)
            yield Slot(name, x, bare and certain)


def by_torch(node: Any) -> Iterator[Slot]:
    """What one of torch's own operations keeps; results without a graph are its own business."""
    for name in _functorch.saved_names(node):
        try:
            value = getattr(node, f"_saved_{name}")
        except RuntimeError:
            continue
        for x in value if isinstance(value, list | tuple) else [value]:
            if is_float(x) and (x.requires_grad or not name.startswith("result")):
                yield Slot(name, x, False)


def name_of(x: Tensor, named: Mapping[str, Any]) -> str:
    """Which of these a tensor is; empty for none of them."""
    return next((n for n, y in named.items() if is_float(y) and same_memory(x, y)), "")


def same_memory(x: Tensor, y: Tensor) -> bool:
    return x is y or identity(x) == identity(y)


def identity(x: Tensor) -> tuple[int, tuple[int, ...]]:
    """The same for two tensors that stand for the same numbers, while both are alive."""
    try:
        return x.data_ptr() or id(x), tuple(x.shape)
    except RuntimeError:  # sparse, or without a storage
        return id(x), tuple(x.shape)
