"""Which parameters stand in one block of a block-diagonal matrix."""

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

from torch import Tensor

from hoglib import _arguments as arguments
from hoglib import _tree

Tree = Any
Blocks = str | Callable[[str], Hashable] | Iterable[Iterable[str]] | None


def groups_of(blocks: Blocks, params: Tree) -> list[list[int]]:
    """Which leaves stand in one block, for each block."""
    names = _tree.paths(params)
    if blocks is None:
        return [list(range(len(names)))]
    if not (isinstance(params, Mapping) and all(isinstance(p, Tensor) for p in params.values())):
        raise arguments.WrongType(
            "params: expected a dict of tensors by qualified name where blocks are asked for, got "
            f"{type(params).__name__}; make one with `hoglib.trainable_params(model)`."
        )
    if isinstance(blocks, str):
        by_name = {"parameter": lambda name: name, "module": lambda name: name.rpartition(".")[0]}
        blocks = by_name[arguments.one_of("blocks", blocks, by_name)]
    if not callable(blocks) and not isinstance(blocks, Iterable):
        raise arguments.WrongType(
            "blocks: expected 'parameter', 'module', a function of a name or lists of names, got "
            f"{arguments.describe(blocks)}."
        )
    if callable(blocks):
        groups: dict[Hashable, list[int]] = {}
        for i, name in enumerate(names):
            groups.setdefault(blocks(name), []).append(i)
        return list(groups.values())
    listed = [list(group) for group in blocks]
    if sorted(name for group in listed for name in group) != sorted(names):
        raise arguments.WrongValue(
            f"blocks: expected every name of params in exactly one block, got {listed}; the names "
            f"are {', '.join(names)}."
        )
    return [[names.index(name) for name in group] for group in listed]
