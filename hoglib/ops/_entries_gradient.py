"""The catalogue of the theme gradient."""

from typing import Any

from hoglib import ops
from hoglib.ops import _references as references
from hoglib.ops._entry import (
    NEEDS_DIMENSIONS,
    SURROGATE,
    WITH_COMPLEX,
    Op,
    matrices,
    sample,
    unary,
)

_IDENTITY: dict[str, Any] = {"theme": "gradient", "surrogate": True, "skips": SURROGATE}
_CLIPPED: dict[str, str] = {
    **SURROGATE,
    "reverse over forward": "a clip is not linear, so no rule for tangents agrees with it",
    "hessian by hvp columns": "reverse-over-reverse clips once more than the oracle's tangents do",
}

GRADIENT = (
    unary(
        "straight_through",
        "sign(x), heaviside(x) or round(x), with the gradient of x",
        ops.straight_through,
        references.straight_through,
        samples=matrices(**{kind: {"kind": kind} for kind in ("sign", "heaviside", "round")}),
        smooth=False,
        **_IDENTITY,
    ),
    unary(
        "scale_gradient",
        "x, gradient scaled",
        ops.scale_gradient,
        references.scale_gradient,
        samples=matrices(half={"scale": 0.5}, zero={"scale": 0}),
        dtypes=WITH_COMPLEX,
        **_IDENTITY,
    ),
    unary(
        "reverse_gradient",
        "x, gradient reversed",
        ops.reverse_gradient,
        references.reverse_gradient,
        samples=matrices(plain={}, scaled={"scale": 0.3}),
        dtypes=WITH_COMPLEX,
        **_IDENTITY,
    ),
    unary(
        "clip_gradient",
        "x, gradient clipped",
        ops.clip_gradient,
        references.clip_gradient,
        samples=matrices(bound={"bound": 0.4}),
        theme="gradient",
        surrogate=True,
        skips=_CLIPPED,
    ),
    unary(
        "stop_gradient",
        "x, no gradient",
        ops.stop_gradient,
        references.stop_gradient,
        theme="gradient",
        dtypes=WITH_COMPLEX,
        surrogate=True,
        skips={
            **SURROGATE,
            "hessian by hvp columns": "hvp refuses a function without a graph",
            "undefined gradients": "no gradient comes back to it at all",
        },
    ),
    Op(
        "clipped_gradient_linear",
        "gradient",
        "x W^T, gradient to x clipped",
        ops.clipped_gradient_linear,
        references.clipped_gradient_linear,
        (sample("rows", lambda n: (n(2, 3), n(4, 3)), bound=0.5),),
        corners={"zero size": sample("no rows", lambda n: (n(0, 3), n(4, 3)), bound=0.5)},
        surrogate=True,
        skips={
            **_CLIPPED,
            **NEEDS_DIMENSIONS,
            "broadcasting": "leading dimensions as for linear; none stretch",
        },
    ),
)
