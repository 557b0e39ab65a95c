"""A generative adversarial network in the plane, with a gradient penalty."""

from typing import Any

import torch
from torch import Tensor, nn

import hoglib as hog
from experiments import logs, runs
from experiments.checks import at_least, hidden_widths, positive
from experiments.gan.adversarial import Adversarial
from experiments.gan.plots import plot_gan_curves, plot_points
from experiments.gan.table import PointsResult, points_table
from experiments.shared.mixture import PARTS
from experiments.shared.networks import mlp
from experiments.shared.quality import PointQuality, score_points

HeldOut = tuple[Tensor, Tensor]


class GAN(Adversarial):
    """Generator and critic of points in the plane.

    Args:
        penalty: A `hoglib.GradientPenalty`, or null for none.
        hidden: Widths of the hidden layers of both networks.
        act: Their activation.
        latent: Entries of z.
        critic_scale: Factor of the initial weights and biases of the critic's first layer: a network
            with torch's own is too smooth for modes of width 0.05 (Sitzmann et al., SIREN, 2020,
            section 3.2, do likewise).
        generator_scale: The same for the generator.
        lr: Learning rate of both Adams, which falls linearly to zero over the run.
        ema: Factor of the moving average at each step of the generator.
        training: Other options of `Adversarial`.
    """

    def __init__(
        self,
        penalty: hog.GradientPenalty | None,
        hidden: list[int] | None = None,
        act: str = "swish",
        latent: int = 2,
        critic_scale: float = 10.0,
        generator_scale: float = 20.0,
        lr: float = 3e-3,
        ema: float = 0.999,
        **training: Any,
    ) -> None:
        widths = hidden_widths(hidden, [128, 128, 128])
        at_least("latent", latent, 1)
        critic = scale_first_layer(mlp([2, *widths, 1], act), "critic_scale", critic_scale)
        generator = scale_first_layer(
            mlp([latent, *widths, 2], act), "generator_scale", generator_scale
        )
        super().__init__(critic, generator, latent, penalty, lr, ema, **training)

    def validation_step(self, batch: HeldOut, batch_idx: int) -> None:
        real, _ = batch
        fake, penalty = self.evaluate(real)
        quality = score_points(fake, self.data.target, real)
        self.log_dict({**logged("val", quality), "val/penalty": penalty}, batch_size=len(real))

    def test_step(self, batch: HeldOut, batch_idx: int) -> None:
        real, other = batch
        fake, _ = self.evaluate(real)
        quality, options = score_points(fake, self.data.target, real), self.trained_with
        how = options["penalty"], options["loss"], options["data.kind"]
        own = PointsResult(*how, int(self.average.n_averaged), *quality)  # type: ignore[arg-type]
        scores = score_points(other, self.data.target, real)
        floor = PointsResult("real points", "", own.data, 0, *scores)
        self.log_dict(logged("test", quality), batch_size=len(real))
        folder, parts = runs.run_folder(self.trainer), self.data.target.parts
        table = points_table(own, runs.newest_results(folder, own), floor, parts, len(real))
        title = (
            f"{own.loss} loss, {own.penalty}: {own.covered} of {PARTS} {parts}, "
            f"{own.high:.1%} within three sigma"
        )
        pictures = [plot_points(folder / "points.png", self.critic, real, fake, title)]
        if curves := logs.curves(folder):
            pictures.append(plot_gan_curves(folder / "training_curve.png", curves))
        runs.write_report(folder, table, *pictures)


def logged(stage: str, quality: PointQuality) -> dict[str, float]:
    names = {"covered": "covered", "high_quality": "high", "wasserstein": "distance"}
    return {f"{stage}/{name}": float(getattr(quality, of)) for name, of in names.items()}


def scale_first_layer(network: nn.Sequential, name: str, scale: float) -> nn.Sequential:
    """The network, with the initial weights and biases of its first layer times scale."""
    positive(name, scale)
    with torch.no_grad():
        for parameter in network[0].parameters():
            parameter.mul_(scale)
    return network
