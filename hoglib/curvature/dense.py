"""Whole matrices, or their blocks, for networks small enough to hold them."""

from collections.abc import Callable, Iterable
from typing import Any, Unpack

import torch
from torch import Tensor

from hoglib._core import pytree, torch_internals, validation
from hoglib._core.autograd import (
    Vector,
    dense,
    gradient_with_graph,
    materialize_grads,
    translate_errors,
)
from hoglib._core.problem import Options, Policy, Problem
from hoglib._core.sharding import refuse_sharded
from hoglib.curvature.compiled import compiled_linear_map
from hoglib.curvature.gauss_newton import GaussNewtonKind
from hoglib.curvature.linear_map import HessianKind, LinearMap
from hoglib.curvature.vector_space import Blocks, groups_of
from hoglib.errors import ArgumentTypeError, ArgumentValueError
from hoglib.ring import ring
from hoglib.verification.entry_points import note_lost_graph

Tree = Any
Groups = list[list[int]]  # the leaves that share a block, for each block
Entries = dict[tuple[int, int], Tensor]  # the matrix of each pair of leaves


def hessian(
    func: Callable[..., Tensor],
    params: Tree,
    *args: Any,
    blocks: Blocks = None,
    create_graph: bool = False,
    **options: Unpack[Options],
) -> Tree:
    r"""The Hessian of a scalar function, in the layout of `torch.func.hessian`.

        H[a][b][i, j] = d^2 func(params, *args) / d params[a][i] d params[b][j]

    It is computed row by row, reverse-over-reverse: P backward passes for P numbers in params, and P^2
    numbers of memory. (`torch.func.hessian` batches the rows with vmap, which is silently wrong in the
    rows of a LayerNorm's weight.) Inside torch.func transforms it is `jacfwd(grad)`. The inputs are not
    changed, and it works under no_grad and inference_mode.

    Args:
        func: The function ``func(params, *args)`` that returns a scalar.
        params: Where the Hessian is taken; any pytree of real floating-point tensors.
        *args: Further arguments of func, such as a batch.
        blocks: Compute only the blocks on the diagonal, of params that are a dict by qualified name.
            "parameter" is one block for each tensor, "module" one for the parameters of each module; a
            function of the name returns the block that it belongs to; a list of lists of names is the
            blocks themselves. H[a] then has the names that share a block with a.
        create_graph: Whether H can be differentiated again.
        **options: How func is evaluated, as :class:`hoglib.Options` describes it. Compiled, what all
            rows share runs once; not with create_graph.
    Returns:
        H: for params a dict, a dict of dicts; for any other pytree nested alike; for one tensor one
        tensor.
    Raises:
        ArgumentTypeError, ArgumentValueError: for params, blocks or a value of the wrong kind.
        NoSecondDerivative: when the value does not depend on params, or its gradient lost its graph.
        UnsupportedError: where torch has no derivative of an operation.
    Shape:
        - ``H[a][b]``: that of ``params[a]`` followed by that of ``params[b]``
    Example:
        >>> hog.hessian(lambda p: p[0] ** 2 * p[1], torch.tensor([1.0, 2.0]))
        tensor([[4., 2.],
                [2., 0.]])
    """
    validation.function("func", func)
    policy = Policy.of("hessian", options, create_graph)
    problem, groups = _real_problem(policy, func, params, args), groups_of(blocks, params)
    if policy.backend and create_graph:
        raise ArgumentValueError(
            "hessian(compile=True): expected create_graph=False, got True; leave one of the two out."
        )
    around = ring(policy, func)
    with around as entered:
        problem = problem.entered(entered)
        if around.captures:
            entries = _by_products(
                compiled_linear_map(HessianKind(), problem, True), problem, groups
            )
        elif torch_internals.transforms_active():
            every = tuple(range(len(problem.leaves)))
            full = torch.func.jacfwd(torch.func.grad(problem, every), every)(*problem.leaves)
            entries = {(a, b): full[a][b] for group in groups for a in group for b in group}
        else:
            entries = _by_rows(problem, groups)
    return _nested(entries, params, problem.structure, blocks)


def ggn(
    loss: Any, params: Tree, batch: Any, *, blocks: Blocks = None, **options: Unpack[Options]
) -> Tree:  # fmt: skip
    r"""The generalised Gauss-Newton matrix, in the layout of `hessian`.

        G = J^T H J

    with J the Jacobian of the outputs by params and H the Hessian of the criterion by the outputs. It
    takes one product for each number in params; the graph of the outputs is kept between them.

    Args:
        loss: From `hoglib.functional_loss`, or any object with ``outputs(params, batch)`` and
            ``criterion(outputs, batch)``.
        params: Where the matrix is taken; any pytree of real floating-point tensors.
        batch: What ``loss.outputs`` and ``loss.criterion`` take.
        blocks: Compute only the blocks on the diagonal: "parameter", "module", a function of a
            qualified name that returns its block, or a list of lists of names.
        **options: How the loss is evaluated, as :class:`hoglib.Options` describes it.
    Returns:
        G: for params a dict, a dict of dicts; ``G[a][b]`` has the shape of ``params[a]`` followed by
        that of ``params[b]``.
    Raises:
        ArgumentTypeError: for a loss without ``outputs`` and ``criterion``, and for params of the wrong
            kind.
        NoSecondDerivative: where the outputs do not depend on params, or lose their graph.
        UnsupportedError: where torch has no derivative of an operation.
    Example:
        >>> model = nn.Linear(1, 1, bias=False)
        >>> loss, params = hog.functional_loss(model, F.mse_loss), hog.trainable_params(model)
        >>> G = hog.curvature.ggn(loss, params, (torch.tensor([[1.0], [3.0]]), torch.zeros(2, 1)))
        >>> G["weight"]["weight"].item()  # 2 (1 + 9) / 2
        10.0
    """
    kind = GaussNewtonKind()
    kind.check_loss(loss)
    policy = Policy.of("ggn", options)
    problem, groups = _real_problem(policy, loss, params, (batch,)), groups_of(blocks, params)
    around = ring(policy, loss)
    with around as entered:
        problem = problem.entered(entered)
        if around.captures:
            point = compiled_linear_map(kind, problem, True)
        else:
            point = kind.linearize(problem, True)
        entries = _by_products(point, problem, groups)
    return _nested(entries, params, problem.structure, blocks)


def _real_problem(policy: Policy, func: Any, params: Tree, args: tuple[Any, ...]) -> Problem:
    refuse_sharded(policy.caller, pytree.leaves(params))
    problem = Problem.of(policy, func, params, *args)
    if any(leaf.is_complex() for leaf in problem.leaves):
        raise ArgumentTypeError(
            "params: expected real tensors, got a complex one, whose Hessian is not defined; pass "
            "its real view, `torch.view_as_real(p)`, and rebuild it in func."
        )
    return problem


def _by_rows(problem: Problem, groups: Groups) -> Entries:
    """H[a][b] for each pair of leaves in a group, one backward pass a row."""
    policy = problem.policy
    found = gradient_with_graph(problem, problem.leaves, policy.caller, policy.create_graph)
    note_lost_graph(found)
    _, p, gradient, _ = found
    entries = {}
    for group in groups:
        columns = [p[b] for b in group]
        for a in group:
            rows = list(_rows(gradient[a], columns, policy))
            for b, *parts in zip(group, *rows, strict=True):
                shape = p[a].shape + p[b].shape
                whole = torch.stack(parts) if parts else p[a].new_zeros(shape)
                entries[a, b] = whole.reshape(shape)
    return entries


def _rows(gradient: Tensor | None, columns: Vector, policy: Policy) -> Iterable[Vector]:
    """The derivative of each entry of the gradient of a leaf, by the leaves of the columns."""
    if gradient is None or not gradient.requires_grad:
        return
    create_graph = policy.create_graph
    for entry in dense(gradient).reshape(-1).unbind():
        with translate_errors(policy.caller):
            row = torch.autograd.grad(
                entry, columns, retain_graph=True, create_graph=create_graph, allow_unused=True
            )
        yield materialize_grads(list(row), columns)


def _by_products(point: LinearMap, problem: Problem, groups: Groups) -> Entries:
    """M[a][b] for each pair of leaves in a group, one product a column."""
    leaves, columns = problem.leaves, {}
    for group in groups:
        for b in group:
            products = []
            for unit in _units(leaves, b):
                products.append(point.apply(unit, True)[1])
            for a in group:
                entries = [product[a] for product in products]
                shape = leaves[a].shape + leaves[b].shape
                block = torch.stack(entries, -1) if entries else leaves[a].new_zeros(shape)
                columns[a, b] = block.reshape(shape).detach()
    return columns


def _units(leaves: Vector, which: int) -> Iterable[Vector]:
    for j in range(leaves[which].numel()):
        # contiguous, unlike zeros_like
        unit = [leaf.new_zeros(leaf.shape) for leaf in leaves]
        unit[which].view(-1)[j] = 1
        yield unit


def _nested(entries: Entries, params: Tree, structure: Any, blocks: Blocks) -> Tree:
    """The entries in the structure of params, twice; with blocks as a dict of dicts."""
    count = len(pytree.leaves(params))
    if blocks is None:
        rows = [
            pytree.unflatten([entries[a, b] for b in range(count)], structure) for a in range(count)
        ]
        return pytree.unflatten(rows, structure)
    names = pytree.paths(params)
    return {
        names[a]: {names[b]: entries[a, b] for b in range(count) if (a, b) in entries}
        for a in range(count)
    }
