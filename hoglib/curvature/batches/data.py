"""The data of an operator: batches, their weights, how they are split and moved; and the processes of
torch.distributed that share the data.

Each process sums over its part of the data, and one all-reduce adds up the sums. An all-reduce of
fixed size goes before: a table with a row for each process, the totals of its pass and checksums of
everything that must be equal in all processes (the call, vectors, parameters, buffers, and data given
to all). A process that fails sends its row too: all processes then raise, and none waits.
Processes that share the parameters read their own batches in step (`in_step`).
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import length_hint
from typing import Any, NamedTuple, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset, DistributedSampler, IterableDataset, RandomSampler

from hoglib._core.messages import validation
from hoglib._core.messages.communication import tell, together, words_of_others
from hoglib._core.modules.module_kinds import NORMS
from hoglib._core.substrate.fingerprint import checksum
from hoglib._core.substrate.placement import Sharding
from hoglib._core.torch_api import pytree
from hoglib._core.torch_api.pytree import tensors_in
from hoglib.errors import ArgumentTypeError, ArgumentValueError, DistributedError, HoglibError

SHARD, SHARDED = "shard", "sharded"
OF_TENSORS = "give batches that are tensors as `torch.utils.data.DataLoader(data, batch_size=None)`"
# Relative difference allowed between checksums: processes may run on unlike machines.
ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-5}


class PassTotals(NamedTuple):
    """The totals of one process's pass over its data; only numbers, for the all-reduce."""

    failed: float = 0.0  # 1 if this process has an error
    changed: float = 0.0  # 1 if parameters, buffers or settings changed since the last pass
    pieces: float = 0.0  # the number of pieces
    weight: float = 0.0  # the sum of the pieces' shares
    loss: float = 0.0  # the sum of share times loss
    largest: float = 0.0  # the largest magnitude of a loss
    shared: float = 0.0  # 1 if several processes take pieces of the only batch
    whole: float = 0.0  # the loss of the only batch as a whole
    # checksums; they must be equal in all processes
    kind: float = 0.0  # the operator's class and kind
    options: float = 0.0  # policy, reduction, dtype
    criterion: float = 0.0  # the loss function
    shapes: float = 0.0  # of parameters and vectors
    seed: float = 0.0  # of Monte-Carlo samples
    params: float = 0.0  # the values of the parameters
    model: float = 0.0  # buffers, and parameters outside of params
    vectors: float = 0.0  # the vectors of the product
    data: float = 0.0  # the data, with processes="shard"


SAME_CALL = "all have to make the same call, of the same class with the same options"
ADVICE = {
    "kind": SAME_CALL,
    "options": SAME_CALL,
    "criterion": f"{SAME_CALL}, and the same loss",
    "shapes": "parameters and vectors need the same shapes in all, and estimates as many samples",
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

# Checksums without sums of floats, which processes may round differently: compared exactly.
EXACT = "kind", "options", "criterion", "shapes", "seed"


def world_size() -> int:
    """How many processes of torch.distributed there are; 1 without it."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def gathered(caller: str, value: object) -> list[Any]:
    """The value of each process of torch.distributed; it must be picklable."""
    values = [value] * world_size()
    if len(values) > 1:
        with together(caller):
            dist.all_gather_object(values, value)
    return values


@final
class Processes:
    """The processes that share the data: this one alone, or all of the default group.

    name: The caller, for messages.
    how: None: this process alone. "shard": every process is given all of the data, and takes a part.
        "sharded": every process is given its own part.
    """

    def __init__(self, name: str, how: str | None, data: object) -> None:
        self._name = name
        if how is not None:
            validation.choice("processes", how, [SHARD, SHARDED])
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
        # this process skips a part of the data that it is given
        self.splitting = not self.alone and how == SHARD

    def takes(self, number: int) -> bool:
        """Whether this process takes batch `number`, or piece `number` of the only batch."""
        return not self.splitting or number % self.world == self.rank

    def share(self, count: int) -> int:
        """How many of `count` batches this process takes."""
        return len(range(self.rank, count, self.world)) if self.splitting else count

    def number(self, index: int) -> int:
        """The index over all processes of this process's piece `index`."""
        return index if self.alone or self.splitting else self.rank + self.world * index

    def gather(self, value: object) -> list[Any]:
        """The value of each process; it must be picklable."""
        return [value] if self.alone else gathered(self._name, value)

    def join(self, error: Exception, device: torch.device) -> None:
        """Report an error in the all-reduce that all processes make next, and raise it."""
        if not self.alone:
            with together(self._name):
                self._exchange(PassTotals(), error, device)

    def all_reduce(
        self,
        compute: Callable[[], Tensor],
        used: Tensor,
        mine: PassTotals,
        error: Exception | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> PassTotals:
        """Add up compute() and used over the processes, in place; returns the summed totals.

        Raises `error`, if given. Raises in all processes if one process has an error, or if calls or
        vectors differ between processes. compute runs after these checks: it may communicate.

        used: From `UnusedLeaves.used`.
        mine: The totals of this process.
        dtype: The dtype of the vectors: its rounding is allowed between checksums.
        """
        with together(self._name):
            every = self._exchange(mine, error, device)
            self._check_same(every, dtype)
            total = compute()
            wide = torch.promote_types(total.dtype, torch.float32)  # a message has one dtype
            flat = [x.reshape(-1).to(device, wide) for x in (total, used)]
            parts = self._sum(torch.cat(flat)).split([x.numel() for x in flat])
        for x, part in zip((total, used), parts, strict=True):
            x.copy_(part.view(x.shape))
        largest = max(one.largest for one in every)
        whole = max(every, key=lambda one: one.shared).whole
        sums = PassTotals(*map(sum, zip(*every, strict=True)))
        return sums._replace(largest=largest, whole=whole)

    def _exchange(
        self, mine: PassTotals, error: Exception | None, device: torch.device
    ) -> list[PassTotals]:
        """The totals of each process; raises in all processes if one process has an error."""
        if error is not None:
            tell(error)  # before the all-reduce: afterwards the other processes read the store
        mine = mine._replace(failed=error is not None)
        table = torch.zeros(self.world, len(mine), dtype=torch.float64, device="cpu")
        table[self.rank] = torch.tensor(mine, dtype=table.dtype, device="cpu")
        # Sent before the sums. Processes that disagree may have sums of different sizes, and backends
        # abort on messages of different sizes.
        every = [PassTotals(*row) for row in self._sum(table.to(device)).tolist()]
        if error is not None:
            raise error
        if any(one.failed for one in every):
            raise DistributedError(
                f"{self._name}: expected a sum over the data of all {self.world} processes, got an "
                f"error in {words_of_others()}"
            )
        return every

    def _sum(self, message: Tensor) -> Tensor:
        dist.all_reduce(message)
        return message

    def _check_same(self, every: list[PassTotals], dtype: torch.dtype) -> None:
        for name, advice in ADVICE.items():
            numbers = [getattr(one, name) for one in every]
            rounding = 0 if name in EXACT else ROUNDING.get(dtype, 1e-2)
            allowed = rounding * max(map(abs, numbers))
            others = [k for k, number in enumerate(numbers) if abs(number - numbers[0]) > allowed]
            if others:
                raise DistributedError(
                    f"{self._name}: expected the same {name} in all {self.world} processes, got "
                    f"other {name} in process {others[0]} than in process 0; {advice}."
                )

    def _check_sampler(self, how: str | None, data: object) -> None:
        """Raise if a DistributedSampler of the data contradicts `how`."""
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
        count = len(sampler.dataset)  # type: ignore[arg-type]
        if sampler.total_size > count:
            raise ArgumentValueError(
                f"data: expected every example in one process, got a {type(sampler).__name__} that "
                f"repeats {sampler.total_size - count} of {count}, so that {self.world} processes have "
                "as many: they would count twice. Pass a loader without it and processes='shard'."
            )


def constants_of(loss: object, leaves: Sequence[Tensor]) -> list[Tensor]:
    """The tensors of a loss's model besides the leaves: frozen parameters, and buffers in use."""
    model = getattr(loss, "model", None)
    known = {id(leaf) for leaf in leaves}
    found: list[Tensor] = []
    for module in model.modules() if isinstance(model, nn.Module) else ():
        found += [p for p in module._parameters.values() if p is not None and id(p) not in known]
        # A norm in train mode uses statistics of the batch, not its buffers.
        if not (isinstance(module, NORMS) and module.training):
            buffers = [b for b in module._buffers.values() if b is not None]
            found += [b for b in buffers if b.is_floating_point()]
    return found


BatchSize = Callable[[Any], float]


class Piece(NamedTuple):
    """A batch or micro-batch: the examples that go through the model at once."""

    batch: Any
    weight: float  # n_b, its number of examples or batch_size(batch)
    number: int  # counted over the pieces of all batches, in all processes
    fraction: float = 1.0  # of a pass, for the progress bar
    whole: Any = None  # the unsplit batch, on this process's last piece of the batch
    known: tuple[float, ...] | None = None  # fingerprint of all processes' batches, from in_step()


@final
class Batches:
    """One batch, or batches that can be iterated again and again, each with its weight.

    A tensor, a mapping, a tuple, a list with a tensor in it, and an object without `__iter__` are one
    batch; any other re-iterable yields batches. With processes="shard" each process takes every n-th
    batch, or every n-th piece of the only batch.

    Attributes:
        listed: Whether data is a list of tensors only: the user may mean each tensor as a batch.
        processes: The processes that share the data.
        device: Where batches are moved.
        mean: Whether the loss over the data is a mean.
        shared: Whether processes take pieces of the only batch.
        checksum: The checksum of the data with processes="shard", after an iteration.
    """

    def __init__(
        self,
        data: Any,
        device: torch.device,
        batch_size: BatchSize | None,
        micro_batch: int | None,
        processes: Processes,
        *,
        mean: bool = True,
        sharded: bool = False,
    ) -> None:
        alone = is_batch(data)
        self.listed = isinstance(data, list) and alone and all(map(torch.is_tensor, data))
        self._data: Iterable[Any] = [data] if alone else data
        # whether the data is one batch, by itself or in a list
        self._one = alone or (type(data) is list and len(data) == 1 and processes.alone)
        self.processes, self.device, self.mean, self._sharded = processes, device, mean, sharded
        self._batch_size = leading_dimension if batch_size is None else batch_size
        self._micro_batch = micro_batch
        self.shared = self._one and processes.splitting
        self.checksum = 0.0

    @property
    def single(self) -> bool:
        """Whether the data is one batch, not split into micro-batches."""
        return self._one and self._micro_batch is None

    @property
    def weight_cancels(self) -> bool:
        """Whether the sum over the data has one term in all: a mean is then the term itself."""
        return self.single and self.processes.alone and not self._sharded

    def __len__(self) -> int:
        """How many batches this process takes; 0 if unknown."""
        count = length_hint(self._data)
        return count if self._one else self.processes.share(count)

    def __iter__(self) -> Iterator[Piece]:
        own, index, total = self.processes, 0, 0.0
        every, count = self._one or not own.splitting, max(len(self), 1)
        skips = self.mean and not self._sharded  # a batch of weight 0 has the mean 0 / 0: skip it
        for number, batch in enumerate(self.current() if self._one else self._data):
            if own.splitting:
                total += (number + 1) * checksum((*fingerprint(batch), 1.0))
            if every or own.takes(number):
                moved, mine = to_device(batch, self.device), []
                # Weights are computed from the unmoved batch: reading from a device synchronizes.
                pieces: Iterable[tuple[Any, Any]] = [(moved, batch)]
                if self._micro_batch or self.shared:
                    pieces = zip(self._split(moved), self._split(batch), strict=True)
                for part, there in pieces:
                    weight, place = self._weight(there), own.number(index)
                    index += 1
                    if (weight or not skips) and (not self.shared or own.takes(place)):
                        mine.append((part, weight, place))
                fraction = 1 / (count * max(len(mine), 1))
                for left, piece in zip(reversed(range(len(mine))), mine, strict=True):
                    yield Piece(*piece, fraction, None if left else moved)
            else:
                index += len(self._split(batch))
        self.checksum = total

    def current(self) -> list[Any]:
        """The batches that `data` holds at this moment."""
        batches = list(self._data)
        if self._one and len(batches) != 1:
            raise ArgumentValueError(
                f"data: expected the list of one batch that was given, got {len(batches)} batches "
                "in it now; make a new operator of other data."
            )
        return batches

    def explain(self, error: Exception) -> None:
        """Add a note to an error: a list of tensors was read as one batch."""
        known = isinstance(error, ArgumentTypeError | ArgumentValueError)
        if self.listed and (known or not isinstance(error, HoglibError)):
            error.add_note(f"data: a list of tensors is read as one batch; {OF_TENSORS}.")

    def _weight(self, batch: object) -> float:
        try:
            weight = float(self._batch_size(batch))
        except ArgumentTypeError:
            if self.weight_cancels:
                return 1.0
            raise
        if not weight > 0 and not (weight == 0 and row_count(batch)):
            raise ArgumentValueError(
                f"data: expected batches with at least one example, got one of size {weight:g}; "
                "leave empty batches out."
            )
        return weight

    def _split(self, batch: object) -> list[Any]:
        """The batch, or its pieces along the leading dimension."""
        if not (self._micro_batch or self.shared):
            return [batch]
        count = row_count(batch)
        if count is None:
            raise ArgumentTypeError(
                f"{'micro_batch' if self._micro_batch else 'processes'}: expected a batch of tensors "
                f"that can be split, got {validation.describe(batch)}; pass smaller batches instead."
            )
        size = self._micro_batch or -(-count // self.processes.world)  # rounded up
        if count <= size:
            return [batch]
        return [rows_of(batch, count, start, start + size) for start in range(0, count, size)]


def first_examples(batch: object, count: int) -> Any:
    """The first `count` examples of a batch; None if the batch has at most `count`."""
    size = row_count(batch)
    return None if size is None or size <= count else rows_of(batch, size, 0, count)


def row_count(batch: object) -> int | None:
    """The leading dimension of the first tensor that has one; None without such a tensor."""
    batch = batch if isinstance(batch, tuple | dict) else as_dict(batch)
    for x in pytree.leaves(batch):
        if isinstance(x, Tensor) and x.dim():
            return len(x)
    return None


def rows_of(batch: Any, count: int, start: int, stop: int) -> Any:
    """The examples start to stop of a batch, in the batch's own type."""
    own = as_dict(batch)
    piece = pytree.rows(own, count, start, stop)
    return piece if own is batch else type(batch)(piece)


def as_dict(batch: object) -> Any:
    """The batch; a mapping unknown to pytrees, such as transformers' BatchEncoding, as a dict."""
    return dict(batch) if isinstance(batch, Mapping) and not isinstance(batch, dict) else batch


def leading_dimension(batch: object) -> float:
    """The leading dimension of the first tensor of a batch."""
    first = next(iter(pytree.tensors(as_dict(batch))), None)
    if first is not None and first.dim():
        return len(first)
    raise ArgumentTypeError(
        "data: expected batches whose first tensor has the examples as its leading dimension, got "
        f"{validation.describe(batch)}; give the weight of a batch by batch_size=, a function of the "
        "batch."
    )


def fingerprint(batch: object) -> tuple[float, ...]:
    """For each tensor in a batch: its sum, and its sum weighted by the positions of the examples."""
    numbers = numbers_of(batch)
    return tuple(torch.stack(numbers).tolist()) if numbers else ()


def numbers_of(batch: object) -> list[Tensor]:
    """`fingerprint` as float64 scalars on the tensors' devices."""
    numbers = []
    for _, x in tensors_in("", batch):
        if x.layout is torch.strided and x.numel() and x.device.type != "meta":
            x = torch.view_as_real(x) if x.is_complex() else x
            rows = x.detach().reshape(len(x) if x.dim() else 1, -1).sum(1, dtype=torch.float64)
            places = torch.arange(1, len(rows) + 1, dtype=rows.dtype, device=rows.device)
            numbers += [rows.sum(), rows @ places]
    return numbers


def is_batch(data: object) -> bool:
    """Whether data is one batch, not a re-iterable of batches; raises if it is neither."""
    if isinstance(data, Tensor | Mapping | tuple):
        return True
    if isinstance(data, list):
        return any(isinstance(x, Tensor) for x in data)
    if isinstance(data, str | bytes | int | float | None):
        raise ArgumentTypeError(
            f"data: expected a batch, or a DataLoader or list of batches, got "
            f"{validation.describe(data)}."
        )
    if isinstance(data, Iterator):
        raise ArgumentTypeError(
            "data: expected batches that can be iterated again for every product, got a "
            f"{type(data).__name__}, which can be iterated once; pass list(...) of it, or the loader."
        )
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        raise ArgumentTypeError(
            f"data: expected batches, got the dataset {type(data).__name__}, whose elements are single "
            "examples; wrap it, torch.utils.data.DataLoader(dataset, batch_size=...)."
        )
    return not isinstance(data, Iterable)


def as_one_batch(batch: Any) -> Any:
    """A list of tensors as a tuple, which is always one batch; other batches unchanged."""
    return tuple(batch) if isinstance(batch, list) and is_batch(batch) else batch


def in_fixed_order(name: str, data: object) -> None:
    """Raise for a DataLoader that shuffles."""
    if isinstance(getattr(data, "sampler", None), RandomSampler):
        raise ArgumentValueError(
            f"{name}: expected data in a fixed order, that of the result, got a DataLoader that "
            "shuffles; make one with shuffle=False."
        )


def to_device(batch: object, device: torch.device) -> Any:
    """The batch with its tensors on the device."""
    leaves, structure = pytree.flatten(batch)
    found, waits = False, device.type == "cpu"
    for i, x in enumerate(leaves):
        if isinstance(x, Tensor):
            found, leaves[i] = True, x.to(device, non_blocking=not waits)
    if not found:
        return batch.to(device) if hasattr(batch, "to") else batch  # e.g. torch_geometric's Batch
    return pytree.unflatten(leaves, structure)  # new containers: a loss may change its batch


NUMBERS = 16  # numbers of a fingerprint in the message of in_step(): eight tensors


def in_step(name: str, batches: Batches, placement: Sharding) -> Iterator[tuple[Piece, Sharding]]:
    """The batches of processes that share the parameters, with one small all-reduce for each batch.

    A yielded piece has the summed weight of all processes' batches, and the yielded placement has this
    process's fraction of the sum. `Piece.known` is the sum of the fingerprints. Raises in all processes
    if one process has fewer batches, or an error while it reads its data.
    """
    own, world = iter(batches), placement.mesh.size()
    while True:
        piece, weight, error = None, 0.0, None
        numbers = [0.0] * NUMBERS
        try:
            piece = next(own, None)
            if piece is not None:
                weight = piece.weight
                found = fingerprint(piece.batch)[:NUMBERS]
                numbers[: len(found)] = found
        except Exception as caught:  # raised after the all-reduce, for which all processes wait
            error = caught
            tell(error, placement.mesh)
        mine = [float(error is not None), float(piece is not None), weight, *numbers]
        sums = torch.tensor(mine, dtype=torch.float64, device=batches.device)
        failed, given, total, *every = placement.sum(sums).tolist()
        if error is not None:
            raise error
        if failed:
            raise DistributedError(
                f"{name}: expected a batch from each of {world} processes, got an error in "
                f"{words_of_others(placement.mesh)}"
            )
        if not given:
            return
        if given < world or piece is None:
            raise DistributedError(
                f"{name}: expected as many batches in each of {world} processes, whose parameters are "
                f"gathered together, got one more in {given:.0f} of them than in the others; give each "
                "the same number, of any size."
            )
        # `number` seeds Monte-Carlo samples: each process draws its own.
        number = dist.get_rank() + dist.get_world_size() * piece.number
        if total:
            known = piece._replace(weight=total, number=number, known=tuple(every))
            yield known, placement.weighted(weight / total)
