"""Where a function has no derivative of its own, but what is made of it has: along a direction.

A norm at 0 and the eigenvalues of a matrix where some are equal are no smooth functions of x, but
f(|x|) with f'(0) = 0, such as a square, and symmetric functions of a spectrum are. The derivative of
their gradient along v exists, and is that of the path x + t v, along which the norm is t |v| and the
eigenvectors those of v: only the pass that multiplies by v knows it, and hands it to the one after it.

    gradient         g u(x)                                   u = 0 where x = 0
    its derivative   <v, u> to g, with u = v / |v|             notes the direction
    gradient again   c u(x), of what came back through f''     takes it
"""

from typing import Any

from torch import Tensor

from hoglib._core.runtime.source_location import user_line, warn_once
from hoglib._core.torch_api import torch_internals


class Directions:
    """What the passes of one call hand on."""

    def __init__(self, operation: str, x: Tensor) -> None:
        self.operation, self.line = operation, user_line()
        self.nested = torch_internals.reverse_mode_active(x)  # forward mode is not all there is
        self.tangent: Any = None  # of forward mode, which precedes all
        self.noted: Any = None  # of reverse mode, for the next pass alone

    def take(self) -> Any:
        """The direction of this pass, or None."""
        noted, self.noted = self.noted, None
        return self.tangent if noted is None else noted

    def warn(self, missing: Tensor, lacks: str) -> None:
        """Warns, once a place, where a derivative along the direction does not exist."""
        seen = values(missing)
        if seen is not None and bool(seen.any()):
            at = f"{self.operation} at {self.line}" if self.line else self.operation
            warn_once(
                f"second derivatives: expected points where {at} can be differentiated twice, got "
                f"some {lacks}: the derivative does not exist there, and a part of the result is "
                "torch's convention. Move the points, add a small constant under the root, or use a "
                "function that is smooth there, such as the square of a norm, which is right."
            )


def values(x: Tensor) -> Tensor | None:
    """The tensor that checks may read, beneath the wrappers of torch.func; None while a graph is
    captured."""
    return None if torch_internals.tracing() else torch_internals.unwrap(x)
