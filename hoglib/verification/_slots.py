"""What a Function keeps for its backward: an input, an output, a copy of one, or what it made."""

from dataclasses import dataclass
from typing import Any

from hoglib.verification import _plain as plain
from hoglib.verification import _where as where
from hoglib.verification._copies import same
from hoglib.verification._plain import Run


@dataclass
class Slot:
    """One thing that backward reads."""

    label: str  # "ctx.saved_tensors[0]"
    kind: str  # "input", "output", "copy", "intermediate" or "gradient"
    what: str  # "input `x`"
    name: str = ""  # of the local variable that was saved
    place: where.Place | None = None
    type: str = "Tensor"
    lost: float = 0.0
    share: float = 0.0
    graphed: bool = False  # it has a graph, which forward built


def kind_of(value: Any, run: Run, names: tuple[str, ...]) -> tuple[str, str]:
    """What a slot holds: an input, an output, a copy of one of them, or something forward made."""
    found = plain.tensors(value)
    for i, x in enumerate(run.inputs):
        if any(t is x for t in found):
            return "input", f"input {_named(names, i)}"
    for k, y in enumerate(run.outputs):
        if any(t is y for t in found):
            if run.record.is_silent(y):
                return "intermediate", f"output {k}, which is marked non-differentiable"
            return "output", f"output {k}"
    for t in found:
        for i, x in enumerate(run.inputs):
            if t.numel() and same(t, x):
                return "copy", f"a copy of input {_named(names, i)}"
        for k, y in enumerate(run.outputs):
            if t.numel() and same(t, y):
                return "copy", f"a copy of output {k}"
    return "intermediate", "an intermediate that forward made"


def _named(names: tuple[str, ...], i: int) -> str:
    return names[i] if i < len(names) else str(i)
