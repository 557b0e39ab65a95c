"""Block-diagonal matrices of Kronecker products, and functions of them in closed form.

    block: V -> G V A        V [out, into]: the parameters of a layer as a matrix
    f(block) V = Q_G (f(L) * (Q_G^T V Q_A)) Q_A^T

Q_G and Q_A are the eigenvectors of G and A. The eigenvalues L_ij are products of an eigenvalue of G
and one of A, or corrected eigenvalues.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite, sqrt
from typing import Any, Literal, NamedTuple, final, get_args

import torch
from torch import Tensor

from hoglib._core.messages import validation
from hoglib._core.numerics.factorizations import damped_inverse, symmetric_eigens
from hoglib._core.substrate.autograd import Vector
from hoglib._core.torch_api import pytree
from hoglib.curvature.algebra.estimates import exact_estimate
from hoglib.curvature.algebra.linear_operator import LinearOperator, as_number, check_invertible
from hoglib.curvature.algebra.vector_space import Space, Tree
from hoglib.curvature.kronecker.layer_calls import Region, Role
from hoglib.errors import ArgumentValueError, NotPositiveDefiniteError

InverseMethod = Literal["exact", "pi", "factors"]


class BlockLayout(NamedTuple):
    """The parameters of a block, and how they form its matrix V.

    A bias beside a weight is the last column of V. Where `role.matrix` is not "kronecker", V is one
    row: the weight's numbers, then the bias's.
    """

    role: Role  # what the layer does with its weight
    weight: Region | None  # rows of a parameter; None for a block of a bias alone
    bias: Region | None  # None for a weight alone

    @property
    def regions(self) -> list[Region]:
        """The regions of the weight and the bias that exist."""
        return list(filter(None, (self.weight, self.bias)))

    @property
    def first(self) -> Region:
        """The weight's region, else the bias's: blocks are sorted by it."""
        return self.weight or self.bias or Region(0, 0, 0)

    def overlaps(self, region: Region) -> bool:
        """Whether the block has rows of a region."""
        own = (r for r in self.regions if r.leaf == region.leaf)
        return any(r.start < region.stop and region.start < r.stop for r in own)

    @property
    def widths(self) -> list[int]:
        """The number of columns of V for each region."""
        role = self.role
        rows = role.groups * role.out if role.matrix == "elementwise" else 1
        widths = [] if self.weight is None else [role.into * rows]
        of_bias = role.into if role.matrix == "diagonal" else 1
        return widths if self.bias is None else [*widths, of_bias]

    @property
    def sizes(self) -> tuple[int, int, int]:
        """(groups, out, into) of V."""
        groups, out = self.role.groups, self.role.out
        if self.role.matrix != "kronecker":
            groups, out = 1, 1
        elif self.weight is None:  # a bias alone: all groups in one
            groups, out = 1, groups * out
        return groups, out, sum(self.widths)

    def gather(self, leaves: Vector) -> Tensor:
        """The matrices V [k, groups, out, into] of k vectors, given as leaves [k, *shape]."""
        parts, (groups, out, _) = [], self.sizes
        for region, width in zip(self.regions, self.widths, strict=True):
            rows = leaves[region.leaf][:, region.start : region.stop]
            if region is self.weight and self.role.matrix == "kronecker":
                parts.append(self.role.matrices(rows))
            else:
                parts.append(rows.reshape(-1, groups, out, width))
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def scatter(self, V: Tensor, leaves: Vector) -> None:
        """Write V into the entries of leaves that the block covers; inverse of `gather`."""
        for region, part in zip(self.regions, V.split(self.widths, -1), strict=True):
            target = leaves[region.leaf][:, region.start : region.stop]
            if region is self.weight and self.role.matrix == "kronecker":
                part = self.role.stored(part)
            target.copy_(part.reshape(target.shape))


@final
@dataclass(frozen=True)
class KroneckerBlock:
    """G ⊗ A, or Q_G diag(values) Q_A^T if values are given.

    Attributes:
        layout: The parameters of the block.
        A: [groups, into, into], or a diagonal [groups, into]. With values, Q_A; None stands for the
            identity, the eigenvectors of a diagonal A.
        G: [groups, out, out]. With values, Q_G.
        values: Eigenvalues [groups, out, into], or None.
    """

    layout: BlockLayout
    A: Tensor | None
    G: Tensor
    values: Tensor | None = None

    def apply(self, V: Tensor) -> Tensor:
        """The product with V [k, groups, out, into]."""
        if self.values is None:
            V, A = self.G @ V, not_none(self.A)
            return V * A.unsqueeze(-2) if A.dim() == 2 else V @ A
        V = self.G.mT @ V if self.A is None else self.G.mT @ V @ self.A
        V = self.G @ (self.values * V)
        return V if self.A is None else V @ self.A.mT

    def unrotated(self) -> "KroneckerBlock":
        """The diagonal of the block, as a block with identity eigenvectors."""
        A = None if self.A is None or self.A.dim() == 2 else _ones_like(self.A)
        return KroneckerBlock(self.layout, A, _ones_like(self.G), diagonal_of(self))

    def inverse_of_damped_factors(self, damping: float, balanced: bool) -> "KroneckerBlock":
        """(G + d_G I)^-1 ⊗ (A + d_A I)^-1

        balanced: d_A = pi sqrt(damping), d_G = sqrt(damping) / pi, "pi" of `inverse`
        else:     d_A = d_G = damping
        """
        d_A = d_G = self.G.new_tensor(damping)
        # A block with a single factor takes the whole damping.
        if self.layout.role.matrix != "kronecker":
            return KroneckerBlock(self.layout, _inverse(self.A, d_A), self.G)
        if self.layout.weight is None:
            return KroneckerBlock(self.layout, self.A, _inverse(self.G, d_G))
        if balanced:
            a, g = (_diagonal_of_factor(x).mean(-1) for x in (self.A, self.G))
            pi = (a / g.clamp(min=torch.finfo(g.dtype).tiny)).sqrt()
            # A zero factor has no scale to balance.
            pi = torch.where((a > 0) & (g > 0), pi, torch.ones_like(pi))
            d_A, d_G = sqrt(damping) * pi, sqrt(damping) / pi
        return KroneckerBlock(self.layout, _inverse(self.A, d_A), _inverse(self.G, d_G))


def _ones_like(factor: Tensor) -> Tensor:
    """The identity matrix, for each group."""
    return torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device).expand_as(factor)


def by_eigenvectors(blocks: Sequence[KroneckerBlock]) -> list[KroneckerBlock]:
    """The blocks as eigenvectors and eigenvalues. All factors are decomposed in one call, which waits
    for the device once."""
    factors = [not_none(x) for one in blocks if one.values is None for x in (one.A, one.G)]
    several = iter(symmetric_eigens([x for x in factors if x.dim() == 3 and x.shape[-1] > 1]))

    def eigen(x: Tensor) -> tuple[Tensor, Tensor | None]:
        if x.dim() == 2:  # diagonal: its eigenvectors are the identity, None
            return x, None
        return (x[..., 0], torch.ones_like(x)) if x.shape[-1] == 1 else next(several)

    every = map(eigen, factors)
    found = []
    for one in blocks:
        if one.values is None:
            (a, QA), (g, QG) = next(every), next(every)
            # Factors are positive semi-definite: negative eigenvalues are rounding.
            values = g.clamp(min=0).unsqueeze(-1) * a.clamp(min=0).unsqueeze(-2)
            one = KroneckerBlock(one.layout, QA, not_none(QG), values)
        found.append(one)
    return found


def not_none(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor


def _diagonal_of_factor(factor: Tensor | None) -> Tensor:
    factor = not_none(factor)
    return factor if factor.dim() == 2 else factor.diagonal(dim1=-2, dim2=-1)


def _inverse(factor: Tensor | None, damping: Tensor) -> Tensor:
    factor = not_none(factor)
    if factor.dim() == 2:
        return 1 / (factor + damping.reshape(-1, 1))
    inverse = damped_inverse(factor, damping)
    if inverse is None:
        raise NotPositiveDefiniteError(
            "inverse: expected factors that are positive definite with the damping, got one that is "
            f"not with {float(damping.max()):.3g}; use more damping, or method='exact'."
        )
    return inverse


class KroneckerOperator(LinearOperator):
    r"""A block-diagonal matrix of Kronecker products, with functions of it in closed form.

    Subclasses supply the blocks, which cover every parameter once.
    """

    @abstractmethod
    def blocks(self) -> Sequence[KroneckerBlock]:
        """The blocks, in the order of the parameters."""

    @property
    def _dtype(self) -> torch.dtype:
        """The dtype of the factors; with several processes, one may hold no factor."""
        usual = torch.promote_types(self.dtype, torch.float32)
        return next((block.G.dtype for block in self.blocks()), usual)

    def _products(self, rows: Tensor) -> Tensor:
        # If sharded, a process holds a slice of the rows and some of the blocks.
        given = leaves_of(self.space, self.space.whole_rows(rows.to(self._dtype)))
        apply = lambda block: block.apply(block.layout.gather(given))  # noqa: E731
        return self._joined(len(rows), apply).to(rows.dtype)

    def _joined(self, count: int, part: Callable[[KroneckerBlock], Tensor]) -> Tensor:
        """Rows [count, length], assembled from the parts V [count, groups, out, into] of all
        blocks."""
        # If sharded, other processes hold the remaining blocks: add_rows sums, so begin with zeros.
        make = torch.zeros if self.space.placement.is_sharded else torch.empty
        total = make(count, self.space.size, dtype=self._dtype, device=self.device)
        leaves = leaves_of(self.space, total)
        for block in self.blocks():
            block.layout.scatter(part(block), leaves)
        return self.space.add_rows(total)

    def map(self, function: Callable[[Tensor], Tensor]) -> "KroneckerMatrix":
        """The function f(K) of the matrix, for instance its square root.

        Args:
            function: Takes a tensor of eigenvalues to new ones, element by element.
        Returns:
            f(K), with the eigenvectors of K.
        Raises:
            ArgumentValueError: for a function that does not return one number for each eigenvalue.
            NonFiniteError: for a function that is not finite at an eigenvalue.
        """
        return self._map(validation.function("function", function))

    def _map(self, function: Callable[..., Any], checked: bool = True) -> "KroneckerMatrix":
        # Outside raise_in_all, where communication is forbidden: the first call of blocks() is a pass
        # over data in all processes.
        given_blocks = self.blocks()
        with torch.inference_mode(False), torch.no_grad(), self.space.raise_in_all("map"):
            blocks = by_eigenvectors(given_blocks)
            given = [not_none(block.values) for block in blocks]
            values = self._values(blocks)
            found = validation.of_eigenvalues(function, values) if checked else function(values)
            each = zip(blocks, found.split([x.numel() for x in given]), given, strict=True)
            mapped = [replace(block, values=part.view(x.shape)) for block, part, x in each]
            return KroneckerMatrix(self.space, mapped)

    def damped(self, damping: float | Tensor) -> "KroneckerMatrix":
        """The matrix K + damping I, again with its inverse and determinant in closed form.

        Args:
            damping: Added to the diagonal.
        Returns:
            The damped matrix.
        """
        number = as_number(damping, "damping")
        return self.map(lambda values: values + number)

    def __mul__(self, factor: object) -> "KroneckerMatrix":
        number = as_number(factor)
        return self.map(lambda values: values * number)

    __rmul__ = __mul__

    def inverse(
        self, damping: float = 0.0, *, method: InverseMethod = "exact"
    ) -> "KroneckerMatrix":
        r"""The inverse of the damped matrix, again in closed form.

            exact     (G ⊗ A + damping I)^-1
            pi        (G + sqrt(damping) / pi I)^-1 ⊗ (A + pi sqrt(damping) I)^-1,
                      pi^2 = (tr A / dim A) / (tr G / dim G)
            factors   (G + damping I)^-1 ⊗ (A + damping I)^-1

        "pi" and "factors" need no eigenvectors, and are approximations of the damped inverse.

        Args:
            damping: Added as above; positive if the matrix is singular.
            method: One of the three above; "exact" only for a matrix with corrected eigenvalues.
        Returns:
            The inverse, an operator.
        Raises:
            NotPositiveDefiniteError: for a damped matrix that is singular.
            ArgumentValueError: for a method that the matrix does not support, and damping below 0.
        References:
            Martens and Grosse, Optimizing Neural Networks with Kronecker-factored Approximate
            Curvature, 2015, section 6.3 (pi).
        """
        number = validation.number("damping", damping, minimum=0)
        if validation.choice("method", method, get_args(InverseMethod)) == "exact":
            # Unchecked: a check waits for the device, and the extreme eigenvalues are read just
            # below.
            damped = self._map(lambda values: values + number, checked=False)
            values = damped._values(damped.blocks())
            lowest, largest = self._ends(values)
            rounding = 0.0 if number else torch.finfo(values.dtype).eps * largest
            check_invertible(lowest, number, rounding)
            if not isfinite(largest):
                self.damped(number)  # raises
            # Check the reciprocals, another wait for the device, only where 1 / value can overflow.
            return damped._map(torch.reciprocal, checked=lowest < torch.finfo(values.dtype).tiny)
        blocks = self.blocks()
        if not self.space.true_in_all(all(block.values is None for block in blocks)):
            raise ArgumentValueError(
                f"method: expected 'exact' for a matrix with eigenvalues of its own, got {method!r}, "
                "which damps the factors."
            )
        with torch.inference_mode(False), torch.no_grad(), self.space.raise_in_all("inverse"):
            inverses = [block.inverse_of_damped_factors(number, method == "pi") for block in blocks]
        return KroneckerMatrix(self.space, inverses)

    def solve(  # type: ignore[override]
        self, b: Tree, *, damping: float = 0.0, method: InverseMethod = "exact"
    ) -> Tree:
        """Solve (K + damping I) x = b by `inverse`, without iterations.

        Args:
            b: Right-hand side: a vector or a block, flat or in the structure of params.
            damping: Added to the diagonal.
            method: One of the three methods of `inverse`.
        Returns:
            x in the form of b.
        """
        return self.inverse(damping, method=method) @ b

    def sqrt(self) -> "KroneckerMatrix":
        """The symmetric square root R, R R = K.

        ``K.inverse(d).sqrt() @ noise`` has the covariance (K + d I)^-1, for standard normal noise.
        """
        return self.map(lambda values: values.clamp(min=0).sqrt())

    def eigenvalues(self) -> Tensor:
        """All eigenvalues [P], ascending."""
        self.space.refuse_sharded("eigenvalues")
        return self._eigenvalues().sort().values.to(self.dtype)

    def _eigenvalues(self) -> Tensor:
        """The eigenvalues of the blocks of this process."""
        blocks = self.blocks()
        with torch.inference_mode(False), torch.no_grad(), self.space.raise_in_all("eigenvalues"):
            return self._values(by_eigenvectors(blocks))

    def _values(self, blocks: Sequence[KroneckerBlock]) -> Tensor:
        """The eigenvalues of blocks from `by_eigenvectors`; with several processes, one may hold no
        block."""
        nothing = torch.empty(0, dtype=self._dtype, device=self.device)
        return torch.cat([nothing, *(not_none(block.values).reshape(-1) for block in blocks)])

    def _ends(self, values: Tensor) -> tuple[float, float]:
        """The smallest eigenvalue and the largest magnitude, over all processes."""
        ends = values.new_full((2,), -inf)  # neutral, for a process without blocks
        if len(values):
            ends = torch.stack([-values.min(), values.abs().max()])
        opposite, largest = self.space.placement.reduce(ends, "MAX").tolist()
        return -opposite, largest

    def logdet(self) -> Tensor:  # type: ignore[override]
        """The logarithm of the determinant, a scalar; -inf if the matrix is singular.

        Raises:
            NotPositiveDefiniteError: for an eigenvalue that is negative by more than rounding.
        """
        values = self._eigenvalues()
        lowest, largest = self._ends(values)
        if lowest < -torch.finfo(values.dtype).eps * largest:
            raise NotPositiveDefiniteError(
                "logdet: expected a positive semi-definite matrix, got one with the eigenvalue "
                f"{lowest:.3g}; add damping, `A.damped(...)`."
            )
        total = values.double().clamp(min=0).log().sum()
        return self.space.all_sum(total).to(self.dtype)

    def trace(  # type: ignore[override]
        self, num_samples: int | None = None, *, return_error: bool = False
    ) -> Any:
        """The exact trace, a scalar.

        Args:
            num_samples: Ignored; accepted for code that estimates traces.
            return_error: Return an `Estimate` with an error of zero.
        Returns:
            The trace.
        """
        d = self._diagonal().unsqueeze(0)
        total = self.space.dots((d, torch.ones_like(d)))[0, 0]
        return exact_estimate(total.to(self.dtype)).returned(return_error)

    def diagonal(  # type: ignore[override]
        self, num_samples: int | None = None, *, return_error: bool = False
    ) -> Any:
        """The exact diagonal [P].

        Args:
            num_samples: Ignored; accepted for code that estimates diagonals.
            return_error: Return an `Estimate` with errors of zero.
        Returns:
            The diagonal.
        """
        return exact_estimate(self._diagonal().to(self.dtype)).returned(return_error)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _diagonal(self) -> Tensor:
        """The diagonal [P], in the dtype of the factors."""
        return self._joined(1, lambda block: diagonal_of(block).unsqueeze(0))[0]


@final
class KroneckerMatrix(KroneckerOperator):
    """A matrix of given blocks; functions of a `KFACOperator`, such as ``inverse``, return one.

    Args:
        space: The vector space that the matrix acts on.
        blocks: The blocks, in the order of the parameters.
    """

    def __init__(self, space: Space, blocks: Sequence[KroneckerBlock]) -> None:
        super().__init__(space)
        self._blocks = list(blocks)

    def blocks(self) -> Sequence[KroneckerBlock]:
        """The blocks, in the order of the parameters."""
        return self._blocks


def leaves_of(space: Space, rows: Tensor) -> Vector:
    """Views [k, *shape] of whole rows [k, P], one for each parameter; [k, 1] for a scalar
    parameter."""
    space.leaves()  # raises if the shapes of the parameters changed
    shapes = [x.shape if x.dim() else torch.Size([1]) for x in pytree.leaves(space.params)]
    parts = rows.split([shape.numel() for shape in shapes], 1)
    return [part.view(len(rows), *shape) for part, shape in zip(parts, shapes, strict=True)]


def diagonal_of(block: KroneckerBlock) -> Tensor:
    """The diagonal of a block, in the shape of V."""
    if block.values is None:
        a, g = (_diagonal_of_factor(x) for x in (block.A, block.G))
        return g.unsqueeze(-1) * a.unsqueeze(-2)
    # diag(Q diag(L) Q^T) = (Q * Q) L, for each factor.
    found = block.G.square() @ block.values
    return found if block.A is None else found @ block.A.square().mT
