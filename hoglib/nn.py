"""The ops as modules, with torch's names, reprs and state dicts."""

import torch
from torch import Tensor, nn

from hoglib import _arguments as arguments
from hoglib import ops
from hoglib.ops._linear import activations


class Tanh(nn.Module):
    """`hoglib.ops.tanh` as a module."""

    def forward(self, x: Tensor) -> Tensor:
        return ops.tanh(x)


class Sigmoid(nn.Module):
    """`hoglib.ops.sigmoid` as a module."""

    def forward(self, x: Tensor) -> Tensor:
        return ops.sigmoid(x)


class Swish(nn.Module):
    """`hoglib.ops.swish` as a module: y = x s(beta x).

    beta is a parameter of shape [num_parameters], 1 for all channels or one for each entry of the
    last dimension; with learnable=False it is a buffer.
    """

    beta: Tensor

    def __init__(
        self, num_parameters: int = 1, *, beta: float = 1.0, learnable: bool = True
    ) -> None:
        super().__init__()
        self.num_parameters = arguments.at_least("num_parameters", num_parameters, 1)
        start = torch.full((num_parameters,), float(beta))
        if learnable:
            self.beta = nn.Parameter(start)
        else:
            self.register_buffer("beta", start)

    def forward(self, x: Tensor) -> Tensor:
        return ops.swish(x, self.beta)

    def extra_repr(self) -> str:
        return f"num_parameters={self.num_parameters}"


class Linear(nn.Linear):
    """`torch.nn.Linear` whose product is `hoglib.ops.linear`."""

    def forward(self, input: Tensor) -> Tensor:
        return ops.linear(input, self.weight, self.bias)


class LinearAct(nn.Linear):
    """Linear layer and activation in one Function: y = act(x W^T + b), as `hoglib.ops.linear_act`.

    Parameters, initialisation and state dict are those of `torch.nn.Linear`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        act: str = "tanh",
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.act = arguments.one_of("act", act, activations())

    def forward(self, input: Tensor) -> Tensor:
        return ops.linear_act(input, self.weight, self.bias, act=self.act)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, act={self.act!r}"


__all__ = ["Linear", "LinearAct", "Sigmoid", "Swish", "Tanh"]
