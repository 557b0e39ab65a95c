"""Helium: local energies in closed form, cusps, sampling, the gradient of the energy."""

import torch
from torch.testing import assert_close

from experiments.helium.experiment import energy_loss, local_energy, metropolis
from experiments.helium.wave_function import WaveFunction, distances
from experiments.shared.stream import seeded
from tests.experiments.command import COMMAND_LINE

pytestmark = COMMAND_LINE


def wave_function():
    torch.manual_seed(0)
    return WaveFunction([6]).double()


def test_the_local_energy_of_two_exponentials_in_closed_form():
    """psi = exp(-z (r_1 + r_2)):  E_L = -z^2 + (z - 2) (1 / r_1 + 1 / r_2) + 1 / r_12"""
    z = 27 / 16
    x = torch.randn(20, 6, dtype=torch.float64)
    r_1, r_2, r_12 = distances(x).unbind(1)
    expected = -(z**2) + (z - 2) * (1 / r_1 + 1 / r_2) + 1 / r_12
    assert_close(local_energy(lambda x: -z * distances(x)[:, :2].sum(1), x), expected)


def test_no_pole_where_two_particles_meet_and_symmetry():
    log_psi = wave_function()
    x = torch.randn(1, 6, dtype=torch.float64)
    step = torch.tensor([0.6, 0.0, 0.8], dtype=torch.float64)
    of = {
        "nucleus": lambda e: torch.cat([e * step, x[0, 3:]]),
        "pair": lambda e: torch.cat([x[0, :3], x[0, :3] + e * step]),
    }
    for at in of.values():
        energies = local_energy(log_psi, torch.stack([at(e) for e in (1e-6, 1e-5, 1e-4)]))
        assert energies.std() < 0.01  # a pole would be 1e6, 1e5, 1e4
    swapped = torch.cat([x[:, 3:], x[:, :3]], 1)
    assert_close(log_psi(x), log_psi(swapped))
    assert_close(local_energy(log_psi, x), local_energy(log_psi, swapped))


def test_walkers_are_sampled_from_psi_squared():
    """psi^2 = exp(-4 (r_1 + r_2)) has the mean distance 3/4 and mean square distance 3/4."""
    generator = seeded(0)
    x = torch.randn(4000, 6, generator=generator)
    x, accepted = metropolis(lambda x: -2 * distances(x)[:, :2].sum(1), x, 200, 0.35, generator)
    r = distances(x)[:, :2].double().flatten()
    for value in (r, r.square()):
        error = value.std() / len(value) ** 0.5
        assert abs(value.mean() - 0.75) < 4 * error
    assert 0.3 < accepted < 0.8


def test_the_gradient_of_the_energy_by_differences_of_reweighted_means():
    """E(theta) = sum w E_L / sum w, w = psi_theta^2 / psi_0^2, has besides the derivative of E_L itself,
    whose mean over psi^2 is zero."""
    log_psi, x = wave_function(), torch.randn(50, 6, dtype=torch.float64)
    params = list(log_psi.parameters())
    start = log_psi(x).detach()

    def reweighted():
        with torch.no_grad():
            w = (2 * (log_psi(x) - start)).exp()
            return (w * local_energy(log_psi, x, create_graph=False)).sum() / w.sum()

    energies = local_energy(log_psi, x)
    loss = energy_loss(log_psi, x, energies.detach()) + energies.mean()
    gradient = torch.autograd.grad(loss, params)
    for p, g in zip(params, gradient, strict=True):
        flat, i = p.data.view(-1), g.abs().argmax()
        values = []
        for step in (1e-5, -2e-5):
            flat[i] += step
            values.append(reweighted())
        flat[i] += 1e-5
        assert_close(g.view(-1)[i], (values[0] - values[1]) / 2e-5, rtol=1e-5, atol=1e-7)
