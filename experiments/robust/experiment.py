"""Classifiers of digits trained with and without a penalty on gradients, and attacked."""

from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from tqdm import tqdm

import hoglib as hog
from experiments import runs
from experiments.checks import at_least, hidden_widths, learning_rate, one_of, positive
from experiments.robust import attacks
from experiments.robust.plots import Examined, Predicted, plot_robustness
from experiments.robust.table import Tried, robustness_table
from experiments.shared.digits import CLASSES, PIXELS, Images
from experiments.shared.experiment import Experiment
from experiments.shared.networks import mlp
from experiments.shared.second_order import SecondOrderProblem, sum_by_parameters_and_inputs
from experiments.shared.stream import select
from hoglib.errors import ArgumentValueError

PLAIN = "plain"
LABELS = {PLAIN: PLAIN, "input_gradient": "input gradient", "jacobian": "Jacobian"}
PENALTIES = [kind for kind in LABELS if kind != PLAIN]
FGSM, PGD = "FGSM", "PGD"
ATTACK_SEED = 2**42  # of the random starts of PGD, the same at every evaluation
WHITE_TO_BLACK = attacks.BOUNDS[1] - attacks.BOUNDS[0]


class Robustness(Experiment):
    """Classifiers from the same start on the same batches, without a penalty and with penalties.

        plain            1/N sum_n L_n
        input_gradient   1/N sum_n (L_n + w |dL_n/dx_n|^2 / 2)
        jacobian         1/N sum_n (L_n + w |dz_n/dx_n|_F^2 / 2)    by one random projection each

    L_n is the cross-entropy of the logits z_n of image x_n. There is a network for each penalty and
    each weight w; of each penalty the network with the largest `area` on the validation images is
    evaluated on the test images.

    Args:
        weights: Weights of each penalty.
        hidden: Widths of the hidden layers of all networks.
        act: Their activation.
        lr: Learning rate of their Adam, which falls linearly to zero over the run.
        epsilons: Bounds of the attacks, as fractions of the way from a white pixel to a black one.
        steps: Steps of PGD.
        restarts: Starts of PGD.
    References:
        Drucker and LeCun, Improving Generalization Performance Using Double Backpropagation, 1992.
        Ross and Doshi-Velez, Improving the Adversarial Robustness and Interpretability of Deep Neural
        Networks by Regularizing their Input Gradients, 2018.
        Hoffman, Roberts and Yaida, Robust Learning with Jacobian Regularization, 2019.
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
        weights = {"input_gradient": [1.0], "jacobian": [0.1]} if weights is None else weights
        widths = hidden_widths(hidden, [128, 128])
        self.penalties = {PLAIN: Penalty(PLAIN)}
        for kind, of_kind in weights.items():
            one_of("weights", kind, PENALTIES)
            for i, weight in enumerate(of_kind):
                self.penalties[f"{kind}_{i}"] = Penalty(kind, positive(f"weights.{kind}", weight))
        self.lr = learning_rate("lr", lr)
        bounds = [0.05, 0.1, 0.15, 0.2, 0.25] if epsilons is None else epsilons
        if not bounds or sorted({positive("epsilons", e) for e in bounds}) != bounds:
            raise ArgumentValueError(
                f"epsilons: expected at least one, in ascending order, got {bounds}; sort them, and "
                "leave out duplicates and 0, which is always included."
            )
        self.epsilons = [0.0, *bounds]
        self.steps = at_least("steps", steps, 1)
        self.restarts = at_least("restarts", restarts, 1)
        start = mlp([PIXELS, *widths, CLASSES], act)
        self.networks = nn.ModuleDict({name: deepcopy(start) for name in self.penalties})
        self.options: dict[str, Any] = {
            "weights": {kind: list(of_kind) for kind, of_kind in weights.items()},
            "hidden": widths, "act": act,
        }  # fmt: skip

    def setup(self, stage: str) -> None:
        if len(self.penalties) > 1 and self.data.validation is self.data.held_out:
            raise ArgumentValueError(
                "val: expected images to choose a weight by, got 0, so that weights would be chosen on "
                "the test images; set it to 100 or more."
            )

    def forward(self, x: Tensor) -> Tensor:
        return self.networks[PLAIN](x)

    def training_step(self, batch: Images, batch_idx: int) -> Tensor:
        losses = {name: self.loss(name, batch) for name in self.networks}
        return self.sum_of(losses, "Lower lr, or the weights.", len(batch.x), bar=False)

    def loss(self, name: str, batch: Images) -> Tensor:
        """Cross-entropy and penalty, from one forward pass."""
        network, (kind, weight) = self.networks[name], self.penalties[name]
        if kind == PLAIN:
            return _losses(network(batch.x), batch.label).mean()
        if kind == "jacobian":
            penalty, logits = hog.penalties.jacobian(network, batch.x, return_outputs=True)
            losses = _losses(logits, batch.label)
        else:
            penalty, losses = hog.penalties.input_gradient(
                lambda x, label: _losses(network(x), label), *batch, return_outputs=True
            )
        return losses.mean() + weight * penalty

    def second_order_problem(self, batch: Images) -> SecondOrderProblem:
        """The sum of the losses of images, by the parameters and by the images."""
        return sum_by_parameters_and_inputs(
            self.networks[PLAIN], batch.x, lambda logits: _losses(logits, batch.label).sum()
        )

    def validation_step(self, batch: Images, batch_idx: int) -> None:
        """Accuracy without an attack; areas, which take longer than the training, are for the test."""
        for name, network in self.networks.items():
            accuracy = attacks.is_correct(network, batch.x, batch.label).float().mean()
            self.log(f"val/{name}", accuracy, batch_size=len(batch.x))

    def test_step(self, batch: Images, batch_idx: int) -> None:
        folder = runs.run_folder(self.trainer)
        held_out = self.data.validation
        shown = self.trainer.progress_bar_callback is not None
        names = tqdm(self.networks, "choosing weights", leave=False, disable=not shown)
        areas = {name: self.area(name, held_out).item() for name in names}
        chosen = choose_weights(self.penalties, areas)
        correct = {
            label: {attack: self.correct(name, batch, attack) for attack in (FGSM, PGD)}
            for label, name in tqdm(chosen.items(), "attacks", leave=False, disable=not shown)
        }
        tried = [
            Tried(LABELS[penalty.kind], penalty.weight, areas[name], name in chosen.values())
            for name, penalty in self.penalties.items()
            if penalty.kind != PLAIN
        ]
        table = robustness_table(self.epsilons, correct, tried, len(held_out.x))
        examined = self._examine(chosen, batch)
        picture = plot_robustness(folder / "robust.png", self.epsilons, correct, examined)
        runs.write_report(folder, table, picture)
        for label, by_attack in correct.items():
            for attack, flags in by_attack.items():
                for epsilon, of_bound in zip(self.epsilons, flags, strict=True):
                    key = f"test/{label}/{attack}/{epsilon:g}"
                    self.log(key, of_bound.float().mean(), batch_size=len(batch.x))

    def area(self, name: str, images: Images) -> Tensor:
        """Accuracy of a network under PGD, the mean over the bounds, with 0 among them."""
        return self.correct(name, images, PGD).float().mean()

    def correct(self, name: str, images: Images, attack: str) -> Tensor:
        """Which images a network classifies correctly under an attack, [epsilons, n]."""
        network, label = _frozen(self.networks[name]), images.label.cpu()
        attacked = (self.attacked(name, images, attack, epsilon) for epsilon in self.epsilons)
        return torch.stack([attacks.is_correct(network, x, label) for x in attacked])

    def attacked(self, name: str, images: Images, attack: str, epsilon: float) -> Tensor:
        """The images [n, 64] that an attack makes, on the CPU in float64.

        In float32 the gradient of a confident network may be rounded to zero, and a network without a
        gradient would seem robust.
        """
        problem = _frozen(self.networks[name]), images.x.cpu().double(), images.label.cpu()
        if not epsilon:
            return problem[1]
        if attack == FGSM:
            return attacks.fgsm(*problem, WHITE_TO_BLACK * epsilon)
        generator = torch.Generator().manual_seed(ATTACK_SEED)
        return attacks.pgd(
            *problem, WHITE_TO_BLACK * epsilon, self.steps, self.restarts, generator=generator
        )

    def _examine(self, chosen: dict[str, str], images: Images) -> Examined:
        """The first image of each digit, attacked by PGD within the middle bound for each network."""
        epsilon = self.epsilons[1:][(len(self.epsilons) - 2) // 2]
        firsts = [(images.label == c).nonzero()[:1, 0] for c in range(CLASSES)]
        some = Images(*(part.cpu() for part in select(images, torch.cat(firsts))))
        rows = {"digit": Predicted(some.x, some.label, some.label)}
        gradients = {}
        for label, name in chosen.items():
            network = _frozen(self.networks[name])
            x = self.attacked(name, some, PGD, epsilon)
            rows[label] = Predicted(x, network(x).argmax(1), some.label)
            gradients[label] = attacks.input_gradient(network, some.x.double(), some.label)
        return Examined(epsilon, rows, gradients)


class Penalty(NamedTuple):
    """What a network is trained with: a kind in PENALTIES and its weight, or PLAIN."""

    kind: str
    weight: float = 0.0


def choose_weights(penalties: dict[str, Penalty], areas: dict[str, float]) -> dict[str, str]:
    """Of each kind the network of the largest area, the first of several, by its label in tables."""
    chosen: dict[str, str] = {}
    for kind in dict.fromkeys(penalty.kind for penalty in penalties.values()):
        names = [name for name, penalty in penalties.items() if penalty.kind == kind]
        best = max(names, key=areas.__getitem__)
        weight = "" if kind == PLAIN else f", {penalties[best].weight:g}"
        chosen[f"{LABELS[kind]}{weight}"] = best
    return chosen


def _losses(logits: Tensor, label: Tensor) -> Tensor:
    return hog.ops.softmax_cross_entropy(logits, label, reduction="none")


def _frozen(network: nn.Module) -> nn.Module:
    """A copy in float64 on the CPU that is not trained.

    It can be differentiated also where Lightning tests in inference mode, whose tensors cannot.
    """
    with torch.inference_mode(False):
        return deepcopy(network).cpu().double().requires_grad_(False)
