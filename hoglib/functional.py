"""How a batch goes into a model and a criterion, and what is said when it does not fit."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from difflib import get_close_matches
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from hoglib._core import validation
from hoglib._core.pytree import tensors_in
from hoglib._core.swap import NormPolicy, Params, swap_parameters, train_mode_batch_statistics
from hoglib._core.torch_internals import eagerly, has_compiled
from hoglib.errors import ArgumentTypeError, ArgumentValueError, HoglibError

BY_ITSELF = "a tensor, a dict or an object of your own is handed to the model as it is"


def inputs_of(batch: Any) -> tuple[Any, ...]:
    """The positional arguments of the model: all but the last of a tuple or list, or the batch."""
    return tuple(batch[:-1]) if _in_parts(batch) else (batch,)


def targets_of(batch: Any) -> Any:
    """What the criterion compares outputs with: the last of a tuple or list, or the batch."""
    return batch[-1] if _in_parts(batch) else batch


def _in_parts(batch: Any) -> bool:
    if not isinstance(batch, tuple | list) or isinstance(batch, PackedSequence):
        return False
    if len(batch) < 2:
        raise ArgumentValueError(
            f"batch: expected a pair (inputs, targets), or (several, inputs, ..., targets), got a "
            f"{type(batch).__name__} of {len(batch)}; {BY_ITSELF}"
            + (", so pass its one element." if batch else ".")
        )
    return True


@contextmanager
def explaining_arguments(model: nn.Module, args: tuple[Any, ...], batch: Any) -> Iterator[None]:
    """Says how to call a model whose forward does not take these arguments.

    Only where they do not bind and forward was never entered: a TypeError from inside it is its own.
    """
    try:
        yield
    except TypeError as error:
        reason = binding_error(model.forward, args)
        if reason is None or _ran(model.forward, error.__traceback__):
            raise
        takes = ", ".join(inspect.signature(model.forward).parameters)
        came = ", ".join(map(_describe, args))
        raise ArgumentTypeError(
            f"model: expected the arguments of {type(model).__name__}.forward({takes}), got "
            f"{len(args)} from the batch: {came} ({reason}). Say how the model is called: "
            f"`functional_loss(model, criterion, forward={_advice(args, batch)})`; the criterion then "
            "gets (outputs, batch)."
        ) from error


def _describe(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{type(value).__name__} with {', '.join(map(repr, value))}"
    return validation.describe(value)


def binding_error(function: Callable[..., Any], args: tuple[Any, ...]) -> str | None:
    """Why a function cannot be called with these positional arguments; None where it can."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some functions of C have none
        return None
    try:
        signature.bind(*args)
    except TypeError as error:
        return str(error)
    return None


def _ran(function: Callable[..., Any], traceback: TracebackType | None) -> bool:
    code = getattr(inspect.unwrap(function), "__code__", None)
    while traceback is not None:
        if traceback.tb_frame.f_code is code:
            return True
        traceback = traceback.tb_next
    return False


def _advice(args: tuple[Any, ...], batch: Any) -> str:
    whole = len(args) == 1 and args[0] is batch
    part = "batch" if whole else "batch[0]"
    if len(args) > 1:
        call = part
    elif isinstance(args[0], Mapping):
        call = f"**{part}"
    elif isinstance(args[0], tuple | list):
        call = f"*{part}"
    else:
        call = "batch.x, batch.y" if whole else "*batch"
    return f"lambda model, batch: model({call})"


@contextmanager
def explaining_devices(batch: Any, home: Any) -> Iterator[None]:
    """Names the tensors of the batch that are not where the tensors of `home` are."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, HoglibError) or not _about_devices(str(error)):
            raise
        devices = {tensor.device for _, tensor in tensors_in("", home)}
        away = [(name, t) for name, t in tensors_in("batch", batch) if t.device not in devices]
        if not devices or not away:
            raise
        name, tensor = away[0]
        where = " and ".join(sorted(map(str, devices)))
        raise ArgumentValueError(
            f"{name}: expected a tensor on {where}, where the model's parameters and outputs are, got "
            f"{validation.describe(tensor)} on {tensor.device}; move the batch with "
            f"`.to({where.split(' and ')[0]!r})`, or the model with `.to({str(tensor.device)!r})`."
        ) from error


def _about_devices(text: str) -> bool:
    # "torch.cuda.": as in "Input type (torch.cuda.FloatTensor)"
    return "device" in text.lower() or "torch.cuda." in text


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
        raise ArgumentValueError(
            f"model: expected at least one trainable parameter, got none in {type(model).__name__} "
            + (
                f"(all {total} are frozen); call requires_grad_(True) on what should learn."
                if total
                else "(it has no parameters at all); pass the module that holds the weights."
            )
        )
    return params


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
            raise ArgumentTypeError(
                f"forward: expected a function of two arguments, (model, batch), got "
                f"{validation.describe(forward)} ({reason}); for instance "
                "`forward=lambda model, batch: model(**batch)`."
            )
        self._dtype: torch.dtype | None = None
        self._treat: NormPolicy = train_mode_batch_statistics
        self._names: set[str] = set()
        self._compiled = False  # until the first call

    def __call__(self, params: Params, batch: Any, *more: Any) -> Tensor:
        if more:
            raise ArgumentTypeError(
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
                with swap_parameters(self._criterion, {}, self._dtype):
                    value = self._criterion(outputs, targets)
            else:
                value = self._criterion(outputs, targets)
        second = "batch" if targets is batch else "targets"
        return validation.scalar(f"criterion(outputs, {second})", value)

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

    def treating(self, treat: NormPolicy) -> "FunctionalLoss":
        """This loss with something else in the places of the model's layers; see `substituted`."""
        loss = copy(self)
        loss._treat = treat
        return loss

    def _with(self, params: Params) -> AbstractContextManager[None]:
        if not isinstance(params, dict):
            raise ArgumentTypeError(
                f"params: expected a dict of tensors by qualified name, got "
                f"{validation.describe(params)}; make one with `hoglib.trainable_params(model)`."
            )
        if not params.keys() <= self._names:
            self._check_names(params)
        return swap_parameters(self.model, params, self._dtype, self._treat)

    def _check_names(self, params: Params) -> None:
        parameters = self.model.named_parameters(remove_duplicate=False)
        self._names = {name for name, _ in parameters}
        self._compiled = has_compiled(self.model)
        for name in params:
            if name not in self._names:
                close = get_close_matches(str(name), self._names, n=1)
                raise ArgumentValueError(
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
        raise ArgumentTypeError(
            f"model: expected a torch.nn.Module of Python, got a {type(model).__name__}, whose "
            "parameters cannot be exchanged; pass the module that was scripted."
        )
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(
            f"model: expected a torch.nn.Module, got {validation.describe(model)}."
        )
    if isinstance(model, nn.DataParallel) and len(model.device_ids) > 1:
        raise ArgumentTypeError(
            "model: expected one that runs where it is, got a DataParallel, whose replicas run in "
            "other threads, with copies of the parameters; pass `model.module`."
        )


def instance(what: str, value: Any) -> Any:
    """A function or module, not the class that one is made from."""
    validation.function(what, value)
    if isinstance(value, type):
        raise ArgumentTypeError(
            f"{what}: expected a function or module, got the class {value.__name__}; "
            f"make one: `{value.__name__}()`."
        )
    return value


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", repr(function)))
