"""Lennard-Jones clusters: energies and forces against derivatives, the walk against its density."""

import math

import pytest
import torch
from torch.testing import assert_close

from experiments.data.clusters import Clusters, energies_and_forces, metropolis_walk
from experiments.data.stream import SubsetStream

SMALL = {"atoms": 3, "sweeps": 20, "train": 6, "val": 5, "test": 5, "batch": 3, "iterations": 4}


def lattice(*atoms):
    return torch.tensor(atoms, dtype=torch.float64)


@pytest.fixture(scope="module")
def clusters():
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


def test_a_pair_that_is_close_is_pushed_apart():
    """-dE/dr = 24 (2 - 1) at r = 1."""
    _, forces = energies_and_forces(lattice([0, 0, 0], [0, 0, 1]))
    assert_close(forces, lattice([0, 0, -24], [0, 0, 24]))


def test_forces_are_minus_the_derivatives(clusters):
    x = clusters.clone().requires_grad_()
    energy, forces = energies_and_forces(clusters)
    pairs = torch.stack([torch.pdist(one) for one in x]) ** -6
    by_pairs = 4 * (pairs.square() - pairs).sum(1)
    assert_close(energy, by_pairs)
    assert_close(forces, -torch.autograd.grad(by_pairs.sum(), x)[0])
    step = 1e-6
    for atom, direction in ((0, 0), (3, 2)):
        ahead, behind = clusters.clone(), clusters.clone()
        ahead[:, atom, direction] += step
        behind[:, atom, direction] -= step
        slope = (energies_and_forces(ahead)[0] - energies_and_forces(behind)[0]) / (2 * step)
        assert_close(forces[:, atom, direction], -slope, rtol=1e-6, atol=1e-6)


def test_forces_cancel_and_do_not_turn_the_cluster(clusters):
    _, forces = energies_and_forces(clusters)
    zero = torch.zeros_like(forces[:, 0])
    assert_close(forces.sum(1), zero, rtol=0, atol=1e-9)
    assert_close(torch.linalg.cross(clusters, forces).sum(1), zero, rtol=0, atol=1e-9)


def test_the_walk_ends_within_the_sphere_and_in_bound_clusters(clusters):
    assert clusters.dtype == torch.float64
    assert_close(clusters.mean(1), torch.zeros_like(clusters[:, 0]))
    assert clusters.square().sum(-1).max() <= 4
    energy, _ = energies_and_forces(clusters)
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


def test_the_parts_are_apart_and_belong_to_the_seed():
    data, same, other = (Clusters(**SMALL, seed=seed) for seed in (0, 0, 1))
    (validation,), (test,) = data.val_dataloader(), data.test_dataloader()
    assert [len(part.x) for part in (data.train, validation, test)] == [6, 5, 5]
    energies = torch.cat([data.train.energy, validation.energy, test.energy])
    assert len(energies.unique()) == 16  # also where two parts are of one size
    assert_close(data.train, same.train, rtol=0, atol=0)
    assert not torch.equal(data.train.x, other.train.x)
    more = Clusters(**{**SMALL, "train": 9}, seed=0)  # judged by the same ones
    assert_close(more.held_out, data.held_out, rtol=0, atol=0)
    assert test.x.dtype == test.energy.dtype == test.forces.dtype == torch.float32
    assert_close(energies_and_forces(test.x.double())[0].float(), test.energy, rtol=1e-4, atol=1e-4)


def test_the_stream_goes_on_where_it_was():
    data = Clusters(**SMALL, seed=0)
    whole = list(data.train_dataloader())
    assert len(whole) == 4
    for batch in whole:
        assert len(batch.energy.unique()) == 3
        assert torch.isin(batch.energy, data.train.energy).all()
    again, resumed = (SubsetStream(data.train, 4, 3, seed) for seed in (0, 9))
    iterator = iter(again)
    next(iterator)
    resumed.load_state_dict(again.state_dict())
    assert_close(list(resumed), whole[1:], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"atoms": 1}, "atoms: expected a whole number of at least 2"),
        ({"temperature": 0}, "temperature: expected"),
        ({"radius": -1}, "radius: expected"),
        ({"sweeps": 1}, "sweeps: expected"),
        ({"train": 1}, "train: expected"),
        ({"val": 0}, "val: expected"),
        ({"test": 1}, "test: expected"),
        ({"iterations": 0}, "iterations: expected"),
        ({"batch": 7}, "batch: expected at most the 6 clusters of train, got 7"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Clusters(**{**SMALL, **options})
