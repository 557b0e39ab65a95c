"""Ops that act on gradients."""

from typing import Any

from hoglib.testing.opinfo import references
from hoglib.testing.opinfo.op_info import (
    NEEDS_DIMENSIONS,
    SURROGATE,
    WITH_COMPLEX,
    elementwise_info,
    matrix_samples,
    normals,
    op_info,
    sample_input,
)

_IDENTITY: dict[str, Any] = {"theme": "gradient", "surrogate": True, "skips": SURROGATE}
_CLIPPED: dict[str, str] = {
    **SURROGATE,
    "reverse over forward": "a clip is not linear, so no rule for tangents agrees with it",
    "hessian by hvp columns": "reverse-over-reverse clips once more than the oracle's tangents do",
    "plain operations": "those of Taylor mode, whose tangents are not clipped",
}

OPS = (
    elementwise_info(
        "straight_through",
        "sign(x), heaviside(x) or round(x), with the gradient of x",
        references.straight_through,
    ).on(
        *matrix_samples(**{kind: {"kind": kind} for kind in ("sign", "heaviside", "round")}),
        smooth=False,
        **_IDENTITY,
    ),
    elementwise_info("scale_gradient", "x, gradient scaled", references.scale_gradient).on(
        *matrix_samples(half={"scale": 0.5}, zero={"scale": 0}), dtypes=WITH_COMPLEX, **_IDENTITY
    ),
    elementwise_info("reverse_gradient", "x, gradient reversed", references.reverse_gradient).on(
        *matrix_samples(plain={}, scaled={"scale": 0.3}), dtypes=WITH_COMPLEX, **_IDENTITY
    ),
    elementwise_info(
        "clip_gradient", "x, gradient clipped", references.clip_gradient, theme="gradient"
    ).on(*matrix_samples(bound={"bound": 0.4}), surrogate=True, skips=_CLIPPED),
    elementwise_info(
        "stop_gradient", "x, no gradient", references.stop_gradient, theme="gradient"
    ).on(
        dtypes=WITH_COMPLEX,
        surrogate=True,
        skips={
            **SURROGATE,
            "hessian by hvp columns": "hvp refuses a function without a graph",
            "undefined gradients": "no gradient comes back to it at all",
        },
    ),
    op_info(
        "clipped_gradient_linear",
        "gradient",
        "x W^T, gradient to x clipped",
        references.clipped_gradient_linear,
    ).on(
        sample_input("rows", normals((2, 3), (4, 3)), bound=0.5),
        zero_size=normals((0, 3), (4, 3)),
        surrogate=True,
        skips={
            **_CLIPPED,
            **NEEDS_DIMENSIONS,
            "broadcasting": "leading dimensions as for linear; none stretch",
        },
    ),
)
