"""`hoglib verify`: targets, exit status, JSON."""

import json
import multiprocessing
import os
import runpy
import signal
import sys
import time
from pathlib import Path

import pytest

from hoglib.cli.main import main
from tests.several_processes import exit_code_of

GOOD = '''
import torch


class Good(torch.autograd.Function):
    """x^3."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 3 * g * x**2

    @staticmethod
    def sample_inputs():
        return (torch.randn(3),)
'''
BAD = """

class Bad(Good):
    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 3 * g * x.detach() ** 2
"""
BARE = """

class Bare(torch.autograd.Function):
    pass
"""
CASES = """

class Cases(Good):
    reference = staticmethod(lambda x: x**3)

    @staticmethod
    def sample_inputs():
        return [(torch.randn(3),), (torch.randn(2, 2),)]
"""
STRAIGHT = """

class Straight(Good):
    surrogate = True

    @staticmethod
    def forward(ctx, x):
        return x.sign()

    @staticmethod
    def backward(ctx, g):
        return g
"""
BOOM = """

class Boom(Good):
    @staticmethod
    def forward(ctx, x):
        raise RuntimeError("boom")
"""
NO_SAMPLES = """

class NoSamples(Good):
    @staticmethod
    def sample_inputs():
        raise RuntimeError("no samples today")
"""


LOUD = """

class Loud(Good):
    @staticmethod
    def forward(ctx, x):
        print("loud")
        return Good.forward(ctx, x)
"""
ONLY_THERE = """

class OnlyThere(Good):
    @staticmethod
    def forward(ctx, x):
        if not torch.equal(x, torch.ones_like(x)):
            raise ValueError("ones only")
        return Good.forward(ctx, x)

    @staticmethod
    def sample_inputs():
        return (torch.ones(3),)
"""


def run(capsys, *args):
    status = main(["verify", *args, "--time-limit", "0"])  # in this process, which is faster
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_a_right_file(write, capsys):
    status, out, err = run(capsys, write(GOOD, CASES, STRAIGHT, LOUD))
    assert status == 0
    for name in ("Good", "Cases[0]", "Cases[1]", "Straight", "Loud"):
        assert f"{name}: right, by " in out
    assert out.rstrip().endswith("5 right")
    assert "loud" not in out + err  # what a Function prints


def test_a_wrong_file(write, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "70")
    status, out, _ = run(capsys, write(GOOD, BAD, BARE))
    assert status == 1
    assert "Bad: WRONG" in out
    assert "mine.py:" in out
    assert "`return 3 * g * x.detach() ** 2`" in " ".join(out.split())
    assert out.rstrip().endswith("1 right, 1 WRONG (Bad), 1 without sample_inputs() (Bare)")
    sentences = out[out.index("FAIL") : out.index("check  ")]
    assert max(map(len, sentences.splitlines())) <= 70


@pytest.mark.parametrize(
    ("part", "says", "end"),
    [
        (BOOM, "Boom: NOT RUN.", "1 not run (Boom)"),
        (NO_SAMPLES, "NoSamples: its inputs could not be made: Runtime", "1 not run (NoSamples)"),
        (ONLY_THERE, "OnlyThere: NOT JUDGED", "1 not judged (OnlyThere)"),
    ],
)
def test_what_cannot_run_or_be_judged_is_2(write, capsys, part, says, end):
    status, out, err = run(capsys, write(GOOD, part))
    assert status == 2
    assert says in out + err
    assert out.rstrip().endswith(f"1 right, {end}")
    status, _, _ = run(capsys, write(GOOD, part, BAD, name="other.py"))
    assert status == 1


def test_one_function_of_a_module(write, capsys):
    write(GOOD, BAD)
    status, out, _ = run(capsys, "mine:Good", "--input", "randn(3, 4)")
    assert status == 0
    assert "check  " in out  # the table too
    assert run(capsys, "mine:Bad", "--input", "rand(2) + 1", "--modes", "rr")[0] == 1
    assert run(capsys, "mine.py:Bad")[0] == 1  # by its own samples
    several = "torch.nn.functional:linear", "--input", "randn(3, 4)", "--input=-randn(2, 4)"
    assert run(capsys, *several)[0] == 0


def test_options(write, capsys):
    write(GOOD, STRAIGHT.replace("surrogate = True", "pass"))
    assert run(capsys, "mine:Straight", "--input", "randn(3)")[0] == 1
    assert run(capsys, "mine:Straight", "--input", "randn(3)", "--surrogate")[0] == 0
    status, out, _ = run(
        capsys, "mine:Good", "--input", "randn(3)", "--orders", "1,2,3", "--modes", "rr", "--full",
        "--reference", "torch:square",
    )  # fmt: skip
    assert status == 1
    assert "third derivative: reverse-over-reverse" in out
    assert "FAIL  reference: value" in out


def test_json(write, capsys):
    noise = "\n\nprint('noise')\n"
    status, out, _ = run(capsys, write(GOOD, BAD, BARE, NO_SAMPLES, noise), "--json")
    assert status == 1
    table = json.loads(out)
    assert table["ok"] is False
    assert [report["name"] for report in table["reports"]] == ["Good", "Bad"]
    assert [report["ok"] for report in table["reports"]] == [True, False]
    assert table["without_samples"] == ["Bare"]
    assert table["not_run"][0]["name"] == "NoSamples"
    assert {"seed", "hoglib", "torch"} <= table.keys()
    outs = [run(capsys, "mine:Bad", "--json", *seed)[1] for seed in ((), (), ("--seed", "1"))]
    assert outs[0] == outs[1] != outs[2]


def test_a_file_inside_a_package(write, capsys):
    write("", name="pack/__init__.py")
    write(GOOD, name="pack/base.py")
    inside = "from .base import Good\n\n\nclass Heir(Good):\n    pass\n"
    status, out, _ = run(capsys, write(inside, name="pack/heirs.py"))
    assert status == 0
    assert "Heir: right" in out
    assert "Good: right" not in out  # imported, not defined there


# fmt: off
NOT_RUN = {
    "no file": (("nothing.py",), "expected an existing file, found none"),
    "a folder": (("folder.py",), "expected an existing file, found a folder"),
    "one of many names": (("torch:sinn",), " more; did you mean 'sin'?"),
    "a name alone": ((":Good",), "expected package.module:name"),
    "an order that is a word": (("mine:Good", "--orders", "1,two"), "orders: expected some of 1, 2, 3, 4"),
    "no module": (("nothing:Good",), "the import failed"),
    "no name": (("mine.py:Other",), "expected a name in mine.py, got 'Other'; its names are Good, Thing"),
    "a bare module": (("mine",), "expected package.module:Function or path/to/file.py"),
    "a directory": ((".",), "for its files: grep -rl --include='*.py' sample_inputs . | xargs -n 1 hoglib verify"),
    "a dot for the colon": (("mine.Good",), "perhaps 'mine:Good'"),
    "an input for a file": (("mine.py", "--input", "randn(3)"), "--input belongs to one Function"),
    "an input that is no expression": (("mine:Good", "--input", "randn(3"), "--input 'randn(3'"),
    "a file that exits": (("exits.py",), "the import failed: SystemExit"),
    "an input that exits": (("mine:Good", "--input", "exit(0)"), "SystemExit"),
    "a class": (("mine.py:Thing",), "name an instance of it"),
    "no inputs": (("torch:sin",), "expected inputs, got none"),
    "a factory": (("mine.py:second_order_problem",), "for a factory of a loss: `hoglib audit`"),
    "a file without Functions": (("empty.py",), "expected at least one Function"),
    "a file that does not parse": (("broken.py",), "the import failed: SyntaxError"),
    "an unknown mode": (("mine:Good", "--modes", "xy"), "modes: expected some of"),
    "a reference that is not there": (("mine:Good", "--reference", "mine:Nothing"), "--reference: expected a name"),
}
# fmt: on


@pytest.mark.parametrize("case", NOT_RUN)
def test_not_run(write, capsys, case):
    write(GOOD, "\n\nclass Thing:\n    pass\n\n\ndef second_order_problem():\n    pass\n")
    write("x = 1\n", name="empty.py")
    write("import sys\n\nsys.exit(0)\n", name="exits.py")
    write("def (\n", name="broken.py")
    Path("folder.py").mkdir()
    args, message = NOT_RUN[case]
    status, _, err = run(capsys, *args)
    assert status == 2
    assert message in err
    assert "Traceback" not in err


def test_a_bad_option(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["verify", "--nothing"])
    assert stopped.value.code == 2
    with pytest.raises(SystemExit):
        main(["verify", "mine.py", "Good"])
    assert "name a Function of a file as mine.py:Good" in capsys.readouterr().err
    for words, said in (
        (("verify", "mine:F", "--input", "randn(3)", "randn(4)"), ("usage: hoglib verify", "randn(4); give one --input for each argument")),
        (("verfy", "mine.py"), ("usage: hoglib [-h]", "got 'verfy'; did you mean 'verify'?")),
        (("mine.py",), ("did you mean `hoglib verify mine.py` or `hoglib audit mine.py`?",)),
        (("mine:F",), ("did you mean `hoglib verify mine:F` or",)),
        (("ops", "--markdwn"), ("usage: hoglib ops", "did you mean '--markdown'?")),
        (("",), ("got ''",)),
    ):  # fmt: skip
        with pytest.raises(SystemExit):
            main(words)
        err = capsys.readouterr().err
        assert all(one in err for one in said), err
    assert main(["verify", "mine.py", "--time-limit", "-1"]) == 2
    with pytest.raises(SystemExit):
        main(["verify", "mine.py", "--seed", "9" * 30])
    assert "expected an integer of 64 bits" in capsys.readouterr().err
    assert main([]) == 2
    assert "hoglib check" in capsys.readouterr().out


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is full")
def test_a_full_disk(monkeypatch, capsys):
    assert main(["env"]) == 0
    assert capsys.readouterr().err == ""
    with Path("/dev/full").open("w") as full, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", full)
        assert main(["env"]) == 2  # and what is left is written as the file is closed
    assert "could not be written" in capsys.readouterr().err


HOSTILE = """
import os
import sys


class Kills(Good):
    @staticmethod
    def forward(ctx, x):
        import ctypes

        ctypes.string_at(0)


class Sleeps(Good):
    @staticmethod
    def forward(ctx, x):
        import time

        time.sleep(1000)


class Recurses(Good):
    @staticmethod
    def backward(ctx, g):
        return Recurses.backward(ctx, g)


class Interrupts(Good):
    @staticmethod
    def backward(ctx, g):
        raise KeyboardInterrupt


class Ends(Good):
    @staticmethod
    def backward(ctx, g):
        raise BaseException("the end")


class Shouts(Good):
    @staticmethod
    def forward(ctx, x):
        print("loud" * 100_000)
        os.write(1, b"loud" * 100_000)
        return Good.forward(ctx, x)
"""


def test_one_that_kills_or_never_returns_does_not_stop_the_others(write, capfd):
    path = write(GOOD, HOSTILE)
    status = main(["verify", path, "--time-limit", "5"])
    out, err = capfd.readouterr()
    assert status == 1
    assert "Kills: it ended the process by SIG" in err
    assert "Sleeps: it did not return within 5 seconds, at mine.py:" in err
    assert "`time.sleep(1000)`." in err
    assert "Recurses.backward raised RecursionError" in out
    assert "Interrupts: KeyboardInterrupt" in err
    assert "Ends: BaseException: the end" in err
    assert "Traceback" not in err
    assert "loud" not in out
    assert "Shouts: right" in out
    assert out.rstrip().endswith(
        "2 right, 1 WRONG (Recurses), 4 not run (Kills, Sleeps, Interrupts, Ends)"
    )


@pytest.mark.parametrize(
    ("by", "status"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_an_end_of_the_command_ends_both_processes(write, tmp_path, by, status):
    begun = tmp_path / "pid"
    marked = f"__import__('pathlib').Path({str(begun)!r}).write_text(str(os.getpid()))\n        "
    path = write(GOOD, HOSTILE.replace("time.sleep", f"{marked}time.sleep"))
    parent = multiprocessing.get_context("forkserver").Process(
        target=run_the_module, args=("verify", f"{path}:Sleeps")
    )
    parent.start()
    deadline = time.monotonic() + 60
    while not (begun.exists() and begun.read_text()) and time.monotonic() < deadline:
        time.sleep(0.1)
    child = int(begun.read_text())
    os.kill(parent.pid, by)
    parent.join(30)
    assert parent.exitcode == status
    assert "Traceback" not in Path("errors").read_text()
    # the child of a killed one sees its end
    while is_running(child) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not is_running(child)


def test_a_file_that_ends_the_process_is_not_right(write):
    assert exit_code_of(run_the_module, "verify", write("import os\nos._exit(0)\n")) == 2
    assert "mine.py: it ended the process with exit status 0" in Path("errors").read_text()


def run_the_module(*words):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in background jobs
    os.dup2(os.open("errors", os.O_WRONLY | os.O_CREAT), 2)
    sys.argv[1:] = words
    runpy.run_module("hoglib", run_name="__main__")


def is_running(process):
    """Whether a process goes on; one that ended may wait for another to ask for its status."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except OSError:
        return False


FORKS = """

def fork_once(name, in_the_copy):
    begun = Path(name)
    if not begun.exists():
        begun.touch()
        if copy := os.fork():
            begun.write_text(str(copy))
        else:
            in_the_copy()


class Stays(Good):
    @staticmethod
    def forward(ctx, x):
        fork_once("stays", lambda: time.sleep(1000))
        return Good.forward(ctx, x)


class Returns(Good):
    @staticmethod
    def forward(ctx, x):
        fork_once("returns", lambda: None)
        return Good.forward(ctx, x)


class Multiplies(Good):
    depth = 0

    @staticmethod
    def forward(ctx, x):
        with open("depths", "a") as stream:  # at most 20 of them, whatever the command does
            print(Multiplies.depth, file=stream)
            few = stream.tell() < 40
        if few and os.fork() == 0:
            Multiplies.depth += 1
        return Good.forward(ctx, x)
"""


def test_what_a_function_forks_ends_with_it_and_does_not_multiply(write, capfd):
    path = write("import os\nimport time\nfrom pathlib import Path\n", GOOD, FORKS)
    assert main(["verify", path]) == 0
    out, _ = capfd.readouterr()
    for name in ("Stays", "Returns", "Multiplies"):
        assert out.count(f"{name}: right") == 1
    until = time.monotonic() + 60
    while any(is_running(Path(name).read_text()) for name in ("stays", "returns")):
        assert time.monotonic() < until
        time.sleep(0.05)
    assert set(Path("depths").read_text().split()) == {"0", "1"}
