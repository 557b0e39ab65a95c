"""The same by hoglib, as its user writes it."""

from collections.abc import Callable
from typing import Any

import hoglib as hog
from experiments.benchmarks.critics import taken
from experiments.benchmarks.meta.tasks import Learner
from experiments.benchmarks.meta.with_torch import Call, Found


def maml(**options: Any) -> Callable[[Learner], Call]:
    def made(learner: Learner) -> Call:
        learner = learner.apart()
        inner: Any = {"inner_lr": learner.inner_lr, "inner_steps": learner.inner_steps}
        maml = hog.MAML(learner.model, learner.criterion, **inner, **options)

        def run() -> Found:
            value = maml.loss((learner.support, learner.query))
            value.backward()
            return taken(value.detach(), learner.model)

        return run

    return made
