"""Streams of batches: each goes on where it was, belongs to its seed, and has no held-out data in it."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from experiments.few_shot import sinusoid
from experiments.few_shot.episodes import Episodes
from experiments.few_shot.sinusoid import SinusoidTasks
from experiments.forces.clusters import Clusters
from experiments.language.topics import TopicTasks, Windows
from experiments.pinn.squares import Square
from experiments.shared import mixture
from experiments.shared.digits import Digits
from experiments.shared.mixture import Points
from experiments.shared.mnist import Mnist
from experiments.shared.noisy_digits import NoisyDigits
from experiments.shared.stream import Stream, seeded
from tests.experiments.test_forces import SMALL

FEW = {"iterations": 5, "tasks": 2}
STREAMS = {
    "points": lambda seed: Points(iterations=5, batch=3, seed=seed).train_dataloader(),
    "waves": lambda seed: SinusoidTasks(**FEW, seed=seed).train_dataloader(),
    "images": lambda seed: Mnist(iterations=5, batch=3, seed=seed).train_dataloader(),
    "noisy digits": lambda seed: Stream(NoisyDigits(batch=30, seed=0).batch_of, 5, seed),
    "digits": lambda seed: Stream(Digits(batch=30, seed=0).batch_of, 5, seed),
    "squares": lambda seed: Square(iterations=5, batch=4, seed=seed).train_dataloader(),
    "episodes": lambda seed: Episodes(**FEW, seed=seed).train_dataloader(),
    "windows": lambda seed: Windows(iterations=5, batch=3, held_out=5, seed=seed).train_dataloader(),
    "topics": lambda seed: TopicTasks(**FEW, held_out=5, seed=seed).train_dataloader(),
}  # fmt: skip


def numbers(batch):
    """Those of the first tensor of a batch."""
    return tuple(batch.flatten().tolist()) if isinstance(batch, Tensor) else numbers(batch[0])


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_belongs_to_its_seed_goes_on_where_it_was_and_never_repeats(name):
    stream, other = STREAMS[name](1), STREAMS[name](9)
    whole = list(stream)
    assert len(whole) == len(stream) == 5
    assert len({numbers(batch) for batch in (*whole, *stream, *other)}) == 15
    again, resumed = STREAMS[name](1), STREAMS[name](9)
    iterator = iter(again)
    assert_close([next(iterator), next(iterator)], whole[:2], rtol=0, atol=0)
    resumed.load_state_dict(again.state_dict())
    assert_close(list(resumed), whole[2:], rtol=0, atol=0)


FIXED = {
    "gaussians": lambda seed: Points("gaussians", seed=seed),
    "swiss roll": lambda seed: Points("swiss_roll", seed=seed),
    "waves": lambda seed: SinusoidTasks(seed=seed),
    "episodes": lambda seed: Episodes(val_tasks=5, test_tasks=5, ways=3, tasks=2, seed=seed),
}


@pytest.mark.parametrize("name", FIXED)
def test_held_out_data_do_not_depend_on_the_seed(name):
    ours, others = (
        [list(data.val_dataloader()), list(data.test_dataloader())]
        for data in map(FIXED[name], (0, 1))
    )
    assert_close(ours, others, rtol=0, atol=0)


def test_clusters_are_those_of_the_seed_and_held_out_ones_are_the_same_for_any_number():
    data, same, other = (Clusters(**SMALL, seed=seed) for seed in (0, 0, 1))
    assert_close(data.train, same.train, rtol=0, atol=0)
    assert not torch.equal(data.train.x, other.train.x)
    more = Clusters(**{**SMALL, "train": 9}, seed=0)
    assert_close(more.held_out, data.held_out, rtol=0, atol=0)


def test_every_seed_has_numbers_of_its_own():
    """Those that torch's own seeding takes for one, and those of neighbours."""
    seeds = [0, 1, 2**32, 2**32 + 1, 2**40, 2**41, 2**42, 4097 * 2**20 + 3, 2**63]
    drawn = [torch.rand(4, generator=seeded(seed)) for seed in seeds]
    assert len({tuple(numbers.tolist()) for numbers in drawn}) == len(seeds)
    for seed in (0, 7, 2**32 - 1):  # small ones are torch's
        theirs = torch.rand(4, generator=torch.Generator().manual_seed(seed))
        assert_close(torch.rand(4, generator=seeded(seed)), theirs, rtol=0, atol=0)


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
