"""compile=True of products and operators: equal to eager results, from call to call."""

import gc
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hoglib as hog
from hoglib.curvature.maps import compiled
from tests.curvature.problems import F64, draw, flat, problem, relative
from tests.graphs import graphs_of
from tests.rows import rows
from tests.unchanged import unchanged

CLOSE = 1e-10
EMPIRICAL = partial(hog.fisher_vp, kind="empirical")


def like(params, *columns, seed=0):
    return {n: draw(*p.shape, *columns, seed=seed + i) for i, (n, p) in enumerate(params.items())}


def mlp(activation=nn.Tanh, last=3):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), activation(), nn.Linear(4, last)).double()


def batch_of(n=7, seed=3):
    return draw(n, 3, seed=seed), torch.arange(n) % 3


def small():
    model = mlp()
    return model, hog.functional_loss(model, F.cross_entropy), hog.trainable_params(model)


def graphs(func):
    """How many graphs a function has."""
    return len(graphs_of(func))


def same(found, expected):
    assert relative(found[0], expected[0]) < CLOSE
    assert found[1].keys() == expected[1].keys()
    assert relative(flat(found[1]), flat(expected[1])) < CLOSE


def check_product(product, name, mode="auto", blocks=()):
    loss, params, batch = problem(name)
    run = partial(product, loss, params, mode=mode)
    # the second of each kind is of the graph of the first
    for seed, columns in enumerate([(), (), *blocks]):
        v = like(params, *columns, seed=seed)
        with unchanged(loss.model):
            found = run(v, batch, compile="eager")
        same(found, run(v, batch))
    assert graphs(loss) == 1 + bool(blocks)


@pytest.mark.parametrize("name", ["CNN with BatchNorm in train", "LSTM"])
def test_a_hessian_product_equals_the_eager_one(name):
    """Of what a capture meets beside operations: statistics, and weights in a list."""
    check_product(hog.hvp, name)


MODES = [
    (hog.hvp, "reverse-over-reverse"), (hog.hvp, "forward-over-reverse"), (hog.ggn_vp, "forward"),
    (hog.ggn_vp, "reverse"), (hog.fisher_vp, "forward"), (EMPIRICAL, "reverse"),
]  # fmt: skip


@pytest.mark.parametrize(("product", "mode"), MODES)
def test_modes_and_blocks_equal_the_eager_ones(product, mode):
    check_product(product, "layers of hoglib", mode, [(3,), (2,)])


@rows("blocks", [None, "module"])
def test_whole_matrices(blocks):
    _, loss, params = small()
    run = partial(hog.hessian, loss, params, blocks=blocks)
    for seed in (3, 4):
        found, expected = run(batch_of(seed=seed), compile="eager"), run(batch_of(seed=seed))
        assert found.keys() == expected.keys()
        for name in expected:
            assert relative(flat(found[name]), flat(expected[name])) < CLOSE
    assert graphs(loss) == 1
    with pytest.raises(ValueError, match="create_graph"):
        run(batch_of(), compile=True, create_graph=True)


def test_the_first_half_runs_once_for_a_block(monkeypatch):
    runs = []
    make = compiled.PartialEval._made  # private: it counts the runs of each half

    def made(self, graph, inputs):
        run = make(self, graph, inputs)
        return lambda *given: (runs.append(len(given)), run(*given))[1]

    monkeypatch.setattr(compiled.PartialEval, "_made", made)
    _, loss, params = small()
    for _ in range(2):
        runs.clear()
        hog.hvp(loss, params, like(params, 5), batch_of(), compile="eager")
    assert len(runs) == 1 + 5
    assert runs[0] < runs[1]


@rows("part", ["", "2."], ids=["all", "the head"])
def test_parameters_that_are_changed_and_replaced(part):
    """Those that are not differentiated by are inputs too."""
    model, loss, _ = small()
    for change in (
        lambda: None,
        lambda: model[0].weight.detach().mul_(1.5),
        lambda: setattr(model[0], "weight", nn.Parameter(draw(4, 3, seed=9))),
    ):
        change()
        params = {n: p for n, p in hog.trainable_params(model).items() if n.startswith(part)}
        run = partial(hog.hvp, loss, params, like(params), batch_of())
        same(run(compile="eager"), run())
    assert graphs(loss) == 1


FUNCTIONS = {
    "tensor": (lambda x, a: (a * x).sin().prod(), draw(4)),
    "list": (lambda xs, a: (xs[0] @ xs[1] * a).tanh().sum(), [draw(2, 3), draw(3, 2, seed=1)]),
    "linear in one": (lambda xs, a: (xs[0] ** 3).sum() + (a * xs[1]).sum(), [draw(3), draw(3, seed=1)]),
    "a quadratic": (lambda x, a: a * x @ x / 2, draw(4)),
}  # fmt: skip


@rows("block", [False, True], ids=["vector", "block"])
@rows("name", FUNCTIONS)
def test_plain_functions(name, block):
    written, params = FUNCTIONS[name]
    func = lambda *given: written(*given)  # noqa: E731
    v = torch.utils._pytree.tree_map(lambda p: draw(*p.shape, *[2] * block, seed=5), params)
    for a in (torch.tensor(2.0, dtype=F64), torch.tensor(3.0, dtype=F64)):
        value, product = hog.hvp(func, params, v, a, compile="eager")
        expected = hog.hvp(func, params, v, a)
        assert relative(value, expected[0]) < CLOSE
        assert relative(flat(product), flat(expected[1])) < CLOSE
    assert graphs(func) == 1


def test_one_tensor_as_parameters_and_vector():
    x, func = draw(4), lambda x: (x**4).sum()
    for v in (x, draw(4, seed=1)):
        assert relative(hog.hvp(func, x, v, compile="eager")[1], 12 * x**2 * v) < CLOSE


class Loss(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=F64))

    def forward(self, x):
        return (self.scale * x).sin().prod()

    def of(self, x):
        return self(x)


def test_modules_and_methods_and_their_tensors():
    model, x, v = Loss(), draw(4), draw(4, seed=1)
    for func in (model, model.of):
        for scale in (1.0, 2.0):
            model.scale.data.fill_(scale)
            found = hog.hvp(func, x, v, compile="eager")[1]
            assert relative(found, hog.hvp(func, x, v)[1]) < CLOSE
    for _ in range(2):  # a method is another object each time
        hog.hvp(model.of, x, v, compile="eager")
    assert graphs(model) == 2


def test_create_graph_of_a_function_that_was_deleted():
    x, v = draw(3).requires_grad_(), draw(3, seed=1)
    _, Hv = hog.hvp(lambda x: x.sin().sum(), x, v, create_graph=True, compile="eager")
    gc.collect()
    (found,) = torch.autograd.grad(Hv.sum(), x)
    assert relative(found, -x.detach().cos() * v) < CLOSE


def test_strict_and_stand_ins_are_as_without():
    func = lambda xs: xs[0].sum() + (xs[1] ** 2).sum()  # noqa: E731
    params = [draw(2), draw(2, seed=1)]
    with pytest.raises(RuntimeError, match="strict=True"):
        hog.hvp(func, params, params, strict=True, compile="eager")
    model = nn.MultiheadAttention(2, 1, batch_first=True).double()
    outputs = lambda model, x: model(x, x, x)[0]  # noqa: E731
    loss = hog.functional_loss(model, lambda y, _: y.square().mean(), forward=outputs)
    params, x = hog.trainable_params(model), draw(2, 3, 2)
    for stand_ins in (True, False):
        run = partial(hog.hvp, loss, params, like(params), x, stand_ins=stand_ins)
        same(run(compile="eager"), run())
    assert graphs(loss) == 2


def test_refusals():
    _, loss, params = small()
    v, batch = like(params), batch_of()
    with pytest.raises(ValueError, match=r"finite-differences.*compile=True"):
        hog.hvp(loss, params, v, batch, mode="finite-differences", compile=True)
    with pytest.raises(NotImplementedError, match="kind='mc', compile=True"):
        hog.fisher_vp(loss, params, v, batch, kind="mc", compile=True)
    with pytest.raises(NotImplementedError, match="kind='mc', compile=True"):
        hog.FisherOperator(loss, params, batch, kind="mc", compile=True)
    with pytest.raises(ValueError, match="finite-differences"):
        hog.GGNOperator(loss, params, batch, mode="finite-differences", compile="eager")
    for wrong in ("fast", 1, None):
        with pytest.raises((ValueError, TypeError), match="compile"):
            hog.hvp(loss, params, v, batch, compile=wrong)
    reads = hog.functional_loss(mlp(), lambda y, t: y.sum() * (2 if y.sum() > 0 else 3))
    with pytest.raises(NotImplementedError, match="reads"):
        hog.hvp(reads, params, v, batch, compile="eager")
    normal = torch.distributions.Normal
    huber = hog.functional_loss(mlp(), lambda y, t: F.huber_loss(y, F.one_hot(t, 3).double()))
    run = partial(hog.fisher_vp, huber, hog.trainable_params(huber.model), v, batch)
    # torch.compile switches the default off once it is used in a process
    with pytest.raises(NotImplementedError, match="validate_args=False"):
        run(likelihood=lambda y: normal(y, 0.5, validate_args=True), compile="eager")
    found = run(likelihood=lambda y: normal(y, 0.5, validate_args=False), compile="eager")
    same(found, run(likelihood=lambda y: normal(y, 0.5)))


def test_ignored_targets_are_counted_at_each_call():
    _, loss, params = small()
    v, (x, y) = like(params), batch_of()
    for ignored in (1, 3):
        y = y.clone()
        y[:ignored] = -100
        run = partial(hog.fisher_vp, loss, params, v, (x, y))
        same(run(compile="eager"), run())
    assert graphs(loss) == 1


def test_too_many_products_warn(monkeypatch):
    monkeypatch.setattr("hoglib.capture.capturing.MAX_KEPT", 4)
    loss = hog.functional_loss(nn.Linear(3, 3).double(), F.cross_entropy)
    params = hog.trainable_params(loss.model)

    def products(count):
        for _ in range(count):
            logits = lambda y: torch.distributions.Categorical(logits=y, validate_args=False)  # noqa: E731
            v = like(params)
            hog.fisher_vp(loss, params, v, batch_of(), likelihood=logits, compile="eager")

    products(2)
    with pytest.warns(UserWarning, match="created at each call"):
        products(5)


def test_a_kept_graph_is_dropped_when_anything_changes():
    model, loss, params = small()
    batch = batch_of()
    operator = hog.HessianOperator(loss, params, batch, compile="eager")
    plain = hog.HessianOperator(loss, params, batch)
    v = draw(plain.shape[0])
    operator @ v
    assert operator._sum.kept is not None  # private: a kept graph shows in time only
    with torch.no_grad():
        model[0].weight.mul_(1.5)
    assert relative(operator @ v, plain @ v) < CLOSE
    batch[0].mul_(2)
    assert relative(operator @ v, plain @ v) < CLOSE
    model[0].weight.data = draw(4, 3, seed=9)
    assert relative(operator @ v, plain @ v) < CLOSE
    assert graphs(loss) == 1
    small_limit = hog.HessianOperator(loss, params, batch, compile="eager", memory_limit=8)
    assert relative(small_limit @ v, plain @ v) < CLOSE
    assert small_limit._sum.kept is None


def test_compiled_operators_check_determinism():
    batches = [batch_of(seed=3), batch_of(seed=4)]
    _, loss, params = small()
    operator = hog.HessianOperator(loss, params, batches, compile="eager")
    v = draw(operator.shape[0])
    operator @ v
    batches[1] = batch_of(seed=5)
    with pytest.raises(RuntimeError, match="the data differs from pass to pass"):
        operator @ v
    batches[1] = (torch.full((7, 3), torch.nan, dtype=F64), batches[1][1])
    with pytest.raises(FloatingPointError, match="loss"):
        operator @ v


def test_an_operator_warns_of_unused_parameters():
    model = mlp()
    model.register_parameter("spare", nn.Parameter(draw(2)))
    loss, params = hog.functional_loss(model, F.cross_entropy), hog.trainable_params(model)
    operator = hog.HessianOperator(loss, params, batch_of(), compile="eager")
    with pytest.warns(UserWarning, match="does not depend on spare"):
        operator @ draw(operator.shape[0])
