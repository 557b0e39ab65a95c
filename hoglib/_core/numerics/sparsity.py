"""Sparse matrices from a few products with vectors: their patterns, and colours of their columns.

Columns that share no row can be multiplied at once: with the 0-1 vector s_c of the columns of colour c,

    (A s_c)_i = A_ij        j the only column of colour c with an entry in row i

A row with many entries would give its columns as many colours. It is *full*, and read by A^T e_i. The
number of full rows is the one that minimises the number of products.

The pattern is found by products, too (Griewank and Mitev, 2002), so that no operation of torch needs a
rule. Blocks of columns are halved twice, level by level. A block with an entry in row i gives
A v != 0 there for a random v on its columns; blocks that share no row are tried by one vector.
"""

from functools import reduce
from operator import or_
from typing import Any, NamedTuple
from warnings import catch_warnings

import torch
from torch import Tensor
from torch.nn import functional as F

from hoglib._core.messages import validation
from hoglib._core.numerics.trust import DIGITS, found_once
from hoglib.errors import ArgumentTypeError, ArgumentValueError, NondeterministicError

Shape = tuple[int, int]
# Parts of a block at the next level. Four take as many products as two, in half the passes.
PARTS = 4
FIRST = 16  # blocks at the first level; each has its own product there


class Band(NamedTuple):
    """The pattern of a band matrix: entries with ``|i - j| <= width``.

    Example:
        >>> x = torch.arange(4.0)
        >>> chain = lambda x: (x.diff() ** 3).sum()
        >>> hog.sparse_hessian(chain, x, sparsity=hog.curvature.Band(1)).values()
        tensor([ 6., -6., -6., 12., -6., -6., 12., -6., -6.,  6.])
    """

    width: int

    def entries(self, shape: tuple[int, int]) -> Tensor:
        """Row and column of each entry.

        Args:
            shape: The shape of the matrix.
        Returns:
            The indices [2, n].
        """
        width = validation.at_least("Band(width)", self.width, 0)
        rows = torch.arange(shape[0]).repeat_interleave(2 * width + 1)
        columns = rows + torch.arange(-width, width + 1).repeat(shape[0])
        inside = (columns >= 0) & (columns < shape[1])
        return torch.stack([rows[inside], columns[inside]])


class DiagonalBlocks(NamedTuple):
    """The pattern of a block-diagonal matrix with square blocks of this size.

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

    def entries(self, shape: tuple[int, int]) -> Tensor:
        """Row and column of each entry.

        Args:
            shape: The shape of the matrix.
        Returns:
            The indices [2, n].
        """
        size = validation.at_least("DiagonalBlocks(size)", self.size, 1)
        rows = torch.arange(shape[0]).repeat_interleave(size)
        columns = rows // size * size + torch.arange(size).repeat(shape[0])
        inside = columns < shape[1]
        return torch.stack([rows[inside], columns[inside]])


class Products(NamedTuple):
    """The products of an operator with vectors.

    A: The operator.
    at_once: How many vectors are multiplied in one pass; None for all.
    """

    A: Any
    at_once: int | None

    @property
    def T(self) -> "Products":
        """The products of the transpose."""
        return Products(self.A.T, self.at_once)

    def __call__(self, rows: Tensor) -> Tensor:
        """The products with rows [k, P], as rows [k, M]."""
        parts = rows.to(self.A.dtype).split(self.at_once or max(len(rows), 1))
        return torch.cat([self.A.apply(part) for part in parts])


class Compression(NamedTuple):
    """How a matrix with a known pattern is read from few products.

    entries: Row and column of each entry, [2, n], row by row.
    shape: The shape of the matrix.
    full: The rows that are read by transposed products.
    colours: The colour of each column.
    transposed: Whether the matrix is the transpose of the operator's.
    """

    entries: Tensor
    shape: Shape
    full: Tensor
    colours: Tensor
    transposed: bool

    @classmethod
    def of(cls, entries: Tensor, shape: Shape) -> "Compression":
        """The one with fewer products, of the matrix and of its transpose."""
        turned = _ordered(entries.flip(0), shape[::-1])
        return min(
            cls(entries, shape, *_compress(entries, shape), False),
            cls(turned, shape[::-1], *_compress(turned, shape[::-1]), True),
            key=lambda found: len(found.full) + _count(found.colours),
        )

    def read(self, A: Products) -> tuple[Tensor, int | None]:
        """The matrix as a sparse CSR tensor; a row of it (a column, if transposed) that has entries
        outside of the pattern, or None."""
        A = A.T if self.transposed else A
        rows, columns = self.entries
        by_colour = A(indicators(self.colours))
        by_row = A.T(_units(self.full, self.shape[0]))
        place = rows.new_full(self.shape[:1], -1)  # of a row among the full ones
        place[self.full] = torch.arange(len(self.full), device=rows.device)
        place = place[rows]
        full = place >= 0
        values = by_colour.new_empty(rows.shape)
        values[full] = by_row[place[full], columns[full]]
        values[~full] = by_colour[self.colours[columns[~full]], rows[~full]]
        wrong = _wrong_row(A, self.entries, values, self.shape)
        if not self.transposed:
            return _to_csr(self.entries, values, self.shape), wrong
        order = columns.argsort(stable=True)
        return _to_csr(self.entries.flip(0)[:, order], values[order], self.shape[::-1]), wrong


def read_sparse(
    A: Any, sparsity: object, owner: object, caller: str, chunk_size: int | None
) -> Tensor:
    """The matrix of an operator as a sparse CSR tensor.

    owner: A pattern that is found is tried again at later calls, while this object lives.
    """
    products = Products(A, validation.none_or_at_least("chunk_size", chunk_size, 1))
    shape = A.shape

    def known_compression() -> Compression:
        return Compression.of(_given_entries(sparsity, shape, A.device), shape)

    if sparsity is not None:
        # an in-place write may change the pattern
        key = caller, shape, A.device, getattr(sparsity, "_version", 0)
        compression: Any = found_once(sparsity, key, known_compression)
        matrix, wrong = compression.read(products)
        if wrong is not None:
            raise ArgumentValueError(
                f"sparsity: expected a pattern with all entries of the matrix, got one without some of "
                f"{'column' if compression.transposed else 'row'} {wrong}; leave sparsity out, so that "
                "the pattern is found."
            )
        return matrix
    # a list, because another point may have another pattern
    remembered: Any = found_once(owner, (caller, shape, A.device), list)
    for compression in reversed(remembered):
        matrix, wrong = compression.read(products)
        if wrong is None:
            return matrix
    compression = Compression.of(_find_entries(products, shape, A.device), shape)
    matrix, wrong = compression.read(products)
    if wrong is not None:
        raise NondeterministicError(
            f"{caller}: expected one matrix in all products, got different ones; look for random "
            "numbers in the function, or for data that changes."
        )
    remembered[:] = [compression]
    return matrix


def neighbours_apart(matrix: Tensor) -> Tensor:
    """A colour for each index, such that indices of one colour have no entry in common."""
    entries = matrix.to_sparse_coo().coalesce().indices()
    rows, columns = entries[:, entries[0] != entries[1]]
    # of a graph whose edges are the rows, each with the two columns that it joins
    edges = torch.arange(len(rows), device=rows.device).repeat(2)
    colours = _colour(edges, torch.cat([rows, columns]), (len(rows), matrix.shape[1]))
    return torch.tensor(colours, device=rows.device, dtype=torch.long)


def _given_entries(sparsity: object, shape: Shape, device: torch.device) -> Tensor:
    """The entries of a pattern that a user gives."""
    if isinstance(sparsity, Band | DiagonalBlocks):
        return sparsity.entries(shape).to(device)
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
    if sparsity.layout == torch.strided:
        entries = sparsity.nonzero().T
    else:  # stored zeros belong to the pattern
        entries = sparsity.detach().to_sparse_coo().coalesce().indices()
    return _ordered(entries.to(device), shape)


def _find_entries(A: Products, shape: Shape, device: torch.device) -> Tensor:
    """The rows and columns of the entries that are not zero."""
    height, length = shape
    column = torch.arange(length, device=device)
    draws = torch.Generator(device).manual_seed(0)
    # random, so that the entries of a row in a block cancel with probability zero
    noise = torch.rand(length, generator=draws, device=device, dtype=torch.float64) + 0.5
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
            return _ordered(torch.cat([*found, entries], 1), shape)
        full, colours = _compress(entries, (height, blocks), PARTS)
        at, full_column = A.T(_units(full, height)).nonzero().T
        found.append(torch.stack([full[at], full_column]))
        entries = entries[:, ~torch.isin(entries[0], full)]
        width //= PARTS
        blocks = -(-length // width)
        # parts of blocks that share no row share none
        colours = _parts(colours)[:blocks]
        row, block = entries[0].repeat_interleave(PARTS), _parts(entries[1])
        row, block = row[block < blocks], block[block < blocks]


def _wrong_row(A: Products, entries: Tensor, values: Tensor, shape: Shape) -> int | None:
    """A row in which the sparse matrix is not A, by one product; None if there is none.

    Each row has its own tolerance, so that a small row is not lost beside a large one.
    """
    if not shape[0]:
        return None
    # neither equal nor of one sign, so that entries outside of the pattern show
    w = torch.arange(1.0, shape[1] + 1, device=values.device, dtype=torch.float64).cos()
    expected = A(w[None])[0].double()
    terms = values.double() * w[entries[1]]
    total, size = (
        expected.new_zeros(shape[0]).index_add(0, entries[0], x) for x in (terms, terms.abs())
    )
    r = DIGITS.of(values.dtype)
    size = torch.maximum(size, r * expected.abs().max())
    off = (expected - total).abs() - r * size
    worst = int(off.argmax())
    return worst if off[worst] > 0 else None


def _compress(entries: Tensor, shape: Shape, cost: int = 1) -> tuple[Tensor, Tensor]:
    """The full rows, and the colours of the columns of the others.

    cost: The number of products for each colour.
    """
    counts, order = torch.bincount(entries[0], minlength=shape[0]).sort(descending=True)
    # with k full rows there are as many colours as entries in the next row, or more
    colours = F.pad(counts, (0, 1))
    products = torch.arange(shape[0] + 1, device=counts.device) + cost * colours
    full = order[: int(products.argmin())]
    rows, columns = entries[:, ~torch.isin(entries[0], full)]
    return full, torch.tensor(_colour(rows, columns, shape), device=full.device, dtype=torch.long)


def _colour(rows: Tensor, columns: Tensor, shape: Shape) -> list[int]:
    """Greedy colours: of each column the first that no earlier column with an entry in one of its rows
    has."""
    ordered = rows[columns.argsort(stable=True)].tolist()
    ends = torch.bincount(columns, minlength=shape[1]).cumsum(0).tolist()
    taken = [0] * shape[0]  # the colours in each row, as bits
    colours, start = [], 0
    for end in ends:
        own = ordered[start:end]
        used = reduce(or_, (taken[row] for row in own), 0)
        free = ~used & (used + 1)  # the lowest bit that is not set
        for row in own:
            taken[row] |= free
        colours.append(free.bit_length() - 1)
        start = end
    return colours


def _ordered(entries: Tensor, shape: Shape) -> Tensor:
    """The entries row by row, each once."""
    numbers = (entries[0] * shape[1] + entries[1]).unique()
    return torch.stack([numbers // max(shape[1], 1), numbers % max(shape[1], 1)])


def _to_csr(entries: Tensor, values: Tensor, shape: Shape) -> Tensor:
    ends = torch.bincount(entries[0], minlength=shape[0]).cumsum(0)
    starts = F.pad(ends, (1, 0))
    with catch_warnings(action="ignore"):  # of torch: sparse tensors are beta
        return torch.sparse_csr_tensor(starts, entries[1], values, shape, check_invariants=False)


def _count(colours: Tensor) -> int:
    return int(colours.max()) + 1 if len(colours) else 0


def indicators(colours: Tensor) -> Tensor:
    """The 0-1 vectors of the columns of each colour, [colours, P]."""
    return colours == torch.arange(_count(colours), device=colours.device)[:, None]


def _units(places: Tensor, length: int) -> Tensor:
    return places[:, None] == torch.arange(length, device=places.device)


def _parts(blocks: Tensor) -> Tensor:
    return (PARTS * blocks[:, None] + torch.arange(PARTS, device=blocks.device)).flatten()
