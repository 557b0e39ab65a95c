"""Applications of custom Functions are seen, however they are written, and nothing else is changed."""

import threading
from functools import partial

import pytest
import torch
from torch.autograd import forward_ad
from torch.autograd.function import FunctionMeta

from hoglib._core.torch_api import function_watch
from hoglib._core.torch_api.function_watch import (
    as_around,
    records_gradients,
    sees_applications,
    watching_functions,
)
from hoglib._core.torch_api.torch_internals import eagerly
from tests.rows import rows


class Classic(torch.autograd.Function):
    """Its forward takes ctx."""

    @staticmethod
    def forward(ctx, x, power=2):
        ctx.save_for_backward(x)
        ctx.power = power
        return x**power

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * ctx.power * x ** (ctx.power - 1), None


class Modern(torch.autograd.Function):
    """It has a setup_context."""

    generate_vmap_rule = True
    forward = staticmethod(lambda x: x.square())

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    backward = staticmethod(lambda ctx, g: 2 * g * ctx.saved_tensors[0])


class Outer(torch.autograd.Function):
    """It applies another one in forward, and one in backward."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return Modern.apply(x)

    backward = staticmethod(lambda ctx, g: g * classic(ctx.saved_tensors[0], 1) * 2)


class Wrapped(torch.autograd.Function):
    """User code around apply."""

    forward, backward = Classic.forward, Classic.backward

    @classmethod
    def apply(cls, *args):
        return super().apply(*args) + 0


class Raising(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: 1 / 0)


class Torn(torch.autograd.Function):
    """Its setup_context raises."""

    forward = staticmethod(lambda x: x * 1)
    setup_context = staticmethod(lambda ctx, inputs, output: 1 / 0)


class Tangents(Modern):
    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_forward(*inputs)

    jvp = staticmethod(lambda ctx, t: 2 * t * ctx.saved_tensors[0])


classic, modern, outer, wrapped = Classic.apply, Modern.apply, Outer.apply, Wrapped.apply
X = torch.tensor([1.0, 2.0])


def made_here(x):
    class Made(torch.autograd.Function):
        forward, backward = Classic.forward, Classic.backward

    return Made.apply(x)


def in_backward(x):
    y = outer(x.clone().requires_grad_())
    torch.autograd.grad(y.sum(), y.grad_fn.next_functions[0][0].variable, create_graph=True)


def without_grad(x):
    with torch.no_grad():
        classic(x)


def in_a_thread(x):
    thread = threading.Thread(target=modern, args=(x,))
    thread.start()
    thread.join()


compiled = torch.compile(lambda x: modern(x) + 1, backend="eager")


def eager(x):
    with eagerly():  # as entry points run it
        compiled(x)


def raising(x):
    for function in (Raising, Torn):
        with pytest.raises(ZeroDivisionError):
            function.apply(x.clone().requires_grad_())
    modern(x)


# how it is applied, and the Functions that are seen
CASES = {
    "an alias": (classic, ["Classic"]),
    "an alias with setup_context": (modern, ["Modern"]),
    "of the class": (lambda x: Modern.apply(Classic.apply(x)), ["Classic", "Modern"]),
    "a partial": (partial(map, classic), []),
    "mapped": (lambda x: [*map(classic, [x, x])], ["Classic", "Classic"]),
    "a subclass": (lambda x: type("Sub", (Modern,), {}).apply(x), ["Sub"]),
    "made in the call": (made_here, ["Made"]),
    "apply of the user's own": (lambda x: (wrapped(x), Wrapped.apply(x)), ["Wrapped", "Wrapped"]),
    "in another one's forward and backward": (in_backward, ["Outer", "Classic"]),
    "without gradients": (without_grad, ["Classic"]),
    "another thread's": (in_a_thread, []),
    "gradient": (torch.func.grad(lambda x: modern(x).sum()), ["ModernGenerated"]),
    "vmap": (torch.vmap(modern), ["VmappedModern"]),
    "compiled": (eager, ["Modern"]),
    "one that raises": (raising, ["Raising", "Torn", "Modern"]),
    "looked up by the user": (lambda x: (Modern.forward(x), Modern._backward_cls, Modern.setup_context), []),
}  # fmt: skip


@rows("name", CASES)
def test_applications_are_seen(name):
    function, expected = CASES[name]
    seen, ended = [], []

    def see(applied, args):
        seen.append(applied.__name__)
        return lambda node, result: ended.append(type(node)._forward_cls.__name__)

    with watching_functions(see) as applying:
        function(X)
        assert applying.depth == 0
    assert seen == expected
    assert ended == [name for name in seen if name not in ("Raising", "Torn")]
    function(X)
    assert len(seen) == len(expected)
    assert vars(FunctionMeta).keys().isdisjoint(function_watch._DESCRIPTORS)


def test_what_is_seen_is_as_around_the_application():
    found = []

    def see(function, args):
        with as_around():
            found.append((records_gradients() and (args[0] * 1).requires_grad, args))
        return lambda node, result: found.append((node, result))

    x = X.clone().requires_grad_()
    with watching_functions(see):
        y, z = modern(x), classic(x, 3)
    (enabled, given), (node, result), (_, third), (last, cubes) = found
    assert (enabled, given, third) == (True, (x,), (x, 3))
    assert (node, last) == (y.grad_fn, z.grad_fn)
    torch.testing.assert_close((result, cubes), (y, z))
    assert torch.equal(torch.autograd.grad(y.sum() + z.sum(), x)[0], 2 * x + 3 * x**2)


def test_tangents_are_seen_as_around_the_application():
    found = []

    def see(function, args):
        found.append(forward_ad.unpack_dual(args[0] * 3).tangent)

    with forward_ad.dual_level(), watching_functions(see):
        Tangents.apply(forward_ad.make_dual(X, X + 1))
    torch.testing.assert_close(found, [3 * (X + 1)])


def test_torch_is_asked_wherever_hoglib_is_imported():
    def asked(x):
        assert sees_applications()
        return x

    with torch.inference_mode():
        asked(0)
    torch.vmap(asked)(torch.ones(2))
