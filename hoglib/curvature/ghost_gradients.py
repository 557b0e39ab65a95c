"""Norms and products of the gradients of single examples, from the inputs and outputs of layers.

    dW_n = sum_t g_nt a_nt^T        <dW_n, dW_m> = sum_tu <g_nt, g_mu> <a_nt, a_mu>

with the inputs a_nt of a layer at the positions t of example n, and the gradients g_nt by its outputs.
"""

from collections.abc import Iterator
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hoglib._core import pytree, validation
from hoglib._core.autograd import Vector, clone_inference_tensors, grad_enabled
from hoglib._core.logger import LOGGER
from hoglib._core.state import preserve_random_state
from hoglib._core.swap import keep_swapped
from hoglib.curvature.data import as_dict, first_examples
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
    is_embedding,
    output_gradients,
    scale_and_shift_gradients,
)
from hoglib.curvature.linear_map import ProductOptions
from hoglib.curvature.model_run import FactorOptions, ModelRun, checked_run
from hoglib.curvature.vector_space import Space
from hoglib.errors import ArgumentValueError, HoglibError, UnsupportedError

Tree = Any
CALLER = "per_example_gradient_norms"
# What a number that is written and read again costs, in multiplications: 2 ns and 0.03 ns, measured on
# one core for patches of convolutions and products of matrices.
HELD = 64
# What the check of layers, and one layer after the other, cost where the ways are equal.
MARGIN = 1.5
_OPTIONS = FactorOptions(FisherMetric("empirical"), "expand", True, ProductOptions(CALLER))


def per_example_gradient_norms(loss: Any, params: Tree, batch: Any) -> Tensor:
    r"""The norm of the gradient of each example of a batch, without the gradients.

        |d l_n / d params|        l_n = loss(params, example n), a batch of one

    Layers that `hoglib.KFACOperator` knows take one forward and one backward pass of the batch: norms
    are computed from the inputs of a layer and the gradients by its outputs, of each layer by the
    cheaper of the products of positions (ghost norms) and the gradients of that layer alone, which are
    held for some examples at a time. The multiplications and the numbers that are held decide. Where
    the gradients of all layers are cheaper, as in small convolutional networks, and at most 2^24
    numbers, they are those of `hoglib.per_example_gradients`; so are they, some examples at a time,
    for any other use of a parameter, and losses that are no `hoglib.functional_loss`;
    ``logging.getLogger("hoglib")`` tells why, at level DEBUG.

    Args:
        loss: As of `hoglib.per_example_gradients`.
        params: Where the gradients are taken, a dict of tensors by name; of other losses any pytree.
        batch: As of `hoglib.per_example_gradients`.
    Returns:
        The norms [N], of all parameters together.
    Raises:
        ArgumentValueError: for batch norm in train mode, where an example alone has another loss.
    References:
        Goodfellow, Efficient Per-Example Gradient Computations, 2015. Li, Tramer, Liang and Hashimoto,
        Large Language Models Can Be Strong Differentially Private Learners, 2022, section 4. Bu, Mao
        and Xu, Scalable and Efficient Training of Large Convolutional Neural Networks with
        Differential Privacy, 2022 (the choice by layer).
    Example:
        >>> model = nn.Linear(2, 1, bias=False)
        >>> with torch.no_grad():
        ...     _ = model.weight.fill_(1.0)
        >>> loss, params = hog.functional_loss(model, F.mse_loss), hog.trainable_params(model)
        >>> batch = torch.tensor([[3.0, 4.0], [0.0, 1.0]]), torch.zeros(2, 1)
        >>> hog.curvature.per_example_gradient_norms(loss, params, batch)  # 2 |x_n| |sum of x_n|
        tensor([70.,  2.])
    """
    return _products_of(loss, params, batch, False).sqrt()


def per_example_gradient_products(loss: Any, params: Tree, batch: Any) -> Tensor:
    r"""The dot products of the gradients of the examples of a batch.

        K_nm = <d l_n / d params, d l_m / d params>

    The gradients of one layer at a time are held, and none of a linear layer that each example uses
    once; else as `per_example_gradient_norms`.

    Args:
        loss: As of `per_example_gradient_norms`.
        params: As of `per_example_gradient_norms`.
        batch: As of `per_example_gradient_norms`.
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
    return _products_of(loss, params, batch, True)


def _products_of(loss: Any, params: Tree, batch: Any, pairs: bool) -> Tensor:
    """Squared norms [N], or with pairs the products [N, N]."""
    found = _layer_by_layer(loss, params, batch, pairs)
    return _from_gradients(loss, params, batch, pairs, None) if found is None else found


def _from_gradients(loss: Any, params: Tree, batch: Any, pairs: bool, vmap: bool | None) -> Tensor:
    """The same from the gradients of examples."""
    rows = gradient_rows(loss, params, batch, vmap=vmap)
    if not pairs:
        return torch.cat([_square_of_rows(part) for part in rows])
    every = torch.cat(list(rows))
    return every @ every.T


def _layer_by_layer(loss: Any, params: Tree, batch: Any, pairs: bool) -> Tensor | None:
    """Squared norms [N], or with pairs the products [N, N]; None where layers do not say them."""
    validation.loss_function("loss", loss)
    space = Space(params)
    space.refuse_sharded("per_example_gradient_products" if pairs else "per_example_gradient_norms")
    check_norms(loss)
    own = as_dict(batch)
    count = number_of_examples(own)
    loss = loss.with_logits() if hasattr(loss, "with_logits") else loss
    if not (hasattr(loss, "outputs") and isinstance(params, dict)):
        return None
    with torch.inference_mode(False), torch.no_grad(), grad_enabled(), keep_swapped():
        leaves, own = clone_inference_tensors((space.leaves(), own))
        if _prefers_gradients(loss, space, leaves, own, count, pairs):
            try:
                return _from_gradients(loss, params, batch, pairs, True).to(space.dtype)
            except UnsupportedError as error:
                LOGGER.debug("%s: layer by layer, because of %s", CALLER, error)
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


def _prefers_gradients(
    loss: Any, space: Space, leaves: Vector, batch: Any, count: int, pairs: bool
) -> bool:
    """Whether the gradients of all parameters, which fit into memory, cost about as little as those of
    each layer, or the products of its positions: these take the model's layers apart, and a check."""
    small = first_examples(batch, 2)
    if small is None or count * space.size > AT_ONCE:
        return False
    try:
        with preserve_random_state():
            run = ModelRun(loss, space, leaves, small, _OPTIONS)
    except Exception:  # whatever two examples alone run into, the whole batch decides
        return False
    costs = [costs_of(layer, run.examples, count, pairs) for layer in run.layers]
    passes = sum(both.passes for both in costs)  # which both ways take
    gradients = sum(both.gradients for both in costs)
    return passes + gradients <= MARGIN * (passes + sum(both.least for both in costs))


def _checked(loss: Any, space: Space, leaves: Vector, batch: Any, count: int) -> ModelRun:
    """A run of the model, whose layers treat each example by itself."""
    given = (loss, space, leaves, batch, _OPTIONS)
    run, _ = checked_run(ModelRun(*given), *given, True)
    if run.examples != count:
        raise ArgumentValueError("outputs: expected one for each example.")
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
    if is_embedding(layer) and layer.layout.weight is not None:
        at, g = _indices(layer, N), _outputs(layer, gradients, N)
        same = (at == at.mT) & (at >= 0)  # [N, T, T]: the same row of the table
        return ((g[0] @ g[0].mT) * same).sum((1, 2))
    costs = costs_of(layer, N, N, False)
    if costs.gradients <= costs.positions:
        parts = _gradients(layer, gradients, run)
        return torch.cat([sum(map(_square_of_rows, part), part[0].new_zeros(())) for part in parts])
    a, g = _inputs(layer, run), _outputs(layer, gradients, N)
    if a.shape[2] == 1:
        size = a.square().sum(3) + (layer.layout.bias is not None)
        return (size * g.square().sum(3)).sum((0, 2))
    chunks = max(1, AT_ONCE // (len(a) * a.shape[2] ** 2))
    pairs = zip(a.split(chunks, 1), g.split(chunks, 1), strict=True)
    return torch.cat([(_grams(layer, x) * (y @ y.mT)).sum((0, 2, 3)) for x, y in pairs])


def _products(layer: Layer, gradients: Gradients, run: ModelRun) -> Tensor:
    """The products of the gradients of a layer, [N, N]."""
    N = run.examples
    if layer.layout.role.matrix == "diagonal":
        rows = _scale_and_shift(layer, gradients, N)
        return rows @ rows.T
    if is_embedding(layer) and layer.layout.weight is not None:
        places, g = _indices(layer, N), _outputs(layer, gradients, N)
        at, features = places.flatten(), g[0].flatten(0, 1)
        owner = torch.arange(N, device=at.device).repeat_interleave(g.shape[2])
        seen, places = at.unique(return_inverse=True)  # only rows of the table that are used
        table = features.new_zeros(N * len(seen), features.shape[1])
        table.index_add_(0, owner * len(seen) + places, features * (at >= 0).unsqueeze(1))
        rows = table.view(N, -1)
        return rows @ rows.T
    costs = costs_of(layer, N, N, True)
    if costs.gradients <= costs.positions:
        rows = torch.cat([torch.cat(part, 1) for part in _gradients(layer, gradients, run)])
        return rows @ rows.T
    a, g = (x.flatten(1, 2) for x in (_inputs(layer, run), _outputs(layer, gradients, N)))
    found = (_grams(layer, a) * (g @ g.mT)).sum(0)
    return found.view(N, len(found) // N, N, -1).sum((1, 3))


class Costs(NamedTuple):
    """Of a layer and an example, in multiplications."""

    positions: float  # <a_t, a_u> <g_t, g_u>
    gradients: float  # sum over t of g_t a_t^T
    passes: float  # forward, and backward to the inputs

    @property
    def least(self) -> float:
        """Of the cheaper way."""
        return min(self.positions, self.gradients)


def costs_of(layer: Layer, examples: int, count: int, pairs: bool) -> Costs:
    """What the norms, or with pairs the products, of a batch of `count` examples cost, from a run of
    `examples` examples. A number that is held counts `HELD` multiplications: the patches of a
    convolution, which its gradients do not need, products of positions, and gradients."""
    groups, out, into = layer.layout.sizes
    T = sum(call.rows // examples for call in layer.calls)
    if layer.layout.role.matrix == "diagonal" or layer.layout.weight is None:
        return Costs(inf, groups * out * into * T, 2 * groups * out * into * T)
    others = count if pairs else 1
    inputs = 0 if is_embedding(layer) else into
    patches = HELD * T * into if any(call.has_patches() for call in layer.calls) else 0
    positions = groups * (patches + others * T * T * (inputs + out + 2 * HELD))
    passes = 2 * groups * T * inputs * out
    gradients = groups * into * out * (T + 2 * HELD + (others if pairs else 0))
    if pairs and groups * (count * T) ** 2 > AT_ONCE and not is_embedding(layer):
        return Costs(inf, gradients, passes)
    return Costs(positions, gradients, passes)


def _square_of_rows(rows: Tensor) -> Tensor:
    return torch.linalg.vector_norm(rows, dim=1).square()  # holds no squares


def _gradients(layer: Layer, gradients: Gradients, run: ModelRun) -> Iterator[list[Tensor]]:
    """The gradients of the examples by the weight and the bias of a layer, [n, numbers] each, some at a
    time."""
    N = run.examples
    groups, out, into = layer.layout.sizes
    if layer.layout.weight is None:
        yield [_outputs(layer, gradients, N).sum(2).movedim(1, 0).flatten(1)]
        return
    direct = all(call.has_patches() and call.shape[0] == N for call in layer.calls)
    a = None if direct else _inputs(layer, run)
    g = _outputs(layer, gradients, N)
    size = max(1, AT_ONCE // (groups * into * out))
    for start in range(0, N, size):
        stop = min(start + size, N)
        if a is None:
            parts = [
                call.weight_gradients(gradients.plain(call).to(run.dtype), start, stop)
                for call in layer.calls
            ]
            found = torch.stack(parts).sum(0) if len(parts) > 1 else parts[0]
        else:
            found = (g[:, start:stop].mT @ a[:, start:stop]).movedim(1, 0)
        rows = [found.flatten(1)]
        if layer.layout.bias is not None:
            rows.append(g[:, start:stop].sum(2).movedim(1, 0).flatten(1))
        yield rows


def _grams(layer: Layer, a: Tensor) -> Tensor:
    """<a_t, a_u>, of inputs with a 1 for the bias where there is one."""
    found = a @ a.mT
    return found if layer.layout.bias is None else found.add_(1)


def _indices(layer: Layer, examples: int) -> Tensor:
    """Of an embedding, [N, positions, 1]."""
    return by_example(layer, [call.inputs() for call in layer.calls], examples)[0]


def _inputs(layer: Layer, run: ModelRun) -> Tensor:
    """Without a 1 for the bias, [groups, N, positions, features]."""
    return by_example(layer, [call.inputs().to(run.dtype) for call in layer.calls], run.examples)


def _outputs(layer: Layer, gradients: Gradients, examples: int) -> Tensor:
    """Gradients by the outputs, [groups, N, positions, features]."""
    rows = [output_gradients(layer, call, gradients) for call in layer.calls]
    return by_example(layer, rows, examples)


def _scale_and_shift(layer: Layer, gradients: Gradients, examples: int) -> Tensor:
    rows = [scale_and_shift_gradients(layer, call, gradients) for call in layer.calls]
    return by_example(layer, rows, examples).sum(-2)
