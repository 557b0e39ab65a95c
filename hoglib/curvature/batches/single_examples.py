"""Gradients of single examples of a batch, by vmap or in a loop."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hoglib import errors
from hoglib._core.messages import validation
from hoglib._core.problem import Problem
from hoglib._core.substrate.autograd import (
    Vector,
    fresh_leaves,
    materialize_grads,
    translate_errors,
)
from hoglib._core.torch_api import pytree
from hoglib.curvature.batches.data import row_count


def number_of_examples(batch: object) -> int:
    """The leading dimension of the first tensor of a batch."""
    count = row_count(batch)
    if count is None:
        raise errors.ArgumentTypeError(
            "batch: expected tensors with the examples as their leading dimension, got "
            f"{validation.describe(batch)}."
        )
    if not count:
        raise errors.ArgumentValueError("batch: expected at least one example, got none.")
    return count


def by_vmap_or_loop(problem: Problem) -> tuple[Tensor, Vector]:
    """l_n and g_n = d l_n / d params of each example: by vmap, or by a loop if an operation has no
    batching rule."""
    try:
        return by_vmap(problem)
    except (RuntimeError, NotImplementedError):  # an error of the user's code returns in the loop
        return by_loop(problem)


def over_examples(
    problem: Problem, of_example: Callable[[Problem, Vector], Any], chunk_size: int | None = None
) -> Any:
    """of_example(problem at one example, leaves), by vmap over the examples of the batch."""
    (batch,) = problem.args
    count = number_of_examples(batch)
    parts, form = pytree.flatten(batch)
    # Tensors with another leading dimension are passed whole.
    mapped = [isinstance(x, Tensor) and x.dim() > 0 and len(x) == count for x in parts]

    def run(p: Vector, *rows: Tensor) -> Any:
        left = iter(rows)
        # The loss takes batches: each example becomes a batch of size 1.
        one = [next(left).unsqueeze(0) if row else x for x, row in zip(parts, mapped, strict=True)]
        return of_example(problem.with_args(pytree.unflatten(one, form)), p)

    given = [x for x, row in zip(parts, mapped, strict=True) if row]
    every: Any = torch.func.vmap(
        run, (None, *[0] * len(given)), randomness="error", chunk_size=chunk_size
    )
    return every([leaf.detach() for leaf in problem.leaves], *given)


def by_vmap(problem: Problem) -> tuple[Tensor, Vector]:
    """l_n and g_n of all examples, as vmap(grad(l))."""

    def of_example(one: Problem, p: Vector) -> Any:
        return torch.func.grad_and_value(lambda p: one(*p))(p)

    gradients, values = over_examples(problem, of_example)
    return values.detach(), [g.detach() for g in gradients]


def jacobian_by_vmap(
    problem: Problem, outputs: Callable[[Problem, Vector], Vector], chunk_size: int
) -> tuple[Tensor, Tensor]:
    """The outputs [M] and their Jacobian by the leaves [M, P], by vmap over the examples.

    Rows are in the order of the batch's outputs, provided that the outputs have a row per example.
    """

    def of_example(one: Problem, p: Vector) -> Any:
        def twice(p: Vector) -> tuple[Vector, Vector]:
            found = outputs(one, p)
            return found, found

        return torch.func.jacrev(twice, has_aux=True)(p)

    jacobian, values = over_examples(problem, of_example, chunk_size)
    rows = [
        torch.cat([part.reshape(y.numel(), -1) for part in parts], 1)
        for y, parts in zip(values, jacobian, strict=True)
    ]
    return torch.cat([y.reshape(-1) for y in values]).detach(), torch.cat(rows).detach()


def by_loop(problem: Problem) -> tuple[Tensor, Vector]:
    """l_n and g_n, one example at a time."""
    (batch,) = problem.args
    count = number_of_examples(batch)
    values, rows = [], []
    for n in range(count):
        p = fresh_leaves(problem.leaves, False)
        with translate_errors(problem.policy.caller):
            value = problem.with_args(pytree.rows(batch, count, n, n + 1))(*p)
            parts = torch.autograd.grad(value, p, allow_unused=True)
        values.append(value.detach())
        rows.append(materialize_grads(list(parts), p))
    return torch.stack(values), [torch.stack(parts) for parts in zip(*rows, strict=True)]
