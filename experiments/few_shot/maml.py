"""Few-shot regression: MAML, and the conventionally trained baseline it is compared with."""

import copy
from abc import abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import hoglib as hog
from experiments import logs, runs
from experiments.checks import finite, hidden_widths, learning_rate
from experiments.few_shot.plots import plot_adaptation, plot_curves
from experiments.few_shot.table import sinusoid_table, summarize_errors
from experiments.shared.compile_choice import CompileChoice, CompileOption, WithCompileChoice
from experiments.shared.learners import errors_after, make_learner
from experiments.shared.networks import mlp
from experiments.shared.second_order import SecondOrderProblem
from hoglib.meta import Learner

Batch = Any  # (x, y), or what else the learner's loss takes
Tasks = tuple[Batch, Batch]


class FewShotRegression(WithCompileChoice):
    """What both methods share (abstract): the network, adaptation to held-out tasks, and their errors.

    Args:
        hidden: Widths of the hidden layers.
        act: Their activation.
        inner_lr: Learning rate of the inner loop.
        inner_steps: Steps of the inner loop.
        first_order: Whether MAML leaves out second derivatives.
        lr: Learning rate of the outer Adam.
        baseline: A run directory, of which the newest version is taken, or a checkpoint; its errors
            stand beside this model's in the table.
        algorithm: "maml", "reptile" or "imaml".
        options: Further arguments of `hoglib.MAML`, `hoglib.meta.Reptile` or `hoglib.meta.IMAML`, such
            as learn_lr, rule, inner_params or memory.
        compile: Whether MAML's meta-gradient runs as a graph: null, if that pays for the steps of the
            run, compiled if that pays too; true; false; or "eager" or "inductor", as in `hoglib.MAML`.
            A resumed run continues as it began.
    """

    label: str
    eval_steps = (0, 1, 5, 10)  # gradient steps after which held-out tasks are evaluated

    def __init__(
        self,
        hidden: list[int] | None = None,
        act: str = "tanh",
        inner_lr: float = 0.01,
        inner_steps: int = 1,
        first_order: bool = False,
        lr: float = 1e-3,
        baseline: str | None = None,
        algorithm: str = "maml",
        options: dict[str, Any] | None = None,
        compile: CompileOption = None,
    ) -> None:
        super().__init__()
        widths = [1, *hidden_widths(hidden, [40, 40]), 1]
        inner = {"inner_lr": inner_lr, "inner_steps": inner_steps, **(options or {})}
        if first_order:
            inner["first_order"] = True  # an argument of MAML alone
        self.maml = make_learner(algorithm, mlp(widths, act), F.mse_loss, inner)
        self.compile_choice = self._compile_choice(compile)
        self.lr = learning_rate("lr", lr)
        self.baseline = baseline

    def forward(self, x: Tensor) -> Tensor:
        return self.maml(x)

    @abstractmethod
    def _compile_choice(self, compile: CompileOption) -> CompileChoice:
        """What of the training runs as a graph."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.lr)

    def on_fit_start(self) -> None:
        if self.baseline is not None:
            load_baseline(self, self.baseline)  # raises before training, not after it

    def second_order_problem(self, batch: Tasks) -> SecondOrderProblem:
        """The loss on the support set of a task, by the parameters: what inner steps descend.

        The gradient of the loss on the query set after a step, theta - a grad L_support(theta), is
        (I - a H) times a gradient of first order, with H the Hessian of L_support; of further steps
        likewise. Reptile and joint training need none, but adapt by the same loss.
        """
        (x, y), _ = batch
        objective = self.maml.inner_objective
        return objective, hog.trainable_params(self.maml.model), (x[0], y[0])

    def validation_step(self, batch: Tasks, batch_idx: int) -> None:
        errors = errors_after(self.maml, batch, self.eval_steps)
        for count, row in zip(self.eval_steps, errors, strict=True):
            # a single task that diverged would make the mean infinite; the table counts them
            converged = row[torch.isfinite(row)]
            self.log(f"val/mse_after_{count}", converged.mean(), batch_size=len(row))

    def test_step(self, batch: Tasks, batch_idx: int) -> None:
        columns = {self.label: errors_after(self.maml, batch, self.eval_steps)}
        if self.baseline is not None:
            joint = load_baseline(self, self.baseline)
            columns[JointRegression.label] = errors_after(joint, batch, self.eval_steps)
        for count, row in zip(self.eval_steps, columns[self.label], strict=True):
            self.log(f"test/mse_after_{count}", summarize_errors(row).mean, batch_size=len(row))
        table = sinusoid_table(columns, self.eval_steps)
        folder = runs.run_folder(self.trainer)
        waves = self.data.test_waves()
        pictures = [plot_adaptation(folder / "tasks.png", self.maml, waves, self.label)]
        if curves := logs.curves(folder):
            file = folder / "training_curve.png"
            pictures.append(plot_curves(file, curves, "mean squared error", yscale="log"))
        runs.write_report(folder, table, *pictures)


class MAMLRegression(FewShotRegression):
    """Meta-training: minimises the error after adaptation."""

    label = "MAML"

    def _compile_choice(self, compile: CompileOption) -> CompileChoice:
        maml = self.maml if isinstance(self.maml, hog.MAML) else None
        return CompileChoice(compile, maml, f"{type(self.maml).__name__}, whose loss is not MAML's")

    def training_step(self, batch: Tasks, batch_idx: int) -> Tensor:
        return self.meta_step(self.maml, batch)


class JointRegression(FewShotRegression):
    """Conventional training: one network for the points of all tasks, adapted only in evaluation."""

    label = "joint training"

    def _compile_choice(self, compile: CompileOption) -> CompileChoice:
        return CompileChoice(compile, None, "joint training, which has no second derivatives")

    def training_step(self, batch: Tasks, batch_idx: int) -> Tensor:
        tasks, weight = hog.meta.shard(batch)  # of this process, if there are several
        (support_x, support_y), (query_x, query_y) = tasks
        # without adaptation support and query points are training data alike
        x, y = torch.cat([support_x, query_x], 1), torch.cat([support_y, query_y], 1)
        loss = weight * F.mse_loss(self.maml(x), y)
        finite("training loss", loss, "Lower lr, or look for NaN in the data.")
        self.log("train/loss", loss.detach(), prog_bar=True, batch_size=len(x))
        return loss


def load_baseline(model: FewShotRegression, path: str) -> Learner:
    """The baseline's parameters in a copy of this model's learner, so that both adapt alike."""
    maml = copy.deepcopy(model.maml)
    runs.load_parameters(maml, path, "maml.", "baseline")
    return maml
