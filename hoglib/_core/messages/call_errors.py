"""Errors in calls of models and criteria: advice if an error concerns the arguments."""

import inspect
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from numbers import Number
from traceback import walk_tb
from typing import Any, final

import torch
from torch import Tensor, nn

from hoglib._core.messages import validation
from hoglib._core.messages.closures import STATE, ClosureWalker
from hoglib._core.runtime.source_location import raising_modules
from hoglib._core.torch_api.pytree import tensors_in
from hoglib.errors import ArgumentTypeError, ArgumentValueError, HoglibError, UnsupportedError


def explain_call_error(
    error: Exception, function: Any, args: Any, keywords: Any, explain: Callable[[str], str]
) -> None:
    """Raises an error with advice if `error` concerns the arguments of the function.

    An error does if the arguments do not bind (a TypeError, and the function was never entered), or if
    code uses an argument of another type as a tensor. All other errors are the function's own.
    """
    if not isinstance(error, TypeError | AttributeError) or isinstance(error, HoglibError):
        return
    target = function.forward if isinstance(function, nn.Module) else function
    reason = _misuse(error, args)
    if reason is None and isinstance(error, TypeError):
        reason = binding_error(target, args, keywords)
        code = getattr(inspect.unwrap(target), "__code__", None)
        # a frame of the function in the traceback: it was entered, and the error is its own
        if any(frame.f_code is code for frame, _ in walk_tb(error.__traceback__)):
            return
    if reason is not None:
        raise ArgumentTypeError(explain(reason)) from error


def _misuse(error: Exception, args: tuple[Any, ...]) -> str | None:
    """The reason, for messages, if code used an argument of another type as a tensor; else None."""
    for x in args:
        if x is None or isinstance(x, Tensor | Number | str):
            continue
        name = type(x).__name__
        if isinstance(error, AttributeError):
            if error.obj is x and hasattr(Tensor, error.name or ""):
                return f"{name!r} object has no attribute {error.name!r}"
        elif f"must be Tensor, not {name}" in str(error) or f"- got ({name}," in str(error):
            return str(error).splitlines()[0]
    return None


def explain_criterion(criterion: Any, outputs: Any, targets: Any, whole: bool, reason: str) -> str:
    """Advice for outputs and targets that a criterion does not accept."""
    second = "batch" if whole else "targets"
    function = criterion.forward if isinstance(criterion, nn.Module) else criterion
    name = f"{type(criterion).__name__}.forward"
    name = function_name(function) if function is criterion else name
    if "missing" in reason:
        advice = "Give it the other arguments beforehand, by functools.partial."
    else:
        both = f"{_tensor_hint('outputs', outputs)}, {_tensor_hint(second, targets, -1)}"
        arguments = "outputs" if "too many" in reason else both
        advice = f"Write for instance `lambda outputs, {second}: criterion({arguments})`."
    return (
        f"criterion: expected a function of (outputs, {second}), got {name}"
        f"({', '.join(inspect.signature(function).parameters)}) ({reason}). It is called with what the "
        f"model returned, {describe_argument(outputs)}, and with "
        f"{'the batch' if whole else 'the last of the batch'}, {describe_argument(targets)}. {advice}"
    )


def _tensor_hint(name: str, value: Any, at: int = 0) -> str:
    """An expression for a tensor in outputs or targets. at: the index in a sequence."""
    if isinstance(value, Tensor):
        return name
    if hasattr(value, "logits"):
        return f"{name}.logits"
    if isinstance(value, Mapping):
        return f"{name}[{'labels' if 'labels' in value else next(reversed([*value]), '...')!r}]"
    is_sequence = isinstance(value, tuple | list) and value
    return f"{name}[{range(len(value))[at]}]" if is_sequence else f"{name}.y"


def binding_error(
    function: Callable[..., Any], args: tuple[Any, ...], keywords: Mapping[str, Any] | None = None
) -> str | None:
    """The reason why a function cannot be called with these arguments; None if it can."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some functions written in C have no signature
        return None
    try:
        signature.bind(*args, **keywords or {})
    except TypeError as error:
        return str(error)
    return None


def describe_argument(value: object) -> str:
    if isinstance(value, Mapping):
        return f"{type(value).__name__} with {', '.join(map(repr, value))}"
    return validation.describe(value)


_OF_TARGETS = re.compile(r"label|target|mask|weight|length|^(y|idx?|index)$", re.IGNORECASE)


def forward_hint(forward: Callable[..., Any], args: tuple[Any, ...], batch: object) -> str:
    """A suggestion for `forward=`, from the arguments of the failed call."""
    whole = len(args) == 1 and args[0] is batch
    part = "batch" if whole else "batch[0]"
    if not args:
        call = "**{name: batch[name] for name in ...}"
    elif len(args) > 1 and not isinstance(args[0], Mapping):
        call = part
    elif isinstance(args[0], Mapping):
        taken = [name for name in args[0] if name in inspect.signature(forward).parameters]
        if len(taken) == len(args[0]) or binding_error(forward, (), args[0]) is None:
            call = f"**{part}"
        elif taken:
            call = ", ".join(f"{name}={part}[{name!r}]" for name in taken)
        else:
            names = [name for name in args[0] if not _OF_TARGETS.search(str(name))]
            call = f"{part}[{(names or [*args[0], '...'])[0]!r}]"
    elif isinstance(args[0], tuple | list):
        call = f"*{part}"
    else:
        call = "batch.x, batch.y" if whole else "*batch"
    return f"lambda model, batch: model({call})"


class ErrorTranslation:
    """A context manager that passes an exception from inside to `explain`."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, Exception):
            self.explain(error)

    def explain(self, error: Exception) -> None:
        """Raise a clearer error, or return to let this error through."""
        raise NotImplementedError


_ADVICE = {  # part of torch's message -> advice
    r"dtype|scalar type|type.*should be the same|be cast to": "Convert numbers to the dtype of the "
    "parameters, by `.to(DTYPE)`, or call it inside the autocast region that they come from; labels "
    "and tokens by `.long()`.",
    "not implemented for '": "Convert integers by `.float()`; a criterion gets (outputs, targets), in "
    "this order.",
    r"cannot be multiplied \(1x": "A single example is a batch of one: `x[None]`.",
    "must be Tensor, not (list|tuple|dict)": "The function is called with one argument, in the "
    "structure in which it was given: stack a list of samples by `torch.stack`, or write "
    "`lambda inputs: model(*inputs)`.",
    r"numpy\.ndarray": "Make tensors of arrays by `torch.as_tensor`.",
    r'missing the required "forward"': "Write a forward, or say how the model is called: "
    "`functional_loss(model, criterion, forward=lambda model, batch: ...)`.",
    r"index out of range in self|Target .* out of bounds": "Labels and tokens count from 0, and are "
    "fewer than outputs, or rows of the table.",
    r"failed to converge|not positive-definite": "NaN and infinity raise this too: are the parameters "
    "finite? Steps with a large learning rate diverge.",
    r"target tensor expected|Target size": "Give targets the shape for the criterion: `.squeeze(1)`?",
}


# Part of torch's message about nested or inference tensors -> expected, got, advice.
# In a shape, j with a number is the ragged dimension of a nested tensor.
_KINDS = {
    r"Nested(Tensor|Int)|'_nested_|, j\d+[,)\]]|only concrete integers|aten::matmul_backward": (
        "dense tensors",
        "a nested tensor, of which torch lacks this operation or its derivative",
        "Use mode='reverse-over-reverse', in which torch lacks less; pad it before the model, by "
        "`torch.nested.to_padded_tensor`, with a mask for what is added; or apply layers to its "
        "`.values()`.",
    ),
    r"[Ii]nference tensor|does not require grad and does not have a grad_fn": (
        "tensors that autograd records",
        "others, as torch.inference_mode() makes them",
        "In the model use `torch.no_grad()` for what is constant, or `.clone()` its results outside; "
        "a value that parameters do not reach has no derivative.",
    ),
}


def explain_kind_of_tensor(caller: str, error: object) -> None:
    """Raise an error with advice if torch's error concerns a kind of tensor, nested or inference."""
    if isinstance(error, HoglibError) or not isinstance(
        error, RuntimeError | ValueError | AttributeError
    ):
        return
    text = re.split(r"\n|\. |\.$", str(error))[0]
    for words, (expected, got, advice) in _KINDS.items():
        if re.search(words, text):
            text = f"{caller}: expected {expected}, got {got}: {text}. {advice}"
            raise UnsupportedError(text) from error


@final
class translate_batch_errors(ErrorTranslation):  # noqa: N801 a context manager
    """Inside, errors get a note that names the batch and the raising module. Errors of torch about
    devices become an ArgumentValueError that names the tensor on a wrong device.

    reference: Tensors with the right device, or a function that reaches such tensors.
    what: The name of the batch.
    """

    def __init__(self, batch: object, reference: Any, what: str = "batch") -> None:
        self._batch, self._reference, self._what = batch, reference, what

    def __enter__(self) -> None:
        # torch's embedding accepts "meta" tokens, and returns uninitialized memory
        if any(tensor.is_meta for _, tensor in tensors_in("", self._batch)):
            self._raise_if_apart(None)

    def explain(self, error: Exception) -> None:
        if isinstance(error, HoglibError | torch.OutOfMemoryError):
            return
        # in nested contexts, the innermost adds the note
        if not hasattr(error, "__notes__"):
            with suppress(Exception):  # a failing `extra_repr` would hide the error
                self._add_note(error)
        text = str(error) if isinstance(error, RuntimeError) else ""
        # "torch.cuda.": as in "Input type (torch.cuda.FloatTensor)"
        if "device" in text.lower() or "torch.cuda." in text or "meta tensor" in text:
            self._raise_if_apart(error)

    def _add_note(self, error: Exception) -> None:
        """Add a note on the batch and the module to an error, such as one about shapes."""
        found = [f"{at}, {validation.describe(x)}" for at, x in tensors_in(self._what, self._batch)]
        found = found or [f"{self._what}, {describe_argument(self._batch)}"]
        place, modules, reference = "", raising_modules(error), self._reference
        advice = [text for words, text in _ADVICE.items() if re.search(words, str(error))]
        if isinstance(reference, Tensor):
            place = f" in the criterion, of outputs that are {validation.describe(reference)},"
            if isinstance(self._batch, Tensor):
                advice.append("A batch of one tensor is its own target: pass (inputs, targets).")
        elif modules:
            own, model = modules[0], modules[-1]
            name = next((name for name, module in model.named_modules() if module is own), "")
            where = f"module {name!r}" if name else "the model"
            place = f" in {where}, {type(own).__name__}({own.extra_repr()}),"
        parameters = modules[-1].parameters() if modules else ()
        dtypes = {str(p.dtype) for p in parameters if p.is_floating_point()}
        dtype = dtypes.pop() if len(dtypes) == 1 else "next(model.parameters()).dtype"
        text = " ".join([f"hoglib: raised{place} for {'; '.join(found[:6])}.", *advice])
        error.add_note(text.replace("DTYPE", dtype))

    def _raise_if_apart(self, error: Exception | None) -> None:
        reference = self._reference
        if callable(reference):
            reached = ClosureWalker(reference, STATE).objects
            reference = [x for x in reached if isinstance(x, Tensor)]
            reference += [x.state_dict() for x in reached if isinstance(x, nn.Module)]
        devices = {tensor.device for _, tensor in tensors_in("", reference)}
        found = tensors_in(self._what, self._batch)
        away = [(name, tensor) for name, tensor in found if tensor.device not in devices]
        if not devices or not away:
            return
        name, tensor = away[0]
        expected = " and ".join(sorted(map(str, devices)))
        raise ArgumentValueError(
            f"{name}: expected a tensor on {expected}, where the model's parameters and outputs are, "
            f"got {validation.describe(tensor)} on {tensor.device}; move the {self._what} with "
            f"`.to({expected.split(' and ')[0]!r})`, or the model with `.to({str(tensor.device)!r})`."
        ) from error


def function_name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__name__", repr(function)))
