"""`hoglib audit`: targets, exit status, JSON."""

import json

import pytest

from hoglib.cli.main import main

HEAD = """
import torch
import torch.nn.functional as F
from torch import nn

import hoglib as hog
from tests.functions import Detached
from tests.models import Through


def of(*middle):
    net = nn.Sequential(nn.Linear(3, 4), nn.Sequential(*middle), nn.Linear(4, 1))
    batch = torch.randn(6, 3), torch.randn(6, 1)
    return hog.functional_loss(net, F.mse_loss), hog.trainable_params(net), batch
"""
GOOD = """

def second_order_problem():
    return of(nn.Tanh())
"""
BAD = """

def second_order_problem_of_poison():
    return of(nn.Tanh(), Through(Detached.apply))
"""
SEVERAL = """

def listed():
    return [of(nn.Tanh()), of(nn.Softplus())]


def named():
    return {"clean": of(nn.Tanh()), "poisoned": of(Through(Detached.apply))}
"""
NOT_RUN_PART = """

def second_order_problem_missing():
    raise RuntimeError("no problem today")


def second_order_problem_unrun():
    def loss(params, batch):
        raise RuntimeError("no loss today")

    return loss, {"w": torch.ones(2)}, None
"""
OTHERS = """

def attends():
    def loss(params, x):
        q = (x @ params["w"])[None, None]
        return F.scaled_dot_product_attention(q, q, q).square().sum()

    return loss, {"w": torch.randn(3, 3)}, torch.randn(4, 3)


def normalised():
    return of(nn.LayerNorm(4), nn.Tanh())


def loud():
    print("loud factory")
    loss, params, batch = of(nn.Tanh())

    def printing(params, batch):
        print("loud loss")
        return loss(params, batch)

    return printing, params, batch


def nothing():
    return None


def exits():
    raise SystemExit(0)


def takes(x):
    return of(nn.Tanh())


number = 3
model = nn.Tanh()
"""


def run(capsys, *args, routes="rr"):
    """By one route, if none are given: what is found by which is told in tests/auditing."""
    status = main(["audit", *args, *(["--routes", routes] if routes else [])])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_a_right_one(write, capsys):
    write(HEAD, GOOD)
    for target in ("mine:second_order_problem", "mine.py:second_order_problem", "mine.py"):
        status, out, err = run(capsys, target, routes=None if target == "mine.py" else "rr")
        assert (status, err) == (0, "")
        assert out.startswith("second_order_problem: right, by ")
        assert "check  " in out  # of one, the table too


def test_every_problem_of_a_file_and_a_wrong_one_is_named(write, capsys):
    status, out, _ = run(capsys, write(HEAD, GOOD, BAD))
    assert status == 1
    for said in (
        "second_order_problem_of_poison: WRONG",
        "FAIL  culprit: 1.1",
        "Detached",
        "functions.py:",
    ):
        assert said in out
    assert out.rstrip().endswith("1 right, 1 WRONG (second_order_problem_of_poison)")
    right, _, _ = out.partition("second_order_problem_of_poison")
    assert "check  " not in right
    _, out, _ = run(capsys, "mine.py", "--verbose")
    assert "check  " in out.partition("second_order_problem_of_poison")[0]


def test_a_factory_of_several(write, capsys):
    write(HEAD, SEVERAL)
    status, out, _ = run(capsys, "mine:listed")
    assert status == 0
    assert "listed[0]: right" in out
    assert "listed[1]: right" in out
    assert out.rstrip().endswith("2 right")
    status, out, _ = run(capsys, "mine:named")
    assert status == 1
    assert "named[clean]: right" in out
    assert out.rstrip().endswith("1 right, 1 WRONG (named[poisoned])")


def test_what_cannot_run_is_2(write, capsys):
    status, out, err = run(capsys, write(HEAD, GOOD, NOT_RUN_PART))
    assert status == 2
    assert "error: second_order_problem_missing: RuntimeError: no problem today" in err
    assert "second_order_problem_unrun: NOT RUN." in out
    assert "no loss today" in out
    assert out.rstrip().endswith(
        "1 right, 2 not run (second_order_problem_unrun, second_order_problem_missing)"
    )
    status, _, _ = run(capsys, write(HEAD, NOT_RUN_PART, BAD, name="other.py"))
    assert status == 1


def test_options(write, capsys):
    write(HEAD, OTHERS)
    status, out, _ = run(capsys, "mine:attends", "--no-stand-ins")
    assert status == 1
    assert "scaled_dot_product" in out
    assert run(capsys, "mine:attends")[0] == run(capsys, "mine:attends", "--stand-ins")[0] == 0
    assert run(capsys, "mine:normalised", "--no-stand-ins")[0] == 0
    routes = "rr,torch.func.hessian"
    status, out, _ = run(capsys, "mine:normalised", "--no-stand-ins", routes=routes)
    assert status == 1
    assert "FAIL  second derivative: torch.func.hessian" in out


def test_json(write, capsys):
    status, out, _ = run(
        capsys, write(HEAD, GOOD, BAD, NOT_RUN_PART, "\n\nprint('noise')\n"), "--json"
    )
    assert status == 1
    table = json.loads(out)
    assert table["ok"] is False
    assert [(report["name"], report["ok"]) for report in table["reports"]] == [
        ("second_order_problem", True),
        ("second_order_problem_of_poison", False),
        ("second_order_problem_unrun", False),
    ]
    assert table["not_run"] == [
        {"name": "second_order_problem_missing", "error": "RuntimeError: no problem today"}
    ]
    assert {"seed", "hoglib", "torch"} <= table.keys()
    again, other = (run(capsys, "mine.py", "--json", "--seed", seed)[1] for seed in "01")
    assert again == out
    assert json.loads(other)["seed"] == 1
    assert json.loads(other)["reports"] != table["reports"]


def test_what_a_factory_prints_is_not_in_the_json_and_a_loss_not_repeated(write, capsys):
    write(HEAD, OTHERS)
    status, out, err = run(capsys, "mine:loud", "--json")
    assert status == 0
    assert json.loads(out)["ok"]
    assert "loud factory" in err
    status, out, err = run(capsys, "mine:loud")
    assert "loud loss" not in out + err


# fmt: off
# what names nothing is told in test_verify.py
NOT_RUN = {
    "a directory": ((".",), "second_order_problem . | xargs -n 1 hoglib audit"),
    "a bare module": (("mine",), "expected package.module:factory or path/to/file.py, got 'mine'"),
    "a file without problems": (("mine.py",), "expected a function second_order_problem() that returns (loss, params, batch), or several whose names start with second_order_problem, got none; write one, or name another factory: mine.py:name; for custom Functions: `hoglib verify`"),
    "no function": (("mine:number",), "expected a function without arguments that returns (loss, params, batch), got int 3; for a custom Function: `hoglib verify`"),
    "a function with arguments": (("mine:takes",), "expected a function without arguments that returns (loss, params, batch), got function"),
    "a module": (("mine:model",), "expected a function without arguments that returns (loss, params, batch), got Tanh"),
    "a Function": (("mine:Detached",), "for a custom Function: `hoglib verify`"),
    "a function that exits": (("mine:exits",), "SystemExit"),
    "no problem": (("mine:nothing",), "nothing(): expected (loss, params, batch)"),
    "an unknown route": (("mine:loud", "--routes", "sideways"), "routes: expected some of"),
}
# fmt: on


@pytest.mark.parametrize("case", NOT_RUN)
def test_not_run(write, capsys, case):
    write(HEAD, OTHERS)
    args, message = NOT_RUN[case]
    status, _, err = run(capsys, *args, routes=None)
    assert status == 2
    assert message in err
    assert "Traceback" not in err
