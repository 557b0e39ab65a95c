"""Derivatives of a function that runs as a graph: its backward is a function that runs as a graph."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hoglib import _arguments as arguments
from hoglib import _tree
from hoglib._leaves import filled

if TYPE_CHECKING:
    from hoglib.capture.compiled import Captured, Compiled


class Pullback:
    """Gradients of a function by those of its tensors that require grad, for cotangents of its outputs.

        pullback(args, kwargs, c) = c^T J, of the arguments and then of the tensors that fn reaches

    Differentiable where grad mode is on.
    """

    def __init__(self, compiled: "Compiled", entry: "Captured") -> None:
        self.fn = compiled.fn
        self._entry = entry

    def __call__(self, args: Any, kwargs: Any, cotangents: list[Tensor | None]) -> list[Tensor]:
        create_graph = torch.is_grad_enabled()
        reached = self._entry.lifted(self.fn) or []
        wanted = [x for x in (*_tree.leaves((args, kwargs)), *reached) if _requires_grad(x)]
        with torch.enable_grad():
            outputs = [x for x in _tree.leaves(self.fn(*args, **kwargs)) if isinstance(x, Tensor)]
            recorded = [x for x in outputs if x.requires_grad]
            pairs = [(x, g) for x, g in zip(recorded, cotangents, strict=True) if g is not None]
            grads = torch.autograd.grad(
                [x for x, _ in pairs], wanted, [g for _, g in pairs], create_graph=create_graph,
                allow_unused=True,
            )  # fmt: skip
        return filled(list(grads), wanted)


class Graph(torch.autograd.Function):
    """A graph as one node; its backward is the graph of a pullback, and so to any order."""

    @staticmethod
    def forward(
        ctx: Any, compiled: "Compiled", entry: "Captured", leaves: list[Any], structure: Any,
        lifted: list[Tensor], *tensors: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        outputs = entry.execute(list(tensors))
        ctx.save_for_backward(*tensors)
        ctx.compiled, ctx.entry, ctx.structure, ctx.lifted = compiled, entry, structure, lifted
        ctx.others = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        ctx.is_tensor = [isinstance(leaf, Tensor) for leaf in leaves]
        ctx.set_materialize_grads(False)
        recorded = entry.traced.recorded
        ctx.mark_non_differentiable(
            *[x for x, has in zip(outputs, recorded, strict=True) if not has]
        )
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        tensors, entry = ctx.saved_tensors, ctx.entry  # raises if one was changed in place
        now = entry.lifted(ctx.compiled.fn)
        if now is None or any(a is not b for a, b in zip(now, ctx.lifted, strict=True)):
            raise arguments.NoSecondDerivative(
                f"{ctx.compiled.name}: expected backward while the function's parameters and modules "
                "are those of the call, got others (a new tensor in a parameter's place, or another "
                "mode). Call backward before they change."
            )
        left = iter(tensors)
        filled_in = [
            next(left) if is_tensor else other
            for is_tensor, other in zip(ctx.is_tensor, ctx.others, strict=True)
        ]
        args, kwargs = _tree.unflatten(filled_in, ctx.structure)
        recorded = [g for g, has in zip(cotangents, entry.traced.recorded, strict=True) if has]
        grads = iter(entry.pullback(ctx.compiled)(args, kwargs, recorded))
        wanted = [
            next(grads) if _requires_grad(x) else None
            for x in (*tensors[: -len(now) or None], *now)
        ]
        return (None,) * 5 + tuple(wanted)


def _requires_grad(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad
