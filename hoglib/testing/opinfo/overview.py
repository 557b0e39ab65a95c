"""What each op of the catalogue offers, found by trying it: the table of `hoglib ops`."""

from collections.abc import Callable
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hoglib._core import pytree
from hoglib._core.tolerances import TOLERANCES
from hoglib.testing.opinfo.catalogue import CATALOGUE
from hoglib.testing.opinfo.entry import Op, Sample

HEAD = ("op", "theme", "y =", "orders", "forward mode", "vmap", "compile", "dtypes", "row")
ORDERS = 3


class Row(NamedTuple):
    """An op's line of the table; `right` is whether everything that it offers agreed."""

    cells: tuple[str, ...]
    right: bool


def row(op: Op) -> Row:
    """Try an op on its first sample, in float64, against its reference of plain torch operations."""
    case = op.samples[0]
    inputs = case.make(torch.float64, torch.Generator().manual_seed(0))
    orders = _orders(op, case, inputs)
    wanted = op.orders if op.orders is not None else ORDERS
    forward = _agree(op, case, inputs, _tangents)
    vmap = _agree(op, case, inputs, _batched)
    right = orders >= wanted and forward and vmap
    reach = "any" if op.orders is None else str(op.orders)
    cells = (
        op.name,
        op.theme,
        op.formula,
        (reach if orders >= wanted else f"{orders} of {reach}")
        + ("" if op.smooth else ", off kinks"),
        "yes" if forward else "WRONG",
        "yes" if vmap else "WRONG",
        "no" if "compile" in op.skips else "yes",
        ", ".join(str(dtype).removeprefix("torch.") for dtype in op.dtypes),
        "ok" if right else "WRONG",
    )
    return Row(cells, right)


def rows() -> list[Row]:
    return [row(op) for op in CATALOGUE]


def text(table: list[Row]) -> str:
    """The table in aligned columns, for a terminal or a log."""
    lines = [HEAD, *(line.cells for line in table)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEAD))]
    ruled = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
    return "\n".join([ruled[0], "-" * len(ruled[0]), *ruled[1:]])


def markdown(table: list[Row]) -> str:
    """The table for a page of the docs."""
    escape = [[cell.replace("|", r"\|") for cell in line.cells] for line in table]
    lines = [list(HEAD), ["---"] * len(HEAD), *escape]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _floating(values: Any) -> list[Tensor]:
    return [v for v in pytree.leaves(values) if isinstance(v, Tensor) and v.is_floating_point()]


def _weights(tensor: Tensor) -> Tensor:
    return torch.cos(torch.arange(tensor.numel(), dtype=tensor.dtype)).reshape(tensor.shape)


def _orders(op: Op, case: Sample, inputs: tuple[Any, ...]) -> int:
    """The highest order, up to ORDERS, whose derivatives agree with the reference's."""
    chains = []
    for function in (op.function, op.reference):
        leaves = [
            v.clone().requires_grad_() if isinstance(v, Tensor) and v.is_floating_point() else v
            for v in inputs
        ]
        outputs = _floating(function(*leaves, **case.options))
        own = _floating(leaves)
        # squares, so that an op that is linear has a second derivative here too
        total = pytree.sum_scalars([(_weights(y) * y + y * y / 2).sum() for y in outputs])
        chain = []
        for _ in range(op.orders or ORDERS):
            if not total.requires_grad:
                break
            grads = torch.autograd.grad(
                total, own, create_graph=True, allow_unused=True, materialize_grads=True
            )
            chain.append(grads)
            total = pytree.sum_scalars([(_weights(g) * g).sum() for g in grads])
        chains.append(chain)
    # Where a graph ends, every higher derivative is zero.
    for reached, (a, b) in enumerate(zip_longest(*chains)):
        zeros = [torch.zeros((), dtype=torch.float64)] * len(a or b)
        if not _close(a or zeros, b or zeros):
            return reached
    return ORDERS


def _agree(op: Op, case: Sample, inputs: tuple[Any, ...], how: Callable[..., Any]) -> bool:
    ours, theirs = (how(f, case, inputs) for f in (op.function, op.reference))
    return _close(_floating(ours), _floating(theirs))


def _tangents(function: Callable[..., Any], case: Sample, inputs: tuple[Any, ...]) -> Any:
    tensors = _floating(inputs)

    def call(*given: Tensor) -> Any:
        return _floating(_with(function, case, inputs, given))

    return torch.func.jvp(call, tuple(tensors), tuple(_weights(t) for t in tensors))[1]


def _batched(function: Callable[..., Any], case: Sample, inputs: tuple[Any, ...]) -> Any:
    stacks = [torch.stack([t, t * 0.5]) for t in _floating(inputs)]
    return torch.func.vmap(lambda *given: _floating(_with(function, case, inputs, given)))(*stacks)


def _with(
    function: Callable[..., Any], case: Sample, inputs: tuple[Any, ...], given: tuple[Tensor, ...]
) -> Any:
    """The op with these in the place of its floating-point inputs."""
    rest = iter(given)
    filled = [next(rest) if isinstance(v, Tensor) and v.is_floating_point() else v for v in inputs]
    return function(*filled, **case.options)


def _close(ours: Any, theirs: Any) -> bool:
    tolerance = TOLERANCES[torch.float64]._asdict()
    pairs = list(zip(ours, theirs, strict=True))
    return all(torch.allclose(a, b, equal_nan=True, **tolerance) for a, b in pairs)
