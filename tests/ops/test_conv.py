"""Convolutions of one, two and three dimensions against finite differences and torch's own."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.func import grad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from hoglib import ops
from tests.oracles import relative
from tests.refused import refused
from tests.tensors import F64 as DOUBLE
from tests.tensors import randn

# torch's own convolution, the reference, about an even kernel
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")

OURS = {1: ops.conv1d, 2: ops.conv2d, 3: ops.conv3d}
TORCHS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


OPTIONS: dict[str, Any] = {"stride": (2, 1), "padding": (1, 2), "dilation": (2, 1), "groups": 2}


def made(dtype: torch.dtype = DOUBLE) -> tuple[Callable[..., Tensor], Callable[..., Tensor], tuple[Tensor, ...]]:  # fmt: skip
    inputs = randn(1, 4, 5, 6).to(dtype), randn(2, 2, 2, 3).to(dtype), randn(2).to(dtype)
    return (
        lambda *args: ops.conv2d(*args, **OPTIONS),
        lambda *args: F.conv2d(*args, **OPTIONS),
        inputs,
    )


def requiring_grad(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(t.detach().clone().requires_grad_() for t in inputs)


def scalar(fn: Callable[..., Any]) -> Callable[..., Tensor]:
    return lambda *args: sum(leaf.tanh().sum() for leaf in pytree.tree_leaves(fn(*args)))


def test_autocast_is_that_of_torch() -> None:
    ours, torchs, inputs = made(torch.float32)
    inputs = requiring_grad(inputs)
    results = []
    for conv in (ours, torchs):
        with torch.autocast("cpu", torch.bfloat16):
            y = conv(*inputs)
        assert y.dtype == torch.bfloat16
        first = torch.autograd.grad(y.float().pow(2).sum(), inputs, create_graph=True)
        assert {g.dtype for g in first} == {torch.float32}
        results.append((y, first, torch.autograd.grad(sum(g.pow(2).sum() for g in first), inputs)))
    for ours_, torchs_ in zip(*results, strict=True):
        assert relative(ours_, torchs_) < 0.02
    for dtype in (DOUBLE, torch.complex64):
        x, weight = randn(1, 1, 3).to(dtype), randn(1, 1, 2).to(dtype)
        with torch.autocast("cpu", torch.bfloat16):
            torch.testing.assert_close(ops.conv1d(x, weight), F.conv1d(x, weight))


@settings(max_examples=60, deadline=None)
@given(data=st.data(), rank=st.integers(1, 3))
def test_any_geometry(data: st.DataObject, rank: int) -> None:
    def several(low: int, high: int) -> tuple[int, ...]:
        return tuple(data.draw(st.lists(st.integers(low, high), min_size=rank, max_size=rank)))

    kernel, image = several(1, 3), several(1, 6)
    groups, out, into = (data.draw(st.integers(1, n)) for n in (3, 2, 2))
    options: dict[str, Any] = {"dilation": several(1, 3), "groups": groups}
    options["padding"] = data.draw(st.sampled_from(["same", "valid", "numbers"]))
    if options["padding"] != "same":
        options["stride"] = several(1, 3)
    if options["padding"] == "numbers":
        options["padding"] = several(0, 3)
    reach = [d * (k - 1) + 1 for d, k in zip(options["dilation"], kernel, strict=True)]
    if options["padding"] != "same":
        pads = (0,) * rank if options["padding"] == "valid" else options["padding"]
        assume(all(n + 2 * p >= r for n, p, r in zip(image, pads, reach, strict=True)))
    x, weight = requiring_grad(
        (randn(2, into * groups, *image), randn(out * groups, into, *kernel))
    )
    results = []
    for conv in (OURS[rank], TORCHS[rank]):
        y = conv(x, weight, **options)
        first = torch.autograd.grad(y.tanh().sum(), [x, weight], create_graph=True)
        results.append(
            (y, first, torch.autograd.grad(sum(g.tanh().sum() for g in first), [x, weight]))
        )
    torch.testing.assert_close(*results, atol=1e-9, rtol=1e-8)


# Tracers.


def test_make_fx_records_a_second_derivative() -> None:
    ours, torchs, inputs = made()

    def second(conv: Callable[..., Tensor]) -> Callable[..., Any]:
        return grad(scalar(grad(scalar(conv), (0, 1))), (0, 1))

    graph = make_fx(second(ours))(*inputs)
    other = tuple(2 * t for t in inputs)
    torch.testing.assert_close(graph(*other), second(torchs)(*other))


# What is refused.

X, W = randn(1, 2, 4, 4), randn(3, 2, 2, 2)
REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "integers": (lambda: ops.conv2d(X.long(), W), TypeError, "x: expected a floating"),
    "an integer weight": (lambda: ops.conv2d(X, W.long()), TypeError, "weight: expected a fl"),
    "too few dimensions": (lambda: ops.conv2d(X[0, 0], W), ValueError, r"expected x \[N, C, H, W\]"),
    "the weight of another rank": (lambda: ops.conv3d(X, W), ValueError, r"conv3d: expected x \[N, C, D, H, W\]"),
    "other channels": (lambda: ops.conv2d(X, W, groups=2), ValueError, r"got x \(1, 2, 4, 4\), weight \(3, 2, 2, 2\) and groups=2"),
    "groups that do not divide": (lambda: ops.conv2d(X, W[:, :1], groups=2), ValueError, "a multiple of groups"),
    "another bias": (lambda: ops.conv2d(X, W, torch.ones(2, dtype=DOUBLE)), ValueError, r"bias \(2,\)"),
    "mixed dtypes": (lambda: ops.conv2d(X.float(), W), TypeError, "of one dtype, got x torch.float32"),
    "stride 0": (lambda: ops.conv2d(X, W, stride=0), ValueError, "stride: expected an integer of at least 1"),
    "a fraction": (lambda: ops.conv2d(X, W, dilation=1.5), TypeError, r"dilation: expected an integer"),
    "negative padding": (lambda: ops.conv2d(X, W, padding=(0, -1)), ValueError, r"padding\[1\]: expected .* at least 0"),
    "three strides for two dimensions": (lambda: ops.conv2d(X, W, stride=(1, 1, 1)), ValueError, r"stride: expected an integer or 2 of them, got \(1, 1, 1\)"),
    "an unknown padding": (lambda: ops.conv2d(X, W, padding="full"), ValueError, "padding: expected one of same, valid; got 'full'"),
    "same with a stride": (lambda: ops.conv2d(X, W, padding="same", stride=2), ValueError, "'same', which needs stride 1"),
    "a kernel that is too large": (lambda: ops.conv2d(X, W, dilation=4), ValueError, r"a kernel that fits .* dilation \(4, 4\)"),
}  # fmt: skip


test_errors_say_what_to_do = refused(REFUSED)
