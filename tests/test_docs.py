"""Every Python block in the pages at the top and in docs runs, in order, in one namespace a page."""

import logging
import re
from functools import partial
from pathlib import Path

import pytest

from hoglib.cli.main import main

ROOT = Path(__file__).parents[1]
TOP = ("README.md", "CONTRIBUTING.md", "SECURITY.md")
PAGES = [*(ROOT / name for name in TOP), *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.S | re.M)


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")  # Lightning's, on torch 2.13
@pytest.mark.filterwarnings("ignore:.*does not have many workers.*")  # Lightning's advice
@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch, request):
    monkeypatch.chdir(tmp_path)
    logger = logging.getLogger("hoglib")
    request.addfinalizer(partial(logger.setLevel, logger.level))  # a page may set it
    namespace: dict = {}
    for number, code in enumerate(blocks(page, "python")):
        exec(compile(code, f"{page.name}, block {number + 1}", "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_the_links_and_pictures_of_a_page_are_there(page):
    for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_the_commands_of_the_readme_are_those_of_the_makefile_and_the_configs():
    text = "\n".join(blocks(ROOT / "README.md", "sh"))
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M))
    for target in re.findall(r"make (\w+)", text):
        assert target in targets
    configs = re.findall(r"--config (\S+)", text)
    assert configs
    for config in configs:
        assert (ROOT / config).exists()


def as_said(text: str) -> str:
    """Without what may differ by rounding or by the line's width: spaces, and the digits of numbers, but
    for the name of a module, such as 2.norm."""
    return re.sub(r"-?\b\d+(\.\d+)?(e[+-]\d+)?(?!\.[a-z])", "#", " ".join(text.split()))


@pytest.mark.parametrize(("name", "commands"), [("verify.md", 4), ("audit.md", 2)])
def test_the_messages_of_a_page_are_those_that_come(name, commands, tmp_path, monkeypatch, capsys):
    page = ROOT / "docs" / name
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    for code in blocks(page, "python"):
        if named := re.match(r"# (\w+\.py)\n", code):
            Path(named[1]).write_text(code)
    shown = re.findall(r"^```console\n\$ hoglib (.*?)\n(.*?)^```$", page.read_text(), re.S | re.M)
    assert len(shown) == commands
    for command, expected in shown:
        status = main(command.split())
        said = as_said(capsys.readouterr().out)
        assert status == int("WRONG" in expected), command
        for part in expected.split("…"):
            assert as_said(part) in said, (command, part)
