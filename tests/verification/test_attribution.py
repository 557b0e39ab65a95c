"""Attribution: which slot or cut loses the second derivative, what share of it, and how to fix it."""

import numpy as np
import pytest
import torch
from torch.autograd import Function

import hoglib as hog
from hoglib.verification import attribution
from hoglib.verification.subject import subject_of
from tests import functions
from tests.functions import by_saved

x = torch.tensor([0.3, -1.2, 2.0], dtype=torch.float64)


class BadSinh(Function):
    @staticmethod
    def forward(ctx, x):
        up, down = torch.exp(x), torch.exp(-x)
        ctx.save_for_backward(up.detach(), down)
        return (up - down) / 2

    backward = by_saved(lambda g, up, down: g * (up + down) / 2)


def diagnosed(function, *inputs, **options):
    (app,) = subject_of(function, inputs).applications
    return attribution.diagnose(app, **options)


def test_the_bad_sinh():
    report = hog.verify(BadSinh, x)
    row = report.failed[0]
    assert row.name in ("saved: ctx.saved_tensors[0], ctx.saved_tensors[1]",
                        "saved: ctx.saved_tensors[1], ctx.saved_tensors[0]")  # fmt: skip
    for words in ("compute `up`, `down` from", "save the inputs instead (`x`)", "one more output"):
        assert words in row.text
    assert f"{__file__.rsplit('/', 1)[1]}:" in row.text


class Kept(Function):
    """Reads in backward what forward kept elsewhere."""

    kept: torch.Tensor

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        Kept.kept = x.clone()
        return x**3

    @staticmethod
    def backward(ctx, g):
        return 3 * g * Kept.kept**2


def test_what_is_kept_outside_of_ctx_is_asked_for():
    row = hog.verify(Kept, x)["detached: unseen"]
    assert row.status == "fail"
    assert "loses 100% of the missing second-order term" in row.text
    assert "ctx shows no reason. Does it" in row.text


def test_shares_are_those_of_the_formula():
    # d2y/dx2 = (e^x - e^-x) / 2: at one point the shares are e^x and e^-x over their sum
    at = torch.tensor([1.0], dtype=torch.float64)
    shares = {slot.label: slot.share for slot in diagnosed(BadSinh, at).slots}
    up, down = np.exp(1.0), np.exp(-1.0)
    assert shares["ctx.saved_tensors[0]"] == pytest.approx(up / (up + down), rel=1e-6)
    assert shares["ctx.saved_tensors[1]"] == pytest.approx(down / (up + down), rel=1e-6)


class Product(Function):
    """a^2 b with a's square saved."""

    @staticmethod
    def forward(ctx, a, b):
        square = a * a
        ctx.save_for_backward(a, b)
        ctx.square = square
        return square * b

    @staticmethod
    def backward(ctx, g):
        a, b = ctx.saved_tensors
        return 2 * g * a * b, g * ctx.square


def test_only_the_slot_at_fault_is_blamed():
    found = diagnosed(Product, x, x + 1)
    assert [slot.label for slot in found.slots] == ["ctx.square"]
    assert found.slots[0].kind == "intermediate"
    assert found.slots[0].name == "square"
    assert found.slots[0].share == pytest.approx(1)
    assert not found.detached


def with_backward(rule):
    """x^3 by another backward."""

    class Cube(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            ctx.mask = x > 0  # depends on x, and not smoothly: no fault
            return x**3

        backward = staticmethod(lambda ctx, g: rule(ctx.saved_tensors[0], g))

    return Cube


def harmless(x, g):
    sign = torch.where(x.detach() > 0, 1.0, -1.0)
    return g * 3 * x**2 * sign * sign


# fmt: off
CUTS = {
    "detach in place": (lambda x, g: g * 3 * x.clone().detach_() ** 2, ".detach_()"),
    "float": (lambda x, g: g * torch.tensor([3 * float(t) ** 2 for t in x], dtype=x.dtype), "float()"),
    "torch.tensor": (lambda x, g: g * 3 * torch.tensor(x) ** 2, "torch.tensor()"),
    "a gradient of a gradient": (lambda x, g: _inner(x, g), "without create_graph=True"),
}
# fmt: on


def _inner(x, g):
    with torch.enable_grad():
        y = x**3
        return torch.autograd.grad(y, x, g, retain_graph=True)[0]


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
@pytest.mark.parametrize("case", CUTS)
def test_cuts_are_named_with_file_and_line(case):
    rule, how = CUTS[case]
    report = hog.verify(with_backward(rule), x)
    texts = [row.text for row in report.failed if row.name.startswith("detached: ")]
    assert any(how in text and "test_attribution.py:" in text for text in texts), str(report)
    assert report.failed[0].name.startswith("detached: ")  # cuts come first


def test_a_harmless_detach_is_not_blamed():
    assert hog.verify(with_backward(harmless), x).ok

    def both(x, g):
        keep = torch.where(x.detach() > 0, 1.0, 1.0)
        return g * 3 * x.data**2 * keep

    cuts = diagnosed(with_backward(both), x).detached
    assert [cut.how for cut in cuts] == [".data"]


def test_two_cuts_on_one_way_are_both_blamed():
    def twice(x, g):
        a = x.detach()
        return g * 3 * (a.data) ** 2

    def apart(x, g):
        return g.detach() * 3 * x.detach() ** 2

    assert len(diagnosed(with_backward(twice), x).detached) == 1  # the second has nothing to cut
    assert len(diagnosed(with_backward(apart), x).detached) == 1  # one line, one place


def test_once_differentiable_is_seen_through():
    once = torch.autograd.function.once_differentiable

    class Right(with_backward(lambda x, g: g * 3 * x**2)):
        backward = staticmethod(once(lambda ctx, g: g * 3 * ctx.saved_tensors[0] ** 2))

    class Wrong(Right):
        backward = staticmethod(once(lambda ctx, g: g * 3 * ctx.saved_tensors[0].detach() ** 2))

    def text(function):
        return hog.verify(function, x)["detached: @once_differentiable"].text

    assert "Without it the second derivative is right" in text(Right)
    assert "would still be wrong" in text(Wrong)


def test_the_function_at_fault_in_a_module_is_named():
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.tensor([0.7, -1.3, 0.2]))

        def forward(self, x):
            right = with_backward(lambda x, g: g * 3 * x**2)
            return right.apply(x) * BadSinh.apply(self.weight * x)

    report = hog.verify(torch.nn.Sequential(Layer(), torch.nn.Linear(3, 2)), torch.randn(4, 3))
    assert report.failed[0].name.startswith("BadSinh: saved: ")


def test_a_cut_in_jvp_is_named_as_such():
    class Cube(functions.Cube):
        jvp = staticmethod(lambda ctx, t: 3 * t * ctx.saved_tensors[0].detach() ** 2)

    report = hog.verify(Cube, x)
    failed = [row.name for row in report.failed]
    assert failed == ["detached: .detach()", "second derivative: reverse-over-forward"]
    assert "Cube.jvp leaves the graph" in report.failed[0].text


def test_ctx_may_use_any_name():
    class Names(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.slots, ctx.saved, ctx.record, ctx.attributes = [1], 2, 3, {"a": 4}
            ctx.save_for_backward(x)
            assert ctx.slots == [1]
            with pytest.raises(AttributeError):
                ctx.nothing  # noqa: B018
            return x**3

        @staticmethod
        def backward(ctx, g):
            assert (ctx.slots, ctx.saved, ctx.record, ctx.attributes) == ([1], 2, 3, {"a": 4})
            (x,) = ctx.saved_tensors
            return 3 * g * x**2

    assert hog.verify(Names, x).ok
