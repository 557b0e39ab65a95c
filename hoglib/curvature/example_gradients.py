"""Gradients of every example of a batch by itself."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from hoglib._core import pytree, validation
from hoglib._core.autograd import (
    clone_inference_tensors,
    fresh_leaves,
    grad_enabled,
    materialize_grads,
    translate_errors,
)
from hoglib._core.sharding import refuse_sharded
from hoglib._core.swap import keep_swapped
from hoglib.curvature.data import as_dict
from hoglib.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    HoglibError,
    UnsupportedError,
)
from hoglib.stand_ins.mode import stand_ins_if

Tree = Any
AT_ONCE = 2**26  # numbers of gradients that are held at once, by default


def per_example_gradients(
    loss: Any, params: Tree, batch: Any, *, chunk_size: int | None = None, vmap: bool | None = None
) -> tuple[Tensor, Tree]:
    r"""The loss and the gradient of each example of a batch.

        l_n = loss(params, example n), a batch of one        g_n = d l_n / d params

    For a criterion that is a mean over examples, the mean of g_n is the gradient of the batch; for a
    sum their sum is.

    Args:
        loss: The function ``loss(params, batch)`` that returns a scalar, for instance from
            `hoglib.functional_loss`.
        params: Where the gradients are taken; any pytree of floating-point tensors.
        batch: A batch of any kind: every tensor with as many rows as the first one has the examples as
            its leading dimension; the other tensors are the same for each.
        chunk_size: Examples at once. Default: all of them.
        vmap: True computes them side by side, by `torch.func.vmap`, False one after the other. Default:
            side by side where all operations can.
    Returns:
        The losses [N], and the gradients, like params with a leading dimension of N.
    Raises:
        ArgumentValueError: for batch norm in train mode, where an example alone has another loss.
        UnsupportedError: with vmap=True, for operations that have no rule for it.
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
    """  # fmt: skip
    validation.loss_function("loss", loss)
    validation.parameters(params)
    refuse_sharded("per_example_gradients", pytree.leaves(params))
    if chunk_size is not None:
        validation.at_least("chunk_size", chunk_size, 1)
    check_norms(loss)
    own = as_dict(batch)
    count = number_of_examples(own)
    size = count if chunk_size is None else chunk_size
    compute = (
        _at_best if vmap is None else _side_by_side if validation.flag("vmap", vmap) else _in_turn
    )
    with torch.inference_mode(False), grad_enabled():
        leaves, own = clone_inference_tensors((pytree.leaves(params), own))
        structure = pytree.flatten(params)[1]
        chunks = [
            compute(loss, leaves, structure, pytree.rows(own, count, start, start + size))
            for start in range(0, count, size)
        ]
    values, gradients = zip(*chunks, strict=True)
    joined = [torch.cat(parts) for parts in zip(*gradients, strict=True)]
    return torch.cat(values), pytree.unflatten(joined, structure)


def gradient_rows(loss: Any, params: Tree, batch: Any, *, vmap: bool | None) -> Iterator[Tensor]:
    """The gradients of the examples of a batch as rows [n, P], some at a time."""
    size = max(1, AT_ONCE // max(pytree.size(params), 1))
    own = as_dict(batch)
    count = number_of_examples(own)
    for start in range(0, count, size):
        piece = pytree.rows(own, count, start, start + size)
        _, gradients = per_example_gradients(loss, params, piece, vmap=vmap)
        yield torch.cat([leaf.reshape(len(leaf), -1) for leaf in pytree.leaves(gradients)], 1)


def check_norms(loss: Any) -> None:
    """Raise for batch norm in train mode."""
    model = getattr(loss, "model", None)
    for name, module in model.named_modules() if isinstance(model, nn.Module) else ():
        if isinstance(module, _BatchNorm) and module.training:
            raise ArgumentValueError(
                f"model.{name}: expected layers that treat each example by itself, got a "
                f"{type(module).__name__} in train mode, which mixes the examples of a batch; call "
                "model.eval(), or use group norm."
            )


def number_of_examples(batch: Any) -> int:
    """The leading dimension of the first tensor of a batch."""
    sizes = [len(x) for x in pytree.tensors(batch) if x.dim()]
    if not sizes:
        raise ArgumentTypeError(
            "batch: expected tensors with the examples as their leading dimension, got "
            f"{validation.describe(batch)}."
        )
    if not sizes[0]:
        raise ArgumentValueError("batch: expected at least one example, got none.")
    return sizes[0]


def _at_best(
    loss: Any, leaves: list[Tensor], structure: Any, batch: Any
) -> tuple[Tensor, list[Tensor]]:
    """Side by side, or in turn where an operation has no rule for it."""
    try:
        return _side_by_side(loss, leaves, structure, batch)
    except (RuntimeError, NotImplementedError):  # an error of the user's comes again
        return _in_turn(loss, leaves, structure, batch)


def _side_by_side(
    loss: Any, leaves: list[Tensor], structure: Any, batch: Any
) -> tuple[Tensor, list[Tensor]]:
    count = number_of_examples(batch)
    parts, form = pytree.flatten(batch)
    mapped = [isinstance(x, Tensor) and x.dim() > 0 and len(x) == count for x in parts]

    def of(own: list[Tensor], *rows: Tensor) -> Tensor:
        left = iter(rows)
        whole = [
            next(left).unsqueeze(0) if row else x for x, row in zip(parts, mapped, strict=True)
        ]
        value = loss(pytree.unflatten(own, structure), pytree.unflatten(whole, form))
        return validation.scalar("loss(params, batch)", value)

    given = [x for x, row in zip(parts, mapped, strict=True) if row]
    every: Any = torch.func.vmap(
        torch.func.grad_and_value(of), in_dims=(None, *[0] * len(given)), randomness="error"
    )
    try:
        with stand_ins_if(True):  # attention has a rule there
            gradients, values = every([leaf.detach() for leaf in leaves], *given)
    except (RuntimeError, NotImplementedError) as error:
        if isinstance(error, HoglibError):
            raise
        raise UnsupportedError(
            "per_example_gradients: expected operations that torch.func.vmap can run, got an error "
            f"from one: {str(error).splitlines()[0]} Use vmap=False."
        ) from error
    return values.detach(), [g.detach() for g in gradients]


def _in_turn(
    loss: Any, leaves: list[Tensor], structure: Any, batch: Any
) -> tuple[Tensor, list[Tensor]]:
    count = number_of_examples(batch)
    values, rows = [], []
    for n in range(count):
        own = fresh_leaves(leaves, False)
        with keep_swapped(), translate_errors("per_example_gradients"):
            value = loss(pytree.unflatten(own, structure), pytree.rows(batch, count, n, n + 1))
            value = validation.scalar("loss(params, batch)", value)
            parts = torch.autograd.grad(value, own, allow_unused=True)
        values.append(value.detach())
        rows.append(materialize_grads(list(parts), own))
    return torch.stack(values), [torch.stack(parts) for parts in zip(*rows, strict=True)]
