"""Training digits behind errors: the scores, trainings without digits, runs end to end, bad input."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from experiments.data.mislabelled import split
from experiments.data.stream import seeded
from experiments.influence import EKFAC, EXACT, GRADIENTS, RANDOM, Influence
from tests.experiments.command import (
    COMMAND_LINE,
    DRAWN,
    metrics,
    smoke,
)

SMOKE, fit, folder = smoke("curvature/influence")
pytestmark = COMMAND_LINE


@DRAWN
def test_the_table_has_all_scores(trained):
    trained(SMOKE)
    table = (folder() / "table.txt").read_text()
    assert all(name in table for name in (EXACT, EKFAC, GRADIENTS, RANDOM))
    assert "without 3 digits for each error; 3 of " in table
    assert "10 of 100 training labels are wrong (any other digit)" in table
    assert len([key for key in metrics(folder())[-1] if key.startswith("test/right")]) == 4


@pytest.fixture
def explained():
    """A network in float64 at the end of its training, and its data."""
    torch.manual_seed(0)
    model = Influence(hidden=[3], damping=0.1, leave_out=2, weight_decay=0.1).double()
    model.trainer = SimpleNamespace(datamodule=SimpleNamespace(iterations=300))
    parts = split("uniform", 0.3, 30, 5, 2, 0)
    train, queries = (part._replace(x=part.x.double()) for part in parts[:2])
    none = torch.tensor([], dtype=torch.long)
    model.network.load_state_dict(model.trained(train, none))
    return model, train, queries


def test_the_scores_are_those_of_a_dense_matrix(explained):
    model, train, queries = explained
    harm = model.harm(train, queries, seeded(0))
    params = {name: p.detach() for name, p in model.network.named_parameters()}
    flat = torch.cat([p.flatten() for p in params.values()])

    def logits(flat, x):
        at = iter(flat.split([p.numel() for p in params.values()]))
        named = {name: next(at).reshape(p.shape) for name, p in params.items()}
        return torch.func.functional_call(model.network, named, (x,))

    def gradients(x, label):
        J = torch.func.jacrev(logits)(flat, x)
        p = logits(flat, x).softmax(1)
        return J, p, torch.einsum("nap,na->np", J, p - F.one_hot(label, 10))

    J, p, a = gradients(train.x, train.label)
    H = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    G = torch.einsum("nap,nab,nbq->pq", J, H, J) / len(a) + 0.1 * torch.eye(len(flat)).double()
    b = gradients(queries.x, queries.truth)[2]
    assert_close(harm[EXACT], -a @ torch.linalg.solve(G, b.T), rtol=1e-5, atol=1e-7)
    assert_close(harm[GRADIENTS], -a @ b.T)


def test_trainings_without_digits_are_those_of_torch_and_lower_the_loss(explained):
    model, train, queries = explained
    harm = model.harm(train, queries, seeded(0))[EXACT]
    check = model.check(train, queries, harm)

    def trained(weights):
        for p, q in zip(model.network.parameters(), model.start.parameters(), strict=True):
            p.data.copy_(q)
        optimizer = model.configure_optimizers()
        for _ in range(300):
            optimizer.zero_grad()
            losses = F.cross_entropy(model(train.x), train.label, reduction="none")
            (weights @ losses).backward()
            optimizer.step()
        with torch.no_grad():
            return F.cross_entropy(model(queries.x), queries.truth, reduction="none"), model(
                queries.x
            )

    even = torch.full((30,), 1 / 30, dtype=torch.float64)
    before, _ = trained(even)
    for q in (0, 3):
        weights = even.clone()
        weights[harm[:, q].argsort(descending=True)[:2]] = 0
        after, logits = trained(weights)
        assert_close(check.actual[q], after[q] - before[q], rtol=1e-4, atol=1e-7)
        assert check.right[q] == (logits[q].argmax() == queries.truth[q])
        assert_close(check.predicted[q], -harm[:, q].topk(2).values.sum() / 30)
    assert (check.predicted < 0).all()
    assert check.actual.mean() < 0
