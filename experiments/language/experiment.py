"""A character-level language model: spectra of its layers over training, its sharpest directions."""

from math import exp
from typing import Any

import torch
from torch import Tensor

import hoglib as hog
from experiments import logs, runs
from experiments.checks import at_least, finite, learning_rate
from experiments.language.plots import plot_directions
from experiments.language.table import Direction, directions_table, layers_table
from experiments.language.topics import CHARACTERS
from experiments.shared.experiment import Experiment
from experiments.shared.gpt import CharacterGPT
from experiments.shared.second_order import SecondOrderProblem, measurements

SPAN, POINTS = 1.5, 25  # of the loss along directions: in units of the distance that doubles it


class LanguageModel(Experiment):
    """A transformer that predicts the next character, trained by Adam.

    Args:
        width: Features.
        layers: Blocks.
        heads: Heads of attention.
        length: Characters of a window, as in the data.
        lr: Learning rate, which falls linearly to zero over the run.
        curvature_batch: Windows of a batch by which curvature is measured; its first ones.
        directions: The sharpest directions that the picture shows, 0 for none.
    """

    def __init__(
        self,
        width: int = 64,
        layers: int = 2,
        heads: int = 4,
        length: int = 64,
        lr: float = 3e-3,
        curvature_batch: int = 8,
        directions: int = 3,
    ) -> None:
        super().__init__()
        self.lr = learning_rate("lr", lr)
        self.curvature_batch = at_least("curvature_batch", curvature_batch, 1)
        self.directions = at_least("directions", directions, 0)
        self.network = CharacterGPT(len(CHARACTERS), length, width, layers, heads)
        self.objective = hog.language_model_loss(self.network, head="head", shift=True)
        self.options: dict[str, Any] = {
            "width": width, "layers": layers, "heads": heads, "lr": lr,
        }  # fmt: skip

    def forward(self, ids: Tensor) -> Tensor:
        return self.network(ids)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        finite("loss", loss, "Lower lr.")
        self.log("train/loss", loss.detach(), prog_bar=True, batch_size=len(batch))
        return loss

    def loss(self, batch: Tensor) -> Tensor:
        return self.objective(hog.trainable_params(self.network), batch)

    def second_order_problem(self, batch: Tensor) -> dict[str, SecondOrderProblem]:
        """The loss of some windows, by the parameters of each layer."""
        windows = batch[: self.curvature_batch]
        layers: dict[str, dict[str, Tensor]] = {}
        for name, p in hog.trainable_params(self.network).items():
            layers.setdefault(layer_of(name), {})[name] = p
        return {layer: (self.objective, params, windows) for layer, params in layers.items()}

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val/perplexity", self.loss(batch).exp(), prog_bar=True, batch_size=len(batch))

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        loss = float(self.loss(batch))
        self.log("test/perplexity", exp(loss), batch_size=len(batch))
        windows = next(iter(self.data.train_dataloader()))
        found = self.sharpest(windows.to(self.device))
        folder = runs.run_folder(self.trainer)
        history = measurements(self.trainer)
        curve = logs.curves(folder).get("val/perplexity", [])
        tables = [
            f"Perplexity of a character of held-out topics: {exp(loss):.2f}",
            *([layers_table(history)] if history else []),
            *([directions_table(found)] if found else []),
        ]
        picture = plot_directions(folder / "directions.png", history, found, curve)
        runs.write_report(folder, "\n\n".join(tables), picture)
        largest = [one.curvature for one in found[: self.directions]]
        summary = {"steps": self.trainer.global_step, "perplexity": exp(loss), "largest": largest}
        runs.write_summary(folder, {**self.options, **summary})

    def sharpest(self, batch: Tensor) -> list[Direction]:
        """The loss along the eigenvectors of the largest eigenvalues, and along a random direction.

        L(theta + t v),  v of length 1,  t from -a to a
        """
        if not self.directions:
            return []
        batch, params = batch[: self.curvature_batch], hog.trainable_params(self.network)
        H = hog.HessianOperator(self.objective, params, batch)
        values, vectors = H.eigsh(k=self.directions, which="LA", tol=1e-2)
        generator = torch.Generator().manual_seed(0)
        random = torch.randn(len(vectors), generator=generator).to(vectors)
        random /= random.norm()
        named = {
            f"eigenvector {i + 1}": (float(values[-1 - i]), vectors[:, -1 - i])
            for i in range(self.directions)
        }
        named["random"] = float(random @ (H @ random)), random
        with torch.no_grad():
            here = float(self.objective(params, batch))
            # L + t^2 lambda / 2 doubles the loss at t = sqrt(2 L / lambda)
            reach = SPAN * (2 * here / abs(float(values[-1]))) ** 0.5
            steps = torch.linspace(-reach, reach, POINTS)
            found = []
            for name, (value, vector) in named.items():
                direction = H.unravel(vector)
                moved = ({k: p + t * direction[k] for k, p in params.items()} for t in steps)
                losses = [float(self.objective(there, batch)) for there in moved]
                found.append(Direction(name, value, _shares(direction), steps.tolist(), losses))
        return found


def layer_of(name: str) -> str:
    """The layer of a parameter, by its name: a block, or what lies before or after the blocks."""
    first, *rest = name.split(".")
    if first == "blocks":
        return f"block {int(rest[0]) + 1}"
    return {"position": "embedding", "norm": "head"}.get(first, first)


def _shares(direction: dict[str, Tensor]) -> dict[str, float]:
    """What each layer has of the square of a vector's length."""
    shares: dict[str, float] = {}
    for name, v in direction.items():
        layer = layer_of(name)
        shares[layer] = shares.get(layer, 0.0) + float(v.square().sum())
    return shares
