"""The project as a package: public names, imports, versions, constraints, the wheel."""

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

import hoglib as hog
from hoglib._core import torch_version

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_public_names():
    assert hog.__all__ == [
        "MAML",
        "FisherOperator",
        "GGNOperator",
        "GradientPenalty",
        "Graph",
        "HessianOperator",
        "Report",
        "VerificationError",
        "__version__",
        "audit",
        "capture",
        "compile",
        "compiled_loss",
        "curvature",
        "errors",
        "fisher_vp",
        "functional_loss",
        "ggn",
        "ggn_vp",
        "graph",
        "hessian",
        "hvp",
        "laplacian",
        "meta",
        "nn",
        "ops",
        "penalties",
        "second_order",
        "testing",
        "trainable_params",
        "verify",
    ]
    assert hog.ops.__all__ == [
        "amax",
        "batch_norm",
        "bias_add",
        "cdist",
        "cholesky_inverse",
        "clamp",
        "clip_gradient",
        "clipped_gradient_linear",
        "conv1d",
        "conv2d",
        "conv3d",
        "ctc_loss",
        "define",
        "det",
        "embedding_bag",
        "exp",
        "external",
        "glu",
        "grid_sample",
        "hardsigmoid",
        "huber_loss",
        "index_reduce",
        "instance_norm",
        "layer_norm",
        "linear",
        "linear_act",
        "linear_cross_entropy",
        "logdet",
        "logsumexp",
        "matmul",
        "mean",
        "mse_loss",
        "mul",
        "multi_margin_loss",
        "multilabel_margin_loss",
        "pairwise_distance",
        "pdist",
        "power",
        "quadratic",
        "relu",
        "remat",
        "reverse_gradient",
        "scale_gradient",
        "scaled_activation",
        "scaled_dot_product_attention",
        "scatter_reduce",
        "segment_reduce",
        "sigmoid",
        "sinh",
        "slogdet",
        "smooth_l1",
        "soft_margin_loss",
        "softmax_cross_entropy",
        "solve",
        "solve_ex",
        "sparse_mm",
        "split_signs",
        "square",
        "stop_gradient",
        "straight_through",
        "sum",
        "swish",
        "tanh",
        "tensorsolve",
        "weight_norm",
    ]
    assert hog.nn.__all__ == [
        "ClipGradient",
        "CrossEntropyLoss",
        "GradientReversal",
        "Linear",
        "LinearAct",
        "LogSumExp",
        "Remat",
        "ScaleGradient",
        "Sigmoid",
        "SmoothL1Loss",
        "StraightThrough",
        "Swish",
        "Tanh",
    ]
    assert hog.curvature.__all__ == [
        "FisherOperator",
        "GGNOperator",
        "HessianOperator",
        "LinearOperator",
        "NewtonCG",
        "NewtonStep",
        "Spectrum",
        "cg",
        "eigsh",
        "fisher_vp",
        "ggn",
        "ggn_vp",
        "hessian",
        "hessian_spectrum",
        "hutchinson_diagonal",
        "hutchinson_frobenius",
        "hutchinson_trace",
        "hvp",
        "laplacian",
        "spectral_density",
        "xtrace",
    ]
    assert hog.meta.__all__ == [
        "IMAML",
        "MAML",
        "RULES",
        "GradientTransformation",
        "Hypergradient",
        "Learner",
        "Reptile",
        "Residual",
        "Shard",
        "adam",
        "adamw",
        "adapt",
        "hypergradient",
        "inner_step",
        "momentum",
        "multi_step_weights",
        "rmsprop",
        "sgd",
        "shard",
    ]
    for module in (hog, hog.ops, hog.nn, hog.meta, hog.curvature):
        for name in module.__all__:
            assert getattr(module, name) is not None


@pytest.mark.parametrize("module", [hog, hog.ops, hog.nn, hog.meta, hog.curvature])
def test_public_names_are_documented(module):
    for name in module.__all__:
        assert name == "__version__" or getattr(module, name).__doc__


def test_importing_hoglib_imports_nothing_heavier_than_torch():
    heavy = ("lightning", "matplotlib", "scipy", "sklearn", "jsonargparse", "jax", "pytest")
    code = (
        "import torch, sys; before = set(sys.modules); import hoglib; "
        f"print([m for m in {heavy} if m in sys.modules and m not in before])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_the_version_is_the_same_everywhere():
    assert f"version: {hog.__version__}" in (ROOT / "CITATION.cff").read_text()
    assert f"## {hog.__version__}" in (ROOT / "CHANGELOG.md").read_text()


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
    assert torch.startswith(f"torch>={oldest},")


def test_each_bound_has_a_reason():
    text = (ROOT / "pyproject.toml").read_text()
    for line in text.splitlines():
        if re.match(r'\s+"[\w\[\]-]+[><=]', line):
            assert "#" in line, line


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    source = tmp_path_factory.mktemp("source")  # a build leaves files beside what it builds
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(
        ROOT / "hoglib", source / "hoglib", ignore=shutil.ignore_patterns("__pycache__")
    )
    command = [
        sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation",
        "--disable-pip-version-check", "--wheel-dir", str(folder), str(source),
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)
    (path,) = folder.glob("*.whl")
    return path


def test_the_wheel_holds_hoglib_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert tops == {"hoglib", f"hoglib-{hog.__version__}.dist-info"}
    assert "hoglib/py.typed" in names
    sources = {str(p.relative_to(ROOT)) for p in (ROOT / "hoglib").rglob("*.py")}
    assert sources <= set(names)


def test_the_wheel_imports_with_torch_alone(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    blocked = "lightning matplotlib scipy sklearn jsonargparse tensorboard tqdm yaml"
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); "
        f"sys.modules.update({{name: None for name in {blocked.split()!r}}}); "
        "import hoglib, torch; x = torch.ones(2); "
        f"assert hoglib.__file__.startswith({str(tmp_path)!r}); "
        "print(hoglib.hvp(lambda p: p.pow(3).sum(), x, x)[1].tolist())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout.strip() == "[6.0, 6.0]", done.stderr


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
