"""Reptile: meta-learning by first derivatives of the inner loop alone."""

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import nn

from hoglib.errors import ArgumentValueError
from hoglib.functional import Criterion, Forward
from hoglib.meta.gradient_transformation import GradientTransformation
from hoglib.meta.learner import Learner
from hoglib.meta.module_loop import InnerParams, LoopOptions, MetaParams, ModuleLoop
from hoglib.meta.tasks import TaskResult


@final
class Reptile(Learner):
    r"""Reptile: learn parameters by moving toward those that tasks adapt to.

        theta_i = inner_steps updates of theta by rule, along -grad L(.; support_i)
        gradient = mean_i (theta - theta_i)

    A step of `torch.optim.SGD(lr=epsilon)` on this gradient is theta + epsilon mean_i (theta_i -
    theta). Nothing is differentiated twice. The value of the loss is the outer one, of the query
    sets at theta_i, which the gradient does not come from; where there is no query set, give the
    support set in its place. Parameters that do not adapt get a gradient of zero. Options are
    attributes of the same names and may be changed between steps.

    Args:
        model: Any nn.Module. It is called with other parameters and never changed.
        criterion: The loss, ``criterion(outputs, targets)``, a scalar; or a functional loss of the
            model, such as `hoglib.language_model_loss(model)`; or None, if the model computes its own.
        inner_lr: The learning rate of the inner loop.
        inner_steps: The number of inner steps.
        rule: The update rule: "sgd", "momentum", "adam", "adamw" or "rmsprop"; a function from a
            learning rate to a `hoglib.meta.GradientTransformation`; or an object with ``init`` and
            ``update``.
        rule_options: Keyword arguments of a rule that is given by name.
        inner_loss: The criterion of the inner loop. Default: criterion.
        inner_params: The parameters that adapt: a predicate ``(name, tensor) -> bool``, or names
            and prefixes. Default: all.
        batch_norm: What batch norm layers normalise by: "by_mode", "transductive", "per_step" or
            "frozen", as `hoglib.MAML` describes.
        forward: How the model is called, ``forward(model, batch)``. Default: by the parts of the
            batch.
        over_tasks: "vmap" runs all tasks at once, "loop" one after the other, "auto" chooses.
        stand_ins: Run inside `hoglib.second_order()`, where torch calls without a right second
            derivative are replaced by their stand-ins.
        remat: Blocks of the model whose intermediate values are recomputed in backward instead of kept,
            by `hoglib.ops.remat`: True for the blocks that it repeats, or their names or globs, as
            "layers.*".

    Raises:
        ArgumentTypeError, ArgumentValueError: for an argument that is not as described here, and
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

    def __init__(
        self,
        model: nn.Module,
        criterion: Criterion | None,
        *,
        inner_lr: float = 0.01,
        inner_steps: int = 5,
        rule: str | GradientTransformation | Callable[[Any], GradientTransformation] = "sgd",
        rule_options: dict[str, Any] | None = None,
        inner_loss: Criterion | None = None,
        inner_params: InnerParams = None,
        batch_norm: str = "by_mode",
        forward: Forward | None = None,
        over_tasks: str = "auto",
        stand_ins: bool = True,
        remat: bool | str | Sequence[str] = False,
    ) -> None:
        options = LoopOptions(
            inner_lr=inner_lr, inner_steps=inner_steps, rule_options=rule_options,
            inner_params=inner_params, batch_norm=batch_norm, first_order=True, stand_ins=stand_ins,
            remat=remat,
        )  # fmt: skip
        super().__init__(
            model, criterion, options,
            rule=rule, inner_loss=inner_loss, forward=forward, over_tasks=over_tasks,
        )  # fmt: skip
        learned = list(self._loop().meta_params().modules)
        if learned:
            raise ArgumentValueError(
                f"Reptile: expected losses and rules without parameters of their own, got "
                f"{', '.join(learned)}, to which it has no gradient; use hoglib.MAML, or freeze "
                "them with requires_grad_(False)."
            )

    def _task_result(
        self, loop: ModuleLoop, start: MetaParams, wanted: bool, support: Any, query: Any
    ) -> TaskResult:
        with torch.no_grad():
            result, adapted = loop.outer_loss(start, support, query)
            if not wanted:
                return result
            moved = {
                name: p - adapted[name] if name in adapted else torch.zeros_like(p)
                for name, p in start.model.items()
            }
        return result._replace(grads=MetaParams(moved, {}))
