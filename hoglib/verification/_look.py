"""What can be seen in one run of a loss: modules, random numbers, autocast, custom Functions."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from hoglib import _arguments as arguments
from hoglib import _tree
from hoglib._functorch import watching_functions
from hoglib._graph import is_compiled, nodes
from hoglib._leaves import own_leaves
from hoglib._substitution import lingering
from hoglib.verification._call import is_float
from hoglib.verification._cuts import name_of_call
from hoglib.verification._module_calls import Running
from hoglib.verification._problem import Problem
from hoglib.verification._unchanged import Unchanged


@dataclass
class Look:
    """What a run showed; modules by name."""

    ran: dict[int, nn.Module] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)  # by dropout
    drew: list[str] = field(default_factory=list)  # random numbers otherwise
    by_generator: bool = False
    autocast: list[str] = field(default_factory=list)
    autocast_around: bool = False  # where audit was called
    functions: list[tuple[type[Function], str]] = field(default_factory=list)
    compiled: bool = False  # code that torch.compile made
    unused: list[str] = field(default_factory=list)  # parameters


def look(problem: Problem, running: Running) -> Look:
    """Run the loss at its parameters; modules that were not known get names.

    Raises what the loss raises, and NoSecondDerivative where its value does not depend on params.
    """
    seen = Look()
    device = problem.leaves[0].device
    with Unchanged(problem.names.modules(), problem.generators) as state:
        state.begin()
        before = [g.get_state() for g in problem.generators]
        leaves = own_leaves(problem.leaves, False)
        with (
            problem.names.discovering(), running.watching(), _watching(seen, running, device),
            lingering(),
        ):  # fmt: skip
            value = problem.value(leaves, problem.batch)
        pairs = zip(before, problem.generators, strict=True)
        seen.by_generator = any(not torch.equal(a, g.get_state()) for a, g in pairs)
        seen.compiled = any(map(is_compiled, nodes([value])))
        if not value.requires_grad:
            raise arguments.NoSecondDerivative(
                "loss(params, batch): expected a value that depends on params, got one that does not; "
                "look for .detach(), .item(), .data or a torch.no_grad() in the loss, and for a loss "
                "that uses the model's own parameters instead of the params it is given."
            )
        reached = {id(node.variable) for node in nodes([value]) if hasattr(node, "variable")}
        pairs_of = zip(problem.paths, leaves, strict=True)
        seen.unused = [path for path, leaf in pairs_of if id(leaf) not in reached]
    return seen


@contextmanager
def _watching(seen: Look, running: Running, device: torch.device) -> Iterator[None]:
    seen.autocast_around = torch.is_autocast_enabled(device.type)
    watch = _Calls(seen, device.type, lambda: running.name)
    with _random_numbers(seen, running, device), watching_functions(watch.applied), watch:
        yield


class _Calls(TorchFunctionMode):
    """Where torch calls are made under autocast, or drop elements, and Functions are applied."""

    def __init__(self, seen: Look, device: str, where_now: Callable[[], str]) -> None:
        super().__init__()
        self._seen, self._device, self._where_now = seen, device, where_now

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = self._where_now()
        if torch.is_autocast_enabled(self._device) and name not in self._seen.autocast:
            self._seen.autocast.append(name)
        if "dropout" not in name_of_call(func):
            return func(*args, **(kwargs or {}))
        state = torch.get_rng_state()
        result = func(*args, **(kwargs or {}))
        if not torch.equal(state, torch.get_rng_state()) and name not in self._seen.dropped:
            self._seen.dropped.append(name)
        return result

    def applied(self, function: type[Function], args: tuple[Any, ...]) -> None:
        one = (function, self._where_now())
        graphed = any(is_float(x) and x.requires_grad for x in _tree.leaves(args))
        if graphed and one not in self._seen.functions:
            self._seen.functions.append(one)


@contextmanager
def _random_numbers(seen: Look, running: Running, device: torch.device) -> Iterator[None]:
    """Which modules draw random numbers: those after which torch's generator is in another state, but
    for those with a part that is told."""
    states: list[tuple[nn.Module | None, Tensor, bool]] = []

    def state() -> Tensor:
        return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()

    def start(module: nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling():
            seen.ran[id(module)] = module
            states.append((module, state(), False))

    def end(module: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling() and states and states[-1][0] is module:
            ended(*states.pop())

    def ended(module: nn.Module | None, before: Tensor, told: bool) -> None:
        if torch.equal(before, state()):
            return
        name = running.names.of(module) if module is not None else ""
        listed = seen.dropped if isinstance(module, _DropoutNd) else seen.drew
        if not told and name not in (*seen.dropped, *seen.drew):
            listed.append(name)
        if states:
            states[-1] = (*states[-1][:2], True)

    states.append((None, state(), False))
    handles = [register_module_forward_pre_hook(start), register_module_forward_hook(end)]
    try:
        yield
        ended(*states.pop())
    finally:
        for handle in handles:
            handle.remove()
