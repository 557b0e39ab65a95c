"""`python -m experiments.benchmarks.penalties`: gradient penalties against those written by hand.

Each row is a step of training: the penalty and its gradient by the critic's parameters. Before it is
timed the gradient is held against that of the code by hand. Steps that are compiled are those of smooth
critics: R1 by `loss.backward()`, with memory as torch's allocator gives it.
"""

import itertools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hoglib as hog
from experiments.benchmarks.memory import peak_allocated, peak_bytes
from experiments.benchmarks.timing import beside, machine, once, quartiles, smoke

Critic = Callable[[Tensor], Tensor]
Step = Callable[[Critic, Tensor, Tensor], Tensor]


def slopes(critic: Critic, x: Tensor) -> tuple[Tensor, Tensor]:
    """The scores at x, and the squared size of each one's gradient: double backward by hand."""
    x = x.detach().requires_grad_()
    scores = critic(x)
    (g,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
    return scores, g.flatten(1).square().sum(1)


def r1_by_hand(critic: Critic, real: Tensor, fake: Tensor) -> Tensor:
    return slopes(critic, real)[1].mean() / 2


def r1(critic: Critic, real: Tensor, fake: Tensor) -> Tensor:
    value: Tensor = hog.penalties.r1(critic, real)
    return value


def r1_in_pieces(critic: Critic, real: Tensor, fake: Tensor) -> Tensor:
    value: Tensor = hog.penalties.r1(critic, real, micro_batch=len(real) // 4)
    return value


def wgan_gp_by_hand(critic: Critic, real: Tensor, fake: Tensor) -> Tensor:
    e = torch.rand(len(real), *[1] * (real.dim() - 1))
    squares = slopes(critic, e * real + (1 - e) * fake)[1]
    return (squares.sqrt() - 1).square().mean()


def wgan_gp(critic: Critic, real: Tensor, fake: Tensor) -> Tensor:
    value: Tensor = hog.penalties.wgan_gp(critic, real, fake)
    return value


def step_by_hand(critic: Critic, real: Tensor, fake: Tensor) -> Tensor:
    """A critic's loss with R1 and R2, of one forward each."""
    (a, at_real), (b, at_fake) = slopes(critic, real), slopes(critic, fake)
    return F.softplus(b - a).mean() + (at_real + at_fake).mean() / 2


def step(critic: Critic, real: Tensor, fake: Tensor) -> Tensor:
    penalty, (a, b) = hog.penalties.r1_r2(critic, real, fake, return_outputs=True)
    loss: Tensor = F.softplus(b - a).mean() + penalty
    return loss


STEPS: dict[str, tuple[Step, dict[str, Step]]] = {
    "R1": (r1_by_hand, {"hoglib": r1, "in four pieces": r1_in_pieces}),
    "WGAN-GP": (wgan_gp_by_hand, {"hoglib": wgan_gp}),
    "loss, R1 and R2": (step_by_hand, {"hoglib": step}),
}


def with_r1_by_hand(critic: Critic, real: Tensor, fake: Tensor) -> Tensor:
    """A critic's loss with R1, of one forward each."""
    scores, squares = slopes(critic, real)
    return F.softplus(critic(fake) - scores).mean() + 5 * squares.mean()


def with_r1(critic: Critic, real: Tensor, fake: Tensor) -> Tensor:
    penalty, scores = hog.penalties.r1(critic, real, return_outputs=True)
    loss: Tensor = F.softplus(critic(fake) - scores).mean() + 10 * penalty
    return loss


def plane() -> tuple[nn.Module, Tensor]:
    widths = [2, 128, 128, 128]
    layers = [hog.nn.LinearAct(i, o, act="swish") for i, o in itertools.pairwise(widths)]
    return nn.Sequential(*layers, hog.nn.Linear(128, 1)), torch.randn(256, 2)


def digits() -> tuple[nn.Module, Tensor]:
    layers: list[nn.Module] = [nn.Flatten()]
    for i, o in ((784, 1024), (1024, 1024)):
        layers += [nn.Linear(i, o), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers, nn.Linear(1024, 1)), torch.randn(128, 1, 28, 28)


def images() -> tuple[nn.Module, Tensor]:
    layers: list[nn.Module] = []
    for i, o in ((3, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(i, o, 4, 2, 1), nn.SiLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(2048, 1)), torch.randn(32, 3, 32, 32)


def sequences() -> tuple[nn.Module, Tensor]:
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    return nn.Sequential(layer, nn.Flatten(), nn.Linear(32 * 64, 1)), torch.randn(16, 32, 64)


def tanh() -> tuple[nn.Module, Tensor]:
    layers = [nn.Linear(784, 1024), nn.Tanh(), nn.Linear(1024, 1024), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(1024, 1)), torch.randn(64, 784)


def convolutions(act: Callable[[], nn.Module]) -> tuple[nn.Module, Tensor]:
    layers: list[nn.Module] = []
    for channels in (3, 32, 32, 32):
        layers += [nn.Conv2d(channels, 32, 3, padding=1), act()]
    end = nn.Linear(32 * 32 * 32, 1)
    return nn.Sequential(*layers, nn.Flatten(), end), torch.randn(64, 3, 32, 32)


SMOOTH: dict[str, Any] = {
    "tanh, 784-1024-1024": tanh,
    "SiLU, 4 convolutions": partial(convolutions, nn.SiLU),
    "softplus, 4 convolutions": partial(convolutions, nn.Softplus),
}
NETWORKS = {
    "plane, 3 x 128": plane, "digits, 2 x 1024": digits, "images, 3 convolutions": images,
    "sequences, attention": sequences,
}  # fmt: skip


def gradient(function: Step, critic: nn.Module, real: Tensor, fake: Tensor) -> list[Any]:
    """One step, from the same random numbers."""
    torch.manual_seed(0)
    loss = function(critic, real, fake)
    return list(torch.autograd.grad(loss, list(critic.parameters()), allow_unused=True))


def same(ours: list[Any], theirs: list[Any]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        if b is not None and b.any():
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4 * float(b.abs().max()))


def rows(small: bool) -> list[str]:
    lines = []
    for network, make in NETWORKS.items():
        for title, (by_hand, ours) in STEPS.items():
            critic, real = make()
            if small:
                real = real[:8]
            fake = torch.randn_like(real)
            # attention cannot be differentiated twice by torch's own kernels: by hand, through hoglib's
            with hog.second_order():
                expected = gradient(by_hand, critic, real, fake)
            base = _runnable(partial(gradient, by_hand, critic, real, fake))
            methods = {name: partial(gradient, f, critic, real, fake) for name, f in ours.items()}
            for run in methods.values():
                same(run(), expected)
            lines += _cells(network, title, base, methods, 1 if small else 60)
    return lines


def backward(
    loss: Callable[[Tensor, Tensor], Tensor], critic: nn.Module, *given: Tensor
) -> list[Any]:
    """One step, as a training does it, which leaves nothing behind."""
    loss(*given).backward()
    found = [p.grad for p in critic.parameters()]
    critic.zero_grad()
    return found


def compiled_rows(small: bool, backend: str = "inductor") -> list[str]:
    lines = []
    base: Any
    for network, make in SMOOTH.items():
        critic, real = make()
        if small:
            real = real[:2]
        fake = torch.randn_like(real)
        losses: dict[str, Any] = {
            name: partial(loss, critic)
            for name, loss in (("by hand", with_r1_by_hand), ("hoglib", with_r1))
        }
        losses["compiled"] = hog.compiled_loss(losses["hoglib"], backend=backend)
        base = partial(backward, losses.pop("by hand"), critic, real, fake)
        steps = {name: partial(backward, loss, critic, real, fake) for name, loss in losses.items()}
        # a parameter's gradient in float32 is 1e-3 off float64's where terms nearly cancel, by hand too
        expected = torch.cat([g.flatten() for g in base()])
        for run in steps.values():
            found = torch.cat([g.flatten() for g in run()])
            if not (found - expected).norm() < 1e-3 * expected.norm():
                raise AssertionError(f"{network}: not the gradient by hand")
        lines += _cells(network, "loss and R1", base, steps, 1 if small else 20, peak_allocated)
    return lines


def _runnable(by_hand: Callable[[], object]) -> Callable[[], object] | None:
    try:
        by_hand()
    except RuntimeError:
        return None
    return by_hand


def _cells(
    network: str,
    title: str,
    base: Callable[[], object] | None,
    methods: Mapping[str, Callable[[], object]],
    repeats: int,
    peak: Callable[[Callable[[], object]], int] | None = None,
) -> list[str]:
    lines = []
    peak = peak or partial(peak_bytes, device=torch.device("cpu"))
    if base is None:
        for name, run in methods.items():
            run()
            seconds = quartiles([once(run) for _ in range(repeats)])["median"]
            lines.append(f"| {network} | {title} | {name} | raises | {seconds * 1e3:.2f} ms | |")
        return lines
    units, pairs = beside(base, methods, repeats, 1.0 if repeats == 1 else 24.0)
    unit, memory = quartiles(units)["median"], peak(base)
    for name, run in methods.items():
        ratio = quartiles([ratio for _, ratio in pairs[name]])
        part = peak(run) / memory
        lines.append(
            f"| {network} | {title} | {name} | {unit * 1e3:.2f} ms | {ratio['median']:.2f} "
            f"({ratio['low']:.2f} to {ratio['high']:.2f}) | {part:.2f} |"
        )
    return lines


def main() -> None:
    small = smoke(__doc__)
    print(f"{machine()}\n")
    print("| critic | step | | by hand | time to that, quartiles | peak memory to that |")
    print("|---|---|---|---|---|---|")
    print("\n".join(rows(small) + compiled_rows(small, "eager" if small else "inductor")))


if __name__ == "__main__":
    main()
