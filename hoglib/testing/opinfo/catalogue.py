"""Every op with its formula, its reference of plain torch operations, and samples.

The test matrix runs each of its cells on each sample of each entry, or reads here why not.
"""

from hoglib.testing.opinfo import (
    conv,
    gradient_ops,
    grid_sample,
    indexing,
    linalg,
    linear,
    losses,
    makers,
    norms,
    pointwise,
    reductions,
)

__all__ = ["CATALOGUE"]

CATALOGUE = (
    *pointwise.OPS,
    *linear.OPS,
    *conv.OPS,
    *reductions.OPS,
    *losses.OPS,
    *norms.OPS,
    *linalg.OPS,
    *indexing.OPS,
    *grid_sample.OPS,
    *gradient_ops.OPS,
    *makers.OPS,
)
