"""A loss over data: its value, its gradient, and what else is summed up batch by batch.

    f = sum_b n_b loss(params, batch_b) / sum_b n_b        reduction="mean"
    f = sum_b loss(params, batch_b)                        reduction="sum"

The data is one batch, or many, in one process or in several that share it.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import fsum
from typing import Any, final

import torch
from torch import Tensor

from hoglib._core import pytree, validation
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
from hoglib._core.blocks import Remat, check_remat, rematerialized
from hoglib._core.fingerprint import StateFingerprint, checksum_of_tensors
from hoglib._core.gradient_graph import graph_summary
from hoglib._core.process_failures import translate_distributed_errors
from hoglib._core.source_location import warn
from hoglib._core.swap import keep_swapped
from hoglib.curvature.data import IGNORED, Batches, BatchSize, LocalBatch, counted_labels, in_step
from hoglib.curvature.likelihood import check_reduction
from hoglib.curvature.linear_operator import ProgressBar
from hoglib.curvature.processes import (
    PassTotals,
    Processes,
    checksum_of_rows,
    combine,
    constants_of,
)
from hoglib.curvature.reproducibility import Determinism, Symmetry, close
from hoglib.curvature.vector_space import Space
from hoglib.errors import ArgumentTypeError, ArgumentValueError, NondeterministicError
from hoglib.stand_ins.mode import stand_ins_if
from hoglib.verification.call import HalfWatch

Tree = Any
MEMORY_LIMIT = 2 * 2**30
CHECKED_EVERY = 8  # products of an algorithm: a kept graph reads neither modules nor new tensors
# (batch, number, share): adds share times what is summed; returns the loss of the batch
AddBatch = Callable[[Any, int, float], Tensor]


@final
@dataclass(frozen=True)
class DatasetOptions:
    """The options of operators over data, checked; `HessianOperator` describes them."""

    reduction: str = "mean"
    batch_size: BatchSize | None = None
    micro_batch: int | None = None
    memory_limit: float = MEMORY_LIMIT
    check_deterministic: bool = True
    stand_ins: bool = True
    progress: bool = False
    processes: str | None = None
    dtype: torch.dtype | None = None
    remat: Remat = False

    def __post_init__(self) -> None:
        validation.one_of("reduction", self.reduction, ["mean", "sum"])
        if self.batch_size is not None:
            validation.function("batch_size", self.batch_size)
        if self.micro_batch is not None:
            validation.at_least("micro_batch", self.micro_batch, 1)
        validation.number("memory_limit", self.memory_limit, minimum=0)
        if self.dtype is not None and not getattr(self.dtype, "is_floating_point", False):
            raise ArgumentTypeError(
                "dtype: expected a floating-point torch.dtype, such as torch.float32, got "
                f"{validation.describe(self.dtype)}."
            )
        object.__setattr__(self, "remat", check_remat(self.remat))
        for name in ("check_deterministic", "stand_ins", "progress"):
            validation.flag(name, getattr(self, name))


@final
class DatasetSum:
    """A loss over data at the parameters of a space, as they are at each call."""

    def __init__(
        self, loss: Any, space: Space, data: Any, options: DatasetOptions, processes: Processes,
        bar: ProgressBar, *, name: str, seed: int, fixed_batches: bool, takes_shards: bool = False,
    ) -> None:  # fmt: skip
        validation.loss_function("loss", loss)
        if not takes_shards:
            space.refuse_sharded(name)
        self.sharding = space.sharding  # with the weight of the current batch
        check_reduction(loss, options.reduction, synonyms={"batchmean": "mean"})
        self._loss, self._space, self._options = loss, space, options
        self._processes, self._bar, self._name, self._seed = processes, bar, name, seed
        self._mean = options.reduction == "mean"
        batch_size = options.batch_size or getattr(loss, "batch_size", None)
        self._batches = Batches(
            data,
            space.device,
            batch_size,
            options.micro_batch,
            processes,
            self.sharding is not None,
        )
        # whether the first pass looks for labels that a mean leaves out, but not the size of a batch
        self._counts_labels = self._mean and batch_size is None and not self._batches.single
        # the weight of the only batch cancels
        self._at_once = self.single_batch and processes.alone
        self._determinism = Determinism(loss, options.check_deterministic, fixed_batches)
        self.symmetry = Symmetry(name, options.check_deterministic, space, self._half)
        data_now = self._batches.current if self._batches.single else list
        self._fingerprint = StateFingerprint(loss, space.leaves, data_now)
        self._state: list[Any] = [object()]  # the fingerprint after the last pass
        self._algorithm = ""  # that runs
        self._cheap_state: list[Any] | None = None  # the same without values, while one runs
        self._unchecked = 0  # products since it was compared
        self.backend = ""  # that compiles the blocks which are recomputed
        self.kept: Any = None  # what an operator computed in this state; dropped when it changes
        self._unused: set[int] | None = None
        self._splits_checked = False
        self._fraction = 1.0  # of a pass, that the current batch is
        self._loss_dtype = space.dtype  # that of the loss, once it is known

    @property
    def single_batch(self) -> bool:
        """Whether the data is one batch that is not split, of this process alone."""
        return self._batches.single and self.sharding is None

    @property
    def alone(self) -> bool:
        """Whether no other process takes part."""
        return self._processes.alone

    def value(self) -> Tensor:
        """The loss over the data."""

        def add(batch: Any, number: int, share: float) -> Tensor:
            self.advance()
            return self.loss_of(batch)

        space = self._space
        with torch.inference_mode(False), self._bar.over("value", 1):
            nothing = torch.zeros(1, 0, dtype=space.dtype, device=space.device)
            return self._total_loss(self.run(partial(self.each_batch, add), nothing))

    def gradient(self) -> tuple[Tensor, Tree]:
        """The loss over the data and its gradient, in the structure of params."""
        space = self._space
        made: list[Tensor] = []

        def total() -> Tensor:
            """Made where there is something to add, when the graph of the first batch is gone."""
            if not made:
                with torch.inference_mode(False):
                    made.append(
                        torch.zeros(1, space.length, dtype=space.dtype, device=space.device)
                    )
            return made[0]

        def add(batch: Any, number: int, share: float) -> Tensor:
            leaves, batch = clone_inference_tensors((space.leaves(), batch))
            own = fresh_leaves(leaves, False)
            with self.evaluation_context(), keep_swapped():
                value = self._value(own, batch)
                check_uses_given_params(graph_summary(value), leaves, "gradient")
                with translate_errors("gradient"):
                    parts = torch.autograd.grad(value, own, allow_unused=True)
            space.add(total()[0], materialize_grads(list(parts), own), share)
            self.advance()
            return value

        with self._bar.over("gradient", 1):
            totals = self.run(partial(self.each_batch, add), total)
        with torch.inference_mode(False), torch.no_grad():
            return self._total_loss(totals), space.tree(total()[0].div_(self.weight(totals)))

    def _half(self) -> torch.dtype | None:
        """The dtype of half precision that the loss or its gradient computes in, if any."""
        with HalfWatch() as watch:
            self.gradient()
        return watch.dtype

    def weight(self, totals: PassTotals) -> float:
        """What a sum over the data is divided by."""
        return totals.weight if self._mean else 1.0

    def _total_loss(self, totals: PassTotals) -> Tensor:
        value = totals.loss / self.weight(totals)
        return torch.tensor(value, dtype=self._loss_dtype, device=self._space.device)

    def run(
        self,
        local_pass: Callable[[], PassTotals],
        total: Tensor | Callable[[], Tensor],
        rows: Tensor | None = None,
    ) -> PassTotals:
        """The totals of all processes, each of which adds its part to `total` by `local_pass`.

        total: or a function that returns it after the pass, in all processes, where its size is known
        only then. rows: the vectors that are multiplied, which have to be the same in all processes.
        """
        if self._space.sharding is not None:
            totals = self._run_sharded(local_pass, rows)
        elif self.alone:
            self._check_state()
            totals = local_pass()
        else:
            totals = self._run_distributed(local_pass, total, rows)
        if not totals.pieces:
            raise ArgumentValueError(
                "data: expected at least one batch, got none; a DataLoader with drop_last=True and "
                "fewer examples than a batch has none."
            )
        # of several processes the coarsest dtype of a loss is that of the parameters
        dtype = self._loss_dtype if self.alone else self._space.dtype
        if totals.shared:
            self._check_split(totals.whole, totals, dtype, None)
        self._determinism.finish(totals.loss / totals.weight, totals.largest, dtype)
        self._splits_checked = True
        self._warn_unused()
        return totals

    def _run_sharded(self, local_pass: Callable[[], PassTotals], rows: Tensor | None) -> PassTotals:
        """The totals of processes that share the parameters: all have them after each batch."""
        sharding, space = self._space.sharding, self._space
        assert sharding is not None
        with torch.inference_mode(False), translate_distributed_errors(self._name):
            changed = self._check_state()
            leaves = space.leaves()
            columns, vectors = 0, [leaf.new_zeros(0) for leaf in leaves]
            if rows is not None:
                columns = len(rows)
                vectors = list(rows.split([leaf.numel() for leaf in leaves], dim=1))
            if sharding.check_agreement(self._name, columns, vectors, leaves, changed):
                self._determinism.forget()
                self.symmetry.forget()
            return local_pass()

    def _run_distributed(
        self,
        local_pass: Callable[[], PassTotals],
        total: Tensor | Callable[[], Tensor],
        rows: Tensor | None,
    ) -> PassTotals:
        totals, error = PassTotals(), None
        count = len(pytree.leaves(self._space.params))
        used = torch.zeros(count)  # by how many processes, each leaf
        try:
            changed = self._check_state()
            leaves = self._space.leaves()
            totals = local_pass()._replace(
                changed=changed,
                seed=self._seed,
                params=checksum_of_tensors(leaves),
                model=checksum_of_tensors(constants_of(self._loss, leaves)),
                vectors=0.0 if rows is None else checksum_of_rows(rows),
                data=self._batches.checksum,
            )
            if totals.pieces:
                used[[i for i in range(count) if i not in (self._unused or ())]] = 1
        except Exception as caught:  # the other processes wait for this one
            error = caught
        with torch.inference_mode(False), torch.no_grad():
            sums = total() if callable(total) else total
            combined = combine(self._processes.all_reduce(sums, used, totals, error))
        if combined.changed:
            self._determinism.forget_total()
            self.symmetry.forget()
        if self._unused:
            self._unused = {i for i in self._unused if not used[i]}
        return combined

    def each_batch(self, add: AddBatch) -> PassTotals:
        """`add(batch, number, share)` for each batch of this process."""
        self._determinism.start()
        shares: list[float] = []
        losses: list[float] = []
        labels: list[tuple[dict[str, tuple[int, bool]], float]] = []
        whole, shared = 0.0, False
        for local, known in self._local_batches():
            first = len(shares)
            self._fraction = 1 / (max(len(self._batches), 1) * max(len(local.pieces), 1))
            for piece, weight, number in local.pieces:
                share = weight if self._mean and not self._at_once else 1.0
                if self._counts_labels:
                    labels.append((counted_labels(piece), weight))
                value = add(piece, number, share)
                self._determinism.record(piece, value, self.loss_of, known)
                self._loss_dtype = value.dtype
                shares.append(share)
                losses.append(float(value.detach()))
            if self._splits_checked:
                continue
            if local.shared:
                whole, shared = float(self.loss_of(local.batch)), True
            elif len(local.pieces) > 1:
                totals = _totals(shares[first:], losses[first:])
                value = self.loss_of(local.batch)
                self._check_split(float(value), totals, value.dtype, local.batch)
        self._counts_labels = False
        self._warn_of_ignored_labels(labels)
        self._state = self._fingerprint.now()  # a forward may count its calls
        return _totals(shares, losses)._replace(whole=whole, shared=shared)

    def _local_batches(self) -> Iterator[tuple[LocalBatch, tuple[float, ...] | None]]:
        """The batches; processes that share the parameters all take their next one together."""
        sharding = self._space.sharding
        if sharding is None:
            yield from ((local, None) for local in self._batches)
            return
        for local, weighted, known in in_step(self._name, self._batches, sharding):
            self.sharding = weighted
            yield local, known

    def kept_batch(self, value: Tensor, share: float) -> PassTotals:
        """The totals of the only batch, whose product was computed from a kept graph."""
        return _totals([share], [float(value.detach())])

    def record_first_pass(self, batch: Any, value: Tensor) -> Tensor:
        """The loss of the only batch once more, to compare with: there will be no other pass.

        A graph that is kept holds the random numbers that were drawn.
        """
        if not self._options.check_deterministic:
            return value
        self._determinism.record(batch, value, self.loss_of)
        self._determinism.finish_pass()
        leaves, batch = clone_inference_tensors((self._space.leaves(), batch))
        with self.evaluation_context():
            return without_graph(lambda: self._value(leaves, batch))

    @contextmanager
    def held(self, algorithm: str) -> Iterator[None]:
        """Inside, the values of parameters and data are compared at the first product, and at the end;
        in between only what takes no time for each number."""
        if self._algorithm or not self._at_once:
            yield
            return
        self._algorithm = algorithm
        try:
            try:
                yield
            except Exception as error:  # of a kept graph, for tensors that were changed in place
                if self.kept is not None and self._changed():
                    raise self._changed_meanwhile() from error
                raise
            if self._changed():
                raise self._changed_meanwhile()
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

    def _changed_meanwhile(self) -> Exception:
        return NondeterministicError(
            f"{self._name}.{self._algorithm}: expected parameters, buffers and data that stay the same "
            "until it ends, got others; call it again when they do not change."
        )

    def advance(self) -> None:
        """Count a product, or gradient, with the current batch."""
        self._bar.advance(self._fraction)

    def note_unused(self, unused: tuple[int, ...] | None) -> None:
        """The leaves that the loss of a batch does not depend on, where that is known."""
        if unused is not None:
            now = set(unused)
            self._unused = now if self._unused is None else self._unused & now

    @contextmanager
    def evaluation_context(self) -> Iterator[None]:
        """Gradients on, also in inference mode, and stand-ins and recomputation where asked for."""
        blocks = rematerialized(self._options.remat, self._loss, self.backend)
        with grad_enabled(), stand_ins_if(self._options.stand_ins), blocks as found:
            if self.sharding is not None:
                self.sharding = self.sharding.defer(getattr(self._loss, "model", None), found)
            yield

    def loss_of(self, batch: Any) -> Tensor:
        """The loss of a batch, without a graph."""
        with self.evaluation_context():
            return without_graph(lambda: self._value(self._space.leaves(), batch))

    def _value(self, leaves: Vector, batch: Any) -> Tensor:
        if self.sharding is not None:
            leaves = self.sharding.gather(leaves)
        params = self._space.params_of(leaves)

        def value() -> Tensor:
            return validation.scalar("loss(params, batch)", self._loss(params, batch))

        return value() if self.sharding is None else self.sharding.mean_of(value)

    def _check_split(
        self, whole: float, totals: PassTotals, dtype: torch.dtype, batch: Any
    ) -> None:
        """The loss of a batch is that of its pieces, weighted: no layer or criterion mixes examples."""
        pieces = totals.loss / totals.weight if self._mean else totals.loss
        if not close(whole, pieces, dtype, [totals.largest]):
            random = batch is not None and self._determinism.random_cause(
                lambda: self.loss_of(batch), self._space.device
            )
            if random:
                raise NondeterministicError(
                    "micro_batch: expected the same loss for a batch and for its pieces, got "
                    f"{whole:.8g} and {pieces:.8g}: {random}"
                )
            raise ArgumentValueError(
                f"{'processes' if totals.shared else 'micro_batch'}: expected a loss that is the "
                f"{'mean' if self._mean else 'sum'} over "
                f"examples, got {whole:.8g} for a batch and {pieces:.8g} from its pieces. "
                "BatchNorm in train mode mixes examples (call model.eval()), a criterion may weight "
                "them (give the weight of a batch by batch_size=), or its reduction is not that of the "
                "operator."
            )

    def _warn_unused(self) -> None:
        if self._unused:
            names = pytree.paths(self._space.params)
            warnings.warn(
                f"{self._name}: the loss does not depend on "
                f"{', '.join(names[i] for i in sorted(self._unused))}; these rows and columns are "
                "zero, and the matrix is singular. Leave them out of params.",
                stacklevel=2,
            )
            self._unused = set()

    def _warn_of_ignored_labels(
        self, batches: list[tuple[dict[str, tuple[int, bool]], float]]
    ) -> None:
        """Warn where batches have other numbers of labels for each example that enter a mean."""
        for name in batches[0][0] if batches else ():
            found = [(*counts[name], weight) for counts, weight in batches if name in counts]
            ratios = [kept / weight for kept, _, weight in found]
            if any(ignored for _, ignored, _ in found) and min(ratios) < max(ratios):
                warn(
                    f"{self._name}: expected batches with as many labels for each example, got "
                    f"{min(ratios):.3g} to {max(ratios):.3g} elements of {name} that are not "
                    f"{IGNORED}. A mean over these labels, as cross_entropy's, is not that over the "
                    "data, because batches are weighted by their examples. Pass "
                    f"`batch_size=lambda batch: ({name} != {IGNORED}).sum()`, or use "
                    "`hoglib.language_model_loss`, which counts them; for a mean over examples pass "
                    "`batch_size=` with their number."
                )
                return

    def _check_state(self) -> bool:
        """Whether parameters, buffers or modes changed; what was known of them is dropped then."""
        first = self._cheap_state is None
        if self._algorithm:
            self._unchecked = 0
            cheap = self._fingerprint.now(values=False)
            if cheap == self._cheap_state:
                return False
            self._cheap_state = cheap
        now = self._fingerprint.now()
        changed = now != self._state
        if changed and not first:
            raise self._changed_meanwhile()
        if changed:
            self._state, self._splits_checked, self.kept = now, False, None
            self._determinism.forget()
            self.symmetry.forget()
        return changed

    def __getstate__(self) -> dict[str, Any]:
        """A copy keeps no graph, which cannot be copied."""
        return {**vars(self), "kept": None, "_state": [object()]}


def _totals(shares: list[float], losses: list[float]) -> PassTotals:
    return PassTotals(
        pieces=len(shares),
        weight=fsum(shares),
        loss=fsum(share * loss for share, loss in zip(shares, losses, strict=True)),
        largest=max(map(abs, losses), default=0.0),
    )
