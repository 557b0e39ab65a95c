"""Model-agnostic meta-learning on an unmodified module."""

from collections.abc import Callable, Sequence
from typing import Any, final

from torch import nn

from hoglib._core import validation
from hoglib.errors import ArgumentValueError
from hoglib.functional import Criterion, Forward, trainable_params
from hoglib.meta.compiled import CompileOptions, MetaCompiler
from hoglib.meta.gradient_transformation import GradientTransformation
from hoglib.meta.learner import Learner, Option
from hoglib.meta.module_loop import (
    GRANULARITIES,
    InnerParams,
    LearnedRates,
    LoopOptions,
    MetaParams,
    ModuleLoop,
    names_that_adapt,
)
from hoglib.meta.optimizers import is_transformation
from hoglib.meta.tasks import TaskResult, TaskRunner


@final
class MAML(Learner):
    r"""MAML: learn parameters from which a few gradient steps solve a task.

        theta_i = inner_steps updates of theta by rule, along -grad L_inner(.; support_i)
        meta-loss = mean_i L(theta_i; query_i)

    The parameters of this module are those of the model and of the rates, losses and rules that are
    learned: give `maml.parameters()` to the outer optimizer. Options are attributes of the same
    names (``compile`` is ``compiled``) and may be changed between steps.

    Args:
        model: Any nn.Module. It is called with other parameters and never changed.
        criterion: The outer loss L, ``criterion(outputs, targets)``, a scalar; or a functional loss of
            the model, such as `hoglib.language_model_loss(model)`; or None, if the model computes its
            own loss. Batches go into the model as `hoglib.functional_loss` describes.
        inner_lr: The learning rate of the inner loop; with learn_lr, where the learned rates start.
        inner_steps: The number of inner steps.
        first_order: Treat the inner gradients as constants (FOMAML).
        memory: What is kept for backward. "store": the graph of every inner step. "remat": the
            parameters after every step, at about 1.6 times the time. "checkpoint": the parameters
            after every sqrt(steps)-th step and the graphs of as many, which needs least where
            parameters outweigh activations. All give the same gradient to rounding. Models that
            contain torch.utils.checkpoint are run by "remat".
        rule: The update rule: "sgd", "momentum", "adam", "adamw" or "rmsprop"; a function from a
            learning rate to a `hoglib.meta.GradientTransformation`; or an object with ``init`` and
            ``update``, whose parameters are learned if it is a module.
        rule_options: Keyword arguments of a rule that is given by name.
        learn_lr: Learn the inner learning rates: one for the "model", each "layer", each
            "parameter" or each "element" (Meta-SGD). Default: the rate is fixed.
        lr_per_step: Learn separate rates for each inner step (MAML++).
        inner_loss: The criterion of the inner loop, learned if it is a module with parameters.
            Default: criterion.
        inner_params: The parameters that adapt: a predicate ``(name, tensor) -> bool``, or names
            and prefixes (ANIL: ``["head"]``). All parameters are meta-learned. Default: all adapt.
        step_weights: Weights of the outer losses after each inner step, whose weighted sum is
            minimised (multi-step loss); see `hoglib.meta.multi_step_weights`. Default: the last
            loss alone.
        truncate: Differentiate through the last so many inner steps only. Default: all.
        batch_norm: What batch norm layers normalise by. "by_mode": in train mode the statistics of
            the batch, without updating the running ones, which they use in eval mode.
            "transductive": the batch's in either mode. "per_step": the batch's in train mode; in
            eval mode running averages that are kept for each step. "frozen": the model's running
            statistics in either mode.
        forward: How the model is called, ``forward(model, batch)``. Default: by the parts of the
            batch.
        over_tasks: "vmap" runs all tasks at once, "loop" one after the other. "auto" takes vmap, but on
            a CPU with a parameter of more than 2**18 elements, or 2**12 in more than two dimensions,
            as a convolution's; it loops, with a warning, where vmap cannot run the model. Parameters
            that are DTensors need the loop.
        compile: Run the meta-gradient as a graph of all inner steps (`hoglib.compile`): True or
            "inductor" compiles it, "eager" runs its operations one by one.
        stand_ins: Run inside `hoglib.second_order()`, where torch calls without a right second
            derivative are replaced by their stand-ins.
        remat: Blocks of the model whose intermediate values are recomputed in backward instead of kept,
            by `hoglib.ops.remat`: True for the blocks that it repeats, or their names or globs, as
            "layers.*". It is about layers, as `memory` is about steps, and may be combined with
            each of its values. With compile, the passes of a block are compiled instead of the
            meta-gradient, once for all equal blocks, and tasks run one after the other.

    Raises:
        ArgumentTypeError, ArgumentValueError: for an argument that is not as described here.
        NoSecondDerivative: in loss and adapt, for a custom Function that is
            ``@once_differentiable``, and for a loss that does not depend on the parameters.
        UnsupportedError: in loss, with compile, for a model whose graph cannot be captured.

    References:
        Finn, Abbeel and Levine, Model-Agnostic Meta-Learning, 2017, algorithm 1; Li et al.,
        Meta-SGD, 2017; Antoniou, Edwards and Storkey, How to train your MAML, 2019; Raghu et al.,
        Rapid Learning or Feature Reuse?, 2020 (ANIL); Shaban et al., Truncated Back-propagation,
        2019.

    Example:
        >>> maml = hog.MAML(nn.Linear(2, 1), F.mse_loss, inner_lr=0.1, inner_steps=3)
        >>> support = torch.randn(4, 5, 2), torch.randn(4, 5, 1)  # of 4 tasks
        >>> query = torch.randn(4, 10, 2), torch.randn(4, 10, 1)
        >>> maml.loss((support, query)).backward()
        >>> maml.model.weight.grad.shape
        torch.Size([1, 2])
        >>> adapted = maml.adapt((torch.randn(5, 2), torch.randn(5, 1)))
        >>> maml(torch.randn(7, 2), params=adapted).shape
        torch.Size([7, 1])
    """

    first_order = Option[bool]("_options")
    memory = Option[str]("_options")
    truncate = Option[int | None]("_options")
    step_weights = Option[Sequence[float] | None]("_options")
    compiled = Option[bool | str]("_compile_options")

    def __init__(
        self,
        model: nn.Module,
        criterion: Criterion | None,
        *,
        inner_lr: float = 0.01,
        inner_steps: int = 1,
        first_order: bool = False,
        memory: str = "store",
        rule: str
        | GradientTransformation
        | Callable[[Any], GradientTransformation]
        | nn.Module = "sgd",
        rule_options: dict[str, Any] | None = None,
        learn_lr: str | None = None,
        lr_per_step: bool = False,
        inner_loss: Criterion | None = None,
        inner_params: InnerParams = None,
        step_weights: Sequence[float] | None = None,
        truncate: int | None = None,
        batch_norm: str = "by_mode",
        forward: Forward | None = None,
        over_tasks: str = "auto",
        compile: bool | str = False,
        stand_ins: bool = True,
        remat: bool | str | Sequence[str] = False,
    ) -> None:
        options = LoopOptions(
            inner_lr=inner_lr, inner_steps=inner_steps, rule_options=rule_options,
            inner_params=inner_params, batch_norm=batch_norm, first_order=first_order,
            truncate=truncate, step_weights=step_weights, memory=memory, stand_ins=stand_ins,
            remat=remat,
        )  # fmt: skip
        super().__init__(
            model, criterion, options,
            rule=rule, inner_loss=inner_loss, forward=forward, over_tasks=over_tasks,
        )  # fmt: skip
        self._compile_options = CompileOptions(compile)
        self._compiler = MetaCompiler()
        self._check_together()
        self.rates = self._learned_rates(learn_lr, validation.flag("lr_per_step", lr_per_step))

    def _learned_rates(self, granularity: str | None, per_step: bool) -> LearnedRates | None:
        if granularity is None:
            if per_step:
                raise ArgumentValueError(
                    "lr_per_step: expected learn_lr to say what the learned rates are of, got "
                    f"None; set it to one of {', '.join(GRANULARITIES)}."
                )
            return None
        if is_transformation(self.rule):
            raise ArgumentValueError(
                "learn_lr: expected a rule that takes a learning rate, a name or a function of "
                "it, got a rule that has its own; give the function that makes it."
            )
        params = trainable_params(self.model)
        names = names_that_adapt(self.model, params, self.inner_params)
        steps = self.inner_steps if per_step else None
        adapting = {name: params[name] for name in names}
        return LearnedRates(adapting, self.inner_lr, granularity=granularity, steps=steps)

    def _check_change(self, name: str, value: Any) -> None:
        super()._check_change(name, value)
        self._check_together(**{name: value})

    def _check_together(self, **changed: Any) -> None:
        """Raise for options that do not go with compiled blocks."""
        compiled, remat = (changed.get(name, getattr(self, name)) for name in ("compiled", "remat"))
        if compiled and remat is not False and self.over_tasks == "vmap":
            raise ArgumentValueError(
                "MAML: expected over_tasks='loop' or 'auto' with remat= and compile=, got 'vmap', in "
                "which blocks are not compiled. Leave out one of the three."
            )

    @property
    def _block_backend(self) -> str:
        if self.remat is False or not self.compiled:
            return ""
        self._check_together()  # over_tasks may be set later
        return self._compile_options.backend

    def _runner(self, loop: ModuleLoop, start: MetaParams, wanted: bool) -> TaskRunner:
        if not self.compiled or self._block_backend:
            return super()._runner(loop, start, wanted)
        return self._compiler.runner(self._compile_options.backend, loop, start, wanted)

    def _task_result(
        self, loop: ModuleLoop, start: MetaParams, wanted: bool, support: Any, query: Any
    ) -> TaskResult:
        if wanted:
            return loop.meta_gradient(start, support, query)
        return loop.outer_loss(start, support, query)[0]

    def extra_repr(self) -> str:
        """The options that `repr` shows."""
        return (
            f"{super().extra_repr()}, first_order={self.first_order}, memory={self.memory!r}"
            + (f", truncate={self.truncate}" if self.truncate is not None else "")
            + (f", batch_norm={self.batch_norm!r}" if self.batch_norm != "by_mode" else "")
        )


def multi_step_weights(steps: int, epoch: int, epochs: int) -> list[float]:
    r"""Weights of the outer losses after each inner step, annealed from all steps to the last.

        v_i = (1 - epoch / epochs) / steps        for i < steps; the last is the rest of 1

    For `MAML(step_weights=...)`: equal weights at epoch 0, and the last loss alone from `epochs`
    on.

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
