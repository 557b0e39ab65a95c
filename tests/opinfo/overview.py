"""The table of docs/ops.md: what the catalogue says of each op, which the tests show to be so.

python -m tests.opinfo.overview
"""

from tests.opinfo.catalogue import CATALOGUE
from tests.opinfo.op_info import OpInfo

HEAD = ("op", "theme", "y =", "orders", "compile", "dtypes")


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


def markdown() -> str:
    escaped = [[cell.replace("|", r"\|") for cell in row(info)] for info in CATALOGUE]
    lines = [list(HEAD), ["---"] * len(HEAD), *escaped]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


if __name__ == "__main__":
    print(markdown())
