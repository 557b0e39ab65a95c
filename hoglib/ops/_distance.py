"""Distances between rows, to any order.

torch's cdist and pdist have neither a second derivative nor a forward mode. Its pairwise_distance
raises in reverse over forward for p = 1 and has NaN for the second derivative at distance 0.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from hoglib._core import validation
from hoglib._core.mixed_precision import is_autocast, upcast_half, without_autocast
from hoglib.ops._stand_in import (
    NO_DOUBLE_BACKWARD,
    TorchValueError,
    check_dtype,
    check_real,
    stands_in_for,
)

INFINITY = float("inf")
_COMPUTE_MODES = {
    "use_mm_for_euclid_dist_if_necessary": None,
    "use_mm_for_euclid_dist": True,
    "donot_use_mm_for_euclid_dist": False,
}
_MANY_ROWS = 25  # what torch means by "if necessary": more than these
_DISTANCES = "cdist, pdist, pairwise_distance"


@stands_in_for(torch.cdist, name=_DISTANCES, lacks=NO_DOUBLE_BACKWARD, issue="83510")
def cdist(
    x1: Tensor,
    x2: Tensor,
    p: float = 2.0,
    compute_mode: str = "use_mm_for_euclid_dist_if_necessary",
) -> Tensor:
    r"""Distances of every row of x1 to every row of x2, as `torch.cdist`.

        y_ij = (sum_k |x1_ik - x2_jk|^p)^(1/p)

    torch's own has neither a second derivative nor a forward mode. p = 0 counts the entries that
    differ; for infinity each entry that attains the maximum has the whole derivative. Equal rows have
    derivatives 0 at every order. Half precision is computed in float32; under autocast the result is
    float32. Differentiable to any order, in every mode, under vmap.

    Where torch uses matrix products (p = 2, by compute_mode, or with more than 25 rows), the values
    are those of the differences all the same, and the derivatives are those of
    |x1|^2 + |x2|^2 - 2 x1 x2^T with the rows centred: as exact as if each entry had been rounded once
    more, and without a temporary of shape [n, m, d].

    Args:
        x1: A real floating-point tensor.
        x2: A real floating-point tensor of the dtype of x1.
        p: The norm, 0 to infinity. Default: 2.
        compute_mode: "use_mm_for_euclid_dist_if_necessary", "use_mm_for_euclid_dist" or
            "donot_use_mm_for_euclid_dist", by which the derivatives too come from differences,
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
        check_real(name, x)
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
    products = _COMPUTE_MODES[validation.one_of("compute_mode", compute_mode, _COMPUTE_MODES)]
    norm = _check_norm(p)
    a, b = upcast_half(x1), upcast_half(x2)
    if a.dtype != b.dtype:
        check_dtype("x1", x1, "x2", x2)
    rows = max(a.shape[-2], b.shape[-2])
    if products is None:
        products = rows > _MANY_ROWS
    if norm == 2 and products:
        y = root(_squares_by_products(a, b))
    else:
        y = norm_of_rows(a.unsqueeze(-2) - b.unsqueeze(-3), norm)
    return y if is_autocast(x1) else y.to(x1.dtype)


@stands_in_for(torch.pdist, name=_DISTANCES)  # also torch.nn.functional.pdist
def pdist(input: Tensor, p: float = 2.0) -> Tensor:
    r"""Distances between the rows of a matrix, as `torch.pdist`.

        y = (|x_0 - x_1|_p, |x_0 - x_2|_p, ..., |x_(n-2) - x_(n-1)|_p)

    torch's own has neither a second derivative nor a forward mode. p = 0 counts the entries that
    differ; for infinity each entry that attains the maximum has the whole derivative. Equal rows have
    derivatives 0 at every order. Half precision is computed in float32; under autocast the result is
    float32. Differentiable to any order, in every mode, under vmap.

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
    check_real("input", input)
    if input.dim() != 2:
        raise TorchValueError(
            f"input: expected 2 dimensions, got {validation.describe(input)}; use `vmap` for more."
        )
    norm, n, x = _check_norm(p), input.shape[0], upcast_half(input)
    first, second = torch.triu_indices(n, n, 1, device=x.device).unbind()
    y = norm_of_rows(x.index_select(0, first) - x.index_select(0, second), norm)
    return y if is_autocast(input) else y.to(input.dtype)


@stands_in_for(torch.pairwise_distance, name=_DISTANCES)  # also that of torch.nn.functional
def pairwise_distance(
    x1: Tensor, x2: Tensor, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False
) -> Tensor:
    r"""Distances of the rows of x1 to those of x2 one by one, as `torch.pairwise_distance`.

        y_i = (sum_k |x1_ik - x2_ik + eps|^p)^(1/p)

    torch's own raises in reverse over forward for p = 1, and has second derivatives NaN at distance
    0. For p = infinity the entries that attain the maximum share the derivative. Distance 0 has
    derivatives 0 at every order. A negative p and complex rows are torch's own. Differentiable to
    any order, in every mode, under vmap.

    Args:
        x1: A floating-point or complex tensor.
        x2: A floating-point or complex tensor.
        p: The norm. Default: 2.
        eps: Added to each difference. Default: 1e-6.
        keepdim: Whether the last dimension stays, with size 1. Default: False.
    Returns:
        y.
    Raises:
        TypeError: for what is not a tensor.
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
    # a row that is not finite does not reach the others
    origin = a.detach().mean(-2, keepdim=True).nan_to_num(0.0, 0.0, 0.0)
    near = torch.cdist(a.detach(), b.detach(), 2.0, "donot_use_mm_for_euclid_dist")
    with without_autocast(a):
        a, b = a - origin, b - origin
        lengths = (a * a).sum(-1, keepdim=True) + (b * b).sum(-1).unsqueeze(-2)
        squares = lengths - 2 * (a @ b.mT)
    return near * near + (squares - squares.detach())


def _check_norm(p: float) -> float:
    if not p >= 0:
        raise TorchValueError(f"p: expected a number of at least 0, got {p}; 2 is the usual one.")
    return float(p)


# p-norms over the last dimension. Where the norm has no derivative, theirs is 0, at every order.


def norm_of_rows(d: Tensor, p: float) -> Tensor:
    r"""(sum_k |d_k|^p)^(1/p); for p = 0 the number of d_k that are not 0, for infinity their maximum.

    All derivatives are 0 at a row of zeros, and those of |d_k|^p are 0 at d_k = 0 where it has none.
    """
    if p == 0:
        return d.sign().abs().sum(-1)  # connected to the graph, with derivatives 0
    if p == 1:
        return d.abs().sum(-1)
    if p == 2:
        return root((d * d).sum(-1))
    if p == INFINITY:
        return largest(d.abs())
    return root(powers(d, p).sum(-1), p)


def powers(d: Tensor, p: float) -> Tensor:
    """|d|^p, with derivatives 0 at d = 0 where it has none."""
    if p % 2 == 0:
        return d**p  # smooth at 0 too
    zero = d == 0
    return torch.where(zero, 0.0, torch.where(zero, 1.0, d).abs() ** p)


def root(s: Tensor, p: float = 2.0) -> Tensor:
    """s^(1/p), with derivatives 0 at s = 0."""
    zero = s == 0
    # torch.where would make a tensor of each number
    positive = s.masked_fill(zero, 1.0)
    return (positive.sqrt() if p == 2 else positive ** (1 / p)).masked_fill(zero, 0.0)


def largest(a: Tensor) -> Tensor:
    """The maximum of each row. Every entry equal to it has the whole derivative, as in torch.cdist."""
    if not a.shape[-1]:
        return a.sum(-1)
    maximum = a.detach().amax(-1, keepdim=True)
    attained = torch.where(a.detach() == maximum, a - a.detach(), 0.0)
    return maximum.squeeze(-1) + attained.sum(-1)
