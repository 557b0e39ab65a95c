"""Derivatives of a function by its inputs, at many points: the Laplacian and its square, derivatives
along a direction, and mixed partial derivatives.

Second-order operators are weighted sums of second derivatives along directions,

    sum_ij a_ij d_i d_j f = sum_r w_r v_r^T H v_r

The collapsed route propagates values, first derivatives along all directions, and the *sum* of the
second derivatives, without any single second derivative (`hoglib.taylor`).
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import cache, reduce
from itertools import repeat
from typing import Any, Literal, NamedTuple, Unpack, overload

import torch
from torch import Tensor

from hoglib._core.messages import validation
from hoglib._core.modules.state import GeneratorStates
from hoglib._core.numerics.factorizations import symmetric_eigen
from hoglib._core.numerics.finite_differences import fixed_random_numbers
from hoglib._core.problem import Options
from hoglib._core.runtime.source_location import warn_once
from hoglib._core.torch_api import torch_internals
from hoglib._core.torch_api.torch_modes import layer_mode, without_stand_ins
from hoglib.capture.within import when_compiled, within_compile
from hoglib.curvature.points.input_derivatives import (
    Function,
    Weighted,
    by_forward,
    by_reverse,
    point_gradients,
    point_values,
)
from hoglib.curvature.points.sparse_points import coloured_directions
from hoglib.errors import ArgumentTypeError, ArgumentValueError
from hoglib.taylor.jet import TaylorMode, TaylorOptions, as_returned, by_taylor
from hoglib.taylor.nested import along_path, differentiate_path
from hoglib.taylor.series import Algebra, Biharmonic, MultiIndex, Parts, Univariate, add

PointMode = Literal["auto", "collapsed", "nested"]
# Elements of the directions in one run of Taylor mode, if no graph is kept.
AT_ONCE = 2**24
# With at most FEW directions nested derivatives are faster: Taylor mode runs Python code at each
# operation. With a kept graph, also at most SMALL elements in x: for 8,192 elements and an MLP 2 x 64
# Taylor mode takes 0.78 of the nested time.
FEW, SMALL = 2, 1024
OF_POINTS = "one number for each point is `a.reshape(-1, 1).expand(-1, D)`"


class Directions(NamedTuple):
    """Directions v_r with weights w_r."""

    vectors: Tensor  # [R, *x.shape]
    weights: Tensor | float  # [R], or one number for all
    unit: bool  # whether the directions are the unit vectors of a point, in order

    def probes(self, by_index: bool = True) -> list[Weighted]:
        """(direction, weight) for nested derivatives; a direction is the index of an element if
        by_index and unit, else a vector."""
        weights = self.weights
        if not isinstance(weights, Tensor):
            weights = [weights] * len(self.vectors)  # type: ignore[assignment]
        indices = by_index and self.unit
        vectors = range(len(self.vectors)) if indices else self.vectors.unbind()
        return list(zip(vectors, weights, strict=True))  # type: ignore[arg-type]


# Functions of `batched`: whether x is many points.
Chosen = Callable[[bool], Directions]
Pieces = Callable[[bool], list[tuple[Algebra, Parts]]]  # the runs of Taylor mode


def _like_laplacian(value: Any, options: Any, x: Tensor, *args: Any) -> Any:
    """Example results of `laplacian` for torch.compile."""
    if not options.get("return_gradient"):
        return value, value.clone()
    return value, value.clone(), value.sum().expand(*value.shape, *x.shape[min(value.dim(), 1) :])


def _like_directional(value: Any, options: object, x: Tensor, v: Tensor, *args: Any) -> Any:
    """Example results of `directional` for torch.compile."""
    return value, value.expand(*v.shape[: v.dim() - x.dim()], *value.shape).clone()


@overload
def laplacian(
    func: Callable[..., Tensor],
    x: Tensor,
    *args: Any,
    coefficients: object = None,
    num_projections: int | None = None,
    sparsity: object = None,
    generator: torch.Generator | None = None,
    return_gradient: Literal[False] = False,
    mode: PointMode = "auto",
    create_graph: bool | None = None,
    **options: Unpack[Options],
) -> tuple[Tensor, Tensor]: ...
@overload
def laplacian(
    func: Callable[..., Tensor],
    x: Tensor,
    *args: Any,
    coefficients: object = None,
    num_projections: int | None = None,
    sparsity: object = None,
    generator: torch.Generator | None = None,
    return_gradient: Literal[True],
    mode: PointMode = "auto",
    create_graph: bool | None = None,
    **options: Unpack[Options],
) -> tuple[Tensor, Tensor, Tensor]: ...
@when_compiled(within_compile(_like_laplacian))
def laplacian(
    func: Callable[..., Tensor],
    x: Tensor,
    *args: Any,
    coefficients: object = None,
    num_projections: int | None = None,
    sparsity: object = None,
    generator: torch.Generator | None = None,
    return_gradient: bool = False,
    mode: PointMode = "auto",
    create_graph: bool | None = None,
    **options: Unpack[Options],
) -> tuple[Any, ...]:
    r"""The value of a function at many points, and its Laplacian by their coordinates.

        f_n = func(x, *args)_n        L_n = sum_i d^2 f_n / d x_{n,i}^2
        with coefficients a:          L_n = sum_ij a_ij d^2 f_n / d x_{n,i} d x_{n,j}
        with num_projections = k:     L_n ~ 1/k sum_v v^T (d^2 f_n / d x_n^2) a v,  v_i = -1 or 1

    The collapsed route, also called forward Laplacian, runs func once, and carries with each value its
    first derivatives by all D elements of a point and the sum of its second derivatives. The nested
    route takes a gradient with its graph, and a backward pass for each element (forward-over-reverse
    inside torch.func transforms). "auto" is nested

    - if an operation has no Taylor rule, such as a custom Function of yours;
    - if nested derivatives are faster: for one output and at most two directions, without a graph at
      any number of points, with a graph at points of at most 1,024 elements in all

    and collapsed otherwise.

    The estimate takes k directions, or 2k with coefficients. Its mean is L and its variance
    2/k sum_{i != j} S_ij^2, with S the symmetric part of H a: it is exact for a diagonal S.

    The inputs are not changed; laplacian works under no_grad and inference_mode. A point may be a set
    or a graph with elements that act on each other, x [N, P, D]; points must not act on each other. A
    network of ReLUs has Laplacian zero, and a warning says so: take tanh, SiLU or sine. At a kink
    derivatives beyond the first are zero, unless both sides have equal ones, as for |x|^2.

    Args:
        func: The function ``func(x, *args)``, or an `nn.Module`, that treats each point by itself.
        x: N points, [N, ...]; one point of any shape if func returns a scalar.
        *args: Further arguments of func, such as data for each point (a time, a class).
        coefficients: a, for D elements of a point: diagonals [D] or [N, D], or matrices [N, D, D], of
            which the symmetric part counts; for one point [D] or [D, D]. Or a function of x that
            returns a. It may require grad. Default: ones, the Laplacian.
        num_projections: k random vectors instead of all elements of a point; None is exact.
        sparsity: The pattern of the Hessian of each point by its D elements: "auto" finds it, and
            `hoglib.sparse_hessian` describes patterns. Elements without a common entry share a
            direction: the Laplacian of particles that do not act on each other takes as many directions
            as one particle. The Hessian is compared with the pattern at calls 1, 2, 4, 8, ... of one
            func object with equal numbers in args; "auto" then finds a new pattern. In between, if the
            Hessian has left the pattern, the result is an unbiased estimate: the directions have random
            signs. Not inside torch.func transforms.
        generator: Draws the random vectors; None is torch's global generator.
        return_gradient: Also return the gradient of each output by its point.
        mode: "collapsed", which raises if an operation has no Taylor rule; "nested"; or "auto".
        create_graph: Whether the results can be differentiated again, by parameters, x or args. By
            default they can if gradients are enabled and something requires one; all directions then
            stay in memory until backward. Inside torch.func transforms they always can.
        **options: How func is evaluated, as :class:`hoglib.Options` describes it.
    Returns:
        The pair (f, L); with return_gradient (f, L, g).
    Raises:
        ArgumentTypeError, ArgumentValueError: for an x, a value or an option of the wrong kind, and if
            the value of a point depends on other points (attention, a mean, train-mode batch norm).
        NoSecondDerivative: if the value does not depend on x.
        UnsupportedError: if torch has no derivative of an operation.
    Shape:
        - x: [N, ...]
        - f, L: [N] or [N, ...outputs]
        - g: the shape of f, followed by the shape of a point
    References:
        Raissi, Perdikaris and Karniadakis, Physics-informed Neural Networks, 2019.
        Dangel, Siebert, Zeinhofer and Walther, Collapsing Taylor Mode Automatic Differentiation, 2025.
        Li et al., A Computational Framework for Neural Network-based Variational Monte Carlo with
        Forward Laplacian, 2024.
        Hutchinson, A Stochastic Estimator of the Trace of the Influence Matrix, 1990.
        Song, Garg, Shi and Ermon, Sliced Score Matching, 2019.
    Example:
        >>> x = torch.tensor([[1.0, 2.0], [0.0, 1.0]])
        >>> f, lap = hog.laplacian(lambda x: (x**3).sum(1), x)
        >>> lap  # 6 (x_1 + x_2)
        tensor([18.,  6.])
        >>> _, mixed = hog.laplacian(lambda x: x.prod(1), x, coefficients=torch.ones(2, 2, 2))
        >>> mixed.round(decimals=4)  # 2 d_1 d_2 f
        tensor([2., 2.])
    """
    given = TaylorOptions.of("laplacian", func, PointMode, mode, create_graph, options)
    validation.real("x", x)
    validation.boolean("return_gradient", return_gradient)
    directions = _draw_directions(x, num_projections, generator, signs=True)
    if sparsity is not None:
        if coefficients is not None or num_projections is not None:
            raise ArgumentValueError(
                "sparsity: expected neither coefficients nor num_projections beside it, which have "
                "directions of their own; leave them out."
            )
        directions = coloured_directions(given, func, x, args, sparsity)
    of_x = coefficients if callable(coefficients) else None

    def body(x: Tensor, args: Any, coefficients: Any, signs: Tensor | None) -> tuple[Any, ...]:
        values = point_values(func, args)

        @cache
        def chosen(batched: bool) -> Directions:
            if sparsity is not None and signs is not None:
                return Directions(signs, 1.0, False)
            return directions_of(x, batched, of_x or coefficients, signs)

        # Nested if faster; else Taylor mode; nested again if an operation has no Taylor rule.
        found = _of_few_directions(given, values, x, chosen)
        found = found or _collapsed(given, values, x, chosen, return_gradient)
        value, total, gradient = found or (*_nested(given, values, x, chosen), None)
        if not return_gradient:
            return value, total
        if gradient is None:
            keep = given.keep and (given.always or value.requires_grad)  # as for value and total
            gradient = point_gradients(values, x, keep)
        return value, total, gradient

    # A tensor is an input of a compiled graph, a function a part of its key.
    coefficients = None if of_x else coefficients
    key = return_gradient, of_x, sparsity is not None
    return given.evaluate(func, body, key, x, args, coefficients, directions)


def _of_few_directions(
    options: TaylorOptions, values: Function, x: Tensor, chosen: Chosen
) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """Nested derivatives if they are faster than Taylor mode, else None.

    Nested derivatives are faster for one output, many points and at most FEW directions; with a kept
    graph also at most SMALL elements in x. None also if all sums are zero, as for a piecewise linear
    func: Taylor mode then warns.
    """
    # Transformed or traced tensors have no values to test for zero. A layer mode records the layers
    # in Taylor mode: in a backward pass it does not see the weights.
    without = torch_internals.transforms_active() or torch_internals.tracing() or layer_mode()
    if options.mode != "auto" or without:
        return None
    with without_stand_ins():  # their mode intercepts each access to a shape
        few = 0 < x.numel() <= SMALL or (x.numel() and not options.keep)
        if not few or x.dim() < 2:
            return None
        directions = chosen(True)
        if len(directions.vectors) > FEW:
            return None
        probes = directions.probes()
        generators = GeneratorStates([x.device])
        drawn = generators.now()

    def of_one_output(own: Tensor) -> Tensor:
        y = values(own)
        with torch_internals.without_functions_seen():
            if not y.dim() or y.numel() != len(y):
                raise _OtherLayout
        return y

    with suppress(_OtherLayout):
        value, total = by_reverse(of_one_output, x, lambda _: probes, options.keep, options.always)
        with without_stand_ins():
            if total.any():
                return value, total, None
    # Taylor mode runs func again, with equal random numbers.
    generators.set(drawn)
    return None


def _nested(
    options: TaylorOptions, values: Function, x: Tensor, chosen: Chosen
) -> tuple[Tensor, Tensor]:
    """Value and sum over the directions by nested derivatives."""
    inside = torch_internals.transforms_active()

    def probes(batched: bool) -> list[Weighted]:
        return chosen(batched).probes(by_index=not inside)

    if inside:
        return by_forward(values, x, probes)
    return by_reverse(values, x, probes, options.keep, options.always)


def _collapsed(
    options: TaylorOptions, values: Function, x: Tensor, chosen: Chosen, with_gradient: bool
) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """Value, sum over the directions, and the gradient (None unless the directions are all unit
    vectors); None if an operation has no Taylor rule."""

    def pieces(batched: bool) -> list[tuple[Algebra, Parts]]:
        vectors, weights, _ = chosen(batched)
        # With a kept graph one piece: the graph holds all pieces anyway.
        step = len(vectors) if options.keep else max(16, AT_ONCE // x.numel())
        each = weights.split(step) if isinstance(weights, Tensor) else repeat(weights)
        pairs = zip(vectors.split(step), each, strict=False)
        return [(Univariate(2, True, own), [rows, None]) for rows, own in pairs]

    found = at_points(options, values, x, pieces)
    if found is None:
        return None
    runs, batched = found
    value = runs[-1][0]
    total, gradient = reduce(add, [second for _, (_, second) in runs], None), None
    if with_gradient and chosen(batched).unit:
        firsts = [first for _, (first, _) in runs if first is not None]
        point = x.shape[1:] if batched else x.shape
        if sum(map(len, firsts)) == point.numel():  # [D, ...f] -> [...f, *point]
            gradient = torch.cat(firsts).movedim(0, -1).reshape(*value.shape, *point)
            gradient = gradient if options.keep else gradient.detach()
    return *as_returned(options, value, total), gradient


def at_points(
    options: TaylorOptions, values: Function, x: Tensor, pieces: Pieces
) -> tuple[list[tuple[Tensor, Parts]], bool] | None:
    """For each piece (value, Taylor coefficients), and whether x is many points; None if Taylor mode
    is not possible.

    x is one point if the value is a scalar, else many. The likelier layout is tried first; if it is
    wrong, the generators are set back.
    """
    if not x.numel() or options.mode == "nested" or torch_internals.transforms_active():
        return None
    generators = GeneratorStates([x.device])
    # A scalar is one point; a vector is more likely one point than many scalar points.
    for batched in {0: [False], 1: [False, True]}.get(x.dim(), [True, False]):

        def call(own: Tensor, batched: bool = batched) -> list[Tensor]:
            y = values(own)
            if (y.dim() > 0) != batched:
                raise _OtherLayout
            return [y]

        todo, runs = pieces(batched), []
        drawn = None if torch_internals.tracing() else generators.now()
        try:
            for k, (algebra, parts) in enumerate(todo):
                # only the last piece advances the generators, as one run of func does
                with nullcontext() if k == len(todo) - 1 else fixed_random_numbers([x]):
                    found = by_taylor(options, algebra, [x], [parts], call)
                if found is None:
                    return None
                runs.append((found[0][0], found[1][0]))
            return runs, batched
        except _OtherLayout:
            if drawn is not None:
                generators.set(drawn)
    raise AssertionError("one of the layouts is that of the value")


class _OtherLayout(Exception):
    """The value's layout (one point, many points, one output) differs from the caller's guess."""


@when_compiled(within_compile(_like_laplacian))
def bilaplacian(
    func: Callable[..., Tensor],
    x: Tensor,
    *args: Any,
    num_projections: int | None = None,
    generator: torch.Generator | None = None,
    mode: PointMode = "auto",
    create_graph: bool | None = None,
    **options: Unpack[Options],
) -> tuple[Tensor, Tensor]:
    r"""The value of a function at many points, and its biharmonic by their coordinates.

        f_n = func(x, *args)_n        B_n = sum_ij d^4 f_n / d x_{n,i}^2 d x_{n,j}^2
        with num_projections = k:     B_n ~ 1/3k sum_v d^4/dt^4 f_n(x_n + t v),  v_i normal

    Plates, phase fields and the stream function of a flow need it. The exact sum runs func once, and
    carries with each value D first derivatives, D (D + 1) / 2 second derivatives, and the gradient of
    the Laplacian. If an operation has no Taylor rule, two Laplacians are nested.

    The estimate takes k random directions, for many dimensions. With T the tensor of fourth derivatives
    and M_ij = sum_k T_ijkk, its mean is B and its variance (8 |T|^2 + 24 |M|^2) / 3k.

    Args:
        func: As for `laplacian`.
        x: N points, [N, ...]; one point of any shape if func returns a scalar.
        *args: Further arguments of func.
        num_projections: k random vectors instead of the exact sum.
        generator: Draws these vectors; None is torch's global generator.
        mode: "collapsed", which raises if an operation has no Taylor rule; "nested"; or "auto".
        create_graph: As for `laplacian`.
        **options: How func is evaluated, as :class:`hoglib.Options` describes it.
    Returns:
        The pair (f, B).
    Raises:
        ArgumentTypeError, ArgumentValueError, NoSecondDerivative: as for `laplacian`.
        UnsupportedError: if torch has no derivative of an operation, and for the exact biharmonic
            inside torch.func transforms.
    Shape:
        - x: [N, ...]
        - f, B: [N] or [N, ...outputs]
    References:
        Dangel, Siebert, Zeinhofer and Walther, Collapsing Taylor Mode Automatic Differentiation, 2025.
        Shi, Hu, Lin and Kawaguchi, Stochastic Taylor Derivative Estimator, 2024.
    Example:
        >>> x = torch.tensor([[1.0, 2.0], [0.0, 1.0]])
        >>> f, B = hog.bilaplacian(lambda x: (x**4).sum(1) + (x**2).prod(1), x)
        >>> B  # 2 * 24 + 8
        tensor([56., 56.])
    """
    given = TaylorOptions.of("bilaplacian", func, PointMode, mode, create_graph, options)
    validation.real("x", x)

    def body(x: Tensor, args: tuple[Any, ...], v: Tensor | None) -> tuple[Tensor, Tensor]:
        values = point_values(func, args)

        def pieces(batched: bool) -> list[tuple[Algebra, Parts]]:
            if v is not None:
                return [(Univariate(4, True, 1 / (3 * len(v))), [v, None, None, None])]
            e = units(x, batched)
            return [(Biharmonic(len(e), x.device), [e, None, None, None])]

        found = at_points(given, values, x, pieces)
        if found is not None:
            ((value, parts),) = found[0]
            return as_returned(given, value, parts[3])
        if v is not None:
            value, fourth = _along("bilaplacian", lambda x: [values(x)], x, v, 4)
            return as_returned(given, value, fourth.sum(0) / (3 * len(v)))
        validation.refuse_transforms(
            "bilaplacian",
            "call it on all points at once instead of under vmap, pass num_projections, or "
            "differentiate its result with torch.autograd.grad.",
        )
        return as_returned(given, *_nested_twice(given, values, x))

    v = _draw_directions(x, num_projections, generator, signs=False)
    return given.evaluate(func, body, None, x, args, v)


def _along(
    caller: str, call: Callable[[Tensor], list[Tensor]], x: Tensor, v: Tensor, order: int
) -> tuple[Tensor, Tensor]:
    """The value, and the derivative of order `order` along each direction, by nested
    derivatives."""
    rows = []
    for u in v:
        with fixed_random_numbers([x]):
            (value,), (series,) = along_path(caller, call, [x], [[u]], order)
        rows.append(series[-1])
    return value, torch.stack(rows)


def _nested_twice(options: TaylorOptions, values: Function, x: Tensor) -> tuple[Tensor, Tensor]:
    """The Laplacian of the Laplacian, both by nested derivatives."""
    first: list[Tensor] = []

    def probes(batched: bool) -> list[Weighted]:
        return directions_of(x, batched, None, None).probes()

    def inner(points: Tensor) -> Tensor:
        value, total = by_reverse(values, points, probes, keep=True, always=True)
        first.append(value)
        return total

    _, total = by_reverse(inner, x, probes, options.keep, options.always)
    return first[0], total


def units(x: Tensor, batched: bool) -> Tensor:
    """The unit vectors of a point, [D, *x.shape], expanded over the points."""
    shape = x.shape[1:] if batched else x.shape
    D = shape.numel()
    e = torch.eye(D, dtype=x.dtype, device=x.device)
    if not batched:
        return e.reshape(D, *shape)
    return e.reshape(D, 1, *shape).expand(D, x.shape[0], *shape)


def directions_of(x: Tensor, batched: bool, coefficients: Any, signs: Tensor | None) -> Directions:
    """The directions of the operator sum_ij a_ij d_i d_j with coefficients a; None: the Laplacian.

    signs: Random vectors [k, *x.shape] of independent signs for an estimate; None: the exact sum.
    """
    if coefficients is None:
        if signs is None:
            return Directions(units(x, batched), 1.0, True)
        return Directions(signs, 1 / len(signs), False)
    a = _check_coefficients(coefficients, x, batched)
    e = units(x, batched)
    D, diagonal = len(e), a.dim() <= 1 + batched
    if signs is None and a.dim() == 1:
        return Directions(e, a, True)
    # A positive semi-definite a has real roots: D directions instead of 2 D.
    if signs is None and _is_nonnegative(a, diagonal):
        if diagonal:  # sqrt(a_i) e_i
            return Directions(e * a.sqrt().reshape(x.shape), 1.0, False)
        sizes, q = symmetric_eigen(a)
        v = (q * sizes.clamp(min=0).sqrt().unsqueeze(-2)).movedim(-1, 0)
        return Directions(v.reshape(D, *x.shape), 1.0, False)
    # d_u d_z = 1/4 (d_(u + z)^2 - d_(u - z)^2) with z = a u; s gives u and z one magnitude.
    u = e if signs is None else signs
    flat = u.reshape(len(u), -1, D)
    z = flat * a if diagonal else torch.einsum("nij,rnj->rni", a.reshape(-1, D, D), flat)
    s = a.detach().abs().mean().sqrt()
    s = torch.where(s > 0, s, torch.ones_like(s))
    u, z = u * s, (z / s).reshape(u.shape)
    weights = torch.full((2 * len(u),), 0.25, dtype=x.dtype, device=x.device)
    weights[len(u) :] = -0.25
    if signs is not None:
        weights = weights / len(signs)
    return Directions(torch.cat([u + z, u - z]), weights, False)


def _is_nonnegative(a: Tensor, diagonal: bool) -> bool:
    """Whether all a are positive semi-definite; False if a requires grad or its values are unknown."""
    if a.requires_grad or torch_internals.tracing() or torch_internals.transforms_active():
        return False
    if diagonal:
        return bool((a >= 0).all())
    sizes = symmetric_eigen(a)[0]
    # Eigenvalues of a singular matrix may be negative by rounding.
    floor = -torch.finfo(a.dtype).eps * a.shape[-1] * sizes.abs().amax() if sizes.numel() else 0
    return bool((sizes >= floor).all())


def _check_coefficients(coefficients: Any, x: Tensor, batched: bool) -> Tensor:
    """The tensor a: [D], [N, D] or [N, D, D]; of one point [D] or [D, D]."""
    a = coefficients(x) if callable(coefficients) else coefficients
    validation.tensor("coefficients", a)
    D = (x.shape[1:] if batched else x.shape).numel()
    if batched and a.dim() == 1 and len(a) == len(x) == D > 1:
        _check_elements(coefficients, x)
    allowed = [(D,), (len(x), D), (len(x), D, D)] if batched else [(D,), (D, D)]
    if tuple(a.shape) not in allowed:
        advice = f"; {OF_POINTS}" if batched and a.numel() == len(x) else ""
        raise ArgumentValueError(
            f"coefficients: expected {' or '.join(str(list(shape)) for shape in allowed)} for x of "
            f"shape {tuple(x.shape)}, with the elements of a point in one dimension, got "
            f"{validation.describe(a)}{advice}."
        )
    if a.dtype != x.dtype or a.device != x.device:
        raise ArgumentTypeError(
            f"coefficients: expected {x.dtype} on {x.device}, as x, got {validation.describe(a)} on "
            f"{a.device}; convert them with `.to(x)`."
        )
    return a


def _check_elements(coefficients: Any, x: Tensor) -> None:
    """For N = D: warn that coefficients are read as [D], not [N]; raise if a function of x returns
    [N]."""
    if not callable(coefficients):
        warn_once(
            f"coefficients: read a tensor of {len(x)} numbers for {len(x)} points of as many elements "
            f"as one for each element; {OF_POINTS}. Give `a.expand(N, D)` to be clear."
        )
    elif len(coefficients(x[:1])) != len(x):
        raise ArgumentValueError(
            f"coefficients: expected [{len(x)}], one number for each element of a point, got one for "
            f"each of the points; {OF_POINTS}."
        )


def _draw_directions(x: Tensor, number: object, generator: object, *, signs: bool) -> Tensor | None:
    """Random vectors [number, *x.shape] of signs -1 and 1, or of normal numbers; None for None."""
    if number is None:
        return None
    validation.at_least("num_projections", number, 1)
    own = validation.generator(generator)
    device = x.device if own is None else own.device  # equal numbers for x on any device
    shape = number, *x.shape
    if not signs:
        return torch.randn(shape, generator=own, device=device, dtype=x.dtype).to(x.device)
    return (2 * torch.randint(0, 2, shape, generator=own, device=device) - 1).to(x)


@when_compiled(within_compile(_like_directional, lambda x, v, order, *args: (x, *args)))
def directional(
    func: Callable[..., Tensor],
    x: Tensor,
    v: Tensor,
    order: int,
    *args: Any,
    mode: TaylorMode = "auto",
    create_graph: bool | None = None,
    **options: Unpack[Options],
) -> tuple[Tensor, Tensor]:
    r"""The value of a function, and its derivative of any order along a direction.

        f = func(x, *args)        d = d^K/dt^K func(x + t v, *args) at t = 0

    func runs once, for all directions (`jet` has all orders along one). v may have another direction at
    each point of x.

    Args:
        func: The function ``func(x, *args)``, or an `nn.Module`, that returns one tensor.
        x: Where func is differentiated, of any shape.
        v: The direction, like x; or R directions, [R, *x.shape].
        order: K, at least 1.
        *args: Further arguments of func.
        mode: "taylor", "nested" or "auto", as for `jet`.
        create_graph: Whether the results can be differentiated again. Default: if gradients are
            enabled.
        **options: How func is evaluated, as :class:`hoglib.Options` describes it.
    Returns:
        The pair (f, d); d has a leading dimension R for several directions.
    Raises:
        ArgumentTypeError, ArgumentValueError: for arguments that do not fit together.
        UnsupportedError: with mode="taylor", for an operation without a rule, by name.
    Shape:
        - x: any
        - f: the shape of func's value
        - d: as f, or [R, *f.shape]
    References:
        Griewank and Walther, Evaluating Derivatives, 2008, chapter 13.
    Example:
        >>> x, v = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 0.0])
        >>> hog.directional(lambda x: (x**4).sum(), x, v, 3)[1]  # 24 x_1
        tensor(24.)
    """
    given = TaylorOptions.of("directional", func, TaylorMode, mode, create_graph, options)
    validation.real("x", x)
    validation.tensor("v", v)
    validation.at_least("order", order, 1)
    several = v.dim() == x.dim() + 1
    if v.shape[int(several) :] != x.shape or (v.dtype, v.device) != (x.dtype, x.device):
        raise ArgumentValueError(
            f"v: expected a tensor like x, {validation.describe(x)}, or several of them in a leading "
            f"dimension, got {validation.describe(v)} on {v.device}."
        )

    def body(x: Tensor, v: Tensor, args: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        def call(points: Tensor) -> list[Tensor]:
            value = given.run(func, points, *args)
            validation.tensor("func(x, *args)", value)
            return [value]

        seed: Parts = [v, *[None] * (order - 1)]
        found = by_taylor(given, Univariate(order, several), [x], [seed], call)
        if found is None:
            value, rows = _along("directional", call, x, v if several else v[None], order)
            return as_returned(given, value, rows if several else rows[0])
        ((value,), (parts,)) = found
        d = parts[-1]
        # None stands for zero: return zeros for each direction.
        if d is None and several:
            d = torch.zeros(len(v), *value.shape, dtype=value.dtype, device=value.device)
        return as_returned(given, value, d)

    return given.evaluate(func, body, (order, several), x, v, args)


@when_compiled(within_compile(_like_laplacian))
def partial_derivative(
    func: Callable[..., Tensor],
    x: Tensor,
    *args: Any,
    index: Sequence[int],
    mode: PointMode = "auto",
    create_graph: bool | None = None,
    **options: Unpack[Options],
) -> tuple[Tensor, Tensor]:
    r"""The value of a function at many points, and a mixed partial derivative by their coordinates.

        f_n = func(x, *args)_n        d_n = d^K f_n / d x_{n,i} d x_{n,j} ...        index = (i, j, ...)

    func runs once, and carries with each value its derivatives of all orders up to `index` in each
    coordinate: 5 for (0, 0, 1). The result is exact; no directions are combined.

    Args:
        func: The function ``func(x, *args)``, or an `nn.Module`, that treats each point by itself.
        x: N points, [N, ...]; one point of any shape if func returns a scalar.
        *args: Further arguments of func.
        index: The coordinates to differentiate by, each as often as its order: indices of the
            flattened point; -1 is the last one.
        mode: "collapsed", which raises if an operation has no Taylor rule; "nested"; or "auto".
        create_graph: Whether the results can be differentiated again. Default: if gradients are
            enabled.
        **options: How func is evaluated, as :class:`hoglib.Options` describes it.
    Returns:
        The pair (f, d).
    Raises:
        ArgumentTypeError, ArgumentValueError: for an index outside the point, and as for `laplacian`.
    Shape:
        - x: [N, ...]
        - f, d: [N] or [N, ...outputs]
    References:
        Griewank and Walther, Evaluating Derivatives, 2008, chapter 13.
    Example:
        >>> x = torch.tensor([[1.0, 2.0]])
        >>> hog.partial_derivative(lambda x: x[:, 0] ** 3 * x[:, 1] ** 2, x, index=(0, 0, 1))[1]
        tensor([24.])
    """
    given = TaylorOptions.of("partial_derivative", func, PointMode, mode, create_graph, options)
    validation.real("x", x)
    if not isinstance(index, tuple | list) or not index:
        raise ArgumentTypeError(
            "index: expected a tuple of coordinates, such as (0, 0, 1) for the second derivative by "
            f"the first coordinate and the first by the second one, got {validation.describe(index)}."
        )

    def body(x: Tensor, args: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        values = point_values(func, args)

        def path(batched: bool) -> tuple[list[Tensor], tuple[int, ...], list[int]]:
            """The distinct coordinates as directions, their orders, and `index` as positions in this
            list."""
            e = units(x, batched)
            for k, i in enumerate(index):
                if isinstance(i, bool) or not isinstance(i, int) or not -len(e) <= i < len(e):
                    raise ArgumentValueError(
                        f"index[{k}]: expected an integer from {-len(e)} to {len(e) - 1}, a "
                        f"coordinate of the flattened point, got {i!r}."
                    )
            places = [i % len(e) for i in index]
            chosen = sorted(set(places))
            vectors = [e[i].expand(x.shape) for i in chosen]
            orders = tuple(places.count(i) for i in chosen)
            return vectors, orders, [chosen.index(i) for i in places]

        def pieces(batched: bool) -> list[tuple[Algebra, Parts]]:
            vectors, orders, _ = path(batched)
            algebra = MultiIndex(orders)  # one variable for each distinct coordinate
            parts: Parts = algebra.zeros()
            for i, vector in enumerate(vectors):
                unit = tuple(int(i == j) for j in range(len(orders)))
                parts[algebra.indices.index(unit)] = vector
            return [(algebra, parts)]

        found = at_points(given, values, x, pieces)
        if found is not None:
            ((value, parts),) = found[0]
            return as_returned(given, value, parts[-1])
        # One more run, with equal random numbers: the value's shape tells whether x is many points.
        with fixed_random_numbers([x]), torch.no_grad():
            batched = values(x).dim() > 0
        vectors, orders, order = path(batched)

        def along(t: Tensor) -> list[Tensor]:
            moved = x
            for i, vector in enumerate(vectors):
                moved = moved + t[i] * vector
            return [values(moved)]

        (value,), rows = differentiate_path("partial_derivative", along, x, len(orders), order)
        return as_returned(given, value, rows[-1][0])

    return given.evaluate(func, body, tuple(index), x, args)
