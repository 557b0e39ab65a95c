"""A graph that does not compute what the function does is refused, at the first call and at no other's cost."""

import random

import numpy as np
import pytest
import torch
from torch.testing import assert_close

import hoglib as hog
from tests.capture.models import captured, draw


class Counting:
    def __init__(self):
        self.calls = 0

    def __call__(self, x):
        self.calls += 1
        return x * self.calls


def of_numpy(x):
    return x * np.random.rand()


def of_a_seed(x):
    torch.manual_seed(0)
    return x * torch.rand(3)


class Replacing:
    """Puts an equal tensor in the place of the one that it used."""

    def __init__(self):
        self.weight = draw(3)

    def __call__(self, x):
        result = x * self.weight
        self.weight = self.weight.clone()
        return result


UNEQUAL = {
    "a tensor that it puts in another's place": Replacing,
    "a seed that it sets": lambda: of_a_seed,
    "a count of its calls": Counting,
    "random numbers of NumPy": lambda: of_numpy,
}


@pytest.mark.parametrize("make", UNEQUAL.values(), ids=UNEQUAL)
def test_a_result_that_depends_on_more_than_tensors_is_refused(make):
    fn = make()
    fast = captured(fn)
    with pytest.raises(
        RuntimeError, match=r"computes what the function does|replaces a float64 tensor"
    ):
        fast(draw(3))
    assert fast.signatures == []


def test_a_backend_that_is_wrong_is_found_out():
    def wrong(graph, inputs):
        return lambda *tensors: [x * 1.001 for x in graph.forward(*tensors)]

    def wrong_for_others(graph, inputs):
        first = graph.forward(*inputs)
        return lambda *tensors: first

    def wrong_integers(graph, inputs):
        return lambda *tensors: [
            x + 1 if x.dtype is torch.int64 else x for x in graph.forward(*tensors)
        ]

    def wrong_shape(graph, inputs):
        return lambda *tensors: [x[None] for x in graph.forward(*tensors)]

    def fn(x):
        return x * 2, x.long()

    for backend, words in (
        (wrong, "a difference of norm"),
        (wrong_for_others, "at other values than those of the capture"),
        (wrong_integers, "other integers in output 1"),
        (wrong_shape, "shape"),
    ):
        fast = hog.compile(fn, backend=backend)
        with pytest.raises(RuntimeError, match=words):
            fast(draw(3))
        assert fast.signatures == []
        fast = hog.compile(fn, backend=backend, check=False)
        fast(draw(3))
        assert len(fast.signatures) == 1


def test_rounding_and_what_is_not_finite_is_not_refused():
    def fn(x):
        return (x / x.abs().clamp(max=0)).exp(), x - x, 1e-300 * x

    fast = captured(fn)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        fast(draw(4).to(dtype))
    halves = hog.compile(lambda x: (x.exp(), x.sum()), backend=lambda graph, inputs: lambda x: [y * (1 + 1e-6) for y in graph.forward(x)])  # fmt: skip
    halves(draw(4).float())


def test_the_comparison_is_by_the_precision_inside():
    def rounded(graph, inputs):
        return lambda *tensors: [x * (1 + 1e-6) for x in graph.forward(*tensors)]

    in_float32 = hog.compile(lambda x: x.float().exp().double(), backend=rounded)
    in_float32(draw(3))
    of_float32 = hog.compile(lambda x: x.double().exp(), backend=rounded)
    with pytest.raises(RuntimeError, match="what compiled them is wrong"):
        of_float32(draw(3).float())


class AddedBackwards(torch.fx.Interpreter):
    """Adds in another order, as compiled code may; and multiplies a derivative by a number."""

    factor = 1.0

    def call_function(self, target, args, kwargs):
        if target is torch.ops.aten.sum.default:
            args = (args[0].flip(0), *args[1:])
        if target is torch.ops.aten.threshold_backward.default:
            return super().call_function(target, args, kwargs) * self.factor
        return super().call_function(target, args, kwargs)


# 1 + 1e8 = 1e8 in float32, so that the sum is 0 or 1 by the order, and the derivative of its ReLU too.
KINKS = {"the function's": [1.0, 1e8, -1e8], "the compiled": [-1e8, 1e8, 1.0]}


def slope_of_relu(w, x):
    return torch.autograd.grad(torch.relu((w * x).sum()), w, create_graph=True)[0]


@pytest.mark.parametrize("numbers", KINKS.values(), ids=KINKS)
def test_a_kink_between_two_roundings_is_told_from_a_wrong_graph(numbers):
    w, x = torch.ones(3, requires_grad=True), torch.tensor(numbers)
    fast = hog.compile(slope_of_relu, backend=lambda graph, _: AddedBackwards(graph).run)
    slopes = {fast(w, x).norm().item() > 0, slope_of_relu(w, x).norm().item() > 0}
    assert slopes == {True, False}  # on the two sides

    class Wrong(AddedBackwards):
        factor = 1.01

    for values in (numbers, [1.0, 2.0, 3.0], [1e4, 1.0, -9999.0]):
        wrong = hog.compile(slope_of_relu, backend=lambda graph, _: Wrong(graph).run)
        with pytest.raises(hog.errors.NoSecondDerivative, match="what compiled them is wrong"):
            wrong(w, torch.tensor(values))


def test_the_comparison_comes_before_the_compiler():
    compiled = []
    fast = hog.compile(Counting(), backend=lambda graph, inputs: compiled.append(1))
    with pytest.raises(RuntimeError, match="a constant that should be an input"):
        fast(draw(3))
    assert not compiled


def test_a_function_that_refuses_other_values_is_compared_at_its_own():
    def fn(x):
        if not torch.compiler.is_compiling() and type(x) is torch.Tensor and x[0] != 2.0:
            raise ValueError("not 2")
        return x * 3

    assert_close(captured(fn)(torch.tensor([2.0])), torch.tensor([6.0]))


def test_the_check_draws_and_counts_nothing():
    fast, x = captured(lambda x: x + torch.rand(3)), draw(3)
    torch.manual_seed(0)
    expected = x + torch.rand(3), torch.rand(2)
    torch.manual_seed(0)
    state = np.random.get_state()[1].copy(), random.getstate()
    assert_close((fast(x), torch.rand(2)), expected, rtol=0, atol=0)
    assert (np.random.get_state()[1] == state[0]).all()
    assert random.getstate() == state[1]


def test_a_capture_leaves_random_generators_as_they_were():
    def fn(x):
        torch.manual_seed(0)
        np.random.seed(0)
        random.seed(0)
        raise KeyError

    torch.manual_seed(3)
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    with pytest.raises(KeyError):
        captured(fn)(draw(3))
    assert torch.equal(before[0], torch.get_rng_state())
    assert (before[1] == np.random.get_state()[1]).all()
    assert before[2] == random.getstate()


def test_a_compiled_function_inside_of_another_one():
    inner = captured(lambda x: x.sin())
    outer = captured(lambda x: torch.autograd.grad(inner(x).sum(), x, create_graph=True)[0] * 2)
    x = draw(3).requires_grad_()
    for _ in range(2):
        result = outer(x)
        assert_close(result, 2 * x.cos())
        assert_close(torch.autograd.grad(result.sum(), x)[0], -2 * x.sin())
    assert inner.signatures == []  # a part of the other
    assert len(outer.signatures) == 1
