"""Eigenvectors are determined up to a phase: their Functions are right for what depends on no phase."""

import pytest
import torch
from torch.testing import assert_close

import hoglib as hog
from hoglib.verification.structures import gauges
from tests.verification.faults import GapsSaved, SavesExp
from tests.zoo.right import BothSides, HermitianEigen, hermitian

F64 = torch.float64


class WrongTurn(HermitianEigen):
    """The gradient by the eigenvectors has the wrong sign."""

    @staticmethod
    def backward(ctx, gw, gv):
        return HermitianEigen.backward(ctx, gw, -gv)


class OnePhase(BothSides):
    """V^H is returned with a phase of its own, that depends on A: what depends on both has a derivative
    by it, which backward neglects."""

    @staticmethod
    def forward(ctx, a):
        w, v, adjoint = BothSides.forward(ctx, a)
        return w, v, adjoint * (1j * w).exp()[..., None]


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

    @staticmethod
    def backward(ctx, gw, gv):
        return HermitianEigen.backward(ctx, gw, gv)[0]


class RealWrongTurn(RealEigen):
    """The wrong sign, beside the arbitrary ones."""

    @staticmethod
    def backward(ctx, gw, gv):
        return RealEigen.backward(ctx, gw, -gv)


class RealGapsSaved(RealEigen):
    """Right in the first order only."""

    @staticmethod
    def backward(ctx, gw, gv):
        w, v = ctx.saved_tensors
        return HermitianEigen.gradient(v, HermitianEigen.gaps(w.detach()), gw, gv)


def central_difference(function, x, h=1e-5):
    return (function(x + h) - function(x - h)) / (2 * h)


def matrix():
    torch.manual_seed(1)
    return hermitian()[0].to(torch.complex128)


def invariant(function, x):
    """Of the eigenvectors of a Hermitian matrix that is linear in x, without their phases."""
    a = matrix() + x * torch.eye(3).flip(0).to(torch.complex128)
    w, v = function.apply(a)[:2]
    return (v.abs().square() * w * torch.arange(1.0, 4.0, dtype=F64)[:, None]).sum()


@pytest.mark.parametrize("function", [HermitianEigen, BothSides])
def test_the_right_ones_are_right_by_differences(function):
    x = torch.tensor(0.3, dtype=F64)

    def slope(x):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(invariant(function, x), x, create_graph=True)[0], x

    g, leaf = slope(x)
    expected = central_difference(lambda y: invariant(function, y), x)
    assert_close(g.detach(), expected, rtol=1e-6, atol=1e-9)
    (second,) = torch.autograd.grad(g, leaf)
    assert_close(
        second, central_difference(lambda y: slope(y)[0].detach(), x), rtol=1e-6, atol=1e-8
    )


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
    assert ": right, by " not in str(report)  # no gauge makes differences and its gradient agree
    assert "output 1 nothing could be compared" in report["first derivative: reverse"].text
    assert all(row.status != "pass" for row in report if row.name.endswith(": reverse"))


def test_a_wrong_second_derivative_is_not_laid_to_signs():
    report = hog.verify(SavesExp, (matrix().real,))
    assert report["second derivative: reverse-over-reverse"].status == "fail"
    assert "first derivative: phases" not in [row.name for row in report]


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (WrongTurn, "first derivative"),
        (OnePhase, "first derivative"),
        (GapsSaved, "`gaps`, an intermediate"),
    ],
)
def test_a_wrong_one_stays_wrong(function, words):
    report = hog.verify(function, (matrix(),))
    assert not report.ok
    assert words in str(report)


def test_a_gauge_removes_the_phases_and_nothing_else():
    torch.manual_seed(0)
    v = torch.linalg.eigh(matrix())[1]
    phases = torch.polar(torch.ones(3, dtype=F64), torch.randn(3, dtype=F64))
    w = torch.arange(3.0, dtype=F64)
    fixes = list(gauges([w, v, v.mH]))
    assert len(fixes) == 4
    same = [
        all(torch.allclose(a, b) for a, b in zip(fix([w, v, v.mH]), fix([w, v * phases, (v * phases).mH]), strict=True))
        for fix in fixes
    ]  # fmt: skip
    assert same == [False, True, False, False]  # V by columns, V^H by rows
    for fix in fixes:
        assert_close(fix([w, v, v.mH])[1].abs(), v.abs())
    assert list(gauges([w])) == []
    assert list(gauges([v[:1]])) != []
