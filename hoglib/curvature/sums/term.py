"""A term of a sum over data: the loss at a batch, and its share in the sum."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, final

from torch import Tensor

from hoglib._core.problem import Policy, Problem
from hoglib._core.substrate import autograd
from hoglib._core.substrate.placement import Placement
from hoglib.curvature.algebra.linear_operator import ProgressBar
from hoglib.curvature.algebra.vector_space import Space
from hoglib.curvature.batches.data import Piece
from hoglib.ring import ring


@final
class Term(NamedTuple):
    """The loss at a batch, and the parameters as they are now."""

    policy: Policy
    loss: Any
    space: Space
    bar: ProgressBar
    placement: Placement  # with the weight of this batch
    piece: Piece = Piece(None, 1.0, 0)
    share: float = 1.0  # in the sum over the data
    first: bool = True  # of this process in the pass

    @property
    def batch(self) -> Any:
        """The batch."""
        return self.piece.batch

    def of(self, batch: Any) -> "Term":
        """The loss at another batch."""
        return self._replace(piece=self.piece._replace(batch=batch))

    def problem(self) -> Problem:
        """The loss at the batch as a function of the parameters."""
        structure, leaves = self.space.structure, self.space.leaves()
        where = self.placement, "loss(params, batch)"
        return Problem(self.policy, self.loss, structure, leaves, (self.piece.batch,), *where)

    def ring(self, *, around_graph: bool = False) -> ring:
        """What stands around the evaluation; custom Functions are examined once a pass."""
        return ring(self.policy, self.loss, examine=False, around_graph=around_graph)

    @contextmanager
    def entered(self) -> Iterator[Problem]:
        """The problem, inside the ring."""
        with self.ring() as blocks:
            yield self.problem().entered(blocks)

    def value(self) -> Tensor:
        """The loss, without a graph."""
        with self.entered() as problem:
            return autograd.without_graph(lambda: problem(*problem.leaves))

    def advance(self) -> None:
        """Count a product, or a gradient, in the progress bar."""
        self.bar.advance(self.piece.fraction)
