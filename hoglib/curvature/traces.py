"""Traces, diagonals and norms of operators, estimated from products with random vectors.

`LinearOperator` describes them; generators that are None are torch's global one.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from hoglib._core import validation
from hoglib.curvature.vector_space import SymmetricMatrix, random_signs

AT_ONCE = 2**28  # bytes of random vectors that are multiplied at once


class Estimate(NamedTuple):
    """A mean over random samples.

    Attributes:
        value: The mean.
        error: One standard error of it; infinite for a single sample.
    """

    value: Tensor
    error: Tensor

    def returned(self, with_error: bool) -> "Estimate | Tensor":
        """What a caller gets that asks for the error, or for the value alone."""
        return self if with_error else self.value


# (operator, products, generator)
Estimator = Callable[[SymmetricMatrix, int, Generator | None], Estimate]


def hutchinson_trace(
    operator: SymmetricMatrix, num_samples: int, generator: Generator | None
) -> Estimate:
    """tr A = E[v^T A v], v of independent signs; Var[v^T A v] = 2 sum over i != j of A_ij^2."""
    dots = operator.space.dots
    values = [dots((v, Av))[0] for v, Av in _samples(operator, num_samples, generator)]
    return mean_of(torch.cat(values))


def squared_frobenius(
    operator: SymmetricMatrix, num_samples: int, generator: Generator | None
) -> Estimate:
    """|A|_F^2 = sum of A_ij^2 = E[|A v|^2]."""
    dots = operator.space.dots
    values = [dots((Av, Av))[0] for _, Av in _samples(operator, num_samples, generator)]
    return mean_of(torch.cat(values))


def hutchinson_diagonal(
    operator: SymmetricMatrix, num_samples: int, generator: Generator | None
) -> Estimate:
    """diag A = E[v * A v]; Var[(v * A v)_i] = sum over j != i of A_ij^2."""
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
    return Estimate(total, (squares / max(count - 1, 1) / count).sqrt())


def _samples(
    operator: SymmetricMatrix, num_samples: int, generator: Generator | None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows of signs and their products, some at a time."""
    validation.at_least("num_samples", num_samples, 1)
    validation.generator(generator)
    size = operator.shape[0]
    at_once = max(1, AT_ONCE // (size * operator.dtype.itemsize))
    for start in range(0, num_samples, at_once):
        v = random_signs(operator.space, min(at_once, num_samples - start), generator)
        yield v, operator.apply(v)


def mean_of(values: Tensor) -> Estimate:
    """The mean over the leading dimension, and its standard error."""
    mean = values.mean(0)
    spread = values.std(0) if len(values) > 1 else torch.full_like(mean, torch.inf)
    return Estimate(mean, spread / len(values) ** 0.5)


def _exactly(value: Tensor) -> Estimate:
    return Estimate(value, torch.zeros_like(value))


def xtrace(operator: SymmetricMatrix, num_samples: int, generator: Generator | None) -> Estimate:
    """tr A = tr(Q_i^T A Q_i) + E[w_i^T (I - Q_i Q_i^T) A (I - Q_i Q_i^T) w_i], the mean over i.

    With normal vectors w_i and Q_i an orthonormal basis of the products A w_j of all others; the
    second term is scaled to vectors of their mean length.
    """
    operator.space.refuse_sharded("xtrace")
    size = operator.shape[0]
    validation.at_least("num_samples", num_samples, 4)
    random = validation.generator(generator)
    if num_samples >= size:
        return _exactly(operator.to_dense().diagonal().sum())
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
    return Estimate(*(part.to(operator.dtype) for part in found))


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
    return _exactly((rows * operator.apply(rows.to(operator.dtype)).to(Y.dtype)).double().sum())


def basis_of(rows: Tensor) -> Tensor:
    """Orthonormal rows that span the given ones."""
    U, sizes, _ = torch.linalg.svd(rows.T, full_matrices=False)
    rank = int((sizes > rows.shape[1] * torch.finfo(rows.dtype).eps * sizes.max()).sum())
    return U.T[:rank].contiguous()


def xdiag(operator: SymmetricMatrix, num_samples: int, generator: Generator | None) -> Estimate:
    """diag A = diag(Q_i Q_i^T A) + E[w_i * (A - Q_i Q_i^T A) w_i], the mean over i.

    With signs w_i and Q_i an orthonormal basis of the products A w_j of all others.
    """
    operator.space.refuse_sharded("xdiag")
    count = validation.at_least("num_samples", num_samples, 4) // 2
    validation.generator(generator)
    size = operator.shape[0]
    if 2 * count >= size:
        return _exactly(operator.to_dense().diagonal().clone())
    wide = torch.promote_types(operator.dtype, torch.float32)
    w = random_signs(operator.space, count, generator).to(wide)
    Y = operator.apply(w.to(operator.dtype)).to(wide)
    Q, R = torch.linalg.qr(Y.T)
    sizes = R.diagonal().abs()
    if float(sizes.min()) <= size * torch.finfo(wide).eps * float(sizes.max()):
        Q = basis_of(Y).T  # the range of the matrix: nothing is left to estimate
        Z = operator.apply(Q.T.contiguous().to(operator.dtype)).to(wide).T
        return _exactly((Q * Z).sum(1).to(operator.dtype))
    Z = operator.apply(Q.T.contiguous().to(operator.dtype)).to(wide).T  # A Q
    # s_i, a unit vector: Q spans Q_i and Q s_i
    S = torch.linalg.solve_triangular(R.T, torch.eye(count).to(R), upper=False)
    S = S / S.norm(dim=0)
    left = (Q @ S).T  # Q s_i as rows
    inside = (Q * Z).sum(1) - left * (Z @ S).T
    # w_i * Q s_i s_i^T Q^T A w_i, and A w_i = Q R_i
    outside = w * left * (S * R).sum(0).unsqueeze(1)
    return Estimate(*(part.to(operator.dtype) for part in mean_of(inside + outside)))


TRACES: dict[str, Estimator] = {"hutchinson": hutchinson_trace, "xtrace": xtrace}
DIAGONALS: dict[str, Estimator] = {"hutchinson": hutchinson_diagonal, "xdiag": xdiag}
