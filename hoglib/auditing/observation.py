"""What can be seen in one run of a loss: modules, random numbers, autocast, custom Functions."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from hoglib._core import pytree
from hoglib._core.autograd import fresh_leaves
from hoglib._core.detachment import name_of_call
from hoglib._core.gradient_graph import graph_summary
from hoglib._core.module_names import watching_modules
from hoglib._core.pytree import is_float
from hoglib._core.state import OutsideState, StateGuard
from hoglib._core.swap import keep_swapped
from hoglib._core.torch_internals import (
    eagerly,
    has_compiled,
    has_dynamo,
    transforms_active,
    watching_functions,
)
from hoglib.auditing.locating import Running
from hoglib.auditing.problem import Problem
from hoglib.auditing.routes import reverse_over_reverse
from hoglib.errors import NoSecondDerivative


@dataclass
class Look:
    """What a run showed; modules by name, in the order in which they ended."""

    ran: dict[int, nn.Module] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)  # by dropout
    drew: list[str] = field(default_factory=list)  # random numbers otherwise
    drew_outside: list[str] = field(default_factory=list)  # and by what, other than torch's own
    remembers: list[str] = field(default_factory=list)  # attributes that change the next value
    autocast: list[str] = field(default_factory=list)
    autocast_around: bool = False  # where audit was called
    functions: list[tuple[type[Function], str]] = field(default_factory=list)
    compiled: bool = False  # code that torch.compile made
    compiled_raises: Exception | None = None  # its second derivative
    from_elsewhere: list[str] = field(default_factory=list)  # params that it has from the model too
    unused: list[str] = field(default_factory=list)  # parameters
    finite: bool = True  # whether the loss is
    deterministic: bool = True  # whether it is the same from the same state
    not_finite: list[str] = field(default_factory=list)  # modules with outputs that are not

    @property
    def random(self) -> bool:
        return bool(self.dropped or self.drew or self.drew_outside)


def look(problem: Problem, running: Running) -> Look:
    """Run the loss at its parameters; modules that were not known get names.

    Raises what the loss raises, and NoSecondDerivative where its value does not depend on params.
    """
    seen = Look()
    device = problem.leaves[0].device
    with StateGuard(problem.names.modules(), problem.generators) as state:
        if has_dynamo():
            _compiled(seen, problem, state)
        state.begin()
        outside = OutsideState(problem.generators, problem.names.modules())
        leaves = fresh_leaves(problem.leaves, False)
        with (
            problem.names.discovering(), running.watching(), _watching(seen, running, device),
            keep_swapped(), eagerly(seen.compiled),
        ):  # fmt: skip
            value = problem.value(leaves, problem.batch)
        seen.drew_outside = outside.changed()
        seen.finite = bool(value.isfinite())
        _leaves_of(seen, problem, value, leaves)
        _repeated(seen, problem, state, value)
    return seen


def _compiled(seen: Look, problem: Problem, state: StateGuard) -> None:
    """Whether compiled code runs, and has a second derivative; it does not let itself be watched."""
    state.begin()
    try:
        value = problem.value(fresh_leaves(problem.leaves, False), problem.batch)
    except Exception:  # told where it is watched
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


def _leaves_of(seen: Look, problem: Problem, value: Tensor, leaves: list[Tensor]) -> None:
    """Which parameters the value was computed from."""
    reached = graph_summary(value).leaves
    reentrant = any(function is CheckpointFunction for function, _ in seen.functions)
    pairs = list(zip(problem.paths, leaves, strict=True))
    unused = [path for path, leaf in pairs if id(leaf) not in reached]
    if not reentrant:  # what is inside of it is not in the graph
        if len(unused) == len(leaves):
            raise NoSecondDerivative(
                "loss(params, batch): expected a value that depends on params, got one that does not; "
                "look for .detach(), .item(), .data or a torch.no_grad() in the loss, and for a loss "
                "that uses the model's own parameters instead of the params it is given."
            )
        seen.unused = unused
    seen.from_elsewhere = [
        path for path, x in zip(problem.paths, problem.originals, strict=True)
        if id(x) in reached
    ]  # fmt: skip


def _repeated(seen: Look, problem: Problem, state: StateGuard, value: Tensor) -> None:
    """Whether the value is the same again: with what the run left on modules, and as at first."""
    attributes = state.changed_attributes()

    def same(*, attributes: bool) -> bool:
        state.begin(attributes=attributes)
        with keep_swapped(), eagerly(seen.compiled):
            again = problem.value(fresh_leaves(problem.leaves, False), problem.batch)
        return torch.allclose(again, value, rtol=1e-5, atol=0.0, equal_nan=True)

    if same(attributes=False):
        return
    seen.deterministic = same(attributes=True)
    names = problem.names
    if seen.deterministic:
        seen.remembers = [
            ".".join(step for step in (names.of(m), name) if step) for m, name in attributes
        ]


def _state(device: torch.device) -> Tensor:
    """Of the generator that is drawn from there."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


@contextmanager
def _watching(seen: Look, running: Running, device: torch.device) -> Iterator[None]:
    seen.autocast_around = torch.is_autocast_enabled(device.type)
    watch = _Calls(seen, device, lambda: running.where)
    with _random_numbers(seen, running, device), watching_functions(watch.applied), watch:
        yield


class _Calls(TorchFunctionMode):
    """Where torch calls are made under autocast, or drop elements, and Functions are applied."""

    def __init__(self, seen: Look, device: torch.device, where_now: Callable[[], str]) -> None:
        super().__init__()
        self._seen, self._device, self._where_now = seen, device, where_now

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = self._where_now()
        if torch.is_autocast_enabled(self._device.type) and name not in self._seen.autocast:
            self._seen.autocast.append(name)
        if "dropout" not in name_of_call(func):
            return func(*args, **(kwargs or {}))
        state = _state(self._device)
        result = func(*args, **(kwargs or {}))
        if not torch.equal(state, _state(self._device)) and name not in self._seen.dropped:
            self._seen.dropped.append(name)
        return result

    def applied(self, function: type[Function], args: tuple[Any, ...]) -> None:
        one = (function, self._where_now())
        graphed = function is CheckpointFunction or any(
            is_float(x) and x.requires_grad for x in pytree.leaves(args)
        )
        if graphed and one not in self._seen.functions:
            self._seen.functions.append(one)


@contextmanager
def _random_numbers(seen: Look, running: Running, device: torch.device) -> Iterator[None]:
    """Which modules draw random numbers: those after which torch's generator is in another state, but
    for those with a part that is told."""
    states: list[tuple[nn.Module | None, Tensor, bool]] = []

    def start(module: nn.Module, args: Any) -> None:
        seen.ran[id(module)] = module
        states.append((module, _state(device), False))

    def end(module: nn.Module, args: Any, output: Any) -> None:
        if states and states[-1][0] is module:
            ended(*states.pop())
        made = [y for y in pytree.leaves(output) if is_float(y) and not transforms_active()]
        if not all(bool(y.detach().isfinite().all()) for y in made):
            seen.not_finite.append(running.names.called(module))

    def ended(module: nn.Module | None, before: Tensor, told: bool) -> None:
        if torch.equal(before, _state(device)):
            return
        name = running.names.briefly(module)
        listed = seen.dropped if isinstance(module, _DropoutNd) else seen.drew
        if not told and name not in (*seen.dropped, *seen.drew):
            listed.append(name)
        if states:
            states[-1] = (*states[-1][:2], True)

    states.append((None, _state(device), False))
    with watching_modules(start, end):
        yield
        ended(*states[0])  # above it stands what raised, if the loss went on from there
