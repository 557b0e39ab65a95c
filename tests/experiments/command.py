"""Runs of the command line in an empty folder, and what they leave there."""

import csv
import re
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from experiments.__main__ import main

ROOT = Path(__file__).parents[2]

COMMAND_LINE = [
    pytest.mark.usefixtures("in_an_empty_folder"),
    # Lightning and jsonargparse, on torch 2.13: nothing here can change them
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning"),
]

DRAWN = pytest.mark.usefixtures("pictures")


def run(*args):
    return main([str(arg) for arg in (*args, "--trainer.enable_progress_bar", "false")])


def checkpoint(where):
    return torch.load(where / "last.ckpt", weights_only=True)


def metrics(where):
    with (where / "metrics.csv").open(newline="") as stream:
        return list(csv.DictReader(stream))


def assert_same_run(ours, theirs):
    a, b = checkpoint(ours), checkpoint(theirs)
    assert a["global_step"] == b["global_step"]
    assert_close(a["state_dict"], b["state_dict"], rtol=0, atol=0)
    assert_close(a["optimizer_states"], b["optimizer_states"], rtol=0, atol=0)
    assert metrics(ours) == metrics(theirs)


def assert_refused(config, args, message, capsys):
    """What is wrong is said in one paragraph, and nothing is trained."""
    assert run("fit", "--config", config, *args) == 2
    error = capsys.readouterr().err
    assert re.search(message, error)
    assert len([line for line in error.splitlines() if line.startswith("error: ")]) == 1
    assert not list(Path().rglob("last.ckpt"))
