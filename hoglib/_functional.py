"""Modules as pure functions of their parameters."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from copy import copy
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor, nn

from hoglib import _arguments as arguments
from hoglib._batches import (
    binding_error,
    explaining_arguments,
    explaining_devices,
    inputs_of,
    targets_of,
)
from hoglib._functorch import eagerly, has_compiled
from hoglib._substitution import Treatment, substituted, without_statistics

Params = dict[str, Tensor]
Criterion = Callable[[Any, Any], Tensor]
Forward = Callable[[nn.Module, Any], Any]


def trainable_params(model: nn.Module) -> Params:
    """The parameters of a model that require grad, by qualified name, as the tensors they are.

    A parameter that the model uses in two places (tied weights) appears once, under its first name.
    Raises ValueError for a model without any, TypeError for what is no `nn.Module`.
    """
    _module(model)
    params: Params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not params:
        total = sum(1 for _ in model.parameters())
        raise arguments.WrongValue(
            f"model: expected at least one trainable parameter, got none in {type(model).__name__} "
            + (
                f"(all {total} are frozen); call requires_grad_(True) on what should learn."
                if total
                else "(it has no parameters at all); pass the module that holds the weights."
            )
        )
    return params


def call_with(model: nn.Module, params: Params, *args: Any, **kwargs: Any) -> Any:
    """The output of a model with these parameters in the place of its own; see `substituted`."""
    with substituted(model, params):
        return model(*args, **kwargs)


class FunctionalLoss:
    """The loss of a model as a function of parameters and batch; made by `functional_loss`."""

    def __init__(
        self, model: nn.Module, criterion: Criterion, forward: Forward | None = None
    ) -> None:
        _module(model)
        self.model = model
        self._criterion = instance("criterion", criterion)
        self._forward = None if forward is None else instance("forward", forward)
        reason = None if forward is None else binding_error(forward, (model, None))
        if reason is not None:
            raise arguments.WrongType(
                f"forward: expected a function of two arguments, (model, batch), got "
                f"{arguments.describe(forward)} ({reason}); for instance "
                "`forward=lambda model, batch: model(**batch)`."
            )
        self._dtype: torch.dtype | None = None
        self._treat: Treatment = without_statistics
        self._names: set[str] = set()
        self._compiled = False  # until the first call

    def __call__(self, params: Params, batch: Any, *more: Any) -> Tensor:
        if more:
            raise arguments.WrongType(
                f"loss(params, batch): expected one batch, got {1 + len(more)} arguments in its place; "
                "pass them as a tuple, (x, y)."
            )
        with self._with(params):  # a criterion may use the model's parameters too
            return self.criterion(self._run(params, batch), batch)

    def outputs(self, params: Params, batch: Any) -> Any:
        """The model's outputs on a batch, as they are: a tensor, tuple, dict or anything else."""
        with self._with(params):
            return self._run(params, batch)

    def _run(self, params: Params, batch: Any) -> Any:
        home = params or list(self.model.parameters())
        with explaining_devices(batch, home), eagerly(self._compiled):
            if self._forward is not None:
                return self._forward(self.model, batch)
            args = inputs_of(batch)
            with explaining_arguments(self.model, args, batch):
                return self.model(*args)

    def call(self, params: Params, *args: Any, **kwargs: Any) -> Any:
        """The model's output for any arguments, with these parameters."""
        with self._with(params):
            return self.model(*args, **kwargs)

    def criterion(self, outputs: Any, batch: Any) -> Tensor:
        """The criterion of outputs and the targets of the batch, or the whole batch."""
        targets = self.targets(batch)
        with explaining_devices(batch, outputs):
            if self._dtype is not None and isinstance(self._criterion, nn.Module):
                with substituted(self._criterion, {}, self._dtype):
                    value = self._criterion(outputs, targets)
            else:
                value = self._criterion(outputs, targets)
        second = "batch" if targets is batch else "targets"
        return arguments.scalar(f"criterion(outputs, {second})", value)

    def double(self) -> "FunctionalLoss":
        """This loss with the model's own parameters and buffers in float64, for parameters in float64.

        For differences of values or gradients, which need the digits. What `params` does not hold
        (frozen parameters, buffers), and those of a criterion that is a module, are converted at each
        call: complex ones to complex128, integers not at all. So it follows the model, which is not
        changed, takes no copy of its other attributes (a deepcopy fails on a model that keeps an
        output), and `forward` may reach modules by other ways than its argument. Parameters and batch
        are the caller's to convert.
        Tensors that are plain attributes, and dtypes that forward names, stay as they are: where they
        do not go together with float64, torch raises.
        """
        loss = copy(self)
        loss._dtype = torch.float64
        return loss

    def treating(self, treat: Treatment) -> "FunctionalLoss":
        """This loss with something else in the places of the model's layers; see `substituted`."""
        loss = copy(self)
        loss._treat = treat
        return loss

    def _with(self, params: Params) -> AbstractContextManager[None]:
        if not isinstance(params, dict):
            raise arguments.WrongType(
                f"params: expected a dict of tensors by qualified name, got "
                f"{arguments.describe(params)}; make one with `hoglib.trainable_params(model)`."
            )
        if not params.keys() <= self._names:
            self._check_names(params)
        return substituted(self.model, params, self._dtype, self._treat)

    def _check_names(self, params: Params) -> None:
        parameters = self.model.named_parameters(remove_duplicate=False)
        self._names = {name for name, _ in parameters}
        self._compiled = has_compiled(self.model)
        for name in params:
            if name not in self._names:
                close = get_close_matches(str(name), self._names, n=1)
                raise arguments.WrongValue(
                    f"params: expected names of parameters of {type(self.model).__name__}, got "
                    f"{name!r}"
                    + (f"; did you mean {close[0]!r}?" if close else ".")
                    + " `hoglib.trainable_params(model)` gives them all."
                )

    @property
    def user_criterion(self) -> Criterion:
        """The criterion as it was given to `functional_loss`."""
        return self._criterion

    def targets(self, batch: Any) -> Any:
        """What the criterion is given of a batch, beside the outputs."""
        return batch if self._forward is not None else targets_of(batch)

    def __repr__(self) -> str:
        parts = [type(self.model).__name__, _name(self._criterion)]
        if self._forward is not None:
            parts.append(f"forward={_name(self._forward)}")
        return f"functional_loss({', '.join(parts)})" + (".double()" if self._dtype else "")


def functional_loss(
    model: nn.Module, criterion: Criterion, *, forward: Forward | None = None
) -> FunctionalLoss:
    """The loss of an unmodified module as a pure function of parameters and a batch of any kind.

        batch                              loss(params, batch), a scalar
        (x, y)                             criterion(model(x), y)
        (x1, x2, ..., y)                   criterion(model(x1, x2, ...), y)
        anything else                      criterion(model(batch), batch)
        anything, with forward=f           criterion(f(model, batch), batch)

    The first two are tuples (named ones too) and lists; x may be a tuple or dict, and is handed over
    as it is. Anything else is a tensor, a dict, a dataclass, a graph, any object. `f` calls the model
    as it likes: `lambda model, batch: model(**batch)`, several calls, its parts (`model.encoder(x)`),
    in the mode that the model is in. Outputs may be anything that the criterion takes.

    `params` is a dict by qualified name, as `trainable_params` gives it; parameters that are not in
    it keep the model's own values. The model is called in the mode it is in (train or eval) and is
    not changed. The parts are there too: `loss.outputs(params, batch)` and
    `loss.criterion(outputs, batch)`; and `loss.double()`, the same in float64.
    Raises TypeError for what is no module or function and, when called, for arguments that the model
    does not take; ValueError, when called, for a criterion whose value is not a scalar, a tuple or list
    of fewer than two, or a batch on another device than the parameters.
    """
    return FunctionalLoss(model, criterion, forward)


def _module(model: Any) -> None:
    if isinstance(model, torch.jit.ScriptModule):
        raise arguments.WrongType(
            f"model: expected a torch.nn.Module of Python, got a {type(model).__name__}, whose "
            "parameters cannot be exchanged; pass the module that was scripted."
        )
    if not isinstance(model, nn.Module):
        raise arguments.WrongType(
            f"model: expected a torch.nn.Module, got {arguments.describe(model)}."
        )
    if isinstance(model, nn.DataParallel) and len(model.device_ids) > 1:
        raise arguments.WrongType(
            "model: expected one that runs where it is, got a DataParallel, whose replicas run in "
            "other threads, with copies of the parameters; pass `model.module`."
        )


def instance(what: str, value: Any) -> Any:
    """A function or module, not the class that one is made from."""
    arguments.function(what, value)
    if isinstance(value, type):
        raise arguments.WrongType(
            f"{what}: expected a function or module, got the class {value.__name__}; "
            f"make one: `{value.__name__}()`."
        )
    return value


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", repr(function)))
