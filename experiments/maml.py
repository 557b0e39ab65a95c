"""Few-shot regression: MAML, and the conventionally trained baseline it is compared with."""

import copy
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor

import hoglib as hog
from experiments import plots, tables
from experiments.compiling import Choice, Wanted
from experiments.learners import learner
from experiments.networks import mlp
from experiments.runs import find_checkpoint, run_folder
from hoglib._core import validation
from hoglib.errors import ArgumentValueError
from hoglib.meta import Learner

Batch = tuple[Tensor, Tensor]
Tasks = tuple[Batch, Batch]
SecondOrderProblem = tuple[Any, dict[str, Tensor], Any]


def errors_after(maml: Learner, tasks: Tasks, steps: Sequence[int]) -> Tensor:
    """Query losses [len(steps), tasks] after each number of gradient steps, in ascending order."""

    def of_task(support: Batch, query: Batch) -> Tensor:
        params, done, errors = hog.trainable_params(maml.model), 0, []
        for count in steps:
            params, done = maml.adapt(support, params=params, steps=count - done), count
            errors.append(maml.objective(params, query))
        return torch.stack(errors)

    with torch.no_grad():
        return torch.func.vmap(of_task, out_dims=1)(*tasks)


class FewShotRegression(pl.LightningModule):
    """What both methods share (abstract): the network, adaptation to held-out tasks, and its errors.

    hidden: widths of the hidden layers; act: their activation; algorithm: "maml", "reptile" or "imaml";
    inner_lr, inner_steps, first_order: its inner loop; options: any further argument of `hoglib.MAML`,
    `hoglib.meta.Reptile` or `hoglib.meta.IMAML`, such as learn_lr, rule, inner_params or memory; lr: of
    the outer Adam; eval_steps: the numbers of gradient steps after which held-out tasks are judged;
    baseline: a run directory (the newest version in it is taken) or a checkpoint, whose errors stand
    beside this model's in the table; compile: whether MAML's meta-gradient runs as a graph: null, if it
    pays for the steps of the run; true, in the way that takes least time for as many; false; or the way
    itself, as in `hoglib.MAML`. A run that is resumed goes on in the way that it began in.
    """

    label: str

    def __init__(
        self,
        hidden: list[int] | None = None,
        act: str = "tanh",
        inner_lr: float = 0.01,
        inner_steps: int = 1,
        first_order: bool = False,
        lr: float = 1e-3,
        eval_steps: list[int] | None = None,
        baseline: str | None = None,
        algorithm: str = "maml",
        options: dict[str, Any] | None = None,
        compile: Wanted = None,
    ) -> None:
        super().__init__()
        widths = [1, *([40, 40] if hidden is None else hidden), 1]
        for width in widths:
            validation.at_least("hidden", width, 1)
        given = {"inner_lr": inner_lr, "inner_steps": inner_steps, **(options or {})}
        if first_order:
            given["first_order"] = True  # which only MAML knows
        self.maml = learner(algorithm, mlp(widths, act), F.mse_loss, given)
        self.compiling = self._choice(compile)
        self.lr = validation.positive("lr", lr)
        self.eval_steps = [0, 1, 5, 10] if eval_steps is None else eval_steps
        for step in self.eval_steps:
            validation.at_least("eval_steps", step, 0)
        if sorted(set(self.eval_steps)) != self.eval_steps:
            raise ArgumentValueError(
                f"eval_steps: expected ascending numbers of steps, got {self.eval_steps}; "
                f"write {sorted(set(self.eval_steps))}."
            )
        self.baseline = baseline

    def forward(self, x: Tensor) -> Tensor:
        return self.maml(x)

    @abstractmethod
    def _choice(self, compile: Wanted) -> Choice:
        """What of training runs as a graph."""

    def on_fit_start(self) -> None:
        if self.baseline is not None:
            load_baseline(self, self.baseline)  # what is wrong with it is known before training

    def on_train_start(self) -> None:
        self.compiling.decide(self.trainer)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.compiling.save(checkpoint)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.compiling.load(checkpoint)

    def second_order_problem(self, batch: Tasks) -> SecondOrderProblem:
        """The loss on the support set of a task, by the parameters: what inner steps descend.

        The gradient of the loss on the query set after a step, theta - a grad L_support(theta), is
        (I - a H) times a gradient of first order, with H the Hessian of L_support; of further steps
        likewise. Reptile and joint training need none, but adapt by the same loss.
        """
        (x, y), _ = batch
        objective = self.maml.inner_objective
        return objective, hog.trainable_params(self.maml.model), (x[0], y[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.lr)

    def errors(self, tasks: Tasks) -> Tensor:
        return errors_after(self.maml, tasks, self.eval_steps)

    def validation_step(self, batch: Tasks, batch_idx: int) -> None:
        for count, row in zip(self.eval_steps, self.errors(batch), strict=True):
            finite = row[torch.isfinite(row)]
            self.log(f"val/mse_after_{count}", finite.mean(), batch_size=len(row))

    def test_step(self, batch: Tasks, batch_idx: int) -> None:
        columns = {self.label: self.errors(batch)}
        if self.baseline is not None:
            joint = load_baseline(self, self.baseline)
            columns[JointRegression.label] = errors_after(joint, batch, self.eval_steps)
        table = tables.few_shot(columns, self.eval_steps)
        for count, row in zip(self.eval_steps, columns[self.label], strict=True):
            self.log(f"test/mse_after_{count}", tables.summary(row).mean, batch_size=len(row))
        if self.trainer.is_global_zero:
            print(f"\n{table}\n")
            self._save(table, batch)

    def _save(self, table: str, tasks: Tasks) -> None:
        """Table and pictures beside the run's checkpoint."""
        folder = run_folder(self.trainer)
        (folder / "table.txt").write_text(table + "\n")
        saved = [folder / "table.txt"]
        waves = getattr(self.trainer.datamodule, "test_waves", None)  # type: ignore[attr-defined]
        if waves is not None:
            saved.append(plots.adaptation(self.maml, waves(), self.label, folder / "tasks.png"))
        if (folder / "metrics.csv").exists():
            saved.append(
                plots.training_curve(folder / "metrics.csv", folder / "training_curve.png")
            )
        print("Saved " + ", ".join(str(path) for path in saved))


class MAMLRegression(FewShotRegression):
    """Meta-training: the error after adaptation is what is minimised."""

    label = "MAML"

    def _choice(self, compile: Wanted) -> Choice:
        maml = self.maml if isinstance(self.maml, hog.MAML) else None
        return Choice(compile, maml, f"{type(self.maml).__name__}, whose loss is none of MAML's")

    def training_step(self, batch: Tasks, batch_idx: int) -> Tensor:
        tasks, weight = hog.meta.shard(batch)  # of this process, if there are several
        loss = weight * self.maml.loss(tasks)
        self.log("train/loss", loss.detach(), prog_bar=True, batch_size=1, sync_dist=True)
        return loss


class JointRegression(FewShotRegression):
    """Conventional training: one network for the points of all tasks, adapted only when judged."""

    label = "joint training"

    def _choice(self, compile: Wanted) -> Choice:
        return Choice(compile, None, "joint training, which has no derivative of second order")

    def training_step(self, batch: Tasks, batch_idx: int) -> Tensor:
        (support_x, support_y), (query_x, query_y) = batch
        x, y = torch.cat([support_x, query_x], 1), torch.cat([support_y, query_y], 1)
        loss = validation.finite(
            "training loss", F.mse_loss(self.maml(x), y), "Lower lr, or look for NaN in the data."
        )
        self.log("train/loss", loss.detach(), prog_bar=True, batch_size=len(x))
        return loss


def load_baseline(model: FewShotRegression, where: str) -> Learner:
    """The baseline's parameters in a copy of this model's network, adapted the same way."""
    checkpoint = find_checkpoint(where)
    state = torch.load(checkpoint, map_location=model.device, weights_only=True)["state_dict"]
    maml = copy.deepcopy(model.maml)
    weights = {name.removeprefix("maml."): value for name, value in state.items()}
    expected = {name: tuple(value.shape) for name, value in maml.state_dict().items()}
    came = {name: tuple(value.shape) for name, value in weights.items()}
    if expected != came:
        raise ArgumentValueError(
            f"baseline: expected a checkpoint of the same network, {expected}, got {came} from "
            f"{checkpoint}; train the baseline with the same hidden widths, or set baseline to null."
        )
    maml.load_state_dict(weights)
    return maml
