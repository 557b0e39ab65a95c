"""Meta-learners by the names that configs use."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import hoglib as hog
from experiments.checks import one_of
from hoglib.errors import ArgumentValueError
from hoglib.meta import Learner, LearnerOptions

ALGORITHMS: dict[str, type[Learner]] = {
    "maml": hog.MAML,
    "reptile": hog.meta.Reptile,
    "imaml": hog.meta.IMAML,
}
SET_BY_EXPERIMENTS = ("model", "criterion", "compile", "options")


def make_learner(
    algorithm: str, network: nn.Module, criterion: Any, options: dict[str, Any]
) -> Learner:
    """A learner of hoglib by name.

    Args:
        algorithm: A name in ALGORITHMS.
        network: The network that is meta-learned.
        criterion: Loss of outputs and targets.
        options: Further arguments of the learner's class.
    Returns:
        The learner.
    """
    kind = ALGORITHMS[one_of("algorithm", algorithm, ALGORITHMS)]
    # the signature has the shared options as one, **options
    parameters = (*inspect.signature(kind).parameters, *LearnerOptions.__annotations__)
    known = [name for name in parameters if name not in SET_BY_EXPERIMENTS]
    if not options.keys() <= set(known):
        taken = options.keys() & set(SET_BY_EXPERIMENTS)
        raise ArgumentValueError(
            f"options: expected arguments of {kind.__name__}, which are {', '.join(known)}, got "
            f"{', '.join(options)}" + (" (some are set by the model itself)." if taken else ".")
        )
    return kind(network, criterion, **options)


def errors_after(maml: Learner, tasks: tuple[Any, Any], steps: Sequence[int]) -> Tensor:
    """Query losses [len(steps), tasks] after each number of gradient steps, in ascending order."""

    def of_task(support: Any, query: Any) -> Tensor:
        params, done, errors = hog.trainable_params(maml.model), 0, []
        for count in steps:
            # from where the last count ended; the state of a rule, if it has one, starts again
            params, done = maml.adapt(support, params=params, steps=count - done), count
            errors.append(maml.objective(params, query))
        return torch.stack(errors)

    with torch.no_grad():
        return torch.func.vmap(of_task, out_dims=1)(*tasks)
