"""Structural rules: add, cat, where, index_put; linear, by masks from the values of the inputs."""

from typing import Any

import torch
from torch import Tensor

from hoglib.taylor.algebras import Parts, align
from hoglib.taylor.call import Call, Rule, direction, known, scaled, sums
from hoglib.taylor.linear import SELECTING, shifted

aten = torch.ops.aten


def _added(sign: float, swapped: bool = False) -> Rule:
    def rule(call: Call) -> Parts:
        a, b = call.args[:2]
        alpha = call.kwargs.get("alpha", call.args[2] if len(call.args) > 2 else 1)
        terms = []
        for x, factor in ((a, -alpha if swapped else 1), (b, 1 if swapped else sign * alpha)):
            own = call.parts(x)
            if own is not None:
                terms.append(scaled(factor, call.aligned(own)))
        return terms[0] if len(terms) == 1 else sums(*terms)

    return rule


def _joined(operation: Any) -> Rule:
    def rule(call: Call) -> Parts:
        tensors, dim = call.args[0], call.args[1] if len(call.args) > 1 else 0
        if operation is torch.cat:  # which skips empty tensors of one dimension
            tensors = [x for x in tensors if x.shape != (0,)] or list(tensors)
        found: Parts = []
        like = call.out if operation is torch.cat else call.out.select(dim, 0)
        dim %= call.out.dim()
        for c, lead in enumerate(call.algebra.leads):
            parts = [known(call, x)[c] for x in tensors]
            given = next((p for p in parts if p is not None), None)
            if given is None:
                found.append(None)
                continue
            size = given.shape[: int(lead)]
            filled = [
                torch.zeros(size + x.shape, dtype=like.dtype, device=like.device)
                if p is None
                else p
                for p, x in zip(parts, tensors, strict=True)
            ]
            found.append(operation(filled, dim + lead))
        return found

    return rule


def blended(call: Call, mask: Tensor, a: Any, b: Any) -> Parts:
    """where(mask, a, b)"""
    a_n, b_n, shape = known(call, a), known(call, b), call.out.shape
    found: Parts = []
    for p, q, lead in zip(a_n, b_n, call.algebra.leads, strict=True):
        if p is None and q is None:
            found.append(None)
            continue
        sides: list[Any] = [0 if r is None else align(r, lead, len(shape)) for r in (p, q)]
        found.append(torch.where(mask, sides[0], sides[1]))
    return found


def _extremum(call: Call) -> Parts:
    a, b = call.args
    larger = a > b if call.name == "maximum" else a < b
    found = blended(call, larger, a, b)
    ties = a == b  # each gets a half, as torch's derivative
    if call.side:
        apart = sums(known(call, a), scaled(-1, known(call, b)))
        sign = direction(call, apart)
        if sign is None:
            return found
        first = sign > 0 if call.name == "maximum" else sign < 0
        return blended(call, torch.where(ties, first, larger), a, b)
    half = scaled(0.5, sums(blended(call, ties, a, 0.0), blended(call, ties, b, 0.0)))
    return [
        None if p is None else p if h is None else torch.where(ties, h, p)
        for p, h in zip(found, half, strict=True)
    ]


def _reduced_extremum(call: Call) -> Parts:
    """amax, amin, max, min: the mean over the elements that are equal to the extremum."""
    x, *rest = call.args
    dims = list(rest[0]) if rest and rest[0] else list(range(x.dim()))
    keep = bool(rest[1]) if len(rest) > 1 else False
    if x.dim() == 0:
        return known(call, x)
    dims = sorted(d % x.dim() for d in dims)
    out = call.out
    if not keep:
        for d in dims:
            out = out.unsqueeze(d)
    mask = (x == out).to(x.dtype)
    mask = mask / mask.sum(dims, keepdim=True)
    return call.of_each(
        lambda p, lead: (p * mask).sum([d + lead for d in dims], keep), known(call, x)
    )


def _selecting(call: Call) -> list[Parts | None]:
    x = call.args[0]
    given = [a for a in call.args[1:] if isinstance(a, int) and not isinstance(a, bool)]
    kwargs = call.kwargs
    if call.name in ("topk", "kthvalue"):
        dim = given[1] if len(given) > 1 else kwargs.get("dim", -1)
    else:
        dim = given[0] if given else kwargs.get("dim", -1)
    values, indices = call.out
    if x.dim() == 0:
        return [known(call, x), None]
    keep = values.dim() == x.dim()
    index = indices if keep else indices.unsqueeze(dim)

    def pick(part: Tensor, lead: int) -> Tensor:
        full = index.expand(part.shape[:lead] + index.shape)
        found = part.gather(shifted(dim, lead, x), full)
        return found if keep else found.squeeze(shifted(dim, lead, x))

    return [call.of_each(pick, known(call, x)), None]


def _written(source: int | None) -> Rule:
    """Operations that write one tensor into another: linear in both, one direction after another."""

    def rule(call: Call) -> Parts:
        found: Parts = []
        args = list(call.args)
        operation = getattr(aten, call.name)
        x: Any = args[0]
        y: Any = None if source is None else args[source]
        tensor = isinstance(y, Tensor)
        parts = zip(known(call, x), known(call, y), call.algebra.leads, strict=True)
        for p, q, lead in parts:
            given = p if p is not None else q
            if given is None:
                found.append(None)
                continue
            rows = []
            for r in range(len(given)) if lead else [...]:
                args[0] = torch.zeros_like(x) if p is None else p[r]
                if source is not None:
                    zero = torch.zeros_like(y) if tensor else 0.0
                    args[source] = zero if q is None else q[r]
                rows.append(operation(*args, **call.kwargs))
            found.append(torch.stack(rows) if lead else rows[0])
        return found

    return rule


JOINS: dict[str, Rule] = {
    "add.Tensor": _added(1),
    "sub.Tensor": _added(-1),
    "rsub.Tensor": _added(1, swapped=True),
    "cat": _joined(torch.cat),
    "stack": _joined(torch.stack),
    "where.self": lambda call: blended(call, *call.args),
    "masked_fill": lambda call: blended(call, call.args[1], call.args[2], call.args[0]),
    "maximum": _extremum,
    "minimum": _extremum,
    **dict.fromkeys(("amax", "amin", "max", "min"), _reduced_extremum),
    **dict.fromkeys(SELECTING, _selecting),
    "index_put": _written(2),
    "scatter": _written(3),
    "scatter_add": _written(3),
    "index_add": _written(3),
    "index_copy": _written(3),
    "select_scatter": _written(1),
    "slice_scatter": _written(1),
    "diagonal_scatter": _written(1),
}
