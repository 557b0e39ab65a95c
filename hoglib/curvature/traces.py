"""Traces, diagonals and norms of operators, estimated from products with random vectors."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hoglib._core import validation
from hoglib.curvature import random_rows
from hoglib.curvature.vector_space import SymmetricMatrix, check_operator

AT_ONCE = 2**28  # bytes of random vectors that are multiplied at once


class Estimate(NamedTuple):
    """A mean over random samples.

    Attributes:
        value: The mean.
        error: One standard error of it; infinite for a single sample.
    """

    value: Tensor
    error: Tensor


def hutchinson_trace(
    operator: SymmetricMatrix,
    num_samples: int = 64,
    *,
    generator: torch.Generator | None = None,
    return_error: bool = False,
) -> Any:
    r"""The trace of an operator, from random vectors v of independent signs.

        tr A = E[v^T A v]        Var[v^T A v] = 2 sum over i != j of A_ij^2

    Args:
        operator: The matrix A [P, P], a `LinearOperator`.
        num_samples: Random vectors, one product each.
        generator: Of the random vectors; None is torch's global generator.
        return_error: Return the standard error, too.
    Returns:
        The mean over the vectors, a scalar tensor; with ``return_error`` an `Estimate`.
    References:
        Hutchinson, A Stochastic Estimator of the Trace of the Influence Matrix, 1990.
    Example:
        >>> A = hog.HessianOperator(lambda p, x: (p * x).square().sum(), torch.ones(2), torch.ones(2))
        >>> hog.curvature.hutchinson_trace(A, 4)  # exact, for the matrix is diagonal
        tensor(4.)
    """
    check_operator(operator)
    dots = operator.space.dots
    values = [dots((v, Av))[0] for v, Av in _samples(operator, num_samples, generator)]
    found = mean_of(torch.cat(values))
    return found if return_error else found.value


def hutchinson_diagonal(
    operator: SymmetricMatrix,
    num_samples: int = 64,
    *,
    generator: torch.Generator | None = None,
    return_error: bool = False,
) -> Any:
    r"""The diagonal of an operator, from random vectors v of independent signs.

        diag A = E[v * A v]        Var[(v * A v)_i] = sum over j != i of A_ij^2

    Args:
        operator: The matrix A [P, P], a `LinearOperator`.
        num_samples: Random vectors, one product each.
        generator: Of the random vectors; None is torch's global generator.
        return_error: Return the standard errors, too.
    Returns:
        The mean over the vectors, [P]; with ``return_error`` an `Estimate` of two such tensors.
    References:
        Bekas, Kokiopoulou and Saad, An Estimator for the Diagonal of a Matrix, 2007.
    Example:
        >>> A = hog.HessianOperator(lambda p, x: (p * x).square().sum(), torch.ones(2), torch.ones(2))
        >>> hog.curvature.hutchinson_diagonal(A, 4)
        tensor([2., 2.])
    """
    check_operator(operator)
    count, total, squares = 0, None, None
    for v, Av in _samples(operator, num_samples, generator):
        for product in v * Av:
            count += 1
            if total is None or squares is None:
                total, squares = product.clone(), torch.zeros_like(product)
                continue
            change = product - total  # Welford's algorithm, which keeps no samples
            total += change / count
            squares += change * (product - total)
    assert total is not None
    assert squares is not None
    if not return_error:
        return total
    return Estimate(total, (squares / max(count - 1, 1) / count).sqrt())


def hutchinson_frobenius(
    operator: SymmetricMatrix,
    num_samples: int = 64,
    *,
    generator: torch.Generator | None = None,
    return_error: bool = False,
) -> Any:
    r"""The squared Frobenius norm of an operator, from random vectors v of independent signs.

        |A|_F^2 = sum of A_ij^2 = E[|A v|^2]

    Args:
        operator: The matrix A [P, P], a `LinearOperator`.
        num_samples: Random vectors, one product each.
        generator: Of the random vectors; None is torch's global generator.
        return_error: Return the standard error, too.
    Returns:
        The mean over the vectors, a scalar tensor; with ``return_error`` an `Estimate`.
    Example:
        >>> A = hog.HessianOperator(lambda p, x: (p * x).square().sum(), torch.ones(2), torch.ones(2))
        >>> hog.curvature.hutchinson_frobenius(A, 4)
        tensor(8.)
    """
    check_operator(operator)
    dots = operator.space.dots
    values = [dots((Av, Av))[0] for _, Av in _samples(operator, num_samples, generator)]
    found = mean_of(torch.cat(values))
    return found if return_error else found.value


def _samples(
    operator: SymmetricMatrix, num_samples: int, generator: torch.Generator | None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows of signs and their products, some at a time."""
    validation.at_least("num_samples", num_samples, 1)
    validation.generator(generator)
    size = operator.shape[0]
    at_once = max(1, AT_ONCE // (size * operator.dtype.itemsize))
    for start in range(0, num_samples, at_once):
        v = random_signs(operator, min(at_once, num_samples - start), generator)
        yield v, operator.apply(v)


def random_signs(
    operator: SymmetricMatrix, count: int, generator: torch.Generator | None
) -> Tensor:
    """Rows [count, P] of independent signs, -1 or 1."""
    return random_rows.signs(operator.space, count, generator)


def mean_of(values: Tensor) -> Estimate:
    """The mean over the leading dimension, and its standard error."""
    mean = values.mean(0)
    spread = values.std(0) if len(values) > 1 else torch.full_like(mean, torch.inf)
    return Estimate(mean, spread / len(values) ** 0.5)


def xtrace(
    operator: SymmetricMatrix,
    num_samples: int = 64,
    *,
    generator: torch.Generator | None = None,
    return_error: bool = False,
) -> Any:
    r"""The trace of an operator, exact on the space of its products and estimated on the rest.

        tr A = tr(Q_i^T A Q_i) + E[w_i^T (I - Q_i Q_i^T) A (I - Q_i Q_i^T) w_i]

    with normal vectors w_i and Q_i an orthonormal basis of the products A w_j of all others; the
    second term is scaled to vectors of their mean length. The estimate is the mean over the w_i. Where
    the eigenvalues decay fast, the error decays as fast with num_samples; where all are alike, it is
    that of Hutchinson's estimator with half as many. It is exact for a rank below num_samples / 2, and
    from num_samples = P on, where the matrix is made dense. It holds 1.5 num_samples vectors in
    memory.

    Args:
        operator: The matrix A [P, P], a `LinearOperator`.
        num_samples: Products, at least 4: half of them with the w_i, half with Q.
        generator: Of the w_i; None is torch's global generator.
        return_error: Return the standard error, too. It is a guide only: the estimates of one run
            depend on each other.
    Returns:
        The trace, a scalar tensor; with ``return_error`` an `Estimate`.
    References:
        Epperly, Tropp and Webber, XTrace: Making the Most of Every Sample in Stochastic Trace
        Estimation, 2024; for symmetric matrices here.
    Example:
        >>> A = hog.HessianOperator(lambda p, x: (p @ x).square(), torch.ones(9), torch.ones(9))
        >>> hog.curvature.xtrace(A, 4)  # a matrix of rank one, 2 x x^T
        tensor(18.0000)
    """
    check_operator(operator)
    operator.space.refuse_sharded("xtrace")
    size = operator.shape[0]
    validation.at_least("num_samples", num_samples, 4)
    random = validation.generator(generator)
    if num_samples >= size:
        trace = operator.to_dense().diagonal().sum()
        return Estimate(trace, torch.zeros_like(trace)) if return_error else trace
    count = num_samples // 2
    wide = torch.promote_types(operator.dtype, torch.float32)  # of the basis
    device = operator.device if random is None else random.device
    w = torch.randn(count, size, generator=random, dtype=torch.float32, device=device)
    w = w.to(operator.device, wide)
    w *= size**0.5 / w.norm(dim=1, keepdim=True)
    Y = operator.apply(w.to(operator.dtype)).to(wide)
    # what is smaller than a vector is in float64 from here on
    Q, R = torch.linalg.qr(Y.T)
    sizes = R.diagonal().abs()
    if float(sizes.min()) <= size * torch.finfo(wide).eps * float(sizes.max()):
        found = _trace_on_range(operator, Y)
    else:
        H = (Q.T @ operator.apply(Q.T.contiguous().to(operator.dtype)).to(wide).T).double()
        found = mean_of(_leave_one_out(size, (Q.T @ w.T).double(), R.double(), H))
    result = Estimate(found.value.to(operator.dtype), found.error.to(operator.dtype))
    return result if return_error else result.value


def _leave_one_out(size: int, W: Tensor, R: Tensor, H: Tensor) -> Tensor:
    """The estimate of each w_i, from W = Q^T w, A w = Q R and H = Q^T A Q, all [count, count]."""
    count = len(R)
    # s_i, a unit vector: Q spans Q_i and s_i
    S = torch.linalg.solve_triangular(R.T, torch.eye(count).to(R), upper=False)
    S = S / S.norm(dim=0)
    H = (H + H.T) / 2
    inside = H.diagonal().sum() - (S * (H @ S)).sum(0)
    PW = W - S * (S * W).sum(0)  # Q_i^T w_i, in coordinates of Q
    PR = R - S * (S * R).sum(0)
    outside = (W * R).sum(0) - 2 * (W * PR).sum(0) + (PW * (H @ PW)).sum(0)
    return inside + outside * (size - count + 1) / (size - PW.square().sum(0))


def _trace_on_range(operator: SymmetricMatrix, Y: Tensor) -> Estimate:
    """The trace of a matrix whose rank is below the number of its products Y, which span its range."""
    rows = basis_of(Y)
    trace = (rows * operator.apply(rows.to(operator.dtype)).to(Y.dtype)).double().sum()
    return Estimate(trace, torch.zeros_like(trace))


def basis_of(rows: Tensor) -> Tensor:
    """Orthonormal rows that span the given ones."""
    U, sizes, _ = torch.linalg.svd(rows.T, full_matrices=False)
    rank = int((sizes > rows.shape[1] * torch.finfo(rows.dtype).eps * sizes.max()).sum())
    return U.T[:rank].contiguous()
