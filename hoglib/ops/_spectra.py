"""Eigenvalues and singular values with clusters: values equal up to rounding; see `_directions`.

torch divides by gaps between eigenvalues even for symmetric functions of a cluster, which have second
derivatives: along A + t W, the eigenvectors of the cluster are those in which W is diagonal. And
torch's forward mode of eigh takes the eigenvectors for constants.

    A = V diag(L) V^H        K = V^H W V, along A' = W
    L_i' = K_ii              V' = V X,  X_ij = K_ij / (L_j - L_i), and 0 for i, j of one cluster
    in a cluster             V is replaced by V R, with R^H K R diagonal, and L' is that diagonal

    gradient by L            G = V diag(g) V^H
    along W                  g' = diag(R^H K R)        G by V: V (2 K_ij g_j), and 0 within a cluster
"""

from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from hoglib._core.torch_api.mixed_precision import full_precision
from hoglib._core.torch_api.torch_modes import only_plain_operations, reverse_only
from hoglib.ops._directions import Directions, values
from hoglib.ops._function import Saved, apply_function, make_function, vmap_in_front
from hoglib.ops._stand_in import OVER_FORWARD, stands_in_for

_CLOSE = "where eigenvalues are equal, or closer than rounding allows, that it tells apart"
_ROW: Any = {
    "name": "eigh, svdvals",
    "lacks": f"NaN or wrong second derivatives at equal values; {OVER_FORWARD}",
}


@stands_in_for(torch.linalg.eigh, **_ROW)
@full_precision(widen=True)
def eigh(A: Tensor, UPLO: str = "L") -> Any:
    """torch.linalg.eigh, with right second derivatives of symmetric functions at equal eigenvalues."""
    found: Any = torch.linalg.eigh(A, UPLO)
    seen = values(found[0])
    if not found[0].numel():
        return found
    distinct = seen is not None and not bool(_clusters(seen).triu(1).any())
    if only_plain_operations() or (distinct and reverse_only()):
        return found
    make: Any = torch.return_types.linalg_eigh  # type: ignore[attr-defined]
    return make(apply_function(_EIGH, _eigh_reference, A, UPLO, Directions("eigh", A)))


def _eigh_reference(A: Tensor, UPLO: str, _: Directions) -> Any:
    return tuple(torch.linalg.eigh(A, UPLO))


@stands_in_for(torch.linalg.eigvalsh, name=_ROW["name"])
def eigvalsh(A: Tensor, UPLO: str = "L") -> Tensor:
    """torch.linalg.eigvalsh, by :func:`eigh`."""
    return eigh(A, UPLO)[0]


@stands_in_for(torch.linalg.svdvals, name=_ROW["name"])
@full_precision(widen=True)
def svdvals(A: Tensor, **kw: Any) -> Tensor:
    """torch.linalg.svdvals; with clusters, the largest eigenvalues of [[0, A], [A^H, 0]]."""
    found: Tensor = torch.linalg.svdvals(A, **kw)
    seen = values(found)
    if kw or only_plain_operations() or seen is None or not seen.numel():
        return found
    if _are_apart(seen) or not bool(cast(Tensor, values(A)).isfinite().all()):
        return found
    m, n = A.shape[-2:]
    # not the eigenvalues of A A^H, which would lose half of the digits
    above = torch.cat([A.new_zeros(*A.shape[:-1], m), A], -1)
    below = torch.cat([A.mH, A.new_zeros(*A.shape[:-2], n, n)], -1)
    return eigvalsh(torch.cat([above, below], -2))[..., -min(m, n) :].flip(-1)


@stands_in_for(torch.linalg.svd, name=_ROW["name"])
def svd(A: Tensor, full_matrices: bool = True, **kw: Any) -> Any:
    """torch.linalg.svd with the singular values of :func:`svdvals`; the vectors are torch's."""
    found: Any = torch.linalg.svd(A, full_matrices, **kw)
    U, S, Vh = found
    seen = values(S)
    if kw or seen is None or not seen.numel() or _are_apart(seen):
        return found
    make: Any = torch.return_types.linalg_svd  # type: ignore[attr-defined]
    return make((U, svdvals(A), Vh))


def _are_apart(S: Tensor) -> bool:
    """Whether singular values, in descending order, are neither equal nor 0, up to rounding."""
    ascending = torch.cat([torch.zeros_like(S[..., :1]), S.flip(-1)], -1)
    return not bool(_clusters(ascending).triu(1).any())


def _clusters(L: Tensor) -> Tensor:
    """The mask of pairs of ascending eigenvalues that are equal up to sqrt(eps).

    At sqrt(eps) the error of treating two values as equal equals the error of treating them as
    different.
    """
    ids = _labels(L)
    return ids[..., :, None] == ids[..., None, :]


def _labels(L: Tensor) -> Tensor:
    """The number of the cluster of each eigenvalue, ascending."""
    L = L.detach()
    apart = L.diff(dim=-1) > torch.finfo(L.dtype).eps ** 0.5 * L.abs().amax(-1, keepdim=True)
    return torch.cat([torch.zeros_like(L[..., :1]), apart.to(L.dtype).cumsum(-1)], -1)


def _divide_by_gaps(X: Tensor, L: Tensor) -> Tensor:
    """X_ij / (L_j - L_i), and 0 within clusters."""
    same = _clusters(L)
    return X.masked_fill(same, 0.0) / (L[..., None, :] - L[..., :, None]).masked_fill(same, 1.0)


def _between_clusters(V: Tensor, L: Tensor) -> Tensor:
    """V, differentiable only by changes that mix different clusters."""
    fixed = V.detach()
    return fixed + fixed @ (fixed.mH @ (V - fixed)).masked_fill(_clusters(L), 0.0)


def _rotation_of_clusters(W: Tensor, L: Tensor, V: Tensor) -> tuple[Tensor, Tensor]:
    """K = V^H W V, and the rotation R within each cluster that makes K diagonal."""
    K = V.mH @ ((W + W.mH) / 2) @ V
    # a K with NaN has no rotation; the NaN reaches the result through K itself
    M = K.detach().masked_fill(~_clusters(L), 0.0).nan_to_num(0.0, 0.0, 0.0)
    size = torch.linalg.matrix_norm(M, keepdim=True)
    # M / |M| has eigenvalues from -1 to 1: adding 3 per cluster keeps clusters apart, so that R mixes
    # vectors only within a cluster
    R = torch.linalg.eigh(M / size.masked_fill(size == 0, 1.0) + 3 * _labels(L).diag_embed())[1]
    return K, R


def _diagonal(K: Tensor, R: Tensor) -> Tensor:
    """diag(R^H K R), real."""
    return (R.mH @ K @ R).diagonal(dim1=-2, dim2=-1).real


def _from_spectrum(V: Tensor, values: Tensor) -> Tensor:
    """V diag(values) V^H."""
    return (V * values[..., None, :]) @ V.mH


def _eigh_vjp(saved: Saved, by_L: Tensor | None, by_V: Tensor | None) -> list[Tensor | None]:
    (_, _, directions), (L, V) = saved.inputs, saved.outputs
    total = torch.zeros_like(V)
    along = directions.take()
    if by_L is not None:
        total = apply_function(_VALUES_GRADIENT, None, by_L, L, V, directions)
        if along is not None:
            total = total + _from_spectrum(along, by_L) - _from_spectrum(V.detach(), by_L)
    if by_V is not None:
        X = V.mH @ by_V
        inside = X.detach().masked_fill(~_clusters(L).triu(1) & ~_clusters(L).tril(-1), 0.0)
        # without by_L the function may be a projection onto the cluster: a Hermitian X is right
        unequal = inside if by_L is not None else inside - inside.mH
        directions.warn(unequal.abs() > _cluster_threshold(X), _CLOSE)
        total = total + V @ _divide_by_gaps(X, L) @ V.mH
    return [total, None, None]


def _cluster_threshold(x: Tensor) -> Tensor:
    """The threshold above which a difference exceeds rounding and a cluster's width."""
    return torch.finfo(x.dtype).eps ** 0.25 * x.detach().abs().amax()


def _eigh_jvp(saved: Saved, tangent: Tensor, *_: Any) -> Any:
    (_, _, directions), (L, V) = saved.inputs, saved.outputs
    V = _between_clusters(V, L)
    K, R = _rotation_of_clusters(tangent, L, V)
    directions.tangent = V.detach() @ R
    return _diagonal(K, R), V @ _divide_by_gaps(V.mH @ tangent @ V, L)


def _values_forward(by_L: Tensor, L: Tensor, V: Tensor, _: Directions) -> Tensor:
    return _from_spectrum(V, by_L)


def _values_vjp(saved: Saved, W: Tensor) -> list[Tensor | None]:
    by_L, L, V, directions = saved.inputs
    K, R = _rotation_of_clusters(W, L, _between_clusters(V, L))
    directions.noted = V.detach() @ R
    directions.warn(_treated_unequally(by_L, L), _CLOSE)
    by_V = V @ (2 * K * by_L[..., None, :]).masked_fill(_clusters(L), 0.0)
    return [_diagonal(K, R), None, by_V, None]


def _values_jvp(saved: Saved, tg: Any, tL: object, tV: object, *_: Any) -> Tensor:
    by_L, L, V, directions = saved.inputs
    directions.warn(_treated_unequally(by_L, L), _CLOSE)
    found = torch.zeros_like(V) if tg is None else _from_spectrum(V, tg)
    if tV is not None:
        half = (tV * by_L[..., None, :]) @ V.mH
        found = found + half + half.mH
    return found


def _treated_unequally(by_L: Tensor, L: Tensor) -> Tensor:
    """The mask of pairs in a cluster with different gradients: the function is not symmetric."""
    differences = (by_L[..., :, None] - by_L[..., None, :]).detach().abs()
    return _clusters(L) & (differences > _cluster_threshold(by_L))


_make = partial(make_function, vmap=vmap_in_front)
_EIGH = _make("Eigh", 3, _eigh_reference, _eigh_vjp, _eigh_jvp, keep_inputs=(), keep_outputs=(0, 1))
_VALUES_GRADIENT = _make("EigenvaluesGradient", 4, _values_forward, _values_vjp, _values_jvp)
