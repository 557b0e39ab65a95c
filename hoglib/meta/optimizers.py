"""What all update rules share: the step around a rule's direction, and the arithmetic of options."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hoglib._core import pytree, validation
from hoglib._core.torch_modes import without_stand_ins
from hoglib.errors import ArgumentTypeError, ArgumentValueError
from hoglib.meta import hyperparameters
from hoglib.meta.hyperparameters import Leaves, Option

Params = Any  # a pytree of tensors
State = Any  # a pytree of tensors and Python numbers

# (u, memory') of g and memory, all of one leaf
Direction = Callable[..., tuple[Tensor, tuple[Tensor, ...]]]


class GradientTransformation(NamedTuple):
    """An update rule: `init(params) -> state`, `update(params, grads, state) -> (params, state)`."""

    init: Callable[[Params], State]
    update: Callable[[Params, Params, State], tuple[Params, State]]


def transformation(
    direction_at: Callable[[int], Direction],
    slots: Sequence[str],
    lr: Any,
    weight_decay: Any,
    *,
    decoupled: bool = False,
) -> GradientTransformation:
    """The rule whose direction in the t-th step, counted from 1, is direction_at(t).

        g <- g + lambda theta        u, memory' = direction(g, memory)        theta' = theta - lr u

    decoupled takes the decay from theta: theta' = (1 - lr lambda) theta - lr u. slots name what a
    direction keeps from step to step, a tree like params each; a rule without any has no state.
    """
    lr = hyperparameters.rates("lr", lr)
    weight_decay = hyperparameters.rates("weight_decay", weight_decay, zero=True)

    entries = {"step", *slots}

    def init(params: Params) -> State:
        if not slots:
            return {}
        zeros = {slot: pytree.map(torch.zeros_like, params) for slot in slots}
        return {"step": 0, **zeros}

    def update(params: Params, grads: Params, state: State) -> tuple[Params, State]:
        with without_stand_ins():  # nothing here needs a stand-in, and each call that it sees costs
            if slots and (not isinstance(state, dict) or state.keys() != entries):
                raise ArgumentValueError(
                    f"state: expected a dict of {', '.join(sorted(entries))}, got "
                    f"{validation.describe(state)}; begin with what the rule's init(params) gives."
                )
            step = state["step"] + 1 if slots else 0
            direction = direction_at(step)
            leaves = Leaves(params)
            updated, kept = [], []
            for p, g, rate, decay, *memory in zip(
                leaves.real,
                leaves.real_beside("grads", grads),
                hyperparameters.each("lr", lr, leaves),
                hyperparameters.each("weight_decay", weight_decay, leaves),
                *[leaves.real_beside(f"state[{slot!r}]", state[slot]) for slot in slots],
                strict=False,  # options may repeat without end
            ):
                if isinstance(decay, Tensor) or decay != 0:
                    if decoupled:
                        p = p * (1 - rate * decay)
                    else:
                        g = plus(g, decay, p)
                u, remembered = direction(g, *memory)
                updated.append(minus(p, rate, u))
                kept.append(remembered)
            new = leaves.tree(updated)
            if not slots:
                return new, state
            trees = {slot: leaves.tree([row[i] for row in kept]) for i, slot in enumerate(slots)}
            return new, {"step": step, **trees}

    return GradientTransformation(init, update)


def plus(x: Tensor, a: Option, y: Tensor) -> Tensor:
    """x + a y."""
    return torch.addcmul(x, y, a) if isinstance(a, Tensor) else torch.add(x, y, alpha=a)


def minus(x: Tensor, a: Option, y: Tensor) -> Tensor:
    """x - a y."""
    return torch.addcmul(x, y, a, value=-1) if isinstance(a, Tensor) else torch.add(x, y, alpha=-a)


def root(v: Tensor) -> Tensor:
    """sqrt(v), with derivative 0 at 0 by convention; 0 for a v that rounding made negative.

    The derivative of torch.sqrt at 0 is infinite, and NaN once it meets a zero. Here v is no less than
    the smallest normal number, whose root, 1e-19 in float32 and 1e-154 in float64, is as nothing beside
    any eps; `clamp` has derivative 0 below it, and an exact zero from two `where` takes three more
    operations. float16, whose smallest number has a root of 2e-4, borrows the range of float32.
    """
    if v.dtype is torch.float16:
        return root(v.float()).half()
    return v.clamp_min(_SMALLEST[v.dtype]).sqrt()


_SMALLEST = {
    dtype: torch.finfo(dtype).tiny for dtype in (torch.float32, torch.float64, torch.bfloat16)
}


# === Update rules of inner loops: torch.optim's, as pure functions that can be differentiated.
#
# A rule is two functions: `init(params) -> state` and `update(params, grads, state) -> (params,
# state)`.
# Nothing is changed in place, so a gradient flows through every update, to the parameters and to
# the
# options that are tensors. All rules are
#
#     g <- g + lambda theta                            weight decay lambda
#     u, memory' = direction(g, memory)                what the rules differ in
#     theta' = theta - lr u
#
# What all of them take: lr is a positive number, a tensor with one number, or a tree like params
# whose
# leaves, numbers or tensors, broadcast to its: a rate for each tensor or each element. weight_decay
# likewise, and may be 0. Every other number may be a tensor with one number. Params are any pytree
# of
# tensors; complex ones are pairs of real numbers, as in torch.optim. Dtypes and devices stay those
# of
# params. The state is a dict of the step count, an int, and of trees like params; that of plain
# gradient
# descent is empty. Tensors are taken as they are, whatever their values; of numbers that cannot be
# meant, and of trees of another structure than params, the rules raise ValueError or TypeError.

__all__ = [
    "RULES",
    "GradientTransformation",
    "Params",
    "adam",
    "adamw",
    "momentum",
    "rmsprop",
    "sgd",
]


def sgd(
    lr: Any,
    *,
    momentum: Option = 0.0,
    dampening: Option = 0.0,
    weight_decay: Any = 0.0,
    nesterov: bool = False,
) -> GradientTransformation:
    r"""Gradient descent, with momentum mu and dampening tau.

        g <- g + lambda theta
        b' = mu b + (1 - tau) g, in the first step g        u = b', with nesterov g + mu b'
        theta' = theta - lr u

    Without momentum u = g. lambda is weight_decay.
    Raises TypeError and ValueError for options of the wrong kind, for nesterov without momentum or
    with dampening, and, in update, for trees that are not like params.
    Source: as torch.optim.SGD; Sutskever et al., On the importance of initialization and momentum in
    deep learning, 2013, for nesterov.
    """
    mu = hyperparameters.number("momentum", momentum)
    tau = hyperparameters.number("dampening", dampening)
    has_momentum = isinstance(mu, Tensor) or mu != 0
    if validation.flag("nesterov", nesterov) and not has_momentum:
        raise ArgumentValueError(
            "nesterov: expected a momentum greater than 0 with nesterov=True, got momentum=0; pass "
            "momentum=0.9, for instance."
        )
    if nesterov and (isinstance(tau, Tensor) or tau != 0):
        raise ArgumentValueError(
            f"nesterov: expected dampening=0 with nesterov=True, got {validation.describe(dampening)}; "
            f"leave dampening out."
        )

    def at(step: int) -> Direction:
        mu_, keep = hyperparameters.one(mu), 1 - hyperparameters.one(tau)

        def direction(g: Tensor, b: Tensor) -> tuple[Tensor, tuple[Tensor]]:
            m = hyperparameters.like(mu_, g)
            if isinstance(step, int) and step == 1:
                b = g
            else:
                plain = isinstance(keep, float) and keep == 1
                more = plus(g, m, b) if plain else plus(m * b, hyperparameters.like(keep, g), g)
                b = torch.where(step == 1, g, more) if isinstance(step, Tensor) else more
            return (plus(g, m, b) if nesterov else b), (b,)

        return direction

    if has_momentum:
        return transformation(at, ("momentum",), lr, weight_decay)
    return transformation(lambda _: lambda g: (g, ()), (), lr, weight_decay)


def momentum(
    lr: Any,
    *,
    momentum: Option = 0.9,
    dampening: Option = 0.0,
    weight_decay: Any = 0.0,
    nesterov: bool = False,
) -> GradientTransformation:
    r"""Gradient descent with momentum: `sgd` with another default.

        b' = mu b + g        theta' = theta - lr b'

    Raises as `sgd`, which has all equations.
    Source: as torch.optim.SGD; Polyak, Some methods of speeding up the convergence of iteration
    methods, 1964.
    """
    return sgd(
        lr,
        momentum=momentum,
        dampening=dampening,
        weight_decay=weight_decay,
        nesterov=nesterov,
    )


def adam(
    lr: Any,
    *,
    betas: tuple[Option, Option] = (0.9, 0.999),
    eps: Option = 1e-8,
    weight_decay: Any = 0.0,
    amsgrad: bool = False,
) -> GradientTransformation:
    r"""Adam.

        g <- g + lambda theta
        m' = beta1 m + (1 - beta1) g        v' = beta2 v + (1 - beta2) g^2        in step t
        u = (m' / (1 - beta1^t)) / (sqrt(v' / (1 - beta2^t)) + eps)
        theta' = theta - lr u

    amsgrad puts the largest v' so far in the place of v'. The square root has derivative 0 at 0, and
    so the derivatives are finite where a gradient is exactly zero and always was (a dead unit). They
    are also right: there u = c g / (sqrt(v') + eps) with sqrt(v') = d |g|, and du/dg = c / eps. It is
    large, since Adam's step is the sign of g with a slope of 1 / eps at 0; a larger eps tames it.
    Raises TypeError and ValueError for options of the wrong kind, a number outside of [0, 1) in betas,
    and, in update, trees that are not like params.
    Source: as torch.optim.Adam; Kingma and Ba, Adam: a method for stochastic optimization, 2015,
    algorithm 1; Reddi, Kale and Kumar, On the convergence of Adam and beyond, 2018, for amsgrad.
    """
    return _adam(lr, betas, eps, weight_decay, amsgrad, decoupled=False)


def adamw(
    lr: Any,
    *,
    betas: tuple[Option, Option] = (0.9, 0.999),
    eps: Option = 1e-8,
    weight_decay: Any = 0.01,
    amsgrad: bool = False,
) -> GradientTransformation:
    r"""Adam with decoupled weight decay.

        theta' = (1 - lr lambda) theta - lr u        u as in `adam` for lambda = 0

    Raises as `adam`.
    Source: as torch.optim.AdamW; Loshchilov and Hutter, Decoupled weight decay regularization, 2019,
    algorithm 2.
    """
    return _adam(lr, betas, eps, weight_decay, amsgrad, decoupled=True)


def rmsprop(
    lr: Any,
    *,
    alpha: Option = 0.99,
    eps: Option = 1e-8,
    weight_decay: Any = 0.0,
    momentum: Option = 0.0,
    centered: bool = False,
) -> GradientTransformation:
    r"""Gradient descent over a running root mean square of the gradient, with momentum mu.

        g <- g + lambda theta
        v' = alpha v + (1 - alpha) g^2        centered: a' = alpha a + (1 - alpha) g
        w = g / (sqrt(v') + eps)              centered: g / (sqrt(v' - a'^2) + eps)
        b' = mu b + w        theta' = theta - lr b'

    The square root has derivative 0 at 0, as in `adam`; a variance v' - a'^2 that rounding made
    negative, of which torch.optim.RMSprop makes NaN, counts as 0.
    Raises TypeError and ValueError for options of the wrong kind, an alpha outside of [0, 1), and, in
    update, trees that are not like params.
    Source: as torch.optim.RMSprop; Hinton, Neural networks for machine learning, 2012, lecture 6e;
    Graves, Generating sequences with recurrent neural networks, 2013, eq. 38 to 41, for centered.
    """
    average = hyperparameters.number("alpha", alpha, below=1)
    epsilon, mu = hyperparameters.number("eps", eps), hyperparameters.number("momentum", momentum)
    validation.flag("centered", centered)
    has_momentum = isinstance(mu, Tensor) or mu != 0

    def at(step: int) -> Direction:
        weight, eps_, mu_ = (
            1 - hyperparameters.one(average),
            hyperparameters.one(epsilon),
            hyperparameters.one(mu),
        )

        def direction(g: Tensor, v: Tensor, *rest: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
            w = hyperparameters.like(weight, g)
            v = torch.lerp(v, g * g, w)
            variance, kept = v, [v]
            if centered:
                a = torch.lerp(rest[0], g, w)
                variance = torch.addcmul(v, a, a, value=-1)
                kept.append(a)
            u = g / (root(variance) + hyperparameters.like(eps_, g))
            if has_momentum:
                u = plus(u, hyperparameters.like(mu_, g), rest[-1])
                kept.append(u)
            return u, tuple(kept)

        return direction

    slots = ("square", *(("mean",) if centered else ()), *(("momentum",) if has_momentum else ()))
    return transformation(at, slots, lr, weight_decay)


def _adam(
    lr: Any, betas: Any, eps: Any, weight_decay: Any, amsgrad: bool, *, decoupled: bool
) -> GradientTransformation:
    beta1, beta2 = hyperparameters.pair("betas", betas, below=1)
    epsilon = hyperparameters.number("eps", eps)
    validation.flag("amsgrad", amsgrad)

    def at(step: int) -> Direction:
        b1, b2 = hyperparameters.one(beta1), hyperparameters.one(beta2)
        weight1, weight2 = 1 - b1, 1 - b2
        correction = 1 - b1**step
        # u = m / (scale slope + floor), where what all leaves have in common is computed once
        slope, floor = correction / (1 - b2**step) ** 0.5, hyperparameters.one(epsilon) * correction

        def direction(g: Tensor, *memory: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
            m = torch.lerp(memory[0], g, hyperparameters.like(weight1, g))
            v = torch.lerp(memory[1], g * g, hyperparameters.like(weight2, g))
            kept = (m, v, torch.maximum(memory[2], v)) if amsgrad else (m, v)
            scale = root(kept[-1])
            u = m / (scale * hyperparameters.like(slope, g) + hyperparameters.like(floor, g))
            return u, kept

        return direction

    slots = ("mean", "square", "largest") if amsgrad else ("mean", "square")
    return transformation(at, slots, lr, weight_decay, decoupled=decoupled)


RULES: dict[str, Callable[..., GradientTransformation]] = {
    "sgd": sgd,
    "momentum": momentum,
    "adam": adam,
    "adamw": adamw,
    "rmsprop": rmsprop,
}


# === Update rules as a user says them: by name, by a function of the learning rate, or as they are.

EXPECTED = (
    f"one of {', '.join(RULES)}, a `hoglib.meta.GradientTransformation`, a module with "
    "init and update, or a function from a learning rate to one"
)


def rule_of(rule: Any, lr: Any, options: dict[str, Any]) -> GradientTransformation:
    """The update rule that a name, a function of the learning rate or an object stands for."""
    if isinstance(rule, str):
        return _named(validation.one_of("rule", rule, RULES), lr, options)
    if options:
        raise ArgumentValueError(
            "rule_options: expected none with a rule that is not a name, got "
            f"{', '.join(options)}; give them to the rule itself, for instance by functools.partial."
        )
    if has_both(rule):
        return GradientTransformation(rule.init, rule.update)
    if isinstance(rule, type) and issubclass(rule, torch.optim.Optimizer):
        raise ArgumentTypeError(
            f"rule: expected {EXPECTED}, got {rule.__name__} of torch.optim, which changes parameters "
            "in place; name the rule."
        )
    found = validation.function("rule", rule)(lr)
    if not has_both(found):
        raise ArgumentTypeError(
            f"rule: expected {EXPECTED}, got {validation.describe(found)} from it."
        )
    return GradientTransformation(found.init, found.update)


def has_both(rule: Any) -> bool:
    """Whether it is a rule itself."""
    return callable(getattr(rule, "init", None)) and callable(getattr(rule, "update", None))


def name_of(rule: Any) -> str:
    if isinstance(rule, str):
        return repr(rule)
    return str(getattr(rule, "__name__", type(rule).__name__))


def _named(name: str, lr: Any, options: dict[str, Any]) -> GradientTransformation:
    known = [n for n in inspect.signature(RULES[name]).parameters if n != "lr"] if options else []
    for option in options:
        if option not in known:
            raise ArgumentValueError(
                f"rule_options: expected options of {name}, which are {', '.join(known)}, got "
                f"{option!r}."
            )
    return RULES[name](lr, **options)
