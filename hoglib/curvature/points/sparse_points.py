"""Directions of a Laplacian whose Hessians are sparse.

With a colour for each element of a point, such that elements i and j of one colour have H_ij = 0,

    sum_i H_ii = sum_c s_c^T H s_c        s_c the 0-1 vector of the elements of colour c

takes as many directions as colours.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from hoglib._core.messages.closures import owner_of
from hoglib._core.numerics.finite_differences import fixed_random_numbers
from hoglib._core.numerics.sparsity import indicators, neighbours_apart, read_sparse
from hoglib._core.numerics.trust import found_once
from hoglib._core.substrate.autograd import fresh_leaves, materialize_grads, vjp
from hoglib._core.torch_api import torch_internals
from hoglib.curvature.points.input_derivatives import CALLER, point_values
from hoglib.errors import UnsupportedError
from hoglib.taylor.jet import TaylorOptions

AUTO = "auto"


@dataclass
class _Known:
    """What earlier calls of a function have found.

    calls: How many there were with this pattern.
    sparsity: The pattern that was given, or "auto".
    vectors: The directions, [colours, *x.shape].
    """

    calls: int = 0
    sparsity: object = None
    vectors: Tensor | None = None


def coloured_directions(
    options: TaylorOptions, func: Callable[..., Tensor], x: Tensor, args: Any, sparsity: object
) -> Tensor:
    """The directions [colours, *x.shape] for a pattern that is given, or found with "auto".

    The Hessian of the points' sum is compared with the pattern at calls 1, 2, 4, 8, ... of a function.
    """
    if torch_internals.transforms_active() or torch_internals.tracing():
        raise UnsupportedError(
            "laplacian(sparsity=): expected a call outside of torch.func transforms and torch.compile, "
            "which hide the values; leave sparsity out there."
        )
    known = found_once(owner_of(func), (CALLER, x.shape, x.dtype, x.device), _Known) or _Known()
    same = known.sparsity is sparsity or (
        not isinstance(sparsity, Tensor) and known.sparsity == sparsity
    )
    known.calls = known.calls + 1 if same else 1
    if known.vectors is None or not known.calls & (known.calls - 1):
        with fixed_random_numbers([x]):  # the Laplacian draws them again
            H = _SummedHessian(options, func, x.detach(), args)
            given = None if isinstance(sparsity, str) and sparsity == AUTO else sparsity
            # "auto" looks at these points anew
            matrix = read_sparse(H, given, H, "laplacian", None)
        colours = neighbours_apart(matrix)
        known.vectors, known.sparsity = H.like_points(indicators(colours).to(x)), sparsity
    return known.vectors


@final
class _SummedHessian:
    """sum_n w_n d^2 f_n / dx_n^2 [D, D], with weights w for which no entry cancels over the points."""

    def __init__(
        self, options: TaylorOptions, func: Callable[..., Tensor], x: Tensor, args: Any
    ) -> None:
        policy = options.policy._replace(backend="")
        self._options, self._func, self._x, self._args = (
            options._replace(policy=policy),
            func,
            x,
            args,
        )
        value = self._run(lambda x, args: point_values(func, args)(x))
        self._point = x.shape[1:] if value.dim() else x.shape
        self.shape = self._point.numel(), self._point.numel()
        self.dtype, self.device = x.dtype, x.device

    @property
    def T(self) -> "_SummedHessian":
        return self

    def _run(self, body: Callable[..., Any], *more: Tensor) -> Any:
        return self._options.evaluate(self._func, body, None, self._x, self._args, *more)

    def like_points(self, rows: Tensor) -> Tensor:
        """Vectors [k, D] as directions of all points, [k, *x.shape]."""
        rows = rows.view(-1, *self._point)
        return rows if rows.shape[1:] == self._x.shape else self._of_all_points(rows)

    def _of_all_points(self, rows: Tensor) -> Tensor:
        return rows.unsqueeze(1).expand(-1, *self._x.shape)

    def apply(self, rows: Tensor) -> Tensor:
        """The products with rows [k, D]."""

        def products(x: Tensor, args: Any, rows: Tensor) -> Tensor:
            (shift,) = fresh_leaves([x.new_zeros(self._point)], True)
            value = point_values(self._func, args)(x + shift).flatten()
            weights = torch.arange(1.0, len(value) + 1, dtype=x.dtype, device=x.device).cos()
            (gradient,) = vjp([value], [shift], [weights], CALLER, create_graph=True)
            if gradient is None or not gradient.requires_grad:
                return torch.zeros_like(rows)
            found = [
                vjp([gradient], [shift], [row.view(self._point)], CALLER, retain_graph=True)
                for row in rows
            ]
            return torch.stack([materialize_grads(parts, [shift])[0].flatten() for parts in found])

        return self._run(products, rows) if len(rows) else rows.clone()
