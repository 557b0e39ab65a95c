"""Operations that are linear in one tensor, or in a list of them, applied to a coefficient.

Each function takes (part, lead, x, out, *args): the coefficient, 1 if it has a leading dimension of
directions and 0 if not, the tensor, the output, and the other arguments of the operation.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hoglib.taylor.algebras import align
from hoglib.taylor.call import Refused, to_dtype

aten = torch.ops.aten
Linear = Callable[..., Tensor]


def _reshaped(part: Tensor, lead: int, x: Tensor, out: Tensor, *args: Any) -> Tensor:
    return part.reshape(part.shape[:lead] + out.shape)


def _expanded(part: Tensor, lead: int, x: Tensor, out: Tensor, *args: Any, **_: Any) -> Tensor:
    return align(part, bool(lead), out.dim()).expand(part.shape[:lead] + out.shape)


def _same(part: Tensor, lead: int, x: Tensor, out: Tensor, *args: Any, **_: Any) -> Tensor:
    return part


def _permuted(part: Tensor, lead: int, x: Tensor, out: Tensor, dims: Sequence[int] = ()) -> Tensor:
    return part.permute([*range(lead), *(d % x.dim() + lead for d in dims)])


def by_dim(operation: Callable[..., Any]) -> Linear:
    """Of an operation whose first argument is a dimension, or several."""

    def run(
        part: Tensor, lead: int, x: Tensor, out: Any, dim: Any = 0, *args: Any, **kwargs: Any
    ) -> Any:
        return operation(part, shifted(dim, lead, x), *args, **kwargs)

    return run


def shifted(dim: Any, lead: int, x: Tensor) -> Any:
    if isinstance(dim, list | tuple):
        return [shifted(d, lead, x) for d in dim]
    return dim % max(x.dim(), 1) + lead


def _reduced(operation: Callable[..., Tensor]) -> Linear:
    def run(
        part: Tensor, lead: int, x: Tensor, out: Tensor, dim: Any = None, keepdim: bool = False,
        **_: Any,
    ) -> Tensor:  # fmt: skip
        dims = list(range(x.dim())) if dim is None or dim == [] else dim
        if x.dim() == 0:
            return part
        return operation(part, shifted(dims, lead, x), keepdim)

    return run


def _transposed(part: Tensor, lead: int, x: Tensor, out: Tensor, a: int, b: int) -> Tensor:
    return part if x.dim() == 0 else part.transpose(shifted(a, lead, x), shifted(b, lead, x))


def _indexed(part: Tensor, lead: int, x: Tensor, out: Tensor, indices: Sequence[Any]) -> Tensor:
    found = part.movedim(0, -1) if lead else part  # so that the indices stay the first ones
    found = aten.index.Tensor(found, list(indices))
    return found.movedim(-1, 0) if lead else found


def _gathered(
    part: Tensor, lead: int, x: Tensor, out: Any, dim: int, index: Tensor, *args: Any, **_: Any
) -> Tensor:
    if x.dim() == 0:
        return part.reshape(part.shape[:lead] + index.shape)
    if lead:
        index = index.expand(part.shape[:1] + index.shape)
    return part.gather(shifted(dim, lead, x), index)


def _batched(operation: Any, rank: int) -> Linear:
    """Of an operation on [N, ...] or [...], as pooling and resizing: the directions join the batch."""

    def run(part: Tensor, lead: int, x: Tensor, out: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not lead or x.dim() < rank:
            return (
                torch.stack([operation(p, *args, **kwargs) for p in part])
                if lead
                else operation(part, *args, **kwargs)
            )
        found = operation(part.flatten(0, 1), *args, **kwargs)
        return found.unflatten(0, part.shape[:2])

    return run


def _selected(part: Tensor, lead: int, x: Tensor, out: Tensor, mask: Tensor) -> Tensor:
    part = align(part, bool(lead), mask.dim())
    shape = torch.broadcast_shapes(x.shape, mask.shape)
    part, mask = part.expand(part.shape[:lead] + shape), mask.expand(shape)
    return part[:, mask] if lead else part[mask]


def _cast(part: Tensor, lead: int, x: Tensor, out: Tensor, *args: Any, **_: Any) -> Tensor:
    return to_dtype(part, out.dtype).to(out.device)


def _repeated(
    part: Tensor, lead: int, x: Tensor, out: Tensor, repeats: Sequence[int] = ()
) -> Tensor:
    return align(part, bool(lead), len(repeats)).repeat([*(1,) * lead, *repeats])


def _strided(
    part: Tensor, lead: int, x: Tensor, out: Tensor, size: Sequence[int], stride: Sequence[int],
    offset: int | None = None,
) -> Tensor:  # fmt: skip
    start = 0 if offset is None else offset - x.storage_offset()
    last = start + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    if not x.is_contiguous() or start < 0 or last >= x.numel():
        raise Refused("torch.as_strided of a tensor that is not contiguous, or beyond it")
    part = part.contiguous()
    rows = tuple(part.shape[:lead])
    return part.as_strided(
        (*rows, *size), (*(x.numel(),) * lead, *stride), part.storage_offset() + start
    )


# Pooling and resizing, by the dimensions of a batch.
_BATCHED = {
    3: ("reflection_pad1d", "replication_pad1d", "upsample_nearest1d"),
    4: (
        "reflection_pad2d", "replication_pad2d", "avg_pool2d", "_adaptive_avg_pool2d",
        "upsample_nearest2d", "upsample_bilinear2d", "upsample_bicubic2d", "pixel_shuffle", "im2col",
        "col2im",
    ),
    5: ("reflection_pad3d", "replication_pad3d", "avg_pool3d", "_adaptive_avg_pool3d"),
}  # fmt: skip
# By the name of torch's operation with its overload, or of all its overloads.
LINEAR: dict[str, Linear] = {
    **dict.fromkeys(
        ("view", "_unsafe_view", "reshape", "_reshape_alias", "unsqueeze", "squeeze", "flatten"),
        _reshaped,
    ),
    **dict.fromkeys(("clone", "contiguous", "alias", "lift_fresh", "positive", "view_as"), _same),
    **dict.fromkeys(("_conj", "_conj_physical", "conj_physical"), lambda part, *_: part.conj()),
    **dict.fromkeys(("resolve_conj", "resolve_neg"), _same),
    "_neg_view": lambda part, *_: -part,
    "view_as_real": lambda part, *_: torch.view_as_real(part.resolve_conj()),
    **{name: by_dim(getattr(aten, name)) for name in ("_fft_r2c", "_fft_c2r", "_fft_c2c")},
    **dict.fromkeys(("as_strided", "as_strided_copy"), _strided),
    "_to_copy": _cast,
    "expand": _expanded,
    **dict.fromkeys(("permute", "permute_copy"), _permuted),
    "transpose": _transposed,
    "t": lambda part, lead, x, out: part.transpose(-1, -2) if x.dim() == 2 else part,
    "numpy_T": lambda part, lead, x, out: part.permute(
        *range(lead), *range(part.dim() - 1, lead - 1, -1)
    ),
    "select": by_dim(torch.select),
    "slice": by_dim(aten.slice.Tensor),
    "narrow": by_dim(torch.narrow),
    "index_select": by_dim(torch.index_select),
    "diagonal": lambda part, lead, x, out, offset=0, dim1=0, dim2=1: part.diagonal(
        offset, shifted(dim1, lead, x), shifted(dim2, lead, x)
    ),
    "index.Tensor": _indexed,
    "gather": _gathered,
    "masked_select": _selected,
    "flip": by_dim(torch.flip),
    "roll": lambda part, lead, x, out, shifts, dims=(): (
        part.roll(shifts, shifted(list(dims), lead, x))
        if dims
        else part.flatten(lead).roll(shifts, lead).reshape(part.shape)
    ),
    "repeat": _repeated,
    "unfold": by_dim(Tensor.unfold),
    "tril": lambda part, lead, x, out, diagonal=0: part.tril(diagonal),
    "triu": lambda part, lead, x, out, diagonal=0: part.triu(diagonal),
    "cumsum": by_dim(torch.cumsum),
    "diag_embed": lambda part, lead, x, out, offset=0, dim1=-2, dim2=-1: torch.diag_embed(
        part, offset, dim1 % (x.dim() + 1) + lead, dim2 % (x.dim() + 1) + lead
    ),
    "trace": lambda part, lead, x, out: part.diagonal(dim1=-2, dim2=-1).sum(-1),
    "sum": _reduced(torch.sum),
    "mean": _reduced(torch.mean),
    "neg": lambda part, lead, x, out: -part,
    "mul.Scalar": lambda part, lead, x, out, factor: part * factor,
    "div.Scalar": lambda part, lead, x, out, divisor: part / divisor,
    "constant_pad_nd": lambda part, lead, x, out, pad, value=0: torch.constant_pad_nd(part, pad, 0),
    "add.Scalar": lambda part, lead, x, out, other, alpha=1: part,
    "sub.Scalar": lambda part, lead, x, out, other, alpha=1: part,
    "rsub.Scalar": lambda part, lead, x, out, other, alpha=1: -alpha * part,
    "remainder.Scalar": _same,
    "fmod.Scalar": _same,
    **{
        name: _batched(getattr(aten, name), rank)
        for rank, names in _BATCHED.items()
        for name in names
    },
}


def _split(part: Tensor, lead: int, x: Tensor, out: Any, sizes: Any, dim: int = 0) -> Any:
    return part.split(sizes, shifted(dim, lead, x))


# Those with several outputs, of which each is linear.
SEVERAL: dict[str, Callable[..., Any]] = {
    "unbind": by_dim(Tensor.unbind),
    "split": _split,
    "split_with_sizes": _split,
}

# Those that select elements: (values, indices) of a function of the dimension.
SELECTING = {
    "max.dim",
    "min.dim",
    "sort",
    "sort.stable",
    "topk",
    "kthvalue",
    "median.dim",
    "cummax",
    "cummin",
    "nanmedian.dim",
    "mode",
}

# Those whose outputs have the derivative zero.
ZERO = {"sign", "sgn", "floor", "ceil", "round", "trunc", "heaviside", "floor_divide"}

# Those that read no values of their tensors, or that autograd does not differentiate.
CONSTANT = {
    "zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "randint_like",
    "new_zeros", "new_ones", "new_empty", "new_full", "new_empty_strided", "_linalg_check_errors",
    "bernoulli", "histc",
}  # fmt: skip
