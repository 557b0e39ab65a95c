"""What the optimizers that are given batches, not gradients, have in common."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from math import inf
from typing import Any

import torch
from torch import Tensor

from hoglib._core import validation
from hoglib.curvature.gauss_newton import GaussNewtonKind
from hoglib.curvature.vector_space import check_named
from hoglib.errors import ArgumentTypeError, ArgumentValueError, NonFiniteError
from hoglib.functional import trainable_params


def refuse_unknown(
    caller: str, options: dict[str, Any], known: Collection[str], operator: str
) -> None:
    """Raises for an option that an optimizer cannot pass on to the operator of its steps."""
    unknown = sorted(set(options).difference(known))
    if unknown:
        raise ArgumentTypeError(
            f"{caller}: expected options of {operator}, {', '.join(sorted(known))}, got "
            f"{', '.join(unknown)}."
        )


class BatchOptimizer(torch.optim.Optimizer, ABC):
    """An optimizer of torch whose steps compute the loss at a batch; `.grad` is not used.

    Args:
        loss: From `hoglib.functional_loss`.
        params: A dict of tensors by name; by default all trainable ones of the loss's model.
        defaults: The options, which ``state_dict()`` contains.
    """

    info: Any  # about the last step

    def __init__(
        self, loss: Any, params: dict[str, Tensor] | None, defaults: dict[str, Any]
    ) -> None:
        self._loss = GaussNewtonKind().check_loss(loss)
        self._params: dict[str, Any] = trainable_params(loss.model) if params is None else params
        check_named(self._params)
        self._trained = [name for name, p in self._params.items() if p.requires_grad]
        super().__init__(list(self._params.items()), defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise for a second group: a step is a step of all parameters.

        Args:
            param_group: The group.
        """
        if self.param_groups:
            raise ArgumentValueError(
                "param_groups: expected one group, got a second; the matrix is that of all parameters. "
                "Give all of them as params."
            )
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; raise for that of another optimizer.

        Args:
            state_dict: From ``state_dict()``.
        """
        lacking = self.defaults.keys() - state_dict["param_groups"][0].keys()
        if lacking:
            raise ArgumentValueError(
                f"state_dict: expected that of a {type(self).__name__}, got one without "
                f"{', '.join(sorted(lacking))}, of another optimizer; start with a fresh state."
            )
        super().load_state_dict(state_dict)

    def _batch(self, closure: Any) -> Any:
        """The batch that a step is given, as it is or by a function."""
        frozen = [name for name in self._trained if not self._params[name].requires_grad]
        if frozen:  # a step would move them all the same
            raise ArgumentValueError(
                f"params: expected parameters that require gradients, as they did at first, got "
                f"{validation.listing(frozen)} without; make a new optimizer of those to be trained."
            )
        batch = closure() if callable(closure) else closure
        if batch is None:
            raise ArgumentTypeError(
                "step: expected a batch, or a function without arguments that returns one, got None; "
                "the matrix is computed on the batch: `optimizer.step((x, y))`."
            )
        return batch

    def __getstate__(self) -> dict[str, Any]:
        """For copies: that of torch leaves out the attributes of subclasses."""
        return {**vars(self), **super().__getstate__()}

    @abstractmethod
    def step(self, closure: Any = None) -> Tensor:  # type: ignore[override]
        """Take one step; return the loss before it.

        Args:
            closure: A batch, or a re-iterable of batches, or a function that returns one.
        """


def positive_damping(damping: Any) -> float:
    if not 0 < validation.number("damping", damping) < inf:
        raise ArgumentValueError(
            f"damping: expected a number greater than 0, got {damping}; 1 is usual."
        )
    return float(damping)


def finite_or_infinite(loss: Callable[[], Tensor]) -> float:
    """The loss, or infinity where it overflows, because the step is too long."""
    try:
        return float(loss())
    except NonFiniteError:
        return inf
