"""`python -m experiments.benchmarks.laplacian`: Laplacians in the inputs against nested loops by hand.

Each row is a loss of the Laplacian, or of the biharmonic, and its gradient by the parameters, as a PINN
takes them: time and peak memory, for the networks of the literature on collapsed Taylor mode.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import hoglib as hog
from experiments.benchmarks.memory import peak_allocated
from experiments.benchmarks.problems import perceptron
from experiments.benchmarks.timing import interleaved, program, relative_error

Network = Callable[[Tensor], Tensor]


def nested(net: Network, x: Tensor, times: int) -> Tensor:
    """The loop that papers on PINNs print, for each coordinate; of its own result again."""
    x = x.detach().requires_grad_()

    def laplacian(f: Tensor) -> Tensor:
        (g,) = torch.autograd.grad(f.sum(), x, create_graph=True)
        each = range(x.shape[1])
        second = [torch.autograd.grad(g[:, i].sum(), x, create_graph=True)[0][:, i] for i in each]
        return torch.stack(second).sum(0)

    f = net(x)[:, 0]
    for _ in range(times):
        f = laplacian(f)
    return f


def ours(net: Network, x: Tensor, times: int) -> Tensor:
    return (hog.laplacian if times == 1 else hog.bilaplacian)(net, x, create_graph=True)[1][:, 0]


WAYS = {"nested by hand": nested, "ours": ours}
# points and widths of the networks of Dangel et al., 2025, and small ones; repeats
SIZES = {
    "Laplacian": [
        (256, (2, 32, 32, 32, 1), 40),
        (256, (50, 128, 128, 1), 8),
        (32, (50, 768, 768, 512, 512, 1), 4),
    ],
    "biharmonic": [(64, (5, 64, 64, 1), 8), (8, (5, 768, 768, 512, 512, 1), 4)],
}


def compiled(net: nn.Module, x: Tensor) -> Callable[[], Any]:
    """The step of the Laplacian as one graph."""
    params = {name: p.detach().clone().requires_grad_() for name, p in net.named_parameters()}

    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        func = lambda x: torch.func.functional_call(net, params, (x,))  # noqa: E731
        return hog.laplacian(func, x)[1].square().mean()

    value = hog.compiled_loss(loss)
    leaves = list(params.values())
    return lambda: torch.autograd.grad(value(params, x), leaves, allow_unused=True)


def train(way: Callable[..., Tensor], net: nn.Module, x: Tensor, times: int) -> Any:
    loss = way(net, x, times).square().mean()
    return torch.autograd.grad(loss, list(net.parameters()), allow_unused=True)


def rows(small: bool) -> Iterator[str]:
    """Time and peak memory of loss and gradient."""
    for times, (what, sizes) in enumerate(SIZES.items(), 1):
        for points, widths, repeats in sizes[:1] if small else sizes:
            net, x = perceptron(widths, nn.Tanh), torch.rand(points, widths[0])
            error = relative_error(ours(net, x, times), nested(net, x, times))
            assert error < 1e-3, f"{what}: off by {error:.1e}"
            steps: dict[str, Any] = {
                name: partial(train, way, net, x, times) for name, way in WAYS.items()
            }
            if times == 1 and not small:
                steps["ours, compiled"] = compiled(net, x)
            seconds = interleaved(steps, 1 if small else repeats)
            peaks = {name: peak_allocated(step) / 2**20 for name, step in steps.items()}
            for name in steps:
                time, peak = (of[name] / of["nested by hand"] for of in (seconds, peaks))
                yield (
                    f"| {what}, {'-'.join(map(str, widths))}, N = {points} | {name} | "
                    f"{seconds[name] * 1e3:.1f} ({time:.2f}) | {peaks[name]:.1f} ({peak:.2f}) |"
                )


TABLES = {"| | | ms (to nested by hand) | MiB (to nested by hand) |": rows}


if __name__ == "__main__":
    program(__doc__, TABLES)
