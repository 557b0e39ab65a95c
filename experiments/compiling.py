"""Whether a run compiles what it repeats: decided by its number of steps alone, and kept in its
checkpoints.

Compiled code rounds otherwise than torch's own, so a run that is resumed goes on in the way that it
began in. Neither the cache nor the load of the machine has a say.
"""

from typing import Any

import lightning.pytorch as pl

import hoglib as hog
from hoglib.errors import ArgumentValueError

KEY = "compiled"
# To capture a meta-gradient takes about as long as this many losses without a graph, whatever the
# model: both grow with the number of its operations.
ENOUGH = 200

Wanted = bool | str | None


class Choice:
    """How the meta-gradient of one learner is run.

    wanted: null, as a graph if that pays for the steps of the run; true, as a graph in the way that
    takes least time for as many; false; or the way itself, as in `hoglib.MAML`. maml: None for a model
    that has no meta-gradient of MAML's; why: what it is instead.
    """

    def __init__(self, wanted: Wanted, maml: hog.MAML | None, why: str) -> None:
        if wanted not in (None, False) and maml is None:
            raise ArgumentValueError(
                f"compile: expected null or false for {why}, got {wanted!r}; leave it out."
            )
        if wanted is not None and maml is not None:
            maml.compiled = wanted  # raises for what is none
        self.wanted, self.maml = wanted, maml
        self.began: Wanted = None

    def load(self, checkpoint: dict[str, Any]) -> None:
        """Runs from before there was a choice began without a graph."""
        self.began = checkpoint.get(KEY, False)

    def save(self, checkpoint: dict[str, Any]) -> None:
        if self.maml is not None:
            checkpoint[KEY] = self.maml.way

    def decide(self, trainer: pl.Trainer) -> None:
        """At the start of training, and says so in a line; MAML does where it is left to it."""
        if self.maml is None or self.wanted not in (None, True):
            return
        losses = losses_of(trainer)
        self.maml.compile_for = losses
        self.maml.compiled, said = self._decided(losses)
        if said and trainer.is_global_zero:
            print(f"compile: {said}", flush=True)

    def _decided(self, losses: int | None) -> tuple[bool | str, str]:
        if self.began is not None:
            return self.began, f"{self.began!r}, as the run began"
        if self.wanted is None and losses is not None and losses < ENOUGH:
            return False, f"False, for {losses:,} losses are too few for a graph to pay"
        return True, ""


def losses_of(trainer: pl.Trainer) -> int | None:
    """How many losses the whole run computes, those before it was resumed with them."""
    steps = trainer.estimated_stepping_batches
    return None if steps == float("inf") else int(steps) * trainer.accumulate_grad_batches
