"""`make_function` turns a derivative rule into a complete `torch.autograd.Function`.

A Function is right to second order under three conditions, which `make_function` ensures:

* backward consists of differentiable torch operations, so that autograd can differentiate it again;
* backward reads only inputs and outputs of the Function. An intermediate that forward saved has no
  graph, and its part of the second derivative would be lost;
* forward mode, vmap and the compiler have a `jvp`, a vmap rule, and a reference of plain torch
  operations where torch is wrong (jvp inside jvp) or refuses Functions with a jvp (Dynamo).
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import nullcontext
from inspect import Parameter, Signature
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from hoglib._core.torch_api import torch_internals
from hoglib._core.torch_api.torch_modes import only_plain_operations, without_stand_ins
from hoglib.errors import UnsupportedError


class Saved(NamedTuple):
    """The saved values, for backward and jvp."""

    inputs: tuple[Any, ...]  # the arguments of forward; None for a tensor that was not kept
    outputs: tuple[Any, ...]  # None for an output that was not kept
    input_shapes: tuple[Any, ...]  # None for an input that is not a tensor
    output_shapes: tuple[torch.Size, ...]
    input_dtypes: tuple[torch.dtype | None, ...]
    output_dtypes: tuple[torch.dtype, ...]
    needs_input_grad: tuple[bool, ...]  # all True in jvp

    def needed(self, names: str, first: int = 0) -> str:
        """The names of the floating-point inputs that need a gradient.

        names: one character for each input, from input `first` on.
        """
        flags = zip(names, self.needs_input_grad[first:], self.input_dtypes[first:], strict=False)
        needed = (n for n, needs, dtype in flags if needs and dtype and dtype.is_floating_point)
        return "".join(needed)


class Batch(NamedTuple):
    """A call under vmap."""

    function: Any  # the Function
    size: int  # of the batch
    in_dims: tuple[int | None, ...]  # the batch dimension of each input; None: not batched

    def to_front(self, i: int, tensor: Tensor) -> Tensor:
        """Input i with its batch dimension first; an unbatched input is expanded."""
        dim = self.in_dims[i]
        return tensor.expand(self.size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def make_function(
    name: str,
    num_inputs: int,
    forward: Callable[..., Any],
    backward: Callable[..., Sequence[Tensor | None]],
    jvp: Callable[..., Any],
    *,
    vmap: Callable[..., Any] | None = None,
    keep_inputs: Sequence[int] | None = None,
    keep_outputs: Sequence[int] = (),
    runs_user_code: bool = False,
) -> type[torch.autograd.Function]:
    """Build the Function class of an op.

    Inputs that are not tensors are kept unchanged and have no derivative.

    forward: forward(*inputs) returns a tensor or a tuple of tensors.
    backward: backward(saved, *grads) returns a gradient or None for each input. A grad is None if no
        gradient arrived; at least one is not None.
    jvp: jvp(saved, *tangents) returns a tangent for each output; a tangent is None for a constant.
    vmap: vmap(batch, *inputs), with a :class:`Batch`, returns (outputs, out_dims). Without it torch
        derives a rule from forward and backward, at a higher cost per call.
    keep_inputs, keep_outputs: the positions that backward and jvp read. Default: all inputs, no output.
    runs_user_code: backward is the user's, and may need the stand-ins of `second_order`.
    """
    keep = frozenset(range(num_inputs) if keep_inputs is None else keep_inputs)

    def saved(ctx: Any, needs_input_grad: tuple[bool, ...]) -> Saved:
        tensors = ctx.saved_tensors
        pairs = zip(tensors[:num_inputs], ctx.others, strict=True)
        inputs = tuple(tensor if other is None else other for tensor, other in pairs)
        return Saved(inputs, tensors[num_inputs:], *ctx.like, needs_input_grad)  # type: ignore[call-arg]

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: object) -> None:
        outputs = output if isinstance(output, tuple) else (output,)
        # None instead of a tensor of zeros for a gradient that did not arrive
        ctx.set_materialize_grads(False)
        ctx.others = [None if isinstance(value, Tensor) else value for value in inputs]
        ctx.like = (
            tuple(v.shape if isinstance(v, Tensor) else None for v in inputs),
            tuple(value.shape for value in outputs),
            tuple(v.dtype if isinstance(v, Tensor) else None for v in inputs),
            tuple(value.dtype for value in outputs),
        )
        tensors = [v if isinstance(v, Tensor) and i in keep else None for i, v in enumerate(inputs)]
        tensors += [value if i in keep_outputs else None for i, value in enumerate(outputs)]
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    def run_backward(ctx: Any, *grads: Tensor | None) -> Any:
        if all(grad is None for grad in grads):
            return (None,) * num_inputs
        # hoglib's own backward needs no stand-ins; without the mode its torch calls are faster
        seen = runs_user_code or torch.compiler.is_dynamo_compiling()
        with nullcontext() if seen else without_stand_ins():
            return tuple(backward(saved(ctx, ctx.needs_input_grad), *grads))

    def run_jvp(ctx: object, *tangents: Tensor | None) -> Any:
        return jvp(saved(ctx, (True,) * num_inputs), *tangents)

    def run_forward(*inputs: Any) -> Any:
        return forward(*inputs)

    # Function.apply binds its arguments to the signature of forward at every call; a prepared
    # signature saves a tenth of the call
    run_forward.__signature__ = Signature(  # type: ignore[attr-defined]
        [Parameter(f"input{i}", Parameter.POSITIONAL_ONLY) for i in range(num_inputs)]
    )
    members: dict[str, Any] = {
        "forward": staticmethod(run_forward),
        "setup_context": staticmethod(setup_context),
        "backward": staticmethod(run_backward),
        "jvp": staticmethod(run_jvp),
        "generate_vmap_rule": vmap is None,
        "runs_user_code": runs_user_code,
        "__doc__": forward.__doc__,
    }
    if vmap is not None:
        members["vmap"] = lambda info, in_dims, *inputs: vmap(
            Batch(function, info.batch_size, in_dims), *inputs
        )
    function = cast(type[torch.autograd.Function], type(name, (torch.autograd.Function,), members))
    return function


def without_jvp(function: type[torch.autograd.Function]) -> type[torch.autograd.Function]:
    """The Function without jvp and vmap rule, for Dynamo, which refuses a jvp and uses no vmap rule."""
    kept = ("forward", "setup_context", "backward", "__doc__")
    members = {name: vars(function)[name] for name in kept} | {"generate_vmap_rule": True}
    twin = type(function.__name__, (torch.autograd.Function,), members)
    return cast(type[torch.autograd.Function], twin)


def apply_function(
    function: type[torch.autograd.Function], reference: Callable[..., Any] | None, *inputs: Any
) -> Any:
    """Apply a Function, or its reference of plain torch operations if that is right or faster.

    The compiler fuses the reference better than a Function. Code that looks for layers or Taylor rules
    needs plain operations. Under two forward levels, torch silently takes the derivative of a custom
    Function's `jvp` for zero.
    """
    if reference is not None and (torch.compiler.is_dynamo_compiling() or only_plain_operations()):
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
    with nullcontext() if torch.compiler.is_dynamo_compiling() else without_stand_ins():
        return function.apply(*inputs)


def vmap_by_broadcasting(batch: Batch, *inputs: Any) -> tuple[Tensor, int]:
    """A vmap rule for ops that broadcast: batch dimensions to the front, then the op itself."""
    pairs = [*zip(inputs, batch.in_dims, strict=True)]
    ranks = [x.dim() - (dim is not None) if isinstance(x, Tensor) else 0 for x, dim in pairs]
    rank = max(ranks)
    aligned = [
        # shapes are aligned from their ends: missing dimensions go between the batch and the rest
        x if dim is None else x.movedim(dim, 0)[(slice(None),) + (None,) * (rank - own)]
        for (x, dim), own in zip(pairs, ranks, strict=True)
    ]
    return batch.function.apply(*aligned), 0


def vmap_in_front(batch: Batch, *inputs: Any) -> Any:
    """A vmap rule for ops that count dimensions from the end: the batch dimension goes in front."""
    tensors = (batch.to_front(i, x) if isinstance(x, Tensor) else x for i, x in enumerate(inputs))
    result = batch.function.apply(*tensors)
    return result, (0,) * len(result) if isinstance(result, tuple) else 0


def sum_to_shape(tensor: Tensor, shape: torch.Size) -> Tensor:
    """Sum over the dimensions that broadcasting added or stretched."""
    return tensor if tensor.shape == shape else tensor.sum_to_size(shape)


def sum_terms(terms: Iterable[Tensor]) -> Tensor:
    """The sum of at least one tensor, without a zero to start from."""
    total, *rest = terms
    for term in rest:
        total = total + term
    return total


def by_name(
    names: Sequence[str], present: Collection[str], parts: Iterable[Tensor | None]
) -> list[Tensor | None]:
    """For each name its part, or None if the name is not present; parts: of the present names."""
    given = iter(parts)
    return [next(given) if name in present else None for name in names]


def conj(value: Any) -> Any:
    """The complex conjugate; a real tensor is returned itself, not as a view."""
    if isinstance(value, Tensor):
        return value.conj() if value.is_complex() else value
    return value.conjugate()
