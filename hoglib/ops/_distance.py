"""Distances between rows and Euclidean norms, to any order.

torch's cdist and pdist have neither a second derivative nor a forward mode. Its pairwise_distance
raises in reverse over forward for p = 1. At distance 0, second derivatives of pairwise_distance and of
torch's norms are NaN, even those of squares.
"""

from collections.abc import Callable
from functools import partial, wraps
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hoglib._core.messages import validation
from hoglib._core.messages.validation import TorchValueError
from hoglib._core.torch_api import pytree, torch_internals
from hoglib._core.torch_api.mixed_precision import is_autocast, upcast_half, without_autocast
from hoglib._core.torch_api.torch_modes import needs_linear_backward, only_plain_operations
from hoglib.ops._define import promote_dtypes
from hoglib.ops._directions import Directions, values
from hoglib.ops._function import Saved, apply_function, make_function, vmap_in_front
from hoglib.ops._spectra import svdvals
from hoglib.ops._stand_in import NO_DOUBLE_BACKWARD, SILENT, stands_in_for

__all__ = ["cdist", "pairwise_distance", "pdist"]

INFINITY = float("inf")
_COMPUTE_MODES = {
    "use_mm_for_euclid_dist_if_necessary": None,
    "use_mm_for_euclid_dist": True,
    "donot_use_mm_for_euclid_dist": False,
}
_MANY_ROWS = 25  # "if necessary": torch takes matrix products for more rows
_DISTANCES = "cdist, pdist, pairwise_distance"


@stands_in_for(
    torch.cdist, name=_DISTANCES, lacks=NO_DOUBLE_BACKWARD, issue="83510", until={"rr": (2, 13)}
)
def cdist(
    x1: Tensor, x2: Tensor, p: float = 2, compute_mode: str = "use_mm_for_euclid_dist_if_necessary"
) -> Tensor:
    r"""Distances of every row of x1 to every row of x2, as `torch.cdist`.

        y_ij = (sum_k |x1_ik - x2_jk|^p)^(1/p)

    torch.cdist has neither a second derivative nor a forward mode. p = 0 counts the entries that
    differ; for infinity each entry that attains the maximum has the whole derivative. Equal rows have
    derivatives 0; but for p = 2 smooth functions of their distance, such as its square, have right
    second derivatives. Half precision is computed in float32; under autocast the result is float32.
    Differentiable to any order, in every mode, under vmap.

    If torch uses matrix products (p = 2, by compute_mode, or with more than 25 rows), values still come
    from differences, and derivatives from |x1|^2 + |x2|^2 - 2 x1 x2^T with centred rows: as exact as
    with one more rounding of each entry, and without a temporary of shape [n, m, d].

    Args:
        x1: A real floating-point tensor.
        x2: A real floating-point tensor of the dtype of x1.
        p: The norm, 0 to infinity. Default: 2.
        compute_mode: "use_mm_for_euclid_dist_if_necessary", "use_mm_for_euclid_dist" or
            "donot_use_mm_for_euclid_dist"; with the last, derivatives come from differences too,
            exact for rows that nearly coincide. Default: the first.
    Returns:
        y.
    Raises:
        RuntimeError: for shapes and dtypes as torch does, and for a negative p.
        ValueError: for an unknown compute_mode.
    Shape:
        - x1: [..., n, d]
        - x2: [..., m, d], with leading dimensions that broadcast
        - y: [..., n, m]
    Example:
        >>> x, o = torch.tensor([[3.0, 4.0]]), torch.zeros(1, 2)
        >>> hog.ops.cdist(x, o)
        tensor([[5.]])
        >>> hog.hvp(lambda x: hog.ops.cdist(x, o).sum(), x, torch.tensor([[4.0, -3.0]]))[1]
        tensor([[ 0.8000, -0.6000]])
    """
    for name, x in (("x1", x1), ("x2", x2)):
        validation.torch_real(name, x)
        if x.dim() < 2:
            raise TorchValueError(
                f"{name}: expected at least 2 dimensions, rows and entries, got "
                f"{validation.describe(x)}; one row is `{name}[None]`."
            )
    if x1.shape[-1] != x2.shape[-1]:
        raise TorchValueError(
            f"x2: expected rows of {x1.shape[-1]} entries as in x1, got {x2.shape[-1]}; "
            "distances are between rows of one length."
        )
    products = _COMPUTE_MODES[validation.choice("compute_mode", compute_mode, _COMPUTE_MODES)]
    norm = _check_norm(p)
    a, b = upcast_half(x1), upcast_half(x2)
    if a.dtype != b.dtype:
        validation.same_dtype("x1", x1, "x2", x2)
    products = max(a.shape[-2], b.shape[-2]) > _MANY_ROWS if products is None else products
    if norm != 2 or (not products and (only_plain_operations() or torch_internals.tracing())):
        y = norm_of_rows(a.unsqueeze(-2) - b.unsqueeze(-3), norm)
    else:
        d = None if products else a.unsqueeze(-2) - b.unsqueeze(-3)
        y = root(_squares_by_products(a, b) if d is None else (d * d).sum(-1))
        seen = values(y)
        if seen is not None and not bool(seen.all()):
            zero = seen == 0
            if x1 is x2 and zero.shape == y.shape:  # the distance of a row to itself is constant 0
                zero.diagonal(dim1=-2, dim2=-1).zero_()
            y = _with_equal_rows(y, zero, a, b) if bool(zero.any()) else y
    return y if is_autocast(x1) else y.to(x1.dtype)


@stands_in_for(torch.pdist, name=_DISTANCES)  # also torch.nn.functional.pdist
def pdist(input: Tensor, p: float = 2.0) -> Tensor:
    r"""Distances between the rows of a matrix, as `torch.pdist`.

        y = (|x_0 - x_1|_p, |x_0 - x_2|_p, ..., |x_(n-2) - x_(n-1)|_p)

    torch.pdist has neither a second derivative nor a forward mode. p = 0 counts the entries that
    differ; for infinity each entry that attains the maximum has the whole derivative. Equal rows have
    derivatives 0; but for p = 2 smooth functions of their distance, such as its square, have right
    second derivatives. Half precision is computed in float32; under autocast the result is float32.
    Differentiable to any order, in every mode, under vmap.

    Args:
        input: x, a real floating-point tensor.
        p: The norm, 0 to infinity. Default: 2.
    Returns:
        y.
    Raises:
        RuntimeError: for other shapes and dtypes, and for a negative p.
    Shape:
        - input: [n, d]
        - y: [n (n - 1) / 2]
    Example:
        >>> x = torch.tensor([[0.0, 0.0], [3.0, 4.0]])
        >>> hog.ops.pdist(x)
        tensor([5.])
        >>> hog.hvp(lambda x: hog.ops.pdist(x).sum(), x, torch.tensor([[0.0, 0.0], [4.0, -3.0]]))[1]
        tensor([[-0.8000,  0.6000],
                [ 0.8000, -0.6000]])
    """
    validation.torch_real("input", input)
    if input.dim() != 2:
        raise TorchValueError(
            f"input: expected 2 dimensions, got {validation.describe(input)}; use `vmap` for more."
        )
    norm, n, x = _check_norm(p), input.shape[0], upcast_half(input)
    first, second = torch.triu_indices(n, n, 1, device=x.device).unbind()
    y = norm_of_rows(x.index_select(0, first) - x.index_select(0, second), norm)
    return y if is_autocast(input) else y.to(input.dtype)


@stands_in_for(torch.pairwise_distance, name=_DISTANCES)  # F.pairwise_distance is this function
def pairwise_distance(
    x1: Tensor, x2: Tensor, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False
) -> Tensor:
    r"""Distances of row i of x1 to row i of x2, as `torch.pairwise_distance`.

        y_i = (sum_k |x1_ik - x2_ik + eps|^p)^(1/p)

    torch.pairwise_distance raises in reverse over forward for p = 1, and has second derivatives NaN at
    distance 0. For p = infinity the entries that attain the maximum share the derivative. Distance 0
    has derivatives 0; but for p = 2 its square has right second derivatives. A negative p and complex
    rows go to torch. Differentiable to any order, in every mode, under vmap.

    Args:
        x1: A floating-point or complex tensor.
        x2: A floating-point or complex tensor.
        p: The norm. Default: 2.
        eps: Added to each difference. Default: 1e-6.
        keepdim: Whether the last dimension stays, with size 1. Default: False.
    Returns:
        y.
    Raises:
        TypeError: for arguments that are no tensors.
    Shape:
        - x1, x2: [..., d], which broadcast
        - y: [...], or [..., 1] with keepdim
    Example:
        >>> x, o = torch.tensor([[3.0, 4.0]]), torch.zeros(1, 2)
        >>> hog.ops.pairwise_distance(x, o)
        tensor([5.0000])
        >>> f = lambda x: hog.ops.pairwise_distance(x, o).sum()
        >>> hog.hvp(f, x, torch.tensor([[4.0, -3.0]]))[1]
        tensor([[ 0.8000, -0.6000]])
    """
    validation.tensor("x1", x1)
    validation.tensor("x2", x2)
    d = x1 - x2 + eps
    if not d.is_floating_point() or p < 0 or not d.dim():
        return F.pairwise_distance(x1, x2, p, eps, keepdim)
    d32 = upcast_half(d)
    y = d32.abs().amax(-1) if p == INFINITY else norm_of_rows(d32, p)
    # autocast takes norms in float32 on CUDA, and not on the CPU
    y = y if d.is_cuda and is_autocast(d) else y.to(d.dtype)
    return y.unsqueeze(-1) if keepdim else y


def _squares_by_products(a: Tensor, b: Tensor) -> Tensor:
    """Squared distances: values by differences, derivatives by products of matrices."""
    # nan_to_num: an infinite row must not reach other rows through the mean
    origin = a.detach().mean(-2, keepdim=True).nan_to_num(0.0, 0.0, 0.0)
    near = torch.cdist(a.detach(), b.detach(), 2.0, "donot_use_mm_for_euclid_dist")
    with without_autocast(a):
        # centre, since |a|^2 + |b|^2 - 2 a.b cancels for rows far from 0
        a, b = a - origin, b - origin
        lengths = (a * a).sum(-1, keepdim=True) + (b * b).sum(-1).unsqueeze(-2)
        squares = lengths - 2 * (a @ b.mT)
    # the value of near^2, the derivatives of squares
    return near * near + (squares - squares.detach())


def _with_equal_rows(y: Tensor, zero: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """The distances y, with those at the mask `zero` computed again, by differences."""
    if zero.shape != y.shape:  # under vmap the mask has all samples, with zeros at different places
        return norm_of_rows(a.unsqueeze(-2) - b.unsqueeze(-3), 2)
    *batch, i, j = zero.nonzero(as_tuple=True)
    first = a.expand(*y.shape[:-1], a.shape[-1])[(*batch, i)]
    second = b.expand(*y.shape[:-2], *b.shape[-2:])[(*batch, j)]
    return y.index_put((*batch, i, j), norm_of_rows(first - second, 2))


def _check_norm(p: float) -> float:
    if not p >= 0:
        raise TorchValueError(f"p: expected a number of at least 0, got {p}; 2 is the usual one.")
    return float(p)


# p-norms over the last dimension. Where a norm has no derivative, all derivatives here are 0.


def norm_of_rows(d: Tensor, p: float) -> Tensor:
    r"""(sum_k |d_k|^p)^(1/p); for p = 0 the number of nonzero d_k, for infinity max_k |d_k|.

    All derivatives are 0 at a row of zeros; derivatives of |d_k|^p that do not exist at d_k = 0 are 0.
    """
    if p == 0:
        return d.sign().abs().sum(-1)  # sign() keeps the graph, with derivatives 0
    if p == 1:
        return d.abs().sum(-1)
    if p == 2:
        return euclidean(d, (-1,), lambda x: root((x * x).sum(-1, keepdim=True))).squeeze(-1)
    if p == INFINITY:
        return largest(d.abs())
    return root(powers(d, p).sum(-1), p)


def powers(d: Tensor, p: float) -> Tensor:
    """|d|^p, with 0 for derivatives that do not exist at d = 0."""
    if p % 2 == 0:
        return d**p  # smooth at 0, too
    zero = d == 0
    # two wheres: the unused branch would have an infinite derivative, and 0 * inf is NaN
    return torch.where(zero, 0.0, torch.where(zero, 1.0, d).abs() ** p)


def root(s: Tensor, p: float = 2.0) -> Tensor:
    """s^(1/p), with derivatives 0 at s = 0."""
    zero = s == 0
    # masked_fill, because torch.where would make tensors of the numbers
    positive = s.masked_fill(zero, 1.0)
    return (positive.sqrt() if p == 2 else positive ** (1 / p)).masked_fill(zero, 0.0)


def largest(a: Tensor) -> Tensor:
    """The maximum of each row. Every entry equal to it has the whole derivative, as in torch.cdist."""
    if not a.shape[-1]:
        return a.sum(-1)
    maximum = a.detach().amax(-1, keepdim=True)
    attained = torch.where(a.detach() == maximum, a - a.detach(), 0.0)
    return maximum.squeeze(-1) + attained.sum(-1)


# Euclidean norms with right second derivatives of their squares at 0; see `_directions`.
#
#     n = |x|        n' = <u, x'>        u = x / n, and 0 where n = 0
#     gradient       G(g, x, n) = g u
#     <G, w> has the derivatives         <u, w> by g        g w / n by x        -g <x, w> / n^2 by n
#
# n is an input of G; by the chain rule the whole derivative by x is g (w - u <u, w>) / n.


def _is_smooth(y: Tensor) -> bool:
    """Whether torch's own norm is right, since no norm is 0; False on a device, to avoid a wait."""
    if torch.compiler.is_dynamo_compiling():
        return True
    seen = values(y)
    return seen is not None and seen.device.type == "cpu" and bool(seen.all())


def euclidean(x: Tensor, dims: tuple[int, ...], torch_norm: Callable[[Tensor], Tensor]) -> Tensor:
    """The norm of a real x over dims (negative, with keepdim); torch's own if no norm is 0."""
    if only_plain_operations():  # Taylor mode has its own rule at 0
        return torch_norm(x) if needs_linear_backward() else _norm_forward(x, dims, None)
    y = torch_norm(x)
    if _is_smooth(y):
        return y
    return apply_function(_NORM, lambda x, *_: torch_norm(x), x, dims, Directions("a norm", x))


def _unit(x: Tensor, n: Tensor) -> Tensor:
    """x / n, and 0 where n is 0."""
    return (x / n.masked_fill(n == 0, 1.0)).masked_fill(n == 0, 0.0)


def _leaving_directions(w: Tensor, stays: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Unit vectors along w; 0 where the mask `stays` is True."""
    w = w.masked_fill(stays, 0.0)
    w = _unit(w, w.detach().abs().amax(dims, keepdim=True))  # scaled, or squares may underflow
    return _unit(w, root((w * w).sum(dims, keepdim=True)))


def _norm_forward(x: Tensor, dims: tuple[int, ...], _: object) -> Tensor:
    return torch.linalg.vector_norm(x, dim=dims, keepdim=True)


def _norm_vjp(saved: Saved, grad: Tensor) -> list[Tensor | None]:
    (x, dims, directions), (n,) = saved.inputs, saved.outputs
    along = directions.take()
    if along is not None and torch_internals.forward_mode_active():
        # forward over reverse: the forward pass noted the direction; drop it at kinks
        along = along.masked_fill(_find_kinks(grad, n, along, dims, directions), 0.0)
    share = apply_function(_NORM_GRADIENT, None, grad, x, n, dims, directions)
    return [share if along is None else share + grad * along, None, None]


def _norm_jvp(saved: Saved, tangent: Tensor, *_: Any) -> Tensor:
    (x, dims, directions), (n,) = saved.inputs, saved.outputs
    if not directions.nested:  # a first derivative
        return (_unit(x, n) * tangent).sum(dims, keepdim=True)
    directions.tangent = _leaving_directions(tangent, n != 0, dims)
    found = ((_unit(x, n) + directions.tangent) * tangent).sum(dims, keepdim=True)
    return apply_function(_TANGENT, None, found, n, tangent, dims, directions)


def _tangent_vjp(saved: Saved, g: Tensor) -> list[Tensor | None]:
    """The gradient of the identity; g, the slope of the function of the norm, shows kinks."""
    _, n, tangent, dims, directions = saved.inputs
    _find_kinks(g, n, tangent, dims, directions)
    return [g, None, None, None, None]


def _gradient_forward(g: Tensor, x: Tensor, n: Tensor, *_: Any) -> Tensor:
    return g * _unit(x, n)


def _find_kinks(g: Tensor, n: Tensor, w: Tensor, dims: tuple[int, ...], of: Directions) -> Tensor:
    """The mask of norms of 0 with a nonzero slope g, so that the function of the norm has a kink.

    Warns if x leaves 0 along w; but not for |x| of single numbers, with second derivatives 0 on both
    sides.
    """
    steep = (n == 0) & (g.abs() > 100 * torch.finfo(g.dtype).eps * g.detach().abs().amax())
    if prod(w.shape[d] for d in dims) > 1:
        of.warn(steep & w.detach().abs().amax(dims, keepdim=True).bool(), "where it is 0")
    return steep


def _gradient_vjp(saved: Saved, w: Tensor) -> list[Tensor | None]:
    g, x, n, dims, directions = saved.inputs
    steep = _find_kinks(g, n, w, dims, directions)
    along = directions.noted = _leaving_directions(w, (n != 0) | steep, dims)
    by_g = (w * (_unit(x, n) + along)).sum(dims, keepdim=True)
    by_n = -g * _unit(_unit((x * w).sum(dims, keepdim=True), n), n)
    return [by_g, g * _unit(w, n), by_n, None, None]


def _gradient_jvp(saved: Saved, tg: Any, tx: Any, tn: object, *_: Any) -> Tensor:
    g, x, n, dims, directions = saved.inputs
    if tx is not None:
        _find_kinks(g, n, tx, dims, directions)
    found = torch.zeros_like(g * x)
    if tg is not None:
        found = found + tg * _unit(x, n)
    if tx is not None:
        found = found + g * _unit(tx, n)
    return found if tn is None else found - g * tn * _unit(_unit(x, n), n)


_make = partial(make_function, vmap=vmap_in_front)
_NORM = _make("Norm", 3, _norm_forward, _norm_vjp, _norm_jvp, keep_inputs=(0,), keep_outputs=(0,))
_TANGENT = _make("NormTangent", 5, lambda y, *_: y.clone(), _tangent_vjp, lambda _, t, *rest: t)
_NORM_GRADIENT = _make("NormGradient", 5, _gradient_forward, _gradient_vjp, _gradient_jvp)


def _norm_over(input: Tensor, dim: Any, keepdim: bool) -> Tensor:
    """The Euclidean norm over dim (None: all dimensions) of a tensor that :func:`_is_plain` accepts."""
    x = input if input.dim() else input.reshape(1)
    dim = range(x.dim()) if dim is None or dim == () else (dim,) if isinstance(dim, int) else dim
    own = dims = tuple(d - x.dim() if d >= 0 else d for d in dim)
    if x.is_complex():
        x, dims = torch.view_as_real(x), (*(d - 1 for d in dims), -1)
    y = euclidean(x, dims, lambda x: torch.linalg.vector_norm(x, dim=dims, keepdim=True))
    y = y.squeeze(-1) if input.is_complex() else y
    y = y if keepdim else y.squeeze(own)
    return y if input.dim() else y.reshape(())


def _is_plain(x: Any, dtype: torch.dtype | None = None) -> bool:
    """Whether x is a dense, nonempty float tensor and no dtype is asked for; else torch must do it."""
    return pytree.is_float(x) and x.layout == torch.strided and x.numel() > 0 and dtype is None


def _two_norm(original: Callable[..., Any]) -> Callable[..., Any]:
    """A wrapper of torch's norm function that takes Euclidean norms from `_norm_over`."""
    names = ("ord", "dim", "keepdim") if "linalg" in repr(original) else ("p", "dim", "keepdim")
    order = None if original is torch.linalg.norm else 2
    usual = dict(zip(names, (order, None, False), strict=True))

    @wraps(original)
    def norm(input: Tensor, *args: Any, **kw: Any) -> Any:
        given = usual | dict(zip(names, args, strict=False)) | kw
        ord, dim, keepdim = map(given.pop, names)
        vectors = order == 2 or isinstance(dim, int) or (dim is None and input.dim() == 1)
        # a matrix norm by singular values
        if ord == "nuc" or (ord == 2 and not vectors):
            return matrix_norm(input, ord, dim or (-2, -1), keepdim, **given)
        y = original(input, *args, **kw)
        if _is_smooth(y) or len(args) > 3 or not _is_plain(input, **given):
            return y
        return _norm_over(input, dim, keepdim) if ord in (None, 2, "fro") else y

    return norm


_NORMS = "vector_norm, norm, abs, hypot"
_LACKS: Any = {
    "lacks": f"second derivatives of a squared norm at 0 are NaN or 0{SILENT}",
    "modes": ("rr", "fr"),
}
stands_in_for(torch.linalg.vector_norm, name=_NORMS, **_LACKS)(_two_norm(torch.linalg.vector_norm))
for _function in (torch.linalg.norm, torch.norm, Tensor.norm):
    stands_in_for(_function, name=_NORMS)(_two_norm(_function))


@stands_in_for(torch.linalg.matrix_norm, name=_NORMS)
def matrix_norm(
    A: Tensor, ord: object = "fro", dim: Any = (-2, -1), keepdim: bool = False, **kw: Any
) -> Any:
    """torch.linalg.matrix_norm by the Euclidean norm, and by `svdvals`, right for equal values."""
    if not _is_plain(A, **kw) or ord not in ("fro", "nuc", 2, -2):
        return torch.linalg.matrix_norm(A, ord, dim, keepdim, **kw)
    if ord == "fro":
        return _norm_over(A, dim, keepdim)
    S = svdvals(A.movedim(dim, (-2, -1)))
    y = S.sum(-1) if ord == "nuc" else S.amax(-1) if ord == 2 else S.amin(-1)
    return y.unsqueeze(-1).unsqueeze(-1).movedim((-2, -1), dim) if keepdim else y


@stands_in_for(torch.dist, Tensor.dist, name=_NORMS)
def dist(input: Tensor, other: Tensor, p: float = 2) -> Tensor:
    """torch.dist by the Euclidean norm; p = 0 is a constant, for which torch's backward raises."""
    d = input - other
    plain = p == 2 and _is_plain(d)
    return _norm_over(d, None, False) if plain else torch.linalg.vector_norm(d, p)


@stands_in_for(torch.std, Tensor.std, name=_NORMS)
def std(input: Tensor, dim: Any = None, *args: Any, keepdim: bool = False, **kw: Any) -> Tensor:
    """torch.std, with right second derivatives of its square if all numbers are equal."""
    if isinstance(dim, bool):  # torch.std(input, unbiased)
        dim, kw = None, {"correction": int(dim)}
    y = torch.std(input, dim, *args, keepdim=keepdim, **kw)
    if args or not _is_plain(input) or _is_smooth(y):
        return y
    dims = tuple(range(input.dim())) if dim is None else (dim,) if isinstance(dim, int) else dim
    correction = kw.get("correction", 1) if kw.get("unbiased", True) else 0
    count = prod(input.shape[d] for d in dims) - correction
    return _norm_over(input - input.mean(dims, keepdim=True), dims, keepdim) / max(count, 0) ** 0.5


@stands_in_for(torch.abs, Tensor.abs, Tensor.__abs__, torch.absolute, Tensor.absolute, name=_NORMS)
def absolute(input: Tensor) -> Tensor:
    """torch.abs, with right second derivatives of its square at 0."""
    if not _is_plain(input):
        return torch.abs(input)
    if not input.is_complex() and only_plain_operations():  # Taylor mode finds this kink by name
        return torch.abs(input)
    x = torch.view_as_real(input) if input.is_complex() else input.unsqueeze(-1)
    return euclidean(x, (-1,), lambda x: torch.abs(input).unsqueeze(-1)).squeeze(-1)


@stands_in_for(torch.hypot, Tensor.hypot, name=_NORMS)
def hypot(input: Tensor, other: Tensor) -> Tensor:
    """torch.hypot, with right second derivatives of its square at 0."""
    if not (_is_plain(input) and _is_plain(other)):
        return torch.hypot(input, other)
    x = torch.stack(torch.broadcast_tensors(*promote_dtypes(input, other)), -1)
    return euclidean(x, (-1,), lambda x: torch.hypot(*x.unbind(-1)).unsqueeze(-1)).squeeze(-1)
