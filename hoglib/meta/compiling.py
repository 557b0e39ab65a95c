"""The meta-gradient as graphs: of a whole task, or of one inner step that is used for all.

Whole, the graph of a task has all inner steps and their derivatives: nothing runs faster, and the time
to compile grows with the steps. By the step there are three graphs whatever the number of steps, an
inner step, its pullback, and the outer loss, between which the parameters after each step are kept:

    theta_{i+1} = step(theta_i)        a_K = dL/dtheta_K        a_i = a_{i+1}^T dstep/dtheta_i
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from hoglib import _arguments as arguments
from hoglib import _tree
from hoglib.capture import Compiled, compile
from hoglib.capture._inductor import to_stderr
from hoglib.capture.compiled import captured
from hoglib.meta.loop import Point, Weights
from hoglib.meta.mapping import OfTask, Ways, all_at_once, one_by_one
from hoglib.stand_ins import stand_ins_if

if TYPE_CHECKING:
    from hoglib.meta.maml import MAML

MANY = 10_000  # losses to compute, where nobody says how many

# What decides between them, in seconds and per operation of the whole graph: measured on perceptrons
# and convolutions on one core. They need not be right to more than a factor: what lies between two ways
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

    def ways(self, maml: "MAML", point: Point, wanted: bool) -> Ways:
        """How tasks are run, all at once and one by one."""
        settings, weights = settings_of(maml), weights_of(maml, point)

        def together(_: Any, stack: Any) -> OfTask:
            support, query = stack
            return run(True, support, query)

        def in_turn(_: Any, tasks: Any) -> OfTask:
            return one_by_one(partial(run, False), tasks)

        def run(mapped: bool, support: Any, query: Any) -> OfTask:
            chosen = self._chosen(maml, settings, weights, point, support, query, mapped)
            if chosen == "step" and wanted:
                return self._by_step(maml, settings, mapped)(point, support, query)
            backend = "eager" if chosen == "eager" else "inductor"
            whole = self._graph(partial(_whole, maml, mapped, wanted), (mapped, wanted), backend)
            found: OfTask = whole(settings, weights, point, support, query)
            return found

        return Ways(together, in_turn)

    def _chosen(
        self, maml: "MAML", settings: str, weights: Any, point: Point, support: Any, query: Any,
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
        self, maml: "MAML", settings: str, weights: Any, point: Point, support: Any, query: Any,
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

    def _by_step(self, maml: "MAML", settings: str, mapped: bool) -> Callable[..., OfTask]:
        if settings not in self._alike:  # which takes as long as a step of a small network
            self._alike[settings] = alike(maml)
        reason = self._alike[settings]
        if reason is not None:
            raise arguments.NotSupported(
                f"compile='step': expected inner steps that are alike, got {reason}; use "
                "compile='inductor', one graph for all steps."
            )
        suffix = "" if mapped else ", one task"
        step = self._graph(partial(_step, maml, mapped), f"a step{suffix}", "inductor")
        pull = self._graph(partial(_pull, maml, mapped), f"its backward{suffix}", "inductor")
        last = self._graph(partial(_last, maml, mapped), f"the outer loss{suffix}", "inductor")
        return partial(_chain, maml, settings, mapped, step, pull, last)


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


def weights_of(maml: "MAML", point: Point) -> Tensor | None:
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
    others = [x for x in _tree.leaves(state) if not isinstance(x, Tensor)]
    if others and not (isinstance(state, dict) and others == [state.get("step")] == [0]):
        return "a rule that counts steps by itself"
    return None


def _whole(
    maml: "MAML", mapped: bool, wanted: bool, settings: str, weights: Tensor | None, point: Point,
    support: Any, query: Any, steps: int | None = None,
) -> OfTask:  # fmt: skip
    """The meta-gradient of tasks, all together or one."""
    own: Weights = None
    if weights is not None:  # their place, where a graph leaves out those that are zero
        own = [number and weights[i] for i, number in enumerate(maml._weights(len(weights)) or [])]

    def of_task(support: Any, query: Any) -> OfTask:
        return maml._of_task(point, support, query, wanted, steps, own)

    with stand_ins_if(maml.stand_ins):
        return all_at_once(of_task, (support, query)) if mapped else of_task(support, query)


def _chain(
    maml: "MAML", settings: str, mapped: bool, step: Compiled, pull: Compiled, last: Compiled,
    point: Point, support: Any, query: Any,
) -> OfTask:  # fmt: skip
    """The steps forward, and their pullbacks back.

    A graph is looked up once for all steps, and given its tensors in the order of its arguments: the
    graph of a step on a small network takes less time than to find it.
    """
    tasks = len(next(x for x in _tree.leaves(support) if isinstance(x, Tensor))) if mapped else 0
    steps, names = maml.inner_steps, maml._adapting(point.model)
    rest = {name: p for name, p in point.model.items() if name not in names}
    fixed = point._replace(model=rest)
    # Each task begins with parameters of its own, so that the first step is like the others.
    start = {name: _repeated(point.model[name], tasks) for name in names}
    state = maml._rule(0, point, names).init(start)
    memory = {slot: tree for slot, tree in state.items() if slot != "step"}
    count = torch.zeros((), dtype=torch.float64, device=start[names[0]].device)
    first = (start, memory)
    constants = [maml._constant(i, steps) for i in range(steps)]
    forward = {
        constant: step.prepared(settings, constant, fixed, first, count, support)
        for constant in set(constants)
    }
    if any(one.draws for one in step.signatures):
        raise arguments.NotSupported(
            "compile='step': expected inner steps without random numbers, got some (dropout): a step "
            "and its backward would draw different ones; use compile='inductor' or 'eager'."
        )
    before, data = _tree.leaves(fixed), [x for x in _tree.leaves(support) if isinstance(x, Tensor)]
    carry, losses, kept = _tree.leaves(first), [], []
    for i, constant in enumerate(constants):
        kept.append((carry, count + i))
        *carry, loss = forward[constant]([*before, *carry, kept[-1][1], *data])
        carry = _by_rows(carry)
        losses.append(loss)
    carried = _tree.unflatten(carry, _tree.flatten(first)[1])
    value, back, of_fixed = last(settings, fixed, carried, query)
    back, total = _by_rows(_tree.leaves(back)), _tree.leaves(of_fixed)
    backward = {
        constant: pull.prepared(settings, constant, fixed, first, count, support, first)
        for constant in forward
    }
    for constant in reversed(constants):
        carry, count = kept.pop()
        found = backward[constant]([*before, *carry, count, *data, *back])
        back, more = _by_rows(found[: len(back)]), found[len(back) :]
        total = [x + y for x, y in zip(total, more, strict=True)]
    own = dict(zip(start, back, strict=False))  # in front of what the rule remembers
    fixed = _tree.unflatten([x / max(1, tasks) for x in total], _tree.flatten(fixed)[1])
    model = {
        name: fixed.model[name] if name not in own else own[name].mean(0) if tasks else own[name]
        for name in point.model
    }
    return OfTask(value, Point(model, fixed.extras)._asdict(), (torch.stack(losses, -1), []))


def _step(
    maml: "MAML", mapped: bool, settings: str, constant: bool, fixed: Point, carry: Any,
    count: Tensor, support: Any,
) -> Any:  # fmt: skip
    """One inner step of each task: what it carries on, and its loss."""

    def one(carry: Any, support: Any) -> Any:
        return maml._step_from(fixed, carry, count, support, constant)

    with stand_ins_if(maml.stand_ins):
        if not mapped:
            return one(carry, support)
        return torch.func.vmap(one, randomness="different")(carry, support)


def _pull(
    maml: "MAML", mapped: bool, settings: str, constant: bool, fixed: Point, carry: Any,
    count: Tensor, support: Any, cotangent: Any,
) -> Any:  # fmt: skip
    """The pullback of one inner step of each task, to what it carries and to what is fixed."""

    def one(carry: Any, support: Any, cotangent: Any) -> Any:
        def step(carry: Any, fixed: Point) -> Any:
            return maml._step_from(fixed, carry, count, support, constant)[0]

        pullback: Any = torch.func.vjp(step, carry, fixed)[1]
        return pullback(cotangent)

    with stand_ins_if(maml.stand_ins):
        if not mapped:
            return one(carry, support, cotangent)
        back, of_fixed = torch.func.vmap(one, randomness="different")(carry, support, cotangent)
        return back, _tree.map(lambda grad: grad.sum(0), of_fixed)


def _last(maml: "MAML", mapped: bool, settings: str, fixed: Point, carry: Any, query: Any) -> Any:
    """The outer loss of each task, and its gradients by what was carried there and what is fixed."""

    def one(carry: Any, query: Any) -> Any:
        def outer(carry: Any, fixed: Point) -> Tensor:
            return maml._outer_value(fixed, carry[0], query, maml.inner_steps)

        grads: Any
        grads, value = torch.func.grad_and_value(outer, argnums=(0, 1))(carry, fixed)
        return (value, *grads)

    with stand_ins_if(maml.stand_ins):
        if not mapped:
            return one(carry, query)
        found: Any = torch.func.vmap(one, randomness="different")(carry, query)
        value, back, of_fixed = found
        return value, back, _tree.map(lambda grad: grad.sum(0), of_fixed)


def _repeated(tensor: Tensor, tasks: int) -> Tensor:
    return (tensor.expand(tasks, *tensor.shape) if tasks else tensor).contiguous()


def _by_rows(tensors: list[Tensor]) -> list[Tensor]:
    """In the layout that the graphs of a step were made for, whatever graph they come from."""
    return [x.contiguous() for x in tensors]
