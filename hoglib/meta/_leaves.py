"""The leaves of parameters, and those of trees beside them, as the update rules compute with them."""

from typing import Any, Final, final

import torch
from torch import Tensor

from hoglib import _arguments as arguments
from hoglib import _tree

Tree = Any


def as_real(x: Tensor) -> Tensor:
    """A complex tensor as pairs of real numbers, [..., 2]; a real one as it is."""
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


@final
class Leaves:
    """The leaves of params in order, complex ones as pairs of real numbers, as torch.optim has them.

    A dict of tensors is by far the commonest tree, and torch's pytrees take longer for it than a step
    of gradient descent does: it has a way of its own.
    """

    __slots__ = ("_flat", "original", "params", "real")

    def __init__(self, params: Tree) -> None:
        self.params: Final = params
        self._flat = type(params) is dict and all(isinstance(p, Tensor) for p in params.values())
        self.original: list[Tensor] = list(params.values()) if self._flat else _tree.leaves(params)
        self.real = [as_real(p) for p in self.original]

    def beside(self, what: str, tree: Tree) -> list[Any]:
        """The leaves of a tree with the structure of params, in the order of those of params."""
        if self._flat and type(tree) is dict and tree.keys() == self.params.keys():
            return [tree[name] for name in self.params]
        found: list[Any] = []
        try:
            _tree.map(lambda _, leaf: found.append(leaf), self.params, tree)
        except (ValueError, TypeError) as error:
            raise arguments.other_structure(what, tree, self.params) from error
        return found

    def real_beside(self, what: str, tree: Tree) -> list[Tensor]:
        """The same of a tree of tensors in the shapes of params, complex ones as pairs of numbers."""
        found = self.beside(what, tree)
        for i, (leaf, p) in enumerate(zip(found, self.original, strict=True)):
            if not isinstance(leaf, Tensor) or leaf.shape != p.shape:
                raise arguments.WrongValue(
                    f"{self.named(what, i)}: expected a tensor of shape {tuple(p.shape)} as in params, "
                    f"got {arguments.describe(leaf)}; where there is none put `torch.zeros_like(p)`."
                )
        return [as_real(leaf) for leaf in found]

    def named(self, what: str, index: int) -> str:
        """What to call a leaf of such a tree in a message."""
        name = _tree.paths(self.params)[index]
        return f"{what}[{name!r}]" if name else what

    def tree(self, leaves: list[Tensor]) -> Tree:
        """The tree of params with other leaves, which are complex where those of params are."""
        made = [
            torch.view_as_complex(leaf) if p.is_complex() else leaf
            for leaf, p in zip(leaves, self.original, strict=True)
        ]
        if self._flat:
            return dict(zip(self.params, made, strict=True))
        return _tree.unflatten(made, _tree.flatten(self.params)[1])
