"""A Function whose backward adds to the .grad of tensors that it reaches without being given them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hoglib._core.closures import STATE, ClosureWalker
from hoglib._core.state import put_back, same
from hoglib._core.torch_internals import backward_rule
from hoglib.verification import function_rules
from hoglib.verification.report import Row
from hoglib.verification.subject import Application, as_function

ACCUMULATES = (
    "backward accumulates into .grad of {}, which no derivative with a graph passes through: a second "
    "derivative by it is lost, and by all that depends on it. Pass these tensors to `apply`, and "
    "return their gradients."
)


def accumulates(app: Application) -> list[Row]:
    """Whether backward changes the .grad of a tensor. That of each is restored."""
    name = "in-place: .grad"
    run = app.seeded()
    with preserved_grads(app.function, *app.args) as changed:
        with torch.enable_grad():
            function_rules.backward(app.function, run.record, run.incoming())
        found = changed()
    if not found:
        return [Row(name, "pass")]
    return [Row(name, "fail", None, ACCUMULATES.format(", ".join(found[:3])))]


@contextmanager
def preserved_grads(fn: Any, *held: Any) -> Iterator[Callable[[], list[str]]]:
    """Restores the .grad of the leaves that a function reaches besides its arguments. Yields a function
    that describes those whose .grad was changed."""
    function = as_function(fn)
    rules: Any = fn
    if function is not None:
        rules = (function.forward, backward_rule(function), function.setup_context)
    walk = ClosureWalker((rules, [x for x in held if not isinstance(x, Tensor)]), STATE)
    reached = [walk.objects[i] for i in walk.found]
    named: dict[int, tuple[str, Tensor]] = {
        id(p): (f"the parameter {name} of a {type(m).__name__}", p)
        for m in reached
        if isinstance(m, nn.Module)
        for name, p in m.named_parameters()
        if not is_lazy(p)
    }
    for x in reached:
        if isinstance(x, Tensor) and x.is_leaf and x.requires_grad and not is_lazy(x):
            named.setdefault(id(x), (f"a tensor of shape {tuple(x.shape)}", x))
    before = {
        key: (x.grad, None if x.grad is None else x.grad.detach().clone())
        for key, (_, x) in named.items()
    }

    def is_changed(key: int) -> bool:
        grad, value = before[key]
        now = named[key][1].grad
        if now is not grad:
            return True
        return now is not None and value is not None and not same(now.detach(), value)

    try:
        yield lambda: [label for key, (label, _) in named.items() if is_changed(key)]
    finally:
        for key, (_, x) in named.items():
            if is_changed(key):
                grad, value = before[key]
                x.grad = grad
                if grad is not None and value is not None:
                    put_back(grad, value)
