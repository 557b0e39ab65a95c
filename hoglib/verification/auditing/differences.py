"""Differences of a function, of its gradient and of its products, along a direction.

    values     (f(x + h v) - f(x - h v)) / 2h
    gradients  (g(x + h v) - g(x - h v)) / 2h
    products   (H v at x + h w - H v at x - h w) / 2h, with H v by reverse-over-reverse

What the function stops is held, and they are kept, for the next that asks.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from torch import Tensor

from hoglib._leaves import Vector, filled, own_leaves
from hoglib.verification.auditing.routes import Scalar, gradient, reverse_over_reverse
from hoglib.verification.auditing.stops import Stops


class Difference(NamedTuple):
    """(F(x + h v) - F(x - h v)) / 2h and (F(x + h v) + F(x - h v)) / 2h."""

    slope: Vector
    sum: Vector


def all_finite(parts: Vector) -> bool:
    return all(bool(part.isfinite().all()) for part in parts)


class Differences:
    """Those of a scalar function of leaves, by kind and step; w is the direction of products."""

    def __init__(
        self, f: Scalar, leaves: Vector, stops: Stops | None, v: Vector, w: Vector
    ) -> None:
        self._f, self._leaves, self._stops, self._v, self._w = f, leaves, stops, v, w
        self._known: dict[tuple[str, float], Difference | None] = {}
        self._here: dict[str, Vector | None] = {}

    @property
    def leaves(self) -> Vector:
        """The point, in copies: code under no_grad may write to what it is given."""
        return [x.clone() for x in self._leaves]

    def here(self, kind: str) -> Vector | None:
        """What is differenced, at the point itself; None where it cannot be had."""
        if kind not in self._here:
            self._here[kind] = None
            with suppress(Exception):  # as at another point
                self._here[kind] = self._functions[kind](self.leaves)
        return self._here[kind]

    def at(self, kind: str, step: float) -> Difference | None:
        """The difference with a step, or None where the function cannot be had there.

        Nor can it where it stops what is inside of a transform of torch.func, which cannot be held.
        """
        if (kind, step) not in self._known:
            self._known[kind, step] = self._difference(kind, step)
        return self._known[kind, step]

    @property
    def _functions(self) -> dict[str, Callable[[Vector], Vector]]:
        return {"values": self._value, "gradients": self.gradient, "products": self._product}

    def _difference(self, kind: str, step: float) -> Difference | None:
        along = self._w if kind == "products" else self._v
        try:
            self._record()
            if self._stops is not None and self._stops.beyond:
                return None
            above, below = (
                self._functions[kind](
                    [x + sign * step * d for x, d in zip(self.leaves, along, strict=True)]
                )
                for sign in (1, -1)
            )
        except Exception:  # whatever it says of another point, also that it takes another path
            return None
        slope = [(a - b) / (2 * step) for a, b in zip(above, below, strict=True)]
        total = [(a + b) / (2 * step) for a, b in zip(above, below, strict=True)]
        return Difference(slope, total) if all_finite(slope) else None

    def _held(self, *own: Tensor) -> Tensor:
        if self._stops is None:
            return self._f(*own)
        with self._stops.held():
            return self._f(*own)

    def _record(self) -> None:
        """Remember what the function takes out of its graph, at the point itself."""
        if self._stops is not None and not self._stops.recorded:
            self._held(*own_leaves(self.leaves, False))

    def _value(self, leaves: Vector) -> Vector:
        self._record()
        return [self._held(*own_leaves(leaves, False)).detach()]

    def gradient(self, leaves: Vector) -> Vector:
        self._record()
        own = own_leaves(leaves, False)
        return [part.detach() for part in filled(gradient(self._held, own), own)]

    def _product(self, leaves: Vector) -> Vector:
        self._record()
        return reverse_over_reverse(self._held, leaves, self._v, self._w)
