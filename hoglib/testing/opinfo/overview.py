"""What the catalogue says of each op: the table of `hoglib ops`; the tests show that it is so."""

from hoglib.testing.opinfo.catalogue import CATALOGUE
from hoglib.testing.opinfo.op_info import OpInfo

HEAD = ("op", "theme", "y =", "orders", "compile", "dtypes")


def rows() -> list[tuple[str, ...]]:
    """The table."""
    return [row(info) for info in CATALOGUE]


def row(info: OpInfo) -> tuple[str, ...]:
    """An op's line of the table."""
    limit = "any" if info.max_order is None else str(info.max_order)
    return (
        info.name,
        info.theme,
        info.formula,
        limit + ("" if info.smooth else ", piecewise"),
        "no" if "compile" in info.skips else "yes",
        ", ".join(str(dtype).removeprefix("torch.") for dtype in info.dtypes),
    )


def text(table: list[tuple[str, ...]]) -> str:
    """The table in aligned columns, for a terminal or a log."""
    lines = [HEAD, *table]
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEAD))]
    ruled = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
    return "\n".join([ruled[0], "-" * len(ruled[0]), *ruled[1:]])


def markdown(table: list[tuple[str, ...]]) -> str:
    """The table for a page of the docs."""
    escaped = [[cell.replace("|", r"\|") for cell in line] for line in table]
    lines = [list(HEAD), ["---"] * len(HEAD), *escaped]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
