"""From a rule for one sample's term to a penalty: conditions, guards, reduction, pieces."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, final

import torch
from torch import Tensor

from hoglib._core import pytree
from hoglib._core.autograd import Vector, materialize_grads, with_gradients
from hoglib._core.finite_differences import (
    finite_difference_check,
    fixed_random_numbers,
    unchecked_functions,
)
from hoglib._core.gradient_graph import depends_on_any
from hoglib._core.pytree import rows
from hoglib._core.torch_internals import transforms_active
from hoglib._core.torch_modes import value_checks_off, value_checks_on
from hoglib.errors import ArgumentValueError, UnsupportedError
from hoglib.penalties import batch_dependence, gradient_flow
from hoglib.penalties.compiled import Draws, chosen, leaves_of, run
from hoglib.penalties.critic_state import autocast_on
from hoglib.penalties.distributed import averaged
from hoglib.penalties.input_vjp import Function, InputVJP, input_vjp_at
from hoglib.penalties.options import Settings, settings
from hoglib.penalties.samples import EMPTY, inputs

Rule = Callable[[InputVJP], Tensor]  # the terms at a point, one a sample: [N]
TWICE = (
    "a penalty with micro_batch: expected backward() without create_graph, got create_graph=True; its "
    "gradients are computed before backward and have no graph. Leave micro_batch out."
)


def penalty(
    what: str,
    func: Function,
    x: Any,
    args: tuple[Any, ...],
    rule: Rule,
    options: Mapping[str, Any],
    generator: torch.Generator | None = None,
) -> Any:
    """The reduced terms of a rule at x; with return_outputs also what func returned there."""
    given = settings(what, options)
    if given.micro_batch is not None:
        return _in_pieces(what, func, x, args, rule, given, generator)
    at = Terms(what, func, rule, given._replace(batch=None), generator)
    if chosen(given.compile) is not None:
        return _as_graph(at, x, args, given.batch)
    value, outputs, point = at.computed(x, args, given.batch)
    if point.wanted:
        value = averaged(what, value, point.trainable, outputs)
    return (value, outputs) if given.return_outputs else value


@final
class Terms:
    """The reduced terms of a rule, as a function of tensors and of nothing but these attributes."""

    def __init__(
        self,
        what: str,
        func: Function,
        rule: Rule,
        given: Settings,
        generator: torch.Generator | None,
    ) -> None:
        self.what, self.func, self.rule = what, func, rule
        self.given, self.generator = given, generator

    def __call__(
        self, x: Any, args: tuple[Any, ...], batch: Any, numbers: list[Tensor] | None
    ) -> Any:
        """numbers: what a generator drew for it; it is then the same whatever that would draw now."""
        draws = None if numbers is None else Draws(numbers)
        with (
            nullcontext() if numbers is None else value_checks_off()
        ):  # which an eager run has been
            value, outputs, _ = self.computed(x, args, batch, draws)
        return (value, outputs) if self.given.return_outputs else value

    def computed(
        self, x: Any, args: tuple[Any, ...], batch: Any, draws: Draws | None = None
    ) -> tuple[Tensor, Any, InputVJP]:
        given = self.given._replace(batch=batch)
        with terms_at(self.what, self.func, x, args, self.rule, given, self.generator, draws) as (
            terms,
            point,
        ):
            value, outputs = _reduced(terms, given.reduction), point.outputs
        if not point.wanted:
            value, outputs = value.detach(), pytree.map_tensors(Tensor.detach, outputs)
        return value, outputs, point


def _as_graph(at: Terms, x: Any, args: tuple[Any, ...], batch: Any) -> Any:
    """By a graph: as one with its gradient where it is a number, and alone."""
    scalar = at.given.reduction != "none" and not at.given.return_outputs
    found = run(
        at.what, at, (x, args, batch), chosen(at.given.compile), at.generator, scalar,
        lambda draws: at.computed(x, args, batch, draws)[2].wanted,
    )  # fmt: skip
    value, *outputs = found if at.given.return_outputs else (found,)
    value = averaged(at.what, value, leaves_of(value), outputs)
    return (value, *outputs) if at.given.return_outputs else value


@contextmanager
def terms_at(
    what: str,
    func: Function,
    x: Any,
    args: tuple[Any, ...],
    rule: Rule,
    given: Settings,
    generator: torch.Generator | None,
    draws: Draws | None = None,
) -> Iterator[tuple[Tensor, InputVJP]]:
    """The terms of a rule at x, checked, and the point; the conditions of a penalty hold inside."""
    with input_vjp_at(what, func, x, args, given) as point:
        point.draws = draws
        unseen = unchecked_functions(point.y, point.graph) if point.tells else []
        state = generator.get_state() if unseen and generator is not None else None
        terms = rule(point)
        if point.wanted and not transforms_active():
            if not terms.requires_grad or not depends_on_any(terms, point.trainable):
                raise gradient_flow.no_gradient_flow(
                    what, gradient_flow.OF_PARAMETERS, func, point.at(point.own), point.args
                )
            if value_checks_on():
                batch_dependence.check_batch_dependence(point)
            if unseen:
                _second_look(point, rule, given, unseen, generator, state)
        yield terms, point


def _second_look(
    point: InputVJP,
    rule: Rule,
    given: Settings,
    unseen: list[Any],
    generator: torch.Generator | None,
    state: Tensor | None,
) -> None:
    """The derivative of the penalty along the points, in one direction, against differences of it."""
    after = None if generator is None else generator.get_state()

    def at(leaves: Vector, wanted: bool) -> InputVJP:
        if generator is not None and state is not None:
            generator.set_state(state)
        x = point.at(leaves)
        return InputVJP(point.what, point.func, x, point.args, given, wanted, True)

    def value(leaves: Vector) -> Vector:
        return [rule(at(leaves, wanted=False)).sum().detach()]

    def outputs(*leaves: Tensor) -> Tensor:
        return at(list(leaves), wanted=False).y.sum()

    leaves = [x.detach() for x in point.own]
    try:
        with fixed_random_numbers(leaves):
            again = at(leaves, wanted=True)
            again.tells = False  # once is enough
            total = rule(again).sum()
            found = torch.autograd.grad(total, again.own, allow_unused=True)
            ones = [torch.ones_like(x) for x in leaves]
            slope = pytree.dot(materialize_grads(list(found), leaves), ones)
        finite_difference_check(point.what, unseen, value, outputs, leaves, ones, [slope])
    finally:
        if generator is not None and after is not None:
            generator.set_state(after)


def _reduced(terms: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return terms
    return terms.mean() if reduction == "mean" else terms.sum()


def _in_pieces(
    what: str,
    func: Function,
    x: Any,
    args: tuple[Any, ...],
    rule: Rule,
    given: Settings,
    generator: torch.Generator | None,
) -> Tensor:
    """The penalty over one piece of the samples after another, and its gradients with it."""
    if transforms_active():
        raise UnsupportedError(
            f"{what}(micro_batch=...): expected to run outside of torch.func transforms, got a call "
            "inside; leave micro_batch out there."
        )
    assert given.micro_batch is not None
    leaves = inputs(what, "the points", x)
    count = len(leaves[0])
    if not count:
        raise ArgumentValueError(EMPTY.format(what))
    detached = pytree.map_tensors(Tensor.detach, x)
    at = Terms(what, func, rule, given._replace(reduction="sum", micro_batch=None), generator)
    total: Tensor | None = None
    known: dict[int, tuple[Tensor, Tensor]] = {}  # by the leaf tensor, it and its gradient
    trainable: dict[int, Tensor] = {}
    by_points: list[list[Tensor]] = []
    for start in range(0, count, given.micro_batch):
        piece = rows((detached, args), count, start, start + given.micro_batch)
        points = [leaf.requires_grad_(old.requires_grad) for leaf, old in
                  zip(pytree.leaves(piece[0]), leaves, strict=True)]  # fmt: skip
        if chosen(given.compile) is None:
            value, _, point = at.computed(piece[0], piece[1], None)
            learnt = point.trainable if point.wanted else []
        else:
            value = _as_graph(at, piece[0], piece[1], None)
            learnt = leaves_of(value)
        value = value / (count if given.reduction == "mean" else 1)
        total = value.detach() if total is None else total + value.detach()
        if not learnt:
            continue
        with ExitStack() as conditions:  # what runs in backward is as what ran in the penalty
            for kind in () if given.autocast else autocast_on(leaves):
                conditions.enter_context(torch.autocast(kind, enabled=False))
            grads = torch.autograd.grad(value, learnt, retain_graph=True, allow_unused=True)
        trainable |= {id(leaf): leaf for leaf in learnt}
        for leaf, grad in zip(learnt, grads, strict=True):
            if grad is not None and not any(leaf is own for own in points):
                before = known.get(id(leaf))
                known[id(leaf)] = leaf, grad.clone() if before is None else before[1].add_(grad)
        found = {id(leaf): grad for leaf, grad in zip(learnt, grads, strict=True)}
        by_points.append(materialize_grads([found.get(id(leaf)) for leaf in points], points))
    assert total is not None
    if not known and not by_points:
        return total
    pairs = list(known.values())
    for k, leaf in enumerate(leaves):
        if leaf.requires_grad:
            pairs.append((leaf, torch.cat([grads[k] for grads in by_points])))
    tensors, gradients = zip(*pairs, strict=True)
    value = with_gradients(total, gradients, tensors, TWICE)
    return averaged(what, value, trainable.values(), list(trainable.values()))
