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
    Q, R, Z = _basis_of_products(operator, w)
    if R is None:
        return _exactly((Q * Z).double().sum().to(operator.dtype))
    # what is smaller than a vector is in float64 from here on
    W, R, H = (Q.T @ w.T).double(), R.double(), (Q.T @ Z).double()
    S = _left_out(R)
    H = (H + H.T) / 2
    inside = H.diagonal().sum() - (S * (H @ S)).sum(0)
    PW = W - S * (S * W).sum(0)  # Q_i^T w_i, in coordinates of Q
    PR = R - S * (S * R).sum(0)
    outside = (W * R).sum(0) - 2 * (W * PR).sum(0) + (PW * (H @ PW)).sum(0)
    found = mean_of(inside + outside * (size - count + 1) / (size - PW.square().sum(0)))
    return Estimate(*(part.to(operator.dtype) for part in found))


def _basis_of_products(
    operator: SymmetricMatrix, w: Tensor
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Q, R and A Q with the products A w^T = Q R of the rows of w and orthonormal columns of Q.

    R is None for a matrix whose rank is below the number of its products; Q then spans its range, on
    which nothing is left to estimate.
    """
    Y = operator.apply(w.to(operator.dtype)).to(w.dtype)
    Q, R = torch.linalg.qr(Y.T)
    sizes = R.diagonal().abs()
    if float(sizes.min()) <= w.shape[1] * torch.finfo(w.dtype).eps * float(sizes.max()):
        U, lengths, _ = torch.linalg.svd(Y.T, full_matrices=False)
        rank = int((lengths > Y.shape[1] * torch.finfo(Y.dtype).eps * lengths.max()).sum())
        Q, R = U[:, :rank], None
    return Q, R, operator.apply(Q.T.contiguous().to(operator.dtype)).to(w.dtype).T


def _left_out(R: Tensor) -> Tensor:
    """Unit vectors s_i as columns: Q spans Q_i, the basis of all other products, and Q s_i."""
    S = torch.linalg.solve_triangular(R.T, torch.eye(len(R)).to(R), upper=False)
    return S / S.norm(dim=0)


def xdiag(operator: SymmetricMatrix, num_samples: int, generator: Generator | None) -> Estimate:
    """diag A = diag(Q_i Q_i^T A) + E[w_i * (A - Q_i Q_i^T A) w_i], the mean over i.

    With signs w_i and Q_i an orthonormal basis of the products A w_j of all others.
    """
    operator.space.refuse_sharded("xdiag")
    count = validation.at_least("num_samples", num_samples, 4) // 2
    validation.generator(generator)
    if 2 * count >= operator.shape[0]:
        return _exactly(operator.to_dense().diagonal().clone())
    wide = torch.promote_types(operator.dtype, torch.float32)
    w = random_signs(operator.space, count, generator).to(wide)
    Q, R, Z = _basis_of_products(operator, w)
    if R is None:
        return _exactly((Q * Z).sum(1).to(operator.dtype))
    S = _left_out(R)
    left = (Q @ S).T  # Q s_i as rows
    inside = (Q * Z).sum(1) - left * (Z @ S).T
    # w_i * Q s_i s_i^T Q^T A w_i, and A w_i = Q R_i
    outside = w * left * (S * R).sum(0).unsqueeze(1)
    return Estimate(*(part.to(operator.dtype) for part in mean_of(inside + outside)))


TRACES: dict[str, Estimator] = {"hutchinson": hutchinson_trace, "xtrace": xtrace}
DIAGONALS: dict[str, Estimator] = {"hutchinson": hutchinson_diagonal, "xdiag": xdiag}
