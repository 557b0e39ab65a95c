"""What runs in which module: calls with their arguments, and the operations in them."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, NamedTuple

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
from hoglib.auditing.problem import padding_rows
from hoglib.auditing.route_checker import CheckResult, RouteChecker
from hoglib.auditing.routes import Scalar
from hoglib.auditing.stop_gradients import INNER, StopGradientReplay
from hoglib.stand_ins.mode import without_override_check
from hoglib.verification.call import is_part


class Running:
    """The stack of modules that run now."""

    def __init__(self, names: ModuleNames) -> None:
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


def calls_of(names: ModuleNames, run: Callable[[], Any]) -> ModuleCall:
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
    return pytree.map_tensors(
        lambda x: x.detach().clone().requires_grad_(x.requires_grad and is_float(x)), tree
    )


@dataclass
class Operation:
    """A torch call, or the application of a custom Function, in a module's own code."""

    name: str
    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    place: SourceLine | None
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
        again = without_override_check(func) if inside else None
        if again is not None:
            with self:
                return again(*args, **kwargs)
        graphed = any(is_float(x) and x.requires_grad for x in pytree.leaves((args, kwargs)))
        given = _copied((args, kwargs)) if graphed else None
        result = func(*args, **kwargs)
        made = any(is_float(y) and y.requires_grad for y in pytree.leaves(result))
        if given is not None and made:
            name = getattr(func, "__name__", str(func))
            if name == "__get__":
                name = getattr(getattr(func, "__self__", None), "__name__", name)
            args, kwargs = given
            self.found.append(
                Operation(
                    name,
                    func,
                    args,
                    kwargs,
                    source_location.torch_call_line(),
                    source_location.running_module(),
                )
            )
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
                    source_location.caller_line(),
                    source_location.running_module(),
                    function,
                )
            )

    with watching_modules(start, end), watching_functions(applied) as watch.depth, watch:
        run()
    return watch.found


# === Which module, and which operation in it, loses a derivative: by judging each call by itself.
#
# A call of a module is a function of what it was given, of its parameters, and of the gradient that
# comes in: f(x, p, u) = <u, module(x, p)>. Where the derivative of the whole loss is wrong, so is
# that of
# one of the calls that it makes, and of one of the calls in that, down to one whose parts are all
# right;
# there the torch calls and custom Functions of its own code are judged in the same way.

Ask = Callable[[RouteChecker], CheckResult]  # the derivative in question
MOST = 40  # operations of a module's own code that are judged


class Fault(NamedTuple):
    """Where a derivative is lost. operations: those of the module's own code that lose it."""

    call: ModuleCall
    verdict: CheckResult
    operations: list[tuple[Operation, CheckResult]]
    own: list[Operation]  # all of its own code
    unknown: list[ModuleCall]  # parts that could not be judged by themselves

    @property
    def module(self) -> nn.Module | None:
        """The one whose code makes the operations; a method of it may be called by another one."""
        owners = {id(op.owner): op.owner for op, _ in self.operations}
        (owner,) = owners.values() if len(owners) == 1 else (None,)
        return owner or self.call.module


class Locator:
    """Finds faults in the tree of calls of a loss.

    whole: runs the loss; around: what a part of it runs in, so that it is the same in every run.
    """

    def __init__(
        self,
        root: ModuleCall,
        whole: Callable[[], Any],
        around: Callable[[nn.Module | None], AbstractContextManager[None]],
    ) -> None:
        self._root, self._whole, self._around = root, whole, around
        self._judges: dict[int, RouteChecker | None] = {}
        self._constant: set[int] = set()  # calls without variables
        self._own: dict[int, list[tuple[Operation, RouteChecker | None]]] = {}

    def faults(self, ask: Ask, verdict: CheckResult) -> Iterator[Fault]:
        """Of a derivative that is wrong, or raises, for the whole loss; one for each module."""
        told: set[int] = set()
        for fault in self._descend(self._root, ask, verdict, verdict.raised is not None):
            if id(fault.module) not in told:
                told.add(id(fault.module))
                yield fault

    def _descend(
        self, call: ModuleCall, ask: Ask, verdict: CheckResult, raises: bool
    ) -> Iterator[Fault]:
        below, unknown = False, []
        for part in call.parts:
            judge = self._judge(part)
            if judge is None:
                if id(part) not in self._constant:
                    unknown.append(part)
                continue
            one = _asked(judge, ask, raises)
            if one.at_fault:
                below = True
                yield from self._descend(part, ask, one, raises)
        own = self._operations(call)
        judged = [(op, _asked(judge, ask, raises)) for op, judge in own if judge is not None]
        wrong = [(op, one) for op, one in judged if one.at_fault]
        if wrong or not below:
            yield Fault(call, verdict, wrong, [op for op, _ in own], unknown)

    def _judge(self, call: ModuleCall) -> RouteChecker | None:
        """None where a call cannot be run by itself, or has no variables."""
        if id(call) not in self._judges:
            self._judges[id(call)] = None
            if call.module is not None and not call.inside_transforms:
                with suppress(Exception):  # it does not run by itself
                    f, leaves, first = self._of_call(call)
                    if not leaves:
                        self._constant.add(id(call))
                        return None
                    padded = {name: row for name, _, row in padding_rows(call.module)}
                    frozen = {
                        first + i: padded[name]
                        for i, name in enumerate(call.parameters)
                        if name in padded
                    }
                    self._judges[id(call)] = RouteChecker(
                        f, leaves, StopGradientReplay(), frozen=frozen
                    )
        return self._judges[id(call)]

    def _of_call(self, call: ModuleCall) -> tuple[Scalar, Vector, int]:
        """A call of a module as a scalar function of its variables, their values, and the place of the
        first parameter among them."""
        module, names = call.module, list(call.parameters)
        assert module is not None

        def run(inputs: Any, values: Vector) -> Any:
            args, kwargs = inputs
            with self._around(module):
                return call_with(module, dict(zip(names, values, strict=True)), *args, **kwargs)

        values = [call.parameters[name] for name in names]
        return _as_scalar(run, (call.args, call.kwargs), values)

    def _operations(self, call: ModuleCall) -> list[tuple[Operation, RouteChecker | None]]:
        """Of a module's own code, each kind once."""
        if id(call) not in self._own:
            kinds: dict[Any, Operation] = {}
            with suppress(Exception):  # no better told than by the verdict on the module
                for op in operations(call.module, lambda: self._run(call)):
                    kinds.setdefault((op.name, op.place, _shapes(op)), op)
            self._own[id(call)] = [
                (op, self._of_operation(op, call.module)) for op in list(kinds.values())[:MOST]
            ]
        return self._own[id(call)]

    def _run(self, call: ModuleCall) -> Any:
        """Once more, with the variables that it had."""
        if call.module is None:
            return self._whole()
        values = {name: p.clone().requires_grad_() for name, p in call.parameters.items()}
        # a module may change in place what it is given, which a leaf does not allow
        args, kwargs = pytree.map_tensors(
            lambda x: x.detach().clone().requires_grad_(x.requires_grad).view_as(x),
            (call.args, call.kwargs),
        )
        with self._around(call.module):
            return call_with(call.module, values, *args, **kwargs)

    def _of_operation(self, op: Operation, module: nn.Module | None) -> RouteChecker | None:
        """None where it does not run by itself, or has no variables."""

        def run(inputs: Any, values: Vector) -> Any:
            args, kwargs = inputs
            with self._around(module):
                return op.func(*args, **kwargs)

        try:
            f, leaves, _ = _as_scalar(run, (op.args, op.kwargs), [])
            return RouteChecker(f, leaves, StopGradientReplay()) if leaves else None
        except Exception:  # it does not run by itself
            return None


def _asked(judge: RouteChecker, ask: Ask, raises: bool) -> CheckResult:
    judge.compares = not raises
    return ask(judge)


def _shapes(op: Operation) -> tuple[Any, ...]:
    leaves = pytree.leaves((op.args, op.kwargs))
    return tuple((tuple(x.shape), x.dtype) for x in leaves if isinstance(x, Tensor))


def _as_scalar(
    run: Callable[[Any, Vector], Any], inputs: Any, parameters: Vector
) -> tuple[Scalar, Vector, int]:
    """<u, run(inputs, parameters)> as a function of the inputs that require grad, parameters and u; the
    values of these, and the place of the first parameter.

    Complex variables are given by their real and imaginary parts.
    """
    leaves, structure = pytree.flatten(inputs)
    slots = [i for i, x in enumerate(leaves) if is_float(x) and x.requires_grad]
    variables = [leaves[i].detach() for i in slots] + [p.detach() for p in parameters]
    complex_ones = [x.is_complex() for x in variables]
    variables = [torch.view_as_real(x) if x.is_complex() else x for x in variables]
    count = len(variables)

    def outputs(*values: Tensor) -> list[Any]:
        given = [
            torch.view_as_complex(x) if parts else x
            for x, parts in zip(values, complex_ones, strict=True)
        ]
        filled_in = [x.detach().clone() if isinstance(x, Tensor) else x for x in leaves]
        for i, x in zip(slots, given, strict=False):
            filled_in[i] = x.clone()  # it may be changed in place
        found = run(pytree.unflatten(filled_in, structure), given[len(slots) :])
        return _tensors(found)

    first = outputs(*(x.clone().requires_grad_() for x in variables))
    which = [i for i, y in enumerate(first) if y.requires_grad and y.numel()]
    random = torch.Generator("cpu").manual_seed(1)
    u = [
        torch.randn(y.shape, dtype=torch.float64, device="cpu", generator=random).to(
            y.device, real_dtype(y)
        )
        for y in (first[i] for i in which)
    ]
    if not u:
        return (lambda *values: torch.zeros(())), [], 0

    def f(*values: Tensor) -> Tensor:
        found = outputs(*values[:count])
        terms = []
        for i, weights in zip(which, values[count:], strict=True):
            y = found[i]
            # of a complex output both parts count
            terms += [((y.real + 0.7 * y.imag if y.is_complex() else y) * weights).sum()]
        return pytree.sum_scalars(terms)

    return f, [*variables, *u], len(slots)


def _tensors(value: Any) -> list[Tensor]:
    """The tensors of an output, also of one in an object that torch does not take apart."""
    found = []
    for leaf in pytree.leaves(value):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif hasattr(leaf, "__dict__"):
            found += [x for x in pytree.leaves(dict(vars(leaf))) if isinstance(x, Tensor)]
    return [y for y in found if is_float(y)]


def real_dtype(y: Tensor) -> torch.dtype:
    return y.dtype.to_real() if y.is_complex() else y.dtype
