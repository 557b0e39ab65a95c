"""Derivatives of any order by nested reverse mode: slower than Taylor mode, but for every function.

dy/dt is a forward derivative, taken by two reverse passes: the vector-Jacobian product of y by t is
linear in the cotangent u, and its derivative by u is dy/dt.
"""

from collections.abc import Callable, Sequence
from itertools import compress
from math import factorial
from typing import Any

import torch
from torch import Tensor

from hoglib._core.modules.state import preserve_random_state
from hoglib._core.substrate.autograd import vjp, warn_if_not_finite
from hoglib._core.substrate.gradient_graph import check_custom_functions, graph_summary
from hoglib._core.torch_api import torch_internals
from hoglib._core.torch_api.pytree import as_real
from hoglib.taylor.series import Parts

Leaves = list[Tensor]
Path = Callable[[Tensor], Leaves]


def differentiate_path(
    caller: str, path: Path, like: Tensor, variables: int, orders: Sequence[int]
) -> tuple[Leaves, list[Leaves]]:
    """The value of y = path(t) at t = 0, t [variables], and derivatives of y.

    orders: the indices of the variables to differentiate by, in turn; a derivative for each.
    """
    if torch_internals.transforms_active():
        return _by_func(path, like, variables, orders)
    t = like.new_zeros(variables, requires_grad=True)
    value = path(t)
    views = [*map(as_real, value)]
    graph = graph_summary(value)
    check_custom_functions(graph, caller)
    # the graph is returned only if y depends on leaves other than t
    needed = any(leaf is not t for leaf in graph.leaves.values())
    found: list[Leaves] = []
    current = views
    for i in orders:
        current = [_slope(caller, y, t, i) for y in current]
        found.append([_as_given(y, of) for y, of in zip(current, value, strict=True)])
    if any(depend := [y.requires_grad for y in value]):

        def total(values: Leaves) -> Tensor:
            return torch.stack([as_real(y).sum().to(like) for y in compress(values, depend)]).sum()

        parts, again = [y for ys in found for y in compress(ys, depend)], lambda t: total(path(t))
        warn_if_not_finite(caller, total(value).detach(), parts, again, [t], preserve_random_state)
    if not needed:
        value, found = [y.detach() for y in value], [[y.detach() for y in ys] for ys in found]
    return value, found


def along_path(
    caller: str, run: Callable[..., Leaves], xs: Sequence[Tensor], series: Sequence[Parts], K: int
) -> tuple[Leaves, list[Leaves]]:
    """The outputs of run(*xs), and for each output its derivatives of orders 1 to K along x(t).

    x(t) = x + sum_k x_k t^k / k!        series: the coefficients of each x, None for zero
    """

    def path(t: Tensor) -> Leaves:
        moved = []
        for x, parts in zip(xs, series, strict=True):
            for k, part in enumerate(parts, start=1):
                x = x if part is None else x + part * (t[0] ** k / factorial(k))
            moved.append(x)
        return run(*moved)

    value, rows = differentiate_path(caller, path, xs[0], 1, [0] * K)
    return value, [list(of_output) for of_output in zip(*rows, strict=True)]


def _as_given(y: Tensor, like: Tensor) -> Tensor:
    return torch.view_as_complex(y.contiguous()) if like.is_complex() else y


def _slope(caller: str, y: Tensor, t: Tensor, i: int) -> Tensor:
    zeros = torch.zeros_like(y, requires_grad=False)
    if not (y.requires_grad and y.is_floating_point()):
        return zeros
    # J^T u is linear in u: its derivative by u is J at any u, so take u = 0
    u = torch.zeros_like(y, requires_grad=True)
    (g,) = vjp([y], [t], [u], caller, create_graph=True)
    (d,) = vjp([None if g is None else g[i]], [u], [t.new_ones(())], caller, create_graph=True)
    return zeros if d is None else d


def _by_func(
    path: Path, like: Tensor, variables: int, orders: Sequence[int]
) -> tuple[Leaves, list[Leaves]]:
    def slope(h: Path, i: int) -> Path:
        def of(t: Tensor) -> Leaves:
            y, pull = torch.func.vjp(h, t)[:2]
            along: Any = torch.func.vjp(lambda u: pull(u)[0][i], [torch.zeros_like(x) for x in y])
            return along[1](torch.ones_like(t[i]))[0]

        return of

    t = torch.zeros(variables, dtype=like.dtype, device=like.device)
    value, found, h = path(t), [], lambda t: [*map(as_real, path(t))]
    for i in orders:
        h = slope(h, i)
        found.append([_as_given(y, of) for y, of in zip(h(t), value, strict=True)])
    return value, found
