"""hoglib's own ops hold before `hog.verify`."""

import pytest
import torch

import hoglib as hog
from hoglib.testing.opinfo.catalogue import CATALOGUE

# What fails, and why that is as it should be.
EXPECTED = {
    "stop_gradient": "it has no derivative, by definition",
    "clip_gradient": "its second pass is clipped as well; see its docstring",
    "clipped_gradient_linear": "its second pass is clipped as well; see its docstring",
}


@pytest.mark.parametrize("op", CATALOGUE, ids=[op.name for op in CATALOGUE])
def test_the_op_is_right(op):
    for sample in op.samples[:2]:
        inputs = sample.make(torch.float64, torch.Generator().manual_seed(0))
        surrogate = "first derivative" in op.skips or getattr(op.function, "surrogate", False)

        def call(*given, options=sample.options):
            return op.function(*given, **options)

        report = hog.verify(call, inputs, surrogate=surrogate)
        if op.name not in EXPECTED:
            assert report.ok, str(report)
        if op.name in ("stop_gradient", "clipped_gradient_linear"):
            assert not report.ok
