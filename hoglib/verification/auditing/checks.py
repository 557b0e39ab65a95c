"""The checks of one audit, in order, and the rows that they become."""

from collections.abc import Iterable, Iterator
from itertools import islice

from hoglib import _arguments as arguments
from hoglib._functorch import eagerly
from hoglib._leaves import own_leaves
from hoglib._substitution import lingering
from hoglib.verification._around import told
from hoglib.verification.auditing import fragile, own_dtype, telling
from hoglib.verification.auditing.judging import FIRST, Judge, Verdict
from hoglib.verification.auditing.locating import Ask, Fault
from hoglib.verification.auditing.look import Look, look
from hoglib.verification.auditing.module_calls import Running
from hoglib.verification.auditing.problem import Problem
from hoglib.verification.auditing.routes import AUTO, ROUTES, Route
from hoglib.verification.auditing.setting import Setting
from hoglib.verification.report import CULPRIT, Report, Row

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
        self._telling = telling.Telling(problem.names)
        self._culprits: dict[str, Row] = {}
        self._random = False  # whether the loss draws numbers
        self._judged = True  # all that was asked for
        self._kinked: set[int] = set()  # directions along which a kink was in the way

    def report(self) -> Report:
        name, running = telling.title(self._problem.loss), Running(self._problem.names)
        try:
            seen = look(self._problem, running)
        except arguments.Explained:
            raise
        except Exception as error:
            text = f"the loss does not run on its batch: {told(error)}.{telling.inside(running)}"
            return Report(name, [Row("runs", "fail", None, text)])
        if not seen.finite:
            return Report(name, fragile.not_finite(seen))
        self._random = seen.random
        with eagerly(seen.compiled):
            rows = [*self._derivatives(seen), *fragile.rows(seen, self._problem.names)]
        for row in fragile.culprits(seen, self._problem.names):
            self._add(row)
        return Report(name, [*self._culprits.values(), *rows], judged=self._judged)

    def _derivatives(self, seen: Look) -> list[Row]:
        try:
            keep = [route.key for route in self._chosen]
            with Setting(self._problem, double=True, keep=keep) as wide, lingering():
                self._settle(wide)
                rows = [*self._rows(wide), *self._stops(wide)]
                right = [r for r in self._chosen if not _failed(rows, r)]
                at, products = wide.leaves, [wide.product(route) for route in right]
        except _Refused as refused:
            self._kinked, self._judged = set(), True
            text = f"refused ({refused}); judged in its own dtype, with wider tolerances."
            with Setting(self._problem, double=False) as narrow, lingering():
                narrow.move_beside()
                rows = [*self._rows(narrow), *self._stops(narrow)]
            return [Row("dtype: float64", "skip", None, text), *rows]
        for route, product in zip(right, products, strict=True):
            # another dtype draws other random numbers
            wanted = None if seen.random else product
            row, faults, what = own_dtype.row(self._problem, self._telling, route, at, wanted)
            self._accuse(faults, what)
            if row is not None:
                rows.append(row)
        return rows

    def _settle(self, setting: Setting) -> None:
        """Whether it runs in this dtype, and where it is judged."""
        try:
            setting.f(*own_leaves(setting.given, False))
        except Exception as error:
            raise _Refused(told(error)) from error
        setting.move_beside()

    def _rows(self, setting: Setting) -> Iterator[Row]:
        yield self._row(setting, FIRST, Judge.first, "the gradient", asked=True, directions=1)
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

            def ask(judge: Judge, route: Route = route) -> Verdict:
                return judge.of(route)

            what, directions = telling.second(route), DIRECTIONS if asked and work < MANY else 1
            yield self._row(setting, route.row, ask, what, asked=asked, directions=directions)

    def _row(
        self, setting: Setting, name: str, ask: Ask, what: str, *, asked: bool, directions: int
    ) -> Row:
        verdict = self._verdict(setting, ask, directions)
        if verdict.wrong and self._random and setting.draws_otherwise():
            verdict = Verdict(None)
        if verdict.at_fault:
            found = self._faults(setting, ask, verdict, asked=asked)
            # the first will do of what nobody asked for
            faults = [*found] if asked else [*islice(found, 1)]
            off, where = telling.off(verdict), self._telling.where(faults)
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
        self, setting: Setting, ask: Ask, verdict: Verdict, *, asked: bool
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

            def higher(judge: Judge, key: str = key) -> Verdict:
                return judge.of(ROUTES[key])

            deeper = setting.locator.faults(higher, verdict)
            faults = [fault for fault in deeper if fault.call.module is not None] or faults
        return faults

    def _verdict(self, setting: Setting, ask: Ask, directions: int) -> Verdict:
        """What is known of a derivative along directions; along more where a kink is in the way."""
        best, settled = Verdict(None), 0
        for seed in sorted(range(AT_MOST), key=lambda seed: (seed in self._kinked, seed)):
            verdict = ask(setting.judge(seed))
            if verdict.at_fault:
                return verdict
            if verdict.sure:
                settled += 1
            else:
                self._kinked.add(seed)
            best = max(best, verdict, key=Verdict.rank)
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
        change = setting.judge().apart(Judge(setting.f, setting.leaves, None))
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
