"""What training digits do to a network: values and influence against trainings and dense matrices, wrong labels."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import average_precision_score
from torch.testing import assert_close

import hoglib as hog
from experiments.data_values.experiment import INFLUENCE, LOSS, VALUES, DataValues
from experiments.data_values.table import precision_recall
from experiments.influence.experiment import EXACT, GRADIENTS, Influence
from experiments.shared.mislabelled import Mislabelled, Split, split
from experiments.shared.stream import seeded
from experiments.shared.weights import even_weights
from tests.experiments.command import COMMAND_LINE, DRAWN, checkpoint, run, smoke

SMOKE, fit, folder = smoke("meta/data_values")
pytestmark = COMMAND_LINE


class Dense:
    """Of a network with mean cross entropy over examples, at its parameters: gradients and curvature."""

    def __init__(self, network):
        params = {name: p.detach() for name, p in network.named_parameters()}
        self.flat = torch.cat([p.flatten() for p in params.values()])

        def logits(flat, x):
            at = iter(flat.split([p.numel() for p in params.values()]))
            named = {name: next(at).reshape(p.shape) for name, p in params.items()}
            return torch.func.functional_call(network, named, (x,))

        self.logits = logits

    def gradients(self, x, label):
        """Of the loss of each example, [n, parameters]."""
        J, p = torch.func.jacrev(self.logits)(self.flat, x), self.logits(self.flat, x).softmax(1)
        return torch.einsum("nap,na->np", J, p - F.one_hot(label, 10))

    def gauss_newton(self, x, damping):
        J, p = torch.func.jacrev(self.logits)(self.flat, x), self.logits(self.flat, x).softmax(1)
        H = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
        G = torch.einsum("nap,nab,nbq->pq", J, H, J) / len(x)
        return G + damping * torch.eye(len(G), dtype=G.dtype)


def train_by_hand(model, part, weights, steps):
    """Train the network of an experiment from its start, by its optimizer, with weights of examples."""
    for p, q in zip(model.network.parameters(), model.start.parameters(), strict=True):
        p.data.copy_(q)
    optimizer = model.configure_optimizers()
    for _ in range(steps):
        optimizer.zero_grad()
        (weights @ F.cross_entropy(model(part.x), part.label, reduction="none")).backward()
        optimizer.step()


@DRAWN
def test_resume_is_bit_for_bit_the_uninterrupted_run(trained, monkeypatch):
    trained(SMOKE, into="whole")
    fit("--trainer.max_steps", "15", "--test_after_fit", "false")
    with monkeypatch.context() as patch:
        patch.setattr(hog.meta, "leave_k_out", interrupt)
        with pytest.raises(Stopped):
            run("fit", "--config", SMOKE, "--ckpt_path", "last")
    assert (folder() / "replay/backward.pt").exists()  # the values need no second run
    assert run("test", "--config", folder() / "config.yaml") == 0
    assert not (folder() / "replay").exists()
    ours, theirs = (checkpoint(where)["state_dict"] for where in (folder(), folder(root="whole")))
    assert_close(ours, theirs, rtol=0, atol=0)
    for name in ("table.txt", "values.png"):
        assert (folder() / name).read_bytes() == (folder(root="whole") / name).read_bytes()


class Stopped(Exception):
    pass


def interrupt(*args, **options):
    raise Stopped


def test_the_scores_are_those_of_their_formulas():
    """Values by central differences of whole trainings, influence by a dense matrix."""
    model = DataValues(hidden=[3], damping=0.1).double()
    single = split("uniform", 0.3, 12, 9, 2, 0)
    parts = Split(*(part._replace(x=part.x.double()) for part in single))
    problem = model.problem(parts)
    steps = 25
    found = hog.meta.hypergradient(*problem, rule=model.rule(), steps=steps, memory="checkpoint")
    harm = model.harm(found, parts)

    def trained(weights):
        train_by_hand(model, parts.train, weights, steps)
        return F.cross_entropy(model(parts.val.x), parts.val.label).item()

    even, h = even_weights(parts.train), 1e-5
    for i in (0, 5, 11):
        unit = torch.zeros_like(even)
        unit[i] = h
        slope = (trained(even + unit) - trained(even - unit)) / (2 * h)
        assert_close(harm[VALUES][i].item(), slope, rtol=1e-6, atol=1e-9)

    model.network.load_state_dict(found.params)
    dense, (x, label, *_) = Dense(model.network), parts.train
    clean = dense.gradients(parts.val.x, parts.val.label).mean(0)
    influence = torch.linalg.solve(dense.gauss_newton(x, 0.1), clean) / len(x)
    assert_close(harm[INFLUENCE], -dense.gradients(x, label) @ influence, rtol=1e-4, atol=1e-8)
    losses = F.cross_entropy(model(x), label, reduction="none")
    assert_close(harm[LOSS], losses.detach())


def test_average_precision():
    generator = torch.Generator().manual_seed(0)
    wrong = torch.rand(200, generator=generator) < 0.3
    harm = torch.randn(200, generator=generator) + wrong
    expected = average_precision_score(wrong, harm)
    assert precision_recall(harm, wrong).average == pytest.approx(expected)


def test_the_split():
    train, val, test = split("background", 0.3, 100, 50, 60, seed=0)
    assert (train.label != train.truth).sum() == 30
    assert set(train.label[train.label != train.truth].tolist()) == {0}
    assert torch.equal(val.label, val.truth)
    assert torch.equal(test.label, test.truth)
    assert train.x.shape == (100, 196)
    assert (train.x.min(), train.x.max()) == (0, 1)
    assert not set(train.number.tolist()) & set(val.number.tolist())
    data = Mislabelled("background", 0.3, 100, 50, 60, 3, seed=0)
    batches = [*data.train_dataloader()]
    assert len(batches) == 3
    assert all(torch.equal(batch.x, train.x) for batch in batches)


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
    harm, dense = model.harm(train, queries, seeded(0)), Dense(model.network)
    a, b = dense.gradients(train.x, train.label), dense.gradients(queries.x, queries.truth)
    exact = -a @ torch.linalg.solve(dense.gauss_newton(train.x, 0.1), b.T)
    assert_close(harm[EXACT], exact, rtol=1e-5, atol=1e-7)
    assert_close(harm[GRADIENTS], -a @ b.T)


def test_trainings_without_digits_are_those_of_torch_and_lower_the_loss(explained):
    model, train, queries = explained
    harm = model.harm(train, queries, seeded(0))[EXACT]
    check = model.check(train, queries, harm)

    def trained(weights):
        train_by_hand(model, train, weights, 300)
        with torch.no_grad():
            logits = model(queries.x)
        return F.cross_entropy(logits, queries.truth, reduction="none"), logits

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
