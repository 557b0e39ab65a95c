"""Every op with its formula, its reference of plain torch operations, and samples.

The test matrix runs each of its cells on each sample of each entry, or reads here why not.
"""

from hoglib.testing.opinfo.entry import Op, Sample
from hoglib.testing.opinfo.gradient_ops import GRADIENT, OTHER
from hoglib.testing.opinfo.indexing import BY_INDEX, EMBEDDING_BAG, GRID, SPARSE
from hoglib.testing.opinfo.linalg import LINALG
from hoglib.testing.opinfo.linear import ATTENTION, CONV, LINEAR
from hoglib.testing.opinfo.losses import CTC, REGRESSION
from hoglib.testing.opinfo.norms import NORMS
from hoglib.testing.opinfo.pointwise import GATES, POINTWISE
from hoglib.testing.opinfo.reductions import DISTANCE, REDUCE

__all__ = ["CATALOGUE", "Op", "Sample"]

CATALOGUE = (
    *POINTWISE,
    *LINEAR,
    *REDUCE,
    *CONV,
    *GRADIENT,
    *OTHER,
    *ATTENTION,
    *BY_INDEX,
    *CTC,
    *DISTANCE,
    *EMBEDDING_BAG,
    *GATES,
    *GRID,
    *LINALG,
    *NORMS,
    *REGRESSION,
    *SPARSE,
)
