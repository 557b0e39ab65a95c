"""A generative adversarial network in the plane, held together by a gradient penalty."""

from typing import Any

import torch
from torch import Tensor, nn

import hoglib as hog
from experiments import plots, runs, tables
from experiments.adversarial import Adversarial
from experiments.data.mixture import PARTS, Target
from experiments.networks import mlp
from experiments.quality import judge, wasserstein
from hoglib._core import validation

HeldOut = tuple[Tensor, Tensor]


class GAN(Adversarial):
    """Generator and critic of points in the plane: what is trained, and how it is judged.

    hidden, act: of both networks; latent: entries of z; critic_scale, generator_scale: what the
    initial weights and biases of the first layer are multiplied by, since a network with torch's own
    is too smooth for modes of width 0.05 (Sitzmann et al., SIREN, 2020, section 3.2, likewise); all
    other options as in `Adversarial`.
    """

    def __init__(
        self,
        penalty: hog.GradientPenalty | None,
        loss: str = "relativistic",
        critic_steps: int = 1,
        hidden: list[int] | None = None,
        act: str = "swish",
        latent: int = 2,
        critic_scale: float = 10.0,
        generator_scale: float = 20.0,
        lr: float = 3e-3,
        betas: tuple[float, float] = (0.5, 0.99),
        decay: bool = True,
        ema: float = 0.999,
        compile: bool | str = False,
    ) -> None:
        widths = [128, 128, 128] if hidden is None else hidden
        for width in widths:
            validation.at_least("hidden", width, 1)
        validation.at_least("latent", latent, 1)
        critic = steep(mlp([2, *widths, 1], act), "critic_scale", critic_scale)
        generator = steep(mlp([latent, *widths, 2], act), "generator_scale", generator_scale)
        super().__init__(
            critic, generator, latent, penalty, loss, critic_steps, lr, betas, decay, ema, compile
        )

    @property
    def target(self) -> Target:
        return self.trainer.datamodule.target  # type: ignore[attr-defined]

    def validation_step(self, batch: HeldOut, batch_idx: int) -> None:
        real, _ = batch
        fake, penalty = self.generated(real)
        quality = judge(fake, self.target)
        values: dict[str, Any] = {
            "val/covered": float(quality.covered),
            "val/high_quality": quality.high,
            "val/wasserstein": wasserstein(fake, real),
            "val/penalty": penalty,
        }
        self.log_dict(values, batch_size=len(real))

    def test_step(self, batch: HeldOut, batch_idx: int) -> None:
        real, other = batch
        fake, _ = self.generated(real)
        how = self.trained_with
        row = tables.Generated(
            how["penalty"],
            how["loss"],
            how["data.kind"],
            int(self.average.n_averaged),
            *judge(fake, self.target),
            wasserstein(fake, real),
        )
        truth = tables.Generated(
            "real points", "", row.data, 0, *judge(other, self.target), wasserstein(other, real)
        )
        values = {"covered": row.covered, "high_quality": row.high, "wasserstein": row.distance}
        self.log_dict({f"test/{k}": float(v) for k, v in values.items()}, batch_size=len(real))
        folder = runs.run_folder(self.trainer)
        runs.write_summary(folder, row._asdict())
        others = [
            tables.Generated(**summary)
            for summary in runs.summaries(folder)
            if summary.keys() == row._asdict().keys()
        ]
        table = tables.generated(row, others, truth, self.target.parts, len(real))
        print(f"\n{table}\n")
        (folder / "table.txt").write_text(table + "\n")
        saved = [
            folder / "table.txt",
            plots.points(
                self.critic, real, fake, title(row, self.target.parts), folder / "points.png"
            ),
        ]
        if (folder / "metrics.csv").exists():
            saved.append(plots.gan_curves(folder / "metrics.csv", folder / "training_curve.png"))
        print("Saved " + ", ".join(str(path) for path in saved))


def steep(network: nn.Sequential, what: str, scale: float) -> nn.Sequential:
    """The network, with the initial weights and biases of its first layer times scale."""
    validation.positive(what, scale)
    with torch.no_grad():
        for parameter in network[0].parameters():
            parameter.mul_(scale)
    return network


def title(row: "tables.Generated", parts: str) -> str:
    return (
        f"{row.loss} loss, {row.penalty}: {row.covered} of {PARTS} {parts}, "
        f"{row.high:.1%} within three sigma"
    )
