"""Whether MAML's meta-gradient runs as a graph: decided by the number of steps, kept in checkpoints.

Compiled code rounds differently from torch's kernels. So a resumed run continues in the mode in which
it began, and neither the cache nor the load of the machine influences the choice.
"""

from typing import Any

import lightning.pytorch as pl
from torch import Tensor

import hoglib as hog
from experiments.checks import finite
from experiments.shared.processes import TASKS, InProcesses
from hoglib.errors import ArgumentValueError

KEY = "compiled"  # in checkpoints
# Capturing a meta-gradient takes about as long as this many losses without a graph, whatever the
# model: both grow with the number of its operations. Compiling takes as long as so many with one.
LOSSES_THAT_PAY = 200
LOSSES_THAT_PAY_FOR_COMPILING = 10_000

CompileOption = bool | str | None


class CompileChoice:
    """How the meta-gradient of one learner is run.

    Args:
        option: As in :class:`hoglib.MAML`; or None: what pays for the number of steps of the run, no
            graph, a graph ("eager") or a compiled one (True).
        maml: The learner; None for a model without a meta-gradient of MAML.
        instead: What such a model is, for the error message.
    """

    def __init__(self, option: CompileOption, maml: hog.MAML | None, instead: str) -> None:
        if option not in (None, False) and maml is None:
            raise ArgumentValueError(
                f"compile: expected null or false for {instead}, got {option!r}; leave it out."
            )
        if option is not None and maml is not None:
            maml.compiled = option  # raises for an unknown mode
        self.option, self.maml = option, maml
        self.resumed: CompileOption = None

    def load(self, checkpoint: dict[str, Any]) -> None:
        """Remember the mode of a run that is resumed."""
        # checkpoints from before this option was there were trained without a graph
        self.resumed = checkpoint.get(KEY, False)

    def save(self, checkpoint: dict[str, Any]) -> None:
        """Store the mode in a checkpoint."""
        if self.maml is not None:
            checkpoint[KEY] = self.maml.compiled

    def apply(self, trainer: pl.Trainer) -> None:
        """Choose at the start of training, and print the choice."""
        if self.maml is None or self.option is not None:
            return
        self.maml.compiled, reason = self._choose(expected_losses(trainer))
        if trainer.is_global_zero:
            print(f"compile: {self.maml.compiled!r}, {reason}", flush=True)

    def _choose(self, losses: int | None) -> tuple[bool | str, str]:
        if self.resumed is not None:
            return self.resumed, "as the run began"
        if losses is None or losses >= LOSSES_THAT_PAY_FOR_COMPILING:
            return True, "which pays for long runs"
        if losses < LOSSES_THAT_PAY:
            return False, f"for {losses:,} losses are too few for a graph to pay"
        return "eager", f"for {losses:,} losses are too few for compiling to pay"


class WithCompileChoice(InProcesses):
    """A module whose checkpoints hold how its meta-gradient runs.

    Attributes:
        compile_choice: The choice, set by the class that inherits.
    """

    compile_choice: CompileChoice
    shared = TASKS

    def meta_step(self, learner: Any, tasks: Any) -> Tensor:
        """The meta-loss on the tasks of this process."""
        own, weight = hog.meta.shard(tasks)
        loss = weight * learner.loss(own)
        finite("meta-loss", loss, "Lower inner_lr or lr.")
        self.log("train/loss", loss.detach(), prog_bar=True, batch_size=1)
        return loss

    def on_train_start(self) -> None:
        self.compile_choice.apply(self.trainer)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        self.compile_choice.save(checkpoint)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        self.compile_choice.load(checkpoint)


def expected_losses(trainer: pl.Trainer) -> int | None:
    """How many losses the whole run computes, those before it was resumed included; None: no limit."""
    steps = trainer.estimated_stepping_batches
    return None if steps == float("inf") else int(steps) * trainer.accumulate_grad_batches
