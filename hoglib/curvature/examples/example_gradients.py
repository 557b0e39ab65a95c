"""Per-example gradients of a batch, their norms and products; the noise scale; and influence functions.

Norms and products come from the inputs a_nt of each layer at the positions t of example n, and the
gradients g_nt by the outputs of the layer:

    dW_n = sum_t g_nt a_nt^T        <dW_n, dW_m> = sum_tu <g_nt, g_mu> <a_nt, a_mu>
"""

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from operator import length_hint
from pathlib import Path
from typing import Any, Literal, NamedTuple, Unpack, get_args

import torch
from torch import Tensor, nn

from hoglib import errors
from hoglib._core.messages import results, validation
from hoglib._core.messages.files import ScoreFile, digest
from hoglib._core.messages.progress import ProgressBar
from hoglib._core.modules.module_kinds import BATCH_NORMS
from hoglib._core.numerics.trust import SUMS, agree, memoize_on
from hoglib._core.problem import Options, Policy, Problem, check_option_names
from hoglib._core.runtime.logger import LOGGER
from hoglib._core.runtime.source_location import warn
from hoglib._core.substrate.autograd import Vector, materialize_grads, without_graph
from hoglib._core.substrate.fingerprint import sums_and_norms
from hoglib._core.substrate.gradient_graph import walk
from hoglib._core.substrate.placement import refuse_sharded
from hoglib._core.torch_api import pytree
from hoglib.capture.within import run_uncompiled, when_compiled
from hoglib.curvature.algebra.vector_space import Space, Tree
from hoglib.curvature.batches.data import (
    Processes,
    as_dict,
    constants_of,
    in_fixed_order,
    is_batch,
    to_device,
)
from hoglib.curvature.batches.single_examples import by_vmap_or_loop, number_of_examples
from hoglib.curvature.kronecker.kfac_operator import KFACOperator
from hoglib.curvature.kronecker.layer_comparison import checked_run, with_selected_rows
from hoglib.curvature.kronecker.model_run import (
    AT_ONCE,
    FactorOptions,
    Gradients,
    Layer,
    ModelRun,
    RowOrder,
    attempted,
    by_example,
    is_embedding,
    layer_gradients,
)
from hoglib.curvature.maps.fisher_metric import FisherMetric
from hoglib.curvature.maps.jacobian_product import jvp
from hoglib.curvature.maps.likelihood import (
    Relation,
    compare_halves,
    example_counts,
    nearby,
    token_axis,
)
from hoglib.curvature.operators.operators import GGNOperator
from hoglib.curvature.training.optimizers import KFAC_OPTIONS, NEWTON_OPTIONS
from hoglib.ring import ring, warn_if_derivatives_not_finite
from hoglib.verification.entry_points import examined_functions

ROWS_AT_ONCE = 2**26  # numbers in one chunk of per-example gradients


@when_compiled(run_uncompiled)
def per_example_gradients(
    loss: object,
    params: Tree,
    batch: object,
    *,
    chunk_size: int | None = None,
    **options: Unpack[Options],
) -> tuple[Tensor, Tree]:
    r"""The loss and the gradient of each example of a batch.

        l_n = loss(params, example n), a batch of one        g_n = d l_n / d params

    The gradient of the batch is the mean of g_n if the criterion is a mean over examples, and the sum
    if it is a sum. A criterion of torch, or `hoglib.language_model_loss`, may divide by D = sum_n d_n,
    with d_n the summed class weights of example n's labels other than ignore_index: l_n and g_n are
    then multiplied by N d_n / D, and the mean of g_n is again the gradient of the batch.

    Args:
        loss: The function ``loss(params, batch)`` that returns a scalar, for instance from
            `hoglib.functional_loss`.
        params: Where the gradients are taken; any pytree of floating-point tensors.
        batch: A batch of any kind. Every tensor with as many rows as the first one has the examples as
            its leading dimension; each example gets all other tensors whole.
        chunk_size: Examples at once, by `torch.func.vmap`. Default: all. Without a batching rule for an
            operation, examples loop.
        **options: ``stand_ins`` (with a batching rule for attention) and ``remat``, as
            :class:`hoglib.Options` describes them.
    Returns:
        The losses [N], and the gradients, like params with a leading dimension of N.
    Raises:
        ArgumentValueError: for batch norm in train mode, and for losses that couple examples, such as
            contrastive losses: an example alone has a different loss.
    Shape:
        - losses: [N]
        - gradients: [N, *shape] for each parameter
    Example:
        >>> x = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
        >>> loss = lambda p, x: (x @ p).square().mean()
        >>> values, g = hog.per_example_gradients(loss, torch.ones(2), x)
        >>> g
        tensor([[2., 0.],
                [0., 8.]])
    """
    check_apart(loss, params, batch, "per_example_gradients")
    values, gradients = _of_single_examples(loss, params, batch, chunk_size, **options)
    counts = example_counts(loss, batch)
    if counts is None:
        return values, gradients
    factors = counts / counts.mean()  # N d_n / D
    return scaled(values, factors), pytree.map_tensors(lambda g: scaled(g, factors), gradients)


def scaled(rows: Tensor, factors: Tensor) -> Tensor:
    """Each row times its factor; 0 for the factor 0, even if the row is NaN (0 / 0)."""
    one = factors.to(rows).view(-1, *[1] * (rows.dim() - 1))
    return torch.where(one == 0, 0, rows * one)


def _of_single_examples(
    loss: Any, params: Tree, batch: Any, chunk_size: int | None = None, **options: Unpack[Options]
) -> tuple[Tensor, Tree]:
    """l_n and g_n from batches of one example, for a loss that `check_apart` has passed."""
    refuse_sharded("per_example_gradients", pytree.leaves(params))
    own = as_dict(batch)
    count = number_of_examples(own)
    size = validation.none_or_at_least("chunk_size", chunk_size, 1) or count
    policy = Policy.of("per_example_gradients", options, names=("stand_ins", "remat"))
    problem = Problem.of(policy, loss, params, own)
    with torch.inference_mode(False), ring(policy, loss, first_order=True) as blocks:
        problem = problem.entered(blocks)
        parts = (pytree.rows(own, count, start, start + size) for start in range(0, count, size))
        chunks = [by_vmap_or_loop(problem.with_args(part)) for part in parts]
    values, gradients = zip(*chunks, strict=True)
    joined = [torch.cat(parts) for parts in zip(*gradients, strict=True)]
    warn_if_derivatives_not_finite(problem, value := torch.cat(values), joined)
    return value, problem.tree(joined)


def gradient_rows(
    loss: object, params: Tree, batch: object, weights: Tensor | None = None
) -> Iterator[Tensor]:
    """The gradients of the examples of a batch, times their weights, as rows [n, P], in chunks."""
    size = max(1, ROWS_AT_ONCE // max(pytree.size(params), 1))
    own = as_dict(batch)
    count = number_of_examples(own)
    for start in range(0, count, size):
        piece = pytree.rows(own, count, start, start + size)
        _, gradients = _of_single_examples(loss, params, piece)
        rows = torch.cat([leaf.reshape(len(leaf), -1) for leaf in pytree.leaves(gradients)], 1)
        yield rows if weights is None else scaled(rows, weights[start : start + size])


def check_apart(loss: object, params: Tree, batch: object, caller: str) -> None:
    """Raise for a loss that couples examples; warn of a mean that does not divide by the number of
    examples. Checked at the first batch of each shape."""
    validation.loss_function("loss", loss)
    check_norms(loss)
    own = as_dict(batch)
    if number_of_examples(own) < 2:
        return
    shapes = tuple((x.shape, x.dtype) for x in pytree.tensors(own))
    found = memoize_on(loss, ("halves", shapes), lambda: _halves(loss, params, own) or "unknown")
    if found in ("coupled", "mean and sum"):
        raise errors.ArgumentValueError(
            f"{caller}: expected a loss that is a sum or mean over examples, got one that couples "
            "them: the loss of a batch is not made of those of its halves, as for contrastive losses, "
            "correlations, and softmax or statistics over the batch. An example alone has another "
            "loss, or none; use `hoglib.GGNOperator`, or the gradients of whole batches."
        )
    if found == "no rows" or (found == "weighted" and example_counts(loss, own) is None):
        memoize_on(loss, (caller, found), lambda: _warn_of_rows(caller, found))


# What a warning says of a loss, by its relation to the losses of halves.
_NO_EXAMPLES = {
    "weighted": "expected a mean over examples, got a loss that divides by another number, of "
    "weights, a mask or labels that are ignored. The gradient of an example is that of a batch "
    "of one, which loses its weight, and the mean over examples is not the gradient of the "
    "batch. Pass torch's own criterion as a module, or a criterion with the sum over examples.",
    "no rows": "expected a batch whose examples are the rows of its first tensor, got a loss that "
    "raises at half of the rows, or does not depend on them. An example gets tensors with other "
    "leading dimensions whole, such as concatenated targets: pad them, to a row for each example, "
    "and put the examples first.",
}


def _warn_of_rows(caller: str, found: str) -> bool:
    warn(f"{caller}: {_NO_EXAMPLES[found]}")
    return True


def _halves(loss: object, params: Tree, batch: object) -> Relation | None:
    """The relation of the loss of a batch to the losses of its halves."""
    policy = Policy("per_example_gradients")
    with torch.inference_mode(False), ring(policy, loss, examine=False) as blocks:
        problem = Problem.of(policy, loss, params, batch).entered(blocks)

        def at(seed: int, part: object) -> Tensor:
            leaves = nearby(problem.leaves, seed)
            return without_graph(lambda: problem.with_args(part)(*leaves))

        return compare_halves(at, batch)


def check_norms(loss: object) -> None:
    """Raise for a batch norm in train mode."""
    model = getattr(loss, "model", None)
    for name, module in model.named_modules() if isinstance(model, nn.Module) else ():
        if isinstance(module, BATCH_NORMS) and module.training:
            raise errors.ArgumentValueError(
                f"model.{name}: expected layers that treat each example by itself, got a "
                f"{type(module).__name__} in train mode, which mixes the examples of a batch; call "
                "model.eval(), or use group norm."
            )


CALLER = "per_example_gradient_norms"
_OPTIONS = FactorOptions(FisherMetric("empirical"), "expand", True)


@when_compiled(run_uncompiled)
def per_example_gradient_norms(loss: object, params: Tree, batch: object) -> Tensor:
    r"""The norm of the gradient of each example of a batch, without the gradients.

        |d l_n / d params|        l_n = loss(params, example n), a batch of one

    Layers that `hoglib.KFACOperator` knows take one forward and one backward pass of the batch. Their
    norms come from a layer's inputs and output gradients: from products between its T positions (ghost
    norms) if T^2 is at most the number of its weights, else from the gradients of this layer, for some
    examples at a time. If a parameter is used in any other way, or the loss is no
    `hoglib.functional_loss`, norms come from `hoglib.per_example_gradients`, some examples at a time;
    ``logging.getLogger("hoglib")`` tells why, at level DEBUG. Layers are compared with autograd at the
    first call of a loss at these shapes, the second, the fourth, and so on.

    Args:
        loss: As for `hoglib.per_example_gradients`.
        params: Where the gradients are taken: a dict of tensors by name, or for other losses than a
            `hoglib.functional_loss` any pytree.
        batch: As for `hoglib.per_example_gradients`.
    Returns:
        The norms [N], over all parameters together.
    Raises:
        ArgumentValueError: for batch norm in train mode: an example alone has another loss.
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
    # squares of half precision overflow from 256 on: the root is taken before the conversion
    return _products_of(loss, params, batch, False).sqrt().to(Space(params).dtype)


@when_compiled(run_uncompiled)
def per_example_gradient_products(loss: object, params: Tree, batch: object) -> Tensor:
    r"""The dot products of the gradients of the examples of a batch.

        K_nm = <d l_n / d params, d l_m / d params>

    Computed as in `per_example_gradient_norms`, with the gradients of one layer in memory at a time;
    no gradients for a linear layer with one position per example.

    Args:
        loss: As for `per_example_gradient_norms`.
        params: As for `per_example_gradient_norms`.
        batch: As for `per_example_gradient_norms`.
    Returns:
        The products [N, N].
    Raises:
        ArgumentValueError: for batch norm in train mode: an example alone has another loss.
    Example:
        >>> x = torch.tensor([[1.0, 0.0], [1.0, 2.0]])
        >>> loss = lambda p, x: (x @ p).sum()
        >>> hog.curvature.per_example_gradient_products(loss, torch.ones(2), x)
        tensor([[1., 1.],
                [1., 5.]])
    """
    return _products_of(loss, params, batch, True).to(Space(params).dtype)


def _products_of(loss: object, params: Tree, batch: object, pairs: bool) -> Tensor:
    """Squared norms [N], or with pairs the products [N, N]."""
    caller = "per_example_gradient_products" if pairs else "per_example_gradient_norms"
    check_apart(loss, params, batch, caller)
    counts = example_counts(loss, batch)
    factors = None if counts is None else counts / counts.mean()
    found = _layer_by_layer(loss, params, batch, pairs, factors)
    if found is not None:
        return found
    rows = gradient_rows(loss, params, batch, factors)
    parts = [torch.cat(list(rows))] if pairs else rows
    return torch.cat([_products_of_rows(part, pairs) for part in parts])


def _layer_by_layer(
    loss: object, params: Tree, batch: object, pairs: bool, factors: Tensor | None
) -> Tensor | None:
    """Squared norms [N], or with pairs the products [N, N], from layers; None if a parameter is used
    outside of known layers."""
    space = Space(params)
    space.refuse_sharded("per_example_gradient_products" if pairs else "per_example_gradient_norms")
    own = as_dict(batch)
    count = number_of_examples(own)
    # Layers need the logits as outputs; `owner`, the user's loss, keeps the records.
    owner, loss = loss, loss.with_logits() if hasattr(loss, "with_logits") else loss
    if not (hasattr(loss, "outputs") and isinstance(params, dict)):
        return None
    policy = Policy(CALLER, stand_ins=False)
    with ring(policy, loss, first_order=True) as blocks:
        problem = Problem.of(policy, loss, params, own).entered(blocks)
        (own,) = problem.args
        try:
            known = _Compared.at(owner, problem)
            run = _run_of_layers(known, problem, space)
            if run.examples != count:
                raise errors.ArgumentValueError("outputs: expected one for each example.")
        except errors.HoglibError as error:
            # An error about layers. An error of the user's code returns in the fallback.
            LOGGER.debug("%s: from the gradients of single examples, because of %s", CALLER, error)
            return None
        column = known.by_outputs(run.outputs()[0], loss, own, factors)
        gradients = run.gradients(column)
        with torch.no_grad():
            shape = [count] * (2 if pairs else 1)
            total = torch.zeros(shape, dtype=run.dtype, device=run.device)
            # Skip layers without rows, such as an expert without examples.
            for layer in (one for one in run.layers if any(call.rows for call in one.calls)):
                total += _products(layer, gradients, run, pairs)
    return total


@dataclass
class _Compared:
    """The record of earlier calls of a loss at batches of these shapes. Calls 1, 2, 4, 8, ... compare
    again, and calls in which the data leads to other operations."""

    calls: int = 0
    order: RowOrder | None = None  # how to read the layers, after a comparison with autograd
    operations: tuple[str, ...] = ()  # the operations of the compared run
    is_mean: bool = False  # the gradient by an example's outputs is N times the batch's gradient

    @staticmethod
    def at(loss: Any, problem: Problem) -> "_Compared":
        """The record for a loss and the shapes of a problem; empty if this call compares again."""
        shapes = [(x.shape, x.dtype) for x in pytree.tensors((problem.leaves, problem.args))]
        modules = getattr(loss, "model", nn.Identity()).modules()
        key = CALLER, problem.structure, *shapes, *(module.training for module in modules)
        known = memoize_on(loss, key, _Compared) or _Compared()
        known.calls += 1
        if not known.calls & (known.calls - 1):
            known.order, known.is_mean = None, False
        return known

    def by_outputs(self, outputs: Any, loss: Any, batch: Any, factors: Tensor | None) -> Vector:
        """The gradient of each example's loss, times the example's factor, by its outputs."""

        def of_batch() -> Vector:
            own = [y.clone().requires_grad_() for y in pytree.leaves(outputs) if pytree.is_float(y)]
            with torch.enable_grad():  # clones: a criterion may work in place
                value = loss.criterion(pytree.filled(outputs, [y.clone() for y in own]), batch)
                return materialize_grads([*torch.autograd.grad(value, own, allow_unused=True)], own)

        if self.is_mean and factors is not None:
            return [len(g) * g for g in of_batch()]
        rows = _by_outputs(outputs, loss, batch, factors)
        found = None if factors is None else attempted(of_batch)
        self.is_mean = found is not None and all(
            agree(len(g) * g, row, SUMS) for g, row in zip(found, rows, strict=True)
        )
        return rows


def _run_of_layers(known: _Compared, problem: Problem, space: Space) -> ModelRun:
    """A run of the model, with its layers compared with autograd in this call or an earlier call."""
    if known.order is not None:
        run = ModelRun.of(problem, space, _OPTIONS, known.order)
        if not run.has_new_layers() and _operations(run) == known.operations:
            return with_selected_rows(run, True)
    run = checked_run(ModelRun.of(problem, space, _OPTIONS), True)
    known.order, known.operations = run.order_of_all(None), _operations(run)
    return run


def _operations(run: ModelRun) -> tuple[str, ...]:
    """The operations between the parameters and the outputs."""
    return tuple(type(node).__name__ for node, _ in walk(run.recording.outputs))


def _by_outputs(outputs: Any, loss: Any, batch: Any, factors: Tensor | None) -> Vector:
    """The gradient of each example's loss, times the example's factor, by its outputs."""

    def criterion(shifts: Vector, both: Any) -> Tensor:
        own, example = both
        left = iter(shifts)
        parts, form = pytree.flatten(own)
        moved = [x + next(left) if pytree.is_float(x) else x for x in parts]
        return loss.criterion(pytree.unflatten(moved, form), example)

    # The gradient by a shift of zero is the gradient by the outputs.
    zeros = [torch.zeros_like(y[:1]) for y in pytree.leaves(outputs) if pytree.is_float(y)]
    _, gradients = _of_single_examples(criterion, zeros, (outputs, batch))
    rows = [g.squeeze(1) for g in gradients]
    return rows if factors is None else [scaled(g, factors) for g in rows]


def _products(layer: Layer, gradients: Gradients, run: ModelRun, pairs: bool) -> Tensor:
    """The squared norms of a layer's per-example gradients, [N], or with pairs their products, [N,
    N]."""
    N, diagonal = run.examples, layer.layout.role.matrix == "diagonal"
    if not diagonal and not is_embedding(layer) and _by_gradients(layer, run, pairs):
        parts = layer_gradients(layer, gradients, run)
        if pairs:
            return _products_of_rows(torch.cat([torch.cat(part, 1) for part in parts]), True)
        squares = ([_products_of_rows(rows, False) for rows in part] for part in parts)
        return torch.cat([torch.stack(part).sum(0) for part in squares])
    g = gradients.of_examples(layer, N)
    if diagonal:
        return _products_of_rows(g.sum(-2), pairs)
    a = by_example(layer, [call.inputs() for call in layer.calls], N)
    if is_embedding(layer) and layer.layout.weight is not None:
        return _products_of_embedding(a[0], g[0], pairs)
    a, with_bias = a.to(run.dtype), layer.layout.bias is not None
    # a bias has the input 1, which adds 1 to each inner product of inputs
    if pairs:
        a, g = a.flatten(1, 2), g.flatten(1, 2)
        found = ((a @ a.mT).add_(with_bias) * (g @ g.mT)).sum(0)
        return found.view(N, len(found) // N, N, -1).sum((1, 3))
    if a.shape[2] == 1:
        return ((a.square().sum(3) + with_bias) * g.square().sum(3)).sum((0, 2))
    chunks = max(1, AT_ONCE // (len(a) * a.shape[2] ** 2))
    split = zip(a.split(chunks, 1), g.split(chunks, 1), strict=True)
    return torch.cat([((x @ x.mT).add_(with_bias) * (y @ y.mT)).sum((0, 2, 3)) for x, y in split])


def _products_of_embedding(at: Tensor, g: Tensor, pairs: bool) -> Tensor:
    """`_products` for an embedding. at: the indices [N, T, 1]. g: the gradients by the embedded rows
    [N, T, out]."""
    if not pairs:
        same = (at == at.mT) & (at >= 0)  # [N, T, T]: positions with an equal index
        return ((g @ g.mT) * same).sum((1, 2))
    N, places, features = len(at), at.flatten(), g.flatten(0, 1)
    owner = torch.arange(N, device=at.device).repeat_interleave(g.shape[1])
    seen, rows = places.unique(return_inverse=True)  # only the used rows of the table
    table = features.new_zeros(N * len(seen), features.shape[1])
    table.index_add_(0, owner * len(seen) + rows, features * (places >= 0).unsqueeze(1))
    return _products_of_rows(table.view(N, -1), True)


def _by_gradients(layer: Layer, run: ModelRun, pairs: bool) -> bool:
    """Whether a layer's gradients have fewer numbers than the products between its positions: with T
    positions T^2 > into out; for pairs N T^2 > into out."""
    groups, out, into = layer.layout.sizes
    T = sum(call.rows for call in layer.calls) // run.examples
    if layer.layout.role.matrix == "elementwise":
        return True
    if layer.layout.weight is None or (pairs and groups * (run.examples * T) ** 2 > AT_ONCE):
        return True
    return (run.examples if pairs else 1) * T * T > into * out


def _products_of_rows(rows: Tensor, pairs: bool) -> Tensor:
    """The squared norms of rows, or with pairs their products."""
    if pairs:
        return rows @ rows.T
    dtype = torch.promote_types(rows.dtype, torch.float32)
    return torch.linalg.vector_norm(rows, dim=1, dtype=dtype).square()  # no temporary squares


@results.result
class NoiseScale(NamedTuple):
    """The noise of gradients.

    Attributes:
        scale: tr S / |g|^2. The gradient of a much smaller batch is mostly noise.
        variance: tr S, the summed variances of the gradient of one example.
        square: |g|^2, with g the gradient of the expected loss.
    """

    scale: Tensor
    variance: Tensor
    square: Tensor


def gradient_noise_scale(loss: object, params: Tree, data: Any) -> NoiseScale:
    r"""The simple noise scale of gradients, an estimate of the largest useful batch size.

        B = tr S / |g|^2        tr S = sum_n |g_n - m|^2 / (N - 1)        |g|^2 = |m|^2 - tr S / N

    with the gradients g_n of examples and their mean m; both estimates are unbiased. If N is far too
    small, the estimate of |g|^2, and B, may be negative.

    Args:
        loss: The function ``loss(params, batch)``, a mean over examples.
        params: Where the gradients are taken; any pytree of floating-point tensors.
        data: A batch, or a DataLoader or another re-iterable of batches.
    Returns:
        `NoiseScale`, of three scalar tensors.
    Raises:
        ArgumentValueError: for fewer than two examples.
    References:
        McCandlish, Kaplan, Amodei and the OpenAI Dota Team, An Empirical Model of Large-Batch Training,
        2018, section 2.2 and appendix A.1.
    Example:
        >>> loss = lambda p, x: (p * x).mean()
        >>> x = torch.tensor([1.0, 3.0])
        >>> hog.curvature.gradient_noise_scale(loss, torch.tensor(1.0), x).variance
        tensor(2.)
    """
    space = Space(params)
    space.refuse_sharded("gradient_noise_scale")
    count, mean = 0, torch.zeros(space.size, dtype=torch.float64, device=space.device)
    spread, weight = torch.zeros((), dtype=torch.float64, device=space.device), 0.0
    for batch in [data] if is_batch(data) else data:
        moved_batch = to_device(batch, space.device)
        check_apart(loss, params, moved_batch, "gradient_noise_scale")
        weights = example_counts(loss, moved_batch)
        weight += number_of_examples(moved_batch) if weights is None else float(weights.sum())
        for rows in gradient_rows(loss, params, moved_batch, weights):
            part = rows.double()
            own = part.mean(0)
            # Merge two sets of examples by Chan's formula.
            total = count + len(part)
            spread += (part - own).square().sum()
            spread += (own - mean).square().sum() * (count * len(part) / total)
            mean += (own - mean) * (len(part) / total)
            count = total
    if count < 2:
        raise errors.ArgumentValueError(f"data: expected at least two examples, got {count}.")
    scale = (count / weight) ** 2  # gradients in units of the mean weight of an example
    variance = scale * spread / (count - 1)
    square = scale * mean.square().sum() - variance / count
    dtype = torch.promote_types(space.dtype, torch.float32)  # squares overflow in half precision
    return NoiseScale(*(x.to(dtype) for x in (variance / square, variance, square)))


Solver = Literal["cg", "kfac", "ekfac"]


@when_compiled(run_uncompiled)
@validation.explain_arguments
def influence(
    loss: object,
    params: Tree,
    train: object,
    query: Tree,
    *,
    solver: Solver | KFACOperator = "ekfac",
    damping: float,
    per_token: bool = False,
    out: str | os.PathLike[str] | None = None,
    tol: float | None = None,
    **options: Any,
) -> Tensor:
    r"""The influence of each training example on the loss of each query.

        s_nq = d loss(params(e), query q) / d e  at e = 0
             = -grad loss(query q)^T (G + damping I)^-1 grad loss(example n)
        s_ntq: for the loss of token t of the example alone        s_nq = sum_t s_ntq

    params(e) minimizes the mean loss of the training data, plus e loss(example n), plus
    damping/2 |params|^2. The loss of the example has the example's weight in the mean, as in
    `hoglib.per_example_gradients`. G is the Gauss-Newton matrix of the training data. A positive score
    means that more weight on the example raises the loss of the query. To leave the example out is
    e = -1/N: the loss of the query changes by about -s_nq / N.

    If params are DTensors, each process gives its part of train, and gets the rows of this part; query
    must be equal in all processes. ``out`` and query=None are then refused. Each process holds whole
    params and whole gradients of queries.

    Args:
        loss: From `hoglib.functional_loss`.
        params: The parameters as they were trained, a dict of tensors by name.
        train: The training data: a batch, or a DataLoader or another re-iterable of batches, in a fixed
            order.
        query: The queries, in the forms of train. None for the self-influence s_nn of each training
            example, at most 0, without any other score.
        solver: How the inverse is applied. "cg": exactly, by conjugate gradients. "kfac", "ekfac": by a
            `hoglib.KFACOperator`, without or with corrected eigenvalues, for deep networks. Or a
            KFACOperator of the training data: its factors are computed once for many calls.
        damping: As above: the weight decay that the parameters were trained with, or more.
        per_token: Return the scores of the tokens of language models (of the positions of any
            cross-entropy), at the positions of the logits that predict the tokens; 0 for an ignored
            target. Each query takes a Jacobian-vector product of the logits of a batch, which are in
            memory. All batches must have one length.
        out: The path of a ``.npy`` file for the scores, which are returned as a memory map, in float32
            at least. Rows are written in order. A repeated call continues after the last written row,
            with batches of any size. The file ``<out>.call`` identifies the call (by hashes of params,
            data and queries), and keeps the factors. If you pass an operator, keep its
            ``state_dict()``: a new draw gives different factors. Needs NumPy.
        tol: The tolerance of "cg", as in `LinearOperator.solve`.
        **options: Options of `hoglib.GGNOperator` or `hoglib.KFACOperator`, such as kind="exact" (by
            default the factors of wide outputs are drawn) and progress=True, which also counts batches;
            with an operator that you pass only progress.
    Returns:
        The scores [train, query], with per_token [train, tokens, query], or [train] for query=None, in
        the order of the data.
    Raises:
        ArgumentTypeError: for an unknown option of the operator.
        ArgumentValueError: for a DataLoader that shuffles (rows could not be assigned to examples),
            batch norm in train mode, tol with a solver other than "cg", an operator on other
            parameters, an existing file `out` of another call, and with per_token a loss without
            tokens.
        OutputError: if `out` is not writable; raised before any computation.
        NonFiniteError: for an example with NaN or infinity in its gradient.
    References:
        Koh and Liang, Understanding Black-box Predictions via Influence Functions, 2017, equation 2.
        Grosse et al., Studying Large Language Model Generalization with Influence Functions, 2023,
        section 3 (ekfac). Bae et al., If Influence Functions Are the Answer, Then What Is the
        Question?, 2022 (G and damping).
    Example:
        >>> model = nn.Linear(1, 1, bias=False)
        >>> with torch.no_grad():
        ...     _ = model.weight.fill_(1.0)
        >>> loss, params = hog.functional_loss(model, F.mse_loss), hog.trainable_params(model)
        >>> data = torch.tensor([[1.0], [1.0]]), torch.tensor([[0.0], [2.0]])
        >>> query = torch.ones(1, 1), torch.tensor([[2.0]])
        >>> hog.influence(loss, params, data, query, damping=0.0, solver="cg")
        tensor([[ 2.],
                [-2.]])
        >>> K = hog.KFACOperator(loss, params, data)
        >>> hog.influence(loss, params, data, None, damping=0.0, solver=K)
        tensor([-2., -2.])
    """
    shared = Space(params)
    hashed = out is not None or shared.placement.is_sharded

    def join(error: Exception) -> None:
        Processes("influence", options.get("processes"), None).join(error, shared.device)

    with shared.raise_in_all("influence", join):
        fitted = solver if isinstance(solver, KFACOperator) else None
        method = "operator" if fitted else validation.choice("solver", solver, get_args(Solver))
        validation.number("damping", damping, minimum=0)
        for name, data in (("train", train), ("query", query)):
            in_fixed_order(name, data)
        of_factors = ("kind", "generator", "check_deterministic", *KFAC_OPTIONS)
        names = {"cg": NEWTON_OPTIONS, "operator": ("progress",)}.get(method, of_factors)
        check_option_names("influence", options, names)
        if tol is not None and method != "cg":
            raise errors.ArgumentValueError(
                f"tol: expected none with solver={solver!r}, which has a closed form, got {tol}; it "
                "is for solver='cg'."
            )
        if validation.boolean("per_token", per_token) and query is None:
            raise errors.ArgumentValueError(
                "query: expected queries with per_token=True, got None."
            )
        if fitted:
            check_same(fitted, shared)
        if shared.placement.is_sharded and (out is not None or query is None):
            raise errors.UnsupportedError(
                "influence: expected queries, and no out=, for params that are DTensors, got "
                f"{'out=' if query is not None else 'query=None'}; save the rows that each process "
                "returns, and for self-influence pass some examples at a time as queries."
            )
        examples = Examples.of("train", loss, train, hashed)
        queries = None if query is None else Examples.of("query", loss, query, hashed)
    if fitted:
        warn_of_other_values(fitted, shared)
    asked = queries and queries.digest, method, float(damping), per_token
    shared.check_same_call("influence", *asked, what="queries, and options,")
    w, file = examples.weights, None
    count, total = shared.all_sum(w.new_tensor([len(w), w.sum()])).tolist()
    scale = -count / total
    problem = Problem.of(Policy("influence"), loss, params)
    own = problem.gathered()
    with examined_functions("influence", first_order=method != "cg"):
        space = shared if own is problem else Space(own.params(own.leaves))
        shape = [len(w), *([] if queries is None else [len(queries.weights)])]
        if per_token:
            # The first batch determines the number of positions.
            zero = torch.zeros(1, space.size, dtype=space.dtype, device=space.device)
            first = to_device(as_dict(next(iter(examples.data))), space.device)
            (slopes,) = _token_slopes(own.loss, space, zero, first, None)
            shape[1:1] = slopes.shape[1:-1]
        if out is not None:
            kept = {k: v for k, v in options.items() if isinstance(v, str | int | float)}
            file = ScoreFile(Path(out), {
                "shape": shape, "dtype": "float64" if space.dtype == torch.float64 else "float32",
                "params": digest([*space.leaves(), *constants_of(loss, space.leaves())]),
                "training data": examples.digest, "queries": queries and queries.digest,
                "damping": float(damping),
                "solver": digest(pytree.leaves(fitted.state_dict())) if fitted else method,
                "options": {**kept, "tol": tol, "progress": None},
            })  # fmt: skip
            if file.done == len(w):  # complete
                return file.scores
        scores = file.scores if file else torch.empty(shape, dtype=space.dtype, device=space.device)
        bar = ProgressBar("influence", options.get("progress", False), "batch")
        if method == "cg":
            G = GGNOperator(loss, params, train, **options)
            solve: Callable[[Tensor], Tensor] = partial(G.solve, damping=damping, tol=tol)
        else:
            corrected: Any = {"eigenvalue_corrected": method == "ekfac"}
            K = fitted or KFACOperator(loss, params, train, **corrected, **options)
            if file and file.factors:
                K.load_state_dict(file.factors)
            elif file and not fitted:
                file.keep(K.state_dict())
            solve = K.inverse(damping).matvec
        if own is not problem:
            solve = partial(_solve_whole, shared, solve)
        rows: Any = partial(gradient_rows, own.loss, space.params)
        if queries is not None:
            D = torch.empty(shape[-1], space.size, dtype=space.dtype, device=space.device)
            with shared.raise_in_all("influence"):
                parts = queries.parts(own.loss, space, bar, lambda batch, weights: rows(batch))
                for at, g in parts:
                    D[at] = g
            # One block for conjugate gradients: the columns share the passes over the data.
            for d in D.split(len(D) if method == "cg" else max(1, ROWS_AT_ONCE // space.size)):
                d.copy_(solve(d.T).T)
        rows = partial(_token_slopes, own.loss, space, D) if per_token else rows
        for at, g in examples.parts(own.loss, space, bar, rows, file.done if file else 0):
            # Both gradients have the example's weight w; a query has no weight: divide once.
            if queries is None:
                slopes = (g * solve(g.T).T).sum(1) / w.where(w > 0, 1)[at].to(g)
            else:
                slopes = g if per_token else g @ D.T
            if slopes.shape[1:] != scores.shape[1:]:
                raise errors.ArgumentValueError(
                    f"train: expected {shape[1:-1]} positions in each batch with per_token=True, as in "
                    f"the first, got {list(slopes.shape[1:-1])}; pad all to one length."
                )
            scores[at] = scale * slopes
    return scores


def _solve_whole(shared: Space, solve: Callable[[Tensor], Tensor], columns: Tensor) -> Tensor:
    """Solve for whole columns [P, k], equal in all processes, by a solver of sharded vectors."""
    parts = shared.add_rows(columns.T * shared.placement.weight)
    return shared.whole_rows(solve(parts.T).T).T


class Examples(NamedTuple):
    """Training examples or queries, counted in a pass over the data."""

    name: str  # "train" or "query", for messages
    data: Iterable[Any]  # the batches
    weights: Tensor  # [N], the summands of the denominator of a mean
    digest: str  # a hash of the examples, equal for batches of any size

    @classmethod
    def of(cls, name: str, loss: Any, data: Any, hashed: bool) -> "Examples":
        """Count the examples in a pass. hashed: also hash them."""
        batches, weights, found = [data] if is_batch(data) else data, [], []
        for batch in map(as_dict, batches):
            count, counts = number_of_examples(batch), example_counts(loss, batch)
            ones = torch.ones(count, dtype=torch.float64, device="cpu")
            weights.append(ones if counts is None else counts)
            # one hash for each example: the digest must not depend on the size of batches
            rows = (pytree.rows(batch, count, n, n + 1) for n in range(count if hashed else 0))
            found += [digest(pytree.tensors(row)) for row in rows]
        if not weights:
            raise errors.ArgumentValueError(f"{name}: expected at least one batch, got none.")
        return cls(name, batches, torch.cat(weights), digest(found))

    def parts(
        self,
        loss: object,
        space: Space,
        bar: ProgressBar,
        compute: Any,
        done: int = 0,
        caller: str = "influence",
    ) -> Iterator[tuple[slice, Tensor]]:
        """Yields (places, compute(batch, weights=)) for the examples from number `done` on, in
        chunks."""
        at = 0
        with bar.over(self.name, length_hint(self.data) or None):
            for number, batch in enumerate(map(as_dict, self.data)):
                count = number_of_examples(batch)
                first = min(max(done - at, 0), count)
                at += first
                bar.advance(first / count)
                if first == count:  # the file has all rows of this batch
                    continue
                own = to_device(pytree.rows(batch, count, first, count), space.device)
                check_apart(loss, space.params, own, caller)
                w = self.weights[at : at + count - first]
                for part in compute(own, weights=None if bool((w == 1).all()) else w):
                    if not bool(part.isfinite().all()):
                        raise errors.NonFiniteError(
                            f"{self.name}: expected examples with finite gradients, got one with NaN "
                            f"or infinity in batch {number}; look for NaN in the data and in the "
                            "parameters."
                        )
                    yield slice(at, at + len(part)), part.to(space.dtype)
                    at += len(part)
                    bar.advance(len(part) / count)


def _token_slopes(loss: Any, space: Space, D: Tensor, batch: Any, weights: Any) -> Iterable[Tensor]:
    """The derivatives of the losses of single tokens along d_q, [n, T, Q].

    <d l_n / d f_nt, (J d_q)_nt>        f_nt the logits at position t, J the Jacobian of the logits
    """
    loss = loss.with_logits() if hasattr(loss, "with_logits") else loss
    with torch.no_grad():
        f = loss.outputs(space.params, batch) if hasattr(loss, "outputs") else None
        axis = token_axis(loss, f, batch)
        (by_logits,) = _by_outputs(f, loss, batch, weights)
        pairs = (jvp(lambda p: loss.outputs(p, batch), space.params, space.tree(d)) for d in D)
        return [torch.stack([(by_logits * tangent).sum(axis) for _, tangent in pairs], -1)]


def check_same(K: KFACOperator, space: Space) -> None:
    """Raise unless the operator is on the parameters of the space."""
    if not K.space.same(space):
        raise errors.ArgumentValueError(
            "solver: expected an operator on params, with the same names, shapes, dtypes and "
            f"placements, got one on {validation.listing(pytree.paths(K.params))} {K.shape}."
        )


def warn_of_other_values(K: KFACOperator, space: Space) -> None:
    """Warn if the operator was computed at other values of the parameters."""
    K.blocks()  # computes the factors at the first use
    if K.computed_at not in (None, sums_and_norms(space.leaves())):
        warn(
            "influence: expected factors that were computed at these values of params, got a "
            "KFACOperator that was computed at others; call its `update()` after a change."
        )
