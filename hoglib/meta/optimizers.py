"""Update rules of inner loops: torch.optim's, as pure functions that can be differentiated.

A rule is a `GradientTransformation`: `init(params) -> state` and `update(params, grads, state) ->
(params, state)`. Nothing is changed in place, so a gradient flows through every update, to the
parameters and to options given as tensors. All rules have the form

    g <- g + lambda theta                            weight decay lambda
    u, memory' = direction(g, memory)                specific to the rule
    theta' = theta - lr u

Params are any pytree of tensors; complex tensors count as pairs of real numbers, as in torch.optim.
Results keep the dtypes and devices of params. The state is a dict of the step count, an int, and of
trees like params; plain gradient descent has an empty state.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hoglib._core.messages import validation
from hoglib.errors import ArgumentTypeError, ArgumentValueError
from hoglib.meta.gradient_transformation import (
    Direction,
    GradientTransformation,
    Option,
    check_betas,
    check_number,
    plus,
    safe_sqrt,
    to_leaf,
    transformation,
    without_dims,
)

__all__ = [
    "RULES",
    "adadelta",
    "adagrad",
    "adam",
    "adamax",
    "adamw",
    "momentum",
    "radam",
    "rmsprop",
    "scheduled",
    "sgd",
]


def sgd(
    lr: object,
    *,
    momentum: Option = 0.0,
    dampening: Option = 0.0,
    weight_decay: object = 0.0,
    nesterov: bool = False,
) -> GradientTransformation:
    r"""Gradient descent, with momentum mu and dampening tau.

        g <- g + lambda theta
        b' = mu b + (1 - tau) g; in the first step b' = g    u = b'; with nesterov u = g + mu b'
        theta' = theta - lr u

    Without momentum u = g.

    Args:
        lr: The learning rate: a positive number, a tensor with one number, or a tree of numbers or
            tensors like params, each broadcast to its leaf; or a function of the step, from 0, that
            returns such a rate (`scheduled`). Tensors may be learned.
        momentum: The factor mu. Like every option below, a number or a tensor with one number.
        dampening: The factor tau on the gradient, from the second step on.
        weight_decay: The factor lambda, 0 or more, in any form of lr.
        nesterov: Use Nesterov's momentum.

    Returns:
        The rule, a `GradientTransformation`.

    Raises:
        ArgumentTypeError, ArgumentValueError: for options other than described here, for nesterov
            without momentum or with dampening; and in update, for trees without the structure of
            params.

    References:
        torch.optim.SGD; Sutskever et al., On the importance of initialization and momentum in deep
        learning, 2013 (nesterov).

    Example:
        >>> rule = hog.meta.sgd(0.1)
        >>> params = {"w": torch.tensor([1.0, 2.0])}
        >>> params, state = rule.update(params, {"w": torch.ones(2)}, rule.init(params))
        >>> params["w"]
        tensor([0.9000, 1.9000])
    """
    mu = check_number("momentum", momentum)
    tau = check_number("dampening", dampening)
    # a tensor may be learned, starting from 0: keep a slot for it
    has_momentum = isinstance(mu, Tensor) or mu != 0
    if validation.boolean("nesterov", nesterov) and not has_momentum:
        raise ArgumentValueError(
            "nesterov: expected a momentum greater than 0 with nesterov=True, got momentum=0; pass "
            "momentum=0.9, for instance."
        )
    if nesterov and (isinstance(tau, Tensor) or tau != 0):
        raise ArgumentValueError(
            f"nesterov: expected dampening=0 with nesterov=True, got {validation.describe(dampening)}; "
            f"leave dampening out."
        )

    # without_dims in each step: sgd() may be called under no_grad, where a view has no graph
    def at(step: int) -> Direction:
        mu_, keep = without_dims(mu), 1 - without_dims(tau)

        def direction(g: Tensor, b: Tensor) -> tuple[Tensor, tuple[Tensor]]:
            m = to_leaf(mu_, g)
            if isinstance(step, int) and step == 1:
                b = g
            else:
                plain = isinstance(keep, float) and keep == 1
                more = plus(g, m, b) if plain else plus(m * b, to_leaf(keep, g), g)
                # in a captured graph or under vmap the count is a tensor: no branch can depend on it
                b = torch.where(step == 1, g, more) if isinstance(step, Tensor) else more
            return (plus(g, m, b) if nesterov else b), (b,)

        return direction

    if has_momentum:
        return transformation(at, ("momentum",), lr, weight_decay)
    return transformation(lambda _: lambda g: (g, ()), (), lr, weight_decay)


def momentum(
    lr: object,
    *,
    momentum: Option = 0.9,
    dampening: Option = 0.0,
    weight_decay: object = 0.0,
    nesterov: bool = False,
) -> GradientTransformation:
    r"""Gradient descent with momentum: `sgd` with another default.

        b' = mu b + (1 - tau) g; in the first step b' = g        theta' = theta - lr b'

    Args:
        lr: The learning rate: a positive number, a tensor with one number, or a tree of numbers or
            tensors like params, each broadcast to its leaf; or a function of the step, from 0, that
            returns such a rate (`scheduled`). Tensors may be learned.
        momentum: The factor mu. Like every option below, a number or a tensor with one number.
        dampening: The factor tau on the gradient, from the second step on.
        weight_decay: The factor lambda, 0 or more, in any form of lr.
        nesterov: Use Nesterov's momentum, g + mu b' in place of b'.

    Returns:
        The rule, a `GradientTransformation`.

    Raises:
        ArgumentTypeError, ArgumentValueError: for options other than described here, for nesterov
            without momentum or with dampening; and in update, for trees without the structure of
            params.

    References:
        torch.optim.SGD; Polyak, Some methods of speeding up the convergence of iteration methods,
        1964.

    Example:
        >>> rule = hog.meta.momentum(0.1)
        >>> params = {"w": torch.tensor([1.0, 2.0])}
        >>> params, state = rule.update(params, {"w": torch.ones(2)}, rule.init(params))
        >>> params["w"]
        tensor([0.9000, 1.9000])
    """
    return sgd(
        lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay, nesterov=nesterov
    )


def adam(
    lr: object,
    *,
    betas: tuple[Option, Option] = (0.9, 0.999),
    eps: Option = 1e-8,
    weight_decay: object = 0.0,
    amsgrad: bool = False,
) -> GradientTransformation:
    r"""Adam.

        g <- g + lambda theta
        m' = beta1 m + (1 - beta1) g        v' = beta2 v + (1 - beta2) g^2        in step t
        u = (m' / (1 - beta1^t)) / (sqrt(v' / (1 - beta2^t)) + eps)
        theta' = theta - lr u

    The square root has derivative 0 at 0, so derivatives are finite if a gradient is exactly zero and
    always was (a dead unit). They are also right: there u = c g / (sqrt(v') + eps) with
    sqrt(v') = d |g|, and du/dg = c / eps. This is large, since Adam's step is the sign of g with a
    slope of 1 / eps at 0; a larger eps makes it smaller.

    Args:
        lr: The learning rate: a positive number, a tensor with one number, or a tree of numbers or
            tensors like params, each broadcast to its leaf; or a function of the step, from 0, that
            returns such a rate (`scheduled`). Tensors may be learned.
        betas: The factors (beta1, beta2) of the running averages, in [0, 1).
        eps: The number added to the square root.
        weight_decay: The factor lambda, 0 or more, in any form of lr.
        amsgrad: Use the largest v' so far in place of v'.

    Returns:
        The rule, a `GradientTransformation`.

    Raises:
        ArgumentTypeError, ArgumentValueError: for options other than described here; and in update, for
            trees without the structure of params.

    References:
        torch.optim.Adam; Kingma and Ba, Adam: a method for stochastic optimization, 2015, algorithm
        1; Reddi, Kale and Kumar, On the convergence of Adam and beyond, 2018 (amsgrad).

    Example:
        >>> rule = hog.meta.adam(0.1)
        >>> params = {"w": torch.tensor([1.0, 2.0])}
        >>> params, state = rule.update(params, {"w": torch.ones(2)}, rule.init(params))
        >>> params["w"]
        tensor([0.9000, 1.9000])
    """
    return _adam(lr, betas, eps, weight_decay, amsgrad, decoupled=False)


def adamw(
    lr: object,
    *,
    betas: tuple[Option, Option] = (0.9, 0.999),
    eps: Option = 1e-8,
    weight_decay: object = 0.01,
    amsgrad: bool = False,
) -> GradientTransformation:
    r"""Adam with decoupled weight decay.

        m' = beta1 m + (1 - beta1) g        v' = beta2 v + (1 - beta2) g^2        in step t
        u = (m' / (1 - beta1^t)) / (sqrt(v' / (1 - beta2^t)) + eps)
        theta' = (1 - lr lambda) theta - lr u

    For the derivatives at 0 see `adam`.

    Args:
        lr: The learning rate: a positive number, a tensor with one number, or a tree of numbers or
            tensors like params, each broadcast to its leaf; or a function of the step, from 0, that
            returns such a rate (`scheduled`). Tensors may be learned.
        betas: The factors (beta1, beta2) of the running averages, in [0, 1).
        eps: The number added to the square root.
        weight_decay: The factor lambda, 0 or more, in any form of lr.
        amsgrad: Use the largest v' so far in place of v'.

    Returns:
        The rule, a `GradientTransformation`.

    Raises:
        ArgumentTypeError, ArgumentValueError: for options other than described here; and in update, for
            trees without the structure of params.

    References:
        torch.optim.AdamW; Loshchilov and Hutter, Decoupled weight decay regularization, 2019,
        algorithm 2.

    Example:
        >>> rule = hog.meta.adamw(0.1)
        >>> params = {"w": torch.tensor([1.0, 2.0])}
        >>> params, state = rule.update(params, {"w": torch.ones(2)}, rule.init(params))
        >>> params["w"]
        tensor([0.8990, 1.8980])
    """
    return _adam(lr, betas, eps, weight_decay, amsgrad, decoupled=True)


def rmsprop(
    lr: object,
    *,
    alpha: Option = 0.99,
    eps: Option = 1e-8,
    weight_decay: object = 0.0,
    momentum: Option = 0.0,
    centered: bool = False,
) -> GradientTransformation:
    r"""Gradient descent, scaled by a running root mean square of the gradient, with momentum mu.

        g <- g + lambda theta
        v' = alpha v + (1 - alpha) g^2        centered: a' = alpha a + (1 - alpha) g
        w = g / (sqrt(v') + eps)              centered: g / (sqrt(v' - a'^2) + eps)
        b' = mu b + w        theta' = theta - lr b'

    The square root has derivative 0 at 0, as in `adam`. Rounding may make a variance v' - a'^2
    negative: it then counts as 0, where torch.optim.RMSprop gives NaN.

    Args:
        lr: The learning rate: a positive number, a tensor with one number, or a tree of numbers or
            tensors like params, each broadcast to its leaf; or a function of the step, from 0, that
            returns such a rate (`scheduled`). Tensors may be learned.
        alpha: The factor of the running averages, in [0, 1).
        eps: The number added to the square root.
        weight_decay: The factor lambda, 0 or more, in any form of lr.
        momentum: The factor mu.
        centered: Scale by the variance of the gradient, in place of its mean square.

    Returns:
        The rule, a `GradientTransformation`.

    Raises:
        ArgumentTypeError, ArgumentValueError: for options other than described here; and in update, for
            trees without the structure of params.

    References:
        torch.optim.RMSprop; Hinton, Neural networks for machine learning, 2012, lecture 6e; Graves,
        Generating sequences with recurrent neural networks, 2013, eq. 38 to 41 (centered).

    Example:
        >>> rule = hog.meta.rmsprop(0.01)
        >>> params = {"w": torch.tensor([1.0, 2.0])}
        >>> params, state = rule.update(params, {"w": torch.ones(2)}, rule.init(params))
        >>> params["w"]
        tensor([0.9000, 1.9000])
    """
    average = check_number("alpha", alpha, below=1)
    epsilon, mu = check_number("eps", eps), check_number("momentum", momentum)
    validation.boolean("centered", centered)
    has_momentum = isinstance(mu, Tensor) or mu != 0

    def at(step: int) -> Direction:
        weight, eps_, mu_ = 1 - without_dims(average), without_dims(epsilon), without_dims(mu)

        def direction(g: Tensor, v: Tensor, *rest: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
            # lerp: alpha v + (1 - alpha) g^2 in one operation
            w = to_leaf(weight, g)
            v = torch.lerp(v, g * g, w)
            variance, kept = v, [v]
            if centered:
                a = torch.lerp(rest[0], g, w)
                variance = torch.addcmul(v, a, a, value=-1)
                kept.append(a)
            u = g / (safe_sqrt(variance) + to_leaf(eps_, g))
            if has_momentum:
                u = plus(u, to_leaf(mu_, g), rest[-1])
                kept.append(u)
            return u, tuple(kept)

        return direction

    slots = ("square", *(("mean",) if centered else ()), *(("momentum",) if has_momentum else ()))
    return transformation(at, slots, lr, weight_decay)


def adagrad(
    lr: object,
    *,
    lr_decay: Option = 0.0,
    weight_decay: object = 0.0,
    initial_accumulator_value: Option = 0.0,
    eps: Option = 1e-10,
) -> GradientTransformation:
    r"""Gradient descent, scaled by the root of the sum of squared gradients.

        g <- g + lambda theta        v' = v + g^2
        theta' = theta - lr / (1 + (t - 1) c) g / (sqrt(v' + v_0) + eps)

    The square root has derivative 0 at 0, as in `adam`.

    Args:
        lr: The learning rate: a positive number, a tensor with one number, or a tree of numbers or
            tensors like params, each broadcast to its leaf; or a function of the step, from 0, that
            returns such a rate (`scheduled`). Tensors may be learned.
        lr_decay: The factor c, by which the rate falls with the step t.
        weight_decay: The factor lambda, 0 or more, in any form of lr.
        initial_accumulator_value: The number v_0.
        eps: The number added to the square root.

    Returns:
        The rule, a `GradientTransformation`.

    Raises:
        ArgumentTypeError, ArgumentValueError: for options other than described here; and in update, for
            trees without the structure of params.

    References:
        torch.optim.Adagrad; Duchi, Hazan and Singer, Adaptive subgradient methods for online learning
        and stochastic optimization, 2011.

    Example:
        >>> rule = hog.meta.adagrad(0.1)
        >>> params = {"w": torch.tensor([1.0, 2.0])}
        >>> params, state = rule.update(params, {"w": torch.ones(2)}, rule.init(params))
        >>> params["w"]
        tensor([0.9000, 1.9000])
    """
    decay, epsilon = check_number("lr_decay", lr_decay), check_number("eps", eps)
    start = check_number("initial_accumulator_value", initial_accumulator_value)

    def at(step: int) -> Direction:
        factor = 1 / (1 + (step - 1) * without_dims(decay))
        v_0, eps_ = without_dims(start), without_dims(epsilon)

        def direction(g: Tensor, v: Tensor) -> tuple[Tensor, tuple[Tensor]]:
            v = torch.addcmul(v, g, g)
            u = g / (safe_sqrt(v + to_leaf(v_0, g)) + to_leaf(eps_, g))
            return u * to_leaf(factor, g), (v,)

        return direction

    return transformation(at, ("squares",), lr, weight_decay)


def adadelta(
    lr: object, *, rho: Option = 0.9, eps: Option = 1e-6, weight_decay: object = 0.0
) -> GradientTransformation:
    r"""Gradient descent, scaled by the ratio of the root mean squares of steps and gradients.

        g <- g + lambda theta        v' = rho v + (1 - rho) g^2
        u = sqrt(d + eps) / sqrt(v' + eps) g        d' = rho d + (1 - rho) u^2
        theta' = theta - lr u

    Args:
        lr: The learning rate: a positive number, a tensor with one number, or a tree of numbers or
            tensors like params, each broadcast to its leaf; or a function of the step, from 0, that
            returns such a rate (`scheduled`). Tensors may be learned.
        rho: The factor of the running averages, in [0, 1).
        eps: The number added inside the square roots.
        weight_decay: The factor lambda, 0 or more, in any form of lr.

    Returns:
        The rule, a `GradientTransformation`.

    Raises:
        ArgumentTypeError, ArgumentValueError: for options other than described here; and in update, for
            trees without the structure of params.

    References:
        torch.optim.Adadelta; Zeiler, ADADELTA: An adaptive learning rate method, 2012.

    Example:
        >>> rule = hog.meta.adadelta(1.0)
        >>> params = {"w": torch.tensor([1.0, 2.0])}
        >>> params, state = rule.update(params, {"w": torch.ones(2)}, rule.init(params))
        >>> params["w"]
        tensor([0.9968, 1.9968])
    """
    average, epsilon = check_number("rho", rho, below=1), check_number("eps", eps)

    def at(step: int) -> Direction:
        weight, eps_ = 1 - without_dims(average), without_dims(epsilon)

        def direction(g: Tensor, v: Tensor, d: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            w, e = to_leaf(weight, g), to_leaf(eps_, g)
            v = torch.lerp(v, g * g, w)
            u = safe_sqrt(d + e) / safe_sqrt(v + e) * g
            return u, (v, torch.lerp(d, u * u, w))

        return direction

    return transformation(at, ("square", "step_square"), lr, weight_decay)


def adamax(
    lr: object, *, betas: object = (0.9, 0.999), eps: Option = 1e-8, weight_decay: object = 0.0
) -> GradientTransformation:
    r"""Adam with the largest gradient, which decays, in place of the root mean square.

        g <- g + lambda theta        m' = b_1 m + (1 - b_1) g
        v' = max(b_2 v, |g| + eps)        theta' = theta - lr / (1 - b_1^t) m' / v'

    Args:
        lr: The learning rate: a positive number, a tensor with one number, or a tree of numbers or
            tensors like params, each broadcast to its leaf; or a function of the step, from 0, that
            returns such a rate (`scheduled`). Tensors may be learned.
        betas: The factors b_1 of the running average and b_2 of the maximum, in [0, 1).
        eps: The number added to the magnitude of the gradient.
        weight_decay: The factor lambda, 0 or more, in any form of lr.

    Returns:
        The rule, a `GradientTransformation`.

    Raises:
        ArgumentTypeError, ArgumentValueError: for options other than described here; and in update, for
            trees without the structure of params.

    References:
        torch.optim.Adamax; Kingma and Ba, Adam: A method for stochastic optimization, 2015,
        section 7.1.

    Example:
        >>> rule = hog.meta.adamax(0.1)
        >>> params = {"w": torch.tensor([1.0, 2.0])}
        >>> params, state = rule.update(params, {"w": torch.ones(2)}, rule.init(params))
        >>> params["w"]
        tensor([0.9000, 1.9000])
    """
    beta1, beta2 = check_betas(betas)
    epsilon = check_number("eps", eps)

    def at(step: int) -> Direction:
        b1, b2, eps_ = without_dims(beta1), without_dims(beta2), without_dims(epsilon)
        factor = 1 / (1 - b1**step)

        def direction(g: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            m = torch.lerp(m, g, to_leaf(1 - b1, g))
            v = torch.maximum(v * to_leaf(b2, g), g.abs() + to_leaf(eps_, g))
            return m / v * to_leaf(factor, g), (m, v)

        return direction

    return transformation(at, ("mean", "largest"), lr, weight_decay)


def radam(
    lr: object,
    *,
    betas: object = (0.9, 0.999),
    eps: Option = 1e-8,
    weight_decay: object = 0.0,
    decoupled_weight_decay: bool = False,
) -> GradientTransformation:
    r"""Adam, whose first steps are not scaled, until the variance of the scale is finite.

        g <- g + lambda theta
        m' = b_1 m + (1 - b_1) g        v' = b_2 v + (1 - b_2) g^2
        r = 2 / (1 - b_2) - 1        r_t = r - 2 t b_2^t / (1 - b_2^t)
        s = sqrt((r_t - 4) (r_t - 2) r / ((r - 4) (r - 2) r_t))
        where r_t > 5    u = m' / (1 - b_1^t) s sqrt(1 - b_2^t) / (sqrt(v') + eps)
        else             u = m' / (1 - b_1^t)
        theta' = theta - lr u

    The square root has derivative 0 at 0, as in `adam`.

    Args:
        lr: The learning rate: a positive number, a tensor with one number, or a tree of numbers or
            tensors like params, each broadcast to its leaf; or a function of the step, from 0, that
            returns such a rate (`scheduled`). Tensors may be learned.
        betas: The factors b_1 and b_2 of the running averages, in [0, 1).
        eps: The number added to the square root.
        weight_decay: The factor lambda, 0 or more, in any form of lr.
        decoupled_weight_decay: Subtract the decay from theta, as in `adamw`.

    Returns:
        The rule, a `GradientTransformation`.

    Raises:
        ArgumentTypeError, ArgumentValueError: for options other than described here; and in update, for
            trees without the structure of params.

    References:
        torch.optim.RAdam; Liu et al., On the variance of the adaptive learning rate and beyond, 2020.

    Example:
        >>> rule = hog.meta.radam(0.1)
        >>> params = {"w": torch.tensor([1.0, 2.0])}
        >>> params, state = rule.update(params, {"w": torch.ones(2)}, rule.init(params))
        >>> params["w"]
        tensor([0.9000, 1.9000])
    """
    beta1, beta2 = check_betas(betas)
    epsilon = check_number("eps", eps)
    validation.boolean("decoupled_weight_decay", decoupled_weight_decay)

    def at(step: int) -> Direction:
        b1, b2, eps_ = without_dims(beta1), without_dims(beta2), without_dims(epsilon)
        scale, plain = _rectification(b2, step), 1 / (1 - b1**step)

        def direction(g: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            m = torch.lerp(m, g, to_leaf(1 - b1, g))
            v = torch.lerp(v, g * g, to_leaf(1 - b2, g))
            s = to_leaf(scale, g)
            factor = s / (safe_sqrt(v) + to_leaf(eps_, g))
            if isinstance(s, Tensor):
                factor = torch.where(s > 0, factor, 1)
            elif not s:
                factor = torch.ones_like(g)
            return m * to_leaf(plain, g) * factor, (m, v)

        return direction

    slots = ("mean", "square")
    return transformation(at, slots, lr, weight_decay, decoupled=decoupled_weight_decay)


def _rectification(b2: Option, step: Any) -> Any:
    """s sqrt(1 - b_2^t) of `radam`; 0 where r_t <= 5."""
    rest, r = 1 - b2**step, 2 / (1 - b2) - 1
    r_t = r - 2 * step * (1 - rest) / rest
    known = r_t > 5
    if isinstance(known, Tensor):
        # the branch that is not taken would have NaN as its derivative
        r, r_t = torch.where(known, r, 6.0), torch.where(known, r_t, 6.0)
    elif not known:
        return 0.0
    squared = (r_t - 4) * (r_t - 2) * r / ((r - 4) * (r - 2) * r_t) * rest
    return torch.where(known, squared.sqrt(), 0) if isinstance(known, Tensor) else squared**0.5


def scheduled(lr: object, scheduler: Callable[[Any], Any], *, steps: int) -> Callable[[int], Any]:
    r"""The learning rates set by a scheduler of torch.optim, as a function of the step.

        lr_i = lr f_i        f_i the scheduler's factors for a rate of `lr`

    For the argument ``lr`` of a rule: ``hog.meta.sgd(hog.meta.scheduled(...))``.

    Args:
        lr: The initial rate: a positive number, or a tensor with one number, which may be learned.
            Absolute rates of a scheduler (eta_min, max_lr) scale with lr from its present value on.
        scheduler: A function from an optimizer to the scheduler, stepped once after each step, for
            instance ``lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 30)``.
        steps: The number of steps.

    Returns:
        A function of the step, 0 to steps - 1.

    Raises:
        ArgumentTypeError: for a scheduler that depends on a metric, and for other objects.
        ArgumentValueError: for a scheduler that sets the momentum too.

    Example:
        >>> cosine = lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=4)
        >>> rates = hog.meta.scheduled(0.1, cosine, steps=4)
        >>> [round(rates(i), 4) for i in range(4)]
        [0.1, 0.0854, 0.05, 0.0146]
        >>> rule = hog.meta.sgd(rates)
    """
    validation.function("scheduler", scheduler)
    validation.at_least("steps", steps, 1)
    initial = float(lr.detach()) if isinstance(lr, Tensor) else validation.positive("lr", lr)
    # schedulers write to an optimizer: give it one that trains nothing, and read its rate
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=initial)
    stepped = scheduler(optimizer)
    kinds = torch.optim.lr_scheduler
    if not isinstance(stepped, kinds.LRScheduler) or isinstance(stepped, kinds.ReduceLROnPlateau):
        raise ArgumentTypeError(
            "scheduler: expected a function from an optimizer to a scheduler of torch.optim that "
            f"depends on the step alone, got {validation.describe(stepped)} from it."
        )
    rates = []
    for _ in range(steps):
        if optimizer.param_groups[0]["momentum"]:  # 0 unless the scheduler has set it
            raise ArgumentValueError(
                "scheduler: expected one that sets the learning rate alone, got one that sets the "
                "momentum too; pass it cycle_momentum=False."
            )
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        stepped.step()

    def at(i: int) -> Any:
        if not 0 <= i < steps:
            raise ArgumentValueError(
                f"scheduled: expected a step of 0 to {steps - 1}, got {i}; make it for more steps."
            )
        return lr * (rates[i] / initial) if isinstance(lr, Tensor) else rates[i]

    return at


RULES: dict[str, Callable[..., GradientTransformation]] = {
    rule.__name__: rule
    for rule in (sgd, momentum, adam, adamw, rmsprop, adagrad, adadelta, adamax, radam)
}


EXPECTED = (
    f"one of {', '.join(RULES)}, a `hoglib.meta.GradientTransformation`, a module with "
    "init and update, or a function from a learning rate to one"
)


def resolve_rule(rule: Any, lr: object, options: dict[str, Any]) -> GradientTransformation:
    """The update rule for a name, a function of the learning rate, or a rule object."""
    if isinstance(rule, str):
        return _rule_by_name(validation.choice("rule", rule, RULES), lr, options)
    if options:
        raise ArgumentValueError(
            "rule_options: expected none with a rule that is not a name, got "
            f"{', '.join(options)}; give them to the rule itself, for instance by functools.partial."
        )
    if is_transformation(rule):
        return GradientTransformation(rule.init, rule.update)
    # an optimizer class is callable: refuse it before it is called with the rate
    if isinstance(rule, type) and issubclass(rule, torch.optim.Optimizer):
        raise ArgumentTypeError(
            f"rule: expected {EXPECTED}, got {rule.__name__} of torch.optim, which changes parameters "
            "in place; name the rule."
        )
    found = rule(lr) if callable(rule) else check_rule(rule)
    if not is_transformation(found):
        got = validation.describe(found)
        raise ArgumentTypeError(f"rule: expected {EXPECTED}, got {got} from it.")
    return GradientTransformation(found.init, found.update)


def is_transformation(rule: object) -> bool:
    """Whether the object is an update rule, and not a function that makes one."""
    return callable(getattr(rule, "init", None)) and callable(getattr(rule, "update", None))


def check_rule(rule: Any) -> Any:
    """The rule; raises for anything else, such as a rate or a name."""
    if not is_transformation(rule):
        raise ArgumentTypeError(
            f"rule: expected a rule with its rate, got {validation.describe(rule)}; for instance "
            "`rule=hoglib.meta.sgd(0.1)`."
        )
    return rule


def rule_name(rule: object) -> str:
    if isinstance(rule, str):
        return repr(rule)
    return str(getattr(rule, "__name__", type(rule).__name__))


def _rule_by_name(name: str, lr: object, options: dict[str, Any]) -> GradientTransformation:
    known = [n for n in inspect.signature(RULES[name]).parameters if n != "lr"] if options else []
    for option in options:
        if option not in known:
            raise ArgumentValueError(
                f"rule_options: expected options of {name}, which are {', '.join(known)}, got "
                f"{option!r}."
            )
    return RULES[name](lr, **options)


def _adam(
    lr: object, betas: object, eps: object, weight_decay: object, amsgrad: bool, *, decoupled: bool
) -> GradientTransformation:
    beta1, beta2 = check_betas(betas)
    epsilon = check_number("eps", eps)
    validation.boolean("amsgrad", amsgrad)

    def at(step: int) -> Direction:
        b1, b2 = without_dims(beta1), without_dims(beta2)
        weight1, weight2 = 1 - b1, 1 - b2
        correction = 1 - b1**step
        # u = m / (scale slope + floor): scalars common to all leaves are computed once
        slope, floor = correction / (1 - b2**step) ** 0.5, without_dims(epsilon) * correction

        def direction(g: Tensor, *memory: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
            # lerp: b m + (1 - b) g in one operation
            m = torch.lerp(memory[0], g, to_leaf(weight1, g))
            v = torch.lerp(memory[1], g * g, to_leaf(weight2, g))
            kept = (m, v, torch.maximum(memory[2], v)) if amsgrad else (m, v)
            return m / (safe_sqrt(kept[-1]) * to_leaf(slope, g) + to_leaf(floor, g)), kept

        return direction

    slots = ("mean", "square", "largest") if amsgrad else ("mean", "square")
    return transformation(at, slots, lr, weight_decay, decoupled=decoupled)
