"""Adaptation of a language model to a topic: MAML of its adapters, beside fine-tuning."""

import copy
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

import hoglib as hog
from experiments import runs
from experiments.checks import at_least, learning_rate
from experiments.language.plots import plot_perplexity
from experiments.language.table import perplexity_table
from experiments.language.topics import CHARACTERS, Tasks
from experiments.shared.compile_choice import CompileChoice, CompileOption, WithCompileChoice
from experiments.shared.experiment import Experiment
from experiments.shared.gpt import CharacterGPT, add_adapters
from experiments.shared.learners import errors_after, make_learner
from experiments.shared.second_order import SecondOrderProblem
from hoglib.meta import Learner

ADAPTERS = "*.parametrizations.weight.0.*"  # their names
RATES = (0.03, 0.1, 0.3, 1.0, 3.0)  # of fine-tuning; the best on validation tasks is taken


class AdapterMAML(WithCompileChoice, Experiment):
    """Meta-learns the low-rank adapters of a frozen language model, to adapt them to a topic.

    The table has, beside it, fine-tuning of the same model by as many gradient steps: of adapters that
    were not meta-learned, and of all parameters, each with the learning rate that is best on
    validation tasks.

    Args:
        base: The language model: a run directory of configs/curvature/lm.yaml, of which the newest
            version is taken, or a checkpoint. Default: random parameters.
        width: Features of the language model.
        layers: Its blocks.
        heads: Its heads of attention.
        length: Characters of a window, as in the data.
        rank: Rank of the adapters.
        inner_lr: Learning rate of the inner loop.
        inner_steps: Steps of the inner loop.
        options: Further arguments of `hoglib.MAML`.
        lr: Learning rate of the outer Adam.
        compile: Whether MAML's meta-gradient runs as a graph: null, if that pays for the steps of the
            run, compiled if that pays too; true; false; or "eager" or "inductor", as in `hoglib.MAML`.
    """

    eval_steps = (0, 1, 5)  # gradient steps after which held-out tasks are evaluated

    def __init__(
        self,
        base: str | None = None,
        width: int = 64,
        layers: int = 2,
        heads: int = 4,
        length: int = 64,
        rank: int = 4,
        inner_lr: float = 0.3,
        inner_steps: int = 5,
        options: dict[str, Any] | None = None,
        lr: float = 3e-3,
        compile: CompileOption = None,
    ) -> None:
        super().__init__()
        self.base = CharacterGPT(len(CHARACTERS), length, width, layers, heads)
        if base is not None:
            runs.load_parameters(self.base, base, "network.", "base")
        self.base.requires_grad_(False)
        network = add_adapters(copy.deepcopy(self.base), at_least("rank", rank, 1))
        inner = {"inner_lr": inner_lr, "inner_steps": inner_steps, **(options or {})}
        self.maml = make_learner("maml", network, language_model_loss(network), inner)
        # not meta-learned: the adapters that the training begins with
        self.start = copy.deepcopy(network).requires_grad_(False)
        assert isinstance(self.maml, hog.MAML)
        self.compile_choice = CompileChoice(compile, self.maml, "")
        self.lr = learning_rate("lr", lr)
        self.options = {
            "base": base, "width": width, "layers": layers, "heads": heads, "rank": rank,
        }  # fmt: skip

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam([p for p in self.maml.parameters() if p.requires_grad], lr=self.lr)

    def training_step(self, batch: Tasks, batch_idx: int) -> Tensor:
        return self.meta_step(self.maml, (batch.support, batch.query))

    def second_order_problem(self, batch: Tasks) -> SecondOrderProblem:
        """The loss on the support set of a task, by the adapters: what inner steps descend."""
        objective = self.maml.inner_objective
        return objective, hog.trainable_params(self.maml.model), batch.support[0]

    def validation_step(self, batch: Tasks, batch_idx: int) -> None:
        losses = errors_after(self.maml, (batch.support, batch.query), self.eval_steps)
        for count, row in zip(self.eval_steps, losses, strict=True):
            self.log(f"val/perplexity_after_{count}", row.exp().mean(), batch_size=len(row))

    def test_step(self, batch: Tasks, batch_idx: int) -> None:
        test = batch.support, batch.query
        columns = {"MAML of adapters": errors_after(self.maml, test, self.eval_steps)}
        held_out = self.data.val_dataloader()
        support, query = (part.to(self.device) for part in next(iter(held_out)))
        others = ("adapters", self.start, ADAPTERS), ("all parameters", self.base, "*")
        for name, network, pattern in others:
            tuned = [fine_tuning(network, rate, pattern) for rate in RATES]
            found = [
                errors_after(one, (support, query), self.eval_steps[-1:]).mean() for one in tuned
            ]
            best = int(torch.stack(found).nan_to_num(torch.inf).argmin())
            label = f"fine-tuning of {name}, lr {RATES[best]:g}"
            columns[label] = errors_after(tuned[best], test, self.eval_steps)
        own = columns["MAML of adapters"]
        for count, row in zip(self.eval_steps, own, strict=True):
            self.log(f"test/perplexity_after_{count}", row.exp().mean(), batch_size=len(row))
        folder = runs.run_folder(self.trainer)
        title = f"Perplexity of a character in {own.shape[1]} tasks of held-out topics"
        table = perplexity_table(columns, self.eval_steps, title)
        picture = plot_perplexity(folder / "perplexity.png", columns, self.eval_steps, title)
        runs.write_report(folder, table, picture)


def language_model_loss(network: nn.Module) -> Any:
    """The loss of a network of characters, whose labels are the next ones."""
    return hog.language_model_loss(network, head="head", shift=True)


def fine_tuning(network: nn.Module, rate: float, pattern: str) -> Learner:
    """Gradient descent from the parameters of a network, by those whose names match a pattern."""
    network = copy.deepcopy(network)
    for name, p in network.named_parameters():
        p.requires_grad_(fnmatchcase(name, pattern))
    return hog.MAML(network, language_model_loss(network), inner_lr=rate)
