"""The cross-entropy of a linear layer, in a captured graph: its logits exist in chunks.

    cross_entropy(linear(h, W, b).view(-1, C), t) = linear_cross_entropy(h.view(-1, D), W, t, b)

Derivatives are taken while a function is traced, so this is not a pass over its graph: calls of the
function are followed from the layer to the loss. Where logits are more than one chunk, the loss is
computed from the features. If something else uses the logits too, so that they exist anyway, the
function is traced again as it is.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from hoglib._core.mixed_precision import is_autocast
from hoglib.capture.nodes import needed_nodes
from hoglib.ops import _linear_cross_entropy as chunked

aten: Any = torch.ops.aten
_RESHAPES = {
    Tensor.view, Tensor.reshape, Tensor.flatten, torch.reshape, torch.flatten, Tensor.unflatten,
}  # fmt: skip
_COPIES = {Tensor.float, Tensor.double, Tensor.to, Tensor.contiguous}
_PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default}


class _Logits(NamedTuple):
    """The output of a linear layer, or part of its rows, and what it was computed from."""

    value: Tensor  # kept alive, so that no other tensor gets its id
    features: Tensor  # as many rows
    weight: Tensor
    bias: Tensor | None
    total: int  # logits of the layer
    versions: list[int]

    def tensors(self) -> list[Tensor]:
        return [x for x in (self.value, self.features, self.weight, self.bias) if x is not None]


class HeadLosses:
    """Follows the calls of a function while it is traced."""

    def __init__(self) -> None:
        self._known: dict[int, _Logits] = {}
        self.replaced: list[tuple[int, int]] = []  # all logits, and classes

    def call(self, func: Any, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The result of a call of one of FOLLOWED, which ``run`` computes, or what is equal to it."""
        if func is F.cross_entropy:
            loss = self._loss(*args, **kwargs)
            return run(*args, **kwargs) if loss is None else loss
        result = run(*args, **kwargs)
        if func is F.linear:
            if result.numel() > chunked.CHUNK_ELEMENTS:
                features, weight, bias = _linear(*args, **kwargs)
                self._add(_Logits(result, features, weight, bias, result.numel(), []))
        elif func in FOLLOWED and (logits := self._at(args[0])) is not None:
            if func is Tensor.register_hook or func is Tensor.retain_grad:
                del self._known[id(args[0])]  # the gradient of the logits is wanted
            else:
                features = _features(func, args, logits, result)
                if features is not None:
                    self._add(logits._replace(value=result, features=features, versions=[]))
        return result

    def _add(self, logits: _Logits) -> None:
        if not any(x.is_inference() for x in logits.tensors()):  # which have no version
            logits.versions.extend(x._version for x in logits.tensors())
            self._known[id(logits.value)] = logits

    def _at(self, value: Any) -> _Logits | None:
        """What a tensor was computed from, unless one of them was changed in place since."""
        found = self._known.get(id(value))
        if found is None or found.versions != [x._version for x in found.tensors()]:
            return None
        return found

    def _loss(
        self, input: Tensor, target: Tensor, weight: Any = None, size_average: Any = None,
        ignore_index: int = -100, reduce: Any = None, reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Tensor | None:  # fmt: skip
        logits = self._at(input)
        if logits is None or input.dim() != 2 or is_autocast(logits.features):
            return None
        rows, classes = input.shape
        if (
            not (weight is size_average is reduce is None)
            or reduction not in ("mean", "sum", "none")
            or target.dtype is not torch.long
            or target.shape != (rows,)
            or rows * classes <= chunked.CHUNK_ELEMENTS
        ):
            return None
        counts = target != ignore_index
        own = torch.where(counts, target, 0)
        size = chunked.chunk_size_of(None, classes)
        features, W, b = logits.features, logits.weight, logits.bias
        losses = chunked.row_losses(features, W, b, own, label_smoothing, size)
        losses = torch.where(counts, losses, 0)
        if reduction != "none":
            losses = losses.sum() / (counts.sum() if reduction == "mean" else 1)
        self.replaced.append((logits.total, classes))
        return losses.to(input.dtype)


FOLLOWED = {
    F.linear, F.cross_entropy, Tensor.__getitem__, Tensor.register_hook, Tensor.retain_grad,
    *_RESHAPES, *_COPIES,
}  # fmt: skip


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Any, ...]:
    return input, weight, bias


def _features(func: Any, args: Any, logits: _Logits, result: Tensor) -> Tensor | None:
    """The features of some rows of logits; None if the rows are not whole."""
    features, classes = logits.features, logits.value.shape[-1]
    if not result.dim() or result.shape[-1] != classes or result.device != features.device:
        return None
    if func in _RESHAPES:
        return features.reshape(*result.shape[:-1], features.shape[-1])
    if func in _COPIES:
        return features if result.is_floating_point() else None
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    if not all(x is ... or type(x) is int or isinstance(x, slice) for x in index):
        return None
    found = features[index]
    wanted = (*result.shape[:-1], features.shape[-1])
    return found if found.shape == wanted else None


def exist(graph: fx.Graph, replaced: list[tuple[int, int]]) -> bool:
    """Whether the outputs of a graph need logits as a whole all the same."""
    *nodes, output = graph.nodes
    for node in needed_nodes(nodes, output.all_input_nodes):
        shape = node.meta["val"].shape if node.target in _PRODUCTS else torch.Size()
        if any(shape[-1:] == (n,) and shape.numel() == total for total, n in replaced):
            return True
    return False
