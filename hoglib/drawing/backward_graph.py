"""Runs a function, differentiates it with a graph, and collects both graphs with the faults in them."""

import inspect
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.autograd import Function

from hoglib._core import torch_internals, validation
from hoglib._core.autograd import grad_enabled
from hoglib._core.detachment import DetachedGradient, DetachmentWatch
from hoglib._core.gradient_graph import FunctionNode, walk
from hoglib._core.pytree import is_float
from hoglib._core.source_location import format_error
from hoglib._core.state import preserve_random_state
from hoglib._core.swap import keep_swapped
from hoglib.drawing.graph_data import (
    FunctionArguments,
    GraphBuilder,
    GraphData,
    ModuleCalls,
    Node,
    SavedTensor,
    saved_by_function,
    saved_by_operation,
)
from hoglib.functional import FunctionalLoss
from hoglib.verification.call import Call, is_part
from hoglib.verification.subject import as_function, parameters

DERIVATIVES = {
    2: "the gradient with a graph",
    3: "the second derivative",
    4: "the third derivative",
}
ZERO, INCOMPLETE = "is silently zero", "may be incomplete"


def collect(fn: Any, inputs: tuple[Any, ...], order: int, saved: bool) -> GraphData:
    """The graph of fn and of its derivatives up to `order` - 1.

    Differentiates fn order - 1 times with a graph, and once more to see whether the last graph can be
    differentiated.
    """
    arguments = FunctionArguments()
    with (
        grad_enabled(),
        keep_swapped() as patch,
        preserve_random_state(),
        torch_internals.record_backward_origins(),
        torch_internals.watching_functions(arguments.record) as applying,
    ):
        call = Call(fn, inputs, None)
        validation.something_to_differentiate_by(call.names, call.point)
        modules = ModuleCalls(fn)
        try:
            with modules.recording(patch):
                ran = call.from_leaves()
        except RuntimeError as error:
            if "in-place" not in str(error):
                raise
            # fn changes its inputs in place, which leaves do not allow
            call.clone, modules = True, ModuleCalls(fn)
            with modules.recording(patch):
                ran = call.from_leaves()
        variables, constants, result = ran
        name = repr(fn) if isinstance(fn, FunctionalLoss) else call.name
        names = _InputNames(fn, len(inputs))
        builder = GraphBuilder(
            GraphData(name, order), modules, {names(name): x for name, x in constants.items()}
        )
        collector = _Collector(builder, arguments)
        collector.add_inputs(variables, [names(name) for name in call.names], call.num_inputs)
        values = collector.add_outputs([y for y in result if is_float(y)])
        for k in range(2, order + 2 if order > 1 else 2):
            values = collector.differentiate(values, k, _BackwardPass(applying), drawn=k <= order)
        collector.finish(saved)
        return collector.data


@final
class _Collector:
    """Adds inputs, outputs and gradients to a picture, and the faults that show in them."""

    def __init__(self, builder: GraphBuilder, arguments: FunctionArguments) -> None:
        self._builder, self.data, self._arguments = builder, builder.data, arguments
        self._alive: list[Any] = []  # tensors whose graphs are keys
        self._leaks: dict[Any, _Leak] = {}  # by autograd node

    def add_inputs(self, variables: list[Tensor], names: list[str], num_inputs: int) -> None:
        self._variables, self._names = variables, names
        for j, (x, name) in enumerate(zip(variables, names, strict=True)):
            self._builder.add_leaf(x, "input" if j < num_inputs else "parameter", name)

    def add_outputs(self, outputs: list[Tensor]) -> list[Tensor]:
        """The outputs that have a graph."""
        several = len(outputs) > 1
        names = [f"output {i}" if several else "output" for i in range(len(outputs))]
        self._builder.add_graph(outputs, 1)
        for y, name in zip(outputs, names, strict=True):
            self._builder.add_result("output", name, y, 1)
        pairs = [(y, name) for y, name in zip(outputs, names, strict=True) if y.requires_grad]
        if not pairs:
            self.data.faults.append(
                f"{self.data.name}: no output has a graph. Is it a constant, detached, computed under "
                "no_grad, or computed outside of torch?"
            )
        self._value_names = [name for _, name in pairs]
        return [y for y, _ in pairs]

    def differentiate(
        self, values: list[Tensor], k: int, backward: "_BackwardPass", *, drawn: bool
    ) -> list[Tensor]:
        """The gradients of values, with their graph as the k-th part of the picture if drawn."""
        if not values:
            return []
        incoming = [torch.ones_like(y).requires_grad_() for y in values]
        grads = backward.run(values, self._variables, incoming, create_graph=drawn)
        self._alive += [incoming, grads]
        if backward.raised is not None:
            self._report_error(backward.raised, k)
        if not drawn or backward.raised is not None:
            return []
        for u, name in zip(incoming, self._value_names, strict=True):
            self._builder.add_leaf(u, "incoming", f"grad of {name}", k)
        for detached in backward.detached:
            self._report_detached(detached, k)
        self._leaks.update({leak.grad_fn: leak for leak in backward.leaks})
        title = "grad of {}" if k == 2 else "second derivative by {}"
        names = [title.format(name) for name in self._names]
        pairs = [(g, name) for g, name in zip(grads, names, strict=True) if g is not None]
        self._builder.add_graph([g for g, _ in pairs], k)
        for g, name in pairs:
            self._builder.add_result("gradient", name, g, k)
        self._value_names = [name for g, name in pairs if g.requires_grad]
        return [g for g, _ in pairs if g.requires_grad]

    def finish(self, saved: bool) -> None:
        """Add saved tensors, and the faults that they cause; mark inputs that are not used."""
        builder = self._builder
        functions = [
            (grad_fn, function)
            for grad_fn in builder.operations
            if (function := torch_internals.custom_function(grad_fn)) is not None
        ]
        by_function = {
            grad_fn: list(saved_by_function(grad_fn, function, self._arguments))
            for grad_fn, function in functions
        }
        by_user = [grad_fn for grad_fn, f in functions if FunctionNode(grad_fn, f).by_user]
        for grad_fn in by_user:
            detached = [one for one in by_function[grad_fn] if one.detached]
            self._report_leaks(grad_fn, detached)
            for one in detached:
                builder.add_detached(builder.key(grad_fn), one)
        if saved:
            for grad_fn in builder.operations:
                key = builder.key(grad_fn)
                for one in by_function.get(grad_fn, ()):
                    if not (one.detached and grad_fn in by_user):
                        builder.add_saved(key, one, one.name.removeprefix("ctx."))
                for one in () if grad_fn in by_function else saved_by_operation(grad_fn):
                    builder.add_saved(key, one, "")
        used = {key for edge in self.data.edges for key in edge}
        for key, node in self.data.nodes.items():
            if key not in used and node.kind in ("input", "parameter", "incoming"):
                node.name += " (unused)"

    def _report_detached(self, detached: "_Detached", order: int) -> None:
        """A backward that returns a gradient without a graph."""
        made_by = self._builder.node(detached.grad_fn)
        name, why = made_by.name, detached.why
        key = self._builder.add_leaf(
            detached.leaf, "detached", f"DETACHED in {name}.backward", order
        )
        node = self.data.nodes[key]
        node.inside = (*made_by.inside, f"made in {name}.backward")
        node.fault = why or "its gradient has no graph"
        self.data.connect(self._builder.key(detached.grad_fn), key, "detached")
        self.data.faults.append(
            f"{name}.backward returns a gradient of shape {node.shape} without a graph"
            f"{f' ({why})' if why else ''}: {DERIVATIVES[order + 1]} through it {ZERO}."
        )

    def _report_leaks(self, grad_fn: Any, detached: list[SavedTensor]) -> None:
        """A backward whose gradient has a graph, but not all of it."""
        key = self._builder.key(grad_fn)
        leak = self._leaks.get(grad_fn, _Leak(grad_fn, "", False))
        name, order = self.data.nodes[key].name, self.data.nodes[key].order
        effect = f"the second derivative through it {ZERO if leak.whole else INCOMPLETE}"
        if leak.why:
            kind, what = ("detached", "DETACHED") if leak.whole else ("partial", "partly detached")
            inside = (*self.data.nodes[key].inside, f"made in {name}.backward")
            node = Node(kind, f"{what} in {name}.backward", "", order + 1, inside, leak.why)
            self.data.connect(key, self.data.add(node), "detached")
            self.data.faults.append(f"{name}.backward leaves the graph ({leak.why}): {effect}.")
        if detached:
            self.data.faults.append(
                f"{name} saves {' and '.join(one.name for one in detached)}, made in forward, which is "
                f"neither an input nor an output and has no graph: {effect}."
            )

    def _report_error(self, raised: "_Raised", k: int) -> None:
        """A gradient that raises."""
        name = self.data.name
        if self._builder.knows(raised.grad_fn):
            node = self._builder.node(raised.grad_fn)
            node.fault, name = f"raises in {DERIVATIVES[k]}: {raised.text}", node.name
        self.data.faults.append(f"{name} raises in {DERIVATIVES[k]}: {raised.text}.")


class _Detached(NamedTuple):
    """A gradient that a custom Function returned without a graph, and the leaf that replaces it."""

    grad_fn: Any
    leaf: Tensor
    why: str


class _Leak(NamedTuple):
    """A backward that leaves the graph somewhere, though its gradient has one."""

    grad_fn: Any
    why: str
    whole: bool  # the graph of its gradient starts from the incoming gradient alone


class _Raised(NamedTuple):
    """The autograd node that raised, and the error."""

    grad_fn: Any
    text: str


@final
class _BackwardPass:
    """One backward pass, watched by hooks; `detached`, `leaks` and `raised` are what they found.

    A gradient without a graph is replaced by a leaf where it leaves its Function, so that the graph
    goes on behind it. The incoming gradients must require grad: then every gradient does, unless it is
    detached.
    """

    def __init__(self, applying: torch_internals.Applying) -> None:
        self.detached: list[_Detached] = []
        self.leaks: list[_Leak] = []
        self.raised: _Raised | None = None
        self._applying = applying
        self._running: list[tuple[Any, tuple[Any, ...], DetachmentWatch | None]] = []

    def run(
        self, values: Sequence[Tensor], inputs: Sequence[Tensor], incoming: Sequence[Tensor],
        *, create_graph: bool = True,
    ) -> list[Tensor | None]:  # fmt: skip
        """The gradients of values by inputs; all None if the pass raised."""
        handles = []
        for grad_fn, _ in walk(values):
            if hasattr(grad_fn, "variable"):
                continue
            function = torch_internals.custom_function(grad_fn) if create_graph else None
            watched = FunctionNode(grad_fn, function).by_user
            handles.append(grad_fn.register_prehook(partial(self._enter, grad_fn, watched)))
            handles.append(grad_fn.register_hook(partial(self._leave, grad_fn, function)))
        try:
            # in this thread, where the Functions that backward applies are seen
            with torch.autograd.set_multithreading_enabled(False):
                return list(
                    torch.autograd.grad(
                        list(values), list(inputs), list(incoming), create_graph=create_graph,
                        retain_graph=True, allow_unused=True,
                    )
                )  # fmt: skip
        except Exception as error:
            grad_fn = self._running[-1][0] if self._running else None
            self.raised = _Raised(grad_fn, format_error(error))
            return [None] * len(inputs)
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, grad_fn: Any, watched: bool, grads: tuple[Any, ...]) -> None:
        watch = None
        if watched:
            watch = DetachmentWatch()
            watch.applying = self._applying
            watch.__enter__()  # torch ends it with the autograd node, should that raise
        self._running.append((grad_fn, grads, watch))

    def _leave(
        self, grad_fn: Any, function: type[Function] | None, returned: tuple[Any, ...], _: Any
    ) -> tuple[Any, ...] | None:
        _, incoming, watch = self._running.pop()
        if watch is not None:
            watch.__exit__(None, None, None)
        if function is None or is_part(function):
            return None
        once = torch_internals.is_once_differentiable(function)
        why = (
            "@once_differentiable" if once else _listed(watch.detached) if watch is not None else ""
        )
        lost = [is_float(g) and (once or (not g.requires_grad and bool(g.any()))) for g in returned]
        if any(lost):
            return tuple(
                self._replace_by_leaf(grad_fn, g, why) if is_lost else g
                for g, is_lost in zip(returned, lost, strict=True)
            )
        if watch is not None:
            grads = [g for g in returned if is_float(g) and g.requires_grad]
            whole = bool(grads) and _depends_only_on(incoming, grads, grad_fn)
            self.leaks.append(_Leak(grad_fn, why, whole))
        return None

    def _replace_by_leaf(self, grad_fn: Any, grad: Tensor, why: str) -> Tensor:
        leaf = grad.detach().clone().requires_grad_()
        self.detached.append(_Detached(grad_fn, leaf, why))
        return leaf


def _listed(detached: Sequence[DetachedGradient]) -> str:
    """How and where gradients are detached; each line of code once."""
    by_line: dict[Any, list[str]] = {}
    for one in detached:
        how = f"{one.how}, then {one.then}" if one.then else one.how
        by_line.setdefault(one.place, []).append(how)
    hows = [(line, " and ".join(dict.fromkeys(found))) for line, found in by_line.items()]
    return "; ".join(f"{how} at {line}" if line else how for line, how in hows)


def _depends_only_on(incoming: Sequence[Any], grads: Sequence[Tensor], grad_fn: Any) -> bool:
    """Whether the gradients that a backward returned were computed from the incoming ones alone."""
    ids = {id(u) for u in incoming}
    since = [u for u in incoming if isinstance(u, Tensor)]
    return not any(
        id(found.variable) not in ids
        if hasattr(found, "variable")
        else torch_internals.made_by(found) is not grad_fn
        for found, _ in walk(grads, since)
    )


@final
class _InputNames:
    """The user's names of the inputs: `x` for inputs[0], `params.weight` for an entry of inputs[0]."""

    def __init__(self, fn: Any, count: int) -> None:
        function = as_function(fn)
        self._names: list[str] = []
        if function is not None:
            self._names = [name.strip("`") for name in parameters(function, count)]
            return
        fn = fn.forward if isinstance(fn, torch.nn.Module) else fn
        try:
            given = inspect.signature(fn).parameters.values()
        except (TypeError, ValueError):
            return
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        self._names = [p.name for p in given if p.kind in positional]

    def __call__(self, name: str) -> str:
        if not name.startswith("inputs["):
            return name.removeprefix("the parameter ")
        index, _, rest = name.removeprefix("inputs[").partition("]")
        i = int(index)
        return f"{self._names[i]}{rest}" if i < len(self._names) else name
