"""The Trainer of the experiments: Lightning's, with the commands ``verify`` and ``spectrum``."""

import json as json_module
from functools import partial
from inspect import getdoc
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden

import hoglib as hog
from experiments import runs
from experiments.shared.style import new_figure, picture

# Not among the public names: it makes `verify` print and exit exactly as `hoglib audit` does.
from hoglib.cli.isolation import run_here
from hoglib.cli.outcomes import Outcomes, stdout_for
from hoglib.errors import ArgumentValueError
from hoglib.lightning import second_order_problems

SPECTRUM = "spectrum.json"


class Trainer(pl.Trainer):
    """Lightning's Trainer, with ``verify`` and ``spectrum``."""

    status = 0  # exit status of the command

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Lightning's handler of SIGTERM ends a run with status 0, and communicates between processes
        # wherever the signal arrives. The handler that was there before is called after it.
        signals: Any = self._signal_connector
        signals._sigterm_notifier_fn = lambda *_: None

    def verify(
        self,
        model: pl.LightningModule,
        datamodule: pl.LightningDataModule | None = None,
        stand_ins: bool = True,
        routes: list[str] | None = None,
        json: bool = False,
        ckpt_path: str | None = None,
        weights_only: bool | None = None,
    ) -> None:
        """Audit what the model differentiates twice, on the first training batch; writes nothing.

        Args:
            model: has a method second_order_problem(batch).
            datamodule: where the batch comes from; the model itself by default.
            stand_ins: whether to judge what runs inside of hoglib.second_order(), or torch alone.
            routes: those that must be right, such as [rr, fr]; by default the one of hoglib.hvp.
            json: whether to print reports as JSON.
            ckpt_path: a checkpoint whose parameters are judged, or "last"; by default the initial ones.
            weights_only: is not used; the config of a run has it.
        """
        with stdout_for(json):
            problems = self._problems(model, datamodule, ckpt_path)
            method = getattr(model, "second_order_problem", None)
            description = (getdoc(method) or "").split("\n\n")[0]
            if description and not json:
                print(f"{type(model).__name__}.second_order_problem: {description}\n")
            outcomes = Outcomes(torch.initial_seed(), as_json=json)
            audit = partial(hog.audit, routes=routes, stand_ins=stand_ins)
            checks = [(name, partial(audit, *problem)) for name, *problem in problems]
            for found in run_here([(type(model).__name__, partial(iter, checks))], outcomes.seed):
                outcomes.take(found, "auditing")
        self.status = outcomes.conclude(problem=description, stand_ins=stand_ins)

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

        Prints the ends of the spectrum, the trace and the fraction that is negative; a picture of the
        density and spectrum.json are written into the run's folder.

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
        problems = self._problems(model, datamodule, ckpt_path)
        spectra = {}
        for name, loss, params, batch in problems:
            spectrum = hog.curvature.hessian_spectrum(
                loss, params, batch, k=k, num_samples=num_samples, steps=steps, stand_ins=stand_ins,
                progress=self.progress_bar_callback is not None,
            )  # fmt: skip
            sizes = f"{spectrum.size:,} parameters, {spectrum.products} products"
            print(f"\nHessian of {name}, {sizes}\n{spectrum.summary()}")
            spectra[name] = spectrum
        folder = runs.run_folder(self)  # not before: a refused call leaves none
        numbers = {name: spectrum.to_dict() for name, spectrum in spectra.items()}
        (folder / SPECTRUM).write_text(json_module.dumps(numbers, indent=1) + "\n")
        picture = plot_spectra(folder / "spectrum.png", spectra).save()
        print(f"\nSaved {folder / SPECTRUM} and {picture}")

    def _problems(
        self,
        model: pl.LightningModule,
        datamodule: pl.LightningDataModule | None,
        ckpt_path: str | None,
    ) -> list[Any]:
        """What the model differentiates twice, at the parameters of a checkpoint if there is one."""
        batch = self._first_batch(model, datamodule)
        if ckpt_path is not None:
            model.load_state_dict(runs.load_checkpoint(Path(ckpt_path))["state_dict"])
        return list(second_order_problems(model, batch))

    def _first_batch(
        self, model: pl.LightningModule, datamodule: pl.LightningDataModule | None
    ) -> Any:
        """The batch of the first training step; model and data are set up as for a fit."""
        self.strategy.connect(model)
        model.trainer = self
        owners: list[Any] = [model]
        if datamodule is not None:
            self.datamodule = datamodule
            datamodule.trainer = self
            owners.insert(0, datamodule)
        for owner in owners:
            owner.prepare_data()
        for owner in owners:
            owner.setup("fit")
        model.configure_model()
        self.precision_plugin.convert_module(model).to(self.strategy.root_device)

        def hook(name: str) -> Any:
            overriding = [owner for owner in owners if is_overridden(name, owner)]
            return getattr((overriding or owners)[0], name)

        loaders = CombinedLoader(hook("train_dataloader")(), "max_size_cycle")
        for batch, *_ in loaders:
            batch = self.precision_plugin.convert_input(batch)
            batch = hook("on_before_batch_transfer")(batch, 0)
            batch = hook("transfer_batch_to_device")(batch, self.strategy.root_device, 0)
            return hook("on_after_batch_transfer")(batch, 0)
        raise ArgumentValueError(
            f"{type(owners[0]).__name__}: expected a training batch, got an empty loader; give it data."
        )


@picture
def plot_spectra(spectra: dict[str, hog.curvature.Spectrum]) -> Any:
    """The density of eigenvalues with one standard error, and the eigenvalues at both ends as ticks."""
    figure = new_figure(7, 3.4 * len(spectra))
    axes = figure.subplots(len(spectra), 1, squeeze=False)[:, 0]
    for axis, (name, spectrum) in zip(axes, spectra.items(), strict=True):
        spectrum.plot(axis).set_title(name)
    return figure
