"""Calls of hoglib in code that torch.compile traces: Dynamo makes a graph of the user's function, and
hoglib computes its derivatives when torch traces that graph.

    @when_compiled(within_compile(like_product, called_with))
    def hvp(func, params, v, *args, **options): ...

    @when_compiled(run_uncompiled)
    def root(residual, solution, inputs): ...

Dynamo guards everything that the user's function reads, and makes the tensors that it reaches inputs.
hoglib's own code, which Dynamo need not read, runs once, on fake tensors: it makes no checks of values.
"""

from collections.abc import Callable, Sequence
from functools import partial, wraps
from operator import call, index
from types import NoneType
from typing import Any, TypeVar, cast, final

import torch
from torch import Tensor, fx

from hoglib._core.runtime.ambient import inside
from hoglib._core.runtime.source_location import user_line
from hoglib._core.torch_api import pytree, torch_internals
from hoglib._core.torch_api.dispatch import Args, Kw, Op, Types
from hoglib._core.torch_api.pytree import Tree
from hoglib._core.torch_api.torch_internals import constant_transforms_active
from hoglib._core.torch_api.torch_private import private
from hoglib.capture.passes import by_products, has_factors
from hoglib.errors import UnsupportedError
from hoglib.functional import BY_ID, FunctionalLoss

Entry = TypeVar("Entry", bound=Callable[..., Any])
# leaves of a call
CONSTANTS = (Tensor, int, float, complex, str, NoneType, torch.dtype, torch.device)


def _mark_tensors(what: str, tensors: list[Tensor]) -> list[Tensor]:
    """The tensors, by a node that `split_graph` finds in the graph again. Arguments of a call require
    grad: Dynamo takes only the forward of a custom Function that is not differentiated."""
    if what == "call" and not torch_internals.transforms_active():
        return [x.detach().requires_grad_(pytree.is_float(x)).clone() for x in tensors]
    return [x.view_as(x) for x in tensors]


# an operator: Dynamo traces it without an import of Dynamo here
_LIBRARY = torch.library.Library("hoglib", "FRAGMENT")
_LIBRARY.define("mark(str what, Tensor[] tensors) -> Tensor[]")
_LIBRARY.impl("mark", _mark_tensors, "CompositeImplicitAutograd")
MARK = torch.ops.hoglib.mark.default


def within_compile(
    like: Callable[..., Any],
    called_with: Callable[..., tuple[Any, ...]] = lambda *args: args,
    select: Callable[[Any, Any], Tensor] | None = None,
    apart: bool = False,
) -> Callable[..., Any]:
    """(entry, func, *args, **options) -> entry(func, *args, **options), for torch.compile.

    like: (result of func, options, *args) -> tensors like the results of entry.
    called_with: (*args) -> the arguments of func.
    select: (result of func, options["output"]) -> the output that is differentiated.
    apart: func is a loss with outputs and criterion, which are recorded apart.
    """

    def run(entry: Callable[..., Any], func: Any, *args: Any, **options: Any) -> Any:
        in_python, output = partial(entry, func, *args, **options), options.get("output")
        if (
            any(options.get(name) is not None for name in ("micro_batch", "blocks"))
            or options.get("remat")
            or options.get("mode") == "finite-differences"
            or (apart and type(func) is not FunctionalLoss)
        ):
            return run_outside_graph(in_python)

        def record(*own: Any) -> Any:
            given = called_with(*own)
            if not apart:
                return like(record_call(func, given, select, output), options, *own)
            params, batch = given
            outputs = record_call(lambda params: func.outputs(params, batch), (params,))
            value = record_call(lambda outputs: func.criterion(outputs, batch), (outputs,))
            return like(value, options, *own)

        kept = {name: x for name, x in options.items() if name not in ("output", "compile")}
        replay = partial(_replay, entry, id(func) if apart else None, select is not None)
        return call_traced(entry.__name__, record, replay, in_python, args, kept)

    return run


def when_compiled(traced_call: Callable[..., Any]) -> Callable[[Entry], Entry]:
    """A decorator: for the call entry(*args, **options), torch.compile traces
    traced_call(entry, *args, **options). args has all positional parameters, also if given by name."""

    def decorate(entry: Entry) -> Entry:
        names = entry.__code__.co_varnames[: entry.__code__.co_argcount]

        @wraps(entry)
        def call_entry(*args: Any, **options: Any) -> Any:
            if not torch.compiler.is_dynamo_compiling():
                return entry(*args, **options)
            args += tuple(options.pop(name) for name in names[len(args) :] if name in options)
            return traced_call(entry, *args, **options)

        return cast(Entry, call_entry)

    return decorate


def run_uncompiled(entry: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """entry(*args, **options), outside the trace of torch.compile."""
    return run_outside_graph(partial(entry, *args, **options))


def _replay(
    entry: Any, of_loss: int | None, selects: bool, parts: list["Subgraph"], args: Any, options: Any
) -> list[Tensor]:
    """The results of an entry point for recorded functions, instead of the user's own."""
    func: Any = parts[0] if of_loss is None else TracedLoss(BY_ID.get(of_loss), *parts)
    found = pytree.tensors(entry(func, *args, **options))
    if selects and parts[0].returns_several and options.get("return_outputs"):
        del found[1]  # the selected output, which is among the outputs again
    return found


def call_traced(
    caller: str,
    record: Callable[..., Any],
    replay: Callable[..., list[Tensor]],
    in_python: Callable[[], Any],
    args: tuple[Any, ...],
    options: dict[str, Any],
) -> Any:
    """The results of a call of hoglib on functions that Dynamo traces.

    record: (*args) -> tensors like the results; calls the functions by `record_call`.
    replay: (functions, args, options) -> the tensors of the results; a function of a module, with
    constants.
    in_python: () -> the results, if Dynamo does not trace the call.
    """
    leaves, structure = pytree.flatten((args, options))
    # Dynamo passes symbols for numbers. An int becomes a constant; a float it cannot convert to a
    # string, and then runs uncompiled.
    leaves = [index(x) if type(x) is int else x for x in leaves]
    leaves = [float(str(x)) if type(x) is float else x for x in leaves]
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    # a transform's level does not exist any more at the replay
    if not all(isinstance(x, CONSTANTS) for x in leaves) or constant_transforms_active():
        return run_outside_graph(in_python)
    others = tuple([None if isinstance(x, Tensor) else (x,) for x in leaves])

    def body() -> Any:
        if not torch.compiler.is_dynamo_compiling():
            return in_python()
        return record(*_fill_tree(others, structure, MARK("arguments", tensors))[0])

    run = partial(_run, caller, replay, others, structure)
    return torch.ops.higher_order.dynamo_bypassing_wrapper(run, body)


def run_outside_graph(function: Callable[[], Any]) -> Any:
    """function(), run uncompiled by a graph break."""
    private("torch._dynamo.graph_break")(
        msg="This call of hoglib runs uncompiled; see docs/compile.md."
    )
    return torch.compiler.disable(function)()


def record_call(func: Any, args: tuple[Any, ...], select: Any = None, output: Any = None) -> Any:
    """func(*args), between marks in the graph."""
    leaves, structure = pytree.flatten(args)
    others = [None if isinstance(x, Tensor) else (x,) for x in leaves]
    with torch.enable_grad():
        marked = MARK("call", [x for x in leaves if isinstance(x, Tensor)])
        value = func(*_fill_tree(others, structure, marked))
        found = [] if select is None or isinstance(value, Tensor) else [select(value, output)]
        found += pytree.tensors(value)
        MARK("one" if isinstance(value, Tensor) else "several", found)
    return value


def _fill_tree(others: Sequence[Any], structure: object, tensors: Sequence[Tensor]) -> Any:
    """A tree with these tensors, in order, among its leaves."""
    left = list(tensors)
    return pytree.unflatten([left.pop(0) if x is None else x[0] for x in others], structure)


def _run(caller: str, replay: Any, others: Any, structure: Any, body: Any) -> Callable[..., Any]:
    """The function that torch calls instead of the body: `replay` if Dynamo has made a graph of it."""
    if not isinstance(body, fx.GraphModule):
        return body

    def run(*inputs: Tensor) -> tuple[Tensor, ...]:
        tensors, parts = split_graph(body, inputs, caller)
        with inside(value_checks_off=True), WithoutFactors():
            return tuple(replay(parts, *_fill_tree(others, structure, tensors)))

    return run


class WithoutFactors(torch_internals.TorchDispatchMode):
    """Inside, products replace the options alpha and beta, as in :func:`expand_alpha_beta`."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Op, types: Types, args: Args = (), kwargs: Kw = None) -> Any:
        if has_factors(func, kwargs):
            return by_products(call, func, args, kwargs)
        return func(*args, **(kwargs or {}))


def split_graph(
    graph: fx.GraphModule, inputs: Sequence[Tensor], caller: str
) -> tuple[list[Tensor], list["Subgraph"]]:
    """The marked arguments of a body, and the recorded functions in it."""
    for part in graph.modules():
        for node in part.graph.nodes if isinstance(part, fx.GraphModule) else ():
            if getattr(node.target, "__name__", "") == "autograd_function_apply":
                line = user_line((node.stack_trace or "").splitlines())
                raise UnsupportedError(
                    f"{caller} inside torch.compile: expected operations of torch, got a custom "
                    f"Function at {line}: compiled, its second derivative is zero, without an error. "
                    "Leave the call out by `torch.compiler.disable`, which examines the Function, too; "
                    "or use `hoglib.compile` instead of torch.compile."
                )
    nodes, run = list(graph.graph.nodes), fx.Interpreter(graph)
    marks: list[Any] = [node for node in nodes if node.target is MARK]
    own = marks[0].args[1]
    for node, x in zip([n for n in nodes if n.op == "placeholder"], inputs, strict=True):
        items = [user for user in node.users if user.target == "item"]  # for a Python number
        # clone a buffer, so that it stays unchanged; the clone of a number would have no item
        kept = items or node in own or not isinstance(x, Tensor) or x.requires_grad
        run.env[node] = x if kept else x.clone()
        for item in items:  # Dynamo puts it into the first of the calls that use it
            run.env[item] = run.run_node(item)
    tensors = [run.env[node] for node in own]
    # nodes of the graph set grad mode, and the last one sets it back
    with torch.set_grad_enabled(torch.is_grad_enabled()):
        for node in nodes[nodes.index(marks[0]) : nodes.index(marks[1])]:
            run.env[node] = run.run_node(node)
    calls = zip(marks[1::2], marks[2::2], strict=True)
    parts = [(begin, nodes[nodes.index(begin) + 1 : nodes.index(end)], end) for begin, end in calls]
    return tensors, [Subgraph(caller, run, *part) for part in parts]


@final
class Subgraph:
    """A function traced by Dynamo, for tensors of the shapes in the trace.

    Attributes:
        returns_several: The function returns more than one tensor.
    """

    def __init__(
        self, caller: str, run: fx.Interpreter, begin: Any, nodes: list[fx.Node], end: Any
    ) -> None:
        self._caller, self._run, self._known = caller, run, dict(run.env)
        self._begin, self._nodes, self._end = begin, nodes, end
        self.returns_several = end.args[0] == "several"

    def __call__(self, *given: Any) -> Any:
        run, tensors = self._run, pytree.tensors(given)
        for x, at in zip(tensors, self._begin.args[1], strict=True):
            was = self._known.get(at, x)  # the outputs of another part have no known value
            if x.shape != was.shape:
                raise UnsupportedError(
                    f"{self._caller} inside torch.compile: expected calls of the function with tensors "
                    f"of one shape, got {tuple(was.shape)} and {tuple(x.shape)}. Leave the call out by "
                    "`torch.compiler.disable`."
                )
        run.env = {**self._known, self._begin: tuple(tensors)}
        for node in self._nodes:
            run.env[node] = run.run_node(node)
        values: Any = run.map_nodes_to_values(self._end.args[1], self._end)
        return values if self.returns_several else values[0]


@final
class TracedLoss:
    """A loss with outputs and criterion as Dynamo has traced them."""

    def __init__(self, loss: object, outputs: Subgraph, criterion: Subgraph) -> None:
        self._outputs, self._criterion, self._loss = outputs, criterion, loss

    def __getattr__(self, name: str) -> Any:  # the user's criterion and targets
        if name not in ("user_criterion", "targets"):
            raise AttributeError(name)
        if self._loss is None:
            raise UnsupportedError(
                "loss inside torch.compile: expected one whose criterion is known, got one made "
                "inside; call hoglib.functional_loss outside of what is compiled."
            )
        return getattr(self._loss, name)

    def outputs(self, params: Tree, batch: object) -> Any:
        return self._outputs(params)

    def criterion(self, outputs: object, batch: object) -> Tensor:
        return self._criterion(outputs)
