"""Saves and restores state: random generators, autocast, and the tensors and attributes of modules."""

import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hoglib._core.finite_differences import to_double
from hoglib._core.swap import RNN_WEIGHT_LISTS


def random_state() -> dict[str, Any]:
    """The states of the global generators of Python, NumPy, torch and each GPU.

    NumPy's is None if NumPy was not imported; those of GPUs are an empty list if no GPU was used.
    """
    numpy = sys.modules.get("numpy")
    return {
        "python": random.getstate(),
        "numpy": None if numpy is None else numpy.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Restores a state of `random_state()`, also of another process with more GPUs.

    Its tensors are on the CPU and are not copied: inside a torch.func transform a copy has no storage.
    """
    random.setstate(state["python"])
    if state["numpy"] is not None:
        sys.modules["numpy"].random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    for device, device_state in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(device_state, device)


@contextmanager
def preserve_random_state() -> Iterator[None]:
    """Restores the global random generators at the end."""
    state = random_state()
    try:
        yield
    finally:
        set_random_state(state)


class AutocastState:
    """The autocast settings at the time of construction."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._states = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in {"cpu", *(tensor.device.type for tensor in tensors)}
            if torch.amp.is_autocast_available(kind)
        ]

    @contextmanager
    def restored(self) -> Iterator[None]:
        with ExitStack() as stack:
            for kind, enabled, dtype in self._states:
                if enabled or torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, dtype, enabled=enabled))
            yield


class RunState:
    """Random generators, autocast and module modes at the time of construction, to run a function
    again."""

    def __init__(
        self,
        tensors: Sequence[Tensor],
        generators: Iterable[torch.Generator],
        modules: Iterable[nn.Module],
    ) -> None:
        devices = {tensor.device for tensor in tensors}
        every = [torch.default_generator, *map(_default_generator, devices), *generators]
        unique = {id(generator): generator for generator in every if generator is not None}
        self._generators = [(generator, generator.get_state()) for generator in unique.values()]
        self._modes = [(module, module.training) for module in modules]
        self.autocast = AutocastState(tensors)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Inside, generators and modes have the saved state; at the end, the state from before."""
        states = [generator.get_state() for generator, _ in self._generators]
        modes = [module.training for module, _ in self._modes]
        try:
            for generator, state in self._generators:
                generator.set_state(state)
            for module, training in self._modes:
                module.training = training
            yield
        finally:
            for (generator, _), state in zip(self._generators, states, strict=True):
                generator.set_state(state)
            for (module, _), training in zip(self._modes, modes, strict=True):
                module.training = training


def _default_generator(device: torch.device) -> torch.Generator | None:
    if device.type in ("cpu", "meta"):
        return None
    generators = getattr(torch.get_device_module(device.type), "default_generators", ())
    return generators[device.index or 0] if generators else None


class RandomSource(NamedTuple):
    """A generator of Python or NumPy that a module holds: functions to get and set its state."""

    get: Callable[[], Any]
    set: Callable[[Any], None]


def sources(module: nn.Module) -> Iterator[RandomSource]:
    """The generators of Python and NumPy among the attributes of a module."""
    for value in vars(module).values():
        if isinstance(value, random.Random):
            yield RandomSource(value.getstate, value.setstate)
        bits = getattr(value, "bit_generator", None)
        if type(value).__module__.startswith("numpy.random") and bits is not None:
            yield RandomSource(partial(getattr, bits, "state"), partial(setattr, bits, "state"))


class OutsideState:
    """Generators other than torch's global one, at the time of construction."""

    def __init__(
        self, generators: Sequence[torch.Generator], modules: Iterable[nn.Module] = ()
    ) -> None:
        kept = [source for module in modules for source in sources(module)]
        self._kept = [(source, str(source.get())) for source in kept]
        self._generators = [(g, g.get_state()) for g in generators]
        self._before = random_state()

    def changed(self) -> list[str]:
        """The names of those that drew numbers since."""
        now = random_state()
        found = []
        if any(not torch.equal(state, g.get_state()) for g, state in self._generators):
            found.append("a torch.Generator")
        if any(str(source.get()) != drawn for source, drawn in self._kept):
            found.append("a generator that it keeps")
        if now["python"] != self._before["python"]:
            found.append("Python's random")
        a, b = self._before["numpy"], now["numpy"]
        if a is not None and (a[2:] != b[2:] or not (a[1] == b[1]).all()):
            found.append("NumPy's random")
        return found


INTERNAL = set(
    vars(nn.Module())
)  # the attributes of every module: hooks, parameters, buffers, parts
MAPPINGS = (dict, OrderedDict, defaultdict, Counter)
SEQUENCES = (list, deque)
MUTABLE = (*MAPPINGS, *SEQUENCES, set, bytearray)
LARGEST = 1000  # containers with more items are copied without their contents


class _Part:
    """The state of one module; `changing` names the attributes of which a run gets copies."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.parameters, self.buffers = dict(module._parameters), dict(module._buffers)
        self.plain = dict(vars(module))
        self.converted: dict[str, Any] | None = None
        self.changing = [name for name in self.plain if name not in INTERNAL]
        # hooks and parts, restored at the end
        internal = [value for name, value in self.plain.items() if name in INTERNAL]
        self.inside = [(x, copy(x)) for x in internal if isinstance(x, dict | set)]
        self.random = [(source, source.get()) for source in sources(module)]
        self.values: list[tuple[Tensor, Tensor, Tensor]] = []  # parameters, their data, and copies

    def keep(self, p: Tensor | None) -> None:
        """Saves a parameter, which code may change under no_grad, or give other memory by `.data`."""
        if type(p) not in (Tensor, nn.Parameter) or p is None or p.is_inference() or p.is_meta:
            return
        if p.layout is torch.strided and p.is_leaf:
            self.values.append((p, p.data, p.detach().clone()))

    def put_values_back(self) -> None:
        for p, data, value in self.values:
            if p.dtype != data.dtype or p.data_ptr() != data.data_ptr():
                p.data = data
            if not torch.equal(data, value):
                data.copy_(value)  # `data` has a version counter of its own
        for source, drawn in self.random:
            source.set(drawn)


class StateGuard:
    """Saves the state of modules and generators, so that a function that changes it can run again.

        with StateGuard(modules, generators, double=True) as state:
            state.begin()         # restores the initial state; now run the function

    Inside, modules have copies of their parameters, buffers and plain containers, in float64 with
    `double`; a function swaps in the parameters that it differentiates. Scripted modules keep their
    tensors, whose values are restored. At the end, everything is restored.
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
        """Saves a module and its parts."""
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

    def __enter__(self) -> "StateGuard":
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
        """Gives modules copies of the initial state.

        attributes: whether plain attributes are restored, too. of: only this module and its parts.
        """
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
                own["max_norm"] = None  # it changes the weight in place, unknown to autograd
            _put_back(vars(module), {**part.plain, **own})
        self._begin_outside()

    def changed_attributes(self) -> list[tuple[nn.Module, str]]:
        """The plain attributes that differ from the initial state."""
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
        if name in RNN_WEIGHT_LISTS:  # an RNN rebuilds them when its parameters change
            return [self._parameter(p) if isinstance(p, Tensor) else p for p in value]
        return self._copied(value, copies)

    def _copied(self, value: Any, copies: dict[int, Any]) -> Any:
        """A copy of what a run may change: tensors, arrays, plain containers and their contents."""
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
        return to_double(x) if self._double else x


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
    """Restores the contents of a dict or set, in their order."""
    if [*place] != [*saved]:
        place.clear()
    place.update(saved)
