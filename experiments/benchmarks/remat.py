"""hoglib.ops.remat beside torch.utils.checkpoint and plain autograd: peak memory and time.

    python -m experiments.benchmarks.remat [--network transformer] [--smoke] [--device cuda]

The network is a residual MLP, h <- h + V gelu(U h + u) + v in each layer, or torch's transformer
encoder, and each layer is rematerialized. First order is the gradient of the mean square output by all
parameters; second order is a Hessian-vector product, reverse over reverse; "forward" is that product,
forward over reverse. Repeats are interleaved, times are medians, peak memory counts the tensors that
are alive at once beyond parameters, the vector and data. One thread.
"""

import argparse
import platform
import sys
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hoglib
from experiments.benchmarks.memory import peak_bytes
from hoglib.ops import remat


class Sizes(NamedTuple):
    layers: int
    width: int
    batch: tuple[int, ...]  # all dimensions of the input but the width
    repeats: int


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, h: Tensor) -> Tensor:
        out: Tensor = h + self.outer(nn.functional.gelu(self.inner(h)))
        return out


def encoder(width: int) -> nn.Module:
    return nn.TransformerEncoderLayer(
        width, 4, 4 * width, dropout=0.0, activation="gelu", batch_first=True
    )


LAYERS: dict[str, Callable[[int], nn.Module]] = {"mlp": Layer, "transformer": encoder}
FULL = {
    "mlp": Sizes(layers=24, width=256, batch=(512,), repeats=5),
    "transformer": Sizes(layers=8, width=64, batch=(8, 64), repeats=5),
}
SMOKE = {
    "mlp": Sizes(layers=3, width=16, batch=(8,), repeats=1),
    "transformer": Sizes(layers=2, width=8, batch=(2, 4), repeats=1),
}
METHODS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "plain": lambda layer, h: layer(h),
    "torch checkpoint": lambda layer, h: checkpoint(layer, h, use_reentrant=False),
    "hoglib remat": lambda layer, h: remat(layer)(h),
}


class Network(nn.Module):
    def __init__(self, layers: nn.ModuleList, method: str) -> None:
        super().__init__()
        self.layers, self.apply_layer = layers, METHODS[method]

    def forward(self, h: Tensor) -> Tensor:
        for layer in self.layers:
            h = self.apply_layer(layer, h)
        return h.square().mean()


def first_order(network: nn.Module, x: Tensor, v: dict[str, Tensor]) -> Sequence[Tensor]:
    return torch.autograd.grad(network(x), list(network.parameters()))


def second_order(network: nn.Module, x: Tensor, v: dict[str, Tensor]) -> Sequence[Tensor]:
    params = list(network.parameters())
    with hoglib.second_order():
        gradient = torch.autograd.grad(network(x), params, create_graph=True)
        return torch.autograd.grad(gradient, params, list(v.values()))


def forward_over_reverse(network: nn.Module, x: Tensor, v: dict[str, Tensor]) -> Sequence[Tensor]:
    params = hoglib.trainable_params(network)
    loss = hoglib.functional_loss(network, lambda output, x: output)
    return list(hoglib.hvp(loss, params, v, x, mode="forward-over-reverse")[1].values())


ORDERS = {"first": first_order, "second": second_order, "forward": forward_over_reverse}


class Row(NamedTuple):
    order: str
    method: str
    mebibytes: float
    milliseconds: float
    error: float  # of the result, relative to plain autograd


def measure(network: str, sizes: Sizes, device: torch.device) -> list[Row]:
    torch.manual_seed(0)
    layers = nn.ModuleList(LAYERS[network](sizes.width) for _ in range(sizes.layers)).to(device)
    x = torch.randn(*sizes.batch, sizes.width, device=device)
    params = hoglib.trainable_params(Network(layers, "plain"))
    v = {name: torch.ones_like(p) for name, p in params.items()}
    rows = []
    for order, derivative in ORDERS.items():
        runs = {
            method: partial(derivative, Network(layers, method), x, v)
            for method in METHODS
            if not (order == "forward" and method == "torch checkpoint")  # torch.func refuses it
        }
        results = {name: _flat(run()) for name, run in runs.items()}
        peaks = {name: peak_bytes(run, device) for name, run in runs.items()}
        times: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(sizes.repeats):
            for name, run in runs.items():
                times[name].append(_seconds(run, device))
        expected = results["plain"]
        for name in runs:
            error = ((results[name] - expected).norm() / expected.norm()).item()
            rows.append(Row(order, name, peaks[name] / 2**20, 1e3 * median(times[name]), error))
    return rows


def table(rows: list[Row]) -> str:
    lines = [f"{'order':8}{'method':18}{'peak MiB':>10}{'':>8}{'ms':>10}{'':>8}{'error':>10}"]
    for row in rows:
        plain = next(r for r in rows if r.order == row.order and r.method == "plain")
        lines.append(
            f"{row.order:8}{row.method:18}{row.mebibytes:10.1f}{row.mebibytes / plain.mebibytes:7.2f}x"
            f"{row.milliseconds:10.1f}{row.milliseconds / plain.milliseconds:7.2f}x{row.error:10.0e}"
        )
    return "\n".join(lines)


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([t.reshape(-1) for t in tensors]).double()


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter() - start


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--network", default="mlp", choices=LAYERS)
    parser.add_argument("--smoke", action="store_true", help="a tiny network, in seconds")
    parser.add_argument("--device", default="cpu", type=torch.device)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    sizes = (SMOKE if options.smoke else FULL)[options.network]
    where = (
        torch.cuda.get_device_name(options.device)
        if options.device.type == "cuda"
        else platform.processor() or platform.machine()
    )
    print(
        f"{options.network}: {sizes.layers} layers of width {sizes.width}, batch {sizes.batch}, "
        f"float32; medians of {sizes.repeats}, interleaved; torch {torch.__version__}, {where}, "
        "one thread"
    )
    print(table(measure(options.network, sizes, options.device)))


if __name__ == "__main__":
    main(sys.argv[1:])
