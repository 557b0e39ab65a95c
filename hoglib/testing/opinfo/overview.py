"""What each op of the catalogue supports, found by running it: the table of `hoglib ops`."""

from collections.abc import Callable
from importlib.util import find_spec
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hoglib._core import pytree
from hoglib._core.tolerances import TOLERANCES
from hoglib.testing.opinfo.catalogue import CATALOGUE
from hoglib.testing.opinfo.op_info import OpInfo, SampleInput

HEAD = ("op", "theme", "y =", "orders", "forward mode", "vmap", "compile", "dtypes", "row")
ORDERS = 3


class Row(NamedTuple):
    """An op's line of the table; `right` is whether every derivative agreed with the reference's."""

    cells: tuple[str, ...]
    right: bool


def rows() -> list[Row]:
    """The table, found by running every op but those of `left_out`."""
    without = left_out()
    return [row(info) for info in CATALOGUE if info.name not in without]


def left_out() -> list[str]:
    """The ops that call NumPy, where it is not installed: torch does not need it."""
    if find_spec("numpy") is not None:
        return []
    return [info.name for info in CATALOGUE if "by NumPy" in info.formula]


def row(info: OpInfo) -> Row:
    """Run an op on its first sample, in float64, and compare it with its reference."""
    sample = info.samples[0]
    inputs = sample.make(torch.float64, torch.Generator().manual_seed(0))
    orders = _agreeing_orders(info, sample, inputs)
    expected = info.max_order if info.max_order is not None else ORDERS
    forward = _agrees(info, sample, inputs, _tangents)
    vmap = _agrees(info, sample, inputs, _batched)
    right = orders >= expected and forward and vmap
    limit = "any" if info.max_order is None else str(info.max_order)
    cells = (
        info.name,
        info.theme,
        info.formula,
        (limit if orders >= expected else f"{orders} of {limit}")
        + ("" if info.smooth else ", piecewise"),
        "yes" if forward else "WRONG",
        "yes" if vmap else "WRONG",
        "no" if "compile" in info.skips else "yes",
        ", ".join(str(dtype).removeprefix("torch.") for dtype in info.dtypes),
        "ok" if right else "WRONG",
    )
    return Row(cells, right)


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


def _agreeing_orders(info: OpInfo, sample: SampleInput, inputs: tuple[Any, ...]) -> int:
    """The highest order, up to ORDERS, whose derivatives agree with the reference's."""
    chains = []
    for function in (info.op, info.ref):
        leaves = [v.clone().requires_grad_() if _is_floating(v) else v for v in inputs]
        outputs = _floating(function(*leaves, **sample.kwargs))
        own = _floating(leaves)
        # squares, so that an op that is linear has a second derivative here too
        total = pytree.sum_scalars([(_weights(y) * y + y * y / 2).sum() for y in outputs])
        chain = []
        for _ in range(info.max_order or ORDERS):
            if not total.requires_grad:
                break
            grads = torch.autograd.grad(
                total, own, create_graph=True, allow_unused=True, materialize_grads=True
            )
            chain.append(grads)
            total = pytree.sum_scalars([(_weights(g) * g).sum() for g in grads])
        chains.append(chain)
    # Where a graph ends, every higher derivative is zero.
    for order, (a, b) in enumerate(zip_longest(*chains)):
        zeros = [torch.zeros((), dtype=torch.float64)] * len(a or b)
        if not _close(a or zeros, b or zeros):
            return order
    return ORDERS


def _agrees(
    info: OpInfo, sample: SampleInput, inputs: tuple[Any, ...], transform: Callable[..., Any]
) -> bool:
    ours, theirs = (transform(f, sample, inputs) for f in (info.op, info.ref))
    return _close(_floating(ours), _floating(theirs))


def _tangents(function: Callable[..., Any], sample: SampleInput, inputs: tuple[Any, ...]) -> Any:
    tensors = _floating(inputs)

    def call(*given: Tensor) -> Any:
        return _floating(_call_with(function, sample, inputs, given))

    return torch.func.jvp(call, tuple(tensors), tuple(_weights(t) for t in tensors))[1]


def _batched(function: Callable[..., Any], sample: SampleInput, inputs: tuple[Any, ...]) -> Any:
    stacks = [torch.stack([t, t * 0.5]) for t in _floating(inputs)]

    def call(*given: Tensor) -> Any:
        return _floating(_call_with(function, sample, inputs, given))

    return torch.func.vmap(call)(*stacks)


def _call_with(
    function: Callable[..., Any],
    sample: SampleInput,
    inputs: tuple[Any, ...],
    given: tuple[Tensor, ...],
) -> Any:
    """The op with these in the place of its floating-point inputs."""
    rest = iter(given)
    return function(*[next(rest) if _is_floating(v) else v for v in inputs], **sample.kwargs)


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _floating(values: Any) -> list[Tensor]:
    return [value for value in pytree.leaves(values) if _is_floating(value)]


def _weights(tensor: Tensor) -> Tensor:
    return torch.cos(torch.arange(tensor.numel(), dtype=tensor.dtype)).reshape(tensor.shape)


def _close(ours: Any, theirs: Any) -> bool:
    tolerance = TOLERANCES[torch.float64]._asdict()
    pairs = list(zip(ours, theirs, strict=True))
    return all(torch.allclose(a, b, equal_nan=True, **tolerance) for a, b in pairs)
