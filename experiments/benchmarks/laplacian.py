"""`python -m experiments.benchmarks.laplacian`: Laplacians in the inputs against those written by hand.

Each row is a loss of the Laplacian and its gradient by the parameters, as a PINN takes them; and the
Laplacian alone, as an evaluation does. Then the networks of the literature on collapsed Taylor mode,
with peak memory and compiled, and the biharmonic beside two nested Laplacians.
"""

import itertools
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import hoglib as hog
from experiments.benchmarks.memory import peak_allocated
from experiments.benchmarks.timing import interleaved, program
from experiments.benchmarks.with_jax import to_jax
from experiments.benchmarks.workload import Missing, peer

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


def collapsed_by_hand(net: nn.Module, x: Tensor, keep: bool) -> Tensor:
    """Values, first derivatives and the sum of second ones through linear layers and tanh."""
    value, first, total = x, torch.eye(x.shape[1])[:, None], torch.zeros(())
    with torch.set_grad_enabled(keep):
        for layer in net.children():
            if isinstance(layer, nn.Linear):
                value, first = layer(value), first @ layer.weight.T
                total = total @ layer.weight.T if total.dim() else total
            else:
                value = value.tanh()
                slope = 1 - value * value
                total = slope * total - 2 * value * slope * first.square().sum(0)
                first = slope * first
    return total


JAX = "JAX's jet, jitted"
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


# points and widths of the networks of Dangel et al., 2025, and the small one; repeats
COLLAPSED = [(256, (50, 128, 128, 1), 8), (32, (50, 768, 768, 512, 512, 1), 4)]
BIHARMONIC = [(64, (5, 64, 64, 1), 8), (8, (5, 768, 768, 512, 512, 1), 4)]


def network(coordinates: int, outputs: int, width: int) -> nn.Module:
    return of_widths((coordinates, width, width, width, outputs))


def of_widths(widths: Sequence[int]) -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


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


def compiled(net: nn.Module, x: Tensor) -> Callable[[], Any]:
    """The same step as one graph."""
    params = {name: p.detach().clone().requires_grad_() for name, p in net.named_parameters()}

    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        func = lambda x: torch.func.functional_call(net, params, (x,))  # noqa: E731
        return hog.laplacian(func, x)[1].square().mean()

    value = hog.compiled_loss(loss)

    def step() -> Any:
        result = value(params, x)
        return torch.autograd.grad(result, list(params.values()), allow_unused=True)

    return step


def in_jax(net: nn.Module, x: Tensor) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """The Laplacian by JAX's jet along all coordinates, and the gradient of its mean square; jitted."""
    jax, jnp, jet = peer("jax"), peer("jax.numpy"), peer("jax.experimental.jet")
    linear = [layer for layer in net.children() if isinstance(layer, nn.Linear)]
    params = [(to_jax(layer.weight.T), to_jax(layer.bias)) for layer in linear]
    points = to_jax(x)
    directions = jnp.broadcast_to(jnp.eye(x.shape[1])[:, None], (x.shape[1], *x.shape))

    def func(params: Any, x: Any) -> Any:
        for weight, bias in params[:-1]:
            x = jnp.tanh(x @ weight + bias)
        return x @ params[-1][0] + params[-1][1]

    def laplacian(params: Any, points: Any, directions: Any) -> Any:
        def second(v: Any) -> Any:
            series = ((v, jnp.zeros_like(v)),)
            return jet.jet(partial(func, params), (points,), series)[1][1]

        return jax.vmap(second)(directions).sum(0)

    value = jax.jit(laplacian)
    gradient = jax.jit(jax.grad(lambda *args: (laplacian(*args) ** 2).mean()))
    args = (params, points, directions)
    return (
        lambda: torch.as_tensor(value(*args).tolist()),
        lambda: jax.block_until_ready(gradient(*args)),
    )


def biharmonic(net: Network, x: Tensor, keep: bool) -> Tensor:
    return hog.bilaplacian(net, x, create_graph=keep)[1]


def twice_nested(net: Network, x: Tensor, keep: bool) -> Tensor:
    """The loop of `double_grad`, of its own result."""
    x = x.detach().requires_grad_()

    def laplacian(f: Tensor) -> Tensor:
        (g,) = torch.autograd.grad(f.sum(), x, create_graph=True)
        return torch.stack([
            torch.autograd.grad(g[:, i].sum(), x, create_graph=True)[0][:, i]
            for i in range(x.shape[1])
        ]).sum(0)  # fmt: skip

    return laplacian(laplacian(net(x)[:, 0]))[:, None]


def higher_rows(small: bool) -> list[str]:
    """Time and peak memory of loss and gradient: ours, and the same by hand."""
    lines = []
    hand: dict[str, Any] = {"nested by hand": double_grad, "collapsed by hand": collapsed_by_hand}
    tables = (
        ("Laplacian", {"ours": ours, **hand}, COLLAPSED),
        ("biharmonic", {"ours": biharmonic, "nested by hand": twice_nested}, BIHARMONIC),
    )
    for what, ways, sizes in tables:
        for points, widths, repeats in sizes[:1] if small else sizes:
            net, x = of_widths(widths), torch.rand(points, widths[0])
            expected = ways["nested by hand"](net, x, True).detach()
            for way in ways.values():
                error = (way(net, x, True).detach() - expected).norm() / expected.norm()
                assert error < 1e-3, f"{what}: off by {error:.1e}"
            steps: dict[str, Callable[[], Any]] = {
                name: partial(train, way, net, x) for name, way in ways.items()
            }
            if what == "Laplacian" and not small:
                steps["ours, compiled"] = compiled(net, x)
            if what == "Laplacian":
                with suppress(Missing):
                    value, steps[JAX] = in_jax(net, x)
                    assert (value() - expected).norm() < 1e-3 * expected.norm(), "in JAX"
            seconds = interleaved(steps, 1 if small else repeats)
            base_time = seconds["nested by hand"]
            base_memory = peak_allocated(steps["nested by hand"])
            for name, step in steps.items():
                mib = peak_allocated(step)  # of torch's tensors
                memory = "" if name == JAX else f"{mib / 2**20:.1f} ({mib / base_memory:.2f})"
                lines.append(
                    f"| {what}, {'-'.join(map(str, widths))}, N = {points} | {name} | "
                    f"{seconds[name] * 1e3:.1f} ({seconds[name] / base_time:.2f}) | {memory} |"
                )
    return lines


TABLES = {
    f"milliseconds: {' / '.join(WAYS)}\n\n"
    "| points x coordinates -> outputs | loss and gradient by parameters | alone |": rows,
    "| | | ms (to nested by hand) | MiB (to nested by hand) |": higher_rows,
}


if __name__ == "__main__":
    program(__doc__, TABLES)
