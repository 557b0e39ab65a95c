r"""Explain a wrong derivative: rows that name the cause, its line, and the fix.

A cause is a slot on ctx, a call that leaves the graph, or an operation. A backward is a function
B(S_1, ..., S_n, g) of the slots S_k of its context and of the incoming gradients g. Along a direction v
of the inputs its derivative is a sum over the slots,

    d/dv B(S(x), g) = sum_k  dB/dS_k  dS_k/dv

Autograd computes the terms of slots holding inputs or outputs of the Function, unless backward leaves
the graph. Here each term is measured by central differences: forward and backward run as plain
functions, with one slot taken from x +- h v. Autograd's version of the term comes from the graph of the
plain backward. The difference is the loss of the slot. A jvp is treated alike.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.autograd import Function
from torch.overrides import TorchFunctionMode

from hoglib._core.modules.state import same
from hoglib._core.numerics.element_differences import element_scales, random_like
from hoglib._core.numerics.finite_differences import difference_quotient, steps
from hoglib._core.runtime import source_location
from hoglib._core.runtime.source_location import error_line, format_error
from hoglib._core.substrate.detachment import DetachedGradient, DetachmentWatch
from hoglib._core.torch_api import pytree
from hoglib._core.torch_api.dispatch import Args, Kw, Op, Types
from hoglib._core.torch_api.pytree import Tree, is_float
from hoglib._core.torch_api.torch_internals import backward_rule, is_once_differentiable
from hoglib.verification import function_rules, maps
from hoglib.verification.comparison import Bounds, Discrepancies, Discrepancy, Target, compare
from hoglib.verification.derivatives import FIRST, ratio, stage
from hoglib.verification.function_rules import Context, Record, Run, Slot, kind_of
from hoglib.verification.layouts import match_layout
from hoglib.verification.precision import HalfWatch
from hoglib.verification.report import MODES, Row, Rows
from hoglib.verification.subject import (
    Application,
    Subject,
    copy_application,
    keep_symmetric,
    subject_of,
    watch_applications,
)  # fmt: skip

# a smaller fraction of the whole term is rounding
LOST = {torch.float64: 1e-5, torch.float32: 2e-3}
LOST_NARROW = 0.03  # this threshold for other dtypes
WORTH_SAYING = 1e-3  # a slot is named if it has this fraction of the total loss
DRAWS = 4  # random covectors
WITH_GRAPH = ("input", "output", "gradient")  # kinds of slots that autograd sees

Moves = dict[int, Tensor] | None  # argument index -> its direction
# slot label -> (the leaf that backward gets for it, its direction)
Leaves = dict[str, tuple[Tensor, Tensor]]


def step_of(dtypes: Iterable[torch.dtype]) -> float:
    """The step of the differences: the largest one that any of the dtypes needs."""
    return max((steps("slot", dtype.to_real())[0] for dtype in dtypes), default=1e-5)


class Diagnosis(NamedTuple):
    """The loss of second-order terms in a backward or jvp: its size, lines and slots."""

    once: bool  # decorated with @once_differentiable
    inner: list[Application]  # Functions applied in this backward
    lost: float = 0.0  # relative to the whole term
    slots: Sequence[Slot] = ()  # slots with a loss
    detached: Sequence[DetachedGradient] = ()  # the harmful, or possibly harmful, ones
    error: Exception | None = None  # raised by backward with a graph


def diagnose(app: Application, moves: Moves = None, *, in_jvp: bool = False) -> Diagnosis:
    """Measure the loss in the backward, or the jvp, of a Function.

    The arguments must not lie on a kink. moves: a common direction of the arguments, as the central
    difference (above - below) / 2h of each along one direction of the inputs. Default: random and
    independent, which some Functions do not allow (a symmetric matrix, probabilities).
    """
    probe = _Probe(app, moves, in_jvp)
    nothing, watch = Diagnosis(probe.once, probe.inner), DetachmentWatch()
    try:
        lost, whole = probe.measure_lost(watch)
    except Exception as error:
        return nothing._replace(lost=1.0, error=error, detached=watch.detached)
    size, total = max(whole, 1e-300), sum(lost.values())
    least = probe.least * size
    if total <= least:
        return nothing
    for slot in probe.slots:
        slot.share = lost.get(slot.label, 0.0) / total
    return nothing._replace(
        lost=total / size,
        detached=_harmful_detachments(probe, watch.detached, 0.01 * total, least),
        slots=[slot for slot in probe.slots if slot.share > max(WORTH_SAYING, least / total)],
    )


def _harmful_detachments(
    probe: "_Probe", detached: list[DetachedGradient], some: float, least: float
) -> list[DetachedGradient]:
    """The detached gradients to blame: repairing one reduces the loss by more than `some`. Those
    without a known repair are blamed if a loss remains after all repairs. least: rounding."""
    repairable = [one for one in detached if one.repairable]
    remains = probe.lost_after_repair(repairable)
    guilty = []
    for cut in repairable:
        without = probe.lost_after_repair([other for other in repairable if other is not cut])
        if without > remains + max(some, least):
            guilty.append(cut)
    if remains > least:
        guilty += [one for one in detached if not one.repairable]
    # two cuts on one path: repairing one changes nothing, so name all
    return guilty or (detached if probe.lost_after_repair([]) > least else [])


@final
class _Probe:
    """Runs a backward or jvp as a plain function while its slots and incoming gradients move."""

    def __init__(self, app: Application, moves: Moves, in_jvp: bool) -> None:
        self._app, self._in_jvp = app, in_jvp
        self._random = torch.Generator().manual_seed(1)
        self.inner: list[Application] = []  # filled by `_apply`
        # the direction of each argument
        self._v = moves or {
            i: random_like(app.args[i], self._random) * element_scales(app.args[i]) for i in app.by
        }
        # run once under a watch for half precision: the narrowest dtype inside decides on the step
        with HalfWatch() as watch:
            base = self._run(0.0)
            self._arguments = self._incoming(base)  # of backward or jvp, besides the slots
            with suppress(Exception):  # reported by `diagnose`
                self._results(base.record, self._arguments)
        dtypes = [app.args[i].dtype.to_real() for i in app.by]
        dtypes += [] if watch.dtype is None else [watch.dtype]
        self._step = step_of(dtypes)  # h
        # a loss below this fraction of the whole term is rounding
        self.least = max(LOST.get(dtype, LOST_NARROW) for dtype in dtypes)
        # the directions of the incoming gradients (in a jvp: of the tangents)
        self._moved = {
            self._label(k): random_like(g, self._random)
            for k, g in enumerate(self._arguments)
            if g is not None
        }

    @property
    def once(self) -> bool:
        return not self._in_jvp and is_once_differentiable(self._app.function)

    def _label(self, k: int) -> str:
        return f"{'tangent' if self._in_jvp else 'grad_output'} {k}"

    # Running forward and backward.

    def _run(self, h: float) -> Run:
        """Run forward at x + h v."""
        maps.seed_all()
        args = self._app.fresh()
        for i, v in self._v.items():
            args[i] = match_layout(args[i], args[i] + h * v)
        return self._app.run(args)

    def _slots_at(self, h: float) -> dict[str, Any]:
        return self._run(h).record.slots(in_jvp=self._in_jvp)

    def _incoming(self, run: Run) -> list[Tensor | None]:
        # a backward gets a gradient for each output, a jvp a tangent for each input
        if not self._in_jvp:
            return run.incoming(self._random)
        inputs = enumerate(run.inputs)
        return [random_like(x, self._random) if i in self._app.by else None for i, x in inputs]

    def _results(self, record: Record, incoming: Iterable[Tensor | None]) -> list[Tensor]:
        """The floating-point results of backward or jvp with the values on this record."""
        maps.seed_all()
        context = Context(record, in_jvp=self._in_jvp)
        function = self._app.function
        rule: Any = function.jvp if self._in_jvp else backward_rule(function)
        rule = rule.__wrapped__ if self.once else rule
        returned = function_rules.as_tuple(rule(context, *incoming))
        kept = [r for i, r in enumerate(returned) if self._in_jvp or i in self._app.by]
        return [r for r in kept if is_float(r)]

    # The term of each slot, by differences.

    def _results_with_moved(self, labels: Sequence[str], h: float) -> list[Tensor]:
        """The results of backward with the labelled slots taken from a run at x + h v, and the labelled
        incoming gradients moved by h."""
        record, other = (self._as_saved(self._run(at)) for at in (0.0, h))
        slots, moved = (r.slots(in_jvp=self._in_jvp) for r in (record, other))
        slots |= {label: moved[label] for label in labels if label in moved}
        incoming = list(self._arguments)
        for k, g in enumerate(incoming):
            if g is not None and self._label(k) in labels:
                incoming[k] = g + h * self._moved[self._label(k)]
        with torch.no_grad():
            return self._results(record.with_slots(slots, in_jvp=self._in_jvp), incoming)

    def _as_saved(self, run: Run) -> Record:
        """The record as backward sees it under autograd: saved inputs and outputs require grad."""
        own = [run.inputs[i] for i in self._app.by]
        for x in (*own, *(y for y in run.outputs if not run.record.is_silent(y))):
            with suppress(RuntimeError):
                if is_float(x):
                    x.requires_grad_()
        return run.record

    @cached_property
    def _terms(self) -> dict[str, list[Tensor]]:
        """The term of each slot and of each incoming gradient, by central differences.

        If backward raises with one slot alone from another run (such as a tensor without the leaf of
        its graph), these slots move together, and get equal shares of their common term.
        """
        terms, alone = {}, []
        above, below = self._slots_at(self._step), self._slots_at(-self._step)
        for label in self._slots_at(0.0):
            if _is_same(above.get(label), below.get(label)):
                continue
            try:
                terms[label] = self._term([label])
            except Exception:
                alone.append(label)
        with suppress(Exception):
            together = self._term(alone) if alone else []
            terms |= {label: [t / len(alone) for t in together] for label in alone}
        return terms | {label: self._term([label]) for label in self._moved}

    def _term(self, labels: Sequence[str]) -> list[Tensor]:
        above, below = (self._results_with_moved(labels, h) for h in (self._step, -self._step))
        return [slope.detach() for slope in difference_quotient(above, below, self._step)]

    # The term of each slot, by autograd.

    def _autograd_terms(self, watch: DetachmentWatch) -> tuple[list[Tensor], Leaves]:
        """The results of backward with their graph, and the leaf of each slot."""
        run, ends = self._run(0.0), [self._slots_at(h) for h in (self._step, -self._step)]
        own = (*(run.inputs[i] for i in self._app.by), *run.outputs)
        owned = {id(t) for t in own if not run.record.is_silent(t)}
        leaves: Leaves = {}
        slots = run.record.slots(in_jvp=self._in_jvp)
        for label, value in slots.items():
            if is_float(value) and id(value) in owned:
                above, below = (end[label] for end in ends)
                # one leaf for each slot, even if two slots hold one tensor: measure each term alone
                slots[label] = value.detach().clone().requires_grad_()
                leaves[label] = slots[label], ((above - below) / (2 * self._step)).detach()
        record = run.record.with_slots(slots, in_jvp=self._in_jvp)
        incoming = [None if g is None else g.clone().requires_grad_() for g in self._arguments]
        given = [g for g in incoming if g is not None]
        for (label, direction), g in zip(self._moved.items(), given, strict=True):
            leaves[label] = g, direction
        with watch.outside_functions(self._apply), torch.enable_grad():
            return self._results(record, incoming), leaves

    def _apply(self, function: type[Function], args: tuple[Any, ...]) -> None:
        """Record a Function applied by backward."""
        app = copy_application(function, args)
        if app is not None and function not in [other.function for other in self.inner]:
            self.inner.append(app)

    def measure_lost(self, watch: DetachmentWatch) -> tuple[dict[str, float], float]:
        """The loss of each slot, and the whole term: root mean squares over random covectors."""
        seen, leaves = self._autograd_terms(watch)
        own = [leaf for leaf, _ in leaves.values()]
        lost = dict.fromkeys(self._terms, 0.0)
        whole = 0.0
        for _ in range(DRAWS):
            w = [random_like(r, self._random) for r in seen]
            grads = maps.grad(seen, own, w, retain_graph=True) if own else []
            pairs = zip(leaves.items(), grads, strict=True)
            carried = {label: _dot([g], [move]) for (label, (_, move)), g in pairs}
            for label, term in self._terms.items():
                expected = _dot(w, term)
                lost[label] += (expected - carried.get(label, 0.0)) ** 2
                whole += expected**2
        return {k: (v / DRAWS) ** 0.5 for k, v in lost.items()}, (whole / DRAWS) ** 0.5

    def lost_after_repair(self, repair: list[DetachedGradient]) -> float:
        """The remaining loss of slots with a graph if these detached gradients are repaired."""
        seen = {slot.label for slot in self.slots if slot.kind in WITH_GRAPH}
        try:
            lost, _ = self.measure_lost(DetachmentWatch([(cut.how, cut.place) for cut in repair]))
        except Exception:  # the repaired code does not run: assume no loss
            return 0.0
        return sum(value for label, value in lost.items() if label in seen)

    @cached_property
    def slots(self) -> list[Slot]:
        """All slots and incoming gradients, with their kinds and saving lines."""
        run = self._run(0.0)
        slots = []
        for label, value in run.record.slots(in_jvp=self._in_jvp).items():
            noted = run.record.noted(label)
            kind, what = kind_of(value, run, self._app.names)
            slot = Slot(label, kind, what, noted.name, noted.place, type(value).__name__)
            slot.graphed = any(t.requires_grad for t in pytree.tensors(value))
            slots.append(slot)
        return slots + [Slot(name, "gradient", name) for name in self._moved]


def _is_same(a: object, b: object) -> bool:
    """Whether a slot does not move: equal tensors or numbers at both ends of the difference."""
    if isinstance(a, Tensor):
        return same(a, b)
    return a is None or (isinstance(a, bool | int | float | str | torch.dtype) and a == b)


def _dot(w: list[Tensor], term: list[Tensor]) -> float:
    return sum(float((a.conj() * b).sum().real) for a, b in zip(w, term, strict=True))


# The search for Functions and operations with a cause

UNSEEN = "detached: unseen"  # a loss without a known call or slot as its cause


def attribution_rows(subject: Subject, x: list[Tensor], found: Discrepancies) -> Rows:
    """The rows of all causes, if a second or third derivative is wrong."""
    wrong = [name for name, one in found.items() if one.wrong and not name.startswith("first")]
    if not wrong:
        return
    apps = _applications_near(subject, x)
    first = found.get(FIRST, Discrepancy())
    over_forward = [name for name in wrong if name.endswith("over-forward")]
    raising = [name for name, one in found.items() if one.raised is not None]
    right_once, raises = not first.wrong, first.raised is not None
    named = False
    for app, moves in apps:
        for in_jvp in (False, True):
            if in_jvp and (not over_forward or not function_rules.offers_jvp(app.function)):
                continue
            if not in_jvp and over_forward == wrong:
                continue
            mode = "over-forward" if in_jvp else "reverse-over-reverse"
            raised = any(name.endswith(mode) for name in raising)
            rule = _RuleReport(app, in_jvp, len(apps) > 1)
            for row in rule.rows(moves, right_once=right_once, raises=raises, raised=raised):
                named |= row.status == "fail"
                yield row
    if not named and not first.wrong:
        yield from _operation_rows(subject, x, wrong)


def forward_rows(subject: Subject, x: list[Tensor]) -> Rows:
    """Rows for calls in forward that leave the graph, if the first derivative is wrong."""
    watch = DetachmentWatch()
    with watch.outside_functions():
        subject.map(*(y.clone().requires_grad_() for y in x))
    for detached in _group_cuts(watch.detached):
        text = (
            f"{maps.name_of(subject.map.fn)} leaves the graph by {_sites(detached)}, so that the part "
            "of its derivative through there is lost. Use the tensor itself; pass what is constant on "
            "purpose as an input that does not require grad."
        )
        yield Row(_title(detached), "fail", None, text)


def value_rows(subject: Subject) -> Rows:
    """Rows for Functions with a wrong gradient of their own, if the subject applies several."""
    if len({app.function for app in subject.applications}) > 1:
        for name, text in _find_wrong(subject.applications):
            text = f"the gradient of {name} itself is wrong: {text}"
            yield Row(f"{name}: culprit: backward", "fail", None, text)


def subset_rows(subject: Subject, x: list[Tensor], subset: Sequence[int]) -> Rows:
    """Rows of causes that show only if a subset of the Function's inputs requires grad."""
    for app, moves in _applications_near(subject, x):
        if len(app.by) == len(x):
            by = tuple(app.by[j] for j in subset)
            moves = {i: move for i, move in (moves or {}).items() if i in by}
            yield from _RuleReport(app._replace(by=by), False, False).rows(moves, right_once=True)


def is_culprit(row: Row) -> bool:
    """Whether a row names a cause, and not only a wrong number."""
    words = ("detached: ", "saved: ", "culprit: ", " applies ", "deterministic")
    return row.status == "fail" and any(word in row.name for word in words)


def _applications_near(subject: Subject, x: list[Tensor]) -> list[tuple[Application, Moves]]:
    """The Functions that the subject applies at x, and the moves of their arguments along one random
    direction; None for the moves if calls at x +- h v apply other Functions."""
    v = [random_like(y, subject.random) * element_scales(y) for y in x]

    def at(h: float) -> list[Application]:
        point = [(y + h * d).requires_grad_() for y, d in zip(x, v, strict=True)]
        return watch_applications(lambda: subject.map(*point))

    step = step_of(y.dtype for y in x)
    here, above, below = at(0.0), at(step), at(-step)
    if not len(here) == len(above) == len(below):
        return [(app, None) for app in here]

    def moves(app: Application, p: Application, m: Application) -> Moves:
        if not p.by == m.by == app.by or any(p.args[i].shape != m.args[i].shape for i in p.by):
            return None
        return {i: (p.args[i] - m.args[i]) / (2 * step) for i in app.by}

    return [(one[0], moves(*one)) for one in zip(here, above, below, strict=True)]


def _find_wrong(apps: Sequence[Application]) -> Iterator[tuple[str, str]]:
    """The Functions with a wrong gradient of their own: (name, text)."""
    for app in apps:
        try:
            subject = subject_of(app.function, app.leaves()).restricted({}).in_units()
            at = Target(subject.map, subject.x, subject.rows, subject.names)
            one = compare(at.with_slopes(subject.random), "r", Bounds(), subject.random)
        except Exception:  # the rows of derivatives report the error
            continue
        if one.wrong:
            name = app.function.__name__
            yield name, f"{one.wrong}{ratio(one)}. Verify {name} by itself."


MAX_CALLS = 200  # torch calls to collect

# Namespaces of operators that messages call "torch's own"
OF_TORCH = ("aten", "prim", "prims", "quantized", "_quantized", "torchvision", "mkldnn")


def _operation_rows(subject: Subject, x: list[Tensor], wrong: list[str]) -> Rows:
    """A row for each torch operation with a wrong derivative of its own, in the failed modes."""
    with _Calls() as watch:
        subject.map(*(y.clone().requires_grad_() for y in x))
    seen: set[tuple[str, str]] = set()
    for name in wrong:
        mode, title = next(one for one in MODES.items() if name.endswith(one[1]))
        for func, args, kwargs, place in watch.calls:
            called = getattr(func, "__name__", str(func))
            if (called, mode) in seen:
                continue
            seen.add((called, mode))
            fault = _operation_fault(func, args, kwargs, mode, 3 if name.startswith("third") else 2)
            if fault:
                at = f" at {place}" if place else ""
                library = getattr(func, "namespace", "aten")
                whose = "torch's own " if library in OF_TORCH else f"the operator {library}::"
                text = (
                    f"{whose}{called}{at} is at fault: its derivative in {title} is wrong or "
                    f"missing: {fault}. Use another mode, or another operation."
                )
                yield Row(f"culprit: {called} in {title}", "fail", None, text)


def _operation_fault(func: Any, args: Any, kwargs: Any, mode: str, order: int) -> str:
    try:
        f, _ = keep_symmetric(
            maps.map_of(lambda a, k: func(*a, **k), (args, kwargs)).scaled().seeded()
        )
        which = [i for i, y in enumerate(f.run_with_grad()) if is_float(y) and y.requires_grad]
        random = torch.Generator().manual_seed(5)
        names = [f"argument {j}" for j in range(len(f.point))]
        first = Target(f.to(which), f.point, [f"result {i}" for i in which], names)
        inner = stage(first, mode, order, lambda tensors: [random_like(t, random) for t in tensors])
        at = inner.with_slopes(random)
    except Exception:  # it has no derivative to judge in this mode
        return ""
    return compare(at, mode, Bounds(), random).wrong


@final
class _Calls(TorchFunctionMode):
    """Collects (function, args, kwargs, line) of outermost torch calls on tensors with a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, source_location.SourceLine | None]] = []

    def __torch_function__(self, func: Op, types: Types, args: Args = (), kwargs: Kw = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        live, made = (any(map(requires_grad, pytree.leaves(x))) for x in ((args, kwargs), result))
        if live and made and len(self.calls) < MAX_CALLS:
            line = source_location.torch_call_line()
            self.calls.append((func, detached_copy(args), detached_copy(kwargs), line))
        return result


def detached_copy(tree: Tree) -> Any:
    """Detached copies of all tensors, with their requires_grad."""
    return pytree.map_tensors(lambda x: x.detach().clone().requires_grad_(x.requires_grad), tree)


def requires_grad(x: object) -> bool:
    return isinstance(x, Tensor) and x.requires_grad


# The rows that name a cause: the loss, the line, and the fix.

ONCE = (
    "is decorated with @once_differentiable, which detaches the gradient: a second derivative "
    "raises, or is silently zero. Remove the decorator, which runs backward without a graph, and "
    "compute backward by differentiable torch operations. Without it the second derivative {}."
)

FIXES = {
    "alias": "Use the tensor itself, or, where torch.autograd.grad differentiates by it in backward, a "
    "view, `t.view_as(t)`, at which that stops. Without a second derivative, backward runs without a "
    "graph anyway, except inside torch.enable_grad().",
    "escape": "A number or an array outside of torch has no graph. Stay in torch operations; or, for "
    "NumPy, SciPy or C++ code, give it derivatives of its own with hog.ops.external.",
    "off": "Leave gradients enabled in backward: autograd disables them itself if no second derivative "
    "is asked for.",
    "inner": "Give torch.autograd.grad create_graph=torch.is_grad_enabled(), read outside of "
    "torch.enable_grad(), and views of the tensors, `t.view_as(t)`, not detached copies.",
    "backward": "It accumulates into .grad, which has no graph. Return the results of "
    "torch.autograd.grad(..., create_graph=torch.is_grad_enabled()), by views of the tensors, "
    "`t.view_as(t)`, not detached copies.",
    "write": "What is written there has no graph. Return a new tensor, computed by torch operations.",
    "kernel": "Write it in differentiable torch operations, or wrap it in a Function of its own, whose "
    "backward is its derivative.",
}


class _RuleReport(NamedTuple):
    """The writer of rows about one backward or jvp."""

    app: Application
    in_jvp: bool  # about jvp, not backward
    several: bool  # other Functions are applied, too: rows carry this one's name

    @property
    def name(self) -> str:
        return "jvp" if self.in_jvp else "backward"

    def row(self, name: str, text: str, share: float | None = None) -> Row:
        """A row with a text that begins with `MyFunction.backward`."""
        return self._row(name, f"{self.app.function.__name__}.{self.name} {text}", share)

    def _row(self, name: str, text: str, share: float | None = None, status: str = "fail") -> Row:
        prefix = f"{self.app.function.__name__}: " if self.several else ""
        return Row(f"{prefix}{name}", status, share, text.rstrip())

    def rows(
        self, moves: Moves, *, right_once: bool, raises: bool = False, raised: bool = True
    ) -> Rows:
        """The rows of all causes.

        right_once: the first derivative is right. raises: the first derivative raises. raised: autograd
        raises in the failed mode.
        """
        try:
            found = diagnose(self.app, moves, in_jvp=self.in_jvp)
        except Exception as error:
            yield from self._not_attributed([], error)
            return
        if found.once:
            still = found.lost or found.error
            text = ONCE.format("would still be wrong, see below" if still else "is right")
            yield self.row("detached: @once_differentiable", text)
        if found.error is not None:
            if found.once or raised or raises:
                yield self._raised(found, found.error, always=raises and not self.in_jvp)
            else:
                yield from self._not_attributed([] if self.several else found.detached, found.error)
            return
        through = [slot for slot in found.slots if slot.kind in WITH_GRAPH]
        lost = sum(slot.share for slot in through)
        for cuts in _group_cuts(found.detached):
            share = ""
            if through:
                of = " and ".join(map(_slot_text, through))
                share = f" It loses {percent(lost)} of the missing second-order term, that of {of}."
            more = f"; and {len(cuts) - 3} more" if len(cuts) > 3 else ""
            text = f"leaves the graph by {_sites(cuts)}{more}.{share} {_advice(cuts[0])}"
            yield self.row(_title(cuts), text, lost or None)
        made = [slot for slot in found.slots if slot.kind not in WITH_GRAPH]
        if made:
            yield self._saved(made)
        inner = [*_find_wrong(found.inner)] if right_once else []
        for name, text in inner:
            what = f"applies {name}"
            yield self.row(f"{self.name} {what}", f"{what}, whose own gradient is wrong: {text}")
        if through and right_once and not (inner or found.detached or made):
            yield self.row(
                UNSEEN,
                f"loses {percent(lost)} of the missing second-order term, that of "
                f"{', '.join(map(_slot_text, through))}, and ctx shows no reason. Does it call a "
                "kernel of another library, write memory directly, or read what forward stored on "
                f"the class or in a global? {FIXES['kernel']}",
                lost,
            )

    def _not_attributed(self, seen: Sequence[DetachedGradient], error: Exception) -> Rows:
        """The rows if the plain run raises although autograd does not: the calls that leave the graph,
        as seen under autograd, and a note on the missing attribution."""
        for cuts in _group_cuts(seen if seen or self.in_jvp else _cuts_under_autograd(self.app)):
            yield self.row(_title(cuts), f"leaves the graph by {_sites(cuts)}. {_advice(cuts[0])}")
        line = error_line(error)
        at = f" (it raises at {line})" if line else ""
        text = (
            f"not judged: which saved tensor loses the second derivative. {self.name} does not run "
            f"as a plain function, outside of autograd{at}."
        )
        yield self._row("attribution", text, status="skip")

    def _raised(self, found: Diagnosis, error: Exception, *, always: bool) -> Row:
        """The row of a rule that raises. always: also without a graph."""
        name = f"culprit: {self.name}" if always else f"detached: in {self.name}"
        how = "" if always else "cannot be differentiated: with a graph it "
        text, saved = f"{how}raised {format_error(error)}.", self.app.seeded().record
        if found.detached:
            text += " It leaves the graph by " + "; by ".join(map(str, found.detached)) + "."
        if not self.in_jvp and not saved.slots():
            text += " Nothing is saved: ctx.save_for_backward is never called."
        advice, message = "", str(error)
        if self.in_jvp and saved.saved and not saved.for_forward:
            advice = (
                "In a jvp ctx.saved_tensors are those of ctx.save_for_forward: call it in "
                "setup_context too, with the same tensors."
            )
        elif "in-place" in message or "inplace" in message:
            advice = "Work on new tensors, not in place."
        elif "numpy" in message:
            advice = FIXES["escape"]
        elif "not implemented" in message or "formula" in message:
            advice = FIXES["kernel"]
        elif "tuple index" in message and "needs_input_grad[" in text:
            advice = (
                "ctx.needs_input_grad has one entry for each argument that was passed: pass arguments "
                "with defaults, too."
            )
        return self.row(name, f"{text} {advice}")

    def _saved(self, slots: Sequence[Slot]) -> Row:
        """The row of slots without a graph, with two ways to fix them."""
        lines = [_describe_slot(slot) for slot in slots]
        made = [slot for slot in slots if slot.kind == "intermediate" and not slot.graphed]
        if made:
            names = self.app.names
            inputs = ", ".join(names[i] for i in self.app.by if i < len(names))
            which = ", ".join(f"`{slot.name}`" if slot.name else slot.label for slot in made)
            which = which.replace(".detach()`", "`")  # the advice must not end the graph again
            lines.append(
                f"Forward runs without a graph, so {self.name} cannot be differentiated through what "
                f"forward computed. Two ways to fix it:\n"
                f"1. save the inputs instead ({inputs}), and compute {which} from them again in "
                f"{self.name};\n"
                f"2. or return {which} from forward as one more output, and save that: then backward "
                f"gets the gradient of {which} as one more argument, and adds that gradient times the "
                f"derivative of {which} by the inputs."
            )
        name = f"saved: {', '.join(slot.label for slot in slots)}"
        return self._row(name, "\n".join(lines), sum(slot.share for slot in slots))


def _describe_slot(slot: Slot) -> str:
    place = f", saved at {slot.place}" if slot.place else ""
    named = f"`{slot.name}`, " if slot.name else ""
    share = f"It carries {percent(slot.share)} of the missing second-order term."
    if slot.graphed:
        return (
            f"{slot.label} is {named}part of a graph that forward built itself{place}, which ends "
            f"at detached copies of its inputs. {share} Save the inputs, and build that graph in "
            "backward from them: under torch.enable_grad(), and with torch.autograd.grad(..., "
            "create_graph=torch.is_grad_enabled())."
        )
    if slot.kind == "copy":
        original = slot.what.removeprefix("a copy of ")
        return (
            f"{slot.label} is {named}a copy (a clone, or detached) of {original}{place}. A copy made "
            f"in forward has no graph. {share} Save {original} itself."
        )
    what = slot.what.replace("an intermediate", f"an intermediate ({slot.type})")
    return f"{slot.label} is {named}{what}{place}. {share}"


def _slot_text(slot: Slot) -> str:
    return slot.what if slot.label == slot.what else f"{slot.what} ({slot.label})"


def percent(share: float) -> str:
    """A share, or a relative error, as a percentage in text."""
    if share > 10:
        return "more than its own size"
    return f"{share:.0%}" if share >= 0.01 else f"{100 * share:.1g}%"


def _cuts_under_autograd(app: Application) -> list[DetachedGradient]:
    """The calls in backward that leave the graph, watched while autograd runs it."""
    watch = DetachmentWatch()
    with suppress(Exception):
        args = app.leaves()
        values = [y for y in pytree.leaves(app.function.apply(*args)) if is_float(y)]
        with watch.outside_functions():
            leaves = [args[i] for i in app.by]
            maps.grad(values, leaves, create_graph=True, unhandled=True)
    return [cut for cut in watch.detached if cut.place]  # without a place: made by the probe itself


def _group_cuts(detached: Sequence[DetachedGradient]) -> list[list[DetachedGradient]]:
    """One group for each detached gradient, but a single group for all under disabled gradients."""
    off = [one for one in detached if one.kind == "off"]
    groups = [[one] for one in detached if one.kind != "off"]
    return [off, *groups] if off else groups


def _title(cuts: Sequence[DetachedGradient]) -> str:
    """The name of the row about a group."""
    return "detached: " + cuts[0].how.split(" under ")[-1].split(",")[0].replace("`", "")


def _sites(cuts: Sequence[DetachedGradient]) -> str:
    return "; ".join(map(str, cuts[:3]))


def _advice(cut: DetachedGradient) -> str:
    return FIXES["escape" if cut.then else cut.kind]
