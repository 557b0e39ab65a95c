"""`hog.verify`: run all checks of one function, and report the cause of a failure first."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from math import inf
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from hoglib._core.messages import validation
from hoglib._core.messages.progress import ProgressBar
from hoglib._core.modules.state import preserve_random_state
from hoglib._core.modules.swap import keep_swapped
from hoglib._core.runtime.source_location import error_line, format_error
from hoglib._core.substrate.autograd import grad_enabled
from hoglib._core.torch_api import pytree
from hoglib._core.torch_api.function_watch import watching_functions
from hoglib._core.torch_api.pytree import is_float
from hoglib._core.torch_api.torch_internals import eagerly, uncompiled
from hoglib._core.torch_api.torch_private import nothing_refused
from hoglib.errors import HoglibError
from hoglib.verification import attribution, contract, examination
from hoglib.verification.attribution import detached_copy
from hoglib.verification.call_variants import reference_rows, variant_rows
from hoglib.verification.comparison import NATURAL, Bounds, Options, parse_modes, parse_orders
from hoglib.verification.contract import preserve_grads
from hoglib.verification.derivatives import FIRST, Derivatives
from hoglib.verification.entry_points import no_examination
from hoglib.verification.function_rules import is_surrogate
from hoglib.verification.maps import as_function, map_of, name_of
from hoglib.verification.precision import PrecisionWatch, exact_products, run_derivatives
from hoglib.verification.report import Report, Row, Rows
from hoglib.verification.subject import Subject, is_users_own, lift_to_module, subject_of

# Names of rows
OTHER_DIRECTIONS = "first derivative: other directions"
OTHER_VALUES = "second derivative: other values"
ALONE = "second derivative: of"
TIME = "time"
STAGES = 150  # all checks by one tensor take about 150 times as long as `run_derivatives`
SOME = (
    "checked at the first {number} of {count} rows of the inputs: all of them would take some "
    "{seconds:.0f} seconds. Pass time_limit=None for all."
)
OVER = (
    "{limit:g} seconds were over after the check {last!r}; what follows it was left out. Pass a larger "
    "time_limit, or None."
)
Reference = Callable[..., Any] | None
HIDDEN = (
    "Here the share that is lost is less than the noise of differences in float32, which is why the "
    "second derivative of the whole passes."
)
LEAVING = (
    "it is right along directions that keep {kept}, as it is here, and differs along others. There the "
    "first derivative is wrong: {wrong}. That does no harm where the argument is always computed so "
    "that it has this structure, such as `A @ A.mT`, `tril(A)` or `softmax(x)`: no gradient flows back "
    "from the other directions. It is wrong for other arguments, and for a parameter that has the "
    "structure at first only. The rows of derivatives are those along the directions that keep it."
)
PHASES = (
    "the columns, or rows, of what it returns are determined up to a sign or a phase, as eigenvectors "
    "are, and its gradient is right for a loss that depends on none of these only. Derivatives are "
    "taken with a fixed combination of each column made positive."
)


@validation.explain_arguments
def verify(
    fn: Callable[..., Any] | type[Function],
    inputs: object,
    *,
    reference: Callable[..., Any] | None = None,
    orders: Sequence[int] | int | None = None,
    modes: Sequence[str] | str | None = None,
    surrogate: bool = False,
    full: bool = False,
    eps: float | None = None,
    atol: float = 1e-6,
    rtol: float = 1e-4,
    nondet_tol: float = 0.0,
    raise_exception: bool = False,
    time_limit: float | None = 60.0,
    progress: bool = False,
) -> Report:
    r"""Check the derivatives of a function to second order, and name the cause of an error.

        G(x, u) = J(x)^T u        T(x, t) = J(x) t        J = dy/dx
        reverse-over-reverse  w -> (dG/dx)^T w        forward-over-reverse  v -> (dG/dx) v
        reverse-over-forward  w -> (dT/dx)^T w        forward-over-forward  v -> (dT/dx) v

    Each of these is compared with central differences of G or T, and G and T with central differences
    of the values, in float64, at the inputs and at a point near them. The forward and backward of a
    custom Function also run as plain functions, to check its contract with autograd: gradients have the
    right number, shape and dtype, nothing is changed in place, and any subset of inputs and any memory
    layout will do. If a second derivative is wrong, `verify` measures the contribution of each tensor
    saved on ctx and of each place where backward leaves the graph, and names the ones with a loss.

    Features that fn does not offer (forward mode, vmap, torch.func) are skipped with a reason. The
    arguments are left unchanged.

    Args:
        fn: A Function class, its ``apply``, an ``nn.Module``, or any function of tensors.
        inputs: The arguments of fn, as a list or tuple; or its only argument. Derivatives are taken by
            the floating-point tensors anywhere in the inputs (only by tensors that require grad, if any
            does), and by the trainable parameters of a module. Infinite elements are constants, and
            so are huge equal elements, such as -1e9 in masked scores.
        reference: An equivalent function of plain torch operations. Values and derivatives must agree.
        orders: The orders of derivatives to check, some of 1, 2, 3, 4. Default: ``(1, 2)``.
        modes: Some of "rr", "fr", "rf", "ff", or their full names, such as "reverse-over-reverse". fn
            must offer the modes given here. Default: all modes that fn offers.
        surrogate: Whether the gradient differs from the derivative on purpose, as in a straight-through
            estimator, a gradient reversal or clipping. Then only the derivatives of the gradient and
            the contract are checked. A Function class may declare ``surrogate = True`` itself.
        full: Whether to compare along each element, instead of along random directions.
        eps: The step of differences. Default: chosen for each element by its estimated error.
        atol, rtol: A derivative d is right within ``rtol |d| + atol min(1, largest |d|)``, plus the
            estimated error of the difference; d is in units of the sizes of inputs and outputs.
        nondet_tol: By how much two backward passes may differ.
        raise_exception: Whether to raise if a check failed.
        time_limit: Seconds. Of large inputs only the first rows are checked, as many as there is time
            for, and checks that have not run when the time is over are left out; a row says so. None:
            no limit.
        progress: Show a bar that counts checks (needs tqdm).
    Returns:
        A :class:`Report`: ``ok``, ``rows``, ``str(report)``, ``to_json()``, ``raise_if_failed()``.
    Raises:
        ArgumentTypeError: if fn or reference is not callable, or an option has the wrong type.
        ArgumentValueError: if there is nothing to differentiate by, or an option is out of
            range.
        VerificationError: with raise_exception, if a check failed. It is an AssertionError.
    Example:
        >>> class Cube(torch.autograd.Function):
        ...     @staticmethod
        ...     def forward(ctx, x):
        ...         ctx.save_for_backward(x)
        ...         return x**3
        ...     @staticmethod
        ...     def backward(ctx, g):
        ...         (x,) = ctx.saved_tensors
        ...         return 3 * g * x.detach() ** 2  # loses the second derivative
        >>> report = hog.verify(Cube, torch.linspace(0.5, 1.5, 4))
        >>> report.ok, report.failed[0].name
        (False, 'detached: .detach()')
    """
    validation.function("fn", fn)
    options = Options(
        orders=parse_orders(orders),
        modes=parse_modes(modes),
        surrogate=surrogate or is_surrogate(as_function(fn) or fn),
        full=full,
        eps=eps,
        bounds=Bounds(atol, rtol),
        nondet_tol=nondet_tol,
    )
    limit = inf if time_limit is None else validation.number("time_limit", time_limit, minimum=0.0)
    bar = ProgressBar("verify", validation.boolean("progress", progress), unit="check")
    if reference is not None:
        validation.function("reference", reference)
    arguments = tuple(inputs) if isinstance(inputs, list | tuple) else (inputs,)
    with (
        grad_enabled(),
        no_examination(),
        nothing_refused(),
        eagerly(),
        keep_swapped(),
        exact_products(),
        preserve_random_state(),
        preserve_grads(fn, *arguments),
        warnings.catch_warnings(action="ignore"),  # the checks provoke torch's warnings on purpose
        bar.over(name_of(fn)),
    ):
        report = _report(fn, arguments, reference, options, limit, bar)
    return report.raise_if_failed() if raise_exception else report


def _report(
    fn: Any,
    inputs: tuple[Any, ...],
    reference: Reference,
    options: Options,
    limit: float,
    bar: ProgressBar,
) -> Report:
    """The report of all checks, with the causes of failures first."""
    name, subject, judged = name_of(fn), None, None
    rows: list[Row] = []
    if (module := lift_to_module(fn, inputs)) is not None:
        fn, inputs, row = module
        rows.append(row)
    began = perf_counter()
    inputs, some = _first_rows(fn, inputs, limit)
    rows += some
    try:
        subject = subject_of(fn, inputs)
        for row in _check_rows(subject, reference, options.in_dtype(subject.dtype)):
            rows.append(row)
            bar.advance(1)
            if perf_counter() - began > limit:
                rows.append(Row(TIME, "warn", None, OVER.format(last=row.name, limit=limit)))
                break
    except HoglibError:
        raise
    except Exception as error:
        if subject is None:
            return Report(name, [Row("runs", "fail", None, _why_it_does_not_run(error))])
        # a check raised, and the function need not be the cause
        judged, line = False, error_line(error)
        where = f" A run of it ended at {line}." if line else ""
        rows.append(Row("checks", "warn", None, f"not judged: what follows from there.{where}"))
    # the sort is stable: causes come first, all other rows stay in the order of the checks
    rows.sort(key=lambda row: not attribution.is_culprit(row))
    return Report(name, rows, judged=judged)


def _first_rows(
    fn: object, inputs: tuple[Any, ...], limit: float
) -> tuple[tuple[Any, ...], list[Row]]:
    """As many of the first rows of the inputs as there is time for, and a report row if not all."""
    most = max(filter(is_float, pytree.leaves(inputs)), key=Tensor.numel, default=None)
    if limit == inf or most is None or most.numel() < examination.LARGE:
        return inputs, []
    count, rows = len(most), []
    # it may not run at all (`_report` says so), or refuse fewer rows
    with suppress(Exception):
        f = map_of(fn, inputs, torch.float64)
        began = perf_counter()
        run_derivatives(f)
        seconds = (perf_counter() - began) * STAGES * (len(f.point) + 1)
        number = max(2, int(count * limit / (2 * seconds)))
        if number < count:
            fewer = detached_copy(pytree.rows(inputs, count, 0, number))
            map_of(fn, fewer).run_with_grad()
            inputs, text = fewer, SOME.format(number=number, count=count, seconds=seconds)
            rows.append(Row(TIME, "skip", None, text))
    return inputs, rows


def _why_it_does_not_run(error: Exception) -> str:
    text = f"it does not run on its inputs: {format_error(error)}."
    if any(word in str(error) for word in ("dtype", "Float", "Double", "scalar type")):
        text += " They are float64 copies; convert tensors that it holds itself to float64 too."
    if isinstance(error, TypeError) and "argument" in str(error):
        text += " `inputs` are the arguments one by one; put a list or tuple into another list."
        text += " On the command line, each has an --input of its own."
    return text


def _check_rows(subject: Subject, reference: Reference, options: Options) -> Rows:
    """The rows of all checks, in order."""
    subject, stop = subject.prepared()
    if stop is not None:
        yield stop
        for app in subject.applications:  # a broken contract may be the cause
            yield from contract.check(app, surrogate=True)
        return
    yield from _treatment_notes(subject)
    marked = any(is_surrogate(app.function) for app in subject.applications)
    if as_function(subject.map.fn) is None and marked:
        yield from _functions_apart(subject)
        options = replace(options, orders=())
    # a second point near the inputs: on a kink, differences at the inputs decide nothing
    points = [subject.x, subject.perturbed_point()]
    derivatives = Derivatives(subject, points, options)
    if options.surrogate:
        text = "declared a surrogate: it differs from the derivative on purpose."
        yield Row(FIRST, "skip", None, text)
    elif 1 in options.orders:
        # an order above the first is compared with differences of the first: keep its restriction
        derivatives, rows = _first_derivatives(derivatives)
        subject = derivatives.subject
        yield from rows
    for order in (order for order in options.orders if order > 1):
        rows = list(derivatives.higher_order(order))
        yield from rows
        # try other values only if the second derivative is right here: a wrong one needs no more proof
        right = order == 2 and all(row.status in ("pass", "skip") for row in rows)
        if right and not options.surrogate:
            if as_function(subject.map.fn) is not None:
                yield from _other_values(subject, options)
            elif _rounds_values(subject):
                yield from _functions_alone(subject)
            yield from _in_given_dtypes(subject)
    differences = derivatives.found
    # at the point near the inputs: attribution uses differences, which a kink would spoil
    yield from attribution.attribution_rows(subject, points[-1], differences)
    first = differences.get(FIRST)
    if first is not None and first.wrong:
        yield from attribution.forward_rows(subject, points[-1])
        if not options.surrogate:
            yield from attribution.value_rows(subject)
    if reference is not None:
        yield from reference_rows(subject, reference, points, surrogate=options.surrogate)
    contract_rows = list(_contract_rows(subject, options, derivatives))
    yield from contract_rows
    changes = any("in-place" in row.name and row.status == "fail" for row in contract_rows)
    options = replace(options, surrogate=options.surrogate or marked)
    for row in variant_rows(subject, points[-1], options):
        if changes and row.status == "fail":
            text = "not judged: it changes tensors in place, which makes this check meaningless."
            row = row._replace(status="skip", text=text)
        yield row


def _treatment_notes(subject: Subject) -> Rows:
    """Rows about a special treatment of the function or of its inputs."""
    if uncompiled(subject.map.fn) is not subject.map.fn:
        text = "checked as it was before torch.compile: compiled code has no second derivative, or, of "
        yield Row("compiled", "warn", None, text + "a custom Function in it, a wrong one.")
    refused, computes_narrow, half = subject.precision
    if refused:
        where = f"in {subject.dtype}"
        if half is not None:
            where = "there, by means over many points,"
        how = "not the precision that it computes in" if computes_narrow else "refused"
        text = f"{how} ({refused}); checked {where} with wider tolerances."
        yield Row("dtype: float64", "warn" if computes_narrow else "skip", None, text)
    if subject.symmetric:
        names = ", ".join(subject.map.names[j] for j in sorted(subject.symmetric))
        text = (
            f"{names} is symmetric, and the function reads one triangle only, or refuses a matrix that "
            "is not symmetric. Derivatives are taken along symmetric matrices, where all conventions "
            "for the gradient agree."
        )
        yield Row(OTHER_DIRECTIONS, "skip", None, text)
    if subject.constants:
        text = (
            f"{', '.join(subject.constants)}: treated as constant, such as a mask or a target, because "
            "the values are integers or the name says so, and there is no gradient. To check its "
            "derivatives, set requires_grad on it and on the other inputs."
        )
        yield Row("constants", "warn", None, text)


def _functions_apart(subject: Subject) -> Rows:
    """Verify each custom Function by itself. One of them is a surrogate, so the gradient of the whole
    function differs from its derivative on purpose."""
    functions = (app.function for app in subject.applications)
    marked = ", ".join(function.__name__ for function in functions if is_surrogate(function))
    text = f"{marked} is marked as a surrogate: the whole has no derivative to compare with."
    yield Row(FIRST, "skip", None, f"{text} Each Function in it is verified by itself.")
    for name, verdict in _examine_each(subject):
        status = {"right": "pass", "wrong": "fail"}.get(verdict.status, "warn")
        yield Row(f"{ALONE} {name}", status, None, verdict.text)


def _examine_each(subject: Subject) -> Iterator[tuple[str, examination.Verdict]]:
    for app in subject.applications:
        yield (
            app.function.__name__,
            examination.examine(examination.make_case(app.function, app.args, app.needed, "")),
        )


# Derivatives, perhaps of a restricted subject, and the rows of the first derivative.
Mended = tuple[Derivatives, list[Row]]


def _first_derivatives(derivatives: Derivatives) -> Mended:
    """The derivatives and the rows of the first one. If it fails, a restriction of directions or
    outputs that makes it pass is kept for all higher orders."""
    rows = list(derivatives.first_order())
    status, mended = _row_status(rows, FIRST), None
    if status == "fail":
        mended = _structured_derivatives(derivatives)
    if status != "pass":
        mended = mended or _phase_fixed_derivatives(derivatives, status)
    return mended or (derivatives, rows)


def _row_status(rows: Iterable[Row], name: str) -> str:
    return next((row.status for row in rows if row.name == name), "")


def _structured_derivatives(without: Derivatives) -> Mended | None:
    """The derivatives along directions that keep a structure of the arguments (symmetric, triangular,
    ...), if this makes a wrong first derivative right. A structure that makes the second derivative
    right as well is preferred. None if there is no such structure."""
    off = without.found[FIRST]
    if off.raised is not None:
        return None
    subject = without.subject
    mended, rows = subject, list[Row]()
    for one in subject.restrictions():
        derivatives = without.of(one)
        with suppress(Exception):  # the original rows remain
            found = list(derivatives.first_order())
            if _row_status(found, FIRST) == "pass":
                right = derivatives.are_right()
                # keep the first structure, unless a later one also makes the second derivative right
                if right or not mended.kept:
                    mended, rows = one, found
                if right:
                    break
    if not mended.kept:
        return None
    what = " and ".join(f"{subject.names[j]} {one.name}" for j, one in mended.kept.items())
    text = LEAVING.format(kept=what, wrong=off.wrong)
    return without.of(mended), [*rows, Row(OTHER_DIRECTIONS, "warn", off.error, text)]


def _phase_fixed_derivatives(without: Derivatives, status: str) -> Mended | None:
    """The derivatives with fixed signs or phases of the outputs, if this makes the first one right.

    Where an algorithm changes a sign, the outputs jump, and there is no derivative to compare with.
    status: of the row of the first derivative without fixed phases.
    """
    for one in without.subject.phase_fixings(real_too=status == "warn"):
        derivatives = without.of(one)
        with suppress(Exception):  # the original rows remain
            rows = list(derivatives.first_order())
            if _row_status(rows, FIRST) == "pass":
                return derivatives, [*rows, Row("first derivative: phases", "skip", None, PHASES)]
    return None


def _other_values(subject: Subject, options: Options) -> Rows:
    """The second derivative at values far from the inputs, where a Function may take another branch."""
    bounds = options.bounds._replace(natural=NATURAL)
    options = replace(options, orders=(1, 2), modes=("rr",), bounds=bounds)
    wrong = examination.other_points_rows(subject, options)
    if wrong is None:
        text = "it, or its first derivative, is not known at values of other signs and sizes."
        yield Row(OTHER_VALUES, "skip", None, text)
    elif not wrong:
        yield Row(OTHER_VALUES, "pass")
    else:
        failed, *causes = wrong
        text = (
            "At values of other signs and sizes than the inputs, where the first derivative is right, "
            f"{failed.text.rstrip('.')}. {' '.join(one.text for one in causes[:2])}"
        )
        yield Row(OTHER_VALUES, "fail", failed.error, text)


def _functions_alone(subject: Subject) -> Rows:
    """Examine each custom Function by itself: in a narrow dtype, noise may hide its part of the second
    derivative of the whole function."""
    for name, verdict in _examine_each(subject):
        if verdict.status == "wrong":
            yield Row(f"{ALONE} {name}", "warn", None, f"{verdict.text} {HIDDEN}")


def _in_given_dtypes(subject: Subject) -> Rows:
    """Custom Functions that lose a second derivative by casts, if the inputs keep their own dtypes."""
    found: list[examination.Case] = []

    def seen(function: type[Function], args: tuple[Any, ...]) -> None:
        by = tuple(is_float(x) and x.requires_grad for x in args)
        if is_users_own(function) and any(by):
            found.append(examination.make_case(function, args, by, ""))

    f = subject.map
    with suppress(Exception), watching_functions(seen):
        map_of(f.fn, f.inputs).run_with_grad()
    for one in found:
        if examination.casts(one)[0] and (verdict := examination.examine(one)).status == "wrong":
            yield Row(f"{ALONE} {one.app.function.__name__}", "fail", None, verdict.text)


def _rounds_values(subject: Subject) -> bool:
    """Whether the function computes in less than float64."""
    watch = PrecisionWatch()
    with watch:
        subject.map(*subject.x)
    return subject.dtype != torch.float64 or bool(watch.rounded)


def _contract_rows(subject: Subject, options: Options, derivatives: Derivatives) -> Rows:
    """The rows of the contract with autograd, for each applied Function."""
    yield contract.constants_row(subject, derivatives.found)
    several = len(subject.applications) > 1
    for app in subject.applications:
        declared = options.surrogate or is_surrogate(app.function)
        for row in contract.check(app, surrogate=declared):
            yield row._replace(name=f"{app.function.__name__}: {row.name}") if several else row
