"""Tasks all at once, by vmap, or one after the other."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hoglib._core import pytree, validation
from hoglib._core.autograd import translate_errors
from hoglib._core.source_location import warn
from hoglib._core.swap import Params
from hoglib.errors import ArgumentValueError, HoglibError, UnsupportedError
from hoglib.meta import tasks as stacks

OVER_TASKS = ("auto", "vmap", "loop")
# Measured on perceptrons, transformers and convolutions: below it vmap takes 0.2 to 1.1 of the
# loop's
# time, from four times as much on 0.9 to 1.6.
WORK = 3e7


class TaskResult(NamedTuple):
    """What a task gives; of several tasks, the values stacked and the gradients' mean."""

    value: Tensor
    grads: dict[str, Any]  # a tree of gradients; empty where none are wanted
    notes: Any  # tensors


Function = Callable[[Any, Any], TaskResult]  # of support and query


class TaskRunner(NamedTuple):
    """How tasks are run."""

    all_at_once: Callable[[Function, Any], TaskResult]  # of a stack
    one_by_one: Callable[[Function, Sequence[tuple[Any, Any]]], TaskResult]


class Mapper:
    """Runs a function over tasks as it was asked to, or as pays; and remembers what vmap cannot
    run."""

    def __init__(self, over_tasks: str) -> None:
        self.over_tasks = validation.one_of("over_tasks", over_tasks, OVER_TASKS)
        self.vmappable = True  # until it is tried

    def __call__(
        self,
        function: Function,
        tasks: Any,
        what: str,
        params: Params,
        runner: TaskRunner | None = None,
    ) -> TaskResult:
        runner = runner or TaskRunner(all_at_once, one_by_one)
        stack = self._to_vectorize(tasks, params)
        if stack is None:
            with translate_errors(what):
                return runner.one_by_one(function, stacks.each(tasks))
        try:
            return runner.all_at_once(function, stack)
        except Exception as error:
            if isinstance(error, HoglibError) and self.over_tasks == "vmap":
                raise
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            if self.over_tasks == "vmap":
                raise UnsupportedError(
                    f"{what}(over_tasks='vmap'): expected a model that runs under vmap, got an error: "
                    f"{reason} If it is not the model's own, use over_tasks='loop'."
                ) from error
            # Whatever it was, the loop either shows it plainly or is the way round it.
            with translate_errors(what):
                result = runner.one_by_one(function, stacks.each(tasks))
        self.vmappable = False
        warn(
            f"{what} loops over the tasks, because vmap cannot run this model: {reason} "
            f"Pass over_tasks='loop' to say so yourself."
        )
        return result

    def _to_vectorize(self, tasks: Any, params: Params) -> Any | None:
        """The tasks as one stack, if vmap is to run them."""
        if self.over_tasks == "loop":
            return None
        if self.over_tasks == "auto" and not (self.vmappable and vmap_pays(params, tasks)):
            return None
        stack = stacks.stacked(tasks)
        if stack is None and self.over_tasks == "vmap":
            raise ArgumentValueError(
                "tasks: expected tasks of the same shapes with over_tasks='vmap', got a list of "
                "tasks that differ; use over_tasks='auto' or 'loop'."
            )
        return stack


def vmap_pays(params: Params, tasks: Any) -> bool:
    """Whether all tasks at once are likely to be faster than one after the other, by shapes alone.

    What vmap saves is the time around operations, a fixed one. What it costs on a CPU are slower
    kernels (grouped convolutions, batches of matrix products), in proportion to the work: about as many
    multiplications as there are parameters times rows that they are applied to. On other devices one
    launch for all wins.
    """
    if any(p.device.type != "cpu" for p in params.values()):
        return True
    first = tasks[0][0] if isinstance(tasks, list) else tasks[0]
    shapes = [x.shape for x in pytree.leaves(first) if isinstance(x, Tensor)]
    if not isinstance(tasks, list):
        shapes = [shape[1:] for shape in shapes]
    rows = max(
        (shape.numel() // (shape[1] if len(shape) > 1 else 1) for shape in shapes), default=1
    )
    return rows * pytree.size(params) <= WORK


def all_at_once(function: Function, tasks: Any) -> TaskResult:
    # vmap is outermost: the derivative of a vmapped loss is wrong through normalisation layers.
    leaves, structure = pytree.flatten(tasks)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def of_tensors(*given: Tensor) -> TaskResult:
        left = iter(given)
        filled = [next(left) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return function(*pytree.unflatten(filled, structure))

    found = torch.func.vmap(of_tensors, randomness="different")(*tensors)
    return found._replace(grads=pytree.map(lambda grad: grad.mean(0), found.grads))


def one_by_one(function: Function, tasks: Sequence[tuple[Any, Any]]) -> TaskResult:
    values, notes, total = [], [], None
    for support, query in tasks:
        found = function(support, query)
        values.append(found.value)
        notes.append(found.notes)
        total = found.grads if total is None else pytree.add(total, found.grads)
    stacked = pytree.map(lambda *parts: torch.stack(parts), *notes)
    return TaskResult(torch.stack(values), pytree.scale(total, 1 / len(tasks)), stacked)
