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
from hoglib._core.matrix_products import affine, product
from hoglib._core.mixed_precision import autocast_on
from hoglib._core.torch_modes import without_stand_ins
from hoglib.errors import ArgumentTypeError, ArgumentValueError
from hoglib.ops._define import Saved, call, conj, define, make_function, sum_to, vmap_broadcasting


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    r"""Affine map of the last dimension.

        y = x W^T + b
        g -> (g W, g^T x summed over the leading dimensions, g summed over them)

    Shapes: x [..., in], weight [out, in], bias [out] or None; y [..., out]. Differentiable to any
    order in all three, in reverse and forward mode, under vmap. Under autocast the product runs in
    the autocast dtype, as torch's own does.
    Raises TypeError for integer tensors, ValueError for shapes that do not fit.
    """
    result: Tensor = _apply(_LINEAR, "linear", x, weight, bias)
    return result


def linear_act(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, act: str = "tanh"
) -> Tensor:
    r"""Affine map and activation as one Function.

        y = act(z)        z = x W^T + b
        g -> (u W, u^T x summed over the leading dimensions, u summed over them), u = act'(z) g

    act is "relu", "tanh", "sigmoid" or "softplus", whose derivative is a function of y, so that y is
    the one tensor of its size that is kept; or "swish" (x s(x), the SiLU), which keeps z instead.
    Shapes, orders and modes as for `linear`. What it is for: networks of custom Functions, where one
    a layer costs half the calls of two. In eager mode the composite of torch's own operations is
    faster while layers are small (half the time at 32 units) and even with it in second-order steps
    from some hundreds of units on; under the compiler both are the same graph.
    Raises TypeError for integer tensors, and for complex ones where act is "relu" or "softplus",
    ValueError for shapes that do not fit or an unknown act.
    """
    validation.one_of("act", act, _LINEAR_ACT)
    if act in _REAL_ONLY:
        validation.real("x", x)
    layer = _LINEAR_ACT[act]
    result = _apply(layer, "linear_act", x, weight, bias)
    return result[0] if layer.keeps_z else result


class _Activation(NamedTuple):
    forward: Callable[[Tensor], Tensor]
    pull: Callable[[Tensor, Tensor], Tensor]  # g, y -> act' g; g, z -> act' g where keeps_z
    keeps_z: bool = False


class _Layer(NamedTuple):
    function: type[torch.autograd.Function]
    reference: Callable[..., Any]
    keeps_z: bool


def _softplus(z: Tensor) -> Tensor:
    # torch's threshold of 20 leaves an error of 2e-9, which float64 can see.
    return F.softplus(z, threshold=40)


def _silu(z: Tensor) -> Tensor:
    return z * torch.sigmoid(z) if z.is_complex() else F.silu(z)  # torch's refuses complex numbers


def _swish_derivative(z: Tensor) -> Tensor:
    s = torch.sigmoid(z)
    return s * (1 + z * (1 - s))


# torch's own backward kernels, which it differentiates to any order: one call, and less kept for
# the
# second derivative, than the formulas, which serve complex numbers.


def _relu_pull(g: Tensor, y: Tensor) -> Tensor:
    return torch.ops.aten.threshold_backward(g, y, 0)


def _tanh_pull(g: Tensor, y: Tensor) -> Tensor:
    return g * (1 - y * y) if y.is_complex() else torch.ops.aten.tanh_backward(g, y)


def _sigmoid_pull(g: Tensor, y: Tensor) -> Tensor:
    return g * (y * (1 - y)) if y.is_complex() else torch.ops.aten.sigmoid_backward(g, y)


def _swish_pull(g: Tensor, z: Tensor) -> Tensor:
    return g * _swish_derivative(z)  # torch's kernel has no derivative of its own


_ACTIVATIONS = {
    "relu": _Activation(torch.relu, _relu_pull),
    "tanh": _Activation(torch.tanh, _tanh_pull),
    "sigmoid": _Activation(torch.sigmoid, _sigmoid_pull),
    "softplus": _Activation(_softplus, lambda g, y: g * -torch.expm1(-y)),
    "swish": _Activation(_silu, _swish_pull, keeps_z=True),
}
_REAL_ONLY = ("relu", "softplus")  # torch has no complex derivatives of them


def _affine(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if weight.dim() == 2:
        return affine(x, weight, bias)
    if bias is None:
        return x @ weight.mT
    if x.dim() == 3:
        return torch.baddbmm(bias.unsqueeze(-2), x, weight.mT)
    return x @ weight.mT + bias.unsqueeze(-2)


def _transposed(saved: Saved, u: Tensor) -> list[Tensor | None]:
    """The gradients of x W^T + b for a gradient u of its value."""
    x, weight, _ = saved.inputs
    by_x, by_weight, by_bias = saved.needed
    stacked = weight.dim() > 2
    rows = u if stacked else _rows(u)
    grad_weight = product(rows.mT, conj(x if stacked else _rows(x))) if by_weight else None
    grad_x = product(u, conj(weight)) if by_x else None
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
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def _vmap(
    function: type[torch.autograd.Function],
    batch_size: int,
    in_dims: tuple[int | None, ...],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
) -> tuple[Any, Any]:
    def to_front(tensor: Tensor, dim: int | None) -> Tensor:
        return tensor.expand(batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)

    x = to_front(x, in_dims[0])
    lead = x.shape[1:-1]
    if in_dims[1] is not None or in_dims[2] is not None:
        plain = weight.dim() - (in_dims[1] is not None) == 2
        weight = to_front(weight, in_dims[1])
        bias = None if bias is None else to_front(bias, in_dims[2])
        if plain and len(lead) != 1:
            x = x.reshape(batch_size, lead.numel(), x.shape[-1])
    elif weight.dim() > 2:  # stacked by an outer vmap, and constant in this one
        weight = to_front(weight, None)
        bias = None if bias is None else to_front(bias, None)
    output = function.apply(x, weight, bias)
    outputs = output if isinstance(output, tuple) else (output,)
    shaped = tuple(y.reshape(batch_size, *lead, y.shape[-1]) for y in outputs)
    return (shaped, (0,) * len(shaped)) if isinstance(output, tuple) else (shaped[0], 0)


def _make_linear() -> _Layer:
    function = make_function(
        "Linear",
        3,
        forward=_affine,
        backward=_transposed,
        jvp=_tangent,
        vmap=_vmap,
        keep_inputs=(0, 1),
        keep_outputs=(),
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
        u = None if grad is None else act.pull(grad, conj(_kept(saved)))
        if grad_z is not None:
            u = grad_z if u is None else u + grad_z
        assert u is not None
        return _transposed(saved, u)

    def jvp(saved: Saved, *tangents: Tensor | None) -> Any:
        tangent_z = _tangent(saved, *tangents)
        tangent = act.pull(tangent_z, _kept(saved))
        return (tangent, tangent_z) if act.keeps_z else tangent

    def _kept(saved: Saved) -> Tensor:
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


def _apply(layer: _Layer, name: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
    if torch.compiler.is_compiling():
        return _checked(layer, name, x, weight, bias)
    with without_stand_ins():
        return _checked(layer, name, x, weight, bias)


def _checked(layer: _Layer, name: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
    _check(name, x, weight, bias)
    return call(layer.function, layer.reference, *autocast(x, weight, bias))


def autocast(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
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


_LINEAR = _make_linear()
_LINEAR_ACT = {name: _make_linear_act(name, act) for name, act in _ACTIVATIONS.items()}


def plain_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T of operands that were checked."""
    result: Tensor = call(_LINEAR.function, _LINEAR.reference, x, weight, None)
    return result


def activations() -> list[str]:
    """The names that `linear_act` knows."""
    return list(_LINEAR_ACT)


# === Products and sums of tensors: matrices, channels, and element by element.


def matmul(a: Tensor, b: Tensor) -> Tensor:
    r"""Matrix product.

        y = A B        g -> (g B^H, A^H g), summed over the dimensions that were broadcast

    Shapes: a [..., n, k], b [..., k, m]; y [..., n, m], the leading dimensions broadcast. As for
    `torch.matmul`, a vector is a row on the left and a column on the right, and its dimension is
    dropped. Differentiable to any order in both, in reverse and forward mode, under vmap. Under
    autocast the product runs in the autocast dtype.
    Raises TypeError for integer tensors or two dtypes, ValueError for shapes that do not fit.
    """
    validation.differentiable("a", a)
    validation.differentiable("b", b)
    a, b = (
        validation.tensor(name, value) for name, value in zip("ab", autocast(a, b), strict=True)
    )
    _check_product(a, b)
    if b.dim() == 1:
        return _matmul(a, b.unsqueeze(-1)).squeeze(-1)
    if a.dim() == 1:
        return _matmul(a.unsqueeze(0), b).squeeze(-2)
    return _matmul(a, b)


def bias_add(x: Tensor, bias: Tensor, *, dim: int = 1) -> Tensor:
    r"""Add a bias to each channel.

        y = x + b over dimension dim        g -> (g, g summed over the other dimensions)

    Shapes: x any, bias [x.shape[dim]]; y like x. Nothing is kept. In reverse and forward mode, under
    vmap, to any order.
    Raises TypeError for integer tensors, ValueError for a bias of another size or a dim that x lacks.
    """
    validation.differentiable("x", x)
    validation.differentiable("bias", bias)
    axis = validation.dim("dim", dim, x.dim())
    if x.dim() == 0 or bias.shape != x.shape[axis : axis + 1]:
        channels = tuple(x.shape[axis : axis + 1]) if x.dim() else "one dimension in x at least"
        raise ArgumentValueError(
            f"bias: expected {channels}, the size of x {tuple(x.shape)} along dim {dim}, "
            f"got {tuple(bias.shape)}; name the channel dimension with `dim=`."
        )
    return _add(x, bias.reshape(-1, *(1,) * (x.dim() - axis - 1)))


def mul(x: Tensor, p: Tensor | float) -> Tensor:
    r"""Product, element by element.

        y = x p        g -> (g p, g x), summed over the dimensions that were broadcast

    Shapes: x and p broadcast to y. Differentiable to any order in both, in reverse and forward mode,
    under vmap; a p that is a Python number is a constant.
    Raises TypeError for integer tensors.
    """
    validation.differentiable("x", x)
    validation.tensor_or_number("p", p)
    return _mul(x, p)


_add = define(torch.add, [lambda *_: 1, lambda *_: 1], reference=torch.add, keep="none")
_mul = define(
    torch.mul, [lambda x, p, _: p, lambda x, p, _: x], reference=torch.mul, keep="inputs"
)  # fmt: skip


def _check_product(a: Tensor, b: Tensor) -> None:
    if a.dtype != b.dtype:
        raise ArgumentTypeError(
            f"matmul: expected one dtype, got {a.dtype} and {b.dtype}; "
            f"convert one, for instance with `b.to(a.dtype)`."
        )
    fits = a.dim() > 0 and b.dim() > 0 and a.shape[-1] == b.shape[max(b.dim() - 2, 0)]
    if fits:
        leads = reversed(a.shape[:-2]), reversed(b.shape[:-2])
        fits = all(m == n or 1 in (m, n) for m, n in zip(*leads, strict=False))
    if not fits:
        raise ArgumentValueError(
            f"matmul: expected a [..., n, k] and b [..., k, m] with leading dimensions that "
            f"broadcast, got a {tuple(a.shape)} and b {tuple(b.shape)}."
        )


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    if b.dim() == 2:
        # One matrix for all rows: its gradient is one product, not a batch of them to be summed.
        return plain_linear(a, b.mT)
    result: Tensor = call(_MATMUL, torch.matmul, a, b)
    return result


def _matmul_forward(a: Tensor, b: Tensor) -> Tensor:
    return a @ b


def _matmul_backward(saved: Saved, grad: Tensor) -> list[Tensor | None]:
    a, b = saved.inputs
    by_a, by_b = saved.needed
    return [
        sum_to(grad @ conj(b).mT, a.shape) if by_a else None,
        sum_to(conj(a).mT @ grad, b.shape) if by_b else None,
    ]


def _matmul_jvp(saved: Saved, by_a: Tensor | None, by_b: Tensor | None) -> Tensor:
    a, b = saved.inputs
    if by_a is None:
        assert by_b is not None
        return a @ by_b
    return by_a @ b if by_b is None else by_a @ b + a @ by_b


_MATMUL = make_function(
    "MatMul",
    2,
    forward=_matmul_forward,
    backward=_matmul_backward,
    jvp=_matmul_jvp,
    vmap=vmap_broadcasting,  # leading dimensions broadcast, and a batch is one more of them
    keep_outputs=(),
)
