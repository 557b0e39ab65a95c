"""Modules as pure functions of their parameters."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _NormBase

from hoglib import _arguments as arguments

Params = dict[str, Tensor]
Criterion = Callable[[Any, Any], Tensor]


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
    """The output of a model with these parameters in the place of its own.

    The model is left as it was: train-mode normalisation layers use the statistics of the batch and
    do not update their running averages, which torch could not do under functional transforms
    anyway.
    """
    return functional_call(model, {**params, **without_statistics(model)}, args, kwargs)


def without_statistics(model: nn.Module) -> dict[str, Any]:
    """The state that makes train-mode normalisation use the batch and keep no running averages."""
    return {
        f"{name}.{buffer}" if name else buffer: None
        for name, module in model.named_modules()
        if isinstance(module, _NormBase) and module.training and module.track_running_stats
        for buffer in ("running_mean", "running_var", "num_batches_tracked")
    }


class FunctionalLoss:
    """The loss of a model as a function of parameters and batch; made by `functional_loss`."""

    def __init__(self, model: nn.Module, criterion: Criterion) -> None:
        _module(model)
        self.model = model
        self._criterion = arguments.function("criterion", criterion)

    def __call__(self, params: Params, batch: Any) -> Tensor:
        return self.criterion(self.outputs(params, batch), batch)

    def outputs(self, params: Params, batch: Any) -> Any:
        """The model's outputs on the inputs of the batch, (inputs, targets)."""
        return call_with(self.model, params, _pair("batch", batch)[0])

    def criterion(self, outputs: Any, batch: Any) -> Tensor:
        """The criterion of outputs and the batch's targets."""
        value = self._criterion(outputs, _pair("batch", batch)[1])
        return arguments.scalar("criterion(outputs, targets)", value)

    def __repr__(self) -> str:
        criterion = getattr(self._criterion, "__name__", repr(self._criterion))
        return f"functional_loss({type(self.model).__name__}, {criterion})"


def functional_loss(model: nn.Module, criterion: Criterion) -> FunctionalLoss:
    """The loss of an unmodified module as a pure function.

        loss(params, (x, y)) = criterion(model(x; params), y), a scalar

    `params` is a dict by qualified name, as `trainable_params` gives it; parameters that are not in
    it keep the model's own values. The model is called in the mode it is in (train or eval) and is
    not changed. The parts are there too: `loss.outputs(params, batch)` and
    `loss.criterion(outputs, batch)`.
    Raises TypeError for what is no module or function; ValueError, when called, for a criterion whose
    value is not a scalar or a batch that is not (inputs, targets).
    """
    return FunctionalLoss(model, criterion)


def _module(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise arguments.WrongType(
            f"model: expected a torch.nn.Module, got {arguments.describe(model)}."
        )


def _pair(what: str, batch: Any) -> tuple[Any, Any]:
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        came = (
            f"{type(batch).__name__} of {len(batch)}"
            if isinstance(batch, tuple | list)
            else arguments.describe(batch)
        )
        raise arguments.WrongValue(f"{what}: expected a pair (inputs, targets), got {came}.")
    return batch[0], batch[1]
