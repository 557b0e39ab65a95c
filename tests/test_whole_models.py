"""Ordinary models: products with the Hessian in every mode, and meta-gradients, against differences."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

import hoglib as hog
from tests.curvature.problems import F64, draw
from tests.models import Fn
from tests.oracles import hvp_by_differences
from tests.unchanged import unchanged


def encoder(**options):
    layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True)
    layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return Fn(lambda net, x: net.encoder(x, **options), encoder=layers)


class GPT(nn.Module):
    """Token and position embeddings, one causal block, tied output."""

    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(7, 4), nn.Parameter(0.1 * torch.randn(5, 4))
        self.norm1, self.norm2, self.norm3 = nn.LayerNorm(4), nn.LayerNorm(4), nn.LayerNorm(4)
        self.qkv, self.out = nn.Linear(4, 12), nn.Linear(4, 4)
        self.mlp = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))

    def forward(self, tokens):
        x = self.tokens(tokens) + self.places[: tokens.shape[1]]
        q, k, v = (
            t.unflatten(-1, (2, 2)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        x = x + self.mlp(self.norm2(x))
        return self.norm3(x) @ self.tokens.weight.T


def last(net):
    return Fn(lambda model, x: model.net(x)[0], net=net)


def residual(norm):
    def run(net, x):
        y = F.softplus(net.norm1(net.first(x)))
        return net.head((x + net.norm2(net.second(y))).tanh().mean((2, 3)))

    return Fn(
        run, first=nn.Conv2d(2, 3, 3, padding=1), second=nn.Conv2d(3, 2, 3, padding=1),
        norm1=norm(3), norm2=norm(2), head=nn.Linear(2, 3),
    )  # fmt: skip


def metric():
    def run(model, x):
        y = model.net(x)
        return torch.cdist(y, y)  # zero distances on the diagonal

    return Fn(run, net=nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))


def deep_sets(reduce):
    def run(net, x):
        lengths = torch.tensor([2, 1, 3])
        return net.all(torch.segment_reduce(net.each(x).tanh(), reduce, lengths=lengths, axis=0))

    return Fn(run, each=nn.Linear(3, 4), all=nn.Linear(4, 2))


def ctc(log_probs, targets):
    lengths = torch.full((log_probs.shape[0],), log_probs.shape[1])
    sizes = torch.full((targets.shape[0],), targets.shape[1])
    return F.ctc_loss(log_probs.log_softmax(-1).transpose(0, 1), targets, lengths, sizes)


def bag(**options):
    return nn.Sequential(nn.EmbeddingBag(6, 3, **options), nn.Tanh(), nn.Linear(3, 2))


MASK = torch.ones(3, 3).tril() == 0
PADDING = torch.tensor([[False, False, True], [False, False, False]])
WORDS = torch.tensor([[0, 2, 5], [1, 1, 3]])
IMAGES, SEQUENCE, ROWS = draw(3, 2, 4, 4), draw(2, 3, 4), draw(6, 3)
mse = F.mse_loss
# fmt: off
# name -> (makes the model, its inputs, the criterion, the targets' shape or the targets)
MODELS = {
    "transformer encoder": (encoder, SEQUENCE, mse, (2, 3, 4)),
    "transformer encoder in eval": (lambda: encoder().eval(), SEQUENCE, mse, (2, 3, 4)),
    "transformer encoder, causal": (lambda: encoder(mask=MASK, is_causal=True), SEQUENCE, mse, (2, 3, 4)),
    "transformer encoder, padded": (lambda: encoder(src_key_padding_mask=PADDING), SEQUENCE, mse, (2, 3, 4)),
    "a small GPT": (GPT, torch.tensor([[1, 4, 2], [0, 6, 6]]), lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten()), torch.tensor([[4, 2, 3], [6, 6, 1]])),
    "LSTM": (lambda: last(nn.LSTM(4, 3, 2)), SEQUENCE, mse, (2, 3, 3)),
    "bidirectional GRU": (lambda: last(nn.GRU(4, 3, bidirectional=True)), SEQUENCE, mse, (2, 3, 6)),
    "residual with batch norm": (lambda: residual(nn.BatchNorm2d), IMAGES, mse, (3, 3)),
    "residual with batch norm in eval": (lambda: residual(nn.BatchNorm2d).eval(), IMAGES, mse, (3, 3)),
    "residual with instance norm": (lambda: residual(lambda n: nn.InstanceNorm2d(n, affine=True)), IMAGES, mse, (3, 3)),
    "residual with group norm": (lambda: residual(lambda n: nn.GroupNorm(1, n)), IMAGES, mse, (3, 3)),
    "bag of words, mean": (bag, WORDS, mse, (2, 2)),
    "bag of words, sum": (lambda: bag(mode="sum"), WORDS, mse, (2, 2)),
    "bag of words, max": (lambda: bag(mode="max"), WORDS, mse, (2, 2)),
    "CTC": (lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4)), draw(2, 6, 4), ctc, torch.tensor([[1, 2], [3, 3]])),
    "weight norm": (lambda: nn.Sequential(weight_norm(nn.Linear(3, 4)), nn.Tanh(), weight_norm(nn.Linear(4, 2))), ROWS, mse, (6, 2)),
    "spectral norm in eval": (lambda: nn.Sequential(spectral_norm(nn.Linear(3, 4)), nn.Tanh(), spectral_norm(nn.Linear(4, 2))).eval(), ROWS, mse, (6, 2)),
    "metric learning": (metric, ROWS, mse, (6, 6)),
    "deep sets, mean": (lambda: deep_sets("mean"), ROWS, mse, (3, 2)),
    "deep sets, max": (lambda: deep_sets("max"), ROWS, mse, (3, 2)),
    "multi-margin loss": (lambda: nn.Linear(3, 4), ROWS, lambda y, t: F.multi_margin_loss(y.tanh(), t), torch.tensor([0, 1, 2, 3, 0, 1])),
    "hard sigmoid and swish": (lambda: nn.Sequential(nn.Linear(3, 4), nn.Hardswish(), nn.Linear(4, 2), nn.Hardsigmoid()), ROWS, mse, (6, 2)),
    "log-determinant": (lambda: nn.Linear(3, 3), ROWS, lambda y, _: torch.logdet(y.T @ y + torch.eye(3, dtype=F64)), (1,)),
}
# fmt: on


def made(name):
    make, inputs, criterion, targets = MODELS[name]
    torch.manual_seed(0)
    model = make().double()
    targets = draw(*targets, seed=5) if isinstance(targets, tuple) else targets
    return model, criterion, (inputs, targets)


@pytest.mark.parametrize("mode", ["reverse-over-reverse", "forward-over-reverse"])
@pytest.mark.parametrize("name", MODELS)
def test_the_product_with_the_hessian(name, mode):
    model, criterion, batch = made(name)
    loss, params = hog.functional_loss(model, criterion), hog.trainable_params(model)
    v = {key: draw(*p.shape, seed=7) for key, p in params.items()}
    with unchanged(model):
        _, product = hog.hvp(loss, params, v, batch, mode=mode)
    for key, expected in hvp_by_differences(lambda p: loss(p, batch), params, v).items():
        scale = max(float(expected.abs().max()), 1e-2)
        torch.testing.assert_close(product[key], expected, rtol=0, atol=2e-6 * scale)
