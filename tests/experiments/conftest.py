import pytest
import torch


@pytest.fixture
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def own_caches(monkeypatch, tmp_path):
    """Benchmarks forget what was compiled; other tests of this process have their caches back."""
    for name in ("HOGLIB_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
