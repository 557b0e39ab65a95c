"""The catalogue of the theme linear."""

from typing import Any

import torch
import torch.nn.functional as F

from hoglib import ops
from hoglib.ops import _references as references
from hoglib.ops._entry import (
    NEEDS_DIMENSIONS,
    WITH_COMPLEX,
    Op,
    broadcast,
    same_shapes,
    sample,
)


def _linear_act(name: str, acts: list[str], **others: Any) -> Op:
    return Op(
        name,
        "linear",
        "act(x W^T + b)",
        ops.linear_act,
        references.linear_act,
        tuple(sample(act, lambda n: (n(2, 3), n(4, 3), n(4)), act=act) for act in acts),
        corners={"zero size": sample("no rows", lambda n: (n(0, 3), n(4, 3), n(4)), act=acts[0])},
        skips={
            **NEEDS_DIMENSIONS,
            "broadcasting": "leading dimensions as for linear; none stretch",
        },
        **others,
    )


LINEAR = (
    Op(
        "matmul",
        "linear",
        "A B",
        ops.matmul,
        torch.matmul,
        (
            sample("two matrices", lambda n: (n(2, 3), n(3, 4))),
            sample("batch of matrices", lambda n: (n(2, 2, 3), n(2, 3, 2))),
            sample("batch times matrix", lambda n: (n(2, 2, 3), n(3, 2))),
            sample("two vectors", lambda n: (n(3), n(3))),
            sample("matrix times vector", lambda n: (n(2, 2, 3), n(3))),
            sample("vector times batch", lambda n: (n(3), n(2, 3, 2))),
        ),
        corners={
            "zero size": sample("zero size", lambda n: (n(2, 2, 0), n(2, 0, 3))),
            "broadcasting": broadcast((2, 1, 2, 3), (3, 3, 2)),
        },
        dtypes=WITH_COMPLEX,
        skips=NEEDS_DIMENSIONS,
    ),
    Op(
        "linear",
        "linear",
        "x W^T + b",
        ops.linear,
        F.linear,
        (
            sample("rows", lambda n: (n(2, 3), n(4, 3), n(4))),
            sample("without bias", lambda n: (n(2, 3), n(4, 3), None)),
            sample("one row", lambda n: (n(3), n(2, 3), n(2))),
            sample("two leading dimensions", lambda n: (n(2, 2, 3), n(2, 3), n(2))),
        ),
        corners={"zero size": sample("no rows", lambda n: (n(0, 3), n(4, 3), n(4)))},
        dtypes=WITH_COMPLEX,
        skips={
            **NEEDS_DIMENSIONS,
            "broadcasting": "leading dimensions have samples; none stretch",
        },
    ),
    _linear_act("linear_act", ["tanh", "sigmoid", "swish"], dtypes=WITH_COMPLEX),
    _linear_act("linear_act, real only", ["relu", "softplus"], smooth=False),
    Op(
        "bias_add",
        "linear",
        "x + b over channels",
        ops.bias_add,
        references.bias_add,
        (
            sample("channels second", lambda n: (n(2, 3, 2), n(3))),
            sample("channels last", lambda n: (n(2, 3), n(3)), dim=-1),
            sample("channels first", lambda n: (n(2, 3), n(2)), dim=0),
        ),
        corners={"zero size": sample("no rows", lambda n: (n(0, 3), n(3)))},
        dtypes=WITH_COMPLEX,
        skips={**NEEDS_DIMENSIONS, "broadcasting": "the bias has the size of its dimension"},
    ),
    Op(
        "mul",
        "linear",
        "x p",
        ops.mul,
        torch.mul,
        (
            sample("two matrices", lambda n: (n(2, 3), n(2, 3))),
            sample("by a number", lambda n: (n(2, 3), -1.5)),
        ),
        corners={**same_shapes(2), "broadcasting": broadcast((2, 1), (4, 1, 3))},
        dtypes=WITH_COMPLEX,
    ),
)
