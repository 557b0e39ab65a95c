"""The table of MeanFlow and flow matching: scores of points by how they were generated."""

from experiments.shared.layout import table
from experiments.shared.quality import PointQuality


def flows_table(rows: dict[str, PointQuality], data: str, parts: str, points: int) -> str:
    """Scores by label.

    Args:
        rows: Scores; those of fresh real points are the last.
        data: The distribution.
        parts: What its parts are called.
        points: Number of points of each row.
    Returns:
        The table.
    """
    cells = [["points by", parts, "rarest", "within 3 sigma", "Wasserstein"]]
    for label, row in rows.items():
        found = str(row.covered), f"{row.rarest:.2f}", f"{row.high:.1%}", f"{row.distance:.3f}"
        cells.append([label, *found])
    return table(
        f"{points} generated points beside as many real ones: {data}",
        cells,
        f"{parts}: of 25, those with a point within three sigma; rarest: how frequent the rarest "
        "of them is (1: as all); Wasserstein: distance to held-out real points, for which other "
        "real points are the floor.",
    )
