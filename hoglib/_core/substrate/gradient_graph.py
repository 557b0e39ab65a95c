"""The autograd graph of a tensor: a walk over its nodes finds leaves and custom Functions.

    graph = graph_summary(value)
    check_custom_functions(graph, "hvp")      # refuses Functions without a second derivative
    grads = torch.autograd.grad(value, leaves, create_graph=True)

A walk takes time for each node: callers make one summary and pass it on.
"""

from collections.abc import Iterable, Iterator, Set
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import BackwardCFunction

from hoglib._core.runtime.ambient import AMBIENT
from hoglib._core.torch_api import torch_internals
from hoglib._core.torch_api.mixed_precision import HALF_DTYPES
from hoglib._core.torch_api.pytree import is_float
from hoglib._core.torch_api.torch_modes import without_stand_ins
from hoglib.errors import NoSecondDerivative

# torch's next_functions: (node, index of its output), and (None, 0) for an input without a graph
Parents = tuple[tuple[Any, int], ...]


class FunctionNode(NamedTuple):
    """A node with a backward in Python.

    node: The node of the graph.
    function: The node's custom Function; None for code compiled by torch.compile.
    """

    node: Any
    function: type[Function] | None

    @property
    def by_user(self) -> bool:
        """Whether the Function is the user's, not torch's or hoglib's."""
        function = self.function
        return function is not None and not function.__module__.startswith(("torch.", "hoglib."))

    @property
    def is_compiled(self) -> bool:
        """Whether torch.compile made the node; its backward has no derivative."""
        return type(self.node).__name__ == "CompiledFunctionBackward"


class GraphSummary(NamedTuple):
    """The leaves and custom Functions in the graphs of tensors.

    leaves: The leaves that require grad, by id.
    functions: The nodes with a backward in Python.
    cpp_functions: The names of custom Functions in C++.
    """

    leaves: dict[int, Tensor]
    functions: list[FunctionNode]
    cpp_functions: set[str]

    @property
    def user_functions(self) -> list[FunctionNode]:
        """The nodes of the user's custom Functions."""
        return [entry for entry in self.functions if entry.by_user]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the custom Functions."""
        if not (self.functions or self.cpp_functions):  # as most have none
            return ()
        own = {getattr(entry.function, "__qualname__", "") for entry in self.functions}
        return tuple(sorted(own | self.cpp_functions))

    @property
    def has_compiled_code(self) -> bool:
        return any(entry.is_compiled for entry in self.functions)

    @property
    def has_user_code(self) -> bool:
        """Whether the graph has a custom Function of the user, or code compiled by torch.compile."""
        return any(entry.by_user or entry.is_compiled for entry in self.functions)

    @property
    def needs_stand_ins(self) -> bool:
        """Whether a backward runs Python that may call a torch function with a stand-in."""
        return any(getattr(entry.function, "runs_user_code", True) for entry in self.functions)

    def backward_modes(self) -> AbstractContextManager[object]:
        """A context for a backward: without stand-ins, unless a node needs them. Under the stand-ins'
        mode each torch call, also x.shape, takes a microsecond longer."""
        needed = self.functions and self.needs_stand_ins
        return nullcontext() if needed else without_stand_ins()

    def reached(self, tensors: Iterable[Tensor]) -> list[int]:
        """The indices of the tensors among the leaves of the graph."""
        return [i for i, tensor in enumerate(tensors) if id(tensor) in self.leaves]


def graph_summary(values: Tensor | Iterable[Any], since: Iterable[Tensor] = ()) -> GraphSummary:
    """The leaves and custom Functions in the graphs of tensors, back to the tensors in `since`."""
    leaves, functions, cpp_functions = {}, [], set()
    for node, parents in walk([values] if isinstance(values, Tensor) else values, since):
        if not parents:
            # `_leaf_of`, inlined: a call for each node costs time
            leaf = node if type(node).__name__ == "Error" else getattr(node, "variable", None)
            if leaf is not None:
                leaves[id(leaf)] = leaf
        elif isinstance(node, BackwardCFunction):
            functions.append(FunctionNode(node, torch_internals.custom_function(node)))
        # the type is compared here, because a call for each node takes longer than the walk
        elif type(node).__name__ == "CppFunction" and (name := torch_internals.cpp_function(node)):
            cpp_functions.add(name)
    if cpp_functions and (examiner := AMBIENT.examination.examiner) is not None:
        examiner.note_cpp(cpp_functions)
    return GraphSummary(leaves, functions, cpp_functions)


def walk(
    outputs: Iterable[Any], since: Iterable[Tensor] = (), until: Set[int] = frozenset()
) -> list[tuple[Any, Parents]]:
    """Each node in the graphs of the tensors among the outputs, with its next_functions.

    since: The walk does not enter the nodes of these tensors.
    until: Ids of leaf tensors; the walk ends when it meets one.
    """
    pending: list[Any] = [y.grad_fn for y in outputs if isinstance(y, Tensor)]
    # None stands in next_functions for inputs without a graph
    seen: set[Any] = {None, *[x.grad_fn for x in since]} if since else {None}
    found = []
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        parents = node.next_functions
        found.append((node, parents))
        if until and not parents and id(_leaf_of(node)) in until:
            break
        for parent, _ in parents:
            if parent not in seen:
                pending.append(parent)
    return found


def leaf_tensors(outputs: Iterable[Any], since: Iterable[Tensor] = ()) -> list[Tensor]:
    """The leaf tensors of the graphs."""
    ends = [_leaf_of(node) for node, parents in walk(outputs, since) if not parents]
    return [leaf for leaf in ends if leaf is not None]


def _leaf_of(node: object) -> Any:
    """The leaf tensor of a node without parents, or None. While torch.compile traces, an input's graph
    ends in an `Error` node, which is returned itself: it stands for a tensor outside."""
    return node if type(node).__name__ == "Error" else getattr(node, "variable", None)


def half_dtypes(outputs: Iterable[Any]) -> set[torch.dtype]:
    """The half-precision dtypes of operations in the graphs of the outputs."""
    found = (dtype for node, _ in walk(outputs) for dtype in torch_internals.output_dtypes(node))
    return {dtype for dtype in found if dtype in HALF_DTYPES}


def depends_on_any(value: Tensor, leaves: Iterable[Tensor]) -> bool:
    """Whether the graph of a value contains one of the leaf tensors."""
    wanted = {*map(id, leaves)}
    found = walk([value], until=wanted)
    return bool(found) and id(_leaf_of(found[-1][0])) in wanted


def graph_bytes(values: Iterable[Tensor]) -> int:
    """The approximate memory of graphs: the bytes of all outputs of their operations."""
    return sum(torch_internals.output_bytes(node) for node, _ in walk(values))


def check_custom_functions(graph: GraphSummary, what: str) -> None:
    """Raises NoSecondDerivative for custom Functions with an `@once_differentiable` backward."""
    for _, function in graph.user_functions:
        assert function is not None
        name = function.__qualname__
        if torch_internals.is_once_differentiable(function):
            raise NoSecondDerivative(
                f"{what}: expected Functions that can be differentiated twice, got {name}, whose "
                "backward is @once_differentiable: the second derivative through it is zero, without "
                "an error. Remove the decorator, and compute backward by differentiable torch "
                f"operations from the saved inputs and outputs; `hoglib.verify({name}, inputs)` "
                "checks it."
            )


def saved_tensors(node: Any, *, unpack: bool = True) -> Iterator[tuple[str, Tensor]]:
    """The floating-point and complex tensors that the node of a custom Function keeps, by name.

    unpack: Also unpack tensors with saved-tensor hooks; a checkpoint then recomputes.
    """
    if unpack or not torch_internals.has_saved_by_hooks(node):
        with suppress(RuntimeError):  # the graph was freed, or a saved tensor was changed in place
            for k, tensor in enumerate(node.saved_tensors):
                if is_float(tensor):
                    yield f"ctx.saved_tensors[{k}]", tensor
    for name, value in vars(node).items():
        if is_float(value):
            yield f"ctx.{name}", value
