"""`hoglib check` and `hoglib env`: what is printed, and the exit status where something is wrong."""

import json
import re
import runpy

import pytest
import torch

import hoglib as hog
from hoglib._core.torch_api import torch_version
from hoglib.cli import self_test
from hoglib.cli.main import main


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def no_compiler(monkeypatch):
    monkeypatch.setattr(self_test, "cpp_compiler", lambda: None)


def outcomes(capsys):
    status = main(["check", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] == (status == 0)
    return status, {one["name"]: one for one in found["checks"]}


def test_a_right_installation_passes(capsys, no_compiler):
    before = torch.get_rng_state()
    assert main(["check"]) == 0
    out = capsys.readouterr().out
    assert f"hoglib {hog.__version__}, Python" in out
    assert re.search(r"The installation is fine \(\d+ s\)\.\n$", out)
    assert len(re.findall(r"^  ok ", out, re.M)) == len(self_test.CHECKS) - 1
    assert "skipped" in out
    assert torch.equal(torch.get_rng_state(), before)


def double(function):
    """The function, whose result, or the second of two, is twice as large."""

    def wrong(*args, **kwargs):
        found = function(*args, **kwargs)
        if isinstance(found, tuple):
            return found[0], torch.utils._pytree.tree_map(lambda x: 2 * x, found[1])
        return 2 * found

    return wrong


BROKEN = {
    "Hessian-vector product through LayerNorm and attention": (hog, "hvp", double(hog.hvp)),
    "largest eigenvalues of a Hessian": (hog.HessianOperator, "eigsh", lambda self, k: (torch.ones(k), None)),
    "gradient penalty": (hog.penalties, "wgan_gp", double(hog.penalties.wgan_gp)),
    "meta-gradient of one MAML step": (hog.MAML, "loss", double(hog.MAML.loss)),
    "verify finds a wrong Function": (hog, "verify", lambda *a, **k: hog.Report),
    "compiled Hessian-vector product": (hog, "compile", lambda fn: double(fn)),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_named(name, capsys, monkeypatch):
    compiler = "c++" if name.startswith("compiled") else None  # no other check compiles
    monkeypatch.setattr(self_test, "cpp_compiler", lambda: compiler)
    where, attribute, wrong = BROKEN[name]
    monkeypatch.setattr(where, attribute, wrong)
    status, found = outcomes(capsys)
    assert status == 1
    assert found[name]["status"] == "WRONG"
    assert found[name]["why"]


def test_a_cache_that_cannot_be_written_is_named(tmp_path, capsys, monkeypatch, no_compiler):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "file"))
    status, found = outcomes(capsys)
    assert status == 1
    wrong = [name for name, one in found.items() if one["status"] == "WRONG"]
    assert wrong == ["directory of compiled graphs"]
    assert "TORCHINDUCTOR_CACHE_DIR" in found["directory of compiled graphs"]["why"]


@pytest.mark.parametrize("command", [[], ["verify"], ["audit"], ["ops"], ["env"], ["check"]])
def test_the_help_has_examples_whose_options_exist(command, capsys):
    with pytest.raises(SystemExit) as end:
        main([*command, "--help"])
    assert end.value.code == 0
    out = capsys.readouterr().out
    shown = re.findall(r"^  hoglib (\w+)(.*)$", out, re.M)
    assert shown
    for name, rest in shown:
        with pytest.raises(SystemExit):
            main([name, "--help"])
        known = capsys.readouterr().out
        for option in re.findall(r"(?<= )--?[a-z][a-z-]*", rest):
            assert f"{option}" in known.partition("options:")[2], (name, option)


def test_the_version_is_printed_and_an_unknown_command_is_not_run(capsys):
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"hoglib {hog.__version__}\n"
    with pytest.raises(SystemExit) as end:
        main(["verfy"])
    assert end.value.code == 2


UNKNOWN = {
    "abbreviated": (["verify", "file.py", "--ord", "2"], "did you mean '--orders'"),
    "an abbreviated switch": (["env", "--js"], "did you mean '--json'"),
    "of another command": (["env", "--markdown"], "unrecognized arguments: --markdown\n"),
    "two targets": (["verify", "file.py", "Cube"], "name a Function of a file as file.py:Cube"),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_option_that_is_not_known_is_told_by_name(name, capsys):
    words, text = UNKNOWN[name]
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2
    assert text in capsys.readouterr().err


def test_an_older_torch_is_refused_in_one_sentence(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.10.1+cpu")
    with pytest.raises(hog.errors.MissingDependencyError) as refused:
        runpy.run_path(torch_version.__file__)  # what `import hoglib` imports first
    assert str(refused.value) == (
        "hoglib needs torch 2.11 or newer, got torch 2.10.1+cpu; upgrade it: "
        'pip install "torch>=2.11".'
    )
