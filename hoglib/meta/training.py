"""A training as a function of what it was set up with, which `hypergradient` differentiates."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hoglib._core import closures, pytree, validation
from hoglib._core.autograd import clone_inference_tensors, grad_enabled
from hoglib._core.closures import STATE, ClosureWalker
from hoglib._core.finite_differences import to_double
from hoglib._core.state import StateGuard
from hoglib.errors import ArgumentTypeError, ArgumentValueError
from hoglib.meta.batches import Batches, make_batches
from hoglib.meta.checks import check_inner_losses
from hoglib.meta.gradient_transformation import GradientTransformation
from hoglib.meta.inner_loop import InnerSteps, is_truncated, unroll
from hoglib.meta.optimizers import is_transformation, resolve_rule
from hoglib.meta.replay import Loss, Steps
from hoglib.stand_ins.mode import stand_ins_if
from hoglib.verification.entry_points import examined_functions

REDUCTIONS = ("mean", "sum")


@dataclass(frozen=True)
class Training:
    """An inner training as a function of hyper."""

    inner: Callable[..., Tensor]
    start: Any  # the initial parameters, or a function of hyper
    rule: Any
    count: int  # of steps
    batches: Batches
    truncate: int | None = None
    micro_batch: int | None = None
    reduction: str = "mean"

    def unrolled(self, hyper: Any) -> tuple[Any, list[Tensor]]:
        """The parameters at the end, with the graph of all steps, and the loss of each step."""

        def loss(i: int, params: Any, hyper: Any) -> tuple[Tensor, Any]:
            return self.value(params, hyper, self.batches.at(i)), ()

        inner = InnerSteps(loss, lambda _, hyper: self.rule_of(hyper), self.is_constant)
        found = unroll(inner, self.count, self.initial(hyper), hyper, "store")
        return found.params, found.losses

    def steps(self) -> Steps:
        """The steps, as a replay runs them."""
        return Steps(
            self.count, self._parts, lambda _, hyper: self.rule_of(hyper), self.is_constant
        )  # fmt: skip

    def initial(self, hyper: Any) -> Any:
        """The parameters before the first step."""
        return self.start(hyper) if callable(self.start) else detached(self.start)

    def rule_of(self, hyper: Any) -> GradientTransformation:
        return resolve_rule(self.rule, hyper, {})

    def is_constant(self, i: int) -> bool:
        return is_truncated(i, self.count, self.truncate)

    def value(self, params: Any, hyper: Any, batch: Any) -> Tensor:
        """The inner loss."""
        more = (batch,) if self.batches.given else ()
        return validation.scalar("inner(params, hyper)", self.inner(params, hyper, *more))

    def generators(self) -> list[torch.Generator]:
        """The generators that the loss and the rule draw from, besides torch's own."""
        held = (c.value for fn in (self.inner, self.rule) for c in closures.held(fn))
        return [value for value in held if isinstance(value, torch.Generator)]

    def check_finite(self, losses: list[Tensor]) -> None:
        if losses:
            check_inner_losses(
                torch.stack(losses), "Look for NaN in params, hyper or the data.",
                "The inner training diverges: lower its learning rate.", self.count,
            )  # fmt: skip

    def _parts(self, i: int) -> Sequence[Loss]:
        """The loss of step i, by micro-batches."""
        batch = self.batches.at(i)
        rows = _rows(batch)
        if self.micro_batch is None or rows <= self.micro_batch:
            return [lambda params, hyper: self.value(params, hyper, batch)]
        starts = range(0, rows, self.micro_batch)
        return [
            self._part(batch, rows, start, min(start + self.micro_batch, rows)) for start in starts
        ]

    def _part(self, batch: Any, rows: int, start: int, end: int) -> Loss:
        piece = pytree.rows(batch, rows, start, end)
        weight = (end - start) / rows if self.reduction == "mean" else 1.0
        return lambda params, hyper: weight * self.value(params, hyper, piece)


def check_steps(steps: int | None, batches: int | None, method: str, rule: Any) -> int:
    """The number of steps; batches: of which there are so many."""
    if steps is None:
        steps = int(method == "unrolled") if batches is None else batches
    count = validation.at_least("steps", steps, 1 if method == "unrolled" else 0)
    if count and rule is None:
        raise ArgumentValueError(
            f"rule: expected an update rule for {count} inner steps, got None; for instance "
            "`rule=hoglib.meta.sgd(0.1)`."
        )
    if isinstance(rule, str):
        raise ArgumentTypeError(
            f"rule: expected a rule with its rate, got the name {rule!r}; for instance "
            "`rule=hoglib.meta.sgd(0.1)`."
        )
    if rule is not None and not is_transformation(rule):
        validation.function("rule", rule)
    return count


def detached(tree: Any) -> Any:
    return pytree.map_tensors(Tensor.detach, tree)


def _rows(batch: Any) -> int:
    """The number of examples in a batch."""
    for x in pytree.leaves(batch):
        if isinstance(x, Tensor) and x.dim():
            return len(x)
    return 0


@contextmanager
def prepared_training(
    what: str, outer: Any, inner: Any, params: Any, hyper: Any, rule: Any, count: int, batches: Any,
    dtype: torch.dtype | None, stand_ins: bool, **options: Any,
) -> Iterator[tuple[Training, Any]]:  # fmt: skip
    """The training, and hyper; inside, autograd records, with stand-ins and in the dtype asked for."""
    if dtype not in (None, torch.float64):
        raise ArgumentValueError(
            f"dtype: expected torch.float64 or None, got {dtype}; convert params, hyper and the data."
        )
    double = dtype is not None
    with ExitStack() as stack:
        stack.enter_context(examined_functions(what))
        stack.enter_context(grad_enabled())
        stack.enter_context(stand_ins_if(stand_ins))
        if double:
            params, hyper = _doubled_start(params), to_double(hyper)
            guard = StateGuard(_modules(inner, outer, rule), double=True)
            stack.enter_context(guard).begin()
        source = make_batches(batches, count, double)
        start = clone_inference_tensors(params)
        training = Training(inner, start, rule, count, source, **options)
        yield training, clone_inference_tensors(hyper)


def _modules(*functions: Any) -> list[nn.Module]:
    """The modules that functions reach."""
    reached = (x for fn in functions for x in ClosureWalker(fn, STATE).objects)
    return [x for x in reached if isinstance(x, nn.Module)]


def _doubled_start(params: Any) -> Any:
    return (lambda hyper: to_double(params(hyper))) if callable(params) else to_double(params)
