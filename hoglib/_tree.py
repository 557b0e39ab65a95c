"""Pytree algebra: parameter dicts, nested containers and single tensors as vectors.

A pytree is any nesting of dicts, lists, tuples and named tuples (or a type registered with torch)
whose leaves are tensors. A structure goes in, the same structure comes out. This is the one file
that touches `torch.utils._pytree`, which torch.func itself uses.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

Tree = Any


_ONE = _pytree.tree_flatten(torch.zeros(()))[1]  # the structure of a tensor by itself


def flatten(tree: Tree) -> tuple[list[Any], Any]:
    """Leaves in order, and the structure that `unflatten` puts them back into."""
    if isinstance(tree, Tensor):  # the commonest tree, and several microseconds for torch
        return [tree], _ONE
    return _pytree.tree_flatten(tree)


def unflatten(leaves: Sequence[Any], structure: Any) -> Tree:
    if structure is _ONE and len(leaves) == 1:
        return leaves[0]
    return _pytree.tree_unflatten(list(leaves), structure)


def leaves(tree: Tree) -> list[Any]:
    if isinstance(tree, Tensor):
        return [tree]
    return _pytree.tree_leaves(tree)


def map(function: Callable[..., Any], tree: Tree, *rest: Tree) -> Tree:
    """`function` of the leaves of one tree, or of several trees with the same structure."""
    return _pytree.tree_map(function, tree, *rest)


def map_tensors(function: Callable[[Tensor], Any], tree: Tree) -> Tree:
    """`function` of the tensors among the leaves; other leaves stay as they are."""
    return _pytree.tree_map_only(Tensor, function, tree)


def paths(tree: Tree) -> list[str]:
    """A readable name of each leaf, in the order of `leaves`: `layer1.weight`, `[0].x`, or `` ."""
    return ["".join(_step(key) for key in path).removeprefix(".") for path, _ in _with_path(tree)]


def add(a: Tree, b: Tree, *, alpha: float = 1.0) -> Tree:
    """a + alpha b."""
    return map(lambda x, y: x + alpha * y, a, b)


def scale(tree: Tree, factor: float) -> Tree:
    """factor times each leaf."""
    return map(lambda x: factor * x, tree)


def dot(a: Tree, b: Tree) -> Tensor:
    """sum over all leaves of conj(a) b: a scalar tensor."""
    return sum_scalars([(x.conj() * y).sum() for x, y in zip(leaves(a), leaves(b), strict=True)])


def norm(tree: Tree) -> Tensor:
    """Euclidean norm over all leaves: a scalar tensor."""
    return dot(tree, tree).real.sqrt()


def size(tree: Tree) -> int:
    """How many numbers all leaves hold."""
    return sum(leaf.numel() for leaf in leaves(tree))


def ravel(tree: Tree) -> tuple[Tensor, Callable[[Tensor], Tree]]:
    """All leaves as one vector, and the function that shapes such a vector like the tree."""
    flat, structure = flatten(tree)
    shapes = [leaf.shape for leaf in flat]
    sizes = [leaf.numel() for leaf in flat]
    dtypes = [leaf.dtype for leaf in flat]

    def unravel(vector: Tensor) -> Tree:
        parts = vector.split(sizes)
        shaped = (
            part.reshape(shape).to(dtype)
            for part, shape, dtype in zip(parts, shapes, dtypes, strict=True)
        )
        return unflatten(list(shaped), structure)

    vector = torch.cat([leaf.reshape(-1) for leaf in flat]) if flat else torch.zeros(0)
    return vector, unravel


def sum_scalars(terms: Sequence[Tensor]) -> Tensor:
    """The sum of scalar tensors; zero for none of them."""
    return torch.stack(list(terms)).sum() if terms else torch.zeros(())


def _with_path(tree: Tree) -> list[tuple[tuple[Any, ...], Any]]:
    return _pytree.tree_flatten_with_path(tree)[0]


def _step(key: Any) -> str:
    if isinstance(key, _pytree.MappingKey):
        return f".{key.key}"
    if isinstance(key, _pytree.GetAttrKey):
        return f".{key.name}"
    return str(key)
