"""The meta-gradient by the step: three graphs whatever the number of steps.

An inner step, its pullback and the outer loss; between them the parameters after each step are kept:

    theta_{i+1} = step(theta_i)        a_K = dL/dtheta_K        a_i = a_{i+1}^T dstep/dtheta_i
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hoglib._core import pytree
from hoglib.capture import Compiled
from hoglib.errors import UnsupportedError
from hoglib.meta.mapping import TaskResult
from hoglib.meta.module_loop import MetaParams
from hoglib.stand_ins.mode import stand_ins_if

if TYPE_CHECKING:
    from hoglib.meta.maml import MAML


def by_step(
    maml: "MAML", settings: str, mapped: bool, step: Compiled, pull: Compiled, last: Compiled,
    point: MetaParams, support: Any, query: Any,
) -> TaskResult:  # fmt: skip
    """The steps forward, and their pullbacks back.

    A graph is looked up once for all steps, and given its tensors in the order of its arguments: the
    graph of a step on a small network takes less time than to find it.
    """
    tasks = len(next(x for x in pytree.leaves(support) if isinstance(x, Tensor))) if mapped else 0
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
        raise UnsupportedError(
            "compile='step': expected inner steps without random numbers, got some (dropout): a step "
            "and its backward would draw different ones; use compile='inductor' or 'eager'."
        )
    before, data = (
        pytree.leaves(fixed),
        [x for x in pytree.leaves(support) if isinstance(x, Tensor)],
    )
    carry, losses, kept = pytree.leaves(first), [], []
    for i, constant in enumerate(constants):
        kept.append((carry, count + i))
        *carry, loss = forward[constant]([*before, *carry, kept[-1][1], *data])
        carry = _by_rows(carry)
        losses.append(loss)
    carried = pytree.unflatten(carry, pytree.flatten(first)[1])
    value, back, of_fixed = last(settings, fixed, carried, query)
    back, total = _by_rows(pytree.leaves(back)), pytree.leaves(of_fixed)
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
    fixed = pytree.unflatten([x / max(1, tasks) for x in total], pytree.flatten(fixed)[1])
    model = {
        name: fixed.model[name] if name not in own else own[name].mean(0) if tasks else own[name]
        for name in point.model
    }
    return TaskResult(
        value, MetaParams(model, fixed.extras)._asdict(), (torch.stack(losses, -1), [])
    )


def step(
    maml: "MAML", mapped: bool, settings: str, constant: bool, fixed: MetaParams, carry: Any,
    count: Tensor, support: Any,
) -> Any:  # fmt: skip
    """One inner step of each task: what it carries on, and its loss."""

    def one(carry: Any, support: Any) -> Any:
        return maml._step_from(fixed, carry, count, support, constant)

    with stand_ins_if(maml.stand_ins):
        if not mapped:
            return one(carry, support)
        return torch.func.vmap(one, randomness="different")(carry, support)


def pull(
    maml: "MAML", mapped: bool, settings: str, constant: bool, fixed: MetaParams, carry: Any,
    count: Tensor, support: Any, cotangent: Any,
) -> Any:  # fmt: skip
    """The pullback of one inner step of each task, to what it carries and to what is fixed."""

    def one(carry: Any, support: Any, cotangent: Any) -> Any:
        def step(carry: Any, fixed: MetaParams) -> Any:
            return maml._step_from(fixed, carry, count, support, constant)[0]

        pullback: Any = torch.func.vjp(step, carry, fixed)[1]
        return pullback(cotangent)

    with stand_ins_if(maml.stand_ins):
        if not mapped:
            return one(carry, support, cotangent)
        back, of_fixed = torch.func.vmap(one, randomness="different")(carry, support, cotangent)
        return back, pytree.map(lambda grad: grad.sum(0), of_fixed)


def last(
    maml: "MAML", mapped: bool, settings: str, fixed: MetaParams, carry: Any, query: Any
) -> Any:
    """The outer loss of each task, and its gradients by what was carried there and what is fixed."""

    def one(carry: Any, query: Any) -> Any:
        def outer(carry: Any, fixed: MetaParams) -> Tensor:
            return maml._outer_value(fixed, carry[0], query, maml.inner_steps)

        grads: Any
        grads, value = torch.func.grad_and_value(outer, argnums=(0, 1))(carry, fixed)
        return (value, *grads)

    with stand_ins_if(maml.stand_ins):
        if not mapped:
            return one(carry, query)
        found: Any = torch.func.vmap(one, randomness="different")(carry, query)
        value, back, of_fixed = found
        return value, back, pytree.map(lambda grad: grad.sum(0), of_fixed)


def _repeated(tensor: Tensor, tasks: int) -> Tensor:
    return (tensor.expand(tasks, *tensor.shape) if tasks else tensor).contiguous()


def _by_rows(tensors: list[Tensor]) -> list[Tensor]:
    """In the layout that the graphs of a step were made for, whatever graph they come from."""
    return [x.contiguous() for x in tensors]
