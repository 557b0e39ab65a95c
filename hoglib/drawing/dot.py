"""Nodes and edges as the text of a DOT file, which graphviz draws; a large graph is joined first.

Colours are those of Okabe and Ito; faults differ also in shape and line width, so that pictures can be
read by the colour-blind and in black and white.

References:
    Okabe and Ito, Color Universal Design, 2008.
"""

import html
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from hoglib.drawing.graph_data import CALL, Edge, GraphData, Node


class Kind(NamedTuple):
    """How a kind of node looks, and what the legend says about it."""

    fill: str
    line: str
    meaning: str
    style: str = "filled"
    shape: str = ""  # "" for a box
    more: str = ""  # other attributes


BLUE, SKY, GREEN, ORANGE, VERMILLION = "#0072B2", "#56B4E9", "#009E73", "#E69F00", "#D55E00"
PURPLE, DARK_YELLOW = "#9F4E7D", "#7A7200"  # darker than Okabe's and Ito's: lines and text on white
GREY, DARK = "#777777", "#444444"
KINDS = {
    "input": Kind("#CCE3F0", BLUE, "input"),
    "parameter": Kind("#EAF5FC", SKY, "parameter"),
    "leaf": Kind("#F2F2F2", GREY, "tensor that fn holds itself", "filled,dashed"),
    "constant": Kind("#E6E6E6", GREY, "constant"),
    "operation": Kind("#FFFFFF", GREY, "operation of torch", "filled,rounded"),
    "function": Kind("#F5E4ED", PURPLE, "custom Function", "filled,rounded,bold"),
    "group": Kind("#F6F6F6", DARK, "several operations", "filled,rounded,diagonals"),
    "output": Kind("#CCECE3", GREEN, "output"),
    "incoming": Kind("#FCFAD9", DARK_YELLOW, "incoming gradient, given"),
    "gradient": Kind("#CCECE3", GREEN, "gradient (double frame)", more="peripheries=2"),
    "intermediate": Kind(
        "#FAECCC", ORANGE, "saved in forward, without a graph (hexagon)", "filled", "hexagon"
    ),
    "partial": Kind(
        "#FAECCC", ORANGE, "partly detached: may be incomplete (hexagon)", "filled,bold", "hexagon"
    ),
    "detached": Kind(
        "#F7DFCC", VERMILLION, "detached: second derivative is zero (octagon)", "filled,bold",
        "octagon", "penwidth=3",
    ),
}  # fmt: skip
RAISES = Kind(
    "#F7DFCC", VERMILLION, "raises (double octagon)", "filled,bold", "doubleoctagon"
)  # fmt: skip
EDGES = {
    "flow": f'color="{DARK}"',
    "saved": f'color="{GREY}", style=dashed',
    "detached": f'color="{VERMILLION}", style=dashed, penwidth=2, arrowhead=tee',
}
EDGE_MEANINGS = {
    "flow": ("&#8594;", DARK, "value"),
    "saved": ("&#8674;", GREY, "saved for backward"),
    "detached": ("&#8867;", VERMILLION, "the graph ends"),
}
ORDERS = {1: "forward", 2: "gradient: made by backward", 3: "second derivative"}
TITLES = {1: "", 2: " and its gradient", 3: ", its gradient and second derivative"}
FONT = "Helvetica, Arial, sans-serif"
LINE_LENGTH = 44  # characters of prose in a node
LEGEND_COLUMNS = 3
MANY_NODES = 100  # from here on graphviz is told not to search long for the best layout


def dot(data: GraphData, max_nodes: int) -> str:
    """The text of a DOT file, the same for the same graph; joined if it has more than max_nodes
    nodes."""
    data, note = _join(data, max_nodes)
    return "\n".join(_lines(data, note)) + "\n"


def _lines(data: GraphData, note: str) -> Iterator[str]:
    yield f"digraph {_quoted(data.name)} {{"
    yield f"  graph [label=<{_heading(data, note)}>, labelloc=t,"
    yield f'         fontname="{FONT}", nodesep=0.25, ranksep=0.3, newrank=true];'
    yield f'  node [shape=box, fontsize=11, fontname="{FONT}", height=0.3, margin="0.09,0.05"];'
    yield f'  edge [fontsize=9, fontname="{FONT}", fontcolor="{DARK}", arrowsize=0.6];'
    if len(data.nodes) > MANY_NODES:
        yield "  graph [nslimit=1, nslimit1=1, mclimit=0.3];"
    counter = iter(range(len(data.nodes)))
    for order in range(1, data.order + 1):
        nodes = [(key, node) for key, node in data.nodes.items() if node.order == order]
        for key, node in nodes:
            if _is_outside(node):
                yield _node(key, node, "  ")
        inner = [(_boxes(node), key, node) for key, node in nodes if not _is_outside(node)]
        if inner:
            yield f"  subgraph cluster_order{order} {{"
            yield f"    label={_quoted(ORDERS[order])}; labeljust=l; fontsize=12;"
            yield '    style="rounded,filled";'
            yield f'    color="#CCCCCC"; fillcolor="{"#FAFAFA" if order == 1 else "#FFFDF5"}";'
            yield from _nested(inner, counter, "    ")
            yield "  }"
    for edge in data.edges.values():
        label = f", label={_quoted(' ' + edge.label)}" if edge.label else ""
        yield f"  {edge.start} -> {edge.end} [{EDGES[edge.kind]}{label}];"
    yield "}"


def _is_outside(node: Node) -> bool:
    """Whether it is drawn outside of the boxes: tensors that go in and come out."""
    return node.kind in ("input", "parameter", "leaf", "output", "incoming", "gradient")


def _boxes(node: Node) -> tuple[str, ...]:
    """The labels of the boxes around a node; in the graph of a gradient the innermost alone."""
    if node.order == 1 or not node.inside:
        return node.inside
    last = node.inside[-1]
    return (last if last.startswith("made in ") else f"backward of {last}",)


def _nested(
    nodes: list[tuple[tuple[str, ...], str, Node]], counter: Iterator[int], indent: str
) -> Iterator[str]:
    boxes: dict[str, list[tuple[tuple[str, ...], str, Node]]] = {}
    for labels, key, node in nodes:
        if labels:
            boxes.setdefault(labels[0], []).append((labels[1:], key, node))
        else:
            yield _node(key, node, indent)
    for label, members in boxes.items():
        by_function = label.startswith("made in ")
        line, style = (PURPLE, "dashed") if by_function else (GREY, "solid")
        yield f"{indent}subgraph cluster_{next(counter)} {{"
        yield f"{indent}  label={_quoted(label)}; labeljust=l; fontsize=10; fontcolor={_quoted(line)};"
        yield f'{indent}  style="rounded,{style}"; color={_quoted(line)};'
        yield from _nested(members, counter, indent + "  ")
        yield f"{indent}}}"


def _node(key: str, node: Node, indent: str) -> str:
    kind = RAISES if _raises(node) else KINDS[node.kind]
    name = "\n".join(textwrap.wrap(node.name, LINE_LENGTH)) or node.name
    lines = [name, node.shape, *textwrap.wrap(node.fault, LINE_LENGTH)]
    label = _quoted("\n".join(line for line in lines if line))
    shape = f", shape={kind.shape}" if kind.shape else ""
    more = f", {kind.more}" if kind.more else ""
    return (
        f'{indent}{key} [label={label}, style="{kind.style}", '
        f'fillcolor="{kind.fill}", color="{kind.line}"{shape}{more}];'
    )


def _heading(data: GraphData, note: str) -> str:
    """The title, and a legend of what occurs in the picture."""
    title = html.escape(f"{data.name}{TITLES[data.order]}")
    below = f'<BR/><FONT POINT-SIZE="11">({html.escape(note)})</FONT>' if note else ""
    kinds = {node.kind for node in data.nodes.values()}
    entries = [_legend_entry(kind) for name, kind in KINDS.items() if name in kinds]
    if any(_raises(node) for node in data.nodes.values()):
        entries.append(_legend_entry(RAISES))
    used = {edge.kind for edge in data.edges.values()}
    for name, (arrow, colour, meaning) in EDGE_MEANINGS.items():
        if name in used:
            entries.append(f'<TD><FONT COLOR="{colour}">{arrow}</FONT></TD>{_meaning(meaning)}')
    rows = [entries[i : i + LEGEND_COLUMNS] for i in range(0, len(entries), LEGEND_COLUMNS)]
    legend = "".join(f"<TR>{''.join(row)}</TR>" for row in rows)
    return (
        f'<TABLE BORDER="0"><TR><TD><FONT POINT-SIZE="16">{title}</FONT>{below}</TD></TR>'
        f'<TR><TD><TABLE BORDER="0" CELLSPACING="4">{legend}</TABLE></TD></TR></TABLE>'
    )


def _legend_entry(kind: Kind) -> str:
    width = 2 if "bold" in kind.style else 1
    box = f'<TD BGCOLOR="{kind.fill}" COLOR="{kind.line}" BORDER="{width}" WIDTH="18"></TD>'
    return box + _meaning(kind.meaning)


def _meaning(text: str) -> str:
    return f'<TD ALIGN="LEFT"><FONT POINT-SIZE="10">{text}</FONT></TD>'


def _raises(node: Node) -> bool:
    return node.fault.startswith("raises")


def _quoted(text: Any) -> str:
    """A DOT string: only quotes and backslashes are special in it, and lines end in \\n."""
    escaped = str(text).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


Group = tuple[object, ...]
TENSORS = ("input", "parameter", "leaf", "constant", "incoming", "gradient")
PLURALS = {"leaf": "other tensors", "incoming": "incoming gradients"}


def _join(data: GraphData, max_nodes: int) -> tuple[GraphData, str]:
    """The graph with at most about max_nodes nodes, and a note on how it was joined; faults stay.

    The operations of one call of a module become one node; where those are too many, those of all its
    calls, those of the modules around it, and at last all of one name. Tensors with the same neighbours
    are joined too.
    """
    if _size(data) <= max_nodes:
        return data, ""
    for how, group_of in _groupings(data):
        joined, note = _joined(data, group_of), f"{len(data.nodes)} nodes, joined {how}"
        if _size(joined) <= max_nodes:
            break
    return joined, note


def _size(data: GraphData) -> int:
    """Two edges count as a node: they are as hard to follow, and to lay out."""
    return max(len(data.nodes), len(data.edges) // 2)


def _groupings(data: GraphData) -> Iterator[tuple[str, Callable[[Node], Group]]]:
    """Coarser and coarser ways to group operations."""
    depth = max((len(node.inside) for node in data.nodes.values()), default=0)
    if depth:
        yield "by call of a module", lambda node: node.inside
        for d in range(depth, 0, -1):
            yield "by module", lambda node, d=d: _without_calls(node.inside[:d])  # type: ignore[misc]
    yield "by name", lambda node: ()


def _without_calls(inside: tuple[str, ...]) -> Group:
    return tuple(name.partition(CALL)[0] for name in inside)


def _joined(data: GraphData, group_of: Callable[[Node], Group]) -> GraphData:
    groups = _groups(data, group_of)
    members: dict[Group, list[str]] = {}
    for key in data.nodes:
        members.setdefault(groups[key], []).append(key)
    joined = GraphData(data.name, data.order, faults=data.faults)
    for keys in members.values():
        nodes = [data.nodes[key] for key in keys]
        joined.nodes[keys[0]] = nodes[0] if len(nodes) == 1 else _merged(nodes, group_of(nodes[0]))
    for edge in data.edges.values():
        start, end = members[groups[edge.start]][0], members[groups[edge.end]][0]
        known = joined.edges.get((start, end))
        if start != end and (known is None or edge.kind == "flow"):
            joined.edges[start, end] = Edge(start, end, edge.kind)
    return joined


def _groups(data: GraphData, group_of: Callable[[Node], Group]) -> dict[str, Group]:
    """The group of each node; a fault is a group by itself, and so is what it is connected to."""
    groups: dict[str, Group] = {}
    for key, node in data.nodes.items():
        groups[key] = (key,)
        if node.kind in ("operation", "function") and not node.fault:
            boxes = group_of(node)
            groups[key] = (node.order, *boxes) if boxes else (node.order, node.kind, node.name)
    for edge in data.edges.values():
        if edge.kind == "detached" or data.nodes[edge.start].kind == "intermediate":
            groups[edge.start], groups[edge.end] = (edge.start,), (edge.end,)
    neighbours: dict[str, set[Group]] = {key: set() for key in data.nodes}
    for start, end in data.edges:
        if data.nodes[start].order == data.nodes[end].order:
            neighbours[start].add(groups[end])
            neighbours[end].add(groups[start])
    for key, node in data.nodes.items():
        if node.kind in TENSORS and not node.fault:
            groups[key] = (node.kind, node.order, *sorted(map(str, neighbours[key])))
    return groups


def _merged(nodes: list[Node], boxes: Group) -> Node:
    first = nodes[0]
    if first.kind in TENSORS:
        names = f"{first.name}, ..., {nodes[-1].name}"
        many = PLURALS.get(first.kind, f"{first.kind}s")
        return replace(first, name=f"{len(nodes)} {many}: {names}", shape="")
    if not boxes:
        name = first.name.partition(" #")[0]
        return Node("group", f"{name}, {len(nodes)} times", "", first.order)
    inside = tuple(map(str, boxes))
    backward = first.order > 1 and not inside[-1].startswith("made in ")
    name = f"backward of {inside[-1]}" if backward else inside[-1]
    count = f"{len(nodes)} operations"
    return Node("group", name, count, first.order, inside[:-1] if first.order == 1 else ())
