"""Locates the module, and the operation in it, that loses a derivative, by checking every call by
itself.

A module call is a function of its inputs x, its parameters p and the gradient u that comes in:
f(x, p, u) = <u, module(x, p)>. If the derivative of the whole loss is wrong, so is that of one of the
calls that it makes, then that of one of the calls in it, down to a module whose parts are all right.
There the torch calls and custom Functions of its own code are checked in the same way.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.overrides import TorchFunctionMode

from hoglib._core import pytree, source_location
from hoglib._core.autograd import Vector
from hoglib._core.module_names import ModuleNames, watching_modules
from hoglib._core.pytree import is_float
from hoglib._core.source_location import SourceLine
from hoglib._core.swap import call_with
from hoglib._core.torch_internals import transforms_active, watching_functions
from hoglib.auditing.route_checker import CheckResult, RouteChecker, padding_rows
from hoglib.auditing.routes import Scalar
from hoglib.auditing.stop_gradients import AUTOGRAD_CALLS, StopGradientReplay
from hoglib.stand_ins.mode import without_override_check
from hoglib.verification.call import is_part

Check = Callable[[RouteChecker], CheckResult]  # checks one derivative of any function
MAX_OPERATIONS = 40  # of one module's own code that are checked


class Fault(NamedTuple):
    """A module call that loses a derivative, though none of its parts does."""

    call: "ModuleCall"
    result: CheckResult
    operations: list[tuple["Operation", CheckResult]]  # those of its own code that lose it
    own_operations: list["Operation"]  # all of its own code
    unchecked: list["ModuleCall"]  # parts that cannot be run by themselves

    @property
    def module(self) -> nn.Module | None:
        """The module whose code contains the operations; another module may have called its method."""
        owners = {id(op.owner): op.owner for op, _ in self.operations}
        (owner,) = owners.values() if len(owners) == 1 else (None,)
        return owner or self.call.module


@final
class Locator:
    """Finds the faults in the tree of module calls of a loss.

    run: runs the whole loss. initial_state: the context in which a module, or the loss, gives the same
    value in every run.
    """

    def __init__(
        self,
        root: "ModuleCall",
        run: Callable[[], Any],
        initial_state: Callable[[nn.Module | None], AbstractContextManager[None]],
    ) -> None:
        self._root, self._run_loss, self._initial_state = root, run, initial_state
        self._checkers: dict[int, RouteChecker | None] = {}
        self._constant: set[int] = set()  # calls without variables
        self._operations: dict[int, list[tuple[Operation, RouteChecker | None]]] = {}

    def find(self, check: Check, result: CheckResult) -> Iterator[Fault]:
        """The faults behind a derivative of the whole loss that is wrong or raises, one for each
        module."""
        found: set[int] = set()
        for fault in self._descend(self._root, check, result, result.raised is not None):
            if id(fault.module) not in found:
                found.add(id(fault.module))
                yield fault

    def _descend(
        self, call: "ModuleCall", check: Check, result: CheckResult, raises: bool
    ) -> Iterator[Fault]:
        fault_below, unchecked = False, []
        for part in call.parts:
            checker = self._checker(part)
            if checker is None:
                if id(part) not in self._constant:
                    unchecked.append(part)
                continue
            of_part = _run_check(checker, check, raises)
            if of_part.at_fault:
                fault_below = True
                yield from self._descend(part, check, of_part, raises)
        own = self._own_operations(call)
        checked = [
            (op, _run_check(checker, check, raises)) for op, checker in own if checker is not None
        ]
        at_fault = [(op, of_op) for op, of_op in checked if of_op.at_fault]
        if at_fault or not fault_below:
            yield Fault(call, result, at_fault, [op for op, _ in own], unchecked)

    def _checker(self, call: "ModuleCall") -> RouteChecker | None:
        """None for a call that cannot be run by itself, or that has no variables."""
        if id(call) not in self._checkers:
            self._checkers[id(call)] = None
            if call.module is not None and not call.inside_transforms:
                with suppress(Exception):  # the call cannot be run by itself
                    f, leaves, first = self._function_of_call(call)
                    if not leaves:
                        self._constant.add(id(call))
                        return None
                    padded = {name: row for name, _, row in padding_rows(call.module)}
                    frozen = {
                        first + i: padded[name]
                        for i, name in enumerate(call.parameters)
                        if name in padded
                    }
                    self._checkers[id(call)] = RouteChecker(
                        f, leaves, StopGradientReplay(), frozen=frozen
                    )
        return self._checkers[id(call)]

    def _function_of_call(self, call: "ModuleCall") -> tuple[Scalar, Vector, int]:
        """A module call as a scalar function of its variables, their values, and the index of the first
        parameter among them."""
        module, names = call.module, list(call.parameters)
        assert module is not None

        def run(inputs: Any, values: Vector) -> Any:
            args, kwargs = inputs
            with self._initial_state(module):
                return call_with(module, dict(zip(names, values, strict=True)), *args, **kwargs)

        values = [call.parameters[name] for name in names]
        return _as_scalar_function(run, (call.args, call.kwargs), values)

    def _own_operations(self, call: "ModuleCall") -> list[tuple["Operation", RouteChecker | None]]:
        """The operations of a module's own code, each kind once."""
        if id(call) not in self._operations:
            kinds: dict[Any, Operation] = {}
            with suppress(Exception):  # then the fault is reported for the module as a whole
                for op in record_operations(call.module, lambda: self._run_again(call)):
                    kinds.setdefault((op.name, op.line, _signature(op)), op)
            self._operations[id(call)] = [
                (op, self._checker_of_operation(op, call.module))
                for op in list(kinds.values())[:MAX_OPERATIONS]
            ]
        return self._operations[id(call)]

    def _run_again(self, call: "ModuleCall") -> Any:
        """The call with the variables that it had."""
        if call.module is None:
            return self._run_loss()
        values = {name: p.clone().requires_grad_() for name, p in call.parameters.items()}
        # views, because a module may change its inputs in place, which leaves do not allow
        args, kwargs = pytree.map_tensors(
            lambda x: x.detach().clone().requires_grad_(x.requires_grad).view_as(x),
            (call.args, call.kwargs),
        )
        with self._initial_state(call.module):
            return call_with(call.module, values, *args, **kwargs)

    def _checker_of_operation(
        self, op: "Operation", module: nn.Module | None
    ) -> RouteChecker | None:
        """None for an operation that cannot be run by itself, or that has no variables."""

        def run(inputs: Any, values: Vector) -> Any:
            args, kwargs = inputs
            with self._initial_state(module):
                return op.func(*args, **kwargs)

        try:
            f, leaves, _ = _as_scalar_function(run, (op.args, op.kwargs), [])
            return RouteChecker(f, leaves, StopGradientReplay()) if leaves else None
        except Exception:  # it cannot be run by itself
            return None


def _run_check(checker: RouteChecker, check: Check, raises: bool) -> CheckResult:
    """raises: look only for what raises, without finite differences."""
    checker.compares = not raises
    return check(checker)


def _signature(op: "Operation") -> tuple[Any, ...]:
    leaves = pytree.leaves((op.args, op.kwargs))
    return tuple((tuple(x.shape), x.dtype) for x in leaves if isinstance(x, Tensor))


def _as_scalar_function(
    run: Callable[[Any, Vector], Any], inputs: Any, parameters: Vector
) -> tuple[Scalar, Vector, int]:
    """<u, run(inputs, parameters)> as a function of the inputs that require grad, the parameters and u;
    the values of these, and the index of the first parameter among them.

    A complex variable is given by its real and imaginary parts.
    """
    leaves, structure = pytree.flatten(inputs)
    slots = [i for i, x in enumerate(leaves) if is_float(x) and x.requires_grad]
    variables = [leaves[i].detach() for i in slots] + [p.detach() for p in parameters]
    are_complex = [x.is_complex() for x in variables]
    variables = [torch.view_as_real(x) if x.is_complex() else x for x in variables]
    count = len(variables)

    def outputs(*values: Tensor) -> list[Tensor]:
        given = [
            torch.view_as_complex(x) if is_complex else x
            for x, is_complex in zip(values, are_complex, strict=True)
        ]
        args = [x.detach().clone() if isinstance(x, Tensor) else x for x in leaves]
        for i, x in zip(slots, given, strict=False):
            args[i] = x.clone()  # run may change it in place
        return _float_tensors(run(pytree.unflatten(args, structure), given[len(slots) :]))

    first = outputs(*(x.clone().requires_grad_() for x in variables))
    differentiable = [i for i, y in enumerate(first) if y.requires_grad and y.numel()]
    if not differentiable:
        return (lambda *values: torch.zeros(())), [], 0
    random = torch.Generator("cpu").manual_seed(1)
    u = [
        torch.randn(y.shape, dtype=torch.float64, device="cpu", generator=random).to(
            y.device, _real_dtype(y)
        )
        for y in (first[i] for i in differentiable)
    ]

    def f(*values: Tensor) -> Tensor:
        found = outputs(*values[:count])
        terms = []
        for i, weights in zip(differentiable, values[count:], strict=True):
            y = found[i]
            # both parts of a complex output count
            terms += [((y.real + 0.7 * y.imag if y.is_complex() else y) * weights).sum()]
        return pytree.sum_scalars(terms)

    return f, [*variables, *u], len(slots)


def _float_tensors(value: Any) -> list[Tensor]:
    """The floating-point tensors of an output, also those in objects that are no pytrees."""
    found = []
    for leaf in pytree.leaves(value):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif hasattr(leaf, "__dict__"):
            found += [x for x in pytree.leaves(dict(vars(leaf))) if isinstance(x, Tensor)]
    return [y for y in found if is_float(y)]


def _real_dtype(y: Tensor) -> torch.dtype:
    return y.dtype.to_real() if y.is_complex() else y.dtype


@final
class ModuleStack:
    """The stack of modules that are running."""

    def __init__(self, names: ModuleNames) -> None:
        self.names = names
        self._stack: list[nn.Module] = []
        self.failed: nn.Module | None = None  # the module in which an error was raised

    @property
    def current(self) -> nn.Module | None:
        """The innermost module that is running."""
        return self._stack[-1] if self._stack else None

    @property
    def current_name(self) -> str:
        """Its name, as it stands in a sentence."""
        return self.names.briefly(self.current)

    @contextmanager
    def tracking(self) -> Iterator[None]:
        """Inside, the modules that this thread runs are pushed and popped."""

        def push(module: nn.Module, args: Any) -> None:
            self._stack.append(module)

        def pop(module: nn.Module, args: Any, output: Any) -> None:
            if self.current is module:
                self._stack.pop()

        self._stack.clear()
        try:
            with watching_modules(push, pop):
                yield
        except BaseException:
            self.failed = self.current
            raise


@final
@dataclass
class ModuleCall:
    """One recorded call of a module."""

    module: nn.Module | None  # None for the whole loss
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)  # those that required grad
    parts: list["ModuleCall"] = field(default_factory=list)
    inside_transforms: bool = False


def record_calls(names: ModuleNames, run: Callable[[], Any]) -> ModuleCall:
    """The tree of module calls in a run, with copies of their arguments."""
    root = ModuleCall(None)
    stack = [root]

    def start(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call = ModuleCall(module, inside_transforms=transforms_active())
        if not call.inside_transforms:
            call.args, call.kwargs = _detached_copy((args, kwargs))
            # a loss substitutes plain tensors for the parameters that it was given
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
        with suppress(Exception):  # the check reports it; the calls until then are known
            run()
    finally:
        for handle in handles:
            handle.remove()
    return root


@final
@dataclass
class Operation:
    """A torch call, or the application of a custom Function, in a module's own code."""

    name: str
    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    line: SourceLine | None
    owner: nn.Module | None  # the module whose code makes the call
    function: type[Function] | None = None


def record_operations(module: nn.Module | None, run: Callable[[], Any]) -> list[Operation]:
    """The operations in a run of a module that its own code makes, not its parts; of the loss for
    None."""
    depth = 0

    def start(part: nn.Module, args: Any) -> None:
        nonlocal depth
        depth += part is not module

    def end(part: nn.Module, args: Any, output: Any) -> None:
        nonlocal depth
        depth -= part is not module

    recorder = _OperationRecorder(lambda: depth == 0)

    def applied(function: type[Function], args: tuple[Any, ...]) -> None:
        if depth == 0 and not is_part(function):
            recorder.found.append(
                Operation(
                    function.__qualname__, function.apply, _detached_copy(args), {},
                    source_location.caller_line(), source_location.running_module(), function,
                )
            )  # fmt: skip

    with watching_modules(start, end), watching_functions(applied) as recorder.applying, recorder:
        run()
    return recorder.found


class _OperationRecorder(TorchFunctionMode):
    """Records the outermost torch calls that map tensors with a graph to tensors with a graph."""

    def __init__(self, enabled: Callable[[], bool]) -> None:
        super().__init__()
        self.found: list[Operation] = []
        self.enabled = enabled
        self.applying: Any = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.applying.depth or not self.enabled():
            return func(*args, **kwargs)
        # the calls inside a composite function say more than its name
        composite = isinstance(func, FunctionType) and func.__name__ not in AUTOGRAD_CALLS
        again = without_override_check(func) if composite else None
        if again is not None:
            with self:
                return again(*args, **kwargs)
        graphed = any(is_float(x) and x.requires_grad for x in pytree.leaves((args, kwargs)))
        given = _detached_copy((args, kwargs)) if graphed else None
        result = func(*args, **kwargs)
        made = any(is_float(y) and y.requires_grad for y in pytree.leaves(result))
        if given is not None and made:
            name = getattr(func, "__name__", str(func))
            if name == "__get__":
                name = getattr(getattr(func, "__self__", None), "__name__", name)
            args, kwargs = given
            line, owner = source_location.torch_call_line(), source_location.running_module()
            self.found.append(Operation(name, func, args, kwargs, line, owner))
        return result


def _detached_copy(tree: Any) -> Any:
    """A copy whose tensors are leaves, which require grad where the originals do."""
    return pytree.map_tensors(
        lambda x: x.detach().clone().requires_grad_(x.requires_grad and is_float(x)), tree
    )
