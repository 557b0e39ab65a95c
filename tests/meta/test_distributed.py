"""Tasks shared out over two processes give what one process gives."""

import datetime
import json
import os
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing

import hoglib as hog
from tests.meta import processes


def run(rank, folder):
    """What each process runs and writes down."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    # what Lightning reads where processes are started for it
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", MASTER_ADDR="localhost", MASTER_PORT="1")
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2,
        timeout=datetime.timedelta(seconds=60),
    )  # fmt: skip
    found = {"too few": processes.too_few(), **processes.everything()}
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


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
    multiprocessing.spawn(run, (tmp_path,), nprocs=2)
    mine = processes.everything()
    for rank in (0, 1):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
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
