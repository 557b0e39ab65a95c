"""Code that torch cannot see into, NumPy, SciPy, C++, as an op with hand-given derivatives.

`_cube.py` is this file written out for one function of one input, to be read first. Here the same
chain of Functions serves any number of inputs and as many orders as there are derivatives:

    D_0 = f        D_k = all partial derivatives of order k        d D_k[m] / dx_i = D_{k+1}[m, i]

so that the backward of D_k is a sum of products with outputs of D_{k+1}, itself a Function. All of
them call one operator of torch.library, `hoglib::external`, which tracers record instead of running:
NumPy under a tracer computes with the example inputs, and its numbers become constants of the graph.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hoglib._core import torch_internals, validation
from hoglib.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    NoSecondDerivative,
    UnsupportedError,
)
from hoglib.ops._define import Saved, conj, make_function

Array = Any  # a numpy.ndarray; hoglib does not import NumPy
Index = tuple[int, ...]


def external(
    f: Callable[..., Array],
    df: Callable[..., Any],
    d2f: Callable[..., Any] | None = None,
    *higher: Callable[..., Any],
) -> Callable[..., Tensor]:
    r"""An elementwise op from a NumPy, SciPy or C++ function and its derivatives.

        y = f(x_1, ..., x_n)        df = (dy/dx_1, ..., dy/dx_n)        d2f[i][j] = d2y / dx_i dx_j

    f, df, d2f, ... get one NumPy array an input, all of one shape, and give arrays of that shape (or
    what broadcasts to it). With one input every one of them gives an array; with several, df gives a
    tuple, d2f a tuple of tuples, and `higher` (d3f, ...) one more level each. None instead of an array
    says that a derivative is not known; whoever needs it gets an error.

    Returns op(*inputs): tensors of floating-point or complex dtype (complex: holomorphic f), or
    numbers, broadcast together; y has their shape, their common dtype and their device. float16 and
    bfloat16 are computed in float32; inputs on an accelerator go to the host and come back.

    Orders and modes: as many orders as derivatives were given, in reverse mode, forward mode, either
    over the other, and under vmap. make_fx and torch.compile record a call of f, not its values
    (torch.compile breaks the graph where the op stands inside a torch.func transform; make_fx does
    not). What they record names f by a number, so f is kept for the life of the process: make an op
    once. An input that requires grad is differentiated by even if only another's gradient is asked
    for, as in every custom Function.

    Raises TypeError for integer tensors; ValueError where f or a derivative gives another shape,
    another number of arrays, or complex numbers for real ones; RuntimeError for an order beyond the
    derivatives given, naming the one to add; NotImplementedError under two levels of forward mode,
    where torch differentiates custom Functions to zero.
    Example: `external(np.sin, np.cos, lambda x: -np.sin(x))`.
    """
    derivatives = [f, df] if d2f is None else [f, df, d2f, *higher]
    if d2f is None and higher:
        raise ArgumentValueError("d2f: expected a function, as d3f was given, got None.")
    for order, function in enumerate(derivatives):
        validation.function(_name(order), function)
    chain = _Chain(derivatives)

    def op(*inputs: Tensor | float) -> Tensor:
        return chain.evaluate([()], *_prepared(chain.name, inputs))[0]

    op.__name__ = op.__qualname__ = chain.name
    op.__doc__ = f.__doc__
    return op


class _Chain:
    """f and its derivatives, f first."""

    def __init__(self, derivatives: list[Callable[..., Any]]) -> None:
        self.derivatives = derivatives
        self.name = getattr(derivatives[0], "__name__", type(derivatives[0]).__name__)
        self.number = len(_CHAINS)
        _CHAINS.append(self)
        self._functions: dict[int, type[torch.autograd.Function]] = {}

    def evaluate(self, which: Sequence[Index], *inputs: Tensor) -> tuple[Tensor, ...]:
        """The partial derivatives `which`, all of one order, differentiable again."""
        if torch.compiler.is_compiling():
            # The compiler refuses a Function that has a jvp, and torch.func an operator's autograd.
            if not torch_internals.transforms_active():
                return tuple(_external(list(inputs), self.number, _encoded(which)))
            torch._dynamo.graph_break()
        if torch_internals.transforms_active() and torch_internals.forward_levels() > 1:
            raise UnsupportedError(
                f"external({self.name}): expected at most one level of forward mode, got jvp inside "
                f"jvp (or jacfwd inside jacfwd), where torch differentiates a custom Function to "
                f"zero. Use torch.func.grad or jacrev for one of the two, for instance "
                f"torch.func.hessian."
            )
        if len(inputs) not in self._functions:
            self._functions[len(inputs)] = _make_chain_link(self, len(inputs))
        outputs: tuple[Tensor, ...] = self._functions[len(inputs)].apply(tuple(which), *inputs)
        return outputs

    def beyond(self, order: int) -> None:
        """Raise if the derivatives of this order were not given."""
        if order >= len(self.derivatives):
            given = ", ".join(_name(k) for k in range(len(self.derivatives)))
            raise NoSecondDerivative(
                f"external({self.name}): expected a derivative of order {order}, which "
                f"differentiating {order} times takes, got {given} alone; add {_name(order)}, as in "
                f"`external({given}, {_name(order)})`."
            )

    def label(self, index: Index) -> str:
        return f"{_name(len(index))}{''.join(f'[{i}]' for i in index)}"


def _make_chain_link(chain: _Chain, count: int) -> type[torch.autograd.Function]:
    """(which, x_1, ..., x_n) -> the derivatives `which`, whose derivatives are the next order's."""

    def forward(which: tuple[Index, ...], *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(_external(list(inputs), chain.number, _encoded(which)))

    def backward(saved: Saved, *grads: Tensor | None) -> list[Tensor | None]:
        which, *inputs = saved.inputs
        wanted = [i for i in range(count) if saved.needed[i + 1]]
        arrived = [(index, g) for index, g in zip(which, grads, strict=True) if g is not None]
        result: list[Tensor | None] = [None] * (count + 1)
        chain.beyond(len(which[0]) + 1)
        slopes = iter(
            chain.evaluate([(*index, i) for i in wanted for index, _ in arrived], *inputs)
        )
        for i in wanted:
            result[i + 1] = _sum(g * conj(next(slopes)) for _, g in arrived)
        return result

    def jvp(saved: Saved, _: None, *tangents: Tensor | None) -> tuple[Tensor, ...]:
        which, *inputs = saved.inputs
        moving = [(i, t) for i, t in enumerate(tangents) if t is not None]
        chain.beyond(len(which[0]) + 1)
        slopes = iter(chain.evaluate([(*index, i) for index in which for i, _ in moving], *inputs))
        return tuple(_sum(t * next(slopes) for _, t in moving) for _ in which)

    def vmap(
        function: type[torch.autograd.Function],
        batch_size: int,
        in_dims: tuple[int | None, ...],
        which: tuple[Index, ...],
        *inputs: Tensor,
    ) -> tuple[Any, Any]:
        outputs = function.apply(which, *_batched(batch_size, in_dims[1:], inputs))
        return outputs, (0,) * len(outputs)

    return make_function(
        f"External_{chain.name}",
        count + 1,
        forward=forward,
        backward=backward,
        jvp=jvp,
        vmap=vmap,
        keep_outputs=(),
    )


_CHAINS: list[_Chain] = []


@torch.library.custom_op("hoglib::external", mutates_args=())
def _external(inputs: list[Tensor], chain: int, which: str) -> list[Tensor]:
    """Derivatives of one order: "" for f, "0" for df[0], "0,1 1,1" for d2f[0][1] and d2f[1][1]."""
    rule, indices, like = _CHAINS[chain], _decoded(which), inputs[0]
    if like.numel() == 0:
        return [like.new_empty(like.shape) for _ in indices]
    values = rule.derivatives[len(indices[0])](*(_to_array(x) for x in inputs))
    arrays = [_component(rule, values, index, len(inputs)) for index in indices]
    return [_to_tensor(rule, *pair, like) for pair in zip(indices, arrays, strict=True)]


@_external.register_fake
def _(inputs: list[Tensor], chain: int, which: str) -> list[Tensor]:
    return [inputs[0].new_empty(inputs[0].shape) for _ in _decoded(which)]


@_external.register_vmap
def _(info: Any, in_dims: Any, inputs: list[Tensor], chain: int, which: str) -> Any:
    outputs = _external(_batched(info.batch_size, in_dims[0], inputs), chain, which)
    return outputs, [0] * len(outputs)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    tensors, ctx.chain, ctx.which = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grads: list[Tensor]) -> Any:
    """The derivative where no Function is, under torch.compile."""
    inputs, indices = list(ctx.saved_tensors), _decoded(ctx.which)
    _CHAINS[ctx.chain].beyond(len(indices[0]) + 1)
    slots = [(*index, i) for i in range(len(inputs)) for index in indices]
    slopes = iter(_external(inputs, ctx.chain, _encoded(slots)))
    return [_sum(g * conj(next(slopes)) for g in grads) for _ in inputs], None, None


_external.register_autograd(_backward, setup_context=_setup_context)


def _encoded(which: Sequence[Index]) -> str:
    return " ".join(",".join(map(str, index)) for index in which)


def _decoded(which: str) -> list[Index]:
    return [tuple(int(i) for i in index.split(",") if i) for index in which.split(" ")]


def _component(chain: _Chain, values: Any, index: Index, count: int) -> Array:
    """values[i][j]... with the checks that what user code returned calls for."""
    part = values
    for depth, i in enumerate(index if count > 1 else ()):
        if not isinstance(part, tuple | list) or len(part) != count:
            where = _name(len(index)) + "".join(f"[{j}]" for j in index[:depth])
            got = len(part) if isinstance(part, tuple | list) else validation.describe(part)
            raise ArgumentValueError(
                f"external({chain.name}): expected {where} to be a tuple of {count} arrays, one for "
                f"each input, got {got}."
            )
        part = part[i]
    if part is None:
        raise NoSecondDerivative(
            f"external({chain.name}): expected a known derivative {chain.label(index)}, got None; "
            f"give it, or detach the input that does not need it."
        )
    return part


def _to_array(x: Tensor) -> Array:
    """A copy of its own, so that code which works in place, or keeps it, harms nobody."""
    x = x.detach().cpu()
    if x.dtype in (torch.float16, torch.bfloat16):
        x = x.float()
    return x.clone(memory_format=torch.contiguous_format).resolve_conj().resolve_neg().numpy()


def _to_tensor(chain: _Chain, index: Index, values: Array, like: Tensor) -> Tensor:
    import numpy as np

    where = f"external({chain.name}): expected {chain.label(index)} to give"
    array = np.asarray(values)
    try:
        value = torch.from_numpy(array.astype(complex if array.dtype.kind == "c" else float))
    except (TypeError, ValueError):
        raise ArgumentTypeError(f"{where} numbers, got {validation.describe(values)}.") from None
    if value.is_complex() and not like.is_complex():
        raise ArgumentValueError(
            f"{where} real numbers for real inputs, got {array.dtype}; take `.real` of it, if that "
            f"is what is meant, or pass complex inputs."
        )
    try:
        expanded = value.broadcast_to(like.shape)
    except RuntimeError:
        raise ArgumentValueError(
            f"{where} an array of the shape of its inputs, {tuple(like.shape)}, got "
            f"{tuple(value.shape)}; it must act element by element."
        ) from None
    return like.new_empty(like.shape).copy_(expanded)


def _prepared(name: str, inputs: tuple[Any, ...]) -> list[Tensor]:
    """The inputs as tensors of one shape, dtype and device."""
    tensors = [value for value in inputs if isinstance(value, Tensor)]
    if not tensors:
        raise ArgumentTypeError(
            f"{name}: expected at least one tensor, got {len(inputs)} other arguments; wrap a number "
            f"with torch.tensor."
        )
    for i, value in enumerate(inputs):
        if isinstance(value, Tensor):
            validation.differentiable(f"input {i}", value)
    dtype = tensors[0].dtype
    for tensor in tensors[1:]:
        dtype = torch.promote_types(dtype, tensor.dtype)
    every = [
        value.to(dtype)
        if isinstance(value, Tensor)
        else torch.tensor(value, dtype=dtype, device=tensors[0].device)
        for value in inputs
    ]
    return list(torch.broadcast_tensors(*every))


def _batched(batch_size: int, dims: Sequence[int | None], inputs: Sequence[Tensor]) -> list[Tensor]:
    return [
        x.expand(batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
        for x, dim in zip(inputs, dims, strict=True)
    ]


def _sum(terms: Any) -> Tensor:
    first, *rest = terms
    for term in rest:
        first = first + term
    return first


def _name(order: int) -> str:
    return ("f", "df")[order] if order < 2 else f"d{order}f"


# === x^3 by NumPy, written out by hand: how code that torch cannot see into becomes differentiable.
#
#     f = x^3        f' = 3 x^2        f'' = 6 x        f''' = 6
#
# Autograd cannot differentiate NumPy, so each derivative is a Function of its own, whose backward
# is
# made of torch operations and *the next Function*. That is the whole trick: were the slope
# computed by
# NumPy inside `Cube.backward`, the second derivative would be cut there, and no error would say so.
#
# Things to see here, all of which `hoglib.ops.external` does for any function:
#
# * setup_context is apart from forward, or torch.func refuses the Function;
# * what is saved is the input, so that autograd can go through `saved_tensors` to x once more;
# * jvp is the same rule forwards; vmap is trivial, because the function acts element by element;
# * `detach` is what NumPy asks for, and is harmless in forward, which autograd does not look into.
#
# One thing only `external` does: a tracer that records `Cube` runs the NumPy code once and keeps
# its
# numbers as constants. The cure is an operator of torch.library.


def cube(x: Tensor) -> Tensor:
    r"""The cube, computed by NumPy.

        y = x^3        dy/dx = 3 x^2

    Shapes: x any, real or complex, on the CPU; y like x. Differentiable to any order, in reverse mode,
    one level of forward mode, and under vmap.
    """
    return Cube.apply(x)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return torch.as_tensor(x.detach().numpy() ** 3)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return g * CubeSlope.apply(x).conj()  # conj only matters for complex x

    @staticmethod
    def jvp(ctx: Any, t: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return t * CubeSlope.apply(x)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int], x: Tensor) -> tuple[Tensor, int]:
        return Cube.apply(x), in_dims[0]


class CubeSlope(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return torch.as_tensor(3 * x.detach().numpy() ** 2)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return g * (6 * x).conj()  # torch from here on: the chain ends, and every order is there

    @staticmethod
    def jvp(ctx: Any, t: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return t * (6 * x)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int], x: Tensor) -> tuple[Tensor, int]:
        return CubeSlope.apply(x), in_dims[0]
