"""The meta-gradient as a graph of all inner steps and their derivatives, for one task or for all."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hoglib._core.problem import Policy
from hoglib.capture.api import kept_graph
from hoglib.meta.module_loop import MetaParams, ModuleLoop
from hoglib.meta.tasks import TaskFunction, TaskResult, map_tasks
from hoglib.ring import ring


def captured(
    learner: Any, policy: Policy, loop: ModuleLoop, start: MetaParams, wanted: bool
) -> tuple[TaskFunction, TaskFunction]:
    """The functions of one task and of a pair of stacks, as graphs that are kept with the learner; a
    copy of it has none."""
    weights = loop.options.weights_for(loop.options.inner_steps)
    weight_tensor, used = None, None
    if weights is not None:  # an input of the graph, since they may change from epoch to epoch
        device = next(iter(start.model.values())).device
        weight_tensor = torch.tensor(weights, dtype=torch.float64, device=device)
        used = tuple(bool(weight != 0) for weight in weights)
        loop = replace(loop, options=replace(loop.options, step_weights=None))
    key = f"{loop.options} {loop.rule} {used}"  # all that a graph depends on besides tensors

    def run(mapped: bool, support: Any, query: Any) -> TaskResult:
        whole = partial(_meta_gradient, policy.inside_graph, loop, used, mapped, wanted)
        graph = kept_graph(
            whole, f"{policy.caller}.loss", learner, (mapped, wanted), policy.backend
        )
        found: TaskResult = graph(key, weight_tensor, start, support, query)
        return found

    return partial(run, False), partial(run, True)


def _meta_gradient(
    policy: Policy, loop: ModuleLoop, used: tuple[bool, ...] | None, mapped: bool, wanted: bool,
    key: str, weights: Tensor | None, start: MetaParams, support: Any, query: Any,
) -> TaskResult:  # fmt: skip
    """The meta-gradient of tasks, all together or one."""
    given = None
    if weights is not None and used is not None:  # a weight of zero needs no operations
        given = [used and weights[i] for i, used in enumerate(used)]
    of_task = partial(loop.meta_gradient if wanted else loop.value, start, weights=given)
    with ring(policy, examine=False, gradients=nullcontext):
        return map_tasks(of_task, support, query) if mapped else of_task(support, query)
