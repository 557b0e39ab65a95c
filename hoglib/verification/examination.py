"""Examine one application of a custom Function by the derivative checks of `hoglib.verify`.

The first and second derivative are compared with finite differences along random directions, at the
arguments of the application and near them.
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
from hoglib.stand_ins.mode import active, stand_ins_if
from hoglib.verification import function_rules, maps
from hoglib.verification.attribution import UNSEEN, attribution_rows, detached_copy
from hoglib.verification.call_variants import OWN_RULE, baseline, gradient_variants, vmap_fault
from hoglib.verification.comparison import NATURAL, Bounds, Options
from hoglib.verification.contract import ACCUMULATES, preserve_grads, reachable
from hoglib.verification.derivatives import Derivatives, without_option
from hoglib.verification.layouts import copy_with_layout
from hoglib.verification.precision import DOUBLE, exact_products
from hoglib.verification.report import Row
from hoglib.verification.subject import (
    Application,
    ModuleCall,
    Structure,
    Subject,
    guaranteed_structures,
    lift_to_module,
    subject_of,
)  # fmt: skip

SECONDS = 2.0  # time limit of an examination; after half the time a trial run stops
MAX_RETRIES = 2  # further examinations if rounding hid the answer at the values of the first
EVALUATIONS = 22  # evaluations of a derivative that an examination takes for each input tensor
WRONG = 5  # a wrong Function takes this many times the estimate
LARGE = 10_000  # elements; of smaller inputs all rows are examined, as fewer would save little
MAX_HELD = 2**26  # largest size, in numbers, of a container or object to copy


class Range(NamedTuple):
    """The interval of a tensor's elements, or a Python number."""

    low: float
    high: float
    is_number: bool = False  # a Python number: only an equal one is contained

    def contains(self, other: "Range") -> bool:
        """Whether another range exceeds this one by at most half of its width on each side."""
        width = 0.0 if self.is_number else self.high - self.low or abs(self.high)
        return self.low - width / 2 <= other.low and other.high <= self.high + width / 2

    def joined(self, other: "Range") -> "Range":
        return Range(min(self.low, other.low), max(self.high, other.high), self.is_number)


# For each argument that holds tensors: its position, and held_kinds() of the tensors.
Held = tuple[tuple[int, tuple[int, ...]], ...]


class Verdict(NamedTuple):
    """The result of an examination.

    "unknown": no row passed, because the Function raises. The entry point then raises as well.
    """

    status: str  # "right", "wrong", "not examined" (perhaps in full only), or "unknown"
    text: str = ""  # the message
    order: int = 1  # the lowest order of a (possibly) wrong derivative
    retries: int = 0  # examinations that may follow at other values: these decided nothing
    of_second: bool = False  # the second derivative is wrong
    domain: tuple[tuple[int, Structure], ...] = ()  # right only for leaves with these structures
    times: int = 1  # applications that relied on this verdict
    ranges: tuple[Range, ...] = ()  # of the examined values
    held: Held = ()  # tensors held by the examined arguments

    @property
    def is_reported(self) -> bool:
        return self.status in ("wrong", "not examined")


RIGHT = Verdict("right")


@final
@dataclass(frozen=True)
class Case:
    """An application of a Function, and the modes around it."""

    app: Application
    # the call through a module, if the Function got one and its parameters
    by_module: ModuleCall | None
    forward: str  # second-order mode that also uses its jvp: "fr" or "rf"; "" for none
    autocast: AutocastState  # where it was applied
    stand_ins: bool  # stand-ins were active
    kept: tuple[tuple[int, frozenset[str]], ...]  # names of structures guaranteed by computation
    held: Held  # tensors in containers and objects among the arguments
    by_vmap: bool  # applied under vmap, by its own or its generated rule

    @property
    def hiding(self) -> tuple[int, ...]:
        """Indices of arguments that hold tensors requiring grad: torch ignores those tensors."""
        return tuple(i for i, kinds in self.held if not self.by_module and NO_GRADIENT in kinds)

    def applied_by(self, apply: Callable[..., Any]) -> "Case":
        """This application with another `apply`."""
        return replace(self, app=self.app._replace(function=_applied_by(self.app.function, apply)))


# Kinds of a tensor held by an argument; indices >= 0 stand for an argument identical to the tensor.
NO_GRADIENT, CONSTANT = -1, -2


def make_case(
    function: type[Function],
    args: tuple[Any, ...],
    by: tuple[bool, ...],
    forward: str,
    graphed: tuple[Any, ...] | None = None,
    given: tuple[Any, ...] = (),
    by_vmap: bool = False,
) -> Case:
    """Record an application, with copies of its tensors: the user's may change before the examination.

    graphed: the arguments with their graphs; None in a recomputation, where the graphs are not those
    that the arguments were computed by. given: the arguments as the user passed them.
    """
    with torch_internals.without_transforms(), torch.no_grad():
        copies = pytree.map_tensors(copy_with_layout, args)
    wanted = tuple(i for i, x in enumerate(args) if by[i] and is_float(x))
    held = held_table(given)
    app = Application(_keep_aliases(function, dict(held)), copies, wanted)
    by_module = lift_to_module(function, args)
    if by_module is not None:
        by_module = by_module._replace(inputs=detached_copy(by_module.inputs))
    kept = () if by_module else tuple(guaranteed_structures(graphed, copies, wanted))
    return Case(app, by_module, forward, AutocastState(), active(), kept, held, by_vmap)


def held_table(given: tuple[Any, ...]) -> Held:
    """held_kinds() of each argument that holds tensors, with its position."""
    kinds = ((i, held_kinds(x, given)) for i, x in enumerate(given))
    return tuple((i, found) for i, found in kinds if found)


def held_kinds(x: object, given: tuple[Any, ...]) -> tuple[int, ...]:
    """The kind of each tensor that a container or object holds: the index of an identical
    argument; otherwise NO_GRADIENT if it requires grad (torch gives it none), or CONSTANT."""
    held = held_tensors(x)
    places = {id(y): i for i, y in enumerate(given if held else ())}
    return tuple(places.get(id(y), NO_GRADIENT if y.requires_grad else CONSTANT) for y in held)


def _keep_aliases(function: type[Function], held: dict[int, tuple[int, ...]]) -> type[Function]:
    """A subclass that keeps aliases: if an argument is also held by a container, its `apply` puts the
    new argument into the container as well."""
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
    """A subclass of the Function with another `apply`."""
    own = {"apply": staticmethod(apply), "__module__": function.__module__}
    return type(function.__name__, (function,), {**own, "__qualname__": function.__qualname__})


def _reset_generators(given: Case) -> Case:
    """The application with its own torch.Generators reset in each run, so that all runs draw alike."""
    function = given.app.function
    own = [x for x in _reachable_objects(given.app) if isinstance(x, torch.Generator)]
    states = [(x, x.get_state()) for x in own]

    def apply(*args: Any) -> Any:
        for generator, state in states:
            generator.set_state(state)
        return function.apply(*args)

    return given.applied_by(apply) if own else given


def without_outputs(given: Case, unused: frozenset[int]) -> Case:
    """The application without its unused outputs."""
    function = given.app.function

    def apply(*args: Any) -> Any:
        return tuple(y for i, y in enumerate(function.apply(*args)) if i not in unused)

    return given.applied_by(apply)


def examine(given: Case) -> Verdict:
    """Judge the first and second derivative of a Function; restores all state that it changes."""
    app = given.app
    name = app.function.__qualname__
    with (
        warnings.catch_warnings(action="ignore"),
        # transforms and saved-tensor hooks around the entry point concern the user's graph only
        torch_internals.without_transforms(),
        torch_internals.without_saved_tensor_hooks(),
        grad_enabled(),
        keep_swapped(),
        exact_products(),
        preserve_random_state(),
        # the modes at the application; the user may have left them before the examination
        given.autocast.restored(),
        stand_ins_if(given.stand_ins),
        _no_communication(),
    ):
        try:
            with _preserve_reached(app) as accumulated:
                verdict = _judge(_reset_generators(given))
                if found := accumulated():
                    text = f"{name} is wrong: {ACCUMULATES.format(', '.join(found[:3]))}"
                    verdict = Verdict("wrong", text)
        except _NotExamined as reason:
            verdict = _not_examined(name, str(reason))
        # it may refuse copies of its arguments or values near them; SystemExit must not end the process
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
    """A Function is not examined; the message is the reason."""


def _judge(given: Case) -> Verdict:
    app, function = given.app, given.app.function
    if given.by_module is not None:
        fn, inputs, _ = given.by_module
        subject, several = subject_of(fn, inputs), True
    else:
        subject, several = _make_subject(given)
    subject, stop = subject.prepared()
    if stop is not None:
        raise _NotExamined(stop.text.rstrip("."))
    # two points if there is time; with one, the point of the user's run
    here = [subject.x, subject.perturbed_point()] if several else [subject.x]
    jvp = given.forward if function_rules.offers_jvp(function) else ""
    modes = ("rr", jvp) if jvp else ("rr",)
    surrogate = function_rules.is_surrogate(function)
    options = Options(modes=modes, surrogate=surrogate, bounds=Bounds(natural=NATURAL))
    options = options.in_dtype(subject.dtype)
    # a failure need not be the Function's: try directions that the arguments can actually take, and
    # values that are computed elsewhere
    verdict = _compare_derivatives(function, subject, here, options)
    if verdict.is_reported:
        verdict, subject = _restricted_verdict(given, subject, here, options, verdict)
    if verdict.is_reported and given.by_module is None:
        verdict = _with_value_from_elsewhere(app, options, verdict)
    if verdict.of_second and (cast := casts(given)[0]):
        verdict = verdict._replace(text=f"{verdict.text} {CAST.format(', '.join(cast))}")
    if verdict.status == "right" and not options.surrogate:
        for i in filter(partial(_depends_on, app), given.hiding):
            text = IN_CONTAINER.format(name=function.__qualname__, given=app.name(i))
            return Verdict("wrong", text, order=1)
    if verdict.status == "right" and given.by_vmap and not subject.draws:
        with suppress(Exception):  # vmap raises at the entry point, too
            base = baseline(subject, subject.x, options)
            if fault := vmap_fault(base, [subject.perturbed_point()]):
                text = f"the derivative of {function.__qualname__} is wrong by its vmap rule: "
                return Verdict("wrong", f"{text}{fault}. {OWN_RULE}")
    return verdict


def ranges_of(args: Sequence[Any]) -> tuple[Range, ...]:
    """The ranges of strided real or complex tensors and of Python numbers among the arguments."""
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


def _shift(x: Tensor, step: float) -> Tensor:
    return x + step * (x + unit_of(max_abs(x))) if is_float(x) else x


def _depends_on(app: Application, i: int) -> bool:
    """Whether the values of the Function change with the tensors that argument i holds."""

    def values(step: float) -> list[Tensor]:
        args = list(app.fresh())
        held = held_tensors(args[i])
        if sum(x.numel() for x in held) > MAX_HELD:
            raise _NotExamined(f"{app.name(i)} holds more than {MAX_HELD:.0e} numbers")
        args[i] = with_tensors(args[i], [_shift(x, step=step) for x in held])
        with torch.no_grad(), preserve_random_state():
            return pytree.tensors(app.function.apply(*args))

    return not all(map(torch.equal, values(0.0), values(0.01)))


def _restricted_verdict(
    given: Case, subject: Subject, here: list[list[Tensor]], options: Options, verdict: Verdict
) -> tuple[Verdict, Subject]:
    """Judge a wrong Function once more on smaller spaces of directions and outputs.

    RIGHT, with the restricted subject, if the derivatives are right along directions that keep the
    structures which the arguments are computed to have, or if they are right once the arbitrary signs
    or phases of the outputs are fixed. Otherwise the given verdict and subject.
    """
    kept, f = dict(given.kept), subject.map
    place_of = {j: one.slot for j, one in enumerate(f.variables[: f.num_inputs])}

    def computed(j: int, one: Structure) -> bool:
        return one.name in kept.get(place_of.get(j, -1), ())

    for one in subject.restrictions(computed):
        if Derivatives(one, here, options).are_right():
            domain = tuple((place_of[j], structure) for j, structure in one.kept.items())
            return RIGHT._replace(domain=domain), one
    for one in subject.phase_fixings(real_too=verdict.status != "wrong"):
        if Derivatives(one, here, options).are_right():
            return RIGHT, one
    return verdict, subject


# A value computed elsewhere; a Function F only supplies the derivative:
#
#     y = F(x, z) = z,    z = z(x) by a solver under no_grad,    backward: u -> B(x, y)^T u
#
# The value of F does not depend on x, so differences of F say nothing. Its second derivative is judged
# with z moved to first order, z + B (x' - x). Whether B = dz/dx, F alone cannot tell.

ELSEWHERE = (
    "the first derivative of {name} was not examined: its value is that of {given}, which is computed "
    "elsewhere. Whether it is right is not known. `hoglib.verify(f, inputs)` checks a function f that "
    "computes {given} and applies it; `surrogate = True` in the class says that it is."
)


def _with_value_from_elsewhere(app: Application, options: Options, found: Verdict) -> Verdict:
    """Judge a Function that returns some of its arguments and differentiates by others."""
    function, by = app.function, app.by
    point = [x.double() for x in (app.args[i] for i in by)]
    # raises without such an argument, if float64 is refused, or if the gradient has no derivative
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


# Points far from the user's values, where a Function may take another branch.
#
# A backward may be cut for some values only: relu of a saved intermediate, the absolute value of a
# matrix that is positive at the inputs. A point with other signs or sizes may also lie outside of the
# domain. So a wrong second derivative counts only where the first one is right.


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
    """Judge the second derivative at other points: the failed row and the rows of its causes; empty if
    it is right, None if no point could be judged."""
    judged = False
    for x in other_points(subject):
        derivatives = Derivatives(subject, [x], options)
        with suppress(Exception, SystemExit):  # it may refuse values that the user did not pass
            first = () if options.surrogate else derivatives.first_order()
            if any(row.status in ("warn", "fail") for row in first):
                continue
            failed = [row for row in derivatives.higher_order(2) if row.status == "fail"]
            results = [derivatives.found[row.name] for row in failed]
            if any(one.raised is not None or isnan(one.worst.got) for one in results):
                continue
            judged = True
            causes_of = attribution_rows(subject, x, derivatives.found) if failed else ()
            causes = [row for row in causes_of if row.status == "fail"]
            # without a known cause, a library call in backward may not be differentiable there
            if failed and not all(row.name.endswith(UNSEEN) for row in causes):
                return [failed[0], *causes]
    return [] if judged else None


def _make_subject(given: Case) -> tuple[Subject, bool]:
    """The subject to compare, and whether there is time for several points; raises _NotExamined if not
    even for one."""
    app = given.app
    if sparse := [app.name(i) for i in app.by if app.args[i].layout is not torch.strided]:
        raise _NotExamined(f"derivatives by {', '.join(sparse)}, which is sparse, are not compared")
    _warm_up()
    began = perf_counter()
    plain, seconds = _trial_run(app)
    # the first run may have compiled something; with small operations, watching takes most of the time
    if seconds > SECONDS > 2 * (perf_counter() - began):
        seconds = min(seconds, _trial_run(app, watched=False)[1])
    # a wrong Function takes several times the estimate; large ones are cut early
    is_large = max(app.args[i].numel() for i in app.by) >= LARGE
    limit = SECONDS / WRONG if is_large else SECONDS
    if plain and seconds > limit:
        with suppress(Exception):  # the shapes of its arguments may not allow fewer rows
            fewer = _first_rows(app, limit / seconds)
            plain, less = _trial_run(fewer)
            app, seconds = fewer, min(seconds, less)
    # the estimate is for two points
    if seconds > 2 * SECONDS:
        raise _NotExamined(f"that would take some {seconds / 2:.0f} seconds")
    own_dtype = not plain or casts(replace(given, app=app))[1]
    subject = subject_of(app.function, app.leaves(), own_dtype=own_dtype, as_given=True)
    return subject, seconds <= SECONDS


def _compare_derivatives(
    function: type[Function], subject: Subject, points: list[list[Tensor]], options: Options
) -> Verdict:
    """The verdict from the rows of the derivative checks at some points."""
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
        with suppress(Exception):  # no gradient to compare: the rows above say so
            variants = gradient_variants(baseline(subject, points[-1], options))
            differing = [r for r in variants if r.status == "fail" and r.error is not None]
            wrong_first = differing[:1] or wrong_first
    if first and not wrong_first and (kind := derivatives.describe_steps()):
        wrong_first = [Row("first derivative", "fail", None, kind)]
    if wrong_first and not _stops_gradient(subject):
        row = wrong_first[0]
        which = row.name.removeprefix("layout: ") if row.name.startswith("layout") else ""
        where, text = which and f" for {which}", without_option(row.text)
        text = f"the first derivative of {name} is wrong{where}: {text}"
        return Verdict("wrong", text)
    unclear = [row.text.split(". ")[0] for row in second if row.status == "warn"]
    if unclear:
        return _not_examined(name, unclear[0], " in full")._replace(retries=MAX_RETRIES)
    return Verdict("right" if any(row.status == "pass" for row in second) else "unknown")


def _wrong_second(function: type[Function], rows: list[Row], order: int = 2) -> Verdict:
    """The verdict on a wrong second derivative. rows: the failed row, then its causes."""
    name = function.__qualname__
    causes = " ".join(row.text for row in rows[1:3] or rows)
    text = (
        f"the second derivative of {name} is wrong. {causes} `hoglib.verify({name}, inputs)` shows all "
        "checks."
    )
    return Verdict("wrong", text, order=order, of_second=True)


def _stops_gradient(subject: Subject) -> bool:
    """Whether the gradient is zero on purpose, as by `.detach()`.

    Also tried with small incoming gradients, because a clipping backward drops large ones; and without
    a graph, because backward may depend on torch.is_grad_enabled().
    """
    values = subject.map(*subject.x)
    return not any(
        bool(g.any())
        for create_graph in (False, True)  # True may raise: try it last
        for scale in (1.0, 1e-3, 1e-6)
        for g in maps.gradient(subject.map, len(subject.x), create_graph=create_graph)(
            *subject.x, *(torch.full_like(y, scale) for y in values)
        )
    )


def _silent_failures(rows: list[Row], found: Derivatives, function: type[Function]) -> list[Row]:
    """The failed rows, except rows with an error: the entry point raises it, too.

    A once-differentiable backward does not raise there: `autograd.grad(allow_unused=True)` gives None.
    """
    failed = [row for row in rows if row.status == "fail"]
    if torch_internals.is_once_differentiable(function):
        return failed
    return [row for row in failed if found.found[row.name].raised is None]


CAST = (
    "It saves {} as copies in other dtypes (by `custom_fwd(cast_inputs=)` or `.float()`), which have "
    "no graph. Cast arguments before `apply`, and results after it."
)


def casts(given: Case) -> tuple[list[str], bool]:
    """Arguments and outputs that the Function saves only as cast copies, without a graph, although it
    saves the tensors themselves if they come in a wider dtype; and whether any wider dtype changes
    which tensors it saves."""
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
    """Run forward and both backwards once: whether they run nothing but plain torch operations, and the
    seconds that an examination would take."""
    began = perf_counter()
    args = app.fresh()
    leaves = [args[i].requires_grad_() for i in app.by]
    for i, leaf in zip(app.by, leaves, strict=True):
        args[i] = leaf.clone()  # forward may change it in place, which autograd refuses for a leaf
    operations = _Operations()
    with operations if watched else nullcontext():
        outputs = app.function.apply(*args)
        if (forward := perf_counter() - began) > SECONDS / 2:
            return operations.plain, forward * EVALUATIONS * (len(leaves) + 1)
        live = [y for y in pytree.tensors(outputs) if y.requires_grad]
        try:
            grads = maps.grad(live, leaves, create_graph=True)
        except Exception:  # it may offer a first derivative only, without a graph
            grads = maps.grad(live, leaves)
        operations.returned((outputs, grads))
    # the second derivative may raise: the entry point then raises as well
    with suppress(RuntimeError):
        maps.grad(grads, leaves)
    if any(x.is_cuda for x in leaves):
        torch.cuda.synchronize()
    return operations.plain, (perf_counter() - began) * EVALUATIONS * (len(leaves) + 1)


@cache
def _warm_up() -> None:
    """Let torch do its lazy imports, so that they do not count in the time of a trial run."""
    x = torch.ones(1, requires_grad=True)
    with _Operations():
        (gradient,) = maps.grad([x**3], [x], create_graph=True)
    maps.grad([gradient], [x])


def _first_rows(app: Application, share: float) -> Application:
    """The application to fewer samples: the first rows of all tensors that have as many rows as the
    first differentiated argument. share: fraction of rows."""
    count = len(app.args[app.by[0]])
    rows = pytree.rows(app.args, count, 0, max(2, int(count * share)))
    return app._replace(args=pytree.map_tensors(torch.clone, rows))


@contextmanager
def _preserve_reached(app: Application) -> Iterator[Callable[[], list[str]]]:
    """Restore tensors, modules, generators and class attributes that the Function reaches besides its
    arguments. Yields a function that describes tensors with a changed .grad."""
    function = app.function
    own, objects = _attributes_of(function), _reachable_objects(app)
    modules = [x for x in objects if isinstance(x, nn.Module)]
    generators = [x for x in objects if isinstance(x, torch.Generator)]
    tensors = [x for x in objects if isinstance(x, Tensor) and not (is_lazy(x) or x.is_inference())]
    values = [(x, x.detach().clone()) for x in tensors]
    with StateGuard(modules, generators), preserve_grads(function, *app.args) as changed:
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
    """The attributes of the Function's class and of its bases: (class, name, value)."""
    classes = function.__mro__[: function.__mro__.index(Function)]
    return [(c, k, v) for c in classes for k, v in vars(c).items() if not k.startswith("__")]


def _reachable_objects(app: Application) -> list[Any]:
    """The tensors, modules and generators that a Function reaches, also through class attributes."""
    return reachable(app.function, [*app.args, [v for *_, v in _attributes_of(app.function)]])


# Dispatch modes that watch the operations of a Function


def _no_communication() -> AbstractContextManager[Any]:
    several = torch.distributed.is_available() and torch.distributed.is_initialized()
    return _NoCommunication() if several else nullcontext()


@final
class _NoCommunication(torch_internals.TorchDispatchMode):
    """Refuses collectives: other processes do not run the Function again, and would wait forever."""

    def __torch_dispatch__(self, func: Op, types: Types, args: Args = (), kwargs: Kw = None) -> Any:
        if "c10d" in func.namespace:
            raise _NotExamined("it communicates between processes, and is not run again")
        return func(*args, **(kwargs or {}))


@final
class _Operations(torch_internals.TorchDispatchMode):
    """Records whether all operations are torch's own, and whether these write all memory.

    Memory from torch.empty that no torch operation writes was filled by foreign code (NumPy, a kernel).
    """

    def __init__(self) -> None:
        super().__init__()
        self.plain = True  # the answer
        # results of torch.empty, by the address of their memory
        self._unwritten: dict[int, Any] = {}

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
            # an operation that returns a view reads no elements
            views = pytree.tensors(result)
            known = {_memory_address(x) for x in tensors}
            if not any(_memory_address(y) in known for y in views):
                self.returned(tensors)
        return result

    def returned(self, values: object) -> None:
        """These tensors are read: memory that nobody has written was filled by foreign code."""
        addresses = [_memory_address(x) for x in pytree.leaves(values) if isinstance(x, Tensor)]
        self.plain &= not any(address in self._unwritten for address in addresses if address)


def _memory_address(x: Tensor) -> int:
    """The address of the tensor's memory; 0 if it has no elements."""
    return x.untyped_storage().data_ptr() if x.layout is torch.strided and x.numel() else 0
