"""A function of tensors as one graph of torch's operations, with nothing of the moment traced in.

The function runs once, on fake tensors that have shapes and no values, so that nothing is computed,
changed or looked at: what would read a value, or change an input, is refused by name. A tensor that it
reaches otherwise than by its arguments (parameters, buffers, closures) becomes an input of the graph.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from hoglib import _arguments as arguments
from hoglib import _tree
from hoglib._warning import is_users

aten = torch.ops.aten


class Traced(NamedTuple):
    """A graph of tensors, and what it was traced from."""

    graph: fx.GraphModule  # of the tensors among the arguments, then of those lifted
    lifted: list[Tensor]  # what it reaches besides, at the time
    modules: list[nn.Module]  # that ran
    leaves: list[Any]  # of the output; a Place where a tensor stands
    structure: Any
    recorded: list[bool]  # which of the output's tensors have a graph in eager mode
    shape_env: Any  # of symbolic shapes


class Place(NamedTuple):
    """Stands for the i-th tensor of an output."""

    index: int


def trace(
    what: str, of_tensors: Callable[..., Any], tensors: list[Tensor], dynamic: bool
) -> Traced:
    """The graph of a function at tensors of these shapes. Raises NotSupported, saying where, for what
    a graph cannot hold."""
    out: dict[str, Any] = {}
    modules: list[nn.Module] = []

    def run(*given: Tensor) -> list[Tensor]:
        leaves, out["structure"] = _tree.flatten(of_tensors(*given))
        found = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        count = iter(range(len(found)))
        out["leaves"] = [Place(next(count)) if isinstance(x, Tensor) else x for x in leaves]
        out["recorded"] = [x.requires_grad for x in found]
        return found

    with _running(modules), refusing(what):
        tracer = make_fx(
            run, tracing_mode="symbolic" if dynamic else "fake", _allow_non_fake_inputs=True
        )
        with _NoValues(what):
            graph = tracer(*[_alike(x) for x in tensors])
    _check(what, graph)
    lifted = _lift(what, graph)
    return Traced(
        graph, lifted, modules, out["leaves"], out["structure"], out["recorded"],
        getattr(graph, "shape_env", None),
    )  # fmt: skip


def _alike(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


@contextmanager
def _running(modules: list[nn.Module]) -> Iterator[None]:
    """Notes which modules run inside."""
    known: set[int] = set()

    def start(module: nn.Module, args: Any) -> None:
        if id(module) not in known:
            known.add(id(module))
            modules.append(module)

    handle = register_module_forward_pre_hook(start)
    try:
        yield
    finally:
        handle.remove()


class _NoValues(TorchFunctionMode):
    """Refuses what would read the values of tensors that are not arguments, which have some."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self._what = what

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READ and not torch._C._are_functorch_transforms_active():
            raise arguments.NotSupported(_values(self._what, f"Tensor.{func.__name__}", _line()))
        return func(*args, **(kwargs or {}))


_READ = {
    Tensor.numpy, Tensor.__array__, Tensor.tolist, Tensor.item, Tensor.data_ptr, Tensor.__float__,
    Tensor.__int__, Tensor.__bool__, Tensor.__index__, Tensor.__complex__,
}  # fmt: skip
_GUARDS = (
    "DataDependentOutputException", "DynamicOutputShapeException", "GuardOnDataDependentSymNode",
    "UnsupportedOperatorException",
)  # fmt: skip
_WORDS = ("trying to get value out of a tracing tensor", ".numpy() is not supported", "data_ptr")


def _values(what: str, how: str, where: str) -> str:
    return (
        f"{what}: expected a function whose graph is the same for all values of its tensors, got one that "
        f"reads them ({how}{where}): if, float(), .item() and NumPy would be traced in. Use torch.where, "
        "keep numbers as tensors, or take that part out of what is compiled."
    )


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """What cannot be traced, in words that say where it stands."""
    try:
        yield
    except arguments.Explained:
        raise
    except Exception as error:
        if type(error).__name__ in _GUARDS or any(word in str(error) for word in _WORDS):
            how = str(getattr(error, "func", "")) or "a number or a truth value of a tensor"
            raise arguments.NotSupported(_values(what, how, _line(error.__traceback__))) from error
        raise


def _line(trace: TracebackType | None = None) -> str:
    """File and line of the user's, innermost, of what runs or of a traceback."""
    found = ""
    if trace is None:
        frame: Any = sys._getframe(1)
        while frame is not None and not found:
            if is_users(frame.f_code.co_filename):
                found = f" in {frame.f_code.co_filename}:{frame.f_lineno}"
            frame = frame.f_back
        return found
    at: TracebackType | None = trace
    while at is not None:
        if is_users(at.tb_frame.f_code.co_filename):
            found = f" in {at.tb_frame.f_code.co_filename}:{at.tb_lineno}"
        at = at.tb_next
    return found


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


def _check(what: str, graph: fx.GraphModule) -> None:
    """No operation whose result depends on values in more than values, none that changes an input."""
    roots: dict[fx.Node, set[fx.Node]] = {}
    for node in graph.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            roots[node] = {node}
            continue
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        tags = node.target.tags
        if torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags:
            raise arguments.NotSupported(_values(what, str(node.target), _where(node)))
        roots[node] = _aliased(node, roots)
        for changed in _changed(node):
            if roots.get(changed):
                raise arguments.NotSupported(
                    f"{what}: expected a function that leaves its arguments, parameters and buffers as "
                    f"they are, got one that changes one in place ({node.target}{_where(node)}). Work on a "
                    "clone(); a model in train mode with running statistics runs without them in "
                    "`hoglib.functional_loss(model, criterion)`, and in eval mode as it is."
                )


def _where(node: fx.Node) -> str:
    for line in reversed(str(node.meta.get("stack_trace") or "").splitlines()):
        parts = line.strip().split('"')
        if line.strip().startswith("File") and len(parts) > 2 and is_users(parts[1]):
            return f" in {parts[1]}:{parts[2].split('line ')[-1].split(',')[0]}"
    return ""


def _aliased(node: fx.Node, roots: dict[fx.Node, set[fx.Node]]) -> set[fx.Node]:
    """The inputs that the output of an operation shares memory with."""
    found: set[fx.Node] = set()
    for argument, value in _named(node):
        if argument.alias_info is not None and isinstance(value, fx.Node):
            found |= roots.get(value, set())
    return found


def _changed(node: fx.Node) -> list[fx.Node]:
    """What an operation writes to."""
    found = [
        value
        for argument, value in _named(node)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    if node.target in _NORMS:  # which do and do not say so
        given = {argument.name: value for argument, value in _named(node)}
        if given.get("training", given.get("train")):
            found += [given.get("running_mean"), given.get("running_var")]
    return [value for value in found if isinstance(value, fx.Node)]


_NORMS = (aten.native_batch_norm.default, aten.cudnn_batch_norm.default)


def _named(node: fx.Node) -> Iterator[tuple[Any, Any]]:
    schema = node.target._schema  # type: ignore[union-attr]
    yield from zip(schema.arguments, node.args, strict=False)
    by_name = {argument.name: argument for argument in schema.arguments}
    for name, value in node.kwargs.items():
        yield by_name[name], value


def _lift(what: str, graph: fx.GraphModule) -> list[Tensor]:
    """Makes inputs, behind those that are there, of the tensors that a graph holds."""
    lifted: dict[int, Tensor] = {}
    inputs: dict[int, fx.Node] = {}
    nodes = list(graph.graph.nodes)
    last = [node for node in nodes if node.op == "placeholder"]
    for node in nodes:
        if node.op != "get_attr":
            continue
        value = _attribute(graph, str(node.target))
        if isinstance(value, torch.Generator) or not isinstance(value, Tensor):
            raise arguments.NotSupported(
                f"{what}: expected a function that is given its random numbers, got one that draws them "
                f"from a {type(value).__name__}. Draw them outside, and pass them as an argument."
            )
        if id(value) not in lifted:
            lifted[id(value)] = value
            with _after(graph.graph, last[-1] if last else None):
                inputs[id(value)] = graph.graph.placeholder(f"lifted_{len(lifted)}")
            inputs[id(value)].meta.update(node.meta)
            last.append(inputs[id(value)])
        node.replace_all_uses_with(inputs[id(value)])
        graph.graph.erase_node(node)
    for name in {**graph._parameters, **graph._buffers, **vars(graph)}:
        if "_constant" in name:  # else the compiler makes inputs of its own of them
            delattr(graph, name)
    return list(lifted.values())


@contextmanager
def _after(graph: fx.Graph, node: fx.Node | None) -> Iterator[None]:
    with graph.inserting_before() if node is None else graph.inserting_after(node):
        yield


def _attribute(graph: fx.GraphModule, path: str) -> Any:
    value: Any = graph
    for name in path.split("."):
        value = getattr(value, name)
    return value
