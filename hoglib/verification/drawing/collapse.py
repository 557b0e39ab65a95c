"""Too large a graph, made readable: what one module made becomes one part."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from hoglib.verification.drawing.parts import Edge, Part, Parts
from hoglib.verification.drawing.spans import CALL

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
