"""The first call of a computation is compared with a second computation; later calls are trusted.

    max |a - b| <= r max(|a|, |b|, |terms|)        r by the dtype, and by how a and b were computed

    BITS          a repeated run                                             r = 0
    KERNELS       equal operations, on other shapes or by other kernels      r = 4 eps
    SUMS          sums in another order                                      r = 1000 eps
    DIGITS        another formula, with possible cancellation                r = sqrt(eps)
    DERIVATIVES   a value or a derivative of a whole model                   r from `TOLERANCES`

This rule is not used for:

    symmetric, adjoint, linear maps    compared by inner products of random vectors, relative to their
                                       summands; NaN and infinity pass
    compiled code                      compared by the norm of all outputs, in its least precise dtype
    several processes                  gradients and checksums are compared at each call
    independence of samples            a derivative has to be exactly zero, not small
    finite differences                 the errors are measured
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from hoglib._core.numerics.tolerances import TOLERANCES
from hoglib._core.torch_api.pytree import is_float

T = TypeVar("T")


class Rule(NamedTuple):
    """A tolerance r for each dtype: factor * eps^power, or factor * TOLERANCES[dtype].rtol if power
    is 0."""

    factor: float
    power: float = 1.0

    def of(self, dtype: torch.dtype) -> float:
        """r for a dtype."""
        if not self.power:
            return self.factor * TOLERANCES[dtype].rtol
        return float(self.factor * torch.finfo(dtype).eps ** self.power)


BITS, KERNELS, SUMS, DIGITS, DERIVATIVES = Rule(0), Rule(4), Rule(1e3), Rule(1, 0.5), Rule(1, 0)


def agree(
    a: Tensor | float,
    b: Tensor | float,
    rule: Rule,
    *,
    terms: Sequence[Tensor | float] = (),
    dtype: torch.dtype | None = None,
) -> bool:
    """Whether two computations of one quantity agree up to rounding. NaN equals NaN only for BITS.

    terms: The summands of a and b: after cancellation they are larger than a and b.
    dtype: The dtype of the computation, if it differs from the dtype of the results.
    """
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.shape != b.shape:
            return False
        a, b = a.detach(), b.detach()
        if rule is BITS or not (is_float(a) and is_float(b)):
            # exactly, except that NaN equals NaN
            return torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
    dtypes = {dtype, *(x.dtype for x in (a, b) if isinstance(x, Tensor))}
    r = max(rule.of(x) for x in dtypes if x is not None)
    off, *sizes = _largest_of(a - b, a, b, *terms)
    # False if the difference is NaN
    return off <= r * max(sizes)


def largest(x: Tensor | float) -> float:
    """The largest magnitude; 0 if there are no numbers."""
    return _largest_of(x)[0]


def _largest_of(*given: Tensor | float) -> list[float]:
    """The largest magnitude of each argument; tensors of one device and dtype are read at once."""
    found = [x.detach().abs().max() for x in given if isinstance(x, Tensor) and x.numel()]
    alike = len({(x.device, x.dtype) for x in found}) == 1
    values = iter(torch.stack(found).tolist() if alike else map(float, found))
    return [
        abs(x) if not isinstance(x, Tensor) else next(values) if x.numel() else 0.0 for x in given
    ]


_MEMO: Any = WeakIdKeyDictionary()  # object -> key -> result of find()


def memoize_on(owner: object, key: Hashable, find: Callable[[], T | None]) -> T | None:
    """The result of `find`, called once for each owner and key; a result of None is not kept.

    owner: The result is kept while this object lives.
    key: Everything else that the result depends on.
    """
    try:
        known: dict[Hashable, T] = _MEMO.setdefault(owner, {})
    except TypeError:  # the owner, such as a builtin function, has no weak references
        return find()
    if key not in known:
        found = find()
        if found is None:
            return None
        known[key] = found
    return known[key]
