"""The penalties that can be checked, and the variants in which published code gets each part of
them wrong.

    factor  B_n T(|s(g_n)|)        g_n the gradient of the score of sample n by its point

s is how the score was reduced before it was differentiated, |.| the norm, T the term, B the mean over
samples. One variant of each part is right. A wrong value is compared with the values that one or two
wrong variants give, and explained by the fewest.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hoglib._core import validation
from hoglib.errors import ArgumentValueError


class Kind(NamedTuple):
    """factor mean_n T(|g_n|), at points `at`: T is (|g| - target)^2 or, without a target, |g|^2."""

    name: str
    at: str  # "between" real and fake, "real", "fake", "both", or "noise" real
    target: bool
    factor: float
    formula: str

    @property
    def sets(self) -> int:
        """The number of sets of points that it sums over."""
        return 2 if self.at == "both" else 1


KINDS = {
    kind.name: kind
    for kind in (
        Kind("wgan_gp", "between", True, 1.0, "mean_n (|g_n| - target)^2 between real and fake"),
        Kind("zero_centred", "between", False, 1.0, "mean_n |g_n|^2 between real and fake"),
        Kind("r1", "real", False, 0.5, "mean_n |g_n|^2 / 2 at real"),
        Kind("r2", "fake", False, 0.5, "mean_n |g_n|^2 / 2 at fake"),
        Kind(
            "r1_r2", "both", False, 0.5, "mean_n |g_n|^2 / 2 at real, and the same at fake, summed"
        ),
        Kind("dragan", "noise", True, 1.0, "mean_n (|g_n| - target)^2 at real and noise"),
    )
}


class CheckOptions(NamedTuple):
    """The penalty that is meant, and the options of the check."""

    kind: Kind
    shape: tuple[int, ...]
    every: int
    weight: float
    target: float
    one_sided: bool
    noise: float | None


def check_options(
    kind: str, shape: Sequence[int], every: int, weight: float, target: float | None,
    one_sided: bool, noise: float | None,
) -> CheckOptions:  # fmt: skip
    """The options of `check`, or an error."""
    meant = KINDS[validation.one_of("kind", str(kind).replace("-", "_"), KINDS)]
    validation.flag("one_sided", one_sided)
    if not meant.target and (target is not None or one_sided):
        raise ArgumentValueError(
            f"target, one_sided: expected neither for {kind}, which has no target; got "
            f"target={target}, one_sided={one_sided}. Leave them out, or check another kind."
        )
    if noise is not None and meant.at != "noise":
        raise ArgumentValueError(
            f"noise: expected None for {kind}, got {noise}; only dragan has noise. Leave it out."
        )
    sizes = tuple(validation.at_least("shape", n, 1) for n in shape)
    if not sizes or torch.Size(sizes).numel() < 2:
        raise ArgumentValueError(
            f"shape: expected that of one sample, without the batch, of two elements or more, got "
            f"{tuple(shape)}; a batch of vectors has shape=(d,)."
        )
    return CheckOptions(
        meant, sizes, validation.at_least("every", every, 1), validation.positive("weight", weight),
        1.0 if target is None else validation.number("target", target, minimum=0.0), one_sided,
        None if noise is None else validation.positive("noise", noise),
    )  # fmt: skip


class Variant(NamedTuple):
    """One way to compute a part: the function, and if it is wrong the mistake and its fix."""

    of: Callable[..., Any]
    wrong: str = ""
    fix: str = ""
    lazy: bool = False


def _flat(g: Tensor) -> Tensor:
    return torch.linalg.vector_norm(g.flatten(1), dim=1)


def _over(*dims: int) -> Callable[[Tensor], Tensor | None]:
    """The norm over these dimensions alone; None where that is the norm of a sample, or no norm."""

    def norm(g: Tensor) -> Tensor | None:
        own = {d % g.dim() for d in dims if -g.dim() <= d < g.dim()}
        if len(own) < len(dims) or own == set(range(1, g.dim())):
            return None
        return torch.linalg.vector_norm(g, dim=dims)

    return norm


A_SAMPLE = "Take it over all elements of a sample: `g.flatten(1).norm(2, dim=1)`."

# B(norms, T): how terms become one number
REDUCTIONS = (
    Variant(lambda n, term: term(n).mean()),
    Variant(
        lambda n, term: term(n).sum(),
        "the terms are summed over the batch where their mean is meant, so the weight of the penalty "
        "grows with the batch",
        "End with `.mean()` over samples.",
    ),
    Variant(
        lambda n, term: term(n.mean()),
        "the norms are averaged over the batch before the term, so that slopes that are too steep "
        "compensate for slopes that are too flat",
        "First the term of each sample, then the mean: `((norm - target) ** 2).mean()`.",
    ),
    Variant(
        lambda n, term: term(n).max(),
        "the largest term of the batch is taken, not the mean",
        "End with `.mean()` over samples.",
    ),
)

# s(g): what was differentiated
SCORES = (
    Variant(lambda g: g),
    Variant(
        lambda g: g / len(g),
        "the gradient is that of the mean score: each sample's is divided by the size of the batch",
        "Differentiate the sum, `torch.autograd.grad(score.sum(), x, create_graph=True)`; "
        "the mean over samples comes last.",
    ),
)

# |g|: over what, and which
NORMS = (
    Variant(_flat),
    Variant(
        _over(1),
        "the norm is over dim=1 alone, of images the channels, and not over a whole sample",
        A_SAMPLE,
    ),
    Variant(_over(-1), "the norm is over the last dimension alone", A_SAMPLE),
    Variant(
        _over(-2, -1),
        "the norm is over the last two dimensions alone, one for each channel",
        A_SAMPLE,
    ),
    Variant(_over(1, 2), "the norm is over dimensions 1 and 2 alone", A_SAMPLE),
    Variant(_over(0), "the norm is over dim=0, the batch, and not over a sample", A_SAMPLE),
    Variant(
        lambda g: torch.linalg.vector_norm(g),
        "it is one norm for the whole batch, so that all samples share one slope",
        A_SAMPLE,
    ),
    Variant(
        lambda g: g.flatten(1).square().mean(1).sqrt(),
        "the squares are averaged over a sample's elements where they are summed in a norm, so the "
        "penalty shrinks as samples grow",
        "Sum over a sample's elements, `g.flatten(1).square().sum(1)`; the mean is over samples.",
    ),
    Variant(
        lambda g: g.abs(),
        "there is no norm: the term is that of each element of the gradient",
        A_SAMPLE,
    ),
    Variant(
        lambda g: g.flatten(1).abs().sum(1),
        "the norm is the sum of absolute values",
        "Take the Euclidean one, `norm(2, dim=1)`.",
    ),
    Variant(
        lambda g: g.flatten(1).abs().amax(1),
        "the norm is the largest absolute value",
        "Take the Euclidean one, `norm(2, dim=1)`.",
    ),
)


def terms(squared: bool, one_sided: bool) -> tuple[Variant, ...]:
    """T(norm, target), the right one first."""
    both = Variant(
        lambda n, t: (n - t) ** 2,
        "slopes below the target are penalised too, but one_sided was asked for",
        "Clamp first: `(norm - target).clamp(min=0) ** 2`.",
    )
    above = Variant(
        lambda n, t: (n - t).clamp(min=0) ** 2,
        "only slopes above the target are penalised: it is the one-sided penalty",
        "Leave the clamp out, or check with one_sided=True if that is meant.",
    )
    root = Variant(
        lambda n, t: n,
        "the norm is not squared",
        "Square it: `g.flatten(1).square().sum(1)`.",
    )
    if squared:
        return (
            Variant(lambda n, t: n**2),
            root,
            Variant(lambda n, t: n**4, "the norm is squared twice", "Square it once."),
            Variant(
                lambda n, t: (n - 1) ** 2,
                "1 is subtracted from the norm, as in the penalty of WGAN-GP",
                "Leave it out: this penalty pulls the gradient to zero.",
            ),
        )
    right, other = (above, both) if one_sided else (both, above)
    subtract = "Subtract the target: `(norm - target) ** 2`."
    return (
        right._replace(wrong="", fix=""),
        other,
        Variant(lambda n, t: n**2, "the target is not subtracted from the norm", subtract),
        Variant(
            lambda n, t: (n**2 - t) ** 2,
            "the root is missing: the target is subtracted from the square of the norm",
            "Take the root before the target is subtracted.",
        ),
        Variant(
            lambda n, t: n - t,
            "the square is missing: slopes below the target are rewarded",
            "Square the difference: `(norm - target) ** 2`.",
        ),
        Variant(
            lambda n, t: (n - t).abs(),
            "the absolute difference stands where its square is meant",
            "Square the difference: `(norm - target) ** 2`.",
        ),
        Variant(
            lambda n, t: (n - t).clamp(min=0),
            "the square is missing",
            "Square it: `(norm - target).clamp(min=0) ** 2`.",
        ),
        Variant(
            lambda n, t: (t - n).clamp(min=0) ** 2,
            "the sign is turned: only slopes below the target are penalised",
            "Clamp `norm - target`, not `target - norm`.",
        ),
        Variant(
            lambda n, t: (n - 1) ** 2,
            "the target is 1",
            "Subtract the target that was asked for, or check with target=1.",
        ),
        root._replace(wrong="the norm stands by itself: target and square are missing", fix=subtract),
    )  # fmt: skip


def factors(half: bool, sets: int, weight: float, every: int) -> Iterator[Variant]:
    """Constants before the penalty, the right one, 1, first."""
    yield Variant(lambda: 1.0)
    if every > 1:
        often = f"Multiply by {every} where it is added, or return {every} times it then."
        yield Variant(
            lambda: 1.0 / every,
            f"it is returned at every {every}-th call, but not {every} times: the weight of a lazy "
            "penalty is forgotten",
            often, lazy=True,
        )  # fmt: skip
        yield Variant(
            lambda: float(every),
            f"it is multiplied by {every} at each call, though it is not left out in between",
            f"Return zero at all but every {every}-th call.",
            lazy=True,
        )
    if weight != 1.0:
        yield Variant(
            lambda: 1.0 / weight,
            f"the weight of {weight:g} is not in it",
            "Multiply by it, or check without weight=.",
        )
    if half:
        yield Variant(
            lambda: 2.0,
            "the half is missing: with it the weight is the gamma of the papers",
            "Halve it, or halve the weight.",
        )
    if sets == 2:
        yield Variant(
            lambda: 0.5,
            "it is half of the sum: one of the two penalties, or their mean",
            "Sum the penalty at real and the one at fake.",
        )
    else:
        yield Variant(
            lambda: 0.5,
            "it is halved" + (" twice" if half else "; this penalty has no half"),
            "Leave that half out, or double the weight.",
        )


class Case(NamedTuple):
    """A value of the penalty for known gradients: one tensor [N, ...] for each call of the critic."""

    gradients: list[Tensor]
    sets: int
    value: float


class Formula(NamedTuple):
    """One variant for each part."""

    reduction: Variant
    score: Variant
    norm: Variant
    term: Variant
    factor: Variant

    @property
    def mistakes(self) -> list[Variant]:
        return [variant for variant in self if variant.wrong]

    def of(self, g: Tensor, target: float) -> float | None:
        """Its value for gradients [N, ...]; None if a part does not apply to that shape."""
        norms = self.norm.of(self.score.of(g))
        if norms is None:
            return None
        mean = self.reduction.of(norms, lambda n: self.term.of(n, target))
        return float(self.factor.of()) * float(mean)

    def at(self, case: Case, target: float) -> float | None:
        values = [self.of(g, target) for g in case.gradients]
        known = [v for v in values if v is not None]
        return case.sets * sum(known) / len(known) if known and known == values else None


class Table(NamedTuple):
    """All variants of each part of one penalty, the right ones first, and its target."""

    parts: tuple[tuple[Variant, ...], ...]
    factor: float
    weight: float
    target: float

    @property
    def right(self) -> Formula:
        return Formula(*(part[0] for part in self.parts))

    def value(self, formula: Formula, gradients: Sequence[Tensor], sets: int) -> float | None:
        found = formula.at(Case(list(gradients), sets, 0.0), self.target)
        return None if found is None else self.weight * self.factor * found

    def explain(self, cases: Sequence[Case], rtol: float) -> Formula | None:
        """The formula with the fewest mistakes that gives all the values, at most two; None if
        there is none."""
        found = self._fitting(self._deviating(0), cases, rtol)
        found = found or self._fitting(self._deviating(1), cases, rtol)
        found = found or self._times_constant(cases, rtol)
        return found or self._fitting(self._deviating(2), cases, rtol)

    def _deviating(self, count: int) -> Iterator[Formula]:
        """The formulas with that number of wrong parts."""
        for which in combinations(range(len(self.parts)), count):
            wrong = [self.parts[i][1:] if i in which else self.parts[i][:1] for i in range(5)]
            yield from (Formula(*chosen) for chosen in product(*wrong))

    def _fitting(
        self, formulas: Iterator[Formula], cases: Sequence[Case], rtol: float
    ) -> Formula | None:
        return next((f for f in formulas if self._fits(f, cases, rtol)), None)

    def _fits(self, formula: Formula, cases: Sequence[Case], rtol: float) -> bool:
        for case in cases:
            value = self.value(formula, case.gradients, case.sets)
            if value is None or not is_close(case.value, value, rtol):
                return False
        return True

    def _times_constant(self, cases: Sequence[Case], rtol: float) -> Formula | None:
        right = [self.value(self.right, case.gradients, case.sets) for case in cases]
        ratios = [case.value / r for case, r in zip(cases, right, strict=True) if r]
        c = ratios[0] if ratios else 0.0
        variant = Variant(
            lambda: c,
            f"it is {c:.4g} times the penalty",
            f"If that is its weight, check with weight={c * self.weight:.4g}; otherwise divide by it."
            if c > 0
            else "Change its sign: a penalty is added to the loss that is minimised."
            if c < 0
            else "Nothing but zero was returned; if it is lazy, pass every=.",
        )
        formula = self.right._replace(factor=variant)
        return formula if self._fits(formula, cases, rtol) else None


def table(kind: Kind, *, target: float, one_sided: bool, weight: float, every: int) -> Table:
    """The variants of each part of a kind of penalty times a weight."""
    constants = tuple(factors(kind.factor != 1.0, kind.sets, weight, every))
    of_norms = terms(not kind.target, one_sided)
    return Table((REDUCTIONS, SCORES, NORMS, of_norms, constants), kind.factor, weight, target)


def is_close(a: float, b: float, rtol: float) -> bool:
    return relative_error(a, b) <= rtol  # False for NaN


def relative_error(a: float, b: float) -> float:
    """|a - b| / |b|"""
    return abs(a - b) / max(abs(b), 1e-3)
