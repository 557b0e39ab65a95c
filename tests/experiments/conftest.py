import pytest
import torch


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


@pytest.fixture
def own_caches(monkeypatch, tmp_path):
    """Benchmarks forget what was compiled; other tests of this process have their caches back."""
    for name in ("HOGLIB_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
