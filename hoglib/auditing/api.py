"""`hoglib.audit`: checks the second derivatives of a model's loss and names the modules at fault."""

import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from hoglib._core import pytree, validation
from hoglib._core.autograd import Vector, clone_inference_tensors, fresh_leaves, grad_enabled
from hoglib._core.finite_differences import distance
from hoglib._core.source_location import format_error
from hoglib._core.swap import keep_swapped
from hoglib._core.torch_internals import eagerly
from hoglib.auditing.locator import Check, Fault, ModuleStack
from hoglib.auditing.messages import FaultMessages, describe_failure, module_of_error, report_name
from hoglib.auditing.observation import (
    Observations,
    culprit_rows,
    not_finite_row,
    observe,
    warning_rows,
)
from hoglib.auditing.problem import Problem, ReproducibleLoss, check_arguments, check_modules
from hoglib.auditing.route_checker import FIRST, CheckResult, RouteChecker
from hoglib.auditing.routes import AUTO, ROUTES, Route, requested_routes
from hoglib.errors import HoglibError
from hoglib.stand_ins.mode import stand_ins_if
from hoglib.verification.report import CULPRIT, Report, Row
from hoglib.verification.rounding import exact_products


def audit(
    loss: Callable[..., Tensor],
    params: Any,
    batch: Any,
    *,
    routes: Sequence[str] | str | None = None,
    stand_ins: bool = False,
) -> Report:
    r"""Check the second derivatives of a model's loss and name the modules that lose them.

        H v = d/de grad loss(params + e v, batch) at e = 0

    Each route to H v is compared with central differences of the gradient, and the gradient with
    central differences of the loss, in a float64 copy and along random directions. The point is
    perturbed by 1% of the size of the parameters, so that a zero initialization hides no fault. Where a
    derivative is wrong or missing, every module call is checked by itself, from the model down to the
    module whose own code loses the derivative, and there every operation. The report names the module
    (as its parameters are named), the operation or custom Function, the source line, and what to do.

    Values that the loss takes out of the graph (``detach``, ``no_grad``, ...) are held constant, as
    autograd holds them; a warning says where that changes the second derivative. Every evaluation uses
    the same random numbers. There are also warnings about dropout, batch norm in training mode,
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
            ``grad(vmap(grad))``) and "third order". The other routes are tried too: where one is wrong,
            the report warns. Default: "reverse-over-reverse", the route of ``hvp(mode="auto")``.
        stand_ins: If True, check what runs inside :func:`hoglib.second_order`, with the stand-ins for
            torch calls whose second derivative is missing or wrong. Default: False, torch as it is.
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
    validation.flag("stand_ins", stand_ins)
    requested = requested_routes(routes)
    with (
        _ONE_AT_A_TIME,
        grad_enabled(),
        exact_products(),
        warnings.catch_warnings(),
        stand_ins_if(stand_ins),
    ):
        warnings.simplefilter("ignore")  # routes fail here on purpose; the report says so
        params, batch = clone_inference_tensors((params, batch))
        problem = Problem(loss, params, batch)
        check_modules(problem.names)
        return _Audit(problem, requested).report()


# Random number generators and matmul precision belong to the process: audits of several threads take
# turns.
_ONE_AT_A_TIME = threading.RLock()

DIRECTIONS = (
    2  # directions along which a requested route is checked; any other, or a slow one, along one
)
MAX_DIRECTIONS = 4  # directions to try where a kink prevents a comparison along some
# Multiplications and additions of one forward pass above which routes that were not requested are
# skipped: those that take several gradients, and all. Two cores do some 1e10 a second in float64.
SKIP_SLOW_ROUTES, SKIP_ROUTES = 3e9, 8e9
SLOW_ROUTES = ("jacrev of jacrev", "grad of vmap", "third order")
STOP_GRADIENT_TOLERANCE = (
    1e-3  # relative change of H v below which a stopped gradient is not reported
)
# Largest relative difference of a product in this dtype from the one in float64.
DTYPE_TOLERANCES = {torch.float32: 0.03, torch.float16: 0.3, torch.bfloat16: 0.3}


class _Float64RefusedError(Exception):
    """The loss does not run in float64."""


class _Audit:
    """The checks of one audit, in order; `report()` runs them."""

    def __init__(self, problem: Problem, requested: list[Route]) -> None:
        self._problem, self._requested = problem, requested
        self._messages = FaultMessages(problem.names)
        self._culprits: dict[str, Row] = {}
        self._random = False  # whether the loss draws random numbers
        self._judged = True  # whether every requested route could be compared
        self._kinked: set[int] = set()  # seeds of directions along which there is a kink

    def report(self) -> Report:
        name, modules = report_name(self._problem.loss), ModuleStack(self._problem.names)
        try:
            seen = observe(self._problem, modules)
        except HoglibError:
            raise
        except Exception as error:
            text = f"the loss raises on this batch: {format_error(error)}."
            return Report(name, [Row("runs", "fail", None, text + module_of_error(modules))])
        if not seen.finite:
            return Report(name, [not_finite_row(seen)])
        self._random = seen.random
        with eagerly(seen.compiled):
            rows = [*self._derivative_rows(seen), *warning_rows(seen, self._problem.names)]
        for row in culprit_rows(seen, self._problem.names):
            self._add_culprit(row)
        return Report(name, [*self._culprits.values(), *rows], judged=self._judged)

    def _derivative_rows(self, seen: Observations) -> list[Row]:
        """In float64, then the requested routes in the dtype of the parameters; in that dtype alone
        where the loss does not run in float64."""
        try:
            keep = [route.key for route in self._requested]
            with ReproducibleLoss(self._problem, double=True, keep=keep) as loss, keep_swapped():
                self._check_that_it_runs(loss)
                loss.move_to_perturbed_point()
                rows = [*self._route_rows(loss), *self._stop_gradient_rows(loss)]
                right = [route for route in self._requested if not _has_failed(rows, route)]
                point, products = loss.leaves, [loss.product(route) for route in right]
        except _Float64RefusedError as refused:
            self._kinked, self._judged = set(), True
            text = f"not possible ({refused}); checked in its own dtype, with wider tolerances."
            with ReproducibleLoss(self._problem, double=False) as loss, keep_swapped():
                loss.move_to_perturbed_point()
                rows = [*self._route_rows(loss), *self._stop_gradient_rows(loss)]
            return [Row("dtype: float64", "skip", None, text), *rows]
        for route, product in zip(right, products, strict=True):
            # random numbers of another dtype are other numbers: there is nothing to compare with
            expected = None if seen.random else product
            row = self._own_dtype_row(route, point, expected)
            if row is not None:
                rows.append(row)
        return rows

    def _check_that_it_runs(self, loss: ReproducibleLoss) -> None:
        try:
            loss.f(*fresh_leaves(loss.initial_leaves, False))
        except Exception as error:
            raise _Float64RefusedError(format_error(error)) from error

    def _route_rows(self, loss: ReproducibleLoss) -> Iterator[Row]:
        """The gradient, then each route."""
        yield self._row(
            loss, FIRST, RouteChecker.check_gradient, "the gradient", requested=True, directions=1
        )
        work = loss.forward_flops()
        for route in ROUTES.values():
            requested = route in self._requested
            slow = route.key in SLOW_ROUTES
            if not requested and (work > SKIP_ROUTES or (slow and work > SKIP_SLOW_ROUTES)):
                yield Row(
                    route.row, "skip", None,
                    f"not tried: one forward pass takes {work:.0e} operations; request it with "
                    f"routes={route.key!r}.",
                )  # fmt: skip
                continue

            def check(checker: RouteChecker, route: Route = route) -> CheckResult:
                return checker.check(route)

            yield self._row(
                loss, route.row, check, route.product_text, requested=requested,
                directions=DIRECTIONS if requested and work < SKIP_SLOW_ROUTES else 1,
            )  # fmt: skip

    def _row(
        self, loss: ReproducibleLoss, name: str, check: Check, what: str, *, requested: bool,
        directions: int,
    ) -> Row:  # fmt: skip
        """One derivative; where it is wrong, the modules at fault become culprits."""
        result = self._result(loss, check, directions)
        if result.wrong and self._random and loss.draws_differ_in_transforms():
            result = CheckResult(None)
        if result.at_fault:
            found = self._faults(loss, check, result, requested=requested)
            # of a route that was not requested the first fault is enough
            faults = [*found] if requested else [*islice(found, 1)]
            failure, where = describe_failure(result), self._messages.where(faults)
            if _all_surrogates(faults):
                text = (
                    f"{where}: declared a surrogate; its gradient differs from the derivative on "
                    "purpose, so there is nothing to compare with."
                )
                return Row(name, "skip", None, text)
            if requested:
                self._accuse(faults, what)
                return Row(name, "fail", result.error, f"It {failure}, in {where}.")
            if result.raised is not None:
                return Row(name, "skip", None, f"It {failure}, in {where}.")
            return Row(name, "warn", result.error, self._messages.not_requested(faults))
        if result.wrong is None:
            self._judged &= not requested
            return Row(
                name, "warn" if requested else "skip", None,
                "not judged: the finite differences do not agree with each other (kinks nearby, "
                "numbers too large or too small, or other random numbers under torch.func), or "
                "cannot be taken: the loss raises near params, or it detaches inside of a "
                "torch.func transform. Try other params, a smaller batch, or eval mode.",
            )  # fmt: skip
        return Row(name, "pass", result.error)

    def _result(self, loss: ReproducibleLoss, check: Check, directions: int) -> CheckResult:
        """What is known of a derivative along several directions; along more where there is a kink."""
        best, settled = CheckResult(None), 0
        for seed in sorted(range(MAX_DIRECTIONS), key=lambda seed: (seed in self._kinked, seed)):
            result = check(loss.checker(seed))
            if result.at_fault:
                return result
            if result.sure:
                settled += 1
            else:
                self._kinked.add(seed)
            best = max(best, result, key=CheckResult.rank)
            if settled == directions:
                break
        return best

    def _faults(
        self, loss: ReproducibleLoss, check: Check, result: CheckResult, *, requested: bool
    ) -> Iterable[Fault]:
        """Where a derivative is lost.

        A loss that takes a gradient itself (a gradient penalty, a PINN) loses a derivative where a
        module loses one of a higher order: if no module is at fault, the higher derivatives are
        checked.
        """
        found = loss.locator.find(check, result)
        if not requested:
            return found
        faults = [*found]
        for key in (AUTO, "third order"):
            if any(fault.operations or fault.call.module is not None for fault in faults):
                break

            def check_higher(checker: RouteChecker, key: str = key) -> CheckResult:
                return checker.check(ROUTES[key])

            deeper = loss.locator.find(check_higher, result)
            faults = [fault for fault in deeper if fault.call.module is not None] or faults
        return faults

    def _accuse(self, faults: list[Fault], what: str) -> None:
        for fault in faults:
            name = f"{CULPRIT}{self._problem.names.title(fault.module)}"
            if name not in self._culprits:  # the first row of a module has the lowest order
                text = self._messages.culprit(fault, what)
                self._add_culprit(Row(name, "fail", fault.result.error, text))

    def _add_culprit(self, row: Row) -> None:
        """Each module has one row."""
        known = self._culprits.setdefault(row.name, row)
        if row.text not in known.text:
            self._culprits[row.name] = known._replace(text=f"{known.text}\n{row.text}")

    def _stop_gradient_rows(self, loss: ReproducibleLoss) -> Iterator[Row]:
        """What is taken out of the graph, if H v would differ without that."""
        # torch's parametrizations (spectral norm, weight norm) stop gradients by design
        found = [
            stop
            for stop in loss.stop_gradients.found
            if not type(stop.module).__module__.startswith("torch.nn.utils")
        ]
        if not found:
            return
        change = loss.checker().largest_difference(RouteChecker(loss.f, loss.leaves, None))
        if change is not None and change > STOP_GRADIENT_TOLERANCE:
            text = self._messages.stop_gradients(found, change)
            yield Row("stopped gradients", "warn", change, text)

    def _own_dtype_row(self, route: Route, point: Vector, expected: Vector | None) -> Row | None:
        """A requested route in the dtype of the parameters.

        At the parameters themselves it must be there and finite; at `point` it is compared with
        `expected`, the product in float64, if there is one.
        """
        dtype = self._problem.leaves[0].dtype
        short = str(dtype).removeprefix("torch.")
        name = f"{route.row}, in {short}"

        def check(checker: RouteChecker) -> CheckResult:
            return checker.check_finite(route)

        with ReproducibleLoss(self._problem, double=False) as loss, keep_swapped():
            result = check(loss.checker())
            if result.at_fault:
                faults = list(loss.locator.find(check, result))
                self._accuse(faults, f"{route.product_text}, in {short} at params,")
                where = self._messages.where(faults)
                text = f"It {describe_failure(result)} at params, in {where}."
                return Row(name, "fail", result.error, text)
            if dtype not in DTYPE_TOLERANCES or expected is None:
                return None
            initial = loss.initial_leaves
            loss.move_to([x.to(like.dtype) for x, like in zip(point, initial, strict=True)])
            product = loss.product(route)
        if product is None:  # it raises at the perturbed point only, which does not matter
            return None
        size = max(float(pytree.norm(expected)), 1e-300)
        error = distance([x.double() for x in product], expected) / size
        if error < DTYPE_TOLERANCES[dtype]:
            return Row(name, "pass", error)
        text = (
            f"{route.product_text} in {short} differs by {error:.0%} from the one in float64. The "
            "cause is rounding, a cast to half precision inside, or a constant in another dtype. "
            "Compute it in float64, or look for autocast and .to() in the model."
        )
        return Row(name, "warn", error, text)


def _has_failed(rows: list[Row], route: Route) -> bool:
    return any(row.name == route.row and row.status in ("fail", "skip") for row in rows)


def _all_surrogates(faults: list[Fault]) -> bool:
    """Whether every fault is in Functions whose gradient differs from the derivative on purpose."""
    found = [op.function for fault in faults for op, _ in fault.operations]
    explained = all(fault.operations for fault in faults)
    return bool(found) and explained and all(getattr(f, "surrogate", False) is True for f in found)
