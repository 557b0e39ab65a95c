"""A generative adversarial network of handwritten digits, held together by a gradient penalty."""

from pathlib import Path

import torch
from torch import Tensor

import hoglib as hog
from experiments import plots, runs, tables
from experiments.adversarial import Adversarial
from experiments.data.mnist_features import classifier
from experiments.networks import image_critic, image_generator
from experiments.quality import Drawn, judge_digits
from hoglib._core import validation

HeldOut = tuple[Tensor, Tensor]
ACROSS = 10  # a grid has as many rows and columns
GRID_SEED = 2**43  # of the points whose images the grids show, the same ones at every visit
GRIDS = "grids"  # the folder of them


class ImageGAN(Adversarial):
    """Generator and critic of 28 x 28 images, by convolutions (Radford et al., DCGAN, 2016, without
    its norms, which would tie the samples of a batch to one another in the penalty).

    Every validation draws the same 10 x 10 points and saves their images in the run's folder.

    channels, generator_channels: of the first convolution of the critic, and before the last one of the
    generator; act: of both; latent: entries of z; all other options as in `Adversarial`.
    """

    def __init__(
        self,
        penalty: hog.GradientPenalty | None,
        loss: str = "relativistic",
        critic_steps: int = 1,
        channels: int = 32,
        generator_channels: int = 32,
        act: str = "swish",
        latent: int = 64,
        lr: float = 2e-3,
        betas: tuple[float, float] = (0.5, 0.99),
        decay: bool = True,
        ema: float = 0.995,
        compile: bool | str = False,
    ) -> None:
        validation.at_least("channels", channels, 1)
        validation.at_least("generator_channels", generator_channels, 1)
        validation.at_least("latent", latent, 1)
        critic = image_critic(channels, act)
        generator = image_generator(latent, generator_channels, act)
        super().__init__(
            critic, generator, latent, penalty, loss, critic_steps, lr, betas, decay, ema, compile
        )
        self.options |= {
            "channels": channels,
            "generator_channels": generator_channels,
            "act": act,
            "latent": latent,
        }

    def grid(self) -> Tensor:
        """Images [100, 1, 28, 28] of the average at fixed points, drawn on the CPU."""
        generator = torch.Generator().manual_seed(GRID_SEED)
        return self(torch.randn(ACROSS**2, self.latent, generator=generator).to(self.device))

    @property
    def steps(self) -> int:
        """Of the generator, so far."""
        return int(self.average.n_averaged)

    def grid_file(self) -> Path:
        return runs.run_folder(self.trainer) / GRIDS / f"step_{self.steps:06d}.png"

    def judged(self, images: Tensor, real: Tensor) -> Drawn:
        network = classifier()
        return judge_digits(network.seen(images.cpu()), network.seen(real.cpu()))

    def validation_step(self, real: Tensor, batch_idx: int) -> None:
        fake, penalty = self.generated(real)
        values = self.judged(fake, real)
        self.log_dict(
            {
                "val/frechet": values.frechet,
                "val/confident": values.confident,
                "val/classes": float(values.classes),
                "val/entropy": values.entropy,
                "val/penalty": penalty,
            },
            batch_size=len(real),
        )
        plots.save_grid(self.grid(), ACROSS, self.grid_file())

    def test_step(self, batch: HeldOut, batch_idx: int) -> None:
        real, training = batch
        fake, _ = self.generated(real)
        found, floor = self.judged(fake, real), self.judged(training, real)
        folder = runs.run_folder(self.trainer)
        how = self.trained_with
        row = tables.DrawnRow(
            how["penalty"], how["loss"], how["data.images"], self.steps, *found[:-1]
        )
        truth = tables.DrawnRow("real training digits", "", row.data, 0, *floor[:-1])
        self.log_dict(
            {
                "test/frechet": found.frechet,
                "test/confident": found.confident,
                "test/classes": float(found.classes),
                "test/entropy": found.entropy,
            },
            batch_size=len(real),
        )
        summary = row._asdict()
        runs.write_summary(folder, summary)
        others = [
            tables.DrawnRow(**other)
            for other in runs.summaries(folder)
            if other.keys() == summary.keys()
        ]
        table = tables.drawn(row, others, truth, found.shares, len(real))
        print(f"\n{table}\n")
        (folder / "table.txt").write_text(table + "\n")
        plots.save_grid(self.grid(), ACROSS, self.grid_file())
        metrics = folder / "metrics.csv"
        picture = plots.drawn(
            {step: file for step, file in grids(folder) if step <= self.steps},
            ACROSS,
            plots.columns(metrics) if metrics.exists() else {},
            floor.frechet,
            found.shares,
            f"A generator trained on {row.data}: {row.loss} loss, {row.penalty}",
            folder / "digits.png",
        )
        print(f"Saved {folder / 'table.txt'}, {picture}; grids over time in {folder / GRIDS}")


def grids(folder: Path) -> list[tuple[int, Path]]:
    """The grids of a run by their step, the earliest first."""
    files = sorted((folder / GRIDS).glob("step_*.png"))
    return [(int(file.stem.removeprefix("step_")), file) for file in files]
