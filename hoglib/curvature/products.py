"""Hessian-vector products, and the routes by which they are computed."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hoglib import _arguments as arguments
from hoglib import _functorch, _tree
from hoglib._explaining import explaining
from hoglib._graph import check_functions, telling_of_cuts
from hoglib._recording import recordable, recording
from hoglib._substitution import lingering
from hoglib.stand_ins import stand_ins_if

Tree = Any
Loss = Callable[..., Tensor]
Route = Callable[..., tuple[Tensor, list[Tensor]]]


def hvp(
    func: Loss,
    params: Tree,
    v: Tree,
    *args: Any,
    mode: str = "auto",
    create_graph: bool = False,
    strict: bool = False,
    stand_ins: bool = True,
) -> tuple[Tensor, Tree]:
    r"""The value of a scalar function and the product of its Hessian with a vector.

        f = func(params, *args)        H v = d/de grad f(params + e v) at e = 0

    Shapes: v has the structure, shapes and dtypes of params, any pytree of floating-point tensors;
    the product has them too. Returns (f, H v), as `torch.autograd.functional.hvp`.

    mode: "reverse-over-reverse" differentiates the gradient's graph once more;
    "forward-over-reverse" is `torch.func.jvp` of `torch.func.grad`, which needs forward-mode rules for
    every operation; "auto" is the first, or the second inside torch.func transforms, where vmap of
    the first is wrong through normalisation layers.
    create_graph: whether value and product can be differentiated again, by params, v or args. Inside
    torch.func transforms they always can.
    strict: raise where a parameter has no second derivative, instead of giving zero
    (reverse-over-reverse only). stand_ins: run func inside `hoglib.second_order()`, where torch calls
    that have no second derivative, or a wrong one, go to functions that have a right one.

    The inputs are not changed, and it works under no_grad and inference_mode.
    Raises TypeError and ValueError for params, v or a value of the wrong kind, naming the leaf;
    RuntimeError when the value does not depend on params, or was computed by a custom Function that is
    `@once_differentiable`; NotImplementedError where torch has no derivative. Warns of a Function that
    keeps what its forward made.
    Source: Pearlmutter, Fast Exact Multiplication by the Hessian, 1994.
    """
    arguments.function("func", func)
    arguments.parameters(params)
    vector = arguments.same_structure("v", v, params)
    route = _ROUTES[_choose(arguments.one_of("mode", mode, ["auto", *_ROUTES]))]
    create_graph = create_graph or _functorch.transforms_active()
    leaves, structure = _tree.flatten(params)
    with recording(), lingering(), stand_ins_if(stand_ins):
        leaves, vector, inputs = recordable((leaves, vector, args))

        def of_leaves(*values: Tensor) -> Tensor:
            value = func(_tree.unflatten(values, structure), *inputs)
            return arguments.scalar("func(params, *args)", value)

        value, product = route(of_leaves, leaves, vector, create_graph, strict, _tree.paths(params))
    if not create_graph:
        value, product = value.detach().clone(), [leaf.detach() for leaf in product]
    return value, _tree.unflatten(product, structure)


def _choose(mode: str) -> str:
    if not _functorch.transforms_active():
        return "reverse-over-reverse" if mode == "auto" else mode
    if mode == "reverse-over-reverse":
        raise arguments.NotSupported(
            "hvp: expected mode='auto' or 'forward-over-reverse' inside torch.func transforms, got "
            "'reverse-over-reverse', whose vmap is silently wrong through normalisation layers."
        )
    return "forward-over-reverse"


def gradient_graph(
    func: Loss, leaves: list[Tensor], create_graph: bool, what: str
) -> tuple[Tensor, list[Tensor], list[Tensor | None]]:
    """The value, the leaves that it was computed from, and its gradient with a graph of its own."""
    own = [
        leaf.view_as(leaf)
        if create_graph and leaf.requires_grad
        else leaf.detach().requires_grad_()
        for leaf in leaves
    ]
    value = func(*own)
    check_functions(value, what)
    gradient: list[Tensor | None] = [None]
    if value.requires_grad:
        with explaining(what), telling_of_cuts(value, what):
            gradient = list(torch.autograd.grad(value, own, create_graph=True, allow_unused=True))
    if all(part is None for part in gradient):
        raise arguments.NoSecondDerivative(
            "func(params, *args): expected a value that depends on params, got one that does not; "
            "look for .detach(), .item(), .data or a torch.no_grad() in func, and for a func that "
            "uses the model's own parameters instead of the params it is given."
        )
    return value, own, gradient


def _reverse_over_reverse(
    func: Loss,
    leaves: list[Tensor],
    vector: list[Tensor],
    create_graph: bool,
    strict: bool,
    names: list[str],
) -> tuple[Tensor, list[Tensor]]:
    value, own, gradient = gradient_graph(func, leaves, create_graph, "hvp")
    pairs = [
        (grad, v)
        for grad, v in zip(gradient, vector, strict=True)
        if grad is not None and grad.requires_grad
    ]
    product: list[Tensor | None] = [None] * len(own)
    if pairs:
        with explaining("hvp"):
            product = list(
                torch.autograd.grad(
                    [grad for grad, _ in pairs],
                    own,
                    [v for _, v in pairs],
                    create_graph=create_graph,
                    allow_unused=True,
                )
            )
    if strict:
        missing = [repr(name) for name, part in zip(names, product, strict=True) if part is None]
        if missing:
            raise arguments.NoSecondDerivative(
                f"hvp(strict=True): expected a second derivative for every parameter, got none for "
                f"{', '.join(missing)}: the gradient does not depend on it. Leave it out of params, "
                f"or use strict=False, which gives zero there."
            )
    filled = [
        torch.zeros_like(leaf) if part is None else part
        for part, leaf in zip(product, own, strict=True)
    ]
    return value, filled


def _forward_over_reverse(
    func: Loss,
    leaves: list[Tensor],
    vector: list[Tensor],
    create_graph: bool,
    strict: bool,
    names: list[str],
) -> tuple[Tensor, list[Tensor]]:
    if strict:
        raise arguments.WrongValue(
            "hvp(strict=True): expected mode='reverse-over-reverse', got forward-over-reverse, which "
            "cannot tell a missing second derivative from a zero."
        )

    def watched(*values: Tensor) -> Tensor:
        value = func(*values)
        check_functions(value, "hvp")
        return value

    def gradient(*values: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        grads, value = torch.func.grad_and_value(watched, argnums=tuple(range(len(values))))(
            *values
        )
        return grads, value

    if not create_graph:
        leaves = [leaf.detach() for leaf in leaves]
    try:
        output: Any = torch.func.jvp(gradient, tuple(leaves), tuple(vector))
    except (RuntimeError, NotImplementedError) as error:
        if isinstance(error, arguments.Explained):
            raise
        hint = ""
        if "ZeroTensor" in str(error):
            hint = " torch's mse_loss is such an operation: leave stand_ins at True."
        raise arguments.NotSupported(
            f"hvp(mode='forward-over-reverse'): expected operations that torch can differentiate in "
            f"forward mode, got an error from one: {str(error).splitlines()[0]}{hint} Outside of "
            f"torch.func transforms use mode='reverse-over-reverse'."
        ) from error
    (_, value), (product, _) = output
    return value, list(product)


_ROUTES: dict[str, Route] = {
    "reverse-over-reverse": _reverse_over_reverse,
    "forward-over-reverse": _forward_over_reverse,
}
