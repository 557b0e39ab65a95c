"""Model-agnostic meta-learning on an unmodified module."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hoglib._core import pytree, torch_internals, validation
from hoglib._core.autograd import materialize_grads
from hoglib._core.closures import Opaque
from hoglib._core.swap import Params, keep_swapped
from hoglib.errors import ArgumentTypeError, ArgumentValueError
from hoglib.functional import Criterion, Forward, trainable_params
from hoglib.meta.compiled import DEFAULT_LOSSES, LoopProgram, MetaCompiler
from hoglib.meta.inner_loop import is_before_the_last
from hoglib.meta.learner import Learner
from hoglib.meta.mapping import TaskResult, TaskRunner
from hoglib.meta.module_loop import InnerParams, MetaParams, Weights
from hoglib.meta.optimizers import GradientTransformation, has_both
from hoglib.meta.rates import GRANULARITIES, Rates


class MAML(Learner):
    r"""MAML: parameters from which a few gradient steps learn a task.

        theta_i = inner_steps updates of theta by rule, down grad L_inner(.; support_i)
        meta-loss = mean_i L(theta_i; query_i)

    model: any nn.Module; it is called with other parameters and never changed. criterion(outputs,
    targets) gives a scalar, the outer loss L. Batches go into the model as `functional_loss` says,
    or by `forward(model, batch)`. Beside the model's, its parameters are those of rates and losses
    that are learned: give `maml.parameters()` to the outer optimizer.

    The inner loop. rule: "sgd", "momentum", "adam", "adamw", "rmsprop" (with rule_options), a
    function from a learning rate to a `Rule`, or an object with `init` and `update`, whose
    parameters are learned if it is a module. learn_lr: inner_lr is the start of rates that are
    learned, for the "model", each "layer", "parameter" or "element" (Meta-SGD); lr_per_step: one
    for each step as well (MAML++). inner_loss: the criterion of the inner loop, if another;
    learned, if it is a module with parameters. inner_params: which parameters adapt, by a predicate
    (name, tensor) or by names and prefixes (ANIL: ["head"]); all are meta-learned.

    The meta-gradient. first_order drops the derivative of the inner gradient (FOMAML); truncate=k
    keeps it in the last k steps only. step_weights: of the outer losses after each step, whose sum
    is minimised (multi-step loss). memory: "store" keeps the graph of every inner step; "remat" the
    parameters after each, at some 1.6 times the time; "checkpoint" those after every
    sqrt(steps)-th, and the graphs of as many, which is least where parameters outweigh activations.
    Models with torch.utils.checkpoint in them are run by "remat". All are the same to rounding.

    batch_norm: "by_mode": layers in train mode use the statistics of the batch at hand and update
    none, those in eval mode use their running ones; "transductive": the batch's in either mode;
    "per_step": the batch's in train mode, and in eval mode running averages of them that are kept
    for each step; "frozen": the model's running statistics in either mode.

    compile: True runs the meta-gradient as a graph (`hoglib.compile`), in the way that takes least time
    in all for compile_for losses (None: many), and says which: "inductor", compiled with all its inner
    steps; "step", one inner step compiled and used for all, which keeps the parameters after each step
    whatever `memory` says; "eager", not compiled, its operations one by one. Models whose graph
    cannot be captured raise, saying why.

    over_tasks: "vmap" runs all tasks at once, "loop" one after the other, "auto" chooses by the
    shapes of parameters and tasks, and loops (with a warning) where vmap cannot run the model.
    stand_ins: inner steps run inside `hoglib.second_order()`, where torch calls that have no second
    derivative, or a wrong one, go to functions that have a right one.

    Attributes (inner_steps, first_order, truncate, step_weights, memory) may be changed between
    steps. Raises TypeError and ValueError for arguments of the wrong kind; RuntimeError, when it
    runs, for a custom Function in the model that is `@once_differentiable`.
    Sources: Finn, Abbeel and Levine, Model-Agnostic Meta-Learning, 2017, algorithm 1; Li et al.,
    Meta-SGD, 2017; Antoniou, Edwards and Storkey, How to train your MAML, 2019; Raghu et al., Rapid
    Learning or Feature Reuse?, 2020 (ANIL); Shaban et al., Truncated Back-propagation, 2019.
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
        compile_for: int | None = None,
        stand_ins: bool = True,
    ) -> None:
        super().__init__(
            model, criterion, inner_lr=inner_lr, inner_steps=inner_steps, rule=rule,
            rule_options=rule_options, inner_loss=inner_loss, inner_params=inner_params,
            batch_norm=batch_norm, forward=forward, over_tasks=over_tasks, stand_ins=stand_ins,
        )  # fmt: skip
        self.first_order = first_order
        self.memory = memory
        self.truncate = truncate
        self.step_weights = step_weights
        self.compiled: bool | str = compile
        self.compile_for = compile_for
        self._compiler = MetaCompiler()
        self._unequal: dict[str, str | None] = {}  # what differs between steps, by options
        self._weights(self.inner_steps)
        self._learn_rates(learn_lr, validation.flag("lr_per_step", lr_per_step))

    @property
    def step_weights(self) -> Sequence[float] | None:
        """Weights of the outer losses after each step."""
        weights: Sequence[float] | None = self._step_weights.value
        return weights

    @step_weights.setter
    def step_weights(self, weights: Sequence[float] | None) -> None:
        self._step_weights = Opaque(weights)

    @property
    def compile_mode(self) -> bool | str:
        """How the meta-gradient is run: False or a mode; True until the first loss chooses one."""
        chosen = self._compiler.chosen if self.compiled is True else None
        return self.compiled if chosen is None else chosen

    def _learn_rates(self, of: str | None, per_step: bool) -> None:
        if of is None:
            if per_step:
                raise ArgumentValueError(
                    "lr_per_step: expected learn_lr to say what the learned rates are of, got "
                    f"None; set it to one of {', '.join(GRANULARITIES)}."
                )
            return
        if has_both(self.rule):
            raise ArgumentValueError(
                "learn_lr: expected a rule that takes a learning rate, a name or a function of "
                "it, got a rule that has its own; give the function that makes it."
            )
        params = trainable_params(self.model)
        adapting = {name: params[name] for name in self._adapting(params)}
        self.rates = Rates(
            adapting, self.inner_lr, of=of, steps=self.inner_steps if per_step else None
        )

    def _constant(self, i: int, steps: int) -> bool:
        return self.first_order or is_before_the_last(i, steps, self.truncate)

    def _memory(self) -> str:
        return "remat" if self._runs_again else self.memory

    def _weights(self, steps: int) -> Weights:
        if self.step_weights is None:
            return None
        if not isinstance(self.step_weights, list | tuple):
            raise ArgumentTypeError(
                "step_weights: expected a list of numbers, got "
                f"{validation.describe(self.step_weights)}."
            )
        weights = [validation.number("step_weights", w, minimum=0) for w in self.step_weights]
        if len(weights) != steps or not any(weights):
            raise ArgumentValueError(
                f"step_weights: expected {steps} weights, one after each inner step and not all "
                f"of them zero, got {list(self.step_weights)}; see "
                "`hoglib.meta.multi_step_weights`."
            )
        return weights

    def _runner(self, point: MetaParams, wanted: bool) -> TaskRunner | None:
        if not self.compiled:
            return None
        losses = self.compile_for or DEFAULT_LOSSES
        return self._compiler.runner(self._program(point), self.compiled, losses, point, wanted)

    def _program(self, point: MetaParams) -> LoopProgram:
        steps, names = self.inner_steps, self._adapting(point.model)
        weights = self._weights(steps)
        nonzero = None if weights is None else [w != 0 for w in weights]
        options = repr((
            steps, self.inner_lr, self.first_order, self.truncate, self.memory, nonzero,
            self.batch_norm, self.inner_params, self.rule, self.rule_options, self.stand_ins,
        ))  # fmt: skip
        return LoopProgram(
            name=type(self).__name__, options=options, inner_steps=steps,
            constant=tuple(self._constant(i, steps) for i in range(steps)), names=tuple(names),
            step_weights=None if weights is None else Opaque(weights), stand_ins=self.stand_ins,
            unequal_steps=lambda: self._unequal_steps(options), init=self._init,
            step=self._step_from, outer=self._outer_value, task=self._of_task,
        )  # fmt: skip

    def _init(self, point: MetaParams, params: Params) -> Any:
        return self._rule(0, point, list(params)).init(params)

    def _unequal_steps(self, options: str) -> str | None:
        if options not in self._unequal:  # which takes as long as a step of a small network
            self._unequal[options] = self._find_unequal_steps()
        return self._unequal[options]

    def _find_unequal_steps(self) -> str | None:
        """What differs between inner steps; None where one step's graph serves all."""
        if self.step_weights is not None:
            return "step_weights, outer losses after some"
        if self.statistics is not None:
            return "batch_norm='per_step'"
        if self.rates is not None and getattr(self.rates, "steps", None) is not None:
            return "lr_per_step"
        point = self._point()
        state = self._init(point, {name: point.model[name] for name in self._adapting(point.model)})
        others = [x for x in pytree.leaves(state) if not isinstance(x, Tensor)]
        if others and not (isinstance(state, dict) and others == [state.get("step")] == [0]):
            return "a rule that counts steps by itself"
        return None

    def _of_task(
        self, point: MetaParams, support: Any, query: Any, wanted: bool, steps: int | None = None,
        weights: Weights = None,
    ) -> TaskResult:  # fmt: skip
        if not wanted:
            value, notes, _ = self._outer(point, support, query, steps, weights)
            return TaskResult(value, {}, notes)
        if torch_internals.transforms_active():

            def noted(point: MetaParams) -> tuple[Tensor, Any]:
                value, notes, _ = self._outer(point, support, query, steps, weights)
                return value, notes

            grads, (value, notes) = torch.func.grad_and_value(noted, has_aux=True)(point)
            return TaskResult(value, grads._asdict(), notes)
        leaves, structure = pytree.flatten(point)
        own = [leaf.detach().requires_grad_() for leaf in leaves]
        with keep_swapped():  # for what backward of the outer loss runs again
            at = pytree.unflatten(own, structure)
            value, notes, _ = self._outer(at, support, query, steps, weights)
            found = torch.autograd.grad(value, own, allow_unused=True)
        grads = pytree.unflatten(materialize_grads(list(found), own), structure)
        return TaskResult(value.detach(), grads._asdict(), notes)

    def extra_repr(self) -> str:
        return (
            f"{super().extra_repr()}, first_order={self.first_order}, memory={self.memory!r}"
            + (f", truncate={self.truncate}" if self.truncate is not None else "")
            + (f", batch_norm={self.batch_norm!r}" if self.batch_norm != "by_mode" else "")
        )


def multi_step_weights(steps: int, epoch: int, epochs: int) -> list[float]:
    r"""Weights of the outer losses after each inner step, which move from all steps to the last.

        v_i = (1 - epoch / epochs) / steps        for i < steps; what is left of 1 for the last

    For `MAML(step_weights=...)`, from the same weight for all at epoch 0 to the last alone from
    `epochs` on. Source: Antoniou, Edwards and Storkey, How to train your MAML, 2019, section 4, MSL
    (annealed linearly).
    """
    validation.at_least("steps", steps, 1)
    validation.at_least("epochs", epochs, 1)
    share = max(0.0, 1 - validation.at_least("epoch", epoch, 0) / epochs) / steps
    return [share] * (steps - 1) + [1 - share * (steps - 1)]
