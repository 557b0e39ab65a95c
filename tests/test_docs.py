"""Every Python block in the pages at the top and in docs runs, in order, in one namespace a page."""

import base64
import contextlib
import importlib.util
import json
import logging
import os
import re
import sys
from functools import partial
from pathlib import Path

import pytest

from hoglib.cli.main import main
from tests.several_processes import exit_code_of

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
TOP = ("README.md", "CONTRIBUTING.md", "SECURITY.md")
PAGES = [*(ROOT / name for name in TOP), *sorted(DOCS.rglob("*.md"))]
NOTEBOOKS = sorted(DOCS.rglob("*.ipynb"))
NEEDS = {"hugging-face.md": "transformers", "lora.md": "peft", "language-models.md": "peft"}


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.S | re.M)


def write_files(page: Path) -> list[str]:
    """Write the blocks that begin with the name of a file to the working directory; their modules."""
    code = {
        named[1]: block
        for block in blocks(page, "python")
        if (named := re.match(r"# (\w+)\.py\n", block))
    }
    for module, block in code.items():
        Path(f"{module}.py").write_text(block)
    return list(code)


def as_said(text: str) -> str:
    """Without what may differ by rounding or by the line's width: spaces, and the digits of numbers, but
    for the name of a module, such as 2.norm."""
    return re.sub(r"-?\b\d+(\.\d+)?(e[+-]\d+)?(?!\.[a-z])", "#", " ".join(text.split()))


def assert_shown(expected: list[str], printed: str) -> None:
    """Each part of the texts, between ellipses, is in what was printed."""
    for part in [part for text in expected for part in text.split("…")]:
        assert as_said(part) in as_said(printed)


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")  # Lightning's, on torch 2.13
@pytest.mark.filterwarnings("ignore:.*does not have many workers.*")  # Lightning's advice
@pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing`:FutureWarning"
)  # peft 0.21 calls it
@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch, request, capsys):
    if page.name in NEEDS:
        pytest.importorskip(NEEDS[page.name])
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for module in write_files(page):
        request.addfinalizer(partial(sys.modules.pop, module, None))
    logger = logging.getLogger("hoglib")
    request.addfinalizer(partial(logger.setLevel, logger.level))  # a page may set it
    namespace: dict = {}
    for number, code in enumerate(blocks(page, "python")):
        exec(compile(code, f"{page.name}, block {number + 1}", "exec"), namespace)
    if page.parent.name == "how-to" or page.name == "language-models.md":
        assert_shown(blocks(page, "text"), capsys.readouterr().out)


@pytest.mark.parametrize("page", [*PAGES, *NOTEBOOKS], ids=lambda p: str(p.relative_to(ROOT)))
def test_the_links_and_pictures_of_a_page_are_there(page):
    for target in re.findall(r"\]\((?!http)([^)#]+)", re.sub(r"`[^`\n]+`", "", page.read_text())):
        assert (page.parent / target).exists(), target


@pytest.fixture(scope="module")
def notebook_pages():
    spec = importlib.util.spec_from_file_location("notebook_pages", DOCS / "notebook_pages.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"-?\b\d+(?:\.\d+)?(?:e[+-]\d+)?", text)]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.name)
def test_a_notebook_prints_and_draws_what_it_shows(path, notebook_pages, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    for cell, outputs in notebook_pages.run(path):
        shown, printed = map(notebook_pages.text_of, (cell["outputs"], outputs))
        assert as_said(printed) == as_said(shown)
        assert numbers(printed) == pytest.approx(numbers(shown), rel=0.02, abs=1e-6)
        shown, drawn = map(notebook_pages.pictures_of, (cell["outputs"], outputs))
        assert len(drawn) == len(shown)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.name)
def test_the_pictures_of_a_notebook_are_small_described_and_beside_the_others(path, notebook_pages):
    for cell in notebook_pages.code_cells(json.loads(path.read_text())):
        for picture in map(base64.b64decode, notebook_pages.pictures_of(cell["outputs"])):
            assert len(picture) < 60_000
            assert cell["metadata"]["alt"]
            copy = DOCS / "images" / f"{cell['metadata']['picture']}.png"
            assert picture == copy.read_bytes()


def test_the_gallery_has_every_picture():
    shown = set(
        re.findall(r"^ *\[!\[.+?\]\((.+?)\)\]\(\1\)$", (DOCS / "gallery.md").read_text(), re.M)
    )
    assert shown == {f"images/{path.name}" for path in (DOCS / "images").iterdir()}


def test_the_configs_that_pages_name_exist():
    for page in PAGES:
        for config in re.findall(r"\bconfigs/[a-z0-9_/]+\.yaml", page.read_text()):
            assert (ROOT / config).exists(), (page.name, config)


REFERENCES = ("errors.md", "ops.md", "benchmark-details.md")  # and what reference/ has


def test_a_page_that_is_no_reference_is_short():
    for page in PAGES:
        if page.name not in REFERENCES and page.parent.name != "reference":
            assert len(page.read_text().split()) <= 2000, page.name


def test_the_commands_of_the_readme_are_those_of_the_makefile_and_the_configs():
    text = (ROOT / "README.md").read_text()
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    commands = re.findall(r"^make ([\w-]+)$|`make ([\w-]+)`", text, re.M)
    assert {a or b for a, b in commands} <= targets
    assert "`.venv/bin/python -m experiments fit --config configs/CONFIG.yaml`" in text
    configs = re.findall(r"^\| [^|`]*`([\w/]+)` \|", text, re.M)
    assert len(configs) > 4
    for config in configs:
        assert (ROOT / "configs" / f"{config}.yaml").exists()


@pytest.mark.parametrize(
    ("name", "commands"), [("verify.md", 2), ("audit.md", 2), ("how-to/verify-in-ci.md", 1)]
)
def test_the_messages_of_a_page_are_those_that_come(name, commands, tmp_path, monkeypatch, capsys):
    page = DOCS / name
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    write_files(page)
    shown = re.findall(r"^```console\n\$ hoglib (.*?)\n(.*?)^```$", page.read_text(), re.S | re.M)
    assert len(shown) == commands
    for command, expected in shown:
        # in this process, not in one for each Function; tests/cli has both
        here = ["--time-limit", "0"] if command.startswith("verify") else []
        status = main([*command.split(), *here])
        assert status == int("WRONG" in expected), command
        assert_shown([expected], capsys.readouterr().out)


def test_a_failed_test_of_a_function_looks_as_the_page_says(tmp_path, monkeypatch):
    page = DOCS / "how-to" / "verify-in-ci.md"
    monkeypatch.chdir(tmp_path)
    write_files(page)
    ((options, expected),) = re.findall(
        r"^```console\n\$ pytest (.*?)\n(.*?)^```$", page.read_text(), re.S | re.M
    )
    assert exit_code_of(run_pytest, *options.split()) == 1
    assert_shown([expected], Path("printed").read_text())


def run_pytest(*options):
    for changes_the_summary in ("PYTEST_ADDOPTS", "CI", "BUILD_NUMBER"):
        os.environ.pop(changes_the_summary, None)
    os.environ["COLUMNS"] = "100"
    with open("printed", "w") as file, contextlib.redirect_stdout(file):
        imported = (
            "-Wignore::pytest.PytestAssertRewriteWarning"  # of plugins, by the server of processes
        )
        status = pytest.main(["-p", "no:cacheprovider", imported, *options])
    sys.exit(int(status))
