"""Networks for differential equations: closed forms, borders, runs end to end, resume, bad input."""

import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp
from torch.testing import assert_close

import hoglib as hog
from experiments.pinn.allen_cahn import allen_cahn_reference
from experiments.pinn.experiment import DENSE, Jacobian, Pinn, Residual, weighted_loss
from experiments.pinn.squares import EQUATIONS
from experiments.shared.networks import mlp
from hoglib.errors import NotPositiveDefiniteError
from tests.experiments.command import COMMAND_LINE

STEADY = ("poisson", "plate")
pytestmark = COMMAND_LINE


def differences(u, p, eps):
    """The Laplacian by central differences of values."""
    steps = eps * torch.eye(2, dtype=p.dtype)
    return sum(u(p + s) + u(p - s) - 2 * u(p) for s in steps) / eps**2


@pytest.mark.parametrize("name", STEADY)
def test_the_source_belongs_to_the_solution(name):
    equation = EQUATIONS[name]()
    p = 0.05 + 0.9 * torch.rand(50, 2, dtype=torch.float64)
    applied = lambda p: differences(equation.solution, p, 1e-3)  # noqa: E731
    expected = applied(p) if name == "poisson" else differences(applied, p, 1e-3)
    source = equation.source(p)
    assert_close(source, expected, rtol=0, atol=1e-4 * source.abs().max().item())
    assert_close(equation.operator(equation.solution, p)[1], source, rtol=1e-9, atol=1e-7)


@pytest.mark.parametrize("name", ["wave", "heat"])
def test_the_residual_of_a_closed_form_is_zero(name):
    equation = EQUATIONS[name]()
    p = torch.rand(50, 2, dtype=torch.float64)
    assert_close(equation.operator(equation.solution, p)[1], equation.source(p))
    u = Residual(mlp([2, 8, 1], "tanh").double(), equation).solution
    for x in (0.0, 1.0):
        border = torch.stack([torch.full_like(p[:, 0], x), p[:, 1]], 1)
        assert_close(u(border), torch.zeros(50, dtype=torch.float64), rtol=0, atol=1e-14)
    if name == "heat":
        start = torch.stack([p[:, 0], torch.zeros_like(p[:, 0])], 1)
        assert_close(u(start), equation.solution(start), rtol=0, atol=1e-14)


@pytest.mark.parametrize("name", STEADY)
def test_the_border_conditions_hold_for_any_network(name):
    residual = Residual(mlp([2, 8, 1], "tanh").double(), EQUATIONS[name]())
    side = torch.rand(20, dtype=torch.float64)
    for border in (0.0, 1.0):
        p = torch.stack([torch.full_like(side, border), side], 1)
        for points in (p, p.flip(1)):
            points = points.requires_grad_()
            u = residual.solution(points)
            (slope,) = torch.autograd.grad(u.sum(), points)
            assert_close(u, torch.zeros_like(u))
            assert (slope.abs().max() < 1e-12) == (name == "plate")


def test_the_residual_of_the_solution_is_zero():
    equation = EQUATIONS["plate"]()
    bubble = lambda p: (4 * p * (1 - p)).prod(-1).square()  # noqa: E731
    exact = lambda q: (equation.solution((q + 1) / 2) / bubble((q + 1) / 2))[:, None]  # noqa: E731
    residual = Residual(torch.nn.Module(), equation)
    residual.network.forward = exact
    p = 0.1 + 0.8 * torch.rand(20, 2, dtype=torch.float64)
    assert residual(p).abs().max() < 1e-8
    assert residual.scale == pytest.approx(
        float(equation.source(torch.rand(10**5, 2)).square().mean().sqrt()), rel=0.05
    )


def test_the_spectral_reference_by_a_solver_of_scipy():
    """The same modes, integrated in time by Runge-Kutta steps of adaptive size."""
    modes = 128
    z = -1 + 2 * np.arange(modes) / modes
    square = (np.pi * np.fft.fftfreq(modes, 1 / modes)) ** 2

    def slope(t, u):
        return 5 * u - 5 * u**3 - 1e-4 * np.fft.ifft(square * np.fft.fft(u)).real

    start = z**2 * np.cos(np.pi * z)
    end = solve_ivp(slope, (0, 1), start, rtol=1e-9, atol=1e-9).y[:, -1]
    found = allen_cahn_reference(modes + 1, modes, 2)
    assert np.abs(found[:-1, 0] - start).max() < 1e-12
    assert np.abs(found[:-1, -1] - end).max() < 1e-6
    assert np.abs(found[0] - found[-1]).max() < 1e-12
    on_grid = EQUATIONS["allen_cahn"]().solution(
        torch.tensor([[0.5, 0.0], [1.0, 0.0], [0.25, 0.0]])
    )
    assert_close(on_grid, torch.tensor([0.0, -1.0, 0.0]), rtol=0, atol=1e-4)
    with pytest.raises(ValueError, match="points of the grid"):
        EQUATIONS["allen_cahn"]().solution(torch.tensor([[0.123, 0.5]]))


def test_the_equation_of_allen_and_cahn():
    equation = EQUATIONS["allen_cahn"]()
    u = lambda p: (3 * p[:, 0] + p[:, 1]).sin() + p[:, 0] * p[:, 1] ** 2  # noqa: E731
    p = torch.rand(20, 2, dtype=torch.float64)
    x, t = p.unbind(1)
    u_t = (3 * x + t).cos() + 2 * x * t
    u_zz = -9 * (3 * x + t).sin() / 4  # z = 2 x - 1
    expected = u_t - 1e-4 * u_zz - 5 * u(p) + 5 * u(p) ** 3
    assert_close(equation.operator(u, p)[1], expected)


def test_the_initial_condition_and_the_period_hold_for_any_network():
    residual = Residual(mlp([11, 8, 1], "tanh").double(), EQUATIONS["allen_cahn"]())
    z = torch.linspace(-1, 1, 9, dtype=torch.float64)
    start = residual.solution(torch.stack([(z + 1) / 2, 0 * z], 1))
    assert_close(start, z**2 * (torch.pi * z).cos())
    ends = torch.tensor([[0.0, 0.7], [1.0, 0.7]]).double()
    left, right = residual.solution(ends)
    assert abs(left + 1) > 0.01  # the network counts: u(-1, 0) = -1
    assert_close(left, right)


def test_causal_weights_in_closed_form():
    residual = Residual(mlp([11, 4, 1], "tanh"), EQUATIONS["allen_cahn"]())
    t = (torch.arange(16) + 0.5) / 16
    p = torch.stack([torch.rand(32), t.repeat(2)], 1)
    r = torch.tensor([1.0, 3.0]).repeat_interleave(16)  # the mean of the squares is 5 in each slab
    expected = (-2.0 * 5 * torch.arange(16)).exp().repeat(2)
    assert_close(residual.causal_weights(p, r), expected)
    steady = Residual(mlp([2, 4, 1], "tanh"), EQUATIONS["poisson"]())
    assert_close(steady.weighted(p)[1], torch.ones(32))


@pytest.mark.parametrize("name", EQUATIONS)
def test_the_jacobian_gives_the_gauss_newton_matrix(name):
    equation = EQUATIONS[name]()
    residual = Residual(mlp([equation.inputs, 5, 1], "tanh").double(), equation)
    jacobian = Jacobian(residual)
    for points in (6, 11):  # by the same graph, at other parameters
        with torch.no_grad():
            for parameter in residual.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        p, weights = residual.weighted(torch.rand(points, 2, dtype=torch.float64))
        J = jacobian(p)
        G = hog.GGNOperator(
            weighted_loss(residual), hog.trainable_params(residual), (p, weights)
        ).to_dense()
        assert_close(2 / points * J.T @ (weights[:, None] * J), G)


def dense(dtype):
    torch.manual_seed(0)
    model = Pinn(hidden=[6], solver=DENSE)
    residual = Residual(mlp([2, 6, 1], "tanh").to(dtype), EQUATIONS["poisson"]())
    model.jacobian = Jacobian(residual)
    model.weighted = residual.weighted(torch.rand(40, 2, dtype=dtype))
    return model, residual


def test_a_dense_step_solves_the_damped_system():
    model, residual = dense(torch.float64)
    G = hog.GGNOperator(weighted_loss(residual), hog.trainable_params(residual), model.weighted)
    v = torch.randn(G.shape[0], dtype=torch.float64)
    found = model._inverse(G, 0.01)(v)
    assert_close(G @ found + 0.01 * found, v)


def test_a_matrix_that_rounding_makes_indefinite_is_refused():
    model, _ = dense(torch.float32)
    model.weighted = model.weighted[0][:4], torch.full((4,), 1e12)
    with pytest.raises(NotPositiveDefiniteError, match="precision to 64-true, or raise damping"):
        model._inverse(None, 1e-12)
