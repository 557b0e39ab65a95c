"""Gradients in validation, test and prediction."""

import inspect
from collections.abc import Callable, MutableMapping
from copy import copy
from dataclasses import fields, is_dataclass
from functools import wraps
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from hoglib._core import pytree
from hoglib._core.autograd import clone_inference_tensors, grad_enabled

STEPS = ("validation_step", "test_step", "predict_step")
Step = Callable[..., Any]


class EvalGradients:
    """Records gradients in `validation_step`, `test_step` and `predict_step` of a LightningModule.

        class Net(EvalGradients, pl.LightningModule): ...

    Lightning runs these under no_grad inside of `fit`, and in inference mode in `validate`, `test` and
    `predict`, where `torch.autograd.grad` raises and what was made cannot be differentiated later on.
    With this class listed before LightningModule they run with gradients on, and on copies of the
    batch's inference tensors, which autograd refuses; tensors in containers, mappings and dataclasses
    are found, those in other objects are not (`Trainer(inference_mode=False)` makes none). What a step
    returns to a caller that records no gradients, as a trainer, is detached, so that no graph outlives
    the step; a caller that records them, as `training_step` or a subclass, gets the graph.
    Penalties, forces, products and learners of hoglib need none of this: see docs/lightning.md.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in STEPS:
            step = getattr(cls, name, None)
            if name in vars(cls):
                setattr(cls, name, _recording(vars(cls)[name]))
            elif step is not None and not hasattr(step, "_records") and not _is_no_step(name, step):
                setattr(cls, name, _recording(_inherited(cls, name, step)))


def _is_no_step(name: str, step: Step) -> bool:
    """Lightning's own, which do nothing; to override them would be to ask for the loop. Its
    predict_step calls forward."""
    return name != "predict_step" and step is getattr(pl.LightningModule, name)


def _inherited(cls: type, name: str, step: Step) -> Step:
    """What the classes after cls have by that name, found at each call as super() does."""

    @wraps(step)
    def inherited(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(super(cls, self), name)(*args, **kwargs)

    return inherited


def _recording(step: Step) -> Step:
    @wraps(step)
    def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        wanted = torch.is_grad_enabled()
        with grad_enabled():
            args, kwargs = _each(clone_inference_tensors, (args, kwargs))
            result = step(self, *args, **kwargs)
        return result if wanted else _each(Tensor.detach, result)

    # Lightning reads the signature of what is one level below.
    recorded.__wrapped__ = inspect.unwrap(step)
    recorded._records = True  # type: ignore[attr-defined]
    return recorded


def _each(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """`function` of the tensors in containers, dataclasses and mappings of any class; all else as it
    is."""

    def of_leaf(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return function(leaf)
        if is_dataclass(leaf) and not isinstance(leaf, type):
            result: Any = copy(leaf)
            for field in fields(leaf):
                part = _each(function, getattr(leaf, field.name))
                object.__setattr__(result, field.name, part)  # a frozen one too
            return result
        if isinstance(leaf, MutableMapping):
            result = copy(leaf)
            for key in leaf:
                result[key] = _each(function, leaf[key])
            return result
        return leaf

    return pytree.map(of_leaf, value)
