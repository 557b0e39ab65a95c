"""A call becomes a graph: traced, made smaller, compiled, and compared with what it stands for."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter
from types import FunctionType
from typing import Any, Protocol

import torch
from torch import Tensor, fx, nn

from hoglib import _arguments as arguments
from hoglib import _functorch
from hoglib._random_state import random_numbers_kept
from hoglib._recording import outside_inference_mode
from hoglib.capture import _backends as backends
from hoglib.capture import _check as checking
from hoglib.capture._graphs import Captured, Graphs, shared
from hoglib.capture._kept import nothing_left
from hoglib.capture._reached import Reached
from hoglib.capture._signature import Form
from hoglib.capture._simplify import simplify
from hoglib.capture._trace import Traced, is_random, trace
from hoglib.capture._walk import Walk

_HERE = threading.local()


class Function(backends.Options, Protocol):
    """What is captured."""

    fn: Callable[..., Any]
    check: bool

    def of_tensors(self, form: Form) -> Callable[..., Any]: ...


def capture(function: Function, form: Form, tensors: list[Tensor]) -> tuple[Captured, list[Tensor]]:
    """The graph for such a call, and the tensors that the function reaches besides."""
    root = (function.fn, form.others)
    walk = Walk(root)
    compiled = any(map(_is_compiled, walk.objects))
    with (
        outside_inference_mode(),
        _functorch.without_saved_tensor_hooks(),
        random_numbers_kept(),
        _functorch.eagerly(compiled),
    ):
        began = perf_counter()
        with nothing_left(walk):
            traced, also = _traced(function, form, tensors)
        simplify(traced.graph)
        seconds = perf_counter() - began
        own = [i for i in range(len(tensors)) if i not in dict(also)]
        reached = Reached(root, traced.lifted, traced.modules)
        nodes = sum(node.op == "call_function" for node in traced.graph.graph.nodes)
        code, draws = traced.graph.code, any(map(is_random, traced.graph.graph.nodes))
        inputs = [x.detach() for x in (*(tensors[i] for i in own), *traced.lifted)]
        made, backend = backends.made(function, traced.graph, inputs)
        entry = Captured(
            arguments=form.described(tensors),
            nodes=nodes,
            backend=backend,
            source=made.source,
            seconds_to_trace=seconds,
            seconds_to_compile=made.seconds,
            draws=draws,
            code=code,
            run=made.run,
            reached=reached,
            shared=also,
            leaves=traced.leaves,
            structure=traced.structure,
            recorded=traced.recorded,
            backward=Graphs(),
            holds=_assumptions(traced.graph, own) if function.dynamic else _always,
        )
        if function.check:
            with _eagerly():
                checking.equal(
                    function.name, function.of_tensors(form), tensors, traced.lifted, entry,
                    apart=getattr(function.fn, "apart", False),
                )  # fmt: skip
            reached = reached.after(function.name, root, traced.lifted, traced.modules)
            entry = replace(entry, reached=reached)
    return entry, traced.lifted


def runs_elsewhere() -> bool:
    """Whether a call is a part of what is differentiated, traced or compared outside of it."""
    return (
        torch.compiler.is_compiling()
        or getattr(_HERE, "eagerly", False)
        or _functorch.transforms_active()
        or _functorch.forward_mode_active()
        or _functorch.tracing()
    )


def _is_compiled(value: Any) -> bool:
    """Whether torch.compile made it, whose code cannot be traced."""
    if isinstance(value, nn.Module):
        return _functorch.is_compiled(value) or value._compiled_call_impl is not None
    return isinstance(value, FunctionType) and "_torchdynamo_orig_callable" in vars(value)


def _traced(
    function: Function, form: Form, tensors: list[Tensor]
) -> tuple[Traced, list[tuple[int, int]]]:
    """The graph, and which arguments the function also reaches otherwise: one variable then."""
    run, name = function.of_tensors(form), function.name
    try:
        traced = trace(name, run, tensors, function.dynamic)
        also = {i for i, _ in shared(tensors, traced.lifted)}
    except arguments.NotSupported:
        raise
    except Exception:  # of a derivative by an argument where it is the other that was used
        places = Walk((function.fn, form.others)).places
        also = {i for i, x in enumerate(tensors) if id(x) in places}
        if not also:
            raise
    if also:
        own = [x for i, x in enumerate(tensors) if i not in also]

        def with_those_reached(*given: Tensor) -> Any:
            left = iter(given)
            return run(*[x if i in also else next(left) for i, x in enumerate(tensors)])

        traced = trace(name, with_those_reached, own, function.dynamic)
    return traced, shared(tensors, traced.lifted)


@contextmanager
def _eagerly() -> Iterator[None]:
    """Inside, what is compiled runs as it would otherwise, in this thread."""
    before = getattr(_HERE, "eagerly", False)
    _HERE.eagerly = True
    try:
        yield
    finally:
        _HERE.eagerly = before


def _assumptions(graph: fx.GraphModule, own: list[int]) -> Callable[[list[Tensor]], bool]:
    """Whether what was assumed of symbolic shapes holds for the tensors of a call."""
    placeholders = [n.meta["val"] for n in graph.graph.find_nodes(op="placeholder")][: len(own)]
    shapes: Any = graph.shape_env

    def hold(tensors: list[Tensor]) -> bool:
        return bool(shapes.evaluate_guards_for_args(placeholders, [tensors[i] for i in own]))

    return hold


def _always(tensors: list[Tensor]) -> bool:
    return True
