"""A function of tensors as one graph of torch's operations, with nothing of the moment traced in.

The function runs once, on fake tensors that have shapes and no values, so that nothing is computed,
changed or looked at: what would read a value, or change an input, is refused by name. A tensor that it
reaches otherwise than by its arguments (parameters, buffers, closures) becomes an input of the graph.
"""

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

from hoglib import _arguments as arguments
from hoglib import _tree
from hoglib.capture._lifting import check_apart, lift
from hoglib.capture._refusals import OfOperations, OfPython, calls_backward, explaining


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
    """The graph of a function at tensors of these shapes. Raises NotSupported, saying where, for what
    a graph cannot hold."""
    out: dict[str, Any] = {}
    modules: list[nn.Module] = []

    def run(*given: Tensor) -> list[Tensor]:
        with OfOperations(what, given):
            leaves, out["structure"] = _tree.flatten(of_tensors(*given))
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
            raise arguments.NotSupported(
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
            raise arguments.NotSupported(
                f"{what}: expected outputs that do not depend on sizes, got the number {leaf} with "
                "dynamic=True; take it from the shape of an output, or leave dynamic=True out."
            )
        if hidden and not isinstance(leaf, Of | Place):
            raise arguments.NotSupported(
                f"{what}: expected outputs of tensors in dicts, lists and tuples, got "
                f"{arguments.describe(leaf)}, which holds tensors that the graph would not renew; "
                "return its tensors, or register its class with torch.utils._pytree."
            )
