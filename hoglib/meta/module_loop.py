"""What a learner's options must be, at first and whenever they are changed between steps."""

from abc import ABC
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hoglib._core import torch_internals, validation
from hoglib._core.swap import NormPolicy, Params, swap_parameters
from hoglib.errors import ArgumentTypeError, ArgumentValueError
from hoglib.functional import (
    Criterion,
    Forward,
    FunctionalLoss,
    check_instance,
    functional_loss,
    trainable_params,
)
from hoglib.meta import norms
from hoglib.meta.inner_loop import (
    MEMORY,
    RUNS_AGAIN,
    StepChunk,
    check_truncate,
    gradient,
    hooks_refused,
    unroll,
)
from hoglib.meta.mapping import Mapper
from hoglib.meta.optimizers import GradientTransformation, name_of, rule_of

COMPILE = ("inductor", "step", "eager")  # besides True, which chooses


def _rate(learner: Any, value: Any) -> float:
    if learner.rates is not None:
        raise ArgumentValueError(
            "inner_lr: expected to stay as it was, for the rates are learned from it on, got a new "
            "one; change `learner.rates` instead."
        )
    return validation.positive("inner_lr", value)


def _policy(learner: Any, value: Any) -> str:
    validation.one_of("batch_norm", value, norms.POLICIES)
    if (value == "per_step") != (learner.statistics is not None):
        raise ArgumentValueError(
            "batch_norm: expected 'per_step' from the beginning or not at all, since it has "
            "statistics of its own; make a new learner."
        )
    return str(value)


def _parts(learner: Any, value: Any) -> Any:
    names = value if isinstance(value, list | tuple) else [value]
    if not (value is None or callable(value) or all(isinstance(name, str) for name in names)):
        raise ArgumentTypeError(
            "inner_params: expected a predicate (name, tensor) -> bool, or names or prefixes, got "
            f"{validation.describe(value)}."
        )
    return value


def _options(learner: Any, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ArgumentTypeError(f"rule_options: expected a dict, got {validation.describe(value)}.")
    return dict(value)


def _way(value: Any) -> bool | str:
    if isinstance(value, bool):
        return value
    if value not in COMPILE:
        raise ArgumentValueError(
            f"compile: expected true, false or one of {', '.join(COMPILE)}; got {value!r}."
        )
    return str(value)


# What an attribute must be, whenever it is set
CHECKS: dict[str, Callable[[Any, Any], Any]] = {
    "inner_lr": _rate,
    "inner_steps": lambda _, value: validation.at_least("inner_steps", value, 1),
    "first_order": lambda _, value: validation.flag("first_order", value),
    "memory": lambda _, value: validation.one_of("memory", value, MEMORY),
    "truncate": lambda _, value: check_truncate(value),
    "batch_norm": _policy,
    "inner_params": _parts,
    "rule_options": _options,
    "compiled": lambda _, value: _way(value),
    "compile_for": lambda _, value: (
        None if value is None else validation.at_least("compile_for", value, 1)
    ),
    "stand_ins": lambda _, value: validation.flag("stand_ins", value),
}


# === The inner loop of a module, with all that it can be made of: rates, losses, rules, norms,
# parts.

InnerParams = Callable[[str, Tensor], bool] | Sequence[str] | str | None
Weights = Sequence[float | Tensor] | None  # of the outer losses after each step


class MetaParams(NamedTuple):
    """Where tasks start: all that is learned."""

    model: Params  # the trainable parameters of the model, by their names in it
    extras: Params  # those of losses, rates and rules that are modules, by their names in `extras`


class InnerLoop(nn.Module, ABC):
    """Steps on a model from a point of all that is learned (abstract); see `hoglib.MAML`."""

    def __init__(
        self,
        model: nn.Module,
        criterion: Criterion,
        *,
        inner_lr: float,
        inner_steps: int,
        rule: str | GradientTransformation | Callable[[Any], GradientTransformation] | nn.Module,
        rule_options: dict[str, Any] | None,
        inner_loss: Criterion | None,
        inner_params: InnerParams,
        batch_norm: str,
        forward: Forward | None,
        over_tasks: str,
        stand_ins: bool,
    ) -> None:
        super().__init__()
        self._objectives: dict[str, FunctionalLoss] = {}
        functional_loss(model, criterion, forward=forward)
        if inner_loss is not None:
            check_instance("inner_loss", inner_loss)
        trainable_params(model)  # raises here, not at the first step, if there is nothing to learn
        self.model = model
        self.criterion = criterion
        self.inner_loss = inner_loss
        self._forward = forward
        self._mapper = Mapper(over_tasks)
        self.rates: nn.Module | None = None
        self.statistics: norms.PerStep | None = None
        self.inner_lr = inner_lr
        self.inner_steps = inner_steps
        self.rule = rule
        self.rule_options = {} if rule_options is None else rule_options
        self.inner_params = inner_params
        if batch_norm == "per_step":
            self.statistics = norms.PerStep(model, self.inner_steps)
        self.batch_norm = batch_norm
        self.stand_ins = stand_ins
        self._runs_again = False  # parts of the model do, in backward
        self._looked_at: int | None = None
        self._layers: norms.Layers = {}
        self._normalised_by_batches = False  # by a train-mode layer, when it was trained
        rule_of(rule, self.inner_lr, self.rule_options)
        self._adapting(trainable_params(model))

    def __setattr__(self, name: str, value: Any) -> None:
        """An option that is changed between steps is checked as it was at first."""
        check = CHECKS.get(name)
        super().__setattr__(name, value if check is None else check(self, value))

    @property
    def over_tasks(self) -> str:
        return self._mapper.over_tasks

    @over_tasks.setter
    def over_tasks(self, how: str) -> None:
        self._mapper = Mapper(how)

    @property
    def objective(self) -> FunctionalLoss:
        """The outer loss of the model as a function of parameters and batch."""
        return self._objective("outer", self.criterion)

    @property
    def inner_objective(self) -> FunctionalLoss:
        """The loss of the inner loop as a function of parameters and batch."""
        return (
            self.objective if self.inner_loss is None else self._objective("inner", self.inner_loss)
        )

    def extra_repr(self) -> str:
        return (
            f"inner_lr={self.inner_lr}, inner_steps={self.inner_steps}, rule={name_of(self.rule)}, "
            f"over_tasks={self.over_tasks!r}"
        )

    # the inner loop

    def _constant(self, i: int, steps: int) -> bool:
        """Whether the gradient of a step is taken for a constant."""
        return False

    def _inner_value(
        self, point: MetaParams, params: Params, support: Any, loss: FunctionalLoss
    ) -> Tensor:
        """The loss that an inner step goes down."""
        with self._extras_at(point):
            return loss({**point.model, **params}, support)

    def _outer_value(self, point: MetaParams, params: Params, query: Any, step: int) -> Tensor:
        """The loss of the query set at the parameters after so many steps."""
        loss = self.objective.with_norm_policy(self._norms(step))
        with self._extras_at(point):
            return loss({**point.model, **params}, query)

    def _weights(self, steps: int) -> Weights:
        """Those of the outer loss after each step; None for the last alone."""
        return None

    def _memory(self) -> str:
        return "store"

    def _unroll(
        self,
        point: MetaParams,
        support: Any,
        steps: int,
        query: Any = None,
        weights: Weights = None,
    ) -> tuple[Params, Tensor | None, Any]:
        """What adapts, after so many steps; the weighted outer losses on the way; and notes."""
        adapting = self._adapting(point.model)

        def run(start: int, end: int, carry: Any, constants: Any) -> tuple[Any, list[Any]]:
            (params, state, total), (point, support, query) = carry, constants
            notes = []
            alone = end - start == 1 and weights is None
            for i in range(start, end):
                rule = self._rule(i, point, adapting)
                constant = segment.constant(i)
                grads, note = self._gradient(i, point, params, support, constant, alone)
                params, state = rule.update(params, grads, state)
                notes.append(note)
                if weights is not None and _counts(weights[i]) and i + 1 < steps:
                    with self._kept():
                        value = self._outer_value(point, params, query, i + 1)
                    value = _weighted(weights[i], value)
                    total = value if total is None else total + value
            return (params, state, total), notes

        segment = StepChunk(run, lambda i: self._constant(i, steps))
        params = {name: point.model[name].clone() for name in adapting}
        carry = (params, self._rule(0, point, adapting).init(params), None)
        if self._memory() != "store":  # what is run again keeps all that it is given
            rest = {n: p for n, p in point.model.items() if n not in params}
            point = point._replace(model=rest)
        (params, _, total), notes = unroll(
            segment, steps, carry, (point, support, query), self._memory(), tuple(self.modules())
        )
        return params, total, notes

    def _gradient(
        self, i: int, point: MetaParams, params: Params, support: Any, constant: bool, alone: bool
    ) -> tuple[Params, Any]:
        loss = self.inner_objective.with_norm_policy(self._norms(i))

        def noted(params: Params, support: Any) -> tuple[Tensor, Any]:
            with self._noting() as statistics:
                return self._inner_value(point, params, support, loss), statistics

        return gradient(noted, params, support, constant=constant, alone=alone, check=i == 0)

    def _step_from(
        self, fixed: MetaParams, carry: Any, count: Tensor, support: Any, constant: bool
    ) -> tuple[Any, Tensor]:
        """One inner step by itself, for rules and losses to which all steps are alike.

        carry: the parameters that adapt, and what the rule remembers besides the number of steps, which
        is count. Gives what is carried on, and the loss.
        """
        params, memory = carry
        rule = self._rule(0, fixed, list(params))
        grads, (loss, _) = self._gradient(0, fixed, params, support, constant, False)
        state = {"step": count, **memory} if memory else {}
        params, state = rule.update(params, grads, state)
        return (params, {slot: tree for slot, tree in state.items() if slot != "step"}), loss

    def _outer(
        self,
        point: MetaParams,
        support: Any,
        query: Any,
        steps: int | None = None,
        weights: Weights = None,
    ) -> tuple[Tensor, Any, Params]:
        """The outer loss of a task after the inner loop, what is noted of both, and what adapted.

        weights: those of the outer losses, where they are not the learner's own.
        """
        steps = self.inner_steps if steps is None else steps
        weights = self._weights(steps) if weights is None else weights
        params, total, notes = self._unroll(point, support, steps, query, weights)
        with self._noting() as statistics:
            value = self._outer_value(point, params, query, steps)
        if weights is not None:
            value = _weighted(weights[-1], value)
            value = value if total is None else total + value
        losses = torch.stack([loss for loss, _ in notes])
        return value, (losses, [statistics for _, statistics in notes] + [statistics]), params

    def _rule(self, i: int, point: MetaParams, names: list[str]) -> GradientTransformation:
        if not point.extras:
            return rule_of(self.rule, self.inner_lr, self.rule_options)
        with self._extras_at(point):
            lr = self.inner_lr if self.rates is None else self.rates(names, i)
            rule = rule_of(self.rule, lr, self.rule_options)
        if isinstance(self.rule, nn.Module):
            return GradientTransformation(
                self._with_extras(point, rule.init), self._with_extras(point, rule.update)
            )
        return rule

    def _with_extras(self, point: MetaParams, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            with self._extras_at(point):
                return function(*args)

        return run

    def _kept(self, message: str = RUNS_AGAIN) -> AbstractContextManager[None]:
        """Around a call of the model whose graph is used when other parameters stand in it."""
        wanted = torch.is_grad_enabled() and not torch_internals.transforms_active()
        return hooks_refused(wanted, message)

    # what it is made of

    def _objective(self, which: str, criterion: Criterion) -> FunctionalLoss:
        known = self._objectives.get(which)
        if known is None or known.model is not self.model or known.user_criterion is not criterion:
            known = functional_loss(self.model, criterion, forward=self._forward)
            self._objectives[which] = known
        return known

    def _point(self) -> MetaParams:
        extras: Params = {n: p for n, p in self._extras().named_parameters() if p.requires_grad}
        return MetaParams(trainable_params(self.model), extras)

    def _extras(self) -> nn.ModuleDict:
        """Losses, rates and rules that are modules."""
        parts = {
            "criterion": self.criterion, "inner_loss": self.inner_loss,
            "rates": self.rates, "rule": self.rule,
        }  # fmt: skip
        return nn.ModuleDict({n: part for n, part in parts.items() if isinstance(part, nn.Module)})

    def _extras_at(self, point: MetaParams) -> AbstractContextManager[None]:
        return swap_parameters(self._extras(), point.extras) if point.extras else nullcontext()

    def _adapting(self, params: Iterable[str]) -> list[str]:
        """The names of the parameters that adapt."""
        names = list(params)
        chosen = self.inner_params
        if chosen is None:
            return names
        if callable(chosen):
            own = dict(self.model.named_parameters())
            found = [name for name in names if chosen(name, own[name])]
        else:
            parts = [chosen] if isinstance(chosen, str) else list(chosen)
            for part in parts:
                if not any(_is_in(name, part) for name in names):
                    raise ArgumentValueError(
                        f"inner_params: expected names or prefixes of trainable parameters of "
                        f"{type(self.model).__name__}, got {part!r}; it has {', '.join(names)}."
                    )
            found = [name for name in names if any(_is_in(name, part) for part in parts)]
        if not found:
            raise ArgumentValueError(
                f"inner_params: expected at least one parameter that adapts, got none of "
                f"{', '.join(names)}; let the predicate be true for one."
            )
        return found

    def _norms(self, step: int) -> NormPolicy:
        """What batch norms do at parameters after so many steps."""
        if self.statistics is not None:
            return self.statistics.at(step, self._layers)
        return norms.TREATMENTS[self.batch_norm]

    def _noting(self) -> AbstractContextManager[norms.Statistics]:
        return nullcontext({}) if self.statistics is None else norms.noting(self._layers)


def _counts(weight: float | Tensor) -> bool:
    return isinstance(weight, Tensor) or weight != 0


def _weighted(weight: float | Tensor, value: Tensor) -> Tensor:
    return (weight.to(value.dtype) if isinstance(weight, Tensor) else weight) * value


def _is_in(name: str, part: str) -> bool:
    return name == part or name.startswith(part + ".")
