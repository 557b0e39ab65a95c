"""Values of training examples: the gradient of a clean loss by their weights, through the training."""

import shutil
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

import hoglib as hog
from experiments import runs
from experiments.checks import (
    at_least,
    finite,
    hidden_widths,
    learning_rate,
    not_negative,
    positive,
)
from experiments.data.digits import CLASSES
from experiments.data.mislabelled import POOLED, Split
from experiments.data.noisy_digits import Examples
from experiments.data.stream import seeded
from experiments.models.networks import mlp
from experiments.plots.data_values import plot_data_values
from experiments.reweight import Weighted, even_weights, weighted_loss
from experiments.tables.data_values import Scored, data_values_table
from experiments.training.compile_choice import CompileChoice, CompileOption
from experiments.training.experiment import Experiment
from experiments.training.second_order import SecondOrderProblem

Params = dict[str, Tensor]
VALUES, INFLUENCE, LOSS = "gradient through the training", "influence function", "loss"


class DataValues(Experiment):
    r"""A classifier trained on mislabelled digits by full-batch descent, and what each digit is worth.

        value_i = -d L_clean(theta_T) / d w_i        theta_T after T steps on sum_i w_i l_i, w_i = 1 / n

    All values are one gradient through all steps, by replay (`hoglib.meta.hypergradient`). They are
    compared with trainings without random subsets, and as detectors of wrong labels with two others:
    the loss of an example, and its influence function at theta_T,
    -grad L_clean^T (G + damping)^-1 grad l_i, with the Gauss-Newton matrix G.

    Args:
        hidden: Widths of the hidden layers.
        act: Their activation; a smooth one makes the values predict well.
        lr: Learning rate of gradient descent with momentum.
        momentum: The momentum.
        weight_decay: The weight decay. Without, the network fits the wrong labels, and a training
            without them is not in the range where the loss is linear in their weights.
        leave_out: Size of the random subsets.
        subsets: Their number; each is a training.
        damping: Of the influence function.
        compile: null or false; nothing here runs as a graph.
    References:
        Ilyas and Engstrom, MAGIC: Near-Optimal Data Attribution for Deep Learning, 2025; Koh and Liang,
        Understanding Black-box Predictions via Influence Functions, 2017.
    """

    def __init__(
        self,
        hidden: list[int] | None = None,
        act: str = "tanh",
        lr: float = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 0.01,
        leave_out: int = 20,
        subsets: int = 40,
        damping: float = 0.1,
        compile: CompileOption = None,
    ) -> None:
        super().__init__()
        CompileChoice(compile, None, "hypergradient, which checks its losses and so is not a graph")
        widths = hidden_widths(hidden, [32])
        self.leave_out, self.subsets = (
            at_least("leave_out", leave_out, 1),
            at_least("subsets", subsets, 3),
        )
        self.damping = positive("damping", damping)
        self.lr = learning_rate("lr", lr)
        self.momentum = not_negative("momentum", momentum)
        self.weight_decay = not_negative("weight_decay", weight_decay)
        self.network = mlp([POOLED**2, *widths, CLASSES], act)
        self.start = deepcopy(self.network).requires_grad_(False)  # where every training starts
        self.objective = hog.functional_loss(self.network, weighted_loss)
        self.options = {
            "hidden": widths, "act": act, "lr": lr, "momentum": momentum,
            "weight_decay": weight_decay,
        }  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(
            self.network.parameters(), self.lr, self.momentum, weight_decay=self.weight_decay
        )

    def rule(self) -> hog.meta.GradientTransformation:
        """The same as a function that can be differentiated."""
        return hog.meta.sgd(self.lr, momentum=self.momentum, weight_decay=self.weight_decay)

    def training_step(self, batch: Examples, batch_idx: int) -> Tensor:
        loss = self.loss(hog.trainable_params(self.network), even_weights(batch), batch)
        finite("loss", loss, "Lower lr.")
        self.log("train/loss", loss.detach(), prog_bar=True, batch_size=len(batch.x))
        return loss

    def loss(self, params: Params, weights: Tensor, examples: Examples) -> Tensor:
        """sum_i w_i l_i."""
        return self.objective(params, (examples.x, Weighted(examples.label, weights)))

    def second_order_problem(self, batch: Examples) -> SecondOrderProblem:
        """The training loss by parameters and weights."""

        def loss(params: Params, examples: Examples) -> Tensor:
            own = {name: value for name, value in params.items() if name != "weights"}
            return self.loss(own, params["weights"], examples)

        own = hog.trainable_params(self.network)
        return loss, {**own, "weights": even_weights(batch)}, batch

    def validation_step(self, batch: Examples, batch_idx: int) -> None:
        self.log("val/accuracy", self.accuracy(self.network, batch), batch_size=len(batch.x))

    def accuracy(self, network: Any, examples: Examples) -> Tensor:
        return (network(examples.x).argmax(1) == examples.truth).float().mean()

    def test_step(self, batch: Examples, batch_idx: int) -> None:
        with torch.inference_mode(False), torch.no_grad():  # Lightning's mode has no derivatives
            self.report(Examples(*(part.clone() for part in batch)))

    def report(self, batch: Examples) -> None:
        """Compute the values and what they are compared with; batch: the test examples."""
        folder = runs.run_folder(self.trainer)
        data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
        parts = Split(*(Examples(*(t.to(self.device) for t in part)) for part in data.split))
        files = folder / "replay"  # an interrupted test goes on from there
        training = {"rule": self.rule(), "steps": data.iterations}
        problem = self.problem(parts)
        found = hog.meta.hypergradient(*problem, memory="disk", directory=files, **training)
        self.check_trained(found.params)
        check = hog.meta.leave_k_out(
            found, *problem, k=min(self.leave_out, len(parts.train.x) - 1), subsets=self.subsets,
            generator=seeded(data.seed), **training,
        )  # fmt: skip
        harm = self.harm(found, parts)
        wrong = parts.train.label != parts.train.truth
        tested = {
            name: self.without_worst(parts, batch, score, wrong) for name, score in harm.items()
        }
        every = self.correct(found.params, batch)
        scored = Scored(harm, wrong, check, every, tested)
        table = data_values_table(scored, data.noise)
        picture = plot_data_values(folder / "values.png", parts.train, scored, data.noise)
        runs.write_report(folder, table, picture)
        shutil.rmtree(files)
        self.log("test/accuracy", every.float().mean(), batch_size=len(batch.x))
        self.log("test/correlation", check.correlation, batch_size=len(batch.x))

    def problem(self, parts: Split) -> tuple[Any, Any, Params, Tensor]:
        """outer, inner, the initial parameters, and even weights, as `hypergradient` takes them."""

        def clean(params: Params, weights: Tensor) -> Tensor:
            return self.loss(params, even_weights(parts.val), parts.val)

        def weighted(params: Params, weights: Tensor) -> Tensor:
            return self.loss(params, weights, parts.train)

        start = {name: p.detach().clone() for name, p in self.start.named_parameters()}
        return clean, weighted, start, even_weights(parts.train)

    def check_trained(self, params: Params) -> None:
        """Raise unless the replayed training is that of torch.optim, to rounding."""
        own = hog.trainable_params(self.network)
        for name, p in own.items():
            torch.testing.assert_close(params[name], p.detach(), rtol=1e-2, atol=1e-3)

    def harm(self, found: hog.meta.Hypergradient, parts: Split) -> dict[str, Tensor]:
        """By each method a number for each training example [n]: the larger, the more harmful."""
        train, params = parts.train, found.params
        objective = hog.functional_loss(self.network, hog.ops.softmax_cross_entropy)
        own = {name: p.detach().clone().requires_grad_() for name, p in params.items()}
        with torch.enable_grad():
            loss = objective(own, (parts.val.x, parts.val.label))
            grads = dict(zip(own, torch.autograd.grad(loss, list(own.values())), strict=True))
        batch = train.x, train.label
        step = hog.GGNOperator(objective, params, batch).solve(grads, damping=self.damping)

        def losses(params: Params) -> Tensor:
            logits = objective.outputs(params, batch)
            return hog.ops.softmax_cross_entropy(logits, train.label, reduction="none")

        each, slopes = hog.jvp(losses, params, step)
        return {VALUES: found.gradient, INFLUENCE: -slopes / len(slopes), LOSS: each}

    def without_worst(self, parts: Split, test: Examples, harm: Tensor, wrong: Tensor) -> Tensor:
        """Which test examples are classified correctly after a training without the most harmful ones,
        as many as there are wrong labels."""
        weights = even_weights(parts.train)
        weights[harm.argsort(descending=True)[: int(wrong.sum())]] = 0
        _, _, start, _ = self.problem(parts)
        targets = Weighted(parts.train.label, weights)
        steps = self.trainer.datamodule.iterations  # type: ignore[attr-defined]
        params = hog.meta.adapt(
            self.objective, start, (parts.train.x, targets), self.rule(), steps=steps
        )
        return self.correct(params, test)

    def correct(self, params: Params, examples: Examples) -> Tensor:
        logits = torch.func.functional_call(self.network, params, (examples.x,))
        return logits.argmax(1) == examples.truth
