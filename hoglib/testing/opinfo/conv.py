"""Convolutions."""

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F

from hoglib import ops
from hoglib.testing.opinfo.op_info import (
    NEEDS_DIMENSIONS,
    WITH_COMPLEX,
    OpInfo,
    SampleInput,
    normals,
    op_info,
    sample_input,
)

_SKIPS = {**NEEDS_DIMENSIONS, "broadcasting": "channels and kernel sizes must fit; none stretch"}


def _conv(
    name: str,
    function: Callable[..., Any],
    reference: Callable[..., Any],
    samples: tuple[SampleInput, ...],
    empty: SampleInput,
) -> OpInfo:
    return op_info(
        name, "conv", "b[o] + sum over c, k of w[o, c, k] x[c, t s + k d - p]", reference, function
    ).on(*samples, zero_size=empty, dtypes=WITH_COMPLEX, skips=_SKIPS)


OPS = (
    _conv(
        "conv1d",
        ops.conv1d,
        F.conv1d,
        (
            sample_input("plain", normals((2, 2, 5), (3, 2, 3), (3,))),
            sample_input(
                "no bias, stride that leaves a rest", normals((1, 2, 6), (2, 2, 3)), stride=2
            ),
            sample_input("unbatched, padded", normals((2, 4), (2, 2, 2), (2,)), padding=1),
            sample_input("same", normals((1, 2, 4), (2, 2, 3), (2,)), padding="same", dilation=2),
            sample_input("depthwise", normals((1, 3, 4), (6, 1, 2), (6,)), groups=3),
        ),
        sample_input("no samples", normals((0, 2, 5), (3, 2, 3), (3,))),
    ),
    _conv(
        "conv2d",
        ops.conv2d,
        F.conv2d,
        (
            sample_input("plain", lambda n: (n(2, 2, 3, 4), n(2, 2, 2, 3) / 4, n(2))),
            sample_input(
                "all options",
                lambda n: (n(1, 4, 4, 5), n(2, 2, 2, 3) / 4, n(2)),
                stride=(2, 1),
                padding=(1, 2),
                dilation=(2, 1),
                groups=2,
            ),
            sample_input("unbatched", normals((2, 3, 3), (2, 2, 2, 2))),
        ),
        sample_input("no samples", normals((0, 2, 4, 4), (3, 2, 2, 2), (3,))),
    ),
    _conv(
        "conv3d",
        ops.conv3d,
        F.conv3d,
        (
            sample_input("plain", normals((1, 2, 2, 3, 2), (2, 2, 2, 2, 1), (2,))),
            sample_input(
                "grouped, padded",
                normals((1, 2, 2, 2, 2), (2, 1, 2, 1, 2)),
                groups=2,
                padding=(0, 1, 0),
            ),
        ),
        sample_input("no samples", normals((0, 1, 2, 2, 2), (1, 1, 1, 2, 2), (1,))),
    ),
)
