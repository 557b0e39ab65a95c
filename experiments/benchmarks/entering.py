"""`python -m experiments.benchmarks.entering`: what it costs to enter a graph, beside nothing in it.

The backend returns code that hands out what the capture computed, so that all of the time is hoglib's:
to find the graph of the arguments and to compare what it depends on with what it is now. Medians of
the CPU time of the process.
"""

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

import hoglib as hog
from experiments.benchmarks.timing import CLOCKS, machine, once, smoke

COUNTS = (1, 4, 16, 64)  # of tensors


def nothing(graph: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
    """Code of the graph that computes nothing: its outputs are those of the first call."""
    found = graph(*inputs)
    return lambda *_: found


def entered_tensors(count: int) -> Callable[[], Any]:
    """The sum of tensors in a dict."""
    tensors = {f"p{i}": torch.randn(4) for i in range(count)}

    def total(tensors: dict[str, Tensor]) -> Tensor:
        return torch.stack([x.sum() for x in tensors.values()]).sum()

    return partial(hog.compile(total, backend=nothing, check=False), tensors)


def entered_module(count: int) -> Callable[[], Any]:
    """A function that closes over a module with so many parameters, looked up in each call."""
    model = network(count).requires_grad_(False)
    run = hog.compile(lambda x: model(x).square().sum(), backend=nothing, check=False)
    return partial(run, torch.randn(2, 4))


def entered_loss(count: int) -> Callable[[], Any]:
    """A loss whose graph computes the gradients by as many parameters, which backward hands on."""
    model = network(count)
    loss: Any = hog.compiled_loss(lambda x: model(x).square().sum(), backend=nothing, check=False)
    return partial(loss, torch.randn(2, 4))


def network(count: int) -> nn.Module:
    return nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(count)])


ENTERED = {
    "arguments of `hog.compile`": entered_tensors,
    "parameters that its function reaches": entered_module,
    "parameters of `hog.compiled_loss`, without backward": entered_loss,
}


def rows(small: bool) -> list[str]:
    lines = []
    for what, make in ENTERED.items():
        times: dict[int, float] = {}
        for count in COUNTS[:2] if small else COUNTS:
            entered = make(count)
            for _ in range(3):
                entered()
            repeats = 3 if small else 2000
            times[count] = statistics.median(once(entered, CLOCKS["cpu"]) for _ in range(repeats))
        first, last = min(times), max(times)
        slope = (times[last] - times[first]) / (last - first)
        shown = ", ".join(f"{count}: {seconds * 1e6:.0f}" for count, seconds in times.items())
        fixed = times[first] - slope * first
        lines.append(f"| {what} | {shown} | {fixed * 1e6:.0f} + {slope * 1e6:.2f} a tensor |")
    return lines


def main() -> None:
    small = smoke(__doc__)
    print(f"{machine()}\n")
    print("| tensors | us a call, by their number | |")
    print("|---|---|---|")
    print("\n".join(rows(small)))


if __name__ == "__main__":
    main()
