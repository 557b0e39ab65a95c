"""Depth: the memory and time of a Hessian-vector product with recomputed blocks, and its first call.

    python -m experiments.benchmarks.depth [--smoke] [--part memory|growth|first-call|replay]

The network is torch's transformer encoder as in `experiments.benchmarks.remat`; products are by
`hog.hvp`, reverse over reverse, or forward over reverse.

- memory: plain, with `remat=True`, and with `compile=True` as well, in both modes. Peaks count what
  torch's allocator gave at one time, compiled code included, besides parameters, vectors and data.
  Times are medians of interleaved runs.
- growth: the peak at 12 and at 48 layers. What a layer adds is compared with its gradient, its part of
  the product, its input and two cotangents of that, which are kept from layer to layer.
- first-call: seconds of the processor, of the process and of the compilers that it starts, until a
  product is there, in a process of its own with an empty cache.
- replay: a hypergradient through 1,000 steps, in times of the training.

One thread.
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hoglib as hog
from experiments.benchmarks.memory import peak_allocated
from experiments.benchmarks.remat import FULL, SMOKE, encoder

MIB = 2**20
NAME = "experiments.benchmarks.depth"
METHODS: dict[str, dict[str, Any]] = {
    "plain": {},
    "remat": {"remat": True},
    "remat, compiled": {"remat": True, "compile": True},
    "compiled": {"compile": True},
    "forward, remat": {"mode": "forward-over-reverse", "remat": True},
    "forward, remat, compiled": {
        "mode": "forward-over-reverse", "remat": True, "compile": True,
    },
}  # fmt: skip


def product(layers: int, small: bool) -> tuple[Callable[..., Any], int, int]:
    """The Hessian-vector product of an encoder, the bytes of its parameters and of a block's input."""
    sizes = (SMOKE if small else FULL)["transformer"]
    torch.manual_seed(0)
    model = nn.Sequential(*(encoder(sizes.width) for _ in range(layers)))
    x = torch.randn(*sizes.batch, sizes.width)
    loss = hog.functional_loss(model, F.mse_loss)
    params = hog.trainable_params(model)
    v = {name: torch.ones_like(p) for name, p in params.items()}
    weights = sum(p.nbytes for p in params.values())
    return partial(hog.hvp, loss, params, v, (x, x.flip(0))), weights, x.nbytes


def memory(small: bool) -> list[str]:
    """Peak and time of the products of one network, by each method."""
    layers, repeats = (2, 1) if small else (8, 7)
    run, *_ = product(layers, small)
    chosen = {name: options for name, options in METHODS.items() if name != "compiled"}
    if small:
        chosen = {
            name: options | ({"compile": "eager"} if "compile" in options else {})
            for name, options in chosen.items()
        }
    expected = _flat(run()[1])
    errors, peaks, times = {}, {}, {name: list[float]() for name in chosen}
    for name, options in chosen.items():
        errors[name] = float((_flat(run(**options)[1]) - expected).norm() / expected.norm())
        peaks[name] = peak_allocated(partial(_forget, run, options))
    for _ in range(repeats):
        for name, options in chosen.items():
            began = perf_counter()
            run(**options)
            times[name].append(perf_counter() - began)
    plain, most = median(times["plain"]), peaks["plain"]
    return [
        f"memory      {layers} layers, {name:24} {peaks[name] / MIB:8.1f} MiB {peaks[name] / most:5.2f}"
        f" {1e3 * median(times[name]):8.1f} ms {median(times[name]) / plain:5.2f}"
        f"  error {errors[name]:.0e}"
        for name in chosen
    ]


def growth(small: bool) -> list[str]:
    """The peak at two depths, and how much of it each layer adds."""
    depths = (2, 4) if small else (12, 48)
    lines, peaks, kept = [], [], []
    for layers in depths:
        run, weights, inputs = product(layers, small)
        run(remat=True)
        peaks.append(peak_allocated(partial(_forget, run, {"remat": True})) / MIB)
        kept.append((2 * weights + 3 * layers * inputs) / MIB)
        lines.append(f"growth      {layers} layers, remat: {peaks[-1]:8.1f} MiB")
    more = depths[1] - depths[0]
    return [
        *lines,
        f"growth      each layer {(peaks[1] - peaks[0]) / more:.2f} MiB; its gradient, product, input "
        f"and two cotangents are {(kept[1] - kept[0]) / more:.2f}",
    ]


def first_call(small: bool) -> list[str]:
    """Seconds of the processor until there is a product, at two depths."""
    lines = []
    compiled = [name for name, options in METHODS.items() if "compile" in options]
    for name in compiled[:1] if small else compiled:
        seconds = []
        for layers in (2,) if small else (2, 24):
            with tempfile.TemporaryDirectory() as cache:
                command = [sys.executable, "-m", NAME, "--one-call", name, str(layers)]
                done = subprocess.run(
                    [*command, *(["--smoke"] if small else [])], check=True, text=True,
                    stdout=subprocess.PIPE, env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache},
                )  # fmt: skip
            seconds.append(json.loads(done.stdout.splitlines()[-1]))
            lines.append(f"first call  {layers} layers, {name:24} {seconds[-1]:6.1f} s")
        lines.append(f"first call  {name}: the last to the first {seconds[-1] / seconds[0]:.2f}")
    return lines


def _one_call(name: str, layers: int, small: bool) -> float:
    options = METHODS[name] | ({"compile": "eager"} if small else {})
    run, *_ = product(layers, small)
    began = _processor_seconds()
    run(**options)
    return _processor_seconds() - began


def _processor_seconds() -> float:
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used)


def replay(small: bool) -> list[str]:
    """A hypergradient by the weights of 256 examples, in times of the training."""
    steps, width = (9, 4) if small else (1000, 64)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, width), nn.Tanh(), nn.Linear(width, 10))
    params, x = hog.trainable_params(model), torch.randn(256, 16)
    y, weights = torch.arange(256) % 10, torch.ones(256)
    outputs = hog.functional_loss(model, F.cross_entropy).outputs

    def inner(params: Any, weights: Tensor) -> Tensor:
        each = F.cross_entropy(outputs(params, (x, y)), y, reduction="none")
        return (weights * each).mean()

    def outer(params: Any, weights: Tensor) -> Tensor:
        return F.cross_entropy(outputs(params, (-x, y)), y)

    def training() -> Any:
        state: Any = {name: p.detach().clone().requires_grad_() for name, p in params.items()}
        optimizer = torch.optim.Adam(state.values(), lr=1e-3)
        for _ in range(steps):
            optimizer.zero_grad()
            inner(state, weights).backward()
            optimizer.step()

    with tempfile.TemporaryDirectory() as directory:
        options: dict[str, dict[str, Any]] = {
            "remat": {"memory": "remat"},
            "checkpoint": {"memory": "checkpoint"},
            "checkpoint, log": {"memory": "checkpoint", "schedule": "log"},
            "disk": {"memory": "disk", "directory": directory},
        }
        lines, plain = [], min(_seconds(training) for _ in range(2))
        for name, option in options.items():
            run = partial(
                hog.meta.hypergradient, outer, inner, params, weights, steps=steps,
                rule=hog.meta.adam(1e-3, eps=1e-4), **option,
            )  # fmt: skip
            times = _seconds(run) / plain
            lines.append(
                f"replay      {steps} steps, {name:16} {times:5.1f} trainings by torch.optim"
            )
    return lines


PARTS = {"memory": memory, "growth": growth, "first-call": first_call, "replay": replay}


def _forget(run: Callable[..., Any], options: dict[str, Any]) -> None:
    run(**options)


def _flat(tree: dict[str, Tensor]) -> Tensor:
    return torch.cat([x.reshape(-1) for x in tree.values()]).double()


def _seconds(run: Callable[[], Any]) -> float:
    began = perf_counter()
    run()
    return perf_counter() - began


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="tiny networks, nothing is compiled")
    parser.add_argument("--part", nargs="*", choices=PARTS, default=[*PARTS])
    parser.add_argument("--one-call", nargs=2, metavar=("METHOD", "LAYERS"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.one_call:
        name, layers = options.one_call
        print(json.dumps(_one_call(name, int(layers), options.smoke)))
        return
    where = platform.processor() or platform.machine()
    print(f"torch {torch.__version__}, {where}, one thread, load {os.getloadavg()[0]:.1f}")
    for part in options.part:
        print("\n".join(PARTS[part](options.smoke)), flush=True)


if __name__ == "__main__":
    main()
