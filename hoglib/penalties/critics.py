"""Penalties on the gradient of a critic's scores by its inputs."""

from collections.abc import Callable
from typing import Any, Unpack

import torch
from torch import Tensor

from hoglib._core import validation
from hoglib._core.norms import root
from hoglib.errors import ArgumentValueError
from hoglib.penalties.input_vjp import InputVJP
from hoglib.penalties.interpolation import around, between
from hoglib.penalties.options import Options, settings
from hoglib.penalties.terms import Rule, penalty

Critic = Callable[..., Any]


def wgan_gp(
    critic: Critic,
    real: Any,
    fake: Any,
    *args: Any,
    target: float = 1.0,
    one_sided: bool = False,
    generator: torch.Generator | None = None,
    **options: Unpack[Options],
) -> Any:
    r"""The gradient penalty of WGAN-GP: slopes of size `target` between real and fake samples.

        1/N sum_n (|grad_x D(x_n)| - k)^2        x_n = e_n real_n + (1 - e_n) fake_n,  e_n ~ U(0, 1)

    k is target; one_sided replaces the difference by max(0, |grad| - k), which asks for slopes of at
    most k (WGAN-LP). |.| is the Euclidean norm over all entries of a sample, of all its inputs; at a
    gradient of zero its derivative is zero.

    Shapes: real [N, ...], or any tree of such tensors (several images, embeddings); fake like it; with
    batch=index the rows of real and fake are parts of samples (see `Options`). The critic is called
    critic(x, *args), args being labels and the like, and returns one number a sample: [N], [N, 1] or
    [N, 1, 1, 1], alone or first in a tuple. Returns a scalar: add weight times it to the critic's
    loss. Detach fake unless the generator should learn from the penalty too. generator: draws e.
    Options: `reduction`, `output`, `batch`, `autocast`, `micro_batch`, `stand_ins`, `return_outputs`.

    Raises TypeError and ValueError for arguments of the wrong kind; RuntimeError where the penalty
    would have no effect on any parameter that learns, naming the call or the Function that cuts the
    gradient's graph. Warns where scores of samples depend on one another (BatchNorm).
    Source: Gulrajani et al., Improved Training of Wasserstein GANs, 2017, eq. 3; one-sided: Petzka,
    Fischer and Lukovnikov, On the Regularization of Wasserstein GANs, 2018, eq. 8.
    """
    k = validation.number("target", target, minimum=0.0)
    validation.flag("one_sided", one_sided)
    x = _between("wgan_gp", real, fake, generator, options)
    return penalty("wgan_gp", critic, x, args, _distance_to(k, one_sided), options, generator)


def zero_centred(
    critic: Critic,
    real: Any,
    fake: Any,
    *args: Any,
    generator: torch.Generator | None = None,
    **options: Unpack[Options],
) -> Any:
    r"""The zero-centred gradient penalty between real and fake samples.

        1/N sum_n |grad_x D(x_n)|^2        x_n = e_n real_n + (1 - e_n) fake_n,  e_n ~ U(0, 1)

    Shapes, options, errors and warnings as for `wgan_gp`.
    Source: Thanh-Tung, Tran and Venkatesh, Improving Generalization and Stability of GANs, 2019, eq. 9.
    """
    x = _between("zero_centred", real, fake, generator, options)
    return penalty("zero_centred", critic, x, args, _square, options, generator)


def r1(critic: Critic, real: Any, *args: Any, **options: Unpack[Options]) -> Any:
    r"""R1: the squared slope at real samples, halved, so that its weight is gamma.

        1/N sum_n |grad_x D(x_n)|^2 / 2        x_n = real_n

    Shapes, options, errors and warnings as for `wgan_gp`. With return_outputs=True the scores come too,
    for the critic's loss, and the critic runs only once.
    Source: Mescheder, Geiger and Nowozin, Which Training Methods for GANs do actually Converge?, 2018,
    eq. 9.
    """
    return penalty("r1", critic, real, args, _half_square, options)


def r2(critic: Critic, fake: Any, *args: Any, **options: Unpack[Options]) -> Any:
    r"""R2: the squared slope at fake samples, halved; `r1` with other samples.

        1/N sum_n |grad_x D(x_n)|^2 / 2        x_n = fake_n

    Shapes, options, errors and warnings as for `wgan_gp`. Detach fake unless the generator should
    learn from the penalty too.
    Source: Mescheder, Geiger and Nowozin, 2018, eq. 10.
    """
    return penalty("r2", critic, fake, args, _half_square, options)


def r1_r2(critic: Critic, real: Any, fake: Any, *args: Any, **options: Unpack[Options]) -> Any:
    r"""R1 at real samples plus R2 at fake ones.

        1/N sum_n |grad_x D(real_n)|^2 / 2 + 1/M sum_m |grad_x D(fake_m)|^2 / 2

    Shapes, options, errors and warnings as for `wgan_gp`; real and fake may be of different numbers
    where no further argument has a row a sample: args and batch= go to both.
    With return_outputs=True it returns (penalty, (scores of real, scores of fake)).
    Source: Huang et al., The GAN is dead; long live the GAN! (R3GAN), 2024, section 3.
    """
    at_real = penalty("r1_r2", critic, real, args, _half_square, options)
    at_fake = penalty("r1_r2", critic, fake, args, _half_square, options)
    if options.get("reduction") == "none":
        a, b = (at[0] if options.get("return_outputs") else at for at in (at_real, at_fake))
        if a.shape != b.shape:
            raise ArgumentValueError(
                f"r1_r2(reduction='none'): expected as many fake samples as real ones, {len(a)}, got "
                f"{len(b)}; use r1 and r2 for the terms of each."
            )
    if options.get("return_outputs"):
        (a, scores), (b, others) = at_real, at_fake
        return a + b, (scores, others)
    return at_real + at_fake


def dragan(
    critic: Critic,
    real: Any,
    *args: Any,
    target: float = 1.0,
    noise: float | None = None,
    generator: torch.Generator | None = None,
    **options: Unpack[Options],
) -> Any:
    r"""DRAGAN: slopes of size `target` around real samples.

        1/N sum_n (|grad_x D(x_n)| - k)^2        x_n = real_n + d_n,  d_n ~ N(0, c^2) for each entry

    k is target, c is noise, by default half the standard deviation of all entries of real.
    Shapes, options, errors and warnings as for `wgan_gp`. generator: draws d.
    Source: Kodali et al., On Convergence and Stability of GANs, 2017, eq. 2 and algorithm 1.
    """
    k = validation.number("target", target, minimum=0.0)
    c = None if noise is None else validation.number("noise", noise, minimum=0.0)
    x = around("dragan", real, c, validation.generator(generator))
    return penalty("dragan", critic, x, args, _distance_to(k, False), options, generator)


def _between(
    what: str, real: Any, fake: Any, generator: torch.Generator | None, options: Options
) -> Any:
    batch = settings(what, options).batch
    return between(what, real, fake, batch, validation.generator(generator))


def _square(point: InputVJP) -> Tensor:
    return point.squares(point.gradient())


def _half_square(point: InputVJP) -> Tensor:
    return _square(point) / 2


def _distance_to(target: float, one_sided: bool) -> Rule:
    def rule(point: InputVJP) -> Tensor:
        above = root(_square(point)) - target
        return (above.relu() if one_sided else above).square()

    return rule
