"""Functions that compute in float32: what is wrong is found among many elements that do not matter."""

import math

import pytest
import torch
from torch.autograd import Function
from torch.testing import assert_close

import hoglib as hog
from tests.functions import by_saved, saving_inputs
from tests.rows import rows
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

    backward = by_saved(lambda g, x, w, z: LogPartition.gradient(x, w, z, g))

    @staticmethod
    def gradient(x, w, z, g):
        p = -g.float() * (x.float() @ w.float() - z).exp()
        return (p @ w.float().mT).to(x.dtype), (x.float().mT @ p).to(w.dtype)


class LogPartitionAgain(LogPartition):
    """Right: z is computed again."""

    backward = by_saved(lambda g, x, w, _: LogPartition.gradient(x, w, LogPartition.of(x, w), g))


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


class Transport(Function):
    """min <P, C> + <P, log P - 1> over plans P with uniform marginals, in float32; backward returns P."""

    @staticmethod
    def plan(c):
        c = c.float()
        f, g = torch.zeros(len(c)), torch.zeros(c.shape[1])
        for _ in range(15):
            f = -torch.logsumexp(g - c, 1) - math.log(len(f))
            g = -torch.logsumexp(f[:, None] - c, 0) - math.log(len(g))
        return (f[:, None] + g - c).exp()

    @staticmethod
    def forward(ctx, c):
        p = Transport.plan(c)
        ctx.save_for_backward(c)
        return (p * (c.float() + p.log() - 1)).sum().to(c.dtype)

    backward = by_saved(lambda g, c: g * Transport.plan(c).to(g.dtype))


class TransportSaved(Transport):
    @staticmethod
    def forward(ctx, c):
        ctx.save_for_backward(Transport.plan(c))
        return Transport.forward(type("", (), {"save_for_backward": lambda *_: None})(), c)

    backward = by_saved(lambda g, p: g * p.to(g.dtype))


SMALL_PARTS = {
    "a plan of transport and a square": (lambda f: lambda c: f.apply(c) + c.square().sum(), TransportSaved, Transport),
    "columns of fifty sizes": (lambda f: f.apply, SinesSaved, Sines),
    "columns, summed": (lambda f: lambda x: f.apply(x)[:, 1:].sum(1) + x[:, 0] ** 3, SinesSaved, Sines),
}  # fmt: skip


@rows(("seed", "dtype"), [(0, torch.float32), (1, torch.float64)])
@rows("name", SMALL_PARTS)
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
    report = hog.verify(
        lambda c: 1e-3 * TransportSaved.apply(c) + c.square().sum(), torch.rand(5, 4)
    )
    row = report["second derivative: of TransportSaved"]
    assert row.status == "warn"
    assert "`Transport.plan(c)`" in row.text
    assert "less than the noise of differences in float32" in row.text
    in_float32 = lambda c: 1e-3 * TransportSaved.apply(c.float()).double() + c.square().sum()  # noqa: E731
    report = hog.verify(in_float32, torch.rand(5, 4).double())
    assert report["second derivative: of TransportSaved"].status == "warn"
    right = hog.verify(lambda c: 1e-3 * Transport.apply(c) + c.square().sum(), torch.rand(5, 4))
    assert not any(one.name.startswith("second derivative: of") for one in right)


class Shaken(Function):
    """x^2 in float32, whose derivative is off by noise that is another one at each point."""

    forward = saving_inputs(lambda x: x.float().square().to(x.dtype))

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        noise = 2e-3 * (1e4 * x.detach()).sin()
        return (2 * g.float() * x.float() + noise.float()).to(g.dtype)


def test_noise_is_not_taken_for_a_fault():
    x = torch.rand(5, 4)
    report = hog.verify(Shaken, x + 0.5)  # of which it is little
    assert report["first derivative: reverse"].status == "pass"
    report = hog.verify(Shaken, x)  # among which there are small ones
    assert report["first derivative: reverse"].status == "warn"
    assert "their noise in this dtype is" in report["first derivative: reverse"].text


class ShakenPair(Function):
    """x^2 with the noise of Shaken, and exp(z) with a derivative that is 1% too large, in float32."""

    @staticmethod
    def forward(ctx, x, z):
        ctx.save_for_backward(x, z)
        return x.float().square().to(x.dtype), z.float().exp().to(z.dtype)

    @staticmethod
    def backward(ctx, g, h):
        x, z = ctx.saved_tensors
        return Shaken.backward(Of(x), g), (1.01 * h.float() * z.float().exp()).to(h.dtype)


class Of:
    def __init__(self, *tensors):
        self.saved_tensors = tensors


@pytest.mark.parametrize("seed", range(2))
def test_a_fault_by_one_input_is_told_beside_noise_by_another(seed):
    torch.manual_seed(seed)
    row = hog.verify(ShakenPair, (torch.rand(5, 4), torch.rand(5, 4)))["first derivative: reverse"]
    assert row.status == "fail"
    assert "by inputs[1] (`z`)" in row.text
    assert "by inputs[0]" not in row.text
