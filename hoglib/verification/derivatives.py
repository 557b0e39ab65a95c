"""Check the derivatives of orders one to four, in each mode that the function offers: one row each.

A derivative of order k is the derivative, in reverse or forward mode, of the map that computes order
k - 1 (`stage`). It is compared with differences of this map. So each order relies on the one below, and
the first on the values.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from math import isnan
from typing import Any, final

import torch
from torch import Tensor

from hoglib._core.numerics.element_differences import TensorMap, max_abs, random_like
from hoglib._core.runtime.source_location import (
    SourceLine,
    format_error,
    innermost_line,
    is_user_code,
)
from hoglib._core.substrate.autograd import note_not_finite
from hoglib._core.torch_api import torch_internals
from hoglib._core.torch_api.torch_internals import backward_rule
from hoglib.verification import function_rules, maps
from hoglib.verification.comparison import Comparer, Discrepancy, Options, Target, wrong_elements
from hoglib.verification.maps import Tensors
from hoglib.verification.report import MODES, NOT_COMPARED, ORDINALS, Row, Rows, finding
from hoglib.verification.subject import Subject

FIRST = "first derivative: reverse"
COMPOSED = (
    "That is with an incoming gradient that depends on the inputs, as in a network; with another "
    "one it is right. Does backward differentiate by saved tensors which the incoming gradient was "
    "computed from, too? Differentiate by views of them, `x.view_as(x)`."
)
IN_PARTS = (
    "That is with incoming gradients that are parts of one tensor, as those of outputs that are "
    "stacked; with others it is right. Does backward read the memory around them (as_strided)?"
)
DECLARE = (
    "If that is on purpose, as in a straight-through gradient, pass surrogate=True, or set "
    "`surrogate = True` on the class."
)
CONSTANT = (
    "backward returns None for it. If the function takes it for a constant, pass it without "
    "requires_grad, or detached."
)
REFUSES = "Verify it after a map into its domain, such as `lambda A: F.apply((A + A.T) / 2)`."
NOWHERE = "Do the inputs lie on a kink, at the edge of the domain, or are they too large?"
UNKNOWN = (
    "Is it a kink, or the edge of the domain? If one is a constant, such as a mask or a target, set "
    "requires_grad on the others."
)
BLANK = "Do the values jump, as the signs of eigenvectors do?"
JVP_TWICE = "jvp inside jvp: torch returns zero for the derivative of a custom Function's own jvp."
NOT_OFFERED = "it is not offered: {which} without a jvp staticmethod, or with an empty one."


Like = Callable[[Sequence[Tensor]], list[Tensor]]  # random tensors with the shapes of given ones


def stage(first: Target, mode: str, order: int, like: Like, by_torch_func: bool = False) -> Target:
    """The map that computes the derivative of order - 1 in a mode; for order 1 the map itself.

    An inner reverse level gives the gradient, a map of (x, u); an inner forward level the tangent, a
    map of (x, t). Higher orders take the gradient of this map again, or the tangent for "ff".
    torch.func computes tangents with by_torch_func, and in forward over forward, because dual tensors
    do not nest.

    like: makes random u and t.
    """
    at = first
    for k in range(1, order):
        f, x, rows, columns, *_ = at
        which = f"{ORDINALS[k]} " if k > 1 else ""
        # k = 1 is the inner level, the second letter of the mode
        if mode[1] == "r" if k == 1 else mode != "ff":
            what = f"the {which}derivative" if which else "the gradient"
            new = [f"the gradient of {row}" for row in rows]
            rows = [f"{what} by {name}" for name in columns]
            f, x = maps.gradient(f, len(x)), [*x, *like(f(*x))]
        else:
            func = by_torch_func or mode[0] == "f"
            new = [f"the {which}tangent of {name}" for name in columns]
            rows = [f"the {'derivative' if which else 'tangent'} of {row}" for row in rows]
            f, x = maps.tangent(f, len(x), by_torch_func=func), [*x, *like(x)]
        at = Target(f, x, rows, [*columns, *new])
    return at


@final
class Derivatives:
    """The derivative rows of one subject, at a few points.

    Attributes:
        found: The comparison behind each row, by the name of the row.
    """

    def __init__(self, subject: Subject, points: Sequence[list[Tensor]], options: Options) -> None:
        self.subject, self._points, self._options = subject, points, options
        self._comparer = Comparer(options, subject.random, subject.dtype, subject.precision.half)
        self.found: dict[str, Discrepancy] = {}

    def of(self, subject: Subject) -> "Derivatives":
        """The derivatives of another subject at the same points."""
        return Derivatives(subject, self._points, self._options)

    def are_right(self) -> bool:
        """Whether first and second derivatives are correct; kinks do not count."""
        if not self._options.surrogate:
            first = (self._comparer.compared([self._first(x)], "r") for x in self._points)
            if any(found.wrong for found in first):
                return False
        # skipped modes do not count, but at least one mode must have been compared
        second = [row.status for row in self.higher_order(2)]
        return "pass" in second and not {"fail", "warn"}.intersection(second)

    def first_order(self) -> Rows:
        """The row on kinks at the first point, and the rows of the first derivative in both modes."""
        subject = self.subject
        at = [self._comparer.with_differences(self._first(x)) for x in self._points]
        yield self._kinks(at[0])
        row = self._judged(FIRST, self._comparer.compared(at, "r"))
        result = self.found[FIRST]
        words, column = [row.text], result.worst.column
        if row.status == "fail":
            words = [f"{row.text.rstrip('.')}.", *self._where()]
            if result.raised is None:
                with suppress(Exception):  # a failing description must not hide the row
                    at_inputs = (subject.map, subject.x, result.worst.row, column)
                    words.append(wrong_elements(*at_inputs, subject.random))
                looks = describe_forward(subject, column) or DECLARE
                words.append(CONSTANT if self._is_none(column) else looks)
        elif row.status == "warn":
            words.append(self.describe_steps())
        yield row._replace(text=" ".join(filter(None, words)))
        # by default, try forward mode unless a Function declares no jvp
        asked = self._options.modes
        wanted = subject.offers_forward is not False if asked is None else "f" in "".join(asked)
        if wanted:
            result = self._comparer.compared(at, "f")
            row = self._judged("first derivative: forward", result, may_lack=True)
            rules = sorted(f.__name__ for f in subject.functions if function_rules.offers_jvp(f))
            if row.status == "fail" and rules:
                row = row._replace(text=f"the jvp of {', '.join(rules)} is wrong: {row.text}")
            yield row

    def _is_none(self, column: int) -> bool:
        """Whether input `column` gets None as its gradient."""
        with suppress(Exception):
            leaves, values = maps.at_leaves(self.subject.map, self._points[-1])
            live = [y for y in values if y.requires_grad]
            return torch_internals.gradients(live, leaves)[column] is None
        return False

    def describe_steps(self) -> str:
        """If no first derivative could be compared: a sentence if forward is a step function or rounds;
        otherwise ""."""
        if self.found[FIRST].checked:
            return ""
        columns = range(len(self.subject.x))
        return next(filter(None, (describe_forward(self.subject, j) for j in columns)), "")

    def higher_order(self, order: int) -> Rows:
        """The rows of the second, third or fourth derivative, one for each mode."""
        asked = self._options.modes
        for mode in MODES if asked is None else asked:
            name = f"{ORDINALS[order]} derivative: {MODES[mode]}"
            reason = self._skipped(mode)
            if reason:
                missing = asked is not None and self.subject.offers_forward is False
                if missing:
                    self.found[name] = Discrepancy(missing=reason)
                yield Row(name, "fail" if missing else "skip", None, reason)
                continue
            row = self._row(name, mode, order)
            before = self.found.get(name)
            if mode == "rf" and (before is None or before.raised is not None):
                # torch raises in reverse over some tangents (softmax); torch.func does not
                again = self._row(name, mode, order, by_torch_func=True)
                if name in self.found and self.found[name].raised is None:
                    row = again
                elif before is not None:
                    self.found[name] = before
            yield row

    def _row(self, name: str, mode: str, order: int, *, by_torch_func: bool = False) -> Row:
        # a generator: all random draws for one point come before the draws for the next
        at = (
            stage(self._first(x), mode, order, self._like, by_torch_func=by_torch_func)
            for x in self._points
        )
        try:
            result = self._comparer.compared(at, mode)
        except Exception as error:
            result = Discrepancy.of_error(error)
        row = self._judged(name, result, may_lack=mode != "rr")
        if mode != "rr" or order != 2:
            return row
        if isnan(self.found[name].worst.got):
            row = row._replace(text=f"{row.text}{self._nan_origin()}")
        first = self.found.get(FIRST)
        # a gradient that is no derivative (wrong, or a surrogate) is not comparable in a composition
        derivative = not self._options.surrogate and not (first is not None and first.wrong)
        return self._in_composition(row) if row.status == "pass" and derivative else row

    def _in_composition(self, row: Row) -> Row:
        """The row; or a failed row if the second derivative is wrong in a composition: if the incoming
        gradient depends on the inputs, as in a network, or if the gradients of several outputs are
        views of one tensor."""
        subject, x = self.subject, self._points[-1]
        rows = [f"the gradient by {name}" for name in subject.names]
        with suppress(Exception):  # the row has passed with constant incoming gradients: keep it
            values = subject.map(*x)
            weights = self._like(values)
            tried: list[tuple[TensorMap, str]] = [(subject.map, COMPOSED)]
            tried += [(f, IN_PARTS) for f in maps.stack_outputs(subject.map, values)]
            for map_, where in tried:
                f = maps.gradient_of_composition(map_, values, weights)
                result = self._comparer.compared([Target(f, x, rows, subject.names)], "r")
                if result.wrong and result.raised is None:
                    self.found[row.name] = result
                    judged = self._judged(row.name, result)
                    return judged._replace(text=f"{judged.text} {where}")
        return row

    def _nan_origin(self) -> str:
        """A sentence on the operation where a second derivative becomes NaN, or ""."""
        f = self.subject.map
        for x in self._points:
            with suppress(Exception):  # the row remains without a line
                if origin := nan_operation(f, x, self._like(f(*x)), self._like(x)):
                    return f" NaN arises in {origin}."
        return ""

    def _like(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [random_like(x, self.subject.random) for x in tensors]

    def _first(self, x: list[Tensor]) -> Target:
        return Target(self.subject.map, x, self.subject.rows, self.subject.names)

    def _judged(self, name: str, result: Discrepancy, *, may_lack: bool = False) -> Row:
        """The row of a comparison. may_lack: the mode has a forward level. An error in it is a fault
        only if every Function declares a jvp, or the user asked for modes."""
        text = "" if result.raised is None else f"it raised {format_error(result.raised)}"
        if text and may_lack and not (self.subject.offers_forward or self._options.modes):
            return Row(name, "skip", None, f"it is not offered: {text}.")
        self.found[name] = result
        if text:
            text = f"{text}." if may_lack else f"{name.split(':')[0]} is missing: {text}"
            return Row(name, "fail", None, text)
        if result.wrong:
            others = self._labels(result.faulty - {result.worst.column})
            also = f" Also wrong: by {', '.join(others)}." if others else ""
            return Row(name, "fail", result.error, f"{result.wrong}{ratio(result)}.{also}")
        if not (result.unknown or result.blank):
            return Row(name, "pass", result.error)
        why = f" ({result.problem})" if result.problem else ""
        nothing = f"{NOT_COMPARED}: finite differences do not converge{why}."
        error: float | None = result.error
        if result.unknown and not result.checked:
            text, error = f"{nothing} {NOWHERE}", None
            if "Error: " in result.problem:  # forward raised while differences were taken
                text = f"{NOT_COMPARED}: forward refuses points near the inputs{why}. {REFUSES}"
        elif result.unknown:
            text = f"by {', '.join(self._labels(result.unknown))} {nothing} {UNKNOWN}"
        else:
            text = f"of {', '.join(sorted(result.blank))} {nothing} {BLANK}"
        return Row(name, "warn", error, text)

    def _labels(self, columns: Iterable[int]) -> list[str]:
        names = self.subject.names
        return [names[j] if j < len(names) else f"argument {j}" for j in sorted(columns)]

    def _skipped(self, mode: str) -> str:
        """The reason for skipping a mode; "" if it is compared."""
        subject = self.subject
        if "f" not in mode:
            return ""
        if subject.offers_forward is False:
            rules = subject.functions
            lacking = sorted(f.__name__ for f in rules if not function_rules.offers_jvp(f))
            return NOT_OFFERED.format(which=", ".join(lacking))
        return JVP_TWICE if mode == "ff" and subject.functions else ""

    def _kinks(self, at: Target) -> Row:
        """The row on kinks: the slopes on both sides of the inputs differ."""
        if self.subject.precision.half is not None:
            return Row("kinks", "skip", None, "not looked for in half precision.")
        kinked = {
            f"of {self.subject.rows[i]} by {self.subject.names[one.column]}"
            for one in at.slopes
            for i, kink in enumerate(one.kinks)
            if bool(kink.any())
        }
        text = kinked and (
            f"the inputs lie on a kink {'; '.join(sorted(kinked))}: the slopes to either side differ, "
            "and the gradient there is a convention. It was checked near the inputs."
        )
        return finding("kinks", text or "", "warn")

    def _where(self) -> Iterator[str]:
        """The first lines of all backwards: one of them is at fault."""
        for function in sorted(self.subject.functions, key=lambda f: f.__name__):
            code = getattr(inspect.unwrap(backward_rule(function)), "__code__", None)
            if code is not None and is_user_code(code.co_filename):
                first = code.co_firstlineno
                below = [k for *_, k in code.co_lines() if k is not None and k > first]
                line = SourceLine(code.co_filename, min(below, default=first))
                yield f"{function.__name__}.backward starts at {line}."


def ratio(result: Discrepancy) -> str:
    """The ratio of the worst number to the expected one, in words."""
    got, expected = result.worst.got, result.worst.expected
    if not expected or isnan(got):
        return ""
    share = got / expected
    if abs(share) < 1e-6:
        return " (all of it is missing)"
    if abs(share + 1) < 1e-4:
        return " (the sign is wrong)"
    return f" ({share:.4g} times the expected value)"


def nan_operation(f: TensorMap, x: Tensors, u: Tensors, w: Tensors | None = None) -> str:
    """The origin of the first infinite or NaN number in the gradient G of <u, f> or, with w, in the
    gradient of <w, G>: a custom Function's backward, or the derivative of a line of user code; "" if
    unknown. An infinite number counts, because multiplied by zero it becomes NaN later."""
    with torch_internals.record_backward_origins():
        leaves, results = maps.at_leaves(f, x)
        weights = u
        if w is not None:
            results, weights = maps.grad(results, leaves, u, create_graph=True), w
    nodes: list[Any] = []
    note_not_finite(results, nodes)
    maps.grad(results, leaves, weights)  # the hooks of note_not_finite fill `nodes`
    if not nodes:
        return ""
    node = nodes[0]
    function = torch_internals.custom_function(node)
    if function is not None:
        return f"{function.__name__}.backward"
    line = innermost_line(torch_internals.made_at(node))
    return f"the derivative of {line}" if line else ""


# Does a wrong first derivative look like a surrogate gradient? The values of forward show it.
#
#     round(x), sign(x), x > 0        no derivative but zero; the gradient goes straight through
#     x, with a changed gradient      a reversal, a scaling, a clipping of the gradient

NEAR = 1e-6  # relative move of the input: a step function changes at few elements only

STEP = ", so that its derivative is zero almost everywhere."
IDENTITY = "is the identity, and the gradient is a changed one (reversed, scaled, clipped)."
CLIPS = "clips: its output is the input, or does not depend on it."
DIGITS = "rounds its input to fewer digits (quantisation)."
DECLARED = "declare it: pass surrogate=True, or set `surrogate = True` on the class."


def without_option(text: str) -> str:
    """Advice without `verify`'s option, which entry points and `audit` lack."""
    return text.replace("pass surrogate=True, or ", "")


def describe_forward(subject: Subject, column: int) -> str:
    """A sentence on forward if, as a function of this input, it often has a surrogate gradient (a step,
    the identity, rounding, clipping); otherwise ""."""
    f = subject.map.unscaled()
    x = f.point[column]
    moved = x + NEAR * torch.where(x == 0, 1.0, x)
    try:
        values = f(*f.point)
        near = f(*f.point[:column], moved, *f.point[column + 1 :])
    except Exception:  # fn may refuse inputs that the user did not pass
        return ""
    for y, z in zip(values, near, strict=True):
        if found := _looks_like(x, y.detach(), moved, z.detach()):
            return f"{found} If its gradient is another one on purpose, {DECLARED}"
    return ""


def _looks_like(x: Tensor, y: Tensor, moved: Tensor, z: Tensor) -> str:
    """The kind of a function with x -> y and moved -> z, in words; "" for any other kind."""
    still, alike, values = y == z, y.shape == x.shape, set(y.unique().tolist())
    share = float(still.double().mean())
    flat = share > 0.9  # the output is constant near the inputs
    through = (y == x) & (z == moved) if alike else torch.zeros_like(still)
    sign = flat and alike and -1.0 in values and bool(((y == x.sign()) | (x == 0)).all())
    # the first match counts: special kinds come before general ones
    kinds = (
        (alike and bool(through.all()), IDENTITY),
        (sign, f"takes the sign of its input{STEP}"),
        (flat and values <= {0.0, 1.0}, f"is a step (a threshold, a comparison, an argmax){STEP}"),
        (flat and _is_on_a_grid(sorted(values)), f"rounds its input{STEP}"),
        (flat, f"is a step function (rounding, quantisation, a choice){STEP}"),
        (share > 0 and bool((still | through).all()), CLIPS),
        (alike and 0 < max_abs(y - x) < 0.01 * max_abs(x), DIGITS),
    )
    return next((f"forward {what}" for found, what in kinds if found), "")


def _is_on_a_grid(values: Sequence[float]) -> bool:
    """Whether all values are multiples of their smallest distance, as rounded numbers are."""
    least = min((b - a for a, b in pairwise(values) if b - a > 1e-9 * values[-1]), default=0.0)
    return bool(least) and all(abs(v / least - round(v / least)) < 1e-3 for v in values)
