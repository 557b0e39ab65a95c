"""The ops as modules, with torch's names, reprs and state dicts."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hoglib import ops
from hoglib._core import validation
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
        self.num_parameters = validation.at_least("num_parameters", num_parameters, 1)
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
        self.act = validation.one_of("act", act, activations())

    def forward(self, input: Tensor) -> Tensor:
        return ops.linear_act(input, self.weight, self.bias, act=self.act)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, act={self.act!r}"


class SmoothL1Loss(nn.Module):
    """`torch.nn.SmoothL1Loss` on `hoglib.ops.smooth_l1`: reduction is "mean", "sum" or "none"."""

    def __init__(self, reduction: str = "mean", beta: float = 1.0) -> None:
        super().__init__()
        self.reduction = validation.one_of("reduction", reduction, ("mean", "sum", "none"))
        self.beta = beta

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        values = ops.smooth_l1(input, target, beta=self.beta)
        if self.reduction == "none":
            return values
        return values.mean() if self.reduction == "mean" else values.sum()

    def extra_repr(self) -> str:
        return f"reduction={self.reduction!r}, beta={self.beta}"


class CrossEntropyLoss(nn.Module):
    """`torch.nn.CrossEntropyLoss` without class weights, on `hoglib.ops.softmax_cross_entropy`."""

    def __init__(
        self, ignore_index: int = -100, reduction: str = "mean", label_smoothing: float = 0.0
    ) -> None:
        super().__init__()
        self.ignore_index = ignore_index
        self.reduction = validation.one_of("reduction", reduction, ("mean", "sum", "none"))
        self.label_smoothing = label_smoothing

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return ops.softmax_cross_entropy(
            input,
            target,
            reduction=self.reduction,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
        )

    def extra_repr(self) -> str:
        return (
            f"ignore_index={self.ignore_index}, reduction={self.reduction!r}, "
            f"label_smoothing={self.label_smoothing}"
        )


class LogSumExp(nn.Module):
    """Pooling by `hoglib.ops.logsumexp`: a maximum with a derivative to every entry."""

    def __init__(self, dim: int | Sequence[int] = -1, *, keepdim: bool = False) -> None:
        super().__init__()
        self.dim = dim if isinstance(dim, int) else tuple(dim)
        self.keepdim = keepdim

    def forward(self, x: Tensor) -> Tensor:
        return ops.logsumexp(x, self.dim, keepdim=self.keepdim)

    def extra_repr(self) -> str:
        return f"dim={self.dim}, keepdim={self.keepdim}"


class StraightThrough(nn.Module):
    """`hoglib.ops.straight_through`: kind is "sign", "heaviside" or "round", with the gradient of x."""

    def __init__(self, kind: str = "sign") -> None:
        super().__init__()
        self.kind = validation.one_of("kind", kind, ("sign", "heaviside", "round"))

    def forward(self, x: Tensor) -> Tensor:
        return ops.straight_through(x, kind=self.kind)

    def extra_repr(self) -> str:
        return f"kind={self.kind!r}"


class ScaleGradient(nn.Module):
    """`hoglib.ops.scale_gradient`: x, with its gradient times scale."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return ops.scale_gradient(x, scale=self.scale)

    def extra_repr(self) -> str:
        return f"scale={self.scale}"


class GradientReversal(nn.Module):
    """`hoglib.ops.reverse_gradient`: x, with its gradient times -scale.

    Source: Ganin and Lempitsky, Unsupervised Domain Adaptation by Backpropagation, 2015, eq. 10.
    """

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return ops.reverse_gradient(x, scale=self.scale)

    def extra_repr(self) -> str:
        return f"scale={self.scale}"


class ClipGradient(nn.Module):
    """`hoglib.ops.clip_gradient`: x, with its gradient clamped to [-bound, bound]."""

    def __init__(self, bound: float) -> None:
        super().__init__()
        self.bound = validation.positive("bound", bound)

    def forward(self, x: Tensor) -> Tensor:
        return ops.clip_gradient(x, bound=self.bound)

    def extra_repr(self) -> str:
        return f"bound={self.bound}"


class Remat(nn.Module):
    """A module whose intermediate values are recomputed in backward, by `hoglib.ops.remat`.

    The state dict is that of the module under the name `module`.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return ops.remat(self.module)(*args, **kwargs)


__all__ = [
    "ClipGradient",
    "CrossEntropyLoss",
    "GradientReversal",
    "Linear",
    "LinearAct",
    "LogSumExp",
    "Remat",
    "ScaleGradient",
    "Sigmoid",
    "SmoothL1Loss",
    "StraightThrough",
    "Swish",
    "Tanh",
]
