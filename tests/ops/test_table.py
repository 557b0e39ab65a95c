"""`hoglib ops` and the page that is made from it: what the docstrings say, and what the matrix shows."""

from pathlib import Path

import pytest

from hoglib import ops
from hoglib.cli.commands import op_markdown, op_rows
from hoglib.cli.main import main
from tests.ops.opinfo import CATALOGUE
from tests.rows import rows

ROOT = Path(__file__).parents[2]
ROWS = {name: (equation, orders) for name, equation, orders in op_rows()}
SMOOTH = [
    info.name
    for info in CATALOGUE
    if info.smooth and not info.surrogate and info.max_order is None and hasattr(ops, info.name)
]


def test_a_row_is_the_first_line_of_the_equations_and_the_orders() -> None:
    assert ROWS["square"] == ("y = x^2; dy/dx = 2 x", "any")
    assert ROWS["relu"] == ("y = max(x, 0); dy/dx = 1 where y > 0, else 0", "first")
    assert ROWS["stop_gradient"] == ("y = x; g -> none", "none")
    assert ROWS["external"][1] == "as given"
    assert list(ROWS) == ops.__all__


@rows("name", SMOOTH)
def test_a_docstring_promises_the_orders_that_the_matrix_shows(name: str) -> None:
    assert ROWS[name][1] == "any"


def test_the_page_is_current() -> None:
    # if not: python -m hoglib ops --markdown
    table = op_markdown(op_rows())
    assert (ROOT / "docs/ops.md").read_text().endswith(table + "\n")


def test_the_command_prints_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ops"]) == 0
    head, _, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["op", "equation", "orders"]
    assert [line.split("  ")[0] for line in lines] == ops.__all__
    start = head.index("orders")
    assert [line[start:] for line in lines] == [orders for _, orders in ROWS.values()]
    assert main(["ops", "--markdown"]) == 0
    assert capsys.readouterr().out == op_markdown(op_rows()) + "\n"
    assert main(["ops", "cdist"]) == 0
    assert [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()[2:]] == ["cdist"]
    with pytest.raises(SystemExit) as stopped:
        main(["opps"])
    assert stopped.value.code == 2
