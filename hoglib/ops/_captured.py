"""What a function reads besides its arguments: closure, globals, defaults, partial arguments, self.

A Function that runs a Python function again later differentiates by what it was given. A tensor that
the function finds elsewhere gets no gradient, without an error, and asking it for `requires_grad` is
no help: `torch.func` hands out tensors that answer False. So whatever holds a tensor is reported.
"""

import dis
import sysconfig
from collections.abc import Iterator, Mapping
from functools import lru_cache, partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hoglib import _arguments as arguments

# Deep enough for a partial of a method of an object with a list of configs of tensors.
_MAX_DEPTH = 8
_MAX_ITEMS = 1000  # of one container
# Functions of installed libraries are taken to compute with their arguments.
_INSTALLED = tuple({path for key, path in sysconfig.get_paths().items() if key.endswith("lib")})
_OPAQUE = (str, bytes, int, float, complex, type, type(None), ModuleType, CodeType, torch.dtype)


class Capture(NamedTuple):
    """A tensor, module or generator, and how it is reached."""

    how: str  # "closes over"
    path: str  # "self.layers[0]"
    value: Any
    via: str = ""  # "closes over `helper`, which "

    def __str__(self) -> str:
        return f"{self.via}{self.how} `{self.path}`"


def held(value: Any) -> Iterator[Capture]:
    """The tensors, modules and generators inside any object."""
    yield from _of_value(value, "holds", "value", _MAX_DEPTH, set())


def hidden(module: nn.Module) -> Iterator[Capture]:
    """The modules and trainable tensors that a module holds and has not registered."""
    known = {id(value) for value in (*module.parameters(), *module.buffers(), *module.modules())}
    for prefix, part in module.named_modules():
        for name, value in vars(part).items():
            if name in _MODULE_FIELDS:
                continue
            where = f"{prefix}.{name}" if prefix else name
            for capture in _of_value(value, "holds", where, 3, set()):
                trainable = isinstance(capture.value, nn.Module) or (
                    isinstance(capture.value, Tensor)
                    and capture.value.requires_grad
                    and capture.value.is_leaf
                )
                if trainable and id(capture.value) not in known:
                    yield capture


def refuse(what: str, fn: Any) -> list[torch.Generator]:
    """Raise if `fn` reaches a tensor or a module; otherwise, the generators that it reaches."""
    generators = []
    for capture in _of_callable(fn, _MAX_DEPTH, set()):
        if isinstance(capture.value, torch.Generator):
            generators.append(capture.value)
            continue
        raise arguments.WrongValue(
            f"{what}: expected a function that is given every tensor and module as an argument, got "
            f"`{name_of(fn)}`, which {capture} ({_short(capture.value)}); no gradient would reach "
            f"it, and nothing would tell. {_advice(what, fn, capture)}"
        )
    return generators


def refuse_hidden(what: str, module: nn.Module) -> None:
    """Raise if a module holds parameters that it has not registered."""
    for capture in hidden(module):
        raise arguments.WrongValue(
            f"{what}: expected a module whose parameters and parts are registered, got "
            f"{type(module).__name__}, which {capture} ({_short(capture.value)}) unregistered; no "
            f"gradient would reach it, and nothing would tell. Use nn.Parameter, nn.ParameterList "
            f"or nn.ModuleList."
        )


def name_of(fn: Any) -> str:
    inner = fn.func if isinstance(fn, partial) else fn
    return str(getattr(inner, "__qualname__", type(inner).__name__)).rpartition("<locals>.")[2]


def _short(value: Any) -> str:
    if isinstance(value, Tensor):
        return arguments.describe(value)
    return f"the module {type(value).__name__}"


def _advice(what: str, fn: Any, capture: Capture) -> str:
    if isinstance(fn, MethodType) and isinstance(fn.__self__, nn.Module):
        name = fn.__name__
        if name in ("forward", "__call__"):
            return f"Write `{what}(module)(...)`, which makes its parameters arguments."
        return f"Write `{what}(lambda module, *args: module.{name}(*args))(module, ...)`."
    root = capture.path.partition(".")[0].partition("[")[0]
    name = root if root.isidentifier() and root not in ("self", "args") else "value"
    return f"Make it an argument: `{what}(lambda {name}, *args: ...)({name}, ...)`."


def _of_value(value: Any, how: str, path: str, depth: int, seen: set[int]) -> Iterator[Capture]:
    if isinstance(value, Tensor | nn.Module | torch.Generator):
        yield Capture(how, path, value)
    elif isinstance(value, _OPAQUE) or depth == 0 or id(value) in seen:
        return
    elif isinstance(value, FunctionType | MethodType | partial):
        for inner in _of_callable(value, depth - 1, seen):
            yield inner._replace(via=f"{how} `{path}`, which {inner.via}")
    else:
        seen.add(id(value))
        for inner_path, item in _items(value, path):
            yield from _of_value(item, how, inner_path, depth - 1, seen)


def _items(value: Any, path: str) -> list[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return [(f"{path}[{key!r}]", item) for key, item in list(value.items())[:_MAX_ITEMS]]
    if isinstance(value, list | tuple | set | frozenset):
        return [(f"{path}[{i}]", item) for i, item in enumerate(list(value)[:_MAX_ITEMS])]
    fields = dict(getattr(value, "__dict__", {}))
    slots = getattr(type(value), "__slots__", ())
    for name in (slots,) if isinstance(slots, str) else slots:
        fields.setdefault(name, getattr(value, name, None))
    return [(f"{path}.{name}", item) for name, item in fields.items()]


def _of_callable(fn: Any, depth: int, seen: set[int]) -> Iterator[Capture]:
    if depth == 0 or id(fn) in seen or isinstance(fn, _OPAQUE):
        return
    if isinstance(fn, MethodType):
        yield from _of_value(fn.__self__, "is a method of", "self", depth, seen)
        yield from _of_callable(fn.__func__, depth - 1, seen)
        return
    if isinstance(fn, FunctionType):
        seen.add(id(fn))
        yield from _of_function(fn, depth - 1, seen)
        return
    if isinstance(fn, partial):
        seen.add(id(fn))
        yield from _of_callable(fn.func, depth - 1, seen)
        named = [*((f"args[{i}]", value) for i, value in enumerate(fn.args)), *fn.keywords.items()]
        for name, value in named:
            yield from _of_value(value, "has the partial argument", name, depth - 1, seen)
        return
    yield from _of_value(fn, "is an object with", "self", depth, seen)
    run = vars(type(fn)).get("__call__")
    if isinstance(run, FunctionType):
        yield from _of_callable(run, depth - 1, seen)


def _of_function(fn: FunctionType, depth: int, seen: set[int]) -> Iterator[Capture]:
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        try:
            value = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
        yield from _of_value(value, "closes over", name, depth, seen)
    defaults = fn.__defaults__ or ()
    names = fn.__code__.co_varnames[: fn.__code__.co_argcount][-len(defaults) or None :]
    for name, value in [*zip(names, defaults, strict=False), *(fn.__kwdefaults__ or {}).items()]:
        yield from _of_value(value, "has the default", name, depth, seen)
    if (fn.__module__ or "").partition(".")[0] == "hoglib" or _installed(fn.__code__):
        return
    for chain in _global_reads(fn.__code__):
        value, used = fn.__globals__.get(chain[0]), 1
        # `weights.w` of an imported Python module: only the attribute that is read counts.
        while isinstance(value, ModuleType) and used < len(chain):
            value, used = getattr(value, chain[used], None), used + 1
        yield from _of_value(value, "reads the global", ".".join(chain[:used]), depth, seen)


@lru_cache(maxsize=4096)
def _installed(code: CodeType) -> bool:
    return code.co_filename.startswith(_INSTALLED)


@lru_cache(maxsize=4096)
def _global_reads(code: CodeType) -> tuple[tuple[str, ...], ...]:
    """The globals that code reads, each with the attributes read of it: ("F", "relu")."""
    chains: list[list[str]] = []
    growing = False
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            chains.append([instruction.argval])
            growing = True
        elif growing and instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            chains[-1].append(instruction.argval)
        elif instruction.opname not in ("CACHE", "EXTENDED_ARG"):
            growing = False
    reads = [tuple(chain) for chain in chains]
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            reads.extend(_global_reads(constant))
    return tuple(dict.fromkeys(reads))


# What every module has, and an LSTM's list of its own parameters.
_MODULE_FIELDS = {*vars(nn.Module()), "_flat_weights", "_flat_weight_refs"}
