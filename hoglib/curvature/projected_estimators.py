"""Traces and diagonals, exact on a part of the space and estimated by signs on the rest."""

from typing import Any

import torch

from hoglib._core import validation
from hoglib.curvature.traces import Estimate, basis_of, mean_of, random_signs
from hoglib.curvature.vector_space import SymmetricMatrix, check_operator


def hutchpp(
    operator: SymmetricMatrix,
    num_samples: int = 64,
    *,
    generator: torch.Generator | None = None,
    return_error: bool = False,
) -> Any:
    r"""The trace of an operator by Hutch++: exact on a sketch of its range, and by signs on the rest.

        tr A = tr(Q^T A Q) + E[v^T (I - Q Q^T) A (I - Q Q^T) v]

    with Q an orthonormal basis of A S for a third of the products, S and v random signs. `xtrace` uses
    the same products better; the error of this one comes from independent samples.

    Args:
        operator: The matrix A [P, P], a `LinearOperator`.
        num_samples: Products, at least 3: a third each for A S, A Q and the rest.
        generator: Of the signs; None is torch's global generator.
        return_error: Return the standard error, too: that of the rest, for the Q that was drawn.
    Returns:
        The trace, a scalar tensor; with ``return_error`` an `Estimate`.
    References:
        Meyer, Musco, Musco and Woodruff, Hutch++: Optimal Stochastic Trace Estimation, 2021,
        algorithm 1.
    Example:
        >>> A = hog.HessianOperator(lambda p, x: (p @ x).square(), torch.ones(9), torch.ones(9))
        >>> hog.curvature.hutchpp(A, 6).round()  # a matrix of rank one, 2 x x^T
        tensor(18.)
    """  # fmt: skip
    check_operator(operator)
    operator.space.refuse_sharded("hutchpp")
    count = validation.at_least("num_samples", num_samples, 3) // 3
    validation.generator(generator)
    size = operator.shape[0]
    if 2 * count >= size:  # dense, for fewer products
        trace = operator.to_dense().diagonal().sum()
        return Estimate(trace, torch.zeros_like(trace)) if return_error else trace
    wide = torch.promote_types(operator.dtype, torch.float32)
    signs = random_signs(operator, 2 * count, generator)
    Q = basis_of(operator.apply(signs[:count]).to(wide))
    inside = (Q * operator.apply(Q.to(operator.dtype)).to(wide)).double().sum()
    v = signs[count:].to(wide)
    v = v - (v @ Q.T) @ Q
    outside = mean_of((v * operator.apply(v.to(operator.dtype)).to(wide)).sum(1).double())
    found = Estimate((inside + outside.value).to(operator.dtype), outside.error.to(operator.dtype))
    return found if return_error else found.value


def xdiag(
    operator: SymmetricMatrix,
    num_samples: int = 64,
    *,
    generator: torch.Generator | None = None,
    return_error: bool = False,
) -> Any:
    r"""The diagonal of an operator by XDiag: exact on the space of its products, by signs on the rest.

        diag A = diag(Q_i Q_i^T A) + E[w_i * (A - Q_i Q_i^T A) w_i]

    with signs w_i and Q_i an orthonormal basis of the products A w_j of all others; the mean over i.

    Args:
        operator: The matrix A [P, P], a `LinearOperator`.
        num_samples: Products, at least 4: half of them with the w_i, half with Q.
        generator: Of the w_i; None is torch's global generator.
        return_error: Return the standard errors, too. They are a guide only: the estimates of one run
            depend on each other.
    Returns:
        The diagonal [P]; with ``return_error`` an `Estimate` of two such tensors.
    References:
        Epperly, Tropp and Webber, XTrace: Making the Most of Every Sample in Stochastic Trace
        Estimation, 2024, section 2.4; for symmetric matrices here.
    Example:
        >>> A = hog.HessianOperator(lambda p, x: (p @ x).square(), torch.ones(9), torch.ones(9))
        >>> hog.curvature.xdiag(A, 4).round()  # 2 x x^T
        tensor([2., 2., 2., 2., 2., 2., 2., 2., 2.])
    """
    check_operator(operator)
    operator.space.refuse_sharded("xdiag")
    count = validation.at_least("num_samples", num_samples, 4) // 2
    validation.generator(generator)
    size = operator.shape[0]
    if 2 * count >= size:
        diagonal = operator.to_dense().diagonal().clone()
        return Estimate(diagonal, torch.zeros_like(diagonal)) if return_error else diagonal
    wide = torch.promote_types(operator.dtype, torch.float32)
    w = random_signs(operator, count, generator).to(wide)
    Y = operator.apply(w.to(operator.dtype)).to(wide)
    Q, R = torch.linalg.qr(Y.T)
    sizes = R.diagonal().abs()
    if float(sizes.min()) <= size * torch.finfo(wide).eps * float(sizes.max()):
        Q = basis_of(Y).T  # the range of the matrix: nothing is left to estimate
        Z = operator.apply(Q.T.contiguous().to(operator.dtype)).to(wide).T
        diagonal = (Q * Z).sum(1).to(operator.dtype)
        return Estimate(diagonal, torch.zeros_like(diagonal)) if return_error else diagonal
    Z = operator.apply(Q.T.contiguous().to(operator.dtype)).to(wide).T  # A Q
    # s_i, a unit vector: Q spans Q_i and Q s_i
    S = torch.linalg.solve_triangular(R.T, torch.eye(count).to(R), upper=False)
    S = S / S.norm(dim=0)
    left = (Q @ S).T  # Q s_i as rows
    inside = (Q * Z).sum(1) - left * (Z @ S).T
    outside = (
        w * left * (S * R).sum(0).unsqueeze(1)
    )  # w_i * Q s_i s_i^T Q^T A w_i, and A w_i = Q R_i
    each = inside + outside
    value = each.mean(0)
    error = each.std(0) / count**0.5 if count > 1 else torch.full_like(value, torch.inf)
    found = Estimate(value.to(operator.dtype), error.to(operator.dtype))
    return found if return_error else found.value
