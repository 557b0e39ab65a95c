"""Few-shot classification of images: MAML and its kin, and a prototypical network beside them."""

from typing import Any

import torch
from torch import Tensor

import hoglib as hog
from experiments import logs, runs
from experiments.checks import at_least, learning_rate, one_of
from experiments.few_shot.episodes import Batch
from experiments.few_shot.plots import plot_curves, plot_episode
from experiments.few_shot.prototypes import Prototypes, nearest_centroid
from experiments.few_shot.table import LearnerResult, classification_table, describe_learner
from experiments.shared.compile_choice import CompileChoice, CompileOption, WithCompileChoice
from experiments.shared.experiment import Experiment
from experiments.shared.layout import mean_and_interval
from experiments.shared.learners import ALGORITHMS, make_learner
from experiments.shared.networks import conv4
from experiments.shared.second_order import SecondOrderProblem
from hoglib.errors import ArgumentValueError

Tasks = tuple[Batch, Batch]
PROTOTYPES = "prototypes"


class FewShotClassification(WithCompileChoice, Experiment):
    """Learns from tasks of N classes to tell new classes apart from K images of each.

    Args:
        ways: N, as in the data.
        algorithm: "maml", "reptile", "imaml", or "prototypes" for a prototypical network of the same
            convolutions.
        channels: Channels of the convolutions.
        inner_lr: Learning rate of the inner loop.
        inner_steps: Steps of the inner loop in training.
        test_steps: Steps of the inner loop in held-out tasks. Default: inner_steps.
        first_order: Whether MAML leaves out second derivatives (FOMAML).
        options: Further arguments of `hoglib.MAML`, `hoglib.meta.Reptile` or `hoglib.meta.IMAML`.
        lr: Learning rate of the outer Adam, which falls linearly to zero over the run.
        compile: Whether MAML's meta-gradient runs as a graph: null, if that pays for the steps of the
            run, compiled if that pays too; true; false; or "eager" or "inductor", as in `hoglib.MAML`.
        size: Pixels of a side of the images.
        inputs: Colour channels of the images.
    """

    def __init__(
        self,
        ways: int = 5,
        algorithm: str = "maml",
        channels: int = 64,
        inner_lr: float = 0.4,
        inner_steps: int = 1,
        test_steps: int | None = None,
        first_order: bool = False,
        options: dict[str, Any] | None = None,
        lr: float = 1e-3,
        compile: CompileOption = None,
        size: int = 28,
        inputs: int = 1,
    ) -> None:
        super().__init__()
        one_of("algorithm", algorithm, [*ALGORITHMS, PROTOTYPES])
        at_least("channels", channels, 1)
        self.ways = at_least("ways", ways, 2)
        self.lr = learning_rate("lr", lr)
        test_steps = inner_steps if test_steps is None else test_steps
        self.test_steps = at_least("test_steps", test_steps, 0)
        self.algorithm = algorithm
        inner: dict[str, Any] = {}
        self.learner: Any
        if algorithm == PROTOTYPES:
            if options:
                raise ArgumentValueError(
                    f"options: expected none for prototypes, which take no inner steps, got "
                    f"{', '.join(options)}; leave them out."
                )
            self.learner = Prototypes(conv4(None, channels, inputs, size, statistics=True))
        else:
            inner = {"inner_lr": inner_lr, "inner_steps": inner_steps, **(options or {})}
            if first_order:
                inner["first_order"] = True  # an argument of MAML alone
            # inner loops normalise by the batch: running statistics would be of other parameters
            network = conv4(ways, channels, inputs, size, statistics=False)
            self.learner = make_learner(algorithm, network, hog.ops.softmax_cross_entropy, inner)
        maml = self.learner if isinstance(self.learner, hog.MAML) else None
        self.compile_choice = CompileChoice(compile, maml, f"{algorithm}, whose loss is not MAML's")
        self.label = describe_learner(algorithm, inner)
        self.options = {"algorithm": algorithm, "channels": channels, "ways": ways, **inner}
        self._steps_before = 0  # steps of the checkpoint that was loaded

    def setup(self, stage: str) -> None:
        data = self.data
        if data.ways != self.ways:
            raise ArgumentValueError(
                f"ways: expected {data.ways} outputs, as there are classes in a task of the data, got "
                f"{self.ways}; give --model.ways {data.ways} or --data.ways {self.ways}."
            )

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        self._steps_before = checkpoint["global_step"]

    def training_step(self, batch: Tasks, batch_idx: int) -> Tensor:
        return self.meta_step(self.learner, batch)

    def second_order_problem(self, batch: Tasks) -> SecondOrderProblem:
        """The loss on the support set of a task, by the parameters: what inner steps descend.

        Of prototypes, which need no second derivatives, the loss of the query images.
        """
        ((x, y), _), model = batch, self.learner.model
        if self.algorithm != PROTOTYPES:
            return self.learner.inner_objective, hog.trainable_params(model), (x[0], y[0])
        of_tasks: Any = Prototypes.loss
        loss = hog.functional_loss(self.learner, forward=of_tasks)
        return loss, dict(self.learner.named_parameters()), batch

    def validation_step(self, batch: Tasks, batch_idx: int) -> None:
        # of this model: that of pixels is the same at each validation
        accuracies = self.accuracies(batch)[:, 0]
        self.log("val/accuracy", accuracies.mean(), prog_bar=True, batch_size=len(accuracies))

    def on_test_start(self) -> None:
        self._accuracies: list[Tensor] = []  # of test tasks, by this model and by pixels

    def test_step(self, batch: Tasks, batch_idx: int) -> None:
        if not self._accuracies:
            self._first_batch = batch
        self._accuracies.append(self.accuracies(batch).cpu())
        own = self._accuracies[-1][:, 0]
        self.log("test/accuracy", own.mean(), batch_size=len(own))

    def on_test_epoch_end(self) -> None:
        folder = runs.run_folder(self.trainer)
        accuracies = torch.cat(self._accuracies)
        data = self.data
        task = {"source": data.source or "glyphs", "ways": data.ways, "shots": data.shots}
        own = LearnerResult(
            self.label,
            *mean_and_interval(accuracies[:, 0]),
            parameters=sum(p.numel() for p in self.parameters()),
            # of a checkpoint that is tested without training, the steps are those that it was saved
            # after
            steps=self.trainer.global_step or self._steps_before,
        )
        pixels = LearnerResult("nearest mean image", *mean_and_interval(accuracies[:, 1]), 0, 0)
        runs.write_summary(folder, {"task": task, **own._asdict()})
        # runs on other tasks are not comparable
        others = [
            LearnerResult(*(summary[name] for name in LearnerResult._fields))
            for summary in runs.summaries(folder)
            if summary.get("task") == task
        ]
        title = f"{data.ways}-way {data.shots}-shot, {task['source']}"
        table = classification_table(own, others, pixels, title, len(accuracies))
        pictures = [self._plot_first_episode(folder / "episode.png", title)]
        if curves := logs.curves(folder):
            shown = {key: points for key, points in curves.items() if key == "val/accuracy"}
            file = folder / "training_curve.png"
            pictures.append(plot_curves(file, shown, "accuracy on validation tasks"))
        runs.write_report(folder, table, *pictures)

    def _plot_first_episode(self, file: Any, title: str) -> Any:
        (x, y), (query_x, query_y) = ((part[0] for part in batch) for batch in self._first_batch)
        classes = self.predict_classes((x, y), query_x)
        return plot_episode(
            file, x.cpu(), query_x.cpu(), query_y.cpu(), classes.cpu(), f"{self.label}, {title}"
        )

    def accuracies(self, batch: Tasks) -> Tensor:
        """Query accuracy in each task [tasks, 2]: of this model, and of the nearest mean image."""
        rows = []
        # task by task: without running statistics batch norm normalises by all images of a batch,
        # and the prediction for a task must not depend on the others
        for support_x, support_y, x, y in zip(*batch[0], *batch[1], strict=True):
            support = support_x, support_y
            predictions = self.predict_classes(support, x), nearest_centroid(support, x)
            rows.append(torch.stack([(p == y).double().mean() for p in predictions]))
        return torch.stack(rows)

    def predict_classes(self, support: Batch, x: Tensor) -> Tensor:
        """The class [n] of each image of one task."""
        with torch.no_grad():
            params = self.learner.adapt(support, steps=self.test_steps)
            classes: Tensor = self.learner(x, params=params).argmax(1)
        return classes
