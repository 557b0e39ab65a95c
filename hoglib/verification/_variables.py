"""By what a function is differentiated, and in which dtype."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hoglib import _arguments as arguments
from hoglib import _tree
from hoglib.verification._call import Call, is_float, real
from hoglib.verification._rounding import WIDE, Watch

# What authors call tensors that a loss or a layer is not differentiated by.
CONSTANTS = (
    "target", "targets", "label", "labels", "y_true", "ground_truth", "gt", "mask", "masks", "index",
    "indices", "idx", "ids", "lengths",
)  # fmt: skip


def given_wide(inputs: Sequence[Any]) -> bool:
    """Whether any tensor came in double precision."""
    leaves = _tree.leaves(tuple(inputs))
    return any(isinstance(x, Tensor) and x.dtype in WIDE for x in leaves)


def call_of(fn: Any, inputs: Sequence[Any]) -> tuple[Call, str]:
    """The call in float64, or in its own dtypes and why; raises what it raises if neither runs."""
    call = Call(fn, inputs)
    arguments.something_to_differentiate_by(call.names, call.point)
    try:
        _try(call)
    except Exception as error:
        own = Call(fn, inputs, None)
        if all(x.dtype == torch.float64 for x in own.point):
            raise
        try:
            _try(own)
        except Exception:
            raise error from None
        return own, f"{type(error).__name__}: {error}".splitlines()[0]
    return _as_it_computes(call, fn, inputs)


def _as_it_computes(call: Call, fn: Any, inputs: Sequence[Any]) -> tuple[Call, str]:
    """The call in float32 and why, if forward converts to that and back, whatever it is given."""
    if given_wide(inputs):
        return call, ""
    watch = Watch()
    narrow = Call(fn, inputs, torch.float32)
    narrow.clone = call.clone
    try:
        with watch:
            call.leaves(*call.point)
        if "float32" not in watch.cast:
            return call, ""
        outputs = [(c.dtype, c.leaves(*c.point)) for c in (call, narrow)]
    except Exception:  # judged later
        return call, ""
    if any(y.dtype != dtype for dtype, leaves in outputs for y in leaves if is_float(y)):
        return call, ""
    return narrow, f"it computes in float32: {watch.cast}"


def _try(call: Call) -> None:
    """Run it, on copies if it changes its inputs and says so, which autograd allows for no leaf."""
    try:
        call.recorded()
    except RuntimeError as error:
        if "in-place" not in str(error):
            raise
        call.clone = True
        call.recorded()


def constants_of(call: Call, names: Sequence[str]) -> list[int]:
    """Inputs without a gradient that are called a target or a mask, or have whole numbers, not all the
    same; names are those of the arguments."""
    variables = [x.clone().requires_grad_() for x in call.point]
    try:
        found = [y for y in call.leaves(*variables) if is_float(y) and y.requires_grad]
        total = torch.stack([real(y).sum() for y in found]).sum()
        grads = torch.autograd.grad(total, variables, allow_unused=True)
    except Exception:  # judged with the derivatives
        return []
    without = [j for j, g in enumerate(grads) if g is None and j < call.num_inputs]
    constants = [j for j in without if _whole(call.point[j]) or _is_named(names, call.names[j])]
    return constants if len(constants) < len(grads) else []


def _is_named(names: Sequence[str], name: str) -> bool:
    """Whether inputs[i] is called what a constant is."""
    place = name.removeprefix("inputs[").removesuffix("]")
    return place.isdigit() and int(place) < len(names) and names[int(place)].strip("`") in CONSTANTS


def _whole(x: Tensor) -> bool:
    return bool((x == x.round()).all()) and x.numel() > 1 and bool((x != x.reshape(-1)[0]).any())


def marked(inputs: Sequence[Any], constants: Sequence[int]) -> list[Any]:
    """The inputs, where every tensor but some requires grad; leaves are counted as the call does."""
    leaves, structure = _tree.flatten(tuple(inputs))
    chosen = [
        x.detach().clone().requires_grad_(i not in constants) if is_float(x) else x
        for i, x in enumerate(leaves)
    ]
    return list(_tree.unflatten(chosen, structure))
