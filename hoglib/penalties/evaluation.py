"""From the terms of a penalty to its value: evaluation, checks, reduction, micro-batches.

penalty = reduce_n term(J)_n        J the function's InputVJP at the points
"""

from contextlib import nullcontext
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from hoglib._core import pytree, validation
from hoglib._core.autograd import Vector, materialize_grads, with_gradients
from hoglib._core.gradient_graph import depends_on_any, graph_summary
from hoglib._core.torch_internals import no_autocast
from hoglib._core.torch_modes import value_checks_on
from hoglib.errors import ArgumentValueError
from hoglib.penalties.compiled import RecordedDraws, captures, run_as_graph
from hoglib.penalties.distributed import averaged
from hoglib.penalties.gradient_flow import NOT_OF_PARAMETERS
from hoglib.penalties.input_vjp import Function, InputVJP, input_vjp
from hoglib.penalties.options import CheckedOptions
from hoglib.penalties.sample_checks import check_batch_dependence
from hoglib.penalties.samples import EMPTY, check_points
from hoglib.penalties.terms import Term


class PenaltyWithOutputs(NamedTuple):
    """What a penalty returns with ``return_outputs=True``; it can be unpacked.

    Attributes:
        penalty: The penalty, a scalar, or [N] with ``reduction="none"``.
        outputs: All that the function returned at the points, of one forward pass.
    """

    penalty: Tensor
    outputs: Any


def penalty(
    func: Function, x: Any, args: tuple[Any, ...], term: Term, options: CheckedOptions
) -> Any:
    """The reduced terms at x; with return_outputs also what func returned there."""
    if options.micro_batch is not None:
        return _in_micro_batches(func, x, args, term, options, options.micro_batch)
    if captures(options.policy):  # the value and its gradients, if it comes alone
        alone = options.reduction != "none" and not options.return_outputs
        terms, inputs = Terms(func, term, options._replace(batch=None)), (x, args, options.batch)
        found = run_as_graph(terms, options, inputs, with_gradients=alone)
        value, outputs = found if options.return_outputs else (found, None)
    else:
        value, outputs = evaluate(func, x, args, term, options)
    value = averaged(options.name, value, outputs)
    return PenaltyWithOutputs(value, outputs) if options.return_outputs else value


def evaluate(
    func: Function, x: Any, args: tuple[Any, ...], term: Term, options: CheckedOptions,
    draws: RecordedDraws | None = None,
) -> tuple[Tensor, Any]:  # fmt: skip
    """The reduced terms, with all checks done, and the outputs of the function."""
    with input_vjp(func, x, args, options) as at:
        at.draws = draws
        terms = term(at)
        if at.create_graph and not at.in_transform:
            check_reaches_parameters(at, terms)
            if value_checks_on():
                check_batch_dependence(at)
        if options.reduction != "none":
            terms = terms.mean() if options.reduction == "mean" else terms.sum()
    if at.create_graph:
        return terms, at.outputs
    return terms.detach(), pytree.map_tensors(Tensor.detach, at.outputs)


def check_reaches_parameters(at: InputVJP, terms: Tensor) -> None:
    """Raises for terms that no parameter has an effect on."""
    if not terms.requires_grad or not depends_on_any(terms, at.trainable):
        raise at.no_gradient_flow(NOT_OF_PARAMETERS)


@final
class Terms:
    """The reduced terms, as a function of tensors that depends on its attributes alone: what is
    compiled."""

    def __init__(self, func: Function, term: Term, options: CheckedOptions) -> None:
        self.func, self.term, self.options = func, term, options

    def __call__(
        self, x: Any, args: tuple[Any, ...], batch: Any, draws: RecordedDraws | list[Tensor] | None
    ) -> Any:
        """The value, and outputs where they are returned. A list of draws is given in a graph."""
        drawn = RecordedDraws(draws) if isinstance(draws, list) else draws
        options = self.options._replace(batch=batch)
        found = evaluate(self.func, x, args, self.term, options, drawn)
        return found if options.return_outputs else found[0]


# Micro-batches

NO_SECOND_BACKWARD = (
    "a penalty with micro_batch: expected backward() without create_graph, got create_graph=True; its "
    "gradients are computed before backward and have no graph. Leave micro_batch out."
)


def _in_micro_batches(
    func: Function, x: Any, args: tuple[Any, ...], term: Term, options: CheckedOptions, size: int
) -> Tensor:
    """The penalty as a sum over pieces of the samples, each with its gradients before the next."""
    validation.refuse_transforms(f"{options.name}(micro_batch=...)", "leave micro_batch out there.")
    leaves, _ = check_points(options.name, "the points", x)
    count = len(leaves[0])
    if not count:
        raise ArgumentValueError(EMPTY.format(options.name))
    detached = pytree.map_tensors(Tensor.detach, x)
    options_of_piece = options._replace(reduction="sum", micro_batch=None)
    total: Tensor | None = None
    trainable: dict[int, Tensor] = {}  # by its id
    gradients: dict[int, Tensor] = {}  # of a trainable tensor, summed over the pieces
    point_gradients: list[Vector] = []  # one for each piece
    for start in range(0, count, size):
        piece, piece_args = pytree.rows((detached, args), count, start, start + size)
        points = [leaf.requires_grad_(old.requires_grad) for leaf, old in
                  zip(pytree.leaves(piece), leaves, strict=True)]  # fmt: skip
        value = penalty(func, piece, piece_args, term, options_of_piece)
        value = value / (count if options.reduction == "mean" else 1)
        total = value.detach() if total is None else total + value.detach()
        reached = graph_summary(value).leaves
        if not reached:
            continue
        with nullcontext() if options.autocast else no_autocast():  # as the piece
            grads = torch.autograd.grad(
                value, list(reached.values()), retain_graph=True, allow_unused=True
            )
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
    return averaged(options.name, value, list(trainable.values()))
