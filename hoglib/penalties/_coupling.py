"""Warns where the score of one sample depends on the others: its gradient is then not its own."""

from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from hoglib._warning import warn
from hoglib.penalties._point import Point

TINY = 1e-6  # of the gradient by the sample itself
# By what a critic is made of, and the modes of the modules that ran: what its first gradient told.
_TOLD: WeakKeyDictionary[Any, dict[tuple[bool, ...], bool]] = WeakKeyDictionary()


def look(point: Point) -> None:
    """Warns of batch statistics by name, and of anything else that couples samples by a look at the
    gradient of one score, once for each function."""
    names = [name for module in point.modules if (name := _of_batch(module, point.func))]
    if not names and not _coupled(point):
        return
    how = f"through {', '.join(names)}, which normalises by the whole batch" if names else "somehow"
    warn(
        f"{point.what}: expected each sample's score to depend on that sample alone, got one that "
        f"depends on the others, {how}. The gradient by a sample then holds parts of all scores, and "
        "a penalty on it is not one of each sample. Use LayerNorm, GroupNorm or InstanceNorm in their "
        "place (Gulrajani et al., Improved Training of Wasserstein GANs, 2017, section 4).",
    )


def _of_batch(module: nn.Module, func: Any) -> str:
    """What a layer that normalises by the batch is called; nothing for another one."""
    if not isinstance(module, _BatchNorm):
        return ""
    if not module.training and module.running_mean is not None:
        return ""
    home = _home(func)
    named = home.named_modules() if isinstance(home, nn.Module) else ()
    name = next((f" {name!r}" for name, each in named if each is module), "")
    return f"{type(module).__name__}{name}{' in training mode' if module.training else ''}"


def _coupled(point: Point) -> bool:
    modes = tuple(module.training for module in point.modules)
    try:
        told = _TOLD.setdefault(_home(point.func), {})
    except TypeError:  # no weak reference to it
        return False
    if modes not in told:
        found = _of_gradient(point)
        if found is None:
            return False
        told[modes] = found
    return told[modes]


def _of_gradient(point: Point) -> bool | None:
    """Whether the first sample's output has a gradient by another's inputs; None: it cannot be told."""
    samples = point.samples
    if samples is None or not samples.count or samples.count < 2 or not point.y.requires_grad:
        return None
    first = point.y.reshape(samples.count, -1)[0].sum()
    grads = torch.autograd.grad(first, point.own, retain_graph=True, allow_unused=True)
    own = others = 0.0
    for k, grad in enumerate(grads):
        if grad is None:
            continue
        size = grad.detach().abs().reshape(len(grad), -1).amax(1)
        mine = samples.of_sample(grad, k, 0)
        own = max(own, float(size[mine].amax()) if mine.any() else 0.0)
        others = max(others, float(size[~mine].amax()) if not mine.all() else 0.0)
    return None if not own and not others else others > TINY * own


def _home(func: Callable[..., Any]) -> Any:
    """What stays the same from call to call of a function that may be made anew for each."""
    if isinstance(func, partial):
        return _home(func.func)
    if hasattr(func, "__wrapped__"):
        return _home(func.__wrapped__)
    if isinstance(func, nn.Module):
        return func
    return getattr(func, "__self__", None) or getattr(func, "__code__", func)
