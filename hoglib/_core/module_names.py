"""Qualified names of the modules that a function calls."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from hoglib._core.closures import Capture, held


class ModuleNames:
    """Names of the modules that a function is, holds, or is seen to call.

    Those of the one model have the names that its parameters have. Of several models each name starts
    with what the function calls the model; with `always`, also of one that it only closes over.
    """

    def __init__(self, fn: Any, *, always: bool = False) -> None:
        everything = list(held(fn))
        found = [one for one in everything if isinstance(one.value, nn.Module)]
        self._generators = [x.value for x in everything if isinstance(x.value, torch.Generator)]
        self._names: dict[int, str] = {}
        self.roots: list[nn.Module] = []
        self.prefixes: list[str] = []  # of the names in each root
        if hasattr(fn, "user_criterion"):  # of `hoglib.functional_loss`
            self._add("", fn.model)
            if isinstance(fn.user_criterion, nn.Module):
                self._add("criterion", fn.user_criterion)
        tops = _tops(found)
        for one in tops:
            if id(one.value) not in self._names:
                alone = not self.roots and len(tops) == 1 and not (always and one.value is not fn)
                self._add("" if alone else one.path.removeprefix("self."), one.value)

    def _add(self, prefix: str, root: nn.Module) -> None:
        self.roots.append(root)
        self.prefixes.append(prefix)
        for name, part in root.named_modules():
            whole = ".".join(step for step in (prefix, name) if step)
            self._names.setdefault(id(part), whole)

    @contextmanager
    def discovering(self) -> Iterator[None]:
        """Modules that run inside, and that nothing known holds, get names; their buffers stay as they
        are."""
        late: list[tuple[Tensor, Tensor]] = []

        def start(module: nn.Module, args: Any) -> None:
            if self.meet(module):
                late.extend((b, b.detach().clone()) for b in module.buffers())

        try:
            with watching_modules(start):
                yield
        finally:
            with torch.no_grad():
                for buffer, kept in reversed(late):
                    buffer.copy_(kept)

    def meet(self, module: nn.Module) -> bool:
        """Give a module that runs a name, unless it has one; whether it had none."""
        if id(module) in self._names:
            return False
        self._add("" if not self.roots else type(module).__name__, module)
        return True

    def of(self, module: nn.Module) -> str:
        return self._names.get(id(module), type(module).__name__)

    def title(self, module: nn.Module | None) -> str:
        """Its qualified name; for a whole model, which has none, its class."""
        return "the loss" if module is None else self.of(module) or type(module).__name__

    def briefly(self, module: nn.Module | None) -> str:
        """The same in a sentence of many."""
        if module is None:
            return "the loss"
        name = self.of(module)
        return f"`{name}`" if name else "the model itself"

    def called(self, module: nn.Module | None) -> str:
        """The same in a sentence, with its class."""
        if module is None:
            return "the loss, outside of modules"
        name, kind = self.of(module), type(module).__name__
        return f"`{name}` ({kind})" if name else f"the model itself ({kind})"

    def modules(self) -> Iterator[nn.Module]:
        for root in self.roots:
            yield from root.modules()

    def generators(self) -> list[torch.Generator]:
        """Those that the loss holds, and that modules keep."""
        kept = [x for m in self.modules() for x in vars(m).values()]
        return [*self._generators, *(x for x in kept if isinstance(x, torch.Generator))]


@contextmanager
def watching_modules(
    start: Callable[[nn.Module, Any], None],
    end: Callable[[nn.Module, Any, Any], None] = lambda module, args, output: None,
) -> Iterator[None]:
    """Calls these before and after each module that this thread runs inside, but for what is compiled.

    Those that another thread runs meanwhile, of a model in training perhaps, are not this one's.
    """
    here = threading.get_ident()

    def ours() -> bool:
        return threading.get_ident() == here and not torch.compiler.is_compiling()

    def before(module: nn.Module, args: Any) -> None:
        if ours():
            start(module, args)

    def after(module: nn.Module, args: Any, output: Any) -> None:
        if ours():
            end(module, args, output)

    handles = [register_module_forward_pre_hook(before), register_module_forward_hook(after)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _tops(found: list[Capture]) -> list[Capture]:
    """Those that are no part of another one, each once."""
    parts = {id(part) for one in found for part in one.value.modules() if part is not one.value}
    tops = {id(one.value): one for one in reversed(found) if id(one.value) not in parts}
    return list(reversed(tops.values()))
