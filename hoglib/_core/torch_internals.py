"""The private torch API that hoglib reads, but for what tracing and torch's compiler take
(`hoglib.capture`).

torch.func keeps a stack of active transforms (`grad`, `jvp`, `vmap`), autograd a level of forward-mode
differentiation and the dispatcher a stack of tracers; torch exposes them only in `torch._C` and in
private names. `tests/core/test_torch_internals.py` notices when a torch release changes them.
"""

import inspect
import math
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from typing import Any, final

import torch
from torch import Tensor, nn, overrides
from torch._C import _functorch
from torch._functorch import eager_transforms, pyfunctorch
from torch.autograd import Function, forward_ad
from torch.autograd import function as torch_function
from torch.autograd.function import _SingleLevelFunction
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from hoglib._core import pytree
from hoglib.errors import UnsupportedError


def transforms_active() -> bool:
    """Whether the caller runs inside a `torch.func` transform."""
    return bool(torch._C._are_functorch_transforms_active())


def unwrap(tensor: Any) -> Any:
    """The tensor beneath the wrappers of torch.func, with all samples that vmap maps over."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor


def storage_id(tensor: Tensor) -> int:
    """A number that is the same for tensors that share memory, also beneath wrappers of torch.func."""
    inner = unwrap(tensor)
    return int(inner.untyped_storage()._cdata) if inner.layout is torch.strided else id(inner)


def is_batched(tensor: Any) -> bool:
    """Whether a tensor stands for the samples of `torch.autograd.grad(is_grads_batched=True)`, whose
    vmap is not one of the transforms of torch.func."""
    return bool(_functorch.is_legacy_batchedtensor(tensor))


def apply(function: type[Function], *args: Any) -> Any:
    """function.apply. Outside of transforms without its search for tensors that have left one, which
    takes as long as to record the call."""
    if transforms_active() or torch.compiler.is_compiling():
        return function.apply(*args)
    direct: Any = super(Function, function)
    return direct.apply(*args)


def tensor_check(tensors: list[Tensor]) -> Callable[..., bool]:
    """Whether tensors have the type, dtype, device, sizes, strides and requires_grad of these, in C++;
    False also where only the state of the thread differs (autocast, inference mode)."""
    guards: Any = torch._C._dynamo.guards
    check: Callable[..., bool] = guards.TensorGuards(
        *tensors,
        dynamic_dims_sizes=[list(x.size()) for x in tensors],
        dynamic_dims_strides=[list(x.stride()) for x in tensors],
    ).check
    return check


def forward_levels() -> int:
    """How many `torch.func.jvp` transforms are active around the caller."""
    stack = _functorch.get_interpreter_stack() or ()
    return sum(level.key() == _functorch.TransformType.Jvp for level in stack)


def innermost_is_forward() -> bool:
    """Whether the innermost derivative of torch.func around the caller is a `jvp`, not a gradient."""
    kinds = [level.key() for level in _functorch.get_interpreter_stack() or ()]
    types = _functorch.TransformType
    return next((kind == types.Jvp for kind in reversed(kinds) if kind != types.Vmap), False)


def forward_mode_active() -> bool:
    """Whether the caller runs inside `torch.func.jvp` or a `torch.autograd.forward_ad.dual_level`."""
    return forward_ad._current_level >= 0


_FORWARD_THREADS: dict[int, int] = {}  # thread -> how many entry points it is in
_FORWARD_LOCK = threading.Lock()


def forward_mode_elsewhere() -> bool:
    """Whether another thread is in forward mode by an entry point of hoglib."""
    return any(thread != threading.get_ident() for thread in [*_FORWARD_THREADS])


@contextmanager
def one_thread_in_forward_mode(caller: str) -> Iterator[None]:
    """Raises UnsupportedError if another thread is inside. torch keeps one level of forward mode for
    all threads: the first that leaves it ends that of the others, whose tangents are lost."""
    own = threading.get_ident()
    with _FORWARD_LOCK:
        # a backward on a GPU runs in a thread of its own, within the forward mode of the caller
        if forward_mode_elsewhere() and running_backward() == -1:
            raise UnsupportedError(
                f"{caller}: expected one thread at a time in forward mode, of which torch has one for "
                "the whole process, got two; use the reverse mode, or a lock around the call."
            )
        _FORWARD_THREADS[own] = _FORWARD_THREADS.get(own, 0) + 1
    try:
        yield
    finally:
        with _FORWARD_LOCK:
            _FORWARD_THREADS[own] -= 1
            if not _FORWARD_THREADS[own]:
                del _FORWARD_THREADS[own]


def in_dual_level() -> bool:
    """Whether a `forward_ad.dual_level` around the caller is not that of `torch.func.jvp`, which cannot
    be entered there."""
    return forward_mode_active() and not eager_transforms.JVP_NESTING


@final
class StopsTangents(TorchFunctionMode):
    """Inside, what runs under no_grad is a constant of forward mode too, as it is of backward.

    `outside`, which raises, is called at a torch call within a checkpoint that begins inside: what that
    runs again in a later backward would have no tangents.
    """

    def __init__(self, outside: Callable[[], None]) -> None:
        super().__init__()
        self._outside = outside
        self._frame = checkpoint_frame()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch._C._set_grad_enabled:
            torch._C._set_fwd_grad_enabled(args[0])
        elif checkpoint_frame() is not self._frame:
            self._outside()
        return result

    def __enter__(self) -> "StopsTangents":
        self._before = torch._C._is_fwd_grad_enabled()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch._C._set_fwd_grad_enabled(self._before)


def checkpoint_frame() -> Any:
    """What the innermost non-reentrant checkpoint around the caller keeps to run again, or None."""
    if torch.compiler.is_compiling():
        return None
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is None or not getattr(hooks[0], "__qualname__", "").startswith("_checkpoint_hook."):
        return None
    pack: Any = hooks[0]
    cells = zip(pack.__code__.co_freevars, pack.__closure__, strict=True)
    return next((cell.cell_contents for name, cell in cells if name == "frame"), None)


@contextmanager
def without_saved_tensor_hooks() -> Iterator[None]:
    """Disables the saved-tensor hooks of the caller inside, such as those of a checkpoint."""
    hooks = torch._C._autograd
    taken = []
    while (pair := hooks._top_saved_tensors_default_hooks(True)) is not None:
        taken.append(pair)
        hooks._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pair in reversed(taken):
            hooks._push_saved_tensors_default_hooks(*pair)


def tracing() -> bool:
    """Whether torch.compile, torch.export or make_fx is recording the caller."""
    proxy = torch._C._TorchDispatchModeKey.PROXY
    return torch.compiler.is_compiling() or torch._C._get_dispatch_mode(proxy) is not None


def fresh_copy(x: Tensor) -> Tensor:
    """While a graph is traced, a copy; what is computed from it is computed again, where the graph has
    computed it before, instead of being kept. Otherwise the tensor itself."""
    return x.clone(memory_format=torch.preserve_format) if tracing() else x


class Applying:
    """How many custom Functions are running their forward."""

    depth = 0


@contextmanager
def watching_functions(
    seen: Callable[[type[Function], tuple[Any, ...]], Callable[[Any], None] | None],
) -> Iterator[Applying]:
    """Calls seen(function, args) for each custom Function that is applied inside, also by an `apply`
    that was bound before; not for those that another one's forward applies (unless it `recomputes`
    what the user wrote), nor in other threads. If that returns a function, it is called with the result
    of the application.

    May stand inside of another one, and in several threads at once.
    """
    applying, here = Applying(), threading.get_ident()

    def apply(function: Any, args: tuple[Any, ...], run: Callable[[], Any]) -> Any:
        if threading.get_ident() != here or getattr(function, "recomputes", False):
            return run()
        applying.depth += 1
        try:
            then = seen(function, args) if applying.depth == 1 else None
            result = run()
            if then is not None:
                then(result)
            return result
        finally:
            applying.depth -= 1

    _watch_apply()
    _WATCHES.append(apply)
    try:
        yield applying
    finally:
        _WATCHES.remove(apply)


def engine_gradients(
    outputs: Sequence[Tensor], weights: Sequence[Tensor], inputs: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """torch.autograd.grad with a graph, which no mode handles: so modes see what backward calls."""
    run = torch.autograd.graph._engine_run_backward
    found: tuple[Tensor | None, ...] = run(
        tuple(outputs), tuple(weights), True, True, tuple(inputs), allow_unreachable=True,
        accumulate_grad=False,
    )  # fmt: skip
    return found


_WATCHES: list[Callable[..., Any]] = []

# `torch.autograd.Variable` and `torch.nn.Parameter`, by the metaclasses that run when they are called.
_CONSTRUCTORS = (type(torch.autograd.Variable), type(torch.nn.Parameter))
_CONSTRUCTOR_WATCHES: list[tuple[int, Callable[..., Any]]] = []


@contextmanager
def watching_constructors(handle: Callable[..., Any]) -> Iterator[None]:
    """Calls handle(make, types, args, kwargs) instead of `Variable(...)` and `nn.Parameter(...)`, which
    no mode of torch sees. `make` is what they do without it, under their names."""

    def _constructor(cls: Any, *args: Any, **kwargs: Any) -> Any:
        def make(*args: Any, **kwargs: Any) -> Any:
            return type.__call__(cls, *args, **kwargs)

        make.__name__ = cls.__name__
        watches = [
            watch for thread, watch in _CONSTRUCTOR_WATCHES if thread == threading.get_ident()
        ]
        return watches[-1](make, (), args, kwargs) if watches else make(*args, **kwargs)

    entry = (threading.get_ident(), handle)
    _CONSTRUCTOR_WATCHES.append(entry)
    for kind in _CONSTRUCTORS:
        setattr(kind, "__call__", _constructor)  # noqa: B010
    try:
        yield
    finally:
        _CONSTRUCTOR_WATCHES.remove(entry)
        if not _CONSTRUCTOR_WATCHES:
            for kind in _CONSTRUCTORS:
                delattr(kind, "__call__")


@cache
def _watch_apply() -> None:
    """Puts `_watched` into the place where Function.apply ends: between it and the C++ base.

    It stays there, where it passes on what nobody watches: to take it away after each watch would clear
    the method caches of all Functions.
    """
    place: Any = _SingleLevelFunction
    place.apply = classmethod(_watched)


def _watched(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Function.apply, through all that watch it."""
    if not _WATCHES:
        return super(_SingleLevelFunction, function).apply(*args, **kwargs)

    def run() -> Any:
        return super(_SingleLevelFunction, function).apply(*args, **kwargs)

    for watch in tuple(_WATCHES):
        run = partial(watch, function, args, run)
    return run()


def outside_transforms(
    function: type[Function], args: tuple[Any, ...]
) -> tuple[type[Function], tuple[Any, ...], tuple[bool, ...]]:
    """An application of a Function as it would be outside of torch.func: the Function that the user
    wrote, its arguments without wrappers, those of the first sample under vmap, and which of them it is
    differentiated by."""
    by = tuple(isinstance(x, Tensor) and _is_differentiated(x) for x in args)
    while function.__module__.startswith("torch._functorch"):  # made for one level of a transform
        made_of = inspect.getclosurevars(function.forward).nonlocals
        if not isinstance(made_of.get("autograd_function"), type):
            break
        function, in_dims = made_of["autograd_function"], made_of.get("in_dims")
        if isinstance(in_dims, tuple) and len(in_dims) == len(args):
            pairs = zip(args, in_dims, strict=True)
            args = tuple(x.select(d, 0) if isinstance(d, int) else x for x, d in pairs)
    return function, tuple(map(_first_sample, args)), by


def _is_differentiated(x: Tensor) -> bool:
    return x.requires_grad or _functorch.is_gradtrackingtensor(x) or has_tangent(x)


def has_tangent(x: Tensor) -> bool:
    """Whether the innermost level of forward mode differentiates a tensor."""
    if forward_ad._current_level < 0 or x.layout is not torch.strided:
        return False
    return forward_ad.unpack_dual(x).tangent is not None


def tangent_of(x: Tensor) -> Tensor | None:
    """The tangent of a dual tensor outside of torch.func transforms; None where it has none or zero."""
    if not torch._C._is_fwd_grad_enabled() or not has_tangent(x):
        return None
    tangent = forward_ad.unpack_dual(x).tangent
    return None if tangent is None or tangent._is_zerotensor() else tangent


def primal(x: Tensor | None) -> Tensor | None:
    """The tensor without a tangent of `forward_ad.dual_level`, with its graph."""
    if x is None or transforms_active() or forward_ad._current_level < 0:
        return x
    with forward_ad._set_fwd_grad_enabled(True):
        return forward_ad.unpack_dual(x).primal if has_tangent(x) else x


@contextmanager
def dual_tensors() -> Iterator[None]:
    """Inside, dual tensors may be made and compute tangents, also within a level of forward mode that
    is active, and in a Function's forward and jvp, where torch switches tangents off."""
    level = forward_ad.dual_level() if forward_ad._current_level < 0 else nullcontext()
    with forward_ad._set_fwd_grad_enabled(True), level:
        yield


def _first_sample(x: Any) -> Any:
    """A tensor without the wrappers of torch.func; of samples that vmap maps over, the first."""
    while isinstance(x, Tensor) and _functorch.is_functorch_wrapped_tensor(x):
        batched = _functorch.is_batchedtensor(x)
        dim = _functorch.maybe_get_bdim(x) if batched else None
        x = _functorch.get_unwrapped(x)
        x = x if dim is None else x.select(dim, 0)
    return x


def without_transforms() -> AbstractContextManager[Any]:
    """Inside, no transform of torch.func is active."""
    return pyfunctorch.temporarily_clear_interpreter_stack()


def is_compiled(func: Any) -> bool:
    """Whether it is a module that torch.compile made of another one."""
    return type(func).__name__ == "OptimizedModule"  # whose home takes two seconds to import


def decomposition(func: Any) -> Callable[..., Any] | None:
    """An operation of the dispatcher by others, as torch decomposes it; None if it does not."""
    from torch._decomp import decomposition_table

    found: Callable[..., Any] | None = decomposition_table.get(func)
    if found is None and func._can_decompose():
        found = func.decompose
    return found


def running_backward() -> int:
    """Which backward pass of the engine the caller runs inside; -1 for none."""
    return int(torch._C._current_graph_task_id())


@final
class RecordingBelow:
    """Inside a dispatch mode's handler: autograd records again, as it did where this was made, with no
    autocast and no saved-tensor hooks; what runs is seen by the dispatch modes beneath."""

    def __init__(self) -> None:
        self._keys = (
            torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set(),
        )  # fmt: skip

    @contextmanager
    def __call__(self, record: bool) -> Iterator[None]:
        before = torch.is_grad_enabled()
        with (
            torch._C._ForceDispatchKeyGuard(*self._keys),
            torch._C.DisableTorchFunction(),
            no_autocast(),
            without_saved_tensor_hooks(),
        ):
            torch._C._set_grad_enabled(record)
            try:
                yield
            finally:
                torch._C._set_grad_enabled(before)


def has_dynamo() -> bool:
    """Whether anything can have been compiled by torch.compile in this process."""
    return "torch._dynamo" in sys.modules


def has_compiled(module: torch.nn.Module) -> bool:
    """Whether a part of it was compiled, as a new module or in place."""
    return any(
        is_compiled(part) or part._compiled_call_impl is not None for part in module.modules()
    )


def eagerly(wanted: bool) -> AbstractContextManager[Any]:
    """Compiled modules run as they were before: compiled code has no second derivative."""
    return torch.compiler.set_stance("force_eager") if wanted else nullcontext()


def no_autocast() -> AbstractContextManager[Any]:
    """Inside, autocast casts nothing, also where a region of it is entered."""
    return torch._C._DisableAutocast()


def uncompiled(func: Callable[..., Any]) -> Callable[..., Any]:
    """What torch.compile was given: compiled code has no second derivative."""
    if is_compiled(func):
        return uncompiled(func._orig_mod)  # type: ignore[attr-defined]
    if isinstance(func, torch.nn.Module):
        return func if func._compiled_call_impl is None else func._call_impl
    original: Callable[..., Any] = getattr(func, "_torchdynamo_orig_callable", func)
    return original


def custom_function(node: Any) -> type[Function] | None:
    """The custom Function that a node of a graph belongs to, if to one."""
    function = getattr(type(node), "_forward_cls", None)
    while function is not None and function.__module__.startswith("torch._functorch"):
        # made by torch.func for one level; what it stands for is in the closure of its rules
        made_of = inspect.getclosurevars(function.backward).nonlocals
        function = made_of.get("autograd_function")
    return function


def backward_rule(function: type[Function]) -> Any:
    """Its backward, under either of the names that torch accepts."""
    return function.backward if function.vjp is Function.vjp else function.vjp


def is_once_differentiable(function: type[Function]) -> bool:
    """Whether backward is decorated with @once_differentiable."""
    rule = backward_rule(function)
    made_by = getattr(getattr(rule, "__code__", None), "co_filename", "")
    return hasattr(rule, "__wrapped__") and made_by == torch_function.__file__


class SuspendedMode:
    """Inside, the innermost mode that sees torch's functions is not there, if it is of this class.

    The ops need no stand-ins for what they do themselves, and each call that a mode sees takes several
    microseconds. A class, for it is entered often: contextlib takes longer than all it does.
    """

    __slots__ = ("_kind", "_mode")

    def __init__(self, kind: type[TorchFunctionMode]) -> None:
        self._kind = kind

    def __enter__(self) -> None:
        mode = overrides._get_current_function_mode()
        self._mode = overrides._pop_mode() if isinstance(mode, self._kind) else None

    def __exit__(self, *error: Any) -> None:
        if self._mode is not None:
            overrides._push_mode(self._mode)


def function_mode(kind: type[TorchFunctionMode]) -> TorchFunctionMode | None:
    """The mode of this class that sees torch's functions now."""
    stack = overrides._get_current_function_mode_stack()
    return next((mode for mode in reversed(stack) if isinstance(mode, kind)), None)


@contextmanager
def native_kernels() -> Iterator[None]:
    """Without the kernels of oneDNN and cuDNN.

    `torch.backends.mkldnn.flags` sets TF32 too, by an interface that torch warns of.
    """
    onednn, cudnn = torch._C._get_mkldnn_enabled(), torch._C._get_cudnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    torch._C._set_cudnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(onednn)
        torch._C._set_cudnn_enabled(cudnn)


def output_bytes(node: Any) -> int:
    """The bytes of what the operation of a node put out; 0 where a parameter's gradient accumulates."""
    if not node.next_functions:
        return 0
    return sum(
        math.prod(int(n) for n in out.shape) * out.dtype.itemsize for out in node._input_metadata
    )


def output_shapes(node: Any) -> list[tuple[int, ...]]:
    """The shapes of what the operation of a node put out."""
    return [tuple(int(n) for n in out.shape) for out in node._input_metadata]


def sequence_number(node: Any = None) -> int:
    """The place of a node among those that its thread made; of the next one to be made for None."""
    return int(torch._C._autograd._get_sequence_nr() if node is None else node._sequence_nr())


@contextmanager
def record_backward_origins() -> Iterator[None]:
    """Nodes made inside know by which node's backward, and by which lines of code; torch's anomaly mode
    notes it."""
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        yield


def made_by(node: Any) -> Any:
    """The node in whose backward a node was made; None for one of a forward."""
    return node.metadata.get("parent_")


def made_at(node: Any) -> list[str]:
    """The stack that made a node, as `traceback.format_stack` gives it."""
    return list(node.metadata.get("traceback_", ()))


def running_function() -> type[Function] | None:
    """The custom Function whose backward is running, if one is."""
    node = torch._C._current_autograd_node()
    return None if node is None else custom_function(node)


def has_saved_by_hooks(node: Any) -> bool:
    """Whether saved-tensor hooks keep what a custom Function saved."""
    return any(getattr(one, "unpack_hook", None) is not None for one in node._raw_saved_tensors)


def after_backward(callback: Callable[[], None]) -> None:
    """Calls it at the end of the backward that runs, after DistributedDataParallel is through.

    What is queued in a backward is called at its end, in turn; DistributedDataParallel queues its last
    step late in the backward, so this waits until what was queued in it has been called.
    """
    queue = torch.autograd.Variable._execution_engine.queue_callback
    queue(lambda: queue(callback))


def averages_otherwise(ddp: DistributedDataParallel) -> bool:
    """Whether its gradients are averaged by a communication hook of the user, or in `join()`."""
    hooked = bool(ddp._comm_hooks) and ddp.mixed_precision is None  # mixed precision uses a hook
    return hooked or bool(ddp._join_config.enable)


# What shares the parameters or the data of a module among processes does so in hooks of its forward.

# the modules that define these hooks
_SHARDING_HOOKS = ("torch.distributed.fsdp.", "torch.distributed.tensor.")


def fsdp_state(module: nn.Module) -> Any:
    """That of fully_shard (FSDP2); None for a module that it was not called on."""
    library: Any = sys.modules.get("torch.distributed.fsdp")  # None where nothing imported it
    if library is None or not isinstance(module, library.FSDPModule):
        return None
    found: Any = module
    return found._get_fsdp_state()


def fsdp_groups(module: nn.Module) -> list[Any]:
    """The groups of parameters that fully_shard gathers for a module."""
    state = fsdp_state(module)
    if state is None:
        return []
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # torch 2.11
        groups = [getattr(state, "_fsdp_param_group", None)]
    return [group for group in groups if group is not None]


def reshards_after_backward(module: nn.Module) -> bool:
    """Whether fully_shard frees the gathered parameters of a module after each backward."""
    return any(group.reshard_after_backward for group in fsdp_groups(module))


def computed_dtypes(module: nn.Module) -> dict[int, torch.dtype]:
    """The dtypes in which fully_shard's mixed precision computes with parameters, by their ids."""
    return {
        id(param.sharded_param): group.mp_policy.param_dtype
        for group in fsdp_groups(module)
        if group.mp_policy.param_dtype is not None
        for param in group.fsdp_params
    }


def wrapped_attributes(module: nn.Module, mixed_precision: bool) -> dict[str, Any]:
    """The attributes with which a wrapped module computes with the parameters that are in it, alone.

    fully_shard gathers parameters in hooks, and parallelize_module makes DTensors of inputs.
    mixed_precision: whether inputs and outputs are converted as the policy of fully_shard says.
    """
    before, after = module._forward_pre_hooks, module._forward_hooks
    if not any(map(_is_sharding, (*before.values(), *after.values()))):
        return {}
    found: dict[str, OrderedDict[int, Any]] = {
        name: OrderedDict((key, hook) for key, hook in hooks.items() if not _is_sharding(hook))
        for name, hooks in (("_forward_pre_hooks", before), ("_forward_hooks", after))
    }
    policy = getattr(fsdp_state(module), "_mp_policy", None)
    if policy is not None and mixed_precision:
        if policy.cast_forward_inputs and policy.param_dtype is not None:
            cast = partial(_cast_inputs, policy.param_dtype)
            found["_forward_pre_hooks"][-1] = cast
            found["_forward_pre_hooks"].move_to_end(-1, last=False)
            with_kwargs = module._forward_pre_hooks_with_kwargs
            found["_forward_pre_hooks_with_kwargs"] = OrderedDict({-1: True, **with_kwargs})
        if policy.output_dtype is not None:
            found["_forward_hooks"][-1] = partial(_cast_output, policy.output_dtype)
    return found


def _is_sharding(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith(_SHARDING_HOOKS)


def _cast_inputs(dtype: torch.dtype, module: nn.Module, args: Any, kwargs: Any) -> Any:
    return _cast(args, dtype), _cast(kwargs, dtype)


def _cast_output(dtype: torch.dtype, module: nn.Module, args: Any, output: Any) -> Any:
    return _cast(output, dtype)


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    return pytree.map_tensors(lambda x: x.to(dtype) if x.is_floating_point() else x, tree)


# torch's fused attention for the CPU, [n, h, L, E], of which `F.scaled_dot_product_attention` hides the
# second output.


def cpu_attention(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, causal: bool
) -> tuple[Tensor, Tensor]:
    """softmax(Q K^T + B) V and the logarithm of the sums of the softmax, [n, h, L]; zero where a row
    attends to nothing."""
    query, key, value = map(_with_dense_rows, (query, key, value))
    found: tuple[Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, causal, attn_mask=bias, scale=1.0
    )
    return found


def cpu_attention_gradients(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, logsumexp: Tensor,
    bias: Tensor | None, causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients by query, key and value, from the outputs of `cpu_attention`."""
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    grad, query, key, value = map(_with_dense_rows, (grad, query, key, value))
    found: tuple[Tensor, Tensor, Tensor] = backward(
        grad, query, key, value, output, logsumexp, 0.0, causal, attn_mask=bias, scale=1.0
    )
    return found


def _with_dense_rows(x: Tensor) -> Tensor:
    """The kernel reads rows without a look at the stride of their elements."""
    return x if x.stride(-1) == 1 else x.contiguous()


# oneDNN's matrix product, which torch itself calls for half precision only.
# `torch.ops.mkldnn._linear_pointwise` is what torch's compiler uses for linear layers with constant
# weights.


def onednn_available() -> bool:
    """Whether this build of torch has oneDNN, and `torch.backends.mkldnn` is enabled."""
    return _onednn_is_built() and bool(torch.backends.mkldnn.enabled)


@cache
def _onednn_is_built() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def onednn_full_precision() -> bool:
    """Whether float32 products have full precision; with less, torch itself calls oneDNN."""
    products: Any = torch.backends.mkldnn
    return products.matmul.fp32_precision not in ("bf16", "tf32")


def onednn_takes(tensor: Tensor) -> bool:
    """Whether oneDNN accepts a tensor: a float32 matrix on the CPU, row-major or column-major."""
    if tensor.dtype is not torch.float32 or tensor.dim() != 2 or tensor.device.type != "cpu":
        return False
    return tensor.layout is torch.strided and (by_rows(tensor) or by_columns(tensor))


def by_rows(matrix: Tensor) -> bool:
    return matrix.stride(1) == 1 and matrix.stride(0) >= matrix.shape[1]


def by_columns(matrix: Tensor) -> bool:
    return matrix.stride(0) == 1 and matrix.stride(1) >= matrix.shape[0]


def onednn_affine(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b of tensors that `onednn_takes` accepts, b [out] or None; it has no derivative."""
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return result
