"""Norms and products of the gradients of single examples, from the inputs and outputs of layers.

    dW_n = sum_t g_nt a_nt^T        <dW_n, dW_m> = sum_tu <g_nt, g_mu> <a_nt, a_mu>

with the inputs a_nt of a layer at the positions t of example n, and the gradients g_nt by its outputs.
"""

from typing import Any

import torch
from torch import Tensor

from hoglib._core import pytree, validation
from hoglib._core.autograd import Vector, clone_inference_tensors, grad_enabled
from hoglib._core.logger import LOGGER
from hoglib._core.swap import keep_swapped
from hoglib.curvature.example_gradients import (
    check_norms,
    gradient_rows,
    number_of_examples,
    per_example_gradients,
)
from hoglib.curvature.fisher_metric import FisherMetric
from hoglib.curvature.kronecker_factors import AT_ONCE
from hoglib.curvature.layer_rows import (
    Gradients,
    Layer,
    by_example,
    input_rows,
    is_embedding,
    output_gradients,
    scale_and_shift_gradients,
)
from hoglib.curvature.linear_map import ProductOptions
from hoglib.curvature.model_run import FactorOptions, ModelRun, orders_of
from hoglib.curvature.vector_space import Space
from hoglib.errors import ArgumentValueError, HoglibError

Tree = Any
CALLER = "per_example_gradient_norms"


def per_example_gradient_norms(
    loss: Any, params: Tree, batch: Any, *, vmap: bool | None = None
) -> Tensor:
    r"""The norm of the gradient of each example of a batch, without the gradients.

        |d l_n / d params|        l_n = loss(params, example n), a batch of one

    Layers that `hoglib.KFACOperator` knows take one forward and one backward pass of the batch: norms
    are computed from the inputs of a layer and the gradients by its outputs (ghost norms), of each
    layer by the cheaper of the products of positions and the gradients of that layer alone. For any
    other use of a parameter, and losses that are no `hoglib.functional_loss`, gradients are computed
    as by `hoglib.per_example_gradients`, some examples at a time; ``logging.getLogger("hoglib")`` tells
    why, at level DEBUG. Of small convolutional networks these are faster than the patches of inputs
    that ghost norms need.

    Args:
        loss: As of `hoglib.per_example_gradients`.
        params: Where the gradients are taken, a dict of tensors by name; of other losses any pytree.
        batch: As of `hoglib.per_example_gradients`.
        vmap: As of `hoglib.per_example_gradients`, where gradients are computed.
    Returns:
        The norms [N], of all parameters together.
    Raises:
        ArgumentValueError: for batch norm in train mode, where an example alone has another loss.
    References:
        Goodfellow, Efficient Per-Example Gradient Computations, 2015. Li, Tramer, Liang and Hashimoto,
        Large Language Models Can Be Strong Differentially Private Learners, 2022, section 4.
    Example:
        >>> model = nn.Linear(2, 1, bias=False)
        >>> with torch.no_grad():
        ...     _ = model.weight.fill_(1.0)
        >>> loss, params = hog.functional_loss(model, F.mse_loss), hog.trainable_params(model)
        >>> batch = torch.tensor([[3.0, 4.0], [0.0, 1.0]]), torch.zeros(2, 1)
        >>> hog.curvature.per_example_gradient_norms(loss, params, batch)  # 2 |x_n| |sum of x_n|
        tensor([70.,  2.])
    """
    found = _layer_by_layer(loss, params, batch, False)
    if found is None:
        rows = gradient_rows(loss, params, batch, vmap=vmap)
        found = torch.cat([part.square().sum(1) for part in rows])
    return found.sqrt()


def per_example_gradient_products(
    loss: Any, params: Tree, batch: Any, *, vmap: bool | None = None
) -> Tensor:
    r"""The dot products of the gradients of the examples of a batch.

        K_nm = <d l_n / d params, d l_m / d params>

    The gradients of one layer at a time are held, and none of a linear layer that each example uses
    once; else as `per_example_gradient_norms`.

    Args:
        loss: As of `per_example_gradient_norms`.
        params: As of `per_example_gradient_norms`.
        batch: As of `per_example_gradient_norms`.
        vmap: As of `per_example_gradient_norms`.
    Returns:
        The products [N, N].
    Raises:
        ArgumentValueError: for batch norm in train mode, where an example alone has another loss.
    Example:
        >>> x = torch.tensor([[1.0, 0.0], [1.0, 2.0]])
        >>> loss = lambda p, x: (x @ p).sum()
        >>> hog.curvature.per_example_gradient_products(loss, torch.ones(2), x)
        tensor([[1., 1.],
                [1., 5.]])
    """
    found = _layer_by_layer(loss, params, batch, True)
    if found is None:
        rows = torch.cat(list(gradient_rows(loss, params, batch, vmap=vmap)))
        found = rows @ rows.T
    return found


def _layer_by_layer(loss: Any, params: Tree, batch: Any, pairs: bool) -> Tensor | None:
    """Squared norms [N], or with pairs the products [N, N]; None where layers do not say them."""
    validation.loss_function("loss", loss)
    space = Space(params)
    space.refuse_sharded("per_example_gradient_products" if pairs else "per_example_gradient_norms")
    check_norms(loss)
    own = dict(batch) if hasattr(batch, "keys") and not isinstance(batch, dict) else batch
    count = number_of_examples(own)
    if not (hasattr(loss, "outputs") and isinstance(params, dict)):
        return None
    with torch.inference_mode(False), torch.no_grad(), grad_enabled(), keep_swapped():
        leaves, own = clone_inference_tensors((space.leaves(), own))
        try:
            run = _checked(loss, space, leaves, own, count)
        except HoglibError as error:  # of the layers; what is wrong with the loss comes again
            LOGGER.debug("%s: from the gradients of single examples, because of %s", CALLER, error)
            return None
        gradients = run.gradients(_by_outputs(run, loss, own))
        with torch.no_grad():
            total = torch.zeros(count, *([count] if pairs else []), dtype=run.dtype)
            total = total.to(run.device)
            for layer in run.layers:
                total += (_products if pairs else _squares)(layer, gradients, run)
    return total.to(space.dtype)


def _checked(loss: Any, space: Space, leaves: Vector, batch: Any, count: int) -> ModelRun:
    """A run of the model, whose layers treat each example by itself."""
    options = FactorOptions(FisherMetric("empirical"), "expand", True, ProductOptions(CALLER))
    run = ModelRun(loss, space, leaves, batch, options)
    if run.examples != count:
        raise ArgumentValueError("outputs: expected one for each example.")
    run.reorder(orders_of(run, loss, space, leaves, batch, True))
    return run


def _by_outputs(run: ModelRun, loss: Any, batch: Any) -> Vector:
    """The gradients of the loss of each example by its outputs."""
    outputs, given = run.outputs()

    def criterion(shifts: Vector, both: Any) -> Tensor:
        own, example = both
        left = iter(shifts)
        parts, form = pytree.flatten(own)
        moved = [x + next(left) if pytree.is_float(x) else x for x in parts]
        value: Tensor = loss.criterion(pytree.unflatten(moved, form), example)
        return value

    zeros = [torch.zeros_like(y[:1]) for y in given]
    _, gradients = per_example_gradients(criterion, zeros, (outputs, batch))
    return [g.squeeze(1) for g in gradients]


def _squares(layer: Layer, gradients: Gradients, run: ModelRun) -> Tensor:
    """The squared norms of the gradients of a layer, [N]."""
    N = run.examples
    if layer.layout.role.matrix == "diagonal":
        return _scale_and_shift(layer, gradients, N).square().sum(1)
    a, g = _rows(layer, gradients, run)
    if is_embedding(layer) and layer.layout.weight is not None:
        same = (a[0] == a[0].mT) & (a[0] >= 0)  # [N, T, T]: the same row of the table
        return ((g[0] @ g[0].mT) * same).sum((1, 2))
    positions, out, into = a.shape[2], g.shape[3], a.shape[3]
    if positions == 1:
        return (a.square().sum(3) * g.square().sum(3)).sum((0, 2))
    if positions * (into + out) < into * out:
        return ((a @ a.mT) * (g @ g.mT)).sum((0, 2, 3))
    size = max(1, AT_ONCE // (len(a) * into * out))
    pairs = zip(g.split(size, 1), a.split(size, 1), strict=True)
    return torch.cat([(x.mT @ y).square().sum((0, 2, 3)) for x, y in pairs])


def _products(layer: Layer, gradients: Gradients, run: ModelRun) -> Tensor:
    """The products of the gradients of a layer, [N, N]."""
    N = run.examples
    if layer.layout.role.matrix == "diagonal":
        rows = _scale_and_shift(layer, gradients, N)
        return rows @ rows.T
    a, g = _rows(layer, gradients, run)
    if is_embedding(layer) and layer.layout.weight is not None:
        at, features = a[0].flatten(), g[0].flatten(0, 1)
        owner = torch.arange(N, device=at.device).repeat_interleave(a.shape[2])
        seen, places = at.unique(return_inverse=True)  # only rows of the table that are used
        table = features.new_zeros(N * len(seen), features.shape[1])
        table.index_add_(0, owner * len(seen) + places, features * (at >= 0).unsqueeze(1))
        rows = table.view(N, -1)
        return rows @ rows.T
    if a.shape[2] == 1:
        a, g = a.squeeze(2), g.squeeze(2)
        return ((a @ a.mT) * (g @ g.mT)).sum(0)
    rows = (g.mT @ a).movedim(1, 0).reshape(N, -1)
    return rows @ rows.T


def _rows(layer: Layer, gradients: Gradients, run: ModelRun) -> tuple[Tensor, Tensor]:
    """Inputs, of an embedding indices, and gradients by outputs, [groups, N, positions, features]."""
    if is_embedding(layer) and layer.layout.weight is not None:
        inputs = [call.inputs() for call in layer.calls]
    else:
        inputs = [input_rows(layer, call, run.dtype) for call in layer.calls]
    outputs = [output_gradients(layer, call, gradients) for call in layer.calls]
    return by_example(layer, inputs, run.examples), by_example(layer, outputs, run.examples)


def _scale_and_shift(layer: Layer, gradients: Gradients, examples: int) -> Tensor:
    rows = [scale_and_shift_gradients(layer, call, gradients) for call in layer.calls]
    return by_example(layer, rows, examples).sum(-2)
