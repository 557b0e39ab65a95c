"""What each operation of torch does to the coefficients of its tensors.

A rule takes a `Call` and returns the coefficients of the output, or a list of them for several outputs
(None for one that is constant). It is made of differentiable operations of torch.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from hoglib.taylor.algebras import Bilinear, Parts, align, multiply
from hoglib.taylor.call import Call, Rule, known, scaled, sums
from hoglib.taylor.derivatives import POINTWISE, arctangent, power_of
from hoglib.taylor.linear import CONSTANT, LINEAR, SELECTING, SEVERAL, ZERO, shifted
from hoglib.taylor.matrices import MATRICES

aten = torch.ops.aten


# ---- products


def matmul(a: Tensor, b: Tensor, lead_a: bool, lead_b: bool) -> Tensor:
    """a @ b of matrices, or of batches of them.

    A coefficient that is the same at all rows, as a direction at all points, is multiplied once.
    """
    if lead_a and lead_b:
        return torch.matmul(a, b)
    if lead_b:
        return matmul(b.transpose(-1, -2), a.transpose(-1, -2), True, False).transpose(-1, -2)
    if not lead_a:
        return torch.matmul(a, b)
    if a.dim() == 3:
        rows = a.shape[1]
        if a.stride(1) == 0 and rows > 1:
            return torch.matmul(a[:, :1], b).expand(-1, rows, -1)
        return torch.matmul(a, b)
    found = torch.bmm(a.transpose(0, 1).flatten(1, 2), b)
    return found.unflatten(1, (a.shape[0], a.shape[2])).transpose(0, 1)


def _matvec(a: Tensor, b: Tensor, lead_a: bool, lead_b: bool) -> Tensor:
    return (a @ b.unsqueeze(-1)).squeeze(-1) if lead_a else b @ a.transpose(-1, -2)


def _dot(a: Tensor, b: Tensor, lead_a: bool, lead_b: bool) -> Tensor:
    return (a * b).sum(-1)


def _bilinear(bilinear: Bilinear) -> Rule:
    return lambda call: call.product(bilinear, *call.args[:2])


def _trilinear(call: Call) -> Parts:
    """The sum over some dimensions of a product of three tensors, as F.bilinear has it."""
    *tensors, sum_dims = [*call.args[:3], call.args[6]]
    expanded = []
    rank = call.args[0].dim() + len(call.args[3])
    for x, dims in zip(tensors, call.args[3:6], strict=True):

        def shaped(part: Tensor, lead: int, dims: Any = dims) -> Tensor:
            for d in sorted(dims):
                part = part.unsqueeze(d % rank + lead)
            return part

        parts = call.parts(x)
        expanded.append((shaped(x, 0), None if parts is None else call.of_each(shaped, parts)))
    (a, a_n), (b, b_n), (c, c_n) = expanded
    ab_n = call.product(multiply, a, b, a_n=a_n, b_n=b_n)
    found = call.product(multiply, a * b, c, a_n=ab_n, b_n=c_n)
    dims = [d % rank for d in sum_dims]
    return call.of_each(lambda p, lead: p.sum([d + lead for d in dims]) if dims else p, found)


def _affine(bilinear: Bilinear) -> Rule:
    """beta b + alpha bilinear(x, y)"""

    def rule(call: Call) -> Parts:
        b, x, y = call.args[:3]
        found = scaled(call.kwargs.get("alpha", 1), call.product(bilinear, x, y))
        own = call.parts(b)
        beta = call.kwargs.get("beta", 1)
        if own is None:
            return found
        rank = call.out.dim()
        own = call.of_each(lambda part, lead: align(part, bool(lead), rank), own)
        return sums(found, scaled(beta, own))

    return rule


def _mul(call: Call) -> Parts:
    a, b = call.args[:2]
    if not isinstance(b, Tensor):
        return scaled(b, known(call, a))
    return call.product(multiply, a, b)


def _div(call: Call) -> Any:
    a, b = call.args[:2]
    if call.kwargs.get("rounding_mode"):
        return None
    if not isinstance(b, Tensor):
        return [None if part is None else part / b for part in known(call, a)]
    b_n = call.parts(b)
    if b_n is None:
        rank = call.out.dim()
        return call.of_each(lambda p, lead: align(p, bool(lead), rank) / b, known(call, a))
    inverse = b.reciprocal()
    n = call.algebra.compose(POINTWISE["reciprocal"](b, inverse, call.algebra.order), b_n)
    if not isinstance(a, Tensor):
        return scaled(a, n)
    return call.product(multiply, a, inverse, b_n=n)


def _convolution(call: Call) -> Parts:
    x, weight, bias, *geometry = call.args

    def conv(a: Tensor, w: Tensor, lead_a: bool, lead_w: bool) -> Tensor:
        if lead_w:
            rows = a if lead_a else [a] * len(w)
            return torch.stack([conv(p, q, False, False) for p, q in zip(rows, w, strict=True)])
        if not lead_a:
            return aten.convolution(a, w, None, *geometry)
        points = a.shape[1]
        if a.stride(1) == 0 and points > 1:  # the same at all points
            once = aten.convolution(a[:, 0], w, None, *geometry).unsqueeze(1)
            return once.expand(-1, points, *once.shape[2:])
        return aten.convolution(a.flatten(0, 1), w, None, *geometry).unflatten(0, a.shape[:2])

    found = call.product(conv, x, weight)
    own = call.parts(bias)
    if own is not None:
        spatial = (None,) * (x.dim() - 2)
        found = sums(found, [None if p is None else p[(..., *spatial)] for p in own])
    return found


# ---- sums and joins


def _added(sign: float, swapped: bool = False) -> Rule:
    def rule(call: Call) -> Parts:
        a, b = call.args[:2]
        alpha = call.kwargs.get("alpha", call.args[2] if len(call.args) > 2 else 1)
        rank = call.out.dim()
        terms = []
        for x, factor in ((a, -alpha if swapped else 1), (b, 1 if swapped else sign * alpha)):
            own = call.parts(x)
            if own is not None:
                aligned = call.of_each(lambda p, lead: align(p, bool(lead), rank), own)
                terms.append(scaled(factor, aligned))
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


def _where(call: Call) -> Parts:
    return blended(call, *call.args)


def _masked_fill(call: Call) -> Parts:
    x, mask, value = call.args
    return blended(call, mask, value, x)


def _extremum(call: Call) -> Parts:
    a, b = call.args
    larger = a > b if call.name == "maximum" else a < b
    found = blended(call, larger, a, b)
    ties = a == b  # each gets a half, as torch's derivative
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


# ---- powers and norms


def _pow(call: Call) -> Parts:
    a, b = call.args[:2]
    a_n, b_n, K = call.parts(a), call.parts(b), call.algebra.order
    if b_n is None:
        assert a_n is not None
        rank = call.out.dim()
        a_n = call.of_each(lambda p, lead: align(p, bool(lead), rank), a_n)
        return call.algebra.compose(power_of(a, call.out, K, b), a_n)
    if not isinstance(a, Tensor):
        a = torch.as_tensor(a, dtype=b.dtype, device=b.device)
    log = a.log()
    log_n = None if a_n is None else call.algebra.compose(POINTWISE["log"](a, log, K), a_n)
    n = call.product(multiply, b, log, b_n=log_n)
    return call.algebra.compose([call.out] * K, n)


def _vector_norm(call: Call) -> Parts:
    """|x| with the derivative 0 where it is 0, as torch's."""
    x = call.args[0]
    order = call.args[1] if len(call.args) > 1 else 2
    dims = call.args[2] if len(call.args) > 2 and call.args[2] is not None else list(range(x.dim()))
    dims = [dims] if isinstance(dims, int) else list(dims)
    keep = bool(call.args[3]) if len(call.args) > 3 else False
    assert order == 2, "others are composites"

    def squares(a: Tensor, b: Tensor, lead_a: bool, lead_b: bool) -> Tensor:
        found = a.square() if a is b else a * b
        if x.dim() == 0:
            return found
        return found.sum([d % x.dim() + (lead_a or lead_b) for d in dims], keep)

    n, y = call.product(squares, x, x), call.out
    zero = y == 0
    safe = torch.where(zero, 1, y)
    derivatives = POINTWISE["sqrt"](safe * safe, safe, call.algebra.order)
    found = call.algebra.compose(derivatives, n)
    return [None if p is None else torch.where(zero, 0, p) for p in found]


def _atan2(call: Call) -> Parts:
    """The angle between the point and the value: atan of (y x_0 - x y_0) / (x x_0 + y y_0)."""
    y, x = call.args
    y_n, x_n = known(call, y), known(call, x)
    algebra = call.algebra
    cross = sums(_times(x, y_n), _times(-y, x_n))
    along, square = sums(_times(x, x_n), _times(y, y_n)), x * x + y * y
    inverse = square.reciprocal()
    inverse_n = algebra.compose(POINTWISE["reciprocal"](square, inverse, algebra.order), along)
    tangent = sums(_times(inverse, cross), algebra.product(multiply, cross, inverse_n))
    return algebra.compose(arctangent(torch.zeros_like(call.out), algebra.order), tangent)


def _times(factor: Tensor, parts: Parts) -> Parts:
    return [None if part is None else factor * part for part in parts]


def _dropout(call: Call) -> list[Parts | None]:
    x, p, training = call.args
    mask = call.out[1]
    factor = mask / (1 - p) if training and p < 1 else mask
    return [_times(factor, known(call, x)), None]


RULES: dict[str, Rule] = {
    **MATRICES,
    "native_dropout": _dropout,
    "atan2": _atan2,
    "mm": _bilinear(matmul),
    "bmm": _bilinear(matmul),
    "mv": _bilinear(_matvec),
    "dot": _bilinear(_dot),
    "vdot": _bilinear(lambda a, b, _, lead: _dot(a.conj(), b, False, lead)),
    "_trilinear": _trilinear,
    "view_as_complex": lambda call: call.of_each(
        lambda p, lead: torch.view_as_complex(p.contiguous()), known(call, call.args[0])
    ),
    "addmm": _affine(matmul),
    "baddbmm": _affine(matmul),
    "addmv": _affine(_matvec),
    "mul.Tensor": _mul,
    "div": _div,
    "convolution": _convolution,
    "add.Tensor": _added(1),
    "sub.Tensor": _added(-1),
    "rsub.Tensor": _added(1, swapped=True),
    "cat": _joined(torch.cat),
    "stack": _joined(torch.stack),
    "where.self": _where,
    "masked_fill": _masked_fill,
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
    "pow": _pow,
    "linalg_vector_norm": _vector_norm,
}


def _pointwise(name: str) -> Rule:
    tower = POINTWISE[name]
    several = name == "log_sigmoid_forward"

    def rule(call: Call) -> Any:
        x, *rest = call.args
        out = call.out[0] if several else call.out
        kwargs = {k: v for k, v in call.kwargs.items() if v is not None}
        derivatives = tower(x, out, call.algebra.order, *rest, **kwargs)
        found = call.algebra.compose(derivatives, known(call, x))
        return [found, None] if several else found

    return rule


def _linear(name: str) -> Rule:
    function = LINEAR[name]

    def rule(call: Call) -> Parts:
        x, *rest = call.args
        return call.of_each(
            lambda part, lead: function(part, lead, x, call.out, *rest, **call.kwargs),
            known(call, x),
        )

    return rule


def _several(name: str) -> Rule:
    function = SEVERAL[name]

    def rule(call: Call) -> list[Parts | None]:
        x, *rest = call.args
        pieces = [
            None if part is None else function(part, int(lead), x, call.out, *rest, **call.kwargs)
            for part, lead in zip(known(call, x), call.algebra.leads, strict=True)
        ]
        return [[None if p is None else p[i] for p in pieces] for i in range(len(call.out))]

    return rule


def names_of(func: Any) -> tuple[str, str]:
    """The name of an operation with and without its overload, without the underscore of in-place."""
    packet = func.overloadpacket.__name__
    if packet.endswith("_") and not packet.endswith("__"):
        packet = packet[:-1]
    return f"{packet}.{func._overloadname}", packet


def is_composite(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether the rule of an operation does not hold for these arguments."""
    name = names_of(func)[1]
    is_complex = isinstance(args[0], Tensor) and args[0].is_complex()
    if name == "linalg_vector_norm":
        return is_complex or (len(args) > 1 and args[1] != 2)
    if name in ("abs", "sgn"):
        return is_complex
    if name == "logit":
        return len(args) > 1 and args[1] is not None
    return name.startswith("clamp") and any(isinstance(limit, Tensor) for limit in args[1:])


@cache
def is_constant(func: Any) -> bool:
    """Whether the outputs of an operation are constant for autograd."""
    return func.namespace == "aten" and names_of(func)[1] in CONSTANT


@cache
def rule_of(func: Any) -> Rule | None:
    """The rule of an operation of torch; None if it has none."""
    if func.namespace != "aten":
        return None
    for name in names_of(func):
        if name in RULES:
            return RULES[name]
        if name in LINEAR:
            return _linear(name)
        if name in SEVERAL:
            return _several(name)
        if name in POINTWISE:
            return _pointwise(name)
        if name in ZERO:
            return lambda call: None
    return None
