"""Structural rules, for operations that move, add, join, select and write elements.

LINEAR and SEVERAL hold operations that are linear in one tensor: they apply to each coefficient alone,
by a function of

    part: the coefficient
    lead: 1 if part has a leading dimension of directions, else 0
    x, out: the operation's tensor argument and its output
    *args: the operation's further arguments

JOINS holds full rules, functions of a Call: operations of several tensors, and selections by value.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hoglib.taylor.series import Call, NoRule, Parts, Rule, align, plus, times, to_dtype

aten = torch.ops.aten
Linear = Callable[..., Tensor]


def _reshape(part: Tensor, lead: int, x: Tensor, out: Tensor, *args: Any) -> Tensor:
    return part.reshape(part.shape[:lead] + out.shape)


def _expand(part: Tensor, lead: int, x: Tensor, out: Tensor, *args: Any, **_: Any) -> Tensor:
    return align(part, lead, out.dim()).expand(part.shape[:lead] + out.shape)


def _identity(part: Tensor, lead: int, x: Tensor, out: Tensor, *args: Any, **_: Any) -> Tensor:
    return part


def _permute(part: Tensor, lead: int, x: Tensor, out: Tensor, dims: Sequence[int] = ()) -> Tensor:
    return part.permute([*range(lead), *(d % x.dim() + lead for d in dims)])


def by_dim(operation: Callable[..., Any]) -> Linear:
    """A linear rule from an operation that takes a dimension, or a list of dimensions, first."""

    def run(
        part: Tensor, lead: int, x: Tensor, out: Any, dim: object = 0, *args: Any, **kwargs: Any
    ) -> Any:
        if lead and not x.dim():  # torch accepts dim=0 for a scalar, as if it had one dimension
            result = operation(part.unsqueeze(1), shift_dims(dim, lead, x), *args, **kwargs)
            return result.reshape(part.shape + out.shape)
        return operation(part, shift_dims(dim, lead, x), *args, **kwargs)

    return run


def shift_dims(dim: Any, lead: int, x: Tensor) -> Any:
    if isinstance(dim, list | tuple):
        return [shift_dims(d, lead, x) for d in dim]
    return dim % max(x.dim(), 1) + lead


def _reduce(operation: Callable[..., Tensor]) -> Linear:
    def run(
        part: Tensor, lead: int, x: Tensor, out: Any, dim: Any = None, keep: bool = False, **_: Any
    ) -> Tensor:
        dims = list(range(x.dim())) if dim is None or dim == [] else dim
        return part if x.dim() == 0 else operation(part, shift_dims(dims, lead, x), keep)

    return run


def _transpose(part: Tensor, lead: int, x: Tensor, out: Tensor, a: int, b: int) -> Tensor:
    return part if x.dim() == 0 else part.transpose(shift_dims(a, lead, x), shift_dims(b, lead, x))


def _index(part: Tensor, lead: int, x: Tensor, out: Tensor, indices: Sequence[Any]) -> Tensor:
    result = part.movedim(0, -1) if lead else part  # indices apply to the first dimensions
    result = aten.index.Tensor(result, list(indices))
    return result.movedim(-1, 0) if lead else result


def _gather(
    part: Tensor, lead: int, x: Tensor, out: object, dim: int, index: Tensor, *args: Any, **_: Any
) -> Tensor:
    if x.dim() == 0:
        return part.reshape(part.shape[:lead] + index.shape)
    if lead:
        index = index.expand(part.shape[:1] + index.shape)
    return part.gather(shift_dims(dim, lead, x), index)


def _batch(operation: Any, rank: int) -> Linear:
    """A linear rule from an operation on [N, ...] or [...], such as pooling: directions join N.

    rank: the number of dimensions with N.
    """

    def run(part: Tensor, lead: int, x: Tensor, out: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not lead:
            return operation(part, *args, **kwargs)
        if x.dim() < rank:
            return torch.stack([operation(p, *args, **kwargs) for p in part])
        return operation(part.flatten(0, 1), *args, **kwargs).unflatten(0, part.shape[:2])

    return run


def _cast(part: Tensor, lead: int, x: Tensor, out: Tensor, *args: Any, **_: Any) -> Tensor:
    return to_dtype(part, out.dtype).to(out.device)


def _as_strided(
    part: Tensor, lead: int, x: Tensor, out: object, size: Any, stride: Any, offset: Any = None
) -> Tensor:
    start = 0 if offset is None else offset - x.storage_offset()
    last = start + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    if not x.is_contiguous() or start < 0 or last >= x.numel():
        raise NoRule("torch.as_strided of a tensor that is not contiguous, or beyond it")
    # the strides index a contiguous x, and so also a contiguous part
    part = part.contiguous()
    shape, strides = (*part.shape[:lead], *size), (*(x.numel(),) * lead, *stride)
    return part.as_strided(shape, strides, part.storage_offset() + start)


def _roll(part: Tensor, lead: int, x: Tensor, out: object, shifts: Any, dims: Any = ()) -> Tensor:
    if dims and x.dim():
        return part.roll(shifts, shift_dims(list(dims), lead, x))
    return part.flatten(lead).roll(shifts, lead).reshape(part.shape) if x.dim() else part


# Pooling and resizing, by the number of dimensions of a batch [N, ...].
_BATCHED = {
    3: ("reflection_pad1d", "replication_pad1d", "upsample_nearest1d"),
    4: (
        "reflection_pad2d", "replication_pad2d", "avg_pool2d", "_adaptive_avg_pool2d",
        "upsample_nearest2d", "upsample_bilinear2d", "upsample_bicubic2d", "pixel_shuffle", "im2col",
        "col2im",
    ),
    5: ("reflection_pad3d", "replication_pad3d", "avg_pool3d", "_adaptive_avg_pool3d"),
}  # fmt: skip
# Linear rules by the name of torch's operation: "name.overload", or "name" for all overloads.
LINEAR: dict[str, Linear] = {
    **dict.fromkeys(("view", "_unsafe_view", "_reshape_alias", "unsqueeze", "squeeze"), _reshape),
    **dict.fromkeys(("clone", "alias", "lift_fresh", "add.Scalar", "sub.Scalar"), _identity),
    # x - n y with an integer n: the slope is 1 between jumps
    **dict.fromkeys(("remainder.Scalar", "fmod.Scalar"), _identity),
    **dict.fromkeys(("_conj", "_conj_physical", "conj_physical"), lambda part, *_: part.conj()),
    **dict.fromkeys(("neg", "_neg_view"), lambda part, *_: -part),
    "view_as_real": lambda part, *_: torch.view_as_real(part.resolve_conj()),
    **{name: by_dim(getattr(aten, name)) for name in ("_fft_r2c", "_fft_c2r", "_fft_c2c")},
    **dict.fromkeys(("as_strided", "as_strided_copy"), _as_strided),
    "_to_copy": _cast,
    "expand": _expand,
    **dict.fromkeys(("permute", "permute_copy"), _permute),
    "transpose": _transpose,
    "t": lambda part, lead, x, out: part.transpose(-1, -2) if x.dim() == 2 else part,
    "select": by_dim(torch.select),
    "slice": by_dim(aten.slice.Tensor),
    "index_select": by_dim(torch.index_select),
    "diagonal": lambda part, lead, x, out, offset=0, dim1=0, dim2=1: part.diagonal(
        offset, shift_dims(dim1, lead, x), shift_dims(dim2, lead, x)
    ),
    "index.Tensor": _index,
    "gather": _gather,
    "flip": by_dim(torch.flip),
    "roll": _roll,
    "repeat": lambda part, lead, x, out, n=(): align(part, lead, len(n)).repeat([*(1,) * lead, *n]),
    "unfold": by_dim(Tensor.unfold),
    "tril": lambda part, lead, x, out, diagonal=0: part.tril(diagonal),
    "triu": lambda part, lead, x, out, diagonal=0: part.triu(diagonal),
    "cumsum": by_dim(torch.cumsum),
    "diag_embed": lambda part, lead, x, out, offset=0, dim1=-2, dim2=-1: torch.diag_embed(
        part, offset, dim1 % (x.dim() + 1) + lead, dim2 % (x.dim() + 1) + lead
    ),
    "trace": lambda part, lead, x, out: part.diagonal(dim1=-2, dim2=-1).sum(-1),
    "sum": _reduce(torch.sum),
    "mean": _reduce(torch.mean),
    "mul.Scalar": lambda part, lead, x, out, factor: part * factor,
    "div.Scalar": lambda part, lead, x, out, divisor: part / divisor,
    # the padding value is a constant, with coefficients 0
    "constant_pad_nd": lambda part, lead, x, out, pad, value=0: torch.constant_pad_nd(part, pad, 0),
    "rsub.Scalar": lambda part, lead, x, out, other, alpha=1: -alpha * part,
    **{
        name: _batch(getattr(aten, name), rank)
        for rank, names in _BATCHED.items()
        for name in names
    },
}  # fmt: skip


def _split(part: Tensor, lead: int, x: Tensor, out: object, sizes: object, dim: int = 0) -> Any:
    return part.split(sizes, shift_dims(dim, lead, x))


# Linear operations with several outputs.
SEVERAL: dict[str, Callable[..., Any]] = {
    "unbind": by_dim(Tensor.unbind),
    "split": _split,
    "split_with_sizes": _split,
}

# Operations along a dimension that return (values, indices).
SELECTING = {
    "max.dim", "min.dim", "sort", "sort.stable", "topk", "kthvalue", "median.dim", "cummax", "cummin",
    "nanmedian.dim", "mode",
}  # fmt: skip

# Operations with a zero derivative.
ZERO = {"sign", "sgn", "floor", "ceil", "round", "trunc", "heaviside", "floor_divide"}

# Operations that read only shapes of their tensors, or that autograd does not differentiate.
CONSTANT = {
    "zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "randint_like",
    "new_zeros", "new_ones", "new_empty", "new_full", "new_empty_strided", "_linalg_check_errors",
    "bernoulli", "histc",
}  # fmt: skip


def _add(sign: float, swapped: bool = False) -> Rule:
    def rule(call: Call) -> Parts:
        a, b = call.args[:2]
        alpha = call.kwargs.get("alpha", call.args[2] if len(call.args) > 2 else 1)
        of_a, of_b = (-alpha, 1) if swapped else (1, sign * alpha)
        a_n, b_n = call.aligned(call.known(a)), call.aligned(call.known(b))
        return plus(times(of_a, a_n), times(of_b, b_n))

    return rule


def _join(operation: Any) -> Rule:
    def rule(call: Call) -> Parts:
        tensors, dim = call.args[0], call.args[1] if len(call.args) > 1 else 0
        if operation is torch.cat:  # torch.cat skips tensors of shape [0]
            tensors = [x for x in tensors if x.shape != (0,)] or list(tensors)
        joined = call.algebra.zeros()
        like = call.out if operation is torch.cat else call.out.select(dim, 0)
        dim %= call.out.dim()
        for c, lead in enumerate(call.algebra.leads):
            parts = [call.known(x)[c] for x in tensors]
            given = next((p for p in parts if p is not None), None)
            if given is None:
                continue
            size = given.shape[: int(lead)]
            pairs = zip(parts, tensors, strict=True)
            filled = [like.new_zeros(size + x.shape) if p is None else p for p, x in pairs]
            joined[c] = operation(filled, dim + lead)
        return joined

    return rule


def where_tensors(call: Call, mask: Tensor, a: object, b: object) -> Parts:
    """The coefficients of where(mask, a, b)."""
    return where_parts(call, mask, call.known(a), call.known(b))


def where_parts(call: Call, mask: Tensor, a_n: Parts, b_n: Parts) -> Parts:
    """The coefficients a_n where mask is True, b_n elsewhere."""
    parts: Parts = []
    for p, q, lead in zip(a_n, b_n, call.algebra.leads, strict=True):
        sides: list[Any] = [0 if r is None else align(r, lead, call.out.dim()) for r in (p, q)]
        parts.append(None if p is q is None else torch.where(mask, sides[0], sides[1]))
    return parts


def _extremum(call: Call) -> Parts:
    a, b = call.args
    larger = a > b if call.name == "maximum" else a < b
    chosen = where_tensors(call, larger, a, b)
    ties = a == b  # torch's derivative: half of each
    if call.side:
        sign = call.direction(plus(call.known(a), times(-1, call.known(b))))
        if sign is None:
            return chosen
        first = sign > 0 if call.name == "maximum" else sign < 0
        return where_tensors(call, torch.where(ties, first, larger), a, b)
    half = times(0.5, plus(where_tensors(call, ties, a, 0.0), where_tensors(call, ties, b, 0.0)))
    return where_parts(call, ties, half, chosen)


def _reduced_extremum(call: Call) -> Parts:
    """amax, amin, max, min: the mean of the coefficients over elements equal to the extremum."""
    x, *rest = call.args
    dims = list(rest[0]) if rest and rest[0] else list(range(x.dim()))
    keep = bool(rest[1]) if len(rest) > 1 else False
    if x.dim() == 0:
        return call.known(x)
    dims = sorted(d % x.dim() for d in dims)
    out = call.out
    if not keep:
        for d in dims:
            out = out.unsqueeze(d)
    mask = (x == out).to(x.dtype)
    mask = mask / mask.sum(dims, keepdim=True)
    total = lambda p, lead: (p * mask).sum([d + lead for d in dims], keep)  # noqa: E731
    return call.algebra.of_each(total, call.known(x))


def _select(call: Call) -> list[Parts | None]:
    x = call.args[0]
    given = [a for a in call.args[1:] if isinstance(a, int) and not isinstance(a, bool)]
    kwargs = call.kwargs
    before = 1 if call.name in ("topk", "kthvalue") else 0  # k comes before dim
    dim = given[before] if len(given) > before else kwargs.get("dim", -1)
    values, indices = call.out
    if x.dim() == 0:
        return [call.known(x), None]
    keep = values.dim() == x.dim()
    index = indices if keep else indices.unsqueeze(dim)

    def pick(part: Tensor, lead: int) -> Tensor:
        picked = _gather(part, lead, x, None, dim, index)
        return picked if keep else picked.squeeze(shift_dims(dim, lead, x))

    return [call.algebra.of_each(pick, call.known(x)), None]


def _write(source: int) -> Rule:
    """A rule for operations that write args[source] into args[0]: linear in both tensors.

    The operation runs once for each direction.
    """

    def rule(call: Call) -> Parts:
        parts: Parts = []
        args = list(call.args)
        operation = getattr(aten, call.name)
        x: Any = args[0]
        y: Any = args[source]
        for p, q, lead in zip(call.known(x), call.known(y), call.algebra.leads, strict=True):
            given = p if p is not None else q
            if given is None:
                parts.append(None)
                continue
            rows = []
            for r in range(len(given)) if lead else [...]:
                args[0] = torch.zeros_like(x) if p is None else p[r]
                zero = torch.zeros_like(y) if isinstance(y, Tensor) else 0.0
                args[source] = zero if q is None else q[r]
                rows.append(operation(*args, **call.kwargs))
            parts.append(torch.stack(rows) if lead else rows[0])
        return parts

    return rule


JOINS: dict[str, Rule] = {
    "add.Tensor": _add(1),
    "sub.Tensor": _add(-1),
    "rsub.Tensor": _add(1, swapped=True),
    "cat": _join(torch.cat),
    "stack": _join(torch.stack),
    "where.self": lambda call: where_tensors(call, *call.args),
    "masked_fill": lambda call: where_tensors(call, call.args[1], call.args[2], call.args[0]),
    "maximum": _extremum,
    "minimum": _extremum,
    **dict.fromkeys(("amax", "amin", "max", "min"), _reduced_extremum),
    **dict.fromkeys(SELECTING, _select),
    "index_put": _write(2),
    "scatter": _write(3),
    "scatter_add": _write(3),
    "index_add": _write(3),
    "index_copy": _write(3),
    "select_scatter": _write(1),
    "slice_scatter": _write(1),
    "diagonal_scatter": _write(1),
}
