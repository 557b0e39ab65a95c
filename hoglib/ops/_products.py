"""Products and sums of tensors: matrices, channels, and element by element."""

import torch
from torch import Tensor

from hoglib import _arguments as arguments
from hoglib.ops._broadcasting import sum_to, vmap_broadcasting
from hoglib.ops._define import Saved, call, conj, define, make_function
from hoglib.ops._linear import autocast, plain_linear


def matmul(a: Tensor, b: Tensor) -> Tensor:
    r"""Matrix product.

        y = A B        g -> (g B^H, A^H g), summed over the dimensions that were broadcast

    Shapes: a [..., n, k], b [..., k, m]; y [..., n, m], the leading dimensions broadcast. As for
    `torch.matmul`, a vector is a row on the left and a column on the right, and its dimension is
    dropped. Differentiable to any order in both, in reverse and forward mode, under vmap. Under
    autocast the product runs in the autocast dtype.
    Raises TypeError for integer tensors or two dtypes, ValueError for shapes that do not fit.
    """
    arguments.differentiable("a", a)
    arguments.differentiable("b", b)
    a, b = (arguments.tensor(name, value) for name, value in zip("ab", autocast(a, b), strict=True))
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
    arguments.differentiable("x", x)
    arguments.differentiable("bias", bias)
    axis = arguments.dim("dim", dim, x.dim())
    if x.dim() == 0 or bias.shape != x.shape[axis : axis + 1]:
        channels = tuple(x.shape[axis : axis + 1]) if x.dim() else "one dimension in x at least"
        raise arguments.WrongValue(
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
    arguments.differentiable("x", x)
    arguments.tensor_or_number("p", p)
    return _mul(x, p)


_add = define(torch.add, [lambda *_: 1, lambda *_: 1], reference=torch.add, keep="none")
_mul = define(
    torch.mul, [lambda x, p, _: p, lambda x, p, _: x], reference=torch.mul, keep="inputs"
)  # fmt: skip


def _check_product(a: Tensor, b: Tensor) -> None:
    if a.dtype != b.dtype:
        raise arguments.WrongType(
            f"matmul: expected one dtype, got {a.dtype} and {b.dtype}; "
            f"convert one, for instance with `b.to(a.dtype)`."
        )
    fits = a.dim() > 0 and b.dim() > 0 and a.shape[-1] == b.shape[max(b.dim() - 2, 0)]
    if fits:
        leads = reversed(a.shape[:-2]), reversed(b.shape[:-2])
        fits = all(m == n or 1 in (m, n) for m, n in zip(*leads, strict=False))
    if not fits:
        raise arguments.WrongValue(
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
