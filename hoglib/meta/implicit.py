"""Gradients through a minimum by the implicit function theorem; no inner loop is differentiated."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from hoglib._core import pytree, validation
from hoglib._core.autograd import Vector, gradient_with_graph, materialize_grads, vjp
from hoglib._core.source_location import warn
from hoglib.curvature.operators import HessianOperator
from hoglib.errors import (
    ArgumentValueError,
    NonFiniteError,
    NoSecondDerivative,
    NotPositiveDefiniteError,
)

Scalar = Callable[[Any, Any], Tensor]  # of params and hyper
SolverName = Literal["cg", "neumann"]
NEUMANN_TERMS = 100  # where iterations is None
DIVERGED = 1e6  # times the right-hand side, which no term of a converging series reaches


class Residual(NamedTuple):
    """How far the two assumptions of the implicit function theorem are from being true."""

    system: Tensor  # |v - (H + damping) x| / |v|, of the linear system
    stationarity: Tensor  # |d inner / d params|, which is 0 at a minimum


@dataclass(frozen=True)
class Solver:
    """How (H + damping I) x = v is solved, checked when it is made."""

    name: str
    iterations: int | None = None
    damping: float = 0.0
    tol: float | None = None
    step_size: float | None = None  # of the Neumann series
    at_negative_curvature: str = "raise"  # or "warn", and use what was found before it

    def __post_init__(self) -> None:
        validation.one_of("solver", self.name, get_args(SolverName))
        if self.iterations is not None:
            validation.at_least("iterations", self.iterations, 1)
        validation.number("damping", self.damping, minimum=0)
        if self.name != "neumann":
            return
        if self.step_size is None:
            raise ArgumentValueError(
                "step_size: expected a positive number for the Neumann series, below 2 over the "
                "largest eigenvalue of the Hessian, got None; an inner learning rate that "
                "converges is one."
            )
        validation.positive("step_size", self.step_size)


def implicit_gradient(
    outer: Scalar, inner: Scalar, params: Any, hyper: Any, solver: Solver
) -> tuple[Tensor, Any, Residual]:
    r"""The value of outer at a minimum of inner, and its gradient with respect to hyper.

        v = d outer / d params        (H + damping I) x = v        H = d^2 inner / d params^2
        d outer / d hyper (total) = d outer / d hyper - (d^2 inner / d hyper d params) x

    Called where autograd records. params is taken for a minimum; the residual says how far it is from
    one. "cg": conjugate gradients; "neumann": x = step_size sum_k (I - step_size (H + damping I))^k v.

    References:
        Bengio, Gradient-based optimization of hyperparameters, 2000; Rajeswaran et al., iMAML,
        2019, eq. 6; Lorraine, Vicol and Duvenaud, 2020, algorithm 3 (Neumann).
    """
    leaves, structure = pytree.flatten((params, hyper))
    count = len(pytree.leaves(params))

    def of_leaves(function: Scalar) -> Callable[..., Tensor]:
        return lambda *own: function(*pytree.unflatten(own, structure))

    own = [leaf.detach().requires_grad_() for leaf in leaves]
    value = of_leaves(outer)(*own)
    found: list[Tensor | None] = [None] * len(own)
    if value.requires_grad:
        found = list(torch.autograd.grad(value, own, allow_unused=True))
    v, direct = materialize_grads(found[:count], own[:count]), found[count:]
    x, system = _solve(inner, params, hyper, pytree.unflatten(v, pytree.flatten(params)[1]), solver)
    _, own, gradient, _ = gradient_with_graph(of_leaves(inner), leaves, "the inner loss", False)
    mixed = vjp(gradient[:count], own[count:], x, "the inner loss")
    flat = [part for part in gradient[:count] if part is not None]
    stationarity = pytree.norm([part.detach() for part in flat])
    check_used([*direct, *mixed], implicit=True)
    slopes = (materialize_grads(part, own[count:]) for part in (direct, mixed))
    total = [a - b for a, b in zip(*slopes, strict=True)]
    return (
        value.detach(),
        pytree.unflatten(total, pytree.flatten(hyper)[1]),
        Residual(system, stationarity),
    )


def check_used(grads: Sequence[Tensor | None], *, implicit: bool = False) -> None:
    """Raise where nothing depends on hyper: zeros would look like an optimum."""
    if all(grad is None for grad in grads):
        raise NoSecondDerivative(
            "hypergradient: expected an inner or outer loss that depends on hyper, got none that "
            "does; take it from the argument, not from a tensor that is closed over, also by a custom "
            "Function: pass it what its layers use."
            + (
                " A minimum does not depend on the rule or the start that led there: for those use "
                "method='unrolled'."
                if implicit
                else ""
            )
        )


def _solve(inner: Scalar, params: Any, hyper: Any, v: Any, solver: Solver) -> tuple[Vector, Tensor]:
    """x, leaf by leaf, and |v - A x| / |v|."""
    fixed = pytree.map_tensors(Tensor.detach, hyper)
    point = pytree.map_tensors(Tensor.detach, params)
    leaf = pytree.leaves(point)[0]
    operator: Any = HessianOperator(
        lambda params, batch: inner(params, fixed), point, leaf.new_zeros(1),
        check_deterministic=False, stand_ins=False,
    )  # fmt: skip
    if solver.damping:
        operator = operator.damped(solver.damping)
    if not bool(pytree.norm(v) > 0):
        return pytree.leaves(v), leaf.new_zeros(())
    solve = _solve_by_cg if solver.name == "cg" else _sum_neumann
    return solve(operator, v, solver)


def _sum_neumann(operator: Any, v: Any, solver: Solver) -> tuple[Vector, Tensor]:
    """x = step_size sum_k (I - step_size A)^k v, and its relative residual."""
    assert solver.step_size is not None  # checked by Solver
    step = solver.step_size
    terms = NEUMANN_TERMS if solver.iterations is None else solver.iterations
    x = pytree.scale(v, step)
    for k in range(terms):
        rest = pytree.add(v, operator @ x, alpha=-1.0)  # (I - step A)^(k + 1) v
        residual = pytree.norm(rest) / pytree.norm(v)
        if not bool(residual < DIVERGED):
            raise NonFiniteError(
                f"the Neumann series: expected terms that shrink, got one of {float(residual):.2g} "
                f"times the right-hand side after {k + 1}. It diverges: lower step_size, or use the "
                "solver 'cg'."
            )
        if k + 1 < terms:
            x = pytree.add(x, rest, alpha=step)
    return pytree.leaves(x), residual


def _solve_by_cg(operator: Any, v: Any, solver: Solver) -> tuple[Vector, Tensor]:
    """x by conjugate gradients, and its relative residual."""

    def solve(limit: int | None) -> tuple[Any, Any]:
        return operator.solve(v, tol=solver.tol, max_iter=limit, return_info=True)

    try:
        x, solution = solve(solver.iterations)
    except NotPositiveDefiniteError as error:
        why = (
            "the implicit gradient: expected a minimum of the inner loss, where its Hessian has no "
            f"direction of negative curvature, got one ({str(error).partition('. ')[0]}). Give more "
            "damping, a stronger regulariser (IMAML: strength) or more inner steps."
        )
        if solver.at_negative_curvature == "raise":
            raise NotPositiveDefiniteError(why) from error
        warn(f"{why} The solution found before that direction is used; see `residual`.")
        x, solution = solve(error.iterations - 1)
    if solver.iterations is None and not bool(solution.converged):
        warn(
            "the implicit gradient: its linear system was solved to a relative residual of "
            f"{float(solution.residual):.2g} only, in {solution.iterations} iterations; give more "
            "damping, or set how many iterations are enough, iterations=..."
        )
    return pytree.leaves(x), solution.residual.to(pytree.leaves(v)[0].device)
