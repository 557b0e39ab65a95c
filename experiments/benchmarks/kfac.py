"""What Kronecker factors save: products of NewtonCG and of linear systems, and gradients of examples.

    python -m experiments.benchmarks.kfac [--smoke] [--part newton|systems|norms] [--seeds 5]

- newton: the deep autoencoder of configs/curvature/kfac.yaml, by NewtonCG without a preconditioner and
  with KFAC. "to" are the products until the loss that 16 steps without a preconditioner reach, "at" is
  the loss at the products that these took; both by seed and as a median of the ratios.
- systems: products until conjugate gradients solve (G + damping I) x = b to a residual of 1e-5, at the
  start and after training, without a preconditioner, with KFAC, and with low-rank ones, whose own
  products are told apart.
- norms: the CPU time for norms of the gradients of examples by `per_example_gradient_norms`, and from
  the gradients by `per_example_gradients`; medians of turns.

One thread. Products and losses depend on the machine by rounding only. Times of factors and products
beside curvlinops: `python -m experiments.benchmarks --workload kfac "kfac products"`.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hoglib as hog
from experiments.benchmarks.timing import CLOCKS, interleaved, machine, single_threaded
from experiments.shared.networks import mlp

PIXELS = 64
HIDDEN = [256, 128, 64, 32, 4, 32, 64, 128, 256]
STEPS, CURVATURE_BATCH = 16, 256


class Point(NamedTuple):
    """After a step: products so far, and the loss."""

    products: int
    loss: float


def autoencoder(seed: int, small: bool) -> tuple[Any, Tensor]:
    """The loss and the images of a seed, as in the experiment."""
    # they import lightning, which fails beside the torchvision that curvlinops brings
    from experiments.autoencoder import reconstruction_error
    from experiments.shared.digits import Digits

    torch.manual_seed(seed)
    x = Digits(train=64 if small else 1297, seed=seed).train.x
    hidden = [8, 4, 8] if small else HIDDEN
    network = mlp([PIXELS, *hidden, PIXELS], "tanh")
    return hog.functional_loss(
        network, reconstruction_error, forward=lambda network, x: network(x)
    ), x


def steps(seed: int, small: bool, damping: float, **options: Any) -> Iterator[Point]:
    """The steps of NewtonCG; those of the same seed draw the same images for the matrix."""
    loss, x = autoencoder(seed, small)
    optimizer = hog.curvature.NewtonCG(
        loss, damping=damping, max_iter=100, stagnation_tol=0.01, **options
    )
    drawn = torch.Generator().manual_seed(seed)
    products = 0
    while True:
        part = x[torch.randperm(len(x), generator=drawn)[:CURVATURE_BATCH]]
        optimizer.step(x, curvature=part)
        info = optimizer.info
        assert info is not None
        products += info.products
        yield Point(products, info.loss_after)


def until(run: Iterator[Point], loss: float, products: int) -> tuple[int, float]:
    """The products to a loss, and the loss at so many products."""
    reached, at = 0, float("inf")
    for point in run:
        if not reached and point.loss <= loss:
            reached = point.products
        if point.products <= products:
            at = point.loss
        if reached and point.products >= products:
            return reached, at
        if point.products > 10 * products:
            return reached or point.products, at
    raise AssertionError("a run has no end")


def newton(small: bool, seeds: int) -> Iterator[str]:
    """Products and losses of NewtonCG, by damping and seed."""
    count = 2 if small else STEPS
    for damping in (0.1,) if small else (0.1, 0.01):
        products: list[float] = []
        losses: list[float] = []
        for seed in range(seeds):
            plain = steps(seed, small, damping)
            *_, last = [next(plain) for _ in range(count)]
            run = steps(seed, small, damping, preconditioner="kfac")
            to, at = until(run, last.loss, last.products)
            products.append(to / last.products)
            losses.append(at / last.loss)
            yield (
                f"newton   damping {damping}, seed {seed}; without: {last.products} products, loss "
                f"{last.loss:.4f}; with: to {to} ({products[-1]:.2f}), at {at:.4f}"
            )
        yield (
            f"newton   damping {damping}: products to the loss {_spread(products)}, loss at the "
            f"products {_spread(losses)} of those without"
        )


def classifier(seed: int, small: bool, random: bool) -> tuple[Any, Any, Any]:
    """A network of two hidden layers, its parameters and data: random ones, or digits."""
    from experiments.shared.digits import Digits  # imports lightning, as above

    torch.manual_seed(seed)
    count, width = (32, 8) if small else (1000, 50)
    if random:
        x, y = torch.randn(count, PIXELS), torch.randint(10, (count,))
    else:
        x, y = (part[:count] for part in Digits(seed=seed).train)
    model = nn.Sequential(
        nn.Linear(PIXELS, width),
        nn.Tanh(),
        nn.Linear(width, width),
        nn.Tanh(),
        nn.Linear(width, 10),
    )
    return hog.functional_loss(model, F.cross_entropy), hog.trainable_params(model), (x, y)


def systems(small: bool, seeds: int) -> Iterator[str]:
    """Products to a solution, at the start and after training, on two kinds of data."""
    for random in (True, False):
        for trained in (0,) if small else (0, 300):
            for damping in (1e-2,) if small else (1e-2, 1e-3, 1e-4):
                counts: dict[str, list[int]] = {}
                for seed in range(seeds):
                    for name, found in _solved(seed, small, random, trained, damping).items():
                        counts.setdefault(name, []).append(found)
                where = "random data" if random else "digits"
                yield (
                    f"systems  {where}, after {trained} steps of Adam, damping {damping:g}: "
                    + ", ".join(f"{name} {median(found):g}" for name, found in counts.items())
                )


def _solved(seed: int, small: bool, random: bool, trained: int, damping: float) -> dict[str, int]:
    loss, params, batch = classifier(seed, small, random)
    adam = torch.optim.Adam(params.values(), lr=1e-2)
    for _ in range(trained):
        adam.zero_grad()
        loss(params, batch).backward()
        adam.step()
    G = hog.GGNOperator(loss, params, batch)
    rank = 5 if small else 100
    low = G.low_rank(rank, generator=torch.Generator().manual_seed(seed))
    K = hog.KFACOperator(loss, params, batch)
    corrected = hog.KFACOperator(loss, params, batch, eigenvalue_corrected=True)
    b = G.ravel(G.gradient()[1])
    ways = {
        "without": None,
        "KFAC": K.inverse(damping),
        "EKFAC": corrected.inverse(damping),
        f"low rank {rank}": low.preconditioner(damping),
    }
    return {
        name: G.solve(b, damping=damping, preconditioner=way, max_iter=3000, return_info=True)[
            1
        ].products
        for name, way in ways.items()
    }


class Images(nn.Sequential):
    """Convolutions of 3 x 3, pooled, and a linear layer."""

    def __init__(self, channels: int, layers: int) -> None:
        widths = [3, *[channels] * layers]
        convs: list[nn.Module] = []
        for into, out in pairwise(widths):
            convs += [nn.Conv2d(into, out, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        super().__init__(*convs, nn.Flatten(), nn.LazyLinear(10))


class Tokens(nn.Module):
    """A layer of torch's encoder, the mean over positions, and a linear layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(width, 2, 4 * width, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x).mean(1))


def networks(small: bool) -> dict[str, tuple[Callable[[], nn.Module], Tensor]]:
    """name: (makes the network, an input)."""
    n, c, s = (4, 4, 8) if small else (64, 16, 32)
    return {
        "MLP": (
            lambda: nn.Sequential(nn.Linear(24 * c, 16 * c), nn.Tanh(), nn.Linear(16 * c, 10)),
            torch.randn(n, 24 * c),
        ),
        "CNN, small": (lambda: Images(c, 2), torch.randn(n, 3, s, s)),
        "CNN, wide": (lambda: Images(8 * c, 3), torch.randn(n // 4, 3, s, s)),
        "encoder, short": (lambda: Tokens(8 * c), torch.randn(n, s // 4, 8 * c)),
        "encoder, long": (lambda: Tokens(2 * c), torch.randn(n // 4, 4 * s, 2 * c)),
    }


def norms(small: bool, seeds: int) -> Iterator[str]:
    """Times of the norms, by each way."""
    for name, (make, x) in networks(small).items():
        torch.manual_seed(0)
        model = make()
        model(x)
        loss, params = hog.functional_loss(model, F.cross_entropy), hog.trainable_params(model)
        batch = x, torch.arange(len(x)) % 10
        ways = {
            "norms": partial(hog.curvature.per_example_gradient_norms, loss, params, batch),
            "from gradients": partial(_materialised, loss, params, batch),
        }
        ours, theirs = (way() for way in ways.values())
        error = float((ours - theirs).norm() / theirs.norm())
        seconds = interleaved(ways, 1 if small else 15, CLOCKS["cpu"])
        mine, other = seconds.values()
        yield (
            f"norms    {name:16} {1e3 * mine:8.1f} ms, from gradients {1e3 * other:8.1f} ms, "
            f"{mine / other:.2f}  error {error:.0e}"
        )


def _materialised(loss: Any, params: Any, batch: Any) -> Tensor:
    _, gradients = hog.per_example_gradients(loss, params, batch)
    squares = [g.flatten(1).square().sum(1) for g in gradients.values()]
    return torch.stack(squares).sum(0).sqrt()


PARTS = {"newton": newton, "systems": systems, "norms": norms}


def _spread(values: Sequence[float]) -> str:
    return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="tiny networks, one seed")
    parser.add_argument("--part", nargs="*", choices=PARTS, default=[*PARTS])
    parser.add_argument("--seeds", type=int, default=5, help="of newton and systems (5)")
    options = parser.parse_args(arguments)
    single_threaded()
    print(machine())
    for part in options.part:
        for line in PARTS[part](options.smoke, 1 if options.smoke else options.seeds):
            print(line, flush=True)


if __name__ == "__main__":
    main()
