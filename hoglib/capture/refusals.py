"""What a graph cannot hold, refused while it is traced, with the line of the user's that does it.

Two modes look on: one sees what is done to tensors in Python (`.item()`, NumPy, `backward()`), the
other each operation, before it runs, so that nothing is changed by what is refused.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from hoglib._core import torch_internals, validation
from hoglib._core.source_location import is_user_file
from hoglib.errors import HoglibError, UnsupportedError

aten = torch.ops.aten
_READ = {
    Tensor.numpy, Tensor.__array__, Tensor.tolist, Tensor.item, Tensor.data_ptr, Tensor.__float__,
    Tensor.__int__, Tensor.__bool__, Tensor.__index__, Tensor.__complex__,
}  # fmt: skip
_GUARDS = (
    "DataDependentOutputException", "DynamicOutputShapeException", "GuardOnDataDependentSymNode",
    "UnsupportedOperatorException",
)  # fmt: skip
_WORDS = (
    "trying to get value out of a tracing tensor", ".numpy() is not supported", "data_ptr",
    "Cannot access data pointer", "Not available for 'meta'",
)  # fmt: skip
_NORMS = (aten.native_batch_norm.default, aten.cudnn_batch_norm.default)


class OfPython(TorchFunctionMode):
    """Refuses what reads values, also those of tensors that are not arguments, which have some; and
    `backward()`, which gives nothing back."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self._what = what

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        reads = func in _READ or (func is Tensor.__format__ and not args[0].dim())
        if reads and not torch_internals.transforms_active():
            raise reads_values(self._what, f"Tensor.{func.__name__}", line())
        if func is Tensor.backward:
            raise calls_backward(self._what, line())
        return func(*args, **(kwargs or {}))


class OfOperations(TorchDispatchMode):
    """Refuses operations whose result has a shape that depends on values, that draw from a generator
    of their own, or that write to an argument of the function, or to a tensor that it reaches."""

    supports_higher_order_operators = True

    def __init__(self, what: str, given: Sequence[Tensor]) -> None:
        super().__init__()
        self._what = what
        self._kept = {_memory(x) for x in given}
        self._views: list[Tensor] = []  # alive, so that no other gets their memory
        self.outer: list[Tensor] = []  # tensors with values that were computed with a graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)
        tags = func.tags
        if torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags:
            raise reads_values(self._what, str(func), line())
        views = False
        for argument, value in _named(func, args, kwargs):
            if isinstance(value, torch.Generator):
                raise self._draws(func)
            if isinstance(value, Tensor):
                if not isinstance(value, FakeTensor) and value.grad_fn:
                    self.outer.append(value)
                if argument.alias_info is not None or _writes(func, argument):
                    if _writes(func, argument) and self._is_kept(value):
                        raise self._changes(func)
                    views = views or (self._is_kept(value) and func is not aten.lift_fresh.default)
        result = func(*args, **kwargs)
        if views:
            for one in result if isinstance(result, list | tuple) else (result,):
                if isinstance(one, Tensor):
                    self._views.append(one)
                    self._kept.add(_memory(one))
        return result

    def _draws(self, func: Any) -> Exception:
        return UnsupportedError(
            f"{self._what}: expected a function that is given its random numbers, got one that draws "
            f"them from a Generator of its own ({func}{line()}). Draw them outside, and pass them as "
            "an argument."
        )

    def _changes(self, func: Any) -> Exception:
        return UnsupportedError(
            f"{self._what}: expected a function that leaves its arguments, parameters and buffers as "
            f"they are, got one that changes one in place ({func}{line()}). Work on a clone(); a "
            "model in train mode with running statistics runs without them in "
            "`hoglib.functional_loss(model, criterion)`, and in eval mode as it is."
        )

    def _is_kept(self, value: Tensor) -> bool:
        """Whether it is there before the function runs: an argument, or a tensor with values."""
        return not isinstance(value, FakeTensor) or _memory(value) in self._kept


def _writes(func: Any, argument: Any) -> bool:
    if argument.alias_info is not None and argument.alias_info.is_write:
        return True
    return func in _NORMS and argument.name in (
        "running_mean",
        "running_var",
    )  # which do not say so


def _named(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
    """Each argument's schema and value; lists of tensors tensor by tensor."""
    schema = func._schema.arguments
    if func in _NORMS and not args[5]:  # in eval mode nothing is written
        return
    pairs = [
        *zip(schema, args, strict=False),
        *((a, kwargs[a.name]) for a in schema if a.name in kwargs),
    ]
    for argument, value in pairs:
        for one in value if isinstance(value, list | tuple) else (value,):
            yield argument, one


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def refuse_outer_graphs(what: str) -> None:
    """Raises UnsupportedError where what is traced uses a tensor that already has a graph, by which its
    gradient would go on to what that tensor was computed from."""
    mode = _get_current_dispatch_mode()
    if isinstance(mode, OfOperations) and mode.outer:
        raise UnsupportedError(
            f"{what}: expected a loss of arguments and parameters, got one that also reaches "
            f"{validation.describe(mode.outer[0])} that was computed with a graph "
            f"({mode.outer[0].grad_fn}). Pass it as an argument."
        )


@contextmanager
def explaining(what: str) -> Iterator[None]:
    """What torch refuses to trace, in words that say where it stands."""
    try:
        yield
    except HoglibError:
        raise
    except Exception as error:
        if type(error).__name__ in _GUARDS or any(word in str(error) for word in _WORDS):
            how = str(getattr(error, "func", "")) or "a number or a truth value of a tensor"
            raise reads_values(what, how, line(error.__traceback__)) from error
        raise


def reads_values(what: str, how: str, where: str) -> Exception:
    return UnsupportedError(
        f"{what}: expected a function whose graph is the same for all values of its tensors, got one "
        f"that reads them ({how}{where}): if, float(), .item() and NumPy would be traced in. Use "
        "torch.where, keep numbers as tensors, or take that part out of what is compiled."
    )


def calls_backward(what: str, where: str) -> Exception:
    return UnsupportedError(
        f"{what}: expected a function that returns its gradients, got one that calls "
        f"backward(){where}, which leaves them in .grad. Return those of `torch.autograd.grad`, or "
        "compile the loss with `hoglib.compiled_loss` and call backward() on its value."
    )


def line(trace: TracebackType | None = None) -> str:
    """File and line of the user's, innermost, of what runs or of a traceback."""
    if trace is None:
        frame: Any = sys._getframe(1)
        while frame is not None:
            if is_user_file(frame.f_code.co_filename):
                return f" in {frame.f_code.co_filename}:{frame.f_lineno}"
            frame = frame.f_back
        return ""
    found = ""
    at: TracebackType | None = trace
    while at is not None:
        if is_user_file(at.tb_frame.f_code.co_filename):
            found = f" in {at.tb_frame.f_code.co_filename}:{at.tb_lineno}"
        at = at.tb_next
    return found
