"""Jacobians of a function of real tensors: by central differences, in reverse and in forward mode.

A map takes real tensors and gives a list of real tensors. Its Jacobian is a table of matrices,

    blocks[i][j] = d outputs[i] / d inputs[j],    [outputs[i].numel(), inputs[j].numel()]

The gradient of a map is a map again, and so is its tangent: a second derivative is a Jacobian of one
of them, and is had by the same three functions as a first one. Everything is a loop over
`torch.autograd`, because the transforms of torch.func are wrong through some of torch's own layers.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

Map = Callable[..., list[Tensor]]
Blocks = list[list[Tensor]]

STEP = 1e-6  # of central differences
RESOLUTION = torch.finfo(torch.float64).eps / STEP  # what they see of values around 1


def central(function: Map, inputs: Sequence[Tensor], step: float) -> Blocks:
    """(f(x + h) - f(x - h)) / 2h along each element, with h = step max(1, |x|)."""
    columns: list[list[Tensor]] = []
    for j, x in enumerate(inputs):
        column: list[list[Tensor]] = []
        for k in range(x.numel()):
            h = step * max(1.0, abs(x.reshape(-1)[k].item()))
            ends = [_shifted(x, k, sign * h) for sign in (1, -1)]
            width = (ends[0] - ends[1]).sum()  # what is left of 2h after rounding
            values = [function(*inputs[:j], end, *inputs[j + 1 :]) for end in ends]
            column.append(
                [((a - b) / width).detach().reshape(-1) for a, b in zip(*values, strict=True)]
            )
        columns.append([torch.stack(parts, dim=1) for parts in zip(*column, strict=True)])
    return [list(row) for row in zip(*columns, strict=True)]


def reverse(
    function: Map,
    inputs: Sequence[Tensor],
    wanted: Sequence[int] | None = None,
    *,
    batched: bool = False,
) -> Blocks:
    """One backward pass a row, or all rows of an output at once by vmap.

    Only the wanted inputs require grad, and only they have a column.
    """
    wanted = range(len(inputs)) if wanted is None else wanted
    leaves = [x.detach().clone().requires_grad_(j in wanted) for j, x in enumerate(inputs)]
    by = [leaves[j] for j in wanted]

    def rows(y: Tensor) -> list[Tensor]:
        if not (y.requires_grad and y.numel()):
            return [y.new_zeros(y.numel(), x.numel()) for x in by]
        basis = torch.eye(y.numel(), dtype=y.dtype, device=y.device).reshape(-1, *y.shape)
        if batched:
            grads = torch.autograd.grad(
                y, by, basis, retain_graph=True, allow_unused=True, is_grads_batched=True
            )
            parts = [
                y.new_zeros(y.numel(), x.numel()) if g is None else g
                for g, x in zip(grads, by, strict=True)
            ]
        else:
            passes = [
                torch.autograd.grad(y, by, one, retain_graph=True, materialize_grads=True)
                for one in basis
            ]
            parts = [torch.stack(grads) for grads in zip(*passes, strict=True)]
        return [part.detach().reshape(y.numel(), -1) for part in parts]

    return [rows(y) for y in function(*leaves)]


def forward(function: Map, inputs: Sequence[Tensor]) -> Blocks:
    """One forward-mode pass a column."""
    columns: list[list[Tensor]] = []
    for j, x in enumerate(inputs):
        column: list[list[Tensor]] = []
        for k in range(x.numel()):
            with forward_ad.dual_level():
                dual = forward_ad.make_dual(x, _shifted(torch.zeros_like(x), k, 1.0))
                outputs = function(*inputs[:j], dual, *inputs[j + 1 :])
                column.append([_tangent(y).detach().reshape(-1) for y in outputs])
        columns.append([torch.stack(parts, dim=1) for parts in zip(*column, strict=True)])
    return [list(row) for row in zip(*columns, strict=True)]


def gradient(function: Map, count: int, wanted: Sequence[int] | None = None) -> Map:
    """(x, u) -> J(x)^T u, the gradient by the wanted of the first `count` arguments."""
    wanted = range(count) if wanted is None else wanted

    def map_(*given: Tensor) -> list[Tensor]:
        inputs = [
            x.view_as(x).requires_grad_() if j in wanted and not x.requires_grad else x
            for j, x in enumerate(given[:count])
        ]
        by = [inputs[j] for j in wanted]
        pairs = zip(function(*inputs), given[count:], strict=True)
        outputs = [(y, u) for y, u in pairs if y.requires_grad]
        if not outputs:
            return [torch.zeros_like(x) for x in by]
        return list(
            torch.autograd.grad(
                [y for y, _ in outputs], by, [u for _, u in outputs], create_graph=True,
                materialize_grads=True,
            )
        )  # fmt: skip

    return map_


def tangent(function: Map, count: int) -> Map:
    """(x, t) -> J(x) t, in forward mode."""

    def map_(*given: Tensor) -> list[Tensor]:
        with forward_ad.dual_level():
            pairs = zip(given[:count], given[count:], strict=True)
            return [_tangent(y) for y in function(*[forward_ad.make_dual(x, t) for x, t in pairs])]

    return map_


def _tangent(y: Tensor) -> Tensor:
    found = forward_ad.unpack_dual(y).tangent
    return torch.zeros_like(y) if found is None else torch.zeros_like(y) + found


def _shifted(x: Tensor, k: int, by: float) -> Tensor:
    """A contiguous copy of x with `by` added to its k-th element."""
    copy = x.detach().clone(memory_format=torch.contiguous_format)
    copy.view(-1)[k] += by
    return copy


class Expected(NamedTuple):
    """Right blocks; `rows` and `columns` say in words what they are derivatives of, and by what."""

    blocks: Blocks
    rows: Sequence[str]
    columns: Sequence[str]
    floor: float  # what rounding alone makes of a zero
    again: Callable[[], Blocks] | None = None  # another estimate, for the error of the first

    def only(self, rows: Sequence[int], columns: Sequence[int]) -> "Expected":
        def pick(blocks: Blocks) -> Blocks:
            return [[blocks[i][j] for j in columns] for i in rows]

        again = self.again
        return Expected(
            pick(self.blocks),
            [self.rows[i] for i in rows],
            [self.columns[j] for j in columns],
            self.floor,
            None if again is None else lambda: pick(again()),
        )


def furthest(a: Tensor, i: int, j: int, expected: Expected, atol: float, rtol: float) -> int | None:
    """The element of a that is furthest from expected.blocks[i][j], if it is too far."""
    b = expected.blocks[i][j]
    bound = expected.floor + rtol * b.abs() + atol * min(1.0, _largest([b]))
    error = (a - b).abs()
    if expected.again is not None and bool((error > bound).any()):
        # a wrong derivative stays as wrong at a larger step; the noise of differences does not
        bound = bound + min(atol, 4 * _largest([b - expected.again()[i][j]]))
    wrong = ~((error <= bound) | (a == b))
    if not wrong.any():
        return None
    return int(torch.where(wrong, error.nan_to_num(torch.inf), -1).argmax())


def differences(
    f: Map, x: list[Tensor], rows: Sequence[str], columns: Sequence[str], floor: float
) -> Expected:
    again = cache(lambda: central(f, x, 10 * STEP))
    return Expected(central(f, x, STEP), rows, columns, floor, again)


def magnitude(values: Sequence[Tensor], x: Sequence[Tensor]) -> float:
    """The size of the numbers that were rounded: outputs, which may have cancelled, and inputs."""
    return max(_largest(values), 1e-3 * _largest(x))


def _largest(tensors: Sequence[Tensor]) -> float:
    return max((t.detach().abs().max().item() for t in tensors if t.numel()), default=0.0)
