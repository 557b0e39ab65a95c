"""Compiled code against its operations in float64, at inputs that differ by rounding.

    c(x_k) = r(x_k) for one of x_0 = x, x_k = x (1 + eps u_k), u_k = +-1
                                                                      r the operations in float64

Compiled code adds in another order. Where two roundings of an intermediate value lie on the two sides
of a point without a derivative, such as the zero of a ReLU, the derivatives differ by as much as that
of the function jumps, and neither is wrong. At inputs that are moved by a unit in the last place the
value lies on one side, for some draws of u_k, and right code computes the derivative of this side;
wrong code does not.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, fx

from hoglib.capture.nodes import is_random

DRAWS = 8
_WIDER = {
    torch.float16: torch.float64, torch.bfloat16: torch.float64, torch.float32: torch.float64,
    torch.complex32: torch.complex128, torch.complex64: torch.complex128,
}  # fmt: skip


class Run(NamedTuple):
    """The outputs at some inputs: of the operations in float64, and of the compiled code."""

    reference: list[Tensor]
    found: list[Tensor]


@final
class RunsNearby:
    """The runs at some inputs and at others that differ by rounding, each computed once."""

    def __init__(
        self, compiled: Callable[[list[Tensor]], list[Tensor]], graph: fx.GraphModule,
        inputs: list[Tensor],
    ) -> None:  # fmt: skip
        self._compiled, self._graph, self._inputs = compiled, graph, inputs
        self._runs: list[Run] = []

    def is_random(self) -> bool:
        """Whether the operations draw random numbers, which are others in float64."""
        return any(map(is_random, self._graph.graph.nodes))

    def __iter__(self) -> Iterator[Run]:
        for seed in range(DRAWS + 1):
            if seed == len(self._runs):
                inputs = _last_places_changed(self._inputs, seed) if seed else self._inputs
                with torch.no_grad():
                    reference: list[Tensor] = _InDouble(self._graph).run(*inputs)
                self._runs.append(Run(reference, self._compiled(inputs)))
            yield self._runs[seed]


@final
class _InDouble(fx.Interpreter):
    """Runs a graph with float64 in the place of each less precise dtype."""

    def run_node(self, n: fx.Node) -> Any:
        return fx.node.map_aggregate(super().run_node(n), _widened)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = fx.node.map_aggregate((args, kwargs), _widened)
        return super().call_function(target, args, kwargs)


def _widened(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return _WIDER.get(value, value)
    return value.to(_WIDER[value.dtype]) if getattr(value, "dtype", None) in _WIDER else value


def _last_places_changed(inputs: list[Tensor], seed: int) -> list[Tensor]:
    """Inputs whose floating-point numbers are moved by a unit in the last place, up or down."""
    generator = torch.Generator("cpu").manual_seed(seed)
    found = []
    for x in inputs:
        if x.is_floating_point() or x.is_complex():
            up = torch.randint(2, x.shape, generator=generator, device="cpu").to(x.device)
            factor = 1 + torch.finfo(x.dtype).eps * (2 * up - 1).double()
            x = torch.empty_like(x).copy_((x * factor).to(x.dtype))  # in the same layout
        found.append(x)
    return found
