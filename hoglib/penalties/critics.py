"""Penalties on the gradient of a critic's scores by its inputs."""

from collections.abc import Callable
from typing import Any, Unpack

import torch
from torch import Tensor

from hoglib._core.messages import validation
from hoglib._core.torch_api.pytree import Tree
from hoglib.errors import ArgumentValueError
from hoglib.penalties.evaluation import PenaltyWithOutputs, penalty, traceable, traceable_at_first
from hoglib.penalties.module import BOTH, FAKE, REAL, register
from hoglib.penalties.options import Options, check_options
from hoglib.penalties.samples import add_noise, interpolate
from hoglib.penalties.terms import half_squared_slope, squared_distance, squared_slope

__all__ = ["dragan", "r1", "r1_r2", "r2", "wgan_gp", "zero_centred"]
Critic = Callable[..., Any]


@register(BOTH, term="(|g_n| - target)^2", draw="between")
@traceable_at_first
def wgan_gp(
    critic: Critic,
    real: Tree,
    fake: Tree,
    *args: Any,
    target: float = 1.0,
    one_sided: bool = False,
    generator: torch.Generator | None = None,
    **options: Unpack[Options],
) -> Tensor:
    r"""The gradient penalty of WGAN-GP: slopes of size `target` between real and fake samples.

        1/N sum_n (|grad_x D(x_n)| - k)^2        x_n = e_n real_n + (1 - e_n) fake_n,  e_n ~ U(0, 1)

    |.| is the Euclidean norm over all entries of a sample, of all its inputs; at a gradient of zero its
    derivative is zero. Warns if the scores of samples depend on one another (BatchNorm).

    Args:
        critic: D, called as critic(x, *args); it returns one score per sample, alone or first of a
            tuple.
        real: Real samples: a tensor or any tree of tensors (several images, embeddings).
        fake: Generated samples, like real. Detach them unless the generator should learn from the
            penalty too.
        *args: Further arguments of the critic, such as labels.
        target: k, the wanted slope. Default: 1.
        one_sided: Whether only slopes above k are penalised: max(0, |grad| - k)^2 (WGAN-LP).
            Default: False.
        generator: Draws e. Default: torch's own generator.
        **options: :class:`Options`: ``reduction`` ("mean", "sum" or "none"), ``output``
            (which of several outputs), ``batch`` (the sample of each row), ``autocast`` (leave it
            on), ``micro_batch`` (samples at once), ``stand_ins`` (run inside `second_order()`),
            ``remat`` (blocks to recompute), ``return_outputs`` (return the outputs too), ``compile``
            (run as one graph).
    Returns:
        The penalty, a scalar to be multiplied by its weight and added to the critic's loss; [N] with
        ``reduction="none"``; :class:`PenaltyWithOutputs` (penalty, outputs of the critic) with
        ``return_outputs=True``.
    Raises:
        ArgumentTypeError, ArgumentValueError: For arguments or outputs of the wrong kind or shape.
        NoSecondDerivative: If the penalty has no effect on any parameter that requires grad; the
            message names the call or the Function that detaches the gradient.
    Shape:
        - real, fake: [N, ...]; with ``batch=index`` [rows, ...], the rows being parts of samples
        - scores: [N], [N, 1] or [N, 1, 1, 1]
    References:
        Gulrajani et al., Improved Training of Wasserstein GANs, 2017, eq. 3. One-sided: Petzka, Fischer
        and Lukovnikov, On the Regularization of Wasserstein GANs, 2018, eq. 8.
    Example:
        >>> critic = lambda x: x.square().sum(1)  # its gradient is 2 x
        >>> real = torch.tensor([[3.0, 4.0]])
        >>> hog.penalties.wgan_gp(critic, real, real)  # (|2 x| - 1)^2
        tensor(81.)
    """
    k = validation.number("target", target, minimum=0.0)
    validation.boolean("one_sided", one_sided)
    checked = check_options("wgan_gp", options, generator)
    x = interpolate("wgan_gp", real, fake, checked.batch, checked.generator)
    return penalty(critic, x, args, squared_distance(k, one_sided), checked)


@register(BOTH, term="|g_n|^2", draw="between")
@traceable_at_first
def zero_centred(
    critic: Critic,
    real: Tree,
    fake: Tree,
    *args: Any,
    generator: torch.Generator | None = None,
    **options: Unpack[Options],
) -> Tensor:
    r"""The zero-centred gradient penalty between real and fake samples.

        1/N sum_n |grad_x D(x_n)|^2        x_n = e_n real_n + (1 - e_n) fake_n,  e_n ~ U(0, 1)

    Warns if the scores of samples depend on one another (BatchNorm).

    Args:
        critic: D, called as critic(x, *args); it returns one score per sample, alone or first of a
            tuple.
        real: Real samples: a tensor or any tree of tensors.
        fake: Generated samples, like real. Detach them unless the generator should learn from the
            penalty too.
        *args: Further arguments of the critic, such as labels.
        generator: Draws e. Default: torch's own generator.
        **options: :class:`Options`: ``reduction`` ("mean", "sum" or "none"), ``output``
            (which of several outputs), ``batch`` (the sample of each row), ``autocast`` (leave it
            on), ``micro_batch`` (samples at once), ``stand_ins`` (run inside `second_order()`),
            ``remat`` (blocks to recompute), ``return_outputs`` (return the outputs too), ``compile``
            (run as one graph).
    Returns:
        The penalty, a scalar; [N] with ``reduction="none"``; :class:`PenaltyWithOutputs` (penalty,
        outputs of the critic) with ``return_outputs=True``.
    Raises:
        ArgumentTypeError, ArgumentValueError: For arguments or outputs of the wrong kind or shape.
        NoSecondDerivative: If the penalty has no effect on any parameter that requires grad; the
            message names the call or the Function that detaches the gradient.
    Shape:
        - real, fake: [N, ...]; with ``batch=index`` [rows, ...], the rows being parts of samples
        - scores: [N], [N, 1] or [N, 1, 1, 1]
    References:
        Thanh-Tung, Tran and Venkatesh, Improving Generalization and Stability of GANs, 2019, eq. 9.
    Example:
        >>> critic = lambda x: x.square().sum(1)  # its gradient is 2 x
        >>> real = torch.tensor([[3.0, 4.0]])
        >>> hog.penalties.zero_centred(critic, real, real)
        tensor(100.)
    """
    checked = check_options("zero_centred", options, generator)
    x = interpolate("zero_centred", real, fake, checked.batch, checked.generator)
    return penalty(critic, x, args, squared_slope, checked)


@register(REAL, term="|g_n|^2 / 2 at real")
@traceable
def r1(critic: Critic, real: Tree, *args: Any, **options: Unpack[Options]) -> Tensor:
    r"""R1: the squared slope at real samples, halved, so that its weight is gamma.

        1/N sum_n |grad_x D(x_n)|^2 / 2        x_n = real_n

    With ``return_outputs=True`` the scores come too, for the critic's loss, and the critic runs only
    once. Warns if the scores of samples depend on one another (BatchNorm).

    Args:
        critic: D, called as critic(x, *args); it returns one score per sample, alone or first of a
            tuple.
        real: Real samples: a tensor or any tree of tensors.
        *args: Further arguments of the critic, such as labels.
        **options: :class:`Options`: ``reduction`` ("mean", "sum" or "none"), ``output``
            (which of several outputs), ``batch`` (the sample of each row), ``autocast`` (leave it
            on), ``micro_batch`` (samples at once), ``stand_ins`` (run inside `second_order()`),
            ``remat`` (blocks to recompute), ``return_outputs`` (return the outputs too), ``compile``
            (run as one graph).
    Returns:
        The penalty, a scalar; [N] with ``reduction="none"``; :class:`PenaltyWithOutputs` (penalty,
        outputs of the critic) with ``return_outputs=True``.
    Raises:
        ArgumentTypeError, ArgumentValueError: For arguments or outputs of the wrong kind or shape.
        NoSecondDerivative: If the penalty has no effect on any parameter that requires grad; the
            message names the call or the Function that detaches the gradient.
    Shape:
        - real: [N, ...]; with ``batch=index`` [rows, ...], the rows being parts of samples
        - scores: [N], [N, 1] or [N, 1, 1, 1]
    References:
        Mescheder, Geiger and Nowozin, Which Training Methods for GANs do actually Converge?, 2018,
        eq. 9.
    Example:
        >>> critic = nn.Linear(2, 1, bias=False)
        >>> _ = nn.init.ones_(critic.weight)
        >>> hog.penalties.r1(critic, torch.zeros(5, 2)).backward()
        >>> critic.weight.grad  # of |w|^2 / 2
        tensor([[1., 1.]])
    """
    return penalty(critic, real, args, half_squared_slope, check_options("r1", options))


@register(FAKE, term="|g_n|^2 / 2 at fake")
@traceable
def r2(critic: Critic, fake: Tree, *args: Any, **options: Unpack[Options]) -> Tensor:
    r"""R2: the squared slope at fake samples, halved, so that its weight is gamma.

        1/N sum_n |grad_x D(x_n)|^2 / 2        x_n = fake_n

    With ``return_outputs=True`` the scores come too, for the critic's loss, and the critic runs only
    once. Warns if the scores of samples depend on one another (BatchNorm).

    Args:
        critic: D, called as critic(x, *args); it returns one score per sample, alone or first of a
            tuple.
        fake: Generated samples: a tensor or any tree of tensors. Detach them unless the generator
            should learn from the penalty too.
        *args: Further arguments of the critic, such as labels.
        **options: :class:`Options`: ``reduction`` ("mean", "sum" or "none"), ``output``
            (which of several outputs), ``batch`` (the sample of each row), ``autocast`` (leave it
            on), ``micro_batch`` (samples at once), ``stand_ins`` (run inside `second_order()`),
            ``remat`` (blocks to recompute), ``return_outputs`` (return the outputs too), ``compile``
            (run as one graph).
    Returns:
        The penalty, a scalar; [N] with ``reduction="none"``; :class:`PenaltyWithOutputs` (penalty,
        outputs of the critic) with ``return_outputs=True``.
    Raises:
        ArgumentTypeError, ArgumentValueError: For arguments or outputs of the wrong kind or shape.
        NoSecondDerivative: If the penalty has no effect on any parameter that requires grad; the
            message names the call or the Function that detaches the gradient.
    Shape:
        - fake: [N, ...]; with ``batch=index`` [rows, ...], the rows being parts of samples
        - scores: [N], [N, 1] or [N, 1, 1, 1]
    References:
        Mescheder, Geiger and Nowozin, Which Training Methods for GANs do actually Converge?, 2018,
        eq. 10.
    Example:
        >>> fake = torch.tensor([[3.0, 4.0]])
        >>> hog.penalties.r2(lambda x: x.square().sum(1), fake)  # |2 x|^2 / 2
        tensor(50.)
    """
    return penalty(critic, fake, args, half_squared_slope, check_options("r2", options))


@register(BOTH, term="|g_n|^2 / 2 at real and fake, summed,")
def r1_r2(critic: Critic, real: Tree, fake: Tree, *args: Any, **options: Unpack[Options]) -> Tensor:
    r"""R1 at real samples plus R2 at fake ones.

        1/N sum_n |grad_x D(real_n)|^2 / 2 + 1/M sum_m |grad_x D(fake_m)|^2 / 2

    Warns if the scores of samples depend on one another (BatchNorm).

    Args:
        critic: D, called as critic(x, *args); it returns one score per sample, alone or first of a
            tuple.
        real: Real samples: a tensor or any tree of tensors.
        fake: Generated samples; they may be of another number than the real ones if no further argument
            has one row per sample. Detach them unless the generator should learn from the penalty too.
        *args: Further arguments of the critic, such as labels; they and ``batch`` are used for both.
        **options: :class:`Options`: ``reduction`` ("mean", "sum" or "none"), ``output``
            (which of several outputs), ``batch`` (the sample of each row), ``autocast`` (leave it
            on), ``micro_batch`` (samples at once), ``stand_ins`` (run inside `second_order()`),
            ``remat`` (blocks to recompute), ``return_outputs`` (return the outputs too), ``compile``
            (run as one graph).
    Returns:
        The penalty, a scalar; [N] with ``reduction="none"``; :class:`PenaltyWithOutputs` (penalty,
        (outputs at real, outputs at fake)) with ``return_outputs=True``.
    Raises:
        ArgumentTypeError, ArgumentValueError: For arguments or outputs of the wrong kind or shape.
        NoSecondDerivative: If the penalty has no effect on any parameter that requires grad; the
            message names the call or the Function that detaches the gradient.
    Shape:
        - real: [N, ...]; fake: [M, ...]
        - scores: [N], [N, 1] or [N, 1, 1, 1]
    References:
        Huang et al., The GAN is dead; long live the GAN! A Modern GAN Baseline (R3GAN), 2024,
        section 3.
    Example:
        >>> real, fake = torch.tensor([[1.0]]), torch.tensor([[2.0], [0.0]])
        >>> hog.penalties.r1_r2(lambda x: x.square(), real, fake)  # 2 + (8 + 0) / 2
        tensor(6.)
    """
    if torch.compiler.is_dynamo_compiling():
        at_real, at_fake = r1(critic, real, *args, **options), r2(critic, fake, *args, **options)
    else:
        checked = check_options("r1_r2", options)
        at_real = penalty(critic, real, args, half_squared_slope, checked)
        at_fake = penalty(critic, fake, args, half_squared_slope, checked)
    if not options.get("return_outputs"):
        return _add(at_real, at_fake)
    (a, scores_of_real), (b, scores_of_fake) = at_real, at_fake
    return PenaltyWithOutputs(_add(a, b), (scores_of_real, scores_of_fake))  # type: ignore[return-value]


# at points that were drawn it is the penalty of WGAN-GP
@register(REAL, term="(|g_n| - target)^2", draw="noise", at_points=wgan_gp)
@traceable
def dragan(
    critic: Critic,
    real: Tree,
    *args: Any,
    target: float = 1.0,
    noise: float | None = None,
    generator: torch.Generator | None = None,
    **options: Unpack[Options],
) -> Tensor:
    r"""DRAGAN: slopes of size `target` around real samples.

        1/N sum_n (|grad_x D(x_n)| - k)^2        x_n = real_n + d_n,  d_n ~ N(0, c^2) for each entry

    Warns if the scores of samples depend on one another (BatchNorm).

    Args:
        critic: D, called as critic(x, *args); it returns one score per sample, alone or first of a
            tuple.
        real: Real samples: a tensor or any tree of tensors.
        *args: Further arguments of the critic, such as labels.
        target: k, the wanted slope. Default: 1.
        noise: c, the standard deviation of the noise. Default: half the standard deviation of all
            entries of real.
        generator: Draws d. Default: torch's own generator.
        **options: :class:`Options`: ``reduction`` ("mean", "sum" or "none"), ``output``
            (which of several outputs), ``batch`` (the sample of each row), ``autocast`` (leave it
            on), ``micro_batch`` (samples at once), ``stand_ins`` (run inside `second_order()`),
            ``remat`` (blocks to recompute), ``return_outputs`` (return the outputs too), ``compile``
            (run as one graph).
    Returns:
        The penalty, a scalar; [N] with ``reduction="none"``; :class:`PenaltyWithOutputs` (penalty,
        outputs of the critic) with ``return_outputs=True``.
    Raises:
        ArgumentTypeError, ArgumentValueError: For arguments or outputs of the wrong kind or shape.
        NoSecondDerivative: If the penalty has no effect on any parameter that requires grad; the
            message names the call or the Function that detaches the gradient.
    Shape:
        - real: [N, ...]; with ``batch=index`` [rows, ...], the rows being parts of samples
        - scores: [N], [N, 1] or [N, 1, 1, 1]
    References:
        Kodali et al., On Convergence and Stability of GANs, 2017, eq. 2 and algorithm 1.
    Example:
        >>> real = torch.tensor([[3.0, 4.0]])
        >>> hog.penalties.dragan(lambda x: x.square().sum(1), real, noise=0.0)  # (|2 x| - 1)^2
        tensor(81.)
    """
    k = validation.number("target", target, minimum=0.0)
    c = None if noise is None else validation.number("noise", noise, minimum=0.0)
    checked = check_options("dragan", options, generator)
    x = add_noise("dragan", real, c, checked.generator)
    return penalty(critic, x, args, squared_distance(k, one_sided=False), checked)


def _add(at_real: Tensor, at_fake: Tensor) -> Tensor:
    """The sum of both penalties, or of their terms."""
    if at_real.shape != at_fake.shape:
        raise ArgumentValueError(
            f"r1_r2(reduction='none'): expected as many fake samples as real ones, {len(at_real)}, got "
            f"{len(at_fake)}; use r1 and r2 for the terms of each."
        )
    return at_real + at_fake
