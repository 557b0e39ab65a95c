"""Tables of generators, one row for each penalty and loss: of points in the plane, and of digits."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from experiments.shared.layout import newest_of_each, table


class PointsResult(NamedTuple):
    """A generator of points: how it was trained, and its scores; the fields of summary.json."""

    penalty: str
    loss: str
    data: str
    steps: int
    covered: int
    high: float
    rarest: float
    distance: float


def points_table(
    own: PointsResult, others: Sequence[PointsResult], real: PointsResult, parts: str, points: int
) -> str:
    """A run, the newest run of each other penalty and loss on the same data, and real points.

    Args:
        own: The run.
        others: Other runs, the newest first.
        real: Scores of real points.
        parts: What the parts of the distribution are called.
        points: Number of generated points.
    Returns:
        The table.
    """
    rows = [["penalty", "loss", "steps", parts, "rarest", "within 3s", "distance", ""]]
    for r in [*sorted(_on_same_data(own, others), key=lambda r: r.distance), real]:
        scores = str(r.covered), f"{r.rarest:.2f}", f"{r.high:.1%}", f"{r.distance:.3f}"
        rows.append([r.penalty, r.loss, str(r.steps or ""), *scores, "<-" if r is own else ""])
    return table(
        f"{points} generated points beside as many real ones: {own.data}",
        rows,
        f"{parts}: of 25, those with a point within three sigma (3s); rarest: how frequent the "
        "rarest of them is (1: as all); distance: Wasserstein distance to held-out real points, for "
        "which real points are the floor; <-: this run.",
        left=2,
    )


class DigitsResult(NamedTuple):
    """A generator of digits: how it was trained, and its scores; the fields of summary.json."""

    penalty: str
    loss: str
    data: str
    steps: int
    frechet: float
    confident: float
    classes: int
    entropy: float


def digits_table(
    own: DigitsResult,
    others: Sequence[DigitsResult],
    real: DigitsResult,
    shares: Tensor,
    images: int,
) -> str:
    """A run, the newest run of each other penalty and loss, and real training digits.

    Args:
        own: The run.
        others: Other runs, the newest first.
        real: Scores of real training digits.
        shares: Frequencies of the classes among this run's digits [10].
        images: Number of generated digits.
    Returns:
        The table.
    """
    rows = [["penalty", "loss", "steps", "Frechet", "confident", "classes", "entropy", ""]]
    for r in [*sorted(_on_same_data(own, others), key=lambda r: r.frechet), real]:
        scores = f"{r.frechet:.3f}", f"{r.confident:.1%}", str(r.classes), f"{r.entropy:.3f}"
        rows.append([r.penalty, r.loss, str(r.steps or ""), *scores, "<-" if r is own else ""])
    listed = ", ".join(f"{digit}: {share:.1%}" for digit, share in enumerate(shares.tolist()))
    return table(
        f"{images} generated digits beside as many held-out real ones: {own.data}",
        rows,
        f"Of this run's (<-): {listed}",
        "Frechet: distance of a small classifier's features to those of held-out digits, for which "
        "real training digits are the floor; confident: digits that it gives a class a probability "
        "over 0.9; classes, entropy: of these, how many of the 10 there are, and 1 if all are equally "
        "frequent.",
        left=2,
    )


def _on_same_data(own: Any, others: Sequence[Any]) -> list[Any]:
    """A row, and the newest of each other penalty and loss on the same data."""
    rows = [own, *(other for other in others if other.data == own.data)]
    return newest_of_each(rows, lambda r: (r.penalty, r.loss))
