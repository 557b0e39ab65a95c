"""In two processes a penalty has the gradient of one process, to 1e-12, or is refused in time."""

import datetime
import itertools
import json
import os
import traceback
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing

from tests.penalties import processes, single_cases

ONE = ("one backward", "one backward, penalty first")
# The layouts of a step whose gradients are the mean, of each wrap and call; all others are refused.
RIGHT = {
    "plain": {
        "ddp": (
            "penalty alone", *ONE, "one forward", "penalty, then loss", "loss, then penalty",
            "three backwards",
        ),
        "loss by ddp, penalty by ddp.module": ONE,
        "loss by ddp.module, penalty by ddp": (
            "penalty alone", *ONE, "one forward", "loss, then penalty", "three backwards",
        ),
    },
    "static_graph": {
        "ddp": ("loss, then penalty", "three backwards"),
        "loss by ddp, penalty by ddp.module": ONE,
    },
}  # fmt: skip
RIGHT["find_unused_parameters"] = RIGHT["gradient_as_bucket_view"] = RIGHT["plain"]
MATRIX = list(itertools.product(processes.WRAPS, processes.CALLS))


def run_all(rank, folder):
    """What each process runs; the first one writes down what came of each case."""
    from tests.penalties import lightning_cases

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    # what Lightning reads where processes are started for it
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", MASTER_ADDR="localhost", MASTER_PORT="1")
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2,
        timeout=datetime.timedelta(seconds=60),
    )  # fmt: skip
    cells = itertools.product(processes.WRAPS, processes.CALLS, processes.LAYOUTS)
    cases = {f"{wrap}, {call}, {how}": (processes.train, how, call, wrap) for wrap, call, how in cells}
    cases |= {name: case[1:] for name, case in single_cases.CASES.items()}
    cases |= {f"Lightning: {name}": case[1:] for name, case in lightning_cases.CASES.items()}
    found = {}
    for name, (case, *args) in cases.items():
        try:
            found[name] = case(*args)
        except Exception:
            found[name] = traceback.format_exc()
            break  # the other process may wait for this one
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    multiprocessing.spawn(run_all, (folder,), nprocs=2)
    both = [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]
    assert both[0] == both[1]
    return both[0]


@pytest.mark.parametrize(("wrap", "call"), MATRIX, ids=[", ".join(cell) for cell in MATRIX])
def test_the_mean_gradient_or_an_error(found, wrap, call):
    right = RIGHT[wrap].get(call, ())
    expected = {how: "mean" if how in right else "refused" for how in processes.LAYOUTS}
    assert {how: found.get(f"{wrap}, {call}, {how}") for how in processes.LAYOUTS} == expected


@pytest.mark.parametrize("case", single_cases.CASES)
def test_out_of_the_ordinary(found, case):
    assert found.get(case) == single_cases.CASES[case][0]


def test_lightning(found):
    pytest.importorskip("lightning")
    from tests.penalties import lightning_cases

    expected = {name: case[0] for name, case in lightning_cases.CASES.items()}
    assert {name: found.get(f"Lightning: {name}") for name in expected} == expected
