"""Qualified names of the modules that a function holds or calls."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from hoglib._core.messages.closures import Capture, held


class ModuleNames:
    """Names of the modules that a function is, holds, or calls while it is watched.

    A single model's modules are named as in `model.named_modules()`. With several models, each name
    starts with the function's name for the model.

    Attributes:
        roots: The models.
        prefixes: For each model, the beginning of its modules' names.
    """

    def __init__(self, fn: Any) -> None:
        captures = list(held(fn))
        found = [one for one in captures if isinstance(one.value, nn.Module)]
        self._generators = [x.value for x in captures if isinstance(x.value, torch.Generator)]
        self._names: dict[int, str] = {}  # id of a module -> name
        self.roots: list[nn.Module] = []
        self.prefixes: list[str] = []
        if hasattr(fn, "user_criterion"):  # fn is from `hoglib.functional_loss`
            self._add("", fn.model)
            if isinstance(fn.user_criterion, nn.Module):
                self._add("criterion", fn.user_criterion)
        tops = _outermost_modules(found)
        for one in tops:
            if id(one.value) not in self._names:
                alone = not self.roots and len(tops) == 1
                self._add("" if alone else one.path.removeprefix("self."), one.value)

    def _add(self, prefix: str, root: nn.Module) -> None:
        self.roots.append(root)
        self.prefixes.append(prefix)
        for name, part in root.named_modules():
            whole = ".".join(step for step in (prefix, name) if step)
            self._names.setdefault(id(part), whole)

    @contextmanager
    def discovering(self) -> Iterator[None]:
        """Inside, unnamed modules get a name when they run; their buffers are restored at exit."""
        late: list[tuple[Tensor, Tensor]] = []  # (buffer, copy)

        def start(module: nn.Module, args: tuple[Any, ...]) -> None:
            if self.add(module):
                late.extend((b, b.detach().clone()) for b in module.buffers())

        try:
            with watching_modules(start):
                yield
        finally:
            with torch.no_grad():
                for buffer, kept in reversed(late):
                    buffer.copy_(kept)

    def add(self, module: nn.Module) -> bool:
        """Name a module and its submodules; False if the module has a name already."""
        if id(module) in self._names:
            return False
        self._add("" if not self.roots else type(module).__name__, module)
        return True

    def of(self, module: nn.Module) -> str:
        """The qualified name of a module; "" for a single model, the class for an unknown module."""
        return self._names.get(id(module), type(module).__name__)

    def title(self, module: nn.Module | None) -> str:
        """The qualified name, or the class for a single model."""
        return "the loss" if module is None else self.of(module) or type(module).__name__

    def briefly(self, module: nn.Module | None) -> str:
        """The name in a list of modules."""
        if module is None:
            return "the loss"
        name = self.of(module)
        return f"`{name}`" if name else "the model itself"

    def called(self, module: nn.Module | None) -> str:
        """The name and the class, in a sentence."""
        if module is None:
            return "the loss, outside of modules"
        name, kind = self.of(module), type(module).__name__
        return f"`{name}` ({kind})" if name else f"the model itself ({kind})"

    def modules(self) -> Iterator[nn.Module]:
        """All named modules."""
        for root in self.roots:
            yield from root.modules()

    def generators(self) -> list[torch.Generator]:
        """The random generators that the function, or an attribute of its modules, holds."""
        attributes = [x for m in self.modules() for x in vars(m).values()]
        return [*self._generators, *(x for x in attributes if isinstance(x, torch.Generator))]


@contextmanager
def watching_modules(
    start: Callable[[nn.Module, Any], None],
    end: Callable[[nn.Module, Any, Any], None] = lambda module, args, output: None,
) -> Iterator[None]:
    """Inside, `start` is called before, and `end` after, each module that this thread runs in eager
    mode."""
    here = threading.get_ident()

    def watched() -> bool:
        return threading.get_ident() == here and not torch.compiler.is_compiling()

    def before(module: nn.Module, args: tuple[Any, ...]) -> None:
        if watched():
            start(module, args)

    def after(module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        if watched():
            end(module, args, output)

    with register_module_forward_pre_hook(before), register_module_forward_hook(after):
        yield


def _outermost_modules(found: list[Capture]) -> list[Capture]:
    """The modules in the list, each once, without submodules of other modules in the list."""
    parts = {id(part) for one in found for part in one.value.modules() if part is not one.value}
    tops = {id(one.value): one for one in reversed(found) if id(one.value) not in parts}
    return list(reversed(tops.values()))
