"""What an entry of the catalogue is, and how to write one in a few lines."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor

from hoglib import ops

CORNERS = ("zero size", "no dimensions", "broadcasting")  # matrix cells with a sample of their own


class SampleInput(NamedTuple):
    """Inputs for an op, named in words; `make(dtype, generator)` returns the positional arguments."""

    name: str
    make: Callable[[torch.dtype, Generator], tuple[Any, ...]]
    kwargs: Mapping[str, Any] = {}


class OpInfo(NamedTuple):
    """What is known of an op, as torch's own OpInfo."""

    name: str
    theme: str
    op: Callable[..., Any]
    ref: Callable[..., Any]  # the same function of plain torch operations
    samples: tuple[SampleInput, ...] = ()
    corners: Mapping[str, SampleInput] = {}
    smooth: bool = True  # False: piecewise; the samples stay away from where the pieces meet
    surrogate: bool = False  # its gradient is not the derivative of its value
    dtypes: tuple[torch.dtype, ...] = (torch.float64, torch.float32, torch.bfloat16)
    skips: Mapping[str, str] = {}  # matrix cell -> why it does not apply
    max_order: int | None = None  # how often it can be differentiated; None: any number of times

    def on(
        self, *samples: SampleInput, skips: Mapping[str, str] = {}, **others: Any,
    ) -> "OpInfo":  # fmt: skip
        """The entry with samples, and with what else is known of the op.

        others: fields, and samples of single cells, `zero_size=`, `no_dimensions=`, `broadcasting=`:
        a sample, or what builds one with the keyword arguments of the first sample.
        """
        samples = samples or self.samples
        options = samples[0].kwargs
        corners = {cell: old._replace(kwargs=options) for cell, old in self.corners.items()}
        for cell in CORNERS:
            if new := others.pop(cell.replace(" ", "_"), None):
                ready = isinstance(new, SampleInput)
                corners[cell] = new if ready else sample_input(cell, new, **options)
        return self._replace(
            samples=samples, corners=corners, skips={**self.skips, **skips}, **others
        )


Normal = Callable[..., Tensor]
Build = Callable[[Normal], tuple[Any, ...]]


def op_info(
    name: str, theme: str, ref: Callable[..., Any], op: Callable[..., Any] | None = None
) -> OpInfo:
    """An entry without samples; its op is by default the one of that name, up to a comma."""
    return OpInfo(name, theme, op or getattr(ops, name.split(",")[0]), ref)


def sample_input(name: str, build: Build, **kwargs: Any) -> SampleInput:
    """A sample from `build(normal)`, where normal(*shape) draws normally distributed numbers."""

    def normal(dtype: torch.dtype, generator: Generator, *shape: int) -> Tensor:
        drawn_in = torch.complex128 if dtype.is_complex else torch.float64
        return torch.randn(shape, dtype=drawn_in, generator=generator).to(dtype)

    def make(dtype: torch.dtype, generator: Generator) -> tuple[Any, ...]:
        return build(partial(normal, dtype, generator))

    return SampleInput(name, make, kwargs)


WITH_COMPLEX = (torch.float64, torch.float32, torch.bfloat16, torch.complex128)

ONE_TENSOR = {"broadcasting": "one tensor, nothing to broadcast with"}
NEEDS_DIMENSIONS = {"no dimensions": "needs a dimension to act on"}
CHECKED_BY_REFERENCE = (
    "a surrogate gradient is no derivative of the value; compared with the reference"
)
SURROGATE = dict.fromkeys(
    ("first derivative", "second derivative", "third derivative"), CHECKED_BY_REFERENCE
)


def normals(*shapes: tuple[int, ...]) -> Build:
    """Normally distributed tensors of these shapes."""
    return lambda n: tuple(n(*shape) for shape in shapes)


def elementwise_info(
    name: str, ref: Callable[..., Any], op: Callable[..., Any] | None = None, *,
    theme: str = "pointwise", tensors: int = 1, numbers: tuple[float, ...] = (),
) -> OpInfo:  # fmt: skip
    """An elementwise op of some tensors that may have one shape, and of numbers after them."""

    def build(*shape: int) -> Build:
        return lambda n: (*normals(*[shape] * tensors)(n), *numbers)

    return op_info(name, theme, ref, op).on(
        sample_input("matrix", build(2, 3)),
        zero_size=build(2, 0, 3),
        no_dimensions=build(),
        skips=ONE_TENSOR if tensors == 1 else {},
    )


def matrix_samples(**named: Mapping[str, Any]) -> tuple[SampleInput, ...]:
    """One sample of a matrix for each set of keyword arguments; names in words."""
    return tuple(
        sample_input(name.replace("_", " "), normals((2, 3)), **options)
        for name, options in named.items()
    )
