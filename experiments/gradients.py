"""The terms of a loss and the gradient of their sum, as one graph where that is asked."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import hoglib as hog
from hoglib._core import validation
from hoglib._core.autograd import with_gradients

Terms = Callable[..., tuple[Tensor, ...]]
TWICE = "a compiled loss: expected backward() without create_graph, got create_graph=True."


class Loss:
    """terms(*args), and their sum, whose backward fills the gradients of a network.

    compile: false, or what `hoglib.compile` takes for backend; true for torch's compiler. The graph
    gives the terms and the gradients, which backward hands on.
    """

    def __init__(self, what: str, terms: Terms, network: nn.Module, compile: bool | str) -> None:
        self.terms, self.network = terms, network
        self.graph: Callable[..., Any] | None = None
        if compile is not False:
            backend = "inductor" if compile is True else compile
            name = validation.one_of("compile", backend, ("inductor", "eager"))
            self.graph = hog.capture.Compiled(
                self._with_gradients, backend=name, dynamic=False, check=True,
                name=f"{what} with its gradient",
            )  # fmt: skip

    def __call__(self, *args: Any) -> tuple[Tensor, list[Tensor]]:
        """The sum, and its terms without a graph."""
        if self.graph is None:
            terms = self.terms(*args)
            return sum(terms[1:], terms[0]), [x.detach() for x in terms]
        with torch.no_grad():
            terms, grads = self.graph(*args)
        pairs = [
            (p, g) for p, g in zip(self.network.parameters(), grads, strict=True) if g is not None
        ]
        by, gradients = zip(*pairs, strict=True)
        return with_gradients(sum(terms[1:], terms[0]), gradients, by, TWICE), list(terms)

    def _with_gradients(self, *args: Any) -> tuple[list[Tensor], list[Tensor | None]]:
        with torch.enable_grad():
            terms = self.terms(*args)
            total = sum(terms[1:], terms[0])
            grads = torch.autograd.grad(total, list(self.network.parameters()), allow_unused=True)
        return [x.detach() for x in terms], list(grads)
