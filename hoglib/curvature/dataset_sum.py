"""A loss over data: its value, its gradient, and what else is summed up batch by batch.

    f = sum_b n_b loss(params, batch_b) / sum_b n_b        reduction="mean"
    f = sum_b loss(params, batch_b)                        reduction="sum"

The data is one batch, or many, in one process or in several that share it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from math import fsum
from typing import Any, Literal, TypedDict, final

import torch
from torch import Tensor

from hoglib._core import autograd, pytree, validation
from hoglib._core.fingerprint import StateFingerprint, checksum_of_tensors
from hoglib._core.gradient_graph import graph_summary
from hoglib._core.logger import LOGGER
from hoglib._core.module_kinds import BATCH_NORMS
from hoglib._core.placement import Sharding
from hoglib._core.problem import OPTION_NAMES, Options, Policy, Problem, check_option_names
from hoglib._core.source_location import warn
from hoglib._core.state import preserve_random_state
from hoglib.curvature import likelihood as likelihoods
from hoglib.curvature.data import (
    IGNORED,
    Batches,
    BatchSize,
    LocalBatch,
    PassTotals,
    Processes,
    as_dict,
    checksum_of_rows,
    constants_of,
    counted_labels,
    in_step,
    leading_dimension,
)
from hoglib.curvature.linear_operator import ProgressBar
from hoglib.curvature.reproducibility import Determinism, Symmetry, close
from hoglib.curvature.vector_space import Space, Tree
from hoglib.errors import ArgumentTypeError, ArgumentValueError, NondeterministicError
from hoglib.ring import ring
from hoglib.verification.entry_points import examined_functions
from hoglib.verification.precision import HalfWatch

Total = Tensor | Callable[[], Tensor]  # of a pass, or what makes it where its size is known
CountedLabels = tuple[dict[str, tuple[int, bool]], float]  # of a batch, and its weight
MEMORY_LIMIT = 2 * 2**30
CHECKED_EVERY = 8  # products of an algorithm: a kept graph reads neither modules nor new tensors


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


def criterion_denominator(loss: Any, batch: Any) -> float:
    """What the mean of the criterion divides by, where that is known."""
    counts = likelihoods.example_counts(loss, as_dict(batch))
    return leading_dimension(batch) if counts is None else float(counts.sum())


@final
class DatasetSum:
    """A loss over data at the parameters of a space, as they are at each call."""

    def __init__(
        self,
        policy: Policy,
        loss: Any,
        space: Space,
        data: Any,
        options: CheckedDataOptions,
        processes: Processes,
        bar: ProgressBar,
        *,
        fixed_batches: bool,
        seed: int = 0,
        counting: likelihoods.Counting = "criterion",
    ) -> None:
        validation.loss_function("loss", loss)
        self._policy, self._name = policy, policy.caller
        self._placement = space.placement  # with the weight of the current batch
        likelihoods.check_reduction(loss, options.reduction)
        self.loss, self._space, self._options = loss, space, options
        self._processes, self._bar, self._seed = processes, bar, seed
        self._mean = options.reduction == "mean"
        batch_size = options.batch_size or getattr(loss, "batch_size", None)
        self._counting = counting
        own = self._mean and batch_size is None  # weights that nobody gave
        # of the loss alone: a method of this object would keep it in a cycle until a garbage collection
        size = (
            partial(criterion_denominator, loss) if own and counting == "criterion" else batch_size
        )
        sharded = space.placement.is_sharded
        self._batches = Batches(data, space.device, size, options.micro_batch, processes, sharded)
        # whether the first pass compares the denominators of the criterion with these weights
        self._infers_weights = self._compares_denominators = own and not self._batches.single
        # whether to warn, once, of layers that normalize by the batch
        self._warns_of_batch_norm = not self._batches.single and options.micro_batch is None
        self.alone = processes.alone  # no other process takes part in the sum
        self.whole = self.alone and not sharded  # nor holds a part of the vectors
        # the data is one batch that is not split, of this process alone
        self.single_batch = self._batches.single and not sharded
        # the weight of the only batch cancels
        self._weight_cancels = self.single_batch and self.alone
        checks = options.check_deterministic
        self._determinism = Determinism(loss, checks, fixed_batches)
        self.symmetry = Symmetry(self._name, checks, space, loss)
        data_now = self._batches.current if self._batches.single else list
        self._fingerprint = StateFingerprint(loss, space.leaves, data_now)
        self._state: list[Any] = [object()]  # the fingerprint after the last pass
        self._algorithm = ""  # the name of the one that runs
        self._cheap_state: list[Any] | None = None  # without values, while an algorithm runs
        self._unchecked = 0  # products since the state was compared
        self._last_totals: PassTotals | None = None  # of a pass in this state
        self._unread_shares: list[float] = []  # the shares of a pass whose losses are to be read
        self.kept: Any = None  # what an operator computed in this state; dropped when it changes
        self._unused: set[int] | None = None
        self._ratio: float | None = None  # of what the criterion counts to the weight of a batch
        self._splits_checked = False
        self._fraction_of_pass = 1.0  # of a pass, that the current batch is
        self._loss_dtype = space.dtype  # that of the loss, once it is known

    def value(self) -> Tensor:
        """The loss over the data."""
        space = self._space
        with torch.inference_mode(False), self._bar.over("value", 1):
            nothing = torch.zeros(1, 0, dtype=space.dtype, device=space.device)
            with self.one_pass(nothing) as batches:
                for batch, _, share in batches:
                    self._check_counts(batch, share)
                    batches.record(self.loss_of(batch))
                    self.advance()
            return self._total_loss(batches.totals)

    def gradient(self) -> tuple[Tensor, Tree]:
        """The loss over the data and its gradient, in the structure of params."""
        space = self._space

        @cache
        def total() -> Tensor:
            """Made where there is something to add, when the graph of the first batch is gone."""
            with torch.inference_mode(False):
                return torch.zeros(1, space.length, dtype=space.dtype, device=space.device)

        with self._bar.over("gradient", 1), self.one_pass(total, first_order=True) as batches:
            for batch, _, share in batches:
                self._check_counts(batch, share)
                with self.entered(batch) as f:
                    p = autograd.fresh_leaves(f.leaves, False)
                    value = f(*p)
                    autograd.check_uses_given_params(graph_summary(value), f.leaves, "gradient")
                    with autograd.translate_errors("gradient"):
                        grads = torch.autograd.grad(value, p, allow_unused=True)
                space.add(total()[0], autograd.materialize_grads(list(grads), p), share)
                batches.record(value)
                self.advance()
        with torch.inference_mode(False), torch.no_grad():
            mean = total()[0].div_(self.weight(batches.totals))
            return self._total_loss(batches.totals), space.tree(mean)

    def weight(self, totals: PassTotals) -> float:
        """What a sum over the data is divided by."""
        return totals.weight if self._mean else 1.0

    def _total_loss(self, totals: PassTotals) -> Tensor:
        value = totals.loss / self.weight(totals)
        self.number: float = torch.tensor(value, dtype=self._loss_dtype, device="cpu").item()
        # filled in, because a device waits for a copy
        return torch.full((), value, dtype=self._loss_dtype, device=self._space.device)

    @contextmanager
    def one_pass(
        self, total: Total, rows: Tensor | None = None, *, first_order: bool = False
    ) -> Iterator["DataPass"]:
        """A pass over the data, in all processes, each of which adds its part to `total`.

        total: the tensor; or a function that returns it after the pass, in all processes, where its
        size is known only then. rows: the vectors that are multiplied, the same in all processes. With
        rows, a kept graph of the only batch takes the place of that batch.
        """
        found = DataPass(self, total, rows)
        try:
            with ExitStack() as around:
                if self._placement.is_sharded:
                    around.enter_context(torch.inference_mode(False))
                    around.enter_context(self._placement.translate_errors(self._name))
                try:
                    found.changed = self._check_state()
                    waits = rows is not None and self._space.device.type != "cpu"
                    found.late = waits and self._last_totals is not None
                    self._check_agreement(rows, found.changed)
                except Exception as error:  # the other processes wait for this one
                    found.error = error
                found.uses_kept_graph = rows is not None and self.kept is not None
                # the Functions in a kept graph were examined when it was made
                if not found.uses_kept_graph:
                    around.enter_context(examined_functions(self._name, first_order=first_order))
                yield found
        except Exception as error:
            if not self.alone:
                self._combine(found, error)  # raises it in all processes
            raise
        if not self.alone:
            self._combine(found, None)
        if not found.late:
            self._finish(found.totals)
            self._last_totals = found.totals if self.alone else None

    def _each_batch(self, given: "DataPass") -> Iterator[tuple[Any, int, float]]:
        """The pieces of the batches of this process, their numbers and shares; then their totals."""
        self._determinism.start()
        if self._warns_of_batch_norm:
            self._warn_of_batch_norm()
        shares: list[float] = []
        labels: list[CountedLabels] = []
        whole, shared = 0.0, False
        for local, known in self._local_batches():
            first = len(shares)
            self._fraction_of_pass = 1 / (max(len(self._batches), 1) * max(len(local.pieces), 1))
            for piece, weight, number in local.pieces:
                if not weight and self._mean:
                    continue  # no label of it counts: its mean is 0 / 0
                share = weight if self._mean and not self._weight_cancels else 1.0
                if self._counting == "examples":
                    self._check_counts(piece, weight)
                yield piece, number, share
                value = given.value
                if self._compares_denominators and self._counting != "terms":
                    labels += self._compare_counts(piece, weight, value, len(shares))
                self._determinism.record(piece, value, self.loss_of, known)
                self._loss_dtype = value.dtype
                shares.append(share)
            if self._splits_checked:
                continue
            if self._batches.shared:
                whole, shared = float(self.loss_of(local.batch)), True
            elif len(local.pieces) > 1 and shares[first:]:
                totals = _sum_totals(shares[first:], self._determinism.losses[first:])
                value = self.loss_of(local.batch)
                self._check_split(float(value), totals, value.dtype, local.batch)
        self._compares_denominators = False
        self._warn_of_ignored_labels(labels)
        self._state = self._fingerprint.now()  # a forward may count its calls
        self._unread_shares = shares if given.late else []
        losses = [0.0] * len(shares) if given.late else self._determinism.losses
        given.totals = _sum_totals(shares, losses)._replace(whole=whole, shared=shared)

    def _local_batches(self) -> Iterator[tuple[LocalBatch, tuple[float, ...] | None]]:
        """The batches; processes that share the parameters all take their next one together."""
        placement = self._space.placement
        if not isinstance(placement, Sharding):
            yield from ((local, None) for local in self._batches)
            return
        for local, weighted, known in in_step(self._name, self._batches, placement):
            self._placement = weighted
            yield local, known

    def _finish(self, totals: PassTotals) -> None:
        """Compare the loss of all processes with that of the pass before."""
        if not totals.pieces:
            raise ArgumentValueError(
                "data: expected at least one batch, got none; a DataLoader with drop_last=True and "
                "fewer examples than a batch has none, and a batch whose labels are all ignore_index "
                "does not count."
            )
        # of several processes the coarsest dtype of a loss is that of the parameters
        dtype = self._loss_dtype if self.alone else self._space.dtype
        if totals.shared:
            self._check_split(totals.whole, totals, dtype, None)
        self._determinism.finish(totals.loss / totals.weight, totals.largest, dtype)
        self._splits_checked = True
        self._warn_unused()

    def _read_last_losses(self) -> None:
        """Read the losses of the last pass, if they were not."""
        shares, self._unread_shares = self._unread_shares, []
        if shares:
            self._finish(_sum_totals(shares, self._determinism.losses))

    @torch.inference_mode(False)
    @torch.no_grad()
    def _combine(self, given: "DataPass", error: Exception | None) -> None:
        """Add up the totals of all processes, and their sums in the total of the pass."""
        total, rows = given.total, given.rows
        totals, count = given.totals, len(pytree.leaves(self._space.params))
        used = torch.zeros(count, device="cpu")  # by how many processes, each leaf
        if error is None:
            leaves = self._space.leaves()
            params, constants = map(checksum_of_tensors, (leaves, constants_of(self.loss, leaves)))
            vectors, data = 0.0 if rows is None else checksum_of_rows(rows), self._batches.checksum
            totals = totals._replace(changed=given.changed, seed=self._seed, params=params)
            totals = totals._replace(model=constants, vectors=vectors, data=data)
            if totals.pieces:
                used[[i for i in range(count) if i not in (self._unused or ())]] = 1
        sums = total() if callable(total) else total
        given.totals = self._processes.all_reduce(sums, used, totals, error)
        if given.totals.changed:
            self._determinism.forget_total()
            self.symmetry.forget()
        if self._unused:
            self._unused = {i for i in self._unused if not used[i]}

    def _check_agreement(self, rows: Tensor | None, changed: bool) -> None:
        """Raise in all processes that share the parameters where one multiplies other vectors."""
        if not self._placement.is_sharded:
            return
        leaves = self._space.leaves()
        columns, vectors = 0, [leaf.new_zeros(0) for leaf in leaves]
        if rows is not None:
            columns = len(rows)
            vectors = list(rows.split([leaf.numel() for leaf in leaves], dim=1))
        if self._placement.check_agreement(self._name, columns, vectors, leaves, changed):
            self._determinism.forget()
            self.symmetry.forget()

    def problem(self, batch: Any) -> Problem:
        """The loss at a batch, and the parameters as they are now."""
        structure, leaves = self._space.structure, self._space.leaves()
        where = self._placement, "loss(params, batch)"
        return Problem(self._policy, self.loss, structure, leaves, (batch,), *where)

    def ring(self, *, around_graph: bool = False) -> ring:
        """What stands around the evaluation of a batch; custom Functions are examined once a pass."""
        return ring(self._policy, self.loss, examine=False, around_graph=around_graph)

    @contextmanager
    def entered(self, batch: Any) -> Iterator[Problem]:
        """The problem at a batch, inside the ring."""
        with self.ring() as blocks:
            yield self.problem(batch).entered(blocks)

    def loss_of(self, batch: Any) -> Tensor:
        """The loss of a batch, without a graph."""
        with self.entered(batch) as problem:
            return autograd.without_graph(lambda: problem(*problem.leaves))

    def advance(self) -> None:
        """Count a product, or gradient, with the current batch."""
        self._bar.advance(self._fraction_of_pass)

    def note_unused(self, unused: tuple[int, ...] | None) -> None:
        """The leaves that the loss of a batch does not depend on, where that is known."""
        if unused is not None:
            now = set(unused)
            self._unused = now if self._unused is None else self._unused & now

    def _check_state(self) -> bool:
        """Whether parameters, buffers or modes changed; what was known of them is dropped then."""
        first = self._cheap_state is None
        # sums and norms take a pass over all numbers: within an algorithm only where pointers, versions
        # or settings are others than at its last check
        if self._algorithm:
            self._unchecked = 0
            cheap = self._fingerprint.now(values=False)
            if cheap == self._cheap_state:
                self._read_last_losses()
                return False
            self._cheap_state = cheap
        now = self._fingerprint.now()
        changed = now != self._state
        self._read_last_losses()
        if changed and not first:
            raise self._changed_during_algorithm()
        if changed:
            self._state, self._splits_checked, self.kept, self._last_totals = now, False, None, None
            self._determinism.forget()
            self.symmetry.forget()
        return changed

    @contextmanager
    def require_constant_state(self, algorithm: str) -> Iterator[None]:
        """Inside, parameters and data are compared by value at the first product and at the end, and in
        between by pointers and versions alone. So for a single batch, and on a device for all data,
        which would have to wait."""
        waits = self._space.device.type != "cpu"
        if self._algorithm or not (self._weight_cancels or (self.whole and waits)):
            yield
            return
        self._algorithm = algorithm
        try:
            try:
                yield
            except Exception as error:  # of a kept graph, for tensors that were changed in place
                if self.kept is not None and self._changed():
                    raise self._changed_during_algorithm() from error
                raise
            if self._changed():
                raise self._changed_during_algorithm()
            self._read_last_losses()
        finally:
            self._algorithm, self._cheap_state = "", None

    def next_is_unchecked(self) -> bool:
        """Whether the next product, by the kept graph, needs no check: an algorithm runs, whose first
        and last products are checked, and some in between."""
        if self.kept is None or self._cheap_state is None:
            return False
        self._unchecked += 1
        return self._unchecked < CHECKED_EVERY

    def _changed(self) -> bool:
        """Whether the state is another one than at the first product of the algorithm that runs."""
        return self._cheap_state is not None and self._fingerprint.now() != self._state

    def _changed_during_algorithm(self) -> Exception:
        return NondeterministicError(
            f"{self._name}.{self._algorithm}: expected parameters, buffers and data that stay the same "
            "until it ends, got others; call it again when they do not change."
        )

    def record_first_pass(self, batch: Any, value: Tensor) -> Tensor:
        """The loss of the only batch, computed again and compared, before its graph is kept; unless an
        earlier pass has compared it.

        No later pass will: a kept graph holds the random numbers that were drawn.
        """
        if not self._options.check_deterministic or self._determinism.first:
            return value
        self._determinism.record(batch, value, self.loss_of)
        self._determinism.finish_pass()
        return self.loss_of(batch)

    def _half_precision_dtype(self) -> torch.dtype | None:
        """The dtype of half precision that the loss or its gradient computes in, if any."""
        with HalfWatch() as watch:
            self.gradient()
        return watch.dtype

    def check_symmetry(
        self, rows: Tensor, products: Tensor, in_double: Callable[[Tensor, Any], Tensor]
    ) -> None:
        """Compare the first products; in_double: those of rows at a batch, in float64."""
        double = partial(self._products_in_double, in_double)
        self.symmetry.record(rows, products, self._half_precision_dtype, double)

    def _products_in_double(
        self, in_double: Callable[[Tensor, Any], Tensor], rows: Tensor
    ) -> Tensor | None:
        """The products of rows at the first batch in float64, one by one; None if there are none."""
        if not self.alone or self._placement.is_sharded:
            return None
        try:
            with preserve_random_state():
                local = next(iter(self._batches))
            return in_double(rows, local.pieces[0])
        except Exception as error:  # of code that is bound to another dtype
            LOGGER.debug("%s: no products in float64: %s", self._name, error)
            return None

    def _check_counts(self, batch: Any, share: float) -> None:
        """Raise where the matrix has a term for each example, but the mean of the loss divides by
        another number."""
        if self._counting == "criterion" or not self._infers_weights or self._placement.is_sharded:
            return  # with shards, a share is that of all processes
        ratio = criterion_denominator(self.loss, batch) / share
        self._ratio = ratio if self._ratio is None else self._ratio
        if abs(ratio - self._ratio) > 1e-9 * self._ratio:
            raise self._wrong_denominator(
                "a GGNOperator has the value and the gradient of the data"
                if self._counting == "terms"
                else "take a criterion and an operator with reduction='sum', whose matrix is F D^2 / N "
                "with the sum D of the weights of N examples"
            )

    def _compare_counts(
        self, batch: Any, weight: float, value: Tensor, number: int
    ) -> list[CountedLabels]:
        """Raise for a loss that is the mean over something else than the weights of batches count.

        A criterion of the table says what it counts; any other loss is compared with those of the
        halves of a batch, at the batches 0, 1, 2, 4, 8, ... Returns labels that a mean may leave out.
        """
        if likelihoods.example_counts(self.loss, as_dict(batch)) is not None:
            return []
        if not number & (number - 1) and self._relation_of_halves(batch, value) == "weighted":
            labels = 'batch["labels"][:, 1:]' if isinstance(batch, Mapping) else "batch[1]"
            raise self._wrong_denominator(
                f"give that number of a batch, `batch_size=lambda batch: ({labels} != -100).sum()` for "
                "labels or `batch[-1].sum()` for a mask, or pass the criterion of torch itself; "
                "`batch_size=lambda batch: len(batch[0])` weights batches by their examples"
            )
        return [(counted_labels(batch), weight)]

    def _relation_of_halves(self, batch: Any, value: Tensor) -> likelihoods.Relation | None:
        """How the loss of a batch is made of those of its halves."""
        if self._placement.is_sharded:
            return None  # all processes would have to evaluate as many halves

        uncompiled = self._policy._replace(backend="")  # halves have shapes of their own

        def at(seed: int, part: Any) -> Tensor:
            with ring(uncompiled, self.loss, examine=False) as blocks:
                problem = self.problem(part).entered(blocks)
                leaves = likelihoods.nearby(problem.leaves, seed)
                return autograd.without_graph(lambda: problem(*leaves))

        return likelihoods.compare_halves(at, batch, value.detach())

    def _wrong_denominator(self, advice: str) -> ArgumentValueError:
        return ArgumentValueError(
            f"{self._name}: expected a loss that is the mean over the examples of a batch, got "
            "one whose mean divides by another number: class weights, a mask, or labels that are "
            f"ignored. Batches weighted by their examples are not the mean over the data; {advice}."
        )

    def _check_split(self, whole: float, parts: PassTotals, dtype: torch.dtype, batch: Any) -> None:
        """The loss of a batch is that of its pieces, weighted: no layer or criterion mixes examples."""
        pieces = parts.loss / parts.weight if self._mean else parts.loss
        if not close(whole, pieces, dtype, [parts.largest]):
            cause = self._determinism.random_cause
            random = batch is not None and cause(lambda: self.loss_of(batch), self._space.device)
            if random:
                raise NondeterministicError(
                    "micro_batch: expected the same loss for a batch and for its pieces, got "
                    f"{whole:.8g} and {pieces:.8g}: {random}"
                )
            raise ArgumentValueError(
                f"{'processes' if parts.shared else 'micro_batch'}: expected a loss that is the "
                f"{'mean' if self._mean else 'sum'} over examples, got {whole:.8g} for a batch and "
                f"{pieces:.8g} from its pieces. BatchNorm in train mode mixes examples (call "
                "model.eval()), a criterion may weight them (give the weight of a batch by "
                "batch_size=), or its reduction is not that of the operator."
            )

    def _warn_unused(self) -> None:
        if self._unused:
            names = pytree.paths(self._space.params)
            warn(
                f"{self._name}: the loss does not depend on "
                f"{', '.join(names[i] for i in sorted(self._unused))}; these rows and columns are "
                "zero, and the matrix is singular. Leave them out of params."
            )
            self._unused = set()

    def _warn_of_ignored_labels(self, batches: list[CountedLabels]) -> None:
        """Warn where batches have other numbers of labels for each example that enter a mean."""
        for name in batches[0][0] if batches else ():
            found = [(*counts[name], weight) for counts, weight in batches if name in counts]
            ratios = [kept / weight for kept, _, weight in found]
            if any(ignored for _, ignored, _ in found) and min(ratios) < max(ratios):
                warn(
                    f"{self._name}: expected batches with as many labels for each example, got "
                    f"{min(ratios):.3g} to {max(ratios):.3g} elements of {name} that are not "
                    f"{IGNORED}. A mean over these labels, as cross_entropy's, is not that over the "
                    "data, because batches are weighted by their examples. Pass `batch_size=lambda "
                    f"batch: ({name} != {IGNORED}).sum()`, or use `hoglib.language_model_loss`, which "
                    "counts them; for a mean over examples pass `batch_size=` with their number."
                )
                return

    def _warn_of_batch_norm(self) -> None:
        """Warn, once, of layers that normalise by the batch."""
        self._warns_of_batch_norm = False
        names = {
            f"{name or 'the model'} ({type(module).__name__})": None
            for root in self._fingerprint.roots
            for name, module in root.named_modules()
            if isinstance(module, BATCH_NORMS) and (module.training or module.running_mean is None)
        }
        if names:
            warn(
                f"{self._name}: expected the loss of each example to depend on that example alone, got "
                f"one that normalises by the batch: {validation.listing(list(names))} in train mode. "
                "What is computed is that of these batches: it depends on their size, and on which "
                "examples share one, most of all where the data is sorted. Call model.eval(), or pass "
                "all of the data as one batch. Where these batches are meant, filter this warning."
            )

    def warn_of_draws(self, batch: Any) -> None:
        """Warn of what draws random numbers in the loss of a batch, where no other pass shows it."""
        if not self._options.check_deterministic or self._placement.is_sharded:
            return
        if cause := self._determinism.random_cause(lambda: self.loss_of(batch), self._space.device):
            warn(
                f"{self._name}: expected a loss that is the same at every pass, got one whose factors "
                f"are those of one draw: {cause}"
            )

    def __getstate__(self) -> dict[str, Any]:
        """A copy keeps no graph, which cannot be copied."""
        self._read_last_losses()
        return {**vars(self), "kept": None, "_state": [object()]}


@final
class DataPass:
    """A pass over the data, in all processes that take part.

        with sums.one_pass(total) as batches:
            for batch, number, share in batches:
                ...                           # adds share times something to total
                batches.record(value)         # the loss of the batch
        batches.totals                        # of all processes

    Custom Functions are examined, and losses compared with those of the pass before. At the end the
    processes add up what they have; an error in one of them is raised in all.
    """

    def __init__(self, sums: DatasetSum, total: Total, rows: Tensor | None) -> None:
        self._sums, self.total, self.rows, self.totals = sums, total, rows, PassTotals()
        # late: its losses, which were the same before, are read when the next pass begins, by when a
        # device need not be waited for
        self.changed = self.uses_kept_graph = self.late = False
        self.error: Exception | None = None

    def __iter__(self) -> Iterator[tuple[Any, int, float]]:
        if self.error is not None:
            raise self.error
        if not self.uses_kept_graph:
            yield from self._sums._each_batch(self)
        else:
            share = self._sums.kept.share
            yield None, 0, share
            # the totals of the last pass hold, as the state is the same
            self.totals = self._sums._last_totals or _sum_totals([share], [float(self.value)])

    def record(self, value: Tensor) -> None:
        """The loss of the batch that was given last."""
        self.value = value.detach()


def _sum_totals(shares: list[float], losses: list[float]) -> PassTotals:
    total = fsum(share * loss for share, loss in zip(shares, losses, strict=True))
    largest = max(map(abs, losses), default=0.0)
    return PassTotals(pieces=len(shares), weight=fsum(shares), loss=total, largest=largest)
