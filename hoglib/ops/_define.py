"""What element-by-element functions share: promotion, broadcasting, and its undoing in backward."""

from collections.abc import Callable, Sequence
from inspect import Parameter, Signature
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from hoglib._core import torch_internals, validation
from hoglib._core.torch_modes import without_stand_ins
from hoglib.errors import ArgumentTypeError, UnsupportedError


def promoted(*inputs: Any) -> tuple[Any, ...]:
    """The inputs with one dtype for all floating-point and complex tensors, by torch's promotion.

    Inside a Function it would be too late: under vmap a tensor of no dimensions has one more, and
    would count in the promotion.
    """
    floating = [value for value in inputs if _is_floating(value)]
    if all(value.dtype == floating[0].dtype for value in floating):
        return inputs
    dtypes: list[torch.dtype | None] = [None, None]  # of those with and those without dimensions
    for value in floating:
        group = value.dim() == 0
        known = dtypes[group]
        dtypes[group] = value.dtype if known is None else torch.promote_types(known, value.dtype)
    dtype, scalars = dtypes
    if dtype is None:
        dtype = scalars
    elif scalars is not None and scalars.is_complex and not dtype.is_complex:
        dtype = dtype.to_complex()
    return tuple(value.to(dtype) if _is_floating(value) else value for value in inputs)


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def vmap_broadcasting(
    function: type[torch.autograd.Function],
    batch_size: int,
    in_dims: tuple[int | None, ...],
    *inputs: Any,
) -> tuple[Tensor, int]:
    """Batch dimensions to the front, then ordinary broadcasting."""
    ranks = [
        value.dim() - (dim is not None) if isinstance(value, Tensor) else 0
        for value, dim in zip(inputs, in_dims, strict=True)
    ]
    rank = max(ranks)
    aligned = [
        value if dim is None else value.movedim(dim, 0)[(slice(None),) + (None,) * (rank - own)]
        for value, dim, own in zip(inputs, in_dims, ranks, strict=True)
    ]
    return function.apply(*aligned), 0


def times(factor: Tensor, partial: Any) -> Tensor:
    if not isinstance(partial, Tensor):
        return factor if partial == 1 else factor * partial
    if partial.dtype == torch.bool:
        return torch.where(partial, factor, 0)
    return factor * partial


def sum_to(tensor: Tensor, shape: torch.Size) -> Tensor:
    """Sum over the dimensions that broadcasting added or stretched."""
    return tensor if tensor.shape == shape else tensor.sum_to_size(shape)


# === One place that turns a derivative rule into a complete `torch.autograd.Function`.
#
# A Function is right to second order when three things hold, and `make_function` sees to all of
# them:
#
# * backward is built of differentiable torch operations, so autograd can differentiate it again;
# * everything that backward reads was an input or an output of the Function. A tensor that forward
#   made and kept for itself has no graph, and its share of the second derivative would be lost;
# * forward-mode, vmap and the compiler are served: by a `jvp`, by a vmap rule, and by a reference
# of
#   plain torch operations where torch itself is wrong (jvp inside jvp) or refuses (the compiler).

Partial = Callable[..., Tensor | complex]


class Saved(NamedTuple):
    """What backward and jvp may read."""

    inputs: tuple[Any, ...]  # as given to forward; None for a tensor that was not kept
    outputs: tuple[Tensor | None, ...]  # None for an output that was not kept
    input_shapes: tuple[torch.Size | None, ...]  # None for an input that is not a tensor
    output_shapes: tuple[torch.Size, ...]
    input_dtypes: tuple[torch.dtype | None, ...]
    output_dtypes: tuple[torch.dtype, ...]
    needed: tuple[bool, ...]  # which inputs want a gradient; all True in jvp


def make_function(
    name: str,
    num_inputs: int,
    *,
    forward: Callable[..., Any],
    backward: Callable[..., Sequence[Tensor | None]],
    jvp: Callable[..., Any],
    vmap: Callable[..., Any] | None = None,
    keep_inputs: Sequence[int] | None = None,
    keep_outputs: Sequence[int] = (0,),
    watched: bool = False,
) -> type[torch.autograd.Function]:
    """Build the Function class of an op.

    forward(*inputs) gives a tensor or a tuple of tensors. backward(saved, *grads) gives one gradient
    or None an input; a grad is None where nothing flowed in, and at least one is not None.
    jvp(saved, *tangents) gives a tangent an output; a tangent is None for a constant.
    vmap(function, batch_size, in_dims, *inputs) gives (outputs, out_dims); without it torch derives a
    rule from forward and backward, which works for every op and costs more per call.
    Inputs that are not tensors are kept as they are and have no derivative. watched: backward is the
    user's, and may need the stand-ins of `second_order`.
    """
    keep = frozenset(range(num_inputs) if keep_inputs is None else keep_inputs)

    def saved(ctx: Any, needed: tuple[bool, ...]) -> Saved:
        tensors = ctx.saved_tensors
        inputs = tuple(
            other if kind is None else tensors[kind] if kind >= 0 else None
            for kind, other in zip(ctx.slots, ctx.others, strict=True)
        )
        outputs = tuple(tensors[kind] if kind >= 0 else None for kind in ctx.output_slots)
        return Saved(inputs, outputs, *ctx.like, needed)  # type: ignore[call-arg]

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        outputs = output if isinstance(output, tuple) else (output,)
        tensors: list[Tensor] = []

        def slot(tensor: Tensor, kept: bool) -> int:
            if not kept:
                return -1
            tensors.append(tensor)
            return len(tensors) - 1

        ctx.set_materialize_grads(False)
        ctx.slots = [
            slot(value, i in keep) if isinstance(value, Tensor) else None
            for i, value in enumerate(inputs)
        ]
        ctx.others = [None if isinstance(value, Tensor) else value for value in inputs]
        ctx.output_slots = [slot(value, i in keep_outputs) for i, value in enumerate(outputs)]
        ctx.like = (
            tuple(v.shape if isinstance(v, Tensor) else None for v in inputs),
            tuple(value.shape for value in outputs),
            tuple(v.dtype if isinstance(v, Tensor) else None for v in inputs),
            tuple(value.dtype for value in outputs),
        )
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    def run_backward(ctx: Any, *grads: Tensor | None) -> Any:
        if all(grad is None for grad in grads):
            return (None,) * num_inputs
        if watched or torch.compiler.is_compiling():
            return tuple(backward(saved(ctx, ctx.needs_input_grad), *grads))
        with without_stand_ins():
            return tuple(backward(saved(ctx, ctx.needs_input_grad), *grads))

    def run_jvp(ctx: Any, *tangents: Tensor | None) -> Any:
        return jvp(saved(ctx, (True,) * num_inputs), *tangents)

    def run_forward(*inputs: Any) -> Any:
        return forward(*inputs)

    # Function.apply binds its arguments to the signature of forward at every call; one that is
    # ready spares the reading of it (a tenth of the call).
    run_forward.__signature__ = Signature(  # type: ignore[attr-defined]
        [Parameter(f"input{i}", Parameter.POSITIONAL_ONLY) for i in range(num_inputs)]
    )
    members: dict[str, Any] = {
        "forward": staticmethod(run_forward),
        "setup_context": staticmethod(setup_context),
        "backward": staticmethod(run_backward),
        "jvp": staticmethod(run_jvp),
        "generate_vmap_rule": vmap is None,
        "watched": watched,
        "__doc__": forward.__doc__,
    }
    if vmap is not None:
        rule = vmap

        def run_vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> Any:
            return rule(function, info.batch_size, in_dims, *inputs)

        members["vmap"] = staticmethod(run_vmap)
    function = cast(type[torch.autograd.Function], type(name, (torch.autograd.Function,), members))
    return function


def without_jvp(function: type[torch.autograd.Function]) -> type[torch.autograd.Function]:
    """The same Function for the compiler, which refuses a jvp and has no use for a vmap rule."""
    members = {
        key: value
        for key, value in vars(function).items()
        if key in ("forward", "setup_context", "backward", "__doc__")
    }
    twin = type(
        function.__name__, (torch.autograd.Function,), members | {"generate_vmap_rule": True}
    )
    return cast(type[torch.autograd.Function], twin)


def call(
    function: type[torch.autograd.Function], reference: Callable[..., Any] | None, *inputs: Any
) -> Any:
    """Run a Function, or its reference of plain torch operations where that is the right thing.

    Under the compiler the reference fuses better than a Function can. Under two forward levels
    torch differentiates the `jvp` of a custom Function to zero, without an error.
    """
    if reference is not None and torch.compiler.is_compiling():
        return reference(*inputs)
    if torch_internals.transforms_active() and torch_internals.forward_levels() > 1:
        if reference is None:
            raise UnsupportedError(
                f"{function.__name__}: expected at most one level of forward-mode differentiation, "
                f"got jvp inside jvp, where torch differentiates a custom Function to zero. Give "
                f"the op a reference made of plain torch operations, or use torch.func.grad for "
                f"one of the two levels."
            )
        return reference(*inputs)
    if torch.compiler.is_compiling():
        return function.apply(*inputs)
    with without_stand_ins():
        return function.apply(*inputs)


def define(
    forward: Callable[..., Tensor],
    partials: Sequence[Partial | None],
    *,
    reference: Callable[..., Tensor] | None = None,
    surrogate: bool = False,
    keep: str = "both",
) -> Callable[..., Tensor]:
    r"""A pointwise op from its formula and its partial derivatives.

        y = f(x_1, ..., x_n)        p_i(x_1, ..., x_n, y) = dy/dx_i
        backward: g -> sum over the broadcast dimensions of g conj(p_i)        jvp: t -> sum_i p_i t_i

    `forward(*inputs)` acts element by element and broadcasts; `partials[i](*inputs, output)` is the
    derivative by input i, made of torch operations: higher orders are the derivatives of the partials.
    A partial may be a number, or a boolean mask, which stands for 1 and 0 and lets no infinity
    through where it is False. It is None for an input that is always a constant. Inputs that are not
    tensors, and integer ones, are constants.

    `reference` is the same function of plain torch operations, for the compiler and for jvp inside
    jvp. `keep` says which tensors the partials read, "both", "inputs", "output" or "none", so that no
    other is held in memory; what is not kept is passed to them as None. `surrogate` declares that the
    partials differ from the derivative of forward on purpose; a reference must then carry the same
    ones, for instance y.detach() + p (x - x.detach()) with a constant p.

    Shapes: the inputs broadcast. Dtypes: inputs of several dtypes are promoted as torch promotes
    them; complex functions are holomorphic, or real functions of real inputs with a complex value.
    The op is differentiable to any order in reverse and forward mode, under vmap and the compiler.
    Raises TypeError for partials that are not functions or a call with another number of inputs,
    ValueError for an unknown keep, NotImplementedError for jvp inside jvp without a reference, for
    the derivative by an input whose partial is None, and for a real function of complex inputs.
    """
    validation.function("forward", forward)
    for i, partial in enumerate(partials):
        if partial is not None:
            validation.function(f"partials[{i}]", partial)
    validation.one_of("keep", keep, ("both", "inputs", "output", "none"))
    name = getattr(forward, "__name__", "op")
    count = len(partials)

    def owned(*inputs: Any) -> Tensor:
        y = forward(*inputs)
        if torch.compiler.is_compiling():  # it makes its own copies
            return y
        # torch has rules of its own for a Function that returns its input or a view of it
        return y.clone() if y._is_view() or any(y is value for value in inputs) else y

    def derivative(i: int, saved: Saved) -> Any:
        partial = partials[i]
        if partial is None:
            raise UnsupportedError(
                f"{name}: expected input {i} to be a constant, got a derivative asked by it; "
                f"give partials[{i}] to define, or detach the input."
            )
        return partial(*saved.inputs, *saved.outputs)

    def backward(saved: Saved, grad: Tensor) -> list[Tensor | None]:
        grads: list[Tensor | None] = [None] * count
        for i, (shape, dtype) in enumerate(
            zip(saved.input_shapes, saved.input_dtypes, strict=True)
        ):
            if saved.needed[i] and shape is not None and dtype is not None:
                share = times(grad, conj(derivative(i, saved)))
                share = share.real if share.is_complex() and not dtype.is_complex else share
                grads[i] = sum_to(share, shape)
        return grads

    def jvp(saved: Saved, *tangents: Tensor | None) -> Tensor:
        terms = [
            times(tangent, derivative(i, saved))
            for i, tangent in enumerate(tangents)
            if tangent is not None
        ]
        total = terms[0]
        for term in terms[1:]:
            total = total + term
        (shape,), (dtype,) = saved.output_shapes, saved.output_dtypes
        return total.to(dtype).expand(shape)

    function = make_function(
        name,
        count,
        forward=owned,
        backward=backward,
        jvp=jvp,
        vmap=vmap_broadcasting,
        keep_inputs=range(count) if keep in ("both", "inputs") else (),
        keep_outputs=(0,) if keep in ("both", "output") else (),
        watched=not (getattr(forward, "__module__", None) or "").startswith("hoglib."),
    )

    compiled = without_jvp(function)

    def op(*inputs: Any) -> Tensor:
        result: Tensor
        if len(inputs) != count:
            raise ArgumentTypeError(
                f"{name}: expected {count} inputs, one for each partial, got {len(inputs)}."
            )
        dtypes = {value.dtype for value in inputs if isinstance(value, Tensor)}
        if len(dtypes) > 1:
            inputs = promoted(*inputs)
        if reference is None and torch.compiler.is_compiling():
            result = compiled.apply(*inputs)
        else:
            result = call(function, reference, *inputs)
        if not result.is_complex() and any(dtype.is_complex for dtype in dtypes):
            raise UnsupportedError(
                f"{name}: expected a complex value for complex inputs, got {result.dtype}; a real "
                f"function of complex numbers has no partial derivative. Define it by the real "
                f"and imaginary parts, from `torch.view_as_real`."
            )
        return result

    op.__name__ = op.__qualname__ = name
    op.__doc__ = forward.__doc__
    op.surrogate = surrogate  # type: ignore[attr-defined]
    op.reference = reference  # type: ignore[attr-defined]
    return op


def conj(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.conj() if value.is_complex() else value
    return value.conjugate()
