"""Generator and critic against each other, held together by a gradient penalty: the training itself."""

from collections.abc import Callable
from math import nan
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import hoglib as hog
from experiments.belonging import Belonging
from experiments.double import by_parameters_and_inputs
from experiments.gradients import Loss
from experiments.schedules import falling
from hoglib._core import validation
from hoglib.errors import ArgumentValueError

EVALUATION_SEED = 2**42  # of the generated samples that are judged, the same ones at every visit
ADVICE = "Lower lr, or give the penalty another weight."


def relativistic(higher: Tensor, lower: Tensor) -> Tensor:
    """mean softplus(-(higher - lower)), the logistic loss of pairs.

    Source: Jolicoeur-Martineau, The relativistic discriminator, 2018; Huang et al., The GAN is dead;
    long live the GAN! (R3GAN), 2024, eq. 2.
    """
    return F.softplus(lower - higher).mean()


def wasserstein_loss(higher: Tensor, lower: Tensor) -> Tensor:
    """mean (lower - higher). Source: Arjovsky, Chintala and Bottou, Wasserstein GAN, 2017."""
    return (lower - higher).mean()


# The critic minimises loss(D(real), D(fake)), the generator loss(D(fake), D(real)).
LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "relativistic": relativistic,
    "wasserstein": wasserstein_loss,
}


# Penalties of other functions than critics would be one of these under another name, or no penalty.
OF_CRITICS = ("wgan_gp", "zero_centred", "r1", "r2", "r1_r2", "dragan", "lipschitz")


class Adversarial(Belonging):
    """Generator and critic, and the generator's moving average, which is judged.

    A training step is one step of the critic on

        loss(D(real), D(G(z))) + penalty(D, real, G(z))        z ~ N(0, 1)

    and at every `critic_steps`-th one a step of the generator on loss(D(G(z)), D(real)).

    critic: gives a score [n, 1] of samples [n, ...]; generator: gives samples of z [n, latent];
    penalty: a `hoglib.GradientPenalty`, or null for none; loss: "relativistic" or "wasserstein";
    lr, betas: of both Adams; decay: whether lr falls linearly to zero over the run; ema: factor of
    the moving average at each step of the generator; compile: true runs the gradients of both steps,
    that of the penalty with them, as compiled graphs (`hoglib.compile`; "eager" as graphs that are
    not compiled), which round otherwise.
    """

    generator_loss: Tensor

    def __init__(
        self,
        critic: nn.Module,
        generator: nn.Module,
        latent: int,
        penalty: hog.GradientPenalty | None,
        loss: str,
        critic_steps: int,
        lr: float,
        betas: tuple[float, float],
        decay: bool,
        ema: float,
        compile: bool | str,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.critic, self.generator, self.latent = critic, generator, latent
        self.average = AveragedModel(
            self.generator, multi_avg_fn=get_ema_multi_avg_fn(share("ema", ema)), use_buffers=True
        ).requires_grad_(False)
        if penalty is not None:
            validation.one_of("penalty.kind", penalty.kind, OF_CRITICS)
        self.penalty = penalty
        self.loss = validation.one_of("loss", loss, LOSSES)
        self._losses = (
            Loss("the critic's loss", self._of_critic, self.critic, compile),
            Loss("the generator's loss", self._of_generator, self.generator, compile),
        )
        self.critic_steps = validation.at_least("critic_steps", critic_steps, 1)
        self.lr = validation.positive("lr", lr)
        self.betas = (share("betas", betas[0]), share("betas", betas[1]))
        self.decay = decay
        self.options = {"penalty": described(penalty), "loss": loss}
        # The newest one, for every row of the log; in checkpoints, so that a resumed log is the same.
        self.register_buffer("generator_loss", torch.tensor(nan))

    def forward(self, z: Tensor) -> Tensor:
        return self.average(z)

    def latents(self, count: int) -> Tensor:
        return torch.randn(count, self.latent, device=self.device)

    def configure_optimizers(self) -> Any:
        """Adam and schedule of the critic, then of the generator."""

        optimizers = [
            torch.optim.Adam(network.parameters(), lr=self.lr, betas=self.betas)
            for network in (self.critic, self.generator)
        ]
        schedules = [
            falling(self, optimizer, self.decay, every)
            for optimizer, every in zip(optimizers, (1, self.critic_steps), strict=True)
        ]
        return optimizers, schedules

    def training_step(self, real: Tensor, batch_idx: int) -> None:
        loss, penalty = self._critic_step(real)
        if (batch_idx + 1) % self.critic_steps == 0:
            self.generator_loss.copy_(self._generator_step(real))
            self.average.update_parameters(self.generator)
        values = {
            "train/critic": loss,
            "train/penalty": penalty,
            "train/generator": self.generator_loss,
        }
        self.log_dict(values, prog_bar=True, batch_size=len(real))

    def _critic_step(self, real: Tensor) -> tuple[Tensor, Tensor]:
        z = self.latents(len(real))
        factor = 0.0 if self.penalty is None else self.penalty.factor()
        with self.toggled_optimizer(self.optimizers()[0]):  # type: ignore[index]
            loss, penalty = self._step(0, "critic loss", real, z, factor)
        return loss, penalty

    def _of_critic(self, real: Tensor, z: Tensor, factor: float) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            fake = self.generator(z)
        of_real, of_fake = self.critic(torch.cat([real, fake])).chunk(2)
        loss = LOSSES[self.loss](of_real, of_fake)
        if not factor or self.penalty is None:
            return loss, real.new_zeros(())
        return loss, factor * self.penalty.value(self.critic, real, fake)

    def _generator_step(self, real: Tensor) -> Tensor:
        z = self.latents(len(real))
        with self.toggled_optimizer(self.optimizers()[1]):  # type: ignore[index]
            (loss,) = self._step(1, "generator loss", real, z)
        return loss

    def _of_generator(self, real: Tensor, z: Tensor) -> tuple[Tensor]:
        fake = self.generator(z)
        of_fake, of_real = self.critic(torch.cat([fake, real])).chunk(2)
        return (LOSSES[self.loss](of_fake, of_real),)

    def _penalty(self, real: Tensor, fake: Tensor) -> Tensor:
        if self.penalty is None:
            return real.new_zeros(())
        value: Tensor = self.penalty(self.critic, real, fake)
        return value

    def second_order_problem(self, real: Tensor) -> tuple[Any, dict[str, Tensor], None]:
        """The sum of the critic's scores, by its parameters and by the samples that it scores.

        At the same samples as `_critic_step`: real and generated.
        """
        with torch.no_grad():
            samples = torch.cat([real, self.generator(self.latents(len(real)))])
        return by_parameters_and_inputs(self.critic, samples)

    def _step(self, which: int, name: str, *given: Any) -> list[Tensor]:
        """A step of an optimizer on the critic's loss or the generator's; its terms."""
        loss, terms = self._losses[which](*given)
        optimizer: Any = self.optimizers()[which]  # type: ignore[index]
        schedule: Any = self.lr_schedulers()[which]  # type: ignore[index]
        optimizer.zero_grad()
        self.manual_backward(validation.finite(name, loss, ADVICE))
        optimizer.step()
        schedule.step()
        return terms

    def generated(self, real: Tensor) -> tuple[Tensor, Tensor]:
        """As many samples of the average as real ones, and the penalty; keeps the run's randomness."""
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(EVALUATION_SEED)
            fake = self(self.latents(len(real)))
            return fake, self._penalty(real, fake)


def share(what: str, value: float) -> float:
    """A number from 0 to 1, without 1."""
    if not 0 <= validation.number(what, value) < 1:
        raise ArgumentValueError(
            f"{what}: expected a number of at least 0 and below 1, got {value}; 0.999 is usual for "
            "averages over many steps, 0 for none."
        )
    return float(value)


def described(penalty: hog.GradientPenalty | None) -> str:
    """A penalty in the words of its options: "r1_r2, weight 0.02"."""
    if penalty is None:
        return "none"
    every = "" if penalty.every == 1 else f", every {penalty.every}"
    options = "".join(f", {name} {value}" for name, value in penalty.options.items())
    return f"{penalty.kind}, weight {penalty.weight:g}{every}{options}"
