"""Stored, projected gradients of examples against per-example gradients and `hog.influence`."""

import os
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

import hoglib as hog
from tests.rows import rows

N, Q = 12, 3


def problem(criterion=F.cross_entropy):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    loss, params = hog.functional_loss(model, criterion), hog.trainable_params(model)
    x, t = torch.randn(N + Q, 4, dtype=torch.float64), torch.arange(N + Q) % 3
    return loss, params, (x[:N], t[:N]), (x[N:], t[N:])


def gradients(loss, params, data):
    each = hog.per_example_gradients(loss, params, data)[1]
    return torch.cat([g.flatten(1) for g in each.values()], 1)


WEIGHTED = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64))


@rows("criterion", [F.cross_entropy, WEIGHTED], ids=["mean", "weighted"])
@rows("batches", [1, 2, 5], ids=str)
def test_all_numbers(tmp_path, criterion, batches):
    loss, params, data, query = problem(criterion)
    parts = [tuple(x[i::1][:0] for x in data) for i in ()] or [
        tuple(x[i : i + -(-N // batches)] for x in data) for i in range(0, N, -(-N // batches))
    ]
    out = tmp_path / f"{batches}{criterion is WEIGHTED}.npy"
    store = hog.gradient_store(loss, params, parts, out=out, project=None)
    expected = gradients(loss, params, data)
    assert_close(store.rows, expected)
    ones = [tuple(x[i : i + 1] for x in query) for i in range(Q)]
    alone = torch.cat([gradients(loss, params, one) for one in ones])
    assert_close(store.products(query), expected @ alone.T)


def test_influence_of_a_solver(tmp_path):
    loss, params, data, query = problem()
    K = hog.KFACOperator(loss, params, data, kind="exact")
    store = hog.gradient_store(
        loss,
        params,
        data,
        out=tmp_path / "a.npy",
        project=None,
        by_module=True,
        solver=K,
        damping=0.1,
    )
    expected = hog.influence(loss, params, data, query, solver=K, damping=0.1)
    assert_close(store.influence(query), expected)
    parts = store.influence(query, by_module=True)
    assert [*parts] == ["0", "2"]
    assert_close(sum(parts.values()), expected)
    some = {n: p for n, p in params.items() if n.startswith("0.")}
    width = sum(p.numel() for p in some.values())
    assert store.modules["0"] == slice(0, width)


def test_projections_are_unbiased_and_keep_small_modules(tmp_path):
    loss, params, data, query = problem()
    exact = hog.gradient_store(loss, params, data, out=tmp_path / "exact.npy", project=None)
    seeds = range(150)
    found = torch.stack(
        [
            hog.gradient_store(
                loss, params, data, out=tmp_path / f"{seed}.npy", project=8, seed=seed
            ).products(query)
            for seed in seeds
        ]
    )
    expected, error = exact.products(query), found.std(0) / len(seeds) ** 0.5
    assert ((found.mean(0) - expected).abs() < 4.5 * error).all()
    norms = exact.rows.norm(dim=1)[:, None] * gradients(loss, params, query).norm(dim=1)
    assert (found.std(0) < 1.3 * (2 / 8) ** 0.5 * norms).all()
    small = hog.gradient_store(
        loss, params, data, out=tmp_path / "small.npy", project=18, by_module=True
    )
    assert small.rows.shape == (N, 36)  # 25 numbers on 18, and 18 as they are
    assert_close(small.rows[:, 18:], exact.rows[:, 25:])


def test_an_interrupted_call_goes_on(tmp_path):
    loss, params, data, query = problem()
    whole = hog.gradient_store(loss, params, data, out=tmp_path / "whole.npy", project=8)
    pieces = [tuple(x[i : i + 4] for x in data) for i in range(0, N, 4)]

    class Fails(list):
        def __init__(self, batches):
            super().__init__(batches)
            self.left = 0

        def __iter__(self):
            for i, batch in enumerate(super().__iter__()):
                if self.left == 1 and i == 2:
                    raise KeyboardInterrupt
                yield batch
            self.left += 1

    with pytest.raises(KeyboardInterrupt):
        hog.gradient_store(loss, params, Fails(pieces), out=tmp_path / "part.npy", project=8)
    again = hog.gradient_store(loss, params, data, out=tmp_path / "part.npy", project=8)
    assert torch.equal(again.rows, whole.rows)
    assert_close(again.products(query), whole.products(query))


REFUSED = {
    "a shuffling loader": (lambda *p: {"data": torch.utils.data.DataLoader([*zip(*p[2], strict=True)], shuffle=True)}, ValueError, "shuffle=False"),
    "a solver without damping": (lambda *p: {"solver": hog.KFACOperator(*p[:3])}, ValueError, "together"),
    "damping without a solver": (lambda *p: {"damping": 1.0}, ValueError, "together"),
    "a solver by name": (lambda *p: {"solver": "ekfac", "damping": 1.0}, TypeError, "hog.KFACOperator"),
    "no numbers": (lambda *p: {"project": 0}, ValueError, "at least 1"),
    "NaN in the data": (lambda *p: {"data": (p[2][0] * torch.nan, p[2][1])}, hog.errors.NonFiniteError, "finite"),
    "ignored labels only": (lambda *p: {"data": (p[2][0], torch.full((N,), -100))}, ValueError, "all ignored"),
    "no batch": (lambda *p: {"data": []}, ValueError, "at least one batch"),
    "no folder": (lambda *p: {"out": "/proc/nowhere/rows.npy"}, OSError, "Make its folder"),
}  # fmt: skip


@rows("name", REFUSED)
def test_errors_say_what_to_do(name, tmp_path):
    given = problem()
    change, error, words = REFUSED[name]
    loss, params, data, _ = given
    options = {"data": data, "out": tmp_path / f"{len(name)}.npy", **change(*given)}
    with pytest.raises(error, match=words):
        hog.gradient_store(loss, params, **options)


OTHER_LOSSES = {
    "criterion": lambda model: hog.functional_loss(model, nn.CrossEntropyLoss(label_smoothing=0.01)),
    "module": lambda model: hog.functional_loss(nn.Sequential(model[0], nn.ReLU(), model[2]), F.cross_entropy),
}  # fmt: skip


@rows("name", OTHER_LOSSES)
@rows("solved", [False, True], ids=["plain", "solver"])
def test_a_file_of_another_loss_is_refused(name, solved, tmp_path):
    loss, params, data, _ = problem()
    more = {"solver": hog.KFACOperator(loss, params, data), "damping": 0.1} if solved else {}
    # the last example is ignored: an earlier row is compared
    data = data[0], data[1].where(torch.arange(N) < N - 1, -100)
    call = partial(hog.gradient_store, out=tmp_path / f"{name}{solved}.npy", project=8, **more)
    before = call(loss, params, data).rows.clone()
    pieces = [tuple(x[i : i + 5] for x in data) for i in range(0, N, 5)]
    assert torch.equal(call(loss, params, pieces).rows, before)
    if name == "criterion" and solved:
        return  # as near as rounding may come through the inverse of a matrix
    with pytest.raises(ValueError, match="expected the loss of the stored gradients"):
        call(OTHER_LOSSES[name](loss.model), params, data)


def test_a_file_that_is_cut_off_is_refused(tmp_path):
    loss, params, data, _ = problem()
    out = tmp_path / "a.npy"
    hog.gradient_store(loss, params, data, out=out)
    os.truncate(out, out.stat().st_size - 8)
    with pytest.raises(ValueError, match="cut off"):
        hog.gradient_store(loss, params, data, out=out)


def test_a_model_that_is_one_layer_has_one_module(tmp_path):
    layer = nn.Linear(4, 3).double()
    _, _, data, query = problem()
    given = hog.functional_loss(layer, F.cross_entropy), hog.trainable_params(layer), data
    store = hog.gradient_store(*given, out=tmp_path / "a.npy", by_module=True)
    assert_close(store.products(query, by_module=True), {"": store.products(query)})


def test_projections_of_half_precision_are_sums_in_float32(tmp_path):
    loss = lambda p, x: ((x.to(p) @ p - 1).square() / 2).mean()  # noqa: E731, gradients -x at p = 0
    x, p = (
        torch.randn(3, 4096, generator=torch.Generator().manual_seed(0)).bfloat16(),
        torch.zeros(4096),
    )
    wide, half = (
        hog.gradient_store(loss, q, x, out=tmp_path / f"{q.dtype}.npy", project=8)
        for q in (p, p.bfloat16())
    )
    assert_close(half.rows, wide.rows)


def test_a_store_of_another_model(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double().eval()
    _, _, data, query = problem()
    given = hog.functional_loss(model, F.cross_entropy), hog.trainable_params(model, "0.*"), data
    store = hog.gradient_store(*given, out=tmp_path / "a.npy")
    model[1].running_mean.add_(1)
    with pytest.raises(ValueError, match="make another store"):
        store.products(query)


def test_a_store_of_other_values(tmp_path):
    loss, params, data, query = problem()
    store = hog.gradient_store(loss, params, data, out=tmp_path / "a.npy")
    assert len(repr(store)) < 600
    with pytest.raises(ValueError, match="made with by_module=True"):
        store.products(query, by_module=True)
    with pytest.raises(ValueError, match=r"solver=hog\.KFACOperator"):
        store.influence(query)
    with torch.no_grad():
        params["0.weight"].mul_(2)
    with pytest.raises(ValueError, match="make another store"):
        store.products(query)
    with pytest.raises(ValueError, match="holds another one: its params"):
        hog.gradient_store(loss, params, data, out=tmp_path / "a.npy")
