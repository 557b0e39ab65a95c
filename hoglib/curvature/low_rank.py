"""Approximations of a matrix by a few eigenvectors, from its products with random vectors."""

from typing import Any, final

import torch
from torch import Tensor

from hoglib._core import validation
from hoglib.curvature.linear_operator import LinearOperator
from hoglib.curvature.vector_space import Space, check_operator
from hoglib.errors import ArgumentValueError, NotPositiveDefiniteError

METHODS = ("nystrom", "randomized")


@final
class LowRankOperator(LinearOperator):
    r"""A matrix by some of its eigenvectors, and a multiple of the identity on the rest of the space.

        A = U diag(values) U^T + rest (I - U U^T)        the columns of U orthonormal

    Args:
        space: The vector space that it acts on.
        rows: The columns of U as rows [k, P].
        values: The eigenvalues [k], descending by magnitude.
        rest: The eigenvalue of all other directions.
    Example:
        >>> A = hog.HessianOperator(lambda p, x: (p @ x).square(), torch.ones(9), torch.ones(9))
        >>> L = hog.curvature.low_rank(A, 1, generator=torch.Generator().manual_seed(0))
        >>> (L.inverse(2.0) @ torch.ones(9)).round(decimals=3)  # (2 x x^T + 2 I)^-1 x
        tensor([0.0500, 0.0500, 0.0500, 0.0500, 0.0500, 0.0500, 0.0500, 0.0500, 0.0500])
    """

    def __init__(self, space: Space, rows: Tensor, values: Tensor, rest: float = 0.0) -> None:
        super().__init__(space)
        self._rows, self.values, self.rest = rows, values, rest

    @property
    def vectors(self) -> Tensor:
        """The eigenvectors U [P, k]."""
        return self._rows.T

    def _products(self, rows: Tensor) -> Tensor:
        wide = rows.to(self._rows.dtype)
        parts = wide @ self._rows.T
        product = (parts * (self.values - self.rest)) @ self._rows
        return (product + self.rest * wide).to(rows.dtype)

    def inverse(self, damping: float = 0.0) -> "LowRankOperator":
        r"""The inverse of the damped matrix, (A + damping I)^-1, in closed form.

        Args:
            damping: What is added to the diagonal.
        Returns:
            The inverse, an operator.
        Raises:
            NotPositiveDefiniteError: for an eigenvalue that is not positive with this damping.
        """
        number = validation.number("damping", damping, minimum=0)
        lowest = min(float(self.values.min()), self.rest) + number
        if lowest <= 0:
            raise NotPositiveDefiniteError(
                "inverse: expected a positive definite matrix, got one whose smallest eigenvalue is "
                f"{lowest:.3g} with the damping {number:g}; use damping > 0."
            )
        return LowRankOperator(
            self.space, self._rows, 1 / (self.values + number), 1 / (self.rest + number)
        )

    def preconditioner(self, damping: float) -> "LowRankOperator":
        r"""An approximation of (A + damping I)^-1 for conjugate gradients.

            U diag(1 / (values + damping)) U^T + (I - U U^T) / (min(values) + damping)

        The eigenvalues of A that are not known are at most about the smallest that is.

        Args:
            damping: Of the system that is solved; positive.
        Returns:
            The approximation, for ``preconditioner=`` of `cg`, ``solve`` and `NewtonCG`.
        References:
            Frangella, Tropp and Udell, Randomized Nystrom Preconditioning, 2023, equation 1.3.
        """
        validation.positive("damping", damping)
        smallest = float(self.values.min())
        return LowRankOperator(self.space, self._rows, self.values, smallest).inverse(damping)


def low_rank(
    operator: LinearOperator,
    rank: int,
    *,
    method: str = "nystrom",
    oversampling: int = 10,
    generator: torch.Generator | None = None,
) -> LowRankOperator:
    r"""The largest eigenvalues of an operator and their eigenvectors, by products with random vectors.

        nystrom       A S (S^T A S)^-1 (A S)^T                A positive semi-definite
        randomized    Q (Q^T A Q) Q^T, Q a basis of A S       any A, twice as many products

    with S orthonormal, random, of rank + oversampling columns, one product each. All are computed at
    once, where `eigsh` takes one after the other until its eigenvalues converge. Before the smallest
    eigenvalues are cut off, the error of "nystrom" in the trace norm is on average at most
    1 + rank / (oversampling - 1) times the sum of the eigenvalues that are not kept. That of a result
    L is |A - L|^2 in the Frobenius norm, estimated by ``hutchinson_frobenius(A - L, 16)``.

    Args:
        operator: The matrix A [P, P].
        rank: Eigenvalues that are kept; those of largest magnitude.
        method: As above.
        oversampling: Further columns of S.
        generator: Of S; None is torch's global generator.
    Returns:
        `LowRankOperator`, with ``values`` and ``vectors``, ``inverse`` and ``preconditioner``.
    Raises:
        NotPositiveDefiniteError: with "nystrom", for a matrix with negative eigenvalues.
        ArgumentValueError: for a rank larger than P.
    References:
        Tropp, Yurtsever, Udell and Cevher, Fixed-Rank Approximation of a Positive-Semidefinite Matrix
        from Streaming Data, 2017, algorithm 3. Halko, Martinsson and Tropp, Finding Structure with
        Randomness, 2011, section 5.3.
    Example:
        >>> A = hog.HessianOperator(lambda p, x: (p @ x).square(), torch.ones(9), torch.ones(9))
        >>> L = hog.curvature.low_rank(A, 1)  # 2 x x^T is of rank one
        >>> L.values.round(decimals=3)
        tensor([18.])
    """
    check_operator(operator)
    operator.space.refuse_sharded("low_rank")
    size = operator.shape[0]
    validation.one_of("method", method, METHODS)
    validation.generator(generator)
    if validation.at_least("rank", rank, 1) > size:
        raise ArgumentValueError(f"rank: expected at most {size}, the size of A, got {rank}.")
    columns = min(rank + validation.at_least("oversampling", oversampling, 0), size)
    device = operator.device if generator is None else generator.device
    wide = torch.promote_types(operator.dtype, torch.float32)
    noise = torch.randn(size, columns, generator=generator, device=device, dtype=wide)
    S = torch.linalg.qr(noise.to(operator.device))[0]

    def product(X: Tensor) -> Tensor:
        return operator.apply(X.T.to(operator.dtype)).to(wide).T

    with torch.inference_mode(False), torch.no_grad():
        Y = product(S)
        if method == "nystrom":
            U, values = _nystrom(S, Y, torch.finfo(operator.space.precision).eps)
        else:
            U, values = _projected(Y, product)
    kept = values.abs().argsort(descending=True)[:rank]
    return LowRankOperator(operator.space, U[:, kept].T.contiguous(), values[kept])


def _nystrom(S: Tensor, Y: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Eigenvectors and eigenvalues of Y (S^T Y)^-1 Y^T, Y = A S, which is rounded to eps."""
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
            "low_rank: expected a positive semi-definite matrix, got a direction of curvature "
            f"{lowest:.3g}; use method='randomized'."
        )
    # of directions that are rounding nothing is known
    roots = torch.where(values > noise, values.clamp(min=0).rsqrt(), 0)
    B = Y @ (vectors * roots).to(Y)
    U, sizes, _ = torch.linalg.svd(B, full_matrices=False)
    return U, (sizes.square() - shift).clamp(min=0)


def _projected(Y: Tensor, product: Any) -> tuple[Tensor, Tensor]:
    """Eigenvectors and eigenvalues of Q Q^T A Q Q^T, Q an orthonormal basis of Y."""
    Q = torch.linalg.qr(Y)[0]
    T = Q.T @ product(Q)
    values, vectors = torch.linalg.eigh((T + T.T) / 2)
    return Q @ vectors, values
