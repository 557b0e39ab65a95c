"""The GAN of MNIST digits: runs end to end, resume, scores by hand, its data and classifier, bad input."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.linalg import sqrtm

from experiments.gan.image_gan import GRID_SEED, ImageGAN, saved_grids
from experiments.gan.plots import save_grid, spaced_evenly
from experiments.gan.table import DigitsResult, digits_table
from experiments.shared import digit_classifier, mnist
from experiments.shared.digit_classifier import Features, accuracy, load_classifier, random_shift
from experiments.shared.mnist import split
from experiments.shared.quality import frechet_distance, score_digits
from tests.experiments.command import COMMAND_LINE, checkpoint, metrics, smoke

SMOKE, fit, folder = smoke("gan/mnist")
pytestmark = COMMAND_LINE


def shades(file):
    with Image.open(file) as image:
        return torch.tensor(np.asarray(image))


def test_a_penalty_at_every_eighth_step_and_a_grid_of_the_average_in_the_checkpoint():
    fit("--trainer.max_steps", "24", "--checkpoint_every", "2", "--trainer.log_every_n_steps", "1",
        "--test_after_fit", "false")  # fmt: skip
    rows = [r for r in metrics(folder()) if r["train/penalty"]]
    assert [int(r["step"]) for r in rows if float(r["train/penalty"]) > 0] == [0, 8]
    assert len(rows) == 12
    state = checkpoint(folder())["state_dict"]
    assert int(state["average.n_averaged"]) == 12
    torch.manual_seed(3)
    model = ImageGAN(None, channels=4, generator_channels=4)
    model.load_state_dict({k: v for k, v in state.items() if not k.startswith("penalty")})
    z = torch.randn(5, 64)
    assert torch.equal(model(z), model.average.module(z))
    assert not torch.allclose(model(z), model.generator(z))
    points = torch.randn(100, 64, generator=torch.Generator().manual_seed(GRID_SEED))
    with torch.no_grad():
        drawn = save_grid(Path("again.png"), model.average.module(points), 10)
    assert torch.equal(shades(drawn), shades(folder() / "grids/step_000012.png"))
    assert list(saved_grids(folder())) == [4, 8, 12]


def test_the_frechet_distance_by_scipys_root():
    a = torch.randn(50, 6, dtype=torch.float64) @ torch.randn(6, 6, dtype=torch.float64)
    b = torch.randn(40, 6, dtype=torch.float64) @ torch.randn(6, 6, dtype=torch.float64) + 0.3
    C, D = np.cov(a.numpy().T), np.cov(b.numpy().T)
    means = ((a.mean(0) - b.mean(0)) ** 2).sum().item()
    expected = means + np.trace(C + D - 2 * sqrtm(C @ D).real)
    assert frechet_distance(a, b) == pytest.approx(expected, rel=1e-10)
    assert frechet_distance(b, a) == pytest.approx(expected, rel=1e-10)


def test_the_frechet_distance_where_covariances_are_singular():
    a = torch.randn(10, 30)  # fewer samples than entries
    # Roots of eigenvalues of the size of rounding
    assert frechet_distance(a, a) == pytest.approx(0, abs=1e-4)
    assert frechet_distance(torch.zeros(3, 2), torch.ones(4, 2)) == pytest.approx(2)
    assert frechet_distance(torch.zeros(3, 1), torch.ones(4, 1)) == pytest.approx(1)


@pytest.mark.parametrize(("a", "b"), [((3, 2), (3, 4)), ((1, 2), (3, 2)), ((3,), (3,))])
def test_samples_that_have_no_frechet_distance(a, b):
    with pytest.raises(ValueError, match=r"two samples .* of one width with at least 2 rows, got"):
        frechet_distance(torch.zeros(a), torch.zeros(b))


def judged(*classes, sure=0.95):
    """Of images that the classifier takes for these classes."""
    rows = torch.full((len(classes), 10), (1 - sure) / 9)
    rows[torch.arange(len(classes)), torch.tensor(classes)] = sure
    seen = Features(torch.randn(len(classes), 4), rows)
    return score_digits(seen, seen)


def test_digits_of_all_classes_of_one_and_of_none():
    every = judged(*range(10), *range(10))
    assert (every.classes, every.confident) == (10, 1.0)
    assert every.entropy == pytest.approx(1)
    assert every.frechet == pytest.approx(0, abs=1e-4)
    one = judged(3, 3, 3)
    assert (one.classes, one.entropy, one.shares[3]) == (1, 0, 1)
    unsure = judged(1, 2, 3, sure=0.89)
    assert (unsure.classes, unsure.confident, unsure.entropy) == (0, 0, 0)
    uneven = judged(0, 0, 0, 5)
    assert uneven.shares.tolist() == [0.75, 0, 0, 0, 0, 0.25, 0, 0, 0, 0]
    by_hand = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25)) / math.log(10)
    assert uneven.entropy == pytest.approx(by_hand)


def test_the_table_by_hand():
    row = DigitsResult("r1, weight 1", "relativistic", "MNIST", 10, 2.5, 0.5, 9, 0.75)
    better = row._replace(penalty="dragan", frechet=1.0)
    other_data = row._replace(penalty="r2", data="other")
    truth = DigitsResult("real training digits", "", "MNIST", 0, 0.25, 1.0, 10, 1.0)
    lines = digits_table(row, [better, other_data], truth, torch.full((10,), 0.1), 7).splitlines()
    first = [line.split("  ")[0] for line in lines[4:8]]
    assert first == ["dragan", "r1, weight 1", "real training", "digits"]
    assert lines[5].split()[-6:] == ["10", "2.500", "50.0%", "9", "0.750", "<-"]
    assert "9: 10.0%" in lines[10]


# The data and the classifier


def test_the_split_is_even_and_no_image_is_in_both_parts():
    train, held_out = split()
    assert train.x.shape == (4000, 1, 28, 28)
    assert torch.bincount(train.label).tolist() == [400] * 10
    assert torch.bincount(held_out.label).tolist() == [100] * 10
    assert (train.x.min(), train.x.max()) == (-1, 1)
    ours, theirs = ({x.numpy().tobytes() for x in part.x} for part in (train, held_out))
    assert len(ours | theirs) == 5000
    first, second = mnist.split.__wrapped__()
    assert torch.equal(first.x, train.x)
    assert torch.equal(second.label, held_out.label)


def test_the_saved_classifier_is_as_right_as_it_says():
    told = json.loads(digit_classifier.FILE.with_suffix(".json").read_text())
    train, held_out = split()
    assert told["held_out_accuracy"] == pytest.approx(
        accuracy(load_classifier(), held_out), abs=1e-3
    )
    assert told["held_out_accuracy"] > 0.95
    assert told["training_digits"] == len(train.label)
    assert told["split_seed"] == mnist.SPLIT_SEED
    assert digit_classifier.FILE.stat().st_size < 2**20


def test_a_few_steps_of_the_classifiers_training():
    train, held_out = split()
    state = torch.get_rng_state()
    load_classifier.__wrapped__()
    assert torch.equal(torch.get_rng_state(), state)  # loading draws nothing
    network = digit_classifier.train(train, 60)
    assert accuracy(network, held_out) > 0.5


def test_shifted_images_are_moved_by_two_pixels_at_most():
    x = torch.full((200, 1, 28, 28), -1.0)
    x[:, 0, 10, 15] = 1
    moved = random_shift(x, torch.Generator().manual_seed(0))
    assert moved.shape == x.shape
    places = (moved[:, 0] == 1).nonzero()
    assert len(places) == 200
    assert sorted({r - 10 for r in places[:, 1].tolist()}) == [-2, -1, 0, 1, 2]
    assert sorted({c - 15 for c in places[:, 2].tolist()}) == [-2, -1, 0, 1, 2]
    assert (moved == -1).sum() == 200 * (28 * 28 - 1)


def test_a_grid_has_its_images_in_rows_black_on_white(tmp_path):
    images = torch.full((6, 1, 2, 2), -1.0)
    images[4] = 1
    found = shades(save_grid(tmp_path / "grid.png", images, 3))
    assert found.shape == (4, 6)
    assert (found[2:, 2:4] == 0).all()
    assert (found == 0).sum() == 4


def test_steps_that_a_picture_shows():
    assert spaced_evenly([4, 8], 6) == [4, 8]
    assert spaced_evenly(list(range(1, 1025)), 6) == [1, 4, 16, 64, 256, 1024]
    many = spaced_evenly(list(range(125, 3001, 125)), 6)
    assert (many[0], many[-1]) == (125, 3000)
    assert len(many) <= 6
