"""Every op with its reference of plain torch operations and samples.

The test matrix runs each of its cells on each sample of each entry, or reads here why not.
"""

from tests.ops.opinfo import indexing, losses, matrices, pointwise, products
from tests.ops.opinfo.op_info import OpInfo, SampleInput

__all__ = ["CATALOGUE", "OpInfo", "SampleInput"]

CATALOGUE = (*pointwise.OPS, *products.OPS, *losses.OPS, *matrices.OPS, *indexing.OPS)
