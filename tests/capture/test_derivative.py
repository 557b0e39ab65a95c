"""Captured functions are differentiable where they are otherwise, to any order."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import hoglib as hog
from tests.capture.models import captured, draw, small
from tests.functions import Cube

F64 = torch.float64


def orders(fn, x, others, count):
    """The derivatives by x and others of order 1 to count, each of a mixture of the one before."""
    found, value = [], fn(x)
    for k in range(count):
        grads = torch.autograd.grad(value, [x, *others], create_graph=k < count - 1, allow_unused=True, materialize_grads=True)  # fmt: skip
        found.append([g.detach() for g in grads])
        value = sum((g * g.detach().cos()).sum() for g in grads)
    return found


VALUES = {
    "a polynomial": lambda x: (x**4).sum() + (x[0] * x[1]).sum(),
    "of a gradient": lambda x: torch.func.grad(lambda x: (x.sin() * x).sum())(x).square().sum(),
    "of autograd.grad": lambda x: (
        torch.autograd.grad((x.exp() * x).sum(), x, create_graph=True)[0].cos().sum()
    ),
    "a custom Function": lambda x: Cube.apply(x).sin().sum(),
    "an op of hoglib": lambda x: hog.ops.swish(x, 1.5).square().sum(),
}


@pytest.mark.parametrize("fn", VALUES.values(), ids=VALUES)
def test_derivatives_to_third_order(fn):
    x = draw(2, 3).requires_grad_()
    fast = captured(fn)
    for _ in range(2):
        assert_close(orders(fast, x, [], 3), orders(fn, x, [], 3), rtol=1e-12, atol=1e-14)
        x = (1.1 * x).detach().requires_grad_()
    assert len(fast.signatures) == 1


def test_derivatives_by_parameters_that_it_reaches_to_third_order():
    model, x = small(), draw(5, 3).requires_grad_()
    others = list(model.parameters())

    def fn(x):
        slope = torch.autograd.grad(model(x).sum(), x, create_graph=True)[0]
        return (slope.norm(dim=1) - 1).square().mean()

    fast = captured(fn)
    for _ in range(2):
        assert_close(orders(fast, x, others, 3), orders(fn, x, others, 3), rtol=1e-10, atol=1e-13)
        with torch.no_grad():
            for p in others:
                p.mul_(1.1)


def test_derivatives_of_some_outputs_by_some_inputs():
    a, b = draw(3).requires_grad_(), draw(3, seed=1).requires_grad_()
    frozen = draw(3, seed=2)

    def fn(a, b, c):
        return {"x": a * b * c, "y": [a.sin(), (a > 0)], "z": c * 2, "n": 3}

    fast = captured(fn)
    for pick in (
        lambda r: r["x"].sum(),
        lambda r: r["y"][0].sum(),
        lambda r: r["x"].sum() + r["y"][0].sum(),
    ):
        for by in ([a], [b], [a, b]):
            picked = [pick(f(a, b, frozen)) for f in (fast, fn)]
            options = {"allow_unused": True, "materialize_grads": True}
            ours, theirs = (torch.autograd.grad(y, by, **options) for y in picked)
            assert_close(ours, theirs)
    assert not fast(a, b, frozen)["z"].requires_grad
    assert len(fast.signatures) == 1


def test_a_parameter_whose_value_is_not_used_has_a_gradient():
    class Ones(torch.autograd.Function):
        """Straight through: its value does not depend on its input, its derivative does."""

        surrogate = True

        forward = staticmethod(lambda ctx, x: torch.ones(x.shape, dtype=x.dtype))

        backward = staticmethod(lambda ctx, g: g * 3)

    weight = draw(3).requires_grad_()

    def fn(x):
        return (Ones.apply(weight) * x).sum()

    x = draw(3)
    for run in (captured(fn), hog.compiled_loss(fn, backend="eager")):
        (grad,) = torch.autograd.grad(run(x), weight)
        assert_close(grad, 3 * x)


def test_hooks_are_called_once():
    seen, weight = [], draw(3).requires_grad_()
    weight.register_hook(lambda g: (seen.append(g), 2 * g)[1])
    hidden = weight * 3
    hidden.register_hook(lambda g: g + 1)

    x = draw(3)
    for fn in (lambda x: (weight**2 * x).sum(), lambda x: (hidden**2 * x).sum()):
        fast = captured(fn)
        seen.clear()
        for _ in range(2):
            weight.grad = None
            fast(x).backward(retain_graph=True)
            ours, weight.grad = weight.grad, None
            fn(x).backward(retain_graph=True)
            assert_close(ours, weight.grad)
        assert len(seen) == 4


def test_tensors_of_a_closure_that_were_computed_from_each_other_are_refused():
    weight = draw(3).requires_grad_()
    hidden = weight.sin()
    later = hidden.cos()
    for fn in (lambda x: weight * hidden * x, lambda x: hidden * later * x):
        with pytest.raises(NotImplementedError, match="Pass it as an argument"):
            captured(fn)(draw(3))
        with torch.no_grad():
            assert_close(captured(fn)(draw(3)), fn(draw(3)))
    fast = captured(lambda x, hidden: (weight * hidden * x).sum())
    (grad,) = torch.autograd.grad(fast(draw(3), hidden), weight)
    assert_close(grad, (weight.sin() + weight * weight.cos()) * draw(3))


CHANGES = {
    "a parameter in place": lambda m: (
        m[0].weight.data.add_(0) is None or m[0].weight.detach().mul_(2)
    ),
    "a new parameter": lambda m: setattr(m[0], "weight", nn.Parameter(draw(4, 3))),
    "a new submodule": lambda m: m.__setitem__(0, nn.Linear(3, 4, dtype=F64)),
    "another mode": lambda m: m.eval(),
    "a hook": lambda m: m[0].register_forward_hook(lambda *given: None),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_backward_after_a_change_raises(change):
    model = small()
    fast = captured(lambda x: model(x).square().sum())
    fast(draw(5, 3)).backward()
    value = fast(draw(5, 3))
    change(model)
    with pytest.raises(
        RuntimeError, match=r"modified by an inplace operation|Call backward before they change"
    ):
        value.backward()


def test_backward_where_autocast_is_off_again():
    """The backward of what ran under autocast is that of autocast."""
    weight, x = torch.randn(8, 8, requires_grad=True), torch.randn(4, 8)

    def fn(x):
        return (x @ weight).tanh().float().square().sum()

    makes = captured(fn), hog.compiled_loss(fn, backend="eager"), fn
    for dtype in (torch.bfloat16, torch.float16):
        grads = []
        for run in makes:
            with torch.autocast("cpu", dtype):
                value = run(x)
            grads.append(torch.autograd.grad(value, weight)[0])
        assert_close(grads[0], grads[2])
        assert_close(grads[1], grads[2])


def test_a_region_without_autocast_inside():
    weight, x = torch.randn(8, 8, requires_grad=True), torch.randn(4, 8)

    def fn(x):
        first = x @ weight
        with torch.autocast("cpu", enabled=False):
            return first, x @ weight

    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(2):
            ours, theirs = captured(fn)(x), fn(x)
            assert [y.dtype for y in ours] == [torch.bfloat16, torch.float32]
            assert_close(ours, theirs)


def test_backward_outside_of_second_order():
    x = draw(2, 3, 4).requires_grad_()

    def fn(x):
        return torch.nn.functional.scaled_dot_product_attention(x, x, x).square().sum()

    with hog.second_order():
        value = captured(fn)(x)
        expected = fn(x)
    ours, theirs = (
        torch.autograd.grad(v, x, create_graph=True)[0].sum() for v in (value, expected)
    )
    assert_close(torch.autograd.grad(ours, x), torch.autograd.grad(theirs, x))


def test_inside_a_checkpoint():
    model, x = small(), draw(5, 3).requires_grad_()
    fast = captured(lambda x: model(x).square().sum())
    for run in (lambda x: checkpoint(fast, x, use_reentrant=False), fast):
        model.zero_grad()
        (grad,) = torch.autograd.grad(run(x), x, retain_graph=True)
        run(x).backward()
        assert_close(grad, torch.autograd.grad(model(x).square().sum(), x)[0])
        ours = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        model(x).square().sum().backward()
        assert_close(ours, [p.grad for p in model.parameters()])


def test_saved_tensors_elsewhere():
    model, x = small(), draw(5, 3).requires_grad_()
    fast = captured(lambda x: model(x).square().sum())
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        value = fast(x)
    expected = torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()])
    assert_close(torch.autograd.grad(value, [x, *model.parameters()]), expected)


# Where the function itself runs

TRANSFORMS = {
    "grad": lambda f, x: torch.func.grad(f)(x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
    "vmap": lambda f, x: torch.func.vmap(f)(x),
    "hessian": lambda f, x: torch.func.hessian(f)(x),
    "a dual level": lambda f, x: _dual(f, x),
    "make_fx": lambda f, x: torch.fx.experimental.proxy_tensor.make_fx(f)(x)(x),
    "torch.compile": lambda f, x: torch.compile(f, backend="eager")(x),
    "torch.compile of one graph": lambda f, x: torch.compile(f, backend="eager", fullgraph=True)(x),
}


def _dual(f, x):
    with torch.autograd.forward_ad.dual_level():
        dual = f(torch.autograd.forward_ad.make_dual(x, 2 * x))
        return torch.autograd.forward_ad.unpack_dual(dual).tangent


@pytest.mark.parametrize("apply", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize("make", [captured, lambda fn: hog.compiled_loss(fn, backend="eager")], ids=["compile", "compiled_loss"])  # fmt: skip
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile's own
def test_inside_of_something_else_the_function_itself_runs(apply, make):
    def fn(x):
        return (x.sin() * x).sum()

    fast, x = make(fn), draw(3, 2)
    assert_close(apply(fast, x), apply(fn, x))
    assert len(fast.signatures) == 0


def test_under_inference_mode_and_no_grad():
    model, x = small(), draw(5, 3)

    def fn(x):
        return torch.func.grad(lambda x: model(x).square().sum())(x)

    fast = captured(fn)
    expected = fn(draw(5, 3, seed=1))  # in inference mode torch 2.11 gives zeros
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            assert_close(fast(draw(5, 3, seed=1)), expected)
            assert not fast(x).requires_grad
    assert_close(fast(x), fn(x))


def test_random_numbers_are_those_that_torch_draws():
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1)).double()
    x = draw(6, 3).requires_grad_()

    def fn(x):
        noisy = x + 0.1 * torch.randn_like(x)
        slope = torch.autograd.grad(model(noisy).sum(), noisy, create_graph=True)[0]
        return (slope * torch.rand(3) * torch.empty_like(x).bernoulli_(0.5)).sum() + torch.randperm(
            4
        )[0]

    fast = captured(fn)
    for seed in range(3):
        torch.manual_seed(seed)
        ours = fast(x), torch.rand(2)
        torch.manual_seed(seed)
        assert_close(ours, (fn(x), torch.rand(2)), rtol=0, atol=0)
    torch.manual_seed(0)
    first = fast(x)
    assert not torch.equal(first, fast(x))
