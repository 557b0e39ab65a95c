"""Penalties on the Jacobian of a function by its inputs."""

from collections.abc import Callable, Sequence
from typing import Any, Unpack

import torch
from torch import Tensor

from hoglib._core import pytree, validation
from hoglib._core.autograd import Vector
from hoglib._core.norms import root
from hoglib._core.torch_internals import uncompiled
from hoglib.errors import ArgumentValueError
from hoglib.penalties.critics import _half_square
from hoglib.penalties.input_vjp import InputVJP
from hoglib.penalties.options import Options
from hoglib.penalties.samples import inputs
from hoglib.penalties.terms import penalty

Func = Callable[..., Any]


def input_gradient(loss: Func, x: Any, *args: Any, **options: Unpack[Options]) -> Any:
    r"""Double backpropagation: the squared gradient of each sample's loss by its inputs, halved.

        1/N sum_n |grad_x L(x_n)|^2 / 2

    loss(x, *args) returns one loss a sample, [N]: a criterion with reduction="none", for instance
    `lambda x, y: F.cross_entropy(model(x), y, reduction="none")`. Shapes, options, errors and warnings
    as for `wgan_gp`; with return_outputs=True the losses come too.
    Source: Drucker and LeCun, Improving Generalization Performance Using Double Backpropagation, 1992.
    """
    return penalty("input_gradient", loss, x, args, _half_square, options)


def jacobian(
    func: Func,
    x: Any,
    *args: Any,
    num_projections: int | None = 1,
    generator: torch.Generator | None = None,
    **options: Unpack[Options],
) -> Any:
    r"""The squared Frobenius norm of the Jacobian of the outputs by the inputs, halved.

        1/N sum_n |J_n|_F^2 / 2                            exactly, num_projections=None: C passes
        1/N sum_n C/P sum_p |v_p^T J_n|^2 / 2              without bias, P = num_projections passes

    J_n = d func(x_n) / d x_n, C outputs a sample; v_p are orthonormal random directions of the outputs,
    drawn by generator for each sample. From P = C on it is exact.

    Shapes: x as real of `wgan_gp`; func(x, *args) returns [N, ...]. Options, errors and warnings as
    for `wgan_gp`; with return_outputs=True the outputs come too.
    Source: Hoffman, Roberts and Yaida, Robust Learning with Jacobian Regularization, 2019, eq. 9, 12.
    """
    _projections(num_projections)
    validation.generator(generator)

    def rule(point: InputVJP) -> Tensor:
        y = point.rows()
        directions, factor = _directions(point, num_projections, generator)
        total = y.new_zeros(len(y))
        for k, u in enumerate(directions):
            grads = point.pull(u.view_as(point.y), keep=k + 1 < len(directions))
            total = total + point.squares(grads)
        return total * (factor / 2)

    return penalty("jacobian", func, x, args, rule, options, generator)


def sobolev(
    func: Func,
    x: Any,
    derivatives: Any,
    *args: Any,
    num_projections: int | None = None,
    generator: torch.Generator | None = None,
    **options: Unpack[Options],
) -> Any:
    r"""Sobolev training: the squared distance of the derivatives by the inputs from given ones.

        1/N sum_n |J_n - D_n|_F^2                          J_n = d func(x_n) / d x_n

    derivatives is D: like x where func returns one number a sample; else for each x [N, ...] a tensor
    [N, *outputs, ...], the layout of `torch.func.jacrev` of one sample. With num_projections, as in
    `jacobian`, C/P sum_p |v_p^T (J_n - D_n)|^2 in the place of the norm.

    Shapes, options, errors and warnings as for `jacobian`.
    Source: Czarnecki et al., Sobolev Training for Neural Networks, 2017, eq. 1, 4.
    """
    _projections(num_projections)
    validation.generator(generator)
    inputs("sobolev", "derivatives", derivatives)
    if pytree.flatten(derivatives)[1] != pytree.flatten(x)[1]:
        raise ArgumentValueError(
            f"sobolev: expected derivatives with the structure of x ({len(pytree.leaves(x))} tensors), "
            f"got another one ({len(pytree.leaves(derivatives))})."
        )

    func = uncompiled(func)

    # the derivatives go along with the other arguments, and so into the same pieces as x
    def without(x: Any, derivatives: Any, *rest: Any) -> Any:
        return func(x, *rest)

    without.__wrapped__ = func  # type: ignore[attr-defined]

    def rule(point: InputVJP) -> Tensor:
        y = point.rows()
        wanted = pytree.leaves(point.args[0])
        _like_jacobians(point, wanted)
        assert point.samples is not None
        indices = point.samples.index
        directions, factor = _directions(point, num_projections, generator)
        total = y.new_zeros(len(y))
        for k, u in enumerate(directions):
            grads = point.pull(u.view_as(point.y), keep=k + 1 < len(directions))
            apart = [
                g - _directed(d, u if index is None else u[index], g)
                for g, d, index in zip(grads, wanted, indices, strict=True)
            ]
            total = total + point.squares(apart)
        return total * factor

    return penalty("sobolev", without, x, (derivatives, *args), rule, options, generator)


def lipschitz(
    func: Func,
    x: Any,
    *args: Any,
    bound: float = 1.0,
    num_iterations: int | None = 10,
    generator: torch.Generator | None = None,
    **options: Unpack[Options],
) -> Any:
    r"""One-sided penalty on the spectral norm of the Jacobian: stretching by more than a bound.

        1/N sum_n max(0, s_n - K)^2        s_n = |J_n|_2,  J_n = d func(x_n) / d x_n

    K is bound. With one output a sample s_n is the norm of the gradient. Otherwise it is found by
    num_iterations steps of power iteration on J^T J, two passes each, started at random by generator:
    from below, and the closer the further the second singular value lies; or exactly, with
    num_iterations=None, from all C rows of J.

    Shapes, options, errors and warnings as for `jacobian`.
    Source: Yoshida and Miyato, Spectral Norm Regularization, 2017, section 3; one-sided: Petzka,
    Fischer and Lukovnikov, On the Regularization of Wasserstein GANs, 2018, eq. 8.
    """
    k = validation.number("bound", bound, minimum=0.0)
    if num_iterations is not None:
        validation.at_least("num_iterations", num_iterations, 1)
    validation.generator(generator)

    def rule(point: InputVJP) -> Tensor:
        y = point.rows()
        if y.shape[1] == 1:
            norms = root(point.squares(point.gradient()))
        elif num_iterations is None:
            norms = _spectral_norms(point)
        else:
            u = _leading(point, num_iterations, generator)
            norms = root(point.squares(point.pull(u.view_as(point.y))))
        return (norms - k).relu().square()

    return penalty("lipschitz", func, x, args, rule, options, generator)


def _projections(count: int | None) -> None:
    if count is not None:
        validation.at_least("num_projections", count, 1)


def _like_jacobians(point: InputVJP, wanted: Vector) -> None:
    """Derivatives have the shape of x for one output a sample, else the outputs' shape in each row."""
    y = point.y
    single = y.numel() == len(y)
    for name, leaf, d in zip(pytree.paths(point.at(point.own)), point.own, wanted, strict=True):
        shapes = [torch.Size((len(leaf), *y.shape[1:], *leaf.shape[1:]))] + [leaf.shape] * single
        if d.shape not in shapes:
            raise ArgumentValueError(
                f"sobolev: derivatives{f'[{name!r}]' if name else ''}: expected shape "
                f"{tuple(shapes[-1])}, got {tuple(d.shape)}."
            )


def _directed(derivative: Tensor, u: Tensor, like: Tensor) -> Tensor:
    """u^T D for each row of a leaf: [rows, C] and [rows, C, ...], like its gradient."""
    size = like.shape[1:].numel()
    d = derivative.reshape(*u.shape, size).to(like)
    return torch.einsum("nc,ncd->nd", u.to(like), d).view_as(like)


def _directions(
    point: InputVJP, count: int | None, generator: torch.Generator | None
) -> tuple[Sequence[Tensor], float]:
    """Directions of the outputs [N, C], each of length one, and the weight of a square: C / P."""
    y = point.rows()
    outputs = y.shape[1]
    if count is None or count >= outputs:
        return [e.expand_as(y) for e in torch.eye(outputs, dtype=y.dtype, device=y.device)], 1.0
    v = point.drawn(torch.randn, (len(y), outputs, count), generator)
    basis = torch.linalg.qr(v)[0] if count > 1 else torch.nn.functional.normalize(v, dim=1)
    return basis.to(y).unbind(2), outputs / count


def _spectral_norms(point: InputVJP) -> Tensor:
    """The largest singular value of each sample's Jacobian, from all of its rows."""
    rows: list[Vector] = [
        point.pull(e.expand_as(point.rows()).view_as(point.y), keep=True)
        for e in torch.eye(point.rows().shape[1]).to(point.y)
    ]
    samples = point.samples
    assert samples is not None
    if samples.graphs:
        gram = [
            [samples.sums([a * b for a, b in zip(p, q, strict=True)]) for q in rows] for p in rows
        ]
        grams = torch.stack([torch.stack(row, -1) for row in gram], -2)
        return root(_of_finite(lambda a: torch.linalg.eigvalsh(a)[:, -1], grams).clamp(min=0))
    whole = [torch.cat([g.reshape(len(g), -1) for g in row], 1) for row in rows]
    return _of_finite(torch.linalg.matrix_norm, torch.stack(whole, 1), 2)


def _of_finite(norm: Callable[..., Tensor], matrices: Tensor, *args: Any) -> Tensor:
    """The norms of matrices, not finite, and with such a gradient, where one is not. LAPACK raises of
    it, but an overflow in half precision must reach the gradient scaler."""
    finite = matrices.detach().isfinite().flatten(1).all(1)
    norms = norm(torch.where(finite[:, None, None], matrices, 0), *args)
    return torch.where(finite, norms, matrices.abs().sum((1, 2)))


def _leading(point: InputVJP, steps: int, generator: torch.Generator | None) -> Tensor:
    """The leading left singular vector of each sample's Jacobian, [N, C], by power iteration."""
    y = point.rows()
    u = point.drawn(torch.randn, tuple(y.shape), generator).to(y)
    u = torch.nn.functional.normalize(u, dim=1)
    for _ in range(steps):
        right = point.pull(u.view_as(point.y), keep=True, graph=False)
        u = torch.nn.functional.normalize(point.push(right).reshape(y.shape), dim=1)
    return u
