"""What an entry of the catalogue is, and how to write one in a few lines."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor


class SampleInput(NamedTuple):
    """Inputs for an op, named in words; `make(dtype, generator)` returns the positional arguments."""

    name: str
    make: Callable[[torch.dtype, Generator], tuple[Any, ...]]
    kwargs: Mapping[str, Any] = {}


class OpInfo(NamedTuple):
    """What is known of an op, as torch's own OpInfo."""

    name: str
    theme: str
    formula: str
    op: Callable[..., Any]
    ref: Callable[..., Any]  # the same function of plain torch operations
    samples: tuple[SampleInput, ...]
    corners: Mapping[str, SampleInput] = {}  # matrix cells with a sample of their own
    smooth: bool = True  # False: piecewise; the samples stay away from where the pieces meet
    surrogate: bool = False  # its gradient is not the derivative of its value
    dtypes: tuple[torch.dtype, ...] = (torch.float64, torch.float32, torch.bfloat16)
    skips: Mapping[str, str] = {}  # matrix cell -> why it does not apply
    max_order: int | None = None  # how often it can be differentiated; None: any number of times


Normal = Callable[..., Tensor]


def sample_input(
    name: str, build: Callable[[Normal], tuple[Any, ...]], **kwargs: Any
) -> SampleInput:
    """A sample from `build(normal)`, where normal(*shape) draws normally distributed numbers."""

    def normal(dtype: torch.dtype, generator: Generator, *shape: int) -> Tensor:
        drawn_in = torch.complex128 if dtype.is_complex else torch.float64
        return torch.randn(shape, dtype=drawn_in, generator=generator).to(dtype)

    def make(dtype: torch.dtype, generator: Generator) -> tuple[Any, ...]:
        return build(partial(normal, dtype, generator))

    return SampleInput(name, make, kwargs)


WITH_COMPLEX = (torch.float64, torch.float32, torch.bfloat16, torch.complex128)

ONE_TENSOR = {"broadcasting": "one tensor, nothing to broadcast with"}
HAND_WRITTEN = dict.fromkeys(
    ["forward over forward", "compile"],
    "a hand-written Function: it has a jvp, and no reference to run instead",
)
NEEDS_DIMENSIONS = {"no dimensions": "needs a dimension to act on"}
CHECKED_BY_REFERENCE = (
    "a surrogate gradient is no derivative of the value; compared with the reference"
)
SURROGATE = dict.fromkeys(
    (
        "first derivative",
        "second derivative",
        "third derivative",
        "forward mode",
        "batched gradients",
    ),
    CHECKED_BY_REFERENCE,
)


def elementwise_corners(
    build: Callable[..., tuple[Any, ...]] | None = None, **options: Any
) -> dict[str, SampleInput]:
    """Zero size and no dimensions, for an elementwise op whose tensors may all have one shape."""
    make = build or (lambda x: (x,))
    return {
        "zero size": sample_input("zero size", lambda n: make(n(2, 0, 3)), **options),
        "no dimensions": sample_input("no dimensions", lambda n: make(n()), **options),
    }


def unary_info(
    name: str,
    formula: str,
    op: Callable[..., Any],
    ref: Callable[..., Any],
    *,
    samples: tuple[SampleInput, ...] = (),
    theme: str = "pointwise",
    skips: Mapping[str, str] = {},
    **others: Any,
) -> OpInfo:
    """An elementwise op of one tensor; its options are those of its first sample."""
    samples = samples or (sample_input("matrix", lambda n: (n(2, 3),)),)
    first = samples[0].kwargs
    return OpInfo(
        name,
        theme,
        formula,
        op,
        ref,
        samples,
        corners=elementwise_corners(**first),
        skips={**ONE_TENSOR, **skips},
        **others,
    )


def matrix_samples(**named: Mapping[str, Any]) -> tuple[SampleInput, ...]:
    """One sample of a matrix for each set of keyword arguments; names in words."""
    return tuple(
        sample_input(name.replace("_", " "), lambda n: (n(2, 3),), **options)
        for name, options in named.items()
    )


def broadcasting_sample(*shapes: tuple[int, ...]) -> SampleInput:
    return sample_input("broadcast", lambda n: tuple(n(*shape) for shape in shapes))


def same_shape_corners(count: int) -> dict[str, SampleInput]:
    return {
        "zero size": sample_input("zero size", lambda n: tuple(n(2, 0) for _ in range(count))),
        "no dimensions": sample_input("no dimensions", lambda n: tuple(n() for _ in range(count))),
    }
