"""One application of a custom Function, examined by the derivative checks of `hoglib.verify`.

Its first and second derivative are compared with differences along random directions, at the arguments
that it was applied to and near them.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from math import isnan
from time import perf_counter
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.parameter import is_lazy

from hoglib._core.messages.closures import held_tensors, with_tensors
from hoglib._core.modules.state import StateGuard, preserve_random_state, put_back, same
from hoglib._core.modules.swap import keep_swapped
from hoglib._core.numerics.element_differences import max_abs, random_like, unit_of
from hoglib._core.runtime.source_location import format_error
from hoglib._core.substrate.autograd import grad_enabled
from hoglib._core.torch_api import pytree, torch_internals
from hoglib._core.torch_api.dispatch import Args, Kw, Op, Types
from hoglib._core.torch_api.pytree import is_float
from hoglib._core.torch_api.torch_modes import AutocastState, without_stand_ins
from hoglib._core.torch_api.torch_private import private
from hoglib.stand_ins.mode import active, stand_ins_if
from hoglib.verification import function_rules, maps
from hoglib.verification.attribution import UNSEEN, attribution_rows, detached_copy
from hoglib.verification.call_variants import OWN_RULE, baseline, gradient_variants, vmap_fault
from hoglib.verification.comparison import NATURAL, Bounds, Options
from hoglib.verification.contract import ACCUMULATES, preserved_grads, reached
from hoglib.verification.derivatives import Derivatives
from hoglib.verification.layouts import copied
from hoglib.verification.precision import DOUBLE, exact_products
from hoglib.verification.report import Row
from hoglib.verification.subject import (
    Application,
    Lifted,
    Structure,
    Subject,
    kept_names,
    lifted,
    subject_of,
)  # fmt: skip

TorchDispatchMode: Any = private("torch.utils._python_dispatch.TorchDispatchMode")

SECONDS = 2.0  # the time that an examination may take; a slow Function is given up after half of it
MAX_RETRIES = 2  # examinations after one at values that differences do not resolve
EVALUATIONS = 22  # of a derivative by one tensor
WRONG = 5  # times as many of a wrong one
LARGE = 10_000  # elements; fewer rows of smaller inputs would save little
MAX_HELD = 2**26  # numbers in an object that an examination may copy


class Range(NamedTuple):
    """The least and the largest element of a tensor, or a Python number."""

    low: float
    high: float
    is_number: bool = False

    def contains(self, other: "Range") -> bool:
        """Whether other values leave this range by at most half of its width; a number has none."""
        width = 0.0 if self.is_number else self.high - self.low or abs(self.high)
        return self.low - width / 2 <= other.low and other.high <= self.high + width / 2

    def joined(self, other: "Range") -> "Range":
        return Range(min(self.low, other.low), max(self.high, other.high), self.is_number)


# Of each argument that holds tensors: its position, and the kinds of these.
Held = tuple[tuple[int, tuple[int, ...]], ...]


class Verdict(NamedTuple):
    """What an examination found.

    status: "right", "wrong", "not examined" (in full), or "unknown" (it raises, which the entry point
    does too, or the point was none of the user's). order: that of the derivative that is wrong, or may
    be. retries: how many examinations may follow, at other values, because these were no good.
    of_second: whether the second derivative is wrong, beside the first one or alone. domain: the
    structures of arguments, by position, in which alone it is right. times: applications that it was
    given for. ranges, held: the values that were examined, and what arguments held.
    """

    status: str
    text: str = ""
    order: int = 1
    retries: int = 0
    of_second: bool = False
    domain: tuple[tuple[int, Structure], ...] = ()
    times: int = 1
    ranges: tuple[Range, ...] = ()
    held: Held = ()

    @property
    def is_reported(self) -> bool:
        return self.status in ("wrong", "not examined")


RIGHT = Verdict("right")


@final
@dataclass(frozen=True)
class Applied:
    """An application, and the circumstances in which it ran."""

    app: Application
    by_module: Lifted | None  # if it got a module and its parameters
    forward: str  # the mode in which its jvp is used too: "fr" or "rf"
    autocast: AutocastState
    stand_ins: bool
    kept: tuple[tuple[int, frozenset[str]], ...]  # structures that arguments are computed to have
    held: Held  # by containers and objects among the arguments
    by_vmap: bool  # it ran under vmap, for which it has a rule

    @property
    def hiding(self) -> tuple[int, ...]:
        """The arguments that hold tensors with a graph, by which torch gives no gradient."""
        return tuple(i for i, kinds in self.held if not self.by_module and NO_GRADIENT in kinds)

    def applied_by(self, apply: Callable[..., Any]) -> "Applied":
        """The application of a Function with another `apply`."""
        return replace(self, app=self.app._replace(function=_applied_by(self.app.function, apply)))


NO_GRADIENT, CONSTANT = -1, -2


def applied(
    function: type[Function],
    args: tuple[Any, ...],
    by: tuple[bool, ...],
    forward: str,
    graphed: tuple[Any, ...] | None = None,
    given: tuple[Any, ...] = (),
    by_vmap: bool = False,
) -> Applied:
    """An application with copies of its tensors, which may be changed before it is examined.

    graphed: the arguments with the graph that they were computed by, where that can be looked at.
    given: the arguments as the user passed them.
    """
    with torch_internals.without_transforms(), torch.no_grad():
        copies = pytree.map_tensors(copied, args)
    wanted = tuple(i for i, x in enumerate(args) if by[i] and is_float(x))
    held = held_by(given)
    app = Application(_sharing(function, dict(held)), copies, wanted)
    by_module = lifted(function, args)
    if by_module is not None:
        by_module = by_module._replace(inputs=detached_copy(by_module.inputs))
    kept = () if by_module else tuple(kept_names(graphed, copies, wanted))
    return Applied(app, by_module, forward, AutocastState(), active(), kept, held, by_vmap)


def held_by(given: tuple[Any, ...]) -> Held:
    """The `held_kinds` of the arguments that hold tensors."""
    kinds = ((i, held_kinds(x, given)) for i, x in enumerate(given))
    return tuple((i, found) for i, found in kinds if found)


def held_kinds(x: object, given: tuple[Any, ...]) -> tuple[int, ...]:
    """Of each tensor in an argument that is none: which of the arguments it is too; else NO_GRADIENT if
    it needs a gradient, which torch does not give it, or CONSTANT."""
    held = held_tensors(x)
    places = {id(y): i for i, y in enumerate(given if held else ())}
    return tuple(places.get(id(y), NO_GRADIENT if y.requires_grad else CONSTANT) for y in held)


def _sharing(function: type[Function], held: dict[int, tuple[int, ...]]) -> type[Function]:
    """The Function, in whose containers and objects the tensors that are arguments too are always
    these."""
    shared = {i: kinds for i, kinds in held.items() if max(kinds) >= 0}
    if not shared:
        return function

    def apply(*args: Any) -> Any:
        given = list(args)
        for i, kinds in shared.items():
            given[i] = with_tensors(args[i], [args[k] if k >= 0 else None for k in kinds])
        return function.apply(*given)

    return _applied_by(function, apply)


def _applied_by(function: type[Function], apply: Callable[..., Any]) -> type[Function]:
    """The Function with another `apply`."""
    own = {"apply": staticmethod(apply), "__module__": function.__module__}
    return type(function.__name__, (function,), {**own, "__qualname__": function.__qualname__})


def _drawing_again(given: Applied) -> Applied:
    """The application of a Function whose own generators draw the same numbers in each run."""
    function = given.app.function
    own = [x for x in _reached(given.app) if isinstance(x, torch.Generator)]
    states = [(x, x.get_state()) for x in own]

    def apply(*args: Any) -> Any:
        for generator, state in states:
            generator.set_state(state)
        return function.apply(*args)

    return given.applied_by(apply) if own else given


def without_outputs(given: Applied, unused: frozenset[int]) -> Applied:
    """The application of a Function that returns its other outputs alone."""
    function = given.app.function

    def apply(*args: Any) -> Any:
        return tuple(y for i, y in enumerate(function.apply(*args)) if i not in unused)

    return given.applied_by(apply)


def examine(given: Applied) -> Verdict:
    """Whether the first and second derivative of a Function are right. What it changes is restored."""
    app = given.app
    name = app.function.__qualname__
    with (
        warnings.catch_warnings(action="ignore"),
        # the transforms and the hooks of the caller are of its own graph
        torch_internals.without_transforms(),
        torch_internals.without_saved_tensor_hooks(),
        grad_enabled(),
        keep_swapped(),
        exact_products(),
        preserve_random_state(),
        # as where the Function was applied, which may have been left since
        given.autocast.restored(),
        stand_ins_if(given.stand_ins),
        _no_communication(),
    ):
        try:
            with _preserve_reached(app) as accumulated:
                verdict = _judge(_drawing_again(given))
                if found := accumulated():
                    text = f"{name} is wrong: {ACCUMULATES.format(', '.join(found[:3]))}"
                    verdict = Verdict("wrong", text)
        except _NotExamined as reason:
            verdict = _not_examined(name, str(reason))
        # it refuses copies of its arguments, or values near them; SystemExit must not end the process
        except (Exception, SystemExit) as error:
            verdict = _not_examined(name, f"it raised {format_error(error)}")
    return verdict


def _not_examined(name: str, reason: str, extent: str = "") -> Verdict:
    text = (
        f"{name} was not examined{extent}: {reason}. Whether its second derivative is right is not "
        f"known. `hoglib.verify({name}, inputs)` checks it."
    )
    return Verdict("not examined", text, order=2)


class _NotExamined(Exception):
    """The reason why a Function is not run again."""


def _judge(given: Applied) -> Verdict:
    app, function = given.app, given.app.function
    if given.by_module is not None:
        fn, inputs, _ = given.by_module
        subject, several = subject_of(fn, inputs), True
    else:
        subject, several = _make_subject(given)
    subject, stop = subject.prepared()
    if stop is not None:
        raise _NotExamined(stop.text.rstrip("."))
    # one point alone where there is no time for two: the one that the user's run was at
    here = [subject.x, subject.perturbed_point()] if several else [subject.x]
    jvp = given.forward if function_rules.offers_jvp(function) else ""
    modes = ("rr", jvp) if jvp else ("rr",)
    surrogate = function_rules.is_surrogate(function)
    options = Options(modes=modes, surrogate=surrogate, bounds=Bounds(natural=NATURAL))
    options = options.in_dtype(subject.dtype)
    # what is found wrong along all directions may be right along those that arguments can take, or
    # for a value that is computed elsewhere
    found = _compare_derivatives(function, subject, here, options)
    if found.is_reported:
        found, subject = _restricted_verdict(given, subject, here, options, found)
    if found.is_reported and given.by_module is None:
        found = _with_value_from_elsewhere(app, options, found)
    if found.of_second and (cast := casts(given)[0]):
        found = found._replace(text=f"{found.text} {CAST.format(', '.join(cast))}")
    if found.status == "right" and not options.surrogate:
        for i in filter(partial(_depends_on, app), given.hiding):
            text = IN_CONTAINER.format(name=function.__qualname__, given=app.name(i))
            return Verdict("wrong", text, order=1)
    if found.status == "right" and given.by_vmap and not subject.draws:
        with suppress(Exception):  # the entry point raises it too
            base = baseline(subject, subject.x, options)
            if fault := vmap_fault(base, [subject.perturbed_point()]):
                text = f"the derivative of {function.__qualname__} is wrong by its vmap rule: "
                return Verdict("wrong", f"{text}{fault}. {OWN_RULE}")
    return found


def ranges_of(args: Sequence[Any]) -> tuple[Range, ...]:
    """The range of each strided tensor of real or complex numbers, and of each Python number."""
    with torch_internals.without_transforms(), torch.no_grad(), without_stand_ins():
        return tuple(
            Range(x, x, is_number=True) if type(x) in (int, float) else _range_of(x)
            for x in args
            if type(x) in (int, float) or (is_float(x) and x.layout is torch.strided and x.numel())
        )


def _range_of(x: Tensor) -> Range:
    low, high = (torch.view_as_real(x) if x.is_complex() else x).detach().aminmax()
    return Range(float(low), float(high))


IN_CONTAINER = (
    "the first derivative of {name} is wrong: {given} holds tensors that need gradients, and torch "
    "differentiates only by those that are arguments themselves. Pass each as one "
    "(`apply(x, *tensors)`), or detach them."
)


def _moved(x: Tensor, step: float) -> Tensor:
    return x + step * (x + unit_of(max_abs(x))) if is_float(x) else x


def _depends_on(app: Application, i: int) -> bool:
    """Whether its values change with the tensors that an argument holds."""

    def values(step: float) -> list[Tensor]:
        args = list(app.fresh())
        held = held_tensors(args[i])
        if sum(x.numel() for x in held) > MAX_HELD:
            raise _NotExamined(f"{app.name(i)} holds more than {MAX_HELD:.0e} numbers")
        args[i] = with_tensors(args[i], [_moved(x, step=step) for x in held])
        with torch.no_grad(), preserve_random_state():
            return pytree.tensors(app.function.apply(*args))

    return not all(map(torch.equal, values(0.0), values(0.01)))


def _restricted_verdict(
    given: Applied, subject: Subject, here: list[list[Tensor]], options: Options, found: Verdict
) -> tuple[Verdict, Subject]:
    """RIGHT, and the subject restricted, if the derivatives are right along the directions that keep a
    structure which the arguments are computed to have, or up to signs or phases of the outputs, which
    are arbitrary; else the verdict that was found, and the subject."""
    kept, f = dict(given.kept), subject.map
    place_of = {j: one.slot for j, one in enumerate(f.variables[: f.num_inputs])}

    def computed(j: int, one: Structure) -> bool:
        return one.name in kept.get(place_of.get(j, -1), ())

    for one in subject.restrictions(computed):
        if Derivatives(one, here, options).are_right():
            domain = tuple((place_of[j], structure) for j, structure in one.kept.items())
            return RIGHT._replace(domain=domain), one
    for one in subject.phase_fixings(real_too=found.status != "wrong"):
        if Derivatives(one, here, options).are_right():
            return RIGHT, one
    return found, subject


# A value that is computed elsewhere, and gets its derivative here.
#
#     y = F(x, z) = z,    z = z(x) by a solver under no_grad,    backward: u -> B(x, y)^T u
#
# By itself F does not depend on x. Its second derivative is right where it is that of z(x), which is
# known to first order: z + B (x' - x). The first one is right if B = dz/dx, which F cannot tell.

ELSEWHERE = (
    "the first derivative of {name} was not examined: its value is that of {given}, which is computed "
    "elsewhere. Whether it is right is not known. `hoglib.verify(f, inputs)` checks a function f that "
    "computes {given} and applies it; `surrogate = True` in the class says that it is."
)


def _with_value_from_elsewhere(app: Application, options: Options, found: Verdict) -> Verdict:
    """The verdict of a Function that returns arguments by which it is not differentiated."""
    function, by = app.function, app.by
    point = [x.double() for x in (app.args[i] for i in by)]
    # no such argument; or it refuses float64, or its gradient has no derivative
    with suppress(Exception):

        def applied_to(xs: Sequence[Tensor], values: Mapping[int, Tensor]) -> Any:
            args = [x.double() if is_float(x) else x for x in app.fresh()]
            for i, x in [*zip(by, xs, strict=True), *values.items()]:
                args[i] = x
            return function.apply(*args)

        own = [x.clone().requires_grad_() for x in point]
        outputs = [y for y in pytree.tensors(applied_to(own, {})) if y.requires_grad]
        others = {i: x.double() for i, x in enumerate(app.args) if is_float(x) and i not in by}
        place_of = [next(i for i, x in others.items() if torch.equal(x, y)) for y in outputs]
        us = [torch.zeros_like(y, requires_grad=True) for y in outputs]
        grads = maps.grad(outputs, own, us, create_graph=True)

        def with_moved_value(*xs: Tensor) -> Any:
            moves = [(x - a).detach() for x, a in zip(xs, point, strict=True)]
            tangents = maps.grad(grads, us, moves, create_graph=True)
            moved = [y + t for y, t in zip(outputs, tangents, strict=True)]
            return applied_to(xs, {i: z.detach() for i, z in zip(place_of, moved, strict=True)})

        subject, stop = subject_of(with_moved_value, tuple(point)).prepared()
        if stop is None:
            verdict = _compare_derivatives(function, subject, [subject.x], options)
            if verdict.status == "right" and not options.surrogate:
                given = ", ".join(map(app.name, place_of))
                text = ELSEWHERE.format(name=function.__qualname__, given=given)
                verdict = Verdict("not examined", text)
            found = verdict
    return found


# Other values than those it was applied to, where a Function may take another branch.
#
# A backward may be cut for some values only: relu of a saved intermediate, the absolute value of a
# matrix that is positive at the inputs. Values of other signs and sizes may also lie outside of its
# domain, so that only a second derivative counts that is wrong where the first one is right.


def other_points(subject: Subject) -> Iterator[list[Tensor]]:
    """Points with other signs and sizes at which the function and its gradient are finite."""
    signed = [torch.where(x == 0, 1.0, random_like(x, subject.random)) for x in subject.x]
    for size in (30.0, 4.0, 0.03):
        point = [size * s * x.abs() for s, x in zip(signed, subject.x, strict=True)]
        with suppress(Exception, SystemExit):  # it may refuse them
            values = subject.map(*point)
            results = [*values, *subject.gradient_of_sum(point)]
            if all(bool(y.isfinite().all()) for y in results):
                yield point


def other_points_rows(subject: Subject, options: Options) -> list[Row] | None:
    """The row of a second derivative that is wrong at other values, and those of its causes; empty
    where none is, None where nothing could be judged."""
    judged = False
    for x in other_points(subject):
        derivatives = Derivatives(subject, [x], options)
        with suppress(Exception, SystemExit):  # it may refuse what the user did not pass
            first = () if options.surrogate else derivatives.first_order()
            if any(row.status in ("warn", "fail") for row in first):
                continue
            failed = [row for row in derivatives.higher_order(2) if row.status == "fail"]
            found = [derivatives.found[row.name] for row in failed]
            if any(one.raised is not None or isnan(one.worst.got) for one in found):
                continue
            judged = True
            causes_of = attribution_rows(subject, x, derivatives.found) if failed else ()
            causes = [row for row in causes_of if row.status == "fail"]
            # without a known cause, what backward calls may have no derivative there
            if failed and not all(row.name.endswith(UNSEEN) for row in causes):
                return [failed[0], *causes]
    return [] if judged else None


def _make_subject(given: Applied) -> tuple[Subject, bool]:
    """What is compared, and whether there is time for several points; raises if there is for none."""
    app = given.app
    if sparse := [app.name(i) for i in app.by if app.args[i].layout is not torch.strided]:
        raise _NotExamined(f"derivatives by {', '.join(sparse)}, which is sparse, are not compared")
    _warm_up()
    began = perf_counter()
    plain, seconds = _trial_run(app)
    # the first call may have compiled or allocated something; to watch small operations takes longest
    if seconds > SECONDS > 2 * (perf_counter() - began):
        seconds = min(seconds, _trial_run(app, watched=False)[1])
    # one that is wrong takes several times the estimate
    is_large = max(app.args[i].numel() for i in app.by) >= LARGE
    limit = SECONDS / WRONG if is_large else SECONDS
    if plain and seconds > limit:
        with suppress(Exception):  # its rows depend on one another in shape
            fewer = _first_rows(app, limit / seconds)
            plain, less = _trial_run(fewer)
            app, seconds = fewer, min(seconds, less)
    # one point takes half of the estimate, which is for two
    if seconds > 2 * SECONDS:
        raise _NotExamined(f"that would take some {seconds / 2:.0f} seconds")
    own_dtype = not plain or casts(replace(given, app=app))[1]
    subject = subject_of(app.function, app.leaves(), own_dtype=own_dtype, as_given=True)
    return subject, seconds <= SECONDS


def _compare_derivatives(
    function: type[Function], subject: Subject, points: list[list[Tensor]], options: Options
) -> Verdict:
    """The verdict on the derivatives at some points."""
    derivatives = Derivatives(subject, points, options)
    first = [] if options.surrogate else list(derivatives.first_order())
    second = list(derivatives.higher_order(2))
    name = function.__qualname__
    wrong_first, wrong = (_silent_failures(rows, derivatives, function) for rows in (first, second))
    if wrong:
        rows = attribution_rows(subject, points[-1], derivatives.found)
        causes = [row for row in rows if row.status == "fail"]
        return _wrong_second(function, [wrong[0], *causes], order=1 if wrong_first else 2)
    if not options.surrogate:
        with suppress(Exception):  # where nothing is left to differentiate, which is judged above
            variants = gradient_variants(baseline(subject, points[-1], options))
            differing = [r for r in variants if r.status == "fail" and r.error is not None]
            wrong_first = differing[:1] or wrong_first
    if first and not wrong_first and (kind := derivatives.describe_steps()):
        wrong_first = [Row("first derivative", "fail", None, kind)]
    if wrong_first and not _stops_gradient(subject):
        row = wrong_first[0]
        which = row.name.removeprefix("layout: ") if row.name.startswith("layout") else ""
        text = f"the first derivative of {name} is wrong{which and f' for {which}'}: {row.text}"
        return Verdict("wrong", text)
    unclear = [row.text.split(". ")[0] for row in second if row.status == "warn"]
    if unclear:
        return _not_examined(name, unclear[0], " in full")._replace(retries=MAX_RETRIES)
    return Verdict("right" if any(row.status == "pass" for row in second) else "unknown")


def _wrong_second(function: type[Function], rows: list[Row], order: int = 2) -> Verdict:
    """The verdict on a second derivative; rows: what is wrong, and the causes."""
    name = function.__qualname__
    causes = " ".join(row.text for row in rows[1:3] or rows)
    text = (
        f"the second derivative of {name} is wrong. {causes} `hoglib.verify({name}, inputs)` shows all "
        "checks."
    )
    return Verdict("wrong", text, order=order, of_second=True)


def _stops_gradient(subject: Subject) -> bool:
    """Whether its gradient is zero, which takes the inputs for constants as `.detach()` does; also for
    small incoming gradients, which one that drops large ones lets through; and without a graph, for a
    backward that depends on whether gradients are enabled."""
    values = subject.map(*subject.x)
    return not any(
        bool(g.any())
        for create_graph in (False, True)  # which may raise
        for scale in (1.0, 1e-3, 1e-6)
        for g in maps.gradient(subject.map, len(subject.x), create_graph=create_graph)(
            *subject.x, *(torch.full_like(y, scale) for y in values)
        )
    )


def _silent_failures(rows: list[Row], found: Derivatives, function: type[Function]) -> list[Row]:
    """The rows that failed, but for those of what raises at every entry point.

    A once-differentiable backward does not: `autograd.grad(allow_unused=True)` returns None for it.
    """
    failed = [row for row in rows if row.status == "fail"]
    if torch_internals.is_once_differentiable(function):
        return failed
    return [row for row in failed if found.found[row.name].raised is None]


CAST = (
    "It saves {} as copies in other dtypes (by `custom_fwd(cast_inputs=)` or `.float()`), which have "
    "no graph. Cast arguments before `apply`, and results after it."
)


def casts(given: Applied) -> tuple[list[str], bool]:
    """The arguments and outputs of which it saves cast copies alone, which have no graph, where it
    saves themselves in wider dtypes; and whether it saves other ones themselves in any of these."""
    app, own, others = given.app, set[str](), list[set[str]]()
    if all(x.dtype in DOUBLE for x in app.args if is_float(x)):
        return [], False
    with suppress(Exception), given.autocast.restored(), preserve_random_state():
        own = app.kept()
        for dtype in (torch.float32, torch.float64):
            args = [x.to(dtype) if is_float(x) and not x.is_complex() else x for x in app.args]
            with suppress(Exception):  # it may refuse the dtype
                others.append(app._replace(args=tuple(args)).kept())
    return sorted(set().union(*others) - own), any(kept != own for kept in others)


def _trial_run(app: Application, *, watched: bool = True) -> tuple[bool, float]:
    """Whether all that it runs are torch operations, and the seconds that an examination will take."""
    began = perf_counter()
    args = app.fresh()
    leaves = [args[i].requires_grad_() for i in app.by]
    for i, leaf in zip(app.by, leaves, strict=True):
        args[i] = leaf.clone()  # which may be changed in place
    operations = _Operations()
    with operations if watched else nullcontext():
        outputs = app.function.apply(*args)
        if (forward := perf_counter() - began) > SECONDS / 2:
            return operations.plain, forward * EVALUATIONS * (len(leaves) + 1)
        live = [y for y in pytree.tensors(outputs) if y.requires_grad]
        try:
            grads = maps.grad(live, leaves, create_graph=True)
        except Exception:  # a first derivative may be all that is asked for, which needs no graph
            grads = maps.grad(live, leaves)
        operations.returned((outputs, grads))
    # it cannot be differentiated again, which the entry point raises too
    with suppress(RuntimeError):
        maps.grad(grads, leaves)
    if any(x.is_cuda for x in leaves):
        torch.cuda.synchronize()
    return operations.plain, (perf_counter() - began) * EVALUATIONS * (len(leaves) + 1)


@cache
def _warm_up() -> None:
    """What torch imports at first, which is not to be counted."""
    x = torch.ones(1, requires_grad=True)
    with _Operations():
        (gradient,) = maps.grad([x**3], [x], create_graph=True)
    maps.grad([gradient], [x])


def _first_rows(app: Application, share: float) -> Application:
    """The application to a share of the samples: the first rows of all tensors that have as many."""
    count = len(app.args[app.by[0]])
    rows = pytree.rows(app.args, count, 0, max(2, int(count * share)))
    return app._replace(args=pytree.map_tensors(torch.clone, rows))


@contextmanager
def _preserve_reached(app: Application) -> Iterator[Callable[[], list[str]]]:
    """Restores what the Function reaches besides its arguments. Yields a function that describes the
    tensors whose .grad was changed."""
    function = app.function
    own, found = _attributes_of(function), _reached(app)
    modules = [x for x in found if isinstance(x, nn.Module)]
    generators = [x for x in found if isinstance(x, torch.Generator)]
    tensors = [x for x in found if isinstance(x, Tensor) and not (is_lazy(x) or x.is_inference())]
    values = [(x, x.detach().clone()) for x in tensors]
    with StateGuard(modules, generators), preserved_grads(function, *app.args) as changed:
        try:
            yield changed
        finally:
            for x, value in values:
                if not same(x.detach(), value):
                    put_back(x, value)
            for c, k, v in own:
                if vars(c).get(k) is not v:
                    setattr(c, k, v)


def _attributes_of(function: type[Function]) -> list[tuple[type, str, Any]]:
    """The attributes of its classes."""
    classes = function.__mro__[: function.__mro__.index(Function)]
    return [(c, k, v) for c in classes for k, v in vars(c).items() if not k.startswith("__")]


def _reached(app: Application) -> list[Any]:
    """The tensors, modules and generators that a Function reaches, by its attributes too."""
    return reached(app.function, [*app.args, [v for *_, v in _attributes_of(app.function)]])


# What it runs


def _no_communication() -> AbstractContextManager[Any]:
    several = torch.distributed.is_available() and torch.distributed.is_initialized()
    return _NoCommunication() if several else nullcontext()


@final
class _NoCommunication(TorchDispatchMode):
    """Stops a Function that communicates between processes: the others do not run it again."""

    def __torch_dispatch__(self, func: Op, types: Types, args: Args = (), kwargs: Kw = None) -> Any:
        if "c10d" in func.namespace:
            raise _NotExamined("it communicates between processes, and is not run again")
        return func(*args, **(kwargs or {}))


@final
class _Operations(TorchDispatchMode):
    """Whether all that runs is torch's own, and no memory is filled by anything else."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = True
        self._unwritten: dict[int, Any] = {}  # by the address of the memory

    def __torch_dispatch__(self, func: Op, types: Types, args: Args = (), kwargs: Kw = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.plain &= func.namespace in ("aten", "prim", "prims")
        tensors = pytree.tensors((args, kwargs))
        if func._schema.is_mutable:
            for x in tensors:
                self._unwritten.pop(_memory_address(x), None)
        elif func.overloadpacket.__name__ in ("empty", "empty_like", "empty_strided", "new_empty"):
            self._unwritten |= {_memory_address(y): y for y in pytree.leaves(result)}
        else:
            views = pytree.tensors(result)
            known = {_memory_address(x) for x in tensors}
            if not any(_memory_address(y) in known for y in views):
                self.returned(tensors)
        return result

    def returned(self, values: object) -> None:
        """These are read: something must have written them."""
        addresses = [_memory_address(x) for x in pytree.leaves(values) if isinstance(x, Tensor)]
        self.plain &= not any(address in self._unwritten for address in addresses if address)


def _memory_address(x: Tensor) -> int:
    """Of its memory; 0 for a tensor without elements."""
    return x.untyped_storage().data_ptr() if x.layout is torch.strided and x.numel() else 0
