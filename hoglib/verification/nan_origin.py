"""The operation whose derivative makes a gradient NaN."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hoglib._core import torch_internals
from hoglib._core.element_differences import TensorMap
from hoglib._core.gradient_graph import walk
from hoglib._core.source_location import innermost_line
from hoglib.verification import call as calls


def nan_operation(
    f: TensorMap, x: Sequence[Tensor], u: Sequence[Tensor], w: Sequence[Tensor] | None = None
) -> str:
    """Where the first number arises that is not finite, in the gradient of <u, f> or, with w, in that
    of <w, G>, where G is the gradient of <u, f>: the backward of a custom Function, or the derivative
    of what a line of the user's computes; "" if neither is known. An infinite number becomes NaN
    later, where it is multiplied by zero."""
    with torch_internals.record_backward_origins():
        leaves = [y.detach().clone().requires_grad_() for y in x]
        results, weights = f(*leaves), u
        if w is not None:
            results, weights = calls.grad(results, leaves, u, create_graph=True), w
    found: list[str] = []

    def watch(node: torch.autograd.graph.Node) -> None:
        def ran(results: Sequence[Tensor | None], incoming: Sequence[Tensor | None]) -> None:
            if not found and _are_finite(incoming) and not _are_finite(results):
                found.append(_where(node))

        node.register_hook(ran)

    for node, parents in walk(results):
        if parents:
            watch(node)
    calls.grad(results, leaves, weights)
    return found[0] if found else ""


def _where(node: torch.autograd.graph.Node) -> str:
    function = torch_internals.custom_function(node) if hasattr(node, "_forward_cls") else None
    if function is not None:
        return f"{function.__name__}.backward"
    line = innermost_line(torch_internals.made_at(node))
    return f"the derivative of {line}" if line else ""


def _are_finite(tensors: Sequence[Tensor | None]) -> bool:
    return all(x is None or bool(x.isfinite().all()) for x in tensors)
