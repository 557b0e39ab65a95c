"""What the operators over data share: a matrix at each batch, summed; kept where it is one batch."""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hoglib import _arguments as arguments
from hoglib import _functorch, _tree
from hoglib._differences import in_double
from hoglib._graph import held_bytes
from hoglib._leaves import Vector
from hoglib._recording import plainly, recordable, recording
from hoglib._substitution import Standing, lingering, standing_again
from hoglib.capture._capturing import runs_elsewhere
from hoglib.curvature._compiled import backend_of, linearised
from hoglib.curvature._data import Size
from hoglib.curvature._matrices import DIFFERENCES, Matrix
from hoglib.curvature._processes import Report
from hoglib.curvature._routes import Call, Linearised
from hoglib.curvature._summed import Summed

Tree = Any
LIMIT = 2 * 2**30


class _Kept(NamedTuple):
    """A matrix at one point whose graph stays."""

    point: Linearised
    share: float  # in the sum over the data
    standing: Standing  # what the model held then, for what backward runs again


class OverData(Summed):
    """A curvature matrix of a loss, averaged or summed over batches."""

    def __init__(
        self,
        matrix: Matrix,
        loss: Any,
        params: Tree,
        data: Any,
        reduction: str,
        batch_size: Size | None,
        micro_batch: int | None,
        memory_limit: float,
        check_deterministic: bool,
        stand_ins: bool,
        progress: bool,
        compile: bool | str,
        processes: str | None,
    ) -> None:
        self._matrix = matrix
        self._backend = backend_of(type(self).__name__, compile, matrix)
        super().__init__(
            matrix.check(loss), params, data, reduction, batch_size, micro_batch,
            check_deterministic, matrix.draws, stand_ins, progress, processes,
        )  # fmt: skip
        if matrix.mode == DIFFERENCES:
            self._loss = matrix.in_double(loss)
        self._limit = arguments.number("memory_limit", memory_limit, minimum=0)
        self._kept: _Kept | None = None

    def _products(self, rows: Tensor) -> Tensor:
        if _functorch.transforms_active():
            raise arguments.NotSupported(
                f"{self}: expected to be applied outside of torch.func transforms, got a call inside; "
                "use the function hvp, ggn_vp or fisher_vp there."
            )
        # a process may have nothing to put there
        make = torch.empty if self._processes.alone else torch.zeros
        total = make(rows.shape, dtype=self.dtype, device=self.device)
        with self._bar.over("@", len(rows)):
            found = self._everywhere(partial(self._multiply, rows, total), total, rows)
        if self._mean and found.weight != 1:
            total /= found.weight
        where = self._space.first_not_finite(total)
        if where and bool(rows.isfinite().all()):
            raise arguments.NotFinite(
                f"{type(self).__name__} @ v: expected finite products, got NaN or infinity in {where}, "
                "where the loss is finite; look for a square root, norm or logarithm at zero."
            )
        self._symmetry.saw(rows, total)
        return total

    def _multiply(self, rows: Tensor, total: Tensor) -> Report:
        """Puts the products of this process' data into total."""
        if self._kept is None:
            return self._over_data(partial(self._add_batch, rows, total))
        with recording(), standing_again(self._kept.standing):
            self._part, share = 1.0, self._kept.share
            value = self._apply(self._kept.point, rows, total, share, keep=True, first=True)
        loss = float(value.detach())
        return Report(pieces=1, weight=share, loss=share * loss, largest=abs(loss))

    def _add_batch(
        self, rows: Tensor, total: Tensor, batch: Any, index: int, share: float
    ) -> Tensor:
        """Adds share times the products of the rows at one batch to total; gives the loss there."""
        one = self._batches.whole
        compiled = bool(self._backend) and not runs_elsewhere()
        # what is compiled enters these itself when it is captured
        around = recording() if compiled else self._context()
        with around, lingering() as places:
            leaves, batch = recordable((self._space.leaves(), batch))
            if self._matrix.mode == DIFFERENCES:
                leaves, batch = in_double((leaves, batch))
            call = Call(type(self).__name__)
            if compiled:
                several = (one and self._limit > 0) or len(rows) > 1
                structure = _tree.flatten(self._space.params)[1]
                point = linearised(
                    self._loss, self._matrix, call, self._stand_ins, self._backend, leaves,
                    structure, (batch,), several,
                )  # fmt: skip
                keep = one and several
            else:
                point = self._at(leaves, batch, index, call, one or len(rows) > 1)
                keep = one and bool(point.graph) and held_bytes(list(point.graph)) <= self._limit
            value = self._apply(point, rows, total, share, keep, first=index == 0)
            if compiled:
                keep = keep and 0 < point.compiled.kept.bytes() <= self._limit
            standing = places.standing()
        unused = point.compiled.unused if compiled else point.unused
        if unused is not None:
            now = set(unused)
            self._unused = now if self._unused is None else self._unused & now
        if keep:
            self._kept = _Kept(point, share, standing)
            if self._check:  # there will be no other pass, and the graph holds what it drew
                self._seen.saw(batch, value)
                self._seen.again()
                with self._context():
                    value = plainly(lambda: self._value(leaves, batch))
        return value

    def _apply(
        self,
        point: Linearised,
        rows: Tensor,
        total: Tensor,
        share: float,
        keep: bool,
        first: bool,
    ) -> Tensor:
        value = torch.zeros(())
        row = torch.empty(rows.shape[1:], dtype=rows.dtype, device=rows.device)
        for j, (given, sums) in enumerate(zip(rows, total, strict=True)):
            # matrix products with vectors that lie strided take half as long again
            vector = self._space.split(given if given.is_contiguous() else row.copy_(given))
            if self._matrix.mode == DIFFERENCES:
                vector = in_double(vector)
            value, product = point.apply(vector, keep or j + 1 < len(rows))
            self._space.add(sums, product, share, first)
            self._bar.advance(self._part)
        return value

    def _at(self, leaves: Vector, batch: Any, index: int, call: Call, several: bool) -> Linearised:
        return self._matrix.at(self._loss, self._space.params_of, (batch,), leaves, call, several)

    def _notice_changes(self) -> bool:
        changed = super()._notice_changes()
        if changed:
            self._kept = None
        return changed

    def __getstate__(self) -> dict[str, Any]:
        """A copy keeps no graph, which cannot be copied."""
        return {**vars(self), "_kept": None, "_was": [object()]}
