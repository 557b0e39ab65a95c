"""Traces a function of tensors to one graph of torch's operations.

The function runs once, on fake tensors that have shapes and no values, so nothing is computed or
changed. What would read a value or change an input is refused by name. Tensors that the function
reaches besides its arguments (parameters, buffers, closures) become inputs of the graph.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.parallel import DistributedDataParallel

from hoglib._core import pytree, validation
from hoglib._core.gradient_graph import leaf_tensors, walk
from hoglib._core.module_names import watching_modules
from hoglib.capture.refusals import (
    OperationChecks,
    PythonChecks,
    backward_call_error,
    translate_tracing_errors,
)
from hoglib.capture.signature import TensorSlot, check_dense
from hoglib.errors import UnsupportedError


class Traced(NamedTuple):
    """A graph of tensors, and what it was traced from."""

    graph: fx.GraphModule  # of the tensors among the arguments, then of those lifted
    lifted: list[Tensor]  # the tensors that the function reaches besides
    modules: list[nn.Module]  # that ran
    leaves: list[Any]  # of the output; a TensorSlot in the place of a tensor
    structure: Any
    differentiable: list[bool]  # which tensors of the output require grad


class InputRef:
    """Stands for an input that an output names.

    It is an argument, by its index among those that require grad; or a tensor that the function
    reaches, which ``trace`` replaces by its index among those lifted.
    """

    def __init__(self, where: Tensor | int, is_argument: bool) -> None:
        self.where = where
        self.is_argument = is_argument


def trace(name: str, function: Callable[..., Any], tensors: list[Tensor], dynamic: bool) -> Traced:
    """The graph of a function at tensors of these shapes.

    Raises UnsupportedError, with the user's line, for what a graph cannot contain.
    """
    out: dict[str, Any] = {}
    modules: list[nn.Module] = []

    def run(*given: Tensor) -> list[Tensor]:
        with OperationChecks(name, given):
            leaves, out["structure"] = pytree.flatten(function(*given))
        if any(x.grad is not None for x in given if x.is_leaf):  # by `torch.autograd.backward`
            raise backward_call_error(name, "")
        found = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        count = iter(range(len(found)))
        out["leaves"] = [TensorSlot(next(count)) if isinstance(x, Tensor) else x for x in leaves]
        out["recorded"] = [x for x in found if x.requires_grad]
        out["differentiable"] = [x.requires_grad for x in found]
        return found

    with (
        translate_tracing_errors(name),
        record_modules(name, modules),
        PythonChecks(name),
        warnings.catch_warnings(),
        torch._dynamo.config.patch(error_on_nested_fx_trace=False),  # compiled modules run eagerly
    ):
        # torch reads .grad of a tensor in a closure that is not a leaf, and warns of it.
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        # `record_modules` uses a global hook.
        warnings.filterwarnings("ignore", ".*there are global hooks on modules")
        tracer = make_fx(
            run, tracing_mode="symbolic" if dynamic else "fake", _allow_non_fake_inputs=True
        )
        graph = tracer(*[as_leaf(x) for x in tensors])
    _check_outputs(name, out["leaves"])
    lifted = _lift(name, graph, out["recorded"])
    if out["recorded"]:
        _check_independent(name, lifted)
    for leaf in out["leaves"]:
        if isinstance(leaf, InputRef) and isinstance(leaf.where, Tensor):
            leaf.where = next(i for i, x in enumerate(lifted) if x is leaf.where)
    return Traced(graph, lifted, modules, out["leaves"], out["structure"], out["differentiable"])


def as_leaf(tensor: Tensor) -> Tensor:
    """A leaf with the same values and requires_grad."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


@contextmanager
def record_modules(name: str, modules: list[nn.Module]) -> Iterator[None]:
    """Collects the modules that run inside, in this thread."""
    known: set[int] = set()

    def start(module: nn.Module, args: Any) -> None:
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
    """Removes the hooks of tensors inside. They run when backward hands on the gradients instead."""
    with ExitStack() as stack:
        for tensor in tensors:
            hooks = tensor._backward_hooks
            if hooks:
                stack.callback(hooks.update, dict(hooks))
                hooks.clear()
        yield


def _check_outputs(name: str, leaves: list[Any]) -> None:
    """Refuses outputs that depend on sizes, and objects that hide tensors."""
    for leaf in leaves:
        hidden = (
            [x for x in vars(leaf).values() if isinstance(x, Tensor)]
            if hasattr(leaf, "__dict__")
            else []
        )
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


def _lift(name: str, graph: fx.GraphModule, recorded: list[Tensor]) -> list[Tensor]:
    """Turns the tensors that a graph holds as attributes into inputs, behind those that it has.

    Leaves that the outputs depend on by their derivative only become inputs, too.
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
    for registry in (graph._buffers, graph._parameters):  # which would keep the tensors alive
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
