"""`hoglib.compiled_loss`: a loss whose value and gradient are computed together, by one graph."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hoglib import _arguments as arguments
from hoglib import _functorch, _tree
from hoglib._graph import survey
from hoglib._precomputed import with_gradients
from hoglib.capture.compiled import Compiled, named

UNREACHED = (
    "{}: expected a loss that depends on tensors that require grad, got one that does not; look for "
    ".detach(), torch.no_grad(), and parameters that are frozen."
)


class _Gradient:
    """The value of a loss, its gradients, and what they are gradients of, in that order."""

    def __init__(self, fn: Callable[..., Tensor], name: str, create_graph: bool) -> None:
        self.fn, self._name, self._create_graph = fn, name, create_graph

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Tensor, list[Tensor], list["Of"]]:
        value = arguments.scalar(self._name, self.fn(*args, **kwargs))
        if not value.requires_grad:
            raise arguments.NoSecondDerivative(UNREACHED.format(self._name))
        given = {
            id(x): Of(i)
            for i, x in enumerate(
                x for x in _tree.leaves((args, kwargs)) if isinstance(x, Tensor) and x.requires_grad
            )
        }
        by = list(survey(value).leaves.values())
        grads = torch.autograd.grad(value, by, create_graph=self._create_graph)
        return value, list(grads), [given.get(id(x)) or Of(x) for x in by]


class Of:
    """What a gradient is by: an argument, by its place among those that require grad, or a tensor that
    the loss reaches."""

    def __init__(self, where: int | Tensor) -> None:
        self.where = where


class CompiledLoss:
    """A loss that runs as a graph with its gradient; made by `compiled_loss`."""

    def __init__(
        self, fn: Callable[..., Tensor], *, backend: Any, dynamic: bool, check: bool, progress: bool,
        name: str | None = None,
    ) -> None:  # fmt: skip
        arguments.function("loss_fn", fn)
        self.name = name or named(fn)
        options: dict[str, Any] = {
            "backend": backend, "dynamic": dynamic, "check": check, "progress": progress,
        }  # fmt: skip
        self._value = Compiled(fn, name=self.name, **options)
        self._with_gradient = Compiled(
            _Gradient(fn, self.name, False), name=f"{self.name} and its gradient", **options
        )
        self._again = Compiled(
            _Gradient(fn, self.name, True), name=f"{self.name} and its gradient", **options
        )
        self.fn = fn
        self.__doc__ = fn.__doc__

    @property
    def signatures(self) -> list[Any]:
        """What was captured so far; see `compile`."""
        parts = (self._with_gradient, self._value, self._again)
        return [one for part in parts for one in part.signatures]

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        if (
            _functorch.transforms_active()
            or _functorch.forward_mode_active()
            or _functorch.tracing()
        ):
            value: Tensor = self.fn(*args, **kwargs)
            return value
        if not torch.is_grad_enabled():
            value = self._value(*args, **kwargs)
            return value
        leaves, structure = _tree.flatten((args, kwargs))
        found = self._with_gradient.captured(leaves, structure)
        if found is None:
            value = self.fn(*args, **kwargs)
            return value
        entry, lifted = found
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        value, *grads = entry.execute(given + lifted)
        wanted = [x for x in given if x.requires_grad]
        by = [
            wanted[of.where] if isinstance(of.where, int) else lifted[entry.place_of(of.where)]
            for of in entry.traced.leaves
            if isinstance(of, Of)
        ]
        return with_gradients(value, grads, by, again=lambda: self._again(*args, **kwargs)[1])

    def __repr__(self) -> str:
        return f"hoglib.compiled_loss({self.name}), {len(self.signatures)} graphs"


def compiled_loss(
    loss_fn: Callable[..., Tensor],
    *,
    backend: Any = "inductor",
    dynamic: bool = False,
    check: bool = True,
    progress: bool = True,
) -> CompiledLoss:
    r"""A loss whose value and gradient, and all derivatives inside it, run as one compiled graph.

        loss = hog.compiled_loss(lambda real, fake: critic_loss(real, fake) + penalty(critic, real))
        loss(real, fake).backward()

    loss_fn: a function whose value is a scalar tensor, of anything that `compile` takes. It is called as
    before, and its value is used as before: `backward()`, `torch.autograd.grad`, gradient accumulation,
    GradScaler, hooks of parameters and of DistributedDataParallel, Lightning's automatic optimisation.
    The gradients, by all leaf tensors that require grad (arguments, and parameters that the loss reaches),
    are computed in the forward, with the value; backward scales them and hands them on. With
    `create_graph=True` they come from a graph of their own, differentiable to any order. Where grad mode
    is off only the value is computed.

    Parameters are inputs: they may change between calls, and be replaced. Options and errors as in
    `compile`; RuntimeError also for a loss that depends on nothing that requires grad.
    """
    return CompiledLoss(loss_fn, backend=backend, dynamic=dynamic, check=check, progress=progress)
