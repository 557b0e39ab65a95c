"""The benchmark of Kronecker factors runs, and counts what it says."""

import subprocess
import sys

import pytest

from experiments.benchmarks import kfac


def test_each_part_prints_rows(capsys):
    kfac.main(["--smoke"])
    lines = capsys.readouterr().out.splitlines()
    for part in ("newton", "systems", "norms"):
        assert any(line.startswith(part) for line in lines)
    errors = [float(line.split("error ")[1]) for line in lines if line.startswith("norms")]
    assert max(errors) < 1e-5


def test_products_until_a_loss_and_the_loss_at_products():
    run = [kfac.Point(10, 3.0), kfac.Point(20, 2.0), kfac.Point(30, 1.0), kfac.Point(40, 0.5)]
    assert kfac.until(iter(run), 2.0, 35) == (20, 1.0)
    assert kfac.until(iter(run), 0.6, 20) == (40, 2.0)
    with pytest.raises(AssertionError, match="no end"):
        kfac.until(iter(run), 0.1, 35)


def test_the_benchmarks_import_no_lightning():
    """Which fails where curvlinops has brought its torchvision."""
    code = "import sys, experiments.benchmarks.__main__; print('lightning' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
