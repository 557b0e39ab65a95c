"""Stand-ins for losses: torch's values, errors and first gradients, and second derivatives in every mode."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import grad
from torch.testing import assert_close

import hoglib as hog
from tests.rows import rows

F64 = torch.float64
REDUCTIONS = ("none", "mean", "sum")


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Any = None,
    ignore_index: Any = None,
    **options: Any,
) -> Tensor:
    """Torch's, which releases before 2.13 lack, for one position."""
    z = F.linear(input, linear_weight, linear_bias)
    return F.cross_entropy(
        z, target, ignore_index=-100 if ignore_index is None else ignore_index, **options
    )


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=F64)


CLASSES = torch.tensor([1, 3, 0])
LISTS = torch.tensor([[1, -1, 0, 2], [2, 0, 3, 1], [1, 1, -1, 0], [-1, 0, 0, 0]])
PAIRS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "mse": (hog.ops.mse_loss, F.mse_loss),
    "huber": (hog.ops.huber_loss, F.huber_loss),
    "multi margin": (hog.ops.multi_margin_loss, F.multi_margin_loss),
    "multilabel margin": (hog.ops.multilabel_margin_loss, F.multilabel_margin_loss),
    "linear cross entropy": (hog.ops.linear_cross_entropy, linear_cross_entropy),
}
CASES: dict[str, tuple[str, Callable[[], tuple[Any, ...]], dict[str, Any]]] = {
    "mse": ("mse", lambda: (normal(3, 4), normal(3, 4)), {}),
    "mse weighted": ("mse", lambda: (normal(3, 4), normal(3, 4)), {"weight": torch.rand(3, 4, dtype=F64) + 1}),
    "huber": ("huber", lambda: (normal(3, 4), normal(3, 4)), {}),
    "huber with a small delta": ("huber", lambda: (normal(3, 4), normal(3, 4)), {"delta": 0.3}),
    "huber with any delta": ("huber", lambda: (normal(3, 4), normal(3, 4)), {"delta": float("inf")}),
    "huber weighted": ("huber", lambda: (normal(3, 4), normal(3, 4)), {"weight": torch.rand(3, 4, dtype=F64)}),
    "hinge": ("multi margin", lambda: (normal(3, 4), CLASSES), {}),
    "squared hinge": ("multi margin", lambda: (normal(3, 4), CLASSES), {"p": 2, "margin": 0.4}),
    "hinge with a negative margin": ("multi margin", lambda: (normal(3, 4), CLASSES), {"margin": -0.5}),
    "weighted hinge": ("multi margin", lambda: (normal(3, 4), CLASSES), {"p": 2, "weight": torch.rand(4, dtype=F64)}),
    "hinge of one row": ("multi margin", lambda: (normal(4), torch.tensor(2)), {}),
    "hinge of one row and one target": ("multi margin", lambda: (normal(4), torch.tensor([2])), {}),
    "hinge of several labels": ("multilabel margin", lambda: (normal(4, 4), LISTS), {}),
    "hinge of several labels, one row": ("multilabel margin", lambda: (normal(4), LISTS[1]), {}),
    "classes": ("linear cross entropy", lambda: (normal(3, 2), normal(4, 2), CLASSES), {}),
    "one class": ("linear cross entropy", lambda: (normal(2), normal(4, 2), torch.tensor(1)), {}),
    "biased": ("linear cross entropy", lambda: (normal(3, 2), normal(4, 2), CLASSES), {"linear_bias": normal(4)}),
    "smoothed": ("linear cross entropy", lambda: (normal(3, 2), normal(4, 2), CLASSES), {"label_smoothing": 0.2}),
    "ignored and weighted": ("linear cross entropy", lambda: (normal(3, 2), normal(4, 2), CLASSES), {"ignore_index": 3, "label_smoothing": 0.2, "weight": torch.rand(4, dtype=F64) + 0.1}),
    "probabilities": ("linear cross entropy", lambda: (normal(3, 2), normal(4, 2), normal(3, 4).softmax(1)), {"weight": torch.rand(4, dtype=F64)}),
    "smoothed probabilities": ("linear cross entropy", lambda: (normal(3, 2), normal(4, 2), normal(3, 4).softmax(1)), {"label_smoothing": 0.3}),
}  # fmt: skip


def floating(inputs: tuple[Any, ...]) -> list[int]:
    return [i for i, x in enumerate(inputs) if x.is_floating_point()]


def fixed(
    function: Callable[..., Tensor], inputs: tuple[Any, ...], **options: Any
) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """The function of those inputs that are not classes."""
    places = floating(inputs)

    def call(*tensors: Tensor) -> Tensor:
        given = list(inputs)
        for place, tensor in zip(places, tensors, strict=True):
            given[place] = tensor
        return function(*given, **options)

    return call, [inputs[i] for i in places]


@rows("reduction", REDUCTIONS)
@rows("case", CASES)
def test_values_and_first_derivatives_are_those_of_torch(case: str, reduction: str) -> None:
    pair, make, options = CASES[case]
    inputs = make()
    results = []
    for function in PAIRS[pair]:
        call, tensors = fixed(function, inputs, reduction=reduction, **options)
        leaves = [t.clone().requires_grad_() for t in tensors]
        value = call(*leaves)
        grads = grad((value * value.detach().cos()).sum(), leaves)
        results.append([value.detach(), *grads])
    assert_close(*results)
    # by forward mode, which takes another way where torch's reverse mode is right
    call, tensors = fixed(PAIRS[pair][0], inputs, reduction=reduction, **options)
    value, tangent = torch.func.jvp(call, tuple(tensors), tuple(t.cos() for t in tensors))
    assert_close(value, results[0][0])
    slope = sum((g * t.cos()).sum() for g, t in zip(results[0][1:], tensors, strict=True))
    assert_close((tangent * value.cos()).sum(), slope)


@rows("case", [name for name in CASES if name != "huber with any delta"])
def test_autocast(case: str) -> None:
    pair, make, options = CASES[case]
    inputs = tuple(x.to(torch.bfloat16) if x.is_floating_point() else x for x in make())
    narrow = {k: v.to(torch.bfloat16) if isinstance(v, Tensor) else v for k, v in options.items()}
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = (f(*inputs, **narrow) for f in PAIRS[pair])
        assert ours.dtype == theirs.dtype
        assert_close(ours, theirs, atol=2e-2, rtol=2e-2)
        call, tensors = fixed(PAIRS[pair][0], inputs, **narrow)
        value, _ = torch.func.jvp(call, tuple(tensors), tuple(tensors))
        assert value.dtype == theirs.dtype


TIES = {
    "hinge": ("multi margin", torch.tensor([[1.0, 0, 2, 0.5]]), (torch.tensor([0]),), {}),
    "squared hinge": ("multi margin", torch.tensor([[1.0, 0, 2, 0.5]]), (torch.tensor([0]),), {"p": 2}),
    "several labels": ("multilabel margin", torch.tensor([[1.0, 0, 2, 0]]), (torch.tensor([[0, 2, -1, 0]]),), {}),
    "huber": ("huber", torch.tensor([1.0, -1, 0, 2]), (torch.zeros(4),), {}),
    "mse": ("mse", torch.zeros(4), (torch.zeros(4),), {}),
}  # fmt: skip


@rows("name", TIES)
def test_first_derivatives_at_kinks_are_those_of_torch(name: str) -> None:
    pair, x, more, options = TIES[name]
    ours, theirs = (
        torch.func.grad(lambda x, f=f: f(x, *more, reduction="sum", **options))(x)
        for f in PAIRS[pair]
    )
    assert torch.equal(ours, theirs)
    hessian = torch.func.hessian(lambda x: PAIRS[pair][0](x, *more, **options))(x)
    assert hessian.isfinite().all()


def test_large_logits() -> None:
    z = torch.tensor([[1e4, -1e4, 0.0], [1e30, 0, -torch.inf]], dtype=F64)
    W, target = torch.eye(3, dtype=F64), torch.tensor([0, 1])
    x = z.nan_to_num(neginf=-1e30)
    with torch.autograd.forward_ad.dual_level():
        value = hog.ops.linear_cross_entropy(x, W, target, reduction="none")
    assert_close(value, torch.tensor([0, 1e30], dtype=F64))
    value, tangent = torch.func.jvp(
        lambda x: hog.ops.linear_cross_entropy(x, W, target, reduction="none"), (x,), (x.sign(),)
    )
    assert_close(tangent, torch.tensor([0, 1], dtype=F64))


@rows("pair", ["mse", "huber"])
def test_broadcasting_warns_as_torch_does(pair: str) -> None:
    a, b = normal(3, 1), normal(4)
    results = []
    for function in PAIRS[pair]:
        leaves = [a.clone().requires_grad_(), b.clone().requires_grad_()]
        with pytest.warns(UserWarning, match="different to the input size"):
            value = function(*leaves)
        results.append([value.detach(), *grad(value, leaves)])
    assert_close(*results)


@rows("legacy", [(True, None), (False, None), (None, False)], ids=str)
@rows("pair", ["mse", "multi margin", "multilabel margin"])
def test_legacy_reductions(pair: str, legacy: Any) -> None:
    inputs = {"mse": (normal(3, 4), normal(3, 4)), "multi margin": (normal(3, 4), CLASSES)}.get(
        pair, (normal(4, 4), LISTS)
    )
    values = []
    for function in PAIRS[pair]:
        with pytest.warns(UserWarning, match="please use reduction"):
            values.append(function(*inputs, size_average=legacy[0], reduce=legacy[1]))
    assert_close(*values)


@rows(
    "types", [(torch.float32, F64), (F64, torch.float32), (torch.bfloat16, torch.float32)], ids=str
)
@rows("pair", ["mse", "huber"])
def test_mixed_dtypes(pair: str, types: Any) -> None:
    a, b = normal(5).to(types[0]), normal(5).to(types[1])
    ours, theirs = (f(a, b) for f in PAIRS[pair])
    assert_close(ours, theirs, atol=1e-2, rtol=1e-2)  # dtypes too


@rows("reduction", ["mean", "sum"])
def test_the_hinge_loss_of_no_rows_is_zero(reduction: str) -> None:
    """torch's is memory that nobody wrote."""
    none = torch.ones(0, 4)
    assert hog.ops.multi_margin_loss(none, CLASSES[:0], reduction=reduction) == 0
    assert hog.ops.multilabel_margin_loss(none, LISTS[:0], reduction=reduction) == 0


WRONG = {
    "reduction": ("mse", (torch.ones(2), torch.ones(2), None, None, "average"), ValueError),
    "weight": ("mse", (torch.ones(2), torch.ones(2), None, None, "mean", torch.ones(3)), ValueError),
    "huber's reduction": ("huber", (torch.ones(2), torch.ones(2), "average"), ValueError),
    "huber's weight": ("huber", (torch.ones(2), torch.ones(2), "mean", 1.0, torch.ones(3)), ValueError),
    "delta": ("huber", (torch.ones(2), torch.ones(2), "mean", 0.0), RuntimeError),
    "p": ("multi margin", (torch.ones(3, 4), CLASSES, 3), ValueError),
    "dimensions of weight": ("multi margin", (torch.ones(3, 4), CLASSES, 1, 1.0, torch.ones(1, 4)), ValueError),
    "length of weight": ("multi margin", (torch.ones(3, 4), CLASSES, 1, 1.0, torch.ones(3)), RuntimeError),
    "rows": ("multi margin", (torch.ones(3, 4), CLASSES[:2]), RuntimeError),
    "class": ("multi margin", (torch.ones(3, 4), CLASSES + 1), RuntimeError),
    "negative class": ("multi margin", (torch.ones(3, 4), CLASSES - 1), RuntimeError),
    "dtype of class": ("multi margin", (torch.ones(3, 4), CLASSES.float()), RuntimeError),
    "no classes": ("multi margin", (torch.ones(3, 0), CLASSES), RuntimeError),
    "three dimensions": ("multi margin", (torch.ones(1, 3, 4), CLASSES[:1]), RuntimeError),
    "shape of labels": ("multilabel margin", (torch.ones(4, 4), LISTS[:, :3]), RuntimeError),
    "label": ("multilabel margin", (torch.ones(4, 4), LISTS + 2), RuntimeError),
    "label below -1": ("multilabel margin", (torch.ones(4, 4), LISTS - 1), RuntimeError),
    "no labels": ("multilabel margin", (torch.ones(4, 0), LISTS[:, :0]), RuntimeError),
    "features": ("linear cross entropy", (torch.ones(3, 2), torch.ones(4, 3), CLASSES), RuntimeError),
    "rows of logits": ("linear cross entropy", (torch.ones(3, 2), torch.ones(4, 2), CLASSES[:2]), ValueError),
}  # fmt: skip


@rows("name", WRONG)
def test_errors_are_those_of_torch(name: str) -> None:
    pair, inputs, kind = WRONG[name]
    for function in PAIRS[pair]:
        with pytest.raises(kind):
            function(*inputs)
    with torch.autograd.forward_ad.dual_level(), pytest.raises(kind):
        PAIRS[pair][0](*inputs)


def test_shapes_of_a_linear_cross_entropy() -> None:
    x, W = torch.ones(3, 2), torch.ones(4, 2)
    for arguments, options, words in (
        ((x[None], W, CLASSES), {}, "dimensionality 1 or 2"),
        ((x, W[0], CLASSES), {}, "dimensionality at least 2"),
        ((x, W, CLASSES), {"linear_bias": torch.ones(3)}, "linear_bias shape"),
        ((x[0], W[:, None], CLASSES), {}, "requires batched input"),
        ((x, W, torch.ones(3, 4)), {"ignore_index": 1}, "contains probabilities"),
    ):
        with pytest.raises(RuntimeError, match=words):
            hog.ops.linear_cross_entropy(*arguments, **options)
