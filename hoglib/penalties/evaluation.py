"""From the terms of a penalty to its value: evaluation, checks, reduction, graphs, micro-batches.

penalty = reduce_n term(J)_n        J the function's InputVJP at the points

With the option `compile`, value and gradients are one graph for each signature. Checks of values
(gradient flow, finite differences, batch dependence) run in an eager run before each capture. Random
numbers from a generator are drawn before the graph runs, and are inputs of the graph.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from hoglib._core.messages import results, validation
from hoglib._core.messages.call_errors import binding_error
from hoglib._core.messages.closures import owner_of
from hoglib._core.modules.state import preserve_random_state
from hoglib._core.problem import Policy
from hoglib._core.substrate.autograd import Vector, materialize_grads, with_gradients
from hoglib._core.substrate.gradient_graph import depends_on_any, graph_summary
from hoglib._core.torch_api import pytree
from hoglib._core.torch_api.torch_internals import no_autocast
from hoglib._core.torch_api.torch_modes import value_checks_on
from hoglib.capture.api import Compiled, CompiledLoss
from hoglib.capture.capturing import CacheSlot, get_or_make
from hoglib.capture.signature import parse_call
from hoglib.capture.within import when_compiled, within_compile
from hoglib.errors import ArgumentValueError
from hoglib.penalties.distributed import average_gradients
from hoglib.penalties.input_vjp import NOT_OF_PARAMETERS, Function, input_vjp
from hoglib.penalties.options import CheckedOptions, select_output
from hoglib.penalties.samples import EMPTY, check_points, random_like
from hoglib.penalties.terms import Term, check_batch_dependence
from hoglib.ring import is_captured


@results.result
@validation.short_repr
class PenaltyWithOutputs(NamedTuple):
    """The result of a penalty with ``return_outputs=True``; it can be unpacked.

    Attributes:
        penalty: The penalty, a scalar, or [N] with ``reduction="none"``.
        outputs: Everything that the function returned at the points, from the one forward pass.
    """

    penalty: Tensor
    outputs: Any


def _like_penalty(value: object, options: dict[str, Any], x: object, *args: Any) -> Any:
    """A stand-in for a penalty's result, of its shape and dtype and connected to value's graph."""
    y, first = select_output(value, options.get("output")), pytree.tensors(x)[0]
    rows = y if y.dim() else y * first
    terms = rows.reshape(len(rows), -1).sum(1) if options.get("reduction") == "none" else y.sum()
    terms = terms.to(first.real.dtype)
    return PenaltyWithOutputs(terms, value) if options.get("return_outputs") else terms


# decorators for a penalty inside torch.compile. traceable: penalty(func, x, *args) calls
# func(x, *args). traceable_at_first: penalty(func, x, other, *args) calls func(x, *args).
traceable = when_compiled(within_compile(_like_penalty, select=select_output))
traceable_at_first = when_compiled(
    within_compile(_like_penalty, lambda x, other, *args: (x, *args), select_output)
)


def penalty(func: Function, x: Any, args: Any, term: Term, options: CheckedOptions) -> Any:
    """The reduced terms at x; with return_outputs also func's outputs at x."""
    try:
        return _penalty(func, x, args, term, options)
    except TypeError as error:
        call = getattr(func, "forward", func)
        if args and binding_error(call, (x, *args)) and not binding_error(call, (x,)):
            error.add_note(
                f"{options.name} passes the {len(args)} arguments that follow the points on to the "
                "function, which does not take them. Leave them out, or take a penalty of two sets: "
                "`hoglib.penalties.r1_r2(critic, real, fake)`."
            )
        raise


def _penalty(func: Function, x: Any, args: Any, term: Term, options: CheckedOptions) -> Any:
    if options.micro_batch is not None:
        return _in_micro_batches(func, x, args, term, options, options.micro_batch)
    if captures(options.policy):
        body = partial(evaluate, func, term, options._replace(batch=None))
        found = run_as_graph(body, func, options, (x, args, options.batch))
    else:
        found = evaluate(func, term, options, x, args, options.batch)
    return with_outputs(options, *found)


def with_outputs(options: CheckedOptions, value: Tensor, outputs: object) -> Any:
    """A penalty's result: value, with a backward that averages over processes; perhaps with outputs."""
    value = average_gradients(options.name, value, outputs)
    return PenaltyWithOutputs(value, outputs) if options.return_outputs else value


def evaluate(
    func: Function,
    term: Term,
    options: CheckedOptions,
    x: object,
    args: tuple[Any, ...],
    batch: object,
    draws: "RecordedDraws | list[Tensor] | None" = None,
) -> tuple[Tensor, Any]:
    """The reduced terms, after all checks, and the outputs of the function.

    draws: replaces `random_like`: RecordedDraws, a list of recorded numbers (in a graph), or None.
    """
    options = options if options.batch is batch else options._replace(batch=batch)
    with input_vjp(func, x, args, options) as at:
        at.draws = RecordedDraws(draws) if isinstance(draws, list) else draws
        terms = term(at)
        if at.create_graph and not at.in_transform:
            if not terms.requires_grad or not depends_on_any(terms, at.trainable):
                raise at.no_gradient_flow(NOT_OF_PARAMETERS)
            if value_checks_on():
                check_batch_dependence(at)
        elif not at.in_transform and at.loses_parameters():
            raise at.no_gradient_flow(NOT_OF_PARAMETERS)
        if options.reduction != "none":
            terms = terms.mean() if options.reduction == "mean" else terms.sum()
    at.warn_if_not_finite([terms])
    if at.create_graph:
        return terms, at.outputs
    return terms.detach(), pytree.map_tensors(Tensor.detach, at.outputs)


# Graphs


def captures(policy: Policy) -> bool:
    """Whether a penalty runs as one graph: it has gradients, and the policy captures here."""
    return policy.create_graph and is_captured(policy)


def run_as_graph(
    body: Any,
    func: Function,
    options: CheckedOptions,
    inputs: tuple[Any, ...],
    needs_outputs: bool | None = None,
) -> Any:
    """(value, outputs) = body(*inputs, draws), by a captured graph; outputs is None if not needed.

    If only the value is needed, the graph computes its gradients too, for backward.

    body: created for each call; everything it depends on is in its arguments. Its argument draws is
        RecordedDraws in the eager run with checks, the list of drawn numbers in the graph, and None in
        a plain run.
    needs_outputs: whether outputs are needed. Default: options.return_outputs.
    """
    needs_outputs = options.return_outputs if needs_outputs is None else needs_outputs
    name, generator, owner = options.name, options.generator, owner_of(func)
    backend = options.policy.backend
    run = body if needs_outputs else partial(_value_alone, body)
    kind = Compiled if needs_outputs or options.reduction == "none" else CompiledLoss
    signature, state, known = None, None, {}
    if generator is not None:
        signature, state = parse_call(name, inputs, {}, dynamic=False)[0].key, generator.get_state()
        known = get_or_make(CacheSlot(owner, (name, "draws")), dict, name)  # by signature

    def check(*_: Any) -> None:
        draws = RecordedDraws()
        with preserve_random_state(generator):
            found = pytree.leaves(run(*inputs, draws))
        if not any(isinstance(x, Tensor) and x.requires_grad for x in found):
            raise _NoGradientNeeded
        if draws.recorded != known.get(signature, []):
            known[signature] = draws.recorded
            raise _DrawsChanged

    def by_graph(precheck: Callable[..., Any]) -> Any:
        place = CacheSlot.of(owner, name)
        graph = kind(run, backend=backend, name=name, place=place, precheck=precheck)
        drawn = [
            random_like(torch.empty((), dtype=dtype, device=device), sampler, shape, generator)
            for sampler, shape, dtype, device in known.get(signature, ())
        ]
        return graph(*inputs, drawn)

    again: Any = None
    try:
        found = by_graph(check)
    except (_NoGradientNeeded, _DrawsChanged) as reason:
        again = type(reason)
    if again is not None:
        if generator is not None and state is not None:
            generator.set_state(state)
        # the checks were made in the first attempt
        found = by_graph(lambda *_: None) if again is _DrawsChanged else run(*inputs, None)
    return found if needs_outputs else (found, None)


def _value_alone(body: Callable[..., Any], *inputs: Any) -> Any:
    return body(*inputs)[0]


@final
class RecordedDraws:
    """Replaces `random_like`: records the calls to a generator, or replays given numbers in order."""

    def __init__(self, numbers: list[Tensor] | None = None) -> None:
        self.recorded: list[Any] = []  # (sampler, shape, dtype, device) of each call
        self._numbers = None if numbers is None else iter(numbers)  # the numbers to replay

    def __call__(
        self, like: Tensor, sampler: Any, shape: tuple[int, ...], generator: torch.Generator | None
    ) -> Tensor:
        if generator is None:  # the graph itself draws from torch's generator
            return random_like(like, sampler, shape, None)
        if self._numbers is not None:
            return next(self._numbers)
        self.recorded.append((sampler, tuple(shape), like.dtype, like.device))
        return random_like(like, sampler, shape, generator)


class _NoGradientNeeded(Exception):
    """The value depends on no tensor that requires grad."""


class _DrawsChanged(Exception):
    """The function draws other shapes or samplers than the recorded ones."""


# Micro-batches

NO_SECOND_BACKWARD = (
    "a penalty with micro_batch: expected backward() without create_graph, got create_graph=True; its "
    "gradients are computed before backward and have no graph. Leave micro_batch out."
)


def _in_micro_batches(
    func: Function, x: object, args: tuple[Any, ...], term: Term, options: CheckedOptions, size: int
) -> Tensor:
    """The penalty as a sum over pieces; each piece's gradients are computed before the next piece."""
    validation.refuse_transforms(f"{options.name}(micro_batch=...)", "leave micro_batch out there.")
    leaves, _ = check_points(options.name, "the points", x)
    count = len(leaves[0])
    if not count:
        raise ArgumentValueError(EMPTY.format(options.name))
    detached = pytree.map_tensors(Tensor.detach, x)
    options_of_piece = options._replace(reduction="sum", micro_batch=None)
    total: Tensor | None = None
    trainable: dict[int, Tensor] = {}  # id -> leaf tensor that a piece depends on, not a point
    gradients: dict[int, Tensor] = {}  # id -> gradient of that leaf, summed over the pieces
    point_gradients: list[Vector] = []  # for each piece, the gradients by its points
    for start in range(0, count, size):
        piece, piece_args = pytree.rows((detached, args), count, start, start + size)
        both = zip(pytree.leaves(piece), leaves, strict=True)
        points = [leaf.requires_grad_(old.requires_grad) for leaf, old in both]
        value = penalty(func, piece, piece_args, term, options_of_piece)
        value = value / (count if options.reduction == "mean" else 1)
        total = value.detach() if total is None else total + value.detach()
        reached = graph_summary(value).leaves
        if not reached:
            continue
        with nullcontext() if options.autocast else no_autocast():  # autocast as in the forward
            ends = list(reached.values())
            grads = torch.autograd.grad(value, ends, retain_graph=True, allow_unused=True)
        of = dict(zip(reached, grads, strict=True))
        point_gradients.append(materialize_grads([of.pop(id(p), None) for p in points], points))
        trainable |= {key: reached[key] for key in of}
        for key, grad in of.items():
            if grad is not None:
                before = gradients.get(key)
                gradients[key] = grad.clone() if before is None else before.add_(grad)
    assert total is not None
    if not gradients and not point_gradients:
        return total
    pairs = [(trainable[key], grad) for key, grad in gradients.items()]
    for k, leaf in enumerate(leaves):
        if leaf.requires_grad:
            pairs.append((leaf, torch.cat([grads[k] for grads in point_gradients])))
    tensors, known = zip(*pairs, strict=True)
    value = with_gradients(total, known, tensors, NO_SECOND_BACKWARD)
    return average_gradients(options.name, value, list(trainable.values()))
