"""The ops as modules, with torch's names, reprs and state dicts."""

from typing import Any

import torch
from torch import Tensor, nn

from hoglib import ops
from hoglib._core.messages import validation

__all__ = ["CrossEntropyLoss", "Linear", "LinearAct", "Remat", "Sigmoid", "Swish", "Tanh"]


class Tanh(nn.Module):
    r"""Hyperbolic tangent, by :func:`hoglib.ops.tanh`.

        y = tanh(x)

    Example:
        >>> hog.nn.Tanh()(torch.tensor([0.5]))
        tensor([0.4621])
    """

    def forward(self, x: Tensor) -> Tensor:
        """Apply the activation.

        Args:
            x: A floating-point or complex tensor.
        Returns:
            y, like x.
        """
        return ops.tanh(x)


class Sigmoid(nn.Module):
    r"""Logistic function, by :func:`hoglib.ops.sigmoid`.

        y = 1 / (1 + exp(-x))

    Example:
        >>> hog.nn.Sigmoid()(torch.tensor([1.0]))
        tensor([0.7311])
    """

    def forward(self, x: Tensor) -> Tensor:
        """Apply the activation.

        Args:
            x: A floating-point or complex tensor.
        Returns:
            y, like x.
        """
        return ops.sigmoid(x)


class Swish(nn.Module):
    r"""Swish with a learnable slope, by :func:`hoglib.ops.swish`.

        y = x s(beta x)        s(z) = 1 / (1 + exp(-z))

    Args:
        num_parameters: The size of beta: 1 for all channels, or one for each entry of the last
            dimension. Default: 1.
        beta: The slope to start from. Default: 1, the SiLU.
        learnable: Whether beta is a parameter; otherwise it is a buffer. Default: True.
    Raises:
        ValueError: for a num_parameters below 1.
    Shape:
        - beta: [num_parameters]
    References:
        Ramachandran, Zoph and Le, Searching for Activation Functions, 2017, equation 1.
    Example:
        >>> act = hog.nn.Swish(2, beta=0.5)
        >>> act(torch.ones(1, 2)).sum().backward()
        >>> act.beta.grad
        tensor([0.2350, 0.2350])
    """

    beta: Tensor

    def __init__(
        self, num_parameters: int = 1, *, beta: float = 1.0, learnable: bool = True
    ) -> None:
        super().__init__()
        self.num_parameters = validation.at_least("num_parameters", num_parameters, 1)
        start = torch.full((num_parameters,), float(beta))
        if learnable:
            self.beta = nn.Parameter(start)
        else:
            self.register_buffer("beta", start)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the activation.

        Args:
            x: A floating-point or complex tensor.
        Returns:
            y, like x.
        """
        return ops.swish(x, self.beta)

    def extra_repr(self) -> str:
        """The options, for the repr."""
        return f"num_parameters={self.num_parameters}"


class Linear(nn.Linear):
    r"""`torch.nn.Linear` by :func:`hoglib.ops.linear`.

        y = x W^T + b

    Constructor, parameters, initialisation and state dict are torch.nn.Linear's.

    Example:
        >>> layer = hog.nn.Linear(2, 3)
        >>> layer(torch.ones(4, 2)).shape
        torch.Size([4, 3])
    """

    def forward(self, input: Tensor) -> Tensor:
        """Apply the affine map.

        Args:
            input: x.
        Returns:
            y.
        """
        return ops.linear(input, self.weight, self.bias)


class LinearAct(nn.Linear):
    r"""Linear layer and activation in one Function, by :func:`hoglib.ops.linear_act`.

        y = act(x W^T + b)

    Parameters, initialisation and state dict are torch.nn.Linear's.

    Args:
        in_features: The size of the last dimension of the input.
        out_features: The size of the last dimension of the output.
        bias: Whether there is a b. Default: True.
        device: The device of the parameters. Default: torch's.
        dtype: The dtype of the parameters. Default: torch's.
        act: "relu", "tanh", "sigmoid", "softplus" or "swish". Default: "tanh".
    Raises:
        ValueError: for an unknown act.
    Example:
        >>> layer = hog.nn.LinearAct(2, 3, act="softplus")
        >>> layer(torch.ones(4, 2)).shape
        torch.Size([4, 3])
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
        self.act = validation.choice("act", act, ("relu", "tanh", "sigmoid", "softplus", "swish"))

    def forward(self, input: Tensor) -> Tensor:
        """Apply the layer.

        Args:
            input: x.
        Returns:
            y.
        """
        return ops.linear_act(input, self.weight, self.bias, act=self.act)

    def extra_repr(self) -> str:
        """The options, for the repr."""
        return f"{super().extra_repr()}, act={self.act!r}"


class CrossEntropyLoss(nn.Module):
    r"""`torch.nn.CrossEntropyLoss` without class weights, by :func:`hoglib.ops.softmax_cross_entropy`.

        sum_c q_c (log sum_d exp(z_d) - z_c) for logits z and q = (1 - e) (c = target) + e / C

    Args:
        ignore_index: The class of rows that do not count. Default: -100.
        reduction: "mean", "sum" or "none". Default: "mean".
        label_smoothing: e, from 0 to 1. Default: 0.
    Raises:
        ValueError: for an unknown reduction.
    Example:
        >>> hog.nn.CrossEntropyLoss()(torch.zeros(1, 2), torch.tensor([0]))
        tensor(0.6931)
    """

    def __init__(
        self, ignore_index: int = -100, reduction: str = "mean", label_smoothing: float = 0.0
    ) -> None:
        super().__init__()
        self.ignore_index = ignore_index
        self.reduction = validation.choice("reduction", reduction, ("mean", "sum", "none"))
        self.label_smoothing = label_smoothing

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Compute the loss.

        Args:
            input: Logits z, [C], [N, C] or [N, C, d1, ...].
            target: The class of each row, or class probabilities shaped like input.
        Returns:
            The loss: a scalar, or with reduction "none" one for each row.
        """
        return ops.softmax_cross_entropy(
            input,
            target,
            reduction=self.reduction,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
        )

    def extra_repr(self) -> str:
        """The options, for the repr."""
        return (
            f"ignore_index={self.ignore_index}, reduction={self.reduction!r}, "
            f"label_smoothing={self.label_smoothing}"
        )


class Remat(nn.Module):
    r"""Recomputes a module's intermediate values in backward, by :func:`hoglib.ops.remat`.

        y = module(x)

    The state dict has the module's entries, with the prefix `module.`.

    Args:
        module: The module.
    Example:
        >>> block = hog.nn.Remat(nn.Sequential(nn.Linear(2, 3), nn.Tanh()))
        >>> block(torch.ones(4, 2)).shape
        torch.Size([4, 3])
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module.

        Args:
            args: The module's arguments.
            kwargs: The module's keyword arguments.
        Returns:
            The module's result.
        """
        return ops.remat(self.module)(*args, **kwargs)
