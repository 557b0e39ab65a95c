"""Assertions for tests of second derivatives."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hoglib._core.numerics.tolerances import TOLERANCES, Tolerance
from hoglib.verification import verify

__all__ = ["TOLERANCES", "Tolerance", "assert_double_differentiable"]


def assert_double_differentiable(
    fn: Callable[..., Any] | type[torch.autograd.Function],
    inputs: object,
    *,
    reference: Callable[..., Any] | None = None,
    orders: Sequence[int] | int | None = None,
    modes: Sequence[str] | str | None = None,
    surrogate: bool = False,
    **options: Any,
) -> None:
    r"""Fail unless `hoglib.verify` finds the derivatives of a function right.

        report = hog.verify(fn, inputs, ...)        report.raise_if_failed()

    Warnings of the report do not fail.

    Args:
        fn: A custom Function, its `apply`, an `nn.Module`, or any function of tensors.
        inputs: Its inputs, a tensor or a tuple; float inputs are checked in float64.
        reference: fn in plain torch operations, to compare values and derivatives with. Default: none.
        orders: The orders of derivatives to check. Default: the first and the second.
        modes: The modes to check: "rr", "fr", "rf", "ff". Default: all modes that fn offers.
        surrogate: Whether the gradient differs from the derivative on purpose. Default: False.
        options: Further options of `hoglib.verify`.
    Returns:
        None.
    Raises:
        VerificationError: an AssertionError with the report as its text.
        TypeError, ValueError: for wrong arguments, as `hoglib.verify`.
    Example:
        >>> hog.testing.assert_double_differentiable(torch.tanh, torch.tensor([0.5]))
        >>> forgets = lambda x: x**2 + (x - x.detach())  # a wrong gradient
        >>> hog.testing.assert_double_differentiable(forgets, torch.tensor([0.5]))
        Traceback (most recent call last):
            ...
        hoglib.errors.VerificationError: ...
    """
    __tracebackhide__ = True  # pytest shows the test's own line
    verify(
        fn, inputs, reference=reference, orders=orders, modes=modes, surrogate=surrogate, **options
    ).raise_if_failed()
