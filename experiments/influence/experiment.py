"""Which training digits made a classifier err: influence functions, checked by training again."""

from typing import Any, Literal, final

import torch
import torch.nn.functional as F
from torch import Tensor

import hoglib as hog
from experiments import runs
from experiments.checks import at_least, positive
from experiments.influence.plots import plot_influence
from experiments.influence.table import Errors, Retrained, influence_table
from experiments.shared.noisy_digits import Examples
from experiments.shared.repeated import RepeatedTraining
from experiments.shared.stream import seeded

EXACT, EKFAC = "influence, conjugate gradients", "influence, EKFAC"
SOLVERS: dict[str, Literal["cg", "ekfac"]] = {EXACT: "cg", EKFAC: "ekfac"}
GRADIENTS, RANDOM = "product of gradients", "random digits"


@final
class Influence(RepeatedTraining):
    r"""A classifier trained on digits, some mislabelled, and the training digits behind its errors.

        s_iq = -grad l_q^T (G + damping I)^-1 grad l_i
        change of l_q without a set S of examples: -sum_S s_iq / n

    for each of the first test digits that the network classifies wrongly, by `hoglib.influence`. The
    check: training again without the most harmful digits of each, by its scores and by others, says
    how far the loss of the test digit fell, and whether it is now classified correctly.

    Args:
        errors: Test digits, of those classified wrongly the first, that are explained.
        leave_out: Training digits that are left out for each.
        damping: Of the inverse.
        training: Options of `RepeatedTraining`.
    References:
        Koh and Liang, Understanding Black-box Predictions via Influence Functions, 2017.
    """

    def __init__(
        self,
        errors: int = 24,
        leave_out: int = 10,
        damping: float = 0.01,
        **training: Any,
    ) -> None:
        super().__init__(**training)
        self.errors = at_least("errors", errors, 2)
        self.leave_out = at_least("leave_out", leave_out, 1)
        self.damping = positive("damping", damping)

    def report(self, batch: Examples) -> None:
        """Explain errors, and train again without what is said to have caused them."""
        folder = runs.run_folder(self.trainer)
        train, own = self.parts().train, hog.trainable_params(self.network)
        predicted = self.logits(own, batch).argmax(1)
        wrong = (predicted != batch.truth).nonzero()[: self.errors, 0]
        queries = Examples(*(part[wrong] for part in batch))
        harm = self.harm(train, queries, seeded(self.data.seed))
        checks = {name: self.check(train, queries, scores) for name, scores in harm.items()}
        errors = Errors(train, queries, predicted[wrong], harm, checks, self.leave_out)
        accuracy = (predicted == batch.truth).float().mean()
        title = f"{len(wrong)} of {int((predicted != batch.truth).sum())} errors; {self.data.noise}"
        picture = plot_influence(folder / "influence.png", errors, self.data.noise)
        runs.write_report(folder, influence_table(errors, title), picture)
        self.log("test/accuracy", accuracy, batch_size=len(batch.x))
        for name, check in checks.items():
            self.log(f"test/right without, {name}", check.right.float().mean(), batch_size=1)

    def harm(
        self, train: Examples, queries: Examples, generator: torch.Generator
    ) -> dict[str, Tensor]:
        """By each method the scores [train, queries], positive where an example is harmful."""
        objective = hog.functional_loss(self.network, F.cross_entropy)
        params = hog.trainable_params(self.network)
        given = (train.x, train.label), (queries.x, queries.truth)
        scores = {
            name: hog.influence(objective, params, *given, solver=solver, damping=self.damping)
            for name, solver in SOLVERS.items()
        }
        rows = [hog.per_example_gradients(objective, params, part)[1] for part in given]
        a, b = (torch.cat([g.flatten(1) for g in each.values()], 1) for each in rows)
        scores[GRADIENTS] = -a @ b.T
        drawn = torch.rand(len(a), len(b), generator=generator)
        return {**scores, RANDOM: drawn.to(a)}

    @torch.no_grad()
    def check(self, train: Examples, queries: Examples, harm: Tensor) -> Retrained:
        """Train again without the most harmful examples of each query."""
        own = hog.trainable_params(self.network)
        before = F.cross_entropy(self.logits(own, queries), queries.truth, reduction="none")
        predicted, after, right = [], [], []
        for q in range(len(queries.x)):
            left_out = harm[:, q].topk(min(self.leave_out, len(harm) - 1)).indices
            params = self.trained(train, left_out)
            query = Examples(*(part[q : q + 1] for part in queries))
            predicted.append(-harm[left_out, q].sum() / len(harm))
            after.append(F.cross_entropy(self.logits(params, query), query.truth))
            right.append(self.correct(params, query)[0])
        return Retrained(torch.stack(predicted), torch.stack(after) - before, torch.stack(right))
