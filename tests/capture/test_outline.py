"""Equal parts of a graph are found, compiled once, and compute what the graph computes."""

import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

import hoglib as hog
from hoglib._core.logger import LOGGER
from hoglib.capture import backend as backends
from hoglib.capture import outline as outlines
from hoglib.capture import writes
from tests.capture.models import draw

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec")
WIDTH = 4


class Block(nn.Module):
    def __init__(self, factor=1.5, dropout=0.0):
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 6),
            nn.Linear(6, WIDTH),
        )
        self.factor, self.dropout = factor, dropout

    def forward(self, x):
        hidden = torch.tanh(self.up(self.norm(x))) * self.factor
        return x + self.down(F.dropout(hidden, self.dropout))


def network(depth, **changed):
    """A chain of blocks; the middle one is made with other options."""
    torch.manual_seed(0)
    blocks = [Block(**(changed if i == depth // 2 else {})) for i in range(depth)]
    return nn.Sequential(nn.Linear(3, WIDTH), *blocks, nn.Linear(WIDTH, 2)).double()


@pytest.fixture(autouse=True)
def cheap_calls(monkeypatch):
    """Small networks are not worth a call of a part, but for a test."""
    monkeypatch.setattr(outlines, "SECONDS_PER_CALL", 1e-9)
    monkeypatch.setattr(outlines, "SECONDS_PER_PART", 0.1)


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """The graphs that would be compiled: instead, their operations run one by one."""
    monkeypatch.setenv("HOGLIB_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(backends, "cpp_compiler", lambda: "c++")
    backends.clear_compiled()
    graphs = []

    def run(module, tensors, dynamic, key):
        graphs.append(module)
        return module.forward

    monkeypatch.setattr(backends, "_compile_whole", run)
    yield graphs
    backends.clear_compiled()


def product_of(model, create_graph=False, **options):
    """A Hessian-vector product, as it is and compiled, its parameters, vector and batch."""
    loss, params = hog.functional_loss(model, F.cross_entropy), hog.trainable_params(model)
    v = {name: draw(*p.shape, seed=i).to(p.dtype) for i, (name, p) in enumerate(params.items())}

    def product(params, v, batch):
        return hog.hvp(loss, params, v, batch, create_graph=create_graph)

    batch = draw(5, 3), torch.arange(5) % 2
    return product, hog.compile(product, **options), (params, v, batch)


def test_the_number_of_parts_does_not_grow_with_depth(compiled):
    counts, operations = [], []
    for depth in (4, 12):
        before = len(compiled)
        product, fast, given = product_of(network(depth))
        assert_close(fast(*given), product(*given), rtol=1e-12, atol=1e-12)
        counts.append(len(compiled) - before)
        operations.append(sum(outlines.count_operations(x.graph) for x in compiled[before:]))
    assert len(compiled) > 1
    assert counts[1] <= counts[0]
    assert operations[1] <= 1.1 * operations[0]


def test_layers_with_weights_of_other_models_are_the_same_parts(compiled):
    product, fast, given = product_of(network(6))
    fast(*given)
    count = len(compiled)
    model = network(6)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.5)
    product, fast, given = product_of(model)
    assert_close(fast(*given), product(*given), rtol=1e-12, atol=1e-12)
    assert len(compiled) == count
    assert fast.signatures[0].source in ("memory", "disk")


def tied(depth):
    model = network(depth)
    model[depth].up.weight = model[1].up.weight
    return model


def half(depth):
    model = network(depth)
    model[depth // 2 + 1].float()
    model[depth // 2 + 1].forward = lambda x, block=model[depth // 2 + 1]: Block.forward(
        block, x.float()
    ).double()
    return model


# Networks with one layer that differs, and the relative tolerance
DIFFERENT = {
    "a constant": (lambda depth: network(depth, factor=0.5), 1e-12),
    "another dtype": (half, 1e-5),
    "first and last layer share a weight": (tied, 1e-12),
}


@pytest.mark.parametrize(("make", "tolerance"), DIFFERENT.values(), ids=DIFFERENT)
def test_layers_that_differ_are_not_merged(make, tolerance, compiled):
    product, fast, given = product_of(make(8))
    assert_close(fast(*given), product(*given), rtol=tolerance, atol=tolerance)
    assert len(compiled) > 1


def test_layers_of_other_dropout_draw_as_the_function(compiled):
    model = network(8, dropout=0.5)
    for block in list(model)[1:-1]:
        block.dropout = block.dropout or 0.1
    x = draw(5, 3)

    def value_and_gradient(x):
        return torch.func.grad_and_value(lambda x: model(x).square().sum())(x)

    fast = hog.compile(value_and_gradient)
    for seed in range(2):
        torch.manual_seed(seed)
        expected = value_and_gradient(x)
        torch.manual_seed(seed)
        assert_close(fast(x), expected, rtol=1e-12, atol=1e-12)
    assert len(compiled) > 1


def test_an_interruption_while_parts_are_compiled_leaves_no_graph(compiled, monkeypatch, tmp_path):
    """Ctrl-C in the second part: no graph is kept, and the next call compiles the parts that are left."""
    complete = backends._compile_whole

    def interrupted(*args):
        if len(compiled) == 1:
            raise KeyboardInterrupt
        return complete(*args)

    product, fast, given = product_of(network(6))
    monkeypatch.setattr(backends, "_compile_whole", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fast(*given)
    assert len(compiled) == 1
    assert fast.signatures == []
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(backends, "_compile_whole", complete)
    assert_close(fast(*given), product(*given), rtol=1e-12, atol=1e-12)
    assert len({graph.code for graph in compiled}) == len(compiled) > 2


def test_the_gradient_of_a_product_in_parts(compiled):
    product, fast, (params, v, batch) = product_of(network(5), create_graph=True)
    leaf = {name: x.clone().requires_grad_() for name, x in v.items()}
    grads = []
    for of in (product, fast):
        value = sum(x.square().sum() for x in of(params, leaf, batch)[1].values())
        grads.append(torch.autograd.grad(value, list(leaf.values()), allow_unused=True))
    assert_close(*[[x for x in g if x is not None] for g in grads], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("case", ["without repeats", "dynamic", "calls that cost too much"])
def test_graphs_that_are_compiled_as_a_whole(case, compiled, monkeypatch):
    options = {"dynamic": True} if case == "dynamic" else {}
    if case == "calls that cost too much":
        monkeypatch.setattr(outlines, "SECONDS_PER_CALL", 1.0)
    model = network(0 if case == "without repeats" else 6)
    product, fast, given = product_of(model, **options)
    assert_close(fast(*given), product(*given), rtol=1e-12, atol=1e-12)
    assert len(compiled) == 1


def test_long_compilations_are_announced(compiled, monkeypatch, caplog):
    said = []
    monkeypatch.setattr(LOGGER, "propagate", True)
    with caplog.at_level(logging.INFO, logger="hoglib"):
        for limit in (0, 10**6):
            monkeypatch.setattr(backends, "LONG", limit)
            _, fast, given = product_of(network(5 + (limit > 0)))
            fast(*given)
            said.append(next(x for x in caplog.messages if x.startswith("compiling")))
            caplog.clear()
    assert "distinct parts" in said[0]
    assert "backend='eager'" in said[0]
    assert "backend='eager'" not in said[1]


def test_a_later_process_reads_the_parts(tmp_path, monkeypatch):
    monkeypatch.setenv("HOGLIB_CACHE_DIR", str(tmp_path))
    backends.clear_compiled()
    x = draw(5, 3)

    def fn(x):
        for _ in range(4):
            x = torch.softmax(x.sin().cumsum(0) * x.cos(), 0)
            x = x.logsumexp(0, keepdim=True).exp() + x.cumsum(1).tanh().cumsum(0)
        return x

    fast = hog.compile(fn)
    assert_close(fast(x), fn(x), rtol=1e-12, atol=1e-12)
    parts = list(tmp_path.glob("part-*.bin"))
    assert len(parts) >= 1
    assert len(list(tmp_path.glob("*.calls"))) == 1

    def fail(*args):
        raise AssertionError("compiled")

    monkeypatch.setattr(backends, "_compile", fail)
    backends.clear_compiled()
    again = hog.compile(lambda x: fn(x))
    assert_close(again(x), fn(x), rtol=1e-12, atol=1e-12)
    assert again.signatures[0].source == "disk"
    backends.clear_compiled()
    parts[0].unlink()  # evicted
    with pytest.raises(AssertionError, match="compiled"):
        hog.compile(lambda x: fn(x) + 0)(x)


def written(x):
    y = x * 2
    y.add_(x)
    return y.sin()


def read_later(x):
    y = x * 2
    z = y.view(-1)
    y.add_(x)
    return z.sin()


@pytest.mark.parametrize(("fn", "traced"), [(written, 0), (read_later, 1)])
def test_in_place_operations_go(fn, traced, monkeypatch):
    seen, traces = [], []
    monkeypatch.setattr(
        writes,
        "make_fx",
        lambda *args, real=writes.make_fx, **kw: traces.append(1) or real(*args, **kw),
    )

    def backend(graph, inputs):
        module = writes.functionalize(graph, inputs)
        module.recompile()
        seen.append(module)
        return module.forward

    x = draw(2, 3)
    assert_close(hog.compile(fn, backend=backend)(x), fn(x), rtol=0, atol=0)
    assert not any(map(writes.writes_in_place, seen[0].graph.nodes))
    assert len(traces) == traced
