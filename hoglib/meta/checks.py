"""Checks of an inner loop: finite losses, and derivatives that reach all that is learned.

And what goes with parameters that several processes share: each process holds its shards of the initial
and of the adapted parameters, and computes the losses of its part of each task at whole ones, which are
gathered for each loss. Inner gradients are averaged over the processes, so that all of them take the
same inner step.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from hoglib._core import pytree, validation
from hoglib._core.autograd import translate_errors
from hoglib._core.finite_differences import fixed_random_numbers
from hoglib._core.gradient_graph import depends_on_any, graph_summary
from hoglib._core.placement import Placement, Sharding, placement_of, refuse_sharded
from hoglib._core.problem import Policy
from hoglib._core.source_location import warn
from hoglib._core.swap import Params
from hoglib.errors import NonFiniteError, NoSecondDerivative, UnsupportedError
from hoglib.meta.inner_loop import UNUSED
from hoglib.meta.module_loop import MetaParams, ModuleLoop
from hoglib.meta.tasks import Task, TaskResult, check_tasks
from hoglib.ring import ring

AGREEMENT = (
    "number of tasks", "number of inner steps", "parameters, where they are not sharded,",
)  # fmt: skip


def check_derivatives(
    what: str, loop: ModuleLoop, start: MetaParams, task: Task, learned: dict[str, Tensor]
) -> None:
    """Check on one task that both losses depend on what is learned, through Functions that are right.

    learned: all parameters of the learner, by name, for messages. Raises NoSecondDerivative for a
    loss that depends on no parameter, or on one that is not read from its module. Warns of
    other tensors that require grad, and of custom Functions whose second derivative is not that of
    differences.
    """
    start = pytree.map(Tensor.clone, start)
    support, query = task
    before = [start.model[name] for name in loop.adapting]

    leaves, structure = pytree.flatten(start)
    own = [leaf.detach().requires_grad_() for leaf in leaves]
    at = pytree.unflatten(own, structure)
    adapting = {name: at.model[name] for name in loop.adapting}

    def losses() -> list[Tensor]:
        """The inner loss at the start, and the outer loss after a step or two."""
        first = loop.inner_value(at, adapting, support, 0)
        if not depends_on_any(first, list(adapting.values())):
            raise NoSecondDerivative(UNUSED.format(which="inner", whom=" that adapt"))
        constant = replace(loop, options=replace(loop.options, first_order=True))
        steps = loop.options.inner_steps  # some rules use all their parameters in the second step
        params = constant.unrolling(at, support, min(2, steps))().params
        last = loop.outer_value(at, params, query, steps)
        if not last.requires_grad:
            raise NoSecondDerivative(UNUSED.format(which="outer", whom=""))
        return [first, last]

    policy = Policy(what, stand_ins=loop.options.policy.stand_ins)  # blocks are recomputed
    with ring(policy), fixed_random_numbers(before), translate_errors(what):
        data = pytree.tensors((support, query))
        _check_leaves(what, losses, [*own, *data], learned)


def check_finite(found: TaskResult) -> None:
    """Raise NonFiniteError at the first inner loss that is not finite, or outer loss."""
    # a sum is finite only if all its terms are
    if math.isfinite(float(found.inner_losses.detach().sum() + found.value.detach().sum())):
        return
    stay = " The parameters are as they were before this step."
    check_inner_losses(
        found.inner_losses.detach(), "Look for NaN in its support set, or in the parameters." + stay,
        "The inner loop diverges: lower inner_lr, or take fewer steps." + stay,
    )  # fmt: skip
    validation.finite(
        "meta-loss",
        found.value,
        "Tasks whose inner loop diverges give this: lower inner_lr, clip the outer gradient, or look "
        "for NaN in the data. The parameters are as they were before this step.",
    )


def check_inner_losses(losses: Tensor, at_first: str, later: str, steps: int | None = None) -> None:
    """Raise NonFiniteError at the first of losses [steps] or [tasks, steps] that is not finite.

    at_first, later: what to do about one in the first step, and in another. steps: of which these are
    the first. Default: all.
    """
    bad = (~torch.isfinite(losses)).nonzero()
    if len(bad):
        *task, step = bad[0].tolist()
        raise NonFiniteError(
            f"inner loss: expected a finite number, got {losses[*task, step].item()} at "
            + (f"task {task[0]} of {len(losses)}, " if task else "")
            + f"step {step + 1} of {steps or losses.shape[-1]}. {later if step else at_first}"
        )


def _check_leaves(
    what: str, losses: Callable[[], list[Tensor]], own: list[Tensor], learned: dict[str, Tensor]
) -> None:
    """Raise or warn where the graphs of the losses end in other leaves than their own."""
    found = _other_leaves(losses(), own)
    # A tensor that a forward makes for itself, to differentiate by, is another one at the next call.
    again = {id(x) for x in _other_leaves(losses(), own)} if found else set()
    names = {id(p): name for name, p in learned.items()}
    for leaf in found:
        if id(leaf) in names:
            raise NoSecondDerivative(
                f"{what}: expected a model that finds its parameters in their modules, got one that "
                f"uses {names[id(leaf)]} from elsewhere too (a list of weights, a closure): there it "
                "would neither adapt nor get a gradient. Read it from its module."
            )
        if id(leaf) in again:
            warn(
                f"{what}: the losses use {validation.describe(leaf)} that requires grad and belongs to "
                "none of the modules that are learned (model, criterion, inner_loss, rule): it gets no "
                "gradient from loss(tasks). Make it a parameter of one of them, or detach() it."
            )


def _other_leaves(values: list[Tensor], own: list[Tensor]) -> list[Tensor]:
    known = {id(x) for x in own}
    reached = {key: x for value in values for key, x in graph_summary(value).leaves.items()}
    return [x for key, x in reached.items() if key not in known]


# Parameters that several processes share (DTensor)


def placement_of_params(params: Params) -> Placement:
    """How parameters are spread over processes."""
    return placement_of(list(params.values()), lambda: list(params))


def spread(params: Params, part: Callable[[Sequence[Tensor]], Sequence[Tensor]]) -> Params:
    """Parameters by `placement.local`, as the parts of this process, or by `placement.wrap`, which
    makes DTensors of these."""
    return dict(zip(params, part(list(params.values())), strict=True))


def refuse_settings(what: str, loop: ModuleLoop, start: MetaParams) -> None:
    """Raise for settings that shards of the parameters do not go with."""
    compiled = loop.options.evaluation.get("compile", False)
    if loop.strength:
        refuse_sharded(what, list(start.model.values()))
    numbers = (loop.options.rule_options or {}).values()
    plain = all(isinstance(x, Real | tuple | list) for x in numbers)
    for setting, given, instead in (
        ("over_tasks='vmap'", loop.options.over_tasks == "vmap", "use 'loop'"),
        (f"compile={compiled!r}", compiled, "leave compile out"),
        ("batch_norm='per_step'", loop.statistics is not None, "use 'by_mode' or 'frozen'"),
        ("learn_lr=...", loop.rates is not None, "leave learn_lr out"),
        ("rule=...", not isinstance(loop.rule, str), "name a rule, whose steps are elementwise"),
        ("rule_options=...", not plain, "give numbers"),
        ("inner_loss=...", bool(start.modules), "give losses without parameters of their own"),
    ):
        if given:
            raise UnsupportedError(
                f"{what}({setting}): expected parameters that each process holds whole, got DTensors, "
                f"as fully_shard (FSDP2) and parallelize_module make; {instead}."
            )


def refuse_graph(what: str) -> None:
    """Raise where grad mode is on."""
    if torch.is_grad_enabled():
        raise UnsupportedError(
            f"{what}: expected params that each process holds whole, got DTensors, whose adaptation "
            "has no graph; use `loss(tasks)`, or call it under torch.no_grad()."
        )


def check_together(what: str, placement: Placement, start: Params, tasks: Any, steps: int) -> int:
    """The number of tasks, the same in all processes that share the parameters; raises in all of them
    where one has an error."""
    if not isinstance(placement, Sharding):
        return check_tasks(tasks)
    count, error = 0, None
    try:
        count = check_tasks(tasks)
    except Exception as caught:  # the other processes wait for this one
        error = caught
    leaves = placement.local(list(start.values()))
    numbers = [count, steps, placement.checksum_of_whole(leaves)]
    placement.check_same(what, AGREEMENT, numbers, leaves[0].device, error=error)
    return count
