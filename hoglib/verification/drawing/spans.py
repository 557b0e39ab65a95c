"""Which module made a node: modules are seen by hooks while a function runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from hoglib import _functorch
from hoglib._substitution import Places, substituted
from hoglib.verification._module_names import Names


class ModuleCalls:
    """Every call of a module inside `seen()`, as the span of the nodes that were made in it.

    Nodes are numbered in the order in which a thread makes them, so those of a call are the ones from
    its begin to its end, and calls nest. Modules have the names that they have in the modules that fn
    is, calls or closes over.
    """

    def __init__(self, fn: Any) -> None:
        self._names = Names(fn, always=True)
        self._counts: dict[str, int] = {}
        self._open: list[tuple[int, str]] = []
        self._spans: list[tuple[int, int, str]] = []

    @contextmanager
    def seen(self, places: Places) -> Iterator[None]:
        """Inside, calls are noted; a model that fn brings along gets copies of its buffers, until the
        end of `places`, so that its statistics stay as they are."""

        def before(module: nn.Module, args: Any) -> None:
            self._names.meet(module)
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
        roots = reversed([*zip(self._names.prefixes, self._names.roots, strict=True)])
        return {id(x): name for prefix, root in roots for name, x in _named_tensors(root, prefix)}

    def _label(self, module: nn.Module) -> str:
        """What its box says; nothing for the model itself, which is all there is."""
        name, kind = self._names.of(module), type(module).__name__
        if not name:
            return ""
        label = f"{name} ({kind})" if name != kind else kind
        self._counts[label] = self._counts.get(label, 0) + 1
        return label if self._counts[label] == 1 else f"{label}{CALL}{self._counts[label]}"


CALL = ", call "  # between a module and the number of its call


def _named_tensors(root: nn.Module, prefix: str) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in [*root.named_parameters(), *root.named_buffers()]:
        yield ".".join(part for part in (prefix, name) if part), tensor
