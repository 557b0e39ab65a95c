"""The private torch API that hoglib reads: these fail when a torch release changes it."""

import threading

import pytest
import torch
from torch.overrides import TorchFunctionMode

import hoglib as hog
from hoglib._core.torch_api import function_watch, torch_internals
from tests.functions import Cube, made


def _levels(transform):
    seen = []

    def probe(x):
        levels = torch_internals.forward_levels()
        seen.append(
            (torch_internals.transforms_active(), levels, torch_internals.innermost_is_forward())
        )
        return x.sin()

    transform(probe)
    return seen[-1]


x = torch.tensor(0.3)


LEVELS = {
    "outside": (lambda f: f(x), (False, 0, False)),
    "grad": (lambda f: torch.func.grad(f)(x), (True, 0, False)),
    "vmap": (lambda f: torch.func.vmap(f)(x[None]), (True, 0, False)),
    "forward under grad and vmap": (lambda f: torch.func.vmap(torch.func.hessian(f))(x[None]), (True, 1, False)),
    "forward twice": (lambda f: torch.func.jacfwd(torch.func.jacfwd(f))(x), (True, 2, True)),
    "vmap under forward": (lambda f: torch.func.jvp(torch.func.vmap(f), (x[None],), (x[None],)), (True, 1, True)),
}  # fmt: skip


@pytest.mark.parametrize("name", LEVELS)
def test_transforms_and_forward_levels(name):
    transform, levels = LEVELS[name]
    assert _levels(transform) == levels


def test_forward_mode_by_torch_func_and_by_dual_numbers():
    seen = []

    def probe(x):
        seen.append(torch_internals.forward_mode_active())
        return x.sin()

    torch.func.grad(probe)(x)
    torch.func.jacfwd(probe)(x)
    with torch.autograd.forward_ad.dual_level():
        probe(x)
    probe(x)
    assert seen == [False, True, True, False]


Twice = made("Twice", lambda x: x + x, lambda g, x: g + g)


class FourTimes(torch.autograd.Function):
    forward = staticmethod(lambda x: Twice.apply(Twice.apply(x)))

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    backward = staticmethod(lambda ctx, g: 4 * g)


bound = Twice.apply


def test_functions_are_seen_as_they_are_applied_but_not_inside_one_another():
    seen = []
    with function_watch.watching_functions(lambda f, args: seen.append((f, args))) as applying:
        y = FourTimes.apply(bound(x))
        assert applying.depth == 0
        other = threading.Thread(target=lambda: seen.append(float(bound(x))))
        other.start()
        other.join()
    assert seen == [(Twice, (x,)), (FourTimes, (Twice.apply(x),)), float(2 * x)]
    assert float(y) == float(8 * x)
    Twice.apply(x)
    assert len(seen) == 3


def test_the_function_behind_those_that_transforms_make():
    seen = []

    def look(w):
        y = FourTimes.apply(w)
        seen.append(torch_internals.custom_function(y.grad_fn))
        return y

    torch.func.grad(look)(x)
    torch.func.grad(torch.func.grad(look))(x)
    assert seen == [FourTimes, FourTimes]


def test_bytes_of_what_a_graph_put_out():
    w = torch.randn(4, 3, requires_grad=True)
    y = (torch.randn(5, 4) @ w).double()
    assert torch_internals.output_bytes(y.grad_fn) == 5 * 3 * 8
    product = y.grad_fn.next_functions[0][0]
    assert torch_internals.output_bytes(product) == 5 * 3 * 4
    leaf = next(f for f, _ in product.next_functions if f is not None)
    assert torch_internals.output_bytes(leaf) == 0


def test_a_graph_that_is_not_kept_is_freed():
    x = torch.randn(3, requires_grad=True)
    y = x.sin()
    torch_internals.gradients([y], [x])
    with pytest.raises(RuntimeError, match="second time"):
        torch_internals.gradients([y], [x])


def test_modes_and_subclasses_handle_gradients():
    class Other(torch.Tensor):
        pass

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **kwargs or {})

    seen = []
    x = torch.ones(2, requires_grad=True)
    y = x.sin()
    with Mode():
        torch_internals.gradients([y], [x], [torch.ones(2)], retain_graph=True)
    assert torch.autograd.grad in seen
    own = x.as_subclass(Other)
    assert type(torch_internals.gradients([own.sin()], [own])[0]) is Other
    assert type(torch_internals.gradients([y], [x])[0]) is torch.Tensor


def test_after_a_backward_and_what_others_queued_in_it():
    seen, w = [], torch.ones(2, requires_grad=True)
    queue = torch.autograd.Variable._execution_engine.queue_callback

    def look(grad):
        torch_internals.after_backward(lambda: seen.append((w.grad.tolist(), len(seen))))
        queue(lambda: seen.append("queued"))

    y = 2 * w
    y.register_hook(look)
    y.sum().backward()
    assert seen == ["queued", ([2.0, 2.0], 1)]


def test_a_mode_steps_aside_and_comes_back():
    class Seeing(torch.overrides.TorchFunctionMode):
        calls = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            Seeing.calls += 1
            return func(*args, **(kwargs or {}))

    class Other(Seeing):
        pass

    def suspended(kind):
        return type("Suspended", (torch_internals.SuspendedMode,), {"kind": kind})()

    with Seeing():
        with suspended(Seeing):
            torch.sin(x)
        assert Seeing.calls == 0
        with suspended(Other):  # another one is let be
            torch.sin(x)
        assert Seeing.calls == 1
        with pytest.raises(ValueError, match="through"), suspended(Seeing):
            raise ValueError("through")
        torch.sin(x)
        assert Seeing.calls == 2
    with suspended(Seeing):
        torch.sin(x)


def test_what_was_compiled_is_found_again():
    layer, function = torch.nn.Linear(2, 2), torch.sin
    assert torch_internals.uncompiled(torch.compile(layer)) is layer
    assert torch_internals.is_compiled(torch.compile(layer))
    assert not torch_internals.is_compiled(layer)
    assert torch_internals.uncompiled(layer) is layer
    assert torch_internals.uncompiled(torch.compile(lambda x: function(x)))(x) == function(x)
    layer.compile()
    assert torch_internals.uncompiled(layer)(torch.ones(2)).shape == (2,)
    seen = []

    def twice(x):
        seen.append(torch_internals.checkpoint_frame())
        return x.sin()

    torch.utils.checkpoint.checkpoint(twice, x.clone().requires_grad_(), use_reentrant=False)
    assert callable(seen[0].recompute_fn)
    twice(x)
    assert seen[1] is None


def test_what_is_known_of_a_node():
    Double = made("Double", lambda x: 2 * x, lambda g, x: 2 * g)

    leaf = torch.ones(2, 3, requires_grad=True)
    with torch_internals.record_backward_origins():
        product = leaf * leaf.sin()
        (grad,) = torch.autograd.grad(product.sum(), leaf, create_graph=True)
    assert not torch.is_anomaly_enabled()
    assert torch_internals.output_shapes(product.grad_fn) == [(2, 3)]
    assert torch_internals.made_by(product.grad_fn) is None
    assert torch_internals.made_by(grad.grad_fn) is not None
    assert not torch_internals.has_saved_by_hooks(Double.apply(leaf).grad_fn)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        assert torch_internals.has_saved_by_hooks(Double.apply(leaf).grad_fn)


def test_a_watch_on_functions_may_stand_inside_of_another():
    outer, inner, x = [], [], torch.ones(2)
    with function_watch.watching_functions(lambda function, args: outer.append(function)):
        with function_watch.watching_functions(lambda function, args: inner.append(function)):
            Cube.apply(x)
        Cube.apply(x)
    assert (outer, inner) == ([Cube, Cube], [Cube])


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize(
    ("of", "held"),
    [
        (lambda y, z: y + z, True),
        (lambda y, z: y.view(2, 1) + z.view(2, 1), True),
        (lambda y, z: torch.cat([y, z]), False),
        (lambda y, z: y.sin(), False),
        (lambda y, z: y.view(2, 1), False),
        (lambda y, z: y * z, False),
    ],
    ids=["sum", "sum of views", "cat", "alone", "view", "product"],
)
def test_a_gradient_is_held_by_others(of, held, create_graph):
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    z, y, seen = x * 3, x * 2, []  # the backward of y runs first
    y.grad_fn.register_prehook(lambda g: seen.append(torch_internals.is_held_elsewhere(g[0])))
    torch.autograd.grad(of(y, z).square().sum(), x, create_graph=create_graph)
    assert seen == [held]


def test_each_backward_pass_has_a_number_of_its_own():
    x, found = torch.ones((), requires_grad=True), []
    y = x.sin()
    y.register_hook(lambda g: found.append(torch_internals.running_backward()))
    for _ in range(2):
        torch.autograd.grad(y, x, retain_graph=True)
    assert torch_internals.running_backward() == -1
    assert len({-1, *found}) == 3


@torch.library.custom_op("hoglib_internals::scaled_sine", mutates_args=())
def scaled_sine(x: torch.Tensor, *, by: float = 2.0) -> torch.Tensor:
    return by * x.sin()


def _keep(ctx, inputs, keyword_only_inputs, output):
    ctx.save_for_backward(*inputs)
    ctx.by = keyword_only_inputs["by"]


def _slope(ctx, g):
    return ctx.by * g * ctx.saved_tensors[0].cos()


scaled_sine.register_autograd(_slope, setup_context=_keep)


def test_operators_have_the_rules_that_the_user_registered():
    at = torch.tensor([0.3, 0.4], requires_grad=True)
    seen = []
    with function_watch.watching_functions(lambda function, args: seen.append((function, args))):
        y = scaled_sine(at, by=3.0)
    ((function, args),) = seen
    assert function.__qualname__ == "torch.ops.hoglib_internals.scaled_sine"
    assert args[:2] == (at, 3.0)
    assert torch_internals.custom_function(y.grad_fn) is function
    assert torch.equal(function.apply(*args), y)
    ours, torchs = (torch.autograd.grad(z.sum(), at)[0] for z in (function.apply(*args), y))
    assert torch.equal(ours, torchs)


def test_forward_mode_of_torch_drops_the_tangent_of_an_operator():
    """If this fails, `stand_ins.mode.run_operator` may leave right ones to torch."""
    f = lambda x: scaled_sine(x) + x  # noqa: E731
    _, tangent = torch.func.jvp(f, (x,), (torch.ones_like(x),))
    assert tangent == 1
    _, found = hog.jvp(f, x, torch.ones_like(x))
    torch.testing.assert_close(found, 2 * x.cos() + 1)


def test_nodes_of_torch_are_none_of_the_users():
    """Those have no class in Python, as a user's node in C++ has none."""
    at = torch.ones(2, requires_grad=True)
    y = torch._foreach_mul([at], 2.0)[0]
    assert type(y.grad_fn).__name__ == "CppFunction"
    assert torch_internals.cpp_function(y.grad_fn) == ""
