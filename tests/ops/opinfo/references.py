"""The ops in plain torch operations: their oracles, written without a look at their derivatives.

Those of surrogate gradients carry the surrogate in `detach` form.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def square(x: Tensor) -> Tensor:
    return x**2


def quadratic(x: Tensor, a: Any, b: Any, c: Any) -> Tensor:
    result: Tensor = a * x**2 + b * x + c
    return result


def swish(x: Tensor, beta: Any) -> Tensor:
    return x * torch.sigmoid(beta * x)


def scaled_activation(x: Tensor, *, scale: float, kind: str) -> Tensor:
    return scale * {"relu": torch.relu, "tanh": torch.tanh}[kind](x)


def smooth_l1(input: Tensor, target: Tensor, *, beta: float = 1.0) -> Tensor:
    """Huber's loss over beta: h (d - h / 2) / beta with h = min(max(d, -beta), beta)."""
    d = input - target
    h = d.clamp(-beta, beta)
    return h * (d - h / 2) / beta if beta else d.abs()


def clamp(
    x: Tensor, *, min: float | None = None, max: float | None = None, straight_through: bool = False
) -> Tensor:
    y = torch.clamp(x, min, max)
    return _with_gradient_of(x, y) if straight_through else y


def split_signs(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.relu(x), torch.relu(-x)


def linear_act(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, act: str) -> Tensor:
    z = F.linear(x, weight, bias)
    if act == "swish":
        return z * torch.sigmoid(z)  # torch's silu refuses complex numbers
    # torch's threshold of 20 leaves an error of 2e-9, which float64 can see
    return F.softplus(z, threshold=40) if act == "softplus" else getattr(torch, act)(z)


def bias_add(x: Tensor, bias: Tensor, *, dim: int = 1) -> Tensor:
    return (x.movedim(dim, -1) + bias).movedim(-1, dim)


def amax(x: Tensor, dim: Any, *, keepdim: bool = False) -> Tensor:
    return torch.amax(x, () if dim is None else dim, keepdim)


def logsumexp(x: Tensor, dim: Any, *, keepdim: bool = False) -> Tensor:
    return torch.logsumexp(x, tuple(range(x.dim())) if dim is None else dim, keepdim)


def straight_through(x: Tensor, *, kind: str = "sign") -> Tensor:
    if kind == "heaviside":
        return _with_gradient_of(x, (x > 0).to(x.dtype))
    return _with_gradient_of(x, getattr(torch, kind)(x))


def scale_gradient(x: Tensor, *, scale: float) -> Tensor:
    return scale * x + (1 - scale) * x.detach()


def reverse_gradient(x: Tensor, *, scale: float = 1.0) -> Tensor:
    return scale_gradient(x, scale=-scale)


def clip_gradient(x: Tensor, *, bound: float) -> Tensor:
    """A hook, because no composite of differentiable operations clips a gradient."""
    y = x.clone()
    if y.requires_grad:
        y.register_hook(lambda g: g.clamp(-bound, bound))
    return y


def clipped_gradient_linear(x: Tensor, weight: Tensor, *, bound: float) -> Tensor:
    return F.linear(clip_gradient(x, bound=bound), weight)


def stop_gradient(x: Tensor) -> Tensor:
    return x.detach()


def _with_gradient_of(x: Tensor, y: Tensor) -> Tensor:
    return y.detach() + x - x.detach()
