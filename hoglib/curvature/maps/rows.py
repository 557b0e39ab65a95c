"""Products of one linear map with several vectors: at once by vmap, or in a loop.

    rows = Rows(problem, "hessian", product, held_bytes, product)
    products = rows.map(lambda start, stop: vectors[start:stop], count)

vmap maps over the vectors only: the graph is recorded without vmap. (`torch.func.hessian` also maps
over the forward pass, which is silently wrong for the weight of a LayerNorm.) If an operation has no
batching rule, this call and all later calls loop. To find wrong batching rules, a linear combination
of the products is compared with one product of the combined vector: in the first call of a function at
these shapes and with this number of vectors, and on a CPU also in calls 2, 4, 8, ...
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from hoglib._core.messages.closures import owner_of
from hoglib._core.numerics.trust import DIGITS, agree, memoize_on
from hoglib._core.problem import Problem
from hoglib._core.runtime.logger import LOGGER
from hoglib._core.substrate.autograd import Vector
from hoglib._core.torch_api import pytree, torch_internals
from hoglib._core.torch_api.torch_modes import value_checks_on

# (start, stop) -> the vectors start to stop, [stop - start, *shape]
Chunk = Callable[[int, int], Vector]
# The most bytes of intermediate values of all vectors in one vmap. On a CPU they should stay in the
# cache: a row of the Hessian of an MLP of 128, batch 1,024 (5 MiB), takes 3.9 ms in a loop, 4.0 among
# 16, 7.6 among 128.
AT_ONCE, AT_ONCE_ON_DEVICE = 2**25, 2**30
ALONE = 2**21  # a CPU loops if one vector takes more bytes: vmap gains nothing


@dataclass
class _Known:
    """The record of earlier calls of a map."""

    calls: int = 0
    side_by_side: bool = True  # vmap runs, and gives the right products
    bytes: int = 0  # of the intermediate values for one vector


@final
class Rows(NamedTuple):
    """A linear map at a problem's point, for products with several vectors.

    Attributes:
        problem: The loss and the point.
        name: Identifies the map among the maps of this problem.
        product: v -> A v. It keeps its graph and reads no numbers.
        held_bytes: The bytes of the graph, about as many as one product takes.
        single: v -> A v with all checks.
        skips_zeros: Whether `product` accepts None for a zero leaf of v, and then skips its work.
    """

    problem: Problem
    name: Hashable
    product: Callable[[Vector], Vector]
    held_bytes: Callable[[], int]
    single: Callable[[Vector], Vector]
    skips_zeros: bool = False

    def _known(self, *numbers: int | None) -> _Known | None:
        """The record of this map for these numbers of vectors; None if products must loop."""
        problem, policy = self.problem, self.problem.policy
        if (
            torch_internals.transforms_active()
            or not value_checks_on()
            or problem.placement.is_sharded
            # remat blocks run again in backward: more memory than held_bytes() tells
            or policy.remat is not False
            # the batching rule of torch's own layer_norm has a wrong derivative
            or (policy.create_graph and not policy.stand_ins)
        ):
            return None
        shapes = tuple((x.shape, x.dtype) for x in _given(problem))
        key = policy.caller, self.name, shapes, numbers
        known = memoize_on(owner_of(problem.loss), key, _Known)
        return known if known is not None and known.side_by_side else None

    def map(self, chunk: Chunk, count: int, chunk_size: int | None = None, dim: int = 0) -> Vector:
        """The products with `count` vectors, stacked along dimension dim, chunk_size at once."""
        known = self._known(count, chunk_size) if count > 1 else None
        size, looks = 1, False
        if known is not None:
            known.calls += 1
            # On a device the comparison synchronizes, so only the first call compares.
            again = self.problem.leaves[0].device.type == "cpu"
            looks = not known.calls & (known.calls - 1) if again else known.calls == 1
            size = chunk_size or self._size(known, looks)
        products = []
        for start in range(0, count, size):
            # Contiguous: matrix products with strided vectors take 1.5 times as long.
            vectors = [x.contiguous() for x in chunk(start, min(start + size, count))]
            found = None
            if size > 1 and known is not None and known.side_by_side:
                # compare the first chunk, and a smaller last chunk
                own = looks and (not start or start + size > count)
                found = self._side_by_side(vectors, known, own)
            products.append(found or self._one_by_one(vectors))
        return [_joined(parts, dim) for parts in zip(*products, strict=True)]

    def _size(self, known: _Known, looks: bool) -> int:
        """The number of vectors in one vmap, by memory."""
        if looks:
            known.bytes = self.held_bytes()
        if self.problem.leaves[0].device.type != "cpu":
            return max(1, AT_ONCE_ON_DEVICE // max(known.bytes, 1))
        return 1 if known.bytes > ALONE else AT_ONCE // max(known.bytes, 1)

    def _one_by_one(self, vectors: Vector) -> Vector:
        found = [self.single([*v]) for v in zip(*vectors, strict=True)]
        return [
            parts[0].unsqueeze(0) if len(parts) == 1 else torch.stack(parts)
            for parts in zip(*found, strict=True)
        ]

    def _side_by_side(self, vectors: Vector, known: _Known, looks: bool) -> Vector | None:
        """The products by vmap; None if vmap fails or is wrong."""

        def product(used: Sequence[bool], *v: Tensor) -> tuple[Tensor, ...]:
            left = iter(v)
            given: Any = [next(left) if one else None for one in used]
            return tuple(self.product(given))

        runs, skips = [(0, len(vectors[0]), [True] * len(vectors))], self.skips_zeros
        if skips and vectors[0].is_cpu:  # finding zeros on a device would synchronize
            runs = _runs_of_zeros(vectors) or runs
        parts = []
        try:
            with torch_internals.without_fallback_warnings():
                for start, stop, used in runs:
                    own = [x[start:stop] for x, one in zip(vectors, used, strict=True) if one]
                    parts.append(torch.func.vmap(partial(product, used), randomness="error")(*own))
        except Exception as error:  # an error of the user's code returns in the loop
            # After OutOfMemoryError the next call tries vmap again.
            known.side_by_side = isinstance(error, torch.OutOfMemoryError)
            LOGGER.debug("products one after another, because of %s", error)
            return None
        found = [_joined(x, 0) for x in zip(*parts, strict=True)] if len(parts) > 1 else [*parts[0]]
        return found if not looks or self._agrees(vectors, found, known) else None

    def _agrees(self, vectors: Vector, found: Iterable[Tensor], known: _Known) -> bool:
        """Whether A (w V) = w (A V) for weights w. found: A V."""
        # unequal weights of both signs
        weights = torch.arange(1.0, len(vectors[0]) + 1, device=vectors[0].device).cos()
        combined = partial(torch.einsum, "k,k...->...")
        alone = self.single([combined(weights.to(v), v) for v in vectors])
        right = True
        for a, rows in zip(alone, found, strict=True):
            w = weights.to(rows)
            size = combined(w.abs(), rows.detach().abs())
            right &= agree(a, combined(w, rows.detach()), DIGITS, terms=[size])
        if not right:  # infinite or NaN products say nothing about vmap
            known.side_by_side = not all(bool(a.isfinite().all()) for a in alone)
            LOGGER.debug("products one after another: those side by side are not the same")
        return right


def _runs_of_zeros(vectors: Vector) -> list[tuple[int, int, list[bool]]]:
    """Splits the vectors into runs with a common set of nonzero leaves: (start, stop, nonzero leaves).

    Empty if there are more runs than leaves, or if a whole vector is zero.
    """
    used = torch.stack([x.flatten(1).any(1) for x in vectors], 1)
    ends = [*((used[1:] != used[:-1]).any(1).nonzero().flatten() + 1).tolist(), len(used)]
    runs = [(i, j, used[i].tolist()) for i, j in zip([0, *ends], ends, strict=False)]
    return runs if len(runs) <= len(vectors) and all(any(own) for _, _, own in runs) else []


def unit_rows(like: Tensor, shape: torch.Size, start: int, stop: int) -> Tensor:
    """The unit vectors start to stop of a tensor of this shape, [stop - start, *shape]."""
    rows = like.new_zeros(stop - start, shape.numel())
    rows.diagonal(start).fill_(1)
    return rows.view(stop - start, *shape)


def _joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Chunks of products as one tensor, with the vectors in dimension dim."""
    moved = [x.movedim(0, dim) for x in parts]
    return moved[0].contiguous() if len(moved) == 1 else torch.cat(moved, dim)


def _given(problem: Problem) -> list[Tensor]:
    """The tensors that a function takes or closes over: their shapes determine the graph's size."""
    func = problem.loss
    bound = (func.args, func.keywords) if isinstance(func, partial) else ()
    return [
        *problem.leaves,
        *pytree.tensors((problem.args, torch_internals.closed_over(func), bound)),
    ]
