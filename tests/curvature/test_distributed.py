"""Several processes that share the data compute what one process does, or raise all alike."""

import functools
import itertools
import traceback

import pytest
import torch
import torch.distributed as dist

import hoglib as hog
from hoglib.errors import HoglibError
from tests.curvature import shared_data
from tests.long_tail import FULL
from tests.rows import rows
from tests.several_processes import found_by_each

CASES = {
    f"{kind}, {data}": (kind, data)
    for kind, data in itertools.product(shared_data.KINDS, shared_data.DATA)
    if kind == "Hessian" or data in shared_data.FEW
}
MORE = {
    "algorithms": shared_data.algorithms,
    "float32": shared_data.in_single_precision,
    "steps of KFAC": shared_data.kfac_steps,
    "steps of NewtonCG": shared_data.newton_steps,
} | {
    f"Kronecker factors, {data}": functools.partial(shared_data.kronecker_factors, data)
    for data in ("one batch", "fewer batches than processes", "parts of unlike sizes")
}


@functools.cache
def results(rank, world):
    found = {name: shared_data.products(*case, rank, world) for name, case in CASES.items()}
    found["compiled"] = shared_data.products("Hessian", "one batch", rank, world, compile="eager")
    return found | {name: case(rank, world) for name, case in MORE.items()}


def run(rank, folder, found):
    world = dist.get_world_size()
    found |= results(rank, world)
    found["messages"] = shared_data.messages_of_a_product(rank, world)
    found["draws"] = shared_data.drawn_for_pieces(rank, world)
    found["unused"] = shared_data.warned_of_unused(rank, world)
    for name, (refused, *_) in shared_data.REFUSED.items():
        try:
            refused(rank, world)
            found[name] = "", "nothing was raised"
        except Exception as error:
            mine = isinstance(error, HoglibError) or str(error) in shared_data.MINE
            found[name] = type(error).__name__, str(error) if mine else traceback.format_exc()


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=FULL)])
def test_processes_equal_one(count, tmp_path):
    """One test of all cases: to start processes takes longer than what they do."""
    everyone, one = found_by_each(run, tmp_path, count), results(0, 1)
    for rank, found in enumerate(everyone):
        for case, expected in one.items():
            tolerance = 1e-5 if case == "float32" else 1e-11 if case in MORE else 1e-12
            got, want = torch.tensor(found[case]), torch.tensor(expected)
            error = float((got.double() - want).norm() / want.norm())
            assert error < tolerance, (rank, case, error)
            assert found[case] == everyone[0][case], (rank, case)
        assert torch.tensor(found["draws"]).diff(dim=0).norm() < 1e-12
        assert found["messages"] == [2, 2, 2, 2]  # the first ones small
        assert found["unused"] == ["none.weight, none.bias"]
        for name, (_, kind, words) in shared_data.REFUSED.items():
            if name in ("a process fails", "factors of a process fail") and rank == 1:
                kind, words = "ValueError", "the disk is full"
            assert found[name][0] == kind, (rank, name, *found[name])
            assert words in found[name][1], (rank, name)


@rows("processes", ["shard", "sharded"])
def test_one_process_has_all_of_the_data(processes):
    given = shared_data.DATA["a loader with an uneven last batch"](0, 1)[0]
    loss, params = shared_data.loss_and_params()
    shared = hog.HessianOperator(loss, params, given, processes=processes)
    alone = hog.HessianOperator(loss, params, given)
    assert torch.equal(shared.to_dense(), alone.to_dense())


def test_a_missing_process_group_raises(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"call torch.distributed.init_process_group\(\) first"):
        shared_data.operator(processes="sharded")
    shared_data.operator(processes=None)


def test_an_unknown_way_to_share_raises():
    with pytest.raises(ValueError, match="processes: expected one of shard, sharded; got 'all'"):
        shared_data.operator(processes="all")
