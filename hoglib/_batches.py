"""How a batch goes into a model and a criterion, and what is said when it does not fit."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from hoglib import _arguments as arguments
from hoglib import _tree

BY_ITSELF = "a tensor, a dict or an object of your own is handed to the model as it is"


def inputs_of(batch: Any) -> tuple[Any, ...]:
    """The positional arguments of the model: all but the last of a tuple or list, or the batch."""
    return tuple(batch[:-1]) if _in_parts(batch) else (batch,)


def targets_of(batch: Any) -> Any:
    """What the criterion compares outputs with: the last of a tuple or list, or the batch."""
    return batch[-1] if _in_parts(batch) else batch


def rows(tree: Any, count: int, start: int, end: int) -> Any:
    """The same rows of each tensor whose leading dimension is that of the examples."""
    return _tree.map_tensors(lambda t: t[start:end] if t.dim() and len(t) == count else t, tree)


def _in_parts(batch: Any) -> bool:
    if not isinstance(batch, tuple | list) or isinstance(batch, PackedSequence):
        return False
    if len(batch) < 2:
        raise arguments.WrongValue(
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
        raise arguments.WrongType(
            f"model: expected the arguments of {type(model).__name__}.forward({takes}), got "
            f"{len(args)} from the batch: {came} ({reason}). Say how the model is called: "
            f"`functional_loss(model, criterion, forward={_advice(args, batch)})`; the criterion then "
            "gets (outputs, batch)."
        ) from error


def _describe(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{type(value).__name__} with {', '.join(map(repr, value))}"
    return arguments.describe(value)


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
        if isinstance(error, arguments.Explained) or not _about_devices(str(error)):
            raise
        devices = {tensor.device for _, tensor in tensors_in("", home)}
        away = [(name, t) for name, t in tensors_in("batch", batch) if t.device not in devices]
        if not devices or not away:
            raise
        name, tensor = away[0]
        where = " and ".join(sorted(map(str, devices)))
        raise arguments.WrongValue(
            f"{name}: expected a tensor on {where}, where the model's parameters and outputs are, got "
            f"{arguments.describe(tensor)} on {tensor.device}; move the batch with "
            f"`.to({where.split(' and ')[0]!r})`, or the model with `.to({str(tensor.device)!r})`."
        ) from error


def _about_devices(text: str) -> bool:
    # "torch.cuda.": as in "Input type (torch.cuda.FloatTensor)"
    return "device" in text.lower() or "torch.cuda." in text


def tensors_in(name: str, value: Any, depth: int = 4) -> Iterator[tuple[str, Tensor]]:
    """The tensors in containers and in the attributes of objects, with their names."""
    if isinstance(value, Tensor):
        yield name, value
        return
    if depth == 0 or isinstance(value, str | bytes | type | nn.Module | torch.dtype | torch.device):
        return
    parts: Iterable[tuple[str, Any]] = ()
    if isinstance(value, Mapping):
        parts = [(f"{name}[{key!r}]", part) for key, part in value.items()]
    elif isinstance(value, tuple | list):
        parts = [(f"{name}[{i}]", part) for i, part in enumerate(value)]
    elif hasattr(value, "__dict__"):
        parts = [(f"{name}.{key}", part) for key, part in vars(value).items()]
    for where, part in parts:
        yield from tensors_in(where, part, depth - 1)
