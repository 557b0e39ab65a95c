"""Every private name of torch that hoglib uses: its purpose, the feature that needs it, and a probe.

    _get_unwrapped = private("torch._C._functorch.get_unwrapped")      # at import: no look-up later

A release of torch may remove any of these names. `private` then returns an object that raises
UnsupportedError on every use: `import hoglib` succeeds, and a feature raises when it needs the name.
`hoglib check` runs the probes.

The comment over a group of rows says what torch has no public API for. hoglib reads private attributes
of torch's objects directly; these have rows, too: `Tensor._version`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from inspect import getclosurevars, signature
from types import FunctionType
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.overrides import TorchFunctionMode

from hoglib._core.torch_api.dispatch import Args, Kw, Op, Types
from hoglib.errors import UnsupportedError

ALL = "any derivative by hoglib"
FUNC = "calls inside torch.func"
FORWARD = "forward mode"
EXAMINATION = "the examination of custom Functions"
REMAT = "recomputation (remat, checkpoints)"
COMPILE = "compile="
COMPILED = "derivatives of what torch.compile made"
OPERATORS = "operators of torch.library"
SCRIPTS = "scripted code"
STAND_INS = "stand-ins for torch calls (second_order)"
TAYLOR = "Taylor mode (jet, laplacian)"
SHARDED = "models that processes share"
SPEED = "nothing; another way is slower"
NOTHING = "nothing; no call of it is left"  # hoglib replaces the function of this name itself


class PrivateName(NamedTuple):
    """A private name of torch, or a private attribute of its objects.

    name: As Python resolves it from torch; "Tensor._version" for an attribute of each Tensor.
    used_for: The purpose in hoglib.
    without: The feature that is not available if torch lacks the name.
    probe: Called with the object that has this name (or with one that has the attribute); returns
        whether it does what hoglib expects.
    """

    name: str
    used_for: str
    without: str
    probe: Callable[[Any], Any] = callable


R = PrivateName


# Helpers of several probes


def _within(transform: Callable[..., Any], probe: Callable[[Tensor], Any]) -> Any:
    """The result of a probe, called with a tensor inside a transform of torch.func."""
    found: list[Any] = []

    def look(x: Tensor) -> Tensor:
        found.append(probe(x))
        return x.sum()

    transform(look)(torch.ones(2, 3))
    return found[-1]


def _in_backward(probe: Callable[[], Any]) -> Any:
    found: list[Any] = []
    y = torch.ones(1, requires_grad=True).sin()
    y.register_hook(lambda _: found.append(probe()))
    y.backward()
    return found[-1]


def _within_mode(probe: Callable[[Any], Any]) -> Any:
    """The result of a probe, called with an active mode; `mode.seen` is the last call that it saw."""

    class Mode(TorchFunctionMode):
        seen: Any = None

        def __torch_function__(
            self, func: Op, types: Types, args: Args = (), kwargs: Kw = None
        ) -> Any:
            self.seen = func
            return func(*args, **(kwargs or {}))

    with Mode() as mode, torch.no_grad():
        return probe(mode)


def _queued(queue: Any) -> bool:
    done: list[bool] = []
    _in_backward(lambda: queue(lambda: done.append(True)))
    return done == [True]


def _top_hooks_are_seen(top: Any) -> bool:
    hooks = torch.autograd.graph.saved_tensors_hooks(Tensor.detach, Tensor.detach)
    with hooks:
        inside = top(True)
        hooks.__exit__()  # `without_saved_tensor_hooks` pops and pushes hooks in this way
        without = top(True)
        hooks.__enter__()
    return inside == (Tensor.detach, Tensor.detach) and without is None


def _sees_operations(kind: Any) -> bool:
    class Mode(kind):
        seen = 0

        def __torch_dispatch__(
            self, func: Op, types: Types, args: Args = (), kwargs: Kw = None
        ) -> Any:
            self.seen += 1
            return func(*args, **(kwargs or {}))

    with Mode() as mode:
        torch.ones(2).sin()
    return bool(mode.seen)


_levels: Callable[[Any], list[str]] = lambda stack: [one.key().name for one in stack() or ()]  # noqa: E731
_jvp: Callable[..., Any] = lambda f: lambda x: torch.func.jvp(f, (x,), (x,))  # noqa: E731
_TRANSFORMS = ((torch.func.grad, "Grad"), (torch.vmap, "Vmap"), (_jvp, "Jvp"))
_is_off: Callable[[Any], bool] = lambda ask: not ask()  # noqa: E731


class _Twice(Function):
    """The custom Function that probes of nodes apply."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: object) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: object, g: Tensor) -> Tensor:
        return 2 * g


def _made_of() -> Any:
    """The user's Function behind the class that torch.func makes of it; only a closure holds it."""

    def made(x: Tensor) -> Any:
        node: Any = _Twice.apply(x).grad_fn
        kind = node._forward_cls
        own = kind.__module__.startswith("torch._functorch")
        return getclosurevars(kind.backward).nonlocals["autograd_function"] if own else None

    return _within(torch.func.grad, made)


def _identity(x: object) -> Any:
    return x


def _uses(*attributes: str) -> Callable[[Any], bool]:
    """A probe of classes: whether their methods use any of the attributes."""

    def probe(kind: Any) -> bool:
        methods = [f for one in kind.__mro__ for f in vars(one).values() if type(f) is FunctionType]
        return any(name in f.__code__.co_names for f in methods for name in attributes)

    return probe


def _has_none(hooks: str) -> Callable[[Any], bool]:
    return lambda module: not vars(module)[hooks]


def _fsdp_module() -> Any:
    from torch.distributed.fsdp import FSDPModule

    return FSDPModule


def _node() -> Any:
    y: Any = _Twice.apply(torch.ones(2, requires_grad=True))
    y.grad_fn.output = y  # before torch 2.13 a custom Function's node dies with its output
    return y.grad_fn


_ONES = torch.ones(2)
_OWNERS: dict[str, Callable[[], Any]] = {
    "Tensor": lambda: torch.ones(2),
    "Storage": lambda: _ONES.untyped_storage(),
    "Function": lambda: _Twice,
    "Node": _node,
    "Operator": lambda: torch.ops.aten.sin.default,
    "OperatorPacket": lambda: torch.ops.aten.sin,
    "CustomOpDef": lambda: vars(torch.library)["CustomOpDef"],
    "Module": lambda: nn.Linear(2, 2),
    "OptimizedModule": lambda: torch.compile(nn.Linear(2, 2)),
    "Compiled": lambda: torch.compile(_identity),
    "DDP": lambda: nn.parallel.DistributedDataParallel,
    "FSDPModule": _fsdp_module,
    "FSDPState": lambda: _fsdp_module()._get_fsdp_state.__globals__["FSDPState"],
}


def _sdpa(op: Any) -> bool:
    return "attn_mask" in {a.name for a in op.default._schema.arguments}


_F = "torch._C._functorch."
# fmt: off
_ROWS = (
    # The stack of active transforms of torch.func, and the wrappers of tensors inside them.
    R("torch._C._are_functorch_transforms_active", "whether any is active", SPEED,
      lambda f: f() is False),
    R(f"{_F}get_interpreter_stack", "which are active", FUNC,
      lambda f: f() is None and all(_within(by, lambda _: _levels(f)) == [kind] for by, kind in _TRANSFORMS)),
    R(f"{_F}is_functorch_wrapped_tensor", "whether a tensor is a wrapper", ALL,
      lambda f: not f(torch.ones(2)) and _within(torch.func.grad, f)),
    R(f"{_F}get_unwrapped", "the tensor beneath a wrapper", FUNC,
      lambda f: _within(torch.func.grad, lambda x: f(x).shape) == (2, 3)),
    R(f"{_F}maybe_get_bdim", "the dimension that vmap maps over", FUNC,
      lambda f: f(torch.ones(2)) == -1 and _within(torch.vmap, f) == 0),
    R(f"{_F}unwrap_if_dead", "wrappers of transforms that are over", FUNC, lambda f: f(_ONES) is _ONES),
    R(f"{_F}is_legacy_batchedtensor", "the vmap of torch.autograd.grad(is_grads_batched=True)", "cross entropy of vocabularies by blocks",
      lambda f: not f(torch.ones(2))),
    R(f"{_F}_set_vmap_fallback_warning_enabled", "warnings of operations without a rule for vmap", "rows of Hessians side by side",
      lambda f: f(True) is None),
    R(f"{_F}_wrap_for_grad", "constants of a transform", f"{REMAT} inside torch.func",
      lambda f: _within(torch.func.grad, lambda x: f(_ONES, 1).shape) == (2,)),
    R(f"{_F}_unwrap_for_grad", "tangents beneath wrappers", f"{REMAT} inside torch.func",
      lambda f: f(_ONES, 1) is _ONES),
    R("torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack", "runs outside of all transforms", FUNC),
    R("torch._functorch.pyfunctorch.retrieve_current_functorch_interpreter", "runs one transform further out", f"{REMAT} inside torch.func",
      lambda f: _within(torch.func.grad, lambda _: callable(f().lower))),
    R("torch._functorch.eager_transforms.JVP_NESTING", "whether torch.func.jvp entered the level", f"{REMAT} in {FORWARD}",
      lambda n: n == 0),
    # Forward mode: its level, one for the process, and its switch.
    R("torch.autograd.forward_ad._current_level", "its level", ALL, lambda n: n == -1),
    R("torch.autograd.forward_ad._set_fwd_grad_enabled", "its switch", FORWARD,
      lambda f: f(True).__exit__(None, None, None) is None),
    R("torch._C._is_fwd_grad_enabled", "its switch", FORWARD, lambda f: f() is True),
    # The function behind `no_grad` that modes see; it takes a third of the time of
    # torch.set_grad_enabled.
    R("torch._C._set_grad_enabled", "constants under no_grad", FORWARD,
      lambda f: _within_mode(lambda mode: mode.seen is f)),
    # The thread-local state of the dispatcher: saved and restored.
    R("torch._C._is_any_autocast_enabled", "autocast", ALL, _is_off),
    R("torch._C._autocast_supported_devices", "the devices of autocast", ALL, lambda f: "cpu" in f()),
    R("torch._C._DisableAutocast", "runs without autocast", COMPILE),
    R("torch._C.DisableTorchFunction", "runs without modes", ALL),
    R("torch._C._ForceDispatchKeyGuard", "records beneath a mode", TAYLOR),
    R("torch._C._dispatch_tls_local_include_set", "the dispatch keys of the thread", TAYLOR),
    R("torch._C._dispatch_tls_local_exclude_set", "the dispatch keys of the thread", TAYLOR),
    # Active modes and tracers.
    R("torch._C._TorchDispatchModeKey.PROXY", "whether a graph is traced", ALL, lambda key: key.name == "PROXY"),
    R("torch._C._TorchDispatchModeKey.FUNCTIONAL", "whether a graph is traced", ALL, lambda key: key.name == "FUNCTIONAL"),
    R("torch._C._get_dispatch_mode", "whether a graph is traced", ALL,
      lambda f: f(torch._C._TorchDispatchModeKey.PROXY) is None),
    R("torch.overrides._get_current_function_mode", "the mode of stand-ins", ALL,
      lambda f: f() is None and _within_mode(lambda mode: f() is mode)),
    R("torch.overrides._get_current_function_mode_stack", "the mode of stand-ins, beneath others", ALL,
      lambda f: _within_mode(lambda mode: f() == [mode])),
    R("torch.utils._python_dispatch.TorchDispatchMode", "sees each operation; torch documents it", f"{TAYLOR}, {COMPILE}",
      _sees_operations),
    R("torch._C._is_torch_function_enabled", "whether a type handles calls itself", "arguments of a type with a `__torch_function__`",
      lambda f: f()),
    R("torch.overrides._pop_mode", "takes the mode of stand-ins off", ALL),
    R("torch.overrides._push_mode", "puts it on again", ALL),
    R("torch.utils._python_dispatch._get_current_dispatch_mode", "which is active", SCRIPTS),
    R("torch.utils._python_dispatch._disable_current_modes", "runs without them", COMPILE),
    # The engine of autograd.
    R("torch.autograd.graph._engine_run_backward", "gradients without torch's checks in Python", SPEED),
    R("torch._C._current_graph_task_id", "which backward runs", ALL,
      lambda f: f() == -1 and _in_backward(f) >= 0),
    R("torch._C._current_autograd_node", "whose backward runs", EXAMINATION,
      lambda f: f() is None and _in_backward(f) is not None),
    R("torch.autograd.Variable._execution_engine.queue_callback", "what is done after a backward", "derivatives within a backward",
      _queued),
    R("torch._C._autograd._top_saved_tensors_default_hooks", "checkpoints, and hooks of saved tensors", ALL,
      _top_hooks_are_seen),
    R("torch._C._storage_Use_Count", "gradients that others have, too", EXAMINATION,
      lambda f: f(_ONES.untyped_storage()._cdata) >= 1),
    R("torch._functorch.autograd_function", "Functions inside torch.func", EXAMINATION,
      lambda _: _made_of() is _Twice),
    R("torch.utils.checkpoint._checkpoint_hook", "checkpoints", REMAT,
      lambda kind: "frame" in str(signature(kind))),
    R("torch.utils.checkpoint._NoopSaveInputs", "before torch 2.13", NOTHING),
    # Bases of public classes, from which users derive their own layers.
    R("torch.nn.modules.batchnorm._BatchNorm", "layers that normalise by the batch", ALL),
    R("torch.nn.modules.batchnorm._NormBase", "layers with running statistics", ALL),
    R("torch.nn.modules.dropout._DropoutNd", "layers that draw", ALL),
    # Parameters, swapped where torch caches or traces them.
    R("torch.nn.utils.parametrize._cache", "parametrizations", ALL, lambda c: c == {}),
    R("torch.nn.utils.stateless._reparametrize_module", "swaps that Dynamo traces", COMPILED),
    R("torch.backends.__allow_nonbracketed_mutation", "precision, where it is frozen", "verify"),
    # Pytrees, as torch.func takes them; they have no public name in torch.utils.
    R("torch.utils._pytree.tree_flatten", "trees", "trees of other containers than dict, list and tuple",
      lambda f: f({"a": [1, 2]})[0] == [1, 2]),
    R("torch.utils._pytree.tree_flatten_with_path", "names of leaves", "messages that name a leaf of a tree",
      lambda f: f({"a": 1})[0][0][0][0].key == "a"),
    R("torch.utils._pytree.SUPPORTED_NODES", "classes of trees", "named tuples of tensors",
      lambda kinds: dict in kinds),
    # Loops of torch.compile's control flow: torch.ops runs them without their functions' closures.
    R("torch._higher_order_ops.scan", "its stand-in", STAND_INS),
    R("torch._higher_order_ops.map", "its stand-in", STAND_INS),
    R("torch._higher_order_ops.while_loop", "its stand-in", STAND_INS),
    R("torch.nn.attention.flex_attention._validate_device", "gradients of it on a CPU", STAND_INS),
    # Operators of torch.library, whose autograd rules have no public name.
    R("torch._library.custom_ops.OPDEFS", "their rules", OPERATORS, lambda d: d.get),
    R("torch.library._impls", "rules in the dispatcher", OPERATORS, lambda names: isinstance(names, set)),
    R("torch._C._jit_resolve_packet", "the overload of a call", OPERATORS),
    R("torch._C._AutoDispatchBelowAutograd", "runs without their rules", OPERATORS),
    R("torch._library.autograd", "their Functions", OPERATORS,
      lambda m: callable(m.make_autograd_impl)),
    R("torch._library.utils.is_tensorlist_like_type", "lists of tensors", OPERATORS),
    R("torch._library.utils.fill_defaults", "arguments that were left out", OPERATORS),
    R("torch._C._nn", "torch's bindings of operators", STAND_INS, lambda m: callable(m.gelu)),
    # Operations that only private names reach.
    R("torch.nn._reduction.get_enum", "reductions of losses", STAND_INS, lambda f: f("sum") == 2),
    R("torch.nn._reduction.legacy_get_enum", "size_average and reduce of losses", STAND_INS),
    R("torch._prims_common.suggest_memory_format", "channels-last in a graph", COMPILE),
    R("torch._weight_norm", "is replaced", NOTHING),
    R("torch._weight_norm_interface", "is replaced", NOTHING),
    R("torch._safe_softmax", "is replaced", NOTHING),
    R("torch._assert_async", "an assertion in a graph", "ops.segment_reduce"),
    R("torch._foreach_add_", "sums in one launch", "operators over data", callable),
    R("torch._foreach_norm", "norms in one launch", ALL, lambda f: float(f([torch.ones(4)])[0]) == 2),
    R("torch.ops.aten._scaled_dot_product_flash_attention_for_cpu", "fused attention", "ops.attention",
      _sdpa),
    R("torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward", "fused attention", "ops.attention",
      _sdpa),
    R("torch.ops.aten._unsafe_view.default", "views in a graph", COMPILE),
    R("torch.ops.aten._to_copy.default", "casts in a graph", COMPILE),
    R("torch._decomp.decomposition_table", "operations by others", TAYLOR, lambda d: len(d) > 99),
    R("torch._C.ScriptMethod", "scripted calls", ALL, lambda kind: kind.__call__),
    # Graphs of hog.compile: a tracer's tensors, and the compiler of a graph.
    R("torch._subclasses.fake_tensor.FakeTensor", "tensors without values", COMPILE,
      lambda kind: issubclass(kind, Tensor)),
    R("torch._C._dynamo.guards.TensorGuards", "whether a call is like another one", COMPILE,
      lambda kind: kind(_ONES, dynamic_dims_sizes=[[2]], dynamic_dims_strides=[[1]]).check(_ONES)),
    R("torch._C._dynamo.eval_frame.get_eval_frame_callback", "whether compiled code calls", "derivatives that compiled code takes",
      lambda f: f() in (None, False)),
    R("torch._dynamo.eval_frame._set_stance", "runs compiled code uncompiled", COMPILED),
    R("torch._dynamo.eval_frame.DynamoStance", "runs compiled code uncompiled", COMPILED),
    R("torch._dynamo.graph_break", "what Dynamo cannot trace", COMPILED),
    R("torch._dynamo.config.patch", "compiled modules in a trace", COMPILE),
    R("torch._dynamo.utils.counters", "what came from a cache", COMPILE, lambda d: d.values),
    R("torch._inductor.config", "its settings", COMPILE,
      lambda c: (c.patch, c.triton.cudagraphs, c.cpp.threads, c.cpp.dynamic_threads, c.cpp.cxx)),
    R("torch._inductor.list_mode_options", "its modes", COMPILE),
    R("torch._inductor.custom_graph_pass.CustomGraphPass", "passes over a graph", COMPILE, lambda kind: (kind.__call__, kind.uuid)),
    R("torch._inductor.standalone_compile", "compiles a graph", COMPILE),
    R("torch._inductor.utils.fresh_cache", "another cache, where one fails", COMPILE),
    R("torch._inductor.runtime.cache_dir_utils.default_cache_dir", "its cache", COMPILE),
    R("torch._inductor.cpu_vec_isa.pick_vec_isa", "instructions of the processor", COMPILE),
    # The beginning of an application of a Function in C++, which makes its node.
    R("Function._backward_cls", "applications", EXAMINATION, lambda f: f._backward_cls._forward_cls is f),
    # A tensor's version counter, base, references and storage.
    R("Tensor._version", "changes in place", ALL, lambda x: x.add_(1)._version == 1),
    R("Tensor._base", "the base of a view", TAYLOR, lambda x: x[:1]._base is x),
    R("Tensor._is_view", "whether it is a view", ALL, lambda x: x[:1]._is_view()),
    R("Tensor._use_count", "shared gradients", EXAMINATION, lambda x: x._use_count() == 1),
    R("Tensor._nnz", "buffers that are sparse", ALL, lambda x: x.to_sparse()._nnz() == 2),
    R("Tensor._is_zerotensor", "tangents", FORWARD, lambda x: not x._is_zerotensor()),
    R("Storage._cdata", "whose memory a tensor is", ALL, lambda s: s._cdata == s._cdata > 0),
    # A node's custom Function, outputs and saved tensors.
    R("Node._forward_cls", "its custom Function", EXAMINATION, lambda n: n._forward_cls is _Twice),
    R("Node._input_metadata", "shapes and dtypes of its outputs", "graph()",
      lambda n: ((*n._input_metadata[0].shape, n._input_metadata[0].dtype.is_floating_point) == (2, True))),
    R("Node._raw_saved_tensors", "hooks that keep them", EXAMINATION,
      lambda n: len(n._raw_saved_tensors)),
    # The dispatcher's record of an operator.
    R("Operator._schema", "its arguments", OPERATORS, lambda o: o._schema.name == "aten::sin"),
    R("Operator._overloadname", "its name", TAYLOR, lambda o: o._overloadname == "default"),
    R("Operator._can_decompose", "decomposition", TAYLOR, lambda o: not o._can_decompose()),
    R("OperatorPacket._qualified_op_name", "the overload of a call", OPERATORS,
      lambda p: p._qualified_op_name == "aten::sin"),
    R("CustomOpDef._opoverload", "its operator", OPERATORS, _uses("_opoverload")),
    R("CustomOpDef._backward_fn", "its rules", OPERATORS, _uses("_backward_fn")),
    R("CustomOpDef._setup_context_fn", "its rules", OPERATORS, _uses("_setup_context_fn")),
    # A module's tensors and submodules, and the hooks around its forward: replaced for a time.
    R("Module._parameters", "parameters, swapped", ALL, lambda m: "weight" in m._parameters),
    R("Module._buffers", "buffers, swapped", ALL, lambda m: m._buffers == {}),
    R("Module._forward_hooks", "hooks, left out", SHARDED, _has_none("_forward_hooks")),
    R("Module._forward_pre_hooks", "hooks, left out", SHARDED, _has_none("_forward_pre_hooks")),
    R("Module._forward_pre_hooks_with_kwargs", "hooks, left out", SHARDED,
      _has_none("_forward_pre_hooks_with_kwargs")),
    R("Module._backward_hooks", "hooks, checked", COMPILE, _has_none("_backward_hooks")),
    R("Module._backward_pre_hooks", "hooks, checked", "audit", _has_none("_backward_pre_hooks")),
    # Whether torch.compile made an object, and from which one.
    R("Module._compiled_call_impl", "whether compiled", COMPILED,
      lambda m: m._compiled_call_impl is None),
    R("Module._call_impl", "the call uncompiled", COMPILED, lambda m: callable(m._call_impl)),
    R("Module._modules", "its parts", ALL, lambda m: m._modules == {}),
    R("OptimizedModule._orig_mod", "the module that was compiled", COMPILED,
      lambda m: type(m._orig_mod) is nn.Linear),
    R("Compiled._torchdynamo_orig_callable", "the function that was compiled", COMPILED,
      lambda f: f._torchdynamo_orig_callable is _identity),
    # Gradient averaging of DDP, and parameter groups of fully_shard: read from the classes, without
    # processes.
    R("DDP._comm_hooks", "hooks of the user's", SHARDED, _uses("_comm_hooks")),
    R("DDP._join_config", "whether in join()", SHARDED, _uses("_join_config")),
    R("FSDPModule._get_fsdp_state", "its groups", SHARDED, lambda kind: callable(kind._get_fsdp_state)),
    R("FSDPState._fsdp_param_groups", "in torch 2.11 _fsdp_param_group", SHARDED,
      _uses("_fsdp_param_groups", "_fsdp_param_group")),
    R("FSDPState._fsdp_param_group", "before torch 2.12", NOTHING),
    R("FSDPState._mp_policy", "its dtypes", SHARDED, _uses("_mp_policy")),
)
# fmt: on


TABLE = {row.name: row for row in _ROWS}
_REFUSE: Any = object()
_ABSENT: Any = object()
# each refused name: user code may have caught the error, see `nothing_refused`
REFUSED: list[str] = []


def private(name: str, default: object = _REFUSE) -> Any:
    """The object with a name of the table. Where torch lacks the name: the default, or a class that
    raises UnsupportedError on every use.

    Call it at import; for modules that torch imports late, in the function that needs them.

    Raises:
        KeyError: For a name that is not in the table.
    """
    row = TABLE[name]
    try:
        return _resolved(name)
    except (AttributeError, ImportError):
        return _Refusing("Missing", (), {"torch_name": row.name}) if default is _REFUSE else default


def holder(name: str) -> Any:
    """The module that contains a name of the table, for a name that torch rebinds; where torch lacks
    the name, a class that raises on every use."""
    found = private(name)
    return found if is_missing(found) else _resolved(name.rpartition(".")[0])


def require(*found: Any) -> None:
    """Raise for the first missing object, where a use might not: `func is missing` is only False."""
    for one in found:
        if is_missing(one):
            one()


def is_missing(found: object) -> bool:
    """Whether an object is the class that `private` returns for a missing name."""
    return type(found) is _Refusing


def needing(found: object, *others: Any) -> Any:
    """found, or the first missing object of `others`, without which found is of no use."""
    return next(filter(is_missing, (found, *others)), found)


def refuse(name: str) -> NoReturn:
    """Raise UnsupportedError for a name of the table that torch lacks."""
    row = TABLE[name]
    REFUSED.append(name)
    raise UnsupportedError(
        f"hoglib uses `{name}` ({row.used_for}), which torch {torch.__version__} does not have. Not "
        f"available here: {row.without}. `hoglib check` lists what does not hold."
    )


@contextmanager
def nothing_refused() -> Iterator[None]:
    """At exit, raise again for a name that was refused inside if something caught the error."""
    before = len(REFUSED)
    yield
    if len(REFUSED) > before:
        refuse(REFUSED[-1])


def failing() -> Iterator[PrivateName]:
    """The rows with a failing probe: torch lacks the name, or its behaviour has changed."""
    for row in TABLE.values():
        owner = row.name.partition(".")[0]
        try:
            holds = row.probe(_resolved(row.name) if owner == "torch" else _OWNERS[owner]())
        except OSError:  # from a directory or a compiler, not from torch
            continue
        except Exception:  # a changed function may raise anything
            holds = False
        if not holds and row.without not in (NOTHING, SPEED):
            yield row


def missing(feature: str) -> str:
    """The first name that a feature needs and torch lacks; "" if torch has all."""
    names = (row.name for row in TABLE.values() if row.without == feature)
    lacking = (n for n in names if n.startswith("torch.") and private(n, _ABSENT) is _ABSENT)
    return next(lacking, "")


def _resolved(name: str) -> Any:
    found: Any = torch
    path, *parts = name.split(".")
    for part in parts:
        path += f".{part}"
        try:
            found = getattr(found, part)
        except AttributeError:  # a submodule that nothing has imported yet
            import_module(path)
            found = getattr(found, part)
    return found


class _Refusing(type):
    """The metaclass of stand-ins for missing names: they can be subclassed, and raise on other uses.

    torch_name: The missing name.
    """

    torch_name = ""

    def _refused(cls, *args: Any, **kwargs: Any) -> Any:
        refuse(cls.torch_name)

    __call__ = __instancecheck__ = __subclasscheck__ = __iter__ = __bool__ = __len__ = _refused
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __getitem__ = _refused
    __hash__ = type.__hash__  # tables are keyed by torch's functions

    def __getattr__(cls, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)  # Python itself asks for dunder attributes
        refuse(cls.torch_name)
