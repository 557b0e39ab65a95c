"""What every way of meta-learning shares: an inner loop on an unmodified module, run over tasks."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hoglib import _arguments as arguments
from hoglib import _functorch, _tree
from hoglib._differences import same_random_numbers
from hoglib._explaining import explaining
from hoglib._functional import (
    Criterion,
    Forward,
    FunctionalLoss,
    Params,
    functional_loss,
    instance,
    trainable_params,
)
from hoglib._precomputed import with_gradients
from hoglib._recording import recordable
from hoglib._substitution import Treatment, substituted
from hoglib._warning import warn
from hoglib.meta import norms
from hoglib.meta import tasks as stacks
from hoglib.meta._guards import (
    check_finite,
    look_at_functions,
    only_what_is_learned,
    uses_any,
)
from hoglib.meta._settings import CHECKS
from hoglib.meta.inner import RUNS_AGAIN, UNUSED, Segment, gradient, hooks_refused, unroll
from hoglib.meta.mapping import Mapper, OfTask
from hoglib.meta.naming import name_of, rule_of
from hoglib.meta.rules import Rule
from hoglib.stand_ins import stand_ins_if

TWICE = (
    "{what}.loss(tasks): expected backward() without create_graph, got create_graph=True; the "
    "gradients of the tasks are computed before backward and have no graph. For derivatives of "
    "the meta-gradient write the loss with `maml.adapt(support)` and `maml(x, params=adapted)`, "
    "which are differentiable to any order."
)
LATER = (
    "maml(x, params=...): expected a model whose graph keeps its tensors, got one with "
    "saved-tensor hooks, as torch.utils.checkpoint has: in backward it would run again by the "
    "model's own parameters instead of these. Use `maml.loss(tasks)`, or call it under "
    "torch.no_grad()."
)
InnerParams = Callable[[str, Tensor], bool] | Sequence[str] | str | None


class Point(NamedTuple):
    """Where tasks start: all that is learned."""

    model: Params  # the trainable parameters of the model, by their names in it
    extras: Params  # those of losses, rates and rules that are modules, by their names in `extras`


class Learner(nn.Module, ABC):
    """An inner loop on a model, and the loss over tasks that it is meta-trained by (abstract).

    See `MAML` for the arguments.
    """

    def __init__(
        self,
        model: nn.Module,
        criterion: Criterion,
        *,
        inner_lr: float,
        inner_steps: int,
        rule: str | Rule | Callable[[Any], Rule] | nn.Module,
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
            instance("inner_loss", inner_loss)
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

    # what a way of meta-learning is made of

    @abstractmethod
    def _of_task(self, point: Point, support: Any, query: Any, wanted: bool) -> OfTask:
        """The loss of one task, and if wanted its gradients: a `Point`."""

    # what a user calls

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

    def forward(self, *args: Any, params: Params | None = None, **kwargs: Any) -> Any:
        """The model's output, with `params` (from `adapt`) in the place of its own."""
        if params is None:
            return self.model(*args, **kwargs)
        self._look_at_norms()
        loss = self.objective.treating(self._norms(self.inner_steps))
        with self._kept(LATER):
            return loss.call(params, *args, **kwargs)

    def adapt(
        self, support: Any, *, params: Params | None = None, steps: int | None = None
    ) -> Params:
        """The parameters after the inner steps on one task's support set, for instance (x, y).

        Starts at the model's own trainable parameters, or at `params`. Those that do not adapt are
        handed through. The result is differentiable by them where grad is enabled, and works under
        no_grad, in inference mode and under vmap. `steps`, 0 or more, overrides inner_steps.
        """
        stacks.check_batch("support", support)
        count = self.inner_steps if steps is None else arguments.at_least("steps", steps, 0)
        point = self._point()
        if params is not None:
            point = point._replace(model=params)
        self._look_at_norms()
        with _outside_inference_mode(), stand_ins_if(self.stand_ins):
            adapted, _, _ = self._unroll(point, _usable(support), count)
        return {**point.model, **adapted}

    def loss(self, tasks: Any) -> Tensor:
        """The meta-loss, a scalar whose `backward()` fills the `.grad` of all that is learned.

        tasks: a tuple (support, query) of stacks, whose tensors all have a leading dimension of
        tasks, for instance (x [B, K, ...], y [B, K, ...]); or a list of tasks, each (support,
        query), which may differ in size. A batch is a tensor, a tuple, a dict or anything else that
        `functional_loss` takes. Two lists of two tensors, as a DataLoader collates them, are
        stacks. The gradients of all tasks are computed here, and handed on by backward; so the
        result cannot be differentiated twice, nor by the tasks: both raise. Where grad is disabled
        only the value is computed.

        Raises ValueError for an empty support set or sizes that do not match; FloatingPointError
        when an inner or outer loss is not finite, naming task and step.
        """
        what = type(self).__name__
        if _functorch.transforms_active():
            raise arguments.NotSupported(
                f"{what}.loss(tasks): expected to be called outside of torch.func transforms, got "
                "called inside one, where its gradients have no graph. Write the loss with "
                "`maml.adapt(support)` and `maml(x, params=adapted)`, which run inside of any."
            )
        tasks = stacks.unpack(tasks)
        stacks.check_tasks(tasks)
        wanted = torch.is_grad_enabled()
        own = self._point()
        self._look_at_norms()
        with _outside_inference_mode(), stand_ins_if(self.stand_ins):
            # Copies, for a model or a rule that works in place.
            point = Point(*({n: p.detach().clone() for n, p in part.items()} for part in own))

            def of_task(support: Any, query: Any) -> OfTask:
                return self._of_task(point, support, query, wanted)

            tasks = _usable(tasks)
            if wanted:
                self._look(what, point, tasks)
            try:
                found = self._mapper(of_task, tasks, what, own.model)
            except RuntimeError as error:
                if self._runs_again or RUNS_AGAIN not in str(error):
                    raise
                self._runs_again = True  # as `_memory` heeds
                found = self._mapper(of_task, tasks, what, own.model)
        check_finite(found)
        if not wanted:
            return found.value.mean()
        self._note(found)
        tensors = {**own.model, **_prefixed(own.extras)}
        grads = {**found.grads["model"], **_prefixed(found.grads["extras"])}
        return with_gradients(
            found.value.mean(),
            [grads[n] for n in tensors],
            list(tensors.values()),
            TWICE.format(what=what),
        )

    def extra_repr(self) -> str:
        return (
            f"inner_lr={self.inner_lr}, inner_steps={self.inner_steps}, rule={name_of(self.rule)}, "
            f"over_tasks={self.over_tasks!r}"
        )

    def _kept(self, message: str = RUNS_AGAIN) -> AbstractContextManager[None]:
        """Around a call of the model whose graph is used when other parameters stand in it."""
        wanted = torch.is_grad_enabled() and not _functorch.transforms_active()
        return hooks_refused(wanted, message)

    # the inner loop

    def _constant(self, i: int, steps: int) -> bool:
        """Whether the gradient of a step is taken for a constant."""
        return False

    def _inner_value(
        self, point: Point, params: Params, support: Any, loss: FunctionalLoss
    ) -> Tensor:
        """The loss that an inner step goes down."""
        with self._extras_at(point):
            return loss({**point.model, **params}, support)

    def _outer_value(self, point: Point, params: Params, query: Any, step: int) -> Tensor:
        """The loss of the query set at the parameters after so many steps."""
        loss = self.objective.treating(self._norms(step))
        with self._extras_at(point):
            return loss({**point.model, **params}, query)

    def _weights(self, steps: int) -> Sequence[float] | None:
        """Those of the outer loss after each step; None for the last alone."""
        return None

    def _memory(self) -> str:
        return "store"

    def _unroll(
        self, point: Point, support: Any, steps: int, query: Any = None
    ) -> tuple[Params, Tensor | None, Any]:
        """What adapts, after so many steps; the weighted outer losses on the way; and notes."""
        adapting = self._adapting(point.model)
        weights = None if query is None else self._weights(steps)

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
                if weights is not None and weights[i] and i + 1 < steps:
                    with self._kept():
                        value = weights[i] * self._outer_value(point, params, query, i + 1)
                    total = value if total is None else total + value
            return (params, state, total), notes

        segment = Segment(run, lambda i: self._constant(i, steps))
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
        self, i: int, point: Point, params: Params, support: Any, constant: bool, alone: bool
    ) -> tuple[Params, Any]:
        loss = self.inner_objective.treating(self._norms(i))

        def noted(params: Params, support: Any) -> tuple[Tensor, Any]:
            with self._noting() as statistics:
                return self._inner_value(point, params, support, loss), statistics

        return gradient(noted, params, support, constant=constant, alone=alone, check=i == 0)

    def _outer(self, point: Point, support: Any, query: Any) -> tuple[Tensor, Any, Params]:
        """The outer loss of a task after the inner loop, what is noted of both, and what adapted."""
        steps = self.inner_steps
        params, total, notes = self._unroll(point, support, steps, query)
        with self._noting() as statistics:
            value = self._outer_value(point, params, query, steps)
        weights = self._weights(steps)
        if weights is not None:
            value = weights[-1] * value if total is None else total + weights[-1] * value
        losses = torch.stack([loss for loss, _ in notes])
        return value, (losses, [statistics for _, statistics in notes] + [statistics]), params

    def _rule(self, i: int, point: Point, names: list[str]) -> Rule:
        if not point.extras:
            return rule_of(self.rule, self.inner_lr, self.rule_options)
        with self._extras_at(point):
            lr = self.inner_lr if self.rates is None else self.rates(names, i)
            rule = rule_of(self.rule, lr, self.rule_options)
        if isinstance(self.rule, nn.Module):
            return Rule(self._with_extras(point, rule.init), self._with_extras(point, rule.update))
        return rule

    def _with_extras(self, point: Point, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            with self._extras_at(point):
                return function(*args)

        return run

    # what it is made of

    def _objective(self, which: str, criterion: Criterion) -> FunctionalLoss:
        known = self._objectives.get(which)
        if known is None or known.model is not self.model or known.user_criterion is not criterion:
            known = functional_loss(self.model, criterion, forward=self._forward)
            self._objectives[which] = known
        return known

    def _point(self) -> Point:
        extras: Params = {n: p for n, p in self._extras().named_parameters() if p.requires_grad}
        return Point(trainable_params(self.model), extras)

    def _extras(self) -> nn.ModuleDict:
        """Losses, rates and rules that are modules."""
        parts = {
            "criterion": self.criterion, "inner_loss": self.inner_loss,
            "rates": self.rates, "rule": self.rule,
        }  # fmt: skip
        return nn.ModuleDict({n: part for n, part in parts.items() if isinstance(part, nn.Module)})

    def _extras_at(self, point: Point) -> AbstractContextManager[None]:
        return substituted(self._extras(), point.extras) if point.extras else nullcontext()

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
                    raise arguments.WrongValue(
                        f"inner_params: expected names or prefixes of trainable parameters of "
                        f"{type(self.model).__name__}, got {part!r}; it has {', '.join(names)}."
                    )
            found = [name for name in names if any(_is_in(name, part) for part in parts)]
        if not found:
            raise arguments.WrongValue(
                f"inner_params: expected at least one parameter that adapts, got none of "
                f"{', '.join(names)}; let the predicate be true for one."
            )
        return found

    def _norms(self, step: int) -> Treatment:
        """What batch norms do at parameters after so many steps."""
        if self.statistics is not None:
            return self.statistics.at(step, self._layers)
        return norms.TREATMENTS[self.batch_norm]

    def _noting(self) -> AbstractContextManager[norms.Statistics]:
        return nullcontext({}) if self.statistics is None else norms.noting(self._layers)

    def _note(self, found: OfTask) -> None:
        """What a step of training leaves behind: running statistics per step."""
        trained = any(layer.training for layer in self._layers.values())
        self._normalised_by_batches = self._normalised_by_batches or trained
        if self.statistics is not None:
            self.statistics.update(found.notes[1], self._layers)

    def _look_at_norms(self) -> None:
        """Which layers keep statistics, before anything stands in their places."""
        self._layers = norms.with_statistics(self.model)
        if self.batch_norm != "by_mode" or not self._normalised_by_batches:
            return
        for name, layer in self._layers.items():
            if not layer.training and layer.num_batches_tracked == 0:
                self._normalised_by_batches = False  # and says so once
                warn(
                    f"batch_norm='by_mode': {name} is in eval mode and normalises by running "
                    "statistics that are those of its initialisation: inner loops update none, "
                    "and were trained by the statistics of their batches. Use "
                    "batch_norm='transductive' for those in eval mode too, or 'per_step'."
                )
                return

    def _look(self, what: str, point: Point, tasks: Any) -> None:
        """Once for each model: whether gradients reach all that they should, and from all Functions."""
        if self._looked_at == id(self.model):
            return
        support, query = stacks.first(tasks)
        names = self._adapting(point.model)
        start = [point.model[name] for name in names]
        norm = self._norms(0)

        def inner(at: Point, *leaves: Tensor) -> Tensor:
            loss = self.inner_objective.treating(norm)
            return self._inner_value(at, dict(zip(names, leaves, strict=True)), support, loss)

        leaves, structure = _tree.flatten(point)
        own = [leaf.detach().requires_grad_() for leaf in leaves]
        at = _tree.unflatten(own, structure)
        before = {name: at.model[name] for name in names}

        def losses() -> list[Tensor]:
            """The inner one at the start, and the outer one after a step or two."""
            first = inner(at, *before.values())
            if not uses_any(first, list(before.values())):
                raise arguments.NoSecondDerivative(UNUSED.format(which="inner", whom=" that adapt"))
            after, state = before, self._rule(0, at, names).init(before)
            for i in range(min(2, self.inner_steps)):  # some rules show all of them in the second
                grads, _ = self._gradient(i, at, after, support, constant=True, alone=False)
                after, state = self._rule(i, at, names).update(after, grads, state)
            last = self._outer_value(at, after, query, self.inner_steps)
            if not last.requires_grad:
                raise arguments.NoSecondDerivative(UNUSED.format(which="outer", whom=""))
            return [first, last]

        with torch.enable_grad(), same_random_numbers(start), explaining(what):
            data = [x for x in _tree.leaves((support, query)) if isinstance(x, Tensor)]
            only_what_is_learned(what, losses, [*own, *data], dict(self.named_parameters()))
            if not self._constant(self.inner_steps - 1, self.inner_steps):
                look_at_functions("the inner step", partial(inner, point), start)
        self._looked_at = id(self.model)


@contextmanager
def _outside_inference_mode() -> Iterator[None]:
    """Where tensors can be differentiated by; grad stays disabled."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def _usable(tree: Any) -> Any:
    """Tensors that were made in inference mode can be used outside of it only as copies."""
    return recordable(tree)


def _is_in(name: str, part: str) -> bool:
    return name == part or name.startswith(part + ".")


def _prefixed(params: Params) -> Params:
    return {f"extras.{name}": param for name, param in params.items()}
