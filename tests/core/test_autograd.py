"""Gradients that can be differentiated again: in inference mode, with parts missing, or computed before."""

import pytest
import torch

import hoglib as hog
from hoglib._core.substrate import autograd
from hoglib.errors import NoSecondDerivative, UnsupportedError
from tests.functions import saving_inputs


def test_translate_errors_names_the_operation_and_lets_others_pass():
    with (
        pytest.raises(UnsupportedError, match=r"test: .*double backward.*stand_ins=True"),
        autograd.translate_errors("test"),
    ):
        raise RuntimeError("sin does not currently support double backward")
    with pytest.raises(RuntimeError, match=r"^another$"), autograd.translate_errors("test"):
        raise RuntimeError("another")
    with pytest.raises(NoSecondDerivative), autograd.translate_errors("test"):
        raise NoSecondDerivative("not implemented")


def test_gradients_are_given_away_and_computed_again():
    x, grads, calls = torch.ones(2, requires_grad=True), [torch.full((2,), 2.0)], []

    def recompute():
        calls.append(1)
        return [torch.full((2,), 2.0)]

    value = autograd.with_gradients(torch.tensor(2.0), grads, [x], recompute=recompute)
    (first,) = torch.autograd.grad(value, x, torch.tensor(3.0), retain_graph=True)
    assert first.data_ptr() == grads[0].data_ptr()  # scaled in place
    assert not calls
    (second,) = torch.autograd.grad(value, x)
    assert (first.tolist(), second.tolist(), len(calls)) == ([6.0, 6.0], [2.0, 2.0], 1)


def test_pairs_at_an_odd_offset_are_copied():
    """As where a complex parameter follows a single number in a vector."""
    every = torch.arange(5.0)
    odd, even = every[1:].view(2, 2), every[:4].view(2, 2)
    assert torch.view_as_complex(autograd.at_even(odd)).tolist() == [1 + 2j, 3 + 4j]
    assert autograd.at_even(even) is even


class _ChangesItsGraph(torch.autograd.Function):
    """A square whose backward overwrites what its own graph has saved."""

    forward = saving_inputs(lambda x: x.square())

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        g = g * x
        result = g * x
        g.mul_(2)
        return 2 * result / x


def _changed_in_a_hook(x):
    def hook(g):
        result = g * g
        g.mul_(2)
        return result

    y = x.square()
    y.register_hook(hook)
    return y.square()


@pytest.mark.parametrize(
    ("function", "advice"),
    [
        (
            _ChangesItsGraph.apply,
            r"backward of _ChangesItsGraph: .*verify\(_ChangesItsGraph, inputs\)",
        ),
        (_changed_in_a_hook, r"in func\. The hook registered at .*test_autograd.py"),
    ],
    ids=["Function", "hook"],
)
def test_a_tensor_changed_in_place_is_told_with_the_custom_functions(function, advice):
    x = torch.tensor([1.0, 2.0])
    with pytest.raises(NoSecondDerivative, match=f"hvp: .*modified by an inplace.*{advice}"):
        hog.hvp(lambda p: function(p).sum(), x, x)
