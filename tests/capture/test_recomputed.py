"""Graphs of recomputed blocks: which blocks share them, and what they compute."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hoglib as hog
from hoglib.capture import recomputed
from tests.oracles import random_like, relative

DOUBLE = torch.float64


@pytest.fixture(autouse=True)
def no_templates(monkeypatch):
    monkeypatch.setattr(recomputed, "_TEMPLATES", type(recomputed._TEMPLATES)())


def templates():
    return list({id(x): x for x in recomputed._TEMPLATES.values()}.values())


class Scaled(torch.autograd.Function):
    """The identity, whose gradient is multiplied by a number."""

    forward = staticmethod(lambda x, factor: x.clone())

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.factor = inputs[1]

    backward = staticmethod(lambda ctx, grad: (grad * ctx.factor, None))


def by_hook(x, number):
    x = x.clone()
    if x.requires_grad:
        x.register_hook(lambda grad: grad * number)
    return x


# What a block computes from its number, and the graphs of three blocks at 2 and at 3 rows.
USES = {
    "nothing": (lambda x, i: x, 1, 1),
    "an index": (lambda x, i: ([x] * (i + 1))[i], 1, 1),
    "an empty tensor": (lambda x, i: torch.cat([torch.tensor([], dtype=DOUBLE), x.flatten()]).view_as(x), 1, 1),
    "a factor": (lambda x, i: x * i, 3, 3),
    "a constant": (lambda x, i: x + torch.tensor([0.0, i], dtype=DOUBLE).sum(), 3, 3),
    "the gradient": (Scaled.apply, 3, 3),
    "a hook": (by_hook, 3, 3),
    "a window": (lambda x, i: x.cumsum(0) if len(x) <= i + 1 else x, 1, 2),
}  # fmt: skip


class Numbered(nn.Module):
    def __init__(self, number, use):
        super().__init__()
        self.linear, self.number, self.use = nn.Linear(4, 4), number, use

    def forward(self, x):
        return torch.tanh(self.linear(self.use(x, self.number)))


def product_of(use, rows, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), *(Numbered(i, use) for i in (1, 2, 3))).double()
    loss = hog.functional_loss(model, F.mse_loss)
    params, x = hog.trainable_params(model), torch.randn(rows, 4, dtype=DOUBLE)
    v = random_like(params)
    product = hog.hvp(loss, params, v, (x, x.sin()), **options)[1]
    return torch.cat([part.flatten() for part in product.values()])


# what a block computes with its number is meant to differ, in backward too
@pytest.mark.filterwarnings("ignore:hvp. the first derivative of Scaled:UserWarning")
@pytest.mark.filterwarnings("ignore:hvp. the hook registered at:UserWarning")
@pytest.mark.parametrize("use", USES)
def test_blocks_that_differ_in_a_number_share_graphs_if_they_compute_the_same(use):
    function, *expected = USES[use]
    found = []
    for rows in (2, 3):  # another shape may tell them apart
        plain = product_of(function, rows)
        assert relative(product_of(function, rows, remat="[123]", compile="eager"), plain) < 1e-12
        found.append(len(templates()) - sum(found))
    assert found == expected


def test_the_first_block_shares_the_graphs_of_the_others():
    """Its input is data, whose gradient only the others need."""
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).double()
    x = torch.randn(2, 3, 4, dtype=DOUBLE)
    mask = torch.zeros(3, 3, dtype=DOUBLE).fill_diagonal_(-1)  # of which no gradient is computed
    loss = hog.functional_loss(
        model, lambda y, b: F.mse_loss(y, b[1]), forward=lambda m, b: m(b[0], mask=mask)
    )
    params = hog.trainable_params(model)
    v = random_like(params)

    _, plain = hog.hvp(loss, params, v, (x, x.sin()))
    _, found = hog.hvp(loss, params, v, (x, x.sin()), strict=True, remat=True, compile="eager")
    for name in params:
        torch.testing.assert_close(found[name], plain[name], rtol=1e-10, atol=1e-14)
    (template,) = templates()
    assert [str(key).count("the vjp") for key in template.levels] == [0, 1, 2]


@pytest.mark.parametrize("mode", ["reverse-over-reverse", "forward-over-reverse"])
def test_graphs_do_not_keep_the_first_model_alive(mode):
    def first_weight():
        layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
        model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).double()
        loss = hog.functional_loss(model, F.mse_loss)
        params, x = hog.trainable_params(model), torch.randn(2, 3, 4, dtype=DOUBLE)
        hog.hvp(loss, params, random_like(params), (x, x), mode=mode, remat=True, compile="eager")
        return weakref.ref(model.layers[0].linear1.weight)

    weight = first_weight()
    gc.collect()
    assert weight() is None
    assert templates()
