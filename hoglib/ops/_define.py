"""One place that turns a derivative rule into a complete `torch.autograd.Function`.

A Function is right to second order when three things hold, and `make_function` sees to all of them:

* backward is built of differentiable torch operations, so autograd can differentiate it again;
* everything that backward reads was an input or an output of the Function. A tensor that forward
  made and kept for itself has no graph, and its share of the second derivative would be lost;
* forward-mode, vmap and the compiler are served: by a `jvp`, by a vmap rule, and by a reference of
  plain torch operations where torch itself is wrong (jvp inside jvp) or refuses (the compiler).
"""

from collections.abc import Callable, Sequence
from inspect import Parameter, Signature
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from hoglib import _arguments as arguments
from hoglib import _functorch

Partial = Callable[..., Tensor]


class Saved(NamedTuple):
    """What backward and jvp may read."""

    inputs: tuple[Any, ...]  # as given to forward; None for a tensor that was not kept
    outputs: tuple[Tensor | None, ...]  # None for an output that was not kept
    input_shapes: tuple[torch.Size | None, ...]  # None for an input that is not a tensor
    output_shapes: tuple[torch.Size, ...]
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
) -> type[torch.autograd.Function]:
    """Build the Function class of an op.

    forward(*inputs) gives a tensor or a tuple of tensors. backward(saved, *grads) gives one gradient
    or None an input; a grad is None where nothing flowed in, and at least one is not None.
    jvp(saved, *tangents) gives a tangent an output; a tangent is None for a constant.
    vmap(function, batch_size, in_dims, *inputs) gives (outputs, out_dims); without it torch derives a
    rule from forward and backward, which works for every op and costs more per call.
    Inputs that are not tensors are kept as they are and have no derivative.
    """
    keep = frozenset(range(num_inputs) if keep_inputs is None else keep_inputs)

    def saved(ctx: Any, needed: tuple[bool, ...]) -> Saved:
        tensors = ctx.saved_tensors
        inputs = tuple(
            other if kind is None else tensors[kind] if kind >= 0 else None
            for kind, other in zip(ctx.slots, ctx.others, strict=True)
        )
        outputs = tuple(tensors[kind] if kind >= 0 else None for kind in ctx.output_slots)
        return Saved(inputs, outputs, ctx.input_shapes, ctx.output_shapes, needed)

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
        ctx.input_shapes = tuple(v.shape if isinstance(v, Tensor) else None for v in inputs)
        ctx.output_shapes = tuple(value.shape for value in outputs)
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    def run_backward(ctx: Any, *grads: Tensor | None) -> Any:
        if all(grad is None for grad in grads):
            return (None,) * num_inputs
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
        "__doc__": forward.__doc__,
    }
    if vmap is not None:
        rule = vmap

        def run_vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> Any:
            return rule(function, info.batch_size, in_dims, *inputs)

        members["vmap"] = staticmethod(run_vmap)
    function = cast(type[torch.autograd.Function], type(name, (torch.autograd.Function,), members))
    return function


def call(
    function: type[torch.autograd.Function], reference: Callable[..., Any] | None, *inputs: Any
) -> Any:
    """Run a Function, or its reference of plain torch operations where that is the right thing.

    Under the compiler the reference fuses better than a Function can. Under two forward levels
    torch differentiates the `jvp` of a custom Function to zero, without an error.
    """
    if torch.compiler.is_compiling():
        if reference is not None:
            return reference(*inputs)
    elif _functorch.transforms_active() and _functorch.forward_levels() > 1:
        if reference is None:
            raise arguments.NotSupported(
                f"{function.__name__}: expected at most one level of forward-mode differentiation, "
                f"got jvp inside jvp, where torch differentiates a custom Function to zero. Give "
                f"the op a reference made of plain torch operations, or use torch.func.grad for "
                f"one of the two levels."
            )
        return reference(*inputs)
    return function.apply(*inputs)


def define(
    forward: Callable[..., Tensor],
    partials: Sequence[Partial],
    *,
    reference: Callable[..., Tensor] | None = None,
    keep: str = "both",
) -> Callable[..., Tensor]:
    r"""A pointwise op from its formula and its partial derivatives.

        y = f(x_1, ..., x_n)        p_i(x_1, ..., x_n, y) = dy/dx_i
        backward: g -> sum over the broadcast dimensions of g conj(p_i)        jvp: t -> sum_i p_i t_i

    `forward(*inputs)` acts element by element and broadcasts; `partials[i](*inputs, output)` is the
    derivative by input i, of torch operations. Inputs that are not tensors are constants. The result
    is differentiable to any order in reverse and forward mode and under vmap; higher orders are the
    derivatives of the partials.

    `reference` is the same function of plain torch operations, for the compiler and for jvp inside
    jvp. `keep` says which tensors the partials read, "both", "inputs" or "output", so that no other is
    held in memory; what is not kept is passed to them as None.
    """
    count = len(partials)
    keep_inputs = () if keep == "output" else tuple(range(count))
    keep_outputs = () if keep == "inputs" else (0,)

    def backward(saved: Saved, grad: Tensor) -> list[Tensor | None]:
        return [
            _sum_to(grad * conj(partial(*saved.inputs, *saved.outputs)), shape)
            if needed and shape is not None
            else None
            for partial, shape, needed in zip(
                partials, saved.input_shapes, saved.needed, strict=True
            )
        ]

    def jvp(saved: Saved, *tangents: Tensor | None) -> Tensor:
        terms = [
            partial(*saved.inputs, *saved.outputs) * tangent
            for partial, tangent in zip(partials, tangents, strict=True)
            if tangent is not None
        ]
        total = terms[0]
        for term in terms[1:]:
            total = total + term
        return total.expand(saved.output_shapes[0])

    function = make_function(
        forward.__name__,
        count,
        forward=forward,
        backward=backward,
        jvp=jvp,
        vmap=_vmap_pointwise,
        keep_inputs=keep_inputs,
        keep_outputs=keep_outputs,
    )

    def op(*inputs: Any) -> Tensor:
        result: Tensor = call(function, reference, *inputs)
        return result

    op.__name__ = op.__qualname__ = forward.__name__
    op.__doc__ = forward.__doc__
    return op


def _vmap_pointwise(
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


def conj(tensor: Tensor) -> Tensor:
    return tensor.conj() if tensor.is_complex() else tensor


def _sum_to(tensor: Tensor, shape: torch.Size) -> Tensor:
    """Sum over the dimensions that broadcasting added or stretched."""
    return tensor if tensor.shape == shape else tensor.sum_to_size(shape)
