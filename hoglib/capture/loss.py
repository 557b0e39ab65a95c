"""`hoglib.compiled_loss`: a loss whose value and gradient are computed together, by one graph."""

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from hoglib._core import pytree, torch_internals, validation
from hoglib._core.autograd import with_gradients
from hoglib._core.gradient_graph import nodes
from hoglib.capture import signature
from hoglib.capture.api import (
    OPTIONS,
    Compiled,
    check_unchanged,
    counted,
    differentiated,
    named,
    remade,
)
from hoglib.capture.capturing import Graphs, runs_elsewhere
from hoglib.capture.refusals import refuse_outer_graphs
from hoglib.capture.trace import Of, without_hooks
from hoglib.errors import NoSecondDerivative

UNREACHED = (
    "{}: expected a loss that depends on tensors that require grad, got one that does not; look for "
    ".detach(), torch.no_grad(), and parameters that are frozen."
)
CHANGED = (
    "{}: expected a second backward (retain_graph=True) while what the loss was computed from is as "
    "it was, got a tensor that was changed in place since. Call backward before it changes."
)


class _Gradient:
    """The value of a loss, its gradients, and what they are gradients of, in that order.

    It runs while it is captured, and then to be compared, by the same tensors in the same order.
    """

    apart = True  # an argument's gradient has no part of what another one was computed from

    def __init__(self, fn: Callable[..., Tensor], name: str, create_graph: bool) -> None:
        self.fn, self._name, self._create_graph = fn, name, create_graph
        self._reached: list[
            int
        ] = []  # the ids of the leaves besides arguments, of the last capture

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Tensor, list[Tensor], list[Of]]:
        value = validation.scalar(self._name, self.fn(*args, **kwargs))
        refuse_outer_graphs(self._name)
        given = differentiated(
            [x for x in pytree.leaves((args, kwargs)) if isinstance(x, Tensor)], []
        )
        by = given + self._leaves(value, given)
        if value.requires_grad:
            with (
                without_hooks(by),
                torch_internals.no_autocast(),
            ):  # as a backward outside of its region
                grads = torch.autograd.grad(
                    value, by, create_graph=self._create_graph, allow_unused=True
                )
            places = [
                *(Of(i, True) for i in range(len(given))),
                *(Of(x, False) for x in by[len(given) :]),
            ]
            found = [(g, of) for g, of in zip(grads, places, strict=True) if g is not None]
            if found:
                return value, [g for g, _ in found], [of for _, of in found]
        raise NoSecondDerivative(UNREACHED.format(self._name))

    def _leaves(self, value: Tensor, given: list[Tensor]) -> list[Tensor]:
        """The leaves that a loss reaches, but for those that it makes itself, such as
        `x.detach().requires_grad_()`, which have no values while it is captured."""
        inside = nodes([value], since=[x for x in given if not x.is_leaf])
        ours = {id(x) for x in given}
        leaves = (
            [value] if value.is_leaf else [n.variable for n in inside if hasattr(n, "variable")]
        )
        found = {id(x): x for x in leaves if id(x) not in ours}
        if torch_internals.tracing():
            self._reached = [key for key, x in found.items() if not isinstance(x, FakeTensor)]
        return [found[key] for key in self._reached if key in found]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Gradient) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[Any, ...]:
        return self.fn, self._name, self._create_graph


def _apart(grads: list[Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """Gradients in memory of their own: a graph may give out an input, or one tensor twice."""
    known = {x.untyped_storage().data_ptr() for x in inputs}
    found = []
    for grad in grads:
        place = grad.untyped_storage().data_ptr()
        found.append(grad.clone() if place in known else grad)
        known.add(place)
    return found


class CompiledLoss:
    """A loss that runs as a graph with its gradient; made by `compiled_loss`."""

    def __init__(
        self, fn: Callable[..., Tensor], *, backend: Any, dynamic: bool, check: bool, progress: bool,
        name: str | None = None, graphs: tuple[Graphs, Graphs, Graphs] | None = None,
        before: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        validation.function("loss_fn", fn)
        self.fn, self.name, self.__doc__ = fn, name or named(fn), fn.__doc__
        options: dict[str, Any] = {
            "backend": backend, "dynamic": dynamic, "check": check, "progress": progress, "before":
            before,
        }  # fmt: skip
        own = graphs or (None, None, None)
        both = f"{self.name} and its gradient"
        self._value = Compiled(fn, name=self.name, graphs=own[0], **options)
        self._with_gradient, self._again = (
            Compiled(_Gradient(fn, self.name, again), name=both, graphs=own[1 + again], **options)
            for again in (False, True)
        )

    @property
    def signatures(self) -> list[Any]:
        """What was captured so far; see `compile`."""
        parts = (self._with_gradient, self._value, self._again)
        return [one for part in parts for one in part.signatures]

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        value: Tensor
        if runs_elsewhere():
            value = self.fn(*args, **kwargs)
            return value
        if not torch.is_grad_enabled():
            value = self._value(*args, **kwargs)
            return value
        both = self._with_gradient
        form, tensors = signature.of_call(both.name, args, kwargs, both.dynamic)
        found = both.captured(form, tensors)
        if found is None:
            value = self.fn(*args, **kwargs)
            return value
        entry, lifted = found
        inputs = entry.inputs(tensors, lifted)
        versions = [x._version for x in inputs]

        def computed() -> list[Tensor]:
            if versions != [x._version for x in inputs]:
                raise NoSecondDerivative(CHANGED.format(self.name))
            value, *grads = entry.execute(inputs)
            return [value, *_apart(grads, inputs)]

        value, *grads = computed()
        wanted = differentiated(tensors, [])
        by = [
            wanted[of.where] if of.is_argument else lifted[of.where]
            for of in entry.leaves
            if type(of) is Of
        ]

        def again() -> list[Tensor]:
            check_unchanged(both, entry, form, tensors, lifted)
            args, kwargs = form.filled(tensors)
            with form.again():
                if self._again.captured(form, tensors) is None:
                    value = self.fn(*args, **kwargs)
                    return list(torch.autograd.grad(value, by, create_graph=True))
                grads: list[Tensor] = self._again(*args, **kwargs)[1]
            return grads

        return with_gradients(value, grads, by, again=again, anew=lambda: computed()[1:])

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        """As a method, where it stands in a class."""
        return self if owner is None else MethodType(self, owner)

    def __reduce__(self) -> Any:
        """A copy has graphs of its own."""
        options = {name: getattr(self._value, name) for name in OPTIONS}
        return remade, (type(self), self.fn, options)

    def __repr__(self) -> str:
        return f"hoglib.compiled_loss({self.name}), {counted(self.signatures)}"


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

    loss_fn: a function whose value is a scalar tensor, of anything that `compile` takes. It is called
    as before, and its value is used as before: `backward()`, `torch.autograd.grad`, gradient
    accumulation, GradScaler, hooks of parameters and of DistributedDataParallel, Lightning's automatic
    optimisation. The gradients, by all leaf tensors that require grad (arguments, and parameters that
    the loss reaches), are computed in the forward, with the value; backward scales them and hands them
    on. With `create_graph=True` they come from a graph of their own, differentiable to any order.
    Where grad mode is off only the value is computed.

    What a GradScaler scales is a gradient that was computed without its factor: under autocast to
    float16 small ones may be zero already, and bfloat16 is the better choice. DistributedDataParallel
    goes around the module that calls the loss, not into the loss.

    Parameters are inputs: they may change between calls, and be replaced. Options and errors as in
    `compile`; RuntimeError also for a loss that depends on nothing that requires grad.
    """
    return CompiledLoss(loss_fn, backend=backend, dynamic=dynamic, check=check, progress=progress)
