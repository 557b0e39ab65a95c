"""How far an exact derivative may differ from a reference by rounding, for each dtype."""

from typing import NamedTuple

import torch


class Tolerance(NamedTuple):
    """The tolerance of a comparison.

        |a - b| <= atol + rtol |b|

    Attributes:
        atol: Absolute tolerance.
        rtol: Relative tolerance.
    """

    atol: float
    rtol: float


# dtype of the computation of a derivative -> tolerance
TOLERANCES = {
    **dict.fromkeys((torch.float64, torch.complex128), Tolerance(1e-10, 1e-8)),
    **dict.fromkeys((torch.float32, torch.complex64), Tolerance(1e-5, 1e-4)),
    torch.float16: Tolerance(1e-2, 1e-2),
    torch.bfloat16: Tolerance(3e-2, 3e-2),
}
