"""Symmetric linear operators on the space of parameters, and their algebra."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, final

import torch
from torch import Tensor

from hoglib._core import validation
from hoglib._core.autograd import outside_inference_mode
from hoglib.curvature import (
    density,
    eigenvalues,
    linear_systems,
    matrix_functions,
    projected_estimators,
    traces,
)
from hoglib.curvature.vector_space import Blocks, Space, groups_of
from hoglib.errors import ArgumentTypeError, ArgumentValueError, MissingDependencyError

Tree = Any
TRACES = {
    "hutchinson": traces.hutchinson_trace,
    "hutch++": projected_estimators.hutchpp,
    "xtrace": traces.xtrace,
}
DIAGONALS = {"hutchinson": traces.hutchinson_diagonal, "xdiag": projected_estimators.xdiag}


class LinearOperator(ABC):
    r"""A symmetric matrix A [P, P] that is known by its products with vectors.

        A @ v        v flat [P] or [P, k], or in the structure of params (a trailing k for a block);
                     the product has the form of v
        A + B, A - B, 2 * A, A / 2, -A, A.damped(1e-3)        operators again

    Subclasses define the product with vectors as rows, ``_products(rows)``.

    Args:
        space: The vector space that A acts on, that of some parameters.
        progress: Show a bar that counts products (needs tqdm).
    Example:
        >>> A = hog.HessianOperator(lambda p, x: (p * x).square().sum(), torch.ones(2), torch.ones(2))
        >>> (A + A.damped(1.0)) @ torch.tensor([1.0, 2.0])
        tensor([ 5., 10.])
    """

    def __init__(self, space: Space, progress: bool = False) -> None:
        self.space = space
        self.count = 0  # products with one vector so far
        self._bar = ProgressBar(type(self).__name__, validation.flag("progress", progress))

    @contextmanager
    def _algorithm(self, name: str, products: int | None = None) -> Iterator[None]:
        """Inside, an algorithm of that name multiplies, so many times if that is known."""
        with self._bar.over(name, products):
            yield

    @abstractmethod
    def _products(self, rows: Tensor) -> Tensor:
        """A times each row of [k, P], as rows."""

    def apply(self, rows: Tensor) -> Tensor:
        """A times each row; counted, without gradients.

        Args:
            rows: Vectors [k, P].
        Returns:
            The products [k, P].
        """
        self.count += len(rows)
        with outside_inference_mode(), torch.no_grad():
            rows = rows.clone() if rows.is_inference() else rows
            return self._products(rows) if len(rows) else rows

    @property
    def params(self) -> Tree:
        """The parameters, whose structure vectors have."""
        return self.space.params

    @property
    def shape(self) -> tuple[int, int]:
        """(P, P)."""
        return self.space.size, self.space.size

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of flat vectors: the widest of the parameters', or that of `dtype=`."""
        return self.space.dtype

    @property
    def device(self) -> torch.device:
        """The device of vectors."""
        return self.space.device

    @property
    def T(self) -> "LinearOperator":
        """The transpose: itself, because it is symmetric."""
        return self

    def __matmul__(self, v: Tree) -> Tree:
        if isinstance(v, LinearOperator):
            raise ArgumentTypeError(
                "A @ v: expected a vector or a block of vectors, got an operator; a product of "
                "symmetric operators is not symmetric. Apply them in turn: A @ (B @ v)."
            )
        rows, rebuild = self.space.rows(v)
        return rebuild(self.apply(rows))

    def ravel(self, tree: Tree) -> Tensor:
        """A vector in the structure of params as a flat one.

        Args:
            tree: The vector, or a block with a trailing dimension of k in every leaf.
        Returns:
            The vector [P], or [P, k].
        """
        rows, _ = self.space.rows(tree, "tree")
        return rows.T if self.space.is_block(tree) else rows[0]

    def unravel(self, vector: Tensor) -> Tree:
        """A flat vector in the structure of params.

        Args:
            vector: [P], or a block [P, k].
        Returns:
            The vector like params; a block has a trailing dimension of k in every leaf.
        """
        rows, _ = self.space.rows(vector, "vector")
        return self.space.block(rows) if self.space.is_block(vector) else self.space.tree(rows[0])

    def __add__(self, other: Any) -> "LinearOperator":
        if not isinstance(other, LinearOperator):
            raise ArgumentTypeError(
                f"A + B: expected an operator, got {validation.describe(other)}; a multiple of the "
                "identity is added by A.damped(number)."
            )
        if not self.space.same(other.space):
            raise ArgumentValueError(
                "A + B: expected operators on parameters of the same names, shapes and dtypes, got "
                f"{self.shape} and {other.shape}."
            )
        return ScaledSum([(1.0, self), (1.0, other)])

    def __sub__(self, other: Any) -> "LinearOperator":
        return self + (-other) if isinstance(other, LinearOperator) else self + other

    def __mul__(self, factor: Any) -> "LinearOperator":
        return ScaledSum([(as_number(factor), self)])

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> "LinearOperator":
        number = as_number(divisor)
        if number == 0:
            raise ArgumentValueError("A / c: expected a number other than 0, got 0.")
        return self * (1 / number)

    def __neg__(self) -> "LinearOperator":
        return ScaledSum([(-1.0, self)])

    def damped(self, damping: float) -> "LinearOperator":
        """The operator A + damping I.

        Args:
            damping: What is added to the diagonal.
        Returns:
            An operator that shares the products of A.
        """
        return ScaledSum([(1.0, self)], as_number(damping))

    def block_diagonal(self, blocks: Blocks) -> "LinearOperator":
        """The blocks on the diagonal alone; a product takes one product of A for each block.

        Args:
            blocks: "parameter", "module", a function of a qualified name that returns its block, or a
                list of lists of names.
        Returns:
            An operator that shares the products of A.
        """
        self.space.refuse_sharded("block_diagonal")
        groups = groups_of(blocks, self.params)
        owners = torch.cat([
            torch.full((leaf.numel(),), next(g for g, group in enumerate(groups) if i in group))
            for i, leaf in enumerate(self.space.leaves())
        ]).to(self.device)  # fmt: skip
        return BlockDiagonal(self, [(owners == g).to(self.dtype) for g in range(len(groups))])

    def to_dense(self) -> Tensor:
        """The matrix [P, P], by one product a column."""
        self.space.refuse_sharded("to_dense")
        eye = torch.eye(self.space.size, dtype=self.dtype, device=self.device)
        with self._algorithm("to_dense", self.space.size):
            return self.apply(eye)

    def to_scipy(self, dtype: Any = None) -> Any:
        """A `scipy.sparse.linalg.LinearOperator` on the CPU, of NumPy vectors; needs SciPy.

        Args:
            dtype: Of those vectors; the operator's own by default, in which products are computed.
        Returns:
            The SciPy operator.
        """
        return eigenvalues.to_scipy(self, dtype)

    def solve(
        self,
        b: Tree,
        *,
        damping: float = 0.0,
        tol: float | None = None,
        atol: float = 0.0,
        max_iter: int | None = None,
        preconditioner: Any = None,
        x0: Tree | None = None,
        stagnation_tol: float = 0.0,
        return_info: bool = False,
    ) -> Any:
        """x with (A + damping I) x = b, by conjugate gradients, as `hoglib.curvature.cg`.

        Args:
            b: Right-hand side: a vector or a block, flat or in the structure of params.
            damping: What is added to the diagonal of A.
            tol: Relative tolerance of the residual. Default: 1e-8 in float64, 1e-5 in float32.
            atol: Absolute tolerance of the residual.
            max_iter: Iterations at most. Default: 10 P, at most 1000.
            preconditioner: An approximation of the diagonal (a vector), or of A^-1 (an operator or a
                function).
            x0: Where to start; zero by default.
            stagnation_tol: Stop where the quadratic function of x falls by less than this, relative to
                itself, an iteration; 0 for never.
            return_info: Return how well the system was solved, too.
        Returns:
            x in the form of b; with ``return_info``, ``(x, Solution)``.
        """
        operator = self.damped(damping) if damping else self
        with self._algorithm("solve"):
            return linear_systems.cg(
                operator, b, tol=tol, atol=atol, max_iter=max_iter, preconditioner=preconditioner,
                x0=x0, stagnation_tol=stagnation_tol, return_info=return_info,
            )  # fmt: skip

    def eigsh(
        self,
        k: int = 6,
        *,
        which: str = "LM",
        tol: float | None = None,
        max_iter: int | None = None,
        block: int = 1,
        generator: torch.Generator | None = None,
        basis_dtype: torch.dtype | None = None,
        basis_device: torch.device | str | None = None,
    ) -> eigenvalues.Eigenpairs:
        """k eigenvalues and eigenvectors, with residuals, as `hoglib.curvature.eigsh`.

        Args:
            k: How many.
            which: "LM" the largest in magnitude, "LA" the largest, "SA" the smallest, "BE" both ends,
                "SM" the smallest in magnitude.
            tol: Tolerance of |A v - value v|, relative to |value|. Default: 1e-10 in float64, 1e-5 in
                float32.
            max_iter: How often the basis is filled. Default: 10 P.
            block: Vectors that are multiplied at once.
            generator: Of the starting vectors; None is the same ones every time.
            basis_dtype: torch.float32 or torch.float64. Default: the operator's, at least float32.
            basis_device: Where the basis is held, such as "cpu". Default: the operator's device.
        Returns:
            `Eigenpairs`, which unpack as (values, vectors).
        """
        with self._algorithm("eigsh"):
            return eigenvalues.eigsh(
                self, k, which=which, tol=tol, max_iter=max_iter, block=block, generator=generator,
                basis_dtype=basis_dtype, basis_device=basis_device,
            )  # fmt: skip

    def spectral_density(
        self,
        num_samples: int = 10,
        *,
        steps: int = 80,
        grid: Tensor | None = None,
        width: float | None = None,
        generator: torch.Generator | None = None,
    ) -> density.SpectralDensity:
        """The density of the eigenvalues, as `hoglib.curvature.spectral_density`.

        Args:
            num_samples: Random vectors.
            steps: Lanczos steps of each, one product a step.
            grid: Where the density is evaluated, [n]; over the whole spectrum by default.
            width: Standard deviation of the Gaussian around each node. Default: 1% of the range.
            generator: Of the random vectors.
        Returns:
            `SpectralDensity`.
        """
        with self._algorithm("spectral_density", num_samples * min(steps, self.shape[0])):
            return density.spectral_density(
                self, num_samples, steps=steps, grid=grid, width=width, generator=generator
            )

    def trace(
        self,
        num_samples: int = 64,
        *,
        method: str = "hutchinson",
        generator: torch.Generator | None = None,
        return_error: bool = False,
    ) -> Any:
        """The trace, estimated by products with random vectors.

        Args:
            num_samples: Products.
            method: "hutchinson", as `hoglib.curvature.hutchinson_trace`, "hutch++", as
                `hoglib.curvature.hutchpp`, or "xtrace", as `hoglib.curvature.xtrace`.
            generator: Of the random vectors.
            return_error: Return the standard error, too.
        Returns:
            The trace, a scalar tensor; with ``return_error`` an `Estimate`.
        """
        estimate = TRACES[validation.one_of("method", method, list(TRACES))]
        self.space.check_same_call("trace", num_samples, method)
        with self._algorithm("trace", num_samples):
            return estimate(self, num_samples, generator=generator, return_error=return_error)

    def diagonal(
        self,
        num_samples: int = 64,
        *,
        method: str = "hutchinson",
        generator: torch.Generator | None = None,
        return_error: bool = False,
    ) -> Any:
        """The diagonal, estimated by products with random vectors.

        Args:
            num_samples: Products.
            method: "hutchinson", as `hoglib.curvature.hutchinson_diagonal`, or "xdiag", as
                `hoglib.curvature.xdiag`.
            generator: Of the random vectors.
            return_error: Return the standard errors, too.
        Returns:
            The diagonal [P]; with ``return_error`` an `Estimate`.
        """
        estimate = DIAGONALS[validation.one_of("method", method, list(DIAGONALS))]
        self.space.check_same_call("diagonal", num_samples, method)
        with self._algorithm("diagonal", num_samples):
            return estimate(self, num_samples, generator=generator, return_error=return_error)

    def logdet(
        self,
        num_samples: int = 10,
        *,
        steps: int = 80,
        generator: torch.Generator | None = None,
        return_error: bool = False,
    ) -> Any:
        """The logarithm of the determinant, as `hoglib.curvature.logdet`.

        Args:
            num_samples: Random vectors.
            steps: Lanczos steps of each, one product a step.
            generator: Of the random vectors.
            return_error: Return the standard error, too.
        Returns:
            The logarithm, a scalar tensor; with ``return_error`` an `Estimate`.
        """
        self.space.check_same_call("logdet", num_samples, steps)
        with self._algorithm("logdet", num_samples * min(steps, self.shape[0])):
            return matrix_functions.logdet(
                self, num_samples, steps=steps, generator=generator, return_error=return_error
            )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.shape[0]} x {self.shape[1]}, {self.dtype})"


@final
class ScaledSum(LinearOperator):
    """A sum of multiples of operators and of the identity: sum of c_i A_i + damping I."""

    def __init__(self, terms: list[tuple[float, LinearOperator]], damping: float = 0.0) -> None:
        super().__init__(terms[0][1].space)
        self._terms: list[tuple[float, LinearOperator]] = []
        self._damping = damping
        for factor, term in terms:
            if isinstance(term, ScaledSum):
                self._terms += [(factor * c, inner) for c, inner in term._terms]
                self._damping += factor * term._damping
            else:
                self._terms.append((factor, term))
        self._bar = terms[0][1]._bar

    def _products(self, rows: Tensor) -> Tensor:
        total = self._damping * rows
        for factor, term in self._terms:
            total.add_(term.apply(rows), alpha=factor)
        return total


@final
class BlockDiagonal(LinearOperator):
    """The blocks on the diagonal of an operator, one product of it for each block."""

    def __init__(self, operator: LinearOperator, masks: list[Tensor]) -> None:
        super().__init__(operator.space)
        self._operator, self._masks = operator, masks
        self._bar = operator._bar

    def _products(self, rows: Tensor) -> Tensor:
        parts = self._operator.apply(torch.cat([rows * mask for mask in self._masks]))
        total = torch.zeros_like(rows)
        for mask, part in zip(self._masks, parts.split(len(rows)), strict=True):
            total += part * mask
        return total


def as_number(value: Any) -> float:
    if isinstance(value, Tensor) and value.dim() == 0:
        value = value.item()
    return float(validation.number("factor", value))


@final
class ProgressBar:
    """Counts the products of an operator, or the steps of a training; the outermost call names the
    work, and their number."""

    def __init__(self, name: str, enabled: bool, unit: str = "product") -> None:
        self._name, self._enabled, self._unit = name, enabled, unit
        self._open: Any = None
        self._done = 0.0

    def over(self, work: str, total: int | None = None) -> AbstractContextManager[None]:
        """Show the bar while the work lasts, unless it is shown already."""
        if not self._enabled or self._open is not None:
            return nullcontext()
        return self._shown(work, total)

    @contextmanager
    def _shown(self, work: str, total: int | None) -> Iterator[None]:
        self._done = 0.0
        self._open = _tqdm()(total=total, desc=f"{self._name} {work}", unit=self._unit, leave=False)
        try:
            yield
        finally:
            self._open.close()
            self._open = None

    def advance(self, products: float) -> None:
        """Count some products more, or a fraction of one."""
        if self._open is not None:
            self._done += products
            self._open.update(round(self._done, 2) - self._open.n)


def _tqdm() -> Any:
    try:
        from tqdm.auto import tqdm
    except ImportError as error:
        raise MissingDependencyError(
            "progress=True: expected the package tqdm to be installed, and it is not; `pip install "
            "tqdm`, or leave progress at False."
        ) from error
    return tqdm
