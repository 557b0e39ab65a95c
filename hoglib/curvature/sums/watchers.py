"""Checks of a pass over data: each watcher checks one thing, and raises or warns.

They use the losses that each product computes anyway. If the matrix changes from pass to pass, it has
no eigenvalues, and no solver converges. If batches are weighted by a wrong number of examples, the
result belongs to another loss. `DatasetSum` chooses the watchers by the data and the options.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import fsum, isfinite
from operator import itemgetter
from typing import final

import torch
from torch import Tensor, nn

from hoglib._core.messages.validation import listing
from hoglib._core.modules import module_kinds
from hoglib._core.modules.state import generator_state, line_that_draws, preserve_random_state
from hoglib._core.numerics.trust import DERIVATIVES, memoize_on
from hoglib._core.runtime.device_reads import DeviceRead
from hoglib._core.runtime.source_location import warn, warn_once
from hoglib._core.substrate import autograd
from hoglib._core.substrate.fingerprint import checksum_of_call, checksum_of_tensors
from hoglib._core.torch_api import pytree
from hoglib._core.torch_api.pytree import tensors_in
from hoglib.curvature.batches.data import (
    OF_TENSORS,
    Batches,
    PassTotals,
    constants_of,
    fingerprint,
    leading_dimension,
    numbers_of,
)
from hoglib.curvature.maps import likelihood as likelihoods
from hoglib.curvature.sums.term import Term
from hoglib.errors import ArgumentValueError, NondeterministicError, NonFiniteError
from hoglib.ring import ring

ALLOW = ", or allow it by check_deterministic=False"  # advice of operators
DROPOUTS = (module_kinds.DROPOUTS, nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)
IGNORED = -100  # the label that torch's `cross_entropy` leaves out of its mean
BatchRecord = tuple[float, tuple[float, ...]]  # (the loss at a batch, the batch's fingerprint)


class Watcher:
    """Base class of the checks of a pass over data; `DatasetSum.fold` calls the methods.

    at: the term without a batch.
    """

    first_pass_only = False  # removed after the first pass without an error

    def __init__(self, at: Term) -> None:
        self.at = at

    def before(self, changed: bool) -> None:
        """Called as a pass begins. changed: parameters, model or data differ from the last pass."""

    def saw(self, term: Term, value: Tensor) -> None:
        """Called after each batch of this process, with the loss at the batch."""

    def totals(self) -> Mapping[str, float]:
        """The fields of PassTotals that this watcher sets in this process's message."""
        return {}

    def after(self, totals: PassTotals) -> None:
        """Called at the end of a pass, with the totals of all processes."""


class Losses(Watcher):
    """Records the losses of a pass; raises for NaN and infinity.

    A loss on the CPU is read at once. A loss on a device is read after the next batch: no read waits.
    """

    def __init__(self, at: Term) -> None:
        super().__init__(at)
        self.dtype = at.space.dtype  # of the last loss
        self._now: list[BatchRecord] = []  # of the current pass
        self._pending: Callable[[], None] | None = None  # reads the last loss

    def before(self, changed: bool) -> None:
        self._now, self._pending = [], None

    def saw(self, term: Term, value: Tensor) -> None:
        read = DeviceRead(torch.stack(self._numbers(term, value)))
        if self._pending is not None:
            self.read_last()
        self.dtype = value.dtype
        if value.device.type == "cpu":
            self._arrived(read, term, value)
        else:
            self._pending = partial(self._arrived, read, term, value)

    def losses(self) -> list[float]:
        """The losses of this pass."""
        if self._pending is not None:
            self.read_last()
        return [*map(itemgetter(0), self._now)]

    def read_last(self) -> None:
        """Read the last loss, if it is still unread."""
        if (arrived := self._pending) is not None:
            self._pending = None
            arrived()

    def before_keeping(self, term: Term, value: Tensor) -> Tensor:
        """Called with the loss of the only batch before an operator keeps the graph; returns a loss."""
        return value

    def _numbers(self, term: Term, value: Tensor) -> list[Tensor]:
        """The scalars to read at a batch, in float64: the loss, then perhaps its fingerprint."""
        return [value.double()]

    def _arrived(self, read: DeviceRead, term: Term, value: Tensor) -> None:
        number, *found = read.numbers().tolist()
        if not isfinite(number):
            raise NonFiniteError(
                f"loss: expected a finite number, got {number} at batch {len(self._now)}"
                + (", which holds NaN or infinity itself" if _not_finite(term.batch) else "")
                + ". Look for NaN in the data and in the parameters, and for overflow."
            )
        known = term.piece.known
        self._now.append((number, tuple(found) if known is None else known))


@final
class Determinism(Losses):
    """Compares the losses and the batches of each pass with the first pass.

    fixed_batches: Raise if batches change their order.
    shared: Several processes share the data: the total loss is compared with the tolerance of the
        parameters' dtype, because only this process knows the dtype of its losses.
    """

    _total: float | None = None  # the mean loss over the data of all processes, at the first pass

    def __init__(self, at: Term, fixed_batches: bool, shared: bool) -> None:
        super().__init__(at)
        self._fixed_batches, self._shared = fixed_batches, shared
        self._first: list[BatchRecord] = []  # of the first pass at these parameters

    def before(self, changed: bool) -> None:
        super().before(changed)
        if changed:
            self._first, self._total = [], None

    def after(self, totals: PassTotals) -> None:
        """Compare the mean loss over all data."""
        if self._pending is not None:
            self.read_last()
        self._first = self._first or self._now
        total = totals.loss / totals.weight
        dtype = self.at.space.dtype if self._shared else self.dtype
        if self._total is None or totals.changed:  # the state may have changed elsewhere only
            self._total = total
        elif not close(self._total, total, dtype, [totals.largest]):
            raise NondeterministicError(
                f"data: expected the same loss at every pass, got {self._total:.8g} and then "
                f"{total:.8g}: {self._cause_in_data()}"
            )

    def before_keeping(self, term: Term, value: Tensor) -> Tensor:
        """Compute the loss a second time, unless an earlier pass did; `saw` compares the two.

        Later products with a kept graph reuse its random numbers, so no later pass would differ.
        """
        if self._first:
            return value
        self.saw(term, value)
        self.read_last()
        self._first, self._now = self._now, []
        return term.value()

    def _numbers(self, term: Term, value: Tensor) -> list[Tensor]:
        first = len(self._now) + (self._pending is not None) >= len(self._first)
        found = [value.double()]
        # A later pass computes the fingerprint only for a loss that differs, in `_arrived`.
        if term.piece.known is None and (first or self._fixed_batches):
            found += [x.to(value.device) for x in numbers_of(term.piece.batch)]
        return found

    def _arrived(self, read: DeviceRead, term: Term, value: Tensor) -> None:
        """Raise if batch k differs from the first pass, or if batch k is equal and its loss differs."""
        super()._arrived(read, term, value)
        k = len(self._now) - 1
        if k >= len(self._first):
            return
        (was, before), (now, after) = self._first[k], self._now[k]
        agrees = close(was, now, value.dtype)
        if term.piece.known is None and not self._fixed_batches:
            after = before if agrees else fingerprint(term.piece.batch)
            self._now[k] = now, after
        if before != after and self._fixed_batches:
            raise NondeterministicError(
                f"data: expected the same batches at every pass, got another one for batch {k}: "
                "samples of kind='mc' are drawn for each batch by its number, and outputs are stacked "
                "in this order. Use a loader with shuffle=False, or kind='exact'."
            )
        if before == after and not agrees:
            cause = random_cause(term) or (
                "the model or the criterion draws random numbers outside of torch, or changes a state "
                f"of its own. Look for noise and counters in forward, and call model.eval(){ALLOW}."
            )
            raise NondeterministicError(
                f"loss: expected the same value for the same batch, got {was:.8g} and then {now:.8g} "
                f"at batch {k}: {cause}"
            )

    def _cause_in_data(self) -> str:
        """The difference between the data of the first pass and of this pass, with advice."""
        model = getattr(self.at.loss, "model", None)
        random = random_modules(model)
        if random:  # shuffled batches differ too, but model.eval() alone may suffice
            return random
        before, after = ([record for _, record in own] for own in (self._first, self._now))
        lengths = {len(numbers) for numbers in (*before, *after)}
        # A fingerprint has two numbers for each tensor; the first ignores the order of the examples.
        sums = range(0, lengths.pop() if len(lengths) == 1 else 0, 2)
        totals = [(fsum(x[i] for x in before), fsum(x[i] for x in after)) for i in sums]
        pairs = zip(totals, ([x[i] for x in before] for i in sums), strict=True)
        same = all(close(*total, torch.float32, size) for total, size in pairs)
        if same and len(before) == len(after):
            norms = in_training(model, lambda m: isinstance(m, module_kinds.BATCH_NORMS))
            return (
                "the batches hold the same examples, shuffled, and the loss depends on which examples "
                f"share a batch{' (' + ', '.join(norms) + ' in train mode)' if norms else ''}. Use a "
                "loader with shuffle=False, or call model.eval()."
            )
        return (
            "the data differs from pass to pass. Look for random augmentation, a sampler, or "
            "shuffle=True with drop_last=True; turn them off, or pass a list of fixed batches."
        )


def _not_finite(batch: object) -> bool:
    floats = (x for _, x in tensors_in("", batch) if x.is_floating_point())
    return not all(bool(x.isfinite().all()) for x in floats)


@final
class Symmetry(Watcher):
    """Warns if the first two products show that the matrix is not symmetric: v.Aw != w.Av.

    A wrong or partly detached backward makes most Hessians asymmetric. The check costs two inner
    products, once, and warns once for each loss. Operators call `compare` after each product.
    """

    _first: Sequence[tuple[Tensor, Tensor]] = ()  # the first vector and its product
    _done = False

    def before(self, changed: bool) -> None:
        if changed:  # products of two different matrices cannot be compared
            self._first, self._done = (), False

    def after(self, totals: PassTotals) -> None:
        if totals.changed:  # the state may have changed in another process only
            self.before(True)

    def compare(
        self,
        rows: Tensor,
        products: Tensor,
        half: Callable[[], torch.dtype | None],
        in_double: Callable[[Tensor], Tensor | None],
    ) -> None:
        """Compare the first two vectors and their products, from one call or two successive ones.

        half: Returns the half-precision dtype that the loss computes in, or None.
        in_double: Computes the products in float64: products in float32 may consist of rounding errors,
            for instance if a classifier fits all examples. Both functions are called only if the
            matrix is asymmetric beyond the rounding of its dtype.
        """
        name, loss, space = self.at.policy.caller, self.at.loss, self.at.space
        key = ("symmetric", name)
        known = rows.device.type != "cpu" and memoize_on(loss, key, lambda: None)
        self._done = self._done or bool(known)
        if self._done:
            return
        pairs = [*self._first, *list(zip(rows, products, strict=True))[:2]]
        if len(pairs) < 2:
            # copies, because the tensors belong to the caller
            self._first = [(v.clone(), Av.clone()) for v, Av in pairs]
            return
        (v, Av), (w, Aw), *_ = pairs
        self._first, self._done = (), True
        gap, size = space.asymmetry(v, Av, w, Aw)
        if not space.exceeds(gap, size, space.precision):
            memoize_on(loss, key, lambda: True)
        elif (dtype := half()) is None or space.exceeds(gap, size, dtype):
            if (
                rows.dtype == torch.float32
                and (exact := in_double(torch.stack([v, w]))) is not None
            ):
                rounding = space.asymmetry(v.double(), exact[0], w.double(), exact[1])
                if not space.exceeds(*rounding, torch.float32):
                    return
            own = object()  # only the first operator of a loss warns
            if memoize_on(loss, ("asymmetry", name), lambda: own) is not own:
                return
            warn(
                f"{name}: expected a symmetric matrix, got v.Aw and w.Av that differ by "
                f"{gap / size:.1g} of their size. A backward in the loss is not the derivative of its "
                "forward, or cannot be differentiated: `hoglib.verify` of its custom Functions names "
                "it, and mode='finite-differences' computes the product to compare with. Or the loss "
                "draws random numbers, as dropout does in train mode."
            )


def criterion_denominator(loss: object, batch: object) -> float:
    """The default weight of a batch: the number that the criterion's mean divides by, or for an unknown
    criterion the batch's leading dimension."""
    counts = likelihoods.counts_of_targets(loss, batch)
    return leading_dimension(batch) if counts is None else float(counts.sum())


def _wrong_denominator(name: str, advice: str) -> ArgumentValueError:
    return ArgumentValueError(
        f"{name}: expected a loss that is the mean over the examples of a batch, got "
        "one whose mean divides by another number: class weights, a mask, or labels that are "
        f"ignored. Batches weighted by their examples are not the mean over the data; {advice}."
    )


@final
class ExampleCounts(Watcher):
    """Raises if the ratio (criterion's denominator) / (weight) differs between batches.

    For matrices with one term per example, if weights are numbers of examples.
    """

    _ratio: float | None = None  # the ratio at the first batch

    def __init__(self, at: Term, advice: str) -> None:
        super().__init__(at)
        self._advice = advice

    def saw(self, term: Term, value: Tensor) -> None:
        ratio = criterion_denominator(term.loss, term.batch) / term.piece.weight
        self._ratio = ratio if self._ratio is None else self._ratio
        if abs(ratio - self._ratio) > 1e-9 * self._ratio:
            raise _wrong_denominator(self.at.policy.caller, self._advice)


@final
class Denominators(Watcher):
    """Raises if the mean of an unknown criterion does not divide by the weight of the batch; warns if
    halves of a batch do not show what it divides by.

    At the batches 0, 1, 2, 4, 8, ... the loss is compared with the losses of two halves of the batch,
    and at the last one, which loaders pad. A comparison runs the loss on both halves.
    Known criteria need no comparison: `criterion_denominator` has their denominators.

    alone: No other process takes batches: `after` may raise in one process.
    """

    first_pass_only = True

    def __init__(self, at: Term, alone: bool = True) -> None:
        super().__init__(at)
        self._alone = alone

    def before(self, changed: bool) -> None:
        self._skipped: tuple[Term, Tensor] | None = None  # the last batch, if it was not compared
        self._weights: list[float] = []  # of the batches of this pass
        self._sizes: set[tuple[int, ...]] = set()  # the leading dimensions of their tensors
        self._relations: set[likelihoods.Relation | None] = set()

    def saw(self, term: Term, value: Tensor) -> None:
        if likelihoods.counts_of_targets(term.loss, term.batch) is not None:
            return
        number = len(self._weights)
        self._weights.append(term.piece.weight)
        self._sizes.add(tuple(len(x) for _, x in tensors_in("", term.batch) if x.dim()))
        self._skipped = (term, value) if number & (number - 1) else None
        if not self._skipped:
            self._compare(term, value)

    def _compare(self, term: Term, value: Tensor) -> None:
        batch = term.batch

        def at(seed: int, part: object) -> Tensor:
            uncompiled = term.policy._replace(backend="")  # halves have shapes of their own
            with ring(uncompiled, term.loss, examine=False) as blocks:
                problem = term.of(part).problem().entered(blocks)
                leaves = likelihoods.nearby(problem.leaves, seed)
                return autograd.without_graph(lambda: problem(*leaves))

        relation = likelihoods.compare_halves(at, batch, value)
        self._relations.add(relation)
        first = next(iter(tensors_in("batch", batch)), ("batch[0]",))[0]
        if relation in ("sum", "mean and sum"):
            raise ArgumentValueError(
                f"{self.at.policy.caller}: expected a loss that is the mean over the examples of a "
                f"batch, got {NO_MEANS[relation].format(first=first)}: with reduction='mean' the "
                "result over several batches is neither that of the sum over the data nor that of the "
                "mean."
            )
        if relation == "weighted":
            labels = "batch['labels'][:, 1:]" if isinstance(batch, Mapping) else "batch[1]"
            raise _wrong_denominator(
                self.at.policy.caller,
                f"give that number of a batch, `batch_size=lambda batch: ({labels} != -100).sum()` for "
                "labels or `batch[-1].sum()` for a mask, or pass the criterion of torch itself; "
                f"`batch_size=lambda batch: len({first})` weights batches by their examples",
            )

    def after(self, totals: PassTotals) -> None:
        if self._alone and self._skipped:
            self._compare(*self._skipped)
        norms = in_training(
            getattr(self.at.loss, "model", None), lambda m: isinstance(m, module_kinds.BATCH_NORMS)
        )
        unclear = {"no rows"} if norms else {"no rows", "coupled"}  # `BatchNorm` warns of norms
        # For batches of equal sizes, equal weights are right whatever they count.
        if unclear & self._relations and len(self._sizes) > 1:
            warn(
                f"{self.at.policy.caller}: batches are weighted by the rows of their first tensor, "
                f"{min(self._weights):g} to {max(self._weights):g}, and the loss is not the mean over "
                "these rows: they are time steps or nodes, or the loss couples them. Give what its "
                "mean divides by, such as examples, events or pairs: `batch_size=lambda batch: ...`."
            )


# A loss other than a mean over examples, by its relation to the losses of halves: advice.
NO_MEANS = {
    "sum": "their sum. Pass `reduction='sum'` for the sum over the data, or divide the loss by "
    "`len({first})`",
    "mean and sum": "a mean plus a sum, such as a penalty of outputs that is summed over examples. "
    "Take the mean of both, or the sum of both with `reduction='sum'`",
}


@final
class IgnoredLabels(Watcher):
    """Warns if batches have different numbers of labels per example, and some labels are ignored."""

    first_pass_only = True

    def before(self, changed: bool) -> None:
        # for each batch: (`counted_labels`, weight)
        self._counted: list[tuple[dict[str, tuple[int, bool, int]], float]] = []

    def saw(self, term: Term, value: Tensor) -> None:
        if likelihoods.counts_of_targets(term.loss, term.batch) is None:
            self._counted.append((counted_labels(term.batch), term.piece.weight))

    def after(self, totals: PassTotals) -> None:
        for name in self._counted[0][0] if self._counted else ():
            found = [(*counts[name], weight) for counts, weight in self._counted if name in counts]
            ratios = [kept / weight for kept, *_, weight in found]
            if any(ignored for _, ignored, *_ in found) and min(ratios) < max(ratios):
                count = f"({name} != {IGNORED}).sum()`"
                if found[0][2] > 1:
                    count = f"({name}[:, 1:] != {IGNORED}).sum()` if the model shifts its labels "
                    count += "(causal), without `[:, 1:]` if not"
                warn(
                    f"{self.at.policy.caller}: expected batches with as many labels for each example, "
                    f"got {min(ratios):.3g} to {max(ratios):.3g} elements of {name} that are not "
                    f"{IGNORED}. A mean over these labels, as cross_entropy's, is not that over the "
                    "data, because batches are weighted by their examples. Pass `batch_size=lambda "
                    f"batch: {count}, or use `hoglib.language_model_loss`, which counts them; for a "
                    "mean over examples pass `batch_size=` with their number."
                )
                return


def counted_labels(batch: object) -> dict[str, tuple[int, bool, int]]:
    """Name of an integer tensor in a batch -> (number of labels other than -100, any label is -100,
    dimensions)."""
    found = {}
    for name, x in tensors_in("batch", batch):
        if x.dtype in (torch.int32, torch.int64) and x.device.type != "meta":
            kept = int((x != IGNORED).sum())
            found[name] = kept, kept < x.numel(), x.dim()
    return found


@final
class ListOfTensors(Watcher):
    """Warns of a list of two tensors if the loss also takes one tensor as a batch, as the loss of an
    autoencoder does: the list may have been meant as two batches."""

    first_pass_only = True

    def saw(self, term: Term, value: Tensor) -> None:
        batch, targets = term.batch, getattr(term.loss, "targets", None)
        alike = len({(x.shape, x.dtype) for x in batch}) == 1 and batch[0].is_floating_point()
        if len(batch) != 2 or not alike or targets is None or targets(batch) is batch:
            return
        try:
            with preserve_random_state():
                term.of(batch[0]).value()
        except Exception:
            return
        warn_once(
            f"data: {self.at.policy.caller} read the list of two tensors as one batch, (inputs, "
            f"targets): pass a tuple for that; {OF_TENSORS}."
        )


@final
class Splits(Watcher):
    """Raises if the loss of a batch differs from the losses of its micro-batches: a layer or the
    criterion mixes examples.

    losses: The watcher that records the losses of the micro-batches.
    mean: The loss is a mean over examples, not a sum.
    shared: Several processes take pieces of the only batch. The comparison then uses the totals of all
        processes, at the end of the pass.
    """

    _done = False

    def __init__(self, at: Term, losses: Losses, mean: bool, shared: bool) -> None:
        super().__init__(at)
        self._losses, self._mean, self._shared = losses, mean, shared
        self._shares: list[float] = []  # of the micro-batches of the current batch
        self._whole: float | None = None  # the loss of the only batch, if processes share it

    def before(self, changed: bool) -> None:
        self._shares, self._whole = [], None
        self._done = self._done and not changed

    def saw(self, term: Term, value: Tensor) -> None:
        self._shares.append(term.share)
        if self._done or term.piece.whole is None:
            return
        shares, self._shares, whole = self._shares, [], term.of(term.piece.whole)
        if self._shared:
            self._whole = float(whole.value())
        elif whole.batch is not term.batch:
            parts, loss = totals_of(shares, self._losses.losses()[-len(shares) :]), whole.value()
            self._compare(float(loss), parts, loss.dtype, lambda: random_cause(whole))

    def totals(self) -> Mapping[str, float]:
        return {} if self._whole is None else {"whole": self._whole, "shared": True}

    def after(self, totals: PassTotals) -> None:
        if totals.shared:
            self._compare(totals.whole, totals, self.at.space.dtype, lambda: "")
        self._whole, self._done = None, True

    def _compare(
        self, whole: float, parts: PassTotals, dtype: torch.dtype, cause: Callable[[], str]
    ) -> None:
        pieces = parts.loss / parts.weight if self._mean else parts.loss
        if close(whole, pieces, dtype, [parts.largest]):
            return
        if random := cause():
            raise NondeterministicError(
                "micro_batch: expected the same loss for a batch and for its pieces, got "
                f"{whole:.8g} and {pieces:.8g}: {random}"
            )
        raise ArgumentValueError(
            f"{'processes' if parts.shared else 'micro_batch'}: expected a loss that is the "
            f"{'mean' if self._mean else 'sum'} over examples, got {whole:.8g} for a batch and "
            f"{pieces:.8g} from its pieces. BatchNorm in train mode mixes examples (call "
            "model.eval()), a criterion may weight them (give the weight of a batch by batch_size=), "
            "or couple them, as a ranking loss does, or its reduction is not that of the operator."
        )


def totals_of(shares: Sequence[float], losses: Sequence[float]) -> PassTotals:
    """The totals of batches with these shares and losses."""
    total = fsum([share * loss for share, loss in zip(shares, losses, strict=True)])
    largest = max(map(abs, losses), default=0.0)
    return PassTotals(pieces=len(shares), weight=fsum(shares), loss=total, largest=largest)


@final
class BatchNorm(Watcher):
    """Warns once about layers that normalise by statistics of the batch.

    roots: The modules that the loss calls.
    """

    first_pass_only = True

    def __init__(self, at: Term, roots: Sequence[nn.Module]) -> None:
        super().__init__(at)
        self._roots = roots

    def before(self, changed: bool) -> None:
        roots, self._roots = self._roots, ()
        names = {
            f"{name or 'the model'} ({type(module).__name__})": None
            for root in roots
            for name, module in root.named_modules()
            if isinstance(module, module_kinds.BATCH_NORMS)
            and (module.training or module.running_mean is None)
        }
        if names:
            warn(
                f"{self.at.policy.caller}: expected the loss of each example to depend on that example "
                f"alone, got one that normalises by the batch: {listing(list(names))} in train mode. "
                "What is computed is that of these batches: it depends on their size, and on which "
                "examples share one, most of all where the data is sorted. Call model.eval(), or pass "
                "all of the data as one batch. Where these batches are meant, filter this warning."
            )


@final
class UnusedLeaves(Watcher):
    """Warns once about parameters that the loss does not depend on at any batch."""

    _unused: frozenset[int] | None = None  # indices of leaves; None before the first `note`

    def note(self, unused: tuple[int, ...] | None) -> None:
        """Record the unused leaves of a batch; None: unknown. Operators call this method."""
        if unused is not None:
            now = frozenset(unused)
            self._unused = now if self._unused is None else self._unused & now

    def used(self, pieces: float) -> Tensor:
        """For each leaf, 1 if a batch of this process uses it, else 0. pieces: the number of
        micro-batches of this process."""
        every = range(len(pytree.leaves(self.at.space.params)))
        flags = [float(pieces > 0 and i not in (self._unused or ())) for i in every]
        return torch.tensor(flags, dtype=torch.float32, device="cpu")

    def keep(self, used: Tensor) -> None:
        """Unused leaves are those that no process uses. used: :meth:`used`, summed over processes."""
        if self._unused:
            self._unused = frozenset(i for i in self._unused if not used[i])

    def after(self, totals: PassTotals) -> None:
        if self._unused:
            names = pytree.paths(self.at.space.params)
            warn(
                f"{self.at.policy.caller}: the loss does not depend on "
                f"{', '.join(names[i] for i in sorted(self._unused))}; these rows and columns are "
                "zero, and the matrix is singular. Leave them out of params."
            )
            self._unused = frozenset()  # once


@final
class Draws(Watcher):
    """Warns if the loss draws random numbers. For KFAC: `Determinism` needs two passes, KFAC makes
    one."""

    _drawn: Term | None = None  # the first term that drew random numbers

    def start(self) -> None:
        """Record the generators' state. The operator calls this before each loss, and after it drew
        samples itself."""
        self._state = generator_state(self.at.space.device)

    def drawn(self) -> bool:
        """Whether random numbers were drawn since the start."""
        return not torch.equal(self._state, generator_state(self.at.space.device))

    def saw(self, term: Term, value: Tensor) -> None:
        if self._drawn is None and self.drawn():
            self._drawn = term

    def after(self, totals: PassTotals) -> None:
        if self._drawn and (cause := random_cause(self._drawn)):
            warn(
                f"{self.at.policy.caller}: expected a loss that is the same at every pass, got one "
                f"whose factors are those of one draw: {cause}"
            )


@final
class Agreement(Watcher):
    """Sends checksums to the other processes; `Processes.all_reduce` raises if they differ."""

    def __init__(self, at: Term, batches: Batches, seed: int, call: Mapping[str, object]) -> None:
        super().__init__(at)
        self._batches, self._seed, self._call = batches, seed, call

    def totals(self) -> Mapping[str, float]:
        leaves = self.at.space.leaves()
        constants = constants_of(self.at.loss, leaves)
        sums = {name: checksum_of_call(part) for name, part in self._call.items()}
        sums |= {"params": checksum_of_tensors(leaves), "model": checksum_of_tensors(constants)}
        return sums | {"seed": self._seed, "data": self._batches.checksum}


def random_cause(term: Term) -> str:
    """A sentence that names the modules or the line that draw random numbers, with advice; "" if the
    loss draws none."""
    modules = random_modules(getattr(term.loss, "model", None))
    line = None if modules else line_that_draws(term.value, term.space.device)
    if line is None:
        return modules
    return (
        f"random numbers are drawn at {line}. Pass them in the batch, or turn them off, as "
        f"model.eval() may do{ALLOW}."
    )


def random_modules(model: object) -> str:
    """A sentence that names the modules that draw random numbers in train mode; "" for none."""
    random = in_training(model, _draws_in_training)
    if not random:
        return ""
    return (
        f"{listing(random)} {'draw' if len(random) > 1 else 'draws'} at random in train mode. "
        f"Call model.eval(){ALLOW}."
    )


def in_training(model: object, chosen: Callable[[nn.Module], bool]) -> list[str]:
    """Names and types of the modules in train mode that `chosen` accepts."""
    named = model.named_modules() if isinstance(model, nn.Module) else ()
    return [f"{name} ({type(m).__name__})" for name, m in named if m.training and chosen(m)]


def _draws_in_training(module: nn.Module) -> bool:
    """Whether a module draws random numbers in train mode."""
    if isinstance(module, nn.RNNBase | nn.MultiheadAttention):
        return bool(module.dropout)
    return isinstance(module, DROPOUTS) and getattr(module, "p", None) != 0


def close(a: float, b: float, dtype: torch.dtype, terms: Sequence[float] = ()) -> bool:
    """Whether two losses are equal up to rounding in a dtype. terms: magnitudes of their summands."""
    return abs(a - b) <= DERIVATIVES.of(dtype) * max(abs(a), abs(b), *map(abs, terms))
