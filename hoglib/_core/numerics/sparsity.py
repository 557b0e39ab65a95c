"""Sparse matrices from a few products with vectors: their patterns, and colours of their columns.

Columns that share no row can be multiplied at once: with the 0-1 vector s_c of the columns of colour c,

    (A s_c)_i = A_ij        j the only column of colour c with an entry in row i

A row with n entries needs n colours. Rows with many entries are therefore *full*: A^T e_i reads row i.
The number of full rows minimises the total number of products.

Products also find the pattern (Griewank and Mitev, 2002), so no torch operation needs a rule. Blocks
of columns are split into four parts, level by level. A block has an entry in row i if (A v)_i != 0 for
a random v on its columns; blocks without a common row share one vector v.
"""

from functools import reduce
from operator import or_
from typing import Any, NamedTuple, cast
from warnings import catch_warnings

import torch
from torch import Tensor
from torch.nn import functional as F

from hoglib._core.messages import validation
from hoglib._core.numerics.trust import DIGITS, agree, memoize_on
from hoglib._core.torch_api.mixed_precision import autocast_on
from hoglib.errors import ArgumentTypeError, ArgumentValueError, NondeterministicError

Shape = tuple[int, int]
# Parts of a block at the next level. Four parts take as many products as two, in half the levels.
PARTS = 4
FIRST = 16  # blocks at the first level, with one product for each


class Band(NamedTuple):
    """The pattern of a band matrix: entries with ``|i - j| <= width``.

    Example:
        >>> x = torch.arange(4.0)
        >>> chain = lambda x: (x.diff() ** 3).sum()
        >>> hog.sparse_hessian(chain, x, sparsity=hog.curvature.Band(1)).values()
        tensor([ 6., -6., -6., 12., -6., -6., 12., -6., -6.,  6.])
    """

    width: int


class DiagonalBlocks(NamedTuple):
    """The pattern of a block-diagonal matrix with blocks [size, size].

    Example:
        >>> x = torch.arange(4.0)
        >>> pairs = lambda x: x.view(2, 2).prod(1).sum()
        >>> hog.sparse_hessian(pairs, x, sparsity=hog.curvature.DiagonalBlocks(2)).to_dense()
        tensor([[0., 1., 0., 0.],
                [1., 0., 0., 0.],
                [0., 0., 0., 1.],
                [0., 0., 1., 0.]])
    """

    size: int


class Products(NamedTuple):
    """The products of an operator with vectors.

    A: The operator.
    at_once: The number of vectors in one call of A.apply; None for all.
    caller: For messages.
    """

    A: Any
    at_once: int | None
    caller: str

    @property
    def T(self) -> "Products":
        """The products of the transpose."""
        return self._replace(A=self.A.T)

    def __call__(self, rows: Tensor) -> Tensor:
        """The products with rows [k, P], as rows [k, M]."""
        parts = rows.to(self.A.dtype).split(self.at_once or max(len(rows), 1))
        return torch.cat([self.A.apply(part) for part in parts])


class SparseMatrix(NamedTuple):
    """A sparse matrix by its entries.

    entries: Row and column of each entry, [2, n], row by row.
    values: The value of each entry, [n].
    shape: The shape of the matrix.
    """

    entries: Tensor
    values: Tensor
    shape: Shape

    def to_csr(self) -> Tensor:
        """The matrix as a `torch.sparse_csr` tensor."""
        rows, columns = self.entries
        starts = F.pad(torch.bincount(rows, minlength=self.shape[0]).cumsum(0), (1, 0))
        with catch_warnings(action="ignore"):  # torch warns that sparse CSR tensors are in beta
            return torch.sparse_csr_tensor(
                starts, columns, self.values, self.shape, check_invariants=False
            )


class Compression(NamedTuple):
    """The products that read a matrix with a known pattern.

    entries: Row and column of each entry, [2, n], row by row.
    shape: The shape of the matrix.
    full: The rows read by transposed products.
    colours: The colour of each column.
    transposed: Entries, shape, full and colours describe the transpose of the operator's matrix.
    """

    entries: Tensor
    shape: Shape
    full: Tensor
    colours: Tensor
    transposed: bool

    @classmethod
    def of(cls, entries: Tensor, shape: Shape) -> "Compression":
        """The compression of the matrix or of its transpose, by the number of products."""
        turned = _ordered(entries.flip(0), shape[::-1])
        return min(
            cls(entries, shape, *_compress(entries, shape), False),
            cls(turned, shape[::-1], *_compress(turned, shape[::-1]), True),
            key=lambda found: len(found.full) + _count(found.colours),
        )

    def read(self, A: Products) -> tuple[SparseMatrix, list[int] | None]:
        """The matrix, and the row and column of an entry outside the pattern, or None."""
        A = A.T if self.transposed else A
        rows, columns = self.entries
        by_colour = A(indicators(self.colours))
        by_row = A.T(_units(self.full, self.shape[0]))
        place = _places(self.full, self.shape[0])[rows]
        full = place >= 0
        values = by_colour.new_empty(rows.shape)
        values[full] = by_row[place[full], columns[full]]
        values[~full] = by_colour[self.colours[columns[~full]], rows[~full]]
        outside = _outside(A, self, values)
        if not self.transposed:
            return SparseMatrix(self.entries, values, self.shape), outside
        order = columns.argsort(stable=True)
        matrix = SparseMatrix(self.entries.flip(0)[:, order], values[order], self.shape[::-1])
        return matrix, outside and outside[::-1]


def read_sparse(
    A: Any, sparsity: object, owner: object, caller: str, chunk_size: int | None
) -> SparseMatrix:
    """The sparse matrix of an operator.

    owner: While this object lives, later calls first try the pattern that the last call found.
    """
    chunk_size = validation.none_or_at_least("chunk_size", chunk_size, 1)
    products = Products(A, chunk_size, caller)
    shape, device = A.shape, A.device
    if sparsity is not None:
        matrix, outside = _given_compression(sparsity, owner, shape, device).read(products)
        if outside is not None:
            raise ArgumentValueError(
                "sparsity: expected a pattern with all entries of the matrix, got one without row "
                "{}, column {}; leave sparsity out, so that the pattern is found.".format(*outside)
            )
        return matrix
    # a list of at most one compression, of the last call; another x may have another pattern
    remembered: Any = memoize_on(owner, (caller, shape, device), list)
    for compression in remembered:
        matrix, outside = compression.read(products)
        if outside is None:
            return matrix
    # A sum of a row's entries rounds to zero with probability eps: half precision takes more draws.
    least = 4 if torch.finfo(A.dtype).eps > 1e-4 else 1
    for draws in (least, least + 1):
        found = [_find_entries(products, shape, device, seed) for seed in range(draws)]
        compression = Compression.of(_ordered(torch.cat(found, 1), shape), shape)
        matrix, outside = compression.read(products)
        if outside is None:
            break
    remembered[:] = [compression]
    return matrix  # entries outside the patterns of both draws are rounding errors


def neighbours_apart(matrix: SparseMatrix) -> Tensor:
    """A colour for each index i, such that A_ij = 0 for i and j of one colour."""
    rows, columns = matrix.entries[:, matrix.entries[0] != matrix.entries[1]]
    # The graph of A as its incidence matrix: one row for each edge, with two entries.
    edges = torch.arange(len(rows), device=rows.device).repeat(2)
    colours = _colour(edges, torch.cat([rows, columns]), (len(rows), matrix.shape[1]))
    return torch.tensor(colours, device=rows.device, dtype=torch.long)


def _given_compression(
    sparsity: object, owner: object, shape: Shape, device: torch.device
) -> Compression:
    """The compression for a user's pattern, memoized."""

    def find() -> Compression:
        return Compression.of(_given_entries(sparsity, shape, device), shape)

    if not isinstance(sparsity, Tensor):
        return cast(Compression, memoize_on(owner, (shape, device, repr(sparsity)), find))
    if sparsity.is_inference():  # has no _version, which tells of in-place writes
        return find()
    return cast(Compression, memoize_on(sparsity, (shape, device, sparsity._version), find))


def _given_entries(sparsity: object, shape: Shape, device: torch.device) -> Tensor:
    """Row and column of each entry of a user's pattern."""
    if isinstance(sparsity, Band | DiagonalBlocks):
        # row i has the columns first[i] to first[i] + count - 1
        first = torch.arange(shape[0], device=device)
        if isinstance(sparsity, Band):
            width = validation.at_least("Band(width)", sparsity.width, 0)
            first, count = first - width, 2 * width + 1
        else:
            count = validation.at_least("DiagonalBlocks(size)", sparsity.size, 1)
            first = first // count * count
        columns = first[:, None] + torch.arange(count, device=device)
        rows, places = ((columns >= 0) & (columns < shape[1])).nonzero().T
        return torch.stack([rows, columns[rows, places]])
    if not isinstance(sparsity, Tensor):
        raise ArgumentTypeError(
            "sparsity: expected a tensor whose entries may differ from zero in the matrix, "
            "hoglib.curvature.Band(width), DiagonalBlocks(size) or None, got "
            f"{validation.describe(sparsity)}."
        )
    if tuple(sparsity.shape) != shape:
        raise ArgumentValueError(
            f"sparsity: expected a pattern of the matrix's shape {list(shape)}, got "
            f"{list(sparsity.shape)}."
        )
    if sparsity.layout == torch.strided or sparsity.dense_dim():
        entries = sparsity.to_dense().nonzero().T
    else:  # stored zeros belong to the pattern
        entries = sparsity.detach().to_sparse_coo().coalesce().indices()
    return _ordered(entries.to(device), shape)


def _find_entries(A: Products, shape: Shape, device: torch.device, seed: int) -> Tensor:
    """Row and column of each nonzero entry, found by products with random vectors."""
    height, length = shape
    column = torch.arange(length, device=device)
    noise = random_factors(length, device, seed)
    width = 1
    while FIRST * width < length:
        width *= PARTS
    blocks = -(-length // width)
    colours = torch.arange(blocks, device=device)
    row = torch.arange(height, device=device).repeat_interleave(blocks)
    block = colours.repeat(height)
    found: list[Tensor] = []
    while True:
        products = A(indicators(colours)[:, column // width] * noise)
        hit = products[colours[block], row] != 0
        entries = torch.stack([row[hit], block[hit]])
        if width == 1:
            return torch.cat([*found, entries], 1)
        full, colours = _compress(entries, (height, blocks), PARTS)
        at, full_column = A.T(_units(full, height)).nonzero().T
        found.append(torch.stack([full[at], full_column]))
        entries = entries[:, ~torch.isin(entries[0], full)]
        width //= PARTS
        blocks = -(-length // width)
        # parts of blocks without a common row have no common row either
        colours = _parts(colours)[:blocks]
        row, block = entries[0].repeat_interleave(PARTS), _parts(entries[1])
        row, block = row[block < blocks], block[block < blocks]


def _outside(A: Products, known: Compression, values: Tensor) -> list[int] | None:
    """Row and column of an entry outside the pattern, or None.

    A w is compared with the product of the entries and w, row by row: each row has its own tolerance,
    for rows of different magnitudes. If a row differs by more than rounding in a sum of its entries,
    more products measure the rounding of A in row i,

        |A w - sum_c A w_c|_i        w_c the part of w on the columns of colour c

    and A^T e_i reads the rows that differ by more than 30 times this rounding.
    """
    (rows, columns), shape = known.entries, known.shape
    w = random_factors(shape[1], values.device, 100)  # a seed that `_find_entries` does not use
    expected = A(w[None])[0].double()
    terms = values.double() * w[columns]
    total, size = (expected.new_zeros(shape[0]).index_add(0, rows, x) for x in (terms, terms.abs()))
    off, size = (expected - total).abs(), torch.maximum(size, expected.abs())
    device = values.device.type
    dtype = torch.get_autocast_dtype(device) if autocast_on(device) else values.dtype
    most = DIGITS.of(dtype)
    r = torch.full_like(size, min(most, 64 * torch.finfo(dtype).eps))
    if not bool((off > r * size).any()):
        return None
    if not agree(A(w[None])[0].double(), expected, DIGITS, dtype=dtype):
        raise NondeterministicError(
            f"{A.caller}: expected one matrix in all products, got different ones; look for random "
            "numbers in the function, or for data that changes."
        )
    of_colours = A(indicators(known.colours) * w).double()
    part = w * (w > 1)
    halves = A(torch.stack([part, w - part])).double()
    rounding = sum((x.sum(0) - expected).abs() for x in (of_colours, halves))
    r[known.full] = most  # A^T e_i read these rows, and rounds otherwise than A w
    excess = off - r * size - 30 * rounding
    worst = (excess / off).nan_to_num(-1).topk(min(32, shape[0])).indices
    worst = worst[excess[worst] > 0]
    others = A.T(_units(worst, shape[0])).double().abs()
    place = _places(worst, shape[0])[rows]
    others[place[place >= 0], columns[place >= 0]] = 0
    for row, entries in zip(worst, others, strict=True):
        if bool(2 * entries.sum() > off[row]):  # else the difference is rounding of A w alone
            return [int(row), int(entries.argmax())]
    return None


def _places(indices: Tensor, length: int) -> Tensor:
    """places[indices[k]] = k; -1 elsewhere. [length]"""
    places = indices.new_full((length,), -1)
    places[indices] = torch.arange(len(indices), device=indices.device)
    return places


def random_factors(length: int, device: torch.device, seed: int) -> Tensor:
    """Random numbers in (0.5, 1.5): a weighted sum of nonzero entries is zero with probability 0."""
    draws = torch.Generator(device).manual_seed(seed)
    return torch.rand(length, generator=draws, device=device, dtype=torch.float64) + 0.5


def _compress(entries: Tensor, shape: Shape, cost: int = 1) -> tuple[Tensor, Tensor]:
    """The full rows, and a colour for each column; columns of one colour share no row that is not full.

    cost: The number of products for each colour.
    """
    counts, order = torch.bincount(entries[0], minlength=shape[0]).sort(descending=True)
    # The k longest rows are full: there are at least as many colours as entries in the next row.
    colours = F.pad(counts, (0, 1))
    products = torch.arange(shape[0] + 1, device=counts.device) + cost * colours
    full = order[: int(products.argmin())]
    rows, columns = entries[:, ~torch.isin(entries[0], full)]
    return full, torch.tensor(_colour(rows, columns, shape), device=full.device, dtype=torch.long)


def _colour(rows: Tensor, columns: Tensor, shape: Shape) -> list[int]:
    """Greedy colouring: each column takes the first colour that no earlier column with a common row
    has."""
    ordered = rows[columns.argsort(stable=True)].tolist()
    ends = torch.bincount(columns, minlength=shape[1]).cumsum(0).tolist()
    taken = [0] * shape[0]  # the colours in each row, as bits
    colours, start = [], 0
    for end in ends:
        own = ordered[start:end]
        used = reduce(or_, (taken[row] for row in own), 0)
        free = ~used & (used + 1)  # the lowest zero bit of `used`
        for row in own:
            taken[row] |= free
        colours.append(free.bit_length() - 1)
        start = end
    return colours


def _ordered(entries: Tensor, shape: Shape) -> Tensor:
    """The entries sorted row by row, without repetitions."""
    numbers = (entries[0] * shape[1] + entries[1]).unique()
    return torch.stack([numbers // max(shape[1], 1), numbers % max(shape[1], 1)])


def _count(colours: Tensor) -> int:
    return int(colours.max()) + 1 if len(colours) else 0


def indicators(colours: Tensor) -> Tensor:
    """The 0-1 vectors of the columns of each colour, [colours, P]."""
    return colours == torch.arange(_count(colours), device=colours.device)[:, None]


def _units(places: Tensor, length: int) -> Tensor:
    return places[:, None] == torch.arange(length, device=places.device)


def _parts(blocks: Tensor) -> Tensor:
    return (PARTS * blocks[:, None] + torch.arange(PARTS, device=blocks.device)).flatten()
