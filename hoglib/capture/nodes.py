"""What nodes of a graph draw, write and depend on."""

from collections.abc import Iterable, Sequence
from operator import getitem
from typing import Any

import torch
from torch import fx

aten: Any = torch.ops.aten

# The output that says whether a factorization failed.
_INFO = {
    aten.linalg_cholesky_ex.default: 1, aten.linalg_inv_ex.default: 1,
    aten.linalg_lu_factor_ex.default: 2, aten.linalg_ldl_factor_ex.default: 2,
    aten._linalg_solve_ex.default: 3,
}  # fmt: skip


def is_random(node: fx.Node) -> bool:
    """Whether an operation draws random numbers."""
    tags = getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags and not _has_no_dropout(node)


def is_fresh(node: fx.Node) -> bool:
    """Whether it is a copy by `torch_internals.fresh_copy`."""
    return (
        node.target is aten.clone.default
        and node.kwargs.get("memory_format") is torch.preserve_format
    )


def _has_no_dropout(node: fx.Node) -> bool:
    """Whether it is attention or a recurrent layer, which draw for dropout only, without dropout."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return False
    given = dict(zip((a.name for a in schema.arguments), node.args, strict=False)) | dict(
        node.kwargs
    )
    rates = [given[name] for name in ("dropout_p", "dropout") if name in given]
    if not rates and any(a.name in ("dropout_p", "dropout") for a in schema.arguments):
        return True
    return bool(rates) and all(rate in (0, 0.0) for rate in rates)


def takes_lists(node: fx.Node) -> bool:
    """Whether it calls an operator of torch.library, not of torch itself, that takes or returns a list
    of tensors."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or node.target.namespace in ("aten", "prims"):  # type: ignore[union-attr]
        return False
    return any(
        "Tensor" in str(x.type) and "List" in str(x.type)
        for x in (*schema.arguments, *schema.returns)
    )


def needed_nodes(
    nodes: Iterable[fx.Node], wanted: Iterable[fx.Node], *, through_info: bool = True
) -> list[fx.Node]:
    """The nodes that some nodes are computed from, in order, with writes to memory that they share.

    through_info: also through whether a factorization failed.
    """
    order = {node: i for i, node in enumerate(nodes)}
    memory: dict[fx.Node, fx.Node] = {}  # node -> another one that may share its memory

    def owner(node: fx.Node) -> fx.Node:
        while node in memory:
            node = memory[node]
        return node

    writes: list[tuple[fx.Node, fx.Node]] = []
    for node in order:
        for value, is_written in shared_arguments(node):
            if owner(node) is not owner(value):
                memory[owner(node)] = owner(value)
            if is_written:
                writes.append((node, value))
    writers: dict[fx.Node, list[fx.Node]] = {}
    for node, value in writes:
        writers.setdefault(owner(value), []).append(node)
    found: set[fx.Node] = set()
    left = list(wanted)
    while left:
        node = left.pop()
        if node in found:
            continue
        found.add(node)
        if not through_info and _is_info(node):
            continue
        for source in node.all_input_nodes:
            left.append(source)
            left += [x for x in writers.get(owner(source), ()) if order[x] < order[node]]
    return sorted(found, key=order.__getitem__)


def shared_arguments(node: fx.Node) -> Iterable[tuple[fx.Node, bool]]:
    """The arguments whose memory an operation returns or writes to, and whether it writes."""
    if node.target is getitem:
        yield node.args[0], False  # type: ignore[misc]
    for i, argument in enumerate(getattr(getattr(node.target, "_schema", None), "arguments", ())):
        if argument.alias_info is None:
            continue
        value = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
        for one in value if isinstance(value, Sequence) else (value,):
            if isinstance(one, fx.Node):
                yield one, argument.alias_info.is_write


def _is_info(node: fx.Node) -> bool:
    source = node.args[0] if node.target is getitem else None
    return isinstance(source, fx.Node) and _INFO.get(source.target) == node.args[1]
