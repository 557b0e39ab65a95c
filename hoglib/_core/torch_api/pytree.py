"""Pytree algebra: parameter dicts, nested containers and single tensors as vectors.

A pytree is a nesting of dicts, lists, tuples and named tuples (or types registered with torch) with
tensors as leaves. A function that takes a pytree returns one with its structure. Containers of other
types go through torch's own pytrees.
"""

import builtins
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from hoglib._core.torch_api.torch_private import private
from hoglib.errors import ArgumentValueError

Tree = Any
_tree_flatten = private("torch.utils._pytree.tree_flatten")
_tree_flatten_with_path = private("torch.utils._pytree.tree_flatten_with_path")
_REGISTERED = private("torch.utils._pytree.SUPPORTED_NODES")


def flatten(tree: Tree) -> tuple[list[Any], Any]:
    """The leaves in order, and the structure for `unflatten`, which is hashable."""
    found: list[Any] = []
    return found, _flatten(tree, found)


def unflatten(leaves: Sequence[Any], structure: object) -> Tree:
    left = iter(leaves)
    try:
        tree = _unflatten(structure, left)
    except StopIteration:
        text = f"expected a leaf for each place of the tree, got {len(leaves)}."
        raise ArgumentValueError(text) from None
    if next(left, _END) is not _END:
        raise ArgumentValueError(f"expected as many leaves as the tree has, got {len(leaves)}.")
    return tree


def leaves(tree: Tree) -> list[Any]:
    found: list[Any] = []
    _flatten(tree, found)
    return found


def tensors(tree: Tree) -> list[Tensor]:
    return [leaf for leaf in leaves(tree) if isinstance(leaf, Tensor)]


def map(function: Callable[..., Any], tree: Tree, *rest: Tree) -> Tree:
    """`function` of the leaves of one tree, or of several trees with one structure."""
    found, structure = flatten(tree)
    others = [flatten(other) for other in rest]
    # dicts in another order; other differences raise in flatten_up_to
    if any(other != structure for _, other in others):
        leaves, structure = _tree_flatten(tree)
        parts = [leaves, *(structure.flatten_up_to(other) for other in rest)]
        return structure.unflatten([function(*column) for column in zip(*parts, strict=True)])
    columns = zip(found, *(leaves for leaves, _ in others), strict=True)
    return unflatten([function(*column) for column in columns], structure)


def map_tensors(function: Callable[[Tensor], Any], tree: Tree) -> Tree:
    """`function` of the tensors among the leaves; other leaves do not change."""
    return map(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, tree)


def paths(tree: Tree) -> list[str]:
    """A readable name for each leaf, in the order of `leaves`: `layer1.weight`, `[0].x`, or ``."""
    found = _tree_flatten_with_path(tree)[0]
    return ["".join(builtins.map(_path_step, path)).removeprefix(".") for path, _ in found]


def add(a: Tree, b: Tree, *, alpha: float = 1.0) -> Tree:
    """a + alpha b."""
    return map(lambda x, y: x + alpha * y, a, b)


def dot(a: Tree, b: Tree) -> Tensor:
    """sum over all leaves of conj(a) b: a scalar tensor."""
    return sum_scalars([(x.conj() * y).sum() for x, y in zip(leaves(a), leaves(b), strict=True)])


def norm(tree: Tree) -> Tensor:
    """Euclidean norm over all leaves: a scalar tensor."""
    return dot(tree, tree).real.sqrt()


def size(tree: Tree) -> int:
    """The number of elements of all leaves."""
    return sum(leaf.numel() for leaf in leaves(tree))


def sum_scalars(terms: Sequence[Tensor]) -> Tensor:
    """The sum of scalar tensors; zero for an empty sequence."""
    return torch.stack(list(terms)).sum() if terms else torch.zeros(())


def _path_step(key: object) -> str:
    name = getattr(key, "key", getattr(key, "name", None))  # of a mapping's or an attribute's key
    return str(key) if name is None else f".{name}"


# Torch's own flatten in a fifth of the time, for the types in most trees. A structure is None for a
# leaf, (kind, keys, parts), or torch's own for another type of container.
_PLAIN = {int, float, bool, complex, str, bytes, type(None), Tensor, torch.nn.Parameter}
_END = object()


def _flatten(tree: Tree, found: list[Any]) -> Any:
    kind = type(tree)
    if kind in _PLAIN:
        found.append(tree)
        return None
    parts: Any = tree
    keys: Any = None
    if kind is dict:
        parts, keys = tree.values(), tuple(tree)
    elif kind is not tuple and kind is not list:
        if not _is_named(kind):
            leaves, structure = _tree_flatten(tree)
            found += leaves
            # torch takes an object of an unknown type for a leaf
            return None if len(leaves) == 1 and leaves[0] is tree else structure
        keys = kind
    if _PLAIN.issuperset(builtins.map(type, parts)):
        found += parts
        return kind, keys, (None,) * len(parts)
    structures = []
    for part in parts:
        structures.append(_flatten(part, found))
    return kind, keys, tuple(structures)


def _unflatten(structure: Any, left: Iterator[Any]) -> Tree:
    if structure is None:
        return next(left)
    if type(structure) is not tuple:
        return structure.unflatten([next(left) for _ in range(structure.num_leaves)])
    kind, keys, parts = structure
    if parts.count(None) == len(parts):
        values = [*islice(left, len(parts))]
        if len(values) < len(parts):
            raise StopIteration
    else:
        values = [_unflatten(part, left) for part in parts]
    if kind is dict:
        return dict(zip(keys, values, strict=True))
    return kind(values) if keys is None else kind(*values)


def _is_named(kind: type) -> bool:
    """Whether a class is a named tuple that is not registered with torch."""
    return issubclass(kind, tuple) and hasattr(kind, "_fields") and kind not in _REGISTERED


def rows(tree: Tree, count: int, start: int, end: int) -> Any:
    """Rows start to end of each tensor whose leading dimension is `count`, the number of examples."""

    def of(t: Tensor) -> Tensor:
        if not (t.dim() and len(t) == count):
            return t
        if t.is_nested:  # nested tensors cannot be sliced
            return torch.nested.as_nested_tensor(list(t.unbind()[start:end]), layout=t.layout)
        return t[start:end]

    return map_tensors(of, tree)


def tensors_in(name: str, value: object, depth: int = 4) -> list[tuple[str, Tensor]]:
    """The tensors in containers and in attributes of objects, as (name, tensor)."""
    if isinstance(value, Tensor):
        return [(name, value)]
    found: list[tuple[str, Tensor]] = []
    if depth == 0 or isinstance(value, str | bytes | type | nn.Module | torch.dtype | torch.device):
        return found
    parts: Iterable[tuple[str, Any]] = ()
    if isinstance(value, Mapping):
        parts = [(f"{name}[{key!r}]", part) for key, part in value.items()]
    elif isinstance(value, tuple | list):
        parts = [(f"{name}[{i}]", part) for i, part in enumerate(value)]
    elif hasattr(value, "__dict__"):
        parts = [(f"{name}.{key}", part) for key, part in vars(value).items()]
    for where, part in parts:
        found += [(where, part)] if isinstance(part, Tensor) else tensors_in(where, part, depth - 1)
    return found


def is_float(value: object) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def as_real(x: Tensor) -> Tensor:
    """A complex tensor as pairs of real numbers, [..., 2]; a real tensor unchanged."""
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def in_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in a dtype if it is of floating point, in the dtype's complex counterpart if it is complex."""
    if not is_float(x):
        return x
    return x.to(dtype.to_complex() if x.is_complex() else dtype)


def filled(tree: Tree, values: Iterable[Any], kind: Callable[[Any], bool] = is_float) -> Tree:
    """The tree with `values`, in order, instead of the leaves for which kind(leaf) is True."""
    found, structure = flatten(tree)
    left = iter(values)
    return unflatten([next(left) if kind(leaf) else leaf for leaf in found], structure)
