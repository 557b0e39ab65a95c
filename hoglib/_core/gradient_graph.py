"""When guards look at values: not while a graph is captured, whose tensors have none, and not where
what was looked at is run again to be compared with a graph.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd import Function

from hoglib._core import torch_internals
from hoglib._core.source_location import warn
from hoglib.errors import NoSecondDerivative

_OFF: ContextVar[bool] = ContextVar("hoglib_unguarded", default=False)


def value_checks_on() -> bool:
    """Whether to look."""
    return not (_OFF.get() or torch_internals.tracing())


@contextmanager
def value_checks_off() -> Iterator[None]:
    """Inside, nothing is looked at; it was before."""
    token = _OFF.set(True)
    try:
        yield
    finally:
        _OFF.reset(token)


# === The custom Functions in a graph that is to be differentiated again, and what they lose.

LOSES = (
    "which makes the second derivative through it zero, without an error. Compute in backward by "
    "differentiable torch operations from the saved inputs and outputs, without the decorator"
)


def check_custom_functions(
    values: Tensor | list[Tensor], what: str, since: Iterable[Tensor] = ()
) -> None:
    """Look at the custom Functions that values were computed by, from the tensors `since` on.

    Raises NoSecondDerivative for one whose backward is `@once_differentiable`; warns of one that keeps
    a floating-point tensor that is neither its input nor its output. Costs microseconds a node.
    """
    for node, function in user_functions(values, since):
        name = function.__qualname__
        if torch_internals.is_once_differentiable(function):
            raise NoSecondDerivative(
                f"{what}: expected Functions that can be differentiated twice, got {name}, whose "
                f"backward is @once_differentiable, {LOSES}; `hoglib.verify({name}, inputs)` shows it."
            )
        kept = list(_without_graph(node)) if value_checks_on() else []
        if kept:
            warn(
                f"{what}: {name} keeps {' and '.join(kept)} for its backward, without a graph: what "
                "forward made, and is neither input nor output, is a constant to the second "
                f"derivative, which may lack its part. `hoglib.verify({name}, inputs)` tells.",
            )


@contextmanager
def warn_detached(values: Tensor | list[Tensor], what: str) -> Iterator[None]:
    """While the gradient is taken with a graph: warns of custom Functions whose gradient comes out
    without one, because backward runs under no_grad, detaches, or leaves torch.

    The incoming gradients are made to require grad, so that what backward gives without a cut does too.
    """
    handles: list[Any] = []
    for node, function in user_functions(values) if value_checks_on() else ():
        handles.append(node.register_prehook(_requiring_grad))
        handles.append(node.register_hook(partial(_tell, function.__qualname__, what)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _requiring_grad(grads: Any) -> Any:
    return tuple(
        g.detach().requires_grad_()
        if isinstance(g, Tensor) and g.is_floating_point() and not g.requires_grad
        else g
        for g in grads
    )


def _tell(name: str, what: str, returned: Any, incoming: Any) -> None:
    floats = [g for g in returned if isinstance(g, Tensor) and g.is_floating_point()]
    if any(not g.requires_grad and bool(g.any()) for g in floats):
        warn(
            f"{what}: the backward of {name} gives a gradient without a graph: it runs under no_grad, "
            "detaches, or leaves torch. The second derivative through it is taken for zero. "
            f"`hoglib.verify({name}, inputs)` names the line.",
        )


def nodes(outputs: Iterable[Any], since: Iterable[Tensor] = ()) -> Iterator[Any]:
    """The nodes of the graphs of the tensors among the outputs, but for what `since` came from."""
    pending: list[Any] = [y.grad_fn for y in outputs if isinstance(y, Tensor)]
    seen: set[Any] = {None, *(x.grad_fn for x in since)}
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        yield node
        for parent, _ in node.next_functions:
            if parent not in seen:
                pending.append(parent)


def directly_reached(value: Tensor, tensors: list[Tensor]) -> list[int]:
    """Which of these leaf tensors, and not copies of them, a value was computed from."""
    found = {id(node.variable) for node in nodes([value]) if hasattr(node, "variable")}
    return [i for i, tensor in enumerate(tensors) if id(tensor) in found]


def graph_bytes(values: list[Tensor]) -> int:
    """About what the graphs of these tensors hold: what came out of each operation in them."""
    return sum(torch_internals.output_bytes(node) for node in nodes(values))


def user_functions(
    values: Tensor | list[Tensor], since: Iterable[Tensor] = ()
) -> Iterator[tuple[Any, type[Function]]]:
    """The nodes of custom Functions, but for those of torch and of hoglib."""
    for node in nodes([values] if isinstance(values, Tensor) else values, since):
        function = user_function(node)
        if function is not None:
            yield node, function


class GraphSummary(NamedTuple):
    """What a value was computed from and by."""

    leaves: dict[int, Tensor]  # the leaf tensors, by their ids
    users: bool  # by a custom Function of the user's, or compiled code
    runs_python: bool  # by anything whose backward runs Python that is not one of hoglib's ops


def graph_summary(value: Tensor) -> GraphSummary:
    """One walk of a graph for all that is asked of it."""
    leaves, users, runs_python = {}, False, False
    for node in nodes([value]):
        if hasattr(type(node), "_forward_cls"):
            if getattr(torch_internals.custom_function(node), "runs_user_code", True):
                runs_python = True
                users = users or user_function(node) is not None or is_compiled_node(node)
        elif hasattr(node, "variable"):
            leaves[id(node.variable)] = node.variable
    return GraphSummary(leaves, users, runs_python)


def is_compiled_node(node: Any) -> bool:
    """Whether a node is the backward of what torch.compile made, which has no derivative."""
    return type(node).__name__ == "CompiledFunctionBackward"


def user_function(node: Any) -> type[Function] | None:
    """The custom Function of a node, but for those of torch and of hoglib."""
    function = torch_internals.custom_function(node)
    if function is None or function.__module__.startswith(("torch.", "hoglib.")):
        return None
    return function


def _without_graph(node: Any) -> Iterator[str]:
    """The slots of a node that hold a floating-point tensor made in forward.

    A tensor without a graph may be an input that needs no gradient; only where every tensor that came
    in needs one is it certain that it is none.
    """
    if any(parent is None for parent, _ in node.next_functions):
        return
    try:
        saved = node.saved_tensors
    except RuntimeError:  # its graph is gone, and differentiating it says so
        return
    for k, tensor in enumerate(saved):
        if _is_bare(tensor):
            yield f"ctx.saved_tensors[{k}]"
    for name, value in vars(node).items():
        if _is_bare(value):
            yield f"ctx.{name}"


def _is_bare(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and not value.requires_grad
