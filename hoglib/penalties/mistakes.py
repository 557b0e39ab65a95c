"""The penalties that `check` knows, and the mistakes that published code makes in them.

    weight mean_n term(|g_n|, target)        g_n the gradient of the score of sample n by its point

The right value is that of hoglib's own penalty. A known mistake replaces one part (the norm, the term,
the mean), or multiplies by a constant; a wrong value is explained by the first that gives it. Points
are wrong in the ways of `interpolation_mistake` and `noise_mistake`.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm

from hoglib._core import validation
from hoglib._core.detachment import DetachedGradient
from hoglib.errors import ArgumentValueError
from hoglib.penalties import critics

Points = Sequence[Sequence[Tensor]]  # for each call, the sets of points whose penalties are summed


class Kind(NamedTuple):
    """A penalty: the sets of samples that it is given, its term, and how its points are drawn."""

    sets: tuple[str, ...]
    term: str
    where: str  # its points, in words
    drawn: Literal["interpolation", "noise"] | None = None  # None: its points are its samples
    has_target: bool = False
    factor: float = 1.0


KINDS = {
    "wgan_gp": Kind(
        ("real", "fake"), "(|g_n| - target)^2", "between real and fake", "interpolation", True
    ),
    "zero_centred": Kind(("real", "fake"), "|g_n|^2", "between real and fake", "interpolation"),
    "r1": Kind(("real",), "|g_n|^2 / 2", "at real", factor=0.5),
    "r2": Kind(("fake",), "|g_n|^2 / 2", "at fake", factor=0.5),
    "r1_r2": Kind(("real", "fake"), "|g_n|^2 / 2", "at real and fake, summed,", factor=0.5),
    "dragan": Kind(("real",), "(|g_n| - target)^2", "at real and noise", "noise", True),
}


class Mistake(NamedTuple):
    """Another way to compute a part: norm(g), term(norm, target) or mean(norm, term)."""

    part: str
    of: Callable[..., Any]
    wrong: str

    @property
    def text(self) -> str:
        return f"{self.wrong}. {FIXES[self.part]}"


def _over(*dims: int) -> Callable[[Tensor], Tensor]:
    return lambda g: vector_norm(g, dim=dims)


def _flat(g: Tensor) -> Tensor:
    return vector_norm(g.flatten(1), dim=1)


FIXES = {
    "mean": "First the term of each sample, then `.mean()` over samples.",
    "norm": "Differentiate `score.sum()`, and take the norm over all elements of a sample: "
    "`g.flatten(1).norm(2, dim=1)`.",
    "term": "It is `(norm - target) ** 2`, one-sided `(norm - target).clamp(min=0) ** 2`, and without "
    "a target `norm ** 2`.",
}
# In this order: of two that are the same for a kind, or a shape, the first is named.
MISTAKES = (
    Mistake("mean", lambda n, term: term(n).sum(),
            "The terms are summed over the batch, so that the weight grows with it"),
    Mistake("mean", lambda n, term: term(n.mean()),
            "The norms are averaged over the batch before the term: steep slopes compensate flat ones"),
    Mistake("mean", lambda n, term: term(n).max(), "The largest term of the batch is taken"),
    Mistake("norm", lambda g: _flat(g) / len(g),
            "The gradient is that of the mean score, divided by the size of the batch"),
    Mistake("norm", vector_norm, "It is one norm for the whole batch"),
    Mistake("norm", _over(1), "The norm is over dim=1 alone, of images the channels"),
    Mistake("norm", _over(-1), "The norm is over the last dimension alone"),
    Mistake("norm", _over(-2, -1), "The norm is over the last two dimensions alone"),
    Mistake("norm", _over(1, 2), "The norm is over dimensions 1 and 2 alone"),
    Mistake("norm", _over(0), "The norm is over dim=0, the batch"),
    Mistake("norm", lambda g: _flat(g) / g[0].numel() ** 0.5,
            "The squares are averaged over a sample's elements: the penalty shrinks as samples grow"),
    Mistake("norm", torch.abs, "There is no norm: the term is that of each element"),
    Mistake("norm", lambda g: vector_norm(g.flatten(1), 1, dim=1),
            "The norm is the sum of absolute values"),
    Mistake("norm", lambda g: g.flatten(1).abs().amax(1), "The norm is the largest absolute value"),
    Mistake("term", lambda n, t: (n - t) ** 2, "Slopes below the target are penalised too"),
    Mistake("term", lambda n, t: (n - t).clamp(min=0) ** 2,
            "It is one-sided: only slopes above the target are penalised"),
    Mistake("term", lambda n, t: n**2, "The target is not subtracted from the norm"),
    Mistake("term", lambda n, t: n**4, "The norm is squared twice"),
    Mistake("term", lambda n, t: (n**2 - t) ** 2,
            "The root is missing: the target is subtracted from the square of the norm"),
    Mistake("term", lambda n, t: n - t, "The norm is not squared: the square is missing"),
    Mistake("term", lambda n, t: (n - t).abs(),
            "The absolute difference stands where its square is meant"),
    Mistake("term", lambda n, t: (n - t).clamp(min=0), "The square is missing"),
    Mistake("term", lambda n, t: (t - n).clamp(min=0) ** 2,
            "The sign is turned: only slopes below the target are penalised"),
    Mistake("term", lambda n, t: (n - 1) ** 2, "1 is subtracted from the norm: the target is 1"),
    Mistake("term", lambda n, t: n, "The norm stands by itself: target and square are missing"),
)  # fmt: skip


class Formula(NamedTuple):
    """What a penalty computes: the right formula, but for one mistake, and a constant and its text."""

    mistake: Mistake | None = None
    constant: float = 1.0
    text: str = ""
    lazy: bool = False  # whether the constant is wrong because of the schedule


class Run(NamedTuple):
    """A value of the penalty that is checked, and the points that it is meant to be taken at; for each
    call the points that the critic saw, or what is wrong with their shape."""

    critic: nn.Module
    points: Points
    value: Tensor
    seen: list[Tensor | str]
    detached: list[DetachedGradient]


@final
@dataclass(frozen=True)
class PenaltySpec:
    """The penalty that is meant: its kind and options."""

    kind: Kind
    shape: tuple[int, ...]
    every: int
    weight: float
    target: float
    one_sided: bool
    noise: float | None

    def value(self, formula: Formula, run: Run) -> Tensor:
        """The value by a formula at the points of a run, with a graph: the mean over calls."""
        critic, mistake = run.critic, formula.mistake
        values = [
            sum(self._wrong(mistake, critic, x) if mistake else self._right(critic, x) for x in xs)
            for xs in run.points
        ]
        return formula.constant * self.weight * self.kind.factor * sum(values) / len(values)

    def _right(self, critic: nn.Module, x: Tensor) -> Any:
        """hoglib's own penalty; it interpolates between x and x."""
        if not self.kind.has_target:
            return 2 * critics.r1(critic, x)
        return critics.wgan_gp(critic, x, x, target=self.target, one_sided=self.one_sided)

    def _wrong(self, mistake: Mistake, critic: nn.Module, x: Tensor) -> Any:
        x = x.detach().requires_grad_()
        (g,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
        right: dict[str, Callable[..., Any]] = {
            "norm": _flat, "mean": lambda n, term: term(n).mean(),
            "term": lambda n, t: ((n - t).clamp(min=0) if self.one_sided else n - t) ** 2,
        }  # fmt: skip
        part = right | {mistake.part: mistake.of}
        return part["mean"](part["norm"](g), lambda n: part["term"](n, self.target))

    def explain(self, runs: Sequence[Run], rtol: float) -> Formula | None:
        """The formula that gives all the values: with no mistake, one, or one and a constant."""
        known = []
        for mistake in (None, *MISTAKES):
            with suppress(IndexError, RuntimeError):  # a norm over dimensions that this shape lacks
                found = [float(self.value(Formula(mistake), run)) for run in runs]
                if _all_close(runs, found, rtol) and any(found):
                    return Formula(mistake)
                known.append((mistake, found))
        for mistake, found in known:
            c = next((float(run.value) / v for run, v in zip(runs, found, strict=True) if v), 0.0)
            if any(found) and _all_close(runs, [c * value for value in found], rtol):
                texts = (
                    (text, lazy) for k, text, lazy in self._constants() if is_close(c, k, rtol)
                )
                return Formula(mistake, c, *next(texts, (self._times(c), False)))
        return None

    def _constants(self) -> list[tuple[float, str, bool]]:
        """Known constants, their texts, and whether the schedule is to blame."""
        k, half = self.every, "It is halved twice. Halve it once."
        if len(self.kind.sets) == 2 and self.kind.drawn is None:
            half = "It is half of the sum: one of the two penalties, or their mean."
        elif self.kind.factor == 1.0:
            half = "It is halved; this penalty has no half. Leave it out."
        return [
            (1 / k, f"It is returned at every {k}-th call, but not {k} times: the weight is forgotten. "
                    f"Return {k} times it then.", True),
            (k, f"It is multiplied by {k} at each call. Return zero in between.", True),
            (1 / self.weight, f"The weight of {self.weight:g} is not in it. Multiply by it.", False),
            (1 / self.kind.factor, "The half is missing: with it the weight is gamma.", False),
            (0.5, half, False),
        ]  # fmt: skip

    def _times(self, c: float) -> str:
        if c == 0:
            return "Nothing but zero was returned; if it is lazy, pass every=."
        fix = f"If that is its weight, check with weight={c * self.weight:.4g}; else divide by it."
        return f"It is {c:.4g} times the penalty. {fix if c > 0 else 'Change its sign.'}"


def check_options(
    kind: str, shape: Sequence[int], every: int, weight: float, target: float | None,
    one_sided: bool, noise: float | None,
) -> PenaltySpec:  # fmt: skip
    """The options of `check`, or an error."""
    known = KINDS[validation.one_of("kind", str(kind).replace("-", "_"), KINDS)]
    validation.flag("one_sided", one_sided)
    if not known.has_target and (target is not None or one_sided):
        raise ArgumentValueError(
            f"target, one_sided: expected neither for {kind}, which has no target; got "
            f"target={target}, one_sided={one_sided}. Leave them out, or check another kind."
        )
    if noise is not None and known.drawn != "noise":
        raise ArgumentValueError(
            f"noise: expected None for {kind}, got {noise}; only dragan has noise. Leave it out."
        )
    sizes = tuple(validation.at_least("shape", n, 1) for n in shape)
    if not sizes or torch.Size(sizes).numel() < 2:
        raise ArgumentValueError(
            f"shape: expected that of one sample, without the batch, of two elements or more, got "
            f"{tuple(shape)}; a batch of vectors has shape=(d,)."
        )
    if target is None:
        target = 1.0 if known.has_target else 0.0
    return PenaltySpec(
        known, sizes, validation.at_least("every", every, 1), validation.positive("weight", weight),
        validation.number("target", target, minimum=0.0), one_sided,
        None if noise is None else validation.positive("noise", noise),
    )  # fmt: skip


def relative_error(a: Tensor | float, b: Tensor | float) -> float:
    """|a - b| / |b|; infinity for NaN."""
    a, b = float(a), float(b)
    error = abs(a - b) / max(abs(b), 1e-3)
    return error if error == error else float("inf")


def is_close(a: Tensor | float, b: Tensor | float, rtol: float) -> bool:
    """Whether a is b, relatively; False for NaN."""
    return relative_error(a, b) <= rtol


def _all_close(runs: Sequence[Run], values: Sequence[float], rtol: float) -> bool:
    return all(is_close(run.value, v, rtol) for run, v in zip(runs, values, strict=True))


INTERPOLATE = (
    "Draw one number for each sample, `e = torch.rand(len(real), *[1] * (real.dim() - 1))`, and take "
    "`e * real + (1 - e) * fake`."
)
ADD_NOISE = "Add noise of its own to each element of real: `real + std * torch.randn_like(real)`."
KOLMOGOROV_LIMIT = 2.7  # of the statistic, which uniform numbers exceed once in a million


def interpolation_mistake(x: Tensor, real: Tensor, fake: Tensor, tiny: float) -> str:
    """How points differ from e real + (1 - e) fake, with one uniform e in [0, 1] per sample, or "".

    Shape:
        - x: [calls, N, d]; real, fake: [N, d]
    """
    line, along = real - fake, x - fake
    e = (along * line).sum(-1) / line.square().sum(-1)
    apart = float(((along - e.unsqueeze(-1) * line).norm(dim=-1) / line.norm(dim=-1)).max())
    inside = float(((along / line - 0.5).abs() < 0.5 + tiny).double().mean())
    low, high, n = float(e.min()), float(e.max()), e.numel()
    fixed = float((e.amax(1) - e.amin(1)).max()) < tiny
    where = {0.0: "at fake", 1.0: "at real"}.get(round(low, 4), "at that point alone")
    above = torch.arange(1, n + 1, device=e.device) / n - e.flatten().sort().values
    distance = float(torch.maximum(above.abs(), (1 / n - above).abs()).max())
    mistakes = (
        (apart > tiny and inside > 0.99,
         "the coefficient differs between the elements of one sample"),
        (apart > tiny, "the points are not between the real and the fake sample of the same row"),
        (fixed and high - low > tiny, "there is one coefficient for the whole batch"),
        (fixed, f"the coefficient is always {low:.3g}: the gradient is taken {where}"),
        (low < -tiny or high > 1 + tiny,
         f"coefficients are between {low:.2g} and {high:.2g}, beyond [0, 1] (`randn` for `rand`?)"),
        (distance * n**0.5 > KOLMOGOROV_LIMIT,
         f"the coefficients are not uniform in [0, 1]: their mean is {float(e.mean()):.2f} (0.5), "
         f"their standard deviation {float(e.std()):.2f} (0.29)"),
    )  # fmt: skip
    return next((f"{text}. {INTERPOLATE}" for wrong, text in mistakes if wrong), "")


def noise_mistake(
    x: Tensor, real: Tensor, fake: Tensor, tiny: float, noise: float | None
) -> tuple[str, str]:
    """How points differ from real and noise with independent elements: a status and a text.

    Shape:
        - x: [calls, N, d]; real, fake: [N, d]
    """
    delta = x - real
    size, mean = float(delta.square().mean().sqrt()), float(delta.mean())
    mistakes = (
        (size < tiny, "there is no noise: the gradient is taken at real itself"),
        (float((x[0] - fake).abs().max()) < tiny
         or not interpolation_mistake(x, real, fake, tiny),
         "the points are between real and fake, as in WGAN-GP"),
        (float((delta - delta[:, :1]).abs().max()) < tiny,
         "the noise is the same for all samples of the batch"),
        (float((delta - delta[..., :1]).abs().max()) < tiny,
         "the noise is one number per sample, the same for all its elements"),
        (noise is not None and abs(size - noise) > 0.1 * noise,
         f"the noise has a standard deviation of {size:.3g}, not {noise}"),
    )  # fmt: skip
    for wrong, text in mistakes:
        if wrong:
            return "fail", f"{text}. {ADD_NOISE}"
    if abs(mean) > 6 * size / delta.numel() ** 0.5:
        return "warn", (
            f"the noise has a mean of {mean:.2g} at a size of {size:.2g}. It is centred in the paper "
            f"(Kodali et al., 2017), though not in its published code, by `rand`. {ADD_NOISE}"
        )
    return "pass", ""
