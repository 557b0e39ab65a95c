"""Reductions by index, by segment and by bag, with right derivatives of products at zero factors.

torch's derivatives divide the product of all factors by one factor. This needs cases for zeros, and
cases by value have no derivatives. Here a segmented scan by doubling computes products, by
multiplications alone.
"""

from math import inf, nan
from operator import gt
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hoglib._core.messages import validation
from hoglib._core.messages.validation import TorchValueError
from hoglib._core.torch_api import pytree
from hoglib._core.torch_api.mixed_precision import upcast_half
from hoglib._core.torch_api.torch_private import private
from hoglib.errors import ArgumentIndexError, ArgumentValueError, UnsupportedError
from hoglib.ops._stand_in import IN_FORWARD, NO_DOUBLE_BACKWARD, SILENT, stands_in_for

_assert_async = private("torch._assert_async")

__all__ = ["embedding_bag", "index_reduce", "scatter_reduce", "segment_reduce"]

_SEGMENT_REDUCTIONS = ("sum", "mean", "max", "min", "prod", "amax", "amin")
_OF_NO_ENTRIES = {"sum": 0.0, "mean": nan, "max": -inf, "min": inf, "prod": 1.0}

_BY_INDEX = "scatter_reduce, index_reduce"


@stands_in_for(
    torch.scatter_reduce,
    Tensor.scatter_reduce,
    name=_BY_INDEX,
    lacks=f"for products a wrong forward mode{SILENT}, or none",
    modes=IN_FORWARD,
)
def scatter_reduce(
    input: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    r"""Reduce the entries of src into the places of input that index names, as `torch.scatter_reduce`.

        y_(index_i) = input_(index_i) * prod_i src_i        for "prod", along dim

    torch.scatter_reduce is silently wrong for products in forward over reverse, and so in
    torch.func.hessian; other reductions are right in torch, and computed by it. Equal maxima and minima
    share the derivative. Derivatives of products are right at factors of 0; half precision is
    multiplied in float32. Differentiable to any order by input and src, in every mode, under vmap.

    Args:
        input: A tensor; for derivatives of "prod" floating-point or complex.
        dim: The dimension along which index counts.
        index: The places, int64.
        src: The entries, of the dtype of input.
        reduce: "sum", "prod", "mean", "amax" or "amin".
        include_self: Whether the entries of input take part; if not, places in index start from
            the neutral element. Default: True.
    Returns:
        y, like input.
    Raises:
        RuntimeError: for shapes, dtypes and an index out of range, as torch.
        IndexError: for a dim that input lacks.
    Shape:
        - input, y: any
        - index: no larger than src, nor than input in other dimensions than dim
        - src: of as many dimensions
    Example:
        >>> x, i = torch.ones(2), torch.tensor([0, 0])
        >>> f = lambda s: hog.ops.scatter_reduce(x, 0, i, s, "prod")
        >>> f(torch.tensor([2.0, 3.0])), hog.hessian(lambda s: f(s).sum(), torch.zeros(2))
        (tensor([6., 1.]), tensor([[0., 1.],
                [1., 0.]]))
    """
    validation.tensor("input", input)
    given = isinstance(index, Tensor) and isinstance(src, Tensor) and input.dtype == src.dtype
    smaller = given and index.dim() == src.dim() and not any(map(gt, index.shape, src.shape))
    if reduce != "prod" or not pytree.is_float(input) or not smaller:  # torch's, or its error
        return torch.scatter_reduce(input, dim, index, src, reduce, include_self=include_self)
    dim = validation.dim("dim", dim, input.dim())
    x, index, src = torch.atleast_1d(upcast_half(input), index, upcast_half(src))
    # a stable sort makes a run of equal indices with factors in their order: reproducible rounding
    keys, order = torch.sort(index, dim=dim, stable=True)
    products, named = _products_by_key(src.gather(dim, order), keys, dim, x)
    y = x * products if include_self else torch.where(named, products, x)
    return y.to(input.dtype).reshape(input.shape)


@stands_in_for(torch.index_reduce, Tensor.index_reduce, name=_BY_INDEX)
def index_reduce(
    input: Tensor,
    dim: int,
    index: Tensor,
    source: Tensor,
    reduce: str,
    *,
    include_self: bool = True,
) -> Tensor:
    r"""Reduce slices of source into the slices of input at index, as `torch.index_reduce`.

        y_(index_i) = input_(index_i) * prod_i source_i        for "prod", slices along dim

    torch.index_reduce has no forward mode. Equal maxima and minima share the derivative. Derivatives of
    products are right at factors of 0; half precision is multiplied in float32. Differentiable to any
    order by input and source, in every mode, under vmap.

    Args:
        input: A floating-point or complex tensor.
        dim: The dimension of the slices.
        index: The slices of input, int64 or int32.
        source: The slices, of the dtype of input.
        reduce: "prod", "mean", "amax" or "amin".
        include_self: Whether the slices of input take part; if not, slices in index start from the
            neutral element. Default: True.
    Returns:
        y, like input.
    Raises:
        RuntimeError: for another reduction, and for shapes and dtypes that do not fit.
        IndexError: for a dim that input lacks, or an index with more than one dimension.
    Shape:
        - input, y: any
        - index: [n]
        - source: the shape of input with n at dim
    Example:
        >>> x, i = torch.ones(2), torch.tensor([0, 0])
        >>> f = lambda s: hog.ops.index_reduce(x, 0, i, s, "prod")
        >>> f(torch.tensor([2.0, 3.0])), hog.hessian(lambda s: f(s).sum(), torch.zeros(2))
        (tensor([6., 1.]), tensor([[0., 1.],
                [1., 0.]]))
    """
    validation.tensor("input", input)
    if reduce not in ("prod", "mean", "amax", "amin"):
        raise TorchValueError(f"reduce: expected prod, mean, amax or amin, got {reduce!r}.")
    if index.dim() > 1:
        got = validation.describe(index)
        raise ArgumentIndexError(f"index: expected a vector of indices, got {got}.")
    validation.indices("index", index)
    validation.same_dtype("input", input, "source", source)
    axis = validation.dim("dim", dim, input.dim())
    x, s = torch.atleast_1d(input), torch.atleast_1d(source)
    shape = (*x.shape[:axis], index.numel(), *x.shape[axis + 1 :])
    if s.shape != shape:
        raise TorchValueError(
            f"source: expected shape {shape}, that of input with {index.numel()} entries of index at "
            f"dim, got {tuple(s.shape)}."
        )
    ones = (1,) * axis, (1,) * (x.dim() - axis - 1)
    into = index.long().reshape(*ones[0], -1, *ones[1]).expand(shape)
    return scatter_reduce(x, axis, into, s, reduce, include_self=include_self).reshape(input.shape)


@stands_in_for(torch.segment_reduce, lacks=NO_DOUBLE_BACKWARD)
def segment_reduce(
    data: Tensor,
    reduce: str,
    *,
    lengths: Tensor | None = None,
    indices: Tensor | None = None,
    offsets: Tensor | None = None,
    axis: int = 0,
    unsafe: bool = False,
    initial: float | None = None,
) -> Tensor:
    r"""Sum, mean, maximum, minimum or product of each segment along an axis, as `torch.segment_reduce`.

        y_s = initial + sum_(i in segment s) x_i        for "sum"

    torch.segment_reduce has neither a second derivative nor a forward mode. Entries outside of all
    segments are left out. A mean divides initial too. A segment without entries is initial, or else 0,
    NaN, -inf, inf or 1, without derivatives. Equal maxima and minima share the derivative (in torch
    only a derivative greater than 0). Derivatives of products are right at factors of 0. Half
    precision is computed in float32. Differentiable to any order, in every mode, under vmap.

    Args:
        data: x, a real floating-point tensor.
        reduce: "sum", "mean", "max", "min" or "prod".
        lengths: The length of each segment. Default: none; give lengths or offsets.
        indices: Refused, as by torch. Default: none.
        offsets: The position where each segment begins, and the end of the last. Default: none.
        axis: The axis of the segments, the last dimension of lengths or offsets. Default: 0.
        unsafe: Whether lengths are not checked. Default: False.
        initial: A value that takes part in every segment. Default: none.
    Returns:
        y, of the dtype of data.
    Raises:
        RuntimeError: as torch, for shapes, dtypes and another reduction; also, on the CPU, for
            negative lengths or, unless unsafe, lengths with a sum other than n.
    Shape:
        - data: [..., n, ...], n at axis
        - lengths: [..., segments]
        - offsets: [..., segments + 1]
        - y: [..., segments, ...]
    Example:
        >>> x, n = torch.tensor([2.0, 3.0, 5.0]), torch.tensor([2, 1])
        >>> f = lambda x: hog.ops.segment_reduce(x, "prod", lengths=n)
        >>> f(x), hog.hvp(lambda x: f(x).sum(), x, torch.tensor([1.0, 0.0, 0.0]))[1]
        (tensor([6., 5.]), tensor([0., 1., 0.]))
    """
    validation.tensor("data", data)
    given, axis = _check_segments(data, lengths, indices, offsets, axis)
    if reduce not in _SEGMENT_REDUCTIONS:
        text = f"reduce: expected one of {', '.join(_SEGMENT_REDUCTIONS[:5])}; got {reduce!r}."
        raise TorchValueError(text)
    validation.torch_real("data", data)
    kind = reduce.removeprefix("a")
    if offsets is None and not unsafe and data.device.type == "cpu":
        # an assertion as an operation, because a branch on values would break a captured graph
        _assert_async(
            ((given >= 0).all(-1) & (given.sum(-1) == data.shape[axis])).all(),
            "lengths: expected integers of at least 0 that sum to data.size(axis); or set unsafe.",
        )
    keys, count = _segment_of_each(given, offsets is not None, data.shape[axis])
    into = keys.reshape(keys.shape + (1,) * (data.dim() - axis - 1)).expand(data.shape)
    x = upcast_half(data)
    shape = (*data.shape[:axis], count + 1, *data.shape[axis + 1 :])
    base = torch.full(shape, _OF_NO_ENTRIES[kind], dtype=x.dtype, device=x.device)
    if kind in ("max", "min"):
        y = base.scatter_reduce(axis, into, x, f"a{kind}", include_self=False)
        if initial is not None:
            y = torch.where(y < initial if kind == "max" else y > initial, initial, y)
    elif kind == "prod":
        y = _products_by_key(x, into, axis, base)[0]
        y = y if initial is None else y * initial
    else:
        y = torch.zeros_like(base).scatter_add(axis, into, x)
        y = y if initial is None else y + initial
        if kind == "mean":
            sizes = torch.zeros_like(base).scatter_add(axis, into, torch.ones_like(x))
            empty = _OF_NO_ENTRIES["mean"] if initial is None else initial
            y = torch.where(sizes == 0, empty, y / sizes.clamp(min=1))
    return y.narrow(axis, 0, count).to(data.dtype)


def _check_segments(
    data: Tensor, lengths: Tensor | None, indices: Tensor | None, offsets: Tensor | None, axis: int
) -> tuple[Tensor, int]:
    """The offsets, or the lengths if there are no offsets, and the axis counted from 0."""
    if indices is not None:
        raise TorchValueError("indices: expected None, got a tensor; torch does not take them yet.")
    given = lengths if offsets is None else offsets
    if given is None:
        raise TorchValueError("lengths: expected lengths or offsets of the segments, got neither.")
    axis = validation.dim("axis", axis, data.dim())
    if data.dim() < given.dim() or given.dim() != axis + 1:
        raise TorchValueError(
            f"axis: expected the last dimension of lengths or offsets, got axis {axis} of data "
            f"{tuple(data.shape)} and {validation.describe(given)}."
        )
    if given.shape[:-1] != data.shape[:axis]:
        raise TorchValueError(
            f"lengths: expected {tuple(data.shape[:axis])} before the last dimension, as in data, got "
            f"{tuple(given.shape[:-1])}."
        )
    validation.indices("lengths", given, "integers, int64 or int32")
    return given, axis


def _segment_of_each(given: Tensor, are_offsets: bool, n: int) -> tuple[Tensor, int]:
    """The segment of each entry, and the number of segments, which marks an entry in no segment."""
    ends = given[..., 1:] if are_offsets else given.cumsum(-1)
    place = torch.arange(n, dtype=ends.dtype, device=given.device)
    place = place.expand(*given.shape[:-1], n).contiguous()
    keys = torch.searchsorted(ends.contiguous(), place, right=True)
    if are_offsets:
        keys = torch.where(place < given[..., :1], ends.shape[-1], keys)
    return keys, ends.shape[-1]


def segmented_scan(x: Tensor, keys: Tensor, dim: int) -> Tensor:
    """Cumulative products within runs of equal keys: y_i = prod_(j <= i, keys_j = keys_i) x_j.

    keys has the shape of x, and is sorted along dim. It takes log2(n) steps.
    """
    n, step = x.shape[dim], 1
    while step < n:
        before, after = x.narrow(dim, 0, n - step), x.narrow(dim, step, n - step)
        one_run = keys.narrow(dim, 0, n - step) == keys.narrow(dim, step, n - step)
        longer = after * torch.where(one_run, before, 1.0)
        x, step = torch.cat([x.narrow(dim, 0, step), longer], dim), 2 * step
    return x


def _products_by_key(x: Tensor, keys: Tensor, dim: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """The product of each key's entries, in the shape of like, and a mask of the keys that occur.

    keys has the shape of x, and is sorted along dim.
    """
    beyond = torch.full_like(keys.narrow(dim, 0, min(keys.shape[dim], 1)), -1)
    # the last entry of a run holds the product of the run
    ends = keys.diff(dim=dim, append=beyond) != 0  # of runs of equal keys
    products = torch.where(ends, segmented_scan(x, keys, dim), 0.0)
    zeros = torch.zeros(like.shape, dtype=x.dtype, device=x.device)
    named = zeros.bool().scatter(dim, keys, True)
    return torch.where(named, zeros.scatter_add(dim, keys, products), 1.0), named


# Bags: rows are selected by index and reduced bag by bag.

_MODES = ("sum", "mean", "max")  # in the order of torch's numbers for them


@stands_in_for(F.embedding_bag, lacks=NO_DOUBLE_BACKWARD)
def embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    r"""Sum, mean or maximum of the rows of a table in each bag, as `torch.nn.functional.embedding_bag`.

        y_b = sum_(i in bag b) s_i W[input_i]        s = per_sample_weights, for mode "sum", or 1

    F.embedding_bag has neither a second derivative nor a forward mode. A bag without entries other than
    padding_idx gives 0. Among equal maxima the first in its bag has the derivative. Half precision is
    summed in float32. Differentiable to any order by W and s, in every mode, under vmap.

    Args:
        input: The indices of rows, int64 or int32.
        weight: W, the table.
        offsets: The position in input where each bag begins, for a flat input. Default: none.
        max_norm: The selected rows of weight are scaled down to this norm, in place, as in torch.
            Default: none.
        norm_type: The p of max_norm's p-norm. Default: 2.
        scale_grad_by_freq: Refused: such a gradient cannot be differentiated. Default: False.
        mode: "sum", "mean" or "max". Default: "mean".
        sparse: Refused: such a gradient cannot be differentiated. Default: False.
        per_sample_weights: s, for mode "sum". Default: 1.
        include_last_offset: Whether offsets ends with the end of the last bag. Default: False.
        padding_idx: A row that is left out of bags. Default: none.
    Returns:
        y.
    Raises:
        ValueError: for an unknown mode, and for shapes that do not fit.
        RuntimeError: for dtypes and a padding_idx that torch refuses.
        NotImplementedError: for sparse, scale_grad_by_freq, and weights with another mode than "sum".
        IndexError: for an index beyond the rows.
    Shape:
        - input: [bags, n], or [n] with offsets
        - weight: [rows, d]
        - offsets: [bags], or [bags + 1] with include_last_offset
        - per_sample_weights: like input
        - y: [bags, d]
    Example:
        >>> W, i = torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([[0, 2]])
        >>> f = lambda W: hog.ops.embedding_bag(i, W, mode="sum")
        >>> f(W), hog.hvp(lambda W: f(W).square().sum(), W, torch.ones(3, 1))[1].flatten()
        (tensor([[5.]]), tensor([4., 0., 4.]))
    """
    _check_bags(input, weight, per_sample_weights, mode)
    for name, value in (("scale_grad_by_freq", scale_grad_by_freq), ("sparse", sparse)):
        if value:
            raise UnsupportedError(
                f"{name}: expected False, got {value}; such a gradient cannot be differentiated again."
            )
    if input.dim() == 2:
        if offsets is not None:
            raise ArgumentValueError(
                f"offsets: expected None with an input of 2 dimensions, whose rows are the bags, got "
                f"{validation.describe(offsets)}; leave them out, or give `input.reshape(-1)`."
            )
    elif input.dim() != 1:
        raise ArgumentValueError(
            f"input: expected 1 or 2 dimensions, got {validation.describe(input)}; rows are bags."
        )
    elif offsets is None or offsets.dim() != 1:
        raise ArgumentValueError(
            f"offsets: expected a tensor of 1 dimension with an input of 1 dimension, got "
            f"{validation.describe(offsets)}; it says where each bag begins."
        )
    if max_norm is not None:
        with torch.no_grad():
            torch.embedding_renorm_(weight, input.contiguous(), max_norm, norm_type)
    if per_sample_weights is not None and mode != "sum":
        raise UnsupportedError(
            f"per_sample_weights: expected None for mode {mode!r}, got "
            f"{validation.describe(per_sample_weights)}; they are for mode='sum'."
        )
    padding = _padding_row(padding_idx, weight)
    if offsets is None:  # rows are the bags
        offsets = input.shape[1] * torch.arange(input.shape[0], device=input.device)
        input, include_last_offset = input.reshape(-1), False
        if per_sample_weights is not None:
            per_sample_weights = per_sample_weights.reshape(-1)
    bags = _make_bags(input, offsets, include_last_offset, padding)
    return _reduce_bags(bags, weight, mode, per_sample_weights)[0]


@stands_in_for(torch.embedding_bag, name="embedding_bag")
def torch_embedding_bag(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """With the signature of `torch.embedding_bag`, and its four results."""
    name = _MODES[mode]
    more = scale_grad_by_freq, name, sparse, per_sample_weights, include_last_offset, padding_idx
    y = embedding_bag(indices, weight, offsets, None, 2.0, *more)
    bags = _make_bags(indices, offsets, include_last_offset, _padding_row(padding_idx, weight))
    sizes = bags.sizes(torch.float64).to(indices.dtype)
    rows = _reduce_bags(bags, weight.detach(), name, None)[1] if name == "max" else sizes
    rows = y.new_zeros(y.shape).long() if rows is None else rows
    return y, bags.bag.to(indices.dtype), sizes, rows


class _Bags(NamedTuple):
    """The bag of each index; padding belongs to an extra bag after the last."""

    indices: Tensor  # rows of the table, (n,)
    bag: Tensor  # the bag of each index, (n,)
    num_bags: int  # without the extra bag

    def sizes(self, dtype: torch.dtype) -> Tensor:
        ones = torch.ones(self.bag.shape, dtype=dtype, device=self.bag.device)
        return ones.new_zeros(self.num_bags + 1).index_add(0, self.bag, ones)[: self.num_bags]


def _reduce_bags(
    bags: _Bags, weight: Tensor, mode: str, scale: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The reduced bags; for mode "max" also the row of each maximum, else None."""
    if mode == "max":
        if bags.indices.shape[0]:
            return _maxima(bags, weight)
        return weight[:0].sum(0).expand(bags.num_bags, -1), None  # zeros that depend on weight
    # not by F.embedding: its double backward fails without indices
    rows = upcast_half(weight.index_select(0, bags.indices))
    if scale is not None:
        rows = rows * scale.unsqueeze(-1)
    sums = rows.new_zeros(bags.num_bags + 1, rows.shape[1]).index_add(0, bags.bag, rows)
    sums = sums[: bags.num_bags]
    if mode == "mean":
        sums = sums / bags.sizes(rows.dtype).clamp(min=1).unsqueeze(-1)
    return sums.to(weight.dtype), None


def _maxima(bags: _Bags, weight: Tensor) -> tuple[Tensor, Tensor]:
    rows = weight.detach().index_select(0, bags.indices)
    n, width = bags.indices.shape[0], weight.shape[1]
    into = bags.bag.unsqueeze(-1).expand(n, width)
    low = rows.new_full((bags.num_bags + 1, width), float("-inf"))
    maxima = low.scatter_reduce(0, into, rows, "amax")
    attains = (rows == maxima.index_select(0, bags.bag)) | rows.isnan()
    place = torch.arange(n, device=rows.device).unsqueeze(-1)
    # n, a place after the last, remains for a bag without entries
    last = torch.full((bags.num_bags + 1, width), n, device=rows.device)
    first = last.scatter_reduce(0, into, torch.where(attains, place, n), "amin")[: bags.num_bags]
    empty = first == n
    row = bags.indices.long()[first.clamp(max=n - 1)]
    return torch.where(empty, 0.0, weight.gather(0, row)), torch.where(empty, 0, row)


def _make_bags(input: Tensor, offsets: Tensor, ends: bool, padding: int | None) -> _Bags:
    count = offsets.shape[0] - 1 if ends else offsets.shape[0]
    if count < 0:
        raise TorchValueError(
            "offsets: expected at least one under include_last_offset, got none; the last is the end."
        )
    place = torch.arange(input.shape[0], dtype=offsets.dtype, device=input.device)
    bag = torch.searchsorted(offsets.contiguous(), place, right=True) - 1
    if not count:
        bag = torch.zeros_like(bag)
    if padding is not None:
        # into the extra bag after the last, which is cut off
        bag = torch.where(input == padding, count, bag)
    return _Bags(input, bag, count)


def _padding_row(padding_idx: int | None, weight: Tensor) -> int | None:
    if padding_idx is None:
        return None
    rows = weight.shape[0]
    if not -rows <= padding_idx < rows:
        raise TorchValueError(
            f"padding_idx: expected one of the {rows} rows of weight, {-rows} to {rows - 1}, got "
            f"{padding_idx}."
        )
    return padding_idx % rows


def _check_bags(input: Tensor, weight: Tensor, scale: Tensor | None, mode: str) -> None:
    validation.tensor("input", input)
    validation.tensor("weight", weight)
    validation.choice("mode", mode, _MODES)
    if scale is not None and scale.shape != input.shape:
        raise ArgumentValueError(
            f"per_sample_weights: expected the shape of input, {tuple(input.shape)}, got "
            f"{tuple(scale.shape)}; there is one for each entry."
        )
    if weight.dim() != 2:
        raise ArgumentValueError(
            f"weight: expected 2 dimensions, got {validation.describe(weight)}; it is a table of rows."
        )
    validation.torch_real("weight", weight)
    if scale is not None:
        validation.same_dtype("weight", weight, "per_sample_weights", scale)
    validation.indices("input", input, "indices, int64 or int32")
