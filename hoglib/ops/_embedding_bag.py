"""Reductions of rows of a table: embedding_bag, to any order and in forward mode.

torch's own has neither a second derivative nor a forward mode. Here the rows are selected by index
and added up bag by bag.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hoglib._core import validation
from hoglib._core.mixed_precision import upcast_half
from hoglib.errors import ArgumentValueError, UnsupportedError
from hoglib.ops._stand_in import (
    NO_DOUBLE_BACKWARD,
    TorchValueError,
    check_dtype,
    check_indices,
    check_real,
    stands_in_for,
)

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

    torch's own has neither a second derivative nor a forward mode. A bag without entries, or with none
    but padding_idx, gives 0. Of equal maxima the first in its bag has the derivative. Half precision is
    summed in float32. Differentiable to any order by W and s, in every mode, under vmap.

    Args:
        input: The indices of rows, int64 or int32.
        weight: W, the table.
        offsets: The position in input where each bag begins, for a flat input. Default: none.
        max_norm: The rows that are used are scaled down to this norm in weight itself, in place, as
            torch does. Default: none.
        norm_type: The norm that max_norm is of. Default: 2.
        scale_grad_by_freq: Refused: such a gradient cannot be differentiated. Default: False.
        mode: "sum", "mean" or "max". Default: "mean".
        sparse: Refused: such a gradient cannot be differentiated. Default: False.
        per_sample_weights: s, for mode "sum". Default: 1.
        include_last_offset: Whether offsets ends with the end of the last bag. Default: False.
        padding_idx: The row that does not count. Default: none.
    Returns:
        y.
    Raises:
        ValueError: for an unknown mode, and for shapes that do not fit.
        RuntimeError: for dtypes and a padding_idx that torch refuses.
        NotImplementedError: for sparse, scale_grad_by_freq, and weights with another mode than "sum".
        IndexError: for an index that is no row.
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
    _check(input, weight, per_sample_weights, mode)
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
    bags = _bags(input, offsets, include_last_offset, padding)
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
    """With the signature of `torch.embedding_bag`, and what it returns beside the bags."""
    name = _MODES[mode]
    y = embedding_bag(
        indices, weight, offsets, None, 2.0, scale_grad_by_freq, name, sparse, per_sample_weights,
        include_last_offset, padding_idx,
    )  # fmt: skip
    bags = _bags(indices, offsets, include_last_offset, _padding_row(padding_idx, weight))
    sizes = bags.sizes(torch.float64).to(indices.dtype)
    rows = _reduce_bags(bags, weight.detach(), name, None)[1] if name == "max" else sizes
    rows = y.new_zeros(y.shape).long() if rows is None else rows
    return y, bags.bag.to(indices.dtype), sizes, rows


class _Bags(NamedTuple):
    """The bag of each index; those that do not count go into a bag after the last."""

    indices: Tensor  # (n,)
    bag: Tensor  # (n,)
    num_bags: int

    def sizes(self, dtype: torch.dtype) -> Tensor:
        ones = torch.ones(self.bag.shape, dtype=dtype, device=self.bag.device)
        return ones.new_zeros(self.num_bags + 1).index_add(0, self.bag, ones)[: self.num_bags]


def _reduce_bags(
    bags: _Bags, weight: Tensor, mode: str, scale: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Bags of any length; for maxima also the row of weight that each is from."""
    if mode == "max":
        if bags.indices.shape[0]:
            return _maxima(bags, weight)
        return _empty_bags(weight, bags.num_bags), None
    rows = upcast_half(_select_rows(bags.indices, weight))
    if scale is not None:
        rows = rows * scale.unsqueeze(-1)
    sums = rows.new_zeros(bags.num_bags + 1, rows.shape[1]).index_add(0, bags.bag, rows)
    sums = sums[: bags.num_bags]
    if mode == "mean":
        sums = sums / bags.sizes(rows.dtype).clamp(min=1).unsqueeze(-1)
    return sums.to(weight.dtype), None


def _maxima(bags: _Bags, weight: Tensor) -> tuple[Tensor, Tensor]:
    rows = _select_rows(bags.indices, weight.detach())
    n, width = bags.indices.shape[0], weight.shape[1]
    into = bags.bag.unsqueeze(-1).expand(n, width)
    low = torch.full(
        (bags.num_bags + 1, width), float("-inf"), dtype=rows.dtype, device=rows.device
    )
    maxima = low.scatter_reduce(0, into, rows, "amax")
    attains = (rows == maxima.index_select(0, bags.bag)) | rows.isnan()
    place = torch.arange(n, device=rows.device).unsqueeze(-1)
    last = torch.full((bags.num_bags + 1, width), n, device=rows.device)
    first = last.scatter_reduce(0, into, torch.where(attains, place, n), "amin")[: bags.num_bags]
    empty = first == n
    row = bags.indices.long()[first.clamp(max=n - 1)]
    return torch.where(empty, 0.0, weight.gather(0, row)), torch.where(empty, 0, row)


def _select_rows(input: Tensor, weight: Tensor) -> Tensor:
    """By index_select: the double backward of `embedding` fails where there are no indices."""
    taken = weight.index_select(0, input.reshape(-1))
    return taken.reshape(*input.shape, weight.shape[1])


def _empty_bags(weight: Tensor, count: int) -> Tensor:
    """Zeros that depend on weight, with derivative 0."""
    return weight[:0].sum(0).expand(count, -1)


def _bags(input: Tensor, offsets: Tensor, ends: bool, padding: int | None) -> _Bags:
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


def _check(input: Tensor, weight: Tensor, scale: Tensor | None, mode: str) -> None:
    validation.tensor("input", input)
    validation.tensor("weight", weight)
    validation.one_of("mode", mode, _MODES)
    if scale is not None and scale.shape != input.shape:
        raise ArgumentValueError(
            f"per_sample_weights: expected the shape of input, {tuple(input.shape)}, got "
            f"{tuple(scale.shape)}; there is one for each entry."
        )
    if weight.dim() != 2:
        raise ArgumentValueError(
            f"weight: expected 2 dimensions, got {validation.describe(weight)}; it is a table of rows."
        )
    check_real("weight", weight)
    if scale is not None:
        check_dtype("weight", weight, "per_sample_weights", scale)
    check_indices("input", input, "indices, int64 or int32")
