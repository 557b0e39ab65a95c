"""What a backward may read in the wrong place: the changes under which it might be right."""

from collections.abc import Iterator
from itertools import combinations
from typing import Any

from torch import Tensor

from hoglib.verification._plain import Run
from hoglib.verification._slots import kind_of

Repair = tuple[str, dict[str, Any], list[Tensor | None]]


def repairs(
    run: Run, grads: list[Tensor | None], live: list[int], names: tuple[str, ...]
) -> Iterator[Repair]:
    """In words, what is put on the context, and the incoming gradients."""
    slots = run.record.slots()
    for a, b in combinations(
        [label for label, value in slots.items() if isinstance(value, Tensor)], 2
    ):
        yield (
            f"Two tensors are exchanged, where they are saved or where they are read: with {a} in the "
            f"place of {b}, and the other way round,",
            slots | {a: slots[b], b: slots[a]}, grads,
        )  # fmt: skip
    for label, value in slots.items():
        if not isinstance(value, Tensor):
            continue
        what = kind_of(value, run, names)[1]
        for change, lacking, changed in _turned(value):
            yield (
                f"A {lacking} is missing, or one too many: with {label} ({what}) {change} in backward",
                slots | {label: changed}, grads,
            )  # fmt: skip
        for other, instead in _others(value, run, names):
            yield (
                f"The wrong tensor is read, or saved: with {other} in the place of {label} ({what})",
                slots | {label: instead}, grads,
            )  # fmt: skip
    for k, m in combinations(live, 2):
        exchanged = list(grads)
        exchanged[k], exchanged[m] = grads[m], grads[k]
        yield (
            f"backward takes the incoming gradients of outputs {k} and {m} for each other (they come "
            "in the order of forward's outputs): exchanged,",
            slots, exchanged,
        )  # fmt: skip


def _turned(value: Tensor) -> Iterator[tuple[str, str, Tensor]]:
    if value.dim() > 1 and value.shape[-1] == value.shape[-2]:
        yield "transposed", "transpose", value.mT
    if value.is_complex():
        yield "conjugated", "conj()", value.conj()


def _others(value: Tensor, run: Run, names: tuple[str, ...]) -> Iterator[tuple[str, Tensor]]:
    """The inputs and outputs that could stand in its place."""
    inputs = [(f"input {names[i] if i < len(names) else i}", x) for i, x in enumerate(run.inputs)]
    outputs = [(f"output {k}", y) for k, y in enumerate(run.outputs)]
    for name, tensor in (*inputs, *outputs):
        fits = isinstance(tensor, Tensor) and (tensor.shape, tensor.dtype) == (
            value.shape,
            value.dtype,
        )
        if fits and tensor is not value:
            yield name, tensor
