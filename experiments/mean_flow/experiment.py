"""One-step generation of points in the plane by MeanFlow, beside flow matching."""

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

import hoglib as hog
from experiments import runs
from experiments.checks import finite, fraction, learning_rate, not_negative
from experiments.mean_flow.plots import plot_samples
from experiments.mean_flow.table import flows_table
from experiments.mean_flow.velocity import Velocity
from experiments.shared.experiment import Experiment
from experiments.shared.quality import score_points, wasserstein_distance
from experiments.shared.second_order import SecondOrderProblem, sum_by_parameters_and_inputs
from experiments.shared.terms import sum_of_terms

MEAN, INSTANT = "meanflow", "flow_matching"
SAMPLING_SEED = 2**42  # of the noise that samples begin with, the same at every evaluation
SMALL = 1e-2  # c of the weights
ADVICE = "Lower lr."
# What is compared: network and number of steps, by label.
SAMPLERS = {
    "MeanFlow, 1 step": (MEAN, 1),
    "MeanFlow, 2 steps": (MEAN, 2),
    "flow matching, 1 step": (INSTANT, 1),
    "flow matching, 50 steps": (INSTANT, 50),
}
HeldOut = tuple[Tensor, Tensor]


class MeanFlow(Experiment):
    r"""Two networks from one start on the same points: one learns mean velocities, one instant ones.

        z_t = (1 - t) x + t e,  v = e - x       a point x at time 0, noise e ~ N(0, 1) at time 1

        flow matching   mean |u(z_t, t, t) - v|^2
        MeanFlow        mean |D|^2 / (|D|^2 + c)^p,   D = u(z_t, r, t) - (v - (t - r) du/dt)
                        du/dt = v du/dz + du/dt, the derivative along (v, 0, 1) by `hoglib.jvp`

    where the target and the weight are constants of the gradient. MeanFlow's one-step sample is
    e - u(e, 0, 1); flow matching takes n steps z - u(z, t, t) / n.

    Args:
        width: Features of a token of the networks.
        layers: Their blocks.
        heads: Their heads of attention.
        frequencies: Frequencies of their features.
        instant: Share of the points with r = t, where MeanFlow's loss is that of flow matching.
        power: p; 1 for images in the paper. A larger one makes modes sharper, and less equal.
        lr: Learning rate of Adam, which falls linearly to zero over the run.
        compile: True runs both gradients as compiled graphs, which round differently; "eager" as graphs
            that are not compiled.
    References:
        Geng, Deng, Bai, Kolter and He, Mean Flows for One-step Generative Modeling, 2025, algorithms 1
        and 2, eq. 10 and 22.
        Lipman, Chen, Ben-Hamu, Nickel and Le, Flow Matching for Generative Modeling, 2023.
    """

    def __init__(
        self,
        width: int = 32,
        layers: int = 2,
        heads: int = 4,
        frequencies: int = 4,
        instant: float = 0.5,
        power: float = 0.75,
        lr: float = 2e-3,
        compile: bool | str = False,
    ) -> None:
        super().__init__()
        self.instant = fraction("instant", instant, "0.5 is usual.")
        self.power = not_negative("power", power)
        self.lr = learning_rate("lr", lr)
        start = Velocity(width, layers, heads, frequencies)
        self.networks = nn.ModuleDict({MEAN: start, INSTANT: deepcopy(start)})
        self._losses = {
            name: sum_of_terms(f"the loss of {name}", terms, self.networks[name], compile)
            for name, terms in ((MEAN, self.meanflow_terms), (INSTANT, self.flow_matching_terms))
        }
        self.options: dict[str, Any] = {
            "width": width, "layers": layers, "heads": heads, "frequencies": frequencies,
            "instant": instant, "power": power,
        }  # fmt: skip

    def forward(self, e: Tensor) -> Tensor:
        return self.sample(MEAN, e, 1)

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        drawn = x, torch.randn_like(x), *self.draw_times(len(x))
        found = {name: loss(*drawn) for name, loss in self._losses.items()}
        for name, one in found.items():
            finite(f"loss of {name}", one.loss, ADVICE)
        values = {f"train/{name}": one.loss for name, one in found.items()}
        self.log_dict(values, prog_bar=True, batch_size=len(x))
        return torch.stack([one.objective for one in found.values()]).sum()

    def draw_times(self, count: int) -> tuple[Tensor, Tensor]:
        """r <= t, uniform, with r = t for a share of them: [count, 1] each."""
        times = torch.rand(count, 2, device=self.device)
        r, t = times.amin(1, keepdim=True), times.amax(1, keepdim=True)
        instant = torch.rand(count, 1, device=self.device) < self.instant
        return torch.where(instant, t, r), t

    def meanflow_terms(self, x: Tensor, e: Tensor, r: Tensor, t: Tensor) -> tuple[Tensor]:
        z, v = (1 - t) * x + t * e, e - x
        along = v, torch.zeros_like(r), torch.ones_like(t)
        u, dudt = hog.jvp(self.networks[MEAN], (z, r, t), along)
        square = (u - (v - (t - r) * dudt).detach()).square().sum(1)
        return ((square / (square.detach() + SMALL) ** self.power).mean(),)

    def flow_matching_terms(self, x: Tensor, e: Tensor, r: Tensor, t: Tensor) -> tuple[Tensor]:
        u = self.networks[INSTANT]((1 - t) * x + t * e, t, t)
        return ((u - (e - x)).square().sum(1).mean(),)

    def second_order_problem(self, x: Tensor) -> SecondOrderProblem:
        """The sum of mean velocities, by the parameters and by the points z."""
        e, (r, t) = torch.randn_like(x), self.draw_times(len(x))
        z = (1 - t) * x + t * e
        return sum_by_parameters_and_inputs(self.networks[MEAN], z, torch.sum, r, t)

    def sample(self, name: str, e: Tensor, steps: int) -> Tensor:
        """The points that a network makes of noise [n, 2] in steps of equal length.

        A step from t to r is z - (t - r) u(z, r, t) of mean velocities, and of instant ones Euler's,
        z - (t - r) u(z, t, t).
        """
        z = e
        with torch.no_grad():
            for k in range(steps, 0, -1):
                t = torch.full_like(e[:, :1], k / steps)
                r = t if name == INSTANT else torch.full_like(t, (k - 1) / steps)
                z = z - self.networks[name](z, r, t) / steps
        return z

    def samples(self, count: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Noise, and what each sampler makes of it; leaves the random state."""
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(SAMPLING_SEED)
            e = torch.randn(count, 2, device=self.device)
        return e, {label: self.sample(name, e, n) for label, (name, n) in SAMPLERS.items()}

    def validation_step(self, batch: HeldOut, batch_idx: int) -> None:
        real, _ = batch
        for label, points in self.samples(len(real))[1].items():
            self.log(f"val/{label}", wasserstein_distance(points, real), batch_size=len(real))

    def test_step(self, batch: HeldOut, batch_idx: int) -> None:
        real, other = batch
        noise, found = self.samples(len(real))
        rows = {
            label: score_points(points, self.data.target, real)
            for label, points in {**found, "real points": other}.items()
        }
        for label in found:
            for name in ("high", "distance"):
                value = getattr(rows[label], name)
                self.log(f"test/{name}/{label}", value, batch_size=len(real))
        folder = runs.run_folder(self.trainer)
        runs.write_summary(folder, {label: row._asdict() for label, row in rows.items()})
        table = flows_table(rows, self.data.target.name, self.data.target.parts, len(real))
        distances = {label: row.distance for label, row in rows.items()}
        picture = plot_samples(folder / "samples.png", real, noise, found, distances)
        runs.write_report(folder, table, picture)
