"""Custom Functions in a graph that is differentiated twice: which are refused, and which are told of."""

import warnings

import pytest
import torch
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

import hoglib as hog

F64 = torch.float64


class Cube(Function):
    """Right: it keeps its input."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x**3

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 3 * g * x**2

    @staticmethod
    def jvp(ctx, t):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * t


class Once(Cube):
    backward = staticmethod(once_differentiable(Cube.backward))


class Saves(Cube):
    """Keeps what forward made."""

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(3 * inputs[0] ** 2)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, g):
        (slope,) = ctx.saved_tensors
        return g * slope


class Attribute(Cube):
    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_forward(*inputs)
        ctx.slope = 3 * inputs[0] ** 2

    @staticmethod
    def backward(ctx, g):
        return g * ctx.slope


class Net(nn.Module):
    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.function = nn.Linear(2, 3), nn.Linear(3, 1), function

    def forward(self, x):
        return self.second(self.function(self.first(x)))


def problem(function):
    model = Net(function).double()
    loss, params = hog.functional_loss(model, F.mse_loss), hog.trainable_params(model)
    batch = (torch.ones(4, 2, dtype=F64), torch.zeros(4, 1, dtype=F64))
    return loss, params, {k: torch.ones_like(p) for k, p in params.items()}, batch


def test_once_differentiable_raises_by_name():
    loss, params, v, batch = problem(Once.apply)
    for mode in ("reverse-over-reverse", "forward-over-reverse"):
        with pytest.raises(RuntimeError, match=r"hvp: .* got Once, .*once_diff.*hoglib.verify"):
            hog.hvp(loss, params, v, batch, mode=mode)
    with pytest.raises(RuntimeError, match=r"hessian: .* got Once"):
        hog.hessian(loss, params, batch)


@pytest.mark.filterwarnings("ignore:.*from a difference of first ones")  # told besides
@pytest.mark.parametrize("mode", ["reverse-over-reverse", "forward-over-reverse"])
@pytest.mark.parametrize(
    ("function", "slot"), [(Saves, r"ctx.saved_tensors\[0\]"), (Attribute, "ctx.slope")]
)
def test_what_forward_made_and_kept_is_told_by_name(function, slot, mode):
    loss, params, v, batch = problem(function.apply)
    with pytest.warns(UserWarning, match=rf"hvp: {function.__name__} keeps {slot}.*hoglib.verify"):
        hog.hvp(loss, params, v, batch, mode=mode)


@pytest.mark.parametrize("over_tasks", ["vmap", "loop"])
def test_maml_looks_too(over_tasks):
    tasks = tuple((torch.ones(2, 3, 2), torch.zeros(2, 3, 1)) for _ in range(2))

    def run(function, **options):
        maml = hog.MAML(
            Net(function.apply), nn.functional.mse_loss, over_tasks=over_tasks, **options
        )
        maml.loss(tasks).backward()

    with pytest.raises(RuntimeError, match=r"the inner step: .* got Once"):
        run(Once)
    with pytest.warns(UserWarning, match="the inner step: Saves keeps"):
        run(Saves)
    run(Cube)
    run(Once, first_order=True)  # which differentiates once


class NoGrad(Cube):
    @staticmethod
    def backward(ctx, g):
        with torch.no_grad():
            return Cube.backward(ctx, g)


class Zero(Cube):
    """Stops the gradient."""

    @staticmethod
    def backward(ctx, g):
        return torch.zeros_like(g)


@pytest.mark.filterwarnings("ignore:.*from a difference of first ones")  # told besides
def test_a_backward_that_leaves_the_graph_is_told_by_name():
    loss, params, v, batch = problem(NoGrad.apply)
    for derivative in (
        lambda: hog.hvp(loss, params, v, batch),
        lambda: hog.hessian(loss, params, batch),
    ):
        with pytest.warns(UserWarning, match="backward of NoGrad gives a gradient without a graph"):
            derivative()


class Scaled(Function):
    """Keeps constants: a number, an integer tensor, a mask that was passed."""

    @staticmethod
    def forward(ctx, x, mask, index, factor):
        ctx.save_for_backward(x, mask, index)
        ctx.factor = factor
        return factor * x**3 * mask

    @staticmethod
    def backward(ctx, g):
        x, mask, _ = ctx.saved_tensors
        return 3 * ctx.factor * g * x**2 * mask, None, None, None


class Exp(Function):
    """Keeps its output, as an attribute too."""

    @staticmethod
    def forward(ctx, x):
        y = x.exp()
        ctx.save_for_backward(y)
        ctx.y = y
        return y

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        return g * y


class Doubled(Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, g):
        return 2 * g


# fmt: off
RIGHT = {
    "its input": Cube.apply,
    "its output": Exp.apply,
    "constants that were passed": lambda x: Scaled.apply(x, torch.full_like(x, 0.3), torch.tensor(1), 2.0),
    "hoglib's own": hog.ops.tanh,
    "a gradient that is stopped": lambda x: x + Zero.apply(x),
    "linear": lambda x: Doubled.apply(x),
    "on data only": lambda x: x + Once.apply(torch.ones_like(x)) + Saves.apply(torch.ones_like(x)),
    "detached": lambda x: x + Once.apply(x).detach(),
}
# fmt: on


@pytest.mark.parametrize("name", RIGHT)
def test_no_false_alarm(name):
    loss, params, v, batch = problem(RIGHT[name])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hog.hvp(loss, params, v, batch)


def scripted():
    torch.manual_seed(0)
    inner = torch.jit.script(nn.Sequential(nn.Linear(2, 3), nn.Tanh()).double())
    return nn.Sequential(inner, nn.Linear(3, 1).double())


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_scripted_modules_are_refused_where_torch_gives_zero():
    model = scripted()
    loss, params = hog.functional_loss(model, F.mse_loss), hog.trainable_params(model)
    batch = (torch.ones(4, 2, dtype=F64), torch.zeros(4, 1, dtype=F64))
    v = {k: torch.ones_like(p) for k, p in params.items()}
    hog.hvp(loss, params, v, batch)  # right in reverse
    with pytest.raises(NotImplementedError, match="got 0, which is scripted"):
        hog.hvp(loss, params, v, batch, mode="forward-over-reverse")
    tasks = tuple((torch.ones(2, 3, 2).double(), torch.zeros(2, 3, 1).double()) for _ in range(2))
    with pytest.raises(NotImplementedError, match="scripted"):
        hog.MAML(model, nn.functional.mse_loss, over_tasks="vmap").loss(tasks)
    hog.MAML(model, nn.functional.mse_loss, over_tasks="loop").loss(tasks)  # right in reverse
    with pytest.raises(TypeError, match="pass the module that was scripted"):
        hog.functional_loss(model[0], F.mse_loss)
