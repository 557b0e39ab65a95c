"""The routes to a second derivative that `audit` tries, each as a function of leaves and directions."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import grad, jacrev, jvp, vjp, vmap

from hoglib._core import pytree, validation
from hoglib._core.autograd import Vector, fresh_leaves, materialize_grads
from hoglib.errors import ArgumentTypeError, ArgumentValueError

Scalar = Callable[..., Tensor]  # of leaves


class Route(NamedTuple):
    """A way to derivatives of a scalar function f of leaves, and what it gives along v.

    of: "hessian" for H v, "curvature" for w^T H v, "third" for the derivative of w^T H v.
    """

    key: str
    title: str
    of: str
    product: Callable[[Scalar, Vector, Vector, Vector], Vector]

    @property
    def row(self) -> str:
        return f"{'third' if self.of == 'third' else 'second'} derivative: {self.title}"


def gradient(f: Scalar, own: Vector, *, create_graph: bool = False) -> list[Tensor | None]:
    """The gradient of f at leaves that require grad."""
    value = f(*own)
    if not value.requires_grad:
        return [None] * len(own)
    return list(torch.autograd.grad(value, own, create_graph=create_graph, allow_unused=True))


def pulled(
    parts: Sequence[Tensor | None], own: Vector, v: Vector, *, create_graph: bool = False
) -> Vector:
    """d <parts, v> / d own; what has no graph counts as constant, as it does in autograd."""
    live = [(g, w) for g, w in zip(parts, v, strict=True) if g is not None and g.requires_grad]
    if not live:
        return [torch.zeros_like(x) for x in own]
    found = torch.autograd.grad(
        [g for g, _ in live], own, [w for _, w in live], create_graph=create_graph,
        allow_unused=True,
    )  # fmt: skip
    return materialize_grads(list(found), own)


def reverse_over_reverse(f: Scalar, leaves: Vector, v: Vector, w: Vector) -> Vector:
    own = fresh_leaves(leaves, False)
    return pulled(gradient(f, own, create_graph=True), own, v)


def third_order(f: Scalar, leaves: Vector, v: Vector, w: Vector) -> Vector:
    own = fresh_leaves(leaves, False)
    product = pulled(gradient(f, own, create_graph=True), own, v, create_graph=True)
    return pulled(product, own, w)


def _of_all(f: Scalar, leaves: Vector) -> Callable[..., tuple[Tensor, ...]]:
    """The gradient by torch.func, as a function of the leaves."""
    gradients: Callable[..., tuple[Tensor, ...]] = grad(f, argnums=tuple(range(len(leaves))))
    return gradients


def forward_over_reverse(f: Scalar, leaves: Vector, v: Vector, w: Vector) -> Vector:
    return list(jvp(_of_all(f, leaves), tuple(leaves), tuple(v))[1])


def reverse_over_forward(f: Scalar, leaves: Vector, v: Vector, w: Vector) -> Vector:
    def slope(*own: Tensor) -> Tensor:
        found: Tensor = jvp(f, own, tuple(v))[1]
        return found

    return list(_of_all(slope, leaves)(*leaves))


def forward_over_forward(f: Scalar, leaves: Vector, v: Vector, w: Vector) -> Vector:
    def slope(*own: Tensor) -> Tensor:
        found: Tensor = jvp(f, own, tuple(v))[1]
        return found

    return [jvp(slope, tuple(leaves), tuple(w))[1]]


def _jacrev(f: Scalar, leaves: Vector) -> Callable[..., tuple[Tensor, ...]]:
    jacobian: Callable[..., tuple[Tensor, ...]] = jacrev(f, argnums=tuple(range(len(leaves))))
    return jacobian


def func_hessian(f: Scalar, leaves: Vector, v: Vector, w: Vector) -> Vector:
    """As torch.func.hessian, jacfwd of jacrev, has its columns: vmap over directions."""
    jacobian = _jacrev(f, leaves)

    def column(*direction: Tensor) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = jvp(jacobian, tuple(leaves), direction)[1]
        return found

    columns = vmap(column, randomness="same")(*(part[None] for part in v))
    return [part[0] for part in columns]


def jacrev_of_jacrev(f: Scalar, leaves: Vector, v: Vector, w: Vector) -> Vector:
    """As it has its rows: vmap over the cotangents of a gradient."""
    pull = vjp(_jacrev(f, leaves), *leaves)[1]
    rows = vmap(lambda *cotangent: pull(cotangent), randomness="same")(*(part[None] for part in v))
    return [part[0] for part in rows]


def grad_of_vmap(f: Scalar, leaves: Vector, v: Vector, w: Vector) -> Vector:
    """As a meta-gradient by grad(vmap(task)), with inner gradients at parameters of each task."""

    def total(*own: Tensor) -> Tensor:
        def task(e: Tensor) -> Tensor:
            adapted = [x + e * y for x, y in zip(own, w, strict=True)]
            return pytree.dot(list(_of_all(f, leaves)(*adapted)), v)

        slopes: Tensor = vmap(task, randomness="same")(leaves[0].new_zeros(1))
        return slopes.mean()

    return list(_of_all(total, leaves)(*leaves))


AUTO = "rr"  # what hvp(mode="auto") takes
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


def asked_for(value: object) -> list[Route]:
    """The routes of these names, each by its key or title; the one that hvp takes for None."""
    if value is None:
        return [ROUTES[AUTO]]
    given = [value] if isinstance(value, str) else value
    known = {name: route for route in ROUTES.values() for name in (route.title, route.key)}
    known |= {"auto": ROUTES[AUTO], "rrr": ROUTES["third order"]}
    if not isinstance(given, list | tuple | set | frozenset) or not given:
        raise ArgumentTypeError(
            f"routes: expected some of {', '.join(ROUTES)}, got {validation.describe(value)}."
        )
    for name in given:
        if not isinstance(name, str) or name not in known:
            raise ArgumentValueError(f"routes: expected some of {', '.join(known)}; got {name!r}.")
    chosen = {known[name].key for name in given}
    return [route for key, route in ROUTES.items() if key in chosen]
