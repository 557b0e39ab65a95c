"""A graph as plain data, and as the text of a DOT file, which graphviz draws; a large one is joined
first.

Colours are those of Okabe and Ito; faults differ also in shape and line width, so that pictures can be
read by the colour-blind and in black and white.

References:
    Okabe and Ito, Color Universal Design, 2008.
"""

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple, final


@final
@dataclass
class Node:
    """A node of the picture: an operation, a tensor, or a fault."""

    kind: str  # a key of KINDS
    name: str
    shape: str = ""
    order: int = 1  # 1: the graph of the forward pass, 2: that of the gradient, ...
    inside: tuple[str, ...] = ()  # the modules, or the backward, that made it; outermost first
    fault: str = ""  # what is wrong with it


class Edge(NamedTuple):
    """What goes from the node that makes a value to the one that takes it."""

    kind: str = "flow"  # or "saved", or "detached"
    label: str = ""


@final
@dataclass
class GraphData:
    """The nodes and edges to draw, in the order in which they were added, and sentences about
    faults."""

    name: str
    order: int
    nodes: dict[str, Node] = field(default_factory=dict)
    edges: dict[tuple[str, str], Edge] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def add(self, node: Node) -> str:
        """Add a node; its key."""
        key = f"n{len(self.nodes)}"
        self.nodes[key] = node
        return key

    def connect(self, start: str, end: str, kind: str = "flow", label: str = "") -> None:
        """Add an edge; everything that goes from one node to another shares one."""
        known = self.edges.get((start, end), Edge(kind))
        self.edges[start, end] = Edge(known.kind, label or known.label)


BLUE, SKY, GREEN, ORANGE, VERMILLION = "#0072B2", "#56B4E9", "#009E73", "#E69F00", "#D55E00"
PURPLE, DARK_YELLOW = "#9F4E7D", "#7A7200"  # darker than Okabe's and Ito's: lines and text on white
GREY, DARK, PALE_ORANGE, PALE_RED = "#777777", "#444444", "#FAECCC", "#F7DFCC"
KINDS = {  # how nodes look: fill, line, style and shape
    "input": ("#CCE3F0", BLUE, "style=filled"),
    "parameter": ("#EAF5FC", SKY, "style=filled"),
    "leaf": ("#F2F2F2", GREY, 'style="filled,dashed"'),
    "constant": ("#E6E6E6", GREY, "style=filled"),
    "operation": ("#FFFFFF", GREY, 'style="filled,rounded"'),
    "function": ("#F5E4ED", PURPLE, 'style="filled,rounded,bold"'),
    "group": ("#F6F6F6", DARK, 'style="filled,rounded,diagonals"'),
    "output": ("#CCECE3", GREEN, "style=filled"),
    "incoming": ("#FCFAD9", DARK_YELLOW, "style=filled"),
    "gradient": ("#CCECE3", GREEN, "style=filled, peripheries=2"),
    "intermediate": (PALE_ORANGE, ORANGE, "style=filled, shape=hexagon"),
    "partial": (PALE_ORANGE, ORANGE, 'style="filled,bold", shape=hexagon'),
    "detached": (PALE_RED, VERMILLION, 'style="filled,bold", shape=octagon, penwidth=3'),
    "bad": (PALE_RED, VERMILLION, 'style="filled,bold", shape=doubleoctagon'),  # raises, or NaN
}
EDGES = {
    "flow": f'color="{DARK}"',
    "saved": f'color="{GREY}", style=dashed',
    "detached": f'color="{VERMILLION}", style=dashed, penwidth=2, arrowhead=tee',
}
OPERATIONS = ("operation", "function")
# drawn outside of the boxes: tensors that go in and come out
OUTSIDE = ("input", "parameter", "leaf", "output", "incoming", "gradient")
TENSORS = ("input", "parameter", "leaf", "constant", "incoming", "gradient")
PLURALS = {"leaf": "other tensors", "incoming": "incoming gradients"}
MADE_IN = "made in "  # before the name of a backward
ORDERS = {1: "forward", 2: "gradient: made by backward", 3: "second derivative"}
TITLES = {1: "", 2: " and its gradient", 3: ", its gradient and second derivative"}
FONT = "Helvetica, Arial, sans-serif"
LINE_LENGTH = 44  # characters of prose in a node
MANY_NODES = 100  # above this graphviz searches less for the best layout

Boxed = tuple[tuple[str, ...], str]  # the labels of the boxes around a node, and its line of text


def dot(data: GraphData, max_nodes: int) -> str:
    """The text of a DOT file, the same for the same graph; joined if it has more than max_nodes
    nodes."""
    data, note = _join(data, max_nodes)
    return "\n".join(_lines(data, note)) + "\n"


def _lines(data: GraphData, note: str) -> Iterator[str]:
    yield f"digraph {_quoted(data.name)} {{"
    title = f"{data.name}{TITLES[data.order]}{note}"
    yield f'  graph [label={_quoted(title)}, labelloc=t, fontsize=16, fontname="{FONT}",'
    yield "         nodesep=0.25, ranksep=0.3, newrank=true];"
    yield f'  node [shape=box, fontsize=11, fontname="{FONT}", height=0.3, margin="0.09,0.05"];'
    yield f'  edge [fontsize=9, fontname="{FONT}", fontcolor="{DARK}", arrowsize=0.6];'
    if len(data.nodes) > MANY_NODES:
        yield "  graph [nslimit=1, nslimit1=1, mclimit=0.3];"
    counter = iter(range(len(data.nodes)))
    for order in range(1, data.order + 1):
        nodes = [(key, node) for key, node in data.nodes.items() if node.order == order]
        yield from (f"  {_node(key, node)}" for key, node in nodes if node.kind in OUTSIDE)
        inner = [(_boxes(n), _node(key, n)) for key, n in nodes if n.kind not in OUTSIDE]
        if inner:
            yield f"  subgraph cluster_order{order} {{"
            yield f"    label={_quoted(ORDERS[order])}; labeljust=l; fontsize=12;"
            yield '    style="rounded,filled";'
            yield f'    color="#CCCCCC"; fillcolor="{"#FAFAFA" if order == 1 else "#FFFDF5"}";'
            yield from _nested(inner, counter, "    ")
            yield "  }"
    for (start, end), edge in data.edges.items():
        label = f", label={_quoted(' ' + edge.label)}" if edge.label else ""
        yield f"  {start} -> {end} [{EDGES[edge.kind]}{label}];"
    yield "}"


def _boxes(node: Node) -> tuple[str, ...]:
    """The labels of the boxes around a node; in the graph of a gradient the innermost alone."""
    if node.order == 1 or not node.inside:
        return node.inside
    last = node.inside[-1]
    return (last if last.startswith(MADE_IN) else f"backward of {last}",)


def _nested(nodes: list[Boxed], counter: Iterator[int], indent: str) -> Iterator[str]:
    boxes: dict[str, list[Boxed]] = {}
    for labels, text in nodes:
        if labels:
            boxes.setdefault(labels[0], []).append((labels[1:], text))
        else:
            yield indent + text
    for label, members in boxes.items():
        line, style = (PURPLE, "dashed") if label.startswith(MADE_IN) else (GREY, "solid")
        yield f"{indent}subgraph cluster_{next(counter)} {{"
        yield f'{indent}  label={_quoted(label)}; labeljust=l; fontsize=10; fontcolor="{line}";'
        yield f'{indent}  style="rounded,{style}"; color="{line}";'
        yield from _nested(members, counter, indent + "  ")
        yield f"{indent}}}"


def _node(key: str, node: Node) -> str:
    fill, line, style = KINDS["bad" if node.fault and node.kind in OPERATIONS else node.kind]
    name = "\n".join(textwrap.wrap(node.name, LINE_LENGTH)) or node.name
    lines = [name, node.shape, *textwrap.wrap(node.fault, LINE_LENGTH)]
    label = _quoted("\n".join(line for line in lines if line))
    return f'{key} [label={label}, fillcolor="{fill}", color="{line}", {style}];'


def _quoted(text: str) -> str:
    """A DOT string: only quotes and backslashes are special in it, and lines end in \\n."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


Group = tuple[object, ...]


def _join(data: GraphData, max_nodes: int) -> tuple[GraphData, str]:
    """The graph with at most about max_nodes nodes, and a note on how it was joined; faults stay.

    The operations of one module become one node; where those are too many, those of the modules around
    it, and at last all of one name. Tensors beside them are joined too.
    """
    joined, note = data, ""
    depth = max((len(node.inside) for node in data.nodes.values()), default=0)
    # two edges count as a node: they are as hard to follow, and to lay out
    while max(len(joined.nodes), len(joined.edges) // 2) > max_nodes and depth >= 0:
        joined = _joined(data, depth)
        note = f"\n({len(data.nodes)} nodes, joined by {'module' if depth else 'name'})"
        depth -= 1
    return joined, note


def _joined(data: GraphData, depth: int) -> GraphData:
    groups = _groups(data, depth)
    members: dict[Group, list[str]] = {}
    for key in data.nodes:
        members.setdefault(groups[key], []).append(key)
    joined = GraphData(data.name, data.order, faults=data.faults)
    for keys in members.values():
        nodes = [data.nodes[key] for key in keys]
        joined.nodes[keys[0]] = nodes[0] if len(nodes) == 1 else _merged(nodes, depth)
    for (start, end), edge in data.edges.items():
        start, end = members[groups[start]][0], members[groups[end]][0]
        if start != end and (edge.kind == "flow" or (start, end) not in joined.edges):
            joined.edges[start, end] = Edge(edge.kind)
    return joined


def _groups(data: GraphData, depth: int) -> dict[str, Group]:
    """The group of each node; a fault is a group by itself, and so is what it is connected to."""
    alone = {key for key, node in data.nodes.items() if node.fault}
    alone |= {key for edge in data.edges if alone & {*edge} for key in edge}
    groups: dict[str, Group] = {key: (key,) for key in data.nodes}
    for key, node in data.nodes.items():
        if node.kind in OPERATIONS and key not in alone:
            groups[key] = (node.order, *(node.inside[:depth] or (node.kind, _plain(node))))
    neighbour: dict[str, Group] = {}
    for start, end in data.edges:
        neighbour.setdefault(start, groups[end])
        neighbour.setdefault(end, groups[start])
    for key, node in data.nodes.items():
        if node.kind in TENSORS and key not in alone:
            groups[key] = (node.kind, node.order, neighbour.get(key))
    return groups


def _plain(node: Node) -> str:
    return node.name.partition(" #")[0]


def _merged(nodes: list[Node], depth: int) -> Node:
    first, modules = nodes[0], nodes[0].inside[:depth]
    if first.kind in TENSORS:
        many = PLURALS.get(first.kind, f"{first.kind}s")
        names = f"{first.name}, ..., {nodes[-1].name}"
        return replace(first, name=f"{len(nodes)} {many}: {names}", shape="")
    if not modules:
        return Node("group", f"{_plain(first)}, {len(nodes)} times", order=first.order)
    *around, name = modules if first.order == 1 else _boxes(replace(first, inside=modules))
    return Node("group", name, f"{len(nodes)} operations", first.order, tuple(around))
