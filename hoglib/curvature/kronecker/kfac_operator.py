"""Kronecker-factored approximations of the Gauss-Newton and Fisher matrices, over data."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache, partial
from math import prod
from typing import Any, Literal, NamedTuple, Unpack, final, get_args

import torch
from torch import Generator, Tensor, nn

from hoglib import errors, plotting
from hoglib._core.messages import results, validation
from hoglib._core.problem import Problem, check_option_names
from hoglib._core.runtime.source_location import warn
from hoglib._core.substrate.fingerprint import Numbers, sums_and_norms
from hoglib._core.torch_api import pytree
from hoglib.curvature.algebra.estimates import Estimate
from hoglib.curvature.algebra.linear_operator import BlockDiagonal
from hoglib.curvature.algebra.vector_space import Space, Tree, check_named, random_signs
from hoglib.curvature.batches.data import PassTotals
from hoglib.curvature.kronecker.kronecker import (
    BlockLayout,
    InverseMethod,
    KroneckerBlock,
    KroneckerMatrix,
    KroneckerOperator,
    by_eigenvectors,
    leaves_of,
)
from hoglib.curvature.kronecker.kronecker_factors import BlockSums, EigenvalueSums, FactorSums
from hoglib.curvature.kronecker.layer_calls import Region, Role
from hoglib.curvature.kronecker.layer_comparison import checked_run, with_selected_rows
from hoglib.curvature.kronecker.model_run import (
    EXACT_DIAGONAL,
    FactorOptions,
    ModelRun,
    RowOrder,
    fill,
)
from hoglib.curvature.maps.fisher_metric import FisherKind, FisherMetric
from hoglib.curvature.maps.gauss_newton import GaussNewtonKind
from hoglib.curvature.operators.operators import DatasetOperator, GGNOperator, HessianOperator
from hoglib.curvature.sums.dataset_sum import DATA_OPTIONS, DataOptions
from hoglib.curvature.sums.term import Term
from hoglib.curvature.sums.watchers import Draws

TENSORS = ("A", "G", "values")  # the tensors of a KroneckerBlock
FEW_OUTPUTS = 100  # per example: kind="auto" takes a backward pass for each, up to so many


class _Distances(NamedTuple):
    """The tuple of `KFACError`, which describes its fields."""

    ggn: Estimate
    blocks: Estimate
    hessian: Estimate


@results.result
class KFACError(_Distances):
    """Relative distances |K - M| / |M| of an approximation K in the Frobenius norm.

    A tuple of the first three; ``layers`` is an attribute beside the tuple.

    Attributes:
        ggn: From the Gauss-Newton matrix of all parameters.
        blocks: From the diagonal blocks of the Gauss-Newton matrix, which K approximates.
        hessian: From the Hessian.
        layers: For each layer, by name: from its diagonal blocks of the Gauss-Newton matrix.
    """

    layers: Mapping[str, Estimate] = {}

    def plot(self, ax: object = None) -> Any:
        """Draw the distances with one standard error, of the whole matrix and of each layer.

        Args:
            ax: Matplotlib axes. Default: the axes of a new pyplot figure.
        Returns:
            The axes.
        Raises:
            MissingDependencyError: if matplotlib is not installed.
        """
        return plotting.kfac_error(self, ax)

    def to_dataframe(self) -> Any:
        """The distances by layer as a data frame, with one standard error; needs pandas."""
        return plotting.frame(
            {"layer": name, "distance": float(one.value), "error": float(one.error)}
            for name, one in self.layers.items()
        )

    def __str__(self) -> str:
        parts = [
            f"{100 * float(one.value):.3g} ± {100 * float(one.error):.1g}% from {name}"
            for name, one in zip(("the GGN", "its blocks", "the Hessian"), self, strict=True)
        ]
        return ", ".join(parts)


@final
class KFACOperator(KroneckerOperator, DatasetOperator):
    r"""A Kronecker-factored approximation of the Gauss-Newton or Fisher matrix over data.

        K = blocks G_l ⊗ A_l on the diagonal, one for each layer l
        expand    A = mean of a_r a_r^T over rows r       G = sum over r of g_r g_r^T
        reduce    A = mean of a_n a_n^T over examples     G = sum over examples of g_n g_n^T
        eigenvalue_corrected    Q_G diag(L) Q_A^T instead, L_ij = sum_n (q_i^T dW_n r_j)^2

    with M = sum over columns s of s s^T, the matrix on the model's outputs, and

    - a_r, the input of a layer at row r, a position or call that shares the weights;
    - g_r, the gradient of s . outputs by the layer's output at row r, for each column s;
    - a_n, the mean of a_r, and g_n, the sum of g_r, over the rows of example n;
    - dW_n = sum of g_r a_r^T over the rows of example n, its gradient by the weights.

    G also sums over the columns; batches weigh as in `GGNOperator`. A is a mean over the rows, or the
    examples, of all data. K equals the diagonal blocks of the Gauss-Newton matrix for one example, and
    for linear networks with a squared error, where each layer's weights are used once: not in other
    positions, and by no other call.

    `LinearOperator` describes ``@``, the algebra of operators and the algorithms; ``inverse``,
    ``solve``, ``damped``, ``sqrt``, ``map``, ``eigenvalues``, ``logdet``, ``trace`` and ``diagonal``
    are in closed form. Factors are computed at the first use and kept: call ``update()`` after a step
    of the parameters. If params are DTensors, each process gives its own data and keeps the factors of
    some layers; all processes make the same calls.

    Layers are found by the torch functions or exported operators that they call, in any module:

    - linear layers, and products with a matrix by matmul, bmm or einsum (LoRA, attention, GPT-2);
    - fused experts by `torch.nn.functional.grouped_mm`: a layer for each expert;
    - convolutions, also transposed ones, with factors for each group;
    - embeddings: always "expand", with a diagonal A. If position embeddings are computed once for all
      examples, each example gets a row;
    - layer, group, RMS and instance norm, batch norm in eval mode, PReLU: exact blocks;
    - parameters that are added, multiplied or copied for each example: an exact block for one number
      per feature; with more dimensions, as of queries, an embedding with every row used;
    - weights that are pointwise functions of a parameter, such as W * mask: the exact diagonal;
    - layers of a network inside `hoglib.laplacian`, `bilaplacian`, `directional`, `partial_derivative`
      or `jet`, as in the residual of a differential equation: a row for the value, and one for each
      Taylor coefficient that the outputs depend on.

    A layer that is called twice, or shares its weight with another, has one block, with the rows of all
    its calls. A batch that does not call a layer, such as an expert without examples, adds nothing to
    its factors. At the first batch the layers' gradients are compared with autograd's.

    Any other use of a parameter raises an error that names it. With ``unsupported="diagonal"`` the
    parameter gets its exact diagonal instead (LSTM and GRU, tied embeddings, parametrized weights,
    custom Functions; ``print(K)`` names them). For each column the examples are run alone, by
    `torch.func.vmap` if possible; if an example's outputs depend on its batch, each example takes a
    backward pass of the batch.

    Args:
        loss: From `hoglib.functional_loss`, or any object with ``outputs(params, batch)`` and
            ``criterion(outputs, batch)``. With `hoglib.language_model_loss` all logits are in memory.
        params: Where the matrix is taken: a dict of the parameters of layers as above.
        data: A batch, or a DataLoader or another re-iterable of batches, as for `hoglib.GGNOperator`.
        kind: The matrix M. "exact": the Hessian of the criterion (with a likelihood its Fisher
            matrix), by a backward pass for each output of an example. "mc": num_samples draws from the
            likelihood, or random sums of the columns if the criterion has no known likelihood.
            "empirical": the gradients at the targets. "auto": "exact" up to 100 outputs of an example,
            "mc" for more; ``print(K)`` says which.
        approximation: "expand" or "reduce", as above. They differ for weights that are shared over
            positions.
        eigenvalue_corrected: Replace the eigenvalues by the diagonal in the basis of the eigenvectors
            (EKFAC), in a second pass over the data.
        joint_bias: Make a bias a column of its weight's block, where every call of the weight adds the
            bias; else the bias has its own block, as a weight with input 1.
        likelihood: The distribution of the targets, as for `hoglib.FisherOperator`.
        num_samples: Samples for each example with kind="mc".
        generator: Draws the seed of these samples; None is torch's global generator.
        unsupported: "raise" or "diagonal", for parameters with uses that are not in the list above.
        **options: :class:`~hoglib.curvature.DataOptions`: ``reduction`` ("mean" or "sum", as the
            criterion), ``batch_size``, ``micro_batch``, ``check_deterministic``, ``progress``,
            ``processes``, and ``dtype`` (of flat vectors; factors are at least in float32).
    Raises:
        UnsupportedError: at the first use, for parameters with uses that are not in the list above, and
            for layers that mix examples.
        ArgumentValueError: for outputs with rows that are not examples, and a criterion that is not
            convex.
    References:
        Martens and Grosse, Optimizing Neural Networks with Kronecker-factored Approximate Curvature,
        2015. Grosse and Martens, A Kronecker-factored Approximate Fisher Matrix for Convolution Layers,
        2016. Eschenhagen et al., Kronecker-Factored Approximate Curvature for Modern Neural Network
        Architectures, 2023. George et al., Fast Approximate Natural Gradient Descent in a
        Kronecker-factored Eigenbasis, 2018. Dangel, Mueller and Zeinhofer, Kronecker-Factored
        Approximate Curvature for Physics-Informed Neural Networks, 2024.
    Example:
        >>> model = nn.Linear(1, 1, bias=False)
        >>> loss, params = hog.functional_loss(model, F.mse_loss), hog.trainable_params(model)
        >>> K = hog.KFACOperator(loss, params, (torch.tensor([[1.0], [3.0]]), torch.zeros(2, 1)))
        >>> K.to_dense()  # 2 (1 + 9) / 2, exact for a linear model
        tensor([[10.]])
        >>> K.solve(torch.tensor([1.0]), damping=10.0)
        tensor([0.0500])
    """

    _adds_factors = True

    @validation.explain_arguments
    def __init__(
        self,
        loss: object,
        params: Tree,
        data: object,
        *,
        kind: Literal["auto"] | FisherKind = "auto",
        approximation: Literal["expand", "reduce"] = "expand",
        eigenvalue_corrected: bool = False,
        joint_bias: bool = True,
        likelihood: object = None,
        num_samples: int = 1,
        generator: Generator | None = None,
        unsupported: Literal["raise", "diagonal"] = "raise",
        **options: Unpack[DataOptions],
    ) -> None:
        validation.choice("approximation", approximation, ("expand", "reduce"))
        check_option_names("KFACOperator", options, DATA_OPTIONS)
        reduction = options.get("reduction", "mean")
        # "auto" is decided when the outputs of the first batch are known.
        self._automatic = validation.choice("kind", kind, ("auto", *get_args(FisherKind))) == "auto"
        given = "exact" if self._automatic else kind
        metric = FisherMetric(given, likelihood, reduction, num_samples, generator).seeded()
        # KFAC differentiates columns of outputs: a language model must return its logits as a whole.
        loss = loss.with_logits() if hasattr(loss, "with_logits") else loss
        plain: Any = {**options, "stand_ins": False}
        further = approximation, joint_bias, unsupported, eigenvalue_corrected
        super().__init__(loss, params, data, GaussNewtonKind("auto", metric), plain, further)
        check_named(params)
        # `error` makes a GGNOperator and a HessianOperator from these
        self._loss, self._data, self._given = loss, data, options
        joint_bias = validation.boolean("joint_bias", joint_bias)
        validation.choice("unsupported", unsupported, ("raise", "diagonal"))
        # options of the factors
        self._factors = FactorOptions(metric, approximation, joint_bias, unsupported)
        self._corrected = validation.boolean("eigenvalue_corrected", eigenvalue_corrected)  # EKFAC
        # whether the rows of layers must be assigned to examples
        self.by_example = self._corrected or approximation == "reduce" or unsupported != "raise"
        # how to read the calls of layers; None until they are compared with autograd
        self.row_order: RowOrder | None = None
        # leaves_out: give parameters that no batch uses zeros instead of an error (KFAC's experts
        # without examples). called: the blocks that some batch used.
        self.leaves_out, self.called = False, frozenset[BlockLayout]()
        self._blocks: list[KroneckerBlock] | None = None  # None until the first use
        self._error: KFACError | None = None  # the last result of error(), for print(K)
        self.computed_at: Numbers | None = None  # fingerprint of the parameters at update()
        self._last: Any = None  # blocks, options and inverse of the last precondition_()

    def blocks(self) -> Sequence[KroneckerBlock]:
        """The blocks, in the order of the parameters, computed at the first use. If params are
        DTensors, each process holds some of them."""
        return self.update().blocks() if self._blocks is None else self._blocks

    def update(self) -> "KFACOperator":
        """Compute the factors at the parameters as they are now.

        Returns:
            The operator.
        """
        validation.refuse_transforms("KFACOperator", "compute it before, by `update()`.")
        with torch.inference_mode(False), torch.no_grad(), self._bar.over("factors"):
            factors, weight = self._factor_sums()
            raises = self._factors.unsupported == "raise" and not self.leaves_out
            left = fill(type(self).__name__, self.space, factors.layouts(), raises)
            self._include(factors, left)
            self.called = factors.called
            if sum(prod(layout.sizes) for layout in factors.sums) != self.space.size:
                raise errors.UnsupportedError(
                    f"{type(self).__name__}: expected a model that uses a parameter in the same way in "
                    "every batch, got one that calls other layers from batch to batch; leave out those "
                    "that it does not always call."
                )
            self._layouts = layouts = factors.layouts()
            costs = [sum(n**3 for n in layout.sizes[1:]) for layout in layouts]
            own = self.space.placement.owned(layouts, costs)
            factors.sums = {layout: factors.sums[layout] for layout in own}
            blocks = factors.blocks(weight)
            if self._corrected:
                with self.space.raise_in_all(type(self).__name__):
                    blocks = by_eigenvectors(blocks)
                blocks = [_without_rounding(block) for block in self.corrected(blocks)]
        self._blocks, self._error = blocks, None
        self.computed_at = sums_and_norms(self.space.leaves())
        return self

    def _factor_sums(self) -> tuple[FactorSums, float]:
        """The sums over the data, and their weight. If a later batch is the first to leave a layer to
        single examples, a second pass does so from the first batch on."""
        factors = FactorSums()
        weight = self._sum.weight(self._pass(factors))
        alone = {one.first.leaf for one in factors.sums if one.role.name == EXACT_DIAGONAL}
        layers = (one for one in factors.sums if one.role.name != EXACT_DIAGONAL)
        if not any(region.leaf in alone for one in layers for region in one.regions):
            return factors, weight
        assert self.row_order is not None
        unexplained = self.row_order.unexplained | alone
        met = {one for one in self.row_order.met if not any(r.leaf in alone for r in one.regions)}
        self.row_order = self.row_order._replace(unexplained=unexplained, met=frozenset(met))
        again = FactorSums()
        return again, self._sum.weight(self._pass(again))

    def corrected(self, blocks: Sequence[KroneckerBlock]) -> list[KroneckerBlock]:
        """The diagonal of the matrix in the basis of the eigenvectors, by a pass over the data.

        Args:
            blocks: The blocks of this operator's layers, with eigenvectors as A and G.
        Returns:
            The blocks with this diagonal as eigenvalues; exact blocks unchanged.
        """
        with torch.inference_mode(False), torch.no_grad():
            if not self.by_example:  # rows are not assigned to examples yet
                self.by_example, self.row_order = True, None
            sums = EigenvalueSums(self._everywhere(blocks))
            found = sums.blocks(self._sum.weight(self._pass(sums)))
            own = {block.layout for block in blocks}
            return [block for block in found if block.layout in own]

    def _everywhere(self, blocks: Sequence[KroneckerBlock]) -> Sequence[KroneckerBlock]:
        """The blocks, and the eigenvectors that other processes hold: each process rotates the
        gradients of its own examples into all of them."""
        if not self.space.placement.is_sharded:
            return blocks
        shared = FactorSums()
        kronecker = [layout for layout in self._layouts if layout.role.matrix == "kronecker"]
        self._include(shared, kronecker)
        others = [block for block in blocks if block.layout not in shared.sums]
        for block in blocks:
            vectors = shared.sums.get(block.layout, {})
            for name in vectors.keys() & {"A", "G"}:
                if (own := getattr(block, name)) is not None:  # None for a diagonal A
                    vectors[name].copy_(own)
        self._add_up(shared)
        for layout, vectors in shared.sums.items():
            A = vectors["A"]
            others.append(KroneckerBlock(layout, A if A.dim() == 3 else None, vectors["G"]))
        return sorted(others, key=lambda block: block.layout.first)

    def _include(self, sums: BlockSums, layouts: Iterable[BlockLayout]) -> None:
        """Add zeros for missing blocks."""
        sums.include(layouts, torch.promote_types(self.dtype, torch.float32), self.device)

    def _add_up(self, sums: BlockSums) -> None:
        """Sum over the processes that share the parameters."""
        if self.space.placement.is_sharded:
            kind, what = self._factors.metric.kind, "kind, and layers,"
            self.space.check_same_call("KFACOperator", kind, sums.layouts(), what=what)
            for x in sums.tensors():
                x.copy_(self.space.all_sum(x))

    def _pass(self, sums: BlockSums) -> PassTotals:
        """Add every batch to the sums, in all processes."""

        @cache
        def include_all() -> None:
            own = list(sums.sums), [] if self.row_order is None else list(self.row_order.met)
            # All processes need all blocks, in one order, before sums are exchanged.
            every = self._sum.batches.processes.gather(own)
            for called, _ in every:
                self._include(sums, called)
            sums.called = frozenset(sums.sums)
            for _, met in every:  # layers that only earlier passes called
                self._include(sums, met)

        @cache
        def total() -> Tensor:
            include_all()
            return sums.pack().to(self.device)

        read, draws, placement = None, Draws(self._sum.at), self.space.placement

        def visit(term: Term) -> Tensor:
            nonlocal read
            draws.start()
            with term.entered() as problem:
                share = term.share * problem.placement.weight
                add = partial(self._add, sums, problem.gathered(), term.piece.number, share, draws)
                value = problem.placement.mean_of(add) if placement.is_sharded else add()
                del add  # frees the gathered parameters before the next batch gathers
            term.advance()
            if self._sum.batches.weight_cancels:
                read = sums.read()  # to be read together with the loss
            return value

        # Draws warns of randomness where no second pass shows it; corrected eigenvalues take a second
        # pass.
        compared = self._given.get("check_deterministic", True) and not placement.is_sharded
        once = compared and self._blocks is None and not self._corrected
        also = [draws] if once else []
        totals = self._sum.fold(visit, total, first_order=True, also=also)
        include_all()
        if not self._sum.alone:
            sums.unpack(total())
        self._add_up(sums)
        if not sums.finite(read or sums.read()):
            raise errors.NonFiniteError(
                f"{type(self).__name__}: expected finite factors, got infinity or NaN, where the "
                "loss is finite: squares of a layer's inputs or gradients overflow. Scale the inputs, "
                "or use float64."
            )
        return totals

    def _add(
        self, sums: BlockSums, problem: Problem, number: int, share: float, draws: Draws
    ) -> Tensor:
        """Add a batch of this process to the sums; returns the batch's loss."""
        factors = replace(self._factors, metric=self._factors.metric.for_batch(number))
        run = ModelRun.of(problem, self.space, factors, self.row_order)
        if self._automatic:
            self._automatic = False
            if run.outputs_of_an_example() > FEW_OUTPUTS:
                has_drawn = draws.drawn()
                sampled = replace(self._factors.metric, kind="mc").seeded()
                if not has_drawn:  # the seed was drawn by the metric, not by the loss
                    draws.start()
                self._factors = replace(self._factors, metric=sampled)
                run = run.with_metric(sampled.for_batch(number))
        first = self.row_order is None
        expanded = first and run.recording.expanded
        if expanded:  # a row for each example may have changed the outputs
            run = checked_run(run, self.by_example)
        value = run.value()
        # The pass refuses a loss that is not finite. Looking here waits for a device: at the first
        # batch only.
        if (first or value.device.type == "cpu") and not bool(value.isfinite()):
            return value
        if not expanded:
            new = first or run.has_new_layers()
            run = (checked_run if new else with_selected_rows)(run, self.by_example)
        if self.row_order is None or run.has_new_layers():
            self.row_order = run.order_of_all(self.row_order)
        sums.add(run, share)
        return value

    @contextmanager
    def _algorithm(self, name: str, *given: Any, **options: Any) -> Iterator[None]:
        self.blocks()
        with super()._algorithm(name, *given, **options):
            yield

    def error(self, num_samples: int = 16, *, generator: Generator | None = None) -> KFACError:
        r"""Estimate the relative errors of the approximation by products with random vectors.

            |K - M| / |M|, |A|^2 = E|A v|^2 in the Frobenius norm, v of independent signs

        ``print(K)`` then shows the errors.

        Args:
            num_samples: The number of random vectors. Each takes a product with the Gauss-Newton
                matrix, one with the Hessian, and one for each block.
            generator: Draws the vectors; None is torch's global generator. Several processes need
                generators with the same seed.
        Returns:
            `KFACError`: relative distances with one standard error each (a jackknife).
        """
        validation.at_least("num_samples", num_samples, 1)
        self.space.refuse_sharded("KFACOperator.error")
        options: Any = {k: v for k, v in self._given.items() if k != "check_deterministic"}
        given = (self._loss, self.space.params, self._data)
        G, H = GGNOperator(*given, **options), HessianOperator(*given, **options)
        rows = random_signs(self.space, num_samples, generator)
        ours = self.apply(rows)
        masks = [_block_mask(block.layout, self.space) for block in self.blocks()]
        ggn, blocks, hessian = (A.apply(rows) for A in (G, BlockDiagonal(G, masks), H))
        names = pytree.paths(self.space.params)
        layers: dict[str, list[Tensor]] = {}
        for block, mask in zip(self.blocks(), masks, strict=True):
            name = names[block.layout.first.leaf]
            layers.setdefault(name.rpartition(".")[0] or name, []).append(mask)
        self._error = KFACError(
            *(_relative_error(ours, theirs) for theirs in (ggn, blocks, hessian))
        )
        own = {name: sum(parts) for name, parts in layers.items()}
        self._error.layers = {n: _relative_error(ours * m, blocks * m) for n, m in own.items()}
        return self._error

    def exact_diagonal(self) -> Tensor:
        r"""The diagonal of the Gauss-Newton or Fisher matrix that the operator approximates, exactly.

            diag = sum over examples n and columns c of (d s_nc . outputs_n / d params)^2

        Returns:
            The diagonal [P].
        """
        self.space.refuse_sharded("exact_diagonal")
        with torch.inference_mode(False), torch.no_grad():
            # With identity eigenvectors the corrected eigenvalues are the diagonal.
            squares = self.corrected([block.unrotated() for block in self.blocks()])
        return KroneckerMatrix(self.space, squares).diagonal()

    @torch.no_grad()
    def precondition_(
        self, params: Any, *, damping: float, method: InverseMethod = "exact"
    ) -> None:
        r"""Precondition the gradients of the parameters in place, for any optimizer of torch.

            p.grad <- (K + damping I)^-1 p.grad

        The inverse is kept until ``update()``, or until another damping. It is linear, so gradients may
        still be scaled by a ``GradScaler``. Clip gradients afterwards.

        Args:
            params: The model, or its parameters by name. Parameters outside the operator keep their
                gradients.
            damping: Added to the diagonal, as in ``inverse``.
            method: One of the methods of ``inverse``.
        Raises:
            ArgumentValueError: if a parameter of the operator is missing, or its gradient is missing or
                sparse.
            NonFiniteError: for a gradient that is not finite.
        Example:
            >>> model = nn.Linear(1, 1, bias=False)
            >>> loss, params = hog.functional_loss(model, F.mse_loss), hog.trainable_params(model)
            >>> batch = torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [6.0]])
            >>> K = hog.KFACOperator(loss, params, batch)
            >>> loss(params, batch).backward()
            >>> K.precondition_(model, damping=1e-6)
            >>> torch.optim.SGD(model.parameters(), lr=1.0).step()
            >>> model.weight  # one step is enough for a quadratic loss
            Parameter containing:
            tensor([[3.0000]], requires_grad=True)
        """
        given = dict(params.named_parameters()) if isinstance(params, nn.Module) else params
        names = list(self.space.params)
        lacking = [n for n in names if n not in given] if isinstance(given, Mapping) else names
        if lacking:
            raise errors.ArgumentValueError(
                "params: expected the model, or a dict with the parameters of the operator, got "
                f"{type(params).__name__} without {validation.listing(lacking)}."
            )
        grads: dict[str, Any] = {name: given[name].grad for name in names}
        for what, layout in (("missing", None), ("sparse", torch.sparse_coo)):
            wrong = [n for n, g in grads.items() if getattr(g, "layout", None) == layout]
            if wrong:
                raise errors.ArgumentValueError(
                    f"params: expected dense gradients, got {what} ones of {validation.listing(wrong)};"
                    " call it after `backward()`, with an operator of parameters that have them."
                )
        own = self.space.params
        if other := [n for n in names if given[n].data_ptr() != own[n].data_ptr()]:
            warn(
                "precondition_: expected the tensors that the operator was made of, whose values "
                f"`update()` reads, got others of {validation.listing(other)}; after "
                "`load_state_dict(assign=True)` or `model.to(...)` make a new operator."
            )
        rows, rebuild = self.space.rows(grads, "grad")
        with self.space.raise_in_all("precondition_"):
            validation.finite(
                "grad", rows, "Lower the learning rate, or skip this step.", late=True
            )
        blocks, options = self.blocks(), (damping, method)
        if self._last is None or self._last[0] is not blocks or self._last[1] != options:
            self._last = blocks, options, self.inverse(damping, method=method)
        for name, step in rebuild(self._last[2].apply(rows)).items():
            grads[name].copy_(step)

    def state_dict(self) -> dict[str, Any]:
        """The factors, in a form that `torch.save` and ``torch.load(weights_only=True)`` take.

        If params are DTensors, each process has its own factors.

        Returns:
            A dict for `load_state_dict`.
        """
        names = pytree.paths(self.space.params)
        # By names, not numbers: torch.distributed.checkpoint merges what processes save under one key.
        blocks = {
            f"{names[block.layout.first.leaf]}[{block.layout.first.start}]": {
                **saved_layout(block.layout, names),
                **{key: getattr(block, key) for key in TENSORS},
            }
            for block in self.blocks()
        }
        return {"options": self._saved_options(), "blocks": blocks}

    def _saved_options(self) -> dict[str, Any]:
        return {
            "kind": self._factors.metric.kind,
            "approximation": self._factors.approximation,
            "eigenvalue_corrected": self._corrected,
            "joint_bias": self._factors.joint_bias,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take the factors from a `state_dict`; nothing is computed.

        Args:
            state_dict: From an operator with equal options, and parameters of equal names and shapes.
        Raises:
            ArgumentValueError: for other options or parameters.
        """
        if not isinstance(state_dict, Mapping) or {"options", "blocks"} - state_dict.keys():
            raise errors.ArgumentTypeError(
                "state_dict: expected that of a KFACOperator, with 'options' and 'blocks', got "
                f"{validation.describe(state_dict)}."
            )
        wanted = self._saved_options()
        # "auto" is not decided before the first batch: take the saved kind.
        wanted |= {"kind": state_dict["options"].get("kind")} if self._automatic else {}
        if state_dict["options"] != wanted:
            raise errors.ArgumentValueError(
                f"state_dict: expected that of an operator with {wanted}, got one with "
                f"{state_dict['options']}."
            )
        names = pytree.paths(self.space.params)
        dtype = torch.promote_types(self.dtype, torch.float32)
        blocks = []
        try:
            saved = state_dict["blocks"]
            # earlier versions saved a list
            for one in saved.values() if isinstance(saved, Mapping) else saved:
                given = [one[key] for key in TENSORS]
                tensors: Any = [None if x is None else x.to(self.device, dtype) for x in given]
                blocks.append(KroneckerBlock(layout_of(one, names), *tensors))
        except (KeyError, TypeError, AttributeError) as error:
            raise errors.ArgumentTypeError(
                "state_dict: expected blocks as `KFACOperator.state_dict()` has them, got others "
                f"({type(error).__name__}: {error})."
            ) from error
        covered = nothing = torch.zeros(self.space.size, dtype=self.dtype, device=self.device)
        with suppress(RuntimeError, IndexError):  # blocks of other shapes
            covered = sum((_block_mask(block.layout, self.space) for block in blocks), nothing)
        if not bool((self.space.all_sum(covered) == 1).all()):
            raise errors.ArgumentValueError(
                "state_dict: expected blocks that are every parameter once, got others; it is of "
                "params of other names or shapes."
            )
        self._blocks, self._error, self.computed_at = blocks, None, None

    def __repr__(self) -> str:
        kind = "" if self._automatic else f", kind={self._factors.metric.kind!r}"
        own = [block.layout for block in self._blocks or ()]
        names = pytree.paths(self.space.params)
        exact = [names[one.first.leaf] for one in own if one.role.name == EXACT_DIAGONAL]
        if exact:
            kind += f", exact diagonals of {validation.listing(exact, len(exact))}"
        text = f"{super().__repr__()[:-1]}{kind})"
        return text if self._error is None else f"{text[:-1]}, {self._error})"


def saved_layout(layout: BlockLayout, names: list[str]) -> dict[str, Any]:
    """A layout as plain numbers and names, to be saved."""

    def place(region: Region | None) -> Any:
        return None if region is None else (names[region.leaf], region.start, region.stop)

    return {"role": tuple(layout.role), "weight": place(layout.weight), "bias": place(layout.bias)}


def layout_of(saved: Mapping[str, Any], names: list[str]) -> BlockLayout:
    """The layout from `saved_layout`; raises ArgumentValueError for parameters of other names."""
    regions: list[Region | None] = []
    for place in (saved["weight"], saved["bias"]):
        if place is not None and place[0] not in names:
            raise errors.ArgumentValueError(
                f"state_dict: expected the parameters {validation.listing(names)}, got {place[0]!r}; "
                "it is of other params."
            )
        regions.append(None if place is None else Region(names.index(place[0]), *place[1:]))
    return BlockLayout(Role(*saved["role"]), *regions)


def _without_rounding(block: KroneckerBlock) -> KroneckerBlock:
    """The block with zeros for corrected eigenvalues that are squares of rounding errors."""
    if block.layout.role.matrix != "kronecker" or block.values is None or not block.values.numel():
        return block
    rounding = torch.finfo(block.G.dtype).eps ** 2 * block.values.max()
    return replace(block, values=block.values.where(block.values > rounding, 0))


def _block_mask(layout: BlockLayout, space: Space) -> Tensor:
    """1 at the parameters of a block, and 0 elsewhere, [P]."""
    row = torch.zeros(1, space.size, dtype=space.dtype, device=space.device)
    layout.scatter(row.new_ones(1, *layout.sizes), leaves_of(space, row))
    return row[0]


def _relative_error(ours: Tensor, theirs: Tensor) -> Estimate:
    """|K - M| / |M| from products with random vectors, with its standard error by the jackknife."""
    # squares in float64: those of half precision overflow
    off, size = (
        torch.linalg.vector_norm(x, dim=1, dtype=torch.float64).square()
        for x in (ours - theirs, theirs)
    )
    count, value = len(off), (off.sum() / size.sum()).sqrt()
    without = ((off.sum() - off) / (size.sum() - size)).sqrt()
    error = ((count - 1) / count * (without - without.mean()).square().sum()).sqrt()
    error = error if count > 1 else torch.full_like(value, torch.inf)
    return Estimate(value.to(ours.dtype), error.to(ours.dtype))
