"""Peak memory that the operating system sees, beside that of tensors.

    python -m experiments.benchmarks.resident CASE [--size N]

A case runs once at half the size, as a warm-up, then for the peak of the process (VmHWM) beyond its
memory before, for CPU time, and for the peak of what torch's allocator gave. One thread.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hoglib as hog
from experiments.benchmarks.memory import peak_allocated, peak_resident
from experiments.benchmarks.problems import perceptron

Run = Callable[[], Any]


def attention(length: int) -> Run:
    q, k, v = (torch.randn(1, 1, length, 32) for _ in range(3))

    def square(given: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return F.scaled_dot_product_attention(*given, is_causal=True).square().sum()

    return lambda: hog.hvp(square, (q, k, v), (q, k, v))


def blocks(batch: int) -> Run:
    model = nn.Sequential(*(perceptron([128, 256, 128], nn.GELU) for _ in range(32)))
    loss, params = hog.functional_loss(model, F.mse_loss), hog.trainable_params(model)
    data = torch.randn(batch, 128), torch.randn(batch, 128)
    return lambda: hog.hvp(loss, params, params, data, remat=True)


def distances(rows: int) -> Run:
    x = torch.randn(rows, 16)
    return lambda: hog.hvp(lambda x: torch.cdist(x, x).square().sum(), x, x)


def training(steps: int) -> Run:
    model = perceptron([64, 256, 64], nn.GELU)
    x, call = torch.randn(512, 64), torch.func.functional_call

    def inner(params: Any, weights: Tensor) -> Tensor:
        return weights @ (call(model, params, (x,)) - x.flip(0)).square().mean(1) / 512

    given = inner, inner, hog.trainable_params(model), torch.ones(512)
    options: Any = {"rule": hog.meta.adam(1e-3), "steps": steps, "memory": "remat"}
    return lambda: hog.meta.hypergradient(*given, **options)


def maml(steps: int) -> Run:
    model = perceptron([64, 256, 256, 5], nn.GELU)
    learner = hog.MAML(model, F.cross_entropy, inner_steps=steps, memory="store")
    x, y = torch.randn(1, 200, 64), torch.randint(5, (1, 200))
    return lambda: torch.autograd.grad(
        learner.loss([((x[0], y[0]), (x[0], y[0]))]), list(learner.parameters())
    )


CASES: dict[str, tuple[Callable[[int], Run], int]] = {
    "attention": (attention, 4096),
    "remat, 32 blocks": (blocks, 512),
    "cdist": (distances, 1024),
    "hypergradient, remat": (training, 50),
    "MAML, store": (maml, 5),
}


def measure(name: str, size: int) -> dict[str, float]:
    """MiB of the process and of tensors, and seconds of CPU time, in this process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    make, _ = CASES[name]
    make(max(1, size // 2))()
    run = make(size)
    resident = peak_resident(run) or 0
    start = time.process_time()
    run()
    seconds = time.process_time() - start
    held = peak_allocated(run)
    return {"held": held / 2**20, "resident": resident / 2**20, "seconds": seconds}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--size", type=int, help="of its sequences, rows or steps")
    options = parser.parse_args(arguments)
    print(json.dumps(measure(options.case, options.size or CASES[options.case][1])))


if __name__ == "__main__":
    main()
