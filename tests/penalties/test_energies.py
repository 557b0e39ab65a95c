"""Forces and matrices of force constants, of structures alone, in batches and in graphs."""

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from hoglib import penalties
from tests.curvature.problems import F64
from tests.penalties.critics import build, draw
from tests.refused import refused
from tests.rows import rows


def pairs(x: Tensor) -> Tensor:
    """Morse potential of structures [..., n, 3], smooth at every distance."""
    apart = x.unsqueeze(-2) - x.unsqueeze(-3)
    r = (apart.square().sum(-1) + 1e-3).sqrt()
    among = torch.ones(r.shape[-2:], dtype=x.dtype).triu(1)
    return ((1 - torch.exp(1 - r)).square() * among).sum((-1, -2))


def forces_of(x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    return -torch.autograd.grad(pairs(x).sum(), x)[0]


class Potential(nn.Module):
    """A learned energy of each structure, from distances."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, x: Tensor) -> Tensor:
        apart = x.unsqueeze(-2) - x.unsqueeze(-3)
        return self.net(apart.square().sum(-1, keepdim=True)).sum((-1, -2, -3))


X = 2 * draw(3, 4, 3)
INDEX = torch.tensor([0] * 4 + [1] * 3 + [2] * 4)
ATOMS = torch.cat([X[0], X[1][:3], X[2]])
by_index = lambda x, index: torch.stack([pairs(x[index == k]) for k in range(3)])  # noqa: E731


def test_one_structure():
    e, f, h = penalties.forces(pairs, X[0], hessian=True)
    assert_close(e, pairs(X[0]))
    assert_close(f, forces_of(X[0]))
    assert_close(h, torch.autograd.functional.hessian(pairs, X[0]))
    kept = penalties.forces(lambda x: pairs(x).view(1), X[0], hessian=True)
    assert_close(kept[2], h)


@pytest.mark.parametrize("energy", [pairs, lambda x: pairs(x).unsqueeze(1)], ids=["[B]", "[B, 1]"])
def test_structures_in_a_batch(energy):
    e, f, h = penalties.forces(energy, X, hessian=True)
    assert_close(e, energy(X))
    assert_close(f, forces_of(X))
    assert_close(torch.func.vmap(lambda x: penalties.forces(pairs, x))(X), (pairs(X), f))
    assert_close(h, torch.stack([torch.autograd.functional.hessian(pairs, x) for x in X]))


def test_structures_as_graphs():
    order = torch.randperm(11)
    e, f, h = penalties.forces(
        by_index, ATOMS[order], INDEX[order], batch=INDEX[order], hessian=True
    )
    assert_close(e, by_index(ATOMS, INDEX))
    assert_close(f, forces_of_graphs()[order])
    for k in range(3):
        mine = ATOMS[order][INDEX[order] == k]
        assert_close(h[k], torch.autograd.functional.hessian(pairs, mine))
    assert [tuple(block.shape) for block in h] == [(4, 3, 4, 3), (3, 3, 3, 3), (4, 3, 4, 3)]
    cubes = lambda x, index: torch.zeros(4, dtype=F64).index_add(0, index, x.pow(3).sum(1))  # noqa: E731
    _, f, h = penalties.forces(cubes, ATOMS, INDEX, batch=INDEX, hessian=True)
    assert_close(f, -3 * ATOMS**2)
    assert tuple(h[3].shape) == (0, 3, 0, 3)  # the last has no atoms


def forces_of_graphs():
    return torch.cat([forces_of(ATOMS[k == INDEX]) for k in range(3)])


def test_positions_and_cell():
    energy = lambda x: pairs(x["positions"] @ x["cell"])  # noqa: E731
    x = {"positions": X, "cell": torch.eye(3, dtype=F64).expand(3, 3, 3)}
    e, f = penalties.forces(energy, x)
    assert_close(e, pairs(X))
    assert_close(f["positions"], forces_of(X))
    assert_close(f["cell"], X.mT @ forces_of(X))


STRAINED = lambda x: pairs(x["x"] + x["x"] @ (x["strain"] + x["strain"].mT) / 2)  # noqa: E731
TREES = [
    (STRAINED, {"x": X[0], "strain": torch.zeros(3, 3, dtype=F64)}),
    (lambda x: pairs(x["x"] @ x["cell"][0]), {"x": X[0], "cell": [torch.eye(3, dtype=F64)]}),
    (lambda x: pairs(x[0]) + x[1].sum(), (X[0], X[1, 0])),
    (lambda x: x[0].sum() + x[1].sum(), (X[0], X[1, 0])),
    (lambda x: pairs(x[0]) * x[1][0] ** 3, (X[0], torch.tensor([2.0], dtype=F64))),
    (lambda x: pairs(x[0]) + x[1].sum(), (X[0], X[0, :0])),
]


@rows("energy, x", TREES, ids=["strain", "cell", "a field", "linear", "a number", "no elements"])
@rows("options", [{}, {"compile": True}])
def test_the_hessian_of_a_tree_is_one_of_blocks(energy, x, options):
    if options and energy is not STRAINED:
        return
    found = penalties.forces(energy, x, hessian=True, **options)
    assert_close(found.hessian, torch.func.hessian(energy)(x))
    several = {"x": X, "strain": torch.zeros(3, 3, 3, dtype=F64)}
    found = penalties.forces(STRAINED, several, hessian=True, **options).hessian
    assert_close(found, torch.func.vmap(torch.func.hessian(STRAINED))(several))


def test_a_loss_of_force_constants_reaches_the_parameters():
    model = build(Potential)
    penalties.forces(model, X, hessian=True)[2].square().mean().backward()
    assert model.net[0].weight.grad.any()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=lambda m: m.__name__)
def test_prediction_is_the_same_call(mode):
    model = build(Potential)
    e, f, h = penalties.forces(model, X, hessian=True)
    with mode():
        found = penalties.forces(model, X.clone(), hessian=True)
    assert all(not part.requires_grad for part in found)
    assert_close(found, tuple(part.detach() for part in (e, f, h)))


REFUSED = {
    "a cut": (lambda: penalties.forces(lambda x: build(Potential)(x.detach()), X), RuntimeError, r"forces: .*no effect because.*\.detach\(\) at"),
    "the Hessian of graphs of a tree": (lambda: penalties.forces(lambda x, i: by_index(x[0] + x[1], i), [ATOMS, ATOMS], INDEX, batch=INDEX, hessian=True), ValueError, "one tensor of positions"),
    "a tree of structures that act on one another": (lambda: penalties.forces(lambda x: pairs(x[0]) * x[1].mean(), [X, X[:, 0]], hessian=True), ValueError, "do not act on one another"),
    "energies of atoms": (lambda: penalties.forces(lambda x: x.square().sum(2).sum(0), X, hessian=True), ValueError, "one for each of 3 structures.*batch="),
    "integers": (lambda: penalties.forces(pairs, X.long()), TypeError, "floating-point"),
    "an option of penalties": (lambda: penalties.forces(pairs, X, reduction="sum"), TypeError, "'reduction', which is an option of penalties"),
    "a Hessian inside of vmap": (lambda: torch.func.vmap(lambda x: penalties.forces(pairs, x, hessian=True)[2])(X), NotImplementedError, r"torch\.func\.hessian"),
}  # fmt: skip


test_what_is_refused = refused(REFUSED)


def test_hessians_of_structures_that_act_on_one_another_are_refused():
    w = draw(3, 4).requires_grad_()

    def of_atoms(x):
        return torch.exp(-(x[:, None] - x[None]).square().sum(-1)).sum(1) * w.sum()

    x = draw(4, 3)
    with pytest.raises(ValueError, match="do not act on one another"):
        penalties.forces(of_atoms, x, hessian=True)
    index = torch.tensor([0, 0, 1, 1])

    def by_structure(x):
        return torch.zeros(2, dtype=x.dtype).index_add(0, index, of_atoms(x))

    with pytest.raises(ValueError, match="do not act on one another"):
        penalties.forces(by_structure, x, batch=index, hessian=True)


@pytest.mark.parametrize("hessian", [True, False], ids=["a Hessian", "forces alone"])
@pytest.mark.parametrize("index", [[0, 1], [0, 0, 2, 1], [0.0, 0.0, 1.0, 1.0], [-1, 0, 1, 1]])
def test_an_index_that_does_not_fit_is_refused(index, hessian):
    w = draw(3, 4).requires_grad_()
    own = torch.tensor([0, 0, 1, 1])

    def energy(x):
        return x.new_zeros(2).index_add(0, own, (x @ w).tanh().sum(1))

    with pytest.raises(ValueError, match="batch"):
        penalties.forces(energy, draw(4, 3), batch=torch.tensor(index), hessian=hessian)


def test_forces_that_train_nothing_are_warned_of():
    """An offset of energies may be all that is trained: E has a graph, and F is a constant."""
    model, offset = build(Potential).requires_grad_(False), torch.zeros((), requires_grad=True)
    with pytest.warns(UserWarning, match="forces: .*a loss of them trains nothing"):
        e, _ = penalties.forces(lambda x: model(x) + offset, X)
    e.sum().backward()
    assert offset.grad == 3


def test_structures_that_act_on_one_another_are_warned_of():
    model = build(Potential)
    with pytest.warns(UserWarning, match="forces: .*depends on the others"):
        penalties.forces(lambda x: model(x) + x.sum() ** 2, X)
    penalties.forces(model, X)
