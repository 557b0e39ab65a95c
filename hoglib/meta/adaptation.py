"""Several inner steps on one batch, in memory or through files."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from hoglib._core import closures, validation
from hoglib._core.swap import Params
from hoglib.errors import UnsupportedError
from hoglib.functional import FunctionalLoss
from hoglib.meta.checkpoints import check_memory
from hoglib.meta.disk_loop import Kept, unroll_on_disk
from hoglib.meta.gradient_transformation import GradientTransformation
from hoglib.meta.inner_loop import (
    InnerSteps,
    Loss,
    check_truncate,
    is_truncated,
    unroll,
)
from hoglib.verification.entry_points import examined_functions


def adapt(
    loss: Loss,
    params: Params,
    batch: Any,
    rule: GradientTransformation,
    *,
    steps: int,
    first_order: bool = False,
    truncate: int | None = None,
    memory: str = "store",
    schedule: str = "sqrt",
    directory: str | Path | None = None,
) -> Params:
    r"""Take several inner steps on one batch.

        theta_0 = params        theta_{i+1} = inner_step(theta_i)        returns theta_steps

    Gradients flow to params, to tensors of the batch, to those of the rule and, if loss is a
    :func:`hoglib.functional_loss`, to the model's other parameters.

    Args:
        loss: The loss, a function ``loss(params, batch)`` with a scalar value.
        params: The initial parameters, a pytree of tensors.
        batch: What the loss is computed on, handed to it as it is.
        rule: The update rule, for instance ``hog.meta.sgd(0.1)``.
        steps: The number of steps, 0 or more.
        first_order: Treat the gradient of every step as a constant.
        truncate: Differentiate through the last so many steps only; the gradients of those before
            are constants. Default: all steps.
        memory: What is kept for backward. "store": the graph of every step. "remat": the parameters
            after every step, which is run again in backward. "checkpoint": the parameters after
            every sqrt(steps)-th step and, during backward, the graphs of as many steps, which needs
            least where parameters outweigh activations. "disk": the parameters after a few steps, in
            files of the directory; backward holds the graph of one step, and a backward with
            create_graph runs as by "remat". Not inside torch.func transforms.
        schedule: What "disk" keeps: "sqrt" the parameters after every sqrt(steps)-th step and, in
            memory, those of sqrt(steps) steps that are run again; "log" those after log2(steps) steps.
        directory: Where "disk" keeps its files. The same call goes on there after an interruption, also
            its backward; another call is refused.

    Returns:
        The parameters after the last step, in the structure of params.

    Raises:
        NoSecondDerivative: for a loss that does not depend on params, and for a custom Function
            that is ``@once_differentiable``.
        ArgumentValueError: for another ``memory`` than "store" with a loss or rule that closes over
            tensors, since their gradients would be lost; for a directory of another call.
        NondeterministicError: with "disk", in backward, for steps that are not the same when they are
            run again.
        OutputError: for a directory that cannot be written to, and for a full disk.

    References:
        Finn, Abbeel and Levine, Model-Agnostic Meta-Learning, 2017; Shaban et al., Truncated
        Back-propagation for Bilevel Optimization, 2019 (truncate).

    Example:
        >>> w = torch.tensor(1.0, requires_grad=True)
        >>> loss = lambda params, x: (params["w"] * x).square()
        >>> adapted = hog.meta.adapt(loss, {"w": w}, 2.0, hog.meta.sgd(0.1), steps=2)
        >>> torch.autograd.grad(adapted["w"], w)  # of w (1 - 0.8)^2
        (tensor(0.0400),)
    """
    validation.at_least("steps", steps, 0)
    check_truncate(truncate)
    where = check_memory(memory, schedule, directory)
    rest, modules = ({}, []) if memory == "store" else _lifted_from(loss, rule, params)

    def loss_at(i: int, params: Params, constants: Any) -> tuple[Tensor, Any]:
        batch, rest = constants[:2]
        value = loss({**rest, **params} if rest else params, batch)
        return validation.scalar("loss(params, batch)", value), ()

    inner = InnerSteps(
        loss_at, lambda i, _: rule, lambda i: first_order or is_truncated(i, steps, truncate)
    )
    with examined_functions("adapt"):
        if where is not None:
            _refuse_trainable(modules)
            options = {
                "loss": closures.name_of(loss),
                "first_order": first_order,
                "truncate": truncate,
            }
            generators = closures.refuse("adapt(rule=...)", rule.update)
            generators += [] if isinstance(loss, FunctionalLoss) else closures.refuse("adapt", loss)
            kept = Kept("adapt", where, schedule, options)
            return unroll_on_disk(
                inner, steps, params, (batch, rest), kept, _modules_of(loss, modules), generators
            ).params
        return unroll(
            inner, steps, params, (batch, rest, modules), memory, _modules_of(loss, modules)
        ).params


def _refuse_trainable(modules: Sequence[nn.Module]) -> None:
    for module in modules:
        if any(p.requires_grad for p in module.parameters()):
            raise UnsupportedError(
                f"adapt(memory='disk'): expected a criterion without trainable parameters, got "
                f"{type(module).__name__}, whose gradients it does not take; use memory='remat'."
            )


def _modules_of(loss: Loss, modules: Sequence[nn.Module]) -> list[nn.Module]:
    """All modules whose train or eval mode the loss depends on."""
    models = [loss.model] if isinstance(loss, FunctionalLoss) else []
    return [part for module in (*models, *modules) for part in module.modules()]


def _lifted_from(
    loss: Loss, rule: GradientTransformation, params: Params
) -> tuple[Params, list[nn.Module]]:
    """The model's other parameters and the modules that a loss reads, as inputs of a recomputation."""
    closures.refuse("adapt(rule=...)", rule.update)
    if not isinstance(loss, FunctionalLoss):
        closures.refuse("adapt", loss)
        return {}, []
    rest: Params = {
        n: p for n, p in loss.model.named_parameters() if p.requires_grad and n not in params
    }
    criterion = loss.user_criterion
    return rest, [criterion] if isinstance(criterion, nn.Module) else []
