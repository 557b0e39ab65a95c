"""Diagonals of the curvature matrix of each example of a batch."""

from functools import partial
from typing import Any, Literal, Unpack, get_args

import torch
from torch import Tensor

from hoglib._core.messages import validation
from hoglib._core.problem import Options, Policy, Problem
from hoglib._core.runtime.logger import LOGGER
from hoglib._core.substrate.autograd import Vector
from hoglib._core.substrate.placement import refuse_sharded
from hoglib._core.torch_api import pytree
from hoglib.capture.within import run_uncompiled, when_compiled
from hoglib.curvature.algebra.vector_space import Tree
from hoglib.curvature.batches.data import as_dict
from hoglib.curvature.batches.single_examples import number_of_examples, over_examples
from hoglib.curvature.examples.example_gradients import ROWS_AT_ONCE, check_apart, scaled
from hoglib.curvature.maps.gauss_newton import CompositeLoss, CriterionHessian, GaussNewtonKind
from hoglib.curvature.maps.likelihood import example_counts
from hoglib.curvature.operators.operators import GGNOperator, HessianOperator
from hoglib.ring import ring, warn_if_derivatives_not_finite

NAME = "per_example_diagonals"
DiagonalKind = Literal["ggn", "hessian"]


@when_compiled(run_uncompiled)
def per_example_diagonals(
    loss: object,
    params: Tree,
    batch: object,
    *,
    kind: DiagonalKind = "ggn",
    chunk_size: int | None = None,
    **options: Unpack[Options],
) -> Tree:
    r"""The exact diagonal of the Gauss-Newton matrix or of the Hessian of each example of a batch.

        ggn        d_n = diag(J_n^T H_n J_n)
        hessian    d_n = diag(d^2 l_n / d params^2),    l_n = loss(params, example n), a batch of one

    with J_n the Jacobian of the outputs of example n, and H_n the Hessian of the criterion by these
    outputs. The mean of d_n is the diagonal of the batch's matrix if the criterion is a mean over
    examples; examples have the factors of `hoglib.per_example_gradients`. "ggn" takes a backward pass
    for each output of an example, "hessian" a product for each of P parameters: for small networks.

    Args:
        loss: As for `hoglib.per_example_gradients`; for "ggn" from `hoglib.functional_loss`, or any
            object with ``outputs(params, batch)`` and ``criterion(outputs, batch)``.
        params: Where the matrices are taken; any pytree of floating-point tensors.
        batch: As for `hoglib.per_example_gradients`.
        kind: "ggn" or "hessian".
        chunk_size: Examples at once, by `torch.func.vmap`. Default: as many as take 256 MiB of
            Jacobians in float32. If an operation has no rule in torch.func, examples loop, with a dense
            matrix for each.
        **options: ``stand_ins``, as :class:`hoglib.Options` describes it.
    Returns:
        The diagonals, like params with a leading dimension of N.
    Raises:
        ArgumentValueError: for batch norm in train mode, and for losses that couple examples.
        UnsupportedError: if torch has no derivative of an operation.
    Shape:
        - [N, *shape] for each parameter
    References:
        Dangel, Kunstner and Hennig, BackPACK: Packing More into Backprop, 2020.
    Example:
        >>> model = nn.Linear(2, 1, bias=False)
        >>> loss, params = hog.functional_loss(model, F.mse_loss), hog.trainable_params(model)
        >>> batch = torch.tensor([[3.0, 4.0], [0.0, 1.0]]), torch.zeros(2, 1)
        >>> hog.curvature.per_example_diagonals(loss, params, batch)["weight"]  # 2 x_n^2
        tensor([[[18., 32.]],
        <BLANKLINE>
                [[ 0.,  2.]]])
    """
    validation.choice("kind", kind, get_args(DiagonalKind))
    if kind == "ggn":
        GaussNewtonKind().check_loss(loss)
    check_apart(loss, params, batch, NAME)
    refuse_sharded(NAME, pytree.leaves(params))
    own = as_dict(batch)
    count = number_of_examples(own)
    size = validation.none_or_at_least("chunk_size", chunk_size, 1)
    policy = Policy.of(NAME, options, names=("stand_ins",))
    problem = Problem.of(policy, loss, params, own)
    validation.refuse_transforms(NAME, "use torch.func.vmap of torch.func.hessian there.")
    with torch.inference_mode(False), ring(policy, loss) as blocks:
        problem = problem.entered(blocks)
        width = 1
        if kind == "ggn":  # the rows of an example's Jacobian
            first = problem.with_args(pytree.rows(own, count, 0, 1))
            composite = CompositeLoss(first, CriterionHessian(), "auto")
            width = sum(y.numel() for y in composite.detached_outputs(first.leaves))
        at_once = max(1, ROWS_AT_ONCE // max(1, width * pytree.size(params)))
        size = size or min(at_once, count)
        of_example = _of_ggn if kind == "ggn" else partial(_of_hessian, max(1, at_once // size))
        try:
            parts = (pytree.rows(own, count, n, n + size) for n in range(0, count, size))
            chunks = [over_examples(problem.with_args(part), of_example) for part in parts]
        except (RuntimeError, NotImplementedError, AssertionError) as error:
            LOGGER.debug("%s: one example after another, because of %s", NAME, error)
            chunks = []
    if not chunks:  # torch.func lacks a rule, or the user's code raised and will raise again
        rows = (pytree.rows(own, count, n, n + 1) for n in range(count))
        chunks = [_by_operator(kind, loss, params, one, options) for one in rows]
    found = [torch.cat(rows).detach() for rows in zip(*chunks, strict=True)]
    factors = example_counts(loss, batch)
    if factors is not None:
        found = [scaled(rows, factors / factors.mean()) for rows in found]
    warn_if_derivatives_not_finite(problem, found[0].new_zeros(()), found)
    return problem.tree(found)


def _by_operator(kind: str, loss: Any, params: Tree, one: Any, options: Any) -> Vector:
    """The diagonal of the dense matrix of one example, with a leading dimension of 1."""
    make = GGNOperator if kind == "ggn" else HessianOperator
    A = make(loss, params, one, **options)
    return A.space.split_rows(A.to_dense().diagonal()[None])


def _of_ggn(one: Problem, p: Vector) -> Vector:
    """sum over outputs i and j of J_i H_ij J_j, entry by entry."""
    composite = CompositeLoss(one, CriterionHessian(), "auto")

    def outputs(*p: Tensor) -> Any:
        found = tuple(composite.outputs([*p]))
        return found, found

    of_outputs: Any = torch.func.jacrev(outputs, tuple(range(len(p))), has_aux=True)
    J, ys = of_outputs(*p)
    numbers = tuple(range(len(ys)))
    H = torch.func.jacfwd(torch.func.grad(composite.criterion, numbers), numbers)(*ys)

    def diagonal(k: int) -> Tensor:
        rows = [by_leaf[k].reshape(y.numel(), -1) for by_leaf, y in zip(J, ys, strict=True)]
        total: Any = 0
        for a, Ja in enumerate(rows):
            for b, Jb in enumerate(rows):
                block = H[a][b].reshape(len(Ja), len(Jb))
                total = total + (Ja * (block @ Jb)).sum(0)
        return total.reshape(p[k].shape)

    return [diagonal(k) for k in range(len(p))]


def _of_hessian(at_once: int, one: Problem, p: Vector) -> Vector:
    """e^T H e for each unit vector e, `at_once` in one vmap, in forward over reverse mode."""
    gradient = torch.func.grad(lambda p: one(*p))

    def entry(k: int, e: Tensor) -> Tensor:
        along = [torch.zeros_like(x) if i != k else e for i, x in enumerate(p)]
        slopes: Any = torch.func.jvp(gradient, (p,), (along,))[1]
        return (slopes[k] * e).sum()

    def diagonal(k: int) -> Tensor:
        shape, count = p[k].shape, p[k].numel()
        units = torch.eye(count, dtype=p[k].dtype, device=p[k].device).reshape(count, *shape)
        each = torch.func.vmap(partial(entry, k), chunk_size=min(at_once, max(count, 1)))
        return each(units).reshape(shape) if count else torch.zeros_like(p[k])

    return [diagonal(k) for k in range(len(p))]
