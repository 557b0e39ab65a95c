"""Which rows of the inputs belong to which sample, and sums over a sample's entries."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hoglib._core import pytree, validation
from hoglib._core.mixed_precision import upcast_half
from hoglib._core.torch_internals import tracing
from hoglib.errors import ArgumentTypeError, ArgumentValueError

EMPTY = "{}: expected at least one sample, got none; leave empty batches out."


def inputs(what: str, name: str, tree: Any) -> list[Tensor]:
    """The leaves of a tree of points: real floating-point tensors with a leading dimension."""
    leaves = pytree.leaves(tree)
    if not leaves:
        raise ArgumentValueError(f"{what}: expected {name} with at least one tensor, got none.")
    if all(
        isinstance(x, Tensor) and x.is_floating_point() and x.dim() and x.layout is torch.strided
        for x in leaves
    ):
        return leaves
    for path, leaf in zip(pytree.paths(tree), leaves, strict=True):
        where = f"{name}[{path!r}]" if path else name
        if isinstance(leaf, Tensor) and not leaf.is_floating_point():
            raise ArgumentTypeError(
                f"{what}: {where}: expected a real floating-point tensor to differentiate by, got "
                f"{validation.describe(leaf)}; pass labels and other inputs without a derivative after "
                "the points, as further arguments of the function."
            )
        validation.tensor(f"{what}: {where}", leaf)
        if leaf.layout is not torch.strided:
            raise ArgumentTypeError(
                f"{what}: {where}: expected a dense tensor, got one of layout {leaf.layout}; pass its "
                "values as the points, and where they stand after them."
            )
        if not leaf.dim():
            raise ArgumentValueError(
                f"{what}: {where}: expected a leading dimension of samples, got a scalar; "
                "unsqueeze it."
            )
    return leaves


class Samples:
    """The samples that the rows of the leaves of the inputs are, or, by `batch`, belong to."""

    def __init__(self, what: str, leaves: Sequence[Tensor], structure: Any, batch: Any) -> None:
        self.what = what
        self.index = self._indices(leaves, structure, batch)
        counts = {
            len(leaf) for leaf, index in zip(leaves, self.index, strict=True) if index is None
        }
        if len(counts) > 1:
            raise ArgumentValueError(
                f"{what}: expected inputs of one number of samples, got leading dimensions "
                f"{', '.join(map(str, sorted(counts)))}; where rows are not samples, say by batch= "
                "which sample each belongs to."
            )
        self.count = counts.pop() if counts else None
        if self.count is None and not tracing():
            # of graphs: as many as the index names, until the outputs tell
            self.count = max(int(i.max()) + 1 if len(i) else 0 for i in self.index if i is not None)
        self.graphs = any(i is not None for i in self.index)
        if self.count == 0:
            raise ArgumentValueError(EMPTY.format(what))

    def _indices(self, leaves: Sequence[Tensor], structure: Any, batch: Any) -> list[Tensor | None]:
        if batch is None:
            return [None] * len(leaves)
        if isinstance(batch, Tensor):
            found: list[Any] = [batch] * len(leaves)
        else:
            found, came = pytree.flatten(batch)
            if came != structure:
                raise ArgumentValueError(
                    f"{self.what}: expected batch as one tensor, or as a tree like the inputs with a "
                    f"tensor or None for each, got {validation.describe(batch)}."
                )
        for index, leaf in zip(found, leaves, strict=True):
            if index is None:
                continue
            validation.tensor(f"{self.what}: batch", index)
            whole = index.dtype in (torch.int64, torch.int32)
            if not whole or index.shape != leaf.shape[:1]:
                raise ArgumentValueError(
                    f"{self.what}: batch: expected whole numbers of shape ({len(leaf)},), one a row, "
                    f"got {validation.describe(index)}"
                    + ("." if whole else "; convert it with `.long()`.")
                )
            if len(index) and not tracing() and int(index.min()) < 0:
                raise ArgumentValueError(
                    f"{self.what}: batch: expected numbers from 0, got {int(index.min())}."
                )
        return found

    def told(self, count: int) -> None:
        """The number of samples of graphs is that of the outputs: a graph may have no rows."""
        if self.graphs and (self.count is None or count >= self.count):
            self.count = count

    def sums(self, parts: Sequence[Tensor]) -> Tensor:
        """The sum over each sample's entries of tensors like the leaves: [N]."""
        total: Tensor | None = None
        for part, index in zip(parts, self.index, strict=True):
            rows = part.flatten(1).sum(1) if part.dim() > 1 else part
            if index is not None:
                rows = rows.new_zeros(self._number()).index_add(0, index, rows)
            total = rows if total is None else total + rows
        assert total is not None
        return total

    def squares(self, grads: Sequence[Tensor]) -> Tensor:
        """sum over each sample's entries of g^2: [N], halves in float32."""
        return self.sums([upcast_half(g).square() for g in grads])

    def spread(self, values: Tensor, leaf: Tensor, which: int) -> Tensor:
        """One value a sample [N], for every entry of a leaf."""
        index = self.index[which]
        rows = values if index is None else values[index]
        return rows.to(leaf).reshape(-1, *[1] * (leaf.dim() - 1))

    def of_sample(self, part: Tensor, which: int, sample: int) -> Tensor:
        """Which rows of a leaf are of another sample."""
        index = self.index[which]
        if index is None:
            return torch.arange(len(part), device=part.device) == sample
        return index == sample

    def _number(self) -> int:
        assert self.count is not None
        return self.count
