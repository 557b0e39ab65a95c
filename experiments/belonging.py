"""Checkpoints that say how they were trained, and are taken by such a run alone."""

from typing import Any

import lightning.pytorch as pl

from hoglib.errors import ArgumentValueError


class Belonging(pl.LightningModule):
    """A LightningModule whose checkpoints belong to its own options and to those of its data.

    What a network was trained on is told by the split: with another one it would be tested on that.
    """

    options: dict[str, Any]

    @property
    def trained_with(self) -> dict[str, Any]:
        """What a checkpoint must agree with to be judged or gone on from."""
        data = self.trainer.datamodule.options  # type: ignore[attr-defined]
        return {**self.options, **{f"data.{name}": value for name, value in data.items()}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["trained_with"] = self.trained_with

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        theirs = checkpoint.get("trained_with", {})
        other = [name for name, value in self.trained_with.items() if value != theirs.get(name)]
        if other:
            listed = ", ".join(f"{name} {self.trained_with[name]}" for name in other)
            came = ", ".join(f"{name} {theirs.get(name)}" for name in other)
            raise ArgumentValueError(
                f"checkpoint: expected one trained with {listed}, as the config says, got one "
                f"trained with {came}; give the config.yaml that lies beside the checkpoint with "
                "--config."
            )
