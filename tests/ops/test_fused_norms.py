"""Batch and layer norm in plain reverse mode, where their own Functions run torch's kernels."""

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from hoglib import ops
from hoglib.ops import _norms
from tests.rows import rows
from tests.tensors import BF16, F32, F64, randn


def norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    y = ops.batch_norm(x, None, None, weight, bias, True)
    assert not y.requires_grad or type(y.grad_fn).__name__ == "FusedNormBackward"
    return y


INPUTS = {
    "features": randn(5, 3),
    "signals": randn(3, 2, 4),
    "images": randn(2, 3, 2, 3),
    "channels last": randn(2, 3, 2, 3).contiguous(memory_format=torch.channels_last),
    "transposed": randn(3, 5).t(),
    "every second": randn(2, 3, 4, 2)[:, :, ::2],
    "volumes": randn(2, 2, 2, 1, 2),
}


def leaves(x: Tensor, wanted: Any = ("x", "weight", "bias")) -> dict[str, Tensor]:
    given = {"x": x.clone(), "weight": randn(x.shape[1]), "bias": randn(x.shape[1]) + 1}
    return {name: value.requires_grad_(name in wanted) for name, value in given.items()}


@rows("output", [0, 1, 2])
def test_one_of_the_gradients_alone(output: int) -> None:
    """Where only some of the three flow on, the others are no input of the second pass."""
    for x in (INPUTS["features"], INPUTS["images"]):
        given = leaves(x)

        def slope(*values: Tensor) -> Tensor:
            y = norm(*values)
            return torch.autograd.grad(y.sin().sum(), values, create_graph=True)[output]

        assert torch.autograd.gradcheck(slope, tuple(given.values()))
        assert torch.autograd.gradgradcheck(slope, tuple(given.values()))


@rows("layout", [torch.contiguous_format, torch.channels_last])
@rows("dtype", [F64, F32, BF16])
@rows("shape", [(6, 4, 2, 3), (4, 8, 17, 18)], ids=["small", "large"])
def test_it_is_as_right_as_torchs_at_second_order(
    shape: tuple[int, ...], dtype: torch.dtype, layout: torch.memory_format
) -> None:
    """Large images have statistics of their own making."""

    given = [value.to(dtype) for value in (randn(*shape), randn(shape[1]), randn(shape[1]) + 1)]

    def twice(function: Any, dtype: torch.dtype) -> list[Tensor]:
        x, w, b = (value.to(dtype).requires_grad_() for value in given)
        x = x.contiguous(memory_format=layout)
        running = [torch.zeros(shape[1], dtype=dtype), torch.ones(shape[1], dtype=dtype)]
        y = function(x, *running, w, b, True)
        grads = torch.autograd.grad(y.sin().sum(), (x, w, b), create_graph=True)
        second = torch.autograd.grad(sum(g.sin().sum() for g in grads), (x, w, b))
        return [value.detach() for value in (y, *grads, *second, *running)]

    exact = twice(F.batch_norm, F64)
    results = zip(twice(ops.batch_norm, dtype), twice(F.batch_norm, dtype), exact, strict=True)
    for ours, theirs, truth in results:
        assert ours.dtype == dtype
        errors = [float((value - truth).norm() / truth.norm()) for value in (ours, theirs)]
        assert errors[0] <= 2 * errors[1] + max(8 * torch.finfo(dtype).eps, 1e-9)


@rows("shape", [(4, 3), (4, 3, 60, 60)], ids=["features", "large"])
@rows("form", ["double", "a view"])
def test_running_statistics_of_any_form(shape: tuple[int, ...], form: str) -> None:
    x = randn(*shape, dtype=F32)
    theirs = [torch.zeros(3), torch.ones(3)]
    ours = [value.repeat_interleave(2)[::2] for value in theirs]
    if form == "double":
        x, theirs = x.double(), [value.double() for value in theirs]
        ours = [value.double().reshape(1, 3) for value in theirs]
    F.batch_norm(x, *theirs, training=True)
    ops.batch_norm(x, *ours, training=True)
    assert_close([value.reshape(3) for value in ours], theirs)


# What is freed, and what is not made.


@rows("order", [1, 2, 3])
def test_no_graph_outlives_its_results(order: int) -> None:
    given = tuple(leaves(INPUTS["images"]).values())
    gc.disable()  # reference counts alone must do
    try:
        x = given[0] * 1
        values: list[Tensor] = [norm(x, *given[1:])]
        for _ in range(order - 1):
            total = sum(value.sin().sum() for value in values)
            values = list(torch.autograd.grad(total, given, create_graph=True))
            del total
        seen = weakref.ref(x)
        del x
        assert seen() is not None
        del values
        assert seen() is None
    finally:
        gc.enable()


def test_the_first_gradient_alone_makes_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_norms.FusedNormGradient, "apply", None)
    given = tuple(leaves(INPUTS["images"]).values())
    assert len(torch.autograd.grad(norm(*given).sum(), given)) == 3


def test_zero_weights() -> None:
    x, w = INPUTS["features"].clone().requires_grad_(), torch.zeros(3, dtype=F64).requires_grad_()
    assert torch.autograd.gradgradcheck(norm, (x, w))


def test_layer_norm_runs_it_too() -> None:
    y = ops.layer_norm(randn(4, 3).requires_grad_(), (3,), randn(3))
    assert type(y.grad_fn).__name__ == "FusedNormBackward"
