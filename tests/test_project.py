"""The project as a package: public names, imports, versions, constraints, the wheel."""

import ast
import inspect
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email import message_from_bytes
from importlib import metadata
from pathlib import Path
from typing import get_type_hints

import pytest

import hoglib as hog
from hoglib._core.runtime import ambient, provided
from hoglib._core.torch_api import torch_version
from tests import versions

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_version_is_the_same_everywhere():
    assert f"version: {hog.__version__}" in (ROOT / "CITATION.cff").read_text()
    assert f"## {hog.__version__}" in (ROOT / "CHANGELOG.md").read_text()


# What a call does may depend on these without an argument; each has the reason in a comment above it.
AMBIENT = {
    "_core.runtime.ambient.AMBIENT"  # one value, whose fields say why they are no arguments
}
# What the process remembers; no number depends on it.
RECORDS = {
    "_core.torch_api.torch_library._FUNCTIONS": "an operator has one Function, by which verdicts are kept",
    "_core.torch_api.torch_library._BY_LIBRARY": "the Function of an operator is found by a call, once",
    "_core.messages.communication._FAILURES": "processes end failed calls together before the next one",
    "_core.messages.communication._FAILED": "failed calls are numbered; a store may outlive a group",
    "_core.messages.communication._RUNNING": "messages inside a call belong to it",
    "_core.runtime.freed_memory._LIMITS": "freed memory is returned at a new peak of the process",
    "_core.runtime.device_reads._READS": "a check reads a device's values one call later",
    "_core.runtime.provided._PROVIDED": "what stands above registers itself, since imports run downward",
    "_core.runtime.source_location._WARNED": "a warning is given once",
    "_core.modules.swap._CLAIMED": "two threads that swap one model's parameters: an error",
    "_core.modules.swap._SLOTS": "where the parameters of a model are, while it is as it was",
    "_core.torch_api.torch_forward_mode._FORWARD_THREADS": "torch has one level of forward mode for all threads",
    "_core.numerics.trust._MEMO": "what was compared once is trusted: whether samples of a critic are apart",
    "_core.torch_api.torch_internals._CONSTRUCTOR_WATCHES": "who watches, for what stands in torch's place",
    "_core.torch_api.torch_internals._SCRIPT_WATCHES": "who watches, for what stands in torch's place",
    "_core.torch_api.function_watch._WATCHES": "who watches, for what stands in torch's place",
    "_core.torch_api.torch_private.REFUSED": "what was refused to code that goes on after errors",
    "capture.capturing._KEPT": "captured functions, as long as their owners live",
    "capture.recomputed._TEMPLATES": "captured recomputations",
    "functional.BY_ID": "a graph of torch.compile names a loss by its id, for it holds no objects",
    "ops._external._CHAINS": "a dispatcher's operation takes a number for a user's functions",
    "ops._stand_in.TABLE": "what stands in for torch registers itself, as ops are imported",
    "penalties.distributed._CREATION_ORDER": "processes compare their wrappers in one order",
    "penalties.distributed._WRAPPERS": "which DDP module is around a critic: a module does not know",
    "penalties.distributed._ON_CPU": "a group of gloo is made once beside the default one",
    "penalties.distributed._HELD": "how many penalties keep a module's parameters gathered",
    "penalties.module.KINDS": "each penalty registers itself where it is defined",
    "verification.entry_points._MUTATING": "which Functions have to be watched each time",
    "verification.entry_points._KEEPING": "Functions that keep an argument or output on ctx, unsaved",
    "verification.function_identity._IDENTITIES": "classes that a function makes anew share verdicts",
    "verification.function_identity._KNOWN": "what is the same of such a class, looked up once",
    "verification.entry_points._REPORTED": "a warning is given once",
    "verification.entry_points._VERDICTS": "a Function is examined once, and again where its values have moved",
}
STATE = re.compile(
    r"(?P<ambient>(\w+\.)*(ContextVar|local|_Ambient)(\[.*\])?\()"
    r"|\{\}$|\[\]$|set\(\)$|(\w+\.)*(Weak\w+|OrderedDict|count|deque|Counter)(\[.*\])?\("
)


def test_all_state_of_the_process_is_named_and_has_a_reason():
    fields, records = set(), set()
    for path in (ROOT / "hoglib").rglob("*.py"):
        lines = path.read_text().splitlines()
        module = ".".join(path.relative_to(ROOT / "hoglib").with_suffix("").parts)
        tree = ast.parse("\n".join(lines))
        assert not any(isinstance(node, ast.Global) for node in ast.walk(tree)), path
        for node in tree.body:
            if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
                continue
            found = STATE.match(ast.unparse(node.value))
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if not found or not isinstance(target, ast.Name):
                continue
            if found["ambient"]:
                assert lines[node.lineno - 2].startswith("#"), (
                    f"{module}.{target.id}: why not an argument?"
                )
            (fields if found["ambient"] else records).add(f"{module}.{target.id}")
    assert fields == AMBIENT
    assert records == set(RECORDS)


def test_a_thread_is_inside_of_at_most_ten_things():
    fields = get_type_hints(ambient._Ambient)
    assert len(fields) <= 10
    lines = inspect.getsource(ambient._Ambient).splitlines()
    for name, kind in fields.items():
        (at,) = (i for i, line in enumerate(lines) if line.startswith(f"    {name}: "))
        assert lines[at - 1].startswith("    # "), name
        assert not lines[at - 2].startswith("    # "), name
        # on or off; or nothing, or an object: no third state
        assert kind not in (bool | None, str | None), name
        assert isinstance(getattr(ambient._Ambient, name), bool) == (kind is bool), name


def test_a_class_has_at_most_fifteen_attributes():
    found = {}
    for path in (ROOT / "hoglib").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                names = {
                    x.attr
                    for x in ast.walk(node)
                    if isinstance(x, ast.Attribute) and isinstance(x.ctx, ast.Store)
                    if ast.unparse(x.value) == "self"
                }
                found[node.name] = max(len(names), found.get(node.name, 0))
    assert {name: count for name, count in found.items() if count > 15} == {}


# What lower packages call of upper ones at run time, which no contract of imports sees: functions that
# are registered by name, and methods of the objects in AMBIENT.
CALLS_UPWARD = {
    "compile_level": "remat(compile=True), of ops, runs graphs that hoglib.capture makes",
    "examine_users_derivatives": "second_order() examines Functions, as hoglib.verification does",
    "StandIns.run_script": "torch_internals sees scripted code, which a TorchFunctionMode does not",
    "Examiner.by_hand": "the mode of second_order() sees each call of torch.autograd.grad and backward",
    "Examiner.differentiated": "jvp, which knows afterwards whether its result has a graph",
    "Examiner.note_once": "the same",
    "Examiner.watched_hook": "the mode of second_order() sees each call of Tensor.register_hook",
    "Examiner.note_gradient": "the ring passes on the gradient of which a Function may have cut the graph",
    "Examiner.note_cpp": "graph_summary meets Functions in C++: each of its callers would pass them on",
}


def test_what_is_called_upward_is_named_and_has_a_reason():
    found = set(provided._PROVIDED)
    for protocol in (ambient.StandIns, ambient.Examiner):
        names = {*vars(protocol), *protocol.__annotations__}
        found |= {f"{protocol.__name__}.{name}" for name in names if not name.startswith("_")}
    assert found == set(CALLS_UPWARD)
    # no other way: nothing is set in an imported module or class
    for path in (ROOT / "hoglib").rglob("*.py"):
        nodes = [*ast.walk(ast.parse(path.read_text()))]
        froms = [x for x in nodes if isinstance(x, ast.ImportFrom) and "hoglib" in (x.module or "")]
        imported = {alias.asname or alias.name for x in froms for alias in x.names} - {"AMBIENT"}
        for node in nodes:
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                assert ast.unparse(node.value) not in imported, f"{path}:{node.lineno}"


def requirements(names):
    """Every installed distribution that these bring, by normalised name."""
    from packaging.requirements import Requirement

    found, todo = {}, [Requirement(name) for name in names]
    while todo:
        requirement = todo.pop()
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        markers = [{"extra": extra} for extra in requirement.extras or {""}]
        key = (name, tuple(sorted(requirement.extras)))
        if key in found or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue  # an optional part that is not installed
        found[key] = distribution.version
        for text in distribution.requires or []:
            child = Requirement(text)
            if child.marker is None or any(
                child.marker.evaluate(m) for m in [*markers, {"extra": ""}]
            ):
                child.marker = None
                todo.append(child)
    return {name: version for (name, _), version in found.items()}


def pins(file):
    lines = (ROOT / file).read_text().splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in pairs}


def test_each_peer_is_pinned_once():
    from packaging.requirements import Requirement

    peers = pins("constraints-peers.txt")
    assert not set(peers) & set(pins("constraints.txt"))
    for text in PYPROJECT["project"]["optional-dependencies"]["peers"]:
        requirement = Requirement(text)
        assert requirement.specifier.contains(peers[requirement.name.lower()], prereleases=True)


def test_constraints_pin_every_package_that_an_install_brings():
    project = PYPROJECT["project"]
    wanted = [*project["dependencies"], *PYPROJECT["build-system"]["requires"]]
    for extra in project["optional-dependencies"].values():
        wanted += extra
    pinned = pins("constraints.txt") | pins("constraints-peers.txt")
    brought = requirements(wanted)
    assert "torch" in brought
    missing = {
        name for name in brought if name not in pinned
        and not name.startswith(("nvidia-", "cuda-")) and name != "triton"  # a CUDA build of torch
    }  # fmt: skip
    assert missing == set()
    assert pinned["torch"] == "2.13.0"


def test_the_oldest_torch_is_that_of_the_requirement():
    oldest = ".".join(map(str, torch_version.OLDEST))
    (torch,) = PYPROJECT["project"]["dependencies"]
    assert torch == f"torch>={oldest}"


def test_each_bound_has_a_reason():
    for line in (ROOT / "pyproject.toml").read_text().splitlines():
        if re.match(r'\s+"[\w\[\]-]+[><=]', line):
            assert "#" in line, line


NOT_SHIPPED = {".git", ".venv*", "runs", "build", "dist", "hoglib.egg-info", "shared"}
BUILD = """
import os, sys
from setuptools import build_meta
os.chdir(sys.argv[1])
getattr(build_meta, sys.argv[2])(sys.argv[3])
"""


def built(kind, source, folder):
    """A distribution made by pyproject.toml's build backend: an sdist or a wheel."""
    command = [sys.executable, "-c", BUILD, str(source), f"build_{kind}", str(folder)]
    subprocess.run(command, check=True, capture_output=True)
    (path,) = folder.iterdir()
    return path


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A copy of the project: a build leaves files beside what it builds."""
    copy = tmp_path_factory.mktemp("copy") / "project"
    names = [".*_cache", ".hypothesis", "__pycache__", *NOT_SHIPPED]
    return shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*names))


@pytest.fixture(scope="module")
def unpacked_sdist(sources, tmp_path_factory):
    files = {path.relative_to(sources) for path in sources.rglob("*") if path.is_file()}
    archive = built("sdist", sources, tmp_path_factory.mktemp("sdist"))
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    return folder / f"hoglib-{hog.__version__}", files


@pytest.fixture(scope="module")
def wheel(unpacked_sdist, tmp_path_factory):
    return built("wheel", unpacked_sdist[0], tmp_path_factory.mktemp("wheel"))


def test_the_source_distribution_is_the_whole_project(unpacked_sdist):
    folder, files = unpacked_sdist
    added = {Path("PKG-INFO"), Path("setup.cfg")}
    found = {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}
    assert {path for path in found if path.parts[0] != "hoglib.egg-info"} - added == files


def test_the_metadata_of_the_wheel_are_whole(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        found = message_from_bytes(archive.read(name))
    assert "verifies the second derivatives" in found.get_payload()
    assert not re.search(r"\]\((?!https?:)", found.get_payload())  # an index has no other file
    assert found["Version"] == hog.__version__
    assert found["License-Expression"] == "MIT"
    assert found["Requires-Python"] == ">=3.11"
    for key in ("Summary", "Author", "Keywords", "Description-Content-Type"):
        assert found[key]
    for key in ("Home-page", "Project-URL", "Download-URL"):  # until there is a home
        assert found[key] is None
    required = [text for text in found.get_all("Requires-Dist") if "extra ==" not in text]
    assert [re.split(r"[<>=]", text)[0] for text in required] == ["torch"]


def test_the_wheel_holds_hoglib_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert tops == {"hoglib", f"hoglib-{hog.__version__}.dist-info"}
    assert "hoglib/py.typed" in names
    sources = {str(p.relative_to(ROOT)) for p in (ROOT / "hoglib").rglob("*.py")}
    assert sources <= set(names)


HEAVY = [
    "lightning", "matplotlib", "scipy", "sklearn", "jsonargparse", "jax", "pytest", "tensorboard", "tqdm",
    "yaml", "pandas",
]  # fmt: skip
SELF_TEST = f"""
import runpy, sys
sys.path.insert(0, sys.argv[1])
sys.modules["numpy"] = None
import torch
before = set(sys.modules)
import hoglib
assert not set({HEAVY}) & (set(sys.modules) - before)
assert hoglib.__file__.startswith(sys.argv[1])
sys.modules.update({{name: None for name in {HEAVY}}})
from hoglib.cli.main import main
assert main(["check"]) == 0
runpy.run_path(sys.argv[2])
"""


def test_the_wheel_checks_itself_and_runs_the_readme_beside_torch_alone(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    readme = tmp_path / "readme.py"
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.S | re.M)
    readme.write_text("\n".join(blocks))
    variables = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "CXX": "no-compiler"}
    options = ["-W", "ignore:Failed to initialize NumPy", "-c", SELF_TEST]
    done = subprocess.run(
        [sys.executable, *options, str(tmp_path), str(readme)], cwd=tmp_path, env=os.environ | variables, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The installation is fine" in done.stdout


def test_no_file_names_the_machine_it_was_written_on():
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    names = tracked.stdout.splitlines() if tracked.returncode == 0 else []
    pattern = re.compile(r"/(home|root|work|opt|Users)/[a-z]")
    for name in names:
        path = ROOT / name
        if path.exists():
            assert not pattern.search(path.read_bytes().decode(errors="ignore")), name


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 130


def test_a_page_names_all_that_stands_at_the_top_of_the_package():
    known = (ROOT / "docs" / "code.md").read_text()
    plumbing = {"__init__.py", "__main__.py", "_version.py", "py.typed", "__pycache__"}
    for path in (ROOT / "hoglib").iterdir():
        assert path.name in plumbing or re.search(rf"hoglib/{path.name}\b", known), path.name


TEMPLATES = [p for p in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml") if p.name != "config.yml"]
# `make docs`, `make ${{ condition && 'test-full' || 'test' }} TORCH=${{ matrix.torch }}`
MAKE = re.compile(
    r"make (?:(?P<one>[\w-]+)|\$\{\{ .+ && '(?P<this>[\w-]+)' \|\| '(?P<that>[\w-]+)' \}\})"
    r"(?P<given>(?: [A-Z]+=\w*\$\{\{ matrix\.\w+ \}\})*)"
)


def test_the_hosted_ci_runs_targets_of_make_on_each_row_of_the_page_of_versions():
    yaml = pytest.importorskip("yaml")
    makefile = (ROOT / "Makefile").read_text()
    (path,) = (ROOT / ".github" / "workflows").iterdir()
    jobs = yaml.safe_load(path.read_text())["jobs"]
    steps = [step for job in jobs.values() for step in job["steps"]]
    for action in (step["uses"] for step in steps if "uses" in step):
        assert re.fullmatch(r"actions/[\w-]+@v\d+", action)
    runs = {step["run"]: MAKE.fullmatch(step["run"]) for step in steps if "run" in step}
    assert all(runs.values()), runs
    made = {name for run in runs.values() for name in run.group("one", "this", "that") if name}
    targets = set(re.findall(r"^([\w-]+):", makefile, re.M))
    assert {"lint", "test", "docs", "dist"} <= made <= targets
    given = {name for run in runs.values() for name in re.findall(r"(\w+)=", run["given"])}
    assert {"PYTHON", "TORCH"} == given <= set(re.findall(r"^(\w+) \?=", makefile, re.M))
    rows = versions.rows((ROOT / "docs" / "versions.md").read_text())
    listed = {(row.python.rpartition(".")[0], row.torch.partition("+")[0]) for row in rows}
    matrix = jobs["test"]["strategy"]["matrix"]["include"]
    assert {(one["python"], one["torch"]) for one in matrix} == listed


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_an_issue_has_the_environment(path):
    yaml = pytest.importorskip("yaml")
    fields = {field["id"]: field for field in yaml.safe_load(path.read_text())["body"]}
    assert fields["env"]["validations"]["required"]
    assert "hoglib env" in fields["env"]["attributes"]["description"]


def test_the_files_that_contributing_names_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    for name in re.findall(r"`((?:hoglib|tests|experiments|docs|configs)/[\w./]+)`", text):
        assert (ROOT / name).exists(), name


def test_a_name_of_a_package_that_is_looked_for_in_hoglib():
    assert hog.lightning.CurvatureMonitor
    with pytest.raises(AttributeError, match=r"wgan_gp'; it is `hoglib\.penalties\.wgan_gp`"):
        hog.wgan_gp  # noqa: B018
    with pytest.raises(AttributeError, match=r"no attribute 'nothing'$"):
        hog.nothing  # noqa: B018
    with pytest.raises(AttributeError, match=r"did you mean 'HessianOperator'\?$"):
        hog.HesianOperator  # noqa: B018
    assert tuple(hog.lightning.__all__) == hog._OF_LIGHTNING
    for name in hog._OF_LIGHTNING:
        with pytest.raises(AttributeError, match=rf"it is `hoglib\.lightning\.{name}`"):
            getattr(hog, name)


def test_lightning_that_is_not_installed_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "lightning", None)
    monkeypatch.delattr(hog, "lightning", raising=False)
    with pytest.raises(hog.errors.MissingDependencyError, match=r"lightning to be .* `pip install"):
        hog.lightning  # noqa: B018
