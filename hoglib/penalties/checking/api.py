"""`hoglib.penalties.check`: the checks, in order."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from typing import Any, final

import torch

from hoglib._core import validation
from hoglib._core.autograd import grad_enabled
from hoglib._core.source_location import format_error
from hoglib.errors import ArgumentValueError
from hoglib.penalties.checking import behaviour, points
from hoglib.penalties.checking.formulas import (
    Case,
    CheckOptions,
    Formula,
    check_options,
    relative_error,
    table,
)
from hoglib.penalties.checking.subject import (
    Critic,
    CriticFactory,
    NotANumber,
    Outcome,
    Subject,
    preserve_state,
)
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
    r"""Checks that a penalty of your own is the one it should be, and names the mistake if not.

        wgan_gp       w mean_n (|g_n| - target)^2        at e_n real_n + (1 - e_n) fake_n
        zero_centred  w mean_n |g_n|^2                   likewise, e_n uniform in [0, 1]
        r1, r2        w mean_n |g_n|^2 / 2               at real; at fake
        r1_r2         the sum of both
        dragan        w mean_n (|g_n| - target)^2        at real and noise

    g_n is the gradient of sample n's score by its point, |.| over all elements of a sample. The penalty
    is run with critics whose gradients are known, and which record where they are called. A wrong value
    is compared with the values of known mistakes, one and two at once, and explained by them.

    The report has one row for each check: "value" (the formula), "points", "zero gradient" (NaN),
    "reaches the critic", "parameter gradient", "every=..", "unchanged: .." (what the penalty was
    given), "under no_grad", "under autocast", and other_inputs. *Fail*: a wrong number, or a change of
    what was given. *Warn*: it raises where validation or a last batch would run it, or loses
    digits under autocast. The penalty's own state, random numbers and modes are left as they were.

    Args:
        penalty: Called as penalty(critic, real, fake), and returns a scalar; as penalty(critic, x), x
            being real or fake by the kind, if it takes one set of points. A critic returns scores
            [N, 1], or [N] if those are refused.
        kind: The penalty that is meant: "wgan_gp", "zero_centred", "r1", "r2", "r1_r2" or "dragan".
        shape: Shape of one sample. Default: (3, 4, 4).
        every: How many calls there are for one penalty, if it is lazy. Default: 1.
        weight: w, what the penalty multiplies by. Default: 1.
        target: The target of wgan_gp and dragan. Default: 1.
        one_sided: Whether only slopes above the target are penalised. Default: False.
        noise: The standard deviation of the noise of dragan. Default: any.
        device: Where the critics are. Default: the CPU.
        dtype: torch.float64 or torch.float32. Default: float64, or float32 if that is refused.
    Returns:
        A `Report`: `ok`, `rows`, `str(report)`, `to_json()`, `raise_if_failed()`.
    Raises:
        ArgumentValueError: For an unknown kind or option.
        ArgumentTypeError: If the penalty is not a function.
    References:
        Gulrajani et al., Improved Training of Wasserstein GANs, 2017, eq. 3. Mescheder, Geiger and
        Nowozin, Which Training Methods for GANs do actually Converge?, 2018, eq. 9. Kodali et al., On
        Convergence and Stability of GANs, 2017, eq. 4.
    Example:
        >>> def without_half(critic, real):
        ...     x = real.detach().requires_grad_()
        ...     (g,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
        ...     return g.flatten(1).square().sum(1).mean()
        >>> report = hog.penalties.check(without_half, "r1")
        >>> [row.name for row in report.rows if row.status == "fail"]
        ['value']
    """
    validation.function("penalty", penalty)
    options = check_options(kind, shape, every, weight, target, one_sided, noise)
    where = torch.device("cpu" if device is None else device)
    dtypes = DTYPES if dtype is None else (dtype,)
    if not set(dtypes) <= set(DTYPES):
        raise ArgumentValueError(
            f"dtype: expected torch.float64 or torch.float32, got {dtype}; half precision is "
            "checked by the row 'under autocast'."
        )
    with grad_enabled(), warnings.catch_warnings(), preserve_state(penalty) as own:
        warnings.simplefilter("ignore")  # the checks provoke them
        subject = Subject(own, options.kind, options.every)
        return Report(name_of(penalty), list(_Examination(subject, options).rows(where, dtypes)))


@final
class _Examination:
    """The checks of one call of `check`, in order."""

    def __init__(self, subject: Subject, options: CheckOptions) -> None:
        self._subject, self._options = subject, options
        self._table = table(
            options.kind, target=options.target, one_sided=options.one_sided,
            weight=options.weight, every=options.every,
        )  # fmt: skip
        self._formula: Formula | None = None

    def rows(self, device: torch.device, dtypes: Sequence[torch.dtype]) -> Iterator[Row]:
        stop = self._choose_dtype_and_shape(device, dtypes)
        if stop is not None:
            yield stop
            return
        subject, factory = self._subject, self._factory
        if factory.dtype is not dtypes[0]:
            text = f"refused ({self._refused}); checked in {factory.dtype} with wider tolerances."
            yield Row(f"dtype: {dtypes[0]}", "skip", None, text)
        if subject.attached:
            text = (
                f"it raises {self._refused}: it takes its gradient by points that have a graph from "
                "fake alone. Give it points of its own, `x = x.detach().requires_grad_()`; then fake "
                "can be detached, and backward does not run through the generator's graph in vain."
            )
            yield Row("fake without a graph", "warn", None, text)
        reached, noise = None, self._options.noise
        checks: list[tuple[str, Callable[[], Row | Iterable[Row]]]] = [
            (behaviour.REPEATED, lambda: behaviour.repeated(subject, factory)),
            ("value", self._values),
            ("points", lambda: points.row(subject, factory, self._table, self._formula, noise)),
            (behaviour.REACHES, lambda: behaviour.reaches(subject, factory)),
            (behaviour.GRADIENT, lambda: behaviour.derivative(subject, factory)),
            (behaviour.ZERO, lambda: behaviour.at_zero(subject, factory)),
            ("other sizes", lambda: behaviour.other_inputs(factory, self._value_and_expected)),
            ("unchanged", lambda: behaviour.unchanged(subject, factory)),
            ("under no_grad", lambda: behaviour.without_grad(subject, factory)),
            ("under autocast", lambda: behaviour.autocast(subject, factory)),
        ]  # fmt: skip
        for name, examine in checks:
            if name in (behaviour.GRADIENT, behaviour.ZERO) and reached == "fail":
                yield Row(name, "skip", None, "not checked: no gradient reaches the critic.")
                continue
            rows = _guarded(name, examine)
            yield from rows
            if name == behaviour.REPEATED and [row for row in rows if row.status == "fail"]:
                return  # the other checks make no sense then
            reached = rows[0].status if name == behaviour.REACHES else reached

    def _choose_dtype_and_shape(
        self, device: torch.device, dtypes: Sequence[torch.dtype]
    ) -> Row | None:
        """Finds the dtype and the shape of scores with which the penalty runs; else a row that
        says why not."""
        errors: list[Exception] = []
        options, subject = self._options, self._subject
        for attached, dtype, column in product((False, True), dtypes, (True, False)):
            if attached and not any("does not require grad" in str(error) for error in errors):
                break
            subject.attached = attached
            size = options.target or 1.0
            self._factory = factory = CriticFactory(options.shape, column, dtype, device, size)
            try:
                subject(factory.linear(1.0), factory.data(5), factory.data(5))
            except NotANumber as returned:
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
        """Two sizes of batches, different from the dimensions of a sample."""
        free = [n for n in range(3, 20) if n not in self._options.shape]
        return free[2], free[0]

    def _values(self) -> Iterator[Row]:
        """Which formula the value follows; real and fake are the same, so that the points are known."""
        factory, cases, text = self._factory, [], ""
        made = [(factory.quadratic(), n) for n in (*self._sizes, self._sizes[0])]
        for critic, n in (*made, (factory.linear(0.4), self._sizes[1])):
            real = factory.data(n)
            outcome = self._subject(critic, real, real.clone())
            gradients = self._gradients(critic, outcome, real)
            cases.append(Case(gradients, self._options.kind.sets, outcome.number))
        rtol = 1e-5 if factory.dtype == torch.float64 else 1e-3
        right, first = self._table.right, cases[0]
        expected = self._table.value(right, first.gradients, first.sets)
        self._formula = found = self._table.explain(cases, rtol)
        formula = f"{self._options.kind.formula}"
        if self._options.weight != 1.0:
            formula = f"{self._options.weight:g} times {formula}"
        wrong = found.mistakes if found is not None else []
        if found is None:
            text = "None of the known mistakes, nor two of them together, gives that value."
        lazy = [variant for variant in wrong if variant.lazy]
        wrong = [variant for variant in wrong if not variant.lazy]
        text = text or _capitalised("; and ".join(variant.wrong for variant in wrong)) + "."
        text += "".join(f" {variant.fix}" for variant in wrong)
        error = None
        if expected is not None:
            error = relative_error(first.value, expected)
            text = f"it returned {first.value:.4g}, where {formula} is {expected:.4g}. {text}"
        bad = found is None or wrong
        yield Row("value", "fail" if bad else "pass", error if bad else None, text if bad else "")
        if self._options.every > 1:
            texts = [f"{variant.wrong}. {variant.fix}" for variant in lazy]
            status = "fail" if lazy else "skip" if found is None else "pass"
            text = " ".join(texts) or (
                "not checked: no known formula gives the value." if bad else ""
            )
            yield Row(f"every={self._options.every}", status, None, text)

    def _gradients(self, critic: Critic, outcome: Outcome, real: torch.Tensor) -> list[Any]:
        """The gradients at the points of each call of the critic; at real where the kind's points
        are given."""
        if self._options.kind.at not in ("between", "noise"):
            return [critic.gradient(real)]
        seen = [points.penalised_points(calls, real, real) for calls in outcome.active]
        known = [x for x in seen if not isinstance(x, str)]
        return [critic.gradient(x) for x in known or [real]]

    def _value_and_expected(self, factory: CriticFactory, n: int) -> tuple[float, float] | None:
        """The value for n samples of another form, and the one by the formula that was found."""
        critic, real = factory.quadratic(), factory.data(n)
        outcome = self._subject(critic, real, real.clone())
        gradients = self._gradients(critic, outcome, real)
        if self._formula is None:
            return None
        value = self._table.value(self._formula, gradients, self._options.kind.sets)
        return None if value is None else (outcome.number, value)


def _guarded(name: str, examine: Callable[[], Row | Iterable[Row]]) -> list[Row]:
    """The rows of a check; a failed one if the penalty raises."""
    try:
        found = examine()
        return [found] if isinstance(found, Row) else list(found)
    except NotANumber as returned:
        text = f"it returned {returned}; expected one number."
    except Exception as error:
        text = f"it raises {format_error(error)}, where it ran before."
    return [Row(name, "fail", None, text)]


def _capitalised(text: str) -> str:
    return text[:1].upper() + text[1:]
