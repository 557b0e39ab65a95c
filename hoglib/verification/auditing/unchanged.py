"""Modules, generators and random numbers as they were: before each run, and at the end."""

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable
from copy import copy
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from hoglib._differences import in_double
from hoglib._random_state import random_state, set_random_state
from hoglib._substitution import LISTS_OF_WEIGHTS
from hoglib.verification.auditing.random_numbers import sources

INTERNAL = set(vars(nn.Module()))  # what every module has: hooks, places of parameters and parts
MAPPINGS = (dict, OrderedDict, defaultdict, Counter)
SEQUENCES = (list, deque)
MUTABLE = (*MAPPINGS, *SEQUENCES, set, bytearray)
LARGEST = 1000  # of containers whose contents are copied too


class _Part:
    """A module's places as they were; `changing` are the attributes that a run gets copies of."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.parameters, self.buffers = dict(module._parameters), dict(module._buffers)
        self.plain = dict(vars(module))
        self.converted: dict[str, Any] | None = None
        self.changing = [name for name in self.plain if name not in INTERNAL]
        # hooks, parts: as they are put back at the end
        internal = [value for name, value in self.plain.items() if name in INTERNAL]
        self.inside = [(x, copy(x)) for x in internal if isinstance(x, dict | set)]
        self.random = [(source, source.get()) for source in sources(module)]
        self.values: list[tuple[Tensor, Tensor, Tensor]] = []  # parameters, their data, and copies

    def keep(self, p: Tensor | None) -> None:
        """A parameter, which code may change under no_grad, or give other memory by `.data`."""
        if type(p) not in (Tensor, nn.Parameter) or p is None or p.is_inference() or p.is_meta:
            return
        if p.layout is torch.strided and p.is_leaf:
            self.values.append((p, p.data, p.detach().clone()))

    def put_values_back(self) -> None:
        for p, data, value in self.values:
            if p.dtype != data.dtype or p.data_ptr() != data.data_ptr():
                p.data = data
            if not torch.equal(data, value):
                data.copy_(value)  # that of `data` is another version counter
        for source, drawn in self.random:
            source.set(drawn)


class Unchanged:
    """Keeps the state of modules, and of generators, that a function changes as it runs.

        with Unchanged(modules, generators, double=True) as state:
            state.begin()         # as at first; now run the function

    Inside, modules have copies of their buffers, of frozen parameters and of plain containers, in
    float64 where they are of floating point and that is wanted; parameters of their own too, for those
    that a function substitutes are put in their places by it. Scripted modules keep their tensors,
    whose values are put back.
    """

    def __init__(
        self, modules: Iterable[nn.Module], generators: Iterable[torch.Generator] = (),
        double: bool = False,
    ) -> None:  # fmt: skip
        self._double = double
        self._parts: dict[int, _Part] = {}
        self._flags: list[tuple[Tensor, bool, Tensor | None]] = []
        self._scripted: list[tuple[Tensor, Tensor]] = []
        self._converted: dict[int, Tensor] = {}
        self._known: set[int] = set()
        self._generators = [(g, g.get_state()) for g in generators]
        self._random = random_state()
        for module in modules:
            self.add(module)

    def add(self, module: nn.Module) -> None:
        """A module and its parts, as they are now."""
        for part in module.modules():
            if id(part) in self._known:
                continue
            self._known.add(id(part))
            if isinstance(part, torch.jit.ScriptModule):
                self._scripted += [(b, b.clone()) for b in part.buffers(recurse=False)]
                continue
            self._parts[id(part)] = kept = _Part(part)
            for p in part._parameters.values():
                if p is not None and id(p) not in self._known:
                    self._known.add(id(p))
                    kept.keep(p)
                    if p.is_leaf:
                        self._flags.append((p, p.requires_grad, p.grad))

    def __enter__(self) -> "Unchanged":
        return self

    def __exit__(self, *error: Any) -> None:
        for part in self._parts.values():
            _put_back(part.module._parameters, part.parameters)
            _put_back(part.module._buffers, part.buffers)
            _put_back(vars(part.module), part.plain)
            for inside, kept in part.inside:
                _put_back(inside, kept)
            part.put_values_back()
        for p, wants, grad in self._flags:
            p.requires_grad_(wants)
            p.grad = grad
        self._begin_outside()

    def begin(self, *, attributes: bool = True, of: nn.Module | None = None) -> None:
        """As at first, in copies; plain attributes only if wanted, and only of one module and its parts
        if one is named."""
        buffers: dict[int, Any] = {}
        copies: dict[int, Any] = {}
        ids = list(self._parts) if of is None else [id(m) for m in of.modules()]
        for part in (self._parts[i] for i in ids if i in self._parts):
            module = part.module
            if part.converted is None:
                part.converted = {name: self._parameter(p) for name, p in part.parameters.items()}
                for name, p in part.converted.items():
                    if p is not part.parameters[name]:
                        part.keep(p)
            part.put_values_back()
            _put_back(module._parameters, part.converted)
            _put_back(
                module._buffers,
                {name: self._buffer(b, buffers) for name, b in part.buffers.items()},
            )
            if not attributes:
                continue
            own = {name: self._plain(name, part.plain[name], copies) for name in part.changing}
            if isinstance(module, nn.Embedding | nn.EmbeddingBag):
                own["max_norm"] = None  # it changes the weight in place, and autograd knows nothing
            _put_back(vars(module), {**part.plain, **own})
        self._begin_outside()

    def changed_attributes(self) -> list[tuple[nn.Module, str]]:
        """Plain attributes that are not what they were."""
        return [
            (module, name)
            for module, plain in ((part.module, part.plain) for part in self._parts.values())
            for name, value in vars(module).items()
            if name not in INTERNAL and not _alike(value, plain.get(name, _NOTHING))
        ]

    def _begin_outside(self) -> None:
        for buffer, value in self._scripted:
            with torch.no_grad():
                buffer.copy_(value)
        for generator, state in self._generators:
            generator.set_state(state)
        set_random_state(self._random)

    def _parameter(self, p: Tensor | None) -> Any:
        if p is None or self._in_dtype(p) is p:
            return p
        if id(p) not in self._converted:
            self._converted[id(p)] = nn.Parameter(self._in_dtype(p.detach()), requires_grad=False)
        return self._converted[id(p)]

    def _buffer(self, b: Tensor | None, copies: dict[int, Any]) -> Any:
        if b is None:
            return None
        if id(b) not in copies:
            copies[id(b)] = self._in_dtype(b).detach().clone()
        return copies[id(b)]

    def _plain(self, name: str, value: Any, copies: dict[int, Any]) -> Any:
        if name in LISTS_OF_WEIGHTS:  # which an RNN makes anew where its parameters are others
            return [self._parameter(p) if isinstance(p, Tensor) else p for p in value]
        return self._copied(value, copies)

    def _copied(self, value: Any, copies: dict[int, Any]) -> Any:
        """A copy of what a run may change: tensors, arrays, plain containers and what is in them."""
        kind = type(value)
        if isinstance(value, Tensor):
            return value if value.requires_grad else self._buffer(value, copies)
        if kind.__module__ == "numpy" and kind.__name__ == "ndarray":
            return copies.setdefault(id(value), value.copy())
        if kind is tuple and len(value) <= LARGEST:
            return tuple(self._copied(x, copies) for x in value)
        if kind not in (*MUTABLE, SimpleNamespace) or id(value) in copies:
            return copies.get(id(value), value)
        copies[id(value)] = other = copy(value)
        inside: Any = vars(other) if kind is SimpleNamespace else other
        if kind in (set, bytearray, Counter) or len(inside) > LARGEST:
            return other
        for key in range(len(inside)) if kind in SEQUENCES else [*inside]:
            inside[key] = self._copied(inside[key], copies)
        return other

    def _in_dtype(self, x: Tensor) -> Tensor:
        return in_double(x) if self._double else x


_NOTHING = object()


def _alike(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and torch.equal(a.to(b), b)
    if type(a) is not type(b):
        return False
    if isinstance(a, SimpleNamespace):
        return _alike(vars(a), vars(b))
    if type(a) in (*MUTABLE, tuple) and len(a) != len(b):
        return False
    if type(a) in (*MAPPINGS, *SEQUENCES, tuple) and len(a) > LARGEST:
        return True
    if type(a) in MAPPINGS:
        return a.keys() == b.keys() and all(_alike(value, b[key]) for key, value in a.items())
    if type(a) in (*SEQUENCES, tuple):
        return all(_alike(x, y) for x, y in zip(a, b, strict=True))
    if type(a).__module__ == "numpy":
        return bool((a == b).all())
    return isinstance(a, bool | int | float | str | set | bytearray) and bool(a == b)


def _put_back(place: Any, saved: Any) -> None:
    """The contents of a dict or set, in the order in which they were."""
    if [*place] != [*saved]:
        place.clear()
    place.update(saved)
