"""Digits and gradient descent on them: the split, known spectra, the table."""

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.testing import assert_close

from experiments.curvature.experiment import cross_entropy, squared_error
from experiments.curvature.plots import eigenvalues_per_decade
from experiments.curvature.table import spectrum_table
from experiments.shared.digits import Digits
from hoglib.curvature import hessian_spectrum
from hoglib.lightning import Measurement
from tests.experiments.command import COMMAND_LINE, DRAWN, checkpoint, smoke

SMOKE, fit, folder = smoke("curvature/digits")
PICTURE = "spectrum_over_training.png"
pytestmark = COMMAND_LINE


def history(where):
    return checkpoint(where)["callbacks"]["CurvatureMonitor"]["history"]


def test_losses():
    outputs, label = torch.randn(5, 10), torch.tensor([3, 0, 9, 3, 1])
    each = [
        sum((outputs[i, c] - int(c == label[i])) ** 2 for c in range(10)) / 2 for i in range(5)
    ]  # fmt: skip
    assert_close(squared_error(outputs, label), torch.stack(each).mean())
    assert_close(cross_entropy(outputs, label), F.cross_entropy(outputs, label))


def test_a_fit_without_the_monitor_is_the_fit_with_it_and_says_so(trained, capsys):
    trained(SMOKE, into="with")
    fit("--trainer.callbacks", "null")
    ours, theirs = (checkpoint(folder(root=root)) for root in ("runs", "with"))
    assert_close(ours["state_dict"], theirs["state_dict"], rtol=0, atol=0)
    assert "No CurvatureMonitor among trainer.callbacks" in capsys.readouterr().out
    assert not (folder() / PICTURE).exists()


@DRAWN
def test_variants_end_with_their_picture():
    fit("--model.loss", "cross_entropy", "--trainer.max_steps", "1",
        "--trainer.callbacks.init_args.every", "1000")  # fmt: skip
    assert (folder() / PICTURE).stat().st_size > 5000


def test_rows_of_the_picture_count_eigenvalues():
    """Eigenvalues in a decade, times what of a decade a row is, add up to all of them."""
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


def rows(images):
    return {tuple(x.tolist()) for x in images.x}


def test_the_parts_have_no_image_in_common_and_are_scikit_learns():
    data = Digits(seed=3)
    (batch,) = data.val_dataloader()
    assert (len(data.train.x), len(batch.x)) == (1297, 500)
    assert not rows(data.train) & rows(batch)
    x, label = load_digits(return_X_y=True)
    expected = sorted((*(row / 8 - 1), digit) for row, digit in zip(x, label, strict=True))
    parts = [torch.cat([part.x, part.label[:, None]], 1) for part in (data.train, batch)]
    assert_close(torch.tensor(expected).float(), torch.tensor(sorted(torch.cat(parts).tolist())))


def test_there_may_be_a_third_part_to_choose_by():
    data = Digits(train=1000, test=500, val=200, seed=3)
    (chosen_by,), (tested,) = data.val_dataloader(), data.test_dataloader()
    assert (len(data.train.x), len(chosen_by.x), len(tested.x)) == (1000, 200, 500)
    parts = [rows(part) for part in (data.train, chosen_by, tested)]
    assert not parts[0] & parts[1] | parts[0] & parts[2] | parts[1] & parts[2]
    without = Digits(train=1000, test=500, seed=3)
    assert_close(without.train, data.train, rtol=0, atol=0)
    assert_close(without.held_out, tested, rtol=0, atol=0)
    assert_close([*without.val_dataloader()], [tested], rtol=0, atol=0)
    assert (data.options["val"], without.options["val"]) == (200, 0)
