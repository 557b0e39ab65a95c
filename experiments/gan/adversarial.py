"""Generator and critic trained against each other, with a gradient penalty."""

from collections.abc import Callable
from math import nan
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import hoglib as hog
from experiments.checks import at_least, finite, fraction, learning_rate, one_of
from experiments.shared.experiment import Experiment
from experiments.shared.schedules import linear_decay
from experiments.shared.second_order import SecondOrderProblem, sum_by_parameters_and_inputs
from experiments.shared.terms import sum_of_terms

EVALUATION_SEED = 2**42  # of the generated samples that are judged, the same at every evaluation
ADVICE = "Lower lr, or give the penalty another weight."


def relativistic_loss(higher: Tensor, lower: Tensor) -> Tensor:
    """mean softplus(-(higher - lower)), the logistic loss of pairs.

    References:
        Jolicoeur-Martineau, The relativistic discriminator, 2018.
        Huang et al., The GAN is dead; long live the GAN! (R3GAN), 2024, eq. 2.
    """
    return F.softplus(lower - higher).mean()


def wasserstein_loss(higher: Tensor, lower: Tensor) -> Tensor:
    """mean (lower - higher).

    References:
        Arjovsky, Chintala and Bottou, Wasserstein GAN, 2017.
    """
    return (lower - higher).mean()


# The critic minimises loss(D(real), D(fake)), the generator loss(D(fake), D(real)).
LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "relativistic": relativistic_loss,
    "wasserstein": wasserstein_loss,
}

# hoglib's other penalties are of functions that are not critics.
CRITIC_PENALTIES = ("wgan_gp", "zero_centred", "r1", "r2", "r1_r2", "dragan", "lipschitz")


class Adversarial(Experiment):
    """Generator and critic, and the moving average of the generator, which is evaluated.

    A training step is one step of the critic on

        loss(D(real), D(G(z))) + penalty(D, real, G(z))        z ~ N(0, 1)

    and every ``critic_steps``-th one also a step of the generator on loss(D(G(z)), D(real)).

    Args:
        critic: Module that gives scores [n, 1] of samples [n, ...].
        generator: Module that gives samples of z [n, latent].
        latent: Number of entries of z.
        penalty: A :class:`hoglib.GradientPenalty`, or None for none.
        lr: Learning rate of both Adams, which falls linearly to zero over the run.
        ema: Factor of the moving average at each step of the generator.
        loss: "relativistic" or "wasserstein".
        critic_steps: Steps of the critic for each step of the generator.
        betas: Betas of both Adams.
        compile: True runs the gradients of both steps, that of the penalty included, as compiled
            graphs, which round differently; "eager" as graphs that are not compiled.
    """

    generator_loss: Tensor

    def __init__(
        self,
        critic: nn.Module,
        generator: nn.Module,
        latent: int,
        penalty: hog.GradientPenalty | None,
        lr: float,
        ema: float,
        loss: str = "relativistic",
        critic_steps: int = 1,
        betas: tuple[float, float] = (0.5, 0.99),
        compile: bool | str = False,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.critic, self.generator, self.latent = critic, generator, latent
        factor = averaging_factor("ema", ema)
        self.average = AveragedModel(
            self.generator, multi_avg_fn=get_ema_multi_avg_fn(factor), use_buffers=True
        ).requires_grad_(False)
        if penalty is not None:
            one_of("penalty.kind", penalty.kind, CRITIC_PENALTIES)
        self.penalty = penalty
        self.loss = one_of("loss", loss, LOSSES)
        self._losses = (
            sum_of_terms("the critic's loss", self._critic_terms, self.critic, compile),
            sum_of_terms("the generator's loss", self._generator_terms, self.generator, compile),
        )
        self.critic_steps = at_least("critic_steps", critic_steps, 1)
        self.lr = learning_rate("lr", lr)
        self.betas = (averaging_factor("betas", betas[0]), averaging_factor("betas", betas[1]))
        self.options = {"penalty": describe_penalty(penalty), "loss": loss}
        # The newest value, for every row of the log; in checkpoints, so that a resumed log is the same.
        self.register_buffer("generator_loss", torch.tensor(nan))

    def forward(self, z: Tensor) -> Tensor:
        return self.average(z)

    def configure_optimizers(self) -> Any:
        """Adam and schedule of the critic, then of the generator."""
        optimizers = [
            torch.optim.Adam(network.parameters(), lr=self.lr, betas=self.betas)
            for network in (self.critic, self.generator)
        ]
        schedules = [
            linear_decay(self, optimizer, every)
            for optimizer, every in zip(optimizers, (1, self.critic_steps), strict=True)
        ]
        return optimizers, schedules

    def training_step(self, real: Tensor, batch_idx: int) -> None:
        z = self.sample_latents(len(real))
        factor = 0.0 if self.penalty is None else self.penalty.factor()
        loss, penalty = self._step(0, "critic loss", real, z, factor)
        if (batch_idx + 1) % self.critic_steps == 0:
            z = self.sample_latents(len(real))
            (generator_loss,) = self._step(1, "generator loss", real, z)
            self.generator_loss.copy_(generator_loss)
            self.average.update_parameters(self.generator)
        values = {
            "train/critic": loss,
            "train/penalty": penalty,
            "train/generator": self.generator_loss,
        }
        self.log_dict(values, prog_bar=True, batch_size=len(real))

    def _step(self, which: int, name: str, *batch: Any) -> list[Tensor]:
        """A step of the critic (0) or the generator (1); the terms of its loss."""
        optimizer: Any = self.optimizers()[which]  # type: ignore[index]
        schedule: Any = self.lr_schedulers()[which]  # type: ignore[index]
        with self.toggled_optimizer(optimizer):
            evaluation = self._losses[which](*batch)
            finite(name, evaluation.loss, ADVICE)
            optimizer.zero_grad()
            self.manual_backward(evaluation.objective)
            optimizer.step()
            schedule.step()
        return evaluation.terms

    def _critic_terms(self, real: Tensor, z: Tensor, factor: float) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            fake = self.generator(z)
        of_real, of_fake = self.critic(torch.cat([real, fake])).chunk(2)
        loss = LOSSES[self.loss](of_real, of_fake)
        if not factor or self.penalty is None:
            return loss, real.new_zeros(())
        return loss, factor * self.penalty.value(self.critic, real, fake)

    def _generator_terms(self, real: Tensor, z: Tensor) -> tuple[Tensor]:
        fake = self.generator(z)
        of_fake, of_real = self.critic(torch.cat([fake, real])).chunk(2)
        return (LOSSES[self.loss](of_fake, of_real),)

    def second_order_problem(self, real: Tensor) -> SecondOrderProblem:
        """The sum of the critic's scores, by its parameters and by the samples that it scores.

        The samples are those of a step of the critic: real and generated.
        """
        with torch.no_grad():
            samples = torch.cat([real, self.generator(self.sample_latents(len(real)))])
        return sum_by_parameters_and_inputs(self.critic, samples)

    def evaluate(self, real: Tensor) -> tuple[Tensor, Tensor]:
        """As many samples of the average as real ones, and the penalty; leaves the random state."""
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(EVALUATION_SEED)
            fake = self(self.sample_latents(len(real)))
            return fake, self.penalty_value(real, fake)

    def penalty_value(self, real: Tensor, fake: Tensor) -> Tensor:
        """The weighted penalty; 0 without one."""
        if self.penalty is None:
            return real.new_zeros(())
        return self.penalty(self.critic, real, fake)

    def sample_latents(self, count: int) -> Tensor:
        return torch.randn(count, self.latent, device=self.device)


def averaging_factor(name: str, value: float) -> float:
    """A factor of an exponential moving average."""
    return fraction(name, value, "0.999 is usual for averages over many steps, 0 for none.")


def describe_penalty(penalty: hog.GradientPenalty | None) -> str:
    """A penalty in the words of its options: "r1_r2, weight 0.02"."""
    if penalty is None:
        return "none"
    every = "" if penalty.every == 1 else f", every {penalty.every}"
    options = "".join(f", {name} {value}" for name, value in penalty.options.items())
    return f"{penalty.kind}, weight {penalty.weight:g}{every}{options}"
