"""What penalties on gradients differentiate: a sum by parameters and by inputs."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import hoglib as hog

INPUTS = "x"


def by_parameters_and_inputs(
    network: nn.Module, x: Tensor, of: Callable[[Tensor], Tensor] = torch.sum
) -> tuple[Any, dict[str, Tensor], None]:
    """The problem (loss, params, batch) of `of`(network(x)), a sum over the inputs x_n.

    A penalty is a function of its gradients by the inputs, g_n, and trains the network by the
    derivatives of g_n by the parameters: those of two orders, of one kind each, of this sum.
    """

    def loss(params: dict[str, Tensor], _: None) -> Tensor:
        own = {name: value for name, value in params.items() if name != INPUTS}
        return of(torch.func.functional_call(network, own, (params[INPUTS],)))

    return loss, {**hog.trainable_params(network), INPUTS: x}, None
