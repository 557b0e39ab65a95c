"""What runs in which module: calls with their arguments, and the operations in them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.overrides import TorchFunctionMode

from hoglib import _tree
from hoglib._functorch import transforms_active, watching_functions
from hoglib.stand_ins import seen_through
from hoglib.verification import _where as where
from hoglib.verification._call import is_float, is_part
from hoglib.verification._module_names import Names, watching_modules
from hoglib.verification._where import Place
from hoglib.verification.auditing.stops import INNER


class Running:
    """The stack of modules that run now."""

    def __init__(self, names: Names) -> None:
        self.names = names
        self.stack: list[nn.Module] = []
        self.failed: nn.Module | None = None  # in which an error was raised

    @property
    def where(self) -> str:
        """The module that runs now, in a sentence."""
        return self.names.briefly(self.stack[-1] if self.stack else None)

    @contextmanager
    def watching(self) -> Iterator[None]:
        def start(module: nn.Module, args: Any) -> None:
            self.stack.append(module)

        def end(module: nn.Module, args: Any, output: Any) -> None:
            if self.stack and self.stack[-1] is module:
                self.stack.pop()

        self.stack.clear()
        try:
            with watching_modules(start, end):
                yield
        except BaseException:
            self.failed = self.stack[-1] if self.stack else None
            raise


@dataclass
class ModuleCall:
    """One run of a module, as it was."""

    module: nn.Module | None  # None for the whole loss
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)  # those that required grad
    parts: list["ModuleCall"] = field(default_factory=list)
    inside_transforms: bool = False


def calls_of(names: Names, run: Callable[[], Any]) -> ModuleCall:
    """The tree of the module calls of a run, with copies of what they were given."""
    root = ModuleCall(None)
    stack = [root]

    def start(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call = ModuleCall(module, inside_transforms=transforms_active())
        if not call.inside_transforms:
            call.args, call.kwargs = _copied((args, kwargs))
            # what a loss puts in the place of a parameter is a tensor
            call.parameters = {
                name: p.detach()
                for name, p in module.named_parameters()
                if p.requires_grad and not isinstance(p, nn.Parameter)
            }
        stack[-1].parts.append(call)
        stack.append(call)

    def end(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if len(stack) > 1 and stack[-1].module is module:
            stack.pop()

    handles = []
    for module in {id(module): module for module in names.modules()}.values():
        if isinstance(module, torch.jit.ScriptModule):
            continue
        handles.append(module.register_forward_pre_hook(start, prepend=True, with_kwargs=True))
        handles.append(module.register_forward_hook(end, with_kwargs=True))
    try:
        with suppress(Exception):  # told by the verdict; what ran until then is known
            run()
    finally:
        for handle in handles:
            handle.remove()
    return root


def _copied(tree: Any) -> Any:
    return _tree.map_tensors(
        lambda x: x.detach().clone().requires_grad_(x.requires_grad and is_float(x)), tree
    )


@dataclass
class Operation:
    """A torch call, or the application of a custom Function, in a module's own code."""

    name: str
    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    place: Place | None
    owner: nn.Module | None  # whose code makes it, called by its name or by another module's
    function: type[Function] | None = None


class _Operations(TorchFunctionMode):
    """The outermost torch calls that something with a graph goes through, in one module's own code."""

    def __init__(self, here: Callable[[], bool]) -> None:
        super().__init__()
        self.found: list[Operation] = []
        self.here = here
        self.depth: Any = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.depth.depth or not self.here():
            return func(*args, **kwargs)
        # what it calls says more than its name
        inside = isinstance(func, FunctionType) and func.__name__ not in INNER
        again = seen_through(func) if inside else None
        if again is not None:
            with self:
                return again(*args, **kwargs)
        graphed = any(is_float(x) and x.requires_grad for x in _tree.leaves((args, kwargs)))
        given = _copied((args, kwargs)) if graphed else None
        result = func(*args, **kwargs)
        made = any(is_float(y) and y.requires_grad for y in _tree.leaves(result))
        if given is not None and made:
            name = getattr(func, "__name__", str(func))
            if name == "__get__":
                name = getattr(getattr(func, "__self__", None), "__name__", name)
            args, kwargs = given
            self.found.append(Operation(name, func, args, kwargs, where.here(), where.owner()))
        return result


def operations(module: nn.Module | None, run: Callable[[], Any]) -> list[Operation]:
    """The operations of a module's own code, not of its parts, in a run of it; of the loss for None."""
    depth = 0

    def start(part: nn.Module, args: Any) -> None:
        nonlocal depth
        depth += part is not module

    def end(part: nn.Module, args: Any, output: Any) -> None:
        nonlocal depth
        depth -= part is not module

    watch = _Operations(lambda: depth == 0)

    def applied(function: type[Function], args: tuple[Any, ...]) -> None:
        if depth == 0 and not is_part(function):
            given = _copied(args)
            watch.found.append(
                Operation(
                    function.__qualname__,
                    function.apply,
                    given,
                    {},
                    where.caller(),
                    where.owner(),
                    function,
                )
            )

    with watching_modules(start, end), watching_functions(applied) as watch.depth, watch:
        run()
    return watch.found
