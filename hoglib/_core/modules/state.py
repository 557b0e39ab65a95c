"""Saving and restoring what a function reads and changes besides its arguments, so that it runs again
alike: random numbers, settings, autocast, and the modes, tensors and attributes of modules.

    random numbers         preserve_random_state, RandomState, draw_from, line_that_draws
    a run that is repeated RunState (autocast, generators, train or eval mode)
    whole modules          StateGuard
"""

import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from functools import partial
from types import SimpleNamespace
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hoglib._core.modules.swap import RNN_WEIGHT_LISTS
from hoglib._core.numerics.finite_differences import to_double
from hoglib._core.runtime.source_location import SourceLine, torch_call_line
from hoglib._core.torch_api.dispatch import Args, Kw, Op, Types
from hoglib._core.torch_api.torch_modes import AutocastState

Generators = Iterable[torch.Generator]


@contextmanager
def preserve_random_state(*generators: torch.Generator | None) -> Iterator[None]:
    """Restores the global random generators, and those given, at exit."""
    state = RandomState([generator for generator in generators if generator is not None])
    try:
        yield
    finally:
        state.restore()


@contextmanager
def draw_from(generator: torch.Generator, device: torch.device) -> Iterator[None]:
    """Inside, torch's own generator of a device draws the numbers of ``generator``.

    For functions that take no generator, such as the samplers of ``torch.distributions``.
    """
    own = _default_generator(device) or torch.default_generator
    before = own.get_state()
    own.set_state(generator.get_state())
    try:
        yield
        # it goes on behind what was drawn
        generator.set_state(own.get_state())
    finally:
        own.set_state(before)


def random_state() -> dict[str, Any]:
    """The states of the global random generators: Python's, NumPy's, torch's, and those of GPUs.

    NumPy's is None if it was not imported, those of GPUs are [] if none was used.
    """
    numpy = sys.modules.get("numpy")
    return {
        "python": random.getstate(),
        "numpy": None if numpy is None else numpy.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Restores a :func:`random_state` of this process, or of another one with other GPUs."""
    # its tensors are on the CPU, and are not copied: inside of torch.func a copy has no storage
    random.setstate(state["python"])
    if state["numpy"] is not None:
        sys.modules["numpy"].random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    for device, device_state in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(device_state, device)


@final
class RandomState:
    """The states of all random generators: the global ones, those given, and those of modules.

    Args:
        generators: Of torch.
        modules: Generators of Python and NumPy that are attributes of these are included.
    """

    def __init__(self, generators: Generators = (), modules: Iterable[nn.Module] = ()) -> None:
        self._global = random_state()
        self._generators = [(generator, generator.get_state()) for generator in generators]
        # how to get and to set the states of other generators, and what they were
        self._kept: list[tuple[Callable[[], Any], Callable[[Any], None], Any]] = []
        for module in modules:
            self.add(module)

    def add(self, module: nn.Module) -> None:
        """Includes the generators that are attributes of a module."""
        self._kept += [(get, put, get()) for get, put in _kept_generators(module)]

    def restore(self) -> None:
        """Sets all generators to their saved states."""
        for _, put, state in self._kept:
            put(state)
        for generator, state in self._generators:
            generator.set_state(state)
        set_random_state(self._global)

    def drawn(self) -> list[str]:
        """The generators that have drawn since, but for torch's global ones."""
        found = []
        if any(not torch.equal(state, g.get_state()) for g, state in self._generators):
            found.append("a torch.Generator")
        if any(str(get()) != str(state) for get, _, state in self._kept):
            found.append("a generator that it keeps")
        now, before = random_state(), self._global
        if now["python"] != before["python"]:
            found.append("Python's random")
        a, b = before["numpy"], now["numpy"]
        if a is not None and (a[2:] != b[2:] or not (a[1] == b[1]).all()):
            found.append("NumPy's random")
        return found


def generator_state(device: torch.device) -> Tensor:
    """The state of torch's global generator of a device."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def line_that_draws(function: Callable[[], Any], device: torch.device) -> SourceLine | None:
    """The first line whose torch call draws random numbers on a device while a function runs.

    The generators are as before afterwards. None also for numbers that torch does not draw.
    """
    with preserve_random_state(), _FirstDraw(device) as mode:
        function()
    return mode.line


@final
class _FirstDraw(TorchFunctionMode):
    """Notes the first call that draws from torch's generator, or from one that it is given."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self.line: SourceLine | None = None

    def __torch_function__(self, func: Op, types: Types, args: Args = (), kwargs: Kw = None) -> Any:
        if self.line is not None:
            return func(*args, **(kwargs or {}))
        before = generator_state(self._device)
        result = func(*args, **(kwargs or {}))
        given = (kwargs or {}).get("generator") is not None
        if given or not torch.equal(before, generator_state(self._device)):
            self.line = torch_call_line()
        return result


def _kept_generators(module: nn.Module) -> Iterator[tuple[Callable[[], Any], Callable[[Any], Any]]]:
    """How to get and to set the states of the generators of Python's or NumPy's that a module keeps."""
    for value in vars(module).values():
        if isinstance(value, random.Random):
            yield value.getstate, value.setstate
        bits = getattr(value, "bit_generator", None)
        if type(value).__module__.startswith("numpy.random") and bits is not None:
            yield partial(getattr, bits, "state"), partial(setattr, bits, "state")


def _default_generator(device: torch.device) -> torch.Generator | None:
    """torch's global generator of an accelerator; None for the CPU, and for one that has none."""
    if device.type in ("cpu", "meta"):
        return None
    generators = getattr(torch.get_device_module(device.type), "default_generators", ())
    return generators[device.index or 0] if generators else None


@final
class GeneratorStates:
    """torch's generators of some devices, and others, whose states can be read and set together."""

    def __init__(self, devices: Iterable[torch.device], generators: Generators = ()) -> None:
        every = [torch.default_generator, *map(_default_generator, devices), *generators]
        self._generators = list({id(g): g for g in every if g is not None}.values())

    def now(self) -> list[Tensor]:
        return [generator.get_state() for generator in self._generators]

    def set(self, states: list[Tensor]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)


@final
class RunState:
    """torch's random generators, autocast, and modes of modules, as they were when this was created.

    Created at every call of a function that is recomputed, so it saves no more than that.
    """

    def __init__(
        self, tensors: Sequence[Tensor], generators: Generators, modules: Iterable[nn.Module]
    ) -> None:
        self._generators = GeneratorStates({tensor.device for tensor in tensors}, generators)
        self._drawn = self._generators.now()
        self._modes = [(module, module.training) for module in modules]
        self.autocast = AutocastState()

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Inside, generators and modes are as they were; at exit, as they are now."""
        states = self._generators.now()
        modes = [(module, module.training) for module, _ in self._modes]
        try:
            self._set(self._drawn, self._modes)
            yield
        finally:
            self._set(states, modes)

    def without_modules(self) -> "RunState":
        """The same for runs that change no modes, which keeps no module alive."""
        own = copy(self)
        own._modes = []
        return own

    def rewind(self) -> None:
        """Generators and modes become what they were, for another attempt at the same run."""
        self._set(self._drawn, self._modes)

    def _set(self, states: list[Tensor], modes: list[tuple[nn.Module, bool]]) -> None:
        self._generators.set(states)
        for module, training in modes:
            module.training = training


@final
class StateGuard:
    """Saves the state of modules and of random generators, which functions change as they run.

        with StateGuard(modules, generators, double=True) as state:
            state.begin()         # the saved state again, in copies; now run the function

    Inside, modules have copies of their buffers, of frozen parameters and of plain containers, in
    float64 where they are of floating point and ``double`` is set. They keep their own parameters: a
    function that differentiates swaps others in. Scripted modules keep their tensors, whose values are
    restored. At exit everything is restored.

    Args:
        modules: With all their parts.
        generators: Of torch, besides the global ones.
        double: Copies are in double precision.
    """

    def __init__(
        self, modules: Iterable[nn.Module], generators: Generators = (), double: bool = False
    ) -> None:
        self._double = double
        self._saved: dict[int, _SavedModule] = {}
        self._gradients: list[tuple[Tensor, bool, Tensor | None]] = []
        self._scripted: list[tuple[Tensor, Tensor]] = []
        self._converted: dict[int, Tensor] = {}
        self._known: set[int] = set()
        self._random = RandomState(generators)
        for module in modules:
            self.add(module)

    def add(self, module: nn.Module) -> None:
        """Saves a module and its parts, as they are now."""
        for part in module.modules():
            if id(part) in self._known:
                continue
            self._known.add(id(part))
            if isinstance(part, torch.jit.ScriptModule):
                self._scripted += [(b, b.clone()) for b in part.buffers(recurse=False)]
                continue
            self._random.add(part)
            self._saved[id(part)] = saved = _SavedModule(part)
            for p in part._parameters.values():
                if p is not None and id(p) not in self._known:
                    self._known.add(id(p))
                    saved.save_value(p)
                    if p.is_leaf:
                        self._gradients.append((p, p.requires_grad, p.grad))

    def __enter__(self) -> "StateGuard":
        return self

    def __exit__(self, *error: Any) -> None:
        for saved in self._saved.values():
            _restore_items(saved.module._parameters, saved.parameters)
            _restore_items(saved.module._buffers, saved.buffers)
            _restore_items(vars(saved.module), saved.attributes)
            for items, before in saved.internal:
                _restore_items(items, before)
            saved.restore_values()
        for p, requires_grad, grad in self._gradients:
            p.requires_grad_(requires_grad)
            p.grad = grad
        self._restore_outside()

    def begin(self, *, attributes: bool = True, of: nn.Module | None = None) -> None:
        """Gives modules the saved state in copies, before a run.

        Args:
            attributes: Also their plain attributes.
            of: Only this module and its parts.
        """
        buffers: dict[int, Any] = {}
        copies: dict[int, Any] = {}
        ids = list(self._saved) if of is None else [id(module) for module in of.modules()]
        for saved in (self._saved[i] for i in ids if i in self._saved):
            module = saved.module
            if saved.converted is None:
                saved.converted = {name: self._parameter(p) for name, p in saved.parameters.items()}
                for name, p in saved.converted.items():
                    if p is not saved.parameters[name]:
                        saved.save_value(p)
            saved.restore_values()
            _restore_items(module._parameters, saved.converted)
            restored = {name: self._buffer(b, buffers) for name, b in saved.buffers.items()}
            _restore_items(module._buffers, restored)
            if not attributes:
                continue
            # hooks that a first forward registered: a module notes by an attribute that it did, and as
            # that is restored, hooks which stay would pile up
            for items, kept in saved.internal:
                if items is not module._parameters and items is not module._buffers:
                    _restore_items(items, kept)
            before = saved.attributes
            own = {name: self._attribute(name, before[name], copies) for name in saved.copied}
            if isinstance(module, nn.Embedding | nn.EmbeddingBag):
                own["max_norm"] = None  # it changes the weight in place, unseen by autograd
            if isinstance(module, nn.Embedding):
                own["padding_idx"] = None  # its row has no gradient, though the value depends on it
            _restore_items(vars(module), {**before, **own})
        self._restore_outside()

    def changed_attributes(self) -> list[tuple[nn.Module, str]]:
        """The plain attributes that are not as they were saved."""
        return [
            (saved.module, name)
            for saved in self._saved.values()
            for name, value in vars(saved.module).items()
            if name not in _INTERNAL and not _is_equal(value, saved.attributes.get(name, _MISSING))
        ]

    def _restore_outside(self) -> None:
        """Restores what is not copied: buffers of scripted modules, random numbers."""
        for buffer, value in self._scripted:
            with torch.no_grad():
                buffer.copy_(value)
        self._random.restore()

    def _parameter(self, p: Tensor | None) -> Any:
        """The parameter, or its one copy in double precision."""
        if p is None or self._in_dtype(p) is p:
            return p
        if id(p) not in self._converted:
            self._converted[id(p)] = nn.Parameter(self._in_dtype(p.detach()), requires_grad=False)
        return self._converted[id(p)]

    def _buffer(self, b: Tensor | None, copies: dict[int, Any]) -> Any:
        """A copy of a buffer, the same for all modules that share it."""
        if b is None:
            return None
        if id(b) not in copies:
            copies[id(b)] = self._in_dtype(b).detach().clone()
        return copies[id(b)]

    def _attribute(self, name: str, value: Any, copies: dict[int, Any]) -> Any:
        """A copy of a plain attribute."""
        if name in RNN_WEIGHT_LISTS:  # which an RNN creates anew when its parameters are replaced
            return [self._parameter(p) if isinstance(p, Tensor) else p for p in value]
        return self._copied(value, copies)

    def _copied(self, value: Any, copies: dict[int, Any]) -> Any:
        """A copy of what a run may change: tensors, arrays, plain containers and their items."""
        kind = type(value)
        if isinstance(value, Tensor):
            return value if value.requires_grad else self._buffer(value, copies)
        if kind.__module__ == "numpy" and kind.__name__ == "ndarray":
            return copies.setdefault(id(value), value.copy())
        if kind is tuple and len(value) <= _LARGEST:
            return tuple(self._copied(x, copies) for x in value)
        if kind not in (*_MUTABLE, SimpleNamespace) or id(value) in copies:
            return copies.get(id(value), value)
        copies[id(value)] = other = copy(value)
        items: Any = vars(other) if kind is SimpleNamespace else other
        if kind in (set, bytearray, Counter) or len(items) > _LARGEST:
            return other
        for key in range(len(items)) if kind in _SEQUENCES else [*items]:
            items[key] = self._copied(items[key], copies)
        return other

    def _in_dtype(self, x: Tensor) -> Tensor:
        return to_double(x) if self._double else x


class _SavedModule:
    """The parameters, buffers and attributes of one module, without those of its parts."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.parameters, self.buffers = dict(module._parameters), dict(module._buffers)
        self.attributes = dict(vars(module))
        self.converted: dict[str, Any] | None = None  # the parameters that a run gets
        self.copied = [name for name in self.attributes if name not in _INTERNAL]
        # hooks and submodules, which are restored at exit
        internal = [value for name, value in self.attributes.items() if name in _INTERNAL]
        self.internal = [(x, copy(x)) for x in internal if isinstance(x, dict | set)]
        self._values: list[tuple[Tensor, Tensor, Tensor]] = []  # parameters, their data, and copies

    def save_value(self, p: Tensor | None) -> None:
        """Saves a parameter, which code may change under no_grad, or give other memory by ``.data``."""
        if type(p) not in (Tensor, nn.Parameter) or p is None or p.is_inference() or p.is_meta:
            return
        if p.layout is torch.strided and p.is_leaf:
            self._values.append((p, p.data, p.detach().clone()))

    def restore_values(self) -> None:
        """Restores the parameters that were saved."""
        for p, data, value in self._values:
            if p.dtype != data.dtype or p.data_ptr() != data.data_ptr():
                p.data = data
            if not torch.equal(data, value):
                data.copy_(value)  # the version counter of `data` is not that of p


# What every module has: hooks, parameters, buffers and submodules.
_INTERNAL = set(vars(nn.Module()))
_MAPPINGS = (dict, OrderedDict, defaultdict, Counter)
_SEQUENCES = (list, deque)
_MUTABLE = (*_MAPPINGS, *_SEQUENCES, set, bytearray)
_LARGEST = 1000  # items of a container whose contents are copied too
_MISSING = object()


def same(a: Tensor, b: object) -> bool:
    """The same values of one shape, dtype, layout and device; NaN is the same as NaN."""
    if not isinstance(b, Tensor) or (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device):
        return False
    if a.layout is not b.layout:
        return False
    if a.layout is not torch.strided:
        a, b = a.to_dense(), b.to_dense()
    elif is_freed(a) or is_freed(b):
        return False
    floating = a.is_floating_point() or a.is_complex()
    return bool(torch.equal(a.nan_to_num(), b.nan_to_num()) if floating else torch.equal(a, b))


def is_freed(x: Tensor) -> bool:
    """Whether the memory of a tensor was released beneath it (`x.untyped_storage().resize_(0)`), so
    that to read it ends the process."""
    own = type(x) in (Tensor, nn.Parameter)  # others, such as those of a tracer, may have no memory
    if not own or x.layout is not torch.strided or not x.numel() or x.device.type == "meta":
        return False
    return x.data_ptr() == 0 or not x.untyped_storage().nbytes()


def put_back(x: Tensor, value: Tensor) -> None:
    """Gives x the value of a copy, of the same layout, in the memory that it has; its version counter
    stays."""
    if is_freed(x):
        x.untyped_storage().resize_(value.untyped_storage().nbytes())
    if x.layout is not torch.sparse_coo:
        x.data.copy_(value)
    # copy_ would give it other memory, and `x.data` is another tensor
    elif x._nnz() == value._nnz():
        data = x.detach()
        data._indices().copy_(value._indices())
        data._values().copy_(value._values())
    else:
        with torch.no_grad():
            x.copy_(value)


def _is_equal(a: Any, b: Any) -> bool:
    """Whether two attributes hold equal tensors, numbers and texts."""
    if a is b:
        return True
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return same(a.to(b), b)
    if type(a) is not type(b):
        return False
    if isinstance(a, SimpleNamespace):
        return _is_equal(vars(a), vars(b))
    if type(a) in (*_MUTABLE, tuple) and len(a) != len(b):
        return False
    if type(a) in (*_MAPPINGS, *_SEQUENCES, tuple) and len(a) > _LARGEST:
        return True
    if type(a) in _MAPPINGS:
        return a.keys() == b.keys() and all(_is_equal(value, b[key]) for key, value in a.items())
    if type(a) in (*_SEQUENCES, tuple):
        return all(_is_equal(x, y) for x, y in zip(a, b, strict=True))
    if type(a).__module__ == "numpy":
        return bool((a == b).all())
    return isinstance(a, bool | int | float | str | set | bytearray) and bool(a == b)


def _restore_items(items: Any, saved: Any) -> None:
    """Restores the contents of a dict or set, in their order."""
    if [*items] != [*saved]:
        items.clear()
    items.update(saved)
