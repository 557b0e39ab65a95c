"""Custom Functions with verified derivatives: tensors first, differentiable to any order."""

from hoglib._core.remat.recomputation import remat as remat
from hoglib.ops._attention import *
from hoglib.ops._cross_entropy import *
from hoglib.ops._define import define as define
from hoglib.ops._distance import *
from hoglib.ops._external import external as external
from hoglib.ops._grid_sample import grid_sample as grid_sample
from hoglib.ops._indexing import *
from hoglib.ops._linalg import *
from hoglib.ops._losses import *
from hoglib.ops._norms import *
from hoglib.ops._pointwise import *
from hoglib.ops._products import *

__all__ = [name for name in dir() if not name.startswith("_")]
