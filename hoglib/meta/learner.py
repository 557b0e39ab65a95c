"""What every way of meta-learning shares: the loss over tasks of an inner loop."""

from abc import abstractmethod
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hoglib._core import pytree, torch_internals, validation
from hoglib._core.autograd import (
    clone_inference_tensors,
    outside_inference_mode,
    translate_errors,
    with_gradients,
)
from hoglib._core.finite_differences import fixed_random_numbers
from hoglib._core.gradient_graph import depends_on_any
from hoglib._core.source_location import warn
from hoglib._core.swap import Params
from hoglib.errors import NoSecondDerivative, UnsupportedError
from hoglib.meta import norms
from hoglib.meta import tasks as stacks
from hoglib.meta.guards import check_finite, look_at_functions, only_what_is_learned
from hoglib.meta.inner_loop import RUNS_AGAIN, UNUSED
from hoglib.meta.mapping import TaskResult, TaskRunner
from hoglib.meta.module_loop import InnerLoop, MetaParams
from hoglib.stand_ins.mode import stand_ins_if

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


class Learner(InnerLoop):
    """An inner loop on a model, and the loss over tasks that it is meta-trained by (abstract).

    See `MAML` for the arguments.
    """

    # what a way of meta-learning is made of

    @abstractmethod
    def _of_task(self, point: MetaParams, support: Any, query: Any, wanted: bool) -> TaskResult:
        """The loss of one task, and if wanted its gradients: a `Point`."""

    def _runner(self, point: MetaParams, wanted: bool) -> TaskRunner | None:
        """How tasks are run, if as graphs."""
        return None

    # what a user calls

    def forward(self, *args: Any, params: Params | None = None, **kwargs: Any) -> Any:
        """The model's output, with `params` (from `adapt`) in the place of its own."""
        if params is None:
            return self.model(*args, **kwargs)
        self._look_at_norms()
        loss = self.objective.with_norm_policy(self._norms(self.inner_steps))
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
        count = self.inner_steps if steps is None else validation.at_least("steps", steps, 0)
        point = self._point()
        if params is not None:
            point = point._replace(model=params)
        self._look_at_norms()
        with outside_inference_mode(), stand_ins_if(self.stand_ins):
            adapted, _, _ = self._unroll(point, clone_inference_tensors(support), count)
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
        if torch_internals.transforms_active():
            raise UnsupportedError(
                f"{what}.loss(tasks): expected to be called outside of torch.func transforms, got "
                "called inside one, where its gradients have no graph. Write the loss with "
                "`maml.adapt(support)` and `maml(x, params=adapted)`, which run inside of any."
            )
        tasks = stacks.unpack(tasks)
        stacks.check_tasks(tasks)
        wanted = torch.is_grad_enabled()
        own = self._point()
        self._look_at_norms()
        with outside_inference_mode():
            point = MetaParams(*({n: p.detach() for n, p in part.items()} for part in own))
            runner = self._runner(point, wanted)
            if (
                runner is None
            ):  # copies, for a model or a rule that works in place, as no graph does
                point = pytree.map(Tensor.clone, point)

            def of_task(support: Any, query: Any) -> TaskResult:
                return self._of_task(point, support, query, wanted)

            tasks = clone_inference_tensors(tasks)
            if wanted:
                self._look(what, point, tasks)
            # What runs as graphs has the stand-ins in them, and each of its calls would be looked up.
            with stand_ins_if(self.stand_ins) if runner is None else nullcontext():
                try:
                    found = self._mapper(of_task, tasks, what, own.model, runner)
                except RuntimeError as error:
                    if self._runs_again or RUNS_AGAIN not in str(error):
                        raise
                    self._runs_again = True  # as `_memory` heeds
                    found = self._mapper(of_task, tasks, what, own.model, runner)
        check_finite(found)
        if not wanted:
            return found.value.mean()
        self._note(found)
        grads = [found.grads[part][n] for part, of in own._asdict().items() for n in of]
        tensors = [*own.model.values(), *own.extras.values()]
        return with_gradients(found.value.mean(), grads, tensors, TWICE.format(what=what))

    def _note(self, found: TaskResult) -> None:
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

    def _look(self, what: str, point: MetaParams, tasks: Any) -> None:
        """Once for each model: whether gradients reach all that they should, and from all Functions."""
        if self._looked_at == id(self.model):
            return
        point = pytree.map(Tensor.clone, point)
        support, query = stacks.first(tasks)
        names = self._adapting(point.model)
        start = [point.model[name] for name in names]
        norm = self._norms(0)

        def inner(at: MetaParams, *leaves: Tensor) -> Tensor:
            loss = self.inner_objective.with_norm_policy(norm)
            return self._inner_value(at, dict(zip(names, leaves, strict=True)), support, loss)

        leaves, structure = pytree.flatten(point)
        own = [leaf.detach().requires_grad_() for leaf in leaves]
        at = pytree.unflatten(own, structure)
        before = {name: at.model[name] for name in names}

        def losses() -> list[Tensor]:
            """The inner one at the start, and the outer one after a step or two."""
            first = inner(at, *before.values())
            if not depends_on_any(first, list(before.values())):
                raise NoSecondDerivative(UNUSED.format(which="inner", whom=" that adapt"))
            after, state = before, self._rule(0, at, names).init(before)
            for i in range(min(2, self.inner_steps)):  # some rules show all of them in the second
                grads, _ = self._gradient(i, at, after, support, constant=True, alone=False)
                after, state = self._rule(i, at, names).update(after, grads, state)
            last = self._outer_value(at, after, query, self.inner_steps)
            if not last.requires_grad:
                raise NoSecondDerivative(UNUSED.format(which="outer", whom=""))
            return [first, last]

        stands_in = stand_ins_if(self.stand_ins)
        with torch.enable_grad(), fixed_random_numbers(start), stands_in, translate_errors(what):
            data = [x for x in pytree.leaves((support, query)) if isinstance(x, Tensor)]
            only_what_is_learned(what, losses, [*own, *data], dict(self.named_parameters()))
            if not self._constant(self.inner_steps - 1, self.inner_steps):
                look_at_functions("the inner step", partial(inner, point), start)
        self._looked_at = id(self.model)
