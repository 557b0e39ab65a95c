"""The space of vectors like the parameters, flat or in their structure; random vectors; and the
interface of symmetric matrices."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial
from itertools import accumulate
from math import isfinite
from operator import attrgetter
from typing import Any, Literal, Protocol, final

import torch
from torch import Generator, Tensor

from hoglib._core.messages import validation
from hoglib._core.messages.communication import is_sharded
from hoglib._core.substrate.fingerprint import checksum_of_call
from hoglib._core.substrate.placement import Sharding, placement_of, refuse_sharded
from hoglib._core.torch_api import pytree
from hoglib._core.torch_api.torch_private import private
from hoglib.errors import ArgumentTypeError, ArgumentValueError

_foreach_add = private("torch._foreach_add_")
_SHAPE_AND_DTYPE = attrgetter("shape", "dtype")

Tree = Any
Rebuild = Callable[[Tensor], Tree]  # rows -> vectors in the form of the caller's vectors
Draw = Callable[[int], Tensor]  # count -> so many random numbers
Blocks = Literal["parameter", "module"] | Callable[[str], Hashable] | Iterable[Iterable[str]] | None

# dtype -> two bounds of |v.Aw - w.Av| / (|v| |Aw| + |w| |Av|). The first is divided by sqrt(P), because
# random vectors have v.Aw ~ |v| |Aw| / sqrt(P). The second is for rounding, for any vectors.
BOUNDS = {
    torch.float64: (1e-6, 1e-10),
    torch.float32: (1e-2, 1e-5),
    torch.float16: (5e-2, 2e-3),
    torch.bfloat16: (0.2, 1e-2),
}
# Random numbers in one draw; a multiple of 16, because torch draws normal numbers in groups of 16.
DRAWN_AT_ONCE = 2**16


class SymmetricMatrix(Protocol):
    """The interface of a symmetric matrix [P, P] to the matrix-free algorithms; `LinearOperator` has
    it."""

    count: int  # products with one vector so far

    @property
    def space(self) -> "Space": ...

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    def apply(self, rows: Tensor) -> Tensor:
        """The product with each row of [k, P], as rows."""
        ...

    def to_dense(self) -> Tensor: ...


@final
class Space:
    """The space of vectors like params.

    Inside hoglib, k vectors are the rows of a tensor [k, P]. Users pass flat vectors, [P] or [P, k], or
    vectors in the structure of params, with a trailing dimension of k for a block. With DTensor params,
    rows and flat vectors are the part of this process, [k, length]. `dots`, `gram` and `norms` are
    about whole vectors: each takes one all-reduce, and returns equal numbers in all processes.

    of: The name of params in messages.

    Attributes:
        params: The parameters.
        placement: How processes share the parameters.
        size: P.
        length: The number of entries that this process holds; P unless params are DTensors.
        device: The device of all parameters.
        precision: The widest dtype of params, the dtype of products.
        dtype: The dtype of flat vectors, and of sums of products over data.
    """

    def __init__(self, params: Tree, dtype: torch.dtype | None = None, of: str = "params") -> None:
        validation.parameters(params, of)
        self.params, self._of = params, of
        leaves = pytree.leaves(params)
        for name, leaf in zip(pytree.paths(params), leaves, strict=True):
            where = validation.leaf_name(of, name)
            validation.real(where, leaf)
            if leaf.device != leaves[0].device:
                raise ArgumentValueError(
                    f"{where}: expected device {leaves[0].device} as the first, got {leaf.device}; an "
                    "operator's vectors live on one device. Move the model to one."
                )
        self.placement = placement_of(leaves, lambda: pytree.paths(params))
        self.size = pytree.size(params)
        if not self.size:
            raise ArgumentValueError(
                f"{of}: expected at least one number, got tensors without elements; leave them out."
            )
        self.device = leaves[0].device
        self.precision = leaves[0].dtype
        for leaf in leaves:
            self.precision = torch.promote_types(self.precision, leaf.dtype)
        self.dtype = self.precision if dtype is None else dtype
        if torch.promote_types(self.precision, self.dtype) != self.dtype:
            raise ArgumentValueError(
                f"dtype: expected one as wide as that of the parameters, {self.precision}, got {dtype}."
            )
        held = self.placement.local(leaves)
        self._like = [(leaf.shape, leaf.dtype) for leaf in held]  # this process's leaves
        self._sizes = [leaf.numel() for leaf in held]  # numbers in each leaf
        self._one_dtype = all(leaf.dtype == self.dtype for leaf in held)  # no leaf needs a cast
        self.length = pytree.size(held)
        # The weight of each entry in an inner product: 1 / (processes with a copy of the entry),
        # because an all-reduce adds up the terms of all copies.
        parts = [self.placement.copy_share(i) for i in range(len(held))]
        self._copy_shares: Tensor | float = parts[0]
        if len(set(parts)) > 1:
            like = torch.empty(0, device=self.device, dtype=self.precision)
            pairs = zip(self._sizes, parts, strict=True)
            self._copy_shares = torch.cat([like.new_full((n,), part) for n, part in pairs])

    def leaves(self) -> list[Tensor]:
        """The current parameters; for DTensors, the shards of this process."""
        return self.flatten()[0]

    def flatten(self) -> tuple[list[Tensor], Any]:
        """The leaves and the structure of the current parameters; raises if shapes or dtypes
        changed."""
        leaves, structure = pytree.flatten(self.params)
        leaves = self.placement.local(leaves) if self.placement.is_sharded else leaves
        now = [*map(_SHAPE_AND_DTYPE, leaves)]
        if now != self._like:
            raise ArgumentValueError(
                "params: expected the shapes and dtypes that the operator was made with, "
                f"{[tuple(s) for s, _ in self._like]}, got {[tuple(s) for s, _ in now]}; make a new "
                "operator."
            )
        return leaves, structure

    @property
    def structure(self) -> Any:
        """The structure of params; not an attribute, because it cannot be pickled."""
        return pytree.flatten(self.params)[1]

    def rows(self, v: Any, name: str = "v", graph: bool = False) -> tuple[Tensor, Rebuild]:
        """Vectors in any form as rows [k, P], and a function: rows -> vectors in the form of v. graph:
        rows stay in the graph of v."""
        if isinstance(v, Tensor) and not self._like_params(v):
            return self._flat_rows(v, name, graph)
        if hasattr(v, "__array__") and not isinstance(v, Tensor):
            raise ArgumentTypeError(
                f"{name}: expected tensors, got an array of shape {v.shape}; pass "
                "`torch.from_numpy(array)`, or multiply by `A.to_scipy()`."
            )
        leaves, block = validation.vectors(name, v, self.params, self._of)
        columns = leaves[0].shape[-1] if block else 1
        leaves = self.placement.local_vector(name, leaves)
        leaves = leaves if graph else [leaf.detach() for leaf in leaves]
        flat = [leaf.reshape(-1, columns).to(self.dtype) for leaf in leaves]
        rows = torch.cat(flat).T.contiguous()
        return rows, self.block if block else lambda rows: self.tree(rows[0])

    def _flat_rows(self, v: Tensor, name: str, graph: bool) -> tuple[Tensor, Rebuild]:
        if v.dim() not in (1, 2) or v.shape[0] != self.length or is_sharded(v):
            n, hint = self.length, " A flat vector is the part of this process."
            raise ArgumentValueError(
                f"{name}: expected ({n},), ({n}, k) for k vectors, or the structure of {self._of}, "
                f"got {'a DTensor of ' if is_sharded(v) else ''}{tuple(v.shape)}."
                f"{hint if self.placement.is_sharded else ''}"
            )
        if v.dtype != self.dtype:
            raise ArgumentTypeError(
                f"{name}: expected {self.dtype}, got {v.dtype}; convert it with `.to({self.dtype})`."
            )
        if v.device != self.device:
            raise ArgumentValueError(
                f"{name}: expected device {self.device}, got {v.device}; move it with "
                f"`.to({str(self.device)!r})`."
            )
        # Views: the columns of a block [P, k] become rows without a copy.
        v = v if graph else v.detach()
        if v.dim() == 1:
            return v[None], lambda rows: rows[0]
        return v.T, lambda rows: rows.T

    def _like_params(self, v: Tensor) -> bool:
        """Whether params are one tensor, and v has its shape, or its shape and a trailing k."""
        own = getattr(self.params, "shape", None)
        # For params with one dimension, [P, k] is a flat block.
        return own is not None and (v.shape == own or (len(own) > 1 and v.shape[:-1] == own))

    def is_block(self, v: Tree) -> bool:
        """Whether v is a block of vectors, in a form that `rows` takes."""
        dims: int = pytree.leaves(v)[0].dim()
        if isinstance(v, Tensor) and not self._like_params(v):
            return dims > 1
        return dims > len(self._like[0][0])

    def is_flat(self, v: Tree) -> bool:
        """Whether v is flat; true also if params are one tensor with one dimension."""
        return isinstance(v, Tensor) and (not self._like_params(v) or self.params.dim() == 1)

    def split(self, row: Tensor) -> list[Tensor]:
        """A flat vector of any stride as leaves in the dtypes of params; views if dtypes agree."""
        parts = zip(row.split(self._sizes), self._like, strict=True)
        if self._one_dtype and row.dtype == self.dtype:  # saves a call of `to` for each leaf
            return [part.view(shape) for part, (shape, _) in parts]
        return [part.view(shape).to(dtype) for part, (shape, dtype) in parts]

    def split_rows(self, rows: Tensor) -> list[Tensor]:
        """Flat vectors [k, P] as leaves [k, *shape]."""
        parts = zip(rows.split(self._sizes, 1), self._like, strict=True)
        return [part.reshape(len(rows), *shape).to(dtype) for part, (shape, dtype) in parts]

    def tree(self, row: Tensor) -> Tree:
        """A flat vector in the structure of params."""
        return self._tree_of(self.split(row))

    def block(self, rows: Tensor) -> Tree:
        """Rows in the structure of params, with a trailing dimension."""
        columns = [self.split(row) for row in rows]
        return self._tree_of([torch.stack(parts, -1) for parts in zip(*columns, strict=True)])

    def _tree_of(self, leaves: list[Tensor]) -> Tree:
        return pytree.unflatten(self.placement.wrap(leaves), self.structure)

    def add(self, row: Tensor, leaves: list[Tensor], factor: float, first: bool = False) -> None:
        """row += factor leaves; if first, row = factor leaves, into uninitialised memory."""
        flat = [(x.detach() if x.requires_grad else x).reshape(-1) for x in leaves]
        # cat: one pass over the memory, instead of zeros and an addition.
        if first and self._one_dtype:
            torch.cat(flat, out=row)
            if factor != 1:
                row *= factor
            return
        parts = row.split(self._sizes)
        if not first:
            _foreach_add(parts, flat, alpha=factor)
            return
        for part, leaf in zip(parts, flat, strict=True):
            part.copy_(leaf * factor)

    def add_rows_of(self, total: Tensor, leaves: list[Tensor], factor: float, first: bool) -> None:
        """total += factor leaves, for rows [k, P] and leaves [k, *shape]; if first, total is
        overwritten."""
        parts = zip(total.split(self._sizes, 1), leaves, strict=True)
        for part, leaf in parts:
            flat = leaf.detach().reshape(part.shape)
            torch.mul(flat, factor, out=part) if first else part.add_(flat, alpha=factor)

    def places(self) -> tuple[Tensor, ...]:
        """For each leaf, the indices of its entries in a flat vector."""
        return torch.arange(self.size, device="cpu").split(self._sizes)

    def same(self, other: "Space") -> bool:
        """Whether names, shapes, dtypes and placement are equal."""
        alike = self._like == other._like and self.dtype == other.dtype
        alike = alike and self.placement == other.placement
        return alike and pytree.paths(self.params) == pytree.paths(other.params)

    def first_not_finite(self, rows: Tensor) -> str:
        """The name of the first leaf with NaN or infinity in rows; empty if all are finite."""
        name = self._first_not_finite(rows)
        if not isinstance(self.placement, Sharding):
            return name
        # One reduction: all processes raise, or none.
        names = ["", *(path or self._of for path in pytree.paths(self.params))]
        found = torch.tensor(float(names.index(name)), device=self.device)
        return names[int(self.placement.reduce(found, "MAX"))]

    def _first_not_finite(self, rows: Tensor) -> str:
        # The sum is faster, and finite only if all numbers are finite.
        if isfinite(rows.sum()) or bool(rows.isfinite().all()):
            return ""
        first = int((~rows.isfinite()).any(0).nonzero()[0])
        ends = zip(pytree.paths(self.params), accumulate(self._sizes), strict=True)
        return next(name or self._of for name, end in ends if first < end)

    def asymmetry(self, v: Tensor, Av: Tensor, w: Tensor, Aw: Tensor) -> tuple[float, float]:
        """|v.Aw - w.Av|, and the size |v| |Aw| + |w| |Av| to compare it with, in float64."""
        v, Av, w, Aw = (x[None] for x in (v, Av, w, Aw))
        each = (v, v), (w, w), (Av, Av), (Aw, Aw), (v, Aw), (w, Av)
        vv, ww, AvAv, AwAw, lhs, rhs = self.dots(*each, dtype=torch.float64)[:, 0].tolist()
        return abs(lhs - rhs), (vv * AwAw) ** 0.5 + (ww * AvAv) ** 0.5

    def exceeds(self, gap: float, size: float, dtype: torch.dtype) -> bool:
        """Whether a gap from `asymmetry` is above the bound of a dtype."""
        random, any_vectors = BOUNDS[dtype]
        # A size of 0: products of tiny numbers underflowed.
        return size > 0 and gap > size * max(random / self.size**0.5, any_vectors)

    def dots(self, *pairs: tuple[Tensor, Tensor], dtype: torch.dtype | None = None) -> Tensor:
        """For each pair (a, b) of rows, the inner products <a_j, b_j>: [pairs, k]. dtype: of the
        sums."""
        products = (self._divided_by_copies(a * b) for a, b in pairs)
        return self.all_sum(torch.stack([product.sum(1, dtype=dtype) for product in products]))

    def gram(self, rows: Tensor, v: Tensor) -> Tensor:
        """The inner products of rows [n, P] with a vector, or of samples [s, n, P] with [s, P]."""
        v = self._divided_by_copies(v)
        return self.all_sum(rows @ v if v.dim() == 1 else torch.einsum("snp,sp->sn", rows, v))

    def norms(self, rows: Tensor) -> Tensor:
        """The norm of each row."""
        if not self.placement.is_sharded:
            return torch.linalg.vector_norm(rows, dim=1)
        return self.dots((rows, rows))[0].sqrt()

    def _divided_by_copies(self, rows: Tensor) -> Tensor:
        """Rows with each entry divided by the number of processes with a copy of the entry."""
        if isinstance(self._copy_shares, float):
            return rows if self._copy_shares == 1 else rows * self._copy_shares
        return rows * self._copy_shares.to(rows)

    def all_sum(self, value: Tensor) -> Tensor:
        """The sum over the processes that hold parts of the vectors."""
        return self.placement.sum(value)

    def true_in_all(self, holds: bool) -> bool:
        """Whether `holds` is true in all processes that hold parts of the vectors."""
        if not self.placement.is_sharded:
            return holds
        return not self.all_sum(torch.tensor(float(not holds), device=self.device)).item()

    @contextmanager
    def raise_in_all(
        self, caller: str, join: Callable[[Exception], object] | None = None
    ) -> Iterator[None]:
        """Inside, an error in one process is raised in all processes that hold parts of the vectors.

        Code inside must not communicate: a failed process would not take part. join: If processes share
        data but not vectors, called with an error, to report it in their next message.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as raised:
            error = raised
        if isinstance(self.placement, Sharding):
            with self.placement.together(caller):
                self.placement.check_same(caller, (), (), self.device, error=error)
        elif error is not None:
            if join is not None:
                join(error)
            raise error

    def check_same_call(
        self, algorithm: str, *options: Any, what: str = "algorithm, and its options,"
    ) -> None:
        """Raise in all processes that hold parts of the vectors if their algorithms or options
        differ: the number of messages depends on both."""
        if isinstance(self.placement, Sharding):
            numbers = [checksum_of_call(algorithm, options)]
            # Before the first message of the algorithm:
            with self.placement.together(algorithm):
                self.placement.check_same(algorithm, [what], numbers, self.device)

    def whole_rows(self, rows: Tensor) -> Tensor:
        """The whole vectors [k, P] of rows [k, length], gathered from all processes."""
        return self._exchange(rows, True)

    def add_rows(self, rows: Tensor) -> Tensor:
        """The sum over processes of whole vectors [k, P], as the rows [k, length] of this
        process."""
        return self._exchange(rows, False)

    def _exchange(self, rows: Tensor, gathers: bool) -> Tensor:
        placement, count = self.placement, len(rows)
        if not isinstance(placement, Sharding):
            return rows
        pairs = zip(self._like, placement.layouts, strict=True)
        shapes = [local if gathers else layout.shape for (local, _), layout in pairs]
        exchange = placement.whole_rows if gathers else placement.add_rows
        parts = enumerate(rows.split([shape.numel() for shape in shapes], 1))
        with placement.together("A @ v"):
            leaves = [exchange(i, x.reshape(count, *shapes[i])) for i, x in parts]
        return torch.cat([leaf.reshape(count, -1) for leaf in leaves], 1)

    def refuse_sharded(self, caller: str) -> None:
        """Raise for DTensors; for algorithms that need whole vectors."""
        refuse_sharded(caller, pytree.leaves(self.params))


def random_signs(space: Space, count: int, generator: Generator | None) -> Tensor:
    """Rows [count, P] of independent signs, -1 or 1."""
    validation.generator(generator)
    device = space.device if generator is None else generator.device

    def draw(numbers: int) -> Tensor:
        return torch.randint(2, (numbers,), generator=generator, device=device)

    return _random_rows(space, count, draw, device, space.dtype).mul_(2).sub_(1)


def random_normals(space: Space, count: int, generator: Generator, dtype: torch.dtype) -> Tensor:
    """Rows [count, P] of normal numbers, drawn in float64."""
    device = generator.device
    draw = partial(torch.randn, generator=generator, dtype=torch.float64, device=device)
    return _random_rows(space, count, draw, device, dtype)


def _random_rows(
    space: Space, count: int, draw: Draw, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Rows of drawn numbers; with DTensor params the part of this process.

    All processes draw all numbers, leaf by leaf, and keep their parts.
    """
    placement = space.placement
    if not isinstance(placement, Sharding):
        return draw(count * space.size).view(count, space.size).to(space.device, dtype)
    # One stream of numbers for all leaves: estimates must not depend on the number of processes.
    numbers = _RandomNumbers(draw, count * space.size, device)
    rows = torch.empty(count, space.length, dtype=dtype, device=space.device)
    for row in rows:
        start = 0
        for layout in placement.layouts:
            whole = numbers.take(layout.shape.numel()).to(space.device, dtype)
            part = layout.part_of(whole.view(layout.shape)).reshape(-1)
            row[start : start + len(part)] = part
            start += len(part)
    # Different generators show in the last number.
    placement.check_same("random vectors", ("random numbers",), [numbers.last], space.device)
    return rows


@final
class _RandomNumbers:
    """Random numbers drawn in pieces, equal to a single draw.

    On the CPU torch draws normal numbers in groups of 16, and redraws the last 16 of a draw: pieces are
    multiples of 16, and the last piece has at least 16. On other devices one draw makes all numbers.
    """

    def __init__(self, draw: Draw, total: int, device: torch.device) -> None:
        self._draw, self._left = draw, total  # _left: numbers still to draw
        self._at_once = DRAWN_AT_ONCE if device.type == "cpu" else total
        self._drawn = torch.empty(0, device="cpu")  # drawn, not yet taken
        self.last = 0.0  # the last taken number; processes compare it

    def take(self, count: int) -> Tensor:
        """The next `count` numbers."""
        parts, have = [self._drawn], len(self._drawn)
        while have < count:
            several = self._left >= self._at_once + 16
            parts.append(self._draw(self._at_once if several else self._left))
            self._left -= len(parts[-1])
            have += len(parts[-1])
        every = torch.cat([part for part in parts if len(part)]) if have else parts[0]
        self._drawn = every[count:]
        if count:
            self.last = float(every[count - 1])
        return every[:count]


def check_named(params: Tree) -> None:
    """Raise unless params are a dict of tensors by name."""
    if not (isinstance(params, Mapping) and all(isinstance(p, Tensor) for p in params.values())):
        raise ArgumentTypeError(
            "params: expected a dict of tensors by qualified name, got "
            f"{validation.describe(params)}; make one with `hoglib.trainable_params(model)`."
        )


def chosen_names(names: object, params: Tree) -> list[str]:
    """The names in params that a pattern matches, or a function accepts."""
    check_named(params)
    given = names if isinstance(names, Iterable) and not isinstance(names, str) else [names]
    tests = {str(x): x if callable(x) else partial(fnmatchcase, pat=str(x)) for x in given}
    missing = [one for one, test in tests.items() if not any(map(test, params))]
    if missing or not tests:
        raise ArgumentValueError(
            f"names: expected patterns of {validation.listing(list(params))}, or a function of a name, "
            f"got {validation.listing(missing) or 'no pattern'}, which takes none."
        )
    return [name for name in params if any(test(name) for test in tests.values())]


def groups_of(blocks: Blocks, params: Tree) -> list[list[int]]:
    """For each block of a block-diagonal matrix, the indices of its leaves."""
    names = pytree.paths(params)
    if blocks is None:
        return [list(range(len(names)))]
    check_named(params)
    if isinstance(blocks, str):
        by_name = {"parameter": lambda name: name, "module": lambda name: name.rpartition(".")[0]}
        blocks = by_name[validation.choice("blocks", blocks, by_name)]
    if not callable(blocks) and not isinstance(blocks, Iterable):
        raise ArgumentTypeError(
            "blocks: expected 'parameter', 'module', a function of a name or lists of names, got "
            f"{validation.describe(blocks)}."
        )
    if callable(blocks):
        groups: dict[Hashable, list[int]] = {}
        for i, name in enumerate(names):
            groups.setdefault(blocks(name), []).append(i)
        return list(groups.values())
    listed = [list(group) for group in blocks]
    if sorted(name for group in listed for name in group) != sorted(names):
        raise ArgumentValueError(
            f"blocks: expected every name of params in exactly one block, got {listed}; the names "
            f"are {', '.join(names)}."
        )
    return [[names.index(name) for name in group] for group in listed]
