"""Recomputation beside torch.utils.checkpoint and plain autograd: peak memory and time.

    python -m experiments.benchmarks.remat [--smoke] [--part mlp transformer first-call loops]
        [--device cuda]

- mlp, transformer: a residual MLP, h <- h + V gelu(U h + u) + v in each layer, or torch's transformer
  encoder, each layer by `hoglib.ops.remat` or torch's checkpoint. First order is the gradient of the
  mean square output by all parameters; second order is a Hessian-vector product, reverse over
  reverse; "forward" is that product, forward over reverse.
- first-call: seconds of the processor, of the process and of the compilers that it starts, until a
  product is there, in a process of its own with an empty cache.
- loops: a meta-gradient of `hoglib.MAML` through ten inner steps on one task, by `memory=`.

Repeats are interleaved, times are medians. Peaks are what torch's allocator gave at one time, beyond
parameters, vectors and data. Errors are relative to the first way, in float32. One thread.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hoglib as hog
from experiments.benchmarks.memory import peak_allocated
from experiments.benchmarks.meta.tasks import Learner, classes, conv4
from experiments.benchmarks.meta.with_hoglib import maml
from experiments.benchmarks.problems import Encoder, perceptron
from experiments.benchmarks.timing import interleaved, machine, relative_error
from experiments.benchmarks.workload import Call

MIB = 2**20
NAME = "experiments.benchmarks.remat"


class Sizes(NamedTuple):
    layers: int
    width: int
    batch: tuple[int, ...]  # all dimensions of the input but the width


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.outer(F.gelu(self.inner(h)))


def encoder(width: int) -> nn.Module:
    return nn.TransformerEncoderLayer(
        width, 4, 4 * width, dropout=0.0, activation="gelu", batch_first=True
    )


LAYERS: dict[str, Callable[[int], nn.Module]] = {"mlp": Layer, "transformer": encoder}
FULL = {"mlp": Sizes(24, 256, (512,)), "transformer": Sizes(8, 64, (8, 64))}
SMOKE = {"mlp": Sizes(3, 16, (8,)), "transformer": Sizes(2, 8, (2, 4))}
METHODS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "plain": lambda layer, h: layer(h),
    "torch checkpoint": lambda layer, h: checkpoint(layer, h, use_reentrant=False),
    "hoglib remat": lambda layer, h: hog.ops.remat(layer)(h),
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
    with hog.second_order():
        gradient = torch.autograd.grad(network(x), params, create_graph=True)
        return torch.autograd.grad(gradient, params, list(v.values()))


def forward_over_reverse(network: nn.Module, x: Tensor, v: dict[str, Tensor]) -> Sequence[Tensor]:
    params = hog.trainable_params(network)
    loss = hog.functional_loss(network, lambda output, x: output)
    return list(hog.hvp(loss, params, v, x, mode="forward-over-reverse")[1].values())


ORDERS = {"first": first_order, "second": second_order, "forward": forward_over_reverse}


def rows(title: str, runs: dict[str, Call], device: torch.device, small: bool) -> list[str]:
    """A row for each run: its peak, its time, both relative to the first, and its error."""
    first, found = next(iter(runs)), {name: run() for name, run in runs.items()}
    errors = {name: relative_error(result, found[first]) for name, result in found.items()}
    peaks = {name: peak_allocated(run, device) / MIB for name, run in runs.items()}
    seconds = interleaved(runs, 1 if small else 5)
    return [
        f"{title:24}{name:26}{peaks[name]:8.1f} MiB{peaks[name] / peaks[first]:6.2f}"
        f"{1e3 * seconds[name]:9.1f} ms{seconds[name] / seconds[first]:6.2f}  error {errors[name]:.0e}"
        for name in runs
    ]


def layers(network: str, small: bool, device: torch.device) -> Iterator[str]:
    """Each order by each method."""
    sizes = (SMOKE if small else FULL)[network]
    blocks = nn.ModuleList(LAYERS[network](sizes.width) for _ in range(sizes.layers)).to(device)
    x = torch.randn(*sizes.batch, sizes.width, device=device)
    params = hog.trainable_params(Network(blocks, "plain"))
    v = {name: torch.ones_like(p) for name, p in params.items()}
    for order, derivative in ORDERS.items():
        runs: dict[str, Call] = {
            method: partial(derivative, Network(blocks, method), x, v)
            for method in METHODS
            if not (order == "forward" and method == "torch checkpoint")  # torch.func refuses it
        }
        yield from rows(f"{network}, {order}", runs, device, small)


COMPILED: dict[str, dict[str, Any]] = {
    "remat, compiled": {"remat": True},
    "compiled": {},
    "forward, remat, compiled": {"mode": "forward-over-reverse", "remat": True},
}


def compiled_product(layers: int, small: bool, way: str) -> Call:
    """The Hessian-vector product of an encoder as a compiled graph."""
    sizes = (SMOKE if small else FULL)["transformer"]
    torch.manual_seed(0)
    model = nn.Sequential(*(encoder(sizes.width) for _ in range(layers)))
    x = torch.randn(*sizes.batch, sizes.width)
    params = hog.trainable_params(model)
    v = {name: torch.ones_like(p) for name, p in params.items()}
    loss, batch = hog.functional_loss(model, F.mse_loss), (x, x.flip(0))
    options = {**COMPILED[way], "compile": "eager" if small else True}
    return partial(hog.hvp, loss, params, v, batch, **options)


def first_call(small: bool, device: torch.device) -> Iterator[str]:
    """Seconds of the processor until there is a product, at two depths."""
    for name in [*COMPILED][:1] if small else COMPILED:
        seconds = []
        for layers in (2,) if small else (2, 24):
            with tempfile.TemporaryDirectory() as cache:
                command = [sys.executable, "-m", NAME, "--one-call", name, str(layers)]
                done = subprocess.run(
                    [*command, *["--smoke"] * small], check=True, text=True, stdout=subprocess.PIPE,
                    env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache},
                )  # fmt: skip
            seconds.append(json.loads(done.stdout.splitlines()[-1]))
            yield f"first call  {layers} layers, {name:24} {seconds[-1]:6.1f} s"
        yield f"first call  {name}: the last to the first {seconds[-1] / seconds[0]:.2f}"


def processor_seconds() -> float:
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used)


def sequences(small: bool) -> Learner:
    width, length, layers, steps = (8, 4, 2, 2) if small else (64, 128, 4, 10)
    batches = classes(1, 2, (length, width))
    model = Encoder(width, 4, 4 * width, layers, 5)
    return Learner(model, "encoder", F.cross_entropy, *batches, 0.05, steps)


def wide(small: bool) -> Learner:
    width, shots, steps = (8, 2, 2) if small else (512, 200, 10)
    model = perceptron([64, width, width, width, 5], nn.GELU)
    return Learner(model, "mlp", F.cross_entropy, *classes(1, shots, (64,)), 0.05, steps)


LOOPS: dict[str, Callable[[bool], Learner]] = {
    "encoder, 4 x 64, T = 128": sequences,
    "MLP, 3 x 512": wide,
    "conv4-32": lambda small: conv4(small, tasks=1, steps=10),
}


def loops(small: bool, device: torch.device) -> Iterator[str]:
    """Meta-gradients by `memory=`, and of repeated blocks with `remat=True`."""
    for name, make in LOOPS.items():
        options: list[dict[str, Any]] = [
            {"memory": memory} for memory in ("store", "checkpoint", "remat", "mixed")
        ]
        if make is sequences:
            options += [{"memory": memory, "remat": True} for memory in ("remat", "mixed")]
        learner = make(small).to(device)
        runs = {}
        for given in options:
            what = ", ".join(f"{key}={value}" for key, value in given.items())
            runs[what] = maml(over_tasks="loop", **given)(learner)
        yield from rows(name, runs, device, small)


PARTS: dict[str, Callable[[bool, torch.device], Any]] = {
    **{name: partial(layers, name) for name in LAYERS},
    "first-call": first_call,
    "loops": loops,
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="tiny networks, nothing is compiled")
    parser.add_argument("--part", nargs="*", choices=PARTS, default=[*PARTS])
    parser.add_argument("--device", default="cpu", type=torch.device)
    parser.add_argument("--one-call", nargs=2, metavar=("WAY", "LAYERS"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.one_call:
        name, layers = options.one_call
        run = compiled_product(int(layers), options.smoke, name)
        began = processor_seconds()
        run()
        print(json.dumps(processor_seconds() - began))
        return
    print(machine())
    for part in options.part:
        torch.manual_seed(0)
        print("\n".join(PARTS[part](options.smoke, options.device)), flush=True)


if __name__ == "__main__":
    main()
