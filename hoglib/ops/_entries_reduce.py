"""The catalogue of the theme reduce."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from hoglib import ops
from hoglib.ops import _references as references
from hoglib.ops._entry import (
    ONE_TENSOR,
    WITH_COMPLEX,
    Op,
    sample,
)


def _reduction(
    name: str,
    formula: str,
    function: Callable[..., Any],
    reference: Callable[..., Any],
    **others: Any,
) -> Op:
    return Op(
        name,
        "reduce",
        formula,
        function,
        reference,
        (
            sample("rows of a matrix", lambda n: (n(2, 3), 1)),
            sample("two dimensions kept", lambda n: (n(2, 3, 2), (0, -1)), keepdim=True),
            sample("all dimensions", lambda n: (n(2, 2), None)),
        ),
        corners={
            "zero size": sample("zero size", lambda n: (n(2, 0), 0)),
            "no dimensions": sample("no dimensions", lambda n: (n(), -1)),
        },
        skips=ONE_TENSOR,
        **others,
    )


_SAMPLES_OF_CLASSES = (
    sample("rows", lambda n: (n(3, 4), torch.tensor([1, 3, 0]))),
    sample("one row", lambda n: (n(4), torch.tensor(2)), reduction="sum"),
    sample("pixels", lambda n: (n(2, 3, 2), torch.tensor([[0, 2], [1, 1]])), reduction="none"),
    sample(
        "ignored row and smoothing",
        lambda n: (n(3, 4), torch.tensor([1, -100, 0])),
        label_smoothing=0.2,
    ),
    sample("ignored class", lambda n: (n(3, 4), torch.tensor([1, 2, 0])), ignore_index=2),
    sample("probabilities", lambda n: (n(2, 3), n(2, 3) ** 2), label_smoothing=0.1),
)

REDUCE = (
    _reduction("sum", "sum_i x_i", ops.sum, torch.sum, dtypes=WITH_COMPLEX),
    _reduction("mean", "sum_i x_i / n", ops.mean, torch.mean, dtypes=WITH_COMPLEX),
    _reduction("amax", "max_i x_i", ops.amax, references.amax, smooth=False),
    _reduction(
        "logsumexp", "log sum_i e^x_i", ops.logsumexp, references.logsumexp, dtypes=WITH_COMPLEX
    ),
    Op(
        "softmax_cross_entropy",
        "reduce",
        "sum_c q_c (log sum_d e^z_d - z_c)",
        ops.softmax_cross_entropy,
        F.cross_entropy,
        _SAMPLES_OF_CLASSES,
        corners={
            "zero size": sample(
                "no rows", lambda n: (n(0, 3), torch.zeros(0, dtype=torch.long)), reduction="sum"
            )
        },
        skips={
            "no dimensions": "needs a dimension of classes",
            "broadcasting": "logits and target have one shape for the rows",
        },
    ),
)
