"""A requested route in the dtype of the parameters: is it there, is it finite, how far is it off?"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import CheckpointFunction

from hoglib._core import pytree
from hoglib._core.autograd import Vector, fresh_leaves
from hoglib._core.finite_differences import distance
from hoglib._core.module_names import ModuleNames
from hoglib._core.source_location import format_error
from hoglib._core.swap import keep_swapped
from hoglib._core.torch_internals import eagerly, is_compiled, is_once_differentiable
from hoglib.auditing import messages
from hoglib.auditing.locating import Ask, Fault, Running
from hoglib.auditing.messages import Telling
from hoglib.auditing.observation import Look, look
from hoglib.auditing.problem import Problem
from hoglib.auditing.route_checker import FIRST, CheckResult, RouteChecker
from hoglib.auditing.routes import AUTO, ROUTES, Route
from hoglib.auditing.setting import Setting
from hoglib.errors import HoglibError
from hoglib.verification.report import CULPRIT, Report, Row

KEEPS = {torch.float32: 0.03, torch.float16: 0.3, torch.bfloat16: 0.3}  # of a product


def own_dtype_row(
    problem: Problem, words: Telling, route: Route, at: Vector, product: Vector | None
) -> tuple[Row | None, list[Fault], str]:
    """product: what it gives in float64, at these leaves, if that can be compared.

    At the parameters themselves it must be there and finite; at the leaves it is compared.
    """
    dtype = problem.leaves[0].dtype
    title = str(dtype).removeprefix("torch.")
    name, what = f"{route.row}, in {title}", f"{messages.second(route)}, in {title} at params,"

    def ask(judge: RouteChecker) -> CheckResult:
        return judge.finite(route)

    with Setting(problem, double=False) as here, keep_swapped():
        verdict = ask(here.judge())
        if verdict.at_fault:
            faults = list(here.locator.faults(ask, verdict))
            text = f"It {messages.off(verdict)} at params, in {words.where(faults)}."
            return Row(name, "fail", verdict.error, text), faults, what
        if dtype not in KEEPS or product is None:
            return None, [], what
        here.move_to([x.to(like.dtype) for x, like in zip(at, here.given, strict=True)])
        narrow = here.product(route)
    if narrow is None:  # there, and not beside: of no interest
        return None, [], what
    size = max(float(pytree.norm(product)), 1e-300)
    error = distance([x.double() for x in narrow], product) / size
    if error < KEEPS[dtype]:
        return Row(name, "pass", error), [], what
    text = (
        f"{messages.second(route)} is off by {error:.0%} in {title} from what it is in float64: by "
        "rounding, a cast to half precision inside, or a constant in another dtype. Compute it in "
        "float64, or look for autocast and .to() in the model."
    )
    return Row(name, "warn", error, text), [], what


# === Warnings of what makes second-order training meaningless or fragile.

MOST = 5  # names in a sentence
EACH_TIME = (
    "Each product is of another function, and conjugate gradients, eigenvalues and differences of "
    "gradients mean nothing."
)


def fragility_rows(look: Look, names: ModuleNames) -> Iterator[Row]:
    """A row for each thing that a run showed."""
    for name, text in _texts(look, names):
        yield Row(name, "warn", None, text)


def not_finite(look: Look) -> list[Row]:
    """Of a loss that is not: then its derivatives mean nothing."""
    at = (
        f"The first output that is not finite is that of {look.not_finite[0]}. "
        if look.not_finite
        else ""
    )
    return [
        Row(
            "finite", "fail", None,
            "the loss is not a finite number at params, and nothing else was looked at. "
            f"{at}Look for NaN in the batch, and for log, sqrt and divisions at zero.",
        )
    ]  # fmt: skip


def culprits(look: Look, names: ModuleNames) -> Iterator[Row]:
    """A row for each thing that a run showed and that makes second derivatives wrong or impossible."""
    if look.compiled_raises is not None:
        for name in [*map(names.title, _compiled(names))] or ["the loss"]:
            yield Row(
                f"{CULPRIT}{name}", "fail", None,
                "It was compiled by torch.compile, and compiled code has no second derivative: "
                f"{str(look.compiled_raises).splitlines()[0][:160]}. Use the module that was compiled, "
                "or `hoglib.functional_loss`, which runs it uncompiled. All else is judged uncompiled.",
            )  # fmt: skip
    if not look.deterministic:
        yield Row(
            "deterministic", "fail", None,
            "the loss is not the same twice, from the same random numbers and the same state of its "
            "modules (hidden nondeterminism): does it read a clock, draw numbers of its own, or count "
            "in a global? Derivatives and differences of it mean nothing.",
        )  # fmt: skip
    if look.from_elsewhere:
        yield Row(
            f"{CULPRIT}the loss", "fail", None,
            f"It uses {_listed(look.from_elsewhere)} of the model itself beside the params that it is "
            "given: a part of the derivatives is missing. Look for model.parameters() or a list of "
            "weights in it; take them from params, or detach() what is meant as a constant.",
        )  # fmt: skip


def _compiled(names: ModuleNames) -> list[nn.Module]:
    return [m for m in names.modules() if is_compiled(m) or m._compiled_call_impl is not None]


def _texts(look: Look, names: ModuleNames) -> Iterator[tuple[str, str]]:
    if look.dropped:
        yield (
            "dropout",
            f"Dropout is on in {_listed(look.dropped)}. {EACH_TIME} Call model.eval(), or give every "
            "product the same seed (`torch.manual_seed` before each).",
        )
    if look.drew or look.drew_outside:
        who = _listed(look.drew) if look.drew else "The loss"
        by = f" by {_listed(look.drew_outside)}" if look.drew_outside else ""
        yield (
            "random numbers",
            f"{who} draws random numbers{by}. {EACH_TIME} Draw them before and pass them with the "
            "batch, or give every product the same seed.",
        )
    if look.remembers:
        yield (
            "state",
            f"The value is another one the next time: it depends on what a run leaves in "
            f"{_listed([f'`{name}`' for name in look.remembers])}. {EACH_TIME} Make it a part of the "
            "batch, or take it out while second derivatives are taken.",
        )
    training = [
        names.briefly(m) for m in look.ran.values() if isinstance(m, _BatchNorm) and m.training
    ]
    if training:
        yield (
            "batch norm",
            f"Batch norm is in train mode in {_listed(training)}: it couples the examples of a batch. "
            "The Hessian of a batch is no mean over examples, and that of a data set depends on its "
            "batches. hoglib leaves the running statistics as they are. Call .eval() on it, or use a "
            "norm within examples (GroupNorm, LayerNorm).",
        )
    if look.autocast_around:
        yield (
            "autocast",
            "Autocast is on around the call: derivatives are rounded to half precision twice. Take "
            "second derivatives outside of it, as hoglib's penalties do.",
        )
    elif look.autocast:
        yield (
            "autocast",
            f"Autocast is on inside {_listed(look.autocast)}: second derivatives are rounded to half "
            "precision twice there. Take the region out of the model, around the call.",
        )
    once = [f"{f.__qualname__} in {n}" for f, n in look.functions if is_once_differentiable(f)]
    if once:
        yield (
            "once_differentiable",
            f"{_listed(once)} is decorated with @once_differentiable: a second derivative through it "
            "raises, or under torch.autograd.grad(inputs=...) is silently zero. Take the decorator off "
            "and compute in backward by differentiable torch operations from the saved inputs.",
        )
    reentrant = [name for f, name in look.functions if f is CheckpointFunction]
    if reentrant:
        yield (
            "reentrant checkpoint",
            f"torch.utils.checkpoint runs with use_reentrant=True in {_listed(reentrant)}: it raises "
            "under torch.autograd.grad, and has no second derivative. Pass use_reentrant=False, or use "
            "`hoglib.ops.remat`.",
        )
    compiled = [*map(names.briefly, _compiled(names))]
    if look.compiled:
        yield (
            "compiled",
            f"{_listed(compiled) if compiled else 'A function'} was compiled by torch.compile, and "
            "compiled code has no second derivative: torch raises. hoglib runs what `functional_loss` "
            "is given uncompiled; elsewhere use the module that was compiled.",
        )
    if look.unused:
        yield (
            "unused parameters",
            f"The loss does not depend on {_listed(look.unused)}: their gradient is None, and their "
            "rows and columns of the Hessian are zero. Leave them out of params, or look for a "
            "branch that does not run.",
        )


def _listed(found: Sequence[str]) -> str:
    shown = list(dict.fromkeys(found))
    more = f" and {len(shown) - MOST} more" if len(shown) > MOST else ""
    return ", ".join(shown[:MOST]) + more


# === The checks of one audit, in order, and the rows that they become.

DIRECTIONS = 2  # along which a requested route is tried; others, and long ones, along one
AT_MOST = 4  # where a kink is in the way along some
# Operations of one forward from which routes that nobody asked for are left out: those that take
# several gradients, and all. Two cores do some 1e10 a second in float64.
MANY, TOO_MANY = 3e9, 8e9
LONG = ("jacrev of jacrev", "grad of vmap", "third order")
MATTERS = 1e-3  # of a product, by which what is held constant must change it to be told


class _Refused(Exception):
    """The loss does not run in float64."""


class Checks:
    """What is looked at for one loss; `report()` makes them."""

    def __init__(self, problem: Problem, chosen: list[Route]) -> None:
        self._problem, self._chosen = problem, chosen
        self._telling = messages.Telling(problem.names)
        self._culprits: dict[str, Row] = {}
        self._random = False  # whether the loss draws numbers
        self._judged = True  # all that was asked for
        self._kinked: set[int] = set()  # directions along which a kink was in the way

    def report(self) -> Report:
        name, running = messages.title(self._problem.loss), Running(self._problem.names)
        try:
            seen = look(self._problem, running)
        except HoglibError:
            raise
        except Exception as error:
            text = f"the loss does not run on its batch: {format_error(error)}."
            text += messages.inside(running)
            return Report(name, [Row("runs", "fail", None, text)])
        if not seen.finite:
            return Report(name, not_finite(seen))
        self._random = seen.random
        with eagerly(seen.compiled):
            rows = [*self._derivatives(seen), *fragility_rows(seen, self._problem.names)]
        for row in culprits(seen, self._problem.names):
            self._add(row)
        return Report(name, [*self._culprits.values(), *rows], judged=self._judged)

    def _derivatives(self, seen: Look) -> list[Row]:
        try:
            keep = [route.key for route in self._chosen]
            with Setting(self._problem, double=True, keep=keep) as wide, keep_swapped():
                self._settle(wide)
                rows = [*self._rows(wide), *self._stops(wide)]
                right = [r for r in self._chosen if not _failed(rows, r)]
                at, products = wide.leaves, [wide.product(route) for route in right]
        except _Refused as refused:
            self._kinked, self._judged = set(), True
            text = f"refused ({refused}); judged in its own dtype, with wider tolerances."
            with Setting(self._problem, double=False) as narrow, keep_swapped():
                narrow.move_beside()
                rows = [*self._rows(narrow), *self._stops(narrow)]
            return [Row("dtype: float64", "skip", None, text), *rows]
        for route, product in zip(right, products, strict=True):
            # another dtype draws other random numbers
            wanted = None if seen.random else product
            row, faults, what = own_dtype_row(self._problem, self._telling, route, at, wanted)
            self._accuse(faults, what)
            if row is not None:
                rows.append(row)
        return rows

    def _settle(self, setting: Setting) -> None:
        """Whether it runs in this dtype, and where it is judged."""
        try:
            setting.f(*fresh_leaves(setting.given, False))
        except Exception as error:
            raise _Refused(format_error(error)) from error
        setting.move_beside()

    def _rows(self, setting: Setting) -> Iterator[Row]:
        yield self._row(
            setting, FIRST, RouteChecker.first, "the gradient", asked=True, directions=1
        )
        work = setting.work()
        for route in ROUTES.values():
            asked = route in self._chosen
            if not asked and (work > TOO_MANY or (work > MANY and route.key in LONG)):
                yield Row(
                    route.row, "skip", None,
                    f"not tried: one forward takes {work:.0e} operations; ask for it by "
                    f"routes={route.key!r}.",
                )  # fmt: skip
                continue

            def ask(judge: RouteChecker, route: Route = route) -> CheckResult:
                return judge.of(route)

            what, directions = messages.second(route), DIRECTIONS if asked and work < MANY else 1
            yield self._row(setting, route.row, ask, what, asked=asked, directions=directions)

    def _row(
        self, setting: Setting, name: str, ask: Ask, what: str, *, asked: bool, directions: int
    ) -> Row:
        verdict = self._verdict(setting, ask, directions)
        if verdict.wrong and self._random and setting.draws_otherwise():
            verdict = CheckResult(None)
        if verdict.at_fault:
            found = self._faults(setting, ask, verdict, asked=asked)
            # the first will do of what nobody asked for
            faults = [*found] if asked else [*islice(found, 1)]
            off, where = messages.off(verdict), self._telling.where(faults)
            if _surrogates(faults):
                text = (
                    f"{where}: declared a surrogate, whose gradient differs from the derivative on "
                    "purpose, and has none of its own to compare with."
                )
                return Row(name, "skip", None, text)
            if asked:
                self._accuse(faults, what)
                return Row(name, "fail", verdict.error, f"It {off}, in {where}.")
            if verdict.raised is not None:
                return Row(name, "skip", None, f"It {off}, in {where}.")
            return Row(name, "warn", verdict.error, self._telling.elsewhere(faults))
        if verdict.wrong is None:
            self._judged &= not asked
            return Row(
                name, "warn" if asked else "skip", None,
                "not judged: differences do not agree with each other (kinks are near, numbers are too "
                "large or too small, torch.func draws others), or cannot be had: the loss raises "
                "beside params, or detaches inside of a torch.func transform. Try other params, a "
                "smaller batch, or eval mode.",
            )  # fmt: skip
        return Row(name, "pass", verdict.error)

    def _faults(
        self, setting: Setting, ask: Ask, verdict: CheckResult, *, asked: bool
    ) -> Iterable[Fault]:
        """Where a derivative is lost.

        A loss that differentiates inside (a gradient penalty, a PINN) loses one where a module loses
        one of a higher order: then these are asked for.
        """
        found = setting.locator.faults(ask, verdict)
        if not asked:
            return found
        faults = [*found]
        for key in (AUTO, "third order"):
            if any(fault.operations or fault.call.module is not None for fault in faults):
                break

            def higher(judge: RouteChecker, key: str = key) -> CheckResult:
                return judge.of(ROUTES[key])

            deeper = setting.locator.faults(higher, verdict)
            faults = [fault for fault in deeper if fault.call.module is not None] or faults
        return faults

    def _verdict(self, setting: Setting, ask: Ask, directions: int) -> CheckResult:
        """What is known of a derivative along directions; along more where a kink is in the way."""
        best, settled = CheckResult(None), 0
        for seed in sorted(range(AT_MOST), key=lambda seed: (seed in self._kinked, seed)):
            verdict = ask(setting.judge(seed))
            if verdict.at_fault:
                return verdict
            if verdict.sure:
                settled += 1
            else:
                self._kinked.add(seed)
            best = max(best, verdict, key=CheckResult.rank)
            if settled == directions:
                break
        return best

    def _accuse(self, faults: list[Fault], what: str) -> None:
        names = self._problem.names
        for fault in faults:
            name = f"{CULPRIT}{names.title(fault.module)}"
            if name not in self._culprits:  # what was found first: the lowest order
                text = self._telling.culprit(fault, what)
                self._add(Row(name, "fail", fault.verdict.error, text))

    def _add(self, row: Row) -> None:
        """A culprit; a module has one row."""
        known = self._culprits.setdefault(row.name, row)
        if row.text not in known.text:
            self._culprits[row.name] = known._replace(text=f"{known.text}\n{row.text}")

    def _stops(self, setting: Setting) -> Iterator[Row]:
        """What is held constant, if a product would be another one without that."""
        # parametrizations of torch stop what they mean to, such as the vectors of spectral norm
        found = [
            stop
            for stop in setting.stops.found
            if not type(stop.module).__module__.startswith("torch.nn.utils")
        ]
        if not found:
            return
        change = setting.judge().apart(RouteChecker(setting.f, setting.leaves, None))
        if change is not None and change > MATTERS:
            text = self._telling.stopped(found, change)
            yield Row("stopped gradients", "warn", change, text)


def _failed(rows: list[Row], route: Route) -> bool:
    return any(row.name == route.row and row.status in ("fail", "skip") for row in rows)


def _surrogates(faults: list[Fault]) -> bool:
    """Whether all that is at fault are Functions whose gradient is another one on purpose."""
    found = [op.function for fault in faults for op, _ in fault.operations]
    explained = all(fault.operations for fault in faults)
    return bool(found) and explained and all(getattr(f, "surrogate", False) is True for f in found)
