"""`hog.verify`: which checks are made, in which order, and what their failures are called."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from hoglib import _arguments as arguments
from hoglib import _tree
from hoglib._recording import recording
from hoglib.verification import _batches as batches
from hoglib.verification import _diagnosis as diagnosis
from hoglib.verification import _dtypes as dtypes
from hoglib.verification import _layouts as layouts
from hoglib.verification import _maps as maps
from hoglib.verification import _partial as partial
from hoglib.verification import _plain as plain
from hoglib.verification import _reference as references
from hoglib.verification import _treatment as treatment
from hoglib.verification import _values as values
from hoglib.verification import _where as where
from hoglib.verification import contract
from hoglib.verification._around import Around, told
from hoglib.verification._call import name_of
from hoglib.verification._differences import uniform
from hoglib.verification._exact import exact_products
from hoglib.verification._precision import Watch
from hoglib.verification._subject import Subject
from hoglib.verification._words import MODES, ORDINALS, Mode
from hoglib.verification._words import modes as chosen_modes
from hoglib.verification._words import orders as chosen_orders
from hoglib.verification.derivatives import (
    Bounds,
    Found,
    Target,
    in_forward,
    in_reverse,
    target,
)
from hoglib.verification.report import Report, Row

JVP_TWICE = "jvp inside jvp: torch differentiates a custom Function's own jvp to zero there."
NOT_OFFERED = "it is not offered: {which} without a jvp staticmethod."


def verify(
    fn: Callable[..., Any] | type[Function],
    inputs: Any,
    *,
    reference: Callable[..., Any] | None = None,
    orders: Sequence[int] | int | None = None,
    modes: Sequence[str] | str | None = None,
    surrogate: bool = False,
    full: bool = False,
    compile: bool = False,
    eps: float | None = None,
    atol: float = 1e-6,
    rtol: float = 1e-4,
    nondet_tol: float = 0.0,
    raise_exception: bool = False,
) -> Report:
    r"""Are the derivatives of a function right, to second order, in every mode? If not, why?

        G(x, u) = J(x)^T u        T(x, t) = J(x) t        J = dy/dx
        reverse-over-reverse  w -> (dG/dx)^T w        forward-over-reverse  v -> (dG/dx) v
        reverse-over-forward  w -> (dT/dx)^T w        forward-over-forward  v -> (dT/dx) v

    Each is compared with central differences of G or T, and these with differences of the values, in
    float64, at the inputs and at a point beside them. A custom Function is also run as plain functions
    to see that it keeps its contract: gradients in number, shape and dtype, nothing changed in place,
    any subset of inputs, any layout. Where a second derivative is wrong, each slot that it saved and
    each place where it leaves the graph is measured, and the one that loses it is named.

    fn: a Function class, its `apply`, an `nn.Module`, or any function of tensors; inputs: its
    arguments, or the only one. Derivatives are taken by the floating-point tensors anywhere in the
    inputs (only by those that require grad, if any does) and by a module's trainable parameters.
    reference: the same function of plain torch operations; values and derivatives must agree with it.
    orders: some of 1, 2, 3; (1, 2) by default. modes: some of "rr", "fr", "rf", "ff" or their full
    names; by default all that fn offers. A mode that was asked for must be there.
    surrogate: the gradient differs from the derivative on purpose (straight-through, reversal,
    clipping); then its own derivatives are checked, and its contract. full: along every element
    rather than random directions. compile: also under torch.compile, which takes seconds.
    eps: the step of differences; by default chosen for each element by its own error.
    A derivative d is right within rtol |d| + atol min(1, largest |d|) and the error of differences.
    nondet_tol: by how much two backward passes may differ. raise_exception: raise if a row failed.

    Returns a `Report`: `ok`, `rows`, `str(report)`, `to_json()`, `raise_if_failed()`. What fn does not
    offer (forward mode, vmap, torch.func) is skipped with a reason. Nothing that was passed is changed.
    Raises TypeError for what is no function, ValueError where there is nothing to differentiate by,
    VerificationError (an AssertionError) with raise_exception.
    """
    arguments.function("fn", fn)
    if reference is not None:
        arguments.function("reference", reference)
    options = _Options(
        chosen_orders(orders), chosen_modes(modes),
        surrogate or getattr(fn, "surrogate", False) is True,
        full, compile, eps, Bounds(atol, rtol), nondet_tol,
    )  # fmt: skip
    given = tuple(inputs) if isinstance(inputs, list | tuple) else (inputs,)
    devices = {x.device for x in _tree.leaves(given) if isinstance(x, Tensor) and x.is_cuda}
    with (
        recording(),
        exact_products(),
        torch.random.fork_rng(devices=list(devices)),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # what is tried on purpose is no news
        report = _Verification(fn, given, reference, options).report()
    return report.raise_if_failed() if raise_exception else report


class _Options:
    def __init__(
        self, orders: tuple[int, ...], modes: tuple[Mode, ...] | None, surrogate: bool, full: bool,
        compile: bool, eps: float | None, bounds: Bounds, nondet_tol: float,
    ) -> None:  # fmt: skip
        self.orders, self.modes, self.surrogate = orders, modes, surrogate
        self.full, self.compile, self.eps = full, compile, eps
        self.bounds, self.nondet_tol = bounds, nondet_tol


class _Verification:
    """The checks of one call of `verify`, in order."""

    def __init__(
        self, fn: Any, inputs: tuple[Any, ...], reference: Callable[..., Any] | None,
        options: _Options,
    ) -> None:  # fmt: skip
        self._fn, self._inputs, self._reference, self._options = fn, inputs, reference, options
        self._targets: dict[str, list[Target]] = {}
        self._right: set[str] = set()  # keys of targets that were right, in a loop

    def report(self) -> Report:
        name = name_of(self._fn)
        try:
            self._subject = Subject(self._fn, self._inputs)
        except arguments.Explained:
            raise
        except Exception as error:
            place = where.of_error(error)
            at = f", at {place}" if place else ""
            text = (
                f"it does not run on its inputs: {type(error).__name__}: {error}{at}. The inputs are "
                "float64 copies; so must be the tensors that it holds itself."
            )
            return Report(name, [Row("runs", "fail", None, text)])
        rows = list(self._rows())
        culprits = [row for row in rows if _is_culprit(row)]
        return Report(name, [*culprits, *(row for row in rows if not _is_culprit(row))])

    def _rows(self) -> Iterator[Row]:
        subject = self._subject
        stop = self._settle()
        if stop is not None:
            yield stop
            return
        if subject.refused:
            yield Row(
                "dtype: float64", "skip", None,
                f"refused ({subject.refused}); checked in {subject.dtype} with wider tolerances.",
            )  # fmt: skip
        self._points = [subject.x, self._beside()]
        found = {}
        if not self._options.surrogate:
            for row, worst in self._first_order():
                found[row.name] = worst
                yield row
        else:
            yield Row(
                "first derivative: reverse", "skip", None,
                "declared a surrogate: it differs from the derivative on purpose.",
            )  # fmt: skip
        for order in (2, 3):
            if order in self._options.orders:
                for row, worst in self._higher(order):
                    found[row.name] = worst
                    yield row
        yield from treatment.rows(subject, self._points[-1], found)
        if self._reference is not None:
            yield from references.rows(
                subject, self._reference, self._points, surrogate=self._options.surrogate
            )
        yield from self._contract()
        yield from self._in_circumstances()

    # Before anything is differentiated.

    def _settle(self) -> Row | None:
        """Find out whether the call draws random numbers and changes its inputs, and allow for it."""
        subject = self._subject
        call = subject.call
        before = [x.clone() for x in subject.x]
        call.leaves(*subject.x)  # it may change its inputs, whether it says so or not
        pairs = zip(before, subject.x, strict=True)
        call.clone = any(not torch.equal(a, b) for a, b in pairs) or any(
            contract.declares_changes(app) for app in subject.applications
        )
        for x, value in zip(subject.x, before, strict=True):
            x.copy_(value)
        subject.look()
        if not subject.which:
            return Row(
                "first derivative: reverse", "fail", None,
                "the first derivative is missing: no output with elements requires grad. Is it a "
                "constant, detached, or marked non-differentiable?",
            )  # fmt: skip
        gradient = maps.gradient(subject.map, len(subject.x))

        def drawn(seed: int) -> list[Tensor]:
            torch.manual_seed(seed)
            values = subject.map(*subject.x)
            try:
                grads = gradient(*subject.x, *(torch.ones_like(y) for y in values))
            except Exception:  # judged with the derivatives
                grads = []
            return [t.detach() for t in (*values, *grads)]

        if not _same(drawn(1), drawn(2)):
            call.reseed = True
            a, b = (subject.map(*subject.x) for _ in range(2))
            if not all(torch.allclose(p, q, equal_nan=True) for p, q in zip(a, b, strict=True)):
                return Row(
                    "deterministic", "fail", None,
                    "the value is not the same twice, with the same seed of torch (hidden "
                    "nondeterminism): does it count its calls, or draw numbers from NumPy or random? "
                    "Nothing can be compared. Pass random numbers as inputs.",
                )  # fmt: skip
        return None

    def _beside(self) -> list[Tensor]:
        """A point near the inputs, without their zeros; the inputs where fn is not defined there."""
        subject = self._subject
        moved = []
        for x in subject.x:
            part = torch.rand(x.shape, dtype=torch.float64, generator=subject.random)
            part = part.to(x.device, x.dtype)
            moved.append(torch.where(x == 0, 0.005 * (1 + part), x * (1 - 0.02 * part)))
        try:
            pairs = zip(subject.map(*moved), subject.map(*subject.x), strict=True)
            defined = all(bool((a.isfinite() | ~b.isfinite()).all()) for a, b in pairs)
        except Exception:  # whatever fn says of inputs it was not given
            defined = False
        return moved if defined else subject.x

    # Derivatives.

    @property
    def _count(self) -> int:
        return len(self._subject.x)

    def _like(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [uniform(x, self._subject.random) for x in tensors]

    def _first_order(self) -> Iterator[tuple[Row, Found]]:
        subject = self._subject
        at = [self._target(subject.map, x, subject.rows, subject.names) for x in self._points]
        self._targets["first"] = at
        yield self._kinks(at[0]), Found()
        if 1 not in self._options.orders:
            return
        found = self._both(at, "r")
        row = self._judged("first derivative: reverse", found)
        if row.status == "pass":
            self._right.add("first")
        if row.status == "fail":
            row = row._replace(text=f"{row.text} {self._explained(found)}".rstrip())
        yield row, found
        if self._wants("f"):
            row, found = self._forward_row("first derivative: forward", at, "f")
            rules = sorted(f.__name__ for f in subject.functions if plain.offers_jvp(f))
            if row.status == "fail" and rules:
                text = f"the jvp of {', '.join(rules)} is wrong: {row.text}"
                row = row._replace(text=text)
            yield row, found

    def _kinks(self, at: Target) -> Row:
        """Where the slopes to either side of the inputs differ."""
        kinked = sorted(
            {
                (self._subject.rows[i], self._subject.names[one.column])
                for one in at.slopes
                for i, kink in enumerate(one.kinks)
                if bool(kink.any())
            }
        )
        if not kinked:
            return Row("kinks", "pass")
        where_ = "; ".join(f"of {row} by {name}" for row, name in kinked)
        return Row(
            "kinks", "warn", None,
            f"the inputs lie on a kink {where_}: the slopes to either side differ, and the gradient "
            "there is a convention. It was checked beside the inputs.",
        )  # fmt: skip

    def _explained(self, found: Found) -> str:
        if found.raised is not None or found.row < 0:
            return ""
        try:
            return diagnosis.of_gradient(self._subject, self._subject.x, found.row, found.column)
        except Exception:  # words are not worth an error
            return ""

    def _higher(self, order: int) -> Iterator[tuple[Row, Found]]:
        for mode in MODES.values():
            name = f"{ORDINALS[order]} derivative: {mode.title}"
            asked = self._options.modes is not None and mode in self._options.modes
            if self._options.modes is not None and not asked:
                continue
            reason = self._skipped(mode)
            if reason and not (asked and self._subject.offers_forward is False):
                yield Row(name, "skip", None, reason), Found()
                continue
            if reason:
                yield Row(name, "fail", None, reason), Found(wrong=reason)
                continue
            try:
                at = [self._higher_target(order, mode, x) for x in self._points]
            except Exception as error:
                yield self._not_there(name, mode, error)
                continue
            self._targets[f"{order} {mode.key}"] = at
            if mode.outer == "r":
                found = self._both(at, "r")
                if found.raised is not None and mode.inner == "f":
                    yield self._not_there(name, mode, found.raised)
                else:
                    row = self._judged(name, found)
                    if row.status == "pass":
                        self._right.add(f"{order} {mode.key}")
                    yield row, found
            else:
                yield self._forward_row(name, at, mode.key)

    def _higher_target(self, order: int, mode: Mode, x: list[Tensor]) -> Target:
        """The map whose derivative is of that order in that mode, and its differences."""
        subject, n = self._subject, self._count
        values = subject.map(*x)
        names = subject.names
        if mode.inner == "r":
            f: maps.Map = maps.gradient(subject.map, n)
            given = [*x, *self._like(values)]
            rows = [f"the gradient by {name}" for name in names]
            columns = [*names, *(f"the gradient of {row}" for row in subject.rows)]
        else:
            make = maps.func_tangent if mode.outer == "f" else maps.tangent
            f = make(subject.map, n)
            given = [*x, *self._like(x)]
            rows = [f"the tangent of {row}" for row in subject.rows]
            columns = [*names, *(f"the tangent of {name}" for name in names)]
        if order == 3:
            count = len(given)
            if mode.key == "ff":
                f = maps.func_tangent(f, count)
                given = [*given, *self._like(given)]
                columns = [*columns, *(f"the second tangent of {c}" for c in columns)]
                rows = [f"the derivative of {row}" for row in rows]
            else:
                inner = f
                f = maps.gradient(inner, count)
                given = [*given, *self._like(inner(*given))]
                columns, rows = (
                    [*columns, *(f"the gradient of {row}" for row in rows)],
                    [f"the second derivative by {c}" for c in columns],
                )
        return self._target(f, given, rows, columns)

    def _target(
        self, f: maps.Map, x: Sequence[Tensor], rows: Sequence[str], columns: Sequence[str]
    ) -> Target:
        options = self._options
        return target(f, x, rows, columns, self._subject.random, full=options.full, eps=options.eps)

    @property
    def _bounds(self) -> Bounds:
        bounds = self._options.bounds
        if self._subject.dtype in (torch.float64,):
            return bounds
        narrow = {torch.float32: 3e-2}.get(self._subject.dtype, 0.2)
        return Bounds(max(bounds.atol, narrow), max(bounds.rtol, narrow))

    def _both(self, at: Sequence[Target], key: str) -> Found:
        """At the inputs and beside them."""
        result: Found | None = None
        for one in at:
            if key == "r":
                found = in_reverse(one, self._bounds, self._subject.random, full=self._options.full)
            else:
                found = in_forward(one, self._bounds, maps.func_push if key == "ff" else maps.push)
            result = found if result is None else result.merge(found)
            if result.raised is not None:
                break
        assert result is not None
        return result

    def _forward_row(self, name: str, at: Sequence[Target], key: str) -> tuple[Row, Found]:
        found = self._both(at, key)
        if found.raised is not None:
            return self._not_there(name, None, found.raised)
        return self._judged(name, found), found

    def _not_there(self, name: str, mode: Mode | None, error: Exception) -> tuple[Row, Found]:
        """Forward mode that raises: a fault where it was declared or asked for."""
        text = f"it raised {told(error)}."
        declared = self._subject.offers_forward or self._options.modes is not None
        found = Found(error=float("inf"), wrong=text, raised=error)
        if declared:
            return Row(name, "fail", None, text), found
        return Row(name, "skip", None, f"it is not offered: {text}"), Found()

    def _judged(self, name: str, found: Found) -> Row:
        if found.raised is not None:
            place = where.of_error(found.raised)
            at = f" (at {place})" if place else ""
            return Row(name, "fail", None, f"{name.split(':')[0]} is missing: {found.wrong}{at}")
        if found.wrong:
            return Row(name, "fail", found.error, f"{found.wrong}{_ratio(found)}.")
        unknown = ", ".join(self._labels(found.unknown))
        if found.unknown and not found.checked:
            why = f" ({found.problem})" if found.problem else ""
            return Row(
                name, "warn", None,
                f"nothing could be compared: differences do not settle{why}. Do the inputs lie on a "
                "kink, or at the edge of the domain?",
            )  # fmt: skip
        if unknown:
            why = f" ({found.problem})" if found.problem else ""
            return Row(
                name, "warn", found.error,
                f"by {unknown} nothing could be compared: differences do not settle{why}. A kink, or "
                "the edge of the domain? If one is a constant, such as a mask or a target, give the "
                "others requires_grad.",
            )  # fmt: skip
        return Row(name, "pass", found.error)

    def _labels(self, columns: set[int]) -> list[str]:
        names = self._subject.names
        return [names[j] if j < len(names) else f"argument {j}" for j in sorted(columns)]

    def _wants(self, level: str) -> bool:
        """Whether a mode with that level on the outside of the first derivative is to be tried."""
        chosen = self._options.modes
        if chosen is not None:
            return any(level in (mode.outer, mode.inner) for mode in chosen)
        return self._subject.offers_forward is not False

    def _skipped(self, mode: Mode) -> str:
        subject = self._subject
        if "f" not in mode.key:
            return ""
        if subject.offers_forward is False:
            lacking = sorted(f.__name__ for f in subject.functions if not plain.offers_jvp(f))
            return NOT_OFFERED.format(which=", ".join(lacking))
        if mode.key == "ff" and subject.functions:
            return JVP_TWICE
        return ""

    # The contract of each Function.

    def _contract(self) -> Iterator[Row]:
        yield self._precision()
        apps = self._subject.applications
        several = len(apps) > 1
        for app in apps:
            for row in contract.check(app, surrogate=self._options.surrogate):
                yield row._replace(name=f"{app.function.__name__}: {row.name}") if several else row

    def _subsets(self, around: Around) -> Iterator[Row]:
        """Each subset of inputs; of one whose second derivative is lost, by what."""
        row, subset = partial.subsets(around)
        if row.status == "fail" and subset:
            yield from treatment.of_subset(self._subject, self._points[-1], subset)
        yield row

    def _precision(self) -> Row:
        name = "dtype: constants"
        subject = self._subject
        if subject.dtype != torch.float64:
            return Row(name, "skip", None, "it was not checked in float64.")
        watch = Watch()
        with watch:
            subject.map(*subject.x)
        for app in subject.applications:
            try:
                contract.run_rules(app, watch)
            except Exception:  # other checks say it
                continue
        if watch.found:
            return Row(
                name, "fail", None,
                f"a constant or a step in float32 enters float64 maths: {watch.found}. Give it the "
                "dtype of the inputs, `torch.tensor(0.1, dtype=x.dtype)`, or use a Python number.",
            )  # fmt: skip
        return Row(name, "pass")

    def _in_circumstances(self) -> Iterator[Row]:
        options, subject, x = self._options, self._subject, self._points[-1]
        try:
            around, at_inputs = Around(subject, x), Around(subject, subject.x)
        except Exception:  # the first derivative raises, which is reported
            return
        targets = [self._targets[key][-1] for key in ("first", "2 rr") if key in self._right]
        points = [x, self._beside(), self._beside()]
        checks: list[Callable[[], Row | Iterable[Row]]] = [
            lambda: values.finite(at_inputs),
            lambda: values.extremes(around),
            lambda: values.deterministic(around, options.nondet_tol, surrogate=options.surrogate),
            lambda: values.state(around),
            lambda: self._subsets(around),
            lambda: partial.outputs_alone(around),
            lambda: layouts.layouts(around),
            lambda: dtypes.dtypes(around),
            lambda: batches.rows(
                subject, points, around.u, targets, self._bounds, chosen=options.modes is not None
            ),
            lambda: dtypes.autocast(around),
            lambda: dtypes.compiled(around, options.compile),
        ]
        for check in checks:
            try:
                found = check()
                yield from [found] if isinstance(found, Row) else list(found)
            except Exception as error:  # a fault that other rows name
                yield Row("circumstances", "skip", None, f"not compared: {told(error)}")


def _is_culprit(row: Row) -> bool:
    """Whether it names what other rows suffer from; cuts before slots."""
    return row.status == "fail" and any(
        word in row.name for word in ("graph cut: ", "saved: ", "culprit: ", " applies ")
    )


def _same(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    if len(a) != len(b):
        return False
    pairs = zip(a, b, strict=True)
    return all(torch.allclose(p, q, rtol=1e-12, atol=0.0, equal_nan=True) for p, q in pairs)


def _ratio(found: Found) -> str:
    if not found.expected or found.got != found.got:
        return ""
    ratio = found.got / found.expected
    if abs(ratio) < 1e-6:
        return " (none of it is there)"
    return f" ({ratio:.3g} of it)"
