"""The processes of torch.distributed that share the data of an operator.

Each sums over its part of the data, and one all-reduce adds up the sums. Behind them in the same
message every process has a place of its own, for what it went through and for what has to be the same
in all: vectors, parameters, buffers and, where each takes its part of what all were given, the data. A
process that fails takes part too, so that the others raise as well, in the place of waiting for it.
"""

import os
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from hoglib._core import validation
from hoglib._core.closures import numbers
from hoglib.errors import ArgumentValueError, DistributedError, UnsupportedError

SHARD, SHARDED = "shard", "sharded"
# by how much of its size a number of two processes may differ, which may run on unlike machines
ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-5}


class Report(NamedTuple):
    """What a process says of its pass over its data; numbers only, for the all-reduce."""

    failed: float = 0.0
    changed: float = 0.0  # whether parameters, buffers or settings have, since the last pass
    pieces: float = 0.0
    weight: float = 0.0  # the sum of the pieces' shares
    loss: float = 0.0  # the sum of share times loss
    largest: float = 0.0  # of the losses' sizes
    parted: float = 0.0  # whether pieces of one batch lie in several processes
    whole: float = 0.0  # the loss of that batch
    # each changes with what has to be the same in all processes
    seed: float = 0.0
    params: float = 0.0
    model: float = 0.0
    vectors: float = 0.0
    data: float = 0.0


ADVICE = {
    "seed": "the draws of kind='mc' need a generator with the same seed in each: "
    "generator=torch.Generator().manual_seed(0)",
    "params": "broadcast them from one process, as DistributedDataParallel does: "
    "`for p in model.parameters(): dist.broadcast(p.data, 0)`",
    "model": "these are its buffers (running statistics) and what is not in params; broadcast them "
    "from one process: `for b in model.buffers(): dist.broadcast(b, 0)`",
    "vectors": "random ones, those of trace and diagonal too, need a generator with the same seed in "
    "each, generator=torch.Generator().manual_seed(0); and solvers the same right-hand side",
    "data": "with processes='shard' all are given the same batches, and each takes its part: use "
    "shuffle=False, or 'sharded' where each is given a part of its own",
}


def together(reports: Sequence[Report]) -> Report:
    """What all of them went through."""
    total = Report(*map(sum, zip(*reports, strict=True)))
    return total._replace(
        largest=max(report.largest for report in reports),
        whole=max(reports, key=lambda report: report.parted).whole,
    )


class Processes:
    """Who shares the data: this process alone, or all of the default group.

    how: None alone; "shard" each takes its part of the data that all are given; "sharded" each is given
    its part.
    """

    def __init__(self, what: str, how: str | None, data: Any) -> None:
        self._what = what
        if how is not None:
            validation.one_of("processes", how, [SHARD, SHARDED])
        group = dist.is_available() and dist.is_initialized()
        if how is not None and not group and int(os.environ.get("WORLD_SIZE") or 1) > 1:
            raise ArgumentValueError(
                f"processes={how!r}: expected torch.distributed to be initialised, got WORLD_SIZE="
                f"{os.environ['WORLD_SIZE']} and no group; call torch.distributed.init_process_group() "
                "before."
            )
        self.world = dist.get_world_size() if group else 1
        self.rank = dist.get_rank() if group else 0
        if self.world > 1:
            self._check_sampler(how, data)
        if how is None:
            self.world, self.rank = 1, 0
        self.alone = self.world == 1
        self._how = how

    @property
    def splitting(self) -> bool:
        """Whether this process is to take a part of what it is given."""
        return not self.alone and self._how == SHARD

    def takes(self, number: int) -> bool:
        """Whether a batch, or a piece of the one batch, that all are given is for this process."""
        return not self.splitting or number % self.world == self.rank

    def share(self, count: int) -> int:
        """How many of so many batches it takes."""
        return len(range(self.rank, count, self.world)) if self.splitting else count

    def number(self, index: int) -> int:
        """The number in all processes of what this one has at an index."""
        if self.alone or self._how == SHARD:
            return index
        return self.rank + self.world * index

    def add_up(
        self, total: Tensor, used: Tensor, report: Report, error: Exception | None
    ) -> list[Report]:
        """Adds up total and used over the processes, in place; what each of them reports.

        In one all-reduce. Raises error, if there is one; and in all processes alike where another one
        has an error, or where they do not do the same.
        """
        dtype = torch.promote_types(total.dtype, torch.float32)
        numbers = torch.tensor(report._replace(failed=error is not None), dtype=torch.float64)
        numbers = _as_parts(numbers, dtype)
        places = torch.zeros(self.world, *numbers.shape, dtype=dtype)
        places[self.rank] = numbers
        flat = [x.reshape(-1).to(total.device, dtype) for x in (total, used, places)]
        message = torch.cat(flat)
        dist.all_reduce(message)
        sizes = [x.numel() for x in flat]
        for x, part in zip((total, used, places), message.split(sizes), strict=True):
            x.copy_(part.view(x.shape))
        reports = [Report(*row) for row in places.double().sum(1).tolist()]
        if any(one.failed for one in reports):
            self._raise(error, reports)
        self._check_same(reports, total.dtype)
        return reports

    def _raise(self, error: Exception | None, reports: list[Report]) -> None:
        mine = "" if error is None else f"{type(error).__name__}: {error}"
        said: list[Any] = [None] * self.world
        dist.all_gather_object(said, mine)
        if error is not None:
            raise error
        failed = [rank for rank, report in enumerate(reports) if report.failed]
        raise DistributedError(
            f"{self._what}: expected a sum over the data of all {self.world} processes, got an error "
            f"in process {failed[0]}, which is to be mended there: {said[failed[0]]}"
        )

    def _check_same(self, reports: list[Report], dtype: torch.dtype) -> None:
        for name, advice in ADVICE.items():
            numbers = [getattr(report, name) for report in reports]
            rounding = 0 if name == "seed" else ROUNDING.get(dtype, 1e-2)
            allowed = rounding * max(map(abs, numbers))
            others = [k for k, number in enumerate(numbers) if abs(number - numbers[0]) > allowed]
            if others:
                raise DistributedError(
                    f"{self._what}: expected the same {name} in all {self.world} processes, got "
                    f"other {name} in process {others[0]} than in process 0; {advice}."
                )

    def _check_sampler(self, how: str | None, data: Any) -> None:
        """What a DistributedSampler leaves of the data fits together with what is asked for."""
        around = getattr(data, "batch_sampler", None)
        samplers = [getattr(x, "sampler", None) for x in (data, around)]
        found = [sampler for sampler in samplers if isinstance(sampler, DistributedSampler)]
        if not found:
            return
        sampler = found[0]
        if how != SHARDED:
            raise ArgumentValueError(
                f"processes: expected 'sharded' for a loader with a {type(sampler).__name__}, which "
                f"gives each process a part of the data, got {how!r}; or pass a loader without one, "
                "with processes='shard' for a product over all of it that is shared out."
            )
        if (sampler.num_replicas, sampler.rank) != (self.world, self.rank):
            raise ArgumentValueError(
                f"data: expected the part of process {self.rank} of {self.world}, got a "
                f"{type(sampler).__name__} for process {sampler.rank} of {sampler.num_replicas}; leave "
                "out its num_replicas and rank."
            )
        dataset: Any = sampler.dataset
        count = len(dataset)
        if sampler.total_size > count:
            raise ArgumentValueError(
                f"data: expected every example in one process, got a {type(sampler).__name__} that "
                f"repeats {sampler.total_size - count} of {count}, so that {self.world} processes have "
                "as many: they would count twice. Pass a loader without it and processes='shard'."
            )


def of_tensors(tensors: Sequence[Tensor]) -> float:
    """A number that changes with any of them."""
    return mixed(numbers(list(tensors)))


def of_rows(rows: Tensor) -> float:
    """A number that changes with any number in the rows."""
    dtype = torch.promote_types(rows.dtype, torch.float32)  # half counts to 2048 only
    weights = torch.arange(1, rows.shape[1] + 1, dtype=dtype, device=rows.device).sin()
    return mixed((rows @ weights.to(rows.dtype)).tolist())


def beside(loss: Any, leaves: Sequence[Tensor]) -> list[Tensor]:
    """What a model computes with beside the leaves: frozen parameters, and buffers in use."""
    model = getattr(loss, "model", None)
    known = {id(leaf) for leaf in leaves}
    found: list[Tensor] = []
    for module in model.modules() if isinstance(model, nn.Module) else ():
        found += [p for p in module._parameters.values() if p is not None and id(p) not in known]
        if not (isinstance(module, _NormBase) and module.training):  # it takes those of the batch
            buffers = [b for b in module._buffers.values() if b is not None]
            found += [b for b in buffers if b.is_floating_point()]
    return found


def mixed(numbers: Sequence[float]) -> float:
    """One number that changes with each of them, and with their order."""
    values = torch.tensor(numbers, dtype=torch.float64)
    weights = torch.arange(1, len(values) + 1, dtype=torch.float64).sin()
    return float((values * weights).sum().nan_to_num())


def _as_parts(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers in float64 as rows in dtype that add up to them."""
    rows = []
    for _ in range(1 if dtype == torch.float64 else 3):  # 24 digits each, of 53
        rows.append(numbers.to(dtype))
        numbers = numbers - rows[-1].double()
    return torch.stack(rows)


# === Modules and parameters that torch.distributed has wrapped, whose second derivatives cannot be
# had.


def refuse_wrapped(model: Any) -> None:
    """Wrappers that wait for gradients of the model's own parameters, or hold a part of each."""
    if not isinstance(model, nn.Module):
        return
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # where it was not imported is none
    splitting = () if fsdp is None else (fsdp.FullyShardedDataParallel, fsdp.FSDPModule)
    for name, module in model.named_modules():
        where = f"model.{name}" if name else "model"
        if isinstance(module, DistributedDataParallel):
            raise UnsupportedError(
                f"{where}: expected a module that runs by itself, got DistributedDataParallel, which "
                f"waits for gradients that do not come; pass {where}.module, whose parameters are the "
                "same. The data is shared by `processes=`."
            )
        if isinstance(module, splitting):
            raise UnsupportedError(
                f"{where}: expected a module that has its parameters, got {type(module).__name__} of "
                "FSDP, which are gathered for a first derivative only; use the module before it is "
                "wrapped. The data is shared by `processes=`."
            )


def refuse_split(params: Sequence[Tensor]) -> None:
    """Parameters of which a process holds a part only."""
    library: Any = sys.modules.get("torch.distributed.tensor")  # where it was not imported are none
    if library is not None and any(isinstance(p, library.DTensor) for p in params):
        raise UnsupportedError(
            "params: expected tensors that each process has all of, got DTensors, which fully_shard "
            "(FSDP2) and tensor parallelism make and which have no second derivatives; use the "
            "parameters before they are split, and `processes=` to share the data."
        )
