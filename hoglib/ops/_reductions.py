"""The reductions of torch's losses, with the words that they had before."""

from torch import Tensor
from torch.nn import _reduction

NONE, MEAN, SUM = 0, 1, 2


def number(reduction: str, size_average: bool | None = None, reduce: bool | None = None) -> int:
    """NONE, MEAN or SUM; the older words come before the newer one. Raises torch's ValueError."""
    if size_average is not None or reduce is not None:
        return _reduction.legacy_get_enum(size_average, reduce)
    return _reduction.get_enum(reduction)


def reduced(loss: Tensor, number: int) -> Tensor:
    if number == NONE:
        return loss
    return loss.mean() if number == MEAN else loss.sum()
