"""The same graph with images whose channels lie together, as convolutions of processors want them.

oneDNN reorders images whose channels lie apart in every convolution, and in each of its derivatives.
The graph is traced once more with convolutions that are given images and weights channels last; what
follows them stays so. torch's compiler does that to convolutions alone, and leaves each of their
derivatives a second copy in the old order.
"""

from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

aten: Any = torch.ops.aten
_CONVOLUTIONS = {aten.convolution.default: 2, aten.convolution_backward.default: 3}
_VIEWS = (aten.view.default, aten._unsafe_view.default)
_BY_STRIDE = (
    aten.as_strided.default, aten.as_strided_.default, aten.as_strided_scatter.default,
)  # fmt: skip


def channels_last(module: fx.GraphModule, tensors: list[Tensor]) -> fx.GraphModule:
    """The graph with images channels last; itself where it has none, or is not of a processor's."""
    nodes = list(module.graph.nodes)
    if not any(_of_images(node) for node in nodes) or any(n.target in _BY_STRIDE for n in nodes):
        return module
    if any(x.device.type != "cpu" for x in tensors):
        return module
    again = _ChannelsLast(module)
    return make_fx(lambda *given: again.run(*given), tracing_mode="fake")(*tensors)


def _of_images(node: fx.Node) -> bool:
    value = node.args[0].meta.get("val") if node.target in _CONVOLUTIONS else None  # type: ignore[union-attr]
    return isinstance(value, Tensor) and value.dim() == 4 and value.dtype == torch.float32


class _ChannelsLast(fx.Interpreter):
    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target in _CONVOLUTIONS:
            count = _CONVOLUTIONS[target]
            args = (*map(_last, args[:count]), *args[count:])
        if target in _VIEWS:  # of memory that has another order now
            target = aten.reshape.default
        return super().call_function(target, args, kwargs)

    def output(self, target: Any, args: Any, kwargs: Any) -> Any:
        """In the layout that there was: .grad takes over what lies in memory as its parameter."""
        (found,) = args
        (nodes,) = next(iter(reversed(self.module.graph.nodes))).args  # type: ignore[union-attr, arg-type]
        return [_as(x, node) for x, node in zip(found, nodes, strict=True)]


def _last(x: Any) -> Any:
    four = isinstance(x, Tensor) and x.dim() == 4
    return x.contiguous(memory_format=torch.channels_last) if four else x


def _as(x: Any, node: Any) -> Any:
    was = node.meta["val"] if isinstance(node, fx.Node) else None
    return x.contiguous() if isinstance(was, Tensor) and was.is_contiguous() else x
