"""The tensors that a function reaches besides its arguments, as each call finds them.

A graph is captured with the tensors, modules and numbers that stood there then. What has been put in
a tensor's place since (a parameter made anew, a variable of the caller's) is found by the same ways
from the function, and taken where all of them agree; where a module is another one, or a number, the
length of a list, a hook or a mode, the function is captured anew.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from operator import itemgetter
from types import FunctionType
from typing import Any, Final
from weakref import ref

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from hoglib._core import pytree, torch_internals, validation
from hoglib._core.closures import Attributes, ClosureWalker, Edge, is_filled
from hoglib.capture import signature
from hoglib.errors import NoSecondDerivative

AGREES, ANY, MODULE, CODE, SIZED, TYPED = range(6)  # what is asked of what stands in a place
_hooks = itemgetter(
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
)
_GONE = (KeyError, IndexError, AttributeError, TypeError, ValueError)


class Guards:
    """Where tensors were found from a root, and what else has to be as it was there.

    Keeps nothing alive but tensors that no way leads to, which are constants.
    """

    def __init__(self, root: Any, tensors: list[Tensor], modules: list[nn.Module]) -> None:
        walk = ClosureWalker(root)
        edges = [*walk.edges, *_shortest(root, walk, [*tensors, *modules])]
        ran = {walk.places[id(x)] for x in modules if id(x) in walk.places}
        wanted = [walk.places[id(x)] for x in tensors if id(x) in walk.places]
        facts = [*walk.facts, *((i, _mode, _mode(walk.objects[i])) for i in ran)]
        needed = _on_the_way([*wanted, *ran, *(holder for holder, _, _ in facts)], edges)
        numbers = {0: 0}
        self._steps: list[tuple[int, Any, int, int, Any]] = []
        for holder, step, held in edges:
            if held in needed and holder in needed:
                value = walk.objects[held]
                asked = (AGREES, None) if held in numbers else _asked(value, held in ran)
                number = numbers.setdefault(held, len(numbers))
                self._steps.append((numbers[holder], step, number, *asked))
        self._facts = [(numbers[holder], step, value) for holder, step, value in facts]
        self._count = len(numbers)
        self._places = [numbers.get(walk.places.get(id(x), -1)) for x in tensors]
        self._constants = [
            x if place is None else None for x, place in zip(tensors, self._places, strict=True)
        ]
        self._loose = [(ref(x), _mode(x)) for x in modules if id(x) not in walk.places]
        self.kinds: Final = [signature.of_tensor(x) for x in tensors]

    def now(self, root: Any) -> list[Tensor] | None:
        """The tensors as they are now; None where something else has changed."""
        try:
            at = self._found(root)
        except _GONE:
            return None
        if at is None:
            return None
        found: list[Any] = [
            constant if place is None else at[place]
            for place, constant in zip(self._places, self._constants, strict=True)
        ]
        for tensor, kind in zip(found, self.kinds, strict=True):
            if not isinstance(tensor, Tensor) or signature.of_tensor(tensor) != kind:
                return None
        return found

    def after(
        self, what: str, root: Any, tensors: list[Tensor], modules: list[nn.Module]
    ) -> "Guards":
        """The same once the function has run. Raises NoSecondDerivative where it put other tensors into
        the places of those that it reached."""
        again = Guards(root, tensors, modules)
        for tensor, before, now in zip(tensors, self._places, again._places, strict=True):
            if before is not None and now is None:
                raise NoSecondDerivative(
                    f"{what}: expected a function that leaves the tensors it reaches where they are, "
                    f"got one that puts another in the place of {validation.describe(tensor)} each "
                    "time that it runs; pass that tensor as an argument, and return the new one."
                )
        return again

    def _found(self, root: Any) -> list[Any] | None:
        at: list[Any] = [None] * self._count
        at[0] = root
        for holder, step, place, asked, expected in self._steps:
            value = step(at[holder])
            if asked == AGREES:
                if value is not at[place]:
                    return None
            elif (
                (asked == MODULE and value is not expected())
                or (asked == CODE and value.__code__ is not expected)
                or (asked == TYPED and type(value) is not expected)
                or (asked == SIZED and (type(value), len(value)) != expected)
            ):
                return None
            at[place] = value
        for holder, step, expected in self._facts:
            value = step(at[holder])
            if value is not expected and not _same(value, expected):
                return None
        for module, mode in self._loose:
            one = module()
            if one is not None and _mode(one) != mode:
                return None
        return at


def _asked(value: Any, ran: bool) -> tuple[int, Any]:
    """What has to be so of what stands in a value's place at a later call."""
    if ran:
        return MODULE, ref(value)
    if isinstance(value, Tensor | Attributes):
        return ANY, None
    if isinstance(value, FunctionType):
        return CODE, value.__code__
    if isinstance(value, list | tuple | dict):
        return SIZED, (type(value), len(value))
    return TYPED, type(value)


def _on_the_way(wanted: Iterable[int], edges: list[Edge]) -> set[int]:
    """The places that a way to one of those wanted leads through."""
    holders: dict[int, list[int]] = {}
    for edge in edges:
        holders.setdefault(edge.held, []).append(edge.holder)
    found, left = {0}, list(wanted)
    while left:
        place = left.pop()
        if place not in found:
            found.add(place)
            left += holders.get(place, ())
    return found


def _shortest(root: Any, walk: ClosureWalker, wanted: list[Any]) -> list[Edge]:
    """Edges to what is reached, but by no name that any code reads: on the shortest way to each."""
    missing = [x for x in wanted if id(x) not in walk.places]
    if not missing:
        return []
    whole = ClosureWalker(root, everything=True)
    first: dict[int, Edge] = {}
    for edge in whole.edges:
        first.setdefault(edge.held, edge)
    found: list[Edge] = []
    for value in missing:
        way: list[Edge] = []
        place = whole.places.get(id(value), 0)
        while place:
            way.append(first[place])
            place = first[place].holder
        for edge in reversed(way):
            holder, held = whole.objects[edge.holder], whole.objects[edge.held]
            if id(held) not in walk.places:
                found.append(
                    Edge(walk.places[id(holder)] if edge.holder else 0, edge.step, walk.add(held))
                )
    return found


def _mode(module: nn.Module) -> int:
    """The mode of a module and how many hooks it has, as one number."""
    fields = module.__dict__
    if "training" not in fields:  # a scripted one
        return int(module.training)
    before, after, back, first = _hooks(fields)
    hooks = (
        len(before) + len(after) + len(back) + len(first) if before or after or back or first else 0
    )
    return 2 * hooks + fields["training"]


def _same(value: Any, expected: Any) -> bool:
    return type(value) is type(expected) and repr(value) == repr(expected) and value == expected


# === What a function leaves behind when it is traced, put back: tensors in attributes, lists and
# closures
# that have no values.


@contextmanager
def nothing_left(walk: ClosureWalker) -> Iterator[None]:
    """What is reached holds none of the trace's tensors afterwards, but what it held before.

    Modules that keep an output or an attention map, for someone to look at, keep the last one that was
    computed outside of a graph.
    """
    before = [(x.fields if isinstance(x, Attributes) else x) for x in walk.objects]
    dicts = [(x, dict(x)) for x in before if isinstance(x, dict)]
    lists = [(x, list(x)) for x in before if isinstance(x, list)]
    cells = [
        (cell, cell.cell_contents)
        for x in before
        if isinstance(x, FunctionType)
        for cell in x.__closure__ or ()
        if is_filled(cell)
    ]
    grads = [(x, x.grad) for x in before if isinstance(x, Tensor) and x.is_leaf]
    try:
        yield
    finally:
        for fields, was in dicts:
            for name in [name for name, value in fields.items() if _is_traced(value)]:
                if name in was:
                    fields[name] = was[name]
                else:
                    del fields[name]
        for items, had in lists:
            if any(map(_is_traced, items)):
                items[:] = had
        for cell, contents in cells:
            if is_filled(cell) and _is_traced(cell.cell_contents):
                cell.cell_contents = contents
        for tensor, grad in grads:
            if isinstance(tensor.grad, FakeTensor):
                tensor.grad = grad


def _is_traced(value: Any) -> bool:
    return any(
        isinstance(torch_internals.unwrap(x), FakeTensor)
        for x in pytree.leaves(value)
        if isinstance(x, Tensor)
    )
