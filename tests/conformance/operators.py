"""What every operator does, and every product of a matrix with a vector, whatever the matrix: one call each."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing import assert_close

from hoglib.curvature import LinearOperator
from tests.curvature.problems import draw, flat, relative
from tests.unchanged import unchanged

EVERYWHERE: tuple[Any, ...] = (nullcontext, torch.no_grad, torch.inference_mode)
Tree = dict[str, Tensor]


def check_operator(
    make: Callable[..., LinearOperator],
    dense: Tensor,
    *models: nn.Module,
    gradient: tuple[Tensor, Tensor] | None = None,
    variants: Iterable[Mapping[str, Any]] = ({},),
    tolerance: float = 1e-7,
) -> None:
    """An operator is its matrix, symmetric and linear, whatever form its vectors have, wherever it is
    called; nothing that was passed in is changed. Variants take turns in where they are called, and have
    the products of a vector and of a block.

    Args:
        make: Makes the operator, a new one at each call, with the options of a variant.
        dense: Its matrix [P, P] by other means.
        models: Whose parameters and buffers stay as they are.
        gradient: The loss and its gradient [P] by other means, of an operator over data.
        variants: Options with which the matrix is the same, such as those of recomputation.
        tolerance: Of the norm of a product.
    """
    A = make()
    M = A.to_dense()
    assert relative(M, dense) < tolerance
    assert relative(M, M.T) < tolerance * 1e-3
    assert (A.shape, A.dtype, A.device) == (M.shape, M.dtype, M.device)
    assert A.T is A
    for number, options in enumerate(variants):
        for context in EVERYWHERE if number == 0 else EVERYWHERE[number % 3 :][:1]:
            with unchanged(*models), context():
                A = make(**options)
                if number == 0:
                    check_vectors(A, dense, tolerance)
                for x in (draw(len(dense)), draw(len(dense), 3, seed=2)):
                    assert relative(A @ x, dense @ x) < tolerance
                if gradient is not None:
                    value, tree = A.gradient()  # type: ignore[attr-defined]
                    assert relative(value, gradient[0]) < tolerance
                    assert relative(A.ravel(tree), gradient[1]) < tolerance


def check_vectors(A: LinearOperator, dense: Tensor, tolerance: float = 1e-7) -> None:
    """Products with vectors and blocks, flat and in the structure of the parameters, also by a graph that
    an earlier product left."""
    size = len(dense)
    u, v, V = draw(size), draw(size, seed=1), draw(size, 3, seed=2)
    given, first = v.clone(), A @ v
    for x in (v, V, v):
        assert relative(A @ x, dense @ x) < tolerance
    assert relative(A @ (2 * u - v), 2 * (A @ u) - first) < tolerance
    for x in (v, V):
        tree = A.unravel(x)
        product = A @ tree
        assert_close(A.ravel(tree), x)
        assert relative(A.ravel(product), dense @ x) < tolerance
        assert [t.shape for t in leaves(product)] == [t.shape for t in leaves(tree)]
        assert list(product) == list(tree)
    assert (A @ V[:, :0]).shape == (size, 0)
    first.mul_(3)  # it is the caller's, as the vector is
    v.mul_(-2)
    assert relative(A @ v, dense @ v) < tolerance
    assert torch.equal(v, -2 * given)
    assert not (A @ v.requires_grad_()).requires_grad


def leaves(tree: Any) -> list[Tensor]:
    found: list[Tensor] = torch.utils._pytree.tree_leaves(tree)
    return found


def check_product(
    product: Callable[..., tuple[Tensor, Tree]],
    loss: Any,
    params: Tree,
    batch: tuple[Tensor, Any],
    dense: Tensor,
    variants: Iterable[Mapping[str, Any]] = ({},),
    graphs: bool = True,
    tolerance: float = 1e-7,
) -> None:
    """product(loss, params, v, batch, **options) is the loss, and a symmetric matrix of it times v or a
    block, wherever it is called, also by `vmap`; with create_graph=True it is differentiable by all that it
    is given. Variants take turns in where they are called.

    Args:
        product: `hvp`, or one that is called like it.
        loss: Of `functional_loss`; nothing of its model is changed.
        params: In float64.
        batch: Inputs in float64, and targets.
        dense: The matrix [P, P] by other means.
        variants: Options with which the matrix is the same, such as modes.
        graphs: Whether the model can be differentiated a third time, and by `vmap`.
        tolerance: Of the norm of a product.
    """
    v, V = like(params, seed=7), like(params, 3, seed=8)
    by_rows = {name: x.movedim(-1, 0) for name, x in V.items()}
    for number, options in enumerate(variants):
        for context in EVERYWHERE if number == 0 else EVERYWHERE[number % 3 :][:1]:
            with unchanged(loss.model), context():
                value, found = product(loss, params, v, tuple(map(torch.clone, batch)), **options)
            assert_close(value, loss(params, batch).detach())
            assert list(found) == list(params)
            assert relative(flat(found), dense @ flat(v)) < tolerance, options
            assert not any(x.requires_grad for x in (value, *found.values()))
        _, block = product(loss, params, V, batch, **options)
        rows, mode = block, options.get("mode", "auto")
        if graphs and mode == "auto":  # some others are refused there
            of_row = lambda v, o=options: product(loss, params, v, batch, **o)[1]  # noqa: E731
            rows = torch.func.vmap(of_row, out_dims=-1)(by_rows)
        if graphs and mode != "finite-differences":
            for given in (v, V) if "mode" in options else (V,):
                check_graph(product, loss, params, batch, dense, given, **options)
        for j in range(3):
            expected = dense @ flat({name: x[..., j] for name, x in V.items()})
            for x in (block, rows):
                assert relative(flat({n: t[..., j] for n, t in x.items()}), expected) < tolerance


def check_graph(
    product: Callable[..., tuple[Tensor, Tree]],
    loss: Any,
    params: Tree,
    batch: tuple[Tensor, Any],
    dense: Tensor,
    v: Tree,
    **options: Any,
) -> None:
    """f(p, v, x) = u . M(p, x) v: its derivative by v is M u, and those by p and x are as of differences."""
    v = {n: t.clone().requires_grad_() for n, t in v.items()}
    u = {n: draw(*t.shape, seed=9 + i) for i, (n, t) in enumerate(v.items())}
    first = like(params, seed=10)
    x = batch[0].clone().requires_grad_()
    p = {n: t.detach().clone().requires_grad_() for n, t in params.items()}

    def inner(p: Tree, x: Tensor, **more: Any) -> Tensor:
        found = product(loss, p, v, (x, batch[1]), **options, **more)[1]
        return torch.stack([(found[n] * u[n]).sum() for n in found]).sum()

    value = inner(p, x, create_graph=True)
    inputs = [*v.values(), *p.values(), x]
    grads = torch.autograd.grad(value, inputs, materialize_grads=True, allow_unused=True)
    by_v, by_p, by_x = grads[: len(v)], grads[len(v) : -1], grads[-1]
    expected = dense @ torch.cat([u[n].reshape(t.numel(), -1) for n, t in params.items()])
    found = torch.cat([g.reshape(t.numel(), -1) for g, t in zip(by_v, p.values(), strict=True)])
    assert relative(found, expected) < 1e-7
    by_u = sum((g * first[n]).sum() for g, n in zip(by_p, p, strict=True))
    at_p = lambda t: inner({n: q.detach() + t * first[n] for n, q in p.items()}, batch[0])  # noqa: E731
    assert_close(by_u, slope(at_p), rtol=1e-6, atol=1e-8)
    along = draw(*x.shape, seed=11)
    by_along = (by_x * along).sum()
    found = slope(lambda t: inner(params, batch[0] + t * along))
    assert_close(by_along, found, rtol=1e-6, atol=1e-8)


def slope(f: Callable[[float], Tensor], h: float = 1e-4) -> Tensor:
    """df/dt at 0, by central differences of the fourth order."""
    near, far = (f(k * h) - f(-k * h) for k in (1, 2))
    return (8 * near - far) / (12 * h)


def like(params: Tree, *columns: int, seed: int = 0) -> Tree:
    """Vectors, or blocks of vectors, of the shapes of parameters."""
    return {n: draw(*p.shape, *columns, seed=seed + i) for i, (n, p) in enumerate(params.items())}
