"""ctc_loss against torch's own, and its derivatives where torch has none."""

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from hoglib import ops
from tests.ops.checks import REPLACES, refused_as_by_torch
from tests.refused import refused
from tests.rows import rows
from tests.tensors import F64
from tests.tensors import randn as scores

INF = torch.inf


LABELS = torch.tensor([[1, 2, 2], [3, 0, 9], [1, 1, -7]])  # what stands behind an end is not read
PADDED = (LABELS, (6, 4, 5), (3, 1, 2))
CASES: dict[str, tuple[Any, ...]] = {
    "padded": PADDED,
    "concatenated": (torch.tensor([1, 2, 2, 3, 1, 1]), *PADDED[1:]),
    "tensors of lengths": (LABELS, *map(torch.tensor, PADDED[1:])),
    "concatenated, tensors of lengths": (torch.tensor([1, 2, 2, 3, 1, 1]), *map(torch.tensor, PADDED[1:])),
    "short integers": (LABELS.int(), *(torch.tensor(x, dtype=torch.int32) for x in PADDED[1:])),
    "whole length": (torch.tensor([[1, 2], [3, 3], [2, 1]]), (6, 6, 6), (2, 2, 2)),
    "no labels at all": (LABELS[:, :0], (6, 4, 5), (0, 0, 0)),
    "no labels in a row": (LABELS, (6, 1, 5), (0, 0, 2)),
    "no steps in a row": (LABELS, (6, 0, 5), (1, 0, 2)),
    "as many steps as labels": (torch.tensor([[1, 2], [2, 1], [3, 1]]), (2, 3, 2), (2, 2, 2)),
    "blanks among the labels": (torch.tensor([[0, 1], [0, 2], [1, 3]]), (6, 6, 6), (2, 2, 2)),
}  # fmt: skip


def value_and_grad(function: Callable[..., Tensor], x: Tensor, *others: Any, **options: Any) -> Any:
    leaf = x.detach().requires_grad_()
    value = function(leaf, *others, **options)
    return value, torch.autograd.grad(value.sum(), leaf)[0]


@rows("name", CASES)
@rows("reduction", ["none", "mean", "sum"])
def test_values_and_gradients_are_torchs(name: str, reduction: str) -> None:
    x = scores(6, 3, 5).log_softmax(-1)
    ours, theirs = (
        value_and_grad(f, x, *CASES[name], reduction=reduction) for f in (ops.ctc_loss, F.ctc_loss)
    )
    assert_close(ours, theirs)


@rows("targets", [[1, 2], [[1, 2]]], ids=["one row", "a batch of one"])
@rows("reduction", ["none", "mean", "sum"])
def test_without_a_batch(targets: list[Any], reduction: str) -> None:
    x = scores(5, 4).log_softmax(-1)
    for lengths in (((5,), (2,)), (torch.tensor(5), torch.tensor(2))):
        ours, theirs = (
            value_and_grad(f, x, torch.tensor(targets), *lengths, reduction=reduction)
            for f in (ops.ctc_loss, F.ctc_loss)
        )
        assert ours[0].shape == ()
        assert_close(ours, theirs)


def test_a_long_sequence_keeps_its_digits() -> None:
    x = (20 * scores(300, 2, 30, dtype=torch.float32)).log_softmax(-1)
    labels = torch.randint(1, 30, (2, 60), generator=torch.Generator().manual_seed(0))
    value, grad = value_and_grad(ops.ctc_loss, x, labels, (300, 280), (60, 50))
    exact = value_and_grad(F.ctc_loss, x.double(), labels, (300, 280), (60, 50))
    assert_close((value.double(), grad.double()), exact, rtol=1e-6, atol=2e-6)


def test_unnormalised_scores_have_torchs_value() -> None:
    x = 300 * scores(4, 1, 3, dtype=torch.float32)
    others = (torch.tensor([[1]]), (4,), (1,))
    assert_close(ops.ctc_loss(x, *others), F.ctc_loss(x, *others))
    x = 2 * scores(4, 1, 3)  # the gradient is torch's there too
    assert_close(*(value_and_grad(f, x, *others) for f in (ops.ctc_loss, F.ctc_loss)))


# Derivatives.


def all_derivatives(
    function: Callable[[Tensor], Tensor], x: Tensor, orders: int = 3
) -> list[Tensor]:
    """By every nesting of reverse and forward."""
    results = []
    for order in range(1, orders + 1):
        for nesting in itertools.product((torch.func.jacrev, torch.func.jacfwd), repeat=order):
            derivative = function
            for transform in nesting:
                derivative = transform(derivative)
            results.append(derivative(x))
    return results


@rows("zero_infinity", [False, True])
def test_an_impossible_target_has_derivatives_zero(zero_infinity: bool) -> None:
    def losses(x: Tensor) -> Tensor:
        return ops.ctc_loss(
            x, torch.tensor([[1, 1], [1, 2]]), (2, 2), (2, 2), 0, "none", zero_infinity
        )  # fmt: skip

    x = scores(2, 2, 3).log_softmax(-1)
    assert losses(x)[0] == (0.0 if zero_infinity else INF)
    for derivative in all_derivatives(losses, x):
        assert not derivative[0].any()
        assert derivative[1].isfinite().all()
        assert derivative[1].any()


def test_a_class_that_cannot_be_has_derivatives_zero() -> None:
    x = scores(4, 1, 3).log_softmax(-1)
    x[1, 0, 1] = x[2, 0, 0] = -INF

    def loss(x: Tensor) -> Tensor:
        return ops.ctc_loss(x, torch.tensor([[1, 2]]), (4,), (2,))

    assert_close(loss(x), F.ctc_loss(x, torch.tensor([[1, 2]]), (4,), (2,)))
    nearly = x.clamp(min=-200)  # all is as for a class of probability e^-200
    for ours, near in zip(all_derivatives(loss, x), all_derivatives(loss, nearly), strict=True):
        assert ours.isfinite().all()
        assert_close(ours[..., 3, 0, :], near[..., 3, 0, :])
    (grad,) = torch.autograd.grad(loss(x.requires_grad_()), x)
    assert grad[1, 0, 1] == grad[2, 0, 0] == 0


@rows("junk", [-INF, INF, torch.nan])
def test_what_comes_after_the_end_is_not_read(junk: float) -> None:
    x = scores(4, 2, 3).log_softmax(-1)
    x[2:, 0] = junk

    def loss(x: Tensor) -> Tensor:
        return ops.ctc_loss(x, torch.tensor([[1, 2], [2, 2]]), (2, 4), (2, 2))

    assert loss(x).isfinite()
    for derivative in all_derivatives(loss, x, 2):
        assert derivative.isfinite().all()
        assert not derivative[..., 2:, 0, :].any()


# vmap, autocast, the compiler.


def test_vmap_over_scores_targets_and_lengths() -> None:
    x = torch.stack([scores(5, 2, 4), 2 * scores(5, 2, 4)]).log_softmax(-1)
    targets = torch.tensor([[[1, 2], [3, 3]], [[2, 1], [1, 3]]])
    steps, sizes = torch.tensor([[5, 4], [3, 5]]), torch.tensor([[2, 1], [0, 2]])
    gradient = torch.func.grad(ops.ctc_loss)
    ours = torch.func.vmap(gradient)(x, targets, steps, sizes)
    theirs = [
        value_and_grad(F.ctc_loss, *row)[1] for row in zip(x, targets, steps, sizes, strict=True)
    ]
    assert_close(ours, torch.stack(theirs))


@rows("dtype", [torch.bfloat16, torch.float32, F64], ids=str)
def test_autocast_gives_torchs_dtype(dtype: torch.dtype) -> None:
    x = scores(6, 3, 5, dtype=dtype).log_softmax(-1)
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = (value_and_grad(f, x, *PADDED) for f in (ops.ctc_loss, F.ctc_loss))
    assert ours[0].dtype == theirs[0].dtype
    assert_close(ours, theirs)


@rows("targets", [LABELS.clamp(0, 4), torch.tensor([1, 2, 2, 3, 1, 1])], ids=["padded", "flat"])
def test_one_graph_with_lengths_that_nobody_reads(targets: Tensor) -> None:
    torch._dynamo.reset()
    x = scores(6, 3, 5).log_softmax(-1)
    lengths = [torch.tensor(lengths) for lengths in PADDED[1:]]
    compiled = torch.compile(ops.ctc_loss, backend="eager", fullgraph=True)
    ours, theirs = (value_and_grad(f, x, targets, *lengths) for f in (compiled, F.ctc_loss))
    assert_close(ours, theirs)


def test_what_replaces_torchs_own_has_its_signature() -> None:
    x = scores(6, 3, 5).log_softmax(-1)
    for number in (0, 1, 2, 5):
        others = (*PADDED, 0, number, True)
        assert_close(REPLACES[torch.ctc_loss](x, *others), torch.ctc_loss(x, *others))
    assert_close(REPLACES[F.ctc_loss](x, *PADDED), F.ctc_loss(x, *PADDED))


# Errors: torch's own types, or ArgumentTypeError where that is one.


X = scores(4, 2, 5).log_softmax(-1)
T = torch.tensor([[1, 2], [2, 2]])
WRONG: dict[str, tuple[tuple[Any, ...], str]] = {
    "blank out of range": ((X, T, (4, 4), (2, 2), 5), "label range"),
    "one input length": ((X, T, (4,), (2, 2)), "batch_size"),
    "one target length": ((X, T, (4, 4), (2,)), "batch_size"),
    "too many steps": ((X, T, (5, 4), (2, 2)), "at most 4"),
    "steps below zero": ((X, T, torch.tensor([-1, 4]), torch.tensor([2, 2])), "at least 0"),
    "labels below zero": ((X, T, (4, 4), (-1, 2)), "at least 0"),
    "too many labels": ((X, T, (4, 4), (3, 2)), "targets|'targets'"),
    "too few labels": ((X, T.flatten(), (4, 4), (3, 2)), "to have size 5"),
    "labels left over": ((X, T.flatten(), (4, 4), (1, 2)), "to have size 3"),
    "no steps": ((X[:0], T, (0, 0), (0, 0)), "must not be empty"),
    "four dimensions": ((X[None], T, (4, 4), (2, 2)), "log_probs"),
    "targets of three dimensions": ((X, T[None], (4, 4), (2, 2)), "1 to 2 dimensions"),
    "one row of targets": ((X, T[:1], (4, 4), (2, 2)), "size"),
    "an unknown reduction": ((X, T, (4, 4), (2, 2), 0, "max"), "not a valid value"),
    "lengths of both kinds": ((X, T, torch.tensor([4, 4]), (2, 2)), "tuple"),
    "fractional lengths": ((X, T, torch.ones(2), torch.ones(2)), "must be integral"),
    "a number for a length": ((X[:, 0], T[0], 4, 2), "int"),
}  # fmt: skip


test_errors_are_torchs = refused_as_by_torch(ops.ctc_loss, F.ctc_loss, WRONG)
OWN = {  # torch names another dtype in half precision, by the device
    "half precision": (lambda: ops.ctc_loss(X.bfloat16(), T, (4, 4), (2, 2)), NotImplementedError, "float32 or float64"),
    **{f"label {k}": (lambda k=k: ops.ctc_loss(X, torch.full((2, 2), k), (4, 4), (2, 2)), RuntimeError, "out of bounds") for k in (5, -1)},
    **{str(d): (lambda d=d: ops.ctc_loss(X.to(d), T, (4, 4), (2, 2)), TypeError, "log_probs: expected") for d in (torch.int64, torch.complex128)},
}  # fmt: skip


test_errors_of_our_own = refused(OWN)
