"""`python -m experiments list`: every config, its minutes and what it shows, without torch."""

import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from experiments.__main__ import main
from experiments.configs import configs

ROOT = Path(__file__).parents[2]
FILES = sorted(path.relative_to(ROOT) for path in (ROOT / "configs").rglob("*.yaml"))
SMOKE = [path for path in FILES if "smoke" in path.parts]


def test_it_lists_every_config():
    code = "import sys; sys.modules |= dict.fromkeys(('torch', 'lightning')); from experiments.__main__ import main; "
    command = [sys.executable, "-c", code + "sys.exit(main(['list']))"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [line.split(maxsplit=2) for line in done.stdout.splitlines() if ".yaml  " in line]
    assert [path for path, *_ in rows] == [str(path) for path in FILES if path not in SMOKE]
    assert all(float(minutes) > 0 and shows for _, minutes, shows in rows)
    assert max(map(len, done.stdout.splitlines())) <= 125


@pytest.mark.parametrize("config", configs(), ids=lambda config: str(config.path))
def test_the_command_of_a_config_names_it(config):
    command = (ROOT / config.path).read_text().splitlines()[2]
    assert command == f"#   python -m experiments fit --config {config.path}"


@pytest.mark.parametrize("path", SMOKE, ids=str)
def test_a_smoke_config_is_that_of_a_run(path):
    run = path.relative_to("configs/smoke")
    assert (ROOT / "configs" / run).exists()
    assert (ROOT / path).read_text().startswith(f"# {run} in seconds")


def test_make_results_runs_every_config_and_copies_pictures_that_are_there():
    (pattern,) = re.findall(r"\$\(wildcard (.*?)\)", (ROOT / "Makefile").read_text())
    runs = [path for path in FILES if path not in SMOKE]
    assert sorted(path.relative_to(ROOT) for path in ROOT.glob(pattern)) == runs
    code = "".join(file.read_text() for file in (ROOT / "experiments").rglob("*.py"))
    texts = "".join((ROOT / path).read_text() for path in runs)
    pictures = re.findall(r"^# (docs/images/\w+\.png) is its (\w+\.png)$", texts, re.MULTILINE)
    assert len(pictures) > 10
    for shown, picture in pictures:
        assert f'"{picture}"' in code, picture
        assert (ROOT / shown).exists(), shown


FOLDERS = sorted(file.parent for file in (ROOT / "experiments").glob("*/experiment.py"))
EXPERIMENTS = [
    folder for folder in FOLDERS if folder.name != "shared"
]  # which has their base class


@pytest.mark.parametrize("folder", EXPERIMENTS, ids=lambda folder: folder.name)
def test_an_experiment_has_its_files_and_imports_no_other(folder):
    assert {"__init__.py", "plots.py", "table.py"} < {file.name for file in folder.iterdir()}
    text = "".join(file.read_text() for file in folder.glob("*.py"))
    imported = set(re.findall(r"^from experiments\.(\w+)", text, re.MULTILINE))
    assert imported <= {folder.name, "shared", "checks", "logs", "runs"}


@pytest.mark.parametrize(
    "head", ["# What it shows.\n# some minutes\n", "what: 1\n# 2 minutes on one core:\n"]
)
def test_a_config_that_does_not_say_it_is_refused(head, tmp_path):
    (tmp_path / "new.yaml").write_text(head)
    with pytest.raises(ValueError, match=r"new.yaml: expected `# what it shows`"):
        configs(tmp_path)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["lst"], "choose from 'list', 'fit', 'validate'"),
        ([], "one of {list,fit,validate"),
        (["list", "all"], "list takes no words after it, got all"),
    ],
    ids=str,
)
def test_list_is_among_the_commands_that_an_error_names(words, said, capsys):
    assert main(words) == 2
    assert said in capsys.readouterr().err


def test_a_package_that_is_not_installed_is_named(monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "experiments.command.cli", raising=False)
    monkeypatch.setitem(sys.modules, "lightning.pytorch.cli", None)
    assert main(["fit"]) == 2
    error = capsys.readouterr().err
    assert "lightning is not installed" in error
    assert "pip install '.[experiments]'" in error


def test_ctrl_c_while_packages_are_imported_ends_with_its_status(monkeypatch):
    monkeypatch.setattr("experiments.__main__._run", Mock(side_effect=KeyboardInterrupt))
    assert main(["fit"]) == 130
