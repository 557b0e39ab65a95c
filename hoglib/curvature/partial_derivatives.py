"""Derivatives of chosen orders by the inputs: along a direction, and mixed partial derivatives."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Unpack, get_args

import torch
from torch import Tensor

from hoglib._core import validation
from hoglib._core.autograd import clone_inference_tensors
from hoglib._core.finite_differences import fixed_random_numbers
from hoglib._core.problem import Options
from hoglib.curvature.input_derivatives import check_points, point_values
from hoglib.curvature.laplacians import PointMode, at_points, units
from hoglib.errors import ArgumentTypeError, ArgumentValueError
from hoglib.ring import run
from hoglib.taylor.algebras import Algebra, MultiIndex, Parts, Univariate
from hoglib.taylor.jet import TaylorMode, TaylorOptions, by_taylor, finished
from hoglib.taylor.nested import along_path, nested


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
        func: The function ``func(x, *args)``, or an `nn.Module`, whose value is one tensor.
        x: Where it is differentiated, of any shape.
        v: The direction, like x; or R directions, [R, *x.shape].
        order: K, at least 1.
        *args: Further arguments of func.
        mode: "taylor", "nested" or "auto", as for `jet`.
        create_graph: Whether the results can be differentiated again. Default: where gradients are
            enabled.
        **options: How func is evaluated, as :class:`hoglib.Options` describes it.
    Returns:
        The pair (f, d); d has a leading dimension R for several directions.
    Raises:
        ArgumentTypeError, ArgumentValueError: for arguments that do not fit together.
        UnsupportedError: with mode="taylor", for an operation without a rule, by name.
    Shape:
        - x: any
        - f: that of func's value
        - d: f, or [R, *f.shape]
    References:
        Griewank and Walther, Evaluating Derivatives, 2008, chapter 13.
    Example:
        >>> x, v = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 0.0])
        >>> hog.directional(lambda x: (x**4).sum(), x, v, 3)[1]  # 24 x_1
        tensor(24.)
    """
    validation.function("func", func)
    check_points(x)
    validation.tensor("v", v)
    validation.at_least("order", order, 1)
    validation.one_of("mode", mode, get_args(TaylorMode))
    several = v.dim() == x.dim() + 1
    if v.shape[int(several) :] != x.shape or (v.dtype, v.device) != (x.dtype, x.device):
        raise ArgumentValueError(
            f"v: expected a tensor like x, {validation.describe(x)}, or several of them in a leading "
            f"dimension, got {validation.describe(v)} on {v.device}."
        )
    given = TaylorOptions.of("directional", mode, create_graph, options)
    body = partial(_directional, func, given, order)
    f, d = run(given.policy, func, body, (given, order), x, v, args)
    return f, d


def _directional(
    func: Callable[..., Tensor], options: TaylorOptions, order: int, x: Tensor, v: Tensor, args: Any
) -> tuple[Tensor, Tensor]:
    several = v.dim() == x.dim() + 1
    with options.entered(func):
        x, v, inputs = clone_inference_tensors((x, v, args))

        def call(points: Tensor) -> list[Tensor]:
            value = options.run(func, points, *inputs)
            validation.tensor("func(x, *args)", value)
            return [value]

        seed: Parts = [v, *[None] * (order - 1)]
        found = by_taylor(options, Univariate(order, several), [x], [seed], call)
        if found is not None:
            ((value,), (parts,)) = found
            d = parts[-1]
            if d is None and several:
                d = torch.zeros(len(v), *value.shape, dtype=value.dtype, device=value.device)
            return finished(options, value, d)
        rows = []
        for u in v if several else [v]:
            with fixed_random_numbers([x]):
                (value,), (series,) = along_path("directional", call, [x], [[u]], order)
            rows.append(series[-1])
        return finished(options, value, torch.stack(rows) if several else rows[0])


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

    func runs once, with the derivatives of all orders up to this one in each coordinate: 5 beside each
    value for (0, 0, 1). It is exact; no directions are combined.

    Args:
        func: The function ``func(x, *args)``, or an `nn.Module`, that treats each point by itself.
        x: N points, [N, ...]; one point of any shape if func returns a scalar.
        *args: Further arguments of func.
        index: The coordinates by which it is differentiated, each as often as its order: indices of the
            flattened point; -1 is the last one.
        mode: "collapsed", which raises where an operation has no Taylor rule; "nested"; or "auto".
        create_graph: Whether the results can be differentiated again. Default: where gradients are
            enabled.
        **options: How func is evaluated, as :class:`hoglib.Options` describes it.
    Returns:
        The pair (f, d).
    Raises:
        ArgumentTypeError, ArgumentValueError: for an index that is none of a point, and as `laplacian`.
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
    validation.function("func", func)
    check_points(x)
    validation.one_of("mode", mode, get_args(PointMode))
    if not isinstance(index, tuple | list) or not index:
        raise ArgumentTypeError(
            "index: expected a tuple of coordinates, such as (0, 0, 1) for the second derivative by "
            f"the first coordinate and the first by the second one, got {validation.describe(index)}."
        )
    given = TaylorOptions.of("partial_derivative", mode, create_graph, options)
    body = partial(_partial_derivative, func, given, tuple(index))
    f, d = run(given.policy, func, body, (given, tuple(index)), x, args)
    return f, d


def _partial_derivative(
    func: Callable[..., Tensor],
    options: TaylorOptions,
    index: tuple[int, ...],
    x: Tensor,
    args: Any,
) -> tuple[Tensor, Tensor]:
    with options.entered(func):
        x, inputs = clone_inference_tensors((x, args))
        values = point_values(func, inputs)

        def path(batched: bool) -> tuple[list[Tensor], tuple[int, ...], list[int]]:
            """The coordinates as directions, their orders, and the index by their places."""
            e = units(x, batched)
            for k, i in enumerate(index):
                if isinstance(i, bool) or not isinstance(i, int) or not -len(e) <= i < len(e):
                    raise ArgumentValueError(
                        f"index[{k}]: expected a whole number from {-len(e)} to {len(e) - 1}, a "
                        f"coordinate of the flattened point, got {i!r}."
                    )
            places = [i % len(e) for i in index]
            chosen = sorted(set(places))
            return (
                [e[i].expand(x.shape) for i in chosen],
                tuple(places.count(i) for i in chosen),
                [chosen.index(i) for i in places],
            )

        def pieces(batched: bool) -> list[tuple[Algebra, Parts]]:
            vectors, orders, _ = path(batched)
            algebra = MultiIndex(orders)
            parts: Parts = algebra.zeros()
            for i, vector in enumerate(vectors):
                unit = tuple(int(i == j) for j in range(len(orders)))
                parts[algebra.indices.index(unit)] = vector
            return [(algebra, parts)]

        found = at_points(options, values, x, pieces)
        if found is not None:
            ((value, parts),) = found[0]
            return finished(options, value, parts[-1])
        with fixed_random_numbers([x]), torch.no_grad():
            batched = values(x).dim() > 0
        vectors, orders, order = path(batched)

        def along(t: Tensor) -> list[Tensor]:
            moved = x
            for i, vector in enumerate(vectors):
                moved = moved + t[i] * vector
            return [values(moved)]

        (value,), rows = nested("partial_derivative", along, x, len(orders), order)
        return finished(options, value, rows[-1][0])
