"""Eigenvectors are determined up to a phase: their Functions are right for what depends on no phase."""

import pytest
import torch

import hoglib as hog
from tests.verification.faults import SavesExp
from tests.zoo.right import HermitianEigen, hermitian

F64 = torch.float64


class RealEigen(HermitianEigen):
    """Of a real symmetric matrix; the signs of the columns differ from one matrix to the next one,
    as those of an iterative solver do."""

    salt = 0

    @staticmethod
    def forward(ctx, a):
        w, v = torch.linalg.eigh((a + a.mT) / 2)
        w_scaled = 1e12 * w.sum() * torch.tensor([1.0, 1.3, 1.7]).to(w)
        v = v * (w_scaled + RealEigen.salt).sin().sgn()
        ctx.save_for_backward(w, v)
        return w, v

    backward = staticmethod(lambda ctx, gw, gv: HermitianEigen.backward(ctx, gw, gv)[0])


class RealWrongTurn(RealEigen):
    """The wrong sign, beside the arbitrary ones."""

    backward = staticmethod(lambda ctx, gw, gv: RealEigen.backward(ctx, gw, -gv))


class RealGapsSaved(RealEigen):
    """Right in the first order only."""

    @staticmethod
    def backward(ctx, gw, gv):
        w, v = ctx.saved_tensors
        return HermitianEigen.gradient(v, HermitianEigen.gaps(w.detach()), gw, gv)


def matrix():
    torch.manual_seed(1)
    return hermitian()[0].to(torch.complex128)


def test_the_report_says_that_phases_were_fixed():
    report = hog.verify(HermitianEigen, (matrix(),))
    assert report.ok
    assert "sign or a phase" in report["first derivative: phases"].text
    with pytest.raises(KeyError):
        hog.verify(torch.linalg.inv, (matrix(),))["first derivative: phases"]


@pytest.mark.parametrize("seed", range(2))
def test_signs_that_change_from_call_to_call_are_fixed(seed, monkeypatch):
    monkeypatch.setattr(RealEigen, "salt", seed)
    report = hog.verify(RealEigen, (matrix().real,))
    assert report["second derivative: reverse-over-reverse"].status == "pass", str(report)
    assert "sign or a phase" in report["first derivative: phases"].text


@pytest.mark.parametrize("seed", range(2))
def test_a_wrong_one_is_not_called_right_by_its_signs(seed, monkeypatch):
    monkeypatch.setattr(RealEigen, "salt", seed)
    report = hog.verify(RealGapsSaved, (matrix().real,))
    assert report["second derivative: reverse-over-reverse"].status == "fail"
    report = hog.verify(RealWrongTurn, (matrix().real,))
    assert ": right, by " not in str(
        report
    )  # no fixed phase makes differences and its gradient agree
    assert "output 1 nothing could be compared" in report["first derivative: reverse"].text
    assert all(row.status != "pass" for row in report if row.name.endswith(": reverse"))


def test_a_wrong_second_derivative_is_not_laid_to_signs():
    report = hog.verify(SavesExp, (matrix().real,))
    assert report["second derivative: reverse-over-reverse"].status == "fail"
    assert "first derivative: phases" not in [row.name for row in report]
