"""Potentials of clusters: known energies, the walk against its density, invariances, forces, losses."""

import math

import pytest
import torch
from torch.testing import assert_close

from experiments.forces.clusters import Structures, energies_and_forces, metropolis_walk
from experiments.forces.experiment import Potentials, errors_of
from experiments.forces.potential import Potential, move_atom, outermost
from experiments.forces.table import Errors, forces_table
from tests.experiments.command import COMMAND_LINE, smoke

SMALL = {"atoms": 3, "sweeps": 20, "train": 6, "val": 5, "test": 5, "batch": 3, "iterations": 4}


def lattice(*atoms):
    return torch.tensor(atoms, dtype=torch.float64)


@pytest.fixture(scope="module")
def walked():
    return metropolis_walk(20, 5, 0.3, 2.0, 60, seed=0)


WELL = 2 ** (1 / 6)  # where a pair has its lowest energy, -1
TETRAHEDRON = WELL / math.sqrt(8) * lattice([1, 1, 1], [1, -1, -1], [-1, 1, -1], [-1, -1, 1])
KNOWN = {
    "pair in its well": (lattice([0, 0, 0], [0, WELL, 0]), -1.0),
    "pair at sigma": (lattice([1, 1, 1], [1, 1, 2]), 0.0),
    "pair at two": (lattice([0, 0, 0], [2, 0, 0]), 4 * (2**-12 - 2**-6)),
    "tetrahedron": (TETRAHEDRON, -6.0),
    "three in a row": (lattice([-1, 0, 0], [0, 0, 0], [1, 0, 0]), 4 * (2**-12 - 2**-6)),
}


@pytest.mark.parametrize("case", KNOWN)
def test_energies_that_are_known(case):
    x, expected = KNOWN[case]
    energy, forces = energies_and_forces(x)
    assert energy.item() == pytest.approx(expected, abs=1e-12)
    if expected in (-1.0, -6.0):  # minima
        assert_close(forces, torch.zeros_like(x), rtol=0, atol=1e-12)


def test_forces_are_minus_the_derivatives(walked):
    x = walked.clone().requires_grad_()
    energy, forces = energies_and_forces(walked)
    pairs = torch.stack([torch.pdist(one) for one in x]) ** -6
    by_pairs = 4 * (pairs.square() - pairs).sum(1)
    assert_close(energy, by_pairs)
    assert_close(forces, -torch.autograd.grad(by_pairs.sum(), x)[0])


def test_the_walk_ends_within_the_sphere_and_in_bound_clusters(walked):
    assert walked.dtype == torch.float64
    assert_close(walked.mean(1), torch.zeros_like(walked[:, 0]))
    assert walked.square().sum(-1).max() <= 4
    energy, _ = energies_and_forces(walked)
    assert energy.mean() < -3
    assert len(energy.unique()) == 20  # each walk is another


@pytest.mark.parametrize("temperature", [0.3, 1.0])
def test_two_atoms_are_as_far_apart_as_the_density_says(temperature):
    """Of r from 0 to 2 radius the density is r^2 exp(-E / T): mean and variance of E by quadrature."""
    count, radius = 4000, 1.0
    found, _ = energies_and_forces(metropolis_walk(count, 2, temperature, radius, 150, seed=0))
    r = torch.linspace(0.5, 2 * radius, 20001, dtype=torch.float64)
    energy = 4 * (r**-12 - r**-6)
    density = r**2 * torch.exp(-energy / temperature)
    mean = ((density * energy).sum() / density.sum()).item()
    sigma = ((density * (energy - mean) ** 2).sum() / density.sum()).sqrt().item()
    assert abs(found.mean().item() - mean) < 4 * sigma / math.sqrt(count)
    assert found.std().item() == pytest.approx(sigma, rel=0.1)


SMOKE, fit, folder = smoke("penalty/forces")
pytestmark = COMMAND_LINE


@pytest.fixture(scope="module")
def clusters():
    x = metropolis_walk(12, 5, 0.3, 2.0, 40, seed=0)
    return Structures(x, *energies_and_forces(x))


@pytest.fixture
def potential(clusters):
    """One whose energies are as large as those of clusters, and no longer at its start."""
    torch.manual_seed(0)
    found = Potential(8, [16, 16], "swish").double()
    found.scale_to(clusters)
    with torch.no_grad():
        for p in found.parameters():
            p.mul_(2)
    return found


def turned(x):
    rotation = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64))[0]
    return x @ rotation


SAME = {
    "moved": lambda x: x + torch.tensor([3.0, -1.0, 0.5]),
    "turned": turned,
    "mirrored": lambda x: x * torch.tensor([1.0, -1.0, 1.0]),
    "atoms changed": lambda x: x[:, [4, 2, 0, 1, 3]],
}


@pytest.mark.parametrize("case", SAME)
def test_the_energy_stays_where_nature_s_does(case, potential, clusters):
    energy = potential(clusters.x)
    assert energy.std() > 0.1  # it does depend on the cluster
    assert_close(potential(SAME[case](clusters.x)), energy, rtol=0, atol=1e-6)


def test_the_features_by_hand():
    """Three atoms in a row, 1 apart: the middle one has two neighbours at 1, the others at 1 and 2."""
    x = torch.tensor([[[-1.0, 0, 0], [0, 0, 0], [1, 0, 0]]])
    potential = Potential(13, [4], "tanh")  # centres 0.2 apart: 0.8, 1, ... 3.2
    found = potential.features(x)
    near = torch.tensor([-((i - 1) ** 2) / 2 for i in range(13)]).exp()
    far = torch.tensor([-((i - 6) ** 2) / 2 for i in range(13)]).exp()
    assert_close(found, torch.stack([near + far, 2 * near, near + far])[None])


def test_the_losses_by_hand(clusters):
    model = Potentials(weight=0.3, hidden=[8], features=8).double()
    model.energy_variance.fill_(2.0)
    model.force_square.fill_(5.0)
    x = clusters.x.clone().requires_grad_()
    energy = model(x)
    slope = torch.autograd.grad(energy.sum(), x)[0]
    of_energy = ((energy - clusters.energy) ** 2).mean() / 2
    of_forces = ((clusters.forces + slope) ** 2).sum() / (12 * 5 * 3) / 5
    assert_close(model.loss("energies", clusters), of_energy)
    assert_close(model.loss("both", clusters), of_energy + 0.3 * of_forces)


def test_errors_by_hand():
    batch = Structures(torch.zeros(2, 2, 3), torch.tensor([1.0, 5.0]), torch.zeros(2, 2, 3))
    forces = torch.tensor([[[6.0, 0, 0], [0, -3, 0]], [[0, 0, 0], [0, 0, 1.2]]])
    found = errors_of(batch, torch.tensor([2.0, 4.5]), forces)
    assert_close(found.energy, torch.tensor([0.5, 0.25]))
    assert_close(found.force, torch.tensor([1.5, 0.2]))


def test_the_outermost_atom_is_moved_on_its_line():
    cluster = torch.tensor([[0.0, 1, 0], [0, -1, 0], [3.0, 0, 0]])
    atom, distance = outermost(cluster[None])
    assert (atom.item(), distance.item()) == (2, pytest.approx(3.0))
    path = move_atom(cluster, 2, torch.tensor([3.0, 5.0]))
    assert_close(path[0], cluster)
    assert_close(path[1], torch.tensor([[0.0, 1, 0], [0, -1, 0], [5.0, 0, 0]]))


def test_the_table():
    def errors(*pairs):
        return Errors(*(torch.tensor(part) for part in zip(*pairs, strict=True)))

    rows = {
        "energies": errors((0.3, 1.0), (0.5, 3.0)),
        "both": errors((0.1, 0.5), (0.3, 0.5)),
        "nothing": errors((1.0, 4.0), (3.0, 6.0)),
    }
    lines = forces_table(rows, 4, 9).splitlines()
    assert lines[0] == "Errors on 2 held-out clusters of 4 atoms, after training on 9; mean ± 95%"
    assert lines[1] == "interval"
    # 1.96 s / sqrt(2), with s = |a - b| / sqrt(2) of two
    assert lines[5].split() == ["energies", "0.4000", "±", "0.1960", "20.0%", "2.0000", "±", "1.9600", "40.0%"]  # fmt: skip
    assert lines[6].split() == ["both", "0.2000", "±", "0.1960", "10.0%", "0.5000", "±", "0.0000", "10.0%"]  # fmt: skip
    assert lines[8].split() == ["both:", "gain", "0.2000", "±", "0.0000", "1.5000", "±", "1.9600"]
