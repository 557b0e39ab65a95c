"""Second derivatives of smooth functions of functions that are not smooth, along a direction.

A norm at 0, and equal eigenvalues of a matrix, are not smooth in x. But f(|x|) with f'(0) = 0, such as
a square, is smooth, and so are symmetric functions of a spectrum. The derivative of their gradient
along v follows the path x + t v, on which the norm is t |v| and v selects the eigenvectors. Only the
pass that multiplies by v knows v: it hands the direction to the next pass.

    gradient           g u(x)                               u = 0 where x = 0
    its derivative     <v, u> for g, with u = v / |v|       notes the direction v
    gradient again     c u(x), with c from f''              takes the direction
"""

from typing import Any

from torch import Tensor

from hoglib._core.runtime.source_location import user_line, warn_once
from hoglib._core.torch_api import torch_internals


class Directions:
    """The direction that the passes of one call hand on."""

    def __init__(self, operation: str, x: Tensor) -> None:
        self.operation, self.line = operation, user_line()  # for a warning
        self.nested = torch_internals.reverse_mode_active(x)  # reverse mode is active, too
        self.tangent: Any = None  # the direction from forward mode, for all later passes
        self.noted: Any = None  # the direction from a backward, for the next pass only

    def take(self) -> Any:
        """The direction of this pass, or None."""
        noted, self.noted = self.noted, None
        return self.tangent if noted is None else noted

    def warn(self, missing: Tensor, lacks: str) -> None:
        """Warn, once a line, of points in the mask `missing`: no derivative along the direction."""
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
    """x below the wrappers of torch.func, for checks to read; None while a graph is captured."""
    return None if torch_internals.tracing() else torch_internals.unwrap(x)
