"""The inner loop of a module, as a frozen value: from what is learned to a loss and its gradient.

A learner (`learner.py`) makes one from its attributes for each call. Everything that reaches the
graph of the meta-gradient is a method here, from the gradient of a task down to the loss of one
inner step.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from hoglib._core import pytree, torch_internals, validation
from hoglib._core.autograd import materialize_grads
from hoglib._core.blocks import Remat, check_remat
from hoglib._core.sharding import WHOLE, Placement
from hoglib._core.swap import Params, keep_swapped, swap_parameters
from hoglib._core.torch_modes import without_stand_ins
from hoglib.errors import ArgumentTypeError, ArgumentValueError
from hoglib.functional import FunctionalLoss, trainable_params
from hoglib.meta import norms
from hoglib.meta.gradient_transformation import GradientTransformation
from hoglib.meta.inner_loop import (
    MEMORY,
    RECOMPUTES,
    InnerSteps,
    Unrolled,
    check_truncate,
    is_truncated,
    refuse_saved_tensor_hooks,
    unroll,
)
from hoglib.meta.optimizers import resolve_rule
from hoglib.meta.tasks import TaskResult

InnerParams = Callable[[str, Tensor], bool] | Sequence[str] | str | None
StepWeights = Sequence[float | Tensor] | None  # of the outer losses after each step
GRANULARITIES = ("model", "layer", "parameter", "element")


@dataclass(frozen=True)
class LoopOptions:
    """The options of an inner loop, checked when it is made."""

    inner_lr: float
    inner_steps: int
    rule_options: dict[str, Any] | None = None
    inner_params: InnerParams = None
    batch_norm: str = "by_mode"
    first_order: bool = False
    truncate: int | None = None
    step_weights: Sequence[float] | None = None
    memory: str = "store"
    stand_ins: bool = True
    remat: Remat = False

    def __post_init__(self) -> None:
        checked = {
            "inner_lr": validation.positive("inner_lr", self.inner_lr),
            "inner_steps": validation.at_least("inner_steps", self.inner_steps, 1),
            "rule_options": _check_rule_options(self.rule_options),
            "inner_params": _check_inner_params(self.inner_params),
            "batch_norm": validation.one_of("batch_norm", self.batch_norm, norms.POLICIES),
            "first_order": validation.flag("first_order", self.first_order),
            "truncate": check_truncate(self.truncate),
            "step_weights": _check_step_weights(self.step_weights),
            "memory": validation.one_of("memory", self.memory, MEMORY),
            "stand_ins": validation.flag("stand_ins", self.stand_ins),
            "remat": check_remat(self.remat),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    def weights_for(self, steps: int) -> StepWeights:
        """The weights of the outer losses after each step; None for the last loss alone."""
        weights = self.step_weights
        if weights is not None and (len(weights) != steps or not any(weights)):
            raise ArgumentValueError(
                f"step_weights: expected {steps} weights, one after each inner step and not all "
                f"of them zero, got {list(weights)}; see `hoglib.meta.multi_step_weights`."
            )
        return weights


class MetaParams(NamedTuple):
    """All that is learned: where every task starts."""

    model: Params  # the trainable parameters of the model, by their names in it
    modules: Params  # those of the learned modules, by their names in `ModuleLoop.learned_modules`


@dataclass(frozen=True, eq=False)
class ModuleLoop:
    """Inner steps on a model; see `hoglib.MAML`."""

    options: LoopOptions
    rule: Any  # as given by the user
    criterion_loss: FunctionalLoss  # the outer loss
    inner_criterion_loss: FunctionalLoss
    adapting: tuple[str, ...]  # names of the parameters that adapt
    learned_modules: nn.ModuleDict  # criterion, inner loss, rates and rule, those that are modules
    rates: "LearnedRates | None"
    statistics: norms.PerStepStatistics | None
    batch_norms: norms.BatchNorms
    strength: float = 0.0  # of the proximal term, strength / 2 |params - start|^2
    placement: Placement = WHOLE  # of the parameters over processes

    def meta_params(self) -> MetaParams:
        """All that is learned, as it is now."""
        learned = self.learned_modules.named_parameters()
        model = trainable_params(self.criterion_loss.model)
        return MetaParams(model, {name: p for name, p in learned if p.requires_grad})

    def meta_gradient(
        self, start: MetaParams, support: Any, query: Any, weights: StepWeights = None
    ) -> TaskResult:
        """The outer loss of one task and its gradient with respect to all that is learned."""
        if torch_internals.transforms_active():

            def outer(start: MetaParams) -> tuple[Tensor, TaskResult]:
                result, _ = self.outer_loss(start, support, query, weights)
                return result.value, result

            grads, (_, result) = torch.func.grad_and_value(outer, has_aux=True)(start)
            return result._replace(grads=grads)
        leaves, structure = pytree.flatten(start)
        with without_stand_ins():
            own = [leaf.detach().requires_grad_() for leaf in leaves]
        with keep_swapped():  # backward may recompute parts of the model
            start = pytree.unflatten(own, structure)
            result, _ = self.outer_loss(start, support, query, weights)
            found = torch.autograd.grad(result.value, own, allow_unused=True)
        grads = pytree.unflatten(materialize_grads(list(found), own), structure)
        return result._replace(value=result.value.detach(), grads=grads)

    def outer_loss(
        self, start: MetaParams, support: Any, query: Any, weights: StepWeights = None
    ) -> tuple[TaskResult, Params]:
        """The outer loss of one task after the inner loop, without its gradient; and what adapted.

        weights: of the outer losses; where they are not those of the options.
        """
        steps = self.options.inner_steps
        weights = self.options.weights_for(steps) if weights is None else weights
        found = self.unroll(start, support, steps, query, weights)
        with self._record_statistics() as statistics:
            value = self.outer_value(start, found.params, query, steps)
        if weights is not None:
            value = _weighted(weights[-1], value)
            value = value if found.outer is None else found.outer + value
        result = TaskResult(value, (), torch.stack(found.losses), [*found.notes, statistics])
        return result, found.params

    def unroll(
        self, start: MetaParams, support: Any, steps: int, query: Any = None,
        weights: StepWeights = None,
    ) -> Unrolled:  # fmt: skip
        """The parameters after so many steps, and the weighted outer losses before the last."""
        options = self.options

        def loss(i: int, params: Params, constants: Any) -> tuple[Tensor, Any]:
            start, support, _ = constants
            with self._record_statistics() as statistics:
                return self.inner_value(start, params, support, i), statistics

        def outer(i: int, params: Params, constants: Any) -> Tensor | None:
            start, _, query = constants
            weight: float | Tensor = 0.0 if weights is None or i + 1 == steps else weights[i]
            if not isinstance(weight, Tensor) and weight == 0:
                return None
            with self.keeps_graph():
                value = self.outer_value(start, params, query, i + 1)
            return _weighted(weight, value)

        fixed_rule = None if start.modules else self.rule_at(0, start)
        inner = InnerSteps(
            loss,
            lambda i, constants: fixed_rule or self.rule_at(i, constants[0]),
            lambda i: self.is_constant(i, steps),
            None if weights is None else outer,
        )
        with without_stand_ins():
            params = {name: start.model[name].clone() for name in self.adapting}
        if options.memory == "store":
            return unroll(inner, steps, params, (start, support, query), "store")
        # A recomputation saves all its inputs: the initial values of what adapts are not needed.
        rest = {n: p for n, p in start.model.items() if n not in params}
        modules = [*self.criterion_loss.model.modules(), *self.learned_modules.modules()]
        constants = start._replace(model=rest), support, query
        return unroll(inner, steps, params, constants, options.memory, modules)

    def inner_value(self, start: MetaParams, params: Params, support: Any, step: int) -> Tensor:
        """The loss that an inner step decreases."""
        loss = self._at_step(self.inner_criterion_loss, step)
        with self._with_learned(start):
            value = self._loss_at(loss, {**start.model, **params}, support)
        if self.strength:
            offset = {name: p - start.model[name] for name, p in params.items()}
            value = value + self.strength / 2 * pytree.dot(offset, offset).real
        return value

    def outer_value(self, start: MetaParams, params: Params, query: Any, step: int) -> Tensor:
        """The loss of the query set at the parameters after so many steps."""
        loss = self._at_step(self.criterion_loss, step)
        with self._with_learned(start):
            return self._loss_at(loss, {**start.model, **params}, query)

    def call(self, params: Params, *args: Any, **kwargs: Any) -> Any:
        """The model's output with the parameters that `adapt` gave."""
        loss = self._at_step(self.criterion_loss, self.options.inner_steps)
        return loss.call(self._whole(params), *args, **kwargs)

    def rule_at(self, i: int, start: MetaParams) -> GradientTransformation:
        """The update rule of step i, with the learned rates and the learned parameters of the rule."""
        lr, options = self.options.inner_lr, self.options.rule_options or {}
        if not start.modules:
            return resolve_rule(self.rule, lr, options)
        with self._with_learned(start):
            rates = lr if self.rates is None else self.rates(self.adapting, i)
            rule = resolve_rule(self.rule, rates, options)
        if not isinstance(self.rule, nn.Module):
            return rule

        def with_learned(function: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any) -> Any:
                with self._with_learned(start):
                    return function(*args)

            return run

        return GradientTransformation(with_learned(rule.init), with_learned(rule.update))

    def is_constant(self, i: int, steps: int) -> bool:
        """Whether the gradient of step i is a constant."""
        return self.options.first_order or is_truncated(i, steps, self.options.truncate)

    def keeps_graph(self, message: str = RECOMPUTES) -> AbstractContextManager[None]:
        """For a call of the model whose graph is used when other parameters are in the model."""
        wanted = torch.is_grad_enabled() and not torch_internals.transforms_active()
        return refuse_saved_tensor_hooks(wanted, message)

    def _whole(self, params: Params) -> Params:
        """The parameters that the model runs with, gathered where processes share them."""
        return self.placement.gather_named(params)

    def _loss_at(self, loss: FunctionalLoss, params: Params, batch: Any) -> Tensor:
        """A loss; where processes share the parameters the mean of theirs."""
        params = self._whole(params)
        return self.placement.mean_of(lambda: loss(params, batch))

    def _at_step(self, loss: FunctionalLoss, step: int) -> FunctionalLoss:
        """A loss whose batch norms follow the policy at the parameters after so many steps."""
        if self.statistics is None:
            return loss
        return loss.with_norm_policy(self.statistics.at(step, self.batch_norms))

    def _with_learned(self, start: MetaParams) -> AbstractContextManager[None]:
        if not start.modules:
            return nullcontext()
        return swap_parameters(self.learned_modules, start.modules)

    def _record_statistics(self) -> AbstractContextManager[norms.Statistics]:
        if self.statistics is None:
            return nullcontext({})
        return norms.record_statistics(self.batch_norms)


@final
class LearnedRates(nn.Module):
    r"""Learning rates of an inner loop, as parameters.

        theta_{i+1} = theta_i - alpha_i * grad L(theta_i)

    params: the parameters that adapt; lr: the initial value of every rate; granularity: one rate
    for the "model", for each "layer" (a module), "parameter" (a tensor) or "element"; steps: one
    for each of so many steps as well, of which later steps use the last.

    References:
        Li et al., Meta-SGD, 2017, eq. 2 ("element"); Antoniou, Edwards and Storkey, How to train
        your MAML, 2019, section 4, LSLR ("parameter" or "layer" with steps).
    """

    def __init__(
        self, params: Params, lr: float, *, granularity: str, steps: int | None = None
    ) -> None:
        super().__init__()
        self.granularity = validation.one_of("learn_lr", granularity, GRANULARITIES)
        self.steps = steps
        lr = validation.positive("inner_lr", lr)
        self.values = nn.ParameterDict()
        for name, param in params.items():
            key = self._key(name)
            if key not in self.values:
                shape = (
                    *(() if steps is None else (steps,)),
                    *(param.shape if granularity == "element" else ()),
                )
                rate = torch.full(shape, lr, dtype=param.dtype, device=param.device)
                self.values[key] = nn.Parameter(rate)

    def forward(self, names: Iterable[str], step: int) -> dict[str, Tensor]:
        """The rate of each of these parameters at a step, counted from 0."""
        at = None if self.steps is None else min(step, self.steps - 1)
        found = {}
        for name in names:
            key = self._key(name)
            if key not in self.values:
                raise ArgumentValueError(
                    "learn_lr: expected the parameters that adapted when the learner was made, got "
                    f"{name} as well, for which there is no learned rate; make a new learner."
                )
            rate = self.values[key]
            found[name] = rate if at is None else rate[at]
        return found

    def _key(self, name: str) -> str:
        """A name that a ParameterDict takes: without dots."""
        if self.granularity == "model":
            return "model"
        if self.granularity == "layer":
            name = name.rpartition(".")[0] or "model"
        return name.replace(".", "/")

    def extra_repr(self) -> str:
        return f"granularity={self.granularity!r}, steps={self.steps}"


def names_that_adapt(model: nn.Module, names: Iterable[str], chosen: InnerParams) -> list[str]:
    """The names of the parameters that adapt, of those that are trainable."""
    names = list(names)
    if chosen is None:
        return names
    if callable(chosen):
        own = dict(model.named_parameters())
        found = [name for name in names if chosen(name, own[name])]
    else:
        parts = [chosen] if isinstance(chosen, str) else list(chosen)
        for part in parts:
            if not any(_is_in(name, part) for name in names):
                raise ArgumentValueError(
                    f"inner_params: expected names or prefixes of trainable parameters of "
                    f"{type(model).__name__}, got {part!r}; it has {', '.join(names)}."
                )
        found = [name for name in names if any(_is_in(name, part) for part in parts)]
    if not found:
        raise ArgumentValueError(
            f"inner_params: expected at least one parameter that adapts, got none of "
            f"{', '.join(names)}; let the predicate be true for one."
        )
    return found


def _check_inner_params(value: Any) -> Any:
    names = value if isinstance(value, list | tuple) else [value]
    if not (value is None or callable(value) or all(isinstance(name, str) for name in names)):
        raise ArgumentTypeError(
            "inner_params: expected a predicate (name, tensor) -> bool, or names or prefixes, got "
            f"{validation.describe(value)}."
        )
    return value


def _check_rule_options(value: Any) -> dict[str, Any]:
    if value is not None and not isinstance(value, dict):
        raise ArgumentTypeError(f"rule_options: expected a dict, got {validation.describe(value)}.")
    return dict(value or {})


def _check_step_weights(value: Any) -> list[float] | None:
    if value is None:
        return None
    if not isinstance(value, list | tuple):
        raise ArgumentTypeError(
            f"step_weights: expected a list of numbers, got {validation.describe(value)}."
        )
    return [validation.number("step_weights", weight, minimum=0) for weight in value]


def _weighted(weight: float | Tensor, value: Tensor) -> Tensor:
    return (weight.to(value.dtype) if isinstance(weight, Tensor) else weight) * value


def _is_in(name: str, part: str) -> bool:
    return name == part or name.startswith(part + ".")
