"""memory= of hoglib.MAML: peak memory and time of a meta-gradient through ten inner steps on one task.

    python -m experiments.benchmarks.inner_loops [--smoke] [--device cuda]

Peaks count the tensors that are alive at once beyond parameters and data; times are medians of
interleaved repeats, relative to memory="store"; errors are relative to it too, in float32. One thread.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.benchmarks.memory import peak_bytes
from experiments.benchmarks.meta.tasks import Learner, classes, conv4
from experiments.benchmarks.meta.with_hoglib import maml
from experiments.benchmarks.remat import _seconds, encoder

STEPS, REPEATS = 10, 5
MEMORY = ("store", "checkpoint", "remat", "mixed")


class Sequences(nn.Module):
    """torch's transformer encoder with a linear layer of the mean over positions."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(encoder(width) for _ in range(layers))
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(x.mean(1))
        return out


def transformer(small: bool) -> Learner:
    width, length, layers = (8, 4, 2) if small else (64, 128, 4)
    batches = classes(1, 2, (length, width))
    steps = 2 if small else STEPS
    return Learner("encoder", Sequences(width, layers), F.cross_entropy, *batches, 0.05, steps)


def mlp(small: bool) -> Learner:
    width, shots, steps = (8, 2, 2) if small else (512, 200, STEPS)
    sizes = [(64, width), (width, width), (width, width)]
    layers: list[nn.Module] = [m for a, b in sizes for m in (nn.Linear(a, b), nn.GELU())]
    model = nn.Sequential(*layers, nn.Linear(width, 5))
    return Learner("mlp", model, F.cross_entropy, *classes(1, shots, (64,)), 0.05, steps)


# what makes the learner, small or not; and whether its network has repeated blocks
NETWORKS: dict[str, tuple[Callable[[bool], Learner], bool]] = {
    "encoder, 4 x 64, T = 128": (transformer, True),
    "MLP, 3 x 512": (mlp, False),
    "conv4-32": (lambda small: conv4(small, tasks=1, steps=2 if small else STEPS), False),
}


def rows(name: str, small: bool, device: torch.device) -> list[str]:
    make, repeats = NETWORKS[name]
    torch.manual_seed(0)
    learner = make(small).to(device)
    options: dict[str, dict[str, Any]] = {memory: {"memory": memory} for memory in MEMORY}
    if repeats:
        options |= {f"{m}, remat=True": {"memory": m, "remat": True} for m in ("remat", "mixed")}
    runs = {way: maml(over_tasks="loop", **given)(learner) for way, given in options.items()}
    found = {way: _flat(run()) for way, run in runs.items()}
    peaks = {way: peak_bytes(run, device) / 2**20 for way, run in runs.items()}
    times: dict[str, list[float]] = {way: [] for way in runs}
    for _ in range(1 if small else REPEATS):
        for way, run in runs.items():
            times[way].append(_seconds(run, device))
    unit, truth = median(times["store"]), found["store"]
    return [
        f"{name:26}{way:20}{peaks[way]:8.1f} MiB{median(taken) / unit:7.2f} of {1e3 * unit:.0f} ms"
        f"  error {float((found[way] - truth).norm() / truth.norm()):.0e}"
        for way, taken in times.items()
    ]


def _flat(found: Any) -> Tensor:
    return torch.cat([x.reshape(-1) for x in torch.utils._pytree.tree_leaves(found)]).double()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="tiny networks, in seconds")
    parser.add_argument("--device", default="cpu", type=torch.device)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for name in NETWORKS:
        print("\n".join(rows(name, options.smoke, options.device)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
