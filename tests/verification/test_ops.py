"""hoglib's own ops hold before `hog.verify`."""

import pytest
import torch

import hoglib as hog
from tests.long_tail import all_but
from tests.ops.opinfo import CATALOGUE

# What fails, and why that is as it should be.
EXPECTED = {
    "stop_gradient": "it has no derivative, by definition",
    "clip_gradient": "its second pass is clipped as well; see its docstring",
    "clipped_gradient_linear": "its second pass is clipped as well; see its docstring",
}


# Of a theme verify sees one formula like another; that each is right, the matrix of ops shows.
OPS = {info.name: info for info in CATALOGUE}
FIRST = {info.theme: info.name for info in reversed(CATALOGUE)}
OWN = ("linear_cross_entropy", "huber_loss", "remat", "straight_through", *EXPECTED)


@pytest.mark.parametrize("name", all_but(lambda name: name in (*OWN, FIRST[OPS[name].theme]), OPS))
def test_the_op_is_right(name):
    """With one sample: differences for all of them are a matter of the ops' own tests."""
    info = OPS[name]
    for sample in info.samples[:1]:
        inputs = sample.make(torch.float64, torch.Generator().manual_seed(0))
        surrogate = "first derivative" in info.skips or getattr(info.op, "surrogate", False)

        def call(*given, options=sample.kwargs):
            return info.op(*given, **options)

        report = hog.verify(call, inputs, surrogate=surrogate)
        if info.name not in EXPECTED:
            assert report.ok, str(report)
        if info.name in ("stop_gradient", "clipped_gradient_linear"):
            assert not report.ok
