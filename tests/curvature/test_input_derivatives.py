"""laplacian against closed forms, finite differences and traces of torch.func.hessian."""

import math

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import hoglib as hog
from hoglib.curvature.points import input_derivatives
from tests.functions import made, saving_inputs
from tests.models import MODELS, Fn, build
from tests.oracles import gradient_by_differences
from tests.refused import refused
from tests.rows import rows
from tests.unchanged import unchanged


def points(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def by_differences(func, x, eps=1e-5):
    """Central differences of first gradients, element by element, output by output."""
    outputs = func(x).reshape(len(x), -1).shape[1]
    result = torch.zeros(len(x), outputs, dtype=x.dtype)
    for i in range(x[0].numel()):
        step = torch.zeros_like(x[0]).flatten()
        step[i] = eps
        for c in range(outputs):
            sides = []
            for sign in (1, -1):
                own = (x + sign * step.reshape(x[0].shape)).detach().requires_grad_()
                y = func(own).reshape(len(x), -1)[:, c].sum()
                sides.append(torch.autograd.grad(y, own)[0].flatten(1)[:, i])
            result[:, c] += (sides[0] - sides[1]) / (2 * eps)
    return result.reshape(func(x).shape)


def dense(func, x):
    """The Hessian of each output at each point, by torch.func: [N, outputs, D, D]."""
    found = []
    for point in x.detach():
        of_point = lambda flat, p=point: func(flat.reshape(1, *p.shape))[0]  # noqa: E731
        found.append(torch.func.hessian(of_point)(point.flatten()))
    return torch.stack(found).detach()


# func, and its Laplacian, of x [N, 3]
A = torch.tensor([[1.0, 2.0, 0.0], [-1.0, 3.0, 5.0], [0.5, 0.0, -2.0]], dtype=torch.float64)
CLOSED = {
    "square": (lambda x: x.square().sum(1), lambda x: torch.full_like(x[:, 0], 6)),
    "|x|^3, which is p (p + D - 2) |x|^(p - 2)": (lambda x: x.square().sum(1) ** 1.5, lambda x: 12 * x.norm(dim=1)),
    "Gaussian log density": (lambda x: -x.square().sum(1) / 8 - math.log(math.tau * 4), lambda x: torch.full_like(x[:, 0], -3 / 4)),
    "Newtonian potential, harmonic": (lambda x: 1 / (x + 3).norm(dim=1), lambda x: 0 * x[:, 0]),
    "exp(x) sin(y), harmonic": (lambda x: x[:, 0].exp() * x[:, 1].sin(), lambda x: 0 * x[:, 0]),
    "quadratic, which is tr(A + A^T)": (lambda x: torch.einsum("ni,ij,nj->n", x, A, x), lambda x: torch.full_like(x[:, 0], 2 * A.trace())),
    "plane wave": (lambda x: (x @ A[0]).sin(), lambda x: -A[0].square().sum() * (x @ A[0]).sin()),
    "columns": (lambda x: torch.stack([x[:, 0] ** 3, x.prod(1), x[:, 1].exp()], 1), lambda x: torch.stack([6 * x[:, 0], 0 * x[:, 0], x[:, 1].exp()], 1)),
    "a matrix at each point": (lambda x: x[:, :, None] ** 2 * x[:, None, :], lambda x: 2 * (x[:, None, :] + 2 * x[:, :, None] * torch.eye(3, dtype=x.dtype)).expand(-1, 3, 3)),
}  # fmt: skip


@rows("name", CLOSED)
def test_closed_forms(name):
    func, expected = CLOSED[name]
    x = points(6, 3)
    value, lap = hog.laplacian(func, x)
    assert_close(value, func(x))
    assert_close(lap, expected(x), rtol=1e-9, atol=1e-9)
    in_transform = torch.func.vmap(lambda p: hog.laplacian(func, p[None])[1][0])(x)
    assert_close(in_transform, expected(x), rtol=1e-9, atol=1e-9)


def test_of_one_point():
    x = points(2, 3)
    value, lap = hog.laplacian(lambda p: p.pow(4).sum(), x)
    assert_close(value, x.pow(4).sum())
    assert_close(lap, 12 * x.square().sum())
    assert_close(hog.laplacian(lambda p: p**3, x[0, 0])[1], 6 * x[0, 0])
    in_transform = torch.func.vmap(lambda p: hog.laplacian(lambda q: q.pow(4).sum(), p)[1])(x)
    assert_close(in_transform, 12 * x.square().sum(1))


def attends():
    """A transformer layer over the elements of each point, with torch's fused attention."""
    options = {"dropout": 0.0, "batch_first": True, "activation": "gelu"}
    layer = nn.TransformerEncoderLayer(4, 2, 6, **options)
    return Fn(lambda net, x: net.layer(x)[:, 0, :2], layer=layer)


def images():
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1), nn.GroupNorm(1, 3), nn.SiLU(), nn.Conv2d(3, 2, 3), nn.Tanh(), nn.Flatten(),
        nn.Linear(8, 2),
    )  # fmt: skip


NETS = {
    **{name: (lambda n=name: build(n), (5, 2)) for name in MODELS if name != "BatchNorm"},
    "deep tanh": (lambda: nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)), (5, 3)),
    "softmax": (lambda: nn.Sequential(nn.Linear(3, 4), nn.Softmax(1)), (5, 3)),
    "conv": (images, (2, 1, 4, 4)),
    "attention": (attends, (2, 3, 4)),
    "ReLU": (lambda: nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)), (5, 3)),
    "dropout in eval mode": (lambda: nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Dropout(), nn.Linear(8, 2)).eval(), (5, 3)),
}  # fmt: skip


def net_of(name):
    make, shape = NETS[name]
    return make().double(), points(*shape)


@pytest.mark.filterwarnings("ignore:.*piecewise linear")
@rows("outputs", ["as it is", "[N]"])
@rows("name", NETS)
def test_nets_by_finite_differences(name, outputs):
    net, x = net_of(name)
    func = net if outputs == "as it is" else lambda x: net(x)[:, 0]
    with hog.second_order():
        expected = by_differences(func, x)
    value, lap = hog.laplacian(func, x)
    assert_close(value, func(x))
    assert_close(lap.detach(), expected, rtol=1e-6, atol=1e-8)
    in_transform = torch.func.vmap(lambda p: hog.laplacian(func, p[None])[1][0])(x)
    assert_close(in_transform.detach(), expected, rtol=1e-6, atol=1e-8)


@rows(("projections", "outputs"), [(None, "all"), (2, "first")])
@rows("name", [n for n in NETS if n != "ReLU"])
def test_the_gradient_of_a_loss_by_the_parameters(name, outputs, projections):
    net, x = net_of(name)
    params = {n: p.detach().clone() for n, p in net.named_parameters()}

    def loss(values):
        def func(x):
            y = torch.func.functional_call(net, values, (x,))
            return y if outputs == "all" else y[:, 0]

        generator = torch.Generator().manual_seed(1)
        value, lap = hog.laplacian(func, x, num_projections=projections, generator=generator)
        target = torch.linspace(1, 2, lap.numel(), dtype=x.dtype).reshape(lap.shape)
        return (lap + value - target).square().mean()

    learning = [n for n, p in net.named_parameters() if p.requires_grad]
    leaves = {n: p.clone().requires_grad_(n in learning) for n, p in params.items()}
    grads = torch.autograd.grad(loss(leaves), [leaves[n] for n in learning])
    for name, grad in zip(learning, grads, strict=True):
        d = torch.randn_like(grad)
        with torch.no_grad():
            above, below = (
                loss({**params, name: params[name] + sign * 2e-5 * d}) for sign in (1, -1)
            )
        assert_close((grad * d).sum(), (above - below) / 4e-5, rtol=1e-5, atol=1e-7)


def test_inside_grad_of_torch_func():
    net, x = net_of("LayerNorm")
    by_func = torch.func.grad(lambda p: hog.laplacian(net, p)[1].square().sum())(x)
    own = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(hog.laplacian(net, own)[1].square().sum(), own)
    assert_close(by_func, expected)
    assert_close(
        by_func,
        gradient_by_differences(lambda p: by_differences(net, p["x"]).square().sum(), {"x": x}, 1e-4)["x"],
        rtol=1e-3, atol=1e-4,
    )  # fmt: skip


def test_args_and_the_graph_of_x():
    z, t = points(4).requires_grad_(), points(4).requires_grad_()
    x = torch.stack([z, z**2], 1)
    _, lap = hog.laplacian(lambda x, t: t * x.pow(4).sum(1), x, t)
    assert_close(lap, t * 12 * (z**2 + z**4))
    by_z, by_t = torch.autograd.grad(lap.sum(), [z, t])
    assert_close(by_z, t * (24 * z + 48 * z**3))
    assert_close(by_t, 12 * (z**2 + z**4))
    assert z.grad is None


GRADS = {
    # context, create_graph: whether the results have a graph
    ("enable_grad", None): True, ("no_grad", None): False, ("inference_mode", None): False,
    ("enable_grad", False): False, ("no_grad", True): True,
}  # fmt: skip


@rows(("context", "create_graph"), GRADS)
@rows("outputs", [1, 3, 4])
def test_create_graph_follows_the_caller(context, create_graph, outputs):
    net = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, outputs)).double()
    x = points(4, 2)
    expected = by_differences(net, x)
    with getattr(torch, context)():
        value, lap = hog.laplacian(net, x.clone(), create_graph=create_graph)
    assert value.requires_grad == lap.requires_grad == GRADS[context, create_graph]
    if context == "inference_mode":
        assert not lap.is_inference()
    assert_close(lap.detach(), expected, rtol=1e-6, atol=1e-8)


def test_no_graph_is_kept_without_parameters():
    x = points(4, 3)
    for func in (lambda x: x.pow(3).sum(1), nn.Linear(3, 2).double().requires_grad_(False)):
        value, lap = hog.laplacian(func, x)
        assert not value.requires_grad
        assert not lap.requires_grad
    assert hog.laplacian(lambda x: x.pow(3).sum(1), x, create_graph=True)[1].requires_grad


def test_a_linear_function_has_zeros_from_which_a_loss_goes_backward():
    net, x = nn.Linear(3, 2), torch.randn(4, 3)
    value, lap = hog.laplacian(net, x)
    assert lap.shape == value.shape
    assert torch.equal(lap, torch.zeros(4, 2))
    (lap.square().mean() + value.sum()).backward()
    assert_close(net.bias.grad, torch.full((2,), 4.0))
    lap = hog.laplacian(net, x)[1]
    assert_close(torch.autograd.grad(lap.sum(), net.weight)[0], torch.zeros(2, 3))
    assert_close(torch.func.vmap(lambda p: hog.laplacian(net, p[None])[1][0])(x), 0 * lap)


@rows("outputs", [(), (1,), (3,), (2, 2), (0,)])
def test_no_points(outputs):
    func = lambda x: x.pow(2).sum(1).reshape(-1, *[1 for _ in outputs]).expand(-1, *outputs)  # noqa: E731
    for x in (torch.randn(0, 3), torch.randn(4, 3)):
        for k in (None, 2):
            value, lap = hog.laplacian(func, x, num_projections=k)
            assert value.shape == lap.shape == (len(x), *outputs)
            assert_close(lap, torch.full_like(lap, 6))


def test_nan_stays_with_its_point():
    x = points(4, 2)
    x[1, 0] = math.nan
    func = lambda x: torch.stack([x.pow(4).sum(1), x.prod(1).sin()], 1)  # noqa: E731
    _, lap = hog.laplacian(func, x)
    assert lap[1].isnan().all()
    keep = [0, 2, 3]
    assert_close(lap[keep], hog.laplacian(func, x[keep])[1])


# H = [[a, b], [b, c]] at every point
H = torch.tensor([[1.0, 0.7], [0.7, -2.0]], dtype=torch.float64)


def quadratic(x):
    y = torch.einsum("ni,ij,nj->n", x, H, x) / 2
    return torch.stack([y, 3 * y], 1)


@rows("where", ["eager", "transform"])
def test_the_generator_decides_the_estimate(where):
    x, state = points(3, 2), torch.get_rng_state()

    def estimate(seed):
        generator = torch.Generator().manual_seed(seed)
        run = lambda p: hog.laplacian(quadratic, p, num_projections=1, generator=generator)[1]  # noqa: E731
        return run(x) if where == "eager" else torch.func.jvp(run, (x,), (torch.zeros_like(x),))[0]

    assert torch.equal(estimate(1), estimate(1))
    assert any(not torch.equal(estimate(1), estimate(seed)) for seed in range(2, 8))
    assert torch.equal(torch.get_rng_state(), state)
    generator = torch.Generator().manual_seed(1)
    expected = hog.laplacian(quadratic, x, num_projections=1, generator=generator)[1]
    assert_close(estimate(1), expected)


def test_train_mode_dropout_has_one_mask_for_value_and_laplacian():
    x = points(4, 3)
    func = lambda x: torch.dropout(x, 0.5, True).pow(3).sum(1)  # noqa: E731
    for run in (
        lambda: hog.laplacian(func, x),
        lambda: torch.func.jvp(lambda p: hog.laplacian(func, p), (x,), (torch.zeros_like(x),))[0],
    ):
        torch.manual_seed(0)
        expected = func(x)
        after = torch.get_rng_state()
        torch.manual_seed(0)
        value, lap = run()
        assert torch.equal(value, expected)
        assert torch.equal(torch.get_rng_state(), after)
        mask = (torch.manual_seed(0) and torch.dropout(torch.ones_like(x), 0.5, True)) / 2
        assert_close(lap, (6 * 8 * mask * x).sum(1))


@rows("name", ["BatchNorm in eval mode", "spectral norm"])
def test_nothing_of_the_module_changes(name):
    net = (
        nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(2, 3)), nn.Tanh()).double()
        if name == "spectral norm"
        else build(name)
    )
    x = points(4, 2)
    with unchanged(net, grads=False):
        hog.laplacian(net, x)[1].sum().backward()
    assert x.grad is None
    assert not x.requires_grad


class CutAtThird(torch.autograd.Function):
    """x^4, whose second derivative is right, and whose third is cut."""

    forward = saving_inputs(lambda x: x**4)

    backward = staticmethod(lambda ctx, g: SecondOnly.apply(ctx.saved_tensors[0], g))


SecondOnly = made(
    "SecondOnly",
    lambda x, g: 4 * x**3 * g,
    lambda h, x, g: (12 * x.detach() ** 2 * g.detach() * h, 4 * x.detach() ** 3 * h),
)


@pytest.mark.filterwarnings("ignore:laplacian. where a third derivative is taken")
def test_a_function_that_cannot_give_all_outputs_at_once_gives_one_after_another():
    x = points(4, 2)
    func = lambda x: torch.cat([CutAtThird.apply(x), x.pow(3)], 1)  # noqa: E731
    _, lap = hog.laplacian(func, x)
    assert_close(lap, torch.cat([12 * x**2, 6 * x], 1))
    x[1] = math.nan  # also beside a point that is none
    keep = [0, 2, 3]
    assert_close(hog.laplacian(func, x)[1][keep], lap[keep])


def test_outputs_go_together_where_they_cancel(monkeypatch):
    # the outputs of a softmax sum to 1: the Laplacians to 0
    monkeypatch.setattr(input_derivatives, "_of_one_output", None)  # private: not by single outputs
    net = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 6), nn.Softmax(1))
    x = torch.randn(60, 3)
    _, lap = hog.laplacian(net, x, create_graph=False, mode="nested")
    expected = dense(net.double(), x.double()).diagonal(dim1=-2, dim2=-1).sum(-1)
    assert_close(lap.double(), expected, rtol=1e-3, atol=1e-4)


X, NORM = torch.randn(4, 3), nn.BatchNorm1d(3)
ERRORS = {
    "func is no function": (lambda: hog.laplacian(3, X), TypeError, "func: expected a function"),
    "x is a list": (lambda: hog.laplacian(torch.sin, [1.0]), TypeError, "x: expected a torch.Tensor"),
    "integer x": (lambda: hog.laplacian(torch.sin, torch.ones(3, 2, dtype=torch.int)), TypeError, r"x\.float"),
    "complex x": (lambda: hog.laplacian(lambda x: x.abs().sum(1), X + 1j), TypeError, "view_as_real"),
    "value is a tuple": (lambda: hog.laplacian(lambda x: (x,), X), TypeError, r"func\(x, \*args\): expected a torch"),
    "value is complex": (lambda: hog.laplacian(lambda x: x.sum(1) * 1j, X), TypeError, "real floating-point"),
    "values of other points": (lambda: hog.laplacian(lambda x: x.square().sum(0), X), ValueError, r"\[4, \.\.\.\].*\(3,\) for x of shape \(4, 3\)"),
    "many values of a number": (lambda: hog.laplacian(lambda x: x * torch.ones(3), torch.ones(())), ValueError, r"x\[:, None\]"),
    "one value of a point": (lambda: hog.laplacian(lambda x: x.square().sum(-1, keepdim=True), X[0]), ValueError, r"a single point is a batch of one: `x\[None\]`"),
    "value without a graph": (lambda: hog.laplacian(lambda x: x.detach().sum(1), X), RuntimeError, "depends on its input"),
    "several values without a graph": (lambda: hog.laplacian(lambda x: x.detach() ** 2, X), RuntimeError, "depends on its input"),
    "value of the parameters alone": (lambda: hog.laplacian(lambda x: nn.Linear(3, 2)(X), X.clone()), RuntimeError, "others than those"),
    "value without a graph in a transform": (lambda: torch.func.vmap(lambda p: hog.laplacian(lambda q: q.detach().sum(), p)[1])(X), RuntimeError, "depends on x"),
    "batch norm": (lambda: hog.laplacian(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)), X), ValueError, r"\.eval\(\)"),
    "batch norm in a function": (lambda: hog.laplacian(lambda x: NORM(x), X), ValueError, "batch norm in training"),
    "batch norm, without stand-ins": (lambda: hog.laplacian(nn.BatchNorm1d(3), X, stand_ins=False), ValueError, "batch norm in training"),
    "batch norm by torch": (lambda: hog.laplacian(lambda x: torch.nn.functional.batch_norm(x, None, None, training=True), X), ValueError, "batch norm"),
    **{
        f"points that mix, {name}": (lambda f=f, run=run: run(f), ValueError, "depend on that point alone")
        for name, f in {
            "a mean": lambda x: (x * x.mean(0)).sin().sum(1), "Fourier": lambda x: torch.fft.rfft(x.sin(), dim=0).abs()[[0, 1, 2, 1]],
            "attention": lambda x: (torch.softmax(x @ x.T, 1) @ x).sum(1), "neighbours": lambda x: (x * x.roll(1, 0)).sum(1),
            "batch norm": lambda x: torch.ops.aten.native_batch_norm(x.sin(), None, None, None, None, True, 0.1, 1e-5)[0],
        }.items()
        for run in (
            lambda f: hog.laplacian(f, X), lambda f: hog.laplacian(f, X, mode="nested"), lambda f: hog.bilaplacian(f, X),
            lambda f: hog.partial_derivative(f, X, index=(0, 1)),
        )
    },
    "no projections": (lambda: hog.laplacian(torch.sin, X, num_projections=0), ValueError, "at least 1"),
    "half a projection": (lambda: hog.laplacian(torch.sin, X, num_projections=0.5), TypeError, "integer"),
    "a seed as generator": (lambda: hog.laplacian(torch.sin, X, num_projections=1, generator=1), TypeError, "manual_seed"),
    "create_graph is no flag": (lambda: hog.laplacian(torch.sin, X, create_graph=1), TypeError, "True or False"),
}  # fmt: skip


test_errors = refused(ERRORS)


def test_batch_norm_within_one_point_is_no_error():
    x = points(4, 2)
    norm = nn.BatchNorm1d(2).double()
    func = lambda x: norm(x).pow(3).sum()  # noqa: E731
    trace = torch.autograd.functional.hessian(func, x).reshape(8, 8).trace()
    norm.reset_running_stats()
    assert_close(hog.laplacian(func, x, create_graph=False)[1], trace)
    assert_close(norm.running_mean, torch.zeros(2, dtype=torch.float64))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*piecewise linear")
@rows("name", NETS)
def test_on_a_gpu(name):
    net, x = net_of(name)
    expected = hog.laplacian(net, x)[1].detach()
    net, x = net.cuda(), x.cuda()
    assert_close(hog.laplacian(net, x)[1].detach().cpu(), expected, rtol=1e-7, atol=1e-9)
    generator = torch.Generator("cuda").manual_seed(0)
    assert hog.laplacian(net, x, num_projections=2, generator=generator)[1].is_cuda


class Slots:
    """A function of slots alone, to which there are no weak references."""

    __slots__ = ()

    def value(self, x):
        return x.sin().sum(1)


def test_a_function_that_has_no_weak_references():
    assert_close(hog.laplacian(Slots().value, X)[1], -X.sin().sum(1))
