"""Second-order problems of the experiments, and the spectra that were measured of them."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

import hoglib as hog
from hoglib.lightning import CurvatureMonitor, Measurement

INPUTS = "x"
SecondOrderProblem = tuple[Any, dict[str, Tensor], Any]  # (loss, params, batch)


def measurements(trainer: pl.Trainer) -> list[Measurement]:
    """The spectra of the run that has just ended, or that a checkpoint holds."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, CurvatureMonitor):
            return callback.history
    return []


def sum_by_parameters_and_inputs(
    network: nn.Module, x: Tensor, reduce: Callable[[Tensor], Tensor] = torch.sum, *more: Tensor
) -> SecondOrderProblem:
    """The problem of a gradient penalty: a scalar as a function of parameters and inputs.

        s(theta, x) = reduce(network(x; theta))

    A penalty is a function of the gradients g_n = ds/dx_n. Its gradient by the parameters is made of
    d^2 s / dtheta dx_n, a block of the Hessian of s.

    Args:
        network: The network.
        x: Its inputs [n, ...].
        reduce: Function of its outputs; must be a sum over the inputs.
        more: Its further inputs.
    Returns:
        (loss, params, batch), with x among the params.
    """

    def loss(params: dict[str, Tensor], _: None) -> Tensor:
        # the inputs stand beside the parameters, so that d^2 s / dtheta dx is a block of one
        # Hessian
        own = {name: value for name, value in params.items() if name != INPUTS}
        return reduce(torch.func.functional_call(network, own, (params[INPUTS], *more)))

    return loss, {**hog.trainable_params(network), INPUTS: x}, None
