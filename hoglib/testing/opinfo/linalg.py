"""Linear algebra that torch has wrong; references by Laplace's expansion."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hoglib import ops
from hoglib.testing.opinfo.op_info import (
    NEEDS_DIMENSIONS,
    ONE_TENSOR,
    Normal,
    OpInfo,
    SampleInput,
    normals,
    op_info,
    sample_input,
)

_DTYPES = (torch.float64, torch.float32, torch.complex128)
_SKIPS = {**NEEDS_DIMENSIONS, "bfloat16": "torch factorises no matrices in bfloat16"}
_SINGULAR = {"stride 0": "a matrix of equal rows is singular, and the function not defined"}


def _regular(normal: Normal, *shape: int) -> Tensor:
    """Matrices of positive determinant that stay regular in every cell of the test matrix."""
    return normal(*shape) / 3 + 2 * torch.eye(shape[-1])


def _minor(A: Tensor, i: int, j: int) -> Tensor:
    rows = torch.cat([A[..., :i, :], A[..., i + 1 :, :]], -2)
    return torch.cat([rows[..., :j], rows[..., j + 1 :]], -1)


def _laplace(A: Tensor) -> Tensor:
    if A.shape[-1] == 1:
        return A[..., 0, 0]
    terms = [(-1) ** j * A[..., 0, j] * _laplace(_minor(A, 0, j)) for j in range(A.shape[-1])]
    return torch.stack(terms).sum(0)


def _inverse(A: Tensor) -> Tensor:
    n = range(A.shape[-1])
    rows = [torch.stack([(-1) ** (i + j) * _laplace(_minor(A, i, j)) for i in n], -1) for j in n]
    return torch.stack(rows, -2) / _laplace(A)[..., None, None]


def _cramer(A: Tensor, B: Tensor, *, left: bool = True) -> Tensor:
    if B.shape == A.shape[:-1]:
        return (_inverse(A) @ B[..., None])[..., 0]
    return _inverse(A) @ B if left else B @ _inverse(A)


def _slogdet(A: Tensor) -> tuple[Tensor, Tensor]:
    d = _laplace(A)
    return d.sgn(), d.abs().log()


def _logdet(A: Tensor) -> Tensor:
    d = _laplace(A)
    return d.log() if A.is_complex() else torch.where(d < 0, torch.nan, d.abs().log())


def _of_triangle(L: Tensor, upper: bool = False) -> Tensor:
    T = L.triu() if upper else L.tril()
    return _inverse(T.mH @ T if upper else T @ T.mH)


def _tensorsolve(A: Tensor, B: Tensor, dims: Any = None) -> Tensor:
    if dims is not None:
        A = A.movedim(dims, tuple(range(-len(dims), 0)))
    n = B.numel()
    return (_inverse(A.reshape(n, n)) @ B.reshape(n)).reshape(A.shape[B.dim() :])


def solve_ex(A: Tensor, B: Tensor, **options: Any) -> Tensor:
    """The solution; the other result is of integers."""
    solution: Tensor = ops.solve_ex(A, B, **options)[0]
    return solution


def slogdet(A: Tensor) -> tuple[Tensor, Tensor]:
    """A plain tuple, for which torch.func.vjp takes a plain tuple of cotangents."""
    sign, logarithm = ops.slogdet(A)
    return sign, logarithm


def _of_matrices(
    name: str,
    formula: str,
    function: Callable[..., Any],
    reference: Callable[..., Any],
    samples: tuple[SampleInput, ...],
    **others: Any,
) -> OpInfo:
    return op_info(name, "wrong", formula, reference, function).on(
        *samples, zero_size=normals((0, 2, 2)), dtypes=_DTYPES, **others
    )


_REGULAR = (
    sample_input("matrix", lambda n: (_regular(n, 3, 3),)),
    sample_input("batch", lambda n: (_regular(n, 2, 2, 2),)),
    sample_input("larger", lambda n: (_regular(n, 4, 4),)),
)

_SYSTEMS: dict[str, Any] = {
    "zero_size": lambda n: (_regular(n, 0, 2, 2), n(0, 2, 1)),
    "broadcasting": lambda n: (_regular(n, 2, 1, 2, 2), n(2, 2, 1)),
    "dtypes": _DTYPES,
    "skips": {**_SKIPS, **_SINGULAR},
}

OPS = (
    op_info("solve", "wrong", "A^-1 B", _cramer).on(
        sample_input("matrix", lambda n: (_regular(n, 3, 3), n(3, 2))),
        sample_input("vectors", lambda n: (_regular(n, 2, 2, 2), n(2, 2))),
        sample_input("right", lambda n: (_regular(n, 2, 2), n(3, 2)), left=False),
        **_SYSTEMS,
    ),
    op_info("solve_ex", "wrong", "A^-1 B", _cramer, solve_ex).on(
        sample_input("matrix", lambda n: (_regular(n, 2, 2), n(2, 2))),
        sample_input("right", lambda n: (_regular(n, 2, 2), n(3, 2)), left=False),
        **_SYSTEMS,
    ),
    op_info("tensorsolve", "wrong", "X with sum_j A_ij X_j = B_i", _tensorsolve).on(
        sample_input("pair", lambda n: (_regular(n, 4, 4).reshape(4, 2, 2), n(4))),
        sample_input("moved", lambda n: (_regular(n, 3, 3).reshape(3, 1, 3), n(1, 3)), dims=(0,)),
        dtypes=_DTYPES,
        skips={
            **_SKIPS,
            **_SINGULAR,
            "zero size": "no unknowns, no derivatives",
            "broadcasting": "the shapes of A and B determine each other",
        },
    ),
    _of_matrices(
        "det",
        "det A",
        ops.det,
        _laplace,
        (*_REGULAR, sample_input("rank 2 of 4", lambda n: (n(4, 2) @ n(2, 4),))),
        skips={**ONE_TENSOR, **_SKIPS},
    ),
    _of_matrices(
        "slogdet",
        "det A / |det A|, log |det A|",
        slogdet,
        _slogdet,
        _REGULAR,
        skips={**ONE_TENSOR, **_SKIPS, **_SINGULAR},
    ),
    _of_matrices(
        "logdet",
        "log det A",
        ops.logdet,
        _logdet,
        _REGULAR,
        skips={**ONE_TENSOR, **_SKIPS, **_SINGULAR},
    ),
    _of_matrices(
        "cholesky_inverse",
        "(L L^H)^-1",
        ops.cholesky_inverse,
        _of_triangle,
        (
            *_REGULAR[:2],
            sample_input("upper", lambda n: (_regular(n, 3, 3),), upper=True),
        ),
        skips={**ONE_TENSOR, **_SKIPS},
    ),
)
