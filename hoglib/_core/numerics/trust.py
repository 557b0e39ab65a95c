"""A way to compute something is compared with another one at its first call, and trusted from then on.

    max |a - b| <= r max(|a|, |b|, |terms|)        r by the dtype, and by how a and b were computed

    BITS          the same run once more                                     r = 0
    KERNELS       the same operations, of other shapes or by other kernels   r = 4 eps
    SUMS          sums in another order                                      r = 1000 eps
    DIGITS        another formula, which may cancel                          r = sqrt(eps)
    DERIVATIVES   a value or a derivative of a whole model                   r that of `TOLERANCES`

Not compared by this rule are: inner products of random vectors, which are small beside their terms, and
where what is not finite passes (symmetric, adjoint and linear maps); compiled code, of which the least
precise dtype inside decides, and the norm of all outputs; gradients and checksums of several processes,
at each call; a part that has to be zero and not small (samples that are apart); and derivatives with
differences, whose errors are measured.
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
    """r = factor eps^power, of the dtype; with the power 0 factor times its entry in TOLERANCES."""

    factor: float
    power: float = 1.0

    def of(self, dtype: torch.dtype) -> float:
        """r."""
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
    """Whether two computations of the same are the same, up to rounding; not so for NaN on one side.

    terms: what they were added up from, which is larger where it cancels. dtype: that they were
    computed in, if it is not theirs.
    """
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.shape != b.shape:
            return False
        a, b = a.detach(), b.detach()
        if rule is BITS or not (is_float(a) and is_float(b)):
            return torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
    dtypes = {dtype, *(x.dtype for x in (a, b) if isinstance(x, Tensor))}
    r = max(rule.of(x) for x in dtypes if x is not None)
    off, *sizes = _largest_of(a - b, a, b, *terms)
    return off <= r * max(sizes)


def largest(x: Tensor | float) -> float:
    """The largest magnitude; 0 of no numbers."""
    return _largest_of(x)[0]


def _largest_of(*given: Tensor | float) -> list[float]:
    """The largest magnitudes, of tensors of one device and dtype in one read, for which it waits."""
    found = [x.detach().abs().max() for x in given if isinstance(x, Tensor) and x.numel()]
    alike = len({(x.device, x.dtype) for x in found}) == 1
    values = iter(torch.stack(found).tolist() if alike else map(float, found))
    return [
        abs(x) if not isinstance(x, Tensor) else next(values) if x.numel() else 0.0 for x in given
    ]


_FOUND: Any = WeakIdKeyDictionary()  # object -> key -> what was found


def found_once(owner: object, key: Hashable, find: Callable[[], T | None]) -> T | None:
    """The first result of `find` that is not None, kept for an object as long as it lives.

    key: all else that the result depends on.
    """
    try:
        known: dict[Hashable, T] = _FOUND.setdefault(owner, {})
    except TypeError:  # such as a builtin function, which has no weak references
        return find()
    if key not in known:
        found = find()
        if found is None:
            return None
        known[key] = found
    return known[key]
