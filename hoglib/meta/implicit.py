"""Gradients through a minimum, or through another solution of an equation, by the implicit function
theorem; the steps of the solver are not differentiated."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from hoglib import errors
from hoglib._core.messages import results, validation
from hoglib._core.messages.closures import owner_of
from hoglib._core.modules.state import generator_state, preserve_random_state
from hoglib._core.modules.swap import call_with
from hoglib._core.numerics.trust import memoize_on
from hoglib._core.problem import Policy
from hoglib._core.runtime.source_location import warn
from hoglib._core.substrate import autograd
from hoglib._core.substrate.autograd import (
    Vector,
    fresh_leaves,
    gradient_with_graph,
    materialize_grads,
    vjp,
)
from hoglib._core.substrate.gradient_graph import graph_summary
from hoglib._core.torch_api import pytree
from hoglib._core.torch_api.pytree import Tree
from hoglib._core.torch_api.torch_internals import apply
from hoglib.capture.within import run_uncompiled, when_compiled
from hoglib.curvature.algebra.linear_systems import RTOL
from hoglib.curvature.operators.operators import HessianOperator
from hoglib.ring import ring

Scalar = Callable[[Any, Any], Tensor]  # (params, hyper)
SolverName = Literal["cg", "neumann"]
DEPTHS = {"anderson": 5, "iteration": 0}  # number of earlier images to combine with the last one
NEUMANN_TERMS = 100  # terms of the Neumann series if iterations is None
DIVERGED = 1e6  # no term of a converging series exceeds the right-hand side by this factor
ACCURACY = 1e-2  # of a minimum: its gradient, in sizes of its terms; derivatives are as wrong


@results.result
class Residual(NamedTuple):
    """The errors in the two assumptions of the implicit function theorem."""

    system: Tensor  # |v - (H + damping) x| / |v|, relative residual of the linear system
    stationarity: Tensor  # |d inner / d params|, which is 0 at a minimum


@dataclass(frozen=True)
class Solver:
    """A solver of (H + damping I) x = v; its options are checked."""

    name: str  # "cg" or "neumann"
    iterations: int | None = None
    damping: float = 0.0
    tol: float | None = None  # relative tolerance of "cg"
    step_size: float | None = None  # of the Neumann series
    at_negative_curvature: str = "raise"  # or "warn", and use the iterate before it

    def __post_init__(self) -> None:
        validation.choice("solver", self.name, get_args(SolverName))
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


class _Equation(NamedTuple):
    """The settings of an equation F(z, h) = 0, and words for its messages."""

    policy: Policy
    function: str  # the user's name for F
    inputs: str  # the user's name for h
    advice: str  # if z is no solution


_ALLOW = "or allow it by accuracy=, with derivatives as wrong."
_ROOT = _Equation(Policy("root"), "residual", "inputs", f"Let the solver take more steps, {_ALLOW}")
_MORE = f"Give more max_iter=, another z0 or solver=, {_ALLOW}"
_FIXED_POINT = _Equation(Policy("fixed_point"), "f", "inputs (f may be a module)", _MORE)


class _Flat:
    """A tree of tensors as one vector, in the widest dtype."""

    def __init__(self, tree: Tree) -> None:
        self._parts, self._form = pytree.flatten(tree)
        self.value = self.join(tree).detach()  # the vector of the given tree

    def join(self, tree: Tree) -> Tensor:
        return torch.cat([x.reshape(-1) for x in pytree.leaves(tree)])

    def split(self, z: Tensor) -> Any:
        pieces = zip(z.split([x.numel() for x in self._parts]), self._parts, strict=True)
        return pytree.unflatten([x.view(y.shape).to(y.dtype) for x, y in pieces], self._form)


def implicit_gradient(
    outer: Scalar, inner: Scalar, params: Tree, hyper: Tree, solver: Solver
) -> tuple[Tensor, Any, Residual]:
    r"""The value of outer at a minimum of inner, and its gradient with respect to hyper.

        v = d outer / d params        (H + damping I) x = v        H = d^2 inner / d params^2
        d outer / d hyper (total) = d outer / d hyper - (d^2 inner / d hyper d params) x

    Grad mode must be on. params is taken for a minimum; the residual measures how far it is from one.
    "cg": conjugate gradients; "neumann": x = step_size sum_k (I - step_size (H + damping I))^k v.

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
    # (d^2 inner / d hyper d params) x is the gradient by hyper of <d inner / d params, x>
    mixed = vjp(gradient[:count], own[count:], x, "the inner loss")
    stationarity = pytree.norm([part.detach() for part in gradient[:count] if part is not None])
    check_used([*direct, *mixed], implicit=True)
    slopes = (materialize_grads(part, own[count:]) for part in (direct, mixed))
    total = [a - b for a, b in zip(*slopes, strict=True)]
    gradient = pytree.unflatten(total, pytree.flatten(hyper)[1])
    return value.detach(), gradient, Residual(system, stationarity)


def implicit_graph(
    outer: Scalar, inner: Scalar, params: Tree, hyper: Tree, solver: Solver, policy: Policy
) -> tuple[Tensor, Any, Residual, Any]:
    """`implicit_gradient` and params, with a graph to hyper. Backward solves its systems like the
    first.

    params is the root of d inner / d params + damping (params - theta*), with a constant theta*. The
    second term is 0 at theta*; its derivative adds damping I to each linear system.
    """
    form, (leaves, of_hyper) = pytree.flatten(params)[1], pytree.flatten(hyper)
    systems: list[Tensor] = []

    def slope(theta: object, h: Sequence[Tensor]) -> Any:
        fixed = pytree.unflatten(h, of_hyper)
        loss = lambda *own: inner(pytree.unflatten(own, form), fixed)  # noqa: E731
        found = gradient_with_graph(loss, pytree.leaves(theta), "the inner loss", create_graph=True)
        return materialize_grads(found.parts, found.leaves)

    def solve(_: object, v: Tensor) -> Tensor:
        with ring(policy, inner, examine=False):
            (x,), system = _solve(inner, params, hyper, v, solver)
        systems.append(system)
        return x

    spec = _Equation(policy, "inner", "hyper", "")
    own = fresh_leaves(leaves, create_graph=True)
    # accuracy: `warn_if_no_minimum` judges the solution
    theta, stationarity = _root(spec, inner, slope, params, own, accuracy=inf, solve=solve)
    value = outer(theta, pytree.unflatten(own, of_hyper))
    total = vjp([value], own, [torch.ones_like(value)], "the outer loss", create_graph=True)
    check_used(total, implicit=True)
    # if the outer loss does not depend on params, there was no system
    residual = Residual(systems[0] if systems else 0 * stationarity, stationarity)
    return value, pytree.unflatten(materialize_grads(total, own), of_hyper), residual, theta


def warn_if_no_minimum(inner: Scalar, params: Tree, hyper: Tree, size: Tensor) -> None:
    """Warn if size = |d inner / d params| is not small beside its change if params or hyper were
    doubled."""
    H = _hessian(inner, params, hyper)
    with preserve_random_state():
        # by a product, not by differences, which jump at kinks
        by_params = pytree.norm(H @ pytree.map_tensors(Tensor.detach, params))
        if size <= ACCURACY * by_params:
            return
        moved = pytree.map_tensors(lambda x: x * (1 + 1e-3), hyper)
        slopes = (one.gradient()[1] for one in (_hessian(inner, params, moved), H))
        by_hyper = pytree.norm(pytree.add(*slopes, alpha=-1.0)) / 1e-3
    if not size <= ACCURACY * by_hyper:
        warn(
            "hypergradient: expected params at a minimum of inner, got |d inner / d params| "
            f"(`residual.stationarity`) above {ACCURACY:.0%} of the size of its terms: the implicit "
            "gradient has an error of about this share. Pass rule and more steps, or the end of a "
            "training. Minima at kinks (hinge, L1) have no implicit gradient: take a smooth loss."
        )


def check_used(grads: Sequence[Tensor | None], *, implicit: bool = False) -> None:
    """Raise if nothing depends on hyper: zero gradients would look like an optimum."""
    of_minimum = " A minimum does not depend on rule and start: for those use method='unrolled'."
    if all(grad is None for grad in grads):
        raise errors.NoSecondDerivative(
            "hypergradient: expected an inner or outer loss that depends on hyper, got none that "
            "does; take it from the argument, not from a tensor that is closed over, also by a custom "
            f"Function: pass it what its layers use.{of_minimum if implicit else ''}"
        )


def _hessian(inner: Scalar, params: Tree, hyper: Tree) -> HessianOperator:
    """d^2 inner / d params^2."""
    point, fixed = (pytree.map_tensors(Tensor.detach, x) for x in (params, hyper))
    # the caller's ring is already active around the products
    options: Any = {"check_deterministic": False, "stand_ins": False}
    data = pytree.leaves(point)[0].new_zeros(1)
    return HessianOperator(lambda params, _: inner(params, fixed), point, data, **options)


def _solve(inner: Scalar, params: Any, hyper: Any, v: Any, solver: Solver) -> tuple[Vector, Tensor]:
    """The leaves of x with A x = v, A = H + damping I, and |v - A x| / |v|."""
    operator: Any = _hessian(inner, params, hyper)
    if solver.damping:
        operator = operator.damped(solver.damping)
    # nothing to solve, and the relative residual would be 0 / 0
    if not bool(pytree.norm(v) > 0):
        return pytree.leaves(v), pytree.leaves(params)[0].new_zeros(())
    solve = _solve_by_cg if solver.name == "cg" else _sum_neumann
    return solve(operator, v, solver)


def _sum_neumann(operator: object, v: Tree, solver: Solver) -> tuple[Vector, Tensor]:
    """x = step_size sum_k (I - step_size A)^k v, and its relative residual."""
    assert solver.step_size is not None  # checked by Solver
    step = solver.step_size
    terms = NEUMANN_TERMS if solver.iterations is None else solver.iterations
    x = pytree.map(lambda part: step * part, v)
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
            "direction of zero or negative curvature, got one "
            f"({str(error).partition('. ')[0]}). Give more damping, a stronger regulariser (IMAML: "
            "strength) or more inner steps; unrolling needs no minimum. Losses with kinks (hinge, L1) "
            "have no right gradient by any method."
        )
        if solver.at_negative_curvature == "raise":
            raise errors.NotPositiveDefiniteError(why) from error
        warn(f"{why} The solution found before that direction is used; see `residual`.")
        # run again, and stop after the last direction of positive curvature
        x, solution = solve(error.iterations - 1)
    # a given number of iterations need not converge
    if solver.iterations is None and not bool(solution.converged):
        warn(
            "the implicit gradient: its linear system was solved to a relative residual of "
            f"{float(solution.residual):.2g} only, in {solution.iterations} iterations; give more "
            "damping, or set how many iterations are enough, iterations=..."
        )
    return pytree.leaves(x), solution.residual.to(pytree.leaves(v)[0].device)


@when_compiled(run_uncompiled)
def root(
    residual: Callable[[Any, Any], Any],
    solution: Tree,
    inputs: object,
    *,
    tol: float | None = None,
    accuracy: float | None = None,
) -> Any:
    r"""A solution of an equation as a differentiable function of the equation's inputs, to any order.

        F(z, h) = 0        dz = -(dF/dz)^-1 (dF/dh) dh

    Any solver may find z; its steps are not differentiated. The backward pass solves (dF/dz)^T u = g by
    GMRES, which needs only products with the matrix and holds two vectors for each, and returns
    -(dF/dh)^T u. u is the root of (dF/dz)^T u - g, so derivatives of every order follow by the same
    theorem. For an equilibrium z = f(z, h) the residual is z - f(z, h); for a minimum of a loss it is
    the gradient of the loss.

    Args:
        residual: F, a function ``residual(z, inputs)`` with as many numbers in its result as in z. All
            tensors that require grad must come from its arguments.
        solution: z, a pytree of tensors; only its values are used, not its graph.
        inputs: h, any pytree of floating-point tensors: parameters, data, strengths of a regulariser.
        tol: The relative tolerance of the linear systems. Default: 1e-8, in float32 1e-5.
        accuracy: The allowed |F|, relative to the first-order change of F if z or h were doubled.
            Default: 100 tol.
    Returns:
        z, in the structure of solution, with a graph to the inputs that require grad.
    Raises:
        NondeterministicError: for a residual that draws random numbers.
        ConvergenceError: for a solution with a nonzero residual; in the backward pass for a linear
            system without convergence, for example if dF/dz is singular.
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
    validation.parameters(solution, "solution")
    leaves, form = validation.parameters(inputs, "inputs")
    of_leaves = lambda z, h: residual(z, pytree.unflatten(h, form))  # noqa: E731
    return _root(_ROOT, residual, of_leaves, solution, leaves, tol, accuracy)[0]


@when_compiled(run_uncompiled)
def fixed_point(
    f: Callable[..., Any],
    z0: Tree,
    *inputs: Any,
    solver: Literal["anderson", "iteration"] | Callable[..., Any] = "anderson",
    max_iter: int = 200,
    tol: float | None = None,
    accuracy: float | None = None,
) -> Any:
    r"""A fixed point of a function, as a differentiable function of all its inputs, to any order: the
    layer of a deep equilibrium model.

        z = f(z, x)        dz = (I - df/dz)^-1 (df/dx) dx

    z is found without a graph, from z0 on, and is the `root` of z - f(z, x). "anderson" combines the
    last images f(z_k), with the weights that minimise the combination of their residuals f(z_k) - z_k;
    "iteration" is z_{k+1} = f(z_k).

    Args:
        f: A function ``f(z, *inputs)`` with a result like z. Or a module: its trainable parameters
            count as inputs, and its buffers stay unchanged.
        z0: The initial point, a pytree of tensors; derivatives do not depend on it.
        *inputs: x, any pytrees; derivatives are by their floating-point tensors.
        solver: "anderson", "iteration", or a function ``solver(f, z0)`` that returns z, with f a
            function of z alone.
        max_iter: The largest number of calls of f by "anderson" or "iteration".
        tol: The relative tolerance, |f(z) - z| <= tol |f(z)|, also of the linear systems. Default:
            1e-8, in float32 1e-5.
        accuracy: The allowed distance of z from a fixed point, as for `root`. Default: 100 tol.
    Returns:
        z, in the structure of z0, with a graph to the inputs and parameters that require grad.
    Raises:
        ArgumentTypeError, ArgumentValueError: for an f with a result unlike z0.
        ConvergenceError: if no fixed point was found; in the backward pass if I - df/dz is singular.
        NondeterministicError, NoSecondDerivative, UnsupportedError: as for `root`.
    References:
        Bai, Kolter and Koltun, Deep Equilibrium Models, 2019; Walker and Ni, Anderson Acceleration for
        Fixed-Point Iterations, 2011.
    Example:
        >>> x = torch.tensor(1.0, requires_grad=True)
        >>> z = hog.meta.fixed_point(lambda z, x: (z + x / z) / 2, torch.tensor(2.0), 4 * x)
        >>> z.detach(), torch.autograd.grad(z, x)[0]  # 2 sqrt(x)
        (tensor(2.), tensor(1.))
    """
    validation.refuse_transforms("fixed_point", "use torch.autograd.grad, or `hoglib.hvp`.")
    validation.function("f", f)
    validation.at_least("max_iter", max_iter, 1)
    module = f if isinstance(f, nn.Module) else nn.Module()
    params = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if not callable(solver):
        depth = DEPTHS[validation.choice("solver", solver, DEPTHS)]
        solver = partial(_anderson, tol=tol, max_iter=max_iter, depth=depth)
    with autograd.outside_inference_mode():
        inputs = autograd.clone_inference_tensors(inputs)
    form = validation.parameters(z0, "z0")[1]
    leaves = [*params.values(), *filter(pytree.is_float, pytree.leaves(inputs))]

    def image(z: object, h: Sequence[Tensor]) -> Any:
        own = pytree.filled(inputs, h[len(params) :])
        if f is not module:
            return like_z0("f(z, *inputs)", f(z, *own))
        return like_z0("f(z, *inputs)", call_with(f, dict(zip(params, h, strict=False)), z, *own))

    def like_z0(what: str, z: object) -> Any:
        return pytree.unflatten(validation.vectors(what, z, z0, "z0", blocks=False)[0], form)

    constants = [x.detach() for x in leaves]

    def step(z: object) -> Any:  # a user's solver may differentiate it
        with ring(_FIXED_POINT.policy, f, examine=False):
            return image(z, constants)

    with autograd.outside_inference_mode(), torch.no_grad():
        z = solver(step, pytree.map(Tensor.detach, z0))
    difference = lambda z, h: pytree.add(z, image(z, h), alpha=-1)  # noqa: E731
    return _root(_FIXED_POINT, f, difference, like_z0("solver(f, z0)", z), leaves, tol, accuracy)[0]


def _anderson(f: Any, z0: Tree, tol: float | None, max_iter: int, depth: int) -> Any:
    """z with |f(z) - z| <= tol |f(z)|; stops after max_iter calls, or at infinite or NaN values.

    z_{k+1} = f(z_k) - c dF        c = argmin |r_k - c dR|        r_k = f(z_k) - z_k

    dF, dR: the last differences of images f(z_k), and of residuals r_k.
    """
    flat = _Flat(z0)
    z, tol = flat.value, _tolerance(flat.value, tol)
    F = R = z.new_empty(0, len(z))
    for _ in range(max_iter):
        image = flat.join(f(flat.split(z)))
        r = image - z
        # `not >` instead of `<=`, so that NaN ends the iteration too
        if not r.norm() > tol * image.norm():
            break
        F, R = (torch.cat([M, x[None]])[-depth - 1 :] for M, x in ((F, image), (R, r)))
        dF, dR = F.diff(dim=0), R.diff(dim=0)
        # float64: a Gram matrix squares the condition number
        gram = (dR @ dR.T).double()
        # regularise: the matrix is singular if differences are zero or multiples of each other
        rounding = 10 * torch.finfo(z.dtype).eps * gram.trace()
        gram.diagonal().add_(rounding + torch.finfo(z.dtype).tiny)
        c = torch.linalg.solve_ex(gram, (dR @ r).double())[0]
        z = image - c.to(z.dtype) @ dF
    return flat.split(z)


def _tolerance(z: Tensor, tol: float | None) -> float:
    return RTOL.get(z.dtype, 1e-5) if tol is None else validation.number("tol", tol, minimum=0)


def _root(
    spec: _Equation,
    owner: object,
    residual: Callable[[Any, Sequence[Tensor]], Any],
    solution: Tree,
    leaves: Vector,
    tol: float | None = None,
    accuracy: float | None = None,
    solve: object = None,
) -> tuple[Any, Tensor]:
    """The root of residual(z, leaves), and |F| there. owner: the user's function inside residual.

    solve: (A, b) -> u with A u = b, for A as a function. Default: GMRES.
    """
    for x in (*pytree.leaves(solution), *leaves):
        validation.real("solution and inputs", x)
    with autograd.outside_inference_mode():
        flat, leaves = _Flat(solution), autograd.clone_inference_tensors(leaves)
    tol = _tolerance(flat.value, tol)
    least = 100 * tol if accuracy is None else validation.number("accuracy", accuracy, minimum=0)

    def F(z: Tensor, *h: Tensor) -> Tensor:
        with ring(spec.policy, owner, examine=False):
            found = residual(flat.split(z), h)
        return flat.join([validation.real(spec.function, x) for x in pytree.leaves(found)])

    with ring(spec.policy, owner):
        value, terms = _check_root(spec, owner, F, fresh_leaves([flat.value, *leaves], False))
        size = value.norm()
        # inf * 0 is NaN
        if value.shape != flat.value.shape or not (least == inf or size <= least * terms):
            raise errors.ConvergenceError(
                f"{spec.policy.caller}: expected a solution, with {len(flat.value)} residuals that "
                f"are 0, got {len(value)} with |F| = {size:.2g}, where its terms are of size "
                f"{terms:.2g}. {spec.advice}"
            )
    return flat.split(apply(_Root, F, solve or partial(_gmres, tol=tol), flat.value, *leaves)), size


def _check_root(
    spec: _Equation, owner: Any, F: Callable[..., Tensor], own: Vector
) -> tuple[Tensor, Tensor]:
    """F at own = (z, *h), and the size of its first-order change if z or h were doubled.

    Raises if F depends on more than its arguments. Warns if autograd and differences disagree on
    derivatives; this is checked once for each code and shape.
    """
    before, given = generator_state(own[0].device), {id(x) for x in own}
    value = F(*own)
    if not torch.equal(before, generator_state(own[0].device)):
        raise errors.NondeterministicError(
            f"{spec.function}: expected one that draws no random numbers, got one that does: each "
            "product would be of another function. Call model.eval(), or pass what is drawn in "
            f"{spec.inputs}."
        )
    graph = graph_summary(value)
    others = [x for key, x in graph.leaves.items() if key not in given]
    if others:
        raise errors.NoSecondDerivative(
            f"{spec.function}: expected one that takes all that requires grad from its arguments, got "
            f"tensors of shape {', '.join(str(tuple(x.shape)) for x in others[:3])} from elsewhere, "
            f"whose gradients would be missing. Pass them in {spec.inputs}, the parameters of a "
            "module by `torch.func.functional_call(module, params, ...)`, or detach() what is a "
            "constant, as `module.requires_grad_(False)` does for what a module keeps."
        )
    changes = _changes(F, own, value, 1e-3)
    key = spec.function, *(x.shape for x in own)
    memoize_on(owner_of(owner), key, partial(_check_derivatives, spec, F, own, value, changes))
    # differentiate once, so that the examination on exit judges custom Functions
    if graph.functions:
        vjp([value], own, [torch.ones_like(value)], spec.policy.caller, create_graph=True)
    return value.detach(), changes.norm(dim=1).max()


@torch.no_grad()
def _changes(F: Callable[..., Tensor], own: Vector, value: Tensor, step: float) -> Tensor:
    """(dF/dz) z and (dF/dh) h, by differences."""
    z, *h = own
    moved = F((1 + step) * z, *h), F(z, *[(1 + step) * x for x in h])
    return (torch.stack(moved) - value) / step


def _check_derivatives(
    spec: _Equation, F: Callable[..., Tensor], own: Vector, value: Tensor, changes: Tensor
) -> bool:
    """Warn if autograd and differences disagree on (dF/dz) z or (dF/dh) h, projected on the larger of
    these two vectors, w."""
    size, largest = changes.norm(dim=1).max(0)
    w = changes[largest] / size
    slopes = materialize_grads(vjp([value], own, [w], spec.policy.caller, True), own)
    of_z, *of_h = [(slope * x).sum().detach() for slope, x in zip(slopes, own, strict=True)]
    by_autograd = torch.stack([of_z, sum(of_h, torch.zeros_like(of_z))])
    off = (changes @ w - by_autograd).abs().max()
    # differences are uncertain if F is curved or has a kink, or if few digits are left
    uncertain = ((_changes(F, own, value, 2e-3) - changes) @ w).abs().max()
    if bool((off > 0.05 * size) & (uncertain < 0.2 * off)):
        warn(
            f"{spec.policy.caller}: expected derivatives of {spec.function} by autograd as by "
            f"differences, got {by_autograd.tolist()} and {(changes @ w).tolist()} along the solution "
            f"and along {spec.inputs}; those of the solution are as wrong. Look for detach(), .data, "
            f".item(), NumPy and no_grad() in {spec.function}."
        )
    return True


class _Root(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, F: Any, solve: Any, z: Tensor, *h: Tensor) -> Tensor:
        ctx.F, ctx.solve, found = F, solve, z.clone()
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
            u = ctx.solve(transposed, g.detach())
            if again:  # u itself is a root: (dF/dz)^T u - g = 0, a function of u, z, g and h
                u = apply(_Root, adjoint, ctx.solve, u, z, g, *h)
            return None, None, None, *vjp([y], own[1:], [-u], "root", create_graph=again)


@torch.no_grad()
def _gmres(
    A: Callable[[Tensor], Tensor], b: Tensor, tol: float, size: Tensor | None = None
) -> Tensor:
    """x with A x = b and the smallest |b - A x| over Krylov spaces, by directions p with orthonormal
    images q = A p.

    size: |g| for the original right-hand side g, if b is the rest g - A x of an earlier solution.
    Default: |b|.
    """
    size = b.norm() if size is None else size
    x, r, p, P, Q = torch.zeros_like(b), b, b, b.new_empty(0, len(b)), b.new_empty(0, len(b))
    target, left = tol * size, b.norm()
    while left > target and len(P) < min(2 * len(b), 1000):
        p = p / p.norm()
        q = A(p)
        for _ in range(2):  # orthogonalise twice, against rounding
            c = Q @ q
            p, q = p - c @ P, q - c @ Q
        p, q = p / q.norm(), q / q.norm()
        P, Q = torch.cat([P, p[None]]), torch.cat([Q, q[None]])
        x, r, before = x + (q @ r) * p, r - (q @ r) * q, left
        left = r.norm()
        p = r if left < 0.9 * before else q  # q continues the Krylov space if r stagnates
    rest = b - A(x)
    left = rest.norm()
    # the recurrence for r has lost digits: solve for the rest
    if 10 * target < left < 0.1 * b.norm():
        return x + _gmres(A, rest, tol, size)
    if not left <= 10 * target:
        raise errors.ConvergenceError(
            f"root: expected a linear system (dF/dz)^T u = g that GMRES solves to {tol:g} |g|, got a "
            f"residual of {left / size:.2g} |g| after {len(P)} products. dF/dz is singular "
            "where solutions are not isolated; else allow a larger tol=, or use float64."
        )
    return x
