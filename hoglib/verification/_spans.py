"""Which module made a node: modules are seen by hooks while a function runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from inspect import getclosurevars
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from hoglib import _functorch
from hoglib._functional import FunctionalLoss
from hoglib._substitution import Places, substituted


class ModuleCalls:
    """Every call of a module inside `seen()`, as the span of the nodes that were made in it.

    Nodes are numbered in the order in which a thread makes them, so those of a call are the ones from
    its begin to its end, and calls nest. Modules have the names that they have in the modules that fn
    is, calls or closes over.
    """

    def __init__(self, fn: Any) -> None:
        self._roots = dict(_roots(fn))  # names of modules, as prefixes
        self._names: dict[int, str] = {}
        self._kept: list[nn.Module] = []  # so that ids stay theirs
        for prefix, root in self._roots.items():
            self._name(root, prefix)
        self._counts: dict[str, int] = {}
        self._open: list[tuple[int, str]] = []
        self._spans: list[tuple[int, int, str]] = []

    @contextmanager
    def seen(self, places: Places) -> Iterator[None]:
        """Inside, calls are noted; a model that fn brings along gets copies of its buffers, until the
        end of `places`, so that its statistics stay as they are."""

        def before(module: nn.Module, args: Any) -> None:
            if id(module) not in self._names:
                self._name(module, type(module).__name__ if self._roots else "")
            if not self._open and not places.in_use(module):
                with substituted(module, {}):  # for as long as places stand
                    pass
            self._open.append((_functorch.sequence_number(), self._label(module)))

        def after(module: nn.Module, args: Any, output: Any) -> None:
            start, label = self._open.pop()
            self._spans.append((start, _functorch.sequence_number(), label))

        handles = [
            register_module_forward_pre_hook(before),
            register_module_forward_hook(after, always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        self._spans.sort(key=lambda span: (span[0], -span[1]))

    def path(self, node: Any) -> tuple[str, ...]:
        """The calls of modules that a node was made in, outermost first."""
        at = _functorch.sequence_number(node)
        inside = [label for start, end, label in self._spans if start <= at < end]
        return tuple(label for label in inside if label)

    def parameters(self) -> dict[int, str]:
        """Names of the parameters and buffers of all modules that were met, by their ids."""
        return {
            id(tensor): name
            for root in reversed(self._kept)
            for name, tensor in _named_tensors(root, self._names[id(root)])
        }

    def _name(self, root: nn.Module, prefix: str) -> None:
        self._kept.append(root)
        for name, module in root.named_modules():
            self._names.setdefault(id(module), ".".join(part for part in (prefix, name) if part))

    def _label(self, module: nn.Module) -> str:
        """What its box says; nothing for the model itself, which is all there is."""
        name, kind = self._names[id(module)], type(module).__name__
        if not name:
            return ""
        label = f"{name} ({kind})" if name != kind else kind
        self._counts[label] = self._counts.get(label, 0) + 1
        return label if self._counts[label] == 1 else f"{label}{CALL}{self._counts[label]}"


CALL = ", call "  # between a module and the number of its call


def _roots(fn: Any) -> Iterator[tuple[str, nn.Module]]:
    """The modules that a function is, or knows, each with the name that it has there."""
    if isinstance(fn, nn.Module):
        yield "", fn
    elif isinstance(fn, FunctionalLoss):
        yield "", fn.model
    elif isinstance(fn, partial):
        yield from _roots(fn.func)
        known = {**{f"args[{i}]": x for i, x in enumerate(fn.args)}, **fn.keywords}
        yield from ((name, x) for name, x in known.items() if isinstance(x, nn.Module))
    elif isinstance(getattr(fn, "__self__", None), nn.Module):
        yield "", fn.__self__
    else:
        try:
            closed_over = getclosurevars(fn)
        except (TypeError, ValueError):  # an object that can be called, or a builtin
            return
        for name, x in {**closed_over.globals, **closed_over.nonlocals}.items():
            if isinstance(x, nn.Module):
                yield name, x
            elif isinstance(x, FunctionalLoss):
                yield "", x.model


def _named_tensors(root: nn.Module, prefix: str) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in [*root.named_parameters(), *root.named_buffers()]:
        yield ".".join(part for part in (prefix, name) if part), tensor
