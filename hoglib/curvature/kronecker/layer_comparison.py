"""Compare the recorded layers of a model's run with autograd.

    sum_r g_r a_r^T == dl/dW        for l, a random sum of the outputs of half of the examples

A difference means that the recorder missed a use of the parameter. A row with gradients from both
halves means that the layer mixes examples. The rows with gradients from each half show the order of
the rows. The comparison runs on two examples if the batch can be split.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from hoglib._core.messages import validation
from hoglib._core.modules.state import preserve_random_state
from hoglib._core.numerics.trust import SUMS, agree
from hoglib._core.substrate.autograd import Vector, materialize_grads
from hoglib._core.torch_api import pytree
from hoglib.curvature.batches.data import first_examples
from hoglib.curvature.kronecker.kronecker import not_none
from hoglib.curvature.kronecker.layer_calls import LayerCall, unlike_rows
from hoglib.curvature.kronecker.model_run import (
    CallPlace,
    Gradients,
    Layer,
    ModelRun,
    Refusal,
    RowOrder,
    attempted,
    call_places,
    input_rows,
    is_embedding,
    mask_examples,
    record,
    uncovered,
)

Lengths = frozenset[tuple[CallPlace, int]]  # of `RowOrder`


def checked_run(run: ModelRun, needs_examples: bool) -> ModelRun:
    """The run after its layers were compared with autograd, with the row order that was found. Layers
    that differ raise, or with unsupported="diagonal" are left to single examples."""
    run, refusal = _compared(run, needs_examples)
    while refusal is not None:
        run, refusal = _compared(run.without(refusal), needs_examples)
    return run


def with_selected_rows(run: ModelRun, needs_examples: bool) -> ModelRun:
    """The run of a later batch after `compare_selected_rows`. Layers that mix examples raise, or with
    unsupported="diagonal" are left to single examples."""
    run, refusal = compare_selected_rows(run, needs_examples)
    return run if refusal is None else checked_run(run.without(refusal), needs_examples)


def _compared(run: ModelRun, needs_examples: bool) -> tuple[ModelRun, Refusal | None]:
    """The run with the row order that one comparison found, and a refusal or None. The comparison is
    on two examples if the batch can be split, else on the batch."""
    (batch,) = run.recording.problem.args
    # Two examples make the comparison cheap.
    small = first_examples(batch, 2)
    both = None if small is None else attempted(partial(_at_two, run, small, needs_examples))
    if both is not None:
        few, run = both
        if few.recording.expanded == run.recording.expanded:
            mismatch = _first_mismatch(few, run) if needs_examples else None
            if mismatch is None:
                return compare_selected_rows(run, needs_examples)
            leaves = [r.leaf for r in (mismatch.weight, mismatch.bias) if r]
            return run, Refusal(unlike_rows(mismatch, run.examples), frozenset(leaves))
    lengths, refusal = compare(run, needs_examples)
    if refusal is None and not _expands_alike(run):
        run = run.rerun(batch, RowOrder(expand=False))
        lengths, refusal = compare(run, needs_examples)
    return run.reread(lengths=lengths), refusal


def _at_two(run: ModelRun, small: object, needs_examples: bool) -> tuple[ModelRun, ModelRun] | None:
    """The run at two examples, and the run of the batch with the row order found there. None if two
    examples cannot decide: a layer is not called, or the comparison fails."""
    few = run.rerun(small)
    called = {layer.layout for layer in few.layers}
    if uncovered(few) is not None or not called.issuperset(layer.layout for layer in run.layers):
        return None
    lengths, refusal = compare(few, needs_examples)
    if refusal is not None:
        return None
    if run.recording.expanded and not _expands_alike(few):
        (batch,) = run.recording.problem.args
        run = run.rerun(batch, RowOrder(expand=False))
    return few, run.reread(lengths=lengths)


def _expands_alike(run: ModelRun) -> bool:
    """Whether a run without expanded embeddings has equal outputs."""
    if not run.recording.expanded:
        return True
    problem, metric = run.recording.problem, run.options.metric
    with preserve_random_state():
        others = record(problem, metric, False).outputs
    pairs = zip(run.recording.outputs, others, strict=True)
    return all(agree(a, b, SUMS) for a, b in pairs)


def _first_mismatch(few: ModelRun, run: ModelRun) -> LayerCall | None:
    """The first call with another number of rows per example in the batch than at two examples."""
    for a, b in zip_longest(few.calls, run.calls):
        if a is None or b is None:
            return b or run.calls[-1]
        if a.rows * run.examples != b.rows * few.examples:
            return b
    return None


def compare(run: ModelRun, needs_examples: bool) -> tuple[Lengths, Refusal | None]:
    """Compare the gradient of a random sum of outputs, as the layers give it, with autograd's.

    This finds uses of parameters that were not recorded, and layers that mix examples. Returns
    `RowOrder.lengths`, and a refusal or None.
    """
    calls, leaves = run.calls, run.recording.leaves
    column = _probe(run, next(iter(_halves(run)), None))
    found = run.recording.backward([*(call.edge for call in calls), *leaves], column)
    gradients = Gradients(run, found[: len(calls)], column)
    wanted = materialize_grads(found[len(calls) :], leaves)
    lengths, refusal = compare_examples(run, needs_examples, gradients)
    if refusal is not None:
        return lengths, refusal
    ours = [p.new_zeros((1, *(p.shape or (1,))), dtype=run.dtype) for p in leaves]
    summed: list[Any] = [0.0] * len(leaves)
    everything: Any = 0.0
    if run.unexplained:
        everything = torch.stack([x.norm().to(run.dtype) for x in wanted]).norm().double()
    for parts in run.of_single_examples(column) if run.separable else ():
        for i, part in zip(run.unexplained, parts, strict=True):
            summed[i] = everything
            ours[i] += part.sum(0).view(ours[i].shape)
    for layer in run.layers:
        terms = sum(call.rounding(gradients.like_output(call)).double() for call in layer.calls)
        for region in layer.layout.regions:
            summed[region.leaf] += terms
        layer.layout.scatter(summed_gradient(layer, gradients, run.dtype).unsqueeze(0), ours)
    off = []
    for one, p, given, terms in zip(ours, leaves, wanted, summed, strict=True):
        difference = one.view(p.shape).sub_(given).norm()
        # 10 sqrt(eps) allows for TensorFloat-32 and sums in another order. eps * terms allows for a
        # gradient that is exactly zero, as of the bias of attention's keys: what is computed is
        # rounding.
        eps = torch.finfo(p.dtype).eps
        off.append(difference > 10 * (eps**0.5 * given.norm().to(run.dtype) + eps * terms))
    answers = torch.stack(off).tolist()  # one wait for the device
    # If not separable, unexplained leaves take autograd's own backward passes: nothing to compare.
    right = () if run.separable else run.unexplained
    wrong = [i for i, one in enumerate(answers) if one and i not in right]
    if not wrong:
        return lengths, None
    name = pytree.paths(run.space.params)[wrong[0]]
    return lengths, run.refusal(
        f"expected params[{name!r}] to be used by layers alone, got a gradient of which these are only "
        "a part: a custom Function, scripted or compiled code uses it too, or the model's own "
        "torch.autograd.grad (`hog.laplacian`, `hog.directional` and `hog.jet` have layers); ",
        wrong,
    )


def summed_gradient(layer: Layer, gradients: Gradients, dtype: torch.dtype) -> Tensor:
    """sum_r g_r a_r^T, the gradient by the layer's matrix V."""
    _, out, into = layer.layout.sizes
    role = layer.layout.role
    total: Any = 0.0
    for call, rows in zip(layer.calls, gradients.rows(layer), strict=True):
        if role.matrix == "diagonal":
            part = rows.sum(0).reshape(1, 1, -1)
        elif is_embedding(layer):
            at, g = call.inputs()[0, :, 0], rows[0]
            seen = at >= 0
            part = g.new_zeros(into, out).index_add(0, at[seen], g[seen]).T.unsqueeze(0)
        elif call.has_patches() and layer.layout.weight is not None:
            g = gradients.like_output(call).to(dtype)
            part = call.weight_gradients(g, 0, len(g)).sum(0)
            if layer.layout.bias is not None:
                part = torch.cat([part, rows.sum(1).unsqueeze(-1)], -1)
        else:
            part = rows.mT @ input_rows(layer, call, dtype)
        if role.matrix == "elementwise":
            # Take the slope of the first call for all: if slopes differ, the comparison with autograd
            # fails.
            part = (role.stored(part.unsqueeze(0)) * not_none(layer.calls[0].slope)).unsqueeze(0)
        total = total + part
    return total


def compare_examples(
    run: ModelRun, needs_examples: bool, first: Gradients | None = None
) -> tuple[Lengths, Refusal | None]:
    """Check that each row has gradients from the outputs of one example only. Where rows must be
    assigned to examples, find their order. Returns what `compare` returns.

    first: the gradients of the probe of the first half, if they are known.
    """
    if run.examples < 2 or not run.layers:
        return run.order.lengths, None
    halves = _halves(run)
    touched: dict[int, list[Tensor]] = {id(call): [] for call in run.calls}
    for half in halves:
        gradients, first = first or run.gradients(_probe(run, half)), None
        for call in run.calls:
            touched[id(call)].append((gradients.of(call) != 0).any(-1).any(0))
    both = [(layer, call) for layer in run.layers for call in layer.calls]
    tried = {
        id(call): _possible_lengths(run, call, len(touched[id(call)][0])) for call in run.calls
    }
    asked: list[Tensor] = []
    for _, call in both:
        of_call = touched[id(call)]
        pairs = zip(of_call[::2], of_call[1::2], strict=True)
        asked.append(_any_of(a & b for a, b in pairs))
        asked += [_mismatches(run, halves, of_call, length) for length in tried[id(call)]]
    # Read all answers at once: one wait for the device.
    answers = iter(torch.stack(asked).tolist())
    refused: list[tuple[Layer, LayerCall]] = []
    lengths = {id(call): call.consecutive for call in run.calls}
    for layer, call in both:
        needed = needs_examples or layer.layout.role.matrix != "kronecker"
        mixed, *wrong = (next(answers) for _ in range(1 + len(tried[id(call)])))
        fits = [n for n, off in zip(tried[id(call)], wrong, strict=True) if not off]
        if needed and fits and not mixed:
            whole = fits[0] * run.examples == len(touched[id(call)][0])
            lengths[id(call)] = 0 if whole else fits[0]
        elif mixed or needed:
            refused.append((layer, call))
    places = zip(run.calls, call_places(run.calls), strict=True)
    found = frozenset((place, lengths[id(call)]) for call, place in places if lengths[id(call)])
    if not refused:
        return found, None
    layer, call = refused[0]
    leaves = [r.leaf for one, _ in refused for r in one.layout.regions]
    name = pytree.paths(run.space.params)[layer.layout.first.leaf]
    one = validation.OF_ONE.format("example") if len(call.shape) == 1 else ""
    return found, run.refusal(
        f"expected layers that treat the {run.examples} examples apart, in the rows of their leading "
        f"dimension, got {layer.layout.role.name} with {name} with outputs {tuple(call.shape)}. Batch "
        "norm in train mode mixes examples, and dropout hides which belong to a row: call "
        "model.eval(). What is called once for all examples, as position embeddings are, or for some "
        f"of them, has no gradients of each{one}: ",
        leaves,
    )


def compare_selected_rows(run: ModelRun, needs_examples: bool) -> tuple[ModelRun, Refusal | None]:
    """Find the row order again, if the model chooses rows by values of the batch (sorting, routing,
    masks): the order may differ from batch to batch. Returns the run and a refusal or None."""
    roles = {layer.layout.role.matrix for layer in run.layers}
    if not (run.recording.selects and (needs_examples or roles - {"kronecker"})):
        return run, None
    lengths, refusal = compare_examples(run, needs_examples)
    return run.reread(lengths=lengths), refusal


def _halves(run: ModelRun) -> list[Tensor]:
    """Masks [N]: for each bit of an example's number, the examples with the bit at 0 and at 1. Every
    two examples differ in some bit."""
    # One halving is not enough: with it, rows of a class token after attention were assigned to other
    # examples.
    numbers = torch.arange(run.examples, device=run.device)
    bits = range((run.examples - 1).bit_length())
    return [(numbers >> bit) % 2 == value for bit in bits for value in (0, 1)]


def _probe(run: ModelRun, half: Tensor | None) -> Vector:
    """A random column of the outputs, zero outside the half; None is all examples."""
    # A generator of its own: the check must not advance torch's global generator.
    generator = torch.Generator().manual_seed(0)
    column = []
    for y in run.recording.outputs:
        u = torch.randn(y.shape, generator=generator, dtype=torch.float32, device="cpu")
        column.append(u.to(y.device, y.dtype, non_blocking=True))
    return mask_examples(column, half)


def _possible_lengths(run: ModelRun, call: LayerCall, rows: int) -> list[int]:
    """Possible numbers of consecutive rows of one example, the likeliest first: all rows of the
    example; 1, if positions come first; the rows of one direction, if directions of a derivative come
    first."""
    N, first = run.examples, call.shape[0] if call.shape else 1
    if not rows:
        return [0]
    lengths = [rows // N, 1, rows // (N * first), rows // first]
    if first != N and call.shape[1:2] == (N,):
        # Few gradients may fit several lengths: then the shape decides.
        lengths.insert(0, rows // (N * first))
    return list(dict.fromkeys(n for n in lengths if n and not rows % (N * n)))


def _mismatches(
    run: ModelRun, halves: Sequence[Tensor], touched: Sequence[Tensor], length: int
) -> Tensor:
    """Whether the rows with gradients from each half contradict this number of consecutive rows."""
    example = torch.arange(len(touched[0]), device=run.device) // length % run.examples
    return _any_of(has & ~half[example] for half, has in zip(halves, touched, strict=True))


def _any_of(masks: Iterable[Tensor]) -> Tensor:
    return torch.stack([mask.any() for mask in masks]).any()
