"""`python -m experiments spectrum`: numbers of the dense Hessian, a picture, and what is refused."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

import hoglib as hog
from hoglib.curvature import hessian_spectrum
from tests.experiments.command import COMMAND_LINE, DRAWN, ROOT, run

MAML = ROOT / "configs/smoke/maml/sinusoid.yaml"
GAN = ROOT / "configs/smoke/gan/mixture.yaml"


def problem():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    batch = torch.randn(20, 3).double(), torch.randn(20, 2).double()
    return hog.functional_loss(net, F.mse_loss), hog.trainable_params(net), batch


def eigenvalues(loss, params, batch):
    return torch.linalg.eigvalsh(hog.HessianOperator(loss, params, batch).to_dense())


def test_the_numbers_are_those_of_the_dense_matrix():
    dense = eigenvalues(*problem())
    found = hessian_spectrum(*problem(), k=3, num_samples=40, steps=60)
    assert found.size == len(dense) == 38
    assert_close(found.smallest, dense[:3])
    assert_close(found.largest, dense[-3:])
    assert found.below == pytest.approx(-1e-3 * float(dense.abs().max()))
    for (value, error), exact in (
        (found.trace, dense.sum()),
        (found.negative, (dense < found.below).double().mean()),
    ):
        assert abs(value - float(exact)) < 4 * error
    H = hog.HessianOperator(*problem()).to_dense()
    spread = float((2 * (H - H.diag().diag()).square().sum() / 40).sqrt())  # of Hutchinson's mean
    assert spread / 2 < found.trace[1] < 2 * spread
    text = found.summary()
    assert text.index(f"{dense[-1]:.4g}") < text.index(f"{dense[-3]:.4g}")
    json.dumps(found.to_dict())
    assert f" to {dense[-1]:.4g}, trace {found.trace[0]:.4g} ± " in repr(found)
    assert len(repr(found.density)) < 120


class TestCommand:
    pytestmark = COMMAND_LINE

    @pytest.mark.parametrize("config", [MAML, GAN], ids=["maml", "gan"])
    @DRAWN
    def test_after_a_fit_it_is_in_the_folder_of_the_run(self, trained, config, capsys):
        trained(config)
        small = ("--k", "2", "--num_samples", "2", "--steps", "8")
        assert run("spectrum", "--config", config, *small) == 0
        out = capsys.readouterr().out
        (checkpoint,) = Path("runs").rglob("last.ckpt")
        folder = checkpoint.parent
        (name, numbers), *_ = json.loads((folder / "spectrum.json").read_text()).items()
        assert f"Hessian of {name}, {numbers['size']:,} parameters" in out
        assert f"{numbers['largest'][-1]:.4g}" in out
        assert (folder / "spectrum.png").stat().st_size > 5000
        assert str(folder / "spectrum.png") in out

    def test_what_is_wrong_is_told(self, trained, capsys):
        trained(MAML)
        for option, value in (("--k", "0"), ("--num_samples", "0"), ("--steps", "0")):
            assert run("spectrum", "--config", MAML, option, value) == 2
            assert "expected" in capsys.readouterr().err
