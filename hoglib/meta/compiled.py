"""The meta-gradient as a graph of all inner steps and their derivatives, for one task or for all."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from hoglib._core import validation
from hoglib.capture.api import kept_graph
from hoglib.meta.module_loop import MetaParams, ModuleLoop
from hoglib.meta.tasks import TaskResult, TaskRunner, loop_tasks, map_tasks
from hoglib.stand_ins.mode import stand_ins_if


@dataclass(frozen=True)
class CompileOptions:
    """How the meta-gradient is compiled, checked when it is made."""

    compiled: bool | str = False

    def __post_init__(self) -> None:
        validation.backend("compile", self.compiled)

    @property
    def backend(self) -> str:
        """The backend; "" for none."""
        return validation.backend("compile", self.compiled)


class Program(NamedTuple):
    """What is captured: an inner loop without step weights, which are an input of the graph."""

    loop: ModuleLoop
    used: tuple[bool, ...] | None  # the step weights that are not zero
    key: str  # all options that a graph depends on


@final
class MetaCompiler:
    """Compiles and runs the meta-gradient of one learner. Its graphs are kept with it, and a copy has
    none."""

    def runner(self, backend: str, loop: ModuleLoop, start: MetaParams, wanted: bool) -> TaskRunner:
        """How tasks are run: as graphs, all at once or one by one."""
        weights = loop.options.weights_for(loop.options.inner_steps)
        device = next(iter(start.model.values())).device
        weight_tensor, used = None, None
        if weights is not None:  # an input of the graph, since they may change from epoch to epoch
            weight_tensor = torch.tensor(weights, dtype=torch.float64, device=device)
            used = tuple(bool(weight != 0) for weight in weights)
            loop = replace(loop, options=replace(loop.options, step_weights=None))
        program = Program(loop, used, f"{loop.options} {loop.rule} {used}")

        def run(mapped: bool, support: Any, query: Any) -> TaskResult:
            whole = partial(_meta_gradient, program, mapped, wanted)
            graph = kept_graph(whole, "MAML.loss", self, (mapped, wanted), backend)
            found: TaskResult = graph(program.key, weight_tensor, start, support, query)
            return found

        return TaskRunner(
            lambda stack: run(True, *stack),
            partial(loop_tasks, partial(run, False)),
        )


def _meta_gradient(
    program: Program, mapped: bool, wanted: bool, key: str, weights: Tensor | None,
    start: MetaParams, support: Any, query: Any,
) -> TaskResult:  # fmt: skip
    """The meta-gradient of tasks, all together or one."""
    loop, given = program.loop, None
    if weights is not None and program.used is not None:  # a weight of zero needs no operations
        given = [used and weights[i] for i, used in enumerate(program.used)]

    def of_task(support: Any, query: Any) -> TaskResult:
        if wanted:
            return loop.meta_gradient(start, support, query, given)
        return loop.outer_loss(start, support, query, given)[0]

    with stand_ins_if(loop.options.stand_ins):
        return map_tasks(of_task, (support, query)) if mapped else of_task(support, query)
