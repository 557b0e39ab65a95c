"""Directions for the Laplacian of a function with a sparse Hessian H at each point.

If elements of a point are coloured so that H_ij = 0 for i and j of one colour, the Laplacian is

    sum_i H_ii = sum_c s_c^T H s_c        s_c the 0-1 vector of the elements of colour c

with one direction for each colour.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from hoglib._core.messages.closures import is_plain, owner_of
from hoglib._core.numerics.finite_differences import fixed_random_numbers
from hoglib._core.numerics.sparsity import indicators, neighbours_apart, random_factors, read_sparse
from hoglib._core.numerics.trust import memoize_on
from hoglib._core.substrate.autograd import fresh_leaves, materialize_grads, vjp
from hoglib._core.torch_api import pytree, torch_internals
from hoglib.curvature.points.input_derivatives import CALLER, point_values
from hoglib.errors import UnsupportedError
from hoglib.taylor.jet import TaylorOptions

AUTO = "auto"


@dataclass
class _Known:
    """The record of earlier calls of a function.

    calls: The number of calls with this pattern.
    given: The argument `sparsity`, and the plain values in args.
    vectors: The directions without signs, [colours, *x.shape].
    """

    calls: int = 0
    given: tuple[Any, ...] = ()
    vectors: Tensor | None = None


def coloured_directions(
    options: TaylorOptions, func: Callable[..., Tensor], x: Tensor, args: Any, sparsity: object
) -> Tensor:
    """The directions [colours, *x.shape] for a given pattern, or for the pattern that "auto" finds.

    Calls 1, 2, 4, 8, ... of a function with equal plain values in args compare the pattern with
    `_SummedHessian`. In between the Hessian may leave the pattern: with random signs the result is
    then an unbiased estimate.
    """
    if torch_internals.transforms_active() or torch_internals.tracing():
        raise UnsupportedError(
            "laplacian(sparsity=): expected a call outside of torch.func transforms and torch.compile, "
            "which hide the values; leave sparsity out there."
        )
    # Not `owner_of`: closures of one code with different values may have different patterns.
    owner, method = getattr(func, "__self__", func), getattr(func, "__func__", None)
    known = memoize_on(owner, (CALLER, method, x.shape, x.dtype, x.device), _Known) or _Known()
    given = sparsity, *(value for value in pytree.leaves(args) if is_plain(value))
    same = len(given) == len(known.given) and all(
        a is b or (not isinstance(a, Tensor) and a == b)
        for a, b in zip(given, known.given, strict=True)
    )
    known.calls = known.calls + 1 if same else 1
    if known.vectors is None or not known.calls & (known.calls - 1):
        H = _SummedHessian(options, func, x.detach(), args)
        pattern = None if isinstance(sparsity, str) and sparsity == AUTO else sparsity
        colours = neighbours_apart(read_sparse(H, pattern, owner_of(func), CALLER, None))
        known.vectors, known.given = H.like_points(indicators(colours).to(x)), given
    draws = torch.Generator(x.device).manual_seed(known.calls)
    signs = torch.randint(2, x.shape, generator=draws, device=x.device) * 2 - 1
    return known.vectors * signs


@final
class _SummedHessian:
    """sum_n w_n d^2 f_n / dx_n^2 [D, D], with random weights w: entries of the points do not cancel."""

    def __init__(
        self, options: TaylorOptions, func: Callable[..., Tensor], x: Tensor, args: Any
    ) -> None:
        policy = options.policy._replace(backend="")
        self._options = options._replace(policy=policy)
        self._func, self._x, self._args = func, x, args
        value = self._run(lambda x, args: point_values(func, args)(x))
        self._point = x.shape[1:] if value.dim() else x.shape
        self.shape = self._point.numel(), self._point.numel()
        self.dtype, self.device = x.dtype, x.device

    @property
    def T(self) -> "_SummedHessian":
        return self

    def _run(self, body: Callable[..., Any], *more: Tensor) -> Any:
        with fixed_random_numbers([self._x]):  # all products, and the Laplacian, draw equal numbers
            return self._options.evaluate(self._func, body, None, self._x, self._args, *more)

    def like_points(self, rows: Tensor) -> Tensor:
        """Vectors [k, D] as directions of all points, [k, *x.shape]."""
        ones = [1] * (self._x.dim() - len(self._point))
        return rows.view(len(rows), *ones, *self._point).expand(-1, *self._x.shape)

    def apply(self, rows: Tensor) -> Tensor:
        """The products with rows [k, D]."""

        def products(x: Tensor, args: Any, rows: Tensor) -> Tensor:
            (shift,) = fresh_leaves([x.new_zeros(self._point)], True)
            value = point_values(self._func, args)(x + shift).flatten()
            weights = random_factors(len(value), x.device, 0).to(x.dtype)
            (gradient,) = vjp([value], [shift], [weights], CALLER, create_graph=True)
            if gradient is None or not gradient.requires_grad:
                return torch.zeros_like(rows)
            found = [
                vjp([gradient], [shift], [row.view(self._point)], CALLER, retain_graph=True)
                for row in rows
            ]
            return torch.stack([materialize_grads(parts, [shift])[0].flatten() for parts in found])

        return self._run(products, rows) if len(rows) else rows.clone()
