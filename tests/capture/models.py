"""Models whose second derivatives are captured: each maps a batch to outputs, in float64."""

import torch
from torch import nn
from torch.nn.utils import parametrizations

import hoglib as hog
from tests.functions import Cube
from tests.models import Fn, Through

F64 = torch.float64


def draw(*shape, seed=0, dtype=F64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def captured(fn, **options):
    return hog.compile(fn, backend="eager", **options)


def small():
    torch.manual_seed(0)
    return net(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def net(*layers):
    return nn.Sequential(*layers)


class Recurrent(nn.GRU):
    def forward(self, x):
        return super().forward(x)[0][:, -1]


def bag():
    def run(net, tokens):
        return net.head(torch.tanh(net.table(tokens)).mean(1))

    return Fn(run, table=nn.Embedding(7, 4), head=nn.Linear(4, 2))


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.complex(draw(3, 3, seed=1), draw(3, 3, seed=2)))

    def forward(self, x):
        return ((x.to(self.weight.dtype) @ self.weight).tanh() * 1j).abs().square() + x


def in_eval_mode(model):
    """Statistics of some batches, and then no more."""
    model.train()
    for seed in range(3):
        model(2 * draw(5, 3, seed=seed) + 1)
    return model.eval()


ROWS, SEQUENCE, IMAGE = (4, 3), (3, 5, 3), (2, 2, 6, 6)
# Besides those of `tests.curvature.test_compiled`; name: model, shape of the batch, whether torch.func.hessian and forward over reverse are compared (they
# are not where torch is wrong, nor everywhere else, for the time that they take)
MODELS = {
    "MLP": (lambda: net(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), ROWS, True, True),
    "conv and pool": (lambda: net(nn.Conv2d(2, 3, 3), nn.SiLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(12, 2)), IMAGE, True, True),
    "conv and max pool": (lambda: net(nn.Conv2d(2, 3, 3, padding=1), nn.Softplus(), nn.MaxPool2d(3), nn.Flatten(), nn.Linear(12, 2)), IMAGE, False, True),
    "LayerNorm": (lambda: net(nn.Linear(3, 4), nn.LayerNorm(4), nn.GELU(), nn.Linear(4, 2)), ROWS, False, True),
    "GRU": (lambda: Recurrent(3, 4, batch_first=True), SEQUENCE, False, False),
    "embedding": (bag, None, True, True),
    "weight norm": (lambda: net(parametrizations.weight_norm(nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, 2)), ROWS, False, False),
    "spectral norm in eval mode": (lambda: in_eval_mode(net(parametrizations.spectral_norm(nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, 2)).double()), ROWS, False, True),
    "complex": (Complex, ROWS, False, True),
    "custom Function with a jvp": (lambda: net(nn.Linear(3, 4), Through(Cube.apply), nn.Linear(4, 2)), ROWS, True, True),
    "hoglib ops": (lambda: net(nn.Linear(3, 4), Through(lambda x: hog.ops.power(hog.ops.sigmoid(x), 2.5)), Through(lambda x: hog.ops.logsumexp(x, -1)), nn.Unflatten(0, (4, 1))), ROWS, False, True),
    "recomputed": (lambda: net(nn.Linear(3, 4), hog.nn.Remat(net(nn.Tanh(), nn.Linear(4, 4))), nn.Tanh(), nn.Linear(4, 2)), ROWS, False, True),
}  # fmt: skip


def made(name):
    """A model and its batch, the same at every call."""
    make, shape, *routes = MODELS[name]
    torch.manual_seed(1)
    model = make()
    if name != "complex":  # which torch warns of
        model = model.double()
    batch = torch.arange(12).reshape(3, 4) % 7 if shape is None else draw(*shape)
    return model, batch, *routes


def criterion(outputs):
    """Neither linear nor quadratic in the outputs."""
    return outputs.square().mean() + outputs.sum().sin()
