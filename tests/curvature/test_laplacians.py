"""Operators of higher order by the inputs: coefficients, routes, estimates, biharmonics, directions."""

import itertools
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import hoglib as hog
from hoglib.curvature.points import point_derivatives
from tests.curvature.test_input_derivatives import NETS, dense, net_of, points
from tests.functions import Sine
from tests.oracles import gradient_by_differences
from tests.refused import refused
from tests.rows import rows


def smooth(inputs=3, outputs=2):
    net = nn.Sequential(
        nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, outputs)
    )
    return net.double()


A = points(3, 3)
COEFFICIENTS = {
    "a diagonal": lambda x: torch.tensor([1.0, 0.0, -2.0], dtype=x.dtype),
    "a diagonal of each point": lambda x: x.cos(),
    "a nonnegative diagonal of each point": lambda x: x**2,
    "a matrix of each point": lambda x: x[:, :, None] * A,
    "a nonnegative matrix of each point": lambda x: A @ A.T + x[:, :, None] * x[:, None, :],
    "a small matrix": lambda x: 1e-9 * (x[:, :, None] * A),
}


@rows("mode", ["collapsed", "nested", "transform"])
@rows("name", COEFFICIENTS)
def test_coefficients(name, mode):
    net, x = smooth(), points(5, 3)
    a = COEFFICIENTS[name](x)
    matrices = torch.diag_embed(a.expand(5, 3)) if a.dim() < 3 else a
    expected = torch.einsum("ncij,nij->nc", dense(net, x), matrices)
    size = expected.abs().max()
    if mode == "transform":
        of_point = lambda p, c: hog.laplacian(net, p[None], coefficients=c)[1][0]  # noqa: E731
        a = a[:, None] if a.dim() > 1 else a.expand(5, 3)
        lap = torch.func.vmap(of_point)(x, a)
    else:
        _, lap = hog.laplacian(net, x, coefficients=a, mode=mode)
        by_function = hog.laplacian(net, x, coefficients=COEFFICIENTS[name], mode=mode)[1]
        assert_close(lap, by_function)
    assert_close(lap / size, expected / size, rtol=0, atol=1e-11)


def test_coefficients_of_one_point():
    x = points(3)
    cubes = lambda x: (x**3).sum() + x.prod()  # noqa: E731
    H = torch.func.hessian(cubes)(x)
    assert_close(hog.laplacian(cubes, x, coefficients=A)[1], (H * A).sum())
    assert_close(hog.laplacian(cubes, x, coefficients=A[0])[1], (H.diagonal() * A[0]).sum())
    assert_close(hog.laplacian(cubes, x, coefficients=lambda x: x)[1], (H.diagonal() * x).sum())


@rows("shape", [(3,), (5, 3), (5, 3, 3)])
def test_coefficients_that_are_learned(shape):
    net, x = smooth(outputs=1), points(5, 3)
    a = points(*shape)

    def loss(params):
        return hog.laplacian(net, x, coefficients=params["a"])[1].square().sum()

    leaf = a.clone().requires_grad_()
    (found,) = torch.autograd.grad(loss({"a": leaf}), leaf)
    assert_close(found, gradient_by_differences(loss, {"a": a})["a"], rtol=1e-6, atol=1e-7)


@pytest.mark.filterwarnings("ignore:.*piecewise linear")
@rows("name", NETS)
def test_the_routes_agree(name):
    net, x = net_of(name)
    params = [p for p in net.parameters() if p.requires_grad]
    results = []
    for mode in ("collapsed", "nested"):
        value, lap, g = hog.laplacian(net, x, mode=mode, return_gradient=True)
        loss = (value + lap).square().mean() + g.square().mean()
        results.append((value, lap, g, torch.autograd.grad(loss, params, allow_unused=True)))
    assert_close(*results, rtol=1e-8, atol=1e-10)


GRADIENTS = {
    "exact": lambda net, x: hog.laplacian(net, x, return_gradient=True)[2],
    "estimate": lambda net, x: hog.laplacian(net, x, return_gradient=True, num_projections=2)[2],
    "coefficients": lambda net, x: hog.laplacian(net, x, return_gradient=True, coefficients=x.cos())[2],
    "no graph": lambda net, x: hog.laplacian(net, x, return_gradient=True, create_graph=False)[2],
    "transform": lambda net, x: torch.func.vmap(lambda p: hog.laplacian(net, p[None], return_gradient=True)[2][0])(x),
    "one point": lambda net, x: torch.stack(
        [hog.laplacian(lambda p: net(p.flatten())[0], p[:, None], return_gradient=True)[2] for p in x]
    ).mT,
}  # fmt: skip


@rows("how", GRADIENTS)
def test_the_gradient_comes_with_it(how):
    net, x = smooth(), points(5, 3)
    expected = torch.func.vmap(torch.func.jacrev(net))(x).detach()
    found = GRADIENTS[how](net, x)
    assert found.requires_grad == (how != "no graph")
    assert_close(found.detach(), expected[:, : found.shape[1]])


@pytest.mark.parametrize("mode", ["auto", "collapsed", "nested"])
@pytest.mark.parametrize(
    "options", [{}, {"num_projections": 1}, {"coefficients": torch.ones(5, 3).double()}], ids=str
)
def test_no_result_has_a_graph_where_nothing_requires_one(mode, options):
    of_x = lambda x: x.sin().prod(1)  # noqa: E731
    options = {"mode": mode, "return_gradient": True, **options}
    x = points(5, 3)
    assert not any(part.requires_grad for part in hog.laplacian(of_x, x, **options))
    assert all(part.requires_grad for part in hog.laplacian(of_x, x, create_graph=True, **options))
    assert all(part.requires_grad for part in hog.laplacian(of_x, x.requires_grad_(), **options))


def test_many_directions_without_a_graph_go_by_parts(monkeypatch):
    net, x = smooth(40, 2), points(3, 40)
    runs = []
    of_x = lambda x: runs.append(1) or torch.dropout(net(x), 0.5, True)  # noqa: E731
    torch.manual_seed(0)
    expected = hog.laplacian(of_x, x, return_gradient=True)
    monkeypatch.setattr(point_derivatives, "AT_ONCE", 1)  # private: 16 directions at once
    torch.manual_seed(0)
    found = hog.laplacian(of_x, x, return_gradient=True, create_graph=False)
    assert len(runs) == 1 + 3
    assert_close(found, tuple(part.detach() for part in expected))


ROUTES = {
    "two coordinates": ((64, 2, 1), {}, "nested"),
    "one estimate": ((64, 3, 1), {"num_projections": 1}, "nested"),
    "three coordinates": ((64, 3, 1), {}, "collapsed"),
    "two outputs": ((64, 2, 2), {}, "collapsed"),
    "many points": ((513, 2, 1), {}, "collapsed"),
    "as asked": ((64, 2, 1), {"mode": "collapsed"}, "collapsed"),
}


@pytest.mark.parametrize("name", ROUTES)
def test_nested_derivatives_are_for_few_directions_of_few_points(name, log):
    """Either way random numbers are drawn once."""
    (count, inputs, outputs), options, route = ROUTES[name]
    net = nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, outputs))
    x, results = torch.rand(count, inputs), []
    for mode in ({}, {"mode": "nested"}):
        torch.manual_seed(0)
        results.append(hog.laplacian(net, x, **{**options, **mode}))
    assert_close(*results, rtol=1e-4, atol=1e-5)
    assert ("Taylor coefficients" in log.text) == (route == "collapsed")


def test_one_point_that_looks_like_many_and_zeros_are_collapsed():
    """Which the value tells, after one run."""
    runs = []

    def of_one(x):
        runs.append(1)
        return (x.square() * torch.dropout(torch.ones_like(x), 0.5, True)).sum()

    x = points(9, 2)
    torch.manual_seed(0)
    lap = hog.laplacian(of_one, x)[1]
    assert len(runs) > 1
    torch.manual_seed(0)
    assert_close(lap, hog.laplacian(of_one, x, mode="nested")[1])
    with pytest.warns(UserWarning, match="piecewise linear"):
        hog.laplacian(lambda x: x.relu().sum(1), points(4, 2))


@rows("mode", ["auto", "collapsed", "nested"])
def test_a_quadratic_function_with_a_parameter(mode):
    x = points(4, 3)
    offset = torch.zeros(1, dtype=x.dtype, requires_grad=True)
    lap = hog.laplacian(lambda x: (x.sum(1) + offset) * (x.sum(1) + offset), x, mode=mode)[1]
    assert_close(lap.detach(), torch.full_like(lap, 6.0))
    assert lap.requires_grad  # zeros, by the parameter


def test_an_operation_without_a_rule_is_nested_and_told(log):
    unruly = lambda x: (x**2 + torch.normal(0 * x, 0 * x)).sum(1)  # noqa: E731
    x = points(4, 9)
    assert_close(hog.laplacian(unruly, x)[1], torch.full_like(x[:, 0], 18))
    assert log.messages[0].startswith(
        "laplacian: nested derivatives, for want of a rule for torch.ops.aten.normal"
    )
    x = points(4, 2)
    sines = lambda x: Sine.apply(x).sum(1)  # noqa: E731
    assert_close(hog.laplacian(sines, x, compile="eager"), (x.sin().sum(1), -x.sin().sum(1)))


COMPILED = {
    "laplacian": lambda net, x, **k: hog.laplacian(net, x, return_gradient=True, **k),
    "with coefficients": lambda net, x, **k: hog.laplacian(net, x, coefficients=x.cos(), **k),
    "with a function": lambda net, x, **k: hog.laplacian(net, x, coefficients=torch.cos, **k),
    "estimate": lambda net, x, **k: hog.laplacian(net, x, num_projections=2, **k),
    "biharmonic": hog.bilaplacian,
    "few directions": lambda net, x, **k: hog.laplacian(net, x, num_projections=1, **k),
    "its estimate": lambda net, x, **k: hog.bilaplacian(net, x, num_projections=2, **k),
    "directional": lambda net, x, **k: hog.directional(net, x, x.cos(), 3, **k),
    "partial": lambda net, x, **k: hog.partial_derivative(net, x, index=(0, 0, 1), **k),
}


@rows("name", COMPILED)
def test_compiled(name):
    """As in eager mode, with its gradient; captured once, and for the parameters of each call."""
    call, net, x, runs = COMPILED[name], smooth(), points(5, 3), []
    net.register_forward_hook(lambda *_: runs.append(1))
    params = list(net.parameters())
    for step in range(2):
        torch.manual_seed(step)
        expected = call(net, x, mode="taylor" if name == "directional" else "collapsed")
        runs.clear()
        torch.manual_seed(step)
        found = call(net, x, compile="eager")
        assert bool(runs) == (step == 0)
        losses = [sum(part.square().mean() for part in parts) for parts in (found, expected)]
        assert_close(found, expected)
        assert_close(*(torch.autograd.grad(one, params, materialize_grads=True) for one in losses))
        with torch.no_grad():
            params[0].mul_(1.1)
        if name in ("laplacian", "biharmonic", "directional"):  # one of each function
            assert not call(net, x, compile="eager", create_graph=False)[1].requires_grad


@pytest.mark.full
def test_compiled_by_inductor():
    net, x = smooth().float(), points(5, 3).float()
    assert_close(hog.laplacian(net, x, compile=True), hog.laplacian(net, x), rtol=1e-4, atol=1e-5)


# func, its biharmonic, and their dimension: closed forms
def gaussian_biharmonic(x):
    r, D = x.square().sum(1), x.shape[1]
    return ((r - D) ** 2 - 4 * r + 2 * D) * (-r / 2).exp()


CLOSED = {
    "quartic": (lambda x: x.pow(4).sum(1), lambda x: torch.full_like(x[:, 0], 24 * x.shape[1])),
    "product of squares": (lambda x: x[:, :2].square().prod(1), lambda x: torch.full_like(x[:, 0], 8)),
    "r^4": (lambda x: x.square().sum(1) ** 2, lambda x: torch.full_like(x[:, 0], 8 * 3 * 5)),
    "plane wave": (lambda x: (x @ A[0]).sin(), lambda x: A[0].square().sum() ** 2 * (x @ A[0]).sin()),
    "Gaussian": (lambda x: (-x.square().sum(1) / 2).exp(), gaussian_biharmonic),
    "harmonic": (lambda x: x[:, 0].exp() * x[:, 1].sin(), lambda x: 0 * x[:, 0]),
    "r, which is biharmonic": (lambda x: x.norm(dim=1), lambda x: 0 * x[:, 0]),
    "columns": (
        lambda x: torch.stack([x.prod(1), x[:, 0] ** 4], 1), lambda x: torch.tensor([[0.0, 24]]).to(x).expand(len(x), 2),
    ),
}  # fmt: skip


@rows("name", CLOSED)
def test_biharmonics_in_closed_form(name):
    func, expected = CLOSED[name]
    x = points(5, 3)
    for mode in ("collapsed", "nested"):
        value, B = hog.bilaplacian(func, x, mode=mode)
        assert_close(value, func(x))
        assert_close(B, expected(x), rtol=1e-8, atol=1e-8)


def square_matrices(x):
    return torch.tanh(x @ A[:2, :2]) + 2 * torch.eye(2, dtype=x.dtype)


OF_MATRICES = {
    "Cholesky factor": lambda m: torch.linalg.cholesky(m @ m.mT).sum((1, 2)),
    "log-determinant": torch.logdet,
    "determinants of a wave function": lambda m: (torch.linalg.slogdet(m)[1] - m.sum((1, 2))).exp(),
    "inverse": lambda m: torch.linalg.inv(m).sum((1, 2)),
    "square": lambda m: (m @ m).sin().sum((1, 2)),
}


@rows("name", OF_MATRICES)
def test_biharmonics_of_matrices_by_partial_derivatives(name):
    """Matrices do not commute: neither do the coefficients of a product with itself."""
    func = lambda x: OF_MATRICES[name](square_matrices(x))  # noqa: E731
    x = points(2, 2, 2) / 2
    pairs = [(i, j) for i in range(4) for j in range(4)]
    expected = sum(hog.partial_derivative(func, x, index=(i, i, j, j))[1] for i, j in pairs)
    assert_close(hog.bilaplacian(func, x)[1], expected, rtol=1e-8, atol=1e-8)


@rows("name", ["deep tanh", "LayerNorm", "attention", "a Function"])
def test_biharmonics_of_networks_and_their_gradients(name):
    net, x = net_of("deep tanh" if name == "a Function" else name)
    func = (lambda x: net(Sine.apply(x))) if name == "a Function" else net
    x, params, results = x[:2, : 2 if name == "attention" else None], list(net.parameters()), []
    with hog.second_order(on_wrong="ignore"):
        for mode in ("auto", "nested"):
            value, B = hog.bilaplacian(func, x, mode=mode)
            loss = (B + value).square().sum()
            results.append((value, B, torch.autograd.grad(loss, params, allow_unused=True)))
    assert_close(*results, rtol=1e-7, atol=1e-8)


def test_estimates_with_coefficients_of_zero_are_zero():
    x, nothing = torch.randn(4, 3).double(), torch.zeros(3).double()
    _, found = hog.laplacian(lambda x: x.sin().prod(1), x, coefficients=nothing, num_projections=2)
    assert float(found.abs().max()) < 1e-14


def test_the_estimates_have_the_promised_mean_and_variance():
    # f = x^T H x / 2 with the operator a, and a quartic T
    H = torch.tensor([[1.0, 0.7], [0.7, -2.0]], dtype=torch.float64)
    a = torch.tensor([[1.0, 0.5], [-0.3, 2.0]], dtype=torch.float64)
    count, k = 20000, 3
    x = torch.zeros(count, 2, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    quadratic = lambda x: torch.einsum("ni,ij,nj->n", x, H, x) / 2  # noqa: E731
    options = {"num_projections": k, "generator": generator}
    lap = hog.laplacian(quadratic, x, coefficients=a.expand(count, 2, 2), **options)[1]
    S = (H @ a + (H @ a).T) / 2
    variance = 2 / k * 2 * S[0, 1] ** 2
    assert abs(lap.mean() - (H * a).sum()) < 5 * (variance / count).sqrt()
    assert abs(lap.var() / variance - 1) < 0.05

    quartic = lambda x: x[:, 0] ** 4 + 2 * x.square().prod(1)  # noqa: E731
    T = torch.zeros(2, 2, 2, 2, dtype=torch.float64)
    T[0, 0, 0, 0] = 24
    for places in itertools.permutations((0, 0, 1, 1)):
        T[places] = 8
    M = torch.einsum("ijkk->ij", T)
    variance = (8 * T.square().sum() + 24 * M.square().sum()) / (3 * k)
    for mode, size in (("collapsed", count), ("nested", 200)):
        B = hog.bilaplacian(quartic, x[:size], mode=mode, **options)[1]
        assert abs(B.mean() - M.trace()) < 5 * (variance / size).sqrt()
        assert mode == "nested" or abs(B.var() / variance - 1) < 0.2


@rows("mode", ["taylor", "nested"])
@rows("order", [1, 2, 3, 4])
def test_directions(order, mode):
    x, v, w = points(3), points(4, 3), points(3)
    func = lambda x, w: torch.stack([(x @ w).sin(), (x @ w).exp()])  # noqa: E731
    value, d = hog.directional(func, x, v, order, w, mode=mode)
    slopes = torch.stack([(x @ w + order * torch.pi / 2).sin(), (x @ w).exp()])
    assert_close(value, func(x, w))
    assert_close(d, (v @ w)[:, None] ** order * slopes)
    assert_close(hog.directional(func, x, v[0], order, w, mode=mode)[1], d[0])


def test_a_direction_at_each_point_and_the_gradient_of_its_derivative():
    net, x, v = smooth(), points(4, 3), points(4, 3)
    results = []
    for mode in ("taylor", "nested"):
        d = hog.directional(net, x, v, 3, mode=mode)[1]
        results.append((d, torch.autograd.grad(d.square().sum(), net[0].weight)))
    assert_close(*results)
    linear = hog.directional(lambda x: 2 * x, x, v[None].expand(2, 4, 3), 2)[1]
    assert_close(linear, torch.zeros(2, 4, 3, dtype=x.dtype))


@rows("mode", ["collapsed", "nested"])
@rows("index", [(0,), (1, 1), (0, 0, 1), (2, 0, 1), (0, 2, 2, 2), (-1,)])
def test_partial_derivatives(index, mode):
    x, w = points(5, 3), points(3).requires_grad_()
    func = lambda x: (w[0] * x[:, 0] * x[:, 1]).sin() * x[:, 2] ** 3 + w[1] * x[:, 0] ** 4  # noqa: E731
    value, d = hog.partial_derivative(func, x, index=index, mode=mode)
    own = x.clone().requires_grad_()
    expected = func(own)
    for i in index:
        (g,) = torch.autograd.grad(expected.sum(), own, create_graph=True)
        expected = g[:, i]
    assert_close(value, func(x))
    assert_close(d, expected)
    of_w = [torch.autograd.grad(y.sum(), w, retain_graph=True)[0] for y in (d, expected)]
    assert_close(*of_w)
    of_point = hog.partial_derivative(lambda p: func(p[None])[0], x[0], index=index, mode=mode)
    assert_close(of_point[1], d[0])


X = torch.randn(4, 3)
F = lambda x: x.square().sum(1)  # noqa: E731
ERRORS = {
    "coefficients of another shape": (
        lambda: hog.laplacian(F, X, coefficients=torch.ones(4)), ValueError, r"coefficients: expected \[3\] or \[4, 3\] or \[4, 3, 3\]",
    ),
    "one coefficient for each point": (lambda: hog.laplacian(F, X, coefficients=torch.ones(4)), ValueError, r"one number for each point is `a.reshape\(-1, 1\).expand\(-1, D\)`"),
    "a column for the points": (lambda: hog.laplacian(F, X, coefficients=torch.ones(4, 1)), ValueError, "one number for each point is"),
    "a function of as many points as elements": (lambda: hog.laplacian(F, X[:3], coefficients=lambda x: x[:, 0]), ValueError, "got one for each of the points"),
    "coefficients of another dtype": (lambda: hog.laplacian(F, X, coefficients=torch.ones(3).double()), TypeError, "float32 on cpu"),
    "coefficients as a list": (lambda: hog.laplacian(F, X, coefficients=[1.0, 1.0, 1.0]), TypeError, "coefficients: expected a torch"),
    "mode": (lambda: hog.laplacian(F, X, mode="forward"), ValueError, "mode: expected one of"),
    "return_gradient": (lambda: hog.laplacian(F, X, return_gradient=1), TypeError, "True or False"),
    "compile": (lambda: hog.directional(F, X, X, 2, compile=1), TypeError, "compile: expected True or False"),
    "a backend": (lambda: hog.laplacian(F, X, compile="triton"), ValueError, "compile: expected one of inductor, eager"),
    "no rule": (lambda: hog.laplacian(lambda x: Sine.apply(x).sum(1), X, mode="collapsed"), NotImplementedError, "laplacian: .*custom Function Sine"),
    "points in float64": (lambda: hog.laplacian(nn.Linear(3, 1), X.double()), RuntimeError, r"for inputs\[0\], a float64 tensor .* Convert numbers"),
    "batch norm": (lambda: hog.bilaplacian(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)), X), ValueError, r"\.eval\(\)"),
    "integers": (lambda: hog.bilaplacian(F, torch.ones(3, 2, dtype=torch.int)), TypeError, r"x\.float"),
    "no estimates": (lambda: hog.bilaplacian(F, X, num_projections=0), ValueError, "at least 1"),
    "exact biharmonic in a transform": (
        lambda: torch.func.vmap(lambda p: hog.bilaplacian(F, p[None])[1][0])(X), NotImplementedError, "outside of torch.func",
    ),
    "a direction of another shape": (lambda: hog.directional(F, X, X[0], 2), ValueError, "v: expected a tensor like x"),
    "order zero": (lambda: hog.directional(F, X, X, 0), ValueError, "order: expected"),
    "half an order": (lambda: hog.directional(F, X, X, 1.5), TypeError, "integer"),
    "no index": (lambda: hog.partial_derivative(F, X, index=()), TypeError, "index: expected a tuple"),
    "an index beyond": (lambda: hog.partial_derivative(F, X, index=(0, 3)), ValueError, r"index\[1\]: expected an integer from -3 to 2"),
    "an index that is no number": (lambda: hog.partial_derivative(F, X, index=(0.0,)), ValueError, r"index\[0\]"),
}  # fmt: skip


test_errors = refused(ERRORS)


@rows("count", [8, 1000])
def test_two_directions_without_a_graph_are_nested_at_any_size(count, log):
    net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    func = lambda x: net(x)[:, 0]  # noqa: E731
    x = torch.randn(count, 2).double()
    for create_graph in (False, True):
        log.clear()
        found = hog.laplacian(func, x, create_graph=create_graph)
        assert ("Taylor" in log.text) == (create_graph and count > 512)
        assert_close(found, hog.laplacian(func, x, mode="nested", create_graph=create_graph))


NUMBERS = torch.tensor([1.0, 2.0, 3.0])
AS_MANY = {  # as points as elements
    "numbers": (NUMBERS, "read a tensor of 3 numbers for 3 points"),
    "numbers of each point": (NUMBERS.expand(3, 3), ""),
    "a function": (lambda x: NUMBERS, ""),
    "a function of each point": (lambda x: NUMBERS * x.square(), ""),
}


@rows(("coefficients", "words"), AS_MANY.values(), ids=AS_MANY)
def test_coefficients_of_as_many_points_as_elements(coefficients, words):
    x, cubes = X[:3], lambda x: (x**3).sum(1)
    a = coefficients(x) if callable(coefficients) else coefficients
    with pytest.warns(UserWarning, match=words) if words else nullcontext():
        found = hog.laplacian(cubes, x, coefficients=coefficients)[1]
    assert_close(found, (6 * x * a).sum(1))
