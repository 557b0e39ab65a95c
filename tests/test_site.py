"""The documentation site: it builds without a warning, loads nothing from elsewhere, and its reference names every
public name once."""

import os
import pkgutil
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import hoglib as hog
from hoglib._core.torch_api import torch_version
from hoglib.stand_ins.table import STAND_INS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PUBLIC = [
    "hoglib", "hoglib.capture", "hoglib.curvature", "hoglib.errors", "hoglib.functional",
    "hoglib.language_models", "hoglib.lightning",
    "hoglib.meta", "hoglib.nn", "hoglib.ops", "hoglib.penalties", "hoglib.stand_ins", "hoglib.testing",
    "hoglib.verification",
]  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    if find_spec("mkdocstrings_handlers") is None or find_spec("material") is None:
        pytest.skip("needs the packages of the group `docs`")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    return folder


def test_it_builds_and_each_page_has_its_place(site):
    for page in (*DOCS.rglob("*.md"), *DOCS.rglob("*.ipynb")):
        assert (site / page.relative_to(DOCS).with_suffix(".html")).exists()
    assert (site / "search" / "search_index.js").exists()  # what pages opened as files can search
    assert (site / "concepts" / "matrices.html").read_text().count("<math") > 10
    formula = (site / "meta.html").read_text()
    assert (
        formula.count('<mo stretchy="false">&#x02016;</mo>') == 2
    )  # bars of a norm end at the line
    assert "<mo>&#x02016;" not in formula


def test_nothing_is_loaded_from_elsewhere(site):
    loads = re.compile(
        r"<(?:script|img|iframe|link)\b[^>]*\b(?:src|href)=[\"']?(?:https?:)?//[^>]*>"
    )
    for page in site.rglob("*.html"):
        assert not loads.search(page.read_text()), page.name
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//", sheet.read_text()), (
            sheet.name
        )


def test_no_docstring_shows_its_markup(site):
    for page in (site / "reference").glob("*.html"):
        text = re.sub(r"<pre.*?</pre>|<code.*?</code>", "", page.read_text(), flags=re.S)
        assert not re.search(
            r":(func|class|meth|attr):|&gt;&gt;&gt;|^(Args|Returns|Raises):$", text, re.M
        ), page


QUESTIONS = {  # what people type: pages of which one is among the first three
    "hog.KFACOperator": ["reference/curvature"], "KFAC": ["kronecker", "reference/curvature"],
    "sharpness": ["operators", "getting-started"], "largest eigenvalue": ["operators", "curvature"],
    "Hessian vector product": ["curvature"], "influence functions": ["kronecker"],
    "WGAN-GP": ["penalties", "penalty-comparison"], "R1 penalty": ["how-to/gan-penalty", "penalties"],
    "MAML batch norm": ["meta"], "hypergradient": ["hypergradients"], "out of memory": ["concepts/memory"],
    "check custom Function": ["verify"], "verify in CI": ["how-to/verify-in-ci"], "Laplacian PINN": ["how-to/pinn"],
    "forces": ["how-to/potential"], "Hugging Face": ["how-to/hugging-face"], "LoRA": ["how-to/lora"],
    "Lightning checkpoint": ["lightning"], "torch.compile": ["compile"], "per example gradients": ["kronecker", "faq"],
    "trace of hessian": ["operators"], "leave one out": ["hypergradients"], "spectral norm": ["operators"],
    "diffusion coefficient": ["how-to/pinn"], "bilevel": ["hypergradients"],
    "gradient accumulation": ["how-to/gradient-accumulation"], "save results": ["how-to/save-and-load"],
    "load results": ["how-to/save-and-load"],
}  # fmt: skip


def test_the_search_finds_the_page_of_a_question_among_the_first_three(site):
    node = shutil.which("node")
    if node is None:
        pytest.skip("the site's search is JavaScript, which node runs")
    command = [node, str(ROOT / "tests" / "site_search.mjs"), str(site), *QUESTIONS]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    found = {question: line.split()[:3] for question, line in zip(QUESTIONS, lines, strict=True)}
    missed = {q: first for q, first in found.items() if not set(QUESTIONS[q]) & set(first)}
    assert len(QUESTIONS) == 28
    assert len(missed) <= 2, missed


def identity(path):
    return id(pkgutil.resolve_name(path))


def test_the_reference_has_every_public_name_once():
    text = "\n".join(page.read_text() for page in sorted((DOCS / "reference").glob("*.md")))
    entries = [identity(path) for path in re.findall(r"^::: (hoglib\.\S+)", text, re.M)]
    paths = [
        f"{module}.{name}" for module in PUBLIC for name in pkgutil.resolve_name(module).__all__
    ]
    wanted = {identity(path): path for path in [*PUBLIC[1:], *paths]}
    times = {path: entries.count(value) for value, path in wanted.items()}
    assert {path: count for path, count in times.items() if count != 1} == {}
    assert set(entries) <= set(wanted)
    top = re.findall(r"\[`hoglib\.(\w+)`\]\[", (DOCS / "reference" / "index.md").read_text())
    assert sorted(top) == sorted(hog.__all__)


def cells(row):
    """Of a page whose rows are of all versions that were tried, of the CPU, and replaced, if they say nothing else."""
    since = "torch {}.{}".format(*row.since)
    until = [
        ", ".join(filter(row.until.get, row.modes)) * (len(row.until) < len(row.modes))
        + " until torch {}.{}".format(*last)
        for last in dict.fromkeys(row.until.values())
    ]
    other = [
        f"from {since}" * (row.since > torch_version.OLDEST), *map(str.strip, until),
        row.device * (row.device != "cpu"),
        "an error instead" if row.refuses else "",
    ]  # fmt: skip
    notes = "; ".join(filter(None, other))
    modes = "all" if len(row.modes) == 4 else ", ".join(row.modes)
    issue = f"#{row.issue}" if row.issue else ""
    return [f"`{row.name}`", row.lacks + f" ({notes})" * bool(notes), modes, issue]


def test_the_table_of_torchs_wrong_derivatives_is_that_of_the_stand_ins():
    text = (DOCS / "reference" / "torch-versions.md").read_text()
    for row in STAND_INS:
        assert f"| {' | '.join(cells(row))} |".replace("|  |", "| |") in text
    assert len(re.findall(r"^\| `", text, re.M)) == len(STAND_INS)


def test_the_names_that_pages_mention_exist():
    pages = [ROOT / "README.md", *DOCS.rglob("*.md")]
    for page in pages:
        for name in re.findall(r"`(?:hog|hoglib)((?:\.\w+)+)", page.read_text()):
            assert pkgutil.resolve_name(f"hoglib{name}") is not None, (page.name, name)
