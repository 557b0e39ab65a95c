"""Checks of samples: each has one score or one row of outputs, which depends on that sample alone."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.weak import WeakIdKeyDictionary

from hoglib._core import validation
from hoglib._core.autograd import vjp
from hoglib._core.closures import owner_of
from hoglib._core.source_location import warn
from hoglib.errors import ArgumentValueError
from hoglib.penalties.input_vjp import InputVJP

USE_OTHER_NORM = (
    "Use LayerNorm, GroupNorm or InstanceNorm instead (Gulrajani et al., Improved Training of "
    "Wasserstein GANs, 2017, section 4)."
)
FIND_DEPENDENCE = (
    "Look for a mean, a standard deviation or attention along the batch, for batch_first=False, and "
    "for rows that belong to one sample (pass batch=). Where a statistic of the batch is intended, "
    "filter this warning."
)
TOLERANCE = 1e-6  # of the gradient by the sample's own points
# Whether a critic was found to be batch dependent at its first gradient: by a parameter, then by the
# owner and name of the function and the modes of its modules. A function that is created anew for
# each call goes by its code, which critics may share.
_FOUND_DEPENDENT: Any = WeakIdKeyDictionary()


def check_one_number_a_sample(at: InputVJP) -> None:
    """Raises for an output that is no score of each sample."""
    y, count = at.y, at.count()
    if y.numel() != count or (y.dim() and y.shape[0] != count):
        advice = (
            "this is one number for all samples: leave out the mean over the batch."
            if y.dim() == 0
            else "reduce the numbers of each sample, for instance with "
            "`output=lambda y: y.flatten(1).mean(1)`, select another output with output=, or, if "
            "rows of the points are parts of samples, pass batch=, the sample of each row."
        )
        raise ArgumentValueError(
            f"{at.options.name}: expected one number for each of {count} samples, [{count}] or "
            f"[{count}, 1], got {validation.describe(y)}; {advice}"
        )


def output_rows(at: InputVJP) -> Tensor:
    """The output as one row for each sample, [N, C], or an error."""
    y, count = at.y, at.count()
    if not y.dim() or y.shape[0] != count:
        raise ArgumentValueError(
            f"{at.options.name}: expected an output with one row for each of {count} samples, "
            f"got {validation.describe(y)}; leave out the mean over the batch, or select "
            "another output with output=."
        )
    return y.reshape(count, -1)


def check_batch_dependence(at: InputVJP) -> None:
    """Warns of layers that normalise by the batch, and of any other dependence of one sample's score on
    the other samples, which is looked for once for each function."""
    layers = [
        name
        for module in at.modules
        if isinstance(module, _BatchNorm) and (name := _batch_norm_name(module, at.problem.loss))
    ]
    if not layers and not _found_dependent(at):
        return
    how = f", through {', '.join(layers)}, which normalises by the whole batch" if layers else ""
    warn(
        f"{at.options.name}: expected each sample's score to depend on that sample alone, got "
        f"one that depends on the others{how}. The gradient by a sample then has parts of the "
        "scores of all samples, and its norm is not the slope of that sample's score. "
        f"{USE_OTHER_NORM if layers else FIND_DEPENDENCE}"
    )


def is_batch_dependent(at: InputVJP) -> bool | None:
    """Whether the last sample's output has a gradient by another's points; None if that is unknown.

    The last, because in a recurrent or causal layer that takes samples for steps the first depends on
    no other.
    """
    samples, y = at.samples, at.y
    if samples is None or y.is_meta or not y.requires_grad or at.count() < 2:
        return None
    last = at.count() - 1
    score = y.reshape(last + 1, -1)[last].sum()
    one = torch.ones_like(score)
    grads = vjp([score], at.leaves, [one], at.options.name, retain_graph=True)
    own = others = 0.0
    for grad, index in zip(grads, samples.index, strict=True):
        if grad is None or not grad.numel():
            continue
        size = grad.detach().abs().reshape(len(grad), -1).amax(1)
        rows = torch.arange(len(grad), device=grad.device) if index is None else index
        mine = rows == last
        own = max(own, float(size[mine].amax()) if mine.any() else 0.0)
        others = max(others, float(size[~mine].amax()) if not mine.all() else 0.0)
    return None if not own and not others else others > TOLERANCE * own


def _batch_norm_name(module: _BatchNorm, func: Any) -> str:
    """The name of a layer that normalises by the batch; empty for one that does not."""
    if not module.training and module.running_mean is not None:
        return ""
    owner = owner_of(func)
    named = owner.named_modules() if isinstance(owner, nn.Module) else ()
    name = next((f" {name!r}" for name, each in named if each is module), "")
    return f"{type(module).__name__}{name}{' in training mode' if module.training else ''}"


def _found_dependent(at: InputVJP) -> bool:
    """`is_batch_dependent`, remembered."""
    func, modes = at.problem.loss, tuple([module.training for module in at.modules])
    # by the type: isinstance asks the metaclass of Parameter, which takes its time
    parameter = next((t for t in at.trainable if type(t) is nn.Parameter), at.trainable[0])
    # a module would take long to say that it has no name
    name = "" if isinstance(func, nn.Module) else getattr(func, "__name__", "")
    key = id(owner_of(func)), name, modes
    known: dict[Any, bool] = _FOUND_DEPENDENT.setdefault(parameter, {})
    if key not in known:
        found = is_batch_dependent(at)
        if found is None:
            return False
        known[key] = found
    return known[key]
