"""Assertions for tests of code that is differentiated twice."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hoglib.verification import verify


def assert_double_differentiable(
    fn: Callable[..., Any] | type[torch.autograd.Function],
    inputs: Any,
    *,
    reference: Callable[..., Any] | None = None,
    orders: Sequence[int] | int | None = None,
    modes: Sequence[str] | str | None = None,
    surrogate: bool = False,
    **options: Any,
) -> None:
    """Fail unless `hog.verify(fn, inputs, ...)` finds the derivatives right.

    The arguments are those of `hoglib.verify`; what it warns of does not fail.
    Raises VerificationError, an AssertionError whose text is the report; TypeError and ValueError as
    `hoglib.verify` does.
    """
    __tracebackhide__ = True  # pytest shows the test's own line
    verify(
        fn, inputs, reference=reference, orders=orders, modes=modes, surrogate=surrogate, **options
    ).raise_if_failed()
