"""What make_function and define promise of every Function that they make."""

import gc
import weakref

import pytest
import torch
from torch.testing import assert_close

from hoglib.ops._define import define
from hoglib.ops._function import make_function


def cube(x):
    return x**3


def cubes(calls):
    """x^3, counting how often its partial derivative is asked for."""

    def partial(x, y):
        calls.append(1)
        return 3 * x * x

    return define(cube, [partial], reference=cube)


def product_counting(calls):
    def by_a(a, b, y):
        calls.append("a")
        return b

    def by_b(a, b, y):
        calls.append("b")
        return a

    return define(lambda a, b: a * b, [by_a, by_b])


x = torch.tensor([0.5, -2.0], dtype=torch.float64)


def test_partials_are_asked_for_only_where_a_gradient_is_wanted():
    calls = []
    op = product_counting(calls)
    a, b = x.clone().requires_grad_(), x.clone()
    op(a, b).sum().backward()
    assert calls == ["a"]
    assert_close(a.grad, b)


def test_nothing_is_computed_without_grad():
    calls = []
    assert_close(cubes(calls)(x), x**3)
    assert calls == []


def test_an_undefined_incoming_gradient_gives_none():
    calls = []
    y = cubes(calls)(x.clone().requires_grad_())
    assert y.grad_fn.apply(None) is None or y.grad_fn.apply(None) == (None,)
    assert calls == []


def two_outputs():
    def backward(saved, plus, minus):
        total = sum(g for g in (plus, minus) if g is not None)
        other = (0 if plus is None else plus) - (0 if minus is None else minus)
        return total, other

    return make_function(
        "SumAndDifference",
        2,
        forward=lambda a, b: (a + b, a - b),
        backward=backward,
        jvp=lambda saved, ta, tb: ((ta if tb is None else tb if ta is None else ta + tb),) * 2,
    ).apply


@pytest.mark.parametrize("output", [0, 1], ids=["first", "second"])
def test_one_output_alone(output):
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    grads = torch.autograd.grad(two_outputs()(a, b)[output].sum(), [a, b])
    sign = 1 - 2 * output
    assert_close(grads, (torch.ones_like(a), sign * torch.ones_like(b)))


def test_torch_still_gives_zero_for_jvp_inside_jvp_of_a_function():
    # If this fails, torch has mended it, and `call` need not turn to the reference any more.
    function = make_function(
        "Cube",
        1,
        forward=cube,
        backward=lambda saved, g: [g * 3 * saved.inputs[0] ** 2],
        jvp=lambda saved, t: t * 3 * saved.inputs[0] ** 2,
    )
    H = torch.func.jacfwd(torch.func.jacfwd(lambda t: function.apply(t).sum()))(x)
    assert_close(H, torch.zeros(2, 2, dtype=torch.float64))


def test_what_is_not_kept_is_not_held_in_memory():
    op = define(torch.exp, [lambda _, y: y], keep="output")
    source = torch.randn(3, requires_grad=True)
    middle = source * 2
    gone = weakref.ref(middle)
    y = op(middle)
    del middle
    gc.collect()
    assert gone() is None
    (grad,) = torch.autograd.grad(y.sum(), source, create_graph=True)
    assert_close(torch.autograd.grad(grad.sum(), source)[0], 4 * torch.exp(2 * source.detach()))
