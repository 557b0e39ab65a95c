"""Runs a function, differentiates it with a graph, and collects both graphs with the faults in them."""

import inspect
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd import Function

from hoglib._core import pytree, torch_internals, validation
from hoglib._core.autograd import grad_enabled
from hoglib._core.detachment import DetachedGradient, DetachmentWatch
from hoglib._core.gradient_graph import FunctionNode, all_inputs_require_grad, saved_tensors, walk
from hoglib._core.module_names import ModuleNames, watching_modules
from hoglib._core.pytree import is_float
from hoglib._core.source_location import format_error
from hoglib._core.state import preserve_random_state
from hoglib._core.swap import keep_swapped, swap_parameters
from hoglib.drawing.dot import MADE_IN, GraphData, Node
from hoglib.functional import FunctionalLoss
from hoglib.verification.call import Call, is_part
from hoglib.verification.subject import as_function, parameters

DERIVATIVES = {
    2: "the gradient with a graph",
    3: "the second derivative",
    4: "the third derivative",
}
NAN = "gives NaN"


def collect(fn: Any, inputs: tuple[Any, ...], order: int, saved: bool) -> GraphData:
    """The graph of fn and of its derivatives up to `order` - 1.

    Differentiates fn order - 1 times with a graph, and once more to see whether the last graph can be
    differentiated.
    """
    applied: dict[type[Function], list[Tensor]] = {}

    def record(function: type[Function], args: tuple[Any, ...]) -> None:
        applied.setdefault(function, []).extend(x for x in pytree.leaves(args) if is_float(x))

    with (
        grad_enabled(),
        keep_swapped(),
        preserve_random_state(),
        torch_internals.record_backward_origins(),
        torch_internals.watching_functions(record) as applying,
    ):
        call, modules = Call(fn, inputs, None), _ModuleCalls(fn)
        validation.something_to_differentiate_by(call.names, call.point)
        with modules.recording():
            variables, copies, result = call.from_leaves()
        data = GraphData(repr(fn) if isinstance(fn, FunctionalLoss) else call.name, order)
        own_names = _input_names(fn, len(inputs))
        names = [_rename(name, own_names) for name in call.names]
        collector = _Collector(data, modules, applied, variables, names)
        collector.add_inputs(copies, call.num_inputs)
        values = collector.add_outputs([y for y in result if is_float(y)])
        for k in range(2, order + 2 if order > 1 else 2):
            values = collector.differentiate(values, k, _BackwardPass(applying), drawn=k <= order)
        collector.add_saved(saved)
        return data


@final
class _Collector:
    """Adds autograd nodes and tensors to a picture, each once, and the faults that show in them."""

    def __init__(
        self, data: GraphData, modules: "_ModuleCalls", applied: dict[type[Function], list[Tensor]],
        variables: list[Tensor], names: list[str],
    ) -> None:  # fmt: skip
        self._data, self._modules, self._applied = data, modules, applied
        self._variables, self._names = variables, names
        self._parameters = modules.parameters()
        self._keys: dict[Any, str] = {}  # of what is drawn: by autograd node, or id of a leaf
        self._alive: list[Any] = []  # tensors whose ids or graphs are keys
        self._operations: list[Any] = []  # autograd nodes
        self._counts: dict[str, int] = {}
        self._leaks: dict[Any, tuple[str, bool]] = {}

    def add_inputs(self, copies: list[Tensor], count: int) -> None:
        """Add the variables, `count` inputs and then parameters; fn gets copies."""
        for j, (x, name) in enumerate(zip(self._variables, self._names, strict=True)):
            key = self._add_leaf(x, "input" if j < count else "parameter", name)
            self._keys[copies[j].grad_fn] = key

    def add_outputs(self, outputs: list[Tensor]) -> list[Tensor]:
        """The outputs that have a graph."""
        names = [f"output {i}" if len(outputs) > 1 else "output" for i in range(len(outputs))]
        values = self._add_graph(outputs, names, "output", 1)
        if not values:
            self._data.faults.append(
                f"{self._data.name}: no output has a graph. Is it a constant, detached, computed under "
                "no_grad, or computed outside of torch?"
            )
        return values

    def differentiate(
        self, values: list[Tensor], k: int, backward: "_BackwardPass", *, drawn: bool
    ) -> list[Tensor]:
        """The gradients of values, with their graph as the k-th part of the picture if drawn."""
        if not values:
            return []
        incoming = [torch.ones_like(y).requires_grad_() for y in values]
        grads = backward.run(values, self._variables, incoming, create_graph=drawn)
        self._alive += [incoming, grads]
        for grad_fn, did, text in backward.bad:
            if did == NAN and any(node.fault.startswith(NAN) for node in self._data.nodes.values()):
                continue  # it comes from a NaN of the derivative before
            name, fault = self._data.name, f"{did} in {DERIVATIVES[k]}{text}"
            if grad_fn in self._keys:
                node = self._node(grad_fn)
                node.fault, name = fault, node.name
            self._data.faults.append(f"{name} {fault}.")
        if not drawn or backward.raised:
            return []
        for u, name in zip(incoming, self._value_names, strict=True):
            self._add_leaf(u, "incoming", f"grad of {name}", k)
        for grad_fn, leaf, why in backward.detached:
            reason = why or "its gradient has no graph"
            name = self._add_fault(grad_fn, "detached", "DETACHED", k, reason, leaf)
            self._data.faults.append(
                f"{name} returns a gradient of shape {tuple(leaf.shape)} without a graph"
                f"{f' ({why})' if why else ''}: {DERIVATIVES[k + 1]} through it is silently zero."
            )
        self._leaks |= backward.leaks
        title = "grad of {}" if k == 2 else "second derivative by {}"
        pairs = [(g, n) for g, n in zip(grads, self._names, strict=True) if g is not None]
        names = [title.format(name) for _, name in pairs]
        return self._add_graph([g for g, _ in pairs], names, "gradient", k)

    def add_saved(self, wanted: bool) -> None:
        """Add what custom Functions save for backward, if wanted, and the faults in it."""
        for grad_fn in self._operations:
            function = torch_internals.custom_function(grad_fn)
            if function is None:
                continue
            key, node = self._keys[grad_fn], self._node(grad_fn)
            by_user, made = FunctionNode(grad_fn, function).by_user, []
            for name, x in saved_tensors(grad_fn, unpack=False):
                label, start = name.removeprefix("ctx."), self._producer(x)
                lost = by_user and self._made_in_forward(x, grad_fn, function)
                if lost:
                    made.append(name)
                    boxed = Node(
                        "intermediate", name, _shape_text([x.shape]), node.order, node.inside
                    )
                    boxed.fault = "no graph: made in forward"
                    self._data.connect(self._data.add(boxed), key, "saved")
                elif wanted and not x.requires_grad:
                    boxed = Node("constant", label, _shape_text([x.shape]), node.order, node.inside)
                    self._data.connect(self._data.add(boxed), key, "saved")
                elif wanted and start not in (None, key):
                    self._data.connect(str(start), key, "saved", label)
            if by_user:
                self._report_leaks(grad_fn, made)

    def _node(self, grad_fn: Any) -> Node:
        return self._data.nodes[self._keys[grad_fn]]

    def _add_graph(
        self, values: list[Tensor], names: list[str], kind: str, order: int
    ) -> list[Tensor]:
        """Add values, and the autograd nodes that they were computed by; those that have a graph."""
        new = [(node, parents) for node, parents in walk(values) if node not in self._keys]
        for grad_fn, _ in reversed(new):
            if hasattr(grad_fn, "variable"):
                known = self._parameters.get(id(grad_fn.variable))
                leaf = ("parameter", known) if known else ("leaf", "a tensor not in inputs")
                self._keys[grad_fn] = self._add_leaf(grad_fn.variable, *leaf, order)
            else:
                self._add_operation(grad_fn, order)
        for grad_fn, parents in reversed(new):
            for parent, _ in parents:
                if parent is not None:
                    self._data.connect(self._keys[parent], self._keys[grad_fn])
        for y, name in zip(values, names, strict=True):
            node = Node(kind, name, _shape_text([y.shape]), order)
            key, start = self._data.add(node), self._producer(y)
            if start is not None:
                self._data.connect(start, key)
            elif kind == "output":
                node.fault = "no graph"
        pairs = [(y, name) for y, name in zip(values, names, strict=True) if y.requires_grad]
        self._value_names = [name for _, name in pairs]
        return [y for y, _ in pairs]

    def _add_operation(self, grad_fn: Any, order: int) -> None:
        kind, name = "operation", _operation_name(grad_fn)
        function = torch_internals.custom_function(grad_fn)
        if function is not None:
            name = function.__qualname__.rpartition(".")[2]
            if not is_part(function):
                self._counts[name] = count = self._counts.get(name, 0) + 1
                kind, name = "function", name if count == 1 else f"{name} #{count}"
        shapes = _shape_text(torch_internals.output_shapes(grad_fn))
        node = Node(kind, name, shapes, order, self._boxes(grad_fn))
        self._keys[grad_fn] = self._data.add(node)
        self._operations.append(grad_fn)

    def _boxes(self, grad_fn: Any) -> tuple[str, ...]:
        """The module calls that contain it, and the custom Function whose backward made it."""
        made_in: tuple[str, ...] = ()
        while (maker := torch_internals.made_by(grad_fn)) is not None:
            if not made_in and maker in self._keys and self._node(maker).kind == "function":
                made_in = (f"{MADE_IN}{self._node(maker).name}.backward",)
            grad_fn = maker
        return (*self._modules.path(grad_fn), *made_in)

    def _add_leaf(self, x: Tensor, kind: str, name: str, order: int = 1) -> str:
        """Add a tensor that a graph starts from; its key."""
        if id(x) not in self._keys:
            self._alive.append(x)
            self._keys[id(x)] = self._data.add(Node(kind, name, _shape_text([x.shape]), order))
        return self._keys[id(x)]

    def _producer(self, x: Tensor) -> str | None:
        return self._keys.get(id(x) if x.grad_fn is None else x.grad_fn)

    def _made_in_forward(self, x: Tensor, grad_fn: Any, function: type[Function]) -> bool:
        """Whether a Function saves a tensor that is neither input nor output: a constant to the second
        derivative."""
        # Where Functions were applied in other threads their inputs are unknown, unless all of them
        # require grad.
        certain = function in self._applied or all_inputs_require_grad(grad_fn)
        given = map(_memory, self._applied.get(function, ()))
        return certain and not x.requires_grad and _memory(x) not in given

    def _report_leaks(self, grad_fn: Any, made: list[str]) -> None:
        """A backward whose gradient has a graph, but not all of it."""
        why, whole = self._leaks.get(grad_fn, ("", False))
        effect = "is silently zero" if whole else "may be incomplete"
        effect = f"the second derivative through it {effect}"
        if why:
            kind, what = ("detached", "DETACHED") if whole else ("partial", "partly detached")
            name = self._add_fault(grad_fn, kind, what, self._node(grad_fn).order + 1, why)
            self._data.faults.append(f"{name} leaves the graph ({why}): {effect}.")
        if made:
            self._data.faults.append(
                f"{self._node(grad_fn).name} saves {' and '.join(made)}, made in forward, which is "
                f"neither an input nor an output and has no graph: {effect}."
            )

    def _add_fault(
        self, grad_fn: Any, kind: str, what: str, order: int, why: str, leaf: Tensor | None = None
    ) -> str:
        """Add what a backward detaches; the name of the backward."""
        maker = self._node(grad_fn)
        name = f"{maker.name}.backward"
        shape = "" if leaf is None else _shape_text([leaf.shape])
        boxes = (*maker.inside, MADE_IN + name)
        key = self._data.add(Node(kind, f"{what} in {name}", shape, order, boxes, why))
        self._data.connect(self._keys[grad_fn], key, "detached")
        if leaf is not None:
            self._alive.append(leaf)
            self._keys[id(leaf)] = key
        return name


@final
class _BackwardPass:
    """One backward pass, watched by hooks.

    A gradient without a graph is replaced by a leaf where it leaves its Function, so that the graph
    goes on behind it. The incoming gradients must require grad: then every gradient does, unless it is
    detached.

    detached: (autograd node, leaf, why). leaks: by autograd node, why a backward leaves the graph, and
    whether the graph of its gradient starts from the incoming gradient alone. bad: (autograd node,
    "raises" or NAN, the error). raised: whether the pass raised.
    """

    def __init__(self, applying: torch_internals.Applying) -> None:
        self.detached: list[tuple[Any, Tensor, str]] = []
        self.leaks: dict[Any, tuple[str, bool]] = {}
        self.bad: list[tuple[Any, str, str]] = []
        self.raised = False
        self._applying = applying
        self._running: list[tuple[Any, tuple[Any, ...], DetachmentWatch | None]] = []

    def run(
        self, values: Sequence[Tensor], inputs: Sequence[Tensor], incoming: Sequence[Tensor],
        *, create_graph: bool,
    ) -> list[Tensor | None]:  # fmt: skip
        """The gradients of values by inputs; all None if the pass raised."""
        handles = []
        for grad_fn, _ in walk(values):
            if hasattr(grad_fn, "variable"):
                continue
            function = torch_internals.custom_function(grad_fn) if create_graph else None
            watched = FunctionNode(grad_fn, function).by_user
            handles.append(grad_fn.register_prehook(partial(self._enter, grad_fn, watched)))
            handles.append(grad_fn.register_hook(partial(self._leave, grad_fn, function)))
        try:
            # in this thread, where the Functions that backward applies are seen
            with torch.autograd.set_multithreading_enabled(False):
                return list(
                    torch.autograd.grad(
                        list(values), list(inputs), list(incoming), create_graph=create_graph,
                        retain_graph=True, allow_unused=True,
                    )
                )  # fmt: skip
        except Exception as error:
            self.raised = True
            grad_fn = self._running[-1][0] if self._running else None
            self.bad.append((grad_fn, "raises", f": {format_error(error)}"))
            return [None] * len(inputs)
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, grad_fn: Any, watched: bool, grads: tuple[Any, ...]) -> None:
        watch = None
        if watched:
            watch = DetachmentWatch()
            watch.applying = self._applying
            watch.__enter__()  # torch ends it with the autograd node, should that raise
        self._running.append((grad_fn, grads, watch))

    def _leave(
        self, grad_fn: Any, function: type[Function] | None, returned: tuple[Any, ...], _: Any
    ) -> tuple[Any, ...] | None:
        _, incoming, watch = self._running.pop()
        if watch is not None:
            watch.__exit__(None, None, None)
        if not self.bad and _has_nan(returned):
            self.bad.append((grad_fn, NAN, ""))
        if function is None or is_part(function):
            return None
        once = torch_internals.is_once_differentiable(function)
        why = "@once_differentiable" if once else _listed(watch.detached) if watch else ""
        lost = [is_float(g) and (once or (not g.requires_grad and bool(g.any()))) for g in returned]
        if any(lost):
            leaves = [
                g.detach().clone().requires_grad_() if is_lost else g
                for g, is_lost in zip(returned, lost, strict=True)
            ]
            self.detached += [
                (grad_fn, leaves[i], why) for i, is_lost in enumerate(lost) if is_lost
            ]
            return tuple(leaves)
        if watch is not None:
            grads = [g for g in returned if is_float(g) and g.requires_grad]
            whole = bool(grads) and _depends_only_on(incoming, grads, grad_fn)
            self.leaks[grad_fn] = why, whole
        return None


def _has_nan(tensors: Sequence[Any]) -> bool:
    dense = (x for x in tensors if is_float(x) and x.layout is torch.strided)
    return any(bool(x.detach().isnan().any()) for x in dense)


def _listed(detached: Sequence[DetachedGradient]) -> str:
    """How and where gradients are detached; each line of code once."""
    by_line: dict[Any, dict[str, None]] = {}
    for one in detached:
        how = f"{one.how}, then {one.then}" if one.then else one.how
        by_line.setdefault(f" at {one.place}" if one.place else "", {})[how] = None
    return "; ".join(" and ".join(hows) + line for line, hows in by_line.items())


def _depends_only_on(incoming: Sequence[Any], grads: Sequence[Tensor], grad_fn: Any) -> bool:
    """Whether the gradients that a backward returned were computed from the incoming ones alone."""
    ids = {id(u) for u in incoming}
    since = [u for u in incoming if isinstance(u, Tensor)]
    return not any(
        id(found.variable) not in ids
        if hasattr(found, "variable")
        else torch_internals.made_by(found) is not grad_fn
        for found, _ in walk(grads, since)
    )


def _operation_name(grad_fn: Any) -> str:
    """torch's name of an operation; for one without a derivative, whose backward it is."""
    name = str(grad_fn.name()).rpartition("::")[2]
    maker = torch_internals.made_by(grad_fn)
    if name == "NotImplemented" and maker is not None:
        return f"{_operation_name(maker)}Backward"
    return name.rstrip("0123456789").removesuffix("Backward") or name


def _shape_text(shapes: Sequence[Sequence[int]]) -> str:
    return ", ".join(str(tuple(shape)) for shape in shapes[:3]) + (", ..." if shapes[3:] else "")


def _memory(x: Tensor) -> tuple[int, tuple[int, ...]]:
    """Equal for two tensors in the same memory, while both are alive."""
    try:
        return x.data_ptr() or id(x), tuple(x.shape)
    except RuntimeError:  # sparse, or without a storage
        return id(x), tuple(x.shape)


def _input_names(fn: Any, count: int) -> dict[int, str]:
    """The user's names of the inputs, by index."""
    function = as_function(fn)
    if function is not None:
        return dict(enumerate(name.strip("`") for name in parameters(function, count)))
    try:
        given = inspect.signature(
            fn.forward if isinstance(fn, nn.Module) else fn
        ).parameters.values()
    except (TypeError, ValueError):
        return {}
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return dict(enumerate(p.name for p in given if p.kind in positional))


def _rename(name: str, names: dict[int, str]) -> str:
    """`x` for inputs[0], `params.weight` for an entry of inputs[0]."""
    name = name.removeprefix("the parameter ")
    return re.sub(r"^inputs\[(\d+)\]", lambda found: names.get(int(found[1]), found[0]), name)


@final
class _ModuleCalls:
    """Every call of a module inside `recording()`, as the span of the autograd nodes that it made.

    A thread numbers its autograd nodes in order, so that those of a call are the ones from its begin to
    its end, and calls nest. Modules have the names that they have in the modules that fn is, calls or
    closes over.
    """

    def __init__(self, fn: Any) -> None:
        self._names = ModuleNames(fn, always=True)
        self._open: list[tuple[nn.Module, int, str]] = []
        self._spans: list[tuple[int, int, str]] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Inside, calls are recorded. Models get copies of their buffers until the end of
        `keep_swapped`, so that their running statistics do not change."""
        for root in self._names.roots:
            with swap_parameters(root, {}):
                pass
        with watching_modules(self._begin, self._end):
            yield
        self._spans.sort(key=lambda span: (span[0], -span[1]))

    def _begin(self, module: nn.Module, args: Any) -> None:
        if self._names.add(module):
            with swap_parameters(module, {}):
                pass
        self._open.append((module, torch_internals.sequence_number(), self._label(module)))

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        while self._open:  # calls that raised have no end
            begun, start, label = self._open.pop()
            if begun is module:
                self._spans.append((start, torch_internals.sequence_number(), label))
                return

    def path(self, grad_fn: Any) -> tuple[str, ...]:
        """The module calls that an autograd node was made in, outermost first."""
        number = torch_internals.sequence_number(grad_fn)
        inside = [label for start, end, label in self._spans if start <= number < end]
        return tuple(label for label in inside if label)

    def parameters(self) -> dict[int, str]:
        """Names of the parameters of all modules, by id."""
        roots = reversed([*zip(self._names.prefixes, self._names.roots, strict=True)])
        named = ((prefix, *pair) for prefix, root in roots for pair in root.named_parameters())
        return {id(x): f"{prefix}.{name}" if prefix else name for prefix, name, x in named}

    def _label(self, module: nn.Module) -> str:
        """The label of its box; empty for the model itself, which needs no box."""
        name, kind = self._names.of(module), type(module).__name__
        return f"{name} ({kind})" if name not in ("", kind) else name
