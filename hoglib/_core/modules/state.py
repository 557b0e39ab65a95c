"""Save and restore the state that a function reads and changes besides its arguments, so that a second
run repeats the first: random numbers, settings, autocast, and modes, tensors and attributes of modules.

    random numbers      preserve_random_state, RandomState, draw_from, line_that_draws
    a repeated run      RunState (autocast, generators, train or eval mode)
    whole modules       StateGuard
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
    """Restores the global random generators and the given ones at exit."""
    state = RandomState([generator for generator in generators if generator is not None])
    try:
        yield
    finally:
        state.restore()


@contextmanager
def draw_from(generator: torch.Generator, device: torch.device) -> Iterator[None]:
    """Inside, torch's global generator of a device continues the random numbers of ``generator``.

    For functions without a generator argument, such as the samplers of ``torch.distributions``.
    """
    own = _default_generator(device) or torch.default_generator
    before = own.get_state()
    own.set_state(generator.get_state())
    try:
        yield
        # the next use of `generator` continues behind the numbers drawn here
        generator.set_state(own.get_state())
    finally:
        own.set_state(before)


def random_state() -> dict[str, Any]:
    """The states of the global random generators of Python, NumPy, torch, and torch's GPUs.

    "numpy" is None if NumPy was not imported, "cuda" is [] if no GPU was used.
    """
    numpy = sys.modules.get("numpy")
    return {
        "python": random.getstate(),
        "numpy": None if numpy is None else numpy.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Restores a :func:`random_state`, also one saved by a process with more or fewer GPUs."""
    # the tensors of `state` are on the CPU; do not copy them: inside torch.func a copy has no storage
    random.setstate(state["python"])
    if state["numpy"] is not None:
        sys.modules["numpy"].random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    for device, device_state in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(device_state, device)


@final
class RandomState:
    """The states of the global random generators, of given ones, and of modules' own ones.

    Args:
        generators: torch.Generators.
        modules: Generators of Python and NumPy in attributes of these modules are saved, too.
    """

    def __init__(self, generators: Generators = (), modules: Iterable[nn.Module] = ()) -> None:
        self._global = random_state()
        self._generators = [(generator, generator.get_state()) for generator in generators]
        # (function that reads a state, function that sets it, saved state) of modules' own generators
        self._kept: list[tuple[Callable[[], Any], Callable[[Any], None], Any]] = []
        for module in modules:
            self.add(module)

    def add(self, module: nn.Module) -> None:
        """Saves the generators of Python and NumPy in attributes of a module."""
        self._kept += [(get, put, get()) for get, put in _kept_generators(module)]

    def restore(self) -> None:
        """Sets all generators to their saved states."""
        for _, put, state in self._kept:
            put(state)
        for generator, state in self._generators:
            generator.set_state(state)
        set_random_state(self._global)

    def drawn(self) -> list[str]:
        """Names the generators that drew since the states were saved, except torch's global ones."""
        found = []
        if any(not torch.equal(state, g.get_state()) for g, state in self._generators):
            found.append("a torch.Generator")
        # str: a NumPy state is a dict with arrays, whose == gives an array
        if any(str(get()) != str(state) for get, _, state in self._kept):
            found.append("a generator that it keeps")
        now, before = random_state(), self._global
        if now["python"] != before["python"]:
            found.append("Python's random")
        a, b = before["numpy"], now["numpy"]
        # a legacy NumPy state is (name, keys, position, has_gauss, cached_gaussian)
        if a is not None and (a[2:] != b[2:] or not (a[1] == b[1]).all()):
            found.append("NumPy's random")
        return found


def generator_state(device: torch.device) -> Tensor:
    """The state of torch's global generator of a device."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def line_that_draws(function: Callable[[], Any], device: torch.device) -> SourceLine | None:
    """The first line with a torch call that draws random numbers on a device while `function` runs.

    The generators are restored. None if torch draws nothing; draws of Python and NumPy are not seen.
    """
    with preserve_random_state(), _FirstDraw(device) as mode:
        function()
    return mode.line


@final
class _FirstDraw(TorchFunctionMode):
    """Notes the first call that draws from torch's global generator or has a ``generator=``
    argument."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self.line: SourceLine | None = None  # of the first call that drew

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
    """(function that reads a state, function that sets it) of each generator of Python or NumPy that a
    module has as an attribute."""
    for value in vars(module).values():
        if isinstance(value, random.Random):
            yield value.getstate, value.setstate
        bits = getattr(value, "bit_generator", None)
        if type(value).__module__.startswith("numpy.random") and bits is not None:
            yield partial(getattr, bits, "state"), partial(setattr, bits, "state")


def _default_generator(device: torch.device) -> torch.Generator | None:
    """torch's global generator of an accelerator; None for the CPU, and for a device without one."""
    if device.type in ("cpu", "meta"):
        return None
    generators = getattr(torch.get_device_module(device.type), "default_generators", ())
    return generators[device.index or 0] if generators else None


@final
class GeneratorStates:
    """Reads and sets the states of several generators of torch: the CPU's, those of devices, others."""

    def __init__(self, devices: Iterable[torch.device], generators: Generators = ()) -> None:
        every = [torch.default_generator, *map(_default_generator, devices), *generators]
        # without duplicates: devices may share a generator, and `generators` may name a global one
        self._generators = list({id(g): g for g in every if g is not None}.values())

    def now(self) -> list[Tensor]:
        return [generator.get_state() for generator in self._generators]

    def set(self, states: list[Tensor]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)


@final
class RunState:
    """The states of torch's random generators, autocast and modules' training modes at its creation.

    Each call of a recomputed function creates one, so it saves nothing else.
    """

    def __init__(
        self, tensors: Sequence[Tensor], generators: Generators, modules: Iterable[nn.Module]
    ) -> None:
        self._generators = GeneratorStates({tensor.device for tensor in tensors}, generators)
        self._drawn = self._generators.now()  # states of the generators
        self._modes = [(module, module.training) for module in modules]
        self.autocast = AutocastState()  # entered by the recomputation

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Inside, the saved states are set; at exit, the states before are set again."""
        states = self._generators.now()
        modes = [(module, module.training) for module, _ in self._modes]
        try:
            self._set(self._drawn, self._modes)
            yield
        finally:
            self._set(states, modes)

    def without_modules(self) -> "RunState":
        """A copy for runs that change no modes; it does not keep modules alive."""
        own = copy(self)
        own._modes = []
        return own

    def rewind(self) -> None:
        """Sets the saved states of generators and modes, to repeat a run."""
        self._set(self._drawn, self._modes)

    def _set(self, states: list[Tensor], modes: list[tuple[nn.Module, bool]]) -> None:
        self._generators.set(states)
        for module, training in modes:
            module.training = training


@final
class StateGuard:
    """Saves the state of modules and of random generators, which functions change as they run.

        with StateGuard(modules, generators, double=True) as state:
            state.begin()         # modules get copies of the saved state; now run the function

    Inside, modules have copies of their buffers and plain containers. With ``double``, floating-point
    copies are float64, and so are parameters, which then require no grad: a function that
    differentiates swaps in its own. Otherwise modules keep their parameters, and the values are
    restored. Scripted modules keep their tensors, with restored values. The exit restores everything.

    Args:
        modules: Saved with all their submodules.
        generators: torch.Generators to save besides the global ones.
        double: Copies are in float64.
    """

    def __init__(
        self, modules: Iterable[nn.Module], generators: Generators = (), double: bool = False
    ) -> None:
        self._double = double
        self._saved: dict[int, _SavedModule] = {}  # by id of the module
        # (leaf parameter, its requires_grad, its grad)
        self._gradients: list[tuple[Tensor, bool, Tensor | None]] = []
        self._scripted: list[tuple[Tensor, Tensor]] = []  # (buffer of a scripted module, copy)
        self._converted: dict[int, Tensor] = {}  # id of a parameter -> its float64 copy
        self._known: set[int] = set()  # ids of the saved modules and parameters
        self._random = RandomState(generators)
        for module in modules:
            self.add(module)

    def add(self, module: nn.Module) -> None:
        """Saves a module and its submodules in their present state."""
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
        """Gives modules copies of the saved state, before a run.

        Args:
            attributes: Restore plain attributes, too.
            of: Restore this module and its submodules only.
        """
        # by id: modules that share a buffer or a container get one copy of it
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
            # Remove hooks that the first forward registered. The attribute by which the module knows
            # that it registered them is restored, so that it would register them again in each run.
            for items, kept in saved.internal:
                if items is not module._parameters and items is not module._buffers:
                    _restore_items(items, kept)
            before = saved.attributes
            own = {name: self._attribute(name, before[name], copies) for name in saved.copied}
            if isinstance(module, nn.Embedding | nn.EmbeddingBag):
                own["max_norm"] = None  # renormalises the weight in place, unseen by autograd
            if isinstance(module, nn.Embedding):
                own["padding_idx"] = None  # masks the gradient of a row that the value depends on
            _restore_items(vars(module), {**before, **own})
        self._restore_outside()

    def changed_attributes(self) -> list[tuple[nn.Module, str]]:
        """The plain attributes that differ from the saved ones, as (module, name)."""
        return [
            (saved.module, name)
            for saved in self._saved.values()
            for name, value in vars(saved.module).items()
            if name not in _INTERNAL and not _is_equal(value, saved.attributes.get(name, _MISSING))
        ]

    def _restore_outside(self) -> None:
        """Restores the state that is not copied: buffers of scripted modules, random generators."""
        for buffer, value in self._scripted:
            with torch.no_grad():
                buffer.copy_(value)
        self._random.restore()

    def _parameter(self, p: Tensor | None) -> Any:
        """The parameter, or its one copy in float64."""
        if p is None or self._in_dtype(p) is p:
            return p
        if id(p) not in self._converted:
            self._converted[id(p)] = nn.Parameter(self._in_dtype(p.detach()), requires_grad=False)
        return self._converted[id(p)]

    def _buffer(self, b: Tensor | None, copies: dict[int, Any]) -> Any:
        """A copy of a buffer; modules that share the buffer share the copy."""
        if b is None:
            return None
        if id(b) not in copies:
            copies[id(b)] = self._in_dtype(b).detach().clone()
        return copies[id(b)]

    def _attribute(self, name: str, value: Any, copies: dict[int, Any]) -> Any:
        """A copy of a plain attribute."""
        if name in RNN_WEIGHT_LISTS:  # an RNN fills them again when its parameters are replaced
            return [self._parameter(p) if isinstance(p, Tensor) else p for p in value]
        return self._copied(value, copies)

    def _copied(self, value: Any, copies: dict[int, Any]) -> Any:
        """A copy of a value that a run may change: a tensor, an array, a container with its items."""
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
    """The parameters, buffers and attributes of one module, without its submodules.

    Attributes:
        module: The module.
        parameters: Its parameters by name, as before.
        buffers: Its buffers by name, as before.
        attributes: Its ``__dict__``, as before.
        converted: The parameters that it has in a run; None before the first run.
        copied: The names of attributes that each run gets in copies: all but those of every nn.Module.
        internal: (dict or set, its saved contents) of attributes that every nn.Module has, as hooks.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.parameters, self.buffers = dict(module._parameters), dict(module._buffers)
        self.attributes = dict(vars(module))
        self.converted: dict[str, Any] | None = None
        self.copied = [name for name in self.attributes if name not in _INTERNAL]
        internal = [value for name, value in self.attributes.items() if name in _INTERNAL]
        self.internal = [(x, copy(x)) for x in internal if isinstance(x, dict | set)]
        self._values: list[tuple[Tensor, Tensor, Tensor]] = []  # (parameter, its .data, a copy)

    def save_value(self, p: Tensor | None) -> None:
        """Saves the values of p, which code may change under no_grad or by assigning ``p.data``."""
        if type(p) not in (Tensor, nn.Parameter) or p is None or p.is_inference() or p.is_meta:
            return
        if p.layout is torch.strided and p.is_leaf:
            self._values.append((p, p.data, p.detach().clone()))

    def restore_values(self) -> None:
        """Restores the values of the parameters given to `save_value`."""
        for p, data, value in self._values:
            if p.dtype != data.dtype or p.data_ptr() != data.data_ptr():
                p.data = data
            if not torch.equal(data, value):
                data.copy_(value)  # `data` has a version counter of its own, so p's does not change


# The attributes of every module: hooks, parameters, buffers and submodules.
_INTERNAL = set(vars(nn.Module()))
_MAPPINGS = (dict, OrderedDict, defaultdict, Counter)
_SEQUENCES = (list, deque)
_MUTABLE = (*_MAPPINGS, *_SEQUENCES, set, bytearray)
_LARGEST = 1000  # items: of larger containers only the container is copied
_MISSING = object()


def same(a: Tensor, b: object) -> bool:
    """Whether two tensors agree in values, shape, dtype, layout and device; NaN equals NaN."""
    if not isinstance(b, Tensor) or (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device):
        return False
    if a.layout is not b.layout:
        return False
    if a.layout is not torch.strided:
        a, b = a.to_dense(), b.to_dense()
    elif is_freed(a) or is_freed(b):
        return False
    # only NaN differs from itself
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())


def is_freed(x: Tensor) -> bool:
    """Whether the storage of a tensor was freed by `x.untyped_storage().resize_(0)`: reading x then
    crashes the process."""
    own = type(x) in (Tensor, nn.Parameter)  # subclasses, such as FakeTensor, may have no storage
    if not own or x.layout is not torch.strided or not x.numel() or x.device.type == "meta":
        return False
    return x.data_ptr() == 0 or not x.untyped_storage().nbytes()


def put_back(x: Tensor, value: Tensor) -> None:
    """Copy a value of x's layout into x's own storage, without a change of x's version counter."""
    if is_freed(x):
        x.untyped_storage().resize_(value.untyped_storage().nbytes())
    if x.layout is not torch.sparse_coo:
        x.data.copy_(value)
    # of a sparse tensor, copy_ would allocate new memory, and `x.data` is a copy
    elif x._nnz() == value._nnz():
        data = x.detach()
        data._indices().copy_(value._indices())
        data._values().copy_(value._values())
    else:
        with torch.no_grad():
            x.copy_(value)


def _is_equal(a: Any, b: Any) -> bool:
    """Whether two attributes hold equal tensors, numbers and strings."""
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
    """Restores the contents of a dict or set in the saved order."""
    if [*items] != [*saved]:
        items.clear()
    items.update(saved)
