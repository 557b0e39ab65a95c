"""Linear operators, defined by their products with vectors: rectangular operators, symmetric operators
with their algorithms, and their algebra."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from math import inf, isfinite
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    NoReturn,
    TypedDict,
    TypeVar,
    Unpack,
    final,
    overload,
)

import torch
from torch import Generator, Tensor

from hoglib import errors
from hoglib._core.messages import validation
from hoglib._core.messages.communication import tell_sharers
from hoglib._core.messages.progress import ProgressBar
from hoglib._core.numerics.factorizations import symmetric_eigen
from hoglib._core.numerics.sparsity import read_sparse
from hoglib._core.runtime.device_reads import read_late
from hoglib._core.substrate.autograd import grad_enabled, outside_inference_mode
from hoglib._core.torch_api.torch_internals import outside_checkpoint
from hoglib._core.torch_api.torch_modes import own_algebra, users_autocast
from hoglib.capture.within import run_uncompiled, when_compiled
from hoglib.curvature.algebra import adjoints, eigenvalues, estimates, linear_systems, vector_space
from hoglib.curvature.algebra.adjoints import Gradients, gradients_of, merged
from hoglib.curvature.algebra.vector_space import (
    Blocks,
    Space,
    chosen_names,
    groups_of,
    random_normals,
)

Tree = Any
Chain = list[tuple["RectangularOperator", bool]]  # factors, and whether each is transposed
Factor = float | Tensor  # a scalar tensor if it requires grad
Terms = list[tuple[Factor, "RectangularOperator"]]  # multiples of operators
Term = TypeVar("Term", "LinearOperator", "RectangularOperator")  # symmetric, or any
Vector = TypeVar("Vector")  # a vector, or vectors, in one of the forms that an operator takes


class SolveOptions(TypedDict, total=False):
    """The keyword options of `LinearOperator.solve`, for type checkers."""

    damping: float | Tensor
    tol: float | None
    atol: float
    max_iter: int | None
    preconditioner: Any
    x0: Any
    stagnation_tol: float
    create_graph: bool


class TraceOptions(TypedDict, total=False):
    """The keyword options of `LinearOperator.trace`, for type checkers."""

    method: Literal["auto", "hutchinson", "xtrace"]
    generator: Generator | None
    create_graph: bool


class DiagonalOptions(TypedDict, total=False):
    """The keyword options of `LinearOperator.diagonal`, for type checkers."""

    method: Literal["hutchinson", "xdiag"]
    generator: Generator | None
    create_graph: bool


class RectangularOperator(ABC):
    r"""A matrix A [M, P], not necessarily symmetric, defined by its products with vectors.

        A @ v        v flat [P] or [P, k], or in the structure of the column space (a trailing k for a
                     block); the product is flat, too, or in the structure of the row space
        A.T          the transpose, an operator on the row space
        A + B, A - B, 2 * A, A / 2, -A        operators again
        A @ B        a product. If it is symmetric by construction, as X @ X.T, X.T @ X, and X @ S @ X.T
                     with a symmetric S, it is a `LinearOperator`, with all algorithms

    Subclasses define the products with vectors as rows, ``_products(rows)`` and
    ``_transposed_products(rows)``, and `target`, the row space.

    Args:
        space: The vector space that A acts on.
        progress: Show a bar that counts products (needs tqdm).
    Example:
        >>> H = hog.HessianOperator(lambda p, x: (p * x).square().sum(), torch.ones(2), torch.ones(2))
        >>> S = hog.curvature.LinearOperator.from_dense(torch.tensor([[0.0, 1.0], [1.0, 1.0]]))
        >>> (H @ S).T.to_dense()
        tensor([[0., 2.],
                [2., 2.]])
        >>> (S @ H @ S).to_dense()
        tensor([[2., 2.],
                [2., 4.]])
    """

    def __init__(self, space: Space, progress: bool = False) -> None:
        self.space = space
        self.count = 0  # products with one vector so far
        # operators derived from this operator share the bar
        self._bar = ProgressBar(type(self).__name__, validation.boolean("progress", progress))

    @contextmanager
    def _algorithm(self, name: str, total: int | None = None, options: Any = ()) -> Iterator[None]:
        """Inside, the algorithm `name` runs, with `total` products if known.

        options: Processes compare them: they determine the number of messages.
        """
        try:
            if options:
                self.space.check_same_call(name, *options)
            with own_algebra(), self._bar.over(name, total):
                yield
        except BaseException as error:
            tell_sharers(error, self.space.params)
            raise

    @property
    def target(self) -> Space:
        """The row space: the space of products A v. By default the space of vectors."""
        return self.space

    @abstractmethod
    def _products(self, rows: Tensor) -> Tensor:
        """A times each row of [k, P], as rows."""

    @abstractmethod
    def _transposed_products(self, rows: Tensor) -> Tensor:
        """A^T times each row of [k, M], as rows."""

    def sources(self) -> list[Tensor]:
        """The tensors requiring grad that A depends on.

        Returns:
            The tensors.
        Raises:
            UnsupportedError: for an operator without a derivative.
        """
        raise errors.UnsupportedError(
            f"{type(self).__name__}: expected an operator that knows its derivative for "
            "create_graph=True, got one without it; a HessianOperator, a GGNOperator, "
            "`LinearOperator.from_matvec` and `from_dense`, their sums, products and blocks have it."
        )

    def operands(self) -> list[Tensor]:
        """The tensors besides `sources` that the derivative of A reads.

        Returns:
            The current tensors; none for a matrix in memory.
        """
        return []

    def differentiate_form(self, left: Tensor, right: Tensor) -> Gradients:
        """The derivatives of sum_j left_j^T A right_j by the `sources` of A.

        Args:
            left: Vectors [k, M].
            right: Vectors [k, P].
        Returns:
            The derivative by each tensor.
        """
        self.sources()  # raises
        raise NotImplementedError

    def apply(self, rows: Tensor) -> Tensor:
        """A times each row; counted, without gradients.

        Args:
            rows: Vectors [k, P].
        Returns:
            The products [k, M].
        """
        self.count += len(rows)
        # A product may save its vector for backward; autograd cannot save inference tensors.
        with outside_inference_mode(), torch.no_grad(), own_algebra(), outside_checkpoint():
            rows = rows.clone() if rows.is_inference() else rows
            return self._products(rows) if len(rows) else rows.new_empty(0, self.target.length)

    @property
    def shape(self) -> tuple[int, int]:
        """(M, P)."""
        return self.target.size, self.space.size

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of flat vectors: the widest dtype of the parameters, or the option `dtype`."""
        return self.space.dtype

    @property
    def device(self) -> torch.device:
        """The device of vectors."""
        return self.space.device

    @property
    def T(self) -> "RectangularOperator":
        """The transpose."""
        return product_of(_transpose_chain(_chain_of(self)))

    @when_compiled(run_uncompiled)
    def __matmul__(self, v: Tree) -> Any:
        if isinstance(v, RectangularOperator):
            return product_of(_chain_of(self) + _chain_of(v))
        rows, rebuild = self.space.rows(v)
        return self._in_form(v, self.apply(rows), rebuild)

    def _in_form(self, v: Tree, found: Tensor, rebuild: Callable[[Tensor], Tree]) -> Tree:
        """Rows [k, M] of the row space in the form of v. rebuild: rows [k, P] -> the form of v."""
        target = self.target
        # A symmetric operator returns the form of v, a rectangular one the structure of its row space.
        if target is self.space:
            return rebuild(found)
        block = self.space.is_block(v)
        if self.space.is_flat(v):
            return found.T if block else found[0]
        return target.block(found) if block else target.tree(found[0])

    __array_ufunc__ = None  # NumPy arrays leave products to __rmatmul__

    def __rmatmul__(self, v: Tree) -> Any:
        if isinstance(v, Tensor) and self.T.space.is_block(v):
            text = f"v @ A: expected one vector, got {validation.describe(v)}; use (A.T @ V.T).T."
            raise errors.ArgumentTypeError(text)
        return self.T @ v

    def __add__(self, other: "RectangularOperator") -> "RectangularOperator":
        if not isinstance(other, RectangularOperator):
            raise errors.ArgumentTypeError(
                f"A + B: expected an operator, got {validation.describe(other)}; a multiple of the "
                "identity is added by A.damped(number), a matrix as `LinearOperator.from_dense`."
            )
        if not (self.space.same(other.space) and self.target.same(other.target)):
            raise errors.ArgumentValueError(
                "A + B: expected operators on parameters of the same names, shapes and dtypes, got "
                f"{self.shape} and {other.shape}."
            )
        return sum_of((1.0, self), (1.0, other))

    def __radd__(self, other: Any) -> Any:
        starts_sum = type(other) is int and other == 0  # sum([A, B]) is 0 + A + B
        return self if starts_sum else self + other

    def __sub__(self, other: "RectangularOperator") -> "RectangularOperator":
        return self + (-other) if isinstance(other, RectangularOperator) else self + other

    __rsub__ = __add__  # only operators can be added

    def __mul__(self, factor: object) -> "RectangularOperator":
        return sum_of((as_factor(factor), self))

    __rmul__ = __mul__

    def __truediv__(self, divisor: object) -> "RectangularOperator":
        number = as_factor(divisor)
        if number == 0:
            raise errors.ArgumentValueError("A / c: expected a number other than 0, got 0.")
        return self * (1 / number)

    def __rtruediv__(self, other: object) -> NoReturn:
        text = f"c / A: expected a number for A, got {validation.describe(self)}; use `A.solve(b)`."
        raise errors.ArgumentTypeError(text)

    def __neg__(self) -> "RectangularOperator":
        # Not self * -1: a Kronecker operator would need eigenvectors for it.
        return sum_of((-1.0, self))

    def matvec(self, v: Tree) -> Any:
        """A @ v, under SciPy's name.

        Args:
            v: A vector or a block.
        Returns:
            The product.
        """
        return self @ v

    def to_dense(self, *, chunk_size: int | None = None) -> Tensor:
        """The matrix [M, P], by one product for each column, or for each row if there are fewer.

        Args:
            chunk_size: Products in one pass over the data. Default: all; for each batch as many side by
                side as memory holds, as in `hoglib.hessian`.
        """
        self.space.refuse_sharded("to_dense")
        validation.none_or_at_least("chunk_size", chunk_size, 1)
        by_rows = self.shape[0] < self.shape[1]
        A = self.T if by_rows else self
        eye = torch.eye(A.shape[1], dtype=A.dtype, device=A.device)
        with self._algorithm("to_dense", len(eye)):
            found = torch.cat([A.apply(vectors) for vectors in eye.split(chunk_size or len(eye))])
        return found if by_rows else found.T

    @when_compiled(run_uncompiled)
    def to_sparse(self, sparsity: object = None, *, chunk_size: int | None = None) -> Tensor:
        """The matrix [M, P] as a sparse CSR tensor, by a few products.

        Columns without a common row are multiplied at once; transposed products read rows with many
        entries. Without a pattern, products with random vectors find the pattern: for each factor of 4
        in P about 4 for each entry of the longest remaining row.

        Args:
            sparsity: The pattern: a tensor [M, P] in any layout, such as an earlier result, with an
                entry wherever the matrix may have one; `Band(width)`; `DiagonalBlocks(size)`. None
                finds it, and remembers it for this operator.
            chunk_size: Products in one pass over the data. Default: all.
        Returns:
            A `torch.sparse_csr` tensor without gradients, checked by one more product.
        Raises:
            ArgumentTypeError, ArgumentValueError: unless sparsity has the shape of A, and A has no
                entries outside the pattern.
            UnsupportedError: for DTensor parameters.
        References:
            Curtis, Powell and Reid, On the Estimation of Sparse Jacobian Matrices, 1974. Griewank and
            Mitev, Detecting Jacobian Sparsity Patterns by Bayesian Probing, 2002.
        Example:
            >>> f = lambda p, x: (x * p**3).sum()
            >>> H = hog.HessianOperator(f, torch.ones(3), torch.arange(3.0))
            >>> H.to_sparse().values()
            tensor([ 6., 12.])
        """
        self.space.refuse_sharded("to_sparse")
        with self._algorithm("to_sparse"):
            return read_sparse(self, sparsity, self, "to_sparse", chunk_size).to_csr()

    def lstsq(
        self,
        b: object,
        *,
        damping: float = 0.0,
        tol: float | None = None,
        max_iter: int | None = None,
        return_info: bool = False,
    ) -> Any:
        r"""Solve a least-squares problem by LSMR: one product with A and one with A^T an iteration.

            x = argmin |b - A x|^2 + damping |x|^2        (A^T A + damping I) x = A^T b,  r = b - A x
            |A^T r - damping x| <= tol |A| |(r, sqrt(damping) x)|
            or |(r, sqrt(damping) x)| <= tol (|b| + |A| |x|)

        Without damping, and for an A of any rank, x is the shortest of the minimizers. The columns of a
        block are solved side by side, until the last column has converged. The tolerance is of the
        gradient: the error of x is larger by up to the condition number of A. Unless ``return_info`` is
        given, a missed tolerance is a warning.

        Args:
            b: A vector or a block on the row space, flat or in its structure: for a Jacobian, like the
                outputs.
            damping: The factor of |x|^2.
            tol: Relative tolerance. Default: 1e-8 in float64, 1e-5 in float32, 1e-2 in half precision.
            max_iter: Iterations at most. Default: 10 min(M, P), at most 1000.
            return_info: Also return how well the problem was solved.
        Returns:
            x, flat if b is, else in the structure of the column space; with ``return_info``,
            ``(x, LeastSquares)``.
        Raises:
            UnsupportedError: for parameters that several processes share.
        Shape:
            - b: [M], [M, k], or like the outputs
        References:
            Fong and Saunders, LSMR: An Iterative Algorithm for Sparse Least-Squares Problems, 2011.
        Example:
            >>> x = torch.tensor([[1.0, 0.0], [1.0, 1.0], [1.0, 2.0]])
            >>> J = hog.JacobianOperator(lambda p, x: x @ p, torch.zeros(2), x)
            >>> J.lstsq(torch.tensor([1.0, 3.0, 5.0]))  # a line through three points
            tensor([1.0000, 2.0000])
        """
        with self._algorithm("lstsq"):
            return linear_systems.lsmr(self, b, damping, tol, max_iter, return_info)

    def svd(
        self,
        k: int = 6,
        *,
        tol: float | None = None,
        max_iter: int | None = None,
        generator: Generator | None = None,
    ) -> eigenvalues.SingularTriplets:
        r"""The k largest singular values with their vectors, by Golub-Kahan-Lanczos bidiagonalization.

            A v = value u,  A^T u = value v,        residual <= tol value

        The bases hold up to 6 k + 6 vectors (at least 63) on each side, in the dtype of the operator
        (at least float32), are orthogonalized in full, and restart with the best half. Matrices with a
        smaller side of at most 21 or 2 k + 2 are made dense. Of a repeated singular value, copies may
        be missed.

        Args:
            k: How many triplets; at most min(M, P).
            tol: Relative tolerance of the residuals, as far as rounding allows. Default: 1e-10 in
                float64, 1e-5 in float32.
            max_iter: How often the bases are filled, at most. Default: 10 min(M, P).
            generator: Draws the starting vector; None draws an equal one in every call.
        Returns:
            `SingularTriplets`, which unpack as (left [M, k], values [k] descending, right [P, k]).
        Raises:
            ConvergenceError: without convergence; the message names the values found.
            UnsupportedError: for parameters that several processes share.
        References:
            Golub and Kahan, Calculating the Singular Values and Pseudo-inverse of a Matrix, 1965.
            Baglama and Reichel, Augmented Implicitly Restarted Lanczos Bidiagonalization Methods, 2005
            (restarts).
        Example:
            >>> x = torch.tensor([[3.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
            >>> J = hog.JacobianOperator(lambda p, x: x @ p, torch.zeros(2), x)
            >>> J.svd(2).values
            tensor([3., 1.])
        """
        with self._algorithm("svd"):
            return eigenvalues.svd(self, k, tol, max_iter, generator)

    def to_scipy(self) -> Any:
        """A `scipy.sparse.linalg.LinearOperator` on the CPU; needs SciPy.

        Its NumPy vectors have the operator's dtype, or float32 for half precision.

        Returns:
            The SciPy operator.
        """
        return eigenvalues.to_scipy(self)

    def _refuse_algorithm(self, name: str) -> Any:
        """`__getattr__`: for an algorithm of `LinearOperator`, an error with advice on symmetric
        products."""
        if name.startswith("_") or name not in vars(LinearOperator):
            return object.__getattribute__(self, name)  # raises again the error of a property
        advice = (
            "a result has the structure of params or outputs if its argument has one"
            if name in ("ravel", "unravel")
            else "A @ A.T, A.T @ A and A @ S @ A.T are, and `lstsq` and `svd` need none"
        )
        raise errors.UnsupportedError(
            f"{type(self).__name__}.{name}: expected a symmetric operator, got one [{self.shape[0]}, "
            f"{self.shape[1]}] that is not known to be; {advice}."
        )

    if not TYPE_CHECKING:  # type checkers must still report unknown attributes
        __getattr__ = _refuse_algorithm

    def _refuse_not_finite(
        self, rows: Tensor, total: Tensor, space: Space, finite: str, alone: bool = True
    ) -> None:
        """Raise for products with NaN or infinity from finite rows.

        space: The space of the products.
        finite: A subject and verb for the message: "the loss is" (finite).
        alone: No other process has a part of the data or the vectors.
        """
        if total.device.type == "cpu" or not alone:  # all processes must raise together
            where = space.first_not_finite(total)
            bad = where and space.true_in_all(bool(rows.isfinite().all()))
        else:
            # One copy of both magnitudes, which the next product reads: no synchronization.
            sizes = torch.stack([torch.linalg.vector_norm(x, inf) for x in (rows, total)])
            now = read_late((type(self), total.shape), sizes)
            bad = now is not None and isfinite(now[0]) and not isfinite(now[1])
            where = (bad and space.first_not_finite(total)) or "an earlier product"
        if bad:
            raise errors.NonFiniteError(
                f"{type(self).__name__} @ v: expected finite products, got NaN or infinity in {where}, "
                f"where {finite} finite; look for a square root, norm or logarithm at zero."
            )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.shape[0]} x {self.shape[1]}, {self.dtype})"


class LinearOperator(RectangularOperator):
    r"""A symmetric matrix A [P, P], defined by its products with vectors.

        A @ v        v flat [P] or [P, k], or in the structure of params (a trailing k for a block);
                     the product has the form of v
        A + B, A - B, 2 * A, A / 2, -A, A.damped(1e-3)        operators again, symmetric ones if B is

    `from_matvec` and `from_dense` make an operator of a function or a matrix. Subclasses define the
    product with vectors as rows, ``_products(rows)``.

    Args:
        space: The vector space that A acts on.
        progress: Show a bar that counts products (needs tqdm).
    Example:
        >>> A = hog.HessianOperator(lambda p, x: (p * x).square().sum(), torch.ones(2), torch.ones(2))
        >>> (A + A.damped(1.0)) @ torch.tensor([1.0, 2.0])
        tensor([ 5., 10.])
    """

    @staticmethod
    def from_matvec(
        matvec: Callable[[Tree], Tree],
        like: Tree,
        *,
        matmat: Callable[[Tree], Tree] | None = None,
        check_symmetric: bool = True,
    ) -> "LinearOperator":
        r"""The symmetric matrix of a function v -> A v, for all algorithms.

        The first use checks v^T A w = w^T A v for two random vectors: A v by matvec, A w by matmat if
        given.

        Args:
            matvec: The product, in the form of like; it may differentiate.
            like: A tensor or a pytree of tensors, such as params. Vectors have its structure, shapes,
                dtypes and device.
            matmat: The products with a block of k vectors at once, in the form of like with a trailing
                k.
            check_symmetric: Whether the first use checks for symmetry.
        Returns:
            The operator.
        Raises:
            ArgumentTypeError, ArgumentValueError: if matvec is no function, or like has no tensor; at
                the first use for products of another form, and for an asymmetric matrix.
            NonFiniteError: for NaN or infinity in products.
        Example:
            >>> A = hog.curvature.LinearOperator.from_matvec(lambda v: 3 * v, torch.ones(4))
            >>> A.solve(torch.ones(4))
            tensor([0.3333, 0.3333, 0.3333, 0.3333])
        """
        validation.function("matvec", matvec)
        validation.function("matmat", matmat or matvec)
        validation.boolean("check_symmetric", check_symmetric)
        space = Space(like, of="like")
        space.refuse_sharded("from_matvec")

        def products(rows: Tensor, graph: bool = False) -> Tensor:
            with grad_enabled(), users_autocast():
                if matmat is not None and len(rows) > 1:
                    return space.rows(matmat(space.block(rows)), "matmat(V)", graph)[0]
                # clone: the function may change its argument.
                every = (matvec(space.tree(row.clone())) for row in rows)
                return torch.cat([space.rows(Av, "matvec(v)", graph)[0] for Av in every])

        return GivenOperator(space, products, check_symmetric)

    @staticmethod
    def from_dense(matrix: Tensor, like: Tree = None) -> "LinearOperator":
        r"""The operator of a symmetric matrix in memory, for all algorithms.

        Args:
            matrix: A [P, P]. It is not copied.
            like: What vectors are like, as in `from_matvec`. Default: flat vectors [P].
        Returns:
            The operator.
        Raises:
            ArgumentTypeError, ArgumentValueError: unless the matrix is square, symmetric and finite,
                and has the size, dtype and device of like.
        Example:
            >>> A = hog.curvature.LinearOperator.from_dense(torch.tensor([[2.0, 1.0], [1.0, 2.0]]))
            >>> A.eigsh(2).values
            tensor([1., 3.])
        """
        A = validation.real("matrix", matrix).detach()
        space = Space(A.new_zeros(A.shape[:1]) if like is None else like, of="like")
        P, found = space.size, (A.shape, A.dtype, A.device)
        if found != ((P, P), space.dtype, space.device):
            raise errors.ArgumentValueError(
                f"matrix: expected [{P}, {P}], {space.dtype} on {space.device}, as of like, got "
                f"{list(A.shape)}, {A.dtype} on {A.device}."
            )
        off, size = float((A - A.T).abs().max()), float(A.abs().max())
        # BOUNDS[...][0], the wide bound: the matrix may have been computed in TF32.
        if not off <= vector_space.BOUNDS[A.dtype][0] * size:
            raise errors.ArgumentValueError(
                "matrix: expected a finite, symmetric one, got entries that differ from those of its "
                f"transpose by {off:.1g}, of {size:.1g} at most; (matrix + matrix.T) / 2 is symmetric."
            )

        def products(rows: Tensor, graph: bool = False) -> Tensor:
            return rows @ (matrix if graph else A)

        return GivenOperator(space, products, False)

    def _transposed_products(self, rows: Tensor) -> Tensor:
        return self._products(rows)

    @property
    def params(self) -> Tree:
        """The parameters; vectors have their structure."""
        return self.space.params

    @property
    def T(self) -> "LinearOperator":
        """The transpose: the operator itself, because it is symmetric."""
        return self

    if TYPE_CHECKING:  # types of results for symmetric operators

        @overload
        def __matmul__(self, v: RectangularOperator) -> RectangularOperator: ...
        @overload
        def __matmul__(self, v: Vector) -> Vector: ...
        def __matmul__(self, v: Tree) -> Any: ...
        @overload
        def matvec(self, v: RectangularOperator) -> RectangularOperator: ...
        @overload
        def matvec(self, v: Vector) -> Vector: ...
        def matvec(self, v: Tree) -> Any: ...
        def __add__(self, other: Term) -> Term: ...
        def __radd__(self, other: object) -> "LinearOperator": ...
        def __sub__(self, other: Term) -> Term: ...
        def __mul__(self, factor: object) -> "LinearOperator": ...
        def __rmul__(self, factor: object) -> "LinearOperator": ...
        def __truediv__(self, divisor: object) -> "LinearOperator": ...
        def __neg__(self) -> "LinearOperator": ...

    def ravel(self, tree: Tree) -> Tensor:
        """A vector in the structure of params as a flat vector.

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

    def damped(self, damping: float | Tensor) -> "LinearOperator":
        """The operator A + damping I.

        Args:
            damping: Added to the diagonal. A scalar tensor that requires grad is read at each product,
                and algorithms with ``create_graph=True`` differentiate by such a damping, or factor.
        Returns:
            An operator that shares the products of A.
        """
        return SymmetricSum([(1.0, self)], as_factor(damping, "damping"))

    def block_diagonal(self, blocks: Blocks) -> "LinearOperator":
        """Only the blocks on the diagonal; a product takes one product of A for each block.

        Args:
            blocks: "parameter", "module", a function of a qualified name that returns its block, or a
                list of lists of names.
        Returns:
            An operator that shares the products of A.
        """
        self.space.refuse_sharded("block_diagonal")
        groups = groups_of(blocks, self.params)
        zeros = torch.zeros(self.space.size, dtype=self.dtype, device="cpu")
        places = self.space.places()
        masks = [zeros.index_fill(0, torch.cat([places[i] for i in group]), 1) for group in groups]
        return BlockDiagonal(self, [mask.to(self.device) for mask in masks])

    def submatrix(self, names: str | Iterable[str] | Callable[[str], bool]) -> "LinearOperator":
        """Only the rows and columns of some parameters; a product takes one product of A.

        Args:
            names: A pattern or patterns of qualified names, such as "head.*", as in
                `hoglib.trainable_params`; or a function that tells whether to take a name.
        Returns:
            An operator on these parameters, in their order in params.
        Raises:
            ArgumentTypeError: unless params are a dict of tensors.
            ArgumentValueError: for a pattern without a matching name.
        Example:
            >>> x = torch.ones(1)
            >>> H = hog.HessianOperator(lambda p, x: (p["a"] * p["b"] ** 2).sum(), {"a": x, "b": x}, x)
            >>> H.submatrix("b").to_dense()
            tensor([[2.]])
        """
        self.space.refuse_sharded("submatrix")
        return Submatrix(self, chosen_names(names, self.params))

    @overload
    def solve(
        self, b: Vector, *, return_info: Literal[False] = False, **options: Unpack[SolveOptions]
    ) -> Vector: ...
    @overload
    def solve(
        self, b: Vector, *, return_info: Literal[True], **options: Unpack[SolveOptions]
    ) -> tuple[Vector, linear_systems.Solution]: ...
    def solve(
        self,
        b: object,
        *,
        damping: float | Tensor = 0.0,
        tol: float | None = None,
        atol: float = 0.0,
        max_iter: int | None = None,
        preconditioner: object = None,
        x0: Tree | None = None,
        stagnation_tol: float = 0.0,
        return_info: bool = False,
        create_graph: bool = False,
    ) -> Any:
        r"""Solve (A + damping I) x = b by conjugate gradients.

            B x = b,  B = A + damping I,        |b - B x| <= max(tol |b|, atol)

        The columns of a block are solved side by side, each with its own coefficients. When the
        recurrence's residual is small enough, the true residual is computed from x; if the true
        residual is too large, the iteration starts again from there. Unless ``return_info`` or
        ``stagnation_tol`` is given, a missed tolerance is a warning.

        Args:
            b: Right-hand side: a vector or a block, flat or in the structure of the operator's params.
            damping: Added to the diagonal of A.
            tol: Relative tolerance. Default: 1e-8 in float64, 1e-5 in float32.
            atol: Absolute tolerance.
            max_iter: Iterations at most. Default: 10 P, at most 1000.
            preconditioner: A vector that approximates the diagonal of B and divides residuals; or an
                operator, or a function of residuals in the form of b, that approximates B^-1.
            x0: Where to start, in the form of b; zero by default.
            stagnation_tol: Also end a column once q(x) = x^T B x / 2 - b^T x, which each iteration
                lowers, is negative and fell by less than k stagnation_tol |q(x)| over the last k =
                max(10, i / 10) of i iterations. This suffices for Newton steps. With a preconditioner
                k is max(5, i / 10), because few iterations are needed. 0: never.
            return_info: Also return how well the system was solved.
            create_graph: Whether x can be differentiated once, by b, damping and the tensors that A
                depends on, as in `trace`: dx = B^-1 (db - dB x). Backward solves a system with tol;
                max_iter and preconditioner are constants.
        Returns:
            x in the form of b; with ``return_info``, ``(x, Solution)``.
        Raises:
            NotPositiveDefiniteError: at a direction p with p^T B p <= 0, with its curvature; also where
                it is 0 up to rounding, and the solution overflows.
            NonFiniteError: for infinity or NaN in b or the preconditioner.
            UnsupportedError: for create_graph, as in `trace`.
        Shape:
            - b: [P], [P, k], or like params
        References:
            Hestenes and Stiefel, Methods of Conjugate Gradients for Solving Linear Systems, 1952.
            Martens, Deep Learning via Hessian-free Optimization, 2010, section 4.4 (stagnation_tol).
        Example:
            >>> one = torch.ones(2)
            >>> A = hog.HessianOperator(lambda p, x: (p * x).square().sum(), one, one)
            >>> A.solve(torch.ones(2))
            tensor([0.5000, 0.5000])
        """
        limits = tol, atol, max_iter, stagnation_tol
        if self._differentiates("solve", create_graph) and stagnation_tol:
            raise errors.ArgumentValueError(
                "solve(create_graph=True): expected stagnation_tol=0, got "
                f"{stagnation_tol}; the derivative is that of the exact solution."
            )
        with self._algorithm("solve", options=(damping, *limits)):
            tracks = isinstance(damping, Tensor) and damping.requires_grad
            operator = self.damped(damping) if tracks or damping else self
            with outside_inference_mode():  # autograd cannot save an inference tensor x
                found = linear_systems.cg(operator, b, *limits, preconditioner, x0, return_info)
        if not create_graph:
            return found

        def again(c: Tree) -> Tree:
            with self._algorithm("solve"):
                return linear_systems.cg(
                    operator, c, tol, 0.0, max_iter, 0.0, preconditioner, None, False
                )

        if return_info:
            return adjoints.solution(operator, b, found[0], again), found[1]
        return adjoints.solution(operator, b, found, again)

    def _differentiates(self, caller: str, create_graph: bool, looks: bool = True) -> bool:
        """create_graph, checked; raises for sharded parameters.

        looks: Raise now for operators without a derivative, before the algorithm runs.
        """
        if validation.boolean("create_graph", create_graph):
            self.space.refuse_sharded(f"{caller}(create_graph=True)")
            if looks:
                with grad_enabled():
                    self.sources()
        return create_graph

    def eigsh(
        self,
        k: int = 6,
        *,
        which: Literal["LM", "LA", "SA", "BE", "SM"] = "LM",
        tol: float | None = None,
        max_iter: int | None = None,
        block: int = 1,
        generator: Generator | None = None,
        basis_device: torch.device | str | None = None,
        create_graph: bool = False,
    ) -> eigenvalues.Eigenpairs:
        r"""k eigenvalues and eigenvectors, by thick-restart Lanczos.

            A v = value v,        |A v - value v| <= tol |value|

        The basis holds 2 k + 2 vectors (at least 21) in the dtype of the operator (at least float32);
        up to three times as many if vectors are short, or convergence is slow. Matrices of at most 21
        or 2 k + 2 rows are made dense.

        Args:
            k: How many eigenpairs.
            which: "LM" the largest in magnitude, "LA" the largest, "SA" the smallest, "BE" both
                ends, "SM" the smallest in magnitude, which takes many products.
            tol: Relative tolerance of the residuals, as far as rounding allows. Default: 1e-10 in
                float64, 1e-5 in float32.
            max_iter: How often the basis is filled, at most. Default: 10 P.
            block: Vectors in one product. All copies of an eigenvalue are found if its multiplicity is
                at most `block`; a single vector may miss copies.
            generator: Draws the starting vectors; None draws equal ones in every call.
            basis_device: Where the basis is held and orthogonalised: "cpu" keeps it out of the
                memory of a GPU, which then holds the vectors of one product. Default: the
                operator's device.
            create_graph: Whether the values can be differentiated once, by the tensors that A depends
                on, as in `trace`: d value = v^T dA v (Hellmann and Feynman). One eigenvalue more, by a
                block of at least 2, shows whether a value is repeated; only a sum over all copies has a
                derivative, and a warning says so. Differentiating the vectors raises.
        Returns:
            `Eigenpairs`, which unpack as (values, vectors), values ascending; ``residuals`` are
            |A v - value v|, and ``plot(ax)`` draws values and residuals.
        Raises:
            ArgumentTypeError: if basis_device is not a device.
            ConvergenceError: without convergence; the message names the eigenvalues found.
        References:
            Wu and Simon, Thick-Restart Lanczos Method for Large Symmetric Eigenvalue Problems, 2000.
        Example:
            >>> x = torch.arange(3.0)
            >>> A = hog.HessianOperator(lambda p, x: (p * p * x).sum(), torch.ones(3), x)
            >>> values, vectors = A.eigsh(2)
            >>> values
            tensor([2., 4.])
        """
        wanted = k, which, tol, max_iter, block
        if self._differentiates("eigsh", create_graph):
            with self._algorithm("eigsh"), grad_enabled():
                return adjoints.eigsh(self, *wanted, generator, basis_device)
        with self._algorithm("eigsh", options=wanted):
            return eigenvalues.eigsh(self, *wanted, generator, basis_device)

    def spectral_density(
        self,
        num_samples: int = 10,
        *,
        steps: int = 80,
        width: float | None = None,
        generator: Generator | None = None,
    ) -> estimates.SpectralDensity:
        r"""The density of the eigenvalues, by stochastic Lanczos quadrature.

            density(t) = 1/P sum over eigenvalues of N(t; eigenvalue, width^2)
                       = E[v^T N(t; A, width^2) v]        v of signs, of length one
                       ~ mean over samples of sum over i of weights_i N(t; nodes_i, width^2)

        Each sample takes `steps` Lanczos steps, T = V^T A V, with full reorthogonalisation: nodes are
        the eigenvalues of T, weights the squared first entries of its eigenvectors. The samples'
        vectors are multiplied as one block. The points t cover the nodes and five widths on both sides,
        a quarter of a width apart (at most 10^5 points). Memory holds samples x steps vectors, but no
        more than 1 GiB at once, or the steps of one sample.

        Args:
            num_samples: The number of random vectors.
            steps: Lanczos steps of each sample, one product a step.
            width: Standard deviation of the Gaussian. Default: 1% of the range of the nodes.
            generator: Draws the signs; None is torch's global generator.
        Returns:
            `SpectralDensity`: ``average(f)`` is the mean of a function over the eigenvalues, and
            ``plot(ax)`` draws the density with one standard error.
        References:
            Golub and Meurant, Matrices, Moments and Quadrature, 2010. Ubaru, Chen and Saad, Fast
            Estimation of tr(f(A)) via Stochastic Lanczos Quadrature, 2017. Ghorbani, Krishnan and
            Xiao, An Investigation into Neural Net Optimization via Hessian Eigenvalue Density,
            2019.
        Example:
            >>> one = torch.ones(2)
            >>> A = hog.HessianOperator(lambda p, x: (p * x).square().sum(), one, one)
            >>> A.spectral_density(3, width=0.1).average(lambda t: t**2).value
            tensor(4., dtype=torch.float64)
        """
        products = num_samples * min(steps, self.shape[0])
        with self._algorithm("spectral_density", products, (num_samples, steps)):
            return estimates.spectral_density(self, num_samples, steps, width, generator)

    @overload
    def trace(
        self,
        num_samples: int = 64,
        *,
        return_error: Literal[False] = False,
        **options: Unpack[TraceOptions],
    ) -> Tensor: ...
    @overload
    def trace(
        self, num_samples: int = 64, *, return_error: Literal[True], **options: Unpack[TraceOptions]
    ) -> estimates.Estimate: ...
    def trace(
        self,
        num_samples: int = 64,
        *,
        method: Literal["auto", "hutchinson", "xtrace"] = "auto",
        generator: Generator | None = None,
        return_error: bool = False,
        create_graph: bool = False,
    ) -> Any:
        r"""The trace, estimated by products with random vectors.

            hutchinson    tr A = E[v^T A v], v of signs;  Var = 2 sum over i != j of A_ij^2
            xtrace        tr A = tr(Q_i^T A Q_i) + E[w_i^T (I - Q_i Q_i^T) A (I - Q_i Q_i^T) w_i]

        w_i are normal vectors, and Q_i is an orthonormal basis of the products A w_j for all j != i;
        "xtrace" returns the mean over i.

        - "xtrace" has a far smaller error if the eigenvalues decay fast or a few are large, as in
          trained networks; if all are alike, the error of "hutchinson" with half the products. It is
          exact for a rank below num_samples / 2, and from num_samples = P on, where the matrix is made
          dense. It holds 2 num_samples vectors in memory.
        - "hutchinson" is exact for diagonal matrices.

        Args:
            num_samples: Products. "xtrace" takes at least 4, half with the w_i, half with Q.
            method: "hutchinson" or "xtrace". "auto" is "xtrace" for 4 products or more, if their
                vectors take at most 1 GiB and the parameters are no DTensors; else "hutchinson".
            generator: Draws the vectors; None is torch's global generator.
            return_error: Also return the standard error. The trace is more than two standard errors
                away in 5 to 12 of 100 cases, with 4 products in up to 20. The error is estimated from
                |A v|^2, which takes fewer samples than the spread of v^T A v.
            create_graph: Whether the trace can be differentiated once, by all tensors requiring grad
                that A depends on: params, factors, damping, and the leaf tensors that the loss uses.
                "auto" is then "hutchinson", and its derivative uses the vectors v of the trace; from
                num_samples = P on "auto" takes the unit vectors, and is exact. Backward takes one more
                pass over the data, and holds the graph of one batch at a time.
        Returns:
            The trace, a scalar tensor; with ``return_error`` an `Estimate`.
        Raises:
            ArgumentValueError: for create_graph, if A depends on no tensor that requires grad.
            NoSecondDerivative: in a second derivative of the trace.
            UnsupportedError: for create_graph with an operator without a derivative (Fisher,
                Jacobians, results of `low_rank`, sums with KFAC), with ``compile``, ``processes``,
                DTensors, or method="xtrace".
        References:
            Hutchinson, A Stochastic Estimator of the Trace of the Influence Matrix, 1990. Epperly,
            Tropp and Webber, XTrace: Making the Most of Every Sample in Stochastic Trace
            Estimation, 2024; for symmetric matrices here.
        Example:
            >>> A = hog.HessianOperator(lambda p, x: (p @ x).square(), torch.ones(9), torch.ones(9))
            >>> A.trace(4, method="xtrace")  # a matrix of rank one, 2 x x^T
            tensor(18.0000)
        """
        estimate = estimates.TRACES[validation.choice("method", method, estimates.TRACES)]
        if self._differentiates("trace", create_graph, looks=False):
            with grad_enabled():
                found = self._diagonal_with_graph("trace", num_samples, method, generator)
                error = (2 * found.error.square().sum()).sqrt()
                return estimates.Estimate(found.value.sum(), error).returned(return_error)
        with self._algorithm("trace", num_samples, (num_samples, method)):
            return estimate(self, num_samples, generator).returned(return_error)

    def _diagonal_with_graph(
        self, caller: str, num_samples: int, method: str, generator: Generator | None
    ) -> estimates.Estimate:
        """The diagonal with a graph, by vectors of signs, or by unit vectors if num_samples >= P."""
        exact = (
            method == "auto" and validation.at_least("num_samples", num_samples, 1) >= self.shape[0]
        )
        if method not in ("auto", "hutchinson"):
            raise errors.UnsupportedError(
                f"{caller}(create_graph=True): expected method='hutchinson', got {method!r}, whose "
                "vectors depend on A."
            )
        with self._algorithm(caller, self.shape[0] if exact else num_samples):
            if exact:
                rows = torch.eye(self.shape[0], dtype=self.dtype, device=self.device)
            else:
                rows = vector_space.random_signs(self.space, num_samples, generator)
            return adjoints.diagonal(self, caller, rows, exact)

    @overload
    def diagonal(
        self,
        num_samples: int = 64,
        *,
        return_error: Literal[False] = False,
        **options: Unpack[DiagonalOptions],
    ) -> Tensor: ...
    @overload
    def diagonal(
        self,
        num_samples: int = 64,
        *,
        return_error: Literal[True],
        **options: Unpack[DiagonalOptions],
    ) -> estimates.Estimate: ...
    def diagonal(
        self,
        num_samples: int = 64,
        *,
        method: Literal["hutchinson", "xdiag"] = "hutchinson",
        generator: Generator | None = None,
        return_error: bool = False,
        create_graph: bool = False,
    ) -> Any:
        r"""The diagonal, estimated by products with random vectors.

            hutchinson    diag A = E[v * A v], v of signs;  Var_i = sum over j != i of A_ij^2
            xdiag         diag A = diag(Q_i Q_i^T A) + E[w_i * (A - Q_i Q_i^T A) w_i]

        w_i are vectors of signs, and Q_i is an orthonormal basis of the products A w_j for all j != i;
        "xdiag" returns the mean over i.

        Args:
            num_samples: Products. "xdiag" takes at least 4, half with the w_i, half with Q.
            method: "hutchinson" or "xdiag".
            generator: Draws the vectors; None is torch's global generator.
            return_error: Also return the standard errors. For "xdiag" they are a guide only: the
                estimates of one run depend on each other.
            create_graph: Whether the diagonal can be differentiated once, as in `trace`; only for
                "hutchinson".
        Returns:
            The diagonal [P]; with ``return_error`` an `Estimate` of two such tensors.
        References:
            Bekas, Kokiopoulou and Saad, An Estimator for the Diagonal of a Matrix, 2007. Epperly,
            Tropp and Webber, XTrace: Making the Most of Every Sample in Stochastic Trace
            Estimation, 2024, section 2.4; for symmetric matrices here.
        Example:
            >>> one = torch.ones(2)
            >>> A = hog.HessianOperator(lambda p, x: (p * x).square().sum(), one, one)
            >>> A.diagonal(4)
            tensor([2., 2.])
        """
        estimate = estimates.DIAGONALS[validation.choice("method", method, estimates.DIAGONALS)]
        if self._differentiates("diagonal", create_graph, looks=False):
            with grad_enabled():
                found = self._diagonal_with_graph("diagonal", num_samples, method, generator)
                return found.returned(return_error)
        with self._algorithm("diagonal", num_samples, (num_samples, method)):
            return estimate(self, num_samples, generator).returned(return_error)

    def squared_frobenius(
        self,
        num_samples: int = 64,
        *,
        generator: Generator | None = None,
        return_error: bool = False,
    ) -> Any:
        r"""The squared Frobenius norm, from random vectors v of independent signs.

            |A|_F^2 = sum of A_ij^2 = E[|A v|^2]

        Args:
            num_samples: The number of random vectors, one product each.
            generator: Draws the vectors; None is torch's global generator.
            return_error: Also return the standard error.
        Returns:
            The mean over the vectors, a scalar tensor; with ``return_error`` an `Estimate`.
        Example:
            >>> one = torch.ones(2)
            >>> A = hog.HessianOperator(lambda p, x: (p * x).square().sum(), one, one)
            >>> A.squared_frobenius(4)
            tensor(8.)
        """
        with self._algorithm("squared_frobenius", num_samples, (num_samples,)):
            samples = estimates.samples_of(self, num_samples, generator)
            squares = torch.cat([self.space.dots((Av, Av))[0] for _, Av in samples])
            return estimates.mean_of(squares).returned(return_error)

    def logdet(
        self,
        num_samples: int = 10,
        *,
        steps: int = 80,
        generator: Generator | None = None,
        return_error: bool = False,
        create_graph: bool = False,
    ) -> Any:
        r"""The logarithm of the determinant of a positive definite A, by random vectors.

            log det A = tr log A = P E[v^T log(A) v]

        with v random unit vectors, and log(A) v by Lanczos' method. Damping, ``G.damped(1e-3)``, makes
        a semi-definite matrix positive definite.

        Args:
            num_samples: The number of random vectors.
            steps: Lanczos steps for each vector, one product a step.
            generator: Draws the vectors; None is torch's global generator.
            return_error: Also return the standard error.
            create_graph: Whether the logarithm can be differentiated once, as in `trace`. The
                derivative is P v^T dlog(A) v for the vectors v of the result; its mean is tr(A^-1 dA).
                It comes from the Lanczos vectors of the result, v^T dlog(A) v = <dA, L> with L in their
                span. Its error, beside differences of the result, is the quadrature error of `steps`
                steps, and 0 from steps = P on. Memory holds samples x steps vectors; backward
                multiplies fewer, the eigenvectors of L.
        Returns:
            The logarithm, a scalar tensor; with ``return_error`` an `Estimate`.
        Raises:
            NotPositiveDefiniteError: for an eigenvalue of at most 0.
            UnsupportedError: for create_graph, as in `trace`.
        References:
            Ubaru, Chen and Saad, Fast Estimation of tr(f(A)) via Stochastic Lanczos Quadrature, 2017.
            Kandolf, Koskela, Relton and Schweitzer, Computing Low-Rank Approximations of the Frechet
            Derivative of a Matrix Function Using Krylov Subspace Methods, 2021 (L). Gardner, Pleiss,
            Bindel, Weinberger and Wilson, GPyTorch, 2018, and Kramer, Moreno-Munoz, Roy and Hauberg,
            Gradients of Functions of Large Matrices, 2024, differentiate other estimates.
        Example:
            >>> one = torch.ones(2)
            >>> A = hog.HessianOperator(lambda p, x: (p * x).square().sum(), one, one)
            >>> A.logdet()  # of 2 I
            tensor(1.3863)
        """
        P = self.shape[0]
        differentiates = self._differentiates("logdet", create_graph)
        kept: list[tuple[Tensor, Tensor]] | None = [] if differentiates else None
        products, options = num_samples * min(steps, P), (num_samples, steps)
        # Autograd saves the Lanczos vectors, which must not be inference tensors.
        with self._algorithm("logdet", products, options), outside_inference_mode():
            found = estimates.spectral_density(self, num_samples, steps, None, generator, kept)
        # nodes without weight are not eigenvalues
        present = found.weights > torch.finfo(found.weights.dtype).eps
        lowest = float(found.nodes[present].min())
        if lowest <= 0:
            raise errors.NotPositiveDefiniteError(
                "logdet: expected a positive definite matrix, got one with the eigenvalue "
                f"{lowest:.3g}; add damping, `A.damped(...)`."
            )
        tiny = torch.finfo(found.nodes.dtype).tiny
        average = found.average(lambda x: x.clamp(min=tiny).log())
        total = estimates.Estimate(*((P * x).to(self.device, self.dtype) for x in average))
        if kept is not None:
            total = total._replace(value=adjoints.log_determinant(self, total.value, kept))
        return total.returned(return_error)

    def matrix_function(
        self, b: Tree, function: Callable[[Tensor], Tensor], *, steps: int = 50
    ) -> Tree:
        r"""The product of a function of A with a vector, by Lanczos' method.

            f(A) b = |b| V f(T) e_1        T = V^T A V, the columns of V orthonormal, V e_1 = b / |b|

        It is exact for polynomials of a degree below steps, and from steps = P on; smooth functions
        converge fast. It holds steps vectors for each vector of b.

        Args:
            b: A vector or a block, flat or in the structure of the operator's params.
            function: f, of a tensor of eigenvalues in float64, element by element: ``torch.exp``,
                ``lambda x: x.clamp(min=0).sqrt()``.
            steps: Products for each vector.
        Returns:
            f(A) b in the form of b.
        Raises:
            ArgumentValueError: unless the function returns one number for each eigenvalue.
            NonFiniteError: for NaN or infinity in the function's values or in b.
        References:
            Higham, Functions of Matrices, 2008, section 13.2.
        Example:
            >>> one = torch.ones(2)
            >>> A = hog.HessianOperator(lambda p, x: (p * x).square().sum(), one, one)
            >>> A.matrix_function(torch.ones(2), torch.log2).round()  # A is 2 I
            tensor([1., 1.])
        """
        with self._algorithm("matrix_function", options=(steps,)):
            validation.function("function", function)
            rows, rebuild = self.space.rows(b, "b")
            validation.finite("b", rows, "f(A) b does not exist there.")
            count = min(validation.at_least("steps", steps, 1), self.shape[0])
            size = self.space.norms(rows)[:, None]
            start = rows / torch.where(size > 0, size, torch.ones_like(size))
            T, V = estimates.tridiagonal(self.apply, start, count, self.space)
            theta, S = symmetric_eigen(T)
            # b has components along these eigenvectors only
            present = S[:, 0].square() > torch.finfo(T.dtype).eps ** 2
            here = present & (size > 0).to(present.device)
            values = validation.of_eigenvalues(function, theta, here)
            weights = torch.einsum("sij,sj,sj->si", S, values, S[:, 0]).to(V)
            found = size * torch.einsum("snp,sn->sp", V, weights)
            return rebuild(torch.where(size > 0, found, 0))

    def low_rank(
        self, rank: int, *, oversampling: int = 10, generator: Generator | None = None
    ) -> "LowRankOperator":
        r"""The largest eigenvalues and their eigenvectors, by products with random vectors.

            A S (S^T A S)^-1 (A S)^T                A positive semi-definite (Nystrom's method)

        S is random, with rank + oversampling orthonormal columns and one product for each. All products
        are computed at once; `eigsh` multiplies in sequence until its eigenvalues converge. Before the
        smallest eigenvalues are cut off, the error in the trace norm is on average at most 1 + rank /
        (oversampling - 1) times the sum of the dropped eigenvalues. To estimate the squared Frobenius
        error |A - L|^2 of a result L, take ``(A - L).squared_frobenius(16)``.

        Args:
            rank: How many of the largest eigenvalues to keep.
            oversampling: Further columns of S.
            generator: Draws S; None is torch's global generator.
        Returns:
            `LowRankOperator`, with ``values`` and ``vectors``, ``inverse`` and ``preconditioner``.
        Raises:
            NotPositiveDefiniteError: for a matrix with negative eigenvalues.
            ArgumentValueError: for a rank larger than P.
        References:
            Tropp, Yurtsever, Udell and Cevher, Fixed-Rank Approximation of a Positive-Semidefinite
            Matrix from Streaming Data, 2017, algorithm 3.
        Example:
            >>> A = hog.HessianOperator(lambda p, x: (p @ x).square(), torch.ones(9), torch.ones(9))
            >>> L = A.low_rank(1)  # 2 x x^T is of rank one
            >>> L.values.round(decimals=3)
            tensor([18.])
        """
        with self._algorithm("low_rank"), torch.inference_mode(False), torch.no_grad():
            self.space.refuse_sharded("low_rank")
            P = self.shape[0]
            validation.generator(generator)
            if validation.at_least("rank", rank, 1) > P:
                raise errors.ArgumentValueError(
                    f"rank: expected at most {P}, the size of A, got {rank}."
                )
            columns = min(rank + validation.at_least("oversampling", oversampling, 0), P)
            device = self.device if generator is None else generator.device
            wide = torch.promote_types(self.dtype, torch.float32)
            drawn = torch.randn(P, columns, generator=generator, device=device, dtype=wide)
            S = torch.linalg.qr(drawn.to(self.device))[0]
            Y = self.apply(S.T.to(self.dtype)).to(wide).T
            # eps of the parameters' dtype, which rounds the products: with eps of float32, a
            # semi-definite matrix in bfloat16 was refused.
            U, values = _nystrom(S, Y, torch.finfo(self.space.precision).eps)
            return LowRankOperator(self.space, U[:, :rank].T.contiguous(), values[:rank])


def product_of(chain: Chain) -> RectangularOperator:
    """The product of operators; a `LinearOperator` if the chain of factors equals its transpose."""
    (A, transposed), *others = chain
    if not (others or transposed):
        return A
    for B, C in pairwise(Product([one]) for one in chain):
        if not B.space.same(C.target):
            raise errors.ArgumentValueError(
                "A @ B: expected A to act on what B gives, vectors of the same names, shapes and "
                f"dtypes, got {B.shape} and {C.shape}."
            )
    return (SymmetricProduct if chain == _transpose_chain(chain) else Product)(chain)


def _chain_of(A: RectangularOperator) -> Chain:
    """The factors of a product; of any other operator the operator itself."""
    return A.chain if isinstance(A, Product) else [(A, False)]


def _transpose_chain(chain: Chain) -> Chain:
    """The factors of the transpose: in reverse order, each transposed unless symmetric."""
    return [(A, not t and not isinstance(A, LinearOperator)) for A, t in reversed(chain)]


class Product(RectangularOperator):
    """A product of the operators in `chain`, each perhaps transposed."""

    def __init__(self, chain: Chain) -> None:
        last, transposed = chain[-1]
        super().__init__(last.target if transposed else last.space)
        self.chain, self._bar = chain, last._bar

    @property
    def target(self) -> Space:
        """The row space of the first factor."""
        first, transposed = self.chain[0]
        return first.space if transposed else first.target

    def _products(self, rows: Tensor) -> Tensor:
        for A, transposed in reversed(self.chain):
            rows = A._transposed_products(rows) if transposed else A.apply(rows)
        return rows

    def _transposed_products(self, rows: Tensor) -> Tensor:
        return Product(_transpose_chain(self.chain))._products(rows)

    def sources(self) -> list[Tensor]:
        return _sources_of(A for A, _ in self.chain)

    def operands(self) -> list[Tensor]:
        return [x for A, _ in self.chain for x in A.operands()]

    def differentiate_form(self, left: Tensor, right: Tensor) -> Gradients:
        # u^T d(A B) v = u^T dA (B v) + (A^T u)^T dB v
        lefts = [left]
        for A, transposed in self.chain[:-1]:
            lefts.append(Product([(A, not transposed)]).apply(lefts[-1]))
        parts = []
        for (A, transposed), u in zip(reversed(self.chain), reversed(lefts), strict=True):
            parts.append(A.differentiate_form(*((right, u) if transposed else (u, right))))
            right = Product([(A, transposed)]).apply(right)
        return merged(*parts)


@final
class SymmetricProduct(LinearOperator, Product):
    """A product with a palindromic chain, symmetric by construction."""


@final
class GivenOperator(LinearOperator):
    """A matrix given by a function (rows, graph=False) -> products. check: the first use checks for
    symmetry."""

    def __init__(self, space: Space, given: Callable[..., Tensor], check: bool) -> None:
        super().__init__(space)
        self._given, self._unchecked = given, check

    def _products(self, rows: Tensor) -> Tensor:
        if self._unchecked:
            self._check()
            self._unchecked = False
        found = self._given(rows)
        if found.shape != rows.shape:
            raise errors.ArgumentValueError(
                f"matvec(v): expected a product for each of {len(rows)} vectors, got {len(found)}."
            )
        self._refuse_not_finite(rows, found, self.space, "the vector is")
        return found

    def sources(self) -> list[Tensor]:
        probe = torch.ones(1, self.shape[1], dtype=self.dtype, device=self.device)
        return [*self.differentiate_form(probe, probe)]

    def differentiate_form(self, left: Tensor, right: Tensor) -> Gradients:
        with grad_enabled():
            return gradients_of((left * self._given(right, graph=True)).sum())

    def _check(self) -> None:
        """Raise unless v^T A w = w^T A v for random v and w."""
        rows = random_normals(self.space, 2, Generator().manual_seed(0), self.dtype)
        # A v by matvec, A w by matmat: checks both functions
        products = self._given(rows[:1])[0], self._given(rows)[-1]
        # float64: squares may overflow
        (v, w), (Av, Aw) = rows.double(), (x.double() for x in products)
        gap, size = self.space.asymmetry(v, Av, w, Aw)
        if self.space.exceeds(gap, size, self.space.precision):
            raise errors.ArgumentValueError(
                "matvec: expected the products of a symmetric matrix, and matmat those of each column, "
                f"got v.Aw and w.Av that differ by {gap / size:.1g} of their size for random v and w. "
                "Where that is right, pass check_symmetric=False."
            )


@final
class Submatrix(LinearOperator):
    """The rows and columns of an operator for the parameters `names`."""

    def __init__(self, operator: LinearOperator, names: list[str]) -> None:
        params = operator.params
        super().__init__(Space({name: params[name] for name in names}, operator.dtype))
        places = dict(zip(params, operator.space.places(), strict=True))
        self._operator = operator
        # indices of the parameters in the operator's flat vectors
        self._at = torch.cat([places[name] for name in names]).to(self.device)
        self._bar = operator._bar

    def _whole(self, rows: Tensor) -> Tensor:
        """Vectors of the whole operator, zero elsewhere."""
        return rows.new_zeros(len(rows), self._operator.shape[0]).index_copy_(1, self._at, rows)

    def _products(self, rows: Tensor) -> Tensor:
        return self._operator.apply(self._whole(rows))[:, self._at]

    def sources(self) -> list[Tensor]:
        return self._operator.sources()

    def operands(self) -> list[Tensor]:
        return self._operator.operands()

    def differentiate_form(self, left: Tensor, right: Tensor) -> Gradients:
        return self._operator.differentiate_form(self._whole(left), self._whole(right))


class ScaledSum(RectangularOperator):
    """A sum of multiples of operators, and of the identity: sum of c_i A_i + damping I."""

    def __init__(self, terms: Terms, damping: Factor = 0.0) -> None:
        super().__init__(terms[0][1].space)
        self._terms: Terms = []  # (c_i, A_i)
        self._damping = damping
        # Nested sums with float factors are flattened. A tensor factor is kept: products read it.
        for factor, term in terms:
            if isinstance(term, ScaledSum) and not (
                _tensors(damping, factor) or _tensors(*term._factors())
            ):
                self._terms += [(factor * c, inner) for c, inner in term._terms]
                self._damping += factor * term._damping
            else:
                self._terms.append((factor, term))
        self._bar = terms[0][1]._bar

    def _factors(self) -> list[Factor]:
        return [*(c for c, _ in self._terms), self._damping]

    @property
    def target(self) -> Space:
        """The row space of the first term."""
        return self._terms[0][1].target

    def _products(self, rows: Tensor) -> Tensor:
        return self._sum(rows, lambda term: term.apply(rows))

    def _transposed_products(self, rows: Tensor) -> Tensor:
        return self._sum(rows, lambda term: term._transposed_products(rows))

    def _sum(self, rows: Tensor, product: Callable[[Any], Tensor]) -> Tensor:
        (factor, first), *others = self._terms
        total = float(factor) * product(first)
        for factor, term in others:
            total.add_(product(term), alpha=float(factor))
        damping = float(self._damping)
        return total.add_(rows, alpha=damping) if damping else total

    def sources(self) -> list[Tensor]:
        own = _tensors(*self._factors())
        return [*dict.fromkeys(own + _sources_of(A for _, A in self._terms))]

    def operands(self) -> list[Tensor]:
        return [x for _, A in self._terms for x in A.operands()]

    def differentiate_form(self, left: Tensor, right: Tensor) -> Gradients:
        parts = []
        for c, A in self._terms:
            parts.append(A.differentiate_form(float(c) * left, right))
            if isinstance(c, Tensor):
                parts.append({c: (left * A.apply(right)).sum().to(c)})
        if isinstance(self._damping, Tensor):
            parts.append({self._damping: (left * right).sum().to(self._damping)})
        return merged(*parts)


@final
class SymmetricSum(LinearOperator, ScaledSum):
    """A sum of multiples of symmetric operators, and of the identity."""


def sum_of(*terms: tuple[Factor, RectangularOperator]) -> ScaledSum:
    """A sum of multiples of operators; a `LinearOperator` if all operators are symmetric."""
    symmetric = all(isinstance(term, LinearOperator) for _, term in terms)
    return (SymmetricSum if symmetric else ScaledSum)(list(terms))


@final
class BlockDiagonal(LinearOperator):
    """The diagonal blocks of an operator, by one product for each block. masks: 1 in a block, [P]
    each."""

    def __init__(self, operator: LinearOperator, masks: list[Tensor]) -> None:
        super().__init__(operator.space)
        self._operator, self._masks = operator, masks
        self._bar = operator._bar

    def _products(self, rows: Tensor) -> Tensor:
        # One product for all masks: one pass over the data.
        parts = self._operator.apply(torch.cat([rows * mask for mask in self._masks]))
        total = torch.zeros_like(rows)
        for mask, part in zip(self._masks, parts.split(len(rows)), strict=True):
            total += part * mask
        return total

    def sources(self) -> list[Tensor]:
        return self._operator.sources()

    def operands(self) -> list[Tensor]:
        return self._operator.operands()

    def differentiate_form(self, left: Tensor, right: Tensor) -> Gradients:
        lefts, rights = (torch.cat([rows * m for m in self._masks]) for rows in (left, right))
        return self._operator.differentiate_form(lefts, rights)


@final
class LowRankOperator(LinearOperator):
    r"""A matrix given by some eigenvectors, and a multiple of the identity on the rest of the space.

        A = U diag(values) U^T + rest (I - U U^T)        the columns of U orthonormal

    Args:
        space: The vector space that A acts on.
        rows: The columns of U as rows [k, P].
        values: The eigenvalues [k], descending by magnitude.
        rest: The eigenvalue of all other directions.
    Example:
        >>> A = hog.HessianOperator(lambda p, x: (p @ x).square(), torch.ones(9), torch.ones(9))
        >>> L = A.low_rank(1, generator=torch.Generator().manual_seed(0))
        >>> (L.inverse(2.0) @ torch.ones(9)).round(decimals=3)  # (2 x x^T + 2 I)^-1 x
        tensor([0.0500, 0.0500, 0.0500, 0.0500, 0.0500, 0.0500, 0.0500, 0.0500, 0.0500])
    """

    def __init__(self, space: Space, rows: Tensor, values: Tensor, rest: float = 0.0) -> None:
        super().__init__(space)
        self._rows, self.values, self.rest = rows, values, rest

    @property
    def vectors(self) -> Tensor:
        """The eigenvectors U [P, k]."""
        return self._rows.T

    def _products(self, rows: Tensor) -> Tensor:
        wide = rows.to(self._rows.dtype)
        parts = wide @ self._rows.T
        # A v = U (values - rest) U^T v + rest v
        product = (parts * (self.values - self.rest)) @ self._rows
        return (product + self.rest * wide).to(rows.dtype)

    def inverse(self, damping: float = 0.0) -> "LowRankOperator":
        r"""The inverse of the damped matrix, (A + damping I)^-1, in closed form.

        Args:
            damping: Added to the diagonal.
        Returns:
            The inverse, an operator.
        Raises:
            NotPositiveDefiniteError: for an eigenvalue of the damped matrix of at most 0.
        """
        number = validation.number("damping", damping, minimum=0)
        check_invertible(min(float(self.values.min()), self.rest) + number, number)
        values, rest = 1 / (self.values + number), 1 / (self.rest + number)
        return LowRankOperator(self.space, self._rows, values, rest)

    def preconditioner(self, damping: float) -> "LowRankOperator":
        r"""An approximation of (A + damping I)^-1 for conjugate gradients.

            U diag(1 / (values + damping)) U^T + (I - U U^T) / (min(values) + damping)

        The unknown eigenvalues of A are hardly larger than the smallest known one.

        Args:
            damping: The damping of the system to solve; positive.
        Returns:
            The approximation, to be passed to ``solve`` or `NewtonCG` as ``preconditioner=``.
        References:
            Frangella, Tropp and Udell, Randomized Nystrom Preconditioning, 2023, equation 1.3.
        """
        validation.positive("damping", damping)
        # min(values) stands for the unknown eigenvalues on the rest of the space: an upper bound.
        smallest = float(self.values.min())
        return LowRankOperator(self.space, self._rows, self.values, smallest).inverse(damping)


def _nystrom(S: Tensor, Y: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Eigenvectors and eigenvalues, descending, of Y (S^T Y)^-1 Y^T. The products Y = A S are rounded
    to eps."""
    size = float(torch.linalg.matrix_norm(Y, 2))
    # The shift keeps the small matrix positive definite in spite of rounding errors below.
    shift = torch.finfo(Y.dtype).eps * Y.shape[0] ** 0.5 * size
    noise = eps * size  # rounding of the products
    Y = Y + shift * S
    values, vectors = symmetric_eigen((S.T @ Y).double())
    lowest = float(values[0])
    if lowest < -10 * max(noise, shift):
        raise errors.NotPositiveDefiniteError(
            "low_rank: expected a positive semi-definite matrix, as a GGNOperator is, got a direction "
            f"of curvature {lowest:.3g}; `eigsh` finds eigenvalues of either sign."
        )
    # Drop directions of rounding. Shifting them instead took a third off large eigenvalues in bfloat16.
    roots = torch.where(values > noise, values.clamp(min=0).rsqrt(), 0)
    B = Y @ (vectors * roots).to(Y)
    U, sizes, _ = torch.linalg.svd(B, full_matrices=False)
    return U, (sizes.square() - shift).clamp(min=0)


def check_invertible(lowest: float, damping: float, rounding: float = 0.0) -> None:
    """Raise if the smallest eigenvalue of a damped matrix is not positive."""
    if lowest <= rounding:
        raise errors.NotPositiveDefiniteError(
            "inverse: expected a positive definite matrix, got one whose smallest eigenvalue is "
            f"{lowest:.3g} with the damping {damping:g}; use damping > 0."
        )


def _sources_of(operators: Iterable[RectangularOperator]) -> list[Tensor]:
    return [*dict.fromkeys(x for A in operators for x in A.sources())]


def _tensors(*factors: Factor) -> list[Tensor]:
    return [c for c in factors if isinstance(c, Tensor)]


def as_factor(value: object, what: str = "factor") -> Factor:
    """A number, or a scalar tensor, as a float; a tensor that requires grad unchanged."""
    number = as_number(value, what)
    return value if isinstance(value, Tensor) and value.requires_grad else number


def as_number(value: object, what: str = "factor") -> float:
    """A number, or a scalar tensor, as a float."""
    if isinstance(value, RectangularOperator) or (isinstance(value, Tensor) and value.dim()):
        text = f"{what}: expected a number, got {validation.describe(value)}; a product is A @ v."
        raise errors.ArgumentTypeError(text)
    if isinstance(value, Tensor) and value.dim() == 0:
        value = value.item()
    return float(validation.number(what, value))
