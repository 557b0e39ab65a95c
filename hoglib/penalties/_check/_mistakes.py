"""Which mistakes give the values that a penalty returned: the fewest, one or two at once."""

from collections.abc import Iterator, Sequence
from itertools import combinations, product
from typing import NamedTuple

from torch import Tensor

from hoglib.penalties._check import _ways as ways
from hoglib.penalties._check._kinds import Kind
from hoglib.penalties._check._ways import Way


class Case(NamedTuple):
    """What a penalty returned for known gradients: one tensor [N, ...] for each call that counted."""

    gradients: list[Tensor]
    sets: int
    value: float


class Formula(NamedTuple):
    """One way for each part."""

    reduction: Way
    score: Way
    norm: Way
    term: Way
    factor: Way

    @property
    def mistakes(self) -> list[Way]:
        return [way for way in self if way.wrong]

    def of(self, g: Tensor, target: float) -> float | None:
        """What it gives for gradients [N, ...]; None where a part does not apply to that shape."""
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
    """All ways of each part of one penalty, the right ones first, and its target."""

    parts: tuple[tuple[Way, ...], ...]
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
        """The fewest mistakes that give all the values, at most two; None if none do."""
        found = self._fitting(self._deviating(0), cases, rtol)
        found = found or self._fitting(self._deviating(1), cases, rtol)
        found = found or self._times_constant(cases, rtol)
        return found or self._fitting(self._deviating(2), cases, rtol)

    def _deviating(self, count: int) -> Iterator[Formula]:
        """Formulas with so many parts wrong."""
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
            if value is None or not close(case.value, value, rtol):
                return False
        return True

    def _times_constant(self, cases: Sequence[Case], rtol: float) -> Formula | None:
        right = [self.value(self.right, case.gradients, case.sets) for case in cases]
        ratios = [case.value / r for case, r in zip(cases, right, strict=True) if r]
        c = ratios[0] if ratios else 0.0
        way = Way(
            lambda: c,
            f"it is {c:.4g} times the penalty",
            f"If that is its weight, check with weight={c * self.weight:.4g}; otherwise divide by it."
            if c > 0
            else "A penalty is added to what is minimised."
            if c < 0
            else "Nothing but zero was returned; if it is lazy, say so with every=.",
        )
        formula = self.right._replace(factor=way)
        return formula if self._fits(formula, cases, rtol) else None


def table(kind: Kind, *, target: float, one_sided: bool, weight: float, every: int) -> Table:
    """Of a kind of penalty times a weight."""
    constants = tuple(ways.factors(kind.factor != 1.0, kind.sets, weight, every))
    of_norms = ways.terms(not kind.target, one_sided)
    return Table(
        (ways.REDUCTIONS, ways.SCORES, ways.NORMS, of_norms, constants), kind.factor, weight, target
    )


def close(a: float, b: float, rtol: float) -> bool:
    return off(a, b) <= rtol  # False for NaN


def off(a: float, b: float) -> float:
    """How far a is from b, of b."""
    return abs(a - b) / max(abs(b), 1e-3)
