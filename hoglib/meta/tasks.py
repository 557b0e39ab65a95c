"""Tasks: their form, their checks, and how several are run.

A task is a pair (support, query) of batches, each of any kind that `functional_loss` takes. Tasks come
stacked, as one pair of tensors with a leading task dimension, or as a list of pairs. They run all at
once under vmap, or in a loop.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import itemgetter
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hoglib import errors
from hoglib._core.messages import validation
from hoglib._core.modules.swap import Params
from hoglib._core.runtime.source_location import warn_once
from hoglib._core.substrate.autograd import translate_errors
from hoglib._core.torch_api import pytree
from hoglib._core.torch_api.pytree import Tree

Task = tuple[Any, Any]
OverTasks = Literal["auto", "vmap", "loop"]
ONE_STACK = (
    "tasks: read (support, query) as stacks of {count} tasks, whose {shape} inputs have no feature "
    "dimension. If this is one task of {count} examples, pass a list, [(support, query)]; if the model "
    "takes such inputs, filter this warning."
)
TWO_TASKS = (
    "tasks: read the list as two tasks, each a support and a query set of inputs that are their own "
    "targets. If these are the support set and the query set of one task, each (inputs, targets), pass "
    "[(support, query)]; else give the two tasks as stacks, or filter this warning."
)
SINGLE = "; for one task pass a list, [(support, query)]"
EMPTY = (
    "{}: expected at least one example, got an empty set; give every task examples to adapt to and "
    "examples to evaluate on."
)


class Shard(NamedTuple):
    """The share of one process; the result of `shard`."""

    tasks: Any
    weight: float  # factor of the loss over these tasks


def shard(tasks: object, *, mesh: object = None) -> Shard:
    r"""Share out the tasks among the processes of torch.distributed.

        (weight maml.loss(mine)).backward(), averaged over the processes, is
        maml.loss(tasks).backward()

    Each process gets every world_size-th task. With the weight, the average over processes is the mean
    over all tasks, even if their number does not divide evenly.

    Args:
        tasks: The tasks of the whole meta-batch, equal in all processes: a tuple (support, query) of
            stacks, or a list of tasks.
        mesh: A one-dimensional `torch.distributed.device_mesh.DeviceMesh` of the processes that share
            the tasks: ``mesh["tasks"]``, if ``mesh["parameters"]`` shares the parameters. Default: all
            processes.

    Returns:
        A `Shard`, ``(tasks, weight)``: the tasks of this process, in the form of tasks, and the weight
        of their loss. Without torch.distributed: all tasks, and 1.

    Raises:
        ArgumentTypeError: for an object other than a DeviceMesh.
        ArgumentValueError: for fewer tasks than processes, and for a mesh of several dimensions.

    Example:
        >>> tasks = [((torch.ones(5, 2), torch.ones(5)), (torch.ones(5, 2), torch.ones(5)))] * 3
        >>> mine, weight = hog.meta.shard(tasks)
        >>> len(mine), weight
        (3, 1.0)
    """
    tasks = unpack(tasks)
    count = check_tasks(tasks)
    if not (dist.is_available() and dist.is_initialized()):
        return Shard(tasks, 1.0)
    rank, world = _process_place(mesh)
    if count < world:
        raise errors.ArgumentValueError(
            f"tasks: expected at least one task for each of the {world} processes, got {count}; "
            "give larger meta-batches, or start fewer processes."
        )
    if isinstance(tasks, list):
        mine: Any = tasks[rank::world]
    else:
        mine = pytree.map_tensors(lambda x: x[rank::world], tasks)
    return Shard(mine, len(range(rank, count, world)) * world / count)


def _process_place(mesh: object) -> tuple[int, int]:
    """The rank of this process in a mesh (or among all processes), and the number of processes."""
    if mesh is None:
        return dist.get_rank(), dist.get_world_size()
    from torch.distributed.device_mesh import DeviceMesh

    if not isinstance(mesh, DeviceMesh):
        raise errors.ArgumentTypeError(
            f"mesh: expected a torch DeviceMesh, such as mesh['tasks'], got "
            f"{validation.describe(mesh)}."
        )
    if mesh.ndim != 1:
        text = f"mesh: expected one dimension, such as mesh['tasks'], got {mesh.ndim} of them."
        raise errors.ArgumentValueError(text)
    return mesh.get_local_rank(), mesh.size()


class TaskResult(NamedTuple):
    """The result of one task; for several tasks, the mean of grads, and stacks of all other fields."""

    value: Tensor  # the outer loss
    grads: Any  # by the MetaParams, in their structure; () if only the value is computed
    inner_losses: Tensor  # [steps]
    statistics: Any = ()  # batch norm statistics, after each number of steps
    residual: Any = ()  # Residual of an implicit gradient


TaskFunction = Callable[[Any, Any], TaskResult]  # (support, query)


def run_tasks(
    of_task: TaskFunction,
    of_stack: TaskFunction,
    tasks: object,
    what: str,
    params: Params,
    over_tasks: str,
    vmappable: bool,
) -> tuple[TaskResult, bool]:
    """Run tasks all at once or one by one: as `over_tasks` says, or for "auto" whichever is faster.

    of_stack: `of_task` for a pair of stacks. vmappable: vmap has not failed for this model. Returns the
    result, and the new value of vmappable.
    """
    stack = _stack_for_vmap(tasks, params, over_tasks, vmappable)
    reason = ""
    if stack is not None:
        try:
            return of_stack(*stack), vmappable
        except Exception as error:
            # HoglibErrors are about the model or the data, not about vmap
            if isinstance(error, errors.HoglibError) and over_tasks == "vmap":
                raise
            reason = (str(error) or type(error).__name__).splitlines()[0].partition(" INTERNAL")[0]
            if over_tasks == "vmap":
                raise errors.UnsupportedError(
                    f"{what}(over_tasks='vmap'): expected a model that runs under vmap, got an error: "
                    f"{reason} If it is not the model's own, use over_tasks='loop'."
                ) from error
    # without vmap, the loop raises a real error again, or works
    with translate_errors(what):
        result = loop_tasks(of_task, unstack(tasks))
    if stack is None:
        return result, vmappable
    warn_once(
        f"{what} loops over the tasks, because vmap cannot run this model: {reason} "
        f"Pass over_tasks='loop' to loop without this warning."
    )
    return result, False


def _stack_for_vmap(tasks: object, params: Params, over_tasks: str, vmappable: bool) -> Any | None:
    """The tasks as one stack if vmap shall run them, otherwise None."""
    if over_tasks == "loop" or (over_tasks == "auto" and not (vmappable and prefer_vmap(params))):
        return None
    stack = to_stacks(tasks)
    if stack is None and over_tasks == "vmap":
        raise errors.ArgumentValueError(
            "tasks: expected tasks of the same shapes with over_tasks='vmap', got a list of "
            "tasks that differ; use over_tasks='auto' or 'loop'."
        )
    return stack


def prefer_vmap(params: Params) -> bool:
    """Whether vmap over all tasks is likely to be faster than a loop.

    On a CPU it is slower if all parameters together have more than 2**17 elements, because the copies
    for all tasks exceed the caches, or if a parameter of more than two dimensions (a convolution's) has
    more than 2**12.
    """
    on_cpu = [p for p in params.values() if p.device.type == "cpu"]
    small = sum(p.numel() for p in on_cpu) <= 2**17
    return small and all(p.numel() <= 2**12 for p in on_cpu if p.dim() > 2)


def map_tasks(function: TaskFunction, support: Tree, query: Tree) -> TaskResult:
    """Run a function of one task on a stack of tasks, under vmap."""
    # differentiate inside vmap: the derivative of a vmapped loss is wrong through normalisation layers
    tasks = support, query

    def of_tensors(*given: Tensor) -> TaskResult:
        return function(*pytree.filled(tasks, given, lambda x: isinstance(x, Tensor)))

    # each task draws its own random numbers, as in a loop
    found = torch.func.vmap(of_tensors, randomness="different")(*pytree.tensors(tasks))
    return found._replace(grads=pytree.map(lambda grad: grad.mean(0), found.grads))


def loop_tasks(function: TaskFunction, tasks: Sequence[Task]) -> TaskResult:
    """Run a function of one task on each task of a sequence."""
    results: list[TaskResult] = []
    total: list[Tensor] = []
    structure: Any = None
    for i, (support, query) in enumerate(tasks):
        found = function(support, query)
        grads, structure = pytree.flatten(found.grads)
        if i < 2:  # not in place: gradients of one task may share memory, their sum does not
            total = [x + y for x, y in zip(total, grads, strict=True)] if total else grads
        else:
            total = [x.add_(y) for x, y in zip(total, grads, strict=True)]
        # sum the gradients at once, so that only one task's are held
        results.append(found._replace(grads=()))
    mean = [x.div_(len(tasks)) for x in total] if len(tasks) > 1 else total
    means = pytree.unflatten(mean, structure)
    return pytree.map(lambda *parts: torch.stack(parts), *results)._replace(grads=means)


def unpack(tasks: object) -> Any:
    """Turn a collated list of two stacks into a tuple; leave a list of tasks unchanged."""
    # a DataLoader collates a tuple (support, query) to a list, which looks like a list of two tasks
    if isinstance(tasks, list) and len(tasks) == 2:
        collated = all(isinstance(part, list) for part in tasks)
        no_tasks = not any(isinstance(part, tuple | list) for part in tasks)
        if collated or no_tasks:
            return tuple(tasks)
    return tasks


def check_tasks(tasks: Any) -> int:
    """Check the tasks, and return their number."""
    for leaf in pytree.leaves(tasks):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            raise errors.NoSecondDerivative(
                "tasks: expected tensors that do not require grad, got one that does; .loss does "
                "not differentiate by the tasks. Detach them, use `hoglib.meta.hypergradient`, or "
                "write the loss with `maml.adapt(support)` and `maml(x, params=adapted)`, which "
                "are differentiable by everything."
            )
    if isinstance(tasks, list):
        for i, task in enumerate(tasks):
            pair = _check_task(f"tasks[{i}]", task)
            for what, batch in zip(("support", "query"), pair, strict=True):
                check_batch(f"tasks[{i}]: {what}", batch)
        if len(tasks) == 2 and all(map(_is_of_tensors, tasks)):
            warn_once(TWO_TASKS)
        if not tasks:
            raise errors.ArgumentValueError("tasks: expected at least one task, got an empty list.")
        return len(tasks)
    counts = []
    for what, stack in zip(("support", "query"), _check_task("tasks", tasks), strict=True):
        check_batch(what, stack, dims=2)
        counts.append(_count_tasks(what, stack))
    if counts[0] != counts[1]:
        raise errors.ArgumentValueError(
            f"tasks: expected as many query sets as support sets, got {counts[0]} support and "
            f"{counts[1]} query sets; stack one of each for every task, in the same order{SINGLE}."
        )
    # a single task's [examples, 1] reads as [tasks, examples]; token ids are integers: no warning
    inputs, *others = pytree.tensors(tasks)
    if pytree.is_float(inputs) and all(x.dim() == 2 for x in (inputs, *others)):
        warn_once(ONE_STACK.format(count=counts[0], shape=list(inputs.shape[1:])))
    return counts[0]


def _is_of_tensors(pair: object) -> bool:
    """Whether the pair is a tuple or list of two tensors, such as (inputs, targets)."""
    return (
        isinstance(pair, tuple | list)
        and len(pair) == 2
        and all(isinstance(part, Tensor) for part in pair)
    )


@contextmanager
def stacks_in_errors(what: str, tasks: object, count: int) -> Iterator[None]:
    """Add a note on how the tasks were read to an error from the model: a single task passed as stacks
    shows itself by such an error."""
    try:
        yield
    except (IndexError, RuntimeError, TypeError, ValueError) as error:
        if not isinstance(tasks, list) and not isinstance(error, errors.HoglibError):
            error.add_note(
                f"{what}.loss read (support, query) as stacks of {count} tasks, along the leading "
                "dimension; for one task pass a list, [(support, query)]."
            )
        raise


def unstack(tasks: object) -> Sequence[Task]:
    """The tasks one by one."""
    if isinstance(tasks, list):
        return tasks
    count = next(len(x) for x in pytree.leaves(tasks) if isinstance(x, Tensor))
    return [pytree.map_tensors(itemgetter(i), tasks) for i in range(count)]


def first_task(tasks: object) -> Task:
    """The first task."""
    return tasks[0] if isinstance(tasks, list) else pytree.map_tensors(itemgetter(0), tasks)


def to_stacks(tasks: object) -> Any | None:
    """Tasks as one pair of stacks; None if the tasks of a list differ in size or structure."""
    if not isinstance(tasks, list):
        return tasks
    flat, structures = zip(*(pytree.flatten(tuple(task)) for task in tasks), strict=True)
    kinds = [
        [(x.shape, x.dtype, x.device) if isinstance(x, Tensor) else None for x in leaves]
        for leaves in flat
    ]
    # leaves other than tensors cannot be stacked, even if they are equal
    if any(None in kind or kind != kinds[0] for kind in kinds) or len({*structures}) > 1:
        return None
    columns = zip(*flat, strict=True)
    return pytree.unflatten([torch.stack(column) for column in columns], structures[0])


def _check_task(what: str, task: Any) -> Task:
    if not isinstance(task, tuple | list) or len(task) != 2:
        several = isinstance(task, tuple | list)
        came = f"{len(task)} of them" if several else validation.describe(task)
        raise errors.ArgumentValueError(
            f"{what}: expected a pair (support, query), each a batch, for instance (inputs, "
            f"targets), got {came}."
        )
    return task[0], task[1]


def check_batch(what: str, batch: Any, dims: int = 1) -> None:
    """Raise for a batch without examples, or for (inputs, targets) with different leading dimensions:
    [examples], or [tasks, examples] with dims=2 for a stack of tasks."""
    tensors = pytree.tensors(batch)
    if dims == 1 and any(_is_object(leaf) for leaf in pytree.leaves(batch)):
        return
    if not tensors:
        raise errors.ArgumentValueError(
            f"{what}: expected a batch of tensors, for instance (inputs, targets), got "
            f"{validation.describe(batch)}; a task is ((support inputs, support targets), (query "
            "inputs, query targets))."
        )
    if not any(x.numel() for x in tensors):
        raise errors.ArgumentValueError(EMPTY.format(what))
    if not _is_of_tensors(batch):
        return
    expected = "[tasks, examples, ...]" if dims == 2 else "[examples, ...]"
    single = SINGLE if dims == 2 else ""
    for part in batch:
        if part.dim() < dims:
            text = f"{what}: expected tensors {expected}, got {validation.describe(part)}{single}."
            raise errors.ArgumentValueError(text)
    inputs, targets = (tuple(part.shape[:2]) if dims == 2 else len(part) for part in batch)
    if inputs != targets:
        raise errors.ArgumentValueError(
            f"{what}: expected inputs and targets {expected} of the same leading dimensions, got "
            f"{inputs}, {targets}{single}."
        )


def _is_object(leaf: object) -> bool:
    """Whether a leaf is an object of a class that only the model knows."""
    known = (Tensor, str, bytes, int, float, complex, type(None), type)
    return not (isinstance(leaf, known) or hasattr(leaf, "__array__"))


def _count_tasks(what: str, stack: object) -> int:
    """The number of tasks in a stack: the leading dimension of all tensors."""
    tensors = pytree.tensors(stack)
    counts = {len(x) if x.dim() else 0 for x in tensors}
    if len(counts) != 1:
        raise errors.ArgumentValueError(
            f"{what}: expected tensors whose leading dimension is that of the tasks, got shapes "
            f"{', '.join(str(tuple(x.shape)) for x in tensors)}; stack one entry for each task, or "
            "give a list of tasks."
        )
    return counts.pop()
