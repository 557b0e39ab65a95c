"""The parts of a block, such as the attention and the MLP of a transformer block.

Forward over reverse keeps a tangent beside each intermediate value of a block, twice the memory of a
gradient. Parts are then recomputed one by one: the block keeps their inputs, and intermediate values
of a part are in memory only while the gradient of this part is computed.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hoglib._core.messages import closures
from hoglib._core.runtime.ambient import replaced
from hoglib._core.torch_api import pytree
from hoglib._core.torch_api.dispatch import Args, Kw, Op, Types
from hoglib._core.torch_api.torch_modes import copy_without_override_check


def parts_of(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """The outermost submodules that have submodules.

    A submodule with all parameters of its module is replaced by its own parts: recomputing it alone
    would save no memory.
    """
    found: list[nn.Module] = []
    for module in modules:
        count = sum(1 for _ in module.parameters())
        for child in module.children():
            if isinstance(child, torch.jit.ScriptModule) or next(child.children(), None) is None:
                continue
            without_forward = isinstance(child, nn.ModuleList | nn.ModuleDict)
            if without_forward or sum(1 for _ in child.parameters()) == count:
                found += parts_of([child])
            else:
                found.append(child)
    return list({id(part): part for part in found}.values())


@contextmanager
def replaced_forwards(blocks: Sequence[nn.Module], make: Callable[..., Any]) -> Iterator[list[Any]]:
    """Inside, the forward of each block is make(block); entering returns these forwards."""
    forwards = [make(block) for block in blocks]
    pairs = zip(blocks, forwards, strict=True)
    with replaced([(vars(block), "forward", forward) for block, forward in pairs]):
        yield forwards


@contextmanager
def watched_parts(modules: Iterable[nn.Module]) -> Iterator[list[nn.Module]]:
    """Inside, the parts of modules run as usual. At exit the list has the parts that can be recomputed
    alone: functions of their tensor arguments, parameters and buffers that change none of these."""
    parts, recomputable = parts_of(modules), list[nn.Module]()
    verdicts: dict[int, list[bool]] = {id(part): [] for part in parts}
    with replaced_forwards(parts, lambda p: partial(_watch, p, p.forward, verdicts[id(p)])):
        yield recomputable
    recomputable += [part for part in parts if verdicts[id(part)] and all(verdicts[id(part)])]


def _watch(part: nn.Module, forward: Any, found: list[bool], /, *args: Any, **kwargs: Any) -> Any:
    """The outputs of a part; appends to `found` whether the part could be recomputed alone."""
    leaves, structure = pytree.flatten((args, kwargs))
    state = [*(x for x in leaves if isinstance(x, Tensor)), *part.parameters(), *part.buffers()]
    versions = [version_of(x) for x in state]
    # a run may change an object, such as a cache; a tensor that an object holds would get no gradient
    closed = _is_closed(leaves) and next(_unregistered_state(part), None) is None
    outputs = forward(*args, **kwargs)
    same_values = versions == [version_of(x) for x in state]
    same_structure = pytree.flatten((args, kwargs))[1] == structure
    unchanged = same_values and same_structure and next(_unregistered_state(part), None) is None
    found.append(closed and unchanged and _is_closed(pytree.leaves(outputs)))
    return outputs


def _is_closed(leaves: Sequence[Any]) -> bool:
    return all(isinstance(x, Tensor) or closures.is_plain(x) for x in leaves)


def _unregistered_state(part: nn.Module) -> Iterator[Any]:
    """The unregistered tensors and modules of a part, except in its replaced forward."""
    return (one for one in closures.unregistered(part) if not one.path.startswith("forward"))


def version_of(tensor: Tensor | None) -> int:
    """The version counter of a tensor; 0 for an inference tensor, which has none."""
    return 0 if tensor is None or tensor.is_inference() else tensor._version


def _torch_callables(*names: str) -> set[Any]:
    """The functions and methods of torch with these names."""
    homes = (torch, Tensor, F)
    return {getattr(home, name) for home in homes for name in names if hasattr(home, name)}


# Elementwise functions with a second derivative of several operations, and functions of rows.
_ELEMENTWISE = _torch_callables(
    "gelu", "silu", "mish", "tanh", "sigmoid", "softplus", "elu", "celu", "selu", "logsigmoid"
)
_BY_ROWS = _torch_callables("softmax", "log_softmax")
_SLICES, _FEWEST_ELEMENTS = 2, 2**14  # number of slices, and size from which slicing saves memory


@final
class SlicedOperations(TorchFunctionMode):
    """Inside, activations, softmax and attention run on slices of their inputs, one by one.

    For forward over reverse: the jvp of an activation's backward makes five or six tensors with the
    size of its input, now with the size of a slice.
    """

    def __torch_function__(self, func: Op, types: Types, args: Args = (), kwargs: Kw = None) -> Any:
        kwargs = kwargs or {}
        if func in _ELEMENTWISE or func in _BY_ROWS:
            return _by_slices(func, *args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return _sliced_attention(func, *args, **kwargs)
        if func is F.multi_head_attention_forward:
            with self:  # the mode is off inside its handler; the attention inside needs it
                return copy_without_override_check(func)(*args, **kwargs)
        return func(*args, **kwargs)


def _by_slices(func: Callable[..., Any], input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """func on slices along the first dimension that is long enough and is not the `dim` of rows."""
    row, count = None, input.dim()
    if func in _BY_ROWS:
        row = args[0] if args else kwargs.get("dim")
        sliced = isinstance(row, int) and count > 0
    else:
        sliced = not (kwargs.get("inplace") or True in args)
    # torch.cat returns a contiguous tensor, so another memory layout would be lost
    if not sliced or input.numel() < _FEWEST_ELEMENTS or not input.is_contiguous():
        return func(input, *args, **kwargs)
    others = (d for d, n in enumerate(input.shape) if n >= _SLICES and row not in (d, d - count))
    dim = next(others, None)
    if dim is None:
        return func(input, *args, **kwargs)
    return torch.cat([func(part, *args, **kwargs) for part in input.chunk(_SLICES, dim)], dim)


def _sliced_attention(
    func: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """Attention on slices of samples. Not with dropout: slices would draw other random numbers."""
    inputs = (query, key, value)
    samples = query.shape[0]
    several = query.dim() > 3 and all(x.dim() > 3 and x.shape[0] == samples for x in inputs)
    if not several or samples < 2 or dropout_p or query.numel() < _FEWEST_ELEMENTS:
        return func(*inputs, attn_mask, dropout_p, *args, **kwargs)
    count = min(_SLICES, samples)
    masks: Sequence[Tensor | None] = [attn_mask] * count
    if attn_mask is not None and attn_mask.dim() == query.dim() and attn_mask.shape[0] == samples:
        masks = attn_mask.chunk(count)
    slices = zip(*(x.chunk(count) for x in inputs), masks, strict=False)
    parts = [func(q, k, v, mask, dropout_p, *args, **kwargs) for q, k, v, mask in slices]
    if query.stride(-3) < query.stride(-2):  # torch's attention returns the layout of its query
        return torch.cat([y.transpose(-3, -2) for y in parts]).transpose(-3, -2)
    return torch.cat(parts)
