"""Whole matrices, or their blocks, for networks small enough to hold them."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hoglib._core import pytree, torch_internals, validation
from hoglib._core.autograd import (
    Vector,
    clone_inference_tensors,
    dense,
    grad_enabled,
    gradient_with_graph,
    materialize_grads,
    translate_errors,
)
from hoglib._core.finite_differences import check_hessian_product, unchecked_functions
from hoglib._core.swap import keep_swapped
from hoglib.capture.capturing import runs_elsewhere
from hoglib.curvature.compiled import backend_of, linearised
from hoglib.curvature.kinds import GaussNewtonKind, HessianKind
from hoglib.curvature.routes import Call, LinearMap, ScalarFunction
from hoglib.curvature.vector_space import Blocks, groups_of
from hoglib.errors import ArgumentTypeError, ArgumentValueError
from hoglib.stand_ins.mode import stand_ins_if

Tree = Any


def hessian(
    func: Callable[..., Tensor],
    params: Tree,
    *args: Any,
    blocks: Blocks = None,
    create_graph: bool = False,
    stand_ins: bool = True,
    compile: bool | str = False,
) -> Tree:
    r"""The Hessian of a scalar function, in the layout of `torch.func.hessian`.

        H[a][b][i, j] = d^2 func(params, *args) / d params[a][i] d params[b][j]

    Shapes: for params a dict, H is a dict of dicts and H[a][b] has the shape of params[a] followed by
    that of params[b]; for any other pytree the nesting is alike, for one tensor H is one tensor.
    blocks: only the blocks on the diagonal, of params a dict by qualified name. "parameter" has one
    for each tensor, "module" one for the parameters of each module; a function of the name gives the
    block that it belongs to, a list of lists of names the blocks themselves. Then H[a] has the names
    that share a block with a, and what lies between blocks is neither computed nor held. The Hessian
    of one module alone is that of the params that belong to it.

    Computed row by row, reverse-over-reverse, one backward pass a row: P passes for P numbers in
    params, and P^2 numbers of memory. (`torch.func.hessian` batches the rows with vmap, which is
    silently wrong in the rows of a LayerNorm's weight.) Inside torch.func transforms it is
    `jacfwd(grad)`. create_graph: whether H can be differentiated again. stand_ins, compile: as in
    `hvp`; compiled, without create_graph, a row is a product, and what all rows share runs once.
    The inputs are not changed, and it works under no_grad and inference_mode.
    Raises what `hvp` raises.
    """
    validation.function("func", func)
    leaves, structure = _real_leaves(params)
    groups = groups_of(blocks, params)
    call, matrix = Call("hessian", create_graph), HessianKind("auto")
    backend = backend_of("hessian", compile, matrix)
    if backend and create_graph:
        raise ArgumentValueError(
            "hessian(compile=True): expected create_graph=False, got True; leave one of the two out."
        )
    if backend and not runs_elsewhere():
        with torch.inference_mode(False), torch.no_grad():
            leaves, inputs = clone_inference_tensors((leaves, args))
            point = linearised(
                func, matrix, call, stand_ins, backend, leaves, structure, inputs, True
            )
            return _nested(_by_products(point, leaves, groups), params, structure, blocks)
    with grad_enabled(), keep_swapped(), stand_ins_if(stand_ins):
        leaves, inputs = clone_inference_tensors((leaves, args))

        def of_leaves(*values: Tensor) -> Tensor:
            value = func(pytree.unflatten(values, structure), *inputs)
            return validation.scalar("func(params, *args)", value)

        if torch_internals.transforms_active():
            every = tuple(range(len(leaves)))
            full = torch.func.jacfwd(torch.func.grad(of_leaves, every), every)(*leaves)
            rows = {(a, b): full[a][b] for group in groups for a in group for b in group}
        else:
            rows = _hessian_rows(of_leaves, leaves, groups, call)
    return _nested(rows, params, structure, blocks)


def ggn(
    loss: Any, params: Tree, batch: Any, *, blocks: Blocks = None, stand_ins: bool = True
) -> Tree:
    r"""The generalised Gauss-Newton matrix J^T H J of `ggn_vp`, in the layout of `hessian`.

    One product for each number in params, with the graph of the outputs kept between them. blocks and
    stand_ins as in `hessian`. Raises what `ggn_vp` raises.
    """
    matrix = GaussNewtonKind("auto")
    matrix.check(loss)
    leaves, structure = _real_leaves(params)
    groups = groups_of(blocks, params)
    with grad_enabled(), keep_swapped(), stand_ins_if(stand_ins):
        leaves, args = clone_inference_tensors((leaves, (batch,)))
        params_of = partial(pytree.unflatten, structure=structure)
        point = matrix.at(loss, params_of, args, leaves, Call("ggn"), several=True)
        columns = _by_products(point, leaves, groups)
    return _nested(columns, params, structure, blocks)


def _by_products(
    point: LinearMap, leaves: Vector, groups: list[list[int]]
) -> dict[tuple[int, int], Tensor]:
    """M[a][b] for each pair of leaves in a group, one product a column."""
    columns = {}
    for group in groups:
        for b in group:
            products = [point.apply(e, True)[1] for e in _units(leaves, b)]
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


def _real_leaves(params: Tree) -> tuple[Vector, Any]:
    validation.parameters(params)
    leaves, structure = pytree.flatten(params)
    if any(leaf.is_complex() for leaf in leaves):
        raise ArgumentTypeError(
            "params: expected real tensors, got a complex one, for which there is no one Hessian; pass "
            "its real view, `torch.view_as_real(p)`, and rebuild it in func."
        )
    return leaves, structure


def _hessian_rows(
    func: ScalarFunction, leaves: Vector, groups: list[list[int]], call: Call
) -> dict[tuple[int, int], Tensor]:
    """H[a][b] for each pair of leaves in a group."""
    value, own, gradient, graph = gradient_with_graph(func, leaves, call.what, call.create_graph)
    unseen = [] if call.create_graph else unchecked_functions(value, graph)
    if unseen:
        check_hessian_product(
            call.what, unseen, func, leaves, [torch.ones_like(leaf) for leaf in own]
        )
    blocks = {}
    for group in groups:
        among = [own[b] for b in group]
        for a in group:
            rows = list(_rows(gradient[a], among, call))
            for b, *entries in zip(group, *rows, strict=True):
                shape = own[a].shape + own[b].shape
                whole = torch.stack(entries) if entries else own[a].new_zeros(shape)
                blocks[a, b] = whole.reshape(shape)
    return blocks


def _rows(gradient: Tensor | None, among: Vector, call: Call) -> Iterable[Vector]:
    if gradient is None or not gradient.requires_grad:
        return
    for entry in dense(gradient).reshape(-1).unbind():
        with translate_errors(call.what):
            row = torch.autograd.grad(
                entry, among, retain_graph=True, create_graph=call.create_graph, allow_unused=True
            )
        yield materialize_grads(list(row), among)


def _nested(
    entries: dict[tuple[int, int], Tensor], params: Tree, structure: Any, blocks: Blocks
) -> Tree:
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
