"""The processes of torch.distributed that share the data of an operator.

Each sums over its part of the data, and one all-reduce adds up the sums. In the same message every
process has a row of its own, with the totals of its pass and with checksums of what has to be the same
in all of them: vectors, parameters, buffers and, where each takes a part of what all were given, the
data. A process that fails takes part too, so that the others raise as well, instead of waiting for it.
"""

import os
from collections.abc import Sequence
from typing import Any, NamedTuple, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.data import DistributedSampler

from hoglib._core import validation
from hoglib._core.fingerprint import checksum
from hoglib.errors import ArgumentValueError, DistributedError

SHARD, SHARDED = "shard", "sharded"
# by how much of its size a checksum may differ between processes, which may run on unlike machines
ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-5}


class PassTotals(NamedTuple):
    """The totals of a pass over the data of one process; numbers only, for the all-reduce."""

    failed: float = 0.0
    changed: float = 0.0  # whether parameters, buffers or settings have, since the last pass
    pieces: float = 0.0
    weight: float = 0.0  # the sum of the pieces' shares
    loss: float = 0.0  # the sum of share times loss
    largest: float = 0.0  # the largest magnitude of a loss
    shared: float = 0.0  # whether pieces of one batch lie in several processes
    whole: float = 0.0  # the loss of that batch
    # checksums of what has to be the same in all processes
    seed: float = 0.0
    params: float = 0.0
    model: float = 0.0
    vectors: float = 0.0
    data: float = 0.0


ADVICE = {
    "seed": "the samples of kind='mc' need a generator with the same seed in each: "
    "generator=torch.Generator().manual_seed(0)",
    "params": "broadcast them from one process, as DistributedDataParallel does: "
    "`for p in model.parameters(): dist.broadcast(p.data, 0)`",
    "model": "these are its buffers (running statistics) and the parameters that are not in params; "
    "broadcast them from one process: `for b in model.buffers(): dist.broadcast(b, 0)`",
    "vectors": "random vectors, as of trace and diagonal, need a generator with the same seed in each, "
    "generator=torch.Generator().manual_seed(0); solvers need the same right-hand side",
    "data": "with processes='shard' all are given the same batches, and each takes its part: use "
    "shuffle=False, or 'sharded' where each is given a part of its own",
}


def combine(every: Sequence[PassTotals]) -> PassTotals:
    """The totals of all processes together."""
    total = PassTotals(*map(sum, zip(*every, strict=True)))
    return total._replace(
        largest=max(one.largest for one in every),
        whole=max(every, key=lambda one: one.shared).whole,
    )


def world_size() -> int:
    """How many processes of torch.distributed there are; 1 without it."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def gathered(value: Any) -> list[Any]:
    """The value of each process of torch.distributed; it has to be one that can be pickled."""
    values = [value] * world_size()
    if len(values) > 1:
        dist.all_gather_object(values, value)
    return values


@final
class Processes:
    """Who shares the data: this process alone, or all of the default group.

    how: None alone; "shard" each takes its part of the data that all are given; "sharded" each is given
    its part.
    """

    def __init__(self, name: str, how: str | None, data: Any) -> None:
        self._name = name
        if how is not None:
            validation.one_of("processes", how, [SHARD, SHARDED])
        group = dist.is_available() and dist.is_initialized()
        if how is not None and not group and int(os.environ.get("WORLD_SIZE") or 1) > 1:
            raise ArgumentValueError(
                f"processes={how!r}: expected torch.distributed to be initialised, got WORLD_SIZE="
                f"{os.environ['WORLD_SIZE']} and no group; call torch.distributed.init_process_group() "
                "first."
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
        """Whether this process takes only a part of what it is given."""
        return not self.alone and self._how == SHARD

    def takes(self, number: int) -> bool:
        """Whether this process takes the batch, or the piece of the only batch, of that number."""
        return not self.splitting or number % self.world == self.rank

    def share(self, count: int) -> int:
        """How many of `count` batches this process takes."""
        return len(range(self.rank, count, self.world)) if self.splitting else count

    def number(self, index: int) -> int:
        """The number, counted over all processes, of the piece that this one has at an index."""
        if self.alone or self._how == SHARD:
            return index
        return self.rank + self.world * index

    def gather(self, value: Any) -> list[Any]:
        """The value of each process; it has to be one that can be pickled."""
        return [value] if self.alone else gathered(value)

    def all_reduce(
        self, total: Tensor, used: Tensor, mine: PassTotals, error: Exception | None
    ) -> list[PassTotals]:
        """Add up total and used over the processes, in place; return the totals of each process.

        In one all-reduce. Raises the error, if there is one; and in all processes alike where another
        one has an error, or where they do not multiply the same.
        """
        dtype = torch.promote_types(total.dtype, torch.float32)
        numbers = torch.tensor(mine._replace(failed=error is not None), dtype=torch.float64)
        parts = split_float64(numbers, dtype)
        table = torch.zeros(self.world, *parts.shape, dtype=dtype)
        table[self.rank] = parts
        flat = [x.reshape(-1).to(total.device, dtype) for x in (total, used, table)]
        message = torch.cat(flat)
        dist.all_reduce(message)
        sizes = [x.numel() for x in flat]
        for x, part in zip((total, used, table), message.split(sizes), strict=True):
            x.copy_(part.view(x.shape))
        every = [PassTotals(*row) for row in table.double().sum(1).tolist()]
        if any(one.failed for one in every):
            self._raise(error, every)
        self._check_same(every, total.dtype)
        return every

    def _raise(self, error: Exception | None, every: list[PassTotals]) -> None:
        text = "" if error is None else f"{type(error).__name__}: {error}"
        texts = self.gather(text)
        if error is not None:
            raise error
        failed = [rank for rank, one in enumerate(every) if one.failed]
        raise DistributedError(
            f"{self._name}: expected a sum over the data of all {self.world} processes, got an error "
            f"in process {failed[0]}, which has to be fixed there: {texts[failed[0]]}"
        )

    def _check_same(self, every: list[PassTotals], dtype: torch.dtype) -> None:
        for name, advice in ADVICE.items():
            numbers = [getattr(one, name) for one in every]
            rounding = 0 if name == "seed" else ROUNDING.get(dtype, 1e-2)
            allowed = rounding * max(map(abs, numbers))
            others = [k for k, number in enumerate(numbers) if abs(number - numbers[0]) > allowed]
            if others:
                raise DistributedError(
                    f"{self._name}: expected the same {name} in all {self.world} processes, got "
                    f"other {name} in process {others[0]} than in process 0; {advice}."
                )

    def _check_sampler(self, how: str | None, data: Any) -> None:
        """Raise where a DistributedSampler of the data does not go with `how`."""
        batch_sampler = getattr(data, "batch_sampler", None)
        samplers = [getattr(x, "sampler", None) for x in (data, batch_sampler)]
        found = [sampler for sampler in samplers if isinstance(sampler, DistributedSampler)]
        if not found:
            return
        sampler = found[0]
        if how != SHARDED:
            raise ArgumentValueError(
                f"processes: expected 'sharded' for a loader with a {type(sampler).__name__}, which "
                f"gives each process a part of the data, got {how!r}; or pass a loader without one, "
                "with processes='shard', where each process takes its part of all batches."
            )
        if (sampler.num_replicas, sampler.rank) != (self.world, self.rank):
            raise ArgumentValueError(
                f"data: expected the part of process {self.rank} of {self.world}, got a "
                f"{type(sampler).__name__} for process {sampler.rank} of {sampler.num_replicas}; make "
                "it without num_replicas and rank."
            )
        dataset: Any = sampler.dataset
        count = len(dataset)
        if sampler.total_size > count:
            raise ArgumentValueError(
                f"data: expected every example in one process, got a {type(sampler).__name__} that "
                f"repeats {sampler.total_size - count} of {count}, so that {self.world} processes have "
                "as many: they would count twice. Pass a loader without it and processes='shard'."
            )


def checksum_of_rows(rows: Tensor) -> float:
    """A number that changes with each number in the rows."""
    dtype = torch.promote_types(rows.dtype, torch.float32)  # half counts to 2048 only
    weights = torch.arange(1, rows.shape[1] + 1, dtype=dtype, device=rows.device).sin()
    return checksum((rows @ weights.to(rows.dtype)).tolist())


def constants_of(loss: Any, leaves: Sequence[Tensor]) -> list[Tensor]:
    """The tensors of a model that are not among the leaves: frozen parameters, and buffers in use."""
    model = getattr(loss, "model", None)
    known = {id(leaf) for leaf in leaves}
    found: list[Tensor] = []
    for module in model.modules() if isinstance(model, nn.Module) else ():
        found += [p for p in module._parameters.values() if p is not None and id(p) not in known]
        if not (isinstance(module, _NormBase) and module.training):  # it uses those of the batch
            buffers = [b for b in module._buffers.values() if b is not None]
            found += [b for b in buffers if b.is_floating_point()]
    return found


def split_float64(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers in float64 as rows in dtype that add up to them."""
    rows = []
    for _ in range(1 if dtype == torch.float64 else 3):  # 24 digits each, of 53
        rows.append(numbers.to(dtype))
        numbers = numbers - rows[-1].double()
    return torch.stack(rows)
