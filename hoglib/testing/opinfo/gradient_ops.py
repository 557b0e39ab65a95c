"""Ops that act on gradients."""

from typing import Any

from hoglib import ops
from hoglib.testing.opinfo import references
from hoglib.testing.opinfo.op_info import (
    NEEDS_DIMENSIONS,
    SURROGATE,
    WITH_COMPLEX,
    OpInfo,
    matrix_samples,
    sample_input,
    unary_info,
)

_IDENTITY: dict[str, Any] = {"theme": "gradient", "surrogate": True, "skips": SURROGATE}
_CLIPPED: dict[str, str] = {
    **SURROGATE,
    "reverse over forward": "a clip is not linear, so no rule for tangents agrees with it",
    "hessian by hvp columns": "reverse-over-reverse clips once more than the oracle's tangents do",
    "plain operations": "those of Taylor mode, whose tangents are not clipped",
}

OPS = (
    unary_info(
        "straight_through",
        "sign(x), heaviside(x) or round(x), with the gradient of x",
        ops.straight_through,
        references.straight_through,
        samples=matrix_samples(**{kind: {"kind": kind} for kind in ("sign", "heaviside", "round")}),
        smooth=False,
        **_IDENTITY,
    ),
    unary_info(
        "scale_gradient",
        "x, gradient scaled",
        ops.scale_gradient,
        references.scale_gradient,
        samples=matrix_samples(half={"scale": 0.5}, zero={"scale": 0}),
        dtypes=WITH_COMPLEX,
        **_IDENTITY,
    ),
    unary_info(
        "reverse_gradient",
        "x, gradient reversed",
        ops.reverse_gradient,
        references.reverse_gradient,
        samples=matrix_samples(plain={}, scaled={"scale": 0.3}),
        dtypes=WITH_COMPLEX,
        **_IDENTITY,
    ),
    unary_info(
        "clip_gradient",
        "x, gradient clipped",
        ops.clip_gradient,
        references.clip_gradient,
        samples=matrix_samples(bound={"bound": 0.4}),
        theme="gradient",
        surrogate=True,
        skips=_CLIPPED,
    ),
    unary_info(
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
    OpInfo(
        "clipped_gradient_linear",
        "gradient",
        "x W^T, gradient to x clipped",
        ops.clipped_gradient_linear,
        references.clipped_gradient_linear,
        (sample_input("rows", lambda n: (n(2, 3), n(4, 3)), bound=0.5),),
        corners={"zero size": sample_input("no rows", lambda n: (n(0, 3), n(4, 3)), bound=0.5)},
        surrogate=True,
        skips={
            **_CLIPPED,
            **NEEDS_DIMENSIONS,
            "broadcasting": "leading dimensions as for linear; none stretch",
        },
    ),
)
