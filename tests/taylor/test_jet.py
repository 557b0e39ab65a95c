"""jet: its results, their gradients, what is constant, what is refused, and the contexts it runs in."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import hoglib as hog
from tests.functions import made, saving_inputs
from tests.refused import refused
from tests.rows import rows


def points(*shape):
    return torch.randn(*shape, dtype=torch.float64)


class Shared(nn.Module):
    """A subnetwork that is used twice, a skip connection, a norm and an in-place activation."""

    def __init__(self):
        super().__init__()
        self.inner, self.norm = nn.Linear(3, 3), nn.LayerNorm(3)
        self.act = nn.SELU(inplace=True)

    def forward(self, x):
        h = x
        for _ in range(2):
            h = h + self.norm(self.act(self.inner(h)))
        return h, {"sum": h.sum()}


@rows("mode", ["taylor", "nested"])
def test_the_gradient_of_a_loss_of_jets_is_that_of_nested_derivatives(mode):
    net, x = Shared().double(), points(4, 3).requires_grad_()
    v = points(4, 3)

    def loss():
        (y, sums), (dy, dsums) = hog.jet(net, x, [v, None, v], mode=mode)
        return sum(d.square().sum() for d in dy) + dsums["sum"][2] + y.sum() + sums["sum"]

    by_path = torch.zeros((), dtype=torch.float64, requires_grad=True)
    inputs = [x, *net.parameters()]
    with hog.second_order():
        y, sums = net(x + v * by_path + v * by_path**3 / 6)
        total, u = y.sum() + sums["sum"], torch.zeros_like(y, requires_grad=True)
        for k in range(3):  # two backward passes give one derivative by the path
            (g,) = torch.autograd.grad(y, by_path, u, create_graph=True)
            (y,) = torch.autograd.grad(g, u, create_graph=True)
            total = total + y.square().sum() + (y.sum() if k == 2 else 0)
        expected = torch.autograd.grad(total, inputs)
    assert_close(torch.autograd.grad(loss(), inputs), expected, rtol=1e-8, atol=1e-9)


def test_several_arguments_and_containers():
    a, b = points(3), points(3)
    u, v = points(3), points(3)
    value, series = hog.jet(lambda a, b: {"product": (a * b, a)}, (a, b), ([u, None], [v, u]))
    assert_close(value, {"product": (a * b, a)})
    (first, second), (along, zero) = series["product"]
    assert_close(first, u * b + a * v)
    assert_close(second, 2 * u * v + a * u)
    assert_close(along, u)
    assert_close(zero, torch.zeros_like(a))


def test_what_is_constant_for_autograd_is_constant():
    def func(x):
        with torch.no_grad():
            scale = x * 2
        scale += x.detach()
        return x.square() * scale * x.sum().item() + torch.ones_like(x)

    x = points(3)
    expected = [3 * x * x.sum() * d for d in (2 * x, torch.full_like(x, 2))]
    for mode in ("taylor", "nested"):
        assert_close(hog.jet(func, x, [torch.ones_like(x), None], mode=mode)[1], expected)


def test_control_flow_may_read_values():
    func = lambda x: x**3 if x.sum() > 0 else -x  # noqa: E731
    one = torch.ones(2)
    assert_close(hog.jet(func, one, [one, None], mode="taylor")[1], [3 * one, 6 * one])
    assert_close(hog.jet(func, -one, [one, None], mode="taylor")[1], [-one, 0 * one])


class Cube(torch.autograd.Function):
    """Its backward is right, and its forward has operations with other derivatives."""

    forward = saving_inputs(lambda x: x.detach() ** 3)

    backward = staticmethod(lambda ctx, g: 3 * ctx.saved_tensors[0] ** 2 * g)


Rounded = made("Rounded", lambda x: x.round(), lambda g, x: g)


def test_a_custom_function_is_nested_by_its_own_backward(log):
    x, one = points(4), torch.ones(4, dtype=torch.float64)
    _, found = hog.jet(lambda x: x * Cube.apply(x), x, [one, None, None])
    assert "the custom Function Cube" in log.text
    assert_close(found, [4 * x**3, 12 * x**2, 24 * x])
    with pytest.raises(NotImplementedError, match="custom Function Cube"):
        hog.jet(Cube.apply, x, [one], mode="taylor")
    with hog.second_order(on_wrong="ignore"):
        assert_close(hog.jet(lambda x: x * Rounded.apply(x), x, [one, None])[1][1], 2 * one)


def test_ops_of_hoglib_run_as_their_references():
    x, beta = points(5), torch.tensor(1.5, dtype=torch.float64)
    v = points(5)
    plain = lambda x: x * torch.sigmoid(beta * x)  # noqa: E731
    assert_close(
        hog.jet(lambda x: hog.ops.swish(x, beta), x, [v, None, v], mode="taylor"),
        hog.jet(plain, x, [v, None, v], mode="nested"),
    )
    remat = hog.ops.remat(torch.tanh)
    assert_close(hog.jet(remat, x, [v, None], mode="taylor"), hog.jet(torch.tanh, x, [v, None]))


def test_a_derivative_within_the_function_of_what_autograd_saved():
    """The backward of tanh reads its result, as another object; x adds coefficients beside it."""

    def force(x):
        x = x.requires_grad_() if x.is_leaf else x
        return torch.autograd.grad(x.tanh().sum(), x, create_graph=True)[0] + x**3

    x = points(3)
    t = x.tanh()
    first = -2 * t * (1 - t**2) + 3 * x**2
    second = (6 * t**2 - 2) * (1 - t**2) + 6 * x
    assert_close(hog.jet(force, x, [torch.ones_like(x), None])[1], [first, second])


def test_checkpoints_within_the_function():
    net = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Tanh()).double()
    again = lambda x: torch.utils.checkpoint.checkpoint(net, x, use_reentrant=False)  # noqa: E731
    x, v = points(4, 3), points(4, 3)
    results = []
    for func in (net, again):
        _, found = hog.jet(func, x, [v, None], mode="taylor")
        gradients = torch.autograd.grad(found[1].square().sum(), list(net.parameters()))
        results.append((found, gradients))
    assert_close(*results)
    # a reentrant one computes under no_grad: it would be a constant
    reentrant = lambda x: torch.utils.checkpoint.checkpoint(net, x, use_reentrant=True) + x  # noqa: E731
    with pytest.raises(hog.errors.UnsupportedError, match="the custom Function CheckpointFunction"):
        hog.jet(reentrant, x, [v, None], mode="taylor")


def test_random_numbers_are_drawn_once():
    x = torch.ones(200)
    for func in (torch.dropout, lambda x, *_: Cube.apply(torch.dropout(x, 0.5, True))):
        torch.manual_seed(0)
        value, (d1,) = hog.jet(lambda x, f=func: f(x, 0.5, True), x, [x])
        assert_close(d1, value * (1 if func is torch.dropout else 3))


def test_inside_transforms_and_contexts():
    x = points(3, 2)
    jets = lambda p: hog.jet(lambda q: q.sin().sum(), p, [torch.ones_like(p), None])[1][1]  # noqa: E731
    assert_close(torch.func.vmap(jets)(x), -x.sin().sum(1))
    assert_close(torch.func.grad(lambda p: jets(p))(x), -x.cos())
    with torch.inference_mode():
        assert_close(jets(x.clone()), -x.sin().sum())
    with torch.no_grad():
        assert not jets(x.requires_grad_()).requires_grad
    assert not hog.jet(torch.sin, x, [x.detach()], create_graph=False)[1][0].requires_grad


ONE = torch.ones(2)
ERRORS = {
    "func is no function": (lambda: hog.jet(3, ONE, [ONE]), TypeError, "func: expected a function"),
    "integer": (lambda: hog.jet(torch.sin, torch.ones(2, dtype=torch.int), [ONE]), TypeError, r"primals\[0\]"),
    "complex": (lambda: hog.jet(torch.sin, ONE + 1j, [ONE + 1j]), TypeError, r"primals\[0\]: expected a real"),
    "no tuple": (lambda: hog.jet(torch.sin, {"x": ONE}, [ONE]), TypeError, "primals: expected a tuple"),
    "primals apart": (lambda: hog.jet(torch.add, ONE, ONE, [ONE]), TypeError, r"4 were given\)\.$"),
    "another number": (lambda: hog.jet(torch.add, (ONE, ONE), ([ONE],)), ValueError, "one list for each of the 2"),
    "no coefficients": (lambda: hog.jet(torch.sin, ONE, []), TypeError, r"\[x_1, \.\.\., x_K\] of at least one"),
    "zeros": (lambda: hog.jet(torch.sin, ONE, [None]), ValueError, "the path is a point"),
    "shape": (lambda: hog.jet(torch.sin, ONE, [torch.ones(3)]), ValueError, r"series\[0\]\[0\]: expected a tensor like"),
    "dtype": (lambda: hog.jet(torch.sin, ONE, [ONE.double()]), ValueError, r"float64"),
    "lengths": (lambda: hog.jet(torch.add, (ONE, ONE), ([ONE], [ONE, ONE])), ValueError, r"lengths \[1, 2\]"),
    "mode": (lambda: hog.jet(torch.sin, ONE, [ONE], mode="forward"), ValueError, "mode: expected one of"),
    "no tensor": (lambda: hog.jet(lambda x: 3, ONE, [ONE]), TypeError, r"func\(\*primals\): expected a torch.Tensor"),
    "constant": (lambda: hog.jet(lambda x: x.detach(), ONE, [ONE]), RuntimeError, "depends on its input"),
}  # fmt: skip


def call_alone(call):
    try:
        call()
    finally:
        assert torch._C._len_torch_dispatch_stack() == 0


test_errors = refused(ERRORS, call_alone)


def test_a_high_order():
    """Whose factorials are no integers of 64 bits."""
    x = points(3)
    y, series = hog.jet(torch.exp, x, [torch.ones_like(x)] + [None] * 69)
    assert_close(series[-1], y, rtol=1e-9, atol=0)
