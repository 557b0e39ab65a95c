"""Physics-informed networks: Gauss-Newton steps on an equation's residual, beside Adam."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import hoglib as hog
from experiments import logs, runs
from experiments.checks import at_least, hidden_widths, learning_rate, not_negative, one_of
from experiments.pinn.plots import plot_pinn
from experiments.pinn.squares import GRID, Equation, grid
from experiments.pinn.table import pinn_table
from experiments.shared.networks import mlp
from experiments.shared.race import ADAM, LABELS, LOSS_COST, NEWTON, Raced
from experiments.shared.second_order import SecondOrderProblem
from hoglib.errors import ArgumentValueError, NotPositiveDefiniteError

Weighted = tuple[Tensor, Tensor]  # points [n, 2], and the weights of their squared residuals [n]

SLABS = 16  # of time, for causal weights
CG, DENSE = "cg", "dense"  # solvers of a Newton step
ROWS = 512  # of a Jacobian that are computed at once


class Residual(nn.Module):
    """The residual of an equation at points, (L u - f) / scale, of u = ansatz(network).

    Args:
        network: The network.
        equation: The equation, whose boundary and initial conditions u has by construction.
    """

    def __init__(self, network: nn.Module, equation: Equation) -> None:
        super().__init__()
        self.network, self.equation = network, equation
        self.scale = float(equation.source(grid()).square().mean().sqrt()) or 1.0

    def solution(self, p: Tensor) -> Tensor:
        return self.equation.ansatz(self.network, p)

    def forward(self, p: Tensor) -> Tensor:
        applied = self.equation.operator(self.solution, p)[1]
        return (applied - self.equation.source(p)) / self.scale

    def causal_weights(self, p: Tensor, residuals: Tensor) -> Tensor:
        """exp(-epsilon sum_(k < i) loss_k) for the points in slab i of time: what comes later counts
        once what comes before is solved. Ones without causality."""
        slab = (p[:, 1] * SLABS).long().clamp(max=SLABS - 1)
        total = p.new_zeros(2, SLABS)
        total.index_add_(1, slab, torch.stack([residuals.square(), torch.ones_like(residuals)]))
        losses = total[0] / total[1].clamp(min=1)
        return (-self.equation.causality * (losses.cumsum(0) - losses)).exp()[slab]

    def loss(self, p: Tensor) -> Tensor:
        """The weighted mean of squared residuals, with weights that are constants."""
        residuals = self(p)
        return (self.causal_weights(p, residuals.detach()) * residuals.square()).mean()

    def weighted(self, p: Tensor) -> Weighted:
        """Points with their weights."""
        if not self.equation.causality:
            return p, torch.ones_like(p[:, 0])
        with torch.no_grad():
            return p, self.causal_weights(p, self(p))


class Pinns(Raced):
    """A race of networks for one equation; the first is the one that is drawn, Adam's is the last.

    Args:
        names: Their optimizers.
        hidden: Widths of the hidden layers.
        adam_batch: Points of a step of Adam.
        adam_lr: Learning rate of Adam, which falls linearly to zero.
        inputs: Of the network: 2, and 11 for the Allen-Cahn equation.
    """

    residuals: dict[str, Residual]
    start = "after the same steps of Adam"

    def __init__(
        self,
        names: Sequence[str],
        hidden: Sequence[int],
        adam_batch: int = 512,
        adam_lr: float = 5e-3,
        inputs: int = 2,
    ) -> None:
        super().__init__()
        self.adam_batch = at_least("adam_batch", adam_batch, 1)
        self.adam_lr = learning_rate("adam_lr", adam_lr)
        self.inputs = at_least("inputs", inputs, 1)
        start = mlp([inputs, *hidden, 1], "tanh")
        self.start_race({name: deepcopy(start) for name in names})
        self.options = {
            "hidden": hidden, "adam_batch": adam_batch, "adam_lr": adam_lr, "inputs": inputs,
        }  # fmt: skip

    def adam_step(self, loss: Callable[[Tensor], Tensor], batch: Tensor, batch_idx: int) -> float:
        """A step of Adam on new points; returns its cost, in gradients of the whole batch."""
        # not Lightning's wrapper: Adam's steps are not counted as steps of the run
        *_, adam = self.optimizers(use_pl_optimizer=False)  # type: ignore[misc]
        adam.param_groups[0]["lr"] = self.adam_lr * (1 - batch_idx / self.data.iterations)
        adam.zero_grad()
        loss(torch.rand(self.adam_batch, 2).to(self.device)).backward()
        adam.step()
        return self.adam_batch / len(batch)

    @property
    def first(self) -> str:
        return next(iter(self.networks))

    def forward(self, p: Tensor) -> Tensor:
        return self.residual(self.first).solution(p)

    def residual(self, name: str) -> Residual:
        return Residual(self.networks[name], self.equation)

    @property
    def equation(self) -> Equation:
        return self.data.equation

    def setup(self, stage: str) -> None:
        if self.inputs != self.equation.inputs:
            raise ArgumentValueError(
                f"inputs: expected {self.equation.inputs} for {self.equation.title}, got {self.inputs}."
            )

    def losses(self, batch: Tensor) -> dict[str, Tensor]:
        return {name: r(batch).square().mean() for name, r in self.residuals.items()}

    @torch.no_grad()
    def error(self, name: str, held_out: Tensor) -> Tensor:
        """|u - exact| / |exact| on the grid, in the Euclidean norm."""
        p = held_out.to(self.device)
        exact = self.equation.solution(p)
        return (self.residual(name).solution(p) - exact).norm() / exact.norm()

    def second_order_problem(self, batch: Tensor) -> SecondOrderProblem:
        """The mean squared residual, by the parameters of the network that is trained first."""
        residual = self.residual(self.first)
        return weighted_loss(residual), hog.trainable_params(residual), residual.weighted(batch)

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        folder, ends, fields = runs.run_folder(self.trainer), {}, {}
        for name in self.networks:
            residual = self.residual(name)
            with torch.no_grad():
                u, left = residual.solution(batch), residual(batch)
            off = u - self.equation.solution(batch)
            largest, root_mean_square = off.abs().max(), left.square().mean().sqrt()
            ends[name] = self.error(name, batch).item(), largest.item(), root_mean_square.item()
            fields[name] = tuple(part.reshape(GRID, GRID).cpu() for part in (u, off, left))
        self.log_dict({f"test/{name}": end[0] for name, end in ends.items()}, batch_size=len(batch))
        curves, labels = logs.curves(folder), {name: LABELS[name] for name in self.networks}
        title, shown = self.equation.title, fields[self.first]
        picture = plot_pinn(
            folder / "pinn.png", title, self.equation.axes, curves, labels, shown, self.start
        )
        runs.write_report(folder, pinn_table(title, curves, ends), picture)


class Pinn(Pinns):
    """Two networks for one equation: after the same steps of Adam one takes steps of NewtonCG.

        loss = mean over points of w ((L u - f) / scale)^2        scale^2 = mean f^2, or 1 if f is 0

    The weights w are 1, or, for an equation with a time, causal ones of the same points.
    A training step is one step of NewtonCG on the batch, and then steps of Adam, on adam_batch points
    each, until both have cost the same, counted as for the autoencoders (`experiments.shared.race`).

    With solver="dense" conjugate gradients are preconditioned by the exact inverse of G + damping I,
    from the Jacobian of the residuals by the P parameters, and end after one or two products: the
    step is one of Levenberg and Marquardt. It takes memory for P^2 numbers and n P^2 + P^3 / 3
    multiplications for n points.

    Args:
        hidden: Widths of the hidden layers.
        warm_up: Steps of Adam that both begin with, at its first learning rate.
        solver: Of the Newton steps: "cg", or "dense" for networks of some thousand parameters, best
            with trainer.precision 64-true.
        dense_cost: What the Jacobian and the factors of a dense step cost, in gradients of the batch.
        damping: Initial damping of `hoglib.curvature.NewtonCG`.
        max_iter: Its largest number of iterations of conjugate gradients.
        stagnation_tol: Its relative progress below which conjugate gradients stop.
        compile: Compile the loss of Adam and the products of NewtonCG.
        networks: Other options of `Pinns`.
    References:
        Müller and Zeinhofer, Achieving High Accuracy with PINNs via Energy Natural Gradient Descent,
        2023.
        Wang, Sankaran and Perdikaris, Respecting Causality Is All You Need for Training
        Physics-informed Neural Networks, 2022.
    """

    warm: Tensor

    one_process = "whose Newton steps are of one process's points"

    def __init__(
        self,
        hidden: list[int] | None = None,
        warm_up: int = 600,
        solver: str = CG,
        dense_cost: float = 20.0,
        damping: float = 1e-3,
        max_iter: int = 150,
        stagnation_tol: float = 1e-3,
        compile: bool = False,
        **networks: Any,
    ) -> None:
        super().__init__((NEWTON, ADAM), hidden_widths(hidden, [32, 32]), **networks)
        self.warm_up = at_least("warm_up", warm_up, 0)
        self.solver = one_of("solver", solver, (CG, DENSE))
        self.dense_cost = not_negative("dense_cost", dense_cost)
        self.newton: dict[str, Any] = {
            "damping": damping, "max_iter": max_iter, "stagnation_tol": stagnation_tol,
            "compile": compile,
        }  # fmt: skip
        self.options |= {
            "warm_up": warm_up, "solver": solver, "dense_cost": dense_cost, **self.newton,
        }  # fmt: skip
        self.register_buffer("warm", torch.zeros((), dtype=torch.bool))

    def configure_optimizers(self) -> Any:
        # in a dict, so that they are no modules of this one
        self.residuals = {name: self.residual(name) for name in self.networks}
        trained, adam_loss = self.residuals[NEWTON], self.residuals[ADAM].loss
        self.adam_loss = hog.compiled_loss(adam_loss) if self.newton["compile"] else adam_loss
        adam = torch.optim.Adam(self.networks[ADAM].parameters(), lr=self.adam_lr)
        options = dict(self.newton)
        if self.solver == DENSE:
            self.jacobian = Jacobian(trained)
            options |= {"preconditioner": self._inverse, "warm_start": 0}
        return [hog.curvature.NewtonCG(weighted_loss(trained), **options), adam]

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        adam_step = partial(self.adam_step, self.adam_loss, batch, batch_idx)
        if not self.warm:
            self.evaluations += sum(adam_step() for _ in range(self.warm_up))
            self.networks[NEWTON].load_state_dict(self.networks[ADAM].state_dict())
            self.warm = torch.ones_like(self.warm)
        self.race(batch, grid(), {NEWTON: lambda: self._newton_step(batch), ADAM: adam_step})

    def _newton_step(self, batch: Tensor) -> float:
        """A step of NewtonCG; returns its cost, in gradients of the whole batch."""
        optimizer: Any = self.optimizers()[0]  # type: ignore[index]
        self.weighted = self.residuals[NEWTON].weighted(batch)
        optimizer.step(lambda: self.weighted)
        info = optimizer.optimizer.info
        self.log("damping", info.damping, batch_size=len(batch))
        cost: float = 1 + LOSS_COST * info.values + info.products
        return cost + self.dense_cost if self.solver == DENSE else cost

    def _inverse(self, G: hog.GGNOperator, damping: float) -> Callable[[Tensor], Tensor]:
        """v -> (G + damping I)^-1 v, G = 2/n J^T W J at the weighted points of the step."""
        p, weights = self.weighted
        J = self.jacobian(p) * (2 / len(p) * weights).sqrt()[:, None]
        A = J.T @ J
        A.diagonal().add_(damping)
        factor, failed = torch.linalg.cholesky_ex(A)
        if failed:
            raise NotPositiveDefiniteError(
                f"solver='dense': expected G + damping I to be positive definite with damping "
                f"{damping:.1e}, got a matrix that rounding in {A.dtype} has made indefinite; set "
                "trainer.precision to 64-true, or raise damping."
            )
        return lambda v: torch.cholesky_solve(v.reshape(len(factor), -1), factor).reshape(v.shape)


class Jacobian:
    """The gradients of an equation's residual at points by the parameters, p [n, 2] -> J [n, P].

    The gradient at one point is captured as a graph, once, and `torch.func.vmap` maps it over the
    points, where `hoglib.bilaplacian` itself has no exact route. The columns are in the order of
    `hoglib.trainable_params`, as those of the Gauss-Newton matrix.
    """

    def __init__(self, residual: Residual) -> None:
        self.residual = residual
        self._row: Callable[..., Any] | None = None

    def __call__(self, p: Tensor) -> Tensor:
        params = hog.trainable_params(self.residual)
        if self._row is None:
            # a bound method has an argument more than make_fx counts
            self._row = make_fx(lambda params, p: self._gradient(params, p))(params, p[0])
        rows = torch.func.vmap(self._row, (None, 0), chunk_size=ROWS)
        with torch.no_grad():
            parts = rows({name: value.detach() for name, value in params.items()}, p)
        return torch.cat([part.flatten(1) for part in parts], 1)

    def _gradient(self, params: dict[str, Tensor], p: Tensor) -> list[Tensor]:
        with torch.enable_grad():
            own = {name: value.detach().requires_grad_() for name, value in params.items()}
            value = torch.func.functional_call(self.residual, own, (p[None],))[0]
            return list(torch.autograd.grad(value, list(own.values()), materialize_grads=True))


def weighted_loss(residual: Residual) -> Any:
    """The weighted mean of squared residuals, a function of parameters and weighted points."""

    def forward(model: nn.Module, batch: Weighted) -> Tensor:
        residuals: Tensor = model(batch[0])
        return batch[1].sqrt() * residuals

    return hog.functional_loss(
        residual, lambda residuals, _: residuals.square().mean(), forward=forward
    )
