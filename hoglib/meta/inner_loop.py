"""The inner loop: gradient steps on one task, as a function that can be differentiated."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from math import isqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks

from hoglib._core import closures, pytree, torch_internals, validation
from hoglib._core.autograd import fresh_leaves, materialize_grads
from hoglib._core.gradient_graph import check_custom_functions, graph_summary
from hoglib._core.recomputation import inside_recomputation, recompute
from hoglib._core.swap import Params, keep_swapped
from hoglib.errors import NoSecondDerivative
from hoglib.functional import FunctionalLoss
from hoglib.meta.optimizers import GradientTransformation

Loss = Callable[[Params, Any], Tensor]
WithNotes = Callable[[Params, Any], tuple[Tensor, Any]]
MEMORY = ("store", "remat", "checkpoint")
RUNS_AGAIN = (
    "expected a model whose graph keeps its tensors, got one with saved-tensor hooks, as "
    "torch.utils.checkpoint has: in a later backward it would run again by the model's own "
    "parameters instead of the adapted ones. Use memory='remat', which runs whole steps again."
)

UNUSED = (
    "the {which} loss: expected a value that depends on the parameters{whom}, got one that does not; "
    "look for .detach(), .item(), .data or torch.no_grad() in the model or the loss, and for "
    "parameters that nothing uses."
)


class StepChunk(NamedTuple):
    """Some steps of an inner loop: from the carry before the first to that after the last."""

    # run(start, end, carry, constants) -> (carry, what each step notes)
    run: Callable[[int, int, Any, Any], tuple[Any, list[Any]]]
    # whether the gradient of a step is a constant
    constant: Callable[[int], bool]


def inner_step(
    loss: Loss,
    params: Params,
    batch: Any,
    rule: GradientTransformation,
    state: Any,
    *,
    first_order: bool = False,
) -> tuple[Params, Any]:
    """One step of the inner loop.

        g = grad loss(theta, batch)        (theta', state') = rule.update(theta, g, state)

    Returns (theta', state'), differentiable by theta and, unless first_order, through g. It runs
    under vmap and inside other transforms of torch.func, under no_grad and in inference mode.
    Raises RuntimeError for a custom Function that is `@once_differentiable`, and for a loss that
    does not depend on params.
    """
    grads, _ = gradient(_plain(loss), params, batch, constant=first_order)
    return rule.update(params, grads, state)


def adapt(
    loss: Loss,
    params: Params,
    batch: Any,
    rule: GradientTransformation,
    *,
    steps: int,
    first_order: bool = False,
    truncate: int | None = None,
    memory: str = "store",
) -> Params:
    """The parameters after `steps` inner steps on one batch.

        theta_0 = params        theta_{i+1} = the inner step at theta_i        returns theta_steps

    truncate: only the last so many steps are differentiated through; in those before g is a
    constant, as it is in all of them with first_order. memory: what is kept for backward: "store":
    the graph of every step; "remat": the parameters after every step, which is run again;
    "checkpoint": those after every sqrt(steps)-th, and in backward the graphs of as many steps,
    which takes least where parameters outweigh activations. Gradients flow to params, to tensors of
    the batch, to those of the rule and, if loss is a `functional_loss`, to the model's other
    parameters. Raises, beside what `inner_step` raises, ValueError for another `memory` than
    "store" and a loss or rule that holds tensors otherwise, since their gradients would vanish.
    """
    validation.at_least("steps", steps, 0)
    check_truncate(truncate)
    rest, tensors = _what_it_reads(loss, rule, params, validation.one_of("memory", memory, MEMORY))

    def run(start: int, end: int, carry: Any, constants: Any) -> tuple[Any, list[Any]]:
        (params, state), (batch, rest, _) = carry, constants
        for i in range(start, end):
            grads, _ = gradient(
                _plain(lambda params, batch: loss({**rest, **params} if rest else params, batch)),
                params,
                batch,
                constant=segment.constant(i),
                alone=end - start == 1,
                check=i == 0,
            )
            params, state = rule.update(params, grads, state)
        return (params, state), []

    segment = StepChunk(run, lambda i: first_order or is_before_the_last(i, steps, truncate))
    carry = (params, rule.init(params))
    (params, _), _ = unroll(segment, steps, carry, (batch, rest, tensors), memory)
    return params


def is_before_the_last(i: int, steps: int, truncate: int | None) -> bool:
    return truncate is not None and i < steps - truncate


def check_truncate(truncate: int | None) -> int | None:
    return None if truncate is None else validation.at_least("truncate", truncate, 0)


def unroll(
    segment: StepChunk,
    steps: int,
    carry: Any,
    constants: Any,
    memory: str,
    modes_of: tuple[nn.Module, ...] = (),
) -> tuple[Any, list[Any]]:
    """The carry after all steps, and the notes of each.

    constants: all that the steps depend on beside the carry, so that gradients reach it.
    """
    notes: list[Any] = []
    run = segment.run
    if memory != "store":
        run, constants = _lifted(run, constants)
    done = 0
    while done < steps:
        end = done + _length(memory, steps)
        constant = segment.constant(done)
        while end > done + 1 and (end > steps or segment.constant(end - 1) != constant):
            end -= 1
        if memory == "store" or constant:  # a constant gradient has no graph to be saved
            carry, more = run(done, end, carry, constants)
        else:
            carry, more = recompute(run, done, end, carry, constants, modes_of=modes_of)
        notes, done = [*notes, *more], end
    return carry, notes


def _lifted(run: Callable[..., Any], constants: Any) -> tuple[Callable[..., Any], list[Any]]:
    """A segment of the tensors and modules among its constants; other objects stay as they are."""
    leaves, structure = pytree.flatten(constants)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor | nn.Module)]
    others = {i: leaf for i, leaf in enumerate(leaves) if i not in places}

    def of_lifted(start: int, end: int, carry: Any, lifted: list[Any]) -> Any:
        every = {**others, **dict(zip(places, lifted, strict=True))}
        filled = [every[i] for i in range(len(every))]
        return run(start, end, carry, pytree.unflatten(filled, structure))

    return of_lifted, [leaves[i] for i in places]


def _length(memory: str, steps: int) -> int:
    if memory == "store":
        return steps
    return 1 if memory == "remat" else max(1, isqrt(steps))


def gradient(
    loss: WithNotes,
    params: Params,
    batch: Any,
    *,
    constant: bool,
    alone: bool = False,
    check: bool = True,
) -> tuple[Params, Any]:
    """grad loss(params, batch), and (the loss, its notes), both without a graph.

    constant: the gradient has no graph; otherwise it has one wherever the caller records one. alone:
    what is run again, if anything, is this and nothing else of the model. check: its custom Functions
    are looked at, which the first step of a loop does for all.
    """
    check = check and not constant
    if torch_internals.transforms_active():
        return _by_transform(loss, params, batch, constant, check)
    return _by_autograd(loss, params, batch, constant, alone, check)


def _by_transform(
    loss: WithNotes, params: Params, batch: Any, constant: bool, check: bool
) -> tuple[Params, Any]:
    def checked(params: Params, batch: Any) -> tuple[Tensor, Any]:
        value, notes = loss(params, batch)
        if check:
            check_custom_functions(graph_summary(value), "the inner step")
        return value, (value, notes)

    at = pytree.map_tensors(Tensor.detach, params) if constant else params
    with torch.no_grad() if constant else nullcontext(), keep_swapped():
        grads, (value, notes) = torch.func.grad(checked, has_aux=True)(at, batch)
    return grads, (value.detach(), notes)


def _by_autograd(
    loss: WithNotes, params: Params, batch: Any, constant: bool, alone: bool, check: bool
) -> tuple[Params, Any]:
    """The same by plain autograd: several times as fast, and it takes Functions of the old style."""
    create_graph = torch.is_grad_enabled() and not constant
    leaves, structure = pytree.flatten(params)
    own = fresh_leaves(leaves, create_graph)
    refused = create_graph and not (alone and inside_recomputation())
    with torch.enable_grad(), keep_swapped(), hooks_refused(refused):
        value, notes = loss(pytree.unflatten(own, structure), batch)
        if not value.requires_grad:
            raise NoSecondDerivative(UNUSED.format(which="inner", whom=" that adapt"))
        if check and create_graph:
            check_custom_functions(graph_summary(value, since=own), "the inner step")
        grads = torch.autograd.grad(value, own, create_graph=create_graph, allow_unused=True)
    return pytree.unflatten(materialize_grads(list(grads), own), structure), (value.detach(), notes)


def hooks_refused(wanted: bool, message: str = RUNS_AGAIN) -> AbstractContextManager[None]:
    """Where a graph is kept until the model holds other parameters.

    A step that is run again by itself has its derivatives taken while its parameters stand.
    """
    return disable_saved_tensors_hooks(message) if wanted else nullcontext()


def _plain(loss: Loss) -> WithNotes:
    return lambda params, batch: (validation.scalar("loss(params, batch)", loss(params, batch)), ())


def _what_it_reads(
    loss: Loss, rule: GradientTransformation, params: Params, memory: str
) -> tuple[Params, list[nn.Module]]:
    """The model's other parameters, and the modules that a loss reads, for what is run again."""
    if memory == "store":
        return {}, []
    closures.refuse("adapt(rule=...)", rule.update)
    if not isinstance(loss, FunctionalLoss):
        closures.refuse("adapt", loss)
        return {}, []
    rest: Params = {
        n: p for n, p in loss.model.named_parameters() if p.requires_grad and n not in params
    }
    criterion = loss.user_criterion
    return rest, [criterion] if isinstance(criterion, nn.Module) else []
