"""Products: of matrices, dense and sparse, element by element, and the sum with a bias."""

import torch
from torch import Tensor

from hoglib._core import validation
from hoglib._core.mixed_precision import is_autocast, upcast_half
from hoglib.errors import ArgumentTypeError, ArgumentValueError
from hoglib.ops._define import define
from hoglib.ops._function import (
    Saved,
    apply_function,
    conj,
    make_function,
    sum_to_shape,
    vmap_by_broadcasting,
)
from hoglib.ops._linear import cast_for_product, linear_unchecked


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
    a, b = (
        validation.tensor(name, value)
        for name, value in zip("ab", cast_for_product(a, b), strict=True)
    )
    _check_product(a, b)
    if b.dim() == 1:
        return _matmul(a, b.unsqueeze(-1)).squeeze(-1)
    if a.dim() == 1:
        return _matmul(a.unsqueeze(0), b).squeeze(-2)
    return _matmul(a, b)


def sparse_mm(mat1: Tensor, mat2: Tensor, *reduce: str) -> Tensor:
    r"""Product of a constant sparse matrix and a dense one, as `torch.sparse.mm`.

        y_i = sum_(j: A_ij stored) A_ij x_j

    torch.sparse.mm has no forward mode. What else it takes is left to it, with its derivatives: two
    sparse matrices, the layout CSR (which torch.func transforms cannot hold), a mat1 that requires
    grad. Half precision is summed in float32; under autocast the result has the dtype of autocast.
    Differentiable by mat2 to any order, in every mode, under vmap.

    Args:
        mat1: A, sparse, in the layout COO.
        mat2: x, dense.
        reduce: A reduction, which is left to torch. Default: the sum.
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


def mul(x: Tensor, p: Tensor | float) -> Tensor:
    r"""Product, element by element.

        y = x p        g -> (g p, g x), summed over the dimensions that were broadcast

    Differentiable to any order in both, in reverse and forward mode, under vmap.

    Args:
        x: A floating-point or complex tensor.
        p: A tensor, or a Python number, which is a constant.
    Returns:
        y, of the promoted dtype.
    Raises:
        TypeError: for integer tensors.
    Shape:
        - x, p: any that broadcast together
        - y: the shape they broadcast to
    Example:
        >>> x, p = torch.tensor(3.0), torch.tensor(2.0)
        >>> hog.ops.mul(x, p)
        tensor(6.)
        >>> hog.hessian(lambda v: hog.ops.mul(v["x"], v["p"]), {"x": x, "p": p})["x"]
        {'x': tensor(0.), 'p': tensor(1.)}
    """
    validation.differentiable("x", x)
    validation.tensor_or_number("p", p)
    return _mul(x, p)


def bias_add(x: Tensor, bias: Tensor, *, dim: int = 1) -> Tensor:
    r"""Add a bias to each channel.

        y = x + b over dimension dim        g -> (g, g summed over the other dimensions)

    Nothing is kept for the derivatives. Differentiable to any order in both, in reverse and forward
    mode, under vmap.

    Args:
        x: A floating-point or complex tensor.
        bias: b.
        dim: The dimension of the channels. Default: 1.
    Returns:
        y, of the promoted dtype.
    Raises:
        TypeError: for integer tensors.
        ValueError: for a bias of another size, or a dim that x lacks.
    Shape:
        - x: any
        - bias: [x.shape[dim]]
        - y: like x
    Example:
        >>> hog.ops.bias_add(torch.zeros(2, 3), torch.tensor([1.0, 2.0, 3.0]))
        tensor([[1., 2., 3.],
                [1., 2., 3.]])
    """
    validation.differentiable("x", x)
    validation.differentiable("bias", bias)
    axis = validation.dim("dim", dim, x.dim())
    if x.dim() == 0 or bias.shape != x.shape[axis : axis + 1]:
        channels = tuple(x.shape[axis : axis + 1]) if x.dim() else "at least one dimension of x"
        raise ArgumentValueError(
            f"bias: expected {channels}, the size of x {tuple(x.shape)} along dim {dim}, "
            f"got {tuple(bias.shape)}; name the channel dimension with `dim=`."
        )
    return _add(x, bias.reshape(-1, *(1,) * (x.dim() - axis - 1)))


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
        return linear_unchecked(a, b.mT)
    result: Tensor = apply_function(_MATMUL, torch.matmul, a, b)
    return result


def _matmul_forward(a: Tensor, b: Tensor) -> Tensor:
    return a @ b


def _matmul_backward(saved: Saved, grad: Tensor) -> list[Tensor | None]:
    a, b = saved.inputs
    by_a, by_b = saved.needs_input_grad
    return [
        sum_to_shape(grad @ conj(b).mT, a.shape) if by_a else None,
        sum_to_shape(conj(a).mT @ grad, b.shape) if by_b else None,
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
    vmap=vmap_by_broadcasting,  # leading dimensions broadcast, and a batch is one more of them
)
