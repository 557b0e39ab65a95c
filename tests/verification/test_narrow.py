"""Functions that compute in float32: what is wrong is found among many elements that do not matter."""

import itertools

import pytest
import torch
from torch.autograd import Function
from torch.testing import assert_close

import hoglib as hog
from tests.long_tail import all_but
from tests.verification.faults import Sines, SinesSaved

ROW = "second derivative: reverse-over-reverse"


class LogPartition(Function):
    """-z, z = log sum exp(x W) in float32; backward takes z from forward."""

    @staticmethod
    def forward(ctx, x, w):
        z = LogPartition.of(x, w)
        ctx.save_for_backward(x, w, z)
        return -z

    @staticmethod
    def of(x, w):
        return (x.float() @ w.float()).logsumexp(1, keepdim=True)

    @staticmethod
    def backward(ctx, g):
        x, w, z = ctx.saved_tensors
        return LogPartition.gradient(x, w, z, g)

    @staticmethod
    def gradient(x, w, z, g):
        p = -g.float() * (x.float() @ w.float() - z).exp()
        return (p @ w.float().mT).to(x.dtype), (x.float().mT @ p).to(w.dtype)


class LogPartitionAgain(LogPartition):
    """Right: z is computed again."""

    @staticmethod
    def backward(ctx, g):
        x, w, _ = ctx.saved_tensors
        return LogPartition.gradient(x, w, LogPartition.of(x, w), g)


def in_a_large_tensor(function):
    """Of [4, 15]: three columns are x, twelve numbers of the first row are W, and the rest is unused."""
    return lambda t: function.apply(t[:, :3], t[0, 3:].reshape(3, 4))


@pytest.mark.parametrize("seed", range(4))
def test_what_is_wrong_fails_among_elements_that_are_zero(seed):
    torch.manual_seed(seed)
    t = torch.randn(4, 15, dtype=torch.float64)
    wrong, right = map(in_a_large_tensor, (LogPartition, LogPartitionAgain))
    assert hog.verify(wrong, t)[ROW].status == "fail"
    report = hog.verify(right, t)
    assert report.ok
    assert report[ROW].status == "pass"
    assert_close(report[ROW].error, 0.0, atol=1e-3, rtol=0)


SMALL_PARTS = {
    "columns of fifty sizes": (lambda f: f.apply, SinesSaved, Sines),
    "columns, summed": (
        lambda f: lambda x: f.apply(x)[:, 1:].sum(1) + x[:, 0] ** 3, SinesSaved, Sines
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("seed", "name", "dtype"),
    all_but(  # each part in each dtype, and at each seed
        lambda seed, name, dtype: (seed == 1) == (dtype == torch.float64),
        itertools.product(range(3), SMALL_PARTS, [torch.float32, torch.float64]),
    ),
)
def test_a_wrong_part_that_is_small_beside_the_others_is_not_right(seed, name, dtype):
    make, wrong, right = SMALL_PARTS[name]
    torch.manual_seed(seed)
    x = torch.rand(5, 3, dtype=dtype)
    report = hog.verify(make(wrong), x)
    assert report[ROW].status == "fail", report
    report = hog.verify(make(right), x)
    assert not report.failed, report
    assert report[ROW].status == "pass"


def test_a_part_that_is_less_than_the_noise_is_told_by_the_function_alone():
    torch.manual_seed(0)
    x = torch.rand(5, 3)
    report = hog.verify(lambda x: 1e-3 * SinesSaved.apply(x).sum(1) + x.square().sum(), x)
    row = report["second derivative: of SinesSaved"]
    assert row.status == "warn"
    assert "ctx.last" in row.text
    assert "less than the noise of differences in float32" in row.text
    right = hog.verify(lambda x: 1e-3 * Sines.apply(x).sum(1) + x.square().sum(), x)
    assert not any(one.name.startswith("second derivative: of") for one in right)


class Shaken(Function):
    """x^2 in float32, whose derivative is off by noise that is another one at each point."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.float().square().to(x.dtype)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        noise = 2e-3 * (1e4 * x.detach()).sin()
        return (2 * g.float() * x.float() + noise.float()).to(g.dtype)


def test_noise_is_not_taken_for_a_fault():
    torch.manual_seed(0)
    x = torch.rand(5, 4)
    report = hog.verify(Shaken, x + 0.5)  # of which it is little
    assert report["first derivative: reverse"].status == "pass"
    report = hog.verify(Shaken, x)  # among which there are small ones
    assert report["first derivative: reverse"].status == "warn"
    assert "their noise in this dtype is" in report["first derivative: reverse"].text
