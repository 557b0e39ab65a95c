"""Calls of hoglib in what torch.compile traces: the user's function becomes a graph by Dynamo, and its
derivatives are computed by hoglib itself, when torch traces that graph.

    @within_compile(like_value, called_with=lambda params, v, *args: (params, *args))
    def hvp(func, params, v, *args, ...): ...

Dynamo guards what the user's function reads, and makes the tensors that it reaches inputs. hoglib's own
code, which no compiler has to read, runs once, on tensors without values: it makes no checks of values.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any, TypeVar, final

import torch
from torch import Tensor, fx

from hoglib._core import pytree
from hoglib._core.ambient import inside
from hoglib.errors import UnsupportedError

F = TypeVar("F", bound=Callable[..., Any])


@torch.compiler.allow_in_graph
def mark(what: str, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors, as a node of a graph that can be found again."""
    return tuple([x.view_as(x) for x in tensors])


def within_compile(
    like: Callable[..., Any], called_with: Callable[..., tuple[Any, ...]] = lambda *args: args,
    select: Callable[[Any, Any], Tensor] | None = None,
) -> Callable[[F], F]:  # fmt: skip
    """Makes an entry point (func, *args, **options) traceable by torch.compile.

    like: of what func returns, the options and the args: tensors like those of the result. called_with:
    of the args: those of func. select: of what func returns and the option `output`: the output that is
    differentiated.
    """

    def decorate(entry: F) -> F:
        names = [
            name
            for name, parameter in inspect.signature(entry).parameters.items()
            if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        ]

        @wraps(entry)
        def run(*args: Any, **options: Any) -> Any:
            if not torch.compiler.is_dynamo_compiling():
                return entry(*args, **options)
            args += tuple([options.pop(name) for name in names[len(args) :] if name in options])
            return _traced(entry, (like, called_with, select), args[0], args[1:], options)

        found: Any = run
        return found

    return decorate


def _traced(
    entry: Callable[..., Any], how: Any, func: Any, args: tuple[Any, ...], options: dict[str, Any]
) -> Any:
    """entry(func, *args, **options), as Dynamo reads it."""
    like, called_with, select = how
    output = options.get("output")
    kept = {name: x for name, x in options.items() if name != "output"}
    leaves, structure = pytree.flatten((args, kept))
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    others = tuple([None if isinstance(x, Tensor) else (x,) for x in leaves])

    def body() -> Any:
        if not torch.compiler.is_dynamo_compiling():  # which has left this call to Python
            return entry(func, *args, **options)
        own, _ = _filled(others, structure, mark("arguments", *tensors))
        leaves, form = pytree.flatten(called_with(*own))
        marked = list(mark("call", *[x for x in leaves if isinstance(x, Tensor)]))
        given = [marked.pop(0) if isinstance(x, Tensor) else x for x in leaves]
        value = func(*pytree.unflatten(given, form))
        found = [] if select is None or isinstance(value, Tensor) else [select(value, output)]
        found += pytree.tensors(value)
        mark("one" if isinstance(value, Tensor) else "several", *found)
        return like(value, options, *own)

    run = partial(_run, entry, others, structure, select is not None)
    return torch.ops.higher_order.dynamo_bypassing_wrapper(run, body)


def _filled(others: Sequence[Any], structure: Any, tensors: Sequence[Tensor]) -> Any:
    """A tree with these tensors among its leaves, in their order."""
    left = list(tensors)
    return pytree.unflatten([left.pop(0) if x is None else x[0] for x in others], structure)


def _run(entry: Any, others: Any, structure: Any, selects: bool, body: Any) -> Callable[..., Any]:
    """What torch calls in the place of the body."""
    if not isinstance(body, fx.GraphModule):
        return body

    def run(*inputs: Tensor) -> tuple[Tensor, ...]:
        program = Program(body, inputs, entry.__name__)
        args, options = _filled(others, structure, program.arguments)
        with inside(value_checks_off=True):
            found = pytree.tensors(entry(program, *args, **options))
        if selects and program.returns_several and options.get("return_outputs"):
            del found[1]  # which comes once more, among the outputs
        return tuple(found)

    return run


@final
class Program:
    """The user's function as Dynamo traced it, at tensors of the shapes that it was traced at."""

    def __init__(self, graph: fx.GraphModule, inputs: Sequence[Tensor], caller: str) -> None:
        nodes = list(graph.graph.nodes)
        inputs_of = [node for node in nodes if node.op == "placeholder"]
        self._interpreter = fx.Interpreter(graph)
        self._known = dict(zip(inputs_of, inputs, strict=True))
        of_arguments, self._begin, self._end = [n for n in nodes if n.target is mark]
        self.arguments = [self._known[node] for node in of_arguments.args[1:]]
        self.returns_several = self._end.args[0] == "several"
        self._nodes = nodes[nodes.index(of_arguments) : nodes.index(self._end)]
        self._caller = caller

    def __call__(self, *given: Any) -> Any:
        run = self._interpreter
        run.env = dict(self._known)
        tensors = pytree.tensors(given)
        for node in self._nodes:
            run.env[node] = tuple(tensors) if node is self._begin else run.run_node(node)
        values = run.map_nodes_to_values(self._end.args[1:], self._end)
        return values if self.returns_several else values[0]
