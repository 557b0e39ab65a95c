"""Nystrom's approximation of a matrix by a few eigenvectors, from its products with random vectors."""

import torch
from torch import Generator, Tensor

from hoglib._core import validation
from hoglib.curvature.vector_space import SymmetricMatrix
from hoglib.errors import ArgumentValueError, NotPositiveDefiniteError


def eigenpairs(
    operator: SymmetricMatrix, rank: int, oversampling: int, generator: Generator | None
) -> tuple[Tensor, Tensor]:
    """Eigenvectors as rows [k, P] and eigenvalues [k], as `LinearOperator.low_rank` describes them."""
    operator.space.refuse_sharded("low_rank")
    size = operator.shape[0]
    validation.generator(generator)
    if validation.at_least("rank", rank, 1) > size:
        raise ArgumentValueError(f"rank: expected at most {size}, the size of A, got {rank}.")
    columns = min(rank + validation.at_least("oversampling", oversampling, 0), size)
    device = operator.device if generator is None else generator.device
    wide = torch.promote_types(operator.dtype, torch.float32)
    with torch.inference_mode(False), torch.no_grad():
        drawn = torch.randn(size, columns, generator=generator, device=device, dtype=wide)
        S = torch.linalg.qr(drawn.to(operator.device))[0]
        Y = operator.apply(S.T.to(operator.dtype)).to(wide).T
        U, values = _nystrom(S, Y, torch.finfo(operator.space.precision).eps)
    return U[:, :rank].T.contiguous(), values[:rank]


def _nystrom(S: Tensor, Y: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Eigenvectors and eigenvalues, descending, of Y (S^T Y)^-1 Y^T; Y = A S is rounded to eps."""
    size = float(torch.linalg.matrix_norm(Y, 2))
    # a shift keeps the small matrix positive definite in spite of the rounding here
    shift = torch.finfo(Y.dtype).eps * Y.shape[0] ** 0.5 * size
    noise = eps * size  # of the products
    Y = Y + shift * S
    C = (S.T @ Y).double()
    values, vectors = torch.linalg.eigh((C + C.T) / 2)
    lowest = float(values[0])
    if lowest < -10 * max(noise, shift):
        raise NotPositiveDefiniteError(
            "low_rank: expected a positive semi-definite matrix, as a GGNOperator is, got a direction "
            f"of curvature {lowest:.3g}; `eigsh` finds eigenvalues of either sign."
        )
    # of directions that are rounding nothing is known
    roots = torch.where(values > noise, values.clamp(min=0).rsqrt(), 0)
    B = Y @ (vectors * roots).to(Y)
    U, sizes, _ = torch.linalg.svd(B, full_matrices=False)
    return U, (sizes.square() - shift).clamp(min=0)
