"""From a wrong second derivative to the Function, slot or cut at fault, and how to mend it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.autograd import Function

from hoglib._functorch import watching_functions
from hoglib.verification import _culprits as culprits
from hoglib.verification import _diagnosis as diagnosis
from hoglib.verification import _plain as plain
from hoglib.verification import doctor
from hoglib.verification._application import Application, applications
from hoglib.verification._around import told
from hoglib.verification._call import is_float
from hoglib.verification._compare import Bounds, Found, in_reverse, target
from hoglib.verification._cuts import Cut, Watch
from hoglib.verification._differences import scales, uniform
from hoglib.verification._mends import (
    MENDS,
    ONCE,
    called,
    cut_row,
    percent,
    raised_row,
    saved_row,
    title,
)
from hoglib.verification._subject import Subject
from hoglib.verification.report import Row


def rows(subject: Subject, x: list[Tensor], found: Mapping[str, Found]) -> Iterator[Row]:
    """A row for each culprit, if a second or third derivative is wrong."""
    wrong = [name for name, one in found.items() if one.wrong and not name.startswith("first")]
    if not wrong:
        return
    apps = _moving(subject, x)
    right_once = not found.get("first derivative: reverse", Found()).wrong
    raises = found.get("first derivative: reverse", Found()).raised is not None
    over_forward = [name for name in wrong if name.endswith("over-forward")]
    named = False
    for app, moves in apps:
        for in_jvp in (False, True):
            if in_jvp and (not over_forward or not plain.offers_jvp(app.function)):
                continue
            if not in_jvp and over_forward == wrong:
                continue
            several = len(apps) > 1
            for row in _of(
                app, moves, in_jvp, several=several, right_once=right_once, raises=raises
            ):
                named = True
                yield row
    if not named and right_once:
        yield from culprits.rows(subject, x, wrong)


def of_forward(subject: Subject, x: list[Tensor]) -> Iterator[Row]:
    """Where the function itself leaves the graph, when its first derivative is wrong."""
    watch = Watch()

    def ignore(function: type[Function], args: tuple[Any, ...]) -> None: ...

    with watching_functions(ignore) as watch.applying, watch:
        subject.map(*(y.clone().requires_grad_() for y in x))
    for cuts in _together(watch.cuts):
        shown = "; ".join(map(str, cuts[:3]))
        yield Row(
            f"graph cut: {title(cuts[0])}", "fail", None,
            f"{subject.name} leaves the graph by {shown}, so that its derivative lacks what goes "
            "through there. Use the tensor itself; what is constant on purpose is to be an input that "
            "does not require grad.",
        )  # fmt: skip


def of_values(subject: Subject) -> Iterator[Row]:
    """Which of several Functions has a wrong gradient."""
    if len({app.function for app in subject.applications}) < 2:
        return
    for app in subject.applications:
        name = app.function.__name__
        for text in _wrong_alone(app):
            yield Row(
                f"{name}: culprit: backward", "fail", None,
                f"the gradient of {name} itself is wrong: {text}Verify {name} by itself.",
            )  # fmt: skip


def of_subset(subject: Subject, x: list[Tensor], subset: Sequence[int]) -> Iterator[Row]:
    """The culprits when only some of a Function's inputs require grad."""
    for app, moves in _moving(subject, x):
        if len(app.by) == len(x):
            by = tuple(app.by[j] for j in subset)
            moves = {i: move for i, move in (moves or {}).items() if i in by}
            yield from _of(app._replace(by=by), moves, False, several=False, right_once=True)


def _moving(subject: Subject, x: list[Tensor]) -> list[tuple[Application, doctor.Moves | None]]:
    """The Functions that the subject applies beside its inputs, and how their arguments move there."""
    v = [uniform(y, subject.random) * scales(y) for y in x]

    def at(h: float) -> list[Application]:
        point = [(y + h * d).requires_grad_() for y, d in zip(x, v, strict=True)]
        return applications(lambda: subject.map(*point))

    here, above, below = at(0.0), at(doctor.STEP), at(-doctor.STEP)
    if not len(here) == len(above) == len(below):
        return [(app, None) for app in here]
    ends = zip(here, above, below, strict=True)
    return [
        (
            app,
            {i: (p.args[i] - m.args[i]) / (2 * doctor.STEP) for i in app.by}
            if p.by == m.by == app.by
            else None,
        )
        for app, p, m in ends
    ]


def _of(
    app: Application,
    moves: doctor.Moves | None,
    in_jvp: bool,
    *,
    several: bool,
    right_once: bool,
    raises: bool = False,
) -> Iterator[Row]:
    function = app.function.__name__
    rule = "jvp" if in_jvp else "backward"
    prefix = f"{function}: " if several else ""
    try:
        found = doctor.examine(app, moves, in_jvp=in_jvp)
    except Exception as error:
        text = f"{rule} was not run as a plain function: {told(error)}."
        yield Row(f"{prefix}doctor", "skip", None, text)
        return
    if found.once:
        text = (
            f"{function}.{rule} is decorated with @once_differentiable, which cuts the graph: a second "
            f"derivative raises, or is silently zero. {ONCE}"
        )
        text += (
            " Without it the second derivative would be wrong still, see below."
            if found.lost or found.error
            else " Without it the second derivative is right."
        )
        yield Row(f"{prefix}graph cut: @once_differentiable", "fail", None, text)
    if found.error is not None:
        yield raised_row(prefix, function, rule, found, always=raises and not in_jvp)
        return
    for cuts in _together(found.cuts):
        yield cut_row(f"{prefix}graph cut: {title(cuts[0])}", function, rule, cuts, found)
    made = [slot for slot in found.slots if slot.kind in ("copy", "intermediate")]
    if made:
        yield saved_row(prefix, rule, made, app)
    inner = list(_inner(prefix, function, rule, found)) if right_once else []
    yield from inner
    unseen = [s for s in found.slots if s.kind in ("input", "output", "gradient")]
    if unseen and right_once and not (inner or found.cuts or made):
        what = ", ".join(called(s) for s in unseen)
        lost = sum(s.share for s in unseen)
        yield Row(
            f"{prefix}graph cut: unseen", "fail", lost,
            f"{function}.{rule} loses {percent(lost)} of the missing second-order term, that of "
            f"{what}, in a way that leaves no trace on ctx: a kernel of another library, memory that "
            f"is written directly, or something that forward left on the class or in a global? "
            f"{MENDS['kernel']}",
        )  # fmt: skip


def _together(cuts: Sequence[Cut]) -> list[list[Cut]]:
    """Each cut, but what happens while gradients are off as one."""
    off = [cut for cut in cuts if cut.kind == "off"]
    groups = [[cut] for cut in cuts if cut.kind != "off"]
    return [off, *groups] if off else groups


def _inner(prefix: str, function: str, rule: str, found: doctor.Diagnosis) -> Iterator[Row]:
    """Functions that backward applies, of which the gradient itself is wrong."""
    for app in found.inner:
        name = app.function.__name__
        for text in _wrong_alone(app):
            yield Row(
                f"{prefix}{rule} applies {name}", "fail", None,
                f"{function}.{rule} applies {name}, whose own gradient is wrong: {text}Verify "
                f"{name} by itself.",
            )  # fmt: skip


def _wrong_alone(app: Application) -> Iterator[str]:
    """What is wrong with the gradient of a Function by itself, in words, if anything."""
    try:
        inputs = [
            x.requires_grad_(i in app.by) if is_float(x) else x for i, x in enumerate(app.fresh())
        ]
        subject = Subject(app.function, inputs)
        subject.look()
        at = target(subject.map, subject.x, subject.rows, subject.names, subject.random)
        one = in_reverse(at, Bounds(1e-6, 1e-4), subject.random)
    except Exception:
        return
    if one.wrong:
        yield f"{one.wrong}. {_words(subject, one)}"


def _words(subject: Subject, found: Found) -> str:
    try:
        words = diagnosis.of_gradient(subject, subject.x, found.row, found.column)
        return f"{words} " if words else ""
    except Exception:  # words are not worth an error
        return ""


def is_culprit(row: Row) -> bool:
    """Whether it names what other rows suffer from; cuts before slots."""
    return row.status == "fail" and any(
        word in row.name
        for word in ("graph cut: ", "saved: ", "culprit: ", " applies ", "deterministic")
    )
