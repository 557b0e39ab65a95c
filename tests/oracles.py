"""What results are compared with: central differences, which share no code with hoglib."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def gradient(function: Callable[..., Tensor], params: dict[str, Tensor]) -> dict[str, Tensor]:
    """The first gradient, by ordinary backward."""
    leaves = {name: p.detach().clone().requires_grad_() for name, p in params.items()}
    grads = torch.autograd.grad(function(leaves), list(leaves.values()), allow_unused=True)
    return {
        name: torch.zeros_like(p) if g is None else g
        for (name, p), g in zip(leaves.items(), grads, strict=True)
    }


def hvp_by_differences(
    function: Callable[..., Tensor],
    params: dict[str, Tensor],
    v: dict[str, Tensor],
    eps: float = 1e-5,
) -> dict[str, Tensor]:
    """(grad f(p + eps v) - grad f(p - eps v)) / 2 eps, in float64."""
    above, below = (
        gradient(function, {n: p + sign * eps * v[n] for n, p in params.items()})
        for sign in (1, -1)
    )
    return {n: (above[n] - below[n]) / (2 * eps) for n in params}


def gradient_by_differences(
    function: Callable[[dict[str, Tensor]], Tensor], params: dict[str, Tensor], eps: float = 1e-5
) -> dict[str, Tensor]:
    """Central differences of values, entry by entry, in float64."""
    result = {}
    for name, p in params.items():
        flat = torch.zeros(p.numel(), dtype=p.dtype)
        for i in range(p.numel()):
            step = torch.zeros(p.numel(), dtype=p.dtype)
            step[i] = eps
            step = step.reshape(p.shape)
            difference = function({**params, name: p + step}) - function({**params, name: p - step})
            flat[i] = difference / (2 * eps)
        result[name] = flat.reshape(p.shape)
    return result


def slopes_by_differences(
    function: Callable[[dict[str, Tensor]], Tensor],
    params: dict[str, Tensor],
    directions: dict[str, Tensor],
    eps: float = 1e-5,
) -> dict[str, Tensor]:
    """d function(params + t v) / dt at 0 for each tensor alone, by central differences in float64."""

    def at(name: str, step: float) -> Tensor:
        return function({**params, name: params[name] + step * directions[name]})

    return {name: (at(name, eps) - at(name, -eps)) / (2 * eps) for name in directions}


def relative(a: Any, b: Any) -> float:
    """|a - b| / |b| over all leaves, in the Euclidean norm."""
    ours = torch.cat([x.detach().reshape(-1) for x in torch.utils._pytree.tree_leaves(a)])
    theirs = torch.cat([x.detach().reshape(-1) for x in torch.utils._pytree.tree_leaves(b)])
    return float((ours - theirs).norm() / theirs.norm())


def random_like(params: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.randn_like(p) for name, p in params.items()}
