"""Update rules as pure functions of pytrees: the step common to all rules, leaves and options.

An option (a learning rate, a decay, an average) is a constant if it is a Python number. As a tensor it
may require grad, be mapped over by vmap, or carry a tangent; nothing here looks at the values of a
tensor.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from math import inf
from numbers import Real
from typing import Any, Final, NamedTuple, final

import torch
from torch import Tensor

from hoglib._core.messages import validation
from hoglib._core.torch_api import pytree
from hoglib._core.torch_api.torch_modes import without_stand_ins
from hoglib.errors import ArgumentTypeError, ArgumentValueError

Tree = Any
Option = float | Tensor  # an option of a rule
Params = Any  # a pytree of tensors
State = Any  # a pytree of tensors and Python numbers

# (g, memory) -> (u, memory'), for one leaf
Direction = Callable[..., tuple[Tensor, tuple[Tensor, ...]]]


class GradientTransformation(NamedTuple):
    """An update rule.

        state = init(params)        params', state' = update(params, grads, state)

    Args:
        init: ``init(params) -> state``.
        update: ``update(params, grads, state) -> (params, state)``, without changes in place.

    Example:
        >>> def update(params, grads, state):
        ...     return {n: p - 0.1 * grads[n].sign() for n, p in params.items()}, state
        >>> signs = hog.meta.GradientTransformation(lambda params: {}, update)
        >>> maml = hog.MAML(nn.Linear(2, 1), F.mse_loss, rule=signs)
    """

    init: Callable[[Params], State]
    update: Callable[[Params, Params, State], tuple[Params, State]]


def transformation(
    direction_at: Callable[[int], Direction],
    slots: Sequence[str],
    lr: object,
    weight_decay: object,
    *,
    decoupled: bool = False,
) -> GradientTransformation:
    """The rule with direction_at(t) as its direction in step t = 1, 2, ...

        g <- g + lambda theta        u, memory' = direction(g, memory)        theta' = theta - lr u

    decoupled: subtract the decay from theta: theta' = (1 - lr lambda) theta - lr u. slots: names of the
    trees like params that a direction keeps from step to step. If lr is a function of the step, the
    state has a count "at" for it. A rule without slots and such a function has an empty state.
    """
    schedule = lr if callable(lr) and not isinstance(lr, Tensor) else None
    lr = check_rates("lr", lr) if schedule is None else lr
    weight_decay = check_rates("weight_decay", weight_decay, zero=True)
    counts = {**({"step": 0} if slots else {}), **({} if schedule is None else {"at": 0})}
    entries = {*counts, *slots}

    def init(params: Params) -> State:
        return {**counts, **{slot: pytree.map(torch.zeros_like, params) for slot in slots}}

    def update(params: Params, grads: Params, state: State) -> tuple[Params, State]:
        with without_stand_ins():  # no call here needs one, and each look-up takes time
            if entries and (not isinstance(state, dict) or state.keys() != entries):
                raise ArgumentValueError(
                    f"state: expected a dict of {', '.join(sorted(entries))}, got "
                    f"{validation.describe(state)}; start from the rule's init(params)."
                )
            step = state["step"] + 1 if slots else 0
            rates = lr
            if schedule is not None:
                rates = check_rates("lr(step)", schedule(state["at"]), zero=True)
            direction = direction_at(step)
            leaves = Leaves(params)
            updated, kept = [], []
            gs, lrs = leaves.matching_real("grads", grads), option_of_each("lr", rates, leaves)
            decays = option_of_each("weight_decay", weight_decay, leaves)
            kinds = [leaves.matching_real(f"state[{slot!r}]", state[slot]) for slot in slots]
            # strict=False: an option may be an endless `repeat`
            rows = zip(leaves.real, gs, lrs, decays, *kinds, strict=False)
            for p, g, rate, decay, *memory in rows:
                if isinstance(decay, Tensor) or decay != 0:
                    # from theta before the step, like torch.optim.AdamW
                    if decoupled:
                        p = p * (1 - rate * decay)
                    else:
                        g = plus(g, decay, p)
                u, remembered = direction(g, *memory)
                updated.append(minus(p, rate, u))
                kept.append(remembered)
            new = leaves.tree(updated)
            if not entries:
                return new, state
            trees = {slot: leaves.tree([row[i] for row in kept]) for i, slot in enumerate(slots)}
            return new, {**{name: state[name] + 1 for name in counts}, **trees}

    return GradientTransformation(init, update)


def plus(x: Tensor, a: Option, y: Tensor) -> Tensor:
    """x + a y."""
    # torch.add takes alpha as a Python number only; addcmul also has a derivative by the factor
    return torch.addcmul(x, y, a) if isinstance(a, Tensor) else torch.add(x, y, alpha=a)


def minus(x: Tensor, a: Option, y: Tensor) -> Tensor:
    """x - a y."""
    return torch.addcmul(x, y, a, value=-1) if isinstance(a, Tensor) else torch.add(x, y, alpha=-a)


# The smallest normal number of each dtype.
_SMALLEST = {x: torch.finfo(x).tiny for x in (torch.float32, torch.float64, torch.bfloat16)}


def safe_sqrt(v: Tensor) -> Tensor:
    """sqrt(v) with derivative 0 at v = 0, and 0 for a v that rounding made negative.

    The derivative of torch.sqrt at 0 is infinite, and becomes NaN when multiplied by zero. So v is
    clamped to the smallest normal number. Its root, 1e-19 in float32 and 1e-154 in float64, is
    negligible beside any eps, and the derivative of `clamp` below it is 0. (An exact zero by two
    `where` would take three more operations.) For float16 this root would be 2e-4: float16 is computed
    in float32.
    """
    if v.dtype is torch.float16:
        return safe_sqrt(v.float()).half()
    return v.clamp_min(_SMALLEST[v.dtype]).sqrt()


@final
class Leaves:
    """The leaves of params in order; complex leaves as pairs of real numbers, as in torch.optim.

    A dict of tensors, by far the most common tree, has a path of its own: torch's pytree functions
    take longer for it than a step of gradient descent.
    """

    __slots__ = ("_complex", "_flat", "original", "params", "real")

    def __init__(self, params: Tree) -> None:
        self.params: Final = params
        # a plain dict of tensors
        self._flat = type(params) is dict and all(isinstance(p, Tensor) for p in params.values())
        self.original: list[Tensor] = list(params.values()) if self._flat else pytree.leaves(params)
        self._complex = any(map(torch.is_complex, self.original))  # at least one leaf is complex
        self.real = [*map(pytree.as_real, self.original)] if self._complex else self.original

    def matching(self, what: str, tree: Tree) -> list[Any]:
        """The leaves of a tree with the structure of params, in the order of params' leaves."""
        if self._flat and type(tree) is dict and tree.keys() == self.params.keys():
            return [tree[name] for name in self.params]
        found: list[Any] = []
        try:
            pytree.map(lambda _, leaf: found.append(leaf), self.params, tree)
        except (ValueError, TypeError) as error:
            raise validation.other_structure(what, tree, self.params) from error
        return found

    def matching_real(self, what: str, tree: Tree) -> list[Tensor]:
        """As `matching`, for tensors in the shapes of params; complex ones as pairs of numbers."""
        found = self.matching(what, tree)
        for i, (leaf, p) in enumerate(zip(found, self.original, strict=True)):
            if not isinstance(leaf, Tensor) or leaf.shape != p.shape:
                raise ArgumentValueError(
                    f"{self.named(what, i)}: expected a tensor of shape {tuple(p.shape)} as in params, "
                    f"got {validation.describe(leaf)}; pass `torch.zeros_like(p)` where there is none."
                )
        return [*map(pytree.as_real, found)] if any(map(torch.is_complex, found)) else found

    def named(self, what: str, index: int) -> str:
        """The name of leaf `index` of the tree `what`, for messages."""
        return validation.leaf_name(what, pytree.paths(self.params)[index])

    def tree(self, leaves: list[Tensor]) -> Tree:
        """The tree of params with other leaves, given as real tensors."""
        made = leaves
        if self._complex:
            pairs = zip(leaves, self.original, strict=True)
            made = [torch.view_as_complex(x) if p.is_complex() else x for x, p in pairs]
        if self._flat:
            return dict(zip(self.params, made, strict=True))
        return pytree.unflatten(made, pytree.flatten(self.params)[1])


def check_number(what: str, value: object, *, below: float = inf) -> Option:
    """Check a number of at least 0 and less than `below`, or a real tensor with one number."""
    if isinstance(value, Tensor):
        return _with_one_number(what, validation.real(what, value), "")
    found = _number(what, value, "a number or a tensor with one")
    if not 0 <= found < below:
        bound = "" if below == inf else f" and less than {below:g}"
        raise ArgumentValueError(
            f"{what}: expected a finite number of at least 0{bound}, got {value}; "
            "pass one from this range."
        )
    return found


def check_betas(value: object) -> tuple[Option, Option]:
    """Check a pair of numbers, each less than 1 as by `check_number`."""
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise ArgumentTypeError(
            f"betas: expected a pair of numbers or tensors, got {validation.describe(value)}; pass "
            "two, as in `(0.9, 0.999)`."
        )
    first, second = (check_number(f"betas[{i}]", x, below=1) for i, x in enumerate(value))
    return first, second


def check_rates(what: str, value: object, *, zero: bool = False) -> Any:
    """Check a positive number (with `zero` also 0), a real tensor, or a tree of these."""
    if type(value) is float or type(value) is int:  # the usual case: leaf names below take time
        return _rate(what, value, zero)
    leaves, structure = pytree.flatten(value)
    pairs = zip(pytree.paths(value), leaves, strict=True)
    rates = [_rate(validation.leaf_name(what, name), leaf, zero) for name, leaf in pairs]
    return pytree.unflatten(rates, structure)


def option_of_each(what: str, value: object, leaves: Leaves) -> Iterable[Option]:
    """The option for each leaf of params. It keeps the dtype and shape of the leaf."""
    if isinstance(value, float):
        return repeat(value)
    if isinstance(value, Tensor) and not isinstance(leaves.params, Tensor):
        value = without_dims(_with_one_number(what, value, " or a tree like params"))
        return [to_leaf(value, leaf) for leaf in leaves.real]
    found = leaves.matching(what, value)
    if not all(isinstance(rate, float | Tensor) for rate in found):
        raise validation.other_structure(what, value, leaves.params)
    pairs = enumerate(zip(found, leaves.real, strict=True))
    return [to_leaf(_broadcast(what, i, rate, leaves), leaf) for i, (rate, leaf) in pairs]


def to_leaf(value: Option, leaf: Tensor) -> Option:
    """An option in the dtype and on the device of a leaf."""
    if not isinstance(value, Tensor) or (value.dtype is leaf.dtype and value.device == leaf.device):
        return value
    return value.to(device=leaf.device, dtype=leaf.dtype)


def without_dims(value: Option) -> Option:
    """An option as a 0-dim tensor. Call this at each use: a view made under no_grad has no graph."""
    return value.reshape(()) if isinstance(value, Tensor) and value.dim() else value


def _rate(what: str, value: object, zero: bool) -> Option:
    if isinstance(value, Tensor):
        return validation.real(what, value)
    _number(what, value, "a number, a tensor with one, or a tree like params of them")
    return check_number(what, value) if zero else validation.positive(what, value)


def _number(what: str, value: object, expected: str) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ArgumentTypeError(
            f"{what}: expected {expected}, got {validation.describe(value)}; convert it, for instance "
            f"with `float(...)`."
        )
    return float(value)


def _with_one_number(what: str, value: Tensor, otherwise: str) -> Tensor:
    if value.numel() != 1:
        hint = "give each parameter its own in a dict by name" if otherwise else "take one of them"
        raise ArgumentValueError(
            f"{what}: expected a tensor with one number{otherwise}, got {validation.describe(value)}; "
            f"{hint}."
        )
    return value


def _broadcast(what: str, index: int, rate: Option, leaves: Leaves) -> Option:
    if not isinstance(rate, Tensor) or rate.numel() == 1:
        return without_dims(rate)
    p = leaves.original[index]
    ends = zip(reversed(rate.shape), reversed(p.shape), strict=False)
    if rate.dim() > p.dim() or any(a not in (1, b) for a, b in ends):
        raise ArgumentValueError(
            f"{leaves.named(what, index)}: expected a shape that broadcasts to that of its parameter, "
            f"{tuple(p.shape)}, got {tuple(rate.shape)}; give it one number, or one for each of the "
            f"parameter's."
        )
    return rate.unsqueeze(-1) if p.is_complex() else rate
