"""Reptile: meta-learning by first derivatives of the inner loop alone."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hoglib.errors import ArgumentValueError
from hoglib.functional import Criterion, Forward
from hoglib.meta.learner import Learner
from hoglib.meta.mapping import TaskResult
from hoglib.meta.module_loop import InnerParams, MetaParams
from hoglib.meta.optimizers import GradientTransformation


class Reptile(Learner):
    r"""Reptile: parameters that move toward where tasks lead them.

        theta_i = inner_steps updates of theta by rule, down grad L(.; support_i)
        gradient = mean_i (theta - theta_i)

    so that a step of `torch.optim.SGD(lr=epsilon)` is theta + epsilon mean_i (theta_i - theta).
    Nothing is differentiated twice. The value of the loss is the outer one, of the query sets at
    theta_i, which the gradient does not come from; give the support set as the query set where
    there is none. Arguments, and what `adapt`, `loss` and calling it do, as in `hoglib.MAML`.
    Parameters that do not adapt get a gradient of zero.
    Raises, beside what `MAML` raises, ValueError for a loss or a rule with parameters, which would
    get no gradient.
    Source: Nichol, Achiam and Schulman, On First-Order Meta-Learning Algorithms, 2018, algorithm 1.
    """

    def __init__(
        self,
        model: nn.Module,
        criterion: Criterion,
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
    ) -> None:
        super().__init__(
            model, criterion, inner_lr=inner_lr, inner_steps=inner_steps, rule=rule,
            rule_options=rule_options, inner_loss=inner_loss, inner_params=inner_params,
            batch_norm=batch_norm, forward=forward, over_tasks=over_tasks, stand_ins=stand_ins,
        )  # fmt: skip
        extras = list(self._point().extras)
        if extras:
            raise ArgumentValueError(
                f"Reptile: expected losses and rules without parameters of their own, got "
                f"{', '.join(extras)}, to which it has no gradient; use hoglib.MAML, or freeze "
                "them with requires_grad_(False)."
            )

    def _constant(self, i: int, steps: int) -> bool:
        return True

    def _of_task(self, point: MetaParams, support: Any, query: Any, wanted: bool) -> TaskResult:
        with torch.no_grad():
            value, notes, adapted = self._outer(point, support, query)
            if not wanted:
                return TaskResult(value, {}, notes)
            moved = {
                name: p - adapted[name] if name in adapted else torch.zeros_like(p)
                for name, p in point.model.items()
            }
        return TaskResult(value, {"model": moved, "extras": {}}, notes)
