"""Gradient descent on digits: known spectra, runs end to end, resume, bad input."""

import json

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from experiments.curvature import Descent, cross_entropy, squared_error
from experiments.data.digits import Digits, Images
from experiments.plots.spectra import eigenvalues_per_decade
from experiments.tables.curvature import spectrum_table
from hoglib.curvature import hessian_spectrum
from hoglib.lightning import Measurement
from tests.experiments.command import (
    COMMAND_LINE,
    DRAWN,
    checkpoint,
    metrics,
    run,
    smoke,
)
from tests.long_tail import FULL

SMOKE, fit, folder = smoke("curvature/digits")
PICTURE = "spectrum_over_training.png"
pytestmark = COMMAND_LINE


def history(where):
    return checkpoint(where)["callbacks"]["CurvatureMonitor"]["history"]


def test_losses():
    torch.manual_seed(0)
    outputs, label = torch.randn(5, 10), torch.tensor([3, 0, 9, 3, 1])
    each = [
        sum((outputs[i, c] - int(c == label[i])) ** 2 for c in range(10)) / 2 for i in range(5)
    ]  # fmt: skip
    assert_close(squared_error(outputs, label), torch.stack(each).mean())
    assert_close(cross_entropy(outputs, label), F.cross_entropy(outputs, label))


@DRAWN
def test_the_spectrum_of_linear_regression_is_that_of_its_inputs():
    """Without hidden layers H is X^T X / n, X with a column of ones, for each of ten outputs."""
    data = Digits(train=300, test=10, seed=0)
    model = Descent(hidden=[])
    loss, params, batch = model.double().second_order_problem(
        Images(data.train.x.double(), data.train.label)
    )
    x = torch.cat([batch[0], torch.ones(300, 1)], 1).double()
    exact = torch.linalg.eigvalsh(x.T @ x / 300)
    found = hessian_spectrum(loss, params, batch, k=1, num_samples=20, steps=60)
    assert found.size == 650
    assert_close(found.largest, exact[-1:])
    assert abs(float(found.smallest)) < 1e-10  # pixels that are empty in every image
    value, error = found.trace
    assert abs(value - 10 * float(exact.sum())) < 4 * error


def test_a_rate_beyond_the_edge_diverges_and_one_below_does_not():
    """Of linear regression, whose largest eigenvalue does not change: 2 / lr is the bound."""
    data = Digits(train=300, test=10, seed=0)
    edge = 2 / float(torch.linalg.eigvalsh(gram(data.train.x)).max())
    for factor, grows in ((0.95, False), (1.05, True)):
        torch.manual_seed(0)
        model = Descent(hidden=[], lr=factor * edge)
        optimizer = model.configure_optimizers()
        losses = []
        for _ in range(300):
            losses.append(model.loss(data.train))
            optimizer.zero_grad()
            losses[-1].backward()
            optimizer.step()
        assert (losses[-1] > losses[0]) == grows


def gram(x):
    x = torch.cat([x, torch.ones(len(x), 1)], 1)
    return x.T @ x / len(x)


@DRAWN
def test_the_table_and_the_curves_agree(trained):
    trained(SMOKE)
    table = (folder() / "table.txt").read_text()
    rows = metrics(folder())
    measured = [r for r in rows if r["curvature/largest"]]
    assert [int(r["step"]) for r in measured] == [0, 5, 10, 15, 20]
    assert [one["batch"] for one in history(folder())] == [0, 5, 10, 15, 20]
    lines = table.splitlines()[4:9]
    losses = {int(r["step"]): float(r["train/loss"]) for r in rows if r["train/loss"]}
    accuracies = {int(r["step"]) + 1: float(r["val/accuracy"]) for r in rows if r["val/accuracy"]}
    for row, line in zip(measured, lines, strict=True):
        step, loss, accuracy, largest, smallest, trace, _, error = line.split()
        assert step == row["step"]
        assert int(step) == 20 or loss == f"{losses[int(step)]:.4f}"
        assert accuracy == (f"{accuracies[int(step)]:.1%}" if int(step) else "-")
        names = ("largest", "smallest", "trace", "trace_error")
        values = [float(row[f"curvature/{name}"]) for name in names]
        told = f"{values[0]:.2f}", f"{values[1]:.3f}", f"{values[2]:.1f}", f"{values[3]:.1f}"
        assert (largest, smallest, trace, error) == told
    summary = json.loads((folder() / "summary.json").read_text())
    assert summary["largest"] == pytest.approx(float(measured[-1]["curvature/largest"]))
    assert summary["edge"] == pytest.approx(20)
    assert summary["loss_train"] < losses[19]


@FULL
def test_the_largest_eigenvalue_stays_at_the_edge():
    fit(
        "--model.lr", "0.15", "--model.hidden", "[32, 32, 32]", "--data.iterations", "900",
        "--trainer.callbacks.init_args.every", "100", "--trainer.val_check_interval", "300",
    )  # fmt: skip
    largest = [float(one["spectrum"]["largest"][-1]) for one in history(folder())]
    assert largest[0] < 0.8 * 2 / 0.15
    for value in largest[-3:]:
        assert value == pytest.approx(2 / 0.15, rel=0.15)


def test_a_fit_with_the_monitor_is_the_fit_without_it(trained):
    trained(SMOKE)
    fit("--test_after_fit", "false", "--trainer.callbacks", "null")
    ours, theirs = (checkpoint(folder(v)) for v in (0, 1))
    assert_close(ours["state_dict"], theirs["state_dict"], rtol=0, atol=0)


@DRAWN
def test_test_draws_it_all_again(capsys):
    fit("--seed_everything", "1")
    config = folder() / "config.yaml"
    before = {name: (folder() / name).read_bytes() for name in ("table.txt", PICTURE)}
    for name in before:
        (folder() / name).unlink()
    assert run("test", "--config", config) == 0
    assert before == {name: (folder() / name).read_bytes() for name in before}
    assert run("validate", "--config", config) == 0
    assert not folder(1).exists()


def test_spectrum_and_verify(trained, capsys):
    trained(SMOKE)
    assert run("spectrum", "--config", SMOKE, "--k", "1", "--num_samples", "2", "--steps", "9") == 0
    numbers = json.loads((folder() / "spectrum.json").read_text())
    (found,) = numbers.values()
    last = history(folder())[-1]["spectrum"]
    assert found["largest"] == pytest.approx(last["largest"].tolist(), rel=1e-4)
    assert run("verify", "--config", SMOKE) == 0
    assert "Descent.second_order_problem: right" in capsys.readouterr().out


def test_a_run_without_the_monitor_says_so(capsys):
    fit("--trainer.callbacks", "null")
    assert "No CurvatureMonitor among trainer.callbacks" in capsys.readouterr().out
    assert not (folder() / PICTURE).exists()


@pytest.mark.parametrize(
    "args",
    [
        ("--model.loss", "cross_entropy"),
        pytest.param(("--data.batch", "50"), marks=FULL),
        pytest.param(("--model.act", "relu"), marks=FULL),
        ("--trainer.max_steps", "1"),
        ("--trainer.callbacks.init_args.every", "1000"),
    ],
    ids=" ".join,
)
@DRAWN
def test_variants_end_with_their_picture(args):
    fit(*args)
    assert (folder() / PICTURE).stat().st_size > 5000


def test_rows_of_the_picture_count_eigenvalues():
    """Eigenvalues in a decade, times what of a decade a row is, add up to all of them."""
    torch.manual_seed(0)
    A = torch.randn(12, 12).double()
    A = A + A.T
    problem = lambda p, _: p["w"] @ A @ p["w"] / 2, {"w": torch.zeros(12).double()}, None
    spectrum = hessian_spectrum(*problem, k=1, num_samples=40, steps=12)
    edges, counts, linear = eigenvalues_per_decade([spectrum])
    rows = torch.asinh(torch.from_numpy(edges) / linear).diff() / torch.tensor(10.0).log()
    assert float(rows @ torch.from_numpy(counts)[:, 0]) == pytest.approx(12, rel=1e-2)
    top = torch.linalg.eigvalsh(A)[-1]
    assert edges[0] < float(spectrum.smallest)
    assert float(top) < edges[-1]


def test_the_table_has_a_dozen_rows_at_most():
    loss = lambda p, _: (p["w"] ** 2).sum()  # noqa: E731
    one = hessian_spectrum(loss, {"w": torch.ones(4)}, None, k=1, num_samples=2, steps=3)
    many = [Measurement(10 * i, "", one) for i in range(100)]
    lines = spectrum_table(many, {0: 1.0, 990: 0.5}, {}, "title").splitlines()
    assert lines[0] == "title"
    rows = [line.split() for line in lines[4:-2]]
    assert len(rows) == 13
    assert rows[0] == ["0", "1.0000", "-", "2.00", "2.000", "8.0", "±", "0.0"]
    assert rows[-1][:2] == ["990", "0.5000"]
    assert len(spectrum_table(many[:1], {}, {}, "title").splitlines()) == 7
