"""Which layers use which parameters in a run of an unmodified model, with their inputs and outputs.

    s_r = W a_r + b        for rows r: the positions of each example, which share the weights

A `TorchFunctionMode` sees every torch call with a parameter, or some rows of one, as an argument.
Linear maps, convolutions, embeddings, normalizations and pointwise functions are recorded, in
whatever module they occur. Any other use of a parameter is noted, to be refused by name.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from itertools import pairwise, product
from math import prod
from string import ascii_lowercase, digits
from types import EllipsisType, FunctionType
from typing import Any, NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.grad import conv1d_weight, conv2d_weight, conv3d_weight

from hoglib._core.substrate.autograd import Vector
from hoglib._core.torch_api import torch_library
from hoglib._core.torch_api.dispatch import Args, Kw, Op, Types
from hoglib._core.torch_api.torch_internals import storage_id
from hoglib._core.torch_api.torch_modes import LayerMode
from hoglib.errors import UnsupportedError
from hoglib.stand_ins.mode import in_module, register_hook, without_override_check


class Region(NamedTuple):
    """Rows start to stop of a parameter."""

    leaf: int  # number of the parameter
    start: int  # first row
    stop: int  # row after the last one

    @staticmethod
    def of_all(number: int, leaf: Tensor) -> "Region":
        """All rows of a leaf; a scalar has one row."""
        return Region(number, 0, len(leaf) if leaf.dim() else 1)

    def contains(self, other: "Region | None") -> bool:
        """Whether the other region is a part of this one."""
        if other is None or other.leaf != self.leaf:
            return False
        return self.start <= other.start and other.stop <= self.stop


class Role(NamedTuple):
    """The use of the weight in a call; the weight is a stack of `groups` matrices [out, into].

    Attributes:
        name: The name of the function. An "embedding" has indices as inputs.
        matrix: "kronecker"; "diagonal" for layers that scale and shift each feature; "elementwise" for
            layers with a weight that is a pointwise function of the parameter.
        groups, out, into: The sizes of the weight.
        transposed: Whether each matrix is stored as [into / kernel, out, kernel].
        kernel: How many numbers a kernel of a transposed convolution has; else 1.
    """

    name: str
    matrix: str
    groups: int = 1
    out: int = 1
    into: int = 1
    transposed: bool = False
    kernel: int = 1

    def matrices(self, stored: Tensor) -> Tensor:
        """Stored weights [k, ...] as matrices [k, groups, out, into]."""
        if not self.transposed:
            return stored.reshape(-1, self.groups, self.out, self.into)
        parts = self.groups, self.into // self.kernel, self.out, self.kernel
        return stored.reshape(-1, *parts).transpose(2, 3).flatten(3)

    def stored(self, V: Tensor) -> Tensor:
        """Matrices as stored weights, [k, numbers]; inverse of `matrices`."""
        if self.transposed:
            V = V.unflatten(-1, (-1, self.kernel)).transpose(2, 3)
        return V.flatten(1)


@final
@dataclass(frozen=True, eq=False)
class LayerCall:
    """One call of a layer: its input, its parameters, and the place of its output in the graph."""

    role: Role  # the use of the weight
    weight: Region | None  # None if the call uses only a bias
    bias: Region | None  # None without a bias
    x: Tensor  # the input, detached
    version: int  # version counter of the input at the call
    edge: GradientEdge  # of the output; holding the output itself would keep its memory alive
    shape: torch.Size  # shape of the output
    device: torch.device  # device of the output
    rows_of_inputs: Callable[[Tensor], Tensor]  # x -> [groups, rows, into]
    rows_of_outputs: Callable[[Tensor], Tensor]  # a tensor like the output -> [groups, rows, out]
    # of a convolution: (x, g) -> per-example gradients, without patches
    gradients_by_weight: Callable[[Tensor, Tensor], Tensor] | None
    scale: float = 1.0  # d weight / d parameter, if equal for all numbers
    slope: Tensor | None = None  # d weight / d parameter [numbers], if "elementwise"
    consecutive: int = 0  # number of consecutive rows of one example; 0: all its rows

    @classmethod
    def of(
        cls,
        role: Role,
        weight: Region | None,
        bias: Region | None,
        x: Tensor,
        output: Tensor,
        rows_of_inputs: Callable[[Tensor], Tensor],
        rows_of_outputs: Callable[[Tensor], Tensor],
        gradients_by_weight: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> "LayerCall":
        """The record of a call that has just returned its output."""
        at = x.detach(), x._version, get_gradient_edge(output), output.shape, output.device
        functions = rows_of_inputs, rows_of_outputs, gradients_by_weight
        return cls(role, weight, bias, *at, *functions)

    def inputs(self) -> Tensor:
        """a_r, [groups, rows, into].

        An embedding has indices [1, rows, 1], a normalization layer its normalized inputs [1, rows,
        into].
        """
        self._check_unchanged()
        rows = self.rows_of_inputs(self.x)
        return rows if self.scale == 1 else rows * self.scale

    @property
    def rows(self) -> int:
        """The number of rows of the output."""
        return self.shape.numel() // (self.role.groups * self.role.out)

    def has_patches(self) -> bool:
        """Whether `inputs` copies the input into larger patches."""
        return self.gradients_by_weight is not None

    def weight_gradients(self, g: Tensor, start: int, stop: int) -> Tensor:
        """Per-example gradients of a convolution by its weight, without patches.

        g: the gradients by the output. Returns [n, groups, out, into], for the examples start to stop
        of the batch, which are the convolution's own batch dimension.
        """
        self._check_unchanged()
        assert self.gradients_by_weight is not None
        return self.gradients_by_weight(self.x[start:stop], g[start:stop]) * self.scale

    def by_example(self, rows: Tensor, examples: int) -> Tensor:
        """Rows [..., all, features] as [..., examples, positions, features]."""
        if rows.shape[-2] % (examples * max(self.consecutive, 1)):
            raise UnsupportedError(unlike_rows(self, examples))
        if not self.consecutive:
            return rows.unflatten(-2, (examples, -1))
        return (
            rows.unflatten(-2, (-1, examples, self.consecutive)).transpose(-4, -3).flatten(-3, -2)
        )

    def rounding(self, g: Tensor) -> Tensor:
        """An upper bound |g| |a| of the terms that a gradient by the parameters sums."""
        if self.role.matrix == "diagonal":
            a = self.inputs()
        elif self.x.is_floating_point() or self.x.is_complex():
            a = self.x
        else:
            a = self.x.new_ones((), dtype=g.dtype)
        size = torch.linalg.vector_norm(a.to(g.dtype))
        return torch.linalg.vector_norm(g) * (size + 1)

    def _check_unchanged(self) -> None:
        if self.x._version != self.version:
            raise UnsupportedError(
                f"model: expected the inputs of {self.role.name} to stay as they are, got an operation "
                "that changes them in place afterwards; use one that makes a new tensor."
            )


def unlike_rows(call: LayerCall, examples: int) -> str:
    """The error for a layer that gets only some of the examples."""
    return (
        f"model: expected layers with as many rows of each of the {examples} examples, got "
        f"{call.role.name} with outputs {tuple(call.shape)}, as of an expert that is given some of "
        "them. Leave its parameters out, or use approximation='expand' with eigenvalue_corrected=False."
    )


class Use(NamedTuple):
    """How a tensor follows from a leaf: as some of its rows, or as a pointwise function of
    some rows."""

    region: Region  # the rows of the leaf
    tensor: Tensor  # kept alive, so that no other tensor gets its id
    slope: Tensor | None = None  # d tensor / d rows, [numbers]; None is 1
    calls: Sequence[LayerCall] = ()  # uses as data; dropped once used as a weight
    transposed: bool = False  # whether the tensor is the rows' matrix, or matrices, transposed

    def shaped_slope(self) -> Tensor | None:
        """The slope in the shape of the tensor."""
        if self.slope is None or not self.transposed:
            return None if self.slope is None else self.slope.view(self.tensor.shape)
        return self.slope.view(self.tensor.mT.shape).mT

    def flat(self, slope: Tensor) -> Tensor:
        """A slope in the shape of the tensor, as [numbers] in the order of the leaf."""
        return (slope.mT if self.transposed else slope).reshape(-1)


@final
class LayerRecorder(LayerMode):
    """A mode that records the calls with leaves, or tensors made from leaves, as arguments."""

    def __init__(self, leaves: Vector, examples: int = 1) -> None:
        super().__init__()
        self.examples = examples  # above 1: rows for an embedding of all examples, see record()
        self.expanded = False  # whether there was such an embedding
        self.selects = False  # whether rows were chosen or sorted, maybe by values of the batch
        self.calls: list[LayerCall] = []  # in the order of the run
        self.other_uses: dict[int, str] = {}  # number of a leaf: the first other use of it
        # id of a tensor: how it follows from a leaf
        self._leaves = {id(x): Use(Region.of_all(i, x), x) for i, x in enumerate(leaves)}
        self._derived: dict[int, Use] = {}  # views and pointwise functions of leaves, by id

    def use(self, tensor: object) -> Use | None:
        """How a tensor follows from the leaves; None if it does not."""
        return self._leaves.get(id(tensor)) or self._derived.get(id(tensor))

    def region(self, tensor: object) -> Region | None:
        """The rows of a leaf that a tensor follows from; None for a transposed matrix."""
        use = self.use(tensor)
        return None if use is None or use.transposed else use.region

    def regions(self, weight: object, bias: object) -> tuple[Region | None, Region | None]:
        return self.region(weight), self.region(bias)

    def __torch_function__(self, func: Op, types: Types, args: Args = (), kwargs: Kw = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.register_hook:
            return register_hook(*args, **kwargs)
        self.selects = self.selects or _selects_rows(func, args)
        layer, operator = OPERATORS.get(func) or (LAYERS.get(func), None)
        pointwise = POINTWISE.get(func)
        if layer is None and pointwise is None and isinstance(func, FunctionType):
            # Python functions of torch, such as multi_head_attention_forward, hide the calls that
            # they make: run them inside the mode.
            inside = without_override_check(func, _NAMES)
            if inside is not None:
                with self:
                    return inside(*args, **kwargs)
        result = func(*args, **kwargs)
        if pointwise in CASTS:  # further arguments give a shape or a dtype
            args = args[:1]
        used = self._used(args, kwargs)
        if not used:
            return result
        calls: list[LayerCall] = []
        if pointwise is not None:
            calls = self._pointwise(func, pointwise, args, kwargs, result)
        elif layer is not None:
            if operator is not None:
                args, kwargs = (), _by_name(operator, args, kwargs)
            if layer is _embedding and self.examples > 1:
                args, result = self._of_each_example(args or (kwargs.pop("input"),), result)
            output = result[0] if isinstance(result, tuple) else result
            # Code under no_grad does not use a parameter.
            if output.requires_grad:
                found = layer(self, output, *args, **kwargs)
                for one in found if isinstance(found, list) else (found,):
                    calls += self._rescaled(one, used)
        known = {region for call in calls for region in (call.weight, call.bias)}
        if layer is _grouped_mm:  # an expert has some rows of the weight
            known |= {use.region for use in used if any(map(use.region.contains, known))}
        for use in used:  # a layer takes it as weight: discard its uses as data
            if use.region in known:
                self.calls = [call for call in self.calls if call not in use.calls]
        given = {use.region for use in used if not use.calls}
        # Every parameter in the call must be explained by a rule, or the call is another use.
        if id(result) in self._derived or (calls and given <= known):
            self.calls += calls
        else:
            self._record_view_or_use(func, used, result)
        return result

    def _pointwise(
        self, func: Any, name: str, args: Any, kwargs: Any, result: Tensor
    ) -> list[LayerCall]:
        """The calls that stand for a pointwise or copying function of parameters, by its derivative.

        If the result has the size of its one parameter and the other arguments are constants, it is
        also recorded as a function of the parameter, in case a layer takes it as a weight.
        """
        uses = {i: use for i, x in enumerate(args) if (use := self.use(x)) is not None}
        uses = {i: use for i, use in uses.items() if not use.calls} or uses
        others = [x for i, x in enumerate(args) if isinstance(x, Tensor) and i not in uses]
        calls: list[LayerCall] = []
        for i, use in uses.items() if result.requires_grad else ():
            shape = args[i].shape
            slope = use.shaped_slope()
            # Casts, copies and sums have slope 1.
            added = (name in ADDS and "alpha" not in kwargs) or (name in SHIFTS and i == 0)
            if name not in CASTS and not added:
                here = _slope(func, name, args, kwargs, i, result)
                slope = here if slope is None else here * slope
            alike, own = result.numel() == shape.numel(), []
            if (others or name in COPIES) and not (use.transposed or (use.calls and alike)):
                own = _broadcast_calls(use.region, shape, slope, result)
            if alike and len(uses) == 1 and not any(x.requires_grad for x in others):
                flat = None if slope is None else use.flat(slope.expand(result.shape))
                self._derived[id(result)] = use._replace(
                    tensor=result, slope=flat, calls=[*use.calls, *own]
                )
            calls += own
        return calls

    def _rescaled(self, call: LayerCall | None, used: Sequence[Use]) -> list[LayerCall]:
        """The call of a layer with a pointwise function of a parameter as its weight; none without a
        rule for that."""
        if call is None:
            return []
        uses = {use.region: use for use in used if use.region in (call.weight, call.bias)}
        slope = uses[call.weight].slope if call.weight in uses else None
        differs = slope is not None and not bool((slope == slope[0]).all())
        known = slope is None or call.role.name != "embedding"
        known = known and (call.role.matrix == "kronecker" or not differs)
        if differs and known:
            call = replace(call, slope=slope, role=call.role._replace(matrix="elementwise"))
        elif slope is not None:
            call = replace(call, scale=float(slope[0]))
        return [call] if known and not (call.bias and uses[call.bias].slope is not None) else []

    def _of_each_example(self, args: Any, result: Tensor) -> tuple[Any, Tensor]:
        """Give an embedding of indices [1, T] or [T], such as positions, one row of indices and
        outputs for each example: the gradients by these rows are then per-example gradients."""
        indices, *rest = args
        if indices.dim() == 1 and len(indices) != self.examples:
            indices, result = indices.unsqueeze(0), result.unsqueeze(0)
        if indices.dim() < 2 or len(indices) != 1:
            return args, result
        self.expanded = True
        each = (self.examples, *indices.shape[1:])
        return (indices.expand(each), *rest), result.expand(*each, result.shape[-1])

    def _used(self, args: Any, kwargs: Any) -> list[Use]:
        """The uses of all tensors among the arguments, lists included."""
        # inlined `use`: every torch call comes through here
        leaves, derived = self._leaves, self._derived
        found = []
        for x in (*args, *kwargs.values()):
            for part in x if isinstance(x, list | tuple) else (x,):
                use = leaves.get(id(part)) or derived.get(id(part))
                if use is None and self.propagates and isinstance(part, Tensor):
                    use = self._view_by_torch(part)
                if use:
                    found.append(use)
        return found

    def _view_by_torch(self, part: Tensor) -> Use | None:
        """The use of a view that torch itself made of a leaf, such as the transposed weight of a linear
        layer, which only the operations below torch's functions have."""
        whole = self._leaves.get(id(part._base)) if part._is_view() else None
        view = _view_of_rows(whole, part) if whole and part.requires_grad else None
        if view is not None:
            self._derived[id(part)] = view
        return view

    def _record_view_or_use(self, func: object, used: Sequence[Use], result: object) -> None:
        """Keep views of whole rows of a leaf; record other uses by name."""
        parts = result if isinstance(result, list | tuple) else [result]
        for use, part in product(used, parts):
            if not (isinstance(part, Tensor) and part.requires_grad) or self.use(part):
                continue
            view = _view_of_rows(use, part)
            if view is not None:
                self._derived[id(part)] = view
            elif not use.calls:
                name = getattr(func, "__name__", str(func)) + in_module()
                self.other_uses.setdefault(use.region.leaf, name)


ROW_SELECTING = frozenset({
    "argsort", "flip", "gather", "index", "index_add", "index_copy", "index_put", "index_select",
    "masked_scatter", "masked_select", "nonzero", "repeat_interleave", "roll", "scatter",
    "scatter_add", "scatter_reduce", "sort", "take", "take_along_dim", "topk", "unique",
})  # fmt: skip
PLAIN_INDICES = (int, slice, EllipsisType)  # tensors, arrays, lists select rows; a bool is an int


def _selects_rows(func: object, args: Any) -> bool:
    """Whether a torch call can reorder rows, or select rows."""
    name = getattr(func, "__name__", "").partition(".")[0]  # an operator without its overload
    if name in ("__getitem__", "__setitem__"):
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return not all(part is None or isinstance(part, PLAIN_INDICES) for part in index)
    return name.rstrip("_") in ROW_SELECTING


def _view_of_rows(use: Use, part: Tensor) -> Use | None:
    """The use of a view that consists of whole rows, or is their matrix (or matrices) transposed; else
    None."""
    (leaf, first, stop), whole, slope, calls, transposed = use
    if _memory(part) == _memory(whole):
        return use._replace(tensor=part)
    if whole.dim() in (2, 3) and _memory(part) == _memory(whole.mT):
        return use._replace(tensor=part, transposed=not transposed)
    if transposed:
        return None
    row, at = whole.numel() // max(stop - first, 1), part.storage_offset() - whole.storage_offset()
    same = storage_id(part) == storage_id(whole)
    flat = part.is_contiguous() and whole.is_contiguous()
    ordered = same and (flat or part.stride() == whole.stride())
    if not (ordered and row and part.numel() % row == 0 == at % row):
        return None
    first, count = first + at // row, part.numel() // row
    slope = None if slope is None else slope[at : at + part.numel()]
    return Use(Region(leaf, first, first + count), part, slope, calls)


def _memory(x: Tensor) -> Any:
    return storage_id(x), x.storage_offset(), x.shape, x.stride()


def _slope(func: Any, name: str, args: Any, kwargs: Any, i: int, result: Tensor) -> Any:
    """d result / d argument i, element by element."""
    # Most are products. Their slope is the second factor, without a backward pass.
    if name in ("mul", "rmul") and isinstance(args[1 - i], Tensor):
        return args[1 - i].detach()
    given = [x.detach() if isinstance(x, Tensor) else x for x in args]
    given[i] = given[i].expand(result.shape).requires_grad_()
    with torch.enable_grad():
        y = func(*given, **kwargs)
    return torch.autograd.grad(y, given[i], torch.ones_like(y))[0]


def _broadcast_calls(
    region: Region, shape: torch.Size, slope: Tensor | None, output: Tensor
) -> list[LayerCall]:
    """The call of a parameter broadcast or copied to the output, with derivative `slope`.

    A parameter with one dimension has a number for each feature. With more, its last dimension is the
    features and the others are positions: an embedding called with all of its indices.
    """
    full = (*(1,) * (output.dim() - len(shape)), *shape)
    sizes = [(of // own, own) for of, own in zip(output.shape, full, strict=True)]
    wide = [own for own in full if own > 1]
    features = wide[-1] if wide else 1
    order = [*range(0, 2 * len(sizes), 2), *range(1, 2 * len(sizes), 2)]

    def rows(t: Tensor) -> Tensor:
        t = t.reshape([n for pair in sizes for n in pair]).permute(order)
        return t.reshape(1, -1, features)

    if len(wide) < 2:
        role = Role("add" if slope is None else "mul", "diagonal", 1, features, features)
        weight, bias = (None, region) if slope is None else (region, None)
        x = output.new_ones(()) if slope is None else slope
        shape = output.shape
        return [LayerCall.of(role, weight, bias, x, output, lambda x: rows(x.expand(shape)), rows)]
    positions = shape.numel() // features
    at = torch.arange(positions, device=output.device)
    role = Role("embedding", "kronecker", 1, features, positions, transposed=True)
    count = output.numel() // shape.numel()
    # the index of every position, for each example
    indices = lambda x: x.repeat(count).view(1, -1, 1)  # noqa: E731
    scaled = rows if slope is None else lambda t: rows(t * slope)
    return [LayerCall.of(role, region, None, at, output, indices, scaled)]


def _flatten_rows(x: Tensor) -> Tensor:
    """A tensor as [1, rows, features], features being its last dimension."""
    return x.reshape(1, -1, x.shape[-1])


def _product(
    tape: LayerRecorder,
    output: Tensor,
    operands: Sequence[Tensor],
    labels: Sequence[str],
    name: str,
    bias: Tensor | None = None,
) -> LayerCall | None:
    """The product of an input and a parameter, by the einsum labels of both and of the output:

        y[g, r, o] = sum_i x[g, r, i] w[g, o, i]        groups g, rows r

    None if the labels do not form such a product, or the parameter is stored in another order.
    """
    uses = [tape.use(operand) for operand in operands]
    own = [i for i, use in enumerate(uses) if use and not use.calls]
    w = own[0] if own else 1
    use, x = uses[w], operands[1 - w]
    is_data = use is not None and use.calls and operands[w].dim() != 2  # as learned queries
    if len(own) > 1 or is_data or not (use or tape.region(bias)):
        return None
    stored, of_x, of_y = labels[w], labels[1 - w], labels[2]
    stored = stored[:-2] + stored[:-3:-1] if use and use.transposed else stored
    groups = "".join([i for i in stored if i in of_x and i in of_y])
    into = "".join([i for i in stored if i in of_x and i not in of_y])
    out = "".join([i for i in stored if i not in of_x])
    rows = "".join([i for i in of_x if i not in stored])
    transposed = stored == groups + into + out != groups + out + into
    alike = sorted(of_y) == sorted(groups + rows + out) and sorted(of_x) == sorted(
        groups + rows + into
    )
    sizes = dict(zip(labels[w], operands[w].shape, strict=True))
    broadcast = any(sizes.get(i, n) != n for i, n in zip(of_x, x.shape, strict=True))
    if not (alike and (transposed or stored == groups + out + into)) or broadcast:
        return None

    def as_rows(of: str, features: str) -> Callable[[Tensor], Tensor]:
        order = [of.index(i) for i in groups + rows + features]
        shape = prod(map(sizes.__getitem__, groups)), -1, prod(map(sizes.__getitem__, features))
        return lambda t: t.permute(order).reshape(shape)

    counts = [prod(map(sizes.__getitem__, part)) for part in (groups, out, into)]
    role = Role(name, "kronecker", counts[0], counts[1], counts[2], transposed)
    both = as_rows(of_x, into), as_rows(of_y, out)
    region = use.region if use else None
    return LayerCall.of(role, region, tape.region(bias), x, output, *both)


def _linear(
    tape: LayerRecorder, output: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> LayerCall | None:
    rows = ascii_lowercase[: input.dim() - 1]
    out = "O" * (weight.dim() - 1)
    return _product(
        tape, output, (input, weight), (rows + "I", out + "I", rows + out), "linear", bias
    )


def _addmm(
    tape: LayerRecorder,
    output: Tensor,
    input: Tensor,
    mat1: Tensor,
    mat2: Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> LayerCall | None:
    """input + mat1 mat2, as GPT-2's layers compute it."""
    if beta != 1 or alpha != 1 or input.dim() != 1 or tape.use(mat1) is not None:
        return None
    return _product(tape, output, (mat1, mat2), ("rI", "IO", "rO"), "addmm", input)


def _matmul(
    tape: LayerRecorder, output: Tensor, input: Tensor, *given: Tensor, **named: Tensor
) -> LayerCall | None:
    """input other, by the rules of `torch.matmul`; also mm, mv and bmm."""
    (other,) = (*given, *named.values())
    batch = ascii_lowercase[: max(input.dim(), other.dim(), 2) - 2]
    left, right = ("R" * (input.dim() > 1), "C" * (other.dim() > 1))
    labels = [
        (batch[len(batch) - max(x.dim() - 2, 0) :]) + own
        for x, own in ((input, left + "I"), (other, "I" + right))
    ]
    return _product(tape, output, (input, other), (*labels, batch + left + right), "matmul")


def _grouped_mm(
    tape: LayerRecorder,
    output: Tensor,
    input: Tensor,
    mat2: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
) -> list[LayerCall] | LayerCall | None:
    """The rows of input from offs[e - 1] to offs[e], times the matrix of expert e: a layer for each
    expert, as fused experts compute it."""
    if offs is None:
        return _matmul(tape, output, input, mat2)
    use = tape.use(mat2)
    if use is None or use.slope is not None or use.calls or bias is not None or tape.use(input):
        return None
    if (input.dim(), mat2.dim()) != (2, 3):
        return None
    leaf, first, _ = use.region
    role = Role("grouped_mm", "kronecker", 1, mat2.shape[2], mat2.shape[1], not use.transposed)

    def expert(e: int, start: int, stop: int) -> LayerCall:
        rows = lambda x: x[None, start:stop]  # noqa: E731
        region = Region(leaf, first + e, first + e + 1)
        return LayerCall.of(role, region, None, input, output, rows, rows)

    ends = [0, *offs.tolist()]
    return [expert(e, *rows) for e, rows in enumerate(pairwise(ends))]


def _einsum(
    tape: LayerRecorder, output: Tensor, equation: object, *operands: Any
) -> LayerCall | None:
    """A sum of products of two operands. The dimensions of an ellipsis are labelled by digits."""
    operands = tuple(operands[0]) if isinstance(operands[0], list | tuple) else operands
    if not isinstance(equation, str) or len(operands) != 2:
        return None
    given, _, result = equation.replace(" ", "").partition("->")
    labels = [
        part.replace("...", digits[10 - (x.dim() - len(part) + 3) :] if "..." in part else "")
        for part, x in zip(given.split(","), operands, strict=True)
    ]
    if "->" not in equation:
        counts = Counter("".join(labels))
        result = "..." + "".join(sorted(i for i, n in counts.items() if n == 1 and i.isalpha()))
    dots = max(sum(map(str.isdigit, part)) for part in labels)
    labels.append(result.replace("...", digits[10 - dots :]))
    # A repeated label takes a diagonal.
    if any(len(set(part)) < len(part) for part in labels):
        return None
    return _product(tape, output, operands, labels, "einsum")


def _convolution(
    tape: LayerRecorder,
    output: Tensor,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: object = 1,
    padding: object = 0,
    dilation: object = 1,
    groups: int = 1,
) -> LayerCall:
    spatial, kernel = weight.dim() - 2, weight.shape[2:]
    stride, dilation = _each(stride, spatial), _each(dilation, spatial)
    if isinstance(padding, str):
        same = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        total = same if padding == "same" else [0] * spatial
        pads = [(both // 2, both - both // 2) for both in total]
    else:
        pads = [(p, p) for p in _each(padding, spatial)]

    patches = lambda x: _patches(x, kernel, stride, dilation, pads, groups)  # noqa: E731

    def weight_gradients(x: Tensor, gradient: Tensor) -> Tensor:
        x = F.pad(x, [p for pair in reversed(pads) for p in pair]).to(gradient)
        of = (conv1d_weight, conv2d_weight, conv3d_weight)[spatial - 1]

        def one(x: Tensor, g: Tensor) -> Tensor:
            # torch sums this gradient over the batch: vmap over batches of one example.
            return of(x[None], weight.shape, g[None], stride, 0, dilation, groups)

        return torch.func.vmap(one)(x, gradient).reshape(len(x), groups, -1, into)

    into = weight.shape[1] * kernel.numel()
    role = Role(f"conv{spatial}d", "kronecker", groups, weight.shape[0] // groups, into)
    # An input without a batch dimension has no examples to take apart.
    direct = weight_gradients if input.dim() == spatial + 2 else None
    rows = partial(_channel_rows, spatial=spatial, groups=groups)
    return LayerCall.of(role, *tape.regions(weight, bias), input, output, patches, rows, direct)


def _conv_transpose(
    tape: LayerRecorder,
    output: Tensor,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: object = 1,
    padding: object = 0,
    output_padding: object = 0,
    groups: int = 1,
    dilation: object = 1,
) -> LayerCall:
    """A transposed convolution: the convolution of inputs spread out by zeros with the mirrored
    kernel."""
    dims, kernel = weight.dim() - 2, weight.shape[2:]
    stride, dilation = _each(stride, dims), _each(dilation, dims)
    more = zip(_each(padding, dims), _each(output_padding, dims), dilation, kernel, strict=True)
    pads = [(d * (k - 1) - p, d * (k - 1) - p + o) for p, o, d, k in more]

    ones = (1,) * dims
    patches = lambda x: _patches(x, kernel, ones, dilation, pads, groups, stride)  # noqa: E731
    into = weight.shape[0] // groups * kernel.numel()
    name = f"conv_transpose{dims}d"
    role = Role(name, "kronecker", groups, weight.shape[1], into, True, kernel.numel())
    rows = partial(_channel_rows, spatial=dims, groups=groups)
    return LayerCall.of(role, *tape.regions(weight, bias), input, output, patches, rows)


def _any_convolution(
    tape: LayerRecorder,
    output: Tensor,
    *,
    transposed: bool,
    output_padding: object,
    **given: Any,
) -> LayerCall:
    """aten.convolution: exported programs decompose both kinds to it."""
    if transposed:
        return _conv_transpose(tape, output, output_padding=output_padding, **given)
    return _convolution(tape, output, **given)


def _patches(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    pads: Any,
    groups: int,
    gaps: Sequence[int] = (),
) -> Tensor:
    """The patch of each position, [groups, N positions, channels x kernel].

    gaps: of a transposed convolution, the distances between inputs, with zeros in the gaps.
    """
    spatial = len(kernel)
    x = x if x.dim() == spatial + 2 else x.unsqueeze(0)
    if gaps:
        given, sizes = (x, [(n - 1) * s + 1 for n, s in zip(x.shape[2:], gaps, strict=True)])
        x = x.new_zeros(*x.shape[:2], *sizes)
        x[(slice(None), slice(None), *(slice(None, None, s) for s in gaps))] = given
    x = F.pad(x, [p for pair in reversed(pads) for p in pair])
    for d, k in enumerate(kernel):
        x = x.unfold(2 + d, dilation[d] * (k - 1) + 1, stride[d])[..., :: dilation[d]]
    x = x.flip([*range(-spatial, 0)]) if gaps else x
    x = x.unflatten(1, (groups, -1)).movedim(1, 0).movedim(2, 2 + spatial)
    return x.reshape(groups, x.shape[1 : 2 + spatial].numel(), -1)


def _channel_rows(gradient: Tensor, spatial: int, groups: int) -> Tensor:
    """The rows [groups, N positions, channels] of a tensor like a convolution's output."""
    g = gradient if gradient.dim() == spatial + 2 else gradient.unsqueeze(0)
    g = g.unflatten(1, (groups, -1)).movedim(1, 0).movedim(2, -1)
    return g.reshape(groups, -1, g.shape[-1])


def _each(value: Any, count: int) -> tuple[int, ...]:
    value = (value,) if isinstance(value, int) else tuple(value)
    return value * count if len(value) == 1 else value


def _embedding(
    tape: LayerRecorder,
    output: Tensor,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> LayerCall | None:
    if scale_grad_by_freq:
        return None
    padding = -1 if padding_idx is None else padding_idx % weight.shape[0]

    def indices(x: Tensor) -> Tensor:
        x = x.reshape(1, -1, 1)
        return torch.where(x == padding, -1, x)  # torch gives the padding row no gradient

    role = Role("embedding", "kronecker", 1, weight.shape[1], weight.shape[0], transposed=True)
    return LayerCall.of(role, tape.region(weight), None, input, output, indices, _flatten_rows)


def _diagonal(name: str, parameter: Tensor) -> Role:
    return Role(name, "diagonal", 1, parameter.numel(), parameter.numel())


def _prelu(tape: LayerRecorder, output: Tensor, input: Tensor, weight: Tensor) -> LayerCall | None:
    """max(0, x) + weight min(0, x)."""
    rows = _channels if weight.numel() > 1 and input.dim() > 1 else lambda x: x.reshape(1, -1, 1)
    region, role = tape.region(weight), _diagonal("prelu", weight)
    if region is None:
        return None
    return LayerCall.of(role, region, None, input, output, lambda x: rows(x.clamp(max=0)), rows)


def _normalization(
    function: Callable[..., Tensor], rows_of: Callable[[dict[str, Any]], Callable[[Tensor], Tensor]]
) -> Callable[..., LayerCall | None]:
    """The recorder of a layer that normalizes, then scales by weight and shifts by bias.

    rows_of: takes the further arguments to the function that gives the rows of a tensor like the
    output.
    """
    known = signature(function)

    def layer(tape: LayerRecorder, output: Tensor, *args: Any, **kwargs: Any) -> Any:
        bound = known.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        x, weight, bias = given.pop("input"), given.pop("weight"), given.pop("bias", None)
        if weight is None and bias is None:
            return None
        if given.get("training") or given.get("use_input_stats"):
            given.update(running_mean=None, running_var=None)  # else they would be updated again
        normalized, rows = partial(function, **given), rows_of(given)
        role = _diagonal(function.__name__, weight if bias is None else bias)
        places = tape.regions(weight, bias)
        return LayerCall.of(role, *places, x, output, lambda x: rows(normalized(x)), rows)

    return layer


def _last_dimensions(given: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    """The rows of a norm over the last dimensions."""
    count = len(given["normalized_shape"])
    return lambda x: x.flatten(-count).reshape(1, -1, x.shape[-count:].numel())


def _channels(x: Tensor) -> Tensor:
    return _flatten_rows(x.movedim(1, -1))


Layer = Callable[..., LayerCall | list[LayerCall] | None]
_last = {norm: _normalization(norm, _last_dimensions) for norm in (F.layer_norm, F.rms_norm)}
_by_channel = {
    norm: _normalization(norm, lambda given: _channels)
    for norm in (F.group_norm, F.batch_norm, F.instance_norm)
}
LAYERS: dict[Any, Layer] = {
    F.linear: _linear,
    torch.addmm: _addmm,
    torch.conv1d: _convolution, torch.conv2d: _convolution, torch.conv3d: _convolution,
    F.conv1d: _convolution, F.conv2d: _convolution, F.conv3d: _convolution,
    torch.conv_transpose1d: _conv_transpose, torch.conv_transpose2d: _conv_transpose,
    torch.conv_transpose3d: _conv_transpose,
    F.embedding: _embedding,
    **_last, **_by_channel,
    **{
        getattr(owner, name): _matmul
        for name in ("matmul", "mm", "mv", "bmm") for owner in (torch, Tensor)
    },
    Tensor.__matmul__: _matmul,
    torch.einsum: _einsum,
    torch.prelu: _prelu,
}  # fmt: skip
_NAMES = frozenset({"add", "mul", *(func.__name__ for func in LAYERS)})
# The operators that exported programs call. Their arguments are named by their schemas.
_BY_OPERATOR: dict[str, Layer] = {
    **{func.__name__: layer for func, layer in LAYERS.items() if func is not torch.einsum},
    "native_layer_norm": _last[F.layer_norm],
    "convolution": _any_convolution,
    "_grouped_mm": _grouped_mm,
}
OPERATORS = {
    called: (layer, operator)
    for name, layer in _BY_OPERATOR.items()
    for called, operator in torch_library.callables(name)
    if called not in LAYERS
}
_RENAMED = {"self": "input", "indices": "input"}
_DROPPED = {"cudnn_enable", "cudnn_enabled", "out_dtype"}


def _by_name(operator: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments of an operator, by the names that the function of its layer has for them."""
    schema = torch_library.overload_of(operator, args, kwargs)._schema
    named = dict(zip((a.name for a in schema.arguments), args, strict=False)) | kwargs
    if named.get("padding_idx") == -1:  # -1 is the operator's None
        named["padding_idx"] = None
    return {_RENAMED.get(name, name): x for name, x in named.items() if name not in _DROPPED}


COPIES = frozenset({"broadcast_to", "expand", "expand_as", "repeat", "tile"})
CASTS = COPIES | {
    "_to_copy", "bfloat16", "clone", "contiguous", "double", "float", "half", "to", "type_as",
}  # fmt: skip
ADDS = {"add", "add_", "iadd", "radd"}  # slope 1, like copies and casts
SHIFTS = {"addcmul", "addcdiv"}  # slope 1 for the first argument
_SLOPED = {
    "abs", "addcdiv", "addcmul", "clamp", "cos", "div", "exp", "expm1", "lerp", "log", "log1p", "mul",
    "neg", "pow", "reciprocal", "relu", "rmul", "rpow", "rsqrt", "rsub", "rtruediv", "sigmoid", "sin",
    "softplus", "sqrt", "square", "sub", "tanh", "true_divide", "truediv", "where",
}  # fmt: skip
POINTWISE = {
    func: name
    for name in CASTS | ADDS | _SLOPED
    for func in (
        *(
            getattr(owner, form)
            for owner in (torch, Tensor, F)
            for form in (name, f"__{name}__")
            if hasattr(owner, form)
        ),
        *dict(torch_library.callables(name)),
    )
}
