"""Factorizations of symmetric matrices, with a second attempt if LAPACK fails.

Kronecker factors are of low rank, with rows of zeros (dead units) and elements of all magnitudes. For
many such matrices LAPACK's eigensolver does not converge, or returns NaN.
"""

from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from hoglib._core.numerics.trust import DIGITS
from hoglib._core.torch_api import torch_internals
from hoglib.errors import ConvergenceError, NonFiniteError


def symmetric_eigen(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues [..., n], ascending, and eigenvectors [..., n, n] of the symmetric part."""
    return symmetric_eigens([matrices])[0]


def symmetric_eigens(several: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """`symmetric_eigen` of several matrices, with one synchronization for all checks."""
    every = [(matrices + matrices.mT) / 2 for matrices in several]
    if torch_internals.transforms_active() or torch_internals.tracing():
        # fake tensors and wrappers have no values to check
        return [torch.linalg.eigh(a) for a in every]
    found = [_eigh_or_nan(a) for a in every]
    right = [_is_eigen(a, *one) for a, one in zip(every, found, strict=True)]
    answers = torch.stack(right).tolist() if right else []
    each = zip(every, found, answers, strict=True)
    return [one if is_right else _factorize_in_double(a) for a, one, is_right in each]


def _eigh_or_nan(a: Tensor) -> tuple[Tensor, Tensor]:
    """LAPACK's result; NaN if LAPACK raises."""
    # MKL's eigh raises, or returns NaN, for finite float32 matrices of low rank: for 8 of 13 Kronecker
    # factors of a ResNet
    with suppress(RuntimeError):
        values, Q = torch.linalg.eigh(a)
        return values, Q
    return torch.full_like(a[..., 0], torch.nan), torch.full_like(a, torch.nan)


def _factorize_in_double(a: Tensor) -> tuple[Tensor, Tensor]:
    if not bool(a.isfinite().all()):
        raise NonFiniteError(
            "eigenvalues: expected a matrix of finite numbers, got infinity or NaN in it; look for "
            "them in the data and in the parameters."
        )
    found = [_in_double(one) for one in a.reshape(-1, *a.shape[-2:])]
    values, Q = (torch.stack(parts) for parts in zip(*found, strict=True))
    return values.view(a.shape[:-1]).to(a), Q.view(a.shape).to(a)


def _in_double(a: Tensor) -> tuple[Tensor, Tensor]:
    """`_eigh_or_nan` in float64 without the rows of zeros, which get unit vectors as eigenvectors."""
    size = a.abs().max().double()
    scaled = a.double() / size.clamp(min=torch.finfo(torch.float64).tiny)
    # elements far below rounding make the eigensolvers fail: set them to zero
    scaled = torch.where(scaled.abs() > torch.finfo(a.dtype).eps ** 2, scaled, 0)
    used = scaled.any(0)
    inside, units = used.nonzero()[:, 0], (~used).nonzero()[:, 0]
    part = scaled[inside[:, None], inside]
    values, Q = _eigh_or_nan(part)
    if _is_eigen(part, values, Q):
        every = torch.cat([values * size, values.new_zeros(len(units))]).sort()
        vectors = torch.zeros_like(scaled)
        vectors[inside, : len(inside)] = Q
        vectors[units, torch.arange(len(inside), len(a), device=a.device)] = 1
        return every.values, vectors[:, every.indices]
    raise ConvergenceError(
        f"eigenvalues: expected LAPACK to find those of a symmetric matrix of {len(a)} rows, got none "
        "in float64 either; scale the inputs and the loss to the order of 1."
    )


def _is_eigen(a: Tensor, values: Tensor, Q: Tensor) -> Tensor:
    """Whether a u = Q (values * Q^T u) and u = Q Q^T u for one vector u: LAPACK may be wrong
    silently."""
    a, values, Q = a.detach(), values.detach(), Q.detach()
    if not a.numel():
        return torch.ones((), dtype=torch.bool, device=a.device)
    # unequal elements, to notice a permutation
    u = torch.linspace(1, 2, a.shape[-1], dtype=a.dtype, device=a.device).unsqueeze(-1)
    inside = Q.mT @ u
    given, found = a @ u, Q @ (values.unsqueeze(-1) * inside)
    # relative to the largest element of each matrix
    size = a.abs().amax((-2, -1), keepdim=True).clamp(min=torch.finfo(a.dtype).tiny)
    pairs = (given / size, found / size), (u.expand_as(inside), Q @ inside)
    off = torch.stack([(x - y).abs().max() for x, y in pairs])
    sizes = torch.stack([torch.maximum(x.abs().max(), y.abs().max()) for x, y in pairs])
    return (off <= DIGITS.of(a.dtype) * sizes).all()


def damped_inverse(matrices: Tensor, damping: Tensor) -> Tensor | None:
    """(A + damping I)^-1 of semi-definite matrices [n, k, k]; None if one is singular.

    By Cholesky's method; if rounding makes it fail, by eigenvalues, with negative ones set to zero.
    """
    shift = damping.reshape(-1, 1)
    eye = torch.eye(matrices.shape[-1], dtype=matrices.dtype, device=matrices.device)
    L, failed = torch.linalg.cholesky_ex((matrices + matrices.mT) / 2 + shift.unsqueeze(-1) * eye)
    if not bool(failed.any()):
        return torch.cholesky_inverse(L)
    values, Q = symmetric_eigen(matrices)
    values = values.clamp(min=0) + shift
    return None if bool((values <= 0).any()) else (Q / values.unsqueeze(-2)) @ Q.mT
