"""A generative adversarial network of handwritten digits, with a gradient penalty."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import hoglib as hog
from experiments import logs, runs
from experiments.checks import at_least
from experiments.gan.adversarial import Adversarial
from experiments.gan.plots import plot_generated_digits, save_grid
from experiments.gan.table import DigitsResult, digits_table
from experiments.shared.digit_classifier import load_classifier
from experiments.shared.networks import image_critic, image_generator
from experiments.shared.quality import DigitQuality, score_digits

HeldOut = tuple[Tensor, Tensor]
ACROSS = 10  # rows and columns of a grid of images
GRID_SEED = 2**43  # of the points whose images the grids show, the same in every grid
GRIDS = "grids"  # their folder


class ImageGAN(Adversarial):
    """Generator and critic of 28 x 28 images, by convolutions.

    The networks are those of DCGAN (Radford et al., 2016) without its normalisation layers, which would
    make the samples of a batch depend on one another in the penalty. Every validation generates images
    from the same 10 x 10 points and saves them in the run's folder.

    Args:
        penalty: A `hoglib.GradientPenalty`, or null for none.
        channels: Channels of the critic's first convolution.
        generator_channels: Channels before the generator's last convolution.
        act: Activation of both networks.
        latent: Entries of z.
        lr: Learning rate of both Adams, which falls linearly to zero over the run.
        ema: Factor of the moving average at each step of the generator.
        training: Other options of `Adversarial`.
    """

    def __init__(
        self,
        penalty: hog.GradientPenalty | None,
        channels: int = 32,
        generator_channels: int = 32,
        act: str = "swish",
        latent: int = 64,
        lr: float = 2e-3,
        ema: float = 0.995,
        **training: Any,
    ) -> None:
        at_least("channels", channels, 1)
        at_least("generator_channels", generator_channels, 1)
        at_least("latent", latent, 1)
        critic = image_critic(channels, act)
        generator = image_generator(latent, generator_channels, act)
        super().__init__(critic, generator, latent, penalty, lr, ema, **training)
        self.options |= {"channels": channels, "generator_channels": generator_channels}
        self.options |= {"act": act, "latent": latent}

    def validation_step(self, real: Tensor, batch_idx: int) -> None:
        fake, penalty = self.evaluate(real)
        quality = self.score(fake, real)
        values = self.logged("val", quality)
        self.log_dict({**values, "val/penalty": penalty}, batch_size=len(real))
        save_grid(self.grid_file(), self.grid(), ACROSS)

    def test_step(self, batch: HeldOut, batch_idx: int) -> None:
        real, training = batch
        fake, _ = self.evaluate(real)
        quality, floor = self.score(fake, real), self.score(training, real)
        options = self.trained_with
        own = DigitsResult(
            options["penalty"], options["loss"], options["data.images"], self.steps, *quality[:-1]
        )
        truth = DigitsResult("real training digits", "", own.data, 0, *floor[:-1])
        self.log_dict(self.logged("test", quality), batch_size=len(real))
        folder = runs.run_folder(self.trainer)
        others = runs.newest_results(folder, own)
        table = digits_table(own, others, truth, quality.shares, len(real))
        save_grid(self.grid_file(), self.grid(), ACROSS)
        grids = {step: file for step, file in saved_grids(folder).items() if step <= self.steps}
        frechet = logs.curves(folder).get("val/frechet", [])
        title = f"A generator trained on {own.data}: {own.loss} loss, {own.penalty}"
        picture = plot_generated_digits(
            folder / "digits.png", grids, ACROSS, frechet, floor.frechet, quality.shares, title
        )
        runs.write_report(folder, table, picture)
        if runs.is_rank_zero():
            print(f"Grids of generated digits over time are in {folder / GRIDS}")

    def logged(self, stage: str, quality: DigitQuality) -> dict[str, float]:
        return {f"{stage}/{k}": float(v) for k, v in quality._asdict().items() if k != "shares"}

    @property
    def steps(self) -> int:
        """Steps of the generator so far."""
        return int(self.average.n_averaged)

    def score(self, images: Tensor, real: Tensor) -> DigitQuality:
        classifier = load_classifier()
        return score_digits(classifier.features(images.cpu()), classifier.features(real.cpu()))

    def grid(self) -> Tensor:
        """Images [100, 1, 28, 28] of the average at fixed points, which are drawn on the CPU."""
        generator = torch.Generator().manual_seed(GRID_SEED)
        return self(torch.randn(ACROSS**2, self.latent, generator=generator).to(self.device))

    def grid_file(self) -> Path:
        return runs.run_folder(self.trainer) / GRIDS / f"step_{self.steps:06d}.png"


def saved_grids(folder: Path) -> dict[int, Path]:
    """The grids of a run by their step, the earliest first."""
    files = sorted((folder / GRIDS).glob("step_*.png"))
    return {int(file.stem.removeprefix("step_")): file for file in files}
