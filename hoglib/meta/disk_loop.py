"""Inner loops with their states in files, as one Function, and the results of tasks in files."""

from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hoglib._core import pytree, torch_internals
from hoglib._core.autograd import clone_inference_tensors
from hoglib._core.state import GeneratorStates, RunState
from hoglib._core.swap import Params, keep_swapped
from hoglib._core.torch_modes import ActiveStandIns
from hoglib.curvature.processes import world_size
from hoglib.errors import UnsupportedError
from hoglib.meta.checkpoints import OnDisk, digest
from hoglib.meta.gradient_transformation import GradientTransformation
from hoglib.meta.inner_loop import InnerSteps, Unrolled, unroll
from hoglib.meta.replay import Replay, Steps, add, describe_call, open_checkpoints, vjp
from hoglib.meta.tasks import Task, TaskResult, loop_tasks


class Kept(NamedTuple):
    """Where and how the states of memory="disk" are kept, and for which call."""

    what: str  # the function that messages name
    directory: Path
    schedule: str
    options: dict[str, Any]  # of the call, that tell it from another one
    replaces: bool = False  # the files of another call of the same function with the same model


def unroll_on_disk(
    inner: InnerSteps, steps: int, params: Params, constants: Any, kept: Kept,
    modes_of: Sequence[nn.Module] = (), generators: Sequence[torch.Generator] = (),
) -> Unrolled:  # fmt: skip
    """`unroll` with the states in files, as one Function of all tensors.

    Backward holds the graph of one step; one with create_graph runs as by memory="remat".
    generators: that the steps draw from besides torch's own.
    """
    if torch_internals.transforms_active() or torch_internals.forward_mode_active():
        raise UnsupportedError(
            f"{kept.what}(memory='disk'): expected to be called outside of torch.func transforms and "
            "forward mode, got called inside; use memory='remat'."
        )
    if not steps:
        return unroll(inner, steps, params, constants, "store")
    leaves, structure = pytree.flatten((params, clone_inference_tensors(constants)))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    tensors = [leaves[i] for i in places]

    def tree(given: Sequence[Tensor]) -> Any:
        filled = list(leaves)
        for i, leaf in zip(places, given, strict=True):
            filled[i] = leaf
        return pytree.unflatten(filled, structure)

    loop = _DiskLoop(inner, steps, tree, kept, list(generators), list(modes_of), tensors)
    *adapted, outer, losses = _FromDisk.apply(loop, *tensors)
    of_params: Any = pytree.flatten(params)[1]
    return Unrolled(
        pytree.unflatten(adapted, of_params), None if inner.outer is None else outer,
        list(losses), [{} for _ in range(steps)],
    )  # fmt: skip


class _DiskLoop:
    """The steps as a function of tensors that runs, and is differentiated, through files."""

    def __init__(
        self, inner: InnerSteps, steps: int, tree: Callable[[Sequence[Tensor]], Any], kept: Kept,
        generators: list[torch.Generator], modules: list[nn.Module], tensors: list[Tensor],
    ) -> None:  # fmt: skip
        self.inner, self.count, self.tree, self.kept = inner, steps, tree, kept
        self.generators, self.modules = generators, modules
        self.stand_ins = ActiveStandIns()
        self.run_state = RunState(tensors, generators, modules)

    def run(
        self, tensors: Sequence[Tensor], cotangents: Sequence[Tensor | None] | None = None
    ) -> Any:
        """The adapted leaves, the outer loss, and the losses; with cotangents of the first two, the
        gradients by all tensors."""
        own = [_variable(x) for x in tensors]
        params, constants = self.tree(own)
        with torch.enable_grad():
            start = params, self._rule(0, constants).init(params)
        first = pytree.map_tensors(Tensor.detach, start)
        steps = Steps(
            self.count, lambda i: [lambda p, c: self.inner.loss(i, p, c)[0]],
            self._rule, self.inner.constant,
        )  # fmt: skip
        kept = self.kept
        call = describe_call(kept.what, self.count, kept.schedule, first, constants, **kept.options)
        like = pytree.leaves(first)
        with (
            keep_swapped(),
            open_checkpoints(kept.directory, call, like, kept.replaces) as checkpoints,
        ):
            replay = Replay(
                kept.what, steps, first, constants, schedule=kept.schedule,
                checkpoints=checkpoints, generators=self.generators,
            )  # fmt: skip
            (adapted, state), losses = replay.run()
            if cotangents is None:
                return *pytree.leaves(adapted), state["outer"], torch.stack(losses)
            *of_adapted, of_outer = cotangents
            by_state = {"rule": pytree.map(lambda _: None, state["rule"]), "outer": of_outer}
            end = pytree.unflatten(of_adapted, pytree.flatten(adapted)[1]), by_state
            wanted = [x for x in own if x.requires_grad]
            of = {id(x) for x in pytree.leaves(constants)}
            found = replay.pull(end, [None for x in wanted if id(x) in of])
        of_constants = iter(found.constants)
        direct = [next(of_constants) if id(x) in of else None for x in wanted]
        grads = iter(add(direct, vjp(pytree.leaves(start), found.carry, wanted)))
        return [next(grads) if x.requires_grad else None for x in own]

    def _rule(self, i: int, constants: Any) -> GradientTransformation:
        """The rule of step i, whose state has the sum of the outer losses after the steps besides."""
        rule = self.inner.rule(i, constants)

        def init(params: Params) -> Any:
            first = pytree.tensors(params)[0]
            dtype = torch.promote_types(first.dtype.to_real(), torch.float32)
            return {"rule": rule.init(params), "outer": first.new_zeros((), dtype=dtype)}

        def update(params: Params, grads: Params, state: Any) -> tuple[Params, Any]:
            params, memory = rule.update(params, grads, state["rule"])
            total, outer = state["outer"], self.inner.outer
            value = None if outer is None else outer(i, params, constants)
            if value is not None:
                total = total + value.to(total.dtype)
            return params, {"rule": memory, "outer": total}

        return GradientTransformation(init, update)

    def rerun(self, tensors: Sequence[Tensor]) -> list[Any]:
        """The adapted leaves and the outer loss with a graph, for derivatives of higher order."""
        params, constants = self.tree(tensors)
        found = unroll(self.inner, self.count, params, constants, "remat", self.modules)
        return [*pytree.leaves(found.params), found.outer]


class _FromDisk(torch.autograd.Function):
    """Saves its inputs; the rest is in files."""

    recomputes = True

    @staticmethod
    def forward(ctx: Any, loop: _DiskLoop, *tensors: Tensor) -> Any:
        ctx.loop = loop
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        found = loop.run(tensors)
        ctx.mark_non_differentiable(found[-1])
        return found

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        loop, tensors, cotangents = ctx.loop, ctx.saved_tensors, cotangents[:-1]
        state = loop.run_state
        with state.restored(), loop.stand_ins.resume(), state.autocast.restored():
            if not torch.is_grad_enabled():
                return None, *loop.run(tensors, cotangents)
            own = [x.view_as(x) if x.requires_grad else x for x in tensors]
            outputs = loop.rerun(own)
            wanted = [x for x in own if x.requires_grad]
            pairs = [(y, u) for y, u in zip(outputs, cotangents, strict=True) if u is not None]
            ys, us = zip(*pairs, strict=True)
            grads = iter(torch.autograd.grad(ys, wanted, us, create_graph=True, allow_unused=True))
            return None, *[next(grads) if x.requires_grad else None for x in own]


def loop_tasks_on_disk(
    function: Callable[[Path, Any, Any], TaskResult], tasks: Sequence[Task], start: Any,
    wanted: bool, steps: int, kept: Kept,
) -> TaskResult:  # fmt: skip
    """`loop_tasks` with the result of each task in a file until the last one has its own.

    Args:
        function: Of the directory for the files of a task, its support and its query set.
        tasks: The tasks.
        start: What the gradients are by.
        wanted: Whether there are gradients.
        steps: The number of inner steps.
        kept: Where the files go. Those of another call are removed, as are all at the end.
    """
    leaves, structure = pytree.flatten(start if wanted else ())
    generators = GeneratorStates({x.device for x in pytree.leaves(start)})
    call = describe_call(kept.what, steps, kept.schedule, start, tasks, **kept.options)
    numbers = count()
    files = OnDisk(kept.directory, call, [], kept.replaces)
    with files.held():

        def run_one(support: Any, query: Any) -> TaskResult:
            number = next(numbers)
            name = f"result-{number:06}.pt"
            known = files.get(name)
            if known is not None and len(known["grads"]) == len(leaves):
                generators.set(known["generators"])
                grads = pytree.unflatten(known["grads"], structure)
                notes: list[dict[str, Any]] = [{} for _ in range(steps + 1)]
                return TaskResult(known["value"], grads, known["inner_losses"], notes)
            found = function(files.part(number), support, query)
            files.put(
                name,
                {
                    "value": found.value, "inner_losses": found.inner_losses,
                    "grads": pytree.leaves(found.grads), "generators": generators.now(),
                },
            )  # fmt: skip
            files.drop_part(number)
            return found

        mean = loop_tasks(run_one, tasks)
        files.clear()
    return mean


def directory_of_process(directory: Path) -> Path:
    """The directory itself; with several processes, one for each of them below it."""
    if world_size() > 1:
        return directory / f"process-{dist.get_rank():06}"
    return directory


def digest_of_generators(tensors: Sequence[Tensor]) -> str:
    """A hash of the states of torch's global generators."""
    return digest(GeneratorStates({x.device for x in tensors}).now())


def _variable(x: Tensor) -> Tensor:
    """The tensor by itself, to differentiate by where the caller does."""
    return x.detach().requires_grad_(x.requires_grad)
