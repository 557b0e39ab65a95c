"""Modules, generators and random numbers as they were: before each run, and at the end."""

import random
import sys
from collections.abc import Iterable, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn

from hoglib._substitution import LISTS_OF_WEIGHTS

INTERNAL = set(vars(nn.Module()))  # what every module has: hooks, places of parameters and parts
MUTABLE = (list, dict, set, bytearray)


class _Part:
    """A module's places as they were; `changing` are the attributes that a run gets copies of."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.parameters, self.buffers = dict(module._parameters), dict(module._buffers)
        self.plain = dict(vars(module))
        self.converted: dict[str, Any] | None = None
        self.changing = [
            name
            for name, value in self.plain.items()
            if name not in INTERNAL and (isinstance(value, Tensor) or type(value) in MUTABLE)
        ]


class Unchanged:
    """Keeps the state of modules, and of generators, that a function changes as it runs.

        with Unchanged(modules, generators, torch.float64) as state:
            state.begin()         # as at first; now run the function

    Inside, modules have copies of their buffers, of frozen parameters and of plain containers, in
    dtype where they are of floating point and one is given; parameters of their own too, for those that
    a function substitutes are put in their places by it. Scripted modules keep their tensors, whose
    values are put back.
    """

    def __init__(
        self, modules: Iterable[nn.Module], generators: Iterable[torch.Generator] = (),
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        self._dtype = dtype
        self._parts: dict[int, _Part] = {}
        self._scripted: list[tuple[Tensor, Tensor]] = []
        self._converted: dict[int, Tensor] = {}
        self._known: set[int] = set()
        self._generators = [(g, g.get_state()) for g in generators]
        self._random = _random_state()
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
            self._parts[id(part)] = _Part(part)

    def __enter__(self) -> "Unchanged":
        return self

    def __exit__(self, *error: Any) -> None:
        for part in self._parts.values():
            _put_back(part.module._parameters, part.parameters)
            _put_back(part.module._buffers, part.buffers)
            _put_back(vars(part.module), part.plain)
        self._begin_outside()

    def begin(self, *, attributes: bool = True, of: nn.Module | None = None) -> None:
        """As at first, in copies; plain attributes only if wanted, and only of one module and its parts
        if one is named."""
        buffers: dict[int, Any] = {}
        ids = list(self._parts) if of is None else [id(m) for m in of.modules()]
        for part in (self._parts[i] for i in ids if i in self._parts):
            module = part.module
            if part.converted is None:
                part.converted = {name: self._parameter(p) for name, p in part.parameters.items()}
            _put_back(module._parameters, part.converted)
            _put_back(
                module._buffers,
                {name: self._buffer(b, buffers) for name, b in part.buffers.items()},
            )
            if attributes:
                copies = {name: self._plain(name, part.plain[name]) for name in part.changing}
                _put_back(vars(module), {**part.plain, **copies})
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
        _set_random_state(self._random)

    def _parameter(self, p: Tensor | None) -> Any:
        if p is None or self._dtype is None or self._in_dtype(p) is p:
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

    def _plain(self, name: str, value: Any) -> Any:
        if name in LISTS_OF_WEIGHTS:  # which an RNN makes anew where its parameters are others
            return [self._parameter(p) if isinstance(p, Tensor) else p for p in value]
        if isinstance(value, Tensor):
            return value if value.requires_grad else self._in_dtype(value).detach().clone()
        return copy(value)

    def _in_dtype(self, x: Tensor) -> Tensor:
        if self._dtype is None or not (x.is_floating_point() or x.is_complex()):
            return x
        return x.to(self._dtype.to_complex() if x.is_complex() else self._dtype)


_NOTHING = object()


def _alike(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and torch.equal(a.to(b), b)
    if type(a) is type(b) and type(a) in MUTABLE:
        return len(a) == len(b)
    simple = (bool, int, float, str, tuple)
    return isinstance(a, simple) and isinstance(b, simple) and bool(a == b)


def _put_back(place: dict[str, Any], saved: dict[str, Any]) -> None:
    if place.keys() != saved.keys():
        for name in [name for name in place if name not in saved]:
            del place[name]
    place.update(saved)


class OutsideState:
    """Random numbers that torch's own generator does not make, as they stood here."""

    def __init__(self, generators: Sequence[torch.Generator]) -> None:
        self._generators = [(g, g.get_state()) for g in generators]
        self._before = _random_state()

    def changed(self) -> list[str]:
        """By which ones something was drawn since."""
        now = _random_state()
        found = []
        if any(not torch.equal(state, g.get_state()) for g, state in self._generators):
            found.append("a torch.Generator")
        if now["python"] != self._before["python"]:
            found.append("Python's random")
        a, b = self._before["numpy"], now["numpy"]
        if a is not None and (a[2:] != b[2:] or not (a[1] == b[1]).all()):
            found.append("NumPy's random")
        return found


def _random_state() -> dict[str, Any]:
    numpy = sys.modules.get("numpy")
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
        "python": random.getstate(),
        "numpy": None if numpy is None else numpy.random.get_state(),
    }


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    if state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])
    random.setstate(state["python"])
    if state["numpy"] is not None:
        sys.modules["numpy"].random.set_state(state["numpy"])
