"""From a wrong second derivative to the rows of a report that name the cause, and say how to fix it."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hoglib._core import pytree, source_location
from hoglib._core.detachment import DetachedGradient, DetachmentWatch
from hoglib._core.element_differences import element_scales, random_like
from hoglib._core.pytree import is_float
from hoglib._core.source_location import error_line, format_error
from hoglib.verification import attribution, function_rules
from hoglib.verification import call as calls
from hoglib.verification.attribution import Diagnosis
from hoglib.verification.call import Call
from hoglib.verification.comparison import Discrepancy, in_forward, in_reverse, target
from hoglib.verification.derivatives import Stage, ratio, stage
from hoglib.verification.function_rules import Slot
from hoglib.verification.options import Bounds
from hoglib.verification.report import MODES, Mode, Row
from hoglib.verification.structures import one_triangle
from hoglib.verification.subject import Application, Subject, applications

UNSEEN = "detached: unseen"  # a part is lost, and no call and no slot is known to lose it


def attribution_rows(
    subject: Subject, x: list[Tensor], found: Mapping[str, Discrepancy]
) -> Iterator[Row]:
    """A row for each culprit, if a second or third derivative is wrong."""
    wrong = [name for name, one in found.items() if one.wrong and not name.startswith("first")]
    if not wrong:
        return
    apps = _applications_in_motion(subject, x)
    right_once = not found.get("first derivative: reverse", Discrepancy()).wrong
    raises = found.get("first derivative: reverse", Discrepancy()).raised is not None
    over_forward = [name for name in wrong if name.endswith("over-forward")]
    named = False
    raised = [name for name, one in found.items() if one.raised is not None]
    for app, moves in apps:
        for in_jvp in (False, True):
            if in_jvp and (not over_forward or not function_rules.offers_jvp(app.function)):
                continue
            if not in_jvp and over_forward == wrong:
                continue
            mode = "over-forward" if in_jvp else "reverse-over-reverse"
            for row in _of(
                app, moves, in_jvp, several=len(apps) > 1, right_once=right_once, raises=raises,
                raised=any(name.endswith(mode) for name in raised),
            ):  # fmt: skip
                named |= row.status == "fail"
                yield row
    if not named and right_once:
        yield from culprit_rows(subject, x, wrong)


def forward_rows(subject: Subject, x: list[Tensor]) -> Iterator[Row]:
    """Where the function itself leaves the graph, when its first derivative is wrong."""
    watch = DetachmentWatch()
    with watch.outside_functions():
        subject.map(*(y.clone().requires_grad_() for y in x))
    for detached in _together(watch.detached):
        shown = "; ".join(map(str, detached[:3]))
        yield Row(
            f"detached: {title(detached[0])}", "fail", None,
            f"{subject.name} leaves the graph by {shown}, so that the part of its derivative "
            "through there is lost. Use the tensor itself; pass what is constant on purpose as an "
            "input that does not require grad.",
        )  # fmt: skip


def value_rows(subject: Subject) -> Iterator[Row]:
    """Which of several Functions has a wrong gradient."""
    if len({app.function for app in subject.applications}) > 1:
        for name, text in _wrong_alone(subject.applications):
            yield Row(
                f"{name}: culprit: backward", "fail", None,
                f"the gradient of {name} itself is wrong: {text}",
            )  # fmt: skip


def subset_rows(subject: Subject, x: list[Tensor], subset: Sequence[int]) -> Iterator[Row]:
    """The culprits when only some of a Function's inputs require grad."""
    for app, moves in _applications_in_motion(subject, x):
        if len(app.by) == len(x):
            by = tuple(app.by[j] for j in subset)
            moves = {i: move for i, move in (moves or {}).items() if i in by}
            yield from _of(app._replace(by=by), moves, False, several=False, right_once=True)


def is_culprit(row: Row) -> bool:
    """Whether a row names the cause of other failures."""
    return row.status == "fail" and any(
        word in row.name
        for word in ("detached: ", "saved: ", "culprit: ", " applies ", "deterministic")
    )


def _applications_in_motion(
    subject: Subject, x: list[Tensor]
) -> list[tuple[Application, attribution.Moves | None]]:
    """The Functions that the subject applies near its inputs, and how their arguments move along v."""
    v = [random_like(y, subject.random) * element_scales(y) for y in x]

    def at(h: float) -> list[Application]:
        point = [(y + h * d).requires_grad_() for y, d in zip(x, v, strict=True)]
        return applications(lambda: subject.map(*point))

    step = attribution.step_of(x)
    here, above, below = at(0.0), at(step), at(-step)
    if not len(here) == len(above) == len(below):
        return [(app, None) for app in here]
    ends = zip(here, above, below, strict=True)
    return [
        (
            app,
            {i: (p.args[i] - m.args[i]) / (2 * step) for i in app.by}
            if p.by == m.by == app.by and _same_shapes(p, m)
            else None,
        )
        for app, p, m in ends
    ]


def _same_shapes(p: Application, m: Application) -> bool:
    return all(p.args[i].shape == m.args[i].shape for i in p.by)


def _of(
    app: Application,
    moves: attribution.Moves | None,
    in_jvp: bool,
    *,
    several: bool,
    right_once: bool,
    raises: bool = False,
    raised: bool = True,
) -> Iterator[Row]:
    """raised: whether autograd raises in the mode in question, too."""
    function = app.function.__name__
    rule = "jvp" if in_jvp else "backward"
    prefix = f"{function}: " if several else ""
    try:
        found = attribution.diagnose(app, moves, in_jvp=in_jvp)
    except Exception as error:
        yield from _not_attributed(prefix, function, rule, app, [], error)
        return
    if found.once:
        text = (
            f"{function}.{rule} is decorated with @once_differentiable, which detaches the gradient: "
            f"a second derivative raises, or is silently zero. {ONCE}"
        )
        text += (
            " Without it the second derivative would still be wrong, see below."
            if found.lost or found.error
            else " Without it the second derivative is right."
        )
        yield Row(f"{prefix}detached: @once_differentiable", "fail", None, text)
    if found.error is not None and not (found.once or raised or raises):
        seen = [] if several else found.detached
        yield from _not_attributed(prefix, function, rule, app, seen, found.error)
        return
    if found.error is not None:
        yield raised_row(prefix, function, rule, found, always=raises and not in_jvp)
        return
    for detached in _together(found.detached):
        yield detached_row(
            f"{prefix}detached: {title(detached[0])}", function, rule, detached, found
        )
    made = [slot for slot in found.slots if slot.kind in ("copy", "intermediate")]
    if made:
        yield saved_row(prefix, rule, made, app)
    inner = list(_inner(prefix, function, rule, found)) if right_once else []
    yield from inner
    unseen = [s for s in found.slots if s.kind in ("input", "output", "gradient")]
    if unseen and right_once and not (inner or found.detached or made):
        what = ", ".join(called(s) for s in unseen)
        lost = sum(s.share for s in unseen)
        yield Row(
            f"{prefix}{UNSEEN}", "fail", lost,
            f"{function}.{rule} loses {percent(lost)} of the missing second-order term, that of "
            f"{what}, and ctx shows no reason. Does it call a kernel of another library, write memory "
            f"directly, or read what forward stored on the class or in a global? "
            f"{FIXES['kernel']}",
        )  # fmt: skip


def _not_attributed(
    prefix: str,
    function: str,
    rule: str,
    app: Application,
    seen: Sequence[DetachedGradient],
    error: Exception,
) -> Iterator[Row]:
    """The rows where the probe raises and autograd does not: where backward leaves the graph, as seen
    under autograd, and what was not judged."""
    for cut in _together(seen or _cuts_under_autograd(app) if rule == "backward" else seen):
        shown = "; ".join(map(str, cut[:3]))
        text = f"{function}.{rule} leaves the graph by {shown}. {fix_of(cut[0])}"
        yield Row(f"{prefix}detached: {title(cut[0])}", "fail", None, text)
    line = error_line(error)
    at = f" (it raises at {line})" if line else ""
    text = (
        f"not judged: which saved tensor loses the second derivative. {rule} does not run as a plain "
        f"function, outside of autograd{at}."
    )
    yield Row(f"{prefix}attribution", "skip", None, text)


def _cuts_under_autograd(app: Application) -> list[DetachedGradient]:
    watch = DetachmentWatch()
    with suppress(Exception):
        args = [
            x.requires_grad_(i in app.by) if is_float(x) else x for i, x in enumerate(app.fresh())
        ]
        values = [y for y in pytree.leaves(app.function.apply(*args)) if is_float(y)]
        leaves = [args[i] for i in app.by]
        with watch.outside_functions():
            calls.watched_gradient(values, leaves)
    return [cut for cut in watch.detached if cut.place]  # others are of the probe itself


def _together(detached: Sequence[DetachedGradient]) -> list[list[DetachedGradient]]:
    """Groups of detached gradients: one for each, and one for all that happens while gradients are
    disabled."""
    off = [one for one in detached if one.kind == "off"]
    groups = [[one] for one in detached if one.kind != "off"]
    return [off, *groups] if off else groups


def _inner(prefix: str, function: str, rule: str, found: attribution.Diagnosis) -> Iterator[Row]:
    """Functions that backward applies, of which the gradient itself is wrong."""
    for name, text in _wrong_alone(found.inner):
        yield Row(
            f"{prefix}{rule} applies {name}", "fail", None,
            f"{function}.{rule} applies {name}, whose own gradient is wrong: {text}",
        )  # fmt: skip


def _wrong_alone(apps: Sequence[Application]) -> Iterator[tuple[str, str]]:
    """The Functions whose own gradient is wrong, and what is wrong with it."""
    for app in apps:
        try:
            args = enumerate(app.fresh())
            inputs = [x.requires_grad_(i in app.by) if is_float(x) else x for i, x in args]
            subject = Subject(app.function, inputs)
            subject.find_outputs()
            at = target(subject.map, subject.x, subject.rows, subject.names, subject.random)
            one = in_reverse(at, BOUNDS, subject.random)
        except Exception:  # the rows of derivatives say what it raises
            continue
        if one.wrong:
            name = app.function.__name__
            yield name, f"{one.wrong}{ratio(one)}. Verify {name} by itself."


BOUNDS = Bounds(1e-6, 1e-4)

MOST = 200  # calls

OWN = ("aten", "prim", "prims", "quantized", "_quantized", "torchvision", "mkldnn")


def culprit_rows(subject: Subject, x: list[Tensor], wrong: list[str]) -> Iterator[Row]:
    """A row for each torch operation that is wrong by itself in a mode that is wrong."""
    with _Calls() as watch:
        subject.map(*(y.clone().requires_grad_() for y in x))
    seen: set[str] = set()
    for name in wrong:
        mode = next(mode for mode in MODES.values() if name.endswith(mode.title))
        for func, args, kwargs, place in watch.calls:
            called = getattr(func, "__name__", str(func))
            if f"{called} {mode.key}" in seen:
                continue
            seen.add(f"{called} {mode.key}")
            fault = _fault(func, args, kwargs, mode, 3 if name.startswith("third") else 2)
            if fault:
                at = f" at {place}" if place else ""
                library = getattr(func, "namespace", "aten")
                whose, fix = ("torch's own", "Use another mode, or another operation.")
                if library not in OWN:
                    whose = f"the custom op {library}::"
                    fix = (
                        "See what its torch.library.register_autograd gets: setup_context must save "
                        "inputs and outputs themselves, not intermediates or detached copies, and "
                        "backward must be of differentiable torch operations."
                    )
                yield Row(
                    f"culprit: {called} in {mode.title}", "fail", None,
                    f"{whose} {called}{at} is at fault: its derivative in {mode.title} is wrong or "
                    f"missing: {fault}. {fix}".replace(":: ", "::"),
                )  # fmt: skip


def _fault(func: Any, args: Any, kwargs: Any, mode: Mode, order: int) -> str:
    try:
        call = Call(lambda a, k: func(*a, **k), (args, kwargs), None)
        call.reseed = True
        call.projections = {j: one.project for j, one in one_triangle(call).items()}
        which = [i for i, y in enumerate(call.run_with_grad()) if is_float(y) and y.requires_grad]
        random = torch.Generator().manual_seed(5)
        f, x = call.map(which), call.point
        names = [f"argument {j}" for j in range(len(x))]
        first = Stage(f, x, [f"result {i}" for i in which], names)
        inner = stage(first, mode, order, lambda tensors: [random_like(t, random) for t in tensors])
        at = target(*inner, random)
    except Exception:  # it has no derivative to judge in this mode
        return ""
    if mode.outer == "r":
        return in_reverse(at, BOUNDS, random).wrong
    return in_forward(at, BOUNDS, by_torch_func=mode.key == "ff").wrong


@final
class _Calls(TorchFunctionMode):
    """Collects the outermost torch calls that get and return tensors with a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, source_location.SourceLine | None]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        graphed = any(is_float(x) and x.requires_grad for x in pytree.leaves((args, kwargs)))
        made = any(is_float(y) and y.requires_grad for y in pytree.leaves(result))
        if graphed and made and len(self.calls) < MOST:
            line = source_location.torch_call_line()
            self.calls.append((func, detached_copy(args), detached_copy(kwargs), line))
        return result


def detached_copy(tree: Any) -> Any:
    """A copy whose tensors are leaves, which require grad where the originals do."""
    return pytree.map_tensors(
        lambda x: x.detach().clone().requires_grad_(x.requires_grad and is_float(x)), tree
    )


# The rows that name a cause: what is lost, at which line, and the fix.

ONCE = (
    "Remove the decorator, which runs backward without a graph, and compute backward by differentiable "
    "torch operations."
)

FIXES = {
    "alias": "Use the tensor itself: without a second derivative, backward runs without a graph "
    "anyway, and the tensor costs nothing more.",
    "escape": "A number or an array outside of torch has no graph. Stay in torch operations; or, for "
    "NumPy, SciPy or C++ code, give it derivatives of its own with hog.ops.external.",
    "off": "Leave gradients enabled in backward: autograd disables them itself if no second derivative "
    "is asked for.",
    "inner": "Give torch.autograd.grad create_graph=torch.is_grad_enabled(), and the tensors "
    "themselves, not detached copies of them.",
    "backward": "It accumulates into .grad, which has no graph. Return the results of "
    "torch.autograd.grad(..., create_graph=torch.is_grad_enabled()), by the tensors themselves, not "
    "detached copies of them.",
    "write": "What is written there has no graph. Return a new tensor, computed by torch operations.",
    "kernel": "Write it in differentiable torch operations, or wrap it in a Function of its own, whose "
    "backward is its derivative.",
}


def title(cut: DetachedGradient) -> str:
    return cut.how.split(" under ")[-1].split(",")[0].strip("`")


def detached_row(
    name: str, function: str, rule: str, detached: Sequence[DetachedGradient], found: Diagnosis
) -> Row:
    through = [s for s in found.slots if s.kind in ("input", "output", "gradient")]
    lost = sum(s.share for s in through)
    share = ""
    if through:
        what = " and ".join(map(called, through))
        share = f" It loses {percent(lost)} of the missing second-order term, that of {what}."
    shown = "; ".join(map(str, detached[:3])) + (
        f"; and {len(detached) - 3} more" if len(detached) > 3 else ""
    )
    text = f"{function}.{rule} leaves the graph by {shown}.{share} {fix_of(detached[0])}"
    return Row(name, "fail", lost or None, text)


def fix_of(cut: DetachedGradient) -> str:
    return FIXES["escape" if cut.then else cut.kind]


def called(slot: Slot) -> str:
    return slot.what if slot.label == slot.what else f"{slot.what} ({slot.label})"


def raised_row(prefix: str, function: str, rule: str, found: Diagnosis, *, always: bool) -> Row:
    """The row of a rule that raises, with a graph only or always."""
    error = found.error
    assert error is not None
    name = f"{prefix}culprit: {rule}" if always else f"{prefix}detached: in {rule}"
    how = "" if always else "cannot be differentiated: with a graph it "
    text = f"{function}.{rule} {how}raised {format_error(error)}."
    if found.detached:
        text += " It leaves the graph by " + "; by ".join(map(str, found.detached)) + "."
    if not found.kept and rule == "backward":
        text += " Nothing is saved: ctx.save_for_backward is never called."
    return Row(name, "fail", None, f"{text} {_advice(rule, error, found)}".rstrip())


def _advice(rule: str, error: Exception, found: Diagnosis) -> str:
    """What to do about an error of a rule that runs with a graph."""
    message = str(error)
    if rule == "jvp" and found.only_backward:
        return (
            "In a jvp ctx.saved_tensors are those of ctx.save_for_forward: call it in setup_context "
            "too, with the same tensors."
        )
    if "in-place" in message or "inplace" in message:
        return "Work on new tensors, not in place."
    if "numpy" in message:
        return FIXES["escape"]
    return FIXES["kernel"] if "not implemented" in message or "formula" in message else ""


def saved_row(prefix: str, rule: str, slots: Sequence[Slot], app: Application) -> Row:
    """The row of slots without a graph, with two ways to give them one."""
    name = f"{prefix}saved: {', '.join(slot.label for slot in slots)}"
    lines = [_slot(slot) for slot in slots]
    made = [slot for slot in slots if slot.kind == "intermediate" and not slot.graphed]
    if made:
        inputs = ", ".join(app.names[i] for i in app.by if i < len(app.names))
        which = ", ".join(f"`{slot.name}`" if slot.name else slot.label for slot in made)
        lines.append(
            f"Forward runs without a graph, so {rule} cannot be differentiated through what forward "
            f"computed. Two ways to fix it:\n"
            f"1. save the inputs instead ({inputs}), and compute {which} from them again in {rule};\n"
            f"2. or return {which} from forward as one more output, and save that: then backward gets "
            f"the gradient of {which} as one more argument, and adds that gradient times the "
            f"derivative of {which} by the inputs."
        )
    return Row(name, "fail", sum(slot.share for slot in slots), "\n".join(lines))


def _slot(slot: Slot) -> str:
    place = f", saved at {slot.place}" if slot.place else ""
    called = f"`{slot.name}`, " if slot.name else ""
    share = f"It carries {percent(slot.share)} of the missing second-order term."
    if slot.graphed:
        return (
            f"{slot.label} is {called}part of a graph that forward built itself{place}, which ends "
            f"at detached copies of its inputs. {share} Save the inputs, and build that graph in "
            "backward from them: under torch.enable_grad(), and with torch.autograd.grad(..., "
            "create_graph=torch.is_grad_enabled())."
        )
    if slot.kind == "copy":
        original = slot.what.removeprefix("a copy of ")
        return (
            f"{slot.label} is {called}a copy (a clone, or detached) of {original}{place}. A copy made "
            f"in forward has no graph. {share} Save {original} itself."
        )
    what = slot.what.replace("an intermediate", f"an intermediate ({slot.type})")
    return f"{slot.label} is {called}{what}{place}. {share}"


def percent(share: float) -> str:
    return "less than 1 %" if share < 0.005 else f"{100 * share:.0f} %"
