"""Levenberg and Marquardt's steps against dense linear algebra, SciPy, and NIST's certified values."""

import copy
import pickle

import pytest
import scipy.optimize
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

import hoglib as hog
from hoglib.curvature import LevenbergMarquardt
from tests.curvature.problems import F64, columns, draw, flat, relative
from tests.refused import refused
from tests.rows import rows

# Of NIST's Statistical Reference Datasets for nonlinear regression: the model, y and x in turn, the two
# starts, the certified parameters and the sum of squares
NIST = {
    "Misra1a": (
        lambda b, x: b[0] * (1 - (-b[1] * x).exp()),
        "10.07 77.6 14.73 114.9 17.94 141.1 23.93 190.8 29.61 239.9 35.18 289.0 40.02 332.8 44.82 378.4 50.76 434.8 "
        "55.05 477.3 61.01 536.8 66.40 593.1 75.47 689.1 81.78 760.0",
        [[500, 1e-4], [250, 5e-4]], [238.94212918, 5.5015643181e-04], 0.12455138894,
    ),
    "Rat43": (
        lambda b, x: b[0] / (1 + (b[1] - b[2] * x).exp()) ** (1 / b[3]),
        "16.08 1 33.83 2 65.80 3 97.20 4 191.55 5 326.20 6 386.87 7 520.53 8 590.03 9 651.92 10 724.93 11 699.56 12 "
        "689.96 13 637.56 14 717.41 15",
        [[100, 10, 1, 1], [700, 5, 0.75, 1.3]],
        [699.64151270, 5.2771253025, 0.75962938329, 1.2792483859], 8786.4049080,
    ),
    "MGH09": (
        lambda b, x: b[0] * (x**2 + x * b[1]) / (x**2 + x * b[2] + b[3]),
        ".1957 4 .1947 2 .1735 1 .16 .5 .0844 .25 .0627 .167 .0456 .125 .0342 .1 .0323 .0833 .0235 .0714 .0246 .0625",
        [[25, 39, 41.5, 39], [0.25, 0.39, 0.415, 0.39]],
        [0.19280693458, 0.19128232873, 0.12305650693, 0.13606233068], 3.0750560385e-04,
    ),
    "BoxBOD": (
        lambda b, x: b[0] * (1 - (-b[1] * x).exp()),
        "109 1 149 2 149 3 191 5 213 7 224 10", [[100, 0.75]], [213.80940889, 0.54723748542], 1168.0088766,
    ),
}  # fmt: skip


def nist(name):
    f, data, starts, certified, squares = NIST[name]
    y, x = torch.tensor([float(v) for v in data.split()], dtype=F64).view(-1, 2).T
    return (lambda b: f(b, x) - y), starts, torch.tensor(certified, dtype=F64), squares


@pytest.mark.parametrize("name", NIST)
def test_certified_parameters_in_no_more_jacobians_than_minpack(name):
    residual, starts, certified, squares = nist(name)
    off = lambda b: float(((torch.as_tensor(b) - certified) / certified).abs().max())  # noqa: E731
    for start in starts:
        b = torch.tensor(start, dtype=F64, requires_grad=True)
        optimizer, steps = LevenbergMarquardt(residual, b, scaling=True), 0
        while off(b.detach()) > 1e-8:
            optimizer.step()
            steps += 1
            assert steps < 100
        assert 2 * optimizer.info.loss_after == pytest.approx(squares, rel=1e-9)
        visited = []

        def jacobian(b, visited=visited):
            visited.append(off(b))
            return torch.func.jacrev(residual)(torch.tensor(b)).numpy()

        scipy.optimize.least_squares(
            lambda b: residual(torch.tensor(b)).numpy(), start, jacobian, method="lm",
            xtol=1e-15, ftol=1e-15, gtol=1e-15, max_nfev=1000,
        )  # fmt: skip
        assert steps <= sum(error > 1e-8 for error in visited) + 3


def network(inputs=2, outputs=1, dtype=F64):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(inputs, 4), nn.Tanh(), nn.Linear(4, outputs)).to(dtype)


def regression(model):
    def residual(params, batch):
        return torch.func.functional_call(model, params, (batch[0],)) - batch[1]

    return residual, hog.trainable_params(model)


def data(n, dtype=F64):
    x = draw(n, 2).to(dtype)
    return x, x.prod(1, keepdim=True)


METHODS = ["normal", "samples", "lsmr"]


@rows("n", [40, 9])  # of 17 parameters
@rows("method", METHODS)
def test_a_step_is_the_damped_minimizer(method, n):
    residual, params = regression(network())
    batch = data(n)
    J = columns(lambda p: residual(p, batch).detach(), params)
    before, r = flat(params), residual(params, batch).detach().reshape(-1)
    g = J.T @ r
    mu = 0.1 * (J @ g).square().sum() / g.square().sum()
    optimizer = LevenbergMarquardt(residual, params, method=method, damping=0.1, tol=1e-12)
    value = optimizer.step(batch)
    info = optimizer.info
    assert info.accepted
    assert info.tries == 1
    expected = torch.linalg.solve(J.T @ J + mu * torch.eye(len(g), dtype=F64), -g)
    assert relative(flat(params) - before, expected) < 1e-6
    assert_close(value, r.square().sum() / 2)
    after = residual(params, batch).detach().square().sum() / 2
    assert info.loss_after == pytest.approx(float(after), rel=1e-12)
    model = -(g @ expected) - (J @ expected).square().sum() / 2
    assert info.ratio == pytest.approx(float((value - after) / model), rel=1e-5)
    assert info.damping == pytest.approx(
        float(mu * max(1 / 3, 1 - (2 * info.ratio - 1) ** 3)), rel=1e-5
    )
    assert (info.method, info.iterations > 0) == (method, method == "lsmr")


@rows(("n", "method"), [(40, "normal"), (9, "samples")])
def test_sizes_choose_the_method_and_scaling_the_metric(n, method):
    residual, params = regression(network())
    batch, before = data(n), flat(params)
    J = columns(lambda p: residual(p, batch).detach(), params)
    r = residual(params, batch).detach().reshape(-1)
    D = J.norm(dim=0)
    scaled, g = J / D, (J / D).T @ r
    mu = 0.1 * (scaled @ g).square().sum() / g.square().sum()
    optimizer = LevenbergMarquardt(residual, params, damping=0.1, scaling=True)
    optimizer.step(batch)
    expected = torch.linalg.solve(scaled.T @ scaled + mu * torch.eye(len(g), dtype=F64), -g) / D
    assert optimizer.info.method == method
    assert relative(flat(params) - before, expected) < 1e-6


@rows("method", METHODS)
def test_the_acceleration_of_a_quadratic_residual(method):
    """Rosenbrock's, of which the second derivative along d is (20 d_0^2, 0), by any difference."""
    p = torch.tensor([-0.9, 1.1], dtype=F64, requires_grad=True)
    before = p.detach().clone()
    optimizer = LevenbergMarquardt(
        rosenbrock, p, damping=2.0, geodesic=True, method=method, tol=1e-13
    )
    optimizer.step()
    J, r = torch.func.jacrev(rosenbrock)(before), rosenbrock(before)
    g = J.T @ r
    A = J.T @ J + 2.0 * (J @ g).square().sum() / g.square().sum() * torch.eye(2, dtype=F64)
    d = -torch.linalg.solve(A, g)
    a = -torch.linalg.solve(A, J.T @ torch.stack([-20 * d[0] ** 2, torch.zeros((), dtype=F64)]))
    assert optimizer.info.tries == 1
    assert optimizer.info.residuals == 3
    assert relative(p.detach() - before, d + a / 2) < 1e-9


def rosenbrock(p):
    return torch.stack([10 * (p[1] - p[0] ** 2), 1 - p[0]])


def test_acceleration_follows_a_narrow_valley():
    steps = {}
    for geodesic in (False, True):
        p = torch.tensor([-1.2, 1.0], dtype=F64, requires_grad=True)
        optimizer = LevenbergMarquardt(rosenbrock, p, geodesic=geodesic)
        while not steps.get(geodesic):
            if float(optimizer.step()) < 1e-20:
                steps[geodesic] = optimizer.param_groups[0]["steps"]
        assert_close(p.detach(), torch.ones(2, dtype=F64))
    assert steps[True] < steps[False] < 60


@rows("method", METHODS)
def test_a_singular_jacobian(method):
    """Only p_0 + p_1 matters, and p_2 not at all."""
    p = torch.tensor([1.0, 2.0, 3.0], dtype=F64, requires_grad=True)
    t = torch.linspace(0, 1, 5, dtype=F64)
    optimizer = LevenbergMarquardt(
        lambda p: ((p[0] + p[1]) * t).exp() - (2 * t).exp() + 0 * p[2], p, method=method
    )
    for _ in range(12):
        optimizer.step()
    assert_close(p.detach(), torch.tensor([0.5, 1.5, 3.0], dtype=F64), rtol=1e-7, atol=0)


@rows("method", METHODS)
def test_single_precision(method):
    residual, params = regression(network(dtype=torch.float32))
    optimizer = LevenbergMarquardt(residual, params, method=method)
    losses = [float(optimizer.step(data(30, torch.float32))) for _ in range(25)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 1e-3 * losses[0]


# squares of such residuals, and of their gradients, are not in the range of float32
@rows("scale", [1e-18, 1e17])
@rows("options", [*({"method": m, "geodesic": True} for m in METHODS), {"scaling": True}])
def test_residuals_of_any_size(options, scale):
    x, y = draw(20, 3), draw(20)
    found, mus = [], []
    for unit in (1.0, scale):
        p = torch.full((3,), 0.1, requires_grad=True)
        optimizer = LevenbergMarquardt(
            lambda p, batch, unit=unit: ((batch[0] @ p.double()).sin() - batch[1]).mul(unit).float(),
            p, damping=0.1, **options,
        )  # fmt: skip
        before = p.detach().clone()
        optimizer.step((x, y))
        assert optimizer.info.accepted
        found.append(p.detach() - before)
        # in the units of J^T J, and without a unit with scaling
        mus.append(optimizer.info.damping / (1 if "scaling" in options else unit**2))
    assert relative(*found) < 1e-4
    assert mus[0] == pytest.approx(mus[1], rel=1e-4)


@rows("method", METHODS)
@rows(("of_params", "of_residual"), [
    (torch.float32, F64), (F64, torch.float32), (torch.bfloat16, torch.bfloat16)
])  # fmt: skip
def test_dtypes(of_params, of_residual, method):
    x, y = draw(20, 2), draw(20)
    p = torch.zeros(2, dtype=of_params, requires_grad=True)
    residual = lambda p: (x @ p.double() - y).to(of_residual)  # noqa: E731
    optimizer = LevenbergMarquardt(residual, p, method=method)
    optimizer.step()
    expected = torch.linalg.lstsq(x, y[:, None]).solution[:, 0]
    assert relative(p.detach().double(), expected) < (5e-2 if of_params == torch.bfloat16 else 5e-3)


def test_an_error_of_the_residual_leaves_the_parameters():
    p = torch.tensor([5.0, 3.0], dtype=F64, requires_grad=True)
    optimizer = LevenbergMarquardt(
        lambda p: torch.linalg.cholesky(p.diag()).diagonal() - 0.01, p, damping=1e-9
    )
    with pytest.raises(torch.linalg.LinAlgError):
        optimizer.step()
    assert p.tolist() == [5.0, 3.0]


def test_another_damping_starts_again():
    residual, params = regression(network())
    optimizer = LevenbergMarquardt(residual, params)
    for damping in (1e-3, 1e-3, 1e6):
        optimizer.param_groups[0]["damping"] = damping
        before = flat(params)
        optimizer.step(data(30))
    fresh, other = regression(network())
    for part in other.values():
        part.data.copy_(before[: part.numel()].view_as(part))
        before = before[part.numel() :]
    again = LevenbergMarquardt(fresh, other, damping=1e6)
    again.step(data(30))
    assert again.info.damping == optimizer.info.damping
    assert torch.equal(flat(other), flat(params))


def test_at_the_minimum_nothing_moves():
    residual, starts, _, _ = nist("Rat43")
    b = torch.tensor(starts[1], dtype=F64, requires_grad=True)
    optimizer = LevenbergMarquardt(residual, b, scaling=True)
    for _ in range(40):
        optimizer.step()
    before, mu = b.detach().clone(), optimizer.info.damping
    value = float(optimizer.step())
    assert float((b.detach() - before).norm()) < 1e-6
    assert optimizer.info.loss_after <= value * (1 + 1e-14)
    assert optimizer.info.damping <= mu
    zero = torch.zeros(2, dtype=F64, requires_grad=True)
    optimizer = LevenbergMarquardt(lambda p: p * 3, zero)
    optimizer.step()
    assert (optimizer.info.gradient, optimizer.info.accepted) == (0, False)


def test_a_step_to_where_the_residual_does_not_exist_is_rejected():
    p = torch.tensor([0.5], dtype=F64, requires_grad=True)
    optimizer = LevenbergMarquardt(lambda p: p.log() - torch.log(torch.tensor(1e-3, dtype=F64)), p)
    optimizer.step()  # to a negative number
    assert optimizer.info.tries > 1
    for _ in range(30):
        optimizer.step()
    assert_close(p.detach(), torch.tensor([1e-3], dtype=F64))


def test_terms_and_their_weights():
    x, y = draw(20, 2), draw(20)
    p = torch.zeros(2, dtype=F64, requires_grad=True)
    terms = lambda p: {"data": x @ p - y, "ridge": p}  # noqa: E731
    optimizer = LevenbergMarquardt(terms, p, weights={"ridge": 0.5, "data": 2.0}, damping=1e-9)
    for _ in range(3):
        optimizer.step()
    expected = torch.linalg.solve(2 * x.T @ x + 0.5 * torch.eye(2, dtype=F64), 2 * x.T @ y)
    assert_close(p.detach(), expected)
    left = x @ expected - y
    assert optimizer.info.loss_after == pytest.approx(float(left @ left + expected @ expected / 4))


@rows("method", METHODS)
def test_a_loader_is_all_of_its_data(method):
    batch, found = data(23), []
    for given in (batch, DataLoader(TensorDataset(*batch), batch_size=10)):
        residual, params = regression(network())
        optimizer = LevenbergMarquardt(residual, params, method=method, tol=1e-12)
        for _ in range(3):
            optimizer.step(given)
        found.append(flat(params))
    assert relative(*found) < 1e-6


class Centered(nn.Module):
    """A residual whose rows depend on one another."""

    def __init__(self):
        super().__init__()
        self.of = network()

    def forward(self, x, y):
        r = self.of(x) - y
        return r - r.mean()


class Apart(Centered):
    def forward(self, x, y):
        return self.of(x) - y


@rows(("kind", "by_examples"), [(Apart, True), (Centered, False)])
def test_rows_come_from_examples_where_these_are_apart(kind, by_examples):
    model, (x, y) = kind(), data(25)
    J = columns(
        lambda p: torch.func.functional_call(model, p, (x, y)).detach(), hog.trainable_params(model)
    )
    before = flat(hog.trainable_params(model))
    r = model(x, y).detach().reshape(-1)
    optimizer = LevenbergMarquardt(model, damping=0.5)
    products = []
    original = hog.JacobianOperator.to_dense
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            hog.JacobianOperator, "to_dense", lambda J, **o: products.append(1) or original(J, **o)
        )
        optimizer.step((x, y))
    assert bool(products) is not by_examples
    g = J.T @ r
    mu = 0.5 * (J @ g).square().sum() / g.square().sum()
    expected = torch.linalg.solve(J.T @ J + mu * torch.eye(len(g), dtype=F64), -g)
    assert relative(flat(hog.trainable_params(model)) - before, expected) < 1e-6


def test_a_model_is_no_residual():
    optimizer = LevenbergMarquardt(nn.Linear(2, 1))
    with pytest.raises(TypeError, match="Linear") as raised:
        optimizer.step((torch.ones(3, 2), torch.ones(3, 1)))
    assert "returns the residual" in raised.value.__notes__[-1]


def test_a_module_without_inputs():
    class Fit(nn.Module):
        def __init__(self):
            super().__init__()
            self.p = nn.Parameter(torch.ones(2, dtype=F64))

        def forward(self):
            return self.p**2 - 4

    model = Fit()
    optimizer = LevenbergMarquardt(model)
    for _ in range(10):
        optimizer.step()
    assert_close(model.p.detach(), torch.full((2,), 2.0, dtype=F64))


def test_an_equation_whose_residual_is_a_laplacian():
    """u'' = -sin x, u(0) = u(pi) = 0."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)).double()

    def solution(params, x):
        return (x * (torch.pi - x) * torch.func.functional_call(net, params, (x,)))[:, 0]

    def residual(params, x):
        return hog.laplacian(lambda x: solution(params, x), x)[1] + x[:, 0].sin()

    params, x = hog.trainable_params(net), torch.linspace(0, torch.pi, 40, dtype=F64)[:, None]
    optimizer = LevenbergMarquardt(residual, params, geodesic=True)
    for _ in range(30):
        optimizer.step(x)
    assert optimizer.param_groups[0]["by_examples"]
    u = solution(params, x).detach()
    assert relative(u, x[:, 0].sin()) < 1e-5


@rows("options", [{"scaling": True, "geodesic": True}, {"method": "lsmr"}, {"method": "samples"}])
def test_a_resumed_run_is_the_same_run(options):
    ends = []
    for stop in (None, 3):
        model = Centered()
        optimizer = LevenbergMarquardt(model, **options)
        for step in range(6):
            if step == stop:
                state = pickle.loads(pickle.dumps((model.state_dict(), optimizer.state_dict())))
                model = Centered()
                model.load_state_dict(state[0])
                optimizer = LevenbergMarquardt(model, **options)
                optimizer.load_state_dict(state[1])
            x = draw(20, 2, seed=step)
            optimizer.step((x, x.prod(1, keepdim=True)))
        ends.append((flat(hog.trainable_params(model)), optimizer.info))
    assert torch.equal(ends[0][0], ends[1][0])
    assert ends[0][1] == ends[1][1]
    copied = copy.deepcopy(optimizer)
    assert copied.state_dict().keys() == optimizer.state_dict().keys()


def make(residual=lambda p: p, params=None, **options):
    params = torch.ones(2, dtype=F64, requires_grad=True) if params is None else params
    return LevenbergMarquardt(residual, params, **options)


TWICE = torch.ones(2, dtype=F64, requires_grad=True)


def two_groups():
    make().add_param_group({"params": [torch.ones(2, requires_grad=True)]})


LOSS = hog.functional_loss(network(), nn.functional.mse_loss)
test_what_is_refused = refused({
    "a loss": (lambda: LevenbergMarquardt(LOSS), TypeError, r"residual: .*got a loss.*batch\[1\]"),
    "no params": (lambda: LevenbergMarquardt(lambda p: p), TypeError, "params: expected a dict of tensors by name"),
    "an integer residual": (lambda: make(lambda p: p.round().long()).step(), TypeError, "residual: expected a .*floating"),
    "one integer term": (lambda: make(lambda p: {"a": p, "b": p.long()}).step(), TypeError, r"residual\['b'\]|residual.b"),
    "a complex residual": (lambda: make(lambda p: torch.complex(p, p)).step(), TypeError, "residual: expected a real"),
    "no tensor": (lambda: make(lambda p: float(p.sum())).step(), TypeError, "residual: expected"),
    "not finite": (lambda: make(lambda p: p.log() - torch.inf).step(), ArithmeticError, "finite"),
    "detached": (lambda: make(lambda p: p.detach()).step(), RuntimeError, "depend on params"),
    "integer params": (lambda: make(params={"a": torch.ones(2, dtype=torch.int64)}), TypeError, "params"),
    "complex params": (lambda: make(params={"a": torch.ones(2, dtype=torch.complex64, requires_grad=True)}).step(), TypeError, "params"),
    "no leaves": (lambda: make(params={"a": 2 * torch.ones(2, requires_grad=True)}), ValueError, "leaf"),
    "two groups": (two_groups, ValueError, "param_groups: expected one group"),
    "other weights": (lambda: make(lambda p: {"a": p}, weights=[1.0]).step(), ValueError, "weights: expected a number for each term"),
    "weights of one term": (lambda: make(weights=[1.0]).step(), ValueError, r"weights: expected .*, one, got \[0\]"),
    "one tensor twice": (lambda: make(params={"a": TWICE, "b": TWICE}), ValueError, "params: expected each tensor under one name, got b"),
    "the loss, detached": (lambda: make().step(lambda: torch.ones(())), TypeError, "step: expected a batch.*got the loss"),
    "a negative weight": (lambda: make(lambda p: {"a": p}, weights={"a": -1.0}).step(), ValueError, "at least 0"),
    "no damping": (lambda: make(damping=0.0), ValueError, "damping: expected a number greater than 0"),
    "scaling without columns": (lambda: make(scaling=True, method="lsmr"), ValueError, "scaling: expected False with method='lsmr'"),
    "a method": (lambda: make(method="qr"), ValueError, "method: expected one of"),
    "compile": (lambda: make(compile=True), TypeError, "LevenbergMarquardt: expected options among .*got 'compile'"),
    "another's state": (lambda: make().load_state_dict(torch.optim.SGD([torch.ones(2, requires_grad=True)], lr=1.0).state_dict()), ValueError, "expected that of a LevenbergMarquardt"),
    "dropout": (lambda: LevenbergMarquardt(nn.Sequential(nn.Linear(2, 9), nn.Dropout())).step(torch.ones(3, 2)), RuntimeError, "Dropout"),
})  # fmt: skip
