"""Whether a graph computes what the function does: at the values of the first call, and at others."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hoglib import _arguments as arguments
from hoglib import _tree
from hoglib._random_state import random_state, set_random_state
from hoglib.capture._graphs import Captured
from hoglib.capture._trace import alike

# Of the norm of an output. The order of sums is another one in compiled code, and what a kink or a
# cancellation makes of that in float32 is more than rounding; what is traced in is off by far more.
OFF = {torch.float64: 1e-8, torch.complex128: 1e-8, torch.float32: 2e-3, torch.complex64: 2e-3}
COARSE = 5e-2  # half precision
# of all outputs: a gradient that cancels out, as of a last bias, is nothing but rounding
ROUNDING = 1e-4


def equal(
    what: str,
    function: Callable[..., Any],
    tensors: list[Tensor],
    lifted: list[Tensor],
    entry: Captured,
    *,
    apart: bool,
) -> None:
    """Raises RuntimeError where the graph's outputs differ from the function's. Random generators are
    left in another state.

    At other values first: what modules keep of the last run is then of the values that were given. At
    those, the tensors are the given ones with their graphs, by which the function may differentiate;
    apart: it differentiates by each argument as if it was computed from none of the others.
    """
    others = _others(tensors)
    own = [x.clone() if x.is_inference() else alike(x) if apart else x for x in tensors]
    for i, _ in entry.shared:  # which are also reached otherwise, as they are
        others[i] = own[i] = tensors[i]
    for which, given in ((" for other values than those it was captured with", others), ("", own)):
        try:
            state = random_state()
            expected = _tensors(function(*given))
        except Exception:
            if which:  # a function need not take any value
                continue
            raise
        set_random_state(state)
        found = entry.execute(entry.inputs([x.detach() for x in given], lifted))
        scale = _size(expected)
        for i, (a, b) in enumerate(zip(expected, found, strict=True)):
            _compare(what, i, a.detach(), b, scale, which)


def _compare(what: str, i: int, expected: Tensor, found: Tensor, scale: float, which: str) -> None:
    if expected.shape != found.shape or expected.dtype is not found.dtype:
        how = f"{arguments.describe(found)} for {arguments.describe(expected)}"
    elif expected.is_meta:
        return
    elif not (expected.is_floating_point() or expected.is_complex()):
        if torch.equal(expected, found):
            return
        how = "other integers"
    else:
        finite = expected.isfinite() & found.isfinite()
        alike = torch.equal(expected.isnan(), found.isnan())
        apart = _size([torch.where(finite, expected - found, 0)])
        own = _size([torch.where(finite, expected, 0)])
        if alike and apart <= OFF.get(expected.dtype, COARSE) * max(own, ROUNDING * scale, 1e-30):
            return
        how = f"a distance of {apart:.1e} where the size is {own:.1e}"
    raise arguments.NoSecondDerivative(
        f"{what}: expected a graph that computes what the function does, got {how} in output "
        f"{i}{which}. Something is traced in that is not a tensor of the graph (a result of NumPy, a "
        "value kept from an earlier call, random numbers of another library), or the compiler is at "
        "fault: backend='eager' tells. Make it an argument, or pass check=False if you know better."
    )


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
        if (x.is_floating_point() or x.is_complex()) and not x.is_meta:
            total += float(torch.nan_to_num(x.detach().abs().double()).square().sum())
    return total**0.5
