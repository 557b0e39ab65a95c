"""The learners. MAML differentiates its inner steps, iMAML the minimum at their end; Reptile uses the
total move of the parameters as a gradient."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Unpack, final, get_args

import torch
from torch import nn

from hoglib._core.messages import validation
from hoglib._core.modules.swap import Params
from hoglib._core.torch_api.pytree import Tree
from hoglib.errors import ArgumentValueError
from hoglib.functional import Criterion, trainable_params
from hoglib.meta import module_loop
from hoglib.meta.implicit import Residual, Solver, SolverName, implicit_gradient
from hoglib.meta.inner_loop import Memory
from hoglib.meta.learner import Learner, Option
from hoglib.meta.module_loop import Granularity, LearnerOptions, MetaParams, ModuleLoop
from hoglib.meta.optimizers import is_transformation
from hoglib.meta.tasks import OverTasks, TaskFunction, TaskResult


@final
class MAML(Learner):
    r"""MAML: learn initial parameters, so that a few gradient steps solve a task.

        theta_i = inner_steps updates of theta by rule, along -grad L_inner(.; support_i)
        meta-loss = mean_i L(theta_i; query_i)

    This module has the parameters of the model and of learned rates, losses and rules: give
    `maml.parameters()` to the outer optimizer. Options are attributes of equal names (``compile`` is
    ``compiled``) and may be changed between steps.

    Args:
        model: Any nn.Module. It is called with other parameters and never changed.
        criterion: The outer loss L, ``criterion(outputs, targets)``, a scalar; or a functional loss of
            the model, such as `hoglib.language_model_loss(model)`; or None, if the model computes its
            own loss. Batches go into the model as `hoglib.functional_loss` describes.
        inner_steps: The number of inner steps.
        first_order: Treat the inner gradients as constants (FOMAML).
        memory: The tensors kept for backward. "store": the graph of every inner step. "remat": the
            parameters after every step, at about 1.6 times the time. "checkpoint": the parameters
            after every sqrt(steps)-th step and the graphs of as many steps, which needs least if
            parameters outweigh activations. "mixed": as "remat", but the gradient of a step is
            differentiated forward over reverse, with a loss and its tangents in memory instead of the
            graph of the gradient; for attention and, with remat, deep models with a forward mode of all
            operations, and best with over_tasks="loop". All give equal gradients up to rounding
            ("mixed" may draw other dropout masks). Models with torch.utils.checkpoint are run by
            "remat".
        learn_lr: Learn the inner learning rates: one for the "model", each "layer", each
            "parameter" or each "element" (Meta-SGD). Default: the rate is fixed.
        lr_per_step: Learn separate rates for each inner step (MAML++).
        step_weights: Weights of the outer losses after each inner step; the weighted sum is
            minimised (multi-step loss); see `hoglib.meta.multi_step_weights`. Default: only the
            last loss.
        truncate: Differentiate only through this many last inner steps. Default: all.
        over_tasks: "vmap" runs all tasks at once, "loop" in turn. "auto" takes vmap, except
            on a CPU for parameters with more than 2**17 elements in all, or a parameter of more than
            two dimensions (a convolution's) with more than 2**12; it loops, with a warning, if vmap
            cannot run the model. DTensors as parameters need the loop.
        compile: Run the meta-gradient as a graph of all inner steps (`hoglib.compile`): True or
            "inductor" compiles it, "eager" runs its operations one by one.
        **options: Options of :class:`hoglib.meta.LearnerOptions`: ``inner_lr``, ``rule``,
            ``rule_options``, ``inner_loss``, ``inner_params``, ``batch_norm``, ``forward``,
            ``stand_ins`` and ``remat``.

    Raises:
        ArgumentTypeError, ArgumentValueError: for an argument other than described here.
        NoSecondDerivative: in loss and adapt, for a ``@once_differentiable`` custom Function, and for a
            loss that does not depend on the parameters.
        UnsupportedError: in loss, with compile, for a model that cannot be captured as a graph, and
            with memory="mixed" for a model without a forward mode.

    References:
        Finn, Abbeel and Levine, Model-Agnostic Meta-Learning, 2017, algorithm 1; Li et al.,
        Meta-SGD, 2017; Antoniou, Edwards and Storkey, How to train your MAML, 2019; Raghu et al.,
        Rapid Learning or Feature Reuse?, 2020 (ANIL); Shaban et al., Truncated Back-propagation,
        2019.

    Example:
        >>> maml = hog.MAML(nn.Linear(2, 1), F.mse_loss, inner_lr=0.1, inner_steps=3)
        >>> support = query = torch.randn(5, 2), torch.randn(5, 1)
        >>> maml.loss([(support, query)]).shape  # one task
        torch.Size([])
        >>> support = torch.randn(4, 5, 2), torch.randn(4, 5, 1)  # of 4 tasks
        >>> query = torch.randn(4, 10, 2), torch.randn(4, 10, 1)
        >>> maml.loss((support, query)).backward()
        >>> maml.model.weight.grad.shape
        torch.Size([1, 2])
        >>> adapted = maml.adapt((torch.randn(5, 2), torch.randn(5, 1)))
        >>> maml(torch.randn(7, 2), params=adapted).shape
        torch.Size([7, 1])
    """

    first_order = Option[bool]()
    memory = Option[Memory]()
    truncate = Option[int | None]()
    step_weights = Option[Sequence[float] | None]()
    compiled = Option[bool | str]()

    @validation.explain_arguments
    def __init__(
        self,
        model: nn.Module,
        criterion: Criterion | None,
        *,
        inner_steps: int = 1,
        first_order: bool = False,
        memory: Memory = "store",
        learn_lr: Granularity | None = None,
        lr_per_step: bool = False,
        step_weights: Sequence[float] | None = None,
        truncate: int | None = None,
        over_tasks: OverTasks = "auto",
        compile: bool | str = False,
        **options: Unpack[LearnerOptions],
    ) -> None:
        super().__init__(
            model,
            criterion,
            options,
            inner_steps=inner_steps,
            first_order=first_order,
            memory=memory,
            step_weights=step_weights,
            truncate=truncate,
            over_tasks=over_tasks,
            compile=compile,
        )
        validation.boolean("lr_per_step", lr_per_step)
        if lr_per_step and learn_lr is None:
            raise ArgumentValueError(
                "lr_per_step: expected learn_lr to say what the learned rates are of, got "
                f"None; set it to one of {', '.join(get_args(Granularity))}."
            )
        if learn_lr is not None:
            if is_transformation(self.rule):
                raise ArgumentValueError(
                    "learn_lr: expected a rule that takes a learning rate, a name or a function of "
                    "it, got a rule that has its own; give the function that makes it."
                )
            params, steps = trainable_params(self.model), self.inner_steps if lr_per_step else None
            # only parameters that adapt: the rates of other parameters would get no gradient
            adapting = {name: params[name] for name in self._loop().adapting}
            given: Any = {"granularity": learn_lr, "steps": steps}
            self.rates = module_loop.LearnedRates(adapting, self.inner_lr, **given)

    def _of_task(self, loop: ModuleLoop, start: MetaParams, wanted: bool) -> TaskFunction:
        return partial(loop.meta_gradient if wanted else loop.value, start)

    def extra_repr(self) -> str:
        """The options that `repr` shows."""
        return (
            f"{super().extra_repr()}, first_order={self.first_order}, memory={self.memory!r}"
            + (f", truncate={self.truncate}" if self.truncate is not None else "")
            + (f", batch_norm={self.batch_norm!r}" if self.batch_norm != "by_mode" else "")
        )


@final
class IMAML(Learner):
    r"""iMAML: learn parameters as the centre of regularised task solutions.

        theta_i = argmin L_inner(.; support_i) + strength / 2 |. - theta|^2
        gradient = mean_i (I + H_i / strength)^-1 d L(theta_i; query_i)
        H_i = d^2 L_inner(.; support_i) at theta_i

    The argmin is approximated by inner_steps updates by rule, from theta on. The gradient formula holds
    at a minimum, which the updates must reach: after `loss` the attribute `residual` gives, for each
    task, the distance from the minimum (stationarity) and the error of the linear system (system).
    Learned tensors besides the initial point (parameters that do not adapt, a learned inner_loss) get
    implicit gradients, too. Memory holds the graph of one gradient, whatever the number of steps. Tasks
    run in turn. If strength and damping do not make the system positive definite, conjugate
    gradients stop at the first direction of negative curvature, warn, and use the iterate found so far.

    Args:
        model: Any nn.Module. It is called with other parameters and never changed.
        criterion: The outer loss L, ``criterion(outputs, targets)``, a scalar; or a functional loss of
            the model, such as `hoglib.language_model_loss(model)`; or None, if the model computes its
            own loss.
        strength: The strength of the proximal term, greater than 0. Typical values are 0.5 to 5.
        inner_steps: The number of inner steps.
        solver: "cg", conjugate gradients, or "neumann", the Neumann series.
        iterations: The iterations of the solver, each one product with the Hessian.
        damping: A number added to the diagonal of the linear system, 0 or more.
        step_size: The step size of the Neumann series. Default: inner_lr.
        **options: Options of :class:`hoglib.meta.LearnerOptions`: ``inner_lr``, ``rule``,
            ``rule_options``, ``inner_loss``, ``inner_params``, ``batch_norm``, ``forward``,
            ``stand_ins`` and ``remat``.

    Raises:
        ArgumentTypeError, ArgumentValueError: for an argument other than described here.
        NonFiniteError: in loss, for a Neumann series that diverges.

    References:
        Rajeswaran, Finn, Kakade and Levine, Meta-Learning with Implicit Gradients, 2019, eq. 3 and
        6.

    Example:
        >>> imaml = hog.meta.IMAML(nn.Linear(2, 1), F.mse_loss, inner_lr=0.1, inner_steps=50)
        >>> support = torch.randn(4, 5, 2), torch.randn(4, 5, 1)  # of 4 tasks
        >>> query = torch.randn(4, 10, 2), torch.randn(4, 10, 1)
        >>> imaml.loss((support, query)).backward()
        >>> imaml.residual.system.shape
        torch.Size([4])
    """

    # the number of products in a linear system depends on values, which tracing does not know
    _traceable = False

    @validation.explain_arguments
    def __init__(
        self,
        model: nn.Module,
        criterion: Criterion | None,
        *,
        strength: float = 2.0,
        inner_steps: int = 20,
        solver: SolverName = "cg",
        iterations: int = 10,
        damping: float = 0.0,
        step_size: float | None = None,
        **options: Unpack[LearnerOptions],
    ) -> None:
        super().__init__(model, criterion, options, inner_steps=inner_steps, first_order=True)
        if self.statistics is not None:
            raise ArgumentValueError(
                "batch_norm: expected 'by_mode', 'transductive' or 'frozen' with IMAML, got "
                "'per_step'; a minimum does not depend on the steps."
            )
        self.strength = validation.number("strength", strength, minimum=0)
        if not self.strength > 0:
            raise ArgumentValueError(
                "strength: expected a number greater than 0, got 0: without a regulariser the "
                "solutions of tasks do not depend on where they start. Typical values are 0.5 to 5."
            )
        h = self.inner_lr if step_size is None else step_size
        self.solver = Solver(solver, iterations, damping, step_size=h, at_negative_curvature="warn")
        self.residual: Residual | None = None

    def _loop(self, params: Params | None = None) -> ModuleLoop:
        return replace(super()._loop(params), strength=self.strength)

    def _of_task(self, loop: ModuleLoop, start: MetaParams, wanted: bool) -> TaskFunction:
        return partial(self._implicit_result, loop, start, wanted)

    def _implicit_result(
        self, loop: ModuleLoop, start: MetaParams, wanted: bool, support: Tree, query: Tree
    ) -> TaskResult:
        # the steps only find the minimum, and are not differentiated
        with torch.no_grad():
            _, (result, params) = loop.outer_loss(start, support, query)
        if not wanted:
            return result
        steps = loop.options.inner_steps
        outer = lambda params, start: loop.outer_value(start, params, query, steps)  # noqa: E731
        inner = lambda params, start: loop.inner_value(start, params, support, steps)  # noqa: E731
        value, grads, residual = implicit_gradient(outer, inner, params, start, self.solver)
        return result._replace(value=value, grads=grads, residual=residual)

    def _after_loss(self, loop: ModuleLoop, found: TaskResult) -> None:
        super()._after_loss(loop, found)
        self.residual = found.residual

    def extra_repr(self) -> str:
        """The options that `repr` shows."""
        return f"{super().extra_repr()}, strength={self.strength}, solver={self.solver.name!r}"


@final
class Reptile(Learner):
    r"""Reptile: learn parameters by moving toward the adapted parameters of tasks.

        theta_i = inner_steps updates of theta by rule, along -grad L(.; support_i)
        gradient = mean_i (theta - theta_i)

    A step of `torch.optim.SGD(lr=epsilon)` on this gradient is theta + epsilon mean_i (theta_i -
    theta). Nothing is differentiated twice. The value of the loss is the outer loss, on the query sets
    at theta_i; the gradient does not come from this value. Without a query set, give the support set in
    its place. Parameters that do not adapt get a gradient of zero. Options are attributes of equal
    names and may be changed between steps.

    Args:
        model: Any nn.Module. It is called with other parameters and never changed.
        criterion: The loss, ``criterion(outputs, targets)``, a scalar; or a functional loss of the
            model, such as `hoglib.language_model_loss(model)`; or None, if the model computes its own.
        inner_steps: The number of inner steps.
        over_tasks: "vmap" runs all tasks at once, "loop" in turn, "auto" chooses.
        **options: Options of :class:`hoglib.meta.LearnerOptions`: ``inner_lr``, ``rule``,
            ``rule_options``, ``inner_loss``, ``inner_params``, ``batch_norm``, ``forward``,
            ``stand_ins`` and ``remat``.

    Raises:
        ArgumentTypeError, ArgumentValueError: for an argument other than described here, and
            for a loss or a rule with parameters, which would get no gradient.

    References:
        Nichol, Achiam and Schulman, On First-Order Meta-Learning Algorithms, 2018, algorithm 1.

    Example:
        >>> reptile = hog.meta.Reptile(nn.Linear(2, 1), F.mse_loss, inner_lr=0.1)
        >>> support = torch.randn(4, 5, 2), torch.randn(4, 5, 1)  # of 4 tasks
        >>> reptile.loss((support, support)).backward()
        >>> reptile.model.weight.grad.shape
        torch.Size([1, 2])
    """

    @validation.explain_arguments
    def __init__(
        self,
        model: nn.Module,
        criterion: Criterion | None,
        *,
        inner_steps: int = 5,
        over_tasks: OverTasks = "auto",
        **options: Unpack[LearnerOptions],
    ) -> None:
        super().__init__(
            model,
            criterion,
            options,
            inner_steps=inner_steps,
            over_tasks=over_tasks,
            first_order=True,
        )
        # theta - theta_i is no gradient by learned tensors other than theta
        learned = list(self._loop().meta_params().modules)
        if learned:
            raise ArgumentValueError(
                f"Reptile: expected losses and rules without parameters of their own, got "
                f"{', '.join(learned)}, to which it has no gradient; use hoglib.MAML, or freeze "
                "them with requires_grad_(False)."
            )

    def _of_task(self, loop: ModuleLoop, start: MetaParams, wanted: bool) -> TaskFunction:
        return partial(_reptile_move, loop, start) if wanted else partial(loop.value, start)


@torch.no_grad()
def _reptile_move(loop: ModuleLoop, start: MetaParams, support: Tree, query: Tree) -> TaskResult:
    """The move theta - theta_i of the parameters, in the place of a gradient."""
    _, (result, adapted) = loop.outer_loss(start, support, query)
    own = start.model.items()
    moved = {n: p - adapted[n] if n in adapted else torch.zeros_like(p) for n, p in own}
    return result._replace(grads=MetaParams(moved, {}))


def multi_step_weights(steps: int, epoch: int, epochs: int) -> list[float]:
    r"""Weights of the outer losses after each inner step, annealed from all steps to the last.

        v_i = (1 - epoch / epochs) / steps        for i < steps; the last weight makes the sum 1

    For `MAML(step_weights=...)`: equal weights at epoch 0, and only the last loss from `epochs` on.

    Args:
        steps: The number of inner steps.
        epoch: The epoch of the outer training, from 0.
        epochs: The number of epochs over which the weights are annealed, linearly.

    Returns:
        A list of `steps` weights with the sum 1.

    References:
        Antoniou, Edwards and Storkey, How to train your MAML, 2019, section 4, MSL.

    Example:
        >>> hog.meta.multi_step_weights(2, epoch=0, epochs=4)
        [0.5, 0.5]
        >>> hog.meta.multi_step_weights(2, epoch=2, epochs=4)
        [0.25, 0.75]
    """
    validation.at_least("steps", steps, 1)
    validation.at_least("epochs", epochs, 1)
    share = max(0.0, 1 - validation.at_least("epoch", epoch, 0) / epochs) / steps
    return [share] * (steps - 1) + [1 - share * (steps - 1)]
