"""The leaves of parameters, and those of trees beside them, as the update rules compute with them."""

from collections.abc import Iterable
from itertools import repeat
from math import inf
from numbers import Real
from typing import Any, Final, final

import torch
from torch import Tensor

from hoglib._core import pytree, validation
from hoglib.errors import ArgumentTypeError, ArgumentValueError

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
        self.original: list[Tensor] = list(params.values()) if self._flat else pytree.leaves(params)
        self.real = [as_real(p) for p in self.original]

    def beside(self, what: str, tree: Tree) -> list[Any]:
        """The leaves of a tree with the structure of params, in the order of those of params."""
        if self._flat and type(tree) is dict and tree.keys() == self.params.keys():
            return [tree[name] for name in self.params]
        found: list[Any] = []
        try:
            pytree.map(lambda _, leaf: found.append(leaf), self.params, tree)
        except (ValueError, TypeError) as error:
            raise validation.other_structure(what, tree, self.params) from error
        return found

    def real_beside(self, what: str, tree: Tree) -> list[Tensor]:
        """The same of a tree of tensors in the shapes of params, complex ones as pairs of numbers."""
        found = self.beside(what, tree)
        for i, (leaf, p) in enumerate(zip(found, self.original, strict=True)):
            if not isinstance(leaf, Tensor) or leaf.shape != p.shape:
                raise ArgumentValueError(
                    f"{self.named(what, i)}: expected a tensor of shape {tuple(p.shape)} as in params, "
                    f"got {validation.describe(leaf)}; where there is none put `torch.zeros_like(p)`."
                )
        return [as_real(leaf) for leaf in found]

    def named(self, what: str, index: int) -> str:
        """What to call a leaf of such a tree in a message."""
        name = pytree.paths(self.params)[index]
        return f"{what}[{name!r}]" if name else what

    def tree(self, leaves: list[Tensor]) -> Tree:
        """The tree of params with other leaves, which are complex where those of params are."""
        made = [
            torch.view_as_complex(leaf) if p.is_complex() else leaf
            for leaf, p in zip(leaves, self.original, strict=True)
        ]
        if self._flat:
            return dict(zip(self.params, made, strict=True))
        return pytree.unflatten(made, pytree.flatten(self.params)[1])


# === Options of the update rules: learning rates, decays and averages, fixed or learned.
#
# An option is a Python number, which is a constant, or a tensor, which may require grad, be mapped
# over
# by vmap or carry a tangent. A tensor is taken as it is: nothing here looks at its values.

Option = float | Tensor


def number(what: str, value: Any, *, below: float = inf) -> Option:
    """A number of at least 0 and less than `below`, or a real tensor with one number."""
    if isinstance(value, Tensor):
        return _with_one_number(what, validation.real(what, value), "")
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ArgumentTypeError(
            f"{what}: expected a number or a tensor with one, got {validation.describe(value)}; "
            f"convert it, for instance with `float({what})`."
        )
    found = float(value)
    if not 0 <= found < below:
        bound = "" if below == inf else f" and less than {below:g}"
        raise ArgumentValueError(
            f"{what}: expected a finite number of at least 0{bound}, got {value}; choose one in there."
        )
    return found


def pair(what: str, value: Any, *, below: float) -> tuple[Option, Option]:
    """Two of them."""
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise ArgumentTypeError(
            f"{what}: expected a pair of numbers or tensors, got {validation.describe(value)}; pass "
            f"two of them, as in `(0.9, 0.999)`."
        )
    first, second = (number(f"{what}[{i}]", entry, below=below) for i, entry in enumerate(value))
    return first, second


def rates(what: str, value: Any, *, zero: bool = False) -> Any:
    """A positive number (with `zero` also 0), a real tensor, or a tree of such."""
    leaves, structure = pytree.flatten(value)
    names = [f"{what}[{name!r}]" if name else what for name in pytree.paths(value)]
    return pytree.unflatten(
        [_rate(name, leaf, zero) for name, leaf in zip(names, leaves, strict=True)], structure
    )


def each(what: str, value: Any, leaves: Leaves) -> Iterable[Option]:
    """The rate of each leaf of params; none changes the shape or the dtype of what it multiplies."""
    if isinstance(value, float):
        return repeat(value)
    if isinstance(value, Tensor) and not isinstance(leaves.params, Tensor):
        value = one(_with_one_number(what, value, " or a tree like params"))
        return [like(value, leaf) for leaf in leaves.real]
    found = leaves.beside(what, value)
    if not all(isinstance(rate, float | Tensor) for rate in found):
        raise validation.other_structure(what, value, leaves.params)
    return [
        like(_broadcast(what, i, rate, leaves), leaf)
        for i, (rate, leaf) in enumerate(zip(found, leaves.real, strict=True))
    ]


def like(value: Option, leaf: Tensor) -> Option:
    """An option in the dtype and on the device of the real tensor that it meets."""
    if not isinstance(value, Tensor) or (value.dtype is leaf.dtype and value.device == leaf.device):
        return value
    return value.to(device=leaf.device, dtype=leaf.dtype)


def one(value: Option) -> Option:
    """An option without dimensions. Taken where it is used: a view made under no_grad has no graph."""
    return value.reshape(()) if isinstance(value, Tensor) and value.dim() else value


def _rate(what: str, value: Any, zero: bool) -> Option:
    if isinstance(value, Tensor):
        return validation.real(what, value)
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ArgumentTypeError(
            f"{what}: expected a number, a tensor with one, or a tree like params of numbers and "
            f"tensors, got {validation.describe(value)}; convert it, for instance with `float(...)`."
        )
    return number(what, value) if zero else validation.positive(what, value)


def _with_one_number(what: str, value: Tensor, otherwise: str) -> Tensor:
    if value.numel() != 1:
        advice = (
            "give each parameter its own in a dict by name" if otherwise else "take one of them"
        )
        raise ArgumentValueError(
            f"{what}: expected a tensor with one number{otherwise}, got {validation.describe(value)}; "
            f"{advice}."
        )
    return value


def _broadcast(what: str, index: int, rate: Option, leaves: Leaves) -> Option:
    if not isinstance(rate, Tensor) or rate.numel() == 1:
        return one(rate)
    p = leaves.original[index]
    ends = zip(reversed(rate.shape), reversed(p.shape), strict=False)
    if rate.dim() > p.dim() or any(a not in (1, b) for a, b in ends):
        raise ArgumentValueError(
            f"{leaves.named(what, index)}: expected a shape that broadcasts to that of its parameter, "
            f"{tuple(p.shape)}, got {tuple(rate.shape)}; give it one number, or one for each of the "
            f"parameter's."
        )
    return rate.unsqueeze(-1) if p.is_complex() else rate
