"""Locates the module, and the operation in it, that loses a derivative, by checking every call by
itself.

The loss calls modules, and each of them modules, torch functions and custom Functions. A call is a
function of its inputs x, its parameters p and the gradient u that comes in, f(x, p, u) = <u, y(x, p)>.
If a derivative of the whole loss is wrong, so is that of one of the calls that it makes, then that of
one of the calls in it, down to a call whose own calls are all right.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.autograd import Function

from hoglib._core import pytree
from hoglib._core.autograd import Vector
from hoglib._core.element_differences import random_like
from hoglib._core.module_names import ModuleNames
from hoglib._core.pytree import is_float
from hoglib._core.source_location import SourceLine, caller_line, running_module, torch_call_line
from hoglib._core.swap import call_with
from hoglib._core.torch_internals import transforms_active
from hoglib.auditing.routes import Checker, CheckResult, Route, Scalar
from hoglib.auditing.stop_gradients import CallMode, StopGradientReplay
from hoglib.verification.attribution import detached_copy
from hoglib.verification.call import Call, is_part, real

MAX_OPERATIONS = 40  # in one module's own code


@final
@dataclass
class RecordedCall:
    """A call of a module, or an operation: a torch function or a custom Function; or the whole loss."""

    module: nn.Module | None = None  # of an operation, the module whose code makes it
    operation: str = ""  # its name
    run: Callable[..., Any] | None = None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)  # of a module
    line: SourceLine | None = None
    function: type[Function] | None = None
    parts: dict[Any, "RecordedCall"] = field(default_factory=dict)

    @property
    def operations(self) -> list["RecordedCall"]:
        """Those of its own code, not of the modules that it calls."""
        return [part for part in self.parts.values() if part.operation]


class Fault(NamedTuple):
    """A module call that loses a derivative, though none of the modules in it does."""

    call: RecordedCall
    result: CheckResult
    operations: list[RecordedCall]  # those of its own code that lose it

    @property
    def module(self) -> nn.Module | None:
        """The module whose code makes the operations; another module may have called its method."""
        owners = {id(op.module): op.module for op in self.operations}
        (owner,) = owners.values() if len(owners) == 1 else (None,)
        return owner or self.call.module


@final
class Locator:
    """Finds the faults among the calls of a loss.

    run: runs the whole loss inside a context. initial_state: the context in which a module, or the
    loss, gives the same value in every run.
    """

    def __init__(
        self,
        names: ModuleNames,
        run: Callable[[AbstractContextManager[None]], Any],
        initial_state: Callable[[nn.Module | None], AbstractContextManager[None]],
    ) -> None:
        self._root, self._initial_state = record_calls(names, run), initial_state
        self._checkers: dict[int, Checker | None] = {}

    def find(self, route: Route, result: CheckResult) -> Iterator[Fault]:
        """The faults behind a derivative of the whole loss that is wrong or raises, one for each
        module."""
        found: set[int] = set()
        # where a derivative raises, it is enough to look for what raises
        for fault in self._descend(self._root, route, result, result.raised is None):
            if id(fault.module) not in found:
                found.add(id(fault.module))
                yield fault

    def _descend(
        self, call: RecordedCall, route: Route, result: CheckResult, compare: bool
    ) -> Iterator[Fault]:
        fault_below, operations = False, []
        for part in call.parts.values():
            checker = self._checker(part, call)
            of_part = checker.check(route, compare=compare) if checker else None
            if of_part is None or not of_part.at_fault:
                continue
            if part.operation:
                operations.append(part)
            else:
                fault_below = True
                yield from self._descend(part, route, of_part, compare)
        if operations or not fault_below:
            yield Fault(call, result, operations)

    def _checker(self, call: RecordedCall, parent: RecordedCall) -> Checker | None:
        """None for a call that cannot be run by itself, or that has no variables."""
        if id(call) not in self._checkers:
            self._checkers[id(call)] = None
            module = parent.module if call.operation else call.module
            function: Any = call.run

            def run(args: Any, kwargs: Any, parameters: dict[str, Tensor]) -> list[Tensor]:
                with self._initial_state(module):
                    if call.operation:
                        return _float_tensors(function(*args, **kwargs))
                    return _float_tensors(call_with(function, parameters, *args, **kwargs))

            with suppress(Exception):  # it cannot be run by itself
                f, leaves = _as_scalar_function(run, (call.args, call.kwargs, call.parameters))
                if leaves:
                    self._checkers[id(call)] = Checker(f, leaves, StopGradientReplay())
        return self._checkers[id(call)]


def _as_scalar_function(
    run: Callable[..., list[Tensor]], inputs: tuple[Any, ...]
) -> tuple[Scalar, Vector]:
    """<u, run(inputs)> as a function of the inputs that require grad and of u; and the values of these,
    none if nothing depends on them."""
    call = Call(run, inputs, dtype=None)
    call.clone = True  # run may change its inputs in place
    first = call.run_with_grad() if any(map(_requires_grad, pytree.leaves(inputs))) else []
    which = [i for i, y in enumerate(first) if y.requires_grad and y.numel()]
    random = torch.Generator("cpu").manual_seed(1)
    u = [random_like(real(first[i].detach()), random) for i in which]
    outputs, count = call.map(which), len(call.point)

    def f(*values: Tensor) -> Tensor:
        pairs = zip(outputs(*values[:count]), values[count:], strict=True)
        return pytree.sum_scalars([(y * weights).sum() for y, weights in pairs])

    return f, [*call.point, *u] if u else []


def _float_tensors(value: Any) -> list[Tensor]:
    """The floating-point tensors of an output, also those in objects that are no pytrees."""
    found = []
    for leaf in pytree.leaves(value):
        inside = vars(leaf) if hasattr(leaf, "__dict__") and not isinstance(leaf, Tensor) else {}
        found += [leaf, *pytree.leaves(dict(inside))]
    return [y for y in found if is_float(y)]


def record_calls(
    names: ModuleNames, run: Callable[[AbstractContextManager[None]], Any]
) -> RecordedCall:
    """The tree of calls in a run, with copies of their arguments."""
    stack = [root := RecordedCall()]

    def start(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call = RecordedCall(module)
        if not transforms_active():  # whose tensors cannot be copied
            call.run = module
            call.args, call.kwargs = detached_copy((args, kwargs))
            # a loss substitutes plain tensors for the parameters that it was given
            call.parameters = {
                name: p.detach().requires_grad_()
                for name, p in module.named_parameters()
                if p.requires_grad and not isinstance(p, nn.Parameter)
            }
        stack[-1].parts[len(stack[-1].parts)] = call
        stack.append(call)

    def end(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if len(stack) > 1 and stack[-1].module is module:
            stack.pop()

    @contextmanager
    def hooks() -> Iterator[None]:
        with ExitStack() as stack:
            for module in {id(module): module for module in names.modules()}.values():
                if not isinstance(module, torch.jit.ScriptModule):
                    before = module.register_forward_pre_hook(start, prepend=True, with_kwargs=True)
                    after = module.register_forward_hook(end, with_kwargs=True)
                    stack.callback(before.remove)
                    stack.callback(after.remove)
            yield

    recorder = _OperationRecorder(lambda: stack[-1].parts)
    # the check reports an error; the calls until then are known
    with suppress(Exception), recorder.watching():
        run(hooks())
    return root


@final
class _OperationRecorder(CallMode):
    """Records the outermost torch calls that map tensors with a graph to tensors with a graph, and
    custom Functions; each kind of call once.

    parts: those of the module that is running.
    """

    def __init__(self, parts: Callable[[], dict[Any, RecordedCall]]) -> None:
        super().__init__()
        self._parts = parts

    def on_function(self, function: type[Function], args: tuple[Any, ...]) -> None:
        if not is_part(function):
            call = RecordedCall(
                run=function.apply, operation=function.__qualname__, function=function
            )
            self._record(call, (args, {}), caller_line())

    def on_call(self, func: Callable[..., Any], name: str, args: Any, kwargs: Any) -> Any:
        call = key = None
        if any(map(_requires_grad, pytree.leaves((args, kwargs)))):
            call = RecordedCall(run=func, operation=name or str(func))
            key = self._record(call, (args, kwargs), torch_call_line())
        result = func(*args, **kwargs)
        made = any(map(_requires_grad, pytree.leaves(result)))
        if call is not None and not made and self._parts().get(key) is call:
            del self._parts()[key]
        return result

    def _record(self, call: RecordedCall, inputs: Any, line: SourceLine | None) -> Any:
        """Keep a call, unless one like it is kept, or its tensors cannot be copied."""
        parts = self._parts()
        tensors = pytree.tensors(inputs)
        key = call.operation, line, tuple((tuple(x.shape), x.dtype) for x in tensors)
        full = sum(bool(part.operation) for part in parts.values()) >= MAX_OPERATIONS
        if not (key in parts or full or transforms_active()):
            call.args, call.kwargs = detached_copy(inputs)
            call.line, call.module = line, running_module()
            parts[key] = call
        return key


def _requires_grad(x: Any) -> bool:
    return is_float(x) and bool(x.requires_grad)
