"""`hoglib ops` and the page that is made from it."""

from pathlib import Path

import pytest
import torch

from hoglib import ops
from hoglib.cli.main import main
from hoglib.testing.opinfo import overview
from hoglib.testing.opinfo.catalogue import CATALOGUE

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def table():
    return overview.rows()


def test_every_row_is_right(table):
    assert [row.cells[0] for row in table if not row.right] == []
    assert len(table) == len(CATALOGUE) > 30
    assert all(row.cells[-1] == "ok" for row in table)


def test_the_page_is_current(table):
    # if not: python -m hoglib ops --markdown
    assert (ROOT / "docs/ops.md").read_text().endswith(overview.markdown(table) + "\n")


def test_the_command_prints_the_table(table, capsys):
    assert main(["ops"]) == 0
    assert capsys.readouterr().out == overview.text(table) + "\n"
    assert main(["ops", "--markdown"]) == 0
    assert capsys.readouterr().out == overview.markdown(table) + "\n"


def test_a_bad_command():
    with pytest.raises(SystemExit) as stopped:
        main(["opps"])
    assert stopped.value.code == 2


def entry(function):
    (square,) = [op for op in CATALOGUE if op.name == "square"]
    return square._replace(function=function)


class Cut(torch.autograd.Function):
    """x^2 whose second derivative is lost."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, g):
        return 2 * g * ctx.saved_tensors[0].detach()

    @staticmethod
    def jvp(ctx, t):
        return 2 * t * ctx.saved_tensors[0]


class WrongTangent(Cut):
    @staticmethod
    def backward(ctx, g):
        return 2 * g * ctx.saved_tensors[0]

    @staticmethod
    def jvp(ctx, t):
        return t * ctx.saved_tensors[0]


WRONG = {
    "second derivative lost": (Cut.apply, "1 of any"),
    "wrong tangent": (WrongTangent.apply, "WRONG"),
    "another function": (lambda x: ops.square(x) + x, "0 of any"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_faulty_op_is_seen(fault, monkeypatch, capsys):
    function, cell = WRONG[fault]
    row = overview.row(entry(function))
    assert not row.right
    assert cell in row.cells
    monkeypatch.setattr(overview, "CATALOGUE", [entry(function)])
    assert main(["ops"]) == 1
    assert "not as their references: square" in capsys.readouterr().err
