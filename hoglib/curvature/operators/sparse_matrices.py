"""Sparse Hessians and Jacobians of functions of one tensor."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from hoglib._core.messages import validation
from hoglib._core.messages.closures import owner_of
from hoglib._core.numerics.sparsity import read_sparse
from hoglib._core.substrate.placement import refuse_sharded
from hoglib.capture.within import run_uncompiled, when_compiled
from hoglib.curvature.operators.jacobian_operator import JacobianOperator
from hoglib.curvature.operators.operators import HessianOperator


@when_compiled(run_uncompiled)
def sparse_hessian(
    func: Callable[..., Tensor],
    x: Tensor,
    *args: Any,
    sparsity: object = None,
    chunk_size: int | None = None,
    progress: bool = False,
) -> Tensor:
    r"""The Hessian of a scalar function as a sparse matrix, by a few Hessian-vector products.

        H_ij = d^2 func(x, *args) / dx_i dx_j        i, j number the elements of x

    Columns that share no row are multiplied at once: a Hessian whose rows have s entries takes about s
    products, whatever its size. The pattern is found by products with random vectors, by some 4 s more
    for each factor of 4 in the size; later calls of func with an x of this shape try it again. The
    result is compared with one more product, so that a wrong pattern raises.

    Args:
        func: The function ``func(x, *args)``, which returns a scalar.
        x: A floating-point tensor of any shape.
        *args: Further arguments of func.
        sparsity: The pattern: a tensor of the Hessian's shape in any layout, such as an earlier result;
            `hoglib.curvature.Band(width)`; `hoglib.curvature.DiagonalBlocks(size)`. None finds it.
        chunk_size: Products side by side. Default: as many as memory holds.
        progress: Show a bar that counts products (needs tqdm).
    Returns:
        A `torch.sparse_csr` tensor [n, n] with n the number of elements of x, without gradients.
    Raises:
        ArgumentTypeError, ArgumentValueError: for an x that is no real floating-point tensor, for a
            sparsity that is no pattern of this shape, and where the Hessian has entries outside of it.
        LossError: for a func that returns no scalar.
        UnsupportedError: for a DTensor.
    References:
        Curtis, Powell and Reid, On the Estimation of Sparse Jacobian Matrices, 1974 (colours).
        Griewank and Mitev, Detecting Jacobian Sparsity Patterns by Bayesian Probing, 2002 (patterns).
    Example:
        >>> x = torch.arange(4.0)
        >>> H = hog.sparse_hessian(lambda x: (x.diff() ** 3).sum(), x)
        >>> H.to_dense()
        tensor([[ 6., -6.,  0.,  0.],
                [-6., 12., -6.,  0.],
                [ 0., -6., 12., -6.],
                [ 0.,  0., -6.,  6.]])
    """
    validation.function("func", func)
    refuse_sharded("sparse_hessian", [validation.real("x", x)], "x")
    H = HessianOperator(lambda x, args: func(x, *args), x.detach(), args, progress=progress)
    return read_sparse(H, sparsity, owner_of(func), "sparse_hessian", chunk_size).to_csr()


@when_compiled(run_uncompiled)
def sparse_jacobian(
    func: Callable[..., Tensor],
    x: Tensor,
    *args: Any,
    sparsity: object = None,
    chunk_size: int | None = None,
    progress: bool = False,
) -> Tensor:
    r"""The Jacobian of a function as a sparse matrix, by a few products with it and its transpose.

        J_ij = d func(x, *args)_i / dx_j        i, j number the elements of the output and of x

    Columns that share no row are multiplied at once, or rows that share no column, where that takes
    fewer products; rows with many entries are read by transposed products. `sparse_hessian` describes
    how the pattern is found and compared.

    Args:
        func: The function ``func(x, *args)``, which returns a tensor of any shape.
        x: A floating-point tensor of any shape.
        *args: Further arguments of func.
        sparsity: The pattern: a tensor of the Jacobian's shape in any layout, such as an earlier
            result; `hoglib.curvature.Band(width)`; `hoglib.curvature.DiagonalBlocks(size)`. None
            finds it.
        chunk_size: Products side by side. Default: as many as memory holds.
        progress: Show a bar that counts products (needs tqdm).
    Returns:
        A `torch.sparse_csr` tensor [m, n] with m and n the numbers of elements of the output and of x,
        without gradients.
    Raises:
        ArgumentTypeError, ArgumentValueError: for an x that is no real floating-point tensor, for a
            sparsity that is no pattern of this shape, and where the Jacobian has entries outside of it.
        UnsupportedError: for a DTensor.
    References:
        As of `sparse_hessian`.
    Example:
        >>> J = hog.sparse_jacobian(lambda x: x.diff() ** 2, torch.tensor([0.0, 1.0, 3.0]))
        >>> J.to_dense()
        tensor([[-2.,  2.,  0.],
                [ 0., -4.,  4.]])
    """
    validation.function("func", func)
    refuse_sharded("sparse_jacobian", [validation.real("x", x)], "x")
    J = JacobianOperator(lambda x, args: func(x, *args), x.detach(), args, progress=progress)
    return read_sparse(J, sparsity, owner_of(func), "sparse_jacobian", chunk_size).to_csr()
