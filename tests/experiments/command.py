"""Runs of the command line in an empty folder, and what they leave there."""

import csv
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import yaml
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


class Smoke(NamedTuple):
    """A config of configs/smoke, fit(*options), and folder(version, root) of a run."""

    config: Path
    fit: Callable[..., None]
    folder: Callable[..., Path]


def smoke(name):
    config = ROOT / f"configs/smoke/{name}.yaml"

    def fit(*args):
        assert run("fit", "--config", config, *args) == 0

    def folder(version=0, root="runs"):
        return Path(root) / "smoke" / name / f"version_{version}"

    return Smoke(config, fit, folder)


def options_of(name):
    """The options of a smoke config: those of the run, and what differs."""

    def merged(full, other):
        both = isinstance(full, dict) and isinstance(other, dict)
        return {**full, **{k: merged(full.get(k), v) for k, v in other.items()}} if both else other

    files = ROOT / f"configs/{name}.yaml", smoke(name).config
    return merged(*(yaml.safe_load(file.read_text()) for file in files))


def checkpoint(where):
    return torch.load(where / "last.ckpt", weights_only=True)


def metrics(where):
    with (where / "metrics.csv").open(newline="") as stream:
        return list(csv.DictReader(stream))


def assert_same_run(ours, theirs):
    """Bit for bit, but for the time that it took."""
    a, b = checkpoint(ours), checkpoint(theirs)
    for name in ("global_step", "lr_schedulers"):
        assert a[name] == b[name]
    assert_close(a["state_dict"], b["state_dict"], rtol=0, atol=0)
    for one, other in zip(a["optimizer_states"], b["optimizer_states"], strict=True):
        assert one["param_groups"] == other["param_groups"]
        assert_close(one["state"], other["state"], rtol=0, atol=0)
    history, other = (each["callbacks"].get("CurvatureMonitor", {"history": []})["history"] for each in (a, b))  # fmt: skip
    assert [one.pop("name") for one in history] == [one.pop("name") for one in other]
    assert_close(history, other, rtol=0, atol=0)
    untimed = [
        [{k: v for k, v in row.items() if not k.startswith("seconds/")} for row in metrics(where)]
        for where in (ours, theirs)
    ]
    assert untimed[0] == untimed[1]


def assert_refused(config, args, message, capsys):
    """What is wrong is said in one paragraph, and nothing is trained."""
    assert run("fit", "--config", config, *args) == 2
    error = capsys.readouterr().err
    assert re.search(message, error)
    assert len([line for line in error.splitlines() if line.startswith("error: ")]) == 1
    left = [{file.name for file in folder.iterdir()} for folder in Path().rglob("version_*")]
    assert not any("last.ckpt" in files or files <= {"config.yaml"} for files in left)
