"""What an entry of the catalogue is, and how to write one in a few lines."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor


class Sample(NamedTuple):
    """Inputs for an op, named in words; `make(dtype, generator)` gives the positional arguments."""

    name: str
    make: Callable[[torch.dtype, Generator], tuple[Any, ...]]
    options: Mapping[str, Any] = {}


class Op(NamedTuple):
    """What is known of an op."""

    name: str
    theme: str
    formula: str
    function: Callable[..., Any]
    reference: Callable[..., Any]  # the same function of plain torch operations
    samples: tuple[Sample, ...]
    corners: Mapping[str, Sample] = {}  # matrix cells with a sample of their own
    smooth: bool = True  # without kinks; the derivatives of the others are those beside the kinks
    surrogate: bool = False  # its gradient is not the derivative of its value
    dtypes: tuple[torch.dtype, ...] = (torch.float64, torch.float32, torch.bfloat16)
    skips: Mapping[str, str] = {}  # matrix cell -> why it does not apply
    orders: int | None = None  # how often it can be differentiated; None: as often as one likes


Normal = Callable[..., Tensor]


def sample(name: str, build: Callable[[Normal], tuple[Any, ...]], **options: Any) -> Sample:
    """A sample from `build(normal)`, where normal(*shape) draws normally distributed numbers."""

    def normal(dtype: torch.dtype, generator: Generator, *shape: int) -> Tensor:
        wide = torch.complex128 if dtype.is_complex else torch.float64
        return torch.randn(shape, dtype=wide, generator=generator).to(dtype)

    def make(dtype: torch.dtype, generator: Generator) -> tuple[Any, ...]:
        return build(partial(normal, dtype, generator))

    return Sample(name, make, options)


WITH_COMPLEX = (torch.float64, torch.float32, torch.bfloat16, torch.complex128)

ONE_TENSOR = {"broadcasting": "one tensor, nothing to broadcast with"}
HAND_WRITTEN = dict.fromkeys(
    ["forward over forward", "compile"],
    "a hand-written Function for reading: it has a jvp, and no reference to change to",
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


def corners(
    build: Callable[..., tuple[Any, ...]] | None = None, **options: Any
) -> dict[str, Sample]:
    """Zero size and no dimensions, for an elementwise op whose tensors may all have one shape."""
    make = build or (lambda x: (x,))
    return {
        "zero size": sample("zero size", lambda n: make(n(2, 0, 3)), **options),
        "no dimensions": sample("no dimensions", lambda n: make(n()), **options),
    }


def unary(
    name: str,
    formula: str,
    function: Callable[..., Any],
    reference: Callable[..., Any],
    *,
    samples: tuple[Sample, ...] = (),
    theme: str = "pointwise",
    skips: Mapping[str, str] = {},
    **others: Any,
) -> Op:
    """An elementwise op of one tensor; its options are those of its first sample."""
    samples = samples or (sample("matrix", lambda n: (n(2, 3),)),)
    first = samples[0].options
    return Op(
        name,
        theme,
        formula,
        function,
        reference,
        samples,
        corners=corners(**first),
        skips={**ONE_TENSOR, **skips},
        **others,
    )


def matrices(**named: Mapping[str, Any]) -> tuple[Sample, ...]:
    """One sample of a matrix for each set of options; names in words."""
    return tuple(
        sample(name.replace("_", " "), lambda n: (n(2, 3),), **options)
        for name, options in named.items()
    )


def broadcast(*shapes: tuple[int, ...]) -> Sample:
    return sample("broadcast", lambda n: tuple(n(*shape) for shape in shapes))


def same_shapes(count: int) -> dict[str, Sample]:
    return {
        "zero size": sample("zero size", lambda n: tuple(n(2, 0) for _ in range(count))),
        "no dimensions": sample("no dimensions", lambda n: tuple(n() for _ in range(count))),
    }
