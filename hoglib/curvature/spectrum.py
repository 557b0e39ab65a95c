"""Eigenvalues of operators."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hoglib import _arguments as arguments
from hoglib.curvature._lanczos import first_look, lanczos

if TYPE_CHECKING:
    from hoglib.curvature._linear import LinearOperator

ENDS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "LM": lambda values, k: values.abs().argsort(descending=True)[:k],
    "LA": lambda values, k: torch.arange(len(values) - k, len(values)),
    "SA": lambda values, k: torch.arange(k),
    "BE": lambda values, k: torch.arange(k // 2 - k, k // 2) % len(values),
    "SM": lambda values, k: values.abs().argsort()[:k],
}
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
    block: int = 1,
    generator: torch.Generator | None = None,
) -> Eigenpairs:
    r"""k eigenvalues and eigenvectors of an operator, A v = value v, by thick-restart Lanczos.

    which: "LM" the largest in magnitude, "LA" the largest, "SA" the smallest, "BE" both ends, "SM" the
    smallest in magnitude, which takes many products. tol: |A v - value v| is tol |value| or less, as
    far as rounding allows; 1e-10 in float64, 1e-5 in float32 by default. max_iter: how often the basis
    is filled. block: vectors that are multiplied at once; eigenvalues that are repeated up to as often
    are found as often, where a single vector may miss some. generator: of the starting vectors; None
    is the same ones every time. Returns `Eigenpairs`: values ascending, vectors, their true residuals.
    Memory: a basis of 2 k + 20 vectors, on the device; more where they are short. Matrices of up to
    21 or 2 k + 2 rows are made dense.
    Raises RuntimeError where it did not converge, with what was found.
    Source: Wu & Simon, Thick-Restart Lanczos Method for Large Symmetric Eigenvalue Problems, 2000.
    """
    size = operator.shape[0]
    if arguments.at_least("k", k, 1) > size:
        raise arguments.WrongValue(
            f"k: expected at most {size} eigenvalues, the size of A, got {k}; ask for fewer."
        )
    arguments.one_of("which", which, ENDS)
    arguments.at_least("block", block, 1)
    limit = 10 * size if max_iter is None else arguments.at_least("max_iter", max_iter, 1)
    tol = TOL.get(operator.dtype, 1e-2) if tol is None else arguments.number("tol", tol, minimum=0)
    random = arguments.generator(generator) or torch.Generator().manual_seed(0)
    before = operator.count
    if size <= first_look(k, block):
        A = operator.to_dense().to(torch.float64)
        every, columns = torch.linalg.eigh((A + A.T) / 2)
        chosen = _chosen(every.cpu(), k, which).to(A.device)
        values, rows = every[chosen], columns[:, chosen].T
    else:
        exact = torch.promote_types(operator.dtype, torch.float32)  # what a basis is orthogonal in

        def draw(count: int) -> Tensor:
            v = torch.randn(
                count, size, dtype=torch.float64, generator=random, device=random.device
            )
            return v.to(operator.device, exact)

        values, rows = lanczos(
            lambda rows: operator.apply(rows.to(operator.dtype)).to(exact),
            draw, block, k, partial(_chosen, which=which), tol, limit,
        )  # fmt: skip
    values, rows = (part.to(operator.device, operator.dtype) for part in (values, rows))
    products = operator.count - before
    residuals = (operator.apply(rows) - values[:, None] * rows).norm(dim=1)
    return Eigenpairs(values, rows.T, residuals, products)


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


def _chosen(values: Tensor, k: int, which: str) -> Tensor:
    """The indices of k of ascending values."""
    return ENDS[which](values, k).sort().values


def _scipy_linalg() -> Any:
    try:
        from scipy.sparse import linalg
    except ImportError as error:
        raise arguments.Missing(
            "to_scipy: expected the package scipy to be installed, and it is not; `pip install "
            "scipy`."
        ) from error
    return linalg
