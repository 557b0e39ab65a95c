"""The meta-gradient as graphs: of a whole task, or of one inner step that is used for all.

Modes "inductor" and "eager": the graph of a task has all inner steps and their derivatives. Nothing
runs faster, and the time to compile grows with the steps. Mode "step": three graphs whatever the
number of steps, of an inner step, its pullback and the outer loss. Between them the parameters
after each step are kept:

    theta_{i+1} = step(theta_i)        a_K = dL/dtheta_K        a_i = a_{i+1}^T dstep/dtheta_i
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, NamedTuple, final

import torch
from torch import Tensor

from hoglib._core import pytree, validation
from hoglib._core.logger import LOGGER
from hoglib.capture.api import Compiled, trace_graph
from hoglib.capture.capturing import Place
from hoglib.errors import UnsupportedError
from hoglib.meta.module_loop import MetaParams, ModuleLoop
from hoglib.meta.tasks import TaskResult, TaskRunner, loop_tasks, map_tasks
from hoglib.stand_ins.mode import stand_ins_if

DEFAULT_LOSSES = 10_000  # losses to compute, where compile_for is None

# The time that each mode takes, in seconds and per operation of the whole graph: measured on
# perceptrons and convolutions on one core. A factor of two is precise enough: between modes that cost
# about the same the choice matters little.
START, COMPILE_NODE, TRACE_NODE = 6.0, 9e-3, 7e-4
RUN_EAGER_NODE, RUN_INDUCTOR_NODE, RUN_STEP_NODE = 4e-6, 1e-6, 1.7e-6

CHOICE_MESSAGES: Final = {
    "eager": "run one by one: compiling them would take longer than it saves",
    "inductor": "compiled as one graph",
    "step": "compiled by the inner step: compiling all steps would take longer than it saves",
}


@dataclass(frozen=True)
class CompileOptions:
    """How the meta-gradient is compiled, checked when it is made."""

    compiled: bool | str = False
    compile_for: int | None = None  # losses that will be computed

    def __post_init__(self) -> None:
        validation.backend("compile", self.compiled, more=["step"])
        if self.compile_for is not None:
            validation.at_least("compile_for", self.compile_for, 1)


class Program(NamedTuple):
    """What is captured: an inner loop without step weights, which are an input of the graph."""

    loop: ModuleLoop
    used: tuple[bool, ...] | None  # the step weights that are not zero
    key: str  # all options that a graph depends on


@final
class MetaCompiler:
    """Compiles and runs the meta-gradient of one learner. Its graphs are kept with it, and a copy has
    none."""

    def __init__(self) -> None:
        self._differences: dict[str, str | None] = {}  # between the inner steps, by options
        self.chosen: str | None = None  # the mode, where it was left open

    def runner(
        self, options: CompileOptions, loop: ModuleLoop, start: MetaParams, wanted: bool, name: str
    ) -> TaskRunner:
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
            given = program.key, weight_tensor, start, support, query
            mode = options.compiled
            if mode is True:
                losses = options.compile_for or DEFAULT_LOSSES
                mode = self._choose(program, losses, name, mapped, given)
            if mode == "step" and wanted:
                return self._by_step(program, start, mapped)(start, support, query)
            backend = "eager" if mode == "eager" else "inductor"
            whole = partial(_whole, program, mapped, wanted)
            graph = self._compiled(whole, (mapped, wanted), "MAML.loss", backend)
            found: TaskResult = graph(*given)
            return found

        return TaskRunner(
            lambda stack: run(True, *stack),
            partial(loop_tasks, partial(run, False)),
        )

    def _choose(self, program: Program, losses: int, name: str, mapped: bool, given: Any) -> str:
        if self.chosen is None:
            start = given[2]
            by_step = self._difference(program, start) is None
            operations, by_step = _count_operations(program, mapped, given, by_step)
            self.chosen = fastest_mode(operations, losses, by_step)
            counted = f"{losses:,} losses of {operations:,} operations each"
            LOGGER.info("%s: %s, %s", name, counted, CHOICE_MESSAGES[self.chosen])
        return self.chosen

    def _difference(self, program: Program, start: MetaParams) -> str | None:
        if program.key not in self._differences:  # it takes as long as a step of a small network
            self._differences[program.key] = difference_of_steps(program, start)
        return self._differences[program.key]

    def _compiled(self, fn: Callable[..., Any], key: Any, name: str, backend: str) -> Compiled:
        return Compiled(fn, backend=backend, name=name, place=Place(self, key))

    def _by_step(
        self, program: Program, start: MetaParams, mapped: bool
    ) -> Callable[..., TaskResult]:
        reason = self._difference(program, start)
        if reason is not None:
            raise UnsupportedError(
                f"compile='step': expected inner steps that are equal, got {reason}; use "
                "compile='inductor', one graph for all steps."
            )

        def compiled(fn: Callable[..., Any], what: str) -> Compiled:
            name = f"MAML.loss, {what}" + ("" if mapped else ", one task")
            return self._compiled(partial(fn, program.loop, mapped), name, name, "inductor")

        step, pullback = compiled(_step, "a step"), compiled(_pullback, "its backward")
        return partial(
            _run_by_step, program, mapped, step, pullback, compiled(_last, "the outer loss")
        )


def fastest_mode(operations: int, losses: int, by_step: bool) -> str:
    """The mode that takes least time in all, for a graph of so many operations and so many losses."""
    costs = {
        "eager": TRACE_NODE * operations + losses * operations * RUN_EAGER_NODE,
        "inductor": START + COMPILE_NODE * operations + losses * operations * RUN_INDUCTOR_NODE,
    }
    if by_step:
        costs["step"] = (
            START + COMPILE_NODE * min(operations, 1000) + losses * operations * RUN_STEP_NODE
        )
    return min(costs, key=lambda mode: costs[mode])


def difference_of_steps(program: Program, start: MetaParams) -> str | None:
    """What differs between the inner steps; None where the graph of one step serves all."""
    loop = program.loop
    if program.used is not None:
        return "step_weights, outer losses after some"
    if loop.statistics is not None:
        return "batch_norm='per_step'"
    if loop.rates is not None and loop.rates.steps is not None:
        return "lr_per_step"
    state = loop.rule_at(0, start).init({name: start.model[name] for name in loop.adapting})
    others = [x for x in pytree.leaves(state) if not isinstance(x, Tensor)]
    if others and not (isinstance(state, dict) and others == [state.get("step")] == [0]):
        return "a rule that counts steps by itself"
    return None


def _count_operations(
    program: Program, mapped: bool, given: Any, by_step: bool
) -> tuple[int, bool]:
    """The operations of the whole graph, from graphs of few steps; whether one step's can serve all."""
    steps = program.loop.options.inner_steps
    few = [min(steps, count) for count in (1, 2)] if by_step else [steps]
    graphs = [
        trace_graph(partial(_whole, program, mapped, True, steps=count), *given)[0] for count in few
    ]
    first, last = graphs[0], graphs[-1]
    return first.nodes + (steps - few[0]) * (last.nodes - first.nodes), by_step and not first.draws


def _whole(
    program: Program, mapped: bool, wanted: bool, key: str, weights: Tensor | None,
    start: MetaParams, support: Any, query: Any, steps: int | None = None,
) -> TaskResult:  # fmt: skip
    """The meta-gradient of tasks, all together or one."""
    loop, given = program.loop, None
    if weights is not None and program.used is not None:  # a weight of zero needs no operations
        given = [used and weights[i] for i, used in enumerate(program.used)]

    def of_task(support: Any, query: Any) -> TaskResult:
        if wanted:
            return loop.meta_gradient(start, support, query, steps, given)
        return loop.outer_loss(start, support, query, steps, given)[0]

    with stand_ins_if(loop.options.stand_ins):
        return map_tasks(of_task, (support, query)) if mapped else of_task(support, query)


def _run_by_step(
    program: Program, mapped: bool, step: Compiled, pullback: Compiled, last: Compiled,
    start: MetaParams, support: Any, query: Any,
) -> TaskResult:  # fmt: skip
    """The steps forward, and their pullbacks backward.

    A graph is looked up once for all steps, and given its tensors in the order of its arguments:
    the graph of a step on a small network takes less time than to find it.
    """
    tasks = len(pytree.tensors(support)[0]) if mapped else 0
    loop, key, names = program.loop, program.key, program.loop.adapting
    constants = [
        loop.is_constant(i, loop.options.inner_steps) for i in range(loop.options.inner_steps)
    ]
    rest = {name: p for name, p in start.model.items() if name not in names}
    fixed = start._replace(model=rest)
    # Each task begins with parameters of its own, so that the first step is like the others.
    first_params = {name: _repeated(start.model[name], tasks) for name in names}
    state = loop.rule_at(0, start).init(first_params)
    memory = {slot: tree for slot, tree in state.items() if slot != "step"}
    count = torch.zeros((), dtype=torch.float64, device=first_params[names[0]].device)
    first = (first_params, memory)
    forward = {
        constant: step.prepared(key, constant, fixed, first, count, support)
        for constant in set(constants)
    }
    if any(graph.draws for graph in step.signatures):
        raise UnsupportedError(
            "compile='step': expected inner steps without random numbers, got some (dropout): a step "
            "and its backward would draw different ones; use compile='inductor' or 'eager'."
        )
    before = pytree.leaves(fixed)
    data = pytree.tensors(support)
    carry, losses, saved = pytree.leaves(first), [], []
    for i, constant in enumerate(constants):
        saved.append((carry, count + i))
        *carry, loss = forward[constant]([*before, *carry, saved[-1][1], *data])
        carry = _contiguous(carry)
        losses.append(loss)
    carried = pytree.unflatten(carry, pytree.flatten(first)[1])
    value, back, of_fixed = last(key, fixed, carried, query)
    back, total = _contiguous(pytree.leaves(back)), pytree.leaves(of_fixed)
    backward = {
        constant: pullback.prepared(key, constant, fixed, first, count, support, first)
        for constant in forward
    }
    for constant in reversed(constants):
        carry, count = saved.pop()
        found = backward[constant]([*before, *carry, count, *data, *back])
        back, more = _contiguous(found[: len(back)]), found[len(back) :]
        total = [x + y for x, y in zip(total, more, strict=True)]
    own = dict(zip(first_params, back, strict=False))  # before the gradients of the rule's memory
    fixed = pytree.unflatten([x / max(1, tasks) for x in total], pytree.flatten(fixed)[1])
    model = {
        name: fixed.model[name] if name not in own else own[name].mean(0) if tasks else own[name]
        for name in start.model
    }
    grads = MetaParams(model, fixed.modules)
    return TaskResult(value, grads, torch.stack(losses, -1))


def _step(
    loop: ModuleLoop, mapped: bool, key: str, constant: bool, fixed: MetaParams, carry: Any,
    count: Tensor, support: Any,
) -> Any:  # fmt: skip
    """One inner step of each task: what it carries on, and its loss."""

    def of_task(carry: Any, support: Any) -> Any:
        return loop.step(fixed, carry, count, support, constant)

    return _of_tasks(loop, mapped, of_task, carry, support)


def _pullback(
    loop: ModuleLoop, mapped: bool, key: str, constant: bool, fixed: MetaParams, carry: Any,
    count: Tensor, support: Any, cotangent: Any,
) -> Any:  # fmt: skip
    """The pullback of one inner step of each task, to what it carries and to what is fixed."""

    def of_task(carry: Any, support: Any, cotangent: Any) -> Any:
        def step(carry: Any, fixed: MetaParams) -> Any:
            return loop.step(fixed, carry, count, support, constant)[0]

        pullback: Any = torch.func.vjp(step, carry, fixed)[1]
        return pullback(cotangent)

    back, of_fixed = _of_tasks(loop, mapped, of_task, carry, support, cotangent)
    return back, _total(mapped, of_fixed)


def _last(
    loop: ModuleLoop, mapped: bool, key: str, fixed: MetaParams, carry: Any, query: Any
) -> Any:
    """The outer loss of each task, and its gradients by what was carried there and what is fixed."""

    def of_task(carry: Any, query: Any) -> Any:
        def outer(carry: Any, fixed: MetaParams) -> Tensor:
            return loop.outer_value(fixed, carry[0], query, loop.options.inner_steps)

        grads: Any
        grads, value = torch.func.grad_and_value(outer, argnums=(0, 1))(carry, fixed)
        return (value, *grads)

    value, back, of_fixed = _of_tasks(loop, mapped, of_task, carry, query)
    return value, back, _total(mapped, of_fixed)


def _of_tasks(loop: ModuleLoop, mapped: bool, of_task: Callable[..., Any], *given: Any) -> Any:
    with stand_ins_if(loop.options.stand_ins):
        return (torch.func.vmap(of_task, randomness="different") if mapped else of_task)(*given)


def _total(mapped: bool, grads: Any) -> Any:
    """The sum over tasks."""
    return pytree.map(lambda grad: grad.sum(0), grads) if mapped else grads


def _repeated(tensor: Tensor, tasks: int) -> Tensor:
    return (tensor.expand(tasks, *tensor.shape) if tasks else tensor).contiguous()


def _contiguous(tensors: list[Tensor]) -> list[Tensor]:
    """In the layout that the graphs of a step were made for, whatever graph they come from."""
    return [x.contiguous() for x in tensors]
