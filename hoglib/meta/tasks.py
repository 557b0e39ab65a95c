"""What a task is made of, and the checks on it.

A batch is a pair (inputs, targets) whose leading dimension counts examples; a task is a pair
(support, query) of batches. Tasks come stacked, as one pair whose tensors have a leading task
dimension, or as a list of pairs.
"""

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from torch import Tensor

from hoglib import _arguments as arguments
from hoglib import _tree

Task = tuple[Any, Any]


def check_batch(what: str, batch: Any) -> None:
    """A pair (inputs, targets) with the same number of examples, at least one."""
    sizes = _sizes(what, batch, dims=1)
    if len({size[0] for size in sizes}) > 1:
        raise arguments.WrongValue(
            f"{what}: expected as many targets as inputs, got leading dimensions "
            f"{', '.join(str(size[0]) for size in sizes)}."
        )
    if sizes[0][0] == 0:
        raise arguments.WrongValue(
            f"{what}: expected at least one example, got an empty set; "
            f"a task cannot be learned from, or judged on, nothing."
        )


def unpack(tasks: Any) -> Any:
    """A stack as a tuple, also when a collate function made it a list; a list of tasks as it is."""
    if isinstance(tasks, list) and len(tasks) == 2:
        pairs = (isinstance(part, tuple | list) and len(part) == 2 for part in tasks)
        if all(pairs) and all(isinstance(x, Tensor) for part in tasks for x in part):
            return tuple(tasks)
    return tasks


def check_tasks(tasks: Any) -> int:
    """The number of tasks, after checking their sizes."""
    for leaf in _tree.leaves(tasks):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            raise arguments.NoSecondDerivative(
                "tasks: expected tensors that do not require grad, got one that does; maml.loss does "
                "not differentiate by the tasks. Detach them, or write the loss with "
                "`maml.adapt(support)` and `maml(x, params=adapted)`, which are differentiable by "
                "everything."
            )
    if isinstance(tasks, list):
        for i, task in enumerate(tasks):
            support, query = _task(f"tasks[{i}]", task)
            check_batch(f"tasks[{i}]: support", support)
            check_batch(f"tasks[{i}]: query", query)
        if not tasks:
            raise arguments.WrongValue("tasks: expected at least one task, got an empty list.")
        return len(tasks)
    counts = []
    for what, stack in zip(("support", "query"), _task("tasks", tasks), strict=True):
        sizes = _sizes(what, stack, dims=2)
        if len({tuple(size) for size in sizes}) > 1:
            raise arguments.WrongValue(
                f"{what}: expected inputs and targets [tasks, examples, ...] with the same tasks and "
                f"examples, got leading dimensions {', '.join(str(size) for size in sizes)}."
            )
        if 0 in sizes[0]:
            raise arguments.WrongValue(
                f"{what}: expected at least one task with at least one example, got {sizes[0]}."
            )
        counts.append(sizes[0][0])
    if counts[0] != counts[1]:
        raise arguments.WrongValue(
            f"tasks: expected as many query sets as support sets, got {counts[0]} support and "
            f"{counts[1]} query sets; stack them in the same order, one of each a task."
        )
    return int(counts[0])


def each(tasks: Any) -> Sequence[Task]:
    """The tasks one by one."""
    if isinstance(tasks, list):
        return tasks
    count = _tree.leaves(tasks)[0].shape[0]
    return [_tree.map_tensors(itemgetter(i), tasks) for i in range(count)]


def _task(what: str, task: Any) -> Task:
    if not isinstance(task, tuple | list) or len(task) != 2:
        came = (
            f"{len(task)} of them" if isinstance(task, tuple | list) else arguments.describe(task)
        )
        raise arguments.WrongValue(
            f"{what}: expected a pair (support, query), each (inputs, targets), got {came}."
        )
    return task[0], task[1]


def _sizes(what: str, batch: Any, dims: int) -> list[tuple[int, ...]]:
    """The leading dimensions of inputs and targets."""
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise arguments.WrongValue(
            f"{what}: expected a pair (inputs, targets), got {arguments.describe(batch)}; a task is "
            f"((support inputs, support targets), (query inputs, query targets))."
        )
    if not all(_tree.leaves(part) for part in batch):
        raise arguments.WrongValue(
            f"{what}: expected tensors as inputs and targets, got an empty container; "
            f"pass one tensor, or a container of tensors, for each."
        )
    sizes = []
    for part in _tree.leaves(batch):
        arguments.tensor(what, part)
        if part.dim() < dims:
            expected = "[tasks, examples, ...]" if dims == 2 else "[examples, ...]"
            raise arguments.WrongValue(
                f"{what}: expected tensors {expected}, got {arguments.describe(part)}."
            )
        sizes.append(tuple(part.shape[:dims]))
    return sizes
