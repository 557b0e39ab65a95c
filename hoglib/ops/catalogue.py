"""Every op with its formula, its reference of plain torch operations, and samples.

The test matrix runs each of its cells on each sample of each entry, or reads here why not.
"""

from hoglib.ops._entries_attention import ATTENTION
from hoglib.ops._entries_by_index import BY_INDEX
from hoglib.ops._entries_conv import CONV
from hoglib.ops._entries_ctc import CTC
from hoglib.ops._entries_distance import DISTANCE
from hoglib.ops._entries_embedding_bag import EMBEDDING_BAG
from hoglib.ops._entries_gates import GATES
from hoglib.ops._entries_gradient import GRADIENT
from hoglib.ops._entries_grid import GRID
from hoglib.ops._entries_linalg import LINALG
from hoglib.ops._entries_linear import LINEAR
from hoglib.ops._entries_norms import NORMS
from hoglib.ops._entries_other import OTHER
from hoglib.ops._entries_pointwise import POINTWISE
from hoglib.ops._entries_reduce import REDUCE
from hoglib.ops._entries_regression import REGRESSION
from hoglib.ops._entries_sparse import SPARSE
from hoglib.ops._entry import Op, Sample

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
