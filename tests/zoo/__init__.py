"""The zoo: one Function for each mistake that people make, and the right one beside it.

`ZOO` is every mistake by itself; `tests.zoo.published` has Functions as published code writes them.
Which derivatives of them are wrong is shown in `tests/verification/test_zoo_truth.py`, by differences alone.
"""

from tests.zoo import context, cuts, gradients, in_place, layout, outputs, precision, saved
from tests.zoo.exhibit import Exhibit

ZOO: list[Exhibit] = [
    exhibit
    for theme in (saved, cuts, in_place, gradients, layout, precision, context, outputs)
    for exhibit in theme.EXHIBITS
]

__all__ = ["ZOO", "Exhibit"]
