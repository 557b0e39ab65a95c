"""Sums over data, batch by batch: a loss, its gradient, and the products of operators.

    f = sum_b n_b loss(params, batch_b) / sum_b n_b        reduction="mean"
    f = sum_b loss(params, batch_b)                        reduction="sum"

The data is one batch or many, in one process or shared by several.
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
from hoglib._core.messages.communication import tell
from hoglib._core.problem import OPTION_NAMES, Options, Policy, check_option_names, warn_if_replaced
from hoglib._core.substrate import autograd
from hoglib._core.substrate.fingerprint import (
    ComparedState,
    StateFingerprint,
    checksum_of_call,
    checksum_of_rows,
)
from hoglib._core.substrate.gradient_graph import graph_summary
from hoglib._core.substrate.placement import Placement, Sharding
from hoglib._core.torch_api.torch_modes import users_autocast
from hoglib.curvature.algebra.vector_space import Tree
from hoglib.curvature.batches.data import Batches, BatchSize, PassTotals, Processes, in_step
from hoglib.curvature.maps import likelihood as likelihoods
from hoglib.curvature.sums import watchers
from hoglib.curvature.sums.term import Term
from hoglib.errors import ArgumentTypeError, ArgumentValueError
from hoglib.verification.entry_points import examined_functions

Visit = Callable[[Term], Tensor]  # adds one batch to a total; returns the loss
Total = Tensor | Callable[[], Tensor]  # the total of a pass, or a function that allocates it later
Watchers = Sequence[watchers.Watcher]
MEMORY_LIMIT = 2 * 2**30  # bytes


class DataOptions(TypedDict, total=False):
    """The keyword options of functions and operators over data.

    Args:
        reduction: "mean" or "sum" over the data, with n_b the number of examples of a batch. With
            "mean" a loss that sums over the examples of a batch is refused over several batches.
            Default: "mean".
        batch_size: A function of a batch that returns its weight n_b: the number that the criterion's
            mean divides by. A batch of weight 0 contributes nothing. Default: for torch's criteria with
            a likelihood that `hoglib.fisher_vp` knows, the summed class weights of labels other than
            ignore_index; for other losses the leading dimension of the batch's first tensor.
        micro_batch: Split batches into pieces of so many examples, for memory. The result is exact; a
            loss that mixes examples raises. Default: None, no split.
        check_deterministic: Compare the losses of each pass with the first pass, and raise if they
            differ, naming dropout, shuffling or augmentation; warn if the first two products are not
            symmetric. Default: True.
        progress: Show a bar that counts products (needs tqdm). Default: False.
        processes: How the processes of torch.distributed share the data. Each sums over a part, and one
            all-reduce adds up the sums: all processes have the product. None: this process alone.
            "shard": every process is given all of the data, and takes every n-th batch, or its rows of
            an only batch. "sharded": every process is given its own part, which may be empty, ``[]``.
            All processes must make equal products, with equal vectors. Default: None.
        dtype: The dtype of flat vectors and of sums over the data. Take torch.float32 for parameters in
            half precision: sums in half precision round away the part of a batch. Default: the widest
            dtype among the parameters.
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
    """The keyword options of operators over data: :class:`DataOptions`, :class:`hoglib.Options`, and
    one more.

    Args:
        memory_limit: If the data is one batch (also in a list of one, in one process), its gradient
            graph is kept between products, which then cost half, unless the graph holds more bytes
            than this. Estimated from the sizes of the operations' results; 0 keeps no graph. With
            ``remat`` the graph holds only the inputs of blocks, with ``compile`` the results that do
            not depend on the vector. Default: 2 GiB.
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
    """The checked values of :class:`DataOptions`, and memory_limit. `Processes` checks
    processes."""

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
    """Split an operator's options into the policy of its loss and its data options, both checked."""
    check_option_names(caller, options, names)
    of_data = {name: value for name, value in options.items() if name not in OPTION_NAMES}
    of_loss = {name: value for name, value in options.items() if name in OPTION_NAMES}
    return Policy.of(caller, of_loss), CheckedDataOptions(**of_data)


# advice on a wrong denominator, by `OutputMetric.counting`
WRONG_COUNT = {
    "terms": "a GGNOperator has the value and the gradient of the data",
    "examples": "take a criterion and an operator with reduction='sum', whose matrix is F D^2 / N "
    "with the sum D of the weights of N examples",
}


@final
class DatasetSum:
    """A loss over data; each operator over data has one, and makes its passes by :meth:`fold`.

    The parameters are read anew at each call.

    at: The loss, its options and its parameters: a term without a batch.
    fixed_batches: Raise if batches change their order.
    kind: The kind of the operator; processes compare it.
    metric: M of a matrix J^T M J, for the seed of its samples and for `OutputMetric.counting`.
    further: More watchers of each pass.
    """

    def __init__(
        self,
        at: Term,
        data: object,
        options: CheckedDataOptions,
        processes: Processes,
        *,
        fixed_batches: bool,
        kind: object = None,
        metric: object = None,
        further: Watchers = (),
    ) -> None:
        loss, space, mean = at.loss, at.space, options.reduction == "mean"
        validation.loss_function("loss", loss)
        likelihoods.check_reduction(loss, options.reduction)
        counting = getattr(metric, "counting", None) or "criterion"
        size = options.batch_size or getattr(loss, "batch_size", None)
        no_weights = mean and size is None  # neither the options nor the loss give weights
        if no_weights and counting == "criterion":
            # Not a method of self: the reference cycle would keep tensors until a garbage collection.
            size = partial(watchers.criterion_denominator, loss)
        micro_batch, sharded = options.micro_batch, at.placement.is_sharded
        given = data, space.device, size, micro_batch, processes
        self.at, self.batches = at, Batches(*given, mean=mean, sharded=sharded)
        # All processes must have equal checksums of these objects; keys are fields of PassTotals.
        same_options = at.policy, options.reduction, space.dtype
        self._call = {"kind": kind, "options": same_options, "criterion": loss}
        single, shared = self.batches.single, self.batches.shared
        data_now = self.batches.current if single else list
        fingerprint = StateFingerprint(loss, space.leaves, data_now)
        self.state = ComparedState(at.policy.caller, fingerprint)  # of parameters, model and data
        self.losses = watchers.Losses(at)  # records the losses of a pass
        if options.check_deterministic:
            self.losses = watchers.Determinism(at, fixed_batches, not processes.alone)
        self.unused = watchers.UnusedLeaves(at)
        # The default weights of several batches are compared with the denominators of the loss's
        # mean: at each product, or, if M divides by its own terms ("terms"), at value() and gradient().
        compares = no_weights and not single
        for_all = compares and counting != "terms"
        # with sharded parameters, the weight of a batch is a sum over processes
        counted = compares and not sharded and counting != "criterion"
        counts = [watchers.ExampleCounts(at, WRONG_COUNT[counting])] if counted else []
        self.of_value = [] if for_all else counts  # watchers of value and gradient only
        seed = getattr(metric, "seed", None) or 0
        chosen: list[tuple[watchers.Watcher, bool]] = [
            *((watcher, for_all) for watcher in counts),
            (watchers.Denominators(at, processes.alone), for_all and not sharded),
            (watchers.IgnoredLabels(at), for_all),
            (watchers.ListOfTensors(at), self.batches.listed),
            (watchers.BatchNorm(at, fingerprint.roots), not single and micro_batch is None),
            (self.losses, True),
            (watchers.Splits(at, self.losses, mean, shared), bool(micro_batch or shared)),
            (watchers.Agreement(at, self.batches, seed, self._call), not processes.alone),
            (self.unused, True),
        ]
        self.watchers = [watcher for watcher, needed in chosen if needed] + [*further]
        self.last: PassTotals | None = None  # of the last pass; None after a change of the state
        self._unread: list[float] = []  # shares of the last pass, until its losses are read
        # an operator's linearization with its graph and its `term`; None after a change of the state
        self.kept: Any = None

    @property
    def alone(self) -> bool:
        """Whether no other process takes part in the sum."""
        return self.batches.processes.alone

    @property
    def whole(self) -> bool:
        """Whether no other process has a part of the data or of the parameters."""
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
            """Allocated after the backward of the first batch, which frees its graph: less memory."""
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
        """The number that a sum over the data is divided by."""
        return totals.weight if self.batches.mean else 1.0

    def number(self) -> float:
        """The loss of the last pass, from sums on the CPU: no device synchronizes."""
        assert self.last is not None
        return float(self._total_loss(self.last, torch.device("cpu")))

    def _total_loss(self, totals: PassTotals, device: torch.device | None = None) -> Tensor:
        # torch.full, because copying a number to a device synchronizes
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
        """Make one pass over the data, and add up `total` over the processes.

            for each batch of this process: value = visit(term)
            all processes: all-reduce of total

        Custom Functions are examined, and watchers check the losses. An error in one process is raised
        in all. With rows and a kept graph, `visit` is called once, with the kept term.

        visit: Adds term.share times its result at a batch to the total; returns the loss.
        total: A tensor, or a function that returns a tensor, called after the batches.
        rows: The vectors of a product, equal in all processes.
        first_order: See `examined_functions`.
        also: Watchers of this pass, called before the default ones.
        """
        try:
            with users_autocast():
                if rows is not None and self.kept is not None and self.state.may_skip():
                    # comparing the state costs time: inside an algorithm every eighth product does
                    visit(self.kept.term)
                    assert self.last is not None  # the totals of the pass that made the graph
                    return self.last
                everyone = [*also, *self.watchers]
                own = partial(self._own_part, visit, rows, everyone, first_order)
                placement = self.at.placement
                try:
                    if placement.is_sharded:
                        with torch.inference_mode(False), placement.together(self.at.policy.caller):
                            totals = own()
                    else:
                        totals = own()
                except Exception as error:
                    self.batches.explain(error)
                    if not self.alone:
                        self._add_up(total, rows, PassTotals(), error)  # raises in all processes
                    raise
                if not self.alone:
                    totals = self._add_up(total, rows, totals, None)
                elif totals is self.last:  # a kept graph has no new losses to check
                    return totals
                if not self._unread:
                    self._finish(totals, everyone)
                    self.last = totals
                return totals
        except BaseException as error:  # also errors after the messages, and KeyboardInterrupt
            self.tell(error)
            raise

    def tell(self, error: BaseException) -> None:
        """Report an error that ends a call to the processes that share data or parameters."""
        if not self.whole:
            tell(error, self.at.placement.mesh)

    def _own_part(
        self, visit: Visit, rows: Tensor | None, everyone: Watchers, first_order: bool
    ) -> PassTotals:
        """Visit the batches of this process, or the kept graph; return the totals of this process."""
        warn_if_replaced(self.at.policy.caller, self.at.loss, self.at.space.params)
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
        # On a device, the losses of a repeated pass are read by the next pass: no synchronization.
        waits = rows is not None and self.at.space.device.type != "cpu"
        late = waits and self.alone and self.last is not None
        shares: list[float] = []
        # most watchers do not override `saw`
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
        """The term of each batch; with sharded parameters, all processes take their next batch
        together, because they gather the parameters together."""
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
        """Run the watchers' checks after all processes have ended their pass."""
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
        """Read and check the losses of the last pass, if they are still unread."""
        shares, self._unread = self._unread, []
        if shares:
            self._finish(watchers.totals_of(shares, self.losses.losses()), self.watchers)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _add_up(
        self, total: Total, rows: Tensor | None, totals: PassTotals, error: Exception | None
    ) -> PassTotals:
        """All-reduce the total of the pass, its PassTotals, and the flags of used parameters; raise
        in all processes if one has an error."""
        used = self.unused.used(totals.pieces)
        if error is None:
            vectors = 0.0 if rows is None else checksum_of_rows(rows)
            told = {k: x for watcher in self.watchers for k, x in watcher.totals().items()}
            shapes = checksum_of_call(self.at.space.leaves(), rows)
            totals = totals._replace(shapes=shapes, vectors=vectors, **told)
        compute = total if callable(total) else lambda: total
        at = self.at.space.dtype, self.at.space.device
        totals = self.batches.processes.all_reduce(compute, used, totals, error, *at)
        self.unused.keep(used)
        return totals

    def _changed_elsewhere(self, rows: Tensor | None, changed: bool) -> bool:
        """Whether the state has changed in any process that shares the parameters; raises in all
        processes if their vectors differ."""
        leaves = self.at.space.leaves()
        columns, vectors = 0, [leaf.new_zeros(0) for leaf in leaves]
        if rows is not None:
            columns = len(rows)
            vectors = list(rows.split([leaf.numel() for leaf in leaves], dim=1))
        name = self.at.policy.caller
        shared = self.at.placement
        return shared.check_agreement(name, self._call, columns, vectors, leaves, changed)

    @contextmanager
    def require_constant_state(self, algorithm: str) -> Iterator[None]:
        """Raise if parameters or data change while an algorithm, such as a solver, makes its products.

        For a single batch, and for any data on a device, where each comparison would synchronize, the
        state is compared once, at the end. For other data `fold` compares it at each product, and this
        context does nothing.
        """
        waits = self.at.space.device.type != "cpu"
        one = self.batches.weight_cancels
        if self.state.algorithm or not (one or (self.whole and waits)):
            yield
            return
        with self.state.during(algorithm):
            try:
                yield
            except Exception as error:  # e.g. of a kept graph, for a tensor changed in place
                if self.kept is not None:
                    self.state.check(error)
                raise
            self.state.check()
            self._read_last_losses()

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without the kept graph: autograd graphs cannot be copied."""
        self._read_last_losses()
        return {**vars(self), "kept": None}
