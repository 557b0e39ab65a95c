"""Pointwise ops from a formula and its partial derivatives."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hoglib._core.messages import validation
from hoglib._core.torch_api import pytree
from hoglib.errors import ArgumentTypeError, UnsupportedError
from hoglib.ops._function import (
    Saved,
    apply_function,
    conj,
    make_function,
    sum_terms,
    sum_to_shape,
    vmap_by_broadcasting,
    without_jvp,
)

Partial = Callable[..., Tensor | complex]


def define(
    forward: Callable[..., Tensor],
    partials: Sequence[Partial | None],
    *,
    reference: Callable[..., Tensor] | None = None,
    surrogate: bool = False,
    keep: str = "both",
) -> Callable[..., Tensor]:
    r"""Make a pointwise op from its formula and its partial derivatives.

        y = f(x_1, ..., x_n)        p_i(x_1, ..., x_n, y) = dy/dx_i
        backward: g -> sum over the broadcast dimensions of g conj(p_i)        jvp: t -> sum_i p_i t_i

    The op is differentiable to any order in reverse and forward mode, under vmap and the compiler:
    higher orders are the derivatives of the partials. Inputs of several dtypes are promoted as torch
    promotes them. Complex functions are holomorphic, or real functions of real inputs with a complex
    value.

    Args:
        forward: f(*inputs), which acts element by element and broadcasts.
        partials: One function (*inputs, output) for each input, the derivative of the output by that
            input, made of torch operations. It returns a tensor, a number, or a boolean mask, which
            stands for 1 and 0 and blocks even infinite gradients where it is False. None for an
            input that is always constant, such as an integer tensor or a number.
        reference: forward in plain torch operations, for the compiler and for jvp inside
            jvp. Default: none.
        surrogate: Whether the partials differ from the derivative of forward on purpose. The
            derivatives of a reference must then equal the partials, for instance
            y.detach() + p (x - x.detach()) with a constant p. Default: False.
        keep: The tensors that the partials read: "both", "inputs", "output" or "none". Only these are
            held in memory; in place of others the partials receive None. Default: "both".
    Returns:
        The op, a function of the inputs. It has the attributes ``surrogate`` and ``reference``.
    Raises:
        TypeError: for partials that are not functions, and in a call with another number of inputs.
        ValueError: for an unknown keep.
        NotImplementedError: in a call, for jvp inside jvp without a reference, for the derivative by
            an input with the partial None, and for a real function of complex inputs.
    Shape:
        - inputs: any shapes that broadcast together
        - output: the shape they broadcast to
    Example:
        >>> cube = hog.ops.define(lambda x: x**3, [lambda x, y: 3 * x**2])
        >>> x = torch.tensor(2.0)
        >>> cube(x), torch.func.grad(torch.func.grad(cube))(x)
        (tensor(8.), tensor(12.))
    """
    validation.function("forward", forward)
    for i, partial in enumerate(partials):
        if partial is not None:
            validation.function(f"partials[{i}]", partial)
    validation.choice("keep", keep, ("both", "inputs", "output", "none"))
    name = getattr(forward, "__name__", "op")
    count = len(partials)

    def own_forward(*inputs: Any) -> Tensor:
        y = forward(*inputs)
        if torch.compiler.is_dynamo_compiling():  # Dynamo makes its own copies
            return y
        # copy: autograd treats a Function that returns an input, or a view of one, specially
        return y.clone() if y._is_view() or any(y is value for value in inputs) else y

    def derivative(i: int, saved: Saved) -> Any:
        partial = partials[i]
        if partial is None:
            raise UnsupportedError(
                f"{name}: expected input {i} to be a constant, got a call that differentiates by "
                f"it; give partials[{i}] to define, or detach the input."
            )
        return partial(*saved.inputs, *saved.outputs)

    def backward(saved: Saved, grad: Tensor) -> list[Tensor | None]:
        grads: list[Tensor | None] = [None] * count
        like = zip(saved.input_shapes, saved.input_dtypes, strict=True)
        for i, (shape, dtype) in enumerate(like):
            if saved.needs_input_grad[i] and shape is not None and dtype is not None:
                share = _multiply(grad, conj(derivative(i, saved)))
                # a real input of a complex function gets the real part
                share = share.real if share.is_complex() and not dtype.is_complex else share
                grads[i] = sum_to_shape(share, shape)
        return grads

    def jvp(saved: Saved, *tangents: Tensor | None) -> Tensor:
        known = [(i, t) for i, t in enumerate(tangents) if t is not None]
        total = sum_terms([_multiply(t, derivative(i, saved)) for i, t in known])
        (shape,), (dtype,) = saved.output_shapes, saved.output_dtypes
        # if a partial is a number, or depends on some inputs only, the tangent must be expanded
        return total.to(dtype).expand(shape)

    function = make_function(
        name,
        count,
        own_forward,
        backward,
        jvp,
        vmap=vmap_by_broadcasting,
        keep_inputs=range(count) if keep in ("both", "inputs") else (),
        keep_outputs=(0,) if keep in ("both", "output") else (),
        runs_user_code=not (getattr(forward, "__module__", None) or "").startswith("hoglib."),
    )
    compiled = without_jvp(function)

    def op(*inputs: Any) -> Tensor:
        result: Tensor
        if len(inputs) != count:
            text = f"{name}: expected {count} inputs, one for each partial, got {len(inputs)}."
            raise ArgumentTypeError(text)
        dtypes = {value.dtype for value in inputs if isinstance(value, Tensor)}
        if len(dtypes) > 1:
            inputs = promote_dtypes(*inputs)
        # Dynamo refuses a Function with a jvp staticmethod
        if reference is None and torch.compiler.is_dynamo_compiling():
            result = compiled.apply(*inputs)
        else:
            result = apply_function(function, reference, *inputs)
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


def promote_dtypes(*inputs: Any) -> tuple[Any, ...]:
    """The inputs with one dtype for all floating-point and complex tensors, by torch's promotion.

    Call it before a Function: inside, under vmap, a scalar tensor has a batch dimension and would take
    part in the promotion like other tensors.
    """
    floating = [value for value in inputs if pytree.is_float(value)]
    if all(value.dtype == floating[0].dtype for value in floating):
        return inputs
    dtypes: list[torch.dtype | None] = [None, None]  # of tensors with dimensions, and of scalars
    for value in floating:
        group = value.dim() == 0
        known = dtypes[group]
        dtypes[group] = value.dtype if known is None else torch.promote_types(known, value.dtype)
    dtype, scalars = dtypes
    if dtype is None:
        dtype = scalars
    elif scalars is not None and scalars.is_complex and not dtype.is_complex:
        dtype = dtype.to_complex()
    return tuple(value.to(dtype) if pytree.is_float(value) else value for value in inputs)


def _multiply(factor: Tensor, partial: Any) -> Tensor:
    """factor * partial; a partial is a tensor, a number or a mask."""
    if not isinstance(partial, Tensor):
        return factor if partial == 1 else factor * partial
    # not a product: infinity times a mask's 0 would be NaN
    return torch.where(partial, factor, 0) if partial.dtype == torch.bool else factor * partial
