"""Functions that compute in float32: what is wrong is found among many elements that do not matter."""

import pytest
import torch
from torch.autograd import Function
from torch.testing import assert_close

import hoglib as hog

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


class Returned(LogPartition):
    """The same, returned in the dtype of the input."""

    @staticmethod
    def forward(ctx, x, w):
        return LogPartition.forward(ctx, x, w).to(x.dtype)


class LogPartitionAgain(LogPartition):
    """Right: z is computed again."""

    @staticmethod
    def backward(ctx, g):
        x, w, _ = ctx.saved_tensors
        return LogPartition.gradient(x, w, LogPartition.of(x, w), g)


def in_a_large_tensor(function):
    """Of [4, 15]: three columns are x, twelve numbers of the first row are W, and the rest is unused."""
    return lambda t: function.apply(t[:, :3], t[0, 3:].reshape(3, 4))


def relative_error(function, t):
    """Of the second derivative along a direction, by central differences in float64."""

    def gradient(t):
        t = t.detach().requires_grad_()
        with torch.enable_grad():
            (g,) = torch.autograd.grad(function(t).sum(), t, create_graph=True)
        return g, t

    v = torch.randn_like(t)
    g, leaf = gradient(t)
    (product,) = torch.autograd.grad(g, leaf, v)
    expected = (gradient(t + 1e-2 * v)[0] - gradient(t - 1e-2 * v)[0]).detach() / 2e-2
    return float((product - expected).norm() / expected.norm())


@pytest.mark.parametrize("function", [LogPartition, Returned])
@pytest.mark.parametrize("seed", range(4))
def test_what_is_wrong_fails_among_elements_that_are_zero(seed, function):
    torch.manual_seed(seed)
    t = torch.randn(4, 15, dtype=torch.float64)
    wrong, right = map(in_a_large_tensor, (function, LogPartitionAgain))
    assert relative_error(wrong, t) > 0.2
    assert relative_error(right, t) < 1e-3
    assert hog.verify(wrong, t)[ROW].status == "fail"
    report = hog.verify(right, t)
    assert report.ok
    assert report[ROW].status == "pass"
    assert_close(report[ROW].error, 0.0, atol=1e-3, rtol=0)
