"""`hog.audit`: whether the second derivatives of a model's loss are right, and whose are not."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from hoglib import _arguments as arguments
from hoglib import _tree
from hoglib._differences import distance
from hoglib._leaves import Vector, own_leaves
from hoglib._recording import recordable, recording
from hoglib._substitution import lingering
from hoglib.stand_ins import stand_ins_if
from hoglib.verification import _fragile as fragile
from hoglib.verification import _telling as telling
from hoglib.verification._around import told
from hoglib.verification._exact import exact_products
from hoglib.verification._judging import FIRST, Judge, Verdict
from hoglib.verification._locating import Ask, Fault
from hoglib.verification._module_calls import called, discovering
from hoglib.verification._routes import ROUTES, Route, asked_for, gradient
from hoglib.verification._setting import Problem, Setting
from hoglib.verification._unchanged import Unchanged
from hoglib.verification.report import Report, Row

Loss = Callable[..., Tensor]
DIRECTIONS = 2  # along which a requested route is tried, others along one
MATTERS = 1e-3  # of a product, by which what is held constant must change it to be told
KEEPS = {torch.float32: 0.03, torch.float16: 0.3, torch.bfloat16: 0.3}  # of a product, in a dtype


def audit(
    loss: Loss,
    params: Any,
    batch: Any,
    *,
    routes: Sequence[str] | str | None = None,
    stand_ins: bool = False,
) -> Report:
    r"""Are the second derivatives of a model's loss right? If not, which module is at fault, and how?

        H v = d/de grad loss(params + e v, batch) at e = 0

    by each route, compared with central differences of the gradient, and the gradient with those of the
    loss, in a float64 copy, along random directions, at a point beside params (by a hundredth of their
    size, so that no zero of an initialisation hides a fault). Where a derivative is wrong or missing,
    each call of a module is judged by itself, from the model down to the one whose own code loses it,
    and there each operation; so the report names the module as its parameters are named, the operation
    or custom Function, the line, and what to do.

    loss: from `hoglib.functional_loss`, or any function (params, batch) -> scalar. params: a pytree of
    floating-point tensors, a dict by qualified name as `hoglib.trainable_params` gives it. batch:
    whatever the loss takes.
    routes: which must be right, of "reverse-over-reverse", "forward-over-reverse",
    "reverse-over-forward", "forward-over-forward" (or rr, fr, rf, ff), "torch.func.hessian",
    "jacrev of jacrev", "grad of vmap" (the usual functional MAML: grad(vmap(grad))), "third order". None
    is the one that `hvp(mode="auto")` takes, "reverse-over-reverse". The others are tried too: where they
    are wrong the report warns, where they raise it says so.
    stand_ins: judge what hoglib runs, inside `hoglib.second_order()`, rather than what torch does by
    itself.

    What is stopped on purpose (`detach`, `no_grad`, ...) is held constant, as autograd does, and told
    where it matters. Random numbers are the same in every run. Also warned of: dropout, train-mode batch
    norm, autocast, `once_differentiable`, compiled modules, reentrant checkpoints, unused parameters.

    Returns a `Report`: `ok` is False exactly where a requested route, or the gradient, is wrong;
    `culprits` are the names of the modules at fault. Nothing is changed: parameters, buffers, modes,
    `.grad`, random numbers.
    Raises TypeError and ValueError for arguments of the wrong kind. A loss that does not run is told in
    the report.
    """
    arguments.function("loss", loss)
    arguments.parameters(params)
    arguments.flag("stand_ins", stand_ins)
    chosen = asked_for(routes)
    with (
        recording(), exact_products(), warnings.catch_warnings(), stand_ins_if(stand_ins),
    ):  # fmt: skip
        warnings.simplefilter("ignore")  # what is tried on purpose is no news
        params, batch = recordable((params, batch))
        return _Audit(Problem(loss, params, batch), chosen, stand_ins).report()


class _Refused(Exception):
    """The loss does not run in float64."""


class _Audit:
    """The checks of one call of `audit`, in order."""

    def __init__(self, problem: Problem, chosen: list[Route], stand_ins: bool) -> None:
        self._problem, self._chosen, self._stand_ins = problem, chosen, stand_ins
        self._culprits: dict[str, Row] = {}

    def report(self) -> Report:
        name = telling.title(self._problem.loss)
        own = Setting(self._problem, None)
        try:
            look = self._look(own)
        except arguments.Explained:
            raise
        except Exception as error:
            failed = own.running.failed
            at = "" if failed is None else f" In {called(self._problem.names.of(failed), failed)}."
            text = f"the loss does not run on its batch: {told(error)}.{at}"
            return Report(name, [Row("runs", "fail", None, text)])
        try:
            with Setting(self._problem, torch.float64) as wide, lingering():
                self._settle(wide)
                rows = [*self._rows(wide), *self._stops(wide)]
                products = {route.key: _product(wide, route) for route in self._chosen}
                at = wide.leaves
            rows += self._in_own_dtype(products, at)
        except _Refused as refused:
            rows = [
                Row(
                    "dtype: float64", "skip", None,
                    f"refused ({refused}); judged in its own dtype, with wider tolerances.",
                )
            ]  # fmt: skip
            with Setting(self._problem, None) as narrow, lingering():
                narrow.move_beside()
                rows += [*self._rows(narrow), *self._stops(narrow)]
        rows += fragile.rows(look, self._problem.names)
        return Report(name, [*self._culprits.values(), *rows])

    def _look(self, own: Setting) -> fragile.Look:
        """One run as it is, for what it shows, and for modules that were not known."""
        problem, look = self._problem, fragile.Look()
        late: list[tuple[Tensor, Tensor]] = []

        def started(module: torch.nn.Module) -> None:
            if not isinstance(module, torch.jit.ScriptModule):
                buffers = [b for b in module._buffers.values() if b is not None]
                late.extend((b, b.detach().clone()) for b in buffers)

        with Unchanged(problem.names.modules(), problem.generators) as state:
            state.begin()
            leaves = own_leaves(problem.leaves, False)
            before = [g.get_state() for g in problem.generators]
            with (
                discovering(problem.names, started), own.running.watching(),
                fragile.looking(look, problem.names, own.running, leaves[0].device), lingering(),
            ):  # fmt: skip
                value = problem.value(leaves, problem.batch)
            look.by_generator = any(
                not torch.equal(a, g.get_state())
                for a, g in zip(before, problem.generators, strict=True)
            )
            for buffer, kept in reversed(late):
                with torch.no_grad():
                    buffer.copy_(kept)
            fragile.of_graph(look, value)
            if not value.requires_grad:
                raise arguments.NoSecondDerivative(
                    "loss(params, batch): expected a value that depends on params, got one that does "
                    "not; look for .detach(), .item(), .data or a torch.no_grad() in the loss, and for a "
                    "loss that uses the model's own parameters instead of the params it is given."
                )
            reached = {
                id(node.variable) for node in fragile.nodes([value]) if hasattr(node, "variable")
            }
            look.unused = [
                path for path, leaf in zip(problem.paths, leaves, strict=True)
                if id(leaf) not in reached
            ]  # fmt: skip
        return look

    def _settle(self, setting: Setting) -> None:
        """Whether it runs in float64, and where it is judged."""
        try:
            setting.f(*own_leaves(setting.given, False))
        except Exception as error:
            raise _Refused(told(error)) from error
        setting.move_beside()

    def _rows(self, setting: Setting) -> Iterator[Row]:
        verdict = setting.judge().first()
        faults = self._faults(setting, Judge.first, verdict)
        if verdict.at_fault:
            self._accuse(faults, "the gradient", "first")
        yield self._row(FIRST, verdict, "the gradient", faults, asked=True)
        for route in ROUTES.values():
            yield self._of_route(setting, route)

    def _of_route(self, setting: Setting, route: Route) -> Row:
        asked = route in self._chosen
        what = telling.second(route)

        def ask(judge: Judge) -> Verdict:
            return judge.of(route)

        verdict = ask(setting.judge())
        for seed in range(1, DIRECTIONS if asked else 1):
            if not verdict.at_fault:
                verdict = ask(setting.judge(seed))
        faults = self._faults(setting, ask, verdict)
        if asked and verdict.at_fault:
            self._accuse(faults, what, route.key)
        return self._row(route.row, verdict, what, faults, asked=asked)

    def _faults(self, setting: Setting, ask: Ask, verdict: Verdict) -> list[Fault]:
        return setting.locator.faults(ask, verdict) if verdict.at_fault else []

    def _accuse(self, faults: list[Fault], what: str, key: str) -> None:
        for fault in faults:
            name = f"culprit: {fault.call.name or 'the loss'}"
            if name not in self._culprits:
                text = telling.culprit(fault, what)
                self._culprits[name] = Row(name, "fail", fault.verdict.error, text)

    def _row(
        self, name: str, verdict: Verdict, what: str, faults: list[Fault], *, asked: bool
    ) -> Row:
        if not verdict.at_fault:
            if verdict.wrong is None:
                return Row(
                    name, "warn" if asked else "skip", None,
                    "not judged: differences do not agree with each other here (kinks, or numbers too "
                    "large or too small). Try other params or another batch.",
                )  # fmt: skip
            return Row(name, "pass", verdict.error)
        text = f"{telling.off(verdict, what)}, in {telling.where(faults)}."
        if asked:
            return Row(name, "fail", verdict.error, text)
        if verdict.raised is not None:
            return Row(name, "skip", None, text)
        return Row(name, "warn", verdict.error, f"{text} It was not asked for; do not use it here.")

    def _stops(self, setting: Setting) -> Iterator[Row]:
        """What is held constant, if it changes a product that is right with it."""
        stops = setting.stops
        if not stops.found:
            return
        held, free = setting.judge(), Judge(setting.f, setting.leaves, None)
        change = held.apart(free)
        if change is not None and change > MATTERS:
            places = dict.fromkeys(
                f"{stop.how} in {f'`{stop.module}`' if stop.module else 'the model itself'}"
                + (f" at {stop.place}" if stop.place else "")
                for stop in stops.found
            )
            yield Row(
                "stopped gradients", "warn", change,
                f"The gradient is stopped by {'; '.join([*places][:5])}. The second derivative holds "
                f"constant what is stopped, as the first does; without the stop it would differ by "
                f"{change:.0%}. If it is not on purpose, take the stop out.",
            )  # fmt: skip

    def _in_own_dtype(self, products: dict[str, Vector | None], at: Vector) -> Iterator[Row]:
        """Whether the requested routes are there, and finite, in the dtype of the parameters, and what
        rounding makes of them."""
        problem = self._problem
        dtype = problem.leaves[0].dtype
        title = str(dtype).removeprefix("torch.")
        given = [x.to(like.dtype) for x, like in zip(at, Setting(problem, None).given, strict=True)]
        for route in self._chosen:
            wide = products[route.key]
            if wide is None:
                continue
            what = telling.second(route)
            with Setting(problem, None) as here, lingering():
                one = here.judge()
                one.differences = False

                def ask(judge: Judge, route: Route = route) -> Verdict:
                    return judge.finite(route)

                verdict = ask(one)
                if verdict.at_fault:
                    faults = here.locator.faults(ask, verdict)
                    self._accuse(faults, f"{what} in {title}, at params,", route.key)
                    text = f"{telling.off(verdict, what)} in {title}, in {telling.where(faults)}."
                    yield Row(f"{route.row}, in {title}", "fail", None, text)
                    continue
            if dtype in KEEPS:
                with Setting(problem, None, at=given) as here, lingering():
                    narrow = _product(here, route)
                if narrow is None:
                    continue
                error = distance([x.double() for x in narrow], wide) / max(
                    float(_tree.norm(wide)), 1e-300
                )
                yield Row(
                    f"{route.row}, in {title}",
                    "pass" if error < KEEPS[dtype] else "warn", error,
                    "" if error < KEEPS[dtype] else
                    f"{what} is off by {error:.0%} in {title} from what it is in float64: rounding, a "
                    "cast to half precision inside, or a constant in another dtype. Compute it in float64, "
                    "or look for autocast and .to() in the model.",
                )  # fmt: skip


def _product(setting: Setting, route: Route) -> Vector | None:
    """What a route gives along the first direction, or None where it raises."""
    one = setting.judge()
    try:
        found = route.product(one.f, one.leaves, one.v, one.w)
    except Exception:  # told by its row
        return None
    return [part.detach() for part in found]
