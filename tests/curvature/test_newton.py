"""Newton steps: against dense ones by hand, their damping, side effects, resuming."""

import copy
import io
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

import hoglib as hog
from hoglib.curvature import NewtonCG
from tests.curvature.problems import F64, problem
from tests.refused import refused
from tests.rows import rows

HERE = torch.zeros(1)  # a batch, for what needs none


class Residuals(nn.Module):
    """A function of its one parameter."""

    def __init__(self, function, start):
        super().__init__()
        self.p = nn.Parameter(torch.tensor(start, dtype=F64))
        self.function = function

    def forward(self, _):
        return self.function(self.p)


def rosenbrock(p):
    return torch.stack([1 - p[0], 10 * (p[1] - p[0] ** 2)])


def squares(function, start):
    return hog.functional_loss(Residuals(function, start), lambda r, _: r.square().sum())


def regression(seed=0):
    """A loss that is quadratic, its Hessian and where it is least."""
    g = torch.Generator().manual_seed(seed)
    X, y = torch.randn(30, 6, generator=g, dtype=F64), torch.randn(30, 1, generator=g, dtype=F64)
    model = nn.Linear(6, 1, bias=False, dtype=F64)
    loss = hog.functional_loss(model, F.mse_loss)
    return loss, (X, y), 2 / 30 * X.T @ X, torch.linalg.lstsq(X, y).solution.T


def by_hand(function, start, steps, damping, lr=1.0):
    """Steps on |r(p)|^2 with matrices: points and dampings."""
    p, trail = torch.tensor(start, dtype=F64), []
    for _ in range(steps):
        r, J = function(p), torch.func.jacrev(function)(p)
        g, G = 2 * J.T @ r, 2 * J.T @ J
        d = torch.linalg.solve(G + damping * torch.eye(len(p)), -g)
        value, a, ratio = r @ r, lr, None
        while True:
            after = function(p + a * d).square().sum()
            if ratio is None:
                ratio = (after - value) / (a * g @ d + a**2 * d @ G @ d / 2)
            if after <= value + 0.01 * a * g @ d:
                break
            a /= 2
        p = p + a * d
        damping *= 2 / 3 if ratio > 0.75 else 1.5 if ratio < 0.25 else 1
        trail.append((p, damping, a, ratio))
    return trail


STARTS = {
    "Rosenbrock's": (rosenbrock, [-1.2, 1.0], 1.0, 1.0),
    "hardly damped": (rosenbrock, [-1.2, 1.0], 1e-3, 1.0),
    "far off": (rosenbrock, [-3.0, -4.0], 30.0, 1.0),
    "half as far each time": (rosenbrock, [-1.2, 1.0], 1.0, 0.5),
    "an arc tangent": (lambda p: torch.atan(p), [3.0], 1e-3, 1.0),
}  # fmt: skip


@rows("name", STARTS)
def test_steps_are_those_with_matrices(name):
    function, start, damping, lr = STARTS[name]
    loss = squares(function, start)
    optimizer = NewtonCG(loss, damping=damping, lr=lr, warm_start=0)
    ratios = set()
    for p, after, length, ratio in by_hand(function, start, 12, damping, lr):
        optimizer.step(HERE)
        assert optimizer.info.length == length
        assert_close(loss.model.p.detach(), p, rtol=1e-6, atol=1e-9)
        if abs(optimizer.info.loss) > 1e-10:  # the ratio of tiny numbers is rounding
            assert math.isclose(optimizer.info.ratio, ratio, rel_tol=1e-4)
            assert math.isclose(optimizer.param_groups[0]["damping"], after, rel_tol=1e-12)
        ratios.add("good" if ratio > 0.75 else "bad" if ratio < 0.25 else "fair")
    if name == "hardly damped":
        assert {"good", "bad"} <= ratios


def test_a_quadratic_is_solved_and_steps_at_the_minimum_stay():
    loss, batch, _, best = regression()
    optimizer = NewtonCG(loss, damping=1e-3)
    for _ in range(30):
        optimizer.step(batch)
    assert_close(loss.model.weight.detach(), best, rtol=0, atol=1e-8)
    assert math.isnan(optimizer.info.ratio)  # all there is, is rounding
    assert optimizer.info.length == 1
    assert 1e-11 <= optimizer.param_groups[0]["damping"] < 1e-3


def test_a_warm_start_starts_from_the_last_direction():
    loss, batch, H, _ = regression()
    w = loss.model.weight
    optimizer = NewtonCG(loss, damping=0.5, warm_start=0.8, max_iter=1)
    optimizer.step(batch)
    last = optimizer.state[w]["direction"].clone()
    (g,) = torch.autograd.grad(loss(hog.trainable_params(loss.model), batch), w)
    A, x = H + optimizer.param_groups[0]["damping"] * torch.eye(6), 0.8 * last.T
    r = -g.T - A @ x
    expected = x + (r.T @ r) / (r.T @ A @ r) * r  # one step of steepest descent from there
    optimizer.step(batch)
    assert_close(optimizer.state[w]["direction"], expected.T)


@rows("wrong", [-1.0, 1e6], ids=["up the slope", "far beyond"])
def test_a_start_that_leads_up_is_left_out(wrong):
    loss, batch, _, best = regression()
    w, start = loss.model.weight, loss.model.weight.detach().clone()
    NewtonCG(loss, warm_start=0, max_iter=2).step(batch)
    expected = w.detach().clone()
    with torch.no_grad():
        w.copy_(start)
    misled = NewtonCG(loss, max_iter=2)
    misled.state[w]["direction"] = wrong * (best - start)
    misled.step(batch)
    assert_close(w.detach(), expected, rtol=0, atol=0)


def test_a_step_that_overflows_is_shortened():
    one = Residuals(lambda p: p, [-300.0])
    loss = hog.functional_loss(one, lambda y, _: (torch.exp(y) - y).sum())
    optimizer = NewtonCG(loss, damping=1e-6)
    optimizer.step(HERE)  # the curvature is next to nothing: the full step is 1e6 long
    assert math.isinf(optimizer.info.ratio)
    assert optimizer.info.ratio < 0
    assert 0 < optimizer.info.length < 1
    assert optimizer.info.values == 1 - math.log2(optimizer.info.length)
    assert optimizer.info.loss_after < optimizer.info.loss == 300
    assert optimizer.param_groups[0]["damping"] == 1.5e-6


def test_parameters_stay_where_no_length_lowers_the_loss():
    loss, batch, _, _ = regression()
    before = loss.model.weight.detach().clone()
    optimizer = NewtonCG(loss, lr=1e12)
    optimizer.step(batch)
    assert optimizer.info.length == 0
    assert optimizer.info.loss_after == optimizer.info.loss
    assert torch.equal(loss.model.weight, before)
    assert optimizer.param_groups[0]["damping"] == 1.5


def test_no_gradient_is_no_step():
    loss = squares(rosenbrock, [1.0, 1.0])
    optimizer = NewtonCG(loss)
    assert optimizer.step(HERE) == 0
    assert loss.model.p.tolist() == [1, 1]
    assert (optimizer.info.products, optimizer.info.damping) == (0, 1.0)
    assert optimizer.param_groups[0]["damping"] == 1


def test_a_matrix_that_is_not_positive_definite_is_damped_until_it_is():
    two = Residuals(lambda p: p, [0.1, 1.0])
    loss = hog.functional_loss(two, lambda y, _: y[0] ** 2 + torch.cos(y[1]))
    optimizer = NewtonCG(loss, damping=0.1)
    for _ in range(60):
        optimizer.step(HERE)
    assert_close(loss.model.p.detach(), torch.tensor([0, math.pi], dtype=F64), rtol=0, atol=1e-4)


NETWORKS = ["LayerNorm", "transformer block"]


@rows("name", NETWORKS)
def test_batches_count_by_their_size_and_may_be_given_by_a_function(name):
    found = []
    for split in (False, True):
        loss, params, (x, y) = problem(name)
        optimizer = NewtonCG(loss, max_iter=5)
        batch = [(x[:2], y[:2]), (x[2:], y[2:])] if split else lambda x=x, y=y: (x, y)
        for _ in range(3):
            optimizer.step(batch)
        found.append([p.detach() for p in params.values()])
    assert_close(*found, rtol=1e-9, atol=1e-10)


def test_networks_are_trained_and_nothing_else_changes():
    loss, params, batch = problem("transformer block")
    model = loss.model
    for p in params.values():
        p.grad = torch.ones_like(p)
    modes = [m.training for m in model.modules()]
    buffers = [b.clone() for b in model.buffers()]
    random = torch.get_rng_state()
    optimizer = NewtonCG(loss, damping=0.01)
    values = [float(optimizer.step(batch)) for _ in range(8)]
    assert values == sorted(values, reverse=True)
    assert values[-1] < 0.55 * values[0]
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in params.values())
    assert [m.training for m in model.modules()] == modes
    assert_close([*model.buffers()], buffers, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), random)


def test_the_matrix_of_another_batch():
    loss, (X, y), _, _ = regression()
    w, part = loss.model.weight, (X[:9], y[:9])
    (g,) = torch.autograd.grad(loss(hog.trainable_params(loss.model), (X, y)), w)
    H = 2 / 9 * X[:9].T @ X[:9]
    d = torch.linalg.solve(H + 0.5 * torch.eye(6), -g.T)
    before, optimizer = w.detach().clone(), NewtonCG(loss, damping=0.5)
    value = optimizer.step((X, y), part)
    assert_close(w.detach(), before + d.T, rtol=1e-6, atol=1e-9)
    decrease = optimizer.info.loss_after - value
    expected = decrease / float(g @ d + d.T @ H @ d / 2)
    assert math.isclose(optimizer.info.ratio, expected, rel_tol=1e-6)


def test_a_part_of_the_parameters():
    loss, params, batch = problem("LayerNorm")
    name = next(iter(params))
    before = {key: p.detach().clone() for key, p in params.items()}
    NewtonCG(loss, {name: params[name]}).step(batch)
    moved = {key for key, p in params.items() if not torch.equal(p, before[key])}
    assert moved == {name}


def test_it_resumes_from_a_checkpoint():
    def start():
        loss, params, batch = problem("LayerNorm")
        return loss, params, batch, NewtonCG(loss, damping=0.1, max_iter=7)

    loss, params, batch, optimizer = start()
    for _ in range(3):
        optimizer.step(batch)
    file = io.BytesIO()
    torch.save((loss.model.state_dict(), optimizer.state_dict()), file)
    for _ in range(3):
        optimizer.step(batch)
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    other, again, batch, resumed = start()
    resumed.param_groups[0]["damping"] = 5.0  # which the checkpoint overrides
    other.model.load_state_dict(weights)
    resumed.load_state_dict(state)
    for _ in range(3):
        resumed.step(batch)
    assert_close([*again.values()], [*params.values()], rtol=0, atol=0)
    assert resumed.info == optimizer.info


def test_a_copy_is_independent():
    loss, params, batch = problem("LayerNorm")
    optimizer = NewtonCG(loss)
    optimizer.step(batch)
    other = copy.deepcopy(optimizer)
    before = [p.detach().clone() for p in params.values()]
    other.step(batch)
    assert_close([p.detach() for p in params.values()], before, rtol=0, atol=0)
    optimizer.step(batch)
    assert other.info == optimizer.info
    assert_close(other.param_groups[0]["params"], [*params.values()], rtol=0, atol=0)


def linear(*more):
    model = nn.Sequential(nn.Linear(3, 2), *more)
    return hog.functional_loss(model, F.mse_loss)


BATCH = torch.randn(4, 3), torch.randn(4, 2)


def step(batch=BATCH, loss=None, **options):
    return NewtonCG(loss or linear(), **options).step(batch)


REFUSED = {
    "a closure": (lambda: NewtonCG(lambda params, batch: 0), TypeError, r"functional_loss\(model, criterion\)"),
    "an option of nothing": (lambda: step(momentum=0.9), TypeError, "NewtonCG: expected options among lr, .*, got 'momentum'"),
    "no damping": (lambda: step(damping=0.0), ValueError, "damping: expected a number greater than 0, got 0.0; 1 is usual"),
    "infinite damping": (lambda: step(damping=math.inf), ValueError, "damping: expected a number greater than 0, got inf; 1 is usual"),
    "no rate": (lambda: step(lr=0.0), ValueError, "lr"),
    "no iterations": (lambda: step(max_iter=0), ValueError, "max_iter"),
    "a part above one": (lambda: step(warm_start=1.5), ValueError, "warm_start: expected a number from 0 to 1"),
    "a list of parameters": (lambda: NewtonCG(linear(), [torch.ones(2)]), TypeError, "params: expected a dict"),
    "no batch": (lambda: step(None), TypeError, r"`optimizer.step\(\(x, y\)\)`"),
    "a function that gives none": (lambda: step(lambda: None), TypeError, "got None"),
    "a closure that gives the loss": (lambda: step(lambda: torch.ones((), requires_grad=True)), TypeError, "returns one, got the loss"),
    "dropout": (lambda: step(loss=linear(nn.Dropout(0.5))), RuntimeError, "1 \\(Dropout\\) draws at random"),
    "NaN in the data": (lambda: step((torch.full((4, 3), math.nan), torch.ones(4, 2))), FloatingPointError, "holds NaN"),
    "an indefinite matrix beyond the largest damping": (lambda: step(HERE, hog.functional_loss(Residuals(lambda p: p, [0.1, 1.0]), lambda y, _: -y.square().sum()), damping=1e-10), ArithmeticError, "positive definite"),
    "the state of other parameters": (lambda: NewtonCG(linear()).load_state_dict(NewtonCG(hog.functional_loss(nn.Linear(3, 3).double(), F.mse_loss)).state_dict() | {"state": {0: {"direction": torch.ones(3, 3)}}}), ValueError, "parameters 0.weight.*, got one of weight.* shapes differ"),
    "an empty state": (lambda: NewtonCG(linear()).load_state_dict({}), ValueError, "expected that of a NewtonCG"),
    "the state of another optimizer": (lambda: NewtonCG(linear()).load_state_dict(torch.optim.Adam(linear().model.parameters()).state_dict()), ValueError, "expected that of a NewtonCG, got one without damping"),
    "a second group": (lambda: NewtonCG(linear()).add_param_group({"params": [("w", nn.Parameter(torch.ones(1)))]}), ValueError, "expected one group, got a second"),
    "no batches": (lambda: step([]), ValueError, "at least one batch"),
}  # fmt: skip


test_bad_arguments_raise = refused(REFUSED)


def test_an_error_changes_no_parameter():
    loss = linear()
    before = copy.deepcopy(loss.model.state_dict())
    optimizer = NewtonCG(loss)
    with pytest.raises(FloatingPointError):
        optimizer.step((torch.full((4, 3), math.nan), torch.ones(4, 2)))
    assert_close(loss.model.state_dict(), before, rtol=0, atol=0)
    assert optimizer.info is None
    assert not any(own["direction"].any() for own in optimizer.state.values())
