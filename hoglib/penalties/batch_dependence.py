"""Warns where the score of one sample depends on the others: its gradient is then not its own."""

from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.weak import WeakIdKeyDictionary

from hoglib._core.source_location import warn
from hoglib.penalties.critic_state import home
from hoglib.penalties.input_vjp import InputVJP

INSTEAD = (
    "Use LayerNorm, GroupNorm or InstanceNorm in their place (Gulrajani et al., Improved Training of "
    "Wasserstein GANs, 2017, section 4)."
)
LOOK = (
    "Look for a mean, a deviation or attention along the batch, batch_first=False, or rows that belong "
    "together, which batch= names; a feature of the batch that is meant may stay, and this be filtered."
)
TINY = 1e-6  # of the gradient by the sample itself
# By a tensor that a critic learns, the critic, and the modes of the modules that ran: what its
# first
# gradient told. A function that is made anew for each call goes by its code, which critics may
# share.
_TOLD: Any = WeakIdKeyDictionary()


def check_batch_dependence(point: InputVJP) -> None:
    """Warns of batch statistics by name, and of anything else that couples samples by a look at the
    gradient of one score, once for each function."""
    names = [name for module in point.modules if (name := _of_batch(module, point.func))]
    if not names and not _once(point):
        return
    how = f", through {', '.join(names)}, which normalises by the whole batch" if names else ""
    advice = INSTEAD if names else LOOK
    warn(
        f"{point.what}: expected each sample's score to depend on that sample alone, got one that "
        f"depends on the others{how}. The gradient by a sample then holds parts of all scores, and "
        f"what is made of it is not of each sample. {advice}"
    )


def _of_batch(module: nn.Module, func: Any) -> str:
    """What a layer that normalises by the batch is called; nothing for another one."""
    if not isinstance(module, _BatchNorm):
        return ""
    if not module.training and module.running_mean is not None:
        return ""
    owner = home(func)
    named = owner.named_modules() if isinstance(owner, nn.Module) else ()
    name = next((f" {name!r}" for name, each in named if each is module), "")
    return f"{type(module).__name__}{name}{' in training mode' if module.training else ''}"


def _once(point: InputVJP) -> bool:
    modes = tuple(module.training for module in point.modules)
    # by the type: isinstance asks the metaclass of Parameter, which takes its time
    learnt = next((t for t in point.trainable if type(t) is nn.Parameter), point.trainable[0])
    key = id(home(point.func)), getattr(point.func, "__name__", ""), modes
    told: dict[Any, bool] = _TOLD.setdefault(learnt, {})
    if key not in told:
        found = is_batch_dependent(point)
        if found is None:
            return False
        told[key] = found
    return told[key]


def is_batch_dependent(point: InputVJP) -> bool | None:
    """Whether the last sample's output has a gradient by another's inputs; None: it cannot be told.

    The last: of a recurrent or causal layer that takes samples for steps the first depends on no other.
    """
    samples = point.samples
    if samples is None or not samples.count or samples.count < 2 or not point.y.requires_grad:
        return None
    if point.y.is_meta:
        return None
    last = samples.count - 1
    score = point.y.reshape(samples.count, -1)[last].sum()
    grads = torch.autograd.grad(score, point.own, retain_graph=True, allow_unused=True)
    own = others = 0.0
    for k, grad in enumerate(grads):
        if grad is None or not grad.numel():
            continue
        size = grad.detach().abs().reshape(len(grad), -1).amax(1)
        mine = samples.of_sample(grad, k, last)
        own = max(own, float(size[mine].amax()) if mine.any() else 0.0)
        others = max(others, float(size[~mine].amax()) if not mine.all() else 0.0)
    return None if not own and not others else others > TINY * own
