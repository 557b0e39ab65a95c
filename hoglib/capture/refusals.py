"""Refuses, during a trace, what a graph cannot contain, and names the user's line.

Two modes check: one sees calls on tensors in Python (`.item()`, NumPy, `backward()`), the other one
each operation before it runs, so that a refused operation changes nothing.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from hoglib._core import pytree, torch_internals, validation
from hoglib.capture.head_loss import FOLLOWED, HeadLosses
from hoglib.capture.reads import Recorder, outside_trace, user_line, value_read_error
from hoglib.errors import HoglibError, UnsupportedError

aten = torch.ops.aten
_READ_ONE = {
    Tensor.item, Tensor.__float__, Tensor.__int__, Tensor.__bool__, Tensor.__index__,
    Tensor.__complex__,
}  # fmt: skip
_READ_ALL = {Tensor.numpy, Tensor.__array__, Tensor.tolist}  # of memory, without an operation
_MASKS = (torch.bool, torch.uint8)
_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64)
_GUARDS = (
    "DataDependentOutputException", "DynamicOutputShapeException", "GuardOnDataDependentSymNode",
    "UnsupportedOperatorException",
)  # fmt: skip
_WORDS = (
    "trying to get value out of a tracing tensor", ".numpy() is not supported", "data_ptr",
    "Cannot access data pointer", "Not available for 'meta'",
    "its data is not allocated yet",  # of torch.tensor([x[0]]), which reads the elements of its list
)  # fmt: skip
# of the operations by which fully_shard gathers parameters
_OF_PROCESSES = ("fsdp", "c10d", "_c10d_functional")
_DEVICE = torch.ops.prim.device.default
_META = torch.device("meta")
_NORMS = (aten.native_batch_norm.default, aten.cudnn_batch_norm.default)


class PythonChecks(TorchFunctionMode):
    """Handles calls that read values, also of tensors that are not arguments, and refuses
    `backward()`."""

    def __init__(self, what: str, values: Recorder, heads: HeadLosses | None = None) -> None:
        super().__init__()
        self._what = what
        self._values = values
        self._heads = heads

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        reads_all = func in _READ_ALL or (func is Tensor.__format__ and not args[0].dim())
        if reads_all and torch_internals.unwrap(args[0]) is args[0]:
            with self._values.named(f"Tensor.{func.__name__}"):
                return func(self._values.read(args[0]), *args[1:], **kwargs)
        if func in _READ_ONE:
            with self._values.named(f"Tensor.{func.__name__}"):
                return func(*args, **kwargs)
        if func is Tensor.data_ptr and not torch_internals.transforms_active():
            raise value_read_error(self._what, "Tensor.data_ptr", user_line())
        if func is Tensor.backward:
            raise backward_call_error(self._what, user_line())
        run = _item if func is Tensor.__getitem__ else func
        if self._heads is not None and func in FOLLOWED:
            return self._heads.call(func, run, args, kwargs)
        return run(*args, **kwargs)


def _item(tensor: Tensor, index: Any) -> Tensor:
    """tensor[index]; torch would read the value of an integer tensor that has no dimensions."""
    parts = list(index) if isinstance(index, tuple) else [index]
    numbers = [x for x in parts if isinstance(x, Tensor)]
    if not all(x.dim() == 0 and x.dtype in _INTEGERS for x in numbers) or not all(
        x is None or x is ... or type(x) is int or isinstance(x, slice | Tensor) for x in parts
    ):
        return tensor[index]
    whole = tensor = tensor[tuple(slice(None) if isinstance(x, Tensor) else x for x in parts)]
    kept = [x for x in parts if type(x) is not int]  # one dimension each, but for an ellipsis
    for i in reversed(range(len(kept))):
        if isinstance(kept[i], Tensor):
            dim = tensor.dim() - len(kept) + i if any(x is ... for x in kept[:i]) else i
            row = kept.pop(i).reshape(1)
            tensor = tensor[(slice(None),) * dim + (row,)].squeeze(dim)
    mode = _get_current_dispatch_mode()
    if isinstance(mode, OperationChecks) and tensor is not whole:
        mode.note_copy(whole, tensor)
    return tensor


class OperationChecks(TorchDispatchMode):
    """Handles operations that read values, or whose shape depends on them; refuses those that draw from
    a `torch.Generator`, or write to an argument of the function or to a tensor that it reaches."""

    supports_higher_order_operators = True

    def __init__(self, what: str, given: Sequence[Tensor], values: Recorder) -> None:
        super().__init__()
        self._what = what
        self._values = values
        self._kept = {torch_internals.storage_id(x) for x in given}
        self._views: list[Tensor] = []  # kept alive, so that no other tensor gets their memory
        self.outer: list[Tensor] = []  # tensors that were computed with a graph before the trace
        self._copies: list[tuple[int, int]] = []  # storages of tensors, and of copies for views
        self._stale: set[int] = set()  # those that a view would have changed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):  # most calls are these, of autograd
            return _META if args[0].fake_mode.in_kernel_invocation else args[0].fake_device
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)
        if _reads_values(func, args):
            with self._values.named(str(func)):
                return self._read(func, args, kwargs)
        views = False
        for argument, value in _named_arguments(func, args, kwargs):
            if isinstance(value, torch.Generator):
                raise self._draws(func)
            if isinstance(value, Tensor):
                if not isinstance(value, FakeTensor) and value.grad_fn:
                    self.outer.append(value)
                self.refuse_stale([value])
                if self._copies and _writes(func, argument):
                    self._write_copies(func, torch_internals.storage_id(value))
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

    def note_copy(self, tensor: Tensor, copy: Tensor) -> None:
        """Notes a tensor that stands for what would be a view: a write to either is not one to both."""
        tensor, copy = torch_internals.unwrap(tensor), torch_internals.unwrap(copy)
        self._views += [tensor, copy]
        self._copies.append((torch_internals.storage_id(tensor), torch_internals.storage_id(copy)))

    def refuse_stale(self, values: Sequence[Any]) -> None:
        """Raises UnsupportedError if a view in the place of one of these copies would have changed."""
        if self._stale and any(
            torch_internals.storage_id(torch_internals.unwrap(x)) in self._stale
            for x in values
            if isinstance(x, Tensor)
        ):
            raise UnsupportedError(
                f"{self._what}: expected tensor[i], with i an integer tensor without dimensions, where "
                "neither result nor tensor is changed in place, got one that is used after the other "
                f"one changed{user_line()}: a graph has a copy there, and no view. Write `tensor[i] = "
                "value`, and take tensor[i] again afterwards."
            )

    def _write_copies(self, func: Any, storage: int) -> None:
        """Makes stale what a view would have changed with this storage."""
        written, found = {storage}, {storage}
        while found:  # copies of copies too
            found = {x for pair in self._copies if written & {*pair} for x in pair} - written
            written |= found
        if written & self._kept:
            raise self._changes(func)
        self._stale |= written - {storage}

    def _read(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of an operation that depends on values in a way that a graph cannot record."""
        read = self._values.read
        if func is aten._local_scalar_dense.default:
            return read(args[0]).item()
        if func is aten.equal.default:
            a, b = args
            if a is b or self._values.same(a, b):  # unless it contains NaN
                return not read(aten.isnan(a).any(), any_dtype=True)
            given = self._values.is_given(a) and self._values.is_given(b)  # as data, not computed
            return a.shape == b.shape and bool(read(aten.eq(a, b).all(), any_dtype=given))
        if func is aten.index.Tensor and all(x is None or x.dim() for x in args[1]):
            return func(args[0], self._without_masks(args[1]))
        if func is aten.nonzero.default and args[0].dim():
            return self._nonzero(args[0])
        if func is aten.masked_select.default:
            x, mask = torch.broadcast_tensors(*args)
            return aten.index.Tensor(x, self._without_masks([mask]))
        if func is aten.repeat_interleave.Tensor:
            return func(args[0], output_size=int(read(args[0].sum())))
        # The result is a constant of the graph.
        given = pytree.map_tensors(read, (args, kwargs))
        with outside_trace():
            args, kwargs = given
            result = func(*args, **kwargs)
        return pytree.map_tensors(aten.clone.default, result)

    def _without_masks(self, indices: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Indices with the places of its nonzero items instead of each mask."""
        found: list[Tensor | None] = []
        for x in indices:
            found += [x] if x is None or x.dtype not in _MASKS else self._nonzero(x).unbind(1)
        return found

    def _nonzero(self, x: Tensor) -> Tensor:
        count = self._values.read(aten.count_nonzero.default(x))
        found: Tensor = aten.nonzero_static(x, size=int(count))
        return found

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
    """Whether the output or its shape depends on values in a way that a graph cannot record."""
    if func is torch.ops.aten.index.Tensor:  # tagged for the sake of its masks
        return any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])
    tags = func.tags
    return torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags
