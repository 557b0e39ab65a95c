"""Options of the update rules: learning rates, decays and averages, fixed or learned.

An option is a Python number, which is a constant, or a tensor, which may require grad, be mapped over
by vmap or carry a tangent. A tensor is taken as it is: nothing here looks at its values.
"""

from collections.abc import Iterable
from itertools import repeat
from math import inf
from numbers import Real
from typing import Any

from torch import Tensor

from hoglib import _arguments as arguments
from hoglib import _tree
from hoglib.meta._leaves import Leaves

Option = float | Tensor


def number(what: str, value: Any, *, below: float = inf) -> Option:
    """A number of at least 0 and less than `below`, or a real tensor with one number."""
    if isinstance(value, Tensor):
        return _with_one_number(what, arguments.real(what, value), "")
    if isinstance(value, bool) or not isinstance(value, Real):
        raise arguments.WrongType(
            f"{what}: expected a number or a tensor with one, got {arguments.describe(value)}; "
            f"convert it, for instance with `float({what})`."
        )
    found = float(value)
    if not 0 <= found < below:
        bound = "" if below == inf else f" and less than {below:g}"
        raise arguments.WrongValue(
            f"{what}: expected a finite number of at least 0{bound}, got {value}; choose one in there."
        )
    return found


def pair(what: str, value: Any, *, below: float) -> tuple[Option, Option]:
    """Two of them."""
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise arguments.WrongType(
            f"{what}: expected a pair of numbers or tensors, got {arguments.describe(value)}; pass "
            f"two of them, as in `(0.9, 0.999)`."
        )
    first, second = (number(f"{what}[{i}]", entry, below=below) for i, entry in enumerate(value))
    return first, second


def rates(what: str, value: Any, *, zero: bool = False) -> Any:
    """A positive number (with `zero` also 0), a real tensor, or a tree of such."""
    leaves, structure = _tree.flatten(value)
    names = [f"{what}[{name!r}]" if name else what for name in _tree.paths(value)]
    return _tree.unflatten(
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
        raise arguments.other_structure(what, value, leaves.params)
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
        return arguments.real(what, value)
    if isinstance(value, bool) or not isinstance(value, Real):
        raise arguments.WrongType(
            f"{what}: expected a number, a tensor with one, or a tree like params of numbers and "
            f"tensors, got {arguments.describe(value)}; convert it, for instance with `float(...)`."
        )
    return number(what, value) if zero else arguments.positive(what, value)


def _with_one_number(what: str, value: Tensor, otherwise: str) -> Tensor:
    if value.numel() != 1:
        advice = (
            "give each parameter its own in a dict by name" if otherwise else "take one of them"
        )
        raise arguments.WrongValue(
            f"{what}: expected a tensor with one number{otherwise}, got {arguments.describe(value)}; "
            f"{advice}."
        )
    return value


def _broadcast(what: str, index: int, rate: Option, leaves: Leaves) -> Option:
    if not isinstance(rate, Tensor) or rate.numel() == 1:
        return one(rate)
    p = leaves.original[index]
    ends = zip(reversed(rate.shape), reversed(p.shape), strict=False)
    if rate.dim() > p.dim() or any(a not in (1, b) for a, b in ends):
        raise arguments.WrongValue(
            f"{leaves.named(what, index)}: expected a shape that broadcasts to that of its parameter, "
            f"{tuple(p.shape)}, got {tuple(rate.shape)}; give it one number, or one for each of the "
            f"parameter's."
        )
    return rate.unsqueeze(-1) if p.is_complex() else rate
