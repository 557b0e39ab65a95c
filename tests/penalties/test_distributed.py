"""In two processes a penalty has the gradient of one process, to 1e-12, or is refused in time."""

import datetime
import itertools
import json
import os
import traceback
import warnings

import torch
import torch.distributed as dist
from torch import multiprocessing

from tests.penalties import lightning_cases, processes, single_cases

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
MATRIX = [
    (wrap, call)
    for wrap, call in itertools.product(processes.WRAPS, processes.CALLS)
    if wrap != "gradient_as_bucket_view" or call == "ddp"
]


def all_cases():
    """What is expected, a function and its arguments, by name."""
    cases = {}
    for wrap, call in MATRIX:
        for how in processes.LAYOUTS:
            expected = "mean" if how in RIGHT[wrap].get(call, ()) else "refused"
            cases[f"{wrap}, {call}, {how}"] = expected, processes.train, how, call, wrap
    cases |= single_cases.CASES
    return cases | {f"Lightning: {name}": case for name, case in lightning_cases.CASES.items()}


def run_all(rank, folder):
    """What each process runs and writes down."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    # what Lightning reads where processes are started for it
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", MASTER_ADDR="localhost", MASTER_PORT="1")
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2,
        timeout=datetime.timedelta(seconds=60),
    )  # fmt: skip
    found = {}
    for name, (_, case, *args) in all_cases().items():
        try:
            found[name] = case(*args)
        except Exception:
            found[name] = traceback.format_exc()
            break  # the other process may wait for this one
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def test_the_mean_gradient_or_an_error(tmp_path):
    """One test of all cases: to start two processes takes longer than what they do."""
    multiprocessing.spawn(run_all, (tmp_path,), nprocs=2)
    for rank in (0, 1):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        expected = {name: case[0] for name, case in all_cases().items()}
        wrong = {name: found.get(name) for name in expected if found.get(name) != expected[name]}
        assert not wrong, "\n".join(f"{name}: {what}" for name, what in wrong.items())
