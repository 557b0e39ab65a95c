"""Models that break inner loops elsewhere: recurrent, tied, complex, in place, differentiating inside."""

from collections import namedtuple
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

import hoglib as hog
from tests.functions import Sine
from tests.models import Fn

# no checkpoints inside: an oracle that uses .backward(inputs=...) goes without
WITHOUT: ContextVar[bool] = ContextVar("without checkpoints", default=False)


class Case(nn.Module):
    """A model, its batches and its loss; as a module it is the loss of a batch."""

    def __init__(
        self, model: nn.Module, x: Any, y: Any = (2,), wrap: Any = None, criterion: Any = F.mse_loss,
        forward: Any = None, vmap: bool = True, differences: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self.model = doubled(model)
        self.shapes, self.criterion, self.run = (x, y), criterion, forward
        self.wrap = wrap or (lambda x, y: (x, y))
        self.vmap, self.differences = vmap, differences

    def forward(self, batch: Any) -> torch.Tensor:
        if self.run is not None:
            return self.criterion(self.run(self.model, batch), batch)
        return self.criterion(self.model(*batch[:-1]), batch[-1])

    def tasks(self) -> list[Any]:
        generator = torch.Generator().manual_seed(7)

        def draw(shape: Any, count: int) -> torch.Tensor:
            if isinstance(shape, int):  # as many kinds, three of them
                return torch.randint(shape, (count, 3), generator=generator)
            return torch.randn(count, *shape, generator=generator, dtype=torch.float64)

        batch = lambda count: self.wrap(*(draw(shape, count) for shape in self.shapes))  # noqa: E731
        return [(batch(3), batch(4)) for _ in range(3)]


def doubled(model: nn.Module) -> nn.Module:
    model.double()
    for part in model.modules():
        for name, p in part._parameters.items():
            if p is not None and p.is_complex():
                part._parameters[name] = nn.Parameter(p.detach().to(torch.complex128))
    return model


def randn(*shape: int, dtype: Any = None) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape, dtype=dtype))


def last(net: Any, x: Any) -> Any:
    return net.head(net.rnn(x)[0][:, -1])


def with_last(rnn: nn.Module, width: int = 4) -> Fn:
    return Fn(last, rnn=rnn, head=nn.Linear(width, 2))


def mean_of(body: nn.Module, run: Any) -> Fn:
    return Fn(lambda net, x: net.head(run(net.body, x).mean(1)), body=body, head=nn.Linear(4, 2))


def hidden(body: Any, run: Any) -> Fn:
    return Fn(lambda net, x: net.head(run(net, net.body(x))), body=body, head=nn.Linear(4, 2))


def tanh(_: Any, h: Any) -> Any:
    return torch.tanh(h)


def tied() -> nn.Module:
    net = Fn(
        lambda net, x: net.b(torch.tanh(net.a(x)))[:, :2], a=nn.Linear(3, 3), b=nn.Linear(3, 3)
    )
    net.b.weight = net.a.weight
    return net


class Symmetric(nn.Module):
    def forward(self, w):
        return w.triu() + w.triu(1).mT


def parametrized() -> nn.Module:
    net = hidden(nn.Linear(4, 4), tanh)
    parametrize.register_parametrization(net.body, "weight", Symmetric())
    return net


def hooked() -> nn.Module:
    net = hidden(nn.Linear(4, 4), tanh)
    net.body.register_forward_pre_hook(lambda _, args: (1.5 * args[0],))
    net.body.register_forward_hook(lambda _, args, out: out.sin())
    return net


def warmed(run: Any, *, training: bool = True) -> nn.Module:
    net = hidden(nn.Sequential(nn.Linear(4, 4), run), tanh)
    net.train(training)
    return net


def counts(net: Any, x: Any) -> Any:
    """Writes a buffer in place, and assigns another anew."""
    with torch.no_grad():
        net.calls += 1
        net.seen = net.seen * 0.9 + x.mean()
    return net.head(torch.tanh(net.a(x)))


def in_place(net: Any, x: Any) -> Any:
    h = net.a(x).sigmoid_()
    z = torch.zeros_like(h)
    z[:, :2] = h[:, 2:]
    z[:, 0] *= 2
    return net.head(z.add_(h))


def warped(net: Any, x: Any) -> Any:
    grid = F.affine_grid(0.3 * net.where(x.flatten(1)).view(-1, 2, 3), x.shape, align_corners=False)
    return net.head(F.grid_sample(x, grid, align_corners=False).flatten(1))


def forces(net: Any, x: Any) -> Any:
    """Differentiates inside, as energy-force networks do."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        energy = net.energy(x)
        (slope,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
    return torch.cat([energy, -slope], -1)


def checkpointed(net: Any, h: Any) -> Any:
    run = nn.Sequential(net.more, nn.Tanh())
    return checkpoint(run, h, use_reentrant=False) if not WITHOUT.get() else run(h)


def complex_net(net: Any, x: Any) -> Any:
    h = x.to(net.w.dtype) @ net.w
    return (h / (1 + h.abs()) @ net.v).abs().square()


def embedded(layer: nn.Module, width: int) -> nn.Module:
    return nn.Sequential(layer, nn.Flatten(), nn.Tanh(), nn.Linear(width, 2))


def energy() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))


Pair = namedtuple("Pair", "x y")
x4, seq, image, ids = (4,), (5, 4), (1, 4, 4), 6
future = torch.triu(torch.ones(5, 5, dtype=torch.bool), 1)
sdpa = F.scaled_dot_product_attention
LAYER: Any = {"dropout": 0.0, "batch_first": True, "activation": "gelu"}
linears = lambda: {"a": nn.Linear(4, 4), "head": nn.Linear(4, 2)}  # noqa: E731
by_name = {
    "wrap": lambda x, y: {"x": x, "y": y},
    "criterion": lambda out, batch: F.mse_loss(out, batch["y"]),
}
CASES: dict[str, Any] = {
    "LSTM, two layers both ways": lambda: Case(with_last(nn.LSTM(4, 3, 2, batch_first=True, bidirectional=True), 6), seq, vmap=False),
    "GRU": lambda: Case(with_last(nn.GRU(4, 4, batch_first=True)), seq, vmap=False),
    "LSTM with projection": lambda: Case(with_last(nn.LSTM(4, 5, proj_size=4, batch_first=True)), seq, vmap=False),
    "masked attention": lambda: Case(mean_of(nn.MultiheadAttention(4, 2, batch_first=True), lambda a, x: a(x, x, x, attn_mask=future, need_weights=False)[0]), seq),
    "attention, own biases": lambda: Case(mean_of(nn.MultiheadAttention(4, 2, batch_first=True, add_bias_kv=True, add_zero_attn=True), lambda a, x: a(x, x, x)[0]), seq),
    "transformer decoder": lambda: Case(mean_of(nn.TransformerDecoderLayer(4, 2, 6, **LAYER), lambda a, x: a(x, x.flip(1), tgt_mask=future, tgt_is_causal=True)), seq),
    "transformer encoder, eval": lambda: Case(mean_of(nn.TransformerEncoderLayer(4, 2, 6, **LAYER), lambda a, x: a(x)).eval(), seq),
    "learned bias of attention": lambda: Case(Fn(lambda net, x: net.head(sdpa(net.a(x), x, x, attn_mask=net.bias).mean(1)), bias=randn(5, 5), **linears()), seq),
    "embedding, padding": lambda: Case(embedded(nn.Embedding(6, 4, padding_idx=0), 12), ids, differences=False),
    "embedding bag": lambda: Case(embedded(nn.EmbeddingBag(6, 4), 4), ids),
    "weight_norm": lambda: Case(hidden(parametrizations.weight_norm(nn.Linear(4, 4)), tanh), x4),
    "spectral_norm, eval": lambda: Case(hidden(parametrizations.spectral_norm(nn.Linear(4, 4)), tanh).eval(), x4),
    "orthogonal": lambda: Case(hidden(parametrizations.orthogonal(nn.Linear(4, 4)), tanh), x4),
    "parametrized": lambda: Case(parametrized(), x4),
    "tied": lambda: Case(tied(), (3,)),
    "lists of parameters": lambda: Case(Fn(lambda net, x: torch.tanh(x @ net.a[0]) @ net.b["out"], a=nn.ParameterList([randn(4, 4)]), b=nn.ParameterDict({"out": randn(4, 2)})), x4),
    "batch norm": lambda: Case(warmed(nn.BatchNorm1d(4)), x4),
    "batch norm, eval": lambda: Case(warmed(nn.BatchNorm1d(4), training=False), x4),
    "batch norm 3d": lambda: Case(nn.Sequential(nn.Conv3d(1, 2, 2), nn.BatchNorm3d(2, momentum=None), nn.Tanh(), nn.Flatten(), nn.Linear(16, 2)), (1, 3, 3, 3)),
    "sync batch norm, eval": lambda: Case(warmed(nn.SyncBatchNorm(4), training=False), x4),
    "instance norm, tracking": lambda: Case(nn.Sequential(nn.Conv1d(4, 3, 2), nn.InstanceNorm1d(3, affine=True, track_running_stats=True), nn.Tanh(), nn.Flatten(), nn.Linear(12, 2)), (4, 5)),
    "layer norm of images": lambda: Case(nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.LayerNorm([3, 4, 4]), nn.Softplus(), nn.Flatten(), nn.Linear(48, 2)), image),
    "instance norm": lambda: Case(nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.InstanceNorm2d(3, affine=True), nn.Softplus(), nn.Flatten(), nn.Linear(48, 2)), image),
    "max-pooling": lambda: Case(nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.MaxPool2d(2), nn.Tanh(), nn.Flatten(), nn.Linear(12, 2)), image, differences=False),
    "rms norm": lambda: Case(warmed(nn.RMSNorm(4)), x4),
    "group norm": lambda: Case(warmed(nn.GroupNorm(2, 4)), x4),
    "complex": lambda: Case(Fn(complex_net, w=randn(4, 3, dtype=torch.complex128), v=randn(3, 2, dtype=torch.complex128)), x4),
    "Fourier filter": lambda: Case(hidden(nn.Linear(4, 4), lambda net, h: torch.fft.irfft(torch.fft.rfft(h) * h.abs().mean(), n=4)), x4),
    "bilinear": lambda: Case(Fn(lambda net, x: net.b(net.a(x), torch.tanh(x)), a=nn.Linear(4, 4), b=nn.Bilinear(4, 4, 2)), x4),
    "spatial transformer": lambda: Case(Fn(warped, where=nn.Linear(16, 6), head=nn.Linear(16, 2)), image, differences=False),
    "distances": lambda: Case(Fn(lambda net, x: net.head(torch.cdist(net.a(x), net.c)), c=randn(4, 4), **linears()), x4),
    "transposed convolution": lambda: Case(nn.Sequential(nn.ConvTranspose2d(1, 2, 2, stride=2), nn.Tanh(), nn.Flatten(), nn.Linear(128, 2)), image),
    "numbers": lambda: Case(Fn(lambda net, x: net.a * torch.tanh(net.b * x[:, :2]), a=nn.Parameter(torch.tensor(0.7)), b=nn.Parameter(torch.tensor(1.3))), x4),
    "in place": lambda: Case(Fn(in_place, **linears()), x4),
    "writes buffers": lambda: Case(Fn(counts, calls=torch.zeros(()), seen=torch.zeros(()), **linears()), x4),
    "constants": lambda: Case(hidden(nn.Linear(4, 4), lambda net, h: h.detach() * torch.no_grad()(torch.sin)(h) * (torch.set_grad_enabled(False), h.exp(), torch.set_grad_enabled(True))[1] * h), x4, differences=False),
    "branches": lambda: Case(hidden(nn.Linear(4, 4), lambda net, h: h.sin() if h.sum() > 0 else h.tanh()), x4, vmap=False),
    "forward hooks": lambda: Case(hooked(), x4),
    "checkpoint": lambda: Case(Fn(lambda net, x: net.head(checkpointed(net, net.a(x))), more=nn.Linear(4, 4), **linears()), x4, vmap=False),
    "custom Function": lambda: Case(hidden(nn.Linear(4, 4), lambda net, h: Sine.apply(h)), x4, vmap=False),
    "dict batch": lambda: Case(Fn(lambda net, *, x: net.head(torch.tanh(net.a(x))), **linears()), x4, forward=lambda net, batch: net(x=batch["x"]), **by_name),
    "named tuple": lambda: Case(hidden(nn.Linear(4, 4), tanh), x4, wrap=Pair),
    "frozen part": lambda: Case(hidden(nn.Linear(4, 4).requires_grad_(False), tanh), x4),
    "shared block": lambda: Case(Fn(lambda net, x: net.head(net.a(torch.tanh(net.a(x)))), **linears()), x4),
    "unused and empty": lambda: Case(Fn(lambda net, x: net.head(torch.tanh(net.a(x))), unused=randn(2), empty=randn(0), **linears()), x4),
    "energy and force": lambda: Case(Fn(forces, energy=energy()), x4, (5,), vmap=False),
    "func.grad inside": lambda: Case(Fn(lambda net, x: torch.func.vmap(torch.func.grad(lambda v: net.energy(v).sum()))(x)[:, :2], energy=energy()), x4),
    "func.jvp inside": lambda: Case(Fn(lambda net, x: net.head(torch.func.jvp(net.a, (x.sin(),), (x,))[1].tanh()), **linears()), x4),
    "remat inside": lambda: Case(hidden(nn.Linear(4, 4), lambda net, h: hog.ops.remat(torch.tanh)(h)), x4),
    "hoglib layers": lambda: Case(nn.Sequential(hog.nn.LinearAct(4, 4, act="swish"), hog.nn.Linear(4, 2)), x4),
    "linear algebra": lambda: Case(hidden(nn.Linear(4, 4), lambda net, h: torch.linalg.solve(torch.eye(4, dtype=h.dtype) + h.mT @ h, h.mT).mT), x4),
}  # fmt: skip
