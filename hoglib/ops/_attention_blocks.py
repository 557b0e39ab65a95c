"""Attention by blocks of rows: values and derivatives without a tensor of the size of the scores.

With P = softmax(S), S = Q K^T + B, the factors D of dropout (1 without it) and sums over keys:

    Y = (D P) V

    gradient of <G, Y>, with A = D (G V^T), C = A - sum P A and T = P C:
        by Q: T K        by K: T^T Q        by V: (D P)^T G        by B: T

    along (Q', K', V', B'), with S' = Q' K^T + Q K'^T + B' and P' = P (S' - sum P S'):
        Y' = (D P') V + (D P) V'

    the gradient along it, with A' = D (G V'^T) and T' = P' C + P (A' - sum G Y'):
        by Q: T' K + T K'        by K: T'^T Q + T^T Q'        by V: (D P')^T G        by B: T'

The gradient along a vector (the curvature) is a symmetric map: it is the backward of the gradient, the
jvp of the gradient and the backward of Y'. At each order a block computes its P anew from Q and K.
Derivatives of the curvature come from autograd of its formula, recomputed block by block. If torch's
fused kernel takes the arguments, it computes the value and the gradient.

Shapes: Q, Y and G are [N, H, L, E] (N heads of keys, H heads of queries for each; Q is scaled), K and V
[N, S, E], and B [M, 1 or H, 1 or L, 1 or S]; `places` maps each of the N to the index of its mask in M.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hoglib._core.remat.recomputation import recompute
from hoglib._core.torch_api import pytree, torch_internals
from hoglib.ops._function import by_name


class Sizes(NamedTuple):
    """Thresholds for blocks, in numbers of scores."""

    formula: int  # up to so many scores L S of a head the formula runs, because it is faster
    block: int  # scores in a block


# Measured with `python -m experiments.benchmarks.attention` on a CPU, where a block should stay in the
# cache. Not measured on a GPU, which needs many scores at once.
SIZES = {"cpu": Sizes(formula=2**18, block=2**17)}
OTHER_SIZES = Sizes(formula=2**20, block=2**24)
FEWEST_ROWS = 16  # rows of a block, at least
FUSED_MASK_ELEMENTS = 2**22  # elements of B that are written out at once for torch's fused kernel

NAMES = "qkvm"  # Q, K, V and B
KINDS = "qkvmy"  # the parts of the curvature: by Q, K, V and B, and Y'
Parts = Sequence[Tensor | None]


class Plan(NamedTuple):
    """The options of a call, without tensors."""

    causal: bool
    places: tuple[int, ...] | None  # for each of N, the index of its mask; None: one mask for all
    dropout_p: float
    fused: bool  # torch's fused kernel computes the value and the gradient
    needs: str = ""  # the wanted derivatives, characters of NAMES


class Inputs(NamedTuple):
    """The tensors of a call; shapes in the docstring of the module."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None  # a boolean mask, or B
    keys: Tensor | None  # keys of dropout's random numbers, [N, 2]


def sizes(x: Tensor) -> Sizes:
    """The thresholds for the device of x."""
    return SIZES.get(x.device.type, OTHER_SIZES)


def softmax_of(scores: Tensor, mask: Tensor | None, future: Tensor | None) -> Tensor:
    """P, with zeros in rows that attend to nothing. future: the mask of later keys, if causal."""
    if future is not None:
        scores = scores.masked_fill(future, -math.inf)
    if mask is None:
        return torch.softmax(scores, -1)
    if mask.dtype == torch.bool:
        empty = ~mask.any(-1, keepdim=True)
        scores = scores.masked_fill(~(mask | empty), -math.inf)
    else:
        empty = (mask == -math.inf).all(-1, keepdim=True)
        scores = scores + mask.to(scores.dtype).masked_fill(empty, 0.0)
    # the softmax of a row of -inf is NaN: such rows were left unmasked above, and become 0 here
    return torch.softmax(scores, -1).masked_fill(empty, 0.0)


def dropout_mask(keys: Tensor, rows: Tensor, columns: int, dropout_p: float) -> Tensor:
    """The mask of weights that dropout keeps, [N, R, columns]; rows: the row numbers [R]."""
    return random_words(keys, rows, columns) >= round(dropout_p * WORDS)


class _Block(NamedTuple):
    """The inputs of a block: rows of Q, the keys and values that these rows see, and their mask."""

    q: Tensor  # [n, H, l, E]
    k: Tensor  # [n, c, E]
    v: Tensor  # [n, c, E]
    mask: Tensor | None  # [1 or n, 1 or H, 1 or l, 1 or c]
    keys: Tensor | None  # keys of dropout's random numbers, [n, 2]
    rows: tuple[int, int, int]  # (start, stop, L)
    plan: Plan

    def weights(self) -> Tensor:
        """The softmax P, [n, H, l, c]."""
        scores = _product(self.q, self.k.transpose(1, 2))
        future = None
        if self.plan.causal:
            rows = torch.arange(*self.rows[:2], device=scores.device)
            future = rows[:, None] < torch.arange(scores.shape[-1], device=scores.device)
        return softmax_of(scores, self.mask, future)

    def factors(self) -> Tensor | None:
        """Dropout's factors D, [n, H, l, c]; None without dropout."""
        if self.keys is None:
            return None
        (heads, _), (start, stop, length) = self.q.shape[1:3], self.rows
        rows = torch.arange(start, stop, device=self.keys.device)
        rows = rows + length * torch.arange(heads, device=self.keys.device)[:, None]
        p = self.plan.dropout_p
        kept = dropout_mask(self.keys, rows.flatten(), self.k.shape[1], p)
        factors = kept.unflatten(1, self.q.shape[1:3]).to(self.q.dtype)
        return factors / (1 - p) if p < 1 else factors


class _Place(NamedTuple):
    """The position of a block in the whole tensors."""

    heads: slice  # of N
    rows: slice  # of L
    columns: int  # the number of keys, from the first

    def of(self, inputs: Inputs, plan: Plan) -> _Block:
        """The block at this place."""
        q, k, v, mask, keys = inputs
        rows = self.rows.start, self.rows.stop, q.shape[2]
        q, k, v, mask = self.of_rows(q), self.of_keys(k), self.of_keys(v), self.of_mask(mask, plan)
        return _Block(q, k, v, mask, None if keys is None else keys[self.heads], rows, plan)

    def of_rows(self, x: Any) -> Any:
        return None if x is None else x[self.heads, :, self.rows]

    def of_keys(self, x: Any) -> Any:
        return None if x is None else x[self.heads, : self.columns]

    def of_mask(self, x: Any, plan: Plan) -> Any:
        if x is None:
            return None
        if plan.places is not None:
            places = plan.places[self.heads]
            x = x[places[0] : places[0] + 1] if len(set(places)) == 1 else x[list(places)]
        return self._seen(x)

    def _seen(self, x: Tensor) -> Tensor:
        x = x[:, :, self.rows] if x.shape[2] > 1 else x
        return x[..., : self.columns] if x.shape[3] > 1 else x

    def of_each(self, parts: Parts, plan: Plan) -> Parts:
        """The block's part of each tensor; parts: tensors of the kinds KINDS + NAMES, or the first."""
        of_mask = partial(self.of_mask, plan=plan)
        of: list[Callable[[Any], Any]] = [self.of_rows, self.of_keys, self.of_keys, of_mask]
        return [take(x) for take, x in zip([*of, self.of_rows, *of], parts, strict=False)]

    def write(self, whole: list[Tensor], part: Tensor, inputs: Inputs, of_keys: bool) -> None:
        """Write a block's rows into the whole result, or add its part by keys; whole: a list of one.

        The first part creates the result, so that no parts of blocks are kept: between the temporaries
        of other blocks they would keep the CPU's allocator from returning memory.
        """
        if not whole:
            shape = inputs.k.shape[:2] if of_keys else inputs.q.shape[:3]
            whole.append(part.new_zeros(*shape, part.shape[-1]))
        if of_keys:
            self.of_keys(whole[0]).add_(part)
        else:
            self.of_rows(whole[0]).copy_(part)

    def add_to_mask(
        self, total: list[Tensor], term: Tensor, mask: Any, plan: Plan, recorded: bool
    ) -> None:
        """Add a term [n, H, l, c], summed to the mask's shape, to the whole gradient of the mask."""
        for dim in (1, 2, 3):
            term = term.sum(dim, keepdim=True) if mask.shape[dim] == 1 else term
        places = plan.places[self.heads] if plan.places else (0,) * len(term)
        if recorded:  # a recorded gradient of the mask has one block
            index = torch.tensor(places, device=term.device)
            total.append(term.new_zeros(mask.shape).index_add(0, index, term))
            return
        if not total:
            total.append(term.new_zeros(mask.shape))
        # one mask for all of N: sum over N first
        if plan.places is None:
            self._seen(total[0]).add_(term.sum(0, keepdim=True))
            return
        for place, own in zip(places, term, strict=True):
            self._seen(total[0][place : place + 1]).add_(own)


def _iterate_blocks(inputs: Inputs, plan: Plan, whole: bool) -> Iterator[list[_Place]]:
    """The places of all blocks, in groups: one list for the blocks of some heads."""
    (count, heads, length, _), keys = inputs.q.shape, inputs.k.shape[1]
    size = sizes(inputs.q).block
    rows = min(length, max(FEWEST_ROWS, size // (heads * keys)))
    step = max(1, size // (heads * rows * keys))
    if whole or torch.compiler.is_dynamo_compiling():
        rows, step = length, count
    for first in range(0, count, step):
        group = slice(first, min(first + step, count))
        spans = [slice(i, min(i + rows, length)) for i in range(0, length, rows)]
        # with causal attention, rows see no key after the block's last row
        yield [_Place(group, r, min(keys, r.stop) if plan.causal else keys) for r in spans]


def _product(a: Tensor, b: Tensor) -> Tensor:
    """[n, H, l, i] times [n, i, j], as one matrix product for all H."""
    return (_merge_heads(a) @ b).reshape(*a.shape[:3], b.shape[2])


def _transposed_product(a: Tensor, b: Tensor) -> Tensor:
    """[n, H, l, i]^T times [n, H, l, j], summed over H and l: [n, i, j]."""
    return _merge_heads(a).transpose(1, 2) @ _merge_heads(b)


def _merge_heads(x: Tensor) -> Tensor:
    """[n, H, l, i] -> [n, H l, i]; by reshape, since `is_grads_batched` has no rule for flatten."""
    n, heads, rows, width = x.shape
    return x.reshape(n, heads * rows, width)


def _drop(weights: Tensor, factors: Tensor | None) -> Tensor:
    return weights if factors is None else weights * factors


def _subtract_mean(weights: Tensor, x: Tensor) -> Tensor:
    """x - sum P x, P = weights."""
    return x - (weights * x).sum(-1, keepdim=True)


def _values_of(x: _Block) -> Parts:
    return (_product(_drop(x.weights(), x.factors()), x.v),)


def _gradients_of(x: _Block, g: Tensor) -> Parts:
    needs = x.plan.needs
    weights, factors = x.weights(), x.factors()
    by_v = _transposed_product(_drop(weights, factors), g) if "v" in needs else None
    if needs == "v":
        return None, None, by_v, None
    t = weights * _subtract_mean(weights, _drop(_product(g, x.v.transpose(1, 2)), factors))
    by_q = _product(t, x.k) if "q" in needs else None
    by_k = _transposed_product(t, x.q) if "k" in needs else None
    return by_q, by_k, by_v, t if "m" in needs else None


def _change_of_weights(x: _Block, weights: Tensor, along: Parts) -> Tensor | None:
    """P' along (Q', K', V', B'); None if it is zero."""
    dq, dk, _, dm = along
    scores: Tensor | None = None
    if dq is not None and dk is not None:  # one product of twice the width
        scores = _product(torch.cat((dq, x.q), -1), torch.cat((x.k, dk), -1).transpose(1, 2))
    elif dq is not None:
        scores = _product(dq, x.k.transpose(1, 2))
    elif dk is not None:
        scores = _product(x.q, dk.transpose(1, 2))
    if dm is not None:
        scores = dm if scores is None else scores + dm
    return None if scores is None else weights * _subtract_mean(weights, scores)


def _tangent_with(
    x: _Block, weights: Tensor, change: Tensor | None, factors: Tensor | None, along: Parts
) -> Tensor:
    dv = along[2]
    of_weights = None if change is None else _product(_drop(change, factors), x.v)
    if dv is None:
        return torch.zeros_like(_product(weights, x.v)) if of_weights is None else of_weights
    of_values = _product(_drop(weights, factors), dv)
    return of_values if of_weights is None else of_weights + of_values


def _tangents_of(x: _Block, along: Parts) -> Parts:
    weights = x.weights()
    change = _change_of_weights(x, weights, along)
    return (_tangent_with(x, weights, change, x.factors(), along),)


def _curvature_of(x: _Block, g: Tensor, along: Parts) -> Parts:
    """The gradients along a vector, and Y'."""
    needs, (dq, dk, dv, _) = x.plan.needs, along
    weights, factors = x.weights(), x.factors()
    change = _change_of_weights(x, weights, along)
    tangent = _tangent_with(x, weights, change, factors, along)
    by_v = None
    if "v" in needs:
        kept = None if change is None else _drop(change, factors)
        by_v = torch.zeros_like(x.v) if kept is None else _transposed_product(kept, g)
    if needs in ("", "v"):
        return None, None, by_v, None, tangent
    c = _subtract_mean(weights, _drop(_product(g, x.v.transpose(1, 2)), factors))
    inner = (g * tangent).sum(-1, keepdim=True)
    of_a = -inner if dv is None else _drop(_product(g, dv.transpose(1, 2)), factors) - inner
    change_of_t = weights * of_a if change is None else change * c + weights * of_a
    t = weights * c if dk is not None or dq is not None else None
    by_q = by_k = None
    if "q" in needs:
        by_q = _product(change_of_t, x.k)
        by_q = by_q if dk is None or t is None else by_q + _product(t, dk)
    if "k" in needs:
        by_k = _transposed_product(change_of_t, x.q)
        by_k = by_k if dq is None or t is None else by_k + _transposed_product(t, dq)
    return by_q, by_k, by_v, change_of_t if "m" in needs else None, tangent


def _over_blocks(
    inputs: Inputs, plan: Plan, kinds: str, run: Callable[..., Parts], *others: Parts | Tensor
) -> list[Any]:
    """run(block, *the block's part of others) for all blocks, combined.

    kinds: how to combine each result: "q", "y": concatenated by rows; "k", "v": summed by keys; "m":
    summed to the mask's shape.
    """
    recorded = is_recorded(inputs, others)
    wholes: list[list[Tensor]] = [[] for _ in kinds]
    for places in _iterate_blocks(inputs, plan, whole=recorded and "m" in plan.needs):
        groups: list[list[Tensor]] = [[] for _ in kinds]
        for place in places:
            block = place.of(inputs, plan)
            given = [
                place.of_rows(x) if isinstance(x, Tensor) else place.of_each(x, plan)
                for x in others
            ]
            # recompute each block in backward, or the graph would hold P of all blocks
            parts = recompute(run, block, *given) if recorded else run(block, *given)
            for kind, part, whole, group in zip(kinds, parts, wholes, groups, strict=True):
                if part is None:
                    continue
                if kind == "m":
                    place.add_to_mask(whole, part, inputs.mask, plan, recorded)
                elif not recorded:
                    place.write(whole, part, inputs, of_keys=kind in "kv")
                elif kind in "kv":
                    _add_keys(group, part, inputs.k.shape[1])
                else:
                    group.append(part)
        for kind, whole, group in zip(kinds, wholes, groups, strict=True):
            if group:
                whole.append(group[0] if kind in "kv" else torch.cat(group, 2))
    return [torch.cat(whole) if whole else None for whole in wholes]


def is_recorded(*given: Any) -> bool:
    """Whether autograd or vmap records operations on these tensors: no in-place writes then."""
    if torch_internals.transforms_active():
        return True
    tensors = pytree.tensors(given)
    wanted = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    return wanted or any(map(torch_internals.is_batched, tensors))


def _add_keys(total: list[Tensor], term: Tensor, length: int) -> None:
    """Add a term by keys to the total, a list of one; a causal block's term may have fewer keys."""
    columns = term.shape[1]
    term = term if columns == length else F.pad(term, (0, 0, 0, length - columns))
    total[:] = [total[0] + term] if total else [term]


def _derivative_of_curvature(which: str, x: _Block, g: Tensor, along: Parts, given: Parts) -> Parts:
    """The vjp of `_curvature_of` for cotangents of (by Q, K, V, B, and Y'), or its jvp for tangents
    of (Q, K, V, B, G, vector)."""
    shape = (*x.q.shape[:3], x.k.shape[1])
    mask = x.mask if x.mask is not None and x.mask.is_floating_point() else None
    values: list[Any] = [x.q, x.k, x.v, mask, g, *along]
    for i in (3, 8):  # B and B': expand to the scores, since `_over_blocks` sums gradients itself
        values[i] = None if values[i] is None else values[i].expand(shape).contiguous()
    known = [i for i, value in enumerate(values) if value is not None]
    primals = tuple(values[i] for i in known)

    def curvature(*variables: Tensor) -> list[Tensor]:
        own: Any = dict(zip(known, variables, strict=True))
        q, k, v, b, g, *vector = (own.get(i) for i in range(len(values)))
        block = x._replace(q=q, k=k, v=v, mask=x.mask if b is None else b)
        return [part for part in _curvature_of(block, g, vector) if part is not None]

    kinds = [kind for kind in KINDS if kind in (*x.plan.needs, "y")]
    outputs, pull, *_ = torch.func.vjp(curvature, *primals)
    if which == "jvp":  # as the transpose of the linear vjp: forward mode may be active already
        _, turn, *_ = torch.func.vjp(pull, list(outputs))
        (found,) = turn(_fill_zeros([given[i] for i in known], primals))
        return by_name(KINDS, kinds, found)
    arrived = [c for kind, c in zip(KINDS, given, strict=True) if kind in kinds]
    gradients = dict(zip(known, pull(list(_fill_zeros(arrived, outputs))), strict=True))
    return [gradients.get(i) for i in range(len(values))]


def _fill_zeros(parts: Parts, like: Sequence[Tensor]) -> tuple[Tensor, ...]:
    both = zip(parts, like, strict=True)
    return tuple(torch.zeros_like(y) if x is None else x.expand_as(y).contiguous() for x, y in both)


# The maps. Each takes the inputs, its vectors (G, Q', ...), and the plan.


def compute_values(*given: Any) -> tuple[Tensor, Tensor]:
    """Y, and the logarithm of the sums of exp(S) for the fused kernel's gradient."""
    *tensors, plan = given
    inputs = Inputs(*tensors)
    if plan.fused and not is_recorded(inputs):
        return _fused_values(inputs, plan)
    (y,) = _over_blocks(inputs, plan, "y", _values_of)
    return y, y.new_empty(len(y), 0)


def compute_gradients(*given: Any) -> Parts:
    """The gradients of <G, Y>."""
    *tensors, g, y, logsumexp, plan = given
    inputs = Inputs(*tensors)
    fused = logsumexp is not None and logsumexp.shape[-1] > 0 and "m" not in plan.needs
    if fused and not is_recorded(inputs, g):
        return _fused_gradients(inputs, g, y, logsumexp, plan)
    return _over_blocks(inputs, plan, "qkvm", _gradients_of, g)


def compute_tangents(*given: Any) -> Tensor:
    """Y' along (Q', K', V', B')."""
    *tensors, dq, dk, dv, dm, plan = given
    return _over_blocks(Inputs(*tensors), plan, "y", _tangents_of, (dq, dk, dv, dm))[0]


def compute_curvature(*given: Any) -> Parts:
    """The gradients along a vector, and Y'."""
    *tensors, g, dq, dk, dv, dm, plan = given
    return _over_blocks(Inputs(*tensors), plan, KINDS, _curvature_of, g, (dq, dk, dv, dm))


def derivative_of_curvature(which: str, *given: Any) -> Parts:
    """The derivative of compute_curvature.

    which: "vjp": the gradients of <C, curvature> by Q, K, V, B, G and the vector; "jvp": the tangent of
    the curvature for tangents Q', K', V', B', G' and a tangent of the vector.
    """
    (*tensors, g, dq, dk, dv, dm), along, plan = given[:10], given[10:-1], given[-1]
    kinds = KINDS + NAMES if which == "vjp" else KINDS
    run = partial(_derivative_of_curvature, which)
    return _over_blocks(Inputs(*tensors), plan, kinds, run, g, (dq, dk, dv, dm), along)


def _fused_rows(inputs: Inputs, plan: Plan) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """The calls of the fused kernel: the head of queries, the rows, and the mask as numbers B."""
    (count, heads, length, _), keys, mask = inputs.q.shape, inputs.k.shape[1], inputs.mask
    rows = length
    if mask is not None and mask.shape[2] > 1:
        elements = keys * (1 if plan.places is None else count)
        # the kernel takes B as numbers: write out some rows of a large mask at a time
        rows = max(FEWEST_ROWS, FUSED_MASK_ELEMENTS // elements)
    for head in range(heads):
        for start in range(0, length, rows):
            place = _Place(slice(0, count), slice(start, min(start + rows, length)), keys)
            b = place.of_mask(mask, plan)
            if b is not None:
                b = b[:, head : head + 1] if b.shape[1] > 1 else b
                if b.dtype == torch.bool:
                    b = torch.zeros_like(b, dtype=inputs.q.dtype).masked_fill_(~b, -math.inf)
            yield slice(head, head + 1), place.rows, b


def _fused_values(inputs: Inputs, plan: Plan) -> tuple[Tensor, Tensor]:
    q, k, v = inputs[:3]
    y, logsumexp = q.new_empty(*q.shape[:3], v.shape[-1]), q.new_empty(q.shape[:3])
    for head, rows, b in _fused_rows(inputs, plan):
        part, sums = torch_internals.cpu_attention(
            q[:, head, rows], k.unsqueeze(1), v.unsqueeze(1), b, plan.causal
        )
        y[:, head, rows], logsumexp[:, head, rows] = part, sums
    return y, logsumexp


def _fused_gradients(inputs: Inputs, g: Tensor, y: Tensor, logsumexp: Tensor, plan: Plan) -> Parts:
    q, k, v = inputs[:3]
    by_q, by_k, by_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for head, rows, b in _fused_rows(inputs, plan):
        g_i, q_i, y_i, sums = (x[:, head, rows] for x in (g, q, y, logsumexp))
        given = g_i, q_i, k.unsqueeze(1), v.unsqueeze(1), y_i, sums, b, plan.causal
        part, of_k, of_v = torch_internals.cpu_attention_gradients(*given)
        by_q[:, head, rows] = part
        by_k += of_k.squeeze(1)
        by_v += of_v.squeeze(1)
    found = by_q, by_k, by_v, None
    return [x if name in plan.needs else None for name, x in zip(NAMES, found, strict=True)]


# Random numbers by a counter, so that a block can draw its part of a large array, and draw it again:
# Philox4x32-10 (Salmon, Moraes, Dror and Shaw, Parallel random numbers: as easy as 1, 2, 3, 2011) in
# integer operations of torch, which run on every device and in captured graphs.

WORDS = 2**32
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
KEY_STEPS = 0x9E3779B9, 0xBB67AE85
ROUNDS = 10


def draw_keys(count: int, device: torch.device) -> Tensor:
    """Keys for `count` arrays, [count, 2], from torch's generator of the device."""
    first, second = torch.randint(WORDS, (2,), device=device).unbind()
    return torch.stack([first.expand(count), second ^ torch.arange(count, device=device)], 1)


def random_words(keys: Tensor, rows: Tensor, columns: int) -> Tensor:
    """Random integers from 0 to 2^32 - 1, [N, R, columns]; keys: [N, 2]; rows: row numbers [R]."""
    key = [keys[:, i, None, None] for i in (0, 1)]
    zero = torch.zeros_like(rows)[None, :, None]
    quads = torch.arange(-(-columns // 4), device=keys.device)[None, None, :]
    # the counter of four words: (column // 4, row, 0, 0)
    c = [quads + zero, rows[None, :, None] + 0 * quads, 0 * key[0], 0 * key[0]]
    for step in range(ROUNDS):
        (high_0, low_0), (high_1, low_1) = (
            _product_of_words(m, x) for m, x in zip(MULTIPLIERS, (c[0], c[2]), strict=True)
        )
        # 32-bit words in 64-bit integers: mask after each addition
        k_0, k_1 = ((k + step * s) & (WORDS - 1) for k, s in zip(key, KEY_STEPS, strict=True))
        c = [high_1 ^ c[1] ^ k_0, low_1, high_0 ^ c[3] ^ k_1, low_0]
    return torch.stack(torch.broadcast_tensors(*c), -1).flatten(-2)[..., :columns]


def _product_of_words(factor: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """The upper and the lower 32-bit word of the unsigned product (the signed bits are equal)."""
    product = x * factor
    return (product >> 32) & (WORDS - 1), product & (WORDS - 1)
