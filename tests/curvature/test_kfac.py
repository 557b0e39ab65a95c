"""Kronecker-factored approximations: against definitions, where they are exact, and what they refuse."""

import copy
import io
import re
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import orthogonal, weight_norm
from torch.testing import assert_close

import hoglib as hog
from hoglib._core.numerics.factorizations import symmetric_eigen
from hoglib.curvature.kronecker import kfac_operator
from tests.curvature.kronecker_by_definition import dense_kfac
from tests.curvature.problems import CRITERIA, F64, draw, nested_to_matrix
from tests.curvature.test_influence import ghosts, rows_of
from tests.functions import ClassicCube
from tests.models import Fn, Through
from tests.rows import rows


def positions(*layers):
    """Averaged, after layers that they share."""
    return Fn(lambda net, x: net.layers(x).flatten(2).mean(-1), layers=nn.Sequential(*layers))


def sequence():
    def run(net, x):
        return net.second(torch.tanh(net.first(x)).square()).tanh().sum(1)

    return Fn(run, first=nn.Linear(3, 4), second=nn.Linear(4, 3))


def twice():
    def run(net, x):
        return net.head(net.layer(torch.tanh(net.layer(x))))

    return Fn(run, layer=nn.Linear(3, 3), head=nn.Linear(3, 3))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def words():
    def run(net, x):
        return net.head(torch.tanh(net.words(x)).sum(1))

    return Fn(run, words=nn.Embedding(5, 3, padding_idx=0), head=nn.Linear(3, 3))


class Conv1D(nn.Module):
    """A linear layer as GPT-2 of transformers has it."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf, self.weight = nf, nn.Parameter(torch.randn(nx, nf))
        self.bias = nn.Parameter(torch.randn(nf))

    def forward(self, x):
        flat = torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight)
        return flat.view(*x.shape[:-1], self.nf)


def adapted():
    """LoRA: the base is frozen."""
    return Fn(
        lambda net, x: torch.tanh(net.base(x) + net.B(net.A(x))),
        base=nn.Linear(3, 3).requires_grad_(False),
        A=nn.Linear(3, 2, bias=False), B=nn.Linear(2, 3, bias=False),
    )  # fmt: skip


def linear(name, *shared, bias=True, groups=1):
    return (f"{name}.weight", f"{name}.bias" if bias else None, [name, *shared], groups)


# name -> (makes the model, an input, its layers); with more examples than a layer has inputs, so that
# the eigenvectors are unique
MODELS = {
    "layers": (lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)), draw(6, 3), [linear("0"), linear("2")]),
    "layers of hoglib": (lambda: nn.Sequential(hog.nn.Linear(3, 4), nn.Tanh(), hog.nn.Linear(4, 3)), draw(6, 3), [linear("0"), linear("2")]),
    "positions": (sequence, draw(4, 5, 3), [linear("first"), linear("second")]),
    "a layer called twice": (twice, draw(5, 3), [linear("layer"), linear("head")]),
    "tied weights": (Tied, draw(5, 3), [linear("first", "second", bias=False)]),
    "conv1d": (lambda: positions(nn.Conv1d(2, 4, 3, stride=2, padding=1), nn.Tanh(), nn.Conv1d(4, 3, 2)), draw(10, 2, 6), [linear("layers.0"), linear("layers.2")]),
    "conv2d, groups, dilation": (lambda: positions(nn.Conv2d(2, 4, 2, groups=2, dilation=2), nn.Tanh(), nn.Conv2d(4, 3, (2, 1), bias=False)), draw(9, 2, 5, 4), [linear("layers.0", groups=2), linear("layers.2", bias=False)]),
    "conv2d, same, circular": (lambda: positions(nn.Conv2d(2, 2, (2, 3), padding="same"), nn.Tanh(), nn.Conv2d(2, 3, 2, padding=1, padding_mode="circular")), draw(14, 2, 3, 3), [linear("layers.0"), linear("layers.2")]),
    "depthwise conv2d": (lambda: positions(nn.Conv2d(3, 3, 2, groups=3)), draw(6, 3, 3, 3), [linear("layers.0", groups=3)]),
    "conv3d": (lambda: positions(nn.Conv3d(1, 3, 2), nn.Tanh()), draw(10, 1, 3, 2, 3), [linear("layers.0")]),
    "an embedding": (words, torch.tensor([[1, 1, 2], [0, 4, 3], [3, 3, 3], [2, 1, 0]]), [linear("words", bias=False), linear("head")]),
    "GPT-2's linear layer": (lambda: positions(Conv1D(4, 3), nn.Tanh(), Conv1D(5, 4), nn.Flatten(1), nn.Unflatten(1, (3, 5))), draw(4, 3, 3), [linear("layers.0"), linear("layers.2")]),
    "LoRA": (adapted, draw(5, 3), [linear("A", bias=False), linear("B", bias=False)]),
}  # fmt: skip


def problem(name, criterion="cross entropy"):
    """(loss, params, batch, layers) in float64."""
    make, x, layers = MODELS[name]
    torch.manual_seed(1)
    model = make().double()
    function, targets = CRITERIA[criterion]
    loss = hog.functional_loss(model, function)
    return loss, hog.trainable_params(model), (x, targets(len(x))), layers


def split(batch):
    """Two batches of unlike sizes."""
    parts = [tuple(t[:3] for t in batch), tuple(t[3:] for t in batch)]
    return parts if len(batch[0]) > 3 else batch


# torch says that it copies the input where the padding is not symmetric
@pytest.mark.filterwarnings("ignore:Using padding='same':UserWarning")
@pytest.mark.parametrize("name", MODELS)
def test_the_definition(name):
    """Of each model by each option once, and of some by all of them."""
    loss, params, batch, layers = problem(name)
    n = len(batch[0])
    every = list(product(("exact", "empirical"), ("expand", "reduce"), (False, True)))
    crossed = ("positions", "conv2d, groups, dilation")
    for kind, approximation, corrected in every if name in crossed else (every[0], every[-1]):
        K = hog.KFACOperator(
            loss, params, split(batch), kind=kind, approximation=approximation,
            eigenvalue_corrected=corrected,
        )  # fmt: skip
        expected = dense_kfac(loss, params, batch, layers, kind, approximation, corrected) / n
        assert_close(K.to_dense(), expected)
        assert_close(K.diagonal(), expected.diagonal())
        options = {"kind": kind, "reduction": "mean"}
        M = hog.FisherOperator(loss, params, split(batch), **options)
        assert_close(K.exact_diagonal(), M.to_dense().diagonal())
        assert_close(K.trace(), expected.trace())


@rows("kind", ["exact", "mc", "empirical"])
@rows("corrected", [False, True], ids=["KFAC", "EKFAC"])
def test_exact_for_one_example(kind, corrected):
    loss, params, (x, y), _ = problem("layers")
    options = {"kind": kind, "num_samples": 3 if kind == "mc" else 1}
    seeds = [torch.Generator().manual_seed(4) for _ in range(2)]
    of_both = loss, params, (x[:1], y[:1])
    K = hog.KFACOperator(*of_both, generator=seeds[0], eigenvalue_corrected=corrected, **options)
    M = hog.FisherOperator(*of_both, generator=seeds[1], **options)
    assert_close(K.to_dense(), M.block_diagonal("module").to_dense())


def residual(function, *layers):
    """A network inside a function of its derivatives."""
    return Fn(function, net=nn.Sequential(*layers))


def pointwise(function):
    return Fn(lambda net, x: function(x))


# a residual -> by what it differentiates its network
RESIDUALS = {
    "a Laplacian and the value": lambda net, x: hog.laplacian(net.net, x)[1] - net.net(x) ** 3,
    "a Laplacian and the gradient": lambda net, x: (lambda u, lap, g: lap + (g**2).sum(-1))(*hog.laplacian(net.net, x, return_gradient=True)),
    "a heat equation": lambda net, x: hog.partial_derivative(net.net, x, index=(1,))[1] - hog.laplacian(lambda p: net.net(torch.cat([p, x[:, 1:]], 1)), x[:, :1])[1],
    "a bilaplacian": lambda net, x: hog.bilaplacian(net.net, x)[1],
    "a third derivative": lambda net, x: hog.directional(net.net, x, torch.ones_like(x), order=3)[1],
    "a jet": lambda net, x: torch.cat(hog.jet(net.net, (x,), ((torch.ones_like(x), torch.zeros_like(x)),))[1], 1),
    "features of the point": lambda net, x: hog.laplacian(lambda p: net.net(torch.sin(p)), x)[1],
}  # fmt: skip
# a network whose layers have another role in a residual; the cube has a kink, at which it is run again
NETWORKS = {
    "tanh": lambda: (nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1)),
    "relu cubed": lambda: (nn.Linear(2, 4), pointwise(lambda x: F.relu(x * torch.tensor([0.0, 1, 1, 1])) ** 3), nn.Linear(4, 1)),
    "layer norm": lambda: (nn.Linear(2, 3), nn.LayerNorm(3), nn.Tanh(), nn.Linear(3, 1)),
    "one slope for all": lambda: (nn.Linear(2, 3), Fn(lambda net, x: torch.tanh(net.a * x), a=nn.Parameter(torch.tensor(1.5))), nn.Linear(3, 1)),
    "positions": lambda: (nn.Unflatten(1, (2, 1)), nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 1), pointwise(lambda x: x.sum(1))),
    "convolutions": lambda: (nn.Unflatten(1, (1, 2)), nn.Conv1d(1, 3, 2, padding=1), nn.Tanh(), nn.Conv1d(3, 1, 1), pointwise(lambda x: x.mean(2))),
    "scaled": lambda: (nn.Linear(2, 3), Fn(lambda net, x: torch.sin(net.a * x), a=nn.Parameter(torch.tensor([1.0, 2.0, 0.5]))), nn.Linear(3, 1)),
}  # fmt: skip


def residual_problem(function, network="tanh", points=6):
    torch.manual_seed(1)
    model = residual(function, *NETWORKS[network]()).double()
    loss = hog.functional_loss(model, lambda r, _: r.square().mean())
    params, x = hog.trainable_params(model), draw(points, 2)
    grads = torch.autograd.grad(loss(params, (x, x)), [*params.values()], allow_unused=True)
    # a Laplacian does not depend on the last bias
    return loss, {n: p for (n, p), g in zip(params.items(), grads, strict=True) if g is not None}, x


@rows("name", [*product(RESIDUALS, ["tanh"]), *product(["a Laplacian and the value"], NETWORKS)])
def test_residuals_have_the_layers_of_their_derivatives(name):
    """Per-example gradients by all calls, summed: the diagonal is exact."""
    loss, params, x = residual_problem(RESIDUALS[name[0]], name[1])
    K = hog.KFACOperator(loss, params, [(x[:3], x[:3]), (x[3:], x[3:])], eigenvalue_corrected=True)
    G = hog.GGNOperator(loss, params, (x, x)).to_dense()
    assert_close(K.exact_diagonal(), G.diagonal())
    assert_close(K.trace(), G.trace())


def test_the_shape_tells_the_order_of_rows_where_gradients_fit_several():
    """Positions first, of which the first is used, and the second example has no gradient."""
    torch.manual_seed(1)
    model = Fn(lambda net, x: net.head(F.relu(net.first(x.transpose(0, 1)))[0]), first=nn.Linear(3, 4), head=nn.Linear(4, 2)).double()  # fmt: skip
    x = draw(6, 3, 3)
    x[1] = 0
    with torch.no_grad():
        model.first.bias.fill_(-0.01)
    loss, batch = hog.functional_loss(model, F.mse_loss), (x, draw(6, 2, seed=1))
    params = hog.trainable_params(model)
    K = hog.KFACOperator(loss, params, batch, eigenvalue_corrected=True)
    assert_close(K.exact_diagonal(), hog.GGNOperator(loss, params, batch).to_dense().diagonal())


def forward_laplacian(net, x):
    """Of each linear layer the inputs and outputs [3, points, features] - of the value, the gradient
    [D] and the Laplacian - by the chain rule of tanh; and the Laplacian of the network."""
    a = [x[None], torch.eye(2, dtype=F64)[:, None].expand(2, len(x), 2), torch.zeros_like(x)[None]]
    calls = []
    for layer in (part for part in net if isinstance(part, nn.Linear)):
        z = [part @ layer.weight.T for part in a]
        z[0] = z[0] + layer.bias
        calls.append((a, z))
        t = torch.tanh(z[0])
        d, dd = 1 - t**2, -2 * t * (1 - t**2)
        a = [t, d * z[1], d * z[2] + dd * (z[1] ** 2).sum(0)]
    return calls, z[2][0]


@rows("approximation", ["expand", "reduce"])
def test_factors_of_a_laplacian(approximation):
    """By hand: a row for the value, each coordinate and the Laplacian, where the residual depends on
    it."""
    loss, params, x = residual_problem(lambda net, x: hog.laplacian(net.net, x)[1])
    K = hog.KFACOperator(loss, params, (x, x), approximation=approximation)
    calls, lap = forward_laplacian(loss.model.net, x)
    assert_close(lap, loss.model(x))
    blocks, n = [], len(x)
    for a, z in calls:
        g = torch.autograd.grad(lap.sum(), z, retain_graph=True, allow_unused=True)
        used = [k for k in range(3) if g[k] is not None and bool(a[k].any())]
        a, own = (torch.cat([part[k].detach() for k in used]) for part in (a, g))
        if approximation == "reduce":
            a, own = a.mean(0, keepdim=True), own.sum(0, keepdim=True)
        a, own = a.flatten(0, 1), own.flatten(0, 1)
        blocks.append(torch.kron(2 / n * own.T @ own, a.T @ a / len(a)))
        if g[0] is not None:
            blocks.append(2 / n * g[0][0].T @ g[0][0])
    assert_close(K.to_dense(), torch.block_diag(*blocks))


def test_residuals_at_other_points_are_joined():
    """The last layer has the Laplacian's rows inside, and the value's rows on the boundary."""
    inside, border = draw(6, 2), draw(4, 2, seed=1)

    def problem(join):
        torch.manual_seed(1)
        model = residual(
            lambda net, x, b: join([hog.laplacian(net.net, x)[1], 3 * net.net(b)]),
            *NETWORKS["tanh"](),
        ).double()
        squares = lambda r, _: sum(y.square().mean() for y in (r if isinstance(r, list) else [r]))  # noqa: E731
        return hog.functional_loss(model, squares, forward=lambda net, batch: net(*batch))

    loss = problem(torch.cat)
    params = hog.trainable_params(loss.model)
    K = hog.KFACOperator(loss, params, (inside, border))
    a = [
        forward_laplacian(loss.model.net, x)[0][-1][0][k][0].detach()
        for x, k in ((inside, 2), (border, 0))
    ]
    rows_of_both = torch.cat(a)
    G = 2 / 10 * (6 * 1**2 + 4 * 3**2)
    A = rows_of_both.T @ rows_of_both / 10
    at = [
        block
        for block in K.blocks()
        if block.layout.first.leaf == list(params).index("net.4.weight")
    ]
    assert_close(at[0].G[0], torch.tensor([[G]], dtype=F64))
    assert_close(at[0].A[0], A)
    with pytest.raises(hog.errors.ArgumentValueError, match=r"torch\.cat"):
        hog.KFACOperator(problem(list), params, (inside, border)).update()


@rows("reduction", ["mean", "sum"])
def test_exact_for_deep_linear_networks(reduction):
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)).double()
    loss = hog.functional_loss(model, nn.MSELoss(reduction=reduction))
    params, x, y = hog.trainable_params(model), draw(9, 3), draw(9, 2, seed=1)
    data = [(x[:5], y[:5]), (x[5:], y[5:])]
    G = hog.GGNOperator(loss, params, data, reduction=reduction).block_diagonal("module").to_dense()
    K = hog.KFACOperator(loss, params, data, reduction=reduction)
    assert_close(K.to_dense(), G)
    assert K.error(8, generator=torch.Generator().manual_seed(0)).blocks.value < 1e-12
    assert "from its blocks" in repr(K)


def every_sign(space, num_samples, generator):
    """Vectors of signs [num_samples, P], a power of 2, of which the mean of |A v|^2 is |A|^2 exactly: rows of
    Hadamard's matrix."""
    H = torch.ones(1, 1, dtype=torch.float64)
    while len(H) < num_samples:
        H = torch.cat([torch.cat([H, H], 1), torch.cat([H, -H], 1)])
    assert len(H) >= space.size
    return H[:, : space.size]


def test_distances_of_a_network(monkeypatch):
    """From the Hessian, the Gauss-Newton matrix and its blocks, as of dense matrices."""
    loss, params, batch, _ = problem("layers")
    K = hog.KFACOperator(loss, params, split(batch), eigenvalue_corrected=True)
    drawn = K.error(200, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(kfac_operator, "random_signs", every_sign)
    found = K.error(64)
    G = hog.GGNOperator(loss, params, batch)
    parts = (G.to_dense(), G.block_diagonal("module").to_dense())
    own = {name: p.detach() for name, p in params.items()}
    dense = torch.func.hessian(lambda p: loss(p, batch))(own)
    H = nested_to_matrix(dense, params)
    for exact, one, M in zip(found, drawn, (*parts, H), strict=True):
        expected = (K.to_dense() - M).norm() / M.norm()
        assert exact.value == pytest.approx(float(expected), rel=1e-10)
        assert abs(one.value - expected) < 4 * one.error
        assert one.error < 0.25 * expected
    assert (H - parts[0]).norm() > 0.05 * H.norm()  # they are told apart
    own = {
        name: K.ravel({n: torch.full_like(p, n.startswith(f"{name}.")) for n, p in params.items()})
        for name in found.layers
    }
    assert bool((sum(own.values()) == 1).all())
    for name, mask in own.items():
        expected = ((K.to_dense() - parts[1]) * mask).norm() / (parts[1] * mask).norm()
        assert found.layers[name].value == pytest.approx(float(expected), rel=1e-10)


def test_distances_in_half_precision():
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)).half()
    batch, found = (draw(8, 3).half(), draw(8, 2).half()), []
    for size in (1, 1e-4, 300):  # float16 has no squares of these products
        loss = hog.functional_loss(model, lambda y, t, k=size: k * F.mse_loss(y, t))
        K = hog.KFACOperator(loss, hog.trainable_params(model), batch)
        found.append(K.error(64, generator=torch.Generator().manual_seed(0)).blocks.value)
    assert found == pytest.approx([float(found[0])] * 3, rel=0.02)
    assert found[0] > 0.05


def test_a_bias_by_itself():
    loss, params, batch, _ = problem("layers")
    K = hog.KFACOperator(loss, params, batch, joint_bias=False)
    G = hog.GGNOperator(loss, params, batch).to_dense()
    at = slice(12, 16)
    assert_close(K.to_dense()[at, at], G[at, at])  # no positions: exact
    weight = hog.KFACOperator(loss, {"0.weight": params["0.weight"]}, batch)
    assert_close(K.to_dense()[:12, :12], weight.to_dense())
    bias = hog.KFACOperator(loss, {"0.bias": params["0.bias"]}, batch)
    assert_close(bias.to_dense(), G[at, at])
    assert not K.to_dense()[:12, at].any()


class Factor(nn.Module):
    """A parameter that features are multiplied by, or that is added to them."""

    def __init__(self, *shape, add=False):
        super().__init__()
        self.parameter, self.add = nn.Parameter(torch.randn(shape)), add

    def forward(self, x):
        return x + self.parameter if self.add else self.parameter * x


NORMS = {
    "layer norm": lambda: nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 3)),
    "RMS norm": lambda: nn.Sequential(nn.Linear(3, 4), nn.RMSNorm(4), nn.Tanh(), nn.Linear(4, 3)),
    "group norm": lambda: nn.Sequential(nn.Linear(3, 4), nn.GroupNorm(2, 4), nn.Tanh(), nn.Linear(4, 3)),
    "a factor": lambda: nn.Sequential(nn.Linear(3, 4), Factor(4), nn.Tanh(), nn.Linear(4, 3)),
    "one factor for all": lambda: nn.Sequential(nn.Linear(3, 4), Factor(), nn.Tanh(), nn.Linear(4, 3)),
    "a term": lambda: nn.Sequential(nn.Linear(3, 4), Factor(1, 4, add=True), nn.Tanh(), nn.Linear(4, 3)),
    "a term for one feature more": lambda: nn.Sequential(nn.Linear(3, 1), Factor(4, add=True), nn.Tanh(), nn.Linear(4, 3)),
    "PReLU": lambda: nn.Sequential(nn.Linear(3, 4), nn.PReLU(4), nn.Tanh(), nn.Linear(4, 3)),
    "PReLU, one number": lambda: nn.Sequential(nn.Linear(3, 4), nn.PReLU(), nn.Tanh(), nn.Linear(4, 3)),
    "batched: instance norm": lambda: nn.Sequential(nn.Conv2d(1, 2, 2), nn.InstanceNorm2d(2, affine=True), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3)),
    "batched: a factor for channels": lambda: nn.Sequential(nn.Conv2d(1, 2, 2), Factor(2, 1, 1), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3)),
    "batch norm in eval": lambda: nn.Sequential(nn.Conv2d(1, 2, 2), nn.BatchNorm2d(2), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3)).eval(),
}  # fmt: skip


@rows("name", NORMS)
def test_norms_have_exact_blocks(name):
    torch.manual_seed(1)
    model = NORMS[name]().double()
    loss, params = hog.functional_loss(model, F.cross_entropy), hog.trainable_params(model)
    x = draw(5, 1, 3, 3) if "batch" in name else draw(5, 3)
    batch = (x, torch.arange(5) % 3)
    own = {key: p for key, p in params.items() if key.startswith("1.")}
    G = hog.GGNOperator(loss, own, split(batch)).to_dense()
    for corrected in (False, True):
        K = hog.KFACOperator(
            loss, params, split(batch), approximation="reduce", eigenvalue_corrected=corrected
        )
        at = sum(p.numel() for key, p in params.items() if key.startswith("0."))
        at = slice(at, at + len(G))
        assert_close(K.to_dense()[at, at], G)


class Gemma(nn.Module):
    """An RMS norm that multiplies by 1 + weight."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4) / 4)

    def forward(self, x):
        return (x * x.square().mean(-1, keepdim=True).add(1e-6).rsqrt()) * (1.0 + self.weight)


class Masked(nn.Linear):
    """A layer of a masked autoencoder: some weights are not there."""

    def __init__(self, into, out):
        super().__init__(into, out)
        self.register_buffer("mask", (torch.rand(out, into) > 0.4).double())

    def forward(self, x):
        return F.linear(x, self.weight * self.mask, self.bias)


def with_own(run, shape, into=4, **layers):
    """run(net, x, p) at an input x after a layer, with a parameter p."""
    return Fn(
        lambda net, x: run(net, net.first(x), net.p), p=nn.Parameter(torch.randn(shape)),
        first=nn.Linear(3, into), head=nn.Linear(4, 3), **layers,
    )  # fmt: skip


def mixed(net, x):
    """Attention without weights of its own, and the head."""
    return net.head((torch.softmax(x @ x.mT, -1) @ x).tanh()).mean(1)


def copies(copy):
    """Copies of a parameter before the positions of each example."""
    return lambda size: with_own(lambda net, x, p: mixed(net, torch.cat([copy(p, x), x], 1)), size)


def scales(use, shape=(4,)):
    return lambda: with_own(lambda net, x, p: net.head(use(torch.tanh(x), p)), shape)


def weights(function, into=4):
    """A layer whose weight is a function of each element of a parameter."""
    return lambda: with_own(lambda net, x, p: net.head(F.linear(x, function(p)).tanh()), (4, into))


def generator(**options):
    layers = nn.Sequential(nn.Unflatten(1, (4, 1, 1)), nn.ConvTranspose2d(4, 4, 3, **options), nn.Tanh(), nn.ConvTranspose2d(4, 3, 2, stride=2, padding=1, bias=False))  # fmt: skip
    return lambda: Fn(lambda net, x: net.layers(net.first(x)).sum((2, 3)), first=nn.Linear(3, 4), layers=layers)  # fmt: skip


def pixels():
    """A masked convolution."""
    mask = torch.tensor([1.0, 1.0, 0.0], dtype=F64).expand(3, 2, 3)
    return Fn(
        lambda net, x: F.conv1d(x.unflatten(1, (1, 3)).expand(-1, 2, -1) * net.p, net.layer.weight * mask, net.layer.bias, padding=1).tanh().sum(2),
        p=nn.Parameter(torch.randn(2, 1)), layer=nn.Conv1d(2, 3, 3),
    )  # fmt: skip


TOKENS = draw(5, 2, 3)  # [examples, positions, features]
MASK = torch.tensor([True, False, True, False])
# name -> (makes the model, whether x has positions, parameter, its block)
USES = {
    "class token": (lambda: copies(lambda p, x: p.expand(len(x), -1, -1))((1, 1, 4)), True, "p", "block"),
    "class token, repeated, of a cast": (lambda: copies(lambda p, x: p.to(x).type_as(x).repeat(len(x), 1, 1))((1, 1, 4)), True, "p", "block"),
    "queries": (lambda: copies(lambda p, x: p.unsqueeze(0).expand(len(x), -1, -1))((3, 4)), True, "p", "table"),
    "queries of a view, tiled": (lambda: copies(lambda p, x: p.view(1, 3, 4).tile(len(x), 1, 1))((12,)), True, "p", "table"),
    "queries on zeros": (lambda: copies(lambda p, x: x.new_zeros(len(x), 3, 4) + p)((3, 4)), True, "p", "table"),
    "positions": (lambda: with_own(lambda net, x, p: mixed(net, x + p[:, :2]), (1, 2, 4)), True, "p", "table"),
    "positions, times": (lambda: with_own(lambda net, x, p: mixed(net, x * p), (2, 4)), True, "p", "table"),
    "positions, in place": (lambda: with_own(lambda net, x, p: mixed(net, (2 * x).add_(p)), (2, 4)), True, "p", "table"),
    "mask token": (lambda: with_own(lambda net, x, p: mixed(net, torch.where(MASK[:2, None], x, p)), (1, 1, 4)), True, "p", "block"),
    "a table, in a look-up and as queries": (lambda: with_own(lambda net, x, p: mixed(net, torch.cat([F.embedding(torch.tensor([[0, 2]]).expand(len(x), 2), p), p[None].expand(len(x), -1, -1), x], 1)), (3, 4)), True, "p", None),
    "1 + weight": (lambda: nn.Sequential(nn.Linear(3, 4), Gemma(), nn.Tanh(), nn.Linear(4, 3)), False, "1.weight", "block"),
    "1 + weight, of torch": (scales(lambda x, p: F.rms_norm(x, (4,), p + 1)), False, "p", "block"),
    "a norm of twice the weight": (scales(lambda x, p: F.layer_norm(x, (4,), 2 * p)), False, "p", "block"),
    "layer scale with a mask": (scales(lambda x, p: x * (p * MASK)), False, "p", "block"),
    "a shift to the left": (scales(lambda x, p: x - p), False, "p", "block"),
    "a term with alpha": (scales(lambda x, p: torch.add(x, p, alpha=3)), False, "p", "block"),
    "divided": (scales(lambda x, p: x / (p.square() + 1)), False, "p", "block"),
    "a learned power": (scales(lambda x, p: (x.square() + 1).pow(p)), False, "p", "block"),
    "a temperature": (scales(lambda x, p: p.exp() * x, ()), False, "p", "block"),
    "a gate": (scales(lambda x, p: torch.lerp(x, x.square(), torch.sigmoid(p))), False, "p", "block"),
    "a factor of the data": (lambda: Fn(lambda net, x: torch.tanh((x * net.p) @ net.w), p=nn.Parameter(torch.randn(3)), w=nn.Parameter(torch.randn(3, 3))), False, "p", "block"),
    "masked layers": (lambda: nn.Sequential(Masked(3, 4), nn.Tanh(), Masked(4, 3)), False, "0.weight", "diagonal"),
    "a masked product": (lambda: with_own(lambda net, x, p: net.head(torch.tanh(x @ (p * MASK[:, None]))), (4, 4)), False, "p", "diagonal"),
    "a masked convolution": (pixels, False, "layer.weight", "diagonal"),
    "a masked product of a transposed matrix": (lambda: with_own(lambda net, x, p: net.head(torch.tanh(x @ (p * MASK[:, None]).T)), (4, 4)), False, "p", "diagonal"),
    "a transposed matrix, masked": (lambda: with_own(lambda net, x, p: net.head(torch.tanh(x @ (p.T * MASK[:, None]))), (4, 4)), False, "p", "diagonal"),
    "a product with a vector": (lambda: with_own(lambda net, x, p: net.head(torch.tanh(x * (x @ p)[:, None])), (4,)), False, "p", "block of one"),
    "a layer of one output": (lambda: with_own(lambda net, x, p: net.head(torch.tanh(x * F.linear(x, p)[:, None])), (4,)), False, "p", "block of one"),
    "layers of heads": (lambda: with_own(lambda net, x, p: net.head(torch.bmm(x.unflatten(1, (2, 2)).transpose(0, 1), p).tanh().transpose(0, 1).flatten(1)), (2, 2, 2)), False, "p", None),
    "heads by einsum": (lambda: with_own(lambda net, x, p: net.head(torch.einsum("bhd,hkd->bhk", x.unflatten(1, (2, 2)), p).tanh().flatten(1)), (2, 2, 2)), False, "p", None),
    "one matrix of all heads": (lambda: with_own(lambda net, x, p: net.head(torch.einsum("bd,dhk->bhk", x, p).tanh().flatten(1)), (4, 2, 2)), False, "p", None),
    "positive weights": (weights(F.softplus), False, "p", "diagonal"),
    "an equalized rate": (weights(lambda p: p * 0.3), False, "p", "block of one"),
    "a change of weights": (weights(lambda p: torch.eye(4, dtype=F64) + p), False, "p", "block of one"),
    "transposed convolutions": (generator(), False, "layers.1.bias", None),
    "transposed convolutions, of all options": (generator(stride=2, groups=2, dilation=2, padding=1, output_padding=1), False, "layers.1.bias", None),
}  # fmt: skip


@rows("name", USES)
def test_uses_of_a_parameter(name):
    """Exact diagonals, traces and norms for all; the block of the one as dense matrices have it."""
    make, positions, own, form = USES[name]
    torch.manual_seed(1)
    loss = hog.functional_loss(make().double(), F.cross_entropy)
    params, x = hog.trainable_params(loss.model), TOKENS if positions else draw(5, 3)
    # of one example, whose positions might be taken for examples
    for n in (5, 1) if positions or form == "block of one" else (5,):
        batch = x[:n], torch.arange(n) % 3
        M = hog.GGNOperator(loss, params, split(batch)).to_dense()
        K = hog.KFACOperator(loss, params, split(batch), eigenvalue_corrected=True)
        assert_close(K.exact_diagonal(), M.diagonal())
        assert_close(K.trace(), M.trace())
        found = hog.KFACOperator(loss, params, split(batch), joint_bias=False)
        at = [torch.full((p.numel(),), key == own) for key, p in params.items()]
        at = torch.cat(at).nonzero()[:, 0]
        if n > 1:
            ghosts(loss, params, batch)
            eye = torch.eye(len(M), dtype=F64)
            assert_close(found.inverse(0.1) @ (found.to_dense() + 0.1 * eye), eye)
        found, M = found.to_dense()[at[:, None], at], M[at[:, None], at]
        if form == "diagonal":
            assert_close(found, M.diagonal().diag())
        elif form == "table":
            T = len(at) // 4
            parts = M.reshape(T, 4, T, 4).diagonal(dim1=0, dim2=2).sum(-1)
            assert_close(found, torch.kron(torch.eye(T, dtype=F64) / T, parts))
        elif form == "block" or (form and n == 1):
            assert_close(found, M)


def apart(x, stride):
    """With zeros between the inputs."""
    found = x.new_zeros(*x.shape[:2], (x.shape[2] - 1) * stride + 1)
    found[..., ::stride] = x
    return found


def test_transposed_convolutions_are_convolutions():
    """Of the inputs with zeros between them, by the mirrored kernel."""
    torch.manual_seed(1)
    layer = nn.ConvTranspose1d(2, 3, 4, stride=2, padding=1).double()
    other = nn.Conv1d(2, 3, 4, padding=2).double()
    with torch.no_grad():
        other.weight.copy_(layer.weight.transpose(0, 1).flip(2))
        other.bias.copy_(layer.bias)
    batch, found = (draw(7, 2, 3), torch.arange(7) % 3), []
    for one, run in ((layer, layer), (other, lambda x: other(apart(x, 2)))):
        model = Fn(lambda net, x, run=run: run(x).tanh().sum(2), layer=one)
        loss = hog.functional_loss(model, F.cross_entropy)
        params = hog.trainable_params(loss.model)
        K = hog.KFACOperator(loss, params, batch, joint_bias=False)
        found.append((K.to_dense(), K.inverse(0.1).to_dense()))
    index = torch.arange(24).view(3, 2, 4).transpose(0, 1).flip(2).reshape(-1)
    index = torch.cat([index, torch.arange(24, 27)])
    for ours, theirs in zip(*found, strict=True):
        assert_close(ours, theirs[index][:, index])


class Product(nn.Module):
    """A linear layer, written by hand."""

    def __init__(self, linear, transposed, product):
        super().__init__()
        weight = linear.weight.detach()
        self.matrix = nn.Parameter((weight.T if transposed else weight).clone())
        self.shift, self.product = nn.Parameter(linear.bias.detach().clone()), product

    def forward(self, x):
        return self.product(x, self.matrix, self.shift)


# name -> (whether the matrix is stored [into, out], product)
PRODUCTS = {
    "x @ W": (True, lambda x, W, b: x @ W + b),
    "x @ W.T": (False, lambda x, W, b: x @ W.T + b),
    "x @ W.t() of a cast": (False, lambda x, W, b: x @ W.t().to(x).contiguous() + b),
    "x @ (W.T).T": (True, lambda x, W, b: x @ W.T.mT + b),
    "x @ W.transpose(0, 1), scaled": (False, lambda x, W, b: x @ (2 * W.transpose(0, 1)) / 2 + b),
    "W @ x": (False, lambda x, W, b: (W @ x.mT).mT + b),
    "W.T @ x": (True, lambda x, W, b: (W.permute(1, 0) @ x.mT).mT + b),
    "a linear layer": (True, lambda x, W, b: F.linear(x, W.T) + b),
    "addmm": (False, lambda x, W, b: torch.addmm(torch.zeros(4, dtype=F64), x.flatten(0, 1), W.t()).view(7, 5, 4) + b),
    "mm": (False, lambda x, W, b: torch.mm(x.flatten(0, 1), W.t()).view(7, 5, 4) + b),
    "einsum": (False, lambda x, W, b: torch.einsum("btd, od -> bto", x, W) + b),
    "einsum, other order": (True, lambda x, W, b: torch.einsum("do,btd->otb", W, x).permute(2, 1, 0) + b),
    "einsum, ellipsis": (True, lambda x, W, b: torch.einsum("...d,do", x, W) + b),
    "einsum, transposed": (False, lambda x, W, b: torch.einsum("...d,do->...o", [x, W.T]) + b),
}  # fmt: skip


@rows("corrected", [False, True], ids=["KFAC", "EKFAC"])
@rows("name", PRODUCTS)
def test_matrix_products_are_linear_layers(name, corrected):
    torch.manual_seed(1)
    first, last = nn.Linear(3, 4).double(), nn.Linear(4, 3).double()
    batch = draw(7, 5, 3), torch.arange(7) % 3
    found = []
    for model in (first, Product(first, *PRODUCTS[name])):
        loss = hog.functional_loss(
            nn.Sequential(model, nn.Tanh(), last),
            lambda z, batch: F.cross_entropy(z, batch[1]),
            forward=lambda m, batch: m(batch[0]).mean(1),
        )
        found.append(
            hog.KFACOperator(
                loss, hog.trainable_params(loss.model), batch, joint_bias=False,
                eigenvalue_corrected=corrected,
            ).to_dense()
        )  # fmt: skip
    index = torch.arange(12).reshape(4, 3)
    index = (index.T if PRODUCTS[name][0] else index).reshape(-1)
    index = torch.cat([index, torch.arange(12, len(found[0]))])
    expected = found[0][index][:, index]
    # the block of the term is exact, that of a bias is not where positions share it
    expected[12:16, 12:16] = found[1][12:16, 12:16]
    assert_close(found[1], expected, rtol=1e-6, atol=1e-9)


class Words(nn.Module):
    """Words and positions, a norm, and two layers of GPT-2 and of LoRA."""

    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(5, 4, padding_idx=0), nn.Embedding(3, 4)
        self.norm, self.layer, self.A, self.B = nn.LayerNorm(4), Conv1D(4, 4), *(
            nn.Parameter(torch.randn(shape)) for shape in ((2, 4), (3, 2))
        )  # fmt: skip

    def forward(self, x):
        x = self.norm(self.words(x) + self.places(torch.arange(3)[None])).tanh()
        return (self.layer(x).tanh().sum(1) * 0.5) @ self.A.T @ self.B.T


IMAGES = draw(6, 1, 4, 4)
EXPORTED = {
    "layers": (lambda: nn.Sequential(nn.Conv2d(1, 4, 2), nn.GroupNorm(2, 4), nn.Tanh(), nn.ConvTranspose2d(4, 2, 2), nn.PReLU(2), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(32, 3)).eval(), IMAGES, False),
    "layers, decomposed": (lambda: nn.Sequential(nn.Conv2d(1, 4, 2), nn.Tanh(), nn.ConvTranspose2d(4, 2, 2, stride=2), nn.Flatten(), nn.LayerNorm(72), nn.Linear(72, 3)), IMAGES, True),
    "words": (Words, torch.arange(18).reshape(6, 3) % 5, False),
    "words, decomposed": (Words, torch.arange(18).reshape(6, 3) % 5, True),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch copies its own
@rows("name", EXPORTED)
def test_exported_programs_have_the_layers_of_their_model(name):
    make, x, decomposed = EXPORTED[name]
    torch.manual_seed(1)
    model = make().double()
    program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim.AUTO},))
    program = program.run_decompositions() if decomposed else program
    found = []
    for one in (model, program.module()):
        loss, batch = hog.functional_loss(one, F.cross_entropy), (x, LABELS)
        params = {key: dict(one.named_parameters())[key] for key in hog.trainable_params(model)}
        K = hog.KFACOperator(loss, params, split(batch), approximation="reduce").update()
        scores = hog.influence(loss, params, batch, batch, damping=0.1)
        norms = hog.curvature.per_example_gradient_norms(loss, params, batch)
        found.append((K.to_dense(), scores, norms))
    assert_close(found[1], found[0])


def placed(summed, rows=1):
    """Positions are embedded once, for all examples; their sum as a feature is not of an example."""

    def run(net, x):
        at = torch.arange(4)
        places = net.places(at[None] if rows else at)
        return torch.tanh(net.words(x) + (places.sum() if summed else places)).sum(1)

    return Fn(run, words=nn.Embedding(5, 3), places=nn.Embedding(4, 3))


@rows("rows", [1, 0], ids=["[1, T]", "[T]"])
def test_embeddings_of_positions(rows):
    torch.manual_seed(1)
    x = torch.arange(24).reshape(6, 4) % 5
    loss = hog.functional_loss(placed(False, rows).double(), F.cross_entropy)
    params, batch = hog.trainable_params(loss.model), (x, LABELS)
    G = hog.GGNOperator(loss, params, split(batch)).to_dense()
    K = hog.KFACOperator(loss, params, split(batch))
    assert_close(K.exact_diagonal(), G.diagonal())
    places = K.to_dense()[15:, 15:]
    A = torch.eye(4, dtype=F64) / 4
    _, block = hog.KFACOperator(loss, params, batch).blocks()
    assert_close(torch.kron(A, block.G[0]), places, rtol=1e-6, atol=1e-12)
    corrected = hog.KFACOperator(loss, params, split(batch), eigenvalue_corrected=True)
    assert_close(corrected.trace(), G.trace())
    ghosts(loss, params, batch)


def test_embeddings_of_one_sequence():
    """Its positions are no examples, although they are the leading dimension of the data."""
    torch.manual_seed(1)
    loss = hog.functional_loss(
        placed(False).double(),
        lambda z, batch: F.cross_entropy(z, batch[1]),
        forward=lambda m, batch: m(batch[0][None]),
    )
    params, batch = hog.trainable_params(loss.model), (torch.arange(4), torch.tensor([1]))
    K = hog.KFACOperator(loss, params, batch)
    assert_close(K.exact_diagonal(), hog.GGNOperator(loss, params, batch).to_dense().diagonal())


def keys():
    """Attention, in which a bias of the keys has no effect: its gradient is only rounding."""

    def run(net, x):
        scores = net.query(x) @ net.key(x).mT
        return net.head(scores.softmax(-1) @ x).mean(1)

    return Fn(run, query=nn.Linear(4, 4), key=nn.Linear(4, 4), head=nn.Linear(4, 3))


@rows("dtype", [torch.float32, F64], ids=str)
@rows("joint", [True, False])
def test_gradients_of_zero_up_to_rounding(dtype, joint):
    torch.manual_seed(1)
    loss = hog.functional_loss(keys().to(dtype), F.cross_entropy)
    params, batch = hog.trainable_params(loss.model), (draw(5, 3, 4).to(dtype), LABELS[:5])
    K = hog.KFACOperator(loss, params, batch, joint_bias=joint, eigenvalue_corrected=True)
    G = hog.GGNOperator(loss, params, batch).to_dense()
    assert_close(K.trace(), G.trace())


def experts(net, x):
    """Each example is given to one of two layers."""
    out, first = x.new_zeros(x.shape), x[:, 0] > 0
    for i, expert in enumerate(net.experts):
        rows = (first == bool(i)).nonzero()[:, 0]
        out = out.index_add(0, rows, expert(x[rows]))
    return out


@rows("signs", [[1, 1, -1, 1, -1, 1], [1, 1, -1, -1, 1, -1], [1, -1, 1, 1, -1, -1]])
def test_experts(signs):
    """Their factors are sums over the rows that they have; whose rows these are nobody says."""
    torch.manual_seed(1)
    model = Fn(experts, experts=nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)]))
    loss = hog.functional_loss(model.double(), F.cross_entropy)
    x = draw(6, 3)
    x[:, 0] = x[:, 0].abs() * torch.tensor(signs)
    params, batch = hog.trainable_params(loss.model), (x, LABELS)
    with pytest.raises(hog.errors.UnsupportedError, match=r"as of an expert|examples apart"):
        hog.KFACOperator(loss, params, batch, eigenvalue_corrected=True).update()
    ghosts(loss, params, batch)


def routed(stacked, always):
    """A linear model of two experts; each example is given to one of them, by the sign of a feature."""

    def run(net, x):
        out = x.new_zeros(len(x), 2)
        for i, sign in enumerate((-1, 1)):
            rows = (x[:, 0].sign() == sign).nonzero()[:, 0]
            if always or len(rows):
                expert = (
                    net.experts[i](x[rows])
                    if not stacked
                    else F.linear(x[rows], net.W[i], net.b[i])
                )
                out = out.index_add(0, rows, expert)
        return out

    if stacked:
        own = {"W": nn.Parameter(torch.randn(2, 2, 3)), "b": nn.Parameter(torch.randn(2, 2))}
    else:
        own = {"experts": nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2)])}
    return Fn(run, **own)


def routed_problem(stacked=False, always=False):
    torch.manual_seed(1)
    loss, x = hog.functional_loss(routed(stacked, always).double(), F.mse_loss), draw(8, 3)
    x[:, 0] = x[:, 0].abs() * torch.tensor([1, 1, 1, -1, -1, 1, -1, 1])
    return loss, hog.trainable_params(loss.model), (x, draw(8, 2, seed=1))


# where a batch ends -> the options by which each expert has rows of whole batches, or of some examples
CUTS = {
    "left out of the first batch": ([3, 8], [{}, {"joint_bias": False}, {"unsupported": "diagonal"}]),
    "left out of the last batch": ([7, 8], [{}, {"unsupported": "diagonal", "eigenvalue_corrected": True}]),
    "whole batches": ([3, 5, 6, 7, 8], [{}, {"eigenvalue_corrected": True}, {"approximation": "reduce"}, {"unsupported": "diagonal"}]),
}  # fmt: skip


@rows("always", [False, True], ids=["not called", "called without examples"])
@rows("stacked", [False, True], ids=["layers", "one parameter"])
@rows("cut", CUTS)
def test_experts_that_a_batch_leaves_out(cut, stacked, always):
    """Their factors are those of the batches that call them: exact for a linear model."""
    loss, params, (x, y) = routed_problem(stacked, always)
    ends, every = CUTS[cut]
    data = [(x[a:b], y[a:b]) for a, b in zip([0, *ends], ends, strict=False)]
    G = hog.GGNOperator(loss, params, data).to_dense()
    for options in every:
        K = hog.KFACOperator(loss, params, data, **options).update()
        found = K.to_dense()
        assert_close(found, torch.where(found == 0, 0, G))
        assert_close(K.diagonal(), G.diagonal())
        if not options:  # in whatever batches
            assert_close(found, hog.KFACOperator(loss, params, (x, y)).to_dense())
    K = hog.KFACOperator(loss, params, data)
    g = rows_of(loss, params, (x, y))
    scores = hog.influence(loss, params, data, (x, y), damping=0.1, solver="kfac")
    assert_close(scores, -g @ K.solve(g.T, damping=0.1))
    ghosts(loss, params, data[0])


def test_factors_of_experts_are_sums_over_the_batches_that_call_them():
    """By hand: A is a mean over the rows of all batches, G a sum."""
    loss, params, (x, y) = routed_problem()
    data = [(x[:3], y[:3]), (x[3:], y[3:])]
    found = {
        block.layout.first.leaf: block for block in hog.KFACOperator(loss, params, data).blocks()
    }
    for leaf, sign in ((0, -1), (2, 1)):
        a = torch.cat([x, torch.ones(8, 1, dtype=F64)], 1)[x[:, 0].sign() == sign]
        block = found[leaf]
        assert_close(block.A[0], a.T @ a / len(a))
        # of the mean over 8 examples of 2 outputs: 2 / 16 for each row and output
        assert_close(block.G[0], len(a) / 8 * torch.eye(2, dtype=F64))


@rows("transposed", [False, True], ids=["[into, out]", "[out, into]"])
def test_fused_experts_are_layers(transposed):
    """One product for all experts, as a loop over them; the second one has no examples."""

    def loop(net, x, order, ends):
        starts, parts = [0, *ends[:-1].tolist()], []
        for e, (start, end) in enumerate(zip(starts, ends.tolist(), strict=True)):
            rows = x[order][start:end]
            parts.append(F.linear(rows, net.W[e]) if transposed else rows @ net.W[e])
        return torch.cat(parts)

    def fused(net, x, order, ends):
        W = net.W.mT if transposed else net.W
        return F.grouped_mm(x[order], W, offs=ends.int())

    def run(experts):
        def model(net, x):
            chosen = 2 * (x[:, 0] > 0)
            ends = (chosen[:, None] <= torch.arange(3)).sum(0)
            order = chosen.argsort(stable=True)
            return net.head(experts(net, x, order, ends)[order.argsort()])

        torch.manual_seed(1)
        W = nn.Parameter(torch.randn(3, 8, 4) if transposed else torch.randn(3, 4, 8))
        net = Fn(model, W=W, head=nn.Linear(8, 2))
        return hog.functional_loss(net, F.mse_loss), hog.trainable_params(net)

    batch = draw(6, 4).float(), draw(6, 2, seed=1).float()  # torch has it in float32
    one, other = (hog.KFACOperator(*run(experts), batch) for experts in (fused, loop))
    assert_close(one.to_dense(), other.to_dense())
    assert one.trace() > 0
    with pytest.raises(hog.errors.UnsupportedError, match=r"as of an expert|examples apart"):
        hog.KFACOperator(*run(fused), batch, eigenvalue_corrected=True).update()


class NextWord(nn.Module):
    """A language model that predicts the next word."""

    def __init__(self):
        super().__init__()
        self.words, self.layer, self.head = nn.Embedding(6, 4), nn.Linear(4, 4), nn.Linear(4, 6)

    def hidden(self, tokens):
        return torch.tanh(self.layer(self.words(tokens))).cumsum(1)

    def forward(self, input_ids):
        return self.head(self.hidden(input_ids))


@rows("kind", ["exact", "mc", "empirical"])
def test_language_model_losses(kind):
    """By their logits, of batches with unlike numbers of labels."""
    torch.manual_seed(1)
    model = NextWord().double()
    loss = hog.language_model_loss(model, head="head", shift=True)
    logits = hog.functional_loss(
        model,
        lambda z, batch: F.cross_entropy(z, batch["labels"][:, 1:]),
        forward=lambda model, batch: model.head(model.hidden(batch["input_ids"])[:, :-1]).mT,
    )
    x = torch.randint(6, (5, 4))
    y = x.clone()
    y[0, 2:], y[4, 1:] = -100, -100
    data = [{"input_ids": x[i], "labels": y[i]} for i in (slice(0, 2), slice(2, 5))]
    params = hog.trainable_params(model)
    options = {"kind": kind, "approximation": "reduce", "eigenvalue_corrected": True, "num_samples": 200 if kind == "mc" else 1}  # fmt: skip
    K = hog.KFACOperator(loss, params, data, generator=torch.Generator().manual_seed(0), **options)
    M = hog.FisherOperator(loss, params, data, kind="empirical" if kind == "empirical" else "exact").to_dense()  # fmt: skip
    error = (K.exact_diagonal() - M.diagonal()).norm() / M.diagonal().norm()
    assert error < (0.2 if kind == "mc" else 1e-6)
    assert abs(K.trace() / M.trace() - 1) < (0.2 if kind == "mc" else 1e-6)
    if kind == "exact":
        whole = {"input_ids": x, "labels": y}
        by_hand = hog.KFACOperator(logits, params, whole).to_dense()
        assert_close(hog.KFACOperator(loss, params, whole).to_dense(), by_hand)
        optimizer = hog.curvature.KFAC(loss, damping=0.1)
        values = [float(optimizer.step(whole)) for _ in range(4)]
        assert values[-1] < values[0]
        scores = hog.influence(loss, params, data, whole, damping=0.1)
        assert scores.shape == (5, 5)
        norms = hog.curvature.per_example_gradient_norms(loss, params, whole)
        share = (y[:, 1:] != -100).sum(1).double()  # of an example in the mean over labels
        assert_close(norms, rows_of(logits, params, whole).norm(dim=1) * share / share.mean())


def attention(cross):
    def run(net, x):
        other = x.flip(1).square() if cross else x
        return net.head(net.attention(x, other, other, need_weights=False)[0].mean(1))

    return Fn(run, attention=nn.MultiheadAttention(4, 2, batch_first=True), head=nn.Linear(4, 3))


@rows("cross", [False, True], ids=["self", "cross"])
def test_attention(cross):
    torch.manual_seed(1)
    model = attention(cross).double()
    loss, params = hog.functional_loss(model, F.cross_entropy), hog.trainable_params(model)
    batch = draw(1, 1, 4), torch.tensor([1])  # one example with one position: exact
    K = hog.KFACOperator(loss, params, batch)
    name, bias = "attention.in_proj_weight", "attention.in_proj_bias"
    G = hog.GGNOperator(loss, {name: params[name], bias: params[bias]}, batch).to_dense()
    if cross:  # queries are a layer, keys and values another one
        rows = torch.arange(12) < 4
        owner = torch.cat([rows.repeat_interleave(4), rows])
        G = torch.where(owner[:, None] == owner, G, 0)
    assert_close(K.to_dense()[:60, :60], G)
    out = {key: params[key] for key in ("attention.out_proj.weight", "attention.out_proj.bias")}
    assert_close(K.to_dense()[60:80, 60:80], hog.GGNOperator(loss, out, batch).to_dense())


@rows("method", ["exact", "pi", "factors"])
def test_inverses(method):
    loss, params, batch, _ = problem("conv2d, groups, dilation")
    K = hog.KFACOperator(loss, params, batch)
    dense, damping = K.to_dense(), 0.03
    eye = torch.eye(len(dense), dtype=F64)
    inverse = K.inverse(damping, method=method).to_dense()
    if method == "exact":
        assert_close(inverse @ (dense + damping * eye), eye)
    else:
        block = K.blocks()[-1]
        A, G = block.A[0], block.G[0]
        pi = ((A.trace() / len(A)) / (G.trace() / len(G))).sqrt()
        a, g = (damping**0.5 * pi, damping**0.5 / pi) if method == "pi" else (damping, damping)
        expected = torch.kron(
            torch.linalg.inv(G + g * torch.eye(len(G), dtype=F64)),
            torch.linalg.inv(A + a * torch.eye(len(A), dtype=F64)),
        )
        assert_close(inverse[-len(expected) :, -len(expected) :], expected)
    b = {name: torch.randn_like(p) for name, p in params.items()}
    x = K.solve(b, damping=damping, method=method)
    assert_close(K.ravel(x), inverse @ K.ravel(b))


def test_functions_of_the_matrix():
    loss, params, batch, _ = problem("an embedding")
    K = hog.KFACOperator(loss, params, batch, eigenvalue_corrected=True)
    dense = K.to_dense()
    damped = K.damped(0.5)
    assert_close(damped.to_dense(), dense + 0.5 * torch.eye(len(dense), dtype=F64))
    assert_close(damped.logdet(), damped.to_dense().logdet())
    assert_close((3 * K / 2).to_dense(), 1.5 * dense)
    assert_close(K.sqrt() @ (K.sqrt() @ draw(len(dense), 2)), K @ draw(len(dense), 2))
    assert_close(K.eigenvalues(), torch.linalg.eigvalsh(dense), atol=1e-12, rtol=1e-7)
    assert_close(damped.inverse().sqrt().trace(), torch.linalg.eigvalsh(damped.to_dense()).rsqrt().sum())  # fmt: skip
    for corrected in (False, True):  # zeros, where the eigenvalues of the dense matrix are rounding
        other, own, (x, y), _ = problem("layers")
        singular = hog.KFACOperator(other, own, (x[:2], y[:2]), eigenvalue_corrected=corrected)
        for S in (singular, singular.damped(0.0), 2 * singular):
            assert S.logdet() == -torch.inf
        assert singular.damped(1e-30).logdet().isfinite()
        with pytest.raises(hog.errors.NotPositiveDefiniteError, match=r"-0\.5; add damping"):
            singular.damped(-0.5).logdet()
    with pytest.raises(hog.errors.NotPositiveDefiniteError, match="damping > 0"):
        K.inverse()
    with pytest.raises(hog.errors.ArgumentValueError, match="eigenvalues of its own"):
        K.inverse(1.0, method="pi")
    with pytest.raises(hog.errors.ArgumentValueError, match="element by element"):
        K.map(lambda values: values.sum())
    with pytest.raises(hog.errors.NonFiniteError, match="at the eigenvalue"):
        K.map(lambda values: values.clamp(min=0).rsqrt())


def test_criteria_without_a_closed_form():
    """Class weights, targets of probabilities, and a likelihood of the user's: by blocks of M."""
    loss, params, (x, y), layers = problem("layers")
    plain = hog.KFACOperator(loss, params, (x, y)).to_dense()
    weighted = hog.functional_loss(loss.model, nn.CrossEntropyLoss(weight=torch.ones(3, dtype=F64)))
    assert_close(hog.KFACOperator(weighted, params, (x, y)).to_dense(), plain)
    own = hog.functional_loss(loss.model, lambda f, y: -f.log_softmax(1)[torch.arange(len(y)), y].mean())  # fmt: skip
    assert_close(hog.KFACOperator(own, params, (x, y)).to_dense(), plain)
    by_hand = hog.KFACOperator(
        own, params, (x, y), likelihood=lambda f: torch.distributions.Categorical(logits=f)
    )
    assert_close(by_hand.to_dense(), plain)
    squares, params, batch, layers = problem("layers", "mean square")
    expected = dense_kfac(squares, params, batch, layers, "exact", "expand", False) / len(x)
    assert_close(hog.KFACOperator(squares, params, batch).to_dense(), expected)


def test_terms_of_positions_are_apart():
    """Outputs [N, C, L]: the positions of an example depend on each other, and each has its columns."""

    def run(net, x):  # [N, 2, 3]
        return net.head(torch.tanh(net.mix(x.mT).mT)).mT  # [N, 3, 2]

    torch.manual_seed(1)
    mixing = Fn(run, mix=nn.Linear(2, 2, bias=False), head=nn.Linear(3, 3))
    loss = hog.functional_loss(mixing.double(), F.cross_entropy)
    params, x = hog.trainable_params(loss.model), draw(4, 2, 3)
    y = torch.tensor([[0, 1], [2, -100], [1, 1], [0, 2]])
    K = hog.KFACOperator(loss, params, (x, y), approximation="reduce", eigenvalue_corrected=True)
    G = hog.GGNOperator(loss, params, (x, y))
    assert_close(K.trace(), G.to_dense().trace())  # the diagonal in a basis has the trace


@pytest.mark.parametrize("blocks", [dict, lambda blocks: [*blocks.values()]], ids=["", "a list"])
def test_state_can_be_saved(blocks):
    loss, params, batch, _ = problem("an embedding")
    K = hog.KFACOperator(loss, params, batch, eigenvalue_corrected=True)
    stored, state = io.BytesIO(), K.state_dict()
    torch.save(state | {"blocks": blocks(state["blocks"])}, stored)  # before, a state had a list
    stored.seek(0)
    other = hog.KFACOperator(loss, params, batch, eigenvalue_corrected=True)
    other.load_state_dict(torch.load(stored, weights_only=True))
    assert_close(other.to_dense(), K.to_dense())
    with pytest.raises(hog.errors.ArgumentValueError, match="expected that of an operator with"):
        hog.KFACOperator(loss, params, batch).load_state_dict(K.state_dict())
    less = {"head.weight": params["head.weight"], "head.bias": params["head.bias"]}
    smaller = hog.KFACOperator(loss, less, batch, eigenvalue_corrected=True)
    with pytest.raises(hog.errors.ArgumentValueError, match="other params"):
        smaller.load_state_dict(K.state_dict())
    with pytest.raises(hog.errors.ArgumentTypeError, match="'options' and 'blocks'"):
        other.load_state_dict({})
    with pytest.raises(hog.errors.ArgumentTypeError, match="blocks as"):
        other.load_state_dict({**K.state_dict(), "blocks": [{"role": 1}]})


def test_factors_are_kept_until_update():
    loss, params, batch, _ = problem("layers")
    params = {name: p.detach().clone() for name, p in params.items()}
    K = hog.KFACOperator(loss, params, batch)
    before = K.to_dense()
    params["0.weight"] *= 2
    assert_close(K.to_dense(), before, rtol=0, atol=0)
    assert not torch.allclose(K.update().to_dense(), before)


class Noisy(nn.Linear):
    def forward(self, x):
        return super().forward(x + torch.randn(x.shape[1:], dtype=x.dtype))


def test_the_seed_of_sampled_targets_is_no_draw_of_the_loss():
    """Beyond 100 outputs they are sampled; a dropout that is not called draws nothing."""

    class Unused(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.dropout = nn.Linear(3, 101), nn.Dropout()

        def forward(self, x):
            return self.layer(x)

    loss = hog.functional_loss(Unused(), F.cross_entropy)
    params, batch = hog.trainable_params(loss.model), (torch.randn(4, 3), LABELS[:4])
    hog.KFACOperator(loss, params, batch).update()


def test_the_check_of_layers_draws_no_random_numbers():
    """A model that draws continues with the numbers that follow those of its one run."""
    loss = hog.functional_loss(Noisy(3, 2), F.cross_entropy)
    params, batch = hog.trainable_params(loss.model), (torch.randn(6, 3), torch.arange(6) % 2)
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match="those of one draw: random numbers are drawn at"):
        hog.KFACOperator(loss, params, batch).update()
    after = torch.get_rng_state()
    torch.manual_seed(0)
    torch.randn(3)
    assert torch.equal(torch.get_rng_state(), after)


def shared(run, shape):
    """A parameter of which each example has no copy of its own."""
    own = {"p": nn.Parameter(torch.ones(shape)), "layer": nn.Linear(3, 3)}
    return lambda: Fn(run, **own)


class TiedEmbedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x):
        return self.head(torch.tanh(self.words(x)))


def in_a_function():
    """A weight that a layer uses, and a Function, which the layers do not show."""

    def run(net, x):
        return net.layer(x) + ClassicCube.apply(net.layer.weight).sum()

    return Fn(run, layer=nn.Linear(3, 3, bias=False))


class Adjoint(torch.autograd.Function):
    """x + f(x), whose backward calls f again, as adjoint solvers and reversible blocks do."""

    @staticmethod
    def forward(ctx, f, x, *params):
        ctx.f = f
        ctx.save_for_backward(x, *params)
        return x + f(x)

    @staticmethod
    def backward(ctx, g):
        with torch.enable_grad():
            x, *params = ctx.saved_tensors
            x = x.detach().requires_grad_()
            y = x + ctx.f(x)
        return None, *torch.autograd.grad(y, (x, *params), g, allow_unused=True)


def solver():
    """A layer that is called once for its shape, and used in a Function."""

    def run(net, x):
        assert net.layer(x).shape == x.shape
        return net.head(Adjoint.apply(net.layer, x, *net.layer.parameters()))

    return Fn(run, layer=nn.Linear(3, 3), head=nn.Linear(3, 3))


def test_norms_where_backward_calls_a_layer_again():
    torch.manual_seed(1)
    loss = hog.functional_loss(solver().double(), F.cross_entropy)
    ghosts(loss, hog.trainable_params(loss.model), (draw(6, 3), LABELS))


LABELS = torch.arange(6) % 3
REFUSED = {
    "a solver": (solver, draw(6, 3), LABELS, {}, r"layers alone.*not in \['layer.weight', 'layer.bias'\]"),
    "a table of biases that is chosen from": (shared(lambda net, x: net.layer(x) + net.p[torch.tensor([0, 2, 1])], (3,)), draw(6, 3), LABELS, {}, r"params\['p'\], which __getitem__"),
    "a norm of queries": (shared(lambda net, x: net.layer(x + F.layer_norm(net.p, (3,))), (1, 3)), draw(6, 3), LABELS, {}, "which layer_norm"),
    "a normalized weight": (shared(lambda net, x: net.layer(F.linear(x, net.p / net.p.norm())), (3, 3)), draw(6, 3), LABELS, {}, r"not in \['p'\]"),
    "scaled in place": (shared(lambda net, x: net.layer(x).mul_(net.p), (3,)), draw(6, 3), LABELS, {}, "which mul_"),
    "rows that are not used": (shared(lambda net, x: net.layer(x + net.p[:1]), (2, 3)), draw(6, 3), LABELS, {}, "every row of params"),
    "a bias of a function": (shared(lambda net, x: F.linear(x + net.p, net.layer.weight, net.layer.bias * 2), (3,)), draw(6, 3), LABELS, {}, r"not in \['layer.weight', 'layer.bias'\]"),
    "a term for all examples": (shared(lambda net, x: net.layer(x + (net.p + torch.ones(3)[None, None]).sum(1)), (3,)), draw(6, 3), LABELS, {}, "not in"),
    "an LSTM": (lambda: nn.Sequential(nn.LSTM(3, 3, batch_first=True), Through(lambda y: y[0][:, -1])), draw(6, 2, 3), LABELS, {}, "which lstm in LSTM uses"),
    "a tied embedding": (TiedEmbedding, torch.arange(6) % 5, LABELS, {}, "an embedding tied"),
    "a tied matrix, transposed": (shared(lambda net, x: net.layer(torch.tanh(x @ net.p) @ net.p.T), (3, 3)), draw(6, 3), LABELS, {}, "every row of params"),
    "a product of two parameters": (shared(lambda net, x: net.layer(F.linear(x, net.p @ net.layer.weight)), (3, 3)), draw(6, 3), LABELS, {}, "which matmul in Fn uses"),
    "einsum of three": (shared(lambda net, x: net.layer(torch.einsum("bi,oi,bo->bo", x, net.p, x)), (3, 3)), draw(6, 3), LABELS, {}, "which einsum in Fn uses"),
    "einsum of a diagonal": (shared(lambda net, x: net.layer(torch.einsum("bi,ii->bi", x, net.p)), (3, 3)), draw(6, 3), LABELS, {}, "which einsum in Fn uses"),
    "columns of a transposed matrix": (shared(lambda net, x: net.layer(x @ net.p.T[:, :2] @ torch.ones(2, 3).to(x)), (3, 3)), draw(6, 3), LABELS, {}, r"not in \['p'"),
    "a Function": (in_a_function, draw(6, 3), LABELS, {}, "only a part"),
    "batch norm in train": (lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Tanh()), draw(6, 3), LABELS, {}, r"model\.eval\(\)"),
    "an embedding of positions that is summed": (lambda: placed(True), torch.arange(24).reshape(6, 4) % 5, LABELS, {}, "called once for all examples"),
    "flattened positions": (lambda: nn.Sequential(nn.Linear(3, 3), nn.Flatten(0, 1)), draw(3, 2, 3), LABELS, {}, "several of each"),
}  # fmt: skip


@rows("name", REFUSED)
def test_what_is_refused(name):
    make, x, y, options, message = REFUSED[name]
    torch.manual_seed(1)
    model = make()
    x = x.float() if x.is_floating_point() else x
    K = hog.KFACOperator(
        hog.functional_loss(model, F.cross_entropy), hog.trainable_params(model), (x, y), **options
    )
    kinds = hog.errors.UnsupportedError, hog.errors.ArgumentValueError
    with pytest.raises(kinds, match=message) as told:
        K.update()
    advice = re.search("`({n: p for .*})`", str(told.value))
    if advice:  # works when it is followed, as far as anything is left
        params = eval(advice[1], {"params": hog.trainable_params(model)})
        if params:
            hog.KFACOperator(K._loss, params, (x, y)).update()


def test_one_example_that_is_no_batch_is_told():
    loss = hog.functional_loss(nn.Linear(3, 3), F.mse_loss)
    K = hog.KFACOperator(loss, hog.trainable_params(loss.model), (torch.ones(3), torch.ones(3)))
    with pytest.raises(hog.errors.UnsupportedError, match=r"a batch of one: `x\[None\]`"):
        K.update()


def in_turns(few, *shape):
    """A second layer, in whose place few(p, x) is called in batches of up to three examples."""

    def run(net, x):
        return net.layer(x) + (F.linear(x, net.p) if len(x) > 3 else few(net.p, x))

    return lambda: Fn(run, p=nn.Parameter(torch.randn(3, 3)), layer=nn.Linear(3, 3))


UNCALLED = {
    "never called": (shared(lambda net, x: net.layer(x), (3, 3)), "which no such layer uses"),
    "rows that are never called": (shared(lambda net, x: net.layer(x + net.p[:1]), (2, 3)), "every row of params"),
    "a Function, where no layer is called": (in_turns(lambda p, x: x @ ClassicCube.apply(p)), "a custom Function uses it"),
    "another use in a later batch": (in_turns(lambda p, x: x * F.layer_norm(p, (3,))[0]), "which layer_norm in Fn uses"),
    "a Function beside a layer that two examples do not call": (lambda: Fn(lambda net, x: net.layer(x) + (F.linear(x, net.p) + x @ ClassicCube.apply(net.p) if len(x) > 3 else 0), p=nn.Parameter(torch.randn(3, 3)), layer=nn.Linear(3, 3)), "only a part"),
    "another layer in a later batch": (in_turns(lambda p, x: F.embedding(torch.arange(len(x)), p)), "in the same way in every batch"),
}  # fmt: skip


@rows("name", UNCALLED)
def test_layers_that_no_batch_calls_and_other_uses_are_refused(name):
    """With unsupported="diagonal" they have exact diagonals, from the first batch on."""
    make, message = UNCALLED[name]
    torch.manual_seed(1)
    loss = hog.functional_loss(make().double(), F.cross_entropy)
    params, x = hog.trainable_params(loss.model), draw(7, 3)
    batches = [(x[:4], LABELS[:4]), (x[4:], LABELS[:3])]
    with pytest.raises(hog.errors.UnsupportedError, match=message) as told:
        hog.KFACOperator(loss, params, batches).update()
    assert type(told.value) is hog.errors.UnsupportedError
    if "another layer" in name:
        return
    K = hog.KFACOperator(loss, params, batches, unsupported="diagonal").update()
    each = [len(y) / 7 * diagonal_of_gauss_newton(loss, params, x, y) for x, y in batches]
    own = slice(0, params["p"].numel())
    assert_close(K.to_dense()[own, own], sum(each)[own].diag())
    assert "exact diagonals of p)" in repr(K)


def test_a_criterion_of_many_outputs_has_to_be_known():
    loss = hog.functional_loss(nn.Linear(3, 3000), lambda y, t: F.cross_entropy(y, t))
    data = torch.ones(40, 3), torch.arange(40)
    with pytest.raises(hog.errors.UnsupportedError, match="likelihood='categorical'"):
        hog.KFACOperator(loss, hog.trainable_params(loss.model), data).update()
    hog.KFACOperator(
        loss, hog.trainable_params(loss.model), data, likelihood="categorical"
    ).update()


def diagonal_of_gauss_newton(loss, params, x, y):
    """By a gradient for each output, and a dense Hessian of the criterion."""
    f, options = loss.model(x), {"retain_graph": True, "materialize_grads": True}
    J = torch.stack([torch.cat([g.flatten() for g in torch.autograd.grad(o, [*params.values()], **options)]) for o in f.flatten()])  # fmt: skip
    H = torch.autograd.functional.hessian(lambda f: F.cross_entropy(f, y), f.detach())
    return (J * (H.reshape(2 * [f.numel()]) @ J)).sum(0)


def recurrent(cell):
    return lambda: nn.Sequential(cell(3, 4, batch_first=True), Through(lambda y: y[0][:, -1]), nn.Linear(4, 3))  # fmt: skip


def centred(net, x):
    """The mean of the batch: an example by itself has other outputs."""
    h = net.layer(x) * net.p.sort().values
    return h - h.mean(0)


UNSUPPORTED = {
    **{name: (make, x) for name, (make, x, *_) in REFUSED.items() if name != "flattened positions"},
    "a GRU": (recurrent(nn.GRU), draw(6, 2, 3)),
    "an LSTM, one example": (recurrent(nn.LSTM), draw(1, 2, 3)),
    "parametrized weights": (lambda: nn.Sequential(orthogonal(nn.Linear(3, 3)), nn.Tanh(), weight_norm(nn.Linear(3, 3))), draw(6, 3)),
    "bags of words": (lambda: nn.Sequential(nn.EmbeddingBag(5, 3), nn.Tanh(), nn.Linear(3, 3)), torch.arange(12).reshape(6, 2) % 5),
    "examples that depend on each other": (shared(centred, (3,)), draw(6, 3)),
    "a parameter that is not used": (shared(lambda net, x: net.layer(x), (2,)), draw(6, 3)),
}  # fmt: skip


@rows("name", UNSUPPORTED)
def test_what_is_unsupported_may_have_its_exact_diagonal(name):
    make, x = UNSUPPORTED[name]
    torch.manual_seed(1)
    model = copy.deepcopy(make()).double()
    loss, params, y = hog.functional_loss(model, F.cross_entropy), hog.trainable_params(model), LABELS[: len(x)]  # fmt: skip
    K = hog.KFACOperator(loss, params, (x, y), unsupported="diagonal").update()
    exact = diagonal_of_gauss_newton(loss, params, x, y)
    assert_close(K.exact_diagonal(), exact)
    own = re.search(r"exact diagonals of (.*)\)", repr(K))[1].split(", ")
    at = torch.cat([torch.full((p.numel(),), key in own) for key, p in params.items()])
    assert_close(K.to_dense()[at][:, at], exact[at].diag())
    assert_close(K.inverse(0.1).to_dense(), torch.linalg.inv(K.damped(0.1).to_dense()))
    if len(x) > 2 and name not in ("examples that depend on each other", "batch norm in train"):
        mean = hog.KFACOperator(loss, params, split((x, y)), unsupported="diagonal")
        assert_close(mean.exact_diagonal(), exact)


SCRIPTED = {
    "a linear layer": lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh()),
    "a convolution": lambda: nn.Sequential(nn.Unflatten(1, (1, 3)), nn.Conv1d(1, 2, 2), nn.Flatten()),
    "a norm": lambda: nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4)),
    "a layer of layers": lambda: nn.Sequential(nn.Sequential(nn.Linear(3, 2), nn.Tanh()), nn.Linear(2, 4)),
}  # fmt: skip


@rows("name", SCRIPTED)
def test_scripted_layers_are_refused_or_have_their_exact_diagonal(name):
    torch.manual_seed(1)
    layers, head, batch = SCRIPTED[name]().double(), nn.Linear(4, 3).double(), (draw(6, 3), LABELS)
    found = []
    for first in (layers, torch.jit.script(layers)):
        model = nn.Sequential(first, head)
        loss, params = hog.functional_loss(model, F.cross_entropy), hog.trainable_params(model)
        K = hog.KFACOperator(loss, params, split(batch), unsupported="diagonal")
        found.append((K.exact_diagonal(), hog.curvature.per_example_gradient_norms(loss, params, batch)))  # fmt: skip
    assert_close(found[1], found[0])
    own = ", ".join(key for key in params if not key.startswith("1."))
    assert f"exact diagonals of {own})" in repr(K)
    hog.influence(loss, params, batch, batch, damping=0.1, unsupported="diagonal")
    with pytest.raises(hog.errors.UnsupportedError, match=r"a scripted module uses.*that was scripted"):  # fmt: skip
        hog.KFACOperator(loss, params, batch).update()
    with pytest.raises(hog.errors.UnsupportedError, match="a scripted module uses"):
        hog.influence(loss, params, batch, batch, damping=0.1)


def test_unsupported_in_optimizers_and_influence():
    torch.manual_seed(1)
    loss, batch = hog.functional_loss(recurrent(nn.GRU)(), F.cross_entropy), (draw(6, 2, 3).float(), LABELS)  # fmt: skip
    params, options = hog.trainable_params(loss.model), {"unsupported": "diagonal"}
    K = hog.KFACOperator(loss, params, batch, eigenvalue_corrected=True, **options)
    g = rows_of(loss, params, batch)
    found = hog.influence(loss, params, batch, batch, damping=0.1, **options)
    assert_close(found, -g @ K.solve(g.T, damping=0.1), rtol=1e-4, atol=1e-5)
    optimizer = hog.curvature.KFAC(loss, **options)
    assert float(optimizer.step(batch)) > float(optimizer.step(batch))
    turns = lambda net, x: net.layer(x * net.p) if len(x) > 3 else F.linear(x, net.layer.weight * net.p)  # noqa: E731  # fmt: skip
    loss = hog.functional_loss(shared(turns, (3,))(), F.cross_entropy)
    batches = [(draw(n, 3).float(), LABELS[:n]) for n in (4, 2)]
    given = loss, hog.trainable_params(loss.model), batches
    with pytest.raises(hog.errors.UnsupportedError, match="got params"):
        hog.KFACOperator(*given).update()
    K = hog.KFACOperator(*given, **options).update()  # in a second pass
    exact = hog.GGNOperator(*given).to_dense().diagonal()
    assert_close(K.diagonal()[:12], exact[:12])
    assert "exact diagonals of p, layer.weight" in repr(K)


def test_gradients_are_preconditioned_in_place():
    loss, params, batch, _ = problem("layers")
    K = hog.KFACOperator(loss, params, batch)
    for given in (loss.model, params):
        loss.model.zero_grad()
        loss(params, batch).backward()
        grads = {key: p.grad for key, p in params.items()}
        g = K.ravel(grads)
        K.precondition_(given, damping=0.1)
        assert_close(torch.linalg.solve(K.damped(0.1).to_dense(), g), K.ravel(grads))
    kept, before = K._last, params["0.bias"].grad.clone()
    few = hog.KFACOperator(loss, {"0.weight": params["0.weight"]}, batch)
    few.precondition_(params, damping=0.1)
    assert torch.equal(params["0.bias"].grad, before)
    K.precondition_(params, damping=0.1)
    assert K._last is kept
    K.update().precondition_(params, damping=0.1)
    assert K._last is not kept
    weight = params["0.weight"]
    copied = {n: p.detach().clone() for n, p in params.items()}
    with pytest.warns(UserWarning, match="got others of 0.weight"):
        hog.KFACOperator(loss, copied, batch).precondition_(params, damping=0.1)
    for grad, given, words in (
        (weight.grad, nn.Linear(2, 2), "got Linear without 0.weight"), (weight.grad, [*params.values()], "got list without"),
        (None, params, "got missing ones of 0.weight"), (weight.grad.to_sparse(), params, "got sparse ones of 0.weight"),
        (weight.grad * torch.nan, params, "grad: expected a finite"),
    ):  # fmt: skip
        weight.grad = grad
        with pytest.raises(hog.errors.HoglibError, match=words):
            K.precondition_(given, damping=0.1)


def class_token():
    """Attention, which holds positions before examples, and one position of each that is used."""
    return Fn(
        lambda net, x: net.head(net.layer(x)[:, 0]),
        layer=nn.TransformerEncoderLayer(2, 2, 3, dropout=0.0, batch_first=True),
        head=nn.Linear(2, 3),
    )


@rows(("kind", "approximation"), [("exact", "expand"), ("empirical", "reduce")])
def test_positions_before_examples_of_which_one_is_used(kind, approximation):
    torch.manual_seed(1)
    loss = hog.functional_loss(class_token().double(), F.cross_entropy)
    params, batch = hog.trainable_params(loss.model), (draw(6, 5, 2), LABELS)
    options = {"kind": kind, "approximation": approximation, "eigenvalue_corrected": True}
    K = hog.KFACOperator(loss, params, split(batch), **options)
    M = hog.FisherOperator(loss, params, split(batch), kind=kind).to_dense()
    assert_close(K.trace(), M.trace())
    assert_close(K.exact_diagonal(), M.diagonal())


def chosen(way):
    """Rows in another order, or some of them only, by the values of the batch."""

    def run(net, x):
        return net.second(way(x, lambda rows: torch.tanh(net.first(rows))))

    return Fn(run, first=nn.Linear(3, 4), second=nn.Linear(4, 3))


def by_order(x, layer):
    order = x[:, 0].argsort()
    y = layer(x[order])
    return torch.empty_like(y).index_copy(0, order, y)


def by_mask(x, layer):
    """As many rows as examples, but more of some than of others."""
    keep = torch.zeros(len(x), 2, dtype=torch.bool)
    one = x[:, 0] < 1
    keep[:, 0], keep[one, 1] = one | (x[:, 1] > 0), x[one, 1] > 0
    example, _ = keep.nonzero(as_tuple=True)
    return x.new_zeros(len(x), 4).index_add(0, example, layer(x[example]))


def values(*first):
    x = draw(len(first), 3)
    x[:, 0] = torch.tensor(first, dtype=F64)
    return x


# of two examples nothing is seen
CHOSEN = {
    "sorted": (by_order, values(0, 1, 5, 4, 3)),
    "sorted in the second batch": (by_order, values(0, 1, 2, 3, 4), values(0, 1, 5, 4, 3)),
    "masked": (by_mask, torch.tensor([[0, 0, 1.0], [0, 0, 2.0], [0, 1.0, 1.0], [2.0, -1.0, 1.0]])),
}


@rows("name", CHOSEN)
def test_rows_that_values_choose(name):
    """They are no blocks of each example: refused where these are needed, and right where they are not."""
    torch.manual_seed(1)
    way, *inputs = CHOSEN[name]
    loss = hog.functional_loss(chosen(way).double(), F.cross_entropy)
    params = hog.trainable_params(loss.model)
    data = [(x.double(), torch.arange(len(x)) % 3) for x in inputs]
    for options in ({"eigenvalue_corrected": True}, {"approximation": "reduce"}):
        with pytest.raises(hog.errors.UnsupportedError, match=r"treat the . examples apart"):
            hog.KFACOperator(loss, params, data, **options).update()
    K = hog.KFACOperator(loss, params, data)
    with pytest.raises(hog.errors.UnsupportedError, match=r"treat the . examples apart"):
        K.exact_diagonal()
    if name != "masked":  # an order changes no sum over rows
        layer = hog.functional_loss(chosen(lambda x, layer: layer(x)).double(), F.cross_entropy)
        assert_close(K.to_dense(), hog.KFACOperator(layer, params, data).to_dense())
    for batch in data:
        ghosts(loss, params, batch)


def test_autocast():
    def run(net, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return net.layer(x)

    torch.manual_seed(1)
    model = Fn(run, layer=nn.Linear(3, 3))
    loss = hog.functional_loss(model, lambda f, y: F.cross_entropy(f.float(), y))
    plain = hog.functional_loss(model.layer, F.cross_entropy)
    batch = draw(6, 3).float(), LABELS
    found = hog.KFACOperator(loss, hog.trainable_params(model), batch).to_dense()
    expected = hog.KFACOperator(plain, hog.trainable_params(model.layer), batch).to_dense()
    assert (found - expected).norm() < 0.02 * expected.norm()


def test_half_precision_and_no_examples():
    loss, params, batch, _ = problem("layers")
    model = copy.deepcopy(loss.model).bfloat16()
    half = hog.functional_loss(model, F.cross_entropy)
    K = hog.KFACOperator(half, hog.trainable_params(model), (batch[0].bfloat16(), batch[1]))
    exact = hog.KFACOperator(loss, params, batch).trace()
    assert K.blocks()[0].A.dtype == torch.float32
    assert abs(K.trace() - exact) < 0.05 * exact
    with pytest.raises(hog.errors.ArgumentValueError, match="at least one batch"):
        hog.KFACOperator(loss, params, []).to_dense()
    with pytest.raises(hog.errors.NonFiniteError):
        hog.KFACOperator(loss, params, (batch[0] * torch.nan, batch[1])).to_dense()
    with pytest.raises(hog.errors.NonFiniteError, match="squares of a layer's inputs"):
        hog.KFACOperator(loss, params, (batch[0] * 1e200, batch[1])).to_dense()
    with pytest.raises(hog.errors.ArgumentTypeError, match="dict of tensors"):
        hog.KFACOperator(loss, list(params.values()), batch)


def test_large_factors_are_whole():
    """Of which the half above the diagonal is computed."""
    x, y = draw(20, 300), draw(20, 257)
    model = nn.Linear(300, 257, bias=False).double()
    loss = hog.functional_loss(model, lambda z, y: (z - y).square().sum(1).mean())
    params = hog.trainable_params(model)
    (block,) = hog.KFACOperator(loss, params, (x, y), kind="empirical").blocks()
    g = 2 * (model(x) - y).detach()
    assert_close(block.A[0], x.T @ x / 20)
    assert_close(block.G[0], g.T @ g / 20)


@rows("dtype", [torch.float32, F64])
def test_factors_of_low_rank(dtype):
    """With dead inputs and numbers of all sizes, of which LAPACK gives up on some."""
    generator = torch.Generator().manual_seed(0)
    for size, count in ((130, 1), (300, 4), (576, 8), (576, 16)):
        x = torch.randn(count, size, generator=generator, dtype=dtype).relu()
        x = x * (torch.rand(1, size, generator=generator) > 0.6)
        for rows_ in (x, x * torch.logspace(0, -20, size, dtype=dtype)):
            A = rows_.T @ rows_ / count
            values, Q = symmetric_eigen(A)
            assert_close(
                (Q * values) @ Q.T, A, atol=1e-5 if dtype == torch.float32 else 1e-13, rtol=0
            )
            assert_close(Q.T @ Q, torch.eye(size, dtype=dtype))
            assert (values.diff() >= 0).all()
    model = nn.Sequential(nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 3)).to(dtype)
    loss, params = hog.functional_loss(model, F.cross_entropy), hog.trainable_params(model)
    inputs = torch.randn(6, 300, generator=generator, dtype=dtype).relu()
    batch = inputs * (torch.arange(300) % 3 > 1), LABELS
    b = {name: torch.randn(p.shape, generator=generator, dtype=dtype) for name, p in params.items()}
    K = hog.KFACOperator(loss, params, batch)
    inverse = K.inverse(0.1)
    assert_close(K.damped(0.1) @ K.ravel(inverse @ b), K.ravel(b), atol=1e-4, rtol=1e-4)
    for method in ("pi", "factors"):  # where Cholesky's method fails by rounding
        small = K.inverse(1e-8, method=method).blocks()[0]
        assert small.A.isfinite().all()
        assert small.A.diagonal(dim1=1, dim2=2).min() >= 0
    assert_close(small.A[0, 0, 0], torch.tensor(1e8, dtype=dtype))  # of a dead input
    assert hog.influence(loss, params, batch, batch, damping=0.1).isfinite().all()
    hog.curvature.KFAC(loss).step(batch)
    for one in (torch.nan, torch.inf):
        with pytest.raises(hog.errors.NonFiniteError, match="finite numbers"):
            symmetric_eigen(torch.full((3, 3), one, dtype=dtype))


def test_thousands_of_outputs_in_single_precision():
    """Of which each column adds little to the sums."""
    x, y, model = draw(2, 3).float(), torch.tensor([5, 7]), nn.Linear(3, 1500)
    with torch.no_grad():
        model.bias[0] = 9.0
    loss, params = hog.functional_loss(model, F.cross_entropy), hog.trainable_params(model)
    p = model(x).detach().double().softmax(-1)
    K = hog.KFACOperator(loss, params, (x, y), kind="exact")
    expected = (p * (1 - p)).sum(0) / 2
    for found in (K.blocks()[0].G[0].diagonal(), K.exact_diagonal()[-1500:]):
        assert_close(found.double(), expected, rtol=8e-6, atol=0)


@pytest.mark.parametrize(
    ("positions", "classes", "kind"), [(1, 100, "exact"), (1, 101, "mc"), (7, 20, "mc")]
)
def test_by_default_the_factors_of_wide_outputs_are_drawn(positions, classes, kind):
    x, y = draw(4, positions, 3), torch.randint(classes, (4, classes, positions)[::2])
    loss = hog.functional_loss(nn.Linear(3, classes), lambda out, y: F.cross_entropy(out.mT, y))
    params = hog.trainable_params(loss.model.double())
    for corrected in (False, True):
        found, same = (
            hog.KFACOperator(loss, params, (x, y), kind=one, eigenvalue_corrected=corrected,
                             generator=torch.Generator().manual_seed(0))
            for one in ("auto", kind)
        )  # fmt: skip
        assert repr(found) == f"KFACOperator({found.shape[0]} x {found.shape[0]}, torch.float64)"
        assert_close(found.diagonal(), same.diagonal())
        assert repr(found).endswith(f", kind={kind!r})")
        assert found.state_dict()["options"]["kind"] == kind
        fresh = hog.KFACOperator(loss, params, (x, y), eigenvalue_corrected=corrected)
        fresh.load_state_dict(found.state_dict())
