"""The rows of a layer's calls: inputs, gradients by outputs, and what is made of both.

A row is an example, or a position of one, at which the weights are used.
"""

from collections.abc import Sequence
from typing import NamedTuple, final

import torch
from torch import Tensor

from hoglib.curvature.kronecker import BlockLayout
from hoglib.curvature.layer_calls import LayerCall


class Layer(NamedTuple):
    """A block and the calls that it is of, in one run of the model."""

    layout: BlockLayout
    calls: list[LayerCall]


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
        return call.rows_of_outputs(self.plain(call)).to(self._dtype)

    def plain(self, call: LayerCall) -> Tensor:
        """Like the output of the call."""
        found = self._found[id(call)]
        if found is None:
            return torch.zeros(call.shape, dtype=self._dtype, device=self._device)
        return found


def input_rows(layer: Layer, call: LayerCall, dtype: torch.dtype) -> Tensor:
    """a_r with a 1 for the bias, [groups, rows, into]; of a block of a bias alone the 1."""
    groups, _, _ = layer.layout.sizes
    if layer.layout.weight is None:
        return torch.ones(1, call.rows, 1, dtype=dtype, device=call.device)
    a = call.inputs().to(dtype)
    if layer.layout.bias is None:
        return a
    return torch.cat([a, a.new_ones(groups, a.shape[1], 1)], -1)


def mean_inputs(layer: Layer, examples: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """a_n, the mean over the rows of an example of all calls, [groups, examples, into]."""
    groups, _, _ = layer.layout.sizes
    ones = torch.ones(groups, examples, 1, dtype=dtype, device=device)
    if layer.layout.weight is None:
        return ones
    total = sum(call.rows for call in layer.calls)
    weighted = [call.rows / total * call.mean_inputs(examples).to(dtype) for call in layer.calls]
    mean = torch.stack(weighted).sum(0) if len(weighted) > 1 else weighted[0]
    return mean if layer.layout.bias is None else torch.cat([mean, ones], -1)


def output_gradients(layer: Layer, call: LayerCall, gradients: Gradients) -> Tensor:
    """g_r, [groups, rows, out]; of a block of a bias alone of one group."""
    g = gradients.of(call)
    if layer.layout.weight is None and len(g) > 1:
        g = g.movedim(0, 1).reshape(1, g.shape[1], -1)
    return g


def scale_and_shift_gradients(layer: Layer, call: LayerCall, gradients: Gradients) -> Tensor:
    """The gradient of each row by scale and shift, [rows, into]."""
    g = gradients.of(call)[0]
    parts = []
    if layer.layout.weight is not None:
        parts.append(g * call.inputs()[0].to(g.dtype))
    if layer.layout.bias is not None:
        parts.append(g)
    return torch.cat(parts, -1)


def is_embedding(layer: Layer) -> bool:
    """Whether inputs are indices."""
    return layer.layout.role.name == "embedding"


def summed_gradient(layer: Layer, gradients: Gradients, dtype: torch.dtype) -> Tensor:
    """The gradient by V, summed over all rows."""
    _, out, into = layer.layout.sizes
    total: Tensor | None = None
    for call in layer.calls:
        if layer.layout.role.matrix == "diagonal":
            part = scale_and_shift_gradients(layer, call, gradients).sum(0).reshape(1, 1, -1)
        elif is_embedding(layer):
            at, g = call.inputs()[0, :, 0], gradients.of(call)[0]
            seen = at >= 0
            part = g.new_zeros(into, out).index_add(0, at[seen], g[seen]).T.unsqueeze(0)
        elif call.has_patches() and layer.layout.weight is not None:
            g = gradients.plain(call).to(dtype)
            part = call.weight_gradients(g, 0, len(g)).sum(0)
            if layer.layout.bias is not None:
                part = torch.cat([part, gradients.of(call).sum(1).unsqueeze(-1)], -1)
        else:
            part = output_gradients(layer, call, gradients).mT @ input_rows(layer, call, dtype)
        total = part if total is None else total + part
    assert total is not None  # a layer has a call
    return total


def by_example(layer: Layer, rows: Sequence[Tensor], examples: int) -> Tensor:
    """Rows of each call as [..., examples, positions of all calls, features]."""
    pairs = zip(layer.calls, rows, strict=True)
    parts = [call.by_example(x, examples) for call, x in pairs]
    return parts[0] if len(parts) == 1 else torch.cat(parts, -2)
