"""Gradients in validation, test and prediction."""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from hoglib._core.substrate.autograd import clone_inference_tensors, grad_enabled
from hoglib.auditing.problem import map_tensors

STEPS = ("validation_step", "test_step", "predict_step")
Step = Callable[..., Any]


class EvalGradients:
    """Enable gradients in ``validation_step``, ``test_step`` and ``predict_step`` of a LightningModule.

    Lightning runs these steps under no_grad inside ``fit``, and in inference mode in ``validate``,
    ``test`` and ``predict``, where ``torch.autograd.grad`` raises and tensors cannot be differentiated
    later. A class that lists EvalGradients before LightningModule runs them with gradients enabled, on
    copies of the inference tensors in the batch. Tensors in containers, mappings and dataclasses are
    found; for other objects use ``Trainer(inference_mode=False)``.

    A step's result is detached for a caller without gradients, such as the trainer, so that no graph
    outlives the step; a caller with gradients enabled, such as ``training_step`` or a subclass, gets
    the graph. hoglib's own penalties, forces, products and learners do not need this class.

    Example:
        >>> from lightning.pytorch import LightningModule
        >>> from hoglib.lightning import EvalGradients
        >>> class Slope(EvalGradients, LightningModule):
        ...     def predict_step(self, x, batch_idx):
        ...         x = x.requires_grad_()
        ...         return torch.autograd.grad(x.square().sum(), x)[0]
        >>> with torch.inference_mode():
        ...     Slope().predict_step(torch.ones(2), 0)
        tensor([2., 2.])
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in STEPS:
            step = getattr(cls, name, None)
            # Lightning's default steps are empty; overriding one would make the trainer run its loop.
            # The default predict_step calls forward, and counts as a step.
            default = name != "predict_step" and step is getattr(pl.LightningModule, name)
            if name in vars(cls):
                setattr(cls, name, _with_gradients(vars(cls)[name]))
            elif step is not None and not default and not hasattr(step, "_enables_gradients"):
                # wrap an inherited step here, and leave the base class unchanged
                setattr(cls, name, _with_gradients(_inherited(cls, name, step)))


def _inherited(cls: type, name: str, step: Step) -> Step:
    """A step that calls the base classes' step, looked up at each call, as super() does."""

    @wraps(step)
    def inherited(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(super(cls, self), name)(*args, **kwargs)

    return inherited


def _with_gradients(step: Step) -> Step:
    @wraps(step)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        caller_has_gradients = torch.is_grad_enabled()
        with grad_enabled():
            args, kwargs = map_tensors(clone_inference_tensors, (args, kwargs))
            result = step(self, *args, **kwargs)
        return result if caller_has_gradients else map_tensors(Tensor.detach, result)

    # Lightning reads the signature of the innermost function
    run.__wrapped__ = inspect.unwrap(step)
    run._enables_gradients = True  # type: ignore[attr-defined]
    return run
