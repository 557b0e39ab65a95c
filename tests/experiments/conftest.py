import contextlib
import io
import os
import shutil
from hashlib import sha256
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
def kept_runs(tmp_path_factory):
    """The folder of what `trained` has trained, which all workers of pytest-xdist share."""
    own = tmp_path_factory.getbasetemp()
    return (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "kept"


@pytest.fixture
def trained(in_an_empty_folder, kept_runs, tmp_path_factory, request):
    """trained(config, *options): what `fit` leaves in an empty folder, and what it printed. The first
    test trains, the others have a copy, under `into` in the place of "runs"."""

    def copied(config, *options, into="runs"):
        assert not list(Path().iterdir())
        drawn = "pictures" in request.fixturenames
        places = [  # with pictures it is as well
            kept_runs / sha256(repr((str(config), options, pictures)).encode()).hexdigest()
            for pictures in (True, drawn)
        ]
        found = next((place for place in places if place.exists()), places[-1])
        if not found.exists():
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                assert run("fit", "--config", config, *options) == 0
            made = tmp_path_factory.mktemp("kept")
            shutil.move("runs", made / "runs")
            (made / "printed").write_text(printed.getvalue())
            kept_runs.mkdir(exist_ok=True)
            with contextlib.suppress(OSError):  # another worker was first
                made.rename(found)
        shutil.copytree(found / "runs", into)
        return (found / "printed").read_text()

    return copied


@pytest.fixture
def own_caches(monkeypatch, tmp_path):
    """Benchmarks forget what was compiled; other tests of this process have their caches back."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
