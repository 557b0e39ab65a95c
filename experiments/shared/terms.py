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


class SumOfTerms:
    """The sum of the terms of a loss, and its gradient by the parameters of a network.

    Args:
        name: Name of the loss in messages of the compiler.
        terms: Function of the batch that returns the terms.
        network: The network by whose parameters the loss is differentiated.
        compile: False; or the backend of :func:`hoglib.compile`, of which True is "inductor". The
            graph computes terms and gradient together.
    """

    def __init__(self, name: str, terms: Terms, network: nn.Module, compile: bool | str) -> None:
        self.terms, self.network = terms, network
        self.graph: Callable[..., Any] | None = None
        if compile is not False:
            backend = "inductor" if compile is True else compile
            self.graph = hog.capture.Compiled(
                self._terms_and_gradients,
                backend=backend,
                dynamic=False,
                check=True,
                name=f"{name} with its gradient",
            )

    def __call__(self, *batch: Any) -> Evaluation:
        if self.graph is None:
            terms = self.terms(*batch)
            loss = sum(terms[1:], terms[0])
            return Evaluation(loss, loss.detach(), [x.detach() for x in terms])
        with torch.no_grad():
            terms, grads = self.graph(*batch)
        # a linear function of the parameters with that gradient
        products = [
            (p * g).sum()
            for p, g in zip(self.network.parameters(), grads, strict=True)
            if g is not None
        ]
        return Evaluation(torch.stack(products).sum(), sum(terms[1:], terms[0]), list(terms))

    def _terms_and_gradients(self, *batch: Any) -> tuple[list[Tensor], list[Tensor | None]]:
        # the graph is captured under no_grad, in which the whole is called
        with torch.enable_grad():
            terms = self.terms(*batch)
            loss = sum(terms[1:], terms[0])
            grads = torch.autograd.grad(loss, list(self.network.parameters()), allow_unused=True)
        return [x.detach() for x in terms], list(grads)
