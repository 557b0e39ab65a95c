"""A graph as plain data, without a tensor or a node of autograd: what a picture is drawn from."""

from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass
class Part:
    """A node of the picture: an operation, a tensor, or a fault."""

    kind: str  # of `_dot.KINDS`
    name: str
    shape: str = ""
    order: int = 1  # 1 for the forward's graph, 2 for the graph of the gradient, ...
    inside: tuple[str, ...] = ()  # the modules, or the backward, that made it; outermost first
    wrong: str = ""  # what is wrong with it


class Edge(NamedTuple):
    """From the part that makes a value to the one that takes it."""

    start: str
    end: str
    kind: str = "flow"  # or "saved", or "lost"
    label: str = ""


@dataclass
class Parts:
    """What there is to draw, in the order in which it was met, and sentences on what is wrong."""

    name: str
    order: int
    parts: dict[str, Part] = field(default_factory=dict)
    edges: dict[tuple[str, str], Edge] = field(default_factory=dict)
    cuts: list[str] = field(default_factory=list)

    def add(self, part: Part) -> str:
        key = f"n{len(self.parts)}"
        self.parts[key] = part
        return key

    def join(self, start: str, end: str, kind: str = "flow", label: str = "") -> None:
        """An edge; one edge for all that goes from here to there."""
        known = self.edges.get((start, end))
        if known is None or label:
            kind = kind if known is None else known.kind
            self.edges[start, end] = Edge(start, end, kind, label)
