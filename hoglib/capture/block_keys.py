"""Which blocks of a network are equal but for their tensors."""

from collections.abc import Hashable
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, final

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hoglib._core.closures import name_of
from hoglib._core.references import is_plain
from hoglib.errors import UnsupportedError

MAX_CONSTANT = 64  # numbers of a tensor that two blocks have in common
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OF_MODULES = {*vars(nn.Module()), "forward"}


def call_keys(call: Any, inputs: list[Tensor | None]) -> tuple[Hashable, Hashable, list[Any]]:
    """A key of all that a call depends on besides tensors, for inputs of these shapes; the key of all
    but integers and strings; and the objects that are in the keys by their identity."""
    fixed = (
        call.structure, tuple(call.slots), tuple(call.places), call.backend,
        tuple(call.state_names.items()), call.stand_ins.active, call.run_state.autocast.key, call.mixed,
        *[None if x is None else (x.dtype, x.shape, x.device) for x in inputs],
    )  # fmt: skip
    state = {id(x) for module in call.scope.modules() for x in state_of(module).values()}
    reader = _Reader(state, block_name(call))
    key = reader.key((call.fn, call.constants)), fixed
    family = _Reader(state, block_name(call), labels=False).key((call.fn, call.constants)), fixed
    return key, family, reader.shared


def state_of(module: nn.Module) -> dict[str, Tensor]:
    own = {**module._parameters, **module._buffers}
    return {name: x for name, x in own.items() if x is not None}


def block_name(call: Any) -> str:
    modules = list(call.scope.held)
    return type(modules[0]).__name__ if modules else name_of(call.fn)


def as_variable(x: Tensor) -> Tensor:
    return x.detach().requires_grad_(x.is_floating_point() or x.is_complex())


class HookCalls(TorchFunctionMode):
    """Notes whether a hook of a gradient was registered inside."""

    registered = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.registered |= func is Tensor.register_hook
        return func(*args, **(kwargs or {}))


@final
class _Reader:
    """All that a function reads besides tensors, as a key: equal keys, equal graphs.

    labels: whether integers and strings, which may be no more than numbers and names, are in the key.
    shared: objects that are compared by identity, which a template has to share.
    """

    def __init__(self, state: set[int], name: str, *, labels: bool = True) -> None:
        self._state, self._name, self._labels = state, name, labels
        self._seen = dict[int, int]()
        self.shared: list[Any] = []

    def key(self, value: Any) -> Hashable:
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
        hooks = [tuple(fields[name].values()) for name in HOOKS if fields.get(name)]
        state = tuple((name, self.key(x)) for name, x in state_of(module).items())
        children = tuple(
            (n, None if m is None else self.key(m)) for n, m in module._modules.items()
        )
        return type(module), module.training, state, children, self.key(own), self.key(hooks)
