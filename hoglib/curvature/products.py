"""Products of curvature matrices with vectors: Hessian, generalised Gauss-Newton, Fisher."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hoglib._core import pytree, torch_internals, validation
from hoglib._core.autograd import clone_inference_tensors, grad_enabled
from hoglib._core.finite_differences import to_double
from hoglib._core.swap import keep_swapped
from hoglib.capture.capturing import runs_elsewhere
from hoglib.curvature.compiled import backend_of, linearised
from hoglib.curvature.kinds import (
    DIFFERENCES,
    CurvatureKind,
    FisherKind,
    GaussNewtonKind,
    HessianKind,
)
from hoglib.curvature.routes import Call, apply_block
from hoglib.errors import ArgumentValueError, UnsupportedError
from hoglib.stand_ins.mode import stand_ins_if

Tree = Any
Loss = Callable[..., Tensor]


def hvp(
    func: Loss,
    params: Tree,
    v: Tree,
    *args: Any,
    mode: str = "auto",
    create_graph: bool = False,
    strict: bool = False,
    stand_ins: bool = True,
    compile: bool | str = False,
) -> tuple[Tensor, Tree]:
    r"""The value of a scalar function and the product of its Hessian with a vector.

        f = func(params, *args)        H v = d/de grad f(params + e v) at e = 0

    Shapes: v has the structure, shapes and dtypes of params, any pytree of floating-point tensors;
    the product has them too. A block of k vectors has a trailing dimension of k in every leaf, and so
    has its product; the gradient and its graph are made once for all of them. Returns (f, H v), as
    `torch.autograd.functional.hvp`.

    mode: "reverse-over-reverse" differentiates the gradient's graph once more;
    "forward-over-reverse" is `torch.func.jvp` of `torch.func.grad`, which needs forward-mode rules for
    every operation; "auto" is the first, or the second inside torch.func transforms, where vmap of
    the first is wrong through normalisation layers. "finite-differences", to compare with, are
    differences of the gradient in float64, ten gradients a vector, right to about 1e-9; they want a
    func that runs in float64.
    create_graph: whether value and product can be differentiated again, by params, v or args. Inside
    torch.func transforms they always can.
    strict: raise where a parameter has no second derivative, instead of giving zero
    (reverse-over-reverse only). stand_ins: run func inside `hoglib.second_order()`, where torch calls
    that have no second derivative, or a wrong one, go to functions that have a right one.

    The inputs are not changed, and it works under no_grad and inference_mode.
    Raises TypeError and ValueError for params, v or a value of the wrong kind, naming the leaf;
    RuntimeError when the value does not depend on params, or was computed by a custom Function that is
    `@once_differentiable`; NotImplementedError where torch has no derivative. Warns of a Function that
    keeps what its forward made.
    Source: Pearlmutter, Fast Exact Multiplication by the Hessian, 1994.
    """
    names = pytree.paths(params) if strict else None
    matrix = HessianKind(mode)
    return _product("hvp", matrix, func, params, v, args, create_graph, stand_ins, compile, names)


def ggn_vp(
    loss: Any,
    params: Tree,
    v: Tree,
    batch: Any,
    *,
    mode: str = "auto",
    create_graph: bool = False,
    stand_ins: bool = True,
    compile: bool | str = False,
) -> tuple[Tensor, Tree]:
    r"""The value of a loss and the product of its generalised Gauss-Newton matrix with a vector.

        f = criterion(outputs(params))        G v = J^T H J v

    with J the Jacobian of the outputs by params and H the Hessian of the criterion by the outputs.
    loss: from `functional_loss`, or anything with `.outputs(params, batch)` and
    `.criterion(outputs, batch)`. G is positive semi-definite where the criterion is convex in the
    outputs, and it is the Hessian without the part that the outputs' own curvature adds.

    Shapes, blocks of vectors, create_graph, stand_ins and compile as in `hvp`. Returns (f, G v).
    mode: how J v is computed. "forward" runs the model once with tangents, and needs forward-mode
    rules for every operation; "reverse" differentiates J^T u by u, needs none, and keeps its graph
    over a block of vectors; "auto" is "forward" for one vector, and "reverse" for a block or where an
    operation has no forward mode. "finite-differences" is to compare with, as in `hvp`.
    Raises as `hvp`, and TypeError for a loss without those two halves.
    Source: Schraudolph, Fast Curvature Matrix-Vector Products, 2002.
    """
    return _product(
        "ggn_vp", GaussNewtonKind(mode), loss, params, v, (batch,), create_graph, stand_ins, compile
    )


def fisher_vp(
    loss: Any,
    params: Tree,
    v: Tree,
    batch: Any,
    *,
    kind: str = "exact",
    likelihood: Any = None,
    reduction: str = "mean",
    num_samples: int = 1,
    generator: torch.Generator | None = None,
    mode: str = "auto",
    stand_ins: bool = True,
    compile: bool | str = False,
) -> tuple[Tensor, Tree]:
    r"""The value of a loss and the product of its Fisher information matrix with a vector.

        exact      F = 1/N sum_n J_n^T Cov(d log p / d outputs) J_n
        mc         F = 1/N sum_n g_n g_n^T,  g_n = d -log p(y_n | outputs_n) / d params,
                   averaged over num_samples draws of y_n ~ p(. | outputs_n) by generator
        empirical  F = 1/N sum_n g_n g_n^T,  g_n = d loss_n / d params at the batch's own targets

    loss: as in `ggn_vp`. likelihood: the distribution that the outputs stand for, as a function
    outputs -> `torch.distributions.Distribution`, or "categorical", "bernoulli", "gaussian",
    "poisson"; None takes the one that belongs to a criterion that torch names (cross entropy, mean
    square, ...). reduction: whether the loss is the "mean" of its terms or their "sum" (then without
    1/N). An example, for mc and empirical, is an entry of the leading dimension of the outputs.

    Shapes, blocks of vectors, mode, stand_ins and compile (not with kind="mc", which draws) as in
    `ggn_vp`. Returns (f, F v), f the loss.
    Raises as `ggn_vp`, and ValueError where no likelihood is given and none can be told.
    Source: Martens, New Insights and Perspectives on the Natural Gradient Method, 2020, sections 5, 11.
    """
    matrix = FisherKind(mode, kind, likelihood, reduction, num_samples, generator)
    return _product("fisher_vp", matrix, loss, params, v, (batch,), False, stand_ins, compile)


def _product(
    what: str,
    matrix: CurvatureKind,
    func: Any,
    params: Tree,
    v: Tree,
    args: tuple[Any, ...],
    create_graph: bool,
    stand_ins: bool,
    compile: bool | str,
    strict: list[str] | None = None,
) -> tuple[Tensor, Tree]:
    """The product of a matrix with v, or with each vector of a block, wherever the caller stands."""
    matrix.check(func)
    validation.parameters(params)
    vector, block = validation.vectors("v", v, params)
    leaves, structure = pytree.flatten(params)
    like = leaves
    if matrix.mode == DIFFERENCES:
        _without_graph(what, create_graph)
        func, leaves, vector, args = matrix.in_double(func), *to_double((leaves, vector, args))
    call = Call(what, create_graph or torch_internals.transforms_active(), strict)
    backend = backend_of(what, compile, matrix)
    if backend and not runs_elsewhere():
        with torch.inference_mode(False):
            leaves, vector, args = clone_inference_tensors((leaves, vector, args))
            point = linearised(
                func, matrix, call, stand_ins, backend, leaves, structure, args, block
            )
            with torch.set_grad_enabled(create_graph):
                value, product = apply_block(point, vector, block)
        return value, pytree.unflatten(product, structure)
    with grad_enabled(), keep_swapped(), stand_ins_if(stand_ins):
        leaves, vector, args = clone_inference_tensors((leaves, vector, args))
        params_of = partial(pytree.unflatten, structure=structure)
        point = matrix.at(func, params_of, args, leaves, call, block)
        value, product = apply_block(point, vector, block)
    if not call.create_graph:
        value, product = value.detach().clone(), [part.detach() for part in product]
    if matrix.mode == DIFFERENCES:
        value = value.to(like[0].dtype)
        product = [part.to(leaf.dtype) for part, leaf in zip(product, like, strict=True)]
    return value, pytree.unflatten(product, structure)


def _without_graph(what: str, create_graph: bool) -> None:
    """Differences have no graph, and no place inside of transforms."""
    if create_graph:
        raise ArgumentValueError(
            f"{what}(mode='finite-differences'): expected create_graph=False, got True; differences "
            "have no graph. Use another mode."
        )
    if torch_internals.transforms_active():
        raise UnsupportedError(
            f"{what}(mode='finite-differences'): expected to run outside of torch.func transforms, got "
            "a call inside; use mode='auto' there."
        )
