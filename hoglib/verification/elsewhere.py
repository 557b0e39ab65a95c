"""The second derivative at other values than the inputs, where a Function may take another branch.

A backward may be cut for some values only: `relu` of a saved intermediate, the absolute value of a
matrix that is positive at the inputs. Values of other signs and sizes may also lie outside of its
domain, so that only a second derivative counts that is wrong where the first one is right.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from math import isnan

import torch
from torch import Tensor

from hoglib._core.element_differences import random_like
from hoglib.verification import call as calls
from hoglib.verification import fix_hints
from hoglib.verification.derivatives import Derivatives
from hoglib.verification.options import NATURAL, Options
from hoglib.verification.report import MODES, Row
from hoglib.verification.subject import Subject

NAME = "second derivative: other values"
WHERE = (
    "At values of other signs and sizes than the inputs, where the first derivative is right, {wrong}. "
    "{causes}"
)
NOT_THERE = "it, or its first derivative, is not known at values of other signs and sizes."


def other_points(subject: Subject) -> Iterator[list[Tensor]]:
    """Points with other signs and sizes at which the function and its gradient are finite."""
    signed = [torch.where(x == 0, 1.0, random_like(x, subject.random)) for x in subject.x]
    for size in (30.0, 0.03):
        point = [size * s * x.abs() for s, x in zip(signed, subject.x, strict=True)]
        with suppress(Exception):  # it may refuse them
            values = subject.map(*point)
            ones = list(map(torch.ones_like, values))
            results = [*values, *calls.gradient(subject.map, len(point))(*point, *ones)]
            if all(bool(y.isfinite().all()) for y in results):
                yield point


def wrong_rows(subject: Subject, options: Options) -> list[Row] | None:
    """The row of a second derivative that is wrong at other values, and those of its causes; empty
    where none is, None where nothing could be judged."""
    judged = False
    for x in other_points(subject):
        derivatives = Derivatives(subject, [x], options)
        with suppress(Exception):  # it may refuse what the user did not pass
            first = () if options.surrogate else derivatives.first_order()
            if any(row.status in ("warn", "fail") for row in first):
                continue
            failed = [row for row in derivatives.higher_order(2) if row.status == "fail"]
            found = [derivatives.found[row.name] for row in failed]
            if any(one.raised is not None or isnan(one.got) for one in found):
                continue
            judged = True
            causes_of = fix_hints.attribution_rows(subject, x, derivatives.found) if failed else ()
            causes = [row for row in causes_of if row.status == "fail"]
            # without a known cause, what backward calls may have no derivative there
            if failed and not all(row.name.endswith(fix_hints.UNSEEN) for row in causes):
                return [failed[0], *causes]
    return [] if judged else None


def rows(subject: Subject, options: Options) -> Iterator[Row]:
    """The row on the second derivative at other values."""
    bounds = options.bounds._replace(natural=NATURAL)
    options = replace(options, orders=(1, 2), modes=(MODES["rr"],), bounds=bounds)
    wrong = wrong_rows(subject, options)
    if wrong is None:
        yield Row(NAME, "skip", None, NOT_THERE)
    elif not wrong:
        yield Row(NAME, "pass")
    else:
        failed, *causes = wrong
        words = " ".join(one.text for one in causes[:2])
        text = WHERE.format(wrong=failed.text.rstrip("."), causes=words)
        yield Row(NAME, "fail", failed.error, text)
