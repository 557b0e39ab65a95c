"""`python -m experiments spectrum`: the curvature where a training ended."""

import json
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from torch import Tensor

import hoglib as hog
from experiments import plots, runs, verify
from hoglib import _arguments as arguments
from hoglib.curvature.density import SpectralDensity
from hoglib.lightning.audit import check_method, problems_of

FILE = "spectrum.json"


class Spectrum(NamedTuple):
    """What products with a Hessian tell of its eigenvalues."""

    size: int
    smallest: Tensor  # ascending, as are the largest
    largest: Tensor
    trace: tuple[float, float]  # and its standard error
    negative: tuple[float, float]  # the part of the eigenvalues that is below
    below: float  # zero, but for rounding: a thousandth of the largest in magnitude
    density: SpectralDensity
    products: int

    def told(self) -> str:
        lines = {
            "largest": _listed(reversed(self.largest.tolist())),
            "smallest": _listed(self.smallest.tolist()),
            "trace": f"{self.trace[0]:.4g} ± {self.trace[1]:.2g}",
            "negative": f"{100 * self.negative[0]:.2g}% ± {100 * self.negative[1]:.1g}% of them are "
            f"below {self.below:.2g}",
        }
        return "\n".join(f"  {name:9} {text}" for name, text in lines.items())

    def numbers(self) -> dict[str, Any]:
        """What JSON holds of it."""
        of = self.density
        return {
            "size": self.size, "products": self.products, "trace": self.trace,
            "negative": self.negative, "below": self.below, "smallest": self.smallest.tolist(),
            "largest": self.largest.tolist(), "grid": of.grid.tolist(),
            "density": of.density.tolist(), "error": of.error.tolist(), "width": of.width,
        }  # fmt: skip


def spectrum_of(
    loss: Any, params: Any, batch: Any, k: int, num_samples: int, steps: int,
    stand_ins: bool = True, progress: bool = False,
) -> Spectrum:  # fmt: skip
    """The spectrum of the Hessian of a loss at a batch; its random vectors are those of the seed."""
    if batch is None:  # which is no data to go through
        loss, batch = partial(_without, loss), ()
    operator = hog.HessianOperator(loss, params, batch, stand_ins=stand_ins, progress=progress)
    size = operator.shape[0]
    if 2 * arguments.at_least("k", k, 1) > size:
        raise arguments.WrongValue(
            f"k: expected at most {size // 2}, half of the {size} parameters, got {k}; give fewer."
        )
    generator = torch.Generator().manual_seed(torch.initial_seed())
    ends = operator.eigsh(2 * k, which="BE", generator=generator).values.cpu()
    density = operator.spectral_density(num_samples, steps=steps, generator=generator)
    mean, error = density.average(lambda x: x)
    below = -1e-3 * float(ends.abs().max())
    negative = density.average(lambda x: (x < below).to(x))
    return Spectrum(
        size, ends[:k], ends[k:], (size * float(mean), size * float(error)),
        (float(negative[0]), float(negative[1])), below, density, operator.count,
    )  # fmt: skip


class Trainer(verify.Trainer):
    """Lightning's, `verify`, and `spectrum`."""

    def spectrum(
        self,
        model: pl.LightningModule,
        datamodule: pl.LightningDataModule | None = None,
        k: int = 5,
        num_samples: int = 10,
        steps: int = 80,
        stand_ins: bool = True,
        ckpt_path: str | None = None,
        weights_only: bool | None = None,
    ) -> None:
        """Eigenvalues of the Hessian that the model trains by, on the first training batch.

        Prints the ends of the spectrum, the trace and the part that is negative; a picture of the
        density and spectrum.json go into the run's folder.

        Args:
            model: has a method second_order_problem(batch).
            datamodule: where the batch comes from; the model itself by default.
            k: how many eigenvalues of each end.
            num_samples: random vectors for the density and the trace.
            steps: of Lanczos for each of them, a product each.
            stand_ins: whether to differentiate inside of hoglib.second_order().
            ckpt_path: a checkpoint, or a run's folder; by default the run's own last one.
            weights_only: is not used; the config of a run has it.
        """
        check_method(model)
        batch = self._first_batch(model, datamodule)
        if ckpt_path is not None:
            verify.load(model, Path(ckpt_path))
        shown = self.progress_bar_callback is not None
        folder = runs.run_folder(self)
        spectra = {}
        for name, loss, params, given in problems_of(model, batch):
            found = spectrum_of(loss, params, given, k, num_samples, steps, stand_ins, shown)
            print(f"\nHessian of {name}, {found.size:,} parameters, {found.products} products")
            print(found.told())
            spectra[name] = found
        numbers = {name: found.numbers() for name, found in spectra.items()}
        (folder / FILE).write_text(json.dumps(numbers, indent=1) + "\n")
        picture = plots.spectra(spectra, folder / "spectrum.png")
        print(f"\nSaved {folder / FILE} and {picture}")


def _without(loss: Any, params: Any, _: tuple[()]) -> Tensor:
    value: Tensor = loss(params, None)
    return value


def _listed(values: Any) -> str:
    return "  ".join(f"{value:.4g}" for value in values)
