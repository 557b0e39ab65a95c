"""Refuses, during a trace, what a graph cannot contain, and names the user's line.

Two modes check: one sees calls on tensors in Python (`.item()`, NumPy, `backward()`), the other one
each operation before it runs, so that a refused operation changes nothing.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from traceback import walk_stack, walk_tb
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode,
)

from hoglib._core import pytree, torch_internals, validation
from hoglib._core.source_location import is_user_file
from hoglib.errors import HoglibError, UnsupportedError

aten = torch.ops.aten
_READS = {
    Tensor.item, Tensor.__float__, Tensor.__int__, Tensor.__bool__, Tensor.__index__,
    Tensor.__complex__, Tensor.numpy, Tensor.__array__, Tensor.tolist,
}  # fmt: skip
_GUARDS = (
    "DataDependentOutputException", "DynamicOutputShapeException", "GuardOnDataDependentSymNode",
    "UnsupportedOperatorException",
)  # fmt: skip
_WORDS = (
    "trying to get value out of a tracing tensor", ".numpy() is not supported", "data_ptr",
    "Cannot access data pointer", "Not available for 'meta'",
    "size_bytes_is_heap_allocated_",  # of a storage of symbolic size
    "its data is not allocated yet",  # of torch.tensor([x[0]]), which reads the elements of its list
)  # fmt: skip
# of the operations by which fully_shard gathers parameters
_OF_PROCESSES = ("fsdp", "c10d", "_c10d_functional")
_DEVICE = torch.ops.prim.device.default
_META = torch.device("meta")
_NORMS = (aten.native_batch_norm.default, aten.cudnn_batch_norm.default)


class PythonChecks(TorchFunctionMode):
    """Refuses calls that read values, also of tensors that are not arguments, and `backward()`."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self._what = what

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS or (func is Tensor.__format__ and not args[0].dim()):
            constant = _constant(args[0])
            if constant is None:
                raise value_read_error(self._what, f"Tensor.{func.__name__}", user_line())
            with _disable_current_modes():
                return func(constant, *args[1:], **(kwargs or {}))
        if func is Tensor.data_ptr and not torch_internals.transforms_active():
            raise value_read_error(self._what, "Tensor.data_ptr", user_line())
        if func is Tensor.backward:
            raise backward_call_error(self._what, user_line())
        return func(*args, **(kwargs or {}))


class OperationChecks(TorchDispatchMode):
    """Refuses operations that read values, or whose shape depends on them; those that draw from a
    `torch.Generator`; and those that write to an argument of the function or to a tensor that it
    reaches."""

    supports_higher_order_operators = True

    def __init__(self, what: str, given: Sequence[Tensor]) -> None:
        super().__init__()
        self._what = what
        self._kept = {torch_internals.storage_id(x) for x in given}
        self._views: list[Tensor] = []  # kept alive, so that no other tensor gets their memory
        self.outer: list[Tensor] = []  # tensors that were computed with a graph before the trace

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):  # most calls are these, of autograd
            return _META if args[0].fake_mode.in_kernel_invocation else args[0].fake_device
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)
        if _reads_values(func, args):
            raise value_read_error(self._what, str(func), user_line())
        views = False
        for argument, value in _named_arguments(func, args, kwargs):
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
                    self._kept.add(torch_internals.storage_id(one))
        return result

    def _draws(self, func: Any) -> Exception:
        return UnsupportedError(
            f"{self._what}: expected a function without a torch.Generator, got one that draws from a "
            f"Generator ({func}{user_line()}). Draw the random numbers outside, and pass them as an "
            "argument."
        )

    def _changes(self, func: Any) -> Exception:
        if func.namespace in _OF_PROCESSES:
            return UnsupportedError(
                f"{self._what}: expected a module whose parameters this process holds whole, got one "
                f"that gathers them, as fully_shard (FSDP2) does ({func}{user_line()}): a graph does "
                "not contain that. Leave compile out."
            )
        return UnsupportedError(
            f"{self._what}: expected a function that does not change its arguments, parameters and "
            f"buffers, got one that changes one in place ({func}{user_line()}). Change a clone() "
            "instead. For a model with running statistics in train mode, use "
            "`hoglib.functional_loss(model, criterion)`, which does not update them, or eval mode."
        )

    def _is_kept(self, value: Tensor) -> bool:
        """Whether it exists before the function runs: an argument, or a tensor with values."""
        return not isinstance(value, FakeTensor) or torch_internals.storage_id(value) in self._kept


def _writes(func: Any, argument: Any) -> bool:
    if argument.alias_info is not None and argument.alias_info.is_write:
        return True
    # The schemas of these do not declare it.
    return func in _NORMS and argument.name in ("running_mean", "running_var")


def _named_arguments(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
    """The schema and the value of each argument; lists of tensors one tensor at a time."""
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


def refuse_outer_graph(what: str) -> None:
    """Raises UnsupportedError if the traced function uses a tensor that already has a graph.

    The gradient would have to continue to what this tensor was computed from.
    """
    mode = _get_current_dispatch_mode()
    if isinstance(mode, OperationChecks) and mode.outer:
        raise UnsupportedError(
            f"{what}: expected a loss of arguments and parameters, got one that also uses "
            f"{validation.describe(mode.outer[0])} that was computed with a graph before the call "
            f"({mode.outer[0].grad_fn}). Pass it as an argument."
        )


@contextmanager
def translate_tracing_errors(what: str) -> Iterator[None]:
    """Raises torch's tracing errors as UnsupportedError, with the user's line."""
    try:
        yield
    except HoglibError:
        raise
    except Exception as error:
        if type(error).__name__ in _GUARDS or any(word in str(error) for word in _WORDS):
            how = str(getattr(error, "func", "")) or "a number or a truth value of a tensor"
            raise value_read_error(what, how, user_line(error.__traceback__)) from error
        if "TorchScript interpreter" in str(error):
            raise UnsupportedError(
                f"{what}: expected a function that can be traced, got one with TorchScript code that "
                f"failed{user_line(error.__traceback__)}. Where it reads values of tensors "
                "(`if torch.all(x):`), it cannot be. Set PYTORCH_JIT=0 in the environment, which "
                "leaves Python functions, to see which; or leave compile= out."
            ) from error
        raise


def backward_call_error(what: str, where: str) -> Exception:
    return UnsupportedError(
        f"{what}: expected a function that returns its gradients, got one that calls "
        f"backward(){where}, which stores them in .grad. Return the result of `torch.autograd.grad`, "
        "or compile the loss with `hoglib.compiled_loss` and call backward() on its value."
    )


def _reads_values(func: torch._ops.OpOverload, args: Any) -> bool:
    """Whether the output or its shape depends on values that are not known."""
    if func is aten.index.Tensor:  # tagged for the sake of its masks
        return any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])
    if torch.Tag.data_dependent_output in func.tags:
        return any(_constant(x) is None for x in pytree.tensors(args))
    return torch.Tag.dynamic_output_shape in func.tags


def _constant(tensor: Tensor) -> Tensor | None:
    """The values of a tensor that the function makes from a number, as `torch.tensor(2.0)`."""
    found: Tensor | None = getattr(torch_internals.unwrap(tensor), "constant", None)
    return found


def value_read_error(what: str, how: str, where: str) -> Exception:
    return UnsupportedError(
        f"{what}: expected a function whose graph is the same for all values of its tensors, got one "
        f"that reads them ({how}{where}): the value that if, float(), .item(), a mask as an index or "
        "NumPy reads would become a constant. Pass what is known before the call as a Python number or "
        "bool, of which each value has a graph; use torch.where, torch.index_select and numbers in "
        "tensors for the rest; or move this part out of the function."
    )


def user_line(trace: TracebackType | None = None) -> str:
    """The innermost file and line of the user's, of the current stack or of a traceback."""
    frames = walk_stack(sys._getframe(1)) if trace is None else reversed([*walk_tb(trace)])
    found = ((frame.f_code.co_filename, line) for frame, line in frames)
    return next((f" in {file}:{line}" for file, line in found if is_user_file(file)), "")
