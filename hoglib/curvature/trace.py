"""Traces, diagonals and norms of operators, estimated from products with random vectors."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hoglib import _arguments as arguments

if TYPE_CHECKING:
    from hoglib.curvature._linear import LinearOperator

AT_ONCE = 2**28  # bytes of random vectors that are multiplied at once


def hutchinson_trace(
    operator: "LinearOperator",
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
    operator: "LinearOperator",
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
    operator: "LinearOperator",
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
    operator: "LinearOperator", num_samples: int, generator: torch.Generator | None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows of signs and their products, some at a time."""
    arguments.at_least("num_samples", num_samples, 1)
    arguments.generator(generator)
    size = operator.shape[0]
    at_once = max(1, AT_ONCE // (size * operator.dtype.itemsize))
    for start in range(0, num_samples, at_once):
        v = signs(operator, min(at_once, num_samples - start), generator)
        yield v, operator.apply(v)


def signs(operator: "LinearOperator", count: int, generator: torch.Generator | None) -> Tensor:
    """Rows [count, P] of independent signs."""
    where = operator.device if generator is None else generator.device
    bits = torch.randint(2, (count, operator.shape[0]), generator=generator, device=where)
    return (2 * bits - 1).to(operator.device, operator.dtype)


def mean_of(values: Tensor) -> tuple[Tensor, Tensor]:
    """The mean over the leading dimension, and its standard error: infinite for a single value."""
    mean = values.mean(0)
    spread = values.std(0) if len(values) > 1 else torch.full_like(mean, torch.inf)
    return mean, spread / len(values) ** 0.5
