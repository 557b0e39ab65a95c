"""The base class of the experiments: checkpoints record how they were trained."""

from typing import Any

import torch
from torch import Tensor

from experiments.checks import finite
from experiments.shared.processes import InProcesses
from experiments.shared.schedules import linear_decay
from hoglib.errors import ArgumentValueError


class Experiment(InProcesses):
    """A LightningModule whose checkpoints load only with the options that they were trained with.

    The options are those of the model and of its data: a network must not be tested on another split,
    of which it may have seen the test part in training.

    Attributes:
        options: Options of the model that a checkpoint must agree with, by name.
        lr: The learning rate at the start.
    """

    options: dict[str, Any]
    lr: float

    def configure_optimizers(self) -> Any:
        """Adam with a learning rate that falls linearly to zero over the run.

        One serves all networks: Adam is elementwise, so each network takes the steps of its own loss.
        """
        optimizer = torch.optim.Adam(self.parameters(), lr=self.lr)
        return [optimizer], [{"scheduler": linear_decay(self, optimizer), "interval": "step"}]

    def sum_of(
        self, losses: dict[str, Tensor], advice: str, count: int, bar: bool = True
    ) -> Tensor:
        """Log the training losses of networks on a batch of so many examples; their sum, of which each
        network has the gradient of its own."""
        for name, loss in losses.items():
            finite(f"loss of {name}", loss, advice)
        values = {f"train/{name}": loss.detach() for name, loss in losses.items()}
        self.log_dict(values, prog_bar=bar, batch_size=count)
        return torch.stack([*losses.values()]).sum()

    @property
    def trained_with(self) -> dict[str, Any]:
        """Options of model and data that a checkpoint must agree with."""
        of_data = {f"data.{name}": value for name, value in self.data.options.items()}
        return {**self.options, **of_data}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["trained_with"] = self.trained_with

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        # Lightning loads the parameters before it converts the module to trainer.precision, and would
        # round those of 64-true to float32
        self.trainer.strategy.precision_plugin.convert_module(self)
        saved = checkpoint.get("trained_with", {})
        different = [name for name, value in self.trained_with.items() if value != saved.get(name)]
        if different:
            expected = ", ".join(f"{name} {self.trained_with[name]}" for name in different)
            got = ", ".join(f"{name} {saved.get(name)}" for name in different)
            raise ArgumentValueError(
                f"checkpoint: expected one trained with {expected}, as the config says, got one "
                f"trained with {got}; leave out these options and --config: the config.yaml that lies "
                "beside the checkpoint is read."
            )
