"""The picture of the graph of a gradient, `hoglib.graph`."""

from hoglib.drawing.picture import Graph, graph

__all__ = ["Graph", "graph"]
