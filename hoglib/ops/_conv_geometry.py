"""Sizes, strides and padding of convolutions: from the arguments of a call to checked numbers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hoglib._core import validation
from hoglib.errors import ArgumentTypeError, ArgumentValueError

Size = int | Sequence[int]


@dataclass(frozen=True)
class Geometry:
    """How a kernel moves over an input; one number for each dimension of space."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    image: tuple[int, ...]  # of x, without batch and channels
    kernel: tuple[int, ...]

    @property
    def options(self) -> tuple[Any, ...]:
        """What torch's convolution takes after x, weight and bias."""
        none = [0] * len(self.kernel)
        return self.stride, self.padding, self.dilation, False, none, self.groups

    def repeat_groups(self, batch_size: int) -> "Geometry":
        """For that many independent convolutions side by side, in the channels."""
        return replace(self, groups=self.groups * batch_size)


def int_tuple(what: str, value: Any, rank: int, minimum: int) -> tuple[int, ...]:
    if not isinstance(value, tuple | list):
        return (validation.at_least(what, value, minimum),) * rank
    if len(value) not in (1, rank):
        raise ArgumentValueError(
            f"{what}: expected a whole number or {rank} of them, got {tuple(value)}."
        )
    numbers = tuple(validation.at_least(f"{what}[{i}]", n, minimum) for i, n in enumerate(value))
    return numbers * rank if len(numbers) == 1 else numbers


def resolve_padding(
    padding: Any, stride: tuple[int, ...], dilation: tuple[int, ...], kernel: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The zeros on both sides of each dimension, and those added at its end only."""
    none = (0,) * len(kernel)
    if not isinstance(padding, str):
        return int_tuple("padding", padding, len(kernel), 0), none
    if validation.one_of("padding", padding, ["same", "valid"]) == "valid":
        return none, none
    if any(step != 1 for step in stride):
        raise ArgumentValueError(
            f"padding: expected a number with stride {stride}, got 'same', which needs stride 1."
        )
    totals = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    return tuple(n // 2 for n in totals), tuple(n % 2 for n in totals)


def check_tensors(
    name: str, rank: int, x: Tensor, weight: Tensor, bias: Tensor | None, groups: int
) -> None:
    validation.differentiable("x", x)
    validation.differentiable("weight", weight)
    if bias is not None:
        validation.differentiable("bias", bias)
    fits = (
        x.dim() in (rank + 1, rank + 2)
        and weight.dim() == rank + 2
        and x.shape[-rank - 1] == weight.shape[1] * groups
        and weight.shape[0] % groups == 0
        and (bias is None or bias.shape == weight.shape[:1])
    )
    if not fits:
        sizes = ("L", "H, W", "D, H, W")[rank - 1]
        got = f"x {tuple(x.shape)}, weight {tuple(weight.shape)}"
        got += "" if bias is None else f", bias {tuple(bias.shape)}"
        raise ArgumentValueError(
            f"{name}: expected x [N, C, {sizes}] or [C, {sizes}], weight [O, C / groups, one size a "
            f"dimension] with O a multiple of groups, and bias [O] or None, got {got} and "
            f"groups={groups}."
        )
    dtypes = {t.dtype for t in (x, weight, bias) if t is not None}
    if len(dtypes) > 1 and not torch.is_autocast_enabled(x.device.type):
        raise ArgumentTypeError(
            f"{name}: expected x, weight and bias of one dtype, got x {x.dtype}, weight "
            f"{weight.dtype}" + ("" if bias is None else f", bias {bias.dtype}") + "; convert one."
        )


def check_kernel_fits(name: str, geometry: Geometry) -> None:
    for size, pad, dilation, kernel in zip(
        geometry.image, geometry.padding, geometry.dilation, geometry.kernel, strict=True
    ):
        if kernel < 1 or size + 2 * pad < dilation * (kernel - 1) + 1:
            raise ArgumentValueError(
                f"{name}: expected a kernel that fits into the padded input, got sizes "
                f"{geometry.image} padded by {geometry.padding}, kernel {geometry.kernel} and "
                f"dilation {geometry.dilation}; add padding, or use a smaller kernel."
            )
