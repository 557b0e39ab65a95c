"""Traces, diagonals and norms of operators, estimated from products with random vectors."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hoglib._core import validation
from hoglib.curvature.symmetric_matrix import SymmetricMatrix

AT_ONCE = 2**28  # bytes of random vectors that are multiplied at once


def hutchinson_trace(
    operator: SymmetricMatrix,
    num_samples: int = 64,
    *,
    generator: torch.Generator | None = None,
    return_error: bool = False,
) -> Any:
    r"""The trace of an operator, from random vectors v of independent signs.

        tr A = E[v^T A v]        Var[v^T A v] = 2 sum over i != j of A_ij^2

    A scalar tensor: the mean over num_samples vectors, drawn by generator. return_error: (trace,
    standard error of it), both tensors.
    Source: Hutchinson, A Stochastic Estimator of the Trace of the Influence Matrix, 1990.
    """
    values = [(v * Av).sum(1) for v, Av in _samples(operator, num_samples, generator)]
    mean, error = mean_of(torch.cat(values))
    return (mean, error) if return_error else mean


def hutchinson_diagonal(
    operator: SymmetricMatrix,
    num_samples: int = 64,
    *,
    generator: torch.Generator | None = None,
    return_error: bool = False,
) -> Any:
    r"""The diagonal [P] of an operator, from random vectors v of independent signs.

        diag A = E[v * A v]        Var[(v * A v)_i] = sum over j != i of A_ij^2

    The mean over num_samples vectors, drawn by generator. return_error: (diagonal, standard errors).
    Source: Bekas, Kokiopoulou & Saad, An Estimator for the Diagonal of a Matrix, 2007.
    """
    count, total, squares = 0, None, None
    for v, Av in _samples(operator, num_samples, generator):
        for product in v * Av:
            count += 1
            if total is None or squares is None:
                total, squares = product.clone(), torch.zeros_like(product)
                continue
            change = product - total  # Welford's, which keeps no samples
            total += change / count
            squares += change * (product - total)
    assert total is not None
    assert squares is not None
    if not return_error:
        return total
    return total, (squares / max(count - 1, 1) / count).sqrt()


def hutchinson_frobenius(
    operator: SymmetricMatrix,
    num_samples: int = 64,
    *,
    generator: torch.Generator | None = None,
    return_error: bool = False,
) -> Any:
    r"""The squared Frobenius norm of an operator, sum of A_ij^2 = E[|A v|^2].

    A scalar tensor: the mean over num_samples vectors of signs, drawn by generator. return_error:
    (norm, standard error).
    """
    values = [Av.square().sum(1) for _, Av in _samples(operator, num_samples, generator)]
    mean, error = mean_of(torch.cat(values))
    return (mean, error) if return_error else mean


def _samples(
    operator: SymmetricMatrix, num_samples: int, generator: torch.Generator | None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows of signs and their products, some at a time."""
    validation.at_least("num_samples", num_samples, 1)
    validation.generator(generator)
    size = operator.shape[0]
    at_once = max(1, AT_ONCE // (size * operator.dtype.itemsize))
    for start in range(0, num_samples, at_once):
        v = signs(operator, min(at_once, num_samples - start), generator)
        yield v, operator.apply(v)


def signs(operator: SymmetricMatrix, count: int, generator: torch.Generator | None) -> Tensor:
    """Rows [count, P] of independent signs."""
    where = operator.device if generator is None else generator.device
    bits = torch.randint(2, (count, operator.shape[0]), generator=generator, device=where)
    return (2 * bits - 1).to(operator.device, operator.dtype)


def mean_of(values: Tensor) -> tuple[Tensor, Tensor]:
    """The mean over the leading dimension, and its standard error: infinite for a single value."""
    mean = values.mean(0)
    spread = values.std(0) if len(values) > 1 else torch.full_like(mean, torch.inf)
    return mean, spread / len(values) ** 0.5


# === Traces of operators whose eigenvalues fall off, from fewer products than Hutchinson's
# estimator.


def xtrace(
    operator: SymmetricMatrix,
    num_samples: int = 64,
    *,
    generator: torch.Generator | None = None,
    return_error: bool = False,
) -> Any:
    r"""The trace of an operator, exact on the space of its products and estimated on the rest.

        tr A = tr(Q_i^T A Q_i) + E[w_i^T (I - Q_i Q_i^T) A (I - Q_i Q_i^T) w_i]

    with normal vectors w_i and Q_i an orthonormal basis of the products A w_j of all others; the second
    term is scaled to vectors of their mean length. A scalar tensor: the mean over the w_i. num_samples:
    products, half of them with the w_i and half with Q. Where eigenvalues fall off fast the error falls
    as fast with num_samples; where they are all alike it is that of Hutchinson's estimator with half as
    many. It is exact for a rank below num_samples / 2, and from num_samples = P on, where the matrix is
    made dense. generator: of the w_i. return_error: (trace, standard error of it), both tensors; the
    error is a guide, for the estimates of one run depend on each other. Memory: 1.5 num_samples
    vectors.
    Source: Epperly, Tropp & Webber, XTrace: Making the Most of Every Sample in Stochastic Trace
    Estimation, 2024; for symmetric matrices here.
    """
    size = operator.shape[0]
    validation.at_least("num_samples", num_samples, 4)
    random = validation.generator(generator)
    if num_samples >= size:
        trace = operator.to_dense().diagonal().sum()
        return (trace, torch.zeros_like(trace)) if return_error else trace
    count = num_samples // 2
    exact = torch.promote_types(operator.dtype, torch.float32)  # what a basis is orthogonal in
    where = operator.device if random is None else random.device
    w = torch.randn(count, size, generator=random, dtype=torch.float32, device=where)
    w = w.to(operator.device, exact)
    w *= size**0.5 / w.norm(dim=1, keepdim=True)
    Y = operator.apply(w.to(operator.dtype)).to(exact)
    # in float64 from here on, but for what has the length of a vector
    Q, R = torch.linalg.qr(Y.T)
    sizes = R.diagonal().abs()
    if float(sizes.min()) <= size * torch.finfo(exact).eps * float(sizes.max()):
        values, error = _of_range(operator, Y, exact)
    else:
        H = (Q.T @ operator.apply(Q.T.contiguous().to(operator.dtype)).to(exact).T).double()
        values, error = mean_of(_estimates(size, (Q.T @ w.T).double(), R.double(), H))
    result = (values.to(operator.dtype), error.to(operator.dtype))
    return result if return_error else result[0]


def _estimates(size: int, W: Tensor, R: Tensor, H: Tensor) -> Tensor:
    """The estimate of each w_i, from W = Q^T w, A w = Q R and H = Q^T A Q, all [count, count]."""
    count = len(R)
    # s_i: what Q spans beyond Q_i, a unit vector
    S = torch.linalg.solve_triangular(R.T, torch.eye(count).to(R), upper=False)
    S = S / S.norm(dim=0)
    H = (H + H.T) / 2
    inside = H.diagonal().sum() - (S * (H @ S)).sum(0)
    PW = W - S * (S * W).sum(0)  # Q_i^T w_i, in coordinates of Q
    PR = R - S * (S * R).sum(0)
    outside = (W * R).sum(0) - 2 * (W * PR).sum(0) + (PW * (H @ PW)).sum(0)
    return inside + outside * (size - count + 1) / (size - PW.square().sum(0))


def _of_range(operator: SymmetricMatrix, Y: Tensor, exact: torch.dtype) -> tuple[Tensor, Tensor]:
    """The trace of a matrix whose rank is below the number of its products: they span its range."""
    U, sizes, _ = torch.linalg.svd(Y.T, full_matrices=False)
    rank = int((sizes > Y.shape[1] * torch.finfo(exact).eps * sizes.max()).sum())
    rows = U.T[:rank].contiguous()
    trace = (rows * operator.apply(rows.to(operator.dtype)).to(exact)).double().sum()
    return trace, torch.zeros_like(trace)
