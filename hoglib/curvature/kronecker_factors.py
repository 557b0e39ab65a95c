"""Kronecker factors of the layers of a model, summed over data.

    expand    A = mean of a_r a_r^T over rows r        G = sum over rows and columns c of g_rc g_rc^T
    reduce    A = mean of a_n a_n^T over examples n    G = sum over n and c of g_nc g_nc^T

    a_n = mean of a_r, g_nc = sum of g_rc over the rows r of example n, the positions and the calls that
    share the weights;  g_rc = d(sum_n s_nc . outputs_n) / d s_r, with the columns s_c of M = sum s s^T.

References:
    Martens and Grosse, Optimizing Neural Networks with Kronecker-factored Approximate Curvature, 2015.
    Grosse and Martens, A Kronecker-factored Approximate Fisher Matrix for Convolution Layers, 2016.
    Eschenhagen, Immer, Turner, Schneider and Hennig, Kronecker-Factored Approximate Curvature for
    Modern Neural Network Architectures, 2023, section 3 (expand, reduce).
    George, Laurent, Bouthillier, Ballas and Vincent, Fast Approximate Natural Gradient Descent in a
    Kronecker-factored Eigenbasis, 2018, section 3 (corrected eigenvalues).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from hoglib._core import pytree
from hoglib._core.autograd import Vector, fresh_leaves, translate_errors, without_graph
from hoglib._core.torch_modes import by_references
from hoglib._core.validation import listing
from hoglib.curvature.fisher_metric import FisherMetric
from hoglib.curvature.gauss_newton import CompositeLoss
from hoglib.curvature.kronecker import BlockLayout, KroneckerBlock
from hoglib.curvature.layer_calls import LayerCall, LayerRecorder, Region
from hoglib.curvature.linear_map import BoundLoss, ProductOptions
from hoglib.curvature.output_columns import columns, examples_of
from hoglib.curvature.vector_space import Space
from hoglib.errors import NoSecondDerivative, UnsupportedError

AT_ONCE = 2**24  # numbers of examples' gradients that are held at once
LEAVE_OUT = "leave it out: `{name: p for name, p in params.items() if name not in (...)}`"


@final
@dataclass(frozen=True)
class FactorOptions:
    """What factors are of, checked."""

    metric: FisherMetric
    approximation: str
    joint_bias: bool
    product: ProductOptions


class Layer(NamedTuple):
    """A block and the calls that it is of, in one run of the model."""

    layout: BlockLayout
    calls: list[LayerCall]


@final
class ModelRun:
    """A model's outputs at a batch, and the calls of its layers."""

    def __init__(
        self, loss: Any, space: Space, leaves: Vector, batch: Any, options: FactorOptions,
        orders: Sequence[bool] = (),
    ) -> None:  # fmt: skip
        self.options, self._names = options, pytree.paths(space.params)
        self._own = fresh_leaves(leaves, False)
        bound = BoundLoss(loss, pytree.flatten(space.params)[1], (batch,))
        self._composite = CompositeLoss(bound, options.metric, "reverse", options.product)
        recorder = LayerRecorder(self._own)
        with by_references(), recorder:
            self._outputs = self._composite.outputs(self._own)
        if not any(y.requires_grad for y in self._outputs):
            raise NoSecondDerivative(
                "loss.outputs(params, batch): expected outputs that depend on params, got none that do."
            )
        self._recorded = recorder.calls
        self.reorder(orders)
        self.layers = layers_of(recorder, options.joint_bias)
        self._check_covered(recorder)
        self.examples = examples_of(self._composite, self._outputs)
        # accumulate in float32 at least
        self.dtype, self.device = torch.promote_types(space.dtype, torch.float32), space.device

    def value(self) -> Tensor:
        """The loss."""
        values = [y.detach() for y in self._outputs]
        return without_graph(lambda: self._composite.criterion(*values))

    def columns(self) -> Iterator["Gradients"]:
        """For each column s_c of M the gradients by the outputs of all calls."""
        given = [y.detach() for y in self._outputs]
        found = columns(self.options.metric, self._composite, given, self.options.product)
        for column in found:
            yield self.gradients(column)

    def gradients(self, column: Vector) -> "Gradients":
        calls = self._calls()
        found = self._backward([call.edge for call in calls], column)
        return Gradients(calls, found, self.dtype, self.device)

    def _calls(self) -> list[LayerCall]:
        found = {id(call): call for layer in self.layers for call in layer.calls}
        return list(found.values())

    def _backward(self, inputs: Sequence[Any], column: Vector) -> list[Tensor | None]:
        pairs = [(y, u) for y, u in zip(self._outputs, column, strict=True) if y.requires_grad]
        with translate_errors(self.options.product.caller):
            found: Any = torch.autograd.grad(
                [y for y, _ in pairs], list(inputs), [u for _, u in pairs],
                retain_graph=True, allow_unused=True,
            )  # fmt: skip
        return list(found)

    def check(self, needs_examples: bool) -> None:
        """Compare the gradient of the first example's outputs, as the layers give it, with autograd's.

        It shows uses of parameters that were not seen, and layers that mix examples.
        """
        generator = torch.Generator().manual_seed(0)
        column = [torch.zeros_like(y) for y in self._outputs]
        for u in column:
            first = u if self.examples == 1 else u[:1]
            first.copy_(torch.randn(first.shape, generator=generator, dtype=torch.float32))
        calls = self._calls()
        found = self._backward([*(call.edge for call in calls), *self._own], column)
        gradients = Gradients(calls, found[: len(calls)], self.dtype, self.device)
        wanted = found[len(calls) :]
        ours = [p.new_zeros((1, *(p.shape or (1,))), dtype=self.dtype) for p in self._own]
        for layer in self.layers:
            self._check_apart(layer, gradients, needs_examples)
            layer.layout.scatter(_summed_gradient(layer, gradients, self.dtype).unsqueeze(0), ours)
        for name, one, p, expected in zip(self._names, ours, self._own, wanted, strict=True):
            given = torch.zeros_like(p) if expected is None else expected.to_dense()
            difference = (one.reshape(p.shape) - given.to(self.dtype)).norm()
            # ten times the root of the rounding: TensorFloat-32 and sums in another order
            if difference > 10 * torch.finfo(p.dtype).eps ** 0.5 * given.norm().to(self.dtype):
                raise UnsupportedError(
                    f"{self.options.product.caller}: expected params[{name!r}] to be used by layers "
                    "alone, got a gradient of which these are only a part: a custom Function, scripted "
                    f"or compiled code uses it too; {LEAVE_OUT}."
                )

    def _check_apart(self, layer: Layer, gradients: "Gradients", needs_examples: bool) -> None:
        """Raise where more rows than those of the first example have a gradient of its outputs."""
        if self.examples < 2:
            return
        needed = needs_examples or layer.layout.role.matrix == "diagonal"
        for call in layer.calls:
            touched = (gradients.of(call) != 0).any(-1).any(0)
            mixed = int(touched.sum()) > len(touched) / self.examples
            if needed and not mixed:
                mixed = not self._order(call, touched)
            if mixed:
                raise UnsupportedError(
                    f"{self.options.product.caller}: expected layers that treat the {self.examples} "
                    f"examples apart, in the rows of their leading dimension, got {self._name(layer)} "
                    f"with outputs {tuple(call.shape)}. Batch norm in train mode mixes examples: call "
                    "model.eval(). A layer that is called once for all examples, as position "
                    "embeddings are, has no gradients of each: leave it out of params."
                )

    def _order(self, call: LayerCall, touched: Tensor) -> bool:
        """Find how rows are ordered, from those that the first example touches; whether they are."""
        if len(touched) % self.examples:
            return False
        positions = len(touched) // self.examples
        if bool(touched[positions:].any()):
            call.time_first = not bool(touched.view(positions, self.examples)[:, 1:].any())
            return call.time_first
        return True

    def reorder(self, orders: Sequence[bool]) -> None:
        """Order rows as in another run."""
        for call, time_first in zip(self._recorded, orders, strict=False):
            call.time_first = time_first

    def orders(self) -> list[bool]:
        """Of each call, in the order of calls, whether positions come before examples."""
        return [call.time_first for call in self._recorded]

    def _name(self, layer: Layer) -> str:
        region = layer.layout.weight or layer.layout.bias
        assert region is not None
        return f"{layer.layout.role.name} with {self._names[region.leaf]}"

    def _check_covered(self, recorder: LayerRecorder) -> None:
        """Raise for parameters, or rows of them, that no layer uses, or more than one."""
        caller = self.options.product.caller
        for number, (name, leaf) in enumerate(zip(self._names, self._own, strict=True)):
            other = recorder.others.get(number)
            if other is not None:
                raise UnsupportedError(
                    f"{caller}: expected parameters of linear, convolutional, embedding and "
                    f"normalization layers, got params[{name!r}], which {other} uses; {LEAVE_OUT}."
                )
            uses = [
                region
                for layer in self.layers
                for region in (layer.layout.weight, layer.layout.bias)
                if region is not None and region.leaf == number
            ]
            uses.sort()
            ends = [0, *(region.stop for region in uses)]
            starts = [*(region.start for region in uses), len(leaf) if leaf.dim() else 1]
            if not uses:
                raise UnsupportedError(
                    f"{caller}: expected parameters of linear, convolutional, embedding and "
                    f"normalization layers, got params[{name!r}], which no such layer uses: the loss "
                    f"does not depend on it, or a custom Function uses it; {LEAVE_OUT}."
                )
            if starts != ends:
                raise UnsupportedError(
                    f"{caller}: expected every row of params[{name!r}] to be used by one kind of "
                    f"layer, got rows {listing([f'{r.start} to {r.stop}' for r in uses])} used by "
                    "layers of different kinds (an embedding tied to the output layer, for instance); "
                    f"{LEAVE_OUT}."
                )


@final
class Gradients:
    """The gradients of one column by the outputs of calls, as rows."""

    def __init__(
        self, calls: Sequence[LayerCall], found: Sequence[Tensor | None], dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        self._found = {id(call): part for call, part in zip(calls, found, strict=True)}
        self._dtype, self._device = dtype, device

    def of(self, call: LayerCall) -> Tensor:
        """[groups, rows, out]."""
        found = self._found[id(call)]
        if found is None:
            found = torch.zeros(call.shape, dtype=self._dtype, device=self._device)
        return call.rows_of_outputs(found).to(self._dtype)


def layers_of(recorder: LayerRecorder, joint_bias: bool) -> list[Layer]:
    """The calls by the block that they belong to, in the order of the parameters.

    A bias is in the block of its weight where the calls of both are the same.
    """
    by_weight: dict[Any, list[LayerCall]] = {}
    by_bias: dict[Region, list[LayerCall]] = {}
    for call in recorder.calls:
        if call.weight is not None:
            by_weight.setdefault((call.weight, call.role), []).append(call)
        if call.bias is not None:
            by_bias.setdefault(call.bias, []).append(call)
    layers = []
    for (weight, role), calls in by_weight.items():
        biases = {call.bias for call in calls}
        bias = biases.pop() if len(biases) == 1 else None
        shared = bias is None or len(by_bias[bias]) != len(calls)
        if shared or not (joint_bias or role.matrix == "diagonal"):
            bias = None
        else:
            assert bias is not None
            del by_bias[bias]
        layers.append(Layer(BlockLayout(role, weight, bias), calls))
    for bias, calls in by_bias.items():
        role = calls[0].role._replace(transposed=False)
        layers.append(Layer(BlockLayout(role, None, bias), calls))
    return sorted(
        layers, key=lambda layer: layer.layout.weight or layer.layout.bias or Region(0, 0, 0)
    )


def _inputs(layer: Layer, call: LayerCall, dtype: torch.dtype) -> Tensor:
    """a_r with a 1 for the bias, [groups, rows, into]; of a block of a bias alone the 1."""
    groups, _, _ = layer.layout.sizes
    if layer.layout.weight is None:
        rows = call.shape.numel() // (layer.layout.role.out * layer.layout.role.groups)
        return torch.ones(1, rows, 1, dtype=dtype, device=call.device)
    a = call.inputs().to(dtype)
    if layer.layout.bias is None:
        return a
    return torch.cat([a, a.new_ones(groups, a.shape[1], 1)], -1)


def _mean_inputs(layer: Layer, run: ModelRun) -> Tensor:
    """a_n, the mean over the rows of an example of all calls, [groups, examples, into]."""
    groups, out, _ = layer.layout.sizes
    ones = torch.ones(groups, run.examples, 1, dtype=run.dtype, device=run.device)
    if layer.layout.weight is None:
        return ones
    rows = [call.shape.numel() // (groups * out) for call in layer.calls]
    weighted = [
        count / sum(rows) * call.mean_inputs(run.examples).to(run.dtype)
        for count, call in zip(rows, layer.calls, strict=True)
    ]
    mean = torch.stack(weighted).sum(0) if len(weighted) > 1 else weighted[0]
    return mean if layer.layout.bias is None else torch.cat([mean, ones], -1)


def _outputs(layer: Layer, call: LayerCall, gradients: Gradients) -> Tensor:
    """g_r, [groups, rows, out]; of a block of a bias alone of one group."""
    g = gradients.of(call)
    if layer.layout.weight is None and len(g) > 1:
        g = g.movedim(0, 1).reshape(1, g.shape[1], -1)
    return g


def _scaled_rows(layer: Layer, call: LayerCall, gradients: Gradients) -> Tensor:
    """The gradient of each row by scale and shift, [rows, into]."""
    g = gradients.of(call)[0]
    parts = []
    if layer.layout.weight is not None:
        parts.append(g * call.inputs()[0].to(g.dtype))
    if layer.layout.bias is not None:
        parts.append(g)
    return torch.cat(parts, -1)


def _is_embedding(layer: Layer) -> bool:
    return layer.layout.role.name == "embedding"


def _summed_gradient(layer: Layer, gradients: Gradients, dtype: torch.dtype) -> Tensor:
    """The gradient by V, summed over all rows."""
    _, out, into = layer.layout.sizes
    total: Tensor | None = None
    for call in layer.calls:
        if layer.layout.role.matrix == "diagonal":
            part = _scaled_rows(layer, call, gradients).sum(0).reshape(1, 1, -1)
        elif _is_embedding(layer):
            at, g = call.inputs()[0, :, 0], gradients.of(call)[0]
            seen = at >= 0
            part = g.new_zeros(into, out).index_add(0, at[seen], g[seen]).T.unsqueeze(0)
        else:
            part = _outputs(layer, call, gradients).mT @ _inputs(layer, call, dtype)
        total = part if total is None else total + part
    assert total is not None  # a layer has a call
    return total


def _by_example(layer: Layer, rows: Sequence[Tensor], examples: int) -> Tensor:
    """Rows of each call as [..., examples, positions of all calls, features]."""
    pairs = zip(layer.calls, rows, strict=True)
    return torch.cat([call.by_example(x, examples) for call, x in pairs], -2)


class BlockSums:
    """Tensors of every block, by name, that are summed over batches and processes."""

    def __init__(self) -> None:
        self.sums: dict[BlockLayout, dict[str, Tensor]] = {}

    def pack(self) -> Tensor:
        """All of them as one row [1, n]."""
        parts = [x.reshape(-1) for layout in sorted(self.sums) for x in self.sums[layout].values()]
        return torch.cat(parts or [torch.zeros(0)]).unsqueeze(0)

    def unpack(self, row: Tensor) -> None:
        """Write such a row into them."""
        tensors = [x for layout in sorted(self.sums) for x in self.sums[layout].values()]
        parts = row[0].split([x.numel() for x in tensors])
        for x, part in zip(tensors, parts, strict=True):
            x.copy_(part.view(x.shape))

    def include(self, layouts: Iterable[BlockLayout], dtype: torch.dtype, device: Any) -> None:
        """Zeros for those that are not there: of several processes one may have no batch."""


@final
class FactorSums(BlockSums):
    """A and G of every block, summed over batches."""

    def add(self, run: ModelRun, share: float, weight: float) -> None:
        """Add those of a batch: weight times A, and share times G."""
        expand = run.options.approximation == "expand"
        self.include((layer.layout for layer in run.layers), run.dtype, run.device)
        for layer in run.layers:
            sums = self.sums[layer.layout]
            if layer.layout.role.matrix == "kronecker":
                self._add_inputs(layer, sums, run, weight, expand)
        for gradients in run.columns():
            for layer in run.layers:
                self._add_gradients(layer, gradients, self.sums[layer.layout], run, share, expand)

    def include(self, layouts: Iterable[BlockLayout], dtype: torch.dtype, device: Any) -> None:
        """Zeros for those that are not there: of several processes one may have no batch."""
        for layout in layouts:
            if layout not in self.sums:
                self.sums[layout] = {
                    name: torch.zeros(shape, dtype=dtype, device=device)
                    for name, shape in _shapes(layout).items()
                }

    def _add_inputs(
        self, layer: Layer, sums: dict[str, Tensor], run: ModelRun, weight: float, expand: bool
    ) -> None:
        sums["count"] += weight
        if _is_embedding(layer):
            at = torch.cat([call.inputs()[0, :, 0] for call in layer.calls])
            seen = at[at >= 0]
            ones = torch.full_like(seen, weight / max(len(at), 1), dtype=run.dtype)
            sums["A"][0].index_add_(0, seen, ones)
            return
        if expand:
            rows = [_inputs(layer, call, run.dtype) for call in layer.calls]
            total = sum(a.shape[1] for a in rows)
            for a in rows:
                _add_square(sums["A"], a, weight / max(total, 1))
        else:
            mean = _mean_inputs(layer, run)
            _add_square(sums["A"], mean, weight / max(run.examples, 1))

    def _add_gradients(
        self, layer: Layer, gradients: Gradients, sums: dict[str, Tensor], run: ModelRun,
        share: float, expand: bool,
    ) -> None:  # fmt: skip
        if layer.layout.role.matrix == "diagonal":
            rows = [_scaled_rows(layer, call, gradients) for call in layer.calls]
            each = _by_example(layer, rows, run.examples).sum(-2)
            _add_square(sums["A"], each.unsqueeze(0), share)
            return
        rows = [_outputs(layer, call, gradients) for call in layer.calls]
        if expand or _is_embedding(layer):
            for g in rows:
                _add_square(sums["G"], g, share)
        else:
            _add_square(sums["G"], _by_example(layer, rows, run.examples).sum(-2), share)

    def blocks(self, divisor: float) -> list[KroneckerBlock]:
        """The blocks of sums over all of the data, whose shares sum to divisor."""
        found = []
        for layout, sums in self.sums.items():
            if layout.role.matrix == "diagonal":
                one = sums["A"].new_ones(1, 1, 1)
                found.append(KroneckerBlock(layout, sums["A"] / divisor, one))
            else:
                A = sums["A"] / sums["count"].clamp(min=torch.finfo(sums["A"].dtype).tiny)
                found.append(KroneckerBlock(layout, A, sums["G"] / divisor))
        return sorted(found, key=lambda b: b.layout.weight or b.layout.bias or Region(0, 0, 0))


def _add_square(total: Tensor, rows: Tensor, factor: float) -> None:
    """total += factor rows^T rows, for each group."""
    if len(total) == 1:  # faster than a batch of one
        total[0].addmm_(rows[0].T, rows[0], alpha=factor)
    else:
        total.baddbmm_(rows.mT, rows, alpha=factor)


def _shapes(layout: BlockLayout) -> dict[str, tuple[int, ...]]:
    groups, out, into = layout.sizes
    if layout.role.matrix == "diagonal":
        return {"A": (1, into, into)}
    a = (
        (groups, into)
        if layout.role.name == "embedding" and layout.weight
        else (groups, into, into)
    )
    return {"A": a, "G": (groups, out, out), "count": ()}


@final
class EigenvalueSums(BlockSums):
    """The corrected eigenvalues of every block, summed over batches.

        L_ij = sum_n,c (q_i^T dW_nc r_j)^2        dW_nc = sum over the rows r of n of g_rc a_r^T

    with the eigenvectors q of G and r of A. They are the diagonal of the matrix in that basis, and so
    the best that it allows in the Frobenius norm.
    """

    def __init__(self, blocks: Sequence[KroneckerBlock]) -> None:
        self._blocks = {block.layout: block for block in blocks}
        self.sums = {
            layout: {"values": block.G.new_zeros(layout.sizes)}
            for layout, block in self._blocks.items()
            if layout.role.matrix == "kronecker"
        }

    def add(self, run: ModelRun, share: float) -> None:
        layers = [layer for layer in run.layers if layer.layout in self.sums]
        inputs = {layer.layout: self._rotated_inputs(layer, run) for layer in layers}
        for gradients in run.columns():
            for layer in layers:
                block, values = self._blocks[layer.layout], self.sums[layer.layout]["values"]
                g = [_outputs(layer, call, gradients) @ block.G for call in layer.calls]
                if _is_embedding(layer) and layer.layout.weight is not None:
                    at = _by_example(layer, inputs[layer.layout], run.examples)[..., 0]
                    rows = _by_example(layer, g, run.examples)
                    _add_embedding(values[0], at[0], rows[0], share)
                else:
                    _add_squares(
                        values, inputs[layer.layout][0], _by_example(layer, g, run.examples), share
                    )

    def _rotated_inputs(self, layer: Layer, run: ModelRun) -> list[Tensor]:
        if _is_embedding(layer) and layer.layout.weight is not None:
            return [call.inputs() for call in layer.calls]
        QA = self._blocks[layer.layout].A
        assert QA is not None
        rows = [_inputs(layer, call, run.dtype) @ QA for call in layer.calls]
        return [_by_example(layer, rows, run.examples)]

    def blocks(self, divisor: float) -> list[KroneckerBlock]:
        """The blocks, whose shares sum to divisor."""
        found = []
        for layout, block in self._blocks.items():
            if layout in self.sums:
                values = self.sums[layout]["values"] / divisor
                block = KroneckerBlock(layout, block.A, block.G, values)
            found.append(block)
        return found


def _add_squares(values: Tensor, a: Tensor, g: Tensor, share: float) -> None:
    """Add share times the sum over n of (sum_t g_nt a_nt^T)^2; a, g: [groups, N, T, features]."""
    if a.shape[2] == 1:
        values.baddbmm_(g[:, :, 0].square().mT, a[:, :, 0].square(), alpha=share)
        return
    size = max(1, AT_ONCE // max(values.numel(), 1))
    for start in range(0, a.shape[1], size):
        each = g[:, start : start + size].mT @ a[:, start : start + size]
        values.add_(each.square().sum(1), alpha=share)


def _add_embedding(values: Tensor, at: Tensor, rows: Tensor, share: float) -> None:
    """The same for an embedding, whose inputs are unit vectors: at [N, T], rows [N, T, out]."""
    number = torch.arange(len(at), device=at.device).unsqueeze(1)
    seen = at >= 0
    pairs, places = (number * values.shape[1] + at)[seen].unique(return_inverse=True)
    sums = rows.new_zeros(len(pairs), rows.shape[-1]).index_add_(0, places, rows[seen])
    values.T.index_add_(0, pairs % values.shape[1], sums.square(), alpha=share)
