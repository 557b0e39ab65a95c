"""`hoglib.audit`: check the second derivatives of a model's loss and name the modules at fault."""

import threading
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import islice
from math import isclose
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd import Function

from hoglib._core.messages import validation
from hoglib._core.messages.module_names import ModuleNames
from hoglib._core.numerics.finite_differences import relative_distance
from hoglib._core.runtime.source_location import format_error, raising_modules
from hoglib._core.substrate.autograd import Vector, clone_inference_tensors, grad_enabled
from hoglib._core.torch_api import pytree
from hoglib._core.torch_api.pytree import Tree
from hoglib._core.torch_api.torch_internals import eagerly
from hoglib.auditing.problem import (
    Observations,
    Problem,
    ReproducibleLoss,
    check_arguments,
    observe,
    reproducible,
)
from hoglib.auditing.routes import (
    AUTO,
    FIRST,
    ROUTES,
    THIRD,
    Checker,
    CheckResult,
    Fault,
    RecordedCall,
    Route,
    StopGradient,
    requested_routes,
)
from hoglib.errors import HoglibError
from hoglib.functional import FunctionalLoss
from hoglib.stand_ins.mode import stand_in_of, stand_ins_if
from hoglib.verification.api import verify
from hoglib.verification.attribution import detached_copy, is_culprit, percent
from hoglib.verification.derivatives import without_option
from hoglib.verification.entry_points import no_examination
from hoglib.verification.function_rules import is_surrogate
from hoglib.verification.maps import name_of
from hoglib.verification.precision import exact_products
from hoglib.verification.report import CULPRIT, Report, Row, Rows


@validation.explain_arguments
def audit(
    loss: Callable[..., Tensor],
    params: Tree,
    batch: object,
    *,
    routes: Sequence[str] | str | None = None,
    stand_ins: bool = True,
) -> Report:
    r"""Check the second derivatives of a model's loss and name the modules that lose them.

        H v = d/de grad loss(params + e v, batch) at e = 0

    Each route to H v is compared with central differences of the gradient, and the gradient with
    central differences of the loss, in a float64 copy and along random directions. The point is
    perturbed by 1% of the size of the parameters, so that a zero initialization hides no fault; the
    requested routes are compared at the parameters themselves, too. If a derivative is wrong or
    missing, every module call is checked by itself, from the model down to the module that loses the
    derivative in its own code, and every operation there. The report names the module (as its
    parameters are named), the operation or custom Function, the source line, and the fix.

    Values that the loss takes out of the graph (``detach``, ``no_grad``, ...) are held constant, as
    autograd holds them; a warning says if that changes the second derivative. Every evaluation uses
    equal random numbers. There are also warnings about dropout, batch norm in training mode,
    autocast, ``once_differentiable``, compiled modules, reentrant checkpoints and unused parameters.
    Parameters, buffers, training modes, ``.grad`` and random number generators are left unchanged.

    Args:
        loss: A function ``(params, batch) -> scalar``, for instance from
            :func:`hoglib.functional_loss`.
        params: The parameters to differentiate by: a pytree of floating-point tensors, for instance the
            dict that :func:`hoglib.trainable_params` returns.
        batch: One batch, passed to the loss.
        routes: The routes that must be right: one or several of "reverse-over-reverse",
            "forward-over-reverse", "reverse-over-forward", "forward-over-forward" (or "rr", "fr", "rf",
            "ff"), "torch.func.hessian", "jacrev of jacrev", "grad of vmap" (functional MAML,
            ``grad(vmap(grad))``) and "third order". All other routes are tried too; the report warns of
            wrong ones. Default: "reverse-over-reverse", the route of ``hvp(mode="auto")``.
        stand_ins: If True, check the code that hoglib's products, penalties and learners run: the loss
            inside :func:`hoglib.second_order`, with stand-ins for torch calls with a missing or wrong
            second derivative. If torch's own calls would be wrong, a second row of the route warns. If
            False, check torch as it is, as code outside of hoglib runs it. Default: True.
    Returns:
        A :class:`Report`. ``ok`` is False exactly when the gradient or a requested route is wrong;
        ``culprits`` are the names of the modules at fault. A loss that raises gives a failed report.
    Raises:
        ArgumentTypeError, ArgumentValueError: for arguments of the wrong kind.
        NoSecondDerivative: if the loss does not depend on ``params``.
        UnsupportedError: inside a transform of ``torch.func``.
    Example:
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
        >>> loss, params = hog.functional_loss(model, F.mse_loss), hog.trainable_params(model)
        >>> report = hog.audit(loss, params, (torch.randn(4, 2), torch.randn(4, 1)))
        >>> report.ok, report.culprits
        (True, ())
    """
    check_arguments(loss, params, batch)
    validation.boolean("stand_ins", stand_ins)
    requested = requested_routes(routes)
    silent = warnings.catch_warnings(action="ignore")  # routes fail on purpose; the report says so
    with _ONE_AT_A_TIME, no_examination(), grad_enabled(), exact_products(), silent:
        params, batch = clone_inference_tensors((params, batch))
        one = _Audit(Problem(loss, params, batch), requested)
        with stand_ins_if(stand_ins):
            report = one.report()
        return one.with_own_rows(report) if stand_ins else report


# Random number generators and matmul precision belong to the process: audits in several threads take
# turns.
_ONE_AT_A_TIME = threading.RLock()

MAX_DIRECTIONS = 4  # directions to try if a kink prevents a comparison
# Forward passes with more multiplications and additions skip routes that were not requested. Two CPU
# cores do some 1e10 a second in float64.
SLOW = 3e9
# A stopped gradient is reported if it changes H v by more than this relative distance.
STOP_GRADIENT_TOLERANCE = 1e-3
WITHOUT = ", without stand-ins"  # end of a row's name
VALUE = "value"
VALUE_TEXT = (
    "The loss is {own:.6g} without stand-ins and {replaced:.6g} with them: products are those of "
    "another loss. A stand-in computes another value than torch's call in its place; report it, and "
    "pass stand_ins=False."
)
UNKNOWN_AT_PARAMS = (
    "Beside params it is right; at params it is not judged: differences of the gradient do not agree. "
    "At a kink, a tie of a maximum or equal eigenvalues exactly there, no second derivative exists: "
    "products take torch's value of one side, or zero."
)
WRONG_AT_PARAMS = (
    "At params: {} Beside params it is right. An operation has no derivative of its own there (a norm "
    "at 0, a tie of a maximum, a branch of torch.where), though the loss has one: write it by squares, "
    "or by a formula for both sides, or move params."
)
# Largest relative difference between torch's own product and the product with stand-ins, by dtype.
OWN_TOLERANCES = defaultdict(lambda: 0.1, {torch.float64: 1e-4})
# Largest relative difference between a product in this dtype and the product in float64.
DTYPE_TOLERANCES = {torch.float32: 0.03, torch.float16: 0.3, torch.bfloat16: 0.3}


@final
class _Audit:
    """The checks of one audit, in order. `report()` runs them."""

    def __init__(self, problem: Problem, requested: list[Route]) -> None:
        self._problem, self._requested = problem, requested
        self._required = [FIRST, *requested]  # their failures decide on `ok`
        self._messages = FaultMessages(problem.names)
        self._culprits: dict[str, Row] = {}  # rows that blame a module, by the name of the row
        self._judged = True  # every required route could be compared
        self._seen: Observations | None = None
        self._right: dict[Route, Vector] = {}  # products of correct routes

    def report(self) -> Report:
        loss, names = self._problem.loss, self._problem.names
        name = name_of(loss).rpartition("<locals>.")[2]
        if isinstance(loss, FunctionalLoss):
            name = type(loss.model).__name__
        try:
            seen = observe(self._problem)
        except HoglibError:
            raise
        except Exception as error:
            text = f"the loss raises on this batch: {format_error(error)}."
            module = next(iter(raising_modules(error)), None)
            where = f" It was raised in {names.called(module)}." if module else ""
            return Report(name, [Row("runs", "fail", None, text + where)])
        if not seen.finite:
            return Report(name, seen.failures)
        self._seen = seen
        with eagerly():
            rows = [*self._derivative_rows(seen), *seen.warnings]
        for row in seen.failures:
            self._culprits.setdefault(row.name, row)
        return Report(name, [*self._culprits.values(), *rows], judged=self._judged)

    def with_own_rows(self, report: Report) -> Report:
        """The report with stand-ins, and rows for routes that torch alone gets wrong.

        There is no row if torch raises on a route that was not requested: the error is not silent.
        """
        if self._seen is None or not self._right:
            return report
        with eagerly():
            own = {row.name.removesuffix(WITHOUT): row for row in self._own_rows(self._seen)}
        pairs = [(None, own.get(VALUE)), *((row, own.get(row.name)) for row in report)]
        rows = [row for pair in pairs for row in pair if row is not None]
        return Report(report.name, rows, judged=self._judged)

    def _own_rows(self, seen: Observations) -> Rows:
        """Compare torch's own product, by each route, with the product with stand-ins."""
        dtype = next(iter(self._right.values()))[0].dtype
        with reproducible(self._problem, double=dtype == torch.float64) as loss:
            # off params: if data is fitted exactly, the loss at params is zero, and all is rounding
            loss.perturb()
            value = float(loss.run())
            with stand_ins_if(True):
                replaced = float(loss.run())
            if not seen.random and not isclose(value, replaced, rel_tol=OWN_TOLERANCES[dtype]):
                text = VALUE_TEXT.format(own=value, replaced=replaced)
                yield Row(VALUE, "fail", abs(value - replaced) / abs(value or 1.0), text)
            for route, expected in self._right.items():
                # fused kernels, such as attention on a GPU, draw random numbers in another order
                result = loss.checker().check(route, compare=seen.random)
                if result.product is not None:
                    error = relative_distance(result.product, expected)
                    result = CheckResult(not error < OWN_TOLERANCES[dtype], error)
                raises = result.raised is not None and route not in self._requested
                if raises or not result.at_fault:
                    continue
                faults = [*islice(loss.locator.find(route, result), 1)]
                text = (
                    f"Without stand-ins it {describe_failure(result)}, first of all in "
                    f"{self._messages.where(faults)}. hoglib's products, penalties and learners run "
                    "the stand-ins; run code of your own inside `hoglib.second_order()`."
                )
                yield Row(f"{route.row}{WITHOUT}", "warn", result.error, text)

    def _derivative_rows(self, seen: Observations) -> list[Row]:
        """The rows in float64, then the requested routes in the parameters' dtype; only this dtype if
        the loss refuses float64."""
        refused = ""
        with reproducible(self._problem, double=True) as loss:
            try:
                loss.run()
            except Exception as error:
                refused = format_error(error)
            else:
                rows, here = self._rows(loss), loss.checker().products
        if refused:
            text = f"not possible ({refused}); checked in its own dtype, with wider tolerances."
            with reproducible(self._problem, double=False) as loss:
                return [Row("dtype: float64", "skip", None, text), *self._rows(loss)]
        status = {row.name: row.status for row in rows}
        for route in self._requested:
            if status[route.row] not in ("fail", "skip"):
                # in another dtype, other random numbers are drawn: products are not comparable
                expected = None if seen.random else here.get(route.quantity)
                rows += self._own_dtype_rows(route, expected)
        return rows

    def _rows(self, loss: ReproducibleLoss) -> list[Row]:
        """Rows at a perturbed point: the gradient, each route, the stopped gradients. Then rows for
        requested routes with a failure at the parameters themselves."""
        loss.perturb()
        rows, slow = [self._row(loss, FIRST, directions=1)], loss.forward_flops() > SLOW
        for route in ROUTES:
            if slow and route not in self._requested:
                text = f"not tried: the loss is large; request it with routes={route.key!r}."
                rows.append(Row(route.row, "skip", None, text))
                continue
            twice = route in self._requested and not slow
            rows.append(self._row(loss, route, directions=2 if twice else 1))
        rows += self._stop_gradient_rows(loss)
        right = {row.name for row in rows if row.status == "pass"}
        loss.move_back()
        for route in self._requested:
            result = _check_derivative(loss, route, 1)
            # infinite or NaN: reported by the row in the parameters' dtype
            judged = result.wrong is False or result.raised or result.error != result.error
            if route.row in right and not judged:
                rows.append(self._row_at_params(loss, route, result))
        return rows

    def _row_at_params(self, loss: ReproducibleLoss, route: Route, result: CheckResult) -> Row:
        """The row of a derivative with a failure at params, but not near them."""
        row, text = Row(route.row, "warn"), UNKNOWN_AT_PARAMS
        if result.wrong and (route is THIRD or loss.checker().is_linear()):
            row = self._failed_row(loss, route, result)
            text = WRONG_AT_PARAMS.format(row.text)
        return row._replace(name=f"{route.row}, at params", text=text)

    def _row(self, loss: ReproducibleLoss, route: Route, *, directions: int) -> Row:
        """The row of one derivative. If it is wrong, the modules at fault become culprits."""
        requested, result = route in self._required, _check_derivative(loss, route, directions)
        if result.at_fault:
            return self._failed_row(loss, route, result)
        if result.wrong is False:
            if route is not FIRST:
                self._right[route] = loss.checker().products[route.quantity]
            return Row(route.row, "pass", result.error)
        self._judged &= not requested
        text = (
            "not judged: the finite differences do not agree with each other (kinks nearby, or numbers "
            "too large or too small), or cannot be taken: the loss raises near params, or it detaches "
            "inside of a torch.func transform. Try other params, a smaller batch, or eval mode."
        )
        return Row(route.row, "warn" if requested else "skip", None, text)

    def _failed_row(self, loss: ReproducibleLoss, route: Route, result: CheckResult) -> Row:
        requested = route in self._required
        first = islice(loss.locator.find(route, result), 1)  # one fault suffices for a warning
        faults = self._faults(loss, route, result) if requested else [*first]
        where = self._messages.where(faults)
        text = f"It {describe_failure(result)}, in {where}."
        if _all_surrogates(faults):
            text = (
                f"{where}: declared a surrogate; its gradient differs from the derivative on purpose, "
                "so there is nothing to compare with."
            )
            return Row(route.row, "skip", None, text)
        if requested:
            self._accuse(faults, route.text)
            return Row(route.row, "fail", result.error, text)
        if result.raised is not None:
            return Row(route.row, "skip", None, text)
        text = (
            f"This route is wrong, first of all in {where}. It was not requested, so this is a "
            "warning: do not use this route with this model."
        )
        return Row(route.row, "warn", result.error, text)

    def _faults(self, loss: ReproducibleLoss, route: Route, result: CheckResult) -> list[Fault]:
        """The faults behind a wrong derivative of the loss.

        A loss that takes a gradient itself (a gradient penalty, a PINN) loses a derivative if a module
        loses one of a higher order. So if no module is at fault, the higher derivatives are checked.
        """
        faults: list[Fault] = []
        for order in (route, AUTO, THIRD):
            found = [*loss.locator.find(order, result)]
            inside = any(fault.call.module is not None for fault in found)
            faults = found if inside or not faults else faults
            if inside or any(fault.operations for fault in found):
                break
        return faults

    def _accuse(self, faults: list[Fault], what: str) -> None:
        for fault in faults:
            name = f"{CULPRIT}{self._problem.names.title(fault.module)}"
            if name not in self._culprits:  # the first row of a module has the lowest order
                text = self._messages.culprit(fault, what)
                self._culprits[name] = Row(name, "fail", fault.result.error, text)

    def _stop_gradient_rows(self, loss: ReproducibleLoss) -> Rows:
        """A warning about stopped gradients, if H v would differ without the stops."""
        # spectral norm, weight norm and other parametrizations of torch stop gradients by design
        stops = loss.stops.found
        found = [s for s in stops if not type(s.module).__module__.startswith("torch.nn.utils")]
        if not found or loss.checker().check(AUTO).wrong is not False:
            return
        change = Checker(loss.f, loss.leaves, None).check(AUTO)
        if change.wrong and change.error is not None and change.error > STOP_GRADIENT_TOLERANCE:
            text = (
                f"The gradient is stopped by {self._messages.stopped(found)}. The second derivative "
                "treats the stopped values as constants, as the first derivative does; without the "
                f"stop it would change by {percent(change.error)}. Remove the stop if it is not "
                "intended."
            )
            yield Row("stopped gradients", "warn", change.error, text)

    def _own_dtype_rows(self, route: Route, expected: Vector | None) -> Rows:
        """The row of a requested route at the parameters, in their dtype: it must exist, be finite, and
        agree with the product in float64."""
        dtype = self._problem.leaves[0].dtype
        short = str(dtype).removeprefix("torch.")
        name = f"{route.row}, in {short}"
        with reproducible(self._problem, double=False) as loss:
            result = loss.checker().check(route, compare=False)
            if result.product is None:
                faults = [*loss.locator.find(route, result)]
                self._accuse(faults, f"{route.text}, in {short} at params,")
                where = self._messages.where(faults)
                text = f"It {describe_failure(result)} at params, in {where}."
                yield Row(name, "fail", result.error, text)
        if result.product is None or expected is None or dtype not in DTYPE_TOLERANCES:
            return
        error = relative_distance([x.double() for x in result.product], expected)
        if error < DTYPE_TOLERANCES[dtype]:
            yield Row(name, "pass", error)
            return
        text = (
            f"{route.text} in {short} differs by {percent(error)} from the one in float64. The cause "
            "is rounding, a cast to half precision inside, or a constant in another dtype. Compute it "
            "in float64, or look for autocast and .to() in the model."
        )
        yield Row(name, "warn", error, text)


def _check_derivative(loss: ReproducibleLoss, route: Route, directions: int) -> CheckResult:
    """Check a derivative along several directions; at a kink, along further ones."""
    right: list[CheckResult] = []
    for seed in range(MAX_DIRECTIONS):
        result = loss.checker(seed).check(route)
        if result.at_fault:
            return result
        right += [result] if result.wrong is False else []
        if len(right) == directions:
            break
    return max(right, key=lambda one: one.error or 0.0, default=CheckResult(None))


def _all_surrogates(faults: list[Fault]) -> bool:
    """Whether every fault is in a Function marked as a surrogate."""
    found = [op.function for fault in faults for op in fault.operations or [fault.call]]
    return bool(found) and all(map(is_surrogate, found))


# The sentences about a fault: the module, the operation, the reason, and the fix.

MAX_NAMES = 3  # names in a sentence
MAX_VERIFIED = 200_000  # numbers in a Function's inputs; larger inputs are not verified
MAX_ERROR_LENGTH = 160  # characters of an error message


def describe_failure(result: CheckResult) -> str:
    """The failure of a derivative, as a verb phrase."""
    if result.raised is not None:
        text = f"{result.raised}".partition("\n")[0].rstrip(". ")
        return f"raises {type(result.raised).__name__} ({text[:MAX_ERROR_LENGTH]})"
    if result.error is None or result.error != result.error:
        return "is not finite"
    return f"is off by {percent(result.error)}"


@final
class FaultMessages:
    """The sentences about the faults of one audit.

    An operation is explained once; other modules that contain it refer to that explanation.
    """

    def __init__(self, names: ModuleNames) -> None:
        self._names = names
        # operation -> module with its explanation
        self._explained_in: dict[Any, str] = {}

    def where(self, faults: list[Fault]) -> str:
        """The modules at fault and their operations, in one line."""
        found = []
        for fault in faults:
            names = ", ".join(dict.fromkeys(op.operation for op in fault.operations[:MAX_NAMES]))
            found.append(self._names.called(fault.module) + (f": `{names}`" if names else ""))
        return "; ".join(found)

    def culprit(self, fault: Fault, what: str) -> str:
        """Everything known about one fault."""
        preposition = "in" if fault.result.raised is not None else "through"
        failure = f"{what} {describe_failure(fault.result)} {preposition} it"
        text = f"{self._names.called(fault.module)}: {failure}."
        if not fault.operations:
            return f"{text} {self._without_operation(fault)}"
        kinds: dict[str, RecordedCall] = {}
        for op in fault.operations:
            kinds.setdefault(op.operation, op)
        here = self._names.briefly(fault.module)
        for op in [*kinds.values()][:MAX_NAMES]:
            line = f" at {op.line}" if op.line else ""
            kind = "operation" if op.function is None else "custom Function"
            first = self._explained_in.setdefault(op.function or op.operation, here)
            why = f"See {first}." if first != here else _explain_operation(op)
            text += f"\nThe {kind} `{op.operation}`{line} is at fault. {why}"
        return text

    def _without_operation(self, fault: Fault) -> str:
        """Advice if no single operation is at fault."""
        module = fault.call.module
        applied = dict.fromkeys(op.operation for op in fault.call.operations if op.function)
        if module is not None and (module._backward_hooks or module._backward_pre_hooks):
            more = "it has a backward hook, which must neither change nor detach the gradient."
        elif applied:
            more = (
                f"it applies {', '.join(applied)}: does its backward run other code? Modules and "
                "tensors in the closure of that code get no gradient; pass them as arguments. "
                "Checkpoints need use_reentrant=False, or use `hoglib.ops.remat`."
            )
        elif module is None:
            return "The modules are right by themselves: the fault is in the code around them."
        else:
            more = (
                "look for tensors or modules kept from an earlier call, for hooks, for tensors "
                "written in place, and for parts that cannot run alone (scripted, or in torch.func)."
            )
        return f"Its operations are right by themselves, but {more}"

    def stopped(self, stops: list[StopGradient]) -> str:
        """A list of the calls that stop gradients."""
        places: dict[str, None] = {}
        for stop in stops:
            where = f" at {stop.line}" if stop.line else ""
            places[f"{stop.how} in {self._names.briefly(stop.module)}{where}"] = None
        return validation.listing([*places], MAX_NAMES)


def _explain_operation(op: RecordedCall) -> str:
    """The reason why an operation loses a derivative, and the fix."""
    if op.function is not None:
        words = _verification_result(op.function, op.args)
        return words or f"`hoglib.verify({op.operation}, inputs)` explains why."
    stand_in = stand_in_of(op.run)
    if stand_in is None:
        return "Use another route or another operation."
    reason = f"The reason in torch: {stand_in.lacks}."
    if stand_in.refuses:
        return f"{reason} {stand_in.instead}"
    return (
        f"{reason} hoglib has a stand-in for it: hvp, hessian, MAML and the penalties use it by "
        "default, other code inside `hoglib.second_order()`. audit(..., stand_ins=True), the "
        "default, checks the stand-in."
    )


def _verification_result(function: type[Function], args: tuple[Any, ...]) -> str:
    """The causes found by `hoglib.verify` for a Function on these arguments; "" if there are none."""
    if sum(x.numel() for x in pytree.tensors(args)) > MAX_VERIFIED:
        return ""
    with suppress(Exception):  # an explanation is not worth an error
        report = verify(function, detached_copy(args))
        culprits = [row for row in report.failed if is_culprit(row)] or list(report.failed)
        words = " ".join(dict.fromkeys(row.text for row in culprits[:2]))
        return without_option(words)
    return ""
