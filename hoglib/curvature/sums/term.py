"""One term of a sum over data: the loss at a batch, and its factor in the sum."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, final

from torch import Tensor

from hoglib._core.messages.progress import ProgressBar
from hoglib._core.problem import Policy, Problem
from hoglib._core.substrate import autograd
from hoglib._core.substrate.placement import Placement
from hoglib.curvature.algebra.vector_space import Space
from hoglib.curvature.batches.data import Piece
from hoglib.ring import ring


@final
class Term(NamedTuple):
    """The loss at a batch, with the options and the parameters to evaluate it.

    `DatasetSum.terms` makes one for each batch. Operators and watchers hold `at`, a term without a
    batch.
    """

    policy: Policy  # the options of the caller
    loss: Any
    space: Space  # of the parameters
    bar: ProgressBar
    placement: Placement  # its weight is this process's fraction of the batch's weight
    piece: Piece = Piece(None, 1.0, 0)  # the batch, or a micro-batch
    share: float = 1.0  # the factor of this term in the sum over the data
    first: bool = True  # this process's first term in a pass: it may overwrite the total

    @property
    def batch(self) -> Any:
        """The batch."""
        return self.piece.batch

    def of(self, batch: object) -> "Term":
        """The term with another batch."""
        return self._replace(piece=self.piece._replace(batch=batch))

    def problem(self) -> Problem:
        """The loss at the batch as a function of the parameters."""
        leaves, structure = self.space.flatten()
        where = self.placement, "loss(params, batch)"
        return Problem(self.policy, self.loss, structure, leaves, (self.piece.batch,), *where)

    def ring(self, *, around_graph: bool = False) -> ring:
        """The context of an evaluation. `DatasetSum.fold` examines custom Functions, not this ring."""
        return ring(self.policy, self.loss, examine=False, around_graph=around_graph)

    @contextmanager
    def entered(self) -> Iterator[Problem]:
        """Enter the ring; yields the problem, with its recomputed blocks."""
        with self.ring() as blocks:
            yield self.problem().entered(blocks)

    def value(self) -> Tensor:
        """The loss, without a graph."""
        with self.entered() as problem:
            return autograd.without_graph(lambda: problem(*problem.leaves))

    def advance(self, count: int = 1) -> None:
        """Advance the progress bar by this batch, of `count` products or one gradient."""
        self.bar.advance(count * self.piece.fraction)
