"""The Hessian, Gauss-Newton and Fisher matrices of a loss over data, as linear operators; and the
spectrum of a Hessian in one object: both ends, the trace, the density."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Unpack, final

import torch
from torch import Tensor

from hoglib import plotting
from hoglib._core.messages import results, validation
from hoglib._core.modules.state import preserve_random_state
from hoglib._core.modules.swap import PatchState, keep_swapped, reapply
from hoglib._core.numerics.finite_differences import to_double
from hoglib._core.problem import Policy, refuse_wrapped_calls
from hoglib._core.runtime.logger import LOGGER
from hoglib._core.runtime.source_location import warn
from hoglib._core.substrate.autograd import Vector, grad_enabled
from hoglib._core.substrate.gradient_graph import leaf_tensors
from hoglib._core.torch_api import pytree, torch_internals
from hoglib._core.torch_api.torch_internals import without_functions_seen
from hoglib.curvature.algebra.adjoints import Gradients, merged
from hoglib.curvature.algebra.estimates import SpectralDensity
from hoglib.curvature.algebra.linear_operator import LinearOperator
from hoglib.curvature.algebra.vector_space import Space, Tree
from hoglib.curvature.batches.data import Processes, constants_of
from hoglib.curvature.maps.compiled import linearizer
from hoglib.curvature.maps.fisher_metric import FisherKind, FisherMetric
from hoglib.curvature.maps.gauss_newton import GaussNewtonKind, GaussNewtonMode
from hoglib.curvature.maps.linear_map import (
    CurvatureKind,
    HessianKind,
    HessianMode,
    LinearMap,
    apply_rows,
)
from hoglib.curvature.sums.dataset_sum import (
    CheckedDataOptions,
    DatasetSum,
    OperatorOptions,
    split_options,
)
from hoglib.curvature.sums.term import Term
from hoglib.curvature.sums.watchers import Symmetry
from hoglib.errors import ArgumentValueError, ConvergenceError, UnsupportedError
from hoglib.verification.precision import HalfWatch


class DatasetOperator(LinearOperator):
    """A matrix of a loss over data: the weighted mean, or the sum, of the matrices of its batches.

        A v = sum_b n_b A_b v / sum_b n_b        A v = sum_b A_b v

    `LinearOperator` describes products, algebra and algorithms.
    """

    _adds_factors = False  # whether processes add up factors instead of products

    def __init__(
        self,
        loss: Any,
        params: Tree,
        data: object,
        kind: CurvatureKind,
        options: Mapping[str, Any],
        further: object = None,  # options of a subclass; processes compare them
    ) -> None:
        name = type(self).__name__
        policy, of_data = split_options(name, options)
        kind.check_policy(policy)
        sharing = Processes(name, of_data.processes, data)
        # The first process shows the bar for all.
        super().__init__(Space(params, of_data.dtype), of_data.progress and sharing.rank == 0)
        kind.check_loss(loss)
        if self.space.placement.is_sharded:
            # Factors are added up over processes, so each may draw its own samples. A product is
            # replicated, so all processes must draw equal samples.
            _check_sharded(policy, loss, kind.random and not self._adds_factors, of_data)
        policy.check_blocks(loss)
        at = Term(policy, loss, self.space, self._bar, self.space.placement)
        wide = self.space.precision in (torch.float64, torch.float32)
        compared = of_data.check_deterministic and wide
        self._symmetry = Symmetry(at) if compared else None  # None: not checked
        self._sum = DatasetSum(
            at,
            data,
            of_data,
            sharing,
            fixed_batches=kind.random,
            kind=(kind, further),
            metric=kind.metric,
            further=[self._symmetry] if self._symmetry else (),
        )
        self._kind, self._memory_limit = kind, of_data.memory_limit

    def value(self) -> Tensor:
        """The loss over the data, a scalar tensor."""
        return self._sum.value()

    def gradient(self) -> tuple[Tensor, Tree]:
        """The loss over the data and its gradient, in the structure of params."""
        return self._sum.gradient()

    @contextmanager
    def _algorithm(self, name: str, *given: Any, **options: Any) -> Iterator[None]:
        try:
            with (
                super()._algorithm(name, *given, **options),
                self._sum.require_constant_state(name),
            ):
                yield
        except BaseException as error:
            self._sum.tell(error)
            raise

    def _products(self, rows: Tensor) -> Tensor:
        if torch_internals.transforms_active():
            instead = "use the function hvp or ggn_vp there."
            validation.refuse_transforms(str(self), instead)
        # A process without a batch contributes zeros to the all-reduce.
        make = torch.empty if self._sum.alone else torch.zeros
        total = make(rows.shape, dtype=self.space.dtype, device=self.space.device)
        with without_functions_seen():  # else an active TorchFunctionMode intercepts each view
            # A single vector is split into leaves once, for all batches.
            vector = self._split(rows[0]) if len(rows) == 1 else None
        kept: _KeptProduct | None = None

        def visit(term: Term) -> Tensor:
            nonlocal kept
            kept = self._sum.kept
            if kept is None:
                value, kept = self._add_batch(rows, vector, total, term)
                return value
            with grad_enabled(), reapply(kept.patches):
                return self._apply(kept.point, rows, vector, total, term, keep=True)

        with self._bar.over("@", len(rows)):
            totals = self._sum.fold(visit, total, rows)
        self._sum.kept = kept
        weight = self._sum.weight(totals)
        if weight != 1:
            total /= weight
        self._refuse_not_finite(rows, total, self.space, "the loss is", self._sum.whole)
        if self._symmetry:
            self._symmetry.compare(rows, total, self._half_precision, self._products_in_double)
        return total

    def _add_batch(
        self, rows: Tensor, vector: Vector | None, total: Tensor, term: Term
    ) -> tuple[Tensor, "_KeptProduct | None"]:
        """Add term.share * (products of the rows at the term's batch) to total.

        Returns the loss at the batch, and the linearization to keep for later products, or None.
        """
        kind = self._kind if self._kind.metric is None else self._kind.for_batch(term.piece.number)
        single = self._sum.batches.single and not term.placement.is_sharded
        # Made before the ring enters the stand-ins, which intercept each access to a shape.
        problem, context = term.problem(), term.ring(around_graph=True)
        # held_bytes() of a compiled map is known only after its first product.
        several = len(rows) > 1 or (single and (not context.captures or self._memory_limit > 0))
        # keep_swapped() records the model's patches: in the ring's context, or, in a captured ring,
        # in a context that it makes.
        with context as blocks, keep_swapped() if single else nullcontext() as patches:
            problem = problem.entered(blocks)
            point = linearizer(kind, context.captures)(problem, several)
            context.note_gradient(point.gradient)
            keep = single and (several if context.captures else self._fits_in_memory(point))
            value = self._apply(point, rows, vector, total, term, keep)
            keep = keep and (not context.captures or self._fits_in_memory(point))
            patch_state = patches.values() if keep and patches is not None else ()
        self._sum.unused.note(point.unused())
        if not keep:
            return value, None
        kept = _KeptProduct(point, term, patch_state)
        return self._sum.losses.before_keeping(term, value), kept

    def sources(self) -> list[Tensor]:
        """The parameters, and the tensors that the loss uses at the first batch, which require grad."""
        if type(self)._products is not DatasetOperator._products:  # KFAC: an approximation
            return super().sources()
        name, policy = type(self).__name__, self._sum.at.policy
        reasons = {
            "kind": (
                isinstance(self._kind.metric, FisherMetric),
                "the Fisher matrix by the outputs has no graph; take a GGNOperator, which is the same "
                "for most criteria",
            ),
            "compile": (policy.compiles, "captured products have no graph; leave it out"),
            "processes": (not self._sum.alone, "each process would have a part of the derivative"),
        }
        expected = "products that can be differentiated for create_graph=True, got others"
        _refuse_options(name, expected, reasons)
        self._kind.check_policy(policy._replace(create_graph=True))
        row = torch.ones(1, self.shape[1], dtype=self.dtype, device=self.device)
        with preserve_random_state():
            (_, form, p), *_ = self._forms(next(self._sum.terms()), row, row)
        own = [leaf for leaf in self.space.leaves() if leaf.requires_grad]
        return [*dict.fromkeys(own + _outside(form, p))]

    def operands(self) -> list[Tensor]:
        """The parameters, the constants of the model, and the batch, if there is one."""
        own, batches = self.space.leaves(), self._sum.batches
        batch = pytree.tensors(batches.current()) if batches.single else []
        return [*own, *constants_of(self._sum.at.loss, own), *batch]

    def differentiate_form(self, left: Tensor, right: Tensor) -> Gradients:
        """The derivatives of sum_j left_j^T A right_j by the `sources`, added up batch by batch."""
        total: Gradients = {}

        def visit(term: Term) -> Tensor:
            nonlocal total
            for loss, form, p in self._forms(term, left, right):
                value = loss
                outside = _outside(form, p)
                own = zip([*self.space.leaves(), *outside], [*p, *outside], strict=True)
                # Pairs, not a dict: one tensor may be a parameter and also reach the loss from outside.
                pairs = [pair for pair in own if pair[0].requires_grad]
                if pairs and form.requires_grad:
                    weight = torch.full_like(form, term.share)
                    by = [x for _, x in pairs]
                    grads = torch_internals.gradients([form], by, [weight], retain_graph=True)
                    for (x, _), g in zip(pairs, grads, strict=True):
                        total = total if g is None else merged(total, {x: g})
                term.advance()
            return value

        with self._bar.over("gradient", len(right)):
            totals = self._sum.fold(visit, right.new_zeros(0))
        weight = self._sum.weight(totals)
        return {x: g / weight for x, g in total.items()}

    def _forms(
        self, term: Term, left: Tensor, right: Tensor
    ) -> Iterator[tuple[Tensor, Tensor, Vector]]:
        """For each j: the loss at a batch, left_j^T A right_j with a graph, and the graph's leaves for
        the parameters."""
        term = term._replace(policy=term.policy._replace(create_graph=True))
        problem = term.problem()
        # Detached: the graph ends here, even if the parameters are not leaves.
        p = [leaf.detach().requires_grad_() for leaf in problem.leaves]
        with term.ring(around_graph=True) as blocks:
            point = self._kind.linearize(replace(problem, leaves=p).entered(blocks), True)
            for u, v in zip(left, right, strict=True):
                value, product = point.apply(self._split(v), True)
                pairs = zip(self._split(u), product, strict=True)
                yield value.detach(), torch.stack([(x * y).sum() for x, y in pairs]).sum(), p

    def _half_precision(self) -> torch.dtype | None:
        """The half-precision dtype that the loss or its gradient computes in, or None."""
        with HalfWatch() as watch:
            self._sum.gradient()
        return watch.dtype

    def _products_in_double(self, rows: Tensor) -> Tensor | None:
        """The products of rows at the first batch in float64, each with its own graph; None if the
        loss does not run in float64."""
        if not self._sum.whole:
            return None
        products = []
        try:
            with preserve_random_state():
                term = next(self._sum.terms())
            for row in rows:
                with term.ring(around_graph=True) as blocks:
                    problem = term.problem().entered(blocks).in_double()
                    # for_batch(number) seeds the Monte-Carlo samples: the float64 product draws the
                    # samples of the float32 product.
                    point = self._kind.for_batch(term.piece.number).linearize(problem, True)
                    _, product = point.apply(to_double(self.space.split(row)), False)
                products.append(torch.cat([x.detach().reshape(-1) for x in product]))
        except Exception as error:  # e.g. code bound to another dtype
            LOGGER.debug("%s: no products in float64: %s", type(self).__name__, error)
            return None
        return torch.stack(products)

    def _fits_in_memory(self, point: LinearMap) -> bool:
        """Whether the map holds a graph between products, of at most memory_limit bytes."""
        return 0 < point.held_bytes() <= self._memory_limit

    def _split(self, row: Tensor) -> Vector:
        """A flat vector as leaves, contiguous: a product with strided leaves takes 1.5 times the
        time."""
        return self.space.split(row.contiguous())

    def _apply(
        self,
        point: LinearMap,
        rows: Tensor,
        vector: Vector | None,
        total: Tensor,
        term: Term,
        keep: bool,
    ) -> Any:
        """Add term.share * (products of the rows) to total, or overwrite it at the first batch;
        returns the loss.

        vector: the leaves of the only row; None for several rows. keep: keep the graph after the last
        product.
        """
        value: Any = None
        count = len(rows) if vector is None else 1  # a TorchFunctionMode would intercept `len`
        if point.several is not None and count > 1:
            chunk = self.space.split_rows
            value, products = apply_rows(point, lambda i, j: chunk(rows[i:j]), count, keep)
            self.space.add_rows_of(total, products, term.share, term.first)
            term.advance(count)
            return value
        for j in range(count):
            with without_functions_seen():
                leaves = vector or self._split(rows[j])
            value, product = point.apply(leaves, keep or j + 1 < count)
            with without_functions_seen():
                self.space.add(total[j], product, term.share, term.first)
            term.bar.advance(term.piece.fraction)
        return value


def _outside(form: Tensor, p: Vector) -> list[Tensor]:
    """The leaves of a graph besides p."""
    known = {*map(id, p)}
    leaves = leaf_tensors([form]) if form.requires_grad else []
    return [x for x in leaves if id(x) not in known]


def _check_sharded(policy: Policy, loss: Any, random: bool, options: CheckedDataOptions) -> None:
    """Raise for options that do not work with DTensor parameters."""
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
        "compile": (policy.compiles, "gathers are not captured; leave it out"),
        # Tensor-parallel processes share a batch, and hold copies of some parameters' products.
        "kind": (random, "samples would differ between copies of a parameter; use 'exact'"),
    }
    expected = "parameters that this process holds whole, got DTensors"
    _refuse_options(policy.caller, expected, reasons)
    refuse_wrapped_calls(policy.caller, loss)


def _refuse_options(caller: str, expected: str, reasons: Mapping[str, tuple[bool, str]]) -> None:
    """Raise for a given option. reasons: option -> (whether it is given, the reason)."""
    for option, (given, reason) in reasons.items():
        if given:
            raise UnsupportedError(f"{caller}({option}=...): expected {expected}: {reason}.")


class _KeptProduct(NamedTuple):
    """The linearization at the only batch, with its graph, kept between products."""

    point: LinearMap
    term: Term
    patches: PatchState  # the model's patches during forward; a checkpoint recomputes with them


@final
class HessianOperator(DatasetOperator):
    r"""The Hessian of a loss over data.

        H = sum_b n_b d^2 loss(params, batch_b) / d params^2 / sum_b n_b        reduction="mean"
        H = sum_b d^2 loss(params, batch_b) / d params^2                        reduction="sum"

    with n_b the number of examples in a batch: a smaller last batch has a smaller weight.
    `LinearOperator` describes ``@``, the algebra of operators, and ``to_dense``, ``to_scipy``,
    ``solve``, ``eigsh``, ``trace``, ``diagonal`` and ``spectral_density``. Products also raise the
    errors of `hoglib.hvp`.

    Args:
        loss: The function ``loss(params, batch)`` that returns a scalar, for instance from
            `hoglib.functional_loss`.
        params: Where the matrix is taken; any pytree of floating-point tensors. They are read at every
            product: steps of an optimizer in between count.
        data: A batch (a tensor, mapping, tuple, list with a tensor in it, or a non-iterable
            object), or a DataLoader or another re-iterable of batches. Batches are moved to the
            device of params.
        mode: How H v is computed: "reverse-over-reverse", "forward-over-reverse", "auto" or
            "finite-differences", as in `hoglib.hvp`.
        **options: :class:`~hoglib.curvature.OperatorOptions`: ``reduction`` ("mean" or "sum"),
            ``batch_size``, ``micro_batch``, ``processes`` and ``dtype`` (how the data is summed),
            ``memory_limit`` (of the kept graph), ``check_deterministic``, ``progress``,
            ``stand_ins``, ``remat`` and ``compile``.
    Raises:
        ArgumentValueError: for no or empty batches, and for a DistributedSampler that contradicts
            processes.
        NonFiniteError: for NaN or infinity in losses or products.
        NondeterministicError: for a loss that changes from pass to pass.
        DistributedError: in all processes, if vectors, parameters or buffers differ between them, or
            one process failed.
    Example:
        >>> H = hog.HessianOperator(lambda p, x: (x @ p).square().mean(), torch.ones(2), torch.eye(2))
        >>> H @ torch.tensor([1.0, 2.0])
        tensor([1., 2.])
        >>> H.trace()
        tensor(2.)
    """

    @validation.explain_arguments
    def __init__(
        self,
        loss: object,
        params: Tree,
        data: object,
        *,
        mode: HessianMode = "auto",
        **options: Unpack[OperatorOptions],
    ) -> None:
        super().__init__(loss, params, data, HessianKind(mode), options)


@final
class GGNOperator(DatasetOperator):
    r"""The generalised Gauss-Newton matrix of a loss over data.

        G = sum_b n_b J_b^T H_b J_b / sum_b n_b        reduction="mean"
        G = sum_b J_b^T H_b J_b                        reduction="sum"

    with J_b the Jacobian of the outputs at a batch by params, H_b the Hessian of the criterion by the
    outputs, and n_b the number of examples. G is positive semi-definite if the criterion is convex in
    the outputs; for other criteria (a Gaussian with a learned variance, mixtures, cosine) take
    `FisherOperator` with ``likelihood=``. `LinearOperator` describes ``@``, the algebra of operators
    and the algorithms. Products also raise the errors of `hoglib.ggn_vp`.

    Args:
        loss: From `hoglib.functional_loss`, or any object with ``outputs(params, batch)`` and
            ``criterion(outputs, batch)``.
        params: Where the matrix is taken; any pytree of floating-point tensors. They are read at every
            product: steps of an optimizer in between count.
        data: A batch (a tensor, mapping, tuple, list with a tensor in it, or a non-iterable
            object), or a DataLoader or another re-iterable of batches. Batches are moved to the
            device of params.
        mode: How J v is computed: "forward" (with tangents), "reverse" (differentiating J^T u), "auto"
            or "finite-differences", as in `hoglib.ggn_vp`.
        **options: :class:`~hoglib.curvature.OperatorOptions`: ``reduction`` ("mean" or "sum"),
            ``batch_size``, ``micro_batch``, ``processes`` and ``dtype`` (how the data is summed),
            ``memory_limit`` (of the kept graph), ``check_deterministic``, ``progress``,
            ``stand_ins``, ``remat`` and ``compile``.
    Raises:
        ArgumentValueError: for no or empty batches, and for a DistributedSampler that contradicts
            processes.
        NonFiniteError: for NaN or infinity in losses or products.
        NondeterministicError: for a loss that changes from pass to pass.
        DistributedError: in all processes, if vectors, parameters or buffers differ between them, or
            one process failed.
    Example:
        >>> model = nn.Linear(1, 1, bias=False)
        >>> loss, params = hog.functional_loss(model, F.mse_loss), hog.trainable_params(model)
        >>> G = hog.GGNOperator(loss, params, (torch.tensor([[1.0], [3.0]]), torch.zeros(2, 1)))
        >>> G.to_dense()  # 2 (1 + 9) / 2
        tensor([[10.]])
    """

    @validation.explain_arguments
    def __init__(
        self,
        loss: object,
        params: Tree,
        data: object,
        *,
        mode: GaussNewtonMode = "auto",
        **options: Unpack[OperatorOptions],
    ) -> None:
        super().__init__(loss, params, data, GaussNewtonKind(mode), options)


@final
class FisherOperator(DatasetOperator):
    r"""The Fisher information matrix of a model over data.

        F = sum_b n_b F_b / sum_b n_b        reduction="mean"
        F = sum_b F_b                        reduction="sum"

    with F_b the matrix of a batch, as `hoglib.fisher_vp` describes it, and n_b the number of examples.
    `LinearOperator` describes ``@``, the algebra of operators and the algorithms. Products also raise
    the errors of `hoglib.fisher_vp`.

    Args:
        loss: From `hoglib.functional_loss`, or any object with ``outputs(params, batch)`` and
            ``criterion(outputs, batch)``.
        params: Where the matrix is taken; any pytree of floating-point tensors. They are read at every
            product: steps of an optimizer in between count.
        data: A batch (a tensor, mapping, tuple, list with a tensor in it, or a non-iterable
            object), or a DataLoader or another re-iterable of batches. Batches are moved to the
            device of params.
        kind: "exact", "mc" (from samples of the likelihood) or "empirical" (from the targets).
        likelihood: The distribution that the outputs parametrise: a function from outputs to a
            `torch.distributions.Distribution`, or "categorical" (logits), "bernoulli" (logits),
            "gaussian" (unit variance) or "poisson" (log rates). None: the likelihood of the criterion.
        num_samples: Samples for each example with kind="mc".
        generator: Draws a seed for these samples, once: every product has equal samples. They depend on
            the number of a batch, not on the process. None is torch's global generator.
        mode: How J v is computed: "forward" (with tangents), "reverse" (differentiating J^T u), "auto"
            or "finite-differences", as in `hoglib.ggn_vp`.
        **options: :class:`~hoglib.curvature.OperatorOptions`: ``reduction`` ("mean" or "sum"),
            ``batch_size``, ``micro_batch``, ``processes`` and ``dtype`` (how the data is summed),
            ``memory_limit`` (of the kept graph), ``check_deterministic``, ``progress``,
            ``stand_ins``, ``remat`` and ``compile``.
    Raises:
        ArgumentValueError: for no or empty batches, and for a DistributedSampler that contradicts
            processes.
        NonFiniteError: for NaN or infinity in losses or products.
        NondeterministicError: for a loss that changes from pass to pass.
        DistributedError: in all processes, if vectors, parameters or buffers differ between them, or
            one process failed.
    Example:
        >>> model = nn.Linear(1, 1, bias=False)
        >>> loss, params = hog.functional_loss(model, F.mse_loss), hog.trainable_params(model)
        >>> data = torch.tensor([[1.0], [3.0]]), torch.zeros(2, 1)
        >>> hog.FisherOperator(loss, params, data, likelihood="gaussian").to_dense()  # (1 + 9) / 2
        tensor([[5.]])
    """

    @validation.explain_arguments
    def __init__(
        self,
        loss: object,
        params: Tree,
        data: object,
        *,
        kind: FisherKind = "exact",
        likelihood: object = None,
        num_samples: int = 1,
        generator: torch.Generator | None = None,
        mode: GaussNewtonMode = "auto",
        **options: Unpack[OperatorOptions],
    ) -> None:
        reduction = options.get("reduction", "mean")
        metric = FisherMetric(kind, likelihood, reduction, num_samples, generator).seeded()
        super().__init__(loss, params, data, GaussNewtonKind(mode, metric), options)


@results.result
class Spectrum(NamedTuple):
    """The eigenvalues of a Hessian, as far as products with vectors determine them.

    Attributes:
        size: Number of parameters P, and so of eigenvalues.
        smallest: The k smallest eigenvalues [k], ascending.
        largest: The k largest eigenvalues [k], ascending.
        trace: Estimate of the trace, and its standard error.
        negative: Estimate of the fraction of eigenvalues below ``below``, and its standard error.
        below: Threshold for negative eigenvalues: minus a thousandth of the largest magnitude.
            Anything closer to zero counts as zero.
        density: Density of all eigenvalues.
        products: Number of products with the Hessian that were computed.
    """

    size: int
    smallest: Tensor
    largest: Tensor
    trace: tuple[float, float]
    negative: tuple[float, float]
    below: float
    density: SpectralDensity
    products: int

    def __repr__(self) -> str:
        low, high = float(self.smallest[0]), float(self.largest[-1])
        return (
            f"Spectrum({self.size} eigenvalues from {low:.4g} to {high:.4g}, trace "
            f"{self.trace[0]:.4g} ± {self.trace[1]:.2g}, {self.products} products)"
        )

    def plot(self, ax: object = None) -> Any:
        """Draw the density with one standard error, and the eigenvalues at both ends as ticks.

        Args:
            ax: Matplotlib axes. Default: the axes of a new pyplot figure.
        Returns:
            The axes.
        Raises:
            MissingDependencyError: if matplotlib is not installed.
        """
        return plotting.spectrum(self, ax)

    def summary(self) -> str:
        """Return the eigenvalues, the trace and the negative fraction as four lines of text."""
        lines = {
            "largest": _format_values(reversed(self.largest.tolist())),
            "smallest": _format_values(self.smallest.tolist()),
            "trace": f"{self.trace[0]:.4g} ± {self.trace[1]:.2g}",
            "negative": f"{100 * self.negative[0]:.2g}% ± {100 * self.negative[1]:.1g}% of them are "
            f"below {self.below:.2g}",
        }
        return "\n".join(f"  {name:9} {text}" for name, text in lines.items())

    def to_dict(self) -> dict[str, Any]:
        """Return numbers and lists only, for JSON."""
        curve = {
            name: getattr(self.density, name) for name in ("grid", "density", "error", "width")
        }
        found: dict[str, Any] = pytree.map_tensors(Tensor.tolist, {**self._asdict(), **curve})
        return found


def hessian_spectrum(
    loss: object,
    params: Tree,
    batch: object,
    *,
    k: int = 5,
    num_samples: int = 10,
    steps: int = 80,
    generator: torch.Generator | None = None,
    max_iter: int | None = None,
    **options: Unpack[OperatorOptions],
) -> Spectrum:
    r"""Estimate the spectrum of the Hessian of a loss from matrix-vector products.

        H = d^2 loss(params, batch) / d params^2

    The k eigenvalues of each end come from :meth:`HessianOperator.eigsh`; the density of all
    eigenvalues, and with it the trace and the negative fraction, from ``spectral_density``. If
    ``eigsh`` does not converge, a warning says so, and the ends are the outermost nodes of the density.

    Args:
        loss: Scalar function ``loss(params, batch)``.
        params: Parameters with P entries in total, a tree of tensors.
        batch: Data of the loss: one batch or batches, as for :class:`HessianOperator`. None for a loss
            without data; it is called as ``loss(params, None)``.
        k: Number of eigenvalues of each end, at most P / 2.
        num_samples: Number of random vectors for the density.
        steps: Lanczos steps for each random vector, of one product each.
        generator: Generator of the random vectors. Default: a new one, seeded with
            ``torch.initial_seed()``.
        max_iter: Largest number of restarts of ``eigsh``. Default: as for ``eigsh``.
        **options: Options of :class:`HessianOperator`, such as progress and processes.
    Returns:
        A :class:`Spectrum`.
    Raises:
        ArgumentValueError: for k beyond P / 2.
        ConvergenceError: if ``eigsh`` does not converge and the density has fewer than 2 k nodes.
    Example:
        >>> spectrum = hog.curvature.hessian_spectrum(
        ...     lambda p, _: (torch.tensor([1.0, 2.0, 3.0, 4.0]) * p.square()).sum() / 2,
        ...     torch.zeros(4), None, k=1, num_samples=2, steps=4)
        >>> round(float(spectrum.smallest), 3), round(float(spectrum.largest), 3)
        (1.0, 4.0)
        >>> spectrum.size
        4
    """
    if batch is None:  # operators need data to iterate over
        loss, batch = partial(without_batch, loss), ()
    operator = HessianOperator(loss, params, batch, **options)
    size = operator.shape[0]
    if 2 * validation.at_least("k", k, 1) > size:
        raise ArgumentValueError(
            f"k: expected at most {size // 2}, half of the {size} parameters, got {k}; give fewer."
        )
    # A new generator: torch's own must not advance.
    generator = generator or torch.Generator().manual_seed(torch.initial_seed())
    failed: Exception | None = None
    try:
        pairs = operator.eigsh(2 * k, which="BE", max_iter=max_iter, generator=generator)
        ends = pairs.values.cpu()
    except ConvergenceError as error:
        failed = error
    density = operator.spectral_density(num_samples, steps=steps, generator=generator)
    if failed is not None:
        ends = _outermost_nodes(density, k, failed)
    mean, deviation = density.average(lambda x: x)
    below = -1e-3 * float(ends.abs().max())
    negative = density.average(lambda x: (x < below).to(x))
    trace = size * float(mean), size * float(deviation)
    share = float(negative[0]), float(negative[1])
    return Spectrum(size, ends[:k], ends[k:], trace, share, below, density, operator.count)


def without_batch(loss: Any, params: Any, _: tuple[()]) -> Tensor:
    """A loss that needs no data, as a function of params and a batch."""
    return loss(params, None)


def _outermost_nodes(density: SpectralDensity, k: int, failed: Exception) -> Tensor:
    """The k outermost Lanczos nodes at each end; they lie inside the spectrum."""
    # Beyond the end of a Krylov space T is zero, which gives nodes without weight.
    real_nodes = density.weights > torch.finfo(density.weights.dtype).eps
    rows = [nodes[real] for nodes, real in zip(density.nodes, real_nodes, strict=True)]
    if min(map(len, rows)) < 2 * k:
        raise failed
    warn(
        f"{failed} The ends of the spectrum are taken from the Lanczos steps of its density, which "
        "reach them from inside."
    )
    low = min(rows, key=lambda nodes: float(nodes[0]))
    high = max(rows, key=lambda nodes: float(nodes[-1]))
    return torch.cat([low[:k], high[-k:]])


def _format_values(values: Any) -> str:
    return "  ".join(f"{value:.4g}" for value in values)
