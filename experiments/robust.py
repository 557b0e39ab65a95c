"""Classifiers of digits trained with and without a penalty on their slopes, and attacked."""

from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import hoglib as hog
from experiments import attacks, plots, runs, tables
from experiments.belonging import Belonging
from experiments.data.digits import CLASSES, PIXELS, Images
from experiments.double import by_parameters_and_inputs
from experiments.networks import mlp
from experiments.schedules import stepwise
from hoglib._core import validation
from hoglib.errors import ArgumentValueError

PLAIN = "plain"
LABELS = {PLAIN: PLAIN, "input_gradient": "input gradient", "jacobian": "Jacobian"}
KINDS = [kind for kind in LABELS if kind != PLAIN]
FGSM, PGD = "FGSM", "PGD"
ATTACK_SEED = 2**42  # of the starts of PGD, the same ones at every visit
WHITE_TO_BLACK = attacks.BOUNDS[1] - attacks.BOUNDS[0]


class Trained(NamedTuple):
    """How a network is trained: a penalty of KINDS or PLAIN, and its weight."""

    kind: str
    weight: float = 0.0


class Robustness(Belonging):
    """Classifiers from the same start on the same batches, without a penalty and with ones on slopes.

        plain            1/N sum_n L_n
        input_gradient   1/N sum_n (L_n + w |dL_n/dx_n|^2 / 2)
        jacobian         1/N sum_n (L_n + w |dz_n/dx_n|_F^2 / 2)    by one random projection each

    L_n is the cross-entropy of the logits z_n of image x_n. Of each penalty there is a network for
    each weight w; that with the highest `area` on the validation part is judged on the test part.

    weights: of each penalty; hidden, act: of all networks; lr: of their Adam, which falls linearly to
    zero over the run; epsilons: bounds of attacks, as shares of the way from a white pixel to a black
    one; steps, restarts: of PGD.
    Source: Drucker and LeCun, Improving Generalization Performance Using Double Backpropagation, 1992;
    Ross and Doshi-Velez, Improving the Adversarial Robustness and Interpretability of Deep Neural
    Networks by Regularizing their Input Gradients, 2018; Hoffman, Roberts and Yaida, Robust Learning
    with Jacobian Regularization, 2019.
    """

    def __init__(
        self,
        weights: dict[str, list[float]] | None = None,
        hidden: list[int] | None = None,
        act: str = "swish",
        lr: float = 2e-3,
        epsilons: list[float] | None = None,
        steps: int = 20,
        restarts: int = 5,
    ) -> None:
        super().__init__()
        given = {"input_gradient": [1.0], "jacobian": [0.1]} if weights is None else weights
        widths = [128, 128] if hidden is None else hidden
        for width in widths:
            validation.at_least("hidden", width, 1)
        self.how = {PLAIN: Trained(PLAIN)}
        for kind, of_kind in given.items():
            validation.one_of("weights", kind, KINDS)
            for i, weight in enumerate(of_kind):
                value = validation.positive(f"weights.{kind}", weight)
                self.how[f"{kind}_{i}"] = Trained(kind, value)
        self.lr = validation.positive("lr", lr)
        bounds = [0.05, 0.1, 0.15, 0.2, 0.25] if epsilons is None else epsilons
        if not bounds or sorted({validation.positive("epsilons", e) for e in bounds}) != bounds:
            raise ArgumentValueError(
                f"epsilons: expected at least one, in rising order, got {bounds}; sort them and leave "
                "out those that come twice, and 0, which is always there."
            )
        self.epsilons = [0.0, *bounds]
        self.steps = validation.at_least("steps", steps, 1)
        self.restarts = validation.at_least("restarts", restarts, 1)
        start = mlp([PIXELS, *widths, CLASSES], act)
        self.networks = nn.ModuleDict({name: deepcopy(start) for name in self.how})
        self.options: dict[str, Any] = {
            "weights": {kind: list(of_kind) for kind, of_kind in given.items()},
            "hidden": list(widths), "act": act,
        }  # fmt: skip

    def setup(self, stage: str) -> None:
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        if len(self.how) > 1 and data.validation is data.held_out:
            raise ArgumentValueError(
                "val: expected images to choose a weight by, got 0, which would leave those of the "
                "test; set it to 100 or more."
            )

    def forward(self, x: Tensor) -> Tensor:
        return self.networks[PLAIN](x)

    def configure_optimizers(self) -> Any:
        """One Adam for all: its steps are by element, so each network has those of its own loss."""
        return stepwise(self, torch.optim.Adam(self.parameters(), lr=self.lr))

    def training_step(self, batch: Images, batch_idx: int) -> Tensor:
        losses = {name: self.loss(name, batch) for name in self.networks}
        for name, loss in losses.items():
            validation.finite(f"loss of {name}", loss, "Lower lr, or the weights.")
        values = {f"train/{name}": loss.detach() for name, loss in losses.items()}
        self.log_dict(values, batch_size=len(batch.x))
        return torch.stack([*losses.values()]).sum()

    def loss(self, name: str, batch: Images) -> Tensor:
        """Cross-entropy and penalty, of one forward pass."""
        network, (kind, weight) = self.networks[name], self.how[name]
        if kind == PLAIN:
            return _losses(network(batch.x), batch.label).mean()
        if kind == "jacobian":
            penalty, logits = hog.penalties.jacobian(network, batch.x, return_outputs=True)
            losses = _losses(logits, batch.label)
        else:
            penalty, losses = hog.penalties.input_gradient(
                lambda x, label: _losses(network(x), label),
                batch.x,
                batch.label,
                return_outputs=True,
            )
        return losses.mean() + weight * penalty

    def second_order_problem(self, batch: Images) -> tuple[Any, dict[str, Tensor], None]:
        """The sum of the losses of images, by the parameters and by the images."""
        return by_parameters_and_inputs(
            self.networks[PLAIN], batch.x, lambda logits: _losses(logits, batch.label).sum()
        )

    def attacked(self, name: str, images: Images, attack: str, epsilon: float) -> Tensor:
        """The images [n, 64] that an attack makes, on the CPU in float64.

        In float32 the slope of a confident network may be rounded to zero, and what has no slope
        seems robust.
        """
        given = _frozen(self.networks[name]), images.x.cpu().double(), images.label.cpu()
        if not epsilon:
            return given[1]
        if attack == FGSM:
            return attacks.fgsm(*given, WHITE_TO_BLACK * epsilon)
        generator = torch.Generator().manual_seed(ATTACK_SEED)
        return attacks.pgd(
            *given, WHITE_TO_BLACK * epsilon, self.steps, self.restarts, generator=generator
        )

    def right(self, name: str, images: Images, attack: str) -> Tensor:
        """Which images a network tells right under an attack, [epsilons, n], without one first."""
        network, label = _frozen(self.networks[name]), images.label.cpu()
        return torch.stack(
            [
                attacks.told_right(network, self.attacked(name, images, attack, epsilon), label)
                for epsilon in self.epsilons
            ]
        )

    def area(self, name: str, images: Images) -> Tensor:
        """The share of images told right under PGD, the mean over the bounds, with 0 among them."""
        return self.right(name, images, PGD).float().mean()

    def validation_step(self, batch: Images, batch_idx: int) -> None:
        """Accuracy without an attack; areas, which take longer than the training, are for the test."""
        for name, network in self.networks.items():
            accuracy = attacks.told_right(network, batch.x, batch.label).float().mean()
            self.log(f"val/{name}", accuracy, batch_size=len(batch.x))

    def test_step(self, batch: Images, batch_idx: int) -> None:
        folder = runs.run_folder(self.trainer)
        validation = self.trainer.datamodule.validation  # type: ignore[attr-defined]
        areas = {name: self.area(name, validation).item() for name in self.networks}
        chosen = best(self.how, areas)
        right = {
            label: {attack: self.right(name, batch, attack) for attack in (FGSM, PGD)}
            for label, name in chosen.items()
        }
        tried = [
            (LABELS[how.kind], how.weight, areas[name], name in chosen.values())
            for name, how in self.how.items()
            if how.kind != PLAIN
        ]
        table = tables.robust(self.epsilons, right, tried, len(validation.x))
        print(f"\n{table}\n")
        (folder / "table.txt").write_text(table + "\n")
        picture = plots.robust(
            self.epsilons, right, *self._examples(chosen, batch), folder / "robust.png"
        )
        print(f"Saved {folder / 'table.txt'}, {picture}")
        for label, by_attack in right.items():
            for attack, flags in by_attack.items():
                for epsilon, of_bound in zip(self.epsilons, flags, strict=True):
                    key = f"test/{label}/{attack}/{epsilon:g}"
                    self.log(key, of_bound.float().mean(), batch_size=len(batch.x))

    def _examples(
        self, chosen: dict[str, str], images: Images
    ) -> tuple[float, "dict[str, plots.Row]", dict[str, Tensor]]:
        """The middle bound; the first image of each digit, and what PGD within that bound makes of it
        for each network, with what the network says; and the slopes of the losses at the images."""
        epsilon = self.epsilons[1:][(len(self.epsilons) - 2) // 2]
        firsts = [(images.label == c).nonzero()[:1, 0] for c in range(CLASSES)]
        some = Images(*(part[torch.cat(firsts)].cpu() for part in images))
        rows = {"digit": plots.Row(some.x, some.label, some.label)}
        slopes = {}
        for label, name in chosen.items():
            network = _frozen(self.networks[name])
            x = self.attacked(name, some, PGD, epsilon)
            rows[label] = plots.Row(x, network(x).argmax(1), some.label)
            slopes[label] = attacks.gradient(network, some.x.double(), some.label)
        return epsilon, rows, slopes


def best(how: dict[str, Trained], areas: dict[str, float]) -> dict[str, str]:
    """Of each kind the network of the highest area, the first of several, by the label in tables."""
    chosen: dict[str, str] = {}
    for kind in dict.fromkeys(each.kind for each in how.values()):
        name = max((n for n, each in how.items() if each.kind == kind), key=areas.__getitem__)
        weight = "" if kind == PLAIN else f", {how[name].weight:g}"
        chosen[f"{LABELS[kind]}{weight}"] = name
    return chosen


def _losses(logits: Tensor, label: Tensor) -> Tensor:
    return hog.ops.softmax_cross_entropy(logits, label, reduction="none")


def _frozen(network: nn.Module) -> nn.Module:
    """A copy in float64 on the CPU, which nothing trains; also of use where the caller is in inference
    mode, whose tensors no gradient can be taken through."""
    with torch.inference_mode(False):
        return deepcopy(network).cpu().double().requires_grad_(False)
