"""Linear maps and activations beside the matrix: extremes, autocast, sizes, and wrong arguments."""

from functools import partial

import torch
import torch.nn.functional as F
from torch.testing import assert_close

import hoglib as hog
from tests.refused import refused
from tests.rows import rows
from tests.tensors import randn as rand

ACTS = {
    "relu": torch.relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "softplus": partial(F.softplus, threshold=40),
    "swish": lambda z: z * torch.sigmoid(z),
}


def composite(act):
    return lambda *inputs: ACTS[act](F.linear(*inputs))


def test_the_derivatives_come_from_our_functions():
    x = rand(2).requires_grad_()
    for op in (hog.ops.tanh, hog.ops.sigmoid, hog.ops.swish):
        assert isinstance(op(x).grad_fn, torch.autograd.function.BackwardCFunction)
    layer = hog.ops.linear_act(x, rand(3, 2))
    assert type(layer.grad_fn).__name__ == "LinearTanhBackward"


def test_extremes_have_finite_derivatives():
    huge = torch.tensor([-1e30, -1e4, -0.0, 0.0, 1e4, 1e30])
    for op in (hog.ops.tanh, hog.ops.sigmoid, hog.ops.swish):
        x = huge.clone().requires_grad_()
        (grad,) = torch.autograd.grad(op(x).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(grad.sum(), x)
        assert grad.isfinite().all()
        assert second.isfinite().all()


@rows(("x", "beta", "dtype"), [(1000.0, 100.0, torch.float16), (3e38, 2.0, torch.float32)])
def test_swish_where_its_argument_overflows(x, beta, dtype):
    given = torch.tensor([x, -x], dtype=dtype, requires_grad=True)
    hog.ops.swish(given, beta).sum().backward()
    assert_close(given.grad, torch.tensor([1, 0], dtype=dtype))


def test_beta_as_a_number_is_a_constant():
    x = rand(3).requires_grad_()
    assert_close(hog.ops.swish(x, 2.0), x * torch.sigmoid(2 * x))
    assert len(hog.ops.swish(x, 2.0).grad_fn.next_functions) == 1


@rows("act", [None, *ACTS])
def test_autocast_as_torch_does_it(act):
    x, w, b = (torch.randn(*s, requires_grad=True) for s in [(3, 2), (4, 2), (4,)])
    op = hog.ops.linear if act is None else partial(hog.ops.linear_act, act=act)
    reference = F.linear if act is None else composite(act)
    grads = []
    for g in (op, reference):
        with torch.autocast("cpu", torch.bfloat16):
            y = g(x, w, b)
        assert y.dtype == torch.bfloat16
        (gw,) = torch.autograd.grad(y.float().square().sum(), w, create_graph=True)
        grads.append(torch.autograd.grad(gw.square().sum(), [x, w]))
    scale = max(g.abs().max() for g in grads[1])
    assert_close([g / scale for g in grads[0]], [g / scale for g in grads[1]], rtol=0.03, atol=0.03)


def test_autocast_leaves_float64_and_complex_alone():
    with torch.autocast("cpu", torch.bfloat16):
        for dtype in (torch.float64, torch.complex64):
            x, w = torch.ones(1, 2, dtype=dtype), torch.ones(3, 2, dtype=dtype)
            assert hog.ops.linear(x, w).dtype == F.linear(x, w).dtype == dtype


def test_shapes_without_data():
    assert hog.nn.LinearAct(3, 4, device="meta")(torch.zeros(2, 3, device="meta")).shape == (2, 4)


def test_relu_with_frozen_weights_can_be_differentiated_twice_as_in_torch():
    x = rand(5, 3).requires_grad_()
    (g,) = torch.autograd.grad(
        hog.ops.linear_act(x, rand(4, 3), act="relu").sum(), x, create_graph=True
    )
    assert torch.autograd.grad(g.square().sum(), x)[0].abs().sum() == 0


ERRORS = {
    "integer beta": (lambda: hog.ops.swish(rand(2), torch.ones(2, dtype=torch.int)), TypeError, r"beta\.float\(\)"),
    "transposed weight": (lambda: hog.ops.linear(rand(3, 2), rand(2, 4)), ValueError, r"weight \(2, 4\).*weight\.mT"),
    "bias of another size": (lambda: hog.ops.linear_act(rand(3, 2), rand(4, 2), rand(3)), ValueError, r"bias \(3,\)"),
    "x without dimensions": (lambda: hog.ops.linear(rand(), rand(4, 2)), ValueError, r"x \(\)"),
}  # fmt: skip


test_errors = refused(ERRORS)
