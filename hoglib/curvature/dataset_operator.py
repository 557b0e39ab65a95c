"""A sum over data: of a loss, of its gradient, and of what else is computed batch by batch.

The data is one batch, or many, in one process or in several that share it.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from math import fsum
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hoglib._core import pytree, torch_internals, validation
from hoglib._core.autograd import (
    Vector,
    check_uses_given_params,
    clone_inference_tensors,
    fresh_leaves,
    grad_enabled,
    materialize_grads,
    translate_errors,
    without_graph,
)
from hoglib._core.closures import StateFingerprint
from hoglib._core.finite_differences import to_double
from hoglib._core.gradient_graph import graph_bytes, graph_summary
from hoglib._core.swap import PatchState, keep_swapped, restored
from hoglib.capture.capturing import runs_elsewhere
from hoglib.curvature.compiled import backend_of, linearised
from hoglib.curvature.data import Batches, Size
from hoglib.curvature.kinds import DIFFERENCES, CurvatureKind
from hoglib.curvature.likelihood import check_reduction
from hoglib.curvature.linear_operator import LinearOperator
from hoglib.curvature.processes import (
    Processes,
    Report,
    beside,
    of_rows,
    of_tensors,
    refuse_split,
    refuse_wrapped,
    together,
)
from hoglib.curvature.reproducibility import Determinism, Symmetry, close
from hoglib.curvature.routes import Call, LinearMap
from hoglib.curvature.vector_space import Space
from hoglib.errors import ArgumentTypeError, ArgumentValueError, NonFiniteError, UnsupportedError
from hoglib.stand_ins.mode import stand_ins_if

Tree = Any


class Summed(LinearOperator):
    """An operator that is a mean or a sum over batches, with the loss and the gradient that are too."""

    def __init__(
        self,
        loss: Any,
        params: Tree,
        data: Any,
        reduction: str,
        batch_size: Size | None,
        micro_batch: int | None,
        check_deterministic: bool,
        fixed_batches: bool,
        stand_ins: bool,
        progress: bool,
        processes: str | None,
    ) -> None:
        self._processes = Processes(type(self).__name__, processes, data)
        first = self._processes.rank == 0  # which shows the bar for all
        super().__init__(Space(params), validation.flag("progress", progress) and first)
        if isinstance(loss, nn.Module):
            raise ArgumentTypeError(
                f"loss: expected a function of (params, batch), got the module {type(loss).__name__}; "
                "make one with `hoglib.functional_loss(model, criterion)`."
            )
        refuse_wrapped(getattr(loss, "model", None))
        refuse_split(self.space.leaves())
        validation.one_of("reduction", reduction, ["mean", "sum"])
        check_reduction(loss, reduction, besides={"batchmean": "mean"})
        self._loss, self._mean = loss, reduction == "mean"
        self._batches = Batches(data, self.device, batch_size, micro_batch, self._processes)
        # what it weighs is no matter then
        self._at_once = self._batches.whole and self._processes.alone
        self._stand_ins = validation.flag("stand_ins", stand_ins)
        self._check = validation.flag("check_deterministic", check_deterministic)
        self._seen = Determinism(loss, self._check, fixed_batches)
        self._symmetry = Symmetry(type(self).__name__, self._check)
        data_at_hand = self._batches.at_hand if self._batches.whole else list
        self._origin, self._was = (
            StateFingerprint(loss, self.space.leaves, data_at_hand),
            [object()],
        )
        self._unused: set[int] | None = None
        self._splits_seen = False
        self._part = 1.0  # of a pass, that the batch under way is
        self._of_loss = self.dtype  # the loss's own, once it is known
        self._seed = 0  # of draws

    def gradient(self) -> tuple[Tensor, Tree]:
        """The loss over the data and its gradient, in the structure of params."""
        with torch.inference_mode(False):
            row = torch.zeros(1, self.space.size, dtype=self.dtype, device=self.device)

        def add(batch: Any, index: int, share: float) -> Tensor:
            leaves, batch = clone_inference_tensors((self.space.leaves(), batch))
            own = fresh_leaves(leaves, False)
            with self._context(), keep_swapped():
                value = self._value(own, batch)
                check_uses_given_params(graph_summary(value), leaves, "gradient")
                with translate_errors("gradient"):
                    parts = torch.autograd.grad(value, own, allow_unused=True)
            self.space.add(row[0], materialize_grads(list(parts), own), share)
            self._bar.advance(self._part)
            return value

        with self._bar.over("gradient", 1):
            found = self._everywhere(partial(self._over_data, add), row)
        with torch.inference_mode(False), torch.no_grad():
            return self._total(found), self.space.tree(row[0] / self._weight(found))

    def value(self) -> Tensor:
        """The loss over the data."""

        def add(batch: Any, index: int, share: float) -> Tensor:
            self._bar.advance(self._part)
            return self._loss_of(batch)

        with torch.inference_mode(False), self._bar.over("value", 1):
            nothing = torch.zeros(1, 0, dtype=self.dtype, device=self.device)
            return self._total(self._everywhere(partial(self._over_data, add), nothing))

    def _weight(self, found: Report) -> float:
        return found.weight if self._mean else 1.0

    def _total(self, found: Report) -> Tensor:
        value = found.loss / self._weight(found)
        return torch.tensor(value, dtype=self._of_loss, device=self.device)

    def _everywhere(
        self, go: Callable[[], Report], total: Tensor, rows: Tensor | None = None
    ) -> Report:
        """What all processes went through, where each adds its part to total by `go`."""
        if self._processes.alone:
            self._notice_changes()
            found = go()
        else:
            found = self._with_others(go, total, rows)
        if not found.pieces:
            raise ArgumentValueError(
                "data: expected at least one batch, got none; a DataLoader with drop_last=True and "
                "fewer examples than a batch gives none."
            )
        # of all processes' losses, of which the coarsest is the parameters'
        dtype = self._of_loss if self._processes.alone else self.dtype
        if found.parted:
            self._check_split(found.whole, found, dtype)
        self._seen.finish(found.loss / found.weight, found.largest, dtype)
        self._splits_seen = True
        self._warn_of_unused()
        return found

    def _with_others(self, go: Callable[[], Report], total: Tensor, rows: Tensor | None) -> Report:
        report, error = Report(), None
        count = len(pytree.leaves(self.space.params))
        used = torch.zeros(count)  # by how many processes, each leaf
        try:
            changed = self._notice_changes()
            leaves = self.space.leaves()
            report = go()._replace(
                changed=changed,
                seed=self._seed,
                params=of_tensors(leaves),
                model=of_tensors(beside(self._loss, leaves)),
                vectors=0.0 if rows is None else of_rows(rows),
                data=self._batches.seen,
            )
            if report.pieces:
                used[[i for i in range(count) if i not in (self._unused or ())]] = 1
        except Exception as caught:  # the others wait for this process
            error = caught
        with torch.inference_mode(False), torch.no_grad():
            found = together(self._processes.add_up(total, used, report, error))
        if found.changed:
            self._seen.forget_total()
            self._symmetry.forget()
        if self._unused:
            self._unused = {i for i in self._unused if not used[i]}
        return found

    def _over_data(self, add: Callable[[Any, int, float], Tensor]) -> Report:
        """`add(batch, number, share)`, which gives the loss, for each batch of this process."""
        self._seen.start()
        shares: list[float] = []
        losses: list[float] = []
        whole, parted = 0.0, False
        for portion in self._batches:
            first = len(shares)
            self._part = 1 / (max(len(self._batches), 1) * max(len(portion.pieces), 1))
            for piece, weight, number in portion.pieces:
                share = weight if self._mean and not self._at_once else 1.0
                value = add(piece, number, share)
                self._seen.saw(piece, value)
                self._of_loss = value.dtype
                shares.append(share)
                losses.append(float(value.detach()))
            if self._splits_seen:
                continue
            if portion.parted:
                whole, parted = float(self._loss_of(portion.batch)), True
            elif len(portion.pieces) > 1:
                pieces = _report(shares[first:], losses[first:])
                value = self._loss_of(portion.batch)
                self._check_split(float(value), pieces, value.dtype)
        self._was = self._origin.now()  # a forward may count its calls
        return _report(shares, losses)._replace(whole=whole, parted=parted)

    @contextmanager
    def _context(self) -> Iterator[None]:
        with grad_enabled(), stand_ins_if(self._stand_ins):
            yield

    def _value(self, leaves: Vector, batch: Any) -> Tensor:
        value = self._loss(self.space.params_of(leaves), batch)
        return validation.scalar("loss(params, batch)", value)

    def _loss_of(self, batch: Any) -> Tensor:
        with self._context():
            return without_graph(lambda: self._value(self.space.leaves(), batch))

    def _check_split(self, whole: float, pieces: Report, dtype: torch.dtype) -> None:
        """The loss of a batch is that of its pieces, weighted: no layer or criterion mixes examples."""
        parts = pieces.loss / pieces.weight if self._mean else pieces.loss
        if not close(whole, parts, dtype, [pieces.largest]):
            raise ArgumentValueError(
                f"{'processes' if pieces.parted else 'micro_batch'}: expected a loss that is the "
                f"{'mean' if self._mean else 'sum'} over "
                f"examples, got {whole:.8g} for a batch and {parts:.8g} from its pieces. "
                "BatchNorm in train mode mixes examples (model.eval()), a criterion may weigh them "
                "(say what a batch weighs by batch_size=), or its reduction is not the operator's."
            )

    def _warn_of_unused(self) -> None:
        if self._unused:
            names = pytree.paths(self.space.params)
            warnings.warn(
                f"{type(self).__name__}: the loss does not depend on "
                f"{', '.join(names[i] for i in sorted(self._unused))}; these rows and columns are "
                "zero, and the matrix is singular. Leave them out of params.",
                stacklevel=2,
            )
            self._unused = set()

    def _notice_changes(self) -> bool:
        """What was found out at other parameters, or in another mode of the model, is forgotten."""
        now = self._origin.now()
        changed = now != self._was
        if changed:
            self._was, self._splits_seen = now, False
            self._seen.forget()
            self._symmetry.forget()
        return changed


def _report(shares: list[float], losses: list[float]) -> Report:
    return Report(
        pieces=len(shares),
        weight=fsum(shares),
        loss=fsum(share * loss for share, loss in zip(shares, losses, strict=True)),
        largest=max(map(abs, losses), default=0.0),
    )


# === What the operators over data share: a matrix at each batch, summed; kept where it is one
# batch.
LIMIT = 2 * 2**30


class _Kept(NamedTuple):
    """A matrix at one point whose graph stays."""

    point: LinearMap
    share: float  # in the sum over the data
    standing: PatchState  # what the model held then, for what backward runs again


class OverData(Summed):
    """A curvature matrix of a loss, averaged or summed over batches."""

    def __init__(
        self,
        matrix: CurvatureKind,
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
        self._limit = validation.number("memory_limit", memory_limit, minimum=0)
        self._kept: _Kept | None = None

    def _products(self, rows: Tensor) -> Tensor:
        if torch_internals.transforms_active():
            raise UnsupportedError(
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
        where = self.space.first_not_finite(total)
        if where and bool(rows.isfinite().all()):
            raise NonFiniteError(
                f"{type(self).__name__} @ v: expected finite products, got NaN or infinity in {where}, "
                "where the loss is finite; look for a square root, norm or logarithm at zero."
            )
        self._symmetry.saw(rows, total)
        return total

    def _multiply(self, rows: Tensor, total: Tensor) -> Report:
        """Puts the products of this process' data into total."""
        if self._kept is None:
            return self._over_data(partial(self._add_batch, rows, total))
        with grad_enabled(), restored(self._kept.standing):
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
        around = grad_enabled() if compiled else self._context()
        with around, keep_swapped() as places:
            leaves, batch = clone_inference_tensors((self.space.leaves(), batch))
            if self._matrix.mode == DIFFERENCES:
                leaves, batch = to_double((leaves, batch))
            call = Call(type(self).__name__)
            if compiled:
                several = (one and self._limit > 0) or len(rows) > 1
                structure = pytree.flatten(self.space.params)[1]
                point = linearised(
                    self._loss, self._matrix, call, self._stand_ins, self._backend, leaves,
                    structure, (batch,), several,
                )  # fmt: skip
                keep = one and several
            else:
                point = self._at(leaves, batch, index, call, one or len(rows) > 1)
                keep = one and bool(point.graph) and graph_bytes(list(point.graph)) <= self._limit
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
                    value = without_graph(lambda: self._value(leaves, batch))
        return value

    def _apply(
        self,
        point: LinearMap,
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
            vector = self.space.split(given if given.is_contiguous() else row.copy_(given))
            if self._matrix.mode == DIFFERENCES:
                vector = to_double(vector)
            value, product = point.apply(vector, keep or j + 1 < len(rows))
            self.space.add(sums, product, share, first)
            self._bar.advance(self._part)
        return value

    def _at(self, leaves: Vector, batch: Any, index: int, call: Call, several: bool) -> LinearMap:
        return self._matrix.at(self._loss, self.space.params_of, (batch,), leaves, call, several)

    def _notice_changes(self) -> bool:
        changed = super()._notice_changes()
        if changed:
            self._kept = None
        return changed

    def __getstate__(self) -> dict[str, Any]:
        """A copy keeps no graph, which cannot be copied."""
        return {**vars(self), "_kept": None, "_was": [object()]}
