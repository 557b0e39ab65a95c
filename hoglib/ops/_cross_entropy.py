"""Cross-entropy by Functions: of logits, and of a linear layer with logits for some rows at a time.

    z_n = W h_n + b        p_n = softmax(z_n)        l_n = log sum_c exp(z_nc) - q_n . z_n
    r_n = p_n - q_n        dl_n/dh_n = W^T r_n       dl_n/dW = r_n h_n^T      dl_n/db = r_n

and, along (h', W', b') with z'_n = W h'_n + W' h_n + b' and s_n = p_n (z'_n - p_n . z'_n),

    (dl_n/dh_n)' = W^T s_n + W'^T r_n        (dl_n/dW)' = s_n h_n^T + r_n h'_n^T        (dl_n/db)' = s_n

The terms with s are the Gauss-Newton product. Value, gradient and product are closed forms that need
two tensors of the size of a chunk's logits. Derivatives of the product come from autograd of its
formula, recomputed chunk by chunk.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hoglib._core.messages import validation
from hoglib._core.messages.validation import TorchValueError
from hoglib._core.remat.recomputation import recompute
from hoglib._core.runtime.freed_memory import return_freed_memory
from hoglib._core.torch_api import torch_internals
from hoglib._core.torch_api.mixed_precision import (
    full_precision,
    is_autocast,
    upcast_half,
    without_autocast,
)
from hoglib.errors import ArgumentIndexError, ArgumentTypeError, ArgumentValueError
from hoglib.ops._define import promote_dtypes
from hoglib.ops._function import Saved, apply_function, by_name, make_function
from hoglib.ops._losses import reduce_loss, reduction_number
from hoglib.ops._pointwise import mul
from hoglib.ops._products import logsumexp, sum
from hoglib.ops._stand_in import SILENT, stands_in_for

__all__ = ["linear_cross_entropy", "softmax_cross_entropy"]

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]  # by h, W and b
NAMES = "hWb"
CHUNK_ELEMENTS = 2**22  # logits in a chunk, by default


def softmax_cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    r"""Cross-entropy of the softmax of logits, as `torch.nn.functional.cross_entropy`.

        L = log sum_c exp(z_c)        p_c = exp(z_c - L)        loss = sum_c q_c (L - z_c)
        dloss/dz_c = p_c - q_c        d2loss/dz_c dz_d = p_c (c = d) - p_c p_d

    z are the logits of one row, q = (1 - e) (c = target) + e / C with e the label_smoothing, or for
    class probabilities q = (1 - e) target + e / C. The Function keeps its inputs only and recomputes p,
    so that beside the logits no second tensor of their size is held. Differentiable to any order in
    logits and probabilities, in reverse and forward mode, under vmap. Under autocast it runs in
    float32, as torch's own does.

    Args:
        logits: z, a real floating-point tensor.
        target: Whole numbers, the class of each row, or floating-point class probabilities.
        reduction: "mean" divides the sum over rows by the number of targets that are not ignore_index,
            NaN if there is none; "sum"; "none" gives one loss for each row. Default: "mean".
        ignore_index: The class of rows that do not count; their loss is 0. Default: -100.
        label_smoothing: e, from 0 to 1. Default: 0.
    Returns:
        The loss.
    Raises:
        TypeError: for integer or complex logits, or a target of another dtype.
        ValueError: for shapes that do not fit, classes out of range (on a CPU), and unknown options.
    Shape:
        - logits: [C], [N, C] or [N, C, d1, ...]
        - target: integers [], [N] or [N, d1, ...], or probabilities shaped like logits
        - loss: [], or with reduction "none" the shape of a target of integers
    Example:
        >>> z, t = torch.zeros(1, 2), torch.tensor([0])
        >>> f = lambda z: hog.ops.softmax_cross_entropy(z, t)
        >>> f(z), hog.hvp(f, z, torch.tensor([[1.0, 0.0]]))[1]
        (tensor(0.6931), tensor([[ 0.2500, -0.2500]]))
    """
    validation.real("logits", logits)
    validation.tensor("target", target)
    number = reduction_number(validation.choice("reduction", reduction, ("mean", "sum", "none")))
    smoothing = validation.fraction("label_smoothing", label_smoothing)
    axis = min(logits.dim() - 1, 1)
    _check_target(logits, target, axis)
    if is_autocast(logits):
        logits = logits.float()
    if target.is_floating_point():
        logits, target = promote_dtypes(logits, target)
        q = target * (1 - smoothing) + smoothing / logits.shape[axis] if smoothing else target
        # the maximum cancels in L - z, and exp does not overflow
        shifted = logits - logits.detach().amax(axis, True)
        rows = sum(mul(q, logsumexp(shifted, axis, keepdim=True) - shifted), axis)
        return reduce_loss(rows, number)
    counts = target != ignore_index
    # ignored rows need some valid class for gather
    inputs = logits, torch.where(counts, target, 0).long().unsqueeze(axis), axis, smoothing
    try:
        rows = apply_function(_SOFTMAX, _softmax_forward, *inputs)
    except RuntimeError as error:  # a check beforehand would wait for a GPU, and fail in a tracer
        if "out of bounds" not in str(error):
            raise
        raise ArgumentIndexError(
            f"target: expected classes from 0 to {logits.shape[axis] - 1} or ignore_index "
            f"{ignore_index}, got another; {error}."
        ) from None
    return reduce_loss(torch.where(counts, rows.squeeze(axis), 0), number, counts)


def _average(values: Tensor, classes: Tensor, axis: int, smoothing: float) -> Tensor:
    """sum_c q_c v_c for each row, with keepdim."""
    picked = values.gather(axis, classes)
    if not smoothing:
        return picked
    return (1 - smoothing) * picked + smoothing * (values.sum(axis, True) / values.shape[axis])


def _softmax_forward(z: Tensor, *rows: Any) -> Tensor:
    return -_average(torch.log_softmax(z, rows[1]), *rows)


def _softmax_vjp(saved: Saved, g: Tensor) -> tuple[Tensor | None, ...]:
    z, classes, axis, smoothing = saved.inputs
    # compute p from z again: an output of log_softmax that forward saved would have no graph
    grad = torch.softmax(z, axis) * g
    if smoothing:
        grad = grad - g * (smoothing / z.shape[axis])
    return grad.scatter_add(axis, classes, g * (smoothing - 1)), None, None, None


def _softmax_jvp(saved: Saved, tangent: Tensor, *_: None) -> Tensor:
    z, *rows = saved.inputs
    return (torch.softmax(z, rows[1]) * tangent).sum(rows[1], True) - _average(tangent, *rows)


def _check_target(logits: Tensor, target: Tensor, axis: int) -> None:
    if target.is_complex() or target.dtype == torch.bool:
        raise ArgumentTypeError(
            f"target: expected integers or floating-point probabilities, "
            f"got {validation.describe(target)}; convert it with `target.long()`."
        )
    rows = logits.shape[:axis] + logits.shape[axis + 1 :]
    expected = logits.shape if target.is_floating_point() else rows
    if logits.dim() == 0 or logits.shape[axis] == 0 or target.shape != expected:
        raise ArgumentValueError(
            f"softmax_cross_entropy: expected logits [C], [N, C] or [N, C, d1, ...] with target [], "
            f"[N] or [N, d1, ...] of integers, or probabilities shaped like logits; "
            f"got logits {tuple(logits.shape)} and target {validation.describe(target)}."
        )


@stands_in_for(
    getattr(F, "linear_cross_entropy", None),
    lacks=f"chunked, a wrong double backward{SILENT}",
    modes=("rr",),
    since=(2, 13),
)
def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    options: object = None,
) -> Tensor:
    r"""Cross-entropy of a linear layer, as torch.nn.functional.linear_cross_entropy of torch 2.13.

        z = input W^T + b        y = sum_c w_c q_c (log sum_d e^z_d - z_c)

    The logits z exist for a chunk of rows at a time, at every order: value, gradient and
    Hessian-vector product hold two tensors [chunk, C] beside their arguments and results. torch's is
    differentiable once. Differentiable to any order, in every mode, under vmap; forward mode holds
    more than one chunk.

    Args:
        input: A real floating-point tensor.
        linear_weight: W.
        target: The classes, of dtype long, or probabilities q.
        linear_bias: b. Default: none.
        weight: w, one for each class. Default: 1.
        reduction: "mean" (for classes weighted, and without rows of ignore_index), "sum" or "none".
            Default: "mean".
        ignore_index: The class of rows that do not count. Default: -100.
        label_smoothing: From 0 to 1. Default: 0.
        options: The rows of a chunk: an integer, or torch's LinearCrossEntropyOptions (its
            ``batch_chunk_size`` is read). Default: rows with four million logits in total.
    Returns:
        The loss, of the dtype of input.
    Raises:
        RuntimeError: for shapes that do not fit, as in torch.
        ValueError: for a wrong reduction, as in torch.
    Shape:
        - input: (N, F) or (F)
        - linear_weight: (C, \*, F)
        - linear_bias: (C, \*)
        - target: (N, \*), or probabilities (N, C, \*)
        - weight: (C)
        - y: (), or with reduction "none" (N, \*)
    Example:
        >>> x, W, t = torch.ones(1, 2), torch.zeros(2, 2), torch.tensor([0])
        >>> f = lambda W: hog.ops.linear_cross_entropy(x, W, t)
        >>> f(W), hog.hvp(f, W, torch.tensor([[1.0, 0.0], [0.0, 0.0]]))[1]
        (tensor(0.6931), tensor([[ 0.2500,  0.2500],
                [-0.2500, -0.2500]]))
    """
    validation.real("input", input)
    _check_linear(input, linear_weight, linear_bias)
    batch, classes, positions = input.shape[:-1], linear_weight.shape[0], linear_weight.shape[1:-1]
    probabilities = target.shape == (*batch, classes, *positions)
    if probabilities and ignore_index is not None:
        raise TorchValueError("ignore_index cannot be specified when target contains probabilities")
    ignored = -100 if ignore_index is None else ignore_index
    of_classes = target.dtype == torch.long and target.shape == (*batch, *positions)
    if not (target.is_floating_point() if probabilities else of_classes):  # torch raises its error
        z = F.linear(input, linear_weight.reshape(-1, linear_weight.shape[-1]))
        z = z.reshape(*batch, classes, *positions)
        return F.cross_entropy(z, target, weight, None, ignored, None, reduction, label_smoothing)
    number = reduction_number(reduction)
    size = chunk_size_of(options, classes)
    h = input.reshape(-1, input.shape[-1])
    count = positions.numel()
    # a linear layer for each position of a loss of several dimensions
    W = linear_weight.reshape(classes, count, -1)
    b = None if linear_bias is None else linear_bias.reshape(classes, count)
    at = target.reshape(len(h), classes, count) if probabilities else target.reshape(len(h), count)
    each = [
        Rows(h, W[:, k], None if b is None else b[:, k], at[..., k], label_smoothing, size)
        for k in range(count)
    ]
    losses, shares = zip(*(_losses_and_shares(rows, weight, ignored) for rows in each), strict=True)
    loss, share = torch.stack(losses, 1), torch.stack(shares, 1)
    loss = loss.reshape((*batch, *positions)) if reduction == "none" else loss
    value = reduce_loss(loss, number, share)
    return value if is_autocast(input) else value.to(input.dtype)


def chunk_size_of(options: object, classes: int) -> int:
    """The rows of a chunk, for the `options` of :func:`linear_cross_entropy`."""
    size = getattr(options, "batch_chunk_size", options)
    if not isinstance(size, int):
        return max(1, CHUNK_ELEMENTS // max(1, classes))
    return validation.at_least("options", size, 1)


class Rows(NamedTuple):
    """The arguments of the losses of N rows."""

    h: Tensor  # the inputs of the linear layer, [N, F]
    W: Tensor  # [C, F]
    b: Tensor | None  # [C]
    # classes [N] from 0 to C - 1, probabilities [N, C] for the formula, None for the Gauss-Newton part
    targets: Any
    smoothing: float  # label_smoothing
    chunk_size: int  # rows of a chunk


def _losses_and_shares(rows: Rows, weight: Tensor | None, ignored: int) -> tuple[Tensor, Tensor]:
    """The loss of each row, and its weight in the mean."""
    h, t = rows.h, rows.targets
    if t.is_floating_point():
        return _formula(rows, weight), torch.ones_like(h[:, 0], dtype=upcast_half(h[:0]).dtype)
    counts = t != ignored
    rows = rows._replace(targets=torch.where(counts, t, 0))
    share = counts.to(upcast_half(h[:0]).dtype)
    if weight is not None:
        share = share * weight.to(share.dtype)[rows.targets]
    loss = row_losses(rows) if weight is None else _formula(rows, weight)
    return torch.where(counts, loss, 0), share


def row_losses(rows: Rows) -> Tensor:
    """l_n, [N], for classes."""
    h, W, b = rows[:3]
    if is_autocast(h):  # torch runs the product in half precision, and the rest in float32
        dtype = torch.get_autocast_dtype(h.device.type)
        rows = rows._replace(h=h.to(dtype), W=W.to(dtype), b=None if b is None else b.to(dtype))
    with without_autocast(h):
        return apply_function(_LOSSES, lambda *given: _formula(Rows(*given)), *rows)


def row_gradients(rows: Rows, g: Tensor, needs: str) -> Gradients:
    """The gradients of sum_n g_n l_n by those of h, W and b that `needs` names; None for the rest."""
    found = apply_function(_GRADIENTS, None, *rows, g, needs) if needs else ()
    by_h, by_W, by_b = by_name(NAMES, needs, found)
    return by_h, by_W, by_b


def row_tangents(rows: Rows, vector: Gradients) -> Tensor:
    """r_n . z'_n, [N]: the derivative of l_n along (h', W', b')."""
    dh, dW, db = vector

    def run(part: Rows, dh: Tensor | None) -> Tensor:
        p = torch.softmax(_logits(part), 1)
        tangent = _tangent(part, (dh, dW, db), p, False)
        return _row_products(p, tangent) - _target_values(tangent, part)

    return torch.cat([run(*part) for part in row_chunks(rows, dh)])


def gauss_newton_product(rows: Rows, g: Tensor, vector: Gradients, needs: str) -> Gradients:
    """sum_n g_n J_n^T (diag(p_n) - p_n p_n^T) J_n (h', W', b'), J_n the Jacobian of z_n."""
    # without targets r is 0, and only the terms with s remain
    return _curvature(rows._replace(targets=None), g, vector, needs)[:3]


def _formula(rows: Rows, weight: Tensor | None = None) -> Tensor:
    """The loss of each row by torch operations, for all kinds of targets, with all logits at once."""
    return _nll_losses(F.linear(*rows[:3]), rows.targets, weight, rows.smoothing)


@full_precision(widen=True)
def _nll_losses(z: Tensor, t: Tensor, weight: Tensor | None, smoothing: float) -> Tensor:
    z = upcast_half(z)
    shifted = z - z.detach().amax(1, True)  # detached, because the maximum cancels in derivatives
    log_p = shifted - shifted.exp().sum(1, True).log()
    w = torch.ones_like(z[0]) if weight is None else weight.to(z.dtype)
    if t.is_floating_point():
        q = (1 - smoothing) * t + smoothing / z.shape[1] if smoothing else t
        return -(w * q * log_p).sum(1)
    loss = -w[t] * log_p.gather(1, t.unsqueeze(1)).squeeze(1)
    if not smoothing:
        return loss
    return (1 - smoothing) * loss - smoothing / z.shape[1] * (w * log_p).sum(1)


def row_chunks(rows: Rows, *others: Tensor | None) -> Iterator[tuple[Any, ...]]:
    """The rows, and other tensors, in chunks, at least one; None stays None.

    Each chunk copies its part of h, so that a captured graph, too, computes logits chunk by chunk.
    """
    h, targets, size = rows.h, rows.targets, rows.chunk_size
    for start in range(0, max(len(h), 1), size):
        return_freed_memory()
        part = slice(start, start + size)
        own = torch_internals.fresh_copy(h[part]) if len(h) > size else h
        t, *rest = (None if x is None else x[part] for x in (targets, *others))
        yield rows._replace(h=own, targets=t), *rest


def _logits(rows: Rows) -> Tensor:
    return upcast_half(F.linear(*rows[:3]))


def _target_values(values: Tensor, rows: Rows) -> Tensor:
    """q_n . v_n for each row, v = values."""
    return _average(values, rows.targets.unsqueeze(1), 1, rows.smoothing).squeeze(1)


def _row_products(a: Tensor, b: Tensor) -> Tensor:
    """a_n . b_n for each row, without a temporary of the size of a."""
    return torch.bmm(a.unsqueeze(1), b.unsqueeze(2)).squeeze((1, 2))


def _may_overwrite(*tensors: Tensor | None) -> bool:
    """Whether neither autograd, a transform nor a tracer records: then in-place operations are safe."""
    return not (
        torch.is_grad_enabled()
        or torch_internals.transforms_active()
        or torch_internals.forward_mode_active()
        or torch_internals.tracing()
        or any(x is not None and torch_internals.is_batched(x) for x in tensors)
    )


def _residual(p: Tensor, rows: Rows, g: Tensor, overwrite: bool) -> Tensor:
    """g_n (p_n - q_n); overwrite: in the memory of p."""
    smoothing, out = rows.smoothing, p if overwrite else None
    minus = torch.full_like(p[:, :1], smoothing - 1)
    r = torch.scatter_add(p, 1, rows.targets.unsqueeze(1), minus, out=out)
    r = torch.sub(r, smoothing / p.shape[1], out=out) if smoothing else r
    return torch.mul(r, g.unsqueeze(1), out=out)


def _tangent(rows: Rows, vector: Gradients, like: Tensor, overwrite: bool) -> Tensor:
    """z'_n = W h'_n + W' h_n + b'; overwrite: may add in place."""
    (h, W), (dh, dW, db) = rows[:2], vector
    pairs = [(x, y) for x, y in ((dh, W), (h, dW)) if x is not None and y is not None]
    if not pairs:
        tangent = torch.zeros_like(like)
        return tangent if db is None else tangent + db.to(like.dtype)
    tangent = upcast_half(F.linear(*pairs[0], db))
    for x, y in pairs[1:]:
        # in place: saves a tensor of the logits' size
        fits = overwrite and tangent.dtype == x.dtype
        tangent = tangent.addmm_(x, y.mT) if fits else tangent + upcast_half(F.linear(x, y))
    return tangent


def _accumulate(total: Tensor | None, term: Tensor | None, overwrite: bool) -> Tensor | None:
    """total + term, in float32 for half precision; overwrite: in the memory of total."""
    term = None if term is None else upcast_half(term)
    if total is None or term is None:
        return total if term is None else term
    return torch.add(total, term, out=total if overwrite else None)


def _add_product(total: Tensor | None, a: Tensor, b: Tensor, overwrite: bool) -> Tensor | None:
    """total + a^T b, as `_accumulate`."""
    if total is not None and overwrite and total.dtype == a.dtype == b.dtype:
        return total.addmm_(a.mT, b)
    return _accumulate(total, a.mT @ b, overwrite)


def _cast(total: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if total is None else total.to(dtype)


def _losses_forward(*given: Any) -> Tensor:
    def run(rows: Rows) -> Tensor:
        z = _logits(rows)
        return z.logsumexp(1) - _target_values(z, rows)

    return torch.cat([run(part) for (part,) in row_chunks(Rows(*given))])


def _losses_vjp(saved: Saved, g: Tensor) -> tuple[Tensor | None, ...]:
    return *row_gradients(Rows(*saved.inputs), g, saved.needed(NAMES)), None, None, None


def _losses_jvp(saved: Saved, dh: Any, dW: Any, db: Any, *_: None) -> Tensor:
    return row_tangents(Rows(*saved.inputs), (dh, dW, db))


def _gradients_forward(*given: Any) -> tuple[Tensor, ...]:
    *inputs, g, needs = given
    rows = Rows(*inputs)
    W, overwrite = rows.W, _may_overwrite(*rows[:3], g)
    by_h: list[Tensor] = []
    by_W: Tensor | None = None
    by_b: Tensor | None = None
    for part, g_c in row_chunks(rows, g):
        p = torch.softmax(_logits(part), 1)
        r = _residual(p, part, g_c, overwrite).to(W.dtype)
        # free p before the products: tensors of a chunk's logits are the largest ones
        del p
        if "h" in needs:
            by_h.append(r @ W)
        if "W" in needs:
            by_W = _add_product(by_W, r, part.h, overwrite)
        if "b" in needs:
            by_b = _accumulate(by_b, r.sum(0), overwrite)
        del r  # before the next chunk
    found = torch.cat(by_h) if by_h else None, _cast(by_W, W.dtype), _cast(by_b, W.dtype)
    return tuple(x for x in found if x is not None)


def _gradients_vjp(saved: Saved, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    *inputs, g, needs = saved.inputs
    vector: Any = by_name(NAMES, needs, grads)
    found = _curvature(Rows(*inputs), g, vector, saved.needed(NAMES))
    by_g = found[3].to(g.dtype) if saved.needs_input_grad[-2] else None
    return *found[:3], None, None, None, by_g, None


def _gradients_jvp(saved: Saved, *tangents: Any) -> Any:
    *inputs, g, needs = saved.inputs
    vector: Any = tangents[:3]
    rows, dg = Rows(*inputs), tangents[-2]
    found: Sequence[Tensor | None] = (None, None, None)
    if any(part is not None for part in vector):
        found = _curvature(rows, g, vector, needs)[:3]
    if dg is not None:
        pairs = zip(found, row_gradients(rows, dg, needs), strict=True)
        found = [y if x is None else x if y is None else x + y for x, y in pairs]
    return tuple(x for x in found if x is not None)


def _curvature(
    rows: Rows, g: Tensor, vector: Gradients, needs: str
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor]:
    """The derivative of sum_n g_n dl_n along a vector, and r_n . z'_n for each row."""
    dh, dW, db = vector
    dtype, overwrite = rows.W.dtype, _may_overwrite(*rows[:3], g, *vector)
    by_W: Tensor | None = None
    by_b: Tensor | None = None
    by_h: list[Any] = []
    by_g: list[Tensor] = []
    for part, g_c, dh_c in row_chunks(rows, g, dh):
        chunk = part, g_c, (dh_c, dW, db), needs
        if overwrite:
            of_h, by_W, of_b, of_g = _chunk_curvature(*chunk, by_W, True)
        else:
            # with a graph, backward computes each chunk again instead of keeping its logits
            of_h, of_W, of_b, of_g = recompute(_chunk_curvature, *chunk, None, False)
            by_W = _accumulate(by_W, of_W, False)
        by_h.append(of_h)
        by_b = _accumulate(by_b, of_b, overwrite)
        by_g.append(of_g)
    found_h = torch.cat(by_h) if "h" in needs else None
    return found_h, _cast(by_W, dtype), _cast(by_b, dtype), torch.cat(by_g)


def _chunk_curvature(
    rows: Rows, g: Tensor, vector: Gradients, needs: str, by_W: Tensor | None, overwrite: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor]:
    """`_curvature` of one chunk: the parts by h, W (added to by_W), b and g."""
    (h, W), (dh, dW, _), second = rows[:2], vector, rows.targets is not None
    p = torch.softmax(_logits(rows), 1)
    tangent = _tangent(rows, vector, p, overwrite)
    mean = _row_products(p, tangent)
    by_g = mean - _target_values(tangent, rows) if second else mean
    if overwrite:
        s = tangent.sub_(mean.unsqueeze(1)).mul_(p).mul_(g.unsqueeze(1))
    else:
        s = p * (tangent - mean.unsqueeze(1)) * g.unsqueeze(1)
    del tangent
    # products in the dtype of the head, sums over chunks in float32
    s = s.to(W.dtype)
    by_h = s @ W if "h" in needs else None
    by_b = s.sum(0) if "b" in needs else None
    if "W" in needs:
        by_W = _add_product(by_W, s, h, overwrite)
    del s
    if second and (dW is not None or dh is not None):
        r = _residual(p, rows, g, overwrite).to(W.dtype)
        if by_h is not None and dW is not None:
            by_h = by_h + r @ dW
        if "W" in needs and dh is not None:
            by_W = _add_product(by_W, r, dh, overwrite)
    return by_h, by_W, by_b, by_g


def _check_linear(input: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Raise the errors of torch 2.13, which older versions lack."""
    wrong = ""
    if not 1 <= input.dim() <= 2:
        wrong = f"expected input with dimensionality 1 or 2, got {input.dim()}"
    elif weight.dim() < 2:
        wrong = f"expected linear_weight with dimensionality at least 2, got {weight.dim()}"
    elif input.shape[-1] != weight.shape[-1]:
        wrong = (
            "expected equal input and linear_weight last dimensions (in_features), "
            f"got {input.shape[-1]} and {weight.shape[-1]}, respectively"
        )
    elif bias is not None and bias.shape != weight.shape[:-1]:
        wrong = f"expected linear_bias shape {tuple(weight.shape[:-1])}, got {tuple(bias.shape)}"
    elif weight.dim() > 2 and input.dim() == 1:
        wrong = (
            f"K-dimensional loss defined by linear_weight shape {tuple(weight.shape)} requires batched "
            f"input, (N, {input.shape[0]}), got unbatched input with shape {tuple(input.shape)}"
        )
    if wrong:
        raise TorchValueError(wrong)


_SOFTMAX = make_function("SoftmaxCrossEntropy", 4, _softmax_forward, _softmax_vjp, _softmax_jvp)
_LOSSES = make_function("LinearCrossEntropy", 6, _losses_forward, _losses_vjp, _losses_jvp)
_GRADIENTS = make_function(
    "LinearCrossEntropyGradients", 8, _gradients_forward, _gradients_vjp, _gradients_jvp
)
