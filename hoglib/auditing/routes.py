"""The routes to a second derivative that `audit` tries, each as a function of leaves and directions."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import grad, jacrev, jvp, vmap

from hoglib._core import pytree, validation
from hoglib._core.autograd import Vector, fresh_leaves, materialize_grads
from hoglib.errors import ArgumentTypeError, ArgumentValueError

Scalar = Callable[..., Tensor]  # a scalar function of leaves


class Route(NamedTuple):
    """One way to a derivative of a scalar function f of leaves, along directions v and w.

    quantity: "hessian" for H v, "curvature" for w^T H v, "third" for the derivative of w^T H v.
    product(f, leaves, v, w) computes it.
    """

    key: str
    title: str
    quantity: str
    product: Callable[[Scalar, Vector, Vector, Vector], Vector]

    @property
    def row(self) -> str:
        """The name of its row in a report."""
        order = "third" if self.quantity == "third" else "second"
        return f"{order} derivative: {self.title}"

    @property
    def product_text(self) -> str:
        """What it computes, as it stands in a sentence."""
        quantity = {
            "hessian": "H v",
            "curvature": "w^T H v",
            "third": "the third derivative",
        }[self.quantity]
        return f"{quantity} by {self.title}"


def requested_routes(names: object) -> list[Route]:
    """The routes with these keys or titles; for None the one that hvp(mode="auto") takes."""
    if names is None:
        return [ROUTES[AUTO]]
    given = [names] if isinstance(names, str) else names
    known = {name: route for route in ROUTES.values() for name in (route.title, route.key)}
    known |= {"auto": ROUTES[AUTO], "rrr": ROUTES["third order"]}
    if not isinstance(given, list | tuple | set | frozenset) or not given:
        raise ArgumentTypeError(
            f"routes: expected some of {', '.join(ROUTES)}, got {validation.describe(names)}."
        )
    for name in given:
        if not isinstance(name, str) or name not in known:
            raise ArgumentValueError(f"routes: expected some of {', '.join(known)}, got {name!r}.")
    chosen = {known[name].key for name in given}
    return [route for key, route in ROUTES.items() if key in chosen]


def gradient(f: Scalar, own: Vector, *, create_graph: bool = False) -> list[Tensor | None]:
    """The gradient of f at leaves that require grad."""
    value = f(*own)
    if not value.requires_grad:
        return [None] * len(own)
    return list(torch.autograd.grad(value, own, create_graph=create_graph, allow_unused=True))


def _vjp(
    outputs: Sequence[Tensor | None], own: Vector, v: Vector, *, create_graph: bool = False
) -> Vector:
    """d <outputs, v> / d own; an output without a graph counts as a constant, as it does in
    autograd."""
    pairs = [(y, u) for y, u in zip(outputs, v, strict=True) if y is not None and y.requires_grad]
    if not pairs:
        return [torch.zeros_like(x) for x in own]
    found = torch.autograd.grad(
        [y for y, _ in pairs], own, [u for _, u in pairs], create_graph=create_graph,
        allow_unused=True,
    )  # fmt: skip
    return materialize_grads(list(found), own)


def reverse_over_reverse(f: Scalar, leaves: Vector, v: Vector, w: Vector) -> Vector:
    """d <grad f, v> / d leaves."""
    own = fresh_leaves(leaves, False)
    return _vjp(gradient(f, own, create_graph=True), own, v)


def third_order(f: Scalar, leaves: Vector, v: Vector, w: Vector) -> Vector:
    """d <H v, w> / d leaves, reverse three times."""
    own = fresh_leaves(leaves, False)
    product = _vjp(gradient(f, own, create_graph=True), own, v, create_graph=True)
    return _vjp(product, own, w)


def forward_over_reverse(f: Scalar, leaves: Vector, v: Vector, w: Vector) -> Vector:
    """The jvp of grad f."""
    return list(jvp(_grad(f, leaves), tuple(leaves), tuple(v))[1])


def reverse_over_forward(f: Scalar, leaves: Vector, v: Vector, w: Vector) -> Vector:
    """The gradient of the jvp of f."""

    def slope(*own: Tensor) -> Tensor:
        found: Tensor = jvp(f, own, tuple(v))[1]
        return found

    return list(_grad(slope, leaves)(*leaves))


def forward_over_forward(f: Scalar, leaves: Vector, v: Vector, w: Vector) -> Vector:
    """The jvp along w of the jvp of f along v."""

    def slope(*own: Tensor) -> Tensor:
        found: Tensor = jvp(f, own, tuple(v))[1]
        return found

    return [jvp(slope, tuple(leaves), tuple(w))[1]]


def func_hessian(f: Scalar, leaves: Vector, v: Vector, w: Vector) -> Vector:
    """A column of torch.func.hessian = jacfwd(jacrev(f)): vmap over directions."""
    jacobian = _jacrev(f, leaves)

    def column(*direction: Tensor) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = jvp(jacobian, tuple(leaves), direction)[1]
        return found

    columns = vmap(column, randomness="same")(*(part[None] for part in v))
    return [part[0] for part in columns]


def jacrev_of_jacrev(f: Scalar, leaves: Vector, v: Vector, w: Vector) -> Vector:
    """A row of jacrev(jacrev(f)): vmap over the cotangents of a gradient."""
    pull = torch.func.vjp(_jacrev(f, leaves), *leaves)[1]
    rows = vmap(lambda *cotangent: pull(cotangent), randomness="same")(*(part[None] for part in v))
    return [part[0] for part in rows]


def grad_of_vmap(f: Scalar, leaves: Vector, v: Vector, w: Vector) -> Vector:
    """A meta-gradient by grad(vmap(task)), with inner gradients at the parameters of each task."""

    def total(*own: Tensor) -> Tensor:
        def task(e: Tensor) -> Tensor:
            adapted = [x + e * y for x, y in zip(own, w, strict=True)]
            return pytree.dot(list(_grad(f, leaves)(*adapted)), v)

        slopes: Tensor = vmap(task, randomness="same")(leaves[0].new_zeros(1))
        return slopes.mean()

    return list(_grad(total, leaves)(*leaves))


def _grad(f: Scalar, leaves: Vector) -> Callable[..., tuple[Tensor, ...]]:
    """torch.func.grad of f by all leaves."""
    gradients: Callable[..., tuple[Tensor, ...]] = grad(f, argnums=tuple(range(len(leaves))))
    return gradients


def _jacrev(f: Scalar, leaves: Vector) -> Callable[..., tuple[Tensor, ...]]:
    """torch.func.jacrev of f by all leaves."""
    jacobian: Callable[..., tuple[Tensor, ...]] = jacrev(f, argnums=tuple(range(len(leaves))))
    return jacobian


AUTO = "rr"  # the route of hvp(mode="auto")
ROUTES = {
    route.key: route
    for route in (
        Route("rr", "reverse-over-reverse", "hessian", reverse_over_reverse),
        Route("fr", "forward-over-reverse", "hessian", forward_over_reverse),
        Route("rf", "reverse-over-forward", "hessian", reverse_over_forward),
        Route("ff", "forward-over-forward", "curvature", forward_over_forward),
        Route("torch.func.hessian", "torch.func.hessian", "hessian", func_hessian),
        Route("jacrev of jacrev", "jacrev of jacrev", "hessian", jacrev_of_jacrev),
        Route("grad of vmap", "grad of vmap", "hessian", grad_of_vmap),
        Route("third order", "reverse-over-reverse-over-reverse", "third", third_order),
    )
}
