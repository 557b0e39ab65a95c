"""What makes second-order training meaningless or fragile, seen in one run of a loss."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from hoglib import _tree
from hoglib._functorch import is_compiled, is_once_differentiable, watching_functions
from hoglib._graph import is_compiled as is_compiled_node
from hoglib._graph import nodes
from hoglib.verification._call import is_float
from hoglib.verification._module_calls import Names, Running, called
from hoglib.verification.report import Row

MOST = 5  # names in a sentence


@dataclass
class Look:
    """What a run of a loss showed."""

    ran: dict[int, nn.Module] = field(default_factory=dict)
    drew: list[tuple[str, nn.Module | None]] = field(default_factory=list)
    autocast: list[str] = field(default_factory=list)  # modules in which it is on
    functions: list[tuple[type[Function], str]] = field(default_factory=list)
    compiled: bool = False  # code without a module
    unused: list[str] = field(default_factory=list)
    around: bool = False  # autocast, where audit was called
    by_generator: bool = False


class _Autocast(TorchFunctionMode):
    """Where torch calls are made under autocast."""

    def __init__(self, device: str, where_now: Callable[[], str]) -> None:
        super().__init__()
        self.found: list[str] = []
        self._device, self._where_now = device, where_now

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.is_autocast_enabled(self._device):
            name = self._where_now()
            if name not in self.found:
                self.found.append(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def looking(
    look: Look, names: Names, running: Running, device: torch.device
) -> Iterator[None]:
    """Around a run of the loss."""
    look.around = torch.is_autocast_enabled(device.type)
    states: list[tuple[nn.Module | None, Tensor, bool]] = []

    def state() -> Tensor:
        return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()

    def start(module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        look.ran[id(module)] = module
        states.append((module, state(), False))

    def end(module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or len(states) < 2 or states[-1][0] is not module:
            return
        drew(*states.pop())

    def drew(module: nn.Module | None, before: Tensor, told: bool) -> None:
        changed = not torch.equal(before, state())
        if changed and not told:
            name = "" if module is None else names.of(module)
            if (name, module) not in look.drew:
                look.drew.append((name, module))
        if states and changed:
            states[-1] = (*states[-1][:2], True)  # its parts have told

    def seen(function: type[Function], args: tuple[Any, ...]) -> None:
        if any(is_float(x) and x.requires_grad for x in _tree.leaves(args)):
            if (function, running.name) not in look.functions:
                look.functions.append((function, running.name))

    states.append((None, state(), False))
    handles = [register_module_forward_pre_hook(start), register_module_forward_hook(end)]
    watch = _Autocast(device.type, lambda: running.name)
    try:
        with watching_functions(seen), watch:
            yield
    finally:
        for handle in handles:
            handle.remove()
    look.autocast = watch.found
    drew(*states.pop())


def of_graph(look: Look, value: Tensor) -> None:
    look.compiled = any(map(is_compiled_node, nodes([value])))


def rows(look: Look, names: Names) -> Iterator[Row]:
    ran = list(look.ran.values())
    yield from _random(look)
    yield from _batch_norm(ran, names)
    yield from _autocast(look)
    yield from _functions(look)
    compiled = [
        names.of(m) for m in names.modules() if is_compiled(m) or m._compiled_call_impl is not None
    ]
    if compiled or look.compiled:
        yield Row(
            "compiled", "warn", None,
            f"{_listed(compiled) or 'A function'} was compiled by torch.compile, and compiled code has "
            "no second derivative: torch raises. hoglib runs what `functional_loss` is given "
            "uncompiled; elsewhere use the module that was compiled.",
        )  # fmt: skip
    if look.unused:
        yield Row(
            "unused parameters", "warn", None,
            f"The loss does not depend on {_listed(look.unused)}: their gradient is None, their row "
            "and column of the Hessian zero. Leave them out of params, or look for a branch that does "
            "not run.",
        )  # fmt: skip


def _random(look: Look) -> Iterator[Row]:
    dropped = [name for name, m in look.drew if isinstance(m, _DropoutNd)]
    others = [called(name, m) for name, m in look.drew if not isinstance(m, _DropoutNd)]
    advice = (
        "Each product is of another function, and conjugate gradients, eigenvalues and differences "
        "of gradients mean nothing. "
    )
    if dropped:
        yield Row(
            "dropout", "warn", None,
            f"Dropout is on in {_listed(dropped)}. {advice}Call model.eval(), or give every product the "
            "same seed (`torch.manual_seed` before each).",
        )  # fmt: skip
    if others or look.by_generator:
        who = _listed(others) if others else "The loss, by a torch.Generator,"
        yield Row(
            "random numbers", "warn", None,
            f"{who} draws random numbers. {advice}Draw them before and pass them with the batch, or give "
            "every product the same seed.",
        )  # fmt: skip


def _batch_norm(ran: Sequence[nn.Module], names: Names) -> Iterator[Row]:
    training = [names.of(m) for m in ran if isinstance(m, _BatchNorm) and m.training]
    if training:
        yield Row(
            "batch norm", "warn", None,
            f"Batch norm is in train mode in {_listed(training)}: the examples of a batch are coupled, the "
            "Hessian of a batch is no mean over examples, and that of a data set depends on its "
            "batches. hoglib leaves the running statistics as they are. Call .eval() on it, or use a "
            "norm within examples (GroupNorm, LayerNorm).",
        )  # fmt: skip


def _autocast(look: Look) -> Iterator[Row]:
    if look.around:
        yield Row(
            "autocast", "warn", None,
            "Autocast is on around the call: derivatives are rounded to half precision twice. Take "
            "second derivatives outside of it, as hoglib's penalties do.",
        )  # fmt: skip
    elif look.autocast:
        inside = [f"`{name}`" if name else "the loss" for name in look.autocast]
        yield Row(
            "autocast", "warn", None,
            f"Autocast is on inside {_listed(inside)}: second derivatives are rounded to half precision "
            "twice there. Take the region out of the model, around the call.",
        )  # fmt: skip


def _functions(look: Look) -> Iterator[Row]:
    once = [(f, name) for f, name in look.functions if is_once_differentiable(f)]
    if once:
        found = _listed([f"{f.__qualname__} in {_in(name)}" for f, name in once])
        yield Row(
            "once_differentiable", "warn", None,
            f"{found} is decorated with @once_differentiable: a second derivative through it raises, or "
            "under torch.autograd.grad(inputs=...) is silently zero. Take the decorator off, and "
            "compute in backward by differentiable torch operations from the saved inputs.",
        )  # fmt: skip
    reentrant = [_in(name) for f, name in look.functions if f is CheckpointFunction]
    if reentrant:
        yield Row(
            "reentrant checkpoint", "warn", None,
            f"torch.utils.checkpoint runs with use_reentrant=True in {_listed(reentrant)}: it raises under "
            "torch.autograd.grad, and has no second derivative. Pass use_reentrant=False, or use "
            "`hoglib.ops.remat`.",
        )  # fmt: skip


def _in(name: str) -> str:
    return f"`{name}`" if name else "the model itself"


def _listed(found: Sequence[str]) -> str:
    shown = list(dict.fromkeys(found))
    more = f" and {len(shown) - MOST} more" if len(shown) > MOST else ""
    return ", ".join(shown[:MOST]) + more
