"""Files for the commands."""

import sys

import pytest


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(*parts, name="mine.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(parts))
        return name

    yield write
    for name in [name for name in sys.modules if name.split(".")[0] in ("mine", "pack", "other")]:
        del sys.modules[name]
