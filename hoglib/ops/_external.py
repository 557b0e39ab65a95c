"""Code that torch cannot differentiate (NumPy, SciPy, C++) as an op with given derivatives.

A chain of Functions, for any number of inputs and as many orders as there are derivatives:

    D_0 = f        D_k = all partial derivatives of order k        d D_k[m] / dx_i = D_{k+1}[m, i]

The backward of D_k is a sum of products with outputs of D_{k+1}, itself a Function. All Functions call
one operator of torch.library, `hoglib::external`. Tracers record this operator; recorded directly,
NumPy would run with the example inputs, and its results would become constants of the graph.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hoglib import errors
from hoglib._core.messages import validation
from hoglib._core.torch_api import torch_internals
from hoglib._core.torch_api.torch_private import private
from hoglib.ops._function import Batch, Saved, conj, make_function, sum_terms, vmap_in_front

Array = Any  # a numpy.ndarray; hoglib does not import NumPy
Index = tuple[int, ...]


def external(
    f: Callable[..., Array],
    df: Callable[..., Any],
    d2f: Callable[..., Any] | None = None,
    *higher: Callable[..., Any],
) -> Callable[..., Tensor]:
    r"""Make an elementwise op from a NumPy, SciPy or C++ function and its derivatives.

        y = f(x_1, ..., x_n)        df = (dy/dx_1, ..., dy/dx_n)        d2f[i][j] = d2y / dx_i dx_j

    Every function gets one NumPy array for each input, all of one shape, and returns arrays that
    broadcast to this shape. With one input each function returns an array; with several, df
    returns a tuple, d2f a tuple of tuples, and d3f one more level. None instead of an array marks an
    unknown derivative; a call that needs it raises.

    The op is differentiable to as many orders as derivatives were given, in reverse mode, forward mode,
    reverse over forward, forward over reverse, and under vmap. float16 and bfloat16 are computed in
    float32; inputs on an accelerator go to the host, and results return. make_fx and torch.compile
    record a call of f, not its values (inside a torch.func transform torch.compile breaks the graph;
    make_fx does not). Their graphs refer to f by a number, so f lives as long as the process: make an
    op once. As in every custom Function, derivatives by all inputs that require grad are computed, even
    if only one of the gradients is asked for.

    Args:
        f: The function.
        df: Its first derivatives.
        d2f: Its second derivatives. Default: none; the op is differentiable once.
        higher: The derivatives of third and higher order, d3f and so on.
    Returns:
        The op, a function of tensors of floating-point or complex dtype (complex: holomorphic f) and
        numbers, which broadcast together. y has their common dtype and their device.
    Raises:
        ValueError: for d3f without d2f; in a call where f or a derivative returns another shape,
            another number of arrays, or complex numbers for real ones.
        TypeError: for arguments that cannot be called; in a call for integer tensors.
        RuntimeError: in a call for an order beyond the derivatives given, naming the one to add.
        NotImplementedError: in a call under two levels of forward mode, where torch differentiates
            custom Functions to zero.
    Shape:
        - inputs: any that broadcast together
        - y: the shape they broadcast to
    Example:
        >>> import numpy as np
        >>> sine = hog.ops.external(np.sin, np.cos, lambda x: -np.sin(x))
        >>> x = torch.tensor(0.5)
        >>> sine(x), torch.func.grad(torch.func.grad(sine))(x)
        (tensor(0.4794), tensor(-0.4794))
    """
    derivatives = [f, df] if d2f is None else [f, df, d2f, *higher]
    if d2f is None and higher:
        raise errors.ArgumentValueError("d2f: expected a function, as d3f was given, got None.")
    for order, function in enumerate(derivatives):
        validation.function(_derivative_name(order), function)
    chain = _Chain(derivatives)

    def op(*inputs: Tensor | float) -> Tensor:
        return chain.evaluate([()], *_broadcast_inputs(chain.name, inputs))[0]

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
            # Dynamo refuses a Function with a jvp, and torch.func an operator's register_autograd
            if not torch_internals.transforms_active():
                return tuple(_external(list(inputs), self.number, _encode(which)))
            private("torch._dynamo.graph_break")()
        if torch_internals.transforms_active() and torch_internals.forward_levels() > 1:
            raise errors.UnsupportedError(
                f"external({self.name}): expected at most one level of forward mode, got jvp inside "
                "jvp (or jacfwd inside jacfwd), where torch differentiates a custom Function to zero. "
                "Use torch.func.grad or jacrev for one of the two, for instance torch.func.hessian."
            )
        # one Function for each number of inputs, because a Function's signature is fixed
        if len(inputs) not in self._functions:
            self._functions[len(inputs)] = _make_chain_link(self, len(inputs))
        return self._functions[len(inputs)].apply(tuple(which), *inputs)

    def check_order(self, order: int) -> None:
        """Raise if the derivatives of this order were not given."""
        if order >= len(self.derivatives):
            given = ", ".join(_derivative_name(k) for k in range(len(self.derivatives)))
            raise errors.NoSecondDerivative(
                f"external({self.name}): expected a derivative of order {order} to differentiate "
                f"{order} times, got {given} alone; add {_derivative_name(order)}, as in "
                f"`external({given}, {_derivative_name(order)})`."
            )

    def label(self, index: Index) -> str:
        return f"{_derivative_name(len(index))}{''.join(f'[{i}]' for i in index)}"


def _make_chain_link(chain: _Chain, count: int) -> type[torch.autograd.Function]:
    """The Function (which, x_1, ..., x_n) -> derivatives `which`, differentiable by the next order."""

    def forward(which: tuple[Index, ...], *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(_external(list(inputs), chain.number, _encode(which)))

    def backward(saved: Saved, *grads: Tensor | None) -> list[Tensor | None]:
        which, *inputs = saved.inputs
        needed = [i for i in range(count) if saved.needs_input_grad[i + 1]]
        arrived = [(index, g) for index, g in zip(which, grads, strict=True) if g is not None]
        result: list[Tensor | None] = [None] * (count + 1)
        chain.check_order(len(which[0]) + 1)
        partials = [(*index, i) for i in needed for index, _ in arrived]
        slopes = iter(chain.evaluate(partials, *inputs))
        for i in needed:
            result[i + 1] = sum_terms(g * conj(next(slopes)) for _, g in arrived)
        return result

    def jvp(saved: Saved, _: None, *tangents: Tensor | None) -> tuple[Tensor, ...]:
        which, *inputs = saved.inputs
        moving = [(i, t) for i, t in enumerate(tangents) if t is not None]
        chain.check_order(len(which[0]) + 1)
        slopes = iter(chain.evaluate([(*index, i) for index in which for i, _ in moving], *inputs))
        return tuple(sum_terms(t * next(slopes) for _, t in moving) for _ in which)

    name = f"External_{chain.name}"
    return make_function(name, count + 1, forward, backward, jvp, vmap=vmap_in_front)


_CHAINS: list[_Chain] = []


@torch.library.custom_op("hoglib::external", mutates_args=())
def _external(inputs: list[Tensor], chain: int, which: str) -> list[Tensor]:
    """Derivatives of one order: "" for f, "0" for df[0], "0,1 1,1" for d2f[0][1] and d2f[1][1]."""
    rule, indices, like = _CHAINS[chain], _decode(which), inputs[0]
    if like.numel() == 0:
        return [like.new_empty(like.shape) for _ in indices]
    values = rule.derivatives[len(indices[0])](*(_to_array(x) for x in inputs))
    arrays = [_component(rule, values, index, len(inputs)) for index in indices]
    return [_to_tensor(rule, *pair, like) for pair in zip(indices, arrays, strict=True)]


@_external.register_fake
def _(inputs: list[Tensor], chain: int, which: str) -> list[Tensor]:
    return [inputs[0].new_empty(inputs[0].shape) for _ in _decode(which)]


@_external.register_vmap
def _(info: Any, in_dims: Any, inputs: list[Tensor], chain: int, which: str) -> Any:
    batch = Batch(_external, info.batch_size, in_dims[0])
    outputs = _external([batch.to_front(i, x) for i, x in enumerate(inputs)], chain, which)
    return outputs, [0] * len(outputs)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    tensors, ctx.chain, ctx.which = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grads: list[Tensor]) -> Any:
    """The backward of the operator, for torch.compile, which records the operator, no Functions."""
    # all partial derivatives of the next order in one call of the user's function
    inputs, indices = list(ctx.saved_tensors), _decode(ctx.which)
    _CHAINS[ctx.chain].check_order(len(indices[0]) + 1)
    slots = [(*index, i) for i in range(len(inputs)) for index in indices]
    slopes = iter(_external(inputs, ctx.chain, _encode(slots)))
    return [sum_terms(g * conj(next(slopes)) for g in grads) for _ in inputs], None, None


_external.register_autograd(_backward, setup_context=_setup_context)


def _encode(which: Sequence[Index]) -> str:
    return " ".join(",".join(map(str, index)) for index in which)


def _decode(which: str) -> list[Index]:
    return [tuple(int(i) for i in index.split(",") if i) for index in which.split(" ")]


def _component(chain: _Chain, values: object, index: Index, count: int) -> Array:
    """values[i][j]..., with checks, because user code returned it."""
    part = values
    for depth, i in enumerate(index if count > 1 else ()):
        if not isinstance(part, tuple | list) or len(part) != count:
            where = _derivative_name(len(index)) + "".join(f"[{j}]" for j in index[:depth])
            got = len(part) if isinstance(part, tuple | list) else validation.describe(part)
            raise errors.ArgumentValueError(
                f"external({chain.name}): expected {where} to be a tuple of {count} arrays, one for "
                f"each input, got {got}."
            )
        part = part[i]
    if part is None:
        raise errors.NoSecondDerivative(
            f"external({chain.name}): expected a known derivative {chain.label(index)}, got None; "
            f"give it, or detach the input that does not need it."
        )
    return part


def _to_array(x: Tensor) -> Array:
    """A copy as a NumPy array; user code may change or keep it."""
    x = x.detach().cpu()
    # NumPy has no bfloat16; float16 is computed in float32, as in all ops
    if x.dtype in (torch.float16, torch.bfloat16):
        x = x.float()
    return x.clone(memory_format=torch.contiguous_format).resolve_conj().resolve_neg().numpy()


def _to_tensor(chain: _Chain, index: Index, values: Array, like: Tensor) -> Tensor:
    import numpy as np

    where = f"external({chain.name}): expected {chain.label(index)} to give"
    array = np.asarray(values)
    try:
        # a copy, because user code may change the returned array later; in double precision
        value = torch.from_numpy(array.astype(complex if array.dtype.kind == "c" else float))
    except (TypeError, ValueError):
        got = validation.describe(values)
        raise errors.ArgumentTypeError(f"{where} numbers, got {got}.") from None
    if value.is_complex() and not like.is_complex():
        raise errors.ArgumentValueError(
            f"{where} real numbers for real inputs, got {array.dtype}; take `.real` of it, if that "
            f"is what is meant, or pass complex inputs."
        )
    try:
        expanded = value.broadcast_to(like.shape)
    except RuntimeError:
        raise errors.ArgumentValueError(
            f"{where} an array of the shape of its inputs, {tuple(like.shape)}, got "
            f"{tuple(value.shape)}; it must act element by element."
        ) from None
    # in the dtype, on the device and with the strides that a tracer was told
    return like.new_empty(like.shape).copy_(expanded)


def _broadcast_inputs(name: str, inputs: tuple[Any, ...]) -> list[Tensor]:
    """The inputs as tensors of one shape, dtype and device."""
    tensors = [value for value in inputs if isinstance(value, Tensor)]
    if not tensors:
        raise errors.ArgumentTypeError(
            f"{name}: expected at least one tensor, got {len(inputs)} other arguments; wrap a number "
            f"with torch.tensor."
        )
    for i, value in enumerate(inputs):
        if isinstance(value, Tensor):
            validation.differentiable(f"input {i}", value)
    dtype = tensors[0].dtype
    for tensor in tensors[1:]:
        dtype = torch.promote_types(dtype, tensor.dtype)
    make = partial(torch.tensor, dtype=dtype, device=tensors[0].device)
    every = [value.to(dtype) if isinstance(value, Tensor) else make(value) for value in inputs]
    return list(torch.broadcast_tensors(*every))


def _derivative_name(order: int) -> str:
    return ("f", "df")[order] if order < 2 else f"d{order}f"
