"""Whether a graph computes what the function does: at the values of the first call, and at others."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from hoglib import _arguments as arguments
from hoglib import _tree
from hoglib._random_state import random_state, set_random_state
from hoglib.capture._graphs import Captured
from hoglib.capture._nodes import VIEWS
from hoglib.capture._trace import alike

# Of the norm of an output. The order of sums is another one in compiled code, and what a kink or a
# cancellation makes of that in float32 is more than rounding; what is traced in is off by far more.
OFF = {torch.float64: 1e-8, torch.complex128: 1e-8, torch.float32: 2e-3, torch.complex64: 2e-3}
COARSE = 5e-2  # half precision
# of all outputs: a gradient that cancels out, as of a last bias, is nothing but rounding
ROUNDING = 1e-4
# How far off operations are, in units of rounding, and how many times as far results may be.
ROUNDINGS, AMPLIFIED = 2, 10


def equal(
    what: str,
    function: Callable[..., Any],
    tensors: list[Tensor],
    lifted: list[Tensor],
    entry: Captured,
    graph: fx.GraphModule,
    *,
    apart: bool,
) -> None:
    """Raises RuntimeError where the graph's outputs differ from the function's. Random generators are
    left in another state.

    At other values first: what modules keep of the last run is then of the values that were given. At
    those, the tensors are the given ones with their graphs, by which the function may differentiate;
    apart: it differentiates by each argument as if it was computed from none of the others.
    graph: the operations, not compiled.
    """
    others = _others(tensors)
    own = [x.clone() if x.is_inference() else alike(x) if apart else x for x in tensors]
    for i, _ in entry.shared:  # which are also reached otherwise, as they are
        others[i] = own[i] = tensors[i]
    for which, given in ((" for other values than those it was captured with", others), ("", own)):
        try:
            state = random_state()
            expected = [x.detach() for x in _tensors(function(*given))]
        except Exception:
            if which:  # a function need not take any value
                continue
            raise
        set_random_state(state)
        inputs = entry.inputs([x.detach() for x in given], lifted)
        found = entry.execute(inputs)
        off = _off(expected, found)
        if off and entry.run != graph.forward:
            off = _beyond_rounding(expected, found, entry, graph, inputs, state)
        if off:
            raise arguments.NoSecondDerivative(
                f"{what}: expected a graph that computes what the function does, got {off}{which}. "
                "Something is traced in that is not a tensor of the graph (a result of NumPy, a value "
                "kept from an earlier call, random numbers of another library), or the compiler is at "
                "fault: backend='eager' tells. Make it an argument, or pass check=False if you know "
                "better."
            )


def _beyond_rounding(
    expected: list[Tensor],
    found: list[Tensor],
    entry: Captured,
    graph: fx.GraphModule,
    inputs: list[Tensor],
    state: Any,
) -> str | None:
    """How the graph is wrong, or its code is by more than it makes of rounding; None where neither is.

    Compiled code rounds otherwise, and a function may make much of that, such as an inner loop through
    normalisation: about as much as it makes of operations that are a little off each.
    """
    set_random_state(state)
    uncompiled = replace(entry, run=graph.forward).execute(inputs)
    moves = [0.0] * len(uncompiled)
    for seed in range(3):
        set_random_state(state)
        moved = replace(entry, run=_Rounding(graph, seed).run).execute(inputs)
        pairs = zip(moves, uncompiled, moved, strict=True)
        moves = [max(most, AMPLIFIED * _distance(a, b)) for most, a, b in pairs]
    return _off(expected, uncompiled) or _off(uncompiled, found, moves)


class _Rounding(fx.Interpreter):
    """Runs a graph whose operations' results are each a few roundings off."""

    def __init__(self, graph: fx.GraphModule, seed: int) -> None:
        super().__init__(graph)
        self._generator = torch.Generator().manual_seed(seed)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        result = super().call_function(target, args, kwargs)
        return result if target in VIEWS else _tree.map_tensors(self._moved, result)

    def _moved(self, x: Tensor) -> Tensor:
        if not _is_real(x):
            return x
        up = torch.randint(2, x.shape, generator=self._generator).to(x.device, torch.bool)
        off = ROUNDINGS * torch.finfo(x.dtype).eps
        return torch.where(up, x * (1 + off), x * (1 - off))


def _off(expected: list[Tensor], found: list[Tensor], moves: Sequence[float] = ()) -> str | None:
    """Which of the outputs found is not as expected, and how; None where they are."""
    scale = _size(expected)
    for i, (a, b) in enumerate(zip(expected, found, strict=True)):
        how = _compared(a, b, scale, moves[i] if moves else 0.0)
        if how:
            return f"{how} in output {i}"
    return None


def _compared(expected: Tensor, found: Tensor, scale: float, moves: float) -> str | None:
    if expected.shape != found.shape or expected.dtype is not found.dtype:
        return f"{arguments.describe(found)} for {arguments.describe(expected)}"
    if expected.is_meta:
        return None
    if not (expected.is_floating_point() or expected.is_complex()):
        return None if torch.equal(expected, found) else "other integers"
    alike = torch.equal(expected.isnan(), found.isnan())
    apart, own = _distance(expected, found), _size([torch.where(expected.isfinite(), expected, 0)])
    near = OFF.get(expected.dtype, COARSE) * max(own, ROUNDING * scale, 1e-30)
    if alike and apart <= max(near, moves):
        return None
    return f"a distance of {apart:.1e} where the size is {own:.1e}"


def _distance(a: Tensor, b: Tensor) -> float:
    """Between what is finite in both."""
    return _size([torch.where(a.isfinite() & b.isfinite(), a - b, 0)]) if _is_real(a) else 0.0


def _is_real(x: Tensor) -> bool:
    return (x.is_floating_point() or x.is_complex()) and not x.is_meta


def _tensors(output: Any) -> list[Tensor]:
    return [leaf for leaf in _tree.leaves(output) if isinstance(leaf, Tensor)]


def _others(tensors: list[Tensor]) -> list[Tensor]:
    """Other values of about the same size and sign, laid out alike: probabilities stay so."""
    generator = torch.Generator("cpu").manual_seed(0)
    found = []
    for x in tensors:
        if (x.is_floating_point() or x.is_complex()) and x.numel():
            # all of the memory that it spans, of which it may have parts more than once
            span = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
            plain = x.detach()
            if x.is_neg() or x.is_conj():
                plain = torch.empty_strided(
                    x.shape, x.stride(), dtype=x.dtype, device=x.device
                ).copy_(plain)
            memory = plain.as_strided((span,), (1,))
            factor = 1 - 0.1 * torch.rand(memory.shape, generator=generator, device="cpu")
            changed = (memory * factor.to(device=x.device)).to(x.dtype)
            found.append(changed.as_strided(x.shape, x.stride()).requires_grad_(x.requires_grad))
        else:
            found.append(x)
    return found


def _size(tensors: list[Tensor]) -> float:
    total = 0.0
    for x in tensors:
        if _is_real(x):
            total += float(torch.nan_to_num(x.detach().abs().double()).square().sum())
    return total**0.5
