"""Linear maps, alone and fused with an activation.

Internally the operands have one of two forms: *plain*, x [..., in] with W [out, in] and b [out], or
*stacked*, x [*S, rows, in] with W [*S, out, in] and b [*S, out]: one weight matrix for each entry of
S. vmap over weights turns the plain form into the stacked one, and the same formulas serve both.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hoglib._core import validation
from hoglib._core.mixed_precision import autocast_on
from hoglib._core.torch_modes import without_stand_ins
from hoglib.errors import ArgumentValueError
from hoglib.ops._function import (
    Batch,
    Saved,
    apply_function,
    conj,
    make_function,
    sum_terms,
)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    r"""Affine map of the last dimension.

        y = x W^T + b
        g -> (g W, g^T x summed over the leading dimensions, g summed over them)

    Differentiable to any order in all three, in reverse and forward mode, under vmap. Under autocast
    the product runs in the autocast dtype, as torch's own does.

    Args:
        x: A floating-point or complex tensor.
        weight: W.
        bias: b. Default: none.
    Returns:
        y.
    Raises:
        TypeError: for integer tensors.
        ValueError: for shapes that do not fit.
    Shape:
        - x: [..., in]
        - weight: [out, in]
        - bias: [out]
        - y: [..., out]
    Example:
        >>> x, W = torch.tensor([[1.0, 2.0]]), torch.eye(2)
        >>> hog.ops.linear(x, W, torch.ones(2))
        tensor([[2., 3.]])
        >>> hog.hvp(lambda W: hog.ops.linear(x, W).square().sum(), W, torch.ones(2, 2))[1]
        tensor([[ 6., 12.],
                [ 6., 12.]])
    """
    result: Tensor = _apply_layer(_LINEAR, "linear", x, weight, bias)
    return result


def linear_act(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, act: str = "tanh"
) -> Tensor:
    r"""Affine map and activation as one Function.

        y = act(z)        z = x W^T + b
        g -> (u W, u^T x summed over the leading dimensions, u summed over them), u = act'(z) g

    Beside the inputs one tensor of the size of y is kept for the derivatives: y, or z for "swish".
    It is meant for networks of custom Functions, where one call for each layer costs half of two. In
    eager mode the composite of torch's own operations is faster while layers are small (half the time
    at 32 units) and even with it in second-order steps from some hundreds of units on; under the
    compiler both are the same graph. Differentiable to any order in all three, in reverse and forward
    mode, under vmap. Under autocast the product runs in the autocast dtype.

    Args:
        x: A floating-point or complex tensor.
        weight: W.
        bias: b. Default: none.
        act: "relu", "tanh", "sigmoid", "softplus" or "swish" (z s(z), the SiLU). Default: "tanh".
    Returns:
        y.
    Raises:
        TypeError: for integer tensors, and for complex ones where act is "relu" or "softplus".
        ValueError: for shapes that do not fit, or an unknown act.
    Shape:
        - x: [..., in]
        - weight: [out, in]
        - bias: [out]
        - y: [..., out]
    Example:
        >>> x, W = torch.tensor([[1.0, 2.0]]), torch.tensor([[0.5, 0.0]])
        >>> hog.ops.linear_act(x, W, act="tanh")
        tensor([[0.4621]])
        >>> hog.hvp(lambda W: hog.ops.linear_act(x, W).sum(), W, torch.ones(1, 2))[1]
        tensor([[-2.1806, -4.3612]])
    """
    validation.one_of("act", act, _LINEAR_ACT)
    if act in _REAL_ONLY:
        validation.real("x", x)
    layer = _LINEAR_ACT[act]
    result = _apply_layer(layer, "linear_act", x, weight, bias)
    return result[0] if layer.keeps_z else result


def linear_unchecked(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T of operands that were checked."""
    result: Tensor = apply_function(_LINEAR.function, _LINEAR.reference, x, weight, None)
    return result


def cast_for_product(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """The operands as torch's own product would take them under autocast.

    float64 and complex ones stay. It is done outside of the Function, because what backward reads
    must have the dtype that forward computed in.
    """
    device = next(tensor.device.type for tensor in tensors if tensor is not None)
    if not autocast_on(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(
        tensor.to(dtype)
        if tensor is not None and tensor.is_floating_point() and tensor.dtype != torch.float64
        else tensor
        for tensor in tensors
    )


class _Layer(NamedTuple):
    function: type[torch.autograd.Function]
    reference: Callable[..., Any]
    keeps_z: bool


def _apply_layer(layer: _Layer, name: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
    if torch.compiler.is_compiling():
        return _check_and_apply(layer, name, x, weight, bias)
    with without_stand_ins():
        return _check_and_apply(layer, name, x, weight, bias)


def _check_and_apply(
    layer: _Layer, name: str, x: Tensor, weight: Tensor, bias: Tensor | None
) -> Any:
    _check(name, x, weight, bias)
    return apply_function(layer.function, layer.reference, *cast_for_product(x, weight, bias))


def _check(name: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    validation.differentiable("x", x)
    validation.differentiable("weight", weight)
    if bias is not None:
        validation.differentiable("bias", bias)
    fits = (
        x.dim() >= 1
        and weight.dim() == 2
        and x.shape[-1] == weight.shape[1]
        and (bias is None or bias.shape == weight.shape[:1])
    )
    if not fits:
        got = f"x {tuple(x.shape)}, weight {tuple(weight.shape)}"
        if bias is not None:
            got += f", bias {tuple(bias.shape)}"
        raise ArgumentValueError(
            f"{name}: expected x [..., in], weight [out, in] and bias [out] or None, got {got}; "
            f"a transposed weight is passed as `weight.mT`."
        )


class _Activation(NamedTuple):
    forward: Callable[[Tensor], Tensor]
    vjp: Callable[[Tensor, Tensor], Tensor]  # g, y -> act' g; g, z -> act' g where keeps_z
    keeps_z: bool = False


def _softplus(z: Tensor) -> Tensor:
    # torch's threshold of 20 leaves an error of 2e-9, which float64 can see.
    return F.softplus(z, threshold=40)


def _silu(z: Tensor) -> Tensor:
    return z * torch.sigmoid(z) if z.is_complex() else F.silu(z)  # torch's refuses complex numbers


# torch's own backward kernels, which it differentiates to any order: one call, and less kept for the
# second derivative, than by the formulas, which serve complex numbers.


def _tanh_vjp(g: Tensor, y: Tensor) -> Tensor:
    return g * (1 - y * y) if y.is_complex() else torch.ops.aten.tanh_backward(g, y)


def _sigmoid_vjp(g: Tensor, y: Tensor) -> Tensor:
    return g * (y * (1 - y)) if y.is_complex() else torch.ops.aten.sigmoid_backward(g, y)


def _swish_vjp(g: Tensor, z: Tensor) -> Tensor:
    s = torch.sigmoid(z)  # torch's kernel has no derivative of its own
    return g * (s * (1 + z * (1 - s)))


_ACTIVATIONS = {
    "relu": _Activation(torch.relu, lambda g, y: torch.ops.aten.threshold_backward(g, y, 0)),
    "tanh": _Activation(torch.tanh, _tanh_vjp),
    "sigmoid": _Activation(torch.sigmoid, _sigmoid_vjp),
    "softplus": _Activation(_softplus, lambda g, y: g * -torch.expm1(-y)),
    "swish": _Activation(_silu, _swish_vjp, keeps_z=True),
}
_REAL_ONLY = ("relu", "softplus")  # torch has no complex derivatives of them


def _affine(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if weight.dim() == 2:
        return F.linear(x, weight, bias)
    if bias is None:
        return x @ weight.mT
    if x.dim() == 3:
        return torch.baddbmm(bias.unsqueeze(-2), x, weight.mT)
    return x @ weight.mT + bias.unsqueeze(-2)


def _backward(saved: Saved, u: Tensor) -> list[Tensor | None]:
    """The gradients of x W^T + b for a gradient u of its value."""
    x, weight, _ = saved.inputs
    by_x, by_weight, by_bias = saved.needs_input_grad
    stacked = weight.dim() > 2
    rows = u if stacked else _rows(u)
    grad_weight = rows.mT @ conj(x if stacked else _rows(x)) if by_weight else None
    grad_x = u @ conj(weight) if by_x else None
    return [grad_x, grad_weight, rows.sum(-2) if by_bias else None]


def _rows(tensor: Tensor) -> Tensor:
    # -1 for the number of rows would be ambiguous for rows without entries
    if tensor.dim() == 2:
        return tensor
    return tensor.reshape(tensor.shape[:-1].numel(), tensor.shape[-1])


def _tangent(saved: Saved, x: Tensor | None, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """The tangent of x W^T + b."""
    (shape,) = set(saved.output_shapes)
    terms = []
    if x is not None:
        terms.append(_affine(x, saved.inputs[1], None))
    if weight is not None:
        terms.append(_affine(saved.inputs[0], weight, None))
    if bias is not None:
        stacked = saved.inputs[1].dim() > 2
        # contiguous: torch wants the layout of the output, which for three dimensions is a view
        terms.append((bias.unsqueeze(-2) if stacked else bias).expand(shape).contiguous())
    return sum_terms(terms)


def _vmap(batch: Batch, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Any, Any]:
    x = batch.to_front(0, x)
    lead = x.shape[1:-1]
    own = batch.in_dims[1:] != (None, None)  # otherwise weight may be stacked by an outer vmap
    if own and weight.dim() - (batch.in_dims[1] is not None) == 2 and len(lead) != 1:
        x = x.reshape(batch.size, lead.numel(), x.shape[-1])
    if own or weight.dim() > 2:
        weight = batch.to_front(1, weight)
        bias = None if bias is None else batch.to_front(2, bias)
    output = batch.function.apply(x, weight, bias)
    outputs = output if isinstance(output, tuple) else (output,)
    shaped = tuple(y.reshape(batch.size, *lead, y.shape[-1]) for y in outputs)
    return (shaped, (0,) * len(shaped)) if isinstance(output, tuple) else (shaped[0], 0)


def _make_linear() -> _Layer:
    function = make_function(
        "Linear",
        3,
        forward=_affine,
        backward=_backward,
        jvp=_tangent,
        vmap=_vmap,
        keep_inputs=(0, 1),
    )
    return _Layer(function, F.linear, keeps_z=False)


def _make_linear_act(name: str, act: _Activation) -> _Layer:
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
        z = _affine(x, weight, bias)
        return (act.forward(z), z) if act.keeps_z else act.forward(z)

    def reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
        z = F.linear(x, weight, bias)
        return (act.forward(z), z) if act.keeps_z else act.forward(z)

    def backward(saved: Saved, grad: Tensor | None, grad_z: Tensor | None = None) -> Any:
        # z is an output too: what the derivative of act' sends to it arrives here as grad_z.
        u = None if grad is None else act.vjp(grad, conj(kept_output(saved)))
        if grad_z is not None:
            u = grad_z if u is None else u + grad_z
        assert u is not None
        return _backward(saved, u)

    def jvp(saved: Saved, *tangents: Tensor | None) -> Any:
        tangent_z = _tangent(saved, *tangents)
        tangent = act.vjp(tangent_z, kept_output(saved))
        return (tangent, tangent_z) if act.keeps_z else tangent

    def kept_output(saved: Saved) -> Tensor:
        kept = saved.outputs[int(act.keeps_z)]
        assert kept is not None
        return kept

    function = make_function(
        f"Linear{name.capitalize()}",
        3,
        forward=forward,
        backward=backward,
        jvp=jvp,
        vmap=_vmap,
        keep_inputs=(0, 1),
        keep_outputs=(int(act.keeps_z),),
    )
    return _Layer(function, reference, act.keeps_z)


_LINEAR = _make_linear()
_LINEAR_ACT = {name: _make_linear_act(name, act) for name, act in _ACTIVATIONS.items()}
