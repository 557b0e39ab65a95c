"""The base of all learners: the loss over tasks of an inner loop, its checks, and changeable options.

With compile= the meta-gradient, with all inner steps and their derivatives, is one graph, for a single
task or for all tasks.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy
from dataclasses import replace
from functools import partial
from numbers import Real
from typing import Any, Generic, TypeVar, final

import torch
from torch import Tensor, nn

from hoglib._core.messages import validation
from hoglib._core.modules.module_kinds import NORMS
from hoglib._core.modules.state import preserve_random_state
from hoglib._core.modules.swap import Params, swap_parameters
from hoglib._core.numerics.finite_differences import fixed_random_numbers
from hoglib._core.problem import Policy, check_option_names
from hoglib._core.remat.blocks import Remat
from hoglib._core.runtime.device_reads import read_late
from hoglib._core.runtime.source_location import warn, warn_once
from hoglib._core.substrate import autograd
from hoglib._core.substrate.fingerprint import checksum_of_call
from hoglib._core.substrate.gradient_graph import depends_on_any, graph_summary
from hoglib._core.substrate.placement import Placement, Sharding, placement_of, refuse_sharded
from hoglib._core.torch_api import pytree
from hoglib._core.torch_api.pytree import Tree
from hoglib._core.torch_api.torch_modes import value_checks_on, without_stand_ins
from hoglib.capture.api import Compiled
from hoglib.capture.capturing import CacheSlot
from hoglib.capture.within import call_traced, record_call, run_uncompiled, when_compiled
from hoglib.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    NoSecondDerivative,
    UnsupportedError,
)
from hoglib.functional import (
    BY_ID,
    FunctionalLoss,
    check_instance,
    functional_loss,
    trainable_params,
)
from hoglib.meta import module_loop, norms
from hoglib.meta import tasks as task_sets
from hoglib.meta.inner_loop import RECOMPUTES, UNUSED, check_inner_losses, refuse_saved_tensor_hooks
from hoglib.meta.module_loop import LearnedRates, LoopOptions, MetaParams, ModuleLoop
from hoglib.meta.optimizers import resolve_rule, rule_name
from hoglib.meta.tasks import Task, TaskFunction, TaskResult, check_tasks, map_tasks
from hoglib.ring import ring

# Defaults of options that a subclass does not set.
DEFAULTS: dict[str, Any] = {
    "rule": "sgd",
    "inner_loss": None,
    "forward": None,
    "stand_ins": True,
    "remat": False,
    "compile": False,
}
T = TypeVar("T")

NOT_TWICE = (
    "{what}.loss(tasks): expected backward() without create_graph, got create_graph=True; the "
    "gradients of the tasks are computed before backward and have no graph. For derivatives of "
    "the meta-gradient write the loss with `maml.adapt(support)` and `maml(x, params=adapted)`, "
    "which are differentiable to any order."
)
RECOMPUTES_LATER = (
    "maml(x, params=...): expected a model whose graph keeps its tensors, got one with saved-tensor "
    "hooks, as torch.utils.checkpoint has: backward would recompute it with the model's own parameters "
    "instead of these. Use `maml.loss(tasks)`, or call it under torch.no_grad()."
)


@final
class Option(Generic[T]):
    """An attribute of a learner that holds one of its options, and is checked whenever it is set."""

    def __set_name__(self, owner: object, name: str) -> None:
        # nn.Module has a method `compile`, so this option's attribute is called `compiled`
        self._name = {"compiled": "compile"}.get(name, name)

    def __get__(self, learner: Any, owner: object = None) -> T:
        return self if learner is None else learner._options[self._name]  # type: ignore[return-value]

    def __set__(self, learner: Any, value: T) -> None:
        changed = learner._options.changed(self._name, value)
        learner._check_change(self._name, changed[self._name])
        learner._options = changed


def _shapes(tree: Tree) -> list[torch.Size]:
    return [x.shape for x in pytree.tensors(tree)]


class Learner(nn.Module, ABC):
    r"""Base of `MAML`, `Reptile` and `IMAML`: an inner loop on a model (abstract).

    ``loss(tasks)`` is the meta-loss, ``adapt(support)`` gives the parameters for one task, and a
    call with ``params=`` runs the model with them. Options of the inner loop are attributes, which
    may be changed between steps and are checked when they are set.

    Args:
        model: The module, which is called with other parameters and never changed.
        criterion: The outer loss, ``criterion(outputs, targets)``, or a functional loss of the model,
            such as `hoglib.language_model_loss(model)`; None if the model computes its own loss.
        options: The options of :class:`~hoglib.meta.LearnerOptions`.
        own: Further options of the subclass.

    Example:
        >>> maml = hog.MAML(nn.Linear(2, 1), F.mse_loss)
        >>> isinstance(maml, hog.meta.Learner)
        True
    """

    inner_lr = Option[float]()
    inner_steps = Option[int]()
    rule_options = Option[dict[str, Any]]()
    inner_params = Option[module_loop.InnerParams]()
    batch_norm = Option[norms.NormKind]()
    stand_ins = Option[bool]()
    remat = Option[Remat]()
    over_tasks = Option[task_sets.OverTasks]()
    _traceable = True  # torch.compile can trace the loss

    def __init__(self, model: nn.Module, criterion: Any, options: Any, **own: Any) -> None:
        super().__init__()
        check_option_names(type(self).__name__, options, module_loop.OPTION_NAMES)
        given = {**DEFAULTS, **own, **options}
        rule, inner_loss, forward = (given.pop(name) for name in ("rule", "inner_loss", "forward"))
        evaluation: Any = {name: given.pop(name) for name in module_loop.EVALUATION}
        checked = LoopOptions(caller=type(self).__name__, evaluation=evaluation, **given)
        # Construct these objects once here, so that wrong arguments raise now. They are constructed
        # again for each call, because attributes may change.
        functional_loss(model, criterion, forward=forward)
        checked.policy.check_blocks(model)
        if inner_loss is not None:
            check_instance("inner_loss", inner_loss)
        resolve_rule(rule, checked.inner_lr, checked.rule_options or {})
        module_loop.names_that_adapt(model, trainable_params(model), checked.inner_params)
        checked.weights_for(checked.inner_steps)
        self.model, self.criterion, self.inner_loss, self.rule = model, criterion, inner_loss, rule
        self.rates: LearnedRates | None = None  # learned inner learning rates
        self.statistics: norms.PerStepStatistics | None = None  # for batch_norm="per_step"
        if checked.batch_norm == "per_step":
            self.statistics = norms.PerStepStatistics(model, checked.inner_steps)
        self._options, self._forward = checked, forward
        self._losses: dict[str, FunctionalLoss] = {}  # cache of `objective` and `inner_objective`
        _ = self.objective, self.inner_objective  # fill the cache: torch.compile cannot
        # a graph of torch.compile cannot hold the learner: it refers to the learner by its id
        BY_ID[id(self)] = self
        self._vmappable = True  # vmap has not failed yet
        self._recomputes = False  # the model recomputes in backward, as with torch.utils.checkpoint
        self._checked_model: int | None = None  # id of the model that `check_derivatives` passed
        self._trained_on_batches = False  # a loss with gradients ran with batch norms in train mode

    def __setstate__(self, state: object) -> None:
        super().__setstate__(state)
        # a copied or unpickled learner has a new id
        BY_ID[id(self)] = self

    def forward(self, *args: Any, params: Params | None = None, **kwargs: Any) -> Any:
        """Run the model, optionally with other parameters than its own.

        Args:
            args: Positional arguments of the model.
            params: Parameters by name, as `adapt` returns them. Default: the model's own.
            kwargs: Keyword arguments of the model.

        Returns:
            The output of the model.
        """
        if params is None:
            return self.model(*args, **kwargs)
        if torch.compiler.is_dynamo_compiling():
            return self.objective.call(params, *args, **kwargs)
        placement = placement_of([*params.values()], lambda: [*params])
        refuse_graph(f"{type(self).__name__}(params=...)", placement)
        with refuse_saved_tensor_hooks(RECOMPUTES_LATER):
            loop = replace(self._loop(), placement=placement)
            return loop.call(map_params(params, placement.local), *args, **kwargs)

    @when_compiled(run_uncompiled)
    @validation.explain_arguments
    def adapt(
        self, support: Tree, *, params: Params | None = None, steps: int | None = None
    ) -> Params:
        """Take the inner steps on one task.

        If grad mode is on, the result is differentiable with respect to the initial parameters.
        It works under no_grad, in inference mode and under vmap.

        Args:
            support: The support set of one task, a batch such as (x, y).
            params: The initial parameters by name. Default: the model's trainable parameters.
            steps: The number of steps, 0 or more. Default: inner_steps.

        Returns:
            The parameters after the steps, by name; parameters that do not adapt keep their values.
        """
        task_sets.check_batch("support", support)
        count = self.inner_steps if steps is None else validation.at_least("steps", steps, 0)
        loop = self._loop(params)
        start = loop.meta_params()
        if params is not None:
            start = start._replace(model=params)
        placement, start = self._placed(loop, start)
        refuse_graph(f"{type(self).__name__}.adapt", placement)
        with self._ring(loop, placement) as blocks:
            loop = replace(loop, placement=placement.defer(self.model, blocks))
            support = autograd.clone_inference_tensors(support)
            adapted = loop.unrolling(start, support, count)().params
        return map_params({**start.model, **adapted}, placement.wrap)

    def _placed(self, loop: ModuleLoop, start: MetaParams) -> tuple[Placement, MetaParams]:
        """The placement of the parameters over processes, and the local parts of the parameters."""
        placement = placement_of([*start.model.values()], lambda: [*start.model])
        if placement.is_sharded:
            refuse_settings(type(self).__name__, loop, start)
        return placement, start._replace(model=map_params(start.model, placement.local))

    def _ring(self, loop: ModuleLoop, placement: Placement, *, of_tasks: bool = False) -> ring:
        """The ring around the inner loop. of_tasks: a captured graph enters the stand-ins itself."""
        policy = loop.options.policy
        if of_tasks and policy.one_graph:
            policy = policy._replace(stand_ins=False)
        around: Any = {"gradients": autograd.outside_inference_mode, "placement": placement}
        # IMAML's steps are of first order, but its minimum is differentiated twice
        first_order = loop.options.first_order and not loop.strength
        return ring(policy, self.model, first_order=first_order, **around)

    @when_compiled(lambda loss, learner, tasks, *more: learner._traced_loss(loss, tasks, *more))
    def loss(self, tasks: object, *more: Any) -> Tensor:
        """Compute the meta-loss over tasks. `backward()` fills the `.grad` of all learned tensors.

        The gradients of all tasks are computed here, and backward only hands them on. So the result
        cannot be differentiated twice, nor with respect to the tasks: both raise. If grad mode is off,
        only the value is computed.

        Args:
            tasks: One task, ``[(support, query)]``; or a list of tasks, each (support, query), which
                may differ in size; or a tuple (support, query) of stacks: tensors with a leading
                dimension of tasks, for instance (x [B, K, ...], y [B, K, ...]). A batch is anything
                that `hoglib.functional_loss` takes. Two lists of two tensors, as a DataLoader collates
                them, are stacks.
            *more: Nothing; two arguments support and query are refused.

        Returns:
            The mean outer loss, a scalar.

        Raises:
            ArgumentValueError: for an empty support set or sizes that do not match.
            NonFiniteError: for an infinite or NaN inner or outer loss, naming task and step; on a
                device at the next call.
        """
        what = type(self).__name__
        if more:
            raise ArgumentTypeError(
                f"{what}.loss: expected tasks, got {1 + len(more)} arguments"
                + validation.as_one("tasks", more)
            )
        validation.refuse_transforms(
            f"{what}.loss(tasks)",
            "write the loss with `maml.adapt(support)` and `maml(x, params=adapted)`, which run inside "
            "of any.",
        )
        tasks, wanted = task_sets.unpack(tasks), torch.is_grad_enabled()
        loop = self._loop()
        own = loop.meta_params()
        # detached: task gradients are computed below, and `with_gradients` attaches them to `own`
        placement, start = self._placed(loop, pytree.map(Tensor.detach, own))
        with self._ring(loop, placement, of_tasks=True) as blocks:
            with without_stand_ins():  # reading attributes of tensors is slower with them
                count = check_together(what, placement, start.model, tasks, loop)
            with task_sets.stacks_in_errors(what, tasks, count):
                tasks = autograd.clone_inference_tensors(tasks)
                loop = replace(loop, placement=placement.defer(self.model, blocks))
                # once for each model, because the check evaluates both losses
                if wanted and self._checked_model != id(self.model):
                    learned: Params = dict(self.named_parameters())
                    check_derivatives(what, loop, start, task_sets.first_task(tasks), learned)
                    self._checked_model = id(self.model)
                try:
                    found = self._run(loop, start, tasks, wanted)
                except RuntimeError as error:
                    # The model recomputes itself in backward, when it holds other parameters. From
                    # now on recompute whole steps, which put the parameters back into the model.
                    if self._recomputes or RECOMPUTES not in str(error):
                        raise
                    self._recomputes = True
                    loop = replace(loop, options=replace(loop.options, memory="remat"))
                    found = self._run(loop, start, tasks, wanted)
        check_finite(found)
        if not wanted:
            return found.value.mean()
        self._after_loss(loop, found)
        # in the order of `own`, which is the order of `tensors`
        grads = [found.grads[i][name] for i, part in enumerate(own) for name in part]
        tensors = [*own.model.values(), *own.modules.values()]
        if not placement.is_sharded:
            # runs only if a gradient is not finite, to name the operation at fault
            def first_step(*leaves: Tensor) -> Tensor:
                params = dict(zip(start.model, leaves, strict=True))
                support, query = task_sets.first_task(tasks)
                return self.inner_objective(params, support) + self.objective(params, query)

            @contextmanager
            def around() -> Iterator[None]:
                with preserve_random_state(), self._ring(loop, placement, of_tasks=True):
                    yield

            leaves = [*start.model.values()]
            autograd.warn_if_not_finite(what, found.value, grads, first_step, leaves, around)
        grads = placement.wrap(grads)
        not_twice = NOT_TWICE.format(what=what)
        return autograd.with_gradients(found.value.mean(), grads, tensors, not_twice)

    def _traced_loss(self, loss: Callable[..., Tensor], tasks: object, *more: Any) -> Tensor:
        """The loss under torch.compile: Dynamo traces the losses of the first task, and `_replay` runs
        the learner with the traced losses."""
        # Dynamo traces two losses of one task only: learned modules and changing state run uncompiled
        learned = [x for x in (self.criterion, self.inner_loss) if isinstance(x, nn.Module)]
        if (
            more
            or not self._traceable
            or self.statistics is not None
            or (isinstance(tasks, list) and any(_shapes(t) != _shapes(tasks[0]) for t in tasks))
            or not isinstance(self.rule, str)
            or any(len([*part.parameters()]) > 0 for part in learned)
            or any(isinstance(part, NORMS) for part in self.model.modules())
        ):
            return run_uncompiled(loss, self, tasks, *more)
        names = [name for name, p in self.model.named_parameters() if p.requires_grad]
        own = dict(self.named_parameters())
        outer, inner = self.objective, self.inner_objective

        def record(own: Params, tasks: object) -> Tensor:
            support, query = task_sets.first_task(tasks)
            params = {name: own[f"model.{name}"] for name in names}
            record_call(inner, (params, support))
            return record_call(outer, (params, query)) * 1

        # a changed option makes a new options object, and so a new graph
        replay = partial(_replay, id(self), id(self._options))
        what = type(self).__name__
        return call_traced(what, record, replay, partial(loss, self, tasks), (own, tasks), {})

    def _run(self, loop: ModuleLoop, start: MetaParams, tasks: object, wanted: bool) -> TaskResult:
        """The result of all tasks, which have been checked."""
        policy = loop.options.policy
        if policy.one_graph:
            of_task, of_stack = _capture_tasks(self, loop, start, wanted)
        else:
            # a model or rule may write in place: clone here, except what each task clones itself
            model = {n: p if n in loop.adapting else p.clone() for n, p in start.model.items()}
            modules = pytree.map(Tensor.clone, start.modules)
            of_task = self._of_task(loop, MetaParams(model, modules), wanted)
            of_stack = partial(map_tasks, of_task)
        # collectives and compiled blocks do not run under vmap
        in_loop = loop.placement.is_sharded or policy.compiles_blocks
        how = policy.caller, start.model, "loop" if in_loop else self.over_tasks, self._vmappable
        found, self._vmappable = task_sets.run_tasks(of_task, of_stack, tasks, *how)
        return found

    @abstractmethod
    def _of_task(self, loop: ModuleLoop, start: MetaParams, wanted: bool) -> TaskFunction:
        """The function of one task: its outer loss and, if wanted, its gradients."""

    def _after_loss(self, loop: ModuleLoop, found: TaskResult) -> None:
        """Keep results that later calls need: the running statistics of each inner step."""
        trained = any(layer.training for layer in loop.batch_norms.values())
        self._trained_on_batches = self._trained_on_batches or trained
        if self.statistics is not None:
            self.statistics.update(found.statistics, loop.batch_norms)

    def _loop(self, params: Params | None = None) -> ModuleLoop:
        """The inner loop with the present attributes, from the model's parameters or given ones."""
        batch_norms = norms.find_batch_norms(self.model)
        self._warn_of_initial_statistics(batch_norms)
        options = self._options
        # with memory="remat", no graph of the model outlives the step
        if self._recomputes:
            options = replace(options, memory="remat")
        learned = nn.ModuleDict()
        for name in ("criterion", "inner_loss", "rates", "rule"):
            if isinstance(part := getattr(self, name), nn.Module):
                learned[name] = part
        outer, inner = map(self._with_policy, (self.objective, self.inner_objective))
        given = trainable_params(self.model) if params is None else params
        validation.named_tensors("params", given)
        names = module_loop.names_that_adapt(self.model, given, options.inner_params)
        return ModuleLoop(
            options=options,
            rule=self.rule,
            criterion_loss=outer,
            inner_criterion_loss=inner,
            adapting=tuple(names),
            learned_modules=learned,
            rates=self.rates,
            statistics=self.statistics,
            batch_norms=batch_norms,
        )

    def _with_policy(self, loss: FunctionalLoss) -> FunctionalLoss:
        policy = norms.FIXED_POLICIES.get(self.batch_norm)  # "per_step" has a policy for each step
        return loss if policy is None else loss.with_norm_policy(policy)

    @property
    def objective(self) -> FunctionalLoss:
        """The outer loss of the model as a function of parameters and batch."""
        return self._functional_loss("outer", self.criterion)

    @property
    def inner_objective(self) -> FunctionalLoss:
        """The loss of the inner loop as a function of parameters and batch."""
        if self.inner_loss is None:
            return self._losses.get("traced", self.objective)
        return self._functional_loss("inner", self.inner_loss)

    def _functional_loss(self, which: str, criterion: Callable[..., Any]) -> FunctionalLoss:
        known = self._losses.get(which)
        if known is None or known.model is not self.model or known.user_criterion is not criterion:
            known = functional_loss(self.model, criterion, forward=self._forward)
            self._losses[which] = known
        return known

    def _check_change(self, name: str, value: object) -> None:
        """Raise for a change of an option on which learned parameters or statistics depend."""
        self._vmappable = self._vmappable or name == "over_tasks"
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


@final
class _TracedObjective:
    """Stands in for a FunctionalLoss that Dynamo has traced."""

    def __init__(self, loss: FunctionalLoss, part: Callable[..., Tensor]) -> None:
        self.model, self.user_criterion, self._part = loss.model, loss.user_criterion, part
        self.with_norm_policy = lambda policy: self  # only models without batch norms are traced

    def __call__(self, params: Params, batch: Any) -> Tensor:
        return self._part(params, batch)


def _replay(learner: int, options: int, parts: list[Any], args: Any, _: Any) -> list[Tensor]:
    """Run a learner's loss with the traced losses `parts`, at torch.compile's parameters."""
    same: Learner = copy(BY_ID[learner])
    (inner, outer), (own, tasks) = parts, args
    of_inner: Any = _TracedObjective(same.inner_objective, inner)
    of_outer: Any = _TracedObjective(same.objective, outer)
    same._losses = {"inner": of_inner, "traced": of_inner, "outer": of_outer}
    same._checked_model = id(same.model)
    with swap_parameters(same, own):
        return [same.loss(tasks)]


def _capture_tasks(
    learner: object, loop: ModuleLoop, start: MetaParams, wanted: bool
) -> tuple[TaskFunction, TaskFunction]:
    """The functions of one task and of a pair of stacks, as captured graphs. The cache of graphs
    belongs to the learner object; a copy of the learner starts without graphs."""
    weights = loop.options.weights_for(loop.options.inner_steps)
    weight_tensor, used = None, None
    if weights is not None:  # an input of the graph, because weights may change in each epoch
        device = next(iter(start.model.values())).device
        weight_tensor = torch.tensor(weights, dtype=torch.float64, device=device)
        used = tuple(bool(weight != 0) for weight in weights)
        loop = replace(loop, options=replace(loop.options, step_weights=None))
    # everything besides tensors that the graph depends on
    key = f"{loop.options} {loop.rule} {used}"

    def run(mapped: bool, support: Tree, query: Tree) -> TaskResult:
        whole = partial(_meta_gradient, loop, used, mapped, wanted)
        policy = loop.options.policy
        name = f"{policy.caller}.loss"
        place = CacheSlot.of(learner, name, mapped, wanted)
        graph = Compiled(whole, backend=policy.backend, name=name, place=place)
        return graph(key, weight_tensor, start, support, query)

    return partial(run, False), partial(run, True)


def _meta_gradient(
    loop: ModuleLoop,
    used: tuple[bool, ...] | None,
    mapped: bool,
    wanted: bool,
    key: str,
    weights: Tensor | None,
    start: MetaParams,
    support: Tree,
    query: Tree,
) -> TaskResult:
    """The meta-gradient of one task or, if mapped, of a stack of tasks."""
    given = None
    if weights is not None and used is not None:  # a weight of zero gets no operations
        given = [counts and weights[i] for i, counts in enumerate(used)]
    of_task = partial(loop.meta_gradient if wanted else loop.value, start, weights=given)
    with ring(loop.options.policy, examine=False, gradients=nullcontext):
        return map_tasks(of_task, support, query) if mapped else of_task(support, query)


PARAMETER_HOOKS = (
    "the hooks of {} do not run in inner steps, which take gradients by copies of the parameters. To "
    "mask a gradient, multiply the parameter by the mask in the model "
    "(`torch.nn.utils.parametrize`), or freeze it."
)
# Values that must be equal in all processes, for messages.
AGREEMENT = ("options and criterion", "number of tasks", "parameters, where they are not sharded,")


def check_derivatives(
    what: str, loop: ModuleLoop, start: MetaParams, task: Task, learned: dict[str, Tensor]
) -> None:
    """Check on one task that both losses depend on the learned tensors, through correct Functions.

    learned: all parameters of the learner by name, for messages. Raises NoSecondDerivative for a loss
    that depends on no parameter, or on a parameter that it does not read from its module. Warns of
    other tensors that require grad, and of custom Functions with a wrong second derivative.
    """
    hooked = [name for name, x in learned.items() if x._backward_hooks]
    if hooked:
        warn_once(f"{what}: {PARAMETER_HOOKS.format(', '.join(hooked))}")
    # copies, because a model or rule may write in place
    start = pytree.map(Tensor.clone, start)
    support, query = task
    before = [start.model[name] for name in loop.adapting]

    leaves, structure = pytree.flatten(start)
    own = [leaf.detach().requires_grad_() for leaf in leaves]
    at = pytree.unflatten(own, structure)
    adapting = {name: at.model[name] for name in loop.adapting}

    def losses() -> list[Tensor]:
        """The inner loss at the start, and the outer loss after a step or two."""
        first = loop.inner_value(at, adapting, support, 0)
        if not depends_on_any(first, list(adapting.values())):
            raise NoSecondDerivative(UNUSED.format(which="inner", whom=" that adapt"))
        # first order is enough to see which parameters the loss depends on
        constant = replace(loop, options=replace(loop.options, first_order=True))
        steps = loop.options.inner_steps  # some rules use all their parameters from step 2 on
        params = constant.unrolling(at, support, min(2, steps))().params
        last = loop.outer_value(at, params, query, steps)
        if not last.requires_grad:
            raise NoSecondDerivative(UNUSED.format(which="outer", whom=""))
        return [first, last]

    policy = Policy(what, stand_ins=loop.options.policy.stand_ins)  # without remat of blocks
    with ring(policy), fixed_random_numbers(before), autograd.translate_errors(what):
        _check_leaves(what, losses, [*own, *pytree.tensors((support, query))], learned)


def check_finite(found: TaskResult) -> None:
    """Raise NonFiniteError at the first infinite or NaN inner or outer loss."""
    if not value_checks_on():
        return
    shape, count = found.inner_losses.shape, found.inner_losses.numel()
    # one tensor, because each read of values from a device waits for the device
    numbers = torch.cat([x.detach().reshape(-1) for x in (found.inner_losses, found.value)])
    now = read_late(("MAML", shape, len(numbers)), numbers)
    if now is None or math.isfinite(float(now.sum())):  # a sum is finite only if all its terms are
        return
    stay = " The parameters are as they were before this step."
    if numbers.device.type != "cpu":
        stay = " On a device this is told one call later."
    if found.inner_losses.dtype is torch.float16:
        stay = f" The eps=1e-8 of adam and rmsprop is 0 in float16: give eps=1e-4.{stay}"
    check_inner_losses(
        now[:count].view(shape),
        "Look for NaN in its support set, or in the parameters." + stay,
        "The inner loop diverges: lower inner_lr, or take fewer steps." + stay,
    )
    validation.finite(
        "meta-loss",
        now[count:].view(found.value.shape),
        "Tasks whose inner loop diverges give this: lower inner_lr, clip the outer gradient, or look "
        f"for NaN in the data.{stay}",
    )


def _check_leaves(
    what: str, losses: Callable[[], list[Tensor]], own: list[Tensor], learned: dict[str, Tensor]
) -> None:
    """Raise or warn if the graphs of the losses end in leaves other than `own`."""
    found = _other_leaves(losses(), own)
    # a forward may make a leaf to differentiate by: it is a new tensor in each call, and harmless
    again = {id(x) for x in _other_leaves(losses(), own)} if found else set()
    names = {id(p): name for name, p in learned.items()}
    for leaf in found:
        if id(leaf) in names:
            raise NoSecondDerivative(
                f"{what}: expected a model that finds its parameters in their modules, got one that "
                f"uses {names[id(leaf)]} from elsewhere too (a list of weights, a closure): there it "
                "would neither adapt nor get a gradient. Read it from its module."
            )
        if id(leaf) in again:
            warn(
                f"{what}: the losses use {validation.describe(leaf)} that requires grad and belongs to "
                "none of the modules that are learned (model, criterion, inner_loss, rule): it gets no "
                "gradient from loss(tasks). Make it a parameter of one of them, or detach() it."
            )


def _other_leaves(values: list[Tensor], own: list[Tensor]) -> list[Tensor]:
    known = {id(x) for x in own}
    reached = {key: x for value in values for key, x in graph_summary(value).leaves.items()}
    return [x for key, x in reached.items() if key not in known]


# Sharded parameters (DTensor): each process holds its shards of the initial and adapted parameters. For
# each loss it gathers whole parameters, and evaluates its part of each task. Inner gradients are
# averaged over the processes, so that all take equal inner steps.


def map_params(params: Params, part: Callable[[Sequence[Tensor]], Sequence[Tensor]]) -> Params:
    """Apply `placement.local` (DTensors to local shards) or `placement.wrap` (back) to parameters."""
    return dict(zip(params, part(list(params.values())), strict=True))


def refuse_settings(what: str, loop: ModuleLoop, start: MetaParams) -> None:
    """Raise for settings that sharded parameters do not support."""
    compiled = loop.options.evaluation.get("compile", False)
    if loop.strength:
        refuse_sharded(what, list(start.model.values()))
    # the rule runs on shards: a tensor as an option would have to be sharded alike
    numbers = (loop.options.rule_options or {}).values()
    plain = all(isinstance(x, Real | tuple | list) for x in numbers)
    for setting, given, instead in (
        ("over_tasks='vmap'", loop.options.over_tasks == "vmap", "use 'loop'"),
        (f"compile={compiled!r}", compiled, "leave compile out"),
        ("memory='mixed'", loop.options.memory == "mixed", "use 'remat'"),
        ("batch_norm='per_step'", loop.statistics is not None, "use 'by_mode' or 'frozen'"),
        ("learn_lr=...", loop.rates is not None, "leave learn_lr out"),
        ("rule=...", not isinstance(loop.rule, str), "name a rule, whose steps are elementwise"),
        ("rule_options=...", not plain, "give numbers"),
        ("inner_loss=...", bool(start.modules), "give losses without parameters of their own"),
    ):
        if given:
            raise UnsupportedError(
                f"{what}({setting}): expected parameters that each process holds whole, got DTensors, "
                f"as fully_shard (FSDP2) and parallelize_module make; {instead}."
            )


def refuse_graph(what: str, placement: Placement) -> None:
    """Raise for sharded parameters if grad mode is on."""
    if placement.is_sharded and torch.is_grad_enabled():
        raise UnsupportedError(
            f"{what}: expected params that each process holds whole, got DTensors, whose adaptation "
            "has no graph; use `loss(tasks)`, or call it under torch.no_grad()."
        )


def check_together(
    what: str, placement: Placement, start: Params, tasks: Any, loop: ModuleLoop
) -> int:
    """The number of tasks. Processes with shared parameters must agree; if one raises, all do."""
    if not isinstance(placement, Sharding):
        return check_tasks(tasks)
    count, error = 0, None
    try:
        count = check_tasks(tasks)
    except Exception as caught:  # all other processes would wait: raise in `check_same`
        error = caught
    leaves = placement.local(list(start.values()))
    losses = loop.rule, loop.criterion_loss, loop.inner_criterion_loss
    call = checksum_of_call(what, loop.options, losses, loop.strength)
    numbers = [call, count, placement.checksum_of_whole(leaves)]
    placement.check_same(what, AGREEMENT, numbers, leaves[0].device, error=error)
    return count
