"""Functions of a matrix that is known by its products, by Lanczos' method."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hoglib._core import validation
from hoglib.curvature import density
from hoglib.curvature.traces import Estimate
from hoglib.curvature.vector_space import SymmetricMatrix, check_operator
from hoglib.errors import NotPositiveDefiniteError

Function = Callable[[Tensor], Tensor]


def matrix_function(
    operator: SymmetricMatrix, b: Any, function: Function, *, steps: int = 50
) -> Any:
    r"""The product of a function of a matrix with a vector, by Lanczos' method.

        f(A) b = |b| V f(T) e_1        T = V^T A V, the columns of V orthonormal, V e_1 = b / |b|

    It is exact for polynomials of a degree below steps, and from steps = P on; smooth functions
    converge fast. It holds steps vectors for each vector of b.

    Args:
        operator: The matrix A [P, P], a `LinearOperator`.
        b: A vector or a block, flat or in the structure of the operator's params.
        function: f, of eigenvalues in float64, element by element: ``torch.exp``,
            ``lambda x: x.clamp(min=0).sqrt()``.
        steps: Products for each vector.
    Returns:
        f(A) b in the form of b.
    Raises:
        ArgumentValueError: for a function that is not taken element by element.
        NonFiniteError: for values of the function, or a vector, that are not finite.
    References:
        Higham, Functions of Matrices, 2008, section 13.2.
    Example:
        >>> A = hog.HessianOperator(lambda p, x: (p * x).square().sum(), torch.ones(2), torch.ones(2))
        >>> hog.curvature.matrix_function(A, torch.ones(2), torch.log2).round()  # A is 2 I
        tensor([1., 1.])
    """
    check_operator(operator)
    validation.function("function", function)
    operator.space.check_same_call("matrix_function", steps)
    rows, rebuild = operator.space.rows(b, "b")
    validation.finite("b", rows, "f(A) b does not exist there.")
    count = min(validation.at_least("steps", steps, 1), operator.shape[0])
    size = operator.space.norms(rows)[:, None]
    start = rows / torch.where(size > 0, size, torch.ones_like(size))
    T, V = density.tridiagonal(operator.apply, start, count, operator.space)
    theta, S = torch.linalg.eigh(T)
    present = S[:, 0].square() > torch.finfo(T.dtype).eps ** 2  # of others no part is in b
    values = validation.of_eigenvalues(function, theta, present & (size > 0))
    weights = torch.einsum("sij,sj,sj->si", S, values, S[:, 0]).to(V)
    found = size * torch.einsum("snp,sn->sp", V, weights)
    return rebuild(torch.where(size > 0, found, 0))


def logdet(
    operator: SymmetricMatrix,
    num_samples: int = 10,
    *,
    steps: int = 80,
    generator: torch.Generator | None = None,
    return_error: bool = False,
) -> Any:
    r"""The logarithm of the determinant of a positive definite operator, by random vectors.

        log det A = tr log A = P E[v^T log(A) v],  v random unit vectors,  log(A) v by Lanczos' method

    Args:
        operator: The matrix A [P, P], a `LinearOperator`, for instance ``G.damped(1e-3)``.
        num_samples: Random vectors.
        steps: Lanczos steps of each, one product a step.
        generator: Of the random vectors; None is torch's global generator.
        return_error: Return the standard error, too.
    Returns:
        The logarithm, a scalar tensor; with ``return_error`` an `Estimate`.
    Raises:
        NotPositiveDefiniteError: for an eigenvalue that is not positive.
    References:
        Ubaru, Chen and Saad, Fast Estimation of tr(f(A)) via Stochastic Lanczos Quadrature, 2017.
    Example:
        >>> A = hog.HessianOperator(lambda p, x: (p * x).square().sum(), torch.ones(2), torch.ones(2))
        >>> hog.curvature.logdet(A)  # of 2 I
        tensor(1.3863)
    """
    found = density.spectral_density(operator, num_samples, steps=steps, generator=generator)
    present = found.weights > torch.finfo(found.weights.dtype).eps
    lowest = float(found.nodes[present].min())
    if lowest <= 0:
        raise NotPositiveDefiniteError(
            f"logdet: expected a positive definite matrix, got one with the eigenvalue {lowest:.3g}; "
            "add damping, `A.damped(...)`."
        )
    tiny = torch.finfo(found.nodes.dtype).tiny
    average = found.average(lambda x: x.clamp(min=tiny).log())
    size = operator.shape[0]
    result = Estimate(*((size * part).to(operator.device, operator.dtype) for part in average))
    return result if return_error else result.value
