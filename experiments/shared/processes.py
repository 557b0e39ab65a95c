"""How the processes of a Trainer with several devices share a training."""

import os
import subprocess
import sys
import threading
import time
from typing import Any, Self

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from jsonargparse import ArgumentParser
from lightning.pytorch.strategies import DDPStrategy
from lightning_utilities.core.apply_func import apply_to_collection
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor

from experiments import runs
from hoglib.errors import ArgumentValueError

BATCHES = "batches"  # each takes a part of each batch
TASKS = "tasks"  # the training step takes its part, as `hoglib.meta.shard` does
UNUSED = "ddp_find_unused_parameters_true"

LOST = (
    "expected all processes to run to the end, got one that ended: its output tells why; without any, "
    "it was killed, as for want of memory. If there is a checkpoint, resume it with --ckpt_path last."
)
POLL_SECONDS = 0.5  # between two looks at the processes that this one has started
GRACE_SECONDS = 30.0  # for this process to end by itself after one that it has started
_PARENT = os.getppid()


class InProcesses(pl.LightningModule):
    """A module that several processes train on the mean of their losses.

    Attributes:
        shared: What the processes share: BATCHES, TASKS, or "" for a module that one process trains.
        one_process: Why one process trains it, for the error where several are asked for.
    """

    shared = BATCHES
    one_process = ""

    @property
    def data(self) -> Any:
        """The data of the run."""
        return self.trainer.datamodule  # type: ignore[attr-defined]

    @classmethod
    def load_from_checkpoint(  # type: ignore[override] # Lightning's other arguments are not needed
        cls, checkpoint_path: Any, **options: Any
    ) -> Self:
        """The module of a checkpoint, with the options and the parameters that it was trained with.

        Args:
            checkpoint_path: A file, or a run's folder.
            options: Other options than the checkpoint records, such as ``base=None`` where a path is
                not there any more.
        Returns:
            The module, on the CPU and in eval mode. It needs no Trainer.
        """
        content = runs.load_checkpoint(runs.find_checkpoint(checkpoint_path))
        if runs.CONFIG not in content:
            raise ArgumentValueError(
                f"checkpoint: expected one that records its options, got {str(checkpoint_path)!r} that "
                "does not; make the module with its options, and load its state_dict."
            )
        recorded = content[runs.CONFIG]["model"]
        parser = ArgumentParser(exit_on_error=False)
        parser.add_subclass_arguments(pl.LightningModule, "model")
        given = {**recorded, "init_args": {**recorded.get("init_args", {}), **options}}
        module = parser.instantiate_classes(parser.parse_object({"model": given})).model
        if not isinstance(module, cls):
            raise ArgumentValueError(
                f"checkpoint: expected one of {cls.__name__}, got one of {type(module).__name__}."
            )
        state = content["state_dict"]
        if any(state[name].dtype == torch.float64 for name, _ in module.named_parameters()):
            module.double()  # trained with the precision 64-true
        module.load_state_dict(state)
        return module.eval()

    _share = 1.0  # the weight of the loss of this process's part, in the mean over the processes

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """The part of this process, of a training batch."""
        trainer = self.trainer
        self._share = 1.0
        if trainer.world_size == 1 or not trainer.training or self.shared != BATCHES:
            return batch
        part = part_of(batch, trainer.global_rank, trainer.world_size)
        # DDP averages over processes, whose parts may differ by an example
        self._share = trainer.world_size * count_of(part) / count_of(batch)
        return part

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Backward of the weighted loss, whose average over the processes is that of the batch."""
        super().backward(loss if self._share == 1 else self._share * loss, *args, **kwargs)

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Log the mean over the processes, of means over their parts of a batch."""
        value = value if self._share == 1 else self._share * value
        super().log(name, value, *args, **{**kwargs, "sync_dist": self.trainer.world_size > 1})


def count_of(batch: Any) -> int:
    """The number of examples in a batch."""
    counts: list[int] = []
    # as Lightning finds the tensors of a batch that it moves
    apply_to_collection(batch, Tensor, lambda x: counts.append(len(x)))
    return counts[0]


def part_of(batch: Any, rank: int, world: int) -> Any:
    """Every world-th example of a batch, from the rank-th on."""
    if count_of(batch) < world:
        raise ArgumentValueError(
            f"batch: expected at least {world} examples, one for each process, got {count_of(batch)}; "
            "give a larger --data.batch, or fewer --trainer.devices."
        )
    return apply_to_collection(batch, Tensor, lambda x: x[rank::world])


class ProcessSeeds(pl.Callback):
    """Each process draws other random numbers, for its part of a batch."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.world_size > 1 and trainer.global_step == 0:  # a resumed run has its own state
            torch.manual_seed(torch.initial_seed() + trainer.global_rank)


def choose_strategy(strategy: Any, module: pl.LightningModule) -> Any:
    """The Trainer's strategy for a module: DDP waits for all gradients, unless told otherwise, and a
    manual optimization makes a step of some parameters at a time."""
    return UNUSED if strategy == "ddp" and not module.automatic_optimization else strategy


def check_processes(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Raise before other processes are started, where they cannot share the training of a module."""
    if trainer.world_size == 1:
        return
    kind, strategy, cores = type(module).__name__, trainer.strategy, os.cpu_count() or 1
    if not getattr(module, "shared", BATCHES):
        option, why = "trainer", getattr(module, "one_process", "")
        expected, got = f"one process for {kind}, {why}", str(trainer.world_size)
        advice = "--trainer.devices 1"
    elif strategy.root_device.type == "cpu" and trainer.num_devices > cores:
        option, expected = "trainer.devices", f"at most {cores} processes, one for each CPU core"
        got, advice = str(trainer.num_devices), f"--trainer.devices {cores}"
    elif not isinstance(strategy, DDPStrategy):
        option, expected = "trainer.strategy", f"ddp for {trainer.world_size} processes"
        got, advice = type(strategy).__name__, "--trainer.strategy ddp"
    elif not module.automatic_optimization and not strategy._ddp_kwargs.get(
        "find_unused_parameters"
    ):
        option = "trainer.strategy"
        expected = f"{UNUSED} for {kind}, each of whose steps is of some of its parameters"
        got, advice = "one that waits for the gradients of all", "--trainer.strategy ddp"
    else:
        return
    raise ArgumentValueError(f"{option}: expected {expected}, got {got}; use {advice}.")


def lost_process(error: BaseException) -> bool:
    """Whether the communication failed, as it does where another process has ended."""
    of_gloo = isinstance(error, RuntimeError) and "gloo" in str(error)  # it has no class of errors
    return of_gloo or (dist.is_available() and isinstance(error, dist.DistError))


def tells_of_lost_process() -> bool:
    """Whether it is for this process to say that one was lost: the first does, or, where the first was
    lost, the second."""
    rank = int(getattr(rank_zero_only, "rank", 0))
    end = time.monotonic() + 2  # in which the system gives this process another parent
    while rank == 1 and os.getppid() == _PARENT and time.monotonic() < end:
        time.sleep(0.05)
    return rank == 0 or (rank == 1 and os.getppid() != _PARENT)


class ProcessWatch(pl.Callback):
    """Ends all processes where one that the Trainer has started ends with an error.

    Lightning's own observer kills them within five seconds, without a message, and also a first process
    that is about to end with its own, as after Ctrl-C. This one lets it, and kills what is left after
    GRACE_SECONDS, as where it waits on a GPU for one that has gone.
    """

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        launcher: Any = trainer.strategy.launcher
        started: list[subprocess.Popen[bytes]] = getattr(launcher, "procs", [])
        if not started:
            return  # by torchrun, or watched already
        watched = launcher.procs = _Watched(started)
        if not isinstance(started, _Watched):
            started.clear()  # for Lightning's observer: no process is left to look at
            threading.Thread(target=watched.run, daemon=True, name="process-watch").start()


class _Watched(list["subprocess.Popen[bytes]"]):
    """Processes that a thread looks at."""

    def run(self) -> None:
        while not any(codes := [process.poll() for process in self]):
            if None not in codes:
                return
            time.sleep(POLL_SECONDS)
        time.sleep(GRACE_SECONDS)  # the thread ends with this process
        for process in self:
            process.kill()
        print(f"\nerror: {LOST}", file=sys.stderr, flush=True)
        os._exit(2)


def leave_processes() -> None:
    """End the communication. What its threads still run when the interpreter exits would abort it."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
