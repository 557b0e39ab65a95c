"""Model-agnostic meta-learning on an unmodified module."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hoglib import _arguments as arguments
from hoglib import _functorch, _tree
from hoglib._explaining import explaining
from hoglib._functional import (
    Criterion,
    FunctionalLoss,
    Params,
    functional_loss,
    trainable_params,
)
from hoglib._precomputed import with_gradients
from hoglib._recording import recordable
from hoglib.meta import tasks as stacks
from hoglib.meta.inner import adapt
from hoglib.meta.rules import sgd
from hoglib.stand_ins import stand_ins_if

OVER_TASKS = ("auto", "vmap", "loop")
TWICE = (
    "maml.loss(tasks): expected backward() without create_graph, got create_graph=True; the gradients "
    "of the tasks are computed before backward and have no graph. For derivatives of the meta-gradient "
    "write the loss with `maml.adapt(support)` and `maml(x, params=adapted)`, which are differentiable "
    "to any order."
)


class MAML(nn.Module):
    r"""MAML: parameters from which a few gradient steps learn a task.

        theta_i = theta - alpha grad L_i(theta; support_i), inner_steps times
        meta-loss = mean_i L_i(theta_i; query_i)

    model: any nn.Module; it is called with other parameters and never changed. criterion(outputs,
    targets) gives a scalar. inner_lr is alpha. first_order drops the derivative of the inner gradient
    (FOMAML). over_tasks: "vmap" runs all tasks at once, "loop" one after the other, "auto" chooses by
    the shapes of the parameters, and loops (with a warning) where vmap cannot run the model. memory:
    "store" keeps the graph of every inner step. stand_ins: inner steps run inside
    `hoglib.second_order()`, where torch calls that have no second derivative, or a wrong one, go to
    functions that have a right one.

    Raises TypeError and ValueError for arguments of the wrong kind; RuntimeError, when it runs, for a
    custom Function in the model that is `@once_differentiable`.
    Source: Finn, Abbeel and Levine, Model-Agnostic Meta-Learning, 2017, algorithm 1.
    """

    def __init__(
        self,
        model: nn.Module,
        criterion: Criterion,
        *,
        inner_lr: float = 0.01,
        inner_steps: int = 1,
        first_order: bool = False,
        memory: str = "store",
        over_tasks: str = "auto",
        stand_ins: bool = True,
    ) -> None:
        super().__init__()
        self._objective: FunctionalLoss = functional_loss(model, criterion)
        trainable_params(
            model
        )  # raises here, not at the first step, when there is nothing to learn
        self.model = model
        self.inner_lr = arguments.positive("inner_lr", inner_lr)
        self.inner_steps = arguments.at_least("inner_steps", inner_steps, 1)
        self.first_order = arguments.flag("first_order", first_order)
        self.memory = arguments.one_of("memory", memory, ["store"])
        self.over_tasks = arguments.one_of("over_tasks", over_tasks, OVER_TASKS)
        self.stand_ins = arguments.flag("stand_ins", stand_ins)
        self._criterion = criterion
        self._vmappable = True  # until it is tried

    @property
    def objective(self) -> FunctionalLoss:
        """The loss of the model as a function of parameters and batch."""
        if self._objective.model is not self.model:  # another model was put in its place
            self._objective = functional_loss(self.model, self._criterion)
        return self._objective

    def forward(self, *args: Any, params: Params | None = None, **kwargs: Any) -> Any:
        """The model's output, with `params` (from `adapt`) in the place of its own."""
        if params is None:
            return self.model(*args, **kwargs)
        return self.objective.call(params, *args, **kwargs)

    def adapt(
        self, support: Any, *, params: Params | None = None, steps: int | None = None
    ) -> Params:
        """The parameters after the inner steps on one task's support set, (x [K, ...], y [K, ...]).

        Starts at the model's own trainable parameters, or at `params`. The result is differentiable
        by them where grad is enabled, and works under no_grad and in inference mode. `steps`, 0 or
        more, overrides inner_steps.
        """
        stacks.check_batch("support", support)
        start = trainable_params(self.model) if params is None else params
        count = self.inner_steps if steps is None else arguments.at_least("steps", steps, 0)
        return self._adapt(start, _usable(support), count)

    def loss(self, tasks: Any) -> Tensor:
        """The meta-loss, a scalar whose `backward()` fills the `.grad` of the model's parameters.

        tasks: a tuple (support, query) of stacks, each (x [B, K, ...], y [B, K, ...]) with B tasks,
        or a list of tasks, each (support, query) with (x [K, ...], y [K, ...]), which may differ in
        size; two lists of two tensors, as a DataLoader collates them, are stacks. The gradients of all
        tasks are computed here, and handed on by backward; so the result cannot be differentiated
        twice, nor by the tasks: both raise. Where grad is disabled only the value is computed.

        Raises ValueError for an empty support set or sizes that do not match; FloatingPointError when
        the loss of a task is not finite, naming the tasks.
        """
        if _functorch.transforms_active():
            raise arguments.NotSupported(
                "maml.loss(tasks): expected to be called outside of torch.func transforms, got called "
                "inside one, where its gradients have no graph. Write the loss with "
                "`maml.adapt(support)` and `maml(x, params=adapted)`, which run inside of any."
            )
        tasks = stacks.unpack(tasks)
        count = stacks.check_tasks(tasks)
        tasks = _usable(tasks)
        params = trainable_params(self.model)
        names = list(params)
        wants_gradient = torch.is_grad_enabled()
        detached = {name: p.detach() for name, p in params.items()}
        with stand_ins_if(self.stand_ins):  # also while what it runs again in backward is run
            values, grads = self._values_and_grads(detached, tasks, count, wants_gradient)
        arguments.finite(
            "meta-loss",
            values,
            "Tasks whose inner loop diverges give this: lower inner_lr, clip the outer gradient, or "
            "look for NaN in the data. The parameters are as they were before this step.",
        )
        if not wants_gradient:
            return values.mean()
        return with_gradients(
            values.mean(), [grads[n] for n in names], [params[n] for n in names], TWICE
        )

    def extra_repr(self) -> str:
        return (
            f"inner_lr={self.inner_lr}, inner_steps={self.inner_steps}, "
            f"first_order={self.first_order}, memory={self.memory!r}, over_tasks={self.over_tasks!r}"
        )

    def _task_loss(self, params: Params, support: Any, query: Any) -> Tensor:
        adapted = self._adapt(params, support, self.inner_steps)
        return self.objective(adapted, query)

    def _adapt(self, params: Params, support: Any, steps: int) -> Params:
        rule = sgd(self.inner_lr)
        with stand_ins_if(self.stand_ins):
            return adapt(
                self.objective, params, support, rule, steps=steps, first_order=self.first_order
            )

    def _values_and_grads(
        self, params: Params, tasks: Any, count: int, wants_gradient: bool
    ) -> tuple[Tensor, Params]:
        """The loss of each task, and the mean over tasks of its gradients."""
        function: Callable[..., Any] = self._task_loss
        if wants_gradient:
            function = torch.func.grad_and_value(self._task_loss)
        every = stacks.each(tasks)
        if isinstance(tasks, list) or not self._vectorize(params):
            with explaining("MAML"):
                return _one_by_one(function, params, every, count, wants_gradient)
        try:
            return _all_at_once(function, params, tasks, wants_gradient)
        except RuntimeError as error:
            if isinstance(error, arguments.Explained):
                raise
            reason = str(error).splitlines()[0]
            if self.over_tasks == "vmap":
                raise arguments.CannotVmap(
                    f"MAML(over_tasks='vmap'): expected a model that vmap can run, got an error: "
                    f"{reason} Use over_tasks='loop'."
                ) from error
            # Whatever it was, the loop either shows it plainly or is the way round it.
            with explaining("MAML"):
                result = _one_by_one(function, params, every, count, wants_gradient)
        self._vmappable = False
        warnings.warn(
            f"MAML loops over the tasks, because vmap cannot run this model: {reason} "
            f"Pass over_tasks='loop' to say so yourself.",
            stacklevel=3,
        )
        return result

    def _vectorize(self, params: Params) -> bool:
        if self.over_tasks == "auto":
            return self._vmappable and vmap_pays(params)
        return self.over_tasks == "vmap"


def _usable(tree: Any) -> Any:
    """Tensors that were made in inference mode can be used outside of it only as copies."""
    return tree if torch.is_inference_mode_enabled() else recordable(tree)


def vmap_pays(params: Params) -> bool:
    """Whether all tasks at once are faster than one after the other.

    On a CPU grouped convolutions, into which vmap turns convolutions with a kernel a task, are slower
    than the loop; small matrix products are far faster. On other devices one launch for all wins.
    """
    return all(p.device.type != "cpu" or p.dim() <= 2 for p in params.values())


def _all_at_once(
    function: Callable[..., Any], params: Params, tasks: Any, wants_gradient: bool
) -> tuple[Tensor, Params]:
    # vmap is outermost: the derivative of a vmapped loss is wrong through normalisation layers.
    all_tasks = torch.func.vmap(function, in_dims=(None, 0, 0), randomness="different")
    output = all_tasks(params, *tasks)
    if not wants_gradient:
        return output, {}
    grads, values = output
    return values, {name: grad.mean(0) for name, grad in grads.items()}


def _one_by_one(
    function: Callable[..., Any],
    params: Params,
    tasks: Sequence[tuple[Any, Any]],
    count: int,
    wants_gradient: bool,
) -> tuple[Tensor, Params]:
    values: list[Tensor] = []
    mean: Params = {}
    for support, query in tasks:
        output = function(params, support, query)
        if not wants_gradient:
            values.append(output)
            continue
        grads, value = output
        values.append(value)
        step = _tree.scale(grads, 1 / count)
        mean = _tree.add(mean, step) if mean else step
    return torch.stack(values), mean
