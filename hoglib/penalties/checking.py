"""`hoglib.penalties.check`: is a penalty the one that it is meant to be?

The penalty is run with critics that record where they are called, and compared with hoglib's own at
these points: by its value, and by its gradient by the parameters of the critic.
"""

import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from hoglib._core import validation
from hoglib._core.autograd import grad_enabled
from hoglib._core.detachment import INNER, DetachedGradient, DetachmentWatch
from hoglib._core.source_location import format_error
from hoglib._core.state import same
from hoglib.errors import ArgumentValueError
from hoglib.penalties import mistakes
from hoglib.penalties.mistakes import Formula, PenaltySpec, Points, Run, is_close, relative_error
from hoglib.penalties.recording_critics import (
    Critic,
    CriticFactory,
    NotANumber,
    gradient_of,
    isolated_penalty,
    recorded,
    scalar,
)
from hoglib.verification.call import name_of
from hoglib.verification.report import Report, Row

DTYPES = (torch.float64, torch.float32)
REPEATED, REACHES, GRADIENT, ZERO = (
    "repeated calls", "reaches the critic", "parameter gradient", "zero gradient"
)  # fmt: skip
CALLS = 33  # in a row, to detect a lazy penalty without every=: StyleGAN2 has one at every 16th
DRAWS = 512  # the number of random coefficients that are collected
UNKNOWN = "not checked: no known formula gives the value."
UNREACHED = "not checked: no gradient reaches the critic."
CALLED = (
    "It is called as penalty(critic, real, fake), or penalty(critic, x) if it takes one set of points, "
    "with real of shape {real} and scores of shape {score}. Say which shape it is written for with "
    "shape=, take the size of the batch from real, and bind other arguments by a lambda."
)
STAY = "Use torch operations, with gradients on, from the gradient to the value."
CREATE = (
    "Without `create_graph=True` the gradient is a constant: the penalty is added to the loss and "
    "trains nothing. Pass it to torch.autograd.grad (or to backward)."
)
FROZEN = "The value does not depend on them: they were frozen while it ran, or it is a constant."
SAFE = (
    "one sample with a zero gradient makes it NaN: the derivative of a root at zero is infinite. Use "
    "`g.flatten(1).norm(2, dim=1)`, whose derivative at zero is zero, or add 1e-12 under the root."
)
REDUCED = "A dimension is squeezed or reduced: name it, `g.flatten(1)`, `score.reshape(-1)`."
NARROW = "Create tensors and random numbers in the dtype of real, `.to(real)`."
ENABLE_GRAD = (
    "Validation runs in this mode. Use `with torch.inference_mode(False), torch.enable_grad():`, and "
    "a clone of the batch."
)
DISABLE_AUTOCAST = (
    "Half precision overflows, or loses all digits. Compute it inside "
    "`with torch.autocast(device_type, enabled=False):`, from float32 inputs."
)
CHANGED = {
    "requires_grad": "requires_grad of {} was changed. Differentiate by a new tensor, `x = "
    "x.detach().requires_grad_()`. Set free what you freeze.",
    "gradients": ".grad of {} is filled, and adds to the gradients of the step. Use "
    "`torch.autograd.grad(score.sum(), x, create_graph=True)` in place of backward().",
    "values": "{} was written to. Use out-of-place operations.",
    "training mode": "the critic was in {} mode and is in the other one now. Restore it.",
}


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
    is run with small critics that record where they are called, and compared with hoglib's own at these
    points. A wrong value is explained by a known mistake that gives it, if there is one.

    The report has one row for each check: "value" (the formula), "points", "reaches the critic",
    "parameter gradient", "zero gradient" (NaN), "every=..", "unchanged: .." (what the penalty was
    given), and the value in other circumstances: "batch of one", "in float32", "scores of shape ..",
    "under no_grad", "under inference_mode", "under autocast". *Fail*: a wrong number, or a change of
    what was given. *Warn*: it raises where validation or a last batch would run it. A module or
    object is copied, so that it counts no calls of the check; random numbers are left as they were.

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
    spec = mistakes.check_options(kind, shape, every, weight, target, one_sided, noise)
    where = torch.device("cpu" if device is None else device)
    dtypes = DTYPES if dtype is None else (dtype,)
    if not set(dtypes) <= set(DTYPES):
        raise ArgumentValueError(
            f"dtype: expected torch.float64 or torch.float32, got {dtype}; half precision is "
            "checked by the row 'under autocast'."
        )
    with grad_enabled(), warnings.catch_warnings(), isolated_penalty(penalty, where) as own:
        warnings.simplefilter("ignore")  # the checks provoke them
        return Report(name_of(penalty), list(_Examination(own, spec).rows(where, dtypes)))


@final
class _Examination:
    """The checks of one call of `check`, in order."""

    def __init__(self, penalty: Callable[..., Any], spec: PenaltySpec) -> None:
        self._penalty, self._spec = penalty, spec
        self._takes_both = len(spec.kind.sets) == 2 or _takes_fake(penalty)
        self._formula: Formula | None = None  # what the penalty computes, once it is known
        self._runs: list[Run] = []
        self._gradients: list[Tensor | None] = []

    def rows(self, device: torch.device, dtypes: Sequence[torch.dtype]) -> Iterator[Row]:
        """Runs the checks; where the penalty raises, the check fails."""
        first = list(self._choose_critics(device, dtypes))
        yield from first
        if any(row.status == "fail" for row in first):
            return
        checks: list[tuple[str, Callable[[], Iterable[Row]]]] = [
            (REPEATED, self._repeated), ("value", self._values), ("points", self._points),
            (REACHES, self._reaches), (GRADIENT, self._derivative), (ZERO, self._at_zero),
            *((how.name, partial(self._under, how)) for how in _circumstances(self._factory)),
            ("unchanged", self._unchanged),
        ]  # fmt: skip
        for name, examine in checks:
            try:
                found = list(examine())
            except Exception as error:
                text = f"it raises {format_error(error)}, where it ran before."
                found = [Row(name, "fail", None, text)]
            yield from found
            if found and found[-1].status == "fail" and not self._runs:
                return  # the other checks make no sense then

    def _choose_critics(self, device: torch.device, dtypes: Sequence[torch.dtype]) -> Iterator[Row]:
        """Finds the dtype and the shape of scores with which the penalty runs."""
        errors: list[Exception] = []
        shape = self._spec.shape
        for dtype, column in product(dtypes, (True, False)):
            factory = CriticFactory(shape, column, dtype, device, self._spec.target or 1.0)
            try:
                self._run(factory.linear(1.0), factory.data(5), factory.data(5))
            except Exception as error:
                errors.append(error)
                continue
            self._factory = factory
            if dtype is not dtypes[0]:
                text = f"refused ({format_error(errors[0])}); checked in {dtype} with wider tolerances."
                yield Row(f"dtype: {dtypes[0]}", "skip", None, text)
            return
        if isinstance(errors[0], NotANumber):
            yield Row("returns", "fail", None, str(errors[0]))
        else:
            called = CALLED.format(real=(5, *shape), score=(5, 1))
            yield Row("runs", "fail", None, f"it raises {format_error(errors[0])}. {called}")

    def _run(self, critic: Critic, real: Tensor, fake: Tensor) -> Run:
        """As many calls as a lazy penalty needs for one value."""
        values, seen = [], []
        kind, sets = self._spec.kind, {"real": real, "fake": fake}
        with DetachmentWatch() as watch:
            for _ in range(self._spec.every):
                critic.calls = []
                given = sets.values() if self._takes_both else [sets[name] for name in kind.sets]
                values.append(scalar(self._penalty(critic, *given), real))
                seen += [recorded(critic.calls, real, fake)] if critic.calls else []
        points: Points = [[sets[name] for name in kind.sets]]
        if kind.drawn:
            points = [[x] for x in seen if isinstance(x, Tensor)] or [[real]]
        # requires_grad_() looks like an operation without a derivative
        detached = [d for d in watch.detached if d.place and "requires_grad_" not in d.how]
        return Run(critic, points, torch.stack(values).mean(), seen, detached)

    def _repeated(self) -> Iterator[Row]:
        """Whether a penalty that is not lazy has the same value at each call."""
        if self._spec.every > 1:
            return
        critic, real = self._factory.linear(1.7), self._factory.data(5)
        values = [float(self._run(critic, real, real.clone()).value) for _ in range(CALLS)]
        other = [i for i, value in enumerate(values) if not is_close(value, values[0], 1e-3)]
        some = (values[0], *values[max(other[0] - 1, 1) : other[0] + 3]) if other else ()
        shown = ", ".join(f"{value:.4g}" for value in some)
        text = f"equal calls in a row returned {shown}. If it is lazy, pass every=."
        yield Row(REPEATED, "fail", None, text) if other else Row(REPEATED, "pass")

    def _values(self) -> Iterator[Row]:
        """Which formula the value follows; real and fake are the same, so that the points are known."""
        factory, spec = self._factory, self._spec
        few, _, more = [n for n in range(3, 20) if n not in spec.shape][:3]
        for critic, n in (
            (factory.quadratic(), more), (factory.network(), few), (factory.linear(0.4), few),
            (factory.quadratic(), more),
        ):  # fmt: skip
            real = factory.data(n)
            self._runs.append(self._run(critic, real, real.clone()))
        self._formula = found = spec.explain(self._runs, factory.tolerance)
        texts = ["None of the known mistakes gives that value."]
        if found is not None:
            texts = [found.mistake.text] if found.mistake else []
            texts += [found.text] if found.text and not found.lazy else []
        if texts:
            value = self._runs[0].value
            right = spec.value(Formula(), self._runs[0])
            text = (
                f"it returned {float(value):.4g}, where w mean_n {spec.kind.term} {spec.kind.where} "
                f"is {float(right):.4g}. {' '.join(texts)}"
            )
            yield Row("value", "fail", relative_error(value, right), text)
        else:
            yield Row("value", "pass")
        if spec.every > 1:
            lazy = found.text if found is not None and found.lazy else ""
            status = "skip" if found is None else "fail" if lazy else "pass"
            yield Row(f"every={spec.every}", status, None, lazy if found else UNKNOWN)

    def _points(self) -> Iterator[Row]:
        """Whether the points are those of the kind, and the value is that at these points."""
        factory, spec = self._factory, self._spec
        n = max(4, min(64, 2_000_000 // factory.d))
        critic, real, fake = factory.quadratic(), factory.data(n), 3.0 * factory.data(n, low=-0.2)
        run = self._run(critic, real, fake)
        status, text = "pass", ""
        if spec.kind.drawn:
            runs = [run, *(self._run(critic, real, fake) for _ in range(DRAWS // n))]
            status, text = self._drawn_points([x for each in runs for x in each.seen], real, fake)
        elif self._formula is None:
            status, text = "skip", UNKNOWN
        if not text and self._formula is not None:
            right = spec.value(self._formula, run)
            if not is_close(run.value, right, factory.tolerance):
                status, text = "fail", (
                    f"it returned {float(run.value):.4g}, where the formula {spec.kind.where} gives "
                    f"{float(right):.4g}: the gradient is {self._where(run, real, fake)}. "
                    "Differentiate the score by the points that went into the critic."
                )  # fmt: skip
        yield Row("points", status, None, text)

    def _drawn_points(
        self, seen: Sequence[Tensor | str], real: Tensor, fake: Tensor
    ) -> tuple[str, str]:
        """Whether points are drawn as they should be: a status and a text."""
        wrong = [x for x in seen if isinstance(x, str)]
        if wrong or not seen:
            never = "not checked: the critic that was passed is never called."
            return ("fail", wrong[0]) if wrong else ("skip", never)
        stacked = torch.stack([x for x in seen if isinstance(x, Tensor)])
        x, a, b = (t.flatten(-len(self._spec.shape)).double() for t in (stacked, real, fake))
        tiny = 1e-6 if real.dtype == torch.float64 else 1e-3
        if self._spec.kind.drawn == "noise":
            return mistakes.noise_mistake(x, a, b, tiny, self._spec.noise)
        text = mistakes.interpolation_mistake(x, a, b, tiny)
        return ("fail" if text else "pass"), text

    def _where(self, run: Run, real: Tensor, fake: Tensor) -> str:
        """Where the formula gives the value, though it is not meant there."""
        assert self._formula is not None
        sets: dict[str, Points] = {
            "real": [[real]], "fake": [[fake]], "real and fake": [[real, fake]],
            "other points": [[x] for x in run.seen if isinstance(x, Tensor)],
        }  # fmt: skip
        for name, points in () if self._spec.kind.drawn else sets.items():
            value = self._spec.value(self._formula, run._replace(points=points or [[real]]))
            if any(is_close(run.value, k * value, self._factory.tolerance) for k in (1, 2)):
                return f"that at {name}"  # twice, where two sets are meant
        return "not taken by these points"

    def _reaches(self) -> Iterator[Row]:
        """Whether the gradient by any parameter of the critic is nonzero."""
        self._gradients = [gradient_of(run.value, run.critic) for run in self._runs]
        if any(g is not None and bool(g.any()) for g in self._gradients):
            yield Row(REACHES, "pass")
            return
        self._gradients = []
        detached = self._runs[0].detached
        inner = any(d.how == INNER for d in detached)
        fix = CREATE if inner else STAY if detached else FROZEN
        text = f"no gradient reaches the critic's parameters{_detached_by(detached)}. {fix}"
        yield Row(REACHES, "fail", None, text)

    def _derivative(self) -> Iterator[Row]:
        """The gradient by the parameters against that of the formula."""
        pairs = zip(self._gradients, self._runs, strict=False)
        rows = [self._compare(GRADIENT, gradient, run) for gradient, run in pairs]
        skip = Row(GRADIENT, "skip", None, UNREACHED)
        yield max(rows, key=lambda row: row.error or 0.0, default=skip)

    def _at_zero(self) -> Iterator[Row]:
        """The same where one sample's gradient is zero, and stays zero, and those of others are not."""
        critic, x = self._factory.hinge(), self._factory.data(5, low=0.05)
        x[0] = -5.0
        run = self._run(critic, x, x.clone())
        gradient = gradient_of(run.value, critic)
        results = [run.value, *([] if gradient is None else [gradient])]
        if not all(bool(result.isfinite().all()) for result in results):
            yield Row(ZERO, "fail", None, SAFE)
        elif self._gradients:
            yield self._compare(ZERO, gradient, run)
        else:
            yield Row(ZERO, "skip", None, UNREACHED)

    def _compare(self, name: str, gradient: Tensor | None, run: Run) -> Row:
        if self._formula is None:
            return Row(name, "skip", None, UNKNOWN)
        right = gradient_of(self._spec.value(self._formula, run), run.critic)
        assert right is not None
        difference = right if gradient is None else gradient - right
        error = relative_error(difference.norm() + right.norm(), right.norm())
        if error <= self._factory.tolerance:
            return Row(name, "pass", error)
        text = (
            f"it is not the derivative of the value{_detached_by(run.detached)}: a part of it is lost, "
            f"and training follows another penalty. {STAY}"
        )
        return Row(name, "fail", error, text)

    def _under(self, how: "_Circumstance") -> Iterator[Row]:
        """The value in other circumstances, against that of the formula."""
        critic, real = how.factory.network(how.slope), how.factory.data(how.n)
        try:
            with how.context():
                run = self._run(critic, real.clone(), real.clone())
        except Exception as raised:
            text = f"it raises {format_error(raised)}. {how.advice}"
            yield Row(how.name, how.raises, None, text)
            return
        if self._formula is None:
            yield Row(how.name, "skip", None, UNKNOWN)
            return
        points = [[x.clone() for x in xs] for xs in run.points]  # they may be inference tensors
        right = self._spec.value(self._formula, run._replace(points=points))
        error = relative_error(run.value, right)
        text = (
            f"it returned {float(run.value):.4g}, where {float(right):.4g} is right, and did not raise."
            f" {how.advice}"
        )
        good = error <= max(how.factory.tolerance, how.rtol)
        yield Row(how.name, "pass", error) if good else Row(how.name, "fail", error, text)

    def _unchanged(self) -> Iterator[Row]:
        """Whether arguments are as before: flags, gradients, values and modes."""
        critic, real, fake = self._factory.network(), self._factory.data(5), self._factory.data(5)
        given = {"real": real, "fake": fake} | dict(critic.named_parameters())
        before = {name: (x.detach().clone(), x.requires_grad) for name, x in given.items()}
        modes = []
        for name, training in (("train()", True), ("eval()", False)):
            critic.train(training)
            self._run(critic, real, fake)
            modes += [name] if critic.training is not training else []
        changed = {
            "requires_grad": [n for n, x in given.items() if x.requires_grad is not before[n][1]],
            "gradients": [n for n, x in given.items() if x.grad is not None],
            "values": [n for n, x in given.items() if not same(before[n][0], x.detach())],
            "training mode": modes[:1],
        }
        for what, names in changed.items():
            text = CHANGED[what].format(", ".join(names)) if names else ""
            yield Row(f"unchanged: {what}", "fail" if text else "pass", None, text)


def _takes_fake(penalty: Callable[..., Any]) -> bool:
    """Whether a penalty at one set of points is called with both, by its signature."""
    function = penalty.forward if isinstance(penalty, nn.Module) else penalty
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return False
    third = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][2:3]
    return any(p.default is p.empty or "fake" in p.name.lower() for p in third)


def _detached_by(detached: Sequence[DetachedGradient]) -> str:
    places = list(dict.fromkeys(map(str, detached)))
    return f"; the gradient is detached by {'; by '.join(places[:3])}" if places else ""


class _Circumstance(NamedTuple):
    """Circumstances in which the value is checked again, and the status if the penalty raises."""

    name: str
    factory: CriticFactory
    raises: str
    advice: str
    n: int = 5
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    slope: float = 1.0
    rtol: float = 0.0


def _circumstances(factory: CriticFactory) -> list[_Circumstance]:
    narrow, other = (
        replace(factory, dtype=torch.float32),
        replace(factory, column=not factory.column),
    )
    scores = f"scores of shape {'[N]' if factory.column else '[N, 1]'}"
    half = partial(torch.autocast, factory.device.type, dtype=torch.float16)
    return [
        _Circumstance("batch of one", factory, "warn", f"{REDUCED} Or set drop_last.", n=1),
        _Circumstance("in float32", narrow, "fail", NARROW),
        _Circumstance(scores, other, "skip", REDUCED),
        _Circumstance("under no_grad", factory, "warn", ENABLE_GRAD, context=torch.no_grad),
        _Circumstance(
            "under inference_mode", factory, "warn", ENABLE_GRAD, context=torch.inference_mode
        ),
        # with gradients whose squares are too large for half precision; rounding is no failure
        _Circumstance("under autocast", narrow, "warn", DISABLE_AUTOCAST, 5, half, 400.0, 0.1),
    ]
