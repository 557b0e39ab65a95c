"""A loss over data: its value, its gradient, and what else is summed up batch by batch.

    f = sum_b n_b loss(params, batch_b) / sum_b n_b        reduction="mean"
    f = sum_b loss(params, batch_b)                        reduction="sum"

The data is one batch, or many, in one process or in several that share it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from itertools import repeat
from typing import Any, Literal, TypedDict, final

import torch
from torch import Tensor

from hoglib._core.messages import validation
from hoglib._core.problem import OPTION_NAMES, Options, Policy, check_option_names
from hoglib._core.substrate import autograd
from hoglib._core.substrate.fingerprint import ComparedState, StateFingerprint, checksum_of_rows
from hoglib._core.substrate.gradient_graph import graph_summary
from hoglib._core.substrate.placement import Placement, Sharding
from hoglib.curvature.algebra.vector_space import Tree
from hoglib.curvature.batches.data import Batches, BatchSize, PassTotals, Processes, in_step
from hoglib.curvature.maps import likelihood as likelihoods
from hoglib.curvature.sums import watchers
from hoglib.curvature.sums.term import Term
from hoglib.errors import ArgumentTypeError, ArgumentValueError
from hoglib.verification.entry_points import examined_functions

Visit = Callable[[Term], Tensor]  # adds one batch to a total; returns the loss
Total = Tensor | Callable[[], Tensor]  # of a pass, or what makes it where its size is known
Watchers = Sequence[watchers.Watcher]
MEMORY_LIMIT = 2 * 2**30


class DataOptions(TypedDict, total=False):
    """The keyword options of whatever is computed over data.

    Args:
        reduction: "mean" or "sum" over the data, with n_b the number of examples of a batch.
            Default: "mean".
        batch_size: The weight n_b of a batch, as a function of it: the number that the criterion's
            mean divides by. A batch of weight 0 contributes nothing. Default: that number, for the
            criteria of torch whose likelihood `hoglib.fisher_vp` knows (the class weights of the labels
            that are not ignored), else the leading dimension of the first tensor of the batch.
        micro_batch: Split batches into pieces of so many examples, for memory. It is exact, and refused
            where the loss mixes examples. Default: None, batches as they are.
        check_deterministic: Compare the losses of each pass with those of the first, and raise where
            they differ, naming dropout, shuffling or augmentation; and warn if the first two products
            are not symmetric. Default: True.
        progress: Show a bar that counts products (needs tqdm). Default: False.
        processes: Of torch.distributed, each of which sums over a part of the data; one all-reduce
            adds the sums up, and all have the product. None is this process alone. "shard": all are
            given the same data, and each takes every n-th batch, or its rows of the only batch.
            "sharded": each is given its own part, which may be empty, ``[]``. All have to make the
            same products, with the same vectors. Default: None.
        dtype: Of flat vectors, in which products are summed over the data: torch.float32 for parameters
            in half precision, whose own sums lose what each batch adds. Default: the widest of the
            parameters'.
    Returns:
        A dict of options, to be passed as ``**options``.
    Example:
        >>> batches = [(torch.ones(2, 1),), (torch.ones(3, 1),)]
        >>> options = hog.curvature.DataOptions(reduction="sum")
        >>> loss = lambda p, batch: (batch[0] @ p).square().mean()
        >>> hog.HessianOperator(loss, torch.ones(1), batches, **options).trace()  # 2 of each batch
        tensor(4.)
    """

    reduction: Literal["mean", "sum"]
    batch_size: BatchSize | None
    micro_batch: int | None
    check_deterministic: bool
    progress: bool
    processes: Literal["shard", "sharded"] | None
    dtype: torch.dtype | None


class OperatorOptions(DataOptions, Options, total=False):
    """The keyword options of operators over data: those of :class:`DataOptions` and of
    :class:`hoglib.Options`, and one more.

    Args:
        memory_limit: If the data is one batch whose gradient graph holds less than so many bytes
            (estimated from the sizes of what its operations return), the graph is kept between
            products, which then cost half; 0 keeps none. With ``remat`` it holds the inputs of blocks
            only, with ``compile`` what the graph of a product computes before the vector.
            Default: 2 GiB.
    Returns:
        A dict of options, to be passed as ``**options``.
    Example:
        >>> options = hog.curvature.OperatorOptions(memory_limit=0, compile="eager")
        >>> H = hog.HessianOperator(lambda p, x: (x @ p).square().mean(), torch.ones(2), torch.eye(2),
        ...                         **options)
        >>> H.trace()
        tensor(2.)
    """

    memory_limit: float


DATA_OPTIONS = tuple(DataOptions.__annotations__)
OPERATOR_OPTIONS = tuple(OperatorOptions.__annotations__)


@final
@dataclass(frozen=True, kw_only=True)
class CheckedDataOptions:
    """The options over data, checked."""

    reduction: str = "mean"
    batch_size: BatchSize | None = None
    micro_batch: int | None = None
    check_deterministic: bool = True
    progress: bool = False
    processes: str | None = None
    dtype: torch.dtype | None = None
    memory_limit: float = MEMORY_LIMIT

    def __post_init__(self) -> None:
        validation.choice("reduction", self.reduction, ["mean", "sum"])
        if self.batch_size is not None:
            validation.function("batch_size", self.batch_size)
        validation.none_or_at_least("micro_batch", self.micro_batch, 1)
        validation.number("memory_limit", self.memory_limit, minimum=0)
        if self.dtype is not None and not getattr(self.dtype, "is_floating_point", False):
            raise ArgumentTypeError(
                "dtype: expected a floating-point torch.dtype, such as torch.float32, got "
                f"{validation.describe(self.dtype)}."
            )
        for name in ("check_deterministic", "progress"):
            validation.boolean(name, getattr(self, name))


def split_options(
    caller: str, options: Mapping[str, Any], names: Sequence[str] = OPERATOR_OPTIONS
) -> tuple[Policy, CheckedDataOptions]:
    """How the loss is evaluated, and what is computed over the data, both checked."""
    check_option_names(caller, options, names)
    of_data = {name: value for name, value in options.items() if name not in OPTION_NAMES}
    of_loss = {name: value for name, value in options.items() if name in OPTION_NAMES}
    return Policy.of(caller, of_loss), CheckedDataOptions(**of_data)


ADVICE = {
    "terms": "a GGNOperator has the value and the gradient of the data",
    "examples": "take a criterion and an operator with reduction='sum', whose matrix is F D^2 / N "
    "with the sum D of the weights of N examples",
}


@final
class DatasetSum:
    """A loss over data at the parameters of a space, as they are at each call.

    metric: M of a matrix J^T M J; gives the seed of its samples, and how its terms are counted.
    further: watchers of each pass, after the default ones.
    """

    def __init__(
        self,
        at: Term,
        data: Any,
        options: CheckedDataOptions,
        processes: Processes,
        *,
        fixed_batches: bool,
        metric: Any = None,
        further: Watchers = (),
    ) -> None:
        loss, space, mean = at.loss, at.space, options.reduction == "mean"
        validation.loss_function("loss", loss)
        likelihoods.check_reduction(loss, options.reduction)
        counting = getattr(metric, "counting", None) or "criterion"
        size = options.batch_size or getattr(loss, "batch_size", None)
        infers = mean and size is None  # weights that nobody gave
        if infers and counting == "criterion":
            # of the loss alone: a method of this object would be a cycle, freed by a collection only
            size = partial(watchers.criterion_denominator, loss)
        micro_batch, sharded = options.micro_batch, at.placement.is_sharded
        given = data, space.device, size, micro_batch, processes
        self.at, self.batches = at, Batches(*given, mean=mean, sharded=sharded)
        single, shared = self.batches.single, self.batches.shared
        data_now = self.batches.current if single else list
        fingerprint = StateFingerprint(loss, space.leaves, data_now)
        self.state = ComparedState(at.policy.caller, fingerprint)
        self.losses = watchers.Losses(at)
        if options.check_deterministic:
            self.losses = watchers.Determinism(at, fixed_batches, not processes.alone)
        self.unused = watchers.UnusedLeaves(at)
        infers = infers and not single
        inferred = infers and counting != "terms"
        # sharded parameters: a batch has the weight of all processes together
        counted = infers and not sharded and counting != "criterion"
        counts = [watchers.ExampleCounts(at, ADVICE[counting])] if counted else []
        self.of_value = [] if inferred else counts  # further watchers of the value and the gradient
        seed = getattr(metric, "seed", None) or 0
        chosen: list[tuple[watchers.Watcher, bool]] = [
            *((watcher, inferred) for watcher in counts),
            (watchers.Denominators(at), inferred and not sharded),
            (watchers.IgnoredLabels(at), inferred),
            (watchers.BatchNorm(at, fingerprint.roots), not single and micro_batch is None),
            (self.losses, True),
            (watchers.Splits(at, self.losses, mean, shared), bool(micro_batch or shared)),
            (watchers.Agreement(at, self.batches, seed), not processes.alone),
            (self.unused, True),
        ]
        self.watchers = [watcher for watcher, needed in chosen if needed] + [*further]
        self.last: PassTotals | None = None  # of a pass in this state
        self._unread: list[float] = []  # shares of the last pass, until its losses are read
        self.kept: Any = None  # what an operator computed in this state; dropped when it changes

    @property
    def alone(self) -> bool:
        """Whether no other process takes part in the sum."""
        return self.batches.processes.alone

    @property
    def whole(self) -> bool:
        """Whether, besides, no other process holds a part of the vectors."""
        return self.alone and not self.at.placement.is_sharded

    def value(self) -> Tensor:
        """The loss over the data."""
        space = self.at.space

        def visit(term: Term) -> Tensor:
            value = term.value()
            term.advance()
            return value

        with torch.inference_mode(False), self.at.bar.over("value", 1):
            nothing = torch.zeros(1, 0, dtype=space.dtype, device=space.device)
            return self._total_loss(self.fold(visit, nothing, also=self.of_value))

    def gradient(self) -> tuple[Tensor, Tree]:
        """The loss over the data and its gradient, in the structure of params."""
        space = self.at.space

        @cache
        def total() -> Tensor:
            """Made where there is something to add, when the graph of the first batch is gone."""
            with torch.inference_mode(False):
                return torch.zeros(1, space.length, dtype=space.dtype, device=space.device)

        def visit(term: Term) -> Tensor:
            with term.entered() as f:
                p = autograd.fresh_leaves(f.leaves, False)
                value = f(*p)
                autograd.check_uses_given_params(graph_summary(value), f.leaves, "gradient")
                with autograd.translate_errors("gradient"):
                    grads = torch.autograd.grad(value, p, allow_unused=True)
            space.add(total()[0], autograd.materialize_grads(list(grads), p), term.share)
            term.advance()
            return value

        with self.at.bar.over("gradient", 1):
            totals = self.fold(visit, total, first_order=True, also=self.of_value)
        with torch.inference_mode(False), torch.no_grad():
            mean = total()[0].div_(self.weight(totals))
            return self._total_loss(totals), space.tree(mean)

    def weight(self, totals: PassTotals) -> float:
        """What a sum over the data is divided by."""
        return totals.weight if self.batches.mean else 1.0

    def number(self) -> float:
        """The loss of the last pass over the data, for which a device need not be waited for."""
        return float(self._total_loss(self.last or PassTotals(), torch.device("cpu")))

    def _total_loss(self, totals: PassTotals, device: torch.device | None = None) -> Tensor:
        # filled in, because a device waits for a copy
        value = totals.loss / self.weight(totals)
        return torch.full((), value, dtype=self.losses.dtype, device=device or self.at.space.device)

    def fold(
        self,
        visit: Visit,
        total: Total,
        rows: Tensor | None = None,
        *,
        first_order: bool = False,
        also: Watchers = (),
    ) -> PassTotals:
        """A pass over the data, in all processes, each of which adds its part to `total`.

            for each batch of this process: value = visit(term), which adds share times something
            all processes: total = sum of theirs

        Custom Functions are examined, and the watchers look on. An error in one process is raised in
        all. With rows, a kept graph of the only batch takes the place of that batch.

        visit: adds one batch to the total, and returns the loss. total: a tensor; or, if its size is
        known only after the pass, a function that returns it. rows: the vectors that are multiplied,
        equal in all processes. also: watchers of this pass, before the default ones.
        """
        if rows is not None and self.kept is not None and self.state.may_skip():
            # an algorithm compares the state before some of its products only, not before each one
            visit(self.kept.term)
            return self.last or PassTotals()
        everyone = [*also, *self.watchers]
        own = partial(self._own_part, visit, rows, everyone, first_order)
        placement = self.at.placement
        try:
            if placement.is_sharded:
                with torch.inference_mode(False), placement.translate_errors(self.at.policy.caller):
                    totals = own()
            else:
                totals = own()
        except Exception as error:
            if not self.alone:
                self._add_up(total, rows, PassTotals(), error)  # raises it in all processes
            raise
        if not self.alone:
            totals = self._add_up(total, rows, totals, None)
        elif totals is self.last:  # of a kept graph, in this state
            return totals
        if not self._unread:
            self._finish(totals, everyone)
            self.last = totals
        return totals

    def _own_part(
        self, visit: Visit, rows: Tensor | None, everyone: Watchers, first_order: bool
    ) -> PassTotals:
        """The batches of this process; their totals."""
        changed = self.state.changed(self._read_last_losses)
        if changed:
            self.kept = self.last = None
        if rows is not None and self.kept is not None:
            # the Functions in a kept graph were examined when it was made
            value, last = visit(self.kept.term), self.last
            if self.alone and last is not None:
                return last
            return watchers.totals_of([self.kept.term.share], [float(value)])
        for watcher in everyone:
            watcher.before(changed)
        if self.at.placement.is_sharded and self._changed_elsewhere(rows, changed):
            for watcher in everyone:
                watcher.before(True)
        # On a device, the losses of a repeated pass are read when the next one begins: no wait.
        waits = rows is not None and self.at.space.device.type != "cpu"
        late = waits and self.alone and self.last is not None
        shares: list[float] = []
        # most watchers only need the beginning and the end
        seeing = [watcher for watcher in everyone if type(watcher).saw is not watchers.Watcher.saw]
        with examined_functions(self.at.policy.caller, first_order=first_order):
            for term in self.terms():
                value = visit(term).detach()
                for watcher in seeing:
                    watcher.saw(term, value)
                shares.append(term.share)
            self.state.note()
        self._unread = shares if late else []
        totals = watchers.totals_of(shares, [0.0] * len(shares) if late else self.losses.losses())
        return totals._replace(changed=changed)

    def terms(self) -> Iterator[Term]:
        """The loss at each batch; processes that share the parameters all take their next one
        together."""
        placement, batches, first = self.at.placement, self.batches, True
        weighted = batches.mean and not batches.weight_cancels
        pieces: Iterable[tuple[Any, Placement]] = (
            in_step(self.at.policy.caller, batches, placement)
            if isinstance(placement, Sharding)
            else zip(batches, repeat(placement), strict=False)
        )
        for piece, where in pieces:
            share = piece.weight if weighted else 1.0
            yield Term(*self.at[:4], where, piece, share, first)
            first = False

    def _finish(self, totals: PassTotals, everyone: Watchers) -> None:
        """A pass has ended in all processes."""
        if not totals.pieces:
            raise ArgumentValueError(
                "data: expected at least one batch, got none; a DataLoader with drop_last=True and "
                "fewer examples than a batch has none, and a batch whose labels are all ignore_index "
                "does not count."
            )
        for watcher in everyone:
            watcher.after(totals)
        self.watchers = [watcher for watcher in self.watchers if not watcher.first_pass_only]

    def _read_last_losses(self) -> None:
        """Read the losses of the last pass, if they were not."""
        shares, self._unread = self._unread, []
        if shares:
            self._finish(watchers.totals_of(shares, self.losses.losses()), self.watchers)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _add_up(
        self, total: Total, rows: Tensor | None, totals: PassTotals, error: Exception | None
    ) -> PassTotals:
        """Add up the totals of all processes, and their sums in the total of the pass."""
        used = self.unused.used(totals.pieces)
        if error is None:
            vectors = 0.0 if rows is None else checksum_of_rows(rows)
            told = {k: x for watcher in self.watchers for k, x in watcher.totals().items()}
            totals = totals._replace(vectors=vectors, **told)
        sums = total() if callable(total) else total
        totals = self.batches.processes.all_reduce(sums, used, totals, error)
        self.unused.keep(used)
        return totals

    def _changed_elsewhere(self, rows: Tensor | None, changed: bool) -> bool:
        """Raise in all processes that share the parameters where one multiplies other vectors; whether
        the state has changed in any of them."""
        leaves = self.at.space.leaves()
        columns, vectors = 0, [leaf.new_zeros(0) for leaf in leaves]
        if rows is not None:
            columns = len(rows)
            vectors = list(rows.split([leaf.numel() for leaf in leaves], dim=1))
        name = self.at.policy.caller
        return self.at.placement.check_agreement(name, columns, vectors, leaves, changed)

    @contextmanager
    def require_constant_state(self, algorithm: str) -> Iterator[None]:
        """Inside, parameters and data must not change, for a single batch, and on a device for all
        data, which would have to wait for each comparison."""
        waits = self.at.space.device.type != "cpu"
        one = self.batches.weight_cancels
        if self.state.algorithm or not (one or (self.whole and waits)):
            yield
            return
        with self.state.during(algorithm):
            try:
                yield
            except Exception as error:  # of a kept graph, for tensors that were changed in place
                if self.kept is not None:
                    self.state.check(error)
                raise
            self.state.check()
            self._read_last_losses()

    def __getstate__(self) -> dict[str, Any]:
        """A copy keeps no graph, which cannot be copied."""
        self._read_last_losses()
        return {**vars(self), "kept": None}
