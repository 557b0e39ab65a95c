"""Kronecker factors of the layers of a model, summed over data.

    expand    A = mean of a_r a_r^T over rows r        G = sum over rows and columns c of g_rc g_rc^T
    reduce    A = mean of a_n a_n^T over examples n    G = sum over n and c of g_nc g_nc^T

The rows r of an example n are its positions and the calls that share the weights. a_r is the layer's
input in row r. g_rc is the gradient of sum_n s_nc . outputs_n by the layer's output in row r, for the
columns s_c of M = sum_c s_c s_c^T. a_n is the mean of a_r and g_nc the sum of g_rc over the rows of n.

References:
    Martens and Grosse, Optimizing Neural Networks with Kronecker-factored Approximate Curvature, 2015.
    Grosse and Martens, A Kronecker-factored Approximate Fisher Matrix for Convolution Layers, 2016.
    Eschenhagen, Immer, Turner, Schneider and Hennig, Kronecker-Factored Approximate Curvature for
    Modern Neural Network Architectures, 2023, section 3 (expand, reduce).
    George, Laurent, Bouthillier, Ballas and Vincent, Fast Approximate Natural Gradient Descent in a
    Kronecker-factored Eigenbasis, 2018, section 3 (corrected eigenvalues).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, final

import torch
from torch import Tensor

from hoglib._core.runtime.device_reads import DeviceRead
from hoglib.curvature.kronecker.kronecker import BlockLayout, KroneckerBlock
from hoglib.curvature.kronecker.model_run import (
    AT_ONCE,
    Gradients,
    Layer,
    ModelRun,
    by_example,
    input_rows,
    is_embedding,
    layer_gradients,
    mean_inputs,
)

SQUARED_AT_ONCE = 2**20  # rows are squared once they have so many numbers
PARTS, LARGE = 4, 256  # squares of LARGE columns or more take PARTS products


class BlockSums(ABC):
    """Tensors of every block, by name, summed over batches and processes."""

    called: frozenset[BlockLayout] = frozenset()  # blocks of the layers that some batch called

    def __init__(self) -> None:
        self.sums: dict[BlockLayout, dict[str, Tensor]] = {}  # block: name: sum

    @abstractmethod
    def add(self, run: ModelRun, share: float) -> None:
        """Add the sums of one batch. share: the factor of the batch in the sum over the data."""

    def layouts(self) -> list[BlockLayout]:
        """The layouts of the blocks, in the order of the parameters."""
        # Sorted by their first region: the order must be equal in all processes.
        return sorted(self.sums, key=lambda layout: layout.first)

    def tensors(self) -> list[Tensor]:
        """All tensors, block by block."""
        return [x for layout in self.layouts() for x in self.sums[layout].values()]

    def pack(self) -> Tensor:
        """All tensors as one row [1, n]."""
        parts = [x.reshape(-1) for x in self.tensors()]
        return torch.cat(parts or [torch.zeros(0)]).unsqueeze(0)

    def unpack(self, row: Tensor) -> None:
        """Copy a row from `pack` back into the tensors."""
        tensors = self.tensors()
        for x, part in zip(tensors, row[0].split([x.numel() for x in tensors]), strict=True):
            x.copy_(part.view(x.shape))

    def read(self) -> DeviceRead:
        """Start to read the sum of every tensor; a sum is not finite if any number is not."""
        totals = [x.sum() for x in self.tensors()]
        return DeviceRead(torch.stack(totals or [torch.zeros(())]))

    def finite(self, read: DeviceRead) -> bool:
        """Whether every number is finite. read: from `read`."""
        # A sum of finite numbers can overflow: then look at each number.
        finite = bool(read.numbers().isfinite().all())
        return finite or all(bool(x.isfinite().all()) for x in self.tensors())

    def include(  # noqa: B027 (EigenvalueSums has all blocks from the start)
        self, layouts: Iterable[BlockLayout], dtype: torch.dtype, device: object
    ) -> None:
        """Add zeros for missing blocks: with several processes, one may have had no batch."""


@final
class FactorSums(BlockSums):
    """A and G of every block, summed over batches."""

    def add(self, run: ModelRun, share: float) -> None:
        """Add the sums of one batch: a^T a over the rows to A, the number of rows to count, share g^T
        g to G."""
        expand = run.options.approximation == "expand"
        layouts = [*(layer.layout for layer in run.layers), *run.unexplained.values()]
        self.include(layouts, run.dtype, run.device)
        for layer in run.layers:
            if layer.layout.role.matrix == "kronecker":
                self._add_inputs(layer, run, expand)
        # Gather the rows of several columns before squaring: thousands of small squares added one by
        # one lose digits in float32.
        waiting: dict[BlockLayout, list[Tensor]] = {layer.layout: [] for layer in run.layers}
        for gradients in run.columns():
            for rows in run.of_single_examples(gradients.column):
                for layout, part in zip(run.unexplained.values(), rows, strict=True):
                    self.sums[layout]["A"].add_(part.square().sum(0), alpha=share)
            for layer in run.layers:
                if layer.layout.role.matrix == "elementwise":
                    # exact diagonal: the squared gradients of single examples
                    for part, *_ in layer_gradients(layer, gradients, run):
                        self.sums[layer.layout]["A"].add_(part.square().sum(0), alpha=share)
                    continue
                rows = waiting[layer.layout]
                rows += _output_rows(layer, gradients, run, expand)
                if sum(map(Tensor.numel, rows)) >= SQUARED_AT_ONCE:
                    self._add_outputs(layer.layout, rows, share)
        for layout, rows in waiting.items():
            self._add_outputs(layout, rows, share)

    def include(self, layouts: Iterable[BlockLayout], dtype: torch.dtype, device: Any) -> None:
        """Add zeros for missing blocks: with several processes, one may have had no batch."""
        like = torch.empty(0, dtype=dtype, device=device)
        for layout in layouts:
            if layout not in self.sums:
                shapes = _factor_shapes(layout).items()
                self.sums[layout] = {name: like.new_zeros(shape) for name, shape in shapes}

    def _add_inputs(self, layer: Layer, run: ModelRun, expand: bool) -> None:
        # Sum and count: batches differ in rows, as an expert gets only some of the examples.
        sums = self.sums[layer.layout]
        if is_embedding(layer):
            at = torch.cat([call.inputs()[0, :, 0] for call in layer.calls])
            seen = at[at >= 0]
            # A is diagonal: it counts how often each row of the table is used.
            sums["A"][0].index_add_(0, seen, torch.ones_like(seen, dtype=run.dtype))
            sums["count"] += len(at)
            return
        if expand:
            rows = [input_rows(layer, call, run.dtype) for call in layer.calls]
        elif any(call.rows for call in layer.calls):
            rows = [mean_inputs(layer, run.examples, run.dtype, run.device)]
        else:  # e.g. an expert that received none of the examples
            rows = []
        for a in rows:
            _add_square(sums["A"], a, 1.0)
            sums["count"] += a.shape[1]

    def _add_outputs(self, layout: BlockLayout, rows: list[Tensor], share: float) -> None:
        name = "A" if layout.role.matrix == "diagonal" else "G"
        if rows:
            square = rows[0] if len(rows) == 1 else torch.cat(rows, -2)
            _add_square(self.sums[layout][name], square, share)
            rows.clear()

    def blocks(self, divisor: float) -> list[KroneckerBlock]:
        """The blocks of the sums over all data. divisor: the sum of all shares."""
        found = []
        for layout, sums in self.sums.items():
            _mirror_triangle(sums["A"])
            if layout.role.matrix != "kronecker":
                one = sums["A"].new_ones(1, 1, 1)
                found.append(KroneckerBlock(layout, sums["A"].div_(divisor), one))
            else:
                _mirror_triangle(sums["G"])
                # No row in all of the data: divide by tiny, so that A stays zero.
                count = sums["count"].clamp(min=torch.finfo(sums["A"].dtype).tiny)
                A, G = sums["A"].div_(count), sums["G"].div_(divisor)
                found.append(KroneckerBlock(layout, A, G))
        return sorted(found, key=lambda block: block.layout.first)


def _output_rows(layer: Layer, gradients: Gradients, run: ModelRun, expand: bool) -> list[Tensor]:
    """The gradient rows [groups, rows, out] of one column, to be squared and summed."""
    if layer.layout.role.matrix == "diagonal":
        # An exact block: sum an example's gradient over its positions before squaring.
        return [gradients.of_examples(layer, run.examples).sum(-2).unsqueeze(0)]
    if expand or is_embedding(layer):
        return gradients.rows(layer)
    return [gradients.of_examples(layer, run.examples).sum(-2)]


def _add_square(total: Tensor, rows: Tensor, factor: float) -> None:
    """total += factor rows^T rows for each group; for a single group only on and above the
    diagonal."""
    if len(total) > 1:
        total.baddbmm_(rows.mT, rows, alpha=factor)
        return
    one, rows = total[0], rows[0]
    for at, end in _column_ranges(total):
        # torch has no syrk, which would compute one triangle of a symmetric product.
        one[at:end, at:].addmm_(rows[:, at:end].T, rows[:, at:], alpha=factor)


def _mirror_triangle(total: Tensor) -> None:
    """Fill the lower triangle, which `_add_square` leaves out."""
    if len(total) == 1 and total.dim() == 3:
        for at, end in _column_ranges(total):
            total[0, end:, at:end] = total[0, at:end, end:].T


def _column_ranges(total: Tensor) -> list[tuple[int, int]]:
    """Ranges of the columns of a square matrix; one range on a GPU, where one large product is
    faster."""
    size = total.shape[-1]
    if size < LARGE or total.device.type != "cpu":
        return [(0, size)]
    ends = [round(i * size / PARTS) for i in range(PARTS + 1)]
    return list(pairwise(ends))


def _factor_shapes(layout: BlockLayout) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors that are summed for a block, by name."""
    groups, out, into = layout.sizes
    if layout.role.matrix != "kronecker":
        return {"A": (1, into, into) if layout.role.matrix == "diagonal" else (1, into)}
    # An embedding has one-hot inputs and no bias, so its A is diagonal.
    a = (groups, into) if layout.role.name == "embedding" else (groups, into, into)
    return {"A": a, "G": (groups, out, out), "count": ()}


@final
class EigenvalueSums(BlockSums):
    """The corrected eigenvalues of every block, summed over batches.

        L_ij = sum_n,c (q_i^T dW_nc r_j)^2        dW_nc = sum over the rows r of n of g_rc a_r^T

    q_i: eigenvectors of G, r_j: eigenvectors of A. L is the diagonal of the exact block in this basis:
    no other diagonal is closer to the block in the Frobenius norm.
    """

    def __init__(self, blocks: Sequence[KroneckerBlock]) -> None:
        self._blocks = {block.layout: block for block in blocks}
        self.sums = {
            # float64: float32 loses digits in sums over thousands of columns.
            layout: {"values": block.G.new_zeros(layout.sizes, dtype=torch.float64)}
            for layout, block in self._blocks.items()
            if layout.role.matrix == "kronecker"
        }

    def add(self, run: ModelRun, share: float) -> None:
        layers = [layer for layer in run.layers if layer.layout in self.sums]
        inputs = {layer.layout: self._rotated_inputs(layer, run) for layer in layers}
        for gradients in run.columns():
            for layer in layers:
                block, values = self._blocks[layer.layout], self.sums[layer.layout]["values"]
                rows = [g @ block.G for g in gradients.rows(layer)]
                a, g = inputs[layer.layout], by_example(layer, rows, run.examples)
                # One-hot inputs stay indices: written out, each is as wide as the table is long.
                if is_embedding(layer) and layer.layout.weight is not None:
                    _add_embedding(values[0], a[0, ..., 0], g[0], share)
                else:
                    _add_squares(values, a, g, share)

    def _rotated_inputs(self, layer: Layer, run: ModelRun) -> Tensor:
        """a_r Q_A by example; of an embedding the indices themselves."""
        QA = self._blocks[layer.layout].A
        if is_embedding(layer) and layer.layout.weight is not None:
            rows = [call.inputs() for call in layer.calls]
        else:
            assert QA is not None
            rows = [input_rows(layer, call, run.dtype) @ QA for call in layer.calls]
        return by_example(layer, rows, run.examples)

    def blocks(self, divisor: float) -> list[KroneckerBlock]:
        """The blocks with corrected eigenvalues. divisor: the sum of all shares."""
        found = []
        for layout, block in self._blocks.items():
            if layout in self.sums:
                values = (self.sums[layout]["values"] / divisor).to(block.G.dtype)
                block = KroneckerBlock(layout, block.A, block.G, values)
            found.append(block)
        return found


def _add_squares(values: Tensor, a: Tensor, g: Tensor, share: float) -> None:
    """Add share times the sum over n of (sum_t g_nt a_nt^T)^2; a, g: [groups, N, T, features]."""
    # One position: the square of the outer product is the product of squares.
    if a.shape[2] == 1:
        values.add_(g[:, :, 0].square().mT @ a[:, :, 0].square(), alpha=share)
        return
    size = max(1, AT_ONCE // max(values.numel(), 1))
    for start in range(0, a.shape[1], size):
        each = g[:, start : start + size].mT @ a[:, start : start + size]
        values.add_(each.square().sum(1), alpha=share)


def _add_embedding(values: Tensor, at: Tensor, rows: Tensor, share: float) -> None:
    """`_add_squares` for an embedding with one-hot inputs: indices at [N, T], rows [N, T, out]."""
    number = torch.arange(len(at), device=at.device).unsqueeze(1)
    seen = at >= 0
    # Sum the gradients of equal (example, index) pairs before squaring.
    pairs, places = (number * values.shape[1] + at)[seen].unique(return_inverse=True)
    sums = rows.new_zeros(len(pairs), rows.shape[-1]).index_add_(0, places, rows[seen])
    values.T.index_add_(0, pairs % values.shape[1], sums.square().to(values), alpha=share)
