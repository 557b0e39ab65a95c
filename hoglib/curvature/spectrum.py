"""Eigenvalues of operators, by SciPy."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hoglib import _arguments as arguments

if TYPE_CHECKING:
    from hoglib.curvature._linear import LinearOperator

TOL = {torch.float64: 1e-10, torch.float32: 1e-5}


@dataclass(frozen=True)
class Eigenpairs:
    """Eigenvalues, in ascending order, and eigenvectors; unpacks as (values, vectors)."""

    values: Tensor  # [k]
    vectors: Tensor  # [P, k], of length one
    residuals: Tensor  # [k], |A v - value v|, computed from the vectors themselves
    products: int  # products of A with one vector, without those for the residuals

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.values, self.vectors))


def eigsh(
    operator: "LinearOperator",
    k: int = 6,
    *,
    which: str = "LM",
    tol: float | None = None,
    max_iter: int | None = None,
    generator: torch.Generator | None = None,
) -> Eigenpairs:
    r"""k eigenvalues and eigenvectors of an operator, A v = value v, by implicitly restarted Lanczos.

    which: "LM" the largest in magnitude, "LA" the largest, "SA" the smallest, "BE" both ends, "SM" the
    smallest in magnitude, which takes many products. tol: of the eigenvalues, relative; 1e-10 in
    float64, 1e-5 in float32 by default. max_iter: restarts. generator: of the starting vector; None is
    the same one every time. Returns `Eigenpairs`: values ascending, vectors, their true residuals.
    For k of P - 1 and more it is the dense eigenvalue problem.
    Raises RuntimeError where it did not converge, with what was found, and ImportError without SciPy.
    Source: Lehoucq, Sorensen & Yang, ARPACK Users' Guide, 1998.
    """
    size = operator.shape[0]
    if arguments.at_least("k", k, 1) > size:
        raise arguments.WrongValue(
            f"k: expected at most {size} eigenvalues, the size of A, got {k}; ask for fewer."
        )
    arguments.one_of("which", which, ["LM", "LA", "SA", "BE", "SM"])
    if k >= size - 1:
        values, vectors = _dense(operator, k, which)
        return _with_residuals(operator, values, vectors, size)
    linalg = _scipy_linalg()
    before = operator.count
    random = arguments.generator(generator) or torch.Generator().manual_seed(0)
    start = torch.randn(size, dtype=torch.float64, generator=random, device=random.device)
    try:
        found = linalg.eigsh(
            to_scipy(operator, "float64"),
            k,
            which=which,
            v0=start.cpu().numpy(),
            tol=TOL.get(operator.dtype, 1e-2) if tol is None else tol,
            maxiter=max_iter,
        )
    except linalg.ArpackNoConvergence as error:
        products = operator.count - before
        raise arguments.NotConverged(
            f"eigsh: expected {k} eigenvalues, got {len(error.eigenvalues)} after {products} products "
            f"({', '.join(f'{v:.6g}' for v in error.eigenvalues)}); raise max_iter or tol, or "
            "ask for fewer."
        ) from error
    except linalg.ArpackError as error:
        if "Starting vector is zero" not in str(error):
            raise
        # so it says of a zero matrix, whose eigenvectors may be any
        vectors = torch.eye(size, k, dtype=operator.dtype, device=operator.device)
        return _with_residuals(operator, vectors.new_zeros(k), vectors, operator.count - before)
    values, vectors = (torch.as_tensor(part).to(operator.device, operator.dtype) for part in found)
    return _with_residuals(operator, values, vectors, operator.count - before)


def to_scipy(operator: "LinearOperator", dtype: Any = None) -> Any:
    """`LinearOperator.to_scipy`."""
    linalg = _scipy_linalg()
    import numpy as np

    own = operator.dtype if operator.dtype in (torch.float32, torch.float64) else torch.float32
    of = np.dtype(str(own).removeprefix("torch.") if dtype is None else dtype)

    def matmat(V: Any) -> Any:
        rows = torch.from_numpy(np.ascontiguousarray(np.asarray(V).reshape(len(V), -1).T))
        result = operator.apply(rows.to(operator.device, operator.dtype))
        return result.T.to("cpu", own).numpy().astype(of, copy=False)

    return linalg.LinearOperator(
        operator.shape, matvec=lambda v: matmat(v).reshape(-1), matmat=matmat, dtype=of,
        rmatvec=lambda v: matmat(v).reshape(-1), rmatmat=matmat,
    )  # fmt: skip


def _dense(operator: "LinearOperator", k: int, which: str) -> tuple[Tensor, Tensor]:
    A = operator.to_dense().to(torch.float64)
    values, vectors = torch.linalg.eigh((A + A.T) / 2)
    size = len(values)
    order = (
        {
            "LM": values.abs().argsort(descending=True)[:k],
            "SM": values.abs().argsort()[:k],
            "LA": torch.arange(size - k, size),
            "SA": torch.arange(k),
            "BE": torch.cat([torch.arange(k // 2), torch.arange(size - (k - k // 2), size)]),
        }[which]
        .sort()
        .values
    )
    return values[order].to(operator.dtype), vectors[:, order].to(operator.dtype)


def _with_residuals(
    operator: "LinearOperator", values: Tensor, vectors: Tensor, products: int
) -> Eigenpairs:
    rows = vectors.T.contiguous()
    residuals = (operator.apply(rows) - values[:, None] * rows).norm(dim=1)
    return Eigenpairs(values, vectors, residuals, products)


def _scipy_linalg() -> Any:
    try:
        from scipy.sparse import linalg
    except ImportError as error:
        raise arguments.Missing(
            "eigsh, to_scipy: expected the package scipy to be installed, and it is not; `pip install "
            "scipy`."
        ) from error
    return linalg
