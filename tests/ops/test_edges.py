"""Where ops meet kinks, infinities and wrong arguments: torch's semantics, and errors that help."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

import hoglib as hog
from hoglib import ops
from hoglib._core.torch_api.torch_version import TORCH_VERSION
from tests.ops.matrix import F64, close
from tests.refused import refused
from tests.rows import rows

INF, NAN = math.inf, math.nan


def tensor(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=F64)


def three_orders(function: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    """Value and the first three derivatives, entry by entry, or summed over entries."""
    x = x.detach().requires_grad_()
    y, results = function(x), []
    for _ in range(4):
        results.append(y.detach())
        if not y.requires_grad:
            break
        (y,) = torch.autograd.grad(y.sum(), x, create_graph=True, allow_unused=True)
        if y is None:
            break
    return results + [torch.zeros_like(x)] * (4 - len(results))


AS_TORCH: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], Tensor]] = {
    **{
        f"power {n:g} at zero and below": (
            lambda x, n=n: ops.power(x, n),
            lambda x, n=n: torch.pow(x, n),
            tensor(0.0, -0.0, -1.5, 2.0, INF, NAN),
        )
        for n in (0, 1, 2, 3, -1, 0.5, 1.5, 2.5, -0.5)
    },
    "relu at zero and NaN": (ops.relu, torch.relu, tensor(0.0, -0.0, NAN, INF, -INF)),
    "clamp at its bounds": (
        lambda x: ops.clamp(x, min=-1, max=1),
        lambda x: x.clamp(-1, 1),
        tensor(-1.0, 1.0, 0.0, NAN, INF),
    ),
    "clamp with bounds crossed": (
        lambda x: ops.clamp(x, min=1, max=-1),
        lambda x: x.clamp(1, -1),
        tensor(-1.0, 1.0, 0.0),
    ),
    **{
        f"smooth_l1 at the seam of beta {beta:g}": (
            lambda x, beta=beta: ops.smooth_l1(x, torch.zeros_like(x), beta=beta),
            lambda x, beta=beta: F.smooth_l1_loss(x, torch.zeros_like(x), beta=beta, reduction="none"),
            tensor(0.0, 0.5, -0.5, 1.0, -1.0, 3.0, INF),
        )
        for beta in (0, 0.5, 1)
    },
    "amax of ties": (lambda x: ops.amax(x, 0), lambda x: x.amax(0), tensor(1.0, 2.0, 2.0, 2.0)),
    "amax of NaN": (lambda x: ops.amax(x, 0), lambda x: x.amax(0), tensor(1.0, NAN)),
    **{
        f"logsumexp of {values}": (
            lambda x: ops.logsumexp(x, 0),
            lambda x: torch.logsumexp(x, 0),
            tensor(*values),
        )
        for values in [(-INF, -INF), (-INF, 1.0), (INF, 1.0), (1e300, 1e300), (-800.0, -801.0)]
    },
    "logsumexp of nothing": (lambda x: ops.logsumexp(x, 0), lambda x: torch.logsumexp(x, 0), tensor()),
    "mean of nothing": (lambda x: ops.mean(x, 0), lambda x: x.mean(0), tensor()),
    "sum of nothing": (lambda x: ops.sum(x, 0), lambda x: x.sum(0), tensor()),
    "swish far out": (ops.swish, lambda x: F.silu(x), tensor(-900.0, 900.0, 0.0)),
    "split_signs at zero": (
        lambda x: ops.split_signs(x)[0] + 2 * ops.split_signs(x)[1],
        lambda x: torch.relu(x) + 2 * torch.relu(-x),
        tensor(0.0, -0.0, 2.0, -2.0),
    ),
}  # fmt: skip


if TORCH_VERSION >= (2, 14):  # whose slope at the bounds is 0, not 1
    del AS_TORCH["clamp at its bounds"]


@rows("name", AS_TORCH)
def test_edges_are_those_of_torch(name: str) -> None:
    ours, theirs, x = AS_TORCH[name]
    close(three_orders(ours, x), three_orders(theirs, x))


GATES = {
    "relu": ops.relu,
    "clamp": lambda x: ops.clamp(x, min=0),
    "split_signs": lambda x: ops.split_signs(x)[0],
    "scaled_activation": lambda x: ops.scaled_activation(x, scale=2.0, kind="relu"),
    "linear_act": lambda x: ops.relu(x),
}


@rows("name", GATES)
@rows("arrives", [INF, NAN], ids=["infinity", "NaN"])
def test_a_closed_gate_lets_nothing_through(name: str, arrives: float) -> None:
    x = tensor(-1.0).requires_grad_()
    (grad,) = torch.autograd.grad(GATES[name](x), x, tensor(arrives))
    assert grad.item() == 0


# Cross-entropy.


def test_cross_entropy_keeps_its_digits_for_large_logits() -> None:
    z = torch.tensor([[3000.0, 2999.0]], requires_grad=True)
    loss = ops.softmax_cross_entropy(z, torch.tensor([0]))
    (grad,) = torch.autograd.grad(loss, z)
    p = 1 / (1 + math.e)
    assert_close(loss.item(), math.log1p(math.exp(-1)), rtol=1e-6, atol=0)
    assert_close(grad, torch.tensor([[-p, p]]), rtol=1e-6, atol=0)


# Gradients that are not derivatives: each rule in closed form.


def test_second_derivatives_of_a_clipped_gradient() -> None:
    x, c = tensor(0.1, 0.2, 0.9), 1.0

    def f(x: Tensor) -> Tensor:
        return (ops.clip_gradient(x, bound=c) ** 3).sum()

    plain = torch.where(3 * x**2 <= c, 6 * x, 0)
    _, by_tangents = hog.hvp(f, x, torch.ones_like(x), mode="forward-over-reverse")
    _, by_gradients = hog.hvp(f, x, torch.ones_like(x), mode="reverse-over-reverse")
    assert_close(by_tangents, plain)
    assert_close(by_gradients, plain.clamp(-c, c))


@rows(
    "op",
    [ops.reverse_gradient, lambda x: ops.scale_gradient(x, scale=2),
     lambda x: ops.clip_gradient(x, bound=1)],
    ids=["reverse", "scale", "clip"],
)  # fmt: skip
def test_an_operation_in_place_behind_a_gradient_op_leaves_x_alone(op: Any) -> None:
    x = tensor(-1.0, 2.0).requires_grad_()
    F.relu(op(x), inplace=True).sum().backward()
    assert x.tolist() == [-1.0, 2.0]
    assert x.grad is not None


@rows("x", [INF, -INF, NAN])
def test_references_of_surrogates_keep_values_that_are_not_finite(x: float) -> None:
    compiled = torch.compile(
        lambda x: (ops.reverse_gradient(x), ops.clamp(x, max=1.0, straight_through=True)),
        backend="eager",
        fullgraph=True,
    )
    y, z = compiled(tensor(x))
    assert_close(y, tensor(x), equal_nan=True)
    assert_close(z, tensor(x).clamp(max=1.0), equal_nan=True)


# Autocast.


def test_products_run_in_the_autocast_dtype_and_losses_in_float32() -> None:
    a, b = torch.ones(2, 2, requires_grad=True), torch.ones(2, 2, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = ops.matmul(a, b)
        wide = ops.matmul(a.double(), b.double()), ops.linear(a.double(), b.double())
        loss = ops.softmax_cross_entropy(y, torch.tensor([0, 1]))
    assert (y.dtype, loss.dtype) == (torch.bfloat16, torch.float32)
    assert {v.dtype for v in wide} == {F64}
    grads = torch.autograd.grad(loss + y.float().sum(), (a, b))
    assert [g.dtype for g in grads] == [torch.float32] * 2


# Wrong arguments.

X = torch.ones(2, 3)
INTEGER = torch.ones(2, 3, dtype=torch.long)
OPTIONS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "power": ((2,), {}),
    "quadratic": ((1.0, 1.0, 1.0), {}),
    "scaled_activation": ((), {"scale": 1.0, "kind": "relu"}),
    "smooth_l1": ((X,), {}),
    "clamp": ((), {"min": 0}),
    "matmul": ((X.mT,), {}),
    "linear": ((X,), {}),
    "linear_act": ((X,), {}),
    "bias_add": ((X[0],), {}),
    "mul": ((X,), {}),
    "softmax_cross_entropy": ((torch.tensor([0, 1]),), {}),
    "scale_gradient": ((), {"scale": 1.0}),
    "clip_gradient": ((), {"bound": 1.0}),
    "clipped_gradient_linear": ((X,), {"bound": 1.0}),
    **{name: ((1,), {}) for name in ("sum", "mean", "amax", "logsumexp")},
}
UNARY = ["square", "exp", "sinh", "sigmoid", "tanh", "relu", "swish", "split_signs",
         "straight_through", "reverse_gradient", "stop_gradient"]  # fmt: skip


@rows("name", [*UNARY, *OPTIONS])
@rows("wrong", [INTEGER, [1.0, 2.0]], ids=["integers", "a list"])
def test_x_must_be_a_tensor_of_floating_point_numbers(name: str, wrong: Any) -> None:
    others, options = OPTIONS.get(name, ((), {}))
    getattr(ops, name)(X, *others, **options)
    with pytest.raises(TypeError, match="expected a"):
        getattr(ops, name)(wrong, *others, **options)


WRONG: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "power by a tensor": (lambda: ops.power(X, X), TypeError, "exponent: .*Python number"),
    "power by NaN": (lambda: ops.power(X, NAN), ValueError, "exponent"),
    "coefficient of integers": (lambda: ops.quadratic(X, INTEGER, 1, 1), TypeError, "a: .*a.float"),
    "coefficient of text": (lambda: ops.quadratic(X, 1, "b", 1), TypeError, "b: .*tensor or"),
    "clamp without bounds": (lambda: ops.clamp(X), ValueError, "min, max or both"),
    "clamp by NaN": (lambda: ops.clamp(X, min=NAN), ValueError, "min"),
    "clamp by a tensor": (lambda: ops.clamp(X, max=X), TypeError, "max: .*Python number"),
    "clamp half straight": (lambda: ops.clamp(X, max=1, straight_through=1), TypeError, "True or False"),
    "smooth_l1 beta": (lambda: ops.smooth_l1(X, X, beta=-1), ValueError, "beta.*at least 0"),
    "smooth_l1 target": (lambda: ops.smooth_l1(X, INTEGER), TypeError, "target"),
    "scaled_activation kind": (
        lambda: ops.scaled_activation(X, scale=1, kind="gelu"), ValueError, "relu, tanh; got 'gelu'"),
    "scaled_activation scale": (lambda: ops.scaled_activation(X, scale=X, kind="relu"), TypeError, "scale"),
    "straight_through kind": (lambda: ops.straight_through(X, kind="floor"), ValueError, "kind"),
    "scale of the gradient": (lambda: ops.scale_gradient(X, scale="1"), TypeError, "scale"),
    "bound below zero": (lambda: ops.clip_gradient(X, bound=-1.0), ValueError, "bound"),
    "activation": (lambda: ops.linear_act(X, X, act="gelu"), ValueError, "act"),
    "matmul shapes": (lambda: ops.matmul(X, X), ValueError, r"\(2, 3\) and b \(2, 3\)"),
    "matmul batches": (lambda: ops.matmul(torch.ones(2, 2, 2), torch.ones(3, 2, 2)), ValueError, "broadcast"),
    "matmul dtypes": (lambda: ops.matmul(X, X.double().mT), TypeError, "one dtype"),
    "matmul of a number": (lambda: ops.matmul(X, torch.tensor(1.0)), ValueError, "matmul"),
    "bias of another size": (lambda: ops.bias_add(X, torch.ones(2)), ValueError, r"\(3,\)"),
    "bias without a dimension": (lambda: ops.bias_add(X[0], X[0]), ValueError, "dim"),
    "dimension that is not there": (lambda: ops.sum(X, 2), IndexError, "from -2 to 1, got 2"),
    "dimension twice": (lambda: ops.mean(X, (0, -2)), ValueError, "each dimension once"),
    "dimension of text": (lambda: ops.logsumexp(X, "x"), TypeError, "an integer"),
    "keepdim": (lambda: ops.sum(X, 1, keepdim=1), TypeError, "True or False"),
    "maximum of nothing": (lambda: ops.amax(X[:0], 0), IndexError, "an empty dimension has no maximum"),
    "reduction": (lambda: ops.softmax_cross_entropy(X, X, reduction="batchmean"), ValueError, "reduction"),
    "label smoothing": (lambda: ops.softmax_cross_entropy(X, X, label_smoothing=1.5), ValueError, "from 0 to 1"),
    "target shape": (lambda: ops.softmax_cross_entropy(X, torch.zeros(3).long()), ValueError, "logits"),
    "target of probabilities for classes": (
        lambda: ops.softmax_cross_entropy(X, torch.zeros(2)), ValueError, "probabilities"),
    **{f"class {k}": (lambda k=k: ops.softmax_cross_entropy(X, torch.tensor([0, k])), IndexError, "expected classes from 0 to 2") for k in (3, -1)},
    "boolean target": (lambda: ops.softmax_cross_entropy(X, torch.zeros(2).bool()), TypeError, "target"),
}  # fmt: skip


test_wrong_arguments_are_explained = refused(WRONG)
