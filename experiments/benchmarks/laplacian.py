"""`python -m experiments.benchmarks.laplacian`: Laplacians in the inputs against those written by hand.

Each row is a loss of the Laplacian and its gradient by the parameters, as a PINN takes them; and the
Laplacian alone, as an evaluation does.
"""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import hoglib as hog
from experiments.benchmarks.timing import interleaved, machine, smoke

Network = Callable[[Tensor], Tensor]


def ours(net: Network, x: Tensor, keep: bool) -> Tensor:
    return hog.laplacian(net, x, create_graph=keep)[1]


def double_grad(net: Network, x: Tensor, keep: bool) -> Tensor:
    """The loop that papers on PINNs print: for each output, and for each coordinate."""
    x = x.detach().requires_grad_()
    found = []
    for f in net(x).unbind(1):
        (g,) = torch.autograd.grad(f.sum(), x, create_graph=True)
        terms = [
            torch.autograd.grad(g[:, i].sum(), x, retain_graph=True, create_graph=keep)[0][:, i]
            for i in range(x.shape[1])
        ]
        found.append(torch.stack(terms).sum(0))
    return torch.stack(found, 1)


def forward_over_reverse(net: Network, x: Tensor, keep: bool) -> Tensor:
    """All directions and outputs by vmap, in one `torch.func.jvp` of `torch.func.vjp`."""
    outputs = net(x[:1]).shape[1]

    def term(e: Tensor, u: Tensor) -> Tensor:
        def gradient(points: Tensor) -> Tensor:
            pulling: Any = torch.func.vjp(net, points)
            return pulling[1](u.expand(len(x), outputs))[0]

        along: Any = torch.func.jvp(gradient, (x,), (e.expand_as(x),))
        return (along[1] * e).sum(1)

    over_outputs = torch.func.vmap(term, (None, 0))
    over_both = torch.func.vmap(over_outputs, (0, None))
    found = over_both(torch.eye(x.shape[1]), torch.eye(outputs)).sum(0).T
    return found if keep else found.detach()


def hessian_trace(net: Network, x: Tensor, keep: bool) -> Tensor:
    """The trace of `torch.func.hessian` at each point, by vmap."""
    hessian = torch.func.hessian(lambda point: net(point[None])[0])
    found = torch.func.vmap(hessian)(x).diagonal(dim1=2, dim2=3).sum(2)
    return found if keep else found.detach()


WAYS = {
    "ours": ours,
    "double grad": double_grad,
    "jvp of vjp": forward_over_reverse,
    "func.hessian": hessian_trace,
}
# points, coordinates, outputs, width of three hidden layers, repeats
SIZES = [
    (256, 2, 1, 32, 40), (4096, 2, 1, 64, 8), (1024, 3, 1, 64, 12), (256, 2, 3, 32, 40),
    (1024, 3, 4, 64, 8), (1024, 16, 1, 64, 6), (64, 16, 16, 64, 6), (64, 64, 1, 64, 6),
    (16, 784, 1, 64, 3),
]  # fmt: skip


def network(coordinates: int, outputs: int, width: int) -> nn.Module:
    widths = [coordinates, width, width, width]
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(width, outputs))


def train(way: Callable[..., Tensor], net: nn.Module, x: Tensor) -> Any:
    loss = way(net, x, True).square().mean()
    return torch.autograd.grad(loss, list(net.parameters()), allow_unused=True)


def rows(small: bool) -> list[str]:
    lines = []
    for points, coordinates, outputs, width, repeats in SIZES[:1] if small else SIZES:
        net, x = network(coordinates, outputs, width), torch.rand(points, coordinates)
        expected = double_grad(net, x, False)
        for way in WAYS.values():
            torch.testing.assert_close(way(net, x, True).detach(), expected, rtol=1e-2, atol=1e-3)
        cells = []
        for step in (
            {name: partial(train, way, net, x) for name, way in WAYS.items()},
            {name: partial(way, net, x, False) for name, way in WAYS.items()},
        ):
            seconds = interleaved(step, 1 if small else repeats)
            cells.append(" / ".join(f"{value * 1e3:.1f}" for value in seconds.values()))
        lines.append(f"| {points} x {coordinates} -> {outputs} | {cells[0]} | {cells[1]} |")
    return lines


def main() -> None:
    small = smoke(__doc__)
    print(f"{machine()}\n\nmilliseconds: {' / '.join(WAYS)}\n")
    print("| points x coordinates -> outputs | loss and gradient by parameters | alone |")
    print("|---|---|---|")
    print("\n".join(rows(small)))


if __name__ == "__main__":
    main()
