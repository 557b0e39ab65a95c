"""Meta-learning with implicit gradients: memory and result do not depend on the path of the
inner loop."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hoglib._core import pytree, validation
from hoglib._core.swap import Params
from hoglib.errors import ArgumentValueError
from hoglib.functional import Criterion, Forward, FunctionalLoss
from hoglib.meta.implicit import Residual, implicit_gradient, solver_of
from hoglib.meta.learner import Learner
from hoglib.meta.mapping import TaskResult
from hoglib.meta.module_loop import InnerParams, MetaParams
from hoglib.meta.optimizers import GradientTransformation


class IMAML(Learner):
    r"""iMAML: parameters that the solutions of tasks are drawn to.

        theta_i = argmin L_inner(.; support_i) + strength / 2 |. - theta|^2
        gradient = mean_i (I + H_i / strength)^-1 d L(theta_i; query_i)
        H_i = d^2 L_inner(.; support_i) at theta_i

    The argmin is what inner_steps updates by rule, from theta on, come to.

    The gradient is that of a minimum, which inner_steps have to reach; after `loss` the attribute
    `residual` says for each task how far they came (stationarity) and how well the linear system was
    solved (system). solver: "cg" or "neumann" with so many iterations, products with the Hessian of
    `hoglib.curvature`; damping is added to H_i + strength; step_size: of the Neumann series, inner_lr
    by default. What is learned beside the initial point (parameters that do not adapt, a learned
    inner_loss) gets its gradient likewise. The graph of one gradient is all the memory it takes,
    whatever the number of steps. Tasks are run one after the other. Other arguments, and what `adapt`,
    `loss` and calling it do, as in `hoglib.MAML`.
    Warns where strength and damping do not make the system positive definite, as conjugate gradients
    need it, and goes on with what they found before they met a direction of negative curvature.
    Source: Rajeswaran, Finn, Kakade and Levine, Meta-Learning with Implicit Gradients, 2019, eq. 3
    and 6.
    """

    def __init__(
        self,
        model: nn.Module,
        criterion: Criterion,
        *,
        strength: float = 2.0,
        inner_lr: float = 0.01,
        inner_steps: int = 20,
        solver: str = "cg",
        iterations: int = 10,
        damping: float = 0.0,
        step_size: float | None = None,
        rule: str | GradientTransformation | Callable[[Any], GradientTransformation] = "sgd",
        rule_options: dict[str, Any] | None = None,
        inner_loss: Criterion | None = None,
        inner_params: InnerParams = None,
        batch_norm: str = "by_mode",
        forward: Forward | None = None,
        stand_ins: bool = True,
    ) -> None:
        super().__init__(
            model, criterion, inner_lr=inner_lr, inner_steps=inner_steps, rule=rule,
            rule_options=rule_options, inner_loss=inner_loss, inner_params=inner_params,
            batch_norm=batch_norm, forward=forward, over_tasks="loop", stand_ins=stand_ins,
        )  # fmt: skip
        if self.statistics is not None:
            raise ArgumentValueError(
                "batch_norm: expected 'by_mode', 'transductive' or 'frozen' with IMAML, got "
                "'per_step'; a minimum knows no steps."
            )
        self.strength = validation.number("strength", strength, minimum=0)
        if not self.strength > 0:
            raise ArgumentValueError(
                "strength: expected a number greater than 0, got 0: without a regulariser the "
                "solutions of tasks do not depend on where they start. Typical values are 0.5 to 5."
            )
        step_size = self.inner_lr if step_size is None else step_size
        self.solver = solver_of(solver, iterations, damping, None, step_size)._replace(goes_on=True)
        self.residual: Residual | None = None

    def _constant(self, i: int, steps: int) -> bool:
        return True

    def _inner_value(
        self, point: MetaParams, params: Params, support: Any, loss: FunctionalLoss
    ) -> Tensor:
        value = super()._inner_value(point, params, support, loss)
        apart = {name: p - point.model[name] for name, p in params.items()}
        return value + self.strength / 2 * pytree.dot(apart, apart).real

    def _of_task(self, point: MetaParams, support: Any, query: Any, wanted: bool) -> TaskResult:
        with torch.no_grad():
            value, notes, params = self._outer(point, support, query)
        none = value.new_zeros(())
        residual, grads = Residual(none, none), {}
        if wanted:
            loss = self.inner_objective.with_norm_policy(self._norms(self.inner_steps))
            value, found, residual = implicit_gradient(
                lambda params, point: self._outer_value(point, params, query, self.inner_steps),
                lambda params, point: self._inner_value(point, params, support, loss),
                params,
                point,
                self.solver,
            )
            grads = found._asdict()
        return TaskResult(value, grads, (*notes, residual))

    def _note(self, found: TaskResult) -> None:
        super()._note(found)
        self.residual = found.notes[2]

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, strength={self.strength}, solver={self.solver.name!r}"
