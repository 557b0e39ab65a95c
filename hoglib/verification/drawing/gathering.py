"""The nodes and tensors of a graph become parts of a picture, each once, in the order of the walk."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from hoglib import _functorch
from hoglib._graph import nodes
from hoglib.verification._call import is_part
from hoglib.verification.drawing import kept
from hoglib.verification.drawing.parts import Part, Parts
from hoglib.verification.drawing.spans import ModuleCalls


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
        new = [node for node in nodes(values) if node not in self._keys]
        for node in reversed(new):
            if hasattr(node, "variable"):
                self._keys[node] = self._of_leaf(node.variable, order)
                continue
            function = _functorch.custom_function(node)
            kind, name = "operation", _operation(node)
            if function is not None:
                name = function.__qualname__.rpartition(".")[2]
                if not is_part(function):
                    kind, name = "function", self._numbered(name)
            shapes = _functorch.output_shapes(node)
            part = Part(kind, name, _shapes(shapes), order, self._made_in(node))
            self._keys[node] = self.found.add(part)
            self.operations.append(node)
        for node in reversed(new):
            for parent, _ in node.next_functions:
                if parent is not None and not hasattr(node, "variable"):
                    self.found.join(self._keys[parent], self._keys[node])

    def _made_in(self, node: Any) -> tuple[str, ...]:
        """The calls of modules that it belongs to, and the custom Function whose backward made it."""
        function = ""
        while (by := _functorch.made_by(node)) is not None:
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

    def keep(self, key: str, slot: kept.Slot, label: str) -> None:
        """A tensor that a node keeps for its backward."""
        x, order = slot.tensor, self.found.parts[key].order
        if x.requires_grad:
            start = self._producer(x)
            if start is not None and start != key:
                self.found.join(start, key, "saved", label)
            return
        ident, name = kept.identity(x), kept.name_of(x, self._constants)
        by_users = bool(label) or any("made in " in place for place in self.found.parts[key].inside)
        if not (name or by_users or ident in self._kept):
            return  # of torch's own operations only what a user knows
        name = name or "constant"
        part = Part("constant", name, _shapes([x.shape]), order, self.found.parts[key].inside)
        if ident not in self._kept:
            self._alive.append(x)
            self._kept[ident] = self.found.add(part)
        self.found.join(self._kept[ident], key, "saved", label)

    def lose(self, key: str, slot: kept.Slot) -> None:
        """A tensor that a node keeps, and that has lost its graph."""
        part = self.found.parts[key]
        shape = _shapes([slot.tensor.shape])
        lost = Part("kept", slot.name, shape, part.order, part.inside, "no graph: made in forward")
        self._alive.append(slot.tensor)
        self._kept[kept.identity(slot.tensor)] = end = self.found.add(lost)
        self.found.join(end, key, "saved")


def _operation(node: Any) -> str:
    """What torch calls an operation; of one that has no derivative, whose backward it is."""
    name = str(node.name()).rpartition("::")[2]
    by = _functorch.made_by(node)
    if name == "NotImplemented" and by is not None:
        return f"{_operation(by)}Backward"
    return name.rstrip("0123456789").removesuffix("Backward") or name


def _shapes(shapes: Sequence[Sequence[int]]) -> str:
    return ", ".join(str(tuple(shape)) for shape in shapes[:3]) + (", ..." if shapes[3:] else "")
