"""Which layers use which parameters in a run of an unmodified model, with their inputs and outputs.

    s_r = W a_r + b        for rows r: examples, and the positions of each that share the weights

A `TorchFunctionMode` sees every torch call that a parameter, or some of its rows, is an argument of:
linear maps, convolutions, embeddings and normalization are recorded, whatever module they stand in;
what else uses a parameter is noted, to be refused by name.
"""

from collections.abc import Callable
from functools import partial
from inspect import signature
from types import EllipsisType, FunctionType
from typing import Any, NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.grad import conv1d_weight, conv2d_weight, conv3d_weight
from torch.overrides import TorchFunctionMode

from hoglib._core.autograd import Vector
from hoglib.errors import UnsupportedError
from hoglib.stand_ins.mode import in_module, without_override_check


class Region(NamedTuple):
    """Rows start to stop of a parameter, which is the leaf of that number."""

    leaf: int
    start: int
    stop: int


class Role(NamedTuple):
    """What a call does with its weight.

    matrix: "kronecker", or "diagonal" for layers that scale and shift each feature. groups, out, into:
    of a weight that is `groups` matrices [out, into]. transposed: whether it is stored as [into, out].
    """

    name: str
    matrix: str
    groups: int = 1
    out: int = 1
    into: int = 1
    transposed: bool = False


@final
class LayerCall:
    """One call of a layer: what it computed with, and where its output is in the graph."""

    def __init__(
        self, role: Role, weight: Region | None, bias: Region | None, x: Tensor, output: Tensor,
        rows_of_inputs: Callable[[Tensor], Tensor], rows_of_outputs: Callable[[Tensor], Tensor],
        weight_gradients: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> None:  # fmt: skip
        self.role, self.weight, self.bias = role, weight, bias
        self.edge: GradientEdge = get_gradient_edge(output)
        self.shape, self.device = output.shape, output.device
        self.time_first = False  # whether rows are ordered by position before example
        self._x, self._version = x.detach(), x._version
        self._rows_of_inputs = rows_of_inputs
        self._weight_gradients = weight_gradients
        self.rows_of_outputs = rows_of_outputs  # of a tensor like the output: [groups, rows, out]

    def inputs(self) -> Tensor:
        """a_r, [groups, rows, into]; of an embedding the indices [1, rows, 1]; of a normalization layer
        the normalized inputs [1, rows, into]."""
        self._check_unchanged()
        return self._rows_of_inputs(self._x)

    @property
    def rows(self) -> int:
        """How many."""
        return self.shape.numel() // (self.role.groups * self.role.out)

    def has_patches(self) -> bool:
        """Whether `inputs` are copies that are larger than what the layer was given."""
        return self._weight_gradients is not None

    def weight_gradients(self, g: Tensor, start: int, stop: int) -> Tensor:
        """Of a convolution and some examples, which its batch consists of: the gradients by the weight
        [n, groups, out, into], from the gradients g by the outputs, in their form, without patches."""
        self._check_unchanged()
        assert self._weight_gradients is not None
        return self._weight_gradients(self._x[start:stop], g[start:stop])

    def by_example(self, rows: Tensor, examples: int) -> Tensor:
        """Rows [..., all, features] as [..., examples, positions, features]."""
        if rows.shape[-2] % examples:
            raise UnsupportedError(unlike_rows(self, examples))
        if self.time_first:
            return rows.unflatten(-2, (-1, examples)).transpose(-3, -2)
        return rows.unflatten(-2, (examples, -1))

    def rounding(self, g: Tensor) -> Tensor:
        """The size of what a gradient by the parameters is a sum of: |g| |a|, a bound."""
        if self.role.matrix == "diagonal":
            a = self.inputs()
        elif self._x.is_floating_point() or self._x.is_complex():
            a = self._x
        else:
            a = self._x.new_ones((), dtype=g.dtype)
        size = torch.linalg.vector_norm(a.to(g.dtype))
        return torch.linalg.vector_norm(g) * (size + 1)

    def _check_unchanged(self) -> None:
        if self._x._version != self._version:
            raise UnsupportedError(
                f"model: expected the inputs of {self.role.name} to stay as they are, got an operation "
                "that changes them in place afterwards; use one that makes a new tensor."
            )


CHOOSING = frozenset({
    "argsort", "flip", "gather", "index_add", "index_copy", "index_put", "index_select",
    "masked_scatter", "masked_select", "nonzero", "repeat_interleave", "roll", "scatter",
    "scatter_add", "scatter_reduce", "sort", "take", "take_along_dim", "topk", "unique",
})  # fmt: skip
PLAIN_INDICES = (int, slice, EllipsisType)  # a bool is an int; tensors, arrays and lists choose


def _chooses_rows(func: Any, args: Any) -> bool:
    """Whether a torch call can give rows in another order, or some of them only."""
    name = getattr(func, "__name__", "")
    if name in ("__getitem__", "__setitem__"):
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return not all(part is None or isinstance(part, PLAIN_INDICES) for part in index)
    return name.rstrip("_") in CHOOSING


def unlike_rows(call: LayerCall, examples: int) -> str:
    """The error for a layer that is given some of the examples."""
    return (
        f"model: expected layers with as many rows of each of the {examples} examples, got "
        f"{call.role.name} with outputs {tuple(call.shape)}, as of an expert that is given some of "
        "them. Leave its parameters out, or use approximation='expand' with eigenvalue_corrected=False."
    )


@final
class LayerRecorder(TorchFunctionMode):
    """Inside, the calls that use the leaves are recorded."""

    def __init__(self, leaves: Vector, examples: int = 1) -> None:
        super().__init__()
        self.examples = examples  # above 1, the batch of embeddings that are computed once for all
        self.expanded = False  # whether there was one
        self.selects = False  # whether rows were chosen or sorted, maybe by the values of the batch
        self.calls: list[LayerCall] = []
        self.others: dict[int, str] = {}  # the leaves that are used otherwise, and by what
        self._leaves = leaves
        self._numbers = {id(leaf): i for i, leaf in enumerate(leaves)}
        self._storages = {leaf.untyped_storage().data_ptr(): i for i, leaf in enumerate(leaves)}
        # kept alive, so that an id stays its own
        self._views: dict[int, tuple[Region, Tensor]] = {}

    def region(self, tensor: Any) -> Region | None:
        """What a tensor is of the leaves."""
        number = self._numbers.get(id(tensor))
        if number is not None:
            leaf = self._leaves[number]
            return Region(number, 0, len(leaf) if leaf.dim() else 1)
        view = self._views.get(id(tensor))
        return None if view is None else view[0]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.selects = self.selects or _chooses_rows(func, args)
        layer = LAYERS.get(func)
        if layer is None:
            if isinstance(func, FunctionType):
                inside = without_override_check(func, _NAMES)
                if inside is not None:
                    with self:
                        return inside(*args, **kwargs)
            used = self._used(args, kwargs)
            result = func(*args, **kwargs)
            for region in used:
                self._note(func, region, result)
            return result
        result = func(*args, **kwargs)
        used = self._used(args, kwargs)
        if used and result.requires_grad:
            if func is F.embedding and self.examples > 1 and args:
                args, result = self._of_each_example(args, result)
            call = layer(self, result, *args, **kwargs)
            if call is None or {*used} != {call.weight, call.bias} - {None}:
                for region in used:
                    self._note(func, region, result)
            else:
                self.calls.append(call)
        return result

    def _of_each_example(self, args: Any, result: Tensor) -> tuple[Any, Tensor]:
        """Indices [1, T] or [T], as of positions, and their rows, once for each example: the gradients
        by the rows are then those of an example."""
        indices, *rest = args
        if indices.dim() == 1 and len(indices) != self.examples:
            indices, result = indices.unsqueeze(0), result.unsqueeze(0)
        if indices.dim() < 2 or len(indices) != 1:
            return args, result
        self.expanded = True
        each = (self.examples, *indices.shape[1:])
        return (indices.expand(each), *rest), result.expand(*each, result.shape[-1])

    def _used(self, args: Any, kwargs: Any) -> list[Region]:
        found = []
        for x in (*args, *kwargs.values()):
            for part in x if isinstance(x, list | tuple) else (x,):
                region = self.region(part) if isinstance(part, Tensor) else None
                if region is not None:
                    found.append(region)
        return found

    def _note(self, func: Any, region: Region, result: Any) -> None:
        """Keep views of whole rows; note another use of a parameter."""
        parts = result if isinstance(result, list | tuple) else [result]
        for part in parts:
            if not (isinstance(part, Tensor) and part.requires_grad) or self.region(part):
                continue
            rows = self._rows(part)
            if rows is None:
                name = getattr(func, "__name__", str(func)) + in_module()
                self.others.setdefault(region.leaf, name)
            else:
                self._views[id(part)] = rows, part

    def _rows(self, view: Tensor) -> Region | None:
        """The rows that a view consists of, if it does."""
        number = self._storages.get(view.untyped_storage().data_ptr())
        if number is None or not view.dim():
            return None
        leaf = self._leaves[number]
        if view.shape[1:] != leaf.shape[1:] or view.stride() != leaf.stride():
            return None
        start = (view.storage_offset() - leaf.storage_offset()) // max(leaf.stride(0), 1)
        return Region(number, start, start + len(view))


def _linear(
    recorder: LayerRecorder, output: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> LayerCall:  # fmt: skip
    role = Role("linear", "kronecker", 1, weight.shape[0], weight.shape[1])
    places = recorder.region(weight), recorder.region(bias)
    return LayerCall(role, *places, input, output, _flat, _flat)


def _addmm(
    recorder: LayerRecorder, output: Tensor, input: Tensor, mat1: Tensor, mat2: Tensor, *,
    beta: float = 1, alpha: float = 1,
) -> LayerCall | None:  # fmt: skip
    """input + mat1 mat2, as the layers of GPT-2 compute it."""
    if beta != 1 or alpha != 1 or input.dim() != 1 or recorder.region(mat1) is not None:
        return None
    role = Role("addmm", "kronecker", 1, mat2.shape[1], mat2.shape[0], transposed=True)
    places = recorder.region(mat2), recorder.region(input)
    return LayerCall(role, *places, mat1, output, _flat, _flat)


def _matmul(
    recorder: LayerRecorder, output: Tensor, input: Tensor, other: Tensor
) -> LayerCall | None:
    """input other, with a matrix as a parameter."""
    if recorder.region(other) is None or recorder.region(input) is not None or other.dim() != 2:
        return None
    role = Role("matmul", "kronecker", 1, other.shape[1], other.shape[0], transposed=True)
    return LayerCall(role, recorder.region(other), None, input, output, _flat, _flat)


def _elementwise(name: str) -> Callable[..., LayerCall | None]:
    """Features times a parameter, as RMS norms of language models have it, or plus one."""

    def layer(
        recorder: LayerRecorder, output: Tensor, input: Any, other: Any, *, alpha: float = 1
    ) -> LayerCall | None:
        found = _features(recorder, output, input, other)
        if found is None or alpha != 1:
            return None
        parameter, x, rows = found
        shape, region = output.shape, recorder.region(parameter)
        weight, bias = (None, region) if name == "add" else (region, None)
        role = _diagonal(name, parameter)
        return LayerCall(role, weight, bias, x, output, lambda x: rows(x.expand(shape)), rows)

    return layer


def _diagonal(name: str, parameter: Tensor) -> Role:
    return Role(name, "diagonal", 1, parameter.numel(), parameter.numel())


def _features(
    recorder: LayerRecorder, output: Tensor, input: Any, other: Any
) -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor]] | None:
    """A parameter with a number for each feature, the other tensor, and the rows of one like the
    output; None where it has no such dimension, or more than one."""
    parameter, x = (input, other) if recorder.region(input) is not None else (other, input)
    if not isinstance(x, Tensor) or recorder.region(x) is not None:
        return None
    size = parameter.numel()
    wide = [d for d in range(-parameter.dim(), 0) if parameter.shape[d] > 1]
    if len(wide) > 1:
        return None
    if not wide:
        return parameter, x, lambda t: t.reshape(1, -1, 1)
    return parameter, x, lambda t: t.movedim(wide[0], -1).reshape(1, -1, size)


def _prelu(
    recorder: LayerRecorder, output: Tensor, input: Tensor, weight: Tensor
) -> LayerCall | None:
    """max(0, x) + weight min(0, x)."""
    rows = _channels if weight.numel() > 1 and input.dim() > 1 else lambda x: x.reshape(1, -1, 1)
    if recorder.region(weight) is None:
        return None
    places = recorder.region(weight), None
    role = _diagonal("prelu", weight)
    return LayerCall(role, *places, input, output, lambda x: rows(x.clamp(max=0)), rows)


def _flat(x: Tensor) -> Tensor:
    """The rows of the last dimension, [1, rows, features]."""
    return x.reshape(1, -1, x.shape[-1])


def _convolution(
    recorder: LayerRecorder, output: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None = None,
    stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1,
) -> LayerCall:  # fmt: skip
    spatial = weight.dim() - 2
    kernel = weight.shape[2:]
    stride, dilation = _each(stride, spatial), _each(dilation, spatial)
    if isinstance(padding, str):
        total = [
            d * (k - 1) if padding == "same" else 0 for d, k in zip(dilation, kernel, strict=True)
        ]
        pads = [(both // 2, both - both // 2) for both in total]
    else:
        pads = [(p, p) for p in _each(padding, spatial)]

    def patches(x: Tensor) -> Tensor:
        x = x if x.dim() == spatial + 2 else x.unsqueeze(0)
        x = F.pad(x, [p for pair in reversed(pads) for p in pair])
        for d in range(spatial):
            x = x.unfold(2 + d, dilation[d] * (kernel[d] - 1) + 1, stride[d])[..., :: dilation[d]]
        # [N, channels, positions..., kernel...] to [groups, N positions, channels of one kernel...]
        x = x.unflatten(1, (groups, -1)).movedim(1, 0)
        x = x.movedim(2, 2 + spatial)
        return x.reshape(groups, -1, weight.shape[1] * kernel.numel())

    def rows(gradient: Tensor) -> Tensor:
        g = gradient if gradient.dim() == spatial + 2 else gradient.unsqueeze(0)
        g = g.unflatten(1, (groups, -1)).movedim(1, 0).movedim(2, -1)
        return g.reshape(groups, -1, g.shape[-1])

    def weight_gradients(x: Tensor, gradient: Tensor) -> Tensor:
        x = F.pad(x, [p for pair in reversed(pads) for p in pair]).to(gradient)
        of = (conv1d_weight, conv2d_weight, conv3d_weight)[spatial - 1]

        def one(x: Tensor, g: Tensor) -> Tensor:
            return of(x[None], weight.shape, g[None], stride, 0, dilation, groups)

        found = torch.func.vmap(one)(x, gradient)
        return found.reshape(len(x), groups, -1, into)

    into = weight.shape[1] * kernel.numel()
    role = Role(f"conv{spatial}d", "kronecker", groups, weight.shape[0] // groups, into)
    places = recorder.region(weight), recorder.region(bias)
    direct = weight_gradients if input.dim() == spatial + 2 else None
    return LayerCall(role, *places, input, output, patches, rows, direct)


def _each(value: Any, count: int) -> tuple[int, ...]:
    value = (value,) if isinstance(value, int) else tuple(value)
    return value * count if len(value) == 1 else value


def _embedding(
    recorder: LayerRecorder, output: Tensor, input: Tensor, weight: Tensor,
    padding_idx: int | None = None, max_norm: float | None = None, norm_type: float = 2.0,
    scale_grad_by_freq: bool = False, sparse: bool = False,
) -> LayerCall | None:  # fmt: skip
    if scale_grad_by_freq:
        return None
    padding = -1 if padding_idx is None else padding_idx % weight.shape[0]

    def indices(x: Tensor) -> Tensor:
        x = x.reshape(1, -1, 1)
        return torch.where(x == padding, -1, x)  # whose gradient torch leaves out

    role = Role("embedding", "kronecker", 1, weight.shape[1], weight.shape[0], transposed=True)
    return LayerCall(role, recorder.region(weight), None, input, output, indices, _flat)


def _normalization(
    function: Callable[..., Tensor], rows_of: Callable[[dict[str, Any]], Callable[[Tensor], Tensor]]
) -> Callable[..., LayerCall]:
    """Of a layer that normalizes, scales by weight and shifts by bias.

    rows_of: how the rows of a tensor like the output follow from the other arguments.
    """
    known = signature(function)

    def layer(recorder: LayerRecorder, output: Tensor, *args: Any, **kwargs: Any) -> LayerCall:
        bound = known.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        x, weight, bias = given.pop("input"), given.pop("weight"), given.pop("bias", None)
        if given.get("training") or given.get("use_input_stats"):
            given.update(running_mean=None, running_var=None)  # they have moved already
        normalized, rows = partial(function, **given), rows_of(given)
        role = _diagonal(function.__name__, weight if bias is None else bias)
        places = recorder.region(weight), recorder.region(bias)
        return LayerCall(role, *places, x, output, lambda x: rows(normalized(x)), rows)

    return layer


def _last(given: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    """Of a norm over the last dimensions."""
    count = len(given["normalized_shape"])
    return lambda x: x.flatten(-count).reshape(1, -1, x.shape[-count:].numel())


def _channels(x: Tensor) -> Tensor:
    return _flat(x.movedim(1, -1))


LAYERS: dict[Any, Callable[..., LayerCall | None]] = {
    F.linear: _linear,
    torch.addmm: _addmm,
    torch.conv1d: _convolution, torch.conv2d: _convolution, torch.conv3d: _convolution,
    F.conv1d: _convolution, F.conv2d: _convolution, F.conv3d: _convolution,
    F.embedding: _embedding,
    **{norm: _normalization(norm, _last) for norm in (F.layer_norm, F.rms_norm)},
    **{
        norm: _normalization(norm, lambda given: _channels)
        for norm in (F.group_norm, F.batch_norm, F.instance_norm)
    },
    **dict.fromkeys((torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__), _matmul),
    **dict.fromkeys((torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__), _elementwise("mul")),
    **dict.fromkeys((torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__), _elementwise("add")),
    torch.prelu: _prelu,
}  # fmt: skip
_NAMES = frozenset(func.__name__ for func in LAYERS)
