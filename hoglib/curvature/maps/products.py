"""Curvature matrices at a point: their products with vectors, and whole matrices of small
networks."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeVar, Unpack, overload

import torch
from torch import Tensor

from hoglib._core.messages import validation
from hoglib._core.messages.communication import tell_sharers
from hoglib._core.modules.state import preserve_random_state
from hoglib._core.problem import Options, Policy, Problem, refuse_wrapped_calls
from hoglib._core.substrate.autograd import (
    Gradient,
    Vector,
    clone_inference_tensors,
    dense,
    fresh_leaves,
    materialize_grads,
    vjp,
)
from hoglib._core.substrate.gradient_graph import GraphSummary, graph_bytes
from hoglib._core.substrate.placement import refuse_sharded
from hoglib._core.torch_api import pytree, torch_internals
from hoglib.capture.within import run_uncompiled, when_compiled, within_compile
from hoglib.curvature.algebra.vector_space import Blocks, Tree, groups_of
from hoglib.curvature.maps.compiled import linearizer
from hoglib.curvature.maps.fisher_metric import FisherKind, FisherMetric
from hoglib.curvature.maps.gauss_newton import GaussNewtonKind, GaussNewtonMode
from hoglib.curvature.maps.linear_map import (
    DIFFERENCES,
    CurvatureKind,
    HessianKind,
    HessianMode,
    LinearMap,
    apply_block,
    apply_rows,
)
from hoglib.curvature.maps.rows import Rows, unit_rows
from hoglib.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError
from hoglib.ring import ring, warn_if_derivatives_not_finite

T = TypeVar("T")  # a pytree of tensors
Loss = Callable[..., Tensor]
Entries = dict[tuple[int, int], Tensor]  # (a, b) -> the block of the leaves a and b
# From this number of rows on, only one triangle of a symmetric matrix is computed. It takes 0.9, 1.0 to
# 1.2 and 0.5 times as long for MLPs of 114, 451 and 2,203 parameters.
MIRRORED = 1024


def _like_product(value: object, options: object, params: Tree, v: Tree, *args: Any) -> Any:
    """Example results of a product for torch.compile: a scalar, and tensors like v."""
    value, *_ = pytree.tensors(value)
    return value.sum().detach(), pytree.map(lambda x: x.detach().clone(), v)


@when_compiled(within_compile(_like_product, lambda params, v, *args: (params, *args)))
def hvp(
    func: Loss,
    params: T,
    v: T,
    *args: Any,
    mode: HessianMode = "auto",
    create_graph: bool = False,
    strict: bool = False,
    **options: Unpack[Options],
) -> tuple[Tensor, T]:
    r"""The value of a scalar function and the product of its Hessian with a vector.

        f = func(params, *args)        H v = d/de grad f(params + e v) at e = 0

    The inputs are not changed; hvp works under no_grad and inference_mode. It warns of a custom
    Function with a backward that uses tensors made in its forward as constants.

    Args:
        func: The function ``func(params, *args)`` that returns a scalar, for instance from
            `hoglib.functional_loss`.
        params: Where the Hessian is taken; any pytree of floating-point tensors.
        v: The vector, with the structure, shapes and dtypes of params. A block of k vectors has a
            trailing dimension of k in every leaf; the gradient and its graph are computed once for all.
        *args: Further arguments of func, such as a batch.
        mode: "reverse-over-reverse" differentiates the gradient's graph once more.
            "forward-over-reverse" is `torch.func.jvp` of `torch.func.grad`, which needs a forward-mode
            rule for every operation. "auto" is "reverse-over-reverse", or "forward-over-reverse" inside
            torch.func transforms, where vmap of reverse-over-reverse is wrong through normalisation
            layers. "finite-differences", for comparison, takes differences of the gradient in float64:
            ten gradients a vector, accurate to about 1e-9; func has to run in float64.
        create_graph: Whether value and product can be differentiated again, by params, v or args.
            Inside torch.func transforms they always can.
        strict: Raise if a parameter has no second derivative, instead of returning zero
            (reverse-over-reverse only).
        **options: How func is evaluated, as :class:`hoglib.Options` describes it.
    Returns:
        The pair (f, H v), in the order of `torch.autograd.functional.hvp`; H v has the structure of v.
    Raises:
        ArgumentTypeError, ArgumentValueError: for params, v or a value of the wrong kind, naming the
            leaf.
        NoSecondDerivative: if the value does not depend on params, or comes from a custom Function
            with an `@once_differentiable` backward.
        UnsupportedError: if torch has no derivative of an operation.
    References:
        Pearlmutter, Fast Exact Multiplication by the Hessian, 1994.
    Example:
        >>> p, v = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 0.0])
        >>> hog.hvp(lambda p: p[0] ** 2 * p[1], p, v)
        (tensor(2.), tensor([4., 2.]))
    """
    kind = HessianKind(mode)
    names = tuple(pytree.paths(params)) if strict else None
    policy = kind.check_policy(Policy.of("hvp", options, create_graph, names))
    return _product(kind, func, params, v, args, policy)


@when_compiled(within_compile(_like_product, lambda params, v, batch: (params, batch), apart=True))
def ggn_vp(
    loss: Any,
    params: T,
    v: T,
    batch: Any,
    *,
    mode: GaussNewtonMode = "auto",
    create_graph: bool = False,
    **options: Unpack[Options],
) -> tuple[Tensor, T]:
    r"""The value of a loss and the product of its generalised Gauss-Newton matrix with a vector.

        f = criterion(outputs(params))        G v = J^T H J v

    with J the Jacobian of the outputs by params and H the Hessian of the criterion by the outputs. G is
    positive semi-definite if the criterion is convex in the outputs. It is the Hessian without the term
    with the second derivatives of the outputs.

    Args:
        loss: From `hoglib.functional_loss`, or any object with ``outputs(params, batch)`` and
            ``criterion(outputs, batch)``.
        params: Where the matrix is taken; any pytree of floating-point tensors.
        v: The vector, with the structure, shapes and dtypes of params; a block of k vectors has a
            trailing dimension of k in every leaf.
        batch: The batch that ``loss.outputs`` and ``loss.criterion`` take.
        mode: How J v is computed. "forward" runs the model once with tangents, and needs a
            forward-mode rule for every operation. "reverse" differentiates J^T u by u, needs none, and
            keeps its graph over a block of vectors. "auto" is "forward" for one vector, and "reverse"
            for a block or if an operation has no forward mode. "finite-differences" is for
            comparison, in float64.
        create_graph: Whether value and product can be differentiated again. Inside torch.func
            transforms they always can.
        **options: How func is evaluated, as :class:`hoglib.Options` describes it.
    Returns:
        The pair (f, G v); G v has the structure of v.
    Raises:
        ArgumentTypeError: for a loss without ``outputs`` and ``criterion``, and for params, v or a
            value of the wrong kind.
        NoSecondDerivative: if the outputs do not depend on params, or lose their graph.
        UnsupportedError: if torch has no derivative of an operation.
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
    policy = kind.check_policy(Policy.of("ggn_vp", options, create_graph))
    return _product(kind, loss, params, v, (batch,), policy)


@when_compiled(within_compile(_like_product, lambda params, v, batch: (params, batch), apart=True))
def fisher_vp(
    loss: Any,
    params: T,
    v: T,
    batch: Any,
    *,
    kind: FisherKind = "exact",
    likelihood: object = None,
    reduction: Literal["mean", "sum"] = "mean",
    num_samples: int = 1,
    generator: torch.Generator | None = None,
    mode: GaussNewtonMode = "auto",
    **options: Unpack[Options],
) -> tuple[Tensor, T]:
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
        batch: The batch that ``loss.outputs`` and ``loss.criterion`` take.
        kind: "exact", "mc" or "empirical", as above.
        likelihood: The distribution p that the outputs parametrise. A function from outputs to a
            `torch.distributions.Distribution` with the terms of the loss in its batch_shape; or
            "categorical" (logits, with classes in dimension 1 or the last, as the targets' shape
            tells), "bernoulli" (logits), "gaussian" (unit variance) or "poisson" (log rates). None:
            the likelihood of the criterion, if it is one of torch's (cross entropy, mean square, ...).
        reduction: Whether the loss is the "mean" of its terms or their "sum" (then without 1/N).
        num_samples: Draws for each example with kind="mc".
        generator: Makes these draws; None is torch's global generator.
        mode: How J v is computed: "auto", "forward", "reverse" or "finite-differences", as in
            `hoglib.ggn_vp`.
        **options: How func is evaluated, as :class:`hoglib.Options` describes it.
    Returns:
        The pair (f, F v), f the loss; F v has the structure of v.
    Raises:
        ArgumentTypeError: for a loss without ``outputs`` and ``criterion``.
        ArgumentValueError: if no likelihood is given and the criterion does not determine one.
        NonFiniteError: for outputs with NaN or infinity.
        UnsupportedError: for "exact", if torch has no KL divergence of the distribution, or the
            divergence's second derivative is not the Fisher matrix.
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
    policy = matrix.check_policy(Policy.of("fisher_vp", options))
    return _product(matrix, loss, params, v, (batch,), policy)


def _product(
    kind: CurvatureKind, func: Any, params: Any, v: Any, args: tuple[Any, ...], policy: Policy
) -> tuple[Tensor, Any]:
    """The value, and the product of a matrix with v, or with each vector of a block."""
    try:
        kind.check_loss(func, "func")
        if torch_internals.transforms_active():
            # An outer transform may differentiate the product.
            policy = policy._replace(create_graph=True)
        problem = Problem.of(policy, func, params, *args)
        # With DTensors, problem.leaves are the shards; v is compared with params.
        leaves = pytree.leaves(params) if problem.placement.is_sharded else problem.leaves
        vector, block = validation.vectors("v", v, params, flat=(leaves, problem.structure))
        if problem.placement.is_sharded:
            _refuse_sharded(policy, func)
        around = ring(policy, func, placement=problem.placement, around_graph=True)
        with around as blocks:
            entered, vector = problem.entered(blocks), clone_inference_tensors(vector)
            vector = entered.placement.local_vector("v", vector)
            columns = vector[0].shape[-1] if block else 1
            # One all-reduce before any gather: if calls differ between processes, all raise.
            call = kind, policy, func
            entered.placement.check_agreement(policy.caller, call, columns, vector, entered.leaves)
            if problem.placement.is_sharded:
                entered = entered.weighted_by_rows()
            point = linearizer(kind, around.captures)(entered, block)
            around.note_gradient(point.gradient)
            value, product = apply_block(point, vector, block)
    except BaseException as error:
        tell_sharers(error, params)
        raise
    if not problem.placement.is_sharded:
        # Not with DTensors: the search for a cause runs the loss again, in this process alone.
        warn_if_derivatives_not_finite(problem, value, product)
    if kind.mode == DIFFERENCES:
        # finite differences are computed in float64
        product = [part.to(leaf.dtype) for part, leaf in zip(product, problem.leaves, strict=True)]
    if not policy.create_graph:
        # detach() only if needed: it takes longer than reading requires_grad
        product = [part.detach() if part.requires_grad else part for part in product]
        value = value.detach().clone()
    return value, problem.tree(product)


def _refuse_sharded(policy: Policy, func: Callable[..., Any]) -> None:
    """Raise for options and functions that do not work with DTensor parameters."""
    validation.refuse_transforms(policy.caller, "products of DTensors are taken outside of them.")
    for name, given in (("create_graph", policy.create_graph), ("compile", policy.backend)):
        if given:
            raise UnsupportedError(
                f"{policy.caller}({name}={given!r}): expected parameters that this process holds "
                f"whole, got DTensors, whose products have no graph and are not captured; leave {name} "
                "out."
            )
    refuse_wrapped_calls(policy.caller, func)


def _like_hessian(value: Any, options: object, params: Any, *args: Any) -> Any:
    """Example results of `hessian` for torch.compile: for each output a block for each two leaves."""

    def block(y: Tensor, p: Tensor, q: Tensor) -> Tensor:
        return y.detach().sum().expand(*y.shape, *p.shape, *q.shape)

    def of_output(y: Tensor) -> Any:
        return pytree.map(lambda p: pytree.map(partial(block, y, p), params), params)

    return pytree.map(of_output, value)


@overload
def hessian(
    func: Callable[..., Tensor],
    params: Tensor,
    *args: Any,
    blocks: Blocks = None,
    chunk_size: int | None = None,
    create_graph: bool = False,
    **options: Unpack[Options],
) -> Tensor: ...
@overload
def hessian(
    func: Callable[..., Tensor],
    params: dict[str, Tensor],
    *args: Any,
    blocks: Blocks = None,
    chunk_size: int | None = None,
    create_graph: bool = False,
    **options: Unpack[Options],
) -> dict[str, dict[str, Tensor]]: ...
@overload
def hessian(
    func: Callable[..., Tensor],
    params: Tree,
    *args: Any,
    blocks: Blocks = None,
    chunk_size: int | None = None,
    create_graph: bool = False,
    **options: Unpack[Options],
) -> Tree: ...
@when_compiled(within_compile(_like_hessian))
def hessian(
    func: Callable[..., Tensor],
    params: Tree,
    *args: Any,
    blocks: Blocks = None,
    chunk_size: int | None = None,
    create_graph: bool = False,
    **options: Unpack[Options],
) -> Tree:
    r"""The Hessian of a function, in the layout of `torch.func.hessian`.

        H[a][b][i, j] = d^2 func(params, *args) / d params[a][i] d params[b][j]

    func returns a scalar, or a tensor or pytree of outputs. With outputs, H has a Hessian for each
    output element, and each element takes a run of func and all rows of a Hessian.

    Rows are computed by reverse-over-reverse, several at once: the graph of the gradient is recorded
    once, and vmap maps over its backward. (`torch.func.hessian` also maps over the forward pass, which
    is silently wrong in the rows of a LayerNorm's weight.) Without a batching rule, rows are computed
    one after another. P numbers in params take P^2 numbers of memory. Inside torch.func transforms the
    Hessian is `jacfwd(grad)`, all at once. The inputs are not changed; hessian works under no_grad and
    inference_mode.

    Args:
        func: The function ``func(params, *args)`` that returns a scalar, or real floating-point
            tensors.
        params: Where the Hessian is taken; any pytree of real floating-point tensors.
        *args: Further arguments of func, such as a batch.
        blocks: Compute only the diagonal blocks; params must be a dict by qualified name. "parameter":
            a block for each tensor. "module": a block for the parameters of each module. A function
            returns the block of a name. A list of lists of names gives the blocks. H[a] then has the
            names that share a block with a.
        chunk_size: Rows at once. Default: by the size of the graph, as many as take 32 MiB on a CPU or
            1 GiB on another device; 1 on a CPU if the graph is larger than 2 MiB.
        create_graph: Whether H can be differentiated again.
        **options: How func is evaluated, as :class:`hoglib.Options` describes it. A compiled graph runs
            once what all rows share; compile excludes create_graph, and several outputs.
    Returns:
        H: for a dict of params a dict of dicts; for any other pytree nested in its structure twice; for
        one tensor one tensor. For several outputs: a pytree of outputs, with an H for each.
    Raises:
        ArgumentTypeError, ArgumentValueError: for params, blocks or a value of the wrong kind.
        NoSecondDerivative: if the value does not depend on params, or its gradient lost its graph.
        UnsupportedError: if torch has no derivative of an operation.
    Shape:
        - ``H[a][b]``: the shape of ``params[a]``, followed by the shape of ``params[b]``; for several
          outputs the shape of the output comes first
    Example:
        >>> hog.hessian(lambda p: p[0] ** 2 * p[1], torch.tensor([1.0, 2.0]))
        tensor([[4., 2.],
                [2., 0.]])
        >>> hog.hessian(lambda p: p**3, torch.tensor([1.0, 2.0])).shape
        torch.Size([2, 2, 2])
    """
    validation.function("func", func)
    policy = Policy.of("hessian", options, create_graph)
    problem = _real_problem(policy, func, params, args)
    if policy.compiles and create_graph:
        raise ArgumentValueError(
            "hessian(compile=True): expected create_graph=False, got True; leave one of the two out."
        )
    try:
        return _matrix(HessianKind(), problem, params, blocks, chunk_size)
    except (ArgumentTypeError, ArgumentValueError):
        outputs = _several_outputs(problem)  # raises errors of func again
        if outputs is None:
            raise
    if policy.compiles:
        raise UnsupportedError(
            "hessian(compile=...): expected a function that returns a scalar, got several outputs; "
            "leave compile out, or take their sum with weights."
        )

    def of_output(number: int, y: Tensor) -> Tree:
        found = []
        for i in range(y.numel()):
            one = replace(problem, loss=partial(_entry, problem.loss, number, i))
            with preserve_random_state():  # func draws equal random numbers for all entries
                found.append(_matrix(HessianKind(), one, params, blocks, chunk_size))
        leaves, form = zip(*map(pytree.flatten, found), strict=True)
        stacked = [torch.stack(parts) for parts in zip(*leaves, strict=True)]
        return pytree.unflatten([x.reshape(y.shape + x.shape[1:]) for x in stacked], form[0])

    leaves, form = pytree.flatten(outputs)
    return pytree.unflatten([of_output(*pair) for pair in enumerate(leaves)], form)


def _several_outputs(problem: Problem) -> Any:
    """The outputs of the loss, if they are several floating-point numbers; else None."""
    with ring(problem.policy, problem.loss) as blocks:
        p = problem.entered(blocks).leaves
        if not torch_internals.transforms_active():  # func may itself differentiate by p
            p = fresh_leaves(p, False)
        outputs = problem.loss(problem.params(p), *problem.args)
    leaves = pytree.leaves(outputs)
    real = all(isinstance(y, Tensor) and y.is_floating_point() and y.numel() for y in leaves)
    scalar = isinstance(outputs, Tensor) and not outputs.dim()
    return outputs if leaves and real and not scalar else None


def _entry(func: Any, number: int, index: int, params: Any, *args: Any) -> Tensor:
    """Element `index` of output leaf `number` of a function."""
    entry: Tensor = pytree.leaves(func(params, *args))[number].reshape(-1)[index]
    return entry


@when_compiled(run_uncompiled)
def ggn(
    loss: Any,
    params: Tree,
    batch: Any,
    *,
    blocks: Blocks = None,
    chunk_size: int | None = None,
    **options: Unpack[Options],
) -> Tree:
    r"""The generalised Gauss-Newton matrix, in the layout of `hessian`.

        G = J^T H J

    with J the Jacobian of the outputs by params and H the Hessian of the criterion by the outputs. Each
    number in params takes a product; the graph of the outputs is kept between products.

    Args:
        loss: From `hoglib.functional_loss`, or any object with ``outputs(params, batch)`` and
            ``criterion(outputs, batch)``.
        params: Where the matrix is taken; any pytree of real floating-point tensors.
        batch: The batch that ``loss.outputs`` and ``loss.criterion`` take.
        blocks: Compute only the blocks on the diagonal: "parameter", "module", a function of a
            qualified name that returns its block, or a list of lists of names.
        chunk_size: Products at once, as in `hessian`.
        **options: How the loss is evaluated, as :class:`hoglib.Options` describes it.
    Returns:
        G: for params a dict, a dict of dicts; ``G[a][b]`` has the shape of ``params[a]``, followed by
        the shape of ``params[b]``.
    Raises:
        ArgumentTypeError: for a loss without ``outputs`` and ``criterion``, and for params of the wrong
            kind.
        NoSecondDerivative: if the outputs do not depend on params, or lose their graph.
        UnsupportedError: if torch has no derivative of an operation.
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
    return _matrix(kind, _real_problem(policy, loss, params, (batch,)), params, blocks, chunk_size)


def _real_problem(policy: Policy, func: Any, params: Tree, args: tuple[Any, ...]) -> Problem:
    """The problem; raises for DTensors and complex parameters."""
    refuse_sharded(policy.caller, pytree.leaves(params))
    problem = Problem.of(policy, func, params, *args)
    for leaf in problem.leaves:
        validation.real("params", leaf)
    return problem


def _matrix(
    kind: CurvatureKind, problem: Problem, params: Tree, blocks: Blocks, chunk_size: int | None
) -> Tree:
    """The matrix, nested by the structure of params twice; with blocks a dict of dicts."""
    validation.none_or_at_least("chunk_size", chunk_size, 1)
    groups = groups_of(blocks, params)
    around = ring(problem.policy, problem.loss, around_graph=True)
    value = problem.leaves[0].new_zeros(())
    with around as recomputed:
        entered = problem.entered(recomputed)
        if torch_internals.transforms_active() and isinstance(kind, HessianKind):
            # vmap of reverse-over-reverse is silently wrong for normalization layers.
            numbers = tuple(range(len(entered.leaves)))
            full = torch.func.jacfwd(torch.func.grad(entered, numbers), numbers)(*entered.leaves)
            entries = {(a, b): full[a][b] for group in groups for a in group for b in group}
        else:
            point = linearizer(kind, around.captures)(entered, True)
            around.note_gradient(point.gradient)
            if point.gradient is None:
                entries = _by_products(point, entered.leaves, groups, chunk_size)
            else:  # an eager Hessian: the point has the gradient and its graph
                value = point.gradient.value
                entries = _by_rows(point.gradient, entered, groups, chunk_size)
    warn_if_derivatives_not_finite(problem, value, entries.values())
    names, every = pytree.paths(params), range(len(problem.leaves))
    if blocks is None:
        form = problem.structure
        rows = [[entries[a, b] for b in every] for a in every]
        return pytree.unflatten([pytree.unflatten(row, form) for row in rows], form)
    return {names[a]: {names[b]: entries[a, b] for b in every if (a, b) in entries} for a in every}


def _by_rows(
    gradient: Gradient, problem: Problem, groups: list[list[int]], size: int | None
) -> Entries:
    """H[a][b] = d (df/dp_a) / dp_b for each pair of leaves in a group, by rows.

    A group with many rows computes one triangle: H[b][a] is then the transpose of H[a][b].
    """
    policy, (_, p, grads, graph) = problem.policy, gradient
    entries: Entries = {}
    # Differentiate grads[a] alone, by the leaves of its group: the whole gradient would backpropagate
    # through every leaf for each row.
    for group in groups:
        mirrored = sum(p[a].numel() for a in group) >= MIRRORED
        # The largest leaf last: its many rows are then differentiated by that leaf alone.
        order = sorted(group, key=lambda a: p[a].numel()) if mirrored else group
        for place, a in enumerate(order):
            by, count = order[place:] if mirrored else group, p[a].numel()
            columns, part = [p[b] for b in by], grads[a]
            if part is None or not part.requires_grad or not count:
                rows = [y.new_zeros(count, *y.shape) for y in columns]
            else:
                part = dense(part)  # an embedding's gradient may be sparse
                product = partial(_row, part, columns, policy, graph)
                held = partial(graph_bytes, [part])
                with graph.backward_modes():
                    rows_of = Rows(problem, (a, *by, *graph.names), product, held, product)
                    rows = rows_of.map(partial(_units, p[a]), count, size)
            for b, block in zip(by, rows, strict=True):
                entries[a, b] = block.reshape(p[a].shape + p[b].shape)
                if mirrored and b != a:
                    entries[b, a] = block.reshape(count, -1).T.reshape(p[b].shape + p[a].shape)
    return entries


def _units(leaf: Tensor, start: int, stop: int) -> Vector:
    """The unit vectors start to stop of a leaf, as the list that `Rows.map` takes."""
    return [unit_rows(leaf, leaf.shape, start, stop)]


def _row(
    part: Tensor, columns: Vector, policy: Policy, graph: GraphSummary, unit: Vector
) -> Vector:
    """The derivative of unit . part by the leaves `columns`."""
    found = vjp([part], columns, unit, policy.caller, True, policy.create_graph, graph)
    return materialize_grads(found, columns)


def _by_products(
    point: LinearMap, leaves: Vector, groups: list[list[int]], size: int | None
) -> Entries:
    """M[a][b] = (M e_b)[a] for each pair of leaves in a group, one product for each column."""
    entries: Entries = {}
    for group in groups:
        for b in group:
            if not (count := leaves[b].numel()):
                zero = {
                    (a, b): leaves[a].new_zeros(leaves[a].shape + leaves[b].shape) for a in group
                }
                entries.update(zero)
                continue

            def chunk(start: int, stop: int, b: int = b) -> Vector:
                zeros = [leaf.new_zeros(()).expand(stop - start, *leaf.shape) for leaf in leaves]
                return [*zeros[:b], *_units(leaves[b], start, stop), *zeros[b + 1 :]]

            _, products = apply_rows(point, chunk, count, True, size)
            for a in group:
                block = products[a].movedim(0, -1)
                entries[a, b] = block.reshape(leaves[a].shape + leaves[b].shape).detach()
    return entries
