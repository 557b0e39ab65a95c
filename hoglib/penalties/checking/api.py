"""`hog.penalties.check`: which checks are made, in which order."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from typing import Any

import torch

from hoglib._core import validation
from hoglib._core.autograd import grad_enabled
from hoglib._core.source_location import format_error
from hoglib.errors import ArgumentValueError
from hoglib.penalties.checking import behaviour, points
from hoglib.penalties.checking.behaviour import Outcome, Returned, Subject, untouched
from hoglib.penalties.checking.critics import Critic, Makers
from hoglib.penalties.checking.mistakes import Case, Formula, Options, chosen, off, table
from hoglib.verification.call import name_of
from hoglib.verification.report import Report, Row

DTYPES = (torch.float64, torch.float32)
CALLED = (
    "It is called as penalty(critic, real, fake), or penalty(critic, x) if it takes one set of points, "
    "with real of shape {real} and scores of shape {score}. Say which shape it is written for with "
    "shape=, take the size of the batch from real, and bind other arguments by a lambda."
)


def check(
    penalty: Callable[..., Any],
    kind: str,
    *,
    shape: Sequence[int] = (3, 4, 4),
    every: int = 1,
    weight: float = 1.0,
    target: float | None = None,
    one_sided: bool = False,
    noise: float | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Report:
    r"""Is a gradient penalty the one it is meant to be? If not, which mistake is in it?

        wgan_gp       w mean_n (|g_n| - target)^2        at e_n real_n + (1 - e_n) fake_n
        zero_centred  w mean_n |g_n|^2                   likewise, e_n uniform in [0, 1]
        r1, r2        w mean_n |g_n|^2 / 2               at real; at fake
        r1_r2         the sum of both
        dragan        w mean_n (|g_n| - target)^2        at real and noise

    g_n is the gradient of sample n's score by its point, |.| over all elements of a sample. The penalty
    is run with critics whose gradients are known, and that see where they are called. A wrong value is
    compared with what the known mistakes give, one and two at once, and is named by them.

    penalty: called as penalty(critic, real, fake), and returns a scalar; as penalty(critic, x), x
    real or fake by the kind, if it takes one set of points. A critic returns scores [N, 1], or [N] if
    those are refused. shape: of one sample. every: it is lazy, and acts at every so many calls.
    weight: what it multiplies by. target, one_sided: of wgan_gp and dragan; 1 and False by default.
    noise: the standard deviation that dragan should have; by default any. device: CPU by default.
    dtype: float64, or float32 if that is refused.

    Returns a `Report`: `ok`, `rows`, `str(report)`, `to_json()`, `raise_if_failed()`. A row a check:
    "value" (the formula), "points", "zero gradient" (NaN), "reaches the critic", "parameter gradient",
    "every=..", "unchanged: .." (what it was given), "under no_grad", "under autocast", and others.
    *Fail*: a wrong number, or a change of what was given. *Warn*: it raises where validation or a last
    batch would run it, or loses digits under autocast. The penalty's own state, random numbers and
    modes are left as they were.
    Raises ValueError for an unknown kind or option, TypeError for what is no function.
    Source: Gulrajani et al., 2017, eq. 3; Mescheder et al., 2018, eq. 9; Kodali et al., 2017, eq. 4.
    """
    validation.function("penalty", penalty)
    options = chosen(kind, shape, every, weight, target, one_sided, noise)
    where = torch.device("cpu" if device is None else device)
    dtypes = DTYPES if dtype is None else (dtype,)
    if not set(dtypes) <= set(DTYPES):
        raise ArgumentValueError(
            f"dtype: expected torch.float64 or torch.float32, got {dtype}; half precision is judged by "
            "the row 'under autocast'."
        )
    with grad_enabled(), warnings.catch_warnings(), untouched(penalty, where) as own:
        warnings.simplefilter("ignore")  # what is tried on purpose is no news
        subject = Subject(own, options.kind, options.every)
        return Report(name_of(penalty), list(_Examination(subject, options).rows(where, dtypes)))


class _Examination:
    """The checks of one call of `check`, in order."""

    def __init__(self, subject: Subject, options: Options) -> None:
        self._subject, self._options = subject, options
        self._table = table(
            options.kind, target=options.target, one_sided=options.one_sided,
            weight=options.weight, every=options.every,
        )  # fmt: skip
        self._formula: Formula | None = None

    def rows(self, device: torch.device, dtypes: Sequence[torch.dtype]) -> Iterator[Row]:
        stop = self._settle(device, dtypes)
        if stop is not None:
            yield stop
            return
        subject, makers = self._subject, self._makers
        if makers.dtype is not dtypes[0]:
            text = f"refused ({self._refused}); checked in {makers.dtype} with wider tolerances."
            yield Row(f"dtype: {dtypes[0]}", "skip", None, text)
        if subject.attached:
            text = (
                f"it raises {self._refused}: it takes its gradient by points that have a graph from "
                "fake alone. Give it points of its own, `x = x.detach().requires_grad_()`; then fake "
                "can be detached, and the generator's graph is not gone through in vain."
            )
            yield Row("fake without a graph", "warn", None, text)
        reached, noise = None, self._options.noise
        checks: list[tuple[str, Callable[[], Row | Iterable[Row]]]] = [
            (behaviour.REPEATED, lambda: behaviour.repeated(subject, makers)),
            ("value", self._values),
            ("points", lambda: points.row(subject, makers, self._table, self._formula, noise)),
            (behaviour.REACHES, lambda: behaviour.reaches(subject, makers)),
            (behaviour.GRADIENT, lambda: behaviour.derivative(subject, makers)),
            (behaviour.ZERO, lambda: behaviour.at_zero(subject, makers)),
            ("other sizes", lambda: behaviour.others(makers, self._judge)),
            ("unchanged", lambda: behaviour.unchanged(subject, makers)),
            ("under no_grad", lambda: behaviour.without_grad(subject, makers)),
            ("under autocast", lambda: behaviour.autocast(subject, makers)),
        ]  # fmt: skip
        for name, examine in checks:
            if name in (behaviour.GRADIENT, behaviour.ZERO) and reached == "fail":
                yield Row(name, "skip", None, "not judged: no gradient reaches the critic.")
                continue
            rows = _guarded(name, examine)
            yield from rows
            if name == behaviour.REPEATED and [row for row in rows if row.status == "fail"]:
                return  # nothing else can be said of it
            reached = rows[0].status if name == behaviour.REACHES else reached

    def _settle(self, device: torch.device, dtypes: Sequence[torch.dtype]) -> Row | None:
        """The dtype, and the shape of scores, with which it runs; the row of why it does not."""
        errors: list[Exception] = []
        options, subject = self._options, self._subject
        for attached, dtype, column in product((False, True), dtypes, (True, False)):
            if attached and not any("does not require grad" in str(error) for error in errors):
                break
            subject.attached = attached
            size = options.target or 1.0
            self._makers = makers = Makers(options.shape, column, dtype, device, size)
            try:
                subject(makers.linear(1.0), makers.data(5), makers.data(5))
            except Returned as returned:
                text = (
                    f"expected the penalty, one number, got {returned}. Reduce it by the mean over "
                    "samples, and return it by itself."
                )
                return Row("returns", "fail", None, text)
            except Exception as error:
                errors.append(error)
            else:
                self._refused = format_error(errors[0]) if errors else ""
                return None
        called = CALLED.format(real=(5, *options.shape), score=(5, 1))
        return Row("runs", "fail", None, f"it raises {format_error(errors[0])}. {called}")

    @property
    def _sizes(self) -> tuple[int, int]:
        """Sizes of batches that are no dimension of a sample."""
        free = [n for n in range(3, 20) if n not in self._options.shape]
        return free[2], free[0]

    def _values(self) -> Iterator[Row]:
        """The formula, where points are known: real and fake are the same."""
        makers, cases, text = self._makers, [], ""
        made = [(makers.quadratic(), n) for n in (*self._sizes, self._sizes[0])]
        for critic, n in (*made, (makers.linear(0.4), self._sizes[1])):
            real = makers.data(n)
            outcome = self._subject(critic, real, real.clone())
            gradients = self._gradients(critic, outcome, real)
            cases.append(Case(gradients, self._options.kind.sets, outcome.number))
        rtol = 1e-5 if makers.dtype == torch.float64 else 1e-3
        right, first = self._table.right, cases[0]
        expected = self._table.value(right, first.gradients, first.sets)
        self._formula = found = self._table.explain(cases, rtol)
        formula = f"{self._options.kind.formula}"
        if self._options.weight != 1.0:
            formula = f"{self._options.weight:g} times {formula}"
        wrong = found.mistakes if found is not None else []
        if found is None:
            text = "None of the known mistakes, nor two of them, give that."
        lazy = [way for way in wrong if way.lazy]
        wrong = [way for way in wrong if not way.lazy]
        text = text or _said("; and ".join(way.wrong for way in wrong)) + "."
        text += "".join(f" {way.mend}" for way in wrong)
        error = None
        if expected is not None:
            error = off(first.value, expected)
            text = f"it returned {first.value:.4g}, where {formula} is {expected:.4g}. {text}"
        bad = found is None or wrong
        yield Row("value", "fail" if bad else "pass", error if bad else None, text if bad else "")
        if self._options.every > 1:
            texts = [f"{way.wrong}. {way.mend}" for way in lazy]
            status = "fail" if lazy else "skip" if found is None else "pass"
            text = " ".join(texts) or (
                "not judged: the value is none that is known." if bad else ""
            )
            yield Row(f"every={self._options.every}", status, None, text)

    def _gradients(self, critic: Critic, outcome: Outcome, real: torch.Tensor) -> list[Any]:
        """At the points of each call that counted; real itself where the points are to be real."""
        if self._options.kind.at not in ("between", "beside"):
            return [critic.slope(real)]
        seen = [points.taken(calls, real, real) for calls in outcome.active]
        known = [x for x in seen if not isinstance(x, str)]
        return [critic.slope(x) for x in known or [real]]

    def _judge(self, makers: Makers, n: int) -> tuple[float, float] | None:
        """What came for n samples of another shape, and what the formula that was found gives."""
        critic, real = makers.quadratic(), makers.data(n)
        outcome = self._subject(critic, real, real.clone())
        gradients = self._gradients(critic, outcome, real)
        if self._formula is None:
            return None
        value = self._table.value(self._formula, gradients, self._options.kind.sets)
        return None if value is None else (outcome.number, value)


def _guarded(name: str, examine: Callable[[], Row | Iterable[Row]]) -> list[Row]:
    """The rows of a check; what the penalty raises is one."""
    try:
        found = examine()
        return [found] if isinstance(found, Row) else list(found)
    except Returned as returned:
        text = f"it returned {returned}, where one number is meant."
    except Exception as error:
        text = f"it raises {format_error(error)}, where it ran before."
    return [Row(name, "fail", None, text)]


def _said(text: str) -> str:
    return text[:1].upper() + text[1:]
