"""A sum over data: of a loss, of its gradient, and of what else is computed batch by batch.

The data is one batch, or many, in one process or in several that share it.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from math import fsum
from typing import Any

import torch
from torch import Tensor, nn

from hoglib import _arguments as arguments
from hoglib import _tree
from hoglib._explaining import explaining
from hoglib._gradient_graph import only_as_given
from hoglib._leaves import Vector, filled, own_leaves
from hoglib._recording import plainly, recordable, recording
from hoglib._substitution import lingering
from hoglib.curvature._data import Batches, Size
from hoglib.curvature._determinism import Determinism, close
from hoglib.curvature._likelihood import check_reduction
from hoglib.curvature._linear import LinearOperator
from hoglib.curvature._origin import Origin
from hoglib.curvature._processes import Processes, Report, beside, of_rows, of_tensors, together
from hoglib.curvature._space import Space
from hoglib.curvature._symmetry import Symmetry
from hoglib.curvature._wrapped import refuse_split, refuse_wrapped
from hoglib.stand_ins import stand_ins_if

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
        super().__init__(Space(params), arguments.flag("progress", progress) and first)
        if isinstance(loss, nn.Module):
            raise arguments.WrongType(
                f"loss: expected a function of (params, batch), got the module {type(loss).__name__}; "
                "make one with `hoglib.functional_loss(model, criterion)`."
            )
        refuse_wrapped(getattr(loss, "model", None))
        refuse_split(self._space.leaves())
        arguments.one_of("reduction", reduction, ["mean", "sum"])
        check_reduction(loss, reduction, besides={"batchmean": "mean"})
        self._loss, self._mean = loss, reduction == "mean"
        self._batches = Batches(data, self.device, batch_size, micro_batch, self._processes)
        # what it weighs is no matter then
        self._at_once = self._batches.whole and self._processes.alone
        self._stand_ins = arguments.flag("stand_ins", stand_ins)
        self._check = arguments.flag("check_deterministic", check_deterministic)
        self._seen = Determinism(loss, self._check, fixed_batches)
        self._symmetry = Symmetry(type(self).__name__, self._check)
        data_at_hand = self._batches.at_hand if self._batches.whole else list
        self._origin, self._was = Origin(loss, self._space.leaves, data_at_hand), [object()]
        self._unused: set[int] | None = None
        self._splits_seen = False
        self._part = 1.0  # of a pass, that the batch under way is
        self._of_loss = self.dtype  # the loss's own, once it is known
        self._seed = 0  # of draws

    def gradient(self) -> tuple[Tensor, Tree]:
        """The loss over the data and its gradient, in the structure of params."""
        with torch.inference_mode(False):
            row = torch.zeros(1, self._space.size, dtype=self.dtype, device=self.device)

        def add(batch: Any, index: int, share: float) -> Tensor:
            leaves, batch = recordable((self._space.leaves(), batch))
            own = own_leaves(leaves, False)
            with self._context(), lingering():
                value = self._value(own, batch)
                only_as_given(value, leaves, "gradient")
                with explaining("gradient"):
                    parts = torch.autograd.grad(value, own, allow_unused=True)
            self._space.add(row[0], filled(list(parts), own), share)
            self._bar.advance(self._part)
            return value

        with self._bar.over("gradient", 1):
            found = self._everywhere(partial(self._over_data, add), row)
        with torch.inference_mode(False), torch.no_grad():
            return self._total(found), self._space.tree(row[0] / self._weight(found))

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
            raise arguments.WrongValue(
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
        count = len(_tree.leaves(self._space.params))
        used = torch.zeros(count)  # by how many processes, each leaf
        try:
            changed = self._notice_changes()
            leaves = self._space.leaves()
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
        with recording(), stand_ins_if(self._stand_ins):
            yield

    def _value(self, leaves: Vector, batch: Any) -> Tensor:
        value = self._loss(self._space.params_of(leaves), batch)
        return arguments.scalar("loss(params, batch)", value)

    def _loss_of(self, batch: Any) -> Tensor:
        with self._context():
            return plainly(lambda: self._value(self._space.leaves(), batch))

    def _check_split(self, whole: float, pieces: Report, dtype: torch.dtype) -> None:
        """The loss of a batch is that of its pieces, weighted: no layer or criterion mixes examples."""
        parts = pieces.loss / pieces.weight if self._mean else pieces.loss
        if not close(whole, parts, dtype, [pieces.largest]):
            raise arguments.WrongValue(
                f"{'processes' if pieces.parted else 'micro_batch'}: expected a loss that is the "
                f"{'mean' if self._mean else 'sum'} over "
                f"examples, got {whole:.8g} for a batch and {parts:.8g} from its pieces. "
                "BatchNorm in train mode mixes examples (model.eval()), a criterion may weigh them "
                "(say what a batch weighs by batch_size=), or its reduction is not the operator's."
            )

    def _warn_of_unused(self) -> None:
        if self._unused:
            names = _tree.paths(self._space.params)
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
