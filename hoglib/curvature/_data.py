"""The data of an operator: what a batch is, how much it weighs, how it is split and moved."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import length_hint
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from hoglib import _arguments as arguments
from hoglib import _tree
from hoglib._batches import rows, tensors_in

Size = Callable[[Any], float]


class Batches:
    """One batch, or batches that can be gone through again and again, each with its weight.

    A tensor, a mapping, a tuple, a list with a tensor in it, and what cannot be iterated is one batch;
    any other re-iterable yields batches.
    """

    def __init__(
        self, data: Any, device: torch.device, batch_size: Size | None, micro_batch: int | None
    ) -> None:
        one = _is_batch(data)
        self._data: Iterable[Any] = [data] if one else data
        self._device = device
        self._batch_size = (
            leading if batch_size is None else arguments.function("batch_size", batch_size)
        )
        if micro_batch is not None:
            arguments.at_least("micro_batch", micro_batch, 1)
        self._micro_batch = micro_batch
        self.whole = one and micro_batch is None  # all of the data at once

    def __len__(self) -> int:
        """How many batches there are; 0 where that is not known."""
        return length_hint(self._data)

    def __iter__(self) -> Iterator[tuple[Any, float]]:
        for batch in self._data:
            moved = _to(batch, self._device)
            yield moved, self._weight(moved)

    def at_hand(self) -> list[Any]:
        """The one batch that there is."""
        return list(self._data)

    def _weight(self, batch: Any) -> float:
        try:
            return self.weight(batch)
        except arguments.WrongType:
            if self.whole:  # it is all that there is, whatever it weighs
                return 1.0
            raise

    def weight(self, batch: Any) -> float:
        weight = float(self._batch_size(batch))
        if not weight > 0:
            raise arguments.WrongValue(
                f"data: expected batches with at least one example, got one of size {weight:g}; "
                "leave empty batches out."
            )
        return weight

    def pieces(self, batch: Any) -> list[Any]:
        """The batch, or what it is split into along its leading dimension."""
        if self._micro_batch is None:
            return [batch]
        sizes = [len(x) for x in _tree.leaves(batch) if isinstance(x, Tensor) and x.dim()]
        if not sizes:
            raise arguments.WrongType(
                f"micro_batch: expected a batch of tensors that can be split, got "
                f"{arguments.describe(batch)}; pass smaller batches in its place."
            )
        count = sizes[0]
        if count <= self._micro_batch:
            return [batch]
        size = self._micro_batch
        return [rows(batch, count, start, start + size) for start in range(0, count, size)]


def leading(batch: Any) -> float:
    """The leading dimension of the first tensor of a batch."""
    for x in _tree.leaves(batch):
        if isinstance(x, Tensor):
            if not x.dim():
                break
            return len(x)
    raise arguments.WrongType(
        f"data: expected batches whose first tensor counts the examples, got "
        f"{arguments.describe(batch)}; say what a batch weighs by batch_size=, a function of the batch."
    )


def fingerprint(batch: Any) -> tuple[float, ...]:
    """For each tensor in a batch its sum, and a sum that changes with the order of the examples too."""
    numbers = []
    for _, x in tensors_in("", batch):
        if x.layout is torch.strided and x.numel() and x.device.type != "meta":
            x = torch.view_as_real(x) if x.is_complex() else x
            rows = x.detach().reshape(len(x) if x.dim() else 1, -1).sum(1, dtype=torch.float64)
            numbers += [rows.sum(), rows @ torch.arange(1.0, len(rows) + 1).to(rows)]
    return tuple(torch.stack(numbers).tolist()) if numbers else ()


def _is_batch(data: Any) -> bool:
    if isinstance(data, Tensor | Mapping | tuple):
        return True
    if isinstance(data, list):
        return any(isinstance(x, Tensor) for x in data)
    if isinstance(data, str | bytes | int | float | None):
        raise arguments.WrongType(
            f"data: expected a batch, or a DataLoader or list of batches, got "
            f"{arguments.describe(data)}."
        )
    if isinstance(data, Iterator):
        raise arguments.WrongType(
            f"data: expected what can be gone through again for every product, got a "
            f"{type(data).__name__}, which is used up after once; pass list(...) of it, or the loader."
        )
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        raise arguments.WrongType(
            f"data: expected batches, got the dataset {type(data).__name__}, whose elements are single "
            "examples; wrap it, torch.utils.data.DataLoader(dataset, batch_size=...)."
        )
    return not isinstance(data, Iterable)


def _to(batch: Any, device: torch.device) -> Any:
    tensors = [x for x in _tree.leaves(batch) if isinstance(x, Tensor)]
    if tensors:
        return _tree.map_tensors(lambda x: x.to(device), batch)
    return batch.to(device) if hasattr(batch, "to") else batch  # such as a batch of graphs
