"""How many of hoglib's own functions a warm call runs in Python, on a small network where they are most of
the time. Counts, not times: where one grows, the message says in which package, and by which functions.

Run as a script, it prints the table; Python 3.12 and later have no call for a comprehension."""

import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hoglib as hog

ROOT = str(Path(hog.__file__).parent) + "/"
CALLS_BEFORE = 20  # warm; no power of two, after which sums of the state are compared


def network():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 3))
    loss, params = hog.functional_loss(model, F.cross_entropy), hog.trainable_params(model)
    return loss, params, [(torch.randn(64, 10), torch.randint(3, (64,))) for _ in range(4)]


def hvp():
    loss, params, batches = network()
    v = {name: torch.randn_like(p) for name, p in params.items()}
    return lambda: hog.hvp(loss, params, v, batches[0])


def product_over_four_batches():
    H = hog.HessianOperator(*network())
    v = torch.randn(H.shape[0])
    return lambda: H @ v


def gradient_penalty(kind):
    critic = nn.Sequential(nn.Linear(10, 32), nn.SiLU(), nn.Linear(32, 1))
    points = [torch.randn(64, 10) for _ in range(1 + (kind == "wgan_gp"))]
    return lambda: getattr(hog.penalties, kind)(critic, *points)


def kfac_update():
    loss, params, batches = network()
    return hog.KFACOperator(loss, params, batches[0]).update


CASES = {
    "hvp": hvp,
    "H @ v": product_over_four_batches,
    "wgan_gp": lambda: gradient_penalty("wgan_gp"),
    "r1": lambda: gradient_penalty("r1"),
    "KFAC update": kfac_update,
}
# name -> calls by package, of Python 3.11
TABLE = {
    "hvp": {
        "": 14,
        "_core": 7,
        "_core/messages": 8,
        "_core/modules": 12,
        "_core/substrate": 26,
        "_core/torch_api": 37,
        "capture": 1,
        "curvature/maps": 11,
        "stand_ins": 9,
        "verification": 5,
    },
    "H @ v": {
        "": 65,
        "_core": 13,
        "_core/messages": 17,
        "_core/modules": 48,
        "_core/numerics": 5,
        "_core/runtime": 10,
        "_core/substrate": 83,
        "_core/torch_api": 138,
        "capture": 1,
        "curvature/algebra": 28,
        "curvature/batches": 33,
        "curvature/maps": 40,
        "curvature/operators": 14,
        "curvature/sums": 64,
        "stand_ins": 36,
        "verification": 5,
    },
    "wgan_gp": {
        "": 6,
        "_core": 4,
        "_core/messages": 5,
        "_core/modules": 13,
        "_core/numerics": 2,
        "_core/runtime": 1,
        "_core/substrate": 15,
        "_core/torch_api": 42,
        "capture": 1,
        "curvature/batches": 1,
        "ops": 1,
        "penalties": 60,
        "stand_ins": 8,
        "verification": 5,
    },
    "r1": {
        "": 6,
        "_core": 4,
        "_core/messages": 3,
        "_core/modules": 13,
        "_core/numerics": 2,
        "_core/runtime": 1,
        "_core/substrate": 15,
        "_core/torch_api": 35,
        "capture": 1,
        "curvature/batches": 1,
        "penalties": 50,
        "stand_ins": 8,
        "verification": 5,
    },
    "KFAC update": {
        "": 24,
        "_core": 4,
        "_core/messages": 19,
        "_core/modules": 20,
        "_core/numerics": 2,
        "_core/runtime": 33,
        "_core/substrate": 38,
        "_core/torch_api": 93,
        "curvature/algebra": 13,
        "curvature/batches": 17,
        "curvature/kronecker": 298,
        "curvature/maps": 60,
        "curvature/sums": 35,
        "stand_ins": 3,
        "verification": 5,
    },
}


def count(call):
    """The calls of functions in hoglib, by package and function."""
    found = Counter()

    def profile(frame, event, _):
        file, name = frame.f_code.co_filename, frame.f_code.co_qualname
        if event == "call" and file.startswith(ROOT):
            found[file.removeprefix(ROOT).rpartition("/")[0], name] += 1

    for _ in range(CALLS_BEFORE):
        call()
    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(before)
    return found


def by_package(found):
    packages = Counter()
    for (package, _), number in found.items():
        packages[package] += number
    return dict(sorted(packages.items()))


@pytest.mark.parametrize("name", CASES)
def test_a_warm_call_runs_no_more_of_hoglib(name, monkeypatch):
    # what other tests have imported adds calls
    monkeypatch.setattr("hoglib.ring.has_dynamo", lambda: False)
    monkeypatch.setattr("hoglib._core.torch_api.torch_sharding.has_fsdp", lambda: False)
    found = count(CASES[name]())
    grown = [
        f"{package or 'hoglib'}: {number}, {TABLE[name].get(package, 0)} before: "
        + ", ".join(f"{f} {n}" for (at, f), n in found.most_common() if at == package)
        for package, number in by_package(found).items()
        if number > TABLE[name].get(package, 0)
    ]
    total, before = sum(found.values()), sum(TABLE[name].values())
    if total > before:
        pytest.fail("\n".join([f"{name}: {total} calls, {before} before", *grown]), pytrace=False)


if __name__ == "__main__":
    for name, make in CASES.items():
        print(f"    {name!r}: {by_package(count(make()))},")
