"""An inner loop on parameters that several processes share (DTensor).

Each process holds its shards of the initial and of the adapted parameters, and computes the losses of
its part of each task at whole ones, which are gathered for each loss. Inner gradients are averaged
over the processes, so that all of them take the same inner step.
"""

from numbers import Real
from typing import Any

import torch

from hoglib._core.sharding import Sharding, refuse_sharded
from hoglib._core.swap import Params
from hoglib.errors import UnsupportedError
from hoglib.meta.module_loop import MetaParams, ModuleLoop
from hoglib.meta.tasks import check_tasks

AGREEMENT = (
    "number of tasks", "number of inner steps", "parameters, where they are not sharded,",
)  # fmt: skip


def sharding_of(params: Params) -> Sharding | None:
    """How parameters are shared; None if this process holds all of them whole."""
    return Sharding.of(list(params.values()), lambda: list(params))


def shards_of(params: Params, sharding: Sharding) -> Params:
    """The parts of parameters that this process holds, without a graph."""
    return dict(zip(params, sharding.local(list(params.values())), strict=True))


def wrapped(shards: Params, sharding: Sharding) -> Params:
    """DTensors of these shards."""
    return dict(zip(shards, sharding.wrap(list(shards.values())), strict=True))


def refuse_settings(
    what: str, loop: ModuleLoop, start: MetaParams, over_tasks: str, compiled: Any
) -> None:
    """Raise for settings that shards of the parameters do not go with."""
    if loop.strength:
        refuse_sharded(what, list(start.model.values()))
    numbers = (loop.options.rule_options or {}).values()
    plain = all(isinstance(x, Real | tuple | list) for x in numbers)
    for setting, given, instead in (
        ("over_tasks='vmap'", over_tasks == "vmap", "use 'loop'"),
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


def check_together(what: str, sharding: Sharding, start: Params, tasks: Any, steps: int) -> int:
    """The number of tasks, the same in all processes; raises in all of them where one has an error."""
    count, error = 0, None
    try:
        count = check_tasks(tasks)
    except Exception as caught:  # the other processes wait for this one
        error = caught
    leaves = sharding.local(list(start.values()))
    numbers = [count, steps, sharding.checksum_of_whole(leaves)]
    sharding.check_same(what, AGREEMENT, numbers, leaves[0].device, error=error)
    return count
