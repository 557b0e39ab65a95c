"""Gradients through a minimum, or another solution of an equation, by the implicit function theorem;
no inner loop is differentiated."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from hoglib import errors
from hoglib._core import pytree, validation
from hoglib._core.autograd import (
    Vector,
    clone_inference_tensors,
    fresh_leaves,
    gradient_with_graph,
    materialize_grads,
    outside_inference_mode,
    vjp,
)
from hoglib._core.gradient_graph import graph_summary
from hoglib._core.problem import Policy
from hoglib._core.source_location import warn
from hoglib._core.state import generator_state
from hoglib._core.torch_internals import apply
from hoglib.curvature.linear_systems import RTOL
from hoglib.curvature.operators import HessianOperator
from hoglib.ring import ring

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
        validation.none_or_at_least("iterations", self.iterations, 1)
        validation.number("damping", self.damping, minimum=0)
        if self.name != "neumann":
            return
        if self.step_size is None:
            raise errors.ArgumentValueError(
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
    found = vjp([value], own, [torch.ones_like(value)], "the outer loss")
    v, direct = materialize_grads(found[:count], own[:count]), found[count:]
    x, system = _solve(inner, params, hyper, pytree.unflatten(v, pytree.flatten(params)[1]), solver)
    _, own, gradient, _ = gradient_with_graph(of_leaves(inner), leaves, "the inner loss", False)
    mixed = vjp(gradient[:count], own[count:], x, "the inner loss")
    flat = [part for part in gradient[:count] if part is not None]
    stationarity = pytree.norm([part.detach() for part in flat])
    check_used([*direct, *mixed], implicit=True)
    slopes = (materialize_grads(part, own[count:]) for part in (direct, mixed))
    total = [a - b for a, b in zip(*slopes, strict=True)]
    gradient = pytree.unflatten(total, pytree.flatten(hyper)[1])
    return value.detach(), gradient, Residual(system, stationarity)


def check_used(grads: Sequence[Tensor | None], *, implicit: bool = False) -> None:
    """Raise where nothing depends on hyper: zeros would look like an optimum."""
    of_minimum = " A minimum does not depend on rule and start: for those use method='unrolled'."
    if all(grad is None for grad in grads):
        raise errors.NoSecondDerivative(
            "hypergradient: expected an inner or outer loss that depends on hyper, got none that "
            "does; take it from the argument, not from a tensor that is closed over, also by a custom "
            f"Function: pass it what its layers use.{of_minimum if implicit else ''}"
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
            raise errors.NonFiniteError(
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
    except errors.NotPositiveDefiniteError as error:
        why = (
            "the implicit gradient: expected a minimum of the inner loss, where its Hessian has no "
            f"direction of negative curvature, got one ({str(error).partition('. ')[0]}). Give more "
            "damping, a stronger regulariser (IMAML: strength) or more inner steps; unrolling needs no "
            "minimum."
        )
        if solver.at_negative_curvature == "raise":
            raise errors.NotPositiveDefiniteError(why) from error
        warn(f"{why} The solution found before that direction is used; see `residual`.")
        x, solution = solve(error.iterations - 1)
    if solver.iterations is None and not bool(solution.converged):
        warn(
            "the implicit gradient: its linear system was solved to a relative residual of "
            f"{float(solution.residual):.2g} only, in {solution.iterations} iterations; give more "
            "damping, or set how many iterations are enough, iterations=..."
        )
    return pytree.leaves(x), solution.residual.to(pytree.leaves(v)[0].device)


def root(
    residual: Callable[[Any, Any], Any], solution: Any, inputs: Any, *, tol: float | None = None,
    accuracy: float | None = None,
) -> Any:  # fmt: skip
    r"""A solution of an equation as a function of what the equation depends on, to any order.

        F(z, h) = 0        dz = -(dF/dz)^-1 (dF/dh) dh

    z is found by any solver, whose steps are not differentiated. The backward pass solves
    (dF/dz)^T u = g by GMRES, which needs products with the matrix only and holds two vectors for
    each, and returns -(dF/dh)^T u. u is the root of (dF/dz)^T u - g, so that derivatives of every
    order follow by the same theorem. An equilibrium z = f(z, h) has the residual z - f(z, h), a
    minimum of a loss the gradient of the loss.

    Args:
        residual: F, a function ``residual(z, inputs)`` whose result has as many numbers as z. It takes
            all that requires grad from its arguments.
        solution: z, a pytree of tensors; it is taken as it is, without its graph.
        inputs: h, any pytree of floating-point tensors: parameters, data, strengths of a regulariser.
        tol: The relative tolerance of the linear systems. Default: 1e-8, in float32 1e-5.
        accuracy: How large |F| may be, as a share of what F would change by, to first order, if z or h
            were doubled. Default: 100 tol.
    Returns:
        z, in the structure of solution, with a graph to the inputs that require grad.
    Raises:
        NondeterministicError: for a residual that draws random numbers.
        ConvergenceError: for a solution whose residual is not zero; in the backward pass for a linear
            system that was not solved, as where dF/dz is singular.
        NoSecondDerivative: for a residual that uses other tensors that require grad.
        UnsupportedError: inside transforms of `torch.func`.
    References:
        Bai, Kolter and Koltun, Deep Equilibrium Models, 2019, theorem 1; Blondel et al., Efficient and
        Modular Implicit Differentiation, 2022; Saad and Schultz, GMRES, 1986.
    Example:
        >>> h = torch.tensor(4.0, requires_grad=True)
        >>> z = hog.meta.root(lambda z, h: z.square() - h, torch.tensor(2.0), h)  # sqrt(h)
        >>> (g,) = torch.autograd.grad(z, h, create_graph=True)  # 1 / (2 sqrt(h))
        >>> g.detach(), torch.autograd.grad(g, h)[0]  # -1 / (4 h sqrt(h))
        (tensor(0.2500), tensor(-0.0312))
    """
    validation.refuse_transforms("root", "differentiate by torch.autograd.grad, or `hoglib.hvp`.")
    with outside_inference_mode():
        parts, form = validation.parameters(solution, "solution")
        leaves, of_inputs = validation.parameters(clone_inference_tensors(inputs), "inputs")
        for x in (*parts, *leaves):
            validation.real("solution and inputs", x)
        z = torch.cat([x.detach().reshape(-1) for x in parts])
    tol = RTOL.get(z.dtype, 1e-5) if tol is None else validation.number("tol", tol, minimum=0)

    def split(z: Tensor) -> Any:
        pieces = zip(z.split([x.numel() for x in parts]), parts, strict=True)
        return pytree.unflatten([piece.view(x.shape).to(x.dtype) for piece, x in pieces], form)

    def F(z: Tensor, *h: Tensor) -> Tensor:
        with ring(Policy("root"), residual, examine=False):
            found = residual(split(z), pytree.unflatten(h, of_inputs))
        return torch.cat([validation.real("residual", x).reshape(-1) for x in pytree.leaves(found)])

    least = 100 * tol if accuracy is None else validation.number("accuracy", accuracy, minimum=0)
    with ring(Policy("root"), residual):
        _check_root(F, fresh_leaves([z, *leaves], False), least)
    return split(apply(_Root, F, tol, z, *leaves))


def _check_root(F: Callable[..., Tensor], own: Vector, accuracy: float) -> None:
    """Raise where the residual is no function of its arguments, or is not zero at the solution."""
    before = generator_state(own[0].device)
    value, given = F(*own), {id(x) for x in own}
    if not torch.equal(before, generator_state(own[0].device)):
        raise errors.NondeterministicError(
            "residual: expected one that draws no random numbers, got one that does: each product "
            "would be of another function. Call model.eval(), or pass what is drawn in inputs."
        )
    graph = graph_summary(value)
    others = [x for key, x in graph.leaves.items() if key not in given]
    if others:
        raise errors.NoSecondDerivative(
            "residual: expected one that takes all that requires grad from its arguments, got tensors "
            f"of shape {', '.join(str(tuple(x.shape)) for x in others[:3])} from elsewhere, whose "
            "gradients would be missing. Pass them in inputs, the parameters of a module by "
            "`torch.func.functional_call(module, params, ...)`, or detach() what is a constant."
        )
    if graph.functions:  # a wrong one is reported at the end, if it was differentiated
        vjp([value], own, [torch.ones_like(value)], "root", create_graph=True)
    step = 1e-3
    with torch.no_grad():
        value, (z, *h) = value.detach(), own
        moved = F((1 + step) * z, *h), F(z, *[(1 + step) * x for x in h])
        size, scale = value.norm(), max((y - value).norm() for y in moved) / step
    if value.shape != own[0].shape or not size <= accuracy * scale:
        raise errors.ConvergenceError(
            f"root: expected a solution, with {own[0].numel()} residuals that are 0, got {len(value)} "
            f"with |F| = {size:.2g}, where its terms are of size {scale:.2g}. Let the solver take more "
            "steps, or allow it by accuracy=, with derivatives as wrong."
        )


class _Root(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, F: Any, tol: float, z: Tensor, *h: Tensor) -> Tensor:
        ctx.F, ctx.tol, found = F, tol, z.clone()
        ctx.save_for_backward(found, *h)
        return found

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        z, *h = ctx.saved_tensors
        again = torch.is_grad_enabled()

        def adjoint(u: Tensor, z: Tensor, g: Tensor, *h: Tensor) -> Tensor:
            own = fresh_leaves([z], True)
            product = vjp([ctx.F(*own, *h)], own, [u], "root", create_graph=True)
            return materialize_grads(product, own)[0] - g

        def transposed(v: Tensor) -> Tensor:
            return materialize_grads(vjp([y], own[:1], [v], "root", True), own[:1])[0]

        with torch.enable_grad():
            own = fresh_leaves([z, *h], again)
            y = ctx.F(*own)
            u = _gmres(transposed, g.detach(), ctx.tol)
            if again:  # u is the root of (dF/dz)^T u - g, by u, and what that depends on
                u = apply(_Root, adjoint, ctx.tol, u, z, g, *h)
            return None, None, None, *vjp([y], own[1:], [-u], "root", create_graph=again)


@torch.no_grad()
def _gmres(A: Callable[[Tensor], Tensor], b: Tensor, tol: float) -> Tensor:
    """x of A x = b, with the smallest |b - A x| over Krylov spaces: by directions p whose images
    q = A p are orthonormal."""
    x, r, p, P, Q = torch.zeros_like(b), b, b, b.new_empty(0, len(b)), b.new_empty(0, len(b))
    target, left = tol * b.norm(), b.norm()
    while left > target and len(P) < min(2 * len(b), 1000):
        p = p / p.norm()
        q = A(p)
        for _ in range(2):  # once is not enough in floating point
            c = Q @ q
            p, q = p - c @ P, q - c @ Q
        p, q = p / q.norm(), q / q.norm()
        P, Q = torch.cat([P, p[None]]), torch.cat([Q, q[None]])
        x, r, before = x + (q @ r) * p, r - (q @ r) * q, left
        left = r.norm()
        p = r if left < 0.9 * before else q  # which is no less where r stays
    left = (b - A(x)).norm()
    if not left <= 10 * target:
        raise errors.ConvergenceError(
            f"root: expected a linear system (dF/dz)^T u = g that GMRES solves to {tol:g} |g|, got a "
            f"residual of {left / b.norm():.2g} |g| after {len(P)} products. dF/dz is singular "
            "where solutions are not isolated; else allow a larger tol=, or use float64."
        )
    return x
