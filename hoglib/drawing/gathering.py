"""A graph as plain data, without a tensor or a node of autograd: what a picture is drawn from."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from hoglib._core import pytree, torch_internals
from hoglib._core.gradient_graph import all_inputs_require_grad, saved_tensors, walk
from hoglib._core.module_names import ModuleNames
from hoglib._core.pytree import is_float
from hoglib._core.swap import ModulePatch, swap_parameters
from hoglib.verification.call import is_part


@dataclass
class Part:
    """A node of the picture: an operation, a tensor, or a fault."""

    kind: str  # of `_dot.KINDS`
    name: str
    shape: str = ""
    order: int = 1  # 1 for the forward's graph, 2 for the graph of the gradient, ...
    inside: tuple[str, ...] = ()  # the modules, or the backward, that made it; outermost first
    wrong: str = ""  # what is wrong with it


class Edge(NamedTuple):
    """From the part that makes a value to the one that takes it."""

    start: str
    end: str
    kind: str = "flow"  # or "saved", or "lost"
    label: str = ""


@dataclass
class Parts:
    """What there is to draw, in the order in which it was met, and sentences on what is wrong."""

    name: str
    order: int
    parts: dict[str, Part] = field(default_factory=dict)
    edges: dict[tuple[str, str], Edge] = field(default_factory=dict)
    cuts: list[str] = field(default_factory=list)

    def add(self, part: Part) -> str:
        key = f"n{len(self.parts)}"
        self.parts[key] = part
        return key

    def join(self, start: str, end: str, kind: str = "flow", label: str = "") -> None:
        """An edge; one edge for all that goes from here to there."""
        known = self.edges.get((start, end))
        if known is None or label:
            kind = kind if known is None else known.kind
            self.edges[start, end] = Edge(start, end, kind, label)


# === What the nodes of a graph keep for their backward, and whether that has a graph.


class Slot(NamedTuple):
    """A tensor that a node keeps."""

    name: str
    tensor: Tensor
    lost: bool  # made in forward, neither input nor output: a constant to the second derivative


class Applications:
    """The floating-point tensors that custom Functions were applied to."""

    def __init__(self) -> None:
        self._args: dict[type[Function], list[Tensor]] = {}

    def seen(self, function: type[Function], args: tuple[Any, ...]) -> None:
        self._args.setdefault(function, []).extend(x for x in pytree.leaves(args) if is_float(x))

    def knows(self, function: type[Function]) -> bool:
        return function in self._args

    def was_given(self, function: type[Function], x: Tensor) -> bool:
        return any(same_memory(x, arg) for arg in self._args.get(function, ()))


def by_custom(node: Any, function: type[Function], applications: Applications) -> Iterator[Slot]:
    """What a custom Function keeps: in save_for_backward, and as attributes of ctx."""
    # what came in without a graph is no loss; where Functions were applied in other threads it is
    # certain only if nothing did
    certain = applications.knows(function) or all_inputs_require_grad(node)
    for name, x in saved_tensors(node, unpack=False):
        bare = not x.requires_grad and not applications.was_given(function, x)
        yield Slot(name, x, bare and certain)


def by_torch(node: Any) -> Iterator[Slot]:
    """What one of torch's own operations keeps; results without a graph are its own business."""
    for name in torch_internals.saved_names(node):
        try:
            value = getattr(node, f"_saved_{name}")
        except RuntimeError:
            continue
        for x in value if isinstance(value, list | tuple) else [value]:
            if is_float(x) and (x.requires_grad or not name.startswith("result")):
                yield Slot(name, x, False)


def name_of(x: Tensor, named: Mapping[str, Any]) -> str:
    """Which of these a tensor is; empty for none of them."""
    return next((n for n, y in named.items() if is_float(y) and same_memory(x, y)), "")


def same_memory(x: Tensor, y: Tensor) -> bool:
    return x is y or identity(x) == identity(y)


def identity(x: Tensor) -> tuple[int, tuple[int, ...]]:
    """The same for two tensors that stand for the same numbers, while both are alive."""
    try:
        return x.data_ptr() or id(x), tuple(x.shape)
    except RuntimeError:  # sparse, or without a storage
        return id(x), tuple(x.shape)


# === Which module made a node: modules are seen by hooks while a function runs.


class ModuleCalls:
    """Every call of a module inside `seen()`, as the span of the nodes that were made in it.

    Nodes are numbered in the order in which a thread makes them, so those of a call are the ones from
    its begin to its end, and calls nest. Modules have the names that they have in the modules that fn
    is, calls or closes over.
    """

    def __init__(self, fn: Any) -> None:
        self._names = ModuleNames(fn, always=True)
        self._counts: dict[str, int] = {}
        self._open: list[tuple[int, str]] = []
        self._spans: list[tuple[int, int, str]] = []

    @contextmanager
    def seen(self, places: ModulePatch) -> Iterator[None]:
        """Inside, calls are noted; a model that fn brings along gets copies of its buffers, until the
        end of `places`, so that its statistics stay as they are."""

        def before(module: nn.Module, args: Any) -> None:
            self._names.add(module)
            if not self._open and not places.in_use(module):
                with swap_parameters(module, {}):  # for as long as places stand
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

    def path(self, node: Any) -> tuple[str, ...]:
        """The calls of modules that a node was made in, outermost first."""
        at = torch_internals.sequence_number(node)
        inside = [label for start, end, label in self._spans if start <= at < end]
        return tuple(label for label in inside if label)

    def parameters(self) -> dict[int, str]:
        """Names of the parameters and buffers of all modules that were met, by their ids."""
        roots = reversed([*zip(self._names.prefixes, self._names.roots, strict=True)])
        return {id(x): name for prefix, root in roots for name, x in _named_tensors(root, prefix)}

    def _label(self, module: nn.Module) -> str:
        """What its box says; nothing for the model itself, which is all there is."""
        name, kind = self._names.of(module), type(module).__name__
        if not name:
            return ""
        label = f"{name} ({kind})" if name != kind else kind
        self._counts[label] = self._counts.get(label, 0) + 1
        return label if self._counts[label] == 1 else f"{label}{CALL}{self._counts[label]}"


CALL = ", call "  # between a module and the number of its call


def _named_tensors(root: nn.Module, prefix: str) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in [*root.named_parameters(), *root.named_buffers()]:
        yield ".".join(part for part in (prefix, name) if part), tensor


# === The nodes and tensors of a graph become parts of a picture, each once, in the order of the
# walk.


class Gathering:
    """Fills `found` with parts and edges. `operations` are the nodes of operations that have a part."""

    def __init__(self, found: Parts, modules: ModuleCalls, constants: dict[str, Any]) -> None:
        self.found, self._modules, self._constants = found, modules, constants
        self.operations: list[Any] = []
        self._own = modules.parameters()
        self._keys: dict[Any, str] = {}  # of nodes
        self._leaves: dict[int, str] = {}  # of leaf tensors, by their ids
        self._kept: dict[Any, str] = {}  # of tensors without a graph
        self._alive: list[Any] = []  # while their ids are keys
        self._counts: dict[str, int] = {}

    def knows(self, node: Any) -> bool:
        return node in self._keys

    def key(self, node: Any) -> str:
        return self._keys[node]

    def part(self, node: Any) -> Part:
        return self.found.parts[self._keys[node]]

    def graph(self, values: Sequence[Tensor], order: int) -> None:
        """The nodes that values were computed by, and that have no part yet."""
        new = [(node, parents) for node, parents in walk(values) if node not in self._keys]
        for node, _ in reversed(new):
            if hasattr(node, "variable"):
                self._keys[node] = self._of_leaf(node.variable, order)
                continue
            function = torch_internals.custom_function(node)
            kind, name = "operation", _operation(node)
            if function is not None:
                name = function.__qualname__.rpartition(".")[2]
                if not is_part(function):
                    kind, name = "function", self._numbered(name)
            shapes = torch_internals.output_shapes(node)
            part = Part(kind, name, _shapes(shapes), order, self._made_in(node))
            self._keys[node] = self.found.add(part)
            self.operations.append(node)
        for node, parents in reversed(new):
            for parent, _ in parents:
                if parent is not None and not hasattr(node, "variable"):
                    self.found.join(self._keys[parent], self._keys[node])

    def _made_in(self, node: Any) -> tuple[str, ...]:
        """The calls of modules that it belongs to, and the custom Function whose backward made it."""
        function = ""
        while (by := torch_internals.made_by(node)) is not None:
            key = self._keys.get(by)
            if not function and key is not None and self.found.parts[key].kind == "function":
                function = self.found.parts[key].name
            node = by
        path = self._modules.path(node)
        return (*path, f"made in {function}.backward") if function else path

    def _numbered(self, name: str) -> str:
        self._counts[name] = self._counts.get(name, 0) + 1
        return name if self._counts[name] == 1 else f"{name} #{self._counts[name]}"

    def _of_leaf(self, x: Tensor, order: int) -> str:
        name = self._own.get(id(x))
        kind = "parameter" if name else "leaf"
        return self.leaf(x, kind, name or "a tensor not in inputs", order)

    def leaf(self, x: Tensor, kind: str, name: str, order: int = 1) -> str:
        """A tensor that a graph begins with; its key."""
        if id(x) not in self._leaves:
            self._alive.append(x)
            self._leaves[id(x)] = self.found.add(Part(kind, name, _shapes([x.shape]), order))
        return self._leaves[id(x)]

    def end(self, kind: str, name: str, y: Tensor, order: int) -> None:
        """A tensor that is a result."""
        part = Part(kind, name, _shapes([y.shape]), order)
        key, start = self.found.add(part), self._producer(y)
        if start is not None:
            self.found.join(start, key)
        elif kind == "output":
            part.wrong = "no graph"
        elif not bool(y.any()):
            part.name += " (zero)"

    def _producer(self, x: Tensor) -> str | None:
        return self._leaves.get(id(x)) if x.grad_fn is None else self._keys.get(x.grad_fn)

    def keep(self, key: str, slot: Slot, label: str) -> None:
        """A tensor that a node keeps for its backward."""
        x, order = slot.tensor, self.found.parts[key].order
        if x.requires_grad:
            start = self._producer(x)
            if start is not None and start != key:
                self.found.join(start, key, "saved", label)
            return
        ident, name = identity(x), name_of(x, self._constants)
        by_users = bool(label) or any("made in " in place for place in self.found.parts[key].inside)
        if not (name or by_users or ident in self._kept):
            return  # of torch's own operations only what a user knows
        name = name or "constant"
        part = Part("constant", name, _shapes([x.shape]), order, self.found.parts[key].inside)
        if ident not in self._kept:
            self._alive.append(x)
            self._kept[ident] = self.found.add(part)
        self.found.join(self._kept[ident], key, "saved", label)

    def lose(self, key: str, slot: Slot) -> None:
        """A tensor that a node keeps, and that has lost its graph."""
        part = self.found.parts[key]
        shape = _shapes([slot.tensor.shape])
        lost = Part("kept", slot.name, shape, part.order, part.inside, "no graph: made in forward")
        self._alive.append(slot.tensor)
        self._kept[identity(slot.tensor)] = end = self.found.add(lost)
        self.found.join(end, key, "saved")


def _operation(node: Any) -> str:
    """What torch calls an operation; of one that has no derivative, whose backward it is."""
    name = str(node.name()).rpartition("::")[2]
    by = torch_internals.made_by(node)
    if name == "NotImplemented" and by is not None:
        return f"{_operation(by)}Backward"
    return name.rstrip("0123456789").removesuffix("Backward") or name


def _shapes(shapes: Sequence[Sequence[int]]) -> str:
    return ", ".join(str(tuple(shape)) for shape in shapes[:3]) + (", ..." if shapes[3:] else "")
