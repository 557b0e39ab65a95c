"""The levels of recomputed functions (the function, its vjp, the vjp of the vjp) as compiled graphs.

Each level is a function of tensors only. Blocks that differ only in their tensors run the graphs of one
template: a copy of the first such block, with tensors on "meta". Blocks that also differ in integers
and strings, such as the number of a layer, share a template if the graphs of their forwards are equal.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from copy import copy, deepcopy
from dataclasses import replace
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hoglib._core.messages.closures import is_plain, name_of
from hoglib._core.remat.call import Call, CapturedRun, FirstRun, Run, Scope, StaticTree
from hoglib._core.runtime.ambient import inside
from hoglib._core.substrate.gradient_graph import graph_summary
from hoglib._core.torch_api import torch_internals
from hoglib._core.torch_api.dispatch import Args, Kw, Op, Types
from hoglib._core.torch_api.torch_modes import without_stand_ins
from hoglib.capture.api import Compiled, trace_graph
from hoglib.capture.capturing import CacheSlot
from hoglib.errors import UnsupportedError

_MAX_CONSTANT = 64  # elements of a constant tensor that two blocks may share
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OF_MODULES = {*vars(nn.Module()), "forward"}  # attributes that `_Reader._module` reads otherwise
MAX_TEMPLATES = 64
# key of a call -> template, latest last
_TEMPLATES: OrderedDict[Hashable, "Template"] = OrderedDict()


def run_level(run: Any, tensors: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """run(*tensors) by the compiled graph of its template, without autograd."""
    base, inputs = run, tensors
    while not isinstance(base, Run):
        base, inputs = base.run, inputs[: base.count]
    template = base.template or _template_of(base.call, list(inputs))
    level: Any = template.level(run)
    # Compiled would run the function itself in forward mode, though these tensors have no tangents
    if torch_internals.forward_mode_active():
        level = level.run
    given = [None if x is None else x.detach().contiguous() for x in tensors]
    # The function runs with stand-ins if its call did. If they were also on around the graph, a
    # backward after the call would need other graphs.
    with without_stand_ins():
        if isinstance(base, FirstRun):
            outputs = level(given)
            base.adopt(template)
            return tuple(outputs)
        with base.call.run_state.restored():
            return tuple(level(given))


@final
class Template:
    """A call of a function with modules on "meta", and the graphs of its levels.

    Attributes:
        call: The call.
        run: Runs the function; the graphs are captured from it.
        family: The key of the call without integers and strings.
        levels: Key of a level -> its graph.
    """

    def __init__(self, call: Call, fn: Any, constants: list[Any], family: Hashable) -> None:
        arguments = call.inputs.arguments._replace(leaves=constants)
        inputs = call.inputs._replace(arguments=arguments, scope=Scope(constants))
        state = call.run_state.without_modules()
        own = replace(call, fn=fn, inputs=inputs, run_state=state)
        self.call, self.run = own, CapturedRun(own)
        self.family = family
        self.levels: dict[tuple[Any, ...], Compiled] = {}
        self._forwards: list[Forward | None] = []  # the result of `forward`, once computed

    def forward(self, inputs: list[Tensor | None]) -> "Forward | None":
        """The forward, for comparison; None if a backward may depend on more than its operations."""
        if not self._forwards:
            self._forwards.append(_forward_of(self.run, inputs))
        return self._forwards[0]

    def level(self, run: Any) -> Compiled:
        """The graph of a level, of this call or of an equal one."""
        found = self.levels.get(run.key)
        if found is None:
            name = f"{run.key[0]} of {_block_name(self.call)}"
            level, place = _Level(self._own(run)), CacheSlot.of(self, name, run.key)
            found = Compiled(level, backend=self.call.backend, name=name, place=place)
            self.levels[run.key] = found
        return found

    def extra_inputs(
        self, run: Any, count: int, wanted: list[int], arrived: list[int], free: set[int]
    ) -> frozenset[int]:
        """Inputs beyond the wanted ones by which a captured vjp also differentiates, if all are
        free."""
        for key in self.levels:
            if key[:3] == ("the vjp", run.key, count) and key[4] == tuple(arrived):
                more = frozenset(key[3]).difference(wanted)
                if len(key[3]) == len(more) + len(wanted) and more <= free:
                    return more
        return frozenset()

    def _own(self, run: Any) -> Any:
        # the level with this template's call instead of the caller's
        if isinstance(run, Run):
            return self.run
        own = copy(run)
        own.run, own.call = self._own(run.run), self.call
        return own


class _Level:
    """A level as the function to be captured."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self.run = run

    def __call__(self, tensors: list[Tensor | None]) -> list[Tensor | None]:
        with inside(value_checks_off=True):  # an earlier run has made these checks
            return list(self.run(*tensors))


class Forward(NamedTuple):
    """A captured forward. If two are equal, the graphs of all their levels are equal.

    code: The code of the graph.
    constants: (dtype, values) of small tensors that the function makes from numbers.
    outputs: The result without its tensors.
    """

    code: str
    constants: list[Any]
    outputs: StaticTree


def _forward_of(first: CapturedRun, inputs: list[Tensor | None]) -> Forward | None:
    hooks = _HookCalls()
    by_user: list[bool] = []

    def run(tensors: list[Tensor | None]) -> list[Tensor | None]:
        with torch.enable_grad(), hooks:
            outputs = first(*[None if x is None else _as_variable(x) for x in tensors])
        by_user.append(graph_summary(outputs).has_user_code)
        return [None if y is None else y.detach() for y in outputs]

    given = [None if x is None else x.detach().contiguous() for x in inputs]
    with torch.no_grad():
        entry, lifted = trace_graph(run, given, name=f"the forward of {_block_name(first.call)}")
    small = all(x.numel() <= _MAX_CONSTANT for x in lifted)
    plain = small and all(map(is_plain, first.outputs.leaves))
    if not plain or hooks.registered or any(by_user):
        return None
    constants = [(x.dtype, x.tolist()) for x in lifted]
    return Forward(entry.code, constants, first.outputs)


def _template_of(call: Call, inputs: list[Tensor | None]) -> Template:
    """The template of a call and of all equal ones, for inputs of these shapes."""
    key, family, shared = _call_keys(call, inputs)
    found = _TEMPLATES.get(key)
    if found is None:
        memo: dict[int, Any] = {id(x): x for x in shared}
        for module in call.inputs.scope.modules():
            for x in _state_of(module).values():
                memo[id(x)] = torch.empty_like(x, device="meta")
        made = Template(call, *deepcopy((call.fn, call.inputs.arguments.leaves), memo), family)
        found = _TEMPLATES[key] = _equal_template(made, inputs) or made
        while len({id(x) for x in _TEMPLATES.values()}) > MAX_TEMPLATES:
            _TEMPLATES.popitem(last=False)
    _TEMPLATES.move_to_end(key)
    return found


def _equal_template(made: Template, inputs: list[Tensor | None]) -> Template | None:
    """A template that differs in integers and strings only, and has an equal forward."""
    alike = {id(x): x for x in _TEMPLATES.values() if x.family == made.family}
    if not alike or (forward := made.forward(inputs)) is None:
        return None
    return next((x for x in alike.values() if x.forward(inputs) == forward), None)


def _call_keys(call: Call, inputs: list[Tensor | None]) -> tuple[Hashable, Hashable, list[Any]]:
    """For inputs of these shapes: a key of everything that a call depends on besides tensors; this key
    without integers and strings; and the objects that the keys contain by identity."""
    fixed = (
        call.inputs.arguments.structure,
        call.inputs.arguments.slots,
        call.inputs.places,
        call.backend,
        tuple(call.inputs.state.items()),
        call.stand_ins.active,
        call.run_state.autocast.key,
        call.contiguous_dropout,
        *[None if x is None else (x.dtype, x.shape, x.device) for x in inputs],
    )
    state = {id(x) for module in call.inputs.scope.modules() for x in _state_of(module).values()}
    reader = _Reader(state, _block_name(call))
    static = call.fn, call.inputs.arguments.leaves
    key = reader.key(static), fixed
    family = _Reader(state, _block_name(call), labels=False).key(static), fixed
    return key, family, reader.shared


def _state_of(module: nn.Module) -> dict[str, Tensor]:
    own = {**module._parameters, **module._buffers}
    return {name: x for name, x in own.items() if x is not None}


def _block_name(call: Call) -> str:
    modules = list(call.inputs.scope.held)
    return type(modules[0]).__name__ if modules else name_of(call.fn)


def _as_variable(x: Tensor) -> Tensor:
    return x.detach().requires_grad_(x.is_floating_point() or x.is_complex())


class _HookCalls(TorchFunctionMode):
    """Inside, notes whether a tensor hook was registered: a backward then depends on more than the
    operations of the forward."""

    registered = False

    def __torch_function__(self, func: Op, types: Types, args: Args = (), kwargs: Kw = None) -> Any:
        self.registered |= func is Tensor.register_hook
        return func(*args, **(kwargs or {}))


@final
class _Reader:
    """Makes a key of everything that a function reads besides tensors: equal keys, equal graphs.

    labels: The key contains integers and strings, which may be mere numbers and names of layers.
    shared: Objects that the key contains by identity, so that a template has to share them.
    """

    def __init__(self, state: set[int], name: str, *, labels: bool = True) -> None:
        self._state, self._name, self._labels = state, name, labels  # state: ids of module tensors
        self._seen = dict[int, int]()  # id of an object -> the number of its first visit
        self.shared: list[Any] = []

    def key(self, value: object) -> Hashable:
        if is_plain(value):
            if type(value) in (int, str) and not self._labels:
                return type(value).__name__
            return type(value), value
        if id(value) in self._seen:
            return "seen", self._seen[id(value)]
        self._seen[id(value)] = len(self._seen)
        if isinstance(value, Tensor):
            if id(value) in self._state:
                return "state", tuple(value.shape), value.dtype
            raise UnsupportedError(
                f"remat(compile=True): expected tensors as arguments, parameters or buffers of "
                f"{self._name}, got a {type(value).__name__} in an attribute, which a graph for all "
                "equal blocks would share. Use register_buffer, or compile=False."
            )
        if isinstance(value, nn.Module):
            return self._module(value)
        if isinstance(value, list | tuple):
            return type(value), *map(self.key, value)
        if isinstance(value, dict):
            keys = (k if is_plain(k) else self.key(k) for k in value)
            return type(value), *zip(keys, map(self.key, value.values()), strict=True)
        if isinstance(value, partial):
            return "partial", self.key(value.func), self.key(value.args), self.key(value.keywords)
        if isinstance(value, MethodType):
            return "method", value.__func__, self.key(value.__self__)
        if isinstance(value, FunctionType | BuiltinFunctionType) or not hasattr(value, "__dict__"):
            self.shared.append(value)
            return "object", id(value)
        return type(value), self.key(vars(value))

    def _module(self, module: nn.Module) -> Hashable:
        fields = vars(module)
        own = {name: value for name, value in fields.items() if name not in _OF_MODULES}
        hooks = [tuple(fields[name].values()) for name in _HOOKS if fields.get(name)]
        state = tuple((name, self.key(x)) for name, x in _state_of(module).items())
        parts = module._modules.items()
        children = tuple((name, None if x is None else self.key(x)) for name, x in parts)
        return type(module), module.training, state, children, self.key(own), self.key(hooks)
