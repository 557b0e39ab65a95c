"""Norms and linear algebra that torch has wrong in forward mode or at a higher order; determinants by Laplace's expansion."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hoglib import ops
from tests.ops.opinfo.op_info import (
    NEEDS_DIMENSIONS,
    ONE_TENSOR,
    WITH_COMPLEX,
    Normal,
    OpInfo,
    SampleInput,
    normals,
    op_info,
    sample_input,
)


def _standardize(x: Tensor, dims: tuple[int, ...], eps: float) -> Tensor:
    mean = x.mean(dims, keepdim=True)
    return (x - mean) / torch.sqrt(((x - mean) ** 2).mean(dims, keepdim=True) + eps)


def _affine(y: Tensor, weight: Tensor | None, bias: Tensor | None, trailing: int = 0) -> Tensor:
    weight, bias = (None if p is None else p[(..., *[None] * trailing)] for p in (weight, bias))
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def _layer_norm(
    x: Tensor, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Tensor:
    return _affine(_standardize(x, tuple(range(-len(shape), 0)), eps), weight, bias)


def _batch_norm(
    x: Tensor, mean: Any, var: Any, weight: Any = None, bias: Any = None, training: bool = False,
    momentum: float = 0.1, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    trailing = x.dim() - 2
    y = _standardize(x, (0, *range(2, x.dim())), eps)
    return _affine(y, weight, bias, trailing)


def _instance_norm(
    x: Tensor, mean: Any = None, var: Any = None, weight: Any = None, bias: Any = None,
    use_input_stats: bool = True, momentum: float = 0.1, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    return _affine(_standardize(x, tuple(range(2, x.dim())), eps), weight, bias, x.dim() - 2)


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    others = tuple(d for d in range(v.dim()) if dim == -1 or d != dim % v.dim())
    squares = v.abs() ** 2
    return g * v / (squares.sum(others, keepdim=True) if others else squares).sqrt()


def _statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """Running statistics, which are no input to differentiate by."""
    mean = torch.linspace(-0.5, 0.5, x.shape[1], dtype=x.dtype, device=x.device)
    return mean, 1 + mean**2


def _batch_norm_evaluation(x: Tensor, weight: Any = None, bias: Any = None) -> Tensor:
    return ops.batch_norm(x, *_statistics(x), weight, bias)


def _instance_norm_evaluation(x: Tensor, weight: Any = None, bias: Any = None) -> Tensor:
    return ops.instance_norm(x, *_statistics(x), weight, bias, use_input_stats=False)


def _with_running_statistics(x: Tensor, weight: Any = None, bias: Any = None) -> Tensor:
    trailing = (1,) * (x.dim() - 2)
    mean, var = (value.reshape(-1, *trailing) for value in _statistics(x))
    return _affine((x - mean) / torch.sqrt(var + 1e-5), weight, bias, len(trailing))


_NORM_SKIPS = {
    "no dimensions": "needs dimensions to take the mean over",
    "broadcasting": "weight and bias have one element a channel or feature",
}


def _evaluation(name: str, function: Any) -> OpInfo:
    return op_info(f"{name}_evaluation", "wrong", _with_running_statistics, function).on(
        sample_input("weight and bias", normals((3, 2, 2), (2,), (2,))),
        sample_input("no weight", lambda n: (n(3, 2), None, n(2))),
        sample_input("input alone", normals((2, 2, 1, 2))),
        zero_size=normals((0, 3), (3,), (3,)),
        skips=_NORM_SKIPS,
    )


_NORMS = (
    op_info("layer_norm", "wrong", _layer_norm).on(
        sample_input("weight and bias", lambda n: (n(2, 4), (4,), n(4), n(4))),
        sample_input("two dimensions", lambda n: (n(2, 3, 2), (3, 2), n(3, 2), n(3, 2)), eps=0.1),
        sample_input("no bias", lambda n: (n(1, 2, 3), [3], n(3))),
        sample_input("no weight", lambda n: (n(2, 3), (3,), None, n(3))),
        sample_input("input alone", lambda n: (n(2, 4), (4,))),
        zero_size=lambda n: (n(0, 3), (3,), n(3), n(3)),
        skips=_NORM_SKIPS,
    ),
    op_info("batch_norm", "wrong", _batch_norm).on(
        sample_input("weight and bias", lambda n: (n(4, 2), None, None, n(2), n(2), True)),
        sample_input("images", lambda n: (n(2, 2, 2, 1), None, None, n(2), n(2), True), eps=0.1),
        sample_input("no bias", lambda n: (n(3, 2, 2), None, None, n(2), None, True)),
        sample_input("no weight", lambda n: (n(3, 2), None, None, None, n(2), True)),
        sample_input("input alone", lambda n: (n(4, 2), None, None), training=True),
        zero_size=lambda n: (n(0, 3), None, None, n(3), n(3), True),
        skips=_NORM_SKIPS,
    ),
    op_info("instance_norm", "wrong", _instance_norm).on(
        sample_input("weight and bias", lambda n: (n(2, 2, 3), None, None, n(2), n(2))),
        sample_input("images", lambda n: (n(2, 2, 2, 2), None, None, n(2), n(2)), eps=0.1),
        sample_input("no bias", lambda n: (n(1, 2, 3), None, None, n(2))),
        sample_input("no weight", lambda n: (n(1, 2, 3), None, None, None, n(2))),
        sample_input("input alone", normals((2, 1, 4))),
        zero_size=lambda n: (n(0, 3, 2), None, None, n(3), n(3)),
        skips=_NORM_SKIPS,
    ),
    _evaluation("batch_norm", _batch_norm_evaluation),
    _evaluation("instance_norm", _instance_norm_evaluation),
    op_info("weight_norm", "wrong", _weight_norm).on(
        sample_input("first dimension", normals((2, 3), (2, 1))),
        sample_input("last dimension", lambda n: (n(2, 1, 3), n(1, 1, 3), 2)),
        sample_input("middle dimension", normals((2, 3, 2), (1, 3, 1)), dim=1),
        sample_input("one norm over all", lambda n: (n(2, 3), n(), -1)),
        zero_size=normals((0, 3), (0, 1)),
        no_dimensions=lambda n: (n(), n(), -1),
        broadcasting=lambda n: (n(2, 3, 2), n(2, 3, 1), 1),
        dtypes=WITH_COMPLEX,
    ),
)  # fmt: skip

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
    function: Callable[..., Any],
    reference: Callable[..., Any],
    samples: tuple[SampleInput, ...],
    **others: Any,
) -> OpInfo:
    return op_info(name, "wrong", reference, function).on(
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

_LINALG = (
    op_info("solve", "wrong", _cramer).on(
        sample_input("matrix", lambda n: (_regular(n, 3, 3), n(3, 2))),
        sample_input("vectors", lambda n: (_regular(n, 2, 2, 2), n(2, 2))),
        sample_input("right", lambda n: (_regular(n, 2, 2), n(3, 2)), left=False),
        **_SYSTEMS,
    ),
    op_info("solve_ex", "wrong", _cramer, solve_ex).on(
        sample_input("matrix", lambda n: (_regular(n, 2, 2), n(2, 2))),
        sample_input("right", lambda n: (_regular(n, 2, 2), n(3, 2)), left=False),
        **_SYSTEMS,
    ),
    op_info("tensorsolve", "wrong", _tensorsolve).on(
        sample_input("pair", lambda n: (_regular(n, 2, 2).reshape(2, 1, 2), n(2))),
        sample_input("moved", lambda n: (_regular(n, 3, 3).reshape(3, 1, 3), n(1, 3)), dims=(-3,)),
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
        ops.det,
        _laplace,
        (*_REGULAR, sample_input("rank 2 of 4", lambda n: (n(4, 2) @ n(2, 4),))),
        skips={**ONE_TENSOR, **_SKIPS},
    ),
    _of_matrices("slogdet", slogdet, _slogdet, _REGULAR, skips={**ONE_TENSOR, **_SKIPS, **_SINGULAR}),
    _of_matrices("logdet", ops.logdet, _logdet, _REGULAR, skips={**ONE_TENSOR, **_SKIPS, **_SINGULAR}),
    _of_matrices(
        "cholesky_inverse",
        ops.cholesky_inverse,
        _of_triangle,
        (*_REGULAR[:2], sample_input("upper", lambda n: (_regular(n, 3, 3),), upper=True)),
        skips={**ONE_TENSOR, **_SKIPS},
    ),
)  # fmt: skip

OPS = (*_NORMS, *_LINALG)
