"""Runs a graph as calls of its parts, and keeps the list of calls beside the compiled parts."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, fx

from hoglib.capture.outline import Outline, source_of, views_of

Runnable = Callable[..., Any]
View = tuple[str, list[Any]]  # an operation of torch.ops, and its arguments behind the tensor


class Step(NamedTuple):
    """A call of a part; tensors are numbered, the inputs of the graph first."""

    part: int
    reads: list[int]
    writes: list[int]
    last: list[int]  # tensors that no later call needs


class Program(NamedTuple):
    """The calls of an outlined graph.

    Attributes:
        parts: The key of each part, under which its compiled code is kept.
        steps: The calls, in order.
        outputs: The number of the tensor that each output is a view of, and the views.
        size: The number of tensors.
    """

    parts: list[str]
    steps: list[Step]
    outputs: list[tuple[int, list[View]]]
    size: int

    @classmethod
    def of(cls, graph: fx.Graph, found: Outline, keys: list[str]) -> Self:
        """The calls of an outlined graph, whose parts have these keys."""
        numbers: dict[Any, int] = {}

        def number(source: Any) -> int:
            return numbers.setdefault(source, len(numbers))

        inputs = [number(source_of(x)) for x in graph.find_nodes(op="placeholder")]
        (nodes,) = graph.output_node().args
        outputs = []
        steps = [
            Step(call.part, [*map(number, call.inputs)], [*map(number, call.outputs)], [])
            for call in found.calls
        ]
        for node in nodes:  # type: ignore[union-attr]
            views = [(str(x.target), list(x.args[1:])) for x in views_of(node)]  # type: ignore[arg-type]
            outputs.append((number(source_of(node)), views))  # type: ignore[arg-type]
        left = {*range(len(inputs), len(numbers))} - {i for i, _ in outputs}
        for step in reversed(steps):
            step.last.extend(sorted(left.intersection((*step.reads, *step.writes))))
            left.difference_update(step.last)
        return cls(keys, steps, outputs, len(numbers))

    def save(self, path: str) -> None:
        Path(path).write_text(json.dumps(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The program; raises ValueError for what `save` has not written."""
        try:
            parts, steps, outputs, size = json.loads(text)
            return cls(parts, [Step(*step) for step in steps], outputs, size)
        except TypeError as error:
            raise ValueError("not a program") from error

    def link(self, parts: Sequence[Runnable]) -> Runnable:
        """The function of the graph's inputs that calls the compiled parts."""
        steps = [(parts[step.part], *step[1:]) for step in self.steps]
        outputs = [
            (i, [(_operation(name), args) for name, args in views]) for i, views in self.outputs
        ]
        count = self.size

        def run(*inputs: Tensor) -> list[Tensor]:
            tensors: list[Any] = [*inputs, *[None] * (count - len(inputs))]
            for part, reads, writes, last in steps:
                found = part(*[tensors[i] for i in reads])
                for i, x in zip(writes, found, strict=True):
                    tensors[i] = x
                del found
                x = None
                for i in last:
                    tensors[i] = None
            results = []
            for i, views in outputs:
                x = tensors[i]
                for view, args in views:
                    x = view(x, *args)
                results.append(x)
            return results

        return run


def _operation(name: str) -> Any:
    """An operation by its name in a graph, such as "aten.view.default"."""
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part)
    return found
