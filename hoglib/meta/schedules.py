"""Learning-rate schedules of torch.optim, as functions of the step that update rules take."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hoglib._core import validation
from hoglib.errors import ArgumentTypeError, ArgumentValueError

Schedule = Callable[[int], Any]


def scheduled(lr: Any, scheduler: Callable[[Any], Any], *, steps: int) -> Schedule:
    r"""The learning rates that a scheduler of torch.optim sets, as a function of the step.

        lr_i = lr f_i        f_i the factors that the scheduler gives a rate of `lr`

    For the argument ``lr`` of a rule: ``hog.meta.sgd(hog.meta.scheduled(...))``.

    Args:
        lr: The initial rate: a positive number, or a tensor with one, which may be learned. Absolute
            rates of a scheduler (eta_min, max_lr) scale with it from its present value on.
        scheduler: A function from an optimizer to the scheduler, stepped once after each step, for
            instance ``lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 30)``.
        steps: The number of steps.

    Returns:
        A function of the step, 0 to steps - 1.

    Raises:
        ArgumentTypeError: for a scheduler that depends on a metric, and for what is none.
        ArgumentValueError: for one that sets the momentum too.

    Example:
        >>> cosine = lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=4)
        >>> rates = hog.meta.scheduled(0.1, cosine, steps=4)
        >>> [round(rates(i), 4) for i in range(4)]
        [0.1, 0.0854, 0.05, 0.0146]
        >>> rule = hog.meta.sgd(rates)
    """
    validation.function("scheduler", scheduler)
    validation.at_least("steps", steps, 1)
    initial = float(lr.detach()) if isinstance(lr, Tensor) else validation.positive("lr", lr)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=initial)
    stepped = scheduler(optimizer)
    kinds = torch.optim.lr_scheduler
    if not isinstance(stepped, kinds.LRScheduler) or isinstance(stepped, kinds.ReduceLROnPlateau):
        raise ArgumentTypeError(
            "scheduler: expected a function from an optimizer to a scheduler of torch.optim that "
            f"depends on the step alone, got {validation.describe(stepped)} from it."
        )
    rates = []
    for _ in range(steps):
        if optimizer.param_groups[0]["momentum"]:  # of this optimizer it is 0
            raise ArgumentValueError(
                "scheduler: expected one that sets the learning rate alone, got one that sets the "
                "momentum too; pass it cycle_momentum=False."
            )
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        stepped.step()

    def at(i: int) -> Any:
        if not 0 <= i < steps:
            raise ArgumentValueError(
                f"scheduled: expected a step of 0 to {steps - 1}, got {i}; make it for more steps."
            )
        return lr * (rates[i] / initial) if isinstance(lr, Tensor) else rates[i]

    return at
