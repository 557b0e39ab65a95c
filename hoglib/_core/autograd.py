"""Recording gradients wherever the caller stands: under no_grad, and in inference mode."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from hoglib._core import pytree
from hoglib._core.gradient_graph import check_custom_functions, directly_reached, warn_detached
from hoglib._core.torch_internals import transforms_active
from hoglib.errors import HoglibError, NoSecondDerivative, UnsupportedError

T = TypeVar("T")


@contextmanager
def grad_enabled() -> Iterator[None]:
    """Gradients are recorded inside; enable_grad alone does not suffice in inference mode."""
    with torch.inference_mode(False), torch.enable_grad():
        yield


@contextmanager
def outside_inference_mode() -> Iterator[None]:
    """Where tensors can be differentiated by: inference mode is left for no_grad."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def clone_inference_tensors(tree: T) -> T:
    """The tree with its inference tensors, which autograd refuses to save, replaced by copies."""

    def copy(tensor: Tensor) -> Tensor:
        return tensor.clone() if tensor.is_inference() else tensor

    result: T = pytree.map_tensors(copy, tree)
    return result


def without_graph(function: Callable[[], Tensor]) -> Tensor:
    """A value without its graph; of a function that differentiates inside, with gradients on."""
    with torch.no_grad():
        try:
            return function()
        except RuntimeError as error:
            if "does not require grad" not in str(error):
                raise
    return function().detach()


# === Lists of tensors, one a parameter: to differentiate by, and what autograd gives for them.

Vector = list[Tensor]


def fresh_leaves(leaves: Vector, create_graph: bool) -> Vector:
    """Tensors like the leaves that require grad, connected to them only where that is asked for."""
    return [
        leaf.view_as(leaf)
        if create_graph and leaf.requires_grad
        else leaf.detach().requires_grad_()
        for leaf in leaves
    ]


def dense(part: Tensor) -> Tensor:
    """A gradient in the layout of its parameter; that of an embedding may be sparse."""
    return part if part.layout is torch.strided else part.to_dense()


def materialize_grads(parts: list[Tensor | None], like: Vector) -> Vector:
    """Zeros where autograd says None: what does not depend has a derivative of zero."""
    return [
        torch.zeros_like(leaf) if part is None else dense(part)
        for part, leaf in zip(parts, like, strict=True)
    ]


# === Errors of torch about derivatives that it lacks, in words that say what to do.

# What torch says of an operation that it cannot differentiate.
NOT_DIFFERENTIABLE = (
    "not implemented", "forward AD", "does not currently support double backward",
    "don't support automatic differentiation", "saved tensor hooks", "incompatible with .grad()",
    "setup_context", "doesn't have storage",
    "for sparse tensors", "Sparse division",
)  # fmt: skip


@contextmanager
def translate_errors(what: str) -> Iterator[None]:
    """Names the operation that torch has no derivative of."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, HoglibError) or not any(
            word in str(error) for word in NOT_DIFFERENTIABLE
        ):
            raise
        raise UnsupportedError(
            f"{what}: expected operations that torch can differentiate twice, got one that it cannot: "
            f"{str(error).splitlines()[0]}. Write it by other operations; `hoglib env` lists those "
            "that are replaced by themselves (stand_ins=True)."
        ) from error


# === The gradient of a scalar function of leaves, with a graph of its own; and products through
# that.

ScalarFunction = Callable[..., Tensor]


def gradient_with_graph(
    func: ScalarFunction, leaves: Vector, what: str, create_graph: bool
) -> tuple[Tensor, Vector, list[Tensor | None]]:
    """The value, the leaves that it was computed from, and its gradient with a graph of its own."""
    own = fresh_leaves(leaves, create_graph)
    value = func(*own)
    check_custom_functions(value, what)
    if not create_graph and value.requires_grad:
        check_uses_given_params(value, leaves, what)
    gradient: list[Tensor | None] = [None]
    if value.requires_grad:
        with translate_errors(what), warn_detached(value, what):
            gradient = list(torch.autograd.grad(value, own, create_graph=True, allow_unused=True))
    if all(part is None for part in gradient):
        raise NoSecondDerivative(
            "func(params, *args): expected a value that depends on params, got one that does not; "
            "look for .detach(), .item(), .data or a torch.no_grad() in func, and for a func that "
            "uses the model's own parameters instead of the params it is given."
        )
    return value, own, gradient


def check_uses_given_params(value: Tensor, leaves: Vector, what: str) -> None:
    """The value comes from the copies of the leaves that func was given, not from the leaves too."""
    direct = directly_reached(value, leaves)
    if direct:
        shapes = ", ".join(str(tuple(leaves[i].shape)) for i in direct)
        raise NoSecondDerivative(
            f"{what}: expected a func that uses the params it is given, got one that uses the "
            f"same tensors (of shape {shapes}) from elsewhere too: a part of the derivatives would be "
            "missing. Look for the model's own parameters in func, model.parameters() or a list of "
            "weights; take them from params, or detach() what is meant as a constant."
        )


def vjp(
    gradient: list[Tensor | None],
    own: Vector,
    vector: Vector,
    what: str,
    keep: bool = False,
    create_graph: bool = False,
) -> list[Tensor | None]:
    """d <gradient, vector> / d own, by a backward pass through the gradient's graph."""
    pairs = [
        (g, v) for g, v in zip(gradient, vector, strict=True) if g is not None and g.requires_grad
    ]
    if not pairs:
        return [None] * len(own)
    with translate_errors(what):
        return list(
            torch.autograd.grad(
                [g for g, _ in pairs],
                own,
                [v for _, v in pairs],
                retain_graph=keep or create_graph,
                create_graph=create_graph,
                allow_unused=True,
            )
        )


# === A value whose gradients were computed before backward.


def with_gradients(
    value: Tensor,
    grads: Sequence[Tensor],
    tensors: Sequence[Tensor],
    twice: str = "",
    again: Callable[[], Sequence[Tensor]] | None = None,
    anew: Callable[[], Sequence[Tensor]] | None = None,
) -> Tensor:
    """The value, whose backward hands each tensor the gradient that is known, scaled by what comes in.

    again: the gradients anew with a graph of their own, for a backward that is to be differentiated.
    anew: the gradients once more. With it those that are known are given away by the first backward,
    and not copied: nobody else may hold them or their memory.
    twice: without it, what is said of a second derivative, which there is none of.
    """
    result: Tensor = _Precomputed.apply(value, twice, again, anew, list(grads), *tensors)
    return result


class _Precomputed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        value: Tensor,
        twice: str,
        again: Any,
        anew: Any,
        grads: list[Tensor],
        *tensors: Tensor,
    ) -> Tensor:
        ctx.twice, ctx.again, ctx.anew, ctx.grads = twice, again, anew, grads
        # Reading them in backward raises if a step changed them since: the gradients would be stale.
        ctx.save_for_backward(*tensors)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        _ = ctx.saved_tensors
        if torch.is_grad_enabled():
            if ctx.again is None:
                raise NoSecondDerivative(ctx.twice)
            handed_on = [grad * part for part in ctx.again()]
        elif ctx.anew is None or transforms_active():
            handed_on = [grad * part for part in ctx.grads or ctx.anew()]
        else:
            handed_on, ctx.grads = ctx.grads or list(ctx.anew()), None
            if not (grad.device.type == "cpu" and grad == 1):
                handed_on = [part.mul_(grad) for part in handed_on]
        return (None,) * 5 + tuple(handed_on)
