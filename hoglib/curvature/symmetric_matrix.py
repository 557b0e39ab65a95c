"""What the matrix-free algorithms need of a matrix: its size, and products with vectors."""

from typing import Protocol

import torch
from torch import Tensor

from hoglib.curvature.vector_space import Space


class SymmetricMatrix(Protocol):
    """A symmetric matrix [P, P] that is known by its products; `LinearOperator` is one."""

    count: int  # products with one vector so far

    @property
    def space(self) -> Space: ...

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    def apply(self, rows: Tensor) -> Tensor:
        """The product with each row of [k, P], as rows."""
        ...

    def to_dense(self) -> Tensor: ...
