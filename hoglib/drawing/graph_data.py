"""A graph as plain data, without tensors or autograd nodes, and the builder that fills it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from hoglib._core import pytree, torch_internals
from hoglib._core.gradient_graph import all_inputs_require_grad, saved_tensors, walk
from hoglib._core.module_names import ModuleNames
from hoglib._core.pytree import is_float
from hoglib._core.swap import ModulePatch, swap_parameters
from hoglib.verification.call import is_part


@final
@dataclass
class Node:
    """A node of the picture: an operation, a tensor, or a fault."""

    kind: str  # a key of `dot.KINDS`
    name: str
    shape: str = ""
    order: int = 1  # 1: the graph of the forward pass, 2: that of the gradient, ...
    inside: tuple[str, ...] = ()  # the modules, or the backward, that made it; outermost first
    fault: str = ""  # what is wrong with it


class Edge(NamedTuple):
    """From the node that makes a value to the one that takes it."""

    start: str
    end: str
    kind: str = "flow"  # or "saved", or "detached"
    label: str = ""


@final
@dataclass
class GraphData:
    """The nodes and edges to draw, in the order in which they were added, and sentences about
    faults."""

    name: str
    order: int
    nodes: dict[str, Node] = field(default_factory=dict)
    edges: dict[tuple[str, str], Edge] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def add(self, node: Node) -> str:
        """Add a node; its key."""
        key = f"n{len(self.nodes)}"
        self.nodes[key] = node
        return key

    def connect(self, start: str, end: str, kind: str = "flow", label: str = "") -> None:
        """Add an edge; everything that goes from one node to another shares one."""
        known = self.edges.get((start, end))
        if known is None or label:
            kind = kind if known is None else known.kind
            self.edges[start, end] = Edge(start, end, kind, label)


@final
class GraphBuilder:
    """Adds autograd nodes and tensors to `data`, each once, in the order of the walk.

    `operations` are the autograd nodes of operations that were added.
    """

    def __init__(self, data: GraphData, modules: "ModuleCalls", constants: dict[str, Any]) -> None:
        self.data, self._modules, self._constants = data, modules, constants
        self.operations: list[Any] = []
        self._parameter_names = modules.parameters()
        self._keys: dict[Any, str] = {}  # by autograd node
        self._leaves: dict[int, str] = {}  # keys of leaf tensors, by id
        self._saved: dict[Any, str] = {}  # keys of saved tensors without a graph
        self._alive: list[Any] = []  # tensors whose ids are keys
        self._counts: dict[str, int] = {}

    def knows(self, grad_fn: Any) -> bool:
        """Whether an autograd node was added."""
        return grad_fn in self._keys

    def key(self, grad_fn: Any) -> str:
        """The key of the node of an autograd node."""
        return self._keys[grad_fn]

    def node(self, grad_fn: Any) -> Node:
        """The node of an autograd node."""
        return self.data.nodes[self._keys[grad_fn]]

    def add_graph(self, values: Sequence[Tensor], order: int) -> None:
        """Add the autograd nodes that values were computed by, but for those added before."""
        new = [(grad_fn, parents) for grad_fn, parents in walk(values) if grad_fn not in self._keys]
        for grad_fn, _ in reversed(new):
            if hasattr(grad_fn, "variable"):
                self._keys[grad_fn] = self._add_unnamed_leaf(grad_fn.variable, order)
                continue
            function = torch_internals.custom_function(grad_fn)
            kind, name = "operation", _operation_name(grad_fn)
            if function is not None:
                name = function.__qualname__.rpartition(".")[2]
                if not is_part(function):
                    kind, name = "function", self._numbered(name)
            shapes = _shape_text(torch_internals.output_shapes(grad_fn))
            node = Node(kind, name, shapes, order, self._boxes(grad_fn))
            self._keys[grad_fn] = self.data.add(node)
            self.operations.append(grad_fn)
        for grad_fn, parents in reversed(new):
            for parent, _ in parents:
                if parent is not None and not hasattr(grad_fn, "variable"):
                    self.data.connect(self._keys[parent], self._keys[grad_fn])

    def _boxes(self, grad_fn: Any) -> tuple[str, ...]:
        """The module calls that contain it, and the custom Function whose backward made it."""
        function = ""
        while (maker := torch_internals.made_by(grad_fn)) is not None:
            key = self._keys.get(maker)
            if not function and key is not None and self.data.nodes[key].kind == "function":
                function = self.data.nodes[key].name
            grad_fn = maker
        path = self._modules.path(grad_fn)
        return (*path, f"made in {function}.backward") if function else path

    def _numbered(self, name: str) -> str:
        self._counts[name] = self._counts.get(name, 0) + 1
        return name if self._counts[name] == 1 else f"{name} #{self._counts[name]}"

    def _add_unnamed_leaf(self, x: Tensor, order: int) -> str:
        name = self._parameter_names.get(id(x))
        kind = "parameter" if name else "leaf"
        return self.add_leaf(x, kind, name or "a tensor not in inputs", order)

    def add_leaf(self, x: Tensor, kind: str, name: str, order: int = 1) -> str:
        """Add a tensor that a graph starts from; its key."""
        if id(x) not in self._leaves:
            self._alive.append(x)
            self._leaves[id(x)] = self.data.add(Node(kind, name, _shape_text([x.shape]), order))
        return self._leaves[id(x)]

    def add_result(self, kind: str, name: str, y: Tensor, order: int) -> None:
        """Add an output or a gradient."""
        node = Node(kind, name, _shape_text([y.shape]), order)
        key, start = self.data.add(node), self._producer(y)
        if start is not None:
            self.data.connect(start, key)
        elif kind == "output":
            node.fault = "no graph"
        elif not bool(y.any()):
            node.name += " (zero)"

    def _producer(self, x: Tensor) -> str | None:
        return self._leaves.get(id(x)) if x.grad_fn is None else self._keys.get(x.grad_fn)

    def add_saved(self, key: str, saved: "SavedTensor", label: str) -> None:
        """Add a tensor that a node saves for its backward."""
        x, node = saved.tensor, self.data.nodes[key]
        if x.requires_grad:
            start = self._producer(x)
            if start is not None and start != key:
                self.data.connect(start, key, "saved", label)
            return
        memory = _memory(x)
        name = next(
            (n for n, y in self._constants.items() if is_float(y) and same_memory(x, y)), ""
        )
        by_user = bool(label) or any("made in " in box for box in node.inside)
        if not (name or by_user or memory in self._saved):
            return  # what torch's own operations save is drawn only if the user knows it
        constant = Node(
            "constant", name or "constant", _shape_text([x.shape]), node.order, node.inside
        )
        if memory not in self._saved:
            self._alive.append(x)
            self._saved[memory] = self.data.add(constant)
        self.data.connect(self._saved[memory], key, "saved", label)

    def add_detached(self, key: str, saved: "SavedTensor") -> None:
        """Add a tensor that a node saves, and that is detached from the graph of forward."""
        node, shape = self.data.nodes[key], _shape_text([saved.tensor.shape])
        fault = "no graph: made in forward"
        added = Node("intermediate", saved.name, shape, node.order, node.inside, fault)
        self._alive.append(saved.tensor)
        self._saved[_memory(saved.tensor)] = end = self.data.add(added)
        self.data.connect(end, key, "saved")


def _operation_name(grad_fn: Any) -> str:
    """torch's name of an operation; for one without a derivative, whose backward it is."""
    name = str(grad_fn.name()).rpartition("::")[2]
    maker = torch_internals.made_by(grad_fn)
    if name == "NotImplemented" and maker is not None:
        return f"{_operation_name(maker)}Backward"
    return name.rstrip("0123456789").removesuffix("Backward") or name


def _shape_text(shapes: Sequence[Sequence[int]]) -> str:
    return ", ".join(str(tuple(shape)) for shape in shapes[:3]) + (", ..." if shapes[3:] else "")


class SavedTensor(NamedTuple):
    """A tensor that an autograd node saves for its backward."""

    name: str
    tensor: Tensor
    detached: bool  # made in forward, neither input nor output: a constant to the second derivative


def saved_by_function(
    grad_fn: Any, function: type[Function], arguments: "FunctionArguments"
) -> Iterator[SavedTensor]:
    """What a custom Function saves: by save_for_backward, and as attributes of ctx."""
    # An input without a graph is not detached. Where Functions were applied in other threads their
    # inputs are unknown, unless all of them require grad.
    certain = arguments.known(function) or all_inputs_require_grad(grad_fn)
    for name, x in saved_tensors(grad_fn, unpack=False):
        no_graph = not x.requires_grad and not arguments.contain(function, x)
        yield SavedTensor(name, x, no_graph and certain)


def saved_by_operation(grad_fn: Any) -> Iterator[SavedTensor]:
    """What one of torch's own operations saves, but for results without a graph."""
    for name in torch_internals.saved_names(grad_fn):
        try:
            value = getattr(grad_fn, f"_saved_{name}")
        except RuntimeError:
            continue
        for x in value if isinstance(value, list | tuple) else [value]:
            if is_float(x) and (x.requires_grad or not name.startswith("result")):
                yield SavedTensor(name, x, False)


@final
class FunctionArguments:
    """The floating-point tensors that custom Functions were applied to."""

    def __init__(self) -> None:
        self._args: dict[type[Function], list[Tensor]] = {}

    def record(self, function: type[Function], args: tuple[Any, ...]) -> None:
        """Called where a Function is applied."""
        self._args.setdefault(function, []).extend(x for x in pytree.leaves(args) if is_float(x))

    def known(self, function: type[Function]) -> bool:
        """Whether an application of the Function was recorded."""
        return function in self._args

    def contain(self, function: type[Function], x: Tensor) -> bool:
        """Whether x is an argument of the Function."""
        return any(same_memory(x, arg) for arg in self._args.get(function, ()))


def same_memory(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors hold the same numbers in the same memory."""
    return x is y or _memory(x) == _memory(y)


def _memory(x: Tensor) -> tuple[int, tuple[int, ...]]:
    """Equal for two tensors in the same memory, while both are alive."""
    try:
        return x.data_ptr() or id(x), tuple(x.shape)
    except RuntimeError:  # sparse, or without a storage
        return id(x), tuple(x.shape)


CALL = ", call "  # between a module and the number of its call


@final
class ModuleCalls:
    """Every call of a module inside `recording()`, as the span of the autograd nodes that it made.

    A thread numbers its autograd nodes in order, so that those of a call are the ones from its begin to
    its end, and calls nest. Modules have the names that they have in the modules that fn is, calls or
    closes over.
    """

    def __init__(self, fn: Any) -> None:
        self._names = ModuleNames(fn, always=True)
        self._counts: dict[str, int] = {}
        self._open: list[tuple[int, str]] = []
        self._spans: list[tuple[int, int, str]] = []

    @contextmanager
    def recording(self, patch: ModulePatch) -> Iterator[None]:
        """Inside, calls are recorded. A model that fn closes over gets copies of its buffers until the
        end of `patch`, so that its running statistics do not change."""

        def before(module: nn.Module, args: Any) -> None:
            self._names.add(module)
            if not self._open and not patch.in_use(module):
                with swap_parameters(module, {}):  # until the end of patch
                    pass
            self._open.append((torch_internals.sequence_number(), self._label(module)))

        def after(module: nn.Module, args: Any, output: Any) -> None:
            start, label = self._open.pop()
            self._spans.append((start, torch_internals.sequence_number(), label))

        handles = [
            register_module_forward_pre_hook(before),
            register_module_forward_hook(after, always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        self._spans.sort(key=lambda span: (span[0], -span[1]))

    def path(self, grad_fn: Any) -> tuple[str, ...]:
        """The module calls that an autograd node was made in, outermost first."""
        number = torch_internals.sequence_number(grad_fn)
        inside = [label for start, end, label in self._spans if start <= number < end]
        return tuple(label for label in inside if label)

    def parameters(self) -> dict[int, str]:
        """Names of the parameters and buffers of all modules, by id."""
        roots = reversed([*zip(self._names.prefixes, self._names.roots, strict=True)])
        return {id(x): name for prefix, root in roots for name, x in _named_tensors(root, prefix)}

    def _label(self, module: nn.Module) -> str:
        """The label of its box; empty for the model itself, which needs no box."""
        name, kind = self._names.of(module), type(module).__name__
        if not name:
            return ""
        label = f"{name} ({kind})" if name != kind else kind
        self._counts[label] = self._counts.get(label, 0) + 1
        return label if self._counts[label] == 1 else f"{label}{CALL}{self._counts[label]}"


def _named_tensors(root: nn.Module, prefix: str) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in [*root.named_parameters(), *root.named_buffers()]:
        yield ".".join(part for part in (prefix, name) if part), tensor
