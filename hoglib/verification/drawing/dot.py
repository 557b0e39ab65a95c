"""Parts and edges as the text of a DOT file, which graphviz draws."""

import html
import textwrap
from collections.abc import Iterator
from typing import Any, NamedTuple

from hoglib.verification.drawing.parts import Edge, Part, Parts


class Kind(NamedTuple):
    """How a kind of part looks, and what the legend says of it."""

    fill: str
    line: str
    meaning: str
    style: str = "filled"


RED, ORANGE = "#c00000", "#c65d00"
KINDS = {
    "input": Kind("#cfe2ff", "#2f5d9e", "input"),
    "parameter": Kind("#e9f1ff", "#2f5d9e", "parameter"),
    "leaf": Kind("#f2f2f2", "#777777", "tensor that fn holds itself", "filled,dashed"),
    "constant": Kind("#eeeeee", "#999999", "constant"),
    "operation": Kind("#ffffff", "#888888", "operation of torch", "filled,rounded"),
    "function": Kind("#e6d8f5", "#6b35a3", "custom Function", "filled,rounded,bold"),
    "group": Kind("#f6f6f6", "#555555", "several operations", "filled,rounded,diagonals"),
    "output": Kind("#d3efd3", "#2c7a2c", "output"),
    "incoming": Kind("#fff2c2", "#a17c00", "incoming gradient, given"),
    "gradient": Kind("#c9ece8", "#1f7a70", "gradient"),
    "kept": Kind("#ffdcb0", ORANGE, "saved, without a graph"),
    "doubt": Kind("#ffdcb0", ORANGE, "leaves the graph; may lack a part", "filled,bold"),
    "cut": Kind("#ffc4c4", RED, "CUT: second derivative taken for zero", "filled,bold"),
}
RAISES = Kind("#ffc4c4", RED, "raises", "filled,rounded,bold")
EDGES = {
    "flow": 'color="#555555"',
    "saved": 'color="#8a6d3b", style=dashed',
    "lost": f'color="{RED}", style=dashed, arrowhead=tee',
}
EDGE_MEANINGS = {
    "flow": ("&#8594;", "#555555", "goes in"),
    "saved": ("&#8674;", "#8a6d3b", "kept for backward"),
    "lost": ("&#8867;", RED, "the graph ends"),
}
ORDERS = {1: "forward", 2: "gradient: made by backward", 3: "second derivative"}
TITLES = {1: "", 2: " and its gradient", 3: ", its gradient and second derivative"}
FONT = "Helvetica, Arial, sans-serif"
WIDTH = 44  # characters of a line of prose in a node
COLUMNS = 3  # of the legend
MANY = 100  # nodes, from which on graphviz is not to search long for the best places


def dot(found: Parts, note: str = "") -> str:
    """The text of a DOT file: the same for the same parts."""
    return "\n".join(_lines(found, note)) + "\n"


def _lines(found: Parts, note: str) -> Iterator[str]:
    yield f"digraph {_quoted(found.name)} {{"
    yield f"  graph [label=<{_heading(found, note)}>, labelloc=t,"
    yield f'         fontname="{FONT}", nodesep=0.25, ranksep=0.3, newrank=true];'
    yield f'  node [shape=box, fontsize=11, fontname="{FONT}", height=0.3, margin="0.09,0.05"];'
    yield f'  edge [fontsize=9, fontname="{FONT}", fontcolor="#555555", arrowsize=0.6];'
    if len(found.parts) > MANY:
        yield "  graph [nslimit=1, nslimit1=1, mclimit=0.3];"
    counter = iter(range(len(found.parts)))
    for order in range(1, found.order + 1):
        mine = [(k, part) for k, part in found.parts.items() if part.order == order]
        outside = [pair for pair in mine if _is_outside(pair[1])]
        for key, part in outside:
            yield _node(key, part, "  ")
        inner = [pair for pair in mine if not _is_outside(pair[1])]
        if inner:
            yield f"  subgraph cluster_order{order} {{"
            yield f"    label={_quoted(ORDERS[order])}; labeljust=l; fontsize=12;"
            yield '    style="rounded,filled";'
            yield f'    color="#cccccc"; fillcolor="{"#fafafa" if order == 1 else "#fffdf5"}";'
            yield from _nested([(_place(p), k, p) for k, p in inner], counter, "    ")
            yield "  }"
    for edge in found.edges.values():
        yield _edge(edge)
    yield "}"


def _is_outside(part: Part) -> bool:
    """What belongs to nobody's run: tensors that go in and come out."""
    return part.kind in ("input", "parameter", "leaf", "output", "incoming", "gradient")


def _place(part: Part) -> tuple[str, ...]:
    """The boxes around a part; of a gradient's, the innermost alone."""
    if part.order == 1 or not part.inside:
        return part.inside
    last = part.inside[-1]
    return (last if last.startswith("made in ") else f"backward of {last}",)


def _nested(
    parts: list[tuple[tuple[str, ...], str, Part]], counter: Iterator[int], indent: str
) -> Iterator[str]:
    boxes: dict[str, list[tuple[tuple[str, ...], str, Part]]] = {}
    for place, key, part in parts:
        if place:
            boxes.setdefault(place[0], []).append((place[1:], key, part))
        else:
            yield _node(key, part, indent)
    for label, members in boxes.items():
        line, style = (
            ("#6b35a3", "dashed") if label.startswith("made in ") else ("#777777", "solid")
        )
        yield f"{indent}subgraph cluster_{next(counter)} {{"
        yield f"{indent}  label={_quoted(label)}; labeljust=l; fontsize=10; fontcolor={_quoted(line)};"
        yield f'{indent}  style="rounded,{style}"; color={_quoted(line)};'
        yield from _nested(members, counter, indent + "  ")
        yield f"{indent}}}"


def _node(key: str, part: Part, indent: str) -> str:
    kind = RAISES if _raises(part) else KINDS[part.kind]
    name = "\n".join(textwrap.wrap(part.name, WIDTH)) or part.name
    lines = [name, part.shape, *textwrap.wrap(part.wrong, WIDTH)]
    label = _quoted("\n".join(line for line in lines if line))
    return (
        f'{indent}{key} [label={label}, style="{kind.style}", '
        f'fillcolor="{kind.fill}", color="{kind.line}"];'
    )


def _edge(edge: Edge) -> str:
    label = f", label={_quoted(' ' + edge.label)}" if edge.label else ""
    return f"  {edge.start} -> {edge.end} [{EDGES[edge.kind]}{label}];"


def _heading(found: Parts, note: str) -> str:
    """The title, and what the colours mean that are there."""
    title = html.escape(f"{found.name}{TITLES[found.order]}")
    below = f'<BR/><FONT POINT-SIZE="11">({html.escape(note)})</FONT>' if note else ""
    kinds = {part.kind for part in found.parts.values()}
    entries = [_entry(kind) for name, kind in KINDS.items() if name in kinds]
    if any(_raises(part) for part in found.parts.values()):
        entries.append(_entry(RAISES))
    used = {edge.kind for edge in found.edges.values()}
    for name, (sign, colour, meaning) in EDGE_MEANINGS.items():
        if name in used:
            entries.append(f'<TD><FONT COLOR="{colour}">{sign}</FONT></TD>{_meaning(meaning)}')
    rows = [entries[i : i + COLUMNS] for i in range(0, len(entries), COLUMNS)]
    legend = "".join(f"<TR>{''.join(row)}</TR>" for row in rows)
    return (
        f'<TABLE BORDER="0"><TR><TD><FONT POINT-SIZE="16">{title}</FONT>{below}</TD></TR>'
        f'<TR><TD><TABLE BORDER="0" CELLSPACING="4">{legend}</TABLE></TD></TR></TABLE>'
    )


def _entry(kind: Kind) -> str:
    box = f'<TD BGCOLOR="{kind.fill}" COLOR="{kind.line}" BORDER="1" WIDTH="18"></TD>'
    return box + _meaning(kind.meaning)


def _meaning(text: str) -> str:
    return f'<TD ALIGN="LEFT"><FONT POINT-SIZE="10">{text}</FONT></TD>'


def _raises(part: Part) -> bool:
    return part.wrong.startswith("raises")


def _quoted(text: Any) -> str:
    """A DOT string: only quotes and backslashes are special in it, and lines end in \\n."""
    escaped = str(text).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
