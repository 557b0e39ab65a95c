"""Which intermediate values one part of a graph takes from another."""

from collections.abc import Iterable

import torch
from torch import Tensor, fx

from hoglib.capture.passes import VIEWS


def residuals_of(
    nodes: list[fx.Node], depends: set[fx.Node], outputs: Iterable[fx.Node] = ()
) -> tuple[list[fx.Node], set[fx.Node]]:
    """The nodes that the second graph takes from the first, and those that it computes again.

    nodes: of the whole graph. depends: those of the second graph alone. outputs: of the second graph,
    also where they are computed by the first.

    Views take no time, and elementwise operations are fused with what uses them.
    """
    recomputed: set[fx.Node] = set()
    while True:
        reads = [*outputs]
        for node in nodes:
            if (node in depends and node.op == "call_function") or node in recomputed:
                reads += node.all_input_nodes
        needed = {
            x: None
            for x in reads
            if x not in depends and x not in recomputed and x.op != "placeholder"
        }
        cheap = [
            x
            for x in needed
            if x.target in VIEWS
            or not isinstance(x.meta.get("val"), Tensor)  # one of several outputs is selected
            or (
                torch.Tag.pointwise in getattr(x.target, "tags", ())
                and all(
                    y in needed or y in recomputed or y.op == "placeholder"
                    for y in x.all_input_nodes
                )
            )
        ]
        if not cheap:
            return list(needed), recomputed
        recomputed.update(cheap)
