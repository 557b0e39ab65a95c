"""Potentials of clusters: invariances, forces, losses, table, runs end to end, resume, bad input."""

import pytest
import torch
from torch.testing import assert_close

from experiments.data.clusters import Structures, energies_and_forces, metropolis_walk
from experiments.forces import Potentials, errors_of
from experiments.models.potential import Potential, move_atom, outermost
from experiments.tables.forces import Errors, forces_table
from tests.experiments.command import (
    COMMAND_LINE,
    DRAWN,
    checkpoint,
    metrics,
    smoke,
)

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


def test_forces_turn_with_the_cluster(potential, clusters):
    model = Potentials(features=8)
    model.potentials["both"] = potential
    torch.manual_seed(1)
    rotation = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64))[0]
    _, forces = model.predict("both", clusters.x)
    _, others = model.predict("both", clusters.x @ rotation)
    assert_close(others, forces @ rotation, rtol=0, atol=1e-6)
    assert_close(forces.sum(1), torch.zeros_like(forces[:, 0]), rtol=0, atol=1e-6)


def test_forces_are_minus_differences_of_energies(potential, clusters):
    model = Potentials(features=8)
    model.potentials["both"] = potential
    energy, forces = model.predict("both", clusters.x)
    assert_close(energy, potential(clusters.x))
    assert forces.square().mean() > 1e-3
    step = 1e-5
    for atom in range(5):
        for direction in range(3):
            ahead, behind = clusters.x.clone(), clusters.x.clone()
            ahead[:, atom, direction] += step
            behind[:, atom, direction] -= step
            slope = (potential(ahead) - potential(behind)) / (2 * step)
            assert_close(forces[:, atom, direction], -slope, rtol=1e-6, atol=1e-6)


def test_the_features_by_hand():
    """Three atoms in a row, 1 apart: the middle one has two neighbours at 1, the others at 1 and 2."""
    x = torch.tensor([[[-1.0, 0, 0], [0, 0, 0], [1, 0, 0]]])
    potential = Potential(13, [4], "tanh")  # centres 0.2 apart: 0.8, 1, ... 3.2
    found = potential.features(x)
    near = torch.tensor([-((i - 1) ** 2) / 2 for i in range(13)]).exp()
    far = torch.tensor([-((i - 6) ** 2) / 2 for i in range(13)]).exp()
    assert_close(found, torch.stack([near + far, 2 * near, near + far])[None])


def test_scales_make_features_and_energies_standard(clusters):
    potential = Potential(8, [4], "tanh").double()
    potential.scale_to(clusters)
    scaled = (potential.features(clusters.x) - potential.middle) / potential.width
    assert_close(scaled.mean((0, 1)), torch.zeros(8).double())
    assert_close(scaled.std((0, 1)), torch.ones(8).double())
    with torch.no_grad():
        for p in potential.parameters():
            p.zero_()
    assert_close(potential(clusters.x), clusters.energy.mean().expand(12))


def test_the_losses_by_hand(clusters):
    torch.manual_seed(0)
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


def test_both_start_alike():
    ours, theirs = Potentials(hidden=[8]).potentials.values()
    assert_close(ours.state_dict(), theirs.state_dict(), rtol=0, atol=0)


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


@DRAWN
def test_the_table_and_the_curves_agree(trained):
    trained(SMOKE)
    table = (folder() / "table.txt").read_text()
    rows = metrics(folder())
    assert [int(row["step"]) for row in rows if row["train/both"]] == [4, 9, 14, 19]
    assert len([row for row in rows if row["val/force/both"]]) == 2
    (line,) = [x for x in table.splitlines() if x.startswith("energies and forces  ")]
    assert f"{float(rows[-1]['test/force/both']):.4f}" in line


def test_forces_in_the_loss_lower_their_error():
    fit("--model.features", "20", "--data.iterations", "250", "--trainer.val_check_interval", "250")
    last = metrics(folder())[-1]
    assert float(last["test/force/both"]) < 0.7 * float(last["test/force/energies"])


def test_energies_are_learned_alike_with_and_without_the_other():
    """The network of energies alone knows nothing of forces: their weight does not change it."""
    for weight in ("1", "50"):
        fit("--model.weight", weight, "--test_after_fit", "false")
    a, b = (checkpoint(folder(v))["state_dict"] for v in (0, 1))
    for name in a:
        same = torch.equal(a[name], b[name])
        assert same == (not name.startswith("potentials.both.network")), name


def test_the_table():
    def errors(*pairs):
        return Errors(*(torch.tensor(part) for part in zip(*pairs, strict=True)))

    rows = {
        "energies": errors((0.3, 1.0), (0.5, 3.0)),
        "both": errors((0.1, 0.5), (0.3, 0.5)),
        "nothing": errors((1.0, 4.0), (3.0, 6.0)),
    }
    lines = forces_table(rows, 4, 9).splitlines()
    assert lines[0] == "Errors on 2 held-out clusters of 4 atoms, after training on 9; mean ± 95% interval"  # fmt: skip
    # 1.96 s / sqrt(2), with s = |a - b| / sqrt(2) of two
    assert lines[4].split() == ["energies", "0.4000", "±", "0.1960", "20.0%", "2.0000", "±", "1.9600", "40.0%"]  # fmt: skip
    assert lines[5].split() == ["both", "0.2000", "±", "0.1960", "10.0%", "0.5000", "±", "0.0000", "10.0%"]  # fmt: skip
    assert lines[7].split() == ["both:", "gain", "0.2000", "±", "0.0000", "1.5000", "±", "1.9600"]
