"""What one run of a loss shows: modules, random numbers, autocast, custom Functions; and the warnings
about what makes second-order training meaningless or fragile."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from hoglib._core import pytree
from hoglib._core.autograd import fresh_leaves
from hoglib._core.detachment import name_of_call
from hoglib._core.gradient_graph import graph_summary
from hoglib._core.module_names import ModuleNames, watching_modules
from hoglib._core.pytree import is_float
from hoglib._core.state import RandomState, StateGuard
from hoglib._core.swap import keep_swapped
from hoglib._core.torch_internals import (
    eagerly,
    has_compiled,
    has_dynamo,
    is_compiled,
    is_once_differentiable,
    transforms_active,
    watching_functions,
)
from hoglib.auditing.locator import ModuleStack
from hoglib.auditing.problem import Problem
from hoglib.auditing.routes import reverse_over_reverse
from hoglib.errors import NoSecondDerivative
from hoglib.verification.report import CULPRIT, Row


@final
@dataclass
class Observations:
    """What one run showed; modules by name, in the order in which they returned."""

    ran: dict[int, nn.Module] = field(default_factory=dict)
    with_dropout: list[str] = field(default_factory=list)
    drawing: list[str] = field(default_factory=list)  # modules that draw other random numbers
    drawn_outside: list[str] = field(default_factory=list)  # sources other than torch's generators
    stateful: list[str] = field(default_factory=list)  # attributes that change the next value
    autocast: list[str] = field(default_factory=list)
    autocast_around: bool = False  # autocast was on where audit was called
    functions: list[tuple[type[Function], str]] = field(default_factory=list)
    compiled: bool = False  # code from torch.compile ran
    compiled_raises: Exception | None = None  # the error of its second derivative
    outside_params: list[str] = field(
        default_factory=list
    )  # params also used from the model itself
    unused: list[str] = field(default_factory=list)  # parameters
    finite: bool = True
    deterministic: bool = True  # the same state gives the same value
    not_finite: list[str] = field(default_factory=list)  # modules with outputs that are not finite

    @property
    def random(self) -> bool:
        """Whether the loss draws random numbers."""
        return bool(self.with_dropout or self.drawing or self.drawn_outside)


def observe(problem: Problem, modules: ModuleStack) -> Observations:
    """Run the loss at its parameters; modules that were not known until then get names.

    Raises what the loss raises, and NoSecondDerivative if its value does not depend on the parameters.
    """
    seen = Observations()
    device = problem.leaves[0].device
    with StateGuard(problem.names.modules(), problem.generators) as state:
        if has_dynamo():
            _observe_compiled_code(seen, problem, state)
        state.begin()
        random = RandomState(problem.generators, problem.names.modules())
        leaves = fresh_leaves(problem.leaves, False)
        with (
            problem.names.discovering(), modules.tracking(), _observing(seen, modules, device),
            keep_swapped(), eagerly(seen.compiled),
        ):  # fmt: skip
            value = problem.value(leaves, problem.batch)
        seen.drawn_outside = random.drawn()
        seen.finite = bool(value.isfinite())
        _observe_parameters(seen, problem, value, leaves)
        _observe_repetition(seen, problem, state, value)
    return seen


def _observe_compiled_code(seen: Observations, problem: Problem, state: StateGuard) -> None:
    """Whether compiled code runs, and has a second derivative; modes cannot see into compiled code."""
    state.begin()
    try:
        value = problem.value(fresh_leaves(problem.leaves, False), problem.batch)
    except Exception:  # it is raised again, and reported, by the run that is observed
        return
    modules = any(map(has_compiled, problem.names.roots))
    seen.compiled = modules or graph_summary(value).has_compiled_code
    if seen.compiled:
        try:
            v = [torch.ones_like(x) for x in problem.leaves]
            state.begin()
            reverse_over_reverse(
                lambda *own: problem.value(list(own), problem.batch), problem.leaves, v, v
            )
        except RuntimeError as error:
            seen.compiled_raises = error


def _observe_parameters(
    seen: Observations, problem: Problem, value: Tensor, leaves: list[Tensor]
) -> None:
    """Which parameters the value was computed from."""
    reached = graph_summary(value).leaves
    reentrant = any(function is CheckpointFunction for function, _ in seen.functions)
    pairs = list(zip(problem.paths, leaves, strict=True))
    unused = [path for path, leaf in pairs if id(leaf) not in reached]
    if not reentrant:  # the graph inside a reentrant checkpoint cannot be seen
        if len(unused) == len(leaves):
            raise NoSecondDerivative(
                "loss(params, batch): expected a value that depends on params, got one that does not; "
                "look for .detach(), .item(), .data or a torch.no_grad() in the loss, and for a loss "
                "that uses the model's own parameters instead of the params it is given."
            )
        seen.unused = unused
    seen.outside_params = [
        path for path, x in zip(problem.paths, problem.originals, strict=True)
        if id(x) in reached
    ]  # fmt: skip


def _observe_repetition(
    seen: Observations, problem: Problem, state: StateGuard, value: Tensor
) -> None:
    """Whether a second run gives the same value: with the attributes that the first one left on
    modules, and with the initial ones."""
    changed = state.changed_attributes()

    def repeats(*, restore_attributes: bool) -> bool:
        state.begin(attributes=restore_attributes)
        with keep_swapped(), eagerly(seen.compiled):
            again = problem.value(fresh_leaves(problem.leaves, False), problem.batch)
        return torch.allclose(again, value, rtol=1e-5, atol=0.0, equal_nan=True)

    if repeats(restore_attributes=False):
        return
    seen.deterministic = repeats(restore_attributes=True)
    names = problem.names
    if seen.deterministic:
        seen.stateful = [".".join(part for part in (names.of(m), a) if part) for m, a in changed]


@contextmanager
def _observing(seen: Observations, modules: ModuleStack, device: torch.device) -> Iterator[None]:
    seen.autocast_around = torch.is_autocast_enabled(device.type)
    mode = _ObservingMode(seen, device, lambda: modules.current_name)
    with (
        _observing_random_numbers(seen, modules, device),
        watching_functions(mode.on_function),
        mode,
    ):
        yield


class _ObservingMode(TorchFunctionMode):
    """Notes torch calls under autocast, dropout, and the application of custom Functions."""

    def __init__(
        self, seen: Observations, device: torch.device, current_name: Callable[[], str]
    ) -> None:
        super().__init__()
        self._seen, self._device, self._current_name = seen, device, current_name

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = self._current_name()
        if torch.is_autocast_enabled(self._device.type) and name not in self._seen.autocast:
            self._seen.autocast.append(name)
        if "dropout" not in name_of_call(func):
            return func(*args, **(kwargs or {}))
        state = _generator_state(self._device)
        result = func(*args, **(kwargs or {}))
        drawn = not torch.equal(state, _generator_state(self._device))
        if drawn and name not in self._seen.with_dropout:
            self._seen.with_dropout.append(name)
        return result

    def on_function(self, function: type[Function], args: tuple[Any, ...]) -> None:
        applied = (function, self._current_name())
        graphed = function is CheckpointFunction or any(
            is_float(x) and x.requires_grad for x in pytree.leaves(args)
        )
        if graphed and applied not in self._seen.functions:
            self._seen.functions.append(applied)


@contextmanager
def _observing_random_numbers(
    seen: Observations, modules: ModuleStack, device: torch.device
) -> Iterator[None]:
    """Notes the modules that draw random numbers: those that change the state of torch's generator. A
    module is left out if one of its parts is noted."""
    states: list[tuple[nn.Module | None, Tensor, bool]] = []  # module, state before, part noted

    def start(module: nn.Module, args: Any) -> None:
        seen.ran[id(module)] = module
        states.append((module, _generator_state(device), False))

    def end(module: nn.Module, args: Any, output: Any) -> None:
        if states and states[-1][0] is module:
            compare(*states.pop())
        made = [y for y in pytree.leaves(output) if is_float(y) and not transforms_active()]
        if not all(bool(y.detach().isfinite().all()) for y in made):
            seen.not_finite.append(modules.names.called(module))

    def compare(module: nn.Module | None, before: Tensor, part_noted: bool) -> None:
        if torch.equal(before, _generator_state(device)):
            return
        name = modules.names.briefly(module)
        noted = seen.with_dropout if isinstance(module, _DropoutNd) else seen.drawing
        if not part_noted and name not in (*seen.with_dropout, *seen.drawing):
            noted.append(name)
        if states:
            states[-1] = (*states[-1][:2], True)

    states.append((None, _generator_state(device), False))
    with watching_modules(start, end):
        yield
        compare(*states[0])  # entries above it belong to modules that raised


def _generator_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


MAX_NAMES = 5  # names in a sentence
EACH_PRODUCT_DIFFERS = (
    "Each product is of another function, so that conjugate gradients, eigenvalues and differences of "
    "gradients are meaningless."
)


def not_finite_row(seen: Observations) -> Row:
    """The only row for a loss that is not finite: none of its derivatives means anything."""
    where = ""
    if seen.not_finite:
        where = f"The first output that is not finite is that of {seen.not_finite[0]}. "
    return Row(
        "finite", "fail", None,
        "the loss is not a finite number at params, so nothing else was checked. "
        f"{where}Look for NaN in the batch, and for log, sqrt and divisions at zero.",
    )  # fmt: skip


def culprit_rows(seen: Observations, names: ModuleNames) -> Iterator[Row]:
    """A row for each observation that makes second derivatives wrong or impossible."""
    if seen.compiled_raises is not None:
        for name in [*map(names.title, _compiled_modules(names))] or ["the loss"]:
            yield Row(
                f"{CULPRIT}{name}", "fail", None,
                "It was compiled by torch.compile, and compiled code has no second derivative: "
                f"{str(seen.compiled_raises).splitlines()[0][:160]}. Use the module before "
                "compilation, or `hoglib.functional_loss`, which runs it uncompiled. Everything "
                "else was checked uncompiled.",
            )  # fmt: skip
    if not seen.deterministic:
        yield Row(
            "deterministic", "fail", None,
            "the loss gives two values for the same random numbers and the same state of its modules "
            "(hidden nondeterminism): does it read a clock, draw random numbers outside of torch, or "
            "count in a global variable? Its derivatives and differences are meaningless.",
        )  # fmt: skip
    if seen.outside_params:
        yield Row(
            f"{CULPRIT}the loss", "fail", None,
            f"It uses {_listed(seen.outside_params)} of the model itself as well as the params that it "
            "is given: a part of the derivatives is missing. Look for model.parameters() or a list of "
            "weights in it; take them from params, or detach() what is meant as a constant.",
        )  # fmt: skip


def warning_rows(seen: Observations, names: ModuleNames) -> Iterator[Row]:
    """A row for each observation that makes second derivatives fragile."""
    for name, text in _warnings(seen, names):
        yield Row(name, "warn", None, text)


def _warnings(seen: Observations, names: ModuleNames) -> Iterator[tuple[str, str]]:
    if seen.with_dropout:
        yield (
            "dropout",
            f"Dropout is on in {_listed(seen.with_dropout)}. {EACH_PRODUCT_DIFFERS} Call model.eval(), "
            "or give every product the same seed (`torch.manual_seed` before each).",
        )
    if seen.drawing or seen.drawn_outside:
        who = _listed(seen.drawing) if seen.drawing else "The loss"
        source = f" from {_listed(seen.drawn_outside)}" if seen.drawn_outside else ""
        yield (
            "random numbers",
            f"{who} draws random numbers{source}. {EACH_PRODUCT_DIFFERS} Draw them beforehand and pass "
            "them in the batch, or give every product the same seed.",
        )
    if seen.stateful:
        yield (
            "state",
            "The next value will differ: the loss depends on what a run leaves in "
            f"{_listed([f'`{name}`' for name in seen.stateful])}. {EACH_PRODUCT_DIFFERS} Make it "
            "part of the batch, or keep it fixed while second derivatives are taken.",
        )
    training = [
        names.briefly(m) for m in seen.ran.values() if isinstance(m, _BatchNorm) and m.training
    ]
    if training:
        yield (
            "batch norm",
            f"Batch norm is in training mode in {_listed(training)}: it couples the examples of a "
            "batch. The Hessian of a batch is then no mean over examples, and that of a data set "
            "depends on how it is split into batches. hoglib leaves the running statistics "
            "unchanged. Call .eval() on the layer, or normalize each example by itself "
            "(GroupNorm, LayerNorm).",
        )
    if seen.autocast_around:
        yield (
            "autocast",
            "Autocast is on around the call: derivatives are rounded to half precision twice. Take "
            "second derivatives outside of autocast, as hoglib's penalties do.",
        )
    elif seen.autocast:
        yield (
            "autocast",
            f"Autocast is on inside {_listed(seen.autocast)}: second derivatives are rounded to half "
            "precision twice there. Move autocast out of the model, around the call.",
        )
    once = [
        f"{f.__qualname__} in {name}" for f, name in seen.functions if is_once_differentiable(f)
    ]
    if once:
        yield (
            "once_differentiable",
            f"{_listed(once)} is decorated with @once_differentiable: a second derivative through it "
            "raises, or under torch.autograd.grad(inputs=...) is silently zero. Remove the decorator, "
            "and compute backward from the saved inputs with differentiable torch operations.",
        )
    reentrant = [name for f, name in seen.functions if f is CheckpointFunction]
    if reentrant:
        yield (
            "reentrant checkpoint",
            f"torch.utils.checkpoint runs with use_reentrant=True in {_listed(reentrant)}: it raises "
            "under torch.autograd.grad, and has no second derivative. Pass use_reentrant=False, or use "
            "`hoglib.ops.remat`.",
        )
    if seen.compiled:
        compiled = _listed([*map(names.briefly, _compiled_modules(names))]) or "A function"
        yield (
            "compiled",
            f"{compiled} was compiled by torch.compile, and compiled code has no second "
            "derivative: torch raises. `hoglib.functional_loss` runs its model uncompiled; "
            "elsewhere use the module before compilation.",
        )
    if seen.unused:
        yield (
            "unused parameters",
            f"The loss does not depend on {_listed(seen.unused)}: their gradient is None, and their "
            "rows and columns of the Hessian are zero. Leave them out of params, or look for a "
            "branch that does not run.",
        )


def _compiled_modules(names: ModuleNames) -> list[nn.Module]:
    return [m for m in names.modules() if is_compiled(m) or m._compiled_call_impl is not None]


def _listed(found: Sequence[str]) -> str:
    names = list(dict.fromkeys(found))
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + more
