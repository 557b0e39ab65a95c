"""Too large a graph, made readable: what one module made becomes one part."""

import html
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from hoglib.drawing.gathering import CALL, Edge, Part, Parts

Group = tuple[object, ...]
TENSORS = ("input", "parameter", "leaf", "constant", "incoming", "gradient")
PLURALS = {"leaf": "other tensors", "incoming": "incoming gradients"}


def collapsed(found: Parts, limit: int) -> tuple[Parts, str]:
    """The same with at most about `limit` parts, and how that was done; faults stay as they are.

    Joined are the operations of one call of a module; where those are too many, of all calls of it, of
    the modules around it, and at last all of one name. Tensors that go the same way are joined too.
    """
    if _size(found) <= limit:
        return found, ""
    for name, group_of in _rules(found):
        small, how = _joined(found, group_of), name
        if _size(small) <= limit:
            break
    return small, f"{len(found.parts)} nodes, joined {how}"


def _size(found: Parts) -> int:
    """By the edges too: twice as many as nodes are as hard to follow as to lay out."""
    return max(len(found.parts), len(found.edges) // 2)


def _rules(found: Parts) -> Iterator[tuple[str, Callable[[Part], Group]]]:
    depth = max((len(part.inside) for part in found.parts.values()), default=0)
    if depth:
        yield "by call of a module", lambda part: part.inside
        for d in range(depth, 0, -1):
            yield "by module", lambda part, d=d: _without_calls(part.inside[:d])  # type: ignore[misc]
    yield "by name", lambda part: ()


def _without_calls(inside: tuple[str, ...]) -> Group:
    return tuple(name.partition(CALL)[0] for name in inside)


def _joined(found: Parts, group_of: Callable[[Part], Group]) -> Parts:
    groups: dict[str, Group] = {}
    for key, part in found.parts.items():
        groups[key] = (key,)
        if part.kind in ("operation", "function") and not part.wrong:
            place = group_of(part)
            groups[key] = (part.order, *place) if place else (part.order, part.kind, part.name)
    lost = {
        key
        for edge in found.edges.values()
        if edge.kind == "lost" or found.parts[edge.start].kind == "kept"
        for key in edge[:2]
    }
    groups.update({key: (key,) for key in lost})
    ways: dict[str, set[Group]] = {key: set() for key in found.parts}
    for start, end in found.edges:
        for key, other in ((start, end), (end, start)):
            if found.parts[key].order == found.parts[other].order:
                ways[key].add(groups[other])
    for key, part in found.parts.items():
        if part.kind in TENSORS and not part.wrong:
            groups[key] = (part.kind, part.order, *sorted(map(str, ways[key])))
    members: dict[Group, list[str]] = {}
    for key in found.parts:
        members.setdefault(groups[key], []).append(key)
    small = Parts(found.name, found.order, cuts=found.cuts)
    for keys in members.values():
        first = found.parts[keys[0]]
        parts = [found.parts[key] for key in keys]
        small.parts[keys[0]] = first if len(keys) == 1 else _one(parts, group_of(first))
    for edge in found.edges.values():
        start, end = members[groups[edge.start]][0], members[groups[edge.end]][0]
        known = small.edges.get((start, end))
        if start != end and (known is None or edge.kind == "flow"):
            small.edges[start, end] = Edge(start, end, edge.kind)
    return small


def _one(parts: list[Part], place: Group) -> Part:
    first = parts[0]
    if first.kind in TENSORS:
        names = f"{first.name}, ..., {parts[-1].name}"
        many = PLURALS.get(first.kind, f"{first.kind}s")
        return replace(first, name=f"{len(parts)} {many}: {names}", shape="")
    count = f"{len(parts)} operations"
    if not place:
        name = first.name.partition(" #")[0]
        return Part("group", f"{name}, {len(parts)} times", "", first.order)
    inside = tuple(map(str, place))
    backward = first.order > 1 and not inside[-1].startswith("made in ")
    name = f"backward of {inside[-1]}" if backward else inside[-1]
    return Part("group", name, count, first.order, inside[:-1] if first.order == 1 else ())


# === Parts and edges as the text of a DOT file, which graphviz draws.


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
