"""The tests that need a GPU, on the simulated one: in a process of its own, which installs it first."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="a GPU is there, on which they run by themselves"
)
@pytest.mark.skipif(
    torch.version.cuda is not None, reason="the simulated GPU needs a torch for the CPU"
)
@pytest.mark.skipif(shutil.which("g++") is None, reason="the simulated GPU is built by g++")
def test_the_tests_of_a_gpu_pass_on_the_simulated_one():
    files = [
        path for path in Path(__file__).parent.rglob("test_*.py") if "mark.gpu" in path.read_text()
    ]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "tests.device.plugin", "-p", "no:cacheprovider", "-q",
         "-m", "gpu and not full", *files],
        cwd=Path(__file__).parents[1], capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
