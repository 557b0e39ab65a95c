"""Modules as pure functions of their parameters."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _NormBase

from hoglib import _arguments as arguments
from hoglib._functorch import transforms_active
from hoglib._substitution import Places, places_that_linger, substitute

Params = dict[str, Tensor]
WITHOUT_STATISTICS = {
    "track_running_stats": False, "running_mean": None, "running_var": None,
    "num_batches_tracked": None,
}  # fmt: skip
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

    The model is left as it was: buffers that its forward changes are copies, and train-mode
    normalisation layers use the statistics of the batch and do not update their running averages,
    which torch could not do under functional transforms anyway. Inside `lingering()` the parameters
    stay until the model is called again.
    """
    places = places_that_linger()
    if places is not None:
        places.restore(model)
        substitute(places, model, _in_their_places(model, params))
        _without_statistics(places, model)
        return model(*args, **kwargs)
    with batch_statistics(model):
        return functional_call(
            model, _in_their_places(model, params), args, kwargs, tie_weights=False
        )


def _in_their_places(model: nn.Module, params: Params) -> Params:
    """Parameters, and copies of the buffers, for every place in the model that holds one.

    Shared tensors are placed here: `functional_call` ties a module that stands under two names in a way
    that leaves the substituted parameters in it.
    """
    substitutes: dict[int, Tensor] = {}
    for name, value in params.items():
        path, _, own_name = name.rpartition(".")
        substitutes[id(getattr(model.get_submodule(path), own_name))] = value
    places: Params = {}
    for prefix, module in model.named_modules():  # each module once, under its first name
        if isinstance(module, torch.jit.ScriptModule) and transforms_active():
            raise arguments.NotSupported(
                f"{type(model).__name__}: expected modules of Python inside of torch.func, "
                f"got {prefix or 'itself'}, which is scripted: torch gives zero for its second "
                "derivatives, without an error. Use the module that was scripted, or "
                "mode='reverse-over-reverse'."
            )
        path = f"{prefix}." if prefix else ""
        shrinks = getattr(module, "max_norm", None) is not None  # an embedding changes its weight
        for name, own in module.named_parameters(recurse=False, remove_duplicate=False):
            value = substitutes.get(id(own), own)
            if value is not own or shrinks:
                places[path + name] = value.clone() if shrinks else value
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            if id(buffer) not in substitutes:  # a forward may change it
                substitutes[id(buffer)] = buffer.clone()
            places[path + name] = substitutes[id(buffer)]
    return places


@contextmanager
def batch_statistics(model: nn.Module) -> Iterator[None]:
    """Train-mode normalisation layers without running statistics."""
    places = Places()
    try:
        _without_statistics(places, model)
        yield
    finally:
        places.restore()


def _without_statistics(places: Places, model: nn.Module) -> None:
    for layer in model.modules():
        if isinstance(layer, _NormBase) and layer.training and layer.track_running_stats:
            for name, value in WITHOUT_STATISTICS.items():
                places.put(layer, name, value)


class FunctionalLoss:
    """The loss of a model as a function of parameters and batch; made by `functional_loss`."""

    def __init__(self, model: nn.Module, criterion: Criterion) -> None:
        _module(model)
        self.model = model
        self._criterion = arguments.function("criterion", criterion)
        if isinstance(criterion, type):
            raise arguments.WrongType(
                f"criterion: expected a function or module, got the class {criterion.__name__}; "
                f"make one: `{criterion.__name__}()`."
            )
        self._names: set[str] = set()

    def __call__(self, params: Params, batch: Any) -> Tensor:
        return self.criterion(self.outputs(params, batch), batch)

    def outputs(self, params: Params, batch: Any) -> Any:
        """The model's outputs on the inputs of the batch, (inputs, targets)."""
        return self.call(params, _pair("batch", batch)[0])

    def call(self, params: Params, *args: Any, **kwargs: Any) -> Any:
        """The model's output for any arguments, with these parameters."""
        if not isinstance(params, dict):
            raise arguments.WrongType(
                f"params: expected a dict of tensors by qualified name, got "
                f"{arguments.describe(params)}; make one with `hoglib.trainable_params(model)`."
            )
        if not params.keys() <= self._names:
            self._check_names(params)
        return call_with(self.model, params, *args, **kwargs)

    def _check_names(self, params: Params) -> None:
        parameters = self.model.named_parameters(remove_duplicate=False)
        self._names = {name for name, _ in parameters}
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
        return _pair("batch", batch)[1]

    def criterion(self, outputs: Any, batch: Any) -> Tensor:
        """The criterion of outputs and the batch's targets."""
        value = self._criterion(outputs, self.targets(batch))
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
    if isinstance(model, torch.jit.ScriptModule):
        raise arguments.WrongType(
            f"model: expected a torch.nn.Module of Python, got a {type(model).__name__}, whose "
            "parameters cannot be exchanged; pass the module that was scripted."
        )
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
