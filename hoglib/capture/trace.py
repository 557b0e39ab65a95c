"""Traces a function of tensors to one graph of torch's operations, and refuses what a graph cannot
contain.

The function runs once on fake tensors, which have shapes and no values, so nothing is computed or
changed. Reading a value and changing an input are refused, with the user's line. One mode sees calls on
tensors in Python (`.item()`, NumPy, `backward()`). Another mode sees each operation before it runs, so
a refused operation changes nothing. Tensors that the function reaches besides its arguments
(parameters, buffers, closures) become inputs of the graph.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from operator import attrgetter
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from hoglib._core.messages import validation
from hoglib._core.messages.module_names import watching_modules
from hoglib._core.runtime import source_location
from hoglib._core.substrate.gradient_graph import leaf_tensors, walk
from hoglib._core.torch_api import pytree, torch_internals
from hoglib._core.torch_api.dispatch import Args, Kw, Op, Types
from hoglib._core.torch_api.torch_library import OPERATORS
from hoglib._core.torch_api.torch_private import private
from hoglib.capture.signature import FakeTensor, TensorSlot, check_dense
from hoglib.errors import HoglibError, UnsupportedError

_disable_current_modes = private("torch.utils._python_dispatch._disable_current_modes")
_dispatch_mode = private("torch.utils._python_dispatch._get_current_dispatch_mode")

aten = torch.ops.aten
# calls in Python that read values
_READS = {
    Tensor.item, Tensor.__float__, Tensor.__int__, Tensor.__bool__, Tensor.__index__,
    Tensor.__complex__, Tensor.numpy, Tensor.__array__, Tensor.tolist,
}  # fmt: skip
# torch's errors in tracing: the classes, and words in messages
_GUARDS = (
    "DataDependentOutputException", "DynamicOutputShapeException", "GuardOnDataDependentSymNode",
    "UnsupportedOperatorException",
)  # fmt: skip
_WORDS = (
    "trying to get value out of a tracing tensor", ".numpy() is not supported", "data_ptr",
    "Cannot access data pointer", "Not available for 'meta'",
    "size_bytes_is_heap_allocated_",  # from a storage of symbolic size
    "its data is not allocated yet",  # from torch.tensor([x[0]]), which reads the list's elements
)  # fmt: skip
# namespaces of the operations by which fully_shard gathers parameters
_OF_PROCESSES = ("fsdp", "c10d", "_c10d_functional")
_DEVICE = torch.ops.prim.device.default
_META = torch.device("meta")
_NORMS = (aten.native_batch_norm.default, aten.cudnn_batch_norm.default)


class PythonChecks(TorchFunctionMode):
    """Refuses `backward()` and calls that read values, also of tensors that are not arguments."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self._what = what

    def __torch_function__(self, func: Op, types: Types, args: Args = (), kwargs: Kw = None) -> Any:
        if func in _READS or (func is Tensor.__format__ and not args[0].dim()):
            constant = _constant_value(args[0])
            if constant is None:
                raise value_read_error(self._what, f"Tensor.{func.__name__}", user_line())
            with _disable_current_modes():
                return func(constant, *args[1:], **(kwargs or {}))
        if func is Tensor.data_ptr and not torch_internals.transforms_active():
            raise value_read_error(self._what, "Tensor.data_ptr", user_line())
        if func is Tensor.backward:
            raise backward_call_error(self._what, user_line())
        return func(*args, **(kwargs or {}))


class OperationChecks(torch_internals.TorchDispatchMode):
    """Refuses operations that read values, or have a shape that depends on values; that draw from a
    `torch.Generator`; or that write to an argument of the function or to a tensor that it reaches.

    Attributes:
        outer: Tensors with a graph from before the trace.
    """

    supports_higher_order_operators = True

    def __init__(self, what: str, given: Sequence[Tensor]) -> None:
        super().__init__()
        self._what = what
        self._kept = {torch_internals.storage_id(x) for x in given}  # storages of arguments
        # views of arguments, kept alive for the ids of their storages
        self._views: list[Tensor] = []
        self.outer: list[Tensor] = []

    def __torch_dispatch__(self, func: Op, types: Types, args: Args = (), kwargs: Kw = None) -> Any:
        # most calls: autograd asks for devices
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return _META if args[0].fake_mode.in_kernel_invocation else args[0].fake_device
        kwargs = kwargs or {}
        # higher-order operators have no schema
        if not isinstance(func, OPERATORS[0]):
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
                if argument.alias_info is not None or _writes_argument(func, argument):
                    if _writes_argument(func, argument) and self._is_kept(value):
                        raise self._changes(func)
                    # lift_fresh makes a tensor of a number: not an alias of the user's
                    views = views or (self._is_kept(value) and func is not aten.lift_fresh.default)
        result = func(*args, **kwargs)
        if views:
            for one in result if isinstance(result, list | tuple) else (result,):
                if isinstance(one, Tensor):
                    self._views.append(one)
                    self._kept.add(torch_internals.storage_id(one))
        return result

    def _draws(self, func: Callable[..., Any]) -> Exception:
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
        """Whether a tensor is from before the trace: an argument's alias, or a tensor with values."""
        return not isinstance(value, FakeTensor) or torch_internals.storage_id(value) in self._kept


def _writes_argument(func: Callable[..., Any], argument: Any) -> bool:
    if argument.alias_info is not None and argument.alias_info.is_write:
        return True
    # The schemas of batch norm do not declare that it writes running statistics.
    return func in _NORMS and argument.name in ("running_mean", "running_var")


def _named_arguments(func: Any, args: tuple[Any, ...], kwargs: Any) -> Iterator[tuple[Any, Any]]:
    """The schema and the value of each argument; lists of tensors one tensor at a time."""
    schema = func._schema.arguments
    if func in _NORMS and not args[5]:  # args[5] is training: in eval mode nothing is written
        return
    pairs = [*zip(schema, args, strict=False)]
    pairs += [(a, kwargs[a.name]) for a in schema if a.name in kwargs]
    for argument, value in pairs:
        for one in value if isinstance(value, list | tuple) else (value,):
            yield argument, one


def refuse_outer_graph(what: str) -> None:
    """Raises UnsupportedError if the traced function uses a tensor that already has a graph.

    The gradient would have to continue into that graph.
    """
    mode = _dispatch_mode()
    if isinstance(mode, OperationChecks) and mode.outer:
        raise UnsupportedError(
            f"{what}: expected a loss of arguments and parameters, got one that also uses "
            f"{validation.describe(mode.outer[0])} that was computed with a graph before the call "
            f"({mode.outer[0].grad_fn}). Pass it as an argument."
        )


@contextmanager
def translate_tracing_errors(what: str) -> Iterator[None]:
    """Raises UnsupportedError, with the user's line, for torch's errors in tracing."""
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


def _reads_values(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether the output of an operation, or its shape, depends on unknown values."""
    if func is aten.index.Tensor:  # its tag is for masks; integer indices read no values
        return any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])
    if torch.Tag.data_dependent_output in func.tags:
        return any(_constant_value(x) is None for x in pytree.tensors(args))
    return torch.Tag.dynamic_output_shape in func.tags


def _constant_value(tensor: Tensor) -> Tensor | None:
    """The values of a tensor that the function makes from a number, as `torch.tensor(2.0)`; or None."""
    return getattr(torch_internals.unwrap(tensor), "constant", None)


def value_read_error(what: str, how: str, where: str) -> Exception:
    return UnsupportedError(
        f"{what}: expected a function whose graph is the same for all values of its tensors, got one "
        f"that reads them ({how}{where}): the value that if, float(), .item(), a mask as an index or "
        "NumPy reads would become a constant. Pass what is known before the call as a Python number or "
        "bool, of which each value has a graph; use torch.where, torch.index_select and numbers in "
        "tensors for the rest; or move this part out of the function."
    )


def user_line(trace: TracebackType | None = None) -> str:
    """For a message: the user's innermost file and line, in a traceback or the current stack."""
    at = source_location.user_line(trace)
    return f" in {at.file}:{at.line}" if at else ""


class Output(NamedTuple):
    """The result of a function without its tensors.

    leaves: The leaves; a TensorSlot in the place of a tensor.
    structure: From `pytree.flatten`.
    differentiable: For each tensor, whether it requires grad.
    """

    leaves: list[Any]
    structure: Any
    differentiable: list[bool]

    @property
    def inputs_named(self) -> list["InputRef"]:
        return [x for x in self.leaves if type(x) is InputRef]


class Traced(NamedTuple):
    """The result of a trace.

    graph: A function of the tensors among the arguments, followed by the lifted tensors.
    lifted: The tensors that the function reaches besides its arguments.
    modules: The modules that ran.
    output: The result of the function, without its tensors.
    """

    graph: fx.GraphModule
    lifted: list[Tensor]
    modules: list[nn.Module]
    output: Output


class InputRef:
    """Stands in an output for an input.

    where: For an argument, the index among the arguments that require grad. For another tensor that the
        function reaches, the tensor; ``trace`` replaces it by its index among the lifted.
    is_argument: True for an argument.
    """

    def __init__(self, where: Tensor | int, is_argument: bool) -> None:
        self.where, self.is_argument = where, is_argument


def trace(name: str, function: Callable[..., Any], tensors: list[Tensor], dynamic: bool) -> Traced:
    """The graph of a function at tensors of these shapes.

    Raises UnsupportedError, with the user's line, for code that a graph cannot contain.
    """
    modules: list[nn.Module] = []
    found, output = list[Tensor](), Output([], None, [])

    def run(*given: Tensor) -> list[Tensor]:
        nonlocal found, output
        with OperationChecks(name, given):
            leaves, structure = pytree.flatten(function(*given))
        if any(x.grad is not None for x in given if x.is_leaf):  # set by `torch.autograd.backward`
            raise backward_call_error(name, "")
        found = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        count = iter(range(len(found)))
        leaves = [TensorSlot(next(count)) if isinstance(x, Tensor) else x for x in leaves]
        output = Output(leaves, structure, [x.requires_grad for x in found])
        return found

    patched = private("torch._dynamo.config.patch")
    with (
        translate_tracing_errors(name),
        record_modules(name, modules),
        PythonChecks(name),
        warnings.catch_warnings(),
        patched(error_on_nested_fx_trace=False),  # modules compiled by torch.compile run eagerly
    ):
        # torch reads .grad of a captured tensor that is no leaf, and warns of it
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        # `record_modules` registers a global hook
        warnings.filterwarnings("ignore", ".*there are global hooks on modules")
        mode: Any = "symbolic" if dynamic else "fake"
        tracer = make_fx(run, tracing_mode=mode, _allow_non_fake_inputs=True)
        graph = tracer(*[as_leaf(x) for x in tensors])
    _check_outputs(name, output.leaves)
    recorded = [x for x in found if x.requires_grad]
    lifted = _lift_constants(name, graph, recorded)
    if recorded:
        _check_independent(name, lifted)
    for ref in output.inputs_named:
        if isinstance(ref.where, Tensor):
            ref.where = next(i for i, x in enumerate(lifted) if x is ref.where)
    return Traced(graph, lifted, modules, output)


def as_leaf(tensor: Tensor) -> Tensor:
    """A leaf with the values and the requires_grad of a tensor."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


@contextmanager
def record_modules(name: str, modules: list[nn.Module]) -> Iterator[None]:
    """Collects the modules that this thread runs inside."""
    known: set[int] = set()

    def start(module: nn.Module, args: tuple[Any, ...]) -> None:
        if isinstance(module, DistributedDataParallel):
            raise UnsupportedError(
                f"{name}: expected a function that does not call DistributedDataParallel, which "
                "prepares its gradients at each forward, got one that calls it: the processes would "
                "not share their gradients. Compile the loss of the module inside it, call that loss "
                "in the forward of a module, and wrap this module in DistributedDataParallel."
            )
        if id(module) not in known:
            known.add(id(module))
            modules.append(module)

    with watching_modules(start):
        yield


@contextmanager
def without_tensor_hooks(tensors: list[Tensor]) -> Iterator[None]:
    """Inside, tensors have no hooks. They run when backward passes on the gradients instead."""
    with ExitStack() as stack:
        for tensor in tensors:
            hooks = tensor._backward_hooks
            if hooks:
                stack.callback(hooks.update, dict(hooks))
                hooks.clear()
        yield


def _check_outputs(name: str, leaves: list[Any]) -> None:
    """Refuses outputs that are symbolic numbers, and objects that hide tensors."""
    for leaf in leaves:
        hidden = [x for x in getattr(leaf, "__dict__", {}).values() if isinstance(x, Tensor)]
        if isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool):
            raise UnsupportedError(
                f"{name}: expected outputs that do not depend on sizes, got the number {leaf} with "
                "dynamic=True. Take it from the shape of an output, or do not pass dynamic=True."
            )
        if hidden and not isinstance(leaf, InputRef | TensorSlot):
            raise UnsupportedError(
                f"{name}: expected outputs of tensors in dicts, lists and tuples, got "
                f"{validation.describe(leaf)}, which holds tensors that the graph would not update. "
                "Return its tensors, or register its class with torch.utils._pytree."
            )


def _lift_constants(name: str, graph: fx.GraphModule, recorded: list[Tensor]) -> list[Tensor]:
    """Makes tensors that a graph holds as attributes its last inputs; returns these tensors.

    Leaves on which only the derivative of an output depends become inputs, too.
    """
    lifted: dict[int, Tensor] = {}
    inputs: dict[int, fx.Node] = {}
    before = list(graph.graph.nodes)
    last = [node for node in before if node.op == "placeholder"]

    def add(value: Tensor, meta: dict[str, Any]) -> None:
        check_dense(name, value, got="a function that reaches ")
        lifted[id(value)] = value
        insert = graph.graph.inserting_after if last else graph.graph.inserting_before
        with insert(last[-1] if last else None):
            inputs[id(value)] = graph.graph.placeholder(f"lifted_{len(lifted)}")
        inputs[id(value)].meta.update(meta)
        last.append(inputs[id(value)])

    for node in before:
        if node.op != "get_attr":
            continue
        value = attrgetter(str(node.target))(graph)
        if not isinstance(value, Tensor):
            raise UnsupportedError(
                f"{name}: expected a graph of tensors, got one that holds a {type(value).__name__}. "
                "Create it before the call, and pass its result as an argument."
            )
        if id(value) not in lifted:
            add(value, node.meta)
        node.replace_all_uses_with(inputs[id(value)])
        graph.graph.erase_node(node)
    for leaf in leaf_tensors(recorded, since=[x for x in lifted.values() if not x.is_leaf]):
        if type(leaf) in (Tensor, nn.Parameter) and id(leaf) not in lifted:
            add(leaf, {})
    for attribute in [attribute for attribute in vars(graph) if "_constant" in attribute]:
        delattr(graph, attribute)
    for registry in (graph._buffers, graph._parameters):  # they would keep the tensors alive
        registry.clear()
    return list(lifted.values())


def _check_independent(name: str, lifted: list[Tensor]) -> None:
    """Refuses lifted tensors that were computed from one another: gradients would count twice."""
    ids = {id(x) for x in lifted}
    ends = {x.grad_fn for x in lifted if x.grad_fn is not None}
    for x in lifted:
        if x.grad_fn is None:
            continue
        for node, _ in walk([x]):
            computed = node is not x.grad_fn and node in ends
            if computed or id(getattr(node, "variable", None)) in ids:
                raise UnsupportedError(
                    f"{name}: expected tensors in closures and attributes that were not computed from "
                    f"one another, got {validation.describe(x)} that was computed from another one "
                    f"({x.grad_fn}); its gradient would count twice. Pass it as an argument."
                )
