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

    Columns without a common row are multiplied at once: a Hessian with s entries in each row takes
    about s products, for any number of rows. Products with random vectors find the pattern: about 4
    times s for each factor of 4 in the number of rows. Later calls of func with an x of this shape try
    the known pattern first. One more product checks the result, so a wrong pattern raises.

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
        ArgumentTypeError, ArgumentValueError: unless x is a real floating-point tensor, sparsity has
            the Hessian's shape, and the Hessian has no entries outside the pattern; and for a func
            without a scalar result.
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

    Columns without a common row, or rows without a common column, are multiplied at once, by the way
    with fewer products; transposed products read rows with many entries. `sparse_hessian` describes
    how the pattern is found and checked.

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
        ArgumentTypeError, ArgumentValueError: unless x is a real floating-point tensor, sparsity has
            the Jacobian's shape, and the Jacobian has no entries outside the pattern.
        UnsupportedError: for a DTensor.
    References:
        The references of `sparse_hessian`.
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
