"""The meta-gradient as graphs: of a whole task, or of one inner step that is used for all.

Whole, the graph of a task has all inner steps and their derivatives: nothing runs faster, and the time
to compile grows with the steps. By the step (`stepwise`) it does not.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from hoglib._core import pytree
from hoglib.capture import Compiled, compile
from hoglib.capture.api import captured
from hoglib.capture.backend import to_stderr
from hoglib.errors import UnsupportedError
from hoglib.meta import stepwise
from hoglib.meta.mapping import TaskResult, TaskRunner, all_at_once, one_by_one
from hoglib.meta.module_loop import MetaParams, Weights
from hoglib.stand_ins.mode import stand_ins_if

if TYPE_CHECKING:
    from hoglib.meta.maml import MAML

MANY = 10_000  # losses to compute, where nobody says how many

# What decides between them, in seconds and per operation of the whole graph: measured on
# perceptrons
# and convolutions on one core. They need not be right to more than a factor: what lies between two
# ways
# that cost about the same is small.
START, BY_COMPILING, BY_TRACING = 6.0, 9e-3, 7e-4
ONE_BY_ONE, COMPILED, BY_STEP = 4e-6, 1e-6, 1.7e-6


class Compiling:
    """The graphs of one learner; a copy of the learner begins without any."""

    def __init__(self) -> None:
        self._made: dict[Any, Compiled] = {}
        self._alike: dict[str, str | None] = {}  # by settings
        self.way: str | None = None  # that was chosen, where it was left open

    def __deepcopy__(self, memo: Any) -> "Compiling":
        return Compiling()

    def __reduce__(self) -> Any:
        return Compiling, ()

    def ways(self, maml: "MAML", point: MetaParams, wanted: bool) -> TaskRunner:
        """How tasks are run, all at once and one by one."""
        settings, weights = settings_of(maml), weights_of(maml, point)

        def together(_: Any, stack: Any) -> TaskResult:
            support, query = stack
            return run(True, support, query)

        def in_turn(_: Any, tasks: Any) -> TaskResult:
            return one_by_one(partial(run, False), tasks)

        def run(mapped: bool, support: Any, query: Any) -> TaskResult:
            chosen = self._chosen(maml, settings, weights, point, support, query, mapped)
            if chosen == "step" and wanted:
                return self._by_step(maml, settings, mapped)(point, support, query)
            backend = "eager" if chosen == "eager" else "inductor"
            whole = self._graph(partial(_whole, maml, mapped, wanted), (mapped, wanted), backend)
            found: TaskResult = whole(settings, weights, point, support, query)
            return found

        return TaskRunner(together, in_turn)

    def _chosen(
        self, maml: "MAML", settings: str, weights: Any, point: MetaParams, support: Any, query: Any,
        mapped: bool,
    ) -> str:  # fmt: skip
        if maml.compiled is not True:
            return str(maml.compiled)
        if self.way is None:
            whole, by_step = self._seen(maml, settings, weights, point, support, query, mapped)
            self.way = way_that_pays(whole, maml.compile_for or MANY, by_step)
            losses = f"{maml.compile_for or MANY:,} losses of {whole:,} operations each"
            to_stderr(f"{type(maml).__name__}: {losses}, {SAID[self.way]}")
        return self.way

    def _seen(
        self, maml: "MAML", settings: str, weights: Any, point: MetaParams, support: Any, query: Any,
        mapped: bool,
    ) -> tuple[int, bool]:  # fmt: skip
        """The operations of the whole graph, from graphs of few steps; whether one can serve all."""
        steps, by_step = maml.inner_steps, alike(maml) is None
        few = [min(steps, count) for count in (1, 2)] if by_step else [steps]
        given = settings, weights, point, support, query
        seen = [captured(partial(_whole, maml, mapped, True, steps=count), *given) for count in few]
        whole = seen[0].nodes + (steps - few[0]) * (seen[-1].nodes - seen[0].nodes)
        return whole, by_step and not seen[0].draws

    def _graph(self, fn: Callable[..., Any], key: Any, backend: str) -> Compiled:
        if (key, backend) not in self._made:
            name = "MAML.loss" if isinstance(key, tuple) else f"MAML.loss, {key}"
            self._made[key, backend] = compile(fn, backend=backend, name=name)
        return self._made[key, backend]

    def _by_step(self, maml: "MAML", settings: str, mapped: bool) -> Callable[..., TaskResult]:
        if settings not in self._alike:  # which takes as long as a step of a small network
            self._alike[settings] = alike(maml)
        reason = self._alike[settings]
        if reason is not None:
            raise UnsupportedError(
                f"compile='step': expected inner steps that are alike, got {reason}; use "
                "compile='inductor', one graph for all steps."
            )
        suffix = "" if mapped else ", one task"
        step = self._graph(partial(stepwise.step, maml, mapped), f"a step{suffix}", "inductor")
        pull = self._graph(
            partial(stepwise.pull, maml, mapped), f"its backward{suffix}", "inductor"
        )
        last = self._graph(
            partial(stepwise.last, maml, mapped), f"the outer loss{suffix}", "inductor"
        )
        return partial(stepwise.by_step, maml, settings, mapped, step, pull, last)


def way_that_pays(whole: int, losses: int, by_step: bool) -> str:
    """What takes least in all, for a graph of so many operations and so many losses to compute."""
    costs = {
        "eager": BY_TRACING * whole + losses * whole * ONE_BY_ONE,
        "inductor": START + BY_COMPILING * whole + losses * whole * COMPILED,
    }
    if by_step:
        costs["step"] = START + BY_COMPILING * min(whole, 1000) + losses * whole * BY_STEP
    return min(costs, key=lambda way: costs[way])


SAID: Final = {
    "eager": "run one by one as captured, for to compile them would take longer than it saves",
    "inductor": "compiled as one graph, which pays",
    "step": "compiled by the inner step, for the whole would take longer than it saves",
}


def settings_of(maml: "MAML") -> str:
    """What of a learner's options a graph depends on."""
    return repr((
        maml.inner_steps, maml.inner_lr, maml.first_order, maml.truncate, maml.memory,
        maml.step_weights if maml.step_weights is None else [w != 0 for w in maml.step_weights],
        maml.batch_norm, maml.inner_params, maml.rule, maml.rule_options, maml.stand_ins,
    ))  # fmt: skip


def weights_of(maml: "MAML", point: MetaParams) -> Tensor | None:
    """Those of the outer losses, as an input of a graph: they may change from epoch to epoch."""
    weights = maml._weights(maml.inner_steps)
    device = next(iter(point.model.values())).device
    return None if weights is None else torch.tensor(weights, dtype=torch.float64, device=device)


def alike(maml: "MAML") -> str | None:
    """None where one step's graph serves all; else what differs between them."""
    if maml.step_weights is not None:
        return "step_weights, outer losses after some"
    if maml.statistics is not None:
        return "batch_norm='per_step'"
    if maml.rates is not None and getattr(maml.rates, "steps", None) is not None:
        return "lr_per_step"
    point = maml._point()
    names = maml._adapting(point.model)
    state = maml._rule(0, point, names).init({name: point.model[name] for name in names})
    others = [x for x in pytree.leaves(state) if not isinstance(x, Tensor)]
    if others and not (isinstance(state, dict) and others == [state.get("step")] == [0]):
        return "a rule that counts steps by itself"
    return None


def _whole(
    maml: "MAML", mapped: bool, wanted: bool, settings: str, weights: Tensor | None, point: MetaParams,
    support: Any, query: Any, steps: int | None = None,
) -> TaskResult:  # fmt: skip
    """The meta-gradient of tasks, all together or one."""
    own: Weights = None
    if weights is not None:  # their place, where a graph leaves out those that are zero
        own = [number and weights[i] for i, number in enumerate(maml._weights(len(weights)) or [])]

    def of_task(support: Any, query: Any) -> TaskResult:
        return maml._of_task(point, support, query, wanted, steps, own)

    with stand_ins_if(maml.stand_ins):
        return all_at_once(of_task, (support, query)) if mapped else of_task(support, query)
