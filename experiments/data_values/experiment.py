"""Values of training examples: the gradient of a clean loss by their weights, through the training."""

import shutil
from typing import Any, final

import torch
from torch import Tensor

import hoglib as hog
from experiments import runs
from experiments.checks import at_least, positive
from experiments.data_values.plots import plot_data_values
from experiments.data_values.table import Scored, data_values_table
from experiments.shared.mislabelled import Split
from experiments.shared.noisy_digits import Examples
from experiments.shared.repeated import Params, RepeatedTraining
from experiments.shared.stream import seeded
from experiments.shared.weights import even_weights

VALUES, INFLUENCE, LOSS = "gradient through the training", "influence function", "loss"


@final
class DataValues(RepeatedTraining):
    r"""A classifier trained on mislabelled digits by full-batch descent, and what each digit is worth.

        value_i = -d L_clean(theta_T) / d w_i        theta_T after T steps on sum_i w_i l_i, w_i = 1 / n

    All values are one gradient through all steps, by replay (`hoglib.meta.hypergradient`). They are
    compared with trainings without random subsets, and as detectors of wrong labels with two others:
    the loss of an example, and its influence function at theta_T,
    -grad L_clean^T (G + damping)^-1 grad l_i, with the Gauss-Newton matrix G.

    Args:
        leave_out: Size of the random subsets.
        subsets: Their number; each is a training.
        damping: Of the influence function.
        training: Options of `RepeatedTraining`. A smooth activation makes the values predict well.
            Without weight decay the network fits the wrong labels, and a training without them is not
            in the range where the loss is linear in their weights.
    References:
        Ilyas and Engstrom, MAGIC: Near-Optimal Data Attribution for Deep Learning, 2025; Koh and Liang,
        Understanding Black-box Predictions via Influence Functions, 2017.
    """

    def __init__(
        self,
        leave_out: int = 20,
        subsets: int = 40,
        damping: float = 0.1,
        **training: Any,
    ) -> None:
        super().__init__(**training)
        self.leave_out = at_least("leave_out", leave_out, 1)
        self.subsets = at_least("subsets", subsets, 3)
        self.damping = positive("damping", damping)

    def report(self, batch: Examples) -> None:
        """Compute the values and what they are compared with; batch: the test examples."""
        folder = runs.run_folder(self.trainer)
        parts = self.parts()
        files = folder / "replay"  # an interrupted test goes on from there
        training = {"rule": self.rule(), "steps": self.data.iterations}
        problem = self.problem(parts)
        found = hog.meta.hypergradient(*problem, memory="disk", directory=files, **training)
        self.check_trained(found.params)
        check = hog.meta.leave_k_out(
            found, *problem, k=min(self.leave_out, len(parts.train.x) - 1), subsets=self.subsets,
            generator=seeded(self.data.seed), **training,
        )  # fmt: skip
        harm = self.harm(found, parts)
        wrong = parts.train.label != parts.train.truth
        tested = {
            name: self.without_worst(parts, batch, score, wrong) for name, score in harm.items()
        }
        every = self.correct(found.params, batch)
        scored = Scored(harm, wrong, check, every, tested)
        table = data_values_table(scored, self.data.noise)
        picture = plot_data_values(folder / "values.png", parts.train, scored, self.data.noise)
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

        return clean, weighted, self.first_params(), even_weights(parts.train)

    def check_trained(self, params: Params) -> None:
        """Raise unless the replayed training is that of torch.optim, to rounding."""
        own = {name: p.detach() for name, p in hog.trainable_params(self.network).items()}
        torch.testing.assert_close(params, own, rtol=1e-2, atol=1e-3)

    def harm(self, found: hog.meta.Hypergradient, parts: Split) -> dict[str, Tensor]:
        """By each method a number for each training example [n]: the larger, the more harmful."""
        train, params = parts.train, found.params
        objective = hog.functional_loss(self.network, hog.ops.softmax_cross_entropy)
        grads = torch.func.grad(objective)(params, (parts.val.x, parts.val.label))
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
        worst = harm.argsort(descending=True)[: int(wrong.sum())]
        return self.correct(self.trained(parts.train, worst), test)
