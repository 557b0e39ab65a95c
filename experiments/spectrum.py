"""`python -m experiments spectrum`: the curvature where a training ended."""

import json
from pathlib import Path

import lightning.pytorch as pl

from experiments import plots, runs, verify
from hoglib.curvature.spectrum import spectrum_of
from hoglib.lightning.audit import check_method, problems_of

FILE = "spectrum.json"


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
            print(found.summary())
            spectra[name] = found
        numbers = {name: found.to_dict() for name, found in spectra.items()}
        (folder / FILE).write_text(json.dumps(numbers, indent=1) + "\n")
        picture = plots.spectra(spectra, folder / "spectrum.png")
        print(f"\nSaved {folder / FILE} and {picture}")
