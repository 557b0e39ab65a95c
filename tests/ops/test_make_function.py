"""What make_function and define promise of every Function that they make."""

import gc
import weakref

import torch
from torch.testing import assert_close

from hoglib.ops._define import define


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
