"""Tensors that a traced function reaches otherwise than by its arguments become inputs of its graph."""

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

from hoglib._core import pytree, validation
from hoglib._core.gradient_graph import nodes
from hoglib.capture.refusals import OfOperations, OfPython, calls_backward, explaining
from hoglib.errors import UnsupportedError


def lift(what: str, graph: fx.GraphModule, recorded: list[Tensor]) -> list[Tensor]:
    """Makes inputs, behind those that are there, of the tensors that a graph holds, and of those that
    its outputs have a derivative by though their values are not in it."""
    lifted: dict[int, Tensor] = {}
    inputs: dict[int, fx.Node] = {}
    before = list(graph.graph.nodes)
    last = [node for node in before if node.op == "placeholder"]

    def add(value: Tensor, meta: dict[str, Any]) -> None:
        if type(value) not in (Tensor, nn.Parameter) or value.layout is not torch.strided:
            raise UnsupportedError(
                f"{what}: expected dense tensors of torch's own class, got one that reaches "
                f"{validation.describe(value)} of class {type(value).__name__} and layout "
                f"{value.layout}; convert it, or do not compile."
            )
        lifted[id(value)] = value
        with _after(graph.graph, last[-1] if last else None):
            inputs[id(value)] = graph.graph.placeholder(f"lifted_{len(lifted)}")
        inputs[id(value)].meta.update(meta)
        last.append(inputs[id(value)])

    for node in before:
        if node.op != "get_attr":
            continue
        value = _attribute(graph, str(node.target))
        if not isinstance(value, Tensor):
            raise UnsupportedError(
                f"{what}: expected a graph of tensors, got one that holds a {type(value).__name__}; "
                "make it before the call, and pass what it gives as an argument."
            )
        if id(value) not in lifted:
            add(value, node.meta)
        node.replace_all_uses_with(inputs[id(value)])
        graph.graph.erase_node(node)
    for node in nodes(recorded, since=[x for x in lifted.values() if not x.is_leaf]):
        leaf = getattr(node, "variable", None)
        if leaf is not None and _has_values(leaf) and id(leaf) not in lifted:
            add(leaf, {})
    for name in [name for name in vars(graph) if "_constant" in name]:
        delattr(graph, name)
    for stores in (graph._buffers, graph._parameters):  # which would keep what they hold alive
        stores.clear()
    return list(lifted.values())


def _has_values(leaf: Tensor) -> bool:
    return type(leaf) in (Tensor, nn.Parameter)


@contextmanager
def _after(graph: fx.Graph, node: fx.Node | None) -> Iterator[None]:
    with graph.inserting_before() if node is None else graph.inserting_after(node):
        yield


def _attribute(graph: fx.GraphModule, path: str) -> Any:
    value: Any = graph
    for name in path.split("."):
        value = getattr(value, name)
    return value


def check_apart(what: str, lifted: list[Tensor]) -> None:
    """No tensor that is reached was computed from another one: their gradients would count twice."""
    ours = {id(x) for x in lifted}
    ends = {x.grad_fn for x in lifted if x.grad_fn is not None}
    for x in lifted:
        if x.grad_fn is None:
            continue
        for node in nodes([x]):
            met = {parent for parent, _ in node.next_functions}
            if id(getattr(node, "variable", None)) in ours or met & ends:
                raise UnsupportedError(
                    f"{what}: expected to reach tensors that were computed from no other one that it "
                    f"reaches, got {validation.describe(x)} that was ({x.grad_fn}); its gradient would "
                    "count twice. Pass it as an argument."
                )


# === A function of tensors as one graph of torch's operations, with nothing of the moment traced
# in.
#
# The function runs once, on fake tensors that have shapes and no values, so that nothing is
# computed,
# changed or looked at: what would read a value, or change an input, is refused by name. A tensor
# that it
# reaches otherwise than by its arguments (parameters, buffers, closures) becomes an input of the
# graph.


class Traced(NamedTuple):
    """A graph of tensors, and what it was traced from."""

    graph: fx.GraphModule  # of the tensors among the arguments, then of those lifted
    lifted: list[Tensor]  # what it reaches besides, at the time
    modules: list[nn.Module]  # that ran
    leaves: list[Any]  # of the output; a Place where a tensor stands
    structure: Any
    recorded: list[bool]  # which of the output's tensors have a graph in eager mode


class Place:
    """Stands for the i-th tensor of an output."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


class Of:
    """Stands for a tensor that an output names: an argument, by its place among those that require
    grad, or one that the function reaches, by its place among those lifted once the trace is through.
    """

    def __init__(self, where: Tensor | int, is_argument: bool) -> None:
        self.where = where
        self.is_argument = is_argument


def trace(
    what: str, of_tensors: Callable[..., Any], tensors: list[Tensor], dynamic: bool
) -> Traced:
    """The graph of a function at tensors of these shapes.

    Raises UnsupportedError, saying where, for what a graph cannot hold.
    """
    out: dict[str, Any] = {}
    modules: list[nn.Module] = []

    def run(*given: Tensor) -> list[Tensor]:
        with OfOperations(what, given):
            leaves, out["structure"] = pytree.flatten(of_tensors(*given))
        if any(x.grad is not None for x in given if x.is_leaf):  # by `torch.autograd.backward`
            raise calls_backward(what, "")
        found = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        count = iter(range(len(found)))
        out["leaves"] = [Place(next(count)) if isinstance(x, Tensor) else x for x in leaves]
        out["recorded"] = [x for x in found if x.requires_grad]
        out["has"] = [x.requires_grad for x in found]
        return found

    with (
        explaining(what),
        running(what, modules),
        OfPython(what),
        warnings.catch_warnings(),
        # what torch.compile made runs as it was before
        torch._dynamo.config.patch(error_on_nested_fx_trace=False),
    ):
        # of a closure's tensor that was computed, which torch looks at and warns of at once
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        warnings.filterwarnings("ignore", ".*there are global hooks on modules")  # ours
        tracer = make_fx(
            run, tracing_mode="symbolic" if dynamic else "fake", _allow_non_fake_inputs=True
        )
        graph = tracer(*[alike(x) for x in tensors])
    _check_outputs(what, out["leaves"])
    lifted = lift(what, graph, out["recorded"])
    if out["recorded"]:
        check_apart(what, lifted)
    for leaf in out["leaves"]:
        if isinstance(leaf, Of) and isinstance(leaf.where, Tensor):
            leaf.where = next(i for i, x in enumerate(lifted) if x is leaf.where)
    return Traced(graph, lifted, modules, out["leaves"], out["structure"], out["has"])


def alike(tensor: Tensor) -> Tensor:
    """The same values, a leaf."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


@contextmanager
def running(what: str, modules: list[nn.Module]) -> Iterator[None]:
    """Notes which modules run inside, in this thread."""
    known: set[int] = set()
    here = threading.get_ident()

    def start(module: nn.Module, args: Any) -> None:
        if threading.get_ident() != here or id(module) in known:
            return
        if isinstance(module, DistributedDataParallel):
            raise UnsupportedError(
                f"{what}: expected a function without DistributedDataParallel in it, which gets its "
                "gradients ready at each forward, got one that calls it: the processes would not share "
                "their gradients. Compile the loss of the module that it wraps, and call that loss in "
                "a module's forward which DistributedDataParallel wraps."
            )
        known.add(id(module))
        modules.append(module)

    handle = register_module_forward_pre_hook(start)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def without_hooks(tensors: list[Tensor]) -> Iterator[None]:
    """Gradients by these tensors without their hooks, which are called where the gradients are handed
    on, with each backward."""
    with ExitStack() as stack:
        for tensor in tensors:
            hooks = tensor._backward_hooks
            if hooks:
                stack.callback(hooks.update, dict(hooks))
                hooks.clear()
        yield


def is_random(node: fx.Node) -> bool:
    """Whether an operation draws random numbers."""
    tags = getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags and not _drops_nothing(node)


def _drops_nothing(node: fx.Node) -> bool:
    """Attention and recurrent layers draw numbers for dropout only."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return False
    given = dict(zip((a.name for a in schema.arguments), node.args, strict=False)) | dict(
        node.kwargs
    )
    rates = [given[name] for name in ("dropout_p", "dropout") if name in given]
    if not rates and any(a.name in ("dropout_p", "dropout") for a in schema.arguments):
        return True
    return bool(rates) and all(rate in (0, 0.0) for rate in rates)


def _check_outputs(what: str, leaves: list[Any]) -> None:
    """What an output holds besides tensors is the same at each call, and hides no tensor."""
    for leaf in leaves:
        hidden = (
            [x for x in vars(leaf).values() if isinstance(x, Tensor)]
            if hasattr(leaf, "__dict__")
            else []
        )
        if isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool):
            raise UnsupportedError(
                f"{what}: expected outputs that do not depend on sizes, got the number {leaf} with "
                "dynamic=True; take it from the shape of an output, or leave dynamic=True out."
            )
        if hidden and not isinstance(leaf, Of | Place):
            raise UnsupportedError(
                f"{what}: expected outputs of tensors in dicts, lists and tuples, got "
                f"{validation.describe(leaf)}, which holds tensors that the graph would not renew; "
                "return its tensors, or register its class with torch.utils._pytree."
            )
