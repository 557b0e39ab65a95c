"""What all learners share: the loss over tasks of an inner loop, and the options that may change."""

from abc import ABC, abstractmethod
from dataclasses import replace
from functools import partial
from typing import Any, Generic, TypeVar, final

import torch
from torch import Tensor, nn

from hoglib._core import pytree, validation
from hoglib._core.autograd import clone_inference_tensors, outside_inference_mode, with_gradients
from hoglib._core.blocks import Remat, find_blocks
from hoglib._core.problem import Policy
from hoglib._core.sharding import Placement, Sharding
from hoglib._core.source_location import warn
from hoglib._core.swap import Params
from hoglib.errors import ArgumentValueError
from hoglib.functional import (
    Forward,
    FunctionalLoss,
    check_instance,
    functional_loss,
    trainable_params,
)
from hoglib.meta import checks, norms
from hoglib.meta import tasks as task_sets
from hoglib.meta.inner_loop import RECOMPUTES
from hoglib.meta.module_loop import (
    InnerParams,
    LearnedRates,
    LoopOptions,
    MetaParams,
    ModuleLoop,
    names_that_adapt,
)
from hoglib.meta.optimizers import resolve_rule, rule_name
from hoglib.meta.tasks import TaskResult, TaskRunner
from hoglib.ring import ring

T = TypeVar("T")

NOT_TWICE = (
    "{what}.loss(tasks): expected backward() without create_graph, got create_graph=True; the "
    "gradients of the tasks are computed before backward and have no graph. For derivatives of "
    "the meta-gradient write the loss with `maml.adapt(support)` and `maml(x, params=adapted)`, "
    "which are differentiable to any order."
)
RECOMPUTES_LATER = (
    "maml(x, params=...): expected a model whose graph keeps its tensors, got one with "
    "saved-tensor hooks, as torch.utils.checkpoint has: backward would recompute it with the "
    "model's own parameters instead of these. Use `maml.loss(tasks)`, or call it under "
    "torch.no_grad()."
)


@final
class Option(Generic[T]):
    """An attribute of a learner that is a field of a frozen dataclass, checked whenever it is set."""

    def __init__(self, holder: str) -> None:
        self._holder = holder

    def __set_name__(self, owner: Any, name: str) -> None:
        self._name = name

    def __get__(self, learner: Any, owner: Any = None) -> T:
        value: Any = self
        if learner is not None:
            value = getattr(getattr(learner, self._holder), self._name)
        found: T = value
        return found

    def __set__(self, learner: Any, value: T) -> None:
        options = getattr(learner, self._holder)
        changed = replace(options, **{self._name: value})
        learner._check_change(self._name, getattr(changed, self._name))
        setattr(learner, self._holder, changed)


class Learner(nn.Module, ABC):
    r"""What `MAML`, `Reptile` and `IMAML` have in common: an inner loop on a model (abstract).

    ``loss(tasks)`` is the meta-loss, ``adapt(support)`` gives the parameters for one task, and a
    call with ``params=`` runs the model with them. Options of the inner loop are attributes, which
    may be changed between steps and are checked when they are set.

    Args:
        model: The module, which is called with other parameters and never changed.
        criterion: The outer loss, ``criterion(outputs, targets)``, or a functional loss of the model,
            such as `hoglib.language_model_loss(model)`; None if the model computes its own loss.
        options: The checked options of the inner loop.
        rule: The update rule: a name, a function of the learning rate, or an object with init and
            update.
        inner_loss: The criterion of the inner loop. Default: criterion.
        forward: How the model is called, ``forward(model, batch)``.
        over_tasks: "auto", "vmap" or "loop".

    Example:
        >>> maml = hog.MAML(nn.Linear(2, 1), F.mse_loss)
        >>> isinstance(maml, hog.meta.Learner)
        True
    """

    inner_lr = Option[float]("_options")
    inner_steps = Option[int]("_options")
    rule_options = Option[dict[str, Any]]("_options")
    inner_params = Option[InnerParams]("_options")
    batch_norm = Option[str]("_options")
    stand_ins = Option[bool]("_options")
    remat = Option[Remat]("_options")

    def __init__(
        self, model: nn.Module, criterion: Any, options: LoopOptions, *, rule: Any,
        inner_loss: Any, forward: Forward | None, over_tasks: str = "loop",
    ) -> None:  # fmt: skip
        super().__init__()
        functional_loss(model, criterion, forward=forward)
        if options.remat is not False:
            find_blocks(options.remat, model)  # raises where there are none
        if inner_loss is not None:
            check_instance("inner_loss", inner_loss)
        params = trainable_params(model)
        resolve_rule(rule, options.inner_lr, options.rule_options or {})
        names_that_adapt(model, params, options.inner_params)
        options.weights_for(options.inner_steps)
        self.over_tasks = over_tasks
        self.model = model
        self.criterion = criterion
        self.inner_loss = inner_loss
        self.rule = rule
        self.rates: LearnedRates | None = None
        self.statistics: norms.PerStepStatistics | None = None
        if options.batch_norm == "per_step":
            self.statistics = norms.PerStepStatistics(model, options.inner_steps)
        self._options = options
        self._forward = forward
        self._losses: dict[str, FunctionalLoss] = {}
        self._vmappable = True  # until a model fails
        self._recomputes = False  # backward of the model does, as with torch.utils.checkpoint
        self._checked_model: int | None = None
        self._trained_on_batches = False  # batch norms were in train mode, in a loss with gradients

    def forward(self, *args: Any, params: Params | None = None, **kwargs: Any) -> Any:
        """Run the model, with other parameters in the place of its own.

        Args:
            args: Positional arguments of the model.
            params: Parameters by name, as `adapt` returns them. Default: the model's own.
            kwargs: Keyword arguments of the model.

        Returns:
            The output of the model.
        """
        if params is None:
            return self.model(*args, **kwargs)
        loop = self._loop()
        placement = checks.placement_of_params(params)
        if placement.is_sharded:
            checks.refuse_graph(f"{type(self).__name__}(params=...)")
            loop, params = replace(loop, placement=placement), checks.shards_of(params, placement)
        with loop.keeps_graph(RECOMPUTES_LATER):
            return loop.call(params, *args, **kwargs)

    def adapt(
        self, support: Any, *, params: Params | None = None, steps: int | None = None
    ) -> Params:
        """Take the inner steps on one task.

        The result is differentiable with respect to the initial parameters where grad mode is on.
        It works under no_grad, in inference mode and under vmap.

        Args:
            support: The support set of one task, a batch such as (x, y).
            params: The initial parameters by name. Default: the model's trainable parameters.
            steps: The number of steps, 0 or more. Default: inner_steps.

        Returns:
            The parameters after the steps, by name; those that do not adapt are the initial ones.
        """
        task_sets.check_batch("support", support)
        count = self.inner_steps if steps is None else validation.at_least("steps", steps, 0)
        loop = self._loop(params)
        start = loop.meta_params()
        if params is not None:
            start = start._replace(model=params)
        placement = checks.placement_of_params(start.model)
        if placement.is_sharded:
            self._refuse_settings(loop, start)
            checks.refuse_graph(f"{type(self).__name__}.adapt")
        start = start._replace(model=checks.shards_of(start.model, placement))
        with self._ring(self.stand_ins, placement) as blocks:
            loop = replace(loop, placement=placement.defer(self.model, blocks))
            adapted = loop.unroll(start, clone_inference_tensors(support), count).params
        return checks.wrapped({**start.model, **adapted}, placement)

    def _ring(self, stand_ins: bool, placement: Placement) -> ring:
        """What stands around the inner loop."""
        policy = Policy(
            type(self).__name__, stand_ins=stand_ins, remat=self.remat, backend=self._block_backend
        )
        return ring(
            policy, self.model, first_order=self._takes_first_derivatives,
            gradients=outside_inference_mode, placement=placement,
        )  # fmt: skip

    def loss(self, tasks: Any) -> Tensor:
        """Compute the meta-loss over tasks; its `backward()` fills the `.grad` of all that is learned.

        The gradients of all tasks are computed here, and handed on by backward. So the result
        cannot be differentiated twice, nor with respect to the tasks: both raise. Where grad mode
        is off, only the value is computed.

        Args:
            tasks: A tuple (support, query) of stacks, whose tensors have a leading dimension of
                tasks, for instance (x [B, K, ...], y [B, K, ...]); or a list of tasks, each
                (support, query), which may differ in size. A batch is anything that
                `hoglib.functional_loss` takes. Two lists of two tensors, as a DataLoader collates
                them, are stacks.

        Returns:
            The mean outer loss, a scalar.

        Raises:
            ArgumentValueError: for an empty support set or sizes that do not match.
            NonFiniteError: for an inner or outer loss that is not finite, naming task and step.
        """
        what = type(self).__name__
        validation.refuse_transforms(
            f"{what}.loss(tasks)",
            "write the loss with `maml.adapt(support)` and `maml(x, params=adapted)`, which run inside "
            "of any.",
        )
        tasks = task_sets.unpack(tasks)
        wanted = torch.is_grad_enabled()
        loop = self._loop()
        own = loop.meta_params()
        placement = checks.placement_of_params(own.model)
        with placement.translate_errors(what):
            if isinstance(placement, Sharding):
                self._refuse_settings(loop, own)
                count = checks.check_together(what, placement, own.model, tasks, self.inner_steps)
            else:
                count = task_sets.check_tasks(tasks)
            with task_sets.stacks_in_errors(what, tasks, count):
                return self._loss(what, loop, own, tasks, wanted, placement)

    def _loss(
        self, what: str, loop: ModuleLoop, own: MetaParams, tasks: Any, wanted: bool,
        placement: Placement,
    ) -> Tensor:  # fmt: skip
        """The meta-loss over tasks, which were checked."""
        with self._ring(False, placement) as blocks:  # stand-ins are entered task by task
            start = pytree.map(Tensor.detach, own)
            start = start._replace(model=checks.shards_of(start.model, placement))
            loop = replace(loop, placement=placement.defer(self.model, blocks))
            tasks = clone_inference_tensors(tasks)
            if wanted and self._checked_model != id(self.model):
                learned: Params = dict(self.named_parameters())
                checks.check_derivatives(what, loop, start, task_sets.first(tasks), learned)
                self._checked_model = id(self.model)
            try:
                found = self._run(loop, start, tasks, wanted)
            except RuntimeError as error:
                if self._recomputes or RECOMPUTES not in str(error):
                    raise
                self._recomputes = True
                again = replace(self._loop(), placement=loop.placement)
                found = self._run(again, start, tasks, wanted)
        checks.check_finite(found)
        if not wanted:
            return found.value.mean()
        self._after_loss(loop, found)
        grads = [found.grads[i][name] for i, part in enumerate(own) for name in part]
        grads = placement.wrap(grads)
        tensors = [*own.model.values(), *own.modules.values()]
        return with_gradients(found.value.mean(), grads, tensors, NOT_TWICE.format(what=what))

    @property
    def _takes_first_derivatives(self) -> bool:
        """Whether it takes no second derivatives."""
        return self._options.first_order

    def _run(self, loop: ModuleLoop, start: MetaParams, tasks: Any, wanted: bool) -> TaskResult:
        runner, what = self._runner(loop, start, wanted), type(self).__name__
        shared = loop.placement.is_sharded or self._block_backend
        how = "loop" if shared else self.over_tasks
        found, self._vmappable = task_sets.run_tasks(
            runner, tasks, what, start.model, how, self._vmappable
        )
        return found

    def _refuse_settings(self, loop: ModuleLoop, start: MetaParams) -> None:
        """Raise for settings that parameters which processes share do not go with."""
        compiled = getattr(self, "compiled", False)
        checks.refuse_settings(type(self).__name__, loop, start, self.over_tasks, compiled)

    @property
    def _block_backend(self) -> str:
        """What compiles the blocks that are recomputed; "" for nothing."""
        return ""

    def _runner(self, loop: ModuleLoop, start: MetaParams, wanted: bool) -> TaskRunner:
        """How tasks are run: operation by operation."""
        # for a model or a rule that works in place; of what adapts, each task takes a copy of its own
        model = {n: p if n in loop.adapting else p.clone() for n, p in start.model.items()}
        start = MetaParams(model, pytree.map(Tensor.clone, start.modules))
        of_task = partial(self._task_result, loop, start, wanted)
        return task_sets.eager_runner(of_task, loop.options.stand_ins)

    @abstractmethod
    def _task_result(
        self, loop: ModuleLoop, start: MetaParams, wanted: bool, support: Any, query: Any
    ) -> TaskResult:
        """The outer loss of one task and, if wanted, its gradients."""

    def _after_loss(self, loop: ModuleLoop, found: TaskResult) -> None:
        """Keep what a training step leaves: the running statistics of each step."""
        trained = any(layer.training for layer in loop.batch_norms.values())
        self._trained_on_batches = self._trained_on_batches or trained
        if self.statistics is not None:
            self.statistics.update(found.statistics, loop.batch_norms)

    def _loop(self, params: Params | None = None) -> ModuleLoop:
        """The inner loop of the model as the attributes are now, from its own parameters or others."""
        batch_norms = norms.find_batch_norms(self.model)
        self._warn_of_initial_statistics(batch_norms)
        options = self._options
        if self._recomputes:
            options = replace(options, memory="remat")
        learned = nn.ModuleDict()
        for name in ("criterion", "inner_loss", "rates", "rule"):
            if isinstance(part := getattr(self, name), nn.Module):
                learned[name] = part
        outer = inner = self._with_policy(self.objective)
        if self.inner_loss is not None:
            inner = self._with_policy(self.inner_objective)
        given = trainable_params(self.model) if params is None else params
        names = names_that_adapt(self.model, given, options.inner_params)
        return ModuleLoop(
            options=options, rule=self.rule, criterion_loss=outer, inner_criterion_loss=inner,
            adapting=tuple(names), learned_modules=learned, rates=self.rates,
            statistics=self.statistics, batch_norms=batch_norms,
        )  # fmt: skip

    def _with_policy(self, loss: FunctionalLoss) -> FunctionalLoss:
        policy = norms.FIXED_POLICIES.get(self.batch_norm)  # "per_step" has one for each step
        return loss if policy is None else loss.with_norm_policy(policy)

    @property
    def objective(self) -> FunctionalLoss:
        """The outer loss of the model as a function of parameters and batch."""
        return self._functional_loss("outer", self.criterion)

    @property
    def inner_objective(self) -> FunctionalLoss:
        """The loss of the inner loop as a function of parameters and batch."""
        if self.inner_loss is None:
            return self.objective
        return self._functional_loss("inner", self.inner_loss)

    def _functional_loss(self, which: str, criterion: Any) -> FunctionalLoss:
        known = self._losses.get(which)
        if known is None or known.model is not self.model or known.user_criterion is not criterion:
            known = functional_loss(self.model, criterion, forward=self._forward)
            self._losses[which] = known
        return known

    @property
    def over_tasks(self) -> str:
        """How tasks are run: "auto", "vmap" or "loop"."""
        return self._over_tasks

    @over_tasks.setter
    def over_tasks(self, value: str) -> None:
        self._over_tasks = validation.one_of("over_tasks", value, task_sets.OVER_TASKS)
        self._vmappable = True

    def _check_change(self, name: str, value: Any) -> None:
        """Raise for a change of an option that learned parameters or statistics were made from."""
        if name == "inner_lr" and self.rates is not None:
            raise ArgumentValueError(
                "inner_lr: expected to stay as it was, since the learned rates started from it, got "
                "a new one; change `learner.rates` instead."
            )
        if name == "batch_norm" and (value == "per_step") != (self.statistics is not None):
            raise ArgumentValueError(
                "batch_norm: expected 'per_step' from the beginning or not at all, since it has "
                "statistics of its own; make a new learner."
            )

    def _warn_of_initial_statistics(self, batch_norms: norms.BatchNorms) -> None:
        if self.batch_norm != "by_mode" or not self._trained_on_batches:
            return
        for name, layer in batch_norms.items():
            if not layer.training and layer.num_batches_tracked == 0:
                self._trained_on_batches = False  # warn once
                warn(
                    f"batch_norm='by_mode': {name} is in eval mode and normalises by running "
                    "statistics that are those of its initialisation: inner loops update none, "
                    "and were trained by the statistics of their batches. Use "
                    "batch_norm='transductive' for those in eval mode too, or 'per_step'."
                )
                return

    def extra_repr(self) -> str:
        """The options that `repr` shows."""
        return (
            f"inner_lr={self.inner_lr}, inner_steps={self.inner_steps}, rule={rule_name(self.rule)}, "
            f"over_tasks={self.over_tasks!r}"
        )
