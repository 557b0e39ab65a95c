"""At which points a penalty takes its gradient, as the critic recorded them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hoglib.penalties.checking.formulas import Formula, Kind, Table, is_close, relative_error
from hoglib.penalties.checking.subject import Critic, CriticFactory, Outcome, Subject
from hoglib.verification.call import same
from hoglib.verification.report import Row

NAME = "points"
DRAWS = 512  # the number of coefficients that are collected
KOLMOGOROV_LIMIT = 2.7  # of the statistic, which uniform numbers exceed once in a million
INTERPOLATE = (
    "Draw one number for each sample, `e = torch.rand(len(real), *[1] * (real.dim() - 1))`, and take "
    "`e * real + (1 - e) * fake`."
)
ADD_NOISE = "Add noise of its own to each element of real: `real + std * torch.randn_like(real)`."


def row(
    subject: Subject,
    factory: CriticFactory,
    table: Table,
    formula: Formula | None,
    noise: float | None,
) -> Row:
    """Whether the points are those of the kind, and the value is that at these points."""
    n = max(4, min(64, 2_000_000 // factory.d))
    critic = factory.quadratic()
    real, fake = factory.data(n), 3.0 * factory.data(n, low=-0.2)
    outcome = subject(critic, real, fake)
    at = subject.kind.at
    if at in ("real", "fake", "both"):
        return _check_given_points(subject.kind, table, formula, outcome, critic, real, fake)
    found, active = [], outcome.active
    for _ in range(max(1, DRAWS // n)):
        for calls in active:
            rows = penalised_points(calls, real, fake)
            if isinstance(rows, str):
                return Row(NAME, "fail", None, rows)
            found.append(rows)
        active = _call_again(subject, critic, real, fake)
    if not found:
        return Row(NAME, "skip", None, "not checked: the critic that was passed is never called.")
    problem = (_check_interpolated if at == "between" else _check_noisy)(found, real, fake, noise)
    if problem.startswith("warn: "):
        return Row(NAME, "warn", None, problem.removeprefix("warn: "))
    if problem:
        return Row(NAME, "fail", None, problem)
    if formula is not None:
        slopes = [critic.gradient(x) for x in found[: len(outcome.active)]]
        value = table.value(formula, slopes, 1)
        if value is not None and not is_close(outcome.number, value, _tolerance(real)):
            return Row(
                NAME, "fail", relative_error(outcome.number, value),
                f"it returned {outcome.number:.4g}, where the gradients at the points at which the "
                f"critic was called give {value:.4g}: the gradient is not taken by these "
                "points. Differentiate the score by the points that went into the critic.",
            )  # fmt: skip
    return Row(NAME, "pass")


def _call_again(subject: Subject, critic: Critic, real: Tensor, fake: Tensor) -> list[list[Tensor]]:
    """The points of the next calls, with other random numbers than before."""
    found = []
    for _ in range(subject.every):
        critic.calls = []
        subject.once(critic, real, fake)
        found.append(critic.calls)
    return [calls for calls in found if calls]


def _tolerance(x: Tensor) -> float:
    return 1e-5 if x.dtype == torch.float64 else 1e-2


def penalised_points(calls: Sequence[Tensor], real: Tensor, fake: Tensor) -> Tensor | str:
    """The points [N, ...] of one call of the penalty, or an error in their shape."""
    shaped = [x for x in calls if _is_batch(x, real)]
    if len(shaped) < len(calls):
        return (
            f"the critic was called with shape {tuple(calls[-1].shape)}, real has "
            f"{tuple(real.shape)}: a coefficient was broadcast to a wrong shape. {INTERPOLATE}"
        )
    other_inputs = [x for x in shaped if not (same(x, real) or same(x, fake))]
    rows = torch.cat([x.reshape(-1, *real.shape[1:]) for x in other_inputs or shaped])
    if len(rows) < len(real):
        return (
            f"the critic was called with {len(rows)} of {len(real)} samples. Penalise each sample."
        )
    return rows[: len(real)]


def _is_batch(x: Tensor, real: Tensor) -> bool:
    """Whether it is samples like real's; with vmap they may have one more dimension."""
    if x.shape[-real.dim() + 1 :] != real.shape[1:]:
        return False
    return x.dim() == real.dim() or x.numel() in (real.numel(), real[:1].numel())


def _check_given_points(
    kind: Kind, table: Table, formula: Formula | None, outcome: Outcome, critic: Critic,
    real: Tensor, fake: Tensor,
) -> Row:  # fmt: skip
    """For kinds at real or fake points: at which of them the value is taken."""
    if formula is None:
        return Row(NAME, "skip", None, "not checked: no known formula gives the value.")
    seen = [penalised_points(calls, real, fake) for calls in outcome.active]
    where = {"real": [real], "fake": [fake], "both": [real, fake]}
    where["other"] = [x for x in seen if isinstance(x, Tensor)][:1]
    meant, said = where.pop(kind.at), {"other": "other points, neither real nor fake"}
    right = formula._replace(factor=table.right.factor)
    expected = _sum(table, formula, critic, meant)
    if is_close(outcome.number, expected, _tolerance(real)):
        return Row(NAME, "pass")
    for name, points in where.items():
        values = [
            k * _sum(table, f, critic, points) for f in (formula, right) for k in (1, kind.sets)
        ]
        if points and any(is_close(outcome.number, v, _tolerance(real)) for v in values):
            return Row(
                NAME, "fail", None,
                f"the gradient is that at {said.get(name, name)}; {kind.name} is at "
                f"{'real and fake' if kind.at == 'both' else kind.at}. Differentiate the score of "
                f"those points by themselves.",
            )  # fmt: skip
    return Row(
        NAME, "fail", relative_error(outcome.number, expected),
        f"it returned {outcome.number:.4g}, where {kind.formula} is {expected:.4g}, though its value "
        "is right where real and fake are the same: the gradient is taken elsewhere.",
    )  # fmt: skip


def _sum(table: Table, formula: Formula, critic: Critic, points: Sequence[Tensor]) -> float:
    values = [table.value(formula, [critic.gradient(x)], 1) for x in points]
    return sum(v for v in values if v is not None)


def _check_interpolated(
    found: Sequence[Tensor], real: Tensor, fake: Tensor, noise: float | None
) -> str:
    """Where points differ from x = e real + (1 - e) fake, with one uniform e in [0, 1] per sample."""
    line = (real - fake).flatten(1).double()
    es, apart = [], []
    for x in found:
        along = (x - fake).flatten(1).double()
        e = (along * line).sum(1) / line.square().sum(1)
        es.append(e)
        apart.append((along - e.unsqueeze(1) * line).norm(dim=1) / line.norm(dim=1))
    tiny = 1e-6 if real.dtype == torch.float64 else 1e-3
    if max(float(a.max()) for a in apart) > tiny:
        each = torch.cat([((x - fake) / (real - fake)).flatten() for x in found])
        if bool(((each > -tiny) & (each < 1 + tiny)).double().mean() > 0.99):
            return f"the coefficient differs between the elements of one sample. {INTERPOLATE}"
        return (
            "the points are not between the real and the fake sample of the same row: the largest "
            f"distance from the line is {max(float(a.max()) for a in apart):.2g} of theirs. "
            f"{INTERPOLATE}"
        )
    all_e = torch.cat(es)
    within = max(float(e.max() - e.min()) for e in es)
    if within < tiny and float(all_e.max() - all_e.min()) > tiny:
        return f"there is one coefficient for the whole batch, drawn at each call. {INTERPOLATE}"
    if within < tiny:
        where = {0.0: "at fake", 1.0: "at real"}.get(round(float(all_e[0]), 4), "")
        return (
            f"the coefficient is always {float(all_e[0]):.3g}: the gradient is taken "
            f"{where or 'at that point alone'}, not at points drawn between real and fake. "
            f"{INTERPOLATE}"
        )
    if float(all_e.min()) < -tiny or float(all_e.max()) > 1 + tiny:
        return (
            f"coefficients are between {float(all_e.min()):.2g} and {float(all_e.max()):.2g}, beyond "
            f"[0, 1] (`randn` where `rand` is meant?). {INTERPOLATE}"
        )
    return _check_uniform(all_e)


def _check_uniform(e: Tensor) -> str:
    e, n = e.sort().values, len(e)
    steps = torch.arange(1, n + 1, dtype=e.dtype, device=e.device) / n
    distance = float(torch.maximum((steps - e).abs(), (e - steps + 1 / n).abs()).max())
    if distance * n**0.5 > KOLMOGOROV_LIMIT:
        return (
            f"the coefficients are not uniform in [0, 1]: of {n} the mean is {float(e.mean()):.2f} "
            f"(0.5), the standard deviation {float(e.std()):.2f} (0.29). {INTERPOLATE}"
        )
    return ""


def _check_noisy(found: Sequence[Tensor], real: Tensor, fake: Tensor, noise: float | None) -> str:
    """Where points differ from x = real + noise with independent elements."""
    deltas = torch.stack([(x - real).flatten(1).double() for x in found])
    tiny = 1e-9 if real.dtype == torch.float64 else 1e-6
    if float(deltas.abs().max()) < tiny:
        return f"there is no noise: the gradient is taken at real itself. {ADD_NOISE}"
    if (
        not _check_interpolated(found, real, fake, None)
        or float((found[0] - fake).abs().max()) < tiny
    ):
        return f"the points are between real and fake, as in WGAN-GP. {ADD_NOISE}"
    if float((deltas - deltas[:, :1]).abs().max()) < tiny:
        return f"the noise is the same for all samples of the batch. {ADD_NOISE}"
    if deltas.shape[-1] > 1 and float((deltas - deltas[..., :1]).abs().max()) < tiny:
        return f"the noise is one number per sample, the same for all its elements. {ADD_NOISE}"
    size = float(deltas.square().mean().sqrt())
    if noise is not None and abs(size - noise) > 0.1 * noise:
        return f"the noise has a standard deviation of {size:.3g}, not {noise:.3g}. {ADD_NOISE}"
    mean = float(deltas.mean())
    if abs(mean) > 6 * size / deltas.numel() ** 0.5:
        return (
            f"warn: the noise has a mean of {mean:.2g} at a size of {size:.2g}. It is centred in the "
            "paper (Kodali et al., 2017), though not in its published code, where it is drawn by "
            f"`rand`. {ADD_NOISE}"
        )
    return ""
