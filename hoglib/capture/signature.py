"""The calls that run one graph: calls with one signature, while the graph's guards hold.

A signature contains the arguments without the values of their tensors. A graph also depends on the
tensors, modules and numbers that the function reached when it was captured. Later calls follow these
paths from the function again (closures, attributes, items). If all paths to a tensor lead to another
tensor, such as a new parameter, the call uses the new one. If a module, a number, the length of a list,
a hook or a mode differs, a guard fails, and the function is captured again.
"""

from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from operator import itemgetter
from types import FunctionType
from typing import Any, Final, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn

from hoglib._core.messages import validation
from hoglib._core.messages.closures import (
    ALL,
    Attributes,
    ClosureWalker,
    Edge,
    is_filled,
    is_plain,
    stored_items,
)
from hoglib._core.torch_api import pytree, torch_internals
from hoglib._core.torch_api.torch_modes import ActiveStandIns, AutocastState
from hoglib._core.torch_api.torch_private import private
from hoglib.capture import signature
from hoglib.errors import ArgumentTypeError, NoSecondDerivative, UnsupportedError

FakeTensor: Any = private("torch._subclasses.fake_tensor.FakeTensor")

_COMPLEX = {torch.complex32, torch.complex64, torch.complex128}


class TensorSlot:
    """Stands for the tensor with this index, in a call or an output."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


class CallSignature(NamedTuple):
    """A call without its tensors: structure and constants of its arguments, and its context.

    Two calls run one graph if their ``key`` is equal and the guards of the graph hold.

    key: Everything that the graph depends on, except objects that the function reaches.
    constants: The arguments that are no tensors.
    leaves: The arguments; a TensorSlot in the place of a tensor.
    structure: Of the arguments, from `pytree.flatten`.
    autocast: The active autocast at the call.
    stand_ins: The active modes at the call.
    """

    key: Hashable
    constants: list[Any]
    leaves: list[Any]
    structure: Any
    autocast: AutocastState
    stand_ins: ActiveStandIns

    def fill(self, tensors: list[Tensor]) -> tuple[Any, Any]:
        """(args, kwargs) with these tensors."""
        leaves = [tensors[x.index] if type(x) is TensorSlot else x for x in self.leaves]
        args, kwargs = pytree.unflatten(leaves, self.structure)
        return args, kwargs

    def describe(self, tensors: list[Tensor]) -> str:
        """dtypes and shapes of the arguments, in short."""
        parts = [
            _describe(tensors[x.index]) if type(x) is TensorSlot else repr(x) for x in self.leaves
        ]
        if len(parts) > 8:
            parts = [*parts[:7], f"... {len(parts)} in all"]
        return ", ".join(parts)

    @contextmanager
    def restored_context(self) -> Iterator[None]:
        """Inside, autocast and stand-ins are as around the call."""
        with self.autocast.restored(), self.stand_ins.resume():
            yield


def parse_call(
    what: str, args: tuple[Any, ...], kwargs: dict[str, Any] | None, dynamic: bool
) -> tuple[CallSignature, list[Tensor]]:
    """The signature of a call, and its tensors, each once."""
    leaves, structure = pytree.flatten((args, kwargs))
    tensors: list[Tensor] = []
    places: dict[int, TensorSlot] = {}
    slots, kinds, constants = [], [], []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            slot = places.get(id(leaf))
            if slot is None:
                slot = places[id(leaf)] = TensorSlot(len(tensors))
                tensors.append(leaf)
                check_dense(what, leaf, when=" before the call")
                kinds.append(tensor_key(leaf, dynamic))
            else:
                kinds.append(slot.index)  # a tensor that is passed twice is one variable
            slots.append(slot)
        else:
            kinds.append(_constant_key(what, leaf))
            constants.append(leaf)
            slots.append(leaf)
    autocast, stand_ins = AutocastState(), ActiveStandIns()
    modes = torch.is_grad_enabled(), torch.get_default_dtype(), torch_internals.default_device()
    key = tuple(kinds), structure, modes, autocast.key, stand_ins.active
    return CallSignature(key, constants, slots, structure, autocast, stand_ins), tensors


def tensor_key(tensor: Tensor, dynamic: bool = False) -> Hashable:
    """All properties of a tensor except its values."""
    shape: Hashable = tensor.shape
    if dynamic:  # sizes 0 and 1 are never symbolic
        shape = tuple(size if size < 2 else None for size in tensor.shape)
    dtype, layout = tensor.dtype, None
    # a contiguous real tensor has known strides, except if it has one element
    if dtype in _COMPLEX or not tensor.is_contiguous() or tensor.numel() == 1:
        layout = tensor.stride(), tensor.is_conj(), tensor.is_neg()
    return shape, dtype, tensor.device, tensor.requires_grad, layout


def check_dense(what: str, tensor: Tensor, got: str = "", when: str = "") -> None:
    """Raises UnsupportedError for a tensor that a graph cannot have as an input."""
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        raise UnsupportedError(
            f"{what}: expected dense tensors of torch's own class, got "
            f"{got}{validation.describe(tensor)} of class {type(tensor).__name__} and layout "
            f"{tensor.layout}. Convert it{when}, or do not compile."
        )


def _constant_key(what: str, leaf: object) -> Hashable:
    if is_plain(leaf):
        # repr distinguishes 0.0 from -0.0, and equals itself for nan
        return type(leaf), leaf, repr(leaf) if isinstance(leaf, float | complex) else None
    if isinstance(leaf, torch.Generator):  # it has no weak references in torch 2.11
        return type(leaf), id(leaf)
    try:
        hash(leaf)
        return type(leaf), ref(leaf)
    except TypeError:
        raise ArgumentTypeError(
            f"{what}: expected arguments of tensors, numbers, strings and containers of them, got "
            f"{validation.describe(leaf)}, which has no hash. Each other value of an argument needs "
            "another graph, so its values must be comparable. Pass tensors, or use it in a closure."
        ) from None


def _describe(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"


ANY, AGREES, MODULE, CODE, SIZED, TYPED = range(6)  # requirements of guards, see `_follow`
_hooks_and_mode = itemgetter(
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "training"
)
_GONE = (KeyError, IndexError, AttributeError, TypeError, ValueError)  # a path has ended


class Guards:
    """Paths from a root to tensors, and conditions on the objects on these paths.

    Tensors that no path leads to are constants. Guards keep no other objects alive.

    Attributes:
        kinds: `tensor_key` of each tensor.
    """

    def __init__(self, root: object, tensors: list[Tensor], modules: list[nn.Module]) -> None:
        walk = ClosureWalker(root)
        edges = [*walk.edges, *_shortest_paths(root, walk, [*tensors, *modules])]
        edges = _lasting_edges(edges, walk.objects)
        places = {id(walk.objects[i]): i for i in (0, *(edge.held for edge in edges))}
        ran = {places[id(x)] for x in modules if id(x) in places}
        wanted = [places[id(x)] for x in tensors if id(x) in places]
        known = {*places.values()}
        of_known = [x for x in walk.facts if x.holder in known]
        lasting = [x for x in of_known if _leads_to(walk.objects[x.holder], x.step, x.value)]
        facts = [*lasting, *((i, _module_mode, _module_mode(walk.objects[i])) for i in ran)]
        needed = _ancestors_of([*wanted, *ran, *(holder for holder, _, _ in facts)], edges)
        # index in the walk -> index in `_follow`, of needed objects in the order of their visits
        numbers = {0: 0}
        # (index of the holder, step, index of the value, requirement, argument of the requirement)
        self._steps: list[tuple[int, Any, int, int, Any]] = []
        for holder, step, held in edges:
            if held in needed and holder in needed:
                value = walk.objects[held]
                is_known = held in numbers
                required = (AGREES, None) if is_known else _guard_requirement(value, held in ran)
                number = numbers.setdefault(held, len(numbers))
                self._steps.append((numbers[holder], step, number, *required))
        self._facts = [(numbers[holder], step, value) for holder, step, value in facts]
        self._count = len(numbers)
        self._start: list[Any] = [None] * self._count  # objects to be found, followed by constants
        self._places: list[int] = []  # index of each tensor in `_start`
        for x in tensors:
            # a tensor that no path leads to becomes a constant
            number = numbers.get(places.get(id(x), -1), len(self._start))
            self._start += [x] if number == len(self._start) else []
            self._places.append(number)
        # modules that ran and that no path leads to, with their modes
        self._unreachable = [(ref(x), _module_mode(x)) for x in modules if id(x) not in places]
        self.kinds: Final = [signature.tensor_key(x) for x in tensors]
        self._all_match = torch_internals.tensor_check(tensors)

    def resolve(self, root: object) -> list[Tensor] | None:
        """The tensors that the root reaches now; None if a guard fails."""
        try:
            objects = self._follow(root)
        except (*_GONE, _ChangedError):
            return None
        found = [objects[place] for place in self._places]
        if self._all_match(*found):  # in C++; it also fails if only the thread's state differs
            return found
        for tensor, kind in zip(found, self.kinds, strict=True):
            if not isinstance(tensor, Tensor) or signature.tensor_key(tensor) != kind:
                return None
        return found

    def refresh(
        self, what: str, root: object, tensors: list[Tensor], modules: list[nn.Module]
    ) -> "Guards":
        """The guards after a run of the function. Raises NoSecondDerivative if the run replaced tensors
        that the function reaches."""
        again = Guards(root, tensors, modules)
        for tensor, before, now in zip(tensors, self._places, again._places, strict=True):
            if before < self._count and now >= again._count:
                raise NoSecondDerivative(
                    f"{what}: expected a function that does not replace the tensors that it reaches, "
                    f"got one that replaces {validation.describe(tensor)} by another tensor each time "
                    "it runs. Pass that tensor as an argument, and return the new one."
                )
        return again

    def explain(self, root: object) -> str:
        """The reason why `resolve` returns None."""
        try:
            self._follow(root)
        except _ChangedError as change:
            return str(change)
        except _GONE as error:
            return f"something that it reached is gone ({type(error).__name__}: {error})"
        return (
            "a tensor that it reaches has another shape, dtype, layout or requires_grad or is another "
            "argument too, or sizes are other than the graph assumes"
        )

    def _follow(self, root: object) -> list[Any]:
        """The objects on all paths; raises if a guard fails."""
        at = self._start.copy()
        at[0] = root
        for holder, step, place, requirement, expected in self._steps:
            value = step(at[holder])
            if requirement and (
                (requirement == AGREES and value is not at[place])
                or (requirement == MODULE and value is not expected())
                or (requirement == CODE and value.__code__ is not expected)
                or (requirement == TYPED and type(value) is not expected)
                or (requirement == SIZED and (type(value), stored_items(value)) != expected)
            ):
                raise _ChangedError(at[holder], step, value)
            at[place] = value
        for holder, step, expected in self._facts:
            value = step(at[holder])
            if value is not expected and not _same_value(value, expected):
                raise _ChangedError(at[holder], step, value, expected)
        for module, mode in self._unreachable:
            one = module()
            if one is not None and _module_mode(one) != mode:
                raise _ChangedError(one)
        return at


class _ChangedError(Exception):
    """A guard fails, with the arguments (module) for a module in another mode, or (holder, step, value
    now[, value before]). The text is made when it is read, because most failures only cause a
    capture."""

    def __str__(self) -> str:
        holder, *found = self.args
        if not found:
            return f"{type(holder).__name__} is in another mode, or has other hooks"
        step, value, *before = found
        parts = step.args if isinstance(step, partial) else step.__reduce__()[1]
        owner = getattr(holder, "__qualname__", type(holder).__name__)
        what = repr(value) if is_plain(value) else f"another {type(value).__name__}"
        was = f" instead of {before[0]!r}" if before else ""
        return f"`{'.'.join(map(str, parts))}` of {owner} is {what}{was}"


def _guard_requirement(value: object, ran: bool) -> tuple[int, Any]:
    """(requirement, argument) for the value that a path leads to at a later call."""
    if ran:
        return MODULE, ref(value)
    if isinstance(value, Tensor | Attributes):
        return ANY, None
    if isinstance(value, FunctionType):
        return CODE, value.__code__
    if isinstance(value, list | tuple | dict):
        return SIZED, (type(value), stored_items(value))
    return TYPED, type(value)


def _lasting_edges(edges: list[Edge], objects: list[Any]) -> list[Edge]:
    """The edges that can be followed from the root at each call, breadth-first.

    Steps that make a new object each time, such as ``__getitem__`` of some registries, are left out:
    a guard on such an object would always fail.
    """
    of_holder: dict[int, list[Edge]] = {}
    for edge in edges:
        if _leads_to(objects[edge.holder], edge.step, objects[edge.held]):
            of_holder.setdefault(edge.holder, []).append(edge)
    found: list[Edge] = []
    queue, seen = [0], {0}
    for holder in queue:
        for edge in of_holder.get(holder, ()):
            found.append(edge)
            if edge.held not in seen:
                seen.add(edge.held)
                queue.append(edge.held)
    return found


def _leads_to(holder: Any, step: Any, value: object) -> bool:
    try:
        now = step(_as_resolved(holder))
    except _GONE:
        return False
    return now is _as_resolved(value) or (is_plain(value) and _same_value(now, value))


def _as_resolved(value: object) -> Any:
    """The value of a step for an object of the traversal."""
    return value.fields if isinstance(value, Attributes) else value


def _ancestors_of(wanted: Iterable[int], edges: list[Edge]) -> set[int]:
    """The indices of the objects on paths to the wanted ones."""
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


def _shortest_paths(root: object, walk: ClosureWalker, wanted: list[Any]) -> list[Edge]:
    """Edges of the shortest paths to the wanted objects that no name in code leads to."""
    missing = [x for x in wanted if id(x) not in walk.places]
    if not missing:
        return []
    whole = ClosureWalker(root, ALL)
    first = {edge.held: edge for edge in reversed(whole.edges)}
    found: list[Edge] = []
    for value in missing:
        path: list[Edge] = []
        place = whole.places.get(id(value), 0)
        while place:
            path.append(first[place])
            place = first[place].holder
        for edge in reversed(path):
            holder, held = whole.objects[edge.holder], whole.objects[edge.held]
            if id(held) not in walk.places:
                place = walk.places[id(holder)] if edge.holder else 0
                found.append(Edge(place, edge.step, walk.add(held)))
    return found


def _module_mode(module: nn.Module) -> int:
    """The training mode of a module and the number of its hooks, as one integer."""
    try:
        before, after, back, first, training = _hooks_and_mode(module.__dict__)
    except KeyError:  # a scripted module
        return int(module.training)
    if before or after or back or first:
        return 2 * (len(before) + len(after) + len(back) + len(first)) + int(training)
    return int(training)


def _same_value(value: Any, expected: Any) -> bool:
    if value is expected:
        return True
    if type(value) is not type(expected):
        return False
    if isinstance(value, tuple):  # a subclass may override __len__ and __iter__
        alike = map(_same_value, tuple.__iter__(value), tuple.__iter__(expected))
        return stored_items(value) == stored_items(expected) and all(alike)
    is_float = isinstance(value, float | complex)  # repr distinguishes 0.0 from -0.0
    return bool(value == expected) and (not is_float or repr(value) == repr(expected))


@contextmanager
def discard_traced_tensors(walk: ClosureWalker) -> Iterator[None]:
    """At exit, restores attributes, lists, closures and ``.grad`` that hold tensors of a trace.

    A module that keeps an output, such as an attention map, then has the last one from outside a trace.
    """
    before = [(x.fields if isinstance(x, Attributes) else x) for x in walk.objects]
    dicts = [(x, dict(x)) for x in before if isinstance(x, dict)]
    lists = [(x, list(x)) for x in before if isinstance(x, list)]
    functions = [x for x in before if isinstance(x, FunctionType)]
    cells = [(c, c.cell_contents) for f in functions for c in f.__closure__ or () if is_filled(c)]
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


def _is_traced(value: object) -> bool:
    return any(isinstance(torch_internals.unwrap(x), FakeTensor) for x in pytree.tensors(value))
