"""The meta-gradient as graphs: of a whole task, or of one inner step that is used for all.

Whole, the graph of a task has all inner steps and their derivatives: nothing runs faster, and the time
to compile grows with the steps. Step by step there are three graphs whatever the number of steps: an
inner step, its pullback and the outer loss. Between them the parameters after each step are kept:

    theta_{i+1} = step(theta_i)        a_K = dL/dtheta_K        a_i = a_{i+1}^T dstep/dtheta_i
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from hoglib._core import pytree
from hoglib._core.closures import Opaque
from hoglib.capture.api import Compiled, captured
from hoglib.capture.backend import to_stderr
from hoglib.capture.capturing import GraphEntry, Graphs
from hoglib.errors import UnsupportedError
from hoglib.meta.mapping import TaskResult, TaskRunner, all_at_once, one_by_one
from hoglib.meta.module_loop import MetaParams, Weights
from hoglib.stand_ins.mode import stand_ins_if

DEFAULT_LOSSES = 10_000  # losses to compute, where compile_for is None

# The time that each mode takes, in seconds and per operation of the whole graph: measured on
# perceptrons and convolutions on one core. A factor of two is precise enough: between modes that cost
# about the same the choice matters little.
START, COMPILE_NODE, TRACE_NODE = 6.0, 9e-3, 7e-4
RUN_EAGER_NODE, RUN_INDUCTOR_NODE, RUN_STEP_NODE = 4e-6, 1e-6, 1.7e-6

CHOICE_MESSAGES: Final = {
    "eager": "run one by one as captured, for to compile them would take longer than it saves",
    "inductor": "compiled as one graph, which pays",
    "step": "compiled by the inner step, for the whole would take longer than it saves",
}


@dataclass(frozen=True)
class LoopProgram:
    """What the compilers are given of a learner: what a graph depends on, and the functions in it."""

    name: str  # of the learner, in messages
    options: str  # all that a graph depends on, as a key
    inner_steps: int
    constant: tuple[bool, ...]  # for each step, whether its gradient is a constant
    names: tuple[str, ...]  # of the parameters that adapt
    step_weights: Opaque | None  # a list of numbers, which graphs are given as a tensor
    stand_ins: bool
    unequal_steps: Callable[
        [], str | None
    ]  # what differs between steps; None if one graph serves all
    init: Callable[..., Any]  # (meta params, params) -> state of the update rule
    step: Callable[..., Any]  # (fixed, carry, count, support, constant) -> (carry, loss)
    outer: Callable[..., Tensor]  # (meta params, params, query, steps) -> loss
    task: Callable[..., TaskResult]  # (meta params, support, query, wanted, steps, weights)

    """Compiles and runs the meta-gradient of one learner; a copy of the learner has no graphs yet."""
class MetaCompiler:
    """Compiles and runs the meta-gradient of one learner; a copy of the learner begins without graphs."""

    def __init__(self) -> None:
        self._graphs: dict[Any, Graphs] = {}
        self.chosen: str | None = None  # the mode, where it was left open

    def __deepcopy__(self, memo: Any) -> "MetaCompiler":
        return MetaCompiler()

    def __reduce__(self) -> Any:
        return MetaCompiler, ()

    @property
    def captured(self) -> list[GraphEntry]:
        """What was captured so far."""
        return [entry for graphs in self._graphs.values() for entry in graphs.all()]

    def runner(
        self, program: LoopProgram, mode: bool | str, losses: int, point: MetaParams, wanted: bool
    ) -> TaskRunner:
        """How tasks are run, all at once and one by one."""
        device = next(iter(point.model.values())).device
        weights = None
        if program.step_weights is not None:
            weights = torch.tensor(program.step_weights.value, dtype=torch.float64, device=device)

        def together(_: Any, stack: Any) -> TaskResult:
            support, query = stack
            return run(True, support, query)

        def in_turn(_: Any, tasks: Any) -> TaskResult:
            return one_by_one(partial(run, False), tasks)

        def run(mapped: bool, support: Any, query: Any) -> TaskResult:
            given = program.options, weights, point, support, query
            chosen = self._choose(program, losses, mapped, given) if mode is True else str(mode)
            if chosen == "step" and wanted:
                return self._by_step(program, mapped)(point, support, query)
            backend = "eager" if chosen == "eager" else "inductor"
            whole = partial(_whole, program, mapped, wanted)
            found: TaskResult = self._compiled(whole, (mapped, wanted), "MAML.loss", backend)(
                *given
            )
            return found

        return TaskRunner(together, in_turn)

    def _choose(self, program: LoopProgram, losses: int, mapped: bool, given: Any) -> str:
        if self.chosen is None:
            operations, by_step = _count_operations(program, mapped, given)
            self.chosen = fastest_mode(operations, losses, by_step)
            counted = f"{losses:,} losses of {operations:,} operations each"
            to_stderr(f"{program.name}: {counted}, {CHOICE_MESSAGES[self.chosen]}")
        return self.chosen

    def _compiled(self, fn: Callable[..., Any], key: Any, name: str, backend: str) -> Compiled:
        graphs = self._graphs.setdefault((key, backend), Graphs())
        return Compiled(fn, backend=backend, dynamic=False, check=True, name=name, graphs=graphs)

    def _by_step(self, program: LoopProgram, mapped: bool) -> Callable[..., TaskResult]:
        reason = program.unequal_steps()
        if reason is not None:
            raise UnsupportedError(
                f"compile='step': expected inner steps that are alike, got {reason}; use "
                "compile='inductor', one graph for all steps."
            )

        def compiled(fn: Callable[..., Any], what: str) -> Compiled:
            name = f"MAML.loss, {what}" + ("" if mapped else ", one task")
            return self._compiled(partial(fn, program, mapped), name, name, "inductor")

        step, pullback = compiled(_step, "a step"), compiled(_pullback, "its backward")
        return partial(
            _run_by_step, program, mapped, step, pullback, compiled(_last, "the outer loss")
        )


def fastest_mode(operations: int, losses: int, by_step: bool) -> str:
    """What takes least in all, for a graph of so many operations and so many losses to compute."""
    costs = {
        "eager": TRACE_NODE * operations + losses * operations * RUN_EAGER_NODE,
        "inductor": START + COMPILE_NODE * operations + losses * operations * RUN_INDUCTOR_NODE,
    }
    if by_step:
        costs["step"] = (
            START + COMPILE_NODE * min(operations, 1000) + losses * operations * RUN_STEP_NODE
        )
    return min(costs, key=lambda mode: costs[mode])


def _count_operations(program: LoopProgram, mapped: bool, given: Any) -> tuple[int, bool]:
    """The operations of the whole graph, from graphs of few steps; whether one step's can serve all."""
    steps, by_step = program.inner_steps, program.unequal_steps() is None
    few = [min(steps, count) for count in (1, 2)] if by_step else [steps]
    graphs = [
        captured(partial(_whole, program, mapped, True, steps=count), *given) for count in few
    ]
    first, last = graphs[0], graphs[-1]
    return first.nodes + (steps - few[0]) * (last.nodes - first.nodes), by_step and not first.draws


def _whole(
    program: LoopProgram, mapped: bool, wanted: bool, options: str, weights: Tensor | None,
    point: MetaParams, support: Any, query: Any, steps: int | None = None,
) -> TaskResult:  # fmt: skip
    """The meta-gradient of tasks, all together or one."""
    given: Weights = None
    if weights is not None and program.step_weights is not None:  # a weight of zero has no graph
        given = [number and weights[i] for i, number in enumerate(program.step_weights.value)]

    def of_task(support: Any, query: Any) -> TaskResult:
        return program.task(point, support, query, wanted, steps, given)

    with stand_ins_if(program.stand_ins):
        return all_at_once(of_task, (support, query)) if mapped else of_task(support, query)


def _run_by_step(
    program: LoopProgram, mapped: bool, step: Compiled, pullback: Compiled, last: Compiled,
    point: MetaParams, support: Any, query: Any,
) -> TaskResult:  # fmt: skip
    """The steps forward, and their pullbacks backward.

    A graph is looked up once for all steps, and given its tensors in the order of its arguments: the
    graph of a step on a small network takes less time than to find it.
    """
    tasks = len(next(x for x in pytree.leaves(support) if isinstance(x, Tensor))) if mapped else 0
    names, options = program.names, program.options
    rest = {name: p for name, p in point.model.items() if name not in names}
    fixed = point._replace(model=rest)
    # Each task begins with parameters of its own, so that the first step is like the others.
    start = {name: _repeated(point.model[name], tasks) for name in names}
    state = program.init(point, start)
    memory = {slot: tree for slot, tree in state.items() if slot != "step"}
    count = torch.zeros((), dtype=torch.float64, device=start[names[0]].device)
    first = (start, memory)
    forward = {
        constant: step.prepared(options, constant, fixed, first, count, support)
        for constant in set(program.constant)
    }
    if any(graph.draws for graph in step.signatures):
        raise UnsupportedError(
            "compile='step': expected inner steps without random numbers, got some (dropout): a step "
            "and its backward would draw different ones; use compile='inductor' or 'eager'."
        )
    before = pytree.leaves(fixed)
    data = [x for x in pytree.leaves(support) if isinstance(x, Tensor)]
    carry, losses, saved = pytree.leaves(first), [], []
    for i, constant in enumerate(program.constant):
        saved.append((carry, count + i))
        *carry, loss = forward[constant]([*before, *carry, saved[-1][1], *data])
        carry = _contiguous(carry)
        losses.append(loss)
    carried = pytree.unflatten(carry, pytree.flatten(first)[1])
    value, back, of_fixed = last(options, fixed, carried, query)
    back, total = _contiguous(pytree.leaves(back)), pytree.leaves(of_fixed)
    backward = {
        constant: pullback.prepared(options, constant, fixed, first, count, support, first)
        for constant in forward
    }
    for constant in reversed(program.constant):
        carry, count = saved.pop()
        found = backward[constant]([*before, *carry, count, *data, *back])
        back, more = _contiguous(found[: len(back)]), found[len(back) :]
        total = [x + y for x, y in zip(total, more, strict=True)]
    own = dict(zip(start, back, strict=False))  # before the gradients of the rule's memory
    fixed = pytree.unflatten([x / max(1, tasks) for x in total], pytree.flatten(fixed)[1])
    model = {
        name: fixed.model[name] if name not in own else own[name].mean(0) if tasks else own[name]
        for name in point.model
    }
    grads = MetaParams(model, fixed.extras)._asdict()
    return TaskResult(value, grads, (torch.stack(losses, -1), []))


def _step(
    program: LoopProgram, mapped: bool, options: str, constant: bool, fixed: MetaParams, carry: Any,
    count: Tensor, support: Any,
) -> Any:  # fmt: skip
    """One inner step of each task: what it carries on, and its loss."""

    def of_task(carry: Any, support: Any) -> Any:
        return program.step(fixed, carry, count, support, constant)

    with stand_ins_if(program.stand_ins):
        if not mapped:
            return of_task(carry, support)
        return torch.func.vmap(of_task, randomness="different")(carry, support)


def _pullback(
    program: LoopProgram, mapped: bool, options: str, constant: bool, fixed: MetaParams, carry: Any,
    count: Tensor, support: Any, cotangent: Any,
) -> Any:  # fmt: skip
    """The pullback of one inner step of each task, to what it carries and to what is fixed."""

    def of_task(carry: Any, support: Any, cotangent: Any) -> Any:
        def step(carry: Any, fixed: MetaParams) -> Any:
            return program.step(fixed, carry, count, support, constant)[0]

        pullback: Any = torch.func.vjp(step, carry, fixed)[1]
        return pullback(cotangent)

    with stand_ins_if(program.stand_ins):
        if not mapped:
            return of_task(carry, support, cotangent)
        mapping = torch.func.vmap(of_task, randomness="different")
        back, of_fixed = mapping(carry, support, cotangent)
        return back, pytree.map(lambda grad: grad.sum(0), of_fixed)


def _last(
    program: LoopProgram, mapped: bool, options: str, fixed: MetaParams, carry: Any, query: Any
) -> Any:
    """The outer loss of each task, and its gradients by what was carried there and what is fixed."""

    def of_task(carry: Any, query: Any) -> Any:
        def outer(carry: Any, fixed: MetaParams) -> Tensor:
            return program.outer(fixed, carry[0], query, program.inner_steps)

        grads: Any
        grads, value = torch.func.grad_and_value(outer, argnums=(0, 1))(carry, fixed)
        return (value, *grads)

    with stand_ins_if(program.stand_ins):
        if not mapped:
            return of_task(carry, query)
        found: Any = torch.func.vmap(of_task, randomness="different")(carry, query)
        value, back, of_fixed = found
        return value, back, pytree.map(lambda grad: grad.sum(0), of_fixed)


def _repeated(tensor: Tensor, tasks: int) -> Tensor:
    return (tensor.expand(tasks, *tensor.shape) if tasks else tensor).contiguous()


def _contiguous(tensors: list[Tensor]) -> list[Tensor]:
    """In the layout that the graphs of a step were made for, whatever graph they come from."""
    return [x.contiguous() for x in tensors]
