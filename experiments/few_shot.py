"""Few-shot classification of images: MAML and its kin, and a prototypical network beside them."""

from typing import Any

import torch
from torch import Tensor

import hoglib as hog
from experiments import plots, runs, tables
from experiments.belonging import Belonging
from experiments.compiling import Choice, Wanted
from experiments.learners import ALGORITHMS, learner
from experiments.networks import conv4
from experiments.prototypes import Prototypes, nearest_centroid
from experiments.schedules import stepwise
from hoglib._core import validation
from hoglib.errors import ArgumentValueError

Batch = tuple[Tensor, Tensor]
Tasks = tuple[Batch, Batch]
PROTOTYPES = "prototypes"


def of_tasks(model: Any, tasks: Tasks) -> Any:
    return model.loss(tasks)


def as_it_is(loss: Tensor, tasks: Tasks) -> Tensor:
    return loss


class FewShotClassification(Belonging):
    """Learns from tasks of N classes to tell new classes apart from K images of each.

    ways: N, as in the data; algorithm: "maml", "reptile", "imaml", or "prototypes" for a prototypical
    network of the same convolutions; channels: of these; inner_lr, inner_steps: of the inner loop;
    test_steps: as many in held-out tasks (inner_steps by default); first_order: MAML without second
    derivatives (FOMAML); options: any further argument of `hoglib.MAML`, `hoglib.meta.Reptile` or
    `hoglib.meta.IMAML`; lr: of the outer Adam; decay: whether it falls linearly to zero; compile:
    whether MAML's meta-gradient runs as a graph, as in `experiments.maml`; size, inputs: pixels of a
    side and colour channels of the images.
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
        decay: bool = True,
        compile: Wanted = None,
        size: int = 28,
        inputs: int = 1,
    ) -> None:
        super().__init__()
        validation.one_of("algorithm", algorithm, [*ALGORITHMS, PROTOTYPES])
        validation.at_least("channels", channels, 1)
        self.ways = validation.at_least("ways", ways, 2)
        self.lr = validation.positive("lr", lr)
        self.decay = validation.flag("decay", decay)
        self.test_steps = validation.at_least(
            "test_steps", inner_steps if test_steps is None else test_steps, 0
        )
        self.algorithm = algorithm
        how: dict[str, Any] = {}
        self.learner: Any
        if algorithm == PROTOTYPES:
            if options:
                raise ArgumentValueError(
                    f"options: expected none for prototypes, which take no inner steps, got "
                    f"{', '.join(options)}; leave them out."
                )
            self.learner = Prototypes(conv4(None, channels, inputs, size, statistics=True))
        else:
            how = {"inner_lr": inner_lr, "inner_steps": inner_steps, **(options or {})}
            if first_order:
                how["first_order"] = True  # which only MAML knows
            network = conv4(ways, channels, inputs, size, statistics=False)
            self.learner = learner(algorithm, network, hog.ops.softmax_cross_entropy, how)
        maml = self.learner if isinstance(self.learner, hog.MAML) else None
        self.compiling = Choice(compile, maml, f"{algorithm}, whose loss is none of MAML's")
        self.label = tables.described(algorithm, how)
        self.options = {"algorithm": algorithm, "channels": channels, "ways": ways, **how}
        self._right: list[Tensor] = []  # share of each test task, by this model and by pixels
        self._shown: Tasks | None = None
        self._trained = 0  # steps, of the checkpoint

    def setup(self, stage: str) -> None:
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        if data.ways != self.ways:
            raise ArgumentValueError(
                f"ways: expected {data.ways} outputs, as there are classes in a task of the data, got "
                f"{self.ways}; give --model.ways {data.ways} or --data.ways {self.ways}."
            )

    def on_train_start(self) -> None:
        self.compiling.decide(self.trainer)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        self.compiling.save(checkpoint)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        self.compiling.load(checkpoint)
        self._trained = checkpoint["global_step"]

    def configure_optimizers(self) -> Any:
        return stepwise(self, torch.optim.Adam(self.parameters(), lr=self.lr), self.decay)

    def training_step(self, batch: Tasks, batch_idx: int) -> Tensor:
        tasks, weight = hog.meta.shard(batch)  # of this process, if there are several
        loss = weight * self.learner.loss(tasks)
        validation.finite("meta-loss", loss, "Lower inner_lr or lr.")
        self.log("train/loss", loss.detach(), prog_bar=True, batch_size=1, sync_dist=True)
        return loss

    def second_order_problem(self, batch: Tasks) -> tuple[Any, dict[str, Tensor], Any]:
        """The loss on the support set of a task, by the parameters: what inner steps descend.

        Of prototypes, which need no second derivatives, the loss of the query images.
        """
        ((x, y), _), model = batch, self.learner.model
        if self.algorithm != PROTOTYPES:
            return self.learner.inner_objective, hog.trainable_params(model), (x[0], y[0])

        return (
            hog.functional_loss(self.learner, as_it_is, forward=of_tasks),
            dict(self.learner.named_parameters()),
            batch,
        )

    def predicted(self, support: Batch, x: Tensor) -> Tensor:
        """The class [n] of each image of one task."""
        with torch.no_grad():
            params = self.learner.adapt(support, steps=self.test_steps)
            classes: Tensor = self.learner(x, params=params).argmax(1)
        return classes

    def right(self, batch: Tasks) -> Tensor:
        """The share of query images told right [tasks, 2], by this model and by pixels."""
        (x, y), (query_x, query_y) = batch
        return torch.stack(
            [
                torch.stack(
                    [
                        (classes == query_y[i]).double().mean()
                        for classes in (
                            self.predicted((x[i], y[i]), query_x[i]),
                            nearest_centroid((x[i], y[i]), query_x[i]),
                        )
                    ]
                )
                for i in range(len(x))
            ]
        )

    def validation_step(self, batch: Tasks, batch_idx: int) -> None:
        shares = self.right(batch)[:, 0]
        self.log("val/accuracy", shares.mean(), prog_bar=True, batch_size=len(shares))

    def on_test_start(self) -> None:
        self._right, self._shown = [], None

    def test_step(self, batch: Tasks, batch_idx: int) -> None:
        self._right.append(self.right(batch).cpu())
        if self._shown is None:
            self._shown = batch
        shares = self._right[-1][:, 0]
        self.log("test/accuracy", shares.mean(), batch_size=len(shares))

    def on_test_epoch_end(self) -> None:
        folder = runs.run_folder(self.trainer)
        right = torch.cat(self._right)
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        task = {"source": data.source or "glyphs", "ways": data.ways, "shots": data.shots}
        own = tables.FewShot(
            self.label, *tables.mean_and_interval(right[:, 0]),
            sum(p.numel() for p in self.parameters()), self._steps(),
        )  # fmt: skip
        pixels = tables.FewShot("nearest mean image", *tables.mean_and_interval(right[:, 1]), 0, 0)
        runs.write_summary(folder, {"task": task, **own._asdict()})
        others = [
            tables.FewShot(*(summary[name] for name in tables.FewShot._fields))
            for summary in runs.summaries(folder)
            if summary.get("task") == task
        ]
        title = f"{data.ways}-way {data.shots}-shot, {task['source']}"
        table = tables.classified(own, others, pixels, title, len(right))
        print(f"\n{table}\n")
        (folder / "table.txt").write_text(table + "\n")
        saved = [folder / "table.txt", self._picture(folder / "episode.png", title)]
        if (folder / "metrics.csv").exists():
            saved.append(
                plots.few_shot_curves(folder / "metrics.csv", folder / "training_curve.png")
            )
        print("Saved " + ", ".join(str(path) for path in saved))

    def _steps(self) -> int:
        """Optimizer steps behind these parameters: of this fit, or of the checkpoint."""
        return self.trainer.global_step or self._trained

    def _picture(self, file: Any, title: str) -> Any:
        assert self._shown is not None
        (x, y), (query_x, query_y) = ((part[0] for part in batch) for batch in self._shown)
        classes = self.predicted((x, y), query_x)
        return plots.episode(
            x.cpu(), query_x.cpu(), query_y.cpu(), classes.cpu(), f"{self.label}, {title}", file
        )
