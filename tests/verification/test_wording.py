"""What a report says is wrong, for faults that look alike: the cause, the place, and the fix."""

import random

import pytest
import torch
from torch.autograd import Function

import hoglib as hog
from tests.functions import ClassicCube, Cube, by_saved, made, save_inputs, saving_inputs

x, y = torch.randn(6, generator=torch.Generator().manual_seed(0)), torch.linspace(0.4, 1.4, 6)


def wrong(function, *inputs, says, row="", **options):
    """The report fails, and one failed row has all these words."""
    report = hog.verify(function, inputs or (x,), **options)
    texts = [f"{r.name}: {r.text}" for r in report.failed if row in r.name]
    assert any(all(word in text for word in says) for text in texts), texts
    return report


class Mul(Function):
    forward = saving_inputs(lambda a, b: a.sin() * b)

    backward = by_saved(lambda g, a, b: (g * a.cos() * b, g * a.sin()))


class Sine(Function):
    forward = saving_inputs(lambda a: a.sin())

    backward = by_saved(lambda g, a: g * a.cos())


class IgnoresAnOutput(Function):
    forward = saving_inputs(lambda a: (a.sin(), a.exp()))

    @staticmethod
    def backward(ctx, g_sin, g_exp):
        (a,) = ctx.saved_tensors
        return g_sin * a.cos()


class OneBranch(Function):
    forward = saving_inputs(lambda a: torch.where(a > 0, a, 0.1 * a))

    @staticmethod
    def backward(ctx, g):
        (a,) = ctx.saved_tensors
        return torch.where(a > 0, g, 0.2 * g)


class WrongSign(Mul):
    @staticmethod
    def backward(ctx, g):
        a, b = ctx.saved_tensors
        return g * a.cos() * b, -g * a.sin()


WRONG = {
    "an output ignored": (IgnoresAnOutput, (x,), "output 1, by inputs[0] (`a`)"),
    "one branch": (OneBranch, (torch.tensor([-1.0, 0.4, -0.3]),), "2 of 3 elements of that gradient"),
    "the sign": (WrongSign, (x, y), "by inputs[1] (`b`), along random directions"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_gradient_is_located(case):
    function, inputs, where = WRONG[case]
    report = wrong(
        function, *inputs, says=[where, "expected", "got"], row="first derivative: reverse"
    )
    text = report["first derivative: reverse"].text
    assert f"{function.__name__}.backward starts at " in text
    assert "test_wording.py:" in text
    assert ("the sign is wrong" in text) == (case == "the sign")


def test_every_wrong_input_is_named():
    class Two(Mul):
        backward = by_saved(lambda g, a, b: (2 * g * a.cos() * b, 3 * g * a.sin()))

    wrong(Two, x, y, says=["inputs[0] (`a`)", "inputs[1] (`b`)", "Also wrong"])


def test_an_input_without_a_gradient_may_be_a_constant():
    class Scaled(Mul):
        backward = by_saved(lambda g, a, b: (g * a.cos() * b, None))

    says = ["inputs[1] (`b`)", "returns None for it. If the function takes it for a constant"]
    wrong(Scaled, x, y, says=says)
    given = x.clone().requires_grad_()
    assert hog.verify(Scaled, (given, y)).ok


def test_nothing_is_saved():
    class Unsaved(Sine):
        forward = staticmethod(lambda ctx, a: a.sin())

    report = wrong(Unsaved, says=["culprit: backward", "save_for_backward is never called"])
    assert not any("detached" in row.name for row in report.failed)


def test_an_argument_with_a_default_that_is_not_passed():
    class Scaled(Sine):
        forward = staticmethod(lambda ctx, a, scale=1.0: Sine.forward(ctx, scale * a))

        backward = staticmethod(
            lambda ctx, g: (Sine.backward(ctx, g), g if ctx.needs_input_grad[1] else None)
        )

    wrong(Scaled, says=["culprit: backward", "pass arguments with defaults, too"])


def test_a_write_through_data():
    class Writes(Sine):
        @staticmethod
        def backward(ctx, g):
            (a,) = ctx.saved_tensors
            slope = torch.empty_like(a)
            slope.data.copy_(a.cos())
            return g * slope

    wrong(Writes, row="detached", says=["through .data", "copy_"])


def test_a_graph_that_forward_built():
    class Keeps(Function):
        @staticmethod
        def forward(ctx, a):
            with torch.enable_grad():
                ctx.leaf = a.detach().requires_grad_()
                ctx.out = (ctx.leaf**3).sum()
            return ctx.out.detach()

        @staticmethod
        def backward(ctx, g):
            (d,) = torch.autograd.grad(ctx.out, ctx.leaf, retain_graph=True)
            return g * d

    says = ["ctx.leaf", "ctx.out", "graph that forward built", "in backward"]
    wrong(Keeps, row="saved: ", says=says)


def test_a_gradient_that_depends_on_create_graph():
    class Asks(Sine):
        @staticmethod
        def backward(ctx, g):
            return Sine.backward(ctx, g) * (1.0 if torch.is_grad_enabled() else 1.5)

    report = wrong(Asks, row="create_graph", says=["is_grad_enabled"])
    assert report["state"].status == "pass"


def test_a_backward_that_changes_ctx():
    class Counts(Function):
        @staticmethod
        def forward(ctx, a):
            ctx.calls = 0
            return a.clone()

        @staticmethod
        def backward(ctx, g):
            ctx.calls += 1
            return g * ctx.calls

    wrong(Counts, row="deterministic", says=["a second backward pass", "ctx.calls"])

    class UsesUp(Function):
        @staticmethod
        def forward(ctx, a):
            ctx.queue = [2.0]
            return 2 * a

        backward = staticmethod(lambda ctx, g: g * ctx.queue.pop())

    wrong(UsesUp, row="deterministic", says=["raises IndexError", "ctx.queue"])


def test_random_numbers_of_another_library_in_backward():
    Noisy = made("Noisy", lambda a: 2 * a, lambda g, a: 2 * g * random.random())

    report = wrong(Noisy, row="deterministic", says=["NumPy's or random's"])
    assert report.failed[0].name == "deterministic"
    assert report["second derivative: reverse-over-reverse"].status == "pass"


def test_the_function_of_several_that_is_wrong():
    class Wrong(Sine):
        backward = staticmethod(lambda ctx, g: 0.5 * Sine.backward(ctx, g))

    report = wrong(
        lambda a, b: Mul.apply(Wrong.apply(a), b), x, y, row="Wrong: culprit",
        says=["0.5 times the expected value"],
    )  # fmt: skip
    assert not any("Mul" in row.name for row in report.failed)


def test_a_function_that_backward_applies():
    Inner = made("Inner", lambda a: 3 * a**2, lambda g, a: 5 * g * a)

    class Outer(ClassicCube):
        backward = staticmethod(lambda ctx, g: g * Inner.apply(*ctx.saved_tensors))

    wrong(Outer, row="applies Inner", says=["0.8333 times", "Verify Inner"])


class Batched(Mul):
    forward = staticmethod(lambda a, b: a.sin() * b)

    setup_context = save_inputs


def test_a_wrong_vmap_rule():
    class OutDims(Batched):
        @staticmethod
        def vmap(info, in_dims, a, b):
            a, b = (
                t.expand(info.batch_size, *t.shape) if d is None else t.movedim(d, 0)
                for t, d in zip((a, b), in_dims, strict=True)
            )
            return OutDims.apply(a, b), 1

    square = x[:5].outer(y[:5])
    wrong(OutDims, square, square + 1, row="vmap", says=["out_dims"])

    class NoneDim(Batched):
        @staticmethod
        def vmap(info, in_dims, a, b):
            return NoneDim.apply(a.movedim(in_dims[0], 0), b.movedim(in_dims[1], 0)), 0

    report = wrong(NoneDim, square, square + 1, row="vmap", says=["in_dims", "None"])
    assert "Remove generate_vmap_rule" not in report["vmap"].text


def test_an_op_of_another_library_is_not_torchs():
    @torch.library.custom_op("hoglib_test::expo", mutates_args=())
    def expo(a: torch.Tensor) -> torch.Tensor:
        return a.exp()

    expo.register_autograd(
        lambda ctx, g: g * ctx.saved_tensors[0],
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output.detach()),
    )
    report = wrong(expo, row="saved", says=["`output.detach()`", "Save output 0 itself"])
    assert not any("torch's own" in row.text for row in report.failed)


def test_a_gradient_that_is_none_in_float32():
    class ByDtype(Sine):
        @staticmethod
        def backward(ctx, g):
            return Sine.backward(ctx, g) * (1.0 if g.dtype == torch.float64 else 2.0)

    wrong(ByDtype, row="dtype: float32", says=["100% off in float32"])


def test_a_vmap_rule_that_takes_the_incoming_gradient_for_one():
    class Times(Function):
        forward = staticmethod(lambda slope, g: slope * g)

        setup_context = save_inputs

        backward = by_saved(lambda u, slope, g: (u * g, u * slope))

        @staticmethod
        def vmap(info, in_dims, slope, g):
            if in_dims[0] is None:
                slope = slope.expand(info.batch_size, *slope.shape)
            first = g if in_dims[1] is None else g.select(in_dims[1], 0)
            return Times.apply(slope, first.expand_as(slope)), 0

    class Outer(Cube):
        backward = by_saved(lambda g, a: Times.apply(3 * a**2, g))

    wrong(Outer, row="vmap", says=["vmap over incoming gradients"])
