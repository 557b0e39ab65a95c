"""`hoglib graph`: the picture of one function, with inputs of the command line or its own."""

import contextlib
import sys
from collections.abc import Sequence
from typing import Any

import torch

from hoglib._core.source_location import error_text
from hoglib.cli.outcomes import NOT_RUN, RIGHT, complain
from hoglib.cli.verify import find
from hoglib.drawing.picture import graph
from hoglib.errors import ArgumentValueError


def run(
    target: str, inputs: Sequence[str], output: str | None, *, seed: int = 0, **options: Any
) -> int:
    """Draw, and return the exit status; the text on stdout without an output."""
    try:
        with contextlib.redirect_stdout(sys.stderr):  # what the user's code prints is no DOT
            targets, _ = find(target, inputs)
            if len(targets) != 1:
                names = ", ".join(one.name for one in targets)
                raise ArgumentValueError(
                    f"{target}: expected one Function, got {names}; name one, {target}:Name."
                )
            torch.manual_seed(seed)
            samples = targets[0].inputs()
            several = isinstance(samples, list) and samples and isinstance(samples[0], tuple)
            picture = graph(targets[0].fn, samples[0] if several else samples, **options)
            if output is not None:
                picture.save(output)
    except (Exception, SystemExit) as error:
        complain(error_text(error))
        return NOT_RUN
    for fault in picture.faults:
        print(f"fault: {fault}", file=sys.stderr)
    if output is None:
        print(picture, end="")
    return RIGHT
