"""remat: the derivatives are those of the function, the memory is that of its inputs."""

import gc
import types
import weakref
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import gradgradcheck
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

import hoglib as hog
from hoglib.ops import remat
from tests.functions import ClassicCube
from tests.memory import peak_bytes
from tests.models import Fn
from tests.refused import refused
from tests.rows import rows

DOUBLE = torch.float64
WEIGHT = torch.ones(3)
LAYER = nn.Linear(3, 3)


def randn(*shape: int, grad: bool = False, dtype: torch.dtype = DOUBLE) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + len(shape))
    return torch.randn(*shape, dtype=dtype, generator=generator).requires_grad_(grad)


def layer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.tanh(x @ weight.mT + bias) * x.sum(-1, keepdim=True)


def with_our_ops(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return hog.ops.swish(hog.ops.linear_act(x, weight, bias, act="swish"), bias)


def normalised(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.softmax(F.softplus(F.linear(x, weight, bias)), -1).exp()


def inner_gradient(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x @ grad(lambda w: F.softplus(x @ w.mT).pow(2).sum())(weight).mT + bias


def returns_an_input(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return pytree.tree_map(torch.clone, {"x": x, "w": weight.T})["w"].sum() * bias + x[:, :1]


def nested(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return remat(torch.sin)(remat(layer)(x, weight, bias)) + bias


def layer_and_sine(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return layer(x, weight, bias).sin() + bias


FUNCTIONS = {
    "nested": layer_and_sine,
    "layer": layer,
    "with hoglib ops": with_our_ops,
    "normalised": normalised,
    "with a gradient inside": inner_gradient,
    "with views": returns_an_input,
}


def arguments() -> tuple[Tensor, Tensor, Tensor]:
    return randn(3, 4, grad=True), randn(5, 4, grad=True), randn(5, grad=True)


def scalar(fn: Callable[..., Any]) -> Callable[..., Tensor]:
    return lambda *args: sum(leaf.sin().sum() for leaf in pytree.tree_leaves(fn(*args)))


ALL = (0, 1, 2)
TRANSFORMS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "grad": lambda f: grad(scalar(f), ALL),
    "grad of grad": lambda f: grad(scalar(grad(scalar(f), ALL)), ALL),
    "third order": lambda f: grad(scalar(grad(scalar(grad(scalar(f), ALL)), ALL)), ALL),
    "vjp": lambda f: lambda *args: vjp(f, *args)[1](f(*args)),
    "jvp": lambda f: lambda *args: jvp(f, args, args),
    "jacrev of jacrev": lambda f: jacrev(jacrev(scalar(f), ALL), ALL),
    "jacfwd of grad": lambda f: hessian(scalar(f), ALL),
    "grad of jvp": lambda f: grad(scalar(lambda *args: jvp(f, args, args)[1]), ALL),
    "jvp of jvp": lambda f: jacfwd(jacfwd(scalar(f), ALL), ALL),
    "vmap of grad": lambda f: lambda x, w, b: vmap(grad(scalar(f), ALL), (0, None, None))(torch.stack([x, 2 * x]), w, b),
    "grad of vmap": lambda f: lambda x, w, b: grad(scalar(vmap(f, (None, 0, None))), ALL)(x, torch.stack([w, 2 * w]), b),
    "vmap of hessian": lambda f: lambda x, w, b: vmap(hessian(scalar(f), ALL), (None, None, 0))(x, w, torch.stack([b, -b])),
    "vmap of grad of vmap of grad": lambda f: (
        lambda x, w, b: vmap(
            grad(scalar(vmap(grad(scalar(f), ALL), (0, None, None))), 1), (None, 0, None)
        )(torch.stack([x, 2 * x]), torch.stack([w, -w]), b)
    ),
}  # fmt: skip


@rows(("fn", "transform"), [*product(FUNCTIONS, TRANSFORMS)])
def test_torch_func_gives_what_it_gives_for_the_function(fn: str, transform: str) -> None:
    function, differentiate = FUNCTIONS[fn], TRANSFORMS[transform]
    inputs = tuple(t.detach() for t in arguments())
    expected, got = (differentiate(f)(*inputs) for f in (function, remat(nested if fn == "nested" else function)))  # fmt: skip
    torch.testing.assert_close(got, expected, atol=1e-11, rtol=1e-9)


def test_a_graph_made_outside_may_be_differentiated_inside_a_transform() -> None:
    x, weight, bias = arguments()

    def product(fn: Callable[..., Tensor]) -> Any:
        y = fn(x, weight, bias)
        v = torch.ones_like(y)
        return jvp(lambda v: torch.autograd.grad(y, weight, v, retain_graph=True)[0], (v,), (v,))

    torch.testing.assert_close(product(remat(layer)), product(layer))


# Forward mode.


def views(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    return x, weight.view(-1), x @ weight.mT + bias


def without_forward_mode_of_its_backward(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.silu(x @ weight.mT + bias)


@rows("fn", [layer, views, without_forward_mode_of_its_backward])
@rows("moved", [(0, 1, 2), (1,)])
def test_dual_tensors(fn: Callable[..., Any], moved: tuple[int, ...]) -> None:
    def second(run: Callable[..., Any]) -> Any:
        inputs, ad = list(arguments()), torch.autograd.forward_ad
        options: Any = {"allow_unused": True, "materialize_grads": True}
        with ad.dual_level():
            duals = [ad.make_dual(x, x.detach().cos()) if i in moved else x for i, x in enumerate(inputs)]  # fmt: skip
            tangent = ad.unpack_dual(scalar(run)(*duals)).tangent
        first = torch.autograd.grad(tangent, inputs, create_graph=True, **options)
        return first, torch.autograd.grad(sum(g.sin().sum() for g in first), inputs, **options)

    torch.testing.assert_close(second(remat(fn)), second(fn))


def test_two_levels_of_forward_mode_where_torch_needs_a_graph() -> None:
    x = randn(4)
    for fn in (F.silu, lambda x: hog.ops.swish(x, x), F.gelu):
        torch.testing.assert_close(
            jacfwd(jacfwd(scalar(remat(fn))))(x), jacrev(jacrev(scalar(fn)))(x)
        )


def test_dropout_has_one_mask_in_forward_over_reverse() -> None:
    def noisy(x: Tensor) -> Tensor:  # torch draws in the order of memory, but inside of torch.func
        return F.dropout(x.mT.sin(), 0.5).mT.exp()

    x, v = randn(6, 5), torch.ones(6, 5, dtype=DOUBLE)
    torch.manual_seed(0)
    got = jvp(grad(lambda x: remat(noisy)(x).pow(2).sum()), (x,), (v,))[1]
    torch.manual_seed(0)
    expected = jvp(grad(lambda x: noisy(x).pow(2).sum()), (x,), (v,))[1]
    torch.testing.assert_close(got, expected)


def test_forward_over_reverse_keeps_no_gradient_beside_the_product() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(16)))
    loss, params = hog.functional_loss(model, F.mse_loss), hog.trainable_params(model)
    v = {name: torch.randn_like(p) for name, p in params.items()}
    x = torch.randn(1, 32)
    products = []

    def product() -> None:
        found = hog.hvp(loss, params, v, (x, x), mode="forward-over-reverse", remat=True)
        products.append(found[1])

    peak = peak_bytes(product, torch.device("cpu"))
    assert peak < 1.5 * sum(p.nbytes for p in params.values())  # 2 with the gradient
    expected = hog.hvp(loss, params, v, (x, x))[1]
    torch.testing.assert_close(products[0], expected)


# What is saved, and how often the function runs.


def saved_by(run: Callable[[], Any]) -> list[torch.Size]:
    shapes = []

    def pack(tensor: Tensor) -> Tensor:
        shapes.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return shapes


def deep(x: Tensor, weight: Tensor) -> Tensor:
    for _ in range(10):
        x = torch.tanh(x @ weight)
    return x


def test_the_gradient_saves_only_its_inputs_too() -> None:
    x, weight, v = randn(7, 5, grad=True), randn(5, 5, grad=True), randn(7, 5, grad=True)
    y = remat(deep)(x, weight)
    (gradient,) = torch.autograd.grad(y, weight, v, create_graph=True)
    expected = [x, weight, v]
    for order in (2, 3):
        node = gradient.grad_fn
        assert [t.shape for t in node.saved_tensors] == [t.shape for t in expected], order
        u = torch.ones_like(gradient)
        (gradient,) = torch.autograd.grad(gradient, weight, u, create_graph=True)
        expected.append(u)


@rows("inside", [False, True], ids=["alone", "nested"])
def test_each_order_runs_the_function_once_more(inside: bool) -> None:
    runs = []

    def counted(x: Tensor) -> Tensor:
        runs.append(1)
        return x.sin()

    x, inner = randn(3, grad=True), remat(counted)
    y = remat(lambda x: inner(x).exp())(x) if inside else inner(x)
    assert len(runs) == 1
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    assert len(runs) == 2
    torch.autograd.grad(gradient.sum(), x)
    assert len(runs) == 3


def test_values_and_tangents_come_from_one_run() -> None:
    runs = []

    def counted(x: Tensor) -> tuple[Tensor, Tensor]:
        runs.append(1)
        return x.sin(), x.argsort()  # one without derivatives

    def loss(x: Tensor) -> Tensor:
        y, order = remat(counted)(x)
        return y[order].pow(3)[0]

    x, v = randn(3), torch.ones(3, dtype=DOUBLE)
    jvp(loss, (x,), (v,))
    assert len(runs) == 1
    got = jvp(grad(loss), (x,), (v,))[1]
    assert len(runs) == 3  # forward and backward
    expected = jvp(grad(lambda x: x.sin()[x.argsort()].pow(3)[0]), (x,), (v,))[1]
    torch.testing.assert_close(got, expected)


def test_a_first_run_that_needs_gradients_enabled_draws_once() -> None:
    def noisy(x: Tensor) -> Tensor:
        x = F.dropout(x, 0.5)
        if not torch.is_grad_enabled():  # as torch raises in forward mode of some operations
            raise NotImplementedError
        return x.sin()

    x, v = randn(6, 5), torch.ones(6, 5, dtype=DOUBLE)
    results = []
    for fn in (remat(noisy), noisy):
        torch.manual_seed(0)
        results.append((jvp(fn, (x,), (v,)), torch.rand(2)))
    torch.testing.assert_close(*results)


def test_inputs_and_outputs_are_freed_with_the_graph() -> None:
    x = randn(3, grad=True)
    hidden = x * 2
    watch = weakref.ref(hidden)
    y = remat(torch.sin)(hidden)
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    del hidden, y, gradient
    gc.collect()
    assert watch() is None


def test_a_call_is_freed_without_a_garbage_collection() -> None:
    """With the values of a buffer before the first run."""

    def counted(net: nn.Module, x: Tensor) -> Any:
        net.count += 1
        return x * net.count

    fn, x = remat(Fn(counted, count=torch.zeros(64))), randn(64, grad=True)

    def steps(count: int) -> None:
        for _ in range(count):
            torch.autograd.grad(fn(x).sum(), x)

    gc.disable()
    try:
        _, one, four = (peak_bytes(partial(steps, n), x.device) for n in (1, 1, 4))
    finally:
        gc.enable()
    assert four == one


def test_backward_frees_what_was_saved() -> None:
    y = remat(torch.sin)(randn(3, grad=True))
    y.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()


def test_nothing_is_saved_without_grad() -> None:
    x = randn(3, grad=True)
    with torch.no_grad():
        assert not remat(torch.sin)(x).requires_grad
    with torch.inference_mode():
        assert remat(torch.sin)(x).is_inference()


def test_an_input_that_was_changed_since_is_noticed() -> None:
    x, weight = randn(7, 5, grad=True), randn(5, 5)
    y = remat(deep)(x, weight)
    weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# What goes in and comes out.


def test_pytrees_options_and_keywords() -> None:
    def fn(state: dict[str, Any], scale: float, *, name: str, extra: Tensor) -> dict[str, Any]:
        a, (b, c) = state["a"], state["rest"]
        return {"sum": a * b * scale + extra, "name": name, "pair": (c.sin(), None, 3)}

    a, b, c, extra = (randn(n, grad=True) for n in (4, 4, 2, 4))
    result = remat(fn)({"a": a, "rest": [b, c]}, 2.0, name="run", extra=extra)
    assert result["name"] == "run"
    assert result["pair"][1:] == (None, 3)
    expected = fn({"a": a, "rest": [b, c]}, 2.0, name="run", extra=extra)
    loss = [r["sum"].pow(2).sum() + r["pair"][0].sum() for r in (result, expected)]
    torch.testing.assert_close(
        *(torch.autograd.grad(value, [a, b, c, extra], create_graph=True) for value in loss)
    )


def test_outputs_without_derivatives() -> None:
    x = randn(3, 4, grad=True)

    def largest(x: Tensor) -> tuple[Tensor, Tensor]:
        return tuple(x.exp().max(-1))

    values, indices = remat(largest)(x)
    assert indices.dtype == torch.int64
    assert not indices.requires_grad
    torch.testing.assert_close(
        torch.autograd.grad(values.sum(), x), torch.autograd.grad(largest(x)[0].sum(), x)
    )
    got = vmap(grad(lambda x: remat(largest)(x[None])[0].sum()))(x.detach())
    torch.testing.assert_close(got, torch.autograd.grad(largest(x)[0].sum(), x)[0])


def test_integer_inputs_are_passed_on() -> None:
    table, rows = randn(6, 3, grad=True), torch.tensor([1, 5, 1])
    assert gradgradcheck(remat(lambda rows, table: F.embedding(rows, table).exp()), (rows, table))


def test_an_output_without_an_incoming_gradient() -> None:
    x, y = randn(4, grad=True), randn(4, grad=True)

    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x.sin(), (x * y).cos(), y.detach()

    for used in range(2):
        got = torch.autograd.grad(
            remat(fn)(x, y)[used].sum(), [x, y], create_graph=True, allow_unused=True
        )
        expected = torch.autograd.grad(fn(x, y)[used].sum(), [x, y], allow_unused=True)
        assert [g is None for g in got] == [g is None for g in expected]
        torch.testing.assert_close(got[0], expected[0])
    cut = torch.autograd.grad(remat(fn)(x, y)[2].sum(), y, allow_unused=True)
    assert cut == (None,)


def test_an_input_that_comes_back_and_one_that_is_there_twice() -> None:
    x = randn(4, grad=True)

    def fn(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return a, a * b, b.view(2, 2)

    torch.testing.assert_close(
        grad(lambda x: sum(t.pow(3).sum() for t in remat(fn)(x, x)))(x.detach()),
        grad(lambda x: sum(t.pow(3).sum() for t in fn(x, x)))(x.detach()),
    )
    got = torch.autograd.grad(sum(t.pow(3).sum() for t in remat(fn)(x, x)), x)
    torch.testing.assert_close(got, torch.autograd.grad(2 * x.pow(3).sum() + x.pow(6).sum(), x))


def test_a_function_without_tensors() -> None:
    assert remat(lambda n: n + 1)(1) == 2
    assert remat(lambda x: "no tensor")(randn(2, grad=True)) == "no tensor"


# The world around the first run.


def test_dropout_draws_the_same_mask_and_leaves_the_generator_alone() -> None:
    def fn(x: Tensor) -> Tensor:
        return F.dropout(x, 0.5).exp()

    x = randn(50, grad=True)
    results = []
    for run in (fn, remat(fn)):
        torch.manual_seed(3)
        first = torch.autograd.grad(run(x).pow(2).sum(), x, create_graph=True)[0]
        torch.rand(5)  # the state moves on between the runs
        second = torch.autograd.grad(first.sum(), x)[0]
        results.append((first, second, torch.rand(4)))
    torch.testing.assert_close(*results, rtol=0, atol=0)


@rows("where", ["argument", "closure", "module"])
def test_a_generator_is_rewound_too(where: str) -> None:
    x = randn(20, grad=True)
    generator = torch.Generator()

    def given_(x: Tensor, generator: torch.Generator) -> Tensor:
        return x.pow(2) * torch.randn(20, generator=generator, dtype=DOUBLE)

    def closed(x: Tensor) -> Tensor:
        return given_(x, generator)

    module = Fn(lambda module, x: given_(x, module.generator))
    module.generator = generator
    fns = {"argument": partial(remat(given_), generator=generator), "closure": remat(closed)}
    fn = fns.get(where) or remat(module)
    results = []
    for run in (closed, fn):
        generator.manual_seed(1)
        value = run(x)
        torch.randn(3, generator=generator)
        results.append((*torch.autograd.grad(value.sum(), x), torch.rand(2, generator=generator)))
    torch.testing.assert_close(*results, rtol=0, atol=0)


@rows("randomness", ["same", "different"])
def test_random_numbers_under_vmap(randomness: str) -> None:
    x = randn(4, 20)

    def fn(x: Tensor) -> Tensor:
        return F.dropout(x, 0.5).exp()

    results = []
    for run in (fn, remat(fn)):
        torch.manual_seed(0)
        gradient = vmap(lambda x, run=run: vjp(run, x)[1](x)[0], randomness=randomness)(x)
        results.append(gradient)
    torch.testing.assert_close(*results)


@rows("inside", [True, False], ids=["autocast on", "autocast off inside"])
def test_autocast_is_as_it_was(inside: bool) -> None:
    x, weight = randn(8, 8, dtype=torch.float32, grad=True), randn(8, 8, dtype=torch.float32)
    weight = weight.requires_grad_()

    def fn(x: Tensor, weight: Tensor) -> Tensor:
        return (x @ weight).float().exp() @ weight

    results = []
    for run in (fn, remat(fn)):
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            y = run(x, weight)
        assert y.dtype == (torch.bfloat16 if inside else torch.float32)
        with torch.autocast("cpu", torch.bfloat16, enabled=not inside):
            first = torch.autograd.grad(y.float().sum(), [x, weight], create_graph=True)
        results.append((first, torch.autograd.grad(sum(g.sum() for g in first), [x, weight])))
    tolerance = 0.05 if inside else 1e-5  # torch casts the gradient of a shared weight once
    torch.testing.assert_close(*results, rtol=tolerance, atol=tolerance * 100)


def test_autocast_keeps_no_cast_without_a_graph() -> None:
    x, weight = randn(8, 8, dtype=torch.float32), nn.Parameter(randn(8, 8, dtype=torch.float32))
    with torch.autocast("cpu", torch.bfloat16):
        remat(torch.matmul)(x, weight)
        y = x @ weight  # would find the cast of the first run, which has no graph
    assert torch.autograd.grad(y.float().sum(), weight)[0].abs().sum() > 0


# Modules.


def test_the_parameters_of_a_module_get_their_gradients() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 2)).double()
    params = list(model.parameters())
    x = randn(3, 4)

    def both(run: Callable[[Tensor], Tensor]) -> Any:
        first = torch.autograd.grad(run(x).pow(2).sum(), params, create_graph=True)
        return first, torch.autograd.grad(sum(g.sin().sum() for g in first), params)

    torch.testing.assert_close(both(remat(model)), both(model))
    assert saved_by(lambda: remat(model)(x)) == [x.shape, *(p.shape for p in params)]


def test_an_unused_or_frozen_parameter_gets_none() -> None:
    model = nn.ModuleDict({"used": nn.Linear(3, 3), "unused": nn.Linear(3, 3)})
    model["used"].weight.requires_grad_(False)

    def fn(model: nn.ModuleDict, x: Tensor) -> Tensor:
        return model["used"](x)

    remat(fn)(model, torch.ones(2, 3)).sum().backward()
    assert model["unused"].weight.grad is None
    assert model["used"].weight.grad is None
    torch.testing.assert_close(model["used"].bias.grad, torch.full((3,), 2.0))


def norms() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.BatchNorm1d(4)).double()


def test_batch_norm_updates_its_statistics_once() -> None:
    plain, ours = norms(), norms()
    for x in (randn(6, 3), randn(8, 3)):
        results = []
        for model, run in ((plain, plain), (ours, remat(ours))):
            params = list(model.parameters())
            first = torch.autograd.grad(run(x).pow(3).sum(), params, create_graph=True)
            results.append((first, torch.autograd.grad(sum(g.sum() for g in first), params)))
        torch.testing.assert_close(*results, atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(ours.state_dict(), plain.state_dict(), rtol=0, atol=0)
    assert ours[1].num_batches_tracked == 2


def test_the_mode_of_the_first_run_counts() -> None:
    results = []
    for wrap in (lambda model: model, remat):
        model = norms()
        value = wrap(model)(randn(6, 3)).pow(3).sum()
        model.eval()
        results.append(torch.autograd.grad(value, list(model.parameters())))
        assert not model[1].training
    torch.testing.assert_close(*results)


def test_batch_norm_inside_torch_func_keeps_no_statistics() -> None:
    model = norms()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x = randn(6, 3)
    got = grad(lambda x: remat(model)(x).pow(3).sum())(x)
    plain = nn.Sequential(model[0], nn.BatchNorm1d(4, track_running_stats=False).double(),
                          model[2], nn.BatchNorm1d(4, track_running_stats=False).double())  # fmt: skip
    torch.testing.assert_close(got, grad(lambda x: plain(x).pow(3).sum())(x))
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_a_module_that_changes_a_buffer_it_reads() -> None:
    class Drifting(nn.Module):
        def __init__(self, replaces: bool) -> None:
            super().__init__()
            self.replaces = replaces
            self.register_buffer("scale", torch.ones((), dtype=DOUBLE))

        def forward(self, x: Tensor) -> Tensor:
            if self.replaces:
                self.scale = self.scale + 1
            else:
                self.scale += 1
            return x.sin() * self.scale

    for replaces in (True, False):
        model, x = Drifting(replaces), randn(3, grad=True)
        run = remat(model)
        a, b = run(x), run(x)
        assert model.scale == 3
        (gradient,) = torch.autograd.grad(a.sum() + 10 * b.sum(), x, create_graph=True)
        torch.testing.assert_close(gradient, 32 * x.cos())
        torch.testing.assert_close(torch.autograd.grad(gradient.sum(), x)[0], -32 * x.sin())
        assert model.scale == 3


def test_a_module_under_two_names() -> None:
    model, x = nn.Module().double(), randn(2, 3)
    model.one = model.other = nn.Linear(3, 3).double()
    model.forward = lambda x: model.other(model.one(x).tanh())  # type: ignore[method-assign]
    own, parameters = model.one.weight, list(model.parameters())
    shared = remat(lambda a, b, x: b(a(x).tanh()))
    expected, *found = (
        torch.autograd.grad(run(x).pow(2).sum(), parameters)
        for run in (model, remat(model), partial(shared, model.one, model.other))
    )
    torch.testing.assert_close(found, [expected] * 2)
    assert model.one.weight is model.other.weight is own


def test_an_lstm_is_no_hidden_parameter() -> None:
    model, x = nn.LSTM(3, 4).double(), randn(5, 2, 3)
    params = list(model.parameters())
    torch.testing.assert_close(
        torch.autograd.grad(remat(model)(x)[0].sum(), params),
        torch.autograd.grad(model(x)[0].sum(), params),
    )


# Nesting, and other people's Functions.


def test_twice_is_once() -> None:
    once = remat(layer)
    assert remat(once) is once
    assert once.__name__ == "layer"


def test_functions_without_setup_context_work_under_autograd() -> None:
    assert gradgradcheck(remat(lambda x: ClassicCube.apply(x).sin()), randn(4, grad=True))


# Tracers.


def noisy(x: Tensor) -> Tensor:
    return F.dropout(x.sin(), 0.5).exp()


def test_make_fx_records_the_function_itself() -> None:
    x = randn(40)
    graph = make_fx(grad(lambda x: remat(noisy)(x).sum()))(x)
    torch.manual_seed(5)
    got = graph(2 * x)
    torch.manual_seed(5)
    torch.testing.assert_close(got, grad(lambda x: noisy(x).sum())(2 * x))


def test_torch_compile_in_one_graph() -> None:
    x = randn(40, grad=True)
    run = remat(torch.sin)
    fast = torch.compile(lambda x: run(x).exp(), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(
        torch.autograd.grad(fast(x).sum(), x), torch.autograd.grad(x.sin().exp().sum(), x)
    )


# What is refused.


class Holder:
    __slots__ = ("weight",)

    def __init__(self) -> None:
        self.weight = torch.ones(3)

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.weight

    method = __call__


class Bare:
    def __call__(self, x: Tensor) -> Tensor:
        return x * WEIGHT


def reads_a_global(x: Tensor) -> Tensor:
    return x * WEIGHT


def reads_a_global_module(x: Tensor) -> Tensor:
    return LAYER(x)


def calls_a_helper(x: Tensor) -> Tensor:
    return reads_a_global(x) + 1


namespace = types.ModuleType("namespace")
namespace.weight = torch.ones(3)


def reads_of_a_python_module(x: Tensor) -> Tensor:
    return x * namespace.weight


def closes_over(value: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: (value, x)[1]


def has_a_default(x: Tensor, weight: Tensor = WEIGHT) -> Tensor:
    return x * weight


def by_keyword(x: Tensor, *, weight: Tensor = WEIGHT) -> Tensor:
    return x * weight


REFUSED: dict[str, Any] = {
    "a tensor in the closure": (lambda: closes_over(torch.ones(3)), ValueError, "closes over `value`"),
    "a module in the closure": (lambda: closes_over(LAYER), ValueError, "closes over `value` .the module Lin"),
    "a list in the closure": (lambda: closes_over([1, {"w": WEIGHT}]), ValueError, "`value\\[1\\]\\['w'\\]`"),
    "an object in the closure": (lambda: closes_over(Holder()), ValueError, '`value\\.weight`'),
    "a function in the closure": (lambda: closes_over(reads_a_global), ValueError, "closes over `value`, which reads the global `WEIGHT`"),
    "a remat of a module in the closure": (lambda: closes_over(remat(LAYER)), ValueError, "closes over `value`"),
    "a global tensor": (lambda: reads_a_global, ValueError, 'Make it an argument: `remat\\(lambda WEIGHT,'),
    "a global module": (lambda: reads_a_global_module, ValueError, "reads the global `LAYER`"),
    "a global of a helper": (lambda: calls_a_helper, ValueError, "`reads_a_global`, which reads the global"),
    "an attribute of a Python module": (lambda: reads_of_a_python_module, ValueError, "`namespace.weight`"),
    "inside an inner function": (lambda: lambda x: vmap(lambda x: x * WEIGHT)(x), ValueError, "reads the global `WEIGHT`"),
    "a default": (lambda: has_a_default, ValueError, "has the default `weight`"),
    "a keyword default": (lambda: by_keyword, ValueError, "has the default `weight`"),
    "a partial argument": (lambda: partial(torch.mul, WEIGHT), ValueError, 'partial argument `args\\[0\\]`'),
    "a partial keyword": (lambda: partial(F.linear, weight=WEIGHT), ValueError, "partial argument `weight`"),
    "a partial of a closure": (lambda: partial(closes_over(LAYER)), ValueError, "closes over"),
    "a method of a module": (lambda: LAYER.forward, ValueError, 'Write `remat\\(module\\)\\(...\\)`'),
    "another method of a module": (lambda: LAYER.extra_repr, ValueError, 'module\\.extra_repr\\(\\*args\\)'),
    "a method of an object": (lambda: Holder().method, ValueError, 'is a method of `self\\.weight`'),
    "a callable object": (Holder, ValueError, 'is an object with `self\\.weight`'),
    "a callable object that reads a global": (Bare, ValueError, "reads the global `WEIGHT`"),
    "an argument that hides a tensor": (lambda: remat(lambda x, holder: holder(x))(randn(3, grad=True), Holder()), ValueError, r"got a Holder that holds one \(value\.weight\)"),
    "unregistered parameters": (lambda: nn.Sequential(Fn(lambda net, x: net.layers[0](x), layers=[LAYER])), ValueError, r"holds `0\.layers\[0\]` .* unregistered.*ModuleList"),
    "a change in place": (lambda: remat(torch.sin_)(randn(3, grad=True) * 1), ValueError, r"`sin_` ?.*|in place.*`x = x\.clone\(\)`"),
    "an embedding that shrinks its weight": (lambda: remat(nn.Embedding(5, 3, max_norm=0.1))(torch.tensor([1, 2])), ValueError, r"changed a float32 tensor of shape .5, 3. in place"),
    "no function": (lambda: 3, TypeError, "fn: expected a function, got int 3"),
}  # fmt: skip


test_what_is_refused = refused(REFUSED, lambda make: remat(make()))


def test_a_closure_that_is_filled_later_is_refused_at_the_call() -> None:
    weight = None
    fn = remat(lambda x: x if weight is None else x * weight)
    fn(randn(3, grad=True))
    weight = torch.ones(3)
    with pytest.raises(ValueError, match="closes over `weight`"):
        fn(randn(3, grad=True))


def test_what_holds_no_tensor_is_accepted() -> None:
    scale, options, power = 2.0, {"dim": -1, "names": ["a"]}, partial(torch.pow, exponent=2)

    def fn(x: Tensor) -> Tensor:
        return power(F.softmax(x * scale, dim=options["dim"]))

    assert remat(fn)(randn(3, grad=True)).requires_grad
