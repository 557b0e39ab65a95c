"""Layer, batch, instance and weight norm against torch's own, and their derivatives in every mode."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.testing import assert_close

import hoglib as hog
from hoglib import ops
from hoglib.ops._stand_in import TABLE
from tests.ops.checks import MODES, REPLACES
from tests.rows import rows
from tests.tensors import BF16, F32, F64, randn


def layer(x: Tensor, **options: Any) -> tuple[Any, ...]:
    return F.layer_norm, ops.layer_norm, (x, x.shape[-1:]), options


def batch(x: Tensor, **options: Any) -> tuple[Any, ...]:
    return F.batch_norm, ops.batch_norm, (x, None, None), {"training": True, **options}


def instance(x: Tensor, **options: Any) -> tuple[Any, ...]:
    return F.instance_norm, ops.instance_norm, (x,), options


def weight(v: Tensor, g: Tensor, dim: int) -> tuple[Any, ...]:
    return torch._weight_norm, ops.weight_norm, (v, g, dim), {}


def statistics(channels: int, dtype: torch.dtype = F64) -> dict[str, Tensor]:
    return {
        "running_mean": torch.linspace(-1, 1, channels, dtype=dtype),
        "running_var": torch.linspace(0.5, 2, channels, dtype=dtype),
    }


def evaluation(function: str, x: Tensor, **options: Any) -> tuple[Any, ...]:
    return getattr(F, function), getattr(ops, function), (x,), {**statistics(x.shape[1]), **options}


OPTIONS = {
    "layer": layer(randn(3, 4), weight=randn(4), bias=randn(4)),
    "layer, no eps": layer(randn(3, 4), eps=0.0),
    "layer of one number": layer(randn(3, 1), bias=randn(1)),
    "layer, one row": layer(randn(5), weight=randn(5), bias=randn(5)),
    "layer, strided": layer(randn(4, 3).t(), weight=randn(4)),
    "batch": batch(randn(4, 3), weight=randn(3), bias=randn(3)),
    "batch of images": batch(randn(2, 3, 2, 2), weight=randn(3), bias=randn(3)),
    "batch of one image": batch(randn(1, 3, 2, 2)),
    "batch, channels last": batch(
        randn(2, 3, 2, 2).contiguous(memory_format=torch.channels_last), weight=randn(3), bias=randn(3),
    ),
    "batch, evaluation": evaluation("batch_norm", randn(2, 3, 2), weight=randn(3), bias=randn(3)),
    "batch, evaluation, bias alone": evaluation("batch_norm", randn(2, 3), bias=randn(3)),
    "instance": instance(randn(2, 3, 4), weight=randn(3), bias=randn(3)),
    "instance, no eps": instance(randn(2, 3, 4), eps=0.0),
    "instance, evaluation": evaluation("instance_norm", randn(2, 3, 2), weight=randn(3), use_input_stats=False),
    "weight, first dimension": weight(randn(3, 4), randn(3, 1), 0),
    "weight, middle from the end": weight(randn(3, 2, 4), randn(1, 2, 1), -2),
    "weight, lengths as a list": weight(randn(3, 4), randn(3), 0),
    "weight of a vector": weight(randn(4), randn(4), 0),
}  # fmt: skip
each_option = rows("case", OPTIONS.values(), ids=OPTIONS)


def bound(function: Any, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, list[Tensor]]:  # fmt: skip
    """The function of its differentiable tensors, and these."""
    keys = [*range(len(args)), *options]
    values = dict(zip(keys, [*args, *options.values()], strict=True))
    places = [k for k in keys if isinstance(values[k], Tensor) and not str(k).startswith("running")]

    def call(*tensors: Tensor) -> Tensor:
        now = {**values, **dict(zip(places, tensors, strict=True))}
        return function(*[now[i] for i in range(len(args))], **{k: now[k] for k in options})

    return call, [values[k] for k in places]


def gradients(function: Callable[..., Tensor], tensors: list[Tensor]) -> list[Tensor]:
    leaves = [t.detach().requires_grad_() for t in tensors]
    y = function(*leaves)
    cotangent = torch.linspace(-1, 2, y.numel(), dtype=F64).reshape(y.shape).sin().to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, leaves, cotangent)]


@each_option
def test_values_and_gradients_are_torchs(case: tuple[Any, ...]) -> None:
    theirs, ours, args, options = case
    reference, tensors = bound(theirs, args, options)
    function, _ = bound(ours, args, options)
    assert_close(gradients(function, tensors), gradients(reference, tensors), rtol=1e-9, atol=1e-9)
    y, z = function(*tensors), reference(*tensors)
    strides = [[s for s, n in zip(t.stride(), t.shape, strict=True) if n > 1] for t in (y, z)]
    assert strides[0] == strides[1]


# Beside those of the matrix.
MORE = (
    "layer, no eps", "layer of one number", "batch of one image", "batch, channels last", "instance, no eps",
    "weight, middle from the end", "weight, lengths as a list",
)  # fmt: skip


@rows("name", MORE)
def test_derivatives_are_right_in_every_mode(name: str) -> None:
    _, ours, args, options = OPTIONS[name]
    function, tensors = bound(ours, args, options)
    hog.verify(function, tensors, orders=2, modes=MODES, raise_exception=True)


# Forward mode without torch.func, where the fused kernel has no rule.


@each_option
def test_a_dual_level_around_a_plain_backward(case: tuple[Any, ...]) -> None:
    _, ours, args, options = case
    function, tensors = bound(ours, args, options)
    tangents = [t.sin() for t in tensors]
    with forward_ad.dual_level():
        leaves = [t.detach().clone().requires_grad_() for t in tensors]
        duals = [forward_ad.make_dual(x, t) for x, t in zip(leaves, tangents, strict=True)]
        grads = torch.autograd.grad(function(*duals).sin().sum(), duals)
        slopes = [forward_ad.unpack_dual(g).tangent for g in grads]
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    grads = torch.autograd.grad(function(*leaves).sin().sum(), leaves, create_graph=True)
    inner = sum((g * t).sum() for g, t in zip(grads, tangents, strict=True))
    for slope, product in zip(slopes, torch.autograd.grad(inner, leaves), strict=True):
        assert_close(torch.zeros_like(product) if slope is None else slope, product)


# Singular points.


def finite_at_every_order(function: Callable[..., Tensor], tensors: list[Tensor]) -> list[Tensor]:
    """The first gradients; NaN nowhere up to the third, in both modes."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    level = function(*leaves)
    orders = []
    for _ in range(3):
        scalar = level.sum() + (level**2).sum()
        grads = torch.autograd.grad(scalar, leaves, create_graph=True, materialize_grads=True)
        assert all(g.isfinite().all() for g in grads)
        orders.append(grads)
        level = sum(g.sin().sum() for g in grads) + 0 * leaves[0].sum()
    tangents = tuple(torch.ones_like(t) for t in tensors)

    def slope(*inputs: Tensor) -> Tensor:
        return torch.func.jvp(function, inputs, tangents)[1]

    assert slope(*tensors).isfinite().all()
    assert torch.func.jvp(slope, tuple(tensors), tangents)[1].isfinite().all()
    return [g.detach() for g in orders[0]]


def test_a_direction_of_zero_has_no_weight_and_no_derivative() -> None:
    v = randn(3, 4)
    v[1] = 0
    for dim, g in ((0, randn(3, 1)), (1, randn(1, 4)), (-1, randn())):
        direction = v if dim == 0 else torch.zeros_like(v)
        w = ops.weight_norm(direction, g, dim)
        assert not w[1].any()
        assert w.isfinite().all()
        dv, dg = finite_at_every_order(lambda v, g, d=dim: ops.weight_norm(v, g, d), [direction, g])
        assert not dv[1].any()
        assert not dg.reshape(-1)[1 if dim == 0 else 0].any()


@rows("eps", [1e-5, 0.0])
def test_constant_rows(eps: float) -> None:
    """Where torch gives NaN, for an eps of 0 in layer norm, the value is NaN and the derivative is 0."""
    x = torch.tensor([[2.0, 2.0, 2.0], [1.0, 3.0, -1.0]], dtype=F64)
    y = ops.layer_norm(x, (3,), eps=eps)
    assert_close(y, F.layer_norm(x, (3,), eps=eps), equal_nan=True)
    if eps == 0:
        leaf = x.clone().requires_grad_()
        (g,) = torch.autograd.grad(ops.layer_norm(leaf, (3,), eps=eps)[:, :2].sum(), leaf)
        assert not g[0].any()
        assert g[1].any()
    z = x[None]
    y = ops.instance_norm(z, eps=eps)
    assert_close(y, F.instance_norm(z, eps=eps))
    finite_at_every_order(lambda z: ops.instance_norm(z, eps=eps), [z])


def test_a_constant_channel_of_a_batch_without_eps() -> None:
    x = torch.tensor([[2.0, 1.0], [2.0, 3.0]], dtype=F64)

    def ours(x: Tensor) -> Tensor:
        return REPLACES[torch.batch_norm](x, None, None, None, None, True, 0.1, 0.0, True)

    theirs = torch.batch_norm(x, None, None, None, None, True, 0.1, 0.0, True)
    assert_close(ours(x), theirs)
    (g,) = finite_at_every_order(ours, [x])
    assert not g[:, 0].any()


def test_nan_stays_nan() -> None:
    x = torch.tensor([[float("nan"), 1.0, 2.0], [0.0, 1.0, 2.0]])
    assert ops.layer_norm(x, (3,), eps=0.0)[0].isnan().all()
    assert ops.instance_norm(x[None], eps=0.0)[0, 0].isnan().all()
    assert ops.weight_norm(x, torch.ones(2, 1))[0].isnan().all()


@rows("offset", [1e2, 1e4])
@rows("name", ["layer", "batch of images", "instance"])
def test_large_means_cost_no_more_digits_than_torchs(name: str, offset: float) -> None:
    theirs, ours, args, options = OPTIONS[name]
    x = randn(4, 3, 64, 1).squeeze(-1) if name != "layer" else randn(8, 4)
    x = (x + offset).float()
    exact = gradients(lambda x: theirs(x, *args[1:], **options), [x.double()])
    narrow = {k: v.float() if isinstance(v, Tensor) else v for k, v in options.items()}
    errors = [
        max(
            float((a - b).abs().max() / b.abs().max())
            for a, b in zip(gradients(lambda x, f=f: f(x, *args[1:], **narrow), [x]), exact, strict=True)
        )
        for f in (ours, theirs)
    ]  # fmt: skip
    assert errors[0] <= 8 * errors[1] + 1e-6


# Running statistics.


@rows("name", ["batch_norm", "instance_norm"])
@rows("momentum", [0.1, 0.0, 1.0])
@rows("dtype", [F64, F32])
def test_running_statistics_run_as_torchs(name: str, momentum: float, dtype: torch.dtype) -> None:
    x = randn(3, 2, 4, dtype=dtype).requires_grad_()
    results = []
    for module in (F, ops):
        running = statistics(2, dtype)
        flag = {"training": True} if name == "batch_norm" else {"use_input_stats": True}
        y = getattr(module, name)(x, **running, **flag, momentum=momentum)
        assert not any(value.requires_grad for value in running.values())
        results.append((y, running))
    assert_close(*results)


def test_running_statistics_take_no_tangents() -> None:
    running = statistics(2)
    with forward_ad.dual_level():
        x = forward_ad.make_dual(randn(4, 2), randn(4, 2).sin())
        ops.batch_norm(x, **running, training=True)
        assert forward_ad.unpack_dual(running["running_mean"]).tangent is None
    assert_close(
        running["running_mean"], 0.9 * statistics(2)["running_mean"] + 0.1 * randn(4, 2).mean(0)
    )


@rows("name", ["batch_norm", "instance_norm"])
def test_transforms_leave_running_statistics_alone(name: str) -> None:
    running = statistics(2)
    flag = {"training": True} if name == "batch_norm" else {}

    def f(x: Tensor) -> Tensor:
        return getattr(ops, name)(x, **running, **flag).sin().sum()

    x = randn(3, 2, 4)
    torch.func.grad(f)(x)
    torch.func.vmap(f)(torch.stack([x, 2 * x]))
    torch.func.jvp(f, (x,), (x,))
    assert_close(running, statistics(2), rtol=0, atol=0)


@rows("name", ["batch_norm", "instance_norm"])
def test_evaluation_and_empty_batches_leave_them_alone(name: str) -> None:
    running = statistics(2)
    getattr(ops, name)(randn(3, 2, 4), **running, **({} if name == "batch_norm" else {"use_input_stats": False}))  # fmt: skip
    getattr(ops, name)(randn(0, 2, 4), **running, **({"training": True} if name == "batch_norm" else {}))  # fmt: skip
    assert_close(running, statistics(2), rtol=0, atol=0)


def test_running_statistics_run_in_a_compiled_function() -> None:
    torch._dynamo.reset()
    running, x = statistics(2), randn(4, 2)
    step = torch.compile(
        lambda x: ops.batch_norm(x, **running, training=True), fullgraph=True, backend="aot_eager"
    )
    expected = statistics(2)
    assert_close(step(x), F.batch_norm(x, **expected, training=True))
    assert_close(running, expected)


# Dtypes, autocast, sizes.


@rows("dtype", [BF16, torch.float16])
@rows("parameters", ["same", "float32"])
@rows("name", ["layer", "batch of images", "batch, evaluation", "instance"])
def test_half_precision(name: str, parameters: str, dtype: torch.dtype) -> None:
    theirs, ours, args, options = OPTIONS[name]
    other = dtype if parameters == "same" else F32
    options = {k: v.to(other) if isinstance(v, Tensor) else v for k, v in options.items()}
    args = (args[0].to(dtype), *args[1:])
    function, tensors = bound(ours, args, options)
    result = gradients(function, tensors)
    reference = gradients(bound(theirs, args, options)[0], tensors)
    assert [r.dtype for r in result] == [r.dtype for r in reference]
    exact = gradients(function, [t.double() for t in tensors]) if "evaluation" not in name else None
    for i, value in enumerate(result):
        assert_close(value, reference[i], rtol=2e-2, atol=2e-2)
        if exact is not None:  # one rounding, at the end
            step = torch.finfo(value.dtype).eps if value.dtype != F32 else 1e-2
            assert_close(value.double(), exact[i], rtol=4 * step, atol=4 * step)


@rows("v", [F64, F32, BF16])
@rows("g", [F64, F32, BF16])
@rows("dim", [1, -1])
def test_dtypes_of_a_weight_are_promoted_as_torchs(
    v: torch.dtype, g: torch.dtype, dim: int
) -> None:
    lengths = randn(1, 2, 1, dtype=g) if dim == 1 else randn(dtype=g)
    args = (randn(3, 2, 4, dtype=v), lengths, dim)
    assert ops.weight_norm(*args).dtype == torch._weight_norm(*args).dtype


@each_option
@rows("dtype", [F32, BF16])
def test_autocast_gives_torchs_dtype(case: tuple[Any, ...], dtype: torch.dtype) -> None:
    theirs, ours, args, options = case
    args = tuple(a.to(dtype) if isinstance(a, Tensor) else a for a in args)
    options = {k: v.to(dtype) if isinstance(v, Tensor) else v for k, v in options.items()}
    with torch.autocast("cpu", BF16):
        result, reference = ours(*args, **options), theirs(*args, **options)
    assert result.dtype == reference.dtype
    tolerance = 5e-2 if dtype == BF16 else 1e-5
    assert_close(result, reference, rtol=tolerance, atol=tolerance)


def test_empty_where_torch_fails() -> None:
    """torch raises an IndexError at the first; at the others the process dies, divided by zero."""
    assert ops.instance_norm(randn(0, 3, 2), weight=randn(3)).shape == (0, 3, 2)
    for v, g in ((randn(3, 0), randn(3, 1)), (randn(0, 3), randn(0, 1))):
        assert not any(t.any() for t in gradients(ops.weight_norm, [v, g]))


# Errors.

X, ONES = randn(2, 3, 4), torch.ones(3, dtype=F64)
REFUSED: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "layer, another shape": (lambda m: m.layer_norm(X, (3,)), RuntimeError, "normalized_shape"),
    "layer, no dimension": (lambda m: m.layer_norm(X, ()), RuntimeError, "normalized_shape"),
    "layer, an int": (lambda m: m.layer_norm(X, 4), TypeError, "normalized_shape"),
    "layer, weight": (lambda m: m.layer_norm(X, (4,), ONES), RuntimeError, "weight"),
    "layer, bias": (lambda m: m.layer_norm(X, (4,), None, ONES), RuntimeError, "bias"),
    "layer, dtype": (lambda m: m.layer_norm(X.float(), (4,), X[0, 0]), RuntimeError, "Float|float32"),
    "batch, one value": (lambda m: m.batch_norm(X[:1, :, :1], None, None, training=True), ValueError, "more than 1 value"),
    "batch, negative eps": (lambda m: m.batch_norm(X, ONES, ONES, eps=-1.0), ValueError, "eps"),
    "batch, no statistics": (lambda m: m.batch_norm(X, None, None), RuntimeError, "running_mean"),
    "batch, no variance": (lambda m: m.batch_norm(X, ONES, None), RuntimeError, "running_var"),
    "batch, half the statistics": (lambda m: m.batch_norm(X, ONES, None, training=True), ValueError, "running_mean and running_var"),
    "batch, weight": (lambda m: m.batch_norm(X, None, None, ONES[:2], training=True), RuntimeError, "weight"),
    "batch, statistics": (lambda m: m.batch_norm(X, ONES[:2], ONES[:2]), RuntimeError, "running_mean"),
    "batch, one dimension": (lambda m: m.batch_norm(X[0, 0], None, None, training=True), IndexError, ""),
    "batch, dtype": (lambda m: m.batch_norm(X, None, None, ONES.float(), training=True), RuntimeError, "dtype|float64"),
    "batch, differentiable statistics": (
        lambda m: m.batch_norm(X, ONES.clone().requires_grad_(), ONES), RuntimeError, "running_mean",
    ),
    "instance, one value": (lambda m: m.instance_norm(X[:, :, :1]), ValueError, "more than 1 spatial"),
    "instance, no statistics": (lambda m: m.instance_norm(X, use_input_stats=False), RuntimeError, "running_mean"),
    "instance, half the statistics": (lambda m: m.instance_norm(X, ONES), ValueError, "running_mean and running_var"),
    "instance, weight": (lambda m: m.instance_norm(X, weight=ONES[:2]), RuntimeError, "weight"),
    "weight, no such dimension": (lambda m: m.weight_norm(X, ONES, 3), IndexError, "dim"),
    "weight, dtype": (lambda m: m.weight_norm(X, ONES[:2].float(), 0), RuntimeError, "Float|float32|float64"),
}  # fmt: skip


class Torch:
    layer_norm, batch_norm, instance_norm = F.layer_norm, F.batch_norm, F.instance_norm
    weight_norm = torch._weight_norm


@rows("case", REFUSED.values(), ids=REFUSED)
def test_refusals_are_torchs(case: Any) -> None:
    call, error, text = case
    for module in (ops, Torch):
        with pytest.raises(error, match=f"(?i){text}"):
            call(module)


def test_refusals_of_our_own() -> None:
    """torch lets the first through in older releases, and reads past the end of the second's g."""
    with pytest.raises(ValueError, match="eps"):
        ops.batch_norm(X, None, None, training=True, eps=0.0)
    with pytest.raises(RuntimeError, match="elements"):
        ops.weight_norm(X, torch.ones((), dtype=F64), 0)
    with pytest.raises(TypeError, match="no derivatives"):
        ops.layer_norm(torch.ones(2, 3, dtype=torch.long), (3,))


# In the place of torch's.


def test_adapters_take_torchs_own_arguments() -> None:
    w, b, r = randn(3), randn(3) + 1, statistics(3)
    calls: dict[Any, tuple[Any, ...]] = {
        torch.layer_norm: (X, (4,), None, None, 1e-5, True),
        F.layer_norm: (X, (4,), None, None, 1e-5),
        torch.batch_norm: (X, w, b, *r.values(), False, 0.1, 1e-5, True),
        F.batch_norm: (X, *r.values(), w, b, False, 0.1, 1e-5),
        torch.instance_norm: (X, w, b, None, None, True, 0.1, 1e-5, True),
        F.instance_norm: (X, None, None, w, b, True, 0.1, 1e-5),
        torch._weight_norm: (X, randn(2, 1, 1), 0),
        torch._weight_norm_interface: (X, randn(1, 1, 4), 2),
    }
    norms = ("layer_norm", "batch_norm", "instance_norm", "weight_norm")
    assert set(calls) == {theirs for norm in norms for theirs in TABLE[norm].replaces}
    for function, args in calls.items():
        assert_close(REPLACES[function](*args), function(*args))


def test_the_interface_of_weight_norm() -> None:
    interface = REPLACES[torch._weight_norm_interface]
    v = randn(3, 4, dtype=BF16).requires_grad_()
    for ours, theirs in zip(
        interface(v, randn(3, 1, dtype=BF16)),
        torch._weight_norm_interface(v, randn(3, 1, dtype=BF16)),
        strict=True,
    ):
        assert (ours.dtype, ours.requires_grad) == (theirs.dtype, theirs.requires_grad)
        assert_close(ours, theirs, rtol=2e-2, atol=2e-2)
    with pytest.raises(RuntimeError, match="first or"):
        interface(X, torch.ones(1, 3, 1), 1)


def test_one_value_a_channel_as_torch_takes_it() -> None:
    x = randn(2, 3)
    ours, theirs = REPLACES[torch.instance_norm], torch.instance_norm
    args = (None, ONES, None, None, True, 0.1, 1e-5, True)
    assert_close(ours(x, *args), theirs(x, *args), rtol=0, atol=1e-9)
    one, running, expected = x[:1], statistics(3), statistics(3)
    REPLACES[torch.batch_norm](one, None, None, *running.values(), True, 0.1, 1e-5, True)
    torch.batch_norm(one, None, None, *expected.values(), True, 0.1, 1e-5, True)
    assert_close(running, expected, equal_nan=True)
