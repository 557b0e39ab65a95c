"""The state of torch that its public API does not show; see also `torch_forward_mode`, `torch_sharding`
and `torch_library`. All private names are bound through the table in `torch_private`.

torch.func keeps a stack of active transforms (`grad`, `jvp`, `vmap`), autograd a level of forward-mode
differentiation, and the dispatcher a stack of tracers. torch shows them only under private names. The
last section calls kernels that only private operators reach.
`tests/core/test_torch_internals.py` fails when a torch release changes any of this.
"""

import inspect
import math
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache, partial, partialmethod
from types import CellType
from typing import Any, Self, final

import torch
from torch import Tensor, overrides
from torch.autograd import Function, forward_ad
from torch.autograd import function as torch_function
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from hoglib._core.runtime import source_location
from hoglib._core.runtime.ambient import AMBIENT
from hoglib._core.torch_api import torch_library
from hoglib._core.torch_api.torch_private import (
    holder,
    is_missing,
    needing,
    private,
    refuse,
    require,
)
from hoglib.errors import UnsupportedError

TorchDispatchMode: Any = private("torch.utils._python_dispatch.TorchDispatchMode")
# Swaps the parameters and buffers of a module for a time; Dynamo can trace it.
reparametrize_module = private("torch.nn.utils.stateless._reparametrize_module")
_parametrize = holder("torch.nn.utils.parametrize._cache")
_levels = holder("torch.autograd.forward_ad._current_level")
_interpreter_stack = private("torch._C._functorch.get_interpreter_stack")
# Whether a `torch.func` transform is active. Not wrapped in a function, because each entry point calls
# it several times.
transforms_active: Callable[[], bool] = private(
    "torch._C._are_functorch_transforms_active", lambda: _interpreter_stack() is not None
)
_is_wrapped = private("torch._C._functorch.is_functorch_wrapped_tensor")
_get_unwrapped = private("torch._C._functorch.get_unwrapped")
_maybe_get_bdim = private("torch._C._functorch.maybe_get_bdim")
_unwrap_if_dead = private("torch._C._functorch.unwrap_if_dead")
_is_legacy_batched = private("torch._C._functorch.is_legacy_batchedtensor")
_warn_of_vmap_loops = private("torch._C._functorch._set_vmap_fallback_warning_enabled")
_made_functions = private("torch._functorch.autograd_function")  # makes a Function for each level


def exchange_parametrized(tensors: dict[Any, Any]) -> dict[Any, Any]:
    """Replace the cache of `torch.nn.utils.parametrize.cached()`; return the previous cache."""
    before, _parametrize._cache = _parametrize._cache, tensors
    return before


def constant_transforms_active() -> bool:
    """`transforms_active()` as a constant for Dynamo. The mark is set by hand, because
    `torch.compiler.assume_constant_result` would import Dynamo."""
    return transforms_active()


constant_transforms_active._dynamo_marked_constant = True  # type: ignore[attr-defined]


def transform_kinds() -> list[str]:
    """The kinds of the active transforms of torch.func, outermost first: Grad, Jvp, Vmap."""
    return [level.key().name for level in _interpreter_stack() or ()]


def forward_levels() -> int:
    """The number of active `torch.func.jvp` transforms."""
    return transform_kinds().count("Jvp")


def innermost_is_forward() -> bool:
    """Whether the innermost active `grad` or `jvp` of torch.func is a `jvp`."""
    return next((kind for kind in reversed(transform_kinds()) if kind != "Vmap"), "") == "Jvp"


def forward_mode_active() -> bool:
    """Whether a `torch.func.jvp` or a `torch.autograd.forward_ad.dual_level` is active."""
    return _levels._current_level >= 0


def reverse_mode_active(x: Tensor) -> bool:
    """Whether a backward, at any level of torch.func, can reach results computed from x."""
    if "Grad" in transform_kinds() or x.requires_grad:
        return True
    inner = beneath(x)
    return inner is not x and reverse_mode_active(inner)


# A context manager that clears the stack of torch.func's transforms.
without_transforms: Callable[[], AbstractContextManager[Any]] = private(
    "torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack"
)


def beneath(tensor: object) -> Any:
    """The tensor inside the outermost wrapper of torch.func; the argument if it is no wrapper."""
    return _get_unwrapped(tensor) if _is_wrapped(tensor) else tensor


def unwrap(tensor: object) -> Any:
    """The tensor inside all wrappers of torch.func; vmap's sample dimension is part of its shape."""
    while (inner := beneath(tensor)) is not tensor:
        tensor = inner
    return tensor


def first_sample(x: Any) -> Any:
    """The tensor inside all wrappers of torch.func, of its first sample where vmap maps over it."""
    while isinstance(x, Tensor) and _is_wrapped(x):
        dim = _maybe_get_bdim(x)  # -1 for a wrapper of grad or jvp
        x = _get_unwrapped(x)
        x = x if dim == -1 else x.select(dim, 0)
    return x


def get_data(x: Tensor) -> Tensor:
    """A constant with x's values. Under nested transforms `x.data` is one for the innermost only."""
    return x.detach() if transforms_active() else x.data


def set_data(x: Tensor, value: Any) -> None:
    """x.data = value. Inside torch.func `value` is a wrapper, even if it is `x.data`, as in
    `module.to(device)`. torch would store the wrapper in x, which outlives the transform, and the
    process crashes at the next use of x (pytorch/pytorch#184876)."""
    own, inner = (unwrap(x), unwrap(value)) if transforms_active() else (x, value)
    # is_set_to() raises for tensors of two devices or layouts, so storages are compared first
    if inner is not value and storage_id(own) == storage_id(inner) and own.is_set_to(inner):
        return
    if inner is not value and own is x:
        if inner.shape != value.shape:
            raise UnsupportedError(
                "x.data = y: expected one y for all samples of torch.func.vmap, got one for each. "
                "Change x outside of the derivative."
            )
        value = inner
    x.data = value


def closed_over(func: object) -> list[Any]:
    """The values of the variables that a function closes over, except unassigned ones."""
    cells, empty = getattr(func, "__closure__", None) or (), CellType()
    return [cell.cell_contents for cell in cells if cell != empty]


def unwrap_kept(func: Callable[..., Any]) -> None:
    """Unwrap tensors that func's modules cached inside a transform that has ended, such as tables
    filled in the first call. torch raises when a later call uses such a dead wrapper."""
    reached = getattr(func, "model", func), *closed_over(func)
    models = [m for m in reached if isinstance(m, torch.nn.Module)]
    for module in [part for model in models for part in model.modules()]:
        own = vars(module)
        for held in (own, *(x for x in own.values() if type(x) in (dict, list) and x)):
            for key, x in held.items() if type(held) is dict else enumerate(held):
                if type(x) is Tensor and (inner := _unwrap_if_dead(x)) is not x:
                    held[key] = inner.detach()


def has_tangent(x: Tensor) -> bool:
    """Whether x has a tangent at the innermost level of forward mode."""
    if _levels._current_level < 0 or x.layout is not torch.strided:
        return False
    return forward_ad.unpack_dual(x).tangent is not None


def _is_differentiated(x: Tensor) -> bool:
    by_func = _is_wrapped(x) and _maybe_get_bdim(x) == -1  # a wrapper of grad or jvp, not of vmap
    return x.requires_grad or by_func or has_tangent(x)


def outside_transforms(
    function: type[Function], args: tuple[Any, ...]
) -> tuple[type[Function], tuple[Any, ...], tuple[bool, ...]]:
    """The application of a Function without torch.func: the Function that the user wrote, its arguments
    without wrappers (under vmap the first sample), and for each argument whether it is
    differentiated."""
    if transforms_active():
        require(_made_functions)
    by = tuple(isinstance(x, Tensor) and _is_differentiated(x) for x in args)
    while function.__module__.startswith("torch._functorch"):  # torch makes one for each transform
        made_of = inspect.getclosurevars(function.forward).nonlocals
        if not isinstance(made_of.get("autograd_function"), type):
            break
        function, in_dims = made_of["autograd_function"], made_of.get("in_dims")
        if isinstance(in_dims, tuple) and len(in_dims) == len(args):
            pairs = zip(args, in_dims, strict=True)
            args = tuple(x.select(d, 0) if isinstance(d, int) else x for x, d in pairs)
    return function, tuple(map(first_sample, args)), by


def under_vmap(function: type[Function], made: type[Function]) -> bool:
    """Whether vmap maps over an application of a Function, also while the Function's own vmap rule
    runs. made: the Function that torch made of `function` for a transform, or `function`."""
    if made is not function and "in_dims" in inspect.getclosurevars(made.forward).nonlocals:
        return True
    own = function.vmap is not Function.vmap
    rule = getattr(function.vmap, "__code__", None) if own else None
    # vmap's level is not active while the user's rule runs, so look for the rule on the Python stack
    frame: Any = sys._getframe(1) if rule is not None else None
    while frame is not None and frame.f_code is not rule:
        frame = frame.f_back
    return frame is not None or "Vmap" in transform_kinds()


# Memory

_storage_use_count = private("torch._C._storage_Use_Count")
_TensorGuards = private("torch._C._dynamo.guards.TensorGuards")


def storage_id(tensor: Tensor) -> int:
    """An id of the tensor's storage, also for a wrapper of torch.func: aliases have equal ids."""
    inner = unwrap(tensor)
    return int(inner.untyped_storage()._cdata) if inner.layout is torch.strided else id(inner)


def is_held_elsewhere(grad: Tensor) -> bool:
    """Whether another node holds this gradient, which the pre-hook of a node received: autograd passes
    one tensor to both terms of a sum. A view of part of a storage (backward of `cat`) does not
    count."""
    if grad.layout is not torch.strided:
        return False
    if not grad._is_view():
        # references: the Python object and the engine's input buffer
        return bool(grad._use_count() > 2)  # type: ignore[attr-defined]
    storage = grad.untyped_storage()
    is_whole = grad.numel() * grad.element_size() >= storage.nbytes()
    # references: the Python object of the storage, the view and its base
    return is_whole and _storage_use_count(storage._cdata) > 3


def is_batched(tensor: object) -> bool:
    """Whether a tensor is a batch of `torch.autograd.grad(is_grads_batched=True)`, which uses an older
    vmap that is no transform of torch.func."""
    return bool(_is_legacy_batched(tensor))


class without_fallback_warnings:  # noqa: N801 a context manager
    """Inside, torch does not warn of operations without a vmap rule, over which vmap loops."""

    def __enter__(self) -> None:
        _warn_of_vmap_loops(False)

    def __exit__(self, *raised: object) -> None:
        _warn_of_vmap_loops(True)


def tensor_check(tensors: list[Tensor]) -> Callable[..., bool]:
    """A check in C++ that tensors have the type, dtype, device, sizes, strides and requires_grad of the
    given ones. It also fails if only the state of the thread (autocast, inference mode) differs."""
    return _TensorGuards(
        *tensors,
        dynamic_dims_sizes=[list(x.size()) for x in tensors],
        dynamic_dims_strides=[list(x.stride()) for x in tensors],
    ).check


# The engine, and the backward that runs

_run_backward = private("torch.autograd.graph._engine_run_backward", None)
_graph_task_id = private("torch._C._current_graph_task_id")
_running_node = private("torch._C._current_autograd_node")
_queue_callback = private("torch.autograd.Variable._execution_engine.queue_callback")


def apply(function: type[Function], *args: Any) -> Any:
    """function.apply(*args). Outside of transforms it skips torch's search for dead wrappers, which
    takes as long as recording the call."""
    if transforms_active() or torch.compiler.is_compiling():
        return function.apply(*args)
    direct: Any = super(Function, function)
    return direct.apply(*args)


def gradients(
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor] | None = None,
    *,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    unhandled: bool = False,
) -> list[Tensor | None]:
    """torch.autograd.grad of sum_i <weights[i], outputs[i]>; None for inputs that the outputs do not
    depend on. Weights default to ones.

    For plain tensors it calls the engine directly. torch's Python code around the engine compares
    shapes symbolically, which takes 25 to 80 us for a small network; the engine checks shapes, too.

    unhandled: Skip the `__torch_function__` of modes, so that they stay active and see the calls of
    backward functions.
    """
    weights = list(map(torch.ones_like, outputs)) if weights is None else weights
    keep = create_graph if retain_graph is None else retain_graph
    handled = not unhandled and overrides.has_torch_function((*outputs, *inputs))
    if torch.compiler.is_compiling() or handled or _run_backward is None:
        found: Any = torch.autograd.grad(
            outputs, inputs, weights, keep, create_graph, allow_unused=True
        )
    else:
        given = tuple(outputs), tuple(weights), keep, create_graph, tuple(inputs)
        found = _run_backward(*given, allow_unreachable=True, accumulate_grad=False)
    return list(found)


def running_backward() -> int:
    """The id of the backward pass (the engine's graph task) that the caller runs in; -1 outside."""
    return int(_graph_task_id())


def after_backward(callback: Callable[[], None]) -> None:
    """Call `callback` at the end of the running backward, after DistributedDataParallel has finished.

    The engine runs queued callbacks in order at the end of a backward. DistributedDataParallel queues
    its last step late in the backward, so `callback` is queued from inside a callback, behind that
    step.
    """
    _queue_callback(lambda: _queue_callback(callback))


def running_function() -> type[Function] | None:
    """The custom Function whose backward runs now, or None."""
    node = _running_node()
    return None if node is None else custom_function(node)


def record_backward_origins() -> AbstractContextManager[None]:
    """Inside, torch's anomaly mode notes in each new node the stack, and the node whose backward ran;
    `made_by` and `made_at` read them."""
    return torch.autograd.set_detect_anomaly(True, check_nan=False)


def made_by(node: Any) -> Any:
    """The node whose backward created `node`; None for a node of a forward."""
    return node.metadata.get("parent_")


def made_at(node: Any) -> list[str]:
    """The Python stack at the creation of `node`, as from `traceback.format_stack`."""
    return list(node.metadata.get("traceback_", ()))


# Nodes of a graph, and their custom Functions


def is_custom(node: object) -> bool:
    """Whether a node of a graph belongs to a custom Function written in Python."""
    return isinstance(node, torch_function.BackwardCFunction)


def custom_function(node: object) -> type[Function] | None:
    """The custom Function of a node of a graph, or None."""
    if not is_custom(node):
        return None
    function: Any = getattr(type(node), "_forward_cls", None) or refuse("Node._forward_cls")
    while function is not None and function.__module__.startswith("torch._functorch"):
        # torch.func made this class for one level; the user's Function is in the closure of its rules
        function = inspect.getclosurevars(function.backward).nonlocals.get("autograd_function")
    return None if function is None else torch_library.as_written(function)[0]


def cpp_function(node: Any) -> str:
    """The C++ name of a node's `torch::autograd::Function`, or of the node itself if it is a user's
    `torch::autograd::Node`; "" for other nodes."""
    if type(node).__name__ != "CppFunction":  # the Python type of nodes without a binding
        return ""
    name: str = node.name()
    _, is_function, function = name.partition("CppNode<")
    if is_function:
        return function.removesuffix(">")
    # torch has nodes of its own without a binding
    return "" if name.startswith(("torch::", "Foreach")) else name


def backward_rule(function: type[Function]) -> Any:
    """The backward of a Function, which torch also accepts under the name `vjp`."""
    return function.backward if function.vjp is Function.vjp else function.vjp


def backward_lines(
    frames: Iterable[tuple[Any, int]],
) -> Iterator[tuple[type[Function], source_location.SourceLine]]:
    """Yield (custom Function, line) for each frame that runs a backward: its first variable is ctx."""
    for frame, line in frames:
        first = frame.f_code.co_varnames[:1]
        function = custom_function(frame.f_locals.get(first[0])) if first else None
        if function is None:
            continue
        file = frame.f_code.co_filename
        # ctx is also the first argument of other functions, such as setup_context
        if getattr(inspect.unwrap(backward_rule(function)), "__code__", None) is frame.f_code:
            yield function, source_location.SourceLine(file, line)


def is_once_differentiable(function: type[Function]) -> bool:
    """Whether backward is decorated with @once_differentiable."""
    rule = backward_rule(function)
    made_by = getattr(getattr(rule, "__code__", None), "co_filename", "")
    return hasattr(rule, "__wrapped__") and made_by == torch_function.__file__


def has_forward_mode(function: type[Function]) -> bool:
    """Whether `torch.func.jvp` can differentiate a custom Function."""
    return function.jvp is not Function.jvp and function.setup_context is not Function.setup_context


def has_saved_by_hooks(node: Any) -> bool:
    """Whether saved-tensor hooks packed the tensors that a custom Function saved."""
    return any(getattr(one, "unpack_hook", None) is not None for one in node._raw_saved_tensors)


def output_bytes(node: Any) -> int:
    """The bytes of the outputs of a node's operation; 0 for AccumulateGrad."""
    if not node.next_functions:
        return 0
    # _input_metadata has no sizes of nested tensors
    every = [x for x in node._input_metadata if not x.is_nested_tensor]
    return sum(math.prod(map(int, x.shape)) * x.dtype.itemsize for x in every)


def output_shapes(node: Any) -> list[tuple[int, ...]]:
    """The shapes of the outputs of a node's operation."""
    return [tuple(int(n) for n in out.shape) for out in node._input_metadata]


def output_dtypes(node: object) -> list[torch.dtype]:
    """The dtypes of the outputs of a node's operation."""
    return [out.dtype for out in getattr(node, "_input_metadata", ())]


# Hooks of saved tensors, and tracers

_top_saved_tensors_hooks = private("torch._C._autograd._top_saved_tensors_default_hooks")
_checkpoint_hook = private("torch.utils.checkpoint._checkpoint_hook")
# The custom Function with which a checkpoint of torch 2.11 saves its inputs; None in later releases.
SAVES_INPUTS = private("torch.utils.checkpoint._NoopSaveInputs", None)


def checkpoint_frame() -> Any:
    """The `_CheckpointFrame` of the innermost non-reentrant checkpoint around the caller, or None."""
    if torch.compiler.is_compiling():
        return None
    hooks = _top_saved_tensors_hooks(True)
    if hooks is None:
        return None
    require(_checkpoint_hook)
    if not getattr(hooks[0], "__qualname__", "").startswith("_checkpoint_hook."):
        return None
    pack: Any = hooks[0]  # a closure, the only holder of the frame
    cells = zip(pack.__code__.co_freevars, pack.__closure__, strict=True)
    return next((cell.cell_contents for name, cell in cells if name == "frame"), None)


def packs_saved_tensor() -> bool:
    """Whether the caller runs inside the pack hook of the innermost `saved_tensors_hooks`."""
    hooks = _top_saved_tensors_hooks(True)
    frame = None if hooks is None else sys._getframe(1)
    code: Any = None if hooks is None else getattr(hooks[0], "__code__", None)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None


def outside_checkpoint() -> AbstractContextManager[None]:
    """A context without the hooks of a non-reentrant checkpoint around the caller, if there is one.

    For computations whose graphs do not reach their results: a checkpoint need not recompute them, and
    would run into itself where such a graph is kept.
    """
    hooks = _top_saved_tensors_hooks(True)
    name = "" if hooks is None else getattr(hooks[0], "__qualname__", "")
    inside = name.startswith(("_checkpoint_hook.", "_recomputation_hook."))
    return without_saved_tensor_hooks() if inside else nullcontext()


@contextmanager
def without_saved_tensor_hooks() -> Iterator[None]:
    """Inside, the saved-tensor hooks that surround the caller, such as a checkpoint's, are off."""
    taken = []
    while (pair := _top_saved_tensors_hooks(True)) is not None:
        taken.append(saved_tensors_hooks(*pair))
        taken[-1].__exit__()  # pops the pair off torch's stack
    try:
        yield
    finally:
        for hooks in reversed(taken):
            hooks.__enter__()


_PROXY = private("torch._C._TorchDispatchModeKey.PROXY")
_FUNCTIONAL = private("torch._C._TorchDispatchModeKey.FUNCTIONAL")
_get_dispatch_mode = needing(private("torch._C._get_dispatch_mode"), _PROXY, _FUNCTIONAL)


def tracing() -> bool:
    """Whether torch.compile, torch.export or make_fx traces the caller."""
    return (
        torch.compiler.is_compiling()
        or _get_dispatch_mode(_PROXY) is not None
        or _get_dispatch_mode(_FUNCTIONAL) is not None
    )


def fresh_copy(x: Tensor) -> Tensor:
    """While a graph is traced, a copy of x: the graph recomputes operations on the copy. On x itself
    they would merge with equal operations before them, whose results stay in memory. Otherwise x."""
    return x.clone(memory_format=torch.preserve_format) if tracing() else x


# The active watches, as (thread id, handle). The first watch in any thread patches torch, the last one
# to leave restores it.
_CONSTRUCTOR_WATCHES: list[tuple[int, Callable[..., Any]]] = []
# reentrant: garbage collection inside the lock may run a destructor that enters a watch
_LOCK = threading.RLock()


@contextmanager
def watching_constructors(handle: Callable[..., Any]) -> Iterator[None]:
    """Call handle(make, types, args, kwargs) instead of `Variable(...)`, `nn.Parameter(...)` and
    `torch.autograd.backward(...)` in this thread: no TorchFunctionMode sees them. `make` makes the
    original call, and has its `__name__`."""
    watch = (threading.get_ident(), handle)
    with _LOCK:
        if not _CONSTRUCTOR_WATCHES:
            torch.autograd.backward = partial(_constructed, _BACKWARD)
            for kind in _CONSTRUCTORS:
                setattr(kind, "__call__", _constructor)  # noqa: B010
        _CONSTRUCTOR_WATCHES.append(watch)
    try:
        yield
    finally:
        with _LOCK:
            _CONSTRUCTOR_WATCHES.remove(watch)
            if not _CONSTRUCTOR_WATCHES:
                torch.autograd.backward = _BACKWARD
                for kind in _CONSTRUCTORS:
                    delattr(kind, "__call__")


def _constructed(make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `make` through the innermost watch of this thread."""
    here = threading.get_ident()
    watches = [watch for thread, watch in _CONSTRUCTOR_WATCHES if thread == here]
    return watches[-1](make, (), args, kwargs) if watches else make(*args, **kwargs)


def _constructor(cls: Any, *args: Any, **kwargs: Any) -> Any:
    def make(*args: Any, **kwargs: Any) -> Any:
        return type.__call__(cls, *args, **kwargs)

    make.__name__ = cls.__name__
    return _constructed(make, *args, **kwargs)


# The metaclasses of `torch.autograd.Variable` and `torch.nn.Parameter`: their `__call__` constructs.
_CONSTRUCTORS = (type(torch.autograd.Variable), type(torch.nn.Parameter))
_BACKWARD = torch.autograd.backward


class watching_scripts:  # noqa: N801 a context manager
    """Inside, differentiated calls of scripted code go to `AMBIENT.stand_ins.run_script`: no mode sees
    torch calls in scripted code, and code that torch has optimized drops tangents without an error."""

    def __enter__(self) -> None:
        if _UNSEEN_SCRIPTS:
            require(_METHOD)
        with _LOCK:
            if not _SCRIPT_WATCHES:
                _FUNCTION.__call__, _METHOD.__call__ = _WATCHED_SCRIPTS
            _SCRIPT_WATCHES.append(self)

    def __exit__(self, *raised: object) -> None:
        with _LOCK:
            _SCRIPT_WATCHES.remove(self)
            if not _SCRIPT_WATCHES:
                _FUNCTION.__call__, _METHOD.__call__ = _SCRIPTS


def _call_script(script: object, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if AMBIENT.stand_ins is None or not (torch.is_grad_enabled() or is_followed()):
        return call(script, *args, **kwargs)
    return AMBIENT.stand_ins.run_script(script, call, args, kwargs)


def is_followed() -> bool:
    """Whether forward mode, a transform of torch.func or a dispatch mode is active."""
    return forward_mode_active() or transforms_active() or _dispatch_mode() is not None


_dispatch_mode = private("torch.utils._python_dispatch._get_current_dispatch_mode")
_FUNCTION: Any = torch.jit.ScriptFunction
_METHOD: Any = private("torch._C.ScriptMethod")
_UNSEEN_SCRIPTS = is_missing(_METHOD)
_SCRIPTS = (_FUNCTION.__call__, _METHOD.__call__)
_WATCHED_SCRIPTS = tuple(partialmethod(_call_script, call) for call in _SCRIPTS)
_SCRIPT_WATCHES: list[watching_scripts] = []


_function_mode = private("torch.overrides._get_current_function_mode")
_push_mode = private("torch.overrides._push_mode")
_pop_mode = needing(private("torch.overrides._pop_mode"), _push_mode)
# False inside a subclass's own `__torch_function__` (DisableTorchFunctionSubclass)
types_handle_calls = private("torch._C._is_torch_function_enabled")
_function_modes = private("torch.overrides._get_current_function_mode_stack")


class SuspendedMode:
    """Inside, the innermost TorchFunctionMode is off the stack, if it is of class `kind`.

    hoglib's ops need no stand-ins, and each call that a mode sees takes several microseconds. A class,
    because each op enters one: contextlib would take longer than all the rest.
    """

    __slots__ = ("_mode",)
    kind: type[TorchFunctionMode]  # set by each subclass

    def __enter__(self) -> Self:
        self._mode = _pop_mode() if isinstance(_function_mode(), self.kind) else None
        return self

    def __exit__(self, *error: Any) -> None:
        if self._mode is not None:
            _push_mode(self._mode)

    def resumed(self) -> AbstractContextManager[object]:
        """A context manager that puts the mode back on the stack."""
        return nullcontext() if self._mode is None else self._mode


def enter_beneath(mode: TorchFunctionMode) -> None:
    """Enter `mode` below the user's modes, which then handle calls first, as without hoglib."""
    if _function_mode() is None or torch.compiler.is_compiling():
        mode.__enter__()
        return
    stack = _function_modes()
    above = stack[next((i for i, other in enumerate(stack) if _is_users(other)), len(stack)) :]
    for _ in above:
        _pop_mode()
    mode.__enter__()
    for other in above:
        _push_mode(other)


def leave_beneath(mode: object) -> None:
    """Remove `mode` from torch's stack, also from below other modes."""
    above = []
    while (top := _pop_mode()) is not mode:
        above.append(top)
    for other in reversed(above):
        _push_mode(other)


def _is_users(mode: object) -> bool:
    return type(mode).__module__.partition(".")[0] not in ("torch", "hoglib")


def function_modes(kind: type[TorchFunctionMode]) -> list[TorchFunctionMode]:
    """The active modes of class `kind` and of the user, outermost first."""
    if _function_mode() is None:
        return []
    return [mode for mode in _function_modes() if isinstance(mode, kind) or _is_users(mode)]


@contextmanager
def entered(modes: Iterable[TorchFunctionMode]) -> Iterator[None]:
    """Inside, these TorchFunctionModes are active, too."""
    with ExitStack() as stack:
        for mode in modes:
            stack.enter_context(mode)
        yield


def entered_once(mode: TorchFunctionMode) -> AbstractContextManager[object]:
    """Inside, the mode is active: it is off the stack while it handles a call."""
    return nullcontext() if mode in _function_modes() else mode


def function_mode(kind: type[TorchFunctionMode]) -> TorchFunctionMode | None:
    """The innermost active mode of class `kind`."""
    return next((mode for mode in reversed(_function_modes()) if isinstance(mode, kind)), None)


def default_device() -> torch.device | None:
    """The device of new tensors; None if no TorchFunctionMode is active, because a default device is
    one."""
    # torch.get_default_device() is slow
    return None if _function_mode() is None else torch.get_default_device()


_included_keys = private("torch._C._dispatch_tls_local_include_set")
_excluded_keys = private("torch._C._dispatch_tls_local_exclude_set")
_ForcedKeys = private("torch._C._ForceDispatchKeyGuard")
without_functions_seen = private("torch._C.DisableTorchFunction")  # a context manager, for modes
# A context manager: inside, autocast casts nothing, also in a nested autocast region.
no_autocast: Callable[[], AbstractContextManager[Any]] = private("torch._C._DisableAutocast")
set_grad_enabled = private("torch._C._set_grad_enabled")  # modes see calls of this function
_autocast_devices = private("torch._C._autocast_supported_devices")
_is_any_autocast_enabled = private("torch._C._is_any_autocast_enabled")


@final
class RecordingBelow:
    """Inside a dispatch mode's handler: autograd records again, as where this object was created,
    without autocast and saved-tensor hooks. Outer dispatch modes see the operations.

    The handler runs with autograd's dispatch keys excluded, so the keys of the creation are forced.
    """

    def __init__(self) -> None:
        self._keys = _included_keys(), _excluded_keys()  # dispatch keys of this thread, now

    @contextmanager
    def __call__(self, record: bool, mode: TorchFunctionMode | None = None) -> Iterator[None]:
        """record: Whether autograd records. mode: A mode that sees the operations; None is none."""
        before = torch.is_grad_enabled()
        with (
            _ForcedKeys(*self._keys),
            without_functions_seen() if mode is None else entered_once(mode),
            no_autocast(),
            without_saved_tensor_hooks(),
        ):
            set_grad_enabled(record)
            try:
                yield
            finally:
                set_grad_enabled(before)


def autocasts() -> tuple[tuple[str, torch.dtype], ...]:
    """(device type, dtype) of each active autocast."""
    if not _is_any_autocast_enabled():
        return ()
    kinds = filter(torch.is_autocast_enabled, _autocast_devices())
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in kinds)


# torch.compile

# Where this name is missing, torch itself refuses to change the stance inside compiled code.
_frame_callback = private("torch._C._dynamo.eval_frame.get_eval_frame_callback", lambda: None)


@cache
def _stances() -> tuple[Any, Any]:
    """torch's function that sets a stance, and its class of stances; torch imports both late."""
    set_stance = private("torch._dynamo.eval_frame._set_stance")
    return set_stance, private("torch._dynamo.eval_frame.DynamoStance")


def has_dynamo() -> bool:
    """Whether this process may have compiled code. flex_attention compiles by itself."""
    return "torch._dynamo" in sys.modules or "torch.nn.attention.flex_attention" in sys.modules


def is_compiled(func: Callable[..., Any]) -> bool:
    """Whether torch.compile made this module (an OptimizedModule)."""
    return type(func).__name__ == "OptimizedModule"  # importing its module takes two seconds


def has_compiled(module: torch.nn.Module) -> bool:
    """Whether a submodule was compiled, as a new module or in place."""
    parts = module.modules()
    return any(is_compiled(part) or part._compiled_call_impl is not None for part in parts)


@final
class eagerly:  # noqa: N801 a context manager
    """Inside, compiled modules and functions run uncompiled: compiled code has no second derivative,
    and around a custom Function a wrong one without an error.

    torch has one stance for all threads: the first entry changes it, the last exit restores it. A
    class, because each derivative enters one; `torch.compiler.set_stance` takes twice as long.
    """

    _inside = 0  # the number of entered managers, over all threads
    _before: Any = None  # the stance that the last exit restores

    def __init__(self, wanted: bool = True) -> None:
        self._wanted = wanted

    def __enter__(self) -> None:
        # Dynamo cannot trace a change of its stance
        wanted = self._wanted and has_dynamo() and not torch.compiler.is_compiling()
        self._entered = wanted and _frame_callback() in (None, False)
        if self._entered:
            with _LOCK:
                if not eagerly._inside:
                    set_stance, stance = _stances()
                    eagerly._before = set_stance(stance("force_eager"))
                eagerly._inside += 1

    def __exit__(self, *raised: object) -> None:
        if self._entered:
            with _LOCK:
                eagerly._inside -= 1
                if not eagerly._inside:
                    _stances()[0](eagerly._before)


def uncompiled(func: Callable[..., Any]) -> Callable[..., Any]:
    """The function or module that torch.compile was given: compiled code has no second derivative."""
    if is_compiled(func):
        return uncompiled(func._orig_mod)  # type: ignore[attr-defined]
    if isinstance(func, torch.nn.Module):
        return func if func._compiled_call_impl is None else func._call_impl
    return getattr(func, "_torchdynamo_orig_callable", func)


def decomposition(func: Any) -> Callable[..., Any] | None:
    """torch's decomposition of a dispatcher operation into other operations, or None."""
    table = private("torch._decomp.decomposition_table")
    found: Callable[..., Any] | None = table.get(func)
    if found is None and func._can_decompose():
        found = func.decompose
    return found


# A context manager: inside, settings of torch.backends can be changed, even where a user's tests have
# frozen them for the process with `torch.testing._internal`.
settable_precisions: Callable[[], AbstractContextManager[Any]] = private(
    "torch.backends.__allow_nonbracketed_mutation", nullcontext
)


@contextmanager
def native_kernels() -> Iterator[None]:
    """Inside, oneDNN and cuDNN are off.

    `torch.backends.mkldnn.flags` would also set TF32, by an interface for which torch warns.
    """
    backends: Any = torch.backends
    onednn, cudnn = backends.mkldnn.enabled, backends.cudnn.enabled
    with settable_precisions():
        backends.mkldnn.enabled = backends.cudnn.enabled = False
    try:
        yield
    finally:
        with settable_precisions():
            backends.mkldnn.enabled, backends.cudnn.enabled = onednn, cudnn


# torch's fused attention for the CPU, [n, h, L, E]. `F.scaled_dot_product_attention` does not return
# its second output, the logsumexp.
_cpu_attention = private("torch.ops.aten._scaled_dot_product_flash_attention_for_cpu")
_cpu_attention_backward = private(
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward"
)


def cpu_attention(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, causal: bool
) -> tuple[Tensor, Tensor]:
    """softmax(Q K^T + B) V, and the logsumexp of each row of Q K^T + B, [n, h, L]. Both are zero in a
    row that attends to nothing."""
    query, key, value = map(_with_dense_rows, (query, key, value))
    return _cpu_attention(query, key, value, 0.0, causal, attn_mask=bias, scale=1.0)


def cpu_attention_gradients(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    bias: Tensor | None,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients by query, key and value, given the outputs of `cpu_attention`."""
    given = map(_with_dense_rows, (grad, query, key, value))
    return _cpu_attention_backward(
        *given, output, logsumexp, 0.0, causal, attn_mask=bias, scale=1.0
    )


def _with_dense_rows(x: Tensor) -> Tensor:
    """x with elements of a row side by side: the kernel ignores their stride."""
    return x if x.stride(-1) == 1 else x.contiguous()
