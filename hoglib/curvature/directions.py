"""Second-order operators as weighted sums of second derivatives along directions.

sum_ij a_ij d_i d_j f = sum_r w_r v_r^T H v_r
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hoglib._core import torch_internals, validation
from hoglib.curvature.input_derivatives import Weighted
from hoglib.errors import ArgumentTypeError, ArgumentValueError


class Directions(NamedTuple):
    """Directions v_r, [R, *x.shape], and weights w_r: [R], or one number for all.

    unit: they are the elements of a point, one after another.
    """

    vectors: Tensor
    weights: Tensor | float
    unit: bool

    def probes(self) -> list[Weighted]:
        """As the nested routes take them."""
        weights = self.weights
        if not isinstance(weights, Tensor):
            weights = [weights] * len(self.vectors)  # type: ignore[assignment]
        vectors = range(len(self.vectors)) if self.unit else self.vectors.unbind()
        return list(zip(vectors, weights, strict=True))  # type: ignore[arg-type]


def units(x: Tensor, batched: bool) -> Tensor:
    """The elements of a point as directions, [D, *x.shape], of which points share the memory."""
    shape = x.shape[1:] if batched else x.shape
    D = shape.numel()
    e = torch.eye(D, dtype=x.dtype, device=x.device)
    if not batched:
        return e.reshape(D, *shape)
    return e.reshape(D, 1, *shape).expand(D, len(x), *shape)


def directions(x: Tensor, batched: bool, coefficients: Any, signs: Tensor | None) -> Directions:
    """Of the operator sum_ij a_ij d_i d_j with these coefficients, or of the Laplacian.

    signs: random vectors [k, *x.shape] of independent signs, which replace the exact sum.
    """
    if coefficients is None:
        if signs is None:
            return Directions(units(x, batched), 1.0, True)
        return Directions(signs, 1 / len(signs), False)
    a = check_coefficients(coefficients, x, batched)
    D = (x.shape[1:] if batched else x.shape).numel()
    e = units(x, batched)
    if signs is None and a.dim() == 1:
        return Directions(e, a, True)
    if signs is None and _is_nonnegative(a, D, batched):
        if _is_diagonal(a, batched):  # sqrt(a_i) e_i
            return Directions(e * a.sqrt().reshape(x.shape), 1.0, False)
        sizes, q = torch.linalg.eigh((a + a.mT) / 2)
        v = (q * sizes.clamp(min=0).sqrt().unsqueeze(-2)).movedim(-1, 0)
        return Directions(v.reshape(D, *x.shape), 1.0, False)
    # d_u d_z = 1/4 (d_(u + z)^2 - d_(u - z)^2) with z = a u; s balances the two
    u = e if signs is None else signs
    flat = u.reshape(len(u), -1, D)
    z = (
        flat * a
        if _is_diagonal(a, batched)
        else torch.einsum("nij,rnj->rni", a.reshape(-1, D, D), flat)
    )
    s = a.detach().abs().mean().sqrt()
    s = torch.where(s > 0, s, torch.ones_like(s))
    u, z = u * s, (z / s).reshape(u.shape)
    weights = torch.full((2 * len(u),), 0.25, dtype=x.dtype, device=x.device)
    weights[len(u) :] = -0.25
    if signs is not None:
        weights = weights / len(signs)
    return Directions(torch.cat([u + z, u - z]), weights, False)


def _is_diagonal(a: Tensor, batched: bool) -> bool:
    return a.dim() == (2 if batched else 1) or a.dim() == 1


def _is_nonnegative(a: Tensor, D: int, batched: bool) -> bool:
    """Whether the matrices have real roots that need no derivative; False where values are unknown."""
    if a.requires_grad or torch_internals.tracing() or torch_internals.transforms_active():
        return False
    if _is_diagonal(a, batched):
        return bool((a >= 0).all())
    sizes = torch.linalg.eigvalsh((a + a.mT) / 2)
    floor = -torch.finfo(a.dtype).eps * D * sizes.abs().amax() if sizes.numel() else 0
    return bool((sizes >= floor).all())


def check_coefficients(coefficients: Any, x: Tensor, batched: bool) -> Tensor:
    """The tensor a: [D], [N, D] or [N, D, D]; of one point [D] or [D, D]."""
    a = coefficients(x) if callable(coefficients) else coefficients
    validation.tensor("coefficients", a)
    D = (x.shape[1:] if batched else x.shape).numel()
    allowed = [(D,), (len(x), D), (len(x), D, D)] if batched else [(D,), (D, D)]
    if tuple(a.shape) not in allowed:
        raise ArgumentValueError(
            f"coefficients: expected {' or '.join(str(list(shape)) for shape in allowed)} for x of "
            f"shape {tuple(x.shape)}, with the elements of a point in one dimension, got "
            f"{validation.describe(a)}."
        )
    if a.dtype != x.dtype or a.device != x.device:
        raise ArgumentTypeError(
            f"coefficients: expected {x.dtype} on {x.device}, as x, got {validation.describe(a)} on "
            f"{a.device}; convert them with `.to(x)`."
        )
    return a


def draw(x: Tensor, number: Any, generator: Any, sampler: Callable[..., Tensor]) -> Tensor:
    """number random vectors like x, [number, *x.shape]."""
    validation.at_least("num_projections", number, 1)
    if validation.generator(generator) is not None and generator.device.type != x.device.type:
        raise ArgumentValueError(
            f"generator: expected one on {x.device.type}, as x, got one on {generator.device.type}; "
            f"make it with `torch.Generator({x.device.type!r})`."
        )
    return sampler((number, *x.shape), generator, x)


def signs(shape: tuple[int, ...], generator: Any, x: Tensor) -> Tensor:
    """-1 or 1 at each element of each point."""
    return (2 * torch.randint(0, 2, shape, generator=generator, device=x.device) - 1).to(x.dtype)


def normals(shape: tuple[int, ...], generator: Any, x: Tensor) -> Tensor:
    return torch.randn(shape, generator=generator, device=x.device, dtype=x.dtype)
