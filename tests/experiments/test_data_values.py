"""Values of digits: the gradient, the detectors, runs end to end, interruptions, bad input."""

import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import average_precision_score
from torch.testing import assert_close

import hoglib as hog
from experiments.data.mislabelled import Mislabelled, Split, split
from experiments.data_values import INFLUENCE, LOSS, VALUES, DataValues
from experiments.reweight import even_weights
from experiments.tables.data_values import precision_recall
from tests.experiments.command import (
    COMMAND_LINE,
    DRAWN,
    checkpoint,
    metrics,
    run,
    smoke,
)
from tests.long_tail import FULL

SMOKE, fit, folder = smoke("meta/data_values")
pytestmark = COMMAND_LINE


@DRAWN
def test_the_table_and_the_curves_agree(trained):
    trained(SMOKE)
    table = (folder() / "table.txt").read_text()
    assert all(name in table for name in (VALUES, INFLUENCE, LOSS))
    assert "30 of 100 training labels are wrong (all say 0)" in table
    assert "leave 5 out, 4 random subsets: rank correlation" in table


@FULL  # trainings of seconds; the values are compared with differences of trainings below
def test_values_predict_trainings_and_find_wrong_labels():
    options = {"data.iterations": 200, "trainer.val_check_interval": 200}
    options |= {"model.subsets": 10, "model.leave_out": 2}  # of a hundred, as in the whole run
    fit(*(part for name, value in options.items() for part in (f"--{name}", value)))
    last = metrics(folder())[-1]
    assert float(last["test/correlation"]) > 0.9
    lines = (folder() / "table.txt").read_text().splitlines()
    precision = {
        name: float(line[len(name) :].split()[0])
        for name in (VALUES, INFLUENCE, LOSS)
        for line in lines
        if line.startswith(name)
    }
    assert precision[VALUES] > 0.7 > 0.4 > precision[LOSS]


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
    torch.manual_seed(0)
    model = DataValues(hidden=[3], damping=0.1).double()
    single = split("uniform", 0.3, 12, 9, 2, 0)
    parts = Split(*(part._replace(x=part.x.double()) for part in single))
    problem = model.problem(parts)
    steps = 25
    found = hog.meta.hypergradient(*problem, rule=model.rule(), steps=steps, memory="checkpoint")
    harm = model.harm(found, parts)

    def trained(weights):
        """By torch.optim, from the same start."""
        network = torch.nn.Sequential(*model.start)
        for p, q in zip(model.network.parameters(), network.parameters(), strict=True):
            p.data.copy_(q)
        optimizer = model.configure_optimizers()
        for _ in range(steps):
            optimizer.zero_grad()
            losses = F.cross_entropy(model(parts.train.x), parts.train.label, reduction="none")
            (weights @ losses).backward()
            optimizer.step()
        return F.cross_entropy(model(parts.val.x), parts.val.label).item()

    even, h = even_weights(parts.train), 1e-5
    for i in (0, 5, 11):
        unit = torch.zeros_like(even)
        unit[i] = h
        slope = (trained(even + unit) - trained(even - unit)) / (2 * h)
        assert_close(harm[VALUES][i].item(), slope, rtol=1e-6, atol=1e-9)

    params = {name: p.detach() for name, p in found.params.items()}
    flat = torch.cat([p.flatten() for p in params.values()])

    def logits(flat, x):
        at = iter(flat.split([p.numel() for p in params.values()]))
        named = {name: next(at).reshape(p.shape) for name, p in params.items()}
        return torch.func.functional_call(model.network, named, (x,))

    x, label = parts.train.x, parts.train.label
    J = torch.func.jacrev(logits)(flat, x)  # [n, classes, parameters]
    p = logits(flat, x).softmax(1)
    H = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    G = torch.einsum("nap,nab,nbq->pq", J, H, J) / len(x) + 0.1 * torch.eye(len(flat))
    clean = torch.func.grad(lambda f: F.cross_entropy(logits(f, parts.val.x), parts.val.label))(
        flat
    )
    each = torch.einsum("nap,na->np", J, p - F.one_hot(label, 10))
    assert_close(
        harm[INFLUENCE], -each @ torch.linalg.solve(G, clean) / len(x), rtol=1e-4, atol=1e-8
    )
    assert_close(harm[LOSS], F.cross_entropy(logits(flat, x), label, reduction="none"))


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
