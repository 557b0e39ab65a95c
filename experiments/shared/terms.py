"""A loss of several terms, computed with its gradient as one graph where that is asked for."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import hoglib as hog

Terms = Callable[..., tuple[Tensor, ...]]


class Evaluation(NamedTuple):
    """A loss at one batch.

    Attributes:
        objective: Scalar whose backward accumulates the gradient of the loss into the parameters. Its
            value is that of the loss only where no graph was compiled.
        loss: Value of the loss, detached.
        terms: Its terms, detached.
    """

    objective: Tensor
    loss: Tensor
    terms: list[Tensor]


def sum_of_terms(
    name: str, terms: Terms, network: nn.Module, compile: bool | str
) -> Callable[..., Evaluation]:
    """The sum of the terms of a loss, and its gradient by the parameters of a network.

    Args:
        name: Name of the loss in messages of the compiler.
        terms: Function of the batch that returns the terms.
        network: The network by whose parameters the loss is differentiated.
        compile: False; or the backend of :func:`hoglib.compile`, of which True is "inductor". The
            graph computes terms and gradient together.
    Returns:
        A function of the batch.
    """

    def as_written(*batch: Any) -> Evaluation:
        found = terms(*batch)
        objective = sum(found[1:], found[0])
        return Evaluation(objective, objective.detach(), [x.detach() for x in found])

    def with_gradients(*batch: Any) -> tuple[list[Tensor], tuple[Tensor | None, ...]]:
        # the graph is captured under no_grad, in which the whole is called
        with torch.enable_grad():
            found, params = as_written(*batch), list(network.parameters())
            return found.terms, torch.autograd.grad(found.objective, params, allow_unused=True)

    if compile is False:
        return as_written
    graph = hog.capture.Compiled(
        with_gradients, backend="inductor" if compile is True else compile, dynamic=False,
        check=True, name=f"{name} with its gradient",
    )  # fmt: skip

    def as_graph(*batch: Any) -> Evaluation:
        with torch.no_grad():
            found, grads = graph(*batch)
        # a linear function of the parameters with that gradient
        pairs = zip(network.parameters(), grads, strict=True)
        products = [(p * g).sum() for p, g in pairs if g is not None]
        return Evaluation(torch.stack(products).sum(), sum(found[1:], found[0]), list(found))

    return as_graph
