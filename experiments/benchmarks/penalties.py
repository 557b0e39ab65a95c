"""`python -m experiments.benchmarks.penalties`: gradient penalties against those written by hand.

Each row is a step of training: the penalty and its gradient by the critic's parameters. Before it is
timed the gradient is compared with that of the code by hand. Compiled steps are those of smooth
critics: R1 by `loss.backward()`, with memory as torch's allocator gives it.
"""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hoglib as hog
from experiments.benchmarks.critic_steps import (
    Critic,
    between,
    by_hand,
    by_hoglib,
    slopes,
    with_r1,
    with_r1_by_hand,
)
from experiments.benchmarks.critics import critics
from experiments.benchmarks.memory import peak_allocated, peak_bytes
from experiments.benchmarks.timing import beside, machine, once, quartiles, smoke

Step = Callable[[Critic, Tensor, Tensor], Tensor]


def r1_by_hand(critic: Critic, real: Tensor, fake: Tensor) -> Tensor:
    return slopes(critic, real)[1].mean() / 2


def r1(critic: Critic, real: Tensor, fake: Tensor) -> Tensor:
    value: Tensor = hog.penalties.r1(critic, real)
    return value


def r1_in_pieces(critic: Critic, real: Tensor, fake: Tensor) -> Tensor:
    value: Tensor = hog.penalties.r1(critic, real, micro_batch=len(real) // 4)
    return value


def wgan_gp_by_hand(critic: Critic, real: Tensor, fake: Tensor) -> Tensor:
    squares = slopes(critic, between(real, fake))[1]
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


SMOOTH = {
    "tanh, 784-1024-1024": "MLP",
    "SiLU, 4 convolutions": "CNN",
    "softplus, 4 convolutions": "CNN, softplus",
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
        for title, (theirs, ours) in STEPS.items():
            critic, real = make()
            if small:
                real = real[:8]
            fake = torch.randn_like(real)
            # attention cannot be differentiated twice by torch's own kernels: by hand, through hoglib's
            with hog.second_order():
                expected = gradient(theirs, critic, real, fake)
            base = _runnable(partial(gradient, theirs, critic, real, fake))
            methods = {name: partial(gradient, f, critic, real, fake) for name, f in ours.items()}
            for run in methods.values():
                same(run(), expected)
            lines += _cells(network, title, base, methods, 1 if small else 60)
    return lines


def compiled_rows(small: bool, backend: str = "inductor") -> list[str]:
    lines = []
    for network, name in SMOOTH.items():
        point = replace(critics(name, tiny=small), backend=backend)
        base = by_hand(with_r1_by_hand)(point)
        steps = {
            "hoglib": by_hoglib(with_r1)(point),
            "compiled": by_hoglib(with_r1, hog.compiled_loss)(point),
        }
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
