"""Physics-informed networks by Levenberg and Marquardt's method, beside Adam and L-BFGS."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import hoglib as hog
from experiments.checks import at_least, hidden_widths, not_negative
from experiments.pinn.experiment import Pinns
from experiments.pinn.squares import grid
from experiments.shared.race import ADAM, LBFGS, LEVENBERG_MARQUARDT, LOSS_COST

SCALED = 1e8  # torch.optim.LBFGS ignores changes of gradients with y^T s below 1e-10


class LeastSquares(Pinns):
    """Three networks for one equation, from one start: Levenberg-Marquardt, L-BFGS, Adam.

        loss = mean over points of ((L u - f) / scale)^2

    A training step is one of `hoglib.curvature.LevenbergMarquardt`, and then steps of the others until
    these have cost the same. L-BFGS has the same points, which should be fixed (data.fixed), Adam new
    ones.

    Args:
        hidden: Widths of the hidden layers.
        damping: The first damping, as of the optimizer.
        geodesic: Whether steps are accelerated.
        jacobian_cost: What the Jacobian and the factor of a step cost, in gradients of the batch.
        history: Pairs of vectors that L-BFGS keeps.
        networks: Other options of `Pinns`.
    References:
        Müller and Zeinhofer, Achieving High Accuracy with PINNs via Energy Natural Gradient Descent,
        2023.
    """

    start = "from one start"
    one_process = "whose Levenberg-Marquardt steps are of one process's points"

    def __init__(
        self,
        hidden: list[int] | None = None,
        damping: float = 1e-3,
        geodesic: bool = True,
        jacobian_cost: float = 10.0,
        history: int = 100,
        **networks: Any,
    ) -> None:
        names = LEVENBERG_MARQUARDT, LBFGS, ADAM
        super().__init__(names, hidden_widths(hidden, [20, 20]), **networks)
        self.marquardt: dict[str, Any] = {"damping": damping, "geodesic": geodesic}
        self.jacobian_cost = not_negative("jacobian_cost", jacobian_cost)
        self.history = at_least("history", history, 1)
        self.options |= {**self.marquardt, "jacobian_cost": jacobian_cost, "history": history}

    def configure_optimizers(self) -> Any:
        # in a dict, so that they are no modules of this one
        self.residuals = {name: self.residual(name) for name in self.networks}
        parameters = {name: list(net.parameters()) for name, net in self.networks.items()}
        lbfgs = torch.optim.LBFGS(
            parameters[LBFGS], history_size=self.history, line_search_fn="strong_wolfe",
            tolerance_grad=0, tolerance_change=0,
        )  # fmt: skip
        adam = torch.optim.Adam(parameters[ADAM], lr=self.adam_lr)
        first = self.residuals[LEVENBERG_MARQUARDT]
        return [hog.curvature.LevenbergMarquardt(first, **self.marquardt), lbfgs, adam]

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        # the steps of the others are not counted as steps of the run
        _, lbfgs, _ = self.optimizers(use_pl_optimizer=False)  # type: ignore[misc]

        def lbfgs_step() -> float:
            evaluations = 0

            def closure() -> Any:
                nonlocal evaluations
                evaluations += 1
                lbfgs.zero_grad()
                loss = self.residuals[LBFGS](batch).square().mean()
                (SCALED * loss).backward()
                return SCALED * loss.detach()

            lbfgs.step(closure)
            return evaluations

        def adam_loss(points: Tensor) -> Tensor:
            return self.residuals[ADAM](points).square().mean()

        steps: dict[str, Callable[[], float]] = {
            LEVENBERG_MARQUARDT: lambda: self._step(batch),
            LBFGS: lbfgs_step,
            ADAM: lambda: self.adam_step(adam_loss, batch, batch_idx),
        }
        self.race(batch, grid(), steps)

    def _step(self, batch: Tensor) -> float:
        """A step of Levenberg-Marquardt; returns its cost, in gradients of the whole batch."""
        optimizer: Any = self.optimizers()[0]  # type: ignore[index]
        optimizer.step(lambda: (batch,))
        info = optimizer.optimizer.info
        self.log("damping", info.damping, batch_size=len(batch))
        return 1 + self.jacobian_cost + LOSS_COST * float(info.residuals)
