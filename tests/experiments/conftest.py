import contextlib
import io
import shutil
from pathlib import Path

import pytest
import torch

from tests.experiments.command import run


@pytest.fixture
def pictures():
    """Pictures are drawn, which takes as long as the rest of a small run."""


@pytest.fixture
def in_an_empty_folder(tmp_path, monkeypatch, request):
    monkeypatch.chdir(tmp_path)
    if "pictures" not in request.fixturenames:
        monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda self, file: file.touch())
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def kept_runs():
    return {}


@pytest.fixture
def trained(in_an_empty_folder, kept_runs, tmp_path_factory, request):
    """trained(config, *options): what `fit` leaves in an empty folder, and what it printed. The first
    test trains, the others have a copy, under `into` in the place of "runs"."""

    def copied(config, *options, into="runs"):
        assert not list(Path().iterdir())
        drawn = "pictures" in request.fixturenames
        keys = [(config, *options, True), (config, *options, drawn)]  # with pictures it is as well
        found = next((kept_runs[key] for key in keys if key in kept_runs), None)
        if found is None:
            kept = tmp_path_factory.mktemp("kept") / "runs"
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                assert run("fit", "--config", config, *options) == 0
            shutil.copytree("runs", kept)
            shutil.rmtree("runs")
            found = kept_runs[keys[-1]] = kept, printed.getvalue()
        shutil.copytree(found[0], into)
        return found[1]

    return copied


@pytest.fixture
def own_caches(monkeypatch, tmp_path):
    """Benchmarks forget what was compiled; other tests of this process have their caches back."""
    for name in ("HOGLIB_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
