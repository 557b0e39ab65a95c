r"""Update rules of inner loops: torch.optim's, as pure functions that can be differentiated.

A rule is two functions: `init(params) -> state` and `update(params, grads, state) -> (params, state)`.
Nothing is changed in place, so a gradient flows through every update, to the parameters and to the
options that are tensors. All rules are

    g <- g + lambda theta                            weight decay lambda
    u, memory' = direction(g, memory)                what the rules differ in
    theta' = theta - lr u

What all of them take: lr is a positive number, a tensor with one number, or a tree like params whose
leaves, numbers or tensors, broadcast to its: a rate for each tensor or each element. weight_decay
likewise, and may be 0. Every other number may be a tensor with one number. Params are any pytree of
tensors; complex ones are pairs of real numbers, as in torch.optim. Dtypes and devices stay those of
params. The state is a dict of the step count, an int, and of trees like params; that of plain gradient
descent is empty. Tensors are taken as they are, whatever their values; of numbers that cannot be
meant, and of trees of another structure than params, the rules raise ValueError or TypeError.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hoglib import _arguments as arguments
from hoglib.meta import _options as options
from hoglib.meta._options import Option
from hoglib.meta._update import Direction, Params, Rule, plus, root, rule

__all__ = ["RULES", "Params", "Rule", "adam", "adamw", "momentum", "rmsprop", "sgd"]


def sgd(
    lr: Any,
    *,
    momentum: Option = 0.0,
    dampening: Option = 0.0,
    weight_decay: Any = 0.0,
    nesterov: bool = False,
) -> Rule:
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
    mu = options.number("momentum", momentum)
    tau = options.number("dampening", dampening)
    has_momentum = isinstance(mu, Tensor) or mu != 0
    if arguments.flag("nesterov", nesterov) and not has_momentum:
        raise arguments.WrongValue(
            "nesterov: expected a momentum greater than 0 with nesterov=True, got momentum=0; pass "
            "momentum=0.9, for instance."
        )
    if nesterov and (isinstance(tau, Tensor) or tau != 0):
        raise arguments.WrongValue(
            f"nesterov: expected dampening=0 with nesterov=True, got {arguments.describe(dampening)}; "
            f"leave dampening out."
        )

    def at(step: int) -> Direction:
        mu_, keep = options.one(mu), 1 - options.one(tau)

        def direction(g: Tensor, b: Tensor) -> tuple[Tensor, tuple[Tensor]]:
            m = options.like(mu_, g)
            if isinstance(step, int) and step == 1:
                b = g
            else:
                plain = isinstance(keep, float) and keep == 1
                more = plus(g, m, b) if plain else plus(m * b, options.like(keep, g), g)
                b = torch.where(step == 1, g, more) if isinstance(step, Tensor) else more
            return (plus(g, m, b) if nesterov else b), (b,)

        return direction

    if has_momentum:
        return rule(at, ("momentum",), lr, weight_decay)
    return rule(lambda _: lambda g: (g, ()), (), lr, weight_decay)


def momentum(
    lr: Any,
    *,
    momentum: Option = 0.9,
    dampening: Option = 0.0,
    weight_decay: Any = 0.0,
    nesterov: bool = False,
) -> Rule:
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
) -> Rule:
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
) -> Rule:
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
) -> Rule:
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
    average = options.number("alpha", alpha, below=1)
    epsilon, mu = options.number("eps", eps), options.number("momentum", momentum)
    arguments.flag("centered", centered)
    has_momentum = isinstance(mu, Tensor) or mu != 0

    def at(step: int) -> Direction:
        weight, eps_, mu_ = 1 - options.one(average), options.one(epsilon), options.one(mu)

        def direction(g: Tensor, v: Tensor, *rest: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
            w = options.like(weight, g)
            v = torch.lerp(v, g * g, w)
            variance, kept = v, [v]
            if centered:
                a = torch.lerp(rest[0], g, w)
                variance = torch.addcmul(v, a, a, value=-1)
                kept.append(a)
            u = g / (root(variance) + options.like(eps_, g))
            if has_momentum:
                u = plus(u, options.like(mu_, g), rest[-1])
                kept.append(u)
            return u, tuple(kept)

        return direction

    slots = ("square", *(("mean",) if centered else ()), *(("momentum",) if has_momentum else ()))
    return rule(at, slots, lr, weight_decay)


def _adam(
    lr: Any, betas: Any, eps: Any, weight_decay: Any, amsgrad: bool, *, decoupled: bool
) -> Rule:
    beta1, beta2 = options.pair("betas", betas, below=1)
    epsilon = options.number("eps", eps)
    arguments.flag("amsgrad", amsgrad)

    def at(step: int) -> Direction:
        b1, b2 = options.one(beta1), options.one(beta2)
        weight1, weight2 = 1 - b1, 1 - b2
        correction = 1 - b1**step
        # u = m / (scale slope + floor), where what all leaves have in common is computed once
        slope, floor = correction / (1 - b2**step) ** 0.5, options.one(epsilon) * correction

        def direction(g: Tensor, *memory: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
            m = torch.lerp(memory[0], g, options.like(weight1, g))
            v = torch.lerp(memory[1], g * g, options.like(weight2, g))
            kept = (m, v, torch.maximum(memory[2], v)) if amsgrad else (m, v)
            scale = root(kept[-1])
            u = m / (scale * options.like(slope, g) + options.like(floor, g))
            return u, kept

        return direction

    slots = ("mean", "square", "largest") if amsgrad else ("mean", "square")
    return rule(at, slots, lr, weight_decay, decoupled=decoupled)


RULES: dict[str, Callable[..., Rule]] = {
    "sgd": sgd,
    "momentum": momentum,
    "adam": adam,
    "adamw": adamw,
    "rmsprop": rmsprop,
}
