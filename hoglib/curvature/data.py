"""The data of an operator: what a batch is, its weight, how it is split and moved.

Processes that share the parameters have batches of their own, and go on together (`in_step`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import length_hint
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from hoglib._core import pytree, validation
from hoglib._core.fingerprint import checksum
from hoglib._core.placement import Sharding
from hoglib._core.pytree import tensors_in
from hoglib.curvature.processes import Processes
from hoglib.errors import ArgumentTypeError, ArgumentValueError, DistributedError

BatchSize = Callable[[Any], float]
IGNORED = -100


class Piece(NamedTuple):
    """A batch, or a part of one, that goes through the model at once."""

    batch: Any
    weight: float
    number: int  # among the pieces of all batches, in all processes


class LocalBatch(NamedTuple):
    """A batch, and the pieces of it that this process takes."""

    batch: Any
    pieces: list[Piece]
    shared: bool  # whether other processes take pieces too


@final
class Batches:
    """One batch, or batches that can be iterated again and again, each with its weight.

    A tensor, a mapping, a tuple, a list with a tensor in it, and what cannot be iterated is one batch;
    any other re-iterable yields batches. Of several processes that are given the same data, each takes
    every n-th batch, or piece of the only batch.
    """

    def __init__(
        self,
        data: Any,
        device: torch.device,
        batch_size: BatchSize | None,
        micro_batch: int | None,
        processes: Processes,
        shared: bool = False,
    ) -> None:
        self._one = one = is_batch(data)
        self._processes = processes
        self.checksum = 0.0  # of the data that all processes were given
        self._data: Iterable[Any] = [data] if one else data
        self.device = device
        # whether the weight of the only batch cancels; not where other processes have batches too
        self._cancels = one and micro_batch is None and processes.alone and not shared
        self._batch_size = leading_dimension if batch_size is None else batch_size
        self._micro_batch = micro_batch
        self.single = one and micro_batch is None  # all of the data at once

    def __len__(self) -> int:
        """How many batches this process takes; 0 where that is not known."""
        count = length_hint(self._data)
        return count if self._one else self._processes.share(count)

    def __iter__(self) -> Iterator[LocalBatch]:
        takes, index, total = self._processes.takes, 0, 0.0
        for number, batch in enumerate(self._data):
            if self._processes.splitting:
                total += (number + 1) * checksum((*fingerprint(batch), 1.0))
            if self._one or takes(number):
                moved = to_device(batch, self.device)
                pieces = self._pieces(moved, index)
                index += len(pieces)
                shared = self._one and self._processes.splitting
                mine = [piece for piece in pieces if not shared or takes(piece.number)]
                yield LocalBatch(moved, mine, shared)
            else:
                index += len(self._split(batch))
        self.checksum = total

    def current(self) -> list[Any]:
        """The batches as they are now."""
        return list(self._data)

    def _pieces(self, batch: Any, index: int) -> list[Piece]:
        """The pieces of a batch; `index` is that of the first among the pieces of this process."""
        parts, number = self._split(batch), self._processes.number
        return [Piece(part, self._weight(part), number(index + j)) for j, part in enumerate(parts)]

    def _weight(self, batch: Any) -> float:
        try:
            weight = float(self._batch_size(batch))
        except ArgumentTypeError:
            if self._cancels:
                return 1.0
            raise
        if not weight > 0:
            raise ArgumentValueError(
                f"data: expected batches with at least one example, got one of size {weight:g}; "
                "leave empty batches out."
            )
        return weight

    def _split(self, batch: Any) -> list[Any]:
        """The batch, or its pieces along the leading dimension."""
        shared = self._one and self._processes.splitting
        if self._micro_batch is None and not shared:
            return [batch]
        count = row_count(batch)
        if count is None:
            raise ArgumentTypeError(
                f"{'micro_batch' if self._micro_batch else 'processes'}: expected a batch of "
                f"tensors that can be split, got {validation.describe(batch)}; pass smaller batches "
                "instead."
            )
        size = self._micro_batch or -(-count // self._processes.world)  # rounded up
        if count <= size:
            return [batch]
        return [_rows(batch, count, start, start + size) for start in range(0, count, size)]


def first_examples(batch: Any, count: int) -> Any:
    """The first rows of each tensor with as many as the first one; None where there are no more."""
    size = row_count(batch)
    return None if size is None or size <= count else _rows(batch, size, 0, count)


def row_count(batch: Any) -> int | None:
    """The leading dimension of the first tensor of a batch that has one."""
    return next((len(x) for x in pytree.tensors(as_dict(batch)) if x.dim()), None)


def _rows(batch: Any, count: int, start: int, stop: int) -> Any:
    """Some of the examples of a batch, in its own type."""
    own = as_dict(batch)
    piece = pytree.rows(own, count, start, stop)
    return piece if own is batch else type(batch)(piece)


def as_dict(batch: Any) -> Any:
    """A mapping that pytrees do not know, such as BatchEncoding of transformers, as a dict."""
    unknown = isinstance(batch, Mapping) and not isinstance(batch, dict)
    return dict(batch) if unknown else batch


def leading_dimension(batch: Any) -> float:
    """The leading dimension of the first tensor of a batch."""
    for x in pytree.leaves(as_dict(batch)):
        if isinstance(x, Tensor):
            if not x.dim():
                break
            return len(x)
    raise ArgumentTypeError(
        "data: expected batches whose first tensor has the examples as its leading dimension, got "
        f"{validation.describe(batch)}; give the weight of a batch by batch_size=, a function of the "
        "batch."
    )


def counted_labels(batch: Any) -> dict[str, tuple[int, bool]]:
    """For each integer tensor in a batch how many elements are not -100, and whether some are.

    -100 is the label that torch's `cross_entropy` leaves out of its mean.
    """
    found = {}
    for name, x in tensors_in("batch", batch):
        if x.dtype in (torch.int32, torch.int64) and x.device.type != "meta":
            kept = int((x != IGNORED).sum())
            found[name] = kept, kept < x.numel()
    return found


def fingerprint(batch: Any) -> tuple[float, ...]:
    """For each tensor in a batch its sum, and a sum that changes with the order of the examples too."""
    numbers = []
    for _, x in tensors_in("", batch):
        if x.layout is torch.strided and x.numel() and x.device.type != "meta":
            x = torch.view_as_real(x) if x.is_complex() else x
            rows = x.detach().reshape(len(x) if x.dim() else 1, -1).sum(1, dtype=torch.float64)
            numbers += [rows.sum(), rows @ torch.arange(1.0, len(rows) + 1).to(rows)]
    return tuple(torch.stack(numbers).tolist()) if numbers else ()


def is_batch(data: Any) -> bool:
    """Whether data is one batch, and no re-iterable of batches; raises for what is neither."""
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


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on the device."""
    tensors = pytree.tensors(batch)
    if tensors:
        return pytree.map_tensors(lambda x: x.to(device), batch)
    return batch.to(device) if hasattr(batch, "to") else batch  # such as a batch of graphs


NUMBERS = 16  # of a batch's fingerprint, eight tensors, that are compared from pass to pass


# the batch of this process with the weight of all together, the placement with its part in that weight,
# and numbers that change with any of the batches
SharedStep = tuple[LocalBatch, Sharding, tuple[float, ...]]


def in_step(name: str, batches: Batches, placement: Sharding) -> Iterator[SharedStep]:
    """The batches of all processes, by one small all-reduce each.

    Raises in all of them where one has fewer, or an error while its data is read.
    """
    own, world = iter(batches), placement.mesh.size()
    while True:
        local, weight, error = None, 0.0, None
        numbers = [0.0] * NUMBERS
        try:
            local = next(own, None)
            if local is not None:
                (piece,) = local.pieces
                weight = piece.weight
                found = fingerprint(piece.batch)[:NUMBERS]
                numbers[: len(found)] = found
        except Exception as caught:  # the other processes wait for this one
            error = caught
        mine = [float(error is not None), float(local is not None), weight, *numbers]
        sums = torch.tensor(mine, dtype=torch.float64, device=batches.device)
        failed, given, total, *every = placement.sum(sums).tolist()
        if error is not None:
            raise error
        if failed:
            raise DistributedError(
                f"{name}: expected a batch from each of {world} processes, got an error in one while "
                "it read its data: look at its own output."
            )
        if not given:
            return
        if given < world or local is None:
            raise DistributedError(
                f"{name}: expected as many batches in each of {world} processes, whose parameters are "
                f"gathered together, got one more in {given:.0f} of them than in the others; give each "
                "the same number, of any size."
            )
        whole = local._replace(pieces=[piece._replace(weight=total)])
        yield whole, placement.weighted(weight / total), tuple(every)
