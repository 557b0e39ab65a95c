"""Products, convolutions and reductions, each by its formula and its partial derivatives.

A product is linear in each factor: z = B(x, w) + b. So a tangent of x gives B(dx, w), and a tangent of
w B(x, dw). Two maps, linear in g, take a gradient g of z to the gradients by x and w. For a matrix
product these maps are matrix products; for a convolution, with T(x, w, g) = <conv(x, w), g>,

    X(g, w) = dT/dx   a transposed convolution        W(x, g) = dT/dw   a correlation

torch differentiates these maps, to any order.

Inside a reduction's Function reduced dimensions stay, with size 1, so that saved tensors broadcast to
x; the public functions drop these dimensions.
"""

from collections.abc import Callable, Sequence
from functools import partial, wraps
from math import prod
from typing import Any, NamedTuple, TypedDict, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from hoglib._core.messages import validation
from hoglib._core.problem import check_option_names
from hoglib._core.torch_api.mixed_precision import (
    autocast_on,
    cast_for_product,
    is_autocast,
    upcast_half,
)
from hoglib.errors import ArgumentIndexError, ArgumentTypeError, ArgumentValueError
from hoglib.ops._function import Saved, apply_function, conj, make_function, sum_terms, sum_to_shape
from hoglib.ops._pointwise import clip_gradient
from hoglib.ops._stand_in import IN_FORWARD, NO_FORWARD, stands_in_for

__all__ = [
    "amax",
    "clipped_gradient_linear",
    "conv1d",
    "conv2d",
    "conv3d",
    "linear",
    "linear_act",
    "logsumexp",
    "matmul",
    "mean",
    "sparse_mm",
    "sum",
]

Map = Callable[..., Tensor]


class _Product(NamedTuple):
    """z = B(x, w) + b, and its gradients for a gradient g of z."""

    run: Map  # (x, w, b or None, *options) -> z
    to_x: Map  # (g, x, w, *options) -> the gradient by x
    to_weight: Map  # (g, x, w, *options) -> the gradient by w
    options: int = 0  # the number of options


class _Activation(NamedTuple):
    """y = act(z), and its derivative."""

    forward: Callable[[Tensor], Tensor]  # z -> y
    vjp: Callable[[Tensor, Tensor], Tensor]  # (g, y) -> act' g; with keeps_z (g, z) -> act' g
    keeps_z: bool = False  # save z for the derivative, not y


def _make_product(name: str, product: _Product, act: _Activation | None = None) -> Map:
    """The op (x, w, b, *options) -> z, or act(z).

    If the activation keeps z, the Function returns z as a second output, so that z has a graph.
    """

    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, *options: Any) -> Any:
        z = product.run(x, weight, bias, *options)
        if act is None:
            return z
        return (act.forward(z), z) if act.keeps_z else act.forward(z)

    def backward(saved: Saved, grad: Tensor | None, grad_z: Tensor | None = None) -> Any:
        x, weight, _, *options = saved.inputs
        by_x, by_weight, by_bias, *_ = saved.needs_input_grad
        if act is not None and grad is not None:
            # for a holomorphic act, backward multiplies by the conjugate of act'
            grad = act.vjp(grad, conj(saved.outputs[-1]))
        # z is an output too: the gradient that the derivative of act' sends to z arrives as grad_z
        u = sum_terms(g for g in (grad, grad_z) if g is not None)
        return [
            product.to_x(u, x, weight, *options) if by_x else None,
            product.to_weight(u, x, weight, *options) if by_weight else None,
            sum_to_shape(u, _beside_channels(weight)).reshape(-1) if by_bias else None,
            *[None] * product.options,
        ]

    def jvp(saved: Saved, *tangents: Tensor | None) -> Any:
        (x, weight, _, *options), (by_x, by_weight, by_bias, *_others) = saved.inputs, tangents
        terms = []
        if by_x is not None:
            terms.append(product.run(by_x, weight, None, *options))
        if by_weight is not None:
            terms.append(product.run(x, by_weight, None, *options))
        if by_bias is not None:
            column = by_bias.reshape(_beside_channels(weight)).expand(saved.output_shapes[-1])
            terms.append(column.contiguous())  # torch requires the layout of the output
        tangent_z = sum_terms(terms)
        if act is None:
            return tangent_z
        tangent = act.vjp(tangent_z, saved.outputs[-1])
        return (tangent, tangent_z) if act.keeps_z else tangent

    keeps: Any = {"keep_inputs": (0, 1), "keep_outputs": () if act is None else (int(act.keeps_z),)}
    function = make_function(name, 3 + product.options, forward, backward, jvp, **keeps)

    def op(*inputs: Any) -> Tensor:
        result: Any = apply_function(function, forward, *inputs)
        return result[0] if isinstance(result, tuple) else result

    return op


def _beside_channels(weight: Tensor) -> torch.Size:
    """The shape in which a bias, with one element for each row of the weight, broadcasts to z."""
    return torch.Size([weight.shape[0], *[1] * (weight.dim() - 2)])


# Matrix products.


def matmul(a: Tensor, b: Tensor) -> Tensor:
    r"""Matrix product.

        y = A B        g -> (g B^H, A^H g), summed over the dimensions that were broadcast

    As for `torch.matmul`, a vector is a row on the left and a column on the right, and its dimension is
    dropped. Differentiable to any order in both, in reverse and forward mode, under vmap. Under
    autocast the product runs in the autocast dtype.

    Args:
        a: A, a floating-point or complex tensor.
        b: B, of the dtype of a.
    Returns:
        y.
    Raises:
        TypeError: for integer tensors or two dtypes.
        ValueError: for shapes that do not fit.
    Shape:
        - a: [..., n, k] or [k]
        - b: [..., k, m] or [k]
        - y: [..., n, m], with leading dimensions that broadcast
    Example:
        >>> A, B = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0], [4.0]])
        >>> hog.ops.matmul(A, B)
        tensor([[11.]])
        >>> hog.hvp(lambda A: hog.ops.matmul(A, B).square().sum(), A, torch.ones(1, 2))[1]
        tensor([[42., 56.]])
    """
    validation.differentiable("a", a)
    validation.differentiable("b", b)
    a, b = cast_for_product(a, b)
    _check_product(a, b)
    if b.dim() == 1:
        return _matmul(a, b.unsqueeze(-1)).squeeze(-1)
    if a.dim() == 1:
        return _matmul(a.unsqueeze(0), b).squeeze(-2)
    return _matmul(a, b)


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
    # a matrix b serves all rows: its gradient is one product instead of a sum over a batch of products
    return _LINEAR(a, b.mT, None) if b.dim() == 2 else _MATMUL(a, b, None)


_MATMUL = _make_product(
    "MatMul",
    _Product(
        run=lambda a, b, _: torch.matmul(a, b),
        to_x=lambda g, a, b: sum_to_shape(g @ conj(b).mT, a.shape),
        to_weight=lambda g, a, b: sum_to_shape(conj(a).mT @ g, b.shape),
    ),
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
    _check_linear("linear", x, weight, bias)
    return _LINEAR(*cast_for_product(x, weight, bias))


def linear_act(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, act: str = "tanh"
) -> Tensor:
    r"""Affine map and activation as one Function.

        y = act(z)        z = x W^T + b
        g -> (u W, u^T x summed over the leading dimensions, u summed over them), u = act'(z) g

    Beside the inputs one tensor of the size of y is kept for the derivatives: y, or z for "swish".
    The op is meant for networks of custom Functions, in which one call per layer costs half of two
    calls. In eager mode torch's operations are faster for small layers (half the time at 32 units), and
    equally fast in second-order steps from some hundreds of units on; the compiler makes equal graphs.
    Differentiable to any order in all three, in reverse and forward mode, under vmap. Under autocast
    the product runs in the autocast dtype.

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
    validation.choice("act", act, _LINEAR_ACT)
    if act in _REAL_ONLY:
        validation.real("x", x)
    _check_linear("linear_act", x, weight, bias)
    return _LINEAR_ACT[act](*cast_for_product(x, weight, bias))


def clipped_gradient_linear(x: Tensor, weight: Tensor, *, bound: float) -> Tensor:
    r"""A linear map that clips the gradient by x, and not the gradient by its weight.

        y = x W^T        g -> (min(max(g W, -c), c), g^T x)

    It is `clip_gradient` followed by `linear`, at every order: second derivatives depend on the order
    of modes. In reverse and forward mode, under vmap.

    Args:
        x: A real floating-point tensor.
        weight: W.
        bound: c, a Python number of at least 0.
    Returns:
        y.
    Raises:
        TypeError: for integer or complex tensors, or a bound other than a Python number.
        ValueError: for shapes that do not fit, or a negative bound.
    Shape:
        - x: [..., in]
        - weight: [out, in]
        - y: [..., out]
    Example:
        >>> x, W = torch.ones(1, 2), torch.tensor([[0.5, 3.0]])
        >>> f = lambda x, W: hog.ops.clipped_gradient_linear(x, W, bound=1.0).sum()
        >>> torch.func.grad(f, (0, 1))(x, W)
        (tensor([[0.5000, 1.0000]]), tensor([[1., 1.]]))
    """
    validation.real("weight", weight)
    return linear(clip_gradient(x, bound=bound), weight)


def _check_tensors(x: Tensor, weight: Tensor, bias: Tensor | None) -> str:
    """Check the dtypes; return the shapes in words, for the message of a later check."""
    validation.differentiable("x", x)
    validation.differentiable("weight", weight)
    if bias is None:
        return f"x {tuple(x.shape)}, weight {tuple(weight.shape)}"
    validation.differentiable("bias", bias)
    return f"x {tuple(x.shape)}, weight {tuple(weight.shape)}, bias {tuple(bias.shape)}"


def _check_linear(name: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    got = _check_tensors(x, weight, bias)
    fits = x.dim() >= 1 and weight.dim() == 2 and x.shape[-1] == weight.shape[1]
    if not fits or (bias is not None and bias.shape != weight.shape[:1]):
        raise ArgumentValueError(
            f"{name}: expected x [..., in], weight [out, in] and bias [out] or None, got {got}; "
            f"a transposed weight is passed as `weight.mT`."
        )


def _rows(tensor: Tensor) -> Tensor:
    # not reshape(-1, n), which fails for n = 0
    return tensor.reshape(tensor.shape[:-1].numel(), tensor.shape[-1])


def _softplus(z: Tensor) -> Tensor:
    # torch's default threshold of 20 leaves an error of 2e-9, too large for float64
    return F.softplus(z, threshold=40)


def _silu(z: Tensor) -> Tensor:
    return z * torch.sigmoid(z) if z.is_complex() else F.silu(z)  # F.silu refuses complex numbers


# Real numbers use torch's backward kernels, which torch differentiates to any order: one call, and less
# memory for the second derivative than the formulas, which serve complex numbers.


def _tanh_vjp(g: Tensor, y: Tensor) -> Tensor:
    return g * (1 - y * y) if y.is_complex() else torch.ops.aten.tanh_backward(g, y)


def _sigmoid_vjp(g: Tensor, y: Tensor) -> Tensor:
    return g * (y * (1 - y)) if y.is_complex() else torch.ops.aten.sigmoid_backward(g, y)


def _swish_vjp(g: Tensor, z: Tensor) -> Tensor:
    s = torch.sigmoid(z)  # a formula, because torch's silu_backward has no derivative
    return g * (s * (1 + z * (1 - s)))


_ACTIVATIONS = {
    "relu": _Activation(torch.relu, lambda g, y: torch.ops.aten.threshold_backward(g, y, 0)),
    "tanh": _Activation(torch.tanh, _tanh_vjp),
    "sigmoid": _Activation(torch.sigmoid, _sigmoid_vjp),
    "softplus": _Activation(_softplus, lambda g, y: g * -torch.expm1(-y)),
    "swish": _Activation(_silu, _swish_vjp, keeps_z=True),
}
_REAL_ONLY = ("relu", "softplus")  # torch has no complex derivatives for these
_AFFINE = _Product(
    run=F.linear,
    to_x=lambda g, x, weight: g @ conj(weight),
    to_weight=lambda g, x, weight: _rows(g).mT @ conj(_rows(x)),
)
_LINEAR = _make_product("Linear", _AFFINE)
_LINEAR_ACT = {
    name: _make_product(f"Linear{name.capitalize()}", _AFFINE, act)
    for name, act in _ACTIVATIONS.items()
}


@stands_in_for(torch.sparse.mm, name="sparse.mm", lacks=NO_FORWARD, modes=IN_FORWARD)
def sparse_mm(mat1: Tensor, mat2: Tensor, *reduce: str) -> Tensor:
    r"""Product of a constant sparse matrix and a dense one, as `torch.sparse.mm`.

        y_i = sum_(j: A_ij stored) A_ij x_j

    torch.sparse.mm has no forward mode. Two sparse matrices, the layout CSR (which torch.func
    transforms cannot hold) and a mat1 that requires grad go to torch.sparse.mm, with its derivatives.
    Half precision is summed in float32; under autocast the result has the dtype of autocast.
    Differentiable by mat2 to any order, in every mode, under vmap.

    Args:
        mat1: A, sparse, in the layout COO.
        mat2: x, dense.
        reduce: A reduction, computed by torch. Default: the sum.
    Returns:
        y, dense.
    Raises:
        RuntimeError: where torch raises it, for shapes and dtypes that do not fit.
    Shape:
        - mat1: (n, m)
        - mat2: (m, k)
        - y: (n, k)
    Example:
        >>> A = torch.sparse_coo_tensor([[0], [1]], [2.0], (2, 2), check_invariants=True)
        >>> x = torch.ones(2, 1)
        >>> torch.func.jvp(lambda x: hog.ops.sparse_mm(A, x), (x,), (x,))[1]
        tensor([[2.],
                [0.]])
    """
    layouts = mat1.is_sparse and mat2.layout == torch.strided and mat1.dtype == mat2.dtype
    shapes = mat1.dim() == mat2.dim() == 2 and mat1.shape[1] == mat2.shape[0]
    if reduce or mat1.requires_grad or not layouts or not shapes:
        return torch.sparse.mm(mat1, mat2, *reduce)
    rows, columns = mat1._indices().unbind()  # entries of one place add up, coalesced or not
    terms = upcast_half(mat1._values()).unsqueeze(-1) * mat2.index_select(0, columns)
    y = terms.new_zeros(mat1.shape[0], mat2.shape[1]).index_add(0, rows, terms)
    return y.to(torch.get_autocast_dtype(mat2.device.type) if is_autocast(mat2) else mat2.dtype)


# Convolutions.

Size = int | Sequence[int]


class ConvOptions(TypedDict, total=False):
    """The options of a convolution."""

    stride: Size
    padding: Size | str
    dilation: Size
    groups: int


def conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, **options: Unpack[ConvOptions]
) -> Tensor:
    r"""Convolution over one dimension (cross-correlation, as everywhere in deep learning).

        y[n, o, t] = b[o] + sum over c, k of w[o, c, k] x[n, c, t s + k d - p]
        g -> (transposed convolution of g with w, correlation of x with g, sum of g over n and t)

    Differentiable to any order in x, weight and bias, in every mode and under vmap, for real and
    complex tensors. Under autocast it runs in the autocast dtype, as torch's own does.

    Args:
        x: A floating-point or complex tensor.
        weight: w.
        bias: b. Default: none.
        options: ``stride`` s and ``dilation`` d, an int or one for each dimension. Default: 1.
            ``padding`` p, the zeros at both ends, an int or one for each dimension; "valid" (none) or
            "same" (y as large as x, for stride 1; of an odd total the extra zero goes to the end).
            Default: 0. ``groups`` of channels that are convolved separately. Default: 1.
    Returns:
        y.
    Raises:
        TypeError: for integer tensors, tensors of several dtypes, or options that are not integers.
        ValueError: for shapes or options that do not fit.
    Shape:
        - x: [N, C, L] or [C, L]
        - weight: [O, C / groups, K]
        - bias: [O]
        - y: [N, O, L'] or [O, L'], with L' = (L + 2 p - d (K - 1) - 1) // s + 1
    Example:
        >>> x, w = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[[1.0, -1.0]]])
        >>> hog.ops.conv1d(x, w)
        tensor([[-1., -1.]])
        >>> hog.hvp(lambda w: hog.ops.conv1d(x, w).square().sum(), w, torch.ones(1, 1, 2))[1]
        tensor([[[26., 42.]]])
    """
    return _conv(1, x, weight, bias, options)


def conv2d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, **options: Unpack[ConvOptions]
) -> Tensor:
    r"""Convolution over two dimensions.

        y[n, o, t] = b[o] + sum over c, k of w[o, c, k] x[n, c, t s + k d - p], t and k pairs
        g -> (transposed convolution of g with w, correlation of x with g, sum of g over n and t)

    Differentiable to any order in x, weight and bias, in every mode and under vmap, for real and
    complex tensors. Under autocast it runs in the autocast dtype, as torch's own does.

    Args:
        x: A floating-point or complex tensor.
        weight: w.
        bias: b. Default: none.
        options: ``stride`` s and ``dilation`` d, an int or one for each dimension. Default: 1.
            ``padding`` p, the zeros at both ends, an int or one for each dimension; "valid" (none) or
            "same" (y as large as x, for stride 1; of an odd total the extra zero goes to the end).
            Default: 0. ``groups`` of channels that are convolved separately. Default: 1.
    Returns:
        y.
    Raises:
        TypeError: for integer tensors, tensors of several dtypes, or options that are not integers.
        ValueError: for shapes or options that do not fit.
    Shape:
        - x: [N, C, H, W] or [C, H, W]
        - weight: [O, C / groups, K, K']
        - bias: [O]
        - y: [N, O, H', W'] or [O, H', W'], with H' = (H + 2 p - d (K - 1) - 1) // s + 1, W' likewise
    Example:
        >>> x, w = torch.ones(1, 2, 2), torch.tensor([[[[1.0, 2.0]]]])
        >>> hog.ops.conv2d(x, w)
        tensor([[[3.],
                 [3.]]])
        >>> hog.hvp(lambda w: hog.ops.conv2d(x, w).square().sum(), w, torch.ones(1, 1, 1, 2))[1]
        tensor([[[[8., 8.]]]])
    """
    return _conv(2, x, weight, bias, options)


def conv3d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, **options: Unpack[ConvOptions]
) -> Tensor:
    r"""Convolution over three dimensions.

        y[n, o, t] = b[o] + sum over c, k of w[o, c, k] x[n, c, t s + k d - p], t and k triples
        g -> (transposed convolution of g with w, correlation of x with g, sum of g over n and t)

    Differentiable to any order in x, weight and bias, in every mode and under vmap, for real and
    complex tensors. Under autocast it runs in the autocast dtype, as torch's own does.

    Args:
        x: A floating-point or complex tensor.
        weight: w.
        bias: b. Default: none.
        options: ``stride`` s and ``dilation`` d, an int or one for each dimension. Default: 1.
            ``padding`` p, the zeros at both ends, an int or one for each dimension; "valid" (none) or
            "same" (y as large as x, for stride 1; of an odd total the extra zero goes to the end).
            Default: 0. ``groups`` of channels that are convolved separately. Default: 1.
    Returns:
        y.
    Raises:
        TypeError: for integer tensors, tensors of several dtypes, or options that are not integers.
        ValueError: for shapes or options that do not fit.
    Shape:
        - x: [N, C, D, H, W] or [C, D, H, W]
        - weight: [O, C / groups, K, K', K'']
        - bias: [O]
        - y: [N, O, D', H', W'] or [O, D', H', W'], with D' = (D + 2 p - d (K - 1) - 1) // s + 1, and
          H' and W' likewise
    Example:
        >>> x, w = torch.ones(1, 2, 2, 2), torch.ones(1, 1, 2, 2, 2)
        >>> hog.ops.conv3d(x, w)
        tensor([[[[8.]]]])
        >>> hog.hvp(lambda w: hog.ops.conv3d(x, w).square().sum(), w, w)[1][0, 0, 0]
        tensor([[16., 16.],
                [16., 16.]])
    """
    return _conv(3, x, weight, bias, options)


def _conv(rank: int, x: Tensor, weight: Tensor, b: Tensor | None, options: ConvOptions) -> Tensor:
    check_option_names(f"conv{rank}d", options, tuple(ConvOptions.__annotations__))
    padding, groups = options.get("padding", 0), options.get("groups", 1)
    _check_conv(rank, x, weight, b, validation.at_least("groups", groups, 1))
    strides = _one_for_each("stride", options.get("stride", 1), rank, 1)
    dilations = _one_for_each("dilation", options.get("dilation", 1), rank, 1)
    kernel, extra = tuple(weight.shape[2:]), [0] * rank
    if not isinstance(padding, str):
        pads = _one_for_each("padding", padding, rank, 0)
    elif validation.choice("padding", padding, ["same", "valid"]) == "valid":
        pads = (0,) * rank
    elif any(step != 1 for step in strides):
        raise ArgumentValueError(
            f"padding: expected a number with stride {strides}, got 'same', which needs stride 1."
        )
    else:
        totals = [d * (k - 1) for d, k in zip(dilations, kernel, strict=True)]
        pads, extra = tuple(n // 2 for n in totals), [n % 2 for n in totals]
    x, weight, b = cast_for_product(x, weight, b)
    if any(extra):
        # F.pad counts dimensions from the last
        x = F.pad(x, [n for right in reversed(extra) for n in (0, right)])
    image = tuple(x.shape[-rank:])
    for size, pad, d, k in zip(image, pads, dilations, kernel, strict=True):
        if k < 1 or size + 2 * pad < d * (k - 1) + 1:
            raise ArgumentValueError(
                f"conv{rank}d: expected a kernel that fits into the padded input, got sizes "
                f"{image} padded by {pads}, kernel {kernel} and "
                f"dilation {dilations}; add padding, or use a smaller kernel."
            )
    batched = x if x.dim() == rank + 2 else x.unsqueeze(0)
    y = _CONV(batched, weight, b, strides, pads, dilations, groups)
    return y if x.dim() == rank + 2 else y.squeeze(0)


def _one_for_each(what: str, value: object, rank: int, minimum: int) -> tuple[int, ...]:
    if not isinstance(value, tuple | list):
        return (validation.at_least(what, value, minimum),) * rank
    if len(value) not in (1, rank):
        text = f"{what}: expected an integer or {rank} of them, got {tuple(value)}."
        raise ArgumentValueError(text)
    numbers = tuple(validation.at_least(f"{what}[{i}]", n, minimum) for i, n in enumerate(value))
    return numbers * rank if len(numbers) == 1 else numbers


def _check_conv(rank: int, x: Tensor, weight: Tensor, bias: Tensor | None, groups: int) -> None:
    got = _check_tensors(x, weight, bias)
    dims = x.dim() in (rank + 1, rank + 2) and weight.dim() == rank + 2
    fits = dims and x.shape[-rank - 1] == weight.shape[1] * groups and weight.shape[0] % groups == 0
    if not fits or (bias is not None and bias.shape != weight.shape[:1]):
        sizes = ("L", "H, W", "D, H, W")[rank - 1]
        raise ArgumentValueError(
            f"conv{rank}d: expected x [N, C, {sizes}] or [C, {sizes}], weight [O, C / groups, one size "
            f"a dimension] with O a multiple of groups, and bias [O] or None, got {got} and "
            f"groups={groups}."
        )
    dtypes = {t.dtype for t in (x, weight, bias) if t is not None}
    if len(dtypes) > 1 and not autocast_on(x.device.type):
        raise ArgumentTypeError(
            f"conv{rank}d: expected x, weight and bias of one dtype, got x {x.dtype}, weight "
            f"{weight.dtype}" + ("" if bias is None else f", bias {bias.dtype}") + "; convert one."
        )


def _convolve(x: Tensor, weight: Tensor, bias: Tensor | None, *options: Any) -> Tensor:
    return (F.conv1d, F.conv2d, F.conv3d)[weight.dim() - 3](x, weight, bias, *options)


def _send_back(
    which: int, g: Tensor, x: Tensor, weight: Tensor, stride: tuple[int, ...], *others: Any
) -> Tensor:
    """X(g, w) (which = 0) or W(x, g) (which = 1) by torch's kernel.

    The kernel reads only the shape of the tensor that it differentiates by.
    """
    padding, dilation, groups = others
    options = None, stride, padding, dilation, False, [0] * len(stride), groups
    mask = [which == 0, which == 1, False]

    def kernel(g: Tensor, other: Tensor) -> Tensor:
        given = (g, x.real, other) if which == 0 else (g, other, weight.real)
        return torch.ops.aten.convolution_backward(*given, *options, mask)[which]

    other = conj(weight if which == 0 else x)
    if not g.numel():  # torch's kernel would return zeros without a graph
        return (g.sum() * other.sum()).expand((x, weight)[which].shape)
    if not g.is_complex():
        return kernel(g, other)
    # the kernel takes real numbers and is linear in both: four calls make a complex product
    real = kernel(g.real, other.real) - kernel(g.imag, other.imag)
    return torch.complex(real, kernel(g.real, other.imag) + kernel(g.imag, other.real))


_CONVOLUTION = _Product(_convolve, partial(_send_back, 0), partial(_send_back, 1), options=4)
_CONV = _make_product("Conv", _CONVOLUTION)


# Reductions.

Dims = Any  # an int or a sequence of ints; None and () mean all dimensions


def _reduction(name: str, share: Map, *, keep: bool = False) -> Callable[[Map], Map]:
    """A decorator that makes a reduction y of a formula, with dy = sum_i share(dx_i).

    share: share(u, shape, dims) multiplies u by the partial derivatives; with keep,
        share(u, shape, dims, x, y).
    keep: save x and y.
    """

    def backward(saved: Saved, grad: Tensor) -> list[Tensor | None]:
        (x, dims), (y,), (shape, _) = saved.inputs, saved.outputs, saved.input_shapes
        kept = (conj(x), conj(y)) if keep else ()
        # expand only at the end: a share that is constant along a dimension needs little memory
        return [share(grad, shape, dims, *kept).expand(shape), None]

    def jvp(saved: Saved, tangent: Tensor, _: None) -> Tensor:
        (x, dims), (y,) = saved.inputs, saved.outputs
        kept = (x, y) if keep else ()
        # dy = sum_i share(dx_i), with keepdim
        return torch.sum(share(tangent, tangent.shape, dims, *kept), dims, True)

    def make(formula: Map) -> Map:
        forward = partial(formula, keepdim=True)
        kept = (0,) if keep else ()
        keeps: Any = {"keep_inputs": kept, "keep_outputs": kept}
        function = make_function(name, 2, forward, backward, jvp, **keeps)

        @wraps(formula)
        def reduce(x: Tensor, dim: Dims, *, keepdim: bool = False) -> Tensor:
            validation.differentiable("x", x)
            validation.boolean("keepdim", keepdim)
            dims = validation.dims("dim", dim, x.dim())
            rows = x if x.dim() else x.reshape(1)
            y: Tensor = apply_function(function, forward, rows, dims)
            if x.dim() == 0:
                return y.reshape(())
            return y if keepdim else y.squeeze(dims)

        return reduce

    return make


@_reduction("Sum", lambda u, *_: u)
def sum(x: Tensor, dim: Dims, *, keepdim: bool = False) -> Tensor:
    r"""Sum over dimensions.

        y = sum_i x_i        g -> g for every i

    The sum of an empty dimension is 0. Nothing is kept for the derivatives. Differentiable to any
    order, in reverse and forward mode, under vmap.

    Args:
        x: A floating-point or complex tensor.
        dim: The dimensions to reduce, an int or several; None and () mean all.
        keepdim: Whether the reduced dimensions stay, with size 1. Default: False.
    Returns:
        y, of the dtype of x.
    Raises:
        TypeError: for an integer x.
        IndexError: for a dim that x lacks; also a ValueError.
    Shape:
        - x: any
        - y: x without the dimensions dim, or with size 1 there
    Example:
        >>> hog.ops.sum(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), 0)
        tensor([4., 6.])
    """
    return torch.sum(x, dim, keepdim)


@_reduction("Mean", lambda u, shape, dims: u / prod(shape[d] for d in dims))
def mean(x: Tensor, dim: Dims, *, keepdim: bool = False) -> Tensor:
    r"""Mean over dimensions.

        y = sum_i x_i / n        g -> g / n for every i

    n is the number of averaged entries; the mean of no entries is NaN, as in torch. Nothing is kept
    for the derivatives. Differentiable to any order, in reverse and forward mode, under vmap.

    Args:
        x: A floating-point or complex tensor.
        dim: The dimensions to reduce, an int or several; None and () mean all.
        keepdim: Whether the reduced dimensions stay, with size 1. Default: False.
    Returns:
        y, of the dtype of x.
    Raises:
        TypeError: for an integer x.
        IndexError: for a dim that x lacks; also a ValueError.
    Shape:
        - x: any
        - y: x without the dimensions dim, or with size 1 there
    Example:
        >>> hog.ops.mean(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), 0)
        tensor([2., 3.])
    """
    return torch.mean(x, dim, keepdim)


def amax(x: Tensor, dim: Dims, *, keepdim: bool = False) -> Tensor:
    r"""Maximum over dimensions.

        y = max_i x_i        g -> g / m where x_i = y, else 0

    m is the number of entries that attain the maximum: they share the gradient equally, as in
    torch.amax. The second derivative is 0, away from ties and, by this rule, at them. x and y are kept
    for the derivatives. In reverse and forward mode, under vmap.

    Args:
        x: A real floating-point tensor.
        dim: The dimensions to reduce, an int or several; None and () mean all.
        keepdim: Whether the reduced dimensions stay, with size 1. Default: False.
    Returns:
        y, of the dtype of x.
    Raises:
        TypeError: for an integer or complex x.
        IndexError: for a dim that x lacks or of size 0; also a ValueError.
    Shape:
        - x: any
        - y: x without the dimensions dim, or with size 1 there
    Example:
        >>> x = torch.tensor([1.0, 3.0, 3.0])
        >>> hog.ops.amax(x, 0), torch.func.grad(lambda x: hog.ops.amax(x, 0))(x)
        (tensor(3.), tensor([0.0000, 0.5000, 0.5000]))
    """
    validation.real("x", x)
    dims = validation.dims("dim", dim, x.dim())
    if x.dim() and 0 in [x.shape[d] for d in dims]:
        raise ArgumentIndexError(
            f"dim: expected dimensions with entries, got {dim} of x {tuple(x.shape)}; "
            f"an empty dimension has no maximum."
        )
    return _amax(x, dim, keepdim=keepdim)


def _share_of_maximum(u: Tensor, _: object, dims: tuple[int, ...], x: Tensor, y: Tensor) -> Tensor:
    attained = x == y
    return torch.where(attained, u, 0) / attained.sum(dims, True)


_amax = _reduction("AMax", _share_of_maximum, keep=True)(torch.amax)


@_reduction("LogSumExp", lambda u, shape, dims, x, y: u * torch.exp(x - y), keep=True)
def logsumexp(x: Tensor, dim: Dims, *, keepdim: bool = False) -> Tensor:
    r"""Logarithm of a sum of exponentials.

        y = m + log sum_i exp(x_i - m), m = max_i x_i        dy/dx_i = p_i = exp(x_i - y)
        d2y/dx_i dx_j = p_i (i = j) - p_i p_j

    As in torch, y of a row of -inf is -inf and has derivatives NaN; a row with other entries gives
    its -inf the derivative 0; y of an empty dimension is -inf. x and y are kept for the derivatives.
    Differentiable to any order, in reverse and forward mode, under vmap.

    Args:
        x: A floating-point or complex tensor.
        dim: The dimensions to reduce, an int or several; None and () mean all.
        keepdim: Whether the reduced dimensions stay, with size 1. Default: False.
    Returns:
        y, of the dtype of x.
    Raises:
        TypeError: for an integer x.
        IndexError: for a dim that x lacks; also a ValueError.
    Shape:
        - x: any
        - y: x without the dimensions dim, or with size 1 there
    Example:
        >>> x = torch.zeros(2)
        >>> hog.ops.logsumexp(x, 0), hog.hessian(lambda x: hog.ops.logsumexp(x, 0), x)
        (tensor(0.6931), tensor([[ 0.2500, -0.2500],
                [-0.2500,  0.2500]]))
    """
    return torch.logsumexp(x, dim, keepdim)
