"""Derivatives of a function that runs as a graph: its backward is a function that runs as a graph."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hoglib import _arguments as arguments
from hoglib import _tree
from hoglib._functorch import no_autocast
from hoglib._leaves import filled
from hoglib.capture._graphs import Captured
from hoglib.capture._signature import Form
from hoglib.capture._trace import without_hooks

if TYPE_CHECKING:
    from hoglib.capture.compiled import Compiled


class Pullback:
    """Gradients of a function by those of its tensors that require grad, for cotangents of its outputs.

        pullback(args, kwargs, c) = c^T J, of the arguments and then of the tensors that fn reaches

    Differentiable where grad mode is on.
    """

    apart = True  # an argument's gradient has no part of what another one was computed from

    def __init__(self, fn: Any, entry: Captured, others: list[Any]) -> None:
        self.fn = fn
        self._entry = entry
        self._others = others

    def __call__(self, args: Any, kwargs: Any, cotangents: list[Tensor | None]) -> list[Tensor]:
        create_graph = torch.is_grad_enabled()
        given = [x for x in _tree.leaves((args, kwargs)) if isinstance(x, Tensor)]
        wanted = differentiated(given, self._entry.reached.now((self.fn, self._others)) or [])
        with torch.enable_grad():
            outputs = [x for x in _tree.leaves(self.fn(*args, **kwargs)) if isinstance(x, Tensor)]
            recorded = [x for x in outputs if x.requires_grad]
            pairs = [(x, g) for x, g in zip(recorded, cotangents, strict=True) if g is not None]
            with without_hooks(wanted), no_autocast():  # as a backward outside of its region
                grads = torch.autograd.grad(
                    [x for x, _ in pairs], wanted, [g for _, g in pairs],
                    create_graph=create_graph, allow_unused=True,
                )  # fmt: skip
        return filled(list(grads), wanted)


class Graph(torch.autograd.Function):
    """A graph as one node; its backward is the graph of a pullback, and so to any order."""

    @staticmethod
    def forward(
        ctx: Any, compiled: "Compiled", entry: Captured, form: Form, count: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        given, lifted = list(tensors[:count]), list(tensors[count:])
        outputs = entry.execute(entry.inputs(given, lifted))
        ctx.save_for_backward(*tensors)
        ctx.compiled, ctx.entry, ctx.form, ctx.count, ctx.lifted = (
            compiled,
            entry,
            form,
            count,
            lifted,
        )
        ctx.set_materialize_grads(False)
        recorded = entry.recorded
        ctx.mark_non_differentiable(
            *[x for x, has in zip(outputs, recorded, strict=True) if not has]
        )
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        entry, form, lifted = ctx.entry, ctx.form, ctx.lifted
        saved = ctx.saved_tensors[: ctx.count]  # raises if one was changed in place
        needed = ctx.needs_input_grad[4:]
        given = [
            x if x.requires_grad is has else x.detach().requires_grad_(has)  # kept by hooks
            for x, has in zip(saved, needed, strict=False)
        ]
        check_unchanged(ctx.compiled, entry, form, given, lifted)
        args, kwargs = form.filled(given)
        recorded = [g for g, has in zip(cotangents, entry.recorded, strict=True) if has]
        with form.again():
            grads = ctx.compiled.pullback(entry, form)(args, kwargs, recorded)
        of = dict(zip(map(id, differentiated(given, lifted)), grads, strict=True))
        return (None,) * 4 + tuple(of.pop(id(x), None) for x in (*given, *lifted))


def differentiated(given: list[Tensor], lifted: list[Tensor]) -> list[Tensor]:
    """The tensors that require grad, each once."""
    return list({id(x): x for x in (*given, *lifted) if x.requires_grad}.values())


def check_unchanged(
    compiled: "Compiled", entry: Captured, form: Form, given: list[Tensor], lifted: list[Tensor]
) -> None:
    """Raises NoSecondDerivative where the function reaches other tensors or modules than at a call."""
    now = entry.found(compiled.fn, form, given)
    if now is None or any(a is not b for a, b in zip(now, lifted, strict=True)):
        raise arguments.NoSecondDerivative(
            f"{compiled.name}: expected backward while the function's parameters, modules and numbers "
            "are those of the call, got others (a new tensor in a parameter's place, another mode, "
            "another value of an attribute). Call backward before they change."
        )
