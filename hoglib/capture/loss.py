"""`hoglib.compiled_loss`: a loss whose value and gradient are computed together, by one graph."""

from collections.abc import Callable
from functools import cached_property, partial
from types import MethodType
from typing import Any, final

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from hoglib._core import pytree, torch_internals, validation
from hoglib._core.autograd import with_gradients
from hoglib._core.closures import name_of
from hoglib._core.gradient_graph import leaf_tensors
from hoglib.capture import signature
from hoglib.capture.api import (
    OPTIONS,
    Compiled,
    check_unchanged,
    count_graphs,
    requiring_grad,
)
from hoglib.capture.capturing import GraphEntry, Place, runs_elsewhere
from hoglib.capture.trace import InputRef, refuse_outer_graph, without_tensor_hooks
from hoglib.errors import NoSecondDerivative


def compiled_loss(
    loss_fn: Callable[..., Tensor],
    *,
    backend: Any = "inductor",
    dynamic: bool = False,
    check: bool = True,
) -> "CompiledLoss":
    r"""Compile a loss together with its gradient, and all derivatives inside it, to one graph.

        (L, dL/dtheta) = graph(theta, *args)

    The result is used like the loss: ``backward()``, ``torch.autograd.grad``, gradient accumulation,
    ``GradScaler``, hooks of parameters and of DistributedDataParallel, Lightning's automatic
    optimisation. Gradients with respect to all leaf tensors that require grad (arguments, and
    parameters that the loss reaches) are computed together with the value; backward multiplies them by
    the incoming gradient. With ``create_graph=True`` they come from a second graph, differentiable to
    any order. If grad mode is off, only the value is computed.

    A ``GradScaler`` multiplies a gradient that was computed without its factor: under autocast to
    float16, small gradients may already be zero, so prefer bfloat16. DistributedDataParallel wraps the
    module that calls the loss, and is not called inside the loss.

    Args:
        loss_fn: A function that returns a scalar tensor; see :func:`compile` for what it may contain.
            Parameters are inputs: they may change between calls, or be replaced.
        backend: "inductor", torch's compiler; "eager", which runs the operations of the graph one by
            one; or a function (graph module, inputs) -> function.
        dynamic: Whether sizes are symbolic, for sizes that change from call to call.
        check: Whether the first run of each graph is compared with ``loss_fn`` and its gradient.
    Returns:
        A :class:`CompiledLoss`, which is called like ``loss_fn``.
    Raises:
        UnsupportedError: If ``loss_fn`` reads values of tensors, changes one in place, or draws from a
            ``torch.Generator``.
        NoSecondDerivative: If the loss depends on no tensor that requires grad, or if the results of
            the graph differ from those of ``loss_fn``.
    Example:
        >>> w = nn.Parameter(torch.tensor([1.0, 2.0]))
        >>> loss = hog.compiled_loss(lambda x: (w * x).square().sum(), backend="eager")
        >>> loss(torch.ones(2)).backward()
        >>> w.grad
        tensor([2., 4.])
    """
    return CompiledLoss(loss_fn, backend=backend, dynamic=dynamic, check=check)


@final
class CompiledLoss:
    """A loss that runs as one graph with its gradient, returned by :func:`compiled_loss`.

    Args:
        fn: The loss; an attribute, as is ``name``.
        backend: What runs the graph; see :func:`compile`.
        dynamic: Whether sizes are symbolic.
        check: Whether the first run of each graph is compared with ``fn`` and its gradient.
        name: The name of the loss in messages. Default: its qualified name.
        place: Where graphs are kept. Default: with the function.
        precheck: A function that is called with the arguments before each capture.
    Example:
        >>> hog.compiled_loss(nn.functional.mse_loss, backend="eager")
        hoglib.compiled_loss(mse_loss), 0 graphs
    """

    def __init__(
        self, fn: Callable[..., Tensor], *, backend: Any, dynamic: bool = False, check: bool = True,
        name: str | None = None, place: Place | None = None,
        precheck: Callable[..., Any] | None = None,
    ) -> None:  # fmt: skip
        validation.function("loss_fn", fn)
        self.fn, self.name, self.__doc__ = fn, name or name_of(fn), fn.__doc__
        self._place = place or Place.of(fn)
        self._options: dict[str, Any] = {
            "backend": backend, "dynamic": dynamic, "check": check, "precheck": precheck,
        }  # fmt: skip
        self._with_gradient = self._gradient(create_graph=False)

    def _gradient(self, create_graph: bool) -> Compiled:
        place = self._place._replace(key=(self._place.key, "gradient", create_graph))
        both = f"{self.name} and its gradient"
        fn = _Gradient(self.fn, self.name, create_graph)
        return Compiled(fn, name=both, place=place, **self._options)

    @cached_property
    def _with_graph(self) -> Compiled:
        return self._gradient(create_graph=True)

    @cached_property
    def _value(self) -> Compiled:
        return Compiled(self.fn, name=self.name, place=self._place, **self._options)

    @property
    def signatures(self) -> list[GraphEntry]:
        """The graphs that were captured so far; see :func:`compile`."""
        parts = (self._with_gradient, self._value, self._with_graph)
        return [one for part in parts for one in part.signatures]

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        if runs_elsewhere():
            return self.fn(*args, **kwargs)
        value: Tensor
        if not torch.is_grad_enabled():
            value = self._value(*args, **kwargs)
            return value
        both = self._with_gradient
        form, tensors = signature.parse_call(both.name, args, kwargs, both.dynamic)
        found = both.find_or_capture(form, tensors)
        if found is None:
            return self.fn(*args, **kwargs)
        entry, lifted = found
        inputs = entry.graph_inputs(tensors, lifted)
        value, *grads = entry.execute(inputs)
        grads = self._without_aliases(entry, grads, inputs)
        versions = [x._version for x in inputs]
        arguments = requiring_grad(tensors, [])
        variables = [
            arguments[of.where] if of.is_argument else lifted[of.where] for of in entry.inputs_named
        ]

        def recompute() -> list[Tensor]:
            if versions != [x._version for x in inputs]:
                raise NoSecondDerivative(
                    f"{self.name}: expected a second backward (retain_graph=True) before the tensors "
                    "that the loss was computed from change, got one that was changed in place. Call "
                    "backward before it changes."
                )
            return self._without_aliases(entry, entry.execute(inputs)[1:], inputs)

        def differentiable_gradients() -> list[Tensor]:
            check_unchanged(both, entry, form, tensors, lifted)
            args, kwargs = form.fill(tensors)
            with form.restored_context():
                if self._with_graph.find_or_capture(form, tensors) is None:
                    value = self.fn(*args, **kwargs)
                    return list(torch.autograd.grad(value, variables, create_graph=True))
                grads: list[Tensor] = self._with_graph(*args, **kwargs)[1]
            return grads

        return with_gradients(
            value, grads, variables, with_graph=differentiable_gradients, recompute=recompute
        )

    def _without_aliases(
        self, entry: GraphEntry, grads: list[Tensor], inputs: list[Tensor]
    ) -> list[Tensor]:
        """Gradients with memory of their own: a graph may return an input, or one tensor twice.

        A graph does so in each call or in none, but for a backend of the user's.
        """
        if entry.aliases is None or callable(self._with_gradient.backend):
            entry.aliases = _aliases(grads, inputs)
        for i in entry.aliases:
            grads[i] = grads[i].clone()
        return grads

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        """Binds like a function, so that a method can be compiled."""
        return self if owner is None else MethodType(self, owner)

    def __reduce__(self) -> Any:
        """A copy has graphs of its own."""
        options = {name: getattr(self._value, name) for name in OPTIONS}
        return partial(type(self), **options), (self.fn,)

    def __repr__(self) -> str:
        return f"hoglib.compiled_loss({self.name}), {count_graphs(self.signatures)}"


@final
class _Gradient:
    """(value, gradients, what they are gradients of) of a loss.

    The function that is captured. To be compared, it runs once more with the same tensors in the same
    order.
    """

    independent = True  # the gradient of an argument excludes what it was computed from

    def __init__(self, fn: Callable[..., Tensor], name: str, create_graph: bool) -> None:
        self.fn, self._name, self._create_graph = fn, name, create_graph
        self._reached: list[int] = []  # ids of the leaves besides arguments, at the last capture

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Tensor, list[Tensor], list[InputRef]]:
        value = validation.scalar(self._name, self.fn(*args, **kwargs))
        refuse_outer_graph(self._name)
        given = requiring_grad(pytree.tensors((args, kwargs)), [])
        variables = given + self._leaves(value, given)
        if value.requires_grad:
            # As a backward, it runs outside of autocast.
            with without_tensor_hooks(variables), torch_internals.no_autocast():
                grads = torch.autograd.grad(
                    value, variables, create_graph=self._create_graph, allow_unused=True
                )
            refs = [
                *(InputRef(i, True) for i in range(len(given))),
                *(InputRef(x, False) for x in variables[len(given) :]),
            ]
            found = [(g, of) for g, of in zip(grads, refs, strict=True) if g is not None]
            if found:
                return value, [g for g, _ in found], [of for _, of in found]
        raise NoSecondDerivative(
            f"{self._name}: expected a loss that depends on tensors that require grad, got one that "
            "does not. Look for .detach(), torch.no_grad(), and parameters that are frozen."
        )

    def _leaves(self, value: Tensor, given: list[Tensor]) -> list[Tensor]:
        """The leaves that a loss reaches.

        Leaves that it creates itself, such as ``x.detach().requires_grad_()``, are not among them:
        during a capture these are fake tensors.
        """
        inside = leaf_tensors([value], since=[x for x in given if not x.is_leaf])
        arguments = {id(x) for x in given}
        leaves = [value] if value.is_leaf else inside
        found = {id(x): x for x in leaves if id(x) not in arguments}
        if torch_internals.tracing():
            self._reached = [key for key, x in found.items() if not isinstance(x, FakeTensor)]
        return [found[key] for key in self._reached if key in found]


def _aliases(grads: list[Tensor], inputs: list[Tensor]) -> list[int]:
    """The gradients that share memory with an input or with a gradient before them."""
    known = {x.untyped_storage().data_ptr() for x in inputs}
    found = []
    for i, grad in enumerate(grads):
        pointer = grad.untyped_storage().data_ptr()
        if pointer in known:
            found.append(i)
        known.add(pointer)
    return found
