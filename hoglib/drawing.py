"""`hoglib.graph`: the graphs of a function and of its gradient, as text that Graphviz draws."""

import os
import shutil
import subprocess
import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd import Function

from hoglib._core.messages import validation
from hoglib._core.modules.state import preserve_random_state
from hoglib._core.modules.swap import restore_buffers
from hoglib._core.runtime.source_location import format_error
from hoglib._core.substrate.autograd import grad_enabled
from hoglib._core.substrate.detachment import DetachmentWatch
from hoglib._core.substrate.gradient_graph import FunctionNode, saved_tensors, walk
from hoglib._core.torch_api import function_watch, pytree, torch_internals
from hoglib._core.torch_api.pytree import is_float
from hoglib.errors import ArgumentValueError, DrawingError, MissingDependencyError
from hoglib.verification.maps import is_part, map_of, name_of

TEXTS = (".dot", ".gv")
INSTALL = (
    "install it: `apt install graphviz`, `brew install graphviz` or `conda install graphviz` (the pip "
    "package of that name does not contain it)"
)
TITLES = {1: "forward", 2: "gradient: made by backward", 3: "second derivative"}
DERIVATIVES = {2: "the gradient", 3: "the second derivative", 4: "the third derivative"}
# Colours of Okabe and Ito (Color Universal Design, 2008), distinct for the colour-blind; breaks also
# differ by shape.
NODES = {
    "input": 'style=filled, fillcolor="#CCE3F0", color="#0072B2"',
    "leaf": 'style="filled,dashed", fillcolor="#F2F2F2", color="#777777"',
    "operation": 'style="filled,rounded", fillcolor="#FFFFFF", color="#777777"',
    "function": 'style="filled,rounded,bold", fillcolor="#F5E4ED", color="#9F4E7D"',
    "output": 'style=filled, fillcolor="#CCECE3", color="#009E73"',
    "incoming": 'style=filled, fillcolor="#FCFAD9", color="#7A7200"',
    "gradient": 'style=filled, fillcolor="#CCECE3", color="#009E73", peripheries=2',
    "partial": 'style="filled,bold", fillcolor="#FAECCC", color="#E69F00", shape=hexagon',
    "detached": 'style="filled,bold", fillcolor="#F7DFCC", color="#D55E00", shape=octagon',
    "raises": 'style="filled,bold", fillcolor="#F7DFCC", color="#D55E00", shape=doubleoctagon',
}
LINE_LENGTH = 44  # characters, at which the text of a break is wrapped
FONT = 'fontname="Helvetica, Arial, sans-serif"'
BREAK = 'color="#D55E00", style=dashed, arrowhead=tee'


def graph(fn: Callable[..., Any] | type[Function], inputs: object, *, order: int = 2) -> "Graph":
    r"""Draw the graph that a second derivative goes through, and mark where it breaks.

        y = f(x)        the graph of f
        g = J(x)^T u    the graph of the gradient, which is differentiated again

    Custom Functions have their names, and a box around the operations of their backward. An octagon is
    a break: a backward that leaves the graph (``no_grad``, ``.detach()``, NumPy, a raw kernel, a tensor
    that forward made and saved, ``@once_differentiable``), so that the second derivative is zero; a
    double octagon is an operation without a further derivative. A hexagon is a backward that leaves the
    graph, but returns a gradient with a graph: the second derivative may be incomplete. No argument is
    changed.

    Args:
        fn: What to draw: a Function class or its ``apply``, an ``nn.Module``, a loss
            ``(params, batch) -> scalar``, or any function of tensors.
        inputs: The arguments of fn, a tuple, or its only argument. fn is differentiated by their
            floating-point tensors (if any requires grad, by those that do) and by the trainable
            parameters of a module.
        order: 1 for the graph of f, 2 to add the graph of the gradient, 3 to add the graph of the
            second derivative.
    Returns:
        A :class:`Graph`. Its attribute ``faults`` describes the breaks, ``str(graph)`` is the text of a
        DOT file, ``graph.save("picture.svg")`` draws it, and a notebook shows it.
    Raises:
        ArgumentTypeError: if fn is not a function.
        ArgumentValueError: if there is nothing to differentiate by; fn may raise any other error.
    Example:
        >>> picture = hog.graph(lambda x: x.sin().sum(), torch.ones(3))
        >>> picture.faults
        ()
        >>> print(picture)
        digraph "<lambda>" {
        ...
        }
    """
    validation.function("fn", fn)
    if validation.at_least("order", order, 1) > 3:
        raise ArgumentValueError(f"order: expected 1, 2 or 3, got {order}.")
    given = tuple(inputs) if isinstance(inputs, list | tuple) else (inputs,)
    applied: dict[type[Function], list[Tensor]] = {}

    def record(function: type[Function], args: tuple[Any, ...]) -> None:
        applied.setdefault(function, []).extend(x for x in pytree.leaves(args) if is_float(x))

    with (
        warnings.catch_warnings(),
        grad_enabled(),
        preserve_random_state(),
        restore_buffers(),
        torch_internals.record_backward_origins(),
        function_watch.watching_functions(record) as applying,
    ):
        warnings.simplefilter("ignore")  # the picture shows what torch would warn about
        f = map_of(fn, given)
        validation.something_to_differentiate_by(f.names, f.point)
        variables, copies, result = f.from_leaves()
        drawing = _Drawing(name_of(fn), applied, applying)
        names = [name.removeprefix("the parameter ") for name in f.names]
        drawing.add_inputs(variables, copies, names)
        outputs = [(f"output {i}", y) for i, y in enumerate(result) if is_float(y)]
        values = drawing.add_values(outputs, "output", 1)
        if not values:
            drawing.faults.append(
                f"{name_of(fn)}: no output has a graph. Is it a constant, detached, computed under "
                "no_grad, or computed outside of torch?"
            )
        for k in range(2, order + 2):  # once more, to see whether the last graph has a derivative
            grads = drawing.differentiate(values, variables, k, drawn=k <= order)
            titles = [f"{'grad of' if k == 2 else 'second derivative by'} {name}" for name in names]
            found = [(name, g) for name, g in zip(titles, grads, strict=False) if g is not None]
            values = drawing.add_values(found, "gradient", k)
    return Graph(name_of(fn), "\n".join(drawing.lines()) + "\n", tuple(drawing.faults))


@final
class Graph:
    """A picture of a graph, which :func:`hoglib.graph` returns.

    ``str(graph)`` is the text of a DOT file; equal graphs have equal texts. A notebook shows the
    picture, or the text if graphviz is not installed.

    Args:
        name: Name of the function.
        text: Text of the DOT file.
        faults: A sentence for each place where the second derivative is zero, incomplete or raises.
    Attributes:
        name: Name of the function.
        faults: A sentence for each place where the second derivative is zero, incomplete or raises.
    Example:
        >>> hog.graph(lambda x: x.detach() * 2, torch.ones(3))
        <Graph of <lambda>: 1 fault; draw it with .save('graph.svg')>
    """

    def __init__(self, name: str, text: str, faults: tuple[str, ...]) -> None:
        self.name, self.faults, self._text = name, faults, text

    def __str__(self) -> str:
        return self._text

    def __repr__(self) -> str:
        faults = f"{len(self.faults)} fault{'' if len(self.faults) == 1 else 's'}"
        return f"<Graph of {self.name}: {faults}; draw it with .save('graph.svg')>"

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the text, or draw the picture with graphviz.

        Args:
            path: A file .dot or .gv for the text, or .svg, .png or another format of graphviz for the
                picture.
        Returns:
            The path.
        Raises:
            MissingDependencyError: for a picture, if graphviz is not installed.
            DrawingError: if graphviz fails, or does not know the format.
        """
        path = Path(path)
        suffix = path.suffix.lower()
        path.write_bytes(self._text.encode() if suffix in TEXTS else self._draw(suffix[1:]))
        return path

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        """The picture for notebooks, or the text without graphviz."""
        try:
            return {"image/svg+xml": self._draw("svg").decode(), "text/plain": repr(self)}
        except (MissingDependencyError, DrawingError):
            return {"text/plain": self._text}

    def _draw(self, form: str) -> bytes:
        program = shutil.which("dot")
        if program is None:
            raise MissingDependencyError(
                f"a .{form} file: expected graphviz's program `dot`, found none; {INSTALL}, or save as "
                ".dot, which needs no program and which many viewers show."
            )
        command, text = [program, f"-T{form}"], self._text.encode()
        done = subprocess.run(command, input=text, capture_output=True)
        if done.returncode != 0:
            said = done.stderr.decode(errors="replace").strip()
            raise DrawingError(
                f"{program} -T{form} ended with status {done.returncode} and said: {said[-500:]}. Save "
                "as .dot, and run `dot` on that file by hand."
            )
        return done.stdout


@final
@dataclass
class _Node:
    """An operation, a tensor or a break."""

    kind: str  # a key of NODES
    name: str  # the first line of its label
    order: int  # the graph it belongs to: 1: f, 2: the gradient, 3: the second derivative
    text: str = ""  # further lines of the label: shapes, or the cause of a break
    box: str = ""  # the title of the box around it: the backward that made it


@final
class _Drawing:
    """The nodes and edges of a picture, in the order of their addition, and sentences about breaks."""

    def __init__(
        self, name: str, applied: dict[Any, list[Tensor]], applying: function_watch.Applying
    ) -> None:
        self.faults: list[str] = []
        # applied: Function -> the float tensors it was applied to; applying: the watch of Functions
        self._name, self._applied, self._applying = name, applied, applying
        self._nodes: dict[str, _Node] = {}  # DOT name -> node
        self._edges: dict[tuple[str, str], str] = {}  # (from, to) -> attributes, by DOT names
        self._keys: dict[Any, str] = {}  # autograd node, or id of a leaf -> DOT name
        self._alive: list[Any] = []  # keeps tensors alive, because ids and autograd nodes are keys

    def add_inputs(self, variables: list[Tensor], copies: list[Tensor], names: list[str]) -> None:
        """Add the variables; fn gets copies, so that the autograd node of a copy means its variable."""
        for x, copy, name in zip(variables, copies, names, strict=True):
            self._keys[copy.grad_fn] = self._add_leaf(x, "input", name, 1)

    def add_values(self, named: list[tuple[str, Tensor]], kind: str, order: int) -> list[Tensor]:
        """Add values and the autograd nodes that computed them; return the values with a graph."""
        values = [y for _, y in named]
        # two passes, because edges need the keys of nodes that come later in the walk
        new = [(node, parents) for node, parents in walk(values) if node not in self._keys]
        for grad_fn, _ in reversed(new):
            if hasattr(grad_fn, "variable"):
                name = "a tensor not in inputs"
                self._keys[grad_fn] = self._add_leaf(grad_fn.variable, "leaf", name, order)
            else:
                self._add_operation(grad_fn, order)
        for grad_fn, parents in reversed(new):
            for parent, _ in parents:
                if parent is not None:
                    self._edges[self._keys[parent], self._keys[grad_fn]] = ""
        for name, y in named:
            key = self._add(_Node(kind, name, order, _text([y.shape])))
            start = self._keys.get(id(y) if y.grad_fn is None else y.grad_fn)
            if start is not None:
                self._edges[start, key] = ""
        self._alive += values
        return [y for y in values if y.requires_grad]

    def differentiate(
        self, values: list[Tensor], variables: list[Tensor], k: int, *, drawn: bool
    ) -> Sequence[Tensor | None]:
        """The gradients of values by variables, for the k-th part of the picture.

        drawn: False: only find out whether a further derivative raises.
        """
        if not values:
            return []
        incoming = [torch.ones_like(y).requires_grad_() for y in values]
        running: list[Any] = []
        handles: list[Any] = []
        for grad_fn, _ in walk(values):
            if hasattr(grad_fn, "variable"):
                continue
            handles.append(grad_fn.register_prehook(lambda _, node=grad_fn: running.append(node)))
            function = torch_internals.custom_function(grad_fn)
            if drawn and FunctionNode(grad_fn, function).by_user:
                handles += self._watch(grad_fn, function, k)
        for u in incoming if drawn else ():
            self._add_leaf(u, "incoming", "incoming gradient", k)
        options: Any = {"create_graph": drawn, "retain_graph": True, "allow_unused": True}
        try:
            # single-threaded, so that Functions applied in backward are seen by this thread's watch
            with torch.autograd.set_multithreading_enabled(False):
                found = torch.autograd.grad(values, variables, incoming, **options)
            return found if drawn else []
        except Exception as error:
            node = self._nodes[self._keys[running[-1]]]
            node.kind = "raises"
            self.faults.append(f"{node.name} raises in {DERIVATIVES[k]}: {format_error(error)}.")
            return []
        finally:
            for handle in handles:
                handle.remove()

    def lines(self) -> Iterator[str]:
        """The text of a DOT file."""
        yield f"digraph {_quote(self._name)} {{"
        yield f"  graph [label={_quote(self._name)}, labelloc=t, newrank=true, {FONT}];"
        yield f"  node [shape=box, fontsize=11, height=0.3, {FONT}];"
        clusters: dict[tuple[int, str], list[str]] = {}
        for key, node in self._nodes.items():
            label = "\n".join(line for line in (node.name, node.text) if line)
            line = f"{key} [label={_quote(label)}, {NODES[node.kind]}];"
            clusters.setdefault((node.order, node.box), []).append(line)
        for k, ((order, box), nodes) in enumerate(clusters.items()):
            yield f"  subgraph cluster_{k} {{"
            yield f"    label={_quote(box or TITLES[order])}; labeljust=l; fontsize=10;"
            yield f'    style="rounded,{"dashed" if box else "solid"}"; color="#777777";'
            yield from (f"    {line}" for line in nodes)
            yield "  }"
        for (start, end), how in self._edges.items():
            yield f"  {start} -> {end} [{how}];"
        yield "}"

    def _add(self, node: "_Node") -> str:
        key = f"n{len(self._nodes)}"
        self._nodes[key] = node
        return key

    def _add_leaf(self, x: Tensor, kind: str, name: str, order: int) -> str:
        if id(x) not in self._keys:
            self._alive.append(x)
            self._keys[id(x)] = self._add(_Node(kind, name, order, _text([x.shape])))
        return self._keys[id(x)]

    def _add_operation(self, grad_fn: Any, order: int) -> None:
        name = str(grad_fn.name()).rpartition("::")[2].rstrip("0123456789")
        node = _Node("operation", name.removesuffix("Backward") or name, order)
        node.text = _text(torch_internals.output_shapes(grad_fn))
        function = torch_internals.custom_function(grad_fn)
        if function is not None and not is_part(function):
            node.kind, node.name = "function", function.__qualname__.rpartition(".")[2]
        maker = torch_internals.made_by(grad_fn)
        while maker is not None and not node.box:
            of = self._nodes.get(self._keys.get(maker, ""))
            if of is not None and of.kind == "function":
                node.box = f"made in {of.name}.backward"
            maker = torch_internals.made_by(maker)
        self._keys[grad_fn] = self._add(node)

    def _watch(self, grad_fn: Any, function: Any, order: int) -> list[Any]:
        """Hooks that add a break to the picture if the Function's backward leaves the graph."""
        watch = DetachmentWatch()
        watch.applying = self._applying

        def enter(_: object) -> None:
            watch.__enter__()  # if the autograd node raises, torch leaves the mode

        def leave(returned: tuple[Any, ...], incoming: tuple[Any, ...]) -> None:
            watch.__exit__(None, None, None)
            once = torch_internals.is_once_differentiable(function)
            why = ["@once_differentiable"] if once else [str(one) for one in watch.detached]
            made = self._made_in_forward(grad_fn, function)
            why += [f"{name}, made in forward and saved" for name in made]
            if not any(isinstance(u, Tensor) and u.requires_grad for u in incoming):
                return  # the graph was lost before this node
            grads = [g for g in returned if is_float(g)]
            lost = once or any(not g.requires_grad and bool(g.any()) for g in grads)
            if not (lost or why):
                return
            whole = lost or _depends_only_on(incoming, grads, grad_fn)
            kind, how = ("detached", "DETACHED") if whole else ("partial", "partly detached")
            effect = "is silently zero" if whole else "may be incomplete"
            name, reason = f"{self._nodes[self._keys[grad_fn]].name}.backward", "; ".join(why)
            text = textwrap.fill(reason, LINE_LENGTH)
            key = self._add(_Node(kind, f"{how} in {name}", order, text, f"made in {name}"))
            self._edges[self._keys[grad_fn], key] = BREAK
            self.faults.append(
                f"{name} leaves the graph{f' ({reason})' if why else ''}: {DERIVATIVES[order + 1]} "
                f"through it {effect}."
            )

        return [grad_fn.register_prehook(enter), grad_fn.register_hook(leave)]

    def _made_in_forward(self, grad_fn: Any, function: type[Function]) -> list[str]:
        """The saved tensors that are neither inputs nor outputs: constants to the second derivative."""
        # the inputs of a Function that was applied in another thread are unknown, unless all of them
        # require grad
        if function not in self._applied and not all(node for node, _ in grad_fn.next_functions):
            return []
        given = [_memory_key(x) for x in self._applied.get(function, ())]
        saved = saved_tensors(grad_fn, unpack=False)
        return [name for name, x in saved if not x.requires_grad and _memory_key(x) not in given]


def _depends_only_on(incoming: Sequence[Any], grads: Sequence[Tensor], grad_fn: object) -> bool:
    """Whether a backward computed its gradients from the incoming gradients alone."""
    # a leaf other than an incoming gradient, or a node of another origin, is a path to the inputs
    ids = {id(u) for u in incoming}
    return not any(
        id(found.variable) not in ids
        if hasattr(found, "variable")
        else torch_internals.made_by(found) is not grad_fn
        for found, _ in walk(grads, [u for u in incoming if isinstance(u, Tensor)])
    )


def _memory_key(x: Tensor) -> tuple[int, tuple[int, ...]]:
    """A key that two living tensors share if they share memory and shape."""
    return x.data_ptr() if x.layout is torch.strided else id(x), tuple(x.shape)


def _text(shapes: Sequence[Sequence[int]]) -> str:
    return ", ".join(str(tuple(shape)) for shape in shapes)


def _quote(text: str) -> str:
    """A DOT string: only quotes and backslashes are special in it, and lines end in \\n."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
