"""What an exact derivative is allowed to lose to rounding, by the dtype it was computed in."""

from typing import NamedTuple

import torch


class Tolerance(NamedTuple):
    """|a - b| <= atol + rtol |b|."""

    atol: float
    rtol: float


TOLERANCES = {
    torch.float64: Tolerance(1e-10, 1e-8),
    torch.complex128: Tolerance(1e-10, 1e-8),
    torch.float32: Tolerance(1e-5, 1e-4),
    torch.complex64: Tolerance(1e-5, 1e-4),
    torch.float16: Tolerance(1e-2, 1e-2),
    torch.bfloat16: Tolerance(3e-2, 3e-2),
}
