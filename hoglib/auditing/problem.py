"""The loss of an audit as a scalar function of real leaves, with equal values in every run.

Differences of gradients mean nothing if anything but the leaves changes. So each run starts from equal
random numbers and an equal state of the modules. `observe` runs the loss first, and notes everything
that makes second derivatives meaningless, fragile or impossible.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from copy import copy
from functools import partial
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode

from hoglib import errors
from hoglib._core.messages import validation
from hoglib._core.messages.module_names import ModuleNames, watching_modules
from hoglib._core.modules.module_kinds import BATCH_NORMS
from hoglib._core.modules.state import RandomState, StateGuard, generator_state
from hoglib._core.modules.swap import keep_swapped
from hoglib._core.numerics.element_differences import random_like
from hoglib._core.numerics.finite_differences import to_double
from hoglib._core.runtime.source_location import running_module
from hoglib._core.substrate.autograd import Vector, fresh_leaves
from hoglib._core.substrate.detachment import name_of_call
from hoglib._core.substrate.gradient_graph import graph_summary
from hoglib._core.torch_api import pytree
from hoglib._core.torch_api.dispatch import Args, Kw, Op, Types
from hoglib._core.torch_api.function_watch import watching_functions
from hoglib._core.torch_api.pytree import Tree, is_float
from hoglib._core.torch_api.torch_internals import (
    eagerly,
    has_compiled,
    has_dynamo,
    is_compiled,
    is_once_differentiable,
    no_autocast,
    transforms_active,
)
from hoglib.auditing.routes import Checker, Locator, StopGradientReplay, reverse_over_reverse, scale
from hoglib.verification.maps import real
from hoglib.verification.precision import DOUBLE
from hoglib.verification.report import CULPRIT, Row, Rows

PROBLEM = "(loss, params, batch)"


class NamedProblem(NamedTuple):
    """A loss(params, batch) to audit; the name is "" for a single problem."""

    name: str
    loss: Any
    params: Any
    batch: Any


def parse_problems(what: str, value: object) -> list[NamedProblem]:
    """The problems in a tuple (loss, params, batch), in a list of tuples, or in a dict of them by name.

    Raises ArgumentTypeError for anything else, ArgumentValueError for no problem at all.
    """
    named: dict[str, Any] = {"": value}
    if isinstance(value, Mapping):
        named = {str(name): problem for name, problem in value.items()}
    elif isinstance(value, list):
        named = {str(number): problem for number, problem in enumerate(value)}
    if not named:
        raise errors.ArgumentValueError(f"{what}: expected at least one {PROBLEM}, got none.")
    for name, found in named.items():
        if isinstance(found, tuple) and len(found) == 3 and callable(found[0]):
            continue
        got = validation.describe(found)
        if isinstance(found, tuple):
            got = f"a tuple ({', '.join(type(part).__name__ for part in found)})"
        raise errors.ArgumentTypeError(
            f"{what}{f'[{name}]' if name else ''}: expected {PROBLEM}, where loss is a function of "
            f"params and batch, a list of such tuples, or a dict of them by name, got {got}; for "
            "instance `return hoglib.functional_loss(model, criterion), "
            "hoglib.trainable_params(model), batch`."
        )
    return [NamedProblem(name, *problem) for name, problem in named.items()]


DTYPES = (
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
)  # fmt: skip


def check_arguments(loss: object, params: Tree, batch: object) -> None:
    """Raises for a loss, parameters or a batch of the wrong kind."""
    validation.loss_function("loss", loss)
    if not isinstance(params, dict | list | tuple | Tensor):
        raise errors.ArgumentTypeError(
            f"params: expected a dict of tensors by qualified name, or another pytree, got "
            f"{validation.describe(params)}; make one with `hoglib.trainable_params(model)`."
        )
    validation.parameters(params)
    validation.refuse_transforms("audit", "audit the function before it is transformed.")
    for path, x in zip(pytree.paths(params), pytree.leaves(params), strict=True):
        what = f"params[{path!r}]" if path else "params"
        if is_lazy(x):
            raise errors.ArgumentValueError(
                f"{what}: expected a tensor with values, got one of a lazy module that has not run; "
                "call the model on a batch once."
            )
        if x.is_nested or x.layout is not torch.strided or x.is_meta or x.dtype not in DTYPES:
            kind = "a nested tensor" if x.is_nested else f"{validation.describe(x)} ({x.layout})"
            raise errors.ArgumentTypeError(
                f"{what}: expected a dense tensor with values, of dtype "
                f"{', '.join(str(dtype)[6:] for dtype in DTYPES)}, got {kind} on {x.device}; "
                "convert it here, and convert it back inside the loss."
            )
    for x in pytree.leaves(batch):
        if isinstance(x, Iterator | DataLoader):
            raise errors.ArgumentTypeError(
                "batch: expected one batch that the loss can read many times, got "
                f"{validation.describe(x)}; pass list(...) of it, or of a DataLoader "
                "next(iter(loader))."
            )


@final
class Problem:
    """The loss, parameters and batch given to `audit`, with the names of the modules."""

    def __init__(self, loss: Callable[..., Tensor], params: Tree, batch: object) -> None:
        self.loss, self.batch = loss, batch
        self.originals, self.structure = pytree.flatten(params)
        # copies of the parameters: the loss may change its parameters in place
        self.leaves: Vector = [x.detach().clone() for x in self.originals]
        self.paths = pytree.paths(params)  # names of the leaves
        self.names = ModuleNames(loss)
        for module in self.names.modules():
            tensors: list[Any] = [*module._parameters.values(), *module._buffers.values()]
            if any(map(is_lazy, tensors)):
                raise errors.ArgumentValueError(
                    f"loss: expected modules with values, got {self.names.called(module)}, which is "
                    "lazy and has not run; call the model on a batch once."
                )

    @property
    def generators(self) -> list[torch.Generator]:
        """Generators other than torch's own that the loss may draw from."""
        in_batch = [g for g in pytree.leaves(self.batch) if isinstance(g, torch.Generator)]
        return [*self.names.generators(), *in_batch]

    def value(self, leaves: Vector, batch: object) -> Tensor:
        """The loss at leaves. It gets a copy of the batch, which it may change in place."""
        params = pytree.unflatten(list(leaves), self.structure)
        return validation.scalar("loss(params, batch)", self.loss(params, _copy_of_batch(batch)))


def _copy_of_batch(tree: Tree) -> Any:
    """A copy that keeps aliases: a tensor that occurs twice is copied once."""
    copies: dict[int, Tensor] = {}

    def copy_of(x: Tensor) -> Tensor:
        if id(x) not in copies:
            # torch.func refuses requires_grad_() inside its transforms
            wanted = x.requires_grad and not transforms_active()
            copied = x.detach().clone()
            copies[id(x)] = copied.requires_grad_() if wanted else copied
        return copies[id(x)]

    return map_tensors(copy_of, tree)


def map_tensors(function: Callable[[Tensor], Tensor], tree: Any, depth: int = 4) -> Any:
    """Apply a function to all tensors of a pytree, also inside of mappings and plain objects unknown to
    pytrees; these are copied.

    depth: levels of objects to search.
    """

    def map_leaf(x: Any) -> Any:
        if isinstance(x, Tensor):
            return function(x)
        if not depth or callable(x) or isinstance(x, type | nn.Module):
            return x
        mapping = isinstance(x, MutableMapping)
        fields = dict(x) if mapping else getattr(x, "__dict__", {})
        if dataclasses.is_dataclass(x) and not mapping:  # with slots, it has no __dict__
            fields = {field.name: getattr(x, field.name) for field in dataclasses.fields(x)}
        found = {name: map_tensors(function, value, depth - 1) for name, value in fields.items()}
        before, after = pytree.leaves(fields), pytree.leaves(found)
        if len(before) == len(after) and all(a is b for a, b in zip(before, after, strict=True)):
            return x
        try:
            copied = copy(x)
            put = copied.__setitem__ if mapping else partial(object.__setattr__, copied)
            for name, value in found.items():
                put(name, value)
        except Exception:  # the object refuses to be copied
            return x
        return copied

    return pytree.map(map_leaf, tree)


PERTURBATION = 0.01  # relative to the size of each tensor


@contextmanager
def reproducible(problem: Problem, *, double: bool) -> Iterator["ReproducibleLoss"]:
    """The loss in float64, or in the dtype of its parameters; the state of modules is restored."""
    modules, generators = problem.names.modules(), problem.generators
    # undo swaps first: the guard has saved the modules without swapped parameters
    with StateGuard(modules, generators, double) as state, keep_swapped():
        loss = ReproducibleLoss(problem, state, double=double)
        try:
            yield loss
        finally:
            loss.release()


@final
class ReproducibleLoss:
    """A loss that starts every run from equal random numbers and an equal state of the modules. Stopped
    gradients can be held constant. A complex parameter is a leaf of real and imaginary parts.
    """

    def __init__(self, problem: Problem, state: StateGuard, *, double: bool) -> None:
        self._problem, self._state, self._double = problem, state, double
        self._batch = map_tensors(to_double, problem.batch) if double else problem.batch
        leaves = to_double(problem.leaves) if double else problem.leaves
        self._are_complex = [x.is_complex() for x in leaves]  # by leaf
        self._move_to([real(x) for x in leaves])

    def move_back(self) -> None:
        """Move to the parameters themselves, of which no second copy is kept meanwhile."""
        self.release()
        leaves = self._problem.leaves
        self._move_to([real(x) for x in (to_double(leaves) if self._double else leaves)])

    def release(self) -> None:
        """Drop tensors of the size of the parameters, which the cycle of a checker and its loss would
        keep until the next garbage collection."""
        self._move_to([])

    def _move_to(self, leaves: Vector) -> None:
        self.leaves = leaves
        # stopped gradients and checks belong to a point: start again
        self.stops = StopGradientReplay()
        self._checker: Checker | None = None
        self._locator: Locator | None = None

    def f(self, *leaves: Tensor) -> Tensor:
        """The loss at leaves, from the initial state of modules and random number generators."""
        with self._initial_state():
            return self._value(leaves)

    def _value(self, leaves: Iterable[Tensor]) -> Tensor:
        pairs = zip(leaves, self._are_complex, strict=True)
        values = [torch.view_as_complex(x) if is_complex else x for x, is_complex in pairs]
        return self._problem.value(values, self._batch)

    def run(self, inside: AbstractContextManager[Any] | None = None) -> Tensor:
        """The loss at its point, with a graph. `inside` is entered after the initial state is restored,
        because that would remove the hooks that `inside` adds to modules."""
        with self._initial_state(), inside or nullcontext():
            return self._value(fresh_leaves(self.leaves, False))

    @contextmanager
    def _initial_state(self, module: nn.Module | None = None) -> Iterator[None]:
        """A context for a run of the loss, or of one of its modules alone."""
        # restoring one module is faster than restoring all
        self._state.begin(of=module)
        with ExitStack() as stack:
            if self._double:
                stack.enter_context(no_autocast())
                stack.enter_context(_KeepFloat64())
            yield

    def perturb(self) -> None:
        """Move to a perturbed point, if the loss is finite there."""
        random = torch.Generator("cpu").manual_seed(0)
        # a tensor of zeros has no size
        sizes = [scale(x) if x.any() else 1.0 for x in self.leaves]
        pairs = zip(self.leaves, sizes, strict=True)
        moved = [x + PERTURBATION * size * random_like(x, random) for x, size in pairs]
        with suppress(Exception):  # the loss may refuse other parameters
            if self.f(*fresh_leaves(moved, False)).isfinite():
                self._move_to(moved)

    def checker(self, seed: int = 0) -> Checker:
        """A checker of routes along the random directions of this seed."""
        if seed or self._checker is None:
            made = Checker(self.f, self.leaves, self.stops, seed)
            if seed:  # few routes need a second direction: not cached
                return made
            self._checker = made
        return self._checker

    def forward_flops(self) -> float:
        """Multiplications and additions of one forward pass, as counted by torch; 0 if torch cannot."""
        with suppress(Exception), FlopCounterMode(display=False) as counter:
            self.run()
            return float(counter.get_total_flops())
        return 0.0

    @property
    def locator(self) -> Locator:
        """Searches the modules of the loss for faults."""
        if self._locator is None:
            self._locator = Locator(self._problem.names, self.run, self._initial_state)
        return self._locator


_NARROW = (torch.float32, torch.float16, torch.bfloat16)
_CASTS = {Tensor.float, Tensor.half, Tensor.bfloat16}


class _KeepFloat64(TorchFunctionMode):
    """Ignores casts of float64 tensors to narrower dtypes.

    `x.float()` or `softmax(x, dtype=torch.float32)` would round the values to compare, or fail on
    float64 weights.
    """

    def __torch_function__(self, func: Op, types: Types, args: Args = (), kwargs: Kw = None) -> Any:
        kwargs = kwargs or {}
        if func in _CASTS:
            return args[0] if args[0].dtype in DOUBLE else func(*args, **kwargs)
        narrow = any(isinstance(x, torch.dtype) and x in _NARROW for x in (*args, *kwargs.values()))
        if narrow and any(x.dtype in DOUBLE for x in pytree.tensors((args, kwargs))):
            args = tuple(_float64_for_narrow(x) for x in args)
            kwargs = {name: _float64_for_narrow(x) for name, x in kwargs.items()}
        return func(*args, **kwargs)


def _float64_for_narrow(value: object) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in _NARROW else value


OTHER_FUNCTIONS = (
    "Each product is of another function, so that conjugate gradients, eigenvalues and differences of "
    "gradients are meaningless."
)
# The text of each warning row; {} stands for the noted names.
WARNINGS = {
    "dropout": f"Dropout is on in {{}}. {OTHER_FUNCTIONS} Call model.eval(), or give every product the "
    "same seed (`torch.manual_seed` before each).",
    "random numbers": f"Random numbers are drawn by {{}}. {OTHER_FUNCTIONS} Draw them beforehand and "
    "pass them in the batch, or give every product the same seed.",
    "state": f"The next value will differ: the loss depends on what a run leaves in {{}}. "
    f"{OTHER_FUNCTIONS} Make it part of the batch, or keep it fixed.",
    "batch norm": "Batch norm is in training mode in {}: it couples the examples of a batch. The "
    "Hessian of a batch is then no mean over examples, and that of a data set depends on how it is "
    "split into batches. Call .eval() on the layer, or normalize each example by itself (GroupNorm, "
    "LayerNorm).",
    "autocast": "Autocast is on in {}: second derivatives are rounded to half precision twice there. "
    "Take them outside of autocast, as hoglib's penalties do.",
    "once_differentiable": "{} is decorated with @once_differentiable: a second derivative through it "
    "raises, or under torch.autograd.grad(inputs=...) is silently zero. Remove the decorator, and "
    "compute backward from the saved inputs with differentiable torch operations.",
    "reentrant checkpoint": "torch.utils.checkpoint runs with use_reentrant=True in {}: it raises "
    "under torch.autograd.grad, and has no second derivative. Pass use_reentrant=False, or use "
    "`hoglib.ops.remat`.",
    "compiled": "{} was compiled by torch.compile, and compiled code has no second derivative: torch "
    "raises. Use the module before compilation, or `hoglib.functional_loss`, which runs it uncompiled.",
    "unused parameters": "The loss does not depend on {}: their gradient is None, and their rows and "
    "columns of the Hessian are zero. Leave them out of params, or look for a branch that does not "
    "run.",
}
Notes = defaultdict[str, dict[str, None]]  # row -> names to report, as an ordered set


class Observations(NamedTuple):
    """Everything that the first runs showed."""

    failures: list[Row]  # reasons for wrong or impossible derivatives
    warnings: list[Row]
    finite: bool  # if False, this is the only failure, and nothing else can be checked
    random: bool  # the loss draws random numbers


def observe(problem: Problem) -> Observations:
    """Run the loss at its parameters; modules seen for the first time get names.

    Raises errors of the loss, and NoSecondDerivative if its value does not depend on the parameters.
    """
    names, notes, failures = problem.names, Notes(dict), list[Row]()
    with StateGuard(names.modules(), problem.generators) as state:
        if has_dynamo():
            # first, because the observed run disables compilation
            failures += _compiled_failures(problem, state, notes)
        state.begin()
        random = RandomState(problem.generators, names.modules())
        leaves = fresh_leaves(problem.leaves, False)
        watch = _Watch(names, notes, leaves[0].device)
        with (
            names.discovering(),
            watching_modules(lambda module, args: None, watch.on_end),
            watching_functions(watch.on_function),
            keep_swapped(),
            eagerly(),
            watch,
        ):
            value = problem.value(leaves, problem.batch)
        notes["random numbers"].update(dict.fromkeys(random.drawn()))
        if not value.isfinite():
            where = watch.not_finite and (
                f"The first output that is not finite is that of {names.called(watch.not_finite[0])}. "
            )
            text = (
                "the loss is not a finite number at params, so nothing else was checked. "
                f"{where or ''}Look for NaN in the batch, and for log, sqrt and divisions at zero."
            )
            row = Row("finite", "fail", None, text)
            return Observations([row], [], finite=False, random=False)
        failures += _parameter_failures(problem, value, leaves, notes)
        failures += _repetition_failures(problem, state, value, notes)
    noted = [(row, text, validation.listing([*notes[row]])) for row, text in WARNINGS.items()]
    warnings = [Row(row, "warn", None, text.format(names)) for row, text, names in noted if names]
    return Observations(failures, warnings, True, bool(notes["dropout"] or notes["random numbers"]))


def _compiled_failures(problem: Problem, state: StateGuard, notes: Notes) -> Rows:
    """Note compiled code, as modes cannot see into it; failures if it has no second derivative."""
    state.begin()
    try:
        value = problem.value(fresh_leaves(problem.leaves, False), problem.batch)
    except Exception:  # the observed run raises it again, and reports it
        return
    names = problem.names
    if not any(map(has_compiled, names.roots)) and not graph_summary(value).has_compiled_code:
        return
    modules = [m for m in names.modules() if is_compiled(m) or m._compiled_call_impl is not None]
    notes["compiled"] = dict.fromkeys([*map(names.briefly, modules)] or ["A function"])
    v = [torch.ones_like(x) for x in problem.leaves]
    state.begin()
    try:
        reverse_over_reverse(lambda *x: problem.value([*x], problem.batch), problem.leaves, v, v)
    except RuntimeError as error:
        line = str(error).splitlines()[0][:160]
        text = f"{WARNINGS['compiled'].format('It')} The error: {line}."
        for name in [*map(names.title, modules)] or ["the loss"]:
            yield Row(f"{CULPRIT}{name}", "fail", None, text)


def _parameter_failures(problem: Problem, value: Tensor, leaves: Vector, notes: Notes) -> Rows:
    """Note unused parameters; fail if the loss uses the model's own parameters beside `params`."""
    reached = graph_summary(value).leaves
    pairs = list(zip(problem.paths, leaves, strict=True))
    unused = [path for path, leaf in pairs if id(leaf) not in reached]
    if not notes["reentrant checkpoint"]:  # it hides the graph inside
        if len(unused) == len(leaves):
            raise errors.NoSecondDerivative(
                "loss(params, batch): expected a value that depends on params, got one that does not; "
                "look for .detach(), .item(), .data or a torch.no_grad() in the loss, and for a loss "
                "that uses the model's own parameters instead of the params it is given."
            )
        notes["unused parameters"] = dict.fromkeys(unused)
    pairs = list(zip(problem.paths, problem.originals, strict=True))
    outside = [path for path, x in pairs if id(x) in reached]
    if outside:
        text = (
            f"It uses {validation.listing(outside)} of the model itself as well as the params that it "
            "is given: a part of the derivatives is missing. Look for model.parameters() or a list of "
            "weights in it; take them from params, or detach() what is meant as a constant."
        )
        yield Row(f"{CULPRIT}the loss", "fail", None, text)


def _repetition_failures(problem: Problem, state: StateGuard, value: Tensor, notes: Notes) -> Rows:
    """Run the loss again, with the attributes that the first run left on modules, and then with the
    initial ones; fail if no run gives an equal value."""
    changed = state.changed_attributes()
    for restore_attributes in (False, True):
        state.begin(attributes=restore_attributes)
        with keep_swapped(), eagerly():
            again = problem.value(fresh_leaves(problem.leaves, False), problem.batch)
        # up to rounding: threads may add in another order
        if torch.allclose(again, value, rtol=1e-5, atol=0.0, equal_nan=True):
            if restore_attributes:
                names = [f"{problem.names.of(m)}.{name}".lstrip(".") for m, name in changed]
                notes["state"] = {f"`{name}`": None for name in names}
            return
    text = (
        "the loss gives two values for the same random numbers and the same state of its modules "
        "(hidden nondeterminism): does it read a clock, draw random numbers outside of torch, or "
        "count in a global variable? Its derivatives and differences are meaningless."
    )
    yield Row("deterministic", "fail", None, text)


@final
class _Watch(TorchFunctionMode):
    """Notes code under autocast, random numbers, custom Functions, and infinite or NaN outputs."""

    def __init__(self, names: ModuleNames, notes: Notes, device: torch.device) -> None:
        super().__init__()
        self._names, self._notes, self._device = names, notes, device
        self._around = torch.is_autocast_enabled(device.type)  # on around the call of `audit`
        self.not_finite: list[nn.Module] = []  # modules with such outputs, in order

    def __torch_function__(self, func: Op, types: Types, args: Args = (), kwargs: Kw = None) -> Any:
        if torch.is_autocast_enabled(self._device.type):
            self._note("autocast", "the code around the call" if self._around else "")
        state = generator_state(self._device)
        result = func(*args, **(kwargs or {}))
        if not torch.equal(state, generator_state(self._device)):
            self._note("dropout" if "dropout" in name_of_call(func) else "random numbers")
        return result

    def on_function(self, function: type[Function], args: tuple[Any, ...]) -> None:
        if function is CheckpointFunction:
            self._note("reentrant checkpoint")
        graphed = any(is_float(x) and x.requires_grad for x in pytree.leaves(args))
        if graphed and is_once_differentiable(function):
            where = self._names.briefly(running_module())
            self._note("once_differentiable", f"{function.__qualname__} in {where}")

    def on_end(self, module: nn.Module, args: object, output: object) -> None:
        if isinstance(module, BATCH_NORMS) and module.training:
            self._note("batch norm", self._names.briefly(module))
        made = [y for y in pytree.leaves(output) if is_float(y) and not transforms_active()]
        if not all(bool(y.detach().isfinite().all()) for y in made):
            self.not_finite.append(module)

    def _note(self, row: str, name: str = "") -> None:
        self._notes[row][name or self._names.briefly(running_module())] = None
