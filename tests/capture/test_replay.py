"""Equal blocks are traced once, and give the graph that a trace of each would give."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hoglib as hog
from hoglib.capture import capturing, replay

DOUBLE = torch.float64


@pytest.fixture
def counts(monkeypatch):
    """Of the levels that are recorded, and of the copies of the last trace."""
    found = {"recorded": 0, "copies": 0}
    record, expand = replay.Replay._record, replay.Replay.expand

    def counted(self, *args):
        found["recorded"] += 1
        return record(self, *args)

    def expanded(self, graph):
        expand(self, graph)
        found["copies"] = 0 if self.failed else self.copies

    monkeypatch.setattr(replay.Replay, "_record", counted)
    monkeypatch.setattr(replay.Replay, "expand", expanded)
    return found


class Block(nn.Module):
    def __init__(self, number=0, change=None):
        super().__init__()
        self.norm, self.inner, self.outer = nn.LayerNorm(4), nn.Linear(4, 6), nn.Linear(6, 4)
        self.number, self.change = number, change

    def forward(self, x):
        y = self.outer(F.gelu(self.inner(self.norm(x))))
        return x + (y if self.change is None else self.change(y, self.number))


def product_of(model, compile="eager"):
    loss = hog.functional_loss(model, F.mse_loss)
    params = hog.trainable_params(model)
    v = {name: p.detach().cos() for name, p in params.items()}
    x = torch.linspace(-1, 1, 12, dtype=DOUBLE).view(3, 4)
    if callable(compile):
        run = hog.compile(lambda *given: hog.hvp(loss, *given), backend=compile)
        product = run(params, v, (x, x.sin()))[1]
    else:
        product = hog.hvp(loss, params, v, (x, x.sin()), compile=compile)[1]
    return torch.cat([part.flatten() for part in product.values()])


def blocks(count, change=None, numbered=True):
    torch.manual_seed(0)
    return nn.Sequential(*(Block(numbered * i, change) for i in range(count))).double()


def test_what_is_traced_does_not_grow_with_depth(counts):
    recorded = []
    for depth in (4, 9):
        counts["recorded"] = 0
        model = blocks(depth, numbered=False)
        torch.testing.assert_close(product_of(model), product_of(model, False))
        recorded.append(counts["recorded"])
        assert counts["copies"] == 4 * depth  # two derivatives of the block, and of its vjp
    assert recorded[0] == recorded[1]


def test_the_graph_is_that_of_a_trace_of_each_block(counts, monkeypatch):
    found = []
    for _ in range(2):
        graphs = []

        def backend(graph, inputs, graphs=graphs):
            graphs.append(graph)
            return graph.forward

        value = product_of(blocks(5), backend)
        targets = [str(n.target) for n in graphs[0].graph.nodes if n.op == "call_function"]
        found.append((value, sorted(targets)))
        assert (counts["copies"] > 0) == (len(found) == 1)
        monkeypatch.setattr(capturing, "equal_blocks", lambda fn: [])
    assert torch.equal(found[0][0], found[1][0])
    assert len(found[0][1]) <= len(found[1][1])


def test_layers_that_differ_in_a_number_that_counts(counts):
    model = blocks(5, lambda y, i: y * (i + 1))
    torch.testing.assert_close(product_of(model), product_of(model, False))
    assert counts["copies"] > 0  # of each level of each
    model = blocks(5, lambda y, i: y + torch.full((), i, dtype=DOUBLE) * y)
    torch.testing.assert_close(product_of(model), product_of(model, False))


def test_tied_blocks_share_their_gradient(counts):
    block = Block().double()
    model = nn.Sequential(block, *blocks(4), block)
    torch.testing.assert_close(product_of(model), product_of(model, False))
    assert counts["copies"] > 0


def by_hook(y, number):
    y = y.clone()
    if y.requires_grad:
        y.register_hook(lambda grad: 2 * grad)
    return y


AS_THEY_ARE = {
    "random numbers": lambda y, i: F.dropout(y, 0.5),
    "a read value": lambda y, i: y if bool((torch.arange(2) >= 0).all()) else -y,
    "a hook": by_hook,
}


@pytest.mark.parametrize("change", AS_THEY_ARE)
def test_blocks_that_are_traced_as_they_are(change, counts, monkeypatch):
    found = []
    for _ in range(2):
        model = blocks(4, AS_THEY_ARE[change])
        torch.manual_seed(1)
        product_of(model)  # captures
        torch.manual_seed(1)
        found.append(product_of(model))
        assert counts["copies"] == 0 or change == "a read value"
        monkeypatch.setattr(capturing, "equal_blocks", lambda fn: [])
    assert torch.equal(*found)


def test_a_third_derivative(counts):
    model = blocks(4)
    x = torch.linspace(-1, 1, 12, dtype=DOUBLE).view(3, 4)

    def third(x):
        y = model(x).sum()
        for _ in range(3):
            (g,) = torch.autograd.grad(y, x, create_graph=True)
            y = g.square().sum()
        return y

    given = x.clone().requires_grad_()
    compiled = hog.compile(third, backend="eager")
    torch.testing.assert_close(compiled(given), third(given))
    assert counts["copies"] == 0
