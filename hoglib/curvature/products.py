"""Products of curvature matrices with vectors: Hessian, generalised Gauss-Newton, Fisher."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hoglib._core import pytree, torch_internals, validation
from hoglib._core.autograd import Vector, clone_inference_tensors, grad_enabled
from hoglib._core.blocks import rematerialized
from hoglib._core.finite_differences import to_double
from hoglib._core.process_failures import translate_distributed_errors
from hoglib._core.sharding import Sharding
from hoglib._core.swap import keep_swapped
from hoglib.capture.capturing import runs_elsewhere
from hoglib.curvature.compiled import compiled_linear_map
from hoglib.curvature.fisher_metric import FisherMetric
from hoglib.curvature.gauss_newton import GaussNewtonKind
from hoglib.curvature.linear_map import (
    DIFFERENCES,
    BoundLoss,
    CurvatureKind,
    HessianKind,
    ProductOptions,
    apply_block,
    checked_options,
    double_loss,
    refuse_wrapped_calls,
)
from hoglib.errors import ArgumentValueError, UnsupportedError
from hoglib.stand_ins.mode import stand_ins_if
from hoglib.verification.entry_points import examined_functions

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
    remat: bool | str | Sequence[str] = False,
    compile: bool | str = False,
) -> tuple[Tensor, Tree]:
    r"""The value of a scalar function and the product of its Hessian with a vector.

        f = func(params, *args)        H v = d/de grad f(params + e v) at e = 0

    The inputs are not changed, and it works under no_grad and inference_mode. It warns of a custom
    Function whose forward makes tensors that its backward uses as constants.

    Args:
        func: The function ``func(params, *args)`` that returns a scalar, for instance from
            `hoglib.functional_loss`.
        params: Where the Hessian is taken; any pytree of floating-point tensors.
        v: The vector, with the structure, shapes and dtypes of params. A block of k vectors has a
            trailing dimension of k in every leaf; the gradient and its graph are computed once for all.
        *args: Further arguments of func, such as a batch.
        mode: "reverse-over-reverse" differentiates the gradient's graph once more.
            "forward-over-reverse" is `torch.func.jvp` of `torch.func.grad`, which needs a forward-mode
            rule for every operation. "auto" is the first, or the second inside torch.func transforms,
            where vmap of the first is wrong through normalisation layers. "finite-differences", for
            comparison, takes differences of the gradient in float64: ten gradients a vector, accurate
            to about 1e-9; func has to run in float64.
        create_graph: Whether value and product can be differentiated again, by params, v or args.
            Inside torch.func transforms they always can.
        strict: Raise where a parameter has no second derivative, instead of returning zero
            (reverse-over-reverse only).
        stand_ins: Run func inside `hoglib.second_order()`, where torch calls that have no second
            derivative, or a wrong one, are replaced by functions that have a right one.
        remat: Blocks of the model whose intermediate values are recomputed in backward instead of kept,
            by `hoglib.ops.remat`: True for the blocks that it repeats, or their names or globs, as
            "layers.*". Less memory, more time, the same result.
        compile: Capture the product as a graph and compile it: True for inductor, "eager" to run the
            captured graph by torch. Later calls with the same signature reuse it. With remat, each
            block's passes are compiled, once for all blocks that are equal.
    Returns:
        The pair (f, H v), in the order of `torch.autograd.functional.hvp`; H v has the structure of v.
    Raises:
        ArgumentTypeError, ArgumentValueError: for params, v or a value of the wrong kind, naming the
            leaf.
        NoSecondDerivative: when the value does not depend on params, or was computed by a custom
            Function that is `@once_differentiable`.
        UnsupportedError: where torch has no derivative of an operation.
    References:
        Pearlmutter, Fast Exact Multiplication by the Hessian, 1994.
    Example:
        >>> p, v = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 0.0])
        >>> hog.hvp(lambda p: p[0] ** 2 * p[1], p, v)
        (tensor(2.), tensor([4., 2.]))
    """
    kind = HessianKind(mode)
    names = tuple(pytree.paths(params)) if strict else None
    options = checked_options("hvp", kind, create_graph, stand_ins, compile, remat, names)
    return _product(kind, func, params, v, args, options)


def ggn_vp(
    loss: Any,
    params: Tree,
    v: Tree,
    batch: Any,
    *,
    mode: str = "auto",
    create_graph: bool = False,
    stand_ins: bool = True,
    remat: bool | str | Sequence[str] = False,
    compile: bool | str = False,
) -> tuple[Tensor, Tree]:
    r"""The value of a loss and the product of its generalised Gauss-Newton matrix with a vector.

        f = criterion(outputs(params))        G v = J^T H J v

    with J the Jacobian of the outputs by params and H the Hessian of the criterion by the outputs. G is
    positive semi-definite where the criterion is convex in the outputs. It is the Hessian without the
    term of the outputs' own second derivatives.

    Args:
        loss: From `hoglib.functional_loss`, or any object with ``outputs(params, batch)`` and
            ``criterion(outputs, batch)``.
        params: Where the matrix is taken; any pytree of floating-point tensors.
        v: The vector, with the structure, shapes and dtypes of params; a block of k vectors has a
            trailing dimension of k in every leaf.
        batch: What ``loss.outputs`` and ``loss.criterion`` take.
        mode: How J v is computed. "forward" runs the model once with tangents, and needs a
            forward-mode rule for every operation. "reverse" differentiates J^T u by u, needs none, and
            keeps its graph over a block of vectors. "auto" is "forward" for one vector, and "reverse"
            for a block or where an operation has no forward mode. "finite-differences" is for
            comparison, in float64.
        create_graph: Whether value and product can be differentiated again. Inside torch.func
            transforms they always can.
        stand_ins: Run the loss inside `hoglib.second_order()`, which replaces torch calls that have no
            second derivative, or a wrong one.
        remat: Blocks of the model whose intermediate values are recomputed in backward instead of kept,
            by `hoglib.ops.remat`: True for the blocks that it repeats, or their names or globs, as
            "layers.*". Less memory, more time, the same result.
        compile: Capture the product as a graph and compile it: True for inductor, "eager" to run the
            captured graph by torch. Later calls with the same signature reuse it. With remat, each
            block's passes are compiled, once for all blocks that are equal.
    Returns:
        The pair (f, G v); G v has the structure of v.
    Raises:
        ArgumentTypeError: for a loss without ``outputs`` and ``criterion``, and for params, v or a
            value of the wrong kind.
        NoSecondDerivative: where the outputs do not depend on params, or lose their graph.
        UnsupportedError: where torch has no derivative of an operation.
    References:
        Schraudolph, Fast Curvature Matrix-Vector Products for Second-Order Gradient Descent, 2002.
    Example:
        >>> model = nn.Linear(1, 1, bias=False)
        >>> loss, params = hog.functional_loss(model, F.mse_loss), hog.trainable_params(model)
        >>> batch = torch.tensor([[1.0], [3.0]]), torch.zeros(2, 1)
        >>> value, Gv = hog.ggn_vp(loss, params, {"weight": torch.ones(1, 1)}, batch)
        >>> Gv["weight"]  # 2 (1 + 9) / 2
        tensor([[10.]])
    """
    kind = GaussNewtonKind(mode)
    options = checked_options("ggn_vp", kind, create_graph, stand_ins, compile, remat)
    return _product(kind, loss, params, v, (batch,), options)


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
    remat: bool | str | Sequence[str] = False,
    compile: bool | str = False,
) -> tuple[Tensor, Tree]:
    r"""The value of a loss and the product of its Fisher information matrix with a vector.

        exact      F = 1/N sum_n J_n^T Cov(d log p / d outputs) J_n
        mc         F = 1/N sum_n g_n g_n^T,  g_n = d -log p(y_n | outputs_n) / d params,
                   averaged over num_samples draws of y_n ~ p(. | outputs_n)
        empirical  F = 1/N sum_n g_n g_n^T,  g_n = d loss_n / d params at the batch's own targets

    An example n, for mc and empirical, is an entry of the leading dimension of the outputs.

    Args:
        loss: From `hoglib.functional_loss`, or any object with ``outputs(params, batch)`` and
            ``criterion(outputs, batch)``.
        params: Where the matrix is taken; any pytree of floating-point tensors.
        v: The vector, with the structure, shapes and dtypes of params; a block of k vectors has a
            trailing dimension of k in every leaf.
        batch: What ``loss.outputs`` and ``loss.criterion`` take.
        kind: "exact", "mc" or "empirical", as above.
        likelihood: The distribution p that the outputs parametrise: a function from outputs to a
            `torch.distributions.Distribution`, or "categorical" (logits), "bernoulli" (logits),
            "gaussian" (unit variance) or "poisson" (log rates). None takes the one that belongs to the
            criterion, where that is one of torch's (cross entropy, mean square, ...).
        reduction: Whether the loss is the "mean" of its terms or their "sum" (then without 1/N).
        num_samples: Draws for each example, of kind "mc".
        generator: Of these draws; None is torch's global generator.
        mode: How J v is computed: "auto", "forward", "reverse" or "finite-differences", which
            `hoglib.ggn_vp` describes.
        stand_ins: Run the loss inside `hoglib.second_order()`, which replaces torch calls that have no
            second derivative, or a wrong one.
        remat: Blocks of the model whose intermediate values are recomputed in backward instead of kept,
            by `hoglib.ops.remat`: True for the blocks that it repeats, or their names or globs, as
            "layers.*". Less memory, more time, the same result.
        compile: Capture the product as a graph and compile it: True for inductor, "eager" to run the
            captured graph by torch. With remat, each block's passes are compiled, once for all blocks
            that are equal. Not with kind="mc", which draws random numbers.
    Returns:
        The pair (f, F v), f the loss; F v has the structure of v.
    Raises:
        ArgumentTypeError: for a loss without ``outputs`` and ``criterion``.
        ArgumentValueError: where no likelihood is given and the criterion does not determine one.
        NonFiniteError: for outputs that are not finite.
        UnsupportedError: for "exact" where torch has no KL divergence of the distribution, or one whose
            second derivative is not the Fisher matrix.
    References:
        Martens, New Insights and Perspectives on the Natural Gradient Method, 2020, sections 5 and 11.
    Example:
        >>> model = nn.Linear(1, 1, bias=False)
        >>> loss, params = hog.functional_loss(model, F.mse_loss), hog.trainable_params(model)
        >>> batch = torch.tensor([[1.0], [3.0]]), torch.zeros(2, 1)
        >>> value, Fv = hog.fisher_vp(loss, params, {"weight": torch.ones(1, 1)}, batch)
        >>> Fv["weight"]  # the Gauss-Newton matrix: a Gaussian of variance 1/2
        tensor([[10.]])
    """
    metric = FisherMetric(kind, likelihood, reduction, num_samples, generator)
    matrix = GaussNewtonKind(mode, metric)
    options = checked_options("fisher_vp", matrix, False, stand_ins, compile, remat)
    return _product(matrix, loss, params, v, (batch,), options)


def _product(
    kind: CurvatureKind,
    func: Any,
    params: Tree,
    v: Tree,
    args: tuple[Any, ...],
    options: ProductOptions,
) -> tuple[Tensor, Tree]:
    """The value, and the product of a matrix with v or with each vector of a block."""
    kind.check_loss(func)
    validation.not_the_model("func", func, params)
    leaves, structure = validation.parameters(params)
    vector, block = validation.vectors("v", v, params, flat=(leaves, structure))
    loss = BoundLoss(func, structure, args, Sharding.of(leaves, lambda: pytree.paths(params)))
    if loss.sharding is None:
        value, product = _computed(kind, loss, leaves, vector, block, options)
    else:
        value, product = _sharded(kind, loss, params, vector, block, options)
    return value, pytree.unflatten(product, structure)


def _computed(
    kind: CurvatureKind,
    loss: BoundLoss,
    leaves: Vector,
    vector: Vector,
    block: bool,
    options: ProductOptions,
) -> tuple[Tensor, Vector]:
    """The value and the product by finite differences, by a compiled graph, or in eager mode."""
    if kind.mode == DIFFERENCES:
        caller = f"{options.caller}(mode='finite-differences')"
        if options.create_graph:
            raise ArgumentValueError(
                f"{caller}: expected create_graph=False, got True; differences have no graph. Use "
                "another mode."
            )
        validation.refuse_transforms(caller, "use mode='auto' there.")
        double = replace(loss, func=double_loss(loss.func), args=to_double(loss.args))
        at, along = to_double(leaves), to_double(vector)
        value, product = _applied(kind, double, at, along, block, options)
        parts = [part.to(leaf.dtype) for part, leaf in zip(product, leaves, strict=True)]
        return value.to(leaves[0].dtype), parts
    if options.one_graph and not runs_elsewhere():
        with torch.inference_mode(False):
            leaves, vector, args = clone_inference_tensors((leaves, vector, loss.args))
            point = compiled_linear_map(kind, replace(loss, args=args), leaves, options, block)
            with torch.set_grad_enabled(options.create_graph):
                return apply_block(point, vector, block)
    with examined_functions(options.caller):
        return _applied(kind, loss, leaves, vector, block, options)


def _sharded(
    kind: CurvatureKind,
    loss: BoundLoss,
    params: Tree,
    vector: Vector,
    block: bool,
    options: ProductOptions,
) -> tuple[Tensor, Vector]:
    """The value and the product where DTensors are among the parameters: means over the processes."""
    sharding = loss.sharding
    assert sharding is not None
    with translate_distributed_errors(options.caller):
        _refuse_sharded(loss.func, options)
        shards = sharding.local_vector("v", vector, sharding.names)
        leaves = sharding.local(pytree.leaves(params))
        columns = vector[0].shape[-1] if block else 1
        sharding.check_agreement(options.caller, columns, shards, leaves)
        value, product = _computed(kind, loss, leaves, shards, block, options)
        return value, sharding.wrap(product)


def _applied(
    kind: CurvatureKind,
    loss: BoundLoss,
    leaves: Vector,
    vector: Vector,
    block: bool,
    options: ProductOptions,
) -> tuple[Tensor, Vector]:
    """The value and the product in eager mode, also under no_grad and in inference mode."""
    if torch_internals.transforms_active() and not options.create_graph:
        options = options._replace(create_graph=True)
    with grad_enabled(), keep_swapped():
        if any(t.is_inference() for t in (*leaves, *vector)):
            leaves, vector = clone_inference_tensors((leaves, vector))
        args = clone_inference_tensors(loss.args)
        if args is not loss.args:
            loss = replace(loss, args=args)
        with (
            stand_ins_if(options.stand_ins),
            rematerialized(options.remat, loss.func, options.backend) as blocks,
        ):
            if loss.sharding is not None:
                model = getattr(loss.func, "model", None)
                loss = replace(loss, sharding=loss.sharding.defer(model, blocks))
            # compiled blocks have backward passes only, as the products with several vectors
            several = block or bool(options.backend)
            linear_map = kind.linearize(loss, leaves, options, several)
            value, product = apply_block(linear_map, vector, block)
    if options.create_graph:
        return value, product
    return value.detach().clone(), [part.detach() for part in product]


def _refuse_sharded(func: Any, options: ProductOptions) -> None:
    """Raise for options and functions that DTensors among the parameters do not go with."""
    for name, given in (("create_graph", options.create_graph), ("compile", options.backend)):
        if given:
            raise UnsupportedError(
                f"{options.caller}({name}={given!r}): expected parameters that this process holds "
                f"whole, got DTensors, whose products have no graph and are not captured; leave {name} "
                "out."
            )
    if torch_internals.transforms_active():
        raise UnsupportedError(
            f"{options.caller}: expected parameters that this process holds whole inside torch.func "
            "transforms, got DTensors; call it outside of them."
        )
    refuse_wrapped_calls(options.caller, func)
