"""The Hessian, Gauss-Newton and Fisher matrices of a loss over data, as linear operators."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from hoglib._core import pytree, validation
from hoglib._core.autograd import clone_inference_tensors, grad_enabled
from hoglib._core.blocks import find_blocks
from hoglib._core.finite_differences import to_double
from hoglib._core.swap import PatchState, keep_swapped, reapply
from hoglib.capture.capturing import runs_elsewhere
from hoglib.curvature.compiled import compiled_linear_map
from hoglib.curvature.data import BatchSize
from hoglib.curvature.dataset_sum import MEMORY_LIMIT, DatasetOptions, DatasetSum
from hoglib.curvature.fisher_metric import FisherMetric
from hoglib.curvature.gauss_newton import GaussNewtonKind
from hoglib.curvature.linear_map import (
    DIFFERENCES,
    BoundLoss,
    CurvatureKind,
    HessianKind,
    LinearMap,
    checked_options,
    double_loss,
    refuse_wrapped_calls,
)
from hoglib.curvature.linear_operator import LinearOperator
from hoglib.curvature.processes import PassTotals, Processes
from hoglib.curvature.vector_space import Space
from hoglib.errors import NonFiniteError, UnsupportedError
from hoglib.verification.entry_points import examined_functions

Tree = Any


class DatasetOperator(LinearOperator):
    """A kind of matrix, of a loss over data: a matrix at each batch, averaged or summed.

    `LinearOperator` describes products, algebra and algorithms.
    """

    def __init__(
        self,
        loss: Any,
        params: Tree,
        data: Any,
        *,
        reduction: str = "mean",
        mode: str = "auto",
        batch_size: BatchSize | None = None,
        micro_batch: int | None = None,
        memory_limit: float = MEMORY_LIMIT,
        check_deterministic: bool = True,
        stand_ins: bool = True,
        progress: bool = False,
        compile: bool | str = False,
        processes: str | None = None,
        dtype: torch.dtype | None = None,
        remat: bool | str | Sequence[str] = False,
    ) -> None:
        options = DatasetOptions(
            reduction, batch_size, micro_batch, memory_limit, check_deterministic, stand_ins, progress,
            processes, dtype, remat,
        )  # fmt: skip
        name, kind = type(self).__name__, self._kind_of(mode)
        self._options = checked_options(
            name, kind, False, options.stand_ins, compile, options.remat
        )
        sharing = Processes(name, options.processes, data)
        # the first process shows the bar for all
        super().__init__(Space(params, options.dtype), options.progress and sharing.rank == 0)
        kind.check_loss(loss)
        if self.space.sharding is not None:
            _check_sharded(name, loss, kind, options, self._options.backend)
        if options.remat is not False:
            find_blocks(options.remat, loss)  # raises where there are none
        self._sum = DatasetSum(
            loss, self.space, data, options, sharing, self._bar,
            name=name, seed=kind.seed, fixed_batches=kind.random, takes_shards=True,
        )  # fmt: skip
        self._kind = kind
        self._in_double = kind.mode == DIFFERENCES
        self._loss = double_loss(loss) if self._in_double else loss
        self._memory_limit = options.memory_limit
        self._sum.backend = self._options.backend

    @abstractmethod
    def _kind_of(self, mode: str) -> CurvatureKind:
        """The matrix at one batch, whose products are computed in this mode."""

    def value(self) -> Tensor:
        """The loss over the data, a scalar tensor."""
        return self._sum.value()

    def gradient(self) -> tuple[Tensor, Tree]:
        """The loss over the data and its gradient, in the structure of params."""
        return self._sum.gradient()

    @contextmanager
    def _algorithm(self, name: str, products: int | None = None) -> Iterator[None]:
        with super()._algorithm(name, products), self._sum.held(name):
            yield

    def _products(self, rows: Tensor) -> Tensor:
        validation.refuse_transforms(str(self), "use the function hvp, ggn_vp or fisher_vp there.")
        # of several processes one may have no batch, and adds zeros
        make = torch.empty if self._sum.alone else torch.zeros
        total = make(rows.shape, dtype=self.dtype, device=self.device)
        if self._sum.next_is_unchecked():
            self._apply_kept(rows, total)
            return self._checked(rows, total)
        with self._bar.over("@", len(rows)):
            totals = self._sum.run(partial(self._local_pass, rows, total), total, rows)
        weight = self._sum.weight(totals)
        if weight != 1:
            total /= weight
        return self._checked(rows, total)

    def _checked(self, rows: Tensor, total: Tensor) -> Tensor:
        """The products of the rows, where they are finite; a matrix that is not symmetric is told."""
        where = self.space.first_not_finite(total)
        if where and self.space.everywhere(bool(rows.isfinite().all())):
            raise NonFiniteError(
                f"{type(self).__name__} @ v: expected finite products, got NaN or infinity in {where}, "
                "where the loss is finite; look for a square root, norm or logarithm at zero."
            )
        self._sum.symmetry.record(rows, total)
        return total

    def _local_pass(self, rows: Tensor, total: Tensor) -> PassTotals:
        """Compute the products over the data of this process into total."""
        if self._sum.kept is None:
            with examined_functions(type(self).__name__):
                return self._sum.each_batch(partial(self._add_batch, rows, total))
        # the Functions in a kept graph were examined when it was made
        return self._sum.kept_batch(*self._apply_kept(rows, total))

    def _apply_kept(self, rows: Tensor, total: Tensor) -> tuple[Tensor, float]:
        """Compute the products by the kept graph; return the loss, and the share of its batch."""
        kept: _KeptProduct = self._sum.kept
        with grad_enabled(), reapply(kept.patches):
            value = self._apply(kept.point, rows, total, kept.share, keep_graph=True, first=True)
        return value, kept.share

    def _add_batch(
        self, rows: Tensor, total: Tensor, batch: Any, number: int, share: float
    ) -> Tensor:
        """Add share times the products of the rows at one batch to total; return the loss there."""
        single = self._sum.single_batch
        several = len(rows) > 1 or single
        compiled = self._options.one_graph and not runs_elsewhere()
        # a compiled product enters the contexts itself, when it is captured
        context = grad_enabled() if compiled else self._sum.evaluation_context()
        with context, keep_swapped() as patches:
            leaves, args = clone_inference_tensors((self.space.leaves(), (batch,)))
            if self._in_double:
                leaves, args = to_double((leaves, args))
            structure = pytree.flatten(self.space.params)[1]
            loss = BoundLoss(self._loss, structure, args, self._sum.sharding)
            kind = self._kind.for_batch(number)
            if compiled:
                several = len(rows) > 1 or (single and self._memory_limit > 0)
                point = compiled_linear_map(kind, loss, leaves, self._options, several)
                keep = single and several
            else:
                several = several or bool(self._options.backend)  # blocks have backward passes only
                point = kind.linearize(loss, leaves, self._options, several)
                keep = single and self._fits(point)
            value = self._apply(point, rows, total, share, keep, first=number == 0)
            keep = keep and (not compiled or self._fits(point))
            patch_state = patches.values()
        self._sum.note_unused(point.unused())
        if keep:
            self._sum.kept = _KeptProduct(point, share, patch_state)
            value = self._sum.record_first_pass(batch, value)
        return value

    def _fits(self, point: LinearMap) -> bool:
        """Whether there is something to keep between products, and memory for it."""
        return 0 < point.held_bytes() <= self._memory_limit

    def _apply(
        self, point: LinearMap, rows: Tensor, total: Tensor, share: float, keep_graph: bool, first: bool
    ) -> Tensor:  # fmt: skip
        """Add share times the products of the rows to total; the first ones are written instead."""
        value = torch.zeros(())
        row: Tensor | None = None
        for j, (given, sums) in enumerate(zip(rows, total, strict=True)):
            if not given.is_contiguous():  # matrix products with those take half as long again
                row = torch.empty_like(given) if row is None else row
                given = row.copy_(given)
            vector = self.space.split(given)
            if self._in_double:
                vector = to_double(vector)
            value, product = point.apply(vector, keep_graph or j + 1 < len(rows))
            self.space.add(sums, product, share, first)
            self._sum.advance()
        return value.to(self.dtype) if self._in_double else value


def _check_sharded(
    name: str, loss: Any, kind: CurvatureKind, options: DatasetOptions, backend: str
) -> None:
    """Raise for options that do not go with parameters which processes share."""
    reasons = {
        "processes": (
            options.processes is not None,
            "each process takes part anyway, with the batches that it is given; leave it out",
        ),
        "reduction": (
            options.reduction == "sum",
            "processes of a mesh may have the same examples, which a sum would count twice; use "
            "'mean', and multiply by the number of examples",
        ),
        "micro_batch": (options.micro_batch is not None, "pass smaller batches"),
        "compile": (bool(backend), "gathers are not captured; leave it out"),
        "kind": (
            kind.random,
            "samples would be the same for the examples of each process; use 'exact'",
        ),
    }
    for option, (given, reason) in reasons.items():
        if given:
            raise UnsupportedError(
                f"{name}({option}=...): expected parameters that this process holds whole, got "
                f"DTensors: {reason}."
            )
    refuse_wrapped_calls(name, loss)


class _KeptProduct(NamedTuple):
    """The matrix at the only batch, whose graph is kept between products."""

    point: LinearMap
    share: float  # in the sum over the data
    patches: PatchState  # of the model during forward, for what backward recomputes


@final
class HessianOperator(DatasetOperator):
    r"""The Hessian of a loss over data.

        H = sum_b n_b d^2 loss(params, batch_b) / d params^2 / sum_b n_b        reduction="mean"
        H = sum_b d^2 loss(params, batch_b) / d params^2                        reduction="sum"

    with n_b the number of examples in a batch, so that a smaller last batch has its right weight.
    `LinearOperator` describes ``@``, the algebra of operators, and ``to_dense``, ``to_scipy``,
    ``solve``, ``eigsh``, ``trace``, ``diagonal`` and ``spectral_density``. It also raises
    what `hoglib.hvp` raises.

    Args:
        loss: The function ``loss(params, batch)`` that returns a scalar, for instance from
            `hoglib.functional_loss`.
        params: Where the matrix is taken; any pytree of floating-point tensors. They are read at every
            product, so that an optimizer's steps in between count.
        data: A batch (a tensor, mapping, tuple, list with a tensor in it, or an object that is not
            iterable), or a DataLoader or another re-iterable of batches. Batches are moved to the
            device of params.
        reduction: "mean" or "sum", as above.
        mode: How H v is computed: "reverse-over-reverse", "forward-over-reverse", "auto" or
            "finite-differences", which `hoglib.hvp` describes.
        batch_size: The weight n_b of a batch, as a function of it; by default the leading dimension of
            its first tensor. It should be what the criterion's mean counts: the labels that are not
            -100, where some are.
        micro_batch: Split batches into pieces of so many examples, for memory. It is exact, and refused
            where the loss mixes examples.
        memory_limit: If data is one batch whose gradient graph holds less than so many bytes
            (estimated from the sizes of what its operations return), the graph is kept between
            products, which then cost half; 0 keeps none.
        check_deterministic: Compare the losses of each pass with those of the first, and raise where
            they differ, naming dropout, shuffling or augmentation; and warn where the first two
            products show a matrix that is not symmetric.
        stand_ins: Run the loss inside `hoglib.second_order()`, which replaces torch calls that have no
            second derivative, or a wrong one.
        progress: Show a bar that counts products (needs tqdm).
        compile: Capture the product as a graph and compile it, one graph for each shape of a batch:
            True for inductor, "eager" to run the captured graph by torch. What is kept between
            products is then what the graph of a product computes before the vector.
        processes: Of torch.distributed, each of which sums over a part of the data; one all-reduce
            adds the sums up, and all have the product. None is this process alone. "shard": all are
            given the same data, and each takes every n-th batch, or its rows of the only batch.
            "sharded": each is given its own part, which may be empty, ``[]``. All have to make the
            same products, with the same vectors.
        dtype: Of flat vectors, in which products are summed over the data: torch.float32 for parameters
            in half precision, whose own sums lose what each batch adds. Default: the widest of the
            parameters'.
        remat: Blocks of the model whose intermediate values are recomputed in backward instead of kept,
            by `hoglib.ops.remat`: True for the blocks that it repeats, or their names or globs, as
            "layers.*". A graph that is kept between products then holds the inputs of blocks only.
    Raises:
        ArgumentValueError: for no or empty batches, and for a DistributedSampler that does not go with
            processes.
        NonFiniteError: for losses and products that are not finite.
        NondeterministicError: for a loss that changes from pass to pass.
        DistributedError: in all processes, for vectors, parameters or buffers that differ between them,
            and where one of them failed.
    Example:
        >>> H = hog.HessianOperator(lambda p, x: (x @ p).square().mean(), torch.ones(2), torch.eye(2))
        >>> H @ torch.tensor([1.0, 2.0])
        tensor([1., 2.])
        >>> H.trace()
        tensor(2.)
    """

    def _kind_of(self, mode: str) -> CurvatureKind:
        return HessianKind(mode)


@final
class GGNOperator(DatasetOperator):
    r"""The generalised Gauss-Newton matrix of a loss over data.

        G = sum_b n_b J_b^T H_b J_b / sum_b n_b        reduction="mean"
        G = sum_b J_b^T H_b J_b                        reduction="sum"

    with J_b the Jacobian of the outputs at a batch by params, H_b the Hessian of the criterion by the
    outputs, and n_b the number of examples. `LinearOperator` describes ``@``, the algebra of operators
    and the algorithms. It also raises what `hoglib.ggn_vp` raises.

    Args:
        loss: From `hoglib.functional_loss`, or any object with ``outputs(params, batch)`` and
            ``criterion(outputs, batch)``.
        params: Where the matrix is taken; any pytree of floating-point tensors. They are read at every
            product, so that an optimizer's steps in between count.
        data: A batch (a tensor, mapping, tuple, list with a tensor in it, or an object that is not
            iterable), or a DataLoader or another re-iterable of batches. Batches are moved to the
            device of params.
        reduction: "mean" or "sum", as above.
        mode: How J v is computed: "forward" (with tangents), "reverse" (differentiating J^T u), "auto"
            or "finite-differences", which `hoglib.ggn_vp` describes.
        batch_size: The weight n_b of a batch, as a function of it; by default the leading dimension of
            its first tensor. It should be what the criterion's mean counts: the labels that are not
            -100, where some are.
        micro_batch: Split batches into pieces of so many examples, for memory. It is exact, and refused
            where the loss mixes examples.
        memory_limit: If data is one batch whose gradient graph holds less than so many bytes
            (estimated from the sizes of what its operations return), the graph is kept between
            products, which then cost half; 0 keeps none.
        check_deterministic: Compare the losses of each pass with those of the first, and raise where
            they differ, naming dropout, shuffling or augmentation; and warn where the first two
            products show a matrix that is not symmetric.
        stand_ins: Run the loss inside `hoglib.second_order()`, which replaces torch calls that have no
            second derivative, or a wrong one.
        progress: Show a bar that counts products (needs tqdm).
        compile: Capture the product as a graph and compile it, one graph for each shape of a batch:
            True for inductor, "eager" to run the captured graph by torch.
        processes: Of torch.distributed, each of which sums over a part of the data; one all-reduce
            adds the sums up, and all have the product. None is this process alone. "shard": all are
            given the same data, and each takes every n-th batch, or its rows of the only batch.
            "sharded": each is given its own part, which may be empty, ``[]``. All have to make the
            same products, with the same vectors.
        dtype: Of flat vectors, in which products are summed over the data: torch.float32 for parameters
            in half precision, whose own sums lose what each batch adds. Default: the widest of the
            parameters'.
        remat: Blocks of the model whose intermediate values are recomputed in backward instead of kept,
            by `hoglib.ops.remat`: True for the blocks that it repeats, or their names or globs, as
            "layers.*". A graph that is kept between products then holds the inputs of blocks only.
    Raises:
        ArgumentValueError: for no or empty batches, and for a DistributedSampler that does not go with
            processes.
        NonFiniteError: for losses and products that are not finite.
        NondeterministicError: for a loss that changes from pass to pass.
        DistributedError: in all processes, for vectors, parameters or buffers that differ between them,
            and where one of them failed.
    Example:
        >>> model = nn.Linear(1, 1, bias=False)
        >>> loss, params = hog.functional_loss(model, F.mse_loss), hog.trainable_params(model)
        >>> G = hog.GGNOperator(loss, params, (torch.tensor([[1.0], [3.0]]), torch.zeros(2, 1)))
        >>> G.to_dense()  # 2 (1 + 9) / 2
        tensor([[10.]])
    """

    def _kind_of(self, mode: str) -> CurvatureKind:
        return GaussNewtonKind(mode)


@final
class FisherOperator(DatasetOperator):
    r"""The Fisher information matrix of a model over data.

        F = sum_b n_b F_b / sum_b n_b        reduction="mean"
        F = sum_b F_b                        reduction="sum"

    with F_b the matrix of a batch, as `hoglib.fisher_vp` describes it, and n_b the number of examples.
    `LinearOperator` describes ``@``, the algebra of operators and the algorithms. It also raises what
    `hoglib.fisher_vp` raises.

    Args:
        loss: From `hoglib.functional_loss`, or any object with ``outputs(params, batch)`` and
            ``criterion(outputs, batch)``.
        params: Where the matrix is taken; any pytree of floating-point tensors. They are read at every
            product, so that an optimizer's steps in between count.
        data: A batch (a tensor, mapping, tuple, list with a tensor in it, or an object that is not
            iterable), or a DataLoader or another re-iterable of batches. Batches are moved to the
            device of params.
        kind: "exact", "mc" (from samples of the likelihood) or "empirical" (from the targets).
        likelihood: The distribution that the outputs parametrise: a function from outputs to a
            `torch.distributions.Distribution`, or "categorical" (logits), "bernoulli" (logits),
            "gaussian" (unit variance) or "poisson" (log rates). None takes the one that belongs to the
            criterion.
        num_samples: Samples for each example, of kind "mc".
        generator: Of a seed for these samples, which is drawn once: every product has the same
            samples. A batch has those of its number, in whatever process. None is torch's global
            generator.
        reduction: "mean" or "sum", as above.
        mode: How J v is computed: "forward" (with tangents), "reverse" (differentiating J^T u), "auto"
            or "finite-differences", which `hoglib.ggn_vp` describes.
        batch_size: The weight n_b of a batch, as a function of it; by default the leading dimension of
            its first tensor. It should be what the criterion's mean counts: the labels that are not
            -100, where some are.
        micro_batch: Split batches into pieces of so many examples, for memory. It is exact, and refused
            where the loss mixes examples.
        memory_limit: If data is one batch whose gradient graph holds less than so many bytes
            (estimated from the sizes of what its operations return), the graph is kept between
            products, which then cost half; 0 keeps none.
        check_deterministic: Compare the losses of each pass with those of the first, and raise where
            they differ, naming dropout, shuffling or augmentation; and warn where the first two
            products show a matrix that is not symmetric.
        stand_ins: Run the loss inside `hoglib.second_order()`, which replaces torch calls that have no
            second derivative, or a wrong one.
        progress: Show a bar that counts products (needs tqdm).
        compile: Capture the product as a graph and compile it, one graph for each shape of a batch:
            True for inductor, "eager" to run the captured graph by torch. Not with kind="mc", which
            draws random numbers.
        processes: Of torch.distributed, each of which sums over a part of the data; one all-reduce
            adds the sums up, and all have the product. None is this process alone. "shard": all are
            given the same data, and each takes every n-th batch, or its rows of the only batch.
            "sharded": each is given its own part, which may be empty, ``[]``. All have to make the
            same products, with the same vectors.
        dtype: Of flat vectors, in which products are summed over the data: torch.float32 for parameters
            in half precision, whose own sums lose what each batch adds. Default: the widest of the
            parameters'.
        remat: Blocks of the model whose intermediate values are recomputed in backward instead of kept,
            by `hoglib.ops.remat`: True for the blocks that it repeats, or their names or globs, as
            "layers.*". A graph that is kept between products then holds the inputs of blocks only.
    Raises:
        ArgumentValueError: for no or empty batches, and for a DistributedSampler that does not go with
            processes.
        NonFiniteError: for losses and products that are not finite.
        NondeterministicError: for a loss that changes from pass to pass.
        DistributedError: in all processes, for vectors, parameters or buffers that differ between them,
            and where one of them failed.
    Example:
        >>> model = nn.Linear(1, 1, bias=False)
        >>> loss, params = hog.functional_loss(model, F.mse_loss), hog.trainable_params(model)
        >>> data = torch.tensor([[1.0], [3.0]]), torch.zeros(2, 1)
        >>> hog.FisherOperator(loss, params, data, likelihood="gaussian").to_dense()  # (1 + 9) / 2
        tensor([[5.]])
    """

    def __init__(
        self,
        loss: Any,
        params: Tree,
        data: Any,
        *,
        kind: str = "exact",
        likelihood: Any = None,
        num_samples: int = 1,
        generator: torch.Generator | None = None,
        reduction: str = "mean",
        mode: str = "auto",
        batch_size: BatchSize | None = None,
        micro_batch: int | None = None,
        memory_limit: float = MEMORY_LIMIT,
        check_deterministic: bool = True,
        stand_ins: bool = True,
        progress: bool = False,
        compile: bool | str = False,
        processes: str | None = None,
        dtype: torch.dtype | None = None,
        remat: bool | str | Sequence[str] = False,
    ) -> None:
        self._metric = FisherMetric(kind, likelihood, reduction, num_samples, generator).seeded()
        super().__init__(
            loss, params, data, reduction=reduction, mode=mode, batch_size=batch_size,
            micro_batch=micro_batch, memory_limit=memory_limit, stand_ins=stand_ins,
            check_deterministic=check_deterministic, progress=progress, compile=compile,
            processes=processes, dtype=dtype, remat=remat,
        )  # fmt: skip

    def _kind_of(self, mode: str) -> CurvatureKind:
        return GaussNewtonKind(mode, self._metric)
