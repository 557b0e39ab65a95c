"""A matrix M on the outputs as a sum of squares, M = sum_c s_c s_c^T, example by example.

Examples are the rows of the outputs, n, and M is block-diagonal in them: one vector s_c like the
outputs holds a column of the square root of every block, so that one backward pass of it gives the
vector J_n^T s_cn of every example at once.

    exact        columns of the square root of each block, as many as an example has outputs
    mc           sqrt(w / S) times the score of each of S draws; without a likelihood S random sums of
                 the columns
    empirical    sqrt(W) times the gradient of the loss of each example
"""

from collections.abc import Iterator
from contextlib import suppress
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from hoglib._core.autograd import Vector
from hoglib._core.mixed_precision import upcast_half
from hoglib.curvature import likelihood as likelihoods
from hoglib.curvature.data import leading_dimension
from hoglib.curvature.fisher_metric import FisherMetric
from hoglib.curvature.gauss_newton import CompositeLoss, CriterionHessian
from hoglib.curvature.likelihood import Likelihood, Weight
from hoglib.curvature.linear_map import ProductOptions
from hoglib.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError
from hoglib.stand_ins.mode import stand_ins_if

LARGEST = 2**28  # numbers in the blocks of M, that are computed where no closed form is known


def examples_of(composite: CompositeLoss, outputs: Vector) -> int:
    """How many examples the outputs are of: their leading dimension, or one for logits [C]."""
    row = likelihoods.row_of(composite.loss)
    if outputs[0].dim() == 0 or (row is not None and row.family.classes and outputs[0].dim() == 1):
        return 1
    sizes = {len(y) if y.dim() else 1 for y in outputs}
    if len(sizes) > 1:
        shapes = ", ".join(str(tuple(y.shape)) for y in outputs)
        raise ArgumentValueError(
            f"outputs: expected one leading dimension, that of the examples, got {shapes}; return only "
            "what the criterion needs, by `functional_loss(..., forward=)`."
        )
    return sizes.pop()


def columns(
    metric: FisherMetric, composite: CompositeLoss, outputs: Vector, options: ProductOptions
) -> Iterator[Vector]:
    """The vectors s_c.

    For kind="exact" without a likelihood, M is the Hessian of the criterion by the outputs.
    Raises ArgumentValueError for an M that is not positive semi-definite, and for outputs whose rows
    are parts of examples.
    """
    values = [y.detach() for y in outputs]
    known = None
    if metric.likelihood is None and metric.kind != "empirical":
        with suppress(ArgumentValueError):  # no likelihood, or one with options: by its Hessian
            known = metric.closed_form(composite, values)
    if metric.kind == "mc" and metric.likelihood is None and known is None:
        yield from _random_columns(metric, composite, values, options)
        return
    if metric.kind != "exact":
        scores, weight, _ = metric.scores(composite, values, options)
        factor = sqrt(float(weight))
        for draw in range(len(scores[0])):
            yield [factor * part[draw] for part in scores]
        return
    _check_rows(composite, values, options)
    if known is None:
        yield from _dense_columns(metric, composite, values, options)
        return
    classes = known[0].family is not None and known[0].family.classes
    of_family = _class_columns if classes else _diagonal_columns
    yield from of_family(*known, values[0], examples_of(composite, values))


def _check_rows(composite: CompositeLoss, values: Vector, options: ProductOptions) -> None:
    try:
        count = leading_dimension(composite.batch)
    except ArgumentTypeError:  # nothing to compare with
        return
    rows = examples_of(composite, values)
    if rows > count and rows % count == 0:
        raise ArgumentValueError(
            f"{options.caller}(kind='exact'): expected outputs whose rows are the {count:g} examples "
            f"of a batch, got {rows} rows, several of each, whose gradients depend on each other; "
            "return outputs [examples, ...] by `functional_loss(..., forward=)`, or use kind='mc'."
        )


def _diagonal_columns(
    likelihood: Likelihood, weight: Weight, output: Tensor, examples: int
) -> Iterator[Vector]:
    """Of a family whose information is diagonal: one output of each example at a time."""
    assert likelihood.family is not None
    f = upcast_half(output)
    root = (weight * likelihood.family.information(f, torch.ones_like(f))).sqrt()
    root = root.reshape(examples, -1)
    for i in range(root.shape[1]):
        column = torch.zeros_like(root)
        column[:, i] = root[:, i]
        yield [column.reshape(output.shape).to(output.dtype)]


def _class_columns(
    likelihood: Likelihood, weight: Weight, output: Tensor, examples: int
) -> Iterator[Vector]:
    """diag(p) - p p^T is the sum over classes c of p_c (e_c - p)(e_c - p)^T.

    The terms (positions) of an example are apart: each has columns of its own.
    """
    f = upcast_half(output)
    axis = likelihoods.class_axis(f)
    p = f.softmax(axis).movedim(axis, -1)  # [N, positions..., C], or [C]
    counted = likelihoods.mask(likelihood, f).expand(f.shape).movedim(axis, -1)[..., 0]
    scale = (weight * counted).reshape(examples, -1)
    rows = p.reshape(examples, -1, p.shape[-1])
    for position in range(rows.shape[1]):
        q = rows[:, position]
        root = (scale[:, position].unsqueeze(1) * q).sqrt()  # [N, C]
        for c in range(q.shape[1]):
            column = torch.zeros_like(rows)
            column[:, position] = -root[:, c : c + 1] * q
            column[:, position, c] += root[:, c]
            yield [column.reshape(p.shape).movedim(-1, axis).to(output.dtype)]


def _random_columns(
    metric: FisherMetric, composite: CompositeLoss, values: Vector, options: ProductOptions
) -> Iterator[Vector]:
    """Draws s_n = sum over c of e_nc s_nc / sqrt(S) with independent signs e, E[s s^T] = M / S.

    For a criterion whose likelihood is not known, and which need not be one.
    """
    examples, draws = examples_of(composite, values), metric.num_samples
    random = metric.random_numbers(values[0].device)
    device = values[0].device if random is None else random.device
    totals = [y.new_zeros((draws, *y.shape)) for y in values]
    for column in _dense_columns(metric, composite, values, options):
        bits = torch.randint(2, (draws, examples), generator=random, device=device)
        signs = (2 * bits - 1).to(values[0].device) / sqrt(draws)
        for total, part in zip(totals, column, strict=True):
            each = signs.to(part.dtype)
            if examples > 1 or part.shape[:1] == (1,):
                each = each.reshape(draws, examples, *[1] * (part.dim() - 1))
            else:
                each = each.reshape(draws, *[1] * part.dim())
            total += each * part
    for draw in range(draws):
        yield [total[draw] for total in totals]


def _dense_columns(
    metric: FisherMetric, composite: CompositeLoss, values: Vector, options: ProductOptions
) -> Iterator[Vector]:
    """The columns of the square root of each block, which is computed by products with M."""
    examples = examples_of(composite, values)
    shapes = [y.shape for y in values]
    sizes = [y.numel() // max(examples, 1) for y in values]
    total = sum(sizes)
    if examples * total**2 > LARGEST:
        raise UnsupportedError(
            f"{options.caller}(kind='exact'): expected at most {LARGEST:,} numbers in the blocks of "
            f"the criterion's Hessian, got {examples} x {total} x {total}; use kind='mc', or smaller "
            "batches by micro_batch=."
        )
    chosen = CriterionHessian() if metric.likelihood is None else metric
    with stand_ins_if(True):
        product = chosen.at(composite, values, "reverse", options)
    wide = upcast_half(values[0]).dtype

    def vector(rows: Tensor) -> Vector:
        """Rows [N, total] like the outputs."""
        parts = rows.split(sizes, 1)
        return [
            part.reshape(shape).to(y.dtype)
            for part, shape, y in zip(parts, shapes, values, strict=True)
        ]

    blocks = values[0].new_empty((examples, total, total), dtype=wide)
    for i in range(total):
        unit = torch.zeros((examples, total), dtype=wide, device=values[0].device)
        unit[:, i] = 1
        found = product(vector(unit), True)
        blocks[:, :, i] = torch.cat([x.detach().reshape(examples, -1).to(wide) for x in found], 1)
    _check_apart(product, vector, blocks, torch.finfo(values[0].dtype).eps, options)
    eigenvalues, Q = torch.linalg.eigh((blocks + blocks.mT) / 2)
    largest = eigenvalues.abs().amax(1, keepdim=True)
    rounding = max(1e3 * torch.finfo(wide).eps, 10 * torch.finfo(values[0].dtype).eps)
    if bool((eigenvalues < -rounding * largest).any()):
        raise ArgumentValueError(
            f"{options.caller}(kind='exact'): expected a criterion that is convex in the outputs, got "
            f"one with the eigenvalue {float(eigenvalues.min()):.3g}; give a likelihood=, or use "
            "kind='empirical'."
        )
    root = Q * eigenvalues.clamp(min=0).sqrt().unsqueeze(1)
    for i in range(total):
        yield vector(root[:, :, i])


def _check_apart(
    product: Any, vector: Any, blocks: Tensor, rounding: float, options: ProductOptions
) -> None:
    """Raise for a criterion that couples examples, whose M has more than these blocks."""
    if len(blocks) < 2:
        return
    generator = torch.Generator().manual_seed(0)
    u = torch.randn(blocks.shape[:2], generator=generator, dtype=torch.float32).to(blocks)
    found = product(vector(u), False)
    whole = torch.cat([x.detach().reshape(len(u), -1).to(u.dtype) for x in found], 1)
    apart = (blocks @ u.unsqueeze(-1)).squeeze(-1)
    if float((whole - apart).norm()) > 1e4 * rounding * float(whole.norm()):
        raise ArgumentValueError(
            f"{options.caller}: expected a criterion that is a sum over examples, got one that couples "
            "them, such as a contrastive loss; Kronecker factors are for sums over examples."
        )
