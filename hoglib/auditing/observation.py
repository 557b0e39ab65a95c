"""What a few runs of a loss show that makes second derivatives meaningless, fragile or impossible."""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from hoglib._core import pytree, validation
from hoglib._core.autograd import fresh_leaves
from hoglib._core.detachment import name_of_call
from hoglib._core.gradient_graph import graph_summary
from hoglib._core.module_names import ModuleNames, watching_modules
from hoglib._core.pytree import is_float
from hoglib._core.source_location import running_module
from hoglib._core.state import RandomState, StateGuard, generator_state
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
from hoglib.auditing.problem import Problem
from hoglib.auditing.routes import reverse_over_reverse
from hoglib.errors import NoSecondDerivative
from hoglib.verification.report import CULPRIT, Row

OTHER_FUNCTIONS = (
    "Each product is of another function, so that conjugate gradients, eigenvalues and differences of "
    "gradients are meaningless."
)
# The warning of each row; {} stands for the names that were noted.
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
Notes = defaultdict[str, dict[str, None]]  # the names to report, by row; each once, in order


class Observations(NamedTuple):
    """What the runs showed: rows of a report, and what the checks need to know."""

    failures: list[Row]  # of what makes derivatives wrong or impossible
    warnings: list[Row]
    finite: bool  # False: the only failure says so, and nothing else can be checked
    random: bool  # whether the loss draws random numbers
    compiled: bool  # whether code from torch.compile ran


def observe(problem: Problem) -> Observations:
    """Run the loss at its parameters; modules that were not known until then get names.

    Raises what the loss raises, and NoSecondDerivative if its value does not depend on the parameters.
    """
    names, notes, failures = problem.names, Notes(dict), list[Row]()
    with StateGuard(names.modules(), problem.generators) as state:
        compiled = has_dynamo() and _observe_compiled_code(problem, state, notes, failures)
        state.begin()
        random = RandomState(problem.generators, names.modules())
        leaves = fresh_leaves(problem.leaves, False)
        watch = _Watch(names, notes, leaves[0].device)
        with (
            names.discovering(), watching_modules(lambda module, args: None, watch.on_end),
            watching_functions(watch.on_function), keep_swapped(), eagerly(compiled), watch,
        ):  # fmt: skip
            value = problem.value(leaves, problem.batch)
        notes["random numbers"].update(dict.fromkeys(random.drawn()))
        if not value.isfinite():
            where = watch.not_finite and (
                "The first output that is not finite is that of "
                f"{names.called(watch.not_finite[0])}. "
            )
            text = (
                "the loss is not a finite number at params, so nothing else was checked. "
                f"{where or ''}Look for NaN in the batch, and for log, sqrt and divisions at zero."
            )
            row = Row("finite", "fail", None, text)
            return Observations([row], [], finite=False, random=False, compiled=compiled)
        failures += _parameter_failures(problem, value, leaves, notes)
        failures += _repetition_failures(problem, state, value, notes, compiled=compiled)
    warnings = [
        Row(row, "warn", None, text.format(validation.listing([*notes[row]])))
        for row, text in WARNINGS.items()
        if notes[row]
    ]
    drawn = bool(notes["dropout"] or notes["random numbers"])
    return Observations(failures, warnings, True, drawn, compiled)


def _observe_compiled_code(
    problem: Problem, state: StateGuard, notes: Notes, failures: list[Row]
) -> bool:
    """Whether compiled code runs, and has a second derivative; modes cannot see into compiled code."""
    state.begin()
    try:
        value = problem.value(fresh_leaves(problem.leaves, False), problem.batch)
    except Exception:  # it is raised again, and reported, by the run that is observed
        return False
    names = problem.names
    if not any(map(has_compiled, names.roots)) and not graph_summary(value).has_compiled_code:
        return False
    modules = [m for m in names.modules() if is_compiled(m) or m._compiled_call_impl is not None]
    notes["compiled"] = dict.fromkeys([*map(names.briefly, modules)] or ["A function"])
    v = [torch.ones_like(x) for x in problem.leaves]
    state.begin()
    try:
        reverse_over_reverse(
            lambda *own: problem.value([*own], problem.batch), problem.leaves, v, v
        )
    except RuntimeError as error:
        text = (
            WARNINGS["compiled"].format("It") + f" The error: {str(error).splitlines()[0][:160]}."
        )
        for name in [*map(names.title, modules)] or ["the loss"]:
            failures.append(Row(f"{CULPRIT}{name}", "fail", None, text))
    return True


def _parameter_failures(
    problem: Problem, value: Tensor, leaves: list[Tensor], notes: Notes
) -> Iterator[Row]:
    """Which parameters the value was computed from."""
    reached = graph_summary(value).leaves
    pairs = list(zip(problem.paths, leaves, strict=True))
    unused = [path for path, leaf in pairs if id(leaf) not in reached]
    if not notes["reentrant checkpoint"]:  # inside one the graph cannot be seen
        if len(unused) == len(leaves):
            raise NoSecondDerivative(
                "loss(params, batch): expected a value that depends on params, got one that does not; "
                "look for .detach(), .item(), .data or a torch.no_grad() in the loss, and for a loss "
                "that uses the model's own parameters instead of the params it is given."
            )
        notes["unused parameters"] = dict.fromkeys(unused)
    pairs = list(zip(problem.paths, problem.originals, strict=True))
    outside = [path for path, x in pairs if id(x) in reached]
    if outside:
        yield Row(
            f"{CULPRIT}the loss", "fail", None,
            f"It uses {validation.listing(outside)} of the model itself as well as the params that it "
            "is given: a part of the derivatives is missing. Look for model.parameters() or a list of "
            "weights in it; take them from params, or detach() what is meant as a constant.",
        )  # fmt: skip


def _repetition_failures(
    problem: Problem, state: StateGuard, value: Tensor, notes: Notes, *, compiled: bool
) -> Iterator[Row]:
    """Whether a second run gives the same value: with the attributes that the first one left on
    modules, and with the initial ones."""
    changed = state.changed_attributes()
    for restore_attributes in (False, True):
        state.begin(attributes=restore_attributes)
        with keep_swapped(), eagerly(compiled):
            again = problem.value(fresh_leaves(problem.leaves, False), problem.batch)
        if torch.allclose(again, value, rtol=1e-5, atol=0.0, equal_nan=True):
            if restore_attributes:
                names = [f"{problem.names.of(m)}.{name}".lstrip(".") for m, name in changed]
                notes["state"] = {f"`{name}`": None for name in names}
            return
    yield Row(
        "deterministic", "fail", None,
        "the loss gives two values for the same random numbers and the same state of its modules "
        "(hidden nondeterminism): does it read a clock, draw random numbers outside of torch, or "
        "count in a global variable? Its derivatives and differences are meaningless.",
    )  # fmt: skip


@final
class _Watch(TorchFunctionMode):
    """Notes what runs under autocast, draws random numbers, is a custom Function, or is not finite."""

    def __init__(self, names: ModuleNames, notes: Notes, device: torch.device) -> None:
        super().__init__()
        self._names, self._notes, self._device = names, notes, device
        self._around = torch.is_autocast_enabled(device.type)
        self.not_finite: list[nn.Module] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
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

    def on_end(self, module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(module, _BatchNorm) and module.training:
            self._note("batch norm", self._names.briefly(module))
        made = [y for y in pytree.leaves(output) if is_float(y) and not transforms_active()]
        if not all(bool(y.detach().isfinite().all()) for y in made):
            self.not_finite.append(module)

    def _note(self, row: str, name: str = "") -> None:
        self._notes[row][name or self._names.briefly(running_module())] = None
