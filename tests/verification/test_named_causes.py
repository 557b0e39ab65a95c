"""What a report names as the cause, in forms that Functions are written in; and what it does not claim."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd import Function

import hoglib as hog
from tests.functions import made, saving_inputs
from tests.zoo.right import Rerun

x = torch.tensor([0.4, -1.1, 1.9])


def saving(save, gradient, forward=torch.exp):
    """A Function that saves in some way; gradient(ctx, g)."""

    class Saving(Function):
        forward = staticmethod(lambda ctx, x: save(ctx, x, forward(x)))

        backward = staticmethod(gradient)

    return Saving


def in_a_tuple(ctx, x, y):
    a, b = y.sqrt(), y.square()
    ctx.stuff = (a, b)
    return y


def appended(ctx, x, y):
    half = y.sqrt()
    ctx.kept = []
    ctx.kept.append(half)
    return y


def an_expression(ctx, x, y):
    ctx.save_for_backward(x, y.sqrt())
    return y


def a_starred_list(ctx, x, y):
    kept = [x, y.sqrt()]
    ctx.save_for_backward(*kept)
    return y


def on_several_lines(ctx, x, y):
    first = other = y.sqrt()
    ctx.save_for_backward(
        x,
        other,
    )
    return y + 0 * first


def in_an_object(ctx, x, y):
    class Box:
        pass

    ctx.box = Box()
    ctx.box.half = y.sqrt()
    return y


def annotated(ctx, x, y):
    ctx.kept: dict = dict(a=y, b=y.sqrt())  # noqa: C408 as it is written
    return y


def second_saved(ctx, g):
    return g * ctx.saved_tensors[1] ** 2


NAMED = {
    "in a tuple": (in_a_tuple, lambda ctx, g: g * ctx.stuff[0] ** 2, "ctx.stuff[0]", "`a`"),
    "appended to a list": (appended, lambda ctx, g: g * ctx.kept[0] ** 2, "ctx.kept[0]", "`half`"),
    "an expression": (an_expression, second_saved, "ctx.saved_tensors[1]", "`y.sqrt()`"),
    "a starred list": (a_starred_list, second_saved, "ctx.saved_tensors[1]", "`kept[1]`"),
    "on several lines": (on_several_lines, second_saved, "ctx.saved_tensors[1]", "`other`"),
    "in an object": (in_an_object, lambda ctx, g: g * ctx.box.half**2, "ctx.box.half", ""),
    "in dict()": (annotated, lambda ctx, g: g * ctx.kept["b"] ** 2, "ctx.kept['b']", "`y.sqrt()`"),
}


@pytest.mark.parametrize("how", NAMED)
def test_what_is_saved_is_named_as_in_the_line_that_saves_it(how):
    save, gradient, slot, name = NAMED[how]
    row = hog.verify(saving(save, gradient), x).failed[0]
    assert row.name == f"saved: {slot}"
    assert f"{slot} is {name}" in row.text
    assert "test_named_causes.py:" in row.text


STEPS = {
    "rounds": (torch.round, lambda g: g),
    "takes the sign": (torch.sign, lambda g: g),
    "is a step": (lambda x: (x > 0).to(x), lambda g: 0.5 * g),
    "is the identity": (lambda x: x.clone(), lambda g: -g),
    "clips": (lambda x: x.clamp(-1, 1), lambda g: g),
}


@pytest.mark.parametrize("what", STEPS)
def test_a_surrogate_is_proposed_in_words_that_say_why(what):
    forward, gradient = STEPS[what]
    function = saving(lambda ctx, x, y: y, lambda ctx, g: gradient(g), forward)
    text = hog.verify(function, x)["first derivative: reverse"].text
    assert f"forward {what}" in text
    assert "`surrogate = True` on the class" in text
    assert hog.verify(function, x, surrogate=True).ok


def test_a_wrong_slope_is_no_surrogate():
    function = saving(lambda ctx, x, y: y, lambda ctx, g: g, torch.tanh)
    text = hog.verify(function, x)["first derivative: reverse"].text
    assert "forward " not in text


WEIGHT = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)


def test_accumulation_into_grad_is_told_and_undone():
    class Adds(Function):
        forward = saving_inputs(lambda x: x * WEIGHT.detach().to(x))

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            found = (g * x).detach().to(WEIGHT)
            WEIGHT.grad = found if WEIGHT.grad is None else WEIGHT.grad + found
            return g * WEIGHT.detach().to(g)

    row = hog.verify(Adds, x)["in-place: .grad"]
    assert row.status == "fail"
    assert "a tensor of shape (3,)" in row.text
    assert WEIGHT.grad is None


@pytest.mark.parametrize("draw", [np.random.rand, torch.rand], ids=["numpy", "torch"])
def test_the_second_order_is_judged_with_fixed_draws(draw):
    def save(ctx, x, y):
        noise = torch.as_tensor(draw(3)).to(x)
        ctx.save_for_backward(y, noise)
        return y * noise

    report = hog.verify(
        saving(save, lambda ctx, g: g * ctx.saved_tensors[0] * ctx.saved_tensors[1]), x
    )
    assert report["deterministic"].status == "warn"
    assert report.failed[0].name == "saved: ctx.saved_tensors[0]"


def test_a_module_among_the_arguments_is_verified_by_its_own_parameters():
    block = nn.Sequential(nn.Linear(3, 2), nn.Tanh())
    report = hog.verify(Rerun, (block, torch.randn(4, 3), *block.parameters()))
    assert report.ok, report
    assert "class Wrapped" in report["arguments: a module"].text
    assert (
        "the parameter" in str(hog.verify(Rerun, (block, x, *block.parameters()))) or report.judged
    )


def test_an_error_of_the_probe_is_no_cause():
    class Asks(Function):
        """Needs the node of autograd, which a plain run has not."""

        forward = saving_inputs(lambda x: x.exp())

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            assert ctx.next_functions
            return g * x.detach().exp()

    report = hog.verify(Asks, x)
    assert report.failed[0].name == "detached: .detach()"
    assert not any("AssertionError" in row.text for row in report)
    assert report["attribution"].text.startswith("not judged")


def test_noise_above_the_derivative_is_not_judged():
    # Beside the value the derivative is less than rounding, so that a wrong one is not seen.
    Far = made("Far", lambda x: 1e12 + x, lambda g, x: 3 * g)

    report = hog.verify(Far, x)
    assert report["first derivative: reverse"].status == "warn"
    assert not report.judged


def test_a_graph_that_serves_once_is_told_with_what_backward_changes():
    class Changes(Function):
        """The logarithm of a softplus; backward changes what it saved."""

        @staticmethod
        def forward(ctx, x, weight):
            p = x.sigmoid()
            ctx.kept = p, weight
            return -(1 - p).log() * weight

        @staticmethod
        def backward(ctx, g):
            p, weight = ctx.kept
            return p.mul_(weight).mul_(g.detach()) + 0 * g, None

    report = hog.verify(Changes, (x.clone().requires_grad_(), torch.rand(3)))
    assert "backward changes ctx.kept" in report["deterministic"].text


def test_memory_is_not_rearranged_for_what_handles_it():
    class Frees(Function):
        """A copy is freed in backward, and filled again."""

        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x.data, x)
            return x.sin()

        @staticmethod
        def backward(ctx, g):
            data, x = ctx.saved_tensors
            data.untyped_storage().resize_(data.numel() * data.element_size())
            return g * x.cos()

    report = hog.verify(Frees, x)
    assert report.ok
    assert "handles the memory" in report["layout: non-contiguous inputs"].text
