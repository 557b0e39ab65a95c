"""Tasks shared out over two processes give what one process gives."""

import pytest
import torch

import hoglib as hog
from tests.meta import processes
from tests.several_processes import found_by_each


def run(rank, folder, found):
    found |= {"too few": processes.too_few(), **processes.everything()}


def flat(value):
    if isinstance(value, float):
        return [value]
    return [
        x for part in (value.values() if isinstance(value, dict) else value) for x in flat(part)
    ]


@pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers")
@pytest.mark.filterwarnings("ignore:The 'val_dataloader' does not have many workers")
@pytest.mark.filterwarnings("ignore:The 'test_dataloader' does not have many workers")
@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.`")  # Lightning's own
def test_two_processes_equal_one(tmp_path):
    """One test of all cases: to start two processes takes longer than what they do."""
    both, mine = found_by_each(run, tmp_path), processes.everything()
    for found in both:
        assert "at least one task for each of the 2 processes, got 1" in found.pop("too few")
        assert found.keys() == mine.keys()
        for case in mine:
            ours, theirs = torch.tensor(flat(found[case])), torch.tensor(flat(mine[case]))
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14, msg=case)


def test_alone_every_task_is_mine():
    tasks = processes.tasks(3)
    mine, weight = hog.meta.shard(tasks)
    assert mine is tasks
    assert weight == 1.0
