"""jvp against differences, closed forms and torch.func.jvp: value, tangent, and the tangent's gradient."""

import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import hoglib as hog
from hoglib._core.messages.closures import owner_of
from hoglib.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    NoSecondDerivative,
    UnsupportedError,
    VerificationError,
)
from hoglib.verification import entry_points
from tests.curvature.problems import F64, draw
from tests.functions import ClassicCube, Cube, Detached, DetachedTangent, OnceDifferentiable
from tests.graphs import graphs_of
from tests.models import MODELS, Fn, Through
from tests.models import build as build_plain
from tests.oracles import relative
from tests.rows import rows

MODES = ["auto", "forward", "reverse"]


def attention():
    """Four tokens of two numbers, of which the last two are (x, t)."""

    def run(net, x):
        tokens = torch.stack([x, x.sin(), x.flip(1), x * x[:, :1]], 1)
        q, k, v = net.qkv(net.norm(tokens))[:, None].chunk(3, -1)
        return net.out(F.scaled_dot_product_attention(q, k, v).flatten(1))

    return Fn(run, norm=nn.LayerNorm(2), qkv=nn.Linear(2, 6), out=nn.Linear(8, 2))


def applied(function):
    return nn.Sequential(nn.Linear(2, 3), Through(function), nn.Linear(3, 2))


OWN = {
    "attention": attention,
    "InstanceNorm": lambda: nn.Sequential(
        nn.Linear(2, 6), nn.Unflatten(1, (2, 3)), nn.InstanceNorm1d(2), nn.Flatten(), nn.Linear(6, 2)
    ),
    "a Function with a jvp": lambda: applied(Cube.apply),
    "a Function without a jvp": lambda: applied(ClassicCube.apply),
    "a checkpoint": lambda: applied(lambda x: checkpoint(torch.tanh, x, use_reentrant=False)),
    "remat": lambda: applied(hog.ops.remat(torch.tanh)),
}  # fmt: skip


def build(name):
    if name in MODELS:
        return build_plain(name)
    torch.manual_seed(0)
    return OWN[name]().double()


X, V, W = draw(5, 2, seed=1), draw(5, 2, seed=2), draw(5, 2, seed=3)


def truth(model, eps=1e-5):
    """f(x), J v, and d <W, J v> / d parameters, by differences of values and of ordinary gradients."""
    values, gradients = [], []
    parameters = [p for p in model.parameters() if p.requires_grad]
    for sign in (1, -1):
        y = model(X + sign * eps * V)
        values.append(y.detach())
        gradients.append(torch.autograd.grad((W * y).sum(), parameters, materialize_grads=True))
    quotient = [(a - b) / (2 * eps) for a, b in zip(*gradients, strict=True)]
    return model(X).detach(), (values[0] - values[1]) / (2 * eps), quotient


def loss_gradient(model, tangent):
    parameters = [p for p in model.parameters() if p.requires_grad]
    total = (W * tangent).sum()
    return torch.autograd.grad(total, parameters, retain_graph=True, materialize_grads=True)


@rows("name", [*MODELS, *OWN])
def test_value_tangent_and_its_gradient_are_those_of_differences(name):
    model = build(name)
    expected = truth(model)
    routes = ["auto"] if name in ("a Function without a jvp", "a checkpoint") else MODES
    for mode in routes:
        buffers = [b.clone() for b in model.buffers()]
        value, tangent = hog.jvp(lambda x: model(x), X, V, mode=mode)
        assert_close([*model.buffers()], buffers, rtol=0, atol=0)
        assert_close(value.detach(), expected[0])
        assert relative(tangent, expected[1]) < 1e-8
        assert relative(loss_gradient(model, tangent), expected[2]) < 1e-7
        assert_close(loss_gradient(model, value), loss_gradient(model, model(X)))


def test_torch_needs_the_stand_ins():
    model = build("attention")
    with pytest.raises(NotImplementedError, match="forward AD"):
        torch.func.jvp(model, (X,), (V,))
    model = build("LayerNorm")
    _, tangent = hog.jvp(model, X, V, mode="forward", stand_ins=False)
    assert relative(tangent, truth(model)[1]) < 1e-8
    assert relative(loss_gradient(model, tangent), truth(model)[2]) > 1e-3  # wrong without an error


def test_trees_go_in_and_come_out():
    def func(a, b):
        return {"y": a["x"] * b, "n": [(a["x"] > 0).long(), b.sin()], "c": torch.ones(2)}

    primals, tangents = ({"x": X}, X[:, :1]), ({"x": V}, V[:, :1])
    for mode in MODES:
        value, tangent = hog.jvp(func, primals, tangents, mode=mode)
        assert_close((value, tangent), torch.func.jvp(func, primals, tangents))
        assert not value["y"].requires_grad
        assert not tangent["y"].requires_grad  # nothing requires grad
    assert_close(hog.jvp(lambda parts: parts[0] * parts[1], [X, X], [V, V])[1], 2 * X * V)
    z, w = torch.complex(X, V), torch.complex(V, W)
    for mode in MODES:
        assert_close(hog.jvp(lambda z: z * z.conj() * z, z, w, mode=mode)[1], 2 * z * z.conj() * w + z * z * w.conj())  # fmt: skip


@rows("mode", MODES)
def test_primals_and_tangents_that_require_grad(mode):
    x, v = X.clone().requires_grad_(), V.clone().requires_grad_()
    y = 2 * x  # no leaf
    value, tangent = hog.jvp(torch.sin, y, v, mode=mode)
    found = torch.autograd.grad((W * tangent).sum() + value.sum(), [x, v])
    assert_close(found, (2 * y.cos() - 2 * W * v * y.sin(), W * y.cos()))
    with torch.no_grad():
        assert not any(t.requires_grad for t in hog.jvp(torch.sin, x, v, mode=mode))
    with torch.inference_mode():
        assert_close(hog.jvp(torch.sin, X + 0, V + 0, mode=mode)[1], V * X.cos())


@rows("mode", MODES)
def test_constants_are_those_of_backward(mode):
    """What is detached, and what runs under no_grad, which torch's forward mode differentiates."""

    @torch.no_grad()
    def scale(x):
        return x.square()

    def func(x):
        return (x - x.detach() ** 3) * scale(x)

    for context in (torch.enable_grad(), torch.no_grad()):
        with context:
            assert_close(hog.jvp(func, X, V, mode=mode)[1], V * X.square())
    before = torch._C._is_fwd_grad_enabled()
    with pytest.raises(ZeroDivisionError), torch.no_grad():
        hog.jvp(lambda x: 1 / 0, X, V, mode=mode)
    assert torch._C._is_fwd_grad_enabled() is before is True


def test_inside_of_itself_and_of_transforms():
    one = torch.ones((), dtype=F64)

    def second(f, x, **outer):
        return hog.jvp(lambda x: hog.jvp(f, x, one)[1], x, one, **outer)[1]

    x = torch.tensor(0.7, dtype=F64)
    assert_close(second(lambda x: x**5, x), 20 * x**3)
    norm = nn.LayerNorm(3).double()
    f = lambda x: norm(x * torch.arange(3) + x**2)[1]  # noqa: E731
    eps = 1e-4
    assert_close(second(f, x), (f(x + eps) - 2 * f(x) + f(x - eps)) / eps**2, atol=1e-6, rtol=0)
    # torch takes the derivative of a Function's own jvp for zero there: the outer one goes in reverse
    assert_close(second(Cube.apply, x), 6 * x)
    assert not torch.func.jvp(lambda x: torch.func.jvp(Cube.apply, (x,), (one,))[1], (x,), (one,))[
        1
    ]
    with pytest.raises(UnsupportedError, match=r"two levels of forward mode, got Cube"):
        second(Cube.apply, x, mode="forward")

    model = build("LayerNorm")
    rows = torch.func.vmap(lambda x, v: hog.jvp(model, x, v)[1])(X, V)
    assert_close(rows, hog.jvp(model, X, V)[1])
    params = dict(model.named_parameters())
    of_loss = torch.func.grad(
        lambda p: (W * hog.jvp(lambda x: torch.func.functional_call(model, p, x), X, V)[1]).sum()
    )
    assert relative([*of_loss(params).values()], truth(model)[2]) < 1e-7
    with pytest.raises(UnsupportedError, match="expected mode='auto' or 'forward' inside"):
        torch.func.vmap(lambda x: hog.jvp(model, x, x, mode="reverse")[1])(X)
    with forward_ad.dual_level(), pytest.raises(UnsupportedError, match=r"outside of .*dual_level"):
        hog.jvp(torch.sin, forward_ad.make_dual(X, V), V)


def test_functions_that_are_wrong_are_told_and_what_is_missing_raises():
    entry_points.forget_verdicts()
    for function, words in ((DetachedTangent, "DetachedTangent.jvp leaves"), (Detached, "Detached.backward leaves")):  # fmt: skip
        with pytest.warns(UserWarning, match=f"jvp: the second derivative of .*{words}"):
            hog.jvp(applied(function.apply).double(), X, V)
    with hog.second_order(on_wrong="raise"), pytest.raises(VerificationError, match="jvp: "):
        hog.jvp(applied(DetachedTangent.apply).double(), X, V)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for right in (Cube, ClassicCube):
            hog.jvp(applied(right.apply).double(), X, V)
    with pytest.raises(NoSecondDerivative, match="OnceDifferentiable, whose backward is @once"):
        hog.jvp(OnceDifferentiable.apply, X, V, mode="reverse")

    class Cut(ClassicCube):
        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return 2 * g * x**2 + (g * x**2).detach()

    class HalfOfSoftmax(ClassicCube):
        """Of a cotangent of ones both sides are zero, whatever is lost."""

        forward = staticmethod(lambda ctx, x: ctx.save_for_backward(x) or x.softmax(-1))

        @staticmethod
        def backward(ctx, g):
            p = ctx.saved_tensors[0].softmax(-1)
            grad = p * (g - (g * p).sum(-1, keepdim=True))
            return (grad + grad.detach()) / 2

    for cut in (Cut, HalfOfSoftmax):
        with pytest.raises(NoSecondDerivative, match="gradient has lost its graph"):
            hog.jvp(cut.apply, X, V)
    with pytest.raises(UnsupportedError, match="setup_context"):
        hog.jvp(ClassicCube.apply, X, V, mode="forward")
    with pytest.raises(UnsupportedError, match=r"expected no torch\.utils\.checkpoint in func"):
        hog.jvp(build("a checkpoint"), X, V, mode="forward")
    model = build("plain")
    found = checkpoint(lambda x: hog.jvp(model, x, V, mode="forward")[1], X, use_reentrant=False)
    assert relative(loss_gradient(model, found), truth(model)[2]) < 1e-7


WRONG = {
    "an integer": (torch.sin, (X, X.long()), (V, V), ArgumentTypeError, r"primals\[1\]: .* got a int64 tensor"),
    "a number": (torch.sin, {"t": 0.5}, {"t": 1.0}, ArgumentTypeError, r"primals\['t'\]: .* got float 0.5"),
    "nothing": (torch.sin, (), (), ArgumentValueError, "primals: expected at least one tensor"),
    "another structure": (torch.sin, (X,), V, ArgumentValueError, r"structure of primals \(tuple of 1\).*missing: \[0\]\. "),
    "another shape": (torch.sin, X, V[0], ArgumentValueError, r"tangents: expected \(5, 2\), got \(2,\)"),
    "a block": (torch.sin, X, V[..., None], ArgumentValueError, r"tangents: .* the shape of its place in primals"),
    "another dtype": (torch.sin, (X,), (V.float(),), ArgumentTypeError, r"tangents\[0\]: expected torch.float64 as in primals"),
    "no function": (X, X, V, ArgumentTypeError, "func: expected a function"),
    "a number out": (lambda x: (x, 3), X, V, ArgumentTypeError, r"tensors, got int 3 among them"),
    "no tensor out": (lambda x: None, X, V, ArgumentTypeError, r"func\(\*primals\): expected a tensor.* got NoneType"),
    "constant": (lambda x: x.detach(), X, V, NoSecondDerivative, "a value that depends on primals"),
    "constant of a parameter": (lambda x: nn.Parameter(V) * 1, X, V, NoSecondDerivative, "a value that depends on primals"),
}  # fmt: skip


@rows("case", WRONG)
def test_wrong_input_is_explained(case):
    func, primals, tangents, error, words = WRONG[case]
    for mode in MODES:
        with pytest.raises(error, match=words):
            hog.jvp(func, primals, tangents, mode=mode)


def test_wrong_options_are_explained():
    with pytest.raises(ArgumentValueError, match="mode: expected one of auto, forward, reverse"):
        hog.jvp(torch.sin, X, V, mode="forwards")
    with pytest.raises(ArgumentValueError, match="compile: expected one of inductor, eager"):
        hog.jvp(torch.sin, X, V, compile="jit")


@rows("name", ["BatchNorm", "attention", "a Function without a jvp"])
def test_compiled_it_is_the_same_also_for_a_func_that_is_made_anew(name):
    model = build(name)

    def made_anew():
        return lambda x: model(x)

    def graphs():
        return len(graphs_of(owner_of(made_anew())))

    before = graphs()  # of other models
    for _ in range(2):
        expected = truth(model)
        value, tangent = hog.jvp(made_anew(), X, V, compile="eager")
        assert graphs() == before + 1
        assert_close(value.detach(), expected[0])
        assert relative(tangent, expected[1]) < 1e-8
        assert relative(loss_gradient(model, tangent), expected[2]) < 1e-7
        same, _ = hog.jvp(made_anew(), X, X, compile="eager")  # one tensor twice
        assert_close(same, value)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.1)


def test_a_meanflow_step_compiles_as_one_loss():
    u = build("attention")
    z, v = X, V

    def loss(z, v):
        value, along = hog.jvp(u, z, v)
        return (value - (v - 0.3 * along).detach()).square().mean()

    plain = torch.autograd.grad(loss(z, v), [*u.parameters()])
    compiled = hog.compiled_loss(loss, backend="eager")
    assert_close(torch.autograd.grad(compiled(z, v), [*u.parameters()]), plain)
    target = (V - 0.3 * truth(u)[1]).detach()
    expected = torch.autograd.grad((u(X) - target).square().mean(), [*u.parameters()])
    assert relative(plain, expected) < 1e-7


def in_a_thread(call):
    """What a call returns, or raises, in another thread."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(call)
        return future.exception() or future.result()


def test_another_thread_in_forward_mode():
    """torch has one level of forward mode for all threads: the first that leaves it ends the others'."""
    x, v = torch.linspace(-1, 1, 5, dtype=F64), torch.ones(5, dtype=F64)
    cube = lambda p: p**3  # noqa: E731
    loss = lambda p: cube(p).sum()  # noqa: E731
    composite = hog.functional_loss(torch.nn.Linear(5, 1).double(), torch.nn.functional.mse_loss)
    params = hog.trainable_params(composite.model)
    batch = x[None], x[None, :1]
    found = {}

    def outer(p):
        found["jvp"] = in_a_thread(lambda: hog.jvp(cube, x, v)[1])
        found["forward jvp"] = in_a_thread(lambda: hog.jvp(cube, x, v, mode="forward"))
        found["hvp"] = in_a_thread(lambda: hog.hvp(loss, x, v, mode="forward-over-reverse"))
        found["reverse hvp"] = in_a_thread(lambda: hog.hvp(loss, x, v)[1])
        found["ggn_vp"] = in_a_thread(
            lambda: hog.ggn_vp(composite, params, params, batch, mode="forward")
        )
        return cube(p)

    assert_close(hog.jvp(outer, x, v)[1], 3 * x**2)
    assert_close(found["jvp"], 3 * x**2)
    assert_close(found["reverse hvp"], 6 * x)
    for name in ("forward jvp", "hvp", "ggn_vp"):
        assert isinstance(found[name], UnsupportedError), name
        assert "one thread at a time in forward mode" in str(found[name])
    # It is free
    assert_close(in_a_thread(lambda: hog.jvp(cube, x, v, mode="forward")[1]), 3 * x**2)


def test_a_function_that_works_in_place_changes_neither_primals_nor_tangents():
    x, v = torch.linspace(-1, 1, 5, dtype=F64), torch.ones(5, dtype=F64)
    before = x.clone()
    assert_close(hog.jvp(lambda p: p.mul_(3).relu_(), x, v)[1], 3 * (x > 0).to(F64))
    assert torch.equal(x, before)
    assert torch.equal(v, torch.ones_like(v))


@rows("mode", ["forward", "reverse"])
def test_a_tangent_that_is_not_finite_is_told_by_its_operation(mode):
    x = torch.tensor([0.0, 1.0], dtype=F64)
    with pytest.warns(UserWarning, match="jvp: .*first behind Sqrt at"):
        hog.jvp(lambda x: (x.sqrt(), x > 0), x, torch.ones_like(x), mode=mode)
    hog.jvp(lambda x: (x.square(), x > 0), x, torch.ones_like(x), mode=mode)


def test_gradients_of_examples_that_are_not_finite_are_told_by_their_operation():
    loss = hog.functional_loss(
        nn.Linear(2, 1, bias=False, dtype=F64), lambda y, t: (y - t).abs().sqrt().mean()
    )
    batch = draw(3, 2), torch.zeros(3, 1, dtype=F64)
    batch[0][0] = 0
    with pytest.warns(UserWarning, match="per_example_gradients: .*first behind Sqrt at"):
        hog.per_example_gradients(loss, hog.trainable_params(loss.model), batch)
