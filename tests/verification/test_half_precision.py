"""Functions that round to half precision inside: the right ones pass with a warning, the wrong ones do not."""

import pytest
import torch
from torch.autograd import Function

import hoglib as hog
from tests.functions import by_saved, save_inputs_for_both
from tests.rows import rows

DTYPES = [torch.bfloat16, torch.float16]
FIRST = "first derivative: reverse"
SECOND = "second derivative: reverse-over-reverse"


def function(name, forward, backward):
    """A Function of a forward (arguments -> output, saved) and a backward (saved, g -> gradients)."""

    def run(ctx, *args):
        y, saved = forward(*args)
        ctx.save_for_backward(*saved)
        return y

    def back(ctx, g):
        return backward(*ctx.saved_tensors, g)

    return type(name, (Function,), {"forward": staticmethod(run), "backward": staticmethod(back)})


def matrix_product(half, *, wrong=lambda x: x):
    def forward(x, w):
        return (x.to(half) @ w.to(half)).to(x.dtype), (x, w)

    def backward(x, w, g):
        h = g.to(half)
        gx, gw = h @ w.to(half).mT, wrong(x).to(half).mT @ h
        return gx.to(g.dtype), gw.to(g.dtype)

    return function("MatrixProduct", forward, backward)


def probabilities(half, *, wrong=lambda x: x):
    def forward(x):
        return x.to(half).softmax(-1).to(x.dtype), (x,)

    def backward(x, g):
        p, h = x.to(half).softmax(-1), g.to(half)
        return (p * (h - wrong((p * h).sum(-1, keepdim=True)))).to(g.dtype)

    return function("Probabilities", forward, backward)


def kept_in_half(half, *, wrong=lambda x: x):
    """A sine in full precision, whose backward rounds."""

    def forward(x):
        return x.sin(), (x,)

    def backward(x, g):
        return g * wrong(x.to(half)).cos().to(g.dtype)

    return function("Rounded", forward, backward)


KINDS = {
    "a matrix product": (matrix_product, [(4, 3), (3, 3)]),
    "a softmax": (probabilities, [(4, 3)]),
    "rounded in backward": (kept_in_half, [(4, 3)]),
}


def inputs(shapes, dtype, seed):
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=random, dtype=torch.float64).to(dtype) for shape in shapes]


@rows(
    ("seed", "kind", "half", "dtype"),
    [
        (0, "a matrix product", torch.bfloat16, torch.float64),
        (0, "rounded in backward", torch.bfloat16, torch.float64),
        (1, "a softmax", torch.float16, torch.float32),
    ],
)
def test_what_is_right_is_judged_in_its_precision_with_a_warning(seed, kind, half, dtype):
    make, shapes = KINDS[kind]
    report = hog.verify(make(half), inputs(shapes, dtype, seed))
    assert not report.failed, report
    assert report[FIRST].status == report[SECOND].status == "pass"
    row = report["dtype: float64"]
    assert row.status == "warn"
    name = str(half).removeprefix("torch.")
    assert f"it computes in {name} at " in row.text
    assert f"{name}." not in report[SECOND].text


@rows(
    ("seed", "kind", "half"),
    [(0, "a matrix product", torch.bfloat16), (1, "rounded in backward", torch.float16)],
)
def test_a_lost_second_derivative_is_told_with_its_cause(seed, kind, half):
    make, shapes = KINDS[kind]
    report = hog.verify(make(half, wrong=torch.Tensor.detach), inputs(shapes, torch.float32, seed))
    assert report[FIRST].status == "pass", report
    assert report[SECOND].status == "fail", report
    assert report.failed[0].name == "detached: .detach()"


@rows(
    ("factor", "kind", "half"),
    [
        (0.97, "a softmax", torch.bfloat16),
        (0.8, "rounded in backward", torch.bfloat16),
        (1.15, "a matrix product", torch.float16),
    ],
)
def test_a_wrong_first_derivative_is_told(factor, kind, half):
    make, shapes = KINDS[kind]
    wrong = make(half, wrong=lambda x: factor * x)
    report = hog.verify(wrong, inputs(shapes, torch.float32, 0))
    assert report[FIRST].status == "fail", report


@pytest.mark.parametrize("half", DTYPES)
def test_a_derivative_near_the_noise_does_not_pass(half):
    """y = x + a sin(9 x) in half precision, a = 3 eps; the second derivative is lost."""

    a = 3 * torch.finfo(half).eps

    def forward(x):
        h = x.to(half)
        return (h + a * (9 * h).sin()).to(x.dtype), (x,)

    def backward(x, g):
        return (g.to(half) * (1 + 9 * a * (9 * x.to(half).detach()).cos())).to(g.dtype)

    report = hog.verify(function("Ripples", forward, backward), inputs([(6, 5)], torch.float32, 0))
    assert report[SECOND].status in ("warn", "fail"), report


@pytest.mark.parametrize("half", DTYPES)
def test_a_mask_in_half_precision_changes_nothing(half):
    """A constant that half precision holds exactly: judged in float64."""

    def forward(x):
        return x * (x > 0).to(half).to(x.dtype), (x,)

    def backward(x, g):
        return g * (x > 0).to(half).to(g.dtype)

    report = hog.verify(function("Masked", forward, backward), inputs([(6, 5)], torch.float32, 0))
    assert not report.failed
    assert "dtype: float64" not in [row.name for row in report]


def of_half_alone(wrong=lambda x: x, factor=1):
    """x s(x) by a kernel that takes bfloat16 alone."""

    def forward(x):
        assert x.dtype == torch.bfloat16, x.dtype
        return x * x.sigmoid(), (x,)

    def backward(x, g):
        assert x.dtype == torch.bfloat16, x.dtype
        s = wrong(x).sigmoid()
        return factor * g * (s + x * s * (1 - s))

    return function("OfHalf", forward, backward)


def test_a_kernel_of_half_precision_alone_is_judged_by_means():
    x = inputs([(4, 3)], torch.bfloat16, 0)
    report = hog.verify(of_half_alone(), x)
    assert not report.failed, report
    assert report[FIRST].status == report[SECOND].status == "pass"
    assert "AssertionError" in report["dtype: float64"].text
    report = hog.verify(of_half_alone(), x, reference=torch.nn.functional.silu)
    assert not report.failed, report
    assert hog.verify(of_half_alone(factor=2), x)[FIRST].status == "fail"
    assert hog.verify(of_half_alone(torch.Tensor.detach), x)[SECOND].status == "fail"


class CastCube(Function):
    """A cube in float32, wherever autocast is on."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, g):
        return 3 * g * ctx.saved_tensors[0] ** 2


class CastRelu(CastCube):
    """Right: what is saved as a copy is read for its sign."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.relu()

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, g):
        return g * (ctx.saved_tensors[0] > 0)


class SavesResult(Function):
    """e^x, saved before it is cast back."""

    @staticmethod
    def forward(ctx, x):
        y = x.float().exp()
        ctx.save_for_backward(y)
        return y.to(x.dtype)

    backward = by_saved(lambda g, y: g * y.to(g.dtype))


@rows(
    ("of", "dtype", "under", "lost"),
    [
        (CastCube, torch.bfloat16, True, "input `x`"), (CastCube, torch.bfloat16, False, ""),
        (CastCube, torch.float32, True, ""), (CastRelu, torch.bfloat16, True, ""),
        (SavesResult, torch.bfloat16, False, "output 0"), (SavesResult, torch.float32, False, ""),
    ],
)  # fmt: skip
def test_what_is_saved_as_a_cast_copy_is_lost_in_the_dtypes_that_are_cast(of, dtype, under, lost):
    (x,) = inputs([(4, 3)], dtype, 0)
    with torch.autocast("cpu", torch.bfloat16, enabled=under):
        report = hog.verify(of, x)
        inside = hog.verify(lambda x: of.apply(x), x)
    for one in (report, inside):
        assert one.ok == (not lost), one
        assert not lost or f"It saves {lost} as copies in other dtypes" in one.failed[0].text


def test_forward_mode():
    class Sine(Function):
        generate_vmap_rule = True

        forward = staticmethod(lambda x: x.bfloat16().sin().to(x.dtype))

        setup_context = save_inputs_for_both

        backward = by_saved(lambda g, x: g * x.bfloat16().cos().to(g.dtype))

        jvp = by_saved(lambda t, x: t * x.bfloat16().cos().to(t.dtype))

    class Doubled(Sine):
        jvp = staticmethod(lambda ctx, t: 2 * Sine.jvp(ctx, t))

    x = inputs([(6, 5)], torch.float32, 0)
    report = hog.verify(Sine, x)
    assert not report.failed, report
    assert report["first derivative: forward"].status == "pass"
    assert report["second derivative: forward-over-reverse"].status == "pass"
    assert hog.verify(Doubled, x, orders=1)["first derivative: forward"].status == "fail"
