"""A deep autoencoder trained by second-order optimizers and by Adam, with as many gradients."""

from collections.abc import Sequence
from copy import deepcopy
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

import hoglib as hog
from experiments import logs, runs
from experiments.autoencoder.plots import plot_race
from experiments.autoencoder.table import race_table
from experiments.checks import at_least, hidden_widths, learning_rate
from experiments.shared.digits import PIXELS, Images
from experiments.shared.networks import mlp
from experiments.shared.race import ADAM, KFAC, LABELS, LOSS_COST, NEWTON, PRECONDITIONED, Raced
from experiments.shared.second_order import SecondOrderProblem
from hoglib.errors import ArgumentValueError


class Race(Raced):
    """Autoencoders from the same start, each with an optimizer of its own.

    A training step is one step of the first optimizer on the batch, and then steps of each of the
    others until it has cost as much. The cost is counted in gradients of the whole batch: a loss counts
    a third, as it is one pass of three; a Gauss-Newton product one (J v takes one pass, J^T w two),
    times the fraction of the images that it uses; Kronecker factors two passes and the multiplications
    for A and G; a step of Adam adam_batch / batch. Eigenvectors and inverses, whose cost does not
    depend on the number of images, are in the seconds only.

    Args:
        hidden: Widths of the hidden layers, from pixels to pixels.
        act: Their activation.
        optimizers: Some of newton_cg, newton_kfac (with preconditioner="kfac"), kfac and adam. Default:
            newton_cg and adam.
        curvature_batch: Images that the matrix of a step of newton_cg is computed on; null for all.
        damping: Initial damping of `hoglib.curvature.NewtonCG`.
        max_iter: Its largest number of iterations of conjugate gradients.
        stagnation_tol: Its relative progress below which conjugate gradients stop.
        preconditioned: Options of newton_kfac that differ from these.
        kfac: Options of `hoglib.curvature.KFAC`, which takes all images in each step.
        adam_batch: Images of a step of Adam.
        adam_lr: Learning rate of Adam.
    """

    one_process = "whose optimizers are compared by the work of one process"

    def __init__(
        self,
        hidden: list[int] | None = None,
        act: str = "tanh",
        optimizers: list[str] | None = None,
        curvature_batch: int | None = 256,
        damping: float = 0.1,
        max_iter: int = 100,
        stagnation_tol: float = 0.01,
        preconditioned: dict[str, Any] | None = None,
        kfac: dict[str, Any] | None = None,
        adam_batch: int = 128,
        adam_lr: float = 1e-3,
    ) -> None:
        super().__init__()
        widths = hidden_widths(hidden, [256, 128, 64, 32, 4, 32, 64, 128, 256])
        if curvature_batch is not None:
            at_least("curvature_batch", curvature_batch, 1)
        self.curvature_batch = curvature_batch
        self.adam_batch = at_least("adam_batch", adam_batch, 1)
        self.adam_lr = learning_rate("adam_lr", adam_lr)
        self.newton: dict[str, Any] = {
            "damping": damping, "max_iter": max_iter, "stagnation_tol": stagnation_tol,
        }  # fmt: skip
        self.preconditioned = {**self.newton, **(preconditioned or {}), "preconditioner": "kfac"}
        self.kfac = dict(kfac or {})
        self.names = _checked_names(optimizers)
        start = mlp([PIXELS, *widths, PIXELS], act)
        self.start_race({name: deepcopy(start) for name in self.names})
        self.objectives = {
            name: hog.functional_loss(
                network, reconstruction_error, forward=lambda network, x: network(x)
            )
            for name, network in self.networks.items()
        }
        self.factor_cost = cost_of_factors([PIXELS, *widths, PIXELS])
        self.options = {
            "hidden": widths, "act": act, "curvature_batch": curvature_batch, **self.newton,
            "adam_batch": adam_batch, "adam_lr": adam_lr, "optimizers": self.names,
            "preconditioned": self.preconditioned, "kfac": self.kfac,
        }  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.networks[self.names[0]](x)

    def configure_optimizers(self) -> Any:
        def made(name: str) -> Any:
            if name == ADAM:
                return torch.optim.Adam(self.networks[ADAM].parameters(), lr=self.adam_lr)
            if name == KFAC:
                return hog.curvature.KFAC(self.objectives[name], **self.kfac)
            options = self.newton if name == NEWTON else self.preconditioned
            return hog.curvature.NewtonCG(self.objectives[name], **options)

        return [made(name) for name in self.names]

    def training_step(self, batch: Images, batch_idx: int) -> None:
        every: Any = self.optimizers(use_pl_optimizer=False)
        counted: Any = self.optimizers()  # Lightning's wrapper, whose steps are those of the run
        every, counted = (x if isinstance(x, list) else [x] for x in (every, counted))
        steps = {
            name: partial(self._step, name, optimizer if i else counted[0], optimizer, batch.x)
            for i, (name, optimizer) in enumerate(zip(self.names, every, strict=True))
        }
        self.race(batch, self.data.held_out, steps)

    def losses(self, batch: Images) -> dict[str, Tensor]:
        return {name: self.error(name, batch) for name in self.names}

    def _step(self, name: str, optimizer: Any, inner: Any, x: Tensor) -> float:
        """Take a step; returns its cost, in gradients of the whole batch. inner: without a wrapper."""
        if name == ADAM:
            count = min(self.adam_batch, len(x))
            part = random_part(x, count)
            optimizer.zero_grad()
            reconstruction_error(self.networks[ADAM](part), part).backward()
            optimizer.step()
            return count / len(x)
        if name == KFAC:
            optimizer.step(lambda: x)
            info = inner.info
            self.log(f"damping/{name}", info.damping, batch_size=len(x))
            return (
                1 + LOSS_COST * info.values + info.products + self.factor_cost * info.factor_batches
            )
        count = len(x) if self.curvature_batch is None else min(self.curvature_batch, len(x))
        part = x if count == len(x) else random_part(x, count)
        optimizer.step(lambda: x, curvature=part)
        info = inner.info
        label = "damping" if name == NEWTON else f"damping/{name}"
        self.log(label, info.damping, batch_size=len(x))
        factors = self.factor_cost if name == PRECONDITIONED else 0
        return 1 + LOSS_COST * info.values + (info.products + factors) * count / len(x)

    def second_order_problem(self, batch: Images) -> SecondOrderProblem:
        """The reconstruction error, by the parameters of the first network."""
        first = self.names[0]
        return self.objectives[first], hog.trainable_params(self.networks[first]), batch.x

    def test_step(self, batch: Images, batch_idx: int) -> None:
        folder = runs.run_folder(self.trainer)
        errors = {name: self.error(name, batch).item() for name in self.networks}
        self.log_dict({f"test/{key}": e for key, e in errors.items()}, batch_size=len(batch.x))
        curves, images = logs.curves(folder), {"digits": batch.x}
        with torch.no_grad():
            images |= {LABELS[name]: self.networks[name](batch.x) for name in errors}
        labels = {name: LABELS[name] for name in errors}
        picture = plot_race(folder / "race.png", curves, labels, images)
        runs.write_report(folder, race_table(curves, errors), picture)

    @torch.no_grad()
    def error(self, name: str, held_out: Images) -> Tensor:
        x = held_out.x.to(self.device)
        return reconstruction_error(self.networks[name](x), x)


def cost_of_factors(widths: Sequence[int]) -> float:
    """The cost of Kronecker factors in gradients: a pass forward, one backward to the inputs of layers,
    and A and G, which take into^2 + out^2 multiplications where the gradient takes into * out."""
    pairs = list(pairwise(widths))
    squares = sum(into**2 + out**2 for into, out in pairs)
    return LOSS_COST * (2 + squares / sum(into * out for into, out in pairs))


def _checked_names(optimizers: list[str] | None) -> list[str]:
    names = [NEWTON, ADAM] if optimizers is None else list(optimizers)
    if not names or len({*names}) < len(names) or {*names} - LABELS.keys():
        raise ArgumentValueError(
            f"optimizers: expected some of {', '.join(LABELS)}, each once, got {names}."
        )
    return names


def reconstruction_error(outputs: Tensor, images: Tensor) -> Tensor:
    """1/4 |outputs - images|^2, the mean over images: the squared error of pixels from 0 to 1."""
    return (outputs - images).square().sum(1).mean() / 4


def random_part(x: Tensor, count: int) -> Tensor:
    """Random rows, drawn on the CPU, so that a run on a GPU draws the same."""
    return x[torch.randperm(len(x))[:count].to(x.device)]
