"""`python -m experiments verify`: are the second derivatives right that a config trains with?"""

from functools import partial
from inspect import getdoc
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden

from experiments import runs
from hoglib.auditing.api import audit
from hoglib.cli.outcomes import Outcomes, stdout_for
from hoglib.errors import ArgumentValueError
from hoglib.lightning.audit import METHOD, check_method, problems_of


class Trainer(pl.Trainer):
    """Lightning's, and `verify`."""

    status = 0  # that the command exits with

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
            check_method(model)
            batch = self._first_batch(model, datamodule)
            if ckpt_path is not None:
                load(model, Path(ckpt_path))
            said = (getdoc(getattr(model, METHOD)) or "").split("\n\n")[0]
            if said and not json:
                print(f"{type(model).__name__}.{METHOD}: {said}\n")
            found = Outcomes(torch.initial_seed(), as_json=json)
            for name, *problem in problems_of(model, batch):
                judged = partial(audit, *problem, routes=routes, stand_ins=stand_ins)
                found.judge(name, "auditing", judged)
        self.status = found.conclude(problem=said, stand_ins=stand_ins)

    def _first_batch(
        self, model: pl.LightningModule, datamodule: pl.LightningDataModule | None
    ) -> Any:
        """What the first training step is given; model and data are set up as for a fit."""
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
            having = [owner for owner in owners if is_overridden(name, owner)]
            return getattr((having or owners)[0], name)

        loaders = CombinedLoader(hook("train_dataloader")(), "max_size_cycle")
        for batch, *_ in loaders:
            batch = self.precision_plugin.convert_input(batch)
            batch = hook("on_before_batch_transfer")(batch, 0)
            batch = hook("transfer_batch_to_device")(batch, self.strategy.root_device, 0)
            return hook("on_after_batch_transfer")(batch, 0)
        raise ArgumentValueError(
            f"{type(owners[0]).__name__}: expected a training batch, got an empty loader; give it data."
        )


def load(model: pl.LightningModule, checkpoint: Path) -> None:
    """The parameters and buffers of a checkpoint of the same model."""
    try:
        model.load_state_dict(runs.load(checkpoint)["state_dict"])
    except RuntimeError as error:
        raise ArgumentValueError(
            f"checkpoint: expected one of {type(model).__name__} as the config makes it, got another "
            f"one in {checkpoint} ({' '.join(str(error).split())}); give the config.yaml that lies "
            "beside it with --config."
        ) from error
