"""Derivatives of the results of algorithms by the tensors that an operator A depends on.

    d <U, A V> = <U, dA V>        the only derivative that an operator defines, `differentiate_form`

Derivatives of traces, diagonals, eigenvalues, log determinants and solutions reduce to this form.
Operators over data add up the form batch by batch in backward: they keep no graph before.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Generator, Tensor

from hoglib._core.messages import validation
from hoglib._core.numerics.factorizations import symmetric_eigen
from hoglib._core.runtime.source_location import warn
from hoglib._core.substrate.autograd import grad_enabled
from hoglib._core.substrate.fingerprint import sums_and_norms
from hoglib._core.substrate.gradient_graph import leaf_tensors
from hoglib._core.torch_api import torch_internals
from hoglib.curvature.algebra import eigenvalues
from hoglib.curvature.algebra.eigenvalues import Eigenpairs
from hoglib.curvature.algebra.estimates import Estimate, mean_of
from hoglib.curvature.algebra.vector_space import SymmetricMatrix
from hoglib.errors import (
    ArgumentValueError,
    NondeterministicError,
    NoSecondDerivative,
    UnsupportedError,
)

Gradients = dict[Tensor, Tensor]  # tensors hash by identity
NO_VECTORS = (
    "eigsh(create_graph=True): expected a function of the values, got the derivative of the vectors, "
    "which is not computed; detach() them."
)
NEAR = 1e-3  # warn of eigenvectors that mix by more than this fraction


class Differentiable(SymmetricMatrix, Protocol):
    """A symmetric matrix with a derivative by its `sources`."""

    def sources(self) -> list[Tensor]:
        """The tensors requiring grad that the matrix depends on."""
        ...

    def operands(self) -> list[Tensor]:
        """More tensors that the matrix is computed from; they must keep their values until backward."""
        ...

    def differentiate_form(self, left: Tensor, right: Tensor) -> Gradients:
        """The derivatives of sum_j left_j^T A right_j by its sources."""
        ...


def merged(*parts: Gradients) -> Gradients:
    """The sum of gradients."""
    total: Gradients = {}
    for part in parts:
        for tensor, gradient in part.items():
            total[tensor] = total[tensor] + gradient if tensor in total else gradient
    return total


def gradients_of(form: Tensor) -> Gradients:
    """The derivatives of a scalar by the leaves of its graph; the graph is kept."""
    if not form.requires_grad:
        return {}
    leaves = leaf_tensors([form])
    found = torch_internals.gradients([form], leaves, retain_graph=True)
    return {x: g for x, g in zip(leaves, found, strict=True) if g is not None}


def tracked(
    A: Differentiable,
    caller: str,
    rows: Tensor,
    product: Tensor | None = None,
    others: bool = False,
) -> Tensor:
    """A times each row, with a graph that leads to the sources of A.

    product: The products, if the caller has computed them.
    others: The caller's result also depends on other tensors that require grad.
    """
    validation.refuse_transforms(caller, "its derivative is taken by torch.autograd.")
    with grad_enabled(), torch_internals.outside_checkpoint():
        sources = A.sources()  # raises for an operator without a derivative, before any product
    if not (sources or others):
        raise ArgumentValueError(
            f"{caller}(create_graph=True): expected an operator that depends on a tensor that requires "
            "grad, got none among its params, the tensors that its loss uses, and its factors; call "
            "requires_grad_() before."
        )
    product = A.apply(rows) if product is None else product
    with grad_enabled():
        return torch_internals.apply(_TrackedProduct, (A, caller, product), rows, *sources)


def _forms(A: Differentiable, caller: str, rows: Tensor) -> Tensor:
    """Zeros [k, P] with the derivatives of rows * (A rows)."""
    known = torch.zeros_like(rows, dtype=A.dtype)
    return rows * tracked(A, caller, rows.to(A.dtype), known)


class _TrackedProduct(torch.autograd.Function):
    """A times constant rows."""

    @staticmethod
    def forward(ctx: Any, options: Any, rows: Tensor, *sources: Tensor) -> Tensor:
        ctx.A, ctx.caller, product = options
        # backward reads saved_tensors, which raises if a step changed them in place
        ctx.save_for_backward(rows, *sources)
        ctx.sources = sources  # the tensors themselves: saved_tensors_hooks may return copies
        # version counters miss writes through `.data` and NumPy, and another batch in a list
        ctx.values = sums_and_norms([*sources, *ctx.A.operands()])
        return product

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        rows, *_ = ctx.saved_tensors
        sources = ctx.sources
        _refuse_second_derivative(ctx.caller)
        if sums_and_norms([*sources, *ctx.A.operands()]) != ctx.values:
            raise NondeterministicError(
                f"{ctx.caller}(create_graph=True): expected params, buffers and data that stay the "
                "same until backward, got others. Differentiate before they change."
            )
        found = ctx.A.differentiate_form(grad, rows)
        if found.keys() - {*sources}:
            raise ArgumentValueError(
                f"{ctx.caller}(create_graph=True): expected an operator that depends in backward, and "
                "at each batch, on the tensors of the first batch, got others: params were replaced, "
                "or batches require grad. Differentiate before the next step."
            )
        return None, None, *[found.get(x) for x in sources]


def _refuse_second_derivative(caller: str) -> None:
    if torch.is_grad_enabled():
        raise NoSecondDerivative(
            f"{caller}(create_graph=True): expected a first derivative, got a backward with "
            "create_graph=True; its derivative has no second one."
        )


class _Solution(torch.autograd.Function):
    """x = x0 + A^-1 r at r = 0, for a constant A; backward solves with A again."""

    @staticmethod
    def forward(ctx: Any, options: Any, residual: Tensor) -> Tensor:
        ctx.solve, x = options
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        _refuse_second_derivative("solve")
        return None, ctx.solve(grad)


def solution(A: Differentiable, b: object, x: object, solve: Callable[[Any], Any]) -> Any:
    """x = A^-1 b, in the form of b, with a graph.

        dx = A^-1 (db - dA x)

    x: The known solution. solve: Solves for backward, b -> x.
    """
    with grad_enabled():
        rows, rebuild = A.space.rows(b, "b", graph=True)
        known = A.space.rows(x, "x")[0]
        zeros = torch.zeros_like(known)
        residual = rows - rows.detach() - tracked(A, "solve", known, zeros, rows.requires_grad)

        def inverse(grad: Tensor) -> Tensor:
            return A.space.rows(solve(rebuild(grad)))[0]

        # detach() makes a new tensor: apply gives the graph to the tensor that forward returns
        return rebuild(torch_internals.apply(_Solution, (inverse, known.detach()), residual))


def diagonal(A: Differentiable, caller: str, rows: Tensor, exact: bool) -> Estimate:
    """The sum of v * A v over the rows v if exact, else its mean with one standard error."""
    with grad_enabled():
        products = rows * tracked(A, caller, rows)
        if exact:
            return Estimate(products.sum(0), torch.zeros_like(rows[0]))
        return Estimate(products.mean(0), mean_of(products.detach()).error)


class _NoDerivative(torch.autograd.Function):
    """The identity on a tensor; backward raises UnsupportedError."""

    @staticmethod
    def forward(ctx: Any, text: str, value: Tensor, *sources: Tensor) -> Tensor:
        ctx.text = text
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise UnsupportedError(ctx.text)


def eigsh(
    A: Differentiable,
    k: int,
    which: str,
    tol: float | None,
    max_iter: int | None,
    block: int,
    generator: Generator | None,
    basis_device: Any,
) -> Eigenpairs:
    """`eigenvalues.eigsh` with a graph for the values, d value = v^T dA v.

    One more eigenvalue at each requested end shows whether the last requested eigenvalue is repeated.
    """
    further = 2 if which == "BE" else 1
    more = max(k, min(validation.at_least("k", k, 1) + further, A.shape[0]))
    several = max(validation.at_least("block", block, 1), 2)
    with torch.no_grad():
        found = eigenvalues.eigsh(A, more, which, tol, max_iter, several, generator, basis_device)
    values, vectors = found
    kept = eigenvalues.select_indices(values.cpu(), k, which).to(values.device)
    gaps = torch.nn.functional.pad(values.diff(), (1, 1), value=torch.inf)
    gaps = torch.minimum(gaps[1:], gaps[:-1])  # distances to the nearest neighbour
    rounding = torch.finfo(values.dtype).eps * values.abs().max()
    mixed = kept[(found.residuals + rounding > NEAR * gaps)[kept]]
    if len(mixed):
        listed = ", ".join(f"{x:.6g}" for x in values[mixed].tolist())
        warn(
            f"eigsh(create_graph=True): expected separate eigenvalues, got {listed}, as near to others "
            "as they are accurate: the derivative of one copy is not determined, only of a symmetric "
            "function of all copies, such as their sum. Take such a function, or a smaller tol."
        )
    own = vectors[:, kept]
    tracked_values = values[kept] + _forms(A, "eigsh", own.T).sum(1)
    with grad_enabled():
        own = torch_internals.apply(_NoDerivative, NO_VECTORS, own, tracked_values)
    return Eigenpairs(tracked_values, own, found.residuals[kept], found.products, which)


def log_determinant(
    A: Differentiable, value: Tensor, factors: list[tuple[Tensor, Tensor]]
) -> Tensor:
    """The mean of P v^T log(A) v over samples v, with a graph.

        d v^T log(A) v = <dA, L>,    L ~ V S (s s^T * f[theta, theta]) S^T V^T

    factors: T and V of Lanczos' method from v, V^T A V = T = S diag(theta) S^T; s is the first row of
    S, and f[a, b] = (log a - log b) / (a - b). L has quickly falling eigenvalues.
    """
    with grad_enabled():
        rows, weights = zip(*(_log_sensitivity(*pair) for pair in factors), strict=True)
        forms = _forms(A, "logdet", torch.cat(rows)).sum(1)
        scale = A.shape[0] / sum(len(T) for T, _ in factors)
        return value + scale * (forms @ torch.cat(weights).to(forms))


def _log_sensitivity(T: Tensor, V: Tensor) -> tuple[Tensor, Tensor]:
    """Rows r_i and weights w_i with sum over samples of L = sum_i w_i r_i r_i^T."""
    theta, S = symmetric_eigen(T)
    s = S[:, 0]
    present = s.square() > torch.finfo(s.dtype).eps
    theta = torch.where(present, theta, 1.0)  # nodes without weight are not eigenvalues
    s = torch.where(present, s, 0)
    a, b = theta[:, :, None], theta[:, None]
    low, change = torch.minimum(a, b), torch.maximum(a, b) / torch.minimum(a, b) - 1
    divided = torch.where(change == 0, 1.0, change.log1p() / change) / low
    weights, W = symmetric_eigen(S @ (s[:, :, None] * s[:, None] * divided) @ S.mT)
    # drop rows below the rounding of a finite difference: each row costs a product
    kept = weights > torch.finfo(V.dtype).eps ** 0.5 * weights.amax(1, keepdim=True)
    rows = torch.einsum("smr,smp->srp", W.to(V), V)
    return rows[kept.to(rows.device)], weights[kept]
