"""The Jacobian of a model's outputs over data, by its parameters, as a linear operator."""

from dataclasses import replace
from functools import cached_property, partial, reduce
from typing import Any, final

import torch
from torch import Tensor, nn

from hoglib._core.messages import validation
from hoglib._core.modules.swap import keep_swapped, reapply
from hoglib._core.problem import Problem
from hoglib._core.substrate.autograd import Vector, fresh_leaves, grad_enabled
from hoglib._core.substrate.gradient_graph import graph_bytes
from hoglib._core.substrate.placement import refuse_sharded
from hoglib._core.torch_api import pytree
from hoglib._core.torch_api.torch_modes import own_algebra
from hoglib.curvature.algebra.linear_operator import RectangularOperator
from hoglib.curvature.algebra.vector_space import Space, Tree
from hoglib.curvature.batches.data import Processes, in_fixed_order
from hoglib.curvature.batches.single_examples import jacobian_by_vmap
from hoglib.curvature.maps.gauss_newton import CompositeLoss, CriterionHessian, transposed_product
from hoglib.curvature.maps.jacobian_product import OPERATOR as NAME
from hoglib.curvature.maps.jacobian_product import TransposedJacobian, detached, with_graph
from hoglib.curvature.maps.rows import Chunk, Rows
from hoglib.curvature.sums.dataset_sum import DatasetSum, split_options
from hoglib.curvature.sums.term import Term
from hoglib.errors import ArgumentValueError
from hoglib.functional import functional_loss

NUMBERS_AT_ONCE = 2**24  # elements of the Jacobian rows in one vmap chunk of `_by_examples`
OPTIONS = ("stand_ins", "remat", "check_deterministic", "progress", "memory_limit")


@final
class JacobianOperator(RectangularOperator):
    r"""The Jacobian of a model's outputs over data, by its parameters.

        J = d outputs(params, data) / d params        [M, P], rows in the order of batches and outputs

        J @ v, J.T @ u        products with vectors on the parameters, and on the outputs
        J.T @ J               an operator on the parameters: the Gauss-Newton matrix of half the sum of
                              squares
        J @ J.T               an operator on the outputs: the empirical neural tangent kernel
        J @ S @ J.T           the covariance of linearised outputs, for a covariance S of the parameters

    Vectors on the parameters are flat [P] or like params. Vectors on the outputs are flat [M], or, if
    the outputs of a batch are one tensor, like the outputs of all examples [N, ...]. The product with a
    flat vector is flat. J v is the derivative of J^T u by u, and takes two backward passes; the graph
    of a single batch is kept between products.

    Args:
        func: A loss from `hoglib.functional_loss`, for its outputs; a module, which is called on each
            batch (a tuple is its arguments, a mapping its keywords); or a function
            ``func(params, batch)``. It returns a tensor or a pytree of tensors.
        params: Where the Jacobian is taken; any pytree of floating-point tensors. They are read at
            every product.
        data: A batch, or a DataLoader or another re-iterable of batches, in a fixed order.
        **options: ``check_deterministic``, ``progress``, ``memory_limit``, ``stand_ins`` and ``remat``,
            of :class:`~hoglib.curvature.OperatorOptions`.
    Raises:
        ArgumentTypeError: for any other func, and for unknown options.
        ArgumentValueError: for no batches, and for a DataLoader that shuffles.
        NoSecondDerivative: at J @ v, for a custom Function with a backward that has lost its graph.
        NondeterministicError: for outputs or batches that change from pass to pass.
        NonFiniteError: for NaN or infinity in outputs or products.
    References:
        Jacot, Gabriel and Hongler, Neural Tangent Kernel: Convergence and Generalization in Neural
        Networks, 2018. Novak, Sohl-Dickstein and Schoenholz, Fast Finite Width Neural Tangent Kernel,
        2022 (products of Jacobians).
    Example:
        >>> x = torch.tensor([[1.0, 2.0], [0.0, 1.0]])
        >>> J = hog.JacobianOperator(lambda p, x: x @ p, torch.ones(2), x)
        >>> J @ torch.tensor([1.0, 0.0])
        tensor([1., 0.])
        >>> (J @ J.T).to_dense()
        tensor([[5., 2.],
                [2., 1.]])
    """

    def __init__(self, func: object, params: Tree, data: object, **options: Any) -> None:
        policy, of_data = split_options(NAME, options, OPTIONS)
        in_fixed_order("data", data)
        refuse_sharded(NAME, pytree.leaves(params))
        super().__init__(Space(params), of_data.progress)
        outputs = _Outputs(func)
        policy.check_blocks(outputs)
        # Outputs are stacked, not averaged: every batch has weight 1.
        summed = replace(of_data, reduction="sum", batch_size=_unit_weight)
        at = Term(policy, outputs, self.space, self._bar, self.space.placement)
        alone = Processes(NAME, None, data)
        self._sum = DatasetSum(at, data, summed, alone, fixed_batches=True)
        self._limit = of_data.memory_limit  # of the kept graph, in bytes

    @cached_property
    def target(self) -> Space:
        """The vector space of the outputs. Its first use makes a pass over the data, for the shapes."""
        return self._space_of(self._of_batches())

    def outputs(self) -> Tensor:
        """The outputs over the data, by one pass.

        Returns:
            A flat vector on the outputs [M].
        """
        every = self._of_batches()
        if "target" not in vars(self):  # fill the cached_property: it would make a pass of its own
            self.target = self._space_of(every)
        flat = torch.cat([y.reshape(-1) for found in every for y in found]).to(self.target.dtype)
        self._check_size(len(flat))
        return flat

    def _of_batches(self) -> list[Vector]:
        """The outputs at each batch."""
        found: list[Vector] = []
        nothing = torch.zeros(1, 0, dtype=self.dtype, device=self.device)

        def visit(term: Term) -> Tensor:
            with term.entered() as problem:
                composite = CompositeLoss(problem, CriterionHessian(), "reverse")
                found.append(outputs := composite.detached_outputs(problem.leaves))
                return composite.criterion(*outputs)

        with torch.inference_mode(False):
            self._sum.fold(visit, nothing, first_order=True)
        return found

    def _space_of(self, found: list[Vector]) -> Space:
        """The vector space of the outputs of all batches: shapes and dtypes, no values."""
        every = [y for outputs in found for y in outputs]
        # Batches with one output tensor each, of equal trailing shape, form one tensor [N, ...].
        one_of_each = len(every) == len(found) and all(y.dim() for y in every)
        alike = one_of_each and len({y.shape[1:] for y in every}) == 1
        rows = sum(map(len, every)) if alike else sum(y.numel() for y in every)
        dtype = reduce(torch.promote_types, [y.dtype for y in every])
        # An expanded zero: the space needs shapes, not memory.
        like = torch.zeros((), dtype=dtype, device=self.device)
        shape = (rows, *every[0].shape[1:]) if alike else (rows,)
        return Space(like.expand(shape), of="outputs")

    def _check_size(self, size: int) -> None:
        if size != self.target.size:
            raise ArgumentValueError(
                f"data: expected {self.target.size} outputs as at the first pass, got {size}; make a "
                "new operator of other data."
            )

    def _by_examples(self) -> tuple[Tensor, Tensor]:
        """The outputs [M] and J [M, P], by vmap over examples.

        Right only if the outputs have a row for each example and no row depends on another example;
        the caller checks it.
        """
        found = []
        chunk = max(1, NUMBERS_AT_ONCE // self.space.size)
        with torch.inference_mode(False), own_algebra():
            for term in self._sum.terms():
                with term.entered() as problem:
                    found.append(jacobian_by_vmap(problem, _outputs_of, chunk))
        values, rows = (torch.cat(parts) for parts in zip(*found, strict=True))
        return values.to(self.target.dtype), rows.to(self.dtype)

    def _products(self, rows: Tensor) -> Tensor:
        return self._multiply(rows, self.target, transposed=False)

    def _transposed_products(self, rows: Tensor) -> Tensor:
        return self._multiply(rows, self.space, transposed=True)

    def _multiply(self, rows: Tensor, into: Space, transposed: bool) -> Tensor:
        validation.refuse_transforms(NAME, "use the function hoglib.jvp there.")
        start, sums = 0, self._sum
        total = torch.zeros(len(rows), into.size, dtype=into.dtype, device=self.device)
        # A point kept by a product J^T u was made without the graph by u that J v needs.
        if not (transposed or sums.kept is None or sums.kept.jacobian):
            sums.kept = None
        kept: _Point | None = None

        def visit(term: Term) -> Tensor:
            nonlocal start, kept
            point = sums.kept or _Point(term, not transposed)
            keep = sums.kept is not None or (
                sums.batches.weight_cancels and 0 < point.held_bytes() <= self._limit
            )
            kept = point if keep else None
            # Rows start to stop of J belong to this batch: batches need a fixed order.
            stop = start + sum(point.sizes)
            split = point.split if transposed else self.space.split_rows
            own = rows[:, start:stop] if transposed else rows
            with grad_enabled(), reapply(point.patches):
                products = point.products(lambda i, j: split(own[i:j]), len(rows), transposed, keep)
            if transposed:
                self.space.add_rows_of(total, products, 1.0, first=start == 0)
            else:
                total[:, start:stop] = torch.cat([y.reshape(len(rows), -1) for y in products], 1)
            term.advance(len(rows))
            start = stop
            return point.value

        with self._bar.over("@", len(rows)):
            sums.fold(visit, total, rows, first_order=True)
        sums.kept = kept
        self._check_size(start)
        self._refuse_not_finite(rows, total, into, "the outputs are")
        return total


def _outputs_of(problem: Problem, leaves: Vector) -> Vector:
    return CompositeLoss(problem, CriterionHessian(), "reverse").outputs(leaves)


# Not a lambda: operators are pickled.
def _unit_weight(batch: object) -> float:
    return 1.0


@final
class _Outputs:
    """A function as a loss, the mean square of its outputs: `Determinism` compares it between
    passes."""

    def __init__(self, func: object) -> None:
        if isinstance(func, nn.Module):
            func = functional_loss(func)
        func = func.with_logits() if hasattr(func, "with_logits") else func
        self.model = getattr(func, "model", None)  # for checks of its modes and buffers
        self.outputs = validation.function("func", getattr(func, "outputs", func))

    def __call__(self, params: Tree, batch: object) -> Tensor:
        return self.criterion(self.outputs(params, batch), batch)

    def criterion(self, outputs: object, batch: object) -> Tensor:
        every = [y.reshape(-1) for y in pytree.leaves(outputs) if pytree.is_float(y)]
        return torch.cat(every).square().sum() / max(sum(map(len, every)), 1)


@final
class _Point:
    """The outputs at a batch, with their graph. for_tangents: products J v are needed, not only
    J^T u."""

    def __init__(self, term: Term, for_tangents: bool) -> None:
        self.term = term
        with term.ring(around_graph=True) as blocks, keep_swapped() as patches:
            problem = term.problem().entered(blocks)
            self._composite = CompositeLoss(problem, CriterionHessian(), "reverse")
            self._p = fresh_leaves(problem.leaves, False)  # the leaves of this graph
            self._outputs, self.value = self._composite.checked_outputs(self._p, for_tangents)
            self.sizes = [y.numel() for y in self._outputs]  # numbers in each output
            # J v is the derivative of J^T u by u, so it needs a J^T u with a graph.
            self.jacobian: Any = for_tangents and TransposedJacobian(self._outputs, self._p, NAME)
            # a checkpoint recomputes in backward with the patches that the model had in forward
            self.patches = patches.values()

    def held_bytes(self) -> int:
        """The bytes that a kept graph holds."""
        return graph_bytes(self.jacobian.parts if self.jacobian else with_graph(self._outputs))

    def split(self, rows: Tensor) -> Vector:
        """Rows [k, M] as tensors [k, *shape] like the outputs."""
        parts = zip(rows.split(self.sizes, 1), self._outputs, strict=True)
        return [part.reshape(len(rows), *y.shape).to(y.dtype) for part, y in parts]

    def products(self, chunk: Chunk, count: int, transposed: bool, keep: bool) -> Vector:
        """J v for `count` vectors, or J^T u if transposed. chunk: (start, stop) -> vectors start to
        stop."""
        if count == 1:
            found = self._product([x[0].contiguous() for x in chunk(0, 1)], transposed, keep)
            return [x.unsqueeze(0) for x in found]
        product = partial(self._product, transposed=transposed, keep=True)
        unchecked = partial(product, checked=False)
        return Rows(
            self._composite.problem, (NAME, transposed), unchecked, self.held_bytes, product
        ).map(chunk, count)

    def _product(
        self, vector: Vector, transposed: bool, keep: bool, checked: bool = True
    ) -> Vector:
        if transposed:
            return transposed_product(self._outputs, self._p, vector, self._composite.policy, keep)
        tangents: Vector = self.jacobian.jvp(vector, keep, False)
        if checked and not self.jacobian.agrees(self._composite.loss, vector, tangents):
            raise detached(NAME)
        return tangents
