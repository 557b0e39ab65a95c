"""Seeds of the data: each has numbers of its own."""

import pytest
import torch
from torch.testing import assert_close

from experiments.data import mixture, sinusoid
from experiments.data.stream import seeded


def test_every_seed_has_numbers_of_its_own():
    """Those that torch's own seeding takes for one, and those of neighbours."""
    seeds = [0, 1, 2**32, 2**32 + 1, 2**40, 2**41, 2**42, 4097 * 2**20 + 3, 2**63]
    drawn = [torch.rand(4, generator=seeded(seed)) for seed in seeds]
    assert len({tuple(numbers.tolist()) for numbers in drawn}) == len(seeds)


def test_small_seeds_are_torchs():
    for seed in (0, 7, 2**32 - 1):
        assert_close(
            torch.rand(4, generator=seeded(seed)),
            torch.rand(4, generator=torch.Generator().manual_seed(seed)), rtol=0, atol=0,
        )  # fmt: skip


def points(*args):
    return {tuple(point) for point in mixture.sample_points("gaussians", *args).tolist()}


def waves(*args):
    drawn = sinusoid.sample_waves(*args)
    return set(zip(drawn.amplitude.flatten().tolist(), drawn.phase.flatten().tolist(), strict=True))


HELD_OUT = {
    "points": (points, mixture, [(256, 0), (5000, 2**40), (10000, 0)]),
    "waves": (waves, sinusoid, [(25, 10, 10, 0), (100, 10, 100, 2**40), (600, 10, 100, 0)]),
}


@pytest.mark.parametrize("name", HELD_OUT)
def test_held_out_data_is_not_that_of_training(name):
    draw, module, args = HELD_OUT[name]
    assert (module.VALIDATION_SEED, module.TEST_SEED) == (2**40, 0)
    training, validation, test = (draw(*each) for each in args)
    assert not training & validation
    assert not training & test
    assert not validation & test
