"""One step of a critic: its loss with a gradient penalty, and the gradient by all parameters."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import hoglib as hog
from experiments.benchmarks.critics import SEED, Critics, taken
from experiments.benchmarks.workload import Call

WEIGHT = 10.0  # of the penalty

Critic = Callable[[Tensor], Tensor]
Loss = Callable[..., Tensor]


def slopes(critic: Critic, x: Tensor) -> tuple[Tensor, Tensor]:
    """The scores at x, and the squared size of each one's gradient: double backward by hand."""
    x = x.detach().requires_grad_()
    scores = critic(x)
    (g,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
    return scores, g.flatten(1).square().sum(1)


def between(real: Tensor, fake: Tensor, e: Tensor | None = None) -> Tensor:
    """Points between real and generated ones, at e if it is given."""
    e = torch.rand(len(real), device=real.device) if e is None else e
    e = e.reshape(-1, *[1] * (real.dim() - 1))
    return e * real + (1 - e) * fake


def with_r1_by_hand(critic: Critic, real: Tensor, fake: Tensor, e: Tensor | None = None) -> Tensor:
    """A critic's loss with R1, of one forward each."""
    scores, squares = slopes(critic, real)
    return F.softplus(critic(fake) - scores).mean() + WEIGHT * squares.mean() / 2


def with_r1(critic: Critic, real: Tensor, fake: Tensor) -> Tensor:
    penalty, scores = hog.penalties.r1(critic, real, return_outputs=True)
    return F.softplus(critic(fake) - scores).mean() + WEIGHT * penalty


def with_r1_in_pieces(critic: Critic, real: Tensor, fake: Tensor) -> Tensor:
    """R1 of four micro-batches, which keep no graph for one another."""
    penalty = hog.penalties.r1(critic, real, micro_batch=-(-len(real) // 4))
    return F.softplus(critic(fake) - critic(real)).mean() + WEIGHT * penalty


def with_wgan_gp_by_hand(
    critic: Critic, real: Tensor, fake: Tensor, e: Tensor | None = None
) -> Tensor:
    """Wasserstein loss, and (|slope| - 1)^2 between real and generated points."""
    squares = slopes(critic, between(real, fake, e))[1]
    penalty = (squares.sqrt() - 1).square().mean()
    return critic(fake).mean() - critic(real).mean() + WEIGHT * penalty


def with_wgan_gp(critic: Critic, real: Tensor, fake: Tensor) -> Tensor:
    penalty = hog.penalties.wgan_gp(critic, real, fake)
    return critic(fake).mean() - critic(real).mean() + WEIGHT * penalty


def step(loss: Loss, point: Critics) -> tuple[Any, ...]:
    """One step of training, from the same random numbers: the loss, and its gradient by parameters."""
    if point.device.type == "cpu":  # torch.manual_seed formats the stack, which takes 0.2 ms
        torch.default_generator.manual_seed(SEED)
    else:
        torch.manual_seed(SEED)
    value = loss(point.real, point.fake)
    value.backward()
    return taken(value.detach(), point.model)


def steps(loss: Loss, compile: Callable[..., Any] | None = None) -> Callable[[Critics], Call]:
    """Steps on a loss; compile: `hog.compiled_loss`, or torch.compile around the loss."""

    def made(point: Critics) -> Call:
        point = point.apart()
        of: Any = partial(loss, point.model)
        if compile is not None:
            of = compile(of, backend=point.backend)
        return partial(step, of, point)

    return made


def truth(loss: Loss) -> Callable[[Critics], tuple[Any, ...]]:
    """By hand in float64, at points between that are those of float32."""

    def value(point: Critics) -> tuple[Any, ...]:
        e, exact = point.drawn(), point.double()
        return step(partial(loss, exact.model, e=e.double()), exact)

    return value
