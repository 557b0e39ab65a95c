"""Gradients of single examples, and influence functions against training anew."""

import re
from copy import deepcopy

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

import hoglib as hog
from hoglib.curvature.examples import example_gradients
from tests.curvature.problems import CRITERIA, F64, MODELS, draw, problem
from tests.models import Fn
from tests.refused import refused
from tests.rows import rows

APART = [name for name in MODELS if name != "CNN with BatchNorm in train"]


@rows("name", APART)
def test_their_mean_is_the_gradient_of_the_batch(name):
    loss, params, batch = problem(name)
    # the LSTM has no rule for vmap: one after the other
    values, gradients = hog.per_example_gradients(loss, params, batch, chunk_size=3)
    one = tuple(t[4:5] for t in batch)
    expected = torch.autograd.grad(loss(params, one), list(params.values()), allow_unused=True)
    for key, g in zip(params, expected, strict=True):
        assert_close(gradients[key][4], torch.zeros_like(params[key]) if g is None else g)
    whole = torch.autograd.grad(loss(params, batch), list(params.values()), allow_unused=True)
    for key, g in zip(params, whole, strict=True):
        if g is not None:
            assert_close(gradients[key].mean(0), g)
    assert_close(values.mean(), loss(params, batch).detach())
    assert all(p.grad is None for p in params.values())


@rows(("names", "values"), [("*", lambda w: w), ("first*", lambda w: w.clamp(-0.1, 0.1))])
def test_data_that_forward_sets_is_no_wrapper_of_the_transform(names, values):
    """pytorch/pytorch#184876, which ends the process."""
    first, last = nn.Linear(3, 4, dtype=F64), nn.Linear(4, 2, dtype=F64)
    put = lambda: setattr(last.weight, "data", values(last.weight.data))  # noqa: E731
    model = Fn(lambda net, x: (put(), net.last(net.first(x)))[1], first=first, last=last)
    loss, params = (
        hog.functional_loss(model, F.cross_entropy),
        hog.trainable_params(model, names),
    )
    batch = draw(5, 3), torch.arange(5) % 2
    alone = [rows_of(loss, params, (x[None], y[None])) for x, y in zip(*batch, strict=True)]
    assert_close(rows_of(loss, params, batch), torch.cat(alone))
    modes = "forward-over-reverse", "reverse-over-reverse"
    assert_close(*(hog.hvp(loss, params, params, batch, mode=mode)[1] for mode in modes))
    assert_close(*(hog.jvp(model, batch[0], batch[0], mode=m)[1] for m in ("forward", "reverse")))


def rows_of(loss, params, batch):
    """The gradient of each example."""
    _, gradients = hog.per_example_gradients(loss, params, batch)
    return torch.cat([g.reshape(len(g), -1) for g in gradients.values()], 1)


def ghosts(loss, params, batch):
    """Norms and products as they are computed, and by the gradients."""
    rows = rows_of(loss, params, batch)
    assert_close(hog.curvature.per_example_gradient_norms(loss, params, batch), rows.norm(dim=1))
    products = hog.curvature.per_example_gradient_products(loss, params, batch)
    assert_close(products, rows @ rows.T)


@rows("criterion", CRITERIA)
@rows("name", APART)
def test_norms_and_products_are_those_of_the_gradients(name, criterion):
    ghosts(*problem(name, criterion))


@rows("weighted", [False, True])
def test_layers_are_compared_at_every_power_of_two(weighted, monkeypatch):
    compared = []
    check = example_gradients.checked_run
    monkeypatch.setattr(
        example_gradients, "checked_run", lambda *a: compared.append(1) or check(*a)
    )
    torch.manual_seed(0)
    criterion = nn.CrossEntropyLoss(weight=draw(3).exp() if weighted else None, ignore_index=1)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    loss, params = hog.functional_loss(model, criterion), hog.trainable_params(model)
    labels = torch.arange(6) % 3
    for call in range(1, 9):
        batch = draw(6, 4), labels[torch.randperm(6)]
        expected = rows_of(loss, params, batch).norm(dim=1)
        assert_close(hog.curvature.per_example_gradient_norms(loss, params, batch), expected)
        assert len(compared) == call.bit_length()


def test_layers_are_compared_where_the_data_decides_for_other_operations():
    def run(net, x):
        y = net.first(x)
        return net.last(y if x[0, 0] > 0 else y * y.mean(0))

    model = Fn(run, first=nn.Linear(3, 4), last=nn.Linear(4, 2)).double()
    loss, params = hog.functional_loss(model, F.mse_loss), hog.trainable_params(model)
    for sign in (1, 1, -1, 1, -1):
        batch = sign * draw(5, 3).abs(), draw(5, 2)
        expected = rows_of(loss, params, batch).norm(dim=1)
        assert_close(hog.curvature.per_example_gradient_norms(loss, params, batch), expected)


def test_clipped_gradients_are_taken_as_they_are():
    def run(net, x):
        return net.last(hog.ops.clip_gradient(net.first(x).tanh(), bound=0.05))

    torch.manual_seed(0)
    clipped = Fn(run, first=nn.Linear(3, 4), last=nn.Linear(4, 2))
    loss = hog.functional_loss(clipped.double(), F.mse_loss)
    given = loss, hog.trainable_params(loss.model), (draw(5, 3), 3 * draw(5, 2))
    ghosts(*given)
    with pytest.raises(hog.errors.UnsupportedError, match=r"^KFACOperator: .*clip_gradient"):
        hog.KFACOperator(*given).trace()


@pytest.mark.parametrize("length", [2, 40], ids=["few positions", "many positions"])
def test_shared_weights_take_no_gradients(length, log):
    """Tokens that come twice, padding, positions, and a convolution with groups."""

    def run(net, tokens):
        h = net.norm(net.first(net.table(tokens)).tanh())
        return net.head(net.conv(h.mT).sin().mean(-1))

    torch.manual_seed(0)
    model = Fn(
        run, table=nn.Embedding(9, 8, padding_idx=0), first=nn.Linear(8, 12), norm=nn.LayerNorm(12),
        conv=nn.Conv1d(12, 12, 3, padding=1, groups=3), head=nn.Linear(12, 5),
    )  # fmt: skip
    loss = hog.functional_loss(model.double(), F.cross_entropy)
    tokens = torch.randint(9, (6, length))
    tokens[:, 1] = tokens[:, 0]
    batch = tokens, torch.arange(6) % 5
    params = hog.trainable_params(loss.model)
    ghosts(loss, params, batch)
    assert "gradients of single examples" not in log.text
    assert all(p.grad is None for p in params.values())


def test_norms_of_other_losses(log):
    """A loss without outputs, a weighted criterion, and parameters that no layer uses alone."""
    x = draw(6, 3)
    loss = lambda p, x: (x @ p["w"]).sin().mean()  # noqa: E731
    ghosts(loss, {"w": draw(3, 2)}, x)
    model = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)).double()
    ghosts(hog.functional_loss(model, F.mse_loss), hog.trainable_params(model), (x, draw(6, 2)))
    assert re.search(r"gradients of single examples, because of .*weight.original", log.text)
    with pytest.raises(hog.errors.ArgumentValueError, match="mixes the examples"):
        hog.curvature.per_example_gradient_norms(*problem("CNN with BatchNorm in train"))
    log.clear()
    plain = nn.Linear(3, 2).double()
    weights = torch.tensor([1.0, 3.0], dtype=F64)
    weighted = hog.functional_loss(plain, nn.CrossEntropyLoss(weight=weights, reduction="sum"))
    ghosts(weighted, hog.trainable_params(plain), (x, torch.arange(6) % 2))
    assert "gradients of single examples" not in log.text
    params, pair = hog.trainable_params(plain.half()), (x.half(), draw(6, 2).half())
    for size in (1e3, 1e-4):  # float16 has no squares of these norms
        by_layers = hog.functional_loss(plain, lambda y, t, k=size: k * F.mse_loss(y, t))
        for half in (by_layers, lambda p, batch, loss=by_layers: loss(p, batch)):
            norms = hog.curvature.per_example_gradient_norms(half, params, pair)
            expected = rows_of(half, params, pair).double().norm(dim=1)
            assert_close(norms.double(), expected, rtol=1e-2, atol=0)


def test_batches_of_other_forms_and_what_is_refused():
    x = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    loss = lambda p, batch: (batch["x"] @ p * batch["scale"]).square().mean()  # noqa: E731
    _, g = hog.per_example_gradients(loss, torch.ones(2), {"x": x, "scale": torch.tensor(2.0)})
    assert_close(g, torch.tensor([[8.0, 0.0], [0.0, 32.0]]))
    with pytest.raises(hog.errors.ArgumentValueError, match="mixes the examples"):
        hog.per_example_gradients(*problem("CNN with BatchNorm in train"))
    with pytest.raises(hog.errors.ArgumentTypeError, match="leading dimension"):
        hog.per_example_gradients(loss, torch.ones(2), {"x": 1.0})
    with pytest.raises(hog.errors.ArgumentValueError, match="at least one example"):
        hog.per_example_gradients(loss, torch.ones(2), {"x": x[:0]})
    ctc = lambda p, b: F.ctc_loss((b[0] * p).log_softmax(-1).transpose(0, 1), *b[1:])  # noqa: E731
    joined = draw(2, 4, 3), torch.tensor([1, 2, 1]), torch.tensor([4, 4]), torch.tensor([1, 2])
    aside = lambda p, b: (b[1] * p).square().mean()  # noqa: E731
    for one, batch in ((ctc, joined), (aside, (torch.ones(4), draw(5, 3)))):
        with pytest.warns(match="a row for each example, and put the examples first"):
            hog.per_example_gradients(one, torch.ones(3).double(), batch)


def test_the_noise_scale():
    loss, params, batch = problem("ReLU", n=40)
    found = hog.curvature.gradient_noise_scale(loss, params, [tuple(t[:17] for t in batch), tuple(t[17:] for t in batch)])  # fmt: skip
    rows = rows_of(loss, params, batch)
    variance = rows.var(0).sum()
    square = rows.mean(0).square().sum() - variance / 40
    assert_close(torch.stack([*found]), torch.stack([variance / square, variance, square]))
    with pytest.raises(hog.errors.ArgumentValueError, match="two examples"):
        hog.curvature.gradient_noise_scale(loss, params, tuple(t[:1] for t in batch))


DECAY = 0.02


def regression(x, y, count=None):
    """Softmax regression with weight decay, to its minimum by Newton steps, which share no code; of a
    mean over `count` examples, of which others are left out."""

    def objective(w):
        total = F.cross_entropy(x @ w.view(3, 4).T, y, reduction="sum")
        return total / (count or len(y)) + DECAY / 2 * w.square().sum()

    w = torch.zeros(12, dtype=F64)
    for _ in range(12):
        g = torch.func.grad(objective)(w)
        H = torch.func.hessian(objective)(w)
        w = w - torch.linalg.solve(H, g)
    assert g.norm() < 1e-10
    return w.view(3, 4)


def data(count=300, seed=0):
    x = draw(count, 4, seed=seed)
    noise = draw(count, 3, seed=seed + 10)
    return x, (x[:, :3] + noise).argmax(1)


def trained():
    x, y = data()
    model = nn.Linear(4, 3, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(regression(x, y))
    loss = hog.functional_loss(model, F.cross_entropy)
    return loss, hog.trainable_params(model), (x, y), data(5, seed=7)


def losses(W, query):
    return F.cross_entropy(query[0] @ W.T, query[1], reduction="none")


def test_leaving_examples_out():
    """The scores say how the losses of the queries change where some examples are left out."""
    loss, params, (x, y), query = trained()
    scores = hog.influence(loss, params, (x, y), query, solver="cg", damping=DECAY, tol=1e-10)
    assert scores.shape == (300, 5)
    before = losses(regression(x, y), query)
    predicted, actual = [], []
    for start in range(0, 300, 30):
        left = [n for n in range(300) if not start <= n < start + 3]  # three are left out
        actual.append(losses(regression(x[left], y[left], 300), query) - before)
        predicted.append(-scores[start : start + 3].sum(0) / 300)
    actual, predicted = torch.stack(actual).reshape(-1), torch.stack(predicted).reshape(-1)
    assert torch.corrcoef(torch.stack([actual, predicted]))[0, 1] > 0.99
    assert (actual - predicted).norm() < 0.1 * actual.norm()
    assert ((actual > 0) == (predicted > 0))[actual.abs() > 1e-3].all()


@rows("solver", ["kfac", "ekfac"])
def test_by_kronecker_factors(solver):
    loss, params, train, query = trained()
    found = hog.influence(loss, params, train, query, solver=solver, damping=DECAY)
    inverse = torch.linalg.inv(
        hog.KFACOperator(loss, params, train, eigenvalue_corrected=solver == "ekfac").to_dense()
        + DECAY * torch.eye(12, dtype=F64)
    )
    _, g = hog.per_example_gradients(loss, params, train)
    _, q = hog.per_example_gradients(loss, params, query)
    expected = -g["weight"].flatten(1) @ inverse @ q["weight"].flatten(1).T
    assert_close(found, expected)
    exact = hog.influence(loss, params, train, query, solver="cg", damping=DECAY)
    both = torch.stack([found.reshape(-1), exact.reshape(-1)])
    assert torch.corrcoef(both)[0, 1] > 0.9


@rows("weight", [[1.0, 1.0, 1.0], [1.0, 0.0, 2.0]])
@rows("solver", ["kfac", "ekfac", "cg"])
def test_factors_that_are_computed_once_and_self_influence(solver, weight, capsys):
    loss, params, train, query = trained()
    weight = torch.tensor(weight, dtype=F64)
    loss = hog.functional_loss(loss.model, nn.CrossEntropyLoss(weight))
    query = tuple(t[weight[query[1]] > 0] for t in query)
    train = tuple(t[::5] for t in train)
    kept, data = weight[train[1]] > 0, [tuple(t[:17] for t in train), tuple(t[17:] for t in train)]

    def by(solver, query=query, params=params, damping=DECAY, **options):
        return hog.influence(loss, params, data, query, solver=solver, damping=damping, **options)

    own, some = by(solver, None), by(solver, tuple(t[kept][::9] for t in train))
    assert_close(own[kept][::9], some[kept][::9].diagonal())
    assert own.max() <= 0 == own[~kept].abs().sum()
    if solver == "cg":
        return
    K = hog.KFACOperator(loss, params, data, eigenvalue_corrected=solver == "ekfac")
    assert_close(by(K), by(solver))
    assert_close(by(K, damping=1.0), by(solver, damping=1.0))
    copied = {name: p.detach().clone() for name, p in params.items()}
    assert_close(by(deepcopy(K), None, copied, progress=True), own)
    assert re.search(r"influence train: .*/2 ", capsys.readouterr().err)
    loss.model.weight.data[0, 0] += 1e-3
    with pytest.warns(UserWarning, match="computed at these values of params"):
        by(K)
    by(K.update())


def fitted(*names, **options):
    loss, params, batch = problem("ReLU")
    params = {n: p for n, p in params.items() if n in (names or params)}
    return {"solver": hog.KFACOperator(loss, params, batch), **options}


def test_loaders_and_orders():
    loss, params, train, query = trained()
    expected = hog.influence(loss, params, train, query, damping=DECAY)
    given = DataLoader(TensorDataset(*train), batch_size=125)
    queries = [tuple(t[:2] for t in query), tuple(t[2:] for t in query)]
    assert_close(hog.influence(loss, params, given, queries, damping=DECAY), expected)
    shuffled = DataLoader(TensorDataset(*train), batch_size=25, shuffle=True)
    with pytest.raises(hog.errors.ArgumentValueError, match="shuffle=False"):
        hog.influence(loss, params, shuffled, query, damping=DECAY)


@rows("form", ["[N, V, T]", "[N, T, V]", "of features"])
def test_scores_of_tokens(form):
    """Beside the gradients of single tokens, with targets that are ignored and classes with weights."""
    net = nn.Sequential(nn.Embedding(7, 3), nn.Tanh(), nn.Linear(3, 7)).double()
    x, weight = torch.randint(7, (5, 6)), torch.rand(7, dtype=F64) if form == "[N, V, T]" else None
    y = x.roll(-1, 1)
    y[0, 3:] = -100
    total = lambda f, y: F.cross_entropy(f.flatten(0, 1), y.flatten(), reduction="sum")  # noqa: E731
    loss, reduction, shift = {
        "[N, V, T]": (hog.functional_loss(Fn(lambda own, x: own.net(x).mT, net=net), nn.CrossEntropyLoss(weight)), "mean", 0),
        "[N, T, V]": (hog.functional_loss(net, total), "sum", 0),
        "of features": (hog.language_model_loss(net, head="2", shift=True), "mean", 1),
    }[form]  # fmt: skip
    params, data = hog.trainable_params(loss.model), [(x[:2], y[:2]), (x[2:], y[2:])]
    K = hog.KFACOperator(loss, params, data, kind="exact", reduction=reduction)
    given = loss, params, data, (x[3:], y[3:])
    found = hog.influence(*given, solver=K, damping=0.1, per_token=True)

    def gradients(values):
        each = (torch.autograd.grad(v, params.values(), retain_graph=True) for v in values)
        return torch.stack([torch.cat([g.flatten() for g in own]) for own in each])

    y = y[:, shift:]
    tokens = F.cross_entropy(net(x).mT[..., : 6 - shift], y, weight, reduction="none")
    if reduction == "mean":
        tokens = tokens * 5 / (torch.ones(7) if weight is None else weight)[y[y >= 0]].sum()
    inverse = torch.linalg.inv(K.to_dense() + 0.1 * torch.eye(*K.shape, dtype=F64))
    q = gradients(loss(params, (x[n : n + 1], given[3][1][n - 3 : n - 2])) for n in (3, 4))
    expected = -(gradients(tokens.flatten()) @ inverse @ q.T).view(*y.shape, 2)
    assert_close(found, expected)
    assert not found[y < 0].any()
    assert_close(found.sum(1), hog.influence(*given, solver=K, damping=0.1))
    more = [*data, (x[:2, :5], x[:2, 1:])]
    with pytest.raises(hog.errors.ArgumentValueError, match="positions in each batch"):
        hog.influence(*given[:2], more, given[3], solver=K, damping=0.1, per_token=True)


@rows("options", [{}, {"solver": "cg"}, {"query": None, "solver": "kfac"}])
def test_scores_in_a_file(options, tmp_path):
    """A call goes on from the rows that are there, in other batches and with the same drawn factors."""
    loss, params, train, query = trained()
    path = tmp_path / f"{len(options)}.npy"
    options = {"query": query, "damping": DECAY, "out": path, **options}
    options |= {} if options.get("solver") == "cg" else {"kind": "mc"}
    found = hog.influence(loss, params, train, **options)
    before = found.clone()
    found[0], found[170:], found[250] = 7.0, torch.nan, 7.0
    data = [tuple(t[:200] for t in train), tuple(t[200:] for t in train)]
    assert_close(hog.influence(loss, params, data, **options)[1:], before[1:])
    assert (torch.from_numpy(numpy.load(path))[0] == 7).all()
    for change, name in (
        ({"damping": 1.0}, "damping 0.02, here 1.0"),
        ({"query": train}, "shape"),
    ):
        with pytest.raises(hog.errors.ArgumentValueError, match=f"of the same call.* its {name}"):
            hog.influence(loss, params, train, **{**options, **change})
    data[1][0][50], path = torch.nan, tmp_path / f"{len(options)} part.npy"
    K = hog.KFACOperator(loss, params, query)
    with pytest.raises(hog.errors.NonFiniteError):  # what comes before is kept
        hog.influence(loss, params, data, query, damping=DECAY, solver=K, out=path)
    assert numpy.isfinite(numpy.load(path)).all(1).sum() == 200


REFUSED = {
    "an option of factors": ({"eigenvalue_corrected": False}, hog.errors.ArgumentTypeError, "influence: expected options among"),
    "an option of factors, by cg": ({"solver": "cg", "approximation": "reduce"}, hog.errors.ArgumentTypeError, "influence: expected options among solver, .*, mode"),
    "a tolerance of factors": ({"tol": 1e-3}, hog.errors.ArgumentValueError, "tol: expected none with solver='ekfac'"),
    "tokens of a classifier": ({"per_token": True}, hog.errors.ArgumentValueError, "cross-entropy of logits .*of shape .7, 3. from"),
    "tokens without queries": ({"per_token": True, "query": None}, hog.errors.ArgumentValueError, "query: expected queries"),
    "a file without a folder": ({"out": "no/folder/scores.npy"}, hog.errors.OutputError, "Make its folder"),
    "an unknown solver": ({"solver": "lissa"}, hog.errors.ArgumentValueError, "solver"),
    "an option of a fitted operator": (fitted(kind="exact"), hog.errors.ArgumentTypeError, "influence: expected options among solver, .*, progress, got"),
    "a tolerance of a fitted operator": (fitted(tol=1e-3), hog.errors.ArgumentValueError, "tol: expected none"),
    "an operator on other params": (fitted("0.weight"), hog.errors.ArgumentValueError, "solver: expected an operator on params.*got one on 0.weight"),
    "another kind of operator": ({"solver": hog.GGNOperator(*problem("ReLU"))}, hog.errors.ArgumentValueError, "solver: expected one of cg"),
    "no query": ({"query": []}, hog.errors.ArgumentValueError, "query: expected at least one batch"),
    "a query that is not finite": ({"query": (draw(7, 3) * torch.nan, torch.zeros(7).long())}, hog.errors.NonFiniteError, "query: expected examples with finite"),
}  # fmt: skip


def influence_with(options):
    loss, params, batch = problem("ReLU")
    hog.influence(loss, params, batch, **{"query": batch, "damping": 0.1, **options})


test_what_influence_refuses = refused(REFUSED, influence_with)
