"""The inner loop of a module, as a frozen value: learned tensors in, a loss and its gradient out.

A learner (`learner.py`) makes a `ModuleLoop` from its attributes for each call. The attributes are its
options: `LearnerOptions` describes them, and the frozen `LoopOptions` checks them once. Everything that
reaches the graph of the meta-gradient is a method here, from the gradient of a task down to the loss of
one inner step.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple, final, get_args

import torch
from torch import Tensor, nn

from hoglib._core import problem
from hoglib._core.messages import closures, validation
from hoglib._core.modules.swap import Params, swap_parameters
from hoglib._core.problem import EvaluationOptions, Policy
from hoglib._core.substrate.autograd import materialize_grads, without_graph
from hoglib._core.substrate.placement import UNSHARDED, Placement
from hoglib._core.torch_api import pytree, torch_internals
from hoglib._core.torch_api.pytree import Tree
from hoglib._core.torch_api.torch_modes import without_stand_ins
from hoglib.errors import ArgumentTypeError, ArgumentValueError
from hoglib.functional import Criterion, Forward, FunctionalLoss, trainable_params
from hoglib.meta import inner_loop, norms
from hoglib.meta.gradient_transformation import GradientTransformation
from hoglib.meta.inner_loop import InnerSteps, Unrolled, is_truncated, unroll
from hoglib.meta.norms import NormKind
from hoglib.meta.optimizers import resolve_rule
from hoglib.meta.tasks import OverTasks, TaskResult

# a name, a rule, or a function from a learning rate to a rule
UpdateRule = str | GradientTransformation | Callable[[Any], GradientTransformation] | nn.Module
InnerParams = Callable[[str, Tensor], bool] | Sequence[str] | str | None
StepWeights = Sequence[float | Tensor] | None  # of the outer losses after each step


class LearnerOptions(EvaluationOptions, total=False):
    """The keyword options common to :class:`hoglib.MAML`, :class:`~hoglib.meta.Reptile` and
    :class:`~hoglib.meta.IMAML`.

    Args:
        inner_lr: The learning rate of the inner loop; with learn_lr, the initial value of the learned
            rates. Default: 0.01.
        rule: The update rule: "sgd", "momentum", "adam", "adamw", "rmsprop", "adagrad", "adadelta",
            "adamax" or "radam"; a function from a learning rate to a
            `hoglib.meta.GradientTransformation`; or an object with ``init`` and ``update``; MAML learns
            its parameters if it is a module. Default: "sgd".
        rule_options: Keyword arguments for a rule given by name.
        inner_loss: The criterion of the inner loop; MAML and IMAML learn it if it is a module with
            parameters. Default: criterion.
        inner_params: The parameters that adapt: a predicate ``(name, tensor) -> bool``, or names
            and prefixes (ANIL: ``["head"]``). All parameters are meta-learned. Default: all adapt.
        batch_norm: The statistics used by batch norm layers. "by_mode": in train mode the
            batch's statistics, without an update of the running ones, which are used in eval mode.
            "transductive": the batch's in either mode. "per_step" (not with IMAML): the batch's in
            train mode; in eval mode running averages kept for each step. "frozen": the model's running
            statistics in either mode. Default: "by_mode".
        forward: How to call the model, ``forward(model, batch)``. Default: by the parts of the batch.
        stand_ins: Run inside `hoglib.second_order()`, which replaces torch calls without a right second
            derivative by stand-ins. Default: True.
        remat: Blocks of the model to recompute in backward by `hoglib.ops.remat`, instead of keeping
            their intermediate values: True for the repeated blocks of the model, or names or globs
            such as "layers.*". This is about layers, as MAML's ``memory`` is about steps, and may be
            combined with each of its values. With compile, the passes of a block are compiled instead
            of the meta-gradient, once for all equal blocks, and tasks run in turn. Default: False.
    Returns:
        A dict of options, to be passed as ``**options``.
    Example:
        >>> options = hog.meta.LearnerOptions(inner_lr=0.1, rule="adam")
        >>> maml = hog.MAML(nn.Linear(2, 1), F.mse_loss, inner_steps=3, **options)
        >>> maml.inner_lr
        0.1
    """

    inner_lr: float
    rule: UpdateRule
    rule_options: dict[str, Any] | None
    inner_loss: Criterion | None
    inner_params: InnerParams
    batch_norm: NormKind
    forward: Forward | None


EVALUATION = problem.OPTION_NAMES  # names of options for the evaluation of the model
# the learner's own options come first, then EVALUATION
OPTION_NAMES = (*sorted(LearnerOptions.__annotations__, key=EVALUATION.__contains__),)


@dataclass(frozen=True, kw_only=True)
class LoopOptions:
    """The checked options of an inner loop."""

    caller: str  # class name of the learner, for messages
    evaluation: problem.Options  # options for the evaluation of the model, unchecked
    inner_lr: float = 0.01
    inner_steps: int
    rule_options: dict[str, Any] | None = None
    inner_params: InnerParams = None
    batch_norm: str = "by_mode"
    first_order: bool = False
    truncate: int | None = None
    step_weights: Sequence[float] | None = None
    memory: str = "store"
    over_tasks: str = "loop"
    policy: Policy = field(init=False, repr=False)  # `evaluation`, checked

    def __post_init__(self) -> None:
        checked = {
            "inner_lr": validation.positive("inner_lr", self.inner_lr),
            "inner_steps": validation.at_least("inner_steps", self.inner_steps, 1),
            "rule_options": _check_rule_options(self.rule_options),
            "inner_params": _check_inner_params(self.inner_params),
            "batch_norm": validation.choice("batch_norm", self.batch_norm, get_args(NormKind)),
            "first_order": validation.boolean("first_order", self.first_order),
            "truncate": validation.none_or_at_least("truncate", self.truncate, 0),
            "step_weights": _check_step_weights(self.step_weights),
            "memory": validation.choice("memory", self.memory, get_args(inner_loop.Memory)),
            "over_tasks": validation.choice("over_tasks", self.over_tasks, get_args(OverTasks)),
            "policy": Policy.of(self.caller, self.evaluation),
        }
        for name, value in checked.items():
            # frozen after this: options are checked once, here
            object.__setattr__(self, name, value)
        if self.memory == "mixed":
            inner_loop.check_mixed(self.caller, self.policy)
        if self.policy.compiles_blocks and self.over_tasks == "vmap":
            raise ArgumentValueError(
                "MAML: expected over_tasks='loop' or 'auto' with remat= and compile=, got 'vmap', in "
                "which blocks are not compiled. Leave out one of the three."
            )

    def __getitem__(self, name: str) -> Any:
        """An option by name, including the options of `evaluation`."""
        return self.evaluation.get(name) if name in EVALUATION else getattr(self, name)

    def changed(self, name: str, value: object) -> "LoopOptions":
        """A copy with another value of one option."""
        own: dict[str, Any] = {name: value}
        if name in EVALUATION:
            own = {"evaluation": {**self.evaluation, **own}}
        return replace(self, **own)

    def weights_for(self, steps: int) -> StepWeights:
        """The weights of the outer losses after each step; None means the last loss alone."""
        weights = self.step_weights
        if weights is not None and (len(weights) != steps or not any(weights)):
            raise ArgumentValueError(
                f"step_weights: expected {steps} weights, one after each inner step and not all "
                f"of them zero, got {list(weights)}; see `hoglib.meta.multi_step_weights`."
            )
        return weights


def _check_inner_params(value: object) -> Any:
    names = value if isinstance(value, list | tuple) else [value]
    if not (value is None or callable(value) or all(isinstance(name, str) for name in names)):
        raise ArgumentTypeError(
            "inner_params: expected a predicate (name, tensor) -> bool, or names or prefixes, got "
            f"{validation.describe(value)}."
        )
    return value


def _check_rule_options(value: object) -> dict[str, Any]:
    if value is not None and not isinstance(value, dict):
        raise ArgumentTypeError(f"rule_options: expected a dict, got {validation.describe(value)}.")
    return dict(value or {})


def _check_step_weights(value: object) -> list[float] | None:
    if value is None:
        return None
    if not isinstance(value, list | tuple):
        got = validation.describe(value)
        raise ArgumentTypeError(f"step_weights: expected a list of numbers, got {got}.")
    return [validation.number("step_weights", weight, minimum=0) for weight in value]


Granularity = Literal["model", "layer", "parameter", "element"]


class MetaParams(NamedTuple):
    """All learned tensors; each task starts from them."""

    model: Params  # trainable parameters of the model, by name
    modules: Params  # parameters of the learned modules, by name in `ModuleLoop.learned_modules`


@dataclass(frozen=True, eq=False)
class ModuleLoop:
    """Inner steps on a model; see `hoglib.MAML`."""

    options: LoopOptions
    rule: Any  # as given by the user
    criterion_loss: FunctionalLoss  # the outer loss
    inner_criterion_loss: FunctionalLoss
    adapting: tuple[str, ...]  # names of the parameters that adapt
    learned_modules: nn.ModuleDict  # criterion, inner loss, rates and rule, if they are modules
    rates: "LearnedRates | None"  # learned inner learning rates
    statistics: norms.PerStepStatistics | None  # for batch_norm="per_step"
    batch_norms: norms.BatchNorms  # the model's batch norm layers
    strength: float = 0.0  # of the proximal term, strength / 2 |params - start|^2
    placement: Placement = UNSHARDED  # of the parameters over processes

    def meta_params(self) -> MetaParams:
        """The present values of all learned tensors."""
        learned = self.learned_modules.named_parameters()
        model = trainable_params(self.criterion_loss.model)
        return MetaParams(model, {name: p for name, p in learned if p.requires_grad})

    def meta_gradient(
        self, start: MetaParams, support: Tree, query: Tree, weights: StepWeights = None
    ) -> TaskResult:
        """The outer loss of one task and its gradient with respect to all learned tensors."""
        if torch_internals.transforms_active():
            # inside vmap over tasks: each task is differentiated by itself
            outer = partial(self.outer_loss, support=support, query=query, weights=weights)
            grads, (_, (result, _)) = torch.func.grad_and_value(outer, has_aux=True)(start)
            return result._replace(grads=grads)
        leaves, structure = pytree.flatten(start)
        with without_stand_ins():
            own = [leaf.detach().requires_grad_() for leaf in leaves]
        start = pytree.unflatten(own, structure)
        value, (result, _) = self.outer_loss(start, support, query, weights)
        # unhandled: no mode intercepts autograd.grad, and stand-ins see the calls inside backward
        found = torch_internals.gradients([value], own, unhandled=True)
        grads = pytree.unflatten(materialize_grads(found, own), structure)
        return result._replace(value=value.detach(), grads=grads)

    def outer_loss(
        self, start: MetaParams, support: Tree, query: Tree, weights: StepWeights = None
    ) -> tuple[Tensor, tuple[TaskResult, Params]]:
        """The outer loss of one task after the inner loop; and the TaskResult without a gradient, with
        the adapted parameters.

        weights: weights of the outer losses. Default: those in the options.
        """
        steps = self.options.inner_steps
        weights = self.options.weights_for(steps) if weights is None else weights
        found = self.unrolling(start, support, steps, query, weights)()
        with self._record_statistics() as statistics:
            value = self.outer_value(start, found.params, query, steps)
        if weights is not None:
            value = _scale(weights[-1], value)
            value = value if found.outer is None else found.outer + value
        result = TaskResult(value, (), torch.stack(found.losses), [*found.notes, statistics])
        return value, (result, found.params)

    def value(
        self, start: MetaParams, support: Tree, query: Tree, weights: StepWeights = None
    ) -> TaskResult:
        """The TaskResult of one task without a gradient."""
        return self.outer_loss(start, support, query, weights)[1][0]

    def unrolling(
        self, start: MetaParams, support: Any, steps: int, query: Any = None, weights: Any = None
    ) -> Callable[[], Unrolled]:
        """A function that runs this many steps; with weights it also sums the weighted outer losses of
        all steps but the last."""

        def loss(i: int, params: Params, constants: Any) -> tuple[Tensor, Any]:
            start, support, _ = constants
            with self._record_statistics() as statistics:
                return self.inner_value(start, params, support, i), statistics

        def outer(i: int, params: Params, constants: Any) -> Tensor | None:
            start, _, query = constants
            weight: float | Tensor = 0.0 if weights is None or i + 1 == steps else weights[i]
            if not isinstance(weight, Tensor) and weight == 0:
                return None
            with inner_loop.refuse_saved_tensor_hooks():
                value = self.outer_value(start, params, query, i + 1)
            return _scale(weight, value)

        # without learned parts the rule is equal in all steps: make it once
        fixed_rule = None if start.modules else self.rule_at(0, start)
        options = self.options
        rule = lambda i, constants: fixed_rule or self.rule_at(i, constants[0])  # noqa: E731
        constant = lambda i: options.first_order or is_truncated(i, steps, options.truncate)  # noqa: E731
        inner = InnerSteps(loss, rule, constant, None if weights is None else outer)
        with without_stand_ins():
            # copies: no step may write to the initial parameters, which all tasks share
            params = {name: start.model[name].clone() for name in self.adapting}
        if options.memory == "store":
            return partial(unroll, inner, steps, params, (start, support, query), "store")
        # a recomputation keeps all its inputs alive: leave out initial values of adapting parameters
        rest = {n: p for n, p in start.model.items() if n not in params}
        modules = [*self.criterion_loss.model.modules(), *self.learned_modules.modules()]
        constants = start._replace(model=rest), support, query
        criteria = [x.user_criterion for x in (self.criterion_loss, self.inner_criterion_loss)]
        inner = inner._replace(generators=closures.generators(*criteria), modes_of=modules)
        return partial(unroll, inner, steps, params, constants, options.memory)

    def inner_value(self, start: MetaParams, params: Params, support: Tree, step: int) -> Tensor:
        """The loss of an inner step."""
        value = self._value(self.inner_criterion_loss, start, params, support, step)
        if self.strength:
            offset = {name: p - start.model[name] for name, p in params.items()}
            value = value + self.strength / 2 * pytree.dot(offset, offset).real
        return value

    def outer_value(self, start: MetaParams, params: Params, query: Tree, step: int) -> Tensor:
        """The loss of the query set at the parameters after `step` steps."""
        return self._value(self.criterion_loss, start, params, query, step)

    def _value(
        self, loss: FunctionalLoss, start: MetaParams, params: Params, batch: Any, step: int
    ) -> Tensor:
        """A loss; for sharded parameters the mean over the processes."""
        loss = self._at_step(loss, step)
        with self._with_learned(start):
            whole = self.placement.gather_named({**start.model, **params})
            # the model may call x.requires_grad_(): on a tensor shared by all steps, the derivative
            # would then go through earlier steps, too
            plain = type(batch) is tuple and all(isinstance(x, Tensor) for x in batch)
            with without_stand_ins():
                own = tuple(map(_alias, batch)) if plain else pytree.map_tensors(_alias, batch)
            # every process gets the mean of all, so that all take equal steps
            value = partial(self.placement.mean_of, lambda: loss(whole, own))
            # if the model differentiates inside, it does so for a value without a graph, too
            return value() if torch.is_grad_enabled() else without_graph(value)

    def call(self, params: Params, *args: Any, **kwargs: Any) -> Any:
        """The model's output at the parameters returned by `adapt`."""
        loss = self._at_step(self.criterion_loss, self.options.inner_steps)
        return loss.call(self.placement.gather_named(params), *args, **kwargs)

    def rule_at(self, i: int, start: MetaParams) -> GradientTransformation:
        """The update rule of step i, with learned rates and the rule's own learned parameters."""
        lr, options = self.options.inner_lr, self.options.rule_options or {}
        if not start.modules:
            return resolve_rule(self.rule, lr, options)
        with self._with_learned(start):
            rates = lr if self.rates is None else self.rates(self.adapting, i)
            rule = resolve_rule(self.rule, rates, options)
        if not isinstance(self.rule, nn.Module):
            return rule

        def with_learned(function: Callable[..., Any], *args: Any) -> Any:
            with self._with_learned(start):
                return function(*args)

        # init and update run after the swap above has ended: swap the learned parameters in again
        init, update = (partial(with_learned, function) for function in rule)
        return GradientTransformation(init, update)

    def _at_step(self, loss: FunctionalLoss, step: int) -> FunctionalLoss:
        """A loss with the batch norm policy for the parameters after `step` steps."""
        if self.statistics is None:
            return loss
        return loss.with_norm_policy(self.statistics.at(step, self.batch_norms))

    def _with_learned(self, start: MetaParams) -> AbstractContextManager[None]:
        """A context: inside, the learned modules hold the parameters of `start`."""
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

    params: the parameters that adapt. lr: the initial value of every rate. granularity: one rate for
    the "model", for each "layer" (a module), "parameter" (a tensor) or "element". steps: also one rate
    for each of this many steps; later steps use the last rate.

    References:
        Li et al., Meta-SGD, 2017, eq. 2 ("element"); Antoniou, Edwards and Storkey, How to train
        your MAML, 2019, section 4, LSLR ("parameter" or "layer" with steps).
    """

    def __init__(self, params: Params, lr: float, *, granularity: str, steps: int | None) -> None:
        super().__init__()
        self.granularity = validation.choice("learn_lr", granularity, get_args(Granularity))
        self.steps = steps
        lr = validation.positive("inner_lr", lr)
        self.values = nn.ParameterDict()  # the rates, by `_key`
        for name, param in params.items():
            key = self._key(name)
            if key not in self.values:
                shape = [] if steps is None else [steps]
                shape += param.shape if granularity == "element" else ()
                rate = torch.full(shape, lr, dtype=param.dtype, device=param.device)
                self.values[key] = nn.Parameter(rate)

    def forward(self, names: Iterable[str], step: int) -> dict[str, Tensor]:
        """The rates of these parameters at a step, counted from 0."""
        # with more steps than rates, as in evaluation, use the last rate
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
        """The key of a parameter's rate; a ParameterDict allows no dots in keys."""
        if self.granularity == "model":
            return "model"
        if self.granularity == "layer":
            name = name.rpartition(".")[0] or "model"
        return name.replace(".", "/")

    def extra_repr(self) -> str:
        return f"granularity={self.granularity!r}, steps={self.steps}"


def names_that_adapt(model: nn.Module, names: Iterable[str], chosen: InnerParams) -> list[str]:
    """The names of the trainable parameters that adapt. chosen: `inner_params`."""
    names = list(names)
    if chosen is None:
        return names
    own = dict(model.named_parameters(remove_duplicate=False))
    if callable(chosen):
        found = [name for name in names if chosen(name, own[name])]
    else:
        parts = [chosen] if isinstance(chosen, str) else list(chosen)
        of = {part: {id(p) for name, p in own.items() if _is_in(name, part)} for part in parts}
        for part in parts:
            if not any(id(own[name]) in of[part] for name in names):
                raise ArgumentValueError(
                    f"inner_params: expected names or prefixes of trainable parameters of "
                    f"{type(model).__name__}, got {part!r}; it has {', '.join(names)}."
                )
        found = [name for name in names if any(id(own[name]) in tied for tied in of.values())]
    if not found:
        raise ArgumentValueError(
            f"inner_params: expected at least one parameter that adapts, got none of "
            f"{', '.join(names)}; let the predicate be true for one."
        )
    return found


def _scale(weight: float | Tensor, value: Tensor) -> Tensor:
    return (weight.to(value.dtype) if isinstance(weight, Tensor) else weight) * value


def _is_in(name: str, part: str) -> bool:
    return name == part or name.startswith(part + ".")


def _alias(x: Tensor) -> Tensor:
    """A detached alias: requires_grad_() in the model must not leak into other steps."""
    return x if x.requires_grad else x.detach()
