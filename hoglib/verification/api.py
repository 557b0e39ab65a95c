"""`hog.verify`: which checks are made, in which order, and what their failures are called."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from hoglib._core import pytree, validation
from hoglib._core.autograd import grad_enabled
from hoglib._core.source_location import format_error
from hoglib._core.swap import keep_swapped
from hoglib.errors import ArgumentValueError, HoglibError
from hoglib.verification import (
    circumstances,
    contract,
    fix_hints,
    precision,
    returned_gradients,
    transforms,
)
from hoglib.verification import reference as references
from hoglib.verification.call import name_of
from hoglib.verification.comparison import Bounds
from hoglib.verification.derivatives import Derivatives
from hoglib.verification.perturbed_point import PerturbedPoint
from hoglib.verification.report import Mode, Report, Row
from hoglib.verification.report import modes as chosen_modes
from hoglib.verification.report import orders as chosen_orders
from hoglib.verification.rounding import exact_products
from hoglib.verification.subject import Subject

# What dtypes other than float64 allow: their differences are no better.
NARROW = {torch.float32: 3e-2, torch.float16: 0.2, torch.bfloat16: 0.2}

SPOILT = "not judged: what is changed in place spoils it."


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
    validation.function("fn", fn)
    if eps is not None and not 0.0 < validation.number("eps", eps) <= 1.0:
        raise ArgumentValueError(f"eps: expected a number in (0, 1], got {eps}.")
    for name, value in (("atol", atol), ("rtol", rtol), ("nondet_tol", nondet_tol)):
        if validation.number(name, value, minimum=0.0) == float("inf"):
            raise ArgumentValueError(f"{name}: expected a finite number, got {value}.")
    if reference is not None:
        validation.function("reference", reference)
    options = _Options(
        chosen_orders(orders), chosen_modes(modes),
        surrogate or getattr(fn, "surrogate", False) is True,
        full, compile, eps, Bounds(atol, rtol), nondet_tol,
    )  # fmt: skip
    given = tuple(inputs) if isinstance(inputs, list | tuple) else (inputs,)
    devices = {x.device for x in pytree.leaves(given) if isinstance(x, Tensor) and x.is_cuda}
    with (
        grad_enabled(),
        keep_swapped(),
        exact_products(),
        torch.random.fork_rng(devices=list(devices)),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # what is tried on purpose is no news
        report = _Verification(fn, given, reference, options).report()
    return report.raise_if_failed() if raise_exception else report


class _Options(NamedTuple):
    orders: tuple[int, ...]
    modes: tuple[Mode, ...] | None
    surrogate: bool
    full: bool
    compile: bool
    eps: float | None
    bounds: Bounds
    nondet_tol: float


class _Verification:
    """The checks of one call of `verify`, in order."""

    def __init__(
        self, fn: Any, inputs: tuple[Any, ...], reference: Callable[..., Any] | None,
        options: _Options,
    ) -> None:  # fmt: skip
        self._fn, self._inputs, self._reference, self._options = fn, inputs, reference, options

    def report(self) -> Report:
        name = name_of(self._fn)
        try:
            self._subject = Subject(self._fn, self._inputs)
        except HoglibError:
            raise
        except Exception as error:
            text = f"it does not run on its inputs: {format_error(error)}."
            if any(word in str(error) for word in ("dtype", "Float", "Double", "scalar type")):
                text += " They are float64 copies; so must be the tensors that it holds itself."
            if isinstance(error, TypeError) and "argument" in str(error):
                text += (
                    " `inputs` are the arguments one by one; a list that is one goes into another."
                )
            return Report(name, [Row("runs", "fail", None, text)])
        rows = list(self._rows())
        culprits = [row for row in rows if fix_hints.is_culprit(row)]
        return Report(name, [*culprits, *(row for row in rows if not fix_hints.is_culprit(row))])

    def _rows(self) -> Iterator[Row]:
        subject, options = self._subject, self._options
        stop = subject.settle()
        if stop is not None:
            yield stop
            for app in subject.applications:  # what it does to ctx may be why
                yield from contract.check(app, surrogate=True)
            return
        if subject.refused:
            yield Row(
                "dtype: float64", "skip", None,
                f"refused ({subject.refused}); checked in {subject.dtype} with wider tolerances.",
            )  # fmt: skip
        if subject.call.symmetric:
            names = ", ".join(subject.call.names[j] for j in sorted(subject.call.symmetric))
            yield Row(
                "first derivative: asymmetric directions", "skip", None,
                f"{names} is symmetric, and one triangle of it is not read, or nothing else is taken: "
                "derivatives are along symmetric matrices, where all conventions for them agree.",
            )  # fmt: skip
        if subject.constants:
            yield Row(
                "constants", "warn", None,
                f"{', '.join(subject.constants)}: taken for constant, as a mask or target is: its "
                "values are whole numbers, or its name says so, and it gets no gradient. To have it "
                "judged give it requires_grad, and the others.",
            )  # fmt: skip
        self._points = [subject.x, subject.beside()]
        derivatives = Derivatives(
            subject, self._points, self._bounds, modes=options.modes, full=options.full,
            eps=options.eps,
        )  # fmt: skip
        if options.surrogate:
            yield Row(
                "first derivative: reverse", "skip", None,
                "declared a surrogate: it differs from the derivative on purpose.",
            )  # fmt: skip
        elif 1 in options.orders:
            yield from derivatives.first_order()
        for order in (2, 3):
            if order in options.orders:
                yield from derivatives.higher(order)
        yield from fix_hints.attribution_rows(subject, self._points[-1], derivatives.found)
        first = derivatives.found.get("first derivative: reverse")
        if first is not None and first.wrong:
            yield from fix_hints.forward_rows(subject, self._points[-1])
            if not options.surrogate:
                yield from fix_hints.value_rows(subject)
        if self._reference is not None:
            yield from references.rows(
                subject, self._reference, self._points, surrogate=options.surrogate
            )
        contract_rows = list(self._contract())
        yield from contract_rows
        changes = any("in-place" in row.name and row.status == "fail" for row in contract_rows)
        for row in self._in_circumstances(derivatives):
            if changes and row.status == "fail":
                row = row._replace(status="skip", text=SPOILT)
            yield row

    @property
    def _bounds(self) -> Bounds:
        narrow = NARROW.get(self._subject.dtype, 0.0)
        return Bounds(*(max(bound, narrow) for bound in self._options.bounds))

    def _contract(self) -> Iterator[Row]:
        """Of each Function that is applied."""
        yield precision.row(self._subject)
        apps = self._subject.applications
        for app in apps:
            for row in contract.check(app, surrogate=self._options.surrogate):
                several = len(apps) > 1
                yield row._replace(name=f"{app.function.__name__}: {row.name}") if several else row

    def _subsets(self, around: PerturbedPoint) -> Iterator[Row]:
        """Each subset of inputs; of one whose second derivative is lost, by what."""
        row, subset = returned_gradients.subsets(around)
        if row.status == "fail" and subset:
            yield from fix_hints.subset_rows(self._subject, self._points[-1], subset)
        yield row

    def _in_circumstances(self, derivatives: Derivatives) -> Iterator[Row]:
        options, subject, x = self._options, self._subject, self._points[-1]
        try:
            around, at_inputs = PerturbedPoint(subject, x), PerturbedPoint(subject, subject.x)
        except Exception:  # the first derivative raises, which is reported
            return
        points = [x, subject.beside(), subject.beside()]
        checks: list[Callable[[], Row | Iterable[Row]]] = [
            lambda: circumstances.finite(at_inputs),
            lambda: circumstances.extremes(around),
            lambda: circumstances.with_graph(around),
            lambda: circumstances.deterministic(
                around, options.nondet_tol, surrogate=options.surrogate
            ),
            lambda: circumstances.state(around),
            lambda: self._subsets(around),
            lambda: returned_gradients.outputs_alone(around),
            lambda: circumstances.layouts(around),
            lambda: precision.dtypes(around),
            lambda: transforms.rows(
                subject,
                points,
                around.u,
                derivatives.right,
                self._bounds,
                chosen=options.modes is not None,
            ),
            lambda: precision.autocast(around),
            lambda: precision.compiled(around, options.compile),
        ]
        for check in checks:
            try:
                found = check()
                yield from [found] if isinstance(found, Row) else list(found)
            except Exception as error:  # a fault that other rows name
                yield Row("circumstances", "skip", None, f"not compared: {format_error(error)}")
