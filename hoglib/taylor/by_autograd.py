"""Rules for operations that have none: by torch's own derivatives of this one operation.

The rest of the function keeps its rules. Each operation is compared once in a process with a central
difference in float64.
"""

from collections.abc import Callable
from math import factorial, prod
from typing import Any

import torch
from torch import Tensor

from hoglib._core import torch_internals
from hoglib._core.finite_differences import directional_derivative, to_double
from hoglib.errors import HoglibError
from hoglib.taylor.algebras import Derivative, MultiIndex, Parts, Univariate, add
from hoglib.taylor.call import Call, Refused, Rule
from hoglib.taylor.nested import along_path, nested

_COMPARED: set[Any] = set()  # operations whose first derivative agreed with differences
RELATIVE = 1e-4  # the largest relative error of a central difference that is taken for one


def operation_rule(func: Any) -> Rule:
    """The rule of an operation by torch's derivatives of it."""
    if torch.Tag.nondeterministic_seeded in func.tags:
        raise Refused(f"torch.ops.{func}")  # it would draw other numbers
    elementwise = torch.Tag.pointwise in func.tags

    def rule(call: Call) -> Any:
        record = torch.is_grad_enabled()
        places = [i for i, x in enumerate(call.args) if call.parts(x) is not None]
        lists = any(isinstance(x, list | tuple) and any(map(_is_real, x)) for x in call.args)
        if not places or lists or any(call.parts(x) is not None for x in call.kwargs.values()):
            raise Refused(f"torch.ops.{func}")
        with torch.enable_grad():
            try:
                _compare(func, call, places)
                if elementwise and len(places) == 1 and _like(call.args[places[0]], call.out):
                    return call.algebra.compose(
                        _tower(func, call, places[0], record),
                        call.parts(call.args[places[0]]) or [],
                    )
                return _coefficients(func, call, places, record)
            except (HoglibError, RuntimeError, NotImplementedError) as error:
                if isinstance(error, torch.OutOfMemoryError):
                    raise
                raise Refused(f"torch.ops.{func}") from error

    return rule


def _is_real(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _like(x: Tensor, out: Any) -> bool:
    return isinstance(out, Tensor) and out.shape == x.shape


def _with(call: Call, places: list[int], values: list[Tensor]) -> tuple[Any, ...]:
    args = list(call.args)
    for i, value in zip(places, values, strict=True):
        args[i] = value
    return tuple(args)


def _outputs(out: Any) -> list[Tensor]:
    leaves = out if isinstance(out, tuple | list) else [out]
    return [
        y for y in leaves if isinstance(y, Tensor) and (y.is_floating_point() or y.is_complex())
    ]


def _tower(func: Any, call: Call, place: int, record: bool) -> list[Derivative]:
    """g', g'', ... of an elementwise operation."""
    x = call.args[place]
    own = x.view_as(x) if record and x.requires_grad else x.detach().requires_grad_()
    y, found = func(*_with(call, [place], [own]), **call.kwargs), []
    if not y.requires_grad:
        raise Refused(f"torch.ops.{func}")
    for _ in range(call.algebra.order):
        if y is not None and y.requires_grad:
            (y,) = torch.autograd.grad(
                y, own, torch.ones_like(y), create_graph=True, allow_unused=True
            )
        else:
            y = None
        keep = record and x.requires_grad
        found.append(y if y is None or keep else y.detach())
    return list(found)


def _coefficients(func: Any, call: Call, places: list[int], record: bool) -> Any:
    algebra = call.algebra
    xs = [call.args[i] for i in places]
    parts = [call.parts(x) or algebra.zeros() for x in xs]

    def run(*values: Tensor) -> list[Tensor]:
        return _outputs(func(*_with(call, places, list(values)), **call.kwargs))

    if isinstance(algebra, MultiIndex):
        series = _mixed(run, algebra, xs, parts)
    elif isinstance(algebra, Univariate):
        series = _of_directions(run, algebra, xs, parts)
    else:
        raise Refused(f"torch.ops.{func}")
    if not record:
        series = [[None if p is None else p.detach() for p in one] for one in series]
    if not isinstance(call.out, tuple | list):
        return series[0]
    left = iter(series)
    return [next(left) if _outputs(y) else None for y in call.out]


def _of_directions(
    run: Callable[..., list[Tensor]], algebra: Univariate, xs: list[Tensor], parts: list[Parts]
) -> list[Parts]:
    """Along each direction; the highest coefficient of a collapsed algebra enters once for all."""
    K, lead = algebra.order, algebra.leads[0]
    if not lead:
        return _along(run, xs, parts, K)
    top = algebra.leads[-1]
    seeds = [
        [p if own else None for p, own in zip(one, algebra.leads, strict=True)] for one in parts
    ]
    count = max((len(p) for one in seeds for p in one if p is not None), default=0)
    rows = [
        _along(run, xs, [[None if p is None else p[r] for p in one] for one in seeds], K)
        for r in range(count)
    ]
    outputs = len(rows[0]) if rows else len(run(*xs))
    found: list[Parts] = []
    for j in range(outputs):
        stacked: Parts = []
        for k in range(K):
            terms = [row[j][k] for row in rows]
            whole = torch.stack(terms) if terms else None  # type: ignore[arg-type]
            if whole is not None and not algebra.leads[k]:
                whole = algebra.collapsed(whole)
            stacked.append(whole)
        found.append(stacked)
    if not top and any(one[-1] is not None for one in parts):
        last = _along(run, xs, [[one[-1]] for one in parts], 1)
        for one, (extra,) in zip(found, last, strict=True):
            one[-1] = add(one[-1], extra)
    return found


def _along(
    run: Callable[..., list[Tensor]], xs: list[Tensor], parts: list[Parts], K: int
) -> list[Parts]:
    _, series = along_path("jet", lambda *moved: _dependent(run(*moved)), xs, parts, K)
    return [list(own) for own in series]


def _mixed(
    run: Callable[..., list[Tensor]], algebra: MultiIndex, xs: list[Tensor], parts: list[Parts]
) -> list[Parts]:
    variables = len(algebra.indices[0])

    def path(t: Tensor) -> list[Tensor]:
        moved = []
        for x, one in zip(xs, parts, strict=True):
            for beta, part in zip(algebra.indices, one, strict=True):
                if part is not None:
                    factors = [t[i] ** b / factorial(b) for i, b in enumerate(beta) if b]
                    x = x + part * prod(factors[1:], start=factors[0])
            moved.append(x)
        return _dependent(run(*moved))

    by_index = []
    for beta in algebra.indices:
        order = [i for i, b in enumerate(beta) for _ in range(b)]
        by_index.append(nested("partial_derivative", path, xs[0], variables, order)[1][-1])
    return [list(of_output) for of_output in zip(*by_index, strict=True)]


def _dependent(values: list[Tensor]) -> list[Tensor]:
    if not any(y.requires_grad for y in values):
        raise RuntimeError("an operation without a derivative")
    return values


def _compare(func: Any, call: Call, places: list[int]) -> None:
    """Refuses an operation whose first derivative is not the difference quotient."""
    if func in _COMPARED or torch_internals.tracing():
        return
    xs = to_double([call.args[i].detach() for i in places])
    args, kwargs = to_double((call.args, call.kwargs))
    generator = torch.Generator().manual_seed(0)
    vs = [torch.randn(x.shape, generator=generator).to(x) for x in xs]
    # what reads one triangle of a symmetric matrix is differentiated as a function of symmetric ones
    vs = [v + v.mH if x.dim() > 1 and _is_symmetric(x) else v for x, v in zip(xs, vs, strict=True)]

    def run(*values: Tensor) -> list[Tensor]:
        own = list(args)
        for i, value in zip(places, values, strict=True):
            own[i] = value
        found = _outputs(func(*own, **kwargs))
        return [torch.view_as_real(y) if y.is_complex() else y for y in found]

    found = [p[0] for p in _along(run, xs, [[v] for v in vs], 1)]
    with torch.no_grad():
        expected = directional_derivative(lambda points: run(*points), xs, vs)
    for part, other in zip(found, expected, strict=True):
        assert part is not None
        error = (part.detach() - other).abs().max() if part.numel() else torch.zeros(())
        if bool(error > RELATIVE * (1 + other.abs().max())):
            raise Refused(
                f"torch.ops.{func}, whose derivative in torch is not its difference quotient"
            )
    _COMPARED.add(func)


def _is_symmetric(x: Tensor) -> bool:
    return x.shape[-1] == x.shape[-2] and bool(torch.allclose(x, x.mH))
